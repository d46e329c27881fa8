//! Members that say that they have done what they have not.
//!
//! Owns how often a member lies and about what. Must not know the pool, but for one thing: superblocks are left alone, as
//! which members belong to the set is asked of all of them, not of m.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::options::{BLOCK_BYTES, SUPERBLOCK_AREA_BYTES};

/// What has become of a write that was answered with success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    None,
    /// A bit of this byte is wrong.
    Flipped(usize),
    /// So many sectors of it are there.
    Torn(usize),
    /// It is at this page.
    Elsewhere(u64),
    Lost,
    /// It arrives after some others.
    Late,
}

/// The ways of a lying member.
pub struct Lies {
    rng: StdRng,
    /// Of a hundred writes, and of a hundred reads, so many are lied about.
    percent: u32,
    kinds: Vec<Lie>,
}

/// Their names, for plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liar {
    Flips,
    Tears,
    Misdirects,
    Loses,
    Delays,
    /// Reads come back wrong; what rests is good.
    Garbles,
    All,
}

impl Lies {
    pub fn new(seed: u64, percent: u32, liar: Liar) -> Self {
        let all = [Lie::Flipped(0), Lie::Torn(0), Lie::Elsewhere(0), Lie::Lost, Lie::Late];
        let kinds = match liar {
            Liar::Flips => vec![all[0]],
            Liar::Tears => vec![all[1]],
            Liar::Misdirects => vec![all[2]],
            Liar::Loses => vec![all[3]],
            Liar::Delays => vec![all[4]],
            Liar::Garbles => vec![],
            Liar::All => all.to_vec(),
        };
        Self { rng: StdRng::seed_from_u64(seed), percent, kinds }
    }

    /// What becomes of a write, on a member that holds these pages.
    pub fn about(&mut self, offset: u64, len: usize, pages: &BTreeMap<u64, Box<[u8]>>) -> Lie {
        if offset < SUPERBLOCK_AREA_BYTES || self.kinds.is_empty() || self.rng.random_range(0..100) >= self.percent {
            return Lie::None;
        }
        match self.kinds[self.rng.random_range(0..self.kinds.len())] {
            Lie::Flipped(_) => Lie::Flipped(self.rng.random_range(0..len)),
            Lie::Torn(_) => Lie::Torn(self.rng.random_range(0..len / 512)),
            Lie::Elsewhere(_) => {
                let first = SUPERBLOCK_AREA_BYTES / BLOCK_BYTES;
                let written: Vec<u64> = pages.range(first..).map(|(page, _)| *page).collect();
                written
                    .get(self.rng.random_range(0..written.len().max(1)))
                    .map_or(Lie::Lost, |page| Lie::Elsewhere(*page))
            }
            lie => lie,
        }
    }

    /// Spoils what is read, now and then.
    pub fn garble(&mut self, offset: u64, read: &mut [u8]) {
        if offset >= SUPERBLOCK_AREA_BYTES && self.kinds.is_empty() && self.rng.random_range(0..100) < self.percent {
            let at = self.rng.random_range(0..read.len());
            read[at] ^= 0x04;
        }
    }
}
