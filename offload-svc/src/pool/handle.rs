//! The handle by which the service steers a pool.
//!
//! Owns the public calls and their errors; the coordinator carries them out. Must not know the configuration. Invariant:
//! a call that has returned success is durable.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nvmf_target::backend::Backend;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::attach::{Coming, MemberError, NewMember, Request};
use super::coordinator::Control;
use super::env::MemberIndex;
use super::receipts::{ReceiptStatus, Receipts, StatementError};
use super::shared::{Shared, Volume};
use super::status::{Health, KeyStatus, MemberState, MemberStatus, PoolStatus, Space, VolumeStatus};
use super::superblock::Publication;
use super::volume::VolumeBackend;
use crate::stages::cipher::Cipher;
use crate::stages::compress::Compression;

/// What a new volume shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeSpec {
    /// Unique in the pool; 1 to 64 letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Unique in the pool; random if `None`.
    pub uuid: Option<Uuid>,
    /// A multiple of the block size.
    pub size_bytes: u64,
    /// 512 or 4096.
    pub block_bytes: u32,
    pub compression: Compression,
    pub cipher: Cipher,
}

/// What a clone shall be; the rest it has from its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloneSpec {
    /// As a volume's.
    pub name: String,
    /// Of new writes; its origin's if `None`.
    pub compression: Option<Compression>,
}

/// Why a volume was not made, changed or deleted.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("volume name {name:?}: 1 to 64 letters, digits, '-', '_' and '.' are allowed")]
    BadName { name: String },
    #[error("volume name {name:?} is taken")]
    NameTaken { name: String },
    #[error("UUID {uuid} belongs to volume {owner:?}")]
    UuidTaken { uuid: Uuid, owner: String },
    #[error("no volume {name:?}")]
    NoSuchVolume { name: String },
    #[error("block size {block_bytes} bytes: 512 and 4096 are possible")]
    BlockSize { block_bytes: u32 },
    #[error("size {size_bytes} bytes: a multiple of the block size of {block_bytes} bytes, from 1 block to 2^56 bytes")]
    Size { size_bytes: u64, block_bytes: u32 },
    #[error("volume {name:?} has {from_bytes} bytes; making it smaller is not possible")]
    Shrink { name: String, from_bytes: u64 },
    #[error("the pool has {count} volumes, the most it can have")]
    TooMany { count: usize },
    #[error(
        "volume {name:?} still has {left_bytes} bytes under the key before its last; they are being carried over, and then \
         the next rotation can begin"
    )]
    Rotating { name: String, left_bytes: u64 },
    #[error("volume {name:?} is a snapshot, which stays as it is; clone it to get a volume that can be changed")]
    IsSnapshot { name: String },
    #[error("{count} snapshots lie beneath volume {name:?}, the most there can be: delete some of them")]
    TooDeep { name: String, count: usize },
    #[error("no randomness for a new key")]
    NoRandomness,
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("the pool is closed")]
    Closed,
}

/// Why a checkpoint was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    #[error("no free segment for a checkpoint")]
    NoSpace,
    #[error("the file system beneath a member is full")]
    MemberFull,
    #[error("fewer than k members are left")]
    TooFewMembers,
    #[error("there are more segments or volumes than a checkpoint can hold")]
    TooLarge,
    #[error("a page of a map can't be written")]
    Map,
    #[error("a reactor has ended")]
    ReactorGone,
    #[error("the pool is closed")]
    Closed,
}

/// A mounted pool. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Pool {
    pub(super) shared: Arc<Shared>,
}

impl Pool {
    /// The pool's identity.
    pub fn uuid(&self) -> Uuid {
        self.shared.set.pool
    }

    /// The back end of a volume.
    pub fn volume(&self, name: &str) -> Option<Arc<dyn Backend>> {
        let volume = self.shared.volume(name)?;
        Some(Arc::new(VolumeBackend::new(Arc::clone(&self.shared), volume)))
    }

    /// Makes a volume.
    pub async fn create_volume(&self, spec: VolumeSpec) -> Result<VolumeStatus, VolumeError> {
        self.ask(|reply| Control::Create(spec, reply)).await.unwrap_or(Err(VolumeError::Closed))
    }

    /// Deletes a volume and destroys its key: its requests are answered Not Ready from now on. The receipt tells what became of
    /// the key.
    pub async fn delete_volume(&self, name: &str) -> Result<ReceiptStatus, VolumeError> {
        self.ask(|reply| Control::Delete(name.into(), reply)).await.unwrap_or(Err(VolumeError::Closed))
    }

    /// Takes a snapshot of a volume: what it holds at one moment between the call and its return, under a name of its own. What
    /// a host has been answered before the call is in it.
    pub async fn snapshot_volume(&self, volume: &str, name: &str) -> Result<VolumeStatus, VolumeError> {
        self.ask(|reply| Control::Snapshot(volume.into(), name.into(), reply)).await.unwrap_or(Err(VolumeError::Closed))
    }

