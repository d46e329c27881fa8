//! Snapshots and clones: what they hold, in what order they may go, and crashes at every write of it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use nvmf_target::backend::Outcome;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::handle::CloneSpec;
use super::super::{CheckpointError, VolumeError};
use super::harness::{LAYOUT, Live, Rig, Vol, spec};

const MIB: u64 = 1 << 20;

fn clone_spec(name: &str) -> CloneSpec {
    CloneSpec { name: name.into(), compression: None }
}

/// What volumes hold, by name, as stamps by block.
type Content = BTreeMap<String, Vec<u64>>;

fn set(content: &mut Content, name: &str, lba: u64, count: u64, stamp: u64) {
    content.get_mut(name).expect("known")[lba as usize..(lba + count) as usize].fill(stamp);
}

async fn check(live: &Live, content: &Content, what: &str) {
    for (name, blocks) in content {
        let vol = live.volume(name);
        for at in (0..blocks.len()).step_by(64) {
            let count = 64.min(blocks.len() - at);
            let stamps = vol.stamps(at as u64, count as u64).await;
            let stamps = stamps.unwrap_or_else(|outcome| panic!("{what}: {name} at {at}: {outcome:?}"));
            assert_eq!(stamps, blocks[at..at + count], "{what}: {name} from LBA {at} on");
        }
    }
}

async fn written(vol: &Vol, lba: u64, count: u64, stamp: u64) {
    assert_eq!(vol.write_stamp(lba, count, stamp).await, Outcome::Success);
}

/// Until no snapshot without a name is left.
async fn until_given_back(live: &Live) {
    for _ in 0..600 {
        if !live.pool.shared.all_volumes().iter().any(|volume| volume.is_hidden()) {
            return;
        }
        live.sleep(Duration::from_secs(1)).await;
    }
    panic!("never given back");
}

/// A volume, its snapshot, and two clones of that, each with writes and holes of its own.
async fn family(live: &Live) -> Content {
    let mut content = Content::new();
    let v = live.volume("v");
    written(&v, 0, 200, 1).await;
    written(&v, 4000, 16, 2).await;
    content.insert("v".into(), vec![0; 4096]);
    set(&mut content, "v", 0, 200, 1);
    set(&mut content, "v", 4000, 16, 2);
    let taken = live.pool.snapshot_volume("v", "s").await.expect("room");
    assert!(taken.snapshot && taken.origin.is_none(), "{taken:?}");
    content.insert("s".into(), content["v"].clone());
    let made = live.pool.clone_volume("s", clone_spec("c")).await.expect("room");
    assert!(!made.snapshot && made.origin.as_deref() == Some("s"), "{made:?}");
    live.pool.clone_volume("s", clone_spec("d")).await.expect("room");
    for name in ["c", "d"] {
        content.insert(name.into(), content["s"].clone());
    }
    written(&v, 10, 20, 3).await;
    set(&mut content, "v", 10, 20, 3);
    assert_eq!(v.deallocate(100, 30).await, Outcome::Success);
    set(&mut content, "v", 100, 30, 0);
    let c = live.volume("c");
    written(&c, 15, 100, 4).await;
    set(&mut content, "c", 15, 100, 4);
    assert_eq!(c.write_zeroes(150, 100).await, Outcome::Success);
    set(&mut content, "c", 150, 100, 0);
    // All of it, most of which holds nothing.
    assert_eq!(live.volume("d").deallocate(0, 4096).await, Outcome::Success);
    set(&mut content, "d", 0, 4096, 0);
    content
}

