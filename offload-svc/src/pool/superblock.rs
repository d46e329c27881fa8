//! The superblock: what a member says about itself and about the set.
//!
//! Owns its layout, its checks, and the two slots it alternates between. Must not know how members are reached.
//! Invariant: [`Superblock::parse`] accepts only what [`Superblock::to_bytes`] could have written.

use serde::Serialize;
use uuid::Uuid;

use super::codec::{CutShort, Reader, Writer};
use super::options::{BLOCK_BYTES, Layout, MEMBERS_MAX, OptionError, SEGMENTS_MIN, SUPERBLOCK_AREA_BYTES};
use super::shields::{DEPARTED_BYTES, DEPARTED_MAX, Departed};
use super::stripe::{Sequence, StripeLocation};
use crate::stages::crc::crc32c;
use crate::stages::keys::{SHIELD_BYTES, Shield};

/// Bytes of one slot.
pub const SLOT_BYTES: usize = BLOCK_BYTES as usize;
const MAGIC: [u8; 8] = *b"SLUICEPL";
/// A higher major version can't be read at all. Version 1 is read: its checkpoints hold the maps themselves, and the first mount
/// makes trees of them. So is version 2: its checkpoints hold wrapped keys bare. The first mount makes version 3 of either.
pub const FORMAT_MAJOR: u16 = 3;
/// A higher minor version can be read, its additions ignored.
pub const FORMAT_MINOR: u16 = 0;
/// The Reed-Solomon code `cauchy-11d-1` (`stages::rs`).
const CODE_CAUCHY_11D_1: u8 = 1;
const CRC_AT: usize = SLOT_BYTES - 4;
const TABLE_AT: usize = 192;
const REPLACEMENTS_AT: usize = TABLE_AT + 40 * MEMBERS_MAX;
const SCRUB_AT: usize = REPLACEMENTS_AT + 32 * MEMBERS_MAX;
const GIVEN_UP_AT: usize = SCRUB_AT + 64;
const KNOWN_AT: usize = GIVEN_UP_AT + 32;
const SHIELD_FLOORS_AT: usize = KNOWN_AT + 16 * MEMBERS_MAX;
const SHIELD_AT: usize = SHIELD_FLOORS_AT + 16 * MEMBERS_MAX;
const DEPARTED_AT: usize = SHIELD_AT + SHIELD_BYTES + 16;
const _: () = assert!(DEPARTED_AT + DEPARTED_MAX * DEPARTED_BYTES <= CRC_AT);

/// Bits of a member's `active` byte.
const MEMBER_ACTIVE: u8 = 1;
const MEMBER_SUSPECT: u8 = 2;

/// The pool was closed properly: nothing after the checkpoint.
const FLAG_CLEAN: u32 = 1;
/// Not all members have been formatted yet.
const FLAG_FORMATTING: u32 = 2;

/// One line of the member table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberEntry {
    pub uuid: Uuid,
    /// Part of the current set.
    pub active: bool,
    /// The last epoch in which it was part of the set, or began to come back: one that knows of a later one has a history
    /// of its own.
    pub epoch: u64,
    /// Of a member that is not in the set: uses of segments with a lower sequence number are whole on it. 0: nothing is
    /// known. Of one in the set: 0.
    pub whole_below: u64,
    /// Part of the set, and its file was cut: until a scrub has been through, some of it may be gone, and none of it is
    /// relied on should it leave.
    pub suspect: bool,
    /// Of a member that is not in the set: the generation of the last superblock that it is known to have. One that shows
    /// an older one is an older copy. 0: nothing is known, and of one in the set.
    pub known: u64,
    /// Of a member that is not in the set: its shields have this number or a higher one. Of one in the set: 0; see
    /// [`Superblock::shield_floor`].
    pub shield_floor: u64,
}

/// A member that is being filled to take a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replacement {
    pub uuid: Uuid,
    /// The epoch in which it was last told of the set.
    pub epoch: u64,
    /// As [`MemberEntry::whole_below`].
    pub whole_below: u64,
    /// As [`MemberEntry::known`].
    pub known: u64,
    /// As [`MemberEntry::shield_floor`].
    pub shield_floor: u64,
}

