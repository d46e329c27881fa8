//! Every kind of request, as the field reports ask.

use std::rc::Rc;
use std::time::Duration;

use futures::future::join_all;
use nvmf_target::backend::{LbaRange, Operation, Outcome};
use nvmf_target::buffer::IoBuf;

use super::super::{VolumeError, VolumeSpec};
use super::harness::{LAYOUT, Rig, spec};
use super::model::run_of;
use crate::stages::cipher::Cipher;
use crate::stages::compress::Compression;

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// H62: a deallocation of all of a 16 TiB thin volume is quick, on an empty one without any write to members.
#[test]
fn h62_deallocating_a_huge_volume_is_quick() {
    for block_bytes in [512u32, 4096] {
        Rig::new(LAYOUT, 48, 2).with_volume(16 * TIB, block_bytes).live(1, move |live| async move {
            let vol = live.volume("v");
            let blocks = vol.backend.geometry().block_count;
            assert_eq!(blocks, 16 * TIB / u64::from(block_bytes));
            let (steps, start) = (live.world.steps.get(), live.world.elapsed());
            assert_eq!(vol.deallocate(0, blocks).await, Outcome::Success);
            let quarter = LbaRange { slba: 0, lba_count: (64 << 30) / u64::from(block_bytes) };
            let ranges = (0..256).map(|i| LbaRange { slba: i * quarter.lba_count, ..quarter }).collect();
            assert_eq!(vol.submit(Operation::Deallocate { ranges }).await.outcome, Outcome::Success);
            assert_eq!(live.world.steps.get(), steps, "nothing was there to deallocate");
            assert!(live.world.elapsed() - start < Duration::from_secs(1));
            for lba in [0, 77, blocks / 2, blocks - 3] {
                assert_eq!(vol.write_stamp(lba, 3, 5).await, Outcome::Success);
            }
            assert_eq!(vol.deallocate(0, blocks).await, Outcome::Success);
            assert_eq!(live.pool.volumes()[0].used_bytes, 0);
            assert_eq!(vol.stamps(blocks - 3, 3).await.expect("holes"), [0, 0, 0]);
        });
    }
}

/// H65: data spread over 3 TiB of 512-byte blocks all comes back by deallocations of the longest length.
#[test]
fn h65_longest_deallocations_free_everything() {
    Rig::new(LAYOUT, 48, 2).with_volume(3 * TIB, 512).live(1, |live| async move {
        let vol = live.volume("v");
        let blocks = vol.backend.geometry().block_count;
        for index in 0..200 {
            assert_eq!(vol.write_stamp(index * (blocks / 200) + index % 7, 9, index + 1).await, Outcome::Success);
        }
        assert!(live.pool.status().space.used_bytes > 0);
        let longest = u64::from(u32::MAX);
        for slba in (0..blocks).step_by(longest as usize) {
            assert_eq!(vol.deallocate(slba, longest.min(blocks - slba)).await, Outcome::Success);
        }
        live.pool.checkpoint().await.expect("healthy");
        let space = live.pool.status().space;
        assert_eq!((space.used_bytes, space.logical_bytes), (0, 0));
    });
}

/// H66: three neighbouring runs zeroed, the long one too: all zeroes, at once and after a crash.
#[test]
fn h66_neighbouring_runs_read_as_zeroes() {
    for deallocate in [false, true] {
        let rig = Rig::new(LAYOUT, 48, 1).with_volume(64 * MIB, 512);
        rig.live(1, move |live| async move {
            let vol = live.volume("v");
            assert_eq!(vol.write_stamp(0, 200, 1).await, Outcome::Success);
            for slba in [0, 8, 16] {
                let range = LbaRange { slba, lba_count: 8 };
                let operation = Operation::WriteZeroes { range, deallocate, fua: false };
                assert_eq!(vol.submit(operation).await.outcome, Outcome::Success);
            }
            let expected: Vec<u64> = (0..200).map(|lba| u64::from(lba >= 24)).collect();
            assert_eq!(vol.stamps(0, 200).await.expect("healthy"), expected);
        });
        rig.live(2, move |live| async move {
            let vol = live.volume("v");
            let expected: Vec<u64> = (0..200).map(|lba| u64::from(lba >= 24)).collect();
            assert_eq!(vol.stamps(0, 200).await.expect("replayed"), expected);
            assert_eq!(vol.write_zeroes(0, 65_536).await, Outcome::Success);
            assert_eq!(vol.stamps(0, 200).await.expect("healthy"), vec![0; 200]);
        });
    }
}

