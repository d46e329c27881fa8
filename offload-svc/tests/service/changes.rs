//! Changes made with offloadctl outlive the service; what the configuration says later holds.

use std::path::PathBuf;

use crate::daemon::{NQN, Site};

const OTHER: &str = "nqn.2026-11.io.example:other";
const HOST: &str = "nqn.2026-11.io.example:host";

fn state(site: &Site) -> PathBuf {
    site.path().join("control.state.toml")
}

/// Subsystems, hosts, namespaces and listeners, without who is connected.
fn objects(site: &Site) -> serde_json::Value {
    let mut subsystems = site.ask(&["subsystem", "list"]);
    for subsystem in subsystems.as_array_mut().unwrap() {
        subsystem.as_object_mut().unwrap().remove("controllers");
    }
    serde_json::json!([subsystems, site.ask(&["listener", "list"])])
}

/// The configuration in effect. One that was removed and added again comes first after a restart, since it is configured.
fn configuration(site: &Site) -> serde_json::Value {
    let mut config = site.ask(&["config"])["config"].take();
    config["subsystem"].as_array_mut().unwrap().sort_by_key(|subsystem| subsystem["nqn"].to_string());
    config
}

#[test]
fn h151_changes_outlive_a_stop_and_kill_9_between_any_two() {
    let site = Site::new();
    let port = site.port.to_string();
    let mut daemon = site.start();
    let kept = std::fs::read_to_string(state(&site)).unwrap();
    assert!(kept.contains("\npool = \"") && !site.check().contains("changed with offloadctl"), "only the pool: {kept}");
    let as_configured = objects(&site);
    let changes: [&[&str]; 12] = [
        &["subsystem", "add", OTHER, "--serial", "S1", "--host", HOST],
        &["volume", "create", "vol1", "32MiB"],
        &["namespace", "add", OTHER, "7", "pool:vol1"],
        &["namespace", "add", NQN, "3", "mem:1MiB", "--block-size", "512"],
        &["host", "allow", OTHER, "nqn.2026-11.io.example:host2"],
        &["host", "deny", OTHER, HOST],
        &["listener", "add", "::1", &port],
        &["volume", "resize", "vol0", "96MiB"],
        &["namespace", "remove", NQN, "1"],
        &["volume", "delete", "vol0"],
        &["subsystem", "remove", NQN],
        &["subsystem", "add", NQN, "--serial", "NEW", "--allow-any-host"],
    ];
    for (index, change) in changes.iter().enumerate() {
        site.ask(change);
        let (now, volumes) = (objects(&site), site.ask(&["volume", "list"]));
        let config = configuration(&site);
        if index % 2 == 0 {
            daemon.kill();
        } else {
            assert_eq!(daemon.stop(), 0);
        }
        daemon = site.start();
        assert_eq!(objects(&site), now, "after {change:?}");
        assert_eq!(site.ask(&["volume", "list"]), volumes, "after {change:?}");
        assert_eq!(configuration(&site), config, "after {change:?}");
    }
    assert_ne!(objects(&site), as_configured);
    // A volume that was deleted isn't made again, though it is configured.
    assert_eq!(site.ask(&["volume", "list"]).as_array().unwrap().len(), 1);
    // The one that a namespace serves is still the same one.
    let mut host = daemon.connect_to(std::net::Ipv4Addr::LOCALHOST.into(), NQN);
    assert!(host.try_write(1, 0, 1).is_err(), "the subsystem came back without namespaces");
    assert_eq!(daemon.stop(), 0);
    // Without the file, the configuration alone holds.
    std::fs::remove_file(state(&site)).unwrap();
    let daemon = site.start();
    let without_uuids = |objects: &serde_json::Value| {
        let mut objects = objects.clone();
        for namespace in objects[0][0]["namespaces"].as_array_mut().unwrap() {
            namespace.as_object_mut().unwrap().remove("uuid");
        }
        objects
    };
    assert_eq!(without_uuids(&objects(&site)), without_uuids(&as_configured), "the volume was made again");
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn an_edit_of_the_configuration_after_a_change_holds_and_is_said() {
    let site = Site::new();
    let daemon = site.start();
    site.ask(&["namespace", "remove", NQN, "2"]);
    site.ask(&["namespace", "add", NQN, "2", "mem:2MiB"]);
    site.ask(&["namespace", "add", NQN, "5", "mem:1MiB"]);
    assert_eq!(daemon.stop(), 0);
    site.configure(&site.text().replace("mem:16MiB", "mem:4MiB"));
    let checked = site.check();
    assert!(
        checked.contains("1 objects changed with offloadctl") && checked.contains("control.state.toml"),
        "{checked}"
    );
    let says = format!("namespace 2 of subsystem {NQN}: changed with offloadctl, and in the configuration since then");
    assert!(checked.contains(&says), "{checked}");
    let daemon = site.start();
    let namespaces = objects(&site)[0][0]["namespaces"].clone();
    let backends: Vec<&str> = namespaces.as_array().unwrap().iter().map(|n| n["backend"].as_str().unwrap()).collect();
    assert_eq!(backends, ["pool:vol0", "mem:4MiB", "mem:1MiB"]);
    assert_eq!(daemon.stop(), 0);
    // Overruled once, the change doesn't come back with the old text.
    site.configure(&site.text());
    assert!(!site.check().contains("since then"));
    let daemon = site.start();
    assert_eq!(objects(&site)[0][0]["namespaces"][1]["backend"], "mem:16MiB");
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn a_state_file_that_cannot_be_used_stops_the_start_with_its_name_and_the_remedy() {
    let site = Site::new();
    let daemon = site.start();
    site.ask(&["host", "allow", NQN, HOST]);
    site.ask(&["namespace", "add", NQN, "3", &format!("file:{}", site.config().display()), "--block-size", "512"]);
    daemon.kill();
    let whole = std::fs::read_to_string(state(&site)).unwrap();
    for (text, says) in [
        (
            whole.replace(HOST, "nqn.2026-11.io.example:evil"),
            "the checksum does not match. Restore the file from a copy, or move",
        ),
        (String::new(), "the key 'version' is missing"),
        ("version = 9\n".to_owned(), "has version 9, this release reads 2: start the release that wrote it, or move"),
    ] {
        std::fs::write(state(&site), &text).unwrap();
        let (code, error) = site.refused(&site.config());
        assert_eq!((code, error.lines().count()), (3, 1), "{error}");
        assert!(
            error.contains("service.state: ") && error.contains("control.state.toml: ") && error.contains(says),
            "{error}"
        );
        assert!(site.check().contains(says), "--check reads it too");
        assert_eq!(std::fs::read_to_string(state(&site)).unwrap(), text, "nothing is written to it");
    }
    std::fs::write(state(&site), &whole).unwrap();
    let daemon = site.start();
    assert_eq!(objects(&site)[0][0]["hosts"][0], HOST);
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn a_change_that_cannot_be_kept_is_not_made() {
    let site = Site::new();
    let daemon = site.start();
    let before = objects(&site);
    // A folder where the new file would be written: root may write anywhere else.
    std::fs::create_dir(site.path().join("control.state.toml.new")).unwrap();
    for change in [&["subsystem", "add", OTHER][..], &["namespace", "remove", NQN, "1"], &["volume", "delete", "vol0"]]
    {
        let output = site.ctl(change);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let says = if change[0] == "volume" {
            "serves it: remove that first"
        } else {
            "nothing was changed, since it can't be kept"
        };
        assert!(!output.status.success() && error.contains(says), "{change:?}: {error}");
    }
    assert_eq!(objects(&site), before);
    std::fs::remove_dir(site.path().join("control.state.toml.new")).unwrap();
    site.ask(&["subsystem", "add", OTHER]);
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn what_would_keep_the_service_from_starting_again_is_refused_at_once() {
    let site = Site::new();
    let daemon = site.start();
    let file = site.path().join("plain");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    let file = format!("file:{}", file.display());
    site.ask(&["subsystem", "add", OTHER]);
    site.ask(&["namespace", "add", OTHER, "1", &file]);
    for (change, says) in [
        (&["namespace", "add", NQN, "3", "mem:4096"][..], "backend: mem:4KiB: out of range: 1MiB to 1PiB"),
        (&["namespace", "add", NQN, "3", "mem:1048577"], "must be a multiple of 4KiB"),
        (&["namespace", "add", NQN, "3", "mem:900TiB"], "memory: needed "),
        (&["namespace", "add", NQN, "3", &file], "in use by another process, or by this service twice"),
        (&["namespace", "add", NQN, "1025", "mem:1MiB"], "nsid: must be 1 to 1024"),
        (&["volume", "resize", "vol0", "32PiB"], "size: 32PiB: out of range: 1MiB to 16PiB"),
        (&["volume", "create", "small", "4096"], "size: 4KiB: out of range: 1MiB to 16PiB"),
        (&["volume", "create", "odd", "1048577"], "size: 1048577B: must be a multiple of 4KiB"),
    ] {
        let output = site.ctl(change);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(says), "{change:?}: {error}");
    }
    daemon.kill();
    assert_eq!(site.start().stop(), 0);
}

/// A crash after the pool has grown a volume and before the state file, which spoke of the volume already, got its new name.
#[test]
fn h52_a_resize_that_a_crash_cut_short_has_one_size_everywhere() {
    let site = Site::new();
    let daemon = site.start();
    site.ask(&["volume", "resize", "vol0", "96MiB"]);
    let before = std::fs::read(state(&site)).unwrap();
    site.ask(&["volume", "resize", "vol0", "112MiB"]);
    daemon.kill();
    std::fs::write(state(&site), before).unwrap();
    let daemon = site.start();
    assert_eq!(daemon.connect().controller.namespace(1).unwrap().size_bytes(), 112 << 20);
    assert_eq!(configuration(&site)["volume"][0]["size"], "112MiB");
    let kept = std::fs::read_to_string(state(&site)).unwrap();
    assert!(kept.contains("112MiB") && !kept.contains("96MiB"), "{kept}");
    assert_eq!(daemon.stop(), 0);
    // An edit of the configuration is later than the change, and is not overruled by it.
    site.configure(&site.text().replace("size = \"64MiB\"", "size = \"80MiB\""));
    let daemon = site.start();
    let kept = std::fs::read_to_string(state(&site)).unwrap();
    assert!(!kept.contains("112MiB"), "{kept}");
    assert_eq!(daemon.connect().controller.namespace(1).unwrap().size_bytes(), 112 << 20);
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn a_volume_follows_its_configuration_as_far_as_it_can() {
    let site = Site::new();
    let daemon = site.start();
    daemon.connect().write(1, 16383, 7);
    assert_eq!(daemon.stop(), 0);
    let volume = |from: &str, to: &str| site.configure(&site.text().replace(from, to));
    volume("size = \"64MiB\"", "size = \"96MiB\"");
    let daemon = site.start();
    let mut host = daemon.connect();
    assert_eq!(host.controller.namespace(1).unwrap().size_bytes(), 96 << 20, "grown");
    host.write(1, 24575, 8);
    assert_eq!(daemon.stop(), 0);
    volume("size = \"64MiB\"", "size = \"32MiB\"\ncompression = \"zstd:3\"");
    let daemon = site.start();
    let mut host = daemon.connect();
    assert_eq!((host.stamp(1, 16383), host.stamp(1, 24575)), (Some(7), Some(8)), "never made smaller");
    let shown = String::from_utf8(site.ctl(&["config"]).stdout).unwrap();
    let line = site.text().lines().position(|line| line.starts_with("size")).unwrap() + 1;
    let at = |line: usize| format!("{}:{line}", site.config().display());
    assert!(shown.contains(&format!("size = \"96MiB\"  # pool ({}: 32MiB)", at(line))), "{shown}");
    assert!(shown.contains(&format!("compression = \"lz4\"  # pool ({}: zstd:3)", at(line + 1))), "{shown}");
    assert_eq!(daemon.stop(), 0);
    for (key, value, has) in [("cipher", "\"aes-256-xts\"", "aes-256-gcm"), ("block_size", "512", "4096")] {
        volume("size = \"64MiB\"", &format!("size = \"96MiB\"\n{key} = {value}"));
        let (code, error) = site.refused(&site.config());
        let says = format!("{}: volume[0].{key}: {}: the volume has {has}", at(line + 1), value.trim_matches('"'));
        assert!(code == 3 && error.contains(&says), "{error}");
    }
    site.configure(&site.text());
    let daemon = site.start();
    assert_eq!(site.ask(&["pool", "show"])["mount"]["kind"], "clean", "a refused start leaves the pool closed");
    assert_eq!(daemon.connect().stamp(1, 24575), Some(8));
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn h153_a_service_that_dies_or_talks_nonsense_gets_an_error_and_never_a_hang() {
    let site = Site::new();
    let socket = site.path().join("control.sock");
    let refused = |says: &str| {
        let output = site.ctl(&["status"]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(3), 0), "{error}");
        assert!(error.starts_with("offloadctl: ") && error.contains(says), "{error}");
    };
    refused("is offload-svc running? Give its service.socket with --socket");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for (answer, says) in [
        ("", "the service closed the connection"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"version\":", "cut off"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnull", "of the same version?"),
        ("\0garbage\n", "the service closed the connection"),
        ("HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\nhi", "HTTP status 500"),
    ] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 4096];
                let _ = std::io::Read::read(&mut stream, &mut request).unwrap();
                std::io::Write::write_all(&mut stream, answer.as_bytes()).unwrap();
            });
            refused(says);
        });
    }
}

#[test]
fn changes_made_at_the_same_time_are_all_kept() {
    let site = Site::new();
    let daemon = site.start();
    let outcomes: Vec<bool> = std::thread::scope(|scope| {
        let made = |index: usize| {
            let (name, nsid) = (format!("nqn.2026-11.io.example:p{}", index % 6), (10 + index).to_string());
            let added = site.ctl(&["subsystem", "add", &name, "--allow-any-host"]).status.success();
            assert!(site.ctl(&["namespace", "add", NQN, &nsid, "mem:1MiB"]).status.success());
            added
        };
        let threads: Vec<_> = (0..12).map(|index| scope.spawn(move || made(index))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(outcomes.iter().filter(|added| **added).count(), 6, "one of two that make the same wins");
    let now = objects(&site);
    assert_eq!(now[0].as_array().unwrap().len(), 7);
    daemon.kill();
    let daemon = site.start();
    assert_eq!(objects(&site), now);
    assert_eq!(daemon.stop(), 0);
}
