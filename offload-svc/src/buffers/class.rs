//! Buffers of one size: taking, giving back, accounting.
//!
//! Owns the store's slots as [`IoBuf`]s, the queue of waiters, and how many each account holds. Must not know other sizes.
//! Invariant: a slot given back while someone waits goes to the longest waiter that may have it; nobody overtakes.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use nvmf_target::buffer::{BufferHome, IoBuf};

use super::share::{ACCOUNTS, AccountId, Distrusted};
use super::store::Store;
use super::wait::{Need, Waiters};
use super::{ClassSnapshot, Grant, SizeClass};

/// A size with fewer buffers is not shared out: whoever needs two at once would never get them.
const SHARED_FROM: usize = 3;

pub(super) struct Class {
    /// Itself: what a buffer holds on to as its home.
    this: Weak<Class>,
    bytes: usize,
    reserved: bool,
    store: Box<dyn Store>,
    /// Under which account each slot is out (its index + 1), or 0: a second give-back is a bug of ours that must not spread.
    out: Box<[AtomicU32]>,
    /// How many are out under each account.
    held: Box<[AtomicUsize]>,
    used: AtomicUsize,
    distrusted: Distrusted,
    pub(super) waiters: Waiters,
}

impl Class {
    pub(super) fn new(class: &SizeClass, store: Box<dyn Store>, distrusted: &Distrusted) -> Arc<Self> {
        let SizeClass { bytes, count, reserved } = *class;
        let out = (0..count).map(|_| AtomicU32::new(0)).collect();
        let held = (0..ACCOUNTS).map(|_| AtomicUsize::new(0)).collect();
        Arc::new_cyclic(|this| {
            let this = this.clone();
            let (used, waiters, distrusted) = (AtomicUsize::new(0), Waiters::default(), distrusted.clone());
            Self { this, bytes, reserved, store, out, held, used, distrusted, waiters }
        })
    }

    pub(super) fn is_reserved(&self) -> bool {
        self.reserved
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a buffer unless someone waits who may have it, and would be overtaken.
    pub(super) fn take(&self, account: AccountId, len_bytes: usize) -> Option<IoBuf> {
        if self.is_awaited() { None } else { self.take_one(account, len_bytes) }
    }

    /// Whether someone waits who may have what comes back next.
    pub(super) fn is_awaited(&self) -> bool {
        self.waiters.any() && self.waiters.has(|account| self.allows(account))
    }

    /// Whether it could ever give out so many at once.
    pub(super) fn holds(&self, count: usize) -> bool {
        self.out.len() >= count
    }

    /// Whether the account may have more, if there is any: while it holds fewer than are free. Asked once for all that are
    /// taken at once: asked again for the second of two, a pair could be refused for ever what one could have.
    pub(super) fn allows(&self, account: AccountId) -> bool {
        let unbounded = account == AccountId::SERVICE || self.out.len() < SHARED_FROM;
        let (free, held) = (self.free(), self.held[account.index()].load(Ordering::Relaxed));
        unbounded || held < free && (!self.distrusted.has(account) || free * 2 > self.out.len())
    }

    pub(super) fn held_by(&self, account: AccountId) -> usize {
        self.held[account.index()].load(Ordering::Relaxed)
    }

    pub(super) fn free(&self) -> usize {
        self.out.len().saturating_sub(self.used.load(Ordering::Relaxed))
    }

    fn take_one(&self, account: AccountId, len_bytes: usize) -> Option<IoBuf> {
        if !self.allows(account) {
            return None;
        }
        self.lend(self.store.take()?, account, len_bytes)
    }

    /// Takes all that a waiter needs, or nothing, if its account may have it. Only for `Waiters::serve`: what is put back here
    /// may have been missed by another taker meanwhile, who then waits and is served after this.
    pub(super) fn take_all(&self, account: AccountId, need: Need) -> Option<Grant> {
        if !self.allows(account) || self.free() < need.count {
            return None;
        }
        let first = self.store.take()?;
        let second = if need.count > 1 { self.store.take() } else { None };
        if need.count > 1 && second.is_none() {
            // SAFETY: taken just now, and nobody has been given it.
            unsafe { self.store.put(first) };
            return None;
        }
        Some([Some(first), second].map(|slot| slot.and_then(|slot| self.lend(slot, account, need.len_bytes))))
    }

    /// A slot that was taken, as a buffer under its account.
    fn lend(&self, slot: usize, account: AccountId, len_bytes: usize) -> Option<IoBuf> {
        let home = self.this.upgrade()?;
        let was_out = self.out[slot].swap(1 + account.index() as u32, Ordering::Acquire);
        assert!(was_out == 0, "a buffer was given out twice");
        self.used.fetch_add(1, Ordering::Relaxed);
        self.held[account.index()].fetch_add(1, Ordering::Relaxed);
        let start = self.store.start_of(slot);
        // SAFETY: the store's contract: `bytes` initialised, aligned bytes, ours alone until `give_back` puts the
        // slot back; the Arc keeps the store alive that long.
        Some(unsafe { IoBuf::from_raw(start, len_bytes, self.bytes, home) })
    }

    pub(super) fn snapshot(&self) -> ClassSnapshot {
        ClassSnapshot {
            bytes: self.bytes,
            count: self.out.len(),
            used: self.used.load(Ordering::Relaxed),
            waiting: self.waiters.len(),
        }
    }
}

// SAFETY: memory handed out in `lend` is the buffer's alone until `give_back` (the store's contract).
unsafe impl BufferHome for Class {
    fn give_back(&self, start: NonNull<u8>, _capacity_bytes: usize) {
        let slot = self.store.slot_at(start).expect("a buffer of this class");
        let was_out = self.out[slot].swap(0, Ordering::Release);
        assert!(was_out != 0, "a buffer came back twice");
        self.held[was_out as usize - 1].fetch_sub(1, Ordering::Relaxed);
        self.used.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the slot was out, comes back once, and its IoBuf is gone.
        unsafe { self.store.put(slot) };
        self.waiters.serve(self);
    }
}
