//! Keys: the key-encryption key, wrapped lineage keys, and the subkeys that records are sealed under.
//!
//! Owns key material from its source to the cipher context. Must not know where wrapped keys are stored or which records
//! exist. Invariants: no secret is ever printed, serialized in the clear or left in memory after its owner is dropped; a
//! (subkey, nonce) pair is used for one record only.

mod kek;
mod lineage;
mod protect;
mod ring;
mod shield;
mod subkey;

pub use kek::{KEK_BYTES, KekError, KekId, KekSource, KeyEncryptionKey};
pub use lineage::{CHECK_VALUE_BYTES, LineageKey, UnwrapError, WRAPPED_KEY_BYTES, WrappedKey};
pub use protect::{ProtectError, protect_process};
pub(super) use ring::OpeningKeys;
pub use ring::{Keyring, NoSubkey};
pub use shield::{SHIELD_BYTES, Shield};
pub(super) use subkey::Subkey;
pub use subkey::{NoncesSpent, SealingKey};

use serde::{Deserialize, Serialize};

/// The family of a volume and its clones, which share a data key until they part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LineageId(pub u128);

/// Which of a lineage's data keys: rotation starts the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeyEpoch(pub u32);

/// What makes a subkey this mount's and stream's own. Every record holds its salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Salt(pub [u8; 16]);

/// The operating system gave no random bytes.
#[derive(Debug, thiserror::Error)]
#[error("the operating system gave no random bytes")]
pub struct NoRandomness(#[source] rand::rngs::SysError);

impl Salt {
    /// A fresh one. Every mount takes one per stream before its first record, so that copied or rolled-back members never
    /// lead to a nonce used twice.
    pub fn random() -> Result<Self, NoRandomness> {
        random_bytes().map(Self)
    }
}

fn random_bytes<const N: usize>() -> Result<[u8; N], NoRandomness> {
    use rand::TryRng;
    let mut bytes = [0u8; N];
    rand::rngs::SysRng.try_fill_bytes(&mut bytes).map_err(NoRandomness)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
