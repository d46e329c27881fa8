//! What was completed is there again: after a stop, after a crash.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::daemon::{MEMBERS, NQN, Site};

#[test]
fn what_was_written_is_there_after_a_stop_and_a_start() {
    let site = Site::new();
    let daemon = site.start();
    assert_eq!(
        daemon.attach,
        format!("nvme connect -t tcp -a 127.0.0.1 -s {} -n {NQN} --ctrl-loss-tmo=1800", site.port)
    );
    assert_eq!(site.ask(&["pool", "show"])["mount"]["kind"], "formatted");
    let mode = std::fs::metadata(site.path().join("pool.key")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut host = daemon.connect();
    let mut written = BTreeMap::new();
    for i in 0..200u64 {
        let lba = i * 7919 % 16384;
        host.write(1, lba, i + 1);
        host.write(2, lba % 4096, i + 1);
        written.insert(lba, vec![i + 1]);
    }
    host.check(1, &written);
    let volumes = site.ask(&["volume", "list"]);
    assert_eq!(volumes[0]["used_bytes"], 200 * 4096);
    assert!(volumes[0]["ratio"].as_f64().unwrap() < 0.8, "half of each block is zeroes");
    assert_eq!(daemon.stop(), 0);

    let daemon = site.start();
    assert_eq!(site.ask(&["pool", "show"])["mount"]["kind"], "clean");
    let mut host = daemon.connect();
    host.check(1, &written);
    assert_eq!(host.stamp(2, 7919 % 4096), Some(0), "mem: is lost at exit");
    assert_eq!(site.ask(&["volume", "list"])[0]["uuid"], volumes[0]["uuid"]);
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn h81_every_completed_write_outlives_kill_9_again_and_again() {
    let site = Site::new();
    let mut expected: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    let mut stamp = 0;
    for round in 0..4u64 {
        let began = Instant::now();
        let daemon = site.start();
        let mut host = daemon.connect();
        host.check(1, &expected);
        let first_io = began.elapsed();
        if round > 0 {
            let mount = &site.ask(&["pool", "show"])["mount"];
            assert_eq!(mount["kind"], "recovered", "{mount}");
            let ms = mount["duration_ms"].as_u64().unwrap();
            println!("round {round}: mount {ms} ms, everything read {} ms after the start", first_io.as_millis());
        }
        for lba in expected.keys().copied().collect::<Vec<_>>() {
            // What is there now stays; a write that was under way has been decided.
            let now = host.stamp(1, lba).unwrap();
            expected.insert(lba, vec![now]);
        }
        let pid = daemon.pid();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300 + 150 * round));
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        });
        loop {
            stamp += 1;
            let lba = stamp * 31 % 997;
            let before = expected.entry(lba).or_insert_with(|| vec![0]);
            match host.try_write(1, lba, stamp) {
                Ok(()) => *before = vec![stamp],
                Err(_) => {
                    // Under way when the end came: old or new, whole.
                    before.push(stamp);
                    break;
                }
            }
        }
        killer.join().unwrap();
        daemon.kill();
    }
    assert!(stamp > 20, "some writes took place in each round");
    let daemon = site.start();
    daemon.connect().check(1, &expected);
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn a_lost_member_is_named_and_the_data_is_there() {
    let site = Site::new();
    let daemon = site.start();
    let mut host = daemon.connect();
    let written: BTreeMap<u64, Vec<u64>> = (0..64).map(|lba| (lba, vec![lba + 1])).collect();
    for lba in 0..64 {
        host.write(1, lba, lba + 1);
    }
    assert_eq!(daemon.stop(), 0);
    std::fs::remove_file(site.member(1)).unwrap();
    let daemon = site.start();
    let mut host = daemon.connect();
    host.check(1, &written);
    host.write(1, 3, 99);
    let pool = site.ask(&["pool", "show"]);
    assert_eq!(pool["health"]["state"], "degraded");
    assert_eq!(pool["health"]["members_active"], MEMBERS - 1);
    assert!(pool["unopened"][0][1].as_str().unwrap().contains("member-1"), "{pool}");
    assert!(!site.member(1).exists(), "nothing new takes a lost member's place");
    assert_eq!(daemon.stop(), 0);
    let daemon = site.start();
    assert_eq!(daemon.connect().stamp(1, 3), Some(99));
    assert_eq!(daemon.stop(), 0);
}

#[test]
fn a_stop_while_hosts_write_is_clean_and_keeps_what_was_completed() {
    let site = Site::new();
    let daemon = site.start();
    let mut host = daemon.connect();
    let pid = daemon.pid();
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGINT).unwrap();
    });
    let mut completed = BTreeMap::new();
    let mut stamp = 0;
    loop {
        stamp += 1;
        match host.try_write(1, stamp % 100, stamp) {
            Ok(()) => completed.insert(stamp % 100, vec![stamp]),
            Err(_) => break,
        };
    }
    stopper.join().unwrap();
    completed.entry(stamp % 100).or_insert_with(|| vec![0]).push(stamp);
    let mut daemon = daemon;
    assert_eq!(daemon.wait(), 0);
    let daemon = site.start();
    assert_eq!(site.ask(&["pool", "show"])["mount"]["kind"], "clean");
    daemon.connect().check(1, &completed);
    assert_eq!(daemon.stop(), 0);
}
