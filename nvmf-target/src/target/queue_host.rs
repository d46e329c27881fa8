//! Who drives I/O queue pairs once Connect is accepted: the trait, and a plain implementation with a thread a queue.
//!
//! Owns the loop between a socket, an [`IoQueuePair`] and the back ends. It must not know how a queue was connected.
//! Invariant: a queue pair is dropped only when no back end has a command of it.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::backend::{Done, Reply, ReplySink};
use crate::buffer::BufferPool;
use crate::proto::io_queue::{CloseReason, Command, IoQueuePair};
use crate::wire::nqn::Nqn;

/// Takes over I/O queues.
pub trait QueueHost: Send + Sync {
    /// Drives `queue` of `host` over `stream` (non-blocking) from now on; returns at once. The answer to Connect is still in
    /// the queue's output, and commands may have arrived behind it. On an error the connection is gone.
    fn adopt(&self, host: &Nqn, queue: IoQueuePair, stream: TcpStream) -> Result<(), AdoptError>;
}

/// Why a queue could not be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// As many queues as there may be.
    #[error("the limit of {limit} I/O queues is reached")]
    Full {
        /// The limit.
        limit: usize,
    },
    /// No more queues are taken.
    #[error("the data path is shutting down")]
    ShuttingDown,
    /// The system refused something that the queue needs.
    #[error("can't set up an I/O queue: {0}")]
    System(#[from] io::Error),
}

/// One plain thread a queue: for tests and small tools.
pub struct ThreadQueueHost {
    pool: Arc<dyn BufferPool>,
    limit: usize,
    queues: Arc<AtomicUsize>,
}

impl ThreadQueueHost {
    /// Buffers come from `pool`, `limit` queues at most.
    pub fn new(pool: Arc<dyn BufferPool>, limit: usize) -> Self {
        Self { pool, limit, queues: Arc::default() }
    }

    /// Queues now.
    pub fn queues(&self) -> usize {
        self.queues.load(Ordering::SeqCst)
    }
}

impl QueueHost for ThreadQueueHost {
    fn adopt(&self, _host: &Nqn, queue: IoQueuePair, stream: TcpStream) -> Result<(), AdoptError> {
        let limit = self.limit;
        let count = Count::enter(Arc::clone(&self.queues), limit).ok_or(AdoptError::Full { limit })?;
        let inbox = Arc::new(Inbox::new()?);
        let pool = Arc::clone(&self.pool);
        std::thread::Builder::new().name("io-queue".into()).spawn(move || {
            let _count = count;
            Driver { queue, stream, inbox, writable: true }.run(pool);
        })?;
        Ok(())
    }
}

/// Counts a queue for as long as it lives.
struct Count(Arc<AtomicUsize>);

