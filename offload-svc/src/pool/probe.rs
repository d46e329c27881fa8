//! Looking at members before a mount: what each says it is, and which state of the set is the newest.
//!
//! Owns reading superblocks and choosing among them, and the formatting of blank members. Must not know the log. Invariant:
//! nothing is written to a member that holds anything, and no state is chosen that a newer one elsewhere could contradict,
//! unless by force.

use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, join_all, select};
use nvmf_target::buffer::IoBuf;
use uuid::Uuid;

use super::env::{Env, MemberIndex};
use super::options::{Force, Layout, MEMBERS_MAX, MemberInput, OptionError, SUPERBLOCK_AREA_BYTES};
use super::superblock::{GivenUp, Lag, MemberEntry, SLOT_BYTES, ScrubRecord, Superblock, SuperblockError};

/// What stands at the start of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Not opened, no answer, or an error.
    Unreadable,
    /// Nothing but zeroes.
    Blank,
    /// A member of a pool; the newer of its superblocks.
    Member(Box<Superblock>),
    /// A member of a pool, but smaller than it was when it was formatted.
    Truncated { superblock: Box<Superblock>, size_bytes: u64 },
    /// Something, but only where superblocks stand, and no whole one.
    Torn,
    /// A superblock that this program can't use.
    Unusable(SuperblockError),
    /// Something else; its first byte that isn't zero is at this offset.
    Foreign { offset: u64 },
}

/// What was found on all members, for the decision to format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inspection {
    /// All members are there and blank, or left from a format that did not finish.
    Formattable,
    /// A pool.
    Pool { uuid: Uuid },
    /// Neither: what stands on each, in the order of the configuration.
    Other(Vec<Found>),
}

/// Why a pool was not formatted.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    #[error("{given} members given, k+m is {needed}")]
    MemberCount { given: usize, needed: usize },
    #[error(transparent)]
    Option(#[from] OptionError),
    #[error("{name}: can't be opened")]
    Missing { name: String },
    #[error("{name}: {size_bytes} bytes are too few; a member needs {needed_bytes}")]
    TooSmall { name: String, size_bytes: u64, needed_bytes: u64 },
    #[error("{name}: not blank: {found}. Nothing was written")]
    NotBlank { name: String, found: FoundText },
    #[error(
        "{name}: the file system beneath has no room for the {needed_bytes} bytes that a pool needs from the first. Nothing was written"
    )]
    NoRoom { name: String, needed_bytes: u64 },
    #[error("{name}: can't be written")]
    Write {
        name: String,
        #[source]
        source: std::io::Error,
    },
}

/// What was found, in words.
#[derive(Debug)]
pub struct FoundText(Found);

impl FoundText {
    pub fn of(found: Found) -> Self {
        Self(found)
    }
}

impl std::fmt::Display for FoundText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Found::Unreadable => f.write_str("can't be read"),
            Found::Blank => f.write_str("blank"),
            Found::Member(block) => write!(f, "member {} of the Sluice pool {}", block.index, block.pool),
            Found::Truncated { superblock: block, size_bytes } => {
                write!(
                    f,
                    "member {} of the Sluice pool {}, cut from {} to {size_bytes} bytes",
                    block.index, block.pool, block.member_bytes
                )
            }
            Found::Torn => f.write_str("data where superblocks stand"),
            Found::Unusable(error) => write!(f, "a Sluice superblock that can't be used: {error}"),
            Found::Foreign { offset } => write!(f, "data from byte {offset} on"),
        }
    }
}

/// A member's read must end in this time for it to take part.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads what stands on each member.
pub async fn probe(env: &Rc<dyn Env>, members: &[MemberInput]) -> Vec<Found> {
    join_all(members.iter().enumerate().map(|(slot, input)| probe_one(env, MemberIndex(slot as u8), input))).await
}

