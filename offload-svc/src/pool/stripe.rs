//! Stripes: how a payload becomes shards, where they lie, and the header that every shard carries.
//!
//! Owns the geometry and the header's layout. Must not know records, maps or members' state. Invariant: shard `i` of a
//! stripe lies on member `(rotation + i) % (k+m)` at the stripe's offset, and any one good header tells the checksum of
//! every shard.
//!
//! A stripe takes the same bytes of a segment on every member, whether it uses the member or not.

use uuid::Uuid;

use super::codec::{CutShort, Reader, Writer};
use super::options::{BLOCK_BYTES, Layout, MEMBERS_MAX};
use crate::stages::crc::crc32c;

/// Bytes of a shard's header. Reed-Solomon does not cover it: each shard's is its own.
pub const HEADER_BYTES: usize = 256;
const MAGIC: [u8; 4] = *b"SHRD";
const VERSION: u8 = 1;
const CRC_AT: usize = HEADER_BYTES - 4;
const HISTORY_AT: usize = 80 + 4 * MEMBERS_MAX;
/// The stripe was given up after it had been written in part: nothing in it counts.
const FLAG_VOID: u8 = 1;

/// Which use of a segment this is. The nonce is random and known to no host, so that no host can write a block that
/// passes for a stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Sequence {
    pub number: u64,
    pub nonce: u64,
}

/// What a stripe tells of those before it in its stream, so that a mount misses an answered stripe that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct History {
    /// Stripes of the stream whose fate was known when this one was made: all below this number.
    pub settled: u64,
    /// Which of the last 64 of them were written: bit `i` is stripe `settled - 1 - i`. The others were given up.
    pub written: u64,
}

impl History {
    /// The next stripe of the stream is written, or given up.
    pub fn settle(&mut self, written: bool) {
        self.settled += 1;
        self.written = self.written << 1 | u64::from(written);
    }

    /// The numbers of the stripes that it knows to be written.
    pub fn written_numbers(self) -> impl Iterator<Item = u64> {
        let upto = self.settled.min(64);
        (0..upto).filter(move |back| self.written >> back & 1 != 0).map(move |back| self.settled - 1 - back)
    }
}

/// Where a stripe is and how it is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StripeLocation {
    pub segment: u32,
    /// First 4 KiB block in the segment.
    pub start_block: u32,
    /// A shard's length in 4 KiB blocks.
    pub shard_blocks: u16,
    /// Data shards in use: 1 to k.
    pub data_shards: u8,
    /// The member of shard 0.
    pub rotation: u8,
}

/// A run of payload bytes on one data shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardRange {
    pub shard: u8,
    /// From the shard's start, header included.
    pub offset: u32,
    pub len: u32,
}

impl StripeLocation {
    /// The least space for `payload_bytes`: as short as possible, then over as few data shards as possible.
    /// `None` if it can't fit in one stripe.
    pub fn cut(layout: &Layout, payload_bytes: usize) -> Option<(u16, u8)> {
        let block = BLOCK_BYTES as usize;
        let per_shard = payload_bytes.div_ceil(usize::from(layout.data_shards)) + HEADER_BYTES;
        let shard_bytes = per_shard.next_multiple_of(block);
        if payload_bytes == 0 || shard_bytes > layout.shard_bytes_max as usize {
            return None;
        }
        let data_shards = payload_bytes.div_ceil(shard_bytes - HEADER_BYTES);
        Some(((shard_bytes / block) as u16, data_shards as u8))
    }

    /// The most payload that a stripe of this layout holds.
    pub fn payload_bytes_max(layout: &Layout) -> usize {
        usize::from(layout.data_shards) * (layout.shard_bytes_max as usize - HEADER_BYTES)
    }

    /// The most payload that a stripe over `rows` rows holds.
    pub fn payload_bytes_in(layout: &Layout, rows: u32) -> usize {
        usize::from(layout.data_shards) * (rows as usize * BLOCK_BYTES as usize).saturating_sub(HEADER_BYTES)
    }

