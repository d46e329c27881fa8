//! The NVMe/TCP transport of one queue pair, controller side, admin or I/O alike.
//!
//! Above its line: receive command, fetch host data, send host data, send response. Below it: ICReq, R2T, digests,
//! SQHD, flow control, TermReq. Must not know what commands mean. Invariants: memory is bounded by the queue's size
//! and the in-capsule limit; each command is answered once; a peer that breaks framing gets the TermReq that names
//! the fault, and the connection ends.

mod config;
mod output;
mod receive;
mod send;
mod slots;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use config::{QueueParams, TcpConfig};
pub(crate) use output::{HeldKey, Output};
use receive::{HeldCapsule, Incoming};
use slots::Slots;

use crate::buffer::{BufferPool, IoBuf};
use crate::proto::framing::{Framer, Receiver, Rules};
use crate::wire::Sqe;
use crate::wire::pdu::FatalError;

/// Names an outstanding command of a queue: an index below the queue's number of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u16);

/// Most entries of a queue: TTAGs, four a command, must fit 16 bits.
pub const ENTRIES_MAX: u16 = 4096;

/// How long the TermReq may take to leave before the socket is closed without it.
const TERM_REQ_TIMEOUT: Duration = Duration::from_secs(5);
/// What a reader must take in a `send_timeout` to count as one: a byte now and then would hold buffers for ever.
const SEND_PROGRESS_BYTES: u64 = 64 << 10;
/// A transfer must end within this many `transfer_timeout`s even if bytes trickle in.
const TRICKLE_FACTOR: u32 = 8;

/// The data that came in a command's capsule.
#[derive(Debug)]
pub enum CapsuleData {
    /// None.
    None,
    /// In a buffer of the pool. `intact`: its digest is right, or none was agreed on.
    Placed {
        /// The data.
        buffer: IoBuf,
        /// Whether it is what was sent.
        intact: bool,
    },
    /// The pool had nothing: kept in the queue's own reserve until [`TcpQueuePair::copy_reserved`].
    Reserved {
        /// How much.
        len_bytes: u32,
        /// Whether it is what was sent.
        intact: bool,
    },
}

impl CapsuleData {
    /// How much.
    pub fn len_bytes(&self) -> u32 {
        match self {
            Self::None => 0,
            Self::Placed { buffer, .. } => buffer.len() as u32,
            Self::Reserved { len_bytes, .. } => *len_bytes,
        }
    }

    /// Whether it is what was sent.
    pub fn is_intact(&self) -> bool {
        match self {
            Self::None => true,
            Self::Placed { intact, .. } | Self::Reserved { intact, .. } => *intact,
        }
    }
}

/// What happened on the connection.
#[derive(Debug)]
pub enum TcpEvent {
    /// A command arrived; exactly one of `respond` and `send_data` must follow for its slot.
    Command {
        /// Its name from now on.
        slot: Slot,
        /// The command.
        sqe: Sqe,
        /// What came with it.
        data: CapsuleData,
    },
    /// All that [`TcpQueuePair::fetch`] asked for has come.
    Fetched {
        /// The command.
        slot: Slot,
        /// The data.
        buffer: IoBuf,
        /// Whether it is what was sent: if not, the command ends 00/22h.
        intact: bool,
    },
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// The peer broke the protocol; a TermReq that says so has been sent, or could not be.
    ProtocolError {
        /// FES.
        error: FatalError,
        /// FEI.
        info: u32,
    },
    /// The peer sent a TermReq.
    PeerTerminated {
        /// FES as it came.
        fes: u16,
        /// FEI.
        fei: u32,
    },
    /// The peer closed its socket.
    PeerClosed,
    /// The peer did not send data that it was asked for.
    TransferTimeout,
    /// The peer did not take what was sent to it.
    SendTimeout,
    /// Our side ends it: the controller goes.
    Terminated,
}

