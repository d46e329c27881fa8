//! Cleaning for years: pools that are nearly full and overwritten again and again, and what that costs.

use futures::future::join_all;
use nvmf_target::backend::Outcome;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::{Layout, WriteTraffic};
use super::harness::{Live, Rig, Vol};
use crate::stages::record::sealed_bound;

/// Segments that the longest records fill to 97 parts in a hundred, as they do those of the default layout.
const LONG: Layout = Layout { data_shards: 2, parity_shards: 1, segment_bytes: 1 << 20, shard_bytes_max: 256 << 10 };
/// Shorter ones.
const SHORT: Layout = Layout { segment_bytes: 512 << 10, shard_bytes_max: 128 << 10, ..LONG };
const BLOCK: usize = 4096;
/// Blocks of the longest record.
const RECORD: u64 = 16;

/// A volume with what is in it, as stamps. All stamps are odd: the data does not compress.
struct Filled {
    vol: Vol,
    stamps: Vec<u64>,
    next: u64,
    rng: StdRng,
}

impl Filled {
    /// Fills `percent` of what a new pool shows as usable, counted in records of `record_blocks` blocks, with the longest ones.
    async fn new(live: &Live, percent: u64, record_blocks: u64) -> Self {
        let space = live.pool.status().space;
        let usable = space.used_bytes + space.reclaimable_bytes + space.free_bytes;
        let record_bytes = sealed_bound(record_blocks as usize * BLOCK, 12) as u64;
        let blocks = (usable * percent / 100 / record_bytes * record_blocks) as usize;
        let rng = StdRng::seed_from_u64(percent);
        let mut filled = Self { vol: live.volume("v"), stamps: vec![0; blocks], next: 1, rng };
        for slba in (0..blocks as u64).step_by(256) {
            assert_eq!(
                filled.write(slba, 256.min(blocks as u64 - slba)).await,
                Outcome::Success,
                "block {slba} of {blocks}"
            );
        }
        filled
    }

    fn write(&mut self, slba: u64, count: u64) -> impl Future<Output = Outcome> + use<> {
        let (vol, stamp) = (self.vol.clone(), self.next);
        self.next += 2;
        self.stamps[slba as usize..(slba + count) as usize].fill(stamp);
        async move { vol.write_stamp(slba, count, stamp).await }
    }

    /// Overwrites `blocks` blocks, some writes at once, in places and lengths that `pick` picks.
    async fn overwrite(&mut self, blocks: u64, mut pick: impl FnMut(&mut StdRng, u64) -> (u64, u64)) {
        let (mut left, all) = (blocks, self.stamps.len() as u64);
        while left > 0 {
            let mut writes: Vec<(u64, u64)> = Vec::new();
            while writes.len() < 32 && left > 0 {
                let (slba, count) = pick(&mut self.rng, all);
                let count = count.min(all - slba).min(left);
                // The order of those under way at once is open.
                if writes.iter().all(|(at, len)| slba + count <= *at || at + len <= slba) {
                    writes.push((slba, count));
                    left -= count;
                }
            }
            let written: Vec<_> = writes.iter().map(|(slba, count)| self.write(*slba, *count)).collect();
            for (outcome, (slba, count)) in join_all(written).await.into_iter().zip(&writes) {
                assert_eq!(outcome, Outcome::Success, "{count} blocks at {slba}, {left} of {blocks} blocks to go");
            }
        }
    }

    async fn check(&self) {
        for (index, expected) in self.stamps.chunks(256).enumerate() {
            let found = self.vol.stamps(index as u64 * 256, expected.len() as u64).await.expect("healthy");
            assert_eq!(found, expected, "from block {}", index * 256);
        }
    }
}

/// A pool with a volume `v` that is larger than it.
fn rig(layout: Layout, segments: u64) -> Rig {
    Rig::new(layout, segments, 1).with_volume(1 << 30, BLOCK as u32)
}

/// A pool that is 85 % full is overwritten with 4 KiB writes over 64 KiB records and with writes of all lengths: no write is refused,
/// and every byte is what was written last, also after a crash.
#[test]
fn a_pool_85_percent_full_is_overwritten() {
    overwrite_times(1);
}

/// The same, 20 times over. Takes minutes.
#[test]
#[ignore = "takes minutes; `write_amplification --overwrites 20` and the system test do it as well"]
fn a_pool_85_percent_full_is_overwritten_20_times_over() {
    overwrite_times(20);
}

fn overwrite_times(times: u64) {
    let rig = rig(LONG, 48);
    let (stamps, traffic) = rig.live(1, move |live| async move {
        let mut filled = Filled::new(&live, 85, 1).await;
        let all = filled.stamps.len() as u64;
        for _ in 0..times {
            filled.overwrite(all / 2, |rng, all| (rng.random_range(0..all), 1)).await;
            filled.overwrite(all / 2, |rng, all| (rng.random_range(0..all), rng.random_range(1..=RECORD))).await;
        }
        filled.check().await;
        let status = live.pool.status();
        assert!(status.replay_segments <= status.max_replay_segments);
        (filled.stamps, status.traffic)
    });
    println!(
        "{:.2} in the log, {:.2} with parity: {traffic:?}",
        log_cost(&traffic),
        traffic.amplification().expect("written")
    );
    rig.live(2, |live| async move {
        Filled { vol: live.volume("v"), stamps, next: 1, rng: StdRng::seed_from_u64(0) }.check().await;
    });
}

/// Bytes of the log for each byte that hosts wrote.
fn log_cost(traffic: &WriteTraffic) -> f64 {
    (traffic.written_bytes() - traffic.parity_bytes) as f64 / traffic.user_bytes as f64
}

/// Nine of ten writes go to a tenth of the blocks. What the cleaner moves has long been as it is: in segments of its own it is
/// seldom moved again, while those of fresh records die by themselves.
#[test]
fn hot_and_cold_parted_cost_less_than_mixed() {
    let moved_with = |one_stream: bool| {
        rig(SHORT, 56).live(1, move |live| async move {
            live.cores[0].one_stream.set(one_stream);
            let mut filled = Filled::new(&live, 65, 2).await;
            let blocks = filled.stamps.len() as u64;
            let skewed = |rng: &mut StdRng, all: u64| {
                let pair = if rng.random_range(0..10) > 0 {
                    rng.random_range(0..all / 20) * 10
                } else {
                    rng.random_range(0..all / 2)
                };
                (pair * 2, 2)
            };
            filled.overwrite(blocks * 2, skewed).await;
            let before = live.pool.status().traffic;
            filled.overwrite(blocks * 2, skewed).await;
            filled.check().await;
            let after = live.pool.status().traffic;
            let user = after.user_bytes - before.user_bytes;
            let again = (after.moved_bytes + after.fresh_bytes) - (before.moved_bytes + before.fresh_bytes);
            again as f64 / user as f64
        })
    };
    let (parted, mixed) = (moved_with(false), moved_with(true));
    println!("records written for each byte that hosts wrote: {parted:.3} parted, {mixed:.3} mixed");
    assert!(parted < mixed * 0.95, "{parted:.3} parted, {mixed:.3} mixed");
    assert!(parted > 1.0, "something was cleaned");
}
