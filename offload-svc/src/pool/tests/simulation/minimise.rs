//! Makes a failing plan shorter, and says how to repeat it.
//!
//! Owns delta debugging over the steps that are kept. Must not know what a step does. Invariant: what it ends with was seen to
//! fail.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::plan::{Plan, Step};
use super::run::{Tally, run};

/// How long a failing plan is made shorter.
const TIME: Duration = Duration::from_secs(60);

/// A plan that failed.
#[derive(Debug)]
pub struct Failure {
    pub seed: u64,
    /// The steps that it needs.
    pub kept: Vec<usize>,
    steps: Vec<(usize, Step)>,
    what: String,
}

/// Runs a seed, or some steps of it.
pub fn attempt(seed: u64, kept: Option<Vec<usize>>) -> Result<Tally, String> {
    let plan = Plan::of(seed);
    let result = catch_unwind(AssertUnwindSafe(|| run(plan, kept)));
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
    })
}

/// The shortest list of steps found for which `fails` holds still; it holds for all `steps` of them.
pub fn shortest(steps: usize, mut fails: impl FnMut(&[usize]) -> bool) -> Vec<usize> {
    let mut kept: Vec<usize> = (0..steps).collect();
    let mut part = kept.len().div_ceil(2);
    while part > 0 {
        let (mut at, before) = (0, kept.len());
        while at < kept.len() {
            let end = (at + part).min(kept.len());
            let fewer: Vec<usize> = kept[..at].iter().chain(&kept[end..]).copied().collect();
            if fails(&fewer) {
                kept = fewer;
            } else {
                at = end;
            }
        }
        part = if part == 1 && kept.len() < before { 1 } else { part / 2 };
    }
    kept
}

impl Failure {
    /// A seed that failed, made shorter.
    pub fn of(seed: u64, what: String) -> Self {
        let (plan, begun) = (Plan::of(seed), Instant::now());
        let mut last = what;
        let kept = shortest(plan.steps.len(), |kept| {
            let outcome = if begun.elapsed() < TIME { attempt(seed, Some(kept.to_vec())) } else { return false };
            outcome.map_err(|what| last = what).is_err()
        });
        let steps = kept.iter().map(|index| (*index, plan.steps[*index])).collect();
        Self { seed, kept, steps, what: last }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept: Vec<String> = self.kept.iter().map(usize::to_string).collect();
        let plan = Plan::of(self.seed);
        writeln!(f, "seed {} fails: {}", self.seed, self.what)?;
        writeln!(f, "  {:?}, {} segments", plan.layout, plan.segments)?;
        for (index, step) in &self.steps {
            writeln!(f, "  step {index}: {step:?}")?;
        }
        write!(
            f,
            "  repeat: SLUICE_SIM_SEED={} SLUICE_SIM_STEPS={} cargo test --release -p offload-svc --lib \
             simulation::one_plan -- --ignored --nocapture",
            self.seed,
            kept.join(",")
        )
    }
}
