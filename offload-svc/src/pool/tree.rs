//! The trees of maps: pages found, read through a cache, and put together with the layers over them.
//!
//! Owns the cache and the way from a block to what it holds. Must not know how pages are changed. Invariants: what a lookup
//! gives is the map of one moment; what can't be told because a page can't be read is [`What::Lost`], never a hole.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lru::LruCache;

use super::layers::{ShardMap, Tree};
use super::map::{Run, What, lay_over};
use super::page::{Body, LEAF_BLOCKS, PAGE_BLOCK_SHIFT, Page, PageId, PagePointer, Shape};
use super::page_writer::PageWriter;
use super::read::Pins;
use super::records::RecordIo;
use super::shared::Volume;
use crate::stages::keys::KeyEpoch;
use crate::stages::record::{Birth, Kind};

/// One shard, as its map is read.
#[derive(Clone, Copy)]
pub struct ShardRef<'a> {
    pub volume: &'a Volume,
    pub number: u16,
    pub map: &'a ShardMap,
}

/// Pages by generation and place; the least recently used go first.
struct Cache {
    pages: LruCache<(u64, PageId), Rc<Page>>,
    bytes: usize,
    bytes_max: usize,
}

/// What a cached page costs besides its own heap.
const CACHE_ENTRY_BYTES: usize = 128;

impl Cache {
    fn put(&mut self, key: (u64, PageId), page: Rc<Page>) {
        let bytes = |page: &Page| page.heap_bytes() + CACHE_ENTRY_BYTES;
        self.bytes += bytes(&page);
        if let Some(old) = self.pages.put(key, page) {
            self.bytes -= bytes(&old);
        }
        while self.bytes > self.bytes_max
            && let Some((_, old)) = self.pages.pop_lru()
        {
            self.bytes -= bytes(&old);
        }
    }

    fn forget(&mut self, key: &(u64, PageId)) {
        if let Some(old) = self.pages.pop(key) {
            self.bytes -= old.heap_bytes() + CACHE_ENTRY_BYTES;
        }
    }
}

/// One reactor's access to maps.
pub struct MapIo {
    pub records: Rc<RecordIo>,
    pub writer: PageWriter,
    cache: RefCell<Cache>,
    pages_read: Arc<AtomicU64>,
}

/// Where a page of a tree is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// There is none.
    Nothing,
    /// A page above it can't be read.
    Lost,
    Page(PagePointer),
}

/// Pages to look for something in, last first: the root, and older pages where what is beside them doesn't say.
pub type Sources = Vec<(PageId, PagePointer)>;

impl Tree {
    /// The pages to begin with for a page; none if the tree doesn't reach so far.
    pub fn sources(&self, id: PageId) -> Sources {
        let root = self.root.map(|root| (PageId { level: self.height, index: 0 }, root));
        root.filter(|(root, _)| id.level <= root.level && id.at_level(root.level) == *root).into_iter().collect()
    }
}

impl MapIo {
    pub fn new(records: Rc<RecordIo>, cache_bytes: u64, pages_read: Arc<AtomicU64>) -> Self {
        let bytes_max = usize::try_from(cache_bytes).unwrap_or(usize::MAX);
        let cache = RefCell::new(Cache { pages: LruCache::unbounded(), bytes: 0, bytes_max });
        Self { records, writer: PageWriter::default(), cache, pages_read }
    }

    pub fn shape(&self) -> Shape {
        let set = self.records.stripes.set();
        Shape { layout: set.layout, segments: set.segment_count }
    }

    /// A page; `None` if it can't be read.
    pub async fn page(&self, shard: ShardRef<'_>, id: PageId, pointer: &PagePointer) -> Option<Rc<Page>> {
        let key = (pointer.generation, id);
        if let Some(page) = self.cache.borrow_mut().pages.get(&key) {
            return Some(Rc::clone(page));
        }
        let _pin = Pins::new(&self.records.segments, std::iter::once(pointer.location.stripe.segment));
        self.pages_read.fetch_add(1, Ordering::Relaxed);
        let birth = birth_of(shard.volume, shard.number, id, pointer);
        let range = if id.level == 0 { shard.map.leaves.range(id.index) } else { 0..0 };
        let (read, shape) = (Cell::new(None), self.shape());
        let decode = |plain: &[u8]| match Page::decode(plain, id.level, &range, &shape) {
            Ok(page) => {
                read.set(Some(Rc::new(page)));
                true
            }
            Err(error) => {
                tracing::error!(?id, %error, "map page does not make sense");
                false
            }
        };
        self.records.read(&pointer.location, Kind::Metadata, &birth, decode).await;
        let page = read.take()?;
        self.cache.borrow_mut().put(key, Rc::clone(&page));
        Some(page)
    }

    /// Keeps a page that has just been written, in place of the one before it.
    pub fn keep(&self, id: PageId, pointer: &PagePointer, page: Rc<Page>) {
        self.cache.borrow_mut().put((pointer.generation, id), page);
    }

