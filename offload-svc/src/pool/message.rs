//! What reactors send one another.
//!
//! Owns the messages and the [`Courier`] that carries them. Must not know what a reactor does with them. Invariant: a
//! request's piece is answered exactly once, by [`Join::finish_piece`] or by its drop.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use futures::channel::mpsc::UnboundedSender;
use nvmf_target::backend::{Done, LbaRange, Outcome, Reply};
use nvmf_target::buffer::IoBuf;
use tokio::sync::oneshot;

use super::checkpoint_io::WriteFailed;
use super::layers::Tree;
use super::map::RecordLocation;
use super::shared::{InFlight, Volume};

/// Carries messages to the reactor of an index. The default goes over channels; a service with rings of its own hands the
/// message to `PoolReactor::deliver` on the other side. Must not block and must not drop messages of live reactors; what
/// is on the way is bounded by the requests that the service lets in.
pub trait Courier: Send + Sync {
    fn send(&self, reactor: usize, message: Message);
}

/// A message to a reactor; opaque outside the pool.
pub struct Message(pub(super) Inner);

pub(super) enum Inner {
    /// A piece of a request for a shard of the receiver.
    Piece(Piece),
    /// Merge what has been changed in the receiver's shards into their trees.
    Merge(MergeRequest),
    /// Records of a segment that is being cleaned, for the receiver's shards.
    Move(MoveRequest),
    /// Carry what is under a volume's older key over to the current one, as far as possible.
    Rekey { volume: Arc<Volume>, pages: bool, done: oneshot::Sender<()> },
    /// Give a volume's trees to its snapshot; with the watermarks of the merge that has just ended, by shard.
    Split { from: Arc<Volume>, to: Arc<Volume>, watermarks: Vec<(u16, u64)>, done: oneshot::Sender<()> },
    /// Bring what a deleted snapshot has over to the volume that lies upon it.
    Absorb { child: Arc<Volume>, from: Arc<Volume>, done: oneshot::Sender<()> },
    /// Tell whether nothing is left of a volume.
    IsEmpty { volume: Arc<Volume>, done: oneshot::Sender<bool> },
    /// Tell what the trees of a volume lead to, in bytes by segment.
    Weigh { volume: Arc<Volume>, done: oneshot::Sender<BTreeMap<u32, i64>> },
    /// Forget a deleted volume's shards.
    Forget { volume: Arc<Volume>, done: oneshot::Sender<()> },
    /// Write out what is open, and answer when nothing is under way any more.
    Drain(oneshot::Sender<()>),
}

/// The default courier.
pub(super) struct Channels(pub Vec<UnboundedSender<Message>>);

impl Courier for Channels {
    fn send(&self, reactor: usize, message: Message) {
        if let Some(channel) = self.0.get(reactor) {
            // A reactor that has ended takes no part any more; a piece's drop answers its request.
            let _ = channel.unbounded_send(message);
        }
    }
}

/// What to do with a range of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Read,
    Verify,
    Write,
    Compare,
    CompareAndWrite,
    WriteZeroes,
    Deallocate,
}

/// One shard's part of a request.
pub(super) struct Piece {
    pub volume: Arc<Volume>,
    pub shard: u16,
    pub range: LbaRange,
    pub action: Action,
    /// Where the range begins in the request's buffer.
    pub buffer_offset: usize,
    pub join: Arc<Join>,
    pub answered: bool,
}

impl Piece {
    pub fn finish(mut self, outcome: Outcome) {
        self.answered = true;
        self.join.finish_piece(outcome);
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if !self.answered {
            self.join.finish_piece(Outcome::InternalError);
        }
    }
}

/// Joins the pieces of one request.
pub(super) struct Join {
    /// Given up when the last piece lets go of the request, after the answer.
    _in_flight: InFlight,
    left: AtomicUsize,
    outcome: Mutex<Outcome>,
    /// The request's buffer. Locked only within one poll; pieces on different reactors touch different parts of it.
    pub buffer: RwLock<Option<IoBuf>>,
    /// What a Compare-and-Write expects.
    pub expected: Option<IoBuf>,
    done: Mutex<Option<Done>>,
}

impl Join {
    /// A request in `pieces` pieces (one at least).
    pub fn new(
        volume: &Arc<Volume>,
        pieces: usize,
        buffer: Option<IoBuf>,
        expected: Option<IoBuf>,
        done: Done,
    ) -> Arc<Self> {
        Arc::new(Self {
            _in_flight: InFlight::on(volume),
            left: AtomicUsize::new(pieces),
            outcome: Mutex::new(Outcome::Success),
            buffer: RwLock::new(buffer),
            expected,
            done: Mutex::new(Some(done)),
        })
    }

    pub fn finish_piece(&self, outcome: Outcome) {
        {
            let mut worst = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            *worst = worse(*worst, outcome);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.answer();
        }
    }

    fn answer(&self) {
        let outcome = *self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = self.buffer.write().unwrap_or_else(PoisonError::into_inner).take();
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(done) = done {
            done.finish(Reply { outcome, buffer });
        }
    }
}

/// The outcome of two pieces together: any failure over success, and of two lost blocks the first.
fn worse(a: Outcome, b: Outcome) -> Outcome {
    match (a, b) {
        (Outcome::Success, other) | (other, Outcome::Success) => other,
        (Outcome::UnrecoveredRead { slba: a }, Outcome::UnrecoveredRead { slba: b }) => {
            Outcome::UnrecoveredRead { slba: a.min(b) }
        }
        (first, _) => first,
    }
}

/// Asks a reactor to merge; answered when its trees are durable.
pub(super) struct MergeRequest {
    /// Told at the moment up to which changes are merged.
    pub frozen: oneshot::Sender<()>,
    pub done: oneshot::Sender<Result<Merged, WriteFailed>>,
}

/// A reactor's trees as a checkpoint records them.
pub(super) struct Merged {
    /// Its streams: what is in the first so many stripes of each is in the trees.
    pub streams: [(u32, u64); 2],
    pub shards: Vec<MergedShard>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct MergedShard {
    pub volume: u32,
    pub shard: u16,
    /// All generations up to it are in the tree.
    pub watermark: u64,
    pub tree: Tree,
}

/// A record of a segment being cleaned.
pub(super) struct MoveRecord {
    /// The volumes of its lineage.
    pub kin: Arc<[Arc<Volume>]>,
    pub shard: u16,
    pub location: RecordLocation,
    pub header: crate::stages::record::Header,
    pub bytes: Vec<u8>,
    /// Since when it may have been as it is, by the log's clock.
    pub written_at: u64,
}

/// Records to move if they are alive; answered once the move is durable.
pub(super) struct MoveRequest {
    pub records: Vec<MoveRecord>,
    pub done: oneshot::Sender<Result<(), MoveFailed>>,
}

/// Records could not be moved: there is no room or the pool has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("live records could not be moved")]
pub(super) struct MoveFailed;
