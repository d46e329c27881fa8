//! AES-XTS (IEEE 1619, NIST SP 800-38E) over data units of 16 bytes to 16 MiB, with ciphertext stealing.
//!
//! Owns the engines, key schedules and the tweak's arithmetic. Must not know how data units are numbered. Invariant:
//! encryption and decryption keep the length; nothing is authenticated, and nobody may claim that it is.

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit, consts::U16};
use aes::{Aes128Dec, Aes128Enc, Aes256Dec, Aes256Enc};
use serde::Serialize;

/// Bytes of an AES block: the shortest data unit.
pub const BLOCK_BYTES: usize = 16;
/// IEEE 1619 §5.1: at most 2^20 blocks a data unit.
pub const MAX_UNIT_BYTES: usize = BLOCK_BYTES << 20;

/// One implementation of AES-XTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// The crate `aes` (AES-NI or Armv8 where the CPU has them, bit-sliced elsewhere) under our tweak loop.
    Aes,
}

impl Engine {
    /// The engines that run on this CPU, the portable one first.
    pub fn available() -> Vec<Engine> {
        vec![Engine::Aes]
    }

    /// The name that reports show.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Aes => "aes",
        }
    }
}

/// Why a key or a data unit was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum XtsError {
    #[error("an AES-XTS key is 32 or 64 bytes long, not {0}")]
    KeyLength(usize),
    #[error("the two halves of an AES-XTS key must differ")]
    EqualHalves,
    #[error("an AES-XTS data unit is 16 bytes to 16 MiB long, not {0} bytes")]
    UnitLength(usize),
}

/// A key ready for use, schedules for both directions. Wiped on drop by the crate beneath.
pub struct XtsKey(Box<Schedules>);

enum Schedules {
    Aes128 { encrypt: Aes128Enc, decrypt: Aes128Dec, tweak: Aes128Enc },
    Aes256 { encrypt: Aes256Enc, decrypt: Aes256Dec, tweak: Aes256Enc },
}

type Block = Array<u8, U16>;

/// Blocks handed to the cipher at once: enough for its widest backend, few enough for the first-level cache.
const BATCH_BLOCKS: usize = 32;

impl XtsKey {
    /// A context for a key of 32 bytes (AES-128) or 64 (AES-256): the data key, then the tweak key.
    pub fn new(_engine: Engine, key: &[u8]) -> Result<Self, XtsError> {
        let (data, tweak) = key.split_at(key.len() / 2);
        if !matches!(key.len(), 32 | 64) {
            return Err(XtsError::KeyLength(key.len()));
        }
        if data == tweak {
            return Err(XtsError::EqualHalves);
        }
        let refused = |_| XtsError::KeyLength(key.len());
        let schedules = if key.len() == 32 {
            Schedules::Aes128 {
                encrypt: Aes128Enc::new_from_slice(data).map_err(refused)?,
                decrypt: Aes128Dec::new_from_slice(data).map_err(refused)?,
                tweak: Aes128Enc::new_from_slice(tweak).map_err(refused)?,
            }
        } else {
            Schedules::Aes256 {
                encrypt: Aes256Enc::new_from_slice(data).map_err(refused)?,
                decrypt: Aes256Dec::new_from_slice(data).map_err(refused)?,
                tweak: Aes256Enc::new_from_slice(tweak).map_err(refused)?,
            }
        };
        Ok(Self(Box::new(schedules)))
    }

    /// Encrypts one data unit in place. `unit` is its number, which IEEE 1619 takes as a little-endian 128-bit value.
    pub fn encrypt(&self, unit: u128, data: &mut [u8]) -> Result<(), XtsError> {
        check_length(data.len())?;
        match self.0.as_ref() {
            Schedules::Aes128 { encrypt, tweak, .. } => encrypt_unit(encrypt, first_tweak(tweak, unit), data),
            Schedules::Aes256 { encrypt, tweak, .. } => encrypt_unit(encrypt, first_tweak(tweak, unit), data),
        }
        Ok(())
    }

