//! Taking snapshots, and making clones of them.
//!
//! Owns the order in which a volume's map goes over to its snapshot. Must not know how maps are merged. Invariants: a snapshot
//! is the volume at one moment on all reactors: no write that was answered before is missing, and none is in it that began
//! after one that is missing was answered; it exists once a checkpoint has it; what is read of the volume is the same at
//! every step.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::{Notify, oneshot};
use uuid::Uuid;

use super::coordinator::{Control, Coordinator, VOLUMES_MAX, check_name};
use super::core::Core;
use super::family::{CHAIN_MAX, Family, Hold, Role};
use super::handle::{CheckpointError, CloneSpec, VolumeError, volume_status};
use super::layers::Tree;
use super::message::{Inner, Merged, MergedShard, Message};
use super::shared::{Usage, UsageDelta, Volume};
use super::status::VolumeStatus;
use crate::stages::compress::Compression;

/// What is made of a volume as it is at a moment.
pub enum Taking {
    /// A snapshot of this name.
    Snapshot(String),
    /// A clone, upon a snapshot without a name, which goes when only one volume reads from it any more.
    Clone(CloneSpec),
}

/// Where the answer goes.
pub type VolumeReply = oneshot::Sender<Result<VolumeStatus, VolumeError>>;

/// A snapshot to be taken by the next checkpoint.
pub struct Split {
    from: Arc<Volume>,
    to: Arc<Volume>,
    /// Given up when all reactors have what they have up to now.
    hold: Hold,
}

impl Split {
    pub fn volumes(&self) -> (Arc<Volume>, Arc<Volume>) {
        (Arc::clone(&self.from), Arc::clone(&self.to))
    }

    /// All reactors have frozen what was changed up to the moment.
    pub fn release(self) {
        drop(self.hold);
    }
}

impl Volume {
    /// A volume of the same family that has nothing yet.
    fn relative(&self, id: u32, name: String, role: Role, parent: Option<Arc<Volume>>) -> Self {
        Self {
            id,
            uuid: Uuid::new_v4(),
            name,
            block_shift: self.block_shift,
            block_count: AtomicU64::new(self.blocks()),
            compression: self.compression,
            cipher: self.cipher,
            lineage: self.lineage,
            keys: Arc::clone(&self.keys),
            family: Family::new(role, parent),
            // Not ready until it is durable.
            closing: AtomicBool::new(true),
            in_trees: Usage::default(),
            in_layers: Usage::default(),
            in_flight: AtomicU64::new(0),
            idle: Notify::new(),
        }
    }
}

