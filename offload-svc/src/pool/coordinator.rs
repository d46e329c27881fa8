//! The coordinator, on the first reactor: checkpoints, volumes, membership.
//!
//! Owns everything that changes the superblocks. Must not know requests. Invariant: one change at a time, each durable
//! before it is reported.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;
use futures::future::join_all;
use tokio::sync::{Notify, oneshot};
use uuid::Uuid;

use super::attach::{self, Coming, MemberError};
use super::checkpoint::{Part, Root, SectionWriter};
use super::checkpoint_io::{self, CheckpointWriter, WriteFailed};
use super::core::{Core, Shard};
use super::family::{Family, Hold, Role};
use super::handle::{CheckpointError, CloneSpec, VolumeError, VolumeSpec, volume_status};
use super::members::Exclusion;
use super::message::{Inner, MergeRequest, Merged, MergedShard, Message};
use super::receipts::{ReceiptStatus, StatementError};
use super::segments::Plan;
use super::shared::{Books, Usage, Volume, VolumeKeys};
use super::shields::Departed;
use super::snapshot::{Split, Taking, VolumeReply};
use super::status::{KeyStatus, VolumeStatus};
use super::stripe_io::WriteError;
use super::superblocks::Superblocks;
use crate::stages::keys::{KeyEncryptionKey, KeyEpoch, LineageId, LineageKey};

/// Most volumes of a pool.
pub const VOLUMES_MAX: usize = 4096;
/// Largest volume, in bytes: 2^56.
const VOLUME_BYTES_MAX: u64 = 1 << 56;

/// Bytes by segment.
pub type Weight = BTreeMap<u32, i64>;

/// What the coordinator is asked.
pub enum Control {
    Create(VolumeSpec, oneshot::Sender<Result<VolumeStatus, VolumeError>>),
    Delete(String, oneshot::Sender<Result<ReceiptStatus, VolumeError>>),
    /// Nothing of the volume is under way any longer.
    FinishDelete(Arc<Volume>, Weight, oneshot::Sender<Result<ReceiptStatus, VolumeError>>),
    /// Somebody says that a member is destroyed.
    MemberDestroyed(Uuid, oneshot::Sender<Result<(), StatementError>>),
    Rotate(String, oneshot::Sender<Result<KeyStatus, VolumeError>>),
    /// Nothing of the volume is under its older key any longer, or so it seemed.
    FinishRotation(LineageId, oneshot::Sender<bool>),
    Snapshot(String, String, VolumeReply),
    Clone(String, CloneSpec, VolumeReply),
    /// No write to the volume is under way any longer.
    FinishSnapshot(Arc<Volume>, Hold, Taking, VolumeReply),
    /// Nothing is left of a deleted snapshot, or so it seemed.
    FinishAbsorb(Arc<Volume>, oneshot::Sender<bool>),
    Resize(String, u64, oneshot::Sender<Result<VolumeStatus, VolumeError>>),
    /// Brings a member into the set.
    Member(attach::Request, oneshot::Sender<Result<Coming, MemberError>>),
    Checkpoint(Option<oneshot::Sender<Result<(), CheckpointError>>>),
    Shutdown(oneshot::Sender<Result<(), CheckpointError>>),
    /// All is quiet: the last checkpoint.
    Finish(oneshot::Sender<Result<(), CheckpointError>>),
}

/// The coordinator's state.
pub struct Coordinator {
    pub core: Rc<Core>,
    pub superblocks: Rc<Superblocks>,
    /// The root of the checkpoint in use.
    pub last_root: RefCell<Root>,
    pub next_volume: Cell<u32>,
    pub kek: Arc<KeyEncryptionKey>,
    /// A volume's size that the next checkpoint records, before anyone may use it.
    pub resizing: Cell<Option<(u32, u64)>>,
}