#[test]
fn each_holds_its_own_and_all_of_them_outlive_restarts() {
    for reactors in [1, 3] {
        let rig = Rig { reactors, ..Rig::new(LAYOUT, 64, reactors).with_volume(16 * MIB, 4096) };
        let content = rig.live(1, |live| async move {
            let content = family(&live).await;
            check(&live, &content, "written").await;
            live.pool.checkpoint().await.expect("room");
            check(&live, &content, "merged").await;
            let refused = live.volume("s").write_stamp(0, 1, 9).await;
            assert_eq!(refused, Outcome::Success, "the target refuses it: the back end says it is write-protected");
            let mut content = content;
            set(&mut content, "s", 0, 1, 9);
            // Nobody but this test can get there: back to what it was.
            written(&live.volume("s"), 0, 1, 1).await;
            set(&mut content, "s", 0, 1, 1);
            assert!(live.volume("s").backend.write_protected() && !live.volume("c").backend.write_protected());
            content
        });
        let again = content.clone();
        rig.live(2, move |live| async move {
            check(&live, &again, "after a crash").await;
            live.pool.shutdown().await.expect("room");
        });
        rig.live(3, move |live| async move { check(&live, &content, "after a clean stop").await });
    }
}

/// H85 and the like: whatever goes first, the others stay as they are, and in the end all the room is back.
#[test]
fn h85_they_go_in_any_order_and_give_their_room_back() {
    let names = ["v", "s", "c", "d"];
    for order in 0..24usize {
        let mut left: Vec<&str> = names.to_vec();
        let (mut code, mut picked) = (order, Vec::new());
        while !left.is_empty() {
            picked.push(left.remove(code % left.len()));
            code /= left.len() + 1;
        }
        let rig = Rig { reactors: 2, ..Rig::new(LAYOUT, 64, 2).with_volume(16 * MIB, 4096) };
        rig.live(order as u64, move |live| async move {
            let mut content = family(&live).await;
            let lineage = live.pool.shared.volume("v").expect("there").lineage;
            for name in picked {
                live.pool.delete_volume(name).await.unwrap_or_else(|error| panic!("{name}: {error}"));
                content.remove(name);
                check(&live, &content, &format!("order {order}, without {name}")).await;
                until_given_back_or_shared(&live).await;
                check(&live, &content, &format!("order {order}, given back {name}")).await;
                assert_eq!(
                    live.pool.shared.keyring.get(lineage, crate::stages::keys::KeyEpoch(0)).is_none(),
                    content.is_empty()
                );
            }
            until_given_back(&live).await;
            live.pool.checkpoint().await.expect("room");
            live.pool.checkpoint().await.expect("room");
            assert_eq!(live.pool.shared.segments.live_total(), 0, "order {order}");
            let usage = live.pool.shared.all_volumes();
            assert!(usage.is_empty(), "{usage:?}");
        });
    }
}

/// Snapshots without a name that two or more still read from stay.
async fn until_given_back_or_shared(live: &Live) {
    for _ in 0..600 {
        let shared = &live.pool.shared;
        let ready = |volume: &std::sync::Arc<super::super::shared::Volume>| {
            volume.is_hidden() && shared.children(volume).len() < 2
        };
        if !shared.all_volumes().iter().any(ready) {
            return;
        }
        live.sleep(Duration::from_secs(1)).await;
    }
    panic!("never given back");
}

#[test]
fn what_can_t_be_done_is_refused_with_words() {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        live.pool.snapshot_volume("v", "s").await.expect("room");
        let refuse = |result: Result<_, VolumeError>| result.expect_err("not possible").to_string();
        assert!(refuse(live.pool.snapshot_volume("v", "s").await).contains("taken"));
        assert!(refuse(live.pool.snapshot_volume("v", "").await).contains("letters"));
        assert!(refuse(live.pool.snapshot_volume("w", "t").await).contains("no volume"));
        assert!(refuse(live.pool.snapshot_volume("s", "t").await).contains("snapshot"));
        assert!(refuse(live.pool.resize_volume("s", 32 * MIB).await).contains("snapshot"));
        assert!(refuse(live.pool.clone_volume("s", clone_spec("v")).await).contains("taken"));
        assert!(refuse(live.pool.clone_volume("v", clone_spec("s")).await).contains("taken"));
        assert!(refuse(live.pool.create_volume(spec("s", MIB, 4096)).await).contains("taken"));
        // A name that has been given up may be used again, while what had it is still read from.
        live.pool.clone_volume("s", clone_spec("c")).await.expect("room");
        live.pool.clone_volume("s", clone_spec("d")).await.expect("room");
        live.pool.delete_volume("s").await.expect("room");
        assert!(live.pool.volume("s").is_none() && live.pool.volumes().len() == 3);
        live.pool.create_volume(spec("s", MIB, 4096)).await.expect("the name is free");
    });
}

