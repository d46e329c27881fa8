//! The header of a record: its layout, and the one place where stored bytes become a checked [`Header`].
//!
//! Owns the bytes on disk. Must not know keys or codecs' workings. Invariant: a [`Header`] that exists is consistent: its
//! lengths agree with one another and are bounded, whatever the bytes were.

use crate::stages::cipher::{Cipher, TAG_BYTES, xts};
use crate::stages::compress::Codec;
use crate::stages::crc;
use crate::stages::keys::{KeyEpoch, LineageId, Salt};

/// Bytes of a header. The payload follows at once.
pub const HEADER_BYTES: usize = 112;
/// The most plaintext a record holds.
pub const MAX_PLAIN_BYTES: usize = 64 << 10;
/// The longest record: all of [`MAX_PLAIN_BYTES`] stored raw in 512-byte blocks.
pub const MAX_RECORD_BYTES: usize = sealed_bound(MAX_PLAIN_BYTES, MIN_BLOCK_SHIFT);
/// 512-byte blocks are the smallest.
pub const MIN_BLOCK_SHIFT: u8 = 9;
/// A record holds one block at least, so blocks are no longer than it.
pub const MAX_BLOCK_SHIFT: u8 = 16;

/// The GCM tag authenticates all that stands before it.
pub(super) const BOUND_BYTES: usize = 92;
/// XTS cuts the payload into data units of 4 KiB, the last one shorter: what the mlx5 crypto engine takes.
pub(super) const XTS_UNIT_BYTES: usize = 4096;
const CRC_AT: usize = 108;
/// A last data unit of 1 to 15 bytes is padded to the shortest one.
const XTS_PADDING_BYTES: usize = xts::BLOCK_BYTES - 1;
const MAGIC: [u8; 4] = *b"SREC";
const VERSION: u8 = 1;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Blocks of a volume.
    Data = 1,
    /// The blocks hold zeroes, by Write Zeroes. No payload.
    Zeroes = 2,
    /// The blocks are deallocated and read as zeroes. No payload.
    Deallocate = 3,
    /// Blocks of the pool's own metadata (map pages, tables), sealed like data.
    Metadata = 4,
}

impl Kind {
    fn from_id(id: u8) -> Option<Self> {
        [Kind::Data, Kind::Zeroes, Kind::Deallocate, Kind::Metadata].into_iter().find(|kind| *kind as u8 == id)
    }

    /// Whether a payload follows the header.
    pub fn has_payload(self) -> bool {
        matches!(self, Kind::Data | Kind::Metadata)
    }
}

/// What a record is the record of. The map entry that leads to it holds the same, so a stale, moved or misdirected record
/// is found and not returned; it keeps its birth when the cleaner moves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Birth {
    pub lineage: LineageId,
    pub key_epoch: KeyEpoch,
    /// First block, in blocks of the volume.
    pub lba: u64,
    pub block_count: u64,
    /// Block size is `1 << block_shift` bytes.
    pub block_shift: u8,
    /// Rises with every write of the volume's shard. Lineage, key epoch, LBA and generation name one record and no other, so a
    /// clone that writes takes a key epoch of its own.
    pub generation: u64,
}

/// Which volume and shard of it wrote a record first. Authenticated, but not part of its birth: clones read it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    pub volume: u32,
    pub shard: u16,
}

/// A record's header.
///
/// Little-endian, version 1:
///
/// | bytes | field | why |
/// |---|---|---|
/// | 0..4 | magic `SREC` | a scan finds where records may begin |
/// | 4 | version, 1 | |
/// | 5 | kind: 1 data, 2 zeroes, 3 deallocate, 4 metadata | |
/// | 6 | codec: 0 raw, 1 LZ4 block, 2 zstd frame | what the bytes are, not what the volume asked for |
/// | 7 | cipher: 1 AES-256-GCM, 2 AES-128-GCM, 3 AES-128-XTS, 4 AES-256-XTS | |
/// | 8..12 | key epoch | which of the lineage's keys |
/// | 12..14 | volume shard | replay hands the record to its shard |
/// | 14 | block shift | block size as a power of two |
/// | 15 | 0 | |
/// | 16..32 | lineage | whose key |
/// | 32..36 | volume | clones share a lineage, so replay needs it |
/// | 36..40 | packed length | of the compressed (or raw) data alone: the cipher's padding is not the codec's |
/// | 40..48 | first LBA | |
/// | 48..56 | block count | 64 bits: one marker can deallocate a whole volume |
/// | 56..64 | generation | |
/// | 64..80 | salt | which subkey |
/// | 80..88 | nonce counter | unique under the salt |
/// | 88..92 | payload length | what follows the header |
/// | 92..108 | GCM tag over bytes 0..92 and the payload; zeroes under XTS | |
/// | 108..112 | CRC32C of bytes 0..108 and the payload | damage is found without a key, and under XTS at all |
///
/// Encryption: the subkey is the lineage key's for this salt (HKDF, see `stages/keys/subkey.rs`). GCM's nonce is four zero bytes
/// and the nonce counter, big-endian. XTS takes the payload in data units of 4 KiB, the last one shorter (ciphertext
/// stealing), numbered `nonce counter * 256 + index`.
///
/// The payload, before encryption: a table of the CRC32C of each plaintext block (4 bytes each, little-endian), the packed
/// data, and under XTS zeroes up to the shortest data unit. The plaintext's length is not stored: it is
/// `block_count << block_shift`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub codec: Codec,
    pub cipher: Cipher,
    pub birth: Birth,
    pub owner: Owner,
    pub packed_bytes: u32,
    pub payload_bytes: u32,
    pub salt: Salt,
    pub nonce: u64,
    pub tag: [u8; TAG_BYTES],
    pub crc: u32,
}

