//! File I/O of one reactor, without ever blocking it.
//!
//! Owns every operation from its start to the kernel's last word on it, its buffer included, and the limit on how many
//! one file may have under way. Must not know what files mean. Invariants: a buffer that the kernel may still write
//! to or read from is never freed nor given to anyone, whatever became of the future that waits for it; a file that
//! hangs takes nothing away from the others.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::task::{Context, Poll, Waker};

use nvmf_target::buffer::IoBuf;
use slab::Slab;

mod file;
mod uring;
mod workers;

#[cfg(test)]
mod tests;

pub use file::{DiskFile, FileError, Opening};

use super::doorbell::Doorbell;
use super::metrics::Counters;
use uring::Uring;
use workers::Workers;

/// Operations of one file under way at a time, on one reactor. A file that hangs keeps so many buffers in quarantine
/// at most; the rest wait in the queue, from which they can be taken back.
pub(crate) const LANE_DEPTH: usize = 32;

/// Times that the kernel may say "not now" to an operation before that is its answer.
const MOST_RETRIES: u8 = 100;

fn not_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

/// What does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiskEngine {
    /// io_uring where the kernel allows it, otherwise threads.
    #[default]
    Auto,
    /// Threads.
    Threads,
}

/// What to do to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Fill the buffer from `offset` on.
    Read,
    /// Store the buffer from `offset` on.
    Write,
    /// fdatasync.
    Sync,
    /// Set room aside for `len` bytes, whose contents stay (fallocate).
    Allocate {
        /// How many bytes.
        len: u64,
    },
    /// Make `len` bytes read as zeroes and give their space back (fallocate, punch hole).
    PunchHole {
        /// How many bytes.
        len: u64,
    },
    /// Make `len` bytes read as zeroes (fallocate, zero range).
    ZeroRange {
        /// How many bytes.
        len: u64,
    },
}

/// One operation, from its start until the kernel is done with it.
pub(crate) struct Op {
    action: Action,
    file: Arc<DiskFile>,
    offset: u64,
    buffer: Option<IoBuf>,
    /// Bytes of the buffer done so far: the kernel may do less than it was asked for.
    done_bytes: usize,
    /// How often the kernel said "not now" in a row.
    retries: u8,
    state: State,
}

enum State {
    /// Not yet given to the kernel.
    Queued(Option<Waker>),
    /// The kernel (or a worker) has it.
    UnderWay(Option<Waker>),
    /// Nobody waits any more, but the kernel still has it.
    Abandoned,
    /// Done; waits to be collected.
    Done(io::Result<()>),
}

/// How far one step got.
pub(crate) type Step = io::Result<usize>;

enum Engine {
    Uring(Box<Uring>),
    Workers(Workers),
}

/// The operations of one file that this reactor knows of.
#[derive(Default)]
struct Lane {
    under_way: usize,
    queue: VecDeque<usize>,
}

struct Inner {
    engine: Engine,
    ops: Slab<Op>,
    lanes: HashMap<u64, Lane>,
    under_way: usize,
}

/// A reactor's file I/O. Clones share it.
#[derive(Clone)]
pub(crate) struct Disk {
    inner: Rc<RefCell<Inner>>,
    counters: Arc<Counters>,
}

impl Disk {
    /// `doorbell` is rung when a worker thread has finished something.
    pub(crate) fn new(engine: DiskEngine, doorbell: Arc<Doorbell>, counters: Arc<Counters>) -> Self {
        let workers = || Engine::Workers(Workers::new(doorbell.clone()));
        let engine = match engine {
            DiskEngine::Threads => workers(),
            DiskEngine::Auto => match Uring::new() {
                Ok(uring) => Engine::Uring(Box::new(uring)),
                Err(error) => {
                    // It is the same for every reactor.
                    static SAID: Once = Once::new();
                    SAID.call_once(|| {
                        tracing::warn!(
                            "no io_uring ({error}): {}; file I/O goes through threads, which costs more CPU",
                            uring::remedy(&error)
                        );
                    });
                    workers()
                }
            },
        };
        let inner = Inner { engine, ops: Slab::new(), lanes: HashMap::new(), under_way: 0 };
        Self { inner: Rc::new(RefCell::new(inner)), counters }
    }

