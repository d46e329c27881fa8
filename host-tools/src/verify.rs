//! `nvmf verify`: writes blocks that say where they belong, reads them back, and names every one that is wrong.
//!
//! Owns the workloads (fill, check, journalled overwrite) and their report. Must not know sockets. Invariants: no two
//! writes to one block are in flight at once, so the last acknowledged one is known; every block of the range is checked
//! or the report says that it wasn't.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use nvmf_target::buffer::IoBuf;
use serde::Serialize;

use crate::error::{ToolError, describe_status};
use crate::journal::{Content, Event, Journal, Model, Record, ViolationKind};
use crate::lane::{self, CommandQueue, Completion, IoCommand, Range, Source};
use crate::pattern::{Pattern, SplitMix64};
use crate::progress::StopFlag;

/// How many faults a report lists one by one; the rest is counted.
const LISTED: usize = 32;

/// Which blocks, and what they hold.
#[derive(Debug, Clone)]
pub struct VerifyPlan {
    /// Namespace.
    pub nsid: u32,
    /// Its block size in bytes.
    pub block_bytes: u32,
    /// First block.
    pub slba: u64,
    /// How many blocks.
    pub lba_count: u64,
    /// Blocks a command moves.
    pub command_blocks: u32,
    /// Commands in flight per lane.
    pub depth: usize,
    /// Content.
    pub pattern: Pattern,
}

/// Shares of a journalled run that are no plain writes, in percent.
#[derive(Debug, Clone, Copy, Default)]
pub struct ZeroingMix {
    /// Write Zeroes.
    pub zeroes_percent: u8,
    /// Deallocate.
    pub deallocate_percent: u8,
}

/// A journalled load.
#[derive(Debug, Clone, Copy)]
pub struct Load<'a> {
    /// Which writes are no plain ones.
    pub mix: ZeroingMix,
    /// Where they are written down.
    pub journal: &'a Mutex<Journal>,
    /// The journal's last generation; this load's begin above it.
    pub last_generation: u64,
    /// When to stop, if no signal does.
    pub limit: Option<Duration>,
}

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// Blocks that were read and compared.
    pub checked_blocks: u64,
    /// Blocks that don't hold what they must, by kind.
    pub faults: BTreeMap<ViolationKind, u64>,
    /// The first faults, one a line.
    pub listed: Vec<String>,
    /// Ended by a signal before every block was checked.
    pub partial: bool,
}

impl CheckReport {
    /// Blocks with wrong, lost or unexpected content.
    pub fn wrong_blocks(&self) -> u64 {
        self.faults.iter().filter(|(kind, _)| **kind != ViolationKind::Unreadable).map(|(_, n)| n).sum()
    }

    /// Blocks that could not be read.
    pub fn unreadable_blocks(&self) -> u64 {
        self.faults.get(&ViolationKind::Unreadable).copied().unwrap_or(0)
    }

    /// The report as text.
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        for line in &self.listed {
            let _ = writeln!(out, "{line}");
        }
        let all: u64 = self.faults.values().sum();
        if all > self.listed.len() as u64 {
            let _ = writeln!(out, "… and {} more", all - self.listed.len() as u64);
        }
        let kinds: Vec<String> = self.faults.iter().map(|(kind, n)| format!("{n} {}", kind.name())).collect();
        let verdict = if all == 0 { "all right".to_owned() } else { kinds.join(", ") };
        let partial = if self.partial { " (PARTIAL: interrupted)" } else { "" };
        let _ = writeln!(out, "{} blocks checked: {verdict}{partial}", self.checked_blocks);
        out
    }

    fn add(&mut self, kind: ViolationKind, line: String) {
        *self.faults.entry(kind).or_default() += 1;
        if self.listed.len() < LISTED {
            self.listed.push(line);
        }
    }

    fn merge(&mut self, other: Self) {
        self.checked_blocks += other.checked_blocks;
        self.partial |= other.partial;
        for (kind, count) in other.faults {
            *self.faults.entry(kind).or_default() += count;
        }
        let room = LISTED - self.listed.len().min(LISTED);
        self.listed.extend(other.listed.into_iter().take(room));
    }
}