pub async fn probe_one(env: &Rc<dyn Env>, slot: MemberIndex, input: &MemberInput) -> Found {
    let Some(size_bytes) = input.size_bytes else { return Found::Unreadable };
    if size_bytes < SUPERBLOCK_AREA_BYTES {
        return Found::Unreadable;
    }
    // In slots: that is how they were written, and one bad sector hides no more than one.
    let mut area = Vec::new();
    let mut readable = false;
    for at in (0..SUPERBLOCK_AREA_BYTES).step_by(SLOT_BYTES) {
        match read_slot(env, slot, at).await {
            Slot::Read(buf) => {
                readable = true;
                area.extend_from_slice(&buf);
            }
            Slot::Failed if at < 2 * SLOT_BYTES as u64 => area.resize(area.len() + SLOT_BYTES, 0),
            Slot::Failed | Slot::NoAnswer => return Found::Unreadable,
        }
    }
    match judge(&area, size_bytes) {
        _ if !readable => Found::Unreadable,
        blank @ (Found::Blank | Found::Torn) => look_further(env, slot, size_bytes).await.unwrap_or(blank),
        found => found,
    }
}

/// What else may stand on a member without superblocks: other systems keep their marks further in, or at the end, and a
/// pool whose superblocks were wiped its data. `None` if nothing is found.
async fn look_further(env: &Rc<dyn Env>, slot: MemberIndex, size_bytes: u64) -> Option<Found> {
    for at in places_of_others(size_bytes) {
        match read_slot(env, slot, at).await {
            Slot::Read(buf) => {
                if let Some(offset) = buf.iter().position(|byte| *byte != 0) {
                    return Some(Found::Foreign { offset: at + offset as u64 });
                }
            }
            Slot::Failed | Slot::NoAnswer => return Some(Found::Unreadable),
        }
    }
    None
}

/// The first MiB behind the superblocks, the last 128 KiB, and places spread evenly over all of it.
fn places_of_others(size_bytes: u64) -> impl Iterator<Item = u64> {
    const SPREAD: u64 = 256;
    let slot = SLOT_BYTES as u64;
    let end = size_bytes / slot * slot;
    let first = SUPERBLOCK_AREA_BYTES..end.min(SUPERBLOCK_AREA_BYTES + (1 << 20));
    let last = end.saturating_sub(128 << 10).max(SUPERBLOCK_AREA_BYTES)..end;
    let step = (end / SPREAD / slot).max(1) * slot;
    let spread = (SUPERBLOCK_AREA_BYTES..end).step_by(step as usize);
    first.step_by(SLOT_BYTES).chain(last.step_by(SLOT_BYTES)).chain(spread)
}

/// One slot of a member, as far as it can be read.
enum Slot {
    Read(IoBuf),
    Failed,
    NoAnswer,
}

async fn read_slot(env: &Rc<dyn Env>, slot: MemberIndex, at: u64) -> Slot {
    let buf = env.buffer(SLOT_BYTES).await;
    let late = env.sleep_until(env.now() + PROBE_TIMEOUT);
    match select(env.read(slot, at, buf), late).await {
        Either::Left(((Ok(()), buf), _)) => Slot::Read(buf),
        Either::Left(_) => Slot::Failed,
        Either::Right(_) => Slot::NoAnswer,
    }
}

fn judge(area: &[u8], size_bytes: u64) -> Found {
    let slots = area.chunks(SLOT_BYTES).take(2).map(Superblock::parse);
    let (mut best, mut error) = (None::<Superblock>, None);
    for slot in slots {
        match slot {
            Ok(block) if best.as_ref().is_none_or(|best| block.state_id() > best.state_id()) => best = Some(block),
            Ok(_) | Err(SuperblockError::NoMagic) => {}
            Err(bad) => error = Some(bad),
        }
    }
    match (best, error) {
        (Some(block), _) if size_bytes < block.member_bytes => {
            Found::Truncated { superblock: Box::new(block), size_bytes }
        }
        (Some(block), _) => Found::Member(Box::new(block)),
        (None, None | Some(SuperblockError::Crc)) if area[2 * SLOT_BYTES..].iter().all(|byte| *byte == 0) => {
            if area.iter().any(|byte| *byte != 0) { Found::Torn } else { Found::Blank }
        }
        (None, Some(error)) => Found::Unusable(error),
        (None, None) => match area.iter().position(|byte| *byte != 0) {
            Some(offset) => Found::Foreign { offset: offset as u64 },
            None => Found::Blank,
        },
    }
}

