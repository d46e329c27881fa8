//! Carries out a plan: life after life, step after step, and compares what is read with what may be.
//!
//! Owns the order of lives and the rule that no more members are hurt at a time than the parity covers, whichever steps are
//! left out. Must not know how a failing plan is made shorter. Invariant: a run depends on its plan only; a failure is a
//! panic that names the step.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::super::{Env, MemberInput, MountError, PoolReactor, format, mount};
use super::super::harness::{Live, input, inputs, kek};
use super::super::sim::{Crashed, Disk, Disks, Mode, World};
use super::expected::Expected;
use super::plan::{Plan, Step};
use super::steps::Hand;

/// Blank devices beside the members.
const SPARES: usize = 2;

/// What happened in runs, to tell whether they try what they are meant to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub seeds: u64,
    pub steps: u64,
    pub lives: u64,
    pub crashes: u64,
    pub crashes_in_mount: u64,
    pub clean_stops: u64,
    pub requests: u64,
    pub refused_full: u64,
    pub compared_blocks: u64,
    pub checkpoints: u64,
    pub cleaned: u64,
    pub hurt: u64,
    pub heals: u64,
    pub copies: u64,
    pub replaced: u64,
    pub healed_at_mount: u64,
    pub unreadable: u64,
    pub mounts_refused: u64,
}

impl Tally {
    pub fn add(&mut self, other: &Self) {
        let Self { seeds, steps, lives, crashes, crashes_in_mount, clean_stops, requests, refused_full, .. } = other;
        self.seeds += seeds;
        self.steps += steps;
        self.lives += lives;
        self.crashes += crashes;
        self.crashes_in_mount += crashes_in_mount;
        self.clean_stops += clean_stops;
        self.requests += requests;
        self.refused_full += refused_full;
        self.compared_blocks += other.compared_blocks;
        self.checkpoints += other.checkpoints;
        self.cleaned += other.cleaned;
        self.hurt += other.hurt;
        self.heals += other.heals;
        self.copies += other.copies;
        self.replaced += other.replaced;
        self.healed_at_mount += other.healed_at_mount;
        self.unreadable += other.unreadable;
        self.mounts_refused += other.mounts_refused;
    }
}

/// What outlives a crash: the members, and what is known of them.
pub struct Run {
    pub plan: Plan,
    pub disks: Rc<Disks>,
    pub inputs: Vec<MemberInput>,
    pub expected: RefCell<Expected>,
    /// Places of the set whose members may have failed, lost or spoiled something since they were last well.
    pub hurt: RefCell<BTreeSet<usize>>,
    /// Slots that have been written to.
    pub slots_used: Cell<usize>,
    /// The slots of the set's members when they were last well.
    pub slots: RefCell<Vec<usize>>,
    /// The last checkpoint has everything.
    complete: Cell<bool>,
    /// Reads may fail: more is hurt than the parity covers.
    pub beyond: Cell<bool>,
    pub tally: RefCell<Tally>,
    next: Cell<usize>,
    kept: Vec<usize>,
    life: Cell<u64>,
    /// At which write the following mounts are cut short.
    again: RefCell<VecDeque<Option<u64>>>,
}

/// How a life ended.
enum End {
    Stopped,
    Done,
}

impl Run {
    /// A formatted pool with its first volume.
    fn new(plan: Plan, kept: Vec<usize>) -> Rc<Self> {
        let mut all = inputs(&plan.layout, plan.segments);
        let members = all.len();
        let size = all[0].size_bytes.expect("it is there");
        all.extend((members..members + SPARES).map(|slot| input(slot, size)));
        let run = Rc::new(Self {
            disks: Disks::new(all.len()),
            inputs: all,
            expected: RefCell::new(Expected::of(&plan)),
            hurt: RefCell::default(),
            slots_used: Cell::new(members),
            slots: RefCell::default(),
            complete: Cell::new(false),
            beyond: Cell::new(false),
            tally: RefCell::new(Tally { seeds: 1, ..Tally::default() }),
            next: Cell::new(0),
            kept,
            life: Cell::new(0),
            again: RefCell::default(),
            plan,
        });
        let world = World::new(&run.disks, run.plan.seed);
        let (env, inner) = (world.env(), Rc::clone(&run));
        let made = world.run(async move {
            format(&env, &inner.inputs[..members], inner.plan.layout).await.expect("blank members");
            let live = inner.start(&env, &World::new(&inner.disks, 0)).await.expect("formatted");
            live.pool.create_volume(inner.plan.specs[0].clone()).await.expect("room");
            live.pool.shutdown().await.expect("members are good");
        });
        made.expect("no crash was asked for");
        world.end(run.plan.seed);
        run
    }

