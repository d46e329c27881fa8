//! The host's end of a queue pair: the initiator of NVMe/TCP, sans-IO.
//!
//! Owns ICReq, capsules, the answers to R2Ts, the placing of C2HData, digests and command ids. Must not know what
//! commands mean: Connect is a command like any other here. Invariant: a command completes once, with the buffer that
//! was given for it; data that doesn't match its digest is never passed off as good.

mod receive;
mod send;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::IoSlice;

use super::framing::{Framer, Receiver, Rules};
use super::tcp::{CloseReason, HeldKey, Output};
use crate::buffer::IoBuf;
use crate::wire::pdu::{CommonHeader, ICReq, PduType};
use crate::wire::{CommandId, Cqe, Sqe};
use receive::Incoming;

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
    /// Most commands at a time; 1 is enough until Connect is answered.
    pub entries: u16,
    /// Data up to this goes into the capsule (IOCCSZ of Identify says how much may; Connect needs 1024).
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
    /// The answer. For a C2HData with the SUCCESS flag: all zero but the id, SQHD FFFFh.
    pub cqe: Cqe,
    /// Its buffer.
    pub buffer: Option<IoBuf>,
    /// Bytes that the controller sent into it.
    pub received_bytes: u32,
    /// The data that came is as its digests say (or none were agreed on). False: don't use it, whatever the status.
    pub intact: bool,
    /// The SUCCESS flag of the last C2HData said it, and no CapsuleResp came.
    pub by_success_flag: bool,
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

#[derive(Debug)]
enum Transfer {
    None,
    /// The buffer is in the output's keeping. `asked_bytes`: what R2Ts have asked for (or the capsule has taken).
    Sending {
        key: HeldKey,
        len_bytes: u32,
        asked_bytes: u32,
    },
    Receiving {
        buffer: IoBuf,
        come_bytes: u32,
        intact: bool,
        last_seen: bool,
    },
}

#[derive(Debug)]
struct Pending {
    context: u64,
    transfer: Transfer,
    /// The answer has come, but bytes of the buffer still wait in the output.
    answered: Option<Cqe>,
}

/// See the module. Its driver reads into `receive_slice`, calls `received`, asks `poll_completion` until `None`,
/// sends what `gather` gives, and checks `poll_close`.
#[derive(Debug)]
pub struct HostQueuePair {
    config: HostConfig,
    framer: Framer,
    rules: Rules,
    output: Output,
    incoming: Incoming,
    /// CPDA in bytes.
    controller_align_bytes: usize,
    /// MAXH2CDATA.
    h2c_data_max_bytes: usize,
    /// By command id.
    commands: Vec<Option<Pending>>,
    free: VecDeque<u16>,
    outstanding: usize,
    /// Answered commands whose bytes still wait in the output.
    unsent: Vec<CommandId>,
    completions: VecDeque<Completion>,
    closing: Option<CloseReason>,
}

impl HostQueuePair {
    /// A fresh connection: ICReq is in its output.
    pub fn new(config: HostConfig) -> Self {
        let rules = Rules {
            receiver: Receiver::Host,
            connected: false,
            header_digest: config.header_digest,
            data_digest: config.data_digest,
            align_bytes: (u32::from(config.hpda) + 1) * 4,
            capsule_data_max_bytes: 0,
            data_max_bytes: u32::MAX,
        };
        let mut output = Output::default();
        let request = ICReq {
            common: CommonHeader::bare(PduType::ICReq),
            pfv: 0,
            hpda: config.hpda,
            dgst: u8::from(config.header_digest) | u8::from(config.data_digest) << 1,
            maxr2t: config.maxr2t,
        };
        output.push(&request.encode());
        let mut queue_pair = Self {
            framer: Framer::new(config.staging_bytes),
            rules,
            output,
            incoming: Incoming::Nothing,
            controller_align_bytes: 4,
            h2c_data_max_bytes: 4096,
            commands: Vec::new(),
            free: VecDeque::new(),
            outstanding: 0,
            unsent: Vec::new(),
            completions: VecDeque::new(),
            closing: None,
            config,
        };
        queue_pair.configure(queue_pair.config.entries, queue_pair.config.in_capsule_bytes);
        queue_pair
    }

    /// ICResp has come.
    pub fn is_ready(&self) -> bool {
        self.rules.connected
    }

