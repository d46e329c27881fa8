//! The map as a tree on the members: many times its cache, cut at any write, damaged, moved, and never read whole.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use nvmf_target::backend::Outcome;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::clean::empty_segment;
use super::super::core::{Core, Shard};
use super::super::options::MAP_BYTES_MIN;
use super::super::page::{LEAF_BLOCKS, PageId, PagePointer};
use super::super::stripe::ShardHeader;
use super::super::tree::Found;
use super::harness::{LAYOUT, Live, Rig, SharedModel, Vol, check_all, spec};
use super::model::Model;

const MIB: u64 = 1 << 20;

/// Counts again what trees and layers lead to, and compares with what is counted at every change: to the byte, with nothing
/// under way.
pub async fn audit(live: &Live) {
    let shards = || live.cores.iter().flat_map(|core| core.all_shards()).collect::<Vec<_>>();
    for tries in 0.. {
        live.pool.checkpoint().await.expect("healthy");
        // The cleaner may find something to do after it.
        live.sleep(Duration::from_millis(50)).await;
        let busy = live.pool.shared.cleaner_busy.load(Ordering::SeqCst);
        if !busy && shards().iter().all(|shard| shard.map.is_merged()) {
            break;
        }
        assert!(tries < 1000, "never quiet");
    }
    let segments = &live.pool.shared.segments;
    let mut counted: BTreeMap<u32, i64> = BTreeMap::new();
    for core in &live.cores {
        for shard in core.all_shards() {
            for (segment, bytes) in core.maps.weigh(shard.tree_ref()).await {
                *counted.entry(segment).or_default() += bytes;
            }
        }
    }
    counted.retain(|_, bytes| *bytes != 0);
    let all = 0..live.pool.shared.set.segment_count;
    let kept: BTreeMap<u32, i64> = all.map(|segment| (segment, segments.live_bytes(segment))).collect();
    let kept: BTreeMap<u32, i64> = kept.into_iter().filter(|(_, bytes)| *bytes != 0).collect();
    assert_eq!(counted, kept, "bytes alive by segment");
    let volumes = live.pool.shared.all_volumes();
    assert!(shards().iter().all(|shard| shard.map.is_merged()));
    let total: u64 = volumes.iter().map(|volume| volume.stored_bytes() + volume.map_bytes()).sum();
    assert_eq!(total as i64, counted.values().sum::<i64>());
    assert_eq!(live.pool.shared.layers.runs(), 0);
}

/// Little memory for maps: a cache of 48 KiB, and 128 changes that wait.
fn tight(mut rig: Rig) -> Rig {
    rig.options.map_bytes_max = MAP_BYTES_MIN;
    rig
}

fn shared_model() -> SharedModel {
    Rc::new(RefCell::new(Model::default()))
}

async fn write(vol: &Vol, model: &SharedModel, lba: u64, count: u64, stamp: u64) {
    let sent = model.borrow_mut().send(lba, count, stamp);
    match vol.write_stamp(lba, count, stamp).await {
        Outcome::Success => model.borrow_mut().answer(lba, count, sent),
        Outcome::CapacityExceeded => model.borrow_mut().refuse(lba, count, sent),
        other => panic!("write at {lba}: {other:?}"),
    }
}

async fn clear(vol: &Vol, model: &SharedModel, lba: u64, count: u64) {
    let sent = model.borrow_mut().send(lba, count, 0);
    assert_eq!(vol.deallocate(lba, count).await, Outcome::Success);
    model.borrow_mut().answer(lba, count, sent);
}

/// Random writes and deallocations over a whole volume, many more pages than the cache holds.
async fn scatter(vol: &Vol, model: &SharedModel, seed: u64, operations: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let blocks = vol.backend.geometry().block_count;
    for some in (0..operations).collect::<Vec<_>>().chunks(8) {
        let work = some.iter().map(|step| {
            let (count, stamp) = (rng.random_range(1..4u64), 2 * (seed * 100_000 + step) + 2);
            let lba = rng.random_range(0..blocks - count);
            let (vol, model, clears) = (vol.clone(), Rc::clone(model), rng.random_bool(0.1));
            async move {
                match clears {
                    true => clear(&vol, &model, lba, 64.min(blocks - lba)).await,
                    false => write(&vol, &model, lba, count, stamp).await,
                }
            }
        });
        join_all(work.collect::<Vec<_>>()).await;
    }
}

