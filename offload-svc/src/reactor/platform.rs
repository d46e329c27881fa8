//! What reactors run on: DPDK's lcores, or threads of our own.
//!
//! Owns the choice, DPDK's start, and the threads. Must not know what runs on them. Invariant: with DPDK, rings,
//! buffers and threads are all DPDK's; without it, none is.

use std::io;
use std::thread;

use crate::buffers::{Buffers, BuffersError, Plan};
use crate::ring;

use super::message::Message;
use super::settings::Settings;
use super::start::StartError;

/// What carries the reactors.
pub(super) enum Platform {
    Threads,
    #[cfg(feature = "dpdk")]
    Dpdk {
        eal: &'static sdk_bindings::eal::Eal,
        huge: bool,
    },
}

/// A reactor's thread.
pub(super) enum Running {
    Thread(thread::JoinHandle<()>),
    #[cfg(feature = "dpdk")]
    Lcore(sdk_bindings::lcore::Lcore, &'static sdk_bindings::eal::Eal),
}

impl Running {
    /// Waits for its end. What it panicked with is in the log already.
    pub(super) fn join(self) {
        match self {
            Self::Thread(handle) => drop(handle.join()),
            #[cfg(feature = "dpdk")]
            Self::Lcore(lcore, eal) => drop(lcore.wait(eal)),
        }
    }
}

impl Platform {
    pub(super) fn start(settings: &Settings) -> Result<Self, StartError> {
        #[cfg(feature = "dpdk")]
        if settings.dpdk {
            return dpdk::start(settings);
        }
        if let Some(cpu) = settings.cpus.iter().flatten().find(|cpu| !may_run_on(**cpu)) {
            return Err(StartError::NoSuchCpu { cpu: *cpu });
        }
        Ok(Self::Threads)
    }

    pub(super) fn describe(&self) -> &'static str {
        match self {
            Self::Threads => "threads",
            #[cfg(feature = "dpdk")]
            Self::Dpdk { huge, .. } => dpdk::describe(*huge),
        }
    }

    pub(super) fn buffers(&self, plan: &Plan) -> Result<Buffers, BuffersError> {
        match self {
            Self::Threads => Buffers::in_memory(plan),
            #[cfg(feature = "dpdk")]
            Self::Dpdk { eal, .. } => Buffers::in_mempools(plan, eal),
        }
    }

    pub(super) fn ring(&self, slots: u32) -> Result<ring::Ends<Message>, StartError> {
        match self {
            Self::Threads => Ok(ring::software(slots as usize)),
            #[cfg(feature = "dpdk")]
            Self::Dpdk { eal, .. } => Ok(ring::rte_ring(eal, slots)?),
        }
    }

    /// Runs `job` on a thread of its own, on `cpus`.
    pub(super) fn launch(
        &self,
        index: usize,
        cpus: &[usize],
        job: impl FnOnce() + Send + 'static,
    ) -> Result<Running, StartError> {
        let name = format!("reactor-{index}");
        match self {
            Self::Threads => {
                let cpus = cpus.to_vec();
                let pinned = move || {
                    pin(&cpus);
                    job();
                };
                let handle = thread::Builder::new().name(name).spawn(pinned).map_err(StartError::Thread)?;
                Ok(Running::Thread(handle))
            }
            #[cfg(feature = "dpdk")]
            Self::Dpdk { eal, .. } => {
                let named = move || {
                    name_thread(&name);
                    job();
                };
                Ok(Running::Lcore(sdk_bindings::lcore::Lcore::launch(eal, named)?, eal))
            }
        }
    }
}

fn may_run_on(cpu: usize) -> bool {
    use nix::sched::sched_getaffinity;
    sched_getaffinity(nix::unistd::Pid::from_raw(0)).is_ok_and(|set| set.is_set(cpu).unwrap_or(false))
}

/// Keeps this thread on `cpus`; none: wherever it may run.
fn pin(cpus: &[usize]) {
    use nix::sched::{CpuSet, sched_setaffinity};
    if cpus.is_empty() {
        return;
    }
    let mut set = CpuSet::new();
    let built = cpus.iter().try_for_each(|cpu| set.set(*cpu));
    if let Err(errno) = built.and_then(|()| sched_setaffinity(nix::unistd::Pid::from_raw(0), &set)) {
        // It was allowed when we looked; the CPU went away since. A reactor elsewhere is slower, not wrong.
        tracing::warn!("a reactor is not pinned to CPUs {cpus:?}: {}", io::Error::from(errno));
    }
}

/// DPDK's threads have names of its own; ours show in `top -H`.
#[cfg(feature = "dpdk")]
fn name_thread(name: &str) {
    // Only a name: a kernel without procfs loses nothing else.
    let _ = std::fs::write("/proc/thread-self/comm", name);
}

#[cfg(feature = "dpdk")]
mod dpdk {
    use sdk_bindings::eal::{Eal, EalConfig, LcorePlan, Memory};

    use super::{Platform, Settings, StartError};
    use crate::config::schema::HugePages;
    use crate::reactor::hugepages::{self, HugePageShortage};

    /// EAL's own use: heap elements, mempools' objects, log history.
    const OVERHEAD_MIB: usize = 16;
    /// A slot of a ring, rounded up for the ring's header.
    const RING_SLOT_BYTES: usize = 16;

    pub(super) fn start(settings: &Settings) -> Result<Platform, StartError> {
        #[cfg(test)]
        if cfg!(test) {
            // EAL starts once per process: the tests share one.
            let _ = settings;
            return Ok(Platform::Dpdk { eal: crate::reactor::test_eal(), huge: false });
        }
        let memory_mib = memory_mib(settings);
        let huge = use_hugepages(settings.hugepages, memory_mib)?;
        let lcores = settings.cpus.iter().map(|cpus| LcorePlan { cpus: cpus.clone() }).collect();
        let memory = if huge { Memory::HugePages } else { Memory::OrdinaryPages };
        let eal = Eal::start(&EalConfig { memory, memory_mib, lcores })?;
        Ok(Platform::Dpdk { eal, huge })
    }

    pub(super) fn describe(huge: bool) -> &'static str {
        let memory = if huge { "hugepages" } else { "ordinary pages" };
        Box::leak(format!("{}, {memory}", Eal::version()).into_boxed_str())
    }

    /// What EAL must be given for the buffers and rings of `settings`.
    pub(super) fn memory_mib(settings: &Settings) -> u32 {
        let buffers = settings.host_buffers.bytes() + settings.internal_buffers.bytes();
        let objects: usize = [&settings.host_buffers, &settings.internal_buffers]
            .iter()
            .flat_map(|plan| plan.classes())
            .map(|class| class.count * 256)
            .sum();
        let reactors = settings.cpus.len();
        let rings = reactors * reactors.saturating_sub(1) * settings.ring_slots as usize * RING_SLOT_BYTES;
        let mib = (buffers + objects + rings).div_ceil(1 << 20) + OVERHEAD_MIB;
        // Whole 2 MiB pages.
        u32::try_from(mib.next_multiple_of(2)).unwrap_or(u32::MAX)
    }

    fn use_hugepages(wanted: HugePages, needed_mib: u32) -> Result<bool, StartError> {
        if wanted == HugePages::Off {
            return Ok(false);
        }
        let found = hugepages::find();
        match (hugepages::suffice(&found, needed_mib), wanted) {
            (true, _) => Ok(true),
            (false, HugePages::On) => Err(HugePageShortage { needed_mib, found }.into()),
            (false, _) => {
                tracing::debug!("too few free hugepages for {needed_mib} MiB: ordinary pages");
                Ok(false)
            }
        }
    }
}
