//! Receipts of deletions: never wrong, whichever members are away, replaced, rolled back, or cut off in the middle.
//!
//! What decides is not what the pool thinks: all that stands on all media, those of members that are away included, is
//! searched for keys that can still be opened with the key-encryption key.

use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use nvmf_target::backend::Outcome;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

use super::super::handle::CloneSpec;
use super::super::{
    CopyReason, Health, KeyFate, MemberIndex, MemberState, NewMember, Pool, ReceiptStatus, StatementError, VolumeError,
};
use super::harness::{LAYOUT, Live, Rig, SMALL, inputs, kek, spec};
use super::rebuild::{blank, until_out, whole};
use super::sim::{Disks, Mode};
use crate::stages::keys::{SHIELD_BYTES, Shield, WRAPPED_KEY_BYTES};

const MIB: u64 = 1 << 20;
/// Segments of the pools that live at random.
const RANDOM_SEGMENTS: u64 = 60;
/// Where a superblock has its shield.
const SHIELD_AT: usize = 3616;

/// Every shield in a superblock's place, whole or not.
fn shields(disks: &Disks) -> HashSet<[u8; SHIELD_BYTES]> {
    let of_page = |page: &[u8]| page[SHIELD_AT..SHIELD_AT + SHIELD_BYTES].try_into().expect("as long");
    let slots = disks.0.iter().flat_map(|disk| [0, 4096].map(|at| of_page(&disk.borrow().page(at))));
    slots.filter(|shield| *shield != [0; SHIELD_BYTES]).collect()
}

/// All bytes on all media that look like a wrapped key, covered or bare. A checkpoint's volumes fill one shard in these tests.
fn wraps(disks: &Disks) -> HashSet<[u8; WRAPPED_KEY_BYTES]> {
    let mut found = HashSet::new();
    for disk in &disks.0 {
        let disk = disk.borrow();
        for (at, page) in disk.pages() {
            for start in (0..page.len()).filter(|start| page[*start] == b'S') {
                // It may go on in the next page.
                let bytes: Vec<u8> = page[start..].iter().copied().take(WRAPPED_KEY_BYTES).collect();
                let rest = WRAPPED_KEY_BYTES - bytes.len();
                let head = if rest > 0 { disk.page(at + 4096)[..rest].to_vec() } else { Vec::new() };
                let wrap: [u8; WRAPPED_KEY_BYTES] = [bytes, head].concat().try_into().expect("as long");
                if [b"SLS1", b"SLK1"].iter().any(|magic| wrap.starts_with(*magic)) {
                    found.insert(wrap);
                }
            }
        }
    }
    found
}

/// Lineage and epoch of every key that whoever has these media and the key-encryption key can open.
pub fn opened(disks: &Disks) -> HashSet<(String, u32)> {
    let (kek, mut shields) = (kek(), shields(disks));
    shields.insert([0; SHIELD_BYTES]);
    let mut keys = HashSet::new();
    for wrap in wraps(disks) {
        for shield in &shields {
            let key = Shield::new(*shield).uncover(&wrap).and_then(|wrapped| kek.unwrap(&wrapped));
            keys.extend(key.map(|key| (format!("{:032x}", key.lineage().0), key.epoch().0)));
        }
    }
    keys
}

/// Whether any of these 32 bytes stand anywhere on the media, in whichever place.
fn anywhere(disks: &Disks, secrets: &HashSet<[u8; SHIELD_BYTES]>) -> bool {
    disks.0.iter().any(|disk| {
        let disk = disk.borrow();
        let has = |page: &[u8]| page.windows(SHIELD_BYTES).any(|bytes| secrets.iter().any(|secret| secret == bytes));
        disk.pages().any(|(_, page)| has(page))
    })
}

/// As after a power cut at this moment.
fn after_a_crash(disks: &Disks) -> Rc<Disks> {
    let disks = disks.copy();
    disks.crash(1);
    disks
}

