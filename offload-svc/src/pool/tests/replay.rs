//! What a mount makes of a crash at one exact moment: between two slices of a dump, behind stripes that were refused, in the
//! middle of a superblock's publication.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use nvmf_target::backend::Outcome;

use super::super::checkpoint::Section;
use super::super::checkpoint_io;
use super::super::map::Extent;
use super::super::members::{Excluder, Identity, Member, MemberSet};
use super::super::mount::stripe_io;
use super::super::probe::{choose, probe};
use super::super::stripe::ShardHeader;
use super::super::superblock::{SLOT_BYTES, Superblock};
use super::super::*;
use super::harness::{LAYOUT, Live, Rig, SMALL, Vol};
use super::sim::{Mode, World};

const MIB: u64 = 1 << 20;

/// Extents in one slice of a dump.
const SLICE: u64 = 2048;
/// Slices that fill the checkpoint's way to the members: two for a stripe of this layout, four on the channel, one in hand.
const SLICES_UNTIL_HELD: u64 = 7;
/// Blocks of 512 bytes in one run of a shard, and from there to the same shard's next run.
const RUN: u64 = 8192;
const NEXT_RUN: u64 = 16 * RUN;

/// Where the shard's nth block lies. Slices then end in the middle of what one record may span.
fn nth_block(n: u64) -> u64 {
    let n = n + 64;
    n / RUN * NEXT_RUN + n % RUN
}

/// A record written while a dump stands between two slices of its shard: the checkpoint has the record's latter half and, in
/// place of the first, what was there before. Replay puts the whole record in.
#[test]
fn a_record_that_a_dump_has_cut_is_replayed_whole() {
    let mut rig = Rig::new(SMALL, 200, 1);
    rig.options.max_replay_segments = 150;
    // No checkpoint but the one that is asked for.
    rig.options.checkpoint_interval = Duration::from_secs(3600);
    let rig = rig.with_volume(256 * MIB, 512);
    let edges: Vec<u64> = (1..=SLICES_UNTIL_HELD).map(|slice| nth_block(slice * SLICE)).collect();
    let straddling = edges.clone();
    rig.live(1, move |live| async move {
        let vol = live.volume("v");
        let blocks = 0..(SLICES_UNTIL_HELD + 2) * SLICE;
        for some in blocks.collect::<Vec<_>>().chunks(512) {
            let outcomes = join_all(some.iter().map(|n| vol.write_stamp(nth_block(*n), 1, 2))).await;
            assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Success));
        }
        let held = live.world.hold_write(0, |_, bytes| is_first_part_of_maps(bytes));
        let pool = live.pool.clone();
        let (taken, ()) = futures::join!(async move { pool.checkpoint().await }, async {
            while !held.is_caught() {
                live.sleep(Duration::from_micros(10)).await;
            }
            for edge in straddling {
                assert_eq!(vol.write_stamp(edge - 8, 16, 4).await, Outcome::Success);
            }
            held.release();
        });
        taken.expect("good members");
    });
    assert_cut_extent_in_checkpoint(&rig);
    rig.live(2, move |live| async move {
        let vol = live.volume("v");
        for edge in edges {
            let mut expected = vec![2; 8];
            expected.extend([4; 16]);
            expected.extend([2; 8]);
            assert_eq!(vol.stamps(edge - 16, 32).await.expect("healthy"), expected, "about block {edge}");
        }
    });
}

/// Whether a write is a shard of the stripe that follows the volumes in a checkpoint.
fn is_first_part_of_maps(bytes: &[u8]) -> bool {
    ShardHeader::parse(bytes, &SMALL, u32::MAX).is_ok_and(|header| header.stream == u32::MAX && header.number == 1)
}

/// Makes sure that the case is there: some extent of the checkpoint is only the latter part of its record.
fn assert_cut_extent_in_checkpoint(rig: &Rig) {
    let extents = extents_in_checkpoint(rig);
    let cut = extents.iter().filter(|extent| extent.record_blocks == 16 && extent.record_offset > 0).count();
    assert!(cut > 0, "no record was cut by a slice's edge");
}

fn extents_in_checkpoint(rig: &Rig) -> Vec<Extent> {
    let world = World::new(&rig.disks.copy(), 3);
    let (rig, env) = (rig.clone(), world.env());
    let read = world.run(async move {
        let found = probe(&env, &rig.inputs).await;
        let chosen = choose(&rig.inputs, &found, Force::default()).expect("all members are there");
        let state = chosen.state;
        let member = |(index, entry): (usize, &super::super::superblock::MemberEntry)| {
            Member::new(Identity { uuid: entry.uuid, slot: Some(MemberIndex(index as u8)), ..Identity::default() })
        };
        let members = state.members.iter().enumerate().map(member).collect();
        let timeout = rig.options.member_timeout;
        let set = Arc::new(MemberSet::new(state.pool, state.layout, state.segments, timeout, members));
        set.set(chosen.mask, state.epoch);
        let stripes = stripe_io(env, &set, &rig.options, Excluder::Mounting).expect("a valid code");
        let mut all = Vec::new();
        let take = |section| {
            if let Section::Extents { extents, .. } = section {
                all.extend(extents.into_iter().map(|(_, extent)| extent));
            }
            Ok(())
        };
        checkpoint_io::read(&stripes, &state.checkpoint.expect("written"), take).await.expect("healthy");
        all
    });
    read.expect("no crash")
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
