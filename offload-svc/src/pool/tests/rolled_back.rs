//! Members of which an older copy was put back: never older data, and whole again soon.

use std::rc::Rc;
use std::time::Duration;

use nvmf_target::backend::Outcome;

use super::super::probe::ChooseError;
use super::super::superblock::Lag;
use super::super::{Health, MemberIndex, MemberState, MountError, NewMember, Remark, mount};
use super::harness::{LAYOUT, Live, Rig, Vol, kek};
use super::sim::{Disk, Disks, Mode, World};

const MIB: u64 = 1 << 20;
/// Blocks that the tests write.
const BLOCKS: u64 = 640;

async fn fill(vol: &Vol, stamp: u64) {
    for lba in (0..BLOCKS).step_by(16) {
        assert_eq!(vol.write_stamp(lba, 16, 2 * stamp + 1).await, Outcome::Success, "{stamp} at {lba}");
    }
}

async fn holds(vol: &Vol, stamp: u64, what: &str) {
    for lba in (0..BLOCKS).step_by(16) {
        let read = vol.stamps(lba, 16).await;
        assert_eq!(read.unwrap_or_else(|error| panic!("{what}, LBA {lba}: {error:?}")), [2 * stamp + 1; 16], "{what}");
    }
}

async fn whole(live: &Live) {
    for _ in 0..6000 {
        if live.pool.status().health == Health::Healthy {
            return;
        }
        live.sleep(Duration::from_millis(100)).await;
    }
    panic!("not whole again: {:?}", live.pool.status());
}

/// A pool that was written over after copies of its members were taken, in as many publications as there are checkpoints.
fn written_since(checkpoints: u64) -> (Rig, Rc<Disks>) {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(16 * MIB, 4096);
    let copies = rig.live(1, move |live| async move {
        let vol = live.volume("v");
        fill(&vol, 1).await;
        live.pool.checkpoint().await.expect("room");
        let copies = live.world.disks.copy();
        fill(&vol, 2).await;
        for _ in 0..checkpoints {
            live.pool.checkpoint().await.expect("room");
        }
        fill(&vol, 3).await;
        copies
    });
    (rig, copies)
}

fn put_back(rig: &Rig, copies: &Disks, members: &[usize]) -> Rig {
    let rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
    for member in members {
        *rig.disks.0[*member].borrow_mut() = copies.0[*member].borrow().copy();
    }
    rig
}

/// Others are lost, on a copy: what is left has all of it, and no shard is bad.
fn holds_without(rig: &Rig, lost: &[usize], stamp: u64) {
    let rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
    let lost = lost.to_vec();
    rig.live(77, move |live| async move {
        lost.iter().for_each(|member| live.world.disks.set_mode(*member, Mode::Broken));
        holds(&live.volume("v"), stamp, &format!("without {lost:?}")).await;
        let members = live.pool.status().members;
        let bad = members.iter().filter(|member| !lost.contains(&member.index.into())).map(|member| member.bad_shards);
        assert_eq!(bad.sum::<u64>(), 0, "without {lost:?}");
    });
}

/// DESIGN 3.5: older copies of m members, of the same epoch: they serve nothing until they have been read through and brought
/// up to date, and are named; then any two others can go. Also where that is cut short by a crash.
#[test]
fn older_copies_of_members_are_stale_and_filled_anew() {
    let (rig, copies) = written_since(3);
    for crash_at in [None, Some(5), Some(20), Some(40), Some(80), Some(120)] {
        let rig = put_back(&rig, &copies, &[1, 4]);
        let cut = rig.live_until(2, crash_at, |live| async move {
            let status = live.pool.status();
            assert_eq!((status.mount.members_rolled_back, status.health), (vec![1, 4], Health::Degraded));
            for place in [1, 4] {
                let member = &status.members[place];
                assert_eq!(member.remarks, [Remark::RolledBack { publications: 3 }]);
                let text = member.remarks[0].to_string();
                assert!(text.starts_with("rolled back: superblock 3 publications behind"), "{text}");
                assert!(matches!(member.state, MemberState::Stale | MemberState::Rebuilding), "{member:?}");
            }
            holds(&live.volume("v"), 3, "beside older copies").await;
            whole(&live).await;
            assert!(live.pool.status().members.iter().all(|member| member.remarks.is_empty()));
        });
        assert!(cut.is_ok() || crash_at.is_some());
        if cut.is_err() {
            rig.live(3, |live| async move {
                holds(&live.volume("v"), 3, "after a crash").await;
                whole(&live).await;
            });
        }
        for lost in [[0, 2], [3, 5], [0, 5]] {
            holds_without(&rig, &lost, 3);
        }
    }
}

/// One publication behind is what a crash may leave, so these count: what they lack is found when it is read, never served
/// as it was, and right again after a scrub.
#[test]
fn copies_older_by_one_publication_serve_nothing_old() {
    let (rig, copies) = written_since(1);
    let rig = put_back(&rig, &copies, &[0, 3]);
    rig.live(2, |live| async move {
        assert_eq!(live.pool.status().health, Health::Healthy);
        holds(&live.volume("v"), 3, "one publication behind").await;
        live.pool.scrub(true);
        while live.pool.status().scrub.ended_s == 0 {
            live.sleep(Duration::from_secs(1)).await;
        }
        let bad: u64 = live.pool.status().members.iter().map(|member| member.bad_shards).sum();
        assert!(bad > 0, "the case that this is about");
        assert_eq!(live.pool.status().scrub.stripes_lost, 0);
    });
    for lost in [[1, 2], [4, 5]] {
        holds_without(&rig, &lost, 3);
    }
}

