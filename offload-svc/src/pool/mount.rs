//! Mounting: from members to maps, with every durable write in them and every verdict durable before the first request.
//!
//! Owns the order of recovery: superblocks, checkpoint, replay, merge, new checkpoint. Must not know reactors. Invariants: it can
//! be cut short anywhere and begun again; it reads the checkpoint, its window, and the pages that what it replays belongs
//! in, and no more; it writes into no segment that the checkpoint it started from needs.

use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::join_all;

use super::backing::back_for_mount;
use super::checkpoint::{DecodeError, Root, Section, SectionWriter};
use super::checkpoint_io::{self, CheckpointWriter, ReadFailed, WriteFailed};
use super::core::generation_base;
use super::env::{Env, MemberIndex};
use super::family::{Family, Role};
use super::layers::{LayerBudget, ShardMap, Tree};
use super::map::{Extent, Run, What};
use super::members::{Excluder, Identity, Member, MemberIo, MemberSet, TooFewMembers};
use super::message::MergedShard;
use super::options::{Force, MemberInput, MountOptions, OptionError, SHARDS_PER_VOLUME, memory_needs};
use super::page_writer;
use super::probe::{ChooseError, Chosen, Cut, Refused, choose, probe};
use super::rebuild::Comer;
use super::receipts::Receipts;
use super::records::RecordIo;
use super::scan::{FoundRecord, SeenStreams, find_records, look_for_stripes};
use super::segments::{SegmentUse, Segments, State, Unfinished, Wanted};
use super::shared::{Books, Volume};
use super::space::Admission;
use super::status::{MemberState, MountReport, Remark};
use super::stripe::ShardHeader;
use super::stripe_io::StripeIo;
use super::superblock::{GivenUp, Lag, Superblock};
use super::superblocks::{Floor, SUPERBLOCKS_UNDER_WAY, Superblocks};
use super::tree::{MapIo, ShardRef};
use crate::stages::engines;
use crate::stages::keys::{KeyEncryptionKey, Keyring, UnwrapError};
use crate::stages::record::{Kind, RecordCodec};
use crate::stages::rs::CodeError;

/// Why a pool was not mounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error(transparent)]
    Option(#[from] OptionError),
    #[error("{source}{refused}")]
    Members { source: ChooseError, refused: Refused },
    #[error(transparent)]
    Code(#[from] CodeError),
    #[error("checkpoint can't be read: {0}")]
    Checkpoint(#[from] ReadFailed),
    #[error("volume {volume:?}: its key does not open")]
    Key {
        volume: String,
        #[source]
        source: UnwrapError,
    },
    #[error("no new checkpoint can be written: {0}")]
    NewCheckpoint(#[from] WriteFailed),
    #[error(
        "answered writes are gone: {lost} of their stripes since the last checkpoint can't be read from the members that \
         are there (the first: stripe {number} of stream {stream}); bring missing members back, or start once with \
         --force lost-writes, and blocks written by them show what was there before"
    )]
    LostWrites { lost: u64, stream: u32, number: u64 },
    #[error(
        "too many members gave no answer, or an error, while segment {segment} was read for answered writes; nothing was \
         changed: see to the members and start again, or start once with --force lost-writes, and blocks whose last writes \
         can't be read show what was there before"
    )]
    NotReadable { segment: u32 },
    #[error(
        "all members have been rolled back: the anchor tells of publication {anchored}, the newest member has {newest}, or one of \
         another history; nothing was changed: put the newer members back, or start once with --force rolled-back to go on \
         with the older state"
    )]
    RolledBack { anchored: u64, newest: u64 },
    #[error(transparent)]
    TooFewMembers(#[from] TooFewMembers),
}

/// One shard as loaded.
struct LoadedShard {
    watermark: u64,
    map: ShardMap,
}

/// A mounted pool that no reactor serves yet.
pub struct Mounted {
    pub(super) set: Arc<MemberSet>,
    pub(super) options: MountOptions,
    pub(super) segments: Arc<Segments>,
    pub(super) volumes: BTreeMap<u32, Arc<Volume>>,
    pub(super) shards: BTreeMap<(u32, u16), Tree>,
    pub(super) keyring: Arc<Keyring>,
    pub(super) kek: Arc<KeyEncryptionKey>,
    pub(super) state: Superblock,
    /// Members that are there and not in the set.
    pub(super) returning: Vec<Comer>,
    pub(super) root: Root,
    pub(super) next_volume: u32,
    pub(super) receipts: Receipts,
    pub(super) report: MountReport,
}

