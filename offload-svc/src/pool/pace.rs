//! The pace of background work: as fast as it may go, slower where requests wait.
//!
//! Owns the rate of rebuild and scrub. Must not know what they do. Invariants: over any second no more goes than the
//! configured rate; while more than one request in a hundred takes longer than the budget, the rate halves at every look,
//! down to a floor at which the work still ends.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::env::Env;

/// How often the rate is looked at.
const LOOK: Duration = Duration::from_millis(250);
/// It never goes slower than this, in bytes a second.
const FLOOR: u64 = 2 << 20;
/// Nor, in steps upwards, faster: what no set of members can do.
const CEILING: u64 = 64 << 30;
/// So many requests at least say something about a hundredth of them.
const ENOUGH: u64 = 20;

/// How long the requests of hosts take, as far as background work has to know.
#[derive(Debug)]
pub struct Foreground {
    budget: Duration,
    all: AtomicU64,
    late: AtomicU64,
}

impl Foreground {
    /// `budget` is what 99 of 100 requests should stay within.
    pub fn new(budget: Duration) -> Self {
        Self { budget, all: AtomicU64::new(0), late: AtomicU64::new(0) }
    }

    /// A request was answered.
    pub fn answered(&self, took: Duration) {
        self.all.fetch_add(1, Ordering::Relaxed);
        if took > self.budget {
            self.late.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counts(&self) -> (u64, u64) {
        (self.all.load(Ordering::Relaxed), self.late.load(Ordering::Relaxed))
    }
}

/// The pace of one kind of work.
pub struct Pace {
    /// Bytes a second at most; 0: no limit.
    limit: u64,
    /// Bytes a second now.
    rate: Cell<u64>,
    /// When the next bytes may go.
    free_at: Cell<Option<Instant>>,
    looked_at: Cell<Option<Instant>>,
    seen: Cell<(u64, u64)>,
}

impl Pace {
    pub fn new(limit: u64) -> Self {
        let rate = Cell::new(if limit == 0 { CEILING } else { limit });
        let (free_at, looked_at) = (Cell::default(), Cell::default());
        Self { limit, rate, free_at, looked_at, seen: Cell::default() }
    }

    /// Waits until `bytes` more may be read or written.
    pub async fn spend(&self, env: &dyn Env, foreground: &Foreground, bytes: u64) {
        let now = env.now();
        self.look(now, foreground);
        let free_at = self.free_at.get().map_or(now, |at| at.max(now));
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate.get().max(1));
        self.free_at.set(Some(free_at + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))));
        if free_at > now {
            env.sleep_until(free_at).await;
        }
    }

    fn look(&self, now: Instant, foreground: &Foreground) {
        if self.looked_at.get().is_some_and(|at| now.saturating_duration_since(at) < LOOK) {
            return;
        }
        let first = self.looked_at.replace(Some(now)).is_none();
        let (all, late) = foreground.counts();
        let (all_before, late_before) = self.seen.replace((all, late));
        if first {
            return;
        }
        self.rate.set(next_rate(self.rate.get(), self.limit, all - all_before, late - late_before));
    }
}

/// The rate after `all` requests, of which `late` took too long.
fn next_rate(rate: u64, limit: u64, all: u64, late: u64) -> u64 {
    let most = if limit == 0 { CEILING } else { limit };
    if late * 100 > all.max(ENOUGH) {
        // From an unlimited rate the way down would be long: what is measured starts at a gigabyte a second.
        (rate.min(1 << 30) / 2).max(FLOOR.min(most))
    } else {
        (rate + rate / 4).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Late requests slow the work down to the floor, within seconds; when none is late it is as fast as ever.
    #[test]
    fn the_rate_follows_the_requests() {
        let mut rate = Pace::new(0).rate.get();
        for _ in 0..12 {
            rate = next_rate(rate, 0, 1000, 11);
        }
        assert_eq!(rate, FLOOR);
        assert_eq!(next_rate(rate, 0, 1000, 10), FLOOR + FLOOR / 4, "one in a hundred is within the budget");
        assert_eq!(next_rate(rate, 0, 3, 3), rate, "all of a few are late");
        for _ in 0..60 {
            rate = next_rate(rate, 0, 0, 0);
        }
        assert_eq!(rate, CEILING);
        assert_eq!(next_rate(100 << 20, 100 << 20, 5000, 0), 100 << 20, "the limit stays");
        assert_eq!(next_rate(1 << 20, 1 << 20, 100, 50), 1 << 20, "a limit below the floor is kept");
    }
}
