//! File systems beneath members that are full: writes are refused, all else goes on, and space comes back.

use std::time::Duration;

use nvmf_target::backend::Outcome;

use super::super::probe::FormatError;
use super::super::{Health, Remark, VolumeError, format};
use super::harness::{LAYOUT, Live, Rig, Vol, spec};
use super::sim::{Mode, World};

const MIB: u64 = 1 << 20;
/// Blocks that one step writes.
const STEP: u64 = 16;

fn set(live: &Live, members: &[usize], mode: Mode) {
    members.iter().for_each(|member| live.world.disks.set_mode(*member, mode));
}

/// Writes anew from `step` on until it is refused; gives the first step that was.
async fn fill(vol: &Vol, mut step: u64) -> u64 {
    loop {
        match vol.write_stamp(step * STEP, STEP, 2 * step + 1).await {
            Outcome::Success => step += 1,
            Outcome::CapacityExceeded => return step,
            other => panic!("step {step}: {other:?}"),
        }
        assert!(step < 4000, "never full");
    }
}

async fn holds(vol: &Vol, steps: impl Iterator<Item = u64>, what: &str) {
    for step in steps {
        let read = vol.stamps(step * STEP, STEP).await;
        let read = read.unwrap_or_else(|error| panic!("{what}, step {step}: {error:?}"));
        assert_eq!(read, [2 * step + 1; STEP as usize], "{what}");
    }
}

/// DESIGN 3.6: beneath one member or all of them there is no room left. Writes get Capacity Exceeded, reads, deallocation,
/// making and deleting volumes, cleaning and mounts go on, time and again; members stay, and `pool show` names them.
#[test]
fn a_full_file_system_refuses_writes_and_nothing_else() {
    for (members, reactors) in [(vec![3], 1), (vec![3], 2), ((0..6).collect::<Vec<_>>(), 2)] {
        let rig = Rig::new(LAYOUT, 64, reactors).with_volume(64 * MIB, 4096);
        let full = members.clone();
        let written = rig.live(1, move |live| async move {
            let vol = live.volume("v");
            for step in 0..30 {
                assert_eq!(vol.write_stamp(step * STEP, STEP, 2 * step + 1).await, Outcome::Success);
            }
            set(&live, &full, Mode::Full);
            let written = fill(&vol, 30).await;
            holds(&vol, 0..written, "full").await;
            let status = live.pool.status();
            assert_eq!(status.health, Health::Healthy);
            for member in &status.members {
                let expected: &[Remark] =
                    if full.contains(&member.index.into()) { &[Remark::FileSystemFull] } else { &[] };
                assert_eq!(member.remarks, expected, "member {}", member.index);
            }
            // Far more markers than the reserve holds, each in a stripe of its own, of which few free anything.
            for round in 0..40 {
                for lba in 0..20 {
                    assert_eq!(vol.deallocate(lba * 2, 1).await, Outcome::Success, "round {round}, LBA {lba}");
                    let outcome = vol.write_stamp(lba * 2, 1, 1).await;
                    assert!(matches!(outcome, Outcome::Success | Outcome::CapacityExceeded), "{outcome:?}");
                }
            }
            for name in ["a", "b", "c"] {
                live.pool.create_volume(spec(name, MIB, 4096)).await.expect("a checkpoint has its room");
                live.pool.delete_volume(name).await.expect("a checkpoint has its room");
            }
            holds(&vol, 3..written, "after deallocation").await;
            written
        });
        for life in 2..5 {
            rig.live(life, move |live| async move {
                let vol = live.volume("v");
                holds(&vol, 3..written, "mounted on full file systems").await;
                for lba in 0..60 {
                    assert_eq!(vol.deallocate(lba % 40, 1).await, Outcome::Success, "life {life}");
                    let _ = vol.write_stamp(lba % 40, 1, 1).await;
                }
                live.pool.checkpoint().await.expect("a checkpoint has its room");
                if life == 3 {
                    live.pool.shutdown().await.expect("the last checkpoint has its room");
                }
            });
        }
        rig.live(6, move |live| async move {
            let vol = live.volume("v");
            live.pool.delete_volume("v").await.expect("deletion always works");
            assert_eq!(vol.write_stamp(0, 1, 1).await, Outcome::NotReady);
            live.pool.create_volume(spec("w", 64 * MIB, 4096)).await.expect("room");
            let again = fill(&live.volume("w"), 0).await;
            // What it gave back is not there any more; what writes have ahead of them is.
            assert!(again >= 4, "{again} of {written} fit after the deletion");
            // There is room again.
            set(&live, &members, Mode::Good);
            live.sleep(Duration::from_secs(5)).await;
            for step in again..again + 20 {
                assert_eq!(live.volume("w").write_stamp(step * STEP, STEP, 2 * step + 1).await, Outcome::Success);
            }
            holds(&live.volume("w"), 0..again + 20, "room again").await;
            live.sleep(Duration::from_secs(5)).await;
            assert!(live.pool.status().members.iter().all(|member| member.remarks.is_empty()));
        });
    }
}

