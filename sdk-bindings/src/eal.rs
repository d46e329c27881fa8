//! DPDK's environment (EAL): started once per process, on a thread of its own, never stopped.
//!
//! Owns EAL's arguments (ours alone: no option of a user reaches it, so it never prints its usage), its log lines
//! (they become `tracing` events, target `dpdk`) and its main lcore's thread. Must not know what lcores run.
//! Invariant: an [`Eal`] exists only after EAL has started, and every DPDK object holds on to it.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::sync::{Mutex, mpsc};
use std::thread;

use crate::ffi;
use crate::lcore::LaunchRequest;

/// Where EAL's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Ordinary pages: works everywhere, as root or not.
    OrdinaryPages,
    /// Free hugepages, private to this process: no hugetlbfs mount and no file is needed.
    HugePages,
}

/// One worker lcore: which CPUs its thread may run on. An empty list means wherever the process may.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LcorePlan {
    /// CPU ids as the kernel counts them.
    pub cpus: Vec<usize>,
}

/// How to start EAL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EalConfig {
    /// Where memory comes from.
    pub memory: Memory,
    /// How much memory rings, mempools and [`crate::memory::Zone`]s share, in MiB.
    pub memory_mib: u32,
    /// The worker lcores, numbered from 1. The main lcore, 0, is EAL's own thread and runs nothing.
    pub lcores: Vec<LcorePlan>,
}

/// Why EAL is not running.
#[derive(Debug, thiserror::Error)]
pub enum EalError {
    /// EAL can be started once per process and then lives as long.
    #[error("DPDK was already started in this process")]
    AlreadyStarted,
    /// More lcores than the DPDK library was built for.
    #[error("{wanted} reactors are more than this DPDK build allows ({most})")]
    TooManyLcores {
        /// Worker lcores asked for.
        wanted: usize,
        /// Worker lcores possible.
        most: usize,
    },
    /// A CPU that doesn't exist or is closed to this process.
    #[error("CPU {cpu} is not available to this process")]
    NoSuchCpu {
        /// The CPU asked for.
        cpu: usize,
    },
    /// No thread for EAL's main lcore.
    #[error("no thread for DPDK")]
    Thread(#[source] io::Error),
    /// EAL refused. Its own words stand in the log (target `dpdk`).
    #[error("DPDK did not start with {memory_mib} MiB of {memory:?}: {source} (its messages are in the log)")]
    Refused {
        /// Where memory was to come from.
        memory: Memory,
        /// How much of it.
        memory_mib: u32,
        /// The reason.
        source: io::Error,
    },
}

/// A started EAL.
pub struct Eal {
    workers: usize,
    launches: Mutex<mpsc::Sender<LaunchRequest>>,
    busy: Mutex<BTreeSet<u32>>,
}

static STARTED: Mutex<bool> = Mutex::new(false);

impl Eal {
    /// Starts EAL. Costs about 30 ms; a second call fails, whatever came of the first.
    pub fn start(config: &EalConfig) -> Result<&'static Eal, EalError> {
        check(config)?;
        {
            let mut started = STARTED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if std::mem::replace(&mut *started, true) {
                return Err(EalError::AlreadyStarted);
            }
        }
        let arguments = arguments(config);
        let (launches, requests) = mpsc::channel();
        let (outcome, outcomes) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("eal-main".into())
            .spawn(move || main_thread(&arguments, &outcome, &requests))
            .map_err(EalError::Thread)?;
        let refused = |errno| EalError::Refused {
            memory: config.memory,
            memory_mib: config.memory_mib,
            source: io::Error::from_raw_os_error(errno),
        };
        match outcomes.recv() {
            Ok(0) => {}
            Ok(errno) => return Err(refused(errno)),
            Err(_) => return Err(refused(libc::ECANCELED)),
        }
        let eal = Eal { workers: config.lcores.len(), launches: Mutex::new(launches), busy: Mutex::default() };
        // EAL lives as long as the process: so does its owner.
        Ok(Box::leak(Box::new(eal)))
    }

    /// How many worker lcores there are.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// The DPDK library's name and version.
    pub fn version() -> &'static str {
        // SAFETY: sluice_version returns a static, NUL-terminated string.
        unsafe { CStr::from_ptr(ffi::sluice_version()) }.to_str().unwrap_or("DPDK")
    }

    /// The largest number of worker lcores that this DPDK build allows.
    pub fn most_workers() -> usize {
        // SAFETY: returns a constant.
        unsafe { ffi::sluice_max_lcores() as usize - 1 }
    }

    /// Takes the lowest idle worker lcore out of the idle set.
    pub(crate) fn claim_lcore(&self) -> Option<u32> {
        let mut busy = self.busy.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let lcore = (1..=self.workers as u32).find(|lcore| !busy.contains(lcore))?;
        busy.insert(lcore);
        Some(lcore)
    }

    pub(crate) fn release_lcore(&self, lcore: u32) {
        self.busy.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&lcore);
    }

    pub(crate) fn request_launch(&self, request: LaunchRequest) -> Result<(), LaunchRequest> {
        let launches = self.launches.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        launches.send(request).map_err(|mpsc::SendError(request)| request)
    }
}

