//! What goes on beside the requests: deletion, the window, the cleaner, and members that answer late to it.

use std::rc::Rc;
use std::time::Duration;

use futures::future::{join, join_all};
use nvmf_target::backend::Outcome;

use super::super::clean::empty_segment;
use super::super::options::{SUPERBLOCK_AREA_BYTES, replay_segments_min};
use super::super::scan::find_stripes;
use super::super::segments::SegmentUse;
use super::super::*;
use super::harness::{LAYOUT, Live, Rig};
use super::sim::World;

const MIB: u64 = 1 << 20;

/// Requests under way on a volume that is being deleted may need segments that only a checkpoint brings: the deletion waits
/// for them, and the checkpoint must not wait for the deletion.
#[test]
fn a_deletion_that_waits_does_not_hold_up_checkpoints() {
    let mut rig = Rig::new(LAYOUT, 64, 1);
    rig.options.max_replay_segments = 6;
    rig.with_volume(64 * MIB, 4096).live(1, |live| async move {
        let vol = live.volume("v");
        let (start, checkpoints) = (live.world.elapsed(), live.pool.status().checkpoints);
        // This is not about the room beneath.
        (0..64).for_each(|segment| live.pool.shared.segments.set_backed(segment, true));
        // 80 records of random data, admitted together. Four make a stripe of 17 rows and three of these fit a segment's
        // 64: that is one segment more than the window has.
        let writes = join_all((0..5).map(|index| vol.write_stamp(index * 256, 256, 2 * index + 1)));
        let deletion = async {
            // All are admitted and none is written.
            live.sleep(Duration::from_micros(1)).await;
            live.pool.delete_volume("v").await
        };
        let (outcomes, deleted) = join(writes, deletion).await;
        assert_eq!(outcomes, vec![Outcome::Success; 5]);
        deleted.expect("good members");
        assert!(live.world.elapsed() - start < Duration::from_secs(1));
        let taken = live.pool.status().checkpoints - checkpoints;
        assert!(taken >= 2, "{taken} checkpoints: the writes needed none");
        assert!(live.pool.volume("v").is_none());
    });
}

/// The least window that is allowed keeps all reactors busy; with less, the pool is not parted among them.
#[test]
fn the_least_window_serves_all_reactors_and_less_is_refused() {
    for reactors in 1..=4 {
        let mut rig = Rig::new(LAYOUT, 64, reactors);
        rig.options.max_replay_segments = replay_segments_min(reactors) as u32;
        let mut rig = rig.with_volume(64 * MIB, 4096);
        rig.live(1, move |live| async move {
            let vol = live.volume("v");
            for round in 0..12 {
                // 16 shards, so that every reactor has its own.
                let writes = (0..16).map(|shard| vol.write_stamp(shard * 1024 + round * 8, 8, 2 * round + 1));
                assert_eq!(join_all(writes).await, vec![Outcome::Success; 16], "{reactors} reactors, round {round}");
            }
            let status = live.pool.status();
            assert!(status.replay_segments <= status.max_replay_segments);
            for shard in 0..16 {
                assert_eq!(vol.stamps(shard * 1024 + 88, 8).await.expect("healthy"), [23; 8]);
            }
        });
        rig.options.max_replay_segments -= 1;
        let world = World::new(&rig.disks, 2);
        let env = world.env();
        let started = world.run(async move { rig.start(&env).await.err() }).expect("no crash");
        world.end(2);
        let field = |error| match error {
            MountError::Option(error) => Some(error.field),
            _ => None,
        };
        assert_eq!(started.and_then(field), Some("max_replay_segments"), "{reactors} reactors");
    }
}

