//! Ciphers of records: which there are, their key lengths and ids.
//!
//! Owns the AES modes and their engines ([`gcm`], [`xts`]). Must not know record layouts or where keys come from.
//! Invariant: no call leaves unauthenticated GCM plaintext in a caller's buffer.

pub mod gcm;
pub mod xts;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes of an authentication tag.
pub const TAG_BYTES: usize = 16;

/// How records are encrypted. The numbers are the ids that records hold; 0 is no cipher's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Cipher {
    #[default]
    #[serde(rename = "aes-256-gcm")]
    Aes256Gcm = 1,
    #[serde(rename = "aes-128-gcm")]
    Aes128Gcm = 2,
    #[serde(rename = "aes-128-xts")]
    Aes128Xts = 3,
    #[serde(rename = "aes-256-xts")]
    Aes256Xts = 4,
}

/// A name that is no cipher's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such cipher; known: aes-256-gcm, aes-128-gcm, aes-128-xts, aes-256-xts")]
pub struct UnknownCipher;

impl Cipher {
    pub const ALL: [Cipher; 4] = [Cipher::Aes256Gcm, Cipher::Aes128Gcm, Cipher::Aes128Xts, Cipher::Aes256Xts];

    /// The id in records.
    pub fn id(self) -> u8 {
        self as u8
    }

    /// The cipher of an id in a record.
    pub fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|cipher| cipher.id() == id)
    }

    /// The name in config files and reports.
    pub fn name(self) -> &'static str {
        match self {
            Cipher::Aes256Gcm => "aes-256-gcm",
            Cipher::Aes128Gcm => "aes-128-gcm",
            Cipher::Aes128Xts => "aes-128-xts",
            Cipher::Aes256Xts => "aes-256-xts",
        }
    }

    /// Key length in bytes; XTS takes two AES keys, one after the other.
    pub fn key_bytes(self) -> usize {
        match self {
            Cipher::Aes128Gcm => 16,
            Cipher::Aes256Gcm | Cipher::Aes128Xts => 32,
            Cipher::Aes256Xts => 64,
        }
    }

    /// Whether a change of the ciphertext or of the birth is found by a tag. XTS makes no such claim.
    pub fn is_authenticated(self) -> bool {
        matches!(self, Cipher::Aes256Gcm | Cipher::Aes128Gcm)
    }
}

impl fmt::Display for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Cipher {
    type Err = UnknownCipher;
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|cipher| cipher.name() == name).ok_or(UnknownCipher)
    }
}