/// No receipt claims that a key is destroyed which can be opened, now or after a power cut.
fn check(pool: &Pool, disks: &Disks, what: &str) {
    let keys: Vec<_> = [opened(disks), opened(&after_a_crash(disks))].into_iter().flatten().collect();
    for receipt in pool.receipts() {
        let left = keys.iter().any(|(lineage, _)| *lineage == receipt.lineage);
        assert!(receipt.fate != KeyFate::Destroyed || !left, "{what}: {receipt:?}");
    }
}

fn of(pool: &Pool, volume: &str) -> ReceiptStatus {
    let mut all = pool.receipts().into_iter().filter(|receipt| receipt.volume == volume);
    all.next_back().unwrap_or_else(|| panic!("no receipt for {volume}"))
}

fn waits_for(receipt: &ReceiptStatus) -> Vec<(Option<Uuid>, CopyReason)> {
    receipt.copies.iter().map(|copy| (copy.member, copy.reason)).collect()
}

async fn until_destroyed(live: &Live, volume: &str) {
    for _ in 0..6000 {
        if of(&live.pool, volume).fate == KeyFate::Destroyed {
            return;
        }
        live.sleep(Duration::from_millis(100)).await;
    }
    panic!("never: {:?}", of(&live.pool, volume));
}

/// Deletion with all members there: the receipt says so at once and is right, what it names can be checked, other volumes keep
/// their keys, and all of it outlives restarts.
#[test]
fn h115_a_deleted_volumes_key_is_gone_and_the_receipt_says_so() {
    let rig = Rig::new(LAYOUT, 64, 2).with_volume(16 * MIB, 4096);
    let given = rig.live(1, |live| async move {
        live.pool.create_volume(spec("w", 8 * MIB, 512)).await.expect("room");
        assert_eq!(live.volume("v").write_stamp(0, 9, 7).await, Outcome::Success);
        assert_eq!(live.volume("w").write_stamp(0, 9, 8).await, Outcome::Success);
        live.pool.checkpoint().await.expect("healthy");
        let disks = &live.world.disks;
        let (before, secrets) = (opened(disks), shields(disks));
        assert_eq!(before.len(), 2, "this looks for the wrong thing: {before:?}");
        assert!(anywhere(disks, &secrets));
        let uuid = live.volume("v").backend.uuid();
        let receipt = live.pool.delete_volume("v").await.expect("room");
        assert_eq!((receipt.fate, receipt.uuid, receipt.keys), (KeyFate::Destroyed, uuid, 1), "{receipt:?}");
        assert!(receipt.copies.is_empty() && receipt.readers.is_empty() && receipt.stated.is_empty());
        assert_eq!((receipt.members.len(), receipt.pool), (6, live.pool.uuid()));
        assert!(receipt.destroyed_s >= Some(receipt.deleted_s));
        let left = opened(disks);
        assert!(before.contains(&(receipt.lineage.clone(), 0)) && !left.contains(&(receipt.lineage.clone(), 0)));
        assert_eq!(left.len(), 1, "the other one keeps its key");
        for disks in [Rc::clone(disks), after_a_crash(disks)] {
            assert!(!anywhere(&disks, &secrets), "a shield of before is left");
        }
        assert_eq!(receipt.check_values.len(), 1);
        receipt
    });
    for life in 2..4 {
        let given = given.clone();
        rig.live(life, |live| async move {
            assert_eq!(live.pool.receipts(), [given]);
            assert_eq!(live.volume("w").stamps(0, 9).await.expect("whole"), [8; 9]);
            check(&live.pool, &live.world.disks, "mounted again");
            live.pool.shutdown().await.expect("healthy");
        });
    }
}

