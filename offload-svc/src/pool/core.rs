//! One reactor's part of the pool: its shards, its stream, its contexts.
//!
//! Owns the shards of this reactor and hands each message to what serves it. Must not know other reactors' shards.
//! Invariant: everything here is touched by one thread only.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;

use super::env::Env;
use super::layers::{ShardMap, Tree};
use super::locks::RangeLocks;
use super::map::{Run, lay_over};
use super::message::{Inner, Message};
use super::records::RecordIo;
use super::shared::{Books, Shared, Volume};
use super::stream::{Lane, Stream};
use super::stripe_io::SharedStripeIo;
use super::tree::{MapIo, ShardRef};
use crate::stages::keys::LineageId;

/// What several shards count on.
type Counter = Rc<Cell<u64>>;

/// One shard of a volume.
pub struct Shard {
    pub volume: Arc<Volume>,
    pub number: u16,
    pub map: ShardMap,
    /// The next record's generation: one counter for a shard of all volumes of a lineage, so that no birth is like another.
    next: Counter,
    /// All generations up to it are in the map or will never be.
    pub applied: Cell<u64>,
    pub locks: RangeLocks,
}

impl Shard {
    fn new(volume: Arc<Volume>, number: u16, tree: Tree, mounts: u64, next: Counter) -> Self {
        let applied = Cell::new(generation_base(mounts));
        let map = ShardMap::new(&volume, number, tree);
        Self { volume, number, map, next, applied, locks: RangeLocks::default() }
    }

    pub fn tree_ref(&self) -> ShardRef<'_> {
        ShardRef { volume: &self.volume, number: self.number, map: &self.map }
    }

    /// Makes a change to the map.
    pub fn change(&self, shared: &Shared, run: Run) {
        let mut books = Books { segments: &shared.segments, volume: &self.volume };
        self.map.apply(run, &mut books, &shared.layers);
    }

    pub fn take_generation(&self) -> u64 {
        self.next.replace(self.next.get() + 1)
    }
}

/// Where the generations of a mount begin: above all of earlier mounts, those of given-up stripes included.
pub fn generation_base(mounts: u64) -> u64 {
    mounts << 36
}

/// A reactor's part.
pub struct Core {
    pub index: usize,
    pub shared: Arc<Shared>,
    pub stripes: SharedStripeIo,
    /// What hosts write.
    pub stream: Stream,
    /// What the cleaner and key rotation write again.
    pub moves: Stream,
    pub records: Rc<RecordIo>,
    pub maps: MapIo,
    shards: RefCell<HashMap<(u32, u16), Rc<Shard>>>,
    generations: RefCell<HashMap<(LineageId, u16), Counter>>,
    started: Instant,
    /// Moved records go among the fresh ones, to see what parting them is worth.
    #[cfg(test)]
    pub one_stream: Cell<bool>,
}

impl Core {
    pub fn new(
        index: usize,
        shared: Arc<Shared>,
        stripes: SharedStripeIo,
        shards: Vec<(Arc<Volume>, u16, Tree)>,
    ) -> Self {
        let (segments, keyring) = (Arc::clone(&shared.segments), Arc::clone(&shared.keyring));
        let records = RecordIo::new(Rc::clone(&stripes), segments, keyring, shared.engines, shared.options.slow_read);
        let records = Rc::new(records);
        let cache_bytes = shared.options.map_cache_bytes() / shared.reactors as u64;
        let maps = MapIo::new(Rc::clone(&records), cache_bytes, Arc::clone(&shared.pages_read));
        let (started, stream, moves) = (stripes.io.env.now(), Stream::new(Lane::Fresh), Stream::new(Lane::Moved));
        let core = Self {
            index,
            shared,
            stripes,
            stream,
            moves,
            records,
            maps,
            shards: RefCell::default(),
            generations: RefCell::default(),
            started,
            #[cfg(test)]
            one_stream: Cell::default(),
        };
        shards.into_iter().for_each(|(volume, number, tree)| drop(core.enter_shard(&volume, number, tree)));
        core
    }

    pub fn stream_of(&self, lane: Lane) -> &Stream {
        #[cfg(test)]
        let lane = if self.one_stream.get() { Lane::Fresh } else { lane };
        match lane {
            Lane::Fresh => &self.stream,
            Lane::Moved => &self.moves,
        }
    }

    pub fn env(&self) -> &Rc<dyn Env> {
        &self.stripes.io.env
    }

    /// Milliseconds since the start, for coarse deadlines.
    pub fn now_ms(&self) -> u64 {
        self.env().now().saturating_duration_since(self.started).as_millis() as u64
    }

    pub fn random_u64(&self) -> u64 {
        self.records.random_u64()
    }

    /// The shard of a volume; empty if nothing has been written to it.
    pub fn shard(&self, volume: &Arc<Volume>, number: u16) -> Rc<Shard> {
        let found = self.shards.borrow().get(&(volume.id, number)).cloned();
        found.unwrap_or_else(|| self.enter_shard(volume, number, Tree::default()))
    }

    fn enter_shard(&self, volume: &Arc<Volume>, number: u16, tree: Tree) -> Rc<Shard> {
        let mounts = self.shared.mounts;
        let first = || Rc::new(Cell::new(generation_base(mounts) + 1));
        let next = Rc::clone(self.generations.borrow_mut().entry((volume.lineage, number)).or_insert_with(first));
        let shard = Rc::new(Shard::new(Arc::clone(volume), number, tree, mounts, next));
        self.shards.borrow_mut().insert((volume.id, number), Rc::clone(&shard));
        shard
    }