impl Mounted {
    /// What the mount found and did.
    pub fn report(&self) -> &MountReport {
        &self.report
    }
}

/// What a checkpoint holds.
#[derive(Default)]
struct Loaded {
    volumes: BTreeMap<u32, Arc<Volume>>,
    shards: BTreeMap<(u32, u16), LoadedShard>,
    /// Of a checkpoint of version 1, which held the maps themselves.
    extents: BTreeMap<(u32, u16), Vec<(u64, Extent)>>,
    /// Which volume lies upon which.
    parents: Vec<(u32, u32)>,
    window: Vec<SegmentUse>,
    /// Segments that hold data, with the bytes that trees lead to.
    data: Vec<(SegmentUse, u64)>,
    next_volume: u32,
    next_sequence: u64,
    /// By stream: how many of its stripes are in the maps.
    settled: BTreeMap<u32, u64>,
    root: Root,
    root_use: Option<SegmentUse>,
    receipts: Receipts,
}

/// Mounts the pool that the members hold.
pub async fn mount(
    env: Rc<dyn Env>,
    inputs: &[MemberInput],
    options: MountOptions,
    kek: Arc<KeyEncryptionKey>,
) -> Result<Mounted, MountError> {
    let started = env.now();
    options.check()?;
    let found = probe(&env, inputs).await;
    let chosen = choose(inputs, &found, options.force).map_err(|source| {
        let refused = Refused::of(inputs, &found, inputs.len());
        MountError::Members { source, refused }
    })?;
    Refused::of(inputs, &found, chosen.state.layout.members()).log();
    check_anchor(&chosen.state, &options)?;
    let set = Arc::new(member_set(inputs, &chosen, &options));
    set.note_publication(chosen.state.publication());
    let stripes = Rc::new(stripe_io(Rc::clone(&env), &set, &options, Excluder::Mounting)?);
    let floor = Arc::new(AtomicU64::new(0));
    let superblocks = superblocks(&env, &set, &chosen.state, &floor);
    remark_behind(&set, chosen.behind());
    // Before it can't be seen any more. Nothing else is written before the mount is sure: who is not there stays in the set.
    let unwritten = superblocks.catch_up(chosen.suspect).await;
    let (counted, away): (Vec<Cut>, Vec<Cut>) = chosen.cut.iter().partition(|cut| chosen.mask & (1 << cut.place) != 0);
    restore_sizes(&*env, &set, counted.iter().filter(|cut| unwritten & (1 << cut.place) == 0));
    let mut report = MountReport {
        clean: chosen.state.clean,
        members_cut: chosen.cut.iter().map(|cut| cut.place).collect(),
        members_missing: chosen.missing.clone(),
        members_stale: chosen.stale.clone(),
        members_rolled_back: chosen.rolled_back.iter().map(|(place, _)| *place).collect(),
        ..MountReport::default()
    };
    let mut loaded = load(&stripes, &chosen.state).await?;
    floor.store(loaded.floor(), Ordering::Relaxed);
    let keyring = Arc::new(Keyring::new());
    for volume in loaded.volumes.values() {
        for wrapped in volume.keys.wrapped() {
            let opened = kek.unwrap(&wrapped);
            let key = opened.map_err(|source| MountError::Key { volume: volume.name.clone(), source })?;
            keyring.insert(key);
        }
    }
    let mut replay =
        if chosen.state.clean { Replay::default() } else { scan(&stripes, &loaded.window, &mut report).await };
    let segments = check_heard(&replay.unheard, options.force)?;
    let stripes_lost = check_lost(&replay.streams.lost(&loaded.settled), options.force)?;
    let given_up = GivenUp { segments, stripes: stripes_lost, ..GivenUp::default() };
    report.stripes_lost = stripes_lost;
    let next_sequence = loaded.next_sequence.max(replay.top_sequence + 1);
    let segments = Arc::new(Segments::new(states(&set, &loaded, &replay.written), next_sequence));
    for (used, live) in &loaded.data {
        segments.count_trees(used.index, *live as i64);
    }
    let layers = LayerBudget::default();
    fill_maps(&mut loaded, &segments, &layers);
    let mut codec = RecordCodec::new(*engines::chosen(), Arc::clone(&keyring));
    let discarded = unfinished(std::mem::take(&mut replay.discarded), &loaded, chosen.mask, &set);
    replay.apply(&mut loaded, &Place { segments: &segments, layers: &layers }, &mut codec, &mut report);
    let mounts = chosen.state.mounts + 1;
    let sources = (Rc::clone(&stripes), Arc::clone(&segments), Arc::clone(&keyring));
    let records = RecordIo::new(sources.0, sources.1, sources.2, *engines::chosen(), options.slow_read);
    let maps = MapIo::new(Rc::new(records), options.map_cache_bytes(), Arc::default());
    let new = NewCheckpoint {
        maps: &maps,
        loaded: &loaded,
        layers: &layers,
        options: &options,
        mounts,
        floor: floor.load(Ordering::Relaxed),
        distrusted: &distrusted(&chosen),
        given_up,
    };
    let root = new.write(&superblocks).await?;
    if loaded.receipts.waits_for_set(set.shields.floor()) {
        superblocks.write_again().await?;
    }
    // Nothing is relied on with them now.
    restore_sizes(&*env, &set, away.iter());
    // Only now, as a mount that fails changes nothing: what was never finished must not look like something lost later.
    for header in &discarded {
        stripes.give_up(header).await;
    }
    report.volumes = loaded.volumes.len() as u64;
    report.duration_ms = env.now().saturating_duration_since(started).as_millis() as u64;
    tracing::info!("{report}");
    Ok(Mounted {
        state: superblocks.into_current(),
        set,
        options,
        segments,
        volumes: loaded.volumes,
        shards: loaded.shards.into_iter().map(|(key, shard)| (key, shard.map.tree())).collect(),
        keyring,
        kek,
        returning: returning(inputs, &chosen),
        root,
        next_volume: loaded.next_volume,
        receipts: loaded.receipts,
        report,
    })
}

