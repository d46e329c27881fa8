//! CRC32C engines against published vectors and a bitwise oracle.

use super::{Engine, combine};

/// RFC 3720 §12.1 taken literally: reflected polynomial 0x1EDC6F41, one bit at a time.
fn bitwise(crc: u32, bytes: &[u8]) -> u32 {
    let mut state = !crc;
    for byte in bytes {
        state ^= u32::from(*byte);
        for _ in 0..8 {
            state = state >> 1 ^ if state & 1 == 1 { 0x82F6_3B78 } else { 0 };
        }
    }
    !state
}

/// H132: RFC 3720 §B.4, as the bytes stand on the wire.
#[test]
fn h132_rfc_3720_vectors() {
    let read_pdu: [u8; 48] = [
        0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 0x04, 0, 0, 0, 0, 0x14, 0, 0, 0,
        0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0,
    ];
    let rising: [u8; 32] = std::array::from_fn(|index| index as u8);
    let falling: [u8; 32] = std::array::from_fn(|index| 31 - index as u8);
    let vectors: [(&[u8], [u8; 4]); 5] = [
        (&[0; 32], [0xaa, 0x36, 0x91, 0x8a]),
        (&[0xff; 32], [0x43, 0xab, 0xa8, 0x62]),
        (&rising, [0x4e, 0x79, 0xdd, 0x46]),
        (&falling, [0x5c, 0xdb, 0x3f, 0x11]),
        (&read_pdu, [0x56, 0x3a, 0x96, 0xd9]),
    ];
    for engine in Engine::ALL {
        for (bytes, wire) in vectors {
            assert_eq!(engine.checksum(bytes).to_le_bytes(), wire, "{engine:?}");
        }
    }
}

/// H132: lengths 0..=1024, offsets 0..64, three seeds, every engine.
#[test]
fn h132_every_length_and_offset_equals_the_bitwise_oracle() {
    let bytes: Vec<u8> = (0..2048u32).map(|index| (index.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect();
    for offset in 0..64 {
        for seed in [0, u32::MAX, 0x1234_ABCD] {
            let mut expected = seed;
            for length in 0..=1024 {
                let input = &bytes[offset..offset + length];
                for engine in Engine::ALL {
                    assert_eq!(engine.append(seed, input), expected, "{engine:?} {offset}+{length} from {seed:x}");
                }
                expected = bitwise(expected, &bytes[offset + length..=offset + length]);
            }
        }
    }
}

#[test]
fn long_inputs_split_anywhere_combine_to_the_whole() {
    let bytes: Vec<u8> = (0..70_001u32).map(|index| (index.wrapping_mul(index) >> 7) as u8).collect();
    let whole = bitwise(0, &bytes);
    for split in [0, 1, 15, 4096, 65_535, 65_536, 70_000, 70_001] {
        let (front, back) = bytes.split_at(split);
        for engine in Engine::ALL {
            assert_eq!(engine.checksum(&bytes), whole, "{engine:?}");
            assert_eq!(engine.append(engine.checksum(front), back), whole, "{engine:?} at {split}");
            assert_eq!(
                combine(engine.checksum(front), engine.checksum(back), back.len()),
                whole,
                "{engine:?} at {split}"
            );
        }
    }
}
