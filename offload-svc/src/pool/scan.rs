//! Finding the stripes of a segment and the records of a stripe, without a map.
//!
//! Owns the walk over rows and records. Must not know what they are wanted for. Invariant: only what carries the segment's
//! own sequence is found.

use futures::future::join_all;

use super::map::RecordLocation;
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

/// The headers of a segment's stripes, one for each, in order, void ones included.
pub async fn find_stripes(stripes: &StripeIo, used: SegmentUse) -> Vec<ShardHeader> {
    let layout = &stripes.set().layout;
    let blocks = layout.segment_bytes / BLOCK_BYTES as u32;
    // Where nothing is found for this long from the start, nothing has been written: stripes are no longer.
    let patience = layout.shard_bytes_max / BLOCK_BYTES as u32;
    let (mut row, mut found) = (0, Vec::new());
    while row < blocks && (row <= patience || !found.is_empty()) {
        match row_header(stripes, used, row).await {
            Some(header) => {
                row += u32::from(header.location.shard_blocks);
                found.push(header);
            }
            None => row += 1,
        }
    }
    found
}

/// The header that most members have at a row.
async fn row_header(stripes: &StripeIo, used: SegmentUse, row: u32) -> Option<ShardHeader> {
    let place = StripeLocation { segment: used.index, start_block: row, shard_blocks: 1, data_shards: 1, rotation: 0 };
    let offset = stripes.offset(&place);
    let _room = stripes.room(stripes.set().count()).await;
    let members = (0..stripes.set().count()).filter(|member| stripes.set().contains(*member));
    let reads =
        members.map(|member| async move { (member, stripes.io.read(member, offset, BLOCK_BYTES as usize).await) });
    let results = join_all(reads).await;
    let late = results.iter().filter(|(_, result)| matches!(result, Err(super::members::Failure::Timeout)));
    let late = late.fold(0, |late, (member, _)| late | 1 << member);
    stripes.put_out_later(late).await;
    let headers: Vec<ShardHeader> = results
        .into_iter()
        .filter_map(|(_, result)| stripes.parse_header(&result.ok()?))
        .filter(|header| {
            let at = &header.location;
            header.sequence == used.sequence && at.segment == used.index && at.start_block == row
        })
        .collect();
    if let Some(void) = headers.iter().find(|header| header.void) {
        return Some(void.clone());
    }
    let votes = |header: &ShardHeader| headers.iter().filter(|other| other.same_stripe(header)).count();
    headers.iter().max_by_key(|header| votes(header)).cloned()
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
