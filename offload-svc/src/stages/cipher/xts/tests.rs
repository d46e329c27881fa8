//! AES-XTS engines against IEEE 1619-2018 annex B, against OpenSSL, and against one another.

use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::*;

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Encrypts, checks that decryption gives the plaintext back, and returns the ciphertext.
fn there_and_back(engine: Engine, key: &[u8], unit: u128, plain: &[u8]) -> Vec<u8> {
    let key = XtsKey::new(engine, key).unwrap();
    let mut buffer = plain.to_vec();
    key.encrypt(unit, &mut buffer).unwrap();
    let cipher = buffer.clone();
    key.decrypt(unit, &mut buffer).unwrap();
    assert_eq!(buffer, plain, "{engine:?}: {} bytes", plain.len());
    cipher
}

/// Vectors 2, 4, 10, and 15 to 18 with ciphertext stealing. Vector 1 has equal key halves, which are refused.
#[test]
fn ieee_1619_vectors() {
    let stealing_key = hex("fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0bfbebdbcbbbab9b8b7b6b5b4b3b2b1b0");
    let stealing = [
        "6c1625db4671522d3d7599601de7ca09ed",
        "d069444b7a7e0cab09e24447d24deb1fedbf",
        "e5df1351c0544ba1350b3363cd8ef4beedbf9d",
        "9d84c813f719aa2c7be3f66171c7c5c2edbf9dac",
    ];
    let rising: Vec<u8> = (0..512).map(|index| index as u8).collect();
    for engine in Engine::available() {
        let two = there_and_back(
            engine,
            &hex(&format!("{}{}", "11".repeat(16), "22".repeat(16))),
            0x33_3333_3333,
            &[0x44; 32],
        );
        assert_eq!(to_hex(&two), "c454185e6a16936e39334038acef838bfb186fff7480adc4289382ecd6d394f0");
        let four = hex("2718281828459045235360287471352631415926535897932384626433832795");
        let four = there_and_back(engine, &four, 0, &rising);
        assert_eq!(to_hex(&four[..32]), "27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c");
        let ten = hex("2718281828459045235360287471352662497757247093699959574966967627\
                       3141592653589793238462643383279502884197169399375105820974944592");
        let ten = there_and_back(engine, &ten, 0xff, &rising);
        assert_eq!(to_hex(&ten[..32]), "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b");
        for (extra, expected) in stealing.iter().enumerate() {
            let cipher = there_and_back(engine, &stealing_key, 0x12_3456_789a, &rising[..17 + extra]);
            assert_eq!(to_hex(&cipher), *expected, "{engine:?}");
        }
    }
}

/// H107: SHA-256 of the ciphertext that OpenSSL 4.0.0 gives for byte i = 7i+3, key bytes 0, 1, 2 .., and this data unit.
#[test]
fn h107_lengths_from_16_equal_openssl() {
    let unit = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;
    let expected = [
        (32, 16, "cddab5c4f4fc9310c55817f03627a27640ec789204619f6f750138fab2c75f6f"),
        (32, 17, "5e19413973effd84069f1163c7f7d45403d32acf92fef91e4ee088e42959c7d9"),
        (32, 31, "aaa58006b3fc7f06276e2a410e1485f2db7e4b342b442bbd4070bd1c1cd29641"),
        (32, 32, "de1d11908e6928482c37b2a5478508aa45cf26b07bb1dd35bd09344aa1828c99"),
        (32, 33, "9f7a612a25b122ca4fdf00ebb82b3408749e3c339aa8f70c08226f4e9a6c83f0"),
        (32, 511, "7a573720bec256c9ead7392cbb109930efb5d65b8db2d39984770ec564c7db9c"),
        (32, 4095, "717ec804a53ced125584720669b871d48972e182612fe047453ccf655def5d63"),
        (32, 4096, "5178e37710b0a73a55c4d4ba995a282201816eb51497f08eb8b02df3ee414504"),
        (64, 16, "a1540e41bdf7c8a30fd2bd097a3813e3efc7922fb9fb22b1ea27611a58584706"),
        (64, 17, "4a9be29e4391e0b774721c986ffb243a3610f9a6c2ebdf2736654b0ba0d690c9"),
        (64, 31, "f4f87b770d7f187cc3ba028040d9b17d2e44fcf3c38abf919118ab2304a89ac7"),
        (64, 32, "3ad71ef0f73ab2a9e12beb7425ae83c828c64472472f120a190de8647cecb854"),
        (64, 33, "1c9f6dad5ab4d8b60ea5d1949bef7f4b3c3fb959954d505d738d0377b4ee2686"),
        (64, 511, "10d77254babf971f52cd69eaba89de591e8fc84c37e10e6e77ea94b1d81a3d18"),
        (64, 4095, "790c0499c676f9f5dd6ea73e2618aae02e5ea41a36e49939a512106ad58964f2"),
        (64, 4096, "d93e66747c4f577a544db260ce9bf78839b19cd4e72c4a407e805fa7ee3371c9"),
    ];
    for engine in Engine::available() {
        for (key_bytes, length, digest) in expected {
            let key: Vec<u8> = (0..key_bytes).collect();
            let plain: Vec<u8> = (0..length).map(|index: u32| (index * 7 + 3) as u8).collect();
            let cipher = there_and_back(engine, &key, unit, &plain);
            assert_eq!(to_hex(&Sha256::digest(&cipher)), digest, "{engine:?}: key {key_bytes}, {length} bytes");
        }
    }
}

/// H107: shorter than a block, equal halves, half a key: errors, not panics.
#[test]
fn h107_short_units_and_bad_keys_are_refused() {
    for engine in Engine::available() {
        for key_bytes in (0..80).filter(|length| ![32, 64].contains(length)) {
            let key: Vec<u8> = (0..key_bytes as u8).collect();
            assert_eq!(XtsKey::new(engine, &key).err(), Some(XtsError::KeyLength(key_bytes)));
        }
        for key_bytes in [32, 64] {
            assert_eq!(XtsKey::new(engine, &vec![5; key_bytes]).err(), Some(XtsError::EqualHalves));
        }
        let key: [u8; 32] = std::array::from_fn(|index| index as u8);
        let key = XtsKey::new(engine, &key).unwrap();
        for length in (0..16).chain([MAX_UNIT_BYTES + 1]) {
            let mut data = vec![9; length];
            assert_eq!(key.encrypt(0, &mut data), Err(XtsError::UnitLength(length)));
            assert_eq!(key.decrypt(0, &mut data), Err(XtsError::UnitLength(length)));
            assert!(data.iter().all(|&byte| byte == 9));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn engines_equal_the_portable_one(
        key in prop_oneof![prop::collection::vec(any::<u8>(), 32), prop::collection::vec(any::<u8>(), 64)],
        unit: u128,
        length in prop_oneof![16usize..600, 4000usize..4200],
        offset in 0usize..64,
    ) {
        let memory: Vec<u8> = (0..offset + length).map(|index| (index * 31 + 7) as u8).collect();
        let expected = there_and_back(Engine::Aes, &key, unit, &memory[offset..]);
        for engine in Engine::available() {
            let key = XtsKey::new(engine, &key).unwrap();
            let mut buffer = memory.clone();
            key.encrypt(unit, &mut buffer[offset..]).unwrap();
            prop_assert_eq!(&buffer[offset..], &expected, "{:?}", engine);
            prop_assert_eq!(&buffer[..offset], &memory[..offset]);
            key.decrypt(unit, &mut buffer[offset..]).unwrap();
            prop_assert_eq!(&buffer, &memory, "{:?}", engine);
        }
    }
}
