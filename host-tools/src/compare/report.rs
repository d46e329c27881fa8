//! What `compare` prints: a table, the verdict in words, and the same as JSON.
//!
//! Owns how measurements are shown. Must not know how they were made. Invariants: text and JSON come from the same values;
//! a loss is said as plainly as a win; a difference within the spread is called none; emulation stands in every title.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use offload_svc::stages::engines;
use serde::Serialize;

use super::workload::{Phase, Shape};
use super::{Measured, Run, Way};
use crate::corpus::Part;
use crate::stats::{LatencySummary, Spread, ratio};

/// Names the layout of the JSON report; a reader compares only reports of equal schema.
pub const SCHEMA: &str = "sluice-compare-1";

/// What was compared, in words and numbers.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    /// CPU, number of CPUs, memory, kernel.
    pub machine: String,
    /// Versions of the tool and of the service, if it says.
    pub versions: String,
    /// The service's cores are this machine's.
    pub emulated: bool,
    /// Where the service is.
    pub target: String,
    /// Data shards.
    pub k: usize,
    /// Parity shards.
    pub m: usize,
    /// Compression of both ways.
    pub compression: String,
    /// Cipher of both ways.
    pub cipher: String,
    /// What the data is.
    pub data: Vec<Part>,
    /// The same in words.
    pub data_lines: Vec<String>,
    /// How many bytes.
    pub data_bytes: usize,
    /// Bytes of one application request.
    pub extent_bytes: usize,
    /// Requests outstanding.
    pub outstanding: usize,
}

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What.
    pub metric: &'static str,
    /// In which unit.
    pub unit: &'static str,
    /// More is better; `None`: neither is.
    pub higher_is_better: Option<bool>,
    /// Over the rounds.
    pub host_side: Option<Spread>,
    /// Over the rounds.
    pub offloaded: Option<Spread>,
    /// Offloaded median by host-side median.
    pub ratio: Option<f64>,
}

/// Latencies of one way over all rounds.
#[derive(Debug, Clone, Serialize)]
pub struct WayLatencies {
    /// Which way.
    pub way: Way,
    /// Writes, from the histograms of all rounds merged.
    pub write_us: Option<LatencySummary>,
    /// Reads, likewise.
    pub read_us: Option<LatencySummary>,
}

/// The whole report.
#[derive(Debug, Clone, Serialize)]
pub struct CompareReport {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// With "emulated DPU" where that is so.
    pub title: String,
    /// A signal ended it early.
    pub partial: bool,
    /// What was compared.
    pub setting: Setting,
    /// Which engine did what on the host.
    pub engines: engines::Explanation,
    /// Threads of the host-side way.
    pub host_side_shape: Shape,
    /// Threads of the offloaded way.
    pub offloaded_shape: Shape,
    /// The table.
    pub rows: Vec<Row>,
    /// Latencies over all rounds.
    pub latencies: Vec<WayLatencies>,
    /// Bytes read and found right, host-side and offloaded.
    pub verified_bytes: [u64; 2],
    /// Bytes read and found wrong.
    pub mismatched_bytes: [u64; 2],
    /// The verdict in words.
    pub verdict: Vec<String>,
    /// Every run.
    pub runs: Vec<Run>,
}

type Figure = fn(&Run) -> Option<f64>;

/// Metric, unit, whether more is better, and where it comes from.
const ROWS: &[(&str, &str, Option<bool>, Figure)] = &[
    ("write throughput", "MB/s", Some(true), |r| r.write.mb_per_s),
    ("read throughput", "MB/s", Some(true), |r| r.read.mb_per_s),
    ("write: CPU of the host", "core-s/GB", Some(false), |r| r.write.host_core_s_per_gb),
    ("read: CPU of the host", "core-s/GB", Some(false), |r| r.read.host_core_s_per_gb),
    ("write: CPU of the service", "core-s/GB", Some(false), |r| r.write.service_core_s_per_gb),
    ("read: CPU of the service", "core-s/GB", Some(false), |r| r.read.service_core_s_per_gb),
    ("write: CPU of host and service", "core-s/GB", Some(false), |r| both(&r.write)),
    ("read: CPU of host and service", "core-s/GB", Some(false), |r| both(&r.read)),
    ("write: other CPU of the machine", "core-s/GB", None, |r| r.write.rest_core_s_per_gb),
    ("read: other CPU of the machine", "core-s/GB", None, |r| r.read.rest_core_s_per_gb),
    ("write: bytes on the wire", "per byte", Some(false), |r| wire(&r.write)),
    ("read: bytes on the wire", "per byte", Some(false), |r| wire(&r.read)),
    ("at rest: records and their parity", "per byte", Some(false), |r| r.at_rest_per_byte),
    ("written to storage, all of it", "per byte", Some(false), |r| r.write.storage_written_per_byte),
    ("write latency p50", "ms", Some(false), |r| ms(&r.write, |l| l.p50_us)),
    ("write latency p99", "ms", Some(false), |r| ms(&r.write, |l| l.p99_us)),
    ("write latency p99.9", "ms", Some(false), |r| ms(&r.write, |l| l.p999_us)),
    ("read latency p50", "ms", Some(false), |r| ms(&r.read, |l| l.p50_us)),
    ("read latency p99", "ms", Some(false), |r| ms(&r.read, |l| l.p99_us)),
    ("read latency p99.9", "ms", Some(false), |r| ms(&r.read, |l| l.p999_us)),
];

