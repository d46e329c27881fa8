//! Fused Compare and Write (NVMe Base 2.0 §3.4.2; NVM Command Set 1.0 §2.1.4).
//!
//! Owns the pairing: two commands one after the other in the queue, done as one or not at all, each with a status of
//! its own. Invariant: the pair takes both its buffers at once, and reaches the back end as one operation.

use std::time::Instant;

use super::IoQueuePair;
use super::job::{Job, Stage};
use super::request::{Data, Request};
use super::sgl::Rejection;
use crate::backend::LbaRange;
use crate::proto::tcp::Slot;
use crate::wire::{Fuse, Sqe, Status};

/// Byte of FUSE in the command, bit 0.
const LOCATION_FUSE: u16 = 1;

/// The last command was the first half of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FusedFirst {
    /// It waits for the second.
    Waits(Slot),
    /// It has been answered with an error: the second gets 00/09h.
    Failed,
}

impl IoQueuePair {
    /// A command has come: gives the first half that stands right before it if it is a second half; a first half
    /// that is followed by anything else ends here.
    pub(super) fn fused_for(&mut self, sqe: &Sqe, now: Instant) -> Option<FusedFirst> {
        let first = self.fused_first.take()?;
        if sqe.fuse() == Fuse::Second {
            return Some(first);
        }
        if let FusedFirst::Waits(slot) = first {
            self.finish(slot, Status::ABORTED_MISSING_FUSED, now);
        }
        None
    }

    /// Sends a command that passed its own checks on its way.
    pub(super) fn route(&mut self, slot: Slot, sqe: &Sqe, first: Option<FusedFirst>, now: Instant) {
        let reserved = Rejection::at(Status::INVALID_FIELD, LOCATION_FUSE);
        match (sqe.fuse(), first) {
            (Fuse::Normal, _) => self.acquire(slot, now),
            (Fuse::First, _) => self.first_half(slot, now),
            (Fuse::Second, Some(FusedFirst::Waits(first))) => self.second_half(first, slot, now),
            (Fuse::Second, Some(FusedFirst::Failed)) => self.finish(slot, Status::ABORTED_FAILED_FUSED, now),
            (Fuse::Second, None) => self.finish(slot, Status::ABORTED_MISSING_FUSED, now),
            (Fuse::Reserved, _) => self.finish(slot, reserved.status, now),
        }
    }

    /// Answers a command that failed its own checks; a half takes its other half with it.
    pub(super) fn reject(
        &mut self,
        slot: Slot,
        sqe: &Sqe,
        first: Option<FusedFirst>,
        rejection: Rejection,
        now: Instant,
    ) {
        if let Some(FusedFirst::Waits(first)) = first {
            self.finish(first, Status::ABORTED_FAILED_FUSED, now);
        }
        if sqe.fuse() == Fuse::First {
            self.fused_first = Some(FusedFirst::Failed);
        }
        // Of two reasons, the one that concerns the pair says more.
        let status = match (sqe.fuse(), first) {
            (Fuse::Second, None) => Status::ABORTED_MISSING_FUSED,
            (Fuse::Second, Some(FusedFirst::Failed)) => Status::ABORTED_FAILED_FUSED,
            _ => rejection.status,
        };
        let rejection = Rejection { status, ..rejection };
        self.reject_slot(slot, sqe.command_id(), sqe.namespace_id(), rejection, now);
    }

