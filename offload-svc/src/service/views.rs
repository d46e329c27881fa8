//! What the management API shows of the running service.
//!
//! Owns the translation from the parts' snapshots. Must not change anything. Invariant: every figure is one that a part
//! counts; nothing is guessed.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use nvmf_target::target::{ControllerSnapshot, SubsystemSnapshot, TargetSnapshot};

use super::live::Live;
use super::storage::Storage;
use crate::buffers::ClassSnapshot;
use crate::config::values::BackendSpec;
use crate::manage::metrics::Snapshot;
use crate::manage::view;
use crate::pool::{
    Health, KeyStatus, MemberState, MemberStatus, MountReport, PoolStatus, RebuildState, RebuildStatus, ScrubFinding,
    ScrubStatus, Space, VolumeStatus, WriteTraffic,
};
use crate::reactor::ReactorSnapshot;

pub(super) fn status(live: &Live) -> view::Status {
    let target = live.target().snapshot();
    let reactors = live.reactors().snapshot();
    let hosts = target.controllers.iter().filter(|controller| controller.subsystem.is_some());
    view::Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_ms: live.uptime_ms(),
        state: live.state().name().to_owned(),
        waits_for: waits_for(&target),
        platform: live.reactors().platform().to_owned(),
        reactors: reactors.iter().enumerate().map(|(index, reactor)| self::reactor(index, reactor)).collect(),
        buffers: buffers(live),
        subsystems: target.subsystems.len() as u64,
        namespaces: target.subsystems.iter().map(|subsystem| subsystem.namespaces.len() as u64).sum(),
        controllers: hosts.clone().count() as u64,
        io_queues: hosts.map(|controller| controller.queues.len() as u64).sum(),
        listeners: listeners(&target),
        pool: live.storage().map(|storage| health(&storage.pool().status())),
    }
}

fn health(pool: &PoolStatus) -> view::PoolHealth {
    let active = pool.members.iter().filter(|member| member.state == MemberState::Active).count();
    let state = match pool.health {
        Health::Healthy => "healthy",
        Health::Degraded => "degraded",
        Health::Failed => "failed",
    };
    view::PoolHealth {
        state: state.to_owned(),
        members_active: active as u64,
        members_total: pool.members.len() as u64,
    }
}

pub(super) fn pool(storage: &Storage) -> view::Pool {
    let pool = storage.pool().status();
    let (data, parity) = (u64::from(pool.data_shards), u64::from(pool.parity_shards));
    let stored = (pool.space.logical_bytes > 0).then(|| pool.space.used_bytes as f64 / pool.space.logical_bytes as f64);
    view::Pool {
        uuid: pool.uuid.to_string(),
        health: health(&pool),
        k: data,
        m: parity,
        segment_bytes: pool.segment_bytes.into(),
        epoch: pool.epoch,
        members: pool.members.iter().map(member).collect(),
        unopened: storage.unopened(),
        rebuild: pool.rebuild.as_ref().map(rebuild),
        scrub: scrub(&pool.scrub),
        space: space(&pool.space),
        stored_bytes_per_user_byte: stored,
        rest_bytes_per_user_byte: stored.map(|stored| stored * (data + parity) as f64 / data as f64),
        mount: mount(&pool.mount, storage.is_new()),
        anchor: storage.anchor().map(|anchor| {
            let (generation, error) = anchor.state();
            let newest = storage.pool().publication().generation;
            view::Anchor { file: anchor.file().display().to_string(), generation, newest, error }
        }),
        given_up: (pool.given_up.times > 0).then_some(view::GivenUp {
            times: pool.given_up.times,
            last_s: pool.given_up.last_s,
            stripes: pool.given_up.stripes,
            segments: pool.given_up.segments,
        }),
        replay_segments: pool.replay_segments,
        replay_segments_max: pool.max_replay_segments,
        counters: view::PoolCounters {
            checkpoints: pool.checkpoints,
            segments_cleaned: pool.cleaned_segments,
            map_extents: pool.map_extents,
            map_pages_read: pool.map_pages_read,
        },
        written: written(&pool.traffic),
    }
}

fn written(traffic: &WriteTraffic) -> view::WriteTraffic {
    view::WriteTraffic {
        user_bytes: traffic.user_bytes,
        fresh_bytes: traffic.fresh_bytes,
        moved_bytes: traffic.moved_bytes,
        page_bytes: traffic.page_bytes,
        checkpoint_bytes: traffic.checkpoint_bytes,
        padding_bytes: traffic.padding_bytes,
        parity_bytes: traffic.parity_bytes,
        amplification: traffic.amplification(),
        log_amplification: traffic.log_amplification(),
    }
}

