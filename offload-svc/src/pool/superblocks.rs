//! Writing superblocks: the one place where the set and the checkpoint change.
//!
//! Owns the current superblock and its writing on all members of the set. Must not know what a checkpoint holds.
//! Invariants: the set in memory changes only after every member that stays has the superblock that says so; a member
//! that comes gets a superblock after all others have it, so that it never alone knows of a newer state.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use futures::future::join_all;
use tokio::sync::Mutex;
use uuid::Uuid;

use super::members::{Failure, Identity, Incarnation, MemberIo, MemberSet, TooFewMembers};
use super::segments::Unfinished;
use super::shields::{DEPARTED_MAX, Departed};
use super::status::Remark;
use super::superblock::{MemberEntry, Replacement, SLOT_BYTES, Superblock};
use crate::stages::keys::Shield;

/// One is written at a time; one that hangs doesn't hold up the next at once.
pub const SUPERBLOCKS_UNDER_WAY: usize = 4;

/// The writer of a mounted pool's superblocks.
pub struct Superblocks {
    io: MemberIo,
    current: Mutex<Superblock>,
    floor: Box<dyn Floor>,
    /// What was unfinished when the last publication began.
    published: RefCell<Option<Unfinished>>,
    /// Of each candidate: the generation of its own superblock, and what was whole on it then.
    owned: RefCell<HashMap<usize, (u64, u64)>>,
}

/// From which sequence number on uses of segments may lack something on a member.
pub trait Floor {
    /// On one that leaves at this moment.
    fn now(&self) -> u64;
    /// What is not written to its end at this moment.
    fn unfinished(&self) -> Unfinished;
    /// On one that is as it was when these were unfinished.
    fn of(&self, unfinished: &Unfinished) -> u64;
}

/// Why a member did not begin to come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WelcomeError {
    #[error("the place is taken")]
    Taken,
    #[error("its superblock is of a newer epoch than the pool's: it has been in use elsewhere")]
    Newer,
    #[error("its superblock can't be written")]
    Write,
    #[error("too many members have left for good since the last checkpoint")]
    NoCheckpoint,
    #[error(transparent)]
    TooFewMembers(#[from] TooFewMembers),
}

/// A place as it was before a candidate took it.
struct Before {
    place: usize,
    member: MemberEntry,
    replacement: Option<Replacement>,
    in_set: bool,
}

impl Superblocks {
    pub fn new(io: MemberIo, current: Superblock, floor: Box<dyn Floor>) -> Self {
        Self { io, current: Mutex::new(current), floor, published: RefCell::default(), owned: RefCell::default() }
    }

    /// The superblock as it was last written.
    pub fn into_current(self) -> Superblock {
        self.current.into_inner()
    }

    /// Writes the current superblock on members of the set that don't have it yet, as a crash may have cut its
    /// publication short, and on those of which it says something new. It is no publication: who is not there stays as it
    /// is. Gives those on which it could not be written: the next publication puts them out, and one that is missed until
    /// then is filled anew.
    pub async fn catch_up(&self, members: u32) -> u32 {
        let current = self.current.lock().await;
        self.write_all(&current, members & self.set().mask()).await
    }

    /// From now on the pool is served: what a member that leaves has for sure is what is whole now.
    pub fn begin_serving(&self) {
        *self.published.borrow_mut() = Some(self.floor.unfinished());
    }

    fn set(&self) -> &Arc<MemberSet> {
        &self.io.set
    }

    /// Writes a changed superblock on all members of the set; members that fail leave the set. When it returns `Ok`, the
    /// change is durable on every member that is left.
    pub async fn publish(&self, change: impl FnOnce(&mut Superblock)) -> Result<(), TooFewMembers> {
        let mut current = self.current.lock().await;
        let mut next = current.clone();
        change(&mut next);
        if shield_of(&next) != shield_of(&current) {
            next.shield_number += 1;
        }
        self.write_out(&mut current, next, self.set().mask(), None).await
    }

