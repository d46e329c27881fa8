//! AES-XTS (IEEE 1619, NIST SP 800-38E) over data units of 16 bytes to 16 MiB, with ciphertext stealing.
//!
//! Owns the engines, key schedules and the tweak's arithmetic. Must not know how data units are numbered. Invariant:
//! encryption and decryption keep the length; nothing is authenticated, and nobody may claim that it is.

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit, consts::U16};
use aes::{Aes128Dec, Aes128Enc, Aes256Dec, Aes256Enc};
use serde::Serialize;

#[cfg(target_arch = "x86_64")]
#[path = "xts_vaes.rs"]
mod vaes;

/// Bytes of an AES block: the shortest data unit.
pub const BLOCK_BYTES: usize = 16;
/// IEEE 1619 §5.1: at most 2^20 blocks a data unit.
pub const MAX_UNIT_BYTES: usize = BLOCK_BYTES << 20;

/// One implementation of AES-XTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// The crate `aes` (AES-NI or Armv8 where the CPU has them, bit-sliced elsewhere) under our tweak loop. Portable, and the
    /// oracle.
    Aes,
    /// Our kernel on 256-bit VAES: two blocks an instruction, sixteen in flight.
    Vaes,
}

impl Engine {
    /// The engines that run on this CPU, the portable one first.
    pub fn available() -> Vec<Engine> {
        [Engine::Aes, Engine::Vaes].into_iter().filter(|engine| engine.is_supported()).collect()
    }

    /// Whether this CPU can run it.
    pub fn is_supported(self) -> bool {
        match self {
            Engine::Aes => true,
            #[cfg(target_arch = "x86_64")]
            Engine::Vaes => vaes::is_supported(),
            #[cfg(not(target_arch = "x86_64"))]
            Engine::Vaes => false,
        }
    }