/// Puts members out of the set as asked.
pub async fn serve_membership(
    superblocks: Rc<Superblocks>,
    core: Rc<Core>,
    mut requests: UnboundedReceiver<Exclusion>,
) {
    while let Some(request) = requests.next().await {
        let result = superblocks.exclude(&request.members).await;
        core.shared.space_event.notify_waiters();
        // Whoever asked may have given up.
        let _ = request.done.send(result);
    }
}

/// Asks for a checkpoint now and then.
pub async fn keep_time(core: Rc<Core>) {
    let mut seen = core.shared.stripes_written.load(Ordering::Relaxed);
    loop {
        let at = core.env().now() + core.shared.options.checkpoint_interval;
        core.env().sleep_until(at).await;
        let now = core.shared.stripes_written.load(Ordering::Relaxed);
        if now != seen && !core.shared.closing.load(Ordering::SeqCst) {
            core.shared.want_checkpoint();
        }
        seen = now;
    }
}

impl Coordinator {
    /// Carries out one request after the other.
    pub async fn run(self: Rc<Self>, mut requests: UnboundedReceiver<Control>) {
        while let Some(request) = requests.next().await {
            // Whoever asked may have given up waiting.
            match request {
                Control::Create(spec, reply) => drop(reply.send(self.create(spec).await)),
                Control::Delete(name, reply) => self.begin_delete(&name, reply).await,
                Control::FinishDelete(volume, weight, reply) => {
                    drop(reply.send(self.delete(&volume, &weight).await));
                }
                Control::MemberDestroyed(uuid, reply) => drop(reply.send(self.member_destroyed(uuid).await)),
                Control::Rotate(name, reply) => drop(reply.send(self.rotate(&name).await)),
                Control::FinishRotation(volume, reply) => drop(reply.send(self.finish_rotation(volume).await)),
                Control::Snapshot(of, name, reply) => self.begin_snapshot(&of, Taking::Snapshot(name), reply),
                Control::Clone(of, spec, reply) => match self.find(&of) {
                    Ok(snapshot) if snapshot.is_snapshot() => {
                        drop(reply.send(self.clone_snapshot(&snapshot, &spec).await));
                    }
                    // By way of a snapshot of this moment.
                    Ok(_) => self.begin_snapshot(&of, Taking::Clone(spec), reply),
                    Err(error) => drop(reply.send(Err(error))),
                },
                Control::FinishSnapshot(volume, hold, taking, reply) => {
                    drop(reply.send(self.finish_snapshot(volume, hold, taking).await));
                }
                Control::FinishAbsorb(from, reply) => drop(reply.send(self.finish_absorb(&from).await)),
                Control::Resize(name, size, reply) => drop(reply.send(self.resize(&name, size).await)),
                Control::Member(request, reply) => {
                    // Its device may take its time.
                    let (core, superblocks) = (Rc::clone(&self.core), Rc::clone(&self.superblocks));
                    self.core.env().spawn(Box::pin(attach::serve(core, superblocks, request, reply)));
                }
                Control::Checkpoint(reply) => {
                    let result = self.checkpoint(false).await;
                    if let Some(reply) = reply {
                        let _ = reply.send(result);
                    }
                }
                Control::Shutdown(reply) => self.begin_shutdown(reply),
                Control::Finish(reply) => {
                    let _ = reply.send(self.checkpoint(true).await);
                    return;
                }
            }
        }
    }

    /// Lets nothing new in; when all is quiet, the last checkpoint follows. Meanwhile the cleaner may still need us.
    fn begin_shutdown(&self, reply: oneshot::Sender<Result<(), CheckpointError>>) {
        let core = Rc::clone(&self.core);
        core.shared.closing.store(true, Ordering::SeqCst);
        core.shared.space_event.notify_waiters();
        self.core.env().spawn(Box::pin(async move {
            let shared = &core.shared;
            for volume in shared.all_volumes() {
                wait_idle(&volume).await;
            }
            loop {
                let event = shared.space_event.notified();
                if !shared.cleaner_busy.load(Ordering::SeqCst) {
                    break;
                }
                event.await;
            }
            for reactor in 0..shared.reactors {
                let (done, drained) = oneshot::channel();
                shared.courier.send(reactor, Message(Inner::Drain(done)));
                // A reactor that has ended has nothing under way.
                let _ = drained.await;
            }
            // The coordinator runs until it has served this.
            let _ = shared.control.unbounded_send(Control::Finish(reply));
        }));
    }