/// DESIGN 2: a snapshot is one moment on all reactors. A host that writes to one shard after it was answered for another never
/// finds the second write without the first.
#[test]
fn a_snapshot_under_load_is_one_moment() {
    for seed in 0..6u64 {
        let rig = Rig { reactors: 3, ..Rig::new(LAYOUT, 96, 3).with_volume(64 * MIB, 4096) };
        rig.live(seed, move |live| async move {
            let (stop, done) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(0)));
            let run = live.pool.shared.volume("v").expect("there").run_blocks();
            let host = |vol: Vol, first: u64| {
                let (stop, done) = (Rc::clone(&stop), Rc::clone(&done));
                async move {
                    let mut number = 0;
                    while !stop.get() {
                        number += 2;
                        for shard in 0..4 {
                            written(&vol, shard * run + first, 1, number).await;
                        }
                    }
                    done.set(done.get() + 1);
                }
            };
            for first in 0..5 {
                live.env.spawn(Box::pin(host(live.volume("v"), first)));
            }
            for round in 0..4 {
                live.sleep(Duration::from_millis(20 + seed * 7)).await;
                let name = format!("s{round}");
                live.pool.snapshot_volume("v", &name).await.expect("room");
                let vol = live.volume(&name);
                for first in 0..5 {
                    let mut seen = Vec::new();
                    for shard in 0..4 {
                        seen.push(vol.stamps(shard * run + first, 1).await.expect("healthy")[0]);
                    }
                    let ordered = seen.windows(2).all(|pair| pair[0] == pair[1] || pair[0] == pair[1] + 2);
                    assert!(ordered && seen[0] <= seen[3] + 2 && seen[0] > 0, "seed {seed}, {name}: {seen:?}");
                }
            }
            stop.set(true);
            while done.get() < 5 {
                live.sleep(Duration::from_millis(10)).await;
            }
        });
    }
}

/// A short story; the content at its end, and which of its steps were answered.
async fn story(live: Live, answered: Rc<RefCell<Vec<&'static str>>>) {
    let v = live.volume("v");
    written(&v, 0, 24, 1).await;
    answered.borrow_mut().push("write");
    if live.pool.snapshot_volume("v", "s").await.is_err() {
        return;
    }
    answered.borrow_mut().push("snapshot");
    written(&v, 4, 4, 2).await;
    answered.borrow_mut().push("over");
    if live.pool.clone_volume("s", clone_spec("c")).await.is_err() {
        return;
    }
    answered.borrow_mut().push("clone");
    written(&live.volume("c"), 8, 4, 3).await;
    assert_eq!(live.volume("c").deallocate(16, 4).await, Outcome::Success);
    answered.borrow_mut().push("own");
    if live.pool.delete_volume("s").await.is_err() || live.pool.delete_volume("c").await.is_err() {
        return;
    }
    answered.borrow_mut().push("deleted");
    until_given_back(&live).await;
    answered.borrow_mut().push("given back");
}

