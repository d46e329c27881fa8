//! Members that were away come back, under load, through crashes and further failures.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use nvmf_target::backend::Outcome;

use super::super::{Health, MemberError, MemberIndex, MemberState, NewMember, format};
use super::crash::{naming_seed, random_lives_with, seeds};
use super::harness::{LAYOUT, Live, Rig, SMALL, SharedModel, Vol, check_all, input};
use super::model::Model;
use super::sim::{Disks, Mode, World};

const MIB: u64 = 1 << 20;

/// Waits until every member is in the set; ten minutes of virtual time are plenty.
pub async fn whole(live: &Live) {
    for _ in 0..6000 {
        if live.pool.status().health == Health::Healthy {
            return;
        }
        live.sleep(Duration::from_millis(100)).await;
    }
    panic!("not whole again: {:?}", live.pool.status());
}

pub async fn until_out(live: &Live, member: usize) {
    for _ in 0..600 {
        if live.pool.status().members[member].state == MemberState::Out {
            return;
        }
        live.sleep(Duration::from_millis(100)).await;
    }
    panic!("member {member} is not out");
}

async fn fill(vol: &Vol, stamps: std::ops::Range<u64>) {
    for stamp in stamps {
        assert_eq!(vol.write_stamp(stamp * 16 % 4000, 16, stamp * 2 + 1).await, Outcome::Success, "{stamp}");
    }
}

async fn holds(vol: &Vol, stamps: std::ops::Range<u64>, what: &str) {
    for stamp in stamps {
        let read = vol.stamps(stamp * 16 % 4000, 16).await;
        assert_eq!(read.unwrap_or_else(|error| panic!("{what}, stamp {stamp}: {error:?}")), [stamp * 2 + 1; 16]);
    }
}

/// Shards found bad on members that are not lost.
fn bad_shards(live: &Live, lost: &[usize]) -> u64 {
    let members = live.pool.status().members;
    members.iter().filter(|member| !lost.contains(&member.index.into())).map(|member| member.bad_shards).sum()
}

/// Other members are lost, on a copy: what is left has all of it, and no shard is bad.
fn holds_without(rig: &Rig, members: &[usize], stamps: std::ops::Range<u64>, what: &str) {
    let rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
    let (members, what) = (members.to_vec(), what.to_owned());
    rig.live(77, move |live| async move {
        for member in &members {
            live.world.disks.set_mode(*member, Mode::Broken);
        }
        holds(&live.volume("v"), stamps, &what).await;
        assert_eq!(bad_shards(&live, &members), 0, "{what}");
    });
}

/// A member that hangs for a while comes back by itself, gets what changed and no more, and counts again: then two others
/// can go.
#[test]
fn a_member_that_was_away_gets_what_changed() {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        fill(&vol, 0..90).await;
        // None is under way then, or the one before it counts as unfinished.
        live.pool.checkpoint().await.expect("healthy");
        live.world.disks.set_mode(2, Mode::Hung);
        fill(&vol, 90..100).await;
        until_out(&live, 2).await;
        live.world.disks.set_mode(2, Mode::Good);
        live.world.release();
        whole(&live).await;
        let rebuild = live.pool.status().rebuild.expect("it was rebuilt");
        let [_, open, closed, checkpoint] = live.census();
        assert!(
            rebuild.segments_total * 5 <= (open + closed + checkpoint) * 2,
            "{rebuild:?} of {open}+{closed}+{checkpoint}"
        );
        assert_eq!((rebuild.segments_done, rebuild.stripes_lost), (rebuild.segments_total, 0));
        fill(&vol, 100..110).await;
        holds(&vol, 0..110, "healthy").await;
    });
    holds_without(&rig, &[0, 1], 0..110, "0 and 1 lost");
    holds_without(&rig, &[3, 5], 0..110, "3 and 5 lost");
}

