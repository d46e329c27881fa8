//! Who used how much CPU: this process, another process, the whole machine.
//!
//! Owns the reading of the kernel's counters. Must not know what ran. Invariant: a figure is the difference of two
//! readings of the same counter, the kernel's share (system time) included.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::unistd::{SysconfVar, sysconf};

/// Two readings of ticks are together at most this far off, in the kernel's own rounding.
const TICK_SLACK: Duration = Duration::from_millis(30);

/// Why a counter couldn't be read.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// A file under /proc couldn't be read.
    #[error("/proc/{what}: {source}")]
    Proc {
        /// Which file.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A file under /proc has another shape than expected.
    #[error("/proc/{what}: unexpected contents")]
    Format {
        /// Which file.
        what: String,
    },
    /// getrusage or sysconf failed.
    #[error("reading this process's CPU time: {0}")]
    System(#[from] nix::Error),
}

/// CPU time spent so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// In user mode.
    pub user: Duration,
    /// In the kernel on its behalf.
    pub system: Duration,
}

impl CpuTime {
    /// Both together.
    pub fn total(&self) -> Duration {
        self.user + self.system
    }

    /// What was spent since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self { user: self.user.saturating_sub(earlier.user), system: self.system.saturating_sub(earlier.system) }
    }
}

/// All threads of this process.
pub fn own() -> Result<CpuTime, CpuError> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let duration = |t: nix::sys::time::TimeVal| {
        Duration::from_secs(t.tv_sec().unsigned_abs()) + Duration::from_micros(t.tv_usec().unsigned_abs())
    };
    Ok(CpuTime { user: duration(usage.user_time()), system: duration(usage.system_time()) })
}

/// CPU time of a process, thread by thread: to the nanosecond, where [`of_process`] counts ticks of 10 ms.
#[derive(Debug, Clone, Default)]
pub struct ThreadTimes {
    ticked: Duration,
    threads: BTreeMap<u64, Duration>,
}

impl ThreadTimes {
    /// All threads of process `pid` (/proc/PID/task/TID/schedstat, first field: ns on a CPU).
    pub fn of(pid: u32) -> Result<Self, CpuError> {
        let ticked = of_process(pid)?.total();
        let mut threads = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            // A thread that ends meanwhile, or a kernel without these counters, leaves the ticks.
            let text = std::fs::read_to_string(entry.path().join("schedstat")).unwrap_or_default();
            let ns = text.split_ascii_whitespace().next().and_then(|field| field.parse().ok());
            let tid = entry.file_name().to_str().and_then(|name| name.parse().ok());
            threads.extend(tid.zip(ns.map(Duration::from_nanos)));
        }
        Ok(Self { ticked, threads })
    }

    /// A reading without threads: ticks alone.
    #[cfg(test)]
    pub(crate) fn at(ticked: Duration) -> Self {
        Self { ticked, threads: BTreeMap::new() }
    }

    /// What was spent since `earlier`. Threads that ended in between are in the ticks alone, so these win where they say
    /// clearly more.
    pub fn since(&self, earlier: &Self) -> Duration {
        let ticked = self.ticked.saturating_sub(earlier.ticked);
        let spent =
            |(tid, now): (&u64, &Duration)| now.saturating_sub(earlier.threads.get(tid).copied().unwrap_or_default());
        let precise: Duration = self.threads.iter().map(spent).sum();
        if ticked > precise + TICK_SLACK { ticked } else { precise }
    }
}

/// All threads of process `pid`, those that ended included (proc_pid_stat(5): fields 14 and 15).
pub fn of_process(pid: u32) -> Result<CpuTime, CpuError> {
    let what = format!("{pid}/stat");
    let text = read_proc(&what)?;
    parse_process_stat(&text, ticks_per_second()?).ok_or(CpuError::Format { what })
}

/// Every CPU of the machine together, idle and I/O wait left out (proc_stat(5)): also counts kernel threads and
/// interrupts that no process is charged for, and whatever else runs.
pub fn of_machine() -> Result<Duration, CpuError> {
    let text = read_proc("stat")?;
    parse_machine_stat(&text, ticks_per_second()?).ok_or(CpuError::Format { what: "stat".to_owned() })
}

fn read_proc(what: &str) -> Result<String, CpuError> {
    std::fs::read_to_string(format!("/proc/{what}")).map_err(|source| CpuError::Proc { what: what.to_owned(), source })
}

fn ticks_per_second() -> Result<u64, CpuError> {
    let ticks = sysconf(SysconfVar::CLK_TCK)?.unwrap_or(100);
    Ok(u64::try_from(ticks).unwrap_or(100).max(1))
}

