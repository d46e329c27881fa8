//! A volume as the target's back end: cuts requests by shard and sends the pieces to the reactors that own them.
//!
//! Owns the cut and the checks that guard it. Must not know maps or the log. Invariant: every request is answered once,
//! whatever reactor ends meanwhile.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvmf_target::backend::{Backend, Done, Geometry, LbaRange, Operation, Outcome, Reply};
use nvmf_target::buffer::IoBuf;
use uuid::Uuid;

use super::message::{Action, Inner, Join, Message, Piece};
use super::options::{RECORD_PLAIN_BYTES_MAX, SHARD_RUN_BYTES, SHARDS_PER_VOLUME};
use super::shared::{Shared, Volume};

impl Volume {
    pub fn block_bytes(&self) -> u32 {
        1 << self.block_shift
    }

    pub fn blocks(&self) -> u64 {
        self.block_count.load(Ordering::SeqCst)
    }

    /// Blocks of one run of a shard.
    pub fn run_blocks(&self) -> u64 {
        SHARD_RUN_BYTES >> self.block_shift
    }

    /// The shard that a block belongs to.
    pub fn shard_of(&self, lba: u64) -> u16 {
        (lba / self.run_blocks() % u64::from(SHARDS_PER_VOLUME)) as u16
    }

    /// Blocks of a full record.
    pub fn record_blocks(&self) -> u64 {
        (RECORD_PLAIN_BYTES_MAX >> self.block_shift) as u64
    }

    /// Whether nothing new may begin.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Cuts a range where shards change: a piece per run.
    fn cut_by_run(&self, range: LbaRange) -> impl Iterator<Item = (u16, Range<u64>)> + '_ {
        let (mut at, end) = (range.slba, range.slba + range.lba_count);
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let upto = (at / self.run_blocks() + 1).saturating_mul(self.run_blocks()).min(end);
            let piece = (self.shard_of(at), at..upto);
            at = upto;
            Some(piece)
        })
    }

    /// The shards that a range touches: for requests without data, which go to each shard once, with the whole range.
    fn shards_in(&self, range: LbaRange) -> impl Iterator<Item = u16> + '_ {
        let first = range.slba / self.run_blocks();
        let last = (range.slba + range.lba_count - 1) / self.run_blocks();
        (first..=last.min(first + u64::from(SHARDS_PER_VOLUME) - 1))
            .map(|run| (run % u64::from(SHARDS_PER_VOLUME)) as u16)
    }
}

/// The back end of one volume.
pub struct VolumeBackend {
    shared: Arc<Shared>,
    volume: Arc<Volume>,
}

impl VolumeBackend {
    pub(super) fn new(shared: Arc<Shared>, volume: Arc<Volume>) -> Self {
        Self { shared, volume }
    }

    fn in_range(&self, range: &LbaRange) -> bool {
        range.slba.checked_add(range.lba_count).is_some_and(|end| end <= self.volume.blocks())
    }

    fn send(&self, piece: Piece) {
        let reactor = usize::from(piece.shard) % self.shared.reactors;
        self.shared.courier.send(reactor, Message(Inner::Piece(piece)));
    }

    /// A request with data: one piece per run.
    fn with_data(&self, action: Action, range: LbaRange, buffer: IoBuf, expected: Option<IoBuf>, done: Done) {
        let volume = &self.volume;
        let fits = |buf: &IoBuf| buf.len() as u64 == range.lba_count << volume.block_shift;
        if !fits(&buffer) || expected.as_ref().is_some_and(|expected| !fits(expected)) {
            return done.finish(Reply { outcome: Outcome::InternalError, buffer: Some(buffer) });
        }
        let pieces = volume.cut_by_run(range).count();
        // Never atomic over two shards; the controller advertises no unit that long.
        if action == Action::CompareAndWrite && pieces > 1 {
            return done.finish(Reply { outcome: Outcome::WriteFault, buffer: Some(buffer) });
        }
        let join = Join::new(volume, pieces, Some(buffer), expected, done);
        for (shard, part) in volume.cut_by_run(range) {
            let buffer_offset = ((part.start - range.slba) << volume.block_shift) as usize;
            self.send_piece(action, shard, part, buffer_offset, &join);
        }
    }

