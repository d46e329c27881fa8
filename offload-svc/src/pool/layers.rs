//! A shard's map as its reactor has it: the tree on the members, and the changes over it that are not in it yet.
//!
//! Owns the order of the layers and how much may lie in them. Must not know how pages are read or merged. Invariants: a
//! change is in the active layer until a checkpoint freezes it, and then in the frozen one until the tree has it; so tree,
//! frozen and active layer together are the map at every moment.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering};

use super::map::{Layer, Ledger, Run, What, lay_over};
use super::page::{FANOUT, LEAF_BLOCKS, Leaves, PAGE_BLOCK_SHIFT, PAGE_BYTES_MAX, PageId, PagePointer};
use super::shared::Volume;
use crate::stages::record::sealed_bound;

/// What one leaf that is changed makes a merge write at most: itself and the node above it. Nodes further up are shared.
pub const DIRTY_LEAF_BYTES: u64 = 2 * sealed_bound(PAGE_BYTES_MAX, PAGE_BLOCK_SHIFT) as u64;

/// How much waits to be merged, over all shards.
#[derive(Debug, Default)]
pub struct LayerBudget {
    runs: AtomicI64,
    leaves: AtomicI64,
}

impl LayerBudget {
    fn add(&self, runs: i64, leaves: i64) {
        self.runs.fetch_add(runs, Ordering::SeqCst);
        self.leaves.fetch_add(leaves, Ordering::SeqCst);
    }

    /// Runs in all layers.
    pub fn runs(&self) -> u64 {
        self.runs.load(Ordering::SeqCst).max(0) as u64
    }

    /// How much of what may wait does, in parts of a hundred: of memory (`runs_max`) or of the room for pages.
    pub fn percent(&self, runs_max: u64, merge_bytes: u64) -> u64 {
        let bytes = self.leaves.load(Ordering::SeqCst).max(0) as u64 * DIRTY_LEAF_BYTES;
        (self.runs() * 100 / runs_max.max(1)).max(bytes * 100 / merge_bytes.max(1))
    }
}

/// The pages of a shard.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tree {
    /// The root's level.
    pub height: u8,
    pub root: Option<PagePointer>,
}

/// The map of one shard.
#[derive(Debug)]
pub struct ShardMap {
    pub leaves: Leaves,
    tree: Cell<Tree>,
    frozen: RefCell<Layer>,
    active: RefCell<Layer>,
    /// Leaves that the layers change, at most.
    dirty: Cell<[i64; 2]>,
    /// Another map lies beneath: a hole is written down.
    over: Cell<bool>,
    /// Pages that are to be written anew, as their segment is wanted back.
    moving: RefCell<BTreeSet<PageId>>,
}

impl ShardMap {
    pub fn new(volume: &Volume, shard: u16, tree: Tree) -> Self {
        Self {
            leaves: Leaves::of(volume, shard),
            tree: Cell::new(tree),
            frozen: RefCell::default(),
            active: RefCell::default(),
            dirty: Cell::new([0; 2]),
            over: Cell::new(volume.parent().is_some()),
            moving: RefCell::default(),
        }
    }

    /// Whether another map lies beneath.
    pub fn set_over(&self, over: bool) {
        self.over.set(over);
    }

    pub fn tree(&self) -> Tree {
        self.tree.get()
    }

    /// Makes a change.
    pub fn apply(&self, run: Run, ledger: &mut impl Ledger, budget: &LayerBudget) {
        let mut active = self.active.borrow_mut();
        let before = active.len() as i64;
        let dirty = self.newly_dirty(&active, &run);
        active.put(run, ledger);
        budget.add(active.len() as i64 - before, dirty);
        let [frozen, own] = self.dirty.get();
        self.dirty.set([frozen, own + dirty]);
    }

    /// Leaves that a run makes the next merge write, beside those that it writes anyway.
    fn newly_dirty(&self, active: &Layer, run: &Run) -> i64 {
        let span = self.leaves.within(&(run.lba..run.end()));
        let edge = |leaf: u64| {
            let range = self.leaves.range(leaf);
            // A hole over all of it makes it go away, and a part of one doesn't.
            let partly = |run: &Run| run.count < LEAF_BLOCKS;
            let whole = run.what == What::Hole && run.lba <= range.start && range.end <= run.end();
            !whole && !active.overlapping(range).any(|run| partly(&run))
        };
        let edges = [span.start, span.end.saturating_sub(1)];
        let edges = if span.end.saturating_sub(span.start) > 1 { &edges[..] } else { &edges[..1] };
        if self.over.get() && run.what == What::Hole {
            return span.end.saturating_sub(span.start) as i64;
        }
        let dirty = edges.iter().filter(|leaf| span.contains(*leaf) && edge(**leaf)).count() as i64;
        // And nodes above what goes away between the edges.
        dirty + ((span.end.saturating_sub(span.start)) / FANOUT as u64).min(i64::MAX as u64) as i64
    }

