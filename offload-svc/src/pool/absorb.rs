//! Giving back snapshots that have been deleted while others read from them.
//!
//! Owns the way of what such a snapshot holds to the one volume that still lies upon it. Must not know requests. Invariants: of
//! each block, either the snapshot's map or its child's leads to the record, and both change at one moment; a snapshot
//! goes only when a checkpoint has its map empty.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::oneshot;

use super::coordinator::{Control, Coordinator, wait_idle, weigh};
use super::core::{Core, Shard};
use super::handle::{CheckpointError, VolumeError};
use super::map::{Extent, Run, What};
use super::message::{Inner, Message};
use super::shared::{InFlight, Volume};
use super::stream::yield_now;

/// How long what could not be given back is let alone.
const TRY_AGAIN: Duration = Duration::from_secs(30);

/// The task: gives back what it can, whenever a snapshot is deleted, and at the start what earlier mounts have left.
pub async fn run(core: Rc<Core>) {
    let shared = &core.shared;
    loop {
        // One that can't be given back must not keep others from it.
        let mut failed = BTreeSet::new();
        while let Some(hidden) = next(&core, &failed) {
            if shared.is_closing() {
                return;
            }
            let gone = match &shared.children(&hidden)[..] {
                [] => delete(&core, &hidden).await,
                [child] => absorb(&core, child, &hidden).await,
                _ => false,
            };
            if !gone {
                failed.insert(hidden.id);
            }
        }
        if failed.is_empty() {
            shared.absorbing.notified().await;
        } else {
            core.env().sleep_until(core.env().now() + TRY_AGAIN).await;
        }
    }
}

/// A snapshot without a name that one volume at most lies upon.
fn next(core: &Core, failed: &BTreeSet<u32>) -> Option<Arc<Volume>> {
    let ready = |volume: &Arc<Volume>| {
        let wanted = volume.is_hidden() && !volume.is_closing() && !failed.contains(&volume.id);
        wanted && core.shared.children(volume).len() <= 1
    };
    core.shared.all_volumes().into_iter().find(ready)
}

/// Nobody reads from it any more.
async fn delete(core: &Rc<Core>, hidden: &Arc<Volume>) -> bool {
    hidden.closing.store(true, Ordering::SeqCst);
    wait_idle(hidden).await;
    let deleted = match weigh(core, hidden).await {
        Ok(weight) => {
            let (reply, answer) = oneshot::channel();
            let asked = core.shared.control.unbounded_send(Control::FinishDelete(Arc::clone(hidden), weight, reply));
            asked.is_ok() && matches!(answer.await, Ok(Ok(_)))
        }
        Err(_) => false,
    };
    if !deleted {
        hidden.closing.store(false, Ordering::SeqCst);
    }
    deleted
}

/// Brings all of it over to its child; tells whether it is gone.
async fn absorb(core: &Rc<Core>, child: &Arc<Volume>, from: &Arc<Volume>) -> bool {
    let shared = &core.shared;
    // A read that began while it had its name still needs what it has.
    wait_idle(from).await;
    for reactor in 0..shared.reactors {
        let (done, absorbed) = oneshot::channel();
        let absorb = Inner::Absorb { child: Arc::clone(child), from: Arc::clone(from), done };
        shared.courier.send(reactor, Message(absorb));
        // A reactor that has ended brings nothing over: the next mount does.
        let _ = absorbed.await;
    }
    let (reply, finished) = oneshot::channel();
    let asked = shared.control.unbounded_send(Control::FinishAbsorb(Arc::clone(from), reply));
    asked.is_ok() && finished.await.unwrap_or(false)
}

impl Coordinator {
    /// Does without a snapshot that has nothing any more; tells whether that is so.
    pub(super) async fn finish_absorb(&self, from: &Arc<Volume>) -> bool {
        let shared = &self.core.shared;
        if self.checkpoint(false).await.is_err() {
            return false;
        }
        match self.is_empty(from).await {
            Ok(true) => {}
            Ok(false) => return false,
            Err(_) => return false,
        }
        let children = shared.children(from);
        children.iter().for_each(|child| child.set_parent(from.parent()));
        // No reader finds the way to it any more.
        from.closing.store(true, Ordering::SeqCst);
        self.with_volumes(|volumes| drop(volumes.remove(&from.key())));
        self.end_lineage(from.lineage).await;
        // If this one fails, the last one has it, empty: that is the same to its child.
        if let Err(error) = self.checkpoint(false).await {
            tracing::warn!(snapshot = from.name, %error, "a snapshot that has nothing any more stays until the next checkpoint");
        }
        if self.forget(from).await.is_err() {
            return false;
        }
        self.forget_key(from);
        tracing::info!(
            snapshot = from.name,
            "the deleted snapshot is given back: what was still read of it is its child's"
        );
        true
    }