/// The power fails in the middle of work on full file systems: the next mount finds what has its room.
#[test]
fn a_crash_on_full_file_systems_mounts_again() {
    let base = Rig::new(LAYOUT, 48, 1).with_volume(64 * MIB, 4096);
    let all: Vec<usize> = (0..6).collect();
    let written = base.live(1, move |live| async move {
        let vol = live.volume("v");
        assert_eq!(vol.write_stamp(0, STEP, 1).await, Outcome::Success);
        set(&live, &all, Mode::Full);
        fill(&vol, 1).await
    });
    for crash_at in (1..400).step_by(37) {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        (0..6).for_each(|member| rig.disks.set_mode(member, Mode::Full));
        let _ = rig.live_until(crash_at, Some(crash_at), move |live| async move {
            let vol = live.volume("v");
            for step in written / 2..written {
                let _ = vol.deallocate(step * STEP, STEP).await;
                let _ = vol.write_stamp(step * STEP, STEP, 2 * step + 1).await;
            }
        });
        rig.live(crash_at + 1, move |live| async move {
            let vol = live.volume("v");
            holds(&vol, 0..written / 2, &format!("crash at {crash_at}")).await;
            for step in 0..written {
                assert_eq!(vol.deallocate(step * STEP, STEP).await, Outcome::Success, "crash at {crash_at}");
            }
            live.pool.delete_volume("v").await.expect("deletion always works");
        });
    }
}

/// What a deleted volume had goes back to the file systems, but for what the pool needs for itself.
#[test]
fn deletion_gives_space_back() {
    let rig = Rig::new(LAYOUT, 240, 1).with_volume(256 * MIB, 4096);
    rig.live(1, |live| async move {
        let pages = |live: &Live| live.world.disks.0[2].borrow().pages_allocated();
        let before = pages(&live);
        let vol = live.volume("v");
        for step in 0..1600 {
            assert_eq!(vol.write_stamp(step * STEP, STEP, 2 * step + 1).await, Outcome::Success);
        }
        let most = pages(&live);
        live.pool.delete_volume("v").await.expect("room");
        live.sleep(Duration::from_secs(5)).await;
        let after = pages(&live);
        assert!(most > before + 90 * 64, "{before} before, {most} at most");
        // An eighth of the pool, what is kept back for pages of maps, and a few segments of 64 pages stay.
        assert!(after < (30 + 16 + 27) * 64, "{most} at most, {after} after");
        live.pool.create_volume(spec("w", 256 * MIB, 4096)).await.expect("room");
        let vol = live.volume("w");
        for step in 0..400 {
            assert_eq!(vol.write_stamp(step * STEP, STEP, 2 * step + 1).await, Outcome::Success);
        }
        holds(&vol, 0..400, "written anew").await;
    });
    rig.live(2, |live| async move { holds(&live.volume("w"), 0..400, "mounted again").await });
}

/// A deletion that can't be made durable leaves the volume as it was; here on file systems that can't set room aside.
#[test]
fn a_refused_deletion_leaves_the_volume_as_it_was() {
    let rig = Rig::new(LAYOUT, 64, 2).on_plain_files().with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        live.pool.create_volume(spec("scattered", 64 * MIB, 4096)).await.expect("room");
        // The next checkpoint is longer than any before.
        for lba in 0..800 {
            assert_eq!(live.volume("scattered").write_stamp(lba * 2, 1, 1).await, Outcome::Success);
        }
        for step in 0..20 {
            assert_eq!(vol.write_stamp(step * STEP, STEP, 2 * step + 1).await, Outcome::Success);
        }
        set(&live, &[1, 2], Mode::Full);
        let error = live.pool.delete_volume("v").await.expect_err("no room for the checkpoint");
        assert!(matches!(error, VolumeError::Checkpoint(_)), "{error}");
        assert_eq!(live.pool.volumes().len(), 2);
        holds(&vol, 0..20, "after the refusal").await;
        set(&live, &[1, 2], Mode::Good);
        live.sleep(Duration::from_secs(1)).await;
        assert_eq!(vol.write_stamp(0, STEP, 1).await, Outcome::Success);
        live.pool.checkpoint().await.expect("room");
    });
    rig.live(2, |live| async move {
        holds(&live.volume("v"), 0..20, "mounted again").await;
        live.pool.delete_volume("v").await.expect("room");
    });
    rig.live(3, |live| async move { assert_eq!(live.pool.volumes().len(), 1) });
}

/// Members whose file systems lack the room that every pool needs are not formatted.
#[test]
fn format_needs_room_for_the_reserve() {
    let rig = Rig::new(LAYOUT, 64, 1);
    rig.disks.0[4].borrow_mut().room = Some(100);
    let world = World::new(&rig.disks, 1);
    let (inner, env) = (rig.clone(), world.env());
    let error = world.run(async move { format(&env, &inner.inputs, inner.layout).await }).expect("no crash");
    assert!(matches!(&error, Err(FormatError::NoRoom { name, .. }) if name == "mem:4"), "{error:?}");
    world.end(1);
    rig.disks.0[4].borrow_mut().room = None;
    rig.with_volume(MIB, 4096).live(2, |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 1, 1).await, Outcome::Success);
    });
}