    /// Takes a checkpoint; afterwards, whoever waits for segments looks again.
    pub async fn checkpoint(&self, clean: bool) -> Result<(), CheckpointError> {
        self.checkpoint_with(clean, None).await
    }

    /// Takes a checkpoint, and a snapshot with it.
    pub async fn checkpoint_with(&self, clean: bool, split: Option<Split>) -> Result<(), CheckpointError> {
        let shared = &self.core.shared;
        let begun = shared.checkpoints_begun.fetch_add(1, Ordering::SeqCst) + 1;
        let result = self.try_checkpoint(clean, split).await;
        shared.checkpoint_wanted.store(false, Ordering::SeqCst);
        if result.is_ok() {
            shared.checkpoints.fetch_add(1, Ordering::Relaxed);
        }
        if result.is_err() || shared.segments.left().0 == 0 {
            shared.refused.store(begun, Ordering::SeqCst);
        }
        shared.checkpoints_ended.store(begun, Ordering::SeqCst);
        if let Err(error) = &result {
            tracing::warn!(%error, "no checkpoint");
        }
        shared.cleaning.notify_one();
        shared.backing.notify_one();
        shared.space_event.notify_waiters();
        result
    }

    async fn try_checkpoint(&self, clean: bool, split: Option<Split>) -> Result<(), CheckpointError> {
        let shared = &self.core.shared;
        if shared.set.is_failed() {
            return Err(CheckpointError::TooFewMembers);
        }
        let mut plan = shared.segments.begin_checkpoint();
        let merged = self.merge(split).await?;
        shared.segments.settle_plan(&mut plan);
        let mut writer = CheckpointWriter::new(&self.core.stripes, &shared.segments);
        let departed = shared.set.shields.departed();
        let written = self.write_checkpoint(&mut writer, &plan, &merged, &departed, clean).await;
        let (pointer, root, window) = match written {
            Ok(written) => written,
            Err(error) => {
                self.erase(writer.volume_parts()).await;
                shared.segments.abandon_checkpoint(&writer.used);
                if matches!(error, CheckpointError::MemberFull) {
                    writer.used.iter().for_each(|used| shared.segments.set_backed(used.index, false));
                }
                return Err(error);
            }
        };
        let published = self.superblocks.publish(|block| {
            block.departed.retain(|gone| !departed.contains(gone));
            block.checkpoint = Some(pointer);
            block.clean = clean;
        });
        // Where the superblocks could not all be written, either checkpoint may be found: neither gives anything back.
        published.await.map_err(|_| CheckpointError::TooFewMembers)?;
        let old = self.last_root.replace(root);
        self.erase(old.volume_parts()).await;
        shared.segments.finish_checkpoint(&plan, &window);
        shared.listed_at_checkpoint.store(shared.segments.left().0, Ordering::SeqCst);
        self.settle_receipts().await;
        Ok(())
    }

    /// Overwrites volumes in a checkpoint that no longer counts. Its segments are still its own.
    async fn erase(&self, parts: &[Part]) {
        // Nobody copies a stripe from before it was overwritten to a member where it has been.
        let _erasing = self.core.shared.erasing.lock().await;
        checkpoint_io::erase(&self.core.stripes, parts).await;
    }