    /// Shows `watch` the descriptor that becomes readable when the kernel has finished something, if there is one.
    pub(crate) fn watch(&self, watch: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<()> {
        match &self.inner.borrow().engine {
            Engine::Uring(uring) => watch(uring.as_fd()),
            Engine::Workers(_) => Ok(()),
        }
    }

    /// Whether something is finished that no descriptor shows.
    pub(crate) fn has_finished(&self) -> bool {
        match &self.inner.borrow().engine {
            Engine::Uring(_) => false,
            Engine::Workers(workers) => workers.has_outcomes(),
        }
    }

    /// Starts an operation.
    pub(crate) fn start(&self, file: &Arc<DiskFile>, action: Action, offset: u64, buffer: Option<IoBuf>) -> Pending {
        self.counters.io_started(action, buffer.as_ref().map_or(0, |buffer| buffer.len()));
        let mut op =
            Op { action, file: file.clone(), offset, buffer, done_bytes: 0, retries: 0, state: State::Queued(None) };
        if file.never_blocks() {
            // Memory: the copy is done by the time that asking for it would take.
            let result = workers::run_to_end(&mut op);
            self.counters.io_finished(result.is_err());
            op.state = State::Done(result);
            let key = self.inner.borrow_mut().ops.insert(op);
            return Pending { disk: self.clone(), key: Some(key) };
        }
        let mut inner = self.inner.borrow_mut();
        let key = inner.ops.insert(op);
        inner.enqueue(key, file.id());
        Pending { disk: self.clone(), key: Some(key) }
    }

    /// Hands started operations to the kernel, collects finished ones, and wakes who waits for them. Says whether
    /// anything was finished.
    pub(crate) fn turn(&self) -> bool {
        let mut wakers = Vec::new();
        let progress = self.inner.borrow_mut().turn(&mut wakers, &self.counters);
        wakers.into_iter().for_each(Waker::wake);
        progress
    }

    /// Operations that the kernel (or a worker) has now.
    pub(crate) fn under_way(&self) -> usize {
        self.inner.borrow().under_way
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What the kernel still has stays where it is for ever, since it may yet write there. (Workers own theirs.)
        if self.under_way > 0 {
            let engine = std::mem::replace(&mut self.engine, Engine::Workers(Workers::idle()));
            std::mem::forget(std::mem::take(&mut self.ops));
            std::mem::forget(engine);
        }
    }
}

impl Inner {
    fn enqueue(&mut self, key: usize, file: u64) {
        let lanes = self.lanes.len();
        let lane = self.lanes.entry(file).or_default();
        lane.queue.push_back(key);
        if let Engine::Uring(uring) = &mut self.engine
            && self.lanes.len() > lanes
        {
            uring.allow_workers(self.lanes.len() * LANE_DEPTH);
        }
        self.advance(file);
    }

    /// Gives a file's queued operations to the engine as far as its limit goes.
    fn advance(&mut self, file: u64) {
        let Some(lane) = self.lanes.get_mut(&file) else { return };
        while lane.under_way < LANE_DEPTH
            && let Some(key) = lane.queue.pop_front()
        {
            let Some(op) = self.ops.get_mut(key) else { continue };
            if let State::Queued(waker) = &mut op.state {
                op.state = State::UnderWay(waker.take());
            }
            lane.under_way += 1;
            self.under_way += 1;
            match &mut self.engine {
                Engine::Uring(uring) => uring.submit(key, op),
                Engine::Workers(workers) => workers.submit(key, op),
            }
        }
        if lane.under_way == 0 && lane.queue.is_empty() {
            self.lanes.remove(&file);
        }
    }

    fn turn(&mut self, wakers: &mut Vec<Waker>, counters: &Counters) -> bool {
        let mut finished = Vec::new();
        match &mut self.engine {
            Engine::Uring(uring) => uring.turn(&mut self.ops, &mut finished),
            Engine::Workers(workers) => workers.turn(&mut self.ops, &mut finished),
        }
        let progress = !finished.is_empty();
        for (key, result) in finished {
            self.finish(key, result, wakers, counters);
        }
        progress
    }

