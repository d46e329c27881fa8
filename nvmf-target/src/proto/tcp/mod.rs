//! The NVMe/TCP transport of one queue pair, controller side.

mod config;

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

pub use config::{QueueParams, TcpConfig};

use crate::buffer::{BufferPool, IoBuf};
use crate::wire::pdu::FatalError;
use crate::wire::{Cqe, Sqe};

/// Names an outstanding command of a queue: an index below the queue's number of entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u16);

/// The data that came in a command's capsule.
#[derive(Debug)]
pub enum CapsuleData {
    /// None.
    None,
    /// In a buffer of the pool. `intact`: its digest is right, or none was agreed on.
    Placed { buffer: IoBuf, intact: bool },
    /// The pool had nothing: kept in the queue's own reserve until [`TcpQueuePair::take_reserved`] copies it.
    Reserved { len_bytes: u32, intact: bool },
}

/// What happened on the connection.
#[derive(Debug)]
pub enum TcpEvent {
    /// A command arrived; exactly one of `respond` and `send_data` must follow for its slot.
    Command { slot: Slot, sqe: Sqe, data: CapsuleData },
    /// All that [`TcpQueuePair::fetch`] asked for is in `buffer`.
    Fetched { slot: Slot, buffer: IoBuf, intact: bool },
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// The peer broke the protocol; a TermReq that says so has been sent (or could not be).
    ProtocolError { error: FatalError, info: u32 },
    /// The peer sent a TermReq.
    PeerTerminated { fes: u16, fei: u32 },
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
pub struct TcpQueuePair {}

#[allow(unused_variables, clippy::todo)]
impl TcpQueuePair {
    /// A fresh connection, before ICReq. `pool` serves in-capsule data until Connect is answered.
    pub fn new(config: TcpConfig, pool: Arc<dyn BufferPool>) -> Self {
        todo!()
    }
    /// Where the next received bytes go; empty while nothing can be taken (back-pressure: don't read).
    pub fn receive_slice(&mut self) -> &mut [u8] {
        todo!()
    }
    /// `len_bytes` were read into [`TcpQueuePair::receive_slice`].
    pub fn received(&mut self, len_bytes: usize, now: Instant) {
        todo!()
    }
    /// The next event. Ask until `None` after `received`, `sent` and `tick`.
    pub fn poll_event(&mut self) -> Option<TcpEvent> {
        todo!()
    }
    /// Settles the queue's size and limits. Call it before answering the Connect.
    pub fn establish(&mut self, params: QueueParams) {
        todo!()
    }
    /// Solicits `buffer.len()` bytes of the command's data from the host: [`TcpEvent::Fetched`] follows.
    pub fn fetch(&mut self, slot: Slot, buffer: IoBuf, now: Instant) {
        todo!()
    }
    /// Copies reserved in-capsule data into `buffer`, which is as long.
    pub fn take_reserved(&mut self, slot: Slot, buffer: &mut [u8]) {
        todo!()
    }
    /// Answers a command without data. CID and SQHD are filled in here.
    pub fn respond(&mut self, slot: Slot, cqe: Cqe, now: Instant) {
        todo!()
    }
    /// Sends `buffer` as the command's data and then the answer (which is left out when the SUCCESS flag may say it).
    pub fn send_data(&mut self, slot: Slot, buffer: IoBuf, cqe: Cqe, now: Instant) {
        todo!()
    }
    /// Appends the bytes that are ready to be sent.
    pub fn gather<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        todo!()
    }
    /// Bytes are ready to be sent.
    pub fn has_output(&self) -> bool {
        todo!()
    }
    /// The socket took `len_bytes` of what `gather` gave.
    pub fn sent(&mut self, len_bytes: usize, now: Instant) {
        todo!()
    }
    /// The socket's read side ended.
    pub fn peer_closed(&mut self) {
        todo!()
    }
    /// Our side ends the connection.
    pub fn terminate(&mut self) {
        todo!()
    }
    /// Time passed: call it at [`TcpQueuePair::next_deadline`].
    pub fn tick(&mut self, now: Instant) {
        todo!()
    }
    /// When `tick` is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        todo!()
    }
    /// The connection is over and the socket is to be closed (shut its write side down first and read what still
    /// comes for a moment, so that the TermReq isn't lost to a reset).
    pub fn poll_close(&self) -> Option<CloseReason> {
        todo!()
    }
    /// Commands received and not yet answered.
    pub fn outstanding(&self) -> usize {
        todo!()
    }
}
