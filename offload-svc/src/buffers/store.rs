//! Where slots of one size lie: the trait, and the implementation on ordinary memory.
//!
//! Owns the slots' memory and the set of free ones. Must not know who uses them. Invariant: `take` gives a slot at
//! most once until `put`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crossbeam_queue::ArrayQueue;
use nvmf_target::buffer::BUFFER_ALIGN_BYTES;

/// A set of equal slots of memory. Any thread may call it.
///
/// # Safety
/// `start_of(slot)` points to the slot's bytes, initialised and aligned to [`BUFFER_ALIGN_BYTES`], valid as long as
/// the store lives; different slots don't overlap; a slot that `take` gave is given to nobody else until `put`.
pub(super) unsafe trait Store: Send + Sync {
    /// Takes a free slot.
    fn take(&self) -> Option<usize>;
    /// Puts a slot back.
    ///
    /// # Safety
    /// It was taken, is put back once, and nobody uses its memory any more.
    unsafe fn put(&self, slot: usize);
    /// Where a slot begins.
    fn start_of(&self, slot: usize) -> NonNull<u8>;
    /// Which slot begins at `start`.
    fn slot_at(&self, start: NonNull<u8>) -> Option<usize>;
}

/// Slots in one heap allocation.
pub(super) struct HeapStore {
    memory: NonNull<u8>,
    layout: Layout,
    slot_bytes: usize,
    free: ArrayQueue<usize>,
}

// SAFETY: the memory is only reached through slots, each of which has one owner (the store's contract).
unsafe impl Send for HeapStore {}
// SAFETY: as for Send; `free` locks nothing and is made for any thread.
unsafe impl Sync for HeapStore {}

impl HeapStore {
    pub(super) fn new(count: usize, slot_bytes: usize) -> Option<Self> {
        let bytes = count.checked_mul(slot_bytes).filter(|bytes| *bytes > 0)?;
        let layout = Layout::from_size_align(bytes, BUFFER_ALIGN_BYTES).ok()?;
        // SAFETY: the layout's size is not zero.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let free = ArrayQueue::new(count);
        for slot in 0..count {
            // The queue has room for every slot.
            let _ = free.push(slot);
        }
        Some(Self { memory, layout, slot_bytes, free })
    }
}

// SAFETY: slots are disjoint pieces of one zeroed, aligned allocation (slot_bytes is a multiple of the alignment)
// that lives as long as the store; `free` holds each slot at most once, since `put`'s caller promises so.
unsafe impl Store for HeapStore {
    fn take(&self) -> Option<usize> {
        self.free.pop()
    }

    unsafe fn put(&self, slot: usize) {
        assert!(self.free.push(slot).is_ok(), "a slot came back twice");
    }

    fn start_of(&self, slot: usize) -> NonNull<u8> {
        assert!(slot < self.free.capacity(), "no such slot");
        // SAFETY: slot < count, so the offset lies inside the allocation.
        unsafe { self.memory.add(slot * self.slot_bytes) }
    }

    fn slot_at(&self, start: NonNull<u8>) -> Option<usize> {
        let offset = (start.as_ptr() as usize).checked_sub(self.memory.as_ptr() as usize)?;
        let slot = offset / self.slot_bytes;
        (offset.is_multiple_of(self.slot_bytes) && slot < self.free.capacity()).then_some(slot)
    }
}

impl Drop for HeapStore {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; every slot's owner holds on to the store, so none is left.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}
