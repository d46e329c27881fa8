//! What bounds a target: every table, queue and wait has its limit here.

use std::time::Duration;

use crate::proto::tcp::ENTRIES_MAX;

/// Limits of one target, fixed while it runs.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Associations (controllers) with subsystems at a time.
    pub controllers: usize,
    /// Associations with discovery at a time. They have no I/O queues, so they don't count as those above.
    pub discovery_controllers: usize,
    /// Associations of one host with one subsystem (or with discovery) at a time.
    pub controllers_per_host: usize,
    /// I/O queues of one controller.
    pub io_queues: u16,
    /// Entries of one queue.
    pub queue_entries: u16,
    /// In-capsule data of I/O queues in bytes; a multiple of 16, at most 1 MiB.
    pub in_capsule_bytes: u32,
    /// Largest transfer of one command in bytes; a power of two, 4 KiB at least.
    pub mdts_bytes: u32,
    /// Subsystems.
    pub subsystems: usize,
    /// The largest nsid.
    pub max_nsid: u32,
    /// Hosts in one subsystem's list.
    pub allowed_hosts: usize,
    /// Listeners.
    pub listeners: usize,
    /// TCP connections at a time.
    pub connections: usize,
    /// TCP connections from one address at a time.
    pub connections_per_peer: usize,
    /// TCP connections from one address whose Connect isn't done.
    pub unconnected_per_peer: usize,
    /// How long a new connection may take until its Connect is done.
    pub connect_timeout: Duration,
    /// How long a host may leave what it asked for unread before it is cut.
    pub slow_reader_timeout: Duration,
    /// How long a new association waits for the commands of the one that it follows.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            controllers: 256,
            discovery_controllers: 256,
            controllers_per_host: 32,
            io_queues: 16,
            queue_entries: 128,
            in_capsule_bytes: 8192,
            mdts_bytes: 1 << 20,
            subsystems: 256,
            max_nsid: 1024,
            allowed_hosts: 4096,
            listeners: 32,
            connections: 4096,
            connections_per_peer: 2048,
            unconnected_per_peer: 256,
            connect_timeout: Duration::from_secs(5),
            slow_reader_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(5),
        }
    }
}

impl Limits {
    /// The limits as they can be kept: what a host may ask for must never be more than the transport can do.
    pub(super) fn sound(mut self) -> Self {
        self.queue_entries = self.queue_entries.clamp(2, ENTRIES_MAX);
        self.io_queues = self.io_queues.max(1);
        self.max_nsid = self.max_nsid.clamp(1, u32::MAX - 2);
        self.in_capsule_bytes &= !15;
        self
    }

    /// MDTS as Identify gives it: a power of two of 4 KiB pages.
    pub(super) fn mdts(&self) -> u8 {
        (self.mdts_bytes.max(4096) / 4096).ilog2() as u8
    }
}
