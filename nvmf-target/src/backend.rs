//! What a namespace's back end implements, and the requests that it gets.
//!
//! Owns the line between the protocol and the storage: requests arrive here checked (range, length, alignment)
//! and leave as a [`Reply`]. It must not know PDUs on one side or records on the other. Invariant: every request
//! is answered exactly once; a [`Done`] that is dropped answers [`Outcome::InternalError`] by itself.

use std::sync::Arc;

use uuid::Uuid;

use crate::buffer::IoBuf;

/// A namespace's size and shape as hosts see it (NVM Command Set 1.0, Identify Namespace).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Logical block size in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// Size in logical blocks (NSZE).
    pub block_count: u64,
    /// Blocks in use (NUSE); equal to `block_count` where the back end isn't thin.
    pub used_blocks: u64,
    /// Deallocated blocks read as zeroes and DSM Deallocate does something.
    pub deallocate: bool,
    /// Preferred write granularity in blocks (NPWG, NOWS), 1 if there is none.
    pub preferred_write_blocks: u32,
    /// Completed writes may be lost in a power cut until a Flush (VWC bit 0).
    pub volatile_write_cache: bool,
}

/// A range of logical blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LbaRange {
    /// First block.
    pub slba: u64,
    /// Number of blocks.
    pub lba_count: u64,
}

/// What to do. Buffers are as long as the range times the block size; the target has checked that.
#[derive(Debug)]
pub enum Operation {
    /// Fill the buffer with the range.
    Read { range: LbaRange, buffer: IoBuf },
    /// Store the buffer. With `fua`, durable before the reply even if the write cache is on.
    Write { range: LbaRange, buffer: IoBuf, fua: bool },
    /// Make every write completed before it durable.
    Flush,
    /// Compare the buffer with the range.
    Compare { range: LbaRange, buffer: IoBuf },
    /// Compare `expected` with the range and, only if equal, store `buffer`: one atomic step.
    CompareAndWrite { range: LbaRange, expected: IoBuf, buffer: IoBuf, fua: bool },
    /// Make the range read as zeroes, durably like a write; `deallocate` allows giving the space back.
    WriteZeroes { range: LbaRange, deallocate: bool, fua: bool },
    /// Give the ranges' space back; they read as zeroes afterwards.
    Deallocate { ranges: Vec<LbaRange> },
    /// Read and check the range without returning it.
    Verify { range: LbaRange },
}

/// How a request ended. The target turns it into a status code (NVMe Base 2.0 §3.3.3.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done (00/00h).
    Success,
    /// The range is outside the namespace (00/80h).
    LbaOutOfRange,
    /// No space for it; nothing was changed (00/81h).
    CapacityExceeded,
    /// The data at `slba` can't be read or rebuilt (02/81h).
    UnrecoveredRead {
        /// First block of the request that is lost.
        slba: u64,
    },
    /// The write did not take place (02/80h).
    WriteFault,
    /// Compare found other data (02/85h).
    CompareFailure,
    /// The namespace is being removed or is not ready; try again (00/82h).
    NotReady,
    /// Aborted on request before it took effect (00/07h).
    Aborted,
    /// A fault of ours (00/06h).
    InternalError,
}

/// The answer to a request: how it ended, and the buffer of a Read (filled) or Write (to be reused).
#[derive(Debug)]
pub struct Reply {
    /// How it ended.
    pub outcome: Outcome,
    /// The request's buffer, handed back.
    pub buffer: Option<IoBuf>,
}

impl Reply {
    /// An answer without a buffer.
    pub fn of(outcome: Outcome) -> Self {
        Self { outcome, buffer: None }
    }
}

/// Where replies go: the queue pair's driver. Called on any thread, must not block.
pub trait ReplySink: Send + Sync {
    /// Takes the reply to the request that was submitted with `token`.
    fn reply(&self, token: u64, reply: Reply);
}

/// The duty to answer one request. Consumed by [`Done::finish`]; dropped unfinished it reports
/// [`Outcome::InternalError`], so that no command hangs.
pub struct Done {
    sink: Option<Arc<dyn ReplySink>>,
    token: u64,
}

impl Done {
    /// A duty towards `sink`, which knows the request as `token`.
    pub fn new(sink: Arc<dyn ReplySink>, token: u64) -> Self {
        Self { sink: Some(sink), token }
    }

    /// Answers the request.
    pub fn finish(mut self, reply: Reply) {
        if let Some(sink) = self.sink.take() {
            sink.reply(self.token, reply);
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(sink) = self.sink.take() {
            sink.reply(self.token, Reply::of(Outcome::InternalError));
        }
    }
}

/// What stores a namespace's data.
pub trait Backend: Send + Sync {
    /// Size and shape now; may change (resize) and is read for every Identify and range check.
    fn geometry(&self) -> Geometry;
    /// The namespace's UUID, the same after every restart.
    fn uuid(&self) -> Uuid;
    /// Commands that would change it are refused (Namespace is Write Protected), for as long as it exists.
    fn write_protected(&self) -> bool {
        false
    }
    /// Starts a request; never blocks. The reply comes through `done`, on any thread, in any order.
    fn submit(&self, operation: Operation, done: Done);
}
