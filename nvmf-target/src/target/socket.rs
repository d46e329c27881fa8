//! Sockets: how they are set up, and whether the other side of one is still there.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Weak;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::TcpStream;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// When the kernel begins to ask whether a silent peer is there, how often, and how many times.
const PROBE_AFTER: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 4;

/// A listening socket on `address`.
pub(super) fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // Connections of a predecessor in TIME_WAIT must not keep a restarted service from its port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// Sets an accepted socket up: no delay for small PDUs, and an end for peers that vanished without a word.
pub(super) fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_EVERY).with_retries(PROBES);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Looks at a socket that somebody else owns, without keeping it open.
pub(super) struct SocketProbe(pub Weak<TcpStream>);

impl SocketProbe {
    /// Whether the peer has closed or reset the connection, or it isn't there any more.
    pub fn is_dead(&self) -> bool {
        let Some(stream) = self.0.upgrade() else { return true };
        let hung_up = PollFlags::from_bits_retain(libc::POLLRDHUP);
        let mut fds = [PollFd::new(stream.as_fd(), hung_up)];
        let found = poll(&mut fds, PollTimeout::ZERO);
        let events = fds[0].revents().unwrap_or_else(PollFlags::empty);
        matches!(found, Ok(n) if n > 0) && events.intersects(hung_up | PollFlags::POLLHUP | PollFlags::POLLERR)
    }
}
