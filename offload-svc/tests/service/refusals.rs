//! What the daemon refuses: with an exit code, one line that helps, and nothing half done.

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;

use crate::daemon::{MEMBERS, Site};

#[test]
fn a_second_instance_on_the_same_pool_is_refused_and_the_first_serves_on() {
    let site = Site::new();
    let daemon = site.start();
    let mut host = daemon.connect();
    host.write(1, 5, 55);
    // The same pool behind another socket and port.
    let other = Site::new();
    let text = other
        .text()
        .replace(&format!("{}/member-", other.path().display()), &format!("{}/member-", site.path().display()));
    other.configure(&text);
    let (code, error) = other.refused(&other.config());
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("pool.members[0]: ") && error.contains("member-0: in use by another process"), "{error}");
    assert!(!other.path().join("pool.key").exists(), "no key is made for somebody else's pool");
    assert_eq!(host.stamp(1, 5), Some(55));
    // The very same configuration.
    let (code, error) = site.refused(&site.config());
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("another service answers on this socket"), "{error}");
    assert_eq!(site.ask(&["status"])["state"], "serving");
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn h24_a_taken_port_stops_the_start_before_the_pool_is_touched() {
    let site = Site::new();
    let taken = TcpListener::bind(("127.0.0.1", site.port)).unwrap();
    let (code, error) = site.refused(&site.config());
    assert_eq!(code, 4, "{error}");
    assert!(error.contains(&format!("listener[0]: 127.0.0.1:{}: ", site.port)), "{error}");
    assert!((0..MEMBERS).all(|member| !site.member(member).exists()), "no member was made");
    drop(taken);
    assert_eq!(site.start().stop(), 0);
}

#[test]
fn h24_too_little_memory_is_one_line_with_the_setting() {
    let site = Site::new();
    site.configure(&site.text().replace("[service]\n", "[service]\nmemory = \"64MiB\"\n"));
    let (code, error) = site.refused(&site.config());
    assert_eq!((code, error.lines().count()), (3, 1), "{error}");
    assert!(error.contains("memory: needed ") && error.contains("found 64MiB (service.memory): lower "), "{error}");
}

#[test]
fn members_that_hold_anything_are_never_formatted() {
    let site = Site::new();
    for member in 0..MEMBERS {
        let mut bytes = vec![0u8; 128 << 20];
        if member == 1 {
            bytes[20_000] = 7;
        }
        std::fs::write(site.member(member), bytes).unwrap();
    }
    let (code, error) = site.refused(&site.config());
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("member-1: not blank: data from byte 20000 on. Nothing was written"), "{error}");
    for member in 0..MEMBERS {
        let bytes = std::fs::read(site.member(member)).unwrap();
        let others = bytes.iter().enumerate().filter(|(at, byte)| **byte != 0 && (member, *at) != (1, 20_000));
        assert_eq!(others.count(), 0, "member {member} is as it was");
    }
}

#[test]
fn a_pool_that_could_have_a_rival_is_mounted_only_by_force() {
    const GONE: [usize; 4] = [1, 2, 4, 5];
    let site = Site::of_members(2, 4);
    let daemon = site.start();
    daemon.connect().write(1, 5, 55);
    assert_eq!(daemon.stop(), 0);
    let aside = site.path().join("aside");
    std::fs::create_dir(&aside).unwrap();
    for member in GONE {
        std::fs::rename(site.member(member), aside.join(member.to_string())).unwrap();
    }
    for force in [&[][..], &["--force", "lost-writes"]] {
        let (code, error) = site.refused_with(&site.config(), force);
        assert_eq!((code, error.lines().filter(|line| line.starts_with("offload-svc: ")).count()), (4, 1), "{error}");
        assert!(error.contains("the missing members [1, 2, 4, 5] could be in use elsewhere"), "{error}");
        assert!(error.contains("start once with --force rival"), "{error}");
    }
    let daemon = site.start_by(&["--force", "rival"], &[]);
    let mut host = daemon.connect();
    assert_eq!(host.stamp(1, 5), Some(55));
    host.write(1, 6, 66);
    assert_eq!(site.ask(&["pool", "show"])["health"]["members_active"], 2);
    assert_eq!(daemon.stop(), 0);
    // It was for that start; the set is smaller now, and nobody else can have gone on with it.
    let daemon = site.start();
    let mut host = daemon.connect();
    assert_eq!((host.stamp(1, 5), host.stamp(1, 6)), (Some(55), Some(66)));
    assert_eq!(daemon.stop(), 0);
    // Those that come back after all are of an older set, and serve nothing.
    for member in GONE {
        std::fs::rename(aside.join(member.to_string()), site.member(member)).unwrap();
    }
    let daemon = site.start();
    assert_eq!(daemon.connect().stamp(1, 6), Some(66));
    assert_eq!(daemon.stop(), 0);
    let (code, error) = site.refused_with(&site.config(), &["--force", "everything"]);
    assert!(code == 2 && error.contains("[possible values: rival, lost-writes, rolled-back, new-pool]"), "{error}");
}

