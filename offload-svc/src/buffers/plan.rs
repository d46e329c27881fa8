//! How many buffers of which size.
//!
//! Owns the split of an amount of memory over sizes and over the two pools of the data path. Must not allocate.
//! Invariant: a plan made for N bytes takes at most N bytes.

use nvmf_target::buffer::BUFFER_ALIGN_BYTES;

/// Buffers of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeClass {
    /// The size, a multiple of 4 KiB.
    pub bytes: usize,
    /// How many.
    pub count: usize,
    /// Kept for requests that no smaller size fits: others don't take one of these when theirs is used up.
    pub reserved: bool,
}

/// The sizes of one pool, from small to large.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    classes: Vec<SizeClass>,
}

/// The sizes in use, and each one's share of the memory in sixteenths. Most requests of hosts are 4 KiB or a
/// file system's 64 KiB to 256 KiB; the largest exist so that MDTS holds.
const SHARES: [(usize, usize); 4] = [(4 << 10, 3), (64 << 10, 4), (256 << 10, 4), (1 << 20, 5)];

impl Plan {
    /// The given sizes, sorted.
    pub fn new(mut classes: Vec<SizeClass>) -> Self {
        classes.sort_by_key(|class| class.bytes);
        Self { classes }
    }

    /// Splits `memory_bytes` over the usual sizes up to `largest_bytes`, with at least three of each size where the
    /// memory allows that at all (so that a host with two leaves one); `None` where it doesn't hold one of each.
    pub fn for_memory(memory_bytes: usize, largest_bytes: usize) -> Option<Self> {
        let shares = shares(largest_bytes);
        let least = least(&shares);
        let floor = [3, 2, 1].into_iter().find(|each| least * each <= memory_bytes)?;
        let parts: usize = shares.iter().map(|(_, part)| part).sum();
        let rest = memory_bytes - least * floor;
        let count = |(bytes, part): (usize, usize)| floor + rest / parts * part / bytes;
        let class = |share: (usize, usize)| SizeClass { bytes: share.0, count: count(share), reserved: false };
        Some(Self { classes: shares.into_iter().map(class).collect() })
    }

    /// Adds a reserved size; one that is there already becomes reserved and grows.
    pub fn with_reserved(mut self, bytes: usize, count: usize) -> Self {
        let bytes = bytes.max(BUFFER_ALIGN_BYTES).next_multiple_of(BUFFER_ALIGN_BYTES);
        match self.classes.iter_mut().find(|class| class.bytes == bytes) {
            Some(class) => (class.count, class.reserved) = (class.count + count, true),
            None => self.classes.push(SizeClass { bytes, count, reserved: true }),
        }
        Self::new(self.classes)
    }

    /// The least memory that [`Plan::for_memory`] makes a plan for.
    pub fn least_bytes(largest_bytes: usize) -> usize {
        least(&shares(largest_bytes))
    }

    /// The sizes, from small to large.
    pub fn classes(&self) -> &[SizeClass] {
        &self.classes
    }

    /// Memory that it takes.
    pub fn bytes(&self) -> usize {
        self.classes.iter().map(|class| class.bytes * class.count).sum()
    }
}

fn shares(largest_bytes: usize) -> Vec<(usize, usize)> {
    let largest = largest_bytes.max(BUFFER_ALIGN_BYTES).next_multiple_of(BUFFER_ALIGN_BYTES);
    let mut shares: Vec<(usize, usize)> = SHARES.into_iter().filter(|(bytes, _)| *bytes < largest).collect();
    shares.push((largest, SHARES[SHARES.len() - 1].1));
    shares
}

/// One of each size.
fn least(shares: &[(usize, usize)]) -> usize {
    shares.iter().map(|(bytes, _)| bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h24_a_plan_fits_its_memory_or_is_refused() {
        for mib in [0, 1, 2, 3, 5, 16, 64, 256, 1024] {
            for largest in [4 << 10, 128 << 10, 1 << 20, 2 << 20] {
                match Plan::for_memory(mib << 20, largest) {
                    Some(plan) => {
                        assert!(plan.bytes() <= mib << 20, "{mib} MiB: {plan:?}");
                        assert!(plan.classes().iter().all(|class| class.count > 0 && !class.reserved));
                        assert_eq!(plan.classes().last().map(|class| class.bytes), Some(largest));
                        assert!(plan.classes().windows(2).all(|pair| pair[0].bytes < pair[1].bytes));
                        assert!(plan.bytes() > (mib << 20) / 2 || mib < 8, "most of it is used: {plan:?}");
                    }
                    None => assert!(mib << 20 < 2 * largest + (324 << 10), "{mib} MiB, {largest}"),
                }
            }
        }
    }
    #[test]
    fn a_reserved_size_comes_on_top() {
        let plan = Plan::for_memory(8 << 20, 256 << 10).unwrap();
        let bytes = plan.bytes();
        let plan = plan.with_reserved(128 << 10, 10).with_reserved(256 << 10, 3);
        assert_eq!(plan.bytes(), bytes + ((10 * 128 + 3 * 256) << 10));
        let reserved: Vec<_> = plan.classes().iter().filter(|class| class.reserved).map(|class| class.bytes).collect();
        assert_eq!(reserved, [128 << 10, 256 << 10]);
        assert!(plan.classes().windows(2).all(|pair| pair[0].bytes < pair[1].bytes));
    }
}
