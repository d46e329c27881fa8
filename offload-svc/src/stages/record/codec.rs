//! Sealing and opening records.
//!
//! Owns the order of the stages and the scratch memory that they share; one [`RecordCodec`] per thread. Must not know where
//! records rest. Invariant: every byte given back has passed the record's checksum, its tag where the cipher has one, and
//! the checksum of its plaintext block.

use std::sync::Arc;

use zeroize::Zeroize;

use super::header::{self, BOUND_BYTES, Birth, HEADER_BYTES, Header, HeaderError, Kind, MAX_RECORD_BYTES, Owner};
use super::header::{XTS_UNIT_BYTES, sealed_bound};
use crate::stages::cipher::TAG_BYTES;
use crate::stages::cipher::gcm::{self, GcmError};
use crate::stages::cipher::xts::XtsError;
use crate::stages::compress::{Codec, CompressError, Compression, Compressor, Decompressor, Packed};
use crate::stages::engines::Engines;
use crate::stages::keys::{Keyring, NoSubkey, NoncesSpent, OpeningKeys, SealingKey, Subkey};

/// Bytes of one block checksum in the payload's table.
const CRC_BYTES: usize = 4;

/// What to seal, and how.
#[derive(Clone, Copy, Debug)]
pub struct Sealing<'a> {
    pub kind: Kind,
    pub birth: Birth,
    pub owner: Owner,
    pub compression: Compression,
    /// The CRC32C of each plaintext block, where it is known already (a verified data digest that covers just the block);
    /// otherwise it is computed here. It is what reads are checked against, so it must be the host's, not a guess.
    pub block_crcs: Option<&'a [u32]>,
}

