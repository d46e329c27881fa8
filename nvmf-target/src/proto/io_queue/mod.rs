//! An I/O queue pair, controller side: the NVM command set over the transport of `proto::tcp`.
//!
//! Owns what a command goes through: checks, its buffer, its data, the back end, its answer. Must not know PDUs or
//! how data is stored. Invariants: a command holds its buffers before its data is solicited, or waits in line and
//! holds none; it is answered once; nothing reaches a back end after Abort, the controller's end or the queue's.

mod fused;
mod job;
mod outcome;
mod request;
mod sgl;
mod submit;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use fused::FusedFirst;
use job::{Job, Stage};
use request::{Data, check};
use sgl::Rejection;

use super::controller_shared::{CommandError, ControllerShared, ControllerState};
use super::queue_shared::QueueShared;
pub use super::tcp::CloseReason;
use super::tcp::{CapsuleData, Slot, TcpEvent, TcpQueuePair};
use crate::backend::{Backend, Operation, Outcome};
use crate::buffer::{BufferPool, IoBuf};
use crate::wire::{CommandId, Cqe, NamespaceId, Sqe, Status};

/// A request for a back end: `backend.submit(operation, Done::new(sink, token))`, and the reply goes to
/// [`IoQueuePair::complete`] with the same token. A token may occur more than once (Flush of all namespaces); each
/// occurrence is one request.
pub struct Command {
    /// Names the command in this queue.
    pub token: u64,
    /// Who does it.
    pub backend: Arc<dyn Backend>,
    /// What to do.
    pub operation: Operation,
}

/// Buffers that a command needs of the pool before it can go on: all of them, or it takes none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// The length of each.
    pub len_bytes: usize,
    /// How many: a fused pair may need two.
    pub count: usize,
}

/// See the module. Its driver asks `poll_command` until `None`, sends what `gather` gives and checks `poll_close`
/// after every call that takes `now`. After `poll_close` it closes the socket but keeps the queue pair until
/// [`IoQueuePair::in_flight`] is 0, feeding it the replies: dropping it is what frees the queue id.
pub struct IoQueuePair {
    tcp: TcpQueuePair,
    shared: Arc<ControllerShared>,
    queue: Arc<QueueShared>,
    pool: Option<Arc<dyn BufferPool>>,
    /// By slot.
    jobs: Vec<Option<Job>>,
    /// Line for the pool's buffers; of a fused pair, the first half stands in it.
    waiting: VecDeque<Slot>,
    /// Line for the back end; likewise.
    ready: VecDeque<Slot>,
    fused_first: Option<FusedFirst>,
    generation: u32,
}

impl IoQueuePair {
    /// The queue whose Connect was accepted on `tcp` (after `establish`; the answer may still be in its output).
    /// `queue` is registered with `shared`. It takes no buffers until [`IoQueuePair::attach`].
    ///
    /// # Panics
    /// If `queue` is of another size than `tcp` was established with: a fault of the caller.
    pub fn new(tcp: TcpQueuePair, shared: Arc<ControllerShared>, queue: Arc<QueueShared>) -> Self {
        assert_eq!(tcp.entries(), queue.entries(), "one queue has two sizes");
        let entries = usize::from(queue.entries());
        let mut queue_pair = Self {
            tcp,
            shared,
            queue,
            pool: None,
            jobs: (0..entries).map(|_| None).collect(),
            waiting: VecDeque::with_capacity(entries),
            ready: VecDeque::with_capacity(entries),
            fused_first: None,
            generation: 0,
        };
        queue_pair.tcp.set_reserve_first(true);
        queue_pair
    }

    /// Gives it the pool of the thread that drives it from now on, and what wakes that thread. Call before all else;
    /// ask `poll_command` afterwards: commands may have arrived already.
    pub fn attach(&mut self, pool: Arc<dyn BufferPool>, waker: Waker, now: Instant) {
        self.tcp.set_pool(Arc::clone(&pool));
        self.pool = Some(pool);
        self.queue.set_waker(waker);
        self.pump(now);
        self.buffers_available(now);
        // What was asked of the queue before it had a waker.
        self.tick(now);
    }

