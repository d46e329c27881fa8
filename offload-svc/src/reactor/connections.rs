//! The queue pairs that one reactor drives.
//!
//! Owns their places, whose turn it is, their deadlines, and the wait for buffers. Must not know the protocol.
//! Invariant: a place's generation changes with its queue, so that a late reply or event for an earlier one finds
//! nobody.

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::net::TcpStream;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use nvmf_target::backend::Reply;
use nvmf_target::proto::io_queue::{IoQueuePair, Wanted};
use nvmf_target::wire::nqn::Nqn;
use slab::Slab;

use super::Shared;
use super::connection::{Connection, Turn};
use super::message::{self, Message, QueueId, QueueSink};
use super::metrics::{Counters, count};
use crate::buffers::{HostBuffers, WaitAll};

/// Turns of one round: then rings, timers and files have theirs.
const TURNS_PER_ROUND: usize = 64;
/// A queue that has waited so long for a buffer has those ended that do nothing with theirs.
const STARVED: Duration = Duration::from_secs(1);
/// How long those may have done nothing: longer than TCP needs to send again what got lost twice.
const STALLED: Duration = Duration::from_secs(2);

pub(super) struct Connections {
    shared: Arc<Shared>,
    reactor: usize,
    places: Slab<Place>,
    next_generation: u64,
    /// Places whose turn it is, each at most once.
    ready: VecDeque<usize>,
    deadlines: BTreeSet<(Instant, usize)>,
}

struct Place {
    connection: Connection,
    generation: u64,
    /// The pool, as its host may use it.
    buffers: Arc<HostBuffers>,
    /// It is in `ready`.
    queued: bool,
    /// Its entry in `deadlines`.
    deadline: Option<Instant>,
    /// The buffers that its first waiting command needs.
    buffers_to_come: Option<Pin<Box<WaitAll>>>,
    /// Since when it waits for them, or last had the stalled ones ended.
    waits_since: Option<Instant>,
    waker: Waker,
}

/// Wakes a reactor for one of its queues, from any thread.
struct QueueWaker {
    shared: Arc<Shared>,
    reactor: usize,
    queue: QueueId,
}

impl Wake for QueueWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A reactor that has ended has no queues.
        drop(message::send(&self.shared, self.reactor, Message::Wake { queue: self.queue }));
    }
}

impl Connections {
    pub(super) fn new(shared: Arc<Shared>, reactor: usize) -> Self {
        let (places, ready, deadlines) = (Slab::new(), VecDeque::new(), BTreeSet::new());
        Self { shared, reactor, places, next_generation: 0, ready, deadlines }
    }

    fn counters(&self) -> &Counters {
        &self.shared.mailboxes[self.reactor].counters
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Takes a queue pair over.
    pub(super) fn adopt(&mut self, host: &Nqn, mut queue: IoQueuePair, socket: TcpStream, epoll: &Epoll, now: Instant) {
        self.next_generation += 1;
        let entry = self.places.vacant_entry();
        let id = QueueId { slot: entry.key(), generation: self.next_generation };
        let (shared, reactor) = (self.shared.clone(), self.reactor);
        let waker = Waker::from(Arc::new(QueueWaker { shared: shared.clone(), reactor, queue: id }));
        let buffers = Arc::new(shared.host_buffers.for_host(host.as_str()));
        queue.attach(Arc::clone(&buffers) as _, waker.clone(), now);
        let interest = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        let watched = socket
            .set_nonblocking(true)
            .and_then(|()| socket.set_nodelay(true))
            .and_then(|()| Ok(epoll.add(&socket, EpollEvent::new(interest, token_of(id)))?));
        let sink = Arc::new(QueueSink { shared, reactor, queue: id });
        let mut connection = Connection::new(queue, socket, sink);
        if let Err(error) = watched {
            tracing::warn!("an I/O queue's socket can't be watched, so it is closed: {error}");
            connection.cut();
        }
        let generation = id.generation;
        let place = Place {
            connection,
            generation,
            buffers,
            queued: false,
            deadline: None,
            buffers_to_come: None,
            waits_since: None,
            waker,
        };
        entry.insert(place);
        self.make_ready(id.slot);
    }

    fn find(&mut self, id: QueueId) -> Option<&mut Place> {
        self.places.get_mut(id.slot).filter(|place| place.generation == id.generation)
    }

    fn make_ready(&mut self, slot: usize) {
        if let Some(place) = self.places.get_mut(slot)
            && !std::mem::replace(&mut place.queued, true)
        {
            self.ready.push_back(slot);
        }
    }

    /// The socket behind `token` can be read or written.
    pub(super) fn socket_event(&mut self, token: u64, flags: EpollFlags) {
        let id = id_of(token);
        let Some(place) = self.find(id) else { return };
        let ended = flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP | EpollFlags::EPOLLRDHUP);
        let readable = ended || flags.contains(EpollFlags::EPOLLIN);
        place.connection.is_ready(readable, flags.contains(EpollFlags::EPOLLOUT));
        self.make_ready(id.slot);
    }