    pub fn drop_cached(&self, id: PageId, pointer: &PagePointer) {
        self.cache.borrow_mut().forget(&(pointer.generation, id));
    }

    /// Where a page is, looked for in `sources`, and what is left of these if it has to be looked for further.
    pub async fn find(&self, shard: ShardRef<'_>, mut sources: Sources, id: PageId) -> (Found, Sources) {
        let mut end = Found::Nothing;
        while let Some((at, mut pointer)) = sources.pop() {
            let mut level = at.level;
            loop {
                let here = id.at_level(level);
                if here == id {
                    return (Found::Page(pointer), sources);
                }
                let Some(page) = self.page(shard, here, &pointer).await else { return (Found::Lost, sources) };
                let Body::Node(children) = &page.body else { return (Found::Lost, sources) };
                if let Some(base) = page.base {
                    sources.push((here, base));
                }
                let slot = id.at_level(level - 1).slot();
                match children.binary_search_by_key(&slot, |(slot, _)| *slot).map(|at| children[at].1) {
                    Ok(Some(child)) => (pointer, level) = (child, level - 1),
                    Ok(None) => return (Found::Nothing, sources),
                    Err(_) if page.is_whole() => return (Found::Nothing, sources),
                    // Further back in what was there before; if nothing is left of that, nobody can tell.
                    Err(_) => {
                        end = Found::Lost;
                        break;
                    }
                }
            }
        }
        (end, sources)
    }

    /// What a leaf says of its part of a range, what was there before it included, in order.
    async fn leaf(&self, shard: ShardRef<'_>, tree: Tree, leaf: u64, range: &Range<u64>) -> Vec<Run> {
        let (id, own) = (PageId::leaf(leaf), shard.map.leaves.range(leaf));
        let lost = Run { lba: own.start, count: LEAF_BLOCKS, what: What::Lost }.clip(range);
        let mut sources = tree.sources(id);
        // Newest first.
        let mut seen: Vec<Run> = Vec::new();
        loop {
            let (found, left) = self.find(shard, sources, id).await;
            sources = left;
            let pointer = match found {
                Found::Nothing => return seen,
                Found::Lost => return lay_over([lost], &seen, |_| {}),
                Found::Page(pointer) => pointer,
            };
            let Some(page) = self.page(shard, id, &pointer).await else { return lay_over([lost], &seen, |_| {}) };
            let Body::Leaf(runs) = &page.body else { return lay_over([lost], &seen, |_| {}) };
            let older = sources.is_empty() && page.base.is_none();
            let runs = within(runs, range);
            seen = if seen.is_empty() { runs.collect() } else { lay_over(runs, &seen, |_| {}) };
            if page.is_whole() {
                return seen;
            }
            if older {
                return lay_over([lost], &seen, |_| {});
            }
            sources.extend(page.base.map(|base| (id, base)));
        }
    }

    /// What a range of a shard holds, in order, at the moment of the return. Blocks in no run are holes.
    pub async fn lookup(&self, shard: ShardRef<'_>, range: &Range<u64>) -> Vec<Run> {
        loop {
            let over = shard.map.view(range);
            if over.iter().map(|run| run.count).sum::<u64>() == range.end - range.start {
                return said(over);
            }
            let tree = shard.map.tree();
            let mut base = Vec::new();
            for leaf in shard.map.leaves.within(range) {
                base.extend(self.leaf(shard, tree, leaf, range).await);
            }
            // What was merged meanwhile is in the new tree, and no longer in the layers.
            if shard.map.tree() == tree {
                return said(lay_over(base, &shard.map.view(range), |_| {}));
            }
        }
    }