/// H97: two members away together, back one after the other, the second at a mount: each gets all that it lacks, and then
/// any other two can go.
#[test]
fn h97_two_away_together_return_one_after_the_other() {
    let rig = Rig::new(LAYOUT, 64, 2).with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        fill(&vol, 0..60).await;
        for member in [1, 4] {
            live.world.disks.set_mode(member, Mode::Broken);
        }
        fill(&vol, 60..100).await;
        until_out(&live, 1).await;
        until_out(&live, 4).await;
        live.world.disks.set_mode(1, Mode::Good);
        for _ in 0..6000 {
            if live.pool.status().members[1].state == MemberState::Active {
                break;
            }
            live.sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(live.pool.status().members[1].state, MemberState::Active);
        fill(&vol, 100..120).await;
        holds(&vol, 0..120, "one is back").await;
    });
    rig.disks.set_mode(4, Mode::Good);
    rig.live(2, |live| async move {
        assert_eq!(live.pool.status().mount.members_stale, [4]);
        let vol = live.volume("v");
        fill(&vol, 120..125).await;
        whole(&live).await;
        holds(&vol, 0..125, "both are back").await;
    });
    for lost in [[0, 2], [0, 3], [2, 5], [3, 5], [0, 5], [2, 3]] {
        holds_without(&rig, &lost, 0..125, &format!("{lost:?} lost"));
    }
}

/// While it is brought up to date a member serves nothing: with k-1 others left, nothing can be read though it is there.
#[test]
fn a_member_that_is_not_whole_serves_nothing() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
    // It takes a while.
    rig.options.rebuild_rate = 8 << 20;
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        live.world.disks.set_mode(0, Mode::Broken);
        fill(&vol, 0..240).await;
        until_out(&live, 0).await;
        live.world.disks.set_mode(0, Mode::Good);
        while live.pool.status().members[0].state != MemberState::Rebuilding {
            live.sleep(Duration::from_millis(1)).await;
        }
        holds(&vol, 0..40, "while it comes back").await;
        // Three of the others answer still, and the one that is not whole is not asked.
        for member in [1, 2] {
            live.world.disks.set_mode(member, Mode::Broken);
        }
        let lost = vol.read(0, 16).await;
        assert!(matches!(lost, Err(Outcome::UnrecoveredRead { .. })), "{:?}", lost.map(|_| "read"));
        assert_eq!(live.pool.status().members[0].state, MemberState::Rebuilding, "the test is too slow to show it");
        for member in [1, 2] {
            live.world.disks.set_mode(member, Mode::Good);
        }
        whole(&live).await;
        assert_eq!(live.pool.status().rebuild.expect("there was one").stripes_lost, 0);
        holds(&vol, 0..240, "afterwards").await;
    });
    holds_without(&rig, &[1, 2], 0..240, "1 and 2 lost");
}

/// The member that comes back fails again in the middle, at every place; then another member fails meanwhile. Nothing is
/// lost, and in the end all are back.
#[test]
fn failures_in_the_middle_of_a_return_are_survived() {
    for delay in (0..60).step_by(6) {
        for second in [3, 0] {
            let rig = Rig::new(LAYOUT, 64, 2).with_volume(64 * MIB, 4096);
            rig.live(delay, move |live| async move {
                let vol = live.volume("v");
                fill(&vol, 0..30).await;
                live.world.disks.set_mode(0, Mode::Broken);
                fill(&vol, 30..60).await;
                until_out(&live, 0).await;
                live.world.disks.set_mode(0, Mode::Good);
                while live.pool.status().members[0].state != MemberState::Rebuilding {
                    live.sleep(Duration::from_millis(1)).await;
                }
                live.sleep(Duration::from_millis(delay)).await;
                live.world.disks.set_mode(second, Mode::WriteBroken);
                fill(&vol, 60..70).await;
                holds(&vol, 0..70, "the second failure").await;
                live.world.disks.set_mode(second, Mode::Good);
                whole(&live).await;
                fill(&vol, 70..75).await;
                holds(&vol, 0..75, "all back").await;
            });
            holds_without(&rig, &[1, 2], 0..75, &format!("delay {delay}, second {second}"));
        }
    }
}

async fn write(vol: &Vol, model: &SharedModel, lba: u64, count: u64, stamp: u64) {
    let sent = model.borrow_mut().send(lba, count, stamp);
    assert_eq!(vol.write_stamp(lba, count, stamp).await, Outcome::Success);
    model.borrow_mut().answer(lba, count, sent);
}

