//! What the reactors of one pool share.
//!
//! Owns the volume table and the counters behind the status. Must not know how requests are carried out. Invariant: live
//! bytes, used blocks and extents are counted whenever a layer or a tree changes, and never too low.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use futures::channel::mpsc::UnboundedSender;
use tokio::sync::Notify;
use uuid::Uuid;

use super::coordinator::Control;
use super::family::Family;
use super::layers::LayerBudget;
use super::map::{Extent, Ledger};
use super::members::{Exclusion, MemberSet};
use super::message::Courier;
use super::options::MountOptions;
use super::pace::Foreground;
use super::page::PagePointer;
use super::rebuild::Rebuilding;
use super::receipts::{Receipts, Surroundings};
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
    /// The same for a volume and its snapshots and clones.
    pub lineage: LineageId,
    /// The lineage's, one for all of them.
    pub keys: Arc<VolumeKeys>,
    pub family: Family,
    /// Being deleted: nothing new is taken.
    pub closing: AtomicBool,
    /// What its trees hold, as checkpoints record it.
    pub in_trees: Usage,
    /// What the changes that lie over the trees hold. What they hide counts until they are merged.
    pub in_layers: Usage,
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
}

impl VolumeKeys {
    pub fn new(wrapped: WrappedKey) -> Self {
        let current = AtomicU32::new(wrapped.epoch().0);
        Self { current, wrapped: Mutex::new(vec![wrapped]) }
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
}

/// What a volume has, in one place.
#[derive(Debug, Default)]
pub struct Usage {
    pub extents: AtomicI64,
    /// Mapped blocks.
    pub blocks: AtomicI64,
    /// Bytes at rest of its data.
    pub stored_bytes: AtomicI64,
    /// Bytes at rest of its map's pages.
    pub map_bytes: AtomicI64,
    /// Bytes at rest, both kinds, in even key epochs and in odd ones: no third epoch begins before the first is empty.
    pub by_epoch: [AtomicI64; 2],
}

/// A change of a [`Usage`], or its value at a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UsageDelta {
    pub extents: i64,
    pub blocks: i64,
    pub stored_bytes: i64,
    pub map_bytes: i64,
    pub by_epoch: [i64; 2],
}

impl UsageDelta {
    pub fn extent(&mut self, extent: &Extent, sign: i64) {
        let stored = extent.stored_share() as i64 * sign;
        self.extents += sign;
        self.blocks += i64::from(extent.count) * sign;
        self.stored_bytes += stored;
        self.by_epoch[extent.key_epoch as usize % 2] += stored;
    }

    pub fn page(&mut self, page: &PagePointer, sign: i64) {
        let stored = i64::from(page.location.stored_bytes) * sign;
        self.map_bytes += stored;
        self.by_epoch[page.key_epoch as usize % 2] += stored;
    }
}

impl UsageDelta {
    pub fn less(&self, other: &Self) -> Self {
        let [even, odd] = self.by_epoch;
        Self {
            extents: self.extents - other.extents,
            blocks: self.blocks - other.blocks,
            stored_bytes: self.stored_bytes - other.stored_bytes,
            map_bytes: self.map_bytes - other.map_bytes,
            by_epoch: [even - other.by_epoch[0], odd - other.by_epoch[1]],
        }
    }
}

impl Usage {
    pub fn add(&self, delta: &UsageDelta) {
        self.extents.fetch_add(delta.extents, Ordering::SeqCst);
        self.blocks.fetch_add(delta.blocks, Ordering::SeqCst);
        self.stored_bytes.fetch_add(delta.stored_bytes, Ordering::SeqCst);
        self.map_bytes.fetch_add(delta.map_bytes, Ordering::SeqCst);
        for (epoch, stored) in self.by_epoch.iter().zip(delta.by_epoch) {
            epoch.fetch_add(stored, Ordering::SeqCst);
        }
    }

    pub fn value(&self) -> UsageDelta {
        let of = |counter: &AtomicI64| counter.load(Ordering::SeqCst);
        UsageDelta {
            extents: of(&self.extents),
            blocks: of(&self.blocks),
            stored_bytes: of(&self.stored_bytes),
            map_bytes: of(&self.map_bytes),
            by_epoch: [of(&self.by_epoch[0]), of(&self.by_epoch[1])],
        }
    }
}

impl Volume {
    fn sum(&self, of: impl Fn(&Usage) -> &AtomicI64) -> u64 {
        // What goes from the layers into a tree is in both for a moment, but never in none.
        let layers = of(&self.in_layers).load(Ordering::SeqCst);
        (layers + of(&self.in_trees).load(Ordering::SeqCst)).max(0) as u64
    }