    /// Writes the current superblock once more. Each member has two of them: so what shields there were before the last
    /// publication are gone from all members of the set.
    pub async fn write_again(&self) -> Result<(), TooFewMembers> {
        self.publish(|_| {}).await
    }

    /// Puts out those that are still there in the incarnations named: members of the set durably, candidates with what is
    /// known to be whole on them.
    pub async fn exclude(&self, members: &[(usize, Incarnation)]) -> Result<(), TooFewMembers> {
        let mut current = self.current.lock().await;
        let set = self.set();
        let (mut leaving, mut dropped) = (0u32, Vec::new());
        for &(place, incarnation) in members {
            if set.contains(place) && set.is(place, incarnation) {
                leaving |= 1 << place;
            }
            if set.joining() & (1 << place) != 0 && set.is(set.candidate(place), incarnation) {
                dropped.push(place);
            }
        }
        if leaving == 0 && dropped.is_empty() {
            return Ok(());
        }
        let mut next = current.clone();
        let floor = self.floor.now();
        for &place in &dropped {
            let below = whole_below(&mut next, place, self.candidate_uuid(place));
            *below = (*below).min(floor);
            tracing::warn!(place, "a member that was coming back has failed");
        }
        let written = self.write_out(&mut current, next, set.mask() & !leaving, None).await;
        dropped.iter().for_each(|place| set.end_join(*place));
        written
    }

    /// Begins to bring `identity` into a place: as the member that belongs there, or (`replacing`) as another that takes
    /// over. Gives its incarnation, and from which sequence number on it lacks something. `own` is its own superblock, if it
    /// has one.
    pub async fn welcome(
        &self,
        place: usize,
        identity: Identity,
        replacing: bool,
        own: Option<&Superblock>,
    ) -> Result<(Incarnation, u64), WelcomeError> {
        let mut current = self.current.lock().await;
        let set = self.set();
        if set.joining() & (1 << place) != 0 || (!replacing && set.contains(place)) {
            return Err(WelcomeError::Taken);
        }
        let elsewhere = |other: usize, uuid: Uuid| (replacing || other != place) && uuid == identity.uuid;
        if current.members.iter().enumerate().any(|(other, member)| elsewhere(other, member.uuid)) {
            return Err(WelcomeError::Taken);
        }
        if own.is_some_and(|own| own.epoch > current.epoch) {
            return Err(WelcomeError::Newer);
        }
        let mut next = current.clone();
        let known = if replacing {
            let known = next.replacements[place].filter(|there| there.uuid == identity.uuid);
            known.map(|there| (there.epoch, there.whole_below, there.known))
        } else {
            let there = &next.members[place];
            Some((there.epoch, there.whole_below, there.known))
        };
        // One that knows of a later epoch than we know of it has been in use elsewhere, and one that has an older superblock
        // than it is known to have is an older copy: nothing on either can be relied on.
        let is_known = |(epoch, _, known): &(u64, u64, u64)| {
            own.is_some_and(|own| own.epoch <= *epoch && own.generation >= *known)
        };
        let below = known.filter(is_known).map_or(0, |(_, below, _)| below);
        let missed = known.zip(own).map_or(0, |((_, _, known), own)| known.saturating_sub(own.generation));
        let elsewhere = known.zip(own).is_some_and(|((epoch, _, _), own)| own.epoch > epoch);
        // It gets that superblock, or a later one, before anything is written to it.
        let known = current.generation + 1;
        let older = missed > 0 || elsewhere;
        if replacing {
            let there = next.replacements[place].take();
            if let Some(there) = there.filter(|there| there.uuid != identity.uuid) {
                self.depart(&mut next, place, there.uuid, there.epoch, there.shield_floor)
                    .map_err(|()| WelcomeError::NoCheckpoint)?;
            }
            // A blank one gets the shield of this moment first.
            let blank =
                there.filter(|there| there.uuid == identity.uuid).map_or(next.shield_number, |t| t.shield_floor);
            let shield_floor = if older { 0 } else { blank };
            let epoch = next.epoch;
            next.replacements[place] =
                Some(Replacement { uuid: identity.uuid, epoch, whole_below: below, known, shield_floor });
        } else {
            let epoch = next.epoch;
            let there = &mut next.members[place];
            (there.epoch, there.whole_below, there.known) = (epoch, below, known);
            if older {
                there.shield_floor = 0;
            }
        }
        self.write_out(&mut current, next, set.mask(), None).await?;
        let incarnation = set.begin_join(place, identity);
        if self.claim(&current, place).await.is_err() {
            set.end_join(place);
            return Err(WelcomeError::Write);
        }
        // Both of its slots: what it had before is gone.
        let number = current.shield_number;
        *shield_floor_of(&mut current, place, self.candidate_uuid(place)) = number;
        set.shields.refresh(&current);
        self.owned.borrow_mut().insert(place, (current.generation, below));
        if older {
            let older = Remark::RolledBack { publications: missed };
            let remark = if elsewhere { Remark::OtherHistory } else { older };
            let entry = if replacing { set.candidate(place) } else { place };
            tracing::error!(place, "{remark}; it is filled anew");
            set.entry(entry).remark(remark);
        }
        Ok((incarnation, below))
    }

