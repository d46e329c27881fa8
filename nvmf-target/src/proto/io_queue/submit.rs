//! To the back end and back.
//!
//! Invariant: between `add_in_flight` and `sub_in_flight` a back end may act; the controller's end is looked at in
//! between, so that whoever ended it and then sees no command in flight knows that none follows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::job::{Job, Stage, split_token, token_of};
use super::outcome::{fused_statuses, status_of};
use super::request::{Data, Request, dsm_ranges};
use super::{Command, IoQueuePair};
use crate::backend::{Backend, LbaRange, Operation, Outcome, Reply};
use crate::buffer::IoBuf;
use crate::proto::tcp::Slot;
use crate::wire::{Cqe, Status};

impl IoQueuePair {
    /// The next request for a back end.
    pub fn poll_command(&mut self, now: Instant) -> Option<Command> {
        while let Some(slot) = self.ready.pop_front() {
            if let Some(command) = self.submit(slot, now) {
                return Some(command);
            }
        }
        None
    }

    /// Hands the job's next request over; `None`: it ended without one.
    fn submit(&mut self, slot: Slot, now: Instant) -> Option<Command> {
        let first_request = self.job(slot)?.stage == Stage::Ready;
        if first_request && !self.claim(slot, now) {
            return None;
        }
        self.queue.add_in_flight();
        if self.is_ended() {
            self.queue.sub_in_flight();
            self.terminate();
            return None;
        }
        let command = self.request(slot);
        match command {
            Ok(Some(command)) => Some(command),
            Ok(None) => {
                self.queue.sub_in_flight();
                self.finish(slot, Status::SUCCESS, now);
                None
            }
            Err(status) => {
                self.queue.sub_in_flight();
                self.finish_with_partner(slot, status, now);
                None
            }
        }
    }

    /// Takes the job (both jobs of a pair) from Abort's reach; false: Abort was first, and it has been answered.
    fn claim(&mut self, slot: Slot, now: Instant) -> bool {
        let Some(job) = self.job(slot) else { return false };
        let (cid, partner) = (job.cid, job.partner);
        let partner_cid = partner.and_then(|partner| self.job(partner)).map(|job| job.cid);
        let claimed = self.queue.submit(usize::from(slot.0), cid)
            && match (partner, partner_cid) {
                (Some(partner), Some(cid)) => self.queue.submit(usize::from(partner.0), cid),
                _ => true,
            };
        if !claimed {
            self.finish_aborted(slot, now);
        }
        claimed
    }