    /// The name that reports show.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Aes => "aes",
            Engine::Vaes => "vaes-256",
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

/// A key ready for use, schedules for both directions. Wiped on drop.
pub struct XtsKey(Box<Schedules>);

enum Schedules {
    Aes128(Portable<Aes128Enc, Aes128Dec>),
    Aes256(Portable<Aes256Enc, Aes256Dec>),
    #[cfg(target_arch = "x86_64")]
    Vaes(vaes::Schedules),
}

impl XtsKey {
    /// A context for a key of 32 bytes (AES-128) or 64 (AES-256): the data key, then the tweak key. An engine that this CPU
    /// lacks gives way to the portable one.
    pub fn new(engine: Engine, key: &[u8]) -> Result<Self, XtsError> {
        let (data, tweak) = key.split_at(key.len() / 2);
        if !matches!(key.len(), 32 | 64) {
            return Err(XtsError::KeyLength(key.len()));
        }
        if data == tweak {
            return Err(XtsError::EqualHalves);
        }
        #[cfg(target_arch = "x86_64")]
        if engine == Engine::Vaes
            && let Some(schedules) = vaes::Schedules::new(data, tweak)
        {
            return Ok(Self(Box::new(Schedules::Vaes(schedules))));
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = engine;
        let schedules = if key.len() == 32 {
            Schedules::Aes128(Portable::new(data, tweak)?)
        } else {
            Schedules::Aes256(Portable::new(data, tweak)?)
        };
        Ok(Self(Box::new(schedules)))
    }

    /// Encrypts one data unit in place. `unit` is its number, which IEEE 1619 takes as a little-endian 128-bit value.
    pub fn encrypt(&self, unit: u128, data: &mut [u8]) -> Result<(), XtsError> {
        check_length(data.len())?;
        match self.0.as_ref() {
            Schedules::Aes128(key) => encrypt_unit(key, unit, data),
            Schedules::Aes256(key) => encrypt_unit(key, unit, data),
            #[cfg(target_arch = "x86_64")]
            Schedules::Vaes(key) => encrypt_unit(key, unit, data),
        }
        Ok(())
    }

    /// Decrypts one data unit in place.
    pub fn decrypt(&self, unit: u128, data: &mut [u8]) -> Result<(), XtsError> {
        check_length(data.len())?;
        match self.0.as_ref() {
            Schedules::Aes128(key) => decrypt_unit(key, unit, data),
            Schedules::Aes256(key) => decrypt_unit(key, unit, data),
            #[cfg(target_arch = "x86_64")]
            Schedules::Vaes(key) => decrypt_unit(key, unit, data),
        }
        Ok(())
    }
}

/// What an engine does: the tweak of a unit's first block, and runs of whole blocks, each between two XORs with its tweak.
/// Both runs give the tweak after the last block.
trait Blocks {
    fn first_tweak(&self, unit: u128) -> u128;
    fn encrypt_blocks(&self, data: &mut [u8], tweak: u128) -> u128;
    fn decrypt_blocks(&self, data: &mut [u8], tweak: u128) -> u128;
}

fn check_length(len_bytes: usize) -> Result<(), XtsError> {
    if (BLOCK_BYTES..=MAX_UNIT_BYTES).contains(&len_bytes) { Ok(()) } else { Err(XtsError::UnitLength(len_bytes)) }
}

/// The tweak of the next block: times x in GF(2^128) modulo x^128+x^7+x^2+x+1 (IEEE 1619 §5.2).
fn next_tweak(tweak: u128) -> u128 {
    (tweak << 1) ^ if tweak >> 127 == 1 { 0x87 } else { 0 }
}

fn encrypt_unit(cipher: &impl Blocks, unit: u128, data: &mut [u8]) {
    let (whole, tail_bytes) = split(data.len());
    let tweak = cipher.encrypt_blocks(&mut data[..whole], cipher.first_tweak(unit));
    if tail_bytes == 0 {
        return;
    }
    // IEEE 1619 §5.3.2: the last whole block's ciphertext lends its front to the short one, and is replaced by the
    // encryption of the short plaintext and what is left of it.
    let (head, short) = data.split_at_mut(whole);
    let last = &mut head[whole - BLOCK_BYTES..];
    last[..tail_bytes].swap_with_slice(short);
    cipher.encrypt_blocks(last, tweak);
}

fn decrypt_unit(cipher: &impl Blocks, unit: u128, data: &mut [u8]) {
    let (whole, tail_bytes) = split(data.len());
    let tweak = cipher.first_tweak(unit);
    if tail_bytes == 0 {
        cipher.decrypt_blocks(data, tweak);
        return;
    }
    // IEEE 1619 §5.4.2: the last whole block was encrypted under the tweak after its own.
    let before = whole - BLOCK_BYTES;
    let tweak = cipher.decrypt_blocks(&mut data[..before], tweak);
    let (head, short) = data.split_at_mut(whole);
    let last = &mut head[before..];
    cipher.decrypt_blocks(last, next_tweak(tweak));
    last[..tail_bytes].swap_with_slice(short);
    cipher.decrypt_blocks(last, tweak);
}

/// How many bytes are whole blocks, and how many are left over.
fn split(len_bytes: usize) -> (usize, usize) {
    let tail_bytes = len_bytes % BLOCK_BYTES;
    (len_bytes - tail_bytes, tail_bytes)
}

/// The portable engine's schedules.
struct Portable<E, D> {
    encrypt: E,
    decrypt: D,
    tweak: E,
}

impl<E: KeyInit, D: KeyInit> Portable<E, D> {
    fn new(data: &[u8], tweak: &[u8]) -> Result<Self, XtsError> {
        let refused = |_| XtsError::KeyLength(data.len() + tweak.len());
        Ok(Self {
            encrypt: E::new_from_slice(data).map_err(refused)?,
            decrypt: D::new_from_slice(data).map_err(refused)?,
            tweak: E::new_from_slice(tweak).map_err(refused)?,
        })
    }
}

impl<E, D> Blocks for Portable<E, D>
where
    E: BlockCipherEncrypt<BlockSize = U16>,
    D: BlockCipherDecrypt<BlockSize = U16>,
{
    fn first_tweak(&self, unit: u128) -> u128 {
        let mut block = Block::from(unit.to_le_bytes());
        self.tweak.encrypt_block(&mut block);
        u128::from_le_bytes(block.into())
    }

    fn encrypt_blocks(&self, data: &mut [u8], tweak: u128) -> u128 {
        batches(data, tweak, |blocks| self.encrypt.encrypt_blocks(blocks))
    }

    fn decrypt_blocks(&self, data: &mut [u8], tweak: u128) -> u128 {
        batches(data, tweak, |blocks| self.decrypt.decrypt_blocks(blocks))
    }
}

type Block = Array<u8, U16>;

/// Blocks handed to the cipher at once: enough for its widest backend, few enough for the first-level cache.
const BATCH_BLOCKS: usize = 32;

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
