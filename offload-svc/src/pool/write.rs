//! Serving the pieces of requests: reads, writes, compares, deallocation.
//!
//! Owns what each action does within one shard. Must not know other shards. Invariants: a write is admitted before it is
//! logged and answered only when it is durable; a block is written whole or not at all.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use nvmf_target::backend::Outcome;

use super::core::{Core, Shard};
use super::locks::Held;
use super::map::{Run, What};
use super::message::{Action, Join, Piece};
use super::page::LEAF_BLOCKS;
use super::read::{LostBlock, Sink};
use super::space::{Admitted, Refusal};
use super::stream::{Change, Lane, Written, yield_now};
use super::stripe_io::WriteError;
use crate::stages::record::{Birth, Kind, Owner, SealError, Sealing, sealed_bound};

/// Leaves that are looked at for a marker that may not be needed.
const LOOK_LEAVES: u64 = 16;
/// Changes in the active layer that one marker hides at most: longer ranges go in slices, and others get their turn between.
const SLICE_EXTENTS: usize = 4096;
/// Blocks that one marker hides at most where another map lies beneath.
const HOLE_BLOCKS: u64 = 64 * LEAF_BLOCKS;

/// Fills a request's buffer.
struct ToRequest<'a> {
    join: &'a Join,
    offset: usize,
}

impl ToRequest<'_> {
    fn with(&self, offset: usize, len: usize, work: impl FnOnce(&mut [u8])) {
        let mut buffer = self.join.buffer.write().unwrap_or_else(PoisonError::into_inner);
        let start = self.offset + offset;
        if let Some(place) = buffer.as_mut().and_then(|buffer| buffer.get_mut(start..start + len)) {
            work(place);
        }
    }
}

impl Sink for ToRequest<'_> {
    fn put(&self, offset: usize, bytes: &[u8]) {
        self.with(offset, bytes.len(), |place| place.copy_from_slice(bytes));
    }
    fn zero(&self, offset: usize, len: usize) {
        self.with(offset, len, |place| place.fill(0));
    }
}

/// Fills a vector of its own.
struct ToMemory(RefCell<Vec<u8>>);

