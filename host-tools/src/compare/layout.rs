//! Where the host-side way puts its records: stripes of k+m shards, one on each member namespace.
//!
//! Owns the cut of a stripe into shards and the way back from a record to the blocks that hold it. Must not know sockets.
//! It mirrors the pool's own placement (records packed over k data shards, a 256-byte header a shard, 4 KiB alignment), so
//! that both ways write the same amount. Invariant: a shard that is written carries the checksum of its data.

use nvmf_target::buffer::IoBuf;
use offload_svc::stages::crc;
use offload_svc::stages::rs::{Code, CodeError};

/// Bytes before a shard's data; as much as the pool's own shards have.
pub const SHARD_HEADER_BYTES: usize = 256;
/// Shards are a whole number of these, in bytes.
pub const SHARD_ALIGN_BYTES: usize = 4096;

/// Part of a record on one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Which data shard.
    pub shard: usize,
    /// Where in the shard, header included.
    pub offset: usize,
    /// How many bytes.
    pub len: usize,
}

/// Data bytes of each shard for `payload_bytes` over `k` data shards: whole blocks once the header is added.
pub fn shard_data_bytes(payload_bytes: usize, k: usize) -> usize {
    let share = payload_bytes.div_ceil(k.max(1));
    (share + SHARD_HEADER_BYTES).next_multiple_of(SHARD_ALIGN_BYTES) - SHARD_HEADER_BYTES
}

/// The longest payload whose shards are at most `shard_bytes` long.
pub fn payload_limit(shard_bytes: usize, k: usize) -> usize {
    (shard_bytes / SHARD_ALIGN_BYTES * SHARD_ALIGN_BYTES).saturating_sub(SHARD_HEADER_BYTES) * k
}

/// The shards that hold `payload`, data first, each ready to be written.
pub fn shards(code: &Code, sequence: u64, payload: &[u8]) -> Result<Vec<IoBuf>, CodeError> {
    let data_bytes = shard_data_bytes(payload.len(), code.data());
    let mut shards: Vec<IoBuf> = (0..code.shards()).map(|_| IoBuf::heap(SHARD_HEADER_BYTES + data_bytes)).collect();
    for (shard, bytes) in shards.iter_mut().zip(payload.chunks(data_bytes)) {
        if let Some(place) = shard.get_mut(SHARD_HEADER_BYTES..SHARD_HEADER_BYTES + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
    let (data, parity) = shards.split_at_mut(code.data());
    let data: Vec<&[u8]> = data.iter().map(|s| body(s)).collect();
    let mut parity: Vec<&mut [u8]> = parity.iter_mut().filter_map(|s| s.get_mut(SHARD_HEADER_BYTES..)).collect();
    code.encode(&data, &mut parity)?;
    for (shard, index) in shards.iter_mut().zip(0u8..) {
        write_header(shard, code, sequence, index, payload.len());
    }
    Ok(shards)
}

/// A shard's data.
pub fn body(shard: &[u8]) -> &[u8] {
    shard.get(SHARD_HEADER_BYTES..).unwrap_or_default()
}

/// Little-endian: magic, k, m, index, sequence, payload length, CRC32C of the data, CRC32C of the header.
fn write_header(shard: &mut [u8], code: &Code, sequence: u64, index: u8, payload_bytes: usize) {
    let data_crc = crc::crc32c(body(shard));
    let Some(header) = shard.first_chunk_mut::<SHARD_HEADER_BYTES>() else { return };
    header[0..4].copy_from_slice(b"SLHS");
    header[4..7].copy_from_slice(&[code.data() as u8, code.parity() as u8, index]);
    header[8..16].copy_from_slice(&sequence.to_le_bytes());
    header[16..24].copy_from_slice(&(payload_bytes as u64).to_le_bytes());
    header[24..28].copy_from_slice(&data_crc.to_le_bytes());
    let header_crc = crc::crc32c(&header[..SHARD_HEADER_BYTES - 4]);
    header[SHARD_HEADER_BYTES - 4..].copy_from_slice(&header_crc.to_le_bytes());
}

/// The pieces of the payload's bytes `offset..offset + len`.
pub fn pieces(data_bytes: usize, offset: usize, len: usize) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(2);
    let (mut at, end) = (offset, offset + len);
    while at < end && data_bytes > 0 {
        let within = at % data_bytes;
        let take = (data_bytes - within).min(end - at);
        pieces.push(Piece { shard: at / data_bytes, offset: SHARD_HEADER_BYTES + within, len: take });
        at += take;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::SplitMix64;

    #[test]
    fn every_range_of_a_payload_is_found_again_on_the_shards() {
        let code = Code::new(4, 2).unwrap();
        let mut random = SplitMix64(9);
        for len in [1usize, 4096, 15_360, 15_361, 100_000, 1 << 20] {
            let mut payload = vec![0u8; len];
            random.fill(&mut payload);
            let shards = shards(&code, 7, &payload).unwrap();
            let data_bytes = shard_data_bytes(len, 4);
            assert!(shards.iter().all(|s| s.len() == SHARD_HEADER_BYTES + data_bytes && s.len().is_multiple_of(4096)));
            for _ in 0..50 {
                let offset = random.below(len as u64) as usize;
                let count = 1 + random.below((len - offset) as u64) as usize;
                let mut found = Vec::new();
                for piece in pieces(data_bytes, offset, count) {
                    found.extend_from_slice(&shards[piece.shard][piece.offset..piece.offset + piece.len]);
                }
                assert_eq!(found, payload[offset..offset + count]);
            }
        }
    }

    #[test]
    fn any_two_shards_can_be_rebuilt() {
        let code = Code::new(4, 2).unwrap();
        let mut payload = vec![0u8; 50_000];
        SplitMix64(1).fill(&mut payload);
        let shards = shards(&code, 1, &payload).unwrap();
        for (a, b) in (0..6).flat_map(|a| (a + 1..6).map(move |b| (a, b))) {
            let present: Vec<(usize, &[u8])> =
                (0..6).filter(|i| *i != a && *i != b).map(|i| (i, body(&shards[i]))).collect();
            let mut lost = [(a, body(&shards[a]).to_vec()), (b, body(&shards[b]).to_vec())];
            lost.iter_mut().for_each(|(_, bytes)| bytes.fill(0));
            code.recover(&present, &mut lost).unwrap();
            assert!(lost.iter().all(|(i, bytes)| bytes == body(&shards[*i])), "{a}, {b}");
        }
    }

    #[test]
    fn the_limit_is_the_most_that_fits() {
        for (shard, k) in [(1 << 20, 4), (4096, 1), (1 << 16, 10)] {
            let limit = payload_limit(shard, k);
            assert!(SHARD_HEADER_BYTES + shard_data_bytes(limit, k) <= shard);
            assert!(SHARD_HEADER_BYTES + shard_data_bytes(limit + 1, k) > shard);
        }
    }
}