impl Coordinator {
    /// Holds writes to the volume off; what is under way may need a checkpoint, so its end is not waited for here.
    pub(super) fn begin_snapshot(&self, of: &str, taking: Taking, reply: VolumeReply) {
        let volume = match self.find(of).and_then(|volume| self.check_taking(&volume, &taking).map(|()| volume)) {
            Ok(volume) => volume,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let core = Rc::clone(&self.core);
        self.core.env().spawn(Box::pin(async move {
            // What there is to merge now need not be merged while writes wait. If it can't be, the next one says so.
            let (done, merged) = oneshot::channel();
            if core.shared.control.unbounded_send(Control::Checkpoint(Some(done))).is_ok() {
                let _ = merged.await;
            }
            let hold = Hold::on(&volume);
            hold.quiet().await;
            // If the coordinator has ended, the caller hears that nobody answers.
            drop(core.shared.control.unbounded_send(Control::FinishSnapshot(volume, hold, taking, reply)));
        }));
    }

    fn check_taking(&self, volume: &Volume, taking: &Taking) -> Result<(), VolumeError> {
        let name = match taking {
            Taking::Snapshot(name) => name,
            Taking::Clone(spec) => &spec.name,
        };
        check_name(name)?;
        let volumes = self.core.shared.all_volumes();
        if volumes.len() + 2 > VOLUMES_MAX {
            return Err(VolumeError::TooMany { count: volumes.len() });
        }
        if self.core.shared.volume(name).is_some() {
            return Err(VolumeError::NameTaken { name: name.clone() });
        }
        if volume.is_snapshot() {
            return Err(VolumeError::IsSnapshot { name: volume.name.clone() });
        }
        if volume.depth() >= CHAIN_MAX {
            return Err(VolumeError::TooDeep { name: volume.name.clone(), count: volume.depth() });
        }
        Ok(())
    }

    /// Nothing changes in the volume at this moment.
    pub(super) async fn finish_snapshot(
        &self,
        volume: Arc<Volume>,
        hold: Hold,
        taking: Taking,
    ) -> Result<VolumeStatus, VolumeError> {
        // It may have gone meanwhile, or the name.
        if self.find(&volume.name).is_ok_and(|found| !Arc::ptr_eq(&found, &volume)) || volume.is_closing() {
            return Err(VolumeError::NoSuchVolume { name: volume.name.clone() });
        }
        self.check_taking(&volume, &taking)?;
        let name = match &taking {
            Taking::Snapshot(name) => name.clone(),
            Taking::Clone(_) => format!("{}-origin", volume.name.chars().take(56).collect::<String>()),
        };
        let snapshot = Arc::new(volume.relative(self.take_id(), name, Role::Snapshot, volume.parent()));
        let clone = match taking {
            Taking::Snapshot(_) => None,
            Taking::Clone(spec) => {
                snapshot.set_hidden(true);
                Some(self.clone_of(&snapshot, &spec))
            }
        };
        // Empty, it lets what lies beneath show through, as the volume did: nothing changes by this.
        volume.set_parent(Some(Arc::clone(&snapshot)));
        let new = || std::iter::once(&snapshot).chain(&clone);
        self.with_volumes(|volumes| new().for_each(|new| drop(volumes.insert(new.key(), Arc::clone(new)))));
        let split = Split { from: Arc::clone(&volume), to: Arc::clone(&snapshot), hold };
        let taken = self.checkpoint_with(false, Some(split)).await;
        if let Err(error) = taken {
            // What has gone over to it is read from there. As a snapshot that nobody has a name for, it is given back.
            self.with_volumes(|volumes| {
                new().for_each(|new| drop(volumes.remove(&new.key())));
                snapshot.set_hidden(true);
                volumes.insert(snapshot.key(), Arc::clone(&snapshot));
            });
            snapshot.closing.store(false, Ordering::SeqCst);
            self.core.shared.absorbing.notify_one();
            return Err(error.into());
        }
        new().for_each(|new| new.closing.store(false, Ordering::SeqCst));
        Ok(volume_status(clone.as_ref().unwrap_or(&snapshot)))
    }

    /// Makes a clone.
    pub(super) async fn clone_snapshot(&self, of: &Arc<Volume>, spec: &CloneSpec) -> Result<VolumeStatus, VolumeError> {
        check_name(&spec.name)?;
        let count = self.core.shared.all_volumes().len();
        if count >= VOLUMES_MAX {
            return Err(VolumeError::TooMany { count });
        }
        if self.core.shared.volume(&spec.name).is_some() {
            return Err(VolumeError::NameTaken { name: spec.name.clone() });
        }
        let clone = self.clone_of(of, spec);
        self.with_volumes(|volumes| drop(volumes.insert(clone.key(), Arc::clone(&clone))));
        if let Err(error) = self.checkpoint(false).await {
            self.with_volumes(|volumes| drop(volumes.remove(&clone.key())));
            return Err(error.into());
        }
        clone.closing.store(false, Ordering::SeqCst);
        Ok(volume_status(&clone))
    }

    /// Has every reactor give the volume's trees to its snapshot. All of them have been merged, and none is before this has
    /// ended; so what the trees hold goes over at once.
    pub(super) async fn split(
        &self,
        from: &Arc<Volume>,
        to: &Arc<Volume>,
        merged: &mut [Merged],
    ) -> Result<(), CheckpointError> {
        let shared = &self.core.shared;
        for (reactor, merged) in merged.iter_mut().enumerate() {
            let of: Vec<MergedShard> = merged.shards.iter().filter(|shard| shard.volume == from.id).copied().collect();
            let (done, split) = oneshot::channel();
            let watermarks = of.iter().map(|shard| (shard.shard, shard.watermark)).collect();
            let ask = Inner::Split { from: Arc::clone(from), to: Arc::clone(to), watermarks, done };
            shared.courier.send(reactor, Message(ask));
            split.await.map_err(|_| CheckpointError::ReactorGone)?;
            let left = |shard: &mut MergedShard| shard.tree = Tree::default();
            merged.shards.iter_mut().filter(|shard| shard.volume == from.id).for_each(left);
            merged.shards.extend(of.into_iter().map(|shard| MergedShard { volume: to.id, ..shard }));
        }
        let usage = from.in_trees.value();
        to.in_trees.add(&usage);
        from.in_trees.add(&UsageDelta::default().less(&usage));
        Ok(())
    }

    fn clone_of(&self, of: &Arc<Volume>, spec: &CloneSpec) -> Arc<Volume> {
        let mut clone = of.relative(self.take_id(), spec.name.clone(), Role::Writable, Some(Arc::clone(of)));
        let compression: Compression = spec.compression.unwrap_or(of.compression);
        clone.compression = compression;
        Arc::new(clone)
    }
}

impl Core {
    /// Gives what this reactor has of a volume to its snapshot: all that had been changed up to the watermarks is in the trees.
    pub fn split(&self, from: &Arc<Volume>, to: &Arc<Volume>, watermarks: &[(u16, u64)]) {
        for (number, watermark) in watermarks {
            let taken = self.shard(to, *number);
            self.shard(from, *number).map.split(&taken.map);
            taken.applied.set(taken.applied.get().max(*watermark));
        }
    }
}
