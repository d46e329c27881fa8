//! What a mount makes of a crash at one exact moment: between two slices of a merge, behind stripes that were refused, in the
//! middle of a superblock's publication.

use std::rc::Rc;
use std::time::Duration;

use futures::future::join_all;
use nvmf_target::backend::Outcome;

use super::super::stripe::ShardHeader;
use super::super::superblock::{SLOT_BYTES, Superblock};
use super::super::*;
use super::harness::{LAYOUT, Live, Rig, SMALL, Vol};
use super::sim::Mode;

const MIB: u64 = 1 << 20;

/// Blocks of 512 bytes in one run of a shard, and from there to the same shard's next run.
const RUN: u64 = 8192;
const NEXT_RUN: u64 = 16 * RUN;

/// Where the first shard's nth block lies.
fn nth_block(n: u64) -> u64 {
    n / RUN * NEXT_RUN + n % RUN
}

/// Records written while a merge stands between two of its slices, about the edge between them and elsewhere, are in no page
/// that it writes. A mount after a crash finds them in the log.
#[test]
fn what_is_written_during_a_merge_is_replayed_over_it() {
    let mut rig = Rig::new(LAYOUT, 400, 1);
    rig.options.max_replay_segments = 300;
    // No checkpoint but the one that is asked for.
    rig.options.checkpoint_interval = Duration::from_secs(3600);
    let rig = rig.with_volume(512 * MIB, 512);
    rig.live(1, move |live| async move {
        let vol = live.volume("v");
        // More leaves than one slice takes, all of one shard.
        for some in (0..LEAVES).collect::<Vec<_>>().chunks(100) {
            let outcomes = join_all(some.iter().map(|leaf| vol.write_stamp(nth_block(leaf * 256), 16, 2))).await;
            assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Success));
        }
        let checkpoints = live.pool.status().checkpoints;
        // The second slice, on whichever members it goes to first.
        let hold = |member| live.world.hold_write(member, |_, bytes| is_page_stripe(bytes));
        let held: Vec<_> = (0..LAYOUT.members()).map(hold).collect();
        let pool = live.pool.clone();
        let (taken, ()) = futures::join!(async move { pool.checkpoint().await }, async {
            while !held.iter().any(|held| held.is_caught()) {
                live.sleep(Duration::from_micros(10)).await;
            }
            for leaf in (0..LEAVES).step_by(7) {
                assert_eq!(vol.write_stamp(nth_block(leaf * 256) + 8, 16, 4).await, Outcome::Success);
            }
            held.into_iter().for_each(|held| held.release());
        });
        taken.expect("good members");
        assert_eq!(live.pool.status().checkpoints, checkpoints + 1, "the case that this is about");
    });
    rig.live(2, move |live| async move {
        let vol = live.volume("v");
        assert!(live.pool.status().mount.records_replayed >= LEAVES / 7);
        for leaf in 0..LEAVES {
            let mut expected = vec![2; 8];
            expected.extend(if leaf % 7 == 0 { [4; 16] } else { [2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0] });
            assert_eq!(vol.stamps(nth_block(leaf * 256), 24).await.expect("healthy"), expected, "leaf {leaf}");
        }
    });
}

/// Leaves written: more than one slice of a merge.
const LEAVES: u64 = 150;
/// Stripes of the first slice: one with leaves and one with the node above them.
const HELD_FROM: u64 = 2;

/// A page stripe of the second slice or a later one.
fn is_page_stripe(bytes: &[u8]) -> bool {
    let header = ShardHeader::parse(bytes, &LAYOUT, u32::MAX);
    header.is_ok_and(|header| header.stream == u32::MAX - 1 && header.number >= HELD_FROM)
}

/// Stripes refused because nothing is left beneath any member leave rows without even a mark. What is written behind them,
/// in the same segment, is found by a mount.
#[test]
fn what_follows_refused_stripes_in_a_segment_is_replayed() {
    let rig = Rig::new(LAYOUT, 40, 1).on_plain_files().with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        refuse_stripes(&live, &vol).await;
        assert_eq!(vol.write_stamp(100, 3, 7).await, Outcome::Success);
    });
    rig.live(2, |live| async move {
        let vol = live.volume("v");
        assert_eq!(vol.stamps(100, 3).await.expect("replayed"), [7; 3]);
        assert_eq!(vol.stamps(0, 64).await.expect("holes"), [0; 64]);
    });
}