    /// What the layers say of a range, in order. What they say nothing of, the tree decides.
    pub fn view(&self, range: &Range<u64>) -> Vec<Run> {
        let (frozen, active) = (self.frozen.borrow(), self.active.borrow());
        let over: Vec<Run> = active.overlapping(range.clone()).collect();
        if frozen.is_empty() { over } else { lay_over(frozen.overlapping(range.clone()), &over, |_| {}) }
    }

    /// The first block from `lba` on that a layer speaks of.
    pub fn next_in_layers(&self, lba: u64) -> Option<u64> {
        let first = |layer: &Layer| layer.first_after(lba).map(|run| run.lba.max(lba));
        let (frozen, active) = (first(&self.frozen.borrow()), first(&self.active.borrow()));
        frozen.into_iter().chain(active).min()
    }

    /// The first block after which `limit` runs of the active layer have passed, or the range's end.
    pub fn slice_end(&self, range: Range<u64>, limit: usize) -> u64 {
        self.active.borrow().slice_end(range, limit)
    }

    /// A checkpoint begins: what has been changed up to now is merged by it.
    pub fn freeze(&self, ledger: &mut impl Ledger, budget: &LayerBudget) {
        let (mut frozen, mut active) = (self.frozen.borrow_mut(), self.active.borrow_mut());
        let before = (frozen.len() + active.len()) as i64;
        if frozen.is_empty() {
            std::mem::swap(&mut *frozen, &mut *active);
        } else {
            frozen.absorb(std::mem::take(&mut *active), ledger);
        }
        budget.add(frozen.len() as i64 - before, 0);
        let [frozen_dirty, active_dirty] = self.dirty.get();
        self.dirty.set([frozen_dirty + active_dirty, 0]);
    }

    /// What is to be merged of a range.
    pub fn frozen(&self, range: Range<u64>) -> Vec<Run> {
        self.frozen.borrow().overlapping(range).collect()
    }

    /// The first frozen run that ends after `lba`, whole.
    pub fn next_frozen(&self, lba: u64) -> Option<Run> {
        self.frozen.borrow().first_after(lba)
    }

    /// The tree has what was frozen below `cut`.
    pub fn commit(&self, tree: Tree, cut: u64, ledger: &mut impl Ledger, budget: &LayerBudget) {
        let mut frozen = self.frozen.borrow_mut();
        let before = frozen.len() as i64;
        self.tree.set(tree);
        frozen.forget(0..cut, ledger);
        let [dirty, active] = self.dirty.get();
        let merged = if frozen.is_empty() { dirty } else { 0 };
        budget.add(frozen.len() as i64 - before, -merged);
        self.dirty.set([dirty - merged, active]);
    }

    /// A snapshot is taken: `to` gets the tree, with the pages of it that are to be written anew, and this map begins again,
    /// empty, over it.
    pub fn split(&self, to: &Self) {
        to.tree.set(self.tree.take());
        to.moving.borrow_mut().append(&mut self.moving.borrow_mut());
        to.over.set(self.over.replace(true));
    }

    /// Has a page written anew by the next merge.
    pub fn move_page(&self, id: PageId) {
        self.moving.borrow_mut().insert(id);
    }

    /// Pages that are to be written anew, some of them.
    pub fn moving(&self, limit: usize) -> Vec<PageId> {
        self.moving.borrow().iter().take(limit).copied().collect()
    }

    pub fn moved(&self, pages: &[PageId]) {
        let mut moving = self.moving.borrow_mut();
        moving.retain(|id| !pages.contains(id));
    }

    /// Forgets the layers of a volume that is gone.
    pub fn forget(&self, ledger: &mut impl Ledger, budget: &LayerBudget) {
        let (mut frozen, mut active) = (self.frozen.borrow_mut(), self.active.borrow_mut());
        let [frozen_dirty, active_dirty] = self.dirty.replace([0; 2]);
        budget.add(-((frozen.len() + active.len()) as i64), -(frozen_dirty + active_dirty));
        frozen.forget(0..u64::MAX, ledger);
        active.forget(0..u64::MAX, ledger);
        self.moving.borrow_mut().clear();
    }

    /// No layer leads to a record.
    pub fn leads_nowhere(&self) -> bool {
        let nowhere = |layer: &Layer| layer.overlapping(0..u64::MAX).all(|run| run.extent().is_none());
        nowhere(&self.frozen.borrow()) && nowhere(&self.active.borrow())
    }

    /// Nothing lies over the tree.
    #[cfg(test)]
    pub fn is_merged(&self) -> bool {
        self.frozen.borrow().is_empty() && self.active.borrow().is_empty()
    }
}