    /// Writes a candidate's own superblock over both of its slots: it must not tell of an older state any more while what
    /// that state needs is written over.
    async fn claim(&self, block: &Superblock, place: usize) -> Result<(), Failure> {
        for slot in 0..2 {
            self.write_one(block, self.set().candidate(place), slot * SLOT_BYTES as u64).await?;
        }
        Ok(())
    }

    /// Uses of segments below `below` are whole on a candidate: makes it durable, as far as an older copy of the candidate could
    /// be told from it. So what was whole when its own superblock was last written is noted with that one's generation; then
    /// its own is written anew, for the next time.
    pub async fn progress(&self, place: usize, incarnation: Incarnation, below: u64) -> Result<(), TooFewMembers> {
        let mut current = self.current.lock().await;
        if !self.is_joining(place, incarnation) {
            return Ok(());
        }
        let mut next = current.clone();
        let owned = self.owned.borrow().get(&place).copied();
        if let Some((generation, sure)) = owned {
            let (whole_below, known) = known_of(&mut next, place, self.candidate_uuid(place));
            (*whole_below, *known) = (sure, generation);
        }
        self.write_out(&mut current, next, self.set().mask(), None).await?;
        let offset = Superblock::slot_offset(current.generation);
        // If that fails, its writes will, too.
        if self.write_one(&current, self.set().candidate(place), offset).await.is_ok() {
            self.owned.borrow_mut().insert(place, (current.generation, below));
        }
        Ok(())
    }

    fn candidate_uuid(&self, place: usize) -> Uuid {
        self.set().entry(self.set().candidate(place)).identity().uuid
    }

    fn is_joining(&self, place: usize, incarnation: Incarnation) -> bool {
        let set = self.set();
        set.joining() & (1 << place) != 0 && set.is(set.candidate(place), incarnation)
    }

