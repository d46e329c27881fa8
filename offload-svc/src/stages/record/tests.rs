//! Records: round trips, the golden bytes of the format, and everything that must not open.

use std::sync::Arc;

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use zeroize::Zeroizing;

use super::*;
use crate::stages::cipher::{Cipher, gcm, xts};
use crate::stages::compress::{Codec, Compression};
use crate::stages::crc;
use crate::stages::engines::Engines;
use crate::stages::keys::{KeyEpoch, Keyring, LineageId, LineageKey, NoSubkey, Salt, SealingKey};

const LINEAGE: LineageId = LineageId(0x0011_2233_4455_6677_8899_AABB_CCDD_EEFF);
const OWNER: Owner = Owner { volume: 9, shard: 5 };
const COMPRESSIONS: [Compression; 4] =
    [Compression::None, Compression::Lz4, Compression::Zstd { level: 1 }, Compression::Auto];

fn lineage_key(cipher: Cipher, secret: u8) -> LineageKey {
    LineageKey::from_secret(LINEAGE, epoch(cipher), cipher, Zeroizing::new([secret; 32]))
}

/// Every cipher's key is an epoch of its own, so that one keyring serves all tests.
fn epoch(cipher: Cipher) -> KeyEpoch {
    KeyEpoch(u32::from(cipher.id()))
}

fn sealing_key(cipher: Cipher, salt: u8) -> SealingKey {
    lineage_key(cipher, 1).sealing_key(Salt([salt; 16]), &Engines::portable())
}

fn codec_on(engines: Engines) -> RecordCodec {
    let keyring = Keyring::new();
    for cipher in Cipher::ALL {
        keyring.insert(lineage_key(cipher, 1));
    }
    RecordCodec::new(engines, Arc::new(keyring))
}

fn codec() -> RecordCodec {
    codec_on(Engines::portable())
}

fn birth(cipher: Cipher, block_count: u64, block_shift: u8) -> Birth {
    Birth { lineage: LINEAGE, key_epoch: epoch(cipher), lba: 0x1234_5678, block_count, block_shift, generation: 77 }
}

fn sealing(kind: Kind, birth: Birth, compression: Compression) -> Sealing<'static> {
    Sealing { kind, birth, owner: OWNER, compression, block_crcs: None }
}

/// Half text, half noise, so that every codec has something to do.
fn plain(length: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; length];
    let (front, back) = bytes.split_at_mut(length / 2);
    for (slot, byte) in front.iter_mut().zip(b"a record of the log, ".iter().cycle()) {
        *slot = *byte;
    }
    StdRng::seed_from_u64(length as u64).fill_bytes(back);
    bytes
}

/// Seals data blocks and gives the record's bytes.
fn seal(codec: &mut RecordCodec, key: &mut SealingKey, compression: Compression, plain: &[u8], shift: u8) -> Vec<u8> {
    let birth = birth(key.cipher(), (plain.len() >> shift) as u64, shift);
    let mut out = vec![0xEE; sealed_bound(plain.len(), shift)];
    let header = codec.seal(&sealing(Kind::Data, birth, compression), plain, key, &mut out).unwrap();
    out.truncate(header.record_bytes());
    out
}

fn open(codec: &mut RecordCodec, record: &[u8], birth: &Birth) -> Result<Vec<u8>, OpenError> {
    let mut out = vec![0xAA; birth.plain_bytes().unwrap()];
    let outcome = codec.open(record, Kind::Data, birth, &mut out);
    if outcome.is_err() {
        assert!(out.iter().all(|&byte| byte == 0) || out.iter().all(|&byte| byte == 0xAA), "plaintext after an error");
    }
    outcome.map(|_| out)
}

/// Makes the checksum right again after a change: what a forger would do.
fn remake_crc(record: &mut [u8]) {
    let value = crc::append(crc::crc32c(&record[..108]), &record[HEADER_BYTES..]);
    record[108..112].copy_from_slice(&value.to_le_bytes());
}

