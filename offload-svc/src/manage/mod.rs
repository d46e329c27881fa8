//! The management API: HTTP with JSON over a Unix socket, its client, and the metrics.
//!
//! Owns requests, answers and limits of the control plane. Must not know reactors, records or PDUs: what is asked for is
//! done by a [`Control`]. Invariant: no call waits longer than [`CALL_LIMIT`] and no client, slow or hostile, holds more
//! than a bounded amount of memory.

pub mod client;
pub mod metrics;
pub mod request;
pub mod server;
pub mod view;

#[cfg(test)]
mod tests;

use std::time::Duration;

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};

use request::{
    CloneRequest, HostRequest, KeyRotation, ListenerRequest, MemberDestroyed, MemberReplacement, MemberReturn,
    NamespaceRemoval, NamespaceRequest, ScrubRequest, SnapshotRequest, SubsystemRemoval, SubsystemRequest,
    VolumeRemoval, VolumeRequest, VolumeResize,
};

/// A control call is answered within this time, with the reason if it isn't finished by then.
pub const CALL_LIMIT: Duration = Duration::from_secs(10);

/// An answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Its kind.
    pub kind: RefusalKind,
    /// Field, rule and value, for people.
    pub message: String,
}

/// Kinds of refusal; each has an HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalKind {
    /// A value breaks a rule (400).
    Invalid,
    /// There is no such thing (404).
    NotFound,
    /// It is there already, or in use (409).
    Conflict,
    /// No space (507).
    NoSpace,
    /// Can't be done now; the reason says what it waits for (503).
    Unavailable,
    /// Not finished within [`CALL_LIMIT`]; it may still take effect (504).
    Unfinished,
    /// A fault of ours (500).
    Internal,
}

impl Refusal {
    /// A refusal of `kind` that says `error`.
    pub fn new(kind: RefusalKind, error: impl std::fmt::Display) -> Self {
        Self { kind, message: error.to_string() }
    }
}

/// What the service does when it is asked to.
///
/// Reads answer from snapshots and never wait for I/O. Changes may; the server bounds them.
pub trait Control: Send + Sync + 'static {
    /// The service as a whole.
    fn status(&self) -> view::Status;
    /// The pool, if there is one.
    fn pool(&self) -> Result<view::Pool, Refusal>;
    /// The pool's volumes.
    fn volumes(&self) -> Result<Vec<view::Volume>, Refusal>;
    /// Subsystems with their namespaces, hosts and controllers.
    fn subsystems(&self) -> Vec<view::Subsystem>;
    /// Where the service listens.
    fn listeners(&self) -> Vec<view::Listener>;
    /// The configuration in effect and where it comes from; no secrets.
    fn config(&self) -> view::Configuration;
    /// Metrics in Prometheus' text format.
    fn metrics(&self) -> String;
    /// Makes a volume.
    fn create_volume(&self, request: VolumeRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>>;
    /// Deletes a volume that no namespace uses; the receipt tells what became of its key.
    fn delete_volume(&self, request: VolumeRemoval) -> BoxFuture<'static, Result<view::Receipt, Refusal>>;
    /// Grows a volume.
    fn resize_volume(&self, request: VolumeResize) -> BoxFuture<'static, Result<view::Volume, Refusal>>;
    /// Takes a snapshot of a volume.
    fn snapshot_volume(&self, request: SnapshotRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>>;
    /// Makes a writable clone of a snapshot or a volume.
    fn clone_volume(&self, request: CloneRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>>;
    /// The keys of the volumes.
    fn keys(&self) -> Result<Vec<view::VolumeKey>, Refusal>;
    /// The receipts of deletions, as they stand now.
    fn receipts(&self) -> Result<Vec<view::Receipt>, Refusal>;
    /// Takes down that a member is destroyed, as somebody says; gives the receipts as they stand then.
    fn member_destroyed(&self, request: MemberDestroyed) -> BoxFuture<'static, Result<Vec<view::Receipt>, Refusal>>;
    /// Gives a volume a new key.
    fn rotate_key(&self, request: KeyRotation) -> BoxFuture<'static, Result<view::VolumeKey, Refusal>>;
    /// Lets a blank device take the place of a pool's member.
    fn replace_member(&self, request: MemberReplacement) -> BoxFuture<'static, Result<view::Coming, Refusal>>;
    /// Brings back a member that was away.
    fn attach_member(&self, request: MemberReturn) -> BoxFuture<'static, Result<view::Coming, Refusal>>;
    /// Begins or ends a scrub.
    fn scrub(&self, request: ScrubRequest) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Adds a subsystem.
    fn add_subsystem(&self, request: SubsystemRequest) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Removes a subsystem; its hosts are disconnected.
    fn remove_subsystem(&self, request: SubsystemRemoval) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Adds a namespace.
    fn add_namespace(&self, request: NamespaceRequest) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Removes a namespace.
    fn remove_namespace(&self, request: NamespaceRemoval) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Lets a host in.
    fn allow_host(&self, request: HostRequest) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Keeps a host out; it is disconnected.
    fn deny_host(&self, request: HostRequest) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Listens on one more address.
    fn add_listener(&self, request: ListenerRequest) -> BoxFuture<'static, Result<(), Refusal>>;
    /// Stops listening on an address.
    fn remove_listener(&self, request: ListenerRequest) -> BoxFuture<'static, Result<(), Refusal>>;
}
