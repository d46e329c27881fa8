//! The set of members, and one member's reads and writes under a deadline.
//!
//! Owns who counts, who has left, and the error counters. Must not know stripes. Invariants: the set only shrinks, and
//! outside a mount only after the superblocks of the rest say so; no wait here lasts longer than the member timeout.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::channel::mpsc::UnboundedSender;
use futures::future::{Either, select};
use nvmf_target::buffer::IoBuf;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use uuid::Uuid;

use super::env::{Env, MemberIndex};
use super::options::Layout;
use super::status::MemberState;

/// One member as this mount knows it, at its place in the set.
#[derive(Debug)]
pub struct Member {
    pub uuid: Uuid,
    /// How to reach it; `None` when it was missing at the mount.
    pub slot: Option<MemberIndex>,
    pub name: Option<String>,
    pub size_bytes: u64,
    state: Mutex<(MemberState, u64)>,
    pub read_errors: AtomicU64,
    pub write_errors: AtomicU64,
    pub timeouts: AtomicU64,
    pub bad_shards: AtomicU64,
    pub repaired_shards: AtomicU64,
    /// Woken when the member leaves the set, so that nothing waits for it any longer.
    gone: Notify,
}

impl Member {
    pub fn new(uuid: Uuid, slot: Option<MemberIndex>, name: Option<String>, size_bytes: u64) -> Self {
        Self {
            uuid,
            slot,
            name,
            size_bytes,
            state: Mutex::new((MemberState::Active, 0)),
            read_errors: AtomicU64::new(0),
            write_errors: AtomicU64::new(0),
            timeouts: AtomicU64::new(0),
            bad_shards: AtomicU64::new(0),
            repaired_shards: AtomicU64::new(0),
            gone: Notify::new(),
        }
    }

    /// Its state, and the epoch in which it was last in the set.
    pub fn state(&self) -> (MemberState, u64) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_state(&self, state: MemberState, epoch: u64) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = (state, epoch);
    }
}

/// The pool's members and which of them count.
#[derive(Debug)]
pub struct MemberSet {
    pub pool: Uuid,
    pub layout: Layout,
    pub segment_count: u32,
    pub timeout: Duration,
    pub members: Vec<Member>,
    mask: AtomicU32,
    epoch: AtomicU64,
    failed: AtomicBool,
}

/// Asks that members leave the set; answered when that is durable, or can't be.
pub struct Exclusion {
    pub members: u32,
    pub done: oneshot::Sender<Result<(), TooFewMembers>>,
}

/// Fewer than k members would be left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("fewer than k members are left")]
pub struct TooFewMembers;

impl MemberSet {
    pub fn new(pool: Uuid, layout: Layout, segment_count: u32, timeout: Duration, members: Vec<Member>) -> Self {
        Self {
            pool,
            layout,
            segment_count,
            timeout,
            members,
            mask: AtomicU32::new(0),
            epoch: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        }
    }

    /// k + m.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    pub fn mask(&self) -> u32 {
        self.mask.load(Ordering::SeqCst)
    }

    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    pub fn contains(&self, member: usize) -> bool {
        self.mask() & (1 << member) != 0
    }

    /// Sets who counts, and wakes whoever waits for one that has left.
    pub fn set(&self, mask: u32, epoch: u64) {
        let before = self.mask.swap(mask, Ordering::SeqCst);
        let old_epoch = self.epoch.swap(epoch, Ordering::SeqCst);
        for (index, member) in self.members.iter().enumerate() {
            if before & !mask & (1 << index) != 0 {
                member.set_state(MemberState::Out, old_epoch);
                member.gone.notify_waiters();
            }
        }
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
}

/// How members are put out of the set.
#[derive(Clone)]
pub enum Excluder {
    /// While mounting: in memory; the mount writes superblocks before anything is served.
    Mounting,
    /// While serving: by the coordinator, durably.
    Serving(UnboundedSender<Exclusion>),
}

/// One reactor's access to the members.
pub struct MemberIo {
    pub env: Rc<dyn Env>,
    pub set: Arc<MemberSet>,
    pub excluder: Excluder,
    /// For each member, the right to have a request under way. It comes back with the request's buffer, however long the
    /// member keeps that: so members that hang hold a bounded part of the buffers.
    lanes: Vec<Arc<Semaphore>>,
}