    async fn is_empty(&self, volume: &Arc<Volume>) -> Result<bool, VolumeError> {
        for reactor in 0..self.core.shared.reactors {
            let (done, empty) = oneshot::channel();
            let ask = Inner::IsEmpty { volume: Arc::clone(volume), done };
            self.core.shared.courier.send(reactor, Message(ask));
            if !empty.await.map_err(|_| VolumeError::Checkpoint(CheckpointError::ReactorGone))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Core {
    /// Brings over what this reactor has of a snapshot to the volume upon it. What can't be read stays.
    pub async fn absorb(&self, child: &Arc<Volume>, from: &Arc<Volume>) {
        for shard in self.all_shards().into_iter().filter(|shard| Arc::ptr_eq(&shard.volume, from)) {
            let upon = self.shard(child, shard.number);
            let (mut at, mut over) = (0, 0);
            while let Some((runs, end)) = self.maps.next_runs(shard.tree_ref(), at).await {
                at = end;
                yield_now().await;
                let (Some(first), Some(last)) = (runs.first(), runs.last()) else { continue };
                let range = first.lba..last.end();
                if self.shared.is_closing() || self.layer_room().await.is_err() {
                    return;
                }
                over += self.absorb_range(&upon, &shard, range).await;
                // What goes over counts twice until it is merged: no host must be refused for that.
                if over > self.shared.admission.segment_payload_bytes() {
                    over = 0;
                    self.next_checkpoint().await;
                }
            }
        }
    }

    async fn absorb_range(&self, child: &Rc<Shard>, from: &Rc<Shard>, range: Range<u64>) -> u64 {
        let _in_flight = InFlight::on(&child.volume);
        // Nothing is written or moved there meanwhile.
        let _held = child.locks.enter(range.clone(), true).await;
        let _held_from = from.locks.enter(range.clone(), true).await;
        let own = self.maps.lookup(child.tree_ref(), &range).await;
        let runs = self.maps.lookup(from.tree_ref(), &range).await;
        if child.volume.is_closing() || !child.volume.is_child_of(&from.volume) {
            return 0;
        }
        // Nobody can tell at the moment what of it shows.
        if own.iter().any(|run| run.what == What::Lost) {
            return 0;
        }
        let beneath = from.volume.parent().is_some();
        let mut bytes = 0;
        for run in runs.iter().filter(|run| run.what != What::Lost) {
            let shows = |part: &Run| beneath || part.what != What::Hole;
            // First what comes: others look at the counters.
            for part in uncovered(run, &own).into_iter().filter(shows) {
                bytes += part.extent().map_or(0, Extent::stored_share);
                child.change(&self.shared, part);
            }
            from.change(&self.shared, Run { what: What::Gone, ..*run });
        }
        bytes
    }

    /// Whether no map of this reactor leads to anything for a volume.
    pub fn is_empty(&self, volume: &Arc<Volume>) -> bool {
        let shards = self.all_shards();
        let mut own = shards.iter().filter(|shard| Arc::ptr_eq(&shard.volume, volume));
        own.all(|shard| shard.map.tree().root.is_none() && shard.map.leads_nowhere())
    }
}

/// The parts of a run that none of the others lie over.
fn uncovered(run: &Run, over: &[Run]) -> Vec<Run> {
    let (mut at, mut parts) = (run.lba, Vec::new());
    for top in over.iter().filter(|top| top.lba < run.end() && run.lba < top.end()) {
        if at < top.lba {
            parts.push(run.clip(&(at..top.lba)));
        }
        at = at.max(top.end());
    }
    if at < run.end() {
        parts.push(run.clip(&(at..run.end())));
    }
    parts
}