/// Issue 3: a map of more than ten times its cache is right, before a crash and after, at about one extra read a miss.
#[test]
fn a_map_of_many_times_its_cache_is_right() {
    let rig = tight(Rig::new(LAYOUT, 96, 2)).with_volume(1024 * MIB, 512);
    let model = shared_model();
    let inner = Rc::clone(&model);
    rig.live(1, move |live| async move {
        let vol = live.volume("v");
        scatter(&vol, &inner, 1, 5000).await;
        audit(&live).await;
        let (map_bytes, cache_bytes) = (heap_of_maps(&live).await, MAP_BYTES_MIN / 4 * 3);
        assert!(map_bytes as u64 > 10 * cache_bytes, "{map_bytes} bytes of pages");
        let before = live.pool.status().map_pages_read;
        let touched = inner.borrow().touched();
        let some: Vec<u64> = touched.iter().copied().step_by(7).collect();
        for lba in &some {
            let stamp = vol.stamps(*lba, 1).await.expect("healthy")[0];
            assert_eq!(inner.borrow().possible(*lba), [stamp], "LBA {lba}");
        }
        let read = live.pool.status().map_pages_read - before;
        // Nodes stay in the cache, or most of them.
        assert!(read <= some.len() as u64 * 3 / 2, "{read} pages read for {} blocks", some.len());
        scatter(&vol, &inner, 2, 500).await;
    });
    rig.live(2, move |live| async move {
        let touched = model.borrow().touched();
        for lba in touched.into_iter().step_by(5) {
            let stamp = live.volume("v").stamps(lba, 1).await.expect("healthy")[0];
            assert_eq!(model.borrow().possible(lba), [stamp], "LBA {lba}, mounted again");
        }
        audit(&live).await;
    });
}

/// Seeds of random lives with a map that never fits its cache, cut anywhere: in merges too.
#[test]
fn h81_random_lives_with_pages_in_play_keep_every_answered_write() {
    for seed in super::crash::seeds(1..5) {
        super::crash::naming_seed(seed, || {
            let mut rng = StdRng::seed_from_u64(seed);
            let model = shared_model();
            let rig = tight(Rig::new(LAYOUT, 64, 1)).with_volume(256 * MIB, if seed % 2 == 0 { 512 } else { 4096 });
            for life in 0..6u64 {
                let rig = Rig { reactors: rng.random_range(1..=3), ..rig.clone() };
                let (inner, crash_at) = (Rc::clone(&model), rng.random_range(200..4000));
                let _ = rig.live_until(seed * 100 + life, Some(crash_at), move |live| async move {
                    let vol = live.volume("v");
                    check_all(&vol, &inner, &format!("seed {seed}, life {life}")).await;
                    audit(&live).await;
                    scatter(&vol, &inner, seed * 10 + life, 400).await;
                });
            }
            rig.live(seed, move |live| async move {
                check_all(&live.volume("v"), &model, &format!("seed {seed}, at the end")).await;
                audit(&live).await;
            });
        });
    }
}

/// Every kind of change with a checkpoint after each, so that merges and their pages are what a crash cuts.
async fn story(live: Live, model: SharedModel) {
    let vol = live.volume("v");
    for (stamp, lba) in (1u64..).zip([0, 5, 3 * LEAF_BLOCKS, 12 * LEAF_BLOCKS, 2, 3 * LEAF_BLOCKS + 1]) {
        write(&vol, &model, lba, 4, stamp).await;
        let _ = live.pool.checkpoint().await;
    }
    clear(&vol, &model, 0, 4 * LEAF_BLOCKS).await;
    write(&vol, &model, 6, 1, 20).await;
    let _ = live.pool.checkpoint().await;
    clear(&vol, &model, 12 * LEAF_BLOCKS, 8).await;
    let _ = live.pool.checkpoint().await;
}

