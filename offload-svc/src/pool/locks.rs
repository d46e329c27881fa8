//! Range locks within a shard: a fused Compare-and-Write excludes overlapping writes, writes do not exclude each other.
//!
//! Owns who may proceed. Must not know what the holders do. Invariant: of two overlapping holders of which one is
//! exclusive, the one that came first goes first.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use tokio::sync::Notify;

struct Entry {
    id: u64,
    range: Range<u64>,
    exclusive: bool,
}

/// The ranges of a shard that are being written.
#[derive(Default)]
pub struct RangeLocks {
    next: Cell<u64>,
    entries: RefCell<Vec<Entry>>,
    changed: Notify,
}

/// A held range; released on drop.
pub struct Held<'a> {
    locks: &'a RangeLocks,
    id: u64,
}

impl RangeLocks {
    /// Waits until nothing that came earlier conflicts.
    pub async fn enter(&self, range: Range<u64>, exclusive: bool) -> Held<'_> {
        let id = self.next.replace(self.next.get() + 1);
        self.entries.borrow_mut().push(Entry { id, range: range.clone(), exclusive });
        let held = Held { locks: self, id };
        loop {
            let changed = self.changed.notified();
            if !self.conflicts(id, &range, exclusive) {
                return held;
            }
            changed.await;
        }
    }

    fn conflicts(&self, id: u64, range: &Range<u64>, exclusive: bool) -> bool {
        let entries = self.entries.borrow();
        let mut earlier = entries.iter().filter(|entry| entry.id < id && overlaps(&entry.range, range));
        earlier.any(|entry| exclusive || entry.exclusive)
    }

    /// Whether others than `held` are at work in a range.
    pub fn others_in(&self, held: &Held<'_>, range: &Range<u64>) -> bool {
        self.entries.borrow().iter().any(|entry| entry.id != held.id && overlaps(&entry.range, range))
    }
}

fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.locks.entries.borrow_mut().retain(|entry| entry.id != self.id);
        self.locks.changed.notify_waiters();
    }
}