/// DESIGN 3.4 for snapshots: whatever the write at which the power fails, each is there whole or not at all, and nobody else's data
/// is touched.
#[test]
fn a_crash_at_every_write_of_a_family_s_life() {
    let base = Rig::small(4096);
    let whole = Rig { disks: base.disks.copy(), ..base.clone() };
    let steps = whole.live(5, |live| async move {
        story(live.clone(), Rc::default()).await;
        live.world.steps.get()
    });
    assert!(steps > 50, "the story is too short to prove anything: {steps}");
    for crash_at in 1..=steps {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let answered: Rc<RefCell<Vec<&'static str>>> = Rc::default();
        let inner = Rc::clone(&answered);
        let _ = rig.live_until(5, Some(crash_at), move |live| story(live, inner));
        let answered = answered.take();
        for round in 0..2 {
            let answered = answered.clone();
            rig.live(crash_at ^ round, move |live| async move {
                let has = |step| answered.contains(&step);
                let there = |name: &str| live.pool.volume(name).is_some();
                let what = format!("crash at {crash_at}, round {round}, answered {answered:?}");
                let v = live.volume("v").stamps(0, 24).await.expect("healthy");
                assert!(!has("write") || v.iter().all(|stamp| matches!(stamp, 1 | 2)), "{what}: {v:?}");
                assert!(!has("over") || v[4..8] == [2; 4], "{what}: {v:?}");
                assert!(!has("snapshot") || has("own") || there("s"), "{what}");
                if there("s") {
                    assert_eq!(live.volume("s").stamps(0, 24).await.expect("healthy"), [1; 24], "{what}");
                }
                assert!(!has("clone") || has("own") || there("c"), "{what}");
                if there("c") {
                    let c = live.volume("c").stamps(0, 24).await.expect("healthy");
                    assert!(!has("own") || (c[8..12] == [3; 4] && c[16..20] == [0; 4]), "{what}: {c:?}");
                    assert!(c[..8] == [1; 8] && c[12..16] == [1; 4] && c[20..] == [1; 4], "{what}: {c:?}");
                }
                assert!(!has("deleted") || (!there("s") && !there("c")), "{what}");
                until_given_back_or_shared(&live).await;
                let again = live.volume("v").stamps(0, 24).await.expect("healthy");
                assert_eq!(v, again, "{what}");
            });
        }
    }
}

/// Random lives of a family: writes, holes, snapshots, clones, deletions in any order, cleaning, new keys, members that are away, and
/// crashes, on maps far larger than their cache. Every block of every one of them is compared, again and again.
#[test]
fn h137_random_lives_of_a_family() {
    for seed in 0..8u64 {
        let reactors = 1 + (seed % 3) as usize;
        let mut rig = Rig::new(LAYOUT, 72, reactors);
        rig.options.map_bytes_max = if seed % 2 == 0 { 256 << 10 } else { 4 << 20 };
        let rig = rig.with_volume(8 * MIB, 4096);
        let mut content = Content::new();
        content.insert("v".into(), vec![0; 2048]);
        let mut named = 0u32;
        for life in 0..4u64 {
            let (before, count) = (content.clone(), named);
            let lived = rig.live(seed << 8 | life, move |live| async move {
                check(&live, &before, &format!("seed {seed}, life {life}, at first")).await;
                let mut rng = StdRng::seed_from_u64(seed << 16 | life);
                let mut life_of = Life { live: live.clone(), content: before, named: count };
                for _ in 0..60 {
                    life_of.step(&mut rng).await;
                }
                let what = format!("seed {seed}, life {life}, at last");
                check(&live, &life_of.content, &what).await;
                if rng.random_bool(0.5) {
                    live.pool.shutdown().await.expect("room");
                }
                (life_of.content, life_of.named)
            });
            (content, named) = lived;
        }
    }
}

struct Life {
    live: Live,
    content: Content,
    named: u32,
}

impl Life {
    fn pick(&self, rng: &mut StdRng, snapshots: bool) -> Option<String> {
        let volumes = self.live.pool.volumes();
        let names: Vec<_> = volumes.into_iter().filter(|volume| volume.snapshot == snapshots).collect();
        (!names.is_empty()).then(|| names[rng.random_range(0..names.len())].name.clone())
    }

    fn new_name(&mut self, kind: &str) -> String {
        self.named += 1;
        format!("{kind}{}", self.named)
    }

    fn forget_or(&mut self, result: Result<(), VolumeError>) -> bool {
        match result {
            Ok(()) => true,
            Err(VolumeError::Checkpoint(CheckpointError::NoSpace)) => false,
            Err(error) => panic!("{error}"),
        }
    }