/// A member fails, comes back, is written to meanwhile.
async fn story(live: Live, model: SharedModel) {
    let vol = live.volume("v");
    for (stamp, lba) in (1..4).zip([0, 40, 10]) {
        write(&vol, &model, lba, 4, stamp).await;
    }
    live.world.disks.set_mode(1, Mode::Broken);
    for (stamp, lba) in (4..8).zip([2, 40, 90, 12]) {
        write(&vol, &model, lba, 6, stamp).await;
    }
    let _ = live.pool.checkpoint().await;
    live.world.disks.set_mode(1, Mode::Good);
    while live.pool.status().members[1].state == MemberState::Out {
        live.sleep(Duration::from_millis(200)).await;
    }
    write(&vol, &model, 3, 5, 8).await;
    let _ = live.pool.checkpoint().await;
    write(&vol, &model, 44, 3, 9).await;
    whole(&live).await;
    write(&vol, &model, 5, 5, 10).await;
}

/// The power fails at every write of a story in which a member leaves and comes back, and again while the next life brings it
/// back: afterwards all are back, and each one of the three can be lost.
#[test]
fn a_crash_at_every_write_of_a_return_loses_nothing() {
    let base = Rig { layout: SMALL, ..Rig::small(4096) };
    let model = || -> SharedModel { Rc::new(RefCell::new(Model::default())) };
    let counted = Rig { disks: base.disks.copy(), ..base.clone() };
    let steps = counted.live(5, |live| async move {
        story(live.clone(), Rc::new(RefCell::new(Model::default()))).await;
        live.world.steps.get()
    });
    assert!(steps > 80, "{steps}");
    for crash_at in 1..=steps {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let model = model();
        let inner = Rc::clone(&model);
        let _ = rig.live_until(5, Some(crash_at), move |live| story(live, inner));
        rig.disks.set_mode(1, Mode::Good);
        let again = Rc::clone(&model);
        let _ = rig.live_until(crash_at, Some(20 + crash_at % 60), move |live| async move {
            check_all(&live.volume("v"), &again, &format!("crash at {crash_at}, second life")).await;
            whole(&live).await;
        });
        let again = Rc::clone(&model);
        rig.live(crash_at + 1, move |live| async move {
            whole(&live).await;
            check_all(&live.volume("v"), &again, &format!("crash at {crash_at}, third life")).await;
        });
        for lost in 0..3 {
            let rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
            let again = Rc::clone(&model);
            rig.live(crash_at + 2, move |live| async move {
                live.world.disks.set_mode(lost, Mode::Broken);
                check_all(&live.volume("v"), &again, &format!("crash at {crash_at}, {lost} lost")).await;
                assert_eq!(bad_shards(&live, &[lost]), 0, "crash at {crash_at}, {lost} lost");
            });
        }
    }
}

/// Random load, crashes, and members that go and come back all the time, at most two at once.
#[test]
fn random_load_with_members_going_and_coming_keeps_every_answered_write() {
    const MODES: [Mode; 3] = [Mode::Broken, Mode::WriteBroken, Mode::Truncated];
    for seed in seeds(200..206) {
        let rig = Rig::new(LAYOUT, 48, 1).with_volume(16 * MIB, 4096);
        naming_seed(seed, || {
            random_lives_with(
                seed,
                rig,
                5,
                Rc::new(move |life, world| {
                    for member in 0..6 {
                        world.disks.set_mode(member, Mode::Good);
                    }
                    let turn = (seed + life) as usize;
                    // The same two in all lives: others could fail before these are back.
                    for victim in [seed as usize % 6, (seed as usize + 2) % 6].into_iter().take(turn % 3) {
                        world.disks.set_mode(victim, MODES[(turn + victim) % 3]);
                    }
                    // Some come back in the middle of the load.
                    if turn.is_multiple_of(2) {
                        world.later(Duration::from_millis(40), |world| {
                            for member in 0..6 {
                                world.disks.set_mode(member, Mode::Good);
                            }
                        });
                    }
                }),
            );
        });
    }
}

/// A blank device, for one more slot.
pub fn blank(rig: &mut Rig) -> NewMember {
    let size_bytes = rig.inputs[0].size_bytes.expect("it is there");
    let slot = rig.inputs.len() as u8;
    let disks = rig.disks.copy();
    let mut all = Rc::try_unwrap(disks).unwrap_or_else(|_| panic!("a copy of our own")).0;
    all.push(RefCell::default());
    rig.disks = Rc::new(Disks(all));
    rig.inputs.push(input(slot.into(), size_bytes));
    NewMember { slot: MemberIndex(slot), name: format!("mem:{slot}"), size_bytes }
}

