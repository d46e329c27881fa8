//! Space: full pools, cleaning, deallocation, and accounts that add up.

use nvmf_target::backend::Outcome;

use super::super::{PoolStatus, VolumeError};
use super::harness::{LAYOUT, Live, Rig, Vol, spec};

const MIB: u64 = 1 << 20;

/// DESIGN 3.6: a pool overwritten many times over keeps serving, and stays right.
#[test]
fn a_pool_overwritten_many_times_keeps_serving() {
    // 32 segments of 1 MiB of data, a third of it kept back; the volume takes 8.
    let rig = Rig::new(LAYOUT, 32, 2).with_volume(8 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        let mut stamps = vec![0u64; 2048];
        for round in 0..20u64 {
            for step in 0..32 {
                // Random data (odd stamps), in an order that leaves every segment partly alive.
                let lba = (step * 37 + round * 11) % 32 * 64 + (round % 4) * 16;
                let count = if round % 3 == 0 { 16 } else { 48.min(2048 - lba) };
                let stamp = (round * 32 + step) * 2 + 1;
                assert_eq!(vol.write_stamp(lba, count, stamp).await, Outcome::Success, "round {round} step {step}");
                stamps[lba as usize..(lba + count) as usize].fill(stamp);
            }
        }
        check(&vol, &stamps).await;
        let status = live.pool.status();
        assert!(status.checkpoints > 2 && status.replay_segments <= status.max_replay_segments);
        assert_sums(&live);
    });
}

async fn check(vol: &Vol, stamps: &[u64]) {
    for (index, expected) in stamps.chunks(64).enumerate() {
        assert_eq!(vol.stamps(index as u64 * 64, expected.len() as u64).await.expect("healthy"), expected);
    }
}

/// Small overwrites of large records: mostly dead records are written anew, so that space comes back all the same.
#[test]
fn scattered_overwrites_do_not_strand_space() {
    let rig = Rig::new(LAYOUT, 32, 2).with_volume(8 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        let mut stamps = vec![0u64; 2048];
        for round in 0..16u64 {
            for record in 0..128u64 {
                let (lba, count) =
                    if round == 0 { (record * 16, 16) } else { (record * 16 + (round * 7 + record) % 16, 1) };
                let stamp = (round * 128 + record) * 2 + 1;
                assert_eq!(vol.write_stamp(lba, count, stamp).await, Outcome::Success, "round {round} record {record}");
                stamps[lba as usize..(lba + count) as usize].fill(stamp);
            }
        }
        check(&vol, &stamps).await;
        assert!(live.pool.status().cleaned_segments > 0);
        assert_sums(&live);
    });
}

/// H128: an over-committed pool filled until it refuses keeps every answered write; deallocating brings space back.
#[test]
fn h128_full_is_capacity_exceeded_and_deallocation_brings_space_back() {
    let rig = Rig::new(LAYOUT, 24, 2).with_volume(256 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        let mut written = 0;
        loop {
            match vol.write_stamp(written * 16, 16, 2 * written + 1).await {
                Outcome::Success => written += 1,
                Outcome::CapacityExceeded => break,
                other => panic!("{other:?}"),
            }
            assert!(written < 2000, "never full");
        }
        assert!(written * 16 * 4096 > 6 * MIB, "full after {written} records");
        for record in 0..written {
            assert_eq!(vol.stamps(record * 16, 16).await.expect("healthy"), [2 * record + 1; 16]);
        }
        // An overwrite is refused too, and changes nothing.
        assert_eq!(vol.write_stamp(0, 16, 5001).await, Outcome::CapacityExceeded);
        assert_eq!(vol.stamps(0, 16).await.expect("healthy"), [1; 16]);
        assert_sums(&live);
        for record in (0..written).step_by(2) {
            assert_eq!(vol.deallocate(record * 16, 16).await, Outcome::Success, "record {record}");
        }
        let half = written / 2;
        for record in 0..half / 2 {
            assert_eq!(
                vol.write_stamp(40_000 + record * 16, 16, 9001 + 2 * record).await,
                Outcome::Success,
                "{record}"
            );
        }
        for record in 0..written {
            let expected = if record % 2 == 0 { 0 } else { 2 * record + 1 };
            assert_eq!(vol.stamps(record * 16, 16).await.expect("healthy"), [expected; 16]);
        }
        assert_sums(&live);
    });
    rig.live(2, |live| async move {
        assert_eq!(live.volume("v").stamps(16, 16).await.expect("healthy"), [3; 16]);
        assert_sums(&live);
    });
}

/// A full pool still deletes a volume, and its space comes back.
#[test]
fn a_volume_of_a_full_pool_can_be_deleted() {
    let rig = Rig::new(LAYOUT, 24, 1).with_volume(256 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        let mut written = 0;
        while vol.write_stamp(written * 16, 16, 2 * written + 1).await == Outcome::Success {
            written += 1;
        }
        live.pool.delete_volume("v").await.expect("reserves are kept for it");
        assert_eq!(vol.write_stamp(0, 1, 1).await, Outcome::NotReady);
        assert!(matches!(live.pool.delete_volume("v").await, Err(VolumeError::NoSuchVolume { .. })));
        live.pool.create_volume(spec("w", 256 * MIB, 4096)).await.expect("room");
        let vol = live.volume("w");
        for record in 0..written / 2 {
            assert_eq!(
                vol.write_stamp(record * 16, 16, 2 * record + 1).await,
                Outcome::Success,
                "{record} of {written}"
            );
        }
        assert_sums(&live);
    });
    rig.live(2, |live| async move {
        assert!(live.pool.volume("v").is_none());
        assert_eq!(live.volume("w").stamps(0, 16).await.expect("healthy"), [1; 16]);
    });
}

/// H127: raw, metadata, parity, reserve, used, reclaimable and free add up to the byte; so do the volumes.
fn assert_sums(live: &Live) {
    let PoolStatus { space, .. } = live.pool.status();
    let parts = space.metadata_bytes
        + space.parity_bytes
        + space.reserve_bytes
        + space.checkpoint_bytes
        + space.used_bytes
        + space.reclaimable_bytes
        + space.free_bytes;
    assert_eq!(parts, space.raw_bytes, "{space:?}");
    let volumes = live.pool.volumes();
    assert_eq!(volumes.iter().map(|volume| volume.stored_bytes).sum::<u64>(), space.used_bytes);
    assert_eq!(volumes.iter().map(|volume| volume.used_bytes).sum::<u64>(), space.logical_bytes);
}

/// H127: on an empty pool too.
#[test]
fn h127_space_adds_up_to_the_byte() {
    for (segments, extra) in [(40, 0), (41, 4096), (64, 100_000)] {
        let mut rig = Rig::new(LAYOUT, segments, 1);
        for (index, input) in rig.inputs.iter_mut().enumerate() {
            input.size_bytes = input.size_bytes.map(|size| size + extra * index as u64 / 3);
        }
        rig.with_volume(64 * MIB, 512).live(1, |live| async move {
            assert_sums(&live);
            let vol = live.volume("v");
            for lba in 0..50 {
                assert_eq!(vol.write_stamp(lba * 3, 5, lba + 1).await, Outcome::Success);
            }
            assert_sums(&live);
        });
    }
}
