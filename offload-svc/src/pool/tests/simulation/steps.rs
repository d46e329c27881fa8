//! Single steps of a plan on a mounted pool.
//!
//! Owns how each step is done and which answers to it are right. Must not know lives and crashes. Invariant: with no more
//! members hurt than the parity covers, every answer is success, but for a pool that is full or a volume that is being deleted.

use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use nvmf_target::backend::{LbaRange, Operation, Outcome};
use nvmf_target::buffer::IoBuf;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::Semaphore;

use super::super::super::{CheckpointError, CloneSpec, Health, MemberIndex, MemberState, NewMember, VolumeError};
use super::super::harness::{Live, SharedModel, Vol};
use super::super::lies::Lies;
use super::super::model::{run_of, stamp_of};
use super::super::sim::Mode;
use super::plan::{At, NAMES, Step};
use super::run::{Run, rot};

/// Requests and calls under way at once.
const DEPTH: u32 = 24;
/// Blocks of one write of a flood.
const FLOOD_BLOCKS: u64 = 32;
/// Blocks read at once when everything is compared.
const LOOK_BLOCKS: u64 = 64;

/// Does steps in one life.
pub struct Hand {
    pub run: Rc<Run>,
    pub live: Live,
    under_way: Arc<Semaphore>,
}

impl Hand {
    pub fn new(run: Rc<Run>, live: Live) -> Rc<Self> {
        Rc::new(Self { run, live, under_way: Arc::new(Semaphore::new(DEPTH as usize)) })
    }

    /// Waits until nothing is under way.
    pub async fn settle(&self) {
        drop(self.under_way.acquire_many(DEPTH).await);
    }

