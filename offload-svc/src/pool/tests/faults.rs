//! Members that fail, hang, lie or fill up while the pool serves.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use nvmf_target::backend::Outcome;

use super::super::{Health, MemberState};
use super::harness::{LAYOUT, Rig};
use super::sim::Mode;

const MIB: u64 = 1 << 20;
const MODES: [Mode; 5] = [Mode::Broken, Mode::WriteBroken, Mode::Hung, Mode::Truncated, Mode::Good];

/// Any two of six members lost while serving, each way to be lost: reads and writes go on, within the member timeout, and
/// the next mount has all of it. H95: sizes below, at and above a stripe, healthy and with two members gone.
#[test]
fn h95_two_members_lost_while_serving_lose_nothing() {
    for (a, b) in (0..6).flat_map(|a| (a + 1..6).map(move |b| (a, b))) {
        let modes = [MODES[(a + b) % 4], MODES[(2 * a + b) % 4]];
        let rig = Rig::new(LAYOUT, 48, 2).with_volume(64 * MIB, 4096);
        rig.live(1, move |live| async move {
            let vol = live.volume("v");
            for (stamp, count) in [(1, 1), (2, 3), (3, 256)] {
                assert_eq!(vol.write_stamp(stamp * 300, count, stamp).await, Outcome::Success);
            }
            live.world.disks.set_mode(a, modes[0]);
            live.world.disks.set_mode(b, modes[1]);
            let start = live.world.elapsed();
            for (stamp, count) in [(1, 1), (2, 3), (3, 256)] {
                let expected = vec![stamp; count as usize];
                assert_eq!(vol.stamps(stamp * 300, count).await.expect("4 members are left"), expected);
            }
            for (stamp, count) in [(4, 1), (5, 3), (6, 256)] {
                assert_eq!(vol.write_stamp(stamp * 300, count, stamp).await, Outcome::Success, "{a} {b} {modes:?}");
            }
            // Two members may each cost a read and a write one timeout, and putting one out may find the other.
            let spent = live.world.elapsed() - start;
            assert!(spent < Duration::from_millis(500 * 6), "{spent:?} with {modes:?}");
            for stamp in 1..=6 {
                assert_eq!(vol.stamps(stamp * 300, 1).await.expect("4 members are left"), [stamp]);
            }
            let status = live.pool.status();
            assert_eq!(status.health, Health::Degraded);
            for member in [a, b] {
                assert_eq!(status.members[member].state, MemberState::Out, "{member} {modes:?}");
            }
        });
        // They come back with what they had: of an older epoch, they serve nothing.
        for member in [a, b] {
            rig.disks.set_mode(member, Mode::Good);
        }
        rig.live(2, move |live| async move {
            let vol = live.volume("v");
            for stamp in 1..=6 {
                assert_eq!(vol.stamps(stamp * 300, 1).await.expect("4 members are left"), [stamp]);
            }
            assert_eq!(live.pool.status().mount.members_stale, vec![a as u8, b as u8]);
        });
    }
}

/// Three lost: no wrong byte, no hang, writes fail, and the service stays up.
#[test]
fn three_members_lost_give_errors_and_no_wrong_byte() {
    for mode in [Mode::Broken, Mode::Hung, Mode::Truncated] {
        let rig = Rig::new(LAYOUT, 48, 2).with_volume(64 * MIB, 4096);
        rig.live(1, move |live| async move {
            let vol = live.volume("v");
            assert_eq!(vol.write_stamp(0, 256, 1).await, Outcome::Success);
            for member in [0, 2, 5] {
                live.world.disks.set_mode(member, mode);
            }
            let start = live.world.elapsed();
            let mut lost = 0;
            for lba in (0..256).step_by(8) {
                match vol.stamps(lba, 1).await {
                    Ok(stamps) => assert_eq!(stamps, [1]),
                    Err(outcome) => {
                        assert_eq!(outcome, Outcome::UnrecoveredRead { slba: lba });
                        lost += 1;
                    }
                }
            }
            assert!(lost > 0);
            assert_eq!(vol.write_stamp(0, 1, 2).await, Outcome::WriteFault);
            assert_eq!(vol.write_stamp(0, 1, 2).await, Outcome::WriteFault);
            assert_eq!(live.pool.status().health, Health::Failed);
            assert!(live.world.elapsed() - start < Duration::from_secs(60));
            assert!(live.pool.shutdown().await.is_err());
        });
    }
}