/// The disk that the members are on is not mounted: its folder is there, and empty.
#[test]
fn a_pool_that_was_served_is_not_replaced_by_an_empty_one() {
    let site = Site::new();
    let text = site.text();
    let at = |folder: &str| text.replace("/member-", &format!("/{folder}/member-"));
    site.configure(&at("disk"));
    let daemon = site.start();
    daemon.connect().write(1, 5, 55);
    assert_eq!(daemon.stop(), 0);
    let (disk, elsewhere) = (site.path().join("disk"), site.path().join("elsewhere"));
    std::fs::rename(&disk, &elsewhere).unwrap();
    for empty_folder in [false, true] {
        if empty_folder {
            std::fs::create_dir(&disk).unwrap();
        }
        let (code, error) = site.refused(&site.config());
        assert_eq!(code, 4, "{error}");
        assert!(
            error.contains("none of them holds the pool ") && error.contains("which was served before ("),
            "{error}"
        );
        assert!(error.contains("disk/member-0: No such file") && error.contains("--force new-pool"), "{error}");
        assert_eq!(disk.exists(), empty_folder, "nothing is made");
    }
    // Blank members are none of its either.
    for member in 0..MEMBERS {
        std::fs::File::create(disk.join(format!("member-{member}"))).unwrap().set_len(128 << 20).unwrap();
    }
    let (_, error) = site.refused(&site.config());
    assert!(error.contains("disk/member-2: blank") && error.contains("--force new-pool"), "{error}");
    // What is left of members is said, and is no reason to give the pool up: by force, nothing is made of them either.
    for (at, says) in
        [(40_000, "disk/member-1: data from byte 40000 on"), (0, "disk/member-1: data where superblocks stand")]
    {
        let mut bytes = vec![0u8; 128 << 20];
        bytes[at] = 7;
        std::fs::write(disk.join("member-1"), bytes).unwrap();
        let (_, error) = site.refused(&site.config());
        assert!(error.contains(says) && error.contains("disk/member-2: blank"), "{error}");
        assert!(error.contains("Mount or connect") && !error.contains("--force"), "{error}");
        let (_, error) = site.refused_with(&site.config(), &["--force", "new-pool"]);
        assert!(error.contains("member-1: not blank: "), "{error}");
    }
    std::fs::remove_dir_all(&disk).unwrap();
    std::fs::rename(&elsewhere, &disk).unwrap();
    let daemon = site.start();
    assert_eq!(daemon.connect().stamp(1, 5), Some(55));
    assert_eq!(daemon.stop(), 0);
    std::fs::remove_dir_all(&disk).unwrap();
    let daemon = site.start_by(&["--force", "new-pool"], &[]);
    assert_eq!(daemon.connect().stamp(1, 5), Some(0));
    assert_eq!(daemon.stop(), 0);
    assert_eq!(site.start().stop(), 0, "the new pool is the known one");
}

/// Older copies of all members are told by the anchor, and by nothing else.
#[test]
fn all_members_rolled_back_together_are_told_by_the_anchor() {
    let site = Site::new();
    let anchor = site.path().join("outside").join("anchor");
    site.configure(&site.text().replace("[pool]\n", &format!("[pool]\nanchor = \"{}\"\n", anchor.display())));
    let daemon = site.start();
    daemon.connect().write(1, 5, 55);
    assert_eq!(daemon.stop(), 0);
    let copy = |member| site.path().join(format!("copy-{member}"));
    for member in 0..MEMBERS {
        std::fs::copy(site.member(member), copy(member)).unwrap();
    }
    let daemon = site.start();
    daemon.connect().write(1, 5, 66);
    let shown = String::from_utf8(site.ctl(&["pool", "show"]).stdout).unwrap();
    assert!(shown.contains(&format!("anchor {}: publication ", anchor.display())), "{shown}");
    assert_eq!(daemon.stop(), 0);
    let daemon = site.start();
    assert_eq!(daemon.connect().stamp(1, 5), Some(66), "the newest ones are as the anchor says");
    daemon.kill();
    for member in 0..MEMBERS {
        std::fs::copy(copy(member), site.member(member)).unwrap();
    }
    let (code, error) = site.refused(&site.config());
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("all members have been rolled back: ") && error.contains("--force rolled-back"), "{error}");
    let daemon = site.start_by(&["--force", "rolled-back"], &[]);
    assert_eq!(daemon.connect().stamp(1, 5), Some(55));
    assert_eq!(daemon.stop(), 0);
    assert_eq!(site.start().stop(), 0, "the older state is the known one now");
    site.configure(&site.text());
    let daemon = site.start();
    let shown = String::from_utf8(site.ctl(&["pool", "show"]).stdout).unwrap();
    assert!(shown.contains("no anchor (pool.anchor): "), "{shown}");
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn a_pool_in_memory_begins_anew_each_time() {
    let site = Site::new();
    let dir = site.path().display().to_string();
    let in_memory =
        (0..MEMBERS).fold(site.text(), |text, i| text.replace(&format!("file:{dir}/member-{i}"), "mem:128MiB"));
    site.configure(&in_memory);
    for _ in 0..2 {
        let daemon = site.start();
        daemon.connect().write(1, 5, 55);
        assert_eq!(daemon.stop(), 0);
    }
}

