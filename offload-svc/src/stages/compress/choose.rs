//! A look at a few hundred bytes of a record, to decide what is worth trying on the rest.
//!
//! Owns the sampling and the thresholds. Must not know codecs' contexts. Invariant: the answer depends on the bytes alone,
//! so every machine packs a record the same way.

/// The level that `auto` uses.
pub const ZSTD_LEVEL: u8 = 1;

/// A sample is this many pieces, spread over the record, so that a header or an index doesn't speak for all of it.
const PIECES: usize = 16;
const PIECE_BYTES: usize = 256;

/// Bits per byte, in 1/256, from which a 4 KiB sample counts as random. Truly random bytes give 7.95 at that length.
const RANDOM_BITS_256THS: u64 = 7 * 256 + 205;

/// `auto` keeps LZ4 without a further look once it saves half: what zstd would add costs its decompression on every read.
const LZ4_IS_ENOUGH: usize = 2;

/// zstd has to beat LZ4 by 1/12 of the plain bytes to be kept.
const ZSTD_GAIN: usize = 12;

/// Counts bytes of a sample.
pub struct Sampler {
    counts: [u16; 256],
}

impl Default for Sampler {
    fn default() -> Self {
        Self { counts: [0; 256] }
    }
}

impl Sampler {
    /// Whether single bytes look uniformly random, so that only long repeats could make the record compressible.
    pub fn looks_random(&mut self, plain: &[u8]) -> bool {
        // A short sample of random bytes can't fill 256 counters evenly, so its entropy says nothing.
        plain.len() >= PIECES * PIECE_BYTES && self.bits_per_byte_256ths(plain) >= RANDOM_BITS_256THS
    }

    /// The longest zstd frame that `auto` prefers over LZ4's `lz4_bytes`, or `None` where zstd isn't worth trying.
    pub fn zstd_limit_bytes(&mut self, plain: &[u8], lz4_bytes: usize) -> Option<usize> {
        let limit_bytes = lz4_bytes.checked_sub(plain.len().div_ceil(ZSTD_GAIN))?;
        if limit_bytes == 0 || lz4_bytes <= plain.len() / LZ4_IS_ENOUGH {
            return None;
        }
        // Where LZ4 found nothing, zstd's gain can come from entropy coding alone, which the sample bounds.
        let lz4_found_nothing = lz4_bytes == plain.len();
        if lz4_found_nothing && self.looks_random(plain) { None } else { Some(limit_bytes) }
    }

    fn bits_per_byte_256ths(&mut self, plain: &[u8]) -> u64 {
        self.counts.fill(0);
        let stride = plain.len() / PIECES;
        let mut total = 0u64;
        for piece in 0..PIECES {
            let rest = &plain[piece * stride..];
            for &byte in &rest[..rest.len().min(PIECE_BYTES)] {
                self.counts[usize::from(byte)] += 1;
                total += 1;
            }
        }
        if total == 0 {
            return 0;
        }
        let log_total = log2_256ths(total);
        let counts = self.counts.iter().map(|&count| u64::from(count)).filter(|&count| count > 0);
        let surprise: u64 = counts.map(|count| count * (log_total - log2_256ths(count))).sum();
        surprise / total
    }
}

/// log2(n) in 1/256, n >= 1; integers only, so that every machine gives the same.
fn log2_256ths(n: u64) -> u64 {
    let whole = u64::from(n.ilog2());
    // The mantissa in 1.63 fixed point, squared eight times: each overflow past 2 is one more bit of the logarithm.
    let mut mantissa = u128::from(n) << (63 - whole);
    let mut fraction = 0;
    for _ in 0..8 {
        mantissa = (mantissa * mantissa) >> 63;
        fraction <<= 1;
        if mantissa >> 64 != 0 {
            mantissa >>= 1;
            fraction |= 1;
        }
    }
    whole << 8 | fraction
}
