//! Giving a volume, and all that share its lineage, a new key, and carrying their records over.
//!
//! Owns the order of a rotation. Must not know how records are sealed. Invariants: the new key is durable before the first
//! record is sealed under it; the older one is given up only when nothing on the members needs it, and until then both
//! stand in every checkpoint, so that a rotation that was cut short goes on at the next mount.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use nvmf_target::backend::Outcome;
use tokio::sync::oneshot;

use super::coordinator::{Control, Coordinator};
use super::core::{Core, Shard};
use super::handle::{VolumeError, key_status};
use super::layers::DIRTY_LEAF_BYTES;
use super::map::Run;
use super::message::{Inner, Message};
use super::shared::{InFlight, Volume};
use super::status::KeyStatus;
use super::stream::{Lane, yield_now};
use super::write::{all_written, bound_of};
use crate::stages::keys::{KeyEpoch, LineageId, LineageKey};

/// Extents carried over side by side: of the shortest, about what fills a stripe.
const AT_ONCE: usize = 32;
/// How long what could not be carried over is let alone.
const TRY_AGAIN: Duration = Duration::from_secs(30);

impl Coordinator {
    /// Makes a key, makes it durable, and has new records sealed under it.
    pub(super) async fn rotate(&self, name: &str) -> Result<KeyStatus, VolumeError> {
        let volume = self.find(name)?;
        if volume.keys.lock().len() > 1 {
            let left_bytes = self.core.shared.left_bytes(&volume);
            return Err(VolumeError::Rotating { name: name.into(), left_bytes });
        }
        let epoch = KeyEpoch(volume.keys.current().0.checked_add(1).ok_or(VolumeError::NoRandomness)?);
        let key = LineageKey::generate(volume.lineage, epoch, volume.cipher).map_err(|_| VolumeError::NoRandomness)?;
        let wrapped = key.wrap(&self.kek).map_err(|_| VolumeError::NoRandomness)?;
        self.core.shared.keyring.insert(key);
        volume.keys.lock().push(wrapped);
        if let Err(error) = self.checkpoint(false).await {
            // It may be durable all the same: then the next mount finishes the rotation. Nothing is sealed under it here.
            volume.keys.lock().pop();
            self.core.shared.keyring.forget_epoch(volume.lineage, epoch);
            return Err(error.into());
        }
        volume.keys.set_current(epoch);
        tracing::info!(volume = name, epoch = epoch.0, "new key; what is under the older one is carried over");
        carry_over(&self.core, volume.lineage);
        Ok(key_status(&self.core.shared, &volume))
    }

    /// Gives the older key up, if nothing needs it any longer; tells whether that is so.
    pub(super) async fn finish_rotation(&self, lineage: LineageId) -> bool {
        let Some(volume) = self.core.shared.of_lineage(lineage).into_iter().next() else { return true };
        let left = || self.core.shared.left_bytes(&volume) > 0;
        // What has been carried over counts as left until it is merged, and so do the pages that led to it.
        if left() && (self.checkpoint(false).await.is_err() || left()) {
            return false;
        }
        let older = {
            let mut keys = volume.keys.lock();
            if keys.len() < 2 {
                return true;
            }
            keys.remove(0)
        };
        if self.checkpoint(false).await.is_err() {
            volume.keys.lock().insert(0, older);
            return false;
        }
        self.core.shared.keyring.forget_epoch(lineage, older.epoch());
        // If that fails the pool has, and the next mount does it.
        let _ = self.superblocks.write_again().await;
        tracing::info!(volume = volume.name, epoch = older.epoch().0, "the older key is given up: nothing is under it");
        true
    }
}

/// Goes on with the rotations that an earlier mount began.
pub fn go_on(core: &Rc<Core>) {
    let rotating = |volume: &Arc<Volume>| (volume.keys.lock().len() > 1).then_some(volume.lineage);
    let lineages: BTreeSet<LineageId> = core.shared.all_volumes().iter().filter_map(rotating).collect();
    lineages.into_iter().for_each(|lineage| carry_over(core, lineage));
}