/// Says whether the members can be formatted, or are a pool.
pub async fn inspect(env: &Rc<dyn Env>, members: &[MemberInput]) -> Inspection {
    let found = probe(env, members).await;
    let pool = found.iter().find_map(|found| match found {
        Found::Member(block) | Found::Truncated { superblock: block, .. } if !block.formatting => Some(block.pool),
        _ => None,
    });
    if let Some(uuid) = pool {
        return Inspection::Pool { uuid };
    }
    if formattable(&found) { Inspection::Formattable } else { Inspection::Other(found) }
}

/// All blank, or left from a format that did not finish. Once one member says that a format was under way, the others were
/// blank then: what stands in the slots of one of them, and nowhere else, is the write that was torn.
fn formattable(found: &[Found]) -> bool {
    let under_way = found.iter().any(|found| matches!(found, Found::Member(block) if block.formatting));
    found.iter().all(|found| match found {
        Found::Blank => true,
        Found::Member(block) => block.formatting,
        Found::Torn => under_way,
        _ => false,
    })
}

/// Makes a pool of blank members; gives its UUID.
///
/// First every member is marked as being formatted, then every mark is taken away: a format that was cut short is seen as
/// such and can be done again, and one whose marks are partly gone mounts.
pub async fn format(env: &Rc<dyn Env>, inputs: &[MemberInput], layout: Layout) -> Result<Uuid, FormatError> {
    layout.check()?;
    if inputs.len() != layout.members() || inputs.len() > MEMBERS_MAX {
        return Err(FormatError::MemberCount { given: inputs.len(), needed: layout.members() });
    }
    let needed_bytes = layout.member_bytes_min();
    let mut smallest = u64::MAX;
    for input in inputs {
        let size_bytes = input.size_bytes.ok_or_else(|| FormatError::Missing { name: input.name.clone() })?;
        if size_bytes < needed_bytes {
            return Err(FormatError::TooSmall { name: input.name.clone(), size_bytes, needed_bytes });
        }
        smallest = smallest.min(size_bytes);
    }
    let found = probe(env, inputs).await;
    let usable = formattable(&found);
    for (input, found) in inputs.iter().zip(found) {
        if !usable && found != Found::Blank {
            return Err(FormatError::NotBlank { name: input.name.clone(), found: FoundText(found) });
        }
    }
    allocate_all(env, inputs, &layout).await?;
    let random = || {
        let mut bytes = [0; 16];
        env.random(&mut bytes);
        bytes
    };
    let entry = || MemberEntry {
        uuid: uuid::Builder::from_random_bytes(random()).into_uuid(),
        active: true,
        epoch: 1,
        whole_below: 0,
        suspect: false,
        known: 0,
        shield_floor: 0,
    };
    let members: Vec<MemberEntry> = inputs.iter().map(|_| entry()).collect();
    let segments = (smallest - SUPERBLOCK_AREA_BYTES) / u64::from(layout.segment_bytes);
    let mut block = Superblock {
        clean: true,
        formatting: true,
        pool: uuid::Builder::from_random_bytes(random()).into_uuid(),
        member: members[0].uuid,
        index: 0,
        layout,
        segments: u32::try_from(segments).unwrap_or(u32::MAX),
        member_bytes: 0,
        epoch: 1,
        generation: 1,
        mounts: 0,
        mount_id: 0,
        checkpoint: None,
        replacements: vec![None; members.len()],
        scrub: ScrubRecord::default(),
        given_up: GivenUp::default(),
        shield_number: 0,
        shield_floor: 0,
        departed: Vec::new(),
        members,
    };
    write_all(env, inputs, &block).await?;
    (block.formatting, block.generation) = (false, 2);
    write_all(env, inputs, &block).await?;
    Ok(block.pool)
}

/// Segments that have their room from the first: two checkpoints, what cleaning and deletion need, and the first to be written.
const SEGMENTS_BACKED: u64 = 10;