fn both(phase: &Phase) -> Option<f64> {
    Some(phase.host_core_s_per_gb? + phase.service_core_s_per_gb?)
}

fn wire(phase: &Phase) -> Option<f64> {
    Some(phase.wire_sent_per_byte? + phase.wire_received_per_byte?)
}

fn ms(phase: &Phase, pick: fn(&LatencySummary) -> f64) -> Option<f64> {
    phase.latency_us.as_ref().map(|l| pick(l) / 1000.0)
}

impl CompareReport {
    /// Puts the report together.
    pub fn new(setting: Setting, measured: Measured) -> Self {
        let runs = measured.runs;
        let rows =
            ROWS.iter().map(|&(metric, unit, better, figure)| row(&runs, metric, unit, better, figure)).collect();
        let latencies = measured
            .latencies
            .iter()
            .map(|(way, write, read)| WayLatencies { way: *way, write_us: write.summary(), read_us: read.summary() })
            .collect();
        let sum = |figure: fn(&Phase) -> u64| {
            [Way::HostSide, Way::Offloaded]
                .map(|way| runs.iter().filter(|r| r.way == way).map(|r| figure(&r.read)).sum())
        };
        let mut report = Self {
            schema: SCHEMA,
            title: title(&setting),
            partial: measured.partial,
            engines: engines::explain().clone(),
            host_side_shape: measured.host_shape,
            offloaded_shape: measured.offloaded_shape,
            rows,
            latencies,
            verified_bytes: sum(|p| p.verified_bytes),
            mismatched_bytes: sum(|p| p.mismatched_bytes),
            verdict: Vec::new(),
            runs,
            setting,
        };
        report.verdict = verdict(&report);
        report
    }

    /// Every byte that was read was right, and something was read both ways.
    pub fn all_right(&self) -> bool {
        self.mismatched_bytes == [0, 0] && self.verified_bytes.iter().all(|b| *b > 0)
    }

    /// The report as text.
    pub fn to_text(&self) -> String {
        let mut lines = vec![self.title.clone()];
        if self.partial {
            lines.push("PARTIAL: interrupted before all rounds were done".to_owned());
        }
        lines.extend(self.setting_lines());
        lines.push(self.table().to_string());
        lines.extend(self.latencies.iter().flat_map(latency_lines));
        for (way, at) in [("host-side", 0), ("offloaded", 1)] {
            let (right, wrong) = (self.verified_bytes[at], self.mismatched_bytes[at]);
            lines.push(format!("{way}: {right} bytes read back and verified, {wrong} mismatched"));
        }
        lines.push(String::new());
        lines.extend(self.verdict.iter().cloned());
        lines.join("\n") + "\n"
    }

    fn setting_lines(&self) -> Vec<String> {
        let s = &self.setting;
        let engines: Vec<String> = self.engines.primitives.iter().map(|p| format!("{} {}", p.name, p.chosen)).collect();
        let mut lines = vec![
            format!("machine   {}", s.machine),
            format!("versions  {}; service at {}", s.versions, s.target),
            format!("stages    {}, {}, crc32c, Reed-Solomon {}+{}, on both sides", s.compression, s.cipher, s.k, s.m),
            format!("engines   {}", engines.join(", ")),
            format!(
                "workload  {:.1} MB in requests of {} KiB, {} outstanding; host-side {} threads, offloaded {} (best of {:?} each)",
                s.data_bytes as f64 / 1e6,
                s.extent_bytes >> 10,
                s.outstanding,
                self.host_side_shape.threads,
                self.offloaded_shape.threads,
                super::THREADS_TRIED,
            ),
        ];
        lines.extend(s.data_lines.iter().map(|line| format!("data      {line}")));
        lines
    }

    fn table(&self) -> Table {
        let n = self.rows.iter().flat_map(|r| [r.host_side, r.offloaded]).flatten().map(|s| s.n).max().unwrap_or(0);
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED);
        let label = if self.setting.emulated { "offloaded, emulated DPU" } else { "offloaded" };
        table.set_header(vec![
            format!("median [min–max] of {n} rounds"),
            "unit".to_owned(),
            "host-side".to_owned(),
            label.to_owned(),
            "offloaded / host".to_owned(),
        ]);
        for row in &self.rows {
            table.add_row(vec![
                row.metric.to_owned(),
                row.unit.to_owned(),
                spread_text(row.host_side),
                spread_text(row.offloaded),
                row.ratio.map_or_else(|| "–".to_owned(), |r| format!("{r:.2}{}", mark(row))),
            ]);
        }
        for column in 2..5 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }
}

