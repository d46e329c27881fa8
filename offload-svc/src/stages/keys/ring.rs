//! The keys that are open in this process, and each thread's cache of subkeys.
//!
//! Owns lookup by (lineage, epoch). Must not know records or volumes. Invariant: once a lineage is forgotten, no
//! thread opens another record of it, cached subkey or not.

use std::collections::HashMap;
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

    /// Drops all keys of a lineage: its records open no more in this process.
    pub fn forget(&self, lineage: LineageId) {
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        keys.retain(|(held, _), _| *held != lineage);
        self.forgotten.fetch_add(1, Ordering::Release);
    }
}

/// Subkeys kept per thread. A mount adds one salt per stream, so old records of many mounts share these.
const MAX_CACHED: usize = 1024;

type CacheKey = (LineageId, KeyEpoch, Cipher, Salt);

/// A thread's subkeys for opening records: deriving one costs more than opening a 4 KiB record.
#[derive(Default)]
pub(in crate::stages) struct OpeningKeys {
    subkeys: HashMap<CacheKey, Subkey>,
    seen_forgotten: u64,
}

impl OpeningKeys {
    /// The subkey of a record's fields, or `None` where the ring has no such key.
    pub(in crate::stages) fn subkey(&mut self, ring: &Keyring, key: CacheKey, engines: &Engines) -> Option<&Subkey> {
        let forgotten = ring.forgotten.load(Ordering::Acquire);
        if forgotten != self.seen_forgotten {
            self.subkeys.clear();
            self.seen_forgotten = forgotten;
        }
        if !self.subkeys.contains_key(&key) {
            let (lineage, epoch, cipher, salt) = key;
            let subkey = Subkey::derive(ring.get(lineage, epoch)?.as_ref(), cipher, salt, engines);
            if self.subkeys.len() >= MAX_CACHED {
                self.subkeys.clear();
            }
            self.subkeys.insert(key, subkey);
        }
        self.subkeys.get(&key)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.subkeys.len()
    }
}