/// Of the stripes that have too few shards: those that were never finished. Others have lost shards, and may be whole when a member
/// comes back: those that are in the maps by what the checkpoint says, and pages, of which nobody knows while a member is away.
fn unfinished(found: Vec<ShardHeader>, loaded: &Loaded, mask: u32, set: &MemberSet) -> Vec<ShardHeader> {
    let whole = mask.count_ones() as usize == set.count();
    let settled = |stream: u32| loaded.settled.get(&stream).copied().unwrap_or(0);
    let never = |header: &ShardHeader| match header.stream {
        page_writer::STREAM => whole,
        stream => header.number >= settled(stream),
    };
    found.into_iter().filter(never).collect()
}

/// Members that are all older than the anchor stop the mount, unless it is forced.
fn check_anchor(newest: &Superblock, options: &MountOptions) -> Result<(), MountError> {
    let Some(anchor) = options.anchor.filter(|anchor| !anchor.precedes(&newest.publication())) else { return Ok(()) };
    let error = MountError::RolledBack { anchored: anchor.generation, newest: newest.generation };
    if !options.force.rolled_back {
        return Err(error);
    }
    tracing::error!(%error, "mounted by force");
    Ok(())
}

/// What members that don't answer may have stops the mount, unless it is forced: it must not be taken for unfinished.
fn check_heard(unheard: &[u32], force: Force) -> Result<u64, MountError> {
    let Some(&segment) = unheard.first() else { return Ok(0) };
    let error = MountError::NotReadable { segment };
    if !force.lost_writes {
        return Err(error);
    }
    tracing::error!(%error, ?unheard, "mounted by force");
    Ok(unheard.len() as u64)
}

/// Answered writes that are gone stop the mount, unless it is forced.
fn check_lost(lost: &[(u32, u64)], force: Force) -> Result<u64, MountError> {
    let Some(&(stream, number)) = lost.first() else { return Ok(0) };
    let error = MountError::LostWrites { lost: lost.len() as u64, stream, number };
    if !force.lost_writes {
        return Err(error);
    }
    tracing::error!(%error, ?lost, "mounted by force");
    Ok(lost.len() as u64)
}

/// The superblocks' writer while the pool is mounted; members that leave are whole below `floor`.
fn superblocks(env: &Rc<dyn Env>, set: &Arc<MemberSet>, state: &Superblock, floor: &Arc<AtomicU64>) -> Superblocks {
    let io = MemberIo::new(Rc::clone(env), Arc::clone(set), Excluder::Mounting, SUPERBLOCKS_UNDER_WAY);
    Superblocks::new(io, state.clone(), Box::new(MountFloor(Arc::clone(floor))))
}

/// While a pool is mounted, what the checkpoint has is whole.
struct MountFloor(Arc<AtomicU64>);

