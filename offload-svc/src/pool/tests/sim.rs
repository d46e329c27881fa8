//! Members, time and reactors simulated in one thread, from one seed.
//!
//! Fault model. Survivable on up to m members at once: EIO, bad sectors, hangs, lost and flipped
//! bytes, truncation. Survivable on all
//! at once: a crash, which loses, keeps or tears (by 512-byte sector) each write since the member's last sync, each on its
//! own. A sync that has returned is trusted.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::future::Future;
use std::io;
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use async_executor::LocalExecutor;
use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::LocalBoxFuture;
use nvmf_target::buffer::IoBuf;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::super::env::{Env, IoResult, MemberIndex};

const PAGE: u64 = 4096;
const SECTOR: usize = 512;

/// How a member behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    #[default]
    Good,
    /// Reads and writes answer with EIO.
    Broken,
    /// Only writes do.
    WriteBroken,
    /// Nothing is answered any more.
    Hung,
    /// Writes to pages that have never been written answer ENOSPC.
    Full,
    /// As if cut to nothing: reads end early.
    Truncated,
}

struct Unsynced {
    id: u64,
    offset: u64,
    data: Vec<u8>,
    completed: bool,
}

/// One member's medium: survives crashes.
#[derive(Default)]
pub struct Disk {
    durable: BTreeMap<u64, Box<[u8]>>,
    current: BTreeMap<u64, Box<[u8]>>,
    unsynced: Vec<Unsynced>,
    pub mode: Mode,
    pub reads: u64,
    /// Pages that can't be read until they are written again.
    pub bad_pages: BTreeSet<u64>,
    /// Pages that have their room.
    allocated: BTreeSet<u64>,
    /// How many more pages there is room for; `None`: for any number.
    pub room: Option<u64>,
    /// Its file system can't set room aside.
    pub plain: bool,
    /// Where its file ends, if it was cut: reads beyond fail, and writes beyond make it longer.
    pub end: Option<u64>,
    /// Reads take so much longer.
    pub slow: Duration,
}

impl Disk {
    fn read(&self, offset: u64, out: &mut [u8]) {
        for (index, page) in out.chunks_mut(PAGE as usize).enumerate() {
            match self.current.get(&(offset / PAGE + index as u64)) {
                Some(stored) => page.copy_from_slice(&stored[..page.len()]),
                None => page.fill(0),
            }
        }
    }

    fn put(pages: &mut BTreeMap<u64, Box<[u8]>>, offset: u64, data: &[u8]) {
        for (index, chunk) in data.chunks(SECTOR).enumerate() {
            let at = offset + (index * SECTOR) as u64;
            let page = pages.entry(at / PAGE).or_insert_with(|| vec![0; PAGE as usize].into());
            let within = (at % PAGE) as usize;
            page[within..within + chunk.len()].copy_from_slice(chunk);
        }
    }

    /// Changes what is stored, as damage does.
    pub fn damage(&mut self, offset: u64, change: impl Fn(&mut u8)) {
        for pages in [&mut self.current, &mut self.durable] {
            if let Some(page) = pages.get_mut(&(offset / PAGE)) {
                change(&mut page[(offset % PAGE) as usize]);
            }
        }
    }

    /// Every page that has been written, with its contents.
    pub fn pages(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.current.iter().map(|(page, bytes)| (page * PAGE, &bytes[..]))
    }

    /// Overwrites a page on the medium.
    pub fn set_page(&mut self, offset: u64, bytes: &[u8]) {
        Self::put(&mut self.current, offset, bytes);
        Self::put(&mut self.durable, offset, bytes);
    }

    pub fn page(&self, offset: u64) -> Vec<u8> {
        let mut out = vec![0; PAGE as usize];
        self.read(offset, &mut out);
        out
    }

    /// Whether there is room for pages, which is taken then.
    fn takes(&mut self, pages: std::ops::Range<u64>) -> bool {
        let fresh: Vec<u64> =
            pages.filter(|page| !self.current.contains_key(page) && !self.allocated.contains(page)).collect();
        let room = if self.mode == Mode::Full { Some(0) } else { self.room };
        let fits = room.is_none_or(|room| fresh.len() as u64 <= room);
        if fits {
            self.room = self.room.map(|room| room.saturating_sub(fresh.len() as u64));
            self.allocated.extend(fresh);
        }
        fits
    }