    async fn start(&self, env: &Rc<dyn Env>, world: &Rc<World>) -> Result<Live, MountError> {
        let (mut options, reactors) = self.plan.options(self.life.get());
        let layout = self.plan.layout;
        // With so few data shards those that are away could be a set of their own; here they never are.
        options.force.rival = layout.parity_shards >= layout.data_shards && !self.hurt.borrow().is_empty();
        let mounted = mount(Rc::clone(env), &self.inputs, options, kek()).await?;
        self.tally.borrow_mut().healed_at_mount += mounted.report().stripes_healed;
        let (pool, seeds) = mounted.split(reactors, None)?;
        let start = |seed| PoolReactor::start(Rc::clone(env), seed).expect("a valid code").core;
        Ok(Live { pool, cores: seeds.into_iter().map(start).collect(), env: Rc::clone(env), world: Rc::clone(world) })
    }

    fn rng(&self, what: u64) -> StdRng {
        StdRng::seed_from_u64(self.plan.seed.rotate_left(17) ^ self.life.get() << 8 ^ what)
    }

    /// One life: a mount, and what follows until it stops, the power fails or nothing is left to do.
    fn live(self: &Rc<Self>, then: Then) -> Result<End, Crashed> {
        self.life.set(self.life.get() + 1);
        self.tally.borrow_mut().lives += 1;
        let life = self.life.get();
        let world = World::new(&self.disks, self.plan.seed ^ life << 32);
        let cut = self.again.borrow_mut().pop_front().flatten();
        world.crash_at.set(cut);
        let (env, run, inner) = (world.env(), Rc::clone(self), Rc::clone(&world));
        let mounted = Rc::new(Cell::new(false));
        let seen = Rc::clone(&mounted);
        let result = world.run(async move {
            let live = match run.start(&env, &inner).await {
                Ok(live) => live,
                Err(error) if run.beyond.get() => {
                    assert!(may_stop_a_mount(&error), "life {life}: {error}");
                    return End::Done;
                }
                // What members can't read now may be answered writes: the pool waits until somebody has seen to them.
                Err(MountError::NotReadable { .. }) if run.may_wait() => return End::Done,
                Err(error) => panic!("life {life} does not begin: {error}"),
            };
            seen.set(true);
            run.expected.borrow_mut().mounted(&live.pool);
            let hand = Hand::new(run, live);
            let end = then.carry_out(&hand).await;
            hand.count();
            end
        });
        if result.is_err() {
            self.expected.borrow_mut().crash();
            let mut tally = self.tally.borrow_mut();
            tally.crashes += 1;
            tally.crashes_in_mount += u64::from(!mounted.get());
        }
        world.end(self.plan.seed ^ life);
        result
    }

    /// Whether a mount may wait for members that can't be read: then they can be from now on.
    fn may_wait(&self) -> bool {
        let unreadable = self.disks.0.iter().any(|disk| {
            let disk = disk.borrow();
            disk.mode != Mode::Good || !disk.bad_pages.is_empty()
        });
        self.tally.borrow_mut().mounts_refused += 1;
        for disk in &self.disks.0 {
            let mut disk = disk.borrow_mut();
            disk.mode = Mode::Good;
            disk.bad_pages.clear();
        }
        unreadable && !self.hurt.borrow().is_empty()
    }

    /// Where the step is, and what it is.
    fn take_step(&self) -> Option<(usize, Step)> {
        let index = *self.kept.get(self.next.get())?;
        self.next.set(self.next.get() + 1);
        self.tally.borrow_mut().steps += 1;
        Some((index, self.plan.steps[index]))
    }

    /// A look at a copy of the members as they rest.
    fn copy(&self) -> Rc<Self> {
        Rc::new(Self {
            plan: self.plan.clone(),
            disks: self.disks.copy(),
            inputs: self.inputs.clone(),
            expected: RefCell::new(self.expected.borrow().copy()),
            hurt: self.hurt.clone(),
            slots_used: self.slots_used.clone(),
            slots: self.slots.clone(),
            complete: self.complete.clone(),
            beyond: Cell::new(false),
            tally: RefCell::default(),
            next: Cell::new(self.kept.len()),
            kept: Vec::new(),
            life: self.life.clone(),
            again: RefCell::default(),
        })
    }
}

/// What a life is for.
#[derive(Clone, Copy)]
enum Then {
    Steps,
    /// All is mended and compared; a clean stop or none.
    Mend {
        stop: bool,
    },
    Compare,
    /// All volumes go, and their room comes back.
    Empty,
}

impl Then {
    async fn carry_out(self, hand: &Rc<Hand>) -> End {
        match self {
            Self::Steps => steps(hand).await,
            Self::Mend { stop } => {
                hand.heal().await;
                hand.check_all("at the end").await;
                hand.run.complete.set(hand.live.pool.checkpoint().await.is_ok());
                hand.note_slots();
                if stop {
                    hand.live.pool.shutdown().await.expect("all members are well");
                }
                End::Done
            }
            Self::Compare => {
                hand.check_all("on a copy").await;
                End::Done
            }
            Self::Empty => {
                hand.delete_all().await;
                End::Done
            }
        }
    }
}