fn try_mount(rig: &Rig) -> Option<MountError> {
    let world = World::new(&rig.disks, 9);
    let (rig, env) = (rig.clone(), world.env());
    let result = world.run(async move { mount(env, &rig.inputs, rig.options.clone(), kek()).await.err() });
    world.end(9);
    result.expect("no crash")
}

fn contents(disk: &Disk) -> Vec<(u64, Vec<u8>)> {
    disk.pages().map(|(at, page)| (at, page.to_vec())).collect()
}

/// More older copies than the parity covers: the mount refuses, names them, and changes nothing. By one publication: nothing
/// old is served. All of them together are one consistent older pool, which nothing on the members can tell.
#[test]
fn too_many_older_copies_are_refused() {
    let (rig, copies) = written_since(2);
    let older = put_back(&rig, &copies, &[0, 2, 5]);
    let before: Vec<_> = older.disks.0.iter().map(|disk| contents(&disk.borrow())).collect();
    let error = try_mount(&older).expect("three of 4+2");
    let MountError::Members { source: ChooseError::RolledBack { older: named, newer }, .. } = &error else {
        panic!("{error}")
    };
    let expected = ["mem:0", "mem:2", "mem:5"].map(|name| (name.to_owned(), Lag::Behind(2)));
    assert_eq!((&named[..], newer.len()), (&expected[..], 0), "three of them make no pool");
    let text = error.to_string();
    assert!(text.contains("mem:2 (superblock 2 publications behind)") && !text.contains("start without"), "{error}");
    let after: Vec<_> = older.disks.0.iter().map(|disk| contents(&disk.borrow())).collect();
    assert!(before == after, "a refused mount has written");
    let error = try_mount(&put_back(&rig, &copies, &[0, 1, 2, 5])).expect("four of 4+2").to_string();
    assert!(
        error.contains("to lose what was written since, start without the members that are newer (mem:3, mem:4)"),
        "{error}"
    );

    let (rig, copies) = written_since(1);
    let older = put_back(&rig, &copies, &[0, 2, 5]);
    if try_mount(&older).is_none() {
        older.live(3, |live| async move {
            for lba in 0..BLOCKS {
                match live.volume("v").stamps(lba, 1).await {
                    Ok(stamps) => assert_eq!(stamps, [7], "LBA {lba}"),
                    Err(outcome) => assert_eq!(outcome, Outcome::UnrecoveredRead { slba: lba }),
                }
            }
        });
    }
}

/// An older copy of a member that had left the set meanwhile: what it is known to have is not relied on, however recently it
/// left. The member itself is brought up to date by what changed.
#[test]
fn an_older_copy_of_a_member_that_was_away_is_filled_anew() {
    for (put_back_older, at_mount) in [(true, true), (true, false), (false, true)] {
        let rig = Rig::new(LAYOUT, 64, 1).with_volume(16 * MIB, 4096);
        let copies = rig.live(1, move |live| async move {
            let vol = live.volume("v");
            fill(&vol, 1).await;
            live.pool.checkpoint().await.expect("room");
            let copies = live.world.disks.copy();
            fill(&vol, 2).await;
            live.pool.checkpoint().await.expect("room");
            fill(&vol, 3).await;
            live.pool.checkpoint().await.expect("room");
            live.world.disks.set_mode(2, Mode::Broken);
            fill(&vol, 4).await;
            assert_eq!(live.pool.status().health, Health::Degraded);
            live.pool.shutdown().await.expect("five are good");
            copies
        });
        rig.disks.set_mode(2, Mode::Good);
        let older = if put_back_older { put_back(&rig, &copies, &[2]) } else { rig };
        let (mut started, size_bytes) = (older.clone(), older.inputs[2].size_bytes.expect("it is there"));
        if !at_mount {
            started.inputs[2].size_bytes = None;
        }
        started.live(2, move |live| async move {
            if !at_mount {
                let new = NewMember { slot: MemberIndex(2), name: "mem:2".into(), size_bytes };
                assert_eq!(live.pool.attach_member(new).await.expect("it is ours").index, 2);
            }
            holds(&live.volume("v"), 4, "beside an older copy").await;
            whole(&live).await;
        });
        for lost in [[0, 1], [4, 5]] {
            holds_without(&older, &lost, 4);
        }
    }
}

/// Two copies of a pool that both went on: a member of the other one, with as many publications, does not count.
#[test]
fn a_member_of_another_history_is_filled_anew() {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(16 * MIB, 4096);
    let other = Rig { disks: rig.disks.copy(), ..rig.clone() };
    for (rig, stamp) in [(&rig, 4), (&other, 5)] {
        rig.live(stamp, move |live| async move { fill(&live.volume("v"), stamp).await });
    }
    let mixed = put_back(&rig, &other.disks, &[5]);
    mixed.live(6, |live| async move {
        let status = live.pool.status();
        assert_eq!(status.members[5].remarks, [Remark::OtherHistory]);
        holds(&live.volume("v"), 4, "one of another history").await;
        whole(&live).await;
    });
    holds_without(&mixed, &[0, 1], 4);
}
