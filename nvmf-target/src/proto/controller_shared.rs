//! What a controller's queues share: namespaces, state, limits, liveness, and the registry of live queues.
//!
//! Written by the admin side, read by every I/O queue on its own thread. The data path takes no lock: namespaces
//! come from a swapped snapshot, the rest are atomics; the registry's lock is taken when a queue comes or goes and
//! by Abort. Invariant: once [`ControllerShared::terminate`] has returned and [`ControllerShared::in_flight`] is 0, no
//! queue of this controller hands another command to a back end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;

use super::queue_shared::{AbortOutcome, QueueShared};
use crate::backend::Backend;
use crate::wire::{CommandId, ControllerId, NamespaceId, QueueId, Status};

/// One namespace as a controller's queues see it.
#[derive(Clone)]
pub struct Namespace {
    /// Its id.
    pub nsid: NamespaceId,
    /// What stores it.
    pub backend: Arc<dyn Backend>,
    /// Writes are refused with 00/20h.
    pub write_protected: bool,
}

/// A snapshot of the namespaces that are attached to a controller.
#[derive(Clone, Default)]
pub struct NamespaceTable {
    by_id: BTreeMap<NamespaceId, Namespace>,
}

impl NamespaceTable {
    /// A table of `namespaces`.
    pub fn new(namespaces: impl IntoIterator<Item = Namespace>) -> Self {
        Self { by_id: namespaces.into_iter().map(|n| (n.nsid, n)).collect() }
    }

    /// The namespace with this id, if it is attached.
    pub fn get(&self, nsid: NamespaceId) -> Option<&Namespace> {
        self.by_id.get(&nsid)
    }

    /// All, by id.
    pub fn iter(&self) -> impl Iterator<Item = &Namespace> {
        self.by_id.values()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }
}

/// Limits that a controller advertises and its queues enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControllerLimits {
    /// MDTS in bytes: the longest Read, Write or Compare.
    pub mdts_bytes: u32,
    /// WZSL in bytes: the longest Write Zeroes; `None`: any.
    pub write_zeroes_bytes: Option<u32>,
    /// ACWU + 1: the longest fused Compare and Write in logical blocks.
    pub fused_blocks: u32,
    /// In-capsule data of an I/O queue, in bytes: IOCCSZ = 4 + this / 16.
    pub in_capsule_bytes: u32,
    /// Entries of the largest queue: CAP.MQES + 1.
    pub max_queue_entries: u16,
}

impl Default for ControllerLimits {
    fn default() -> Self {
        Self {
            mdts_bytes: 1 << 20,
            write_zeroes_bytes: None,
            fused_blocks: 1,
            in_capsule_bytes: 8192,
            max_queue_entries: 128,
        }
    }
}

/// Whether I/O commands are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ControllerState {
    /// CC.EN is 0, or CSTS.RDY isn't 1 yet: I/O commands get 00/0Ch.
    Disabled = 0,
    /// CSTS.RDY is 1.
    Ready = 1,
    /// CC.SHN was set: what is in flight finishes, new commands get 00/0Ch.
    ShuttingDown = 2,
    /// The association is over; nothing more reaches a back end.
    Terminated = 3,
}

/// A command that failed, for the error log page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandError {
    /// Its queue.
    pub qid: QueueId,
    /// Its id.
    pub cid: CommandId,
    /// Its status.
    pub status: Status,
    /// Parameter Error Location (byte in bits 7:0, bit in 10:8), FFFFh where no one byte is to blame.
    pub parameter_location: u16,
    /// First block concerned, 0 where none is.
    pub lba: u64,
    /// Its namespace.
    pub nsid: NamespaceId,
}

/// Takes the failed commands of a controller. Called on queues' threads on the error path: must be short and bounded.
pub trait ErrorSink: Send + Sync {
    /// Records one.
    fn record(&self, error: CommandError);
}

/// Counters of a controller's I/O, for the SMART log and for metrics.
#[derive(Debug, Default)]
pub struct IoCounters {
    /// Read (and Compare) commands that succeeded.
    pub read_commands: AtomicU64,
    /// Write commands that succeeded.
    pub write_commands: AtomicU64,
    /// Bytes read or compared.
    pub read_bytes: AtomicU64,
    /// Bytes written.
    pub write_bytes: AtomicU64,
    /// Commands that ended 02/8xh (SMART: Media and Data Integrity Errors).
    pub media_errors: AtomicU64,
}