async fn steps(hand: &Rc<Hand>) -> End {
    let run = &hand.run;
    // Not always: what no read has seen must stay as open as it was.
    if run.rng(1).random_bool(0.7) {
        hand.check_all("at the mount").await;
    }
    while let Some((index, step)) = run.take_step() {
        match step {
            Step::Stop => {
                hand.settle().await;
                match hand.live.pool.shutdown().await {
                    Ok(()) => return End::Stopped,
                    Err(error) => panic!("step {index}, a clean stop: {error}"),
                }
            }
            Step::Crash { after, again } => {
                let world = &hand.live.world;
                if world.crash_at.get().is_none_or(|at| at <= world.steps.get()) {
                    world.crash_at.set(Some(world.steps.get() + after));
                    run.again.borrow_mut().extend(again);
                }
            }
            step => hand.carry_out(index, step).await,
        }
    }
    End::Done
}

/// Where more is lost than the parity covers, these are honest answers.
fn may_stop_a_mount(error: &MountError) -> bool {
    matches!(
        error,
        MountError::Checkpoint(_)
            | MountError::LostWrites { .. }
            | MountError::NotReadable { .. }
            | MountError::NewCheckpoint(_)
    )
}

/// Runs a plan, or those of its steps that are kept. Panics where the pool does what it must not.
pub fn run(plan: Plan, kept: Option<Vec<usize>>) -> Tally {
    let kept = kept.unwrap_or_else(|| (0..plan.steps.len()).collect());
    let run = Run::new(plan, kept);
    while run.next.get() < run.kept.len() {
        match run.live(Then::Steps) {
            Ok(End::Stopped) => run.tally.borrow_mut().clean_stops += 1,
            Ok(End::Done) | Err(_) => {}
        }
        run.expected.borrow_mut().crash();
    }
    run.again.borrow_mut().clear();
    let mut rng = run.rng(2);
    let stop = rng.random_bool(0.5);
    let refused = run.tally.borrow().mounts_refused;
    let _ = run.live(Then::Mend { stop });
    if run.tally.borrow().mounts_refused > refused {
        let _ = run.live(Then::Mend { stop });
    }
    run.expected.borrow_mut().crash();
    let mut tally = *run.tally.borrow();
    tally.add(&without_some(&run, &mut rng));
    if run.complete.get() && rng.random_bool(0.3) {
        tally.add(&beyond_parity(&run, &mut rng));
    }
    let _ = run.live(Then::Empty);
    tally.lives = run.life.get();
    tally
}

/// As many members as the parity covers are lost, of those that the pool has: nothing is missing.
fn without_some(run: &Run, rng: &mut StdRng) -> Tally {
    let copy = run.copy();
    let slots = copy.slots.borrow().clone();
    let lost = choose(rng, &slots, usize::from(copy.plan.layout.parity_shards));
    copy.hurt.borrow_mut().extend(0..lost.len());
    lost.iter().for_each(|slot| copy.disks.set_mode(*slot, Mode::Broken));
    let _ = copy.live(Then::Compare);
    copy.tally.take()
}

/// More is spoiled than the parity covers: an error, or what was written, and never anything else.
fn beyond_parity(run: &Run, rng: &mut StdRng) -> Tally {
    let copy = run.copy();
    let slots = copy.slots.borrow().clone();
    let hurt = choose(rng, &slots, usize::from(copy.plan.layout.parity_shards) + 1);
    let one_in = [1, 2, 10][rng.random_range(0..3usize)];
    for slot in hurt {
        rot(&mut copy.disks.0[slot].borrow_mut(), one_in, rng.random_range(0..1 << 40));
    }
    copy.beyond.set(true);
    let _ = copy.live(Then::Compare);
    copy.tally.take()
}

fn choose(rng: &mut StdRng, from: &[usize], count: usize) -> Vec<usize> {
    let mut from = from.to_vec();
    (0..count).map(|_| from.swap_remove(rng.random_range(0..from.len()))).collect()
}

/// Changes a byte of one page in so many.
pub fn rot(disk: &mut Disk, one_in: u64, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let pages: Vec<u64> = disk.pages().map(|(at, _)| at).filter(|at| *at >= 64 << 10).collect();
    for page in pages.into_iter().filter(|_| rng.random_range(0..one_in) == 0).collect::<Vec<_>>() {
        let (at, bit) = (page + rng.random_range(0..4096), 1 << rng.random_range(0..8));
        disk.damage(at, |byte| *byte ^= bit);
    }
}