/// H100: damaged shards are found at the first read, returned right, repaired, and counted on their member.
#[test]
fn h100_damage_is_repaired_and_counted_once() {
    let rig = Rig::new(LAYOUT, 48, 1).with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        for lba in 0..100 {
            // Odd stamps: random data, a stripe each.
            assert_eq!(vol.write_stamp(lba, 1, 2 * lba + 1).await, Outcome::Success);
        }
        let mut damaged = 0;
        for disk in &live.world.disks.0[1..2] {
            let mut disk = disk.borrow_mut();
            let shards: Vec<u64> =
                disk.pages().filter(|(_, page)| page.starts_with(b"SHRD")).map(|(at, _)| at).collect();
            for at in shards {
                disk.damage(at + 300, |byte| *byte ^= 0x10);
                damaged += 1;
            }
        }
        assert!(damaged > 20);
        for _ in 0..2 {
            for lba in 0..100 {
                assert_eq!(vol.stamps(lba, 1).await.expect("rebuilt"), [2 * lba + 1]);
            }
        }
        let members = live.pool.status().members;
        let (bad, repaired) = (members[1].bad_shards, members[1].repaired_shards);
        assert!(bad > 10 && bad == repaired, "{bad} bad, {repaired} repaired");
        assert!(members.iter().enumerate().all(|(index, member)| index == 1 || member.bad_shards == 0));
        for lba in 0..100 {
            assert_eq!(vol.stamps(lba, 1).await.expect("repaired"), [2 * lba + 1]);
        }
        assert_eq!(live.pool.status().members[1].bad_shards, bad, "a second read finds nothing");
    });
}

/// Bytes flipped anywhere in two members, header bytes included, cost nothing but repairs.
#[test]
fn flipped_bytes_on_two_members_are_survived_by_reads_and_by_mounts() {
    for seed in 0..12u64 {
        let rig = Rig::new(LAYOUT, 48, 1).with_volume(64 * MIB, 4096);
        rig.live(seed, |live| async move {
            let vol = live.volume("v");
            for lba in 0..60 {
                assert_eq!(vol.write_stamp(lba * 5, 5, lba + 1).await, Outcome::Success);
            }
        });
        for member in [seed % 6, (seed + 1 + seed % 5) % 6] {
            let mut disk = rig.disks.0[member as usize].borrow_mut();
            let pages: Vec<u64> = disk.pages().map(|(at, _)| at).filter(|at| *at >= 65536).collect();
            for (index, at) in pages.into_iter().enumerate() {
                let byte = (index as u64 * 97 + seed * 31) % 4096;
                disk.damage(at + byte, |byte| *byte = byte.wrapping_add(1));
            }
        }
        rig.live(seed + 100, |live| async move {
            let vol = live.volume("v");
            for lba in 0..60 {
                assert_eq!(vol.stamps(lba * 5, 5).await.expect("rebuilt"), [lba + 1; 5]);
            }
        });
    }
}

/// H131: a full file system beneath one member is Capacity Exceeded, the member stays, and writes go on when there is room.
#[test]
fn h131_no_space_beneath_a_member_is_no_member_failure() {
    let rig = Rig::new(LAYOUT, 48, 1).on_plain_files().with_volume(64 * MIB, 4096);
    let seen = Rc::new(RefCell::new(0));
    rig.live(1, move |live| async move {
        let vol = live.volume("v");
        assert_eq!(vol.write_stamp(0, 8, 1).await, Outcome::Success);
        live.world.disks.set_mode(3, Mode::Full);
        for attempt in 0..20 {
            let outcome = vol.write_stamp(0, 64, 2).await;
            if outcome == Outcome::CapacityExceeded {
                *seen.borrow_mut() += 1;
            } else {
                assert_eq!(outcome, Outcome::Success, "attempt {attempt}");
            }
            live.sleep(Duration::from_millis(200)).await;
        }
        assert!(*seen.borrow() > 0, "the member never ran out");
        let status = live.pool.status();
        assert_eq!((status.health, status.members[3].write_errors), (Health::Healthy, 0));
        let stamps = vol.stamps(0, 8).await.expect("healthy");
        assert!(stamps.iter().all(|stamp| [1, 2].contains(stamp)));
        live.world.disks.set_mode(3, Mode::Good);
        live.sleep(Duration::from_secs(1)).await;
        assert_eq!(vol.write_stamp(0, 64, 3).await, Outcome::Success);
        assert_eq!(vol.stamps(0, 64).await.expect("healthy"), vec![3; 64]);
    });
    // What was refused does not come back.
    rig.live(2, |live| async move {
        assert_eq!(live.volume("v").stamps(0, 64).await.expect("healthy"), vec![3; 64]);
    });
}

/// Errors in the middle of random load, on up to two members, at random times; nothing answered is lost, lives over.
#[test]
fn random_load_with_members_failing_keeps_every_answered_write() {
    for seed in super::crash::seeds(100..104) {
        let rig = Rig::new(LAYOUT, 48, 1).with_volume(16 * MIB, 4096);
        let victims = [seed as usize % 6, (seed as usize / 6 + seed as usize + 1) % 6];
        super::crash::naming_seed(seed, || {
            super::crash::random_lives_with(
                seed,
                rig,
                4,
                Rc::new(move |life, world| {
                    for (turn, victim) in victims.iter().enumerate() {
                        if life > turn as u64 {
                            world.disks.set_mode(*victim, MODES[(seed as usize + turn) % 4]);
                        }
                    }
                }),
            );
        });
    }
}
