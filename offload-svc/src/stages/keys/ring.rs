//! The keys that are open in this process, and each thread's cache of subkeys.
//!
//! Owns lookup by (lineage, epoch). Must not know records or volumes. Invariant: once a lineage is forgotten, no
//! thread opens another record of it, cached subkey or not.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::{KeyEpoch, LineageId, LineageKey, Salt, Subkey};
use crate::stages::cipher::Cipher;
use crate::stages::engines::Engines;

/// Open lineage keys, shared by all reactors: the data path takes its lock only when it meets a new salt.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: RwLock<HashMap<(LineageId, KeyEpoch), Arc<LineageKey>>>,
    /// Goes up whenever a key is forgotten, so that caches notice without the lock.
    forgotten: AtomicU64,
}

impl Keyring {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key; one with the same lineage and epoch gives way.
    pub fn insert(&self, key: LineageKey) -> Arc<LineageKey> {
        let key = Arc::new(key);
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        if keys.insert((key.lineage(), key.epoch()), Arc::clone(&key)).is_some() {
            self.forgotten.fetch_add(1, Ordering::Release);
        }
        key
    }

    /// The key of a lineage and epoch.
    pub fn get(&self, lineage: LineageId, epoch: KeyEpoch) -> Option<Arc<LineageKey>> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).get(&(lineage, epoch)).cloned()
    }

    /// Drops one key of a lineage: what it sealed opens no more in this process.
    pub fn forget_epoch(&self, lineage: LineageId, epoch: KeyEpoch) {
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        keys.remove(&(lineage, epoch));
        self.forgotten.fetch_add(1, Ordering::Release);
    }

    /// Drops all keys of a lineage: its records open no more in this process.
    pub fn forget(&self, lineage: LineageId) {
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        keys.retain(|(held, _), _| *held != lineage);
        self.forgotten.fetch_add(1, Ordering::Release);
    }
}

/// Subkeys kept per thread. A mount adds one salt per stream, so old records of many mounts share these.
const MAX_CACHED: usize = 1024;

type CacheKey = (LineageId, KeyEpoch, Salt);

/// Why a record's subkey is not to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoSubkey {
    #[error("the key of lineage {:032x}, epoch {}, is not open", lineage.0, epoch.0)]
    NoKey { lineage: LineageId, epoch: KeyEpoch },
    #[error("the key is for {expected}; the record says {given}")]
    OtherCipher { expected: Cipher, given: Cipher },
}

/// A thread's subkeys for opening records: deriving one costs more than opening a 4 KiB record.
#[derive(Default)]
pub(in crate::stages) struct OpeningKeys {
    subkeys: HashMap<CacheKey, (Cipher, Subkey)>,
    seen_forgotten: u64,
}

impl OpeningKeys {
    /// The subkey of a record's fields. `cipher` is what the record claims; it has to be the key's.
    pub(in crate::stages) fn subkey(
        &mut self,
        ring: &Keyring,
        key: CacheKey,
        cipher: Cipher,
        engines: &Engines,
    ) -> Result<&Subkey, NoSubkey> {
        let forgotten = ring.forgotten.load(Ordering::Acquire);
        if forgotten != self.seen_forgotten {
            self.subkeys.clear();
            self.seen_forgotten = forgotten;
        }
        if self.subkeys.len() >= MAX_CACHED && !self.subkeys.contains_key(&key) {
            self.subkeys.clear();
        }
        let (expected, subkey) = match self.subkeys.entry(key) {
            Entry::Occupied(held) => held.into_mut(),
            Entry::Vacant(place) => {
                let (lineage, epoch, salt) = key;
                let lineage_key = ring.get(lineage, epoch).ok_or(NoSubkey::NoKey { lineage, epoch })?;
                place.insert((lineage_key.cipher(), Subkey::derive(&lineage_key, salt, engines)))
            }
        };
        if *expected == cipher { Ok(subkey) } else { Err(NoSubkey::OtherCipher { expected: *expected, given: cipher }) }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.subkeys.len()
    }
}