/// Where the checkpoint's root is, the checksum of its payload, and what covers the wrapped keys in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointPointer {
    pub root: StripeLocation,
    pub sequence: Sequence,
    pub payload_bytes: u32,
    pub payload_crc: u32,
    pub shield: Shield,
}

/// A superblock. Little-endian, 4096 bytes, format 3.0 (2.0 and 1.1 have zeroes from 3104 on, 1.0 also where they have
/// `whole_below` and replacements):
///
/// | bytes | field | why |
/// |---|---|---|
/// | 0..8 | magic `SLUICEPL` | |
/// | 8..12 | format major, minor (u16 each) | checked before all else, so that later layouts can be told apart |
/// | 12..16 | flags: 1 clean, 2 formatting | |
/// | 16..32 | pool UUID | members of another pool are refused |
/// | 32..48 | member UUID | |
/// | 48..52 | member index, k, m, code id (1 = `cauchy-11d-1`) | |
/// | 52..56 | segment bytes | |
/// | 56..60 | longest shard in bytes | |
/// | 60..64 | segments | the same on all members, by the smallest |
/// | 64..72 | member's size when formatted | a truncated one is refused |
/// | 72..80 | where segment 0 begins | |
/// | 80..88 | epoch of the set | |
/// | 88..96 | generation | goes up at every superblock write; even ones live in slot 0, odd ones in slot 1 |
/// | 96..104 | mount counter | generations of records begin with it, so none is ever given twice |
/// | 104..120 | id of the mount that wrote it | tells two histories of one generation apart |
/// | 120..160 | checkpoint root: location (16), sequence number and nonce of its segment, payload length, payload CRC32C | length 0: none yet |
/// | 160..192 | 0 | |
/// | 192..1472 | member table, 32 x (UUID 16, flags 1 (1 active, 2 suspect), 0 x 7, epoch 8, whole below 8) | `whole below` makes a return cost what changed |
/// | 1472..2496 | replacements, 32 x (UUID 16, epoch 8, whole below 8), UUID 0: none | the member at that place goes when its replacement is full |
/// | 2496..2560 | scrub: running 1, 0 x 7, next sequence number 8, stripes read 8, bad shards 8, repaired 8, stripes lost 8, began 8, ended 8 (Unix seconds) | it goes on after a restart |
/// | 2560..2592 | given up by force: times 8, the last one 8 (Unix seconds), stripes of answered writes 8, segments that too few members answered for 8 | so that nobody takes the pool for whole |
/// | 2592..3104 | 32 x (generation last known on the member 8, on the replacement 8) | an older copy of a member that was away is told by it |
/// | 3104..3616 | 32 x (shield floor of the member 8, of the replacement 8) | which shields a member that is away still has |
/// | 3616..3648 | shield of the checkpoint | its wrapped keys are covered with it, and it stands nowhere else |
/// | 3648..3664 | the shield's number 8, shield floor of the set 8 | when this was written, no member of the set had an older one than the floor |
/// | 3664..4048 | members that left for good since the checkpoint, 8 x (UUID 16, epoch 8, shield floor 8, when 8 (Unix seconds), place 1, 0 x 7), UUID 0: none | what they have is named until they are known to be destroyed |
/// | 4048..4092 | 0 | |
/// | 4092..4096 | CRC32C of all before | |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    pub clean: bool,
    pub formatting: bool,
    pub pool: Uuid,
    pub member: Uuid,
    pub index: u8,
    pub layout: Layout,
    pub segments: u32,
    pub member_bytes: u64,
    pub epoch: u64,
    pub generation: u64,
    pub mounts: u64,
    pub mount_id: u128,
    pub checkpoint: Option<CheckpointPointer>,
    pub members: Vec<MemberEntry>,
    /// By place.
    pub replacements: Vec<Option<Replacement>>,
    pub scrub: ScrubRecord,
    pub given_up: GivenUp,
    /// Goes up with each checkpoint; 0: its wrapped keys are not covered, or there is none.
    pub shield_number: u64,
    /// When this was written, the shields of all members of the set had this number or a higher one.
    pub shield_floor: u64,
    /// Who left for good since the checkpoint was taken, [`DEPARTED_MAX`] at most.
    pub departed: Vec<Departed>,
}