    /// A shard's length in bytes, header included.
    pub fn shard_bytes(&self) -> usize {
        usize::from(self.shard_blocks) * BLOCK_BYTES as usize
    }

    /// Payload bytes of one shard.
    pub fn shard_payload_bytes(&self) -> usize {
        self.shard_bytes() - HEADER_BYTES
    }

    /// Payload bytes of all data shards.
    pub fn payload_capacity(&self) -> usize {
        self.shard_payload_bytes() * usize::from(self.data_shards)
    }

    /// The set's index of the member that holds a shard.
    pub fn member_of(&self, shard: u8, members: usize) -> usize {
        (usize::from(self.rotation) + usize::from(shard)) % members
    }

    /// Where on a member the stripe begins, from the segment's start.
    pub fn offset_in_segment(&self) -> u64 {
        u64::from(self.start_block) * BLOCK_BYTES
    }

    /// Whether the fields make sense for a pool of this shape.
    pub fn fits(&self, layout: &Layout, segments: u32, payload_bytes: u32) -> bool {
        let end = (u64::from(self.start_block) + u64::from(self.shard_blocks)) * BLOCK_BYTES;
        self.segment < segments
            && self.shard_blocks > 0
            && self.shard_bytes() <= layout.shard_bytes_max as usize
            && end <= u64::from(layout.segment_bytes)
            && (1..=layout.data_shards).contains(&self.data_shards)
            && usize::from(self.rotation) < layout.members()
            && payload_bytes as usize <= self.payload_capacity()
    }

    /// The pieces of `len` payload bytes from `offset`, in order.
    pub fn pieces(&self, offset: u32, len: u32) -> impl Iterator<Item = ShardRange> + use<> {
        let per_shard = self.shard_payload_bytes() as u64;
        let (mut at, end) = (u64::from(offset), u64::from(offset) + u64::from(len));
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (shard, within) = (at / per_shard, at % per_shard);
            let take = (per_shard - within).min(end - at);
            at += take;
            let offset = (within as usize + HEADER_BYTES) as u32;
            Some(ShardRange { shard: shard as u8, offset, len: take as u32 })
        })
    }

    pub fn write(&self, out: &mut Writer) {
        out.u32(self.segment).u32(self.start_block).u16(self.shard_blocks).u8(self.data_shards).u8(self.rotation);
        out.u32(0);
    }

    pub fn read(input: &mut Reader<'_>) -> Result<Self, CutShort> {
        let location = Self {
            segment: input.u32()?,
            start_block: input.u32()?,
            shard_blocks: input.u16()?,
            data_shards: input.u8()?,
            rotation: input.u8()?,
        };
        input.u32()?;
        Ok(location)
    }
}

/// A shard's header. Little-endian, version 1:
///
/// | bytes | field | why |
/// |---|---|---|
/// | 0..4 | magic `SHRD` | |
/// | 4 | version, 1 | |
/// | 5 | flags: 1 void | a failed stripe that must not come back |
/// | 6 | shard index | a shard at another's place is found |
/// | 7 | m | |
/// | 8..24 | pool UUID | |
/// | 24..40 | location: segment, first block, blocks, data shards, rotation, 0 | misdirected writes are found |
/// | 40..56 | sequence number and nonce of the segment's use | old contents are found |
/// | 56..64 | epoch of the set it was written by | |
/// | 64..72 | number of the stripe in its stream | |
/// | 72..76 | stream | |
/// | 76..80 | payload length | |
/// | 80..208 | CRC32C of each shard after its header, data first | one good header verifies all |
/// | 208..216 | stripes of the stream settled before it | an answered stripe that is gone is missed |
/// | 216..224 | which of the last 64 of them were written, lowest bit the last | |
/// | 224..252 | 0 | |
/// | 252..256 | CRC32C of all before | |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardHeader {
    pub void: bool,
    pub shard: u8,
    pub parity_shards: u8,
    pub pool: Uuid,
    pub location: StripeLocation,
    pub sequence: Sequence,
    pub epoch: u64,
    pub number: u64,
    pub stream: u32,
    pub payload_bytes: u32,
    pub shard_crcs: Vec<u32>,
    pub history: History,
}

