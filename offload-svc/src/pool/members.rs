//! The set of members, and one member's reads and writes under a deadline.
//!
//! Owns who counts, who has left, who is coming back, and the error counters. Must not know stripes. Invariants: the set
//! changes outside a mount only after superblocks say so; a candidate is written to and serves no read; no wait here lasts
//! longer than the member timeout.
//!
//! Each place of the set has two entries: the member that counts or counted there, and a candidate for the place, which is
//! the same member coming back or another that replaces it. `Incarnation` tells them apart across the moment in which the
//! candidate becomes the member.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::channel::mpsc::UnboundedSender;
use futures::future::{Either, select};
use nvmf_target::buffer::IoBuf;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use uuid::Uuid;

use super::env::{Env, MemberIndex};
use super::options::Layout;
use super::shields::Shields;
use super::status::{MemberState, Remark};
use super::superblock::Publication;
use super::traffic::Traffic;

/// Who stands at a place.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Identity {
    pub uuid: Uuid,
    /// How to reach it; `None` when it is not there.
    pub slot: Option<MemberIndex>,
    /// How the configuration names it.
    pub name: Option<String>,
    /// Its size as its superblock has it.
    pub size_bytes: u64,
}

/// One stay of a member at its place: another at every return, so that what was begun before does not count for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incarnation(u64);

/// No slot.
const NOWHERE: u16 = u16::MAX;

/// One member as this mount knows it, at its place in the set or as the candidate for it.
#[derive(Debug, Default)]
pub struct Member {
    identity: Mutex<Identity>,
    /// The identity's slot, for the data path.
    slot: AtomicU16,
    incarnation: AtomicU64,
    state: Mutex<(MemberState, u64)>,
    pub read_errors: AtomicU64,
    pub write_errors: AtomicU64,
    pub timeouts: AtomicU64,
    pub bad_shards: AtomicU64,
    pub repaired_shards: AtomicU64,
    remarks: Mutex<Vec<Remark>>,
    /// The file system beneath it had no room when it was last asked.
    full_beneath: AtomicBool,
    /// Reads that the others served since it took too long.
    pub slow_reads: AtomicU64,
    /// Woken when the member leaves the set, so that nothing waits for it any longer.
    gone: Notify,
    /// Requests that it has not given back, whether or not anybody still waits for them.
    held: Arc<AtomicUsize>,
}

impl Member {
    pub fn new(identity: Identity) -> Self {
        let member = Self::default();
        member.identify(identity);
        member
    }

    fn identify(&self, identity: Identity) {
        let slot = identity.slot.map_or(NOWHERE, |MemberIndex(slot)| slot.into());
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = identity;
        self.slot.store(slot, Ordering::SeqCst);
    }

    pub fn identity(&self) -> Identity {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn slot(&self) -> Option<MemberIndex> {
        u8::try_from(self.slot.load(Ordering::SeqCst)).ok().map(MemberIndex)
    }

    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.incarnation.load(Ordering::SeqCst))
    }

    /// Whether it has given back all requests: until then an old write of ours could still reach the medium.
    pub fn is_idle(&self) -> bool {
        self.held.load(Ordering::SeqCst) == 0
    }

    /// A request that goes to it past [`MemberIo`]; to be dropped when it has come back.
    pub fn hold(&self) -> Hold {
        self.held.fetch_add(1, Ordering::SeqCst);
        Hold(Arc::clone(&self.held))
    }

    /// What is out of the ordinary about it.
    pub fn remarks(&self) -> Vec<Remark> {
        let mut remarks = self.remarks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        remarks.extend(self.is_full_beneath().then_some(Remark::FileSystemFull));
        remarks
    }

    /// Whether the file system beneath it had no room when it was last asked.
    pub fn is_full_beneath(&self) -> bool {
        self.full_beneath.load(Ordering::Relaxed)
    }

    pub fn set_full_beneath(&self, full: bool) {
        self.full_beneath.store(full, Ordering::Relaxed);
    }

    /// Says so once; whether it was new.
    pub fn remark(&self, remark: Remark) -> bool {
        let mut remarks = self.remarks.lock().unwrap_or_else(PoisonError::into_inner);
        let new = !remarks.contains(&remark);
        if new {
            remarks.push(remark);
        }
        new
    }

    /// Its state, and the epoch in which it was last in the set.
    pub fn state(&self) -> (MemberState, u64) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_state(&self, state: MemberState, epoch: u64) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = (state, epoch);
    }
}

