//! Prints write amplification against fill: a pool on members in memory, overwritten at random, uniformly and with nine writes of
//! ten on a tenth of the blocks.
//!
//! `cargo run --release -p offload-svc --example write_amplification -- [--help]`. Time is virtual and the load seeded, so that two
//! runs of one version differ only by the pool's own random numbers. Counts bytes, measures no speed.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use async_executor::LocalExecutor;
use clap::Parser;
use futures::channel::oneshot;
use futures::future::{LocalBoxFuture, join_all};
use nvmf_target::backend::{Backend, Done, LbaRange, Operation, Outcome, Reply, ReplySink};
use nvmf_target::buffer::IoBuf;
use offload_svc::pool::{
    Env, IoResult, Layout, MemberIndex, MemberInput, MountOptions, Pool, PoolReactor, VolumeSpec, WriteTraffic, format,
    mount,
};
use offload_svc::stages::cipher::Cipher;
use offload_svc::stages::compress::Compression;
use offload_svc::stages::keys::KeyEncryptionKey;
use offload_svc::stages::record::sealed_bound;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

const BLOCK: usize = 4096;
const BLOCK_SHIFT: u8 = 12;
/// A read, write or sync of a member takes so long.
const LATENCY: Duration = Duration::from_micros(50);

/// Write amplification against fill.
#[derive(Debug, Clone, Parser)]
struct Options {
    /// Fills to measure at, in per cent of what the pool shows as usable.
    #[arg(long, value_delimiter = ',', default_values_t = [50, 60, 70, 80, 85])]
    fill: Vec<u64>,
    /// Data shards.
    #[arg(long, default_value_t = 4)]
    k: u8,
    /// Parity shards.
    #[arg(long, default_value_t = 2)]
    m: u8,
    /// Segments.
    #[arg(long, default_value_t = 160)]
    segments: u64,
    /// KiB of a segment on each member.
    #[arg(long, default_value_t = 512)]
    segment_kib: u32,
    /// KiB of a write; the pool is filled with writes of 64 KiB before.
    #[arg(long, default_value_t = 4)]
    write_kib: u64,
    /// How often what is stored is overwritten before it is measured.
    #[arg(long, default_value_t = 2)]
    warm_up: u64,
    /// How often it is overwritten while it is measured.
    #[arg(long, default_value_t = 3)]
    overwrites: u64,
    /// Writes under way at once.
    #[arg(long, default_value_t = 32)]
    depth: usize,
    /// Memory for maps, in KiB.
    #[arg(long, default_value_t = 65_536)]
    map_kib: u64,
    /// Seed of the load.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Which blocks are overwritten.
#[derive(Debug, Clone, Copy)]
enum Load {
    Uniform,
    /// Nine of ten writes on a tenth of the blocks, spread evenly.
    Skewed,
}

impl Load {
    fn pick(self, rng: &mut StdRng, places: u64) -> u64 {
        match self {
            Self::Uniform => rng.random_range(0..places),
            Self::Skewed if rng.random_range(0..10) > 0 => rng.random_range(0..places.div_ceil(10)) * 10,
            Self::Skewed => rng.random_range(0..places),
        }
        .min(places - 1)
    }
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    ensure!((1..=64).contains(&options.write_kib) && options.write_kib.is_multiple_of(4), "--write-kib: 4 to 64, by 4");
    println!(
        "{}+{}, {} segments of {} KiB, writes of {} KiB at depth {}, data that does not compress; {} overwrites to warm up, {} measured",
        options.k,
        options.m,
        options.segments,
        options.segment_kib,
        options.write_kib,
        options.depth,
        options.warm_up,
        options.overwrites
    );
    println!("bytes per byte that hosts wrote:");
    println!(
        "{:>5} {:>8} {:>7} {:>7} {:>7} {:>11} {:>8} {:>9} {:>11} {:>8}",
        "fill", "load", "records", "moved", "pages", "checkpoints", "padding", "log alone", "with parity", "refused"
    );
    for load in [Load::Uniform, Load::Skewed] {
        for fill in &options.fill {
            let (written, refused) = measure(&options, *fill, load)?;
            let per = |bytes: u64| bytes as f64 / written.user_bytes.max(1) as f64;
            println!(
                "{fill:>4}% {:>8} {:>7.3} {:>7.3} {:>7.3} {:>11.3} {:>8.3} {:>9.2} {:>11.2} {refused:>8}",
                format!("{load:?}").to_lowercase(),
                per(written.fresh_bytes),
                per(written.moved_bytes),
                per(written.page_bytes),
                per(written.checkpoint_bytes),
                per(written.padding_bytes),
                per(written.written_bytes() - written.parity_bytes),
                per(written.written_bytes()),
            );
        }
    }
    Ok(())
}

/// Fills a new pool and overwrites it; what was written while it was measured, and how many writes were refused.
fn measure(options: &Options, fill: u64, load: Load) -> anyhow::Result<(WriteTraffic, u64)> {
    let machine = Machine::new(options);
    let env: Rc<dyn Env> = Rc::new(MachineEnv(Rc::clone(&machine)));
    let options = options.clone();
    machine.run(async move { overwrite(&options, env, fill, load).await })?
}

async fn overwrite(options: &Options, env: Rc<dyn Env>, fill: u64, load: Load) -> anyhow::Result<(WriteTraffic, u64)> {
    let (pool, _reactor) = start(options, env).await?;
    let space = pool.status().space;
    let room = (space.used_bytes + space.reclaimable_bytes + space.free_bytes) / 100 * fill;
    let count = options.write_kib * 1024 / BLOCK as u64;
    // At rest, each write is one record.
    let places = room / sealed_bound(options.write_kib as usize * 1024, BLOCK_SHIFT) as u64;
    let volume = Volume::create(&pool, places * count).await?;
    let mut rng = StdRng::seed_from_u64(options.seed);
    for slba in (0..places * count).step_by(16) {
        let outcome = volume.write(slba, 16.min(places * count - slba), &mut rng).await;
        ensure!(outcome == Outcome::Success, "filling it to {fill} %: {outcome:?}");
    }
    let mut refused = 0;
    let mut before = pool.status().traffic;
    for round in 0..options.warm_up + options.overwrites {
        if round == options.warm_up {
            before = pool.status().traffic;
        }
        for _ in 0..places.div_ceil(options.depth as u64) {
            let mut writes = Vec::new();
            for _ in 0..options.depth {
                let slba = load.pick(&mut rng, places) * count;
                writes.push(volume.write(slba, count, &mut rng));
            }
            for outcome in join_all(writes).await {
                match outcome {
                    Outcome::Success => {}
                    Outcome::CapacityExceeded => refused += 1,
                    other => bail!("a write ended with {other:?}"),
                }
            }
        }
    }
    let after = pool.status().traffic;
    Ok((difference(&after, &before), refused))
}

fn difference(after: &WriteTraffic, before: &WriteTraffic) -> WriteTraffic {
    WriteTraffic {
        user_bytes: after.user_bytes - before.user_bytes,
        fresh_bytes: after.fresh_bytes - before.fresh_bytes,
        moved_bytes: after.moved_bytes - before.moved_bytes,
        page_bytes: after.page_bytes - before.page_bytes,
        checkpoint_bytes: after.checkpoint_bytes - before.checkpoint_bytes,
        padding_bytes: after.padding_bytes - before.padding_bytes,
        parity_bytes: after.parity_bytes - before.parity_bytes,
    }
}

async fn start(options: &Options, env: Rc<dyn Env>) -> anyhow::Result<(Pool, PoolReactor)> {
    let layout = Layout {
        data_shards: options.k,
        parity_shards: options.m,
        segment_bytes: options.segment_kib << 10,
        ..Layout::default()
    };
    let size_bytes = Some(options.member_bytes());
    let input = |index| MemberInput { name: format!("mem:{index}"), size_bytes, can_grow: false, unopened: None };
    let inputs: Vec<_> = (0..layout.members()).map(input).collect();
    format(&env, &inputs, layout).await?;
    let mount_options = MountOptions { map_bytes_max: options.map_kib << 10, ..MountOptions::default() };
    let kek = Arc::new(KeyEncryptionKey::from_secret([7; 32].into()));
    let (pool, seeds) = mount(Rc::clone(&env), &inputs, mount_options, kek).await?.split(1, None)?;
    let seed = seeds.into_iter().next().context("a pool of one reactor has one seed")?;
    Ok((pool, PoolReactor::start(env, seed)?))
}

impl Options {
    fn member_bytes(&self) -> u64 {
        (64 << 10) + self.segments * (u64::from(self.segment_kib) << 10)
    }
}

struct Volume(Arc<dyn Backend>);

struct Answer(Mutex<Option<oneshot::Sender<Outcome>>>);

impl ReplySink for Answer {
    fn reply(&self, _token: u64, reply: Reply) {
        let sender = self.0.lock().ok().and_then(|mut sender| sender.take());
        // Whoever asked waits for it.
        let _ = sender.map(|sender| sender.send(reply.outcome));
    }
}

impl Volume {
    async fn create(pool: &Pool, blocks: u64) -> anyhow::Result<Self> {
        let spec = VolumeSpec {
            name: "v".into(),
            uuid: None,
            size_bytes: blocks * BLOCK as u64,
            block_bytes: BLOCK as u32,
            compression: Compression::None,
            cipher: Cipher::Aes128Gcm,
        };
        pool.create_volume(spec).await?;
        Ok(Self(pool.volume("v").context("it has just been made")?))
    }

