//! Crashes: at every write of short workloads, during recovery, and at random under load on several reactors.

use std::cell::RefCell;
use std::rc::Rc;

use nvmf_target::backend::Outcome;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::harness::{LAYOUT, Live, Rig, SharedModel, Vol, check_all};
use super::model::{Model, run_of};
use super::sim::World;

const MIB: u64 = 1 << 20;

/// A deterministic little story: every kind of change, overlapping.
async fn story(live: Live, model: SharedModel) {
    let vol = live.volume("v");
    for (stamp, (lba, count)) in (1u64..).zip([(0, 1), (4, 40), (10, 3), (0, 2), (30, 8)]) {
        write(&vol, &model, lba, count, stamp).await;
    }
    clear(&vol, &model, 12, 10).await;
    write(&vol, &model, 15, 1, 9).await;
    let _ = live.pool.checkpoint().await;
    write(&vol, &model, 1, 5, 10).await;
    clear(&vol, &model, 0, 3).await;
    write(&vol, &model, 1, 1, 11).await;
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
    let outcome =
        if lba.is_multiple_of(2) { vol.deallocate(lba, count).await } else { vol.write_zeroes(lba, count).await };
    assert_eq!(outcome, Outcome::Success);
    model.borrow_mut().answer(lba, count, sent);
}

fn shared_model() -> SharedModel {
    Rc::new(RefCell::new(Model::default()))
}

/// How many steps a life takes.
fn steps_of(rig: &Rig, seed: u64) -> u64 {
    let rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
    rig.live(seed, |live| async move {
        story(live.clone(), shared_model()).await;
        live.world.steps.get()
    })
}

/// H81, DESIGN 3.4: whatever the write at which the power fails, everything answered is there; what was seen once stays.
#[test]
fn h81_a_crash_at_every_write_keeps_every_answered_write() {
    let base = Rig::small(4096);
    let steps = steps_of(&base, 5);
    assert!(steps > 50, "the story is too short to prove anything: {steps}");
    for crash_at in 1..=steps {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let model = shared_model();
        let inner = Rc::clone(&model);
        let _ = rig.live_until(5, Some(crash_at), move |live| story(live, inner));
        verify_twice(&rig, &model, crash_at);
    }
}

/// H83: recovery can be cut short at any of its own writes and begun again, and ends the same.
#[test]
fn h83_recovery_is_idempotent_under_crashes_of_its_own() {
    let base = Rig::small(4096);
    let steps = steps_of(&base, 6);
    for crash_at in (steps / 2..steps).step_by(7) {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let model = shared_model();
        let inner = Rc::clone(&model);
        let _ = rig.live_until(6, Some(crash_at), move |live| story(live, inner));
        for again in 1.. {
            let mounted = rig.live_until(crash_at ^ again, Some(again), |live| async move {
                drop(live);
            });
            if mounted.is_ok() {
                break;
            }
        }
        verify_twice(&rig, &model, crash_at);
    }
}

/// H83: one block written many times, cut at every write: some version is there, whole, and the same after another mount.
#[test]
fn h83_one_block_written_over_and_over() {
    let base = Rig::small(512);
    for crash_at in (20..140).step_by(3) {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let model = shared_model();
        let inner = Rc::clone(&model);
        let _ = rig.live_until(crash_at, Some(crash_at), move |live| async move {
            let vol = live.volume("v");
            for stamp in 1..50 {
                write(&vol, &inner, 7, 1, stamp).await;
            }
        });
        verify_twice(&rig, &model, crash_at);
    }
}

fn verify_twice(rig: &Rig, model: &SharedModel, what: u64) {
    for round in 0..2 {
        let model = Rc::clone(model);
        rig.live(what + 1000 * round, move |live| async move {
            check_all(&live.volume("v"), &model, &format!("crash at {what}, mount {round}")).await;
        });
    }
}

/// Told of each life, to turn members bad in it.
pub type Meddle = Rc<dyn Fn(u64, &Rc<World>)>;

/// Many tasks at once on several reactors, several lives, each cut at random.
pub fn random_lives(seed: u64, rig: Rig, lives: u64) {
    random_lives_with(seed, rig, lives, Rc::new(|_, _| {}));
}