/// DESIGN 3.4: a crash at every write of merges, and again in the recovery from each, keeps every answered write.
#[test]
fn h81_a_crash_at_every_write_of_a_merge_loses_nothing() {
    let base = Rig::small(4096);
    let steps = Rig { disks: base.disks.copy(), ..base.clone() }.live(5, |live| async move {
        story(live.clone(), shared_model()).await;
        live.world.steps.get()
    });
    assert!(steps > 100, "the story is too short to prove anything: {steps}");
    for crash_at in 1..=steps {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let model = shared_model();
        let inner = Rc::clone(&model);
        let _ = rig.live_until(5, Some(crash_at), move |live| story(live, inner));
        // Its recovery is cut as well.
        let _ = rig.live_until(crash_at, Some(1 + crash_at % 23), |live| async move { drop(live) });
        for round in 0..2 {
            let model = Rc::clone(&model);
            rig.live(crash_at + 1000 * round, move |live| async move {
                check_all(&live.volume("v"), &model, &format!("crash at {crash_at}, mount {round}")).await;
                audit(&live).await;
            });
        }
    }
}

/// A mount reads the checkpoint and its window, however much is mapped.
#[test]
fn what_a_mount_reads_does_not_grow_with_what_is_mapped() {
    let reads_after = |records: u64| {
        let rig = Rig::new(LAYOUT, 160, 1).with_volume(512 * MIB, 512);
        rig.live(1, move |live| async move {
            let vol = live.volume("v");
            for some in (0..records).collect::<Vec<_>>().chunks(64) {
                join_all(some.iter().map(|record| vol.write_stamp(record * 16, 1, 2))).await;
            }
            live.pool.checkpoint().await.expect("healthy");
            assert_eq!(live.pool.status().map_extents, records);
            // What is left to replay is the same.
            assert_eq!(vol.write_stamp(0, 1, 4).await, Outcome::Success);
        });
        let reads = |rig: &Rig| rig.disks.0.iter().map(|disk| disk.borrow().reads).sum::<u64>();
        let before = reads(&rig);
        let scanned = rig.live(2, |live| async move { live.pool.status().mount.segments_scanned });
        let read = reads(&rig) - before;
        assert!(read < scanned * ROWS * LAYOUT.members() as u64, "{read} reads for {scanned} segments");
        read
    };
    // What is in the open segments differs.
    let (few, many) = (reads_after(200), reads_after(9000));
    assert!(many <= few + 2 * ROWS * LAYOUT.members() as u64, "{few} reads with 200 records, {many} with 9000");
}

/// Rows of a segment.
const ROWS: u64 = LAYOUT.segment_bytes as u64 / 4096;

/// Where the shards of a page's stripe begin, by member.
fn places_of(live: &Live, pointer: &PagePointer) -> Vec<(usize, u64)> {
    let (stripe, members) = (pointer.location.stripe, live.pool.shared.set.count());
    let stripes = &live.cores[0].stripes;
    (0..stripes.shards(&stripe)).map(|shard| (stripe.member_of(shard, members), stripes.offset(&stripe))).collect()
}

fn damage(live: &Live, pointer: &PagePointer) {
    for (member, at) in places_of(live, pointer) {
        live.world.disks.0[member].borrow_mut().damage(at + 300, |byte| *byte ^= 0x55);
    }
}

/// A pool of one reactor, with something in leaves 0, 1 and 4 of the first shard and in the second shard, all merged; pages
/// are read anew, as they would be long after.
fn leaves_rig() -> Rig {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(256 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        for (lba, stamp) in [(0, 2), (256, 4), (16 * 1024, 6), (1024, 8)] {
            assert_eq!(vol.write_stamp(lba, 20, stamp).await, Outcome::Success);
        }
        live.pool.shutdown().await.expect("healthy");
    });
    rig
}

