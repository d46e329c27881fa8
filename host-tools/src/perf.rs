//! `nvmf perf`: operations per second and latency of one workload.
//!
//! Owns the workload and its report. Must not know sockets. Invariants: rates are over the time that really passed; the
//! totals are the sums of the lanes; a run that was cut short says so.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use nvmf_target::buffer::IoBuf;
use serde::Serialize;

use crate::error::ToolError;
use crate::lane::{self, CommandQueue, Completion, IoCommand, Range, Source};
use crate::pattern::{Pattern, SplitMix64};
use crate::progress::StopFlag;
use crate::stats::{Latencies, LatencySummary, megabytes_per_second, per_second};

/// Names the layout of the JSON report; a reader compares only reports of equal schema.
pub const SCHEMA: &str = "sluice-perf-1";

/// What to run.
#[derive(Debug, Clone)]
pub struct PerfPlan {
    /// Namespace.
    pub nsid: u32,
    /// Its block size in bytes.
    pub block_bytes: u32,
    /// First block of the region.
    pub slba: u64,
    /// Commands that fit into the region, side by side.
    pub positions: u64,
    /// Blocks a command moves.
    pub command_blocks: u32,
    /// Commands in flight per lane.
    pub depth: usize,
    /// Share of reads in percent.
    pub read_percent: u8,
    /// At random places, not in sequence.
    pub random: bool,
    /// When to stop.
    pub limit: Limit,
    /// Seed of order and data.
    pub seed: u64,
    /// How much of the data can't be compressed, in percent.
    pub random_percent: u8,
}

/// When a run is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// After this time.
    Time(Duration),
    /// After this many commands of all lanes together.
    Count(u64),
}

/// Figures of one direction or of both.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figures {
    /// Commands that completed.
    pub commands: u64,
    /// Bytes they moved.
    pub bytes: u64,
    /// Commands per second; absent if no time passed.
    pub iops: Option<f64>,
    /// 10^6 bytes per second.
    pub mb_per_s: Option<f64>,
    /// Latencies; absent if nothing completed.
    pub latency_us: Option<LatencySummary>,
}

/// What a run gave.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PerfReport {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The workload in words.
    pub workload: String,
    /// The time from the first submission to the last completion, in seconds.
    pub elapsed_s: f64,
    /// Ended by a signal before its limit.
    pub partial: bool,
    /// Reads.
    pub read: Figures,
    /// Writes.
    pub write: Figures,
    /// Both.
    pub total: Figures,
    /// Commands of each lane; their sum is `total.commands`.
    pub lane_commands: Vec<u64>,
    /// Errors of lanes that ended early; empty after a good run.
    pub errors: Vec<String>,
}

