//! Metrics in the OpenMetrics text format, which Prometheus scrapes.
//!
//! Owns every metric's name, help and source, in one table: what is declared is given out. Must not count anything itself.
//! Invariant: every metric of [`METRICS`] has its HELP and TYPE in every answer, from the first one on (H158).

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::view::{Member, Pool, Rebuild, Status, Subsystem, Volume};

/// What the metrics are made of.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// The service.
    pub status: Status,
    /// The pool, if there is one.
    pub pool: Option<Pool>,
    /// Its volumes.
    pub volumes: Vec<Volume>,
    /// The subsystems.
    pub subsystems: Vec<Subsystem>,
}

/// Whether it only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; the name in the answer ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// One metric.
pub struct Metric {
    /// Its name, without a counter's `_total`.
    pub name: &'static str,
    /// What it says.
    pub help: &'static str,
    /// Whether it only grows.
    pub kind: Kind,
    series: fn(&Snapshot) -> Vec<Sample>,
}

struct Sample {
    labels: Vec<(&'static str, String)>,
    value: u64,
}

fn plain(value: u64) -> Vec<Sample> {
    vec![Sample { labels: Vec::new(), value }]
}

fn of_pool(snapshot: &Snapshot, value: fn(&Pool) -> u64) -> Vec<Sample> {
    snapshot.pool.iter().flat_map(|pool| plain(value(pool))).collect()
}

fn of_rebuild(snapshot: &Snapshot, value: fn(&Rebuild) -> u64) -> Vec<Sample> {
    let rebuilds = snapshot.pool.iter().map(|pool| pool.rebuild.as_ref().map_or(0, value));
    rebuilds.flat_map(plain).collect()
}

fn of_members(snapshot: &Snapshot, value: fn(&Member) -> u64) -> Vec<Sample> {
    let members = snapshot.pool.iter().flat_map(|pool| &pool.members);
    members.map(|member| Sample { labels: vec![("member", member.index.to_string())], value: value(member) }).collect()
}

fn of_volumes(snapshot: &Snapshot, value: fn(&Volume) -> u64) -> Vec<Sample> {
    let sample = |volume: &Volume| Sample { labels: vec![("volume", volume.name.clone())], value: value(volume) };
    snapshot.volumes.iter().map(sample).collect()
}

macro_rules! reactor {
    ($name:literal, $kind:ident, $help:literal, $field:ident) => {
        Metric {
            name: $name,
            help: $help,
            kind: Kind::$kind,
            series: |snapshot| {
                let sample = |reactor: &super::view::Reactor| Sample {
                    labels: vec![("reactor", reactor.index.to_string())],
                    value: reactor.$field,
                };
                snapshot.status.reactors.iter().map(sample).collect()
            },
        }
    };
}
macro_rules! buffers {
    ($name:literal, $help:literal, $field:ident) => {
        Metric {
            name: $name,
            help: $help,
            kind: Kind::Gauge,
            series: |snapshot| {
                let sample = |class: &super::view::BufferClass| Sample {
                    labels: vec![("users", class.users.clone()), ("size", class.size_bytes.to_string())],
                    value: class.$field,
                };
                snapshot.status.buffers.iter().map(sample).collect()
            },
        }
    };
}
macro_rules! metric {
    ($name:literal, $kind:ident, $help:literal, $series:expr) => {
        Metric { name: $name, help: $help, kind: Kind::$kind, series: $series }
    };
}

/// Every metric there is.
pub const METRICS: &[Metric] = &[
    metric!("sluice_uptime_seconds", Gauge, "Seconds since the service was ready", |s| {
        plain(s.status.uptime_ms / 1000)
    }),
    metric!("sluice_controllers", Gauge, "Hosts connected, one for each subsystem that they use", |s| {
        plain(s.status.controllers)
    }),
    metric!("sluice_io_queues", Gauge, "I/O queues of all hosts", |s| plain(s.status.io_queues)),
    metric!("sluice_subsystem_controllers", Gauge, "Hosts connected to a subsystem", |s| {
        let sample = |subsystem: &Subsystem| Sample {
            labels: vec![("subsystem", subsystem.nqn.clone())],
            value: subsystem.controllers.len() as u64,
        };
        s.subsystems.iter().map(sample).collect()
    }),
    reactor!("sluice_reactor_queues", Gauge, "Connections that a reactor drives", queues),
    reactor!("sluice_reactor_commands", Counter, "Commands that a reactor has completed", commands),
    reactor!("sluice_reactor_received_bytes", Counter, "Bytes received from hosts", received_bytes),
    reactor!("sluice_reactor_sent_bytes", Counter, "Bytes sent to hosts", sent_bytes),
    reactor!("sluice_reactor_busy_polls", Counter, "Rounds in which a reactor had something to do", busy_polls),
    reactor!("sluice_reactor_idle_polls", Counter, "Rounds in which a reactor had nothing to do", idle_polls),
    reactor!("sluice_reactor_sleeps", Counter, "Times that a reactor slept", sleeps),
    reactor!(
        "sluice_reactor_storage_ops",
        Counter,
        "Reads, writes and syncs of members and plain back ends",
        storage_ops
    ),
    reactor!("sluice_reactor_storage_in_flight", Gauge, "Of these, the ones not answered yet", storage_in_flight),
    reactor!("sluice_reactor_storage_errors", Counter, "Of these, the ones that failed", storage_errors),
    reactor!(
        "sluice_reactor_storage_read_bytes",
        Counter,
        "Bytes read from members and plain back ends",
        storage_read_bytes
    ),
    reactor!("sluice_reactor_storage_written_bytes", Counter, "Bytes written to them", storage_written_bytes),
    reactor!("sluice_reactor_slow_readers", Counter, "Hosts cut because they left their data unread", slow_readers),
    reactor!(
        "sluice_reactor_stalled",
        Counter,
        "Queues ended as others waited for buffers that they left idle",
        stalled
    ),
    buffers!("sluice_buffers", "I/O buffers of a size", total),
    buffers!("sluice_buffers_used", "Of these, the ones in use", used),
    buffers!("sluice_buffers_waiting", "Commands that wait for a buffer of a size", waiting),
    metric!("sluice_pool_members_active", Gauge, "Members of the current set that serve", |s| {
        of_pool(s, |p| p.health.members_active)
    }),
    metric!("sluice_pool_members", Gauge, "Members of the pool", |s| of_pool(s, |p| p.health.members_total)),
    metric!("sluice_pool_epoch", Gauge, "Epoch of the member set", |s| of_pool(s, |p| p.epoch)),
    metric!("sluice_pool_raw_bytes", Gauge, "All members together", |s| of_pool(s, |p| p.space.raw_bytes)),
    metric!("sluice_pool_usable_bytes", Gauge, "What can hold user data", |s| of_pool(s, |p| p.space.usable_bytes)),
    metric!("sluice_pool_used_bytes", Gauge, "Of the usable, in use", |s| of_pool(s, |p| p.space.used_bytes)),
    metric!("sluice_pool_free_bytes", Gauge, "Of the usable, free now or after cleaning", |s| of_pool(s, |p| p
        .space
        .free_bytes)),
    metric!("sluice_pool_reclaimable_bytes", Gauge, "Of the free, what comes back by cleaning", |s| {
        of_pool(s, |p| p.space.reclaimable_bytes)
    }),
    metric!("sluice_pool_checkpoint_bytes", Gauge, "Of the metadata, checkpoints", |s| of_pool(s, |p| p
        .space
        .checkpoint_bytes)),
    metric!("sluice_pool_user_bytes", Gauge, "What users have stored, before compression", |s| {
        of_pool(s, |p| p.space.user_bytes)
    }),
    metric!("sluice_pool_map_extents", Gauge, "Extents in all maps", |s| of_pool(s, |p| p.counters.map_extents)),
    metric!("sluice_pool_map_pages_read", Counter, "Pages of maps read from members", |s| {
        of_pool(s, |p| p.counters.map_pages_read)
    }),
    metric!("sluice_pool_parity_bytes", Gauge, "Parity", |s| of_pool(s, |p| p.space.parity_bytes)),
    metric!(
        "sluice_pool_metadata_bytes",
        Gauge,
        "Superblocks, tails shorter than a segment, checkpoints, pages of maps",
        |s| { of_pool(s, |p| p.space.metadata_bytes) }
    ),
    metric!("sluice_pool_reserve_bytes", Gauge, "Kept for cleaning and checkpoints", |s| {
        of_pool(s, |p| p.space.reserve_bytes)
    }),
    metric!("sluice_pool_saved_bytes", Gauge, "What compression saves of the user's bytes", |s| {
        of_pool(s, |p| p.space.saved_bytes.max(0) as u64)
    }),
    metric!("sluice_pool_replay_segments", Gauge, "Segments that a mount would read now", |s| {
        of_pool(s, |p| p.replay_segments)
    }),
    metric!("sluice_pool_mount_milliseconds", Gauge, "How long the last mount took", |s| {
        of_pool(s, |p| p.mount.duration_ms)
    }),
    metric!("sluice_pool_checkpoints", Counter, "Checkpoints taken", |s| of_pool(s, |p| p.counters.checkpoints)),
    metric!("sluice_pool_segments_cleaned", Counter, "Segments cleaned", |s| {
        of_pool(s, |p| p.counters.segments_cleaned)
    }),
    metric!("sluice_pool_written_user_bytes", Counter, "Bytes that hosts have written, before compression", |s| {
        of_pool(s, |p| p.written.user_bytes)
    }),
    metric!("sluice_pool_written_fresh_bytes", Counter, "Records of these, as they were stored", |s| {
        of_pool(s, |p| p.written.fresh_bytes)
    }),
    metric!("sluice_pool_written_moved_bytes", Counter, "Records that cleaning and key rotation wrote again", |s| {
        of_pool(s, |p| p.written.moved_bytes)
    }),
    metric!("sluice_pool_written_page_bytes", Counter, "Pages of maps written", |s| {
        of_pool(s, |p| p.written.page_bytes)
    }),
    metric!("sluice_pool_written_checkpoint_bytes", Counter, "Checkpoints written", |s| {
        of_pool(s, |p| p.written.checkpoint_bytes)
    }),
    metric!("sluice_pool_written_padding_bytes", Counter, "Headers of shards, and room left in stripes", |s| {
        of_pool(s, |p| p.written.padding_bytes)
    }),
    metric!("sluice_pool_written_parity_bytes", Counter, "Parity written of all these but the user's", |s| {
        of_pool(s, |p| p.written.parity_bytes)
    }),
    metric!("sluice_rebuild_running", Gauge, "1 while a member is filled", |s| {
        of_rebuild(s, |r| u64::from(r.state == "running"))
    }),
    metric!("sluice_rebuild_segments", Gauge, "Segments that the member being filled, or the last one, lacked", |s| {
        of_rebuild(s, |r| r.segments_total)
    }),
    metric!("sluice_rebuild_segments_done", Gauge, "Of these, the ones that are whole", |s| {
        of_rebuild(s, |r| r.segments_done)
    }),
    metric!("sluice_rebuild_written_bytes", Gauge, "Bytes written to it for that", |s| {
        of_rebuild(s, |r| r.written_bytes)
    }),
    metric!("sluice_rebuild_left_seconds", Gauge, "How much longer it takes at this pace", |s| {
        of_rebuild(s, |r| r.left_ms.unwrap_or(0).div_ceil(1000))
    }),
    metric!("sluice_scrub_running", Gauge, "1 while a scrub runs", |s| of_pool(s, |p| p.scrub.running.into())),
    metric!("sluice_scrub_segments_left", Gauge, "Segments that it has still to read", |s| {
        of_pool(s, |p| p.scrub.segments_left)
    }),
    metric!("sluice_scrub_stripes", Gauge, "Stripes that it, or the last one, has read", |s| of_pool(s, |p| p
        .scrub
        .stripes)),
    metric!("sluice_scrub_bad_shards", Gauge, "Shards that it has found wrong", |s| of_pool(s, |p| p.scrub.bad_shards)),
    metric!("sluice_scrub_repaired_shards", Gauge, "Of these, the ones that are right again", |s| {
        of_pool(s, |p| p.scrub.repaired_shards)
    }),
    metric!("sluice_scrub_stripes_lost", Gauge, "Stripes that can't be read", |s| of_pool(s, |p| p.scrub.stripes_lost)),
    metric!("sluice_scrub_ended_seconds", Gauge, "When the last scrub ended, in Unix seconds", |s| {
        of_pool(s, |p| p.scrub.ended_s)
    }),
    metric!("sluice_member_active", Gauge, "1 if the member serves in the current set", |s| {
        of_members(s, |m| u64::from(m.state == "active"))
    }),
    metric!("sluice_member_read_errors", Counter, "Reads of a member that failed", |s| of_members(s, |m| m
        .read_errors)),
    metric!("sluice_member_write_errors", Counter, "Writes and syncs of a member that failed", |s| {
        of_members(s, |m| m.write_errors)
    }),
    metric!("sluice_member_timeouts", Counter, "Requests to a member that took longer than the timeout", |s| {
        of_members(s, |m| m.timeouts)
    }),
    metric!("sluice_member_checksum_errors", Counter, "Shards of a member whose checksum was wrong", |s| {
        of_members(s, |m| m.checksum_errors)
    }),
    metric!("sluice_member_repaired", Counter, "Shards of a member rebuilt and written again", |s| {
        of_members(s, |m| m.repaired)
    }),
    metric!("sluice_member_slow_reads", Counter, "Reads that the others served since a member took too long", |s| {
        of_members(s, |m| m.slow_reads)
    }),
    metric!("sluice_volume_size_bytes", Gauge, "Size of a volume as hosts see it", |s| of_volumes(s, |v| v.size_bytes)),
    metric!("sluice_volume_used_bytes", Gauge, "What hosts have written and not deallocated", |s| {
        of_volumes(s, |v| v.used_bytes)
    }),
    metric!("sluice_volume_stored_bytes", Gauge, "What that takes as records, before parity", |s| {
        of_volumes(s, |v| v.stored_bytes)
    }),
];

/// The answer to a scrape.
pub fn render(snapshot: Snapshot) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Table(snapshot)));
    let mut answer = String::new();
    match text::encode(&mut answer, &registry) {
        Ok(()) => answer,
        // A String takes everything; an error could only come from a label or value that doesn't encode.
        Err(fmt::Error) => String::from("# EOF\n"),
    }
}

