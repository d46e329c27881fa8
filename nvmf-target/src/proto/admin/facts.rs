//! What a controller says of itself that never changes while it lives.

use std::time::Instant;

use crate::wire::nqn::Nqn;

/// The subsystem's and the transport's fixed properties, as Identify gives them out.
#[derive(Debug, Clone)]
pub struct ControllerFacts {
    /// The subsystem.
    pub subsystem: Nqn,
    /// Serial number, up to 20 ASCII characters.
    pub serial: String,
    /// Model number, up to 40 ASCII characters.
    pub model: String,
    /// Firmware revision, up to 8 ASCII characters.
    pub firmware: String,
    /// Controller id.
    pub cntlid: u16,
    /// The host's identifier, from Connect.
    pub hostid: [u8; 16],
    /// Largest transfer, 2^mdts pages of 4 KiB.
    pub mdts: u8,
    /// In-capsule data of I/O queues, in bytes, a multiple of 16.
    pub in_capsule_bytes: u32,
    /// Entries of the largest queue.
    pub max_queue_entries: u16,
    /// I/O queues that the host may have.
    pub max_io_queues: u16,
    /// The largest nsid.
    pub max_nsid: u32,
    /// Keep-alive timeout from Connect, in ms.
    pub kato_ms: u32,
    /// When the target was started.
    pub powered_on: Instant,
}