/// DESIGN 3.3: a page beyond m losses gives Unrecovered Read Error for its own range, and the rest is served. What is written
/// there is there, also merged; and nothing is given up: the page once back, all is.
#[test]
fn a_lost_page_hides_its_own_range_and_gives_nothing_up() {
    for level in [0, 1] {
        leaves_rig().live(2, move |live| async move {
            let (vol, core) = (live.volume("v"), Rc::clone(&live.cores[0]));
            let shard = core.shard(&live.pool.shared.volume("v").expect("there"), 0);
            let (id, tree) = (PageId { level, index: 0 }, shard.map.tree());
            let Found::Page(pointer) = core.maps.find(shard.tree_ref(), tree.sources(id), id).await.0 else {
                panic!("no page of level {level}");
            };
            damage(&live, &pointer);
            // Leaf 0, or all of the shard.
            assert_eq!(vol.stamps(4, 4).await, Err(Outcome::UnrecoveredRead { slba: 4 }), "level {level}");
            let beside = vol.stamps(256, 1).await;
            let expected = if level == 0 { Ok(vec![4]) } else { Err(Outcome::UnrecoveredRead { slba: 256 }) };
            assert_eq!(beside, expected, "level {level}");
            assert_eq!(vol.stamps(1024, 20).await.expect("another shard"), [8; 20]);
            assert_eq!(vol.write_stamp(2, 2, 10).await, Outcome::Success);
            assert_eq!(vol.deallocate(10, 2).await, Outcome::Success);
            for round in 0..3 {
                live.pool.checkpoint().await.expect("a lost page stops no checkpoint");
                assert_eq!(vol.stamps(2, 2).await.expect("written since"), [10; 2], "level {level}, round {round}");
                assert_eq!(vol.stamps(10, 2).await.expect("deallocated since"), [0; 2], "level {level}");
                assert_eq!(vol.stamps(4, 1).await, Err(Outcome::UnrecoveredRead { slba: 4 }), "level {level}");
                assert_eq!(vol.write_stamp(300 + round, 1, 12).await, Outcome::Success);
            }
            damage(&live, &pointer);
            let mut all = vec![2; 20];
            all[2..4].fill(10);
            all[10..12].fill(0);
            for round in 0..3 {
                assert_eq!(vol.stamps(0, 20).await.expect("whole again"), all, "level {level}, round {round}");
                assert_eq!(vol.stamps(256, 20).await.expect("whole again"), [4; 20], "level {level}");
                assert_eq!(vol.stamps(16 * 1024, 20).await.expect("whole again"), [6; 20], "level {level}");
                assert_eq!(vol.write_stamp(0, 1, 2).await, Outcome::Success);
                live.pool.checkpoint().await.expect("healthy");
            }
            assert_eq!(vol.stamps(300, 3).await.expect("written meanwhile"), [12; 3]);
        });
    }
}

/// Up to m shards of every page are wrong: all is served, and a mount finds all.
#[test]
fn damaged_pages_within_parity_are_rebuilt_and_repaired() {
    let base = leaves_rig();
    let is_page =
        |page: &[u8]| ShardHeader::parse(page, &LAYOUT, u32::MAX).is_ok_and(|header| header.stream == u32::MAX - 1);
    let mut damaged = 0;
    for members in [[0, 1], [2, 3], [4, 5]] {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        for member in members {
            let mut disk = rig.disks.0[member].borrow_mut();
            let pages: Vec<u64> = disk.pages().filter(|(_, page)| is_page(page)).map(|(at, _)| at).collect();
            damaged += pages.len();
            pages.into_iter().for_each(|at| disk.damage(at + 500, |byte| *byte ^= 1));
        }
        for life in 2..4 {
            rig.live(life, |live| async move {
                let vol = live.volume("v");
                for (lba, stamp) in [(0, 2), (256, 4), (16 * 1024, 6), (1024, 8)] {
                    assert_eq!(vol.stamps(lba, 20).await.expect("rebuilt"), [stamp; 20]);
                }
                audit(&live).await;
            });
        }
    }
    assert!(damaged >= 6, "{damaged} shards of pages");
}

