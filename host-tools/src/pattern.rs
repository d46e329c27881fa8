//! Self-describing test blocks: every 512-byte sector of a block says which write put it there.
//!
//! Owns the layout of a test block and the verdict on one that was read back. Must not know how blocks reach a
//! namespace or which write is the right one (`journal` and `verify` do). Invariant: a block's content is a function
//! of (seed, LBA, generation, fill) alone, so a lost, stale, torn, misplaced or damaged block is named, not just
//! found unequal.

use std::fmt;

/// The unit that carries a stamp, in bytes: the smallest logical block, and the smallest unit a disk tears at.
pub const SECTOR_BYTES: usize = 512;
const STAMP_BYTES: usize = 36;
const MAGIC: [u8; 4] = *b"SLVP";
const VERSION: u8 = 1;

/// Seeds with which content is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    /// Tells one test's blocks from another's.
    pub seed: u64,
    /// How much of each sector's body can't be compressed, in percent (0 to 100).
    pub random_percent: u8,
}

/// What one write leaves in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    random_percent: u8,
    sector: u16,
    seed: u64,
    lba: u64,
    generation: u64,
}

/// What a block that was read back turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockState {
    /// Every byte is as generation `generation` of this LBA wrote it.
    Whole {
        /// Which write.
        generation: u64,
    },
    /// All bytes are zero: never written, deallocated, or lost.
    Zero,
    /// Not one sector is ours: other data, or a test with another seed.
    Foreign {
        /// The seed of the other test, where it is one.
        seed: Option<u64>,
    },
    /// Whole sectors of ours that belong to another LBA.
    Misplaced {
        /// Where this content belongs.
        lba: u64,
        /// Which write it was there.
        generation: u64,
    },
    /// Sectors of more than one write, or of a write and of other content.
    Torn {
        /// The generation of each sector in turn; `None` where the sector is not a whole one of this LBA.
        sectors: Vec<Option<u64>>,
    },
    /// The stamp is ours, the bytes behind it are not those that were written.
    Damaged {
        /// The generation that the stamp names.
        generation: u64,
        /// The first wrong byte, from the start of the block.
        offset: usize,
    },
}

impl fmt::Display for BlockState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole { generation } => write!(f, "generation {generation}"),
            Self::Zero => write!(f, "all zeroes"),
            Self::Foreign { seed: Some(seed) } => write!(f, "a block of another test (seed {seed})"),
            Self::Foreign { seed: None } => write!(f, "no test block"),
            Self::Misplaced { lba, generation } => write!(f, "the block of LBA {lba}, generation {generation}"),
            Self::Torn { sectors } => write!(f, "torn: {}", describe_sectors(sectors)),
            Self::Damaged { generation, offset } => {
                write!(f, "generation {generation}, damaged from byte {offset} of the block")
            }
        }
    }
}

/// Runs of equal sectors in words: `sectors 0-3 generation 7, sectors 4-7 not of this LBA`.
fn describe_sectors(sectors: &[Option<u64>]) -> String {
    let mut out = String::new();
    let mut start = 0;
    for run in sectors.chunk_by(|a, b| a == b) {
        let end = start + run.len() - 1;
        let what = match run[0] {
            Some(generation) => format!("generation {generation}"),
            None => "other bytes".to_owned(),
        };
        let separator = if out.is_empty() { "" } else { ", " };
        out.push_str(&format!("{separator}sectors {start}-{end} {what}"));
        start = end + 1;
    }
    out
}

impl Pattern {
    /// Fills `blocks` with `generation` of the blocks that begin at `slba`.
    ///
    /// # Panics
    /// If `blocks` is no whole number of blocks, or `block_bytes` no multiple of [`SECTOR_BYTES`]: a bug of the caller.
    pub fn fill(&self, slba: u64, generation: u64, block_bytes: usize, blocks: &mut [u8]) {
        assert!(block_bytes.is_multiple_of(SECTOR_BYTES) && blocks.len().is_multiple_of(block_bytes));
        for (block, lba) in blocks.chunks_exact_mut(block_bytes).zip(slba..) {
            for (sector, index) in block.chunks_exact_mut(SECTOR_BYTES).zip(0u16..) {
                let stamp = Stamp {
                    random_percent: self.random_percent.min(100),
                    sector: index,
                    seed: self.seed,
                    lba,
                    generation,
                };
                stamp.fill(sector);
            }
        }
    }

