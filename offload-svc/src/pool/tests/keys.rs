//! Keys that are rotated under load, cut short, and given up.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use nvmf_target::backend::Outcome;

use super::super::{Pool, VolumeError};
use super::harness::{LAYOUT, Live, Rig, Vol, check_all};
use super::model::Model;
use super::receipts::opened;

const MIB: u64 = 1 << 20;

async fn until_rotated(live: &Live) {
    for _ in 0..600 {
        if !live.pool.keys()[0].rotating {
            return;
        }
        live.sleep(Duration::from_secs(1)).await;
    }
    panic!("never done: {:?}", live.pool.keys());
}

async fn write(vol: &Vol, model: &RefCell<Model>, lba: u64, count: u64, stamp: u64) {
    let sent = model.borrow_mut().send(lba, count, stamp);
    assert_eq!(vol.write_stamp(lba, count, stamp).await, Outcome::Success);
    model.borrow_mut().answer(lba, count, sent);
}

fn epoch_and_left(pool: &Pool) -> (u32, bool, u64) {
    let key = &pool.keys()[0];
    (key.epoch, key.rotating, key.left_bytes)
}

/// H112, rotation under load: everything is right at every moment, and in the end nothing is under the older key.
#[test]
fn h112_a_key_is_rotated_under_load() {
    for reactors in [1, 3] {
        let rig = Rig { reactors, ..Rig::new(LAYOUT, 64, reactors).with_volume(64 * MIB, 4096) };
        let model = Rc::new(RefCell::new(Model::default()));
        let inner = Rc::clone(&model);
        rig.live(1, move |live| async move {
            let vol = live.volume("v");
            for at in 0..60 {
                write(&vol, &inner, at * 37, 20, at + 1).await;
            }
            live.pool.checkpoint().await.expect("healthy");
            let before = live.pool.keys()[0].stored_bytes;
            let rotated = live.pool.rotate_key("v").await.expect("room");
            assert_eq!((rotated.epoch, rotated.rotating, rotated.left_bytes), (1, true, before));
            let again = live.pool.rotate_key("v").await.expect_err("one at a time");
            assert!(matches!(again, VolumeError::Rotating { .. }), "{again}");
            for at in 0..60 {
                write(&vol, &inner, at * 31, 9, at + 100).await;
            }
            check_all(&vol, &inner, "while it goes on").await;
            until_rotated(&live).await;
            assert_eq!(epoch_and_left(&live.pool), (1, false, 0));
            check_all(&vol, &inner, "rotated").await;
            // And once more, now that the first is done.
            live.pool.rotate_key("v").await.expect("room");
            until_rotated(&live).await;
            assert_eq!(epoch_and_left(&live.pool), (2, false, 0));
        });
        rig.live(2, move |live| async move {
            assert_eq!(epoch_and_left(&live.pool), (2, false, 0));
            check_all(&live.volume("v"), &model, "mounted again").await;
        });
    }
}

/// H112: cut short at any write, a rotation goes on at the next mount and ends; the data is right all the while.
#[test]
fn h112_a_rotation_cut_at_every_write_goes_on() {
    let base = Rig::small(4096);
    let model = Rc::new(RefCell::new(Model::default()));
    let inner = Rc::clone(&model);
    base.live(1, move |live| async move {
        for at in 0..12 {
            write(&live.volume("v"), &inner, at * 20, 16, at + 1).await;
        }
    });
    let mut cuts = 0;
    for crash_at in (1..).step_by(3) {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let done = rig.live_until(3, Some(crash_at), |live| async move {
            live.pool.rotate_key("v").await.expect("room");
            until_rotated(&live).await;
        });
        if done.is_ok() {
            break;
        }
        cuts += 1;
        let model = Rc::clone(&model);
        rig.live(4, move |live| async move {
            check_all(&live.volume("v"), &model, &format!("cut at {crash_at}")).await;
            until_rotated(&live).await;
            assert_eq!(live.pool.keys()[0].left_bytes, 0, "cut at {crash_at}");
            check_all(&live.volume("v"), &model, &format!("cut at {crash_at}, rotated")).await;
        });
    }
    assert!(cuts > 20, "{cuts} cuts prove little");
}

