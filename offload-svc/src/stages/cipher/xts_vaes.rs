//! AES-XTS on 256-bit VAES; its portable twin is `Portable` in `xts.rs`.
//!
//! Owns the key schedules and the loop over whole blocks. Must not know data units or ciphertext stealing. Invariants: the
//! schedules exist only where the CPU has the instructions; loads and stores stay inside the slices given.

use std::arch::x86_64::*;

use zeroize::Zeroizing;

use super::{BLOCK_BYTES, Blocks, next_tweak};

/// AES-256 has 14 rounds and 15 round keys; AES-128 has 10 and 11.
const MAX_ROUND_KEYS: usize = 15;
/// 256-bit registers in flight: VAES answers after 3 to 5 cycles and takes two a cycle, so eight fill it.
const LANES: usize = 8;
const STEP_BYTES: usize = LANES * 2 * BLOCK_BYTES;

pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("vaes")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("aes")
}

/// Round keys for both directions and for the tweak. One exists only if [`is_supported`] said yes.
pub(super) struct Schedules {
    encrypt: RoundKeys,
    decrypt: RoundKeys,
    tweak: RoundKeys,
}

struct RoundKeys {
    keys: Zeroizing<[[u8; BLOCK_BYTES]; MAX_ROUND_KEYS]>,
    count: usize,
}

impl Schedules {
    /// The schedules of two keys of 16 bytes, or of 32; `None` where the CPU lacks the instructions.
    pub(super) fn new(data: &[u8], tweak: &[u8]) -> Option<Self> {
        if !is_supported() {
            return None;
        }
        // SAFETY: AES-NI was detected just above.
        let (encrypt, tweak) = unsafe { (RoundKeys::expand(data)?, RoundKeys::expand(tweak)?) };
        // SAFETY: as above.
        let decrypt = unsafe { encrypt.inverse() };
        Some(Self { encrypt, decrypt, tweak })
    }
}

impl Blocks for Schedules {
    fn first_tweak(&self, unit: u128) -> u128 {
        let mut block = unit.to_le_bytes();
        // SAFETY: a Schedules exists only where is_supported() said that the CPU has VAES, VPCLMULQDQ, AVX2 and AES-NI.
        unsafe { one_block::<false>(&self.tweak, &mut block, 0) };
        u128::from_le_bytes(block)
    }

    fn encrypt_blocks(&self, data: &mut [u8], tweak: u128) -> u128 {
        // SAFETY: as in first_tweak.
        unsafe { blocks::<false>(&self.encrypt, data, tweak) }
    }

    fn decrypt_blocks(&self, data: &mut [u8], tweak: u128) -> u128 {
        // SAFETY: as in first_tweak.
        unsafe { blocks::<true>(&self.decrypt, data, tweak) }
    }
}

impl RoundKeys {
    fn as_slice(&self) -> &[[u8; BLOCK_BYTES]] {
        &self.keys[..self.count]
    }

