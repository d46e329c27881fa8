//! Systematic Reed-Solomon over GF(2^8): k data shards, m parity shards, any k of them give the rest.
//!
//! Owns the generator matrix that the on-disk format names, decode plans, and the check of what callers hand in. Must not
//! know where shards rest or which ones are damaged. Invariant: any m losses of k+m are recovered exactly, and no argument,
//! however wrong, panics.

mod kernel;
mod matrix;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

pub use kernel::Engine;
pub use matrix::coefficient;

/// The most shards a code has, data and parity together.
pub const MAX_SHARDS: usize = 32;

/// Plans kept per code; the cache starts over beyond it. 4+2 has 21 ways to lose shards, and a pool sees few of them.
const MAX_CACHED_PLANS: usize = 512;

/// Why a code or a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CodeError {
    #[error("an erasure code needs at least one data shard")]
    NoData,
    #[error("an erasure code needs at least one parity shard")]
    NoParity,
    #[error("{data}+{parity} shards are more than {MAX_SHARDS}")]
    TooManyShards { data: usize, parity: usize },
    #[error("{given} shards were handed in where the code has {expected}")]
    ShardCount { given: usize, expected: usize },
    #[error("shard {index} is {given_bytes} bytes long, others {expected_bytes}")]
    UnevenShards { index: usize, given_bytes: usize, expected_bytes: usize },
    #[error("shards are empty")]
    EmptyShards,
    #[error("there is no shard {index} among {count}")]
    UnknownShard { index: usize, count: usize },
    #[error("shard {index} is named twice")]
    DuplicateShard { index: usize },
    #[error("{present} shards are too few to recover from: {needed} are needed")]
    TooFewShards { present: usize, needed: usize },
}

/// A k+m code.
///
/// **Format name: `cauchy-11d-1`.** The field is GF(2^8) modulo x^8+x^4+x^3+x^2+1 (0x11D). Data shard `j` (from 0) is stored
/// as it is; parity shard `i` (from 0) is `sum over j of c(i,j) * data[j]` with
///
/// ```text
/// c(i,j) = (0 ^ (32+j)) / (i ^ (32+j))        i, j in 0..32
/// ```
///
/// That is the Cauchy matrix 1/(x_i ^ y_j) on x = 0..31, y = 32..63, each column scaled so that the first row is all ones.
/// Every square part of a Cauchy matrix can be inverted, and scaling columns keeps that, so every loss pattern is
/// recoverable. c depends on neither k nor m: a short stripe is the full one with its missing data shards zero, and the
/// first parity is the plain XOR of the data. Shards are numbered data first: 0..k data, k..k+m parity.
#[derive(Debug)]
pub struct Code {
    data: usize,
    parity: usize,
    /// m rows of k coefficients.
    rows: Vec<u8>,
    engine: Engine,
    plans: Mutex<HashMap<PlanKey, Arc<Plan>>>,
}

/// Which shards are read and which are wanted, as bit sets.
type PlanKey = (u32, u32);

/// How to make the wanted shards: coefficients over the k shards read, in rising order of index.
#[derive(Debug)]
struct Plan {
    rows: Vec<u8>,
}

impl Code {
    /// A code of `data` + `parity` shards on the engine that this process chose.
    pub fn new(data: usize, parity: usize) -> Result<Self, CodeError> {
        Self::with_engine(data, parity, super::engines::chosen().rs)
    }

    /// The same on a named engine.
    pub fn with_engine(data: usize, parity: usize, engine: Engine) -> Result<Self, CodeError> {
        if data == 0 {
            return Err(CodeError::NoData);
        }
        if parity == 0 {
            return Err(CodeError::NoParity);
        }
        if data.saturating_add(parity) > MAX_SHARDS {
            return Err(CodeError::TooManyShards { data, parity });
        }
        let rows = (0..parity).flat_map(|i| (0..data).map(move |j| coefficient(i, j))).collect();
        Ok(Self { data, parity, rows, engine, plans: Mutex::new(HashMap::new()) })
    }

    /// k.
    pub fn data(&self) -> usize {
        self.data
    }

    /// m.
    pub fn parity(&self) -> usize {
        self.parity
    }

    /// k+m.
    pub fn shards(&self) -> usize {
        self.data + self.parity
    }

    /// Fills the m `parity` slices from the k `data` slices. All have one length, which may be odd.
    pub fn encode<D, P>(&self, data: &[D], parity: &mut [P]) -> Result<(), CodeError>
    where
        D: AsRef<[u8]>,
        P: AsMut<[u8]>,
    {
        expect_count(data.len(), self.data)?;
        expect_count(parity.len(), self.parity)?;
        let mut sources = Sources::default();
        for shard in data {
            sources.push(shard.as_ref());
        }
        let mut outputs = Outputs::default();
        for shard in parity {
            outputs.push(shard.as_mut());
        }
        self.multiply(&self.rows, sources, outputs)
    }