    /// Pages that have their room.
    pub fn pages_allocated(&self) -> u64 {
        self.allocated.len() as u64
    }

    /// Gives the room of pages back; they read as zeroes.
    fn release(&mut self, pages: std::ops::Range<u64>) {
        for page in pages {
            let held = self.allocated.remove(&page) | self.current.remove(&page).is_some();
            self.durable.remove(&page);
            self.room = self.room.map(|room| room + u64::from(held));
        }
    }

    /// Cuts its file.
    pub fn cut(&mut self, size_bytes: u64) {
        for pages in [&mut self.current, &mut self.durable] {
            pages.retain(|page, _| (page + 1) * PAGE <= size_bytes);
        }
        self.end = Some(size_bytes);
    }

    pub fn copy(&self) -> Self {
        Self {
            durable: self.durable.clone(),
            current: self.current.clone(),
            allocated: self.allocated.clone(),
            room: self.room,
            plain: self.plain,
            end: self.end,
            ..Self::default()
        }
    }

    fn crash(&mut self, rng: &mut StdRng) {
        // One crash keeps much, another little: both extremes find other mistakes than the middle.
        let keep = [0.0, 0.1, 0.5, 0.9, 1.0][rng.random_range(0..5usize)];
        for write in std::mem::take(&mut self.unsynced) {
            let whole = rng.random_bool(keep);
            let torn = rng.random_bool(0.3);
            for (index, sector) in write.data.chunks(SECTOR).enumerate() {
                if if torn { rng.random_bool(keep) } else { whole } {
                    Self::put(&mut self.durable, write.offset + (index * SECTOR) as u64, sector);
                }
            }
        }
        self.current = self.durable.clone();
    }
}

/// All members' media.
#[derive(Default)]
pub struct Disks(pub Vec<RefCell<Disk>>);

impl Disks {
    pub fn new(count: usize) -> Rc<Self> {
        Rc::new(Self((0..count).map(|_| RefCell::default()).collect()))
    }

    pub fn set_mode(&self, member: usize, mode: Mode) {
        self.0[member].borrow_mut().mode = mode;
    }

    pub fn copy(&self) -> Rc<Self> {
        Rc::new(Self(self.0.iter().map(|disk| RefCell::new(disk.borrow().copy())).collect()))
    }