    async fn write_checkpoint(
        &self,
        writer: &mut CheckpointWriter<'_>,
        plan: &Plan,
        merged: &[Merged],
        departed: &[Departed],
        clean: bool,
    ) -> Result<(super::superblock::CheckpointPointer, Root, super::segments::Window), CheckpointError> {
        let shared = &self.core.shared;
        let mut sections = SectionWriter::default();
        for volume in shared.all_volumes() {
            let resized = self.resizing.get().filter(|(id, _)| *id == volume.id);
            sections.volume(&volume, resized.map_or(volume.blocks(), |(_, blocks)| blocks), &writer.shield);
        }
        writer.put(&sections.0).await?;
        writer.end_volumes().await?;
        let mut sections = SectionWriter::default();
        for merged in merged {
            merged.shards.iter().for_each(|shard| sections.tree(shard));
            merged.streams.iter().for_each(|(stream, settled)| sections.stream(*stream, *settled));
        }
        shared.all_volumes().iter().for_each(|volume| sections.usage(volume));
        sections.receipts(&shared.receipts.entries(departed));
        writer.put(&sections.0).await?;
        let limit = if clean { 0 } else { shared.options.max_replay_segments as usize };
        let reserves = shared.admission.reserves();
        let keep = (reserves.checkpoint + reserves.pages) as usize;
        let window = shared.segments.window(plan, limit, keep, || self.core.random_u64());
        let mut sections = SectionWriter::default();
        sections.window(&window);
        sections.counters(self.next_volume.get(), window.next_sequence);
        sections.end();
        writer.put(&sections.0).await?;
        let (pointer, root) = writer.finish().await?;
        Ok((pointer, root, window))
    }

    /// Has every reactor bring what has been changed into its trees.
    async fn merge(&self, split: Option<Split>) -> Result<Vec<Merged>, CheckpointError> {
        let shared = &self.core.shared;
        let volumes = split.as_ref().map(Split::volumes);
        let asked = (0..shared.reactors).map(|reactor| {
            let ((done, merged), (frozen, is_frozen)) = (oneshot::channel(), oneshot::channel());
            let request = MergeRequest { frozen, done };
            shared.courier.send(reactor, Message(Inner::Merge(request)));
            (merged, is_frozen)
        });
        let (asked, frozen): (Vec<_>, Vec<_>) = asked.unzip();
        // Also of a reactor that has ended: it has nothing to hold off.
        join_all(frozen).await;
        split.into_iter().for_each(Split::release);
        // All of them, also if one fails: none is asked again while it is at it.
        let merged = join_all(asked).await;
        // A reactor that has ended would leave its shards out.
        let merged = merged.into_iter().map(|merged| Ok(merged.map_err(|_| CheckpointError::ReactorGone)??));
        let mut merged = merged.collect::<Result<Vec<Merged>, CheckpointError>>()?;
        if let Some((from, to)) = volumes {
            self.split(&from, &to, &mut merged).await?;
        }
        Ok(merged)
    }

    async fn create(&self, spec: VolumeSpec) -> Result<VolumeStatus, VolumeError> {
        self.check_spec(&spec)?;
        let id = self.take_id();
        let lineage = LineageId(Uuid::new_v4().as_u128());
        let key = LineageKey::generate(lineage, KeyEpoch(0), spec.cipher).map_err(|_| VolumeError::NoRandomness)?;
        let wrapped = key.wrap(&self.kek).map_err(|_| VolumeError::NoRandomness)?;
        let block_shift = spec.block_bytes.trailing_zeros() as u8;
        let volume = Arc::new(Volume {
            id,
            uuid: spec.uuid.unwrap_or_else(Uuid::new_v4),
            name: spec.name.clone(),
            block_shift,
            block_count: AtomicU64::new(spec.size_bytes >> block_shift),
            compression: spec.compression,
            cipher: spec.cipher,
            lineage,
            keys: Arc::new(VolumeKeys::new(wrapped)),
            family: Family::new(Role::Writable, None),
            closing: AtomicBool::new(false),
            in_trees: Usage::default(),
            in_layers: Usage::default(),
            in_flight: AtomicU64::new(0),
            idle: Notify::new(),
        });
        // Not ready until it is durable.
        volume.closing.store(true, Ordering::SeqCst);
        self.core.shared.keyring.insert(key);
        self.core.shared.receipts.begin(lineage, self.superblocks.current().await.epoch);
        self.with_volumes(|volumes| drop(volumes.insert(spec.name.clone(), Arc::clone(&volume))));
        if let Err(error) = self.checkpoint(false).await {
            self.with_volumes(|volumes| drop(volumes.remove(&spec.name)));
            self.core.shared.keyring.forget(lineage);
            self.core.shared.receipts.forget(lineage);
            return Err(error.into());
        }
        volume.closing.store(false, Ordering::SeqCst);
        Ok(volume_status(&volume))
    }

