//! Which members may still hold which shields.
//!
//! Owns the account of shields by member. Must not know receipts or how superblocks are written. Invariant: a floor is never
//! too high: no superblock of the member, in either slot, has a shield with a lower number.
//!
//! Shields count up by one with each checkpoint that is published. A member has two superblocks, so a shield is gone from it
//! once two publications with later ones are durable there. A member that leaves keeps what it has; what is told of it then
//! is the lower bound of that moment.

use std::sync::{Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use super::codec::{CutShort, Reader, Writer};
use super::superblock::Superblock;

/// Members that left for good since the last checkpoint which a superblock can name.
pub const DEPARTED_MAX: usize = 8;
/// Bytes of one in a superblock.
pub const DEPARTED_BYTES: usize = 48;

/// A member that is no member any more: it was replaced, or given up while it was being filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departed {
    pub uuid: Uuid,
    /// Where it stood.
    pub place: u8,
    /// The last epoch in which it got a superblock.
    pub epoch: u64,
    /// Its shields have this number or a higher one.
    pub floor: u64,
    /// When it left, in Unix seconds.
    pub at_s: u64,
}

impl Departed {
    pub fn write(&self, out: &mut Writer) {
        out.bytes(self.uuid.as_bytes()).u64(self.epoch).u64(self.floor).u64(self.at_s).u8(self.place).bytes(&[0; 7]);
    }

    pub fn read(input: &mut Reader<'_>) -> Result<Self, CutShort> {
        let (uuid, epoch, floor) = (Uuid::from_bytes(input.array()?), input.u64()?, input.u64()?);
        let (at_s, place) = (input.u64()?, input.u8()?);
        input.bytes(7)?;
        Ok(Self { uuid, place, epoch, floor, at_s })
    }
}

/// Why a device may hold shields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Part of the set.
    Active,
    /// A member that is not in the set.
    Absent,
    /// On its way to another's place.
    Filling,
    /// See [`Departed`].
    Departed { at_s: u64 },
}

/// A device that may hold shields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    pub uuid: Uuid,
    pub place: u8,
    pub standing: Standing,
    /// The last epoch in which it got a superblock: what came up later it can't have.
    pub epoch: u64,
    /// Its shields have this number or a higher one.
    pub floor: u64,
}

impl From<Departed> for Holder {
    fn from(departed: Departed) -> Self {
        let Departed { uuid, place, epoch, floor, at_s } = departed;
        Self { uuid, place, standing: Standing::Departed { at_s }, epoch, floor }
    }
}

/// The account of one mount.
#[derive(Debug, Default)]
pub struct Shields(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// By slot: the number of the shield in it, on every member of the set.
    slots: [u64; 2],
    holders: Vec<Holder>,
    departed: Vec<Departed>,
}

impl Shields {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the newest superblock says of the set.
    pub fn start(&self, block: &Superblock) {
        self.lock().slots = [block.shield_floor; 2];
        self.refresh(block);
    }

    /// A publication is durable on every member that is still in the set.
    pub fn note_published(&self, generation: u64, number: u64) {
        self.lock().slots[(generation % 2) as usize] = number;
    }

    /// No member of the set has a shield with a lower number.
    pub fn floor(&self) -> u64 {
        let slots = self.lock().slots;
        slots[0].min(slots[1])
    }

    /// Who there is, as a superblock has it.
    pub fn refresh(&self, block: &Superblock) {
        let floor = self.floor();
        let members = block.members.iter().enumerate().map(|(place, member)| Holder {
            uuid: member.uuid,
            place: place as u8,
            standing: if member.active { Standing::Active } else { Standing::Absent },
            epoch: member.epoch,
            floor: if member.active { floor } else { member.shield_floor },
        });
        let filling = block.replacements.iter().enumerate().filter_map(|(place, replacement)| {
            let replacement = replacement.as_ref()?;
            Some(Holder {
                uuid: replacement.uuid,
                place: place as u8,
                standing: Standing::Filling,
                epoch: replacement.epoch,
                floor: replacement.shield_floor,
            })
        });
        let holders = members.chain(filling).collect();
        let mut inner = self.lock();
        (inner.holders, inner.departed) = (holders, block.departed.clone());
    }

    /// Members and those on their way.
    pub fn holders(&self) -> Vec<Holder> {
        self.lock().holders.clone()
    }

    /// Members that left for good and that no checkpoint may name yet.
    pub fn departed(&self) -> Vec<Departed> {
        self.lock().departed.clone()
    }
}