/// H125: the first and the last block of volumes of every kind and of odd sizes; one further is out of range.
#[test]
fn h125_the_last_block_works_and_the_next_is_out_of_range() {
    let compressions = [Compression::None, Compression::Lz4, Compression::Zstd { level: 1 }, Compression::Auto];
    let rig = Rig::new(LAYOUT, 64, 2).with_volume(MIB, 4096);
    rig.live(1, move |live| async move {
        for (index, cipher) in Cipher::ALL.into_iter().enumerate() {
            for block_bytes in [512u32, 4096] {
                let name = format!("v{index}-{block_bytes}");
                let size_bytes = 100 * MIB + u64::from(block_bytes);
                let compression = compressions[index];
                let spec = VolumeSpec { compression, cipher, ..spec(&name, size_bytes, block_bytes) };
                live.pool.create_volume(spec).await.expect("room");
                let vol = live.volume(&name);
                let blocks = vol.backend.geometry().block_count;
                for lba in [0, blocks - 1] {
                    assert_eq!(vol.write_stamp(lba, 1, lba + 1).await, Outcome::Success);
                    assert_eq!(vol.stamps(lba, 1).await.expect("healthy"), [lba + 1]);
                }
                assert_eq!(vol.write_stamp(blocks, 1, 1).await, Outcome::LbaOutOfRange);
                assert_eq!(vol.write_stamp(blocks - 1, 2, 1).await, Outcome::LbaOutOfRange);
                assert_eq!(vol.read(u64::MAX, 1).await, Err(Outcome::LbaOutOfRange));
                assert_eq!(vol.deallocate(blocks - 1, 2).await, Outcome::LbaOutOfRange);
            }
        }
    });
}

/// H116: lengths about the record's limit, of all kinds of data, at odd places.
#[test]
fn h116_lengths_about_the_record_limit() {
    let rig = Rig::new(LAYOUT, 64, 1).with_volume(64 * MIB, 512);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        for (index, count) in [1u64, 127, 128, 129, 255, 256, 257].into_iter().enumerate() {
            for (kind, slba) in [0u64, 3, 125, 8191, 8192 - 130].into_iter().enumerate() {
                let stamp = (index * 10 + kind + 1) as u64;
                assert_eq!(vol.write_stamp(slba, count, stamp).await, Outcome::Success);
                assert_eq!(vol.stamps(slba, count).await.expect("healthy"), vec![stamp; count as usize]);
            }
        }
    });
}

/// H50: a name or UUID is given once; the owner is named.
#[test]
fn h50_a_uuid_is_given_once() {
    Rig::new(LAYOUT, 48, 1).with_volume(MIB, 4096).live(1, |live| async move {
        let uuid = live.pool.volumes()[0].uuid;
        let taken = live.pool.create_volume(VolumeSpec { uuid: Some(uuid), ..spec("w", MIB, 4096) }).await;
        assert!(matches!(taken, Err(VolumeError::UuidTaken { owner, .. }) if owner == "v"));
        let taken = live.pool.create_volume(spec("v", MIB, 4096)).await;
        assert!(matches!(taken, Err(VolumeError::NameTaken { .. })));
        let odd = live.pool.create_volume(spec("x", MIB + 1, 4096)).await;
        assert!(matches!(odd, Err(VolumeError::Size { .. })));
        let bad = live.pool.create_volume(spec("a/b", MIB, 4096)).await;
        assert!(matches!(bad, Err(VolumeError::BadName { .. })));
    });
}

