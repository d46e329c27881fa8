//! Extents, and layers of changes to a shard's map that are not in its tree yet.
//!
//! Owns what is known of a run of blocks, and how newer runs lie over older ones. Must not know pages, stripes or members.
//! Invariant: the runs of a layer never overlap, and one that leads to a record lies within it. What a layer says nothing
//! of, the layer or the tree beneath it decides.

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
    pub fn part(&self, from: u16, to: u16) -> Self {
        Self { record_offset: self.record_offset + from, count: to - from, ..*self }
    }
}

/// Told about every extent that enters or leaves a layer, so that live bytes are counted.
pub trait Ledger {
    fn added(&mut self, extent: &Extent);
    fn removed(&mut self, extent: &Extent);
}

/// What a run of blocks is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// In no record: reads as zeroes.
    Hole,
    /// Not said any more: it has gone over to the map above. Only layers say so; a merge leaves it out of the pages.
    Gone,
    /// Nobody can tell at the moment: the page that says so can't be read.
    Lost,
    Record(Extent),
}

/// A run of blocks that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub lba: u64,
    pub count: u64,
    pub what: What,
}

impl Run {
    pub fn record(lba: u64, extent: Extent) -> Self {
        Self { lba, count: extent.count.into(), what: What::Record(extent) }
    }

    pub fn end(&self) -> u64 {
        self.lba + self.count
    }

    pub fn extent(&self) -> Option<&Extent> {
        match &self.what {
            What::Record(extent) => Some(extent),
            What::Hole | What::Gone | What::Lost => None,
        }
    }

    /// The part of it in a range that overlaps it.
    pub fn clip(&self, range: &Range<u64>) -> Self {
        let (lba, end) = (self.lba.max(range.start), self.end().min(range.end));
        let what = match self.what {
            // Extents are no longer than a record, so the offsets fit.
            What::Record(extent) => What::Record(extent.part((lba - self.lba) as u16, (end - self.lba) as u16)),
            other => other,
        };
        Self { lba, count: end - lba, what }
    }
}

/// Lays the runs `over` on the runs `base`; each of them are in order and don't overlap. `hidden` is told of what is covered
/// of the base.
pub fn lay_over(base: impl IntoIterator<Item = Run>, over: &[Run], mut hidden: impl FnMut(&Run)) -> Vec<Run> {
    let mut out = Vec::new();
    let mut over = over.iter().peekable();
    for run in base {
        let mut rest = Some(run);
        while let Some(run) = rest.take() {
            while let Some(top) = over.next_if(|top| top.end() <= run.lba) {
                out.push(*top);
            }
            match over.peek() {
                Some(top) if top.lba < run.end() => {
                    if run.lba < top.lba {
                        out.push(run.clip(&(run.lba..top.lba)));
                    }
                    hidden(&run.clip(&(top.lba..top.end())));
                    if top.end() < run.end() {
                        rest = Some(run.clip(&(top.end()..run.end())));
                    }
                }
                _ => out.push(run),
            }
        }
    }
    out.extend(over.copied());
    out
}

/// Changes to the map of one shard.
#[derive(Debug, Default)]
pub struct Layer {
    runs: BTreeMap<u64, (u64, What)>,
}

impl Layer {
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Maps `lba` and on to a record, in place of what the layer had there.
    #[cfg(test)]
    pub fn insert(&mut self, lba: u64, extent: Extent, ledger: &mut impl Ledger) {
        self.put(Run::record(lba, extent), ledger);
    }

    /// Unmaps a range.
    #[cfg(test)]
    pub fn remove(&mut self, range: Range<u64>, ledger: &mut impl Ledger) {
        if range.start < range.end {
            self.put(Run { lba: range.start, count: range.end - range.start, what: What::Hole }, ledger);
        }
    }

    /// Puts a run in place of what the layer had there.
    pub fn put(&mut self, run: Run, ledger: &mut impl Ledger) {
        // First what comes, so that a segment that is alive never counts as dead in between: others look at the counters.
        if let Some(extent) = run.extent() {
            ledger.added(extent);
        }
        self.forget(run.lba..run.end(), ledger);
        self.runs.insert(run.lba, (run.count, run.what));
    }

    /// Says nothing of a range any more.
    pub fn forget(&mut self, range: Range<u64>, ledger: &mut impl Ledger) {
        self.split_at(range.start, ledger);
        self.split_at(range.end, ledger);
        // In bursts: keys can't be removed while the tree is walked.
        let mut keys = [0u64; 64];
        loop {
            let mut found = 0;
            for (slot, (key, _)) in keys.iter_mut().zip(self.runs.range(range.clone())) {
                *slot = *key;
                found += 1;
            }
            for key in &keys[..found] {
                if let Some((_, What::Record(extent))) = self.runs.remove(key) {
                    ledger.removed(&extent);
                }
            }
            if found < keys.len() {
                return;
            }
        }
    }