/// See the module.
pub struct ControllerShared {
    cntlid: ControllerId,
    limits: ControllerLimits,
    namespaces: ArcSwap<NamespaceTable>,
    state: AtomicU8,
    traffic: AtomicBool,
    queues: Mutex<BTreeMap<QueueId, Arc<QueueShared>>>,
    errors: Option<Arc<dyn ErrorSink>>,
    /// What its I/O queues did.
    pub counters: IoCounters,
}

impl ControllerShared {
    /// A controller that isn't enabled yet.
    pub fn new(
        cntlid: ControllerId,
        limits: ControllerLimits,
        namespaces: Arc<NamespaceTable>,
        errors: Option<Arc<dyn ErrorSink>>,
    ) -> Self {
        Self {
            cntlid,
            limits,
            namespaces: ArcSwap::new(namespaces),
            state: AtomicU8::new(ControllerState::Disabled as u8),
            traffic: AtomicBool::new(false),
            queues: Mutex::new(BTreeMap::new()),
            errors,
            counters: IoCounters::default(),
        }
    }

    /// CNTLID.
    pub fn cntlid(&self) -> ControllerId {
        self.cntlid
    }

    /// The limits, fixed for the controller's life.
    pub fn limits(&self) -> &ControllerLimits {
        &self.limits
    }

    /// The namespaces now.
    pub fn namespaces(&self) -> arc_swap::Guard<Arc<NamespaceTable>> {
        self.namespaces.load()
    }

    /// Changes the namespaces for every command that arrives from now on.
    pub fn set_namespaces(&self, table: Arc<NamespaceTable>) {
        self.namespaces.store(table);
    }

    /// The state now.
    pub fn state(&self) -> ControllerState {
        match self.state.load(Ordering::SeqCst) {
            0 => ControllerState::Disabled,
            1 => ControllerState::Ready,
            2 => ControllerState::ShuttingDown,
            _ => ControllerState::Terminated,
        }
    }

    /// Changes the state; a terminated controller stays terminated.
    pub fn set_state(&self, state: ControllerState) {
        let keep = |now| (now != ControllerState::Terminated as u8).then_some(state as u8);
        // Err means terminated, and then there is nothing to change.
        let _ = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, keep);
    }

    /// Notes that a command arrived (traffic-based keep-alive).
    pub fn note_traffic(&self) {
        // A plain load first: the cache line stays shared while the flag is already set.
        if !self.traffic.load(Ordering::Relaxed) {
            self.traffic.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a command arrived since the last call.
    pub fn take_traffic(&self) -> bool {
        self.traffic.swap(false, Ordering::Relaxed)
    }

    /// Records a failed command.
    pub fn record_error(&self, error: CommandError) {
        if let Some(sink) = &self.errors {
            sink.record(error);
        }
    }

    /// Enters a queue. Gives the queue back that has this id already, if one is live: a true duplicate, or one whose
    /// socket is dead and which the caller must `terminate` and see gone first.
    pub fn register_queue(&self, queue: Arc<QueueShared>) -> Result<(), Arc<QueueShared>> {
        let mut queues = self.lock_queues();
        if let Some(live) = queues.get(&queue.qid()).filter(|q| !q.is_gone()) {
            return Err(Arc::clone(live));
        }
        queues.insert(queue.qid(), queue);
        Ok(())
    }

    /// The live queue with this id.
    pub fn queue(&self, qid: QueueId) -> Option<Arc<QueueShared>> {
        self.lock_queues().get(&qid).filter(|q| !q.is_gone()).cloned()
    }

    /// Every live queue, by id.
    pub fn queues(&self) -> Vec<Arc<QueueShared>> {
        self.lock_queues().values().filter(|q| !q.is_gone()).cloned().collect()
    }

    /// Abort of a command on an I/O queue (NVMe Base 2.0 §5.1).
    pub fn abort(&self, qid: QueueId, cid: CommandId) -> AbortOutcome {
        self.queue(qid).map_or(AbortOutcome::NotFound, |queue| queue.abort(cid))
    }

    /// Ends the association: no command that isn't at a back end yet gets there any more, and every queue is told
    /// to close. [`ControllerShared::in_flight`] says when the last one that is there has been answered.
    pub fn terminate(&self) {
        self.state.store(ControllerState::Terminated as u8, Ordering::SeqCst);
        for queue in self.queues() {
            queue.terminate();
        }
    }

    /// Commands of all live queues that a back end has and hasn't answered.
    pub fn in_flight(&self) -> usize {
        self.lock_queues().values().map(|q| q.in_flight()).sum()
    }

    fn lock_queues(&self) -> MutexGuard<'_, BTreeMap<QueueId, Arc<QueueShared>>> {
        // Nothing panics while it is held, and a map of Arcs is whole at every step.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