/// What EAL would refuse in words that are not ours.
fn check(config: &EalConfig) -> Result<(), EalError> {
    let (wanted, most) = (config.lcores.len(), Eal::most_workers());
    if wanted > most {
        return Err(EalError::TooManyLcores { wanted, most });
    }
    let allowed = allowed_cpus();
    match config.lcores.iter().flat_map(|lcore| &lcore.cpus).find(|cpu| !allowed.contains(cpu)) {
        Some(&cpu) => Err(EalError::NoSuchCpu { cpu }),
        None => Ok(()),
    }
}

/// The CPUs that this process may run on.
fn allowed_cpus() -> BTreeSet<usize> {
    use nix::sched::{CpuSet, sched_getaffinity};
    let Ok(set) = sched_getaffinity(nix::unistd::Pid::from_raw(0)) else { return BTreeSet::new() };
    (0..CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).collect()
}

/// EAL's command line. Nothing in it comes from outside but numbers.
fn arguments(config: &EalConfig) -> Vec<CString> {
    let anywhere: Vec<usize> = allowed_cpus().into_iter().collect();
    let mut lcores = vec![lcore_argument(0, &anywhere)];
    for (index, lcore) in config.lcores.iter().enumerate() {
        let cpus = if lcore.cpus.is_empty() { &anywhere } else { &lcore.cpus };
        lcores.push(lcore_argument(index + 1, cpus));
    }
    let mut words: Vec<String> = ["sluice", "--no-pci", "--no-telemetry"].map(String::from).to_vec();
    words.extend(["-m".into(), config.memory_mib.to_string(), "--main-lcore".into(), "0".into()]);
    words.extend(["--lcores".into(), lcores.join(",")]);
    match config.memory {
        // 22.11 refuses --no-huge together with --in-memory.
        Memory::OrdinaryPages => words.extend(["--no-huge", "--no-shconf"].map(String::from)),
        Memory::HugePages => words.push("--in-memory".into()),
    }
    words.into_iter().filter_map(|word| CString::new(word).ok()).collect()
}

fn lcore_argument(lcore: usize, cpus: &[usize]) -> String {
    let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
    format!("{lcore}@({})", cpus.join(","))
}

/// The main lcore's thread: starts EAL, reports the errno (0: started), then launches lcores on request, since DPDK
/// wants launches to come from the main lcore.
fn main_thread(arguments: &[CString], outcome: &mpsc::SyncSender<i32>, requests: &mpsc::Receiver<LaunchRequest>) {
    let mut argv: Vec<*mut c_char> = arguments.iter().map(|word| word.as_ptr().cast_mut()).collect();
    let argc = argv.len() as c_int;
    argv.push(std::ptr::null_mut());
    // SAFETY: log_line is a plain function that lives for ever and doesn't unwind.
    let ret = unsafe { ffi::sluice_log_open(log_line) };
    // SAFETY: argv holds argc NUL-terminated strings and a closing null pointer, all alive during the call; EAL
    // permutes the pointers (getopt) but doesn't write to the strings, and keeps copies.
    let ret = if ret < 0 { ret } else { unsafe { ffi::sluice_eal_init(argc, argv.as_mut_ptr()) } };
    let started = ret >= 0;
    if outcome.send(if started { 0 } else { -ret }).is_err() || !started {
        return;
    }
    for request in requests {
        request.perform();
    }
}

/// One line of DPDK's log, by its level (rte_log.h: 1 emergency ... 8 debug).
extern "C" fn log_line(level: u32, bytes: *const c_char, len: usize) {
    // SAFETY: the shim passes a buffer of `len` initialised bytes that stays alive during the call.
    let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), len) };
    let text = String::from_utf8_lossy(bytes);
    for line in text.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
        match level {
            0..=4 => tracing::warn!(target: "dpdk", "{line}"),
            5..=6 => tracing::debug!(target: "dpdk", "{line}"),
            _ => tracing::trace!(target: "dpdk", "{line}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(config: &EalConfig) -> Vec<String> {
        arguments(config).iter().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn arguments_name_every_lcore_and_the_kind_of_memory() {
        let lcores = vec![LcorePlan { cpus: vec![200] }, LcorePlan { cpus: vec![1, 3] }];
        let mut config = EalConfig { memory: Memory::OrdinaryPages, memory_mib: 64, lcores };
        let plain = words(&config);
        assert!(plain.iter().any(|word| word.ends_with(",1@(200),2@(1,3)")), "{plain:?}");
        assert!(plain.contains(&"--no-huge".into()) && !plain.contains(&"--in-memory".into()));
        config.memory = Memory::HugePages;
        let huge = words(&config);
        assert!(!huge.contains(&"--no-huge".into()) && huge.contains(&"--in-memory".into()));
    }

    #[test]
    fn h145_a_cpu_that_is_not_there_is_refused_before_eal_sees_it() {
        let lcores = vec![LcorePlan { cpus: vec![5000] }];
        let config = EalConfig { memory: Memory::OrdinaryPages, memory_mib: 64, lcores };
        assert!(matches!(check(&config), Err(EalError::NoSuchCpu { cpu: 5000 })));
        let lcores = vec![LcorePlan::default(); 4096];
        let config = EalConfig { memory: Memory::OrdinaryPages, memory_mib: 64, lcores };
        assert!(matches!(check(&config), Err(EalError::TooManyLcores { wanted: 4096, .. })));
    }
}
