//! The running target: the registry of subsystems, namespaces, hosts, listeners and controllers, changed while it
//! serves, and the tokio side: listeners, Connect, admin queues, keep-alive.
//!
//! It must not know how data is stored, and drives no I/O queue itself: those go to a [`QueueHost`]. Invariant: no
//! call here waits for a back end, but for the ones that say so and have a time limit.

mod admin_queue;
mod admission;
mod connection;
mod connections;
mod controller;
mod error;
mod flush;
mod limits;
mod listener;
mod queue_host;
mod registry;
mod snapshot;
mod socket;
mod views;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

pub use controller::EndReason;
pub use error::TargetError;
pub use limits::Limits;
pub use queue_host::{AdoptError, QueueHost, ThreadQueueHost};
pub use registry::SubsystemSpec;
pub use snapshot::{
    ControllerSnapshot, ListenerSnapshot, NamespaceSnapshot, QueueSnapshot, SubsystemSnapshot, TargetSnapshot,
};

use self::connections::{Connections, LogLimit};
use self::controller::Controller;
use self::registry::Registry;
use crate::backend::Backend;
use crate::proto::tcp::TcpConfig;
use crate::wire::nqn::Nqn;

/// What a target is made of.
pub struct TargetConfig {
    /// Limits.
    pub limits: Limits,
    /// Firmware revision that hosts see, up to 8 ASCII characters.
    pub firmware: String,
    /// Settings of NVMe/TCP connections.
    pub tcp: TcpConfig,
    /// Staging buffer of an I/O queue's connection, in bytes.
    pub io_staging_bytes: usize,
    /// Who drives I/O queues.
    pub queues: Arc<dyn QueueHost>,
    /// Where the target's own tasks run.
    pub runtime: Handle,
}

/// See the module.
pub struct Target {
    config: TargetConfig,
    registry: Mutex<Registry>,
    connections: Connections,
    log_limit: LogLimit,
    /// Rung when a controller has left.
    left: Notify,
    /// True once the target shuts down.
    closing: watch::Sender<bool>,
    started: Instant,
}

/// The controllers of a deleted subsystem, or of the whole target, on their way out.
pub struct Departing {
    target: Arc<Target>,
    nqn: Option<Nqn>,
    controllers: Vec<Arc<Controller>>,
}

impl Departing {
    /// Waits until the last of their commands has been answered and their connections are closed, at most `limit`.
    pub async fn wait(self, limit: Duration) -> Result<(), TargetError> {
        let still_there = || {
            let registry = self.target.registry();
            registry.controllers.iter().filter(|c| self.controllers.iter().any(|d| Arc::ptr_eq(c, d))).count()
        };
        if self.target.until(limit, || still_there() == 0).await {
            return Ok(());
        }
        let nqn = self.nqn.clone().unwrap_or_else(Nqn::discovery);
        Err(TargetError::StillBusy { nqn, controllers: still_there(), waited_ms: limit.as_millis() as u64 })
    }
}

impl Target {
    /// A target without subsystems or listeners.
    pub fn new(mut config: TargetConfig) -> Arc<Self> {
        config.limits = config.limits.sound();
        Arc::new(Self {
            config,
            registry: Mutex::new(Registry::new()),
            connections: Connections::default(),
            log_limit: LogLimit::new(),
            left: Notify::new(),
            closing: watch::Sender::new(false),
            started: Instant::now(),
        })
    }

    /// Makes a subsystem, without namespaces and hosts.
    pub fn create_subsystem(&self, spec: &SubsystemSpec) -> Result<(), TargetError> {
        self.registry().create_subsystem(spec, &self.config.limits)
    }

    /// Removes a subsystem at once and closes its controllers; wait for them through what is returned.
    pub fn delete_subsystem(self: &Arc<Self>, nqn: &str) -> Result<Departing, TargetError> {
        let mut registry = self.registry();
        let nqn = registry.delete_subsystem(nqn)?;
        let of_it = |c: &&Arc<Controller>| c.subsystem.as_ref() == Some(&nqn);
        let controllers = registry.controllers.iter().filter(of_it).cloned().collect();
        Ok(Departing { target: Arc::clone(self), nqn: Some(nqn), controllers })
    }

    /// Lets every host in, or only those on the list (and closes the others' controllers).
    pub fn set_allow_any_host(&self, nqn: &str, allow: bool) -> Result<(), TargetError> {
        self.registry().set_allow_any_host(nqn, allow)
    }

    /// Puts a host on a subsystem's list.
    pub fn allow_host(&self, nqn: &str, host: &str) -> Result<(), TargetError> {
        self.registry().allow_host(nqn, host, &self.config.limits)
    }

    /// Takes a host off a subsystem's list, and closes its controllers.
    pub fn disallow_host(&self, nqn: &str, host: &str) -> Result<(), TargetError> {
        self.registry().disallow_host(nqn, host)
    }

    /// Adds a namespace; connected hosts are told.
    pub fn add_namespace(&self, nqn: &str, nsid: u32, backend: Arc<dyn Backend>) -> Result<(), TargetError> {
        self.registry().add_namespace(nqn, nsid, backend, &self.config.limits)
    }

    /// Removes a namespace and gives its back end back; connected hosts are told. Commands that the back end has
    /// already finish, later ones get 00/0Bh.
    pub fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<Arc<dyn Backend>, TargetError> {
        self.registry().remove_namespace(nqn, nsid)
    }

    /// Tells connected hosts that a namespace's size has changed.
    pub fn namespace_resized(&self, nqn: &str, nsid: u32) -> Result<(), TargetError> {
        self.registry().namespace_resized(nqn, nsid)
    }

    /// Listens on `address` (port 0: any free one). Discovery and every subsystem are served on every listener.
    /// Gives the address listened on.
    pub fn add_listener(self: &Arc<Self>, address: SocketAddr) -> Result<SocketAddr, TargetError> {
        listener::add(self, address)
    }

    /// Stops listening; connections stay.
    pub fn remove_listener(&self, address: SocketAddr) -> Result<(), TargetError> {
        self.registry().remove_listener(address)
    }

    /// Stops listening and closes every connection; waits at most `limit` until the last command has been answered.
    pub async fn shutdown(self: &Arc<Self>, limit: Duration) -> Result<(), TargetError> {
        let controllers = {
            let mut registry = self.registry();
            registry.closing = true;
            for (_, listener) in std::mem::take(&mut registry.listeners) {
                listener.task.abort();
            }
            registry.end_controllers(EndReason::Shutdown, |_| true);
            registry.controllers.clone()
        };
        self.closing.send_replace(true);
        Departing { target: Arc::clone(self), nqn: None, controllers }.wait(limit).await
    }

    /// What there is now.
    pub fn snapshot(&self) -> TargetSnapshot {
        views::snapshot(&self.registry(), self.connections.total(), Instant::now())
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // Each change is made whole before anything that could panic, so a poisoned registry is still right.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done`, looking whenever a controller has left and every few milliseconds; false after `limit`.
    async fn until(&self, limit: Duration, done: impl Fn() -> bool) -> bool {
        const LOOK_EVERY: Duration = Duration::from_millis(20);
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            if done() {
                return true;
            }
            let look = (tokio::time::Instant::now() + LOOK_EVERY).min(deadline);
            let _ = tokio::time::timeout_at(look, self.left.notified()).await;
            if tokio::time::Instant::now() >= deadline {
                return done();
            }
        }
    }
}
