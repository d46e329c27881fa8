//! Compression: bounds at every length, hostile bytes, real data, and a second LZ4 decoder.

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::*;

const POLICIES: [Compression; 5] = [
    Compression::None,
    Compression::Lz4,
    Compression::Zstd { level: 1 },
    Compression::Zstd { level: 9 },
    Compression::Auto,
];

fn random_bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0u8; length];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// Words drawn at random: compressible, without long runs.
fn text(length: usize, seed: u64) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let words = ["storage ", "offload ", "the ", "record ", "a ", "stripe ", "parity ", "queue\n", "0x4420, "];
    let mut bytes = Vec::with_capacity(length + 16);
    while bytes.len() < length {
        bytes.extend_from_slice(words[random.random_range(0..words.len())].as_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Weights around zero rounded to bf16: LZ4 finds nothing in them, entropy coding does.
fn bf16(length: usize, seed: u64) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut bytes = Vec::with_capacity(length + 2);
    while bytes.len() < length {
        let sum: f32 = (0..12).map(|_| random.random::<f32>()).sum::<f32>() - 6.0;
        bytes.extend_from_slice(&(((sum * 0.02).to_bits() >> 16) as u16).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

struct Contexts {
    compressor: Compressor,
    decompressor: Decompressor,
    packed: Vec<u8>,
    plain: Vec<u8>,
}

impl Contexts {
    fn new() -> Self {
        let decompressor = Decompressor::default();
        Self { compressor: Compressor::default(), decompressor, packed: vec![0; 70_100], plain: vec![0; 70_100] }
    }

    /// Packs, checks the bound and that nothing past the input's length is touched, unpacks, compares.
    fn round_trip(&mut self, policy: Compression, plain: &[u8]) -> Packed {
        let guard = plain.len()..plain.len() + 100;
        self.packed[guard.clone()].fill(0xC3);
        let packed = self.compressor.pack(policy, plain, &mut self.packed).unwrap();
        assert!(packed.len_bytes <= plain.len(), "{policy}: {} bytes", plain.len());
        assert_eq!(
            packed.codec == Codec::Raw,
            packed.len_bytes == plain.len(),
            "{policy}: raw if and only if not smaller"
        );
        assert!(self.packed[guard].iter().all(|&byte| byte == 0xC3), "{policy}: wrote past {}", plain.len());
        let out = &mut self.plain[..plain.len()];
        self.decompressor.unpack(packed.codec, &self.packed[..packed.len_bytes], out).unwrap();
        assert!(out == plain, "{policy}: {} bytes came back different", plain.len());
        packed
    }
}

/// H116: every length to 70,000 for LZ4; for the slower codecs every length around the limits and one in 61 between.
#[test]
fn h116_every_length_round_trips_within_its_bound() {
    let zeros = vec![0u8; 70_000];
    let random = random_bytes(70_000, 116);
    let mut contexts = Contexts::new();
    for length in 0..=70_000usize {
        let near_a_limit =
            length < 300 || length.abs_diff(65_536) < 20 || length.abs_diff(4096) < 20 || length > 69_990;
        let mut mostly = text(0, 0);
        mostly.resize(length.saturating_sub(12), b'a');
        mostly.extend_from_slice(&random[..length.min(12)]);
        for policy in POLICIES {
            let every_length = policy == Compression::Lz4;
            if every_length || near_a_limit || length % 61 == 0 {
                contexts.round_trip(policy, &zeros[..length]);
                contexts.round_trip(policy, &random[..length]);
                contexts.round_trip(policy, &mostly);
            }
        }
    }
}

#[test]
fn an_output_shorter_than_the_input_is_an_error() {
    let mut compressor = Compressor::default();
    for policy in POLICIES {
        let packed = compressor.pack(policy, &[0; 4096], &mut [0; 4095]);
        assert!(matches!(packed, Err(CompressError::OutputTooShort)), "{policy}");
        let packed = compressor.pack(policy, &vec![0; MAX_INPUT_BYTES + 1], &mut []);
        assert!(matches!(packed, Err(CompressError::InputTooLong)), "{policy}");
    }
}

/// What each policy makes of data of each kind, at 64 KiB: the sizes are bounds, the codecs are exact.
#[test]
fn policies_choose_by_what_pays() {
    let mut contexts = Contexts::new();
    let size = 64 << 10;
    let (zeros, words, weights, random) = (vec![0; size], text(size, 1), bf16(size, 2), random_bytes(size, 3));
    let zstd = Compression::Zstd { level: 1 };
    let cases: [(Compression, &[u8], Codec, usize); 11] = [
        (Compression::Lz4, &zeros, Codec::Lz4, 300),
        (Compression::Lz4, &words, Codec::Lz4, size * 6 / 10),
        (Compression::Lz4, &weights, Codec::Raw, size),
        (Compression::Lz4, &random, Codec::Raw, size),
        (zstd, &words, Codec::Zstd, size * 4 / 10),
        (zstd, &weights, Codec::Zstd, size * 9 / 10),
        (zstd, &random, Codec::Raw, size),
        (Compression::Auto, &zeros, Codec::Lz4, 300),
        (Compression::Auto, &weights, Codec::Zstd, size * 9 / 10),
        (Compression::Auto, &random, Codec::Raw, size),
        (Compression::None, &zeros, Codec::Raw, size),
    ];
    for (policy, plain, codec, at_most) in cases {
        let packed = contexts.round_trip(policy, plain);
        assert_eq!(packed.codec, codec, "{policy}: {packed:?}");
        assert!(packed.len_bytes <= at_most, "{policy}: {packed:?} over {at_most}");
    }
    // Uniform bytes that repeat look random to a histogram; the look must not cost their compression.
    let mut repeats = random_bytes(4096, 4);
    while repeats.len() < size {
        repeats.extend_from_within(..4096);
    }
    for policy in [Compression::Lz4, zstd, Compression::Auto] {
        let packed = contexts.round_trip(policy, &repeats);
        assert!(packed.len_bytes < size / 8, "{policy}: {packed:?}");
    }
}

#[test]
fn packing_is_deterministic_whatever_went_before() {
    let inputs = [text(65_536, 1), bf16(65_536, 2), random_bytes(8192, 3), vec![0; 4096], text(512, 4)];
    let pack = |compressor: &mut Compressor, policy, plain: &[u8]| {
        let mut out = vec![0; plain.len()];
        let packed = compressor.pack(policy, plain, &mut out).unwrap();
        out.truncate(packed.len_bytes);
        (packed, out)
    };
    let mut used = Compressor::default();
    for policy in POLICIES.into_iter().chain(POLICIES) {
        for plain in &inputs {
            assert_eq!(pack(&mut used, policy, plain), pack(&mut Compressor::default(), policy, plain), "{policy}");
        }
    }
}

/// H119: what liblz4 packs, an independent decoder (`lz4_flex`, all safe Rust) unpacks, and the other way round.
#[test]
fn h119_lz4_blocks_are_interchangeable_with_another_implementation() {
    let mut contexts = Contexts::new();
    for length in [13, 100, 4095, 4096, 16_384, 65_535, 65_536] {
        for plain in [text(length, 7), vec![0; length], random_bytes(length, 8), bf16(length, 9)] {
            let packed = contexts.round_trip(Compression::Lz4, &plain);
            if packed.codec == Codec::Lz4 {
                let theirs = lz4_flex::block::decompress(&contexts.packed[..packed.len_bytes], length).unwrap();
                assert!(theirs == plain, "{length} bytes");
            }
            let theirs = lz4_flex::block::compress(&plain);
            let mut ours = vec![0; length];
            contexts.decompressor.unpack(Codec::Lz4, &theirs, &mut ours).unwrap();
            assert!(ours == plain, "{length} bytes");
        }
    }
}

/// H120: packed bytes changed at random, cut, grown, or random from the start: an error or the asked-for length, and not a
/// byte beside it. An independent LZ4 decoder reads alike what both take.
#[test]
fn h120_hostile_bytes_give_an_error_or_the_asked_for_length() {
    const GUARD: usize = 64;
    let mut random = StdRng::seed_from_u64(120);
    let mut contexts = Contexts::new();
    let mut accepted = 0;
    for round in 0..30_000u64 {
        let length = random.random_range(1..5000);
        let plain = if round % 2 == 0 { text(length, round) } else { vec![round as u8; length] };
        let policy = if round % 3 == 0 { Compression::Zstd { level: 1 } } else { Compression::Lz4 };
        let packed = contexts.round_trip(policy, &plain);
        let mut bytes = contexts.packed[..packed.len_bytes].to_vec();
        for _ in 0..random.random_range(1..4) {
            match random.random_range(0..5) {
                0 => bytes.truncate(random.random_range(0..=bytes.len())),
                1 => bytes.extend_from_slice(&random_bytes(random.random_range(1..40), round)),
                2 => bytes = random_bytes(bytes.len(), round),
                _ if bytes.is_empty() => {}
                _ => {
                    let at = random.random_range(0..bytes.len());
                    bytes[at] ^= 1 << random.random_range(0..8);
                }
            }
        }
        let codec = if policy == Compression::Lz4 { Codec::Lz4 } else { Codec::Zstd };
        let asked = if random.random() { length } else { random.random_range(0..6000) };
        let mut memory = vec![0xD7; asked + 2 * GUARD];
        let outcome = contexts.decompressor.unpack(codec, &bytes, &mut memory[GUARD..GUARD + asked]);
        let (front, rest) = memory.split_at(GUARD);
        let (out, back) = rest.split_at(asked);
        assert!(
            front.iter().chain(back).all(|&byte| byte == 0xD7),
            "{codec:?}, round {round}: wrote beside the output"
        );
        if outcome.is_ok() {
            accepted += 1;
            if codec == Codec::Lz4 {
                // liblz4 takes some malformed blocks that the other refuses; what both take, they read alike.
                let theirs = lz4_flex::block::decompress(&bytes, asked);
                assert!(
                    theirs.is_err() || theirs.is_ok_and(|theirs| theirs == out),
                    "round {round}: decoders disagree"
                );
            }
        }
    }
    assert!(accepted > 0, "some mutations only change literals, and those must come through");
}

/// H123: real files of this machine and tensors, 4 to 64 KiB, every zstd level.
#[test]
fn h123_real_data_comes_back_identical_at_every_level() {
    let executable = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let source = include_bytes!("../compress.rs").repeat(10);
    let weights = bf16(256 << 10, 123);
    let mut contexts = Contexts::new();
    for level in ZSTD_LEVELS {
        let policy = Compression::Zstd { level };
        for (data, stride) in [(&executable, executable.len() / 6), (&source, 1 << 16), (&weights, 1 << 17)] {
            for (index, start) in (0..data.len().saturating_sub(1 << 16)).step_by(stride).enumerate() {
                let length = [4096, 65_536, 16_384, 8192, 32_768][index % 5];
                contexts.round_trip(policy, &data[start..start + length]);
            }
        }
    }
    for chunk in executable.chunks(65_536).step_by(3).chain(source.chunks(4096)) {
        contexts.round_trip(Compression::Lz4, chunk);
        contexts.round_trip(Compression::Auto, chunk);
    }
}

#[test]
fn names_parse_and_print_alike() {
    for name in ["none", "lz4", "zstd:1", "zstd:19", "auto"] {
        assert_eq!(name.parse::<Compression>().unwrap().to_string(), name);
        let json = format!("{name:?}");
        assert_eq!(serde_json::to_string(&serde_json::from_str::<Compression>(&json).unwrap()).unwrap(), json);
    }
    for name in ["", "LZ4", "zstd", "zstd:", "zstd:0", "zstd:20", "zstd:-1", "zstd:1 ", "gzip", "zstd:999999"] {
        assert_eq!(name.parse::<Compression>(), Err(UnknownCompression), "{name:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Patches of runs, words, tensors and noise.
    #[test]
    fn mixed_data_round_trips(pieces in prop::collection::vec((0u8..4, 1usize..9000, any::<u64>()), 1..8)) {
        let mut plain = Vec::new();
        for (kind, length, seed) in pieces {
            plain.extend(match kind {
                0 => vec![seed as u8; length],
                1 => text(length, seed),
                2 => bf16(length, seed),
                _ => random_bytes(length, seed),
            });
        }
        let mut contexts = Contexts::new();
        for policy in POLICIES {
            contexts.round_trip(policy, &plain);
        }
    }
}