/// A member that serves is replaced under load: the old one serves until the new one has all of it, then it is out for good,
/// also at the next mount, whatever it is given.
#[test]
fn a_member_is_replaced_while_it_serves() {
    let mut rig = Rig::new(LAYOUT, 64, 2).with_volume(64 * MIB, 4096);
    let new = blank(&mut rig);
    rig.live(1, move |live| async move {
        let vol = live.volume("v");
        fill(&vol, 0..80).await;
        let old = live.pool.status().members[3].uuid;
        let coming = live.pool.replace_member("mem:3", new.clone()).await.expect("it is blank");
        assert_eq!((coming.index, coming.uuid == old), (3, false));
        let again = live.pool.replace_member("3", new).await;
        assert!(matches!(again, Err(MemberError::UnderWay { index: 3 })), "{again:?}");
        assert_eq!(live.pool.status().health, Health::Healthy);
        fill(&vol, 80..100).await;
        while live.pool.status().members[3].uuid != coming.uuid {
            holds(&vol, 0..20, "while it is filled").await;
            live.sleep(Duration::from_millis(20)).await;
        }
        live.world.disks.set_mode(3, Mode::Broken);
        fill(&vol, 100..110).await;
        holds(&vol, 0..110, "replaced").await;
        let status = live.pool.status();
        assert_eq!((status.health, status.members[3].name.as_deref()), (Health::Healthy, Some("mem:6")));
        assert!(!live.pool.slots_in_use().contains(&MemberIndex(3)));
    });
    rig.disks.set_mode(3, Mode::Good);
    rig.live(2, |live| async move {
        let status = live.pool.status();
        assert_eq!((status.health, status.members[3].name.as_deref()), (Health::Healthy, Some("mem:6")));
        holds(&live.volume("v"), 0..110, "at the next mount").await;
    });
    holds_without(&rig, &[0, 5], 0..110, "0 and 5 lost");
}

/// A replacement of a member that is lost goes on at the next mount where it was, and what it gets is all.
#[test]
fn a_replacement_goes_on_after_a_crash() {
    for crash in 0..12u64 {
        let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
        let new = blank(&mut rig);
        rig.live(1, move |live| async move {
            let vol = live.volume("v");
            fill(&vol, 0..100).await;
            live.world.disks.set_mode(1, Mode::Broken);
            live.pool.replace_member("1", new).await.expect("it is blank");
            while live.pool.status().rebuild.is_none() {
                live.sleep(Duration::from_millis(1)).await;
            }
            fill(&vol, 100..102).await;
            live.sleep(Duration::from_millis(crash * 17)).await;
        });
        rig.live(2, move |live| async move {
            let vol = live.volume("v");
            fill(&vol, 102..105).await;
            whole(&live).await;
            assert_eq!(live.pool.status().members[1].name.as_deref(), Some("mem:6"), "crash {crash}");
            holds(&vol, 0..105, "filled").await;
        });
        holds_without(&rig, &[2, 4], 0..105, &format!("crash {crash}"));
    }
}

