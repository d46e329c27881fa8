//! Reactors: the data path's threads, each with its own executor, timers, file I/O and connections.
//!
//! Owns their start, their end, and every way to reach them. Must not know what runs on them (pool, back ends) nor the
//! protocol (`nvmf_target` has it). Invariant: a reactor never blocks; when one fails, everyone who asks learns it.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvmf_target::proto::io_queue::IoQueuePair;
use nvmf_target::target::{AdoptError, QueueHost};
use nvmf_target::wire::nqn::Nqn;
use tokio::sync::watch;

mod connection;
mod connections;
pub mod disk;
mod doorbell;
pub mod env;
#[cfg_attr(not(feature = "dpdk"), allow(dead_code))]
mod hugepages;
mod local;
pub mod members;
mod message;
mod metrics;
mod platform;
mod settings;
mod start;
mod thread;
mod timers;

#[cfg(test)]
mod tests;

pub use hugepages::HugePageShortage;
pub use local::{Local, Sleep};
pub use metrics::ReactorSnapshot;
pub use settings::{Settings, TooLittleForBuffers};
pub use start::StartError;

use crate::buffers::Buffers;
use message::{Mailbox, Message};
use platform::Running;

/// What all threads share.
pub(crate) struct Shared {
    mailboxes: Vec<Mailbox>,
    host_buffers: Buffers,
    internal_buffers: Buffers,
    running: Mutex<Vec<Running>>,
    failure: watch::Sender<Option<ReactorFailure>>,
    platform: &'static str,
}

/// A reactor ended by a panic: a bug of ours. The service must not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("reactor {index} failed; its message is in the log")]
pub struct ReactorFailure {
    /// Which one.
    pub index: usize,
}

/// That reactor has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("reactor {index} has ended")]
pub struct Ended {
    /// Which one.
    pub index: usize,
}

/// The reactors. Clones are the same ones.
#[derive(Clone)]
pub struct Reactors {
    shared: Arc<Shared>,
}

impl Reactors {
    /// Starts them: all of them run when this returns, or none does.
    pub fn start(settings: &Settings) -> Result<Self, StartError> {
        start::start(settings).map(|shared| Self { shared })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.shared.mailboxes.len()
    }

    /// What carries them, for people: DPDK's version and kind of memory, or threads.
    pub fn platform(&self) -> &'static str {
        self.shared.platform
    }

    /// The pool that hosts' data goes into: what queue pairs are made with.
    pub fn host_buffers(&self) -> &Buffers {
        &self.shared.host_buffers
    }

    /// The pool that back ends work with ([`Local::buffer`]). It is apart from the hosts', so that hosts that fill
    /// theirs can't keep a back end from finishing.
    pub fn internal_buffers(&self) -> &Buffers {
        &self.shared.internal_buffers
    }

    /// Runs `task` on a reactor. Never blocks; from a reactor it goes over the ring, from any other thread through the
    /// inbox. A task runs between other work and must not block either.
    pub fn run_on(&self, reactor: usize, task: impl FnOnce(&Local) + Send + 'static) -> Result<(), Ended> {
        message::send(&self.shared, reactor, Message::Task(Box::new(task))).map_err(|_| Ended { index: reactor })
    }

    /// Makes a future on a reactor (so it need not be `Send`) and runs it there.
    pub fn spawn_on<F, T>(&self, reactor: usize, make: F) -> Result<(), Ended>
    where
        F: FnOnce(Local) -> T + Send + 'static,
        T: Future<Output = ()> + 'static,
    {
        self.run_on(reactor, move |local| local.spawn(make(local.clone())))
    }

    /// Makes a future on a reactor, runs it there, and resolves to its output; works on any executor.
    pub async fn call_on<F, T>(&self, reactor: usize, make: F) -> Result<T::Output, Ended>
    where
        F: FnOnce(Local) -> T + Send + 'static,
        T: Future + 'static,
        T::Output: Send + 'static,
    {
        let (sender, receiver) = futures::channel::oneshot::channel();
        self.spawn_on(reactor, move |local| {
            let future = make(local);
            async move {
                // The caller may have gone away: then nobody wants the output.
                let _ = sender.send(future.await);
            }
        })?;
        receiver.await.map_err(|_| Ended { index: reactor })
    }

    /// Counters of each reactor.
    pub fn snapshot(&self) -> Vec<ReactorSnapshot> {
        self.shared.mailboxes.iter().map(|mailbox| mailbox.counters.snapshot()).collect()
    }

    /// Resolves if a reactor fails.
    pub async fn failed(&self) -> ReactorFailure {
        let mut failure = self.shared.failure.subscribe();
        loop {
            if let Some(failure) = *failure.borrow_and_update() {
                return failure;
            }
            // The sender lives in `shared`, which `self` holds.
            let _ = failure.changed().await;
        }
    }

    /// The failure, if there was one.
    pub fn failure(&self) -> Option<ReactorFailure> {
        *self.shared.failure.borrow()
    }

    /// Closes every connection that the reactors drive. Commands that back ends have go on; their replies are dropped.
    pub fn close_queues(&self) {
        for index in 0..self.count() {
            let _ = message::send(&self.shared, index, Message::CloseQueues);
        }
    }

    /// Ends the reactors and waits for them: connections are closed at once, file I/O has `grace` to finish, then
    /// tasks are dropped. Blocks; not for a reactor's own thread. A second call waits for nothing.
    pub fn stop(&self, grace: Duration) {
        for index in 0..self.count() {
            let _ = message::send(&self.shared, index, Message::Stop { grace });
        }
        let running = std::mem::take(&mut *self.shared.running.lock().unwrap_or_else(PoisonError::into_inner));
        running.into_iter().for_each(Running::join);
    }
}

impl QueueHost for Reactors {
    fn adopt(&self, host: &Nqn, queue: IoQueuePair, stream: std::net::TcpStream) -> Result<(), AdoptError> {
        let load = |mailbox: &Mailbox| mailbox.counters.queues.load(Ordering::Relaxed);
        let alive = self.shared.mailboxes.iter().enumerate().filter(|(_, mailbox)| !mailbox.is_closed());
        let Some((_, mailbox)) = alive.min_by_key(|(_, mailbox)| load(mailbox)) else {
            return Err(AdoptError::ShuttingDown);
        };
        // Counted before it arrives, so that a flood of connections spreads.
        mailbox.counters.queues.fetch_add(1, Ordering::Relaxed);
        mailbox.put(Message::Adopt { host: host.clone(), queue: Box::new(queue), stream }).map_err(|_| {
            mailbox.counters.queues.fetch_sub(1, Ordering::Relaxed);
            AdoptError::ShuttingDown
        })
    }
}

/// DPDK for the tests of this process: EAL starts once, with lcores enough for all tests that run at a time.
#[cfg(all(test, feature = "dpdk"))]
pub(crate) fn test_eal() -> &'static sdk_bindings::eal::Eal {
    use sdk_bindings::eal::{Eal, EalConfig, LcorePlan, Memory};
    static EAL: std::sync::OnceLock<&'static Eal> = std::sync::OnceLock::new();
    EAL.get_or_init(|| {
        let config =
            EalConfig { memory: Memory::OrdinaryPages, memory_mib: 512, lcores: vec![LcorePlan::default(); 24] };
        Eal::start(&config).expect("EAL starts on ordinary pages")
    })
}
