//! Reading: from a range of a shard to plain bytes.
//!
//! Owns the way from runs to opened records. Must not know how requests are answered. Invariant: bytes are handed out
//! only from a record that opened under the birth the map names; all else is an error for exactly the blocks it covers.

use std::ops::Range;

use futures::future::join_all;

use super::core::{Core, Shard};
use super::map::{Extent, RecordLocation, Run, What};
use super::segments::Segments;
use crate::stages::keys::KeyEpoch;
use crate::stages::record::{Birth, Kind};

/// Where plain bytes go; offsets are from the start of the range read.
pub trait Sink {
    fn put(&self, offset: usize, bytes: &[u8]);
    fn zero(&self, offset: usize, len: usize);
}

/// The first block of a range that can't be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostBlock(pub u64);

/// Keeps segments from being used anew while they are read.
pub struct Pins<'a> {
    segments: &'a Segments,
    pinned: Vec<u32>,
}

impl<'a> Pins<'a> {
    /// Must be called while the map still leads to them.
    pub fn new(segments: &'a Segments, which: impl Iterator<Item = u32>) -> Self {
        let mut pinned: Vec<u32> = which.collect();
        pinned.sort_unstable();
        pinned.dedup();
        pinned.iter().for_each(|segment| segments.pin(*segment));
        Self { segments, pinned }
    }
}

impl Drop for Pins<'_> {
    fn drop(&mut self) {
        self.pinned.iter().for_each(|segment| self.segments.unpin(*segment));
    }
}

/// A run of blocks within one record.
struct Part {
    lba: u64,
    extent: Extent,
}

/// Parts of one record, which is read once for all of them.
struct RecordRead {
    location: RecordLocation,
    birth: Birth,
    parts: Vec<Part>,
}

impl Core {
    /// Reads a range of a shard as it is at a moment of the call; blocks in no record are zeroes.
    pub async fn read_range(&self, shard: &Shard, range: Range<u64>, sink: &dyn Sink) -> Result<(), LostBlock> {
        let mut runs = self.look(shard, &range).await;
        loop {
            let read = self.read_runs(shard, &runs, &range, sink).await;
            if read.is_ok() {
                return read;
            }
            // What was overwritten or moved meanwhile may have been given back: then it is not lost, but old.
            let now = self.look(shard, &range).await;
            if now == runs {
                return read;
            }
            runs = now;
        }
    }

    /// The map has led to these runs up to now: nothing was waited for since.
    async fn read_runs(
        &self,
        shard: &Shard,
        runs: &[Run],
        range: &Range<u64>,
        sink: &dyn Sink,
    ) -> Result<(), LostBlock> {
        let shift = shard.volume.block_shift;
        let extents = runs.iter().filter_map(|run| Some((run.lba, *run.extent()?)));
        let _pins = Pins::new(&self.shared.segments, extents.clone().map(|(_, extent)| extent.location.stripe.segment));
        zero_holes(runs, range, shift, sink);
        let records = group(shard, extents);
        let reads = records.iter().map(|record| {
            let place = |part: &Part| ((part.lba - range.start) << shift) as usize;
            self.records.read(&record.location, Kind::Data, &record.birth, move |plain| {
                record.parts.iter().all(|part| {
                    let start = usize::from(part.extent.record_offset) << shift;
                    let bytes = plain.get(start..start + (usize::from(part.extent.count) << shift));
                    bytes.map(|bytes| sink.put(place(part), bytes)).is_some()
                })
            })
        });
        let first = |record: &RecordRead| record.parts.iter().map(|part| part.lba).min();
        let results = join_all(reads).await;
        let lost = records.iter().zip(results).filter(|(_, ok)| !ok).filter_map(|(record, _)| first(record));
        let unknown = runs.iter().filter(|run| run.what == What::Lost).map(|run| run.lba);
        lost.chain(unknown).min().map_or(Ok(()), |lba| Err(LostBlock(lba)))
    }
}

fn zero_holes(runs: &[Run], range: &Range<u64>, shift: u8, sink: &dyn Sink) {
    let mut at = range.start;
    let zero = |from: u64, to: u64| {
        if from < to {
            sink.zero(((from - range.start) << shift) as usize, ((to - from) << shift) as usize);
        }
    };
    for run in runs.iter().filter(|run| run.what != What::Hole) {
        zero(at, run.lba);
        at = run.end();
    }
    zero(at, range.end);
}

/// Groups extents by record.
fn group(shard: &Shard, extents: impl Iterator<Item = (u64, Extent)>) -> Vec<RecordRead> {
    let mut records: Vec<RecordRead> = Vec::new();
    for (lba, extent) in extents {
        let part = Part { lba, extent };
        // Parts of one record with another's between them are rare; a run of neighbours is the rule.
        if let Some(last) = records.last_mut()
            && last.location == extent.location
        {
            last.parts.push(part);
            continue;
        }
        let birth = Birth {
            lineage: shard.volume.lineage,
            key_epoch: KeyEpoch(extent.key_epoch),
            lba: lba - u64::from(extent.record_offset),
            block_count: extent.record_blocks.into(),
            block_shift: shard.volume.block_shift,
            generation: extent.generation,
        };
        records.push(RecordRead { location: extent.location, birth, parts: vec![part] });
    }
    records
}