/// The cleaner repairs a shard, and the write takes its time. Meanwhile all in the segment dies and a checkpoint gives it
/// back. It must not be used anew before the write has ended: what was repaired would replace a shard of the new use.
#[test]
fn a_segment_is_not_used_anew_while_a_repair_in_it_is_under_way() {
    let mut rig = Rig::new(LAYOUT, 32, 1);
    rig.options.member_timeout = Duration::from_secs(5);
    rig.with_volume(16 * MIB, 4096).live(1, |live| async move {
        // Three stripes fill a segment.
        overwrite(&live, 4).await;
        let core = Rc::clone(&live.cores[0]);
        let (victim, alive) = core.shared.segments.closed()[0];
        assert!(alive > 0);
        damage_segment(&live, 1, victim);
        let place = place_of(victim);
        let held = live.world.hold_write(1, move |offset, _| place.contains(&offset));
        let (ended, cleaned) = futures::channel::oneshot::channel();
        let cleaner = Rc::clone(&core);
        live.env.spawn(Box::pin(async move {
            let _ = ended.send(empty_segment(&cleaner, victim).await.is_ok());
        }));
        while !held.is_caught() {
            live.sleep(Duration::from_micros(10)).await;
        }
        // Several times the segments of the pool, so that every one that can be had is.
        let reused = |(used, _): &(SegmentUse, u64)| used.index == victim.index && *used != victim;
        for _ in 0..90 {
            overwrite(&live, 4).await;
            if core.shared.segments.closed().iter().any(reused) {
                break;
            }
        }
        assert_eq!(core.shared.segments.live_bytes(victim.index), 0, "the case that this is about");
        held.release();
        assert_eq!(cleaned.await, Ok(true));
        assert_all_shards_good(&live).await;
        overwrite(&live, 120).await;
        assert_all_shards_good(&live).await;
    });
}

/// Writes the same 64 blocks of each of four places in turn, a stripe each.
async fn overwrite(live: &Live, times: u64) {
    let vol = live.volume("v");
    for turn in 0..times {
        assert_eq!(vol.write_stamp(turn % 4 * 64, 64, 2 * turn + 1).await, Outcome::Success);
    }
}

fn place_of(used: SegmentUse) -> std::ops::Range<u64> {
    let bytes = u64::from(LAYOUT.segment_bytes);
    let start = SUPERBLOCK_AREA_BYTES + u64::from(used.index) * bytes;
    start..start + bytes
}

/// Flips a bit in each of a segment's shards on a member.
fn damage_segment(live: &Live, member: usize, used: SegmentUse) {
    let mut disk = live.world.disks.0[member].borrow_mut();
    let place = place_of(used);
    let shards = disk.pages().filter(|(at, page)| place.contains(at) && page.starts_with(b"SHRD"));
    let shards: Vec<u64> = shards.map(|(at, _)| at).collect();
    assert!(!shards.is_empty());
    shards.into_iter().for_each(|at| disk.damage(at + 300, |byte| *byte ^= 1));
}

/// Every stripe of the log has all of its shards.
async fn assert_all_shards_good(live: &Live) {
    let core = &live.cores[0];
    for (used, _) in core.shared.segments.closed() {
        for header in find_stripes(&core.stripes, used).await {
            let stripe = core.stripes.read(header.location, used.sequence).await.expect("healthy");
            assert_eq!(stripe.bad, 0, "a shard of {:?} was replaced", header.location);
        }
    }
}

/// A member that takes too long to overwrite an old checkpoint's keys leaves the set: the zeroes could still reach it when
/// the segment is in use again.
#[test]
fn a_member_late_with_the_scrub_of_old_keys_leaves_the_set() {
    let rig = Rig::new(LAYOUT, 40, 1).with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        assert_eq!(vol.write_stamp(0, 8, 1).await, Outcome::Success);
        let is_scrub = |offset, bytes: &[u8]| offset >= SUPERBLOCK_AREA_BYTES && bytes.iter().all(|byte| *byte == 0);
        let held = live.world.hold_write(1, is_scrub);
        live.pool.checkpoint().await.expect("five members are left");
        assert!(held.is_caught());
        let status = live.pool.status();
        assert_eq!((status.members[1].state, status.members[1].timeouts), (MemberState::Out, 1));
        assert_eq!(status.health, Health::Degraded);
        held.release();
        assert_eq!(vol.write_stamp(8, 8, 2).await, Outcome::Success);
        assert_eq!(vol.stamps(0, 16).await.expect("degraded"), [[1; 8], [2; 8]].concat());
    });
    rig.live(2, |live| async move {
        assert_eq!(live.volume("v").stamps(0, 16).await.expect("degraded"), [[1; 8], [2; 8]].concat());
        assert_eq!(live.pool.status().mount.members_stale, [1]);
    });
}
