//! What other threads may know and ask of one I/O queue: its commands' hand-over state, Abort, and its end.
//!
//! One word per command slot decides who gets a command: the queue's thread moves it from waiting to submitted
//! when it hands it to the back end, Abort moves it from waiting to aborted; exactly one of the two succeeds.
//! Invariant: a command that Abort reported as aborted never reaches a back end.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;

use crate::wire::{CommandId, QueueId};

const FREE: u32 = 0;
const WAITING: u32 = 1 << 16;
const SUBMITTED: u32 = 2 << 16;
const ABORTED: u32 = 3 << 16;

/// How an Abort ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortOutcome {
    /// It had not been given to a back end and won't be; it ends with 00/07h (Abort's dword 0 bit 0 is 0).
    Aborted,
    /// It is at the back end and ends as it ends (bit 0 is 1).
    TooLate,
    /// No such command is outstanding (bit 0 is 1).
    NotFound,
}

/// See the module.
#[derive(Debug)]
pub struct QueueShared {
    qid: QueueId,
    entries: u16,
    slots: Box<[AtomicU32]>,
    in_flight: AtomicUsize,
    aborts_pending: AtomicBool,
    closing: AtomicBool,
    gone: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl QueueShared {
    /// A queue of `entries` entries without commands.
    pub fn new(qid: QueueId, entries: u16) -> Self {
        Self {
            qid,
            entries,
            slots: (0..entries).map(|_| AtomicU32::new(FREE)).collect(),
            in_flight: AtomicUsize::new(0),
            aborts_pending: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            waker: Mutex::new(None),
        }
    }

    /// QID.
    pub fn qid(&self) -> QueueId {
        self.qid
    }

    /// Size in entries (SQSIZE + 1).
    pub fn entries(&self) -> u16 {
        self.entries
    }

    /// Commands that a back end has and hasn't answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// The queue pair was dropped: its id may be used again.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// The queue was told to close.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Aborts the command with this id, if that is still possible. The queue's driver is woken to answer it.
    pub fn abort(&self, cid: CommandId) -> AbortOutcome {
        let id = u32::from(cid.0);
        let mut outcome = AbortOutcome::NotFound;
        for slot in &self.slots {
            let swapped = slot.compare_exchange(WAITING | id, ABORTED | id, Ordering::SeqCst, Ordering::SeqCst);
            match swapped {
                Ok(_) => {
                    self.aborts_pending.store(true, Ordering::SeqCst);
                    self.wake();
                    return AbortOutcome::Aborted;
                }
                Err(found) if found == SUBMITTED | id => outcome = AbortOutcome::TooLate,
                Err(_) => {}
            }
        }
        outcome
    }

    /// Tells the queue to close: it hands nothing more to a back end, and its driver is woken.
    pub fn terminate(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Who to wake after `abort` and `terminate`: the driver then calls `IoQueuePair::tick`.
    pub fn set_waker(&self, waker: Waker) {
        *self.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(waker);
    }

    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// A command arrived.
    pub(super) fn enter(&self, slot: usize, cid: CommandId) {
        self.slots[slot].store(WAITING | u32::from(cid.0), Ordering::SeqCst);
    }

    /// It is about to be handed to the back end; false: it was aborted.
    pub(super) fn submit(&self, slot: usize, cid: CommandId) -> bool {
        let id = u32::from(cid.0);
        self.slots[slot].compare_exchange(WAITING | id, SUBMITTED | id, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// It was aborted.
    pub(super) fn is_aborted(&self, slot: usize) -> bool {
        self.slots[slot].load(Ordering::SeqCst) & !0xffff == ABORTED
    }

    /// It was answered.
    pub(super) fn leave(&self, slot: usize) {
        self.slots[slot].store(FREE, Ordering::SeqCst);
    }

    /// Whether `abort` succeeded since the last call.
    pub(super) fn take_aborts_pending(&self) -> bool {
        self.aborts_pending.load(Ordering::SeqCst) && self.aborts_pending.swap(false, Ordering::SeqCst)
    }

    pub(super) fn add_in_flight(&self) {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn sub_in_flight(&self) {
        let before = self.in_flight.fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "more replies than requests");
    }

    pub(super) fn set_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
        self.closing.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// H57: 'aborted' is said only of commands that no back end gets.
    #[test]
    fn h57_abort_and_submit_exclude_each_other() {
        let queue = QueueShared::new(QueueId(1), 4);
        assert_eq!(queue.abort(CommandId(7)), AbortOutcome::NotFound);
        queue.enter(2, CommandId(7));
        assert!(queue.submit(2, CommandId(7)));
        assert_eq!(queue.abort(CommandId(7)), AbortOutcome::TooLate);
        queue.leave(2);
        queue.enter(3, CommandId(7));
        assert_eq!(queue.abort(CommandId(7)), AbortOutcome::Aborted);
        assert!(!queue.submit(3, CommandId(7)));
        assert!(queue.is_aborted(3) && queue.take_aborts_pending() && !queue.take_aborts_pending());
        assert_eq!(queue.abort(CommandId(7)), AbortOutcome::NotFound, "an aborted command is aborted once");
    }
}