    /// What a range of a shard holds, in order, at the moment of the return: what its map says, and where that says nothing,
    /// what lies beneath it. Blocks in no run are holes.
    pub async fn look(&self, shard: &Shard, range: &Range<u64>) -> Vec<Run> {
        loop {
            let own = self.maps.lookup(shard.tree_ref(), range).await;
            let Some(parent) = shard.volume.parent() else { return own };
            let gaps = gaps(&own, range);
            if gaps.is_empty() {
                return own;
            }
            let beneath = self.shard(&parent, shard.number);
            let mut base = Vec::new();
            for gap in gaps {
                base.extend(Box::pin(self.look(&beneath, &gap)).await);
            }
            // What has gone over from the parent meanwhile is not there any more, but here.
            let again = self.maps.lookup(shard.tree_ref(), range).await;
            if again == own && shard.volume.is_child_of(&parent) {
                return lay_over(base, &own, |_| {});
            }
        }
    }

    /// The first leaf from `leaf` on in which a shard, or what lies beneath it, may hold something.
    pub async fn next_leaf(&self, shard: &Shard, leaf: u64) -> Option<u64> {
        let from = shard.map.leaves.range(leaf).start;
        // In this order: what is merged meanwhile goes from the layers into the tree.
        let in_layers = shard.map.next_in_layers(from).map(|lba| shard.map.leaves.at(lba));
        let in_tree = self.maps.next_leaf(shard.tree_ref(), shard.map.tree(), leaf).await;
        let own = in_layers.into_iter().chain(in_tree).min();
        let Some(parent) = shard.volume.parent() else { return own };
        let beneath = self.shard(&parent, shard.number);
        let beneath = Box::pin(self.next_leaf(&beneath, leaf)).await;
        own.into_iter().chain(beneath).min()
    }

    pub fn all_shards(&self) -> Vec<Rc<Shard>> {
        let mut all: Vec<_> = self.shards.borrow().values().cloned().collect();
        all.sort_by_key(|shard| (shard.volume.id, shard.number));
        all
    }

    /// Takes messages for as long as there are senders.
    pub async fn serve(core: Rc<Core>, mut inbox: UnboundedReceiver<Message>) {
        while let Some(message) = inbox.next().await {
            Core::deliver(&core, message);
        }
    }

    /// Begins to work on a message.
    pub fn deliver(core: &Rc<Core>, message: Message) {
        let task_core = Rc::clone(core);
        core.env().spawn(match message.0 {
            Inner::Piece(piece) => Box::pin(async move { task_core.serve_piece(piece).await }),
            Inner::Merge(request) => Box::pin(async move { task_core.merge(request).await }),
            Inner::Move(request) => Box::pin(async move { task_core.move_records(request).await }),
            Inner::Rekey { volume, pages, done } => Box::pin(async move {
                task_core.rekey(&volume, pages).await;
                let _ = done.send(());
            }),
            Inner::Split { from, to, watermarks, done } => Box::pin(async move {
                task_core.split(&from, &to, &watermarks);
                let _ = done.send(());
            }),
            Inner::Absorb { child, from, done } => Box::pin(async move {
                task_core.absorb(&child, &from).await;
                let _ = done.send(());
            }),
            Inner::IsEmpty { volume, done } => Box::pin(async move {
                let _ = done.send(task_core.is_empty(&volume));
            }),
            Inner::Weigh { volume, done } => Box::pin(async move {
                // Whoever asked may have given up.
                let _ = done.send(task_core.weigh(&volume).await);
            }),
            Inner::Forget { volume, done } => Box::pin(async move {
                task_core.forget(&volume);
                let _ = done.send(());
            }),
            Inner::Drain(done) => Box::pin(async move {
                task_core.stream.drained().await;
                task_core.moves.drained().await;
                let _ = done.send(());
            }),
        });
    }

    fn forget(&self, volume: &Volume) {
        self.records.forget(volume);
        let mut gone = Vec::new();
        self.shards.borrow_mut().retain(|(id, _), shard| {
            let keep = *id != volume.id;
            if !keep {
                gone.push(Rc::clone(shard));
            }
            keep
        });
        for shard in gone {
            let mut books = Books { segments: &self.shared.segments, volume };
            shard.map.forget(&mut books, &self.shared.layers);
        }
    }

    /// What this reactor's trees of a volume lead to, in bytes by segment.
    async fn weigh(&self, volume: &Arc<Volume>) -> BTreeMap<u32, i64> {
        let mut weight = BTreeMap::new();
        for shard in self.all_shards().into_iter().filter(|shard| Arc::ptr_eq(&shard.volume, volume)) {
            for (segment, bytes) in self.maps.weigh(shard.tree_ref()).await {
                *weight.entry(segment).or_default() += bytes;
            }
        }
        weight
    }
}

/// The parts of a range that no run covers.
fn gaps(runs: &[Run], range: &Range<u64>) -> Vec<Range<u64>> {
    let mut at = range.start;
    let mut gaps = Vec::new();
    for run in runs {
        if at < run.lba {
            gaps.push(at..run.lba);
        }
        at = run.end();
    }
    if at < range.end {
        gaps.push(at..range.end);
    }
    gaps
}