    /// Does something now, or beside what follows.
    async fn start(&self, wait: bool, work: impl Future<Output = ()> + 'static) {
        let permit = Arc::clone(&self.under_way).acquire_owned().await.expect("never closed");
        let work: LocalBoxFuture<'static, ()> = Box::pin(async move {
            work.await;
            drop(permit);
        });
        if wait { work.await } else { self.live.env.spawn(work) }
    }

    pub fn count(&self) {
        let status = self.live.pool.status();
        let mut tally = self.run.tally.borrow_mut();
        tally.checkpoints += status.checkpoints;
        tally.cleaned += status.cleaned_segments;
    }

    pub async fn carry_out(self: &Rc<Self>, index: usize, step: Step) {
        match step {
            Step::Write { at, wait, .. } | Step::Deallocate { at, wait } | Step::WriteZeroes { at, wait } => {
                self.change(index, step, at, wait, 1).await;
            }
            Step::Flood { at } => self.flood(index, step, at).await,
            Step::Churn { at, times } => self.change(index, step, at, false, times).await,
            Step::Swap(at) => self.change(index, step, at, false, 1).await,
            Step::Read { at, wait } => self.look(index, at, wait).await,
            Step::Verify(at) => self.verify(index, at).await,
            Step::Flush { volume } => self.flush(index, volume).await,
            Step::Create { volume, wait } => self.create(index, volume, wait).await,
            Step::Delete { volume, wait } => self.delete(index, volume, wait).await,
            Step::Grow { volume, blocks, wait } => self.grow(index, volume, blocks, wait).await,
            Step::Snapshot { of, to, wait } | Step::Clone { of, to, wait } => {
                self.copy(index, step, (of, to), wait).await;
            }
            Step::RotateKey { volume, wait } => self.rotate_key(index, volume, wait).await,
            Step::Checkpoint { wait } => {
                let hand = Rc::clone(self);
                self.start(wait, async move { hand.checkpoint().await }).await;
            }
            Step::Clean => self.live.pool.shared.cleaning.notify_one(),
            Step::Scrub { run } => self.live.pool.scrub(run),
            Step::Sleep { ms } => self.live.sleep(Duration::from_millis(ms)).await,
            Step::Settle => self.settle().await,
            Step::CheckAll => self.check_all(&format!("step {index}")).await,
            Step::Heal => self.heal().await,
            Step::Away { .. } | Step::Back { .. } | Step::Rot { .. } | Step::BadPages { .. } | Step::Lie { .. } => {
                self.hurt(step);
            }
            Step::Replace { member } => self.replace(member).await,
            Step::Stop | Step::Crash { .. } => unreachable!("a life's end is not a step within it"),
        }
    }

    fn vol(&self, volume: usize) -> Option<Vol> {
        let backend = self.live.pool.volume(NAMES[volume])?;
        let block_bytes = backend.geometry().block_bytes as usize;
        Some(Vol { backend, block_bytes })
    }

    /// The blocks of a step, if they are there.
    fn blocks(&self, at: &At) -> Option<(Vol, SharedModel)> {
        let model = self.run.expected.borrow().usable(at)?;
        let vol = self.vol(at.volume)?;
        (at.lba + at.count <= vol.backend.geometry().block_count).then_some((vol, model))
    }

    async fn change(self: &Rc<Self>, index: usize, step: Step, at: At, wait: bool, times: u64) {
        let Some((vol, model)) = self.blocks(&at) else { return };
        let hand = Rc::clone(self);
        let work = async move {
            for turn in 0..times {
                let stamp = stamp(index, turn);
                hand.run.tally.borrow_mut().requests += 1;
                one_change(&vol, &model, step, at, stamp, &hand.run).await;
            }
        };
        self.start(wait, work).await;
    }

    async fn flood(self: &Rc<Self>, index: usize, step: Step, at: At) {
        let Some((vol, model)) = self.blocks(&at) else { return };
        let hand = Rc::clone(self);
        let work = async move {
            for (turn, lba) in (at.lba..at.lba + at.count).step_by(FLOOD_BLOCKS as usize).enumerate() {
                let at = At { lba, count: FLOOD_BLOCKS.min(at.lba + at.count - lba), ..at };
                let stamp = stamp(index, turn as u64);
                hand.run.tally.borrow_mut().requests += 1;
                one_change(&vol, &model, step, at, stamp, &hand.run).await;
            }
        };
        self.start(false, work).await;
    }

    async fn look(self: &Rc<Self>, index: usize, at: At, wait: bool) {
        let Some((vol, model)) = self.blocks(&at) else { return };
        let hand = Rc::clone(self);
        self.start(wait, async move { hand.compare(&vol, &model, at, &format!("step {index}")).await }).await;
    }

    /// Reads blocks and compares them with what they may hold.
    async fn compare(&self, vol: &Vol, model: &SharedModel, at: At, what: &str) {
        let sent = model.borrow_mut().begin_read(at.lba, at.count);
        let read = vol.read(at.lba, at.count).await;
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(outcome) => {
                model.borrow_mut().abandon_read(sent);
                return self.check_failed_read(vol, model, at, outcome, what).await;
            }
        };
        let stamps: Vec<_> =
            (at.lba..).zip(bytes.chunks(vol.block_bytes)).map(|(lba, block)| stamp_of(lba, block)).collect();
        self.run.tally.borrow_mut().compared_blocks += at.count;
        let result = model.borrow_mut().end_read(sent, &stamps);
        result.unwrap_or_else(|wrong| panic!("{what}, {at:?}: {wrong:?}"));
    }

    async fn check_failed_read(&self, vol: &Vol, model: &SharedModel, at: At, outcome: Outcome, what: &str) {
        match outcome {
            Outcome::NotReady if self.run.expected.borrow().usable(&at).is_none() => {}
            Outcome::UnrecoveredRead { slba } if self.run.beyond.get() => {
                assert!((at.lba..at.lba + at.count).contains(&slba), "{what}, {at:?}: {outcome:?}");
                self.run.tally.borrow_mut().unreadable += 1;
                if at.count > 1 {
                    for lba in at.lba..at.lba + at.count {
                        Box::pin(self.compare(vol, model, At { lba, count: 1, ..at }, what)).await;
                    }
                }
            }
            outcome => panic!("{what}, {at:?}: {outcome:?}"),
        }
    }

    async fn verify(&self, index: usize, at: At) {
        let Some((vol, _)) = self.blocks(&at) else { return };
        let range = LbaRange { slba: at.lba, lba_count: at.count };
        let hurt = self.run.expected.borrow().usable(&at).is_none();
        let outcome = vol.submit(Operation::Verify { range }).await.outcome;
        assert!(outcome == Outcome::Success || hurt, "step {index}, {at:?}: {outcome:?}");
    }

    async fn flush(&self, index: usize, volume: usize) {
        let Some(vol) = self.vol(volume) else { return };
        let outcome = vol.submit(Operation::Flush).await.outcome;
        assert!(matches!(outcome, Outcome::Success | Outcome::NotReady), "step {index}, flush: {outcome:?}");
    }

    /// Compares every block that was ever touched, with nothing else under way, and the books with them.
    pub async fn check_all(&self, what: &str) {
        self.settle().await;
        let there = self.run.expected.borrow().there();
        for (volume, name, model) in there {
            let vol = self.vol(volume).unwrap_or_else(|| panic!("{what}: no volume {name}"));
            let touched = model.borrow().touched();
            for at in ranges(volume, &touched) {
                self.compare(&vol, &model, at, what).await;
            }
            let (used, filled) = (vol.backend.geometry().used_blocks, model.borrow().filled());
            assert!(used >= filled || self.run.beyond.get(), "{what}: {name} counts {used} blocks and has {filled}");
        }
        let space = self.live.pool.status().space;
        let parts = space.metadata_bytes
            + space.parity_bytes
            + space.reserve_bytes
            + space.checkpoint_bytes
            + space.used_bytes
            + space.reclaimable_bytes
            + space.free_bytes;
        assert_eq!(parts, space.raw_bytes, "{what}: {space:?}");
    }

    pub async fn checkpoint(&self) {
        match self.live.pool.checkpoint().await {
            // A full pool may have no segment for it; it stays consistent.
            Ok(()) | Err(CheckpointError::NoSpace) => {}
            Err(error) => panic!("a checkpoint: {error}"),
        }
    }

    async fn create(self: &Rc<Self>, index: usize, volume: usize, wait: bool) {
        let spec = self.run.plan.specs[volume].clone();
        {
            let mut expected = self.run.expected.borrow_mut();
            if !expected.begin(volume, false) {
                return;
            }
            expected.begin_create(volume, spec.size_bytes / u64::from(spec.block_bytes));
        }
        let hand = Rc::clone(self);
        let work = async move {
            let made = hand.live.pool.create_volume(spec).await;
            check_volume_call(index, made.as_ref().err());
            hand.run.expected.borrow_mut().end(volume, made.is_ok(), None);
        };
        self.start(wait, work).await;
    }

    async fn delete(self: &Rc<Self>, index: usize, volume: usize, wait: bool) {
        {
            let mut expected = self.run.expected.borrow_mut();
            if !expected.begin(volume, true) {
                return;
            }
            expected.begin_delete(volume);
        }
        let hand = Rc::clone(self);
        let work = async move {
            let gone = hand.live.pool.delete_volume(NAMES[volume]).await;
            check_volume_call(index, gone.as_ref().err());
            hand.run.expected.borrow_mut().end(volume, gone.is_err(), None);
        };
        self.start(wait, work).await;
    }

    /// Takes a snapshot, or makes a clone.
    async fn copy(self: &Rc<Self>, index: usize, step: Step, (of, to): (usize, usize), wait: bool) {
        if of == to || !self.run.expected.borrow_mut().begin_copy(of, to) {
            return;
        }
        let hand = Rc::clone(self);
        let work = async move {
            let pool = &hand.live.pool;
            let made = match step {
                Step::Snapshot { .. } => pool.snapshot_volume(NAMES[of], NAMES[to]).await,
                _ => pool.clone_volume(NAMES[of], CloneSpec { name: NAMES[to].into(), compression: None }).await,
            };
            check_volume_call(index, made.as_ref().err());
            hand.run.tally.borrow_mut().copies += u64::from(made.is_ok());
            hand.run.expected.borrow_mut().end_copy(of, to, made.is_ok());
        };
        self.start(wait, work).await;
    }

    async fn grow(self: &Rc<Self>, index: usize, volume: usize, blocks: u64, wait: bool) {
        let Some(vol) = self.vol(volume) else { return };
        if vol.backend.geometry().block_count >= blocks || !self.run.expected.borrow_mut().begin(volume, true) {
            return;
        }
        self.run.expected.borrow_mut().begin_grow(volume, blocks);
        let hand = Rc::clone(self);
        let work = async move {
            let grown = hand.live.pool.resize_volume(NAMES[volume], blocks * vol.block_bytes as u64).await;
            check_volume_call(index, grown.as_ref().err());
            hand.run.expected.borrow_mut().end(volume, true, grown.is_ok().then_some(blocks));
        };
        self.start(wait, work).await;
    }

    async fn rotate_key(self: &Rc<Self>, index: usize, volume: usize, wait: bool) {
        if !self.run.expected.borrow_mut().begin(volume, true) {
            return;
        }
        let hand = Rc::clone(self);
        let work = async move {
            let rotated = hand.live.pool.rotate_key(NAMES[volume]).await;
            check_volume_call(index, rotated.as_ref().err());
            hand.run.expected.borrow_mut().end(volume, true, None);
        };
        self.start(wait, work).await;
    }

    /// The slot that a place's member is in.
    fn slot(&self, place: usize) -> Option<usize> {
        let members = self.live.pool.status().members;
        slot_of(members.get(place)?.name.as_deref()?)
    }

    /// Notes which slots the set's members are in.
    pub fn note_slots(&self) {
        let slots = (0..self.run.plan.layout.members()).map(|place| self.slot(place).expect("all members are well"));
        *self.run.slots.borrow_mut() = slots.collect();
    }

    /// Hurts a member, unless too many are.
    fn hurt(&self, step: Step) {
        let (Step::Away { member, .. }
        | Step::Back { member }
        | Step::Rot { member, .. }
        | Step::BadPages { member, .. }
        | Step::Lie { member, .. }) = step
        else {
            return;
        };
        let Some(slot) = self.slot(member) else { return };
        let mut disk = self.live.world.disks.0[slot].borrow_mut();
        if let Step::Back { .. } = step {
            disk.mode = Mode::Good;
            disk.be_honest();
            drop(disk);
            return self.live.world.release();
        }
        let mut hurt = self.run.hurt.borrow_mut();
        if !hurt.contains(&member) && hurt.len() >= usize::from(self.run.plan.layout.parity_shards) {
            return;
        }
        hurt.insert(member);
        self.run.tally.borrow_mut().hurt += 1;
        match step {
            Step::Away { mode, .. } => disk.mode = mode,
            Step::Rot { one_in, seed, .. } => rot(&mut disk, one_in, seed),
            Step::BadPages { one_in, seed, .. } => {
                let mut rng = StdRng::seed_from_u64(seed);
                let pages: Vec<u64> = disk.pages().map(|(at, _)| at / 4096).filter(|page| *page >= 16).collect();
                disk.bad_pages.extend(pages.into_iter().filter(|_| rng.random_range(0..one_in) == 0));
            }
            Step::Lie { liar, percent, seed, .. } => disk.lies = Some(Lies::new(seed, percent, liar)),
            _ => {}
        }
    }

    async fn replace(&self, member: usize) {
        let slot = self.run.slots_used.get();
        let Some(input) = self.run.inputs.get(slot) else { return };
        let size_bytes = input.size_bytes.expect("a spare is there");
        let new = NewMember { slot: MemberIndex(slot as u8), name: input.name.clone(), size_bytes };
        // Whatever comes of it, it may have been written to.
        self.run.slots_used.set(slot + 1);
        if self.live.pool.replace_member(&member.to_string(), new).await.is_ok() {
            self.run.tally.borrow_mut().replaced += 1;
        }
    }

    /// All members become well; what they lack is brought to them, and a scrub finds nothing that it can't repair.
    pub async fn heal(&self) {
        for disk in &self.live.world.disks.0 {
            let mut disk = disk.borrow_mut();
            disk.mode = Mode::Good;
            disk.be_honest();
            disk.bad_pages.clear();
        }
        self.live.world.release();
        self.until_whole().await;
        for _ in 0..4 {
            self.scrub().await;
            let found = self.live.pool.status().scrub;
            // A mount that is cut short after its checkpoint leaves stripes unmarked that were never finished: a scrub takes
            // them for lost. That nothing is missing is seen when everything is read.
            let cut_short = self.run.tally.borrow().crashes_in_mount > 0;
            assert!(found.stripes_lost == 0 || cut_short, "no more was hurt than the parity covers: {found:?}");
            if found.bad_shards == found.repaired_shards {
                self.run.hurt.borrow_mut().clear();
                self.run.tally.borrow_mut().heals += 1;
                return;
            }
        }
        panic!("scrubs don't repair what they find: {:?}", self.live.pool.status().scrub);
    }

    async fn until_whole(&self) {
        let pool = &self.live.pool;
        for turn in 0..6000 {
            let status = pool.status();
            let filling = (0..status.members.len()).any(|place| pool.is_being_replaced(place as u8));
            if status.health == Health::Healthy && !filling {
                return;
            }
            // Those that did not answer at the mount are brought, as the service does it.
            if turn % 50 == 0 && status.members.iter().any(|member| member.state == MemberState::Missing) {
                self.attach_all().await;
            }
            self.live.sleep(Duration::from_millis(100)).await;
        }
        panic!("the set does not become whole: {:#?}", pool.status());
    }

    async fn attach_all(&self) {
        let in_use = self.live.pool.slots_in_use();
        let slots = (0..self.run.slots_used.get()).map(|slot| MemberIndex(slot as u8));
        for slot in slots.filter(|slot| !in_use.contains(slot)) {
            let input = &self.run.inputs[usize::from(slot.0)];
            let size_bytes = input.size_bytes.expect("it is there");
            // One that has been replaced is refused.
            let _ = self.live.pool.attach_member(NewMember { slot, name: input.name.clone(), size_bytes }).await;
        }
    }

    async fn scrub(&self) {
        let running = || self.live.pool.status().scrub.running;
        // One that is under way may have passed by what is wrong.
        for ask in [false, true] {
            for _ in 0..36_000 {
                if !running() {
                    break;
                }
                self.live.sleep(Duration::from_millis(20)).await;
            }
            assert!(!running(), "the scrub does not end: {:?}", self.live.pool.status().scrub);
            if !ask {
                self.live.pool.scrub(true);
                while !running() {
                    self.live.sleep(Duration::from_millis(1)).await;
                }
            }
        }
    }

    /// Deletes all volumes: their room comes back.
    pub async fn delete_all(&self) {
        self.settle().await;
        let there = self.run.expected.borrow().there();
        for (_, name, _) in there {
            self.live.pool.delete_volume(&name).await.unwrap_or_else(|error| panic!("deleting {name}: {error}"));
        }
        // Snapshots that others read from go once these have what shows through.
        let is_left = || self.live.pool.shared.all_volumes().iter().any(|volume| volume.is_hidden());
        for _ in 0..600 {
            if !is_left() {
                break;
            }
            self.live.sleep(Duration::from_secs(1)).await;
        }
        assert!(!is_left(), "a snapshot without a name stays");
        for _ in 0..2 {
            self.live.pool.checkpoint().await.unwrap_or_else(|error| panic!("an empty pool: {error}"));
        }
        let space = self.live.pool.status().space;
        assert_eq!((space.used_bytes, space.logical_bytes), (0, 0), "an empty pool: {space:?}");
        let live = self.live.pool.shared.segments.live_total();
        assert_eq!(live, 0, "bytes count as alive in an empty pool: {space:?}");
    }
}

