//! What the machine gives: CPUs, memory, block devices.
//!
//! Owns the probing. Must not know what a configuration asks for. Invariant: a [`Machine`] is plain data, so that
//! checks against it can be tested without the machine.

use std::fmt;
use std::path::{Path, PathBuf};

use nix::sched::{CpuSet, sched_getaffinity};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::unistd::Pid;

use super::values::CpuList;

/// What this process may use.
#[derive(Debug, Clone)]
pub struct Machine {
    /// CPUs that it may run on.
    pub cpus: Vec<u16>,
    /// Memory that it may take.
    pub memory: FoundMemory,
    /// Names of the block devices.
    pub block_devices: Vec<String>,
}

/// Memory found, and what bounds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundMemory {
    /// How much.
    pub bytes: u64,
    /// What says so.
    pub bound: MemoryBound,
}

/// What bounds the memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryBound {
    /// `MemAvailable` of /proc/meminfo.
    Machine,
    /// The limit of a control group.
    ControlGroup(PathBuf),
    /// The process's limit on its address space.
    AddressSpace,
    /// The process's limit on its data.
    DataSegment,
    /// `service.memory`.
    Configured,
}

impl fmt::Display for MemoryBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("MemAvailable in /proc/meminfo"),
            Self::ControlGroup(file) => write!(f, "{}", file.display()),
            Self::AddressSpace => f.write_str("RLIMIT_AS (ulimit -v)"),
            Self::DataSegment => f.write_str("RLIMIT_DATA (ulimit -d)"),
            Self::Configured => f.write_str("service.memory"),
        }
    }
}

impl Machine {
    /// Looks at the machine.
    pub fn probe() -> Self {
        Self { cpus: available_cpus(), memory: available_memory(), block_devices: block_devices() }
    }

    /// The CPUs as a core list.
    pub fn cpu_list(&self) -> String {
        CpuList(self.cpus.clone()).to_string()
    }
}

fn available_cpus() -> Vec<u16> {
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_else(|_| CpuSet::new());
    let listed: Vec<u16> =
        (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).map(|cpu| cpu as u16).collect();
    if !listed.is_empty() {
        return listed;
    }
    // More CPUs than a cpu_set_t holds: the kernel refuses the call, but the count is still known.
    let count = std::thread::available_parallelism().map_or(1, |n| n.get());
    (0..count as u16).collect()
}

fn available_memory() -> FoundMemory {
    let machine = FoundMemory { bytes: mem_available().unwrap_or(u64::MAX), bound: MemoryBound::Machine };
    let mut bounds = vec![machine];
    bounds.extend(control_group_bounds(Path::new("/sys/fs/cgroup"), Path::new("/proc/self/cgroup")));
    for (resource, bound) in
        [(Resource::RLIMIT_AS, MemoryBound::AddressSpace), (Resource::RLIMIT_DATA, MemoryBound::DataSegment)]
    {
        if let Ok((soft, _)) = getrlimit(resource)
            && soft != RLIM_INFINITY
        {
            bounds.push(FoundMemory { bytes: soft, bound });
        }
    }
    let least = bounds.into_iter().min_by_key(|found| found.bytes);
    least.unwrap_or(FoundMemory { bytes: u64::MAX, bound: MemoryBound::Machine })
}

fn mem_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The limits of the process's control group and of those around it: version 2, or version 1's memory controller.
fn control_group_bounds(root: &Path, membership: &Path) -> Vec<FoundMemory> {
    let Ok(text) = std::fs::read_to_string(membership) else { return Vec::new() };
    let mut bounds = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (base, limit, usage) = match controllers {
            "" => (root.to_owned(), "memory.max", "memory.current"),
            list if list.split(',').any(|c| c == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let innermost = base.join(group.trim_start_matches('/'));
        for folder in innermost.ancestors().take_while(|folder| folder.starts_with(&base)) {
            let number = |file: &str| std::fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
            // "max" is no number, and so no bound. What others in the group hold is not ours to take, except that
            // page cache is given back on demand.
            let Some(max) = number(limit) else { continue };
            let used = number(usage).unwrap_or(0).saturating_sub(reclaimable(folder));
            let bytes = max.saturating_sub(used);
            bounds.push(FoundMemory { bytes, bound: MemoryBound::ControlGroup(folder.join(limit)) });
        }
    }
    bounds
}

fn reclaimable(folder: &Path) -> u64 {
    let Ok(text) = std::fs::read_to_string(folder.join("memory.stat")) else { return 0 };
    let of = |name: &str| -> u64 {
        let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok());
        found.unwrap_or(0)
    };
    of("file") + of("slab_reclaimable")
}

fn block_devices() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/sys/class/block") else { return Vec::new() };
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cpus_and_memory() {
        let machine = Machine::probe();
        assert!(!machine.cpus.is_empty());
        assert!(machine.memory.bytes > 0 && machine.memory.bytes < u64::MAX);
    }

    #[test]
    fn h24_the_tightest_control_group_around_us_counts() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("outer/inner");
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::write(inner.join("memory.max"), "max\n").unwrap();
        let outer = dir.path().join("outer/memory.max");
        std::fs::write(&outer, "67108864\n").unwrap();
        std::fs::write(dir.path().join("outer/memory.current"), "9437184\n").unwrap();
        std::fs::write(dir.path().join("outer/memory.stat"), "anon 1\nfile 8388608\nslab_reclaimable 0\n").unwrap();
        let membership = dir.path().join("cgroup");
        std::fs::write(&membership, "0::/outer/inner\n").unwrap();
        let bounds = control_group_bounds(dir.path(), &membership);
        assert_eq!(bounds, [FoundMemory { bytes: 66060288, bound: MemoryBound::ControlGroup(outer) }]);
    }
}