impl MemberIo {
    /// At most `under_way_max` requests are under way on each member.
    pub fn new(env: Rc<dyn Env>, set: Arc<MemberSet>, excluder: Excluder, under_way_max: usize) -> Self {
        let lanes = (0..set.count()).map(|_| Arc::new(Semaphore::new(under_way_max.max(1)))).collect();
        Self { env, set, excluder, lanes }
    }

    async fn lane(&self, member: usize) -> Result<OwnedSemaphorePermit, Failure> {
        let lane = Arc::clone(&self.lanes[member]);
        if let Ok(permit) = Arc::clone(&lane).try_acquire_owned() {
            return Ok(permit);
        }
        self.race(member, lane.acquire_owned()).await?.map_err(|_| Failure::Gone)
    }

    /// Carries out `work` to its end, whether or not somebody still waits for it, and gives the right back then.
    fn carry_out<T: 'static>(
        &self,
        permit: OwnedSemaphorePermit,
        work: impl Future<Output = T> + 'static,
    ) -> oneshot::Receiver<T> {
        let (done, answer) = oneshot::channel();
        self.env.spawn(Box::pin(async move {
            let result = work.await;
            drop(permit);
            // Whoever asked may have stopped waiting.
            let _ = done.send(result);
        }));
        answer
    }

    /// Reads `len` bytes.
    pub async fn read(&self, member: usize, offset: u64, len: usize) -> Result<IoBuf, Failure> {
        let slot = self.set.members[member].slot.ok_or(Failure::Gone)?;
        let permit = self.lane(member).await?;
        let buf = self.env.buffer(len).await;
        let answer = self.carry_out(permit, self.env.read(slot, offset, buf));
        let (result, buf) = self.race(member, answer).await?.map_err(|_| Failure::Error)?;
        match result {
            Ok(()) => Ok(buf),
            Err(error) => {
                self.set.members[member].read_errors.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(member, offset, %error, "read failed");
                Err(Failure::Error)
            }
        }
    }

    /// Writes and makes durable.
    pub async fn write_durably(&self, member: usize, offset: u64, buf: IoBuf) -> Result<(), Failure> {
        let slot = self.set.members[member].slot.ok_or(Failure::Gone)?;
        let permit = self.lane(member).await?;
        let env = Rc::clone(&self.env);
        let work = async move {
            let (result, _) = env.write(slot, offset, buf).await;
            result?;
            env.sync(slot).await
        };
        let result = self.race(member, self.carry_out(permit, work)).await?.map_err(|_| Failure::Error)?;
        result.map_err(|error| self.write_failure(member, &error))
    }

    fn write_failure(&self, member: usize, error: &io::Error) -> Failure {
        if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            return Failure::NoSpace;
        }
        self.set.members[member].write_errors.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(member, %error, "write failed");
        Failure::Error
    }

    /// Waits for `work`, but not past the timeout and not for a member that has left.
    async fn race<T>(&self, member: usize, work: impl Future<Output = T>) -> Result<T, Failure> {
        let state = &self.set.members[member];
        let mut gone = pin!(state.gone.notified());
        gone.as_mut().enable();
        if !self.set.contains(member) {
            return Err(Failure::Gone);
        }
        let deadline = self.env.sleep_until(self.env.now() + self.set.timeout);
        let late = select(gone, deadline);
        match select(pin!(work), late).await {
            Either::Left((done, _)) => Ok(done),
            Either::Right((Either::Left(_), _)) => Err(Failure::Gone),
            Either::Right((Either::Right(_), _)) => {
                state.timeouts.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(member, timeout = ?self.set.timeout, "no answer in time");
                Err(Failure::Timeout)
            }
        }
    }

    /// Puts members out of the set. When it returns `Ok`, nothing that they lack can be missed by a later mount.
    pub async fn exclude(&self, members: u32) -> Result<(), TooFewMembers> {
        match &self.excluder {
            Excluder::Mounting => {
                if !self.set.can_lose(members) {
                    return Err(TooFewMembers);
                }
                self.set.set(self.set.mask() & !members, self.set.epoch());
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