/// Why bytes are no header of the shard that should be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    #[error("no shard header")]
    NoMagic,
    #[error("shard header version {0} is unknown")]
    Version(u8),
    #[error("shard header's checksum is wrong")]
    Crc,
    #[error("cut short")]
    Short(#[from] CutShort),
    #[error("shard header field {0} is out of range")]
    Field(&'static str),
}

impl ShardHeader {
    /// Writes the header to the front of a shard.
    pub fn write_to(&self, shard: &mut [u8]) {
        let mut out = Writer::default();
        let flags = if self.void { FLAG_VOID } else { 0 };
        out.bytes(&MAGIC).u8(VERSION).u8(flags).u8(self.shard).u8(self.parity_shards).bytes(self.pool.as_bytes());
        self.location.write(&mut out);
        out.u64(self.sequence.number).u64(self.sequence.nonce).u64(self.epoch).u64(self.number);
        out.u32(self.stream).u32(self.payload_bytes);
        for crc in &self.shard_crcs {
            out.u32(*crc);
        }
        out.pad_to(HISTORY_AT);
        out.u64(self.history.settled).u64(self.history.written);
        out.pad_to(CRC_AT);
        let crc = crc32c(&out.0);
        out.u32(crc);
        shard[..HEADER_BYTES].copy_from_slice(&out.0);
    }

    /// Reads the header at the front of a shard; its fields fit the layout.
    pub fn parse(bytes: &[u8], layout: &Layout, segments: u32) -> Result<Self, ShardError> {
        let bytes = bytes.get(..HEADER_BYTES).ok_or(CutShort)?;
        let mut input = Reader::new(bytes);
        if input.array::<4>()? != MAGIC {
            return Err(ShardError::NoMagic);
        }
        let (version, flags, shard, parity_shards) = (input.u8()?, input.u8()?, input.u8()?, input.u8()?);
        if version != VERSION {
            return Err(ShardError::Version(version));
        }
        if Reader::new(&bytes[CRC_AT..]).u32()? != crc32c(&bytes[..CRC_AT]) {
            return Err(ShardError::Crc);
        }
        let pool = Uuid::from_bytes(input.array()?);
        let location = StripeLocation::read(&mut input)?;
        let sequence = Sequence { number: input.u64()?, nonce: input.u64()? };
        let (epoch, number, stream, payload_bytes) = (input.u64()?, input.u64()?, input.u32()?, input.u32()?);
        if parity_shards != layout.parity_shards {
            return Err(ShardError::Field("m"));
        }
        if !location.fits(layout, segments, payload_bytes) || payload_bytes == 0 {
            return Err(ShardError::Field("location"));
        }
        let shards = location.data_shards + parity_shards;
        if shard >= shards {
            return Err(ShardError::Field("shard"));
        }
        let mut shard_crcs = Vec::with_capacity(MEMBERS_MAX);
        for _ in 0..shards {
            shard_crcs.push(input.u32()?);
        }
        let mut rest = Reader::new(&bytes[HISTORY_AT..]);
        let history = History { settled: rest.u64()?, written: rest.u64()? };
        let void = flags & FLAG_VOID != 0;
        Ok(Self {
            void,
            shard,
            parity_shards,
            pool,
            location,
            sequence,
            epoch,
            number,
            stream,
            payload_bytes,
            shard_crcs,
            history,
        })
    }

    /// Whether two headers are of one stripe: all but the shard index and the void flag agree.
    pub fn same_stripe(&self, other: &Self) -> bool {
        self.pool == other.pool
            && self.location == other.location
            && self.sequence == other.sequence
            && self.number == other.number
            && self.stream == other.stream
            && self.payload_bytes == other.payload_bytes
            && self.shard_crcs == other.shard_crcs
    }

    /// Whether `shard` (header included) carries this stripe's shard `index` undamaged after its header.
    pub fn body_matches(&self, index: u8, shard: &[u8]) -> bool {
        let expected = self.shard_crcs.get(usize::from(index));
        shard.len() == self.location.shard_bytes() && expected == Some(&crc32c(&shard[HEADER_BYTES..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout =
        Layout { data_shards: 4, parity_shards: 2, segment_bytes: 1 << 20, shard_bytes_max: 128 << 10 };

    #[test]
    fn cuts_are_minimal_and_hold_the_payload() {
        for payload in 1..=StripeLocation::payload_bytes_max(&LAYOUT) {
            let (blocks, data_shards) = StripeLocation::cut(&LAYOUT, payload).expect("fits");
            let shard = usize::from(blocks) * 4096 - HEADER_BYTES;
            assert!(shard * usize::from(data_shards) >= payload);
            assert!(shard * (usize::from(data_shards) - 1) < payload, "one shard too many at {payload}");
            assert!((1..=4).contains(&data_shards));
            assert!(blocks == 1 || 4 * (shard - 4096) < payload, "one block too many at {payload}");
        }
        assert_eq!(StripeLocation::cut(&LAYOUT, StripeLocation::payload_bytes_max(&LAYOUT) + 1), None);
        assert_eq!(StripeLocation::cut(&LAYOUT, 0), None);
    }

    #[test]
    fn a_history_tells_the_written_of_the_last_64() {
        let mut history = History::default();
        for number in 0..200u64 {
            let known: Vec<u64> = history.written_numbers().collect();
            let expected: Vec<u64> =
                (number.saturating_sub(64)..number).rev().filter(|n| !n.is_multiple_of(3)).collect();
            assert_eq!(known, expected, "before {number}");
            history.settle(!number.is_multiple_of(3));
        }
    }

    #[test]
    fn pieces_cover_a_range_once() {
        let location = StripeLocation { segment: 0, start_block: 0, shard_blocks: 2, data_shards: 3, rotation: 1 };
        let per_shard = location.shard_payload_bytes() as u32;
        let pieces: Vec<_> = location.pieces(per_shard - 10, per_shard + 20).collect();
        let expected = [(0, per_shard - 10 + 256, 10), (1, 256, per_shard), (2, 256, 10)];
        let got: Vec<_> = pieces.iter().map(|p| (p.shard, p.offset, p.len)).collect();
        assert_eq!(got, expected);
    }

    /// H94: counts and lengths that can't be, with the checksum fixed up, are errors and no panic.
    #[test]
    fn h94_impossible_headers_are_refused() {
        let location = StripeLocation { segment: 3, start_block: 8, shard_blocks: 2, data_shards: 3, rotation: 1 };
        let header = ShardHeader {
            void: false,
            shard: 1,
            parity_shards: 2,
            pool: Uuid::from_u128(7),
            location,
            sequence: Sequence { number: 9, nonce: 10 },
            epoch: 1,
            number: 11,
            stream: 0,
            payload_bytes: 20000,
            shard_crcs: vec![1, 2, 3, 4, 5],
            history: History { settled: 11, written: 0b101 },
        };
        let mut good = vec![0; HEADER_BYTES];
        header.write_to(&mut good);
        assert_eq!(ShardHeader::parse(&good, &LAYOUT, 10), Ok(header));
        let edits: [(usize, u8); 9] =
            [(6, 5), (7, 0), (7, 250), (24, 10), (32, 0), (33, 255), (34, 0), (34, 5), (35, 6)];
        for (at, value) in edits {
            let mut bad = good.clone();
            bad[at] = value;
            let crc = crc32c(&bad[..CRC_AT]);
            bad[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
            let parsed = ShardHeader::parse(&bad, &LAYOUT, 10);
            assert!(matches!(parsed, Err(ShardError::Field(_))), "byte {at} = {value}: {parsed:?}");
        }
        for len in 0..HEADER_BYTES {
            assert!(ShardHeader::parse(&good[..len], &LAYOUT, 10).is_err());
        }
    }
}
