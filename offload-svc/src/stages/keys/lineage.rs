//! Lineage data keys and their wrapped form.
//!
//! Owns wrapping and unwrapping. Must not know which volumes belong to a lineage. Invariant: a wrapped key opens only as
//! the lineage and epoch that it was made for, under the key-encryption key that it names.

use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::{KekId, KeyEncryptionKey, KeyEpoch, LineageId, NoRandomness, random_bytes};
use crate::stages::cipher::Cipher;
use crate::stages::cipher::gcm::{self, GcmKey};

const SECRET_BYTES: usize = 32;
/// Bytes of a key check value.
pub const CHECK_VALUE_BYTES: usize = 16;
const CHECK_INFO: &[u8] = b"sluice key check value 1";

/// The data key of one lineage and epoch. Records are never sealed under it, only under its subkeys.
///
/// It is for one cipher only. Were the cipher a record's to say, whoever can write to a member could relabel a GCM record as
/// XTS, which has no tag, and forge a Deallocate. A volume that changes its cipher takes a new epoch.
pub struct LineageKey {
    lineage: LineageId,
    epoch: KeyEpoch,
    cipher: Cipher,
    secret: Zeroizing<[u8; SECRET_BYTES]>,
}

impl std::fmt::Debug for LineageKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LineageKey({:032x}, epoch {}, {})", self.lineage.0, self.epoch.0, self.cipher)
    }
}

/// Why a wrapped key stays closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnwrapError {
    #[error("not a wrapped key, or one of an unknown version")]
    UnknownFormat,
    #[error("wrapped under key-encryption key {needed}; the one at hand is {given}")]
    OtherKek { needed: KekId, given: KekId },
    #[error("the wrapped key is damaged")]
    Damaged,
}

/// Bytes of a wrapped key.
pub const WRAPPED_KEY_BYTES: usize = 96;

/// A lineage key, encrypted for storage by AES-256-GCM. Little-endian:
///
/// | bytes | field | why |
/// |---|---|---|
/// | 0..4 | magic and version, `SLK1` | a stray block is no key |
/// | 4..12 | key-encryption key id | "another key" is told from "damaged" |
/// | 12..28 | lineage | bound: a key can't be given to another lineage |
/// | 28..32 | epoch | bound: an old epoch can't pose as a new one |
/// | 32 | cipher id | bound: a key for GCM can't be used for XTS |
/// | 33..36 | 0 | |
/// | 36..48 | nonce, random | wraps are rare: 2^32 random nonces per key-encryption key are far off |
/// | 48..80 | ciphertext | the 32-byte secret |
/// | 80..96 | tag over all of 0..48 and the ciphertext | |
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct WrappedKey([u8; WRAPPED_KEY_BYTES]);

pub(super) const MAGIC: [u8; 4] = *b"SLK1";
const CIPHER_AT: usize = 32;
const NONCE_AT: usize = 36;
pub(super) const SECRET_AT: usize = 48;
const TAG_AT: usize = 80;

impl LineageKey {
    /// A fresh random key.
    pub fn generate(lineage: LineageId, epoch: KeyEpoch, cipher: Cipher) -> Result<Self, NoRandomness> {
        Ok(Self { lineage, epoch, cipher, secret: Zeroizing::new(random_bytes()?) })
    }

    /// The key with these bytes: for tests and golden images, which need the same key every time.
    pub fn from_secret(
        lineage: LineageId,
        epoch: KeyEpoch,
        cipher: Cipher,
        secret: Zeroizing<[u8; SECRET_BYTES]>,
    ) -> Self {
        Self { lineage, epoch, cipher, secret }
    }

    pub fn lineage(&self) -> LineageId {
        self.lineage
    }

    pub fn epoch(&self) -> KeyEpoch {
        self.epoch
    }

    /// The only cipher that its subkeys are for.
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    /// By which the key can be recognised without being known: HKDF-SHA256 of it over `CHECK_INFO`. Whoever holds a key can
    /// compare it with the value on a receipt; from the value nothing leads to the key.
    pub fn check_value(&self) -> [u8; CHECK_VALUE_BYTES] {
        let mut value = [0; CHECK_VALUE_BYTES];
        let expanded = Hkdf::<Sha256>::new(None, self.secret.as_slice()).expand(CHECK_INFO, &mut value);
        expanded.expect("16 bytes are within what HKDF-SHA256 gives");
        value
    }

