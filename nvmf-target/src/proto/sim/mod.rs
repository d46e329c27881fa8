//! Both ends of a queue in memory, for tests and fuzzing: a host or raw bytes against an `IoQueuePair` over a back
//! end in memory, on virtual time, the stream cut and joined at random but reproducibly.
//!
//! Must not touch sockets, clocks or threads: a seed gives the same run every time.

mod backend;
mod pair;
mod raw;

pub use backend::{MemBackend, Replies};
pub use pair::{Pair, PairConfig, connect_sqe};
pub use raw::{RawHost, RawReply};

/// Reproducible random numbers (SplitMix64): small, and the same on every machine.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A sequence that the seed decides.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which isn't 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next_u64() % bound.max(1) as u64) as usize
    }

    /// Random bytes.
    pub fn bytes(&mut self, len_bytes: usize) -> Vec<u8> {
        (0..len_bytes.div_ceil(8)).flat_map(|_| self.next_u64().to_le_bytes()).take(len_bytes).collect()
    }
}
