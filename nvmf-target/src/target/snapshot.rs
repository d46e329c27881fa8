//! What the target looks like at one moment, for management: plain values, nothing shared.

use std::net::SocketAddr;
use std::time::Duration;

use uuid::Uuid;

/// The whole target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetSnapshot {
    /// Subsystems, by name.
    pub subsystems: Vec<SubsystemSnapshot>,
    /// Listeners.
    pub listeners: Vec<ListenerSnapshot>,
    /// Controllers, discovery ones included.
    pub controllers: Vec<ControllerSnapshot>,
    /// TCP connections.
    pub connections: usize,
}

/// A subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubsystemSnapshot {
    /// Name.
    pub nqn: String,
    /// Serial number.
    pub serial: String,
    /// Model number.
    pub model: String,
    /// Every host may connect.
    pub allow_any_host: bool,
    /// Hosts on the list.
    pub hosts: Vec<String>,
    /// Namespaces, by nsid.
    pub namespaces: Vec<NamespaceSnapshot>,
}

/// A namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceSnapshot {
    /// Its id.
    pub nsid: u32,
    /// UUID and NGUID.
    pub uuid: Uuid,
    /// Block size in bytes.
    pub block_bytes: u32,
    /// Size in blocks.
    pub block_count: u64,
    /// Blocks in use.
    pub used_blocks: u64,
}

/// A listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerSnapshot {
    /// Where it listens.
    pub address: SocketAddr,
    /// PORTID.
    pub port_id: u16,
}

/// A controller, that is, one association.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerSnapshot {
    /// Its id.
    pub cntlid: u16,
    /// Its subsystem; `None` is the discovery service.
    pub subsystem: Option<String>,
    /// Its host.
    pub host: String,
    /// The host's identifier.
    pub hostid: Uuid,
    /// Where the host connects from.
    pub peer: SocketAddr,
    /// Where it connects to.
    pub local: SocketAddr,
    /// How long it has been there.
    pub age: Duration,
    /// Keep-alive timeout in ms; 0 is none.
    pub kato_ms: u32,
    /// It is on its way out.
    pub ending: bool,
    /// Its I/O queues.
    pub queues: Vec<QueueSnapshot>,
    /// Read (and Compare) commands that succeeded.
    pub read_commands: u64,
    /// Write commands that succeeded.
    pub write_commands: u64,
    /// Bytes read or compared.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Commands that ended with a media error.
    pub media_errors: u64,
}

/// An I/O queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSnapshot {
    /// Its id.
    pub qid: u16,
    /// Entries.
    pub entries: u16,
    /// Commands at a back end.
    pub in_flight: usize,
}
