//! A pool on simulated members, and requests to it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::channel::oneshot;
use nvmf_target::backend::{Backend, Done, LbaRange, Operation, Outcome, Reply, ReplySink};
use nvmf_target::buffer::IoBuf;
use zeroize::Zeroizing;

use super::super::core::Core;
use super::super::*;
use super::model::{Model, run_of, stamp_of};
use super::sim::{Crashed, Disks, World};
use crate::stages::cipher::Cipher;
use crate::stages::compress::Compression;
use crate::stages::keys::KeyEncryptionKey;

/// A small pool: 4+2, segments of 256 KiB, so that cleaning and checkpoints come soon.
pub const LAYOUT: Layout =
    Layout { data_shards: 4, parity_shards: 2, segment_bytes: 256 << 10, shard_bytes_max: 80 << 10 };

/// A smaller one, for tests that crash at every write: fewer writes, fewer places.
pub const SMALL: Layout =
    Layout { data_shards: 2, parity_shards: 1, segment_bytes: 128 << 10, shard_bytes_max: 80 << 10 };

pub fn options() -> MountOptions {
    MountOptions {
        member_timeout: Duration::from_millis(500),
        max_replay_segments: 18,
        checkpoint_interval: Duration::from_secs(10),
        ..MountOptions::default()
    }
}

pub fn kek() -> Arc<KeyEncryptionKey> {
    Arc::new(KeyEncryptionKey::from_secret(Zeroizing::new([7; 32])))
}

pub fn inputs(layout: &Layout, segments: u64) -> Vec<MemberInput> {
    let size = 64 * 1024 + segments * u64::from(layout.segment_bytes);
    (0..layout.members()).map(|i| input(i, size)).collect()
}

pub fn input(slot: usize, size_bytes: u64) -> MemberInput {
    MemberInput { name: format!("mem:{slot}"), size_bytes: Some(size_bytes), can_grow: false, unopened: None }
}

pub fn spec(name: &str, size_bytes: u64, block_bytes: u32) -> VolumeSpec {
    VolumeSpec {
        name: name.into(),
        uuid: None,
        size_bytes,
        block_bytes,
        compression: Compression::Lz4,
        cipher: Cipher::Aes256Gcm,
    }
}

/// Members, and how the pool on them is mounted.
#[derive(Clone)]
pub struct Rig {
    pub disks: Rc<Disks>,
    pub inputs: Vec<MemberInput>,
    pub layout: Layout,
    pub options: MountOptions,
    pub reactors: usize,
}

impl Rig {
    pub fn new(layout: Layout, segments: u64, reactors: usize) -> Self {
        let inputs = inputs(&layout, segments);
        Self { disks: Disks::new(layout.members()), inputs, layout, options: options(), reactors }
    }

    /// On file systems that can't set room aside.
    pub fn on_plain_files(self) -> Self {
        self.disks.0.iter().for_each(|disk| disk.borrow_mut().plain = true);
        self
    }

    /// Three members with one volume, which mount fast.
    pub fn small(block_bytes: u32) -> Self {
        let mut rig = Self::new(SMALL, 30, 1);
        rig.options.max_replay_segments = 6;
        rig.with_volume(16 << 20, block_bytes)
    }

    /// A formatted pool with one volume `v`.
    pub fn with_volume(self, size_bytes: u64, block_bytes: u32) -> Self {
        let rig = self.clone();
        let world = World::new(&self.disks, 1);
        let env = world.env();
        world
            .run(async move {
                format(&env, &rig.inputs, rig.layout).await.expect("blank members");
                let pool = rig.start(&env).await.expect("formatted");
                pool.create_volume(spec("v", size_bytes, block_bytes)).await.expect("room");
                pool.shutdown().await.expect("members are good");
            })
            .expect("no crash");
        world.end(1);
        self
    }

    pub async fn start(&self, env: &Rc<dyn Env>) -> Result<Pool, MountError> {
        Ok(self.start_reactors(env).await?.0)
    }

    async fn start_reactors(&self, env: &Rc<dyn Env>) -> Result<(Pool, Vec<Rc<Core>>), MountError> {
        let mounted = mount(Rc::clone(env), &self.inputs, self.options.clone(), kek()).await?;
        let (pool, seeds) = mounted.split(self.reactors, None)?;
        let start = |seed| PoolReactor::start(Rc::clone(env), seed).expect("a valid code").core;
        Ok((pool, seeds.into_iter().map(start).collect()))
    }