fn in_lanes<Q, S, T>(
    queues: &mut [Q],
    make: impl Fn(u64, u64) -> S + Sync,
    depth: usize,
    end: impl Fn(S) -> T,
) -> (Vec<T>, Option<ToolError>)
where
    Q: CommandQueue + Send,
    S: Source + Send,
{
    let lanes = queues.len() as u64;
    let outcomes: Vec<(S, Option<ToolError>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0u64..)
            .zip(queues.iter_mut())
            .map(|(index, queue)| {
                let make = &make;
                scope.spawn(move || {
                    let mut source = make(index, lanes);
                    let error = lane::run(queue, depth, &mut source).err();
                    (source, error)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let mut error = None;
    let mut ends = Vec::with_capacity(outcomes.len());
    for (source, failed) in outcomes {
        ends.push(end(source));
        error = error.or(failed);
    }
    (ends, error)
}

/// Writes `generation` of every block of the plan; returns how many blocks were acknowledged.
pub fn fill<Q: CommandQueue + Send>(
    plan: &VerifyPlan,
    generation: u64,
    queues: &mut [Q],
    stop: &StopFlag,
    bar: &ProgressBar,
) -> (u64, Option<ToolError>) {
    let make = |index, lanes| Fill {
        plan,
        generation,
        ranges: Ranges::every(plan, index, lanes),
        buffers: buffers(plan),
        in_flight: vec![None; plan.depth],
        stop,
        bar,
        written: 0,
    };
    let (written, error) = in_lanes(queues, make, plan.depth, |lane| lane.written);
    (written.iter().sum(), error)
}

/// Reads `runs` of blocks and compares each block with `model`. Also returns the records to append to a journal.
pub fn check<Q: CommandQueue + Send>(
    plan: &VerifyPlan,
    model: &Model,
    runs: Option<&[(u64, u64)]>,
    queues: &mut [Q],
    stop: &StopFlag,
    bar: &ProgressBar,
) -> (CheckReport, Vec<Record>, Option<ToolError>) {
    let make = |index, lanes| Check {
        plan,
        model,
        ranges: match runs {
            Some(runs) => Ranges::of_runs(plan, runs, index, lanes),
            None => Ranges::every(plan, index, lanes),
        },
        again: Vec::new(),
        in_flight: vec![None; plan.depth],
        buffers: buffers(plan),
        stop,
        bar,
        report: CheckReport::default(),
        seen: Vec::new(),
    };
    let (lanes, error) = in_lanes(queues, make, plan.depth, |lane| (lane.report, lane.seen));
    let mut report = CheckReport::default();
    let mut seen = Vec::new();
    for (lane_report, lane_seen) in lanes {
        report.merge(lane_report);
        seen.extend(lane_seen);
    }
    // By block: lanes found them in turns.
    report.listed.sort_by_key(|line| line.split([' ', ':']).nth(1).and_then(|lba| lba.parse::<u64>().ok()));
    (report, seen, error)
}

/// Overwrites blocks in random order until stopped, every write in the journal before it is sent and after it is
/// acknowledged. Returns how many writes were acknowledged.
pub fn overwrite<Q: CommandQueue + Send>(
    plan: &VerifyPlan,
    load: &Load<'_>,
    queues: &mut [Q],
    stop: &StopFlag,
    bar: &ProgressBar,
) -> (u64, Option<ToolError>) {
    let Load { mix, journal, last_generation, limit } = *load;
    let generation = AtomicU64::new(last_generation);
    let start = Instant::now();
    let extents = plan.lba_count / u64::from(plan.command_blocks);
    let make = |index, lanes| Overwrite {
        plan,
        mix,
        journal,
        generation: &generation,
        is_over: move || stop.is_set() || limit.is_some_and(|limit| start.elapsed() >= limit),
        extents,
        index,
        lanes,
        random: SplitMix64(plan.pattern.seed ^ last_generation.rotate_left(32) ^ (index << 48)),
        busy: HashSet::new(),
        in_flight: vec![None; plan.depth],
        buffers: buffers(plan),
        bar,
        acknowledged: 0,
    };
    let (acknowledged, error) = in_lanes(queues, make, plan.depth, |lane| lane.acknowledged);
    (acknowledged.iter().sum(), error)
}

fn buffers(plan: &VerifyPlan) -> Vec<Option<IoBuf>> {
    let bytes = plan.command_blocks as usize * plan.block_bytes as usize;
    (0..plan.depth).map(|_| Some(IoBuf::heap(bytes))).collect()
}

fn take_buffer(buffers: &mut [Option<IoBuf>], slot: usize, range: Range, block_bytes: u32) -> Option<IoBuf> {
    let mut buffer = buffers.get_mut(slot).and_then(Option::take)?;
    buffer.set_len(range.lba_count as usize * block_bytes as usize);
    Some(buffer)
}

/// The commands of one lane, in order.
enum Ranges {
    Every { plan_end: u64, next: u64, stride: u64, command_blocks: u64, nsid: u32 },
    List(std::vec::IntoIter<Range>),
}

impl Ranges {
    fn every(plan: &VerifyPlan, index: u64, lanes: u64) -> Self {
        let command_blocks = u64::from(plan.command_blocks);
        Self::Every {
            plan_end: plan.slba + plan.lba_count,
            next: plan.slba + index * command_blocks,
            stride: lanes * command_blocks,
            command_blocks,
            nsid: plan.nsid,
        }
    }

    fn of_runs(plan: &VerifyPlan, runs: &[(u64, u64)], index: u64, lanes: u64) -> Self {
        let range = |&(slba, count): &(u64, u64)| Range {
            nsid: plan.nsid,
            slba,
            lba_count: count.min(u64::from(plan.command_blocks)) as u32,
        };
        let mine = runs.iter().skip(index as usize).step_by(lanes.max(1) as usize).map(range);
        Self::List(mine.collect::<Vec<_>>().into_iter())
    }
}

impl Iterator for Ranges {
    type Item = Range;
    fn next(&mut self) -> Option<Range> {
        match self {
            Self::List(list) => list.next(),
            Self::Every { plan_end, next, stride, command_blocks, nsid } => {
                let slba = *next;
                let left = plan_end.checked_sub(slba).filter(|left| *left > 0)?;
                *next = slba.saturating_add(*stride);
                Some(Range { nsid: *nsid, slba, lba_count: left.min(*command_blocks) as u32 })
            }
        }
    }
}

struct Fill<'a> {
    plan: &'a VerifyPlan,
    generation: u64,
    ranges: Ranges,
    buffers: Vec<Option<IoBuf>>,
    in_flight: Vec<Option<Range>>,
    stop: &'a StopFlag,
    bar: &'a ProgressBar,
    written: u64,
}

impl Source for Fill<'_> {
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError> {
        if self.stop.is_set() {
            return Ok(None);
        }
        let Some(range) = self.ranges.next() else { return Ok(None) };
        let Some(mut buffer) = take_buffer(&mut self.buffers, slot, range, self.plan.block_bytes) else {
            return Ok(None);
        };
        self.plan.pattern.fill(range.slba, self.generation, self.plan.block_bytes as usize, &mut buffer);
        set(&mut self.in_flight, slot, Some(range));
        Ok(Some(IoCommand::Write { range, buffer }))
    }

    fn completed(&mut self, completion: Completion) -> Result<(), ToolError> {
        let range = take(&mut self.in_flight, completion.slot);
        succeeded("Write", range, &completion)?;
        let blocks = range.map_or(0, |r| u64::from(r.lba_count));
        self.written += blocks;
        self.bar.inc(blocks * u64::from(self.plan.block_bytes));
        set(&mut self.buffers, completion.slot, completion.buffer);
        Ok(())
    }
}

struct Check<'a> {
    plan: &'a VerifyPlan,
    model: &'a Model,
    ranges: Ranges,
    /// Single blocks of a command that failed: which of them can't be read?
    again: Vec<Range>,
    in_flight: Vec<Option<Range>>,
    buffers: Vec<Option<IoBuf>>,
    stop: &'a StopFlag,
    bar: &'a ProgressBar,
    report: CheckReport,
    seen: Vec<Record>,
}

impl Source for Check<'_> {
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError> {
        let Some(range) = self.again.pop().or_else(|| self.ranges.next()) else { return Ok(None) };
        if self.stop.is_set() {
            self.report.partial = true;
            return Ok(None);
        }
        let Some(mut buffer) = take_buffer(&mut self.buffers, slot, range, self.plan.block_bytes) else {
            return Ok(None);
        };
        // What the target doesn't fill in must not look like what was read there before.
        buffer.fill(0xA5);
        set(&mut self.in_flight, slot, Some(range));
        Ok(Some(IoCommand::Read { range, buffer }))
    }

    fn completed(&mut self, completion: Completion) -> Result<(), ToolError> {
        let Some(range) = take(&mut self.in_flight, completion.slot) else { return Ok(()) };
        let buffer = completion.buffer;
        if !completion.status.is_success() {
            self.failed(range, completion.status);
        } else if let Some(bytes) = buffer.as_ref() {
            for (lba, block) in (range.slba..).zip(bytes.chunks(self.plan.block_bytes as usize)) {
                self.compare(lba, block);
            }
        }
        set(&mut self.buffers, completion.slot, buffer);
        Ok(())
    }
}