    async fn step(&mut self, rng: &mut StdRng) {
        match rng.random_range(0..100) {
            0..50 => self.write(rng).await,
            50..62 => self.clear(rng).await,
            62..70 => {
                if let (Some(of), true) = (self.pick(rng, false), self.content.len() < 9) {
                    let name = self.new_name("s");
                    let taken = self.live.pool.snapshot_volume(&of, &name).await;
                    if self.forget_or(taken.map(drop)) {
                        let content = self.content[&of].clone();
                        self.content.insert(name, content);
                    }
                }
            }
            70..78 => {
                let snapshots = rng.random_bool(0.6);
                if let (Some(of), true) = (self.pick(rng, snapshots), self.content.len() < 9) {
                    let name = self.new_name("c");
                    let made = self.live.pool.clone_volume(&of, clone_spec(&name)).await;
                    if self.forget_or(made.map(drop)) {
                        let content = self.content[&of].clone();
                        self.content.insert(name, content);
                    }
                }
            }
            78..86 => {
                let snapshots = rng.random_bool(0.7);
                if let (Some(name), true) = (self.pick(rng, snapshots), self.content.len() > 3) {
                    let deleted = self.live.pool.delete_volume(&name).await;
                    if self.forget_or(deleted.map(drop)) {
                        self.content.remove(&name);
                    }
                }
            }
            86..90 => {
                let _ = self.live.pool.checkpoint().await;
            }
            90..93 => {
                if let Some(name) = self.pick(rng, false) {
                    let rotated = self.live.pool.rotate_key(&name).await;
                    assert!(matches!(rotated, Ok(_) | Err(VolumeError::Rotating { .. })), "{rotated:?}");
                }
            }
            93..96 => self.live.sleep(Duration::from_secs(rng.random_range(1..40))).await,
            _ => {
                let names: Vec<String> = self.content.keys().cloned().collect();
                let name = &names[rng.random_range(0..names.len())];
                let one = self.content.iter().filter(|(known, _)| *known == name);
                check(&self.live, &one.map(|(a, b)| (a.clone(), b.clone())).collect(), "in between").await;
            }
        }
    }

    async fn write(&mut self, rng: &mut StdRng) {
        let Some(name) = self.pick(rng, false) else { return };
        let (lba, count) = (rng.random_range(0..1950), rng.random_range(1..96));
        let stamp = rng.random_range(1..1 << 30);
        match self.live.volume(&name).write_stamp(lba, count, stamp).await {
            Outcome::Success => set(&mut self.content, &name, lba, count, stamp),
            Outcome::CapacityExceeded => {
                // Part of it may be there.
                let now = self.live.volume(&name).stamps(lba, count).await.expect("healthy");
                let blocks = &mut self.content.get_mut(&name).expect("known")[lba as usize..(lba + count) as usize];
                assert!(now.iter().zip(&*blocks).all(|(now, before)| now == before || *now == stamp));
                blocks.copy_from_slice(&now);
            }
            other => panic!("{other:?}"),
        }
    }

    async fn clear(&mut self, rng: &mut StdRng) {
        let Some(name) = self.pick(rng, false) else { return };
        let lba = rng.random_range(0..1950);
        let count = if rng.random_bool(0.1) { 2048 - lba } else { rng.random_range(1..96) };
        let vol = self.live.volume(&name);
        let cleared =
            if rng.random_bool(0.5) { vol.deallocate(lba, count).await } else { vol.write_zeroes(lba, count).await };
        assert_eq!(cleared, Outcome::Success);
        set(&mut self.content, &name, lba, count, 0);
    }
}

