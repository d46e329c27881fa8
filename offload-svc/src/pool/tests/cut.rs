//! Members whose files were cut: damaged where they are cut, not gone.

use std::sync::Arc;
use std::time::Duration;

use nvmf_target::backend::Outcome;

use super::super::{Health, MountError, Remark, mount};
use super::harness::{LAYOUT, Live, Rig, Vol, kek};
use super::sim::{Mode, World};
use crate::stages::keys::KeyEncryptionKey;
use zeroize::Zeroizing;

const MIB: u64 = 1 << 20;
const BLOCKS: u64 = 1600;

async fn holds(vol: &Vol, what: &str) {
    for lba in (0..BLOCKS).step_by(16) {
        let read = vol.stamps(lba, 16).await;
        assert_eq!(read.unwrap_or_else(|error| panic!("{what}, LBA {lba}: {error:?}")), [2 * lba + 1; 16], "{what}");
    }
}

async fn scrubbed(live: &Live) {
    for _ in 0..6000 {
        if live.pool.status().scrub.ended_s > 0 {
            return;
        }
        live.sleep(Duration::from_millis(100)).await;
    }
    panic!("no scrub has ended: {:?}", live.pool.status().scrub);
}

fn written() -> Rig {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(16 * MIB, 4096);
    rig.inputs.iter_mut().for_each(|input| input.can_grow = true);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        for lba in (0..BLOCKS).step_by(16) {
            assert_eq!(vol.write_stamp(lba, 16, 2 * lba + 1).await, Outcome::Success);
        }
        live.pool.shutdown().await.expect("members are good");
    });
    rig
}

fn cut(rig: &Rig, members: &[usize], size_bytes: u64) -> Rig {
    let mut rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
    for member in members {
        rig.disks.0[*member].borrow_mut().cut(size_bytes);
        rig.inputs[*member].size_bytes = Some(size_bytes);
    }
    rig
}

/// Where the last byte of any member is that has been written, and how long members are.
fn sizes(rig: &Rig) -> (u64, u64) {
    let last = |disk: &super::sim::Disk| disk.pages().map(|(at, _)| at + 4096).max().unwrap_or_default();
    let end = rig.disks.0.iter().map(|disk| last(&disk.borrow())).max().unwrap_or_default();
    (end, rig.inputs[0].size_bytes.expect("it is there"))
}

/// Three of 4+2 cut behind all that has been written: no byte is missing, so the pool mounts, says so and makes them whole.
#[test]
fn members_cut_where_nothing_was_mount_and_grow_again() {
    let rig = written();
    let (end, whole) = sizes(&rig);
    assert!(end + MIB < whole, "the case that this is about");
    let rig = cut(&rig, &[0, 2, 5], end);
    rig.live(2, move |live| async move {
        let status = live.pool.status();
        assert_eq!((status.mount.members_cut, status.health), (vec![0, 2, 5], Health::Healthy));
        assert_eq!(status.members[2].remarks, [Remark::Cut { from_bytes: whole, to_bytes: end }]);
        assert!(status.members[1].remarks.is_empty());
        holds(&live.volume("v"), "cut behind everything").await;
        for member in [0, 2, 5] {
            assert_eq!(live.world.disks.0[member].borrow().end, Some(whole), "its size is restored");
        }
        scrubbed(&live).await;
        assert_eq!(live.pool.status().scrub.bad_shards, 0);
    });
}

/// Two cut in the middle of what they held: all is served, and repaired without being asked; then any other two can go.
#[test]
fn what_members_lost_by_being_cut_is_repaired() {
    let rig = written();
    let rig = cut(&rig, &[1, 4], sizes(&rig).0 / 8192 * 4096);
    rig.live(2, |live| async move {
        holds(&live.volume("v"), "two cut").await;
        scrubbed(&live).await;
        let bad: u64 = live.pool.status().members.iter().map(|member| member.bad_shards).sum();
        assert!(bad > 0, "the case that this is about");
        assert_eq!(live.pool.status().scrub.stripes_lost, 0);
        live.pool.shutdown().await.expect("members are good");
    });
    for lost in [[0, 2], [3, 5]] {
        let rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
        rig.live(3, move |live| async move {
            lost.iter().for_each(|member| live.world.disks.set_mode(*member, Mode::Broken));
            holds(&live.volume("v"), &format!("without {lost:?}")).await;
        });
    }
}

fn mount_error(rig: &Rig) -> Option<MountError> {
    let world = World::new(&rig.disks, 9);
    let (rig, env) = (rig.clone(), world.env());
    let result = world.run(async move { mount(env, &rig.inputs, rig.options.clone(), kek()).await.err() });
    world.end(9);
    result.expect("no crash")
}