/// A segment of pages is cleaned like others: its pages are written anew, and it comes back.
#[test]
fn segments_of_pages_are_cleaned() {
    leaves_rig().live(2, |live| async move {
        let (core, shared) = (Rc::clone(&live.cores[0]), &live.pool.shared);
        let shard = core.shard(&shared.volume("v").expect("there"), 0);
        let root = shard.map.tree().root.expect("written");
        let closed = shared.segments.closed();
        let (used, live_before) =
            *closed.iter().find(|(used, _)| used.index == root.location.stripe.segment).expect("by the last mount");
        assert!(live_before > 0);
        assert!(empty_segment(&core, used).await.is_ok());
        audit(&live).await;
        assert_ne!(shard.map.tree().root.expect("still"), root);
        assert!(!shared.segments.is_closed(used), "it came back with the checkpoint that moved its pages");
        let vol = live.volume("v");
        for (lba, stamp) in [(0, 2), (256, 4), (16 * 1024, 6), (1024, 8)] {
            assert_eq!(vol.stamps(lba, 20).await.expect("moved"), [stamp; 20]);
        }
    });
}

/// Deleting a volume gives back all that its map led to, its pages too.
#[test]
fn a_deleted_volume_leaves_nothing_alive() {
    let rig = tight(Rig::new(LAYOUT, 64, 2)).with_volume(256 * MIB, 512);
    rig.live(1, |live| async move {
        scatter(&live.volume("v"), &shared_model(), 3, 600).await;
        live.pool.create_volume(spec("w", 16 * MIB, 4096)).await.expect("room");
        assert_eq!(live.volume("w").write_stamp(0, 16, 2).await, Outcome::Success);
        live.pool.delete_volume("v").await.expect("healthy");
        audit(&live).await;
        let alive = live.pool.status().space;
        assert!(alive.used_bytes < 16 * 5000, "{alive:?}");
    });
    rig.live(2, |live| async move {
        audit(&live).await;
        assert_eq!(live.volume("w").stamps(0, 16).await.expect("healthy"), [2; 16]);
    });
}

/// A long deallocation takes whole subtrees away and gives their space back.
#[test]
fn deallocating_a_whole_volume_empties_its_map() {
    tight(Rig::new(LAYOUT, 64, 2)).with_volume(1024 * MIB, 512).live(1, |live| async move {
        let (vol, model) = (live.volume("v"), shared_model());
        scatter(&vol, &model, 4, 800).await;
        let blocks = vol.backend.geometry().block_count;
        assert_eq!(vol.deallocate(0, blocks).await, Outcome::Success);
        audit(&live).await;
        let status = live.pool.status();
        assert_eq!((status.map_extents, status.space.used_bytes, vol.backend.geometry().used_blocks), (0, 0, 0));
        let touched = model.borrow().touched();
        for lba in touched.into_iter().step_by(11) {
            assert_eq!(vol.stamps(lba, 1).await.expect("healthy"), [0]);
        }
        live.sleep(Duration::from_secs(60)).await;
    });
}

/// What all pages of all maps would take in memory.
async fn heap_of_maps(live: &Live) -> usize {
    let mut bytes = 0;
    for core in &live.cores {
        for shard in core.all_shards() {
            let (mut leaf, tree) = (0, shard.map.tree());
            while let Some(next) = core.maps.next_leaf(shard.tree_ref(), tree, leaf).await {
                let pointer = leaf_of(core, &shard, next).await.expect("there");
                let page = core.maps.page(shard.tree_ref(), PageId::leaf(next), &pointer).await.expect("healthy");
                bytes += page.heap_bytes();
                leaf = next + 1;
            }
        }
    }
    bytes
}

async fn leaf_of(core: &Core, shard: &Shard, leaf: u64) -> Option<PagePointer> {
    let id = PageId::leaf(leaf);
    match core.maps.find(shard.tree_ref(), shard.map.tree().sources(id), id).await.0 {
        Found::Page(pointer) => Some(pointer),
        Found::Nothing | Found::Lost => None,
    }
}

