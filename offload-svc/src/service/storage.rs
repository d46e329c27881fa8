//! The pool's place in the service: members, key, format or mount, volumes, and the way of its messages.
//!
//! Owns the decision to format, which is made only where nothing is lost. Must not know what a pool does. Invariants: a
//! member that holds anything is never written to by a format; no key is made for a pool that exists; where a pool was
//! served before, blank members are not taken for a new one.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use uuid::Uuid;

use super::Forced;
use super::anchor::{self, Anchor, AnchorError};
use super::changes::is_changed;
use super::making::{make_pool, make_spares};
use super::members::Devices;
use crate::config::check;
use crate::config::schema::Volume;
use crate::config::values::{ByteSize, MemberSpec};
use crate::config::{Checked, Config, ConfigError, Reason, Sources};
use crate::pool::{
    self, CheckpointError, CloneSpec, Courier, Env, FormatError, Found, FoundText, Inspection, MemberInput, Message,
    MountError, MountOptions, Mounted, Pool, PoolReactor, Publication, ReactorSeed, VolumeError, VolumeSpec,
    VolumeStatus,
};
use crate::reactor::disk::FileError;
use crate::reactor::env::ReactorEnv;
use crate::reactor::members::{Member, Members, Missing};
use crate::reactor::{Ended, Reactors};
use crate::stages::keys::{KekError, KekSource, KeyEncryptionKey, UnwrapError};
use crate::stages::rs::CodeError;

/// How long a failed start waits for the pool to close.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// What may be done where nothing is left of a pool. Members that hold anything are not formatted, by force or not.
const NEW_POOL: &str =
    " To give that pool up and make a new, empty one of these members, start once with --force new-pool.";