/// The check value on the receipt is that of the key, as whoever opened the key before can tell.
#[test]
fn the_check_value_is_the_keys() {
    let rig = Rig::small(4096);
    rig.live(1, |live| async move {
        let wraps = wraps(&live.world.disks);
        let shields = shields(&live.world.disks);
        let keys = wraps.iter().flat_map(|wrap| shields.iter().map(move |shield| (wrap, shield)));
        let mut keys = keys.filter_map(|(wrap, shield)| kek().unwrap(&Shield::new(*shield).uncover(wrap).ok()?).ok());
        let value = keys.next().expect("it is there").check_value();
        let receipt = live.pool.delete_volume("v").await.expect("room");
        let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(receipt.check_values, [(0, hex)]);
    });
}

/// The power fails at every write of a deletion: then the volume is there, whole, or there is a receipt for it, and none is
/// wrong at any time; and in the end the key is destroyed.
#[test]
fn a_deletion_cut_at_every_write_leaves_the_volume_or_its_receipt() {
    let base = Rig::small(4096);
    base.live(1, |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 9, 7).await, Outcome::Success);
    });
    let (mut there, mut gone) = (0, 0);
    for crash_at in 1.. {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let done = rig.live_until(crash_at, Some(crash_at), |live| async move {
            let receipt = live.pool.delete_volume("v").await.expect("room");
            assert_eq!(receipt.fate, KeyFate::Destroyed);
            check(&live.pool, &live.world.disks, "deleted");
        });
        let was_there = rig.live(crash_at ^ 77, move |live| async move {
            check(&live.pool, &live.world.disks, &format!("cut at {crash_at}"));
            let there = live.pool.volume("v").is_some();
            if there {
                assert!(live.pool.receipts().is_empty(), "cut at {crash_at}");
                assert_eq!(live.volume("v").stamps(0, 9).await.expect("whole"), [7; 9]);
                live.pool.delete_volume("v").await.expect("room");
            }
            // Also by the mount alone, if that is what it came to.
            assert_eq!(of(&live.pool, "v").fate, KeyFate::Destroyed, "cut at {crash_at}");
            assert!(opened(&live.world.disks).is_empty(), "cut at {crash_at}");
            check(&live.pool, &live.world.disks, &format!("cut at {crash_at}, deleted"));
            there
        });
        if done.is_ok() {
            break;
        }
        *if was_there { &mut there } else { &mut gone } += 1;
    }
    assert!(there > 5 && gone > 5, "{there} cuts before and {gone} after prove little");
}

/// A member that is away while a volume is deleted is named, over restarts too; when it is back the receipt is completed by
/// itself. A volume that began after the member left does not wait for it.
#[test]
fn a_member_that_is_away_is_named_until_it_is_back() {
    // Which member has the shard with the key is up to the log.
    let right = (0..LAYOUT.members()).filter(|place| away_and_back(*place)).count();
    assert!(right > 0, "it is right to wait");
}

/// Tells whether the member that was away held something by which the key could be had.
fn away_and_back(place: usize) -> bool {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(16 * MIB, 4096);
    let (away, held) = rig.live(1, move |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 9, 7).await, Outcome::Success);
        live.world.disks.set_mode(place, Mode::Broken);
        assert_eq!(live.volume("v").write_stamp(9, 30, 9).await, Outcome::Success);
        live.pool.checkpoint().await.expect("enough are there");
        until_out(&live, place).await;
        let away = &live.pool.status().members[place];
        live.pool.create_volume(spec("later", 8 * MIB, 4096)).await.expect("room");
        let receipt = live.pool.delete_volume("v").await.expect("room");
        assert_eq!(receipt.fate, KeyFate::Pending);
        assert_eq!(waits_for(&receipt), [(Some(away.uuid), CopyReason::Absent { epoch: away.epoch })]);
        assert_eq!(receipt.copies[0].name.as_deref(), Some(format!("mem:{place}").as_str()));
        let held = opened(&live.world.disks).iter().any(|(lineage, _)| *lineage == receipt.lineage);
        assert_eq!(live.pool.delete_volume("later").await.expect("room").fate, KeyFate::Destroyed);
        check(&live.pool, &live.world.disks, "one is away");
        (away.uuid, held)
    });
    rig.live(2, move |live| async move {
        live.sleep(Duration::from_secs(30)).await;
        let receipt = of(&live.pool, "v");
        assert_eq!((receipt.fate, waits_for(&receipt)[0].0), (KeyFate::Pending, Some(away)));
        assert_eq!(of(&live.pool, "later").fate, KeyFate::Destroyed);
    });
    rig.disks.set_mode(place, Mode::Good);
    rig.live(3, |live| async move {
        whole(&live).await;
        until_destroyed(&live, "v").await;
        assert!(opened(&live.world.disks).is_empty());
        check(&live.pool, &live.world.disks, "it is back");
        live.pool.shutdown().await.expect("healthy");
        assert!(of(&live.pool, "v").destroyed_s > Some(0));
    });
    held
}