/// See the module.
pub struct TcpQueuePair {
    config: TcpConfig,
    framer: Framer,
    rules: Rules,
    incoming: Incoming,
    held_capsule: Option<HeldCapsule>,
    output: Output,
    /// HPDA in bytes.
    host_align_bytes: usize,
    /// MAXR2T + 1.
    max_r2ts: usize,
    slots: Slots,
    entries: u16,
    sq_flow_control: bool,
    sqhd: u16,
    /// In-capsule data that the pool had no place for: one part for each slot. Zeroed memory that is never written
    /// is never resident.
    reserve: Vec<u8>,
    pool: Arc<dyn BufferPool>,
    reserve_first: bool,
    events: VecDeque<TcpEvent>,
    transfers: usize,
    transfer_progress: Option<Instant>,
    /// Since when less than [`SEND_PROGRESS_BYTES`] have come while data was awaited, and what had come by then.
    transfer_pace: Option<(Instant, u64)>,
    received_bytes: u64,
    /// When to look for transfers that trickle; no later than the oldest one's limit.
    trickle_check: Option<Instant>,
    /// Since when it has been reading too slowly, and what had been sent by then.
    send_progress: Option<(Instant, u64)>,
    closing: Option<CloseReason>,
    close_by: Option<Instant>,
}

impl TcpQueuePair {
    /// A fresh connection, before ICReq. `pool` serves in-capsule data until [`TcpQueuePair::set_pool`].
    pub fn new(config: TcpConfig, pool: Arc<dyn BufferPool>) -> Self {
        let rules = Rules {
            receiver: Receiver::Controller,
            connected: false,
            header_digest: false,
            data_digest: false,
            align_bytes: (u32::from(config.cpda) + 1) * 4,
            capsule_data_max_bytes: config.admin_in_capsule_bytes,
            data_max_bytes: config.max_h2c_data_bytes,
        };
        Self {
            framer: Framer::new(config.staging_bytes),
            rules,
            incoming: Incoming::Nothing,
            held_capsule: None,
            output: Output::default(),
            host_align_bytes: 4,
            max_r2ts: 1,
            // Only Connect may be outstanding until it is answered.
            slots: Slots::new(1),
            entries: 1,
            sq_flow_control: true,
            sqhd: 0,
            reserve: vec![0; config.admin_in_capsule_bytes as usize],
            pool,
            reserve_first: false,
            events: VecDeque::new(),
            transfers: 0,
            transfer_progress: None,
            transfer_pace: None,
            received_bytes: 0,
            trickle_check: None,
            send_progress: None,
            closing: None,
            close_by: None,
            config,
        }
    }

    /// Settles the queue's size and limits. Call it on the Connect that is being accepted, before answering it.
    ///
    /// # Panics
    /// If `params.entries` is 0 or over [`ENTRIES_MAX`]: the caller has checked SQSIZE.
    pub fn establish(&mut self, params: QueueParams) {
        assert!((1..=ENTRIES_MAX).contains(&params.entries), "queue size was not checked");
        // What Connect brought in the reserve has been copied out by now: its slot's part may move.
        self.entries = params.entries;
        self.slots.grow(params.entries);
        self.sq_flow_control = params.sq_flow_control;
        // Connect itself was the first entry.
        self.sqhd = 1 % params.entries;
        self.rules.capsule_data_max_bytes = params.in_capsule_bytes;
        self.reserve = vec![0; usize::from(params.entries) * params.in_capsule_bytes as usize];
        self.framer.resize(params.staging_bytes);
        self.events.reserve(usize::from(params.entries));
    }

    /// Changes the pool that in-capsule data goes to.
    pub fn set_pool(&mut self, pool: Arc<dyn BufferPool>) {
        self.pool = pool;
    }

    /// While commands wait for the pool, in-capsule data goes to the reserve, so that no later command overtakes.
    pub fn set_reserve_first(&mut self, reserve_first: bool) {
        self.reserve_first = reserve_first;
    }

    /// Where the next received bytes go; empty while nothing can be taken (back-pressure: don't read the socket).
    pub fn receive_slice(&mut self) -> &mut [u8] {
        if self.closing.is_some() || self.held_capsule.is_some() {
            return &mut [];
        }
        match self.in_place_bytes() {
            Some(left) => &mut self.incoming.place(&mut self.slots, &mut self.reserve)[..left],
            None => self.framer.room(),
        }
    }

    /// How many bytes may be read straight into their place. Data that goes nowhere has none.
    fn in_place_bytes(&mut self) -> Option<usize> {
        let left = self.framer.in_place_bytes()?;
        (self.incoming.place(&mut self.slots, &mut self.reserve).len() >= left).then_some(left)
    }

    /// `len_bytes` were read into [`TcpQueuePair::receive_slice`].
    pub fn received(&mut self, len_bytes: usize, now: Instant) {
        if self.closing.is_some() || len_bytes == 0 {
            return;
        }
        self.received_bytes += len_bytes as u64;
        if self.in_place_bytes().is_some() {
            let place = self.incoming.place(&mut self.slots, &mut self.reserve);
            self.framer.placed(&place[..len_bytes]);
            self.incoming.advance(len_bytes);
        } else {
            self.framer.filled(len_bytes);
        }
        self.advance(now);
    }

