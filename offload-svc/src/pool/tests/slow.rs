//! Members that answer, but late.

use std::time::Duration;

use nvmf_target::backend::Outcome;

use super::super::{Health, MemberState};
use super::harness::{LAYOUT, Rig};
use super::sim::Mode;

const MIB: u64 = 1 << 20;

fn rig() -> Rig {
    let mut rig = Rig::new(LAYOUT, 48, 1).with_volume(64 * MIB, 4096);
    rig.options.slow_read = Duration::from_millis(20);
    rig
}

/// A read that meets a slow member is served from the others; the member stays in the set, is not taken to be wrong, and
/// counts again when it is quick again. Two slow ones are survived as well.
#[test]
fn reads_do_not_wait_for_a_slow_member() {
    rig().live(1, |live| async move {
        let vol = live.volume("v");
        for stamp in 0..60 {
            assert_eq!(vol.write_stamp(stamp * 16, 16, stamp * 2 + 1).await, Outcome::Success);
        }
        for member in [2, 5] {
            live.world.disks.0[member].borrow_mut().slow = Duration::from_millis(400);
        }
        let mut longest = Duration::ZERO;
        for stamp in 0..60 {
            let begun = live.world.elapsed();
            assert_eq!(vol.stamps(stamp * 16, 16).await.expect("the others have it"), [stamp * 2 + 1; 16]);
            longest = longest.max(live.world.elapsed() - begun);
        }
        assert!(longest < Duration::from_millis(50), "a read took {longest:?}");
        let status = live.pool.status();
        assert_eq!(status.health, Health::Healthy);
        assert!(status.members.iter().all(|member| member.bad_shards == 0 && member.timeouts == 0));
        assert!([2, 5].iter().all(|member| status.members[*member].slow_reads > 0));
        for member in [2, 5] {
            live.world.disks.0[member].borrow_mut().slow = Duration::ZERO;
        }
        live.sleep(Duration::from_secs(1)).await;
        let before: u64 = live.pool.status().members.iter().map(|member| member.slow_reads).sum();
        let reads = live.world.disks.0[2].borrow().reads;
        for stamp in 0..60 {
            assert_eq!(vol.stamps(stamp * 16, 16).await.expect("healthy"), [stamp * 2 + 1; 16]);
        }
        assert_eq!(live.pool.status().members.iter().map(|member| member.slow_reads).sum::<u64>(), before);
        assert!(live.world.disks.0[2].borrow().reads > reads, "it is read again");
    });
}

/// Where too few others are left, the slow one is waited for; and one that hangs is put out though nobody waits for it.
#[test]
fn a_slow_member_that_is_needed_is_waited_for_and_one_that_hangs_is_put_out() {
    rig().live(1, |live| async move {
        let vol = live.volume("v");
        for stamp in 0..30 {
            assert_eq!(vol.write_stamp(stamp * 16, 16, stamp * 2 + 1).await, Outcome::Success);
        }
        live.world.disks.set_mode(0, Mode::Hung);
        for stamp in 0..30 {
            assert_eq!(vol.stamps(stamp * 16, 16).await.expect("the others have it"), [stamp * 2 + 1; 16]);
        }
        live.sleep(Duration::from_secs(2)).await;
        assert_eq!(live.pool.status().members[0].state, MemberState::Out, "reads alone put it out");
        live.world.disks.set_mode(1, Mode::Broken);
        live.world.disks.0[2].borrow_mut().slow = Duration::from_millis(200);
        for stamp in 0..30 {
            assert_eq!(vol.stamps(stamp * 16, 16).await.expect("four are left"), [stamp * 2 + 1; 16]);
        }
        assert_eq!(live.pool.status().members[2].state, MemberState::Active);
    });
}