/// Sets room aside for what no pool can do without. Where a file system can't, a full one is met later.
async fn allocate_all(env: &Rc<dyn Env>, inputs: &[MemberInput], layout: &Layout) -> Result<(), FormatError> {
    let needed_bytes = SUPERBLOCK_AREA_BYTES + SEGMENTS_BACKED * u64::from(layout.segment_bytes);
    for (index, input) in inputs.iter().enumerate() {
        if let Err(error) = env.allocate(MemberIndex(index as u8), 0, needed_bytes).await
            && matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
        {
            return Err(FormatError::NoRoom { name: input.name.clone(), needed_bytes });
        }
    }
    Ok(())
}

async fn write_all(env: &Rc<dyn Env>, inputs: &[MemberInput], block: &Superblock) -> Result<(), FormatError> {
    for (index, input) in inputs.iter().enumerate() {
        let slot = MemberIndex(index as u8);
        let own = Superblock {
            member: block.members[index].uuid,
            index: index as u8,
            member_bytes: input.size_bytes.unwrap_or_default(),
            ..block.clone()
        };
        let mut buf = env.buffer(SLOT_BYTES).await;
        buf.copy_from_slice(&own.to_bytes());
        let (result, _) = env.write(slot, Superblock::slot_offset(own.generation), buf).await;
        let failed = |source| FormatError::Write { name: input.name.clone(), source };
        result.map_err(failed)?;
        env.sync(slot).await.map_err(failed)?;
    }
    Ok(())
}

/// Why no state of the set was chosen.
#[derive(Debug, thiserror::Error)]
pub enum ChooseError {
    #[error("no member holds a superblock")]
    NoPool,
    #[error("{name}: {error}")]
    Unusable { name: String, error: SuperblockError },
    #[error("{name} belongs to pool {found}, others to pool {expected}")]
    OtherPool { name: String, found: Uuid, expected: Uuid },
    #[error("{first} and {second} are the same member, {uuid}: one is a copy")]
    SameMember { first: String, second: String, uuid: Uuid },
    #[error("formatting was not finished")]
    Unfinished,
    #[error("{present} of {needed} members needed are there; missing: {missing:?}")]
    TooFew { present: usize, needed: usize, missing: Vec<u8> },
    #[error(
        "the missing members {missing:?} could be in use elsewhere as a newer pool; if they are not, start once with --force rival"
    )]
    Rival { missing: Vec<u8> },
    #[error(
        "too many members are older copies of themselves: {}; what was written since is on too few others. Nothing was \
         changed: put the newer copies back{}",
        Older(older),
        WayBack(newer)
    )]
    RolledBack {
        older: Vec<(String, Lag)>,
        /// Without these, the older ones would make a pool; empty where they would not.
        newer: Vec<String>,
    },
}

/// How to go back to the older state, where that is possible.
struct WayBack<'a>(&'a [String]);

impl std::fmt::Display for WayBack<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        write!(
            f,
            "; or, to lose what was written since, start without the members that are newer ({})",
            self.0.join(", ")
        )
    }
}

/// Members and how they lag, in words.
struct Older<'a>(&'a [(String, Lag)]);

impl std::fmt::Display for Older<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, (name, lag)) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            match lag {
                Lag::Behind(publications) => {
                    write!(f, "{comma}{name} (superblock {publications} publications behind)")?
                }
                Lag::OtherHistory => write!(f, "{comma}{name} (of another history)")?,
            }
        }
        Ok(())
    }
}

/// Members that can't be used, each with the reason: added to what a mount fails with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused(Vec<(String, Why)>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Why {
    Unopened(String),
    Found(Found),
}

impl Refused {
    /// What comes after the first `members` are spares: they may be blank.
    pub fn of(inputs: &[MemberInput], found: &[Found], members: usize) -> Self {
        let refused = inputs.iter().zip(found).enumerate().filter_map(|(index, (input, found))| {
            let why = match (found, &input.unopened) {
                (Found::Member(_), _) => return None,
                (Found::Truncated { .. }, _) if input.can_grow => return None,
                (Found::Blank, _) if index >= members => return None,
                (Found::Unreadable, Some(error)) => Why::Unopened(error.clone()),
                (found, _) => Why::Found(found.clone()),
            };
            Some((input.name.clone(), why))
        });
        Self(refused.collect())
    }

