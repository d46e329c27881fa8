//! Reed-Solomon: every loss pattern, every engine, and arguments that lie.

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reed_solomon_erasure::galois_8;

use super::*;

const SHARD_BYTES: usize = 5;

fn stripe(code: &Code, seed: u64) -> Vec<Vec<u8>> {
    let mut random = StdRng::seed_from_u64(seed);
    let data: Vec<Vec<u8>> = (0..code.data()).map(|_| (0..SHARD_BYTES).map(|_| random.random()).collect()).collect();
    let mut parity = vec![vec![0u8; SHARD_BYTES]; code.parity()];
    code.encode(&data, &mut parity).unwrap();
    data.into_iter().chain(parity).collect()
}

/// Recovers `wanted` from all shards outside `lost` and compares.
fn check(code: &Code, shards: &[Vec<u8>], lost: u32, wanted: &[usize]) {
    let present: Vec<(usize, &[u8])> =
        bits(!lost).take_while(|&i| i < shards.len()).map(|i| (i, shards[i].as_slice())).collect();
    let mut out: Vec<(usize, Vec<u8>)> = wanted.iter().map(|&index| (index, vec![0xEE; SHARD_BYTES])).collect();
    code.recover(&present, &mut out).unwrap();
    for (index, bytes) in out {
        assert_eq!(bytes, shards[index], "{}+{} lost {lost:b} wanted {wanted:?}", code.data(), code.parity());
    }
}

fn subsets_of_size(n: usize, size: usize) -> impl Iterator<Item = u32> {
    (0..1u32 << n).filter(move |set| set.count_ones() as usize == size)
}

fn codes(max_shards: usize) -> impl Iterator<Item = Code> {
    (2..=max_shards).flat_map(|n| (1..n).map(move |parity| Code::new(n - parity, parity).unwrap()))
}

/// H88: every loss of m shards, for every code of up to 12.
#[test]
fn h88_every_loss_pattern_recovers_up_to_12_shards() {
    for code in codes(12) {
        let shards = stripe(&code, 88);
        for lost in subsets_of_size(code.shards(), code.parity()) {
            let wanted: Vec<usize> = bits(lost).collect();
            check(&code, &shards, lost, &wanted);
        }
    }
}

/// H88: codes of 13 to 24 shards, and the largest, by random loss patterns; and the pattern that broke a Vandermonde matrix.
#[test]
fn h88_random_loss_patterns_recover_up_to_32_shards() {
    let mut random = StdRng::seed_from_u64(88);
    let large = (13..=24).chain([32]).flat_map(|n| (1..n).map(move |parity| Code::new(n - parity, parity).unwrap()));
    for code in large {
        let shards = stripe(&code, 8888);
        for _ in 0..100 {
            let mut lost = 0u32;
            while lost.count_ones() as usize != code.parity() {
                lost |= 1 << random.random_range(0..code.shards());
            }
            let wanted: Vec<usize> = bits(lost).collect();
            check(&code, &shards, lost, &wanted);
        }
    }
    let code = Code::new(9, 9).unwrap();
    let shards = stripe(&code, 9);
    let wanted = [0, 1, 2, 5, 7, 9, 10, 14, 16];
    check(&code, &shards, wanted.iter().fold(0, |set, index| set | 1 << index), &wanted);
}

/// H88, for every k+m at once: the matrix is a Cauchy matrix with scaled columns, all of whose square parts are invertible.
#[test]
fn h88_the_generator_is_a_scaled_cauchy_matrix() {
    for data in 0..MAX_SHARDS {
        let y = (32 + data) as u8;
        assert_eq!(coefficient(0, data), 1, "the first parity is the plain XOR");
        for parity in 0..MAX_SHARDS {
            let x = parity as u8;
            assert_eq!(galois_8::mul(coefficient(parity, data), x ^ y), y, "c * (x - y) is the column's scale, y");
            assert_ne!(y, 0);
        }
    }
}