/// Why there is no pool to serve from.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// A member that is there can't be used.
    #[error("pool.members[{index}]: {source}; nothing was changed")]
    Member {
        /// Its place in the configuration.
        index: usize,
        /// Why.
        source: FileError,
    },
    /// A member of a new pool can't be opened or made.
    #[error("pool.members[{index}]: {reason}; no pool was made")]
    NotMade {
        /// Its place in the configuration.
        index: usize,
        /// Why.
        reason: String,
    },
    /// The pool that was served before is not there.
    #[error(
        "pool.members: none of them holds the pool {pool}, which was served before ({}): {}. Mount or connect what its members \
         are on and start again.{} Nothing was changed",
        state.display(),
        members.join(", "),
        if *empty { NEW_POOL } else { "" }
    )]
    PoolGone {
        /// The pool.
        pool: Uuid,
        /// The file that says so.
        state: PathBuf,
        /// What is in each member's place.
        members: Vec<String>,
        /// Nothing is in any.
        empty: bool,
    },
    /// The anchor.
    #[error("pool.anchor: {0}")]
    Anchor(#[from] AnchorError),
    /// No key.
    #[error("pool.key_file: {0}")]
    Key(#[from] KekError),
    /// A key that does not open the pool's.
    #[error(
        "pool.key_file: {}: volume {volume:?}: its key does not open: {source}; put the pool's own key file back. Nothing was \
         changed",
        path.display()
    )]
    OtherKey {
        /// The key file.
        path: PathBuf,
        /// The first volume of which it is said.
        volume: String,
        /// Why.
        source: UnwrapError,
    },
    /// Members that can't become a pool.
    #[error("pool.members: {0}")]
    Format(#[from] FormatError),
    /// A pool that can't be mounted.
    #[error("pool.members: the pool can't be mounted: {0}")]
    Mount(#[from] MountError),
    /// The pool's code can't be built.
    #[error("pool.k, pool.m: {0}")]
    Code(#[from] CodeError),
    /// A reactor ended meanwhile.
    #[error(transparent)]
    Reactor(#[from] Ended),
    /// A volume of the configuration.
    #[error("volume {name}: can't be made: {source}")]
    Volume {
        /// Its name.
        name: String,
        /// Why.
        source: VolumeError,
    },
    /// A volume of the configuration that shall be larger.
    #[error("volume {name}: has {has} and can't be grown to the {configured} of the configuration: {source}")]
    Grow {
        /// Its name.
        name: String,
        /// What it has.
        has: ByteSize,
        /// What is configured.
        configured: ByteSize,
        /// Why.
        source: VolumeError,
    },
    /// A volume that the configuration describes otherwise than it is.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A bug of ours.
    #[error("opening the members failed inside; see the log")]
    Bug,
}

/// The pool as the service holds it.
pub(super) struct Storage {
    devices: Arc<Devices>,
    /// Looks after the devices; ends with this.
    keeper: AbortHandle,
    anchor: Option<Arc<Anchor>>,
    /// Keeps the anchor up to date; ends with this.
    anchorman: Option<AbortHandle>,
    formatted: bool,
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.keeper.abort();
        if let Some(anchorman) = &self.anchorman {
            anchorman.abort();
        }
    }
}

impl Storage {
    /// Mounts the pool of the configuration, or formats its members if they are blank; none without members.
    pub(super) async fn open(
        checked: &Checked,
        force: Forced,
        reactors: &Reactors,
    ) -> Result<Option<Self>, StorageError> {
        let config = &checked.config;
        if config.pool.members.is_empty() {
            return Ok(None);
        }
        let (members, found) = find(config, reactors).await?;
        let pool = match &found {
            Inspection::Pool { uuid } => Some(*uuid),
            Inspection::Formattable | Inspection::Other(_) => None,
        };
        let (members, key) = match pool {
            Some(pool) => {
                note_another_pool(checked, pool);
                make_spares(config, &members).await?;
                (members, load_key(config, false).await?)
            }
            None => {
                refuse_without_pool(checked, force, &members, &found)?;
                // First, as what is made after it is taken back if it fails.
                let key = load_key(config, true).await?;
                (make_pool(config, reactors, members).await?, key)
            }
        };
        let formatted = pool.is_none();
        let anchored = read_anchor(config, pool)?;
        let options = MountOptions { force: force.mount, anchor: anchored, ..config.pool.mount_options() };
        let mounted = mount(options, reactors, &members, key).await;
        let mounted = mounted.map_err(|error| name_key_file(error, config))?;
        let pool = spread(mounted, reactors, &members).await?;
        let devices = Arc::new(Devices::new(pool, members, config.pool.clone()));
        let keeper = tokio::spawn(Arc::clone(&devices).keep()).abort_handle();
        let anchor = config.pool.anchor.clone().map(|file| Arc::new(Anchor::new(file, devices.pool().clone())));
        let anchorman = anchor.clone().map(|anchor| tokio::spawn(anchor.keep()).abort_handle());
        let storage = Self { devices, keeper, anchor, anchorman, formatted };
        if let Err(error) = refuse_another_shape(config, storage.pool(), &checked.sources) {
            if let Err(error) = close(&storage, CLOSE_LIMIT).await {
                tracing::warn!(%error, "after the failed start");
            }
            return Err(error);
        }
        for (index, volume) in config.volumes.iter().enumerate() {
            if let Err(error) = storage.ensure_volume(index, volume, checked).await {
                if let Err(error) = close(&storage, CLOSE_LIMIT).await {
                    tracing::warn!(%error, "after the failed start");
                }
                return Err(error);
            }
        }
        Ok(Some(storage))
    }

    pub(super) fn pool(&self) -> &Pool {
        self.devices.pool()
    }

    /// The devices behind it.
    pub(super) fn devices(&self) -> &Devices {
        &self.devices
    }

    pub(super) fn anchor(&self) -> Option<&Anchor> {
        self.anchor.as_deref()
    }

    /// Whether this start made the pool.
    pub(super) fn is_new(&self) -> bool {
        self.formatted
    }

    /// Members of the configuration that could not be opened, with the reason.
    pub(super) fn unopened(&self) -> Vec<(String, String)> {
        let failed = |member: Arc<Member>| Some((member.name.clone(), member.file.as_ref().err()?.to_string()));
        self.devices.members().iter().filter_map(failed).collect()
    }

    /// Makes a volume that isn't there, and grows one that shall be larger. `index` is its place in the configuration.
    async fn ensure_volume(&self, index: usize, volume: &Volume, checked: &Checked) -> Result<(), StorageError> {
        let name = volume.name.as_str();
        if let Some(there) = self.pool().volumes().into_iter().find(|there| there.name == name) {
            refuse_another_kind(index, volume, &there, &checked.sources)?;
            return self.adapt(volume, &there, is_changed(checked, volume)).await;
        }
        if let Some(origin) = &volume.origin {
            return self.clone_of(origin.as_str(), index, volume, checked).await;
        }
        let spec = VolumeSpec {
            name: name.to_owned(),
            uuid: None,
            size_bytes: volume.size.bytes(),
            block_bytes: volume.block_size.bytes(),
            compression: volume.compression,
            cipher: volume.cipher,
        };
        let made = self.pool().create_volume(spec).await;
        let made = made.map_err(|source| StorageError::Volume { name: name.to_owned(), source })?;
        tracing::info!(volume = name, size_bytes = made.size_bytes, "volume made");
        Ok(())
    }

    /// Makes a volume that begins as what the pool has under another name, and grows it where it shall be larger.
    async fn clone_of(
        &self,
        origin: &str,
        index: usize,
        volume: &Volume,
        checked: &Checked,
    ) -> Result<(), StorageError> {
        let (name, volumes) = (volume.name.as_str(), self.pool().volumes());
        let Some(from) = volumes.iter().find(|there| there.name == origin) else {
            let have: Vec<String> = volumes.into_iter().map(|there| there.name).collect();
            return Err(ConfigError::Invalid(vec![check::missing_origin(&checked.sources, index, have)]).into());
        };
        // A clone has its origin's key and blocks.
        refuse_another_kind(index, volume, from, &checked.sources)?;
        let spec = CloneSpec { name: name.to_owned(), compression: Some(volume.compression) };
        let made = self.pool().clone_volume(origin, spec).await;
        let made = made.map_err(|source| StorageError::Volume { name: name.to_owned(), source })?;
        tracing::info!(volume = name, origin, size_bytes = made.size_bytes, "volume made, a clone");
        self.adapt(volume, &made, false).await
    }

    /// A volume grows to what is configured. It is never made smaller: that would lose what stands at its end. Where its size is
    /// a change made at run time (`changed`), the pool's larger one is the last of them, and nobody has to set anything.
    async fn adapt(&self, volume: &Volume, there: &VolumeStatus, changed: bool) -> Result<(), StorageError> {
        let (name, configured, has) = (volume.name.as_str(), volume.size, ByteSize(there.size_bytes));
        if configured > has {
            let grown = self.pool().resize_volume(name, configured.bytes()).await;
            grown.map_err(|source| StorageError::Grow { name: name.to_owned(), has, configured, source })?;
            tracing::info!(volume = name, from = %has, to = %configured, "volume grown, as configured");
        } else if configured < has && !changed {
            tracing::warn!(volume = name, %has, %configured, "the volume is larger than configured, and stays so: set volume.size to what it has");
        }
        let configured = volume.compression.to_string();
        if configured != there.compression {
            let has = there.compression.as_str();
            tracing::warn!(
                volume = name,
                has,
                configured,
                "the volume goes on compressing as it was made; to change that, make another volume and copy the data"
            );
        }
        Ok(())
    }
}

/// A pool keeps the shape that it was formatted with; a configuration that says otherwise would only mislead.
fn refuse_another_shape(config: &Config, pool: &Pool, sources: &Sources) -> Result<(), StorageError> {
    let status = pool.status();
    let (k, m) = (status.data_shards, status.parity_shards);
    let mut problems = Vec::new();
    let mut compare = |key, same: bool, has: String| {
        if !same {
            problems.push(sources.problem(&["pool", key], Reason::PoolKeeps { has }));
        }
    };
    compare("k", config.pool.k == k, k.to_string());
    compare("m", config.pool.m == m, m.to_string());
    let segment = ByteSize(status.segment_bytes.into());
    compare("segment_size", config.pool.segment_size == segment, segment.to_string());
    let members = usize::from(k) + usize::from(m);
    compare("members", config.pool.members.len() == members, format!("{members} members"));
    if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid(problems).into()) }
}