impl Sink for ToMemory {
    fn put(&self, offset: usize, bytes: &[u8]) {
        if let Some(place) = self.0.borrow_mut().get_mut(offset..offset + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
    fn zero(&self, _offset: usize, _len: usize) {}
}

/// Takes bytes and forgets them.
struct Nowhere;

impl Sink for Nowhere {
    fn put(&self, _offset: usize, _bytes: &[u8]) {}
    fn zero(&self, _offset: usize, _len: usize) {}
}

impl Core {
    /// Carries out a piece and answers it.
    pub async fn serve_piece(&self, piece: Piece) {
        if piece.volume.is_closing() || piece.volume.is_hidden() {
            return piece.finish(Outcome::NotReady);
        }
        let began = self.env().now();
        let shard = self.shard(&piece.volume, piece.shard);
        let range = piece.range.slba..piece.range.slba + piece.range.lba_count;
        let outcome = match piece.action {
            Action::Read => {
                let sink = ToRequest { join: &piece.join, offset: piece.buffer_offset };
                read_outcome(self.read_range(&shard, range, &sink).await)
            }
            Action::Verify => read_outcome(self.read_range(&shard, range, &Nowhere).await),
            Action::Compare => self.compare(&shard, range, &piece).await,
            Action::Write => self.write(&shard, range, &piece).await,
            Action::CompareAndWrite => self.compare_and_write(&shard, range, &piece).await,
            Action::WriteZeroes => self.unmap(&shard, range, Kind::Zeroes).await,
            Action::Deallocate => self.unmap(&shard, range, Kind::Deallocate).await,
        };
        piece.finish(outcome);
        self.shared.foreground.answered(self.env().now().saturating_duration_since(began));
    }

    /// A range's bytes.
    pub async fn read_to_memory(&self, shard: &Shard, range: Range<u64>) -> Result<Vec<u8>, LostBlock> {
        let bytes = ((range.end - range.start) << shard.volume.block_shift) as usize;
        let sink = ToMemory(RefCell::new(vec![0; bytes]));
        self.read_range(shard, range, &sink).await?;
        Ok(sink.0.into_inner())
    }

    async fn compare(&self, shard: &Shard, range: Range<u64>, piece: &Piece) -> Outcome {
        let stored = match self.read_to_memory(shard, range).await {
            Ok(stored) => stored,
            Err(lost) => return read_outcome(Err(lost)),
        };
        let buffer = piece.join.buffer.read().unwrap_or_else(PoisonError::into_inner);
        let start = piece.buffer_offset;
        let given = buffer.as_ref().and_then(|buffer| buffer.get(start..start + stored.len()));
        if given == Some(&stored[..]) { Outcome::Success } else { Outcome::CompareFailure }
    }

    async fn write(&self, shard: &Rc<Shard>, range: Range<u64>, piece: &Piece) -> Outcome {
        let _admitted = match self.admit(shard, &range).await {
            Ok(admitted) => admitted,
            Err(outcome) => return outcome,
        };
        let _inside = shard.volume.family.gate.enter().await;
        let _held = shard.locks.enter(range.clone(), false).await;
        self.write_held(shard, range, piece).await
    }

    async fn compare_and_write(&self, shard: &Rc<Shard>, range: Range<u64>, piece: &Piece) -> Outcome {
        let _admitted = match self.admit(shard, &range).await {
            Ok(admitted) => admitted,
            Err(outcome) => return outcome,
        };
        let _inside = shard.volume.family.gate.enter().await;
        let _held = shard.locks.enter(range.clone(), true).await;
        match self.read_to_memory(shard, range.clone()).await {
            Err(lost) => read_outcome(Err(lost)),
            Ok(stored) if piece.join.expected.as_deref() == Some(&stored[..]) => {
                self.write_held(shard, range, piece).await
            }
            Ok(_) => Outcome::CompareFailure,
        }
    }

    /// Logs the request's data; the range is held.
    async fn write_held(&self, shard: &Rc<Shard>, range: Range<u64>, piece: &Piece) -> Outcome {
        let shift = shard.volume.block_shift;
        let mut pending = Vec::new();
        for part in records_of(shard, range.clone()) {
            self.stream.room_for(self, bound_of(shard, &part)).await;
            let start = piece.buffer_offset + ((part.start - range.start) << shift) as usize;
            let len = ((part.end - part.start) << shift) as usize;
            let buffer = piece.join.buffer.read().unwrap_or_else(PoisonError::into_inner);
            let Some(plain) = buffer.as_ref().and_then(|buffer| buffer.get(start..start + len)) else {
                return Outcome::InternalError;
            };
            match self.log_data(Lane::Fresh, shard, part, plain) {
                Ok(written) => pending.push(written),
                Err(outcome) => return outcome,
            }
        }
        let outcome = all_written(pending).await;
        if outcome == Outcome::Success {
            self.shared.set.traffic.user((range.end - range.start) << shift);
        }
        outcome
    }

    /// Logs one record of data. Room has been made in the lane.
    pub fn log_data(&self, lane: Lane, shard: &Rc<Shard>, part: Range<u64>, plain: &[u8]) -> Result<Written, Outcome> {
        let generation = shard.take_generation();
        let birth = birth_of(shard, part.clone(), generation);
        let blocks = (part.end - part.start) as u16;
        let change = Change::Insert { lba: part.start, blocks, generation, key_epoch: birth.key_epoch.0 };
        self.log(lane, shard, Kind::Data, birth, change, plain)
    }

    fn log(
        &self,
        lane: Lane,
        shard: &Rc<Shard>,
        kind: Kind,
        birth: Birth,
        change: Change,
        plain: &[u8],
    ) -> Result<Written, Outcome> {
        let volume = &shard.volume;
        let owner = Owner { volume: volume.id, shard: shard.number };
        let sealing = Sealing { kind, birth, owner, compression: volume.compression, block_crcs: None };
        let bound = sealed_bound(plain.len(), volume.block_shift);
        let appended = self.records.with_sealer(volume, birth.key_epoch, |key| {
            self.stream_of(lane).append(shard, change, bound, |out| {
                let header = self.records.codec.borrow_mut().seal(&sealing, plain, key, out)?;
                Ok::<usize, SealError>(header.record_bytes())
            })
        });
        match appended {
            Some(Ok(written)) => Ok(written),
            Some(Err(error)) => {
                tracing::error!(%error, "a record could not be sealed");
                Err(Outcome::InternalError)
            }
            // The volume is being deleted.
            None => Err(Outcome::NotReady),
        }
    }

    /// Waits until there is room for a write, or says why there won't be.
    pub(super) async fn admit(&self, shard: &Shard, range: &Range<u64>) -> Result<Admitted, Outcome> {
        let shared = &self.shared;
        let bytes = records_of(shard, range.clone()).map(|part| bound_of(shard, &part) as u64).sum();
        let (mut merged, mut tried) = (false, false);
        loop {
            let event = shared.space_event.notified();
            if shared.set.is_failed() {
                return Err(Outcome::WriteFault);
            }
            if shard.volume.is_closing() || shared.closing.load(Ordering::SeqCst) {
                return Err(Outcome::NotReady);
            }
            if shared.admission.is_full_beneath(self.now_ms()) {
                return Err(Outcome::CapacityExceeded);
            }
            if !self.has_layer_room() {
                self.layer_room().await?;
                continue;
            }
            let stripes = shared.stripes_written.load(Ordering::SeqCst);
            match shared.admission.admit(&shared.segments, stripes, bytes) {
                Ok(admitted) => {
                    if shared.admission.is_merge_due(&shared.segments) {
                        shared.want_checkpoint();
                    }
                    return Ok(admitted);
                }
                // What has been overwritten or deallocated counts until it is merged. Others may take the room that appears then:
                // as long as there was some, another look is worth it.
                Err(Refusal::Full) => {
                    let exact = shared.layers.runs() == 0 && !shared.admission.has_promised();
                    if exact || merged && shared.admission.is_full_for(&shared.segments, bytes) {
                        return Err(Outcome::CapacityExceeded);
                    }
                    let begun = shared.checkpoints_begun.load(Ordering::SeqCst);
                    self.next_checkpoint().await;
                    if merged && shared.is_refused(begun) {
                        return Err(Outcome::CapacityExceeded);
                    }
                    merged = true;
                }
                Err(Refusal::Stuck) if !tried && shared.layers.runs() > 0 => {
                    tried = true;
                    self.next_checkpoint().await;
                }
                Err(Refusal::Stuck) => return Err(Outcome::CapacityExceeded),
                Err(Refusal::Unbacked) => {
                    shared.backing.notify_one();
                    event.await;
                }
                Err(Refusal::Wait) => {
                    if shared.admission.is_low(&shared.segments) {
                        shared.cleaning.notify_one();
                    } else {
                        shared.want_checkpoint();
                    }
                    event.await;
                }
            }
        }
    }

    /// Makes a range read as zeroes. Not admitted: deallocation must work on a full pool.
    async fn unmap(&self, shard: &Rc<Shard>, range: Range<u64>, kind: Kind) -> Outcome {
        let mut at = range.start;
        while at < range.end {
            if shard.volume.is_closing() {
                return Outcome::NotReady;
            }
            if let Err(outcome) = self.layer_room().await {
                return outcome;
            }
            let inside = shard.volume.family.gate.enter().await;
            // Over another map a hole is written down leaf by leaf.
            let most = if shard.volume.keeps_holes() { at.saturating_add(HOLE_BLOCKS) } else { u64::MAX };
            let end = shard.map.slice_end(at..range.end.min(most), SLICE_EXTENTS).max(at + 1);
            let held = shard.locks.enter(at..end, false).await;
            if !self.is_unmapped(shard, &held, at..end).await {
                let outcome = self.unmap_slice(shard, at..end, kind).await;
                if outcome != Outcome::Success {
                    return outcome;
                }
            }
            drop((held, inside));
            at = end;
            yield_now().await;
        }
        Outcome::Success
    }

    /// Nothing is mapped and nothing on its way: then the log needs no marker.
    async fn is_unmapped(&self, shard: &Shard, held: &Held<'_>, range: Range<u64>) -> bool {
        let leaves = shard.map.leaves.within(&range);
        let hole = |run: &Run| run.what == What::Hole;
        let unmapped = if leaves.end - leaves.start > LOOK_LEAVES {
            // What goes over from one map to another meanwhile could be missed in both.
            if shard.volume.is_upon_hidden() {
                return false;
            }
            // More of them are not worth the reading, unless there are none at all.
            let next = self.next_leaf(shard, leaves.start).await;
            next.is_none_or(|leaf| leaf >= leaves.end)
        } else {
            self.look(shard, &range).await.iter().all(hole)
        };
        unmapped && !shard.locks.others_in(held, &range)
    }

    fn has_layer_room(&self) -> bool {
        let shared = &self.shared;
        let (runs_max, merge_bytes) = (shared.options.layer_runs_max(), shared.admission.merge_bytes());
        let percent = shared.layers.percent(runs_max, merge_bytes);
        if percent >= 50 {
            shared.want_checkpoint();
        }
        percent < 100
    }

    /// Waits until changes to maps may be made: what waits to be merged is bounded. The caller holds nothing.
    pub async fn layer_room(&self) -> Result<(), Outcome> {
        let shared = &self.shared;
        let begun = shared.checkpoints_begun.load(Ordering::SeqCst);
        loop {
            let event = shared.space_event.notified();
            if self.has_layer_room() {
                return Ok(());
            }
            if shared.set.is_failed() {
                return Err(Outcome::WriteFault);
            }
            if shared.is_refused(begun) {
                return Err(Outcome::CapacityExceeded);
            }
            event.await;
        }
    }

    /// Waits for the end of a checkpoint that begins from now on.
    pub(super) async fn next_checkpoint(&self) {
        let shared = &self.shared;
        let next = shared.checkpoints_begun.load(Ordering::SeqCst) + 1;
        loop {
            let event = shared.space_event.notified();
            if shared.checkpoints_ended.load(Ordering::SeqCst) >= next || shared.is_closing() || shared.set.is_failed()
            {
                return;
            }
            shared.want_checkpoint();
            event.await;
        }
    }

    async fn unmap_slice(&self, shard: &Rc<Shard>, range: Range<u64>, kind: Kind) -> Outcome {
        if self.shared.set.is_failed() {
            return Outcome::WriteFault;
        }
        self.stream.room_for(self, sealed_bound(0, shard.volume.block_shift)).await;
        let generation = shard.take_generation();
        let birth = birth_of(shard, range.clone(), generation);
        match self.log(Lane::Fresh, shard, kind, birth, Change::Remove { range, generation }, &[]) {
            Ok(written) => all_written(vec![written]).await,
            Err(outcome) => outcome,
        }
    }
}

/// The records that a range is cut into: at multiples of the longest, so that a rewrite replaces whole ones.
fn records_of(shard: &Shard, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let most = shard.volume.record_blocks();
    let mut at = range.start;
    std::iter::from_fn(move || {
        (at < range.end).then(|| {
            let end = ((at / most + 1) * most).min(range.end);
            let part = at..end;
            at = end;
            part
        })
    })
}

pub(super) fn bound_of(shard: &Shard, part: &Range<u64>) -> usize {
    let shift = shard.volume.block_shift;
    sealed_bound(((part.end - part.start) << shift) as usize, shift)
}

fn birth_of(shard: &Shard, range: Range<u64>, generation: u64) -> Birth {
    let volume = &shard.volume;
    Birth {
        lineage: volume.lineage,
        key_epoch: volume.keys.current(),
        lba: range.start,
        block_count: range.end - range.start,
        block_shift: volume.block_shift,
        generation,
    }
}

/// Waits for all of them; the first failure counts.
pub async fn all_written(pending: Vec<Written>) -> Outcome {
    let mut outcome = Outcome::Success;
    for written in pending {
        let result = match written.await {
            Ok(Ok(())) => continue,
            Ok(Err(WriteError::NoSpace)) => Outcome::CapacityExceeded,
            Ok(Err(WriteError::TooFewMembers)) => Outcome::WriteFault,
            Err(_) => Outcome::InternalError,
        };
        if outcome == Outcome::Success {
            outcome = result;
        }
    }
    outcome
}

fn read_outcome(result: Result<(), LostBlock>) -> Outcome {
    match result {
        Ok(()) => Outcome::Success,
        Err(LostBlock(slba)) => Outcome::UnrecoveredRead { slba },
    }
}