    /// Cuts the run that spans `lba`, if one does, so that one begins there.
    fn split_at(&mut self, lba: u64, ledger: &mut impl Ledger) {
        let Some((&start, &(count, what))) = self.runs.range(..lba).next_back() else { return };
        let run = Run { lba: start, count, what };
        if run.end() <= lba {
            return;
        }
        let (head, tail) = (run.clip(&(start..lba)), run.clip(&(lba..run.end())));
        // In this order, as in an insertion.
        [head, tail].iter().filter_map(Run::extent).for_each(|extent| ledger.added(extent));
        run.extent().into_iter().for_each(|extent| ledger.removed(extent));
        self.runs.insert(start, (head.count, head.what));
        self.runs.insert(lba, (tail.count, tail.what));
    }

    /// The runs that overlap a range, each clipped to it, in order.
    pub fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = Run> + '_ {
        let run = |(&lba, &(count, what)): (&u64, &(u64, What))| Run { lba, count, what };
        let before = self.runs.range(..range.start).next_back().map(run);
        let before = before.filter(|run| run.end() > range.start);
        let within = self.runs.range((Bound::Included(range.start), Bound::Excluded(range.end))).map(run);
        before.into_iter().chain(within).map(move |run| run.clip(&range))
    }

    /// The first run that ends after `lba`, whole.
    pub fn first_after(&self, lba: u64) -> Option<Run> {
        let run = |(&lba, &(count, what)): (&u64, &(u64, What))| Run { lba, count, what };
        let before = self.runs.range(..lba).next_back().map(run).filter(|run| run.end() > lba);
        before.or_else(|| self.runs.range(lba..).next().map(run))
    }

    /// The first block after which `limit` runs of the range have passed, or the range's end: where to cut a long removal.
    pub fn slice_end(&self, range: Range<u64>, limit: usize) -> u64 {
        let past = self.runs.range(range.start..range.end).nth(limit);
        past.map_or(range.end, |(start, _)| *start)
    }

    /// Takes all of another layer, which is newer.
    pub fn absorb(&mut self, newer: Layer, ledger: &mut impl Ledger) {
        for (lba, (count, what)) in newer.runs {
            // It has been counted already.
            self.forget(lba..lba + count, ledger);
            self.runs.insert(lba, (count, what));
        }
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
            let (mut map, mut count) = (Layer::default(), Count::default());
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
                        let Some((lba, extent)) = records.pop() else { continue };
                        let to = RecordLocation { payload_offset: 100_000 + step, ..extent.location };
                        let left: Vec<Run> = map.overlapping(lba..lba + u64::from(extent.count)).collect();
                        for run in left {
                            if let What::Record(part) = run.what
                                && part.location == extent.location
                            {
                                map.insert(run.lba, Extent { location: to, ..part }, &mut count);
                            }
                        }
                        let old = extent.location.payload_offset;
                        model.values_mut().filter(|v| v.0 == old).for_each(|v| v.0 = 100_000 + step);
                    }
                }
                assert_eq!(count.blocks, model.len() as i64);
            }
            let mut seen = HashMap::new();
            for run in map.overlapping(0..300) {
                let (lba, Some(extent)) = (run.lba, run.extent()) else { continue };
                for b in 0..extent.count {
                    seen.insert(lba + u64::from(b), (extent.location.payload_offset, extent.record_offset + b));
                }
            }
            assert_eq!(seen, model, "seed {seed}");
            map.forget(0..300, &mut count);
            assert!(count.live.values().all(|live| *live == 0) && map.is_empty(), "seed {seed}");
        }
    }

    /// Runs over runs, against one entry per block; what is hidden and what is left add up.
    #[test]
    fn runs_laid_over_others_agree_with_a_model() {
        use rand::{RngExt, SeedableRng};
        let layer = |rng: &mut rand::rngs::StdRng, first: u32| {
            let (mut layer, mut count) = (Layer::default(), Count::default());
            for step in 0..rng.random_range(0..20u32) {
                let (lba, blocks) = (rng.random_range(0..100u64), rng.random_range(1..=16u16));
                match rng.random_range(0..3) {
                    0 => layer.remove(lba..lba + u64::from(blocks), &mut count),
                    _ => layer.insert(lba, record(first + step, 1, blocks), &mut count),
                }
            }
            layer.overlapping(0..200).collect::<Vec<Run>>()
        };
        let blocks = |runs: &[Run]| -> HashMap<u64, Option<(u32, u16)>> {
            let of = |run: &Run, b: u64| {
                run.extent().map(|extent| (extent.location.payload_offset, extent.record_offset + b as u16))
            };
            runs.iter().flat_map(|run| (0..run.count).map(move |b| (run.lba + b, of(run, b)))).collect()
        };
        for seed in 0..200 {
            let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
            let (base, over) = (layer(&mut rng, 0), layer(&mut rng, 1000));
            let mut hidden = Vec::new();
            let out = lay_over(base.clone(), &over, |run| hidden.push(*run));
            assert!(out.windows(2).all(|pair| pair[0].end() <= pair[1].lba), "seed {seed}: {out:?}");
            let mut expected = blocks(&base);
            expected.extend(blocks(&over));
            assert_eq!(blocks(&out), expected, "seed {seed}");
            let covered = blocks(&over);
            let mut gone = blocks(&base);
            gone.retain(|block, _| covered.contains_key(block));
            assert_eq!(blocks(&hidden), gone, "seed {seed}");
        }
    }
}