/// The format names these: a change of matrix or field would make stored parity worthless.
#[test]
fn the_format_pins_these_coefficients() {
    let row = |parity| std::array::from_fn::<u8, 6, _>(|data| coefficient(parity, data));
    assert_eq!(row(0), [1; 6]);
    // By hand: c(1,0) = 0x20 / 0x21 modulo 0x11D, and 0x21 * c = 0x20.
    for parity in 1..4 {
        for (data, factor) in row(parity).into_iter().enumerate() {
            assert_eq!(slow_multiply(factor, (parity ^ (32 + data)) as u8), 32 + data as u8);
        }
    }
    let code = Code::new(4, 2).unwrap();
    let data: [Vec<u8>; 4] = std::array::from_fn(|index| vec![index as u8 + 1, 0x80 >> index]);
    let mut parity = vec![vec![0u8; 2]; 2];
    code.encode(&data, &mut parity).unwrap();
    assert_eq!(parity[0], [4, 0xF0], "1 ^ 2 ^ 3 ^ 4, and the four top bits");
}

/// a*b modulo 0x11D by long multiplication: independent of the crate's tables.
fn slow_multiply(a: u8, b: u8) -> u8 {
    let mut product = 0u16;
    for bit in 0..8 {
        if b >> bit & 1 == 1 {
            product ^= u16::from(a) << bit;
        }
    }
    for bit in (8..16).rev() {
        if product >> bit & 1 == 1 {
            product ^= 0x11D << (bit - 8);
        }
    }
    product as u8
}

/// A short stripe is the full one with its missing data shards zero.
#[test]
fn parity_does_not_depend_on_k_or_m() {
    let full = Code::new(6, 4).unwrap();
    let mut shards = stripe(&full, 5);
    shards[4].fill(0);
    shards[5].fill(0);
    let mut parity = vec![vec![0u8; SHARD_BYTES]; 4];
    full.encode(&shards[..6], &mut parity).unwrap();
    let short = Code::new(4, 2).unwrap();
    let mut short_parity = vec![vec![0u8; SHARD_BYTES]; 2];
    short.encode(&shards[..4], &mut short_parity).unwrap();
    assert_eq!(short_parity, parity[..2]);
}

/// H91: one data shard, one parity shard, or one of each, while others are missing too.
#[test]
fn h91_subsets_of_the_missing_recover() {
    for code in codes(12) {
        let shards = stripe(&code, 91);
        for lost in (1..=code.parity()).flat_map(|size| subsets_of_size(code.shards(), size)) {
            let data = bits(lost).find(|&index| index < code.data());
            let parity = bits(lost).find(|&index| index >= code.data());
            let both: Vec<usize> = parity.into_iter().chain(data).collect();
            for wanted in [data.as_slice(), parity.as_slice(), both.as_slice()] {
                check(&code, &shards, lost, wanted);
            }
        }
    }
}

