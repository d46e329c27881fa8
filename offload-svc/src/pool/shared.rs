//! What the reactors of one pool share.
//!
//! Owns the volume table and the counters behind the status. Must not know how requests are carried out. Invariant: live
//! bytes, used blocks and extents are counted once, by [`Books`], whenever a map changes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use futures::channel::mpsc::UnboundedSender;
use tokio::sync::Notify;
use uuid::Uuid;

use super::coordinator::Control;
use super::map::{Extent, Ledger};
use super::members::{Exclusion, MemberSet};
use super::message::Courier;
use super::options::MountOptions;
use super::pace::Foreground;
use super::rebuild::Rebuilding;
use super::scrub::Scrubbing;
use super::segments::Segments;
use super::space::Admission;
use super::status::MountReport;
use super::superblock::GivenUp;
use crate::stages::cipher::Cipher;
use crate::stages::compress::Compression;
use crate::stages::engines::Engines;
use crate::stages::keys::{KeyEpoch, Keyring, LineageId, WrappedKey};

/// One volume.
#[derive(Debug)]
pub struct Volume {
    /// Never used again after deletion.
    pub id: u32,
    pub uuid: Uuid,
    pub name: String,
    pub block_shift: u8,
    pub block_count: AtomicU64,
    pub compression: Compression,
    pub cipher: Cipher,
    pub lineage: LineageId,
    pub keys: VolumeKeys,
    /// Being deleted: nothing new is taken.
    pub closing: AtomicBool,
    pub used_blocks: AtomicI64,
    pub stored_bytes: AtomicI64,
    /// Requests under way, and who waits for none.
    pub in_flight: AtomicU64,
    pub idle: Notify,
}

/// The keys of a volume: one, or two while records go over from the older to the newer.
#[derive(Debug)]
pub struct VolumeKeys {
    /// The epoch that new records are sealed in.
    current: AtomicU32,
    /// Oldest first.
    wrapped: Mutex<Vec<WrappedKey>>,
    /// Stored bytes in even epochs and in odd ones: no third epoch begins before the first is empty.
    stored: [AtomicI64; 2],
}

impl VolumeKeys {
    pub fn new(wrapped: WrappedKey) -> Self {
        let current = AtomicU32::new(wrapped.epoch().0);
        Self { current, wrapped: Mutex::new(vec![wrapped]), stored: [AtomicI64::new(0), AtomicI64::new(0)] }
    }

    /// The epoch that new records are sealed in.
    pub fn current(&self) -> KeyEpoch {
        KeyEpoch(self.current.load(Ordering::SeqCst))
    }

    pub fn set_current(&self, epoch: KeyEpoch) {
        self.current.store(epoch.0, Ordering::SeqCst);
    }

    /// The wrapped keys, oldest first.
    pub fn wrapped(&self) -> Vec<WrappedKey> {
        self.lock().clone()
    }

    /// Changes which keys the next checkpoint holds.
    pub fn lock(&self) -> MutexGuard<'_, Vec<WrappedKey>> {
        self.wrapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stored_in(&self, epoch: u32) -> &AtomicI64 {
        &self.stored[epoch as usize % 2]
    }

    /// Bytes at rest under another key than the current one.
    pub fn left_bytes(&self) -> u64 {
        self.stored_in(self.current().0 ^ 1).load(Ordering::SeqCst).max(0) as u64
    }
}

/// The volumes by name.
pub type VolumeTable = HashMap<String, Arc<Volume>>;