/// A start that makes a cut member long again and then fails hides nothing: the next one still knows, and what was lost is
/// found and repaired. The same for a member that was away when it was cut.
#[test]
fn a_start_that_fails_does_not_hide_that_members_were_cut() {
    for away in [false, true] {
        let rig = written();
        if away {
            rig.live(5, |live| async move {
                live.world.disks.set_mode(1, Mode::Broken);
                for lba in (0..BLOCKS).step_by(16).take(4) {
                    assert_eq!(live.volume("v").write_stamp(lba, 16, 2 * lba + 1).await, Outcome::Success);
                }
                assert_eq!(live.pool.status().health, Health::Degraded);
                live.pool.shutdown().await.expect("five are good");
            });
            rig.disks.set_mode(1, Mode::Good);
        }
        let whole = sizes(&rig).1;
        let mut rig = cut(&rig, if away { &[1] } else { &[1, 4] }, sizes(&rig).0 / 8192 * 4096);
        let world = World::new(&rig.disks, 9);
        let (failing, env) = (rig.clone(), world.env());
        let other = Arc::new(KeyEncryptionKey::from_secret(Zeroizing::new([8; 32])));
        let result = world.run(async move { mount(env, &failing.inputs, failing.options.clone(), other).await.err() });
        assert!(matches!(result.expect("no crash"), Some(MountError::Key { .. })), "another key");
        world.end(9);
        for member in [1, 4] {
            // One that was away is made long again by a mount that succeeds only.
            rig.inputs[member].size_bytes = Some(rig.disks.0[member].borrow().end.unwrap_or(whole));
        }
        assert_eq!(rig.inputs[1].size_bytes == Some(whole), !away);
        rig.live(6, move |live| async move {
            if !away {
                scrubbed(&live).await;
                let bad: u64 = live.pool.status().members.iter().map(|member| member.bad_shards).sum();
                assert!(bad > 0, "the case that this is about");
            }
            while live.pool.status().health != Health::Healthy {
                live.sleep(Duration::from_secs(1)).await;
            }
            live.pool.shutdown().await.expect("members are good");
        });
        for lost in [[0, 2], [3, 5]] {
            let rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
            rig.live(7, move |live| async move {
                lost.iter().for_each(|member| live.world.disks.set_mode(*member, Mode::Broken));
                holds(&live.volume("v"), &format!("away {away}, without {lost:?}")).await;
                let members = live.pool.status().members;
                let bad = members.iter().filter(|m| !lost.contains(&m.index.into())).map(|member| member.bad_shards);
                assert_eq!(bad.sum::<u64>(), 0, "away {away}, without {lost:?}");
            });
        }
    }
}

/// A start that marks a cut member and then fails leaves one that is only late in the set: it counts when it is there again.
#[test]
fn a_start_that_fails_puts_nobody_out() {
    let rig = written();
    let whole = sizes(&rig).1;
    let mut rig = cut(&rig, &[1], sizes(&rig).0 / 8192 * 4096);
    rig.inputs[5].size_bytes = None;
    let world = World::new(&rig.disks, 9);
    let (failing, env) = (rig.clone(), world.env());
    let other = Arc::new(KeyEncryptionKey::from_secret(Zeroizing::new([8; 32])));
    let result = world.run(async move { mount(env, &failing.inputs, failing.options.clone(), other).await.err() });
    assert!(matches!(result.expect("no crash"), Some(MountError::Key { .. })), "another key");
    world.end(9);
    for member in [1, 5] {
        rig.inputs[member].size_bytes = Some(whole);
    }
    rig.live(6, |live| async move {
        let status = live.pool.status();
        assert_eq!((status.health, status.mount.members_stale.len()), (Health::Healthy, 0));
        holds(&live.volume("v"), "all there").await;
        scrubbed(&live).await;
        assert!(live.pool.status().members[1].bad_shards > 0, "the case that this is about");
    });
}

/// Three cut in the middle: what they held in common is lost, and says so; nothing else is served in its place.
#[test]
fn more_members_cut_than_parity_covers_give_errors_and_no_wrong_byte() {
    let rig = written();
    let rig = cut(&rig, &[1, 3, 4], sizes(&rig).0 / 8192 * 4096);
    match mount_error(&rig) {
        Some(error) => assert!(matches!(error, MountError::Checkpoint(_) | MountError::LostWrites { .. }), "{error}"),
        None => rig.live(4, |live| async move {
            let (vol, mut lost) = (live.volume("v"), 0);
            for lba in 0..BLOCKS {
                match vol.stamps(lba, 1).await {
                    Ok(stamps) => assert_eq!(stamps, [lba / 16 * 32 + 1]),
                    Err(outcome) => {
                        assert_eq!(outcome, Outcome::UnrecoveredRead { slba: lba });
                        lost += 1;
                    }
                }
            }
            assert!(lost > 0, "the case that this is about");
        }),
    }
}

/// One that reads find cut while it serves is named, and what it lost is repaired.
#[test]
fn a_member_cut_while_it_serves_is_named() {
    let rig = written();
    rig.live(2, |live| async move {
        live.world.disks.0[3].borrow_mut().cut(1 << 20);
        holds(&live.volume("v"), "cut while it serves").await;
        assert_eq!(live.pool.status().members[3].remarks, [Remark::CutInUse]);
        holds(&live.volume("v"), "repaired").await;
    });
}

/// A mount that finds too few members names each that it could not use, and why.
#[test]
fn members_that_cannot_be_used_are_named_with_the_reason() {
    let rig = written();
    let mut rig = cut(&rig, &[1], sizes(&rig).0);
    rig.inputs[1].can_grow = false;
    (rig.inputs[3].size_bytes, rig.inputs[3].unopened) = (None, Some("/pool/m3: Permission denied".into()));
    rig.disks.0[4].borrow_mut().set_page(0, &[7; 4096]);
    rig.disks.0[4].borrow_mut().set_page(4096, &[7; 4096]);
    let text = mount_error(&rig).expect("three of 4+2 are of no use").to_string();
    for part in [
        "3 of 4 members",
        "mem:1: member 1 of the Sluice pool",
        "cut from",
        "mem:3: /pool/m3: Permission denied",
        "mem:4: data",
    ] {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}