    /// The job's next request, and the job marked as submitted; `Ok(None)`: there is nothing to do.
    fn request(&mut self, slot: Slot) -> Result<Option<Command>, Status> {
        let partner = self.job(slot).and_then(|job| job.partner);
        let second = partner.and_then(|partner| self.jobs.get_mut(usize::from(partner.0))?.as_mut());
        let written = second.map(|job| {
            job.stage = Stage::Submitted;
            (job.buffer.take(), job.request)
        });
        let job = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::as_mut).ok_or(Status::INTERNAL_ERROR)?;
        job.stage = Stage::Submitted;
        let Some(backend) = job.targets.pop() else { return Ok(None) };
        let operation = match written {
            Some(written) => fused_operation(job, written)?,
            None => match operation(job, &backend)? {
                Some(operation) => operation,
                None => return Ok(None),
            },
        };
        job.unanswered += 1;
        let token = token_of(slot, job.generation);
        if !job.targets.is_empty() {
            self.ready.push_front(slot);
        }
        Ok(Some(Command { token, backend, operation }))
    }

    /// A back end answered.
    pub fn complete(&mut self, token: u64, reply: Reply, now: Instant) {
        let (slot, generation) = split_token(token);
        let place = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::as_mut);
        let Some(job) = place.filter(|job| job.generation == generation && job.unanswered > 0) else {
            debug_assert!(false, "a reply to nothing that was asked");
            return;
        };
        job.unanswered -= 1;
        if job.outcome == Outcome::Success {
            job.outcome = reply.outcome;
        }
        let is_last = job.unanswered == 0 && job.targets.is_empty();
        self.queue.sub_in_flight();
        if self.tcp.is_closing() {
            return self.drop_answered(slot);
        }
        if is_last {
            self.answer(slot, reply.buffer, now);
        }
    }

    fn answer(&mut self, slot: Slot, buffer: Option<IoBuf>, now: Instant) {
        let Some(job) = self.job(slot) else { return };
        let outcome = job.outcome;
        let partner = job.partner;
        self.count(job);
        if outcome == Outcome::Success
            && let (Request::Read { .. }, Data::ToHost(len_bytes)) = (job.request, job.data)
        {
            return self.answer_read(slot, buffer, len_bytes as usize, now);
        }
        let lba = if let Outcome::UnrecoveredRead { slba } = outcome { slba } else { 0 };
        match partner {
            None => self.finish_at(slot, status_of(outcome), lba, now),
            Some(partner) => {
                let (of_compare, of_write) = fused_statuses(outcome);
                self.finish_at(slot, of_compare, lba, now);
                self.finish(partner, of_write, now);
            }
        }
    }

    fn answer_read(&mut self, slot: Slot, buffer: Option<IoBuf>, len_bytes: usize, now: Instant) {
        let Some(buffer) = buffer.filter(|buffer| buffer.len() == len_bytes) else {
            // A back end that succeeds without the data: nothing that we could send would be right.
            return self.finish(slot, Status::INTERNAL_ERROR, now);
        };
        let Some(job) = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::take) else { return };
        self.queue.leave(usize::from(slot.0));
        self.tcp.send_data(slot, buffer, Cqe::of(job.cid, Status::SUCCESS), now);
    }

    /// The connection is over: frees the job (and its other half) once nothing of it is at a back end.
    fn drop_answered(&mut self, slot: Slot) {
        let Some(job) = self.job(slot).filter(|job| job.unanswered == 0) else { return };
        let partner = job.partner;
        for half in [Some(slot), partner].into_iter().flatten() {
            if let Some(place) = self.jobs.get_mut(usize::from(half.0)) {
                *place = None;
            }
            self.queue.leave(usize::from(half.0));
        }
    }

    fn count(&self, job: &Job) {
        let counters = &self.shared.counters;
        let bytes = |range: LbaRange| range.lba_count * u64::from(job.block_bytes);
        let add = |commands: &AtomicU64, total: &AtomicU64, range| {
            commands.fetch_add(1, Ordering::Relaxed);
            total.fetch_add(bytes(range), Ordering::Relaxed);
        };
        match (job.outcome, job.request) {
            (Outcome::UnrecoveredRead { .. } | Outcome::WriteFault, _) => {
                counters.media_errors.fetch_add(1, Ordering::Relaxed);
            }
            (Outcome::Success, Request::Compare { range }) if job.partner.is_some() => {
                add(&counters.write_commands, &counters.write_bytes, range);
            }
            (Outcome::Success, Request::Read { range } | Request::Compare { range }) => {
                add(&counters.read_commands, &counters.read_bytes, range);
            }
            (Outcome::Success, Request::Write { range, .. }) => {
                add(&counters.write_commands, &counters.write_bytes, range);
            }
            _ => {}
        }
    }
}

fn fused_operation(compare: &mut Job, written: (Option<IoBuf>, Request)) -> Result<Operation, Status> {
    match (compare.buffer.take(), written) {
        (Some(expected), (Some(buffer), Request::Write { range, fua })) => {
            Ok(Operation::CompareAndWrite { range, expected, buffer, fua })
        }
        _ => Err(Status::INTERNAL_ERROR),
    }
}

/// `Ok(None)`: nothing to do.
fn operation(job: &mut Job, backend: &Arc<dyn Backend>) -> Result<Option<Operation>, Status> {
    let buffer = job.buffer.take().ok_or(Status::INTERNAL_ERROR);
    Ok(Some(match job.request {
        Request::Read { range } => Operation::Read { range, buffer: buffer? },
        Request::Write { range, fua } => Operation::Write { range, buffer: buffer?, fua },
        Request::Compare { range } => Operation::Compare { range, buffer: buffer? },
        Request::Verify { range } => Operation::Verify { range },
        Request::WriteZeroes { range, deallocate, fua } => Operation::WriteZeroes { range, deallocate, fua },
        Request::Flush => Operation::Flush,
        Request::DatasetManagement { range_count, deallocate } => {
            let ranges = dsm_ranges(&buffer?, range_count, backend.geometry().block_count).map_err(|r| r.status)?;
            if !deallocate || ranges.is_empty() {
                return Ok(None);
            }
            Operation::Deallocate { ranges }
        }
    }))
}