fn ticks(count: u64, per_second: u64) -> Duration {
    Duration::from_nanos(count.saturating_mul(1_000_000_000 / per_second))
}

fn parse_process_stat(text: &str, per_second: u64) -> Option<CpuTime> {
    // The command name (field 2) may hold spaces and brackets; the last ')' ends it. Field 3 follows.
    let (_, after_name) = text.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace().skip(11);
    let user = ticks(fields.next()?.parse().ok()?, per_second);
    let system = ticks(fields.next()?.parse().ok()?, per_second);
    Some(CpuTime { user, system })
}

fn parse_machine_stat(text: &str, per_second: u64) -> Option<Duration> {
    // cpu user nice system idle iowait irq softirq steal guest guest_nice; guest time is within user and nice.
    let line = text.lines().find(|l| l.starts_with("cpu "))?;
    let fields: Vec<u64> = line.split_ascii_whitespace().skip(1).map(str::parse).collect::<Result<_, _>>().ok()?;
    let busy = [0, 1, 2, 5, 6].into_iter().map(|i| fields.get(i).copied().unwrap_or(0)).sum();
    Some(ticks(busy, per_second))
}

/// The CPU's model and how many of them this process may use.
pub fn describe_machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        info.lines().find(|l| l.starts_with(name)).and_then(|l| l.split_once(':')).map(|(_, v)| v.trim().to_owned())
    };
    let model = field("model name").or_else(|| field("CPU part")).unwrap_or_else(|| "unknown CPU".to_owned());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let memory_gib = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let kib: f64 =
            text.lines().find(|l| l.starts_with("MemTotal:"))?.split_ascii_whitespace().nth(1)?.parse().ok()?;
        Some(kib / 1048576.0)
    });
    let memory = memory_gib.map_or_else(String::new, |gib| format!(", {gib:.1} GiB"));
    format!("{model} ({}), {cpus} CPUs{memory}, Linux {}", std::env::consts::ARCH, kernel.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_stat_with_brackets_in_its_name() {
        let text = "77 (a) b (c) R 1 77 77 0 -1 4194304 100 0 0 0 250 50 9 9 20 0 3 0 100 1 1";
        let time = parse_process_stat(text, 100).unwrap();
        assert_eq!(time.user, Duration::from_millis(2500));
        assert_eq!(time.system, Duration::from_millis(500));
        assert_eq!(time.total(), Duration::from_secs(3));
        assert_eq!(parse_process_stat("77 (x) R 1", 100), None);
    }

    #[test]
    fn machine_stat_leaves_idle_and_guest_out() {
        let text = "cpu  100 20 30 9999 8888 4 6 1000 50 5\ncpu0 1 1 1 1\n";
        assert_eq!(parse_machine_stat(text, 100), Some(Duration::from_millis(1600)));
        assert_eq!(parse_machine_stat("intr 5", 100), None);
    }

    #[test]
    fn own_time_grows_with_work_and_agrees_with_proc() {
        let before = own().unwrap();
        let mut x = 1u64;
        while own().unwrap().since(&before).total() < Duration::from_millis(60) {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        let (rusage, proc) = (own().unwrap().total(), of_process(std::process::id()).unwrap().total());
        let apart = rusage.abs_diff(proc);
        assert!(apart < Duration::from_millis(100), "rusage {rusage:?}, /proc {proc:?}");
        assert!(of_machine().unwrap() >= proc);
        assert!(of_process(u32::MAX).is_err());
    }

    #[test]
    fn thread_times_see_what_ticks_miss_and_ticks_what_ended() {
        let times = |ticked_ms, threads: &[(u64, u64)]| ThreadTimes {
            ticked: Duration::from_millis(ticked_ms),
            threads: threads.iter().map(|(tid, us)| (*tid, Duration::from_micros(*us))).collect(),
        };
        let before = times(100, &[(1, 50_000), (2, 50_000)]);
        assert_eq!(times(100, &[(1, 53_500), (2, 50_000)]).since(&before), Duration::from_micros(3_500));
        assert_eq!(times(110, &[(1, 53_500), (3, 2_000)]).since(&before), Duration::from_micros(5_500));
        assert_eq!(times(900, &[(1, 53_500)]).since(&before), Duration::from_millis(800), "a thread ended");
        assert!(ThreadTimes::of(u32::MAX).is_err());
        assert!(!ThreadTimes::of(std::process::id()).unwrap().threads.is_empty());
    }
}