/// A deletion while a member is being filled waits for that one, and for no more; and it is right at every moment of that.
#[test]
fn a_member_that_is_coming_back_is_waited_for() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(32 * MIB, 4096);
    rig.options.rebuild_rate = MIB;
    rig.live(1, |live| async move {
        for at in 0..60 {
            assert_eq!(live.volume("v").write_stamp(at * 16, 16, 2 * at + 1).await, Outcome::Success);
        }
        live.pool.create_volume(spec("w", 8 * MIB, 4096)).await.expect("room");
        live.world.disks.set_mode(2, Mode::Broken);
        for at in 0..90 {
            assert_eq!(live.volume("v").write_stamp(at * 16, 16, 2 * at + 1).await, Outcome::Success);
        }
        until_out(&live, 2).await;
        live.world.disks.set_mode(2, Mode::Good);
        while live.pool.status().members[2].state != MemberState::Rebuilding {
            live.sleep(Duration::from_millis(50)).await;
        }
        let receipt = live.pool.delete_volume("w").await.expect("room");
        assert_eq!(live.pool.status().members[2].state, MemberState::Rebuilding, "too fast for this test");
        assert_eq!((receipt.fate, receipt.copies.len()), (KeyFate::Pending, 1), "{receipt:?}");
        while live.pool.status().health != Health::Healthy {
            check(&live.pool, &live.world.disks, "while it is filled");
            live.sleep(Duration::from_secs(1)).await;
        }
        until_destroyed(&live, "w").await;
        check(&live.pool, &live.world.disks, "it is back");
    });
}

/// A member that is replaced while it is well keeps nothing that leads to a key: a deletion afterwards is complete at once.
#[test]
fn a_replaced_member_that_answers_keeps_nothing() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(32 * MIB, 4096);
    let new = blank(&mut rig);
    rig.live(1, move |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 90, 7).await, Outcome::Success);
        replace(&live, 3, new).await;
        live.sleep(Duration::from_secs(5)).await;
        let receipt = live.pool.delete_volume("v").await.expect("room");
        assert_eq!((receipt.fate, receipt.copies.len()), (KeyFate::Destroyed, 0), "{receipt:?}");
        assert!(opened(&live.world.disks).is_empty());
        check(&live.pool, &live.world.disks, "replaced");
    });
    rig.live(2, |live| async move {
        assert_eq!(of(&live.pool, "v").fate, KeyFate::Destroyed);
        check(&live.pool, &live.world.disks, "mounted again");
    });
}

async fn replace(live: &Live, place: usize, new: NewMember) {
    let coming = live.pool.replace_member(&place.to_string(), new).await.expect("it is blank");
    for _ in 0..6000 {
        if live.pool.status().members[place].uuid == coming.uuid {
            return;
        }
        live.sleep(Duration::from_millis(100)).await;
    }
    panic!("never: {:?}", live.pool.status().rebuild);
}