/// Has every reactor carry its part over, again and again until nothing is left.
fn carry_over(core: &Rc<Core>, lineage: LineageId) {
    let task_core = Rc::clone(core);
    core.env().spawn(Box::pin(async move {
        let shared = &task_core.shared;
        let left = || shared.of_lineage(lineage).iter().map(|volume| volume.left_bytes()).sum::<u64>();
        for round in 0u64.. {
            let before = left();
            for volume in shared.of_lineage(lineage) {
                for reactor in 0..shared.reactors {
                    let (done, carried) = oneshot::channel();
                    // Pages that hold nothing under the older key go over last.
                    let rekey = Inner::Rekey { volume: Arc::clone(&volume), pages: round > 0, done };
                    shared.courier.send(reactor, Message(rekey));
                    // A reactor that has ended carries nothing: the next mount does.
                    let _ = carried.await;
                }
            }
            if shared.is_closing() {
                return;
            }
            let (reply, finished) = oneshot::channel();
            let asked = shared.control.unbounded_send(Control::FinishRotation(lineage, reply));
            if asked.is_err() || finished.await.unwrap_or(true) {
                return;
            }
            // Pages go over some with each checkpoint.
            if round > 0 && left() >= before {
                task_core.env().sleep_until(task_core.env().now() + TRY_AGAIN).await;
            }
        }
    }));
}

impl Core {
    /// Carries over what this reactor has of a volume, some records at a time. What can't be read, or finds no room, stays.
    pub async fn rekey(&self, volume: &Arc<Volume>, pages: bool) {
        // Whatever was sealed under the older key before is in the maps then.
        self.stream.settled_so_far().await;
        let mut marked = 0;
        self.moves.settled_so_far().await;
        for shard in self.all_shards().into_iter().filter(|shard| Arc::ptr_eq(&shard.volume, volume)) {
            if pages {
                // Whoever deletes the volume waits for it: what is weighed stays where it is.
                let _in_flight = InFlight::on(volume);
                if self.is_stopping(volume) {
                    return;
                }
                let current = volume.keys.current().0;
                // Some with each checkpoint: a quarter of what one merge may write, beside what has been changed.
                let most = self.shared.admission.merge_bytes() / 4 / DIRTY_LEAF_BYTES / self.shared.reactors as u64;
                let outdated = self.maps.pages_of(shard.tree_ref(), |page| page.key_epoch != current).await;
                let room = (most as usize).max(1).saturating_sub(marked);
                for id in outdated.into_iter().take(room) {
                    shard.map.move_page(id);
                    marked += 1;
                }
            }
            let mut at = 0;
            loop {
                let mut next = Vec::new();
                while next.len() < AT_ONCE
                    && let Some(range) = self.next_outdated(&shard, &mut at).await
                {
                    next.push(range);
                }
                if next.is_empty() {
                    break;
                }
                if self.is_stopping(volume) {
                    return;
                }
                let _in_flight = InFlight::on(volume);
                // Side by side, so that they share stripes.
                let carried = join_all(next.into_iter().map(|range| self.carry(&shard, range))).await;
                if carried.iter().any(|outcome| *outcome != Outcome::Success) {
                    return;
                }
            }
        }
    }

    fn is_stopping(&self, volume: &Volume) -> bool {
        volume.is_closing() || self.shared.closing.load(Ordering::SeqCst)
    }

    /// The next extent under the older key from `at` on, which is moved past it.
    async fn next_outdated(&self, shard: &Shard, at: &mut u64) -> Option<Range<u64>> {
        loop {
            if self.is_stopping(&shard.volume) {
                return None;
            }
            let current = shard.volume.keys.current().0;
            let (runs, end) = self.maps.next_runs(shard.tree_ref(), *at).await?;
            let outdated = |run: &&Run| run.extent().is_some_and(|extent| extent.key_epoch != current);
            if let Some(run) = runs.iter().find(outdated) {
                *at = run.end();
                return Some(run.lba..*at);
            }
            *at = end;
            yield_now().await;
        }
    }

    /// Writes what is still under the older key in a range anew, as a host would, with overlapping writes held off.
    async fn carry(&self, shard: &Rc<Shard>, range: Range<u64>) -> Outcome {
        let _admitted = match self.admit(shard, &range).await {
            Ok(admitted) => admitted,
            Err(outcome) => return outcome,
        };
        let _held = shard.locks.enter(range.clone(), true).await;
        let current = shard.volume.keys.current().0;
        let runs = self.maps.lookup(shard.tree_ref(), &range).await;
        let outdated = |run: &&Run| run.extent().is_some_and(|extent| extent.key_epoch != current);
        let outdated: Vec<Range<u64>> = runs.iter().filter(outdated).map(|run| run.lba..run.end()).collect();
        let mut pending = Vec::new();
        for part in outdated {
            // A block that is lost stays where it is, and so does its key, until it is written or deallocated.
            let Ok(plain) = self.read_to_memory(shard, part.clone()).await else { continue };
            self.moves.room_for(self, bound_of(shard, &part)).await;
            // How old it is nobody knows.
            self.moves.note_age(self.shared.segments.next_number());
            match self.log_data(Lane::Moved, shard, part, &plain) {
                Ok(written) => pending.push(written),
                Err(outcome) => return outcome,
            }
        }
        all_written(pending).await
    }
}