/// What mounts have gone on without, by force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct GivenUp {
    /// How many mounts have.
    pub times: u64,
    /// Unix time of the last one.
    pub last_s: u64,
    /// Stripes with answered writes that could not be read.
    pub stripes: u64,
    /// Segments in which there may have been some: too few members answered.
    pub segments: u64,
}

impl GivenUp {
    /// One more mount has gone on without something, if it has.
    pub fn add(&mut self, more: Self, now_s: u64) {
        if more.stripes > 0 || more.segments > 0 {
            self.times = self.times.saturating_add(1);
            self.last_s = now_s;
            self.stripes = self.stripes.saturating_add(more.stripes);
            self.segments = self.segments.saturating_add(more.segments);
        }
    }
}

/// How far the scrub is, and what its last pass has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScrubRecord {
    pub running: bool,
    /// Uses of segments with lower sequence numbers have been read in this pass.
    pub next: u64,
    pub stripes: u64,
    pub bad: u64,
    pub repaired: u64,
    pub lost: u64,
    /// Unix time.
    pub started_s: u64,
    /// Unix time of the end of the last pass; 0: there was none.
    pub ended_s: u64,
}

/// Why 4096 bytes are no superblock.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    #[error("no magic")]
    NoMagic,
    #[error("format version {major}.{minor}; this program reads 1.x, 2.x and {FORMAT_MAJOR}.x")]
    Version { major: u16, minor: u16 },
    #[error("checksum is wrong")]
    Crc,
    #[error("cut short")]
    Short(#[from] CutShort),
    #[error("layout: {0}")]
    Layout(#[from] OptionError),
    #[error("field {field} = {value} is out of range")]
    Field { field: &'static str, value: u64 },
}

/// One publication of the set's state: what superblocks and an anchor are told apart by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Publication {
    /// Goes up at every publication.
    pub generation: u64,
    /// Mounts so far.
    pub mounts: u64,
    /// The mount that published it.
    pub mount_id: u128,
}

impl Publication {
    /// Publications from this one to `newer`, and whether one history may have led there; `None` if `newer` is older.
    fn to(&self, newer: &Self) -> Option<(u64, bool)> {
        let behind = newer.generation.checked_sub(self.generation)?;
        // Every mount publishes once at least.
        let same = match newer.mounts.checked_sub(self.mounts) {
            None => false,
            Some(0) => self.mount_id == newer.mount_id,
            Some(mounts) => mounts <= behind,
        };
        Some((behind, same))
    }

    /// Whether `newer` is this one, or may have come after it.
    pub fn precedes(&self, newer: &Self) -> bool {
        self.to(newer).is_some_and(|(_, same)| same)
    }
}

/// How a member of the set lags behind the newest state by more than a crash explains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lag {
    /// It has missed so many publications: an older copy of it was put back.
    Behind(u64),
    /// It tells of another history than the rest.
    OtherHistory,
}

impl Superblock {
    /// Whether this is an older copy of a member that `newest` counts as one of the set. Superblocks go to all members of the
    /// set before the next ones do, so a crash leaves some of them one publication behind, and no more.
    pub fn lag(&self, newest: &Self) -> Option<Lag> {
        match self.publication().to(&newest.publication()) {
            None | Some((0, false)) => Some(Lag::OtherHistory),
            Some((0 | 1, true)) => None,
            Some((behind, _)) => Some(Lag::Behind(behind)),
        }
    }

    /// Whether it says of its own member that it is suspect.
    pub fn is_suspect(&self) -> bool {
        let own = self.members.get(usize::from(self.index));
        own.is_some_and(|own| own.suspect && own.uuid == self.member)
    }

    pub fn publication(&self) -> Publication {
        Publication { generation: self.generation, mounts: self.mounts, mount_id: self.mount_id }
    }

    /// Where the slot of `generation` begins on a member.
    pub fn slot_offset(generation: u64) -> u64 {
        (generation % 2) * SLOT_BYTES as u64
    }

    /// Where a segment begins on every member.
    pub fn segment_offset(&self, segment: u32) -> u64 {
        SUPERBLOCK_AREA_BYTES + u64::from(segment) * u64::from(self.layout.segment_bytes)
    }

    /// Puts a member out of the set of which nothing can be relied on.
    pub fn distrust(&mut self, place: usize) {
        if let Some(member) = self.members.get_mut(place) {
            (member.active, member.suspect, member.whole_below) = (false, false, 0);
            member.shield_floor = 0;
        }
    }

