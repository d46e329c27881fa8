//! AES-GCM (NIST SP 800-38D) with 96-bit nonces and 128-bit tags.
//!
//! Owns the engines and their key contexts, which callers keep: setting one up costs as much as sealing some KiB. Must not
//! know how nonces are chosen. Invariant: after a failed open the output holds zeroes.

use aes_gcm::aead::{AeadInOut, KeyInit};
use aes_gcm::{Aes128Gcm, Aes256Gcm};
use aws_lc_rs::aead;
use serde::Serialize;
use zeroize::Zeroize;

use super::TAG_BYTES;

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 12;

/// One implementation of AES-GCM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// The crate `aes-gcm` on the crate `aes`. Portable, and the oracle.
    AesGcm,
    /// AWS-LC's assembly, through `aws-lc-rs`.
    AwsLc,
}

impl Engine {
    /// Every engine that runs on this machine, the portable one first.
    pub const ALL: [Engine; 2] = [Engine::AesGcm, Engine::AwsLc];

    /// The name that reports show.
    pub fn name(self) -> &'static str {
        match self {
            Engine::AesGcm => "aes-gcm",
            Engine::AwsLc => "aws-lc-rs",
        }
    }
}

/// Why a key or a message was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GcmError {
    #[error("an AES-GCM key is 16 or 32 bytes long, not {0}")]
    KeyLength(usize),
    #[error("message or associated data too long for AES-GCM")]
    TooLong,
    #[error("ciphertext and output differ in length")]
    OutputLength,
    #[error("authentication tag does not match")]
    BadTag,
}

/// A key ready for use. Holds its schedule, wiped on drop by the crates beneath.
pub struct GcmKey(Context);

enum Context {
    Portable128(Box<Aes128Gcm>),
    Portable256(Box<Aes256Gcm>),
    AwsLc(aead::LessSafeKey),
}

impl GcmKey {
    /// A context for a key of 16 or 32 bytes.
    pub fn new(engine: Engine, key: &[u8]) -> Result<Self, GcmError> {
        let refused = |_| GcmError::KeyLength(key.len());
        let context = match (engine, key.len()) {
            (Engine::AesGcm, 16) => Context::Portable128(Box::new(Aes128Gcm::new_from_slice(key).map_err(refused)?)),
            (Engine::AesGcm, 32) => Context::Portable256(Box::new(Aes256Gcm::new_from_slice(key).map_err(refused)?)),
            (Engine::AwsLc, 16) => Context::aws_lc(&aead::AES_128_GCM, key)?,
            (Engine::AwsLc, 32) => Context::aws_lc(&aead::AES_256_GCM, key)?,
            (_, length) => return Err(GcmError::KeyLength(length)),
        };
        Ok(Self(context))
    }

    /// Encrypts `buffer` in place and gives the tag over `aad` and the ciphertext. A nonce is used once per key, ever.
    pub fn seal(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], buffer: &mut [u8]) -> Result<[u8; TAG_BYTES], GcmError> {
        match &self.0 {
            Context::Portable128(key) => seal_portable(key.as_ref(), nonce, aad, buffer),
            Context::Portable256(key) => seal_portable(key.as_ref(), nonce, aad, buffer),
            Context::AwsLc(key) => {
                let nonce = aead::Nonce::assume_unique_for_key(*nonce);
                let tag = key
                    .seal_in_place_separate_tag(nonce, aead::Aad::from(aad), buffer)
                    .map_err(|_| GcmError::TooLong)?;
                tag.as_ref().try_into().map_err(|_| GcmError::BadTag)
            }
        }
    }

    /// Decrypts `ciphertext` into `plaintext`, of the same length. On any error `plaintext` is zeroed.
    pub fn open(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        ciphertext: &[u8],
        tag: &[u8; TAG_BYTES],
        plaintext: &mut [u8],
    ) -> Result<(), GcmError> {
        if ciphertext.len() != plaintext.len() {
            plaintext.zeroize();
            return Err(GcmError::OutputLength);
        }
        let opened = match &self.0 {
            Context::Portable128(key) => open_portable(key.as_ref(), nonce, aad, ciphertext, tag, plaintext),
            Context::Portable256(key) => open_portable(key.as_ref(), nonce, aad, ciphertext, tag, plaintext),
            Context::AwsLc(key) => {
                let nonce = aead::Nonce::assume_unique_for_key(*nonce);
                key.open_separate_gather(nonce, aead::Aad::from(aad), ciphertext, tag, plaintext)
                    .map_err(|_| GcmError::BadTag)
            }
        };
        // Engines decrypt and hash in one pass, so what a bad tag leaves behind is theirs to choose: we don't rely on it.
        opened.inspect_err(|_| plaintext.zeroize())
    }

    /// The same in place. On any error `buffer` is zeroed.
    pub fn open_in_place(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        buffer: &mut [u8],
        tag: &[u8; TAG_BYTES],
    ) -> Result<(), GcmError> {
        let opened = match &self.0 {
            Context::Portable128(key) => open_portable_in_place(key.as_ref(), nonce, aad, buffer, tag),
            Context::Portable256(key) => open_portable_in_place(key.as_ref(), nonce, aad, buffer, tag),
            Context::AwsLc(key) => {
                let nonce = aead::Nonce::assume_unique_for_key(*nonce);
                key.open_in_place_separate_tag(nonce, aead::Aad::from(aad), tag, buffer)
                    .map(|_| ())
                    .map_err(|_| GcmError::BadTag)
            }
        };
        opened.inspect_err(|_| buffer.zeroize())
    }
}

impl Context {
    fn aws_lc(algorithm: &'static aead::Algorithm, key: &[u8]) -> Result<Self, GcmError> {
        let unbound = aead::UnboundKey::new(algorithm, key).map_err(|_| GcmError::KeyLength(key.len()))?;
        Ok(Context::AwsLc(aead::LessSafeKey::new(unbound)))
    }
}

/// The portable engine's nonce and tag are 12 and 16 bytes, as ours: this names them once.
trait Portable: AeadInOut<NonceSize = aes_gcm::aead::consts::U12, TagSize = aes_gcm::aead::consts::U16> {}
impl Portable for Aes128Gcm {}
impl Portable for Aes256Gcm {}

fn seal_portable<K: Portable>(
    key: &K,
    nonce: &[u8; NONCE_BYTES],
    aad: &[u8],
    buffer: &mut [u8],
) -> Result<[u8; TAG_BYTES], GcmError> {
    let tag = key.encrypt_inout_detached(nonce.into(), aad, buffer.into()).map_err(|_| GcmError::TooLong)?;
    Ok(tag.into())
}

fn open_portable<K: Portable>(
    key: &K,
    nonce: &[u8; NONCE_BYTES],
    aad: &[u8],
    ciphertext: &[u8],
    tag: &[u8; TAG_BYTES],
    plaintext: &mut [u8],
) -> Result<(), GcmError> {
    plaintext.copy_from_slice(ciphertext);
    open_portable_in_place(key, nonce, aad, plaintext, tag)
}

fn open_portable_in_place<K: Portable>(
    key: &K,
    nonce: &[u8; NONCE_BYTES],
    aad: &[u8],
    buffer: &mut [u8],
    tag: &[u8; TAG_BYTES],
) -> Result<(), GcmError> {
    key.decrypt_inout_detached(nonce.into(), aad, buffer.into(), tag.into()).map_err(|_| GcmError::BadTag)
}

#[cfg(test)]
mod tests;