/// A member that fails and is replaced is waited for for ever, until somebody states that it is destroyed; the receipt says
/// that this was stated. Nothing can be stated of members in use, or of what no receipt waits for.
#[test]
fn a_dead_member_that_was_replaced_is_waited_for_until_it_is_stated() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(32 * MIB, 4096);
    let new = blank(&mut rig);
    let dead = rig.live(1, move |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 90, 7).await, Outcome::Success);
        live.pool.create_volume(spec("w", 8 * MIB, 4096)).await.expect("room");
        let dead = live.pool.status().members[3].uuid;
        live.world.disks.set_mode(3, Mode::Broken);
        assert_eq!(live.volume("v").write_stamp(0, 90, 9).await, Outcome::Success);
        until_out(&live, 3).await;
        replace(&live, 3, new).await;
        let receipt = live.pool.delete_volume("v").await.expect("room");
        assert_eq!(receipt.fate, KeyFate::Pending);
        assert!(
            matches!(waits_for(&receipt)[..], [(Some(uuid), CopyReason::Replaced { .. })] if uuid == dead),
            "{receipt:?}"
        );
        assert!(!receipt.members.contains(&dead));
        check(&live.pool, &live.world.disks, "replaced");
        dead
    });
    rig.live(2, move |live| async move {
        assert_eq!(of(&live.pool, "v").fate, KeyFate::Pending);
        let used = live.pool.status().members[0].uuid;
        assert!(matches!(live.pool.member_destroyed(used).await, Err(StatementError::InUse(uuid)) if uuid == used));
        let nobody = Uuid::from_u128(5);
        assert!(
            matches!(live.pool.member_destroyed(nobody).await, Err(StatementError::NotAwaited(uuid)) if uuid == nobody)
        );
        live.pool.member_destroyed(dead).await.expect("it is awaited");
        let receipt = of(&live.pool, "v");
        assert_eq!((receipt.fate, receipt.stated.len(), receipt.stated[0].member), (KeyFate::Destroyed, 1, dead));
    });
    rig.live(3, move |live| async move {
        let receipt = of(&live.pool, "v");
        assert_eq!((receipt.fate, receipt.stated[0].member), (KeyFate::Destroyed, dead), "it outlives a restart");
        // It holds for what is deleted later as well.
        let receipt = live.pool.delete_volume("w").await.expect("room");
        assert_eq!((receipt.fate, receipt.stated[0].member), (KeyFate::Destroyed, dead));
    });
}

/// A replacement that was being filled, and is given up for another one, has superblocks too: it is named.
#[test]
fn a_replacement_that_was_given_up_is_named() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(32 * MIB, 4096);
    rig.options.rebuild_rate = MIB;
    let (first, second) = (blank(&mut rig), blank(&mut rig));
    rig.live(1, move |live| async move {
        for at in 0..100 {
            assert_eq!(live.volume("v").write_stamp(at * 16, 16, 2 * at + 1).await, Outcome::Success);
        }
        live.pool.replace_member("3", first).await.expect("it is blank");
        while live.pool.status().rebuild.is_none_or(|rebuild| rebuild.segments_done == 0) {
            live.sleep(Duration::from_millis(50)).await;
        }
        live.pool.checkpoint().await.expect("healthy");
    });
    // It is not there any more, and gives way.
    rig.disks.set_mode(6, Mode::Broken);
    rig.live(2, move |live| async move {
        replace(&live, 3, second).await;
        let receipt = live.pool.delete_volume("v").await.expect("room");
        assert_eq!(receipt.fate, KeyFate::Pending);
        assert!(matches!(waits_for(&receipt)[..], [(Some(_), CopyReason::Replaced { .. })]), "{receipt:?}");
        let disk = live.world.disks.0[6].borrow();
        assert!([0, 4096].iter().all(|at| disk.page(*at)[SHIELD_AT..SHIELD_AT + SHIELD_BYTES] != [0; SHIELD_BYTES]));
    });
}

