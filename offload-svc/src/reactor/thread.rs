//! A reactor's life: look everywhere for work, do it, and sleep when there has been none for a while.
//!
//! Owns the loop, the epoll set and the order of things within a round. Must not know what the work means. Invariants:
//! nothing in a round blocks; before it sleeps it has announced so and then found nothing, so a wake-up is never lost.

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::task::Waker;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use super::connections::{Connections, FIRST_SOCKET_TOKEN};
use super::disk::{Disk, DiskEngine};
use super::doorbell::{self, Doorbell};
use super::local::Local;
use super::message::{Mailbox, Message};
use super::metrics::{Counters, count};
use super::{ReactorFailure, Shared};
use crate::{buffers, ring};

/// Messages taken from one ring in a round.
const MESSAGES_PER_ROUND: usize = 64;
/// Tasks run in a round.
const TASKS_PER_ROUND: usize = 64;
/// Events taken from epoll in a round.
const EVENTS_PER_ROUND: usize = 128;

const TOKEN_DOORBELL: u64 = 0;
const TOKEN_DISK: u64 = 1;
const TOKEN_TIMER: u64 = 2;
const _: () = assert!(TOKEN_TIMER < FIRST_SOCKET_TOKEN);

/// The rings of one reactor, by the other's index.
pub(super) struct Rings {
    pub(super) to: Vec<Option<Box<dyn ring::Producer<Message>>>>,
    pub(super) from: Vec<Option<Box<dyn ring::Consumer<Message>>>>,
}

impl Rings {
    pub(super) fn none(count: usize) -> Self {
        Self { to: (0..count).map(|_| None).collect(), from: (0..count).map(|_| None).collect() }
    }
}

/// What a reactor starts with.
pub(super) struct Start {
    pub(super) index: usize,
    pub(super) shared: Arc<Shared>,
    pub(super) rings: Rings,
    pub(super) spin: Duration,
    pub(super) disk: DiskEngine,
    pub(super) ready: mpsc::Sender<io::Result<()>>,
}

/// Runs a reactor on this thread until it is stopped, or fails.
pub(super) fn run(start: Start) {
    let (index, shared) = (start.index, start.shared.clone());
    let outcome = catch_unwind(AssertUnwindSafe(|| live(start)));
    // From here on nothing reaches it; what was on its way is dropped.
    shared.mailboxes[index].close();
    if let Err(panic) = outcome {
        tracing::error!("reactor {index} panicked: {}", words_of(&*panic));
        shared.failure.send_if_modified(|failure| {
            let first = failure.is_none();
            failure.get_or_insert(ReactorFailure { index });
            first
        });
    }
}

fn words_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without words")
}

fn live(start: Start) {
    let Start { index, shared, rings, spin, disk, ready } = start;
    buffers::mark_reactor_thread();
    let reactor = Reactor::new(index, shared, rings, spin, disk);
    match reactor {
        Ok(mut reactor) => {
            let _entered = reactor.local.enter();
            // Whoever started us may have given up already; then Stop is in the inbox.
            let _ = ready.send(Ok(()));
            drop(ready);
            reactor.run();
        }
        Err(error) => drop(ready.send(Err(error))),
    }
}

struct Reactor {
    local: Local,
    shared: Arc<Shared>,
    index: usize,
    rings: Rings,
    connections: Connections,
    disk: Disk,
    epoll: Epoll,
    timer: TimerFd,
    /// What `timer` is set to.
    timer_at: Option<Instant>,
    doorbell: Arc<Doorbell>,
    waker: Waker,
    spin: Duration,
    // Messages are boxes already: that is what a ring carries.
    #[allow(clippy::vec_box)]
    batch: Vec<Box<Message>>,
    events: Vec<EpollEvent>,
    /// It has been told to end: when it must.
    stopping: Option<Instant>,
}

