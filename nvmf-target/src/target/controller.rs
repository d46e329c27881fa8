//! One live association as the registry sees it, and the mailbox through which the registry reaches its admin queue.
//!
//! It must not know the admin queue's machine or socket. Invariant: a controller stays in the registry until its last
//! command has been answered, so that a successor can wait for it.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::connections::Ticket;
use super::socket::SocketProbe;
use crate::proto::controller_shared::{ControllerShared, ControllerState};
use crate::proto::queue_shared::QueueShared;
use crate::wire::nqn::Nqn;

/// Why an association ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EndReason {
    /// The host closed the admin queue's connection.
    #[error("the host closed the connection")]
    HostClosed,
    /// Nothing was heard for the keep-alive timeout.
    #[error("keep-alive timeout")]
    KeepAlive,
    /// A new association of the same host takes its place.
    #[error("the host has connected again")]
    Succeeded,
    /// Its subsystem was deleted.
    #[error("the subsystem was deleted")]
    SubsystemDeleted,
    /// The host is not allowed any more.
    #[error("the host is not allowed any more")]
    HostRemoved,
    /// The target goes down.
    #[error("the target is shutting down")]
    Shutdown,
    /// The admin queue broke the protocol, or its socket failed.
    #[error("transport error")]
    Transport,
    /// A fault of ours.
    #[error("internal error")]
    Internal,
    /// The host leaves its data unread.
    #[error("the host doesn't read")]
    SlowReader,
}

/// News for an admin queue.
#[derive(Debug, Default)]
pub(super) struct News {
    /// Namespaces that were added, removed or resized.
    pub namespaces: BTreeSet<u32>,
    /// This host's discovery log has changed.
    pub discovery_log: bool,
    /// The association is to end.
    pub end: Option<EndReason>,
}

/// A controller in the registry.
pub(super) struct Controller {
    /// What its queues share.
    pub shared: Arc<ControllerShared>,
    /// Its subsystem; `None` is discovery.
    pub subsystem: Option<Nqn>,
    /// Its host.
    pub host: Nqn,
    /// The host's identifier.
    pub hostid: [u8; 16],
    /// Where the host connects from.
    pub peer: SocketAddr,
    /// Where it connects to.
    pub local: SocketAddr,
    /// Since when.
    pub since: Instant,
    /// The admin queue's socket.
    pub socket: SocketProbe,
    /// How many I/O queues the host may create now (Number of Queues).
    pub io_queues: AtomicU32,
    kato_ms: AtomicU32,
    /// Last sign of life, in ms after `since`.
    last_seen_ms: AtomicU64,
    ending: AtomicBool,
    /// The places of its I/O connections in the count of connections.
    tickets: Mutex<Vec<(Arc<QueueShared>, Ticket)>>,
    news: Mutex<News>,
    wake: Notify,
}

/// Who connected, and how.
pub(super) struct Association {
    pub subsystem: Option<Nqn>,
    pub host: Nqn,
    pub hostid: [u8; 16],
    pub peer: SocketAddr,
    pub local: SocketAddr,
    pub socket: SocketProbe,
    pub kato_ms: u32,
}

impl Controller {
    pub fn new(association: Association, shared: Arc<ControllerShared>, io_queues: u16, now: Instant) -> Self {
        Self {
            shared,
            subsystem: association.subsystem,
            host: association.host,
            hostid: association.hostid,
            peer: association.peer,
            local: association.local,
            since: now,
            socket: association.socket,
            io_queues: AtomicU32::new(u32::from(io_queues)),
            kato_ms: AtomicU32::new(association.kato_ms),
            last_seen_ms: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            tickets: Mutex::default(),
            news: Mutex::default(),
            wake: Notify::new(),
        }
    }

    /// Ends the association: nothing more reaches a back end; the admin queue's driver does the rest.
    pub fn end(&self, reason: EndReason) {
        self.ending.store(true, Ordering::SeqCst);
        self.shared.terminate();
        self.tell(|news| news.end = news.end.or(Some(reason)));
    }

    /// Whether it is on its way out.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst) || self.shared.state() == ControllerState::Terminated
    }

    /// Whether nothing of it is left: no queue, no command at a back end.
    pub fn is_drained(&self) -> bool {
        self.shared.in_flight() == 0 && self.shared.queues().is_empty()
    }

    /// A namespace changed.
    pub fn namespace_changed(&self, nsid: u32) {
        self.tell(|news| _ = news.namespaces.insert(nsid));
    }

    /// The discovery log that this host sees changed.
    pub fn discovery_log_changed(&self) {
        self.tell(|news| news.discovery_log = true);
    }

    /// Takes what is new.
    pub fn take_news(&self) -> News {
        std::mem::take(&mut self.news.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until there is something new.
    pub async fn news_arrived(&self) {
        self.wake.notified().await;
    }

    /// The host was heard.
    pub fn note_life(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.since).as_millis() as u64;
        self.last_seen_ms.store(ms, Ordering::Relaxed);
    }

    /// The host has changed its timeout.
    pub fn set_kato_ms(&self, kato_ms: u32) {
        self.kato_ms.store(kato_ms, Ordering::Relaxed);
    }

    /// Keeps an I/O connection counted for as long as its queue lives.
    pub fn hold_ticket(&self, queue: Arc<QueueShared>, ticket: Ticket) {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner).push((queue, ticket));
        self.release_tickets();
    }

    /// Gives back the places of connections whose queues are gone.
    pub fn release_tickets(&self) {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner).retain(|(queue, _)| !queue.is_gone());
    }

    /// The keep-alive timeout in force.
    pub fn kato_ms(&self) -> u32 {
        self.kato_ms.load(Ordering::Relaxed)
    }

    /// Whether the host has missed the time at which a living one would have been heard. A host sends Keep Alive at
    /// half its timeout, so three quarters leave room for delay. Without a timeout silence says nothing.
    pub fn is_silent(&self, now: Instant) -> bool {
        let kato = u64::from(self.kato_ms());
        let last_seen = self.since + Duration::from_millis(self.last_seen_ms.load(Ordering::Relaxed));
        kato > 0 && now.saturating_duration_since(last_seen) > Duration::from_millis(kato * 3 / 4)
    }

    fn tell(&self, change: impl FnOnce(&mut News)) {
        change(&mut self.news.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_one();
    }
}