/// Cipher and block size are promises to whoever set them, and a volume keeps those that it was made with.
fn refuse_another_kind(
    index: usize,
    volume: &Volume,
    there: &VolumeStatus,
    sources: &Sources,
) -> Result<(), StorageError> {
    let place = index.to_string();
    let kinds = [
        ("cipher", volume.cipher.name().to_owned(), there.cipher.clone()),
        ("block_size", volume.block_size.bytes().to_string(), there.block_bytes.to_string()),
    ];
    let differs = kinds.into_iter().filter(|(_, configured, has)| configured != has);
    let problem = |(key, _, has)| sources.problem(&["volume", &place, key], Reason::VolumeKeeps { has });
    let problems: Vec<_> = differs.map(problem).collect();
    if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid(problems).into()) }
}

pub(super) fn inputs(members: &Members) -> Vec<MemberInput> {
    let input = |member: Arc<Member>| MemberInput {
        name: member.name.clone(),
        size_bytes: member.file.as_ref().ok().map(|file| file.size_bytes()),
        can_grow: member.file.as_ref().is_ok_and(|file| file.is_regular()),
        unopened: member.file.as_ref().err().map(ToString::to_string),
    };
    members.iter().map(input).collect()
}

/// The members, then the spares.
pub(super) async fn open_members(config: &Config, missing: Missing) -> Result<Members, StorageError> {
    let specs: Vec<_> = config.pool.members.iter().chain(&config.pool.spares).cloned().collect();
    // Opening waits for file systems and devices.
    let opened = tokio::task::spawn_blocking(move || Members::open(&specs, missing)).await;
    opened.map_err(|_| StorageError::Bug)
}