    /// Where the next received bytes go: staging, or a large payload's own buffer. Empty: don't read now.
    pub fn receive_slice(&mut self) -> &mut [u8] {
        self.tcp.receive_slice()
    }

    /// `len_bytes` were read into [`IoQueuePair::receive_slice`].
    pub fn received(&mut self, len_bytes: usize, now: Instant) {
        self.tcp.received(len_bytes, now);
        self.pump(now);
    }

    /// Appends the bytes that are ready to be sent, in order.
    pub fn gather<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        self.tcp.gather(out);
    }

    /// Bytes are ready to be sent.
    pub fn has_output(&self) -> bool {
        self.tcp.has_output()
    }

    /// The socket took `len_bytes` of them.
    pub fn sent(&mut self, len_bytes: usize, now: Instant) {
        self.tcp.sent(len_bytes, now);
        self.pump(now);
    }

    /// Commands wait for the pool (and hold nothing of it): what the first of them needs, so that the driver can queue
    /// for all of it at once.
    pub fn wants_buffers(&self) -> Option<Wanted> {
        let needs = self.needs(*self.waiting.front()?);
        let mut needs = needs.into_iter().flatten();
        let first = needs.next()?;
        // Both halves of a pair are of one length: they name the same blocks.
        Some(needs.fold(Wanted { len_bytes: first, count: 1 }, |wanted, len_bytes| Wanted {
            len_bytes: wanted.len_bytes.max(len_bytes),
            count: wanted.count + 1,
        }))
    }

    /// Buffers came back to the pool: tries again, first come first served.
    pub fn buffers_available(&mut self, now: Instant) {
        while let Some(slot) = self.waiting.front().copied() {
            if !self.take_buffers(slot, now) {
                break;
            }
            self.waiting.pop_front();
        }
        self.tcp.set_reserve_first(!self.waiting.is_empty());
    }

    /// The socket's read side ended, or it failed.
    pub fn peer_closed(&mut self) {
        self.tcp.peer_closed();
        self.drop_if_closed();
    }

    /// Our side ends the connection.
    pub fn terminate(&mut self) {
        self.tcp.terminate();
        self.drop_if_closed();
    }

    /// A deadline passed or the waker woke.
    pub fn tick(&mut self, now: Instant) {
        self.tcp.tick(now);
        if self.is_ended() {
            self.tcp.terminate();
        }
        if self.queue.take_aborts_pending() {
            self.answer_aborted(now);
        }
        self.drop_if_closed();
    }

    /// Others wait for the buffers that this queue holds: ends the connection if its host has left data untaken or unsent for
    /// `patience`. Says whether it did.
    pub fn end_if_stalled(&mut self, now: Instant, patience: Duration) -> bool {
        let ended = self.tcp.end_if_stalled(now, patience);
        self.drop_if_closed();
        ended
    }

    /// When `tick` is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.tcp.next_deadline()
    }

    /// The connection is over: close the socket (shut its write side down first and read what still comes for a
    /// moment, so that a TermReq isn't lost to a reset), and keep the queue pair until `in_flight` is 0.
    pub fn poll_close(&self) -> Option<CloseReason> {
        self.tcp.poll_close()
    }

    /// Requests at back ends.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// What other threads know of it.
    pub fn shared(&self) -> &Arc<QueueShared> {
        &self.queue
    }

    /// Takes in what the transport has.
    fn pump(&mut self, now: Instant) {
        while let Some(event) = self.tcp.poll_event() {
            match event {
                TcpEvent::Command { slot, sqe, data } => self.arrived(slot, &sqe, data, now),
                TcpEvent::Fetched { slot, buffer, intact } => self.fetched(slot, buffer, intact, now),
            }
        }
        self.drop_if_closed();
    }

    fn arrived(&mut self, slot: Slot, sqe: &Sqe, data: CapsuleData, now: Instant) {
        self.shared.note_traffic();
        self.queue.enter(usize::from(slot.0), sqe.command_id());
        self.generation = self.generation.wrapping_add(1);
        let first = self.fused_for(sqe, now);
        match self.job_for(sqe, data) {
            Ok(job) => {
                if let Some(place) = self.jobs.get_mut(usize::from(slot.0)) {
                    *place = Some(job);
                }
                self.route(slot, sqe, first, now);
            }
            Err(rejection) => self.reject(slot, sqe, first, rejection, now),
        }
    }

    /// What may be done with the command, by everything but fusing.
    fn job_for(&self, sqe: &Sqe, data: CapsuleData) -> Result<Job, Rejection> {
        if self.shared.state() != ControllerState::Ready {
            return Err(Rejection::at(Status::COMMAND_SEQUENCE_ERROR, u16::MAX));
        }
        let checked = check(sqe, data.len_bytes(), &self.shared.namespaces(), self.shared.limits())?;
        if !data.is_intact() {
            // NVMe/TCP 1.1 §3.3.2.1: the command fails, the connection lives, the host may try again.
            return Err(Rejection::of(Status::TRANSIENT_TRANSPORT_ERROR));
        }
        let (buffer, reserved) = match data {
            CapsuleData::None => (None, false),
            CapsuleData::Placed { buffer, .. } => (Some(buffer), false),
            CapsuleData::Reserved { .. } => (None, true),
        };
        Ok(Job {
            cid: sqe.command_id(),
            nsid: sqe.namespace_id(),
            generation: self.generation,
            request: checked.request,
            data: checked.data,
            block_bytes: checked.block_bytes,
            stage: Stage::AwaitsBuffer,
            buffer,
            reserved,
            partner: None,
            targets: checked.targets,
            unanswered: 0,
            outcome: Outcome::Success,
        })
    }

    /// In line for a buffer, or straight on if it needs none or one is there.
    fn acquire(&mut self, slot: Slot, now: Instant) {
        let in_line = self.pool.is_none() || !self.waiting.is_empty();
        if (in_line && self.needs_buffer(slot)) || !self.take_buffers(slot, now) {
            self.waiting.push_back(slot);
            self.tcp.set_reserve_first(true);
        }
    }

    fn needs_buffer(&self, slot: Slot) -> bool {
        self.job(slot).is_some_and(|job| job.partner.is_some() || job.buffer_bytes().is_some())
    }

    /// The lengths of the buffers that a job and the other half of its pair need.
    fn needs(&self, slot: Slot) -> [Option<usize>; 2] {
        let partner = self.job(slot).and_then(|job| job.partner);
        [Some(slot), partner].map(|half| half.and_then(|half| self.job(half)).and_then(Job::buffer_bytes))
    }

    /// Gives the job (both jobs of a fused pair, or neither) what it needs of the pool and sends it on; false: the
    /// pool has too little.
    fn take_buffers(&mut self, slot: Slot, now: Instant) -> bool {
        let Some(job) = self.job(slot) else { return true };
        let halves = [Some(slot), job.partner];
        let needs = self.needs(slot);
        if self.pool.as_ref().is_some_and(|pool| needs.iter().flatten().any(|len| *len > pool.largest_bytes())) {
            // MDTS promised what the pool can't give: our fault, and waiting would not end.
            self.finish_with_partner(slot, Status::INTERNAL_ERROR, now);
            return true;
        }
        let mut taken = [None, None];
        for (place, need) in taken.iter_mut().zip(needs) {
            let Some(len_bytes) = need else { continue };
            *place = self.pool.as_ref().and_then(|pool| pool.take(len_bytes));
            if place.is_none() {
                return false;
            }
        }
        for (half, buffer) in halves.into_iter().zip(taken) {
            if let Some(half) = half {
                self.proceed(half, buffer, now);
            }
        }
        true
    }

    /// The job has its buffer, if it needs one: gets its data, or is ready.
    fn proceed(&mut self, slot: Slot, taken: Option<IoBuf>, now: Instant) {
        let Some(job) = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::as_mut) else { return };
        match (taken, job.data, job.reserved) {
            (Some(buffer), Data::FromHost(_), false) => {
                job.stage = Stage::AwaitsData;
                return self.tcp.fetch(slot, buffer, now);
            }
            (Some(mut buffer), Data::FromHost(_), true) => {
                self.tcp.copy_reserved(slot, &mut buffer);
                job.buffer = Some(buffer);
            }
            (Some(buffer), _, _) => job.buffer = Some(buffer),
            (None, _, _) => {}
        }
        self.settled(slot, Stage::Ready, now);
    }

    fn fetched(&mut self, slot: Slot, buffer: IoBuf, intact: bool, now: Instant) {
        if let Some(job) = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::as_mut) {
            job.buffer = Some(buffer);
        }
        let failed = Stage::Failed(Status::TRANSIENT_TRANSPORT_ERROR);
        self.settled(slot, if intact { Stage::Ready } else { failed }, now);
    }

    /// Nothing is awaited for this job any more. A fused pair goes on when both halves have got here.
    fn settled(&mut self, slot: Slot, stage: Stage, now: Instant) {
        let Some(job) = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::as_mut) else { return };
        job.stage = stage;
        match (job.partner, stage) {
            (Some(partner), _) => self.pair_settled(slot, partner, now),
            (None, Stage::Failed(status)) => self.finish(slot, status, now),
            (None, _) => self.ready.push_back(slot),
        }
    }

    /// Commands that Abort took while they wait for a buffer or a partner are answered at once; one whose data is on
    /// the way is answered when that is here, as the host will still send it.
    fn answer_aborted(&mut self, now: Instant) {
        let aborted: Vec<Slot> = self.waiting.iter().copied().filter(|slot| self.is_aborted_pair(*slot)).collect();
        self.waiting.retain(|slot| !aborted.contains(slot));
        for slot in aborted {
            self.finish_aborted(slot, now);
        }
        self.buffers_available(now);
        if let Some(FusedFirst::Waits(slot)) = self.fused_first
            && self.queue.is_aborted(usize::from(slot.0))
        {
            self.fused_first = Some(FusedFirst::Failed);
            self.finish(slot, Status::ABORT_REQUESTED, now);
        }
    }

    fn reject_slot(&mut self, slot: Slot, cid: CommandId, nsid: NamespaceId, why: Rejection, now: Instant) {
        self.record(cid, nsid, why.status, why.location, 0);
        self.queue.leave(usize::from(slot.0));
        self.tcp.respond(slot, Cqe::of(cid, why.status), now);
    }

    /// Answers a job without data.
    fn finish(&mut self, slot: Slot, status: Status, now: Instant) {
        self.finish_at(slot, status, 0, now);
    }

    /// Likewise; `lba` is the block to blame.
    fn finish_at(&mut self, slot: Slot, status: Status, lba: u64, now: Instant) {
        let Some(job) = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::take) else { return };
        if !status.is_success() {
            self.record(job.cid, job.nsid, status, u16::MAX, lba);
        }
        self.queue.leave(usize::from(slot.0));
        self.tcp.respond(slot, Cqe::of(job.cid, status), now);
    }

    fn record(&self, cid: CommandId, nsid: NamespaceId, status: Status, parameter_location: u16, lba: u64) {
        let qid = self.queue.qid();
        self.shared.record_error(CommandError { qid, cid, status, parameter_location, lba, nsid });
    }

    fn job(&self, slot: Slot) -> Option<&Job> {
        self.jobs.get(usize::from(slot.0))?.as_ref()
    }

    /// The controller or the queue has been ended by the admin side.
    fn is_ended(&self) -> bool {
        self.queue.is_closing() || self.shared.state() == ControllerState::Terminated
    }

    /// Once the connection is over, what isn't at a back end goes, with its buffers.
    fn drop_if_closed(&mut self) {
        if !self.tcp.is_closing() {
            return;
        }
        self.waiting.clear();
        self.ready.clear();
        self.fused_first = None;
        for (index, place) in self.jobs.iter_mut().enumerate() {
            if place.take_if(|job| job.unanswered == 0 && !is_second_of_submitted(job)).is_some() {
                self.queue.leave(index);
            }
        }
    }
}

/// The second half of a fused pair that is at the back end under the first one's token.
fn is_second_of_submitted(job: &Job) -> bool {
    job.stage == Stage::Submitted && job.partner.is_some()
}

impl Drop for IoQueuePair {
    fn drop(&mut self) {
        self.queue.set_gone();
    }
}