impl Count {
    fn enter(queues: Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        let add = |n| (n < limit).then_some(n + 1);
        queues.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).ok()?;
        Some(Self(queues))
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Replies on their way back to the queue's thread.
struct Inbox {
    replies: Mutex<Vec<(u64, Reply)>>,
    event: EventFd,
}

impl Inbox {
    fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { replies: Mutex::default(), event })
    }

    fn take(&self) -> Vec<(u64, Reply)> {
        // EAGAIN only says that nobody has rung.
        let _ = self.event.read();
        std::mem::take(&mut self.replies.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn ring(&self) {
        // A full counter is a rung bell already.
        let _ = self.event.write(1);
    }
}

impl ReplySink for Inbox {
    fn reply(&self, token: u64, reply: Reply) {
        self.replies.lock().unwrap_or_else(PoisonError::into_inner).push((token, reply));
        self.ring();
    }
}

impl Wake for Inbox {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

struct Driver {
    queue: IoQueuePair,
    stream: TcpStream,
    inbox: Arc<Inbox>,
    writable: bool,
}

/// How long a queue that waits for buffers sleeps: the pool of this host doesn't say when one comes back.
const BUFFER_RETRY: Duration = Duration::from_millis(1);
/// How long a closed socket is read on, so that a TermReq isn't lost to a reset.
const LINGER: Duration = Duration::from_millis(200);

impl Driver {
    fn run(mut self, pool: Arc<dyn BufferPool>) {
        self.queue.attach(pool, Waker::from(Arc::clone(&self.inbox)), Instant::now());
        let reason = loop {
            self.turn();
            if let Some(reason) = self.queue.poll_close() {
                break reason;
            }
            self.wait();
        };
        self.finish(reason);
    }

    /// Does what can be done without waiting.
    fn turn(&mut self) {
        for (token, reply) in self.inbox.take() {
            self.queue.complete(token, reply, Instant::now());
        }
        self.queue.tick(Instant::now());
        if self.queue.wants_buffers().is_some() {
            self.queue.buffers_available(Instant::now());
        }
        self.read();
        self.submit();
        self.write();
    }

    fn read(&mut self) {
        // Several rounds, so that a burst is taken whole, but not for ever: output must go too.
        for _ in 0..8 {
            let into = self.queue.receive_slice();
            if into.is_empty() {
                return;
            }
            match self.stream.read(into) {
                Ok(0) => return self.queue.peer_closed(),
                Ok(n) => self.queue.received(n, Instant::now()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return self.queue.peer_closed(),
            }
            self.submit();
        }
    }

    fn submit(&mut self) {
        while let Some(Command { token, backend, operation }) = self.queue.poll_command(Instant::now()) {
            let sink: Arc<dyn ReplySink> = Arc::clone(&self.inbox) as _;
            backend.submit(operation, Done::new(sink, token));
        }
    }

    fn write(&mut self) {
        while self.queue.has_output() {
            let mut slices: Vec<IoSlice<'_>> = Vec::new();
            self.queue.gather(&mut slices);
            slices.truncate(1024);
            match (&self.stream).write_vectored(&slices) {
                Ok(n) if n > 0 => self.queue.sent(n, Instant::now()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.writable = false;
                    return;
                }
                _ => return self.queue.peer_closed(),
            }
        }
        self.writable = true;
    }

    fn wait(&mut self) {
        let mut socket = PollFlags::empty();
        socket.set(PollFlags::POLLIN, !self.queue.receive_slice().is_empty());
        socket.set(PollFlags::POLLOUT, self.queue.has_output() && !self.writable);
        let now = Instant::now();
        let mut until = self.queue.next_deadline().map(|at| at.saturating_duration_since(now));
        if self.queue.wants_buffers().is_some() {
            until = Some(until.map_or(BUFFER_RETRY, |u| u.min(BUFFER_RETRY)));
        }
        let timeout = until.map_or(PollTimeout::NONE, poll_timeout);
        let mut fds =
            [PollFd::new(self.inbox.event.as_fd(), PollFlags::POLLIN), PollFd::new(self.stream.as_fd(), socket)];
        // EINTR and time-outs both lead to another turn.
        let _ = poll(&mut fds, timeout);
        let hung_up = fds[1].revents().is_some_and(|e| e.intersects(PollFlags::POLLERR | PollFlags::POLLHUP));
        // While nothing can be received, only this tells that the peer is gone.
        if hung_up && !socket.contains(PollFlags::POLLIN) {
            self.queue.peer_closed();
        }
    }

    /// Closes the socket, then waits for the back ends.
    fn finish(mut self, reason: CloseReason) {
        tracing::debug!(?reason, qid = self.queue.shared().qid().0, "I/O queue closed");
        if matches!(reason, CloseReason::ProtocolError { .. }) {
            self.linger();
        }
        let _ = self.stream.shutdown(Shutdown::Both);
        while self.queue.in_flight() > 0 {
            let mut fds = [PollFd::new(self.inbox.event.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut fds, PollTimeout::from(1000u16));
            for (token, reply) in self.inbox.take() {
                self.queue.complete(token, reply, Instant::now());
            }
        }
    }

    /// Reads what the peer still sends for a moment: closing a socket with unread bytes resets it, and the peer
    /// might never see the TermReq.
    fn linger(&mut self) {
        self.write();
        let _ = self.stream.shutdown(Shutdown::Write);
        let until = Instant::now() + LINGER;
        let mut sink = [0; 4096];
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()) {
            let mut fds = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut fds, poll_timeout(left));
            match self.stream.read(&mut sink) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(_) => return,
            }
        }
    }
}

/// Rounded up, so that a deadline has passed when poll returns.
fn poll_timeout(duration: Duration) -> PollTimeout {
    let ms = duration.as_micros().div_ceil(1000);
    PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
}