    /// Runs `work` on the mounted pool, in a life that ends without a shutdown unless `work` asks for one.
    pub fn live<T, F>(&self, seed: u64, work: impl FnOnce(Live) -> F + 'static) -> T
    where
        T: 'static,
        F: Future<Output = T> + 'static,
    {
        self.live_until(seed, None, work).expect("no crash was asked for")
    }

    pub fn live_until<T, F>(
        &self,
        seed: u64,
        crash_at: Option<u64>,
        work: impl FnOnce(Live) -> F + 'static,
    ) -> Result<T, Crashed>
    where
        T: 'static,
        F: Future<Output = T> + 'static,
    {
        let world = World::new(&self.disks, seed);
        world.crash_at.set(crash_at);
        let (rig, env, inner) = (self.clone(), world.env(), Rc::clone(&world));
        let result = world.run(async move {
            let started = rig.start_reactors(&env).await;
            let (pool, cores) = started.unwrap_or_else(|error| panic!("mount, seed {seed}: {error}"));
            work(Live { pool, cores, env, world: inner }).await
        });
        world.end(seed);
        result
    }
}

/// A mounted pool.
#[derive(Clone)]
pub struct Live {
    pub pool: Pool,
    /// The parts of its reactors.
    pub cores: Vec<Rc<Core>>,
    pub env: Rc<dyn Env>,
    pub world: Rc<World>,
}

impl Live {
    pub fn volume(&self, name: &str) -> Vol {
        let backend = self.pool.volume(name).unwrap_or_else(|| panic!("no volume {name}"));
        let block_bytes = backend.geometry().block_bytes as usize;
        Vol { backend, block_bytes }
    }

    /// Segments that are free or listed, open, closed, of checkpoints.
    pub fn census(&self) -> [u64; 4] {
        self.pool.shared.segments.census()
    }

    pub async fn sleep(&self, time: Duration) {
        self.env.sleep_until(self.env.now() + time).await;
    }
}

struct Once(Mutex<Option<oneshot::Sender<Reply>>>);

impl ReplySink for Once {
    fn reply(&self, _token: u64, reply: Reply) {
        let sender = self.0.lock().expect("not poisoned").take().expect("a request is answered once");
        let _ = sender.send(reply);
    }
}

/// A volume, as a host uses it.
#[derive(Clone)]
pub struct Vol {
    pub backend: Arc<dyn Backend>,
    pub block_bytes: usize,
}

impl Vol {
    pub async fn submit(&self, operation: Operation) -> Reply {
        let (sender, reply) = oneshot::channel();
        self.backend.submit(operation, Done::new(Arc::new(Once(Mutex::new(Some(sender)))), 0));
        reply.await.expect("every request is answered")
    }

    pub async fn write(&self, slba: u64, bytes: &[u8]) -> Outcome {
        let range = LbaRange { slba, lba_count: (bytes.len() / self.block_bytes) as u64 };
        self.submit(Operation::Write { range, buffer: IoBuf::copy_of(bytes), fua: false }).await.outcome
    }

    pub async fn write_stamp(&self, slba: u64, count: u64, stamp: u64) -> Outcome {
        self.write(slba, &run_of(stamp, slba, count, self.block_bytes)).await
    }

    pub async fn read(&self, slba: u64, lba_count: u64) -> Result<Vec<u8>, Outcome> {
        let mut buffer = IoBuf::heap(lba_count as usize * self.block_bytes);
        buffer.fill(0x5A);
        let reply = self.submit(Operation::Read { range: LbaRange { slba, lba_count }, buffer }).await;
        match reply.outcome {
            Outcome::Success => Ok(reply.buffer.expect("a read gives its buffer back").to_vec()),
            other => Err(other),
        }
    }

    /// The stamps of a range. Panics on bytes that nobody wrote there.
    pub async fn stamps(&self, slba: u64, count: u64) -> Result<Vec<u64>, Outcome> {
        let bytes = self.read(slba, count).await?;
        let blocks = bytes.chunks(self.block_bytes).enumerate();
        let stamp = |(index, block)| {
            let lba = slba + index as u64;
            stamp_of(lba, block).unwrap_or_else(|| panic!("LBA {lba}: bytes that nobody wrote"))
        };
        Ok(blocks.map(stamp).collect())
    }

    pub async fn deallocate(&self, slba: u64, lba_count: u64) -> Outcome {
        self.submit(Operation::Deallocate { ranges: vec![LbaRange { slba, lba_count }] }).await.outcome
    }

    pub async fn write_zeroes(&self, slba: u64, lba_count: u64) -> Outcome {
        let range = LbaRange { slba, lba_count };
        self.submit(Operation::WriteZeroes { range, deallocate: false, fua: false }).await.outcome
    }

    pub async fn compare_and_write(&self, slba: u64, expected: &[u8], bytes: &[u8]) -> Outcome {
        let range = LbaRange { slba, lba_count: (bytes.len() / self.block_bytes) as u64 };
        let (expected, buffer) = (IoBuf::copy_of(expected), IoBuf::copy_of(bytes));
        self.submit(Operation::CompareAndWrite { range, expected, buffer, fua: false }).await.outcome
    }
}

/// A model that tasks of one life share, and that outlives it.
pub type SharedModel = Rc<RefCell<Model>>;

/// Checks that every block that was ever touched holds what it may, and holds the pool to it from now on.
pub async fn check_all(vol: &Vol, model: &SharedModel, what: &str) {
    let touched = model.borrow().touched();
    for lba in touched {
        let stamp = vol.stamps(lba, 1).await.unwrap_or_else(|outcome| panic!("{what}: LBA {lba}: {outcome:?}"))[0];
        let possible = model.borrow().possible(lba);
        assert!(possible.contains(&stamp), "{what}: LBA {lba} holds {stamp}, may hold {possible:?}");
        model.borrow_mut().settle(lba, stamp);
    }
}
