//! The scrub: what it finds, repairs and says, and that it goes on after a restart.

use std::time::Duration;

use nvmf_target::backend::Outcome;

use super::super::{ScrubStatus, status::Health};
use super::harness::{LAYOUT, Live, Rig};
use super::sim::Mode;

const MIB: u64 = 1 << 20;

async fn written(live: &Live) {
    let vol = live.volume("v");
    for stamp in 0..80 {
        assert_eq!(vol.write_stamp(stamp * 16, 16, stamp * 2 + 1).await, Outcome::Success);
    }
    for stamp in 0..20 {
        assert_eq!(vol.write_stamp(3000 + stamp, 1, stamp * 2 + 1).await, Outcome::Success);
    }
}

async fn ended(live: &Live) -> ScrubStatus {
    for _ in 0..36_000 {
        let status = live.pool.status().scrub;
        if !status.running && status.ended_s > 0 {
            return status;
        }
        live.sleep(Duration::from_millis(100)).await;
    }
    panic!("the scrub does not end: {:?}", live.pool.status().scrub);
}

async fn scrubbed(live: &Live) -> ScrubStatus {
    live.pool.scrub(true);
    while !live.pool.status().scrub.running {
        live.sleep(Duration::from_millis(1)).await;
    }
    ended(live).await
}

/// Damage in headers and bodies, log and checkpoint, on two members: found where it is, repaired, and not found again; then
/// two other members can go.
#[test]
fn a_scrub_finds_repairs_and_tells() {
    let rig = Rig::new(LAYOUT, 64, 2).with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move {
        written(&live).await;
        live.pool.checkpoint().await.expect("room");
        assert_eq!(scrubbed(&live).await.bad_shards, 0);
        let mut damaged = 0;
        for member in [1, 4] {
            let mut disk = live.world.disks.0[member].borrow_mut();
            let shards: Vec<u64> =
                disk.pages().filter(|(_, page)| page.starts_with(b"SHRD")).map(|(at, _)| at).collect();
            for (turn, at) in shards.into_iter().enumerate() {
                disk.damage(at + [100, 300][turn % 2], |byte| *byte ^= 0x10);
                damaged += 1;
            }
        }
        let found = scrubbed(&live).await;
        assert!(found.bad_shards * 2 > damaged && found.bad_shards <= damaged, "{found:?}, {damaged} damaged");
        assert_eq!((found.repaired_shards, found.stripes_lost), (found.bad_shards, 0));
        assert!(found.findings.iter().all(|finding| [1, 4].contains(&finding.member)), "{found:?}");
        assert_eq!(found.findings.iter().map(|finding| finding.shards).sum::<u64>(), found.bad_shards);
        assert_eq!(scrubbed(&live).await.bad_shards, 0, "the second pass finds nothing");
        for member in [0, 2] {
            live.world.disks.set_mode(member, Mode::Broken);
        }
        let vol = live.volume("v");
        for stamp in 0..80 {
            assert_eq!(vol.stamps(stamp * 16, 16).await.expect("4 are left"), [stamp * 2 + 1; 16]);
        }
        let members = live.pool.status().members;
        assert_eq!(members[1].bad_shards + members[4].bad_shards, found.bad_shards, "nothing was left to be found");
    });
}

/// Under load a scrub takes what is being written for what it is.
#[test]
fn a_scrub_under_load_finds_nothing_wrong() {
    let rig = Rig::new(LAYOUT, 48, 2).with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        live.pool.scrub(true);
        for round in 0..6u64 {
            for stamp in 0..100 {
                let stamp = round * 100 + stamp;
                assert_eq!(vol.write_stamp(stamp * 7 % 3000, 9, stamp + 1).await, Outcome::Success);
            }
            live.pool.scrub(true);
        }
        let found = ended(&live).await;
        assert_eq!((found.bad_shards, found.stripes_lost), (0, 0), "{found:?}");
        assert_eq!(live.pool.status().health, Health::Healthy);
    });
}

/// Cut short by a crash, it goes on where it was, at the rate that is configured.
#[test]
fn a_scrub_goes_on_after_a_restart() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
    let full = rig.live(1, |live| async move {
        written(&live).await;
        scrubbed(&live).await.stripes
    });
    rig.options.scrub_rate = 256 << 10;
    let seen = rig.live(2, move |live| async move {
        live.pool.scrub(true);
        live.sleep(Duration::from_secs(25)).await;
        let status = live.pool.status().scrub;
        assert!(status.running && status.stripes > 0 && status.stripes < full, "{status:?} of {full}");
        status.stripes
    });
    rig.live(3, move |live| async move {
        assert!(live.pool.status().scrub.running, "it goes on by itself");
        let begun = live.world.elapsed();
        let found = ended(&live).await;
        assert_eq!((found.bad_shards, found.stripes_lost), (0, 0));
        // What was read since the last record of its place is read again; the rest once.
        assert!(found.stripes < full + seen, "{} stripes, a whole pass has {full}", found.stripes);
        assert!(live.world.elapsed() - begun > Duration::from_secs(5), "faster than its rate");
    });
}

/// It begins by itself when its time has come, and can be ended.
#[test]
fn a_scrub_begins_by_itself_and_can_be_ended() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
    rig.options.scrub_interval = Duration::from_secs(3600);
    rig.live(1, |live| async move {
        written(&live).await;
        let first = ended(&live).await;
        live.sleep(Duration::from_secs(3500)).await;
        assert_eq!(live.pool.status().scrub.ended_s, first.ended_s, "not before its time");
        live.sleep(Duration::from_secs(600)).await;
        assert!(live.pool.status().scrub.ended_s >= first.ended_s + 3600);
    });
    rig.options = super::harness::options();
    rig.options.scrub_rate = 64 << 10;
    rig.live(2, |live| async move {
        live.pool.scrub(true);
        live.sleep(Duration::from_secs(5)).await;
        assert!(live.pool.status().scrub.running);
        live.pool.scrub(false);
        live.sleep(Duration::from_secs(5)).await;
        assert!(!live.pool.status().scrub.running);
    });
}
