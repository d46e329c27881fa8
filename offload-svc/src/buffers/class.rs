//! Buffers of one size: taking, giving back, accounting.
//!
//! Owns the store's slots as [`IoBuf`]s and the queue of waiters. Must not know other sizes. Invariant: a slot given
//! back while someone waits goes to the longest waiter; nobody overtakes.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use nvmf_target::buffer::{BufferHome, IoBuf};

use super::store::Store;
use super::wait::Waiters;
use super::{ClassSnapshot, SizeClass};

pub(super) struct Class {
    /// Itself: what a buffer holds on to as its home.
    this: Weak<Class>,
    bytes: usize,
    reserved: bool,
    store: Box<dyn Store>,
    /// Whether each slot is out: a second give-back is a bug of ours that must not spread.
    out: Box<[AtomicBool]>,
    used: AtomicUsize,
    pub(super) waiters: Waiters,
}

impl Class {
    pub(super) fn new(class: &SizeClass, store: Box<dyn Store>) -> Arc<Self> {
        let SizeClass { bytes, count, reserved } = *class;
        let out = (0..count).map(|_| AtomicBool::new(false)).collect();
        Arc::new_cyclic(|this| {
            let this = this.clone();
            Self { this, bytes, reserved, store, out, used: AtomicUsize::new(0), waiters: Waiters::default() }
        })
    }

    pub(super) fn is_reserved(&self) -> bool {
        self.reserved
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a buffer unless someone waits, who would be overtaken.
    pub(super) fn take(&self, len_bytes: usize) -> Option<IoBuf> {
        if self.waiters.any() { None } else { self.take_free(len_bytes) }
    }

    /// Takes a buffer, whoever waits.
    pub(super) fn take_free(&self, len_bytes: usize) -> Option<IoBuf> {
        let home = self.this.upgrade()?;
        let slot = self.store.take()?;
        let was_out = self.out[slot].swap(true, Ordering::Acquire);
        assert!(!was_out, "a buffer was given out twice");
        self.used.fetch_add(1, Ordering::Relaxed);
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

// SAFETY: memory handed out in `take_free` is the buffer's alone until `give_back` (the store's contract).
unsafe impl BufferHome for Class {
    fn give_back(&self, start: NonNull<u8>, _capacity_bytes: usize) {
        let slot = self.store.slot_at(start).expect("a buffer of this class");
        let was_out = self.out[slot].swap(false, Ordering::Release);
        assert!(was_out, "a buffer came back twice");
        self.used.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the slot was out, comes back once, and its IoBuf is gone.
        unsafe { self.store.put(slot) };
        self.waiters.serve(self);
    }
}