/// H115: once a key is given up, nothing on any member leads to it any more, whatever earlier mounts have left behind.
#[test]
fn h115_no_copy_of_a_key_that_was_given_up_is_left() {
    let rig = Rig::new(LAYOUT, 48, 1).with_volume(16 * MIB, 4096);
    let epochs = |rig: &Rig| {
        let mut epochs: Vec<u32> = opened(&rig.disks).into_iter().map(|(_, epoch)| epoch).collect();
        epochs.sort_unstable();
        epochs
    };
    rig.live(1, |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 9, 7).await, Outcome::Success);
    });
    assert_eq!(epochs(&rig), [0], "this looks for the wrong thing");
    rig.live(2, |live| async move {
        live.pool.rotate_key("v").await.expect("room");
        until_rotated(&live).await;
        assert_eq!(live.volume("v").stamps(0, 9).await.expect("whole"), [7; 9]);
        live.sleep(Duration::from_secs(1)).await;
    });
    assert_eq!(epochs(&rig), [1]);
}

/// A block that is lost keeps the older key, and says so; once it is deallocated the rotation ends.
#[test]
fn what_cannot_be_read_keeps_its_key() {
    let rig = Rig::new(LAYOUT, 48, 1).with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        // Odd stamps: data that does not compress.
        for stamp in [1, 3, 5] {
            assert_eq!(vol.write_stamp(stamp, 1, stamp).await, Outcome::Success);
        }
        let doomed = vol.read(3, 1).await.expect("whole");
        assert_eq!(doomed.len(), 4096);
        for disk in &live.world.disks.0[..] {
            let mut disk = disk.borrow_mut();
            let pages: Vec<u64> = disk
                .pages()
                .filter(|(at, page)| {
                    *at >= 64 * 1024 && page.starts_with(b"SHRD") && page[64..72] == 1u64.to_le_bytes()
                })
                .map(|(at, _)| at)
                .collect();
            for at in pages {
                disk.damage(at + 700, |byte| *byte ^= 1);
            }
        }
        assert_eq!(vol.stamps(3, 1).await, Err(Outcome::UnrecoveredRead { slba: 3 }));
        live.pool.rotate_key("v").await.expect("room");
        live.sleep(Duration::from_secs(100)).await;
        let (epoch, rotating, left) = epoch_and_left(&live.pool);
        assert!(epoch == 1 && rotating && (4096..5000).contains(&left), "{left} bytes left");
        assert_eq!(vol.deallocate(3, 1).await, Outcome::Success);
        until_rotated(&live).await;
        assert_eq!(vol.stamps(1, 1).await.expect("whole"), [1]);
        assert_eq!(vol.stamps(5, 1).await.expect("whole"), [5]);
    });
}

/// Deleting a volume in the middle of its rotation, and closing the pool in the middle of one, wait for neither.
#[test]
fn deletion_and_shutdown_cut_a_rotation_short() {
    let rig = Rig::new(LAYOUT, 64, 2).with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move {
        for at in 0..40 {
            assert_eq!(live.volume("v").write_stamp(at * 37, 20, at + 1).await, Outcome::Success);
        }
        live.pool.rotate_key("v").await.expect("room");
        live.pool.shutdown().await.expect("healthy");
    });
    rig.live(2, |live| async move {
        assert_eq!(epoch_and_left(&live.pool).0, 1);
        live.pool.delete_volume("v").await.expect("room");
        assert!(live.pool.keys().is_empty());
        live.sleep(Duration::from_secs(60)).await;
        live.pool.shutdown().await.expect("healthy");
    });
}