/// A grown volume keeps its data and its size; a smaller size is refused.
#[test]
fn a_volume_grows_and_stays_grown() {
    let rig = Rig::new(LAYOUT, 48, 1).with_volume(MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        assert_eq!(vol.write_stamp(255, 1, 1).await, Outcome::Success);
        assert_eq!(vol.write_stamp(256, 1, 1).await, Outcome::LbaOutOfRange);
        live.pool.resize_volume("v", 2 * MIB).await.expect("grows");
        assert_eq!(vol.write_stamp(511, 1, 2).await, Outcome::Success);
        assert!(matches!(live.pool.resize_volume("v", MIB).await, Err(VolumeError::Shrink { .. })));
    });
    rig.live(2, |live| async move {
        let vol = live.volume("v");
        assert_eq!(vol.backend.geometry().block_count, 512);
        assert_eq!(vol.stamps(255, 1).await.expect("healthy"), [1]);
        assert_eq!(vol.stamps(511, 1).await.expect("healthy"), [2]);
    });
}

/// Four tasks increment a counter by Compare-and-Write: no increment is lost (the pool's part of H68).
#[test]
fn h68_compare_and_write_is_one_step() {
    Rig::new(LAYOUT, 48, 2).with_volume(MIB, 512).live(1, |live| async move {
        let vol = Rc::new(live.volume("v"));
        let count = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
        let tasks = (0..4).map(|_| {
            let vol = Rc::clone(&vol);
            async move {
                for _ in 0..50 {
                    loop {
                        let old = vol.read(5, 1).await.expect("healthy");
                        let mut new = old.clone();
                        new[..8].copy_from_slice(&(count(&old) + 1).to_le_bytes());
                        match vol.compare_and_write(5, &old, &new).await {
                            Outcome::Success => break,
                            Outcome::CompareFailure => {}
                            other => panic!("{other:?}"),
                        }
                    }
                }
            }
        });
        join_all(tasks).await;
        assert_eq!(count(&vol.read(5, 1).await.expect("healthy")), 200);
    });
}

/// Compare, Verify and Flush.
#[test]
fn compare_verify_and_flush() {
    Rig::new(LAYOUT, 48, 2).with_volume(16 * MIB, 4096).live(1, |live| async move {
        let vol = live.volume("v");
        // Over the edge of a shard.
        assert_eq!(vol.write_stamp(1000, 40, 3).await, Outcome::Success);
        let range = LbaRange { slba: 1000, lba_count: 40 };
        let compare = |bytes: Vec<u8>| Operation::Compare { range, buffer: IoBuf::copy_of(&bytes) };
        let same = run_of(3, 1000, 40, 4096);
        assert_eq!(vol.submit(compare(same.clone())).await.outcome, Outcome::Success);
        let mut other = same;
        other[39 * 4096 + 4000] ^= 1;
        assert_eq!(vol.submit(compare(other)).await.outcome, Outcome::CompareFailure);
        assert_eq!(vol.submit(Operation::Verify { range }).await.outcome, Outcome::Success);
        assert_eq!(vol.submit(Operation::Flush).await.outcome, Outcome::Success);
    });
}

/// H57: 32 writes held up by a member that hangs, all answered once, and each block whole: the old or the new one.
#[test]
fn h57_writes_held_up_by_a_member_are_answered_once_and_whole() {
    let rig = Rig::new(LAYOUT, 48, 1).with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        let vol = live.volume("v");
        for lba in 0..32 {
            assert_eq!(vol.write_stamp(lba, 1, 1).await, Outcome::Success);
        }
        live.world.disks.set_mode(2, super::sim::Mode::Hung);
        let outcomes = join_all((0..32).map(|lba| vol.write_stamp(lba, 1, 2))).await;
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Success));
        assert_eq!(vol.stamps(0, 32).await.expect("degraded"), vec![2; 32]);
    });
}

/// A healthy read touches only the member that holds its record.
#[test]
fn a_healthy_read_touches_only_the_members_of_its_record() {
    Rig::new(LAYOUT, 48, 1).with_volume(16 * MIB, 4096).live(1, |live| async move {
        let vol = live.volume("v");
        // Even stamps compress: the record fits one block of one shard.
        assert_eq!(vol.write_stamp(9, 1, 2).await, Outcome::Success);
        let reads = |live: &super::harness::Live| live.world.counts.borrow().get("read").copied().unwrap_or(0);
        let before = reads(&live);
        assert_eq!(vol.stamps(9, 1).await.expect("healthy"), [2]);
        assert_eq!(reads(&live) - before, 1);
    });
}