impl Floor for MountFloor {
    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn unfinished(&self) -> Unfinished {
        Unfinished::from(self.now())
    }

    fn of(&self, unfinished: &Unfinished) -> u64 {
        unfinished.next()
    }
}

/// Names members that are behind by a publication.
fn remark_behind(set: &MemberSet, behind: u32) {
    for place in (0..set.count()).filter(|place| behind & (1 << place) != 0) {
        let member = set.entry(place);
        tracing::warn!(place, member = member.identity().name, "{}; a scrub will tell", Remark::OneBehind);
        member.remark(Remark::OneBehind);
    }
}

/// Members whose files were cut are made as long again: what is gone reads as zeroes, is found to be lost, and repaired.
fn restore_sizes<'a>(env: &dyn Env, set: &MemberSet, cut: impl Iterator<Item = &'a Cut>) {
    for cut in cut {
        let remark = Remark::Cut { from_bytes: cut.was_bytes, to_bytes: cut.size_bytes };
        let member = set.entry(cut.place.into());
        tracing::error!(place = cut.place, member = member.identity().name, "{remark}; its size is restored");
        member.remark(remark);
        if let Err(error) = env.grow(cut.slot, cut.was_bytes) {
            tracing::error!(place = cut.place, member = member.identity().name, %error, "its size can't be restored");
        }
    }
}

/// Members that have to be read through: older copies, and those that were cut while they were not in the set.
fn distrusted(chosen: &Chosen) -> Vec<u8> {
    let cut = chosen.cut.iter().map(|cut| cut.place).filter(|place| chosen.stale.contains(place));
    let mut places: Vec<u8> = chosen.rolled_back.iter().map(|(place, _)| *place).chain(cut).collect();
    places.sort_unstable();
    places.dedup();
    places
}

fn member_set(inputs: &[MemberInput], chosen: &Chosen, options: &MountOptions) -> MemberSet {
    let state = &chosen.state;
    let least = state.segment_offset(state.segments);
    let members = state.members.iter().zip(&chosen.present).enumerate().map(|(index, (entry, present))| {
        let slot = present.as_ref().map(|(slot, _)| *slot);
        let name = |MemberIndex(slot): MemberIndex| inputs.get(usize::from(slot)).map(|input| input.name.clone());
        let size_bytes = present.as_ref().map_or(least, |(_, block)| block.member_bytes);
        let member = Member::new(Identity { uuid: entry.uuid, slot, name: slot.and_then(name), size_bytes });
        let there = match (slot, chosen.mask & (1 << index) != 0) {
            (None, _) => MemberState::Missing,
            (Some(_), true) => MemberState::Active,
            (Some(_), false) => MemberState::Stale,
        };
        member.set_state(there, entry.epoch);
        if let Some((_, lag)) = chosen.rolled_back.iter().find(|(place, _)| usize::from(*place) == index) {
            let remark = match *lag {
                Lag::Behind(publications) => Remark::RolledBack { publications },
                Lag::OtherHistory => Remark::OtherHistory,
            };
            tracing::error!(place = index, member = member.identity().name, "{remark}; it is filled anew");
            member.remark(remark);
        }
        member
    });
    let set = MemberSet::new(state.pool, state.layout, state.segments, options.member_timeout, members.collect());
    set.shields.start(state);
    set.set(chosen.mask, state.epoch);
    set
}

/// Members that are there and lack something: those that were away, and those that were being filled.
fn returning(inputs: &[MemberInput], chosen: &Chosen) -> Vec<Comer> {
    let comer = |place: usize, (slot, block): &(MemberIndex, Superblock), replacing| {
        let name = inputs.get(usize::from(slot.0)).map(|input| input.name.clone());
        let identity = Identity { uuid: block.member, slot: Some(*slot), name, size_bytes: block.member_bytes };
        Comer { place, identity, replacing, blank: false }
    };
    let stale = chosen.stale.iter().map(|place| usize::from(*place));
    let stale = stale.filter_map(|place| Some(comer(place, chosen.present[place].as_ref()?, false)));
    let filled = chosen.replacements.iter().enumerate();
    let filled = filled.filter_map(|(place, present)| Some(comer(place, present.as_ref()?, true)));
    filled.chain(stale).collect()
}