/// H116 through the record: every block count and size at and around the limit, every cipher and compression.
#[test]
fn h116_every_size_round_trips_within_the_stated_bound() {
    let mut codec = codec();
    for cipher in Cipher::ALL {
        let mut key = sealing_key(cipher, 1);
        for compression in COMPRESSIONS {
            for shift in [9, 12, 13, 16] {
                let most = MAX_PLAIN_BYTES >> shift;
                for count in [1, 2, 3, 4, 5, most / 2, most.saturating_sub(1), most] {
                    if count == 0 || count > most {
                        continue;
                    }
                    let plain = plain(count << shift);
                    let record = seal(&mut codec, &mut key, compression, &plain, shift);
                    assert!(record.len() <= sealed_bound(plain.len(), shift));
                    assert!(record.len() <= MAX_RECORD_BYTES);
                    let opened = open(&mut codec, &record, &birth(cipher, count as u64, shift)).unwrap();
                    assert!(opened == plain, "{cipher} {compression} {count} << {shift}");
                }
                let over = birth(cipher, most as u64 + 1, shift);
                let mut out = vec![0; 2 * MAX_RECORD_BYTES];
                let sealed = codec.seal(
                    &sealing(Kind::Data, over, compression),
                    &vec![0; (most + 1) << shift],
                    &mut key,
                    &mut out,
                );
                assert!(matches!(sealed, Err(SealError::Birth(HeaderError::BlockCount { .. }))));
            }
        }
    }
}

