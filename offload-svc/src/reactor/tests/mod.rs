//! Reactors at work, on threads and on DPDK's lcores alike.

mod client;
mod life;
mod serving;

use std::time::{Duration, Instant};

use super::disk::DiskEngine;
use super::{Reactors, Settings};
use crate::buffers::{Plan, SizeClass};
use crate::config::schema::HugePages;

/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(30);

fn settings(count: usize, dpdk: bool) -> Settings {
    let plan = || Plan::for_memory(8 << 20, 1 << 20).unwrap();
    Settings {
        cpus: vec![Vec::new(); count],
        spin: Duration::from_micros(20),
        ring_slots: 64,
        hugepages: HugePages::Off,
        dpdk,
        host_buffers: plan(),
        internal_buffers: plan(),
        disk: DiskEngine::Auto,
    }
}

/// A pool with so many 4 KiB buffers, and one of 64 KiB and of 1 MiB.
fn scarce(count: usize) -> Plan {
    let class = |bytes, count| SizeClass { bytes, count, reserved: false };
    Plan::new(vec![class(4 << 10, count), class(64 << 10, 1), class(1 << 20, 1)])
}

/// Runs a check on each platform that is built in.
fn on_each_platform(check: impl Fn(bool)) {
    check(false);
    if cfg!(feature = "dpdk") {
        check(true);
    }
}

/// Reactors that are stopped at the end of a test.
struct Running(Reactors);

impl Running {
    fn start(settings: &Settings) -> Self {
        Self(Reactors::start(settings).unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.stop(Duration::from_secs(1));
    }
}

impl std::ops::Deref for Running {
    type Target = Reactors;
    fn deref(&self) -> &Reactors {
        &self.0
    }
}

fn eventually(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
