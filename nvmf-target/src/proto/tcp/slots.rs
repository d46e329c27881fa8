//! The outstanding commands of a queue.
//!
//! Invariant: a slot is taken from a command's arrival until its answer is queued; no two taken slots have the same
//! command id.

use std::time::Instant;

use super::Slot;
use super::transfer::Transfer;
use crate::wire::CommandId;

/// One outstanding command.
#[derive(Debug)]
pub(super) struct Outstanding {
    pub(super) cid: CommandId,
    /// The data that is being fetched for it.
    pub(super) transfer: Option<Transfer>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Option<Outstanding>>,
    free: Vec<u16>,
    /// One bit for each of the 65,536 command ids.
    live_ids: Box<[u64]>,
    taken: usize,
}

impl Slots {
    pub(super) fn new(entries: u16) -> Self {
        let mut slots = Self { slots: Vec::new(), free: Vec::new(), live_ids: vec![0; 1024].into(), taken: 0 };
        slots.grow(entries);
        slots
    }

    /// Makes it hold `entries` commands; those that are there stay.
    pub(super) fn grow(&mut self, entries: u16) {
        let have = self.slots.len() as u16;
        if entries > have {
            self.slots.resize_with(usize::from(entries), || None);
            // Lowest first: a shallow queue touches little memory.
            self.free.splice(0..0, (have..entries).rev());
        }
    }

    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    pub(super) fn is_live(&self, cid: CommandId) -> bool {
        let (word, bit) = live_bit(cid);
        self.live_ids[word] & bit != 0
    }

    /// A slot for a command whose id is not live; `None` when all are taken.
    pub(super) fn take(&mut self, cid: CommandId) -> Option<Slot> {
        debug_assert!(!self.is_live(cid), "the caller checks");
        let index = self.free.pop()?;
        let (word, bit) = live_bit(cid);
        self.live_ids[word] |= bit;
        self.taken += 1;
        self.slots[usize::from(index)] = Some(Outstanding { cid, transfer: None });
        Some(Slot(index))
    }

    pub(super) fn get(&self, slot: Slot) -> Option<&Outstanding> {
        self.slots.get(usize::from(slot.0))?.as_ref()
    }

    pub(super) fn get_mut(&mut self, slot: Slot) -> Option<&mut Outstanding> {
        self.slots.get_mut(usize::from(slot.0))?.as_mut()
    }

    /// Ends the slot's command: its id may be used again.
    pub(super) fn free(&mut self, slot: Slot) -> Option<Outstanding> {
        let outstanding = self.slots.get_mut(usize::from(slot.0))?.take()?;
        let (word, bit) = live_bit(outstanding.cid);
        self.live_ids[word] &= !bit;
        self.free.push(slot.0);
        self.taken -= 1;
        Some(outstanding)
    }

    /// When the oldest transfer began.
    pub(super) fn oldest_transfer(&self) -> Option<Instant> {
        self.slots.iter().flatten().filter_map(|o| o.transfer.as_ref()).map(Transfer::began).min()
    }

    /// Drops every transfer's buffer: the connection is over.
    pub(super) fn drop_transfers(&mut self) {
        for outstanding in self.slots.iter_mut().flatten() {
            outstanding.transfer = None;
        }
    }
}

fn live_bit(cid: CommandId) -> (usize, u64) {
    (usize::from(cid.0 / 64), 1 << (cid.0 % 64))
}