/// An older copy of a member that is put back brings the key back: the receipt takes back what it said, and says it again when
/// the copy has been overwritten.
#[test]
fn an_older_copy_that_turns_up_takes_the_verdict_back() {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(16 * MIB, 4096);
    let copies = rig.live(1, |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 90, 7).await, Outcome::Success);
        live.pool.checkpoint().await.expect("healthy");
        let copies = live.world.disks.copy();
        live.pool.create_volume(spec("w", 8 * MIB, 4096)).await.expect("room");
        assert_eq!(live.pool.delete_volume("v").await.expect("room").fate, KeyFate::Destroyed);
        live.pool.checkpoint().await.expect("healthy");
        copies
    });
    *rig.disks.0[1].borrow_mut() = copies.0[1].borrow().copy();
    rig.live(2, |live| async move {
        assert_eq!(live.pool.status().mount.members_rolled_back, [1]);
        check(&live.pool, &live.world.disks, "an older copy is there");
        assert_eq!(of(&live.pool, "v").fate, KeyFate::Pending);
        whole(&live).await;
        until_destroyed(&live, "v").await;
        check(&live.pool, &live.world.disks, "filled anew");
    });
}

/// A clone outlives its origin and the snapshot between them, and their receipts say that it needs the key; when it goes as the
/// last one, all three are completed.
#[test]
fn clones_and_snapshots_keep_the_key_until_the_last_one_goes() {
    for last in ["v", "s", "c"] {
        let rig = Rig::new(LAYOUT, 64, 2).with_volume(16 * MIB, 4096);
        rig.live(1, move |live| async move {
            assert_eq!(live.volume("v").write_stamp(0, 90, 7).await, Outcome::Success);
            live.pool.snapshot_volume("v", "s").await.expect("room");
            let clone = CloneSpec { name: "c".into(), compression: None };
            live.pool.clone_volume("s", clone).await.expect("room");
            live.pool.rotate_key("c").await.expect("room");
            for name in ["v", "s", "c"].into_iter().filter(|name| *name != last) {
                let receipt = live.pool.delete_volume(name).await.expect("room");
                assert_eq!((receipt.fate, receipt.keys), (KeyFate::Kept, 2), "{receipt:?}");
                assert!(receipt.readers.iter().any(|reader| reader.starts_with(last)), "{receipt:?}");
                assert!(!receipt.readers.iter().any(|reader| reader.starts_with(name)), "{receipt:?}");
            }
            check(&live.pool, &live.world.disks, "others are left");
        });
        rig.live(2, move |live| async move {
            assert_eq!(live.volume(last).stamps(0, 90).await.expect("whole"), [7; 90]);
            assert!(live.pool.receipts().iter().all(|receipt| receipt.fate == KeyFate::Kept));
            live.pool.delete_volume(last).await.expect("room");
            for name in ["v", "s", "c"] {
                until_destroyed(&live, name).await;
            }
            assert_eq!(live.pool.receipts().len(), 3, "{:?}", live.pool.receipts());
            assert!(opened(&live.world.disks).is_empty());
            check(&live.pool, &live.world.disks, "the last one is gone");
        });
        rig.live(3, |live| async move {
            assert!(live.pool.receipts().iter().all(|receipt| receipt.fate == KeyFate::Destroyed));
        });
    }
}

/// What was made in a pool of an older format may have bare copies in free space: its receipt says so and does not claim more;
/// what is made since is not touched by that.
#[test]
fn a_volume_of_an_older_format_is_not_said_to_be_destroyed() {
    let rig = super::map::format_1();
    rig.live(1, |live| async move {
        live.pool.create_volume(spec("new", MIB, 4096)).await.expect("room");
        let receipt = live.pool.delete_volume("w").await.expect("room");
        assert_eq!((receipt.fate, waits_for(&receipt)), (KeyFate::Pending, vec![(None, CopyReason::OlderFormat)]));
        assert_eq!(live.pool.delete_volume("new").await.expect("room").fate, KeyFate::Destroyed);
        check(&live.pool, &live.world.disks, "of both kinds");
    });
    rig.live(2, |live| async move {
        assert_eq!(of(&live.pool, "w").fate, KeyFate::Pending);
        check(&live.pool, &live.world.disks, "mounted again");
    });
}