fn member(member: &MemberStatus) -> view::Member {
    let state = match member.state {
        MemberState::Active => "active",
        MemberState::Out => "out",
        MemberState::Missing => "missing",
        MemberState::Stale => "stale",
        MemberState::Rebuilding => "rebuilding",
    };
    view::Member {
        index: member.index.into(),
        source: member.name.clone().unwrap_or_default(),
        uuid: member.uuid.to_string(),
        state: state.to_owned(),
        epoch: member.epoch,
        read_errors: member.read_errors,
        write_errors: member.write_errors,
        timeouts: member.timeouts,
        checksum_errors: member.bad_shards,
        repaired: member.repaired_shards,
        slow_reads: member.slow_reads,
        remarks: member.remarks.iter().map(ToString::to_string).collect(),
    }
}

fn rebuild(rebuild: &RebuildStatus) -> view::Rebuild {
    let state = match rebuild.state {
        RebuildState::Running => "running",
        RebuildState::Done => "done",
        RebuildState::Failed => "failed",
    };
    view::Rebuild {
        index: rebuild.index.into(),
        source: rebuild.name.clone().unwrap_or_default(),
        uuid: rebuild.uuid.to_string(),
        replacing: rebuild.replacing,
        state: state.to_owned(),
        segments_total: rebuild.segments_total,
        segments_done: rebuild.segments_done,
        written_bytes: rebuild.written_bytes,
        stripes_lost: rebuild.stripes_lost,
        elapsed_ms: rebuild.elapsed_ms,
        left_ms: rebuild.left_ms,
    }
}

fn scrub(scrub: &ScrubStatus) -> view::Scrub {
    let finding = |finding: &ScrubFinding| view::Finding {
        member: finding.member.into(),
        segment: finding.segment.into(),
        shards: finding.shards,
    };
    view::Scrub {
        running: scrub.running,
        started_s: scrub.started_s,
        ended_s: scrub.ended_s,
        segments_left: scrub.segments_left,
        stripes: scrub.stripes,
        bad_shards: scrub.bad_shards,
        repaired_shards: scrub.repaired_shards,
        stripes_lost: scrub.stripes_lost,
        findings: scrub.findings.iter().map(finding).collect(),
    }
}

fn space(space: &Space) -> view::Space {
    view::Space {
        raw_bytes: space.raw_bytes,
        usable_bytes: space.used_bytes + space.free_bytes + space.reclaimable_bytes,
        parity_bytes: space.parity_bytes,
        metadata_bytes: space.metadata_bytes + space.checkpoint_bytes,
        checkpoint_bytes: space.checkpoint_bytes,
        reserve_bytes: space.reserve_bytes,
        used_bytes: space.used_bytes,
        free_bytes: space.free_bytes + space.reclaimable_bytes,
        reclaimable_bytes: space.reclaimable_bytes,
        user_bytes: space.logical_bytes,
        saved_bytes: space.saved_bytes(),
    }
}

fn mount(report: &MountReport, formatted: bool) -> view::MountReport {
    let numbers = |members: &[u8]| members.iter().map(|member| u64::from(*member)).collect();
    let kind = match (formatted, report.clean) {
        (true, _) => "formatted",
        (false, true) => "clean",
        (false, false) => "recovered",
    };
    view::MountReport {
        kind: kind.to_owned(),
        duration_ms: report.duration_ms,
        segments_scanned: report.segments_scanned,
        stripes_replayed: report.stripes_replayed,
        stripes_healed: report.stripes_healed,
        stripes_discarded: report.stripes_discarded,
        records_replayed: report.records_replayed,
        members_missing: numbers(&report.members_missing),
        members_stale: numbers(&report.members_stale),
        summary: report.to_string(),
    }
}

pub(super) fn volumes(live: &Live) -> Option<Vec<view::Volume>> {
    let volumes = live.storage()?.pool().volumes();
    Some(volumes.iter().map(|volume| self::volume(live, volume)).collect())
}

pub(super) fn key(key: &KeyStatus) -> view::VolumeKey {
    view::VolumeKey {
        volume: key.volume.clone(),
        cipher: key.cipher.clone(),
        epoch: key.epoch.into(),
        rotating: key.rotating,
        left_bytes: key.left_bytes,
        stored_bytes: key.stored_bytes,
    }
}

pub(super) fn volume(live: &Live, volume: &VolumeStatus) -> view::Volume {
    let ratio = (volume.used_bytes > 0).then(|| volume.stored_bytes as f64 / volume.used_bytes as f64);
    view::Volume {
        name: volume.name.clone(),
        uuid: volume.uuid.to_string(),
        size_bytes: volume.size_bytes,
        block_bytes: volume.block_bytes.into(),
        compression: volume.compression.clone(),
        cipher: volume.cipher.clone(),
        used_bytes: volume.used_bytes,
        stored_bytes: volume.stored_bytes,
        snapshot: volume.snapshot,
        origin: volume.origin.clone(),
        ratio,
        served_by: live.ledger().server_of(&volume.name).map(|(nqn, nsid)| format!("{nqn} nsid {nsid}")),
    }
}

