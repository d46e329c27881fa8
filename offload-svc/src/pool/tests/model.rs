//! What each block may hold: the oracle of the pool's tests.
//!
//! A block is filled from a stamp; stamp 0 is zeroes. A write that was answered replaces all that were answered before it
//! was sent; one that was not answered, or failed, may or may not be there, until a read has seen which. What a read has
//! returned takes the place of all that was answered before the read was sent: it never reverts.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

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

/// A read under way: what each of its blocks may have held since it was sent.
#[derive(Debug, Clone)]
struct Look {
    lba: u64,
    sent: u64,
    possible: Vec<BTreeSet<u64>>,
}

/// The blocks of one volume.
#[derive(Debug, Clone, Default)]
pub struct Model {
    clock: u64,
    blocks: BTreeMap<u64, Vec<Op>>,
    looks: BTreeMap<u64, Look>,
    /// Copies that are being taken: what is written meanwhile may be in them.
    copies: Vec<Rc<RefCell<Model>>>,
}

/// A block that held what it may not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    pub lba: u64,
    /// `None`: bytes that nobody wrote there.
    pub holds: Option<u64>,
    pub may_hold: BTreeSet<u64>,
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
            for look in self.looks.values_mut() {
                if let Some(possible) = block.checked_sub(look.lba).and_then(|at| look.possible.get_mut(at as usize)) {
                    possible.insert(stamp);
                }
            }
        }
        for copy in &self.copies {
            copy.borrow_mut().send(lba, count, stamp);
        }
        sent
    }

    /// A copy of the volume is asked for: it holds what the volume does at some moment from now on, until
    /// [`Model::end_copies`].
    pub fn begin_copy(&mut self) -> Rc<RefCell<Model>> {
        let blocks = self.blocks.clone();
        let copy = Rc::new(RefCell::new(Model { clock: self.clock, blocks, ..Model::default() }));
        self.copies.push(Rc::clone(&copy));
        copy
    }

    /// The copies have been taken, or never will be.
    pub fn end_copies(&mut self) {
        self.copies.drain(..).for_each(|copy| copy.borrow_mut().crash());
    }

    /// It was answered with success.
    pub fn answer(&mut self, lba: u64, count: u64, sent: u64) {
        let now = self.tick();
        for block in lba..lba + count {
            let ops = self.blocks.get_mut(&block).expect("sent before");
            // It may have been seen before its answer came.
            let own = ops.iter_mut().filter(|op| op.sent == sent);
            own.for_each(|op| op.answered = op.answered.or(Some(now)));
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

    /// It ended otherwise: each of its blocks may have it or not, and that does not change any more by itself.
    pub fn fail(&mut self, lba: u64, count: u64, sent: u64) {
        let now = self.tick();
        for block in lba..lba + count {
            let ops = self.blocks.get_mut(&block).expect("sent before");
            let own = ops.iter_mut().filter(|op| op.sent == sent);
            own.for_each(|op| op.answered = op.answered.or(Some(now)));
        }
    }

    /// The power failed: nothing is under way any more.
    pub fn crash(&mut self) {
        let now = self.tick();
        self.looks.clear();
        self.copies.clear();
        self.blocks.values_mut().flatten().for_each(|op| op.answered = op.answered.or(Some(now)));
    }

    /// A read is sent.
    pub fn begin_read(&mut self, lba: u64, count: u64) -> u64 {
        let sent = self.tick();
        let possible = (lba..lba + count).map(|block| self.possible(block).into_iter().collect()).collect();
        self.looks.insert(sent, Look { lba, sent, possible });
        sent
    }

    /// A read failed.
    pub fn abandon_read(&mut self, sent: u64) {
        self.looks.remove(&sent);
    }

    /// A read has returned these stamps (`None`: bytes that nobody wrote there): each one has to be possible, and stays.
    pub fn end_read(&mut self, sent: u64, stamps: &[Option<u64>]) -> Result<(), Wrong> {
        let look = self.looks.remove(&sent).expect("sent before");
        let now = self.tick();
        for ((lba, possible), holds) in (look.lba..).zip(look.possible).zip(stamps) {
            match *holds {
                Some(stamp) if possible.contains(&stamp) => self.saw(lba, stamp, look.sent, now),
                holds => return Err(Wrong { lba, holds, may_hold: possible }),
            }
        }
        Ok(())
    }

    fn saw(&mut self, lba: u64, stamp: u64, sent: u64, now: u64) {
        let Some(ops) = self.blocks.get_mut(&lba) else { return };
        // What was answered before the read was sent, and is not what it returned, has been replaced.
        ops.retain(|op| op.stamp == stamp || op.answered.is_none_or(|answered| answered >= sent));
        let mut same = ops.iter_mut().filter(|op| op.stamp == stamp);
        if let (Some(op), None) = (same.next(), same.next()) {
            op.answered = op.answered.or(Some(now));
        }
    }

    /// Blocks that hold something for certain.
    pub fn filled(&self) -> u64 {
        self.blocks.values().filter(|ops| ops.iter().all(|op| op.stamp != 0)).count() as u64
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

/// A read of a value pins it: an unanswered write that was seen never reverts, nor does what it replaced come back.
#[test]
fn what_was_seen_stays() {
    let mut model = Model::default();
    let first = model.send(0, 1, 1);
    model.answer(0, 1, first);
    model.send(0, 1, 2);
    let look = model.begin_read(0, 1);
    assert_eq!(model.end_read(look, &[Some(2)]), Ok(()));
    model.crash();
    assert_eq!(model.possible(0), [2]);
    let third = model.send(0, 1, 3);
    model.fail(0, 1, third);
    assert_eq!(model.possible(0), [2, 3]);
    let look = model.begin_read(0, 1);
    assert!(model.end_read(look, &[Some(1)]).is_err());
    let look = model.begin_read(0, 1);
    assert_eq!(model.end_read(look, &[Some(2)]), Ok(()));
    assert_eq!(model.possible(0), [2], "what failed and was not there stays away");
}