#[derive(Debug)]
struct Table(Snapshot);

impl Collector for Table {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in METRICS {
            let kind = match metric.kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
            };
            let mut descriptor = encoder.encode_descriptor(metric.name, metric.help, None, kind)?;
            for sample in (metric.series)(&self.0) {
                let mut family = descriptor.encode_family(&sample.labels)?;
                match metric.kind {
                    Kind::Counter => family.encode_counter::<NoLabelSet, _, u64>(&sample.value, None)?,
                    Kind::Gauge => family.encode_gauge(&sample.value)?,
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manage::view::{BufferClass, Reactor};

    fn full() -> Snapshot {
        Snapshot {
            status: Status {
                reactors: vec![Reactor { index: 3, commands: u64::MAX, ..Default::default() }],
                buffers: vec![BufferClass { users: "hosts".into(), size_bytes: 4096, total: 8, used: 1, waiting: 2 }],
                ..Default::default()
            },
            pool: Some(Pool {
                members: vec![Member { state: "active".into(), ..Default::default() }],
                ..Default::default()
            }),
            volumes: vec![Volume { name: "vol0".into(), size_bytes: (1 << 53) + 1, ..Default::default() }],
            subsystems: vec![Subsystem { nqn: "nqn.2026-11.io.example:\"x\"".into(), ..Default::default() }],
        }
    }

    #[test]
    fn h158_every_metric_has_help_and_type_from_the_start() {
        for answer in [render(Snapshot::default()), render(full())] {
            for metric in METRICS {
                let kind = if metric.kind == Kind::Counter { "counter" } else { "gauge" };
                assert!(answer.contains(&format!("# HELP {} {}\n", metric.name, metric.help)), "{}", metric.name);
                assert!(answer.contains(&format!("# TYPE {} {kind}\n", metric.name)), "{}", metric.name);
            }
            assert!(answer.ends_with("# EOF\n"));
        }
    }

    #[test]
    fn h158_every_metric_is_given_out_once_there_is_something() {
        let answer = render(full());
        for metric in METRICS {
            let name =
                if metric.kind == Kind::Counter { format!("{}_total", metric.name) } else { metric.name.to_owned() };
            let given = |line: &str| line.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with([' ', '{']));
            assert!(answer.lines().any(given), "{name}");
        }
    }

    #[test]
    fn h155_values_are_exact_and_labels_escaped() {
        let answer = render(full());
        assert!(answer.contains("sluice_reactor_commands_total{reactor=\"3\"} 18446744073709551615\n"), "{answer}");
        assert!(answer.contains("sluice_volume_size_bytes{volume=\"vol0\"} 9007199254740993\n"), "{answer}");
        assert!(answer.contains("subsystem=\"nqn.2026-11.io.example:\\\"x\\\"\""), "{answer}");
    }

    #[test]
    fn h158_the_documentation_lists_exactly_these() {
        let documented = include_str!("../../../docs/metrics.md");
        let listed: Vec<&str> =
            documented.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
        let given: Vec<String> = METRICS
            .iter()
            .map(|m| if m.kind == Kind::Counter { format!("{}_total", m.name) } else { m.name.to_owned() })
            .collect();
        assert_eq!(listed, given);
    }
}