/// Access to stripes with a reactor's share of buffers.
pub(super) fn stripe_io(
    env: Rc<dyn Env>,
    set: &Arc<MemberSet>,
    options: &MountOptions,
    excluder: Excluder,
) -> Result<StripeIo, CodeError> {
    let budget = memory_needs(&set.layout, options).buffer_bytes_per_reactor / 2;
    // Half of the buffers are for whoever needs several at once; m members that hang, and one more, keep the other half.
    let buffers = budget / u64::from(set.layout.shard_bytes_max);
    // One that comes back to its place may hang as well.
    let under_way = usize::try_from(buffers).unwrap_or(usize::MAX) / (usize::from(set.layout.parity_shards) + 2);
    StripeIo::new(MemberIo::new(env, Arc::clone(set), excluder, under_way), budget)
}

async fn load(stripes: &StripeIo, state: &Superblock) -> Result<Loaded, MountError> {
    let mut loaded = Loaded { next_volume: 1, next_sequence: 1, ..Loaded::default() };
    let Some(pointer) = &state.checkpoint else { return Ok(loaded) };
    let root = checkpoint_io::read(stripes, pointer, |section| loaded.take(section, stripes.set())).await?;
    loaded.link()?;
    loaded.root = root;
    loaded.root_use = Some(SegmentUse { index: pointer.root.segment, sequence: pointer.sequence });
    Ok(loaded)
}

impl Loaded {
    /// Uses of segments with lower sequence numbers were written to their end before this checkpoint: a member that was in
    /// the set then, and is not there now, lacks nothing of them.
    fn floor(&self) -> u64 {
        self.window.iter().map(|used| used.sequence.number).fold(self.next_sequence, u64::min)
    }

    fn take(&mut self, section: Section, set: &MemberSet) -> Result<(), DecodeError> {
        match section {
            Section::Volume(mut volume) => {
                // One lineage has one set of keys.
                if let Some(kin) = self.volumes.values().find(|kin| kin.lineage == volume.lineage) {
                    let alike = (kin.cipher, kin.block_shift) == (volume.cipher, volume.block_shift);
                    if !alike || kin.keys.current() != volume.keys.current() {
                        return Err(DecodeError::Field("lineage"));
                    }
                    volume.keys = Arc::clone(&kin.keys);
                }
                self.volumes.insert(volume.id, Arc::new(*volume));
            }
            Section::Family { volume, snapshot, hidden, parent } => {
                let own = self.volumes.get_mut(&volume).and_then(Arc::get_mut).ok_or(DecodeError::Field("family"))?;
                own.family = Family::new(if snapshot { Role::Snapshot } else { Role::Writable }, None);
                own.set_hidden(hidden);
                self.parents.extend(parent.map(|parent| (volume, parent)));
            }
            Section::OlderKey { volume, wrapped } => {
                let volume = self.volumes.get(&volume).ok_or(DecodeError::Field("older key"))?;
                let mut keys = volume.keys.lock();
                if keys.iter().any(|key| key.epoch() == wrapped.epoch()) && keys.len() > 1 {
                    // A relative has brought it.
                    return Ok(());
                }
                let before = keys.len() == 1 && wrapped.epoch().0.checked_add(1) == Some(volume.keys.current().0);
                if !before || wrapped.lineage() != volume.lineage {
                    return Err(DecodeError::Field("older key"));
                }
                keys.insert(0, wrapped);
            }
            Section::Shard { volume, shard, watermark } => {
                self.load_shard(volume, shard, watermark, Tree::default())?;
            }
            Section::Tree { volume, shard, watermark, tree } => self.load_shard(volume, shard, watermark, tree)?,
            Section::Usage { volume, usage } => {
                let volume = self.volumes.get(&volume).ok_or(DecodeError::Field("usage"))?;
                volume.in_trees.add(&usage);
            }
            Section::Extents { volume, shard, extents } => {
                let fits = |extent: &Extent| {
                    let location = &extent.location;
                    let end = location.payload_offset.checked_add(location.stored_bytes);
                    end.is_some_and(|end| location.stripe.fits(&set.layout, set.segment_count, end))
                };
                if !self.shards.contains_key(&(volume, shard)) || !extents.iter().all(|(_, extent)| fits(extent)) {
                    return Err(DecodeError::Field("extents"));
                }
                self.extents.entry((volume, shard)).or_default().extend(extents);
            }
            Section::Window(uses) => self.window.extend(check_uses(uses, set)?),
            Section::DataSegments(uses) => {
                self.data.extend(check_uses(uses, set)?.into_iter().map(|used| (used, 0)));
            }
            Section::LiveSegments(uses) => {
                if !uses.iter().all(|(used, _)| used.index < set.segment_count) {
                    return Err(DecodeError::Field("segment"));
                }
                self.data.extend(uses);
            }
            Section::Stream { stream, settled } => drop(self.settled.insert(stream, settled)),
            Section::Counters { next_volume, next_sequence } => {
                (self.next_volume, self.next_sequence) = (next_volume, next_sequence);
            }
            Section::Receipts(entry) => self.receipts.load(*entry),
            Section::End => {}
        }
        Ok(())
    }