    fn finish(&mut self, key: usize, result: io::Result<()>, wakers: &mut Vec<Waker>, counters: &Counters) {
        let Some(op) = self.ops.get_mut(key) else { return };
        counters.io_finished(result.is_err());
        let file = op.file.id();
        match std::mem::replace(&mut op.state, State::Done(result)) {
            State::UnderWay(waker) => wakers.extend(waker),
            // The kernel has given the buffer back: now it may go.
            State::Abandoned => drop(self.ops.remove(key)),
            State::Queued(_) | State::Done(_) => {}
        }
        self.under_way -= 1;
        if let Some(lane) = self.lanes.get_mut(&file) {
            lane.under_way -= 1;
        }
        self.advance(file);
    }

    /// The future of `key` is gone.
    fn forget(&mut self, key: usize) -> Option<Op> {
        let op = self.ops.get_mut(key)?;
        match op.state {
            State::UnderWay(_) | State::Abandoned => {
                op.state = State::Abandoned;
                None
            }
            State::Queued(_) => {
                let file = op.file.id();
                if let Some(lane) = self.lanes.get_mut(&file) {
                    lane.queue.retain(|queued| *queued != key);
                }
                let op = self.ops.remove(key);
                self.advance(file);
                Some(op)
            }
            State::Done(_) => Some(self.ops.remove(key)),
        }
    }
}

/// An operation under way: resolves to its result and its buffer.
pub(crate) struct Pending {
    disk: Disk,
    key: Option<usize>,
}

impl Future for Pending {
    type Output = (io::Result<()>, Option<IoBuf>);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(key) = self.key else { return Poll::Pending };
        let mut inner = self.disk.inner.borrow_mut();
        let Some(op) = inner.ops.get_mut(key) else { return Poll::Pending };
        match &mut op.state {
            State::Queued(waker) | State::UnderWay(waker) => {
                match waker {
                    Some(waker) => waker.clone_from(context.waker()),
                    None => *waker = Some(context.waker().clone()),
                }
                return Poll::Pending;
            }
            State::Abandoned => return Poll::Pending,
            State::Done(_) => {}
        }
        let op = inner.ops.remove(key);
        drop(inner);
        self.key = None;
        match op.state {
            State::Done(result) => Poll::Ready((result, op.buffer)),
            _ => Poll::Pending,
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let Some(key) = self.key.take() else { return };
        // The buffer is dropped outside the borrow: its pool may wake someone.
        let op = self.disk.inner.borrow_mut().forget(key);
        if let Some(Op { state: State::Queued(_), .. }) = op {
            self.disk.counters.io_finished(false);
        }
        drop(op);
    }
}

impl Op {
    /// What is left to do, as an offset into the file and one into the buffer.
    fn rest(&self) -> (u64, usize) {
        (self.offset.saturating_add(self.done_bytes as u64), self.done_bytes)
    }

    fn len(&self) -> usize {
        self.buffer.as_ref().map_or(0, |buffer| buffer.len())
    }

    /// Takes note of one step. `Some`: the operation has ended. `None`: go on.
    fn note(&mut self, step: Step) -> Option<io::Result<()>> {
        match (step, self.action) {
            (Err(error), _) if not_now(&error) && self.retries < MOST_RETRIES => {
                self.retries += 1;
                None
            }
            (Err(error), _) => Some(Err(error)),
            (Ok(_), Action::Sync | Action::Allocate { .. } | Action::PunchHole { .. } | Action::ZeroRange { .. }) => {
                Some(Ok(()))
            }
            (Ok(0), _) if self.done_bytes == self.len() => Some(Ok(())),
            (Ok(0), Action::Read) => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            (Ok(0), _) => Some(Err(io::ErrorKind::WriteZero.into())),
            (Ok(n), _) => {
                self.retries = 0;
                self.done_bytes = self.done_bytes.saturating_add(n).min(self.len());
                (self.done_bytes == self.len()).then_some(Ok(()))
            }
        }
    }
}

/// A folder for tests that goes away, beside the tests' own program: not in /tmp, which may be memory.
#[cfg(test)]
pub(crate) fn folder_on_disk() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}