/// Why a record was not sealed.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    #[error("the birth is no record's")]
    Birth(#[source] HeaderError),
    #[error("the sealing key is another lineage's or epoch's")]
    OtherKey,
    #[error("{given_bytes} bytes of plaintext where the birth says {expected_bytes}")]
    PlainLength { given_bytes: usize, expected_bytes: usize },
    #[error("{given} block checksums for {expected} blocks")]
    CrcCount { given: usize, expected: usize },
    #[error("the output has {given_bytes} bytes; a record may need {needed_bytes}")]
    OutputTooShort { given_bytes: usize, needed_bytes: usize },
    #[error(transparent)]
    NoncesSpent(#[from] NoncesSpent),
    #[error(transparent)]
    Compress(#[from] CompressError),
    #[error(transparent)]
    Gcm(#[from] GcmError),
    #[error(transparent)]
    Xts(#[from] XtsError),
}

/// Why a record was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("a record of another birth stands here: {found:?}")]
    OtherBirth { found: Box<Birth> },
    #[error("a record of kind {found:?} stands where {expected:?} should")]
    OtherKind { found: Kind, expected: Kind },
    #[error(transparent)]
    NoSubkey(#[from] NoSubkey),
    #[error("the output has {given_bytes} bytes, the record {needed_bytes}")]
    OutputTooShort { given_bytes: usize, needed_bytes: usize },
    #[error("the authentication tag does not match")]
    BadTag,
    #[error("the payload cannot be deciphered")]
    Xts(#[source] XtsError),
    #[error(transparent)]
    Decompress(#[from] CompressError),
    #[error("plaintext block {block} of the record does not match its checksum")]
    BlockCrc { block: usize },
}

/// A thread's contexts for sealing and opening: compressors, open subkeys and scratch memory, all reused.
///
/// What a compressor packed is unpacked and compared before it is sealed, and stored raw where it differs: a fault of the
/// compressor, or of the CPU beneath it, costs space and not data. [`RecordCodec::verify_packing`] turns that off.
pub struct RecordCodec {
    engines: Engines,
    keyring: Arc<Keyring>,
    opening: OpeningKeys,
    compressor: Compressor,
    decompressor: Decompressor,
    verify_packing: bool,
    packing_faults: u64,
    /// Where payloads are deciphered. Wiped on drop; between records it holds the last one's.
    scratch: Vec<u8>,
}

impl Drop for RecordCodec {
    fn drop(&mut self) {
        self.scratch.zeroize();
    }
}

impl RecordCodec {
    pub fn new(engines: Engines, keyring: Arc<Keyring>) -> Self {
        Self {
            engines,
            keyring,
            opening: OpeningKeys::default(),
            compressor: Compressor::default(),
            decompressor: Decompressor::default(),
            verify_packing: true,
            packing_faults: 0,
            scratch: vec![0; MAX_RECORD_BYTES - HEADER_BYTES],
        }
    }

    /// Whether packed data is unpacked and compared before it is sealed; it is unless turned off here.
    pub fn verify_packing(&mut self, verify: bool) {
        self.verify_packing = verify;
    }

    /// How often packed data did not unpack to what went in. Anything but zero wants a look at the hardware.
    pub fn packing_faults(&self) -> u64 {
        self.packing_faults
    }

    /// Seals `plain` into the front of `out` and gives the record's header; [`Header::record_bytes`] is its length. `out` has
    /// [`sealed_bound`] bytes at least. `plain` is empty for kinds without payload. Takes one nonce of `key`.
    pub fn seal(
        &mut self,
        sealing: &Sealing<'_>,
        plain: &[u8],
        key: &mut SealingKey,
        out: &mut [u8],
    ) -> Result<Header, SealError> {
        check_sealing(sealing, plain, key, out)?;
        let (head, body) = out
            .split_first_chunk_mut::<HEADER_BYTES>()
            .ok_or(SealError::OutputTooShort { given_bytes: 0, needed_bytes: HEADER_BYTES })?;
        let nonce = key.take_nonce()?;
        let packed = self.fill(sealing, plain, body).inspect_err(|_| body.zeroize())?;
        let payload_bytes =
            header::payload_bytes(sealing.kind, key.cipher(), sealing.birth.block_count, packed.len_bytes);
        let mut header = Header {
            kind: sealing.kind,
            codec: packed.codec,
            cipher: key.cipher(),
            birth: sealing.birth,
            owner: sealing.owner,
            // Both are at most MAX_RECORD_BYTES.
            packed_bytes: packed.len_bytes as u32,
            payload_bytes: payload_bytes as u32,
            salt: key.salt(),
            nonce,
            tag: [0; TAG_BYTES],
            crc: 0,
        };
        let payload = &mut body[..payload_bytes];
        payload[payload_bytes - padding(&header)..].fill(0);
        encipher(&mut header, &key.subkey, payload).inspect_err(|_| payload.zeroize())?;
        header.write(head, payload);
        Ok(header)
    }

    /// Lays the block checksums and the packed data at the front of `body`.
    fn fill(&mut self, sealing: &Sealing<'_>, plain: &[u8], body: &mut [u8]) -> Result<Packed, SealError> {
        if !sealing.kind.has_payload() {
            return Ok(Packed { codec: Codec::Raw, len_bytes: 0 });
        }
        let block_bytes = 1 << sealing.birth.block_shift;
        let (table, packed) = body.split_at_mut(CRC_BYTES * (plain.len() / block_bytes));
        for (index, (slot, block)) in table.chunks_exact_mut(CRC_BYTES).zip(plain.chunks_exact(block_bytes)).enumerate()
        {
            let known = sealing.block_crcs.and_then(|crcs| crcs.get(index).copied());
            let crc = known.unwrap_or_else(|| self.engines.crc.checksum(block));
            slot.copy_from_slice(&crc.to_le_bytes());
        }
        self.pack(sealing.compression, plain, packed)
    }

    fn pack(&mut self, policy: Compression, plain: &[u8], out: &mut [u8]) -> Result<Packed, SealError> {
        let packed = self.compressor.pack(policy, plain, out)?;
        if packed.codec == Codec::Raw || !self.verify_packing {
            return Ok(packed);
        }
        let again = &mut self.scratch[..plain.len()];
        let unpacked = self.decompressor.unpack(packed.codec, &out[..packed.len_bytes], again);
        if unpacked.is_ok() && again == plain {
            return Ok(packed);
        }
        self.packing_faults += 1;
        Ok(self.compressor.pack(Compression::None, plain, out)?)
    }

    /// Opens `record`, which must be of `kind` and `birth`, into the front of `out`; gives its header. `record` may go on past
    /// the record's end. After an error, `out` holds what it held or zeroes.
    pub fn open(&mut self, record: &[u8], kind: Kind, birth: &Birth, out: &mut [u8]) -> Result<Header, OpenError> {
        let header = Header::verify(record)?;
        if header.birth != *birth {
            return Err(OpenError::OtherBirth { found: Box::new(header.birth) });
        }
        if header.kind != kind {
            return Err(OpenError::OtherKind { found: header.kind, expected: kind });
        }
        self.open_verified(&header, record, out)?;
        Ok(header)
    }

    /// Opens whatever record stands at the front of `record`, for those who learn its birth from it: replay and audit. Under
    /// GCM its tag says that the birth is genuine; who it belongs to is for the caller to judge.
    pub fn open_any(&mut self, record: &[u8], out: &mut [u8]) -> Result<Header, OpenError> {
        let header = Header::verify(record)?;
        self.open_verified(&header, record, out)?;
        Ok(header)
    }

    /// Opens a record whose checksum has been compared.
    fn open_verified(&mut self, header: &Header, record: &[u8], out: &mut [u8]) -> Result<(), OpenError> {
        let needed_bytes = if header.kind.has_payload() { header.birth.plain_bytes().unwrap_or_default() } else { 0 };
        let given_bytes = out.len();
        let plain = out.get_mut(..needed_bytes).ok_or(OpenError::OutputTooShort { given_bytes, needed_bytes })?;
        let payload = &record[HEADER_BYTES..header.record_bytes()];
        let Birth { lineage, key_epoch: epoch, .. } = header.birth;
        let key = (lineage, epoch, header.salt);
        let subkey = self.opening.subkey(&self.keyring, key, header.cipher, &self.engines)?;
        let inner = &mut self.scratch[..payload.len()];
        decipher(header, record, payload, subkey, inner).inspect_err(|_| inner.zeroize())?;
        if !header.kind.has_payload() {
            return Ok(());
        }
        let (table, rest) = inner.split_at(CRC_BYTES * header.birth.block_count as usize);
        let packed = &rest[..header.packed_bytes as usize];
        let opened = self.decompressor.unpack(header.codec, packed, plain).map_err(OpenError::from);
        let block_bytes = 1 << header.birth.block_shift;
        opened.and_then(|()| check_blocks(&self.engines, table, plain, block_bytes)).inspect_err(|_| plain.zeroize())
    }
}

fn check_sealing(sealing: &Sealing<'_>, plain: &[u8], key: &SealingKey, out: &[u8]) -> Result<(), SealError> {
    let birth = &sealing.birth;
    birth.check(sealing.kind).map_err(SealError::Birth)?;
    if birth.lineage != key.lineage() || birth.key_epoch != key.epoch() {
        return Err(SealError::OtherKey);
    }
    let expected_bytes = if sealing.kind.has_payload() { birth.plain_bytes().unwrap_or_default() } else { 0 };
    if plain.len() != expected_bytes {
        return Err(SealError::PlainLength { given_bytes: plain.len(), expected_bytes });
    }
    if let Some(crcs) = sealing.block_crcs {
        let expected = expected_bytes >> birth.block_shift;
        if crcs.len() != expected {
            return Err(SealError::CrcCount { given: crcs.len(), expected });
        }
    }
    let needed_bytes = sealed_bound(expected_bytes, birth.block_shift);
    if out.len() < needed_bytes {
        return Err(SealError::OutputTooShort { given_bytes: out.len(), needed_bytes });
    }
    Ok(())
}

/// Bytes at the payload's end that are no data.
fn padding(header: &Header) -> usize {
    if !header.kind.has_payload() {
        return 0;
    }
    let table_bytes = CRC_BYTES * header.birth.block_count as usize;
    header.payload_bytes as usize - table_bytes - header.packed_bytes as usize
}

/// The nonce of a record: its counter, big-endian, after four zero bytes. The subkey is the salt's own, so the counter alone
/// makes it unique.
fn gcm_nonce(header: &Header) -> [u8; gcm::NONCE_BYTES] {
    let mut nonce = [0u8; gcm::NONCE_BYTES];
    nonce[gcm::NONCE_BYTES - 8..].copy_from_slice(&header.nonce.to_be_bytes());
    nonce
}

/// The number of a record's data unit: its counter times 256 plus the unit's index (17 at most). Unique under the subkey, so
/// the same plaintext at the same LBA enciphers differently each time; XTS over LBAs would show which blocks were restored.
fn xts_unit(header: &Header, index: usize) -> u128 {
    u128::from(header.nonce) << 8 | index as u128
}

fn encipher(header: &mut Header, subkey: &Subkey, payload: &mut [u8]) -> Result<(), SealError> {
    match subkey {
        Subkey::Gcm(key) => header.tag = key.seal(&gcm_nonce(header), &header.bound(), payload)?,
        Subkey::Xts(key) => {
            for (index, unit) in payload.chunks_mut(XTS_UNIT_BYTES).enumerate() {
                key.encrypt(xts_unit(header, index), unit)?;
            }
        }
    }
    Ok(())
}

fn decipher(
    header: &Header,
    record: &[u8],
    payload: &[u8],
    subkey: &Subkey,
    inner: &mut [u8],
) -> Result<(), OpenError> {
    match subkey {
        Subkey::Gcm(key) => {
            let bound = &record[..BOUND_BYTES];
            key.open(&gcm_nonce(header), bound, payload, &header.tag, inner).map_err(|_| OpenError::BadTag)
        }
        Subkey::Xts(key) => {
            inner.copy_from_slice(payload);
            let mut units = inner.chunks_mut(XTS_UNIT_BYTES).enumerate();
            units.try_for_each(|(index, unit)| key.decrypt(xts_unit(header, index), unit)).map_err(OpenError::Xts)
        }
    }
}

fn check_blocks(engines: &Engines, table: &[u8], plain: &[u8], block_bytes: usize) -> Result<(), OpenError> {
    for (block, (slot, bytes)) in table.chunks_exact(CRC_BYTES).zip(plain.chunks_exact(block_bytes)).enumerate() {
        if slot != engines.crc.checksum(bytes).to_le_bytes() {
            return Err(OpenError::BlockCrc { block });
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    impl RecordCodec {
        /// Makes the compressor give wrong bytes.
        pub fn break_compressor(&mut self) {
            self.compressor.break_it();
        }
    }

    /// Changes the plaintext of a sealed payload and seals it again under the same key: a valid record of bad content.
    pub fn tamper_inside(header: &mut Header, key: &SealingKey, record: &mut [u8], change: impl FnOnce(&mut [u8])) {
        let mut inner = vec![0; header.payload_bytes as usize];
        decipher(header, record, &record[HEADER_BYTES..], &key.subkey, &mut inner).unwrap();
        change(&mut inner);
        encipher(header, &key.subkey, &mut inner).unwrap();
        record[HEADER_BYTES..].copy_from_slice(&inner);
        let (head, payload) = record.split_first_chunk_mut().unwrap();
        header.write(head, payload);
    }
}
