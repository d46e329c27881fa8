//! `offloadctl` against a live service.

use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::net::UnixDatagram;

use crate::daemon::{NQN, PATIENCE, Site};

const OTHER: &str = "nqn.2026-11.io.example:other";

fn refused(site: &Site, args: &[&str], says: &str) {
    let output = site.ctl(args);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains(says), "offloadctl {args:?}: {error}");
}

#[test]
fn volumes_and_namespaces_come_and_go_while_it_serves() {
    let site = Site::new();
    let daemon = site.start();
    let made = site.ask(&["volume", "create", "vol1", "32MiB", "--compression", "zstd:3"]);
    assert_eq!((&made["name"], &made["size_bytes"]), (&"vol1".into(), &(32 << 20).into()));
    refused(&site, &["volume", "create", "vol1", "32MiB"], "taken");
    refused(&site, &["volume", "create", "a b", "32MiB"], "holds ' ' at byte 1");
    refused(&site, &["volume", "create", "v", "2GB"], "GB is ambiguous");
    refused(&site, &["volume", "delete", "vol0"], "namespace 1 of");
    refused(&site, &["volume", "delete", "nothing"], "no volume \"nothing\"");
    refused(&site, &["namespace", "add", NQN, "3", "pool:nothing"], "no such volume");
    refused(&site, &["namespace", "add", NQN, "2", "mem:1MiB"], "nsid: 2 of");
    refused(&site, &["namespace", "add", NQN, "3", "pool:vol0"], "namespace 1 of");
    site.ask(&["namespace", "add", NQN, "3", "pool:vol1"]);
    let mut host = daemon.connect();
    host.write(3, 7, 77);
    assert_eq!(host.stamp(3, 7), Some(77));
    site.ask(&["namespace", "remove", NQN, "3"]);
    assert!(host.try_write(3, 7, 78).is_err(), "the namespace is gone");
    site.ask(&["volume", "delete", "vol1"]);
    assert_eq!(site.ask(&["volume", "list"]).as_array().unwrap().len(), 1);
    assert_eq!(daemon.stop(), 0);
}

/// H137, H139 and the like, as a host sees them: a snapshot is what was there, read-only; clones go their own way; each outlives the
/// others and restarts.
#[test]
fn h139_snapshots_and_clones_come_and_go_while_it_serves() {
    let site = Site::new();
    let daemon = site.start();
    let mut host = daemon.connect();
    host.write(1, 7, 1);
    host.write(1, 8, 1);
    let taken = site.ask(&["volume", "snapshot", "vol0", "monday"]);
    assert_eq!((&taken["name"], &taken["snapshot"]), (&"monday".into(), &true.into()));
    host.write(1, 7, 2);
    refused(&site, &["volume", "snapshot", "vol0", "monday"], "taken");
    refused(&site, &["volume", "snapshot", "monday", "tuesday"], "is a snapshot");
    refused(&site, &["volume", "resize", "monday", "1GiB"], "is a snapshot");
    refused(&site, &["volume", "clone", "sunday", "copy"], "no volume \"sunday\"");
    let made = site.ask(&["volume", "clone", "monday", "copy", "--compression", "none"]);
    assert_eq!((&made["origin"], &made["compression"]), (&"monday".into(), &"none".into()));
    site.ask(&["volume", "clone", "vol0", "now"]);
    site.ask(&["namespace", "add", NQN, "3", "pool:monday"]);
    site.ask(&["namespace", "add", NQN, "4", "pool:copy"]);
    site.ask(&["namespace", "add", NQN, "5", "pool:now"]);
    let mut host = daemon.connect();
    assert_eq!((host.stamp(3, 7), host.stamp(4, 7), host.stamp(5, 7)), (Some(1), Some(1), Some(2)));
    let refusal = host.try_write(3, 7, 9).expect_err("read-only");
    assert!(refusal.starts_with("00/20h"), "{refusal}");
    host.write(4, 8, 3);
    host.write(5, 8, 4);
    assert_eq!((host.stamp(1, 8), host.stamp(3, 8), host.stamp(4, 8)), (Some(1), Some(1), Some(3)));
    refused(&site, &["volume", "delete", "monday"], "namespace 3 of");
    site.ask(&["namespace", "remove", NQN, "3"]);
    site.ask(&["volume", "delete", "monday"]);
    refused(&site, &["volume", "clone", "monday", "late"], "no volume \"monday\"");
    let names = |list: &serde_json::Value| -> Vec<String> {
        list.as_array().unwrap().iter().map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&site.ask(&["volume", "list"])), ["vol0", "copy", "now"]);
    daemon.kill();
    let daemon = site.start();
    let mut host = daemon.connect();
    for (nsid, seven, eight) in [(1, 2, 1), (4, 1, 3), (5, 2, 4)] {
        assert_eq!((host.stamp(nsid, 7), host.stamp(nsid, 8)), (Some(seven), Some(eight)), "namespace {nsid}");
    }
    assert_eq!(daemon.stop(), 0);
}