    fn check_spec(&self, spec: &VolumeSpec) -> Result<(), VolumeError> {
        check_name(&spec.name)?;
        let block_bytes = spec.block_bytes;
        if !matches!(block_bytes, 512 | 4096) {
            return Err(VolumeError::BlockSize { block_bytes });
        }
        check_size(spec.size_bytes, block_bytes)?;
        let volumes = self.core.shared.all_volumes();
        if volumes.len() >= VOLUMES_MAX {
            return Err(VolumeError::TooMany { count: volumes.len() });
        }
        for volume in volumes {
            if volume.name == spec.name && !volume.is_hidden() {
                return Err(VolumeError::NameTaken { name: spec.name.clone() });
            }
            if Some(volume.uuid) == spec.uuid {
                return Err(VolumeError::UuidTaken { uuid: volume.uuid, owner: volume.name.clone() });
            }
        }
        Ok(())
    }

    /// Lets nothing more in to a volume. What is under way may need a checkpoint, so its end is not waited for here.
    async fn begin_delete(&self, name: &str, reply: oneshot::Sender<Result<ReceiptStatus, VolumeError>>) {
        let volume = match self.find(name) {
            Ok(volume) => volume,
            Err(error) => return drop(reply.send(Err(error))),
        };
        if !self.core.shared.children(&volume).is_empty() {
            return drop(reply.send(self.hide(&volume).await));
        }
        volume.closing.store(true, Ordering::SeqCst);
        self.core.shared.space_event.notify_waiters();
        let core = Rc::clone(&self.core);
        self.core.env().spawn(Box::pin(async move {
            wait_idle(&volume).await;
            match weigh(&core, &volume).await {
                // If the coordinator has ended, the caller hears that nobody answers.
                Ok(weight) => {
                    drop(core.shared.control.unbounded_send(Control::FinishDelete(volume, weight, reply)));
                }
                Err(error) => {
                    // It stays as it was.
                    volume.closing.store(false, Ordering::SeqCst);
                    drop(reply.send(Err(error)));
                }
            }
        }));
    }

    /// Deletes a volume: a checkpoint does without it, and then what it had in memory goes. If the checkpoint fails, all is as
    /// it was, and the volume serves again.
    async fn delete(&self, volume: &Arc<Volume>, weight: &Weight) -> Result<ReceiptStatus, VolumeError> {
        let weigh_again = |sign: i64| {
            weight.iter().for_each(|(segment, bytes)| self.core.shared.segments.count_trees(*segment, -sign * bytes));
        };
        // No checkpoint comes between: each has either the volume or the room.
        weigh_again(1);
        self.with_volumes(|volumes| drop(volumes.remove(&volume.key())));
        let (receipt, undo) = self.note_deletion(volume).await;
        if let Err(error) = self.checkpoint(false).await {
            self.core.shared.receipts.take_back(undo);
            self.with_volumes(|volumes| drop(volumes.insert(volume.key(), Arc::clone(volume))));
            weigh_again(-1);
            volume.closing.store(false, Ordering::SeqCst);
            return Err(error.into());
        }
        self.forget(volume).await?;
        self.forget_key(volume);
        // What lay beneath may have only one reader left, or none.
        self.core.shared.absorbing.notify_one();
        // Its segments come back with the next one.
        self.core.shared.want_checkpoint();
        Ok(self.receipt_of(receipt))
    }