    /// Makes a volume that begins as a snapshot, or as another volume at this moment, and then goes its own way.
    pub async fn clone_volume(&self, of: &str, spec: CloneSpec) -> Result<VolumeStatus, VolumeError> {
        self.ask(|reply| Control::Clone(of.into(), spec, reply)).await.unwrap_or(Err(VolumeError::Closed))
    }

    /// Makes a volume larger.
    pub async fn resize_volume(&self, name: &str, size_bytes: u64) -> Result<VolumeStatus, VolumeError> {
        self.ask(|reply| Control::Resize(name.into(), size_bytes, reply)).await.unwrap_or(Err(VolumeError::Closed))
    }

    /// Gives a volume a new key. New records are sealed under it from now on; the others are carried over in the
    /// background, and then the older key is given up: no checkpoint holds it any longer.
    pub async fn rotate_key(&self, name: &str) -> Result<KeyStatus, VolumeError> {
        self.ask(|reply| Control::Rotate(name.into(), reply)).await.unwrap_or(Err(VolumeError::Closed))
    }

    /// The keys of all volumes, oldest volume first.
    pub fn keys(&self) -> Vec<KeyStatus> {
        self.shared
            .all_volumes()
            .iter()
            .filter(|volume| !volume.is_hidden())
            .map(|volume| key_status(&self.shared, volume))
            .collect()
    }

    /// The receipts of deletions as they stand now, oldest first.
    pub fn receipts(&self) -> Vec<ReceiptStatus> {
        self.shared.with_receipts(Receipts::status)
    }

    /// Takes down that a member, which is away or was replaced, is destroyed as somebody says: no receipt waits for it any
    /// more, and each says so.
    pub async fn member_destroyed(&self, member: Uuid) -> Result<(), StatementError> {
        self.ask(|reply| Control::MemberDestroyed(member, reply)).await.unwrap_or(Err(StatementError::Closed))
    }

    /// Lets a blank device take the place of a member, which `old` names by index, UUID or name. When this returns, the
    /// filling has been asked for; [`PoolStatus::rebuild`] tells how far it is. Until it is done the old member serves on.
    pub async fn replace_member(&self, old: &str, new: NewMember) -> Result<Coming, MemberError> {
        let request = Request::Replace { old: old.into(), new };
        self.ask(|reply| Control::Member(request, reply)).await.unwrap_or(Err(MemberError::Closed))
    }

    /// Brings back a member that was away.
    pub async fn attach_member(&self, new: NewMember) -> Result<Coming, MemberError> {
        let request = Request::Attach { new };
        self.ask(|reply| Control::Member(request, reply)).await.unwrap_or(Err(MemberError::Closed))
    }

    /// Begins a scrub, if none runs, or ends the one that does.
    pub fn scrub(&self, run: bool) {
        self.shared.scrub.ask(run);
    }

    /// Whether another member is on its way to a place.
    pub fn is_being_replaced(&self, index: u8) -> bool {
        self.shared.rebuild.is_asked(index.into())
    }

    /// The slots that members and those on their way into the set stand in; others can be closed.
    pub fn slots_in_use(&self) -> Vec<MemberIndex> {
        let set = &self.shared.set;
        let entries = (0..2 * set.count()).filter(|index| *index < set.count() || set.entry(*index).slot().is_some());
        let mut slots: Vec<_> = entries.filter_map(|index| set.entry(index).slot()).collect();
        slots.extend(self.shared.rebuild.waiting());
        slots
    }

    /// Takes a checkpoint.
    pub async fn checkpoint(&self) -> Result<(), CheckpointError> {
        self.ask(|reply| Control::Checkpoint(Some(reply))).await.unwrap_or(Err(CheckpointError::Closed))
    }

    /// Answers Not Ready to new requests, waits for those under way, and takes a last checkpoint that says so. The
    /// reactors must still run meanwhile.
    pub async fn shutdown(&self) -> Result<(), CheckpointError> {
        self.ask(Control::Shutdown).await.unwrap_or(Err(CheckpointError::Closed))
    }

