//! Answers as tables for people.
//!
//! Owns layout and rounding. Must not ask anything. Invariant: text that came from a peer (names of hosts, addresses) is
//! escaped before it reaches the terminal.

use comfy_table::{CellAlignment, Table, presets};

use crate::manage::view::{
    Anchor, Listener, Pool, Rebuild, Scrub, Space, Status, Subsystem, Volume, VolumeKey, WriteTraffic,
};

pub(super) fn table<const N: usize>(header: [&str; N], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header);
    for index in right {
        if let Some(column) = table.column_mut(*index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

pub(super) fn safe(text: &str) -> String {
    text.escape_debug().to_string()
}

/// Three significant figures, binary units.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..60 => format!("{seconds}.{:03} s", ms % 1000),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"))
}

pub(super) fn status(status: &Status) -> String {
    let pool = status.pool.as_ref().map_or("no pool".to_owned(), |pool| {
        format!("pool {} ({} of {} members)", pool.state, pool.members_active, pool.members_total)
    });
    let mut text = format!(
        "offload-svc {} (pid {}): {}, up {}, on {}\n{} subsystems, {} namespaces; {} hosts with {} I/O queues; {pool}\n",
        status.version,
        status.pid,
        status.state,
        duration(status.uptime_ms),
        status.platform,
        status.subsystems,
        status.namespaces,
        status.controllers,
        status.io_queues,
    );
    if !status.waits_for.is_empty() {
        text += &format!("waiting for {}\n", safe(&status.waits_for));
    }
    for listener in &status.listeners {
        text += &format!("listening on {} ({})\n", safe(&listener.endpoint), listener.transport);
    }
    let header = ["reactor", "queues", "commands", "received", "sent", "storage ops", "in flight", "busy", "sleeps"];
    let mut reactors = table(header, &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
    for reactor in &status.reactors {
        reactors.add_row([
            reactor.index.to_string(),
            reactor.queues.to_string(),
            reactor.commands.to_string(),
            size(reactor.received_bytes),
            size(reactor.sent_bytes),
            reactor.storage_ops.to_string(),
            reactor.storage_in_flight.to_string(),
            reactor.busy_polls.to_string(),
            reactor.sleeps.to_string(),
        ]);
    }
    let mut buffers = table(["buffers of", "for", "in use", "total", "waiting"], &[0, 2, 3, 4]);
    for class in &status.buffers {
        let [used, total, waiting] = [class.used, class.total, class.waiting].map(|n| n.to_string());
        buffers.add_row([size(class.size_bytes), class.users.clone(), used, total, waiting]);
    }
    format!("{text}{reactors}\n{buffers}")
}

pub(super) fn pool(pool: &Pool) -> String {
    let head = format!(
        "pool {}: {}, {} of {} members, {}+{}, epoch {}, segments of {}\n{}\nreplay after a crash now: {} of at most {} segments\n",
        pool.uuid,
        pool.health.state,
        pool.health.members_active,
        pool.health.members_total,
        pool.k,
        pool.m,
        pool.epoch,
        size(pool.segment_bytes),
        safe(&pool.mount.summary),
        pool.replay_segments,
        pool.replay_segments_max,
    );
    let unopened = pool.unopened.iter().map(|(name, why)| format!("can't be opened: {}: {}\n", safe(name), safe(why)));
    let header = [
        "member",
        "source",
        "state",
        "epoch",
        "read errors",
        "write errors",
        "timeouts",
        "slow",
        "bad shards",
        "repaired",
    ];
    let mut members = table(header, &[0, 3, 4, 5, 6, 7, 8, 9]);
    for member in &pool.members {
        members.add_row([
            member.index.to_string(),
            safe(&member.source),
            member.state.clone(),
            member.epoch.to_string(),
            member.read_errors.to_string(),
            member.write_errors.to_string(),
            member.timeouts.to_string(),
            member.slow_reads.to_string(),
            member.checksum_errors.to_string(),
            member.repaired.to_string(),
        ]);
    }
    let remarks = pool.members.iter().flat_map(|member| {
        let of = format!("member {} ({})", member.index, safe(&member.source));
        member.remarks.iter().map(move |remark| format!("{of}: {}\n", safe(remark)))
    });
    let mut remarks: String = remarks.collect();
    remarks += &anchor(pool.anchor.as_ref());
    if let Some(gone) = &pool.given_up {
        remarks += &format!(
            "answered writes were given up by force at {} mounts, the last at Unix time {}: {} stripes, and what {} segments held\n",
            gone.times, gone.last_s, gone.stripes, gone.segments
        );
    }
    let rebuild = pool.rebuild.as_ref().map(rebuild).unwrap_or_default();
    format!(
        "{head}{}{members}\n{remarks}{rebuild}{}\n{}\nbytes at rest per user byte: {} as records, {} with the parity of full stripes",
        unopened.collect::<String>(),
        space(&pool.space),
        written(&pool.written),
        ratio(pool.stored_bytes_per_user_byte),
        ratio(pool.rest_bytes_per_user_byte),
    )
}

fn anchor(anchor: Option<&Anchor>) -> String {
    let Some(anchor) = anchor else {
        return "no anchor (pool.anchor): if all members are rolled back together, nobody notices\n".to_owned();
    };
    let generation = anchor.generation.map_or_else(|| "none yet".to_owned(), |generation| generation.to_string());
    let error = anchor.error.as_ref().map(|error| format!("; not written: {}", safe(error))).unwrap_or_default();
    format!("anchor {}: publication {generation} of {}{error}\n", safe(&anchor.file), anchor.newest)
}

pub(super) fn scrub(scrub: &Scrub) -> String {
    if scrub.started_s == 0 {
        return "scrub: never run".to_owned();
    }
    let state = if scrub.running {
        format!("running, {} segments to go", scrub.segments_left)
    } else {
        format!("ended (Unix time {})", scrub.ended_s)
    };
    let head = format!(
        "scrub begun at Unix time {}: {state}\n{} stripes read, {} shards wrong, {} repaired, {} stripes can't be read",
        scrub.started_s, scrub.stripes, scrub.bad_shards, scrub.repaired_shards, scrub.stripes_lost
    );
    if scrub.findings.is_empty() {
        return head;
    }
    let mut findings = table(["member", "segment", "wrong shards"], &[0, 1, 2]);
    for finding in &scrub.findings {
        findings.add_row([finding.member, finding.segment, finding.shards].map(|number| number.to_string()));
    }
    format!("{head}\n{findings}")
}

fn rebuild(rebuild: &Rebuild) -> String {
    let how = if rebuild.replacing { "replacement" } else { "return" };
    let left = rebuild.left_ms.map(|ms| format!(", {} left", duration(ms))).unwrap_or_default();
    let lost = if rebuild.stripes_lost == 0 {
        String::new()
    } else {
        format!(", {} stripes could not be read", rebuild.stripes_lost)
    };
    format!(
        "{how} of member {} ({}): {}, {} of {} segments, {} written in {}{left}{lost}\n",
        rebuild.index,
        safe(&rebuild.source),
        rebuild.state,
        rebuild.segments_done,
        rebuild.segments_total,
        size(rebuild.written_bytes),
        duration(rebuild.elapsed_ms),
    )
}

fn written(written: &WriteTraffic) -> Table {
    let mut rows = table(["written since the start", "bytes", ""], &[1, 2]);
    for (name, bytes) in [
        ("by hosts", written.user_bytes),
        ("  as records", written.fresh_bytes),
        ("records again, by cleaning and key rotation", written.moved_bytes),
        ("pages of maps", written.page_bytes),
        ("checkpoints", written.checkpoint_bytes),
        ("headers and gaps", written.padding_bytes),
        ("parity", written.parity_bytes),
    ] {
        rows.add_row([name.to_owned(), bytes.to_string(), size(bytes)]);
    }
    rows.add_row([
        "to members per byte by hosts".to_owned(),
        ratio(written.amplification),
        "write amplification".to_owned(),
    ]);
    rows.add_row([
        "without parity, per byte of records".to_owned(),
        ratio(written.log_amplification),
        "of the log".to_owned(),
    ]);
    rows
}

fn space(space: &Space) -> Table {
    let mut rows = table(["space", "bytes", ""], &[1, 2]);
    for (name, bytes) in [
        ("raw = usable + parity + metadata + reserve", space.raw_bytes),
        ("  usable = used + free", space.usable_bytes),
        ("    used", space.used_bytes),
        ("    free", space.free_bytes),
        ("      of it after cleaning", space.reclaimable_bytes),
        ("  parity", space.parity_bytes),
        ("  metadata", space.metadata_bytes),
        ("      of it checkpoints", space.checkpoint_bytes),
        ("  reserve for cleaning and checkpoints", space.reserve_bytes),
        ("stored by users", space.user_bytes),
    ] {
        rows.add_row([name.to_owned(), bytes.to_string(), size(bytes)]);
    }
    let sign = if space.saved_bytes < 0 { "-" } else { "" };
    let saved = format!("{sign}{}", size(space.saved_bytes.unsigned_abs()));
    rows.add_row(["saved by compression".to_owned(), space.saved_bytes.to_string(), saved]);
    rows
}

pub(super) fn volumes(volumes: &[Volume]) -> String {
    let header = ["volume", "size", "block", "compression", "cipher", "used", "stored", "ratio", "upon", "served by"];
    let mut rows = table(header, &[1, 2, 5, 6, 7]);
    for volume in volumes {
        rows.add_row([
            safe(&volume.name),
            size(volume.size_bytes),
            volume.block_bytes.to_string(),
            volume.compression.clone(),
            volume.cipher.clone(),
            size(volume.used_bytes),
            size(volume.stored_bytes),
            ratio(volume.ratio),
            upon(volume),
            volume.served_by.as_deref().map_or("-".to_owned(), safe),
        ]);
    }
    rows.to_string()
}

/// What a volume holds the changes of, and whether it is a snapshot itself.
fn upon(volume: &Volume) -> String {
    let origin = volume.origin.as_deref().map_or("-".to_owned(), safe);
    if volume.snapshot { format!("{origin} (snapshot)") } else { origin }
}

pub(super) fn keys(keys: &[VolumeKey]) -> String {
    let mut rows = table(["volume", "cipher", "key", "under it", "carried over", "state"], &[2, 3, 4]);
    for key in keys {
        let current = key.stored_bytes.saturating_sub(key.left_bytes);
        let percent = if key.stored_bytes == 0 { 100.0 } else { 100.0 * current as f64 / key.stored_bytes as f64 };
        rows.add_row([
            safe(&key.volume),
            key.cipher.clone(),
            key.epoch.to_string(),
            size(current),
            // Never 100 % while something is left.
            format!("{:.1} %", (percent * 10.0).floor() / 10.0),
            if key.rotating { format!("{} left", size(key.left_bytes)) } else { "one key".to_owned() },
        ]);
    }
    rows.to_string()
}

pub(super) fn subsystems(subsystems: &[Subsystem]) -> String {
    let mut text = String::new();
    for subsystem in subsystems {
        let access =
            if subsystem.allow_any_host { "any host".to_owned() } else { format!("{} hosts", subsystem.hosts.len()) };
        text += &format!("{} (serial {}): {access}\n", safe(&subsystem.nqn), safe(&subsystem.serial));
        let mut rows = table(["nsid", "back end", "size", "block", "uuid"], &[0, 2, 3]);
        for namespace in &subsystem.namespaces {
            rows.add_row([
                namespace.nsid.to_string(),
                safe(&namespace.backend),
                size(namespace.size_bytes),
                namespace.block_bytes.to_string(),
                namespace.uuid.clone(),
            ]);
        }
        text += &format!("{rows}\n");
    }
    if text.is_empty() { "no subsystems".to_owned() } else { text }
}

pub(super) fn hosts(subsystems: &[Subsystem]) -> String {
    let mut rows =
        table(["subsystem", "host", "may connect", "controller", "from", "I/O queues", "keep-alive"], &[3, 5, 6]);
    for subsystem in subsystems {
        for controller in &subsystem.controllers {
            let allowed = subsystem.allow_any_host || subsystem.hosts.contains(&controller.host);
            rows.add_row([
                safe(&subsystem.nqn),
                safe(&controller.host),
                yes_no(allowed),
                controller.cntlid.to_string(),
                safe(&controller.peer),
                controller.io_queues.to_string(),
                if controller.kato_ms == 0 { "none".to_owned() } else { duration(controller.kato_ms) },
            ]);
        }
        let absent = |host: &&String| !subsystem.controllers.iter().any(|controller| controller.host == **host);
        for host in subsystem.hosts.iter().filter(absent) {
            let cells =
                [safe(&subsystem.nqn), safe(host), yes_no(true), "-".into(), "-".into(), "-".into(), "-".into()];
            rows.add_row(cells);
        }
    }
    rows.to_string()
}

fn yes_no(yes: bool) -> String {
    if yes { "yes" } else { "no" }.to_owned()
}

pub(super) fn listeners(listeners: &[Listener]) -> String {
    let mut rows = table(["transport", "endpoint"], &[]);
    for listener in listeners {
        rows.add_row([listener.transport.clone(), safe(&listener.endpoint)]);
    }
    rows.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_read_well() {
        assert_eq!(
            [0, 1023, 1024, 1536, 2 << 30, u64::MAX].map(size),
            ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "2.00 GiB", "16.0 EiB"]
        );
        assert_eq!([5, 61_000, 3_661_000].map(duration), ["0.005 s", "1 min 1 s", "1 h 1 min"]);
    }

    #[test]
    fn what_a_peer_sent_is_escaped() {
        let mut subsystem = Subsystem { nqn: "nqn.2026-11.io.example:a".into(), ..Default::default() };
        subsystem
            .controllers
            .push(crate::manage::view::Controller { host: "x\u{1b}[2J\n".into(), ..Default::default() });
        let shown = hosts(&[subsystem]);
        assert!(shown.contains("x\\u{1b}[2J\\n") && !shown.contains('\u{1b}'), "{shown}");
    }
}
