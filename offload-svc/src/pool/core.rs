//! One reactor's part of the pool: its shards, its stream, its contexts.
//!
//! Owns the shards of this reactor and hands each message to what serves it. Must not know other reactors' shards.
//! Invariant: everything here is touched by one thread only.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;

use super::env::Env;
use super::locks::RangeLocks;
use super::map::ExtentMap;
use super::message::{Inner, Message};
use super::shared::{Shared, Volume};
use super::stream::Stream;
use super::stripe_io::SharedStripeIo;
use crate::stages::keys::{KeyEpoch, Salt, SealingKey};
use crate::stages::record::{MAX_PLAIN_BYTES, RecordCodec};

/// One shard of a volume.
pub struct Shard {
    pub volume: Arc<Volume>,
    pub number: u16,
    pub map: RefCell<ExtentMap>,
    /// The next record's generation.
    next: Cell<u64>,
    /// All generations up to it are in the map or will never be.
    pub applied: Cell<u64>,
    pub locks: RangeLocks,
}

impl Shard {
    pub fn new(volume: Arc<Volume>, number: u16, map: ExtentMap, mounts: u64) -> Self {
        let base = generation_base(mounts);
        let (next, applied) = (Cell::new(base + 1), Cell::new(base));
        Self { volume, number, map: RefCell::new(map), next, applied, locks: RangeLocks::default() }
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
    pub stream: Stream,
    pub codec: RefCell<RecordCodec>,
    /// Where records are opened.
    pub scratch: RefCell<Vec<u8>>,
    shards: RefCell<HashMap<(u32, u16), Rc<Shard>>>,
    sealers: RefCell<HashMap<u32, (KeyEpoch, SealingKey)>>,
    started: Instant,
}

impl Core {
    pub fn new(index: usize, shared: Arc<Shared>, stripes: SharedStripeIo, shards: Vec<Shard>) -> Self {
        let codec = RecordCodec::new(shared.engines, Arc::clone(&shared.keyring));
        let keyed = shards.into_iter().map(|shard| ((shard.volume.id, shard.number), Rc::new(shard))).collect();
        let started = stripes.io.env.now();
        Self {
            index,
            shared,
            stripes,
            stream: Stream::default(),
            codec: RefCell::new(codec),
            scratch: RefCell::new(vec![0; MAX_PLAIN_BYTES]),
            shards: RefCell::new(keyed),
            sealers: RefCell::new(HashMap::new()),
            started,
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
        let mut bytes = [0; 8];
        self.env().random(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// The shard of a volume; empty if nothing has been written to it.
    pub fn shard(&self, volume: &Arc<Volume>, number: u16) -> Rc<Shard> {
        let mut shards = self.shards.borrow_mut();
        let fresh = || Rc::new(Shard::new(Arc::clone(volume), number, ExtentMap::default(), self.shared.mounts));
        Rc::clone(shards.entry((volume.id, number)).or_insert_with(fresh))
    }

    pub fn all_shards(&self) -> Vec<Rc<Shard>> {
        let mut all: Vec<_> = self.shards.borrow().values().cloned().collect();
        all.sort_by_key(|shard| (shard.volume.id, shard.number));
        all
    }

    /// Runs `work` with the key that this reactor seals a volume's records of an epoch under: one per mount, reactor,
    /// volume and epoch, under a fresh random salt. `None` if the key is gone.
    pub fn with_sealer<T>(
        &self,
        volume: &Volume,
        epoch: KeyEpoch,
        work: impl FnOnce(&mut SealingKey) -> T,
    ) -> Option<T> {
        let mut sealers = self.sealers.borrow_mut();
        if sealers.get(&volume.id).is_none_or(|(held, _)| *held != epoch) {
            let key = self.shared.keyring.get(volume.lineage, epoch)?;
            let mut salt = [0; 16];
            self.env().random(&mut salt);
            sealers.insert(volume.id, (epoch, key.sealing_key(Salt(salt), &self.shared.engines)));
        }
        sealers.get_mut(&volume.id).map(|(_, sealer)| work(sealer))
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
            Inner::Dump(request) => Box::pin(async move { task_core.dump(request).await }),
            Inner::Move(request) => Box::pin(async move { task_core.move_records(request).await }),
            Inner::Rekey { volume, done } => Box::pin(async move {
                task_core.rekey(&volume).await;
                let _ = done.send(());
            }),
            Inner::Forget { volume, done } => Box::pin(async move {
                task_core.forget(&volume);
                let _ = done.send(());
            }),
            Inner::Drain(done) => Box::pin(async move {
                task_core.stream.drained().await;
                let _ = done.send(());
            }),
        });
    }

    fn forget(&self, volume: &Volume) {
        self.sealers.borrow_mut().remove(&volume.id);
        let mut gone = Vec::new();
        self.shards.borrow_mut().retain(|(id, _), shard| {
            let keep = *id != volume.id;
            if !keep {
                gone.push(Rc::clone(shard));
            }
            keep
        });
        for shard in gone {
            let mut books = super::shared::Books::of(&self.shared, volume);
            shard.map.borrow_mut().remove(0..u64::MAX, &mut books);
        }
    }
}