    /// Writes random bytes.
    fn write(&self, slba: u64, lba_count: u64, rng: &mut StdRng) -> impl Future<Output = Outcome> + use<> {
        let mut buffer = IoBuf::heap(lba_count as usize * BLOCK);
        rng.fill_bytes(&mut buffer);
        let (sender, answer) = oneshot::channel();
        let range = LbaRange { slba, lba_count };
        let done = Done::new(Arc::new(Answer(Mutex::new(Some(sender)))), 0);
        self.0.submit(Operation::Write { range, buffer, fua: false }, done);
        async move { answer.await.unwrap_or(Outcome::InternalError) }
    }
}

struct Timer {
    at: Duration,
    order: u64,
    fire: oneshot::Sender<()>,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Timer {}
impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Members in memory, one thread, and a clock that goes on when nothing else is to be done.
struct Machine {
    members: Vec<RefCell<Vec<u8>>>,
    executor: LocalExecutor<'static>,
    start: Instant,
    now: Cell<Duration>,
    order: Cell<u64>,
    timers: RefCell<BinaryHeap<Reverse<Timer>>>,
    rng: RefCell<StdRng>,
}

impl Machine {
    fn new(options: &Options) -> Rc<Self> {
        let member = |_| RefCell::new(vec![0; options.member_bytes() as usize]);
        Rc::new(Self {
            members: (0..options.k + options.m).map(member).collect(),
            executor: LocalExecutor::new(),
            start: Instant::now(),
            now: Cell::default(),
            order: Cell::default(),
            timers: RefCell::default(),
            rng: RefCell::new(StdRng::seed_from_u64(options.seed ^ 0xFACE)),
        })
    }