/// Commands that back ends have and haven't answered, if any: what a change that isn't finished waits for.
fn waits_for(target: &TargetSnapshot) -> String {
    let in_flight: usize = target.controllers.iter().flat_map(|c| &c.queues).map(|queue| queue.in_flight).sum();
    if in_flight == 0 { String::new() } else { format!("{in_flight} commands that back ends have not answered") }
}

fn reactor(index: usize, reactor: &ReactorSnapshot) -> view::Reactor {
    view::Reactor {
        index: index as u64,
        queues: reactor.queues as u64,
        commands: reactor.commands,
        received_bytes: reactor.received_bytes,
        sent_bytes: reactor.sent_bytes,
        busy_polls: reactor.busy_polls,
        idle_polls: reactor.idle_polls,
        sleeps: reactor.sleeps,
        slow_readers: reactor.slow_readers,
        stalled: reactor.stalled,
        storage_ops: reactor.io_started,
        storage_in_flight: reactor.io_started.saturating_sub(reactor.io_finished),
        storage_errors: reactor.io_errors,
        storage_read_bytes: reactor.read_bytes,
        storage_written_bytes: reactor.written_bytes,
    }
}

fn buffers(live: &Live) -> Vec<view::BufferClass> {
    let class = |users: &str, class: &ClassSnapshot| view::BufferClass {
        users: users.to_owned(),
        size_bytes: class.bytes as u64,
        total: class.count as u64,
        used: class.used as u64,
        waiting: class.waiting as u64,
    };
    let hosts = live.reactors().host_buffers().snapshot();
    let back_ends = live.reactors().internal_buffers().snapshot();
    hosts.iter().map(|c| class("hosts", c)).chain(back_ends.iter().map(|c| class("back ends", c))).collect()
}

pub(super) fn listeners(target: &TargetSnapshot) -> Vec<view::Listener> {
    target.listeners.iter().map(|listener| self::listener(listener.address)).collect()
}

fn listener(address: SocketAddr) -> view::Listener {
    // `SocketAddr` prints brackets around IPv6, and the scope as a number, which can be used again.
    let bare = match address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => format!("{}%{}", v6.ip(), v6.scope_id()),
        _ => address.ip().to_string(),
    };
    view::Listener { transport: "tcp".into(), address: bare, port: address.port(), endpoint: address.to_string() }
}

pub(super) fn subsystems(live: &Live) -> Vec<view::Subsystem> {
    let target = live.target().snapshot();
    let objects = live.ledger().objects();
    let backends = objects.namespaces().map(|(nqn, namespace)| ((nqn.as_str(), namespace.nsid), &namespace.backend));
    let backends = backends.collect();
    target.subsystems.iter().map(|subsystem| self::subsystem(subsystem, &target, &backends)).collect()
}

fn subsystem(
    subsystem: &SubsystemSnapshot,
    target: &TargetSnapshot,
    backends: &BTreeMap<(&str, u32), &BackendSpec>,
) -> view::Subsystem {
    let of_it = |c: &&ControllerSnapshot| c.subsystem.as_ref() == Some(&subsystem.nqn);
    let namespace = |ns: &nvmf_target::target::NamespaceSnapshot| view::Namespace {
        nsid: ns.nsid,
        backend: backends.get(&(subsystem.nqn.as_str(), ns.nsid)).map(|spec| spec.to_string()).unwrap_or_default(),
        uuid: ns.uuid.to_string(),
        size_bytes: ns.block_count.saturating_mul(ns.block_bytes.into()),
        block_bytes: ns.block_bytes.into(),
    };
    view::Subsystem {
        nqn: subsystem.nqn.clone(),
        serial: subsystem.serial.clone(),
        allow_any_host: subsystem.allow_any_host,
        hosts: subsystem.hosts.clone(),
        namespaces: subsystem.namespaces.iter().map(namespace).collect(),
        controllers: target.controllers.iter().filter(of_it).map(controller).collect(),
    }
}

fn controller(controller: &ControllerSnapshot) -> view::Controller {
    view::Controller {
        cntlid: controller.cntlid.into(),
        host: controller.host.clone(),
        peer: controller.peer.to_string(),
        io_queues: controller.queues.len() as u64,
        kato_ms: controller.kato_ms.into(),
        age_ms: controller.age.as_millis() as u64,
        in_flight: controller.queues.iter().map(|queue| queue.in_flight as u64).sum(),
        read_commands: controller.read_commands,
        write_commands: controller.write_commands,
        read_bytes: controller.read_bytes,
        write_bytes: controller.write_bytes,
        media_errors: controller.media_errors,
    }
}

pub(super) fn metrics(live: &Live) -> Snapshot {
    Snapshot {
        status: status(live),
        pool: live.storage().map(pool),
        volumes: volumes(live).unwrap_or_default(),
        subsystems: subsystems(live),
    }
}
