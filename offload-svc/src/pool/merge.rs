//! Merging the layers of maps into their trees: new pages from the leaves up, in slices.
//!
//! Owns the change of trees and the count of what they lead to. Must not know when a checkpoint is taken. Invariants: a
//! slice changes a map's tree, layers and counts at one moment, after its pages are durable; no page is changed in place; a
//! page that can't be read is kept as the base of the one that takes its place, so that nothing in it is given up.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::rc::Rc;

use futures::future::join_all;

use super::checkpoint_io::WriteFailed;
use super::layers::{LayerBudget, Tree};
use super::map::{Extent, Run, What, lay_over};
use super::page::{Body, HEIGHT_MAX, PAGE_BLOCK_SHIFT, Page, PageId, PagePointer};
use super::page_writer::NewPage;
use super::segments::Segments;
use super::shared::{Books, UsageDelta, Volume};
use super::stream::yield_now;
use super::tree::{Found, MapIo, ShardRef};
use crate::stages::compress::Compression;
use crate::stages::record::{Birth, Kind, Owner, SealError, Sealing, sealed_bound};

/// Leaves that one slice changes at most.
const SLICE_LEAVES: usize = 128;
/// Leaves read at once.
const READ_AT_ONCE: usize = 16;

/// What enters or leaves a tree, by segment and for its volume.
#[derive(Default)]
struct Tally {
    segments: BTreeMap<u32, i64>,
    usage: UsageDelta,
}

impl Tally {
    fn extent(&mut self, extent: &Extent, sign: i64) {
        *self.segments.entry(extent.location.stripe.segment).or_default() += extent.stored_share() as i64 * sign;
        self.usage.extent(extent, sign);
    }

    fn page(&mut self, page: &PagePointer, sign: i64) {
        let location = &page.location;
        *self.segments.entry(location.stripe.segment).or_default() += i64::from(location.stored_bytes) * sign;
        self.usage.page(page, sign);
    }

    fn apply(&self, segments: &Segments, volume: &Volume) {
        self.segments.iter().for_each(|(segment, bytes)| segments.count_trees(*segment, *bytes));
        volume.in_trees.add(&self.usage);
    }
}

/// What becomes of a page.
enum Changed {
    Gone,
    /// As it is, under a new node above it.
    Kept(PagePointer),
    Written(NewPage),
}

impl Changed {
    fn pointer(&self) -> Option<PagePointer> {
        match self {
            Changed::Gone => None,
            Changed::Kept(pointer) => Some(*pointer),
            Changed::Written(page) => page.pointer(),
        }
    }
}

/// One slice of one shard.
struct Work<'a> {
    shard: ShardRef<'a>,
    tree: Tree,
    /// Blocks below it are merged.
    cut: u64,
    /// Pages to be written anew, in their order.
    moving: Vec<PageId>,
    leaves: Vec<u64>,
    /// The new tree's root is at this level.
    height: u8,
    /// Of the level that is done, by index.
    changed: BTreeMap<u64, Changed>,
    added: Tally,
    removed: Tally,
    old: Vec<(PageId, PagePointer)>,
    new: Vec<(PageId, Rc<Page>, NewPage)>,
}

/// What a leaf is to be made from.
struct OldPage {
    page: Option<Rc<Page>>,
    pointer: Option<PagePointer>,
    /// What an older page that could not be read before says.
    base: Option<Rc<Page>>,
    orphan: bool,
}

