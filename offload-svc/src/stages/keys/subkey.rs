//! Subkeys: what records are sealed and opened under.
//!
//! Owns the derivation from (lineage key, salt) and the nonce counter. Must not know records. Invariant: a
//! [`SealingKey`] is the only one that counts its salt's nonces, and never gives one twice.

use hkdf::Hkdf;
use sha2::Sha256;
use zeroize::Zeroizing;

use super::{KeyEpoch, LineageId, LineageKey, Salt};
use crate::stages::cipher::Cipher;
use crate::stages::cipher::gcm::GcmKey;
use crate::stages::cipher::xts::XtsKey;
use crate::stages::engines::Engines;

/// A cipher context under a derived key.
///
/// HKDF-SHA256 (RFC 5869): salt = the record's salt, input = the lineage secret, info = `"sluice record 1"`, cipher id
/// (1 byte), lineage (16 bytes LE), epoch (4 bytes LE); output = the cipher's key. So one salt gives unrelated keys to
/// different ciphers, lineages and epochs.
pub(in crate::stages) enum Subkey {
    Gcm(GcmKey),
    Xts(XtsKey),
}

const INFO: &[u8; 15] = b"sluice record 1";

impl Subkey {
    pub(super) fn derive(key: &LineageKey, salt: Salt, engines: &Engines) -> Self {
        let cipher = key.cipher();
        let mut info = [0u8; INFO.len() + 21];
        info[..15].copy_from_slice(INFO);
        info[15] = cipher.id();
        info[16..32].copy_from_slice(&key.lineage().0.to_le_bytes());
        info[32..].copy_from_slice(&key.epoch().0.to_le_bytes());
        let mut derived = Zeroizing::new([0u8; 64]);
        let derived = &mut derived[..cipher.key_bytes()];
        let expanded = Hkdf::<Sha256>::new(Some(&salt.0), key.secret()).expand(&info, derived);
        expanded.expect("64 bytes are within what HKDF-SHA256 gives");
        // The lengths are the cipher's own, and two equal halves out of HKDF are a 2^-128 event.
        match cipher {
            Cipher::Aes128Gcm | Cipher::Aes256Gcm => {
                Subkey::Gcm(GcmKey::new(engines.gcm, derived).expect("the cipher's own key length"))
            }
            Cipher::Aes128Xts | Cipher::Aes256Xts => {
                Subkey::Xts(XtsKey::new(engines.xts, derived).expect("the cipher's own key length, halves differ"))
            }
        }
    }
}

/// The subkey of one mount and stream, with its nonce counter. Deliberately neither `Clone` nor restorable: a stream that
/// starts again takes a new salt.
pub struct SealingKey {
    pub(in crate::stages) lineage: LineageId,
    pub(in crate::stages) epoch: KeyEpoch,
    pub(in crate::stages) cipher: Cipher,
    pub(in crate::stages) salt: Salt,
    pub(in crate::stages) subkey: Subkey,
    next_nonce: u64,
}

/// The counter of a salt ran out: take a new salt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all nonces of this salt are used; take a new salt")]
pub struct NoncesSpent;

impl LineageKey {
    /// The subkey of `salt`, which must be fresh ([`Salt::random`]): nonces count from zero.
    pub fn sealing_key(&self, salt: Salt, engines: &Engines) -> SealingKey {
        SealingKey {
            lineage: self.lineage(),
            epoch: self.epoch(),
            cipher: self.cipher(),
            salt,
            subkey: Subkey::derive(self, salt, engines),
            next_nonce: 0,
        }
    }
}

impl SealingKey {
    pub fn lineage(&self) -> LineageId {
        self.lineage
    }

    pub fn epoch(&self) -> KeyEpoch {
        self.epoch
    }

    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    pub fn salt(&self) -> Salt {
        self.salt
    }

    pub(in crate::stages) fn take_nonce(&mut self) -> Result<u64, NoncesSpent> {
        let nonce = self.next_nonce;
        self.next_nonce = nonce.checked_add(1).ok_or(NoncesSpent)?;
        Ok(nonce)
    }
}

impl std::fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SealingKey({} of {:032x}, epoch {})", self.cipher, self.lineage.0, self.epoch.0)
    }
}