    fn first_half(&mut self, slot: Slot, now: Instant) {
        let place = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::as_mut);
        match place {
            Some(job) if matches!(job.request, Request::Compare { .. }) => {
                job.stage = Stage::AwaitsPartner;
                self.fused_first = Some(FusedFirst::Waits(slot));
            }
            _ => {
                // Compare and Write is the only pair there is (FUSES bit 0).
                self.finish(slot, Status::INVALID_FIELD.dnr(), now);
                self.fused_first = Some(FusedFirst::Failed);
            }
        }
    }

    fn second_half(&mut self, first: Slot, second: Slot, now: Instant) {
        if self.queue.is_aborted(usize::from(first.0)) {
            self.finish(first, Status::ABORT_REQUESTED, now);
            return self.finish(second, Status::ABORTED_FAILED_FUSED, now);
        }
        match self.check_pair(first, second) {
            Ok(()) => {
                self.set_partner(first, second);
                self.set_partner(second, first);
                self.acquire(first, now);
            }
            Err((of_first, of_second)) => {
                self.finish(first, of_first, now);
                self.finish(second, of_second, now);
            }
        }
    }

    /// Whether the two may be fused; if not, how each ends.
    fn check_pair(&self, first: Slot, second: Slot) -> Result<(), (Status, Status)> {
        let both = |status: Status| Err((status.dnr(), status.dnr()));
        let (Some(compare), Some(write)) = (self.job(first), self.job(second)) else {
            return both(Status::INTERNAL_ERROR);
        };
        let (Some(compared), Request::Write { range, .. }) = (range_of(compare), write.request) else {
            return Err((Status::ABORTED_FAILED_FUSED, Status::INVALID_FIELD.dnr()));
        };
        if compare.nsid != write.nsid || compared != range {
            return both(Status::INVALID_FIELD);
        }
        if range.lba_count > u64::from(self.shared.limits().fused_blocks) {
            return both(Status::ATOMIC_WRITE_UNIT_EXCEEDED);
        }
        Ok(())
    }

    fn set_partner(&mut self, slot: Slot, partner: Slot) {
        if let Some(job) = self.jobs.get_mut(usize::from(slot.0)).and_then(Option::as_mut) {
            job.partner = Some(partner);
        }
    }

    /// One half has nothing to wait for any more: if the other hasn't either, both go on or both end.
    pub(super) fn pair_settled(&mut self, slot: Slot, partner: Slot, now: Instant) {
        let (Some(job), Some(other)) = (self.job(slot), self.job(partner)) else { return };
        if !job.is_settled() || !other.is_settled() {
            return;
        }
        let first = if matches!(job.request, Request::Compare { .. }) { slot } else { partner };
        if job.stage == Stage::Ready && other.stage == Stage::Ready {
            return self.ready.push_back(first);
        }
        let (of_job, of_other) = (status_of(job), status_of(other));
        self.finish(slot, of_job, now);
        self.finish(partner, of_other, now);
    }

    /// Whether this command, or the other half of its pair, was aborted.
    pub(super) fn is_aborted_pair(&self, slot: Slot) -> bool {
        let partner = self.job(slot).and_then(|job| job.partner);
        [Some(slot), partner].into_iter().flatten().any(|half| self.queue.is_aborted(usize::from(half.0)))
    }

    /// Answers a command one of whose halves was aborted.
    pub(super) fn finish_aborted(&mut self, slot: Slot, now: Instant) {
        let partner = self.job(slot).and_then(|job| job.partner);
        for half in [Some(slot), partner].into_iter().flatten() {
            let aborted = self.queue.is_aborted(usize::from(half.0));
            self.finish(half, if aborted { Status::ABORT_REQUESTED } else { Status::ABORTED_FAILED_FUSED }, now);
        }
    }

    /// Answers a command, and the other half of its pair, with the same status.
    pub(super) fn finish_with_partner(&mut self, slot: Slot, status: Status, now: Instant) {
        let partner = self.job(slot).and_then(|job| job.partner);
        for half in [Some(slot), partner].into_iter().flatten() {
            self.finish(half, status, now);
        }
    }
}

fn range_of(job: &Job) -> Option<LbaRange> {
    match (job.request, job.data) {
        (Request::Compare { range }, Data::FromHost(_)) => Some(range),
        _ => None,
    }
}

fn status_of(job: &Job) -> Status {
    match job.stage {
        Stage::Failed(status) => status,
        _ => Status::ABORTED_FAILED_FUSED,
    }
}
