//! How to start the reactors.
//!
//! Owns the settings and how they follow from the configuration. Must not start anything. Invariant: the two buffer
//! pools together take no more than `buffers.memory`.

use std::time::Duration;

use super::disk::DiskEngine;
use crate::buffers::Plan;
use crate::config::schema::{Config, HugePages};

/// How to start the reactors.
#[derive(Debug, Clone)]
pub struct Settings {
    /// For each reactor, the CPUs that it may run on; none: wherever the process may.
    pub cpus: Vec<Vec<usize>>,
    /// How long an idle reactor polls before it sleeps.
    pub spin: Duration,
    /// Slots of each ring between two reactors.
    pub ring_slots: u32,
    /// Where DPDK's memory lies.
    pub hugepages: HugePages,
    /// Whether DPDK carries the reactors, where it is built in.
    pub dpdk: bool,
    /// Buffers for hosts' data.
    pub host_buffers: Plan,
    /// Buffers for back ends.
    pub internal_buffers: Plan,
    /// What does file I/O.
    pub disk: DiskEngine,
}

/// Memory for buffers that does not hold one of each size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "buffers.memory: needed {needed_bytes} bytes at least, for transfers of {largest_bytes} bytes (limits.mdts); found {found_bytes}"
)]
pub struct TooLittleForBuffers {
    /// The smallest amount that works.
    pub needed_bytes: usize,
    /// The amount configured.
    pub found_bytes: usize,
    /// The largest transfer.
    pub largest_bytes: usize,
}

impl Settings {
    /// From the configuration, for `count` reactors where it names no CPUs.
    pub fn from_config(config: &Config, count: usize) -> Result<Self, TooLittleForBuffers> {
        let reactors = &config.reactors;
        let cpus = match &reactors.cpus {
            Some(list) => list.0.iter().map(|cpu| vec![usize::from(*cpu)]).collect(),
            None => vec![Vec::new(); count.max(1)],
        };
        let memory = usize::try_from(config.buffers.memory.0).unwrap_or(usize::MAX);
        let largest = usize::try_from(config.limits.mdts.0).unwrap_or(usize::MAX);
        let (host_buffers, internal_buffers) = split(memory, largest)?;
        Ok(Self {
            cpus,
            spin: Duration::from_micros(reactors.spin_us),
            ring_slots: reactors.ring_slots,
            hugepages: reactors.hugepages,
            dpdk: cfg!(feature = "dpdk"),
            host_buffers,
            internal_buffers,
            disk: DiskEngine::Auto,
        })
    }
}

/// Half to the hosts, half to the back ends: what a host has in flight passes through the back end once.
fn split(memory_bytes: usize, largest_bytes: usize) -> Result<(Plan, Plan), TooLittleForBuffers> {
    let half = memory_bytes / 2;
    // The pool's stripes and records are up to 1 MiB, whatever hosts may transfer.
    let internal_largest = largest_bytes.max(1 << 20);
    match (Plan::for_memory(half, largest_bytes), Plan::for_memory(half, internal_largest)) {
        (Some(host), Some(internal)) => Ok((host, internal)),
        _ => {
            let needed_bytes = 2 * Plan::least_bytes(internal_largest);
            Err(TooLittleForBuffers { needed_bytes, found_bytes: memory_bytes, largest_bytes })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h24_buffers_fit_the_memory_or_the_shortage_is_named() {
        for mib in [1_usize, 2, 4, 64, 256] {
            match split(mib << 20, 1 << 20) {
                Ok((host, internal)) => assert!(host.bytes() + internal.bytes() <= mib << 20),
                Err(short) => {
                    assert!(short.needed_bytes > mib << 20);
                    assert!(split(short.needed_bytes, 1 << 20).is_ok(), "what it asks for is enough");
                }
            }
        }
    }
}