/// Deletions under failing members, crashes, rotations and replacements, at random: no receipt is wrong at any moment, and
/// when all members are there again none waits.
#[test]
fn receipts_are_never_wrong_whatever_happens() {
    for seed in super::crash::seeds(0..6) {
        super::crash::naming_seed(seed, || {
            let mut rng = StdRng::seed_from_u64(seed);
            let rig = Rig::new(SMALL, RANDOM_SEGMENTS, 1 + (seed % 2) as usize).with_volume(MIB, 4096);
            for life in 0..5 {
                let crash_at = rng.random_bool(0.6).then(|| rng.random_range(20..400));
                let inner = StdRng::seed_from_u64(rng.random());
                let _ = rig.live_until(seed * 10 + life, crash_at, move |live| random_life(live, inner));
            }
            rig.disks.0.iter().for_each(|disk| disk.borrow_mut().mode = Mode::Good);
            rig.live(seed, |live| async move {
                check(&live.pool, &live.world.disks, "at the end");
                whole(&live).await;
                for volume in live.pool.volumes() {
                    live.pool.delete_volume(&volume.name).await.expect("healthy");
                }
                for receipt in live.pool.receipts() {
                    until_destroyed(&live, &receipt.volume).await;
                }
                assert!(opened(&live.world.disks).is_empty());
                check(&live.pool, &live.world.disks, "in the very end");
            });
        });
    }
}

/// A member that answers again; one that did not at the mount has to be brought.
async fn bring_back(live: &Live, place: usize) {
    let size_bytes = inputs(&SMALL, RANDOM_SEGMENTS)[place].size_bytes.expect("it is there");
    if live.pool.status().members[place].state == MemberState::Missing {
        let member = NewMember { slot: MemberIndex(place as u8), name: format!("mem:{place}"), size_bytes };
        live.pool.attach_member(member).await.expect("it is a member");
    }
    whole(live).await;
}

async fn random_life(live: Live, mut rng: StdRng) {
    let disks = Rc::clone(&live.world.disks);
    for step in 0..12u64 {
        let names: Vec<String> = live.pool.volumes().into_iter().map(|volume| volume.name).collect();
        let any = (!names.is_empty()).then(|| names[rng.random_range(0..names.len())].clone());
        match (rng.random_range(0..10), any) {
            (0 | 1, _) if names.len() < 4 => {
                let name = format!("r{:x}", rng.random_range(0..u32::MAX));
                // With too few members left it fails, as everything does.
                let _ = live.pool.create_volume(spec(&name, MIB, 4096)).await;
            }
            (2 | 3, Some(name)) => {
                let _ = live.pool.delete_volume(&name).await;
            }
            (8, Some(name)) => {
                let clone = CloneSpec { name: format!("c{:x}", rng.random_range(0..u32::MAX)), compression: None };
                let _ = live.pool.clone_volume(&name, clone).await;
            }
            (4, Some(name)) => {
                let rotated = live.pool.rotate_key(&name).await;
                assert!(matches!(rotated, Ok(_) | Err(VolumeError::Rotating { .. } | VolumeError::Checkpoint(_))));
            }
            (5, Some(name)) => {
                let _ = live.volume(&name).write_stamp(step * 16, 16, step + 1).await;
            }
            (6, _) => {
                // One at a time is away: with one shard of parity, no more can be.
                let out = disks.0.iter().position(|disk| disk.borrow().mode != Mode::Good);
                match out {
                    Some(out) => {
                        disks.set_mode(out, Mode::Good);
                        live.world.release();
                        bring_back(&live, out).await;
                    }
                    None if live.pool.status().health == Health::Healthy => {
                        let mode = if rng.random_bool(0.5) { Mode::Broken } else { Mode::Hung };
                        disks.set_mode(rng.random_range(0..disks.0.len()), mode);
                    }
                    None => {}
                }
            }
            _ => {
                let _ = live.pool.checkpoint().await;
            }
        }
        live.sleep(Duration::from_millis(rng.random_range(0..3000))).await;
        check(&live.pool, &disks, &format!("step {step}"));
    }
}