/// A pool in memory is made anew, folders and all, where one on disks was served; spares' folders are made beside a found one.
#[test]
fn folders_are_made_where_nothing_can_hide_behind_them() {
    let site = Site::new();
    let dir = site.path().display().to_string();
    assert_eq!(site.start().stop(), 0);
    let spare = site.path().join("spares").join("s0");
    site.configure(&site.text().replace("[pool]\n", &format!("[pool]\nspares = [\"file:{}\"]\n", spare.display())));
    let daemon = site.start();
    assert!(spare.exists(), "the spare is made, and its folder");
    assert_eq!(daemon.stop(), 0);
    let in_memory =
        (0..MEMBERS).fold(site.text(), |text, i| text.replace(&format!("file:{dir}/member-{i}"), "mem:128MiB"));
    site.configure(&in_memory.replace("/pool.key", "/keys/pool.key"));
    assert_eq!(site.start().stop(), 0);
    assert!(site.path().join("keys").join("pool.key").exists());
}

#[test]
fn a_pool_that_can_not_be_made_leaves_no_members() {
    let site = Site::new();
    let text = site.text();
    std::fs::write(site.path().join("file"), "").unwrap();
    for (wrong, says) in [("file/member-2", "pool.members[2]: "), ("member-2", "member-2: not blank: ")] {
        let last = site.member(2).display().to_string();
        site.configure(&text.replace(&last, &site.path().join(wrong).display().to_string()));
        if wrong == "member-2" {
            std::fs::write(site.member(2), vec![7; 128 << 20]).unwrap();
        }
        let (code, error) = site.refused(&site.config());
        assert!(code != 0 && error.contains(says), "{error}");
        assert!(!site.member(0).exists() && !site.member(1).exists(), "{error}");
    }
    assert!(site.member(2).exists(), "what was there stays");
    std::fs::remove_file(site.member(2)).unwrap();
    site.configure(&text);
    assert_eq!(site.start().stop(), 0);
}

#[test]
fn a_lost_key_is_not_replaced_by_a_new_one() {
    let site = Site::new();
    assert_eq!(site.start().stop(), 0);
    let key = site.path().join("pool.key");
    let kept = std::fs::read(&key).unwrap();
    std::fs::remove_file(&key).unwrap();
    let (code, error) = site.refused(&site.config());
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("pool.key_file: ") && error.contains("does not exist"), "{error}");
    assert!(!key.exists());
    let other = "0123456789abcdef".repeat(4);
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&key)
        .unwrap()
        .write_all(other.as_bytes())
        .unwrap();
    let (code, error) = site.refused(&site.config());
    assert_eq!(code, 4, "{error}");
    assert!(
        error.contains("pool.key_file: ") && error.contains("volume \"vol0\": its key does not open: wrapped under"),
        "{error}"
    );
    std::fs::remove_file(&key).unwrap();
    std::fs::write(&key, kept).unwrap();
    let (_, error) = site.refused(&site.config());
    assert!(error.contains("chmod 600"), "a key that others can read is refused: {error}");
}

#[test]
fn h153_what_a_namespace_names_must_be_there() {
    let site = Site::new();
    site.configure(&site.text().replace("backend = \"pool:vol0\"", "backend = \"pool:vol1\""));
    let (code, error) = site.refused(&site.config());
    assert_eq!(code, 3, "{error}");
    let line = site.text().lines().position(|line| line.contains("pool:vol0")).unwrap() + 1;
    let place = format!("sluice.toml:{line}: subsystem[0].namespace[0].backend: pool:vol1: no such volume");
    assert!(error.contains(&place) && error.contains("did you mean 'vol0'?"), "{error}");
    site.configure(&site.text());
    assert_eq!(site.start().stop(), 0, "the refused start left the pool in order");
}

#[test]
fn the_command_line_and_check_say_what_is_wrong() {
    let run = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_offload-svc")).args(args).output().unwrap();
    assert_eq!(run(&[]).status.code(), Some(2));
    let absent = run(&["--config", "/nonexistent/x.toml"]);
    assert_eq!(absent.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&absent.stderr).starts_with("offload-svc: /nonexistent/x.toml: "));
    let site = Site::new();
    let config = site.config();
    let plan = run(&["--config", config.to_str().unwrap(), "--check", "--json"]);
    let plan: serde_json::Value = serde_json::from_slice(&plan.stdout).unwrap();
    let sum: u64 = plan["lines"].as_array().unwrap().iter().map(|line| line["bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["total_bytes"], sum);
    assert!((0..MEMBERS).all(|member| !site.member(member).exists()), "--check makes nothing");
    let explained = run(&["explain", "--json"]);
    assert!(serde_json::from_slice::<serde_json::Value>(&explained.stdout).unwrap()["primitives"].is_array());
}
