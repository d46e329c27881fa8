//! Locks on ranges of blocks: many readers, or one writer.
//!
//! Owns who holds and who waits. Must not know what is done under a lock. Invariant: of two overlapping holders none
//! is a writer; who came first goes first.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use nvmf_target::backend::LbaRange;

/// What a holder does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

#[derive(Debug)]
struct Claim {
    id: u64,
    range: LbaRange,
    access: Access,
    /// Held; otherwise it waits for earlier claims.
    held: bool,
    waker: Option<Waker>,
}

impl Claim {
    fn conflicts_with(&self, other: &Claim) -> bool {
        let end = |range: &LbaRange| range.slba.saturating_add(range.lba_count);
        let overlap = self.range.slba < end(&other.range) && other.range.slba < end(&self.range);
        overlap && (self.access == Access::Write || other.access == Access::Write)
    }
}

/// Claims in the order in which they came, held or not.
#[derive(Debug, Default)]
struct Table {
    claims: Vec<Claim>,
    next_id: u64,
    waiting: usize,
}

impl Table {
    /// Whether no earlier claim stands in the way of the one at `place`.
    fn is_free(&self, place: usize) -> bool {
        let (earlier, rest) = self.claims.split_at(place);
        rest.first().is_none_or(|claim| !earlier.iter().any(|other| claim.conflicts_with(other)))
    }

    /// Grants what can be granted now; gives the wakers of those who waited for it.
    fn grant(&mut self) -> Vec<Waker> {
        let mut wakers = Vec::new();
        if self.waiting == 0 {
            return wakers;
        }
        for place in 0..self.claims.len() {
            if !self.claims[place].held && self.is_free(place) {
                self.claims[place].held = true;
                self.waiting -= 1;
                wakers.extend(self.claims[place].waker.take());
            }
        }
        wakers
    }
}

/// The locks of one namespace. Used from every reactor.
#[derive(Debug, Clone, Default)]
pub(super) struct RangeLocks {
    table: Arc<Mutex<Table>>,
}

impl RangeLocks {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // Nothing panics inside, and a table is whole at every step.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims a range now; the future resolves when nobody stands in the way.
    pub(super) fn claim(&self, range: LbaRange, access: Access) -> Claiming {
        let mut table = self.lock();
        table.next_id += 1;
        let id = table.next_id;
        table.claims.push(Claim { id, range, access, held: false, waker: None });
        let place = table.claims.len() - 1;
        if table.is_free(place) {
            table.claims[place].held = true;
        } else {
            table.waiting += 1;
        }
        Claiming { held: Some(Held { locks: self.clone(), id }) }
    }
}

/// A claim that may have to wait.
pub(super) struct Claiming {
    held: Option<Held>,
}

impl Future for Claiming {
    type Output = Held;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Held> {
        let Some(held) = self.held.take() else { return Poll::Pending };
        let mut table = held.locks.lock();
        let waits = table.claims.iter_mut().find(|claim| claim.id == held.id && !claim.held);
        let Some(claim) = waits else {
            drop(table);
            return Poll::Ready(held);
        };
        claim.waker = Some(context.waker().clone());
        drop(table);
        self.held = Some(held);
        Poll::Pending
    }
}

/// A range that is held, until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    locks: RangeLocks,
    id: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        let wakers = {
            let mut table = self.locks.lock();
            if let Some(place) = table.claims.iter().position(|claim| claim.id == self.id) {
                let claim = table.claims.remove(place);
                if !claim.held {
                    table.waiting -= 1;
                }
            }
            table.grant()
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn range(slba: u64, lba_count: u64) -> LbaRange {
        LbaRange { slba, lba_count }
    }

    #[test]
    fn readers_share_and_writers_go_one_by_one_in_order() {
        let locks = RangeLocks::default();
        let first = locks.claim(range(0, 8), Access::Read).now_or_never().expect("free");
        let second = locks.claim(range(4, 8), Access::Read).now_or_never().expect("readers share");
        let mut writer = locks.claim(range(7, 1), Access::Write);
        assert!((&mut writer).now_or_never().is_none());
        let mut late_reader = locks.claim(range(6, 4), Access::Read);
        assert!((&mut late_reader).now_or_never().is_none(), "a reader doesn't overtake a writer");
        assert!(locks.claim(range(100, 1), Access::Write).now_or_never().is_some(), "elsewhere is free");
        drop(first);
        assert!((&mut writer).now_or_never().is_none());
        drop(second);
        let writing = (&mut writer).now_or_never().expect("both readers are gone");
        assert!((&mut late_reader).now_or_never().is_none());
        drop(writing);
        assert!(late_reader.now_or_never().is_some());
        assert!(locks.lock().claims.is_empty() && locks.lock().waiting == 0);
    }

    #[test]
    fn one_who_gives_up_makes_room() {
        let locks = RangeLocks::default();
        let held = locks.claim(range(0, 1), Access::Write).now_or_never().expect("free");
        let waiting = locks.claim(range(0, 2), Access::Write);
        let mut last = locks.claim(range(1, 1), Access::Write);
        assert!((&mut last).now_or_never().is_none());
        drop(waiting);
        assert!(last.now_or_never().is_some());
        drop(held);
        assert!(locks.lock().claims.is_empty());
    }
}