    pub fn crash(&self, seed: u64) {
        let mut rng = StdRng::seed_from_u64(seed);
        self.0.iter().for_each(|disk| disk.borrow_mut().crash(&mut rng));
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

/// One life of the machine: from start to crash.
pub struct World {
    pub disks: Rc<Disks>,
    start: Instant,
    now: Cell<Duration>,
    order: Cell<u64>,
    timers: RefCell<BinaryHeap<Reverse<Timer>>>,
    rng: RefCell<StdRng>,
    executor: RefCell<Option<Rc<LocalExecutor<'static>>>>,
    /// Writes and syncs begun.
    pub steps: Cell<u64>,
    /// The step at which the power fails.
    pub crash_at: Cell<Option<u64>>,
    crashed: Cell<bool>,
    /// What a task panicked with.
    panic: RefCell<Option<Box<dyn Any + Send>>>,
    /// Requests that hang, each to be let go.
    hung: RefCell<Vec<oneshot::Sender<()>>>,
    /// How much I/O there was, by kind, for tests of cost.
    pub counts: RefCell<HashMap<&'static str, u64>>,
    holds: RefCell<Vec<Hold>>,
}

/// Picks a write by its offset and bytes.
type Picks = Box<dyn Fn(u64, &[u8]) -> bool>;

struct Hold {
    member: usize,
    picks: Picks,
    caught: Rc<Cell<bool>>,
    released: oneshot::Receiver<()>,
}

/// A write that reaches its medium late: when it is let go.
pub struct Held {
    caught: Rc<Cell<bool>>,
    release: oneshot::Sender<()>,
}

impl Held {
    /// The write has been begun.
    pub fn is_caught(&self) -> bool {
        self.caught.get()
    }

    /// Lets it go on.
    pub fn release(self) {
        // The world may have ended.
        let _ = self.release.send(());
    }
}

/// The power failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crashed;

impl World {
    pub fn new(disks: &Rc<Disks>, seed: u64) -> Rc<Self> {
        Rc::new(Self {
            disks: Rc::clone(disks),
            start: Instant::now(),
            now: Cell::default(),
            order: Cell::default(),
            timers: RefCell::default(),
            rng: RefCell::new(StdRng::seed_from_u64(seed)),
            executor: RefCell::new(Some(Rc::new(LocalExecutor::new()))),
            steps: Cell::default(),
            crash_at: Cell::default(),
            crashed: Cell::default(),
            panic: RefCell::default(),
            hung: RefCell::default(),
            counts: RefCell::default(),
            holds: RefCell::default(),
        })
    }

    /// Holds up the first write on a member that `picks` picks, and no other, until it is let go.
    pub fn hold_write(&self, member: usize, picks: impl Fn(u64, &[u8]) -> bool + 'static) -> Held {
        let (release, released) = oneshot::channel();
        let caught = Rc::new(Cell::new(false));
        let hold = Hold { member, picks: Box::new(picks), caught: Rc::clone(&caught), released };
        self.holds.borrow_mut().push(hold);
        Held { caught, release }
    }

    fn take_hold(&self, member: MemberIndex, offset: u64, data: &[u8]) -> Option<oneshot::Receiver<()>> {
        let mut holds = self.holds.borrow_mut();
        let at = holds.iter().position(|hold| hold.member == usize::from(member.0) && (hold.picks)(offset, data))?;
        let hold = holds.remove(at);
        hold.caught.set(true);
        Some(hold.released)
    }

    pub fn env(self: &Rc<Self>) -> Rc<dyn Env> {
        Rc::new(SimEnv(Rc::clone(self)))
    }

    pub fn elapsed(&self) -> Duration {
        self.now.get()
    }

    /// Runs until `main` is done or the power fails.
    pub fn run<T: 'static>(self: &Rc<Self>, main: impl Future<Output = T> + 'static) -> Result<T, Crashed> {
        let executor = self.executor.borrow().clone().expect("the world has not ended");
        let result = Rc::new(RefCell::new(None));
        let slot = Rc::clone(&result);
        self.spawn(async move { *slot.borrow_mut() = Some(main.await) });
        loop {
            while !self.crashed.get() && result.borrow().is_none() && executor.try_tick() {}
            // An executor keeps a task's panic for whoever joins it; nobody does.
            if let Some(panic) = self.panic.borrow_mut().take() {
                std::panic::resume_unwind(panic);
            }
            if self.crashed.get() {
                return Err(Crashed);
            }
            if let Some(done) = result.borrow_mut().take() {
                return Ok(done);
            }
            let timer = self.timers.borrow_mut().pop();
            let Some(Reverse(timer)) = timer else { panic!("nothing left to wait for: a hang") };
            self.now.set(self.now.get().max(timer.at));
            assert!(self.now.get() < Duration::from_secs(36_000), "ten hours of virtual time: a livelock");
            let _ = timer.fire.send(());
        }
    }

    /// Ends this life: every task is dropped, and what was not synced is lost, kept or torn.
    pub fn end(&self, crash_seed: u64) {
        self.executor.borrow_mut().take();
        self.timers.borrow_mut().clear();
        self.hung.borrow_mut().clear();
        self.disks.crash(crash_seed);
    }

    /// Has the next crash lose everything that is not synced by now.
    pub fn lose_unsynced(&self) {
        self.disks.0.iter().for_each(|disk| disk.borrow_mut().unsynced.clear());
    }

    fn spawn(self: &Rc<Self>, task: impl Future<Output = ()> + 'static) {
        if let Some(executor) = &*self.executor.borrow() {
            let world = Rc::clone(self);
            let watched = async move {
                if let Err(panic) = AssertUnwindSafe(task).catch_unwind().await {
                    world.panic.borrow_mut().get_or_insert(panic);
                }
            };
            executor.spawn(watched).detach();
        }
    }

    fn sleep(&self, at: Duration) -> oneshot::Receiver<()> {
        let (fire, fired) = oneshot::channel();
        let order = self.order.replace(self.order.get() + 1);
        self.timers.borrow_mut().push(Reverse(Timer { at: at.max(self.now.get()), order, fire }));
        fired
    }

    /// Lets go what hangs: writes that had begun before the member hung reach the medium now, the rest fails.
    pub fn release(&self) {
        for held in self.hung.take() {
            let _ = held.send(());
        }
    }

    /// Does something after a while.
    pub fn later(self: &Rc<Self>, time: Duration, what: impl FnOnce(&Self) + 'static) {
        let (world, at) = (Rc::clone(self), self.sleep(self.now.get() + time));
        self.spawn(async move {
            if at.await.is_ok() {
                what(&world);
            }
        });
    }

    /// A request's stay in a member that hangs.
    async fn hang(&self) {
        let (release, released) = oneshot::channel();
        self.hung.borrow_mut().push(release);
        if released.await.is_err() {
            // The world has ended.
            never().await
        }
    }

    fn latency(&self) -> oneshot::Receiver<()> {
        let micros = self.rng.borrow_mut().random_range(20..300);
        self.sleep(self.now.get() + Duration::from_micros(micros))
    }

    fn mode(&self, member: MemberIndex) -> Mode {
        self.disks.0[usize::from(member.0)].borrow().mode
    }

    fn step(&self) {
        self.steps.set(self.steps.get() + 1);
        if Some(self.steps.get()) == self.crash_at.get() {
            self.crashed.set(true);
        }
    }

    fn count(&self, what: &'static str) {
        *self.counts.borrow_mut().entry(what).or_default() += 1;
    }
}

struct SimEnv(Rc<World>);

impl SimEnv {
    fn change_room(
        &self,
        member: MemberIndex,
        change: impl FnOnce(&mut Disk) -> io::Result<()> + 'static,
    ) -> LocalBoxFuture<'static, io::Result<()>> {
        let world = Rc::clone(&self.0);
        Box::pin(async move {
            let _ = world.latency().await;
            if world.mode(member) == Mode::Hung {
                world.hang().await;
            }
            let mut disk = world.disks.0[usize::from(member.0)].borrow_mut();
            match disk.mode {
                _ if disk.plain => Err(io::ErrorKind::Unsupported.into()),
                Mode::Good | Mode::Full => change(&mut disk),
                _ => Err(eio()),
            }
        })
    }
}

