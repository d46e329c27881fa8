//! From a back end's outcome to a status.

use crate::backend::Outcome;
use crate::wire::Status;

/// The status of a command that ended so. Do Not Retry is set where the same command can't end otherwise.
pub(super) fn status_of(outcome: Outcome) -> Status {
    match outcome {
        Outcome::Success => Status::SUCCESS,
        Outcome::LbaOutOfRange => Status::LBA_OUT_OF_RANGE.dnr(),
        // Space comes back only by what the host or an operator does next.
        Outcome::CapacityExceeded => Status::CAPACITY_EXCEEDED.dnr(),
        Outcome::UnrecoveredRead { .. } => Status::UNRECOVERED_READ,
        Outcome::WriteFault => Status::WRITE_FAULT,
        Outcome::CompareFailure => Status::COMPARE_FAILURE.dnr(),
        Outcome::NotReady => Status::NAMESPACE_NOT_READY,
        Outcome::Aborted => Status::ABORT_REQUESTED,
        Outcome::InternalError => Status::INTERNAL_ERROR,
    }
}

/// The statuses of a fused Compare and Write that ended so (NVM Command Set 1.0 §2.1.4): one half says why, the other
/// that it wasn't done for that.
pub(super) fn fused_statuses(outcome: Outcome) -> (Status, Status) {
    let status = status_of(outcome);
    match outcome {
        Outcome::Success => (status, status),
        Outcome::WriteFault | Outcome::CapacityExceeded => (Status::ABORTED_FAILED_FUSED, status),
        _ => (status, Status::ABORTED_FAILED_FUSED),
    }
}