    /// Mapped blocks. Those that have been overwritten or deallocated since the last checkpoint count twice or still.
    pub fn used_blocks(&self) -> u64 {
        self.sum(|usage| &usage.blocks).min(self.block_count.load(Ordering::SeqCst))
    }

    /// Bytes at rest, as above.
    pub fn stored_bytes(&self) -> u64 {
        self.sum(|usage| &usage.stored_bytes)
    }

    /// Bytes at rest of its map.
    pub fn map_bytes(&self) -> u64 {
        self.sum(|usage| &usage.map_bytes)
    }

    /// Bytes at rest under another key than the current one, the map's included; of this volume alone.
    pub fn left_bytes(&self) -> u64 {
        self.sum(|usage| &usage.by_epoch[(self.keys.current().0 ^ 1) as usize % 2])
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
    pub segments: Arc<Segments>,
    pub admission: Arc<Admission>,
    /// How much waits to be merged into the trees.
    pub layers: LayerBudget,
    /// Pages of maps read from members.
    pub pages_read: Arc<AtomicU64>,
    /// Segments or admission may have become available.
    pub space_event: Notify,
    pub volumes: RwLock<VolumeTable>,
    pub keyring: Arc<Keyring>,
    pub engines: Engines,
    pub control: UnboundedSender<Control>,
    pub courier: Arc<dyn Courier>,
    pub report: MountReport,
    /// What mounts have gone on without, this one included.
    pub given_up: GivenUp,
    pub mounts: u64,
    pub checkpoints: AtomicU64,
    /// Checkpoints begun, and the last one that has ended, well or not.
    pub checkpoints_begun: AtomicU64,
    pub checkpoints_ended: AtomicU64,
    pub cleaned: AtomicU64,
    /// The last checkpoint, by its number, that failed or brought no segments: who waits for one that began since gives up.
    pub refused: AtomicU64,
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
    /// A snapshot has been deleted that others read from.
    pub absorbing: Notify,
    /// Held while a stripe is copied to a member that comes back, and while old stripes are overwritten for good.
    pub erasing: tokio::sync::Mutex<()>,
    /// Members that are being filled.
    pub rebuild: Rebuilding,
    pub scrub: Scrubbing,
    /// Deletions, and what became of the keys.
    pub receipts: Receipts,
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
        let reserves = self.admission.reserves();
        if half || free < reserves.checkpoint + reserves.pages {
            self.want_checkpoint();
        }
        if self.admission.is_low(&self.segments) {
            self.cleaning.notify_one();
        }
    }

    /// Whether a checkpoint that began after the first `begun` ones was of no use.
    pub fn is_refused(&self, begun: u64) -> bool {
        self.refused.load(Ordering::SeqCst) > begun
    }

    /// Nothing new is taken any more.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Bytes at rest under another key than the current one, of all that share a volume's lineage.
    pub fn left_bytes(&self, volume: &Volume) -> u64 {
        self.of_lineage(volume.lineage).iter().map(|volume| volume.left_bytes()).sum()
    }

    /// Extents in all maps.
    pub fn extent_count(&self) -> u64 {
        self.all_volumes().iter().map(|volume| volume.sum(|usage| &usage.extents)).sum()
    }

    /// Asks something of the receipts that depends on what there is around them.
    pub fn with_receipts<T>(&self, ask: impl FnOnce(&Receipts, &Surroundings<'_>) -> T) -> T {
        let (holders, departed) = (self.set.shields.holders(), self.set.shields.departed());
        let identities: Vec<_> = (0..2 * self.set.count()).map(|index| self.set.entry(index).identity()).collect();
        let name = |uuid| identities.iter().find(|identity| identity.uuid == uuid).and_then(|it| it.name.clone());
        let around = Surroundings {
            pool: self.set.pool,
            holders: &holders,
            departed: &departed,
            readers: &|lineage, but| self.readers(lineage, but),
            name: &name,
        };
        ask(&self.receipts, &around)
    }

    pub fn volume(&self, name: &str) -> Option<Arc<Volume>> {
        self.volumes
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .filter(|volume| !volume.is_hidden())
            .cloned()
    }

    pub fn all_volumes(&self) -> Vec<Arc<Volume>> {
        let volumes = self.volumes.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = volumes.values().cloned().collect();
        all.sort_by_key(|volume| volume.id);
        all
    }
}

/// Counts the extents of a volume's layers, into segments and volume.
pub struct Books<'a> {
    pub segments: &'a Segments,
    pub volume: &'a Volume,
}

impl Books<'_> {
    fn count(&self, extent: &Extent, sign: i64) {
        let mut delta = UsageDelta::default();
        delta.extent(extent, sign);
        self.segments.count_layers(extent.location.stripe.segment, delta.stored_bytes);
        self.volume.in_layers.add(&delta);
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
