//! One TCP connection that drives one initiator machine.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nvmf_target::proto::host::{Completion, HostConfig, HostData, HostQueuePair, SubmitError};
use nvmf_target::wire::Sqe;

use super::{ConnectOptions, ConnectionError};

/// Slices given to one writev; the rest goes with the next.
const MAX_SLICES: usize = 512;

/// PDU bytes that went over a connection, TCP and IP headers left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WireBytes {
    /// To the target.
    pub sent: u64,
    /// From the target.
    pub received: u64,
}

impl WireBytes {
    /// Both ways.
    pub fn total(&self) -> u64 {
        self.sent + self.received
    }

    /// Together with another connection's.
    pub fn plus(self, other: Self) -> Self {
        Self { sent: self.sent + other.sent, received: self.received + other.received }
    }

    /// What was added since `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self { sent: self.sent.saturating_sub(earlier.sent), received: self.received.saturating_sub(earlier.received) }
    }
}

/// A connected queue pair.
pub struct Connection {
    socket: TcpStream,
    pair: HostQueuePair,
    timeout: Duration,
    wire: WireBytes,
}

impl Connection {
    /// Connects and exchanges ICReq and ICResp.
    pub fn open(options: &ConnectOptions, config: HostConfig) -> Result<Self, ConnectionError> {
        let address = options.socket_address();
        let at = |source| ConnectionError::Connect { address, source };
        let socket = TcpStream::connect_timeout(&address, options.timeout).map_err(at)?;
        socket.set_nodelay(true).map_err(at)?;
        socket.set_nonblocking(true).map_err(at)?;
        let pair = HostQueuePair::new(config);
        let mut this = Self { socket, pair, timeout: options.timeout, wire: WireBytes::default() };
        let deadline = Instant::now() + options.timeout;
        while !this.pair.is_ready() {
            this.drive(deadline)?;
        }
        Ok(this)
    }

    /// Sets what Connect and Identify have told.
    pub fn configure(&mut self, entries: u16, in_capsule_bytes: u32) {
        self.pair.configure(entries, in_capsule_bytes);
    }

    /// Gives a command to the machine; it is sent by the next [`Connection::wait`].
    pub fn submit(&mut self, sqe: Sqe, data: HostData, context: u64) -> Result<(), ConnectionError> {
        match self.pair.submit(sqe, data, context) {
            Ok(_) => Ok(()),
            Err(SubmitError::QueueFull(_) | SubmitError::NotReady(_)) => Err(ConnectionError::QueueFull),
            Err(SubmitError::Closed(_)) => Err(self.ended()),
        }
    }

    /// Sends what is waiting, and waits until a command completes.
    pub fn wait(&mut self) -> Result<Completion, ConnectionError> {
        let mut deadline = Instant::now() + self.timeout;
        loop {
            if let Some(completion) = self.pair.poll_completion() {
                return Ok(completion);
            }
            let before = self.wire;
            self.drive(deadline)?;
            if self.wire != before {
                deadline = Instant::now() + self.timeout;
            }
        }
    }

    /// Sends what is waiting as far as the socket takes it now.
    pub fn push(&mut self) -> Result<(), ConnectionError> {
        self.send().map(drop)
    }

    /// PDU bytes so far.
    pub fn wire(&self) -> WireBytes {
        self.wire
    }

    /// Sends and receives what can be without waiting; waits for the socket if that was nothing.
    fn drive(&mut self, deadline: Instant) -> Result<(), ConnectionError> {
        let sent = self.send()?;
        let received = self.receive()?;
        if self.pair.poll_close().is_some() {
            // A TermReq that says what was wrong is worth sending; that it arrives is not worth waiting for.
            let _ = self.send();
            return Err(self.ended());
        }
        if sent || received {
            return Ok(());
        }
        self.wait_for_socket(deadline)
    }

    /// Sends until the socket takes no more; whether anything went.
    fn send(&mut self) -> Result<bool, ConnectionError> {
        let mut any = false;
        while self.pair.has_output() {
            let mut slices: Vec<IoSlice<'_>> = Vec::new();
            self.pair.gather(&mut slices);
            let first = slices.get(..slices.len().min(MAX_SLICES)).unwrap_or_default();
            match self.socket.write_vectored(first) {
                Ok(0) => return Err(self.socket_error(ErrorKind::WriteZero.into())),
                Ok(n) => {
                    drop(slices);
                    self.pair.sent(n);
                    self.wire.sent += n as u64;
                    any = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(any),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The peer may have said why before it closed: what it sent is read first.
                Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                    while self.receive()? {}
                    return Err(self.socket_error(error));
                }
                Err(error) => return Err(self.socket_error(error)),
            }
        }
        Ok(any)
    }

    /// One read from the socket; whether anything came.
    fn receive(&mut self) -> Result<bool, ConnectionError> {
        loop {
            let room = self.pair.receive_slice();
            if room.is_empty() {
                return Ok(false);
            }
            match self.socket.read(room) {
                Ok(0) => {
                    self.pair.peer_closed();
                    return Ok(false);
                }
                Ok(n) => {
                    self.pair.received(n);
                    self.wire.received += n as u64;
                    return Ok(true);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.socket_error(error)),
            }
        }
    }

    fn wait_for_socket(&mut self, deadline: Instant) -> Result<(), ConnectionError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectionError::Timeout { waited: self.timeout, in_flight: self.pair.outstanding() });
        }
        let mut interest = PollFlags::POLLIN;
        if self.pair.has_output() {
            interest |= PollFlags::POLLOUT;
        }
        // At least a millisecond, so that the last one isn't spent spinning.
        let timeout = PollTimeout::try_from(left.max(Duration::from_millis(1))).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.socket.as_fd(), interest)], timeout) {
            Ok(_) | Err(nix::Error::EINTR) => Ok(()),
            Err(error) => Err(self.socket_error(error.into())),
        }
    }

    fn socket_error(&self, source: std::io::Error) -> ConnectionError {
        ConnectionError::Socket { source, in_flight: self.pair.outstanding() }
    }

    fn ended(&self) -> ConnectionError {
        let reason = self.pair.poll_close().unwrap_or(nvmf_target::proto::tcp::CloseReason::PeerClosed);
        ConnectionError::Ended { reason, in_flight: self.pair.outstanding() }
    }
}
