//! A shard's map: which record holds each block.
//!
//! Owns the extents of one shard, by the volume's LBA. Must not know stripes, members or other shards. Invariant: extents
//! never overlap, and each lies within one record; a block in no extent reads as zeroes.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};

use super::stripe::StripeLocation;

/// Where a record rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RecordLocation {
    pub stripe: StripeLocation,
    /// From the payload's start, in bytes.
    pub payload_offset: u32,
    /// The record's length at rest.
    pub stored_bytes: u32,
}

/// A run of blocks of one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub location: RecordLocation,
    /// The record's generation, part of its birth.
    pub generation: u64,
    /// The record's key epoch, part of its birth.
    pub key_epoch: u32,
    /// First block within the record.
    pub record_offset: u16,
    /// Blocks of the record in all.
    pub record_blocks: u16,
    /// Blocks of this extent.
    pub count: u16,
}

impl Extent {
    /// The extent's share of its record's stored bytes. Shares of all blocks of a record add up to its length exactly,
    /// however the record is cut.
    pub fn stored_share(&self) -> u64 {
        let (size, blocks) = (u64::from(self.location.stored_bytes), u64::from(self.record_blocks).max(1));
        let upto = |block: u64| block * size / blocks;
        let first = u64::from(self.record_offset);
        upto(first + u64::from(self.count)) - upto(first)
    }

    /// The part from block `from` to block `to` of this extent.
    fn part(&self, from: u16, to: u16) -> Self {
        Self { record_offset: self.record_offset + from, count: to - from, ..*self }
    }
}

/// Told about every extent that enters or leaves a map, so that live bytes are counted.
pub trait Ledger {
    fn added(&mut self, extent: &Extent);
    fn removed(&mut self, extent: &Extent);
}

/// The extents of one shard.
#[derive(Debug, Default)]
pub struct ExtentMap {
    extents: BTreeMap<u64, Extent>,
}

impl ExtentMap {
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Maps `lba` and on to a whole record, in place of what was there.
    pub fn insert(&mut self, lba: u64, extent: Extent, ledger: &mut impl Ledger) {
        self.remove(lba..lba + u64::from(extent.count), ledger);
        ledger.added(&extent);
        self.extents.insert(lba, extent);
    }

    /// Unmaps a range.
    pub fn remove(&mut self, range: Range<u64>, ledger: &mut impl Ledger) {
        self.split_at(range.start, ledger);
        self.split_at(range.end, ledger);
        // In bursts: keys can't be removed while the tree is walked.
        let mut keys = [0u64; 64];
        loop {
            let mut found = 0;
            for (slot, (key, _)) in keys.iter_mut().zip(self.extents.range(range.clone())) {
                *slot = *key;
                found += 1;
            }
            for key in &keys[..found] {
                if let Some(extent) = self.extents.remove(key) {
                    ledger.removed(&extent);
                }
            }
            if found < keys.len() {
                return;
            }
        }
    }

    /// Cuts the extent that spans `lba`, if one does, so that one begins there.
    fn split_at(&mut self, lba: u64, ledger: &mut impl Ledger) {
        let Some((&start, &extent)) = self.extents.range(..lba).next_back() else { return };
        if start + u64::from(extent.count) <= lba {
            return;
        }
        // The cut lies within the extent, so it fits its count.
        let cut = (lba - start) as u16;
        let (head, tail) = (extent.part(0, cut), extent.part(cut, extent.count));
        // In this order, so that a segment that is alive never counts as dead in between: others look at the counters.
        ledger.added(&head);
        ledger.added(&tail);
        ledger.removed(&extent);
        self.extents.insert(start, head);
        self.extents.insert(lba, tail);
    }