impl Check<'_> {
    fn failed(&mut self, range: Range, status: nvmf_target::wire::Status) {
        if range.lba_count > 1 {
            let blocks = range.slba..range.slba + u64::from(range.lba_count);
            self.again.extend(blocks.map(|slba| Range { nsid: range.nsid, slba, lba_count: 1 }));
            return;
        }
        let line = format!("LBA {}: unreadable: {}", range.slba, describe_status(status));
        self.report.add(ViolationKind::Unreadable, line);
        self.count_block();
    }

    fn compare(&mut self, lba: u64, block: &[u8]) {
        match self.model.check(self.plan.pattern, lba, block) {
            Ok(record) => self.seen.extend(record),
            Err(fault) => {
                let line =
                    format!("LBA {lba}: {}: expected {}, found {}", fault.kind.name(), fault.expected, fault.found);
                self.report.add(fault.kind, line);
            }
        }
        self.count_block();
    }

    fn count_block(&mut self) {
        self.report.checked_blocks += 1;
        self.bar.inc(u64::from(self.plan.block_bytes));
    }
}

struct Overwrite<'a, F> {
    plan: &'a VerifyPlan,
    mix: ZeroingMix,
    journal: &'a Mutex<Journal>,
    generation: &'a AtomicU64,
    is_over: F,
    /// Command-sized pieces of the range; a lane has every `lanes`-th, so lanes never meet.
    extents: u64,
    index: u64,
    lanes: u64,
    random: SplitMix64,
    busy: HashSet<u64>,
    in_flight: Vec<Option<(u64, Record)>>,
    buffers: Vec<Option<IoBuf>>,
    bar: &'a ProgressBar,
    acknowledged: u64,
}