/// The members, and the pool on them. In an existing pool no file is made: a new one in place of a lost one would only hide
/// the loss.
async fn find(config: &Config, reactors: &Reactors) -> Result<(Members, Inspection), StorageError> {
    let members = open_members(config, Missing::Leave).await?;
    refuse_busy(&members)?;
    let found = inspect(reactors, &members, config.pool.members.len()).await?;
    if let Inspection::Pool { uuid } = &found {
        tracing::info!(pool = %uuid, "pool found");
    }
    Ok((members, found))
}

/// Members may lead to another pool than before, but somebody should know.
fn note_another_pool(checked: &Checked, found: Uuid) {
    if let Some(before) = checked.state.kept.pool.filter(|before| *before != found) {
        tracing::warn!(pool = %found, %before, "another pool than the one that was served before is on pool.members");
    }
}

/// Whether a pool of these members can still be there after a restart: one in memory can't.
pub(super) fn outlives_us(config: &Config) -> bool {
    config.pool.members.iter().any(|member| !matches!(member, MemberSpec::Mem(_)))
}

/// Where a pool was served, its members being gone altogether means that they are somewhere else.
fn refuse_without_pool(
    checked: &Checked,
    force: Forced,
    members: &Members,
    found: &Inspection,
) -> Result<(), StorageError> {
    let known = checked.state.kept.pool.filter(|_| !force.new_pool && outlives_us(&checked.config));
    let Some(pool) = known else { return Ok(()) };
    let found_on = |index: usize| match found {
        Inspection::Other(found) => found.get(index).cloned().unwrap_or(Found::Unreadable),
        Inspection::Formattable | Inspection::Pool { .. } => Found::Blank,
    };
    let state = |(index, member): (usize, Arc<Member>)| match &member.file {
        Ok(_) => {
            let found = found_on(index);
            (found == Found::Blank, format!("{}: {}", member.name, FoundText::of(found)))
        }
        Err(error) => (error.is_absent(), error.to_string()),
    };
    let members = members.iter().take(checked.config.pool.members.len());
    let (empty, members): (Vec<bool>, Vec<String>) = members.enumerate().map(state).unzip();
    let empty = empty.into_iter().all(|empty| empty);
    Err(StorageError::PoolGone { pool, state: checked.state.file.clone(), members, empty })
}

/// What the anchor of the pool that was found tells. A new pool gets one of its own.
fn read_anchor(config: &Config, found: Option<Uuid>) -> Result<Option<Publication>, StorageError> {
    let (Some(file), Some(pool)) = (&config.pool.anchor, found) else { return Ok(None) };
    let anchored = anchor::read(file, pool)?;
    if anchored.is_none() {
        tracing::warn!(anchor = %file.display(), "there is no anchor yet: whether all members were rolled back before can't be told");
    }
    Ok(anchored)
}

/// A member that another process uses ends the start: it may well be this service, started twice.
pub(super) fn refuse_busy(members: &Members) -> Result<(), StorageError> {
    for (index, member) in members.iter().enumerate() {
        if let Err(FileError::InUse { path }) = &member.file {
            return Err(StorageError::Member { index, source: FileError::InUse { path: path.clone() } });
        }
    }
    Ok(())
}

/// What the first `count` are.
async fn inspect(reactors: &Reactors, members: &Members, count: usize) -> Result<Inspection, Ended> {
    let (members, mut inputs) = (members.clone(), inputs(members));
    inputs.truncate(count);
    let look = move |local| async move {
        let env: Rc<dyn Env> = Rc::new(ReactorEnv::new(local, members));
        pool::inspect(&env, &inputs).await
    };
    reactors.call_on(0, look).await
}