    /// What tells one state of the set from another: members that agree on it carry the same history.
    pub fn state_id(&self) -> (u64, u64, u128) {
        (self.epoch, self.generation, self.mount_id)
    }

    pub fn to_bytes(&self) -> [u8; SLOT_BYTES] {
        let mut out = Writer::default();
        let flags = if self.clean { FLAG_CLEAN } else { 0 } | if self.formatting { FLAG_FORMATTING } else { 0 };
        out.bytes(&MAGIC).u16(FORMAT_MAJOR).u16(FORMAT_MINOR).u32(flags);
        out.bytes(self.pool.as_bytes()).bytes(self.member.as_bytes());
        out.u8(self.index).u8(self.layout.data_shards).u8(self.layout.parity_shards).u8(CODE_CAUCHY_11D_1);
        out.u32(self.layout.segment_bytes).u32(self.layout.shard_bytes_max).u32(self.segments);
        out.u64(self.member_bytes).u64(SUPERBLOCK_AREA_BYTES);
        out.u64(self.epoch).u64(self.generation).u64(self.mounts).u128(self.mount_id);
        if let Some(pointer) = &self.checkpoint {
            pointer.root.write(&mut out);
            out.u64(pointer.sequence.number).u64(pointer.sequence.nonce);
            out.u32(pointer.payload_bytes).u32(pointer.payload_crc);
        }
        out.pad_to(TABLE_AT);
        for member in &self.members {
            let flags = if member.active { MEMBER_ACTIVE } else { 0 } | if member.suspect { MEMBER_SUSPECT } else { 0 };
            out.bytes(member.uuid.as_bytes()).u8(flags).bytes(&[0; 7]).u64(member.epoch);
            out.u64(member.whole_below);
        }
        out.pad_to(REPLACEMENTS_AT);
        for replacement in &self.replacements {
            let none = Replacement { uuid: Uuid::nil(), epoch: 0, whole_below: 0, known: 0, shield_floor: 0 };
            let replacement = replacement.as_ref().unwrap_or(&none);
            out.bytes(replacement.uuid.as_bytes()).u64(replacement.epoch).u64(replacement.whole_below);
        }
        out.pad_to(SCRUB_AT);
        let scrub = &self.scrub;
        out.u8(scrub.running.into()).bytes(&[0; 7]);
        out.u64(scrub.next).u64(scrub.stripes).u64(scrub.bad).u64(scrub.repaired).u64(scrub.lost);
        out.u64(scrub.started_s).u64(scrub.ended_s);
        out.pad_to(GIVEN_UP_AT);
        let given_up = &self.given_up;
        out.u64(given_up.times).u64(given_up.last_s).u64(given_up.stripes).u64(given_up.segments);
        out.pad_to(KNOWN_AT);
        for (member, replacement) in self.members.iter().zip(&self.replacements) {
            out.u64(member.known).u64(replacement.as_ref().map_or(0, |replacement| replacement.known));
        }
        self.write_shields(&mut out);
        out.pad_to(CRC_AT);
        let crc = crc32c(&out.0);
        out.u32(crc);
        let mut bytes = [0; SLOT_BYTES];
        bytes.copy_from_slice(&out.0);
        bytes
    }

