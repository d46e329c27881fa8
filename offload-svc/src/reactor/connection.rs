//! One adopted queue pair: its socket, and the sans-IO machine that decides what the bytes mean.
//!
//! Owns both until the socket is closed and every command is answered. Must not know the protocol, nor who else is
//! served. Invariant: the machine outlives its last command at a back end, so that a buffer is never freed under it
//! and its queue id not reused too early.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvmf_target::backend::{Done, Reply, ReplySink};
use nvmf_target::proto::io_queue::{CloseReason, IoQueuePair};

use super::metrics::{Counters, count};

/// Reads of one turn: then the others have theirs.
const READS_PER_TURN: usize = 4;
/// How long a closed connection waits for the peer to close its side, so that what it was told last arrives.
const LINGER: Duration = Duration::from_secs(1);
/// What the peer may still send meanwhile.
const LINGER_BYTES: usize = 4 << 20;

pub(super) struct Connection {
    pub(super) queue: IoQueuePair,
    socket: Option<TcpStream>,
    sink: Arc<dyn ReplySink>,
    readable: bool,
    writable: bool,
    lingering: Option<Linger>,
}

/// The machine has closed; the socket is about to.
struct Linger {
    until: Instant,
    bytes_left: usize,
    told: bool,
}

/// What a turn came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing more to do until something happens.
    Idle,
    /// There is more to read: another turn, after the others.
    More,
    /// It is over, and nothing of it is left at a back end.
    Over,
}

impl Connection {
    pub(super) fn new(queue: IoQueuePair, socket: TcpStream, sink: Arc<dyn ReplySink>) -> Self {
        Self { queue, socket: Some(socket), sink, readable: true, writable: true, lingering: None }
    }

    /// The socket can be read, written, or both.
    pub(super) fn is_ready(&mut self, readable: bool, writable: bool) {
        self.readable |= readable;
        self.writable |= writable;
    }

    /// A back end has answered.
    pub(super) fn complete(&mut self, token: u64, reply: Reply, now: Instant) {
        self.queue.complete(token, reply, now);
    }