fn title(setting: &Setting) -> String {
    let place = if setting.emulated { "emulated DPU (cores of this machine)" } else { "service on another machine" };
    format!("Offloading against host-side processing, {place}")
}

fn latency_lines(latencies: &WayLatencies) -> Vec<String> {
    let name = match latencies.way {
        Way::HostSide => "host-side",
        Way::Offloaded => "offloaded",
    };
    [("write", latencies.write_us), ("read", latencies.read_us)]
        .into_iter()
        .filter_map(|(what, summary)| {
            let l = summary?;
            Some(format!(
                "{name} {what} latency over all rounds: p50 {:.2} ms, p99 {:.2} ms, p99.9 {:.2} ms, longest {:.2} ms",
                l.p50_us / 1e3,
                l.p99_us / 1e3,
                l.p999_us / 1e3,
                l.max_us / 1e3
            ))
        })
        .collect()
}

fn row(runs: &[Run], metric: &'static str, unit: &'static str, better: Option<bool>, figure: Figure) -> Row {
    let spread = |way| Spread::of(runs.iter().filter(|r| r.way == way).map(figure));
    let (host_side, offloaded) = (spread(Way::HostSide), spread(Way::Offloaded));
    let ratio = host_side.zip(offloaded).and_then(|(h, o)| ratio(o.median, h.median));
    Row { metric, unit, higher_is_better: better, host_side, offloaded, ratio }
}

fn spread_text(spread: Option<Spread>) -> String {
    let number = |v: f64| {
        if v >= 100.0 {
            format!("{v:.0}")
        } else if v >= 10.0 {
            format!("{v:.1}")
        } else {
            format!("{v:.3}")
        }
    };
    spread.map_or_else(|| "–".to_owned(), |s| format!("{} [{}–{}]", number(s.median), number(s.min), number(s.max)))
}

/// What a row says about offloading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Judgement {
    Win,
    Loss,
    /// The rounds overlap: no difference that these runs show.
    Even,
    Unknown,
}

fn judge(row: &Row) -> Judgement {
    let (Some(h), Some(o), Some(higher)) = (row.host_side, row.offloaded, row.higher_is_better) else {
        return Judgement::Unknown;
    };
    if h.min <= o.max && o.min <= h.max {
        return Judgement::Even;
    }
    if (o.median > h.median) == higher { Judgement::Win } else { Judgement::Loss }
}

fn mark(row: &Row) -> &'static str {
    match judge(row) {
        Judgement::Win => " better",
        Judgement::Loss => " worse",
        Judgement::Even => " ≈",
        Judgement::Unknown => "",
    }
}

fn verdict(report: &CompareReport) -> Vec<String> {
    let by = |judgement| {
        let names: Vec<String> = report
            .rows
            .iter()
            .filter(|row| judge(row) == judgement)
            .map(|row| format!("{} ({:.2}x)", row.metric, row.ratio.unwrap_or_default()))
            .collect();
        if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
    };
    let mut lines = vec![
        format!("Offloading is better in: {}.", by(Judgement::Win)),
        format!("Offloading is worse in: {}.", by(Judgement::Loss)),
        format!("No difference beyond the spread of the rounds: {}.", by(Judgement::Even)),
    ];
    lines.extend(["write", "read"].into_iter().filter_map(|what| crossover(report, what)));
    if report.setting.emulated {
        lines.push(
            "The service ran on cores of this machine, which it shared with the host's side: throughput and latency are \
             those of one machine doing both; CPU per GB, bytes on the wire and bytes at rest carry over to a real DPU in kind, \
             not in number."
                .to_owned(),
        );
    }
    if report.mismatched_bytes != [0, 0] {
        lines.push(format!("DATA WAS WRONG: {:?} bytes mismatched.", report.mismatched_bytes));
    }
    lines
}

/// The link rate below which the way that is slower here becomes the faster one, because it sends less.
fn crossover(report: &CompareReport, what: &str) -> Option<String> {
    let find = |prefix: &str| report.rows.iter().find(|r| r.metric == format!("{what}{prefix}"));
    let (speed, wire) = (find(" throughput")?, find(": bytes on the wire")?);
    let (hs, os) = (speed.host_side?.median, speed.offloaded?.median);
    let (hw, ow) = (wire.host_side?.median, wire.offloaded?.median);
    let ((slow, slow_wire), (fast_wire, other)) =
        if hs >= os { ((os, ow), (hw, "offloading")) } else { ((hs, hw), (ow, "the host-side way")) };
    // The faster way is held to the slower one's speed where the link carries just slow x fast_wire.
    let gbit = slow * fast_wire * 8.0 / 1000.0;
    (fast_wire > slow_wire).then(|| {
        format!(
            "On a link of less than {gbit:.2} Gbit/s {other} would {what} faster, since it moves fewer bytes over it."
        )
    })
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