    /// Says so in the log.
    pub fn log(&self) {
        for (member, why) in &self.0 {
            tracing::error!(member, "refused: {why}; nothing is written to it");
        }
    }
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unopened(error) => f.write_str(error),
            Self::Found(found) => FoundText(found.clone()).fmt(f),
        }
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|(member, why)| write!(f, "; {member}: {why}"))
    }
}

/// The chosen state, and which members are there.
#[derive(Debug)]
pub struct Chosen {
    pub state: Superblock,
    /// By place in the set: where it is, and its own superblock.
    pub present: Vec<Option<(MemberIndex, Superblock)>>,
    /// By place: the member that was being filled to take it.
    pub replacements: Vec<Option<(MemberIndex, Superblock)>>,
    /// Members of the set that are there.
    pub mask: u32,
    /// Members that are there but not in the set, or not to be relied on.
    pub stale: Vec<u8>,
    pub missing: Vec<u8>,
    /// Of the stale ones, those that the set counts and that have missed more than a crash explains.
    pub rolled_back: Vec<(u8, Lag)>,
    /// Members that are shorter than they were.
    pub cut: Vec<Cut>,
    /// Members of the set whose own superblocks don't say yet that they are suspect.
    pub suspect: u32,
}

/// A member whose file was cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    pub place: u8,
    pub slot: MemberIndex,
    pub size_bytes: u64,
    pub was_bytes: u64,
}

/// Chooses the newest state that the members tell of.
pub fn choose(inputs: &[MemberInput], found: &[Found], force: Force) -> Result<Chosen, ChooseError> {
    let blocks: Vec<(MemberIndex, &Superblock)> = found
        .iter()
        .enumerate()
        .filter_map(|(slot, found)| match found {
            Found::Member(block) => Some((MemberIndex(slot as u8), &**block)),
            Found::Truncated { superblock, .. } if inputs[slot].can_grow => {
                Some((MemberIndex(slot as u8), &**superblock))
            }
            _ => None,
        })
        .collect();
    let name = |slot: MemberIndex| inputs[usize::from(slot.0)].name.clone();
    let Some((_, first)) = blocks.first() else {
        let unusable = found.iter().zip(inputs).find_map(|(found, input)| match found {
            Found::Unusable(error) => Some(ChooseError::Unusable { name: input.name.clone(), error: error.clone() }),
            _ => None,
        });
        return Err(unusable.unwrap_or(ChooseError::NoPool));
    };
    for (at, (slot, block)) in blocks.iter().enumerate() {
        if block.pool != first.pool {
            return Err(ChooseError::OtherPool { name: name(*slot), found: block.pool, expected: first.pool });
        }
        if let Some((other, _)) = blocks[..at].iter().find(|(_, other)| other.member == block.member) {
            return Err(ChooseError::SameMember { first: name(*other), second: name(*slot), uuid: block.member });
        }
    }
    let votes = |block: &Superblock| blocks.iter().filter(|(_, other)| other.state_id() == block.state_id()).count();
    let newest = blocks.iter().max_by_key(|(_, block)| (block.epoch, block.generation, votes(block)));
    let state = newest.map_or_else(|| (*first).clone(), |(_, block)| (*block).clone());
    if blocks.iter().all(|(_, block)| block.formatting) {
        return Err(ChooseError::Unfinished);
    }
    let mut chosen = place(&blocks, state, force, name)?;
    chosen.note_cut(found);
    chosen.note_suspects();
    Ok(chosen)
}

impl Chosen {
    /// Members of the set that were cut, or are one publication behind, or say so of themselves since an earlier mount: a scrub
    /// from the beginning has to tell what they lack.
    fn note_suspects(&mut self) {
        let newest = self.state.state_id();
        for (place, present) in self.present.iter().enumerate().filter(|(place, _)| self.mask & (1 << place) != 0) {
            let Some((_, own)) = present else { continue };
            let cut = self.cut.iter().any(|cut| usize::from(cut.place) == place);
            if cut || own.is_suspect() || own.state_id() != newest {
                self.state.members[place].suspect = true;
                self.suspect |= u32::from(!own.is_suspect() || own.state_id() != newest) << place;
            }
        }
    }