fn eio() -> io::Error {
    io::Error::other("simulated I/O error")
}

/// Never completes.
async fn never<T>() -> T {
    std::future::poll_fn(|_| Poll::Pending).await
}

impl Env for SimEnv {
    fn read(&self, member: MemberIndex, offset: u64, mut buf: IoBuf) -> LocalBoxFuture<'static, IoResult> {
        assert!(
            offset.is_multiple_of(PAGE) && (buf.len() as u64).is_multiple_of(PAGE) && !buf.is_empty(),
            "unaligned read"
        );
        let world = Rc::clone(&self.0);
        world.count("read");
        Box::pin(async move {
            let slow = world.disks.0[usize::from(member.0)].borrow().slow;
            let _ = world.latency().await;
            if !slow.is_zero() {
                let _ = world.sleep(world.now.get() + slow).await;
            }
            if world.mode(member) == Mode::Hung {
                world.hang().await;
            }
            let mut disk = world.disks.0[usize::from(member.0)].borrow_mut();
            disk.reads += 1;
            let pages = offset / PAGE..(offset + buf.len() as u64) / PAGE;
            if disk.bad_pages.range(pages).next().is_some() {
                return (Err(eio()), buf);
            }
            match disk.mode {
                _ if disk.end.is_some_and(|end| offset + buf.len() as u64 > end) => {
                    (Err(io::ErrorKind::UnexpectedEof.into()), buf)
                }
                Mode::Good | Mode::WriteBroken | Mode::Full => {
                    disk.read(offset, &mut buf);
                    (Ok(()), buf)
                }
                Mode::Truncated => (Err(io::ErrorKind::UnexpectedEof.into()), buf),
                Mode::Broken | Mode::Hung => (Err(eio()), buf),
            }
        })
    }

    fn write(&self, member: MemberIndex, offset: u64, buf: IoBuf) -> LocalBoxFuture<'static, IoResult> {
        assert!(
            offset.is_multiple_of(PAGE) && (buf.len() as u64).is_multiple_of(PAGE) && !buf.is_empty(),
            "unaligned write"
        );
        let world = Rc::clone(&self.0);
        world.count("write");
        world.step();
        let id = world.order.replace(world.order.get() + 1);
        let mut disk = world.disks.0[usize::from(member.0)].borrow_mut();
        let mode = disk.mode;
        let pages = offset / PAGE..(offset + buf.len() as u64) / PAGE;
        let good = matches!(mode, Mode::Good | Mode::Full);
        let full = good && !disk.takes(pages.clone());
        let takes = good && !full;
        if takes {
            disk.unsynced.push(Unsynced { id, offset, data: buf.to_vec(), completed: false });
        }
        drop(disk);
        let held = world.take_hold(member, offset, &buf);
        Box::pin(async move {
            let _ = world.latency().await;
            if let Some(released) = held {
                let _ = released.await;
            }
            if mode == Mode::Hung || world.mode(member) == Mode::Hung {
                world.hang().await;
            }
            let mut disk = world.disks.0[usize::from(member.0)].borrow_mut();
            if full {
                return (Err(io::ErrorKind::StorageFull.into()), buf);
            }
            if !takes || !matches!(disk.mode, Mode::Good | Mode::Full) {
                return (Err(eio()), buf);
            }
            let Disk { current, unsynced, bad_pages, end, .. } = &mut *disk;
            bad_pages.retain(|page| !pages.contains(page));
            if let Some(write) = unsynced.iter_mut().find(|write| write.id == id) {
                write.completed = true;
                *end = end.map(|end| end.max(offset + write.data.len() as u64));
                Disk::put(current, offset, &write.data);
            }
            (Ok(()), buf)
        })
    }

    fn sync(&self, member: MemberIndex) -> LocalBoxFuture<'static, io::Result<()>> {
        let world = Rc::clone(&self.0);
        world.step();
        Box::pin(async move {
            let covered: Vec<u64> = {
                let disk = world.disks.0[usize::from(member.0)].borrow();
                disk.unsynced.iter().filter(|write| write.completed).map(|write| write.id).collect()
            };
            let _ = world.latency().await;
            if world.mode(member) == Mode::Hung {
                world.hang().await;
            }
            let mut disk = world.disks.0[usize::from(member.0)].borrow_mut();
            match disk.mode {
                Mode::Hung | Mode::Broken | Mode::WriteBroken | Mode::Truncated => Err(eio()),
                Mode::Good | Mode::Full => {
                    let Disk { durable, unsynced, .. } = &mut *disk;
                    unsynced.retain(|write| {
                        let synced = covered.contains(&write.id);
                        if synced {
                            Disk::put(durable, write.offset, &write.data);
                        }
                        !synced
                    });
                    Ok(())
                }
            }
        })
    }

    fn allocate(&self, member: MemberIndex, offset: u64, len: u64) -> LocalBoxFuture<'static, io::Result<()>> {
        self.change_room(member, move |disk| {
            let fits = disk.takes(offset / PAGE..(offset + len).div_ceil(PAGE));
            if fits { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
        })
    }

    fn release(&self, member: MemberIndex, offset: u64, len: u64) -> LocalBoxFuture<'static, io::Result<()>> {
        self.0.count("release");
        self.change_room(member, move |disk| {
            disk.release(offset / PAGE..(offset + len).div_ceil(PAGE));
            Ok(())
        })
    }

    fn grow(&self, member: MemberIndex, size_bytes: u64) -> io::Result<()> {
        let mut disk = self.0.disks.0[usize::from(member.0)].borrow_mut();
        disk.end = disk.end.map(|end| end.max(size_bytes));
        Ok(())
    }

    fn now(&self) -> Instant {
        self.0.start + self.0.now.get()
    }

    fn unix_seconds(&self) -> u64 {
        1_800_000_000 + self.0.now.get().as_secs()
    }

    fn sleep_until(&self, at: Instant) -> LocalBoxFuture<'static, ()> {
        let fired = self.0.sleep(at.saturating_duration_since(self.0.start));
        Box::pin(async move {
            // The world has ended: so has this task.
            let _ = fired.await;
        })
    }

    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        self.0.spawn(task);
    }

    fn buffer(&self, len: usize) -> LocalBoxFuture<'static, IoBuf> {
        // Not zero: nothing may rely on it.
        let mut buf = IoBuf::heap(len);
        buf.fill(0xA5);
        Box::pin(std::future::ready(buf))
    }

    fn random(&self, out: &mut [u8]) {
        self.0.rng.borrow_mut().fill_bytes(out);
    }
}
