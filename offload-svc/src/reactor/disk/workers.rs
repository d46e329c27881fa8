//! File I/O by threads, where the kernel allows no io_uring.
//!
//! Owns a few threads for each file, so that one that hangs holds up nobody else. Must not know which operations may
//! run. Invariant: an operation's buffer travels with it to the thread and back.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use slab::Slab;

use super::{Action, DiskFile, Op, State, Step};
use crate::reactor::doorbell::Doorbell;

/// Threads for one file of one reactor.
const THREADS_PER_FILE: usize = 4;
/// How long a thread without work stays.
const IDLE: Duration = Duration::from_secs(10);

struct Job {
    key: usize,
    op: Op,
}

struct Outcome {
    key: usize,
    op: Op,
    result: io::Result<()>,
}

#[derive(Default)]
struct Crew {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

/// The threads of one file.
#[derive(Default)]
struct Station {
    crew: Mutex<Crew>,
    work: Condvar,
}

struct Outbox {
    outcomes: Mutex<Vec<Outcome>>,
    doorbell: Option<Arc<Doorbell>>,
}

pub(super) struct Workers {
    stations: HashMap<u64, Arc<Station>>,
    outbox: Arc<Outbox>,
    /// Jobs that no thread could be started for.
    failed: Vec<Outcome>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in these sections panics half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    pub(super) fn new(doorbell: Arc<Doorbell>) -> Self {
        Self::with(Some(doorbell))
    }

    /// An engine that gets no work.
    pub(super) fn idle() -> Self {
        Self::with(None)
    }

    fn with(doorbell: Option<Arc<Doorbell>>) -> Self {
        let outbox = Arc::new(Outbox { outcomes: Mutex::default(), doorbell });
        Self { stations: HashMap::new(), outbox, failed: Vec::new() }
    }

    /// Takes the operation's contents to a thread; the slab keeps its state.
    pub(super) fn submit(&mut self, key: usize, op: &mut Op) {
        let travelling = Op {
            action: op.action,
            file: op.file.clone(),
            offset: op.offset,
            buffer: op.buffer.take(),
            done_bytes: op.done_bytes,
            retries: 0,
            state: State::Abandoned,
        };
        let station = self.stations.entry(op.file.id()).or_default().clone();
        let mut crew = lock(&station.crew);
        crew.jobs.push_back(Job { key, op: travelling });
        if crew.idle >= crew.jobs.len() || crew.threads == THREADS_PER_FILE {
            drop(crew);
            station.work.notify_one();
            return;
        }
        let outbox = self.outbox.clone();
        let builder = std::thread::Builder::new().name("sluice-file".into()).stack_size(128 << 10);
        let home = station.clone();
        match builder.spawn(move || work(&home, &outbox)) {
            Ok(_) => crew.threads += 1,
            // Another thread of this file will take it; if there is none, nobody ever would.
            Err(error) if crew.threads == 0 => {
                let jobs = crew.jobs.drain(..).map(|job| {
                    let result = Err(io::Error::new(error.kind(), "no thread for file I/O"));
                    Outcome { key: job.key, op: job.op, result }
                });
                self.failed.extend(jobs);
            }
            Err(_) => {}
        }
    }

    /// Whether `turn` would find something.
    pub(super) fn has_outcomes(&self) -> bool {
        !self.failed.is_empty() || !lock(&self.outbox.outcomes).is_empty()
    }

    pub(super) fn turn(&mut self, ops: &mut Slab<Op>, finished: &mut Vec<(usize, io::Result<()>)>) {
        let mut outcomes = std::mem::take(&mut *lock(&self.outbox.outcomes));
        outcomes.append(&mut self.failed);
        for outcome in outcomes {
            if let Some(op) = ops.get_mut(outcome.key) {
                op.buffer = outcome.op.buffer;
                finished.push((outcome.key, outcome.result));
            }
        }
        if self.stations.len() > 64 {
            self.stations.retain(|_, station| lock(&station.crew).threads > 0);
        }
    }
}

/// A thread's life: jobs until none comes for a while.
fn work(station: &Station, outbox: &Outbox) {
    let mut crew = lock(&station.crew);
    loop {
        if let Some(Job { key, mut op }) = crew.jobs.pop_front() {
            drop(crew);
            let result = run_to_end(&mut op);
            lock(&outbox.outcomes).push(Outcome { key, op, result });
            if let Some(doorbell) = &outbox.doorbell {
                doorbell.ring();
            }
            crew = lock(&station.crew);
            continue;
        }
        crew.idle += 1;
        let (guard, timeout) = station.work.wait_timeout(crew, IDLE).unwrap_or_else(PoisonError::into_inner);
        crew = guard;
        crew.idle -= 1;
        if timeout.timed_out() && crew.jobs.is_empty() {
            crew.threads -= 1;
            return;
        }
    }
}

/// Does an operation on this thread, whatever it takes.
pub(super) fn run_to_end(op: &mut Op) -> io::Result<()> {
    loop {
        let step = step(op);
        if let Some(result) = op.note(step) {
            return result;
        }
    }
}

fn step(op: &mut Op) -> Step {
    let file: &DiskFile = &op.file;
    let (offset, done) = (op.offset.saturating_add(op.done_bytes as u64), op.done_bytes);
    let rest = op.buffer.as_mut().map_or(&mut [][..], |buffer| buffer.get_mut(done..).unwrap_or_default());
    match op.action {
        Action::Read => read_at(file, rest, offset),
        Action::Write => file.file().write_at(rest, offset),
        Action::Sync => file.file().sync_data().map(|()| 0),
        Action::Allocate { len } => allocate(file, FallocateFlags::empty(), offset, len),
        Action::PunchHole { len } => {
            allocate(file, FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, len)
        }
        Action::ZeroRange { len } => {
            allocate(file, FallocateFlags::FALLOC_FL_ZERO_RANGE | FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, len)
        }
    }
}

fn read_at(file: &DiskFile, rest: &mut [u8], offset: u64) -> Step {
    let result = file.file().read_at(rest, offset);
    // io_uring reads pipes as well, which stand for files that hang in the tests.
    #[cfg(test)]
    if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotSeekable) {
        return io::Read::read(&mut file.file(), rest);
    }
    result
}

fn allocate(file: &DiskFile, flags: FallocateFlags, offset: u64, len: u64) -> Step {
    let too_large = |_| io::Error::from_raw_os_error(nix::libc::EFBIG);
    let (offset, len) = (i64::try_from(offset).map_err(too_large)?, i64::try_from(len).map_err(too_large)?);
    fallocate(file.file(), flags, offset, len)?;
    Ok(0)
}