    /// Says what `block`, read from `lba`, holds.
    pub fn inspect(&self, lba: u64, block: &[u8]) -> BlockState {
        if block.iter().all(|&b| b == 0) {
            return BlockState::Zero;
        }
        let sectors: Vec<SectorState> = block
            .chunks(SECTOR_BYTES)
            .zip(0u16..)
            .map(|(sector, index)| SectorState::of(self.seed, lba, index, sector))
            .collect();
        verdict(&sectors)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SectorState {
    Ours { generation: u64 },
    Elsewhere { lba: u64, generation: u64 },
    Damaged { generation: u64, offset: usize },
    Foreign { seed: Option<u64> },
}

impl SectorState {
    fn of(seed: u64, lba: u64, index: u16, sector: &[u8]) -> Self {
        let Some(stamp) = Stamp::parse(sector) else { return Self::Foreign { seed: None } };
        if stamp.seed != seed {
            return Self::Foreign { seed: Some(stamp.seed) };
        }
        let mut expected = [0u8; SECTOR_BYTES];
        stamp.fill(&mut expected);
        if let Some(offset) = expected.iter().zip(sector).position(|(a, b)| a != b) {
            return Self::Damaged { generation: stamp.generation, offset };
        }
        if stamp.lba != lba || stamp.sector != index {
            return Self::Elsewhere { lba: stamp.lba, generation: stamp.generation };
        }
        Self::Ours { generation: stamp.generation }
    }

    fn generation_here(self) -> Option<u64> {
        match self {
            Self::Ours { generation } => Some(generation),
            _ => None,
        }
    }
}

fn verdict(sectors: &[SectorState]) -> BlockState {
    let first = sectors.first().copied().unwrap_or(SectorState::Foreign { seed: None });
    if let Some((index, &SectorState::Damaged { generation, offset })) =
        sectors.iter().enumerate().find(|(_, s)| matches!(s, SectorState::Damaged { .. }))
    {
        return BlockState::Damaged { generation, offset: index * SECTOR_BYTES + offset };
    }
    let uniform = sectors.iter().all(|s| *s == first);
    match first {
        SectorState::Ours { generation } if uniform => BlockState::Whole { generation },
        SectorState::Elsewhere { lba, generation } if uniform => BlockState::Misplaced { lba, generation },
        SectorState::Foreign { seed } if sectors.iter().all(|s| matches!(s, SectorState::Foreign { .. })) => {
            BlockState::Foreign { seed }
        }
        _ => BlockState::Torn { sectors: sectors.iter().map(|s| s.generation_here()).collect() },
    }
}

impl Stamp {
    /// Little-endian: magic, version, fill, sector of the block, seed, LBA, generation, CRC32C of all that.
    fn encode(&self) -> [u8; STAMP_BYTES] {
        let mut out = [0u8; STAMP_BYTES];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[5] = self.random_percent;
        out[6..8].copy_from_slice(&self.sector.to_le_bytes());
        out[8..16].copy_from_slice(&self.seed.to_le_bytes());
        out[16..24].copy_from_slice(&self.lba.to_le_bytes());
        out[24..32].copy_from_slice(&self.generation.to_le_bytes());
        let crc = crc32c::crc32c(&out[..32]);
        out[32..36].copy_from_slice(&crc.to_le_bytes());
        out
    }

    fn parse(sector: &[u8]) -> Option<Self> {
        let bytes = sector.first_chunk::<STAMP_BYTES>().filter(|_| sector.len() == SECTOR_BYTES)?;
        let crc = u32::from_le_bytes(bytes[32..36].try_into().ok()?);
        if bytes[..4] != MAGIC || bytes[4] != VERSION || crc32c::crc32c(&bytes[..32]) != crc {
            return None;
        }
        Some(Self {
            random_percent: bytes[5].min(100),
            sector: u16::from_le_bytes(bytes[6..8].try_into().ok()?),
            seed: u64::from_le_bytes(bytes[8..16].try_into().ok()?),
            lba: u64::from_le_bytes(bytes[16..24].try_into().ok()?),
            generation: u64::from_le_bytes(bytes[24..32].try_into().ok()?),
        })
    }

    fn fill(&self, sector: &mut [u8]) {
        let (head, body) = sector.split_at_mut(STAMP_BYTES);
        head.copy_from_slice(&self.encode());
        let mut random = SplitMix64(
            self.seed ^ self.lba.rotate_left(32) ^ self.generation.rotate_left(17) ^ (u64::from(self.sector) << 56),
        );
        let repeated = random.next().to_le_bytes()[0];
        let (noise, rest) = body.split_at_mut(body.len() * usize::from(self.random_percent) / 100);
        random.fill(noise);
        rest.fill(repeated);
    }
}

/// A small, fast generator (Steele, Lea, Flood 2014) whose stream never changes with a library's version: blocks
/// written by one build are checked by another.
#[derive(Debug, Clone)]
pub struct SplitMix64(pub u64);

impl SplitMix64 {
    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)] // an endless stream: an Iterator's Option would only be noise
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound` (0 if `bound` is 0); the bias is under 2^-32 for bounds below 2^32.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Fills `out` with random bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        let mut words = out.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        let rest = words.into_remainder();
        let tail = self.next().to_le_bytes();
        let len = rest.len();
        rest.copy_from_slice(&tail[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATTERN: Pattern = Pattern { seed: 7, random_percent: 50 };

    fn block(lba: u64, generation: u64) -> Vec<u8> {
        let mut out = vec![0; 4096];
        PATTERN.fill(lba, generation, 4096, &mut out);
        out
    }

    #[test]
    fn a_written_block_is_whole_and_only_at_its_own_lba() {
        assert_eq!(PATTERN.inspect(9, &block(9, 3)), BlockState::Whole { generation: 3 });
        assert_eq!(PATTERN.inspect(10, &block(9, 3)), BlockState::Misplaced { lba: 9, generation: 3 });
        let other = Pattern { seed: 8, ..PATTERN };
        assert_eq!(other.inspect(9, &block(9, 3)), BlockState::Foreign { seed: Some(7) });
    }

    #[test]
    fn a_run_of_blocks_equals_its_single_blocks() {
        let mut run = vec![0; 3 * 4096];
        PATTERN.fill(100, 5, 4096, &mut run);
        for (i, one) in run.chunks(4096).enumerate() {
            assert_eq!(one, block(100 + i as u64, 5));
        }
    }

    #[test]
    fn zeroes_and_foreign_bytes_are_told_apart() {
        assert_eq!(PATTERN.inspect(0, &[0; 4096]), BlockState::Zero);
        assert_eq!(PATTERN.inspect(0, &[0xAA; 4096]), BlockState::Foreign { seed: None });
    }

    #[test]
    fn a_block_of_two_writes_is_torn_and_says_where() {
        let mut mixed = block(4, 1);
        mixed[1536..].copy_from_slice(&block(4, 2)[1536..]);
        let state = PATTERN.inspect(4, &mixed);
        assert_eq!(state.to_string(), "torn: sectors 0-2 generation 1, sectors 3-7 generation 2");
        let mut half_zero = block(4, 1);
        half_zero[2048..].fill(0);
        assert_eq!(
            PATTERN.inspect(4, &half_zero).to_string(),
            "torn: sectors 0-3 generation 1, sectors 4-7 other bytes"
        );
    }

    #[test]
    fn sectors_in_the_wrong_order_are_not_whole() {
        let mut swapped = block(4, 1);
        let (a, b) = swapped.split_at_mut(512);
        a.swap_with_slice(&mut b[..512]);
        assert!(matches!(PATTERN.inspect(4, &swapped), BlockState::Torn { .. }));
    }

    #[test]
    fn every_flipped_bit_is_seen() {
        let good = block(4, 1);
        for byte in (0..4096).step_by(5) {
            let mut bad = good.clone();
            bad[byte] ^= 1 << (byte % 8);
            let state = PATTERN.inspect(4, &bad);
            assert_ne!(state, BlockState::Whole { generation: 1 }, "byte {byte}");
            if byte % 512 >= STAMP_BYTES {
                assert_eq!(state, BlockState::Damaged { generation: 1, offset: byte });
            }
        }
    }

    #[test]
    fn the_layout_stays_as_it_is() {
        // Blocks written by one version are checked by the next: a change here is a change of format.
        let mut out = [0; 512];
        Pattern { seed: 1, random_percent: 10 }.fill(2, 3, 512, &mut out);
        assert_eq!(&out[..8], b"SLVP\x01\x0a\x00\x00");
        assert_eq!(crc32c::crc32c(&out), GOLDEN_CRC);
    }

    const GOLDEN_CRC: u32 = 2_293_873_166;

    #[test]
    fn fill_share_is_kept() {
        let count = |percent| {
            let mut out = vec![0; 512];
            Pattern { seed: 1, random_percent: percent }.fill(2, 3, 512, &mut out);
            let last = out[511];
            out.iter().rev().take_while(|b| **b == last).count()
        };
        assert_eq!(count(0), 476);
        assert!(count(100) < 4);
    }
}
