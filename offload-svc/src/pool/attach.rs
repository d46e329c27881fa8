//! Members that are brought from outside while the pool serves: a blank one to replace another, one that was away, a spare.
//!
//! Owns the decision whether a device may take a place. Must not know how it is filled. Invariant: nothing is written to a
//! device that holds anything but what belongs to the place it is to take.

use std::rc::Rc;
use std::str::FromStr;

use tokio::sync::oneshot;
use uuid::Uuid;

use super::core::Core;
use super::env::MemberIndex;
use super::members::Identity;
use super::options::MemberInput;
use super::probe::{Found, FoundText, probe_one};
use super::rebuild::Comer;
use super::receipts::DEPARTED_KEPT_MAX;
use super::superblock::Superblock;
use super::superblocks::Superblocks;

/// A device as the service has opened it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMember {
    /// Where [`super::Env`] reaches it.
    pub slot: MemberIndex,
    /// How messages name it: `file:var/m6`.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
}

/// What is asked.
pub enum Request {
    /// `new` takes the place of `old`, an index, UUID or name.
    Replace { old: String, new: NewMember },
    /// A member that was away is there.
    Attach { new: NewMember },
}

/// A member that is on its way into the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coming {
    /// Its place.
    pub index: u8,
    /// Its identity.
    pub uuid: Uuid,
}

/// Why a device may not take a place.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    #[error("no member {name:?}: give its index, UUID or name as pool show has it")]
    NoSuchMember { name: String },
    #[error("{name:?} names several members: give an index or UUID")]
    Ambiguous { name: String },
    #[error("{name}: {size_bytes} bytes are too few; a member of this pool needs {needed_bytes}")]
    TooSmall { name: String, size_bytes: u64, needed_bytes: u64 },
    #[error("{name}: not blank: {found}. Nothing was written")]
    NotBlank { name: String, found: FoundText },
    #[error("{name}: holds no member of this pool: {found}")]
    NotOurs { name: String, found: FoundText },
    #[error("{name}: was a member of this pool and has been replaced. Blank it to use it again; nothing was written")]
    Former { name: String },
    #[error("{name}: is member {index} of this pool")]
    Other { name: String, index: u8 },
    #[error("{name}: member {index} is in the set already")]
    Active { name: String, index: u8 },
    #[error("member {index} is being replaced already")]
    UnderWay { index: u8 },
    #[error(
        "{count} members that were replaced may still hold keys of volumes deleted since: state which of them are destroyed \
         (offloadctl key receipts --member-destroyed UUID), then replace more"
    )]
    TooManyDeparted { count: usize },
    #[error("the pool is closed")]
    Closed,
}

/// Carries out a request; what it begins goes on afterwards.
pub async fn serve(
    core: Rc<Core>,
    superblocks: Rc<Superblocks>,
    request: Request,
    reply: oneshot::Sender<Result<Coming, MemberError>>,
) {
    let result = match request {
        Request::Replace { old, new } => replace(&core, &superblocks, &old, new).await,
        Request::Attach { new } => attach(&core, &superblocks, new).await,
    };
    let result = result.map(|comer| {
        let coming = Coming { index: comer.place as u8, uuid: comer.identity.uuid };
        core.shared.rebuild.ask(comer);
        coming
    });
    // Whoever asked may have given up.
    let _ = reply.send(result);
}

