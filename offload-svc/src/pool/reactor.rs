//! Spreading a mounted pool over reactors.
//!
//! Owns the hand-over from the mount to the reactors and the tasks that each runs. Must not know how a reactor is made.
//! Invariant: every shard has one owner, `shard % reactors`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, RwLock};

use futures::channel::mpsc::{UnboundedReceiver, unbounded};
use tokio::sync::Notify;

use super::absorb;
use super::backing;
use super::checkpoint::Root;
use super::clean;
use super::coordinator::{self, Control, Coordinator};
use super::core::Core;
use super::env::Env;
use super::handle::Pool;
use super::layers::{LayerBudget, Tree};
use super::members::{Excluder, Exclusion, MemberIo};
use super::message::{Channels, Courier, Message};
use super::mount::{Mounted, stripe_io};
use super::options::OptionError;
use super::pace::Foreground;
use super::rebuild::{Comer, Keeper, Rebuilding};
use super::rotate;
use super::scrub::{Scrub, Scrubbing};
use super::segments::Unfinished;
use super::shared::{Shared, Volume};
use super::space::Admission;
use super::stream::{Lane, Stream};
use super::superblock::Superblock;
use super::superblocks::{Floor, SUPERBLOCKS_UNDER_WAY, Superblocks};
use crate::stages::engines;
use crate::stages::keys::KeyEncryptionKey;
use crate::stages::rs::CodeError;

/// What one reactor needs to take its part; may be sent to its thread.
pub struct ReactorSeed {
    index: usize,
    shared: Arc<Shared>,
    shards: Vec<(Arc<Volume>, u16, Tree)>,
    inbox: UnboundedReceiver<Message>,
    coordinator: Option<CoordinatorSeed>,
}

struct CoordinatorSeed {
    requests: UnboundedReceiver<Control>,
    exclusions: UnboundedReceiver<Exclusion>,
    state: Superblock,
    returning: Vec<Comer>,
    root: Root,
    next_volume: u32,
    kek: Arc<KeyEncryptionKey>,
}

impl ReactorSeed {
    /// The reactor it is for.
    pub fn index(&self) -> usize {
        self.index
    }
}

impl Mounted {
    /// Parts the pool among `reactors` reactors (one at least). `courier` carries messages between them, by default over
    /// channels.
    ///
    /// # Errors
    /// `max_replay_segments` is too small for so many reactors.
    pub fn split(
        self,
        reactors: usize,
        courier: Option<Arc<dyn Courier>>,
    ) -> Result<(Pool, Vec<ReactorSeed>), OptionError> {
        let reactors = reactors.max(1);
        self.options.check_reactors(reactors)?;
        let (channels, inboxes): (Vec<_>, Vec<_>) = (0..reactors).map(|_| unbounded()).unzip();
        let courier = courier.unwrap_or_else(|| Arc::new(Channels(channels)));
        let (control, requests) = unbounded();
        let (membership, exclusions) = unbounded();
        let volumes = self.volumes.values().map(|volume| (volume.key(), Arc::clone(volume))).collect();
        let listed = self.segments.left().0;
        let shared = Arc::new(Shared {
            admission: Arc::new(Admission::new(self.set.layout, self.set.segment_count, reactors)),
            set: self.set,
            foreground: Foreground::new(self.options.foreground_p99),
            options: self.options,
            reactors,
            membership,
            closing: AtomicBool::new(false),
            segments: self.segments,
            space_event: Notify::new(),
            volumes: RwLock::new(volumes),
            keyring: self.keyring,
            engines: *engines::chosen(),
            control,
            courier,
            report: self.report,
            given_up: self.state.given_up,
            mounts: self.state.mounts,
            checkpoints: AtomicU64::new(0),
            checkpoints_begun: AtomicU64::new(0),
            checkpoints_ended: AtomicU64::new(0),
            layers: LayerBudget::default(),
            pages_read: Arc::default(),
            cleaned: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            stripes_written: AtomicU64::new(0),
            cleaner_busy: AtomicBool::new(false),
            cleaning: Notify::new(),
            backing: Notify::new(),
            given_back: AtomicU64::new(0),
            listed_at_checkpoint: AtomicU64::new(listed),
            checkpoint_wanted: AtomicBool::new(false),
            absorbing: Notify::new(),
            erasing: tokio::sync::Mutex::new(()),
            rebuild: Rebuilding::default(),
            scrub: Scrubbing::default(),
            receipts: self.receipts,
        });
        shared.admission.set_volumes(self.volumes.len());
        let mut shards: HashMap<usize, Vec<(Arc<Volume>, u16, Tree)>> = HashMap::new();
        for ((volume, number), tree) in self.shards {
            if let Some(volume) = self.volumes.get(&volume) {
                let owner = usize::from(number) % reactors;
                shards.entry(owner).or_default().push((Arc::clone(volume), number, tree));
            }
        }
        let mut coordinator = Some(CoordinatorSeed {
            requests,
            exclusions,
            state: self.state,
            returning: self.returning,
            root: self.root,
            next_volume: self.next_volume,
            kek: self.kek,
        });
        let seeds = inboxes.into_iter().enumerate().map(|(index, inbox)| ReactorSeed {
            index,
            shared: Arc::clone(&shared),
            shards: shards.remove(&index).unwrap_or_default(),
            inbox,
            coordinator: coordinator.take(),
        });
        let seeds = seeds.collect();
        Ok((Pool { shared }, seeds))
    }
}