/// The same; `meddle` may turn members bad in each life, after what was there has been checked.
pub fn random_lives_with(seed: u64, rig: Rig, lives: u64, meddle: Meddle) {
    let mut rng = StdRng::seed_from_u64(seed);
    let model = shared_model();
    let stamps = Rc::new(RefCell::new(0));
    for life in 0..lives {
        let crash_at = rng.random_range(30..2500);
        let rig = Rig { reactors: rng.random_range(1..=4), ..rig.clone() };
        let (inner, stamps) = (Rc::clone(&model), Rc::clone(&stamps));
        let (life_seed, meddle) = (seed * 1000 + life, Rc::clone(&meddle));
        let _ = rig.live_until(life_seed, Some(crash_at), move |live| async move {
            let vol = live.volume("v");
            check_all(&vol, &inner, &format!("seed {seed}, life {life}")).await;
            meddle(life, &live.world);
            let tasks =
                (0..6).map(|task| busy(vol.clone(), Rc::clone(&inner), Rc::clone(&stamps), life_seed * 10 + task));
            futures::future::join_all(tasks).await;
        });
    }
    let what = format!("seed {seed}, at the end");
    rig.live(seed, move |live| async move { check_all(&live.volume("v"), &model, &what).await });
}

async fn busy(vol: Vol, model: SharedModel, stamps: Rc<RefCell<u64>>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let blocks = vol.backend.geometry().block_count;
    for _ in 0..120 {
        let count = if rng.random_bool(0.7) { rng.random_range(1..6) } else { rng.random_range(6..60) };
        // Around a shard's edge as well as within.
        let around = [0, 1000, blocks - 100][rng.random_range(0..3usize)];
        let lba = (around + rng.random_range(0..80)).min(blocks - count);
        let stamp = {
            let mut stamps = stamps.borrow_mut();
            *stamps += 1;
            *stamps
        };
        match rng.random_range(0..10) {
            0..6 => write(&vol, &model, lba, count, stamp).await,
            6 => clear(&vol, &model, lba, count).await,
            7 => swap_one(&vol, &model, lba, stamp).await,
            _ => look(&vol, &model, lba, count).await,
        }
    }
}

/// Reads a range; H135: each block holds something that it may have held between the request and its answer.
async fn look(vol: &Vol, model: &SharedModel, lba: u64, count: u64) {
    let possible = |model: &SharedModel| -> Vec<Vec<u64>> {
        (lba..lba + count).map(|block| model.borrow().possible(block)).collect()
    };
    let before = possible(model);
    let stamps = vol.stamps(lba, count).await.unwrap_or_else(|outcome| panic!("read at {lba}: {outcome:?}"));
    let after = possible(model);
    for (index, stamp) in stamps.iter().enumerate() {
        let ok = before[index].contains(stamp) || after[index].contains(stamp);
        assert!(ok, "LBA {}: {stamp}, may hold {:?} or {:?}", lba + index as u64, before[index], after[index]);
    }
}

async fn swap_one(vol: &Vol, model: &SharedModel, lba: u64, stamp: u64) {
    let Ok(old) = vol.read(lba, 1).await else { panic!("read at {lba}") };
    let sent = model.borrow_mut().send(lba, 1, stamp);
    match vol.compare_and_write(lba, &old, &run_of(stamp, lba, 1, vol.block_bytes)).await {
        Outcome::Success => model.borrow_mut().answer(lba, 1, sent),
        Outcome::CompareFailure | Outcome::CapacityExceeded => model.borrow_mut().refuse(lba, 1, sent),
        other => panic!("compare and write at {lba}: {other:?}"),
    }
}

/// H81, H135: seeds of random lives. `SLUICE_SEEDS=FROM..TO` runs others.
#[test]
fn h81_h135_random_lives_keep_every_answered_write() {
    for seed in seeds(1..9) {
        let block_bytes = if seed % 3 == 0 { 512 } else { 4096 };
        naming_seed(seed, || random_lives(seed, Rig::new(LAYOUT, 48, 1).with_volume(16 * MIB, block_bytes), 5));
    }
}

/// Runs a test of one seed and says which it was if it fails.
pub fn naming_seed(seed: u64, test: impl FnOnce()) {
    let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
    if let Err(panic) = run {
        eprintln!("failing seed: {seed}");
        std::panic::resume_unwind(panic);
    }
}

pub fn seeds(default: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let Ok(given) = std::env::var("SLUICE_SEEDS") else { return default };
    let (from, to) = given.split_once("..").expect("SLUICE_SEEDS=FROM..TO");
    from.parse().expect("a number")..to.parse().expect("a number")
}