/// Why bytes are no record of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("{given_bytes} bytes are too few for a record of {needed_bytes}")]
    TooShort { given_bytes: usize, needed_bytes: usize },
    #[error("no record begins here")]
    NoMagic,
    #[error("record version {0} is unknown")]
    UnknownVersion(u8),
    #[error("record kind {0} is unknown")]
    UnknownKind(u8),
    #[error("codec {0} is unknown")]
    UnknownCodec(u8),
    #[error("cipher {0} is unknown")]
    UnknownCipher(u8),
    #[error("reserved header bytes are not zero")]
    Reserved,
    #[error("block shift {0} is out of range")]
    BlockShift(u8),
    #[error("{block_count} blocks of {block_bytes} bytes are no record's")]
    BlockCount { block_count: u64, block_bytes: u32 },
    #[error("blocks {lba} + {block_count} pass the end of the address space")]
    LbaRange { lba: u64, block_count: u64 },
    #[error("packed length {0} does not fit the record")]
    PackedLength(u32),
    #[error("payload length {given} should be {expected}")]
    PayloadLength { given: u32, expected: u32 },
    #[error("the record's checksum does not match")]
    Crc,
}

/// The most bytes that a record of `plain_bytes` takes, whatever the data, codec and cipher: the plaintext, its header, four
/// bytes a block, and the padding of a last XTS data unit.
pub const fn sealed_bound(plain_bytes: usize, block_shift: u8) -> usize {
    HEADER_BYTES + plain_bytes + 4 * plain_bytes.div_ceil(1 << block_shift) + XTS_PADDING_BYTES
}

impl Birth {
    /// Plaintext length in bytes, for kinds that have a payload.
    pub fn plain_bytes(&self) -> Option<usize> {
        if !(MIN_BLOCK_SHIFT..=MAX_BLOCK_SHIFT).contains(&self.block_shift) {
            return None;
        }
        let blocks = usize::try_from(self.block_count).ok()?;
        let bytes = blocks.checked_mul(1 << self.block_shift)?;
        (blocks > 0 && bytes <= MAX_PLAIN_BYTES).then_some(bytes)
    }

    pub(super) fn check(&self, kind: Kind) -> Result<(), HeaderError> {
        if !(MIN_BLOCK_SHIFT..=MAX_BLOCK_SHIFT).contains(&self.block_shift) {
            return Err(HeaderError::BlockShift(self.block_shift));
        }
        let (lba, block_count) = (self.lba, self.block_count);
        if block_count == 0 || (kind.has_payload() && self.plain_bytes().is_none()) {
            return Err(HeaderError::BlockCount { block_count, block_bytes: 1 << self.block_shift });
        }
        let end = lba.checked_add(block_count).ok_or(HeaderError::LbaRange { lba, block_count })?;
        // Byte addresses stay within 64 bits too, so that nobody's arithmetic on a header can overflow.
        if end > u64::MAX >> self.block_shift {
            return Err(HeaderError::LbaRange { lba, block_count });
        }
        Ok(())
    }
}

/// Payload length: the table of block checksums, the packed data, and under XTS the padding to a whole shortest data unit.
/// Called for counts that [`Birth::check`] passed, so nothing overflows.
pub(super) fn payload_bytes(kind: Kind, cipher: Cipher, block_count: u64, packed_bytes: usize) -> usize {
    if !kind.has_payload() {
        return 0;
    }
    let inner = 4 * block_count as usize + packed_bytes;
    let last_unit = inner % XTS_UNIT_BYTES;
    if cipher.is_authenticated() || last_unit == 0 || last_unit >= xts::BLOCK_BYTES {
        return inner;
    }
    inner - last_unit + xts::BLOCK_BYTES
}

impl Header {
    /// Header and payload together.
    pub fn record_bytes(&self) -> usize {
        HEADER_BYTES + self.payload_bytes as usize
    }