/// Everything that is shared.
pub struct Shared {
    pub set: Arc<MemberSet>,
    pub options: MountOptions,
    pub reactors: usize,
    /// Puts members out of the set.
    pub membership: UnboundedSender<Exclusion>,
    /// The pool is being closed: nothing new is taken.
    pub closing: AtomicBool,
    pub segments: Segments,
    pub admission: Arc<Admission>,
    /// Segments or admission may have become available.
    pub space_event: Notify,
    pub volumes: RwLock<VolumeTable>,
    pub extents: AtomicI64,
    pub keyring: Arc<Keyring>,
    pub engines: Engines,
    pub control: UnboundedSender<Control>,
    pub courier: Arc<dyn Courier>,
    pub report: MountReport,
    /// What mounts have gone on without, this one included.
    pub given_up: GivenUp,
    pub mounts: u64,
    pub checkpoints: AtomicU64,
    pub cleaned: AtomicU64,
    /// Goes up whenever a checkpoint that was asked for brought no segments: who waits for one gives up.
    pub refusals: AtomicU64,
    /// Stripes that the streams have written.
    pub stripes_written: AtomicU64,
    pub cleaner_busy: AtomicBool,
    /// Wakes the cleaner.
    pub cleaning: Notify,
    /// Wakes what allocates room beneath.
    pub backing: Notify,
    /// Segments whose room has been given back to the file systems.
    pub given_back: AtomicU64,
    /// Segments that the log could take after the last checkpoint.
    pub listed_at_checkpoint: AtomicU64,
    /// A full or half-used window has been reported and not yet been answered by a checkpoint.
    pub checkpoint_wanted: AtomicBool,
    /// Held while a stripe is copied to a member that comes back, and while old stripes are overwritten for good.
    pub erasing: tokio::sync::Mutex<()>,
    /// Members that are being filled.
    pub rebuild: Rebuilding,
    pub scrub: Scrubbing,
    pub foreground: Foreground,
}

impl Shared {
    /// Asks the coordinator for a checkpoint, once.
    pub fn want_checkpoint(&self) {
        if !self.checkpoint_wanted.swap(true, Ordering::SeqCst) {
            // The coordinator is gone only when the pool is.
            let _ = self.control.unbounded_send(Control::Checkpoint(None));
        }
    }

    /// A segment was handed out: takes the next checkpoint in good time, and cleans.
    pub fn on_segment_taken(&self) {
        self.backing.notify_one();
        let (listed, free) = self.segments.left();
        let half = listed * 2 <= self.listed_at_checkpoint.load(Ordering::SeqCst);
        // The map has grown past what was kept back for writing it down: the next checkpoint keeps back more.
        if half || free < self.admission.reserves(self.extent_count()).checkpoint {
            self.want_checkpoint();
        }
        if self.admission.is_low(&self.segments, self.extent_count()) {
            self.cleaning.notify_one();
        }
    }

    /// Nothing new is taken any more.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    pub fn extent_count(&self) -> u64 {
        self.extents.load(Ordering::Relaxed).max(0) as u64
    }

    pub fn volume(&self, name: &str) -> Option<Arc<Volume>> {
        self.volumes.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    pub fn all_volumes(&self) -> Vec<Arc<Volume>> {
        let volumes = self.volumes.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = volumes.values().cloned().collect();
        all.sort_by_key(|volume| volume.id);
        all
    }
}

/// Counts a volume's extents into segments, volume and pool.
pub struct Books<'a> {
    pub segments: &'a Segments,
    pub extents: &'a AtomicI64,
    pub volume: &'a Volume,
}

impl<'a> Books<'a> {
    pub fn of(shared: &'a Shared, volume: &'a Volume) -> Self {
        Self { segments: &shared.segments, extents: &shared.extents, volume }
    }

    fn count(&self, extent: &Extent, sign: i64) {
        let stored = extent.stored_share() as i64 * sign;
        self.segments.count_live(extent.location.stripe.segment, stored);
        self.extents.fetch_add(sign, Ordering::Relaxed);
        self.volume.stored_bytes.fetch_add(stored, Ordering::Relaxed);
        self.volume.keys.stored_in(extent.key_epoch).fetch_add(stored, Ordering::SeqCst);
        self.volume.used_blocks.fetch_add(i64::from(extent.count) * sign, Ordering::Relaxed);
    }
}

impl Ledger for Books<'_> {
    fn added(&mut self, extent: &Extent) {
        self.count(extent, 1);
    }
    fn removed(&mut self, extent: &Extent) {
        self.count(extent, -1);
    }
}

/// Work under way on a volume, which its deletion waits for.
#[derive(Debug)]
pub struct InFlight(Arc<Volume>);

impl InFlight {
    pub fn on(volume: &Arc<Volume>) -> Self {
        volume.in_flight.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(volume))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0.in_flight.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