    /// FIPS 197 §5.2: word i is word i-Nk XOR word i-1, the latter substituted every Nk words (and, with Nk = 8, halfway
    /// between; rotated and with a round constant only in the former case). `None` for other key lengths.
    ///
    /// # Safety
    /// The CPU has AES-NI.
    #[target_feature(enable = "aes")]
    unsafe fn expand(key: &[u8]) -> Option<Self> {
        let key_words = key.len() / 4;
        let count = match key.len() {
            16 => 11,
            32 => 15,
            _ => return None,
        };
        let mut words = Zeroizing::new([0u32; 4 * MAX_ROUND_KEYS]);
        for (word, bytes) in words.iter_mut().zip(key.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        let mut round_constant = 1u32;
        for at in key_words..4 * count {
            let mut previous = words[at - 1];
            if at % key_words == 0 {
                // Words are little-endian, so FIPS's rotation to the left is one to the right.
                previous = substitute(previous).rotate_right(8) ^ round_constant;
                round_constant = round_constant << 1 ^ if round_constant & 0x80 != 0 { 0x11B } else { 0 };
            } else if key_words == 8 && at % 8 == 4 {
                previous = substitute(previous);
            }
            words[at] = words[at - key_words] ^ previous;
        }
        let mut keys = Zeroizing::new([[0u8; BLOCK_BYTES]; MAX_ROUND_KEYS]);
        for (slot, word) in keys.as_flattened_mut().chunks_exact_mut(4).zip(words.iter()) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        Some(Self { keys, count })
    }

    /// Round keys of the equivalent inverse cipher (FIPS 197 §5.3.5): reversed, all but the ends through InvMixColumns.
    ///
    /// # Safety
    /// The CPU has AES-NI.
    #[target_feature(enable = "aes")]
    unsafe fn inverse(&self) -> Self {
        let mut keys = Zeroizing::new([[0u8; BLOCK_BYTES]; MAX_ROUND_KEYS]);
        let last = self.count - 1;
        for (at, (slot, key)) in keys.iter_mut().zip(self.as_slice().iter().rev()).enumerate() {
            *slot = if at == 0 || at == last { *key } else { to_bytes(_mm_aesimc_si128(from_bytes(key))) };
        }
        Self { keys, count: self.count }
    }
}

/// The S-box on each byte of a word: the low word of AESKEYGENASSIST (Intel SDM vol. 2) is SubWord of source word 1.
#[target_feature(enable = "aes")]
fn substitute(word: u32) -> u32 {
    let source = _mm_set_epi32(0, 0, word.cast_signed(), 0);
    _mm_cvtsi128_si32(_mm_aeskeygenassist_si128::<0>(source)).cast_unsigned()
}

#[target_feature(enable = "sse2")]
fn from_bytes(bytes: &[u8; BLOCK_BYTES]) -> __m128i {
    // SAFETY: 16 readable bytes, by the type; the load is an unaligned one.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "sse2")]
fn to_bytes(register: __m128i) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    // SAFETY: 16 writable bytes, by the type; the store is an unaligned one.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), register) };
    bytes
}

/// One block between two XORs with its tweak.
///
/// # Safety
/// The CPU has AES-NI.
#[target_feature(enable = "aes,sse2")]
unsafe fn one_block<const DECRYPT: bool>(keys: &RoundKeys, block: &mut [u8; BLOCK_BYTES], tweak: u128) {
    let tweak = from_bytes(&tweak.to_le_bytes());
    let Some(((first, middle), last)) =
        keys.as_slice().split_last().and_then(|(last, rest)| Some((rest.split_first()?, last)))
    else {
        return;
    };
    let mut state = _mm_xor_si128(_mm_xor_si128(from_bytes(block), tweak), from_bytes(first));
    for key in middle {
        let key = from_bytes(key);
        state = if DECRYPT { _mm_aesdec_si128(state, key) } else { _mm_aesenc_si128(state, key) };
    }
    let last = from_bytes(last);
    state = if DECRYPT { _mm_aesdeclast_si128(state, last) } else { _mm_aesenclast_si128(state, last) };
    *block = to_bytes(_mm_xor_si128(state, tweak));
}

/// All whole blocks of `data`; gives the tweak after the last.
///
/// # Safety
/// The CPU has VAES, VPCLMULQDQ, AVX2 and AES-NI.
#[target_feature(enable = "vaes,vpclmulqdq,avx2,aes")]
unsafe fn blocks<const DECRYPT: bool>(keys: &RoundKeys, data: &mut [u8], mut tweak: u128) -> u128 {
    let mut steps = data.chunks_exact_mut(STEP_BYTES);
    if steps.len() > 0 {
        let mut wide = [_mm256_setzero_si256(); MAX_ROUND_KEYS];
        for (slot, key) in wide.iter_mut().zip(keys.as_slice()) {
            *slot = _mm256_broadcastsi128_si256(from_bytes(key));
        }
        let mut tweaks = first_tweaks(tweak);
        for step in &mut steps {
            // SAFETY: the CPU's features are this function's own condition; a step is STEP_BYTES long, by chunks_exact_mut.
            unsafe { sixteen_blocks::<DECRYPT>(&wide[..keys.count], step, &tweaks) };
            tweaks = tweaks.map(|pair| times_x16(pair));
        }
        tweak = u128::from_le_bytes(to_bytes(_mm256_castsi256_si128(tweaks[0])));
    }
    let (rest, _) = steps.into_remainder().as_chunks_mut::<BLOCK_BYTES>();
    for block in rest {
        // SAFETY: AES-NI is this function's own condition.
        unsafe { one_block::<DECRYPT>(keys, block, tweak) };
        tweak = next_tweak(tweak);
    }
    tweak
}

/// The tweaks of sixteen blocks from the first one's, two to a register.
#[target_feature(enable = "avx2")]
fn first_tweaks(mut tweak: u128) -> [__m256i; LANES] {
    let mut pairs = [_mm256_setzero_si256(); LANES];
    for pair in &mut pairs {
        let (low, high) = (tweak, next_tweak(tweak));
        *pair = _mm256_set_m128i(from_bytes(&high.to_le_bytes()), from_bytes(&low.to_le_bytes()));
        tweak = next_tweak(high);
    }
    pairs
}

/// Two tweaks times x^16: a shift by two bytes; the 16 bits that fall out come back times 0x87 (x^128 = x^7+x^2+x+1).
#[target_feature(enable = "avx2,vpclmulqdq")]
fn times_x16(pair: __m256i) -> __m256i {
    let out = _mm256_srli_si256::<14>(pair);
    let back = _mm256_clmulepi64_epi128::<0x00>(out, _mm256_set_epi64x(0, 0x87, 0, 0x87));
    _mm256_xor_si256(_mm256_slli_si256::<2>(pair), back)
}

/// Sixteen blocks, each between two XORs with its tweak.
///
/// # Safety
/// The CPU has VAES and AVX2, and `step` is [`STEP_BYTES`] long.
#[target_feature(enable = "vaes,avx2")]
unsafe fn sixteen_blocks<const DECRYPT: bool>(keys: &[__m256i], step: &mut [u8], tweaks: &[__m256i; LANES]) {
    let Some(((first, middle), last)) = keys.split_last().and_then(|(last, rest)| Some((rest.split_first()?, last)))
    else {
        return;
    };
    debug_assert_eq!(step.len(), STEP_BYTES);
    let start = step.as_mut_ptr().cast::<__m256i>();
    let mut states = *tweaks;
    for (lane, state) in states.iter_mut().enumerate() {
        // SAFETY: lane < LANES and step holds LANES registers, by this function's condition; the load is an unaligned one.
        let data = unsafe { _mm256_loadu_si256(start.add(lane)) };
        *state = _mm256_xor_si256(_mm256_xor_si256(data, *state), *first);
    }
    for key in middle {
        for state in &mut states {
            *state = if DECRYPT { _mm256_aesdec_epi128(*state, *key) } else { _mm256_aesenc_epi128(*state, *key) };
        }
    }
    for (lane, (state, tweak)) in states.iter().zip(tweaks).enumerate() {
        let state =
            if DECRYPT { _mm256_aesdeclast_epi128(*state, *last) } else { _mm256_aesenclast_epi128(*state, *last) };
        // SAFETY: as the load above; the store is an unaligned one.
        unsafe { _mm256_storeu_si256(start.add(lane), _mm256_xor_si256(state, *tweak)) };
    }
}