    async fn ask<T>(&self, control: impl FnOnce(oneshot::Sender<T>) -> Control) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.shared.control.unbounded_send(control(reply)).ok()?;
        answer.await.ok()
    }

    /// All volumes, oldest first.
    pub fn volumes(&self) -> Vec<VolumeStatus> {
        self.shared
            .all_volumes()
            .iter()
            .filter(|volume| !volume.is_hidden())
            .map(|volume| volume_status(volume))
            .collect()
    }

    /// The last publication of the set's state: what an anchor keeps.
    pub fn publication(&self) -> Publication {
        self.shared.set.publication()
    }

    /// The pool at this moment.
    pub fn status(&self) -> PoolStatus {
        let shared = &self.shared;
        PoolStatus {
            uuid: shared.set.pool,
            data_shards: shared.set.layout.data_shards,
            parity_shards: shared.set.layout.parity_shards,
            segment_bytes: shared.set.layout.segment_bytes,
            health: self.health(),
            epoch: shared.set.epoch(),
            members: self.members(),
            space: self.space(),
            replay_segments: shared.segments.window_len(),
            max_replay_segments: shared.options.max_replay_segments.into(),
            checkpoints: shared.checkpoints.load(Ordering::Relaxed),
            cleaned_segments: shared.cleaned.load(Ordering::Relaxed),
            traffic: shared.set.traffic.value(),
            map_extents: shared.extent_count(),
            map_pages_read: shared.pages_read.load(Ordering::Relaxed),
            rebuild: shared.rebuild.status(),
            scrub: shared.scrub.status(),
            mount: shared.report.clone(),
            given_up: shared.given_up,
        }
    }

    fn health(&self) -> Health {
        let active = self.shared.set.mask().count_ones() as usize;
        if self.shared.set.is_failed() || active < usize::from(self.shared.set.layout.data_shards) {
            Health::Failed
        } else if active < self.shared.set.count() {
            Health::Degraded
        } else {
            Health::Healthy
        }
    }

    fn members(&self) -> Vec<MemberStatus> {
        let set = &self.shared.set;
        let members = set.places().iter().enumerate();
        let status = members.map(|(index, member)| {
            let (identity, (state, epoch)) = (member.identity(), member.state());
            let candidate = set.entry(set.candidate(index)).identity().uuid;
            let coming = !set.contains(index) && set.joining() & (1 << index) != 0 && candidate == identity.uuid;
            MemberStatus {
                index: index as u8,
                uuid: identity.uuid,
                name: identity.name,
                state: if coming { MemberState::Rebuilding } else { state },
                epoch: if self.shared.set.contains(index) { self.shared.set.epoch() } else { epoch },
                read_errors: member.read_errors.load(Ordering::Relaxed),
                write_errors: member.write_errors.load(Ordering::Relaxed),
                timeouts: member.timeouts.load(Ordering::Relaxed),
                bad_shards: member.bad_shards.load(Ordering::Relaxed),
                repaired_shards: member.repaired_shards.load(Ordering::Relaxed),
                slow_reads: member.slow_reads.load(Ordering::Relaxed),
                remarks: member.remarks(),
            }
        });
        status.collect()
    }

    /// Each part is counted from one census; what is in no other part of the data segments is reclaimable.
    fn space(&self) -> Space {
        let shared = &self.shared;
        let members = shared.set.count() as u64;
        let (data, parity) = (u64::from(shared.set.layout.data_shards), u64::from(shared.set.layout.parity_shards));
        let segment = u64::from(shared.set.layout.segment_bytes);
        let raw_bytes: u64 = shared.set.places().iter().map(|member| member.identity().size_bytes).sum();
        let segments_bytes = u64::from(shared.set.segment_count) * segment * members;
        let [free, open, closed, checkpoint] = shared.segments.census();
        let held_bytes = (open + closed) * segment * data;
        let volumes = shared.all_volumes();
        let used_bytes = volumes.iter().map(|volume| volume.stored_bytes()).sum::<u64>().min(held_bytes);
        let map_bytes = volumes.iter().map(|volume| volume.map_bytes()).sum::<u64>().min(held_bytes - used_bytes);
        let reserves = shared.admission.reserves();
        let reserved = free.min(reserves.checkpoint + reserves.pages + reserves.cleaning);
        let logical = |volume: &Arc<Volume>| volume.used_blocks() << volume.block_shift;
        Space {
            raw_bytes,
            metadata_bytes: raw_bytes - segments_bytes + map_bytes,
            parity_bytes: u64::from(shared.set.segment_count) * segment * parity,
            reserve_bytes: reserved * segment * data,
            checkpoint_bytes: checkpoint * segment * data,
            used_bytes,
            reclaimable_bytes: held_bytes - used_bytes - map_bytes,
            free_bytes: (free - reserved) * segment * data,
            logical_bytes: volumes.iter().map(logical).sum(),
        }
    }
}

pub(super) fn key_status(shared: &Shared, volume: &Volume) -> KeyStatus {
    let kin = shared.of_lineage(volume.lineage);
    KeyStatus {
        volume: volume.name.clone(),
        cipher: volume.cipher.name().to_owned(),
        epoch: volume.keys.current().0,
        rotating: volume.keys.lock().len() > 1,
        left_bytes: shared.left_bytes(volume),
        stored_bytes: kin.iter().map(|volume| volume.stored_bytes() + volume.map_bytes()).sum(),
    }
}

pub(super) fn volume_status(volume: &Volume) -> VolumeStatus {
    VolumeStatus {
        name: volume.name.clone(),
        uuid: volume.uuid,
        size_bytes: volume.blocks() << volume.block_shift,
        block_bytes: volume.block_bytes(),
        compression: volume.compression.to_string(),
        cipher: volume.cipher.name().to_owned(),
        used_bytes: volume.mapped_blocks() << volume.block_shift,
        stored_bytes: volume.stored_bytes(),
        snapshot: volume.is_snapshot(),
        origin: volume.origin().map(|origin| origin.name.clone()),
    }
}
