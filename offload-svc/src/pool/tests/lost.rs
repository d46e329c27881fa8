//! More of a stripe lost than its parity covers, in the part of the log that a mount replays.

use std::rc::Rc;

use nvmf_target::backend::Outcome;

use super::super::stripe::ShardHeader;
use super::super::{MountError, mount};
use super::harness::{LAYOUT, Rig, kek};
use super::sim::World;

const MIB: u64 = 1 << 20;
const SEGMENTS: u32 = 48;

/// A pool on which block 0 was written `writes` times, one stripe each, and then the power failed.
fn rig_after(writes: u64, checkpoint_after: Option<u64>) -> Rig {
    let rig = Rig::new(LAYOUT, SEGMENTS.into(), 1).with_volume(16 * MIB, 4096);
    rig.live(1, move |live| async move {
        let vol = live.volume("v");
        for stamp in 1..=writes {
            assert_eq!(vol.write_stamp(0, 1, stamp).await, Outcome::Success);
            if checkpoint_after == Some(stamp) {
                live.pool.checkpoint().await.expect("room");
            }
        }
    });
    rig
}

/// Headers of the log's stripes as they stand on the members: (member, offset, header).
fn shards(rig: &Rig) -> Vec<(usize, u64, ShardHeader)> {
    let mut shards = Vec::new();
    for (member, disk) in rig.disks.0.iter().enumerate() {
        for (at, page) in disk.borrow().pages() {
            if let Ok(header) = ShardHeader::parse(page, &LAYOUT, SEGMENTS)
                && header.stream == 0
            {
                shards.push((member, at, header));
            }
        }
    }
    shards
}

/// Destroys the shards that `pick` names: as (stripe's number, which of its shards).
fn destroy(rig: &Rig, pick: impl Fn(u64, u8) -> bool) -> usize {
    let doomed: Vec<_> = shards(rig).into_iter().filter(|(_, _, header)| pick(header.number, header.shard)).collect();
    for (member, at, _) in &doomed {
        rig.disks.0[*member].borrow_mut().damage(*at, |byte| *byte ^= 0xff);
    }
    doomed.len()
}

fn try_mount(rig: &Rig) -> Result<u64, MountError> {
    let world = World::new(&rig.disks, 9);
    let (rig, env) = (rig.clone(), world.env());
    let result = world.run(async move { mount(env, &rig.inputs, rig.options.clone(), kek()).await });
    let result = result.expect("no crash").map(|mounted| mounted.report().stripes_lost);
    world.end(9);
    result
}

/// DESIGN 3.3: an answered write whose stripe is gone from more members than the parity covers is not silently undone: the
/// mount refuses, names it, and leaves everything as it is, until somebody says that what was there before will do.
#[test]
fn an_answered_write_that_is_gone_stops_the_mount() {
    // The shards all gone, headers included; or one left, which tells that something was there but not what.
    for left in [0, 1] {
        let mut rig = rig_after(6, None);
        assert!(destroy(&rig, |number, shard| number == 4 && shard >= left) > 1);
        for _ in 0..2 {
            let error = try_mount(&rig).expect_err("an answered write is gone");
            assert!(matches!(error, MountError::LostWrites { lost: 1, stream: 0, number: 4 }), "{error}");
            assert!(error.to_string().contains("--force lost-writes"), "{error}");
        }
        rig.options.force.lost_writes = true;
        rig.live(3, |live| async move {
            let status = live.pool.status();
            assert_eq!(status.mount.stripes_lost, 1);
            assert_eq!((status.given_up.times, status.given_up.stripes, status.given_up.segments), (1, 1, 0));
            assert_eq!(live.volume("v").stamps(0, 1).await.expect("the last one is there"), [6]);
        });
        // It was weighed once: the next mount needs no force.
        rig.options.force = super::super::Force::default();
        assert_eq!(try_mount(&rig).expect("mounts"), 0);
        rig.live(4, |live| async move {
            let status = live.pool.status();
            assert_eq!((status.given_up.times, status.given_up.stripes), (1, 1), "it is not forgotten");
        });
    }
}