    /// The extents that overlap a range, each clipped to it, in order.
    pub fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = (u64, Extent)> + '_ {
        let before = self.extents.range(..range.start).next_back();
        let before = before.filter(move |(start, extent)| **start + u64::from(extent.count) > range.start);
        let within = self.extents.range((Bound::Included(range.start), Bound::Excluded(range.end)));
        let (from, to) = (range.start, range.end);
        before.into_iter().chain(within).filter_map(move |(&start, extent)| {
            let end = start + u64::from(extent.count);
            let (first, last) = (start.max(from), end.min(to));
            (first < last).then(|| (first, extent.part((first - start) as u16, (last - start) as u16)))
        })
    }

    /// Leads the blocks of a range that are of `generation` to another copy of their record; only those at `from`, if
    /// that is given. Gives the blocks changed.
    pub fn relocate(
        &mut self,
        range: Range<u64>,
        generation: u64,
        from: Option<RecordLocation>,
        to: RecordLocation,
        ledger: &mut impl Ledger,
    ) -> u64 {
        let mut blocks = 0;
        // Extents of one record lie within the record's range, so none begins before it.
        for (_, extent) in self.extents.range_mut(range) {
            if extent.generation != generation || from.is_some_and(|from| from != extent.location) {
                continue;
            }
            let old = *extent;
            extent.location = to;
            // In this order, as in a cut: others look at the counters.
            ledger.added(extent);
            ledger.removed(&old);
            blocks += u64::from(extent.count);
        }
        blocks
    }

    /// The first block after which `limit` extents of the range have passed, or the range's end: where to cut a long
    /// removal.
    pub fn slice_end(&self, range: Range<u64>, limit: usize) -> u64 {
        let past = self.extents.range(range.start..range.end).nth(limit);
        past.map_or(range.end, |(start, _)| *start)
    }

    /// Whole extents from `lba` on: for a dump in slices. An extent that begins before `lba` is clipped.
    pub fn from(&self, lba: u64) -> impl Iterator<Item = (u64, Extent)> + '_ {
        self.overlapping(lba..u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[derive(Default)]
    struct Count {
        live: HashMap<u32, i64>,
        blocks: i64,
    }

    impl Ledger for Count {
        fn added(&mut self, extent: &Extent) {
            *self.live.entry(extent.location.payload_offset).or_default() += extent.stored_share() as i64;
            self.blocks += i64::from(extent.count);
        }
        fn removed(&mut self, extent: &Extent) {
            *self.live.entry(extent.location.payload_offset).or_default() -= extent.stored_share() as i64;
            self.blocks -= i64::from(extent.count);
        }
    }

    fn record(id: u32, generation: u64, blocks: u16) -> Extent {
        let stripe = StripeLocation { segment: 0, start_block: 0, shard_blocks: 1, data_shards: 1, rotation: 0 };
        let location = RecordLocation { stripe, payload_offset: id, stored_bytes: 1013 + id % 7 };
        Extent { location, generation, key_epoch: 0, record_offset: 0, record_blocks: blocks, count: blocks }
    }

    /// Random inserts, removals and relocations against one entry per block; H127: live bytes add up to the byte.
    #[test]
    fn h127_map_agrees_with_a_model_and_counts_to_the_byte() {
        use rand::{RngExt, SeedableRng};
        for seed in 0..20 {
            let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
            let (mut map, mut count) = (ExtentMap::default(), Count::default());
            let mut model: HashMap<u64, (u32, u16)> = HashMap::new();
            let mut records: Vec<(u64, Extent)> = Vec::new();
            for step in 0..600u32 {
                let lba = rng.random_range(0..200u64);
                let blocks = rng.random_range(1..=32u16);
                match rng.random_range(0..10) {
                    0..6 => {
                        let extent = record(step, step.into(), blocks);
                        map.insert(lba, extent, &mut count);
                        model.extend((0..blocks).map(|b| (lba + u64::from(b), (step, b))));
                        records.push((lba, extent));
                    }
                    6..9 => {
                        map.remove(lba..lba + u64::from(blocks), &mut count);
                        model.retain(|at, _| !(lba..lba + u64::from(blocks)).contains(at));
                    }
                    _ => {
                        let Some((lba, extent)) = records.last().copied() else { continue };
                        let to = RecordLocation { payload_offset: 100_000 + step, ..extent.location };
                        let range = lba..lba + u64::from(extent.count);
                        map.relocate(range, extent.generation, Some(extent.location), to, &mut count);
                        let old = extent.location.payload_offset;
                        model.values_mut().filter(|v| v.0 == old).for_each(|v| v.0 = 100_000 + step);
                        records.pop();
                    }
                }
                assert_eq!(count.blocks, model.len() as i64);
            }
            let mut seen = HashMap::new();
            for (lba, extent) in map.overlapping(0..300) {
                for b in 0..extent.count {
                    seen.insert(lba + u64::from(b), (extent.location.payload_offset, extent.record_offset + b));
                }
            }
            assert_eq!(seen, model, "seed {seed}");
            map.remove(0..300, &mut count);
            assert!(count.live.values().all(|live| *live == 0) && map.is_empty(), "seed {seed}");
        }
    }
}
