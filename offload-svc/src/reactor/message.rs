//! What reactors send each other, and how it gets there.
//!
//! Owns the way of a message: over the ring between two reactors, through the inbox from any other thread. Must not
//! know what tasks do. Invariant: a message reaches its reactor, or is dropped with its contents; the sender never
//! blocks.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nvmf_target::backend::{Reply, ReplySink};
use nvmf_target::proto::io_queue::IoQueuePair;
use nvmf_target::wire::nqn::Nqn;

use super::Shared;
use super::doorbell::Doorbell;
use super::local::{self, Local};
use super::metrics::Counters;

/// Work to be done on a reactor.
pub(crate) type Task = Box<dyn FnOnce(&Local) + Send>;

pub(crate) enum Message {
    /// Run this there.
    Task(Task),
    /// A command of one of its queues is answered.
    Reply { queue: QueueId, token: u64, reply: Reply },
    /// A queue pair to drive from now on.
    Adopt { host: Nqn, queue: Box<IoQueuePair>, stream: std::net::TcpStream },
    /// Something happened to one of its queues elsewhere.
    Wake { queue: QueueId },
    /// A host waits for buffers: end the connections of others that do nothing with theirs.
    EndStalled { waiting: Arc<str> },
    /// Close all queue pairs.
    CloseQueues,
    /// End the reactor; file I/O under way has `grace` to finish.
    Stop { grace: std::time::Duration },
}

/// Names a queue pair of a reactor: its place, and a number that no later queue in that place has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueId {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
}

/// What any thread can reach of a reactor.
pub(crate) struct Mailbox {
    pub(crate) doorbell: Arc<Doorbell>,
    pub(crate) counters: Arc<Counters>,
    inbox: Mutex<VecDeque<Message>>,
    /// Whether there may be something in the inbox: spares the reactor its lock.
    filled: AtomicBool,
    /// The reactor has ended and takes nothing any more.
    closed: AtomicBool,
}

impl Mailbox {
    pub(crate) fn new(doorbell: Arc<Doorbell>) -> Self {
        Self {
            doorbell,
            counters: Arc::default(),
            inbox: Mutex::default(),
            filled: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    /// Puts a message in from any thread; hands it back when the reactor has ended.
    pub(crate) fn put(&self, message: Message) -> Result<(), Message> {
        {
            let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
            if self.closed.load(Ordering::Relaxed) {
                return Err(message);
            }
            inbox.push_back(message);
            self.filled.store(true, Ordering::Release);
        }
        self.doorbell.ring();
        Ok(())
    }

    /// Takes all messages out.
    pub(crate) fn take(&self) -> VecDeque<Message> {
        if !self.filled.load(Ordering::Acquire) {
            return VecDeque::new();
        }
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        self.filled.store(false, Ordering::Relaxed);
        std::mem::take(&mut *inbox)
    }

    pub(crate) fn is_filled(&self) -> bool {
        self.filled.load(Ordering::Acquire)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Takes nothing any more; what is inside is dropped.
    pub(crate) fn close(&self) {
        let left = {
            let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
            self.closed.store(true, Ordering::Relaxed);
            std::mem::take(&mut *inbox)
        };
        // Outside the lock: what is dropped may answer commands.
        drop(left);
    }
}

/// Sends `message` to reactor `to`, by the ring where this thread is one of the same reactors. Hands it back when that
/// reactor has ended.
pub(crate) fn send(shared: &Arc<Shared>, to: usize, message: Message) -> Result<(), Message> {
    let Some(mailbox) = shared.mailboxes.get(to) else { return Err(message) };
    if mailbox.is_closed() {
        return Err(message);
    }
    match local::current(shared) {
        Some(local) => {
            local.post(to, message);
            Ok(())
        }
        None => mailbox.put(message),
    }
}

/// Where back ends send the replies to one queue pair's commands.
pub(crate) struct QueueSink {
    pub(crate) shared: Arc<Shared>,
    pub(crate) reactor: usize,
    pub(crate) queue: QueueId,
}

impl ReplySink for QueueSink {
    fn reply(&self, token: u64, reply: Reply) {
        // A reactor that has ended has closed its queues: nobody waits for the reply, and its buffer goes home here.
        drop(send(&self.shared, self.reactor, Message::Reply { queue: self.queue, token, reply }));
    }
}