/// Members that answer with errors, or not at all, for a moment hide even the last write, which nobody vouches for: the
/// mount waits for better days and changes nothing, and then the write is there.
#[test]
fn what_members_do_not_answer_is_not_taken_for_unfinished() {
    let rig = rig_after(6, None);
    let last: Vec<_> = shards(&rig).into_iter().filter(|(_, _, header)| header.number == 5).collect();
    assert_eq!(last.len(), 3, "a lone block lies on three members");
    let set = |bad: bool| {
        for (member, at, _) in &last {
            let mut disk = rig.disks.0[*member].borrow_mut();
            if bad {
                disk.bad_pages.insert(at / 4096)
            } else {
                disk.bad_pages.remove(&(at / 4096))
            };
        }
    };
    set(true);
    for _ in 0..2 {
        let error = try_mount(&rig).expect_err("the last write may be there");
        assert!(matches!(error, MountError::NotReadable { .. }), "{error}");
    }
    set(false);
    rig.live(3, |live| async move {
        assert_eq!(live.volume("v").stamps(0, 1).await.expect("whole"), [6]);
    });
    let mut rig = rig_after(6, None);
    for (member, at, _) in shards(&rig).into_iter().filter(|(_, _, header)| header.number == 5) {
        rig.disks.0[member].borrow_mut().bad_pages.insert(at / 4096);
    }
    rig.options.force.lost_writes = true;
    rig.live(4, |live| async move {
        assert_eq!(live.volume("v").stamps(0, 1).await.expect("the one before"), [5]);
        let given_up = live.pool.status().given_up;
        assert_eq!((given_up.times, given_up.stripes, given_up.segments), (1, 0, 1));
    });
}

/// Up to the parity's number of lost shards, or all of a stripe that nobody was told of, mount as ever.
#[test]
fn what_parity_covers_and_what_nobody_was_told_of_stops_nothing() {
    let rig = rig_after(6, None);
    assert!(destroy(&rig, |number, shard| number == 4 && shard < 2) > 1);
    assert_eq!(try_mount(&rig).expect("two shards are covered"), 0);
    // The very last stripe could be one that was under way: nothing after it vouches for it.
    let rig = rig_after(6, None);
    assert!(destroy(&rig, |number, _| number == 5) > 1);
    assert_eq!(try_mount(&rig).expect("nobody vouches for it"), 0);
}

/// What the checkpoint has already is not missed by the replay: the map leads to it, and a read says that it is lost.
#[test]
fn a_stripe_that_the_checkpoint_has_is_lost_to_its_reads_only() {
    let rig = rig_after(6, Some(6));
    rig.live(2, |live| async move {
        for stamp in 7..10 {
            assert_eq!(live.volume("v").write_stamp(1, 1, stamp).await, Outcome::Success);
        }
    });
    let newest =
        shards(&rig).into_iter().filter(|(_, _, header)| header.number == 5).map(|(_, _, h)| h.sequence.number);
    let sequence = newest.max().expect("the sixth write's stripe");
    let doomed: Vec<_> = shards(&rig)
        .into_iter()
        .filter(|(_, _, header)| header.number == 5 && header.sequence.number == sequence)
        .collect();
    for (member, at, _) in doomed {
        let mut disk = rig.disks.0[member].borrow_mut();
        disk.damage(at, |byte| *byte ^= 0xff);
        disk.damage(at + 300, |byte| *byte ^= 0xff);
    }
    rig.live(3, |live| async move {
        let vol = live.volume("v");
        assert_eq!(vol.stamps(0, 1).await, Err(Outcome::UnrecoveredRead { slba: 0 }));
        assert_eq!(vol.stamps(1, 1).await.expect("whole"), [9]);
    });
}

/// Refusals for want of room leave gaps among the numbers, and gaps are no losses.
#[test]
fn stripes_given_up_are_not_missed() {
    let rig = Rig::new(LAYOUT, SEGMENTS.into(), 1).on_plain_files().with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        for round in 0..6u64 {
            live.world.disks.set_mode(3, if round % 2 == 1 { super::sim::Mode::Full } else { super::sim::Mode::Good });
            live.sleep(std::time::Duration::from_secs(1)).await;
            let mut outcomes = std::collections::BTreeSet::new();
            for at in 0..20 {
                outcomes.insert(format!("{:?}", vol.write_stamp(100 * round + 5 * at, 64, round + 1).await));
            }
            assert_eq!(round % 2 == 1, outcomes.contains("CapacityExceeded"), "{outcomes:?}");
        }
    });
    rig.disks.set_mode(3, super::sim::Mode::Good);
    assert_eq!(try_mount(&rig).expect("nothing is lost"), 0);
    let rig = Rc::new(rig);
    rig.live(2, |live| async move {
        assert_eq!(live.volume("v").stamps(400, 64).await.expect("the last good round"), vec![5; 64]);
    });
}