    /// A back end has answered.
    pub(super) fn complete(&mut self, id: QueueId, token: u64, reply: Reply, now: Instant) {
        match self.find(id) {
            Some(place) => {
                place.connection.complete(token, reply, now);
                self.make_ready(id.slot);
            }
            None => count(&self.counters().late_replies, 1),
        }
    }

    /// Something happened to the queue elsewhere: an abort, the controller's end, a buffer for it.
    pub(super) fn wake(&mut self, id: QueueId, now: Instant) {
        let Some(place) = self.find(id) else { return };
        if !place.connection.is_cut() {
            place.connection.queue.tick(now);
        }
        self.make_ready(id.slot);
    }

    /// The host `waiting` waits for buffers: ends the connections of others that do nothing with theirs. Each has a turn
    /// first: it may be that this thread was kept from running, and not the peer from sending.
    pub(super) fn end_stalled(&mut self, waiting: &str, now: Instant) {
        let counters = &self.shared.mailboxes[self.reactor].counters;
        let (mut ended, mut others) = (Vec::new(), Vec::new());
        for (slot, place) in self.places.iter_mut().filter(|(_, place)| place.buffers.host() != waiting) {
            place.connection.is_ready(true, true);
            let turn = place.connection.turn(now, counters);
            if turn == Turn::Over || place.connection.queue.end_if_stalled(now, STALLED) {
                if turn != Turn::Over {
                    place.buffers.distrust(now);
                }
                ended.push((slot, turn != Turn::Over));
            } else {
                others.push(slot);
            }
        }
        let stalled = ended.iter().filter(|(_, stalled)| *stalled).count();
        if stalled > 0 {
            tracing::warn!(
                queues = stalled,
                "I/O queues ended: other hosts wait for buffers with which theirs did nothing"
            );
        }
        count(&self.counters().stalled, stalled as u64);
        ended.into_iter().map(|(slot, _)| slot).chain(others).for_each(|slot| self.make_ready(slot));
    }

    /// Has the stalled ones ended everywhere, if the place has waited for too long.
    fn relieve(&mut self, slot: usize, now: Instant) {
        let Some(place) = self.places.get_mut(slot) else { return };
        if place.waits_since.is_none_or(|since| now.saturating_duration_since(since) < STARVED) {
            return;
        }
        place.waits_since = Some(now);
        // One that holds some waits for itself first.
        if place.connection.queue.wants_buffers().is_none_or(|wanted| !place.buffers.is_starved(wanted)) {
            return;
        }
        let waiting = place.buffers.shared_name();
        for reactor in 0..self.shared.mailboxes.len() {
            // One that has ended has no queues.
            drop(message::send(&self.shared, reactor, Message::EndStalled { waiting: Arc::clone(&waiting) }));
        }
    }

