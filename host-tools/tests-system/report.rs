//! One line for each check: PASS, FAIL with the reason, SKIPPED with the reason; and their count.
//!
//! Checks that share a booted guest or a running service are many to one set-up, so a check, not a test function, is what
//! is counted. It must not know what is checked. A check that fails never stops those after it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

#[derive(Default)]
pub struct Report {
    group: String,
    pub passed: u32,
    pub failed: u32,
    pub skipped: u32,
}

impl Report {
    /// Names what the next checks belong to.
    pub fn group(&mut self, name: &str) {
        self.group = name.to_owned();
    }

    /// Runs a check, prints its line, and says whether it passed.
    pub fn check(&mut self, name: &str, body: impl FnOnce() -> anyhow::Result<()>) -> bool {
        self.value(name, body).is_some()
    }

    /// Like [`Report::check`], for a check that hands on what later ones build on.
    pub fn value<T>(&mut self, name: &str, body: impl FnOnce() -> anyhow::Result<T>) -> Option<T> {
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(body));
        let seconds = start.elapsed().as_secs_f64();
        let full = format!("{}/{name}", self.group);
        match result {
            Ok(Ok(value)) => {
                self.passed += 1;
                println!("PASS    {full} ({seconds:.1} s)");
                Some(value)
            }
            Ok(Err(error)) => {
                self.failed += 1;
                println!("FAIL    {full} ({seconds:.1} s): {error:#}");
                None
            }
            Err(panic) => {
                self.failed += 1;
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panicked");
                println!("FAIL    {full} ({seconds:.1} s): {text}");
                None
            }
        }
    }

    /// Counts a check that this machine can't run.
    pub fn skip(&mut self, name: &str, reason: &str) {
        self.skipped += 1;
        println!("SKIPPED {}/{name}: {reason}", self.group);
    }
}