impl Reactor {
    fn new(index: usize, shared: Arc<Shared>, rings: Rings, spin: Duration, engine: DiskEngine) -> io::Result<Self> {
        let doorbell = shared.mailboxes[index].doorbell.clone();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?;
        let disk = Disk::new(engine, doorbell.clone(), shared.mailboxes[index].counters.clone());
        epoll.add(&*doorbell, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_DOORBELL))?;
        epoll.add(&timer, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_TIMER))?;
        disk.watch(|descriptor: BorrowedFd<'_>| {
            Ok(epoll.add(descriptor, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_DISK))?)
        })?;
        Ok(Self {
            local: Local::new(index, shared.clone(), disk.clone()),
            connections: Connections::new(shared.clone(), index),
            shared,
            index,
            rings,
            disk,
            epoll,
            timer,
            timer_at: None,
            waker: doorbell::waker(&doorbell),
            doorbell,
            spin,
            batch: Vec::with_capacity(MESSAGES_PER_ROUND),
            events: vec![EpollEvent::empty(); EVENTS_PER_ROUND],
            stopping: None,
        })
    }

    fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[self.index]
    }

    fn counters(&self) -> &Counters {
        &self.mailbox().counters
    }

    fn run(&mut self) {
        let mut idle_since: Option<Instant> = None;
        while !self.is_over() {
            let now = Instant::now();
            if self.round(now) {
                count(&self.counters().busy_polls, 1);
                idle_since = None;
                continue;
            }
            count(&self.counters().idle_polls, 1);
            let since = *idle_since.get_or_insert(now);
            if now.duration_since(since) < self.spin {
                std::hint::spin_loop();
            } else {
                self.sleep();
                idle_since = None;
            }
        }
        self.local.end_tasks();
    }

    fn is_over(&self) -> bool {
        let Some(at) = self.stopping else { return false };
        Instant::now() >= at || (self.disk.under_way() == 0 && self.connections.len() == 0)
    }

    /// One look everywhere; says whether anything was done.
    fn round(&mut self, now: Instant) -> bool {
        let mut busy = self.take_messages(now);
        busy |= self.local.fire_timers(now);
        busy |= self.poll_events(EpollTimeout::ZERO);
        busy |= self.connections.round(now);
        busy |= self.local.run_tasks(TASKS_PER_ROUND) > 0;
        busy |= self.disk.turn();
        self.send_messages();
        busy
    }

    fn take_messages(&mut self, now: Instant) -> bool {
        let mut taken = 0;
        for from in 0..self.rings.from.len() {
            let Some(ring) = &mut self.rings.from[from] else { continue };
            let mut batch = std::mem::take(&mut self.batch);
            taken += ring.pop_burst(&mut batch, MESSAGES_PER_ROUND);
            for message in batch.drain(..) {
                self.handle(*message, now);
            }
            self.batch = batch;
        }
        for message in self.mailbox().take() {
            taken += 1;
            self.handle(message, now);
        }
        for message in self.local.take_own() {
            taken += 1;
            self.handle(message, now);
        }
        count(&self.counters().messages, taken as u64);
        taken > 0
    }

    fn handle(&mut self, message: Message, now: Instant) {
        match message {
            Message::Task(task) => task(&self.local),
            Message::Reply { queue, token, reply } => self.connections.complete(queue, token, reply, now),
            Message::Wake { queue } => self.connections.wake(queue, now),
            Message::Adopt { host, queue, stream } if self.stopping.is_none() => {
                self.connections.adopt(&host, *queue, stream, &self.epoll, now);
            }
            // Too late: both are closed by being dropped.
            Message::Adopt { .. } => {}
            Message::EndStalled { waiting } => self.connections.end_stalled(&waiting, now),
            Message::CloseQueues => self.connections.close_all(),
            Message::Stop { grace } => {
                self.connections.close_all();
                self.stopping = Some(now + grace);
            }
        }
    }

    /// Sends off what was posted in this round, and rings those who got something.
    fn send_messages(&mut self) {
        if !self.local.has_posted() {
            return;
        }
        let (shared, rings) = (&self.shared, &mut self.rings);
        self.local.send_posted(|to, messages| {
            let Some(ring) = &mut rings.to[to] else { return };
            let mailbox = &shared.mailboxes[to];
            if mailbox.is_closed() {
                // It has ended; nobody will ever take these.
                messages.clear();
            } else if ring.push_burst(messages) > 0 {
                mailbox.doorbell.ring();
            }
        });
    }

    /// Takes what epoll has; waits for it as long as `timeout` says.
    fn poll_events(&mut self, timeout: EpollTimeout) -> bool {
        let count = match self.epoll.wait(&mut self.events, timeout) {
            Ok(count) => count,
            // The kernel interrupts us to finish file I/O.
            Err(Errno::EINTR) => return false,
            Err(errno) => panic!("epoll_wait: {errno}"),
        };
        let mut busy = false;
        for i in 0..count {
            let event = self.events[i];
            match event.data() {
                TOKEN_DOORBELL => self.doorbell.silence(),
                TOKEN_DISK => {}
                TOKEN_TIMER => {
                    self.timer_at = None;
                    let _ = self.timer.wait();
                }
                token => {
                    busy = true;
                    self.connections.socket_event(token, event.events());
                }
            }
        }
        busy
    }

    /// Blocks until there is work or something is due.
    fn sleep(&mut self) {
        self.doorbell.going_to_sleep();
        if !self.has_work()
            && let Some(watch) = self.local.watch_tasks(&self.waker)
        {
            self.set_timer();
            let start = Instant::now();
            self.poll_events(EpollTimeout::NONE);
            drop(watch);
            count(&self.counters().sleeps, 1);
            count(&self.counters().slept_ns, u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
        self.doorbell.awake();
    }

    /// The last look before sleeping: only for what does not show in the epoll set.
    fn has_work(&self) -> bool {
        let rings = self.rings.from.iter().flatten().any(|ring| !ring.is_empty());
        let posted = self.mailbox().is_filled() || self.local.has_posted();
        rings || posted || self.connections.has_ready() || self.disk.has_finished()
    }

    /// Sets the timer to what is due next.
    fn set_timer(&mut self) {
        let deadlines = [self.local.next_timer(), self.connections.next_deadline(), self.stopping];
        let Some(at) = deadlines.into_iter().flatten().min() else { return };
        // One that is set too early costs a wake-up, no more.
        if self.timer_at.is_some_and(|set| set <= at) {
            return;
        }
        // Zero would turn it off.
        let wait = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        match self.timer.set(Expiration::OneShot(wait.into()), TimerSetTimeFlags::empty()) {
            Ok(()) => self.timer_at = Some(at),
            Err(errno) => panic!("timerfd_settime: {errno}"),
        }
    }
}