    /// Puts volumes upon those that they lie upon.
    fn link(&mut self) -> Result<(), ReadFailed> {
        for (id, parent) in std::mem::take(&mut self.parents) {
            let found = self.volumes.get(&id).zip(self.volumes.get(&parent));
            let fits = |(own, parent): &(&Arc<Volume>, &Arc<Volume>)| {
                let mut beneath = std::iter::successors(Some(Arc::clone(parent)), |volume| volume.parent());
                parent.is_snapshot() && parent.lineage == own.lineage && !beneath.any(|volume| volume.id == own.id)
            };
            let (own, parent) = found.filter(fits).ok_or(DecodeError::Field("parent"))?;
            own.set_parent(Some(Arc::clone(parent)));
        }
        for ((volume, _), shard) in &self.shards {
            if let Some(volume) = self.volumes.get(volume) {
                shard.map.set_over(volume.parent().is_some());
            }
        }
        Ok(())
    }

    fn load_shard(&mut self, volume: u32, shard: u16, watermark: u64, tree: Tree) -> Result<(), DecodeError> {
        let owner = self.volumes.get(&volume).filter(|_| shard < SHARDS_PER_VOLUME);
        let map = ShardMap::new(owner.ok_or(DecodeError::Field("shard"))?, shard, tree);
        self.shards.insert((volume, shard), LoadedShard { watermark, map });
        Ok(())
    }
}

fn check_uses(uses: Vec<SegmentUse>, set: &MemberSet) -> Result<Vec<SegmentUse>, DecodeError> {
    let all = uses.iter().all(|used| used.index < set.segment_count);
    if all { Ok(uses) } else { Err(DecodeError::Field("segment")) }
}

/// What each segment is. What was written of the window is closed: nothing of it is used anew before the new checkpoint is
/// durable, and then what is dead in it comes back. What was not is free: should this mount be cut short, the next one finds
/// no stripe of the old sequence there either.
fn states(set: &MemberSet, loaded: &Loaded, written: &HashSet<u32>) -> Vec<State> {
    let mut states = vec![State::Free; set.segment_count as usize];
    for (used, _) in &loaded.data {
        states[used.index as usize] = State::Closed(used.sequence);
    }
    for used in loaded.window.iter().filter(|used| written.contains(&used.index)) {
        states[used.index as usize] = State::Closed(used.sequence);
    }
    for part in &loaded.root.parts {
        states[part.location.segment as usize] = State::Checkpoint(part.sequence);
    }
    if let Some(used) = loaded.root_use {
        states[used.index as usize] = State::Checkpoint(used.sequence);
    }
    states
}

/// Brings the extents of a checkpoint of version 1 into the maps: as changes, which the new checkpoint makes pages of.
fn fill_maps(loaded: &mut Loaded, segments: &Segments, layers: &LayerBudget) {
    let place = Place { segments, layers };
    for (key, list) in std::mem::take(&mut loaded.extents) {
        let (Some(volume), Some(shard)) = (loaded.volumes.get(&key.0), loaded.shards.get(&key)) else { continue };
        for (lba, extent) in list {
            // Overlap only where a slice was dumped before a later one's write: the later generation counts.
            place.put_older(volume, shard, Run::record(lba, extent), extent.generation);
        }
    }
}

/// Where replayed changes go.
struct Place<'a> {
    segments: &'a Segments,
    layers: &'a LayerBudget,
}

impl Place<'_> {
    /// Makes a change of a generation where nothing newer is known.
    fn put_older(&self, volume: &Volume, shard: &LoadedShard, run: Run, generation: u64) {
        let newer = |other: &Run| other.extent().is_some_and(|extent| extent.generation > generation);
        let newer: Vec<Run> = shard.map.view(&(run.lba..run.end())).into_iter().filter(newer).collect();
        let mut books = Books { segments: self.segments, volume };
        shard.map.apply(run, &mut books, self.layers);
        newer.into_iter().for_each(|run| shard.map.apply(run, &mut books, self.layers));
    }
}