    /// The next event. Ask until `None` after `received`, `sent` and `tick`.
    pub fn poll_event(&mut self) -> Option<TcpEvent> {
        self.events.pop_front()
    }

    /// Appends the bytes that are ready to be sent.
    pub fn gather<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        self.output.gather(out);
    }

    /// Bytes are ready to be sent.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// The socket took `len_bytes` of what `gather` gave.
    pub fn sent(&mut self, len_bytes: usize, now: Instant) {
        self.output.sent(len_bytes);
        let sent_bytes = self.output.sent_bytes();
        self.send_progress = match self.send_progress {
            _ if !self.has_output() => None,
            Some((since, before)) if sent_bytes - before < SEND_PROGRESS_BYTES => Some((since, before)),
            _ => Some((now, sent_bytes)),
        };
        if self.held_capsule.is_some() {
            self.advance(now);
        }
    }

    /// The socket's read side ended, or it failed.
    pub fn peer_closed(&mut self) {
        self.close(CloseReason::PeerClosed);
        // A TermReq that still waits has nobody to read it.
        self.output = Output::default();
    }

    /// Our side ends the connection.
    pub fn terminate(&mut self) {
        self.close(CloseReason::Terminated);
    }

    /// Time passed: call it at [`TcpQueuePair::next_deadline`].
    pub fn tick(&mut self, now: Instant) {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if due(self.close_by) {
            self.output = Output::default();
        }
        if due(self.send_deadline()) {
            self.close(CloseReason::SendTimeout);
        }
        if due(self.trickle_check) {
            self.trickle_check = self.slots.oldest_transfer().map(|began| began + self.trickle_limit());
        }
        if due(self.transfer_deadline()) || due(self.trickle_check) {
            self.close(CloseReason::TransferTimeout);
        }
    }

    /// Others wait for what this connection holds: ends it if for `patience` the peer has sent, or taken, less of the data
    /// that it owes than a living one does. Says whether it did.
    pub fn end_if_stalled(&mut self, now: Instant, patience: Duration) -> bool {
        let since =
            |at: Option<Instant>, limit: Duration| at.is_some_and(|at| now.saturating_duration_since(at) >= limit);
        if self.closing.is_some() {
            return false;
        }
        if since(self.transfer_pace.map(|(at, _)| at), patience) {
            self.close(CloseReason::TransferTimeout);
        } else if since(self.send_progress.map(|(at, _)| at), patience) {
            self.close(CloseReason::SendTimeout);
        }
        self.closing.is_some()
    }

    /// When `tick` is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        let all = [self.close_by, self.send_deadline(), self.transfer_deadline(), self.trickle_check];
        all.into_iter().flatten().min()
    }

    fn send_deadline(&self) -> Option<Instant> {
        self.send_progress.filter(|_| self.closing.is_none()).map(|(since, _)| since + self.config.send_timeout)
    }

    fn trickle_limit(&self) -> Duration {
        self.config.transfer_timeout * TRICKLE_FACTOR
    }

    fn transfer_deadline(&self) -> Option<Instant> {
        self.transfer_progress.filter(|_| self.closing.is_none()).map(|at| at + self.config.transfer_timeout)
    }

    /// The connection is over and the socket is to be closed. Shut its write side down first and read what still
    /// comes for a moment, so that a TermReq isn't lost to a reset.
    pub fn poll_close(&self) -> Option<CloseReason> {
        let term_req_waits = self.close_by.is_some() && self.has_output();
        self.closing.filter(|_| !term_req_waits)
    }

    /// The connection is over, though a TermReq may still be leaving: nothing is received or answered any more.
    pub fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// The queue's size, from `establish`.
    pub fn entries(&self) -> u16 {
        self.entries
    }

    /// Commands received and not yet answered.
    pub fn outstanding(&self) -> usize {
        self.slots.taken()
    }

    /// The connection goes: gives back the buffers that only the wire needed.
    fn close(&mut self, reason: CloseReason) {
        if self.closing.is_some() {
            return;
        }
        self.closing = Some(reason);
        self.incoming = Incoming::Nothing;
        self.held_capsule = None;
        self.events.clear();
        self.slots.drop_transfers();
        self.transfers = 0;
        self.trickle_check = None;
        if !matches!(reason, CloseReason::ProtocolError { .. }) {
            self.output = Output::default();
        }
    }
}
