//! Finding the stripes of a segment and the records of a stripe, without a map.
//!
//! Owns the walk over rows and records. Must not know what they are wanted for. Invariant: only what carries the segment's
//! own sequence is found.

use std::collections::{BTreeMap, BTreeSet};

use futures::future::join_all;
use nvmf_target::buffer::IoBuf;

use super::map::RecordLocation;
use super::members::Failure;
use super::options::BLOCK_BYTES;
use super::segments::SegmentUse;
use super::stripe::{ShardHeader, StripeLocation};
use super::stripe_io::StripeIo;
use crate::stages::record::{Header, HeaderError};

/// A record in a stripe's payload.
pub struct FoundRecord {
    pub header: Header,
    pub location: RecordLocation,
    /// The whole record, if it is one without payload.
    pub marker: Vec<u8>,
}

/// The headers of a segment's stripes, one for each, in order, void ones included. Every row is looked at: stripes that
/// found no room leave holes, and what follows a hole counts.
pub async fn find_stripes(stripes: &StripeIo, used: SegmentUse) -> Vec<ShardHeader> {
    look_for_stripes(stripes, used).await.0
}

/// The same, and whether more members than the parity covers gave no answer somewhere: what they have may be missing.
pub async fn look_for_stripes(stripes: &StripeIo, used: SegmentUse) -> (Vec<ShardHeader>, bool) {
    let layout = &stripes.set().layout;
    let blocks = layout.segment_bytes / BLOCK_BYTES as u32;
    let rows_per_read = layout.shard_bytes_max / BLOCK_BYTES as u32;
    let most = usize::from(layout.parity_shards);
    let (mut row, mut found, mut unheard) = (0, Vec::<ShardHeader>::new(), false);
    while row < blocks {
        // After a long stripe comes another as a rule: then its first row is enough.
        let long = found.last().is_some_and(|last| last.location.shard_blocks >= LONG && ends_at(last) == row);
        let end = (row + if long { 1 } else { rows_per_read }).min(blocks);
        let mut walk = Walk { stripes, used, row, found: &mut found };
        let (rows, silent) = read_rows(stripes, used, row, end - row).await;
        if rows.iter().any(|result| matches!(result, Err(Failure::Error))) {
            // One bad sector must not hide the rows beside it.
            while walk.row < end {
                let (rows, silent) = read_rows(stripes, used, walk.row, 1).await;
                unheard |= silent > most;
                walk.step(&rows, walk.row);
            }
        } else {
            unheard |= silent > most;
            while walk.row < end {
                walk.step(&rows, row);
            }
        }
        row = walk.row;
    }
    (found, unheard)
}

/// What a window's stripes tell of one another, by stream.
#[derive(Default)]
pub struct SeenStreams(BTreeMap<u32, Seen>);

#[derive(Default)]
struct Seen {
    replayed: BTreeSet<u64>,
    written: BTreeSet<u64>,
}

impl SeenStreams {
    /// Takes note of stripes that are whole, and of headers whose stripes are not: what they say of others counts too.
    pub fn add(&mut self, replayed: &[ShardHeader], other: &[ShardHeader]) {
        for header in replayed {
            self.0.entry(header.stream).or_default().replayed.insert(header.number);
        }
        for header in replayed.iter().chain(other) {
            self.0.entry(header.stream).or_default().written.extend(header.history.written_numbers());
        }
    }

    /// Stripes (stream, number) that were written, and answered, and are not there: of those that the checkpoint does
    /// not have already. The last ones before a crash, up to as many as were under way, nobody vouches for.
    pub fn lost(&self, settled: &BTreeMap<u32, u64>) -> Vec<(u32, u64)> {
        let lost_of = |(stream, seen): (&u32, &Seen)| {
            let from = settled.get(stream).copied().unwrap_or(0);
            let lost = seen.written.difference(&seen.replayed).filter(|number| **number >= from);
            lost.map(|number| (*stream, *number)).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(lost_of).collect()
    }
}

/// Rows of a stripe from which on it is better to read its first one alone than all of them.
const LONG: u16 = 8;

fn ends_at(header: &ShardHeader) -> u32 {
    header.location.start_block + u32::from(header.location.shard_blocks)
}

struct Walk<'a> {
    stripes: &'a StripeIo,
    used: SegmentUse,
    row: u32,
    found: &'a mut Vec<ShardHeader>,
}

impl Walk<'_> {
    /// Looks at the next row in what was read from `first` on.
    fn step(&mut self, rows: &[Result<IoBuf, Failure>], first: u32) {
        match self.elect(rows, (self.row - first) as usize * BLOCK_BYTES as usize) {
            Some(header) => {
                self.row += u32::from(header.location.shard_blocks);
                self.found.push(header);
            }
            None => self.row += 1,
        }
    }

    /// The header that most members have at the row.
    fn elect(&self, rows: &[Result<IoBuf, Failure>], offset: usize) -> Option<ShardHeader> {
        let headers: Vec<ShardHeader> = rows
            .iter()
            .filter_map(|result| self.stripes.parse_header(result.as_ref().ok()?.get(offset..)?))
            .filter(|header| {
                let at = &header.location;
                header.sequence == self.used.sequence && at.segment == self.used.index && at.start_block == self.row
            })
            .collect();
        if let Some(void) = headers.iter().find(|header| header.void) {
            return Some(void.clone());
        }
        let votes = |header: &ShardHeader| headers.iter().filter(|other| other.same_stripe(header)).count();
        headers.iter().max_by_key(|header| votes(header)).cloned()
    }
}

/// Rows of a segment from every member of the set, and how many that are still in it gave no answer or an error.
async fn read_rows(stripes: &StripeIo, used: SegmentUse, row: u32, count: u32) -> (Vec<Result<IoBuf, Failure>>, usize) {
    let place = StripeLocation { segment: used.index, start_block: row, shard_blocks: 1, data_shards: 1, rotation: 0 };
    let (offset, len) = (stripes.offset(&place), count as usize * BLOCK_BYTES as usize);
    let _room = stripes.room(stripes.set().count()).await;
    let members = (0..stripes.set().count()).filter(|member| stripes.set().contains(*member));
    let reads = members.map(|member| async move { (member, stripes.io.read(member, offset, len).await) });
    let results = join_all(reads).await;
    let late = results.iter().filter(|(_, result)| matches!(result, Err(Failure::Timeout)));
    let late = late.fold(0, |late, (member, _)| late | 1 << member);
    stripes.put_out_later(late).await;
    let silent = |(member, result): &&(usize, Result<IoBuf, Failure>)| {
        matches!(result, Err(Failure::Timeout | Failure::Error)) && stripes.set().contains(*member)
    };
    let silent = results.iter().filter(silent).count();
    (results.into_iter().map(|(_, result)| result).collect(), silent)
}

/// The records of a payload, in order, and why the walk ended early if it did.
pub fn find_records(stripe: StripeLocation, payload: &[u8]) -> (Vec<FoundRecord>, Option<HeaderError>) {
    let (mut at, mut records) = (0, Vec::new());
    while at < payload.len() {
        let header = match Header::verify(&payload[at..]) {
            Ok(header) => header,
            Err(error) => return (records, Some(error)),
        };
        let stored = header.record_bytes();
        let location = RecordLocation { stripe, payload_offset: at as u32, stored_bytes: stored as u32 };
        let marker = if header.kind.has_payload() { Vec::new() } else { payload[at..at + stored].to_vec() };
        records.push(FoundRecord { header, location, marker });
        at += stored;
    }
    (records, None)
}