    /// Makes the `wanted` shards from the `present` ones, each named by its index; any k of `present` are used, the lowest
    /// indices first, and shards in neither list may be lost too. A wanted shard may not be present.
    pub fn recover<S, W>(&self, present: &[(usize, S)], wanted: &mut [(usize, W)]) -> Result<(), CodeError>
    where
        S: AsRef<[u8]>,
        W: AsMut<[u8]>,
    {
        let present_set = self.shard_set(present.iter().map(|(index, _)| *index), 0)?;
        let wanted_set = self.shard_set(wanted.iter().map(|(index, _)| *index), present_set)?;
        if wanted_set == 0 {
            return Ok(());
        }
        if present.len() < self.data {
            return Err(CodeError::TooFewShards { present: present.len(), needed: self.data });
        }
        let read_set = lowest_bits(present_set, self.data);
        let plan = self.plan((read_set, wanted_set));

        let mut by_index: [Option<&[u8]>; MAX_SHARDS] = [None; MAX_SHARDS];
        for (index, shard) in present {
            by_index[*index] = Some(shard.as_ref());
        }
        let mut sources = Sources::default();
        for index in bits(read_set) {
            sources.push(by_index[index].unwrap_or_default());
        }
        let mut slots: [Option<&mut [u8]>; MAX_SHARDS] = [const { None }; MAX_SHARDS];
        for (index, shard) in wanted {
            slots[*index] = Some(shard.as_mut());
        }
        let mut outputs = Outputs::default();
        for slot in slots.into_iter().flatten() {
            outputs.push(slot);
        }
        self.multiply(&plan.rows, sources, outputs)
    }

    fn multiply(&self, rows: &[u8], sources: Sources<'_>, mut outputs: Outputs<'_>) -> Result<(), CodeError> {
        let (sources, outputs) = (sources.as_slice(), outputs.as_mut_slice());
        let len_bytes = sources.first().map_or(0, |first| first.len());
        if len_bytes == 0 {
            return Err(CodeError::EmptyShards);
        }
        let lengths = sources.iter().map(|s| s.len()).chain(outputs.iter().map(|o| o.len()));
        for (index, given_bytes) in lengths.enumerate() {
            if given_bytes != len_bytes {
                return Err(CodeError::UnevenShards { index, given_bytes, expected_bytes: len_bytes });
            }
        }
        self.engine.multiply(rows, sources, outputs);
        Ok(())
    }

    /// The set of `indices`, each of which must exist and be new, in this list and in `taken`.
    fn shard_set(&self, indices: impl Iterator<Item = usize>, taken: u32) -> Result<u32, CodeError> {
        let mut set = 0u32;
        for index in indices {
            if index >= self.shards() {
                return Err(CodeError::UnknownShard { index, count: self.shards() });
            }
            let bit = 1u32 << index;
            if (set | taken) & bit != 0 {
                return Err(CodeError::DuplicateShard { index });
            }
            set |= bit;
        }
        Ok(set)
    }

    fn plan(&self, key: PlanKey) -> Arc<Plan> {
        // A plan is inserted whole, so a panic elsewhere can't leave the map half-changed.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&key) {
            return Arc::clone(plan);
        }
        if plans.len() >= MAX_CACHED_PLANS {
            plans.clear();
        }
        let plan = Arc::new(Plan { rows: self.solve(key) });
        plans.insert(key, Arc::clone(&plan));
        plan
    }

    /// Coefficients of the wanted shards over the read ones: (generator rows wanted) x (generator rows read)^-1.
    fn solve(&self, (read_set, wanted_set): PlanKey) -> Vec<u8> {
        let read: Vec<u8> = bits(read_set).flat_map(|index| self.generator_row(index)).collect();
        let inverse =
            matrix::invert(&read, self.data).expect("every k rows of a systematic Cauchy code are independent");
        bits(wanted_set).flat_map(|index| matrix::row_times(&self.generator_row(index), &inverse)).collect()
    }

    fn generator_row(&self, index: usize) -> Vec<u8> {
        match index.checked_sub(self.data) {
            None => (0..self.data).map(|j| u8::from(j == index)).collect(),
            Some(i) => self.rows[i * self.data..(i + 1) * self.data].to_vec(),
        }
    }
}

fn expect_count(given: usize, expected: usize) -> Result<(), CodeError> {
    if given == expected { Ok(()) } else { Err(CodeError::ShardCount { given, expected }) }
}

fn bits(set: u32) -> impl Iterator<Item = usize> {
    (0..MAX_SHARDS).filter(move |index| set >> index & 1 == 1)
}

fn lowest_bits(set: u32, count: usize) -> u32 {
    bits(set).take(count).fold(0, |low, index| low | 1 << index)
}

/// Up to [`MAX_SHARDS`] slices without an allocation: these lists are made on the data path.
struct Sources<'a> {
    slices: [&'a [u8]; MAX_SHARDS],
    len: usize,
}

impl Default for Sources<'_> {
    fn default() -> Self {
        Self { slices: [&[]; MAX_SHARDS], len: 0 }
    }
}

impl<'a> Sources<'a> {
    /// Callers push at most [`MAX_SHARDS`]: the counts were checked against the code.
    fn push(&mut self, slice: &'a [u8]) {
        self.slices[self.len] = slice;
        self.len += 1;
    }

    fn as_slice(&self) -> &[&'a [u8]] {
        &self.slices[..self.len]
    }
}

struct Outputs<'a> {
    slices: [&'a mut [u8]; MAX_SHARDS],
    len: usize,
}

impl Default for Outputs<'_> {
    fn default() -> Self {
        Self { slices: std::array::from_fn(|_| &mut [][..]), len: 0 }
    }
}

impl<'a> Outputs<'a> {
    fn push(&mut self, slice: &'a mut [u8]) {
        self.slices[self.len] = slice;
        self.len += 1;
    }

    fn as_mut_slice(&mut self) -> &mut [&'a mut [u8]] {
        &mut self.slices[..self.len]
    }
}

#[cfg(test)]
mod tests;