/// H94: impossible counts and shards are errors that name what is wrong.
#[test]
fn h94_impossible_arguments_are_errors() {
    assert_eq!(Code::new(0, 2).unwrap_err(), CodeError::NoData);
    assert_eq!(Code::new(4, 0).unwrap_err(), CodeError::NoParity);
    for (data, parity) in [(32, 1), (128, 128), (usize::MAX, 1), (1, usize::MAX)] {
        assert_eq!(Code::new(data, parity).unwrap_err(), CodeError::TooManyShards { data, parity });
    }
    let code = Code::new(2, 2).unwrap();
    let mut two = [vec![0u8; 8], vec![0u8; 8]];
    assert_eq!(code.encode(&[[1u8; 8]], &mut two), Err(CodeError::ShardCount { given: 1, expected: 2 }));
    assert_eq!(code.encode(&[[1u8; 8]; 2], &mut two[..1]), Err(CodeError::ShardCount { given: 1, expected: 2 }));
    let uneven: [&[u8]; 2] = [&[1; 8], &[2; 7]];
    let expected = CodeError::UnevenShards { index: 1, given_bytes: 7, expected_bytes: 8 };
    assert_eq!(code.encode(&uneven, &mut two), Err(expected));
    let empty: [&[u8]; 2] = [&[], &[]];
    assert_eq!(code.encode(&empty, &mut two), Err(CodeError::EmptyShards));

    let shard = [0u8; 8];
    let recover = |present: &[usize], wanted: &[usize]| {
        let present: Vec<(usize, &[u8])> = present.iter().map(|&index| (index, &shard[..])).collect();
        let mut wanted: Vec<(usize, Vec<u8>)> = wanted.iter().map(|&index| (index, vec![0; 8])).collect();
        code.recover(&present, &mut wanted)
    };
    assert_eq!(recover(&[0, 4], &[1]), Err(CodeError::UnknownShard { index: 4, count: 4 }));
    assert_eq!(recover(&[0, 1], &[usize::MAX]), Err(CodeError::UnknownShard { index: usize::MAX, count: 4 }));
    assert_eq!(recover(&[0, 0], &[1]), Err(CodeError::DuplicateShard { index: 0 }));
    assert_eq!(recover(&[0, 1], &[1]), Err(CodeError::DuplicateShard { index: 1 }));
    assert_eq!(recover(&[0, 1], &[2, 2]), Err(CodeError::DuplicateShard { index: 2 }));
    assert_eq!(recover(&[3], &[0]), Err(CodeError::TooFewShards { present: 1, needed: 2 }));
    assert_eq!(recover(&[], &[]), Ok(()));
}

#[test]
fn plans_are_cached_by_loss_pattern_and_bounded() {
    let code = Code::new(20, 3).unwrap();
    let shards = stripe(&code, 1);
    let mut patterns = 0;
    for lost in subsets_of_size(23, 3) {
        let wanted: Vec<usize> = bits(lost).collect();
        check(&code, &shards, lost, &wanted);
        check(&code, &shards, lost, &wanted);
        patterns += 1;
        assert!(code.plans.lock().unwrap().len() <= MAX_CACHED_PLANS);
    }
    assert!(patterns > MAX_CACHED_PLANS);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Every engine against long multiplication, for odd lengths at odd addresses.
    #[test]
    fn engines_equal_the_oracle(
        source_count in 1usize..=31,
        output_count in 1usize..=9,
        len_bytes in prop_oneof![1usize..200, 4000usize..4200, 8100usize..8300],
        offset in 0usize..70,
        seed: u64,
    ) {
        let mut random = StdRng::seed_from_u64(seed);
        let rows: Vec<u8> = (0..source_count * output_count).map(|_| random.random()).collect();
        let memory: Vec<Vec<u8>> =
            (0..source_count).map(|_| (0..offset + len_bytes).map(|_| random.random()).collect()).collect();
        let sources: Vec<&[u8]> = memory.iter().map(|bytes| &bytes[offset..]).collect();
        let mut results = Vec::new();
        for engine in Engine::available() {
            let mut memory = vec![vec![0xA5u8; offset + len_bytes + 64]; output_count];
            let mut outputs: Vec<&mut [u8]> =
                memory.iter_mut().map(|bytes| &mut bytes[offset..offset + len_bytes]).collect();
            engine.multiply(&rows, &sources, &mut outputs);
            results.push(memory);
        }
        for result in &results {
            prop_assert_eq!(result, &results[0]);
        }
        for (row, output) in rows.chunks(source_count).zip(&results[0]) {
            prop_assert!(output[..offset].iter().chain(&output[offset + len_bytes..]).all(|&byte| byte == 0xA5));
            for at in [0, len_bytes / 2, len_bytes - 1] {
                let sum = row.iter().zip(&sources).fold(0, |sum, (&c, source)| sum ^ slow_multiply(c, source[at]));
                prop_assert_eq!(output[offset + at], sum);
            }
        }
    }
}

#[test]
fn the_avx2_kernel_was_tested() {
    if !Engine::Avx2.is_supported() {
        println!("SKIPPED: this CPU has no AVX2");
    }
    assert_eq!(Engine::available().contains(&Engine::Avx2), Engine::Avx2.is_supported());
}
