//! What a reactor counts.
//!
//! Owns the counters: plain atomics that only their reactor writes. Must not know who reads them. Invariant: a counter
//! only grows; gauges are the difference of two counters or say so.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::disk::Action;

/// One reactor's counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) busy_polls: AtomicU64,
    pub(crate) idle_polls: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) slept_ns: AtomicU64,
    pub(crate) commands: AtomicU64,
    pub(crate) received_bytes: AtomicU64,
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) messages: AtomicU64,
    pub(crate) late_replies: AtomicU64,
    pub(crate) slow_readers: AtomicU64,
    /// Queues ended since other hosts waited for buffers with which theirs did nothing.
    pub(crate) stalled: AtomicU64,
    pub(crate) io_started: AtomicU64,
    pub(crate) io_finished: AtomicU64,
    pub(crate) io_errors: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    /// Queue pairs that it drives, or that are on their way to it.
    pub(crate) queues: AtomicUsize,
}

/// Adds without the cost of an atomic read-modify-write: only one thread writes each counter.
pub(crate) fn count(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn io_started(&self, action: Action, bytes: usize) {
        count(&self.io_started, 1);
        match action {
            Action::Read => count(&self.read_bytes, bytes as u64),
            Action::Write => count(&self.written_bytes, bytes as u64),
            Action::Sync | Action::Allocate { .. } | Action::PunchHole { .. } | Action::ZeroRange { .. } => {}
        }
    }

    pub(crate) fn io_finished(&self, failed: bool) {
        count(&self.io_finished, 1);
        count(&self.io_errors, u64::from(failed));
    }

    pub(crate) fn snapshot(&self) -> ReactorSnapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReactorSnapshot {
            busy_polls: read(&self.busy_polls),
            idle_polls: read(&self.idle_polls),
            sleeps: read(&self.sleeps),
            slept: Duration::from_nanos(read(&self.slept_ns)),
            commands: read(&self.commands),
            received_bytes: read(&self.received_bytes),
            sent_bytes: read(&self.sent_bytes),
            messages: read(&self.messages),
            late_replies: read(&self.late_replies),
            slow_readers: read(&self.slow_readers),
            stalled: read(&self.stalled),
            io_started: read(&self.io_started),
            io_finished: read(&self.io_finished),
            io_errors: read(&self.io_errors),
            read_bytes: read(&self.read_bytes),
            written_bytes: read(&self.written_bytes),
            queues: self.queues.load(Ordering::Relaxed),
        }
    }
}

/// One reactor's counters at a moment. All but `queues` only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReactorSnapshot {
    /// Rounds that found something to do.
    pub busy_polls: u64,
    /// Rounds that found nothing.
    pub idle_polls: u64,
    /// Times that it went to sleep.
    pub sleeps: u64,
    /// Time asleep.
    pub slept: Duration,
    /// Commands given to back ends.
    pub commands: u64,
    /// Bytes received from hosts.
    pub received_bytes: u64,
    /// Bytes sent to hosts.
    pub sent_bytes: u64,
    /// Messages from other reactors and threads.
    pub messages: u64,
    /// Replies to queues that were gone.
    pub late_replies: u64,
    /// Connections cut since their host did not read.
    pub slow_readers: u64,
    /// Queues ended since other hosts waited for buffers with which theirs did nothing.
    pub stalled: u64,
    /// File operations started.
    pub io_started: u64,
    /// File operations that the kernel has finished; the difference is what is waiting or under way.
    pub io_finished: u64,
    /// Those of them that failed.
    pub io_errors: u64,
    /// Bytes asked for from files.
    pub read_bytes: u64,
    /// Bytes given to files.
    pub written_bytes: u64,
    /// Queue pairs now.
    pub queues: usize,
}