async fn load_key(config: &Config, create: bool) -> Result<KeyEncryptionKey, StorageError> {
    let source = KekSource::File { path: config.pool.key_file.clone(), create };
    let loaded = tokio::task::spawn_blocking(move || KeyEncryptionKey::load(&source)).await;
    Ok(loaded.map_err(|_| StorageError::Bug)??)
}

async fn mount(
    options: MountOptions,
    reactors: &Reactors,
    members: &Members,
    key: KeyEncryptionKey,
) -> Result<Mounted, StorageError> {
    let (members, inputs) = (members.clone(), inputs(members));
    let work = move |local| async move {
        let env: Rc<dyn Env> = Rc::new(ReactorEnv::new(local, members));
        pool::mount(env, &inputs, options, Arc::new(key)).await
    };
    Ok(reactors.call_on(0, work).await??)
}

/// What is wrong with a key is said of its file.
fn name_key_file(error: StorageError, config: &Config) -> StorageError {
    match error {
        StorageError::Mount(MountError::Key { volume, source }) => {
            StorageError::OtherKey { path: config.pool.key_file.clone(), volume, source }
        }
        other => other,
    }
}

/// Gives each reactor its part. The first one, which coordinates, comes last: what it sends finds the others there.
async fn spread(mounted: Mounted, reactors: &Reactors, members: &Members) -> Result<Pool, StorageError> {
    let courier = Arc::new(Rings(reactors.clone()));
    let (pool, seeds) = mounted.split(reactors.count(), Some(courier)).map_err(MountError::from)?;
    for seed in seeds.into_iter().rev() {
        let members = members.clone();
        let index = seed.index();
        let take = move |local| async move { take_part(Rc::new(ReactorEnv::new(local, members)), seed) };
        reactors.call_on(index, take).await??;
    }
    Ok(pool)
}

thread_local! {
    /// This reactor's part of the pool, and what came for it before it was there.
    static PART: RefCell<Part> = const { RefCell::new(Part { reactor: None, early: Vec::new() }) };
}

struct Part {
    reactor: Option<Rc<PoolReactor>>,
    early: Vec<Message>,
}

fn take_part(env: Rc<dyn Env>, seed: ReactorSeed) -> Result<(), CodeError> {
    let reactor = Rc::new(PoolReactor::start(env, seed)?);
    let early = PART.with_borrow_mut(|part| {
        part.reactor = Some(Rc::clone(&reactor));
        std::mem::take(&mut part.early)
    });
    early.into_iter().for_each(|message| reactor.deliver(message));
    Ok(())
}

fn deliver(message: Message) {
    let (reactor, message) = PART.with_borrow_mut(|part| match &part.reactor {
        Some(reactor) => (Some(Rc::clone(reactor)), Some(message)),
        None => {
            part.early.push(message);
            (None, None)
        }
    });
    // Outside the borrow: delivering may send a message to this very reactor.
    if let (Some(reactor), Some(message)) = (reactor, message) {
        reactor.deliver(message);
    }
}

/// Carries the pool's messages over the rings between reactors.
struct Rings(Reactors);

impl Courier for Rings {
    fn send(&self, reactor: usize, message: Message) {
        // A reactor that has ended takes its shards with it: the message's requests answer for themselves when dropped.
        let _ = self.0.run_on(reactor, move |_| deliver(message));
    }
}

/// Closes the pool within `limit`: a last checkpoint says that it is clean.
pub(super) async fn close(storage: &Storage, limit: Duration) -> Result<(), CloseError> {
    let closed = tokio::time::timeout(limit, storage.pool().shutdown()).await;
    if let Some(anchor) = storage.anchor.clone() {
        let _ = tokio::task::spawn_blocking(move || anchor.update()).await;
    }
    match closed {
        Ok(closed) => Ok(closed?),
        Err(_) => Err(CloseError::Late { ms: limit.as_millis() as u64 }),
    }
}

/// Why the pool was not closed cleanly. Nothing that was acknowledged is lost: the next mount replays the log.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// The last checkpoint.
    #[error("no last checkpoint: {0}")]
    Checkpoint(#[from] CheckpointError),
    /// It took too long.
    #[error("the pool was not closed within {ms} ms")]
    Late {
        /// The time that it had.
        ms: u64,
    },
}
