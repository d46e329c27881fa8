//! The way of a write and of a read, and what a mount keeps.

use nvmf_target::backend::Outcome;

use super::harness::{LAYOUT, Rig};

const MIB: u64 = 1 << 20;

#[test]
fn what_is_written_is_read_and_outlives_mounts() {
    for (reactors, block_bytes) in [(1, 4096), (3, 4096), (2, 512)] {
        let rig = Rig::new(LAYOUT, 64, reactors).with_volume(64 * MIB, block_bytes);
        rig.live(2, |live| async move {
            let vol = live.volume("v");
            assert_eq!(vol.read(3, 2).await.expect("a hole"), vec![0; 2 * vol.block_bytes]);
            assert_eq!(vol.write_stamp(0, 1, 1).await, Outcome::Success);
            assert_eq!(vol.write_stamp(5, 60, 2).await, Outcome::Success);
            assert_eq!(vol.write_stamp(10, 3, 3).await, Outcome::Success);
            assert_eq!(vol.stamps(0, 70).await.expect("good members"), expected());
        });
        rig.live(3, |live| async move {
            assert!(!live.pool.status().mount.clean);
            assert_eq!(live.volume("v").stamps(0, 70).await.expect("replayed"), expected());
            live.pool.shutdown().await.expect("good members");
        });
        rig.live(4, |live| async move {
            assert!(live.pool.status().mount.clean);
            assert_eq!(live.volume("v").stamps(0, 70).await.expect("from the checkpoint"), expected());
        });
    }
}

fn expected() -> Vec<u64> {
    let mut stamps = vec![0; 70];
    stamps[0] = 1;
    stamps[5..65].fill(2);
    stamps[10..13].fill(3);
    stamps
}
