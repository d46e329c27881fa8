//! Shields: what stands between a wrapped key at rest and whoever has the key-encryption key.
//!
//! Owns covering and uncovering. Must not know where shields or covered keys rest. Invariant: a covered key without its
//! shield is of no use, key-encryption key or not; so a key is destroyed by overwriting the shields it was covered with.

use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::lineage::{MAGIC, SECRET_AT};
use super::{UnwrapError, WRAPPED_KEY_BYTES, WrappedKey};

/// Bytes of a shield.
pub const SHIELD_BYTES: usize = 32;
/// As a wrapped key's first four bytes, where it is covered.
const COVERED_MAGIC: [u8; 4] = *b"SLS1";
const INFO: &[u8] = b"sluice shield 1";

/// 32 random bytes that cover the wrapped keys of one checkpoint. They stand nowhere but in superblocks, at two places of
/// each member, while covered keys lie anywhere in the log: so few known bytes decide whether a key still exists.
#[derive(Clone, PartialEq, Eq)]
pub struct Shield(Zeroizing<[u8; SHIELD_BYTES]>);

impl Shield {
    /// These bytes, which must be random and used for one checkpoint only; all zeroes: none.
    pub fn new(bytes: [u8; SHIELD_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// No shield: keys of format 2 and before lie bare, and a member that is let go is given this.
    pub fn none() -> Self {
        Self::new([0; SHIELD_BYTES])
    }

    pub fn is_none(&self) -> bool {
        self.0.iter().all(|byte| *byte == 0)
    }

    /// For the superblock.
    pub fn as_bytes(&self) -> &[u8; SHIELD_BYTES] {
        &self.0
    }

    /// Covers a wrapped key: all of 48..96, the sealed secret and its tag, is XORed with HKDF-SHA256 of the shield over
    /// 4..48. The nonce in there makes two wraps of one key differ in what covers them.
    pub fn cover(&self, wrapped: &WrappedKey) -> [u8; WRAPPED_KEY_BYTES] {
        let mut bytes = *wrapped.as_bytes();
        bytes[..4].copy_from_slice(&COVERED_MAGIC);
        self.mask(&mut bytes);
        bytes
    }

    /// The wrapped key beneath; one that was never covered is taken as it is.
    pub fn uncover(&self, bytes: &[u8; WRAPPED_KEY_BYTES]) -> Result<WrappedKey, UnwrapError> {
        let mut bytes = *bytes;
        if bytes[..4] == COVERED_MAGIC {
            if self.is_none() {
                return Err(UnwrapError::UnknownFormat);
            }
            bytes[..4].copy_from_slice(&MAGIC);
            self.mask(&mut bytes);
        }
        WrappedKey::from_bytes(&bytes)
    }

    fn mask(&self, bytes: &mut [u8; WRAPPED_KEY_BYTES]) {
        let (bound, secret) = bytes.split_at_mut(SECRET_AT);
        let mut mask = Zeroizing::new([0u8; WRAPPED_KEY_BYTES - SECRET_AT]);
        let info = [INFO, &bound[4..]];
        let expanded = Hkdf::<Sha256>::new(None, self.0.as_slice()).expand_multi_info(&info, mask.as_mut_slice());
        expanded.expect("48 bytes are within what HKDF-SHA256 gives");
        secret.iter_mut().zip(mask.iter()).for_each(|(byte, mask)| *byte ^= mask);
    }
}

impl std::fmt::Debug for Shield {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_none() { "Shield(none)" } else { "Shield(..)" })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{KEK_BYTES, KeyEncryptionKey, KeyEpoch, LineageId, LineageKey};
    use super::*;
    use crate::stages::cipher::Cipher;

    fn kek() -> KeyEncryptionKey {
        KeyEncryptionKey::from_secret(Zeroizing::new([3; KEK_BYTES]))
    }

    #[test]
    fn a_covered_key_opens_with_its_shield_only() {
        let key = LineageKey::generate(LineageId(5), KeyEpoch(2), Cipher::Aes256Gcm).unwrap();
        let wrapped = key.wrap(&kek()).unwrap();
        let shield = Shield::new([9; SHIELD_BYTES]);
        let covered = shield.cover(&wrapped);
        assert_eq!(shield.uncover(&covered), Ok(wrapped));
        assert!(kek().unwrap(&shield.uncover(&covered).unwrap()).is_ok());
        let mut forged = covered;
        forged[..4].copy_from_slice(&MAGIC);
        for other in [Shield::new([8; SHIELD_BYTES]), Shield::none()] {
            let opened = other.uncover(&covered).and_then(|wrapped| kek().unwrap(&wrapped));
            assert!(opened.is_err(), "{other:?}");
            // As it lies there it is no wrapped key, whatever it says of itself.
            assert_eq!(other.uncover(&forged).and_then(|w| kek().unwrap(&w)).unwrap_err(), UnwrapError::Damaged);
        }
    }

    #[test]
    fn what_covers_differs_by_shield_and_by_wrap() {
        let key = LineageKey::generate(LineageId(5), KeyEpoch(2), Cipher::Aes256Gcm).unwrap();
        let (one, two) = (key.wrap(&kek()).unwrap(), key.wrap(&kek()).unwrap());
        let mask = |shield: u8, wrapped: &WrappedKey| {
            let covered = Shield::new([shield; SHIELD_BYTES]).cover(wrapped);
            let pairs = covered.iter().zip(wrapped.as_bytes()).skip(SECRET_AT);
            pairs.map(|(covered, bare)| covered ^ bare).collect::<Vec<u8>>()
        };
        assert_eq!(mask(1, &one), mask(1, &one));
        assert_ne!(mask(1, &one), mask(1, &two));
        assert_ne!(mask(1, &one), mask(2, &one));
    }

    #[test]
    fn bare_keys_of_earlier_formats_are_taken_as_they_are() {
        let key = LineageKey::generate(LineageId(5), KeyEpoch(0), Cipher::Aes128Xts).unwrap();
        let wrapped = key.wrap(&kek()).unwrap();
        assert_eq!(Shield::none().uncover(wrapped.as_bytes()), Ok(wrapped));
    }

    #[test]
    fn the_cover_is_pinned_for_golden_images() {
        let key = LineageKey::from_secret(LineageId(1), KeyEpoch(3), Cipher::Aes256Gcm, Zeroizing::new([9; 32]));
        let covered = Shield::new([7; SHIELD_BYTES]).cover(&key.wrap_with_nonce(&kek(), [6; 12]));
        assert_eq!(crate::stages::crc::crc32c(&covered), GOLDEN_COVER_CRC);
    }

    const GOLDEN_COVER_CRC: u32 = 3_206_935_400;

    #[test]
    fn it_does_not_show() {
        assert_eq!(format!("{:?}", Shield::new([0xC7; SHIELD_BYTES])), "Shield(..)");
    }
}
