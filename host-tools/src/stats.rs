//! The arithmetic of measurements: latencies, rates, medians.
//!
//! Owns how figures are made from samples. Must not know what was measured. Invariants: a rate is over the time that
//! really passed, never the time that was planned; percentiles come from merged histograms, never from percentiles;
//! nothing is ever infinite or NaN: a figure that can't be made is absent.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Longest latency told apart, in nanoseconds: one hour. Longer ones count as this.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// Three significant digits: figures are right to 0.1 %.
const SIGNIFICANT_DIGITS: u8 = 3;

/// Latencies of one kind of operation.
#[derive(Debug, Clone)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_NS, SIGNIFICANT_DIGITS).expect("the bounds are constants that fit"))
    }
}

impl Latencies {
    /// Counts one operation.
    pub fn record(&mut self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(LONGEST_NS);
        self.0.saturating_record(ns.clamp(1, LONGEST_NS));
    }

    /// Adds another thread's operations.
    pub fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("all histograms have the same bounds");
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The figures for a report; `None` if nothing was counted.
    pub fn summary(&self) -> Option<LatencySummary> {
        if self.0.is_empty() {
            return None;
        }
        let us = |ns: u64| ns as f64 / 1000.0;
        Some(LatencySummary {
            min_us: us(self.0.min()),
            mean_us: self.0.mean() / 1000.0,
            p50_us: us(self.0.value_at_quantile(0.5)),
            p99_us: us(self.0.value_at_quantile(0.99)),
            p999_us: us(self.0.value_at_quantile(0.999)),
            max_us: us(self.0.max()),
        })
    }
}

/// Latency figures in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Shortest.
    pub min_us: f64,
    /// Arithmetic mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 99 % took at most this.
    pub p99_us: f64,
    /// 99.9 % took at most this.
    pub p999_us: f64,
    /// Longest.
    pub max_us: f64,
}

/// `amount` per second of `elapsed`; `None` if no time passed.
pub fn per_second(amount: u64, elapsed: Duration) -> Option<f64> {
    ratio(amount as f64, elapsed.as_secs_f64())
}

/// Megabytes (10^6 bytes) per second; `None` if no time passed.
pub fn megabytes_per_second(bytes: u64, elapsed: Duration) -> Option<f64> {
    per_second(bytes, elapsed).map(|rate| rate / 1e6)
}

/// `a / b`, or `None` where that isn't a number.
pub fn ratio(a: f64, b: f64) -> Option<f64> {
    let quotient = a / b;
    quotient.is_finite().then_some(quotient)
}

/// The middle of several runs, and how far they lie apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Median (of an even number: the mean of the middle two).
    pub median: f64,
    /// Lowest run.
    pub min: f64,
    /// Highest run.
    pub max: f64,
    /// How many runs.
    pub n: usize,
}

impl Spread {
    /// Over the runs that gave a figure; `None` if none did.
    pub fn of(runs: impl IntoIterator<Item = Option<f64>>) -> Option<Self> {
        let mut runs: Vec<f64> = runs.into_iter().flatten().filter(|v| v.is_finite()).collect();
        runs.sort_by(f64::total_cmp);
        let (min, max) = (*runs.first()?, *runs.last()?);
        let n = runs.len();
        let upper = *runs.get(n / 2)?;
        let median = if n.is_multiple_of(2) { (runs.get(n / 2 - 1)? + upper) / 2.0 } else { upper };
        Some(Self { median, min, max, n })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h162_percentiles_come_from_the_merged_histogram() {
        // One thread fast, one slow: the mean of the two p99s would say 500 µs.
        let (mut fast, mut slow) = (Latencies::default(), Latencies::default());
        (0..9_990).for_each(|_| fast.record(Duration::from_micros(10)));
        (0..10).for_each(|_| slow.record(Duration::from_micros(1000)));
        let mut all = Latencies::default();
        all.merge(&fast);
        all.merge(&slow);
        let summary = all.summary().unwrap();
        assert_eq!(all.count(), fast.count() + slow.count());
        assert!((summary.p50_us - 10.0).abs() < 0.02, "{summary:?}");
        assert!((summary.p99_us - 10.0).abs() < 0.02, "{summary:?}");
        assert!((summary.max_us - 1000.0).abs() < 2.0, "{summary:?}");
        assert!((summary.mean_us - 10.99).abs() < 0.02, "{summary:?}");
    }

    #[test]
    fn h160_no_time_and_no_samples_give_no_figure() {
        assert_eq!(per_second(1000, Duration::ZERO), None);
        assert_eq!(megabytes_per_second(0, Duration::ZERO), None);
        assert_eq!(Latencies::default().summary(), None);
        assert_eq!(Spread::of([None, Some(f64::NAN), Some(f64::INFINITY)]), None);
        let mut zero = Latencies::default();
        zero.record(Duration::ZERO);
        zero.record(Duration::MAX);
        let json = serde_json::to_string(&zero.summary()).unwrap();
        assert!(!json.contains("null") && !json.contains("inf"), "{json}");
    }

    #[test]
    fn medians_of_odd_and_even_runs() {
        assert_eq!(Spread::of([Some(3.0), Some(1.0), Some(2.0)]).unwrap().median, 2.0);
        let even = Spread::of([Some(4.0), Some(1.0), None, Some(2.0), Some(3.0)]).unwrap();
        assert_eq!((even.median, even.min, even.max, even.n), (2.5, 1.0, 4.0, 4));
    }
}