    /// A request without data: one piece per range and shard.
    fn without_data(&self, action: Action, ranges: &[LbaRange], done: Done) {
        let volume = &self.volume;
        let pieces = ranges.iter().map(|range| volume.shards_in(*range).count()).sum();
        let join = Join::new(volume, pieces, None, None, done);
        for range in ranges {
            for shard in volume.shards_in(*range) {
                self.send_piece(action, shard, range.slba..range.slba + range.lba_count, 0, &join);
            }
        }
    }

    fn send_piece(&self, action: Action, shard: u16, part: Range<u64>, buffer_offset: usize, join: &Arc<Join>) {
        let range = LbaRange { slba: part.start, lba_count: part.end - part.start };
        let volume = Arc::clone(&self.volume);
        self.send(Piece { volume, shard, range, action, buffer_offset, join: Arc::clone(join), answered: false });
    }
}

impl Backend for VolumeBackend {
    fn geometry(&self) -> Geometry {
        Geometry {
            block_bytes: self.volume.block_bytes(),
            block_count: self.volume.blocks(),
            used_blocks: self.volume.mapped_blocks(),
            deallocate: true,
            preferred_write_blocks: self.volume.record_blocks() as u32,
            volatile_write_cache: false,
        }
    }

    fn uuid(&self) -> Uuid {
        self.volume.uuid
    }

    fn write_protected(&self) -> bool {
        self.volume.is_snapshot()
    }

    fn submit(&self, operation: Operation, done: Done) {
        if self.volume.is_closing() || self.volume.is_hidden() || self.shared.closing.load(Ordering::SeqCst) {
            return done.finish(Reply { outcome: Outcome::NotReady, buffer: into_buffer(operation) });
        }
        let ranges: &[LbaRange] = match &operation {
            Operation::Read { range, .. }
            | Operation::Write { range, .. }
            | Operation::Compare { range, .. }
            | Operation::CompareAndWrite { range, .. }
            | Operation::WriteZeroes { range, .. }
            | Operation::Verify { range } => std::slice::from_ref(range),
            Operation::Deallocate { ranges } => ranges,
            Operation::Flush => &[],
        };
        if !ranges.iter().all(|range| self.in_range(range)) {
            return done.finish(Reply { outcome: Outcome::LbaOutOfRange, buffer: into_buffer(operation) });
        }
        if ranges.iter().all(|range| range.lba_count == 0) {
            // Also Flush: a write is answered when it is durable, so none that has completed is left to flush.
            return done.finish(Reply { outcome: Outcome::Success, buffer: into_buffer(operation) });
        }
        match operation {
            Operation::Read { range, buffer } => self.with_data(Action::Read, range, buffer, None, done),
            Operation::Write { range, buffer, fua: _ } => self.with_data(Action::Write, range, buffer, None, done),
            Operation::Compare { range, buffer } => self.with_data(Action::Compare, range, buffer, None, done),
            Operation::CompareAndWrite { range, expected, buffer, fua: _ } => {
                self.with_data(Action::CompareAndWrite, range, buffer, Some(expected), done);
            }
            Operation::WriteZeroes { range, deallocate: _, fua: _ } => {
                self.without_data(Action::WriteZeroes, &[range], done);
            }
            Operation::Deallocate { mut ranges } => {
                ranges.retain(|range| range.lba_count > 0);
                self.without_data(Action::Deallocate, &ranges, done);
            }
            // Cut by run like data, so that each piece reads its own shard's blocks and no others.
            Operation::Verify { range } => {
                let pieces = self.volume.cut_by_run(range).count();
                let join = Join::new(&self.volume, pieces, None, None, done);
                for (shard, part) in self.volume.cut_by_run(range) {
                    self.send_piece(Action::Verify, shard, part, 0, &join);
                }
            }
            Operation::Flush => done.finish(Reply::of(Outcome::Success)),
        }
    }
}

/// The buffer that goes back with the reply.
fn into_buffer(operation: Operation) -> Option<IoBuf> {
    match operation {
        Operation::Read { buffer, .. }
        | Operation::Write { buffer, .. }
        | Operation::Compare { buffer, .. }
        | Operation::CompareAndWrite { buffer, .. } => Some(buffer),
        _ => None,
    }
}