/// H112 for a family: the old key goes only when nobody's records, nor pages of holes alone, are under it.
#[test]
fn h112_a_family_s_key_is_rotated_for_all_of_it() {
    let rig = Rig { reactors: 2, ..Rig::new(LAYOUT, 64, 2).with_volume(16 * MIB, 4096) };
    rig.live(1, |live| async move {
        let content = family(&live).await;
        live.pool.checkpoint().await.expect("room");
        let rotated = live.pool.rotate_key("c").await.expect("room");
        assert_eq!((rotated.epoch, rotated.rotating), (1, true));
        assert!(
            matches!(live.pool.rotate_key("v").await, Err(VolumeError::Rotating { .. })),
            "one key for all of them"
        );
        for _ in 0..600 {
            if !live.pool.keys().iter().any(|key| key.rotating) {
                break;
            }
            live.sleep(Duration::from_secs(1)).await;
        }
        let keys = live.pool.keys();
        assert!(keys.iter().all(|key| (key.epoch, key.rotating, key.left_bytes) == (1, false, 0)), "{keys:?}");
        check(&live, &content, "under the new key").await;
        let again = content.clone();
        live.pool.shutdown().await.expect("room");
        drop(again);
        content
    });
}

/// Old data that only snapshots hold is moved like any other: cleaning gives room back, and nothing of it changes.
#[test]
fn what_only_a_snapshot_holds_is_cleaned_too() {
    let rig = Rig { reactors: 2, ..Rig::new(LAYOUT, 40, 2).with_volume(64 * MIB, 4096) };
    rig.live(1, |live| async move {
        let v = live.volume("v");
        let mut content = Content::new();
        content.insert("v".into(), vec![0; 16384]);
        // Every other block is overwritten at once: segments are left half dead.
        for at in 0..160u64 {
            written(&v, at * 16, 16, 2 * at + 1).await;
            set(&mut content, "v", at * 16, 16, 2 * at + 1);
            written(&v, at * 16 + 4, 8, 2 * at + 101).await;
            set(&mut content, "v", at * 16 + 4, 8, 2 * at + 101);
        }
        live.pool.snapshot_volume("v", "s").await.expect("room");
        content.insert("s".into(), content["v"].clone());
        let mut stamp = 1001;
        while live.pool.shared.cleaned.load(std::sync::atomic::Ordering::Relaxed) < 20 {
            for at in 0..20u64 {
                stamp += 2;
                match v.write_stamp(at * 40, 8, stamp).await {
                    Outcome::Success => set(&mut content, "v", at * 40, 8, stamp),
                    other => panic!("{other:?}"),
                }
            }
            assert!(stamp < 400_000, "never cleaned");
        }
        check(&live, &content, "cleaned").await;
        live.pool.shutdown().await.expect("room");
        content
    });
}

/// A hole that hides what an older snapshot has stays one while the snapshot between is given back, whatever is written of its map
/// meanwhile.
#[test]
fn holes_of_a_deleted_snapshot_stay_until_they_have_gone_over() {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        let v = live.volume("v");
        written(&v, 0, 40, 1).await;
        live.pool.snapshot_volume("v", "old").await.expect("room");
        assert_eq!(v.deallocate(10, 1).await, Outcome::Success);
        written(&v, 30, 1, 3).await;
        live.pool.snapshot_volume("v", "between").await.expect("room");
        let (core, shared) = (&live.cores[0], &live.pool.shared);
        let between = shared.volume("between").expect("there");
        let shard = core.shard(&between, 0);
        // As if it had been deleted and the cleaner had moved a page and a record of it before its turn came.
        shard.map.move_page(super::super::page::PageId::leaf(0));
        let parts = core.maps.lookup(shard.tree_ref(), &(30..31)).await;
        shard.change(shared, parts[0]);
        live.pool.delete_volume("between").await.expect("room");
        live.pool.checkpoint().await.expect("room");
        until_given_back(&live).await;
        let stamps = v.stamps(0, 40).await.expect("healthy");
        assert_eq!((stamps[9], stamps[10], stamps[11], stamps[30]), (1, 0, 1, 3));
        assert_eq!(live.volume("old").stamps(10, 1).await.expect("healthy"), [1]);
    });
}