/// A volume of the configuration may begin as a clone of what the pool has.
#[test]
fn a_configured_volume_begins_as_its_origin() {
    let site = Site::new();
    let daemon = site.start();
    daemon.connect().write(1, 7, 1);
    site.ask(&["volume", "snapshot", "vol0", "golden"]);
    assert_eq!(daemon.stop(), 0);
    let with = |volume: &str| {
        site.configure(&site.text().replace("[[subsystem]]", &format!("[[volume]]\n{volume}\n[[subsystem]]")))
    };
    with("name = \"copy\"\nsize = \"96MiB\"\norigin = \"gold\"");
    let (code, error) = site.refused(&site.config());
    assert!(
        code == 3 && error.contains("volume[1].origin: gold: the pool has no such volume; it has vol0, golden"),
        "{error}"
    );
    with("name = \"copy\"\nsize = \"96MiB\"\norigin = \"golden\"\ncipher = \"aes-128-gcm\"");
    let (code, error) = site.refused(&site.config());
    assert!(code == 3 && error.contains("volume[1].cipher: aes-128-gcm"), "{error}");
    with("name = \"copy\"\nsize = \"96MiB\"\norigin = \"golden\"");
    let daemon = site.start();
    site.ask(&["namespace", "add", NQN, "3", "pool:copy"]);
    let mut host = daemon.connect();
    assert_eq!((host.stamp(3, 7), host.controller.namespace(3).unwrap().size_bytes()), (Some(1), 96 << 20));
    host.write(3, 24000, 5);
    assert_eq!(daemon.stop(), 0);
    // Its origin may go: what it began as is no matter any more.
    let daemon = site.start();
    site.ask(&["volume", "delete", "golden"]);
    assert_eq!(daemon.stop(), 0);
    let daemon = site.start();
    assert_eq!((daemon.connect().stamp(3, 7), daemon.connect().stamp(3, 24000)), (Some(1), Some(5)));
    assert_eq!(daemon.stop(), 0);
}

