//! Keep Alive (NVMe Base 2.0 §3.9): when a host has been silent for too long.
//!
//! It must not know who carries the traffic. Invariant: a host that sends Keep Alive, or any command, within each
//! timeout is never cut off.

use std::time::{Duration, Instant};

/// Granularity of the timeout (KAS), in units of 100 ms.
pub const GRANULARITY_100MS: u16 = 10;
/// The activity limit of a discovery controller whose host asked for no keep-alive timer.
pub const DISCOVERY_IDLE_LIMIT: Duration = Duration::from_secs(120);

/// What the timer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The host is there.
    Alive,
    /// It has been silent for the whole timeout.
    Expired,
}

/// The keep-alive timer of one controller, traffic-based (TBKAS).
#[derive(Debug, Clone)]
pub struct KeepAlive {
    kato_ms: u32,
    /// What applies when `kato_ms` is 0.
    fallback: Option<Duration>,
    deadline: Option<Instant>,
}

impl KeepAlive {
    /// A timer that starts now. Without a timeout, `fallback` applies.
    pub fn new(kato_ms: u32, fallback: Option<Duration>, now: Instant) -> Self {
        let mut this = Self { kato_ms, fallback, deadline: None };
        this.restart(now);
        this
    }

    /// The timeout that the host set, in ms.
    pub fn kato_ms(&self) -> u32 {
        self.kato_ms
    }

    /// The timeout in force, rounded up to the granularity.
    pub fn timeout(&self) -> Option<Duration> {
        let granule = u64::from(GRANULARITY_100MS) * 100;
        match self.kato_ms {
            0 => self.fallback,
            ms => Some(Duration::from_millis(u64::from(ms).next_multiple_of(granule))),
        }
    }

    /// Changes the timeout (Set Features 0Fh).
    pub fn set(&mut self, kato_ms: u32, now: Instant) {
        self.kato_ms = kato_ms;
        self.restart(now);
    }

    /// A Keep Alive command came.
    pub fn restart(&mut self, now: Instant) {
        self.deadline = self.timeout().and_then(|t| now.checked_add(t));
    }

    /// When to look again.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Looks at the timer. `traffic` is asked once, at the deadline only: has any command come since the last look?
    pub fn check(&mut self, now: Instant, traffic: impl FnOnce() -> bool) -> Verdict {
        match self.deadline {
            Some(deadline) if now >= deadline => {
                if !traffic() {
                    return Verdict::Expired;
                }
                self.restart(now);
                Verdict::Alive
            }
            _ => Verdict::Alive,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn silence_for_the_whole_timeout_expires() {
        let start = Instant::now();
        let mut timer = KeepAlive::new(4001, None, start);
        assert_eq!(timer.timeout(), Some(5 * SECOND), "rounded up to KAS");
        assert_eq!(timer.check(start + 4 * SECOND, || panic!("too early to ask")), Verdict::Alive);
        timer.restart(start + 4 * SECOND);
        assert_eq!(timer.check(start + 8 * SECOND, || false), Verdict::Alive);
        assert_eq!(timer.check(start + 9 * SECOND, || false), Verdict::Expired);
    }

    /// H25: heavy I/O counts as life, even if Keep Alive itself is late.
    #[test]
    fn h25_traffic_keeps_a_host_alive() {
        let start = Instant::now();
        let mut timer = KeepAlive::new(5000, None, start);
        for round in 1..100 {
            assert_eq!(timer.check(start + round * 5 * SECOND, || true), Verdict::Alive);
        }
        assert_eq!(timer.check(start + 500 * SECOND, || false), Verdict::Expired);
    }

    /// H27: without a timeout of its own a discovery connection has the documented limit, an I/O controller none.
    #[test]
    fn h27_no_timeout_means_the_documented_limit() {
        let start = Instant::now();
        assert_eq!(KeepAlive::new(0, None, start).deadline(), None);
        let mut discovery = KeepAlive::new(0, Some(DISCOVERY_IDLE_LIMIT), start);
        assert_eq!(discovery.deadline(), Some(start + DISCOVERY_IDLE_LIMIT));
        discovery.set(10_000, start);
        assert_eq!(discovery.deadline(), Some(start + 10 * SECOND));
        assert_eq!(KeepAlive::new(u32::MAX, None, start).timeout(), Some(Duration::from_millis(4_294_968_000)));
    }
}