/// Runs the workload over `queues`, one thread each. If a lane ended early, its error comes with what was measured.
pub fn run<Q: CommandQueue + Send>(
    plan: &PerfPlan,
    queues: &mut [Q],
    stop: &StopFlag,
    bar: &ProgressBar,
) -> (PerfReport, Option<ToolError>) {
    let shared = Shared { taken: AtomicU64::new(0), stop, start: Instant::now() };
    let lanes = queues.len() as u64;
    let outcomes: Vec<(Lane<'_>, Option<ToolError>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0u64..)
            .zip(queues.iter_mut())
            .map(|(index, queue)| {
                let shared = &shared;
                scope.spawn(move || {
                    let mut lane = Lane::new(plan, shared, index, lanes, bar);
                    let error = lane::run(queue, plan.depth, &mut lane).err();
                    (lane, error)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let report = report(plan, &outcomes, stop);
    (report, outcomes.into_iter().find_map(|(_, error)| error))
}

fn report(plan: &PerfPlan, outcomes: &[(Lane<'_>, Option<ToolError>)], stop: &StopFlag) -> PerfReport {
    let mut elapsed = Duration::ZERO;
    let (mut read, mut write) = (Latencies::default(), Latencies::default());
    for (lane, _) in outcomes {
        elapsed = elapsed.max(lane.last_completion);
        read.merge(&lane.read);
        write.merge(&lane.write);
    }
    let mut total = read.clone();
    total.merge(&write);
    let command_bytes = u64::from(plan.command_blocks) * u64::from(plan.block_bytes);
    let errors: Vec<String> = outcomes.iter().filter_map(|(_, e)| e.as_ref().map(ToString::to_string)).collect();
    let figures = |latencies: &Latencies| {
        let (commands, bytes) = (latencies.count(), latencies.count() * command_bytes);
        let (iops, mb_per_s) = (per_second(commands, elapsed), megabytes_per_second(bytes, elapsed));
        Figures { commands, bytes, iops, mb_per_s, latency_us: latencies.summary() }
    };
    PerfReport {
        schema: SCHEMA,
        workload: describe(plan, outcomes.len()),
        elapsed_s: elapsed.as_secs_f64(),
        partial: stop.is_set(),
        read: figures(&read),
        write: figures(&write),
        total: figures(&total),
        lane_commands: outcomes.iter().map(|(lane, _)| lane.read.count() + lane.write.count()).collect(),
        errors,
    }
}

fn describe(plan: &PerfPlan, lanes: usize) -> String {
    let order = if plan.random { "random" } else { "sequential" };
    let what = match plan.read_percent {
        100 => "read".to_owned(),
        0 => "write".to_owned(),
        percent => format!("{percent} % read, {} % write", 100 - percent),
    };
    let bytes = u64::from(plan.command_blocks) * u64::from(plan.block_bytes);
    format!("{order} {what}, {bytes} bytes a command, {lanes} queues x depth {}", plan.depth)
}

impl PerfReport {
    /// The report as text.
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        let partial = if self.partial { " (PARTIAL: interrupted before its limit)" } else { "" };
        let _ = writeln!(out, "{}: {:.3} s{partial}", self.workload, self.elapsed_s);
        for (name, figures) in [("read", &self.read), ("write", &self.write), ("total", &self.total)] {
            if figures.commands > 0 || name == "total" {
                let _ = writeln!(out, "{name:>6}: {}", figures.to_text());
            }
        }
        for error in &self.errors {
            let _ = writeln!(out, " error: {error}");
        }
        out
    }
}

impl Figures {
    fn to_text(&self) -> String {
        let rate = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.1}"));
        let mut out = format!("{} commands, {} IOPS, {} MB/s", self.commands, rate(self.iops), rate(self.mb_per_s));
        if let Some(l) = self.latency_us {
            let _ = write!(
                out,
                "; latency µs: mean {:.1}, p50 {:.1}, p99 {:.1}, p99.9 {:.1}, max {:.1}",
                l.mean_us, l.p50_us, l.p99_us, l.p999_us, l.max_us
            );
        }
        out
    }
}

struct Shared<'a> {
    /// Commands handed out so far, by all lanes.
    taken: AtomicU64,
    stop: &'a StopFlag,
    start: Instant,
}

struct Lane<'a> {
    plan: &'a PerfPlan,
    shared: &'a Shared<'a>,
    bar: &'a ProgressBar,
    index: u64,
    lanes: u64,
    issued: u64,
    random: SplitMix64,
    /// One buffer a slot, filled once: making fresh random bytes for every write would measure that instead.
    buffers: Vec<Option<IoBuf>>,
    reading: Vec<bool>,
    read: Latencies,
    write: Latencies,
    last_completion: Duration,
}

impl<'a> Lane<'a> {
    fn new(plan: &'a PerfPlan, shared: &'a Shared<'a>, index: u64, lanes: u64, bar: &'a ProgressBar) -> Self {
        // Another seed than `verify` has, so that it doesn't take what is left here for its own.
        let pattern = Pattern { seed: !plan.seed, random_percent: plan.random_percent };
        let bytes = plan.command_blocks as usize * plan.block_bytes as usize;
        let buffers = (0..plan.depth as u64)
            .map(|slot| {
                let mut buffer = IoBuf::heap(bytes);
                pattern.fill((index << 32) | (slot << 16), 1, plan.block_bytes as usize, &mut buffer);
                Some(buffer)
            })
            .collect();
        Self {
            plan,
            shared,
            bar,
            index,
            lanes,
            issued: 0,
            random: SplitMix64(plan.seed ^ (index << 48)),
            buffers,
            reading: vec![false; plan.depth],
            read: Latencies::default(),
            write: Latencies::default(),
            last_completion: Duration::ZERO,
        }
    }

    fn is_over(&self) -> bool {
        if self.shared.stop.is_set() {
            return true;
        }
        match self.plan.limit {
            Limit::Time(limit) => self.shared.start.elapsed() >= limit,
            Limit::Count(count) => self.shared.taken.fetch_add(1, Ordering::Relaxed) >= count,
        }
    }

    fn next_range(&mut self) -> Range {
        let sequence = self.issued * self.lanes + self.index;
        self.issued += 1;
        let position = if self.plan.random {
            self.random.below(self.plan.positions)
        } else {
            sequence % self.plan.positions.max(1)
        };
        let slba = self.plan.slba + position * u64::from(self.plan.command_blocks);
        Range { nsid: self.plan.nsid, slba, lba_count: self.plan.command_blocks }
    }
}

impl Source for Lane<'_> {
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError> {
        if self.is_over() {
            return Ok(None);
        }
        let Some(mut buffer) = self.buffers.get_mut(slot).and_then(Option::take) else { return Ok(None) };
        let range = self.next_range();
        let reading = self.random.below(100) < u64::from(self.plan.read_percent);
        if let Some(mark) = self.reading.get_mut(slot) {
            *mark = reading;
        }
        if reading {
            return Ok(Some(IoCommand::Read { range, buffer }));
        }
        // Each block of each write differs from all others, so that nothing can be gained by seeing it again.
        for block in buffer.chunks_mut(self.plan.block_bytes as usize) {
            let mark = self.random.next().to_le_bytes();
            if let Some(start) = block.first_chunk_mut::<8>() {
                *start = mark;
            }
        }
        Ok(Some(IoCommand::Write { range, buffer }))
    }

    fn completed(&mut self, completion: Completion) -> Result<(), ToolError> {
        let reading = self.reading.get(completion.slot).copied().unwrap_or(false);
        if !completion.status.is_success() {
            let what = if reading { "Read" } else { "Write" };
            return Err(ToolError::Command { what, range: None, status: completion.status });
        }
        let latencies = if reading { &mut self.read } else { &mut self.write };
        latencies.record(completion.latency);
        self.last_completion = self.shared.start.elapsed();
        if let Some(place) = self.buffers.get_mut(completion.slot) {
            *place = completion.buffer;
        }
        match self.plan.limit {
            Limit::Count(_) => self.bar.inc(1),
            Limit::Time(_) => self.bar.set_position(self.last_completion.as_millis() as u64),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::fake::Disk;

    fn plan(limit: Limit) -> PerfPlan {
        PerfPlan {
            nsid: 1,
            block_bytes: 512,
            slba: 16,
            positions: 100,
            command_blocks: 8,
            depth: 4,
            read_percent: 30,
            random: true,
            limit,
            seed: 3,
            random_percent: 50,
        }
    }

    fn run_on(plan: &PerfPlan, lanes: usize, stop: &StopFlag) -> PerfReport {
        let disk = Disk::default();
        let mut queues: Vec<_> = (0..lanes).map(|_| disk.queue(512)).collect();
        let (report, error) = run(plan, &mut queues, stop, &ProgressBar::hidden());
        assert!(error.is_none(), "{error:?}");
        report
    }

    #[test]
    fn h162_figures_agree_with_each_other() {
        let report = run_on(&plan(Limit::Count(1000)), 3, &StopFlag::default());
        assert_eq!(report.total.commands, 1000);
        assert_eq!(report.lane_commands.iter().sum::<u64>(), 1000);
        assert_eq!(report.read.commands + report.write.commands, 1000);
        assert_eq!(report.read.bytes + report.write.bytes, report.total.bytes);
        assert_eq!(report.total.bytes, 1000 * 4096);
        assert!(report.read.commands > 200 && report.read.commands < 400, "{}", report.read.commands);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["total"]["commands"], 1000);
        assert_eq!(json["schema"], SCHEMA);
        assert!(report.to_text().contains("total: 1000 commands"), "{}", report.to_text());
    }

    #[test]
    fn h160_no_time_no_figures_and_one_command_is_one() {
        let nothing = run_on(&plan(Limit::Time(Duration::ZERO)), 2, &StopFlag::default());
        assert_eq!((nothing.total.commands, nothing.total.iops, nothing.partial), (0, None, false));
        assert!(nothing.to_text().contains("0 commands, - IOPS, - MB/s"));
        assert_eq!(run_on(&plan(Limit::Count(1)), 4, &StopFlag::default()).total.commands, 1);
        assert_eq!(run_on(&plan(Limit::Count(0)), 1, &StopFlag::default()).total.commands, 0);
    }

    #[test]
    fn h160_an_interrupted_run_is_marked_and_uses_the_time_that_passed() {
        let stop = StopFlag::default();
        stop.set();
        let report = run_on(&plan(Limit::Time(Duration::from_secs(3600))), 1, &stop);
        assert!(report.partial && report.elapsed_s < 60.0);
        assert!(report.to_text().contains("PARTIAL"));
        assert!(serde_json::to_value(&report).unwrap()["partial"].as_bool().unwrap());
    }

    #[test]
    fn commands_stay_within_the_region() {
        let disk = Disk::default();
        let mut queues = vec![disk.queue(512)];
        let writes = PerfPlan { read_percent: 0, ..plan(Limit::Count(2000)) };
        run(&writes, &mut queues, &StopFlag::default(), &ProgressBar::hidden());
        let blocks = disk.blocks.lock().unwrap();
        assert_eq!(blocks.keys().min(), Some(&(1 << 48 | 16)));
        assert_eq!(blocks.keys().max(), Some(&(1 << 48 | (16 + 800 - 1))));
    }
}