    /// When something is due without the socket doing anything.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let linger = self.lingering.as_ref().filter(|_| self.socket.is_some()).map(|linger| linger.until);
        match &self.socket {
            Some(_) if linger.is_none() => self.queue.next_deadline(),
            _ => linger,
        }
    }

    /// A deadline has passed. If it is the peer's for taking output, one more try decides: it may be that this thread
    /// was kept from running, and not the peer from reading.
    pub(super) fn expire(&mut self, now: Instant, counters: &Counters) {
        if self.socket.is_some() {
            self.writable = true;
            self.send(now, counters);
            self.queue.tick(now);
        }
    }

    /// Moves bytes and commands as far as they go now.
    pub(super) fn turn(&mut self, now: Instant, counters: &Counters) -> Turn {
        if self.socket.is_some() && self.lingering.is_none() {
            self.submit(now, counters);
            self.receive(now, counters);
            self.send(now, counters);
        }
        if let Some(reason) = self.queue.poll_close() {
            self.close(reason, now, counters);
            let over = self.socket.is_none() && self.queue.in_flight() == 0;
            return if over { Turn::Over } else { Turn::Idle };
        }
        if self.socket.is_none() && self.queue.in_flight() == 0 {
            return Turn::Over;
        }
        // What was sent may have made room for more.
        if self.readable && !self.queue.receive_slice().is_empty() { Turn::More } else { Turn::Idle }
    }

    /// Reads until there is nothing, no room for it, or this turn's share is done.
    fn receive(&mut self, now: Instant, counters: &Counters) {
        let Some(mut socket) = self.socket.as_ref() else { return };
        for _ in 0..READS_PER_TURN {
            if !self.readable || self.queue.poll_close().is_some() {
                return;
            }
            let space = self.queue.receive_slice();
            if space.is_empty() {
                // Back-pressure: what is in the socket stays there until the machine takes it.
                return;
            }
            match socket.read(space) {
                Ok(n) if n > 0 => {
                    count(&counters.received_bytes, n as u64);
                    self.queue.received(n, now);
                    submit(&mut self.queue, &self.sink, now, counters);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => {
                    self.readable = false;
                    self.queue.peer_closed();
                }
            }
        }
    }

    /// Hands what has arrived to the back ends.
    pub(super) fn submit(&mut self, now: Instant, counters: &Counters) {
        submit(&mut self.queue, &self.sink, now, counters);
    }

    /// Sends what is ready, by one call as far as the socket takes it.
    fn send(&mut self, now: Instant, counters: &Counters) {
        let Some(mut socket) = self.socket.as_ref() else { return };
        let mut pieces = Vec::new();
        while self.writable && self.queue.has_output() {
            let mut borrowed: Vec<IoSlice<'_>> = reuse(pieces);
            self.queue.gather(&mut borrowed);
            let written = socket.write_vectored(&borrowed);
            pieces = reuse(borrowed);
            match written {
                Ok(n) => {
                    count(&counters.sent_bytes, n as u64);
                    self.queue.sent(n, now);
                    submit(&mut self.queue, &self.sink, now, counters);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.writable = false;
                    self.queue.peer_closed();
                }
            }
        }
    }

    /// Ends the connection: what the peer is to learn is sent, then its side is awaited for a moment.
    fn close(&mut self, reason: CloseReason, now: Instant, counters: &Counters) {
        if self.socket.is_none() {
            return;
        }
        if reason == CloseReason::SendTimeout && self.lingering.is_none() {
            count(&counters.slow_readers, 1);
        }
        let linger = self.lingering.get_or_insert_with(|| {
            tracing::debug!("an I/O queue's connection ends: {reason:?}");
            Linger { until: now + LINGER, bytes_left: LINGER_BYTES, told: false }
        });
        let mut over = now >= linger.until || !awaits_peer(reason);
        if !linger.told && !over {
            self.send(now, counters);
            if !self.writable {
                return;
            }
            let told = self.socket.as_ref().is_some_and(|socket| socket.shutdown(Shutdown::Write).is_ok());
            over = !told;
            if let Some(linger) = &mut self.lingering {
                linger.told = told;
            }
        }
        if over || self.drained() {
            self.socket = None;
        }
    }

    /// Reads and forgets; says whether the peer has closed its side, or has had its chance.
    fn drained(&mut self) -> bool {
        let (Some(mut socket), Some(linger)) = (self.socket.as_ref(), &mut self.lingering) else { return true };
        let mut bin = [0; 16 << 10];
        while linger.bytes_left > 0 {
            match socket.read(&mut bin) {
                Ok(0) => return true,
                Ok(n) => linger.bytes_left = linger.bytes_left.saturating_sub(n),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return true,
            }
        }
        true
    }

    /// Closes the socket at once; commands at back ends are still waited for.
    pub(super) fn cut(&mut self) {
        self.queue.terminate();
        self.socket = None;
    }

    pub(super) fn is_cut(&self) -> bool {
        self.socket.is_none()
    }
}

fn submit(queue: &mut IoQueuePair, sink: &Arc<dyn ReplySink>, now: Instant, counters: &Counters) {
    while let Some(command) = queue.poll_command(now) {
        count(&counters.commands, 1);
        command.backend.submit(command.operation, Done::new(sink.clone(), command.token));
    }
}

/// Whether a peer that is told something may still be listening.
fn awaits_peer(reason: CloseReason) -> bool {
    match reason {
        CloseReason::ProtocolError { .. } | CloseReason::Terminated => true,
        CloseReason::PeerTerminated { .. } | CloseReason::TransferTimeout => true,
        CloseReason::PeerClosed | CloseReason::SendTimeout => false,
    }
}

/// The same vector for slices of another lifetime: its memory is used again.
fn reuse<'a>(mut pieces: Vec<IoSlice<'_>>) -> Vec<IoSlice<'a>> {
    pieces.clear();
    pieces.into_iter().map(|_| IoSlice::new(&[])).collect()
}