impl<F> Overwrite<'_, F> {
    /// A run of blocks within one extent that has no write in flight.
    fn pick(&mut self) -> Option<(u64, Range)> {
        let mine = self.extents.checked_sub(self.index).map_or(0, |left| left.div_ceil(self.lanes));
        if self.busy.len() as u64 >= mine {
            return None;
        }
        let mut pick = self.random.below(mine);
        while self.busy.contains(&pick) {
            pick = (pick + 1) % mine;
        }
        let command_blocks = u64::from(self.plan.command_blocks);
        // Half of the writes are whole extents, half a part of one: both paths of a target with larger units are used.
        let (skip, count) = if self.random.below(2) == 0 {
            (0, command_blocks)
        } else {
            let skip = self.random.below(command_blocks);
            (skip, 1 + self.random.below(command_blocks - skip))
        };
        let slba = self.plan.slba + (pick * self.lanes + self.index) * command_blocks + skip;
        Some((pick, Range { nsid: self.plan.nsid, slba, lba_count: count as u32 }))
    }

    fn append(&self, record: Record) -> Result<(), ToolError> {
        // A thread that panicked while appending left at most a record cut short, which the next open drops.
        self.journal.lock().unwrap_or_else(std::sync::PoisonError::into_inner).append(&[record])?;
        Ok(())
    }
}

impl<F: Fn() -> bool> Source for Overwrite<'_, F> {
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError> {
        if (self.is_over)() {
            return Ok(None);
        }
        let Some((extent, range)) = self.pick() else { return Ok(None) };
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let dice = self.random.below(100);
        let zeroes = u64::from(self.mix.zeroes_percent);
        let command = if dice < zeroes {
            IoCommand::WriteZeroes { range }
        } else if dice < zeroes + u64::from(self.mix.deallocate_percent) {
            IoCommand::Deallocate { range }
        } else {
            let taken = take_buffer(&mut self.buffers, slot, range, self.plan.block_bytes);
            let Some(mut buffer) = taken else { return Ok(None) };
            self.plan.pattern.fill(range.slba, generation, self.plan.block_bytes as usize, &mut buffer);
            IoCommand::Write { range, buffer }
        };
        let content = if matches!(command, IoCommand::Write { .. }) { Content::Pattern } else { Content::Zeroes };
        let event = Event::Issued(content);
        let record = Record { event, lba_count: range.lba_count, slba: range.slba, generation };
        self.append(record)?;
        self.busy.insert(extent);
        set(&mut self.in_flight, slot, Some((extent, record)));
        Ok(Some(command))
    }

    fn completed(&mut self, completion: Completion) -> Result<(), ToolError> {
        let Some((extent, issued)) = take(&mut self.in_flight, completion.slot) else { return Ok(()) };
        self.busy.remove(&extent);
        let content = match issued.event {
            Event::Issued(content) | Event::Acknowledged(content) | Event::Seen(content) => content,
        };
        let range = Range { nsid: self.plan.nsid, slba: issued.slba, lba_count: issued.lba_count };
        let what = if content == Content::Pattern { "Write" } else { "Write Zeroes or Deallocate" };
        succeeded(what, Some(range), &completion)?;
        self.append(Record { event: Event::Acknowledged(content), ..issued })?;
        self.acknowledged += 1;
        self.bar.inc(1);
        if completion.buffer.is_some() {
            set(&mut self.buffers, completion.slot, completion.buffer);
        }
        Ok(())
    }
}

fn succeeded(what: &'static str, range: Option<Range>, completion: &Completion) -> Result<(), ToolError> {
    if completion.status.is_success() {
        return Ok(());
    }
    Err(ToolError::Command { what, range, status: completion.status })
}

fn set<T>(slots: &mut [Option<T>], slot: usize, value: Option<T>) {
    if let Some(place) = slots.get_mut(slot) {
        *place = value;
    }
}

fn take<T>(slots: &mut [Option<T>], slot: usize) -> Option<T> {
    slots.get_mut(slot).and_then(Option::take)
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