    pub(super) fn secret(&self) -> &[u8; SECRET_BYTES] {
        &self.secret
    }

    /// Encrypts the key under `kek` with a random nonce. Rotating the key-encryption key is unwrapping with the old one and
    /// wrapping with the new; the old wrapped form must then be overwritten wherever it stands.
    pub fn wrap(&self, kek: &KeyEncryptionKey) -> Result<WrappedKey, NoRandomness> {
        Ok(self.wrap_with_nonce(kek, random_bytes()?))
    }

    /// The same with a given nonce, which must never have been used with `kek`: for golden images.
    pub fn wrap_with_nonce(&self, kek: &KeyEncryptionKey, nonce: [u8; gcm::NONCE_BYTES]) -> WrappedKey {
        let mut bytes = [0u8; WRAPPED_KEY_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..12].copy_from_slice(&kek.id().0);
        bytes[12..28].copy_from_slice(&self.lineage.0.to_le_bytes());
        bytes[28..CIPHER_AT].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[CIPHER_AT] = self.cipher.id();
        bytes[NONCE_AT..SECRET_AT].copy_from_slice(&nonce);
        let (bound, rest) = bytes.split_at_mut(SECRET_AT);
        let (secret, tag) = rest.split_at_mut(TAG_AT - SECRET_AT);
        secret.copy_from_slice(self.secret.as_slice());
        let sealed = kek.cipher().seal(&nonce, bound, secret);
        tag.copy_from_slice(&sealed.expect("32 bytes fit AES-GCM"));
        WrappedKey(bytes)
    }
}

impl KeyEncryptionKey {
    fn cipher(&self) -> GcmKey {
        // Keys are wrapped a few times a day: the portable engine does.
        GcmKey::new(gcm::Engine::AesGcm, self.secret()).expect("a key-encryption key is 32 bytes long")
    }

    /// Decrypts a lineage key.
    pub fn unwrap(&self, wrapped: &WrappedKey) -> Result<LineageKey, UnwrapError> {
        let (bound, rest) = wrapped.0.split_at(SECRET_AT);
        let needed = wrapped.kek_id();
        if needed != self.id() {
            return Err(UnwrapError::OtherKek { needed, given: self.id() });
        }
        let mut secret = Zeroizing::new([0u8; SECRET_BYTES]);
        let (ciphertext, tag) = rest.split_at(SECRET_BYTES);
        let nonce = array(&bound[NONCE_AT..]);
        self.cipher()
            .open(&nonce, bound, ciphertext, &array(tag), secret.as_mut_slice())
            .map_err(|_| UnwrapError::Damaged)?;
        let cipher = Cipher::from_id(bound[CIPHER_AT]).ok_or(UnwrapError::UnknownFormat)?;
        Ok(LineageKey { lineage: wrapped.lineage(), epoch: wrapped.epoch(), cipher, secret })
    }
}

impl WrappedKey {
    /// The wrapped key in these bytes, as read from a disk: only the format is checked here.
    pub fn from_bytes(bytes: &[u8; WRAPPED_KEY_BYTES]) -> Result<Self, UnwrapError> {
        if bytes[..4] == MAGIC { Ok(Self(*bytes)) } else { Err(UnwrapError::UnknownFormat) }
    }

    pub fn as_bytes(&self) -> &[u8; WRAPPED_KEY_BYTES] {
        &self.0
    }

    /// Which key-encryption key opens it.
    pub fn kek_id(&self) -> KekId {
        KekId(array(&self.0[4..12]))
    }

    /// Whose key it is. True once unwrapped; before, what the bytes claim.
    pub fn lineage(&self) -> LineageId {
        LineageId(u128::from_le_bytes(array(&self.0[12..28])))
    }

    /// Which of the lineage's keys; as [`WrappedKey::lineage`].
    pub fn epoch(&self) -> KeyEpoch {
        KeyEpoch(u32::from_le_bytes(array(&self.0[28..CIPHER_AT])))
    }
}

impl std::fmt::Debug for WrappedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WrappedKey({:032x}, epoch {}, kek {})", self.lineage().0, self.epoch().0, self.kek_id())
    }
}

/// The field at the front of `bytes`: offsets are this file's constants, so it is always there.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut field = [0u8; N];
    field.copy_from_slice(&bytes[..N]);
    field
}