impl MapIo {
    /// Merges all that is frozen in these shards, and moves the pages that are to be moved. All shards whose maps lie beneath one of
    /// them must be among them.
    pub async fn merge(&self, shards: &[ShardRef<'_>], budget: &LayerBudget) -> Result<(), WriteFailed> {
        let merged = self.merge_slices(shards, budget).await;
        if merged.is_err() {
            self.writer.discard();
        }
        merged
    }

    async fn merge_slices(&self, shards: &[ShardRef<'_>], budget: &LayerBudget) -> Result<(), WriteFailed> {
        let beneath = beneath_of(shards);
        loop {
            let (mut works, mut left) = (Vec::new(), SLICE_LEAVES);
            for (shard, upon) in shards.iter().zip(&beneath) {
                if let Some(work) = self.plan(*shard, upon, &mut left).await {
                    works.push(work);
                }
                if left == 0 {
                    break;
                }
            }
            if works.is_empty() {
                return Ok(());
            }
            for work in &mut works {
                self.rewrite_leaves(work).await?;
            }
            self.writer.flush(&self.records).await?;
            let top = works.iter().map(|work| work.height).max().unwrap_or(0);
            for level in 1..=top {
                for work in works.iter_mut().filter(|work| level <= work.height) {
                    self.rewrite_nodes(work, level).await?;
                }
                self.writer.flush(&self.records).await?;
            }
            for work in works {
                self.commit(work, budget)?;
            }
            yield_now().await;
        }
    }

    /// The next slice of a shard; `None` if it is merged.
    async fn plan<'a>(&self, shard: ShardRef<'a>, upon: &[ShardRef<'a>], left: &mut usize) -> Option<Work<'a>> {
        let (map, tree) = (shard.map, shard.map.tree());
        // A volume that is being deleted has been weighed, or is about to be: its pages stay where they are.
        let moving = if shard.volume.is_closing() { Vec::new() } else { map.moving(*left) };
        let mut leaves: BTreeSet<u64> = moving.iter().filter(|id| id.level == 0).map(|id| id.index).collect();
        let (mut at, mut cut, mut any) = (0, u64::MAX, !moving.is_empty());
        'runs: while let Some(run) = map.next_frozen(at) {
            any = true;
            let range = run.lba.max(at)..run.end();
            at = run.end();
            let span = map.leaves.within(&range);
            let mut leaf = span.start;
            while leaf < span.end {
                if matches!(run.what, What::Hole | What::Gone) {
                    // A hole matters where this map, or one beneath, holds something.
                    let mut next = self.next_leaf(shard, tree, leaf).await;
                    for under in if run.what == What::Hole { upon } else { &[] } {
                        next = next.into_iter().chain(self.next_held(*under, leaf).await).min();
                    }
                    match next.filter(|next| *next < span.end) {
                        Some(next) => leaf = next,
                        None => break,
                    }
                }
                leaves.insert(leaf);
                if leaves.len() >= *left {
                    cut = map.leaves.range(leaf).end;
                    break 'runs;
                }
                leaf += 1;
            }
        }
        *left = left.saturating_sub(leaves.len() + moving.len());
        any.then(|| Work {
            shard,
            tree,
            cut,
            moving,
            leaves: leaves.into_iter().collect(),
            height: tree.height,
            changed: BTreeMap::new(),
            added: Tally::default(),
            removed: Tally::default(),
            old: Vec::new(),
            new: Vec::new(),
        })
    }

    /// The first leaf from `leaf` on in which a shard may hold something.
    async fn next_held(&self, shard: ShardRef<'_>, leaf: u64) -> Option<u64> {
        let from = shard.map.leaves.range(leaf).start;
        // In this order: what is merged meanwhile goes from the layers into the tree.
        let in_layers = shard.map.next_in_layers(from).map(|lba| shard.map.leaves.at(lba));
        let in_tree = self.next_leaf(shard, shard.map.tree(), leaf).await;
        in_layers.into_iter().chain(in_tree).min()
    }

    async fn rewrite_leaves(&self, work: &mut Work<'_>) -> Result<(), WriteFailed> {
        let leaves = std::mem::take(&mut work.leaves);
        for some in leaves.chunks(READ_AT_ONCE) {
            let (shard, tree) = (work.shard, work.tree);
            let olds = join_all(some.iter().map(|leaf| self.old_page(shard, tree, PageId::leaf(*leaf)))).await;
            for (leaf, old) in some.iter().zip(olds) {
                self.rewrite_leaf(work, *leaf, old).await?;
            }
        }
        let top = work.changed.keys().next_back().copied().unwrap_or(0);
        let needed = (0..=HEIGHT_MAX).find(|level| PageId::leaf(top).at_level(*level).index == 0);
        work.height = work.tree.height.max(needed.unwrap_or(HEIGHT_MAX));
        Ok(())
    }

    /// A page as it is in the tree.
    async fn old_page(&self, shard: ShardRef<'_>, tree: Tree, id: PageId) -> OldPage {
        let mut old = OldPage { page: None, pointer: None, base: None, orphan: false };
        match self.find(shard, tree.sources(id), id).await.0 {
            Found::Nothing => {}
            Found::Lost => old.orphan = true,
            Found::Page(pointer) => {
                old.pointer = Some(pointer);
                old.page = self.page(shard, id, &pointer).await;
                if id.level == 0
                    && let Some(base) = old.page.as_ref().and_then(|page| page.base)
                {
                    old.base = self.page(shard, id, &base).await;
                }
            }
        }
        old
    }

    async fn rewrite_leaf(&self, work: &mut Work<'_>, leaf: u64, old: OldPage) -> Result<(), WriteFailed> {
        let (id, range) = (PageId::leaf(leaf), work.shard.map.leaves.range(leaf));
        let over = if range.end <= work.cut { work.shard.map.frozen(range.clone()) } else { Vec::new() };
        let (mut runs, mut base, mut orphan) = (Vec::new(), None, old.orphan);
        match (&old.page, old.pointer) {
            (Some(page), Some(pointer)) => {
                work.replace(id, pointer);
                (runs, base, orphan) = (leaf_runs(page), page.base, page.orphan);
            }
            // Nothing in it is given up: it may be read another time.
            (None, Some(pointer)) => base = Some(pointer),
            (_, None) => {}
        }
        if let (Some(pointer), Some(older)) = (base, &old.base) {
            // It can be read again.
            work.replace(id, pointer);
            runs = lay_over(leaf_runs(older), &runs, |hidden| work.removed.hide(hidden));
            (base, orphan) = (older.base, orphan || older.orphan);
        }
        let mut runs = lay_over(runs, &over, |hidden| work.removed.hide(hidden));
        over.iter().filter_map(Run::extent).for_each(|extent| work.added.extent(extent, 1));
        if runs.iter().map(|run| run.count).sum::<u64>() == range.end - range.start {
            // Nothing of what could not be read shows any more.
            if let Some(base) = base.take() {
                work.replace(id, base);
            }
            orphan = false;
        }
        if base.is_some() || orphan {
            // There it still hides what could not be read.
            runs.iter_mut().filter(|run| run.what == What::Gone).for_each(|run| run.what = What::Hole);
        } else {
            runs.retain(|run| run.what != What::Gone);
            if !work.shard.volume.keeps_holes() {
                runs.retain(|run| run.what != What::Hole);
            }
            if runs.is_empty() {
                work.changed.insert(leaf, Changed::Gone);
                return Ok(());
            }
        }
        runs.shrink_to_fit();
        self.write_page(work, id, &range, Page { base, orphan, body: Body::Leaf(runs) }).await
    }

    async fn rewrite_nodes(&self, work: &mut Work<'_>, level: u8) -> Result<(), WriteFailed> {
        // Where the tree grows, the old root goes beneath the new one.
        if let (true, Some(root)) = (level == work.tree.height + 1, work.tree.root) {
            work.changed.entry(0).or_insert(Changed::Kept(root));
        }
        let mut parents: BTreeMap<u64, Vec<(u8, Option<PagePointer>)>> = BTreeMap::new();
        for (index, changed) in std::mem::take(&mut work.changed) {
            let child = PageId { level: level - 1, index };
            let pointer = changed.pointer();
            if pointer.is_none() && !matches!(changed, Changed::Gone) {
                return Err(WriteFailed::PageLost);
            }
            parents.entry(child.at_level(level).index).or_default().push((child.slot(), pointer));
        }
        for id in work.moving.iter().filter(|id| id.level == level) {
            parents.entry(id.index).or_default();
        }
        for (index, children) in parents {
            let id = PageId { level, index };
            let old = self.old_page(work.shard, work.tree, id).await;
            self.rewrite_node(work, id, old, children).await?;
        }
        Ok(())
    }

    async fn rewrite_node(
        &self,
        work: &mut Work<'_>,
        id: PageId,
        old: OldPage,
        changes: Vec<(u8, Option<PagePointer>)>,
    ) -> Result<(), WriteFailed> {
        let mut children: BTreeMap<u8, Option<PagePointer>> = BTreeMap::new();
        let (mut base, mut orphan) = (None, old.orphan);
        match (&old.page, old.pointer) {
            (Some(page), Some(pointer)) => {
                work.replace(id, pointer);
                if let Body::Node(old) = &page.body {
                    children.extend(old.iter().copied());
                }
                (base, orphan) = (page.base, page.orphan);
            }
            (None, Some(pointer)) => base = Some(pointer),
            (_, None) => {}
        }
        children.extend(changes);
        if base.is_none() && !orphan {
            children.retain(|_, child| child.is_some());
            if children.is_empty() {
                work.changed.insert(id.index, Changed::Gone);
                return Ok(());
            }
        }
        let body = Body::Node(children.into_iter().collect());
        self.write_page(work, id, &(0..0), Page { base, orphan, body }).await
    }

    async fn write_page(
        &self,
        work: &mut Work<'_>,
        id: PageId,
        range: &Range<u64>,
        page: Page,
    ) -> Result<(), WriteFailed> {
        let (volume, shard) = (work.shard.volume, work.shard.number);
        let plain = page.encode(id.level, range);
        let birth = Birth {
            lineage: volume.lineage,
            key_epoch: volume.keys.current(),
            lba: id.address(shard),
            block_count: (plain.len() >> PAGE_BLOCK_SHIFT) as u64,
            block_shift: PAGE_BLOCK_SHIFT,
            generation: self.records.random_u64(),
        };
        let owner = Owner { volume: volume.id, shard };
        let compression = Compression::Lz4;
        let sealing = Sealing { kind: Kind::Metadata, birth, owner, compression, block_crcs: None };
        let mut record = vec![0; sealed_bound(plain.len(), PAGE_BLOCK_SHIFT)];
        let sealed = self.records.with_sealer(volume, birth.key_epoch, |key| {
            let header = self.records.codec.borrow_mut().seal(&sealing, &plain, key, &mut record)?;
            Ok::<usize, SealError>(header.record_bytes())
        });
        let Some(Ok(len)) = sealed else {
            tracing::error!(volume = volume.name, ?sealed, "a map page could not be sealed");
            return Err(WriteFailed::Seal);
        };
        let new = self.writer.put(&self.records, &record[..len], &birth).await?;
        work.new.push((id, Rc::new(page), new.share()));
        work.changed.insert(id.index, Changed::Written(new));
        Ok(())
    }

    /// The slice is durable: from now on it counts.
    fn commit(&self, mut work: Work<'_>, budget: &LayerBudget) -> Result<(), WriteFailed> {
        let (map, volume, segments) = (work.shard.map, work.shard.volume, &*self.records.segments);
        let mut tree = work.tree;
        if let Some(root) = work.changed.get(&0) {
            let pointer = root.pointer();
            if pointer.is_none() && !matches!(root, Changed::Gone) {
                return Err(WriteFailed::PageLost);
            }
            tree = Tree { height: if pointer.is_some() { work.height } else { 0 }, root: pointer };
        }
        for (id, page, new) in std::mem::take(&mut work.new) {
            let pointer = new.pointer().ok_or(WriteFailed::PageLost)?;
            work.added.page(&pointer, 1);
            self.keep(id, &pointer, page);
        }
        work.old.iter().for_each(|(id, pointer)| self.drop_cached(*id, pointer));
        // First what comes: others look at the counters.
        work.added.apply(segments, volume);
        map.commit(tree, work.cut, &mut Books { segments, volume }, budget);
        map.moved(&work.moving);
        work.removed.apply(segments, volume);
        Ok(())
    }
}

impl Work<'_> {
    /// A page of the tree is not part of it any more.
    fn replace(&mut self, id: PageId, pointer: PagePointer) {
        self.removed.page(&pointer, -1);
        self.old.push((id, pointer));
    }
}

impl Tally {
    fn hide(&mut self, run: &Run) {
        run.extent().into_iter().for_each(|extent| self.extent(extent, -1));
    }
}

/// What lies beneath each shard, nearest first.
fn beneath_of<'a>(shards: &[ShardRef<'a>]) -> Vec<Vec<ShardRef<'a>>> {
    let by_place: HashMap<(u32, u16), ShardRef<'a>> =
        shards.iter().map(|shard| ((shard.volume.id, shard.number), *shard)).collect();
    let beneath = |shard: &ShardRef<'a>| {
        let chain = std::iter::successors(shard.volume.parent(), |volume| volume.parent());
        chain.filter_map(|volume| by_place.get(&(volume.id, shard.number)).copied()).collect()
    };
    shards.iter().map(beneath).collect()
}

fn leaf_runs(page: &Page) -> Vec<Run> {
    match &page.body {
        Body::Leaf(runs) => runs.clone(),
        Body::Node(_) => Vec::new(),
    }
}
