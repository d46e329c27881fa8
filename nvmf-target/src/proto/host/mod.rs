//! The host's end of a queue pair: the initiator of NVMe/TCP, sans-IO.

use std::io::IoSlice;

use super::tcp::CloseReason;
use crate::buffer::IoBuf;
use crate::wire::{CommandId, Cqe, Sqe};

/// Settings of the host's side of a connection.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Ask for header digests.
    pub header_digest: bool,
    /// Ask for data digests.
    pub data_digest: bool,
    /// HPDA: alignment asked of the controller's data, in dwords minus one, 0 to 31.
    pub hpda: u8,
    /// MAXR2T: R2Ts that one command may have outstanding, minus one.
    pub maxr2t: u32,
    /// Commands at a time, before Connect is answered 1 is enough.
    pub entries: u16,
    /// Data up to this goes into the capsule (IOCCSZ of Identify says how much may; 1024 at least for Connect).
    pub in_capsule_bytes: u32,
    /// The staging buffer for received bytes.
    pub staging_bytes: usize,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            hpda: 0,
            maxr2t: 0,
            entries: 32,
            in_capsule_bytes: 4096,
            staging_bytes: 256 << 10,
        }
    }
}

/// A command's data.
#[derive(Debug)]
pub enum HostData {
    /// None.
    None,
    /// Sent to the controller, in the capsule or on R2T.
    ToController(IoBuf),
    /// Filled by the controller.
    FromController(IoBuf),
}

/// A finished command.
#[derive(Debug)]
pub struct Completion {
    /// Its id.
    pub cid: CommandId,
    /// What the caller gave with it.
    pub context: u64,
    /// The answer. For a C2HData with the SUCCESS flag: all zero but the id.
    pub cqe: Cqe,
    /// Its buffer.
    pub buffer: Option<IoBuf>,
    /// Bytes that the controller sent into it.
    pub received_bytes: u32,
    /// The data that came is as its digests say (or none were agreed on). False: don't use it, whatever the status.
    pub intact: bool,
}

/// Why a command could not be submitted; the data comes back.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// ICResp hasn't come yet.
    #[error("the connection is not ready")]
    NotReady(HostData),
    /// As many commands as the queue has entries are outstanding.
    #[error("the queue is full")]
    QueueFull(HostData),
    /// The connection is over.
    #[error("the connection is closed")]
    Closed(HostData),
}

/// See the module.
pub struct HostQueuePair {}

#[allow(unused_variables, clippy::todo)]
impl HostQueuePair {
    /// A fresh connection: ICReq is in its output.
    pub fn new(config: HostConfig) -> Self {
        todo!()
    }
    /// ICResp has come.
    pub fn is_ready(&self) -> bool {
        todo!()
    }
    /// Sets what Connect and Identify have told: queue size in entries, in-capsule limit.
    pub fn configure(&mut self, entries: u16, in_capsule_bytes: u32) {
        todo!()
    }
    /// Sends a command. CID, PSDT and SGL1 are filled in here; `context` comes back with the completion.
    pub fn submit(&mut self, sqe: Sqe, data: HostData, context: u64) -> Result<CommandId, SubmitError> {
        todo!()
    }
    /// The next finished command.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        todo!()
    }
    /// Commands without a completion.
    pub fn outstanding(&self) -> usize {
        todo!()
    }
    /// Where the next received bytes go.
    pub fn receive_slice(&mut self) -> &mut [u8] {
        todo!()
    }
    /// `len_bytes` were read into it.
    pub fn received(&mut self, len_bytes: usize) {
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
    /// The socket took `len_bytes` of them.
    pub fn sent(&mut self, len_bytes: usize) {
        todo!()
    }
    /// The socket's read side ended, or it failed.
    pub fn peer_closed(&mut self) {
        todo!()
    }
    /// The connection is over.
    pub fn poll_close(&self) -> Option<CloseReason> {
        todo!()
    }
    /// The buffers of commands that will never complete, with their contexts (after `poll_close`).
    pub fn take_abandoned(&mut self) -> Vec<(u64, Option<IoBuf>)> {
        todo!()
    }
}