/// Of every write its own; even ones can be compressed.
fn stamp(index: usize, turn: u64) -> u64 {
    (index as u64 * 64 + turn + 1) * 2 + u64::from(!index.is_multiple_of(3))
}

/// Why a call that changes volumes may fail: want of room, and a rotation that has not ended.
fn check_volume_call(index: usize, error: Option<&VolumeError>) {
    match error {
        None | Some(VolumeError::Checkpoint(CheckpointError::NoSpace) | VolumeError::Rotating { .. }) => {}
        Some(error) => panic!("step {index}: {error}"),
    }
}

async fn one_change(vol: &Vol, model: &SharedModel, step: Step, at: At, stamp: u64, run: &Run) {
    let range = LbaRange { slba: at.lba, lba_count: at.count };
    let bytes = || IoBuf::copy_of(&run_of(stamp, at.lba, at.count, vol.block_bytes));
    let (operation, stamp) = match step {
        Step::Deallocate { .. } => (Operation::Deallocate { ranges: vec![range] }, 0),
        Step::WriteZeroes { .. } => (Operation::WriteZeroes { range, deallocate: false, fua: false }, 0),
        Step::Swap(_) => {
            let Ok(old) = vol.read(at.lba, at.count).await else { return };
            let expected = IoBuf::copy_of(&old);
            (Operation::CompareAndWrite { range, expected, buffer: bytes(), fua: false }, stamp)
        }
        Step::Write { fua, .. } => (Operation::Write { range, buffer: bytes(), fua }, stamp),
        _ => (Operation::Write { range, buffer: bytes(), fua: false }, stamp),
    };
    let sent = model.borrow_mut().send(at.lba, at.count, stamp);
    let outcome = vol.submit(operation).await.outcome;
    let mut model = model.borrow_mut();
    match outcome {
        Outcome::Success => model.answer(at.lba, at.count, sent),
        Outcome::CompareFailure if matches!(step, Step::Swap(_)) => model.refuse(at.lba, at.count, sent),
        Outcome::CapacityExceeded if stamp != 0 => {
            run.tally.borrow_mut().refused_full += 1;
            model.fail(at.lba, at.count, sent);
        }
        Outcome::NotReady if run.expected.borrow().usable(&at).is_none() => model.fail(at.lba, at.count, sent),
        outcome => panic!("{step:?}: {outcome:?}"),
    }
}

/// Neighbouring blocks together, not too many at once.
fn ranges(volume: usize, touched: &[u64]) -> Vec<At> {
    let mut ranges: Vec<At> = Vec::new();
    for &lba in touched {
        match ranges.last_mut() {
            Some(at) if at.lba + at.count == lba && at.count < LOOK_BLOCKS => at.count += 1,
            _ => ranges.push(At { volume, lba, count: 1 }),
        }
    }
    ranges
}

/// The slot of a device by its name.
pub fn slot_of(name: &str) -> Option<usize> {
    name.strip_prefix("mem:")?.parse().ok()
}
