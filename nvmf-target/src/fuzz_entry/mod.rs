//! Entry functions of the fuzz targets: any bytes in, no panic and no broken invariant out.
//!
//! `fuzz/` runs them under libFuzzer where a nightly compiler is there, the example `fuzz_smoke` on seeded inputs
//! anywhere. Each takes one input, builds all that it needs, and leaves nothing behind.

mod framing;
mod host;
mod queue;

pub use framing::framing;
pub use host::host;
pub use queue::{Depth, play, queue};

/// Takes an input apart; past its end everything is zero.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((byte, rest)) => {
                self.0 = rest;
                *byte
            }
            None => 0,
        }
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    pub(crate) fn take(&mut self, len_bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len_bytes.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::sim::Random;

    /// The queue's inputs get far: to every operation of the back end, fused ones too, and through R2Ts.
    #[test]
    fn generated_inputs_reach_every_operation() {
        let mut seen = std::collections::BTreeSet::new();
        let mut fetched = 0;
        for seed in 0..400 {
            let mut random = Random::new(seed);
            let len_bytes = 200 + random.below(800);
            let bytes = random.bytes(len_bytes);
            framing(&bytes);
            host(&bytes);
            let depth = play(&bytes);
            seen.extend(depth.operations);
            fetched += depth.fetched;
        }
        let all = ["compare", "compare-and-write", "deallocate", "flush", "read", "verify", "write", "write-zeroes"];
        for operation in all {
            assert!(seen.contains(operation), "{operation} never happens: {seen:?}");
        }
        assert!(fetched > 300, "{fetched} R2Ts answered");
    }
}
