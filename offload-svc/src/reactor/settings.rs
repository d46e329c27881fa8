//! How to start the reactors.
//!
//! Owns the settings and how they follow from the configuration. Must not start anything. Invariant: the two buffer
//! pools together take no more than `buffers.memory`.

use std::time::Duration;

use super::disk::DiskEngine;
use crate::buffers::{Plan, SizeClass};
use crate::config::schema::{Config, HugePages};
use crate::pool::memory_needs;

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
    "buffers.memory: needed {needed_bytes} bytes at least, for transfers of {largest_bytes} bytes (limits.mdts) and the \
     pool's stripes; found {found_bytes}"
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
        let (host_buffers, internal_buffers) = split(memory, largest, pool_shards(config, cpus.len()))?;
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

/// What plain back ends work with at a time.
const PLAIN_PIECE_BYTES: usize = 256 << 10;

/// The shards that the pool may hold at a time on all reactors, of their largest size. They are reserved, since it
/// takes those of a stripe one after the other: with fewer, stripes could wait for each other's for ever.
fn pool_shards(config: &Config, reactors: usize) -> SizeClass {
    if config.pool.members.is_empty() {
        return SizeClass { bytes: PLAIN_PIECE_BYTES, count: 0, reserved: true };
    }
    let needs = memory_needs(&config.pool.layout(), &config.pool.mount_options());
    let bytes = needs.largest_buffer_bytes.max(1);
    let count = needs.buffer_bytes_per_reactor.div_ceil(bytes).saturating_mul(reactors as u64);
    let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    SizeClass { bytes: size(bytes), count: size(count), reserved: true }
}

/// Half to the hosts, half to the back ends: what a host has in flight passes through the back end once.
fn split(memory_bytes: usize, largest_bytes: usize, shards: SizeClass) -> Result<(Plan, Plan), TooLittleForBuffers> {
    let half = memory_bytes / 2;
    let reserved = shards.bytes.saturating_mul(shards.count);
    let host = Plan::for_memory(half, largest_bytes);
    let internal = half.checked_sub(reserved).and_then(|rest| Plan::for_memory(rest, PLAIN_PIECE_BYTES));
    match (host, internal) {
        (Some(host), Some(internal)) if shards.count == 0 => Ok((host, internal)),
        (Some(host), Some(internal)) => Ok((host, internal.with_reserved(shards.bytes, shards.count))),
        _ => {
            let internal_bytes = reserved.saturating_add(Plan::least_bytes(PLAIN_PIECE_BYTES));
            let needed_bytes = internal_bytes.max(Plan::least_bytes(largest_bytes)).saturating_mul(2);
            Err(TooLittleForBuffers { needed_bytes, found_bytes: memory_bytes, largest_bytes })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h24_buffers_fit_the_memory_or_the_shortage_is_named() {
        let shards = |count| SizeClass { bytes: 128 << 10, count, reserved: true };
        for mib in [1_usize, 2, 4, 8, 64, 256] {
            for shards in [shards(0), shards(60)] {
                match split(mib << 20, 1 << 20, shards) {
                    Ok((host, internal)) => {
                        assert!(host.bytes() + internal.bytes() <= mib << 20);
                        let kept = internal.classes().iter().find(|class| class.reserved);
                        assert_eq!(kept.map_or(0, |class| class.count), shards.count);
                    }
                    Err(short) => {
                        assert!(short.needed_bytes > mib << 20);
                        assert!(split(short.needed_bytes, 1 << 20, shards).is_ok(), "what it asks for is enough");
                    }
                }
            }
        }
    }

    #[test]
    fn the_default_memory_holds_a_pool_on_eight_reactors() {
        let mut config = Config::default();
        config.pool.members = vec!["mem:1GiB".parse().unwrap(); 6];
        let settings = Settings::from_config(&config, 8).unwrap();
        let needs = memory_needs(&config.pool.layout(), &config.pool.mount_options());
        let kept = settings.internal_buffers.classes().iter().find(|class| class.reserved).unwrap();
        assert!(kept.bytes as u64 >= needs.largest_buffer_bytes);
        assert!((kept.bytes * kept.count) as u64 >= 8 * needs.buffer_bytes_per_reactor);
    }
}
