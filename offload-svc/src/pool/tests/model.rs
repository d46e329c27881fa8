//! What each block may hold: the oracle of the pool's tests.
//!
//! A block is filled from a stamp; stamp 0 is zeroes. A write that was answered replaces all that were answered before it
//! was sent; one that was not answered may or may not be there, until a read after a crash has seen which.

use std::collections::BTreeMap;

/// The bytes of a stamped block at an LBA: compressible for even stamps, random for odd ones.
pub fn fill(stamp: u64, lba: u64, block: &mut [u8]) {
    if stamp == 0 {
        return block.fill(0);
    }
    let mut state = (stamp << 20 ^ lba).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let period = if stamp.is_multiple_of(2) { 64 } else { block.len() };
    for at in 0..block.len() {
        if at < period {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            block[at] = (state >> 32) as u8;
        } else {
            block[at] = block[at - period];
        }
    }
    block[..8].copy_from_slice(&stamp.to_le_bytes());
}

/// The bytes of a run of blocks with one stamp.
pub fn run_of(stamp: u64, lba: u64, count: u64, block_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; count as usize * block_bytes];
    for (index, block) in bytes.chunks_mut(block_bytes).enumerate() {
        fill(stamp, lba + index as u64, block);
    }
    bytes
}

/// The stamp of a block, or `None` if it is no block of ours at this LBA: torn, misplaced or foreign bytes.
pub fn stamp_of(lba: u64, block: &[u8]) -> Option<u64> {
    let stamp = u64::from_le_bytes(block[..8].try_into().expect("8 bytes"));
    let mut expected = vec![0; block.len()];
    fill(stamp, lba, &mut expected);
    (expected == block).then_some(stamp)
}

#[derive(Debug, Clone)]
struct Op {
    stamp: u64,
    sent: u64,
    answered: Option<u64>,
}

/// The blocks of one volume.
#[derive(Debug, Clone, Default)]
pub struct Model {
    clock: u64,
    blocks: BTreeMap<u64, Vec<Op>>,
}

impl Model {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A write of `stamp` is sent.
    pub fn send(&mut self, lba: u64, count: u64, stamp: u64) -> u64 {
        let sent = self.tick();
        for block in lba..lba + count {
            let ops = self.blocks.entry(block).or_insert_with(|| vec![Op { stamp: 0, sent: 0, answered: Some(0) }]);
            ops.push(Op { stamp, sent, answered: None });
        }
        sent
    }

    /// It was answered with success.
    pub fn answer(&mut self, lba: u64, count: u64, sent: u64) {
        let now = self.tick();
        for block in lba..lba + count {
            let ops = self.blocks.get_mut(&block).expect("sent before");
            ops.iter_mut().filter(|op| op.sent == sent).for_each(|op| op.answered = Some(now));
            // Answered before this one was sent: replaced for good.
            ops.retain(|op| op.answered.is_none_or(|answered| answered >= sent));
        }
    }

    /// It was refused and nothing was changed.
    pub fn refuse(&mut self, lba: u64, count: u64, sent: u64) {
        for block in lba..lba + count {
            self.blocks.get_mut(&block).expect("sent before").retain(|op| op.sent != sent);
        }
    }

    /// What a block may hold now.
    pub fn possible(&self, block: u64) -> Vec<u64> {
        self.blocks.get(&block).map_or(vec![0], |ops| ops.iter().map(|op| op.stamp).collect())
    }

    /// A block was seen when nothing was under way: it stays what it is.
    pub fn settle(&mut self, block: u64, stamp: u64) {
        let now = self.tick();
        self.blocks.insert(block, vec![Op { stamp, sent: now, answered: Some(now) }]);
    }

    /// Blocks that were ever written.
    pub fn touched(&self) -> Vec<u64> {
        self.blocks.keys().copied().collect()
    }
}