/// Has two stripes refused for lack of space beneath all members: together longer than one can be, and there is room behind
/// them in the segment.
async fn refuse_stripes(live: &Live, vol: &Vol) {
    let set_all = |mode| (0..LAYOUT.members()).for_each(|member| live.world.disks.set_mode(member, mode));
    set_all(Mode::Full);
    for _ in 0..2 {
        // Random data: a stripe of 17 of the 20 rows that one can have, of the 64 of a segment.
        assert_eq!(vol.write_stamp(0, 64, 1).await, Outcome::CapacityExceeded);
        live.sleep(Duration::from_secs(1)).await;
    }
    set_all(Mode::Good);
    assert_eq!(live.pool.status().health, Health::Healthy);
}

/// A bad sector on each member, no two in one row: a mount that reads many rows at once still finds what stands in them.
#[test]
fn a_bad_sector_on_each_member_hides_no_row_from_a_mount() {
    let rig = Rig::new(LAYOUT, 40, 1).with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        // A stripe of one row each.
        for lba in 0..20 {
            assert_eq!(vol.write_stamp(lba, 1, 2 * lba + 1).await, Outcome::Success);
        }
    });
    for (member, disk) in rig.disks.0.iter().enumerate() {
        let mut disk = disk.borrow_mut();
        let is_log = |page: &[u8]| {
            ShardHeader::parse(page, &LAYOUT, u32::MAX)
                .is_ok_and(|header| header.stream == 0 && header.location.start_block % 6 == member as u32)
        };
        let pages: Vec<u64> = disk.pages().filter(|(_, page)| is_log(page)).map(|(at, _)| at / 4096).collect();
        assert!(!pages.is_empty(), "member {member} holds no shard of these rows");
        disk.bad_pages.extend(pages);
    }
    rig.live(2, |live| async move {
        let vol = live.volume("v");
        for lba in 0..20 {
            assert_eq!(vol.stamps(lba, 1).await.expect("one shard of each stripe is lost"), [2 * lba + 1]);
        }
        assert_eq!(live.pool.status().health, Health::Healthy);
    });
}

/// The newest superblock stands on one member alone, as its publication was cut; then a mount's own publication is cut too,
/// torn on every member, and the one member is lost. The others must not fall back to the superblock before: what its
/// checkpoint needs has been used anew.
#[test]
fn members_behind_the_newest_superblock_are_caught_up_before_the_next() {
    let rig = Rig::new(SMALL, 40, 1).with_volume(16 * MIB, 4096);
    let disks = Rc::clone(&rig.disks);
    rig.live(1, move |live| async move {
        let vol = live.volume("v");
        for stamp in 1..=4 {
            assert_eq!(vol.write_stamp(0, 32, stamp).await, Outcome::Success);
            live.pool.checkpoint().await.expect("good members");
        }
        assert_eq!(vol.write_stamp(0, 32, 5).await, Outcome::Success);
        // From here on only member 0 gets the new superblock.
        let before: Vec<_> = disks.0.iter().map(|disk| newest(&disk.borrow()).0).collect();
        assert!(before.iter().all(|generation| *generation == before[0]));
        let held: Vec<_> = (1..3).map(|member| live.world.hold_write(member, is_superblock)).collect();
        let pool = live.pool.clone();
        live.env.spawn(Box::pin(async move {
            let _ = pool.checkpoint().await;
        }));
        while newest(&disks.0[0].borrow()).0 == before[0] || !held.iter().all(super::sim::Held::is_caught) {
            live.sleep(Duration::from_micros(10)).await;
        }
        // Its sync.
        live.sleep(Duration::from_millis(1)).await;
        live.world.lose_unsynced();
    });
    let generations = |rig: &Rig| -> Vec<u64> { rig.disks.0.iter().map(|disk| newest(&disk.borrow()).0).collect() };
    let seen = generations(&rig);
    assert!(seen[1] == seen[2] && seen[0] == seen[1] + 1, "{seen:?}");
    rig.live(2, |live| async move { drop(live) });
    let published = generations(&rig);
    assert_eq!(published, vec![seen[0] + 1; 3]);
    for disk in &rig.disks.0 {
        // Torn: its checksum fails.
        let at = newest(&disk.borrow()).1;
        disk.borrow_mut().damage(at + 100, |byte| *byte ^= 0xFF);
    }
    let mut rig = rig;
    rig.inputs[0].size_bytes = None;
    rig.live(3, |live| async move {
        assert_eq!(live.volume("v").stamps(0, 32).await.expect("2 of 3 members"), [5; 32]);
    });
}

fn is_superblock(offset: u64, bytes: &[u8]) -> bool {
    offset < 2 * SLOT_BYTES as u64 && Superblock::parse(bytes).is_ok()
}

/// The newest superblock's generation and place.
fn newest(disk: &super::sim::Disk) -> (u64, u64) {
    let slots = [0, SLOT_BYTES as u64].into_iter();
    let read = slots.filter_map(|at| Some((Superblock::parse(&disk.page(at)).ok()?.generation, at)));
    read.max().expect("a superblock")
}