/// A pool of format 1, from an image that was made by the last version that wrote it.
pub fn format_1() -> Rig {
    let rig = Rig::new(super::harness::SMALL, 30, 1);
    let image = zstd::decode_all(&include_bytes!("format1.zst")[..]).expect("whole");
    let mut at = 0;
    let mut take = |len: usize| {
        at += len;
        &image[at - len..at]
    };
    for disk in &rig.disks.0 {
        let count = u32::from_le_bytes(take(4).try_into().expect("4 bytes"));
        for _ in 0..count {
            let place = u64::from_le_bytes(take(8).try_into().expect("8 bytes"));
            let len = u32::from_le_bytes(take(4).try_into().expect("4 bytes"));
            disk.borrow_mut().set_page(place, take(len as usize));
        }
    }
    rig
}

/// DESIGN 3.7: a pool of format 1, whose last checkpoint held the maps themselves, cut off in the middle of things: all is there,
/// at once and after it has become one of the format of today.
#[test]
fn a_pool_of_format_1_is_mounted_and_gets_trees() {
    let rig = format_1();
    assert_eq!(rig.disks.0[0].borrow().page(0)[8..12], [1, 0, 1, 0]);
    for life in 1..4 {
        rig.live(life, move |live| async move {
            let (v, w) = (live.volume("v"), live.volume("w"));
            for at in 0..12u64 {
                let (mut in_v, mut in_w) = ([2 * at + 2; 5], [2 * at + 102; 9]);
                match at {
                    0 => in_w[2] = 62,
                    1 => in_v[2..4].fill(0),
                    2 => in_v[..3].fill(60),
                    3 => in_v.fill(0),
                    _ => {}
                }
                assert_eq!(v.stamps(at * 100, 5).await.expect("there"), in_v, "life {life}, v {at}");
                assert_eq!(w.stamps(at * 700, 9).await.expect("there"), in_w, "life {life}, w {at}");
            }
            audit(&live).await;
            let key = live.pool.keys().into_iter().find(|key| key.volume == "w").expect("there");
            assert_eq!(key.epoch, 1);
            if life == 2 {
                live.pool.shutdown().await.expect("healthy");
            }
        });
        let major = |slot: u64| rig.disks.0[0].borrow().page(slot * 4096)[8];
        assert_eq!(major(0).max(major(1)), 3);
    }
}

/// DESIGN 3.6: a pool filled with tiny scattered records, where the map's pages weigh as much as the data, says Capacity Exceeded
/// and never gets stuck: what was answered is there, all can be deallocated, and it can be filled again.
#[test]
fn h128_a_pool_full_of_tiny_records_is_never_stuck() {
    let mut rig = Rig::new(LAYOUT, 26, 2);
    rig.options.map_bytes_max = MIB;
    let rig = rig.with_volume(2048 * MIB, 512);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        let blocks = vol.backend.geometry().block_count;
        let mut filled = [0; 2];
        for (round, filled) in filled.iter_mut().enumerate() {
            let place = |n: u64| n * 7919 * 64 % blocks;
            // Odd stamps: data that does not compress.
            let stamp = 2 * round as u64 + 1;
            for n in 0.. {
                match vol.write_stamp(place(n), 4, stamp).await {
                    Outcome::Success => *filled = n + 1,
                    Outcome::CapacityExceeded => break,
                    other => panic!("{other:?}"),
                }
                assert!(n < 20_000, "never full");
            }
            for n in (0..*filled).step_by(13) {
                assert_eq!(vol.stamps(place(n), 4).await.expect("answered"), [stamp; 4], "round {round}, {n}");
            }
            assert_eq!(vol.deallocate(0, blocks).await, Outcome::Success);
            audit(&live).await;
            assert_eq!(live.pool.status().space.used_bytes, 0);
        }
        assert!(filled[0] > 500 && filled[1] > filled[0] / 2, "{filled:?} records");
    });
    rig.live(2, |live| async move { audit(&live).await });
}