    /// Reads the header at the front of `bytes`. Its fields are consistent with one another; the checksum is not looked at.
    pub fn parse(bytes: &[u8]) -> Result<Self, HeaderError> {
        let short = HeaderError::TooShort { given_bytes: bytes.len(), needed_bytes: HEADER_BYTES };
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(short)?;
        if bytes[..4] != MAGIC {
            return Err(HeaderError::NoMagic);
        }
        if bytes[4] != VERSION {
            return Err(HeaderError::UnknownVersion(bytes[4]));
        }
        if bytes[15] != 0 {
            return Err(HeaderError::Reserved);
        }
        let header = Self {
            kind: Kind::from_id(bytes[5]).ok_or(HeaderError::UnknownKind(bytes[5]))?,
            codec: Codec::from_id(bytes[6]).ok_or(HeaderError::UnknownCodec(bytes[6]))?,
            cipher: Cipher::from_id(bytes[7]).ok_or(HeaderError::UnknownCipher(bytes[7]))?,
            birth: Birth {
                lineage: LineageId(u128::from_le_bytes(field(bytes, 16))),
                key_epoch: KeyEpoch(u32::from_le_bytes(field(bytes, 8))),
                lba: u64::from_le_bytes(field(bytes, 40)),
                block_count: u64::from_le_bytes(field(bytes, 48)),
                block_shift: bytes[14],
                generation: u64::from_le_bytes(field(bytes, 56)),
            },
            owner: Owner { volume: u32::from_le_bytes(field(bytes, 32)), shard: u16::from_le_bytes(field(bytes, 12)) },
            packed_bytes: u32::from_le_bytes(field(bytes, 36)),
            payload_bytes: u32::from_le_bytes(field(bytes, 88)),
            salt: Salt(field(bytes, 64)),
            nonce: u64::from_le_bytes(field(bytes, 80)),
            tag: field(bytes, 92),
            crc: u32::from_le_bytes(field(bytes, CRC_AT)),
        };
        header.check()?;
        Ok(header)
    }

    /// Reads the header and compares the checksum over it and the payload: damage is found without any key. `record` may go on
    /// past the record's end.
    pub fn verify(record: &[u8]) -> Result<Self, HeaderError> {
        let header = Self::parse(record)?;
        let needed_bytes = header.record_bytes();
        let short = HeaderError::TooShort { given_bytes: record.len(), needed_bytes };
        let whole = record.get(..needed_bytes).ok_or(short)?;
        let (head, payload) = whole.split_at(HEADER_BYTES);
        let crc = crc::append(crc::crc32c(&head[..CRC_AT]), payload);
        if crc == header.crc { Ok(header) } else { Err(HeaderError::Crc) }
    }

    /// Writes the header to the front of `record`, whose payload is in place: fills in the checksum.
    pub(super) fn write(&mut self, head: &mut [u8; HEADER_BYTES], payload: &[u8]) {
        head[..BOUND_BYTES].copy_from_slice(&self.bound());
        head[BOUND_BYTES..CRC_AT].copy_from_slice(&self.tag);
        self.crc = crc::append(crc::crc32c(&head[..CRC_AT]), payload);
        head[CRC_AT..].copy_from_slice(&self.crc.to_le_bytes());
    }

    /// The bytes before the tag: what it authenticates.
    pub(super) fn bound(&self) -> [u8; BOUND_BYTES] {
        let mut bytes = [0u8; BOUND_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(4, &[VERSION, self.kind as u8, self.codec as u8, self.cipher.id()]);
        put(8, &self.birth.key_epoch.0.to_le_bytes());
        put(12, &self.owner.shard.to_le_bytes());
        put(14, &[self.birth.block_shift, 0]);
        put(16, &self.birth.lineage.0.to_le_bytes());
        put(32, &self.owner.volume.to_le_bytes());
        put(36, &self.packed_bytes.to_le_bytes());
        put(40, &self.birth.lba.to_le_bytes());
        put(48, &self.birth.block_count.to_le_bytes());
        put(56, &self.birth.generation.to_le_bytes());
        put(64, &self.salt.0);
        put(80, &self.nonce.to_le_bytes());
        put(88, &self.payload_bytes.to_le_bytes());
        bytes
    }

    fn check(&self) -> Result<(), HeaderError> {
        self.birth.check(self.kind)?;
        if !self.cipher.is_authenticated() && self.tag != [0; TAG_BYTES] {
            return Err(HeaderError::Reserved);
        }
        let plain_bytes = if self.kind.has_payload() { self.birth.plain_bytes().unwrap_or_default() } else { 0 };
        let packed_bytes = self.packed_bytes as usize;
        let fits = match self.codec {
            Codec::Raw => packed_bytes == plain_bytes,
            Codec::Lz4 | Codec::Zstd => packed_bytes > 0 && packed_bytes < plain_bytes,
        };
        if !fits {
            return Err(HeaderError::PackedLength(self.packed_bytes));
        }
        // At most MAX_PLAIN_BYTES and its table, so it fits a u32.
        let expected = payload_bytes(self.kind, self.cipher, self.birth.block_count, packed_bytes) as u32;
        if self.payload_bytes != expected {
            return Err(HeaderError::PayloadLength { given: self.payload_bytes, expected });
        }
        Ok(())
    }
}

/// The field at a constant offset of a header.
fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut field = [0u8; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}