/// Records found in the window.
#[derive(Default)]
struct Replay {
    records: Vec<FoundRecord>,
    /// Segments in which anything was found.
    written: HashSet<u32>,
    top_sequence: u64,
    streams: SeenStreams,
    /// Segments in which members that did not answer may have more.
    unheard: Vec<u32>,
    /// Headers of unfinished stripes.
    discarded: Vec<ShardHeader>,
}

/// Segments scanned at once.
const SCANS_AT_ONCE: usize = 8;

/// Reads the window, decides every stripe in it, and heals those that count.
async fn scan(stripes: &StripeIo, window: &[SegmentUse], report: &mut MountReport) -> Replay {
    let mut replay = Replay::default();
    for uses in window.chunks(SCANS_AT_ONCE) {
        let scans = join_all(uses.iter().map(|used| scan_segment(stripes, *used))).await;
        for (used, found) in uses.iter().zip(scans) {
            if found.unheard {
                replay.unheard.push(used.index);
            }
            if found.any {
                replay.written.insert(used.index);
            }
            report.segments_scanned += 1;
            report.stripes_replayed += found.replayed.len() as u64;
            report.stripes_healed += found.healed;
            report.stripes_discarded += found.discarded;
            replay.records.extend(found.records);
            replay.streams.add(&found.replayed, &found.other);
            replay.discarded.extend(found.other.into_iter().filter(|header| !header.void));
        }
    }
    replay.top_sequence = window.iter().map(|used| used.sequence.number).max().unwrap_or(0);
    replay
}

#[derive(Default)]
struct Scanned {
    records: Vec<FoundRecord>,
    /// Some stripe, or what is left of one.
    any: bool,
    /// Members that did not answer may have more.
    unheard: bool,
    /// Stripes that count.
    replayed: Vec<ShardHeader>,
    /// Headers of those that don't: void, or with too little left.
    other: Vec<ShardHeader>,
    healed: u64,
    discarded: u64,
}

async fn scan_segment(stripes: &StripeIo, used: SegmentUse) -> Scanned {
    let mut scanned = Scanned::default();
    let (headers, unheard) = look_for_stripes(stripes, used).await;
    scanned.unheard = unheard;
    for header in headers {
        scanned.any = true;
        if header.void {
            scanned.other.push(header);
            continue;
        }
        let stripe = match stripes.read(header.location, used.sequence).await {
            Ok(stripe) => stripe,
            Err(lost) => {
                scanned.unheard |= lost.may_come_back();
                scanned.discarded += 1;
                scanned.other.push(header);
                continue;
            }
        };
        if stripe.bad != 0 {
            // A member that can't be healed has left the set by the time the new superblocks are written.
            stripes.repair(&stripe).await;
            scanned.healed += 1;
        }
        let (records, ended) = find_records(header.location, &stripe.payload);
        if let Some(error) = ended {
            tracing::error!(?used, %error, "a stripe holds something that is no record");
        }
        scanned.records.extend(records);
        scanned.replayed.push(stripe.header);
    }
    scanned
}

impl Replay {
    /// Applies the records in the order of their generations, so that the last write of each block remains.
    fn apply(mut self, loaded: &mut Loaded, place: &Place<'_>, codec: &mut RecordCodec, report: &mut MountReport) {
        self.records.sort_by_key(|found| {
            let header = &found.header;
            (header.owner.volume, header.owner.shard, header.birth.generation)
        });
        for found in &self.records {
            let owner = found.header.owner;
            // Deleted volumes' records may still be about.
            let Some(volume) = loaded.volumes.get(&owner.volume) else { continue };
            if owner.shard >= SHARDS_PER_VOLUME || found.header.birth.lineage != volume.lineage {
                continue;
            }
            let fresh = || LoadedShard { watermark: 0, map: ShardMap::new(volume, owner.shard, Tree::default()) };
            let shard = loaded.shards.entry((owner.volume, owner.shard)).or_insert_with(fresh);
            report.records_replayed += 1;
            if let Some(run) = replayed(shard, found, codec) {
                place.put_older(volume, shard, run, found.header.birth.generation);
            }
        }
    }
}