    /// Takes a candidate that lacks nothing into the set; `false` if it has failed meanwhile.
    pub async fn promote(&self, place: usize, incarnation: Incarnation) -> Result<bool, TooFewMembers> {
        let mut current = self.current.lock().await;
        if !self.is_joining(place, incarnation) {
            return Ok(false);
        }
        let set = self.set();
        // If this is cut short before its own superblock is written, it is one publication behind, as a crash explains.
        let offset = Superblock::slot_offset(current.generation);
        if self.write_one(&current, set.candidate(place), offset).await.is_err() {
            let below = whole_below(&mut current, place, self.candidate_uuid(place));
            *below = (*below).min(self.floor.now());
            set.end_join(place);
            return Ok(false);
        }
        let before = Before {
            place,
            member: current.members[place],
            replacement: current.replacements[place],
            in_set: set.contains(place),
        };
        let mut next = current.clone();
        let uuid = self.candidate_uuid(place);
        let old = before.member;
        if old.uuid != uuid {
            let floor = if before.in_set { set.shields.floor() } else { old.shield_floor };
            let epoch = if before.in_set { next.epoch } else { old.epoch };
            if self.depart(&mut next, place, old.uuid, epoch, floor).is_err() {
                tracing::warn!(place, "a member can't be replaced before a checkpoint names those that left before it");
                let below = whole_below(&mut current, place, uuid);
                *below = (*below).min(self.floor.now());
                set.end_join(place);
                return Ok(false);
            }
        }
        (next.members[place].uuid, next.members[place].suspect) = (uuid, false);
        next.replacements[place] = next.replacements[place].filter(|replacement| replacement.uuid != uuid);
        next.epoch += 1;
        self.write_out(&mut current, next, set.mask() | 1 << place, Some(before)).await?;
        Ok(set.contains(place) && set.is(place, incarnation))
    }

    /// Names a member that is none any more, so that nobody takes what it has for gone.
    fn depart(&self, block: &mut Superblock, place: usize, uuid: Uuid, epoch: u64, floor: u64) -> Result<(), ()> {
        if block.departed.len() >= DEPARTED_MAX {
            return Err(());
        }
        let at_s = self.io.env.unix_seconds();
        block.departed.push(Departed { uuid, place: place as u8, epoch, floor, at_s });
        Ok(())
    }

    /// A member that left for good has no shield any more: nobody need be told of it.
    pub async fn released(&self, uuid: Uuid) {
        let mut current = self.current.lock().await;
        current.departed.retain(|departed| departed.uuid != uuid);
        self.set().shields.refresh(&current);
    }

    /// The superblock as it was last written.
    pub async fn current(&self) -> Superblock {
        self.current.lock().await.clone()
    }

    /// Writes `next` for the set `mask`, in which a candidate may be new.
    async fn write_out(
        &self,
        current: &mut Superblock,
        mut next: Superblock,
        mut mask: u32,
        mut newcomer: Option<Before>,
    ) -> Result<(), TooFewMembers> {
        let set = self.set();
        let unfinished = self.floor.unfinished();
        // What a member that leaves now has for sure it had when it got its last superblock: a copy of it that shows that one
        // may be as old.
        let published = self.published.borrow().as_ref().map_or(u64::MAX, |unfinished| self.floor.of(unfinished));
        let floor = self.floor.now().min(published);
        // Of those that leave from here on nothing more is known.
        let shield_floor = set.shields.floor();
        next.shield_floor = shield_floor;
        loop {
            if set.is_failed() || mask.count_ones() < u32::from(next.layout.data_shards) {
                set.fail();
                return Err(TooFewMembers);
            }
            next.generation += 1;
            admit(&mut next, mask, &Known { whole_below: floor, known: set.publication().generation, shield_floor });
            let others = newcomer.as_ref().map_or(mask, |before| mask & !(1 << before.place));
            let failed = self.write_all(&next, others).await;
            // A slot that has been written may be found again: the generation is spent.
            current.generation = next.generation;
            mask &= !failed;
            set.shields.note_published(next.generation, next.shield_number);
            // After the others, and before the next try: it must never be behind by more than a crash explains.
            if let Some(before) = newcomer.take() {
                let offset = Superblock::slot_offset(next.generation);
                if self.write_one(&next, set.candidate(before.place), offset).await.is_err() {
                    mask = self.take_back(&mut next, &before, mask);
                    continue;
                }
                newcomer = Some(before);
            }
            if failed != 0 {
                continue;
            }
            if let Some(before) = newcomer.take() {
                set.promote(before.place);
            }
            *self.published.borrow_mut() = Some(unfinished);
            set.set(mask, next.epoch);
            set.note_publication(next.publication());
            set.shields.refresh(&next);
            *current = next;
            return Ok(());
        }
    }