    /// Members of the set that don't have the newest superblock.
    pub fn behind(&self) -> u32 {
        let newest = self.state.state_id();
        let lags = |present: &Option<(MemberIndex, Superblock)>| {
            present.as_ref().is_some_and(|(_, own)| own.state_id() != newest)
        };
        let lagging = self.present.iter().enumerate().filter(|(_, present)| lags(present));
        lagging.fold(0, |behind, (place, _)| behind | 1 << place) & self.mask
    }

    /// Those of the set that were cut keep what they have. One that is not in the set lacks what it was relied on to have, and
    /// one that was being filled is not gone on with.
    fn note_cut(&mut self, found: &[Found]) {
        let cut_to = |slot: MemberIndex| match found.get(usize::from(slot.0)) {
            Some(Found::Truncated { size_bytes, .. }) => Some(*size_bytes),
            _ => None,
        };
        for (place, present) in self.present.iter().enumerate() {
            let Some((slot, block)) = present else { continue };
            if let Some(size_bytes) = cut_to(*slot) {
                self.cut.push(Cut { place: place as u8, slot: *slot, size_bytes, was_bytes: block.member_bytes });
            }
        }
        for present in &mut self.replacements {
            present.take_if(|(slot, _)| cut_to(*slot).is_some());
        }
    }
}

/// Whether so many of the older copies are of one state, as far as a crash leaves them in one, that they make a pool.
fn agree(present: &[Option<(MemberIndex, Superblock)>], older: &[(u8, Lag)], needed: usize) -> bool {
    let blocks = || older.iter().filter_map(|(place, _)| Some(&present.get(usize::from(*place))?.as_ref()?.1));
    let newest = blocks().max_by_key(|block| (block.epoch, block.generation));
    newest.is_some_and(|newest| blocks().filter(|block| block.lag(newest).is_none()).count() >= needed)
}

fn place(
    blocks: &[(MemberIndex, &Superblock)],
    state: Superblock,
    force: Force,
    name: impl Fn(MemberIndex) -> String,
) -> Result<Chosen, ChooseError> {
    let mut present: Vec<Option<(MemberIndex, Superblock)>> = state.members.iter().map(|_| None).collect();
    for (slot, block) in blocks {
        if let Some(at) = state.members.iter().position(|member| member.uuid == block.member) {
            present[at] = Some((*slot, (*block).clone()));
        }
    }
    let replacement = |uuid| blocks.iter().find(|(_, block)| block.member == uuid);
    let replacements = state.replacements.iter().map(|replacement_of_place| {
        let (slot, block) = replacement(replacement_of_place.as_ref()?.uuid)?;
        Some((*slot, (*block).clone()))
    });
    let replacements = replacements.collect();
    let (mut mask, mut stale, mut missing, mut absent) = (0u32, Vec::new(), Vec::new(), 0);
    let (mut rolled_back, mut older, mut newer) = (Vec::new(), Vec::new(), Vec::new());
    for (index, member) in state.members.iter().enumerate() {
        match (&present[index], member.active) {
            (Some((slot, own)), true) => match own.lag(&state) {
                None => {
                    mask |= 1 << index;
                    newer.push(name(*slot));
                }
                Some(lag) => {
                    stale.push(index as u8);
                    rolled_back.push((index as u8, lag));
                    older.push((name(*slot), lag));
                }
            },
            (Some(_), false) => stale.push(index as u8),
            (None, active) => {
                missing.push(index as u8);
                absent += usize::from(active);
            }
        }
    }
    let needed = usize::from(state.layout.data_shards);
    let there = mask.count_ones() as usize;
    if there < needed && there + older.len() >= needed {
        if !agree(&present, &rolled_back, needed) {
            newer.clear();
        }
        return Err(ChooseError::RolledBack { older, newer });
    }
    if there < needed {
        return Err(ChooseError::TooFew { present: there, needed, missing });
    }
    // The absent ones of this set could have gone on without us if they are enough for it.
    if absent >= needed && !force.rival {
        return Err(ChooseError::Rival { missing });
    }
    Ok(Chosen { state, present, replacements, mask, stale, missing, rolled_back, cut: Vec::new(), suspect: 0 })
}