    fn run<T: 'static>(self: &Rc<Self>, main: impl Future<Output = T> + 'static) -> anyhow::Result<T> {
        let (sender, mut result) = oneshot::channel();
        self.executor.spawn(async move { drop(sender.send(main.await)) }).detach();
        loop {
            while self.executor.try_tick() {}
            if let Some(result) = result.try_recv()? {
                return Ok(result);
            }
            let timer = self.timers.borrow_mut().pop();
            let Some(Reverse(timer)) = timer else { bail!("nothing is left to wait for") };
            self.now.set(self.now.get().max(timer.at));
            // Whoever waited may have given up.
            let _ = timer.fire.send(());
        }
    }

    fn sleep(&self, at: Duration) -> oneshot::Receiver<()> {
        let (fire, fired) = oneshot::channel();
        let order = self.order.replace(self.order.get() + 1);
        self.timers.borrow_mut().push(Reverse(Timer { at: at.max(self.now.get()), order, fire }));
        fired
    }
}

struct MachineEnv(Rc<Machine>);

impl MachineEnv {
    /// After the latency, does something with a member's bytes.
    fn later<T: 'static>(
        &self,
        member: MemberIndex,
        work: impl FnOnce(&mut [u8]) -> T + 'static,
    ) -> LocalBoxFuture<'static, T> {
        let machine = Rc::clone(&self.0);
        let over = machine.sleep(machine.now.get() + LATENCY);
        Box::pin(async move {
            // The machine outlives its tasks.
            let _ = over.await;
            work(&mut machine.members[usize::from(member.0)].borrow_mut())
        })
    }
}

fn place(bytes: &mut [u8], offset: u64, len: usize) -> io::Result<&mut [u8]> {
    bytes.get_mut(offset as usize..offset as usize + len).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

impl Env for MachineEnv {
    fn read(&self, member: MemberIndex, offset: u64, mut buf: IoBuf) -> LocalBoxFuture<'static, IoResult> {
        self.later(member, move |bytes| {
            let read = place(bytes, offset, buf.len()).map(|from| buf.copy_from_slice(from));
            (read, buf)
        })
    }
    fn write(&self, member: MemberIndex, offset: u64, buf: IoBuf) -> LocalBoxFuture<'static, IoResult> {
        self.later(member, move |bytes| (place(bytes, offset, buf.len()).map(|to| to.copy_from_slice(&buf)), buf))
    }
    fn sync(&self, member: MemberIndex) -> LocalBoxFuture<'static, io::Result<()>> {
        self.later(member, |_| Ok(()))
    }
    fn allocate(&self, member: MemberIndex, _offset: u64, _len: u64) -> LocalBoxFuture<'static, io::Result<()>> {
        self.later(member, |_| Ok(()))
    }
    fn release(&self, member: MemberIndex, _offset: u64, _len: u64) -> LocalBoxFuture<'static, io::Result<()>> {
        self.later(member, |_| Ok(()))
    }
    fn grow(&self, _member: MemberIndex, _size_bytes: u64) -> io::Result<()> {
        Ok(())
    }
    fn now(&self) -> Instant {
        self.0.start + self.0.now.get()
    }
    fn unix_seconds(&self) -> u64 {
        self.0.now.get().as_secs()
    }
    fn sleep_until(&self, at: Instant) -> LocalBoxFuture<'static, ()> {
        let fired = self.0.sleep(at.saturating_duration_since(self.0.start));
        Box::pin(async move {
            // The machine outlives its tasks.
            let _ = fired.await;
        })
    }
    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        self.0.executor.spawn(task).detach();
    }
    fn buffer(&self, len: usize) -> LocalBoxFuture<'static, IoBuf> {
        Box::pin(std::future::ready(IoBuf::heap(len)))
    }
    fn random(&self, out: &mut [u8]) {
        self.0.rng.borrow_mut().fill_bytes(out);
    }
}
