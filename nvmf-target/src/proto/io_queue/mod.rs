//! An I/O queue pair, controller side: the NVM command set over the transport of `proto::tcp`.

use std::io::IoSlice;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use super::controller_shared::ControllerShared;
use super::queue_shared::QueueShared;
pub use super::tcp::CloseReason;
use super::tcp::TcpQueuePair;
use crate::backend::{Backend, Operation, Reply};
use crate::buffer::BufferPool;

/// A request for a back end: `backend.submit(operation, Done::new(sink, token))`, and the reply goes to
/// [`IoQueuePair::complete`] with the same token. A token may occur more than once (Flush of all namespaces); each
/// occurrence is one request.
pub struct Command {
    /// Names the command in this queue.
    pub token: u64,
    /// Who does it.
    pub backend: Arc<dyn Backend>,
    /// What to do.
    pub operation: Operation,
}

/// See the module. Its driver asks `poll_command` until `None`, sends what `gather` gives and checks `poll_close` after
/// every call that takes `now`. After `poll_close` it closes the socket but keeps the queue pair until
/// [`IoQueuePair::in_flight`] is 0, feeding it the replies: dropping it is what frees the queue id.
pub struct IoQueuePair {}

#[allow(unused_variables, clippy::todo)]
impl IoQueuePair {
    /// The queue whose Connect was accepted on `tcp` (after `establish`; the answer may still be in its output).
    /// `queue` is registered with `shared`. It takes no buffers until [`IoQueuePair::attach`].
    pub fn new(tcp: TcpQueuePair, shared: Arc<ControllerShared>, queue: Arc<QueueShared>) -> Self {
        todo!()
    }
    /// Gives it the pool of the thread that drives it from now on, and what wakes that thread. Call before all else;
    /// ask `poll_command` afterwards: commands may have arrived already.
    pub fn attach(&mut self, pool: Arc<dyn BufferPool>, waker: Waker, now: Instant) {
        todo!()
    }
    /// Where the next received bytes go: staging, or a large payload's own buffer. Empty: don't read now.
    pub fn receive_slice(&mut self) -> &mut [u8] {
        todo!()
    }
    /// `len_bytes` were read into [`IoQueuePair::receive_slice`].
    pub fn received(&mut self, len_bytes: usize, now: Instant) {
        todo!()
    }
    /// The next request for a back end.
    pub fn poll_command(&mut self, now: Instant) -> Option<Command> {
        todo!()
    }
    /// A back end answered.
    pub fn complete(&mut self, token: u64, reply: Reply, now: Instant) {
        todo!()
    }
    /// Appends the bytes that are ready to be sent, in order.
    pub fn gather<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        todo!()
    }
    /// Bytes are ready to be sent.
    pub fn has_output(&self) -> bool {
        todo!()
    }
    /// The socket took `len_bytes` of them.
    pub fn sent(&mut self, len_bytes: usize, now: Instant) {
        todo!()
    }
    /// Commands wait for the pool (and hold nothing of it): the length of the buffer that the first of them needs, so
    /// that the driver can queue for one of that size.
    pub fn wants_buffers(&self) -> Option<usize> {
        todo!()
    }
    /// Buffers came back to the pool: tries again, first come first served.
    pub fn buffers_available(&mut self, now: Instant) {
        todo!()
    }
    /// The socket's read side ended, or it failed.
    pub fn peer_closed(&mut self) {
        todo!()
    }
    /// Our side ends the connection.
    pub fn terminate(&mut self) {
        todo!()
    }
    /// A deadline passed or the waker woke.
    pub fn tick(&mut self, now: Instant) {
        todo!()
    }
    /// When `tick` is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        todo!()
    }
    /// The connection is over: close the socket (shut its write side down first and read what still comes for a
    /// moment, so that a TermReq isn't lost to a reset), and keep the queue pair until `in_flight` is 0.
    pub fn poll_close(&self) -> Option<CloseReason> {
        todo!()
    }
    /// Requests at back ends.
    pub fn in_flight(&self) -> usize {
        todo!()
    }
    /// What other threads know of it.
    pub fn shared(&self) -> &Arc<QueueShared> {
        todo!()
    }
}
