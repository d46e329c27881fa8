//! Reading: from a range of a shard to plain bytes, by the healthy way or by rebuilding.
//!
//! Owns the way from extents to opened records. Must not know how requests are answered. Invariant: bytes are handed out
//! only from a record that opened under the birth the map names; all else is an error for exactly the blocks it covers.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::pin::pin;

use futures::future::{Either, join_all, select};

use super::core::{Core, Shard};
use super::map::{Extent, RecordLocation};
use super::members::Failure;
use super::options::BLOCK_BYTES;
use super::segments::Segments;
use super::stripe::ShardRange;
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
        loop {
            let extents: Vec<(u64, Extent)> = shard.map.borrow().overlapping(range.clone()).collect();
            let read = self.read_extents(shard, &extents, &range, sink).await;
            // What was overwritten or moved meanwhile may have been given back: then it is not lost, but old.
            if read.is_ok() || shard.map.borrow().overlapping(range.clone()).eq(extents) {
                return read;
            }
        }
    }

    async fn read_extents(
        &self,
        shard: &Shard,
        extents: &[(u64, Extent)],
        range: &Range<u64>,
        sink: &dyn Sink,
    ) -> Result<(), LostBlock> {
        let shift = shard.volume.block_shift;
        let segments = extents.iter().map(|(_, extent)| extent.location.stripe.segment);
        let _pins = Pins::new(&self.shared.segments, segments);
        zero_holes(extents, range, shift, sink);
        let records = group(shard, extents);
        let reads = records.iter().map(|record| {
            self.read_record(record, |lba, bytes| sink.put(((lba - range.start) << shift) as usize, bytes))
        });
        let first = |record: &RecordRead| record.parts.iter().map(|part| part.lba).min();
        let results = join_all(reads).await;
        let lost = records.iter().zip(results).filter(|(_, ok)| !ok).filter_map(|(record, _)| first(record)).min();
        lost.map_or(Ok(()), |lba| Err(LostBlock(lba)))
    }

    /// Opens a record and hands out the parts; `false` if it is lost.
    async fn read_record(&self, record: &RecordRead, put: impl Fn(u64, &[u8])) -> bool {
        if let Some(bytes) = self.fetch(&record.location).await
            && self.open_parts(record, &bytes, &put)
        {
            return true;
        }
        self.read_rebuilt(record, &put).await
    }

    /// Reads the whole stripe, rebuilds what is missing, and repairs it on the members.
    async fn read_rebuilt(&self, record: &RecordRead, put: &impl Fn(u64, &[u8])) -> bool {
        let location = &record.location;
        let Some(sequence) = self.shared.segments.sequence_of(location.stripe.segment) else { return false };
        let patience = self.shared.options.slow_read;
        let read = self.stripes.read_patiently(location.stripe, sequence, patience).await;
        let Ok(stripe) = read else { return false };
        let start = location.payload_offset as usize;
        let bytes = stripe.payload.get(start..start + location.stored_bytes as usize);
        let opened = bytes.is_some_and(|bytes| self.open_parts(record, bytes, put));
        if stripe.bad != 0 {
            self.stripes.repair(&stripe).await;
        }
        opened
    }

    fn open_parts(&self, record: &RecordRead, bytes: &[u8], put: &impl Fn(u64, &[u8])) -> bool {
        let mut scratch = self.scratch.borrow_mut();
        let opened = self.codec.borrow_mut().open(bytes, Kind::Data, &record.birth, &mut scratch);
        if let Err(error) = opened {
            tracing::debug!(?record.location, %error, "record does not open");
            return false;
        }
        let shift = record.birth.block_shift;
        for part in &record.parts {
            let start = usize::from(part.extent.record_offset) << shift;
            let end = start + (usize::from(part.extent.count) << shift);
            let Some(plain) = scratch.get(start..end) else { return false };
            put(part.lba, plain);
        }
        true
    }

    /// Waits for reads, but no longer than a member may take before the others are asked.
    async fn in_time<T>(&self, reads: impl Future<Output = T>) -> Option<T> {
        let patience = self.shared.options.slow_read;
        if patience.is_zero() {
            return Some(reads.await);
        }
        let late = self.env().sleep_until(self.env().now() + patience);
        match select(pin!(reads), late).await {
            Either::Left((results, _)) => Some(results),
            Either::Right(_) => None,
        }
    }

    /// A record's bytes from the members that hold them, unverified; `None` if one of them does not answer well.
    async fn fetch(&self, location: &RecordLocation) -> Option<Vec<u8>> {
        let pieces: Vec<ShardRange> = location.stripe.pieces(location.payload_offset, location.stored_bytes).collect();
        let span = |piece: &ShardRange| {
            let block = BLOCK_BYTES as u32;
            let start = piece.offset / block * block;
            (start, (piece.offset + piece.len).next_multiple_of(block) - start)
        };
        let members = self.shared.set.count();
        if pieces.iter().any(|piece| self.stripes.is_slow(location.stripe.member_of(piece.shard, members))) {
            return None;
        }
        let _room = self.stripes.room(pieces.len()).await;
        let base = self.stripes.offset(&location.stripe);
        let answered: Vec<Cell<bool>> = pieces.iter().map(|_| Cell::new(false)).collect();
        let reads = pieces.iter().zip(&answered).map(|(piece, answered)| {
            let (start, len) = span(piece);
            let member = location.stripe.member_of(piece.shard, members);
            async move {
                let result = self.stripes.io.read(member, base + u64::from(start), len as usize).await;
                answered.set(true);
                (member, result)
            }
        });
        let Some(results) = self.in_time(join_all(reads)).await else {
            let slow = pieces.iter().zip(&answered).filter(|(_, answered)| !answered.get());
            let slow: BTreeSet<_> = slow.map(|(piece, _)| location.stripe.member_of(piece.shard, members)).collect();
            slow.into_iter().for_each(|place| self.stripes.was_slow(place, self.shared.options.slow_read));
            return None;
        };
        let mut bytes = Vec::with_capacity(location.stored_bytes as usize);
        let mut late = 0;
        let mut whole = true;
        for (piece, (member, result)) in pieces.iter().zip(results) {
            match result {
                Ok(buf) => {
                    let start = (piece.offset - span(piece).0) as usize;
                    bytes.extend_from_slice(&buf[start..start + piece.len as usize]);
                }
                Err(failure) => {
                    whole = false;
                    if failure == Failure::Timeout {
                        late |= 1 << member;
                    }
                }
            }
        }
        self.stripes.put_out_later(late).await;
        whole.then_some(bytes)
    }
}

fn zero_holes(extents: &[(u64, Extent)], range: &Range<u64>, shift: u8, sink: &dyn Sink) {
    let mut at = range.start;
    let zero = |from: u64, to: u64| {
        if from < to {
            sink.zero(((from - range.start) << shift) as usize, ((to - from) << shift) as usize);
        }
    };
    for (lba, extent) in extents {
        zero(at, *lba);
        at = lba + u64::from(extent.count);
    }
    zero(at, range.end);
}

/// Groups extents by record.
fn group(shard: &Shard, extents: &[(u64, Extent)]) -> Vec<RecordRead> {
    let mut records: Vec<RecordRead> = Vec::new();
    for &(lba, extent) in extents {
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
