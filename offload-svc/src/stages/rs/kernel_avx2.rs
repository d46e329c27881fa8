//! AVX2 kernel of Reed-Solomon; its portable twin is `multiply_portable` in `kernel.rs`.
//!
//! A product c*b splits into c*(low nibble) ^ c*(high nibble), each one of 16 values, so `vpshufb` looks up 32 products at
//! a time (Plank, Greenan, Miller: "Screaming Fast Galois Field Arithmetic", FAST '13). Owns raw loads and stores; must not
//! know codes. Invariant: reads and writes stay inside the range checked on entry.

use std::arch::x86_64::*;
use std::ops::Range;

use reed_solomon_erasure::galois_8;

/// Outputs made in one pass over the sources: 4 outputs x 2 registers of sums, and tables from the first-level cache.
const MAX_ROWS: usize = 4;
/// Bytes per step: two registers.
const STEP_BYTES: usize = 64;

/// For every coefficient, its products with 0..16 and with 0, 16, .. 240.
struct NibbleTables([[u8; 32]; 256]);

static TABLES: NibbleTables = NibbleTables::new();

impl NibbleTables {
    const fn new() -> Self {
        let mut tables = [[0u8; 32]; 256];
        let mut factor = 0;
        while factor < 256 {
            let mut nibble = 0;
            while nibble < 16 {
                tables[factor][nibble] = multiply_bytes(factor as u8, nibble as u8);
                tables[factor][16 + nibble] = multiply_bytes(factor as u8, (nibble as u8) << 4);
                nibble += 1;
            }
            factor += 1;
        }
        Self(tables)
    }
}

/// a*b modulo 0x11D, bit by bit: `galois_8::mul` can't run at compile time. The tests compare the two.
const fn multiply_bytes(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b != 0 {
        if b & 1 == 1 {
            product ^= a;
        }
        a = (a << 1) ^ if a & 0x80 != 0 { 0x1D } else { 0 };
        b >>= 1;
    }
    product
}

/// Fills `range` of every output. False, with nothing done, where the CPU has no AVX2.
pub(super) fn multiply(rows: &[u8], sources: &[&[u8]], outputs: &mut [&mut [u8]], range: Range<usize>) -> bool {
    if !is_x86_feature_detected!("avx2") {
        return false;
    }
    for (rows, outputs) in rows.chunks(MAX_ROWS * sources.len()).zip(outputs.chunks_mut(MAX_ROWS)) {
        match outputs {
            [a, b, c, d] => {
                // SAFETY: AVX2 was detected above; pass() checks every bound that it relies on.
                unsafe { pass::<4>(rows, sources, [a, b, c, d], range.clone()) }
            }
            [a, b, c] => {
                // SAFETY: as above.
                unsafe { pass::<3>(rows, sources, [a, b, c], range.clone()) }
            }
            [a, b] => {
                // SAFETY: as above.
                unsafe { pass::<2>(rows, sources, [a, b], range.clone()) }
            }
            [a] => {
                // SAFETY: as above.
                unsafe { pass::<1>(rows, sources, [a], range.clone()) }
            }
            _ => {}
        }
    }
    true
}

/// Makes R outputs in one pass.
///
/// # Safety
/// The CPU has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn pass<const R: usize>(rows: &[u8], sources: &[&[u8]], mut outputs: [&mut [u8]; R], range: Range<usize>) {
    let count = sources.len();
    assert_eq!(rows.len(), R * count, "a row per output, a coefficient per source");
    assert!(sources.iter().all(|source| source.len() >= range.end), "range inside every source");
    assert!(outputs.iter().all(|output| output.len() >= range.end), "range inside every output");
    let low_mask = _mm256_set1_epi8(0x0f);
    let mut at = range.start;
    while at + STEP_BYTES <= range.end {
        let mut sums = [[_mm256_setzero_si256(); 2]; R];
        for (position, source) in sources.iter().enumerate() {
            // SAFETY: at + STEP_BYTES <= range.end <= source.len(), asserted above; loads are unaligned ones.
            let bytes = unsafe {
                let start = source.as_ptr().add(at).cast::<__m256i>();
                [_mm256_loadu_si256(start), _mm256_loadu_si256(start.add(1))]
            };
            let low = bytes.map(|b| _mm256_and_si256(b, low_mask));
            let high = bytes.map(|b| _mm256_and_si256(_mm256_srli_epi64::<4>(b), low_mask));
            for (row, sum) in sums.iter_mut().enumerate() {
                let factor = rows[row * count + position];
                if factor == 1 {
                    sum[0] = _mm256_xor_si256(sum[0], bytes[0]);
                    sum[1] = _mm256_xor_si256(sum[1], bytes[1]);
                    continue;
                }
                let (low_products, high_products) = tables(factor);
                for half in 0..2 {
                    let product = _mm256_xor_si256(
                        _mm256_shuffle_epi8(low_products, low[half]),
                        _mm256_shuffle_epi8(high_products, high[half]),
                    );
                    sum[half] = _mm256_xor_si256(sum[half], product);
                }
            }
        }
        for (sum, output) in sums.iter().zip(outputs.iter_mut()) {
            // SAFETY: at + STEP_BYTES <= range.end <= output.len(), asserted above; stores are unaligned ones.
            unsafe {
                let start = output.as_mut_ptr().add(at).cast::<__m256i>();
                _mm256_storeu_si256(start, sum[0]);
                _mm256_storeu_si256(start.add(1), sum[1]);
            }
        }
        at += STEP_BYTES;
    }
    for (row, output) in outputs.iter_mut().enumerate() {
        tail(&rows[row * count..(row + 1) * count], sources, output, at..range.end);
    }
}

#[target_feature(enable = "avx2")]
fn tables(factor: u8) -> (__m256i, __m256i) {
    let table = &TABLES.0[usize::from(factor)];
    // SAFETY: the table is 32 bytes long: two unaligned loads of 16.
    unsafe {
        let start = table.as_ptr().cast::<__m128i>();
        let (low, high) = (_mm_loadu_si128(start), _mm_loadu_si128(start.add(1)));
        (_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high))
    }
}

/// The last bytes, fewer than a step.
fn tail(row: &[u8], sources: &[&[u8]], output: &mut [u8], range: Range<usize>) {
    for at in range {
        let products = row.iter().zip(sources).map(|(&factor, source)| galois_8::mul(factor, source[at]));
        output[at] = products.fold(0, |sum, product| sum ^ product);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibble_tables_equal_the_crates_products() {
        for factor in 0..=255u8 {
            for nibble in 0..16u8 {
                let table = &TABLES.0[usize::from(factor)];
                assert_eq!(table[usize::from(nibble)], galois_8::mul(factor, nibble));
                assert_eq!(table[16 + usize::from(nibble)], galois_8::mul(factor, nibble << 4));
            }
        }
    }
}