/// The bytes of the format, version 1: if this fails, stored pools no longer open.
#[test]
fn golden_records() {
    let mut codec = codec();
    let mut pinned = Vec::new();
    for cipher in Cipher::ALL {
        let record = seal(&mut codec, &mut sealing_key(cipher, 0x42), Compression::None, &plain(8192), 12);
        pinned.push(crc::crc32c(&record));
    }
    let mut key = sealing_key(Cipher::Aes256Gcm, 0x42);
    let mut marker = [0u8; HEADER_BYTES + 16];
    let whole_volume = Birth { lba: 0, block_count: 1 << 40, ..birth(Cipher::Aes256Gcm, 1, 9) };
    let trim = sealing(Kind::Deallocate, whole_volume, Compression::None);
    assert_eq!(codec.seal(&trim, &[], &mut key, &mut marker).unwrap().record_bytes(), HEADER_BYTES);
    let head = &marker[..HEADER_BYTES];
    assert_eq!(head[..16], [b'S', b'R', b'E', b'C', 1, 3, 0, 1, 1, 0, 0, 0, 5, 0, 9, 0]);
    assert_eq!(head[16..32], LINEAGE.0.to_le_bytes());
    assert_eq!(head[32..40], [9, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(head[48..56], (1u64 << 40).to_le_bytes());
    assert_eq!(head[56..64], 77u64.to_le_bytes());
    assert_eq!(head[64..92], [&[0x42; 16][..], &[0; 12]].concat());
    pinned.push(crc::crc32c(head));
    assert_eq!(pinned, GOLDEN, "{pinned:#x?}");
}

const GOLDEN: [u32; 5] = [0x42bed700, 0x09d5b849, 0x7af3fd24, 0x832366f5, 0x48674bc7];

/// Compressed records of version 1 open for ever, though a later library may pack the same data otherwise.
#[test]
fn golden_compressed_records_open() {
    let mut codec = codec();
    let text = golden_text();
    for (cipher, golden_codec, hex) in GOLDEN_COMPRESSED {
        let digits: String = hex.split_whitespace().collect();
        let record: Vec<u8> =
            (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect();
        assert_eq!(Header::parse(&record).unwrap().codec, golden_codec);
        assert_eq!(open(&mut codec, &record, &birth(cipher, 2, 9)).unwrap(), text);
    }
}

fn golden_text() -> Vec<u8> {
    b"stripe, shard, segment, member, map; ".iter().copied().cycle().take(1024).collect()
}

const GOLDEN_COMPRESSED: [(Cipher, Codec, &str); 4] = [
    (
        Cipher::Aes256Gcm,
        Codec::Lz4,
        "53524543010101010100000005000900ffeeddccbbaa9988776655443322110009000000330000007856341200000000 \
         02000000000000004d000000000000004242424242424242424242424242424200000000000000003b0000005843a6ae \
         fe93f07a99455c7203a06dc899f657b61f99169b5701a9d733fa70f950b204c89bf97cba0d8e966960980f6841313d7f \
         790dcd61c355a1b268347eb2798cd81172465be599149808be5ddf",
    ),
    (
        Cipher::Aes128Gcm,
        Codec::Zstd,
        "53524543010102020200000005000900ffeeddccbbaa9988776655443322110009000000380000007856341200000000 \
         02000000000000004d00000000000000424242424242424242424242424242420000000000000000400000009280c701 \
         8b3d777cec5fe6acd4cce56105e06be6884092af7d8fbcc723be1d8ff9f1e7b581e54605738ef69872eeca3a0a57fd0f \
         8a3e74ca5e636eafb06e8c434db2d7009b29408a9ab49183dedc0ac1183669fc",
    ),
    (
        Cipher::Aes128Xts,
        Codec::Lz4,
        "53524543010101030300000005000900ffeeddccbbaa9988776655443322110009000000330000007856341200000000 \
         02000000000000004d000000000000004242424242424242424242424242424200000000000000003b00000000000000 \
         0000000000000000000000008ac9db1d86544ac75de1c5b502aee322b4752a2fba2d0b7dcdce62ec55ccc8efe17b5853 \
         fc89226d280a533e5458546e032d9f8656ebb31eb3a6382d7f01bd",
    ),
    (
        Cipher::Aes256Xts,
        Codec::Zstd,
        "53524543010102040400000005000900ffeeddccbbaa9988776655443322110009000000380000007856341200000000 \
         02000000000000004d000000000000004242424242424242424242424242424200000000000000004000000000000000 \
         00000000000000000000000041a843080f0508e0cfd836d9fbdb76348e2f319eaeb7ac8e215990ce12bde99f8b3b2821 \
         7ee5e4eae9152f88677f0d0beaa6f445e90dc21145aedc226ab36cc577f42155",
    ),
];

/// What was sealed with one set of engines opens with any other, and the bytes are the same.
#[test]
fn all_engines_give_identical_records() {
    let portable = Engines::portable();
    let mut sets = vec![portable];
    sets.extend(crc::Engine::ALL.map(|crc| Engines { crc, ..portable }));
    sets.extend(gcm::Engine::ALL.map(|gcm| Engines { gcm, ..portable }));
    sets.extend(xts::Engine::available().into_iter().map(|xts| Engines { xts, ..portable }));
    for cipher in Cipher::ALL {
        for compression in COMPRESSIONS {
            for length in [512, 4096, 12_800, 65_536] {
                let plain = plain(length);
                let mut records = sets.iter().map(|&engines| {
                    let mut key = lineage_key(cipher, 1).sealing_key(Salt([8; 16]), &engines);
                    seal(&mut codec_on(engines), &mut key, compression, &plain, 9)
                });
                let first = records.next().unwrap();
                assert!(records.all(|record| record == first), "{cipher} {compression} {length}");
                for &engines in &sets {
                    let opened = open(&mut codec_on(engines), &first, &birth(cipher, length as u64 / 512, 9)).unwrap();
                    assert!(opened == plain);
                }
            }
        }
    }
}

/// Any one bit of a record flipped: an error, and no plaintext. H104 at the record's level.
#[test]
fn h104_a_flipped_bit_anywhere_is_found_without_leaking_plaintext() {
    let mut codec = codec();
    for cipher in Cipher::ALL {
        let record = seal(&mut codec, &mut sealing_key(cipher, 1), Compression::Lz4, &plain(1024), 9);
        for bit in 0..8 * record.len() {
            let mut damaged = record.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(open(&mut codec, &damaged, &birth(cipher, 2, 9)).is_err(), "{cipher}: bit {bit}");
        }
    }
}

/// H104: with the checksum made right again, GCM still finds every change; XTS claims nothing about the header, but no
/// changed payload passes the plaintext's own checksums.
#[test]
fn h104_a_forged_checksum_does_not_help() {
    let mut codec = codec();
    for cipher in Cipher::ALL {
        let plain = plain(1024);
        let record = seal(&mut codec, &mut sealing_key(cipher, 1), Compression::Lz4, &plain, 9);
        for bit in 0..8 * record.len() {
            if (108..112).contains(&(bit / 8)) {
                continue;
            }
            let mut forged = record.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            remake_crc(&mut forged);
            match open(&mut codec, &forged, &birth(cipher, 2, 9)) {
                Err(OpenError::BadTag | OpenError::Header(_) | OpenError::OtherBirth { .. }) => {}
                Err(OpenError::NoSubkey(_) | OpenError::OtherKind { .. }) => {}
                Err(OpenError::BlockCrc { .. } | OpenError::Decompress(_)) if !cipher.is_authenticated() => {}
                // Under XTS, the owner, salt and nonce are covered by nothing but the checksum.
                Ok(opened) if !cipher.is_authenticated() => assert!(opened == plain, "{cipher}: bit {bit}"),
                other => panic!("{cipher}: bit {bit}: {other:?}"),
            }
        }
    }
}

/// A record that stands where another should is told by its birth, whichever part differs.
#[test]
fn a_record_of_another_birth_does_not_open() {
    let mut codec = codec();
    for cipher in Cipher::ALL {
        let right = birth(cipher, 2, 9);
        let record = seal(&mut codec, &mut sealing_key(cipher, 1), Compression::None, &plain(1024), 9);
        let wrong = [
            Birth { lineage: LineageId(1), ..right },
            Birth { key_epoch: KeyEpoch(40), ..right },
            Birth { lba: right.lba + 1, ..right },
            Birth { block_count: 3, ..right },
            Birth { block_shift: 10, block_count: 1, ..right },
            Birth { generation: 76, ..right },
        ];
        for expected in wrong {
            let found = open(&mut codec, &record, &expected).unwrap_err();
            assert!(matches!(&found, OpenError::OtherBirth { found } if **found == right), "{found:?}");
        }
        let mut out = vec![0xAA; 1024];
        let found = codec.open(&record, Kind::Metadata, &right, &mut out).unwrap_err();
        assert!(matches!(found, OpenError::OtherKind { found: Kind::Data, expected: Kind::Metadata }), "{found:?}");
    }
}

#[test]
fn markers_carry_no_payload_and_are_authenticated() {
    let mut codec = codec();
    for cipher in Cipher::ALL {
        let mut key = sealing_key(cipher, 1);
        for kind in [Kind::Zeroes, Kind::Deallocate] {
            let wide = Birth { lba: 5, block_count: 1 << 38, ..birth(cipher, 1, 12) };
            let mut out = [0u8; HEADER_BYTES + 16];
            let header = codec.seal(&sealing(kind, wide, Compression::Auto), &[], &mut key, &mut out).unwrap();
            assert_eq!(header.record_bytes(), HEADER_BYTES);
            let record = &out[..HEADER_BYTES];
            assert_eq!(codec.open(record, kind, &wide, &mut []).unwrap(), header);
            assert_eq!(codec.open_any(record, &mut []).unwrap(), header);
            // A forger widens the range: only GCM claims to notice.
            let mut forged = record.to_vec();
            forged[48] = 2;
            remake_crc(&mut forged);
            let outcome = codec.open_any(&forged, &mut []);
            if cipher.is_authenticated() {
                assert!(matches!(outcome, Err(OpenError::BadTag)), "{outcome:?}");
            }
            let mistaken = codec.seal(&sealing(kind, wide, Compression::None), &[0; 4096], &mut key, &mut [0; 8192]);
            assert!(matches!(mistaken, Err(SealError::PlainLength { .. })));
        }
    }
}

/// Whoever can write to a member can't take the tag's protection away by saying that the record has none.
#[test]
fn an_authenticated_record_cannot_pose_as_an_unauthenticated_one() {
    let mut codec = codec();
    let (gcm, xts) = (Cipher::Aes256Gcm, Cipher::Aes256Xts);
    let mut marker = [0u8; HEADER_BYTES + 16];
    let trim = sealing(Kind::Deallocate, birth(gcm, 8, 12), Compression::None);
    codec.seal(&trim, &[], &mut sealing_key(gcm, 1), &mut marker).unwrap();
    marker[7] = xts.id();
    marker[48] = 0xFF;
    marker[92..108].fill(0);
    remake_crc(&mut marker[..HEADER_BYTES]);
    let refused = codec.open_any(&marker, &mut []).unwrap_err();
    assert!(
        matches!(refused, OpenError::NoSubkey(NoSubkey::OtherCipher { expected, given }) if (expected, given) == (gcm, xts))
    );
}

/// H101: the same plaintexts at the same places under the same lineage key, written by two mounts: no keystream is shared,
/// so the ciphertexts' XOR is not the plaintexts'. And within a mount, rewriting a block never repeats a ciphertext.
#[test]
fn h101_copied_members_that_both_go_on_share_no_keystream() {
    let mut codec = codec();
    let (one, two) = (plain(4096), vec![0x55; 4096]);
    for cipher in Cipher::ALL {
        let mut first = lineage_key(cipher, 1).sealing_key(Salt::random().unwrap(), &Engines::portable());
        let mut second = lineage_key(cipher, 1).sealing_key(Salt::random().unwrap(), &Engines::portable());
        let records = [
            seal(&mut codec, &mut first, Compression::None, &one, 12),
            seal(&mut codec, &mut second, Compression::None, &two, 12),
            seal(&mut codec, &mut second, Compression::None, &one, 12),
            seal(&mut codec, &mut second, Compression::None, &one, 12),
        ];
        let data = records.each_ref().map(|record| &record[HEADER_BYTES + 4..HEADER_BYTES + 4 + 4096]);
        let equal_bytes = |a: usize, b: usize| {
            (0..4096)
                .filter(|&at| data[a][at] ^ data[b][at] == one[at] ^ if b == 1 { two[at] } else { one[at] })
                .count()
        };
        // By chance 1 byte in 256 agrees: 16 of 4096; a shared keystream would make it all.
        for (a, b) in [(0, 1), (0, 2), (0, 3), (2, 3)] {
            assert!(equal_bytes(a, b) < 80, "{cipher}: records {a} and {b}: {}", equal_bytes(a, b));
        }
        let nonce = |record: &[u8]| Header::parse(record).map(|header| (header.salt, header.nonce)).unwrap();
        let mut nonces: Vec<_> =
            records.iter().map(|record| nonce(record)).map(|(salt, nonce)| (salt.0, nonce)).collect();
        nonces.sort();
        nonces.dedup();
        assert_eq!(nonces.len(), records.len());
    }
}

/// Checksums that came with the data (a verified data digest) are what reads are checked against: end to end.
#[test]
fn block_checksums_from_the_host_are_kept_and_checked() {
    let mut codec = codec();
    let plain = plain(3 * 4096);
    let mut key = sealing_key(Cipher::Aes256Gcm, 1);
    let mut crcs: Vec<u32> = plain.chunks(4096).map(crc::crc32c).collect();
    let mut out = vec![0; sealed_bound(plain.len(), 12)];
    let birth = birth(Cipher::Aes256Gcm, 3, 12);
    fn with(crcs: &[u32]) -> Sealing<'_> {
        Sealing {
            block_crcs: Some(crcs),
            ..sealing(Kind::Data, super::tests::birth(Cipher::Aes256Gcm, 3, 12), Compression::Lz4)
        }
    }
    codec.seal(&with(&crcs), &plain, &mut key, &mut out).unwrap();
    assert_eq!(open(&mut codec, &out, &birth).unwrap(), plain);
    // The buffer changed after the digest was verified: the read must say so, and which block.
    crcs[1] ^= 1;
    codec.seal(&with(&crcs), &plain, &mut key, &mut out).unwrap();
    assert!(matches!(open(&mut codec, &out, &birth), Err(OpenError::BlockCrc { block: 1 })));
    let refused = codec.seal(&with(&crcs[..2]), &plain, &mut key, &mut out);
    assert!(matches!(refused, Err(SealError::CrcCount { given: 2, expected: 3 })));
}

/// H123: a compressor that errs is found before the write is acknowledged, and the data is stored raw.
#[test]
fn h123_a_faulty_compressor_costs_space_and_not_data() {
    let mut codec = codec();
    let cipher = Cipher::Aes256Gcm;
    let text = b"what the compressor makes of this is wrong by a bit. ".repeat(100)[..4096].to_vec();
    for compression in COMPRESSIONS {
        let sound = seal(&mut codec, &mut sealing_key(cipher, 1), compression, &text, 12);
        assert_eq!(codec.packing_faults(), 0);
        assert_eq!(sound.len() < 4096, compression != Compression::None);
    }
    codec.break_compressor();
    for (faults, compression) in COMPRESSIONS[1..].iter().enumerate() {
        let record = seal(&mut codec, &mut sealing_key(cipher, 1), *compression, &text, 12);
        assert_eq!(Header::parse(&record).unwrap().codec, Codec::Raw);
        assert_eq!(codec.packing_faults(), 1 + faults as u64);
        assert_eq!(open(&mut codec, &record, &birth(cipher, 1, 12)).unwrap(), text);
    }
    // Not verified, it is still found by the reader.
    codec.verify_packing(false);
    let record = seal(&mut codec, &mut sealing_key(cipher, 1), Compression::Lz4, &text, 12);
    let refused = open(&mut codec, &record, &birth(cipher, 1, 12));
    assert!(matches!(refused, Err(OpenError::BlockCrc { .. } | OpenError::Decompress(_))), "{refused:?}");
}

#[test]
fn sealing_refuses_what_does_not_fit_and_spends_no_nonce() {
    let mut codec = codec();
    let mut key = sealing_key(Cipher::Aes256Gcm, 1);
    let mut out = vec![0; sealed_bound(4096, 12)];
    let good = birth(Cipher::Aes256Gcm, 1, 12);
    let mut refuse = |birth: Birth, plain: &[u8], out: &mut [u8]| {
        codec.seal(&sealing(Kind::Data, birth, Compression::None), plain, &mut key, out).unwrap_err()
    };
    assert!(matches!(refuse(Birth { lineage: LineageId(0), ..good }, &[0; 4096], &mut out), SealError::OtherKey));
    assert!(matches!(refuse(Birth { key_epoch: KeyEpoch(0), ..good }, &[0; 4096], &mut out), SealError::OtherKey));
    assert!(matches!(refuse(Birth { block_count: 0, ..good }, &[], &mut out), SealError::Birth(_)));
    assert!(matches!(refuse(Birth { block_shift: 8, ..good }, &[0; 256], &mut out), SealError::Birth(_)));
    assert!(matches!(refuse(Birth { block_shift: 64, ..good }, &[], &mut out), SealError::Birth(_)));
    assert!(matches!(refuse(Birth { lba: u64::MAX, ..good }, &[0; 4096], &mut out), SealError::Birth(_)));
    assert!(matches!(refuse(Birth { lba: u64::MAX >> 12, ..good }, &[0; 4096], &mut out), SealError::Birth(_)));
    assert!(matches!(refuse(good, &[0; 4095], &mut out), SealError::PlainLength { .. }));
    let last = out.len() - 1;
    assert!(matches!(refuse(good, &[0; 4096], &mut out[..last]), SealError::OutputTooShort { .. }));
    let header = codec.seal(&sealing(Kind::Data, good, Compression::None), &[0; 4096], &mut key, &mut out).unwrap();
    assert_eq!(header.nonce, 0);
}

#[test]
fn opening_needs_the_key_and_room() {
    let cipher = Cipher::Aes128Gcm;
    let mut codec = codec();
    let record = seal(&mut codec, &mut sealing_key(cipher, 1), Compression::Lz4, &plain(4096), 12);
    let mut out = [0u8; 4095];
    let error = codec.open(&record, Kind::Data, &birth(cipher, 1, 12), &mut out).unwrap_err();
    assert!(matches!(error, OpenError::OutputTooShort { given_bytes: 4095, needed_bytes: 4096 }));
    for cut in [0, 1, HEADER_BYTES - 1, HEADER_BYTES, record.len() - 1] {
        let error = open(&mut codec, &record[..cut], &birth(cipher, 1, 12)).unwrap_err();
        assert!(matches!(error, OpenError::Header(HeaderError::TooShort { .. })), "{error:?}");
    }
    let mut longer = record.clone();
    longer.extend_from_slice(&[0xFF; 100]);
    open(&mut codec, &longer, &birth(cipher, 1, 12)).unwrap();

    let empty = Arc::new(Keyring::new());
    let mut stranger = RecordCodec::new(Engines::portable(), Arc::clone(&empty));
    assert!(matches!(
        open(&mut stranger, &record, &birth(cipher, 1, 12)),
        Err(OpenError::NoSubkey(NoSubkey::NoKey { .. }))
    ));
    empty.insert(lineage_key(cipher, 2));
    assert!(matches!(open(&mut stranger, &record, &birth(cipher, 1, 12)), Err(OpenError::BadTag)));
    empty.insert(lineage_key(cipher, 1));
    open(&mut stranger, &record, &birth(cipher, 1, 12)).unwrap();
    empty.forget(LINEAGE);
    assert!(matches!(
        open(&mut stranger, &record, &birth(cipher, 1, 12)),
        Err(OpenError::NoSubkey(NoSubkey::NoKey { .. }))
    ));
}

/// H120 through the record: payloads replaced by hostile packed bytes, sealed with the right key, so that tag and checksum
/// hold: what comes out is an error or the plaintext, by the block checksums.
#[test]
fn h120_hostile_payloads_with_valid_tags_never_give_wrong_data() {
    let mut random = StdRng::seed_from_u64(120);
    let mut codec = codec();
    let plain = plain(4096);
    for round in 0..4000u32 {
        let compression = if round % 2 == 0 { Compression::Lz4 } else { Compression::Zstd { level: 1 } };
        let cipher = Cipher::ALL[round as usize % 4];
        let mut key = sealing_key(cipher, 1);
        let mut record = seal(&mut codec, &mut key, compression, &plain, 12);
        let mut header = Header::parse(&record).unwrap();
        assert_ne!(header.codec, Codec::Raw);
        codec::tests::tamper_inside(&mut header, &key, &mut record, |inner| {
            for _ in 0..random.random_range(1..6) {
                let at = random.random_range(4..inner.len());
                inner[at] = random.random();
            }
        });
        match open(&mut codec, &record, &birth(cipher, 1, 12)) {
            Ok(opened) => assert!(opened == plain, "round {round}: wrong data"),
            Err(OpenError::Decompress(_) | OpenError::BlockCrc { .. }) => {}
            Err(other) => panic!("round {round}: {other}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever bytes a disk gives: an error or a consistent header, never a panic.
    #[test]
    fn any_bytes_parse_to_an_error_or_a_consistent_header(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        plausible: bool,
        shift in 0u8..70,
        count in prop_oneof![0u64..200, any::<u64>()],
        lba: u64,
    ) {
        let mut bytes = bytes;
        if plausible && bytes.len() >= HEADER_BYTES {
            bytes[..4].copy_from_slice(b"SREC");
            bytes[4] = 1;
            bytes[5] = bytes[5] % 4 + 1;
            bytes[6] %= 3;
            bytes[7] = bytes[7] % 4 + 1;
            bytes[14] = shift;
            bytes[15] = 0;
            bytes[40..48].copy_from_slice(&lba.to_le_bytes());
            bytes[48..56].copy_from_slice(&count.to_le_bytes());
        }
        if let Ok(header) = Header::parse(&bytes) {
            prop_assert!(header.record_bytes() <= MAX_RECORD_BYTES);
            prop_assert!(header.birth.lba.checked_add(header.birth.block_count).is_some());
        }
        let mut out = vec![0; MAX_PLAIN_BYTES];
        prop_assert!(codec().open_any(&bytes, &mut out).is_err());
    }
}