    fn write_shields(&self, out: &mut Writer) {
        out.pad_to(SHIELD_FLOORS_AT);
        for (member, replacement) in self.members.iter().zip(&self.replacements) {
            let filling = replacement.as_ref().map_or(0, |replacement| replacement.shield_floor);
            out.u64(member.shield_floor).u64(filling);
        }
        out.pad_to(SHIELD_AT);
        let none = Shield::none();
        out.bytes(self.checkpoint.as_ref().map_or(&none, |pointer| &pointer.shield).as_bytes());
        out.u64(self.shield_number).u64(self.shield_floor);
        self.departed.iter().take(DEPARTED_MAX).for_each(|departed| departed.write(out));
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, SuperblockError> {
        let mut input = Reader::new(bytes);
        if input.array::<8>()? != MAGIC {
            return Err(SuperblockError::NoMagic);
        }
        let (major, minor) = (input.u16()?, input.u16()?);
        if !(1..=FORMAT_MAJOR).contains(&major) {
            return Err(SuperblockError::Version { major, minor });
        }
        let stored = Reader::new(bytes.get(CRC_AT..).ok_or(CutShort)?).u32()?;
        if crc32c(&bytes[..CRC_AT]) != stored {
            return Err(SuperblockError::Crc);
        }
        let block = Self::read_fields(&mut input)?;
        block.check()?;
        Ok(block)
    }

    fn read_fields(input: &mut Reader<'_>) -> Result<Self, SuperblockError> {
        let flags = input.u32()?;
        let (pool, member) = (Uuid::from_bytes(input.array()?), Uuid::from_bytes(input.array()?));
        let (index, data_shards, parity_shards, code) = (input.u8()?, input.u8()?, input.u8()?, input.u8()?);
        let (segment_bytes, shard_bytes_max, segments) = (input.u32()?, input.u32()?, input.u32()?);
        let (member_bytes, data_start) = (input.u64()?, input.u64()?);
        let (epoch, generation, mounts, mount_id) = (input.u64()?, input.u64()?, input.u64()?, input.u128()?);
        let root = StripeLocation::read(input)?;
        let sequence = Sequence { number: input.u64()?, nonce: input.u64()? };
        let (payload_bytes, payload_crc) = (input.u32()?, input.u32()?);
        input.bytes(TABLE_AT - 160)?;
        if code != CODE_CAUCHY_11D_1 {
            return Err(SuperblockError::Field { field: "code", value: code.into() });
        }
        if data_start != SUPERBLOCK_AREA_BYTES {
            return Err(SuperblockError::Field { field: "data_start", value: data_start });
        }
        let layout = Layout { data_shards, parity_shards, segment_bytes, shard_bytes_max };
        layout.check()?;
        let (mut members, mut replacements) = (read_members(input, &layout)?, read_replacements(input, &layout)?);
        let scrub = read_scrub(input)?;
        let given_up = read_given_up(input)?;
        for (member, replacement) in members.iter_mut().zip(&mut replacements) {
            member.known = input.u64()?;
            let known = input.u64()?;
            if let Some(replacement) = replacement {
                replacement.known = known;
            }
        }
        input.bytes(16 * (MEMBERS_MAX - layout.members()))?;
        for (member, replacement) in members.iter_mut().zip(&mut replacements) {
            member.shield_floor = input.u64()?;
            let filling = input.u64()?;
            if let Some(replacement) = replacement {
                replacement.shield_floor = filling;
            }
        }
        input.bytes(16 * (MEMBERS_MAX - layout.members()))?;
        let shield = Shield::new(input.array()?);
        let (shield_number, shield_floor) = (input.u64()?, input.u64()?);
        let departed = read_departed(input)?;
        let checkpoint =
            (payload_bytes > 0).then_some(CheckpointPointer { root, sequence, payload_bytes, payload_crc, shield });
        let (clean, formatting) = (flags & FLAG_CLEAN != 0, flags & FLAG_FORMATTING != 0);
        Ok(Self {
            clean,
            formatting,
            pool,
            member,
            index,
            layout,
            segments,
            member_bytes,
            epoch,
            generation,
            mounts,
            mount_id,
            checkpoint,
            members,
            replacements,
            scrub,
            given_up,
            shield_number,
            shield_floor,
            departed,
        })
    }

    /// The uuid of the member that this superblock is of, as its tables have it: at its place, or as the replacement.
    fn is_in_tables(&self) -> bool {
        let place = usize::from(self.index);
        let replacement = self.replacements.get(place).copied().flatten();
        self.members.get(place).is_some_and(|member| member.uuid == self.member)
            || replacement.is_some_and(|replacement| replacement.uuid == self.member)
    }

    /// Nothing that was written from `floor` on is taken to be whole on members outside the set.
    pub fn lower(&mut self, floor: u64) {
        for member in self.members.iter_mut().filter(|member| !member.active) {
            member.whole_below = member.whole_below.min(floor);
        }
        for replacement in self.replacements.iter_mut().flatten() {
            replacement.whole_below = replacement.whole_below.min(floor);
        }
    }

    /// The fields against one another.
    pub fn check(&self) -> Result<(), SuperblockError> {
        let fail = |field, value| Err(SuperblockError::Field { field, value });
        if usize::from(self.index) >= self.members.len() {
            return fail("index", self.index.into());
        }
        if !self.is_in_tables() {
            return fail("member_uuid", self.index.into());
        }
        let mut uuids: Vec<Uuid> = self.members.iter().map(|member| member.uuid).collect();
        uuids.extend(self.replacements.iter().flatten().map(|replacement| replacement.uuid));
        let count = uuids.len();
        uuids.sort_unstable();
        uuids.dedup();
        if uuids.len() != count {
            return fail("member_table", self.members.len() as u64);
        }
        if u64::from(self.segments) < SEGMENTS_MIN {
            return fail("segments", self.segments.into());
        }
        let end = self.segment_offset(0).checked_add(u64::from(self.segments) * u64::from(self.layout.segment_bytes));
        if end.is_none_or(|end| end > self.member_bytes) {
            return fail("member_bytes", self.member_bytes);
        }
        if self.epoch == 0 || self.members.iter().any(|member| member.epoch > self.epoch) {
            return fail("epoch", self.epoch);
        }
        if self.shield_number > u64::MAX / 2 || self.shield_floor > self.shield_number {
            return fail("shield_number", self.shield_number);
        }
        if self.departed.len() > DEPARTED_MAX {
            return fail("departed", self.departed.len() as u64);
        }
        // Half of the range is enough for ever, and sums then can't overflow.
        if self.generation > u64::MAX / 2 || self.mounts >= 1 << 27 {
            return fail("generation", self.generation);
        }
        match &self.checkpoint {
            Some(pointer) if !pointer.root.fits(&self.layout, self.segments, pointer.payload_bytes) => {
                fail("checkpoint", pointer.root.segment.into())
            }
            _ => Ok(()),
        }
    }
}

fn read_members(input: &mut Reader<'_>, layout: &Layout) -> Result<Vec<MemberEntry>, SuperblockError> {
    let mut members = Vec::with_capacity(MEMBERS_MAX);
    for _ in 0..layout.members() {
        let (uuid, flags) = (Uuid::from_bytes(input.array()?), input.u8()?);
        input.bytes(7)?;
        let (epoch, whole_below) = (input.u64()?, input.u64()?);
        let (active, suspect) = (flags & MEMBER_ACTIVE != 0, flags & MEMBER_SUSPECT != 0);
        members.push(MemberEntry { uuid, active, epoch, whole_below, suspect, known: 0, shield_floor: 0 });
    }
    // What is left of the table.
    input.bytes(40 * (MEMBERS_MAX - layout.members()))?;
    Ok(members)
}

fn read_replacements(input: &mut Reader<'_>, layout: &Layout) -> Result<Vec<Option<Replacement>>, SuperblockError> {
    let mut replacements = Vec::with_capacity(MEMBERS_MAX);
    for _ in 0..layout.members() {
        let (uuid, epoch, whole_below) = (Uuid::from_bytes(input.array()?), input.u64()?, input.u64()?);
        replacements.push((!uuid.is_nil()).then_some(Replacement {
            uuid,
            epoch,
            whole_below,
            known: 0,
            shield_floor: 0,
        }));
    }
    // What is left of the table.
    input.bytes(32 * (MEMBERS_MAX - layout.members()))?;
    Ok(replacements)
}

fn read_departed(input: &mut Reader<'_>) -> Result<Vec<Departed>, SuperblockError> {
    let mut all = Vec::new();
    for _ in 0..DEPARTED_MAX {
        let departed = Departed::read(input)?;
        if !departed.uuid.is_nil() {
            all.push(departed);
        }
    }
    Ok(all)
}

fn read_given_up(input: &mut Reader<'_>) -> Result<GivenUp, SuperblockError> {
    Ok(GivenUp { times: input.u64()?, last_s: input.u64()?, stripes: input.u64()?, segments: input.u64()? })
}

fn read_scrub(input: &mut Reader<'_>) -> Result<ScrubRecord, SuperblockError> {
    let running = input.u8()? != 0;
    input.bytes(7)?;
    let (next, stripes, bad, repaired, lost) = (input.u64()?, input.u64()?, input.u64()?, input.u64()?, input.u64()?);
    Ok(ScrubRecord { running, next, stripes, bad, repaired, lost, started_s: input.u64()?, ended_s: input.u64()? })
}