/// One reactor's part of a running pool. The tasks that it has started go on when it is dropped.
pub struct PoolReactor {
    pub(super) core: Rc<Core>,
}

impl PoolReactor {
    /// Takes the reactor's part: spawns its tasks on `env`.
    pub fn start(env: Rc<dyn Env>, seed: ReactorSeed) -> Result<Self, CodeError> {
        let ReactorSeed { index, shared, shards, inbox, coordinator } = seed;
        let excluder = Excluder::Serving(shared.membership.clone());
        let stripes = Rc::new(stripe_io(Rc::clone(&env), &shared.set, &shared.options, excluder.clone())?);
        let core = Rc::new(Core::new(index, Arc::clone(&shared), stripes, shards));
        env.spawn(Box::pin(Core::serve(Rc::clone(&core), inbox)));
        for lane in [Lane::Fresh, Lane::Moved] {
            env.spawn(Box::pin(Stream::run(Rc::clone(&core), lane)));
        }
        if let Some(seed) = coordinator {
            let io = MemberIo::new(Rc::clone(&env), Arc::clone(&shared.set), excluder, SUPERBLOCKS_UNDER_WAY);
            let (floor, mut scrub) = (Arc::clone(&shared), seed.state.scrub);
            let suspect = seed.state.members.iter().any(|member| member.suspect);
            let superblocks = Rc::new(Superblocks::new(io, seed.state, Box::new(ServingFloor(floor))));
            superblocks.begin_serving();
            let coordinator = Rc::new(Coordinator {
                core: Rc::clone(&core),
                superblocks: Rc::clone(&superblocks),
                last_root: RefCell::new(seed.root),
                next_volume: Cell::new(seed.next_volume),
                kek: seed.kek,
                resizing: Cell::new(None),
            });
            coordinator.note_destroyed();
            env.spawn(Box::pin(coordinator.run(seed.requests)));
            env.spawn(Box::pin(coordinator::serve_membership(
                Rc::clone(&superblocks),
                Rc::clone(&core),
                seed.exclusions,
            )));
            env.spawn(Box::pin(coordinator::keep_time(Rc::clone(&core))));
            env.spawn(Box::pin(clean::run(Rc::clone(&core))));
            env.spawn(Box::pin(backing::run(Rc::clone(&core))));
            rotate::go_on(&core);
            env.spawn(Box::pin(absorb::run(Rc::clone(&core))));
            if suspect {
                // What they have lost counts as damage until it has been found, by a pass from the beginning.
                scrub.running = false;
                core.shared.scrub.ask(true);
            }
            let keeper = Keeper::new(Rc::clone(&core), Rc::clone(&superblocks), seed.returning);
            env.spawn(Box::pin(keeper.run()));
            env.spawn(Box::pin(Scrub::new(Rc::clone(&core), Rc::clone(&superblocks), scrub).run()));
        }
        Ok(Self { core })
    }

    /// Takes a message that a [`Courier`] of the service has carried here.
    pub fn deliver(&self, message: Message) {
        Core::deliver(&self.core, message);
    }
}

/// While a pool is served.
struct ServingFloor(Arc<Shared>);

impl Floor for ServingFloor {
    fn now(&self) -> u64 {
        self.0.segments.floor()
    }

    fn unfinished(&self) -> Unfinished {
        self.0.segments.unfinished()
    }

    fn of(&self, unfinished: &Unfinished) -> u64 {
        self.0.segments.floor_of(unfinished)
    }
}
