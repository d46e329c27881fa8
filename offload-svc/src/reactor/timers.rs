//! A reactor's timers.
//!
//! Owns the order of deadlines and who waits for each. Must not know the clock: the time is an argument. Invariant: a
//! timer fires once, never before its time, and costs nothing once its sleeper is gone.

use std::collections::BTreeMap;
use std::task::Waker;
use std::time::Instant;

/// Identifies a timer: its time, and a number that makes it unique.
pub(crate) type TimerKey = (Instant, u64);

/// The timers of one reactor.
#[derive(Default)]
pub(crate) struct Timers {
    waiting: BTreeMap<TimerKey, Waker>,
    next: u64,
}

impl Timers {
    /// Adds a timer.
    pub(crate) fn add(&mut self, at: Instant, waker: Waker) -> TimerKey {
        self.next += 1;
        let key = (at, self.next);
        self.waiting.insert(key, waker);
        key
    }

    /// Changes whom a timer wakes; false if it has fired.
    pub(crate) fn update(&mut self, key: TimerKey, waker: &Waker) -> bool {
        match self.waiting.get_mut(&key) {
            Some(held) => {
                held.clone_from(waker);
                true
            }
            None => false,
        }
    }

    /// Takes a timer away.
    pub(crate) fn remove(&mut self, key: TimerKey) {
        self.waiting.remove(&key);
    }

    /// When the next one fires.
    pub(crate) fn next_at(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((at, _), _)| *at)
    }

    /// Takes the next timer whose time has come.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let first = self.waiting.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    use super::*;

    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn timers_fire_in_order_once_and_not_after_removal() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let counts: Vec<_> = (0..3).map(|_| Arc::new(Count(AtomicU32::new(0)))).collect();
        let mut timers = Timers::default();
        timers.add(at(20), counts[0].clone().into());
        let gone = timers.add(at(10), counts[1].clone().into());
        timers.add(at(10), counts[2].clone().into());
        assert_eq!(timers.next_at(), Some(at(10)));
        assert!(timers.pop_due(at(9)).is_none());
        timers.remove(gone);
        timers.pop_due(at(10)).unwrap().wake();
        assert!(timers.pop_due(at(10)).is_none());
        timers.pop_due(at(30)).unwrap().wake();
        assert_eq!(timers.next_at(), None);
        let fired: Vec<_> = counts.iter().map(|count| count.0.load(Ordering::Relaxed)).collect();
        assert_eq!(fired, [1, 0, 1]);
        assert!(!timers.update(gone, Waker::noop()));
    }
}
