//! How the volumes, snapshots and clones of one lineage hang together: what a map says nothing of, its parent's decides.
//!
//! Owns who lies beneath whom, and the gate that holds writes off for the moment in which a snapshot is taken. Must not know
//! maps. Invariants: a parent is a snapshot, and hosts never change it; each block of a record is led to by one map only; a
//! change of parents leaves what is read as it was.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use super::shared::{Shared, Volume};
use crate::stages::keys::LineageId;

/// Most snapshots that lie beneath a volume: a read of what none of them holds asks all of them.
pub const CHAIN_MAX: usize = 128;

/// What hosts may do with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Writable,
    Snapshot,
}

/// A volume's place in its family.
#[derive(Debug)]
pub struct Family {
    pub role: Role,
    parent: Mutex<Option<Arc<Volume>>>,
    has_parent: AtomicBool,
    hidden: AtomicBool,
    pub gate: Gate,
}

impl Family {
    pub fn new(role: Role, parent: Option<Arc<Volume>>) -> Self {
        let (has_parent, parent) = (AtomicBool::new(parent.is_some()), Mutex::new(parent));
        Self { role, parent, has_parent, hidden: AtomicBool::new(false), gate: Gate::default() }
    }
}

impl Volume {
    /// What decides where this volume's map says nothing.
    pub fn parent(&self) -> Option<Arc<Volume>> {
        if !self.family.has_parent.load(Ordering::SeqCst) {
            return None;
        }
        self.family.parent.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_parent(&self, parent: Option<Arc<Volume>>) {
        let mut held = self.family.parent.lock().unwrap_or_else(PoisonError::into_inner);
        self.family.has_parent.store(parent.is_some(), Ordering::SeqCst);
        *held = parent;
    }

    pub fn is_child_of(&self, other: &Arc<Volume>) -> bool {
        self.parent().is_some_and(|parent| Arc::ptr_eq(&parent, other))
    }

    /// How many lie beneath it.
    pub fn depth(&self) -> usize {
        std::iter::successors(self.parent(), |volume| volume.parent()).take(CHAIN_MAX + 1).count()
    }

    pub fn is_snapshot(&self) -> bool {
        self.family.role == Role::Snapshot
    }

    /// A snapshot that has been deleted, and that others still read from: it has no name any more.
    pub fn is_hidden(&self) -> bool {
        self.family.hidden.load(Ordering::SeqCst)
    }

    pub fn set_hidden(&self, hidden: bool) {
        self.family.hidden.store(hidden, Ordering::SeqCst);
    }

    /// Whether holes stand in its map, as otherwise something beneath would show through.
    pub fn keeps_holes(&self) -> bool {
        self.family.has_parent.load(Ordering::SeqCst)
    }

    /// Its key in the table of volumes: no name begins so.
    pub fn key(&self) -> String {
        if self.is_hidden() { format!("#{}", self.id) } else { self.name.clone() }
    }

    /// Blocks that hold something, at most: what lies beneath counts also where it doesn't show.
    pub fn mapped_blocks(&self) -> u64 {
        let beneath = std::iter::successors(self.parent(), |volume| volume.parent());
        let all = self.used_blocks() + beneath.map(|volume| volume.used_blocks()).sum::<u64>();
        all.min(self.blocks())
    }

    /// Whether what lies beneath may be going over to what lies above it at the moment.
    pub fn is_upon_hidden(&self) -> bool {
        std::iter::successors(self.parent(), |volume| volume.parent()).any(|volume| volume.is_hidden())
    }

    /// The nearest snapshot beneath it that has a name.
    pub fn origin(&self) -> Option<Arc<Volume>> {
        std::iter::successors(self.parent(), |volume| volume.parent()).find(|volume| !volume.is_hidden())
    }
}

impl Shared {
    /// The volumes that lie upon a snapshot.
    pub fn children(&self, of: &Arc<Volume>) -> Vec<Arc<Volume>> {
        self.all_volumes().into_iter().filter(|volume| volume.is_child_of(of)).collect()
    }

    /// A volume with its snapshots and clones, and theirs.
    pub fn of_lineage(&self, lineage: LineageId) -> Vec<Arc<Volume>> {
        self.all_volumes().into_iter().filter(|volume| volume.lineage == lineage).collect()
    }
}

/// Lets changes of a volume's content through, or holds them off for a moment.
#[derive(Debug, Default)]
pub struct Gate {
    holds: AtomicU64,
    inside: AtomicU64,
    /// Nobody holds changes off any longer.
    opened: Notify,
    /// None is under way.
    quiet: Notify,
}

/// A change under way.
pub struct Inside<'a>(&'a Gate);

impl Gate {
    /// Waits until nobody holds changes off.
    pub async fn enter(&self) -> Inside<'_> {
        loop {
            let opened = self.opened.notified();
            // First it counts, then it looks: whoever holds changes off does it the other way round.
            self.inside.fetch_add(1, Ordering::SeqCst);
            let inside = Inside(self);
            if self.holds.load(Ordering::SeqCst) == 0 {
                return inside;
            }
            drop(inside);
            opened.await;
        }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if self.0.inside.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.quiet.notify_waiters();
        }
    }
}

/// Changes of a volume are held off until it is dropped.
pub struct Hold(Arc<Volume>);

impl Hold {
    /// Lets no further change begin.
    pub fn on(volume: &Arc<Volume>) -> Self {
        volume.family.gate.holds.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(volume))
    }

    /// Waits until those under way have ended.
    pub async fn quiet(&self) {
        let gate = &self.0.family.gate;
        loop {
            let quiet = gate.quiet.notified();
            if gate.inside.load(Ordering::SeqCst) == 0 {
                return;
            }
            quiet.await;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let gate = &self.0.family.gate;
        gate.holds.fetch_sub(1, Ordering::SeqCst);
        gate.opened.notify_waiters();
    }
}