    /// A candidate failed in the very moment in which it was to count: all is as it was before, in a newer epoch.
    fn take_back(&self, next: &mut Superblock, before: &Before, mask: u32) -> u32 {
        let place = before.place;
        next.epoch += 1;
        (next.members[place], next.replacements[place]) = (before.member, before.replacement);
        next.departed.retain(|departed| departed.uuid != before.member.uuid);
        let below = whole_below(next, place, self.candidate_uuid(place));
        *below = (*below).min(self.floor.now());
        self.set().end_join(place);
        if before.in_set { mask } else { mask & !(1 << place) }
    }

    async fn write_all(&self, block: &Superblock, mask: u32) -> u32 {
        let members = (0..self.set().count()).filter(|member| mask & (1 << member) != 0);
        let offset = Superblock::slot_offset(block.generation);
        let writes = members.map(|member| async move { (member, self.write_one(block, member, offset).await) });
        let results = join_all(writes).await;
        results.iter().filter(|(_, result)| result.is_err()).fold(0, |failed, (member, _)| failed | 1 << member)
    }

    async fn write_one(&self, block: &Superblock, index: usize, offset: u64) -> Result<(), Failure> {
        let Identity { uuid, size_bytes, .. } = self.set().entry(index).identity();
        let place = index % self.set().count();
        let own = Superblock { index: place as u8, member: uuid, member_bytes: size_bytes, ..block.clone() };
        // What could not be read back is not written, whatever led to it: the older one stays.
        if let Err(error) = own.check() {
            tracing::error!(place, %error, "a superblock that is wrong in itself");
            return Err(Failure::Error);
        }
        let mut buf = self.io.env.buffer(SLOT_BYTES).await;
        buf.copy_from_slice(&own.to_bytes());
        self.io.write_durably(index, offset, buf).await
    }
}

/// What is known of a member that is the replacement for a place, or else belongs there.
fn whole_below(block: &mut Superblock, place: usize, uuid: Uuid) -> &mut u64 {
    known_of(block, place, uuid).0
}

/// Below what it is whole, and the generation of the last superblock that it has.
fn known_of(block: &mut Superblock, place: usize, uuid: Uuid) -> (&mut u64, &mut u64) {
    match &mut block.replacements[place] {
        Some(replacement) if replacement.uuid == uuid => (&mut replacement.whole_below, &mut replacement.known),
        _ => {
            let member = &mut block.members[place];
            (&mut member.whole_below, &mut member.known)
        }
    }
}

/// The field by which a member, or the replacement for a place, is told to hold no shield with a lower number.
fn shield_floor_of(block: &mut Superblock, place: usize, uuid: Uuid) -> &mut u64 {
    match &mut block.replacements[place] {
        Some(replacement) if replacement.uuid == uuid => &mut replacement.shield_floor,
        _ => &mut block.members[place].shield_floor,
    }
}

fn shield_of(block: &Superblock) -> Option<&Shield> {
    block.checkpoint.as_ref().map(|pointer| &pointer.shield)
}

/// What is known of a member that leaves; see [`MemberEntry`].
struct Known {
    whole_below: u64,
    known: u64,
    shield_floor: u64,
}

/// Brings the member table in line with a set; a change starts a new epoch.
fn admit(block: &mut Superblock, mask: u32, leaving: &Known) {
    let wanted = |index: usize| mask & (1 << index) != 0;
    if block.members.iter().enumerate().any(|(index, member)| member.active != wanted(index)) {
        block.epoch += 1;
    }
    let epoch = block.epoch;
    for (index, member) in block.members.iter_mut().enumerate() {
        if member.active && !wanted(index) {
            member.whole_below = if member.suspect { 0 } else { leaving.whole_below };
            (member.suspect, member.known) = (false, leaving.known);
            member.shield_floor = leaving.shield_floor;
        }
        member.suspect &= member.active && wanted(index);
        member.active = wanted(index);
        if member.active {
            (member.epoch, member.whole_below, member.known, member.shield_floor) = (epoch, 0, 0, 0);
        }
    }
}