/// A change that can't be kept is not made.
#[test]
fn a_resize_that_can_not_be_kept_changes_nothing() {
    let site = Site::new();
    let daemon = site.start();
    let mut host = daemon.connect();
    // In the way of the file that the state is written to first.
    let in_the_way = site.path().join("control.state.toml.new");
    std::fs::create_dir(&in_the_way).unwrap();
    std::fs::write(in_the_way.join("x"), "").unwrap();
    refused(&site, &["volume", "resize", "vol0", "96MiB"], "nothing was changed");
    assert_eq!(host.controller.namespace(1).unwrap().size_bytes(), 64 << 20);
    assert_eq!(site.ask(&["volume", "list"])[0]["size_bytes"], 64 << 20);
    assert!(host.try_write(1, 16384, 1).is_err(), "past the end");
    std::fs::remove_dir_all(&in_the_way).unwrap();
    site.ask(&["volume", "resize", "vol0", "96MiB"]);
    assert_eq!(host.controller.namespace(1).unwrap().size_bytes(), 96 << 20);
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn h52_a_grown_volume_has_one_size_everywhere() {
    let site = Site::new();
    let daemon = site.start();
    let mut host = daemon.connect();
    assert_eq!(host.controller.namespace(1).unwrap().size_bytes(), 64 << 20);
    assert!(host.try_write(1, 16384, 1).is_err(), "past the end");
    site.ask(&["volume", "resize", "vol0", "96MiB"]);
    refused(&site, &["volume", "resize", "vol0", "64MiB"], "making it smaller is not possible");
    host.write(1, 24575, 5);
    assert!(host.try_write(1, 24576, 1).is_err(), "past the new end");
    let size = 96u64 << 20;
    assert_eq!(host.controller.namespace(1).unwrap().size_bytes(), size);
    assert_eq!(site.ask(&["volume", "list"])[0]["size_bytes"], size);
    assert_eq!(site.ask(&["subsystem", "list"])[0]["namespaces"][0]["size_bytes"], size);
    let metrics = String::from_utf8(site.ctl(&["metrics"]).stdout).unwrap();
    assert!(metrics.contains(&format!("sluice_volume_size_bytes{{volume=\"vol0\"}} {size}\n")), "{metrics}");
    assert_eq!(daemon.stop(), 0);
    let daemon = site.start();
    assert_eq!(
        daemon.connect().controller.namespace(1).unwrap().size_bytes(),
        size,
        "grown with offloadctl, it stays so"
    );
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn subsystems_hosts_and_listeners_change_while_it_serves() {
    let site = Site::new();
    let daemon = site.start();
    refused(&site, &["subsystem", "add", "disk"], "must begin with 'nqn.'");
    site.ask(&["subsystem", "add", OTHER, "--host", "nqn.2026-11.io.example:host"]);
    refused(&site, &["subsystem", "add", OTHER], "exists already");
    site.ask(&["namespace", "add", OTHER, "1", "mem:1MiB", "--block-size", "512"]);
    assert!(daemon.connect_error(OTHER).is_some(), "this host is not on the list");
    refused(&site, &["host", "allow", OTHER, "host"], "must begin with 'nqn.'");
    site.ask(&["host", "deny", OTHER, "nqn.2026-11.io.example:host"]);
    refused(&site, &["host", "deny", OTHER, "nqn.2026-11.io.example:host"], "isn't in the list");
    site.ask(&["subsystem", "remove", OTHER]);
    refused(&site, &["subsystem", "remove", OTHER], "there is no");
    refused(&site, &["listener", "add", "300.1.1.1", "4420"], "not an IP address");
    refused(&site, &["listener", "add", "127.0.0.1", "0"], "0 is not in 1..=65535");
    // H174: IPv6, shown so that it can be used again.
    let port = site.port.to_string();
    site.ask(&["listener", "add", "::1", &port]);
    let endpoint = format!("[::1]:{port}");
    assert_eq!(site.ask(&["listener", "list"])[1]["endpoint"], endpoint.as_str());
    let mut host = daemon.connect_to(IpAddr::V6(Ipv6Addr::LOCALHOST), NQN);
    host.write(2, 1, 11);
    let listed = site.ask(&["subsystem", "list"]);
    assert!(listed[0]["controllers"][0]["peer"].as_str().unwrap().starts_with("[::1]:"), "{listed}");
    site.ask(&["listener", "remove", "[::1]", &port]);
    assert_eq!(host.stamp(2, 1), Some(11), "connections stay");
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn h127_the_parts_of_the_pool_add_up_to_the_byte() {
    let site = Site::new();
    let daemon = site.start();
    let mut host = daemon.connect();
    for i in 0..100 {
        host.write(1, i * 3, i + 1);
    }
    let pool = site.ask(&["pool", "show"]);
    let space = |name: &str| pool["space"][name].as_u64().unwrap_or_else(|| panic!("{name} in {pool}"));
    let parts = ["usable", "parity", "metadata", "reserve"];
    let sum: u64 = parts.iter().map(|part| space(&format!("{part}_bytes"))).sum();
    assert_eq!(sum, space("raw_bytes"));
    assert_eq!(space("used_bytes") + space("free_bytes"), space("usable_bytes"));
    assert_eq!(space("raw_bytes"), 3 * (128 << 20));
    assert_eq!(space("user_bytes"), 100 * 4096);
    let table = String::from_utf8(site.ctl(&["pool", "show"]).stdout).unwrap();
    for part in parts {
        assert!(table.contains(&space(&format!("{part}_bytes")).to_string()), "{part} in {table}");
    }
    assert!(pool["replay_segments"].as_u64().unwrap() <= pool["replay_segments_max"].as_u64().unwrap());
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn h151_the_configuration_in_effect_can_be_used_as_it_is() {
    let site = Site::new();
    let daemon = site.start_with(&[("SLUICE_LIMITS__QUEUES", "4")]);
    site.ask(&["namespace", "add", NQN, "3", "mem:1MiB"]);
    site.ask(&["volume", "create", "vol1", "32MiB", "--block-size", "512"]);
    let plain = || String::from_utf8(site.ctl(&["config", "--plain"]).stdout).unwrap();
    let dump = plain();
    let shown = String::from_utf8(site.ctl(&["config"]).stdout).unwrap();
    let line = site.text().lines().position(|line| line.contains("segment_size")).unwrap() + 1;
    for says in [
        format!("segment_size = \"1MiB\"  # {}:{line}", site.config().display()),
        "queues = 4  # environment SLUICE_LIMITS__QUEUES".to_owned(),
        "backend = \"mem:1MiB\"  # offloadctl".to_owned(),
        "name = \"vol1\"  # pool".to_owned(),
        "log_format = \"text\"  # default".to_owned(),
    ] {
        assert!(shown.contains(&says), "{says} in {shown}");
    }
    assert_eq!(site.ask(&["config"])["origins"]["volume[1].size"], "pool");
    let key = std::fs::read_to_string(site.path().join("pool.key")).unwrap();
    assert!(!dump.contains(key.trim()), "no secret in it");
    assert_eq!(daemon.stop(), 0);
    site.configure(&shown);
    let daemon = site.start();
    assert_eq!(plain(), dump, "with the comments it is the same");
    assert_eq!(daemon.stop(), 0);
    site.configure(&dump);
    let daemon = site.start();
    assert_eq!(plain(), dump);
    assert_eq!(daemon.stop(), 0);
    refused(&site, &["status"], "is offload-svc running?");
}

#[test]
fn systemd_is_told_when_it_is_ready_alive_and_stopping() {
    let site = Site::new();
    let path = site.path().join("notify.sock");
    let notify = UnixDatagram::bind(&path).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let daemon = site.start_with(&[("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "400000")]);
    let next = || {
        let mut message = [0; 256];
        let len = notify.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..len]).trim().to_owned()
    };
    assert_eq!(next(), "READY=1");
    daemon.connect().write(1, 0, 1);
    assert_eq!([next(), next()], ["WATCHDOG=1", "WATCHDOG=1"], "the reactors answer");
    assert_eq!(daemon.stop(), 0);
    let last = std::iter::repeat_with(next).find(|message| message != "WATCHDOG=1");
    assert_eq!(last.as_deref(), Some("STOPPING=1"));
}

#[test]
fn the_environment_overrides_the_file() {
    let site = Site::new();
    let daemon = site.start_with(&[("SLUICE_REACTORS__COUNT", "1")]);
    assert_eq!(site.ask(&["status"])["reactors"].as_array().unwrap().len(), 1);
    assert_eq!(daemon.stop(), 0);
}