/// What may not take a place is refused with the reason, and nothing is written to it.
#[test]
fn devices_that_may_not_take_a_place_are_refused() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
    let other = Rig::new(LAYOUT, 64, 1);
    let world = World::new(&other.disks, 99);
    let (inner, env) = (other.clone(), world.env());
    world.run(async move { format(&env, &inner.inputs, inner.layout).await.expect("blank") }).expect("no crash");
    world.end(99);
    let new = blank(&mut rig);
    rig.live(1, move |live| async move {
        let refused = async |old: &str, new: &NewMember| {
            live.pool.replace_member(old, new.clone()).await.expect_err("refused").to_string()
        };
        assert!(refused("9", &new).await.contains("no member \"9\""));
        assert!(refused("mem:77", &new).await.contains("no member"));
        let small = NewMember { size_bytes: 1 << 20, ..new.clone() };
        assert!(refused("0", &small).await.contains("too few"));
        let serving = NewMember { slot: MemberIndex(2), ..new.clone() };
        assert!(refused("0", &serving).await.contains("is member 2 of this pool"));
        let disk = &live.world.disks.0[6];
        *disk.borrow_mut() = other.disks.0[4].borrow().copy();
        let before: Vec<_> = disk.borrow().pages().map(|(at, page)| (at, page.to_vec())).collect();
        assert!(refused("0", &new).await.contains("not blank: member 4 of the Sluice pool"));
        let attached = live.pool.attach_member(new.clone()).await.expect_err("another pool's").to_string();
        assert!(attached.contains("holds no member of this pool"), "{attached}");
        let active = live.pool.attach_member(serving).await.expect_err("it serves").to_string();
        assert!(active.contains("in the set already"), "{active}");
        let after: Vec<_> = disk.borrow().pages().map(|(at, page)| (at, page.to_vec())).collect();
        assert!(before == after, "it was written to");
    });
}

/// A member that was not there at the mount is attached later, under another slot.
#[test]
fn a_member_that_was_missing_is_attached() {
    let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move { fill(&live.volume("v"), 0..60).await });
    let new = blank(&mut rig);
    *rig.disks.0[6].borrow_mut() = rig.disks.0[2].borrow().copy();
    let mut without = rig.clone();
    without.inputs.truncate(6);
    without.inputs[2].size_bytes = None;
    without.live(2, move |live| async move {
        let vol = live.volume("v");
        fill(&vol, 60..70).await;
        assert_eq!(live.pool.status().members[2].state, MemberState::Missing);
        assert_eq!(live.pool.attach_member(new).await.expect("it is ours").index, 2);
        whole(&live).await;
        holds(&vol, 0..70, "attached").await;
    });
    rig.inputs.truncate(6);
    let moved = rig.disks.0[6].borrow().copy();
    *rig.disks.0[2].borrow_mut() = moved;
    holds_without(&rig, &[0, 1], 0..70, "0 and 1 lost");
}

/// The power fails at every write of a replacement of a member that serves: afterwards one of the two is in the set, and when
/// the replacement is full any other member can be lost.
#[test]
fn a_crash_at_every_write_of_a_replacement_loses_nothing() {
    let mut base = Rig { layout: SMALL, ..Rig::small(4096) };
    let new = blank(&mut base);
    let story = |new: NewMember, model: SharedModel| {
        move |live: Live| async move {
            let vol = live.volume("v");
            for (stamp, lba) in (1..4).zip([0, 40, 10]) {
                write(&vol, &model, lba, 4, stamp).await;
            }
            let coming = live.pool.replace_member("1", new).await.expect("it is blank");
            write(&vol, &model, 2, 6, 5).await;
            let _ = live.pool.checkpoint().await;
            write(&vol, &model, 41, 6, 6).await;
            while live.pool.status().members[1].uuid != coming.uuid {
                live.sleep(Duration::from_millis(1)).await;
            }
            write(&vol, &model, 3, 5, 7).await;
            live.world.steps.get()
        }
    };
    let fresh = || -> SharedModel { Rc::new(RefCell::new(Model::default())) };
    let counted = Rig { disks: base.disks.copy(), ..base.clone() };
    let steps = counted.live(5, story(new.clone(), fresh()));
    assert!(steps > 60, "{steps}");
    for crash_at in 1..=steps {
        let rig = Rig { disks: base.disks.copy(), ..base.clone() };
        let model = fresh();
        let _ = rig.live_until(5, Some(crash_at), story(new.clone(), Rc::clone(&model)));
        let (again, asked) = (Rc::clone(&model), new.clone());
        rig.live(crash_at + 1, move |live| async move {
            let vol = live.volume("v");
            check_all(&vol, &again, &format!("crash at {crash_at}")).await;
            // Refused where it goes on by itself, or is done.
            let _ = live.pool.replace_member("1", asked).await;
            write(&vol, &again, 44, 3, 9).await;
            while live.pool.status().members[1].name.as_deref() != Some("mem:3") {
                live.sleep(Duration::from_millis(100)).await;
            }
            whole(&live).await;
            check_all(&vol, &again, &format!("crash at {crash_at}, replaced")).await;
        });
        for lost in [0, 2] {
            let rig = Rig { disks: rig.disks.copy(), ..rig.clone() };
            let again = Rc::clone(&model);
            rig.live(crash_at + 2, move |live| async move {
                live.world.disks.set_mode(lost, Mode::Broken);
                check_all(&live.volume("v"), &again, &format!("crash at {crash_at}, {lost} lost")).await;
                assert_eq!(bad_shards(&live, &[lost]), 0, "crash at {crash_at}, {lost} lost");
            });
        }
    }
}