async fn replace(core: &Core, superblocks: &Superblocks, old: &str, new: NewMember) -> Result<Comer, MemberError> {
    let place = find(core, old)?;
    if core.shared.receipts.is_crowded() {
        return Err(MemberError::TooManyDeparted { count: DEPARTED_KEPT_MAX });
    }
    let found = look(core, &new).await;
    let state = superblocks.current().await;
    check_size(&state, &new)?;
    let index = place as u8;
    let there = state.replacements[place].map(|replacement| replacement.uuid);
    let asked = core.shared.rebuild.is_asked(place);
    match found {
        // One that was asked for before a restart, and is not there any more, gives way.
        // What is found beside a request under way may be what that one has begun to write.
        Found::Blank | Found::Torn | Found::Foreign { .. } if asked => Err(MemberError::UnderWay { index }),
        Found::Blank => {
            let mut bytes = [0; 16];
            core.env().random(&mut bytes);
            let uuid = uuid::Builder::from_random_bytes(bytes).into_uuid();
            Ok(comer(place, uuid, new, true, true))
        }
        Found::Member(block) if block.pool == state.pool => {
            if there == Some(block.member) && !asked {
                return Ok(comer(place, block.member, new, true, false));
            }
            Err(match place_of(&state, block.member) {
                Some((_, true)) => MemberError::UnderWay { index },
                Some((index, _)) => MemberError::Other { name: new.name, index: index as u8 },
                None => MemberError::Former { name: new.name },
            })
        }
        found => Err(MemberError::NotBlank { name: new.name, found: FoundText::of(found) }),
    }
}

async fn attach(core: &Core, superblocks: &Superblocks, new: NewMember) -> Result<Comer, MemberError> {
    let found = look(core, &new).await;
    let state = superblocks.current().await;
    let Found::Member(block) = found else {
        return Err(MemberError::NotOurs { name: new.name, found: FoundText::of(found) });
    };
    if block.pool != state.pool {
        let found = FoundText::of(Found::Member(block));
        return Err(MemberError::NotOurs { name: new.name, found });
    }
    check_size(&state, &new)?;
    let Some((place, replacing)) = place_of(&state, block.member) else {
        return Err(MemberError::Former { name: new.name });
    };
    if !replacing && core.shared.set.contains(place) {
        return Err(MemberError::Active { name: new.name, index: place as u8 });
    }
    if replacing && core.shared.rebuild.is_asked(place) {
        return Err(MemberError::UnderWay { index: place as u8 });
    }
    Ok(comer(place, block.member, new, replacing, false))
}

fn comer(place: usize, uuid: Uuid, new: NewMember, replacing: bool, blank: bool) -> Comer {
    let identity = Identity { uuid, slot: Some(new.slot), name: Some(new.name), size_bytes: new.size_bytes };
    Comer { place, identity, replacing, blank }
}

async fn look(core: &Core, new: &NewMember) -> Found {
    let input =
        MemberInput { name: new.name.clone(), size_bytes: Some(new.size_bytes), can_grow: false, unopened: None };
    probe_one(core.env(), new.slot, &input).await
}

fn check_size(state: &Superblock, new: &NewMember) -> Result<(), MemberError> {
    let (name, size_bytes) = (new.name.clone(), new.size_bytes);
    let needed_bytes = state.segment_offset(state.segments);
    if size_bytes < needed_bytes { Err(MemberError::TooSmall { name, size_bytes, needed_bytes }) } else { Ok(()) }
}

/// The place that a member belongs to, and whether it is to replace another there.
fn place_of(state: &Superblock, uuid: Uuid) -> Option<(usize, bool)> {
    let own = state.members.iter().position(|member| member.uuid == uuid).map(|place| (place, false));
    let is = |replacement: &Option<super::superblock::Replacement>| replacement.is_some_and(|there| there.uuid == uuid);
    own.or_else(|| state.replacements.iter().position(is).map(|place| (place, true)))
}

/// The place of a member by index, UUID or name.
fn find(core: &Core, name: &str) -> Result<usize, MemberError> {
    let places = core.shared.set.places();
    if let Ok(index) = usize::from_str(name) {
        return (index < places.len()).then_some(index).ok_or_else(|| MemberError::NoSuchMember { name: name.into() });
    }
    let is = |identity: &Identity| {
        identity.name.as_deref() == Some(name) || Uuid::from_str(name).is_ok_and(|uuid| uuid == identity.uuid)
    };
    let mut found = places.iter().enumerate().filter(|(_, member)| is(&member.identity())).map(|(place, _)| place);
    match (found.next(), found.next()) {
        (Some(place), None) => Ok(place),
        (Some(_), Some(_)) => Err(MemberError::Ambiguous { name: name.into() }),
        (None, _) => Err(MemberError::NoSuchMember { name: name.into() }),
    }
}