/// The change that a record stands for, unless the tree has it. A record that was moved after the checkpoint is there twice: the
/// tree leads to the original, which is good until the next checkpoint.
fn replayed(shard: &LoadedShard, found: &FoundRecord, codec: &mut RecordCodec) -> Option<Run> {
    let birth = &found.header.birth;
    if birth.generation <= shard.watermark {
        return None;
    }
    match found.header.kind {
        Kind::Data => {
            let blocks = birth.block_count as u16;
            let extent = Extent {
                location: found.location,
                generation: birth.generation,
                key_epoch: birth.key_epoch.0,
                record_offset: 0,
                record_blocks: blocks,
                count: blocks,
            };
            Some(Run::record(birth.lba, extent))
        }
        Kind::Zeroes | Kind::Deallocate => {
            // A marker leaves nothing to be checked later, so its tag is checked now.
            if let Err(error) = codec.open_any(&found.marker, &mut []) {
                tracing::error!(?birth, %error, "a deallocation that is not genuine is ignored");
                return None;
            }
            Some(Run { lba: birth.lba, count: birth.block_count, what: What::Hole })
        }
        Kind::Metadata => None,
    }
}

/// The checkpoint that a mount writes before anything is served.
struct NewCheckpoint<'a> {
    maps: &'a MapIo,
    loaded: &'a Loaded,
    layers: &'a LayerBudget,
    options: &'a MountOptions,
    mounts: u64,
    floor: u64,
    /// Members that are there and of which nothing can be relied on.
    distrusted: &'a [u8],
    /// What this mount goes on without.
    given_up: GivenUp,
}

impl NewCheckpoint<'_> {
    async fn write(&self, superblocks: &Superblocks) -> Result<Root, MountError> {
        let (stripes, segments) = (&*self.maps.records.stripes, &*self.maps.records.segments);
        // How the reserves grow does not depend on the number of reactors, but for some that a checkpoint soon adds.
        let set = stripes.set();
        let admission = Admission::new(set.layout, set.segment_count, 1);
        admission.set_volumes(self.loaded.volumes.len());
        let Wanted { total, .. } = admission.wanted();
        back_for_mount(&stripes.io, segments, Wanted { listed: 0, total }).await;
        let mut plan = segments.begin_checkpoint();
        self.merge().await?;
        segments.settle_plan(&mut plan);
        let mut writer = CheckpointWriter::new(stripes, segments);
        let mut sections = SectionWriter::default();
        for volume in self.loaded.volumes.values() {
            sections.volume(volume, volume.blocks(), &writer.shield);
        }
        writer.put(&sections.0).await?;
        writer.end_volumes().await?;
        let mut sections = SectionWriter::default();
        for ((volume, number), shard) in &self.loaded.shards {
            let (watermark, tree) = (generation_base(self.mounts), shard.map.tree());
            sections.tree(&MergedShard { volume: *volume, shard: *number, watermark, tree });
        }
        self.loaded.volumes.values().for_each(|volume| sections.usage(volume));
        let departed = stripes.set().shields.departed();
        sections.receipts(&self.loaded.receipts.entries(&departed));
        let reserves = admission.reserves();
        let keep = (reserves.checkpoint + reserves.pages) as usize;
        let nonce = || self.maps.records.random_u64();
        let window = segments.window(&plan, self.options.max_replay_segments as usize, keep, nonce);
        sections.window(&window);
        sections.counters(self.loaded.next_volume, window.next_sequence);
        sections.end();
        writer.put(&sections.0).await?;
        let (pointer, root) = writer.finish().await?;
        let mut id = [0; 16];
        stripes.io.env.random(&mut id);
        let now_s = stripes.io.env.unix_seconds();
        superblocks
            .publish(|block| {
                block.lower(self.floor);
                block.checkpoint = Some(pointer);
                block.departed.retain(|gone| !departed.contains(gone));
                if !self.distrusted.is_empty() {
                    block.epoch += 1;
                }
                self.distrusted.iter().for_each(|place| block.distrust((*place).into()));
                (block.clean, block.formatting) = (false, false);
                block.given_up.add(self.given_up, now_s);
                block.mounts = self.mounts;
                block.mount_id = u128::from_le_bytes(id);
            })
            .await?;
        segments.finish_checkpoint(&plan, &window);
        Ok(root)
    }

    /// Brings what was replayed into the trees.
    async fn merge(&self) -> Result<(), WriteFailed> {
        let mut shards = Vec::new();
        for ((volume, number), shard) in &self.loaded.shards {
            let Some(volume) = self.loaded.volumes.get(volume) else { continue };
            shard.map.freeze(&mut Books { segments: &self.maps.records.segments, volume }, self.layers);
            shards.push(ShardRef { volume, number: *number, map: &shard.map });
        }
        self.maps.merge(&shards, self.layers).await?;
        self.maps.writer.close(&self.maps.records);
        Ok(())
    }
}