    /// Closes every connection.
    pub(super) fn close_all(&mut self) {
        let slots: Vec<usize> = self.places.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            if let Some(place) = self.places.get_mut(slot) {
                place.connection.cut();
            }
            self.make_ready(slot);
        }
    }

    /// Turns for those whose turn it is; says whether there were any.
    pub(super) fn round(&mut self, now: Instant) -> bool {
        self.expire(now);
        let turns = self.ready.len().min(TURNS_PER_ROUND);
        for _ in 0..turns {
            let Some(slot) = self.ready.pop_front() else { break };
            self.turn(slot, now);
        }
        turns > 0
    }

    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    fn expire(&mut self, now: Instant) {
        while let Some(&(at, slot)) = self.deadlines.first()
            && at <= now
        {
            self.deadlines.pop_first();
            if let Some(place) = self.places.get_mut(slot) {
                place.deadline = None;
                place.connection.expire(now, &self.shared.mailboxes[self.reactor].counters);
            }
            self.relieve(slot, now);
            self.make_ready(slot);
        }
    }

    fn turn(&mut self, slot: usize, now: Instant) {
        let Some(place) = self.places.get_mut(slot) else { return };
        place.queued = false;
        let counters = &self.shared.mailboxes[self.reactor].counters;
        feed(place, &self.shared, now, counters);
        match place.connection.turn(now, counters) {
            Turn::Over => return self.remove(slot),
            Turn::More => self.make_ready(slot),
            Turn::Idle => {}
        }
        self.await_buffers(slot, now);
        self.set_deadline(slot);
    }

    /// Queues for the buffers that the place's first waiting command needs.
    fn await_buffers(&mut self, slot: usize, now: Instant) {
        let Some(place) = self.places.get_mut(slot) else { return };
        let wanted = place.connection.queue.wants_buffers().filter(|_| !place.connection.is_cut());
        let Some(wanted) = wanted else {
            (place.buffers_to_come, place.waits_since) = (None, None);
            return;
        };
        if place.buffers_to_come.is_some() {
            return;
        }
        match place.buffers.wait(wanted) {
            // The first poll takes a place in the queue; if they are there already, the next turn has them.
            Some(wait) => (place.buffers_to_come, place.waits_since) = (Some(Box::pin(wait)), Some(now)),
            None => {
                // MDTS is checked against the pool at the start; a queue that waits for ever would be worse than none.
                let Wanted { len_bytes, count } = wanted;
                tracing::error!(
                    "an I/O queue needs {count} buffers of {len_bytes} bytes at once: raise buffers.memory"
                );
                place.connection.cut();
            }
        }
        self.make_ready(slot);
    }

    fn set_deadline(&mut self, slot: usize) {
        let Some(place) = self.places.get_mut(slot) else { return };
        let starved = place.waits_since.map(|since| since + STARVED);
        let deadline = place.connection.next_deadline().into_iter().chain(starved).min();
        if place.deadline == deadline {
            return;
        }
        if let Some(old) = std::mem::replace(&mut place.deadline, deadline) {
            self.deadlines.remove(&(old, slot));
        }
        if let Some(at) = deadline {
            self.deadlines.insert((at, slot));
        }
    }

    fn remove(&mut self, slot: usize) {
        let place = self.places.remove(slot);
        if let Some(at) = place.deadline {
            self.deadlines.remove(&(at, slot));
        }
        self.counters().queues.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Gives the place the buffers that it waited for, if they have come.
fn feed(place: &mut Place, shared: &Shared, now: Instant, counters: &Counters) {
    let Some(wait) = &mut place.buffers_to_come else { return };
    if let Poll::Ready(granted) = wait.as_mut().poll(&mut Context::from_waker(&place.waker)) {
        (place.buffers_to_come, place.waits_since) = (None, None);
        if place.connection.is_cut() {
            return;
        }
        shared.host_buffers.granting(granted, || place.connection.queue.buffers_available(now));
        place.connection.submit(now, counters);
    }
}

/// Tokens below this are not sockets'.
pub(super) const FIRST_SOCKET_TOKEN: u64 = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 24;

fn token_of(id: QueueId) -> u64 {
    // Generations start at 1.
    id.generation << SLOT_BITS | id.slot as u64
}

fn id_of(token: u64) -> QueueId {
    QueueId { slot: (token & (FIRST_SOCKET_TOKEN - 1)) as usize, generation: token >> SLOT_BITS }
}