    /// Reactors forget what they have of a volume that is in no checkpoint any more.
    pub(super) async fn forget(&self, volume: &Arc<Volume>) -> Result<(), VolumeError> {
        for reactor in 0..self.core.shared.reactors {
            let (done, forgotten) = oneshot::channel();
            let forget = Inner::Forget { volume: Arc::clone(volume), done };
            self.core.shared.courier.send(reactor, Message(forget));
            forgotten.await.map_err(|_| VolumeError::Checkpoint(CheckpointError::ReactorGone))?;
        }
        Ok(())
    }

    /// The last of its lineage takes the key with it.
    pub(super) fn forget_key(&self, volume: &Volume) {
        if self.core.shared.of_lineage(volume.lineage).is_empty() {
            self.core.shared.keyring.forget(volume.lineage);
        }
    }

    /// A snapshot that others read from loses its name; when one reader is left, what it has goes over to that one.
    async fn hide(&self, volume: &Arc<Volume>) -> Result<ReceiptStatus, VolumeError> {
        let rename = |hidden: bool| {
            self.with_volumes(|volumes| {
                volumes.remove(&volume.key());
                volume.set_hidden(hidden);
                volumes.insert(volume.key(), Arc::clone(volume));
            });
        };
        let (receipt, undo) = self.note_deletion(volume).await;
        rename(true);
        if let Err(error) = self.checkpoint(false).await {
            self.core.shared.receipts.take_back(undo);
            rename(false);
            return Err(error.into());
        }
        self.core.shared.absorbing.notify_one();
        Ok(self.receipt_of(receipt))
    }

    pub(super) fn take_id(&self) -> u32 {
        self.next_volume.replace(self.next_volume.get() + 1)
    }

    async fn resize(&self, name: &str, size_bytes: u64) -> Result<VolumeStatus, VolumeError> {
        let volume = self.find(name)?;
        check_size(size_bytes, volume.block_bytes())?;
        if volume.is_snapshot() {
            return Err(VolumeError::IsSnapshot { name: name.into() });
        }
        let blocks = size_bytes >> volume.block_shift;
        if blocks < volume.blocks() {
            let from_bytes = volume.blocks() << volume.block_shift;
            return Err(VolumeError::Shrink { name: name.into(), from_bytes });
        }
        self.resizing.set(Some((volume.id, blocks)));
        let result = self.checkpoint(false).await;
        self.resizing.set(None);
        result?;
        volume.block_count.store(blocks, Ordering::SeqCst);
        Ok(volume_status(&volume))
    }

    pub(super) fn find(&self, name: &str) -> Result<Arc<Volume>, VolumeError> {
        let volume = self.core.shared.volume(name).filter(|volume| !volume.is_closing());
        volume.ok_or_else(|| VolumeError::NoSuchVolume { name: name.into() })
    }

    pub(super) fn with_volumes(&self, change: impl FnOnce(&mut super::shared::VolumeTable)) {
        let shared = &self.core.shared;
        let mut volumes = shared.volumes.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut volumes);
        shared.admission.set_volumes(volumes.len());
    }
}

/// 1 to 64 letters, digits, `-`, `_`, `.`.
pub fn check_name(name: &str) -> Result<(), VolumeError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let good = (1..=64).contains(&name.len()) && name.chars().all(allowed);
    if good { Ok(()) } else { Err(VolumeError::BadName { name: name.to_owned() }) }
}