    /// Decrypts one data unit in place.
    pub fn decrypt(&self, unit: u128, data: &mut [u8]) -> Result<(), XtsError> {
        check_length(data.len())?;
        match self.0.as_ref() {
            Schedules::Aes128 { decrypt, tweak, .. } => decrypt_unit(decrypt, first_tweak(tweak, unit), data),
            Schedules::Aes256 { decrypt, tweak, .. } => decrypt_unit(decrypt, first_tweak(tweak, unit), data),
        }
        Ok(())
    }
}

fn check_length(len_bytes: usize) -> Result<(), XtsError> {
    if (BLOCK_BYTES..=MAX_UNIT_BYTES).contains(&len_bytes) { Ok(()) } else { Err(XtsError::UnitLength(len_bytes)) }
}

fn first_tweak(key: &impl BlockCipherEncrypt<BlockSize = U16>, unit: u128) -> u128 {
    let mut block = Block::from(unit.to_le_bytes());
    key.encrypt_block(&mut block);
    u128::from_le_bytes(block.into())
}

/// The tweak of the next block: times x in GF(2^128) modulo x^128+x^7+x^2+x+1 (IEEE 1619 §5.2).
fn next_tweak(tweak: u128) -> u128 {
    (tweak << 1) ^ if tweak >> 127 == 1 { 0x87 } else { 0 }
}

fn encrypt_unit(cipher: &impl BlockCipherEncrypt<BlockSize = U16>, tweak: u128, data: &mut [u8]) {
    let (whole, tail_bytes) = split(data.len());
    let tweak = batches(&mut data[..whole], tweak, |blocks| cipher.encrypt_blocks(blocks));
    if tail_bytes == 0 {
        return;
    }
    // IEEE 1619 §5.3.2: the last whole block's ciphertext lends its end to the short one, and is replaced by the
    // encryption of short plaintext + that end.
    let (head, short) = data.split_at_mut(whole);
    let last = &mut head[whole - BLOCK_BYTES..];
    let (lent, _) = last.split_at_mut(tail_bytes);
    lent.swap_with_slice(short);
    batches(last, tweak, |blocks| cipher.encrypt_blocks(blocks));
}

fn decrypt_unit(cipher: &impl BlockCipherDecrypt<BlockSize = U16>, tweak: u128, data: &mut [u8]) {
    let (whole, tail_bytes) = split(data.len());
    if tail_bytes == 0 {
        batches(&mut data[..whole], tweak, |blocks| cipher.decrypt_blocks(blocks));
        return;
    }
    // IEEE 1619 §5.4.2: the last whole block was encrypted under the tweak after its own.
    let before = whole - BLOCK_BYTES;
    let tweak = batches(&mut data[..before], tweak, |blocks| cipher.decrypt_blocks(blocks));
    let (head, short) = data.split_at_mut(whole);
    let last = &mut head[before..];
    batches(last, next_tweak(tweak), |blocks| cipher.decrypt_blocks(blocks));
    let (lent, _) = last.split_at_mut(tail_bytes);
    lent.swap_with_slice(short);
    batches(last, tweak, |blocks| cipher.decrypt_blocks(blocks));
}

/// How many bytes are whole blocks, and how many are left over.
fn split(len_bytes: usize) -> (usize, usize) {
    let tail_bytes = len_bytes % BLOCK_BYTES;
    (len_bytes - tail_bytes, tail_bytes)
}

/// Runs `cipher` over whole blocks between two XORs with their tweaks; gives the tweak after the last block.
fn batches(data: &mut [u8], mut tweak: u128, cipher: impl Fn(&mut [Block])) -> u128 {
    let mut tweaks = [0u128; BATCH_BLOCKS];
    let (blocks, _) = Array::slice_as_chunks_mut(data);
    for batch in blocks.chunks_mut(BATCH_BLOCKS) {
        for (block, slot) in batch.iter_mut().zip(&mut tweaks) {
            *slot = tweak;
            xor(block, tweak);
            tweak = next_tweak(tweak);
        }
        cipher(batch);
        for (block, &used) in batch.iter_mut().zip(&tweaks) {
            xor(block, used);
        }
    }
    tweak
}

fn xor(block: &mut Block, tweak: u128) {
    let bytes: [u8; BLOCK_BYTES] = (*block).into();
    *block = (u128::from_le_bytes(bytes) ^ tweak).to_le_bytes().into();
}

#[cfg(test)]
mod tests;
