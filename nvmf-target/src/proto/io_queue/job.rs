//! One command between its arrival and its answer.
//!
//! Invariant: a job holds at most its own buffer, and none while it waits for one.

use super::request::{Data, Request, Targets};
use crate::backend::Outcome;
use crate::buffer::IoBuf;
use crate::proto::tcp::Slot;
use crate::wire::{CommandId, NamespaceId, Status};

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// First of a fused pair: the second hasn't come.
    AwaitsPartner,
    /// In the queue for a buffer of the pool.
    AwaitsBuffer,
    /// Its data is on the way from the host: it can't be answered before that is here.
    AwaitsData,
    /// May go to the back end.
    Ready,
    /// Can't be done, but its fused partner's data is still on the way.
    Failed(Status),
    /// At the back end.
    Submitted,
}

/// See the module.
pub(super) struct Job {
    pub(super) cid: CommandId,
    pub(super) nsid: NamespaceId,
    /// Counts the queue's commands, so that a token names one of them only.
    pub(super) generation: u32,
    pub(super) request: Request,
    pub(super) data: Data,
    pub(super) block_bytes: u32,
    pub(super) stage: Stage,
    pub(super) buffer: Option<IoBuf>,
    /// In-capsule data lies in the queue's reserve.
    pub(super) reserved: bool,
    /// The other half of a fused pair.
    pub(super) partner: Option<Slot>,
    /// Who is still to be asked: one, or all namespaces for a Flush.
    pub(super) targets: Targets,
    /// Requests at back ends.
    pub(super) unanswered: usize,
    /// The worst answer so far.
    pub(super) outcome: Outcome,
}

impl Job {
    /// The pool's buffer that it needs before it can go on, in bytes.
    pub(super) fn buffer_bytes(&self) -> Option<usize> {
        match self.data {
            Data::None => None,
            Data::ToHost(len_bytes) | Data::FromHost(len_bytes) => self.buffer.is_none().then_some(len_bytes as usize),
        }
    }

    /// Whether a fused pair with it as one half may be decided.
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Ready | Stage::Failed(_))
    }
}

/// Names a job to its back end.
pub(super) fn token_of(slot: Slot, generation: u32) -> u64 {
    u64::from(generation) << 16 | u64::from(slot.0)
}

/// The slot and generation that a token names.
pub(super) fn split_token(token: u64) -> (Slot, u32) {
    (Slot(token as u16), (token >> 16) as u32)
}
