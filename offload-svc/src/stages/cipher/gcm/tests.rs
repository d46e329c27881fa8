//! AES-GCM engines against the vectors of NIST's GCM submission (McGrew, Viega), and against one another.

use proptest::prelude::*;

use super::*;

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

const PLAIN: &str = "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72\
                     1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255";
const NONCE: &str = "cafebabefacedbaddecaf888";
const AAD: &str = "feedfacedeadbeeffeedfacedeadbeefabaddad2";
const KEY: &str = "feffe9928665731c6d6a8f9467308308";

/// Key, nonce, plaintext, associated data, ciphertext, tag. Test cases 1, 3, 4, 14, 15, 16.
fn vectors() -> Vec<[Vec<u8>; 6]> {
    let key256 = format!("{KEY}{KEY}");
    let plain: String = PLAIN.split_whitespace().collect();
    let c128 = "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e\
                21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091473f5985";
    let c256 = "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa\
                8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad";
    let zero = "0".repeat(64);
    [
        [&zero[..32], &zero[..24], "", "", "", "58e2fccefa7e3061367f1d57a4e7455a"],
        [KEY, NONCE, &plain, "", c128, "4d5c2af327cd64a62cf35abd2ba6fab4"],
        [KEY, NONCE, &plain[..120], AAD, &c128[..120], "5bc94fbc3221a5db94fae95ae7121a47"],
        [&zero, &zero[..24], &zero[..32], "", "cea7403d4d606b6e074ec5d3baf39d18", "d0d1c8a799996bf0265b98b5d48ab919"],
        [&key256, NONCE, &plain, "", c256, "b094dac5d93471bdec1a502270e3cc6c"],
        [&key256, NONCE, &plain[..120], AAD, &c256[..120], "76fc6ece0f4e1768cddf8853bb2d551b"],
    ]
    .map(|vector| vector.map(hex))
    .into()
}

#[test]
fn nist_vectors_in_place_and_out_of_place() {
    for engine in Engine::ALL {
        for [key, nonce, plain, aad, cipher, tag] in vectors() {
            let key = GcmKey::new(engine, &key).unwrap();
            let (nonce, tag) = (nonce.try_into().unwrap(), tag.try_into().unwrap());
            let mut buffer = plain.clone();
            assert_eq!(key.seal(&nonce, &aad, &mut buffer).unwrap(), tag, "{engine:?}");
            assert_eq!(buffer, cipher, "{engine:?}");
            let mut out = vec![0xEE; plain.len()];
            key.open(&nonce, &aad, &cipher, &tag, &mut out).unwrap();
            assert_eq!(out, plain, "{engine:?}");
            key.open_in_place(&nonce, &aad, &mut buffer, &tag).unwrap();
            assert_eq!(buffer, plain, "{engine:?}");
        }
    }
}

/// H104: with one bit of the tag, ciphertext, associated data or nonce flipped, no buffer holds plaintext.
#[test]
fn h104_a_bad_tag_leaves_no_plaintext() {
    for engine in Engine::ALL {
        for key_bytes in [16, 32] {
            let key = GcmKey::new(engine, &vec![7; key_bytes]).unwrap();
            for length in [1, 15, 16, 17, 4096, 65_537] {
                let plain: Vec<u8> = (0..length).map(|index| 1 + (index % 251) as u8).collect();
                let (nonce, aad) = ([3; NONCE_BYTES], *b"birth");
                let mut cipher = plain.clone();
                let tag = key.seal(&nonce, &aad, &mut cipher).unwrap();
                for bit in 0..128 {
                    let mut bad_tag = tag;
                    bad_tag[bit / 8] ^= 1 << (bit % 8);
                    let mut out = vec![0xAA; length];
                    assert_eq!(key.open(&nonce, &aad, &cipher, &bad_tag, &mut out), Err(GcmError::BadTag));
                    assert!(out.iter().all(|&byte| byte == 0), "{engine:?}: {length} bytes");
                    let mut in_place = cipher.clone();
                    assert_eq!(key.open_in_place(&nonce, &aad, &mut in_place, &bad_tag), Err(GcmError::BadTag));
                    assert!(in_place.iter().all(|&byte| byte == 0), "{engine:?}: {length} bytes in place");
                    if length > 4096 && bit > 8 {
                        break;
                    }
                }
                cipher[length / 2] ^= 0x10;
                assert_eq!(key.open_in_place(&nonce, &aad, &mut cipher.clone(), &tag), Err(GcmError::BadTag));
                cipher[length / 2] ^= 0x10;
                assert_eq!(key.open_in_place(&nonce, b"birth2", &mut cipher.clone(), &tag), Err(GcmError::BadTag));
                assert_eq!(key.open_in_place(&[4; 12], &aad, &mut cipher, &tag), Err(GcmError::BadTag));
            }
        }
    }
}

#[test]
fn keys_and_outputs_of_wrong_length_are_refused() {
    for engine in Engine::ALL {
        for length in (0..70).filter(|length| ![16, 32].contains(length)) {
            assert_eq!(GcmKey::new(engine, &vec![1; length]).err(), Some(GcmError::KeyLength(length)), "{engine:?}");
        }
        let key = GcmKey::new(engine, &[1; 16]).unwrap();
        let mut out = [0xAA; 4];
        assert_eq!(key.open(&[0; 12], &[], &[1; 5], &[0; 16], &mut out), Err(GcmError::OutputLength));
        assert_eq!(out, [0; 4]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn engines_equal_the_portable_one(
        key in prop_oneof![prop::collection::vec(any::<u8>(), 16), prop::collection::vec(any::<u8>(), 32)],
        nonce: [u8; NONCE_BYTES],
        aad in prop::collection::vec(any::<u8>(), 0..200),
        memory in prop::collection::vec(any::<u8>(), 64..9000),
        offset in 0usize..64,
    ) {
        let plain = &memory[offset..];
        let mut outcomes = Vec::new();
        for engine in Engine::ALL {
            let key = GcmKey::new(engine, &key).unwrap();
            let mut buffer = memory.clone();
            let tag = key.seal(&nonce, &aad, &mut buffer[offset..]).unwrap();
            let mut opened = vec![0u8; memory.len()];
            key.open(&nonce, &aad, &buffer[offset..], &tag, &mut opened[offset..]).unwrap();
            prop_assert_eq!(&opened[offset..], plain);
            outcomes.push((buffer, tag));
        }
        prop_assert_eq!(&outcomes[0], &outcomes[1]);
    }
}