fn check_size(size_bytes: u64, block_bytes: u32) -> Result<(), VolumeError> {
    if size_bytes == 0 || size_bytes > VOLUME_BYTES_MAX || !size_bytes.is_multiple_of(u64::from(block_bytes)) {
        return Err(VolumeError::Size { size_bytes, block_bytes });
    }
    Ok(())
}

/// What a volume that nobody changes any more leads to. First all of it is brought into its trees; then they are walked, beside
/// whatever else goes on.
pub(super) async fn weigh(core: &Core, volume: &Arc<Volume>) -> Result<Weight, VolumeError> {
    let shared = &core.shared;
    let (reply, answer) = oneshot::channel();
    let asked = shared.control.unbounded_send(Control::Checkpoint(Some(reply)));
    asked.map_err(|_| VolumeError::Closed)?;
    answer.await.map_err(|_| VolumeError::Closed)??;
    let mut weight = Weight::new();
    for reactor in 0..shared.reactors {
        let (done, weighed) = oneshot::channel();
        shared.courier.send(reactor, Message(Inner::Weigh { volume: Arc::clone(volume), done }));
        let part = weighed.await.map_err(|_| VolumeError::Checkpoint(CheckpointError::ReactorGone))?;
        part.into_iter().for_each(|(segment, bytes)| *weight.entry(segment).or_default() += bytes);
    }
    Ok(weight)
}

pub(super) async fn wait_idle(volume: &Volume) {
    loop {
        let idle = volume.idle.notified();
        if volume.in_flight.load(Ordering::SeqCst) == 0 {
            return;
        }
        idle.await;
    }
}

impl From<WriteFailed> for CheckpointError {
    fn from(error: WriteFailed) -> Self {
        match error {
            WriteFailed::NoSegment => Self::NoSpace,
            WriteFailed::TooLarge => Self::TooLarge,
            WriteFailed::Seal | WriteFailed::PageLost => Self::Map,
            WriteFailed::Stripe(WriteError::NoSpace) => Self::MemberFull,
            WriteFailed::Stripe(WriteError::TooFewMembers) => Self::TooFewMembers,
        }
    }
}

impl Core {
    /// Brings this reactor's changes into its trees. Changes go on meanwhile, in the layers; their generations are above the
    /// watermarks.
    pub async fn merge(&self, request: MergeRequest) {
        let shared = &self.shared;
        let newest = shared.segments.next_number();
        let old = newest.saturating_sub(shared.options.max_replay_segments.into());
        self.stream.retire(self, old);
        self.moves.retire(self, old);
        self.maps.writer.retire(&self.records, old);
        // All at one moment: what is settled, what is frozen, and up to which generation.
        let streams = [&self.stream, &self.moves].map(|stream| (stream.stream_number(self.index), stream.settled()));
        // A volume that is not there any more is being deleted: the checkpoint does without it.
        let volumes = shared.all_volumes();
        let is_there = |shard: &Rc<Shard>| volumes.iter().any(|volume| Arc::ptr_eq(volume, &shard.volume));
        let shards: Vec<_> = self.all_shards().into_iter().filter(is_there).collect();
        let frozen = |shard: &Rc<Shard>| {
            shard.map.freeze(&mut Books { segments: &shared.segments, volume: &shard.volume }, &shared.layers);
            (Rc::clone(shard), shard.applied.get())
        };
        let frozen: Vec<_> = shards.iter().map(frozen).collect();
        // Whoever asked may have given up.
        let _ = request.frozen.send(());
        let all: Vec<_> = shards.iter().map(|shard| shard.tree_ref()).collect();
        let merged = self.maps.merge(&all, &shared.layers).await.map(|()| {
            let merged = |(shard, watermark): &(Rc<Shard>, u64)| MergedShard {
                volume: shard.volume.id,
                shard: shard.number,
                watermark: *watermark,
                tree: shard.map.tree(),
            };
            Merged { streams, shards: frozen.iter().map(merged).collect() }
        });
        // The checkpoint may have been given up.
        let _ = request.done.send(merged);
    }
}