    /// The digests that were agreed on, header and data.
    pub fn digests(&self) -> (bool, bool) {
        (self.rules.header_digest, self.rules.data_digest)
    }

    /// Sets what Connect and Identify have told: most commands at a time, in-capsule limit.
    pub fn configure(&mut self, entries: u16, in_capsule_bytes: u32) {
        self.config.entries = entries;
        self.config.in_capsule_bytes = in_capsule_bytes;
        let have = self.commands.len() as u16;
        if entries > have {
            self.commands.resize_with(usize::from(entries), || None);
            self.free.extend(have..entries);
        }
    }

    /// Sends a command. CID, PSDT and SGL1 are filled in here; `context` comes back with the completion.
    pub fn submit(&mut self, sqe: Sqe, data: HostData, context: u64) -> Result<CommandId, SubmitError> {
        if self.closing.is_some() {
            return Err(SubmitError::Closed(data));
        }
        if !self.is_ready() {
            return Err(SubmitError::NotReady(data));
        }
        if self.outstanding >= usize::from(self.config.entries) {
            return Err(SubmitError::QueueFull(data));
        }
        // The id that was free longest: a controller that is late with an old one is found out, not believed.
        let Some(index) = self.free.pop_front() else { return Err(SubmitError::QueueFull(data)) };
        let cid = CommandId(index);
        let transfer = self.send_capsule(sqe, cid, data);
        self.commands[usize::from(index)] = Some(Pending { context, transfer, answered: None });
        self.outstanding += 1;
        Ok(cid)
    }

    /// The next finished command.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// Commands without a completion.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Where the next received bytes go: staging, or a large payload's own buffer.
    pub fn receive_slice(&mut self) -> &mut [u8] {
        if self.closing.is_some() {
            return &mut [];
        }
        match self.in_place_bytes() {
            Some(left) => &mut self.incoming.place(&mut self.commands)[..left],
            None => self.framer.room(),
        }
    }

    fn in_place_bytes(&mut self) -> Option<usize> {
        let left = self.framer.in_place_bytes()?;
        (self.incoming.place(&mut self.commands).len() >= left).then_some(left)
    }

    /// `len_bytes` were read into it.
    pub fn received(&mut self, len_bytes: usize) {
        if self.closing.is_some() || len_bytes == 0 {
            return;
        }
        if self.in_place_bytes().is_some() {
            self.framer.placed(&self.incoming.place(&mut self.commands)[..len_bytes]);
            self.incoming.advance(len_bytes);
        } else {
            self.framer.filled(len_bytes);
        }
        self.advance();
    }

    /// Appends the bytes that are ready to be sent.
    pub fn gather<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        self.output.gather(out);
    }

    /// Bytes are ready to be sent.
    pub fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// The socket took `len_bytes` of them.
    pub fn sent(&mut self, len_bytes: usize) {
        self.output.sent(len_bytes);
        for cid in std::mem::take(&mut self.unsent) {
            self.complete_if_sent(cid);
        }
    }

    /// The socket's read side ended, or it failed.
    pub fn peer_closed(&mut self) {
        self.close(CloseReason::PeerClosed);
        self.output.discard();
    }

    /// The connection is over, and what had to be said about it has been sent.
    pub fn poll_close(&self) -> Option<CloseReason> {
        let term_req_waits = matches!(self.closing, Some(CloseReason::ProtocolError { .. })) && self.has_output();
        self.closing.filter(|_| !term_req_waits)
    }

    /// The contexts and buffers of commands that will never complete (after `poll_close`). A buffer that the
    /// controller was filling may hold anything.
    pub fn take_abandoned(&mut self) -> Vec<(u64, Option<IoBuf>)> {
        let abandoned = self.commands.iter_mut().filter_map(Option::take);
        let output = &mut self.output;
        let abandoned = abandoned
            .map(|pending| {
                let buffer = match pending.transfer {
                    Transfer::None => None,
                    Transfer::Sending { key, .. } => output.take_back_closed(key),
                    Transfer::Receiving { buffer, .. } => Some(buffer),
                };
                (pending.context, buffer)
            })
            .collect();
        self.outstanding = 0;
        abandoned
    }

    fn close(&mut self, reason: CloseReason) {
        if self.closing.is_none() {
            self.closing = Some(reason);
            self.incoming = Incoming::Nothing;
        }
    }
}