/// A request that a member has not given back.
#[derive(Debug)]
pub struct Hold(Arc<AtomicUsize>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The pool's members and which of them count.
#[derive(Debug)]
pub struct MemberSet {
    pub pool: Uuid,
    pub layout: Layout,
    pub segment_count: u32,
    pub timeout: Duration,
    /// The places, then a candidate for each of them.
    entries: Vec<Member>,
    mask: AtomicU32,
    /// Places whose candidate is written to.
    joining: AtomicU32,
    epoch: AtomicU64,
    /// The last publication that is durable on the whole set.
    publication: Mutex<Publication>,
    failed: AtomicBool,
    incarnations: AtomicU64,
    /// Stripes being written.
    pub writes: Grace,
    /// Which members may still hold which shields.
    pub shields: Shields,
    /// What they were.
    pub traffic: Traffic,
    /// Woken when a member has left the set, or something may have come back.
    pub changed: Notify,
}

/// Asks that members leave the set, each in the incarnation that failed; answered when that is durable, or can't be.
pub struct Exclusion {
    pub members: Vec<(usize, Incarnation)>,
    pub done: oneshot::Sender<Result<(), TooFewMembers>>,
}

/// Fewer than k members would be left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("fewer than k members are left")]
pub struct TooFewMembers;

impl MemberSet {
    /// `places` are the k+m members in the order of the set.
    pub fn new(pool: Uuid, layout: Layout, segment_count: u32, timeout: Duration, places: Vec<Member>) -> Self {
        let mut entries = places;
        for place in 0..entries.len() {
            entries[place].incarnation.store(place as u64, Ordering::SeqCst);
            entries.push(Member { slot: AtomicU16::new(NOWHERE), ..Member::default() });
        }
        let incarnations = AtomicU64::new(entries.len() as u64);
        Self {
            pool,
            layout,
            segment_count,
            timeout,
            entries,
            mask: AtomicU32::new(0),
            joining: AtomicU32::new(0),
            epoch: AtomicU64::new(0),
            publication: Mutex::default(),
            failed: AtomicBool::new(false),
            incarnations,
            writes: Grace::default(),
            shields: Shields::default(),
            traffic: Traffic::default(),
            changed: Notify::new(),
        }
    }

    /// k + m.
    pub fn count(&self) -> usize {
        self.layout.members()
    }

    /// The entry of the candidate for a place.
    pub fn candidate(&self, place: usize) -> usize {
        self.count() + place
    }

    /// An entry: places first, then candidates.
    pub fn entry(&self, index: usize) -> &Member {
        &self.entries[index]
    }

    /// The members at the places.
    pub fn places(&self) -> &[Member] {
        &self.entries[..self.count()]
    }

    pub fn mask(&self) -> u32 {
        self.mask.load(Ordering::SeqCst)
    }

    /// Places whose candidate is written to.
    pub fn joining(&self) -> u32 {
        self.joining.load(Ordering::SeqCst)
    }

    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// The last publication that is durable on the whole set.
    pub fn publication(&self) -> Publication {
        *self.publication.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note_publication(&self, publication: Publication) {
        *self.publication.lock().unwrap_or_else(PoisonError::into_inner) = publication;
    }

    pub fn contains(&self, place: usize) -> bool {
        self.mask() & (1 << place) != 0
    }

    /// Whether an entry takes part: a place in the set, a candidate that is written to.
    fn takes_part(&self, index: usize) -> bool {
        match index.checked_sub(self.count()) {
            None => self.contains(index),
            Some(place) => self.joining() & (1 << place) != 0,
        }
    }

    /// Sets who counts, and wakes whoever waits for one that has left.
    pub fn set(&self, mask: u32, epoch: u64) {
        let before = self.mask.swap(mask, Ordering::SeqCst);
        let old_epoch = self.epoch.swap(epoch, Ordering::SeqCst);
        for (index, member) in self.places().iter().enumerate() {
            if before & !mask & (1 << index) != 0 {
                member.set_state(MemberState::Out, old_epoch);
                member.set_full_beneath(false);
                member.gone.notify_waiters();
            }
        }
        self.changed.notify_waiters();
    }

    /// From now on stripes are written to `identity` as well, as the candidate for a place. None may be there already.
    pub fn begin_join(&self, place: usize, identity: Identity) -> Incarnation {
        let entry = self.entry(self.candidate(place));
        let incarnation = self.incarnations.fetch_add(1, Ordering::SeqCst);
        entry.identify(identity);
        entry.incarnation.store(incarnation, Ordering::SeqCst);
        self.joining.fetch_or(1 << place, Ordering::SeqCst);
        Incarnation(incarnation)
    }

    /// The candidate is not written to any more.
    pub fn end_join(&self, place: usize) {
        self.joining.fetch_and(!(1 << place), Ordering::SeqCst);
        let candidate = self.entry(self.candidate(place));
        candidate.identify(Identity::default());
        candidate.gone.notify_waiters();
        self.changed.notify_waiters();
    }

    /// The candidate becomes the member. Who counts is set afterwards. Writes that began before still go to the candidate:
    /// it stays until [`Grace::passed`] and [`MemberSet::end_join`].
    pub fn promote(&self, place: usize) {
        let (entry, candidate) = (self.entry(place), self.entry(self.candidate(place)));
        entry.identify(candidate.identity());
        entry.incarnation.store(candidate.incarnation().0, Ordering::SeqCst);
        entry.set_state(MemberState::Active, 0);
        entry.remarks.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether an entry stands for this stay of a member.
    pub fn is(&self, index: usize, incarnation: Incarnation) -> bool {
        self.entry(index).incarnation() == incarnation
    }

    /// Who stands at a place that is not in the set: another device, or the same under a new slot.
    pub fn identify(&self, index: usize, identity: Identity) {
        self.entry(index).identify(identity);
    }

    pub fn is_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// Nothing is written any more.
    pub fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    /// Whether enough members would be left without `members`.
    pub fn can_lose(&self, members: u32) -> bool {
        (self.mask() & !members).count_ones() >= u32::from(self.layout.data_shards)
    }
}

/// Counts what is under way in two turns, so that the end of all that began before a moment can be waited for while
/// other work goes on beginning.
#[derive(Debug, Default)]
pub struct Grace {
    turn: AtomicUsize,
    under_way: [AtomicUsize; 2],
    quiet: Notify,
    /// A turn ends only when the one before has.
    ending: tokio::sync::Mutex<()>,
}

/// Work under way.
#[derive(Debug)]
pub struct UnderWay<'a> {
    grace: &'a Grace,
    turn: usize,
}

impl Grace {
    pub fn enter(&self) -> UnderWay<'_> {
        loop {
            let turn = self.turn.load(Ordering::SeqCst) % 2;
            self.under_way[turn].fetch_add(1, Ordering::SeqCst);
            let entered = UnderWay { grace: self, turn };
            // If the turn has ended meanwhile, who waits for its end may not have seen us.
            if self.turn.load(Ordering::SeqCst) % 2 == turn {
                return entered;
            }
        }
    }

    /// Waits until all that had begun has ended.
    pub async fn passed(&self) {
        let _ending = self.ending.lock().await;
        let ended = self.turn.fetch_add(1, Ordering::SeqCst) % 2;
        loop {
            let quiet = self.quiet.notified();
            if self.under_way[ended].load(Ordering::SeqCst) == 0 {
                return;
            }
            quiet.await;
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.grace.under_way[self.turn].fetch_sub(1, Ordering::SeqCst) == 1 {
            self.grace.quiet.notify_waiters();
        }
    }
}

/// How a member failed a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// It is not in the set (any more).
    Gone,
    /// No answer within the timeout.
    Timeout,
    /// The file system beneath it is full.
    NoSpace,
    /// It answered with an error.
    Error,
    /// It was not waited for: the others are enough.
    Slow,
}

fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// How members are put out of the set.
#[derive(Clone)]
pub enum Excluder {
    /// While mounting: in memory; the mount writes superblocks before anything is served.
    Mounting,
    /// While serving: by the coordinator, durably.
    Serving(UnboundedSender<Exclusion>),
}

/// One reactor's access to the members, by entry: places first, then candidates.
pub struct MemberIo {
    pub env: Rc<dyn Env>,
    pub set: Arc<MemberSet>,
    pub excluder: Excluder,
    /// For each entry, the right to have a request under way. It comes back with the request's buffer, however long the
    /// member keeps that: so members that hang hold a bounded part of the buffers.
    lanes: Vec<Arc<Semaphore>>,
}

impl MemberIo {
    /// At most `under_way_max` requests are under way on each member.
    pub fn new(env: Rc<dyn Env>, set: Arc<MemberSet>, excluder: Excluder, under_way_max: usize) -> Self {
        let lanes = (0..2 * set.count()).map(|_| Arc::new(Semaphore::new(under_way_max.max(1)))).collect();
        Self { env, set, excluder, lanes }
    }

    async fn lane(&self, index: usize) -> Result<OwnedSemaphorePermit, Failure> {
        let lane = Arc::clone(&self.lanes[index]);
        if let Ok(permit) = Arc::clone(&lane).try_acquire_owned() {
            return Ok(permit);
        }
        self.race(index, lane.acquire_owned()).await?.map_err(|_| Failure::Gone)
    }

    /// Carries out `work` to its end, whether or not somebody still waits for it, and gives the right back then.
    fn carry_out<T: 'static>(
        &self,
        index: usize,
        permit: OwnedSemaphorePermit,
        work: impl Future<Output = T> + 'static,
    ) -> oneshot::Receiver<T> {
        let (done, answer) = oneshot::channel();
        let held = self.set.entry(index).hold();
        self.env.spawn(Box::pin(async move {
            let result = work.await;
            drop(permit);
            drop(held);
            // Whoever asked may have stopped waiting.
            let _ = done.send(result);
        }));
        answer
    }

    /// Where a request for an entry goes now, if it takes part.
    fn slot(&self, index: usize) -> Result<MemberIndex, Failure> {
        let slot = self.set.entry(index).slot().ok_or(Failure::Gone)?;
        if self.set.takes_part(index) { Ok(slot) } else { Err(Failure::Gone) }
    }

    /// Reads `len` bytes of a member of the set.
    pub async fn read(&self, place: usize, offset: u64, len: usize) -> Result<IoBuf, Failure> {
        self.slot(place)?;
        let permit = self.lane(place).await?;
        let buf = self.env.buffer(len).await;
        // Only now: while we waited, the place may have changed hands.
        let answer = self.carry_out(place, permit, self.env.read(self.slot(place)?, offset, buf));
        let (result, buf) = self.race(place, answer).await?.map_err(|_| Failure::Error)?;
        match result {
            Ok(()) => Ok(buf),
            Err(error) => {
                self.set.entry(place).read_errors.fetch_add(1, Ordering::Relaxed);
                if error.kind() == io::ErrorKind::UnexpectedEof && self.set.entry(place).remark(Remark::CutInUse) {
                    tracing::error!(place, offset, "the member ends here: it has been cut while in use");
                }
                tracing::debug!(place, offset, %error, "read failed");
                Err(Failure::Error)
            }
        }
    }

    /// Writes and makes durable.
    pub async fn write_durably(&self, index: usize, offset: u64, buf: IoBuf) -> Result<(), Failure> {
        self.submit(index, Some((offset, buf)), true).await
    }

    /// Writes; durable after a [`MemberIo::sync`].
    pub async fn write(&self, index: usize, offset: u64, buf: IoBuf) -> Result<(), Failure> {
        self.submit(index, Some((offset, buf)), false).await
    }

    /// Makes durable what was written before.
    pub async fn sync(&self, index: usize) -> Result<(), Failure> {
        self.submit(index, None, true).await
    }

    /// Sets room aside for a range.
    pub async fn allocate(&self, index: usize, offset: u64, len: u64) -> Result<(), Failure> {
        self.change_room(index, |slot| self.env.allocate(slot, offset, len)).await
    }

    /// Gives the room of a range back.
    pub async fn release(&self, index: usize, offset: u64, len: u64) -> Result<(), Failure> {
        self.change_room(index, |slot| self.env.release(slot, offset, len)).await
    }

    async fn change_room<F>(&self, index: usize, work: impl FnOnce(MemberIndex) -> F) -> Result<(), Failure>
    where
        F: Future<Output = io::Result<()>> + 'static,
    {
        self.slot(index)?;
        let permit = self.lane(index).await?;
        let work = work(self.slot(index)?);
        let result = self.race(index, self.carry_out(index, permit, work)).await?.map_err(|_| Failure::Error)?;
        // File systems that can't are no faulty members.
        result.map_err(|error| if is_no_space(&error) { Failure::NoSpace } else { Failure::Error })
    }

    async fn submit(&self, index: usize, data: Option<(u64, IoBuf)>, durably: bool) -> Result<(), Failure> {
        self.slot(index)?;
        let permit = self.lane(index).await?;
        let slot = self.slot(index)?;
        let env = Rc::clone(&self.env);
        let work = async move {
            if let Some((offset, buf)) = data {
                let (result, _) = env.write(slot, offset, buf).await;
                result?;
            }
            if durably { env.sync(slot).await } else { Ok(()) }
        };
        let result = self.race(index, self.carry_out(index, permit, work)).await?.map_err(|_| Failure::Error)?;
        result.map_err(|error| self.write_failure(index, &error))
    }

    fn write_failure(&self, index: usize, error: &io::Error) -> Failure {
        if is_no_space(error) {
            self.set.entry(index).set_full_beneath(true);
            return Failure::NoSpace;
        }
        self.set.entry(index).write_errors.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(index, %error, "write failed");
        Failure::Error
    }

    /// Waits for `work`, but not past the timeout and not for a member that has left.
    async fn race<T>(&self, index: usize, work: impl Future<Output = T>) -> Result<T, Failure> {
        let state = self.set.entry(index);
        let mut gone = pin!(state.gone.notified());
        gone.as_mut().enable();
        if !self.set.takes_part(index) {
            return Err(Failure::Gone);
        }
        let deadline = self.env.sleep_until(self.env.now() + self.set.timeout);
        let late = select(gone, deadline);
        match select(pin!(work), late).await {
            Either::Left((done, _)) => Ok(done),
            Either::Right((Either::Left(_), _)) => Err(Failure::Gone),
            Either::Right((Either::Right(_), _)) => {
                state.timeouts.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(index, timeout = ?self.set.timeout, "no answer in time");
                Err(Failure::Timeout)
            }
        }
    }

    /// Puts places out of the set. When it returns `Ok`, nothing that they lack can be missed by a later mount.
    pub async fn exclude(&self, places: u32) -> Result<(), TooFewMembers> {
        let named = (0..self.set.count()).filter(|place| places & (1 << place) != 0);
        self.exclude_all(named.map(|place| (place, self.set.entry(place).incarnation())).collect()).await
    }

    /// Puts out those that stand at their places in the incarnations named, as members or as candidates. Others that have
    /// taken their places since stay.
    pub async fn exclude_all(&self, members: Vec<(usize, Incarnation)>) -> Result<(), TooFewMembers> {
        match &self.excluder {
            Excluder::Mounting => {
                let mask = members.iter().fold(0, |mask, (place, _)| mask | 1 << place);
                if !self.set.can_lose(mask) {
                    return Err(TooFewMembers);
                }
                self.set.set(self.set.mask() & !mask, self.set.epoch());
                Ok(())
            }
            Excluder::Serving(channel) => {
                let (done, answer) = oneshot::channel();
                channel.unbounded_send(Exclusion { members, done }).map_err(|_| TooFewMembers)?;
                answer.await.unwrap_or(Err(TooFewMembers))
            }
        }
    }
}