    /// The first leaf from `from` on that may be there: one that is beneath a page that can't be read may.
    pub async fn next_leaf(&self, shard: ShardRef<'_>, tree: Tree, from: u64) -> Option<u64> {
        let mut index = from;
        'root: loop {
            let id = PageId::leaf(index);
            let (at, mut pointer) = tree.sources(id).pop()?;
            for level in (1..=at.level).rev() {
                let here = id.at_level(level);
                let Some(page) = self.page(shard, here, &pointer).await else { return Some(index) };
                let Body::Node(children) = &page.body else { return Some(index) };
                if !page.is_whole() {
                    return Some(index);
                }
                let slot = id.at_level(level - 1).slot();
                let next = children.iter().find(|(at, child)| *at >= slot && child.is_some());
                match next {
                    Some((at, Some(child))) if *at == slot => pointer = *child,
                    Some((at, _)) => {
                        let child = PageId { level: level - 1, index: here.first_at(level - 1) + u64::from(*at) };
                        index = child.first_at(0);
                        continue 'root;
                    }
                    None => {
                        index = PageId { level, index: here.index + 1 }.first_at(0);
                        continue 'root;
                    }
                }
            }
            return Some(index);
        }
    }

    /// The runs of the next stretch from `lba` on that holds something, and where it ends; `None` at the shard's end.
    pub async fn next_runs(&self, shard: ShardRef<'_>, lba: u64) -> Option<(Vec<Run>, u64)> {
        let leaves = shard.map.leaves;
        // In this order: what is merged meanwhile goes from the layers into the tree.
        let in_layers = shard.map.next_in_layers(lba).map(|lba| leaves.at(lba));
        let in_tree = self.next_leaf(shard, shard.map.tree(), leaves.at(lba)).await;
        let leaf = in_tree.into_iter().chain(in_layers).min()?;
        let range = leaves.range(leaf);
        let from = lba.max(range.start)..range.end;
        Some((self.lookup(shard, &from).await, range.end))
    }

    /// The slots of a node in which what its base lists does not count any more. Beneath an orphan, which was made while nobody could
    /// tell what was there before, it still does.
    async fn replaces(&self, shard: ShardRef<'_>, id: PageId, page: &Page) -> BTreeSet<u8> {
        let Body::Node(children) = &page.body else { return BTreeSet::new() };
        let mut slots: BTreeSet<u8> = children.iter().map(|(slot, _)| *slot).collect();
        for (child, pointer) in children_of(id, page) {
            if self.page(shard, child, &pointer).await.is_some_and(|child| child.orphan) {
                slots.remove(&child.slot());
            }
        }
        slots
    }

    /// The pages of a tree that a test picks, those beneath what can't be read left out.
    pub async fn pages_of(&self, shard: ShardRef<'_>, pick: impl Fn(&PagePointer) -> bool) -> Vec<PageId> {
        let tree = shard.map.tree();
        let mut picked = Vec::new();
        let mut left = tree.sources(PageId { level: tree.height, index: 0 });
        while let Some((id, pointer)) = left.pop() {
            if pick(&pointer) {
                picked.push(id);
            }
            // What leads to leaves is read, they themselves are not.
            if id.level > 0
                && let Some(page) = self.page(shard, id, &pointer).await
            {
                left.extend(children_of(id, &page));
            }
        }
        picked
    }

    /// All that a tree leads to, its own pages included, in bytes by segment; of what can't be read nothing is known.
    pub async fn weigh(&self, shard: ShardRef<'_>) -> BTreeMap<u32, i64> {
        let tree = shard.map.tree();
        let mut weight = BTreeMap::new();
        let none: Rc<BTreeSet<u8>> = Rc::default();
        let root = tree.sources(PageId { level: tree.height, index: 0 }).into_iter();
        let mut left: Vec<_> = root.map(|(id, pointer)| (id, pointer, Rc::clone(&none))).collect();
        while let Some((id, pointer, replaced)) = left.pop() {
            let location = &pointer.location;
            *weight.entry(location.stripe.segment).or_default() += i64::from(location.stored_bytes);
            let Some(page) = self.page(shard, id, &pointer).await else {
                tracing::error!(?id, "a page of a volume that is deleted can't be read: what it leads to stays");
                continue;
            };
            if let Some(base) = page.base {
                // What a newer page has in place of what the base lists was taken off when it was written.
                let newer = self.replaces(shard, id, &page).await;
                left.push((id, base, Rc::new(&newer | &*replaced)));
            }
            match &page.body {
                Body::Leaf(runs) => {
                    for extent in runs.iter().filter_map(Run::extent) {
                        *weight.entry(extent.location.stripe.segment).or_default() += extent.stored_share() as i64;
                    }
                }
                Body::Node(_) => {
                    let counts = |(child, _): &(PageId, PagePointer)| !replaced.contains(&child.slot());
                    let children = children_of(id, &page).into_iter().filter(counts);
                    left.extend(children.map(|(id, pointer)| (id, pointer, Rc::clone(&none))));
                }
            }
        }
        weight
    }
}

/// Without what is not said any more.
fn said(mut runs: Vec<Run>) -> Vec<Run> {
    runs.retain(|run| run.what != What::Gone);
    runs
}

/// The pages that a node leads to; none, of a leaf.
fn children_of(id: PageId, page: &Page) -> Vec<(PageId, PagePointer)> {
    let Body::Node(children) = &page.body else { return Vec::new() };
    let level = id.level.saturating_sub(1);
    let child = |slot: u8| PageId { level, index: id.first_at(level) + u64::from(slot) };
    children.iter().filter_map(|(slot, pointer)| Some((child(*slot), (*pointer)?))).collect()
}

/// The runs of a leaf that overlap a range, clipped to it.
fn within<'a>(runs: &'a [Run], range: &'a Range<u64>) -> impl Iterator<Item = Run> + 'a {
    let first = runs.partition_point(|run| run.end() <= range.start);
    runs[first..].iter().take_while(|run| run.lba < range.end).map(|run| run.clip(range))
}

/// The birth of a page's record.
pub fn birth_of(volume: &Volume, shard: u16, id: PageId, pointer: &PagePointer) -> Birth {
    Birth {
        lineage: volume.lineage,
        key_epoch: KeyEpoch(pointer.key_epoch),
        lba: id.address(shard),
        block_count: pointer.blocks.into(),
        block_shift: PAGE_BLOCK_SHIFT,
        generation: pointer.generation,
    }
}