/// How long it takes to bring back a member that lacks some megabytes, with or without hosts at work.
fn return_takes(rig: &Rig, seed: u64, load: bool) -> Duration {
    rig.live(seed, move |live| async move {
        let vol = live.volume("v");
        fill(&vol, 0..20).await;
        live.world.disks.set_mode(2, Mode::Broken);
        fill(&vol, 20..240).await;
        until_out(&live, 2).await;
        live.world.disks.set_mode(2, Mode::Good);
        while live.pool.status().members[2].state != MemberState::Rebuilding {
            live.sleep(Duration::from_millis(1)).await;
        }
        let begun = live.world.elapsed();
        while live.pool.status().members[2].state == MemberState::Rebuilding {
            if load {
                let _ = vol.stamps(0, 1).await;
            } else {
                live.sleep(Duration::from_millis(1)).await;
            }
        }
        assert_eq!(live.pool.status().health, Health::Healthy);
        live.world.elapsed() - begun
    })
}

/// Hosts whose requests take longer than the budget slow a return down; within the budget, and without hosts, it goes at
/// full speed; and it never goes faster than the configured rate.
#[test]
fn a_return_yields_to_requests_that_are_late() {
    let rig = |budget: Duration, rate: u64| {
        let mut rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
        (rig.options.foreground_p99, rig.options.rebuild_rate) = (budget, rate);
        rig
    };
    let (tight, wide) = (Duration::from_micros(1), Duration::from_secs(1));
    let idle = return_takes(&rig(tight, 16 << 20), 1, false);
    let within = return_takes(&rig(wide, 16 << 20), 2, true);
    let late = return_takes(&rig(tight, 16 << 20), 3, true);
    assert!(
        late > idle * 3 && late > within * 3,
        "{late:?} late, {within:?} within the budget, {idle:?} without hosts"
    );
    let slow = return_takes(&rig(wide, 2 << 20), 4, false);
    assert!(slow > idle * 4, "at 2 MiB/s it took {slow:?}, at 16 {idle:?}");
}

/// A stripe that was on its way to all members when one came back, and that nothing could be seen of, is waited for: it is on
/// that member too when it counts.
#[test]
fn a_stripe_that_was_under_way_when_a_member_came_is_not_missed() {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        fill(&vol, 0..10).await;
        live.world.disks.set_mode(0, Mode::Broken);
        fill(&vol, 10..12).await;
        until_out(&live, 0).await;
        live.world.disks.set_mode(0, Mode::Good);
        let shard = |_: u64, bytes: &[u8]| bytes.starts_with(b"SHRD");
        let held: Vec<_> = (1..6).map(|member| live.world.hold_write(member, shard)).collect();
        let written = Rc::new(RefCell::new(None));
        let (late, answer) = (vol.clone(), Rc::clone(&written));
        live.env.spawn(Box::pin(async move {
            let outcome = late.write_stamp(12 * 16, 16, 25).await;
            *answer.borrow_mut() = Some(outcome);
        }));
        while !held.iter().all(|held| held.is_caught()) {
            live.sleep(Duration::from_millis(1)).await;
        }
        let size_bytes = 64 * 1024 + 64 * u64::from(LAYOUT.segment_bytes);
        let back = NewMember { slot: MemberIndex(0), name: "mem:0".into(), size_bytes };
        live.pool.attach_member(back).await.expect("it is ours");
        live.sleep(Duration::from_millis(200)).await;
        held.into_iter().for_each(|held| held.release());
        whole(&live).await;
        assert_eq!(*written.borrow(), Some(Outcome::Success));
    });
    holds_without(&rig, &[1, 2], 0..13, "1 and 2 lost");
    holds_without(&rig, &[4, 5], 0..13, "4 and 5 lost");
}
