//! How many TCP connections there are, from where, and how far they have come.
//!
//! Invariant: a connection is counted from its acceptance until its [`Ticket`] is dropped; no peer gets more than its
//! share, so that a flood from one leaves room for the others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::limits::Limits;

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    all: usize,
    unconnected: usize,
}

/// Why a connection was turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum TurnedAway {
    #[error("too many connections in all")]
    Total,
    #[error("too many connections from this address")]
    Peer,
    #[error("too many connections from this address that haven't connected")]
    Unconnected,
}

#[derive(Debug, Default)]
struct Table {
    total: usize,
    peers: HashMap<IpAddr, Counts>,
}

/// All connections.
#[derive(Debug, Clone, Default)]
pub(super) struct Connections(Arc<Mutex<Table>>);

impl Connections {
    /// Counts a new connection in, if there is room for it.
    pub fn enter(&self, peer: IpAddr, limits: &Limits) -> Result<Ticket, TurnedAway> {
        let peer = peer.to_canonical();
        let mut table = self.lock();
        if table.total >= limits.connections {
            return Err(TurnedAway::Total);
        }
        let counts = table.peers.get(&peer).copied().unwrap_or_default();
        if counts.all >= limits.connections_per_peer {
            return Err(TurnedAway::Peer);
        }
        if counts.unconnected >= limits.unconnected_per_peer {
            return Err(TurnedAway::Unconnected);
        }
        table.total += 1;
        table.peers.insert(peer, Counts { all: counts.all + 1, unconnected: counts.unconnected + 1 });
        Ok(Ticket { connections: self.clone(), peer, connected: false })
    }

    /// How many there are.
    pub fn total(&self) -> usize {
        self.lock().total
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection's place in the count.
#[derive(Debug)]
pub(super) struct Ticket {
    connections: Connections,
    peer: IpAddr,
    connected: bool,
}

impl Ticket {
    /// Its Connect is done.
    pub fn connected(&mut self) {
        if !std::mem::replace(&mut self.connected, true)
            && let Some(counts) = self.connections.lock().peers.get_mut(&self.peer)
        {
            counts.unconnected -= 1;
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut table = self.connections.lock();
        table.total -= 1;
        let Some(counts) = table.peers.get_mut(&self.peer) else { return };
        counts.all -= 1;
        counts.unconnected -= usize::from(!self.connected);
        if counts.all == 0 {
            table.peers.remove(&self.peer);
        }
    }
}

/// Lets so many log lines through a second; peers can't fill the log.
#[derive(Debug)]
pub(super) struct LogLimit(Mutex<(Instant, u32)>);

impl LogLimit {
    const LINES_PER_SECOND: u32 = 10;

    pub fn new() -> Self {
        Self(Mutex::new((Instant::now(), 0)))
    }

    /// Whether one more line may be written now.
    pub fn allows(&self, now: Instant) -> bool {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(window.0) >= Duration::from_secs(1) {
            *window = (now, 0);
        }
        window.1 += 1;
        window.1 <= Self::LINES_PER_SECOND
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_from_one_peer_leaves_room_for_others() {
        let limits = Limits { connections: 5, connections_per_peer: 3, unconnected_per_peer: 2, ..Limits::default() };
        let connections = Connections::default();
        let [a, b]: [IpAddr; 2] = ["192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()];
        let mut first = connections.enter(a, &limits).unwrap();
        let _second = connections.enter("::ffff:192.0.2.1".parse().unwrap(), &limits).unwrap();
        assert_eq!(connections.enter(a, &limits).unwrap_err(), TurnedAway::Unconnected);
        first.connected();
        first.connected();
        let third = connections.enter(a, &limits).unwrap();
        assert_eq!(connections.enter(a, &limits).unwrap_err(), TurnedAway::Peer);
        let _others = [connections.enter(b, &limits).unwrap(), connections.enter(b, &limits).unwrap()];
        assert_eq!(connections.enter(b, &limits).unwrap_err(), TurnedAway::Total);
        drop(third);
        assert_eq!(connections.total(), 4);
    }

    #[test]
    fn nothing_is_left_when_all_have_gone() {
        let connections = Connections::default();
        let limits = Limits::default();
        let mut tickets: Vec<_> =
            (0..50).map(|n| connections.enter(IpAddr::from([10, 0, 0, n]), &limits).unwrap()).collect();
        tickets.iter_mut().step_by(2).for_each(Ticket::connected);
        drop(tickets);
        assert_eq!(connections.total(), 0);
        assert!(connections.lock().peers.is_empty());
    }

    #[test]
    fn log_lines_are_limited() {
        let limit = LogLimit::new();
        let now = Instant::now();
        assert_eq!((0..1000).filter(|_| limit.allows(now)).count(), 10);
        assert!(limit.allows(now + Duration::from_secs(2)));
    }
}
