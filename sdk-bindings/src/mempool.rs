//! rte_mempool as a bounded set of equal slots of memory, each aligned as asked.
//!
//! Owns the slots' memory (a [`Zone`]) and a mempool of small objects, each of which stands for one slot: so slots
//! lie back to back and page-aligned, which objects of a mempool itself can't. Must not know what slots hold.
//! Invariant: a slot is out or in; taking gives each at most once until it is put back.

use std::ffi::{CString, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::eal::Eal;
use crate::ffi;
use crate::memory::{OutOfMemory, Zone};
use crate::ring::last_error;

/// Why there is no mempool.
#[derive(Debug, thiserror::Error)]
pub enum MempoolError {
    /// No memory for the slots.
    #[error("no memory for {count} buffers of {slot_bytes} bytes")]
    Slots {
        /// Slots asked for.
        count: u32,
        /// Bytes each.
        slot_bytes: usize,
        /// What EAL said.
        source: OutOfMemory,
    },
    /// No memory (or name) for the mempool itself.
    #[error("DPDK could not make a mempool of {count} objects: {source}")]
    Objects {
        /// Objects asked for.
        count: u32,
        /// DPDK's reason.
        source: io::Error,
    },
}

/// A pool of `count` slots of `slot_bytes` each.
pub struct Mempool {
    pool: NonNull<c_void>,
    /// The object that stands for slot `i`.
    objects: Vec<NonNull<c_void>>,
    zone: Zone,
    slot_bytes: usize,
}

// SAFETY: the mempool is multi-producer, multi-consumer (ring_mt_rts, no per-lcore cache), made for any thread; the
// rest is immutable.
unsafe impl Send for Mempool {}
// SAFETY: as for Send.
unsafe impl Sync for Mempool {}

impl Mempool {
    /// Makes a pool. The slots are zeroed and aligned to `align`, which must divide `slot_bytes`.
    pub fn new(eal: &'static Eal, count: u32, slot_bytes: usize, align: u32) -> Result<Self, MempoolError> {
        static NAMES: AtomicU64 = AtomicU64::new(0);
        assert!(slot_bytes.is_multiple_of(align as usize), "slots keep their alignment");
        let name = format!("sluice_m{}", NAMES.fetch_add(1, Ordering::Relaxed));
        let bytes = slot_bytes.saturating_mul(count as usize);
        let zone =
            Zone::new(eal, &name, bytes, align).map_err(|source| MempoolError::Slots { count, slot_bytes, source })?;
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: the name is NUL-terminated and alive during the call; EAL has started.
        let pool = unsafe { ffi::sluice_mempool_create(name.as_ptr(), count, size_of::<u32>() as u32) };
        let pool = NonNull::new(pool).ok_or_else(|| MempoolError::Objects { count, source: last_error() })?;
        let mut this = Self { pool, objects: Vec::with_capacity(count as usize), zone, slot_bytes };
        // SAFETY: `number` gets each object once, with `objects` as its context, during the call alone.
        unsafe { ffi::sluice_mempool_walk(pool.as_ptr(), number, (&raw mut this.objects).cast()) };
        assert_eq!(this.objects.len(), count as usize, "one object a slot");
        Ok(this)
    }

    /// Takes a slot, if one is in.
    pub fn take(&self) -> Option<usize> {
        let mut object = std::ptr::null_mut();
        // SAFETY: one pointer is written when it returns 0.
        if unsafe { ffi::sluice_mempool_get(self.pool.as_ptr(), &mut object) } != 0 {
            return None;
        }
        // SAFETY: every object of this pool holds its slot's number (written by `number`), and this thread alone
        // holds the object now.
        let slot = unsafe { object.cast::<u32>().read() } as usize;
        assert!(slot < self.objects.len(), "the object was overwritten");
        Some(slot)
    }

    /// Where a slot begins.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn start_of(&self, slot: usize) -> NonNull<u8> {
        assert!(slot < self.objects.len(), "no such slot");
        // SAFETY: slot < count, so the offset lies inside the zone.
        unsafe { self.zone.start().add(slot * self.slot_bytes) }
    }

    /// Which slot begins at `start`, if one does.
    pub fn slot_at(&self, start: NonNull<u8>) -> Option<usize> {
        let offset = (start.as_ptr() as usize).checked_sub(self.zone.start().as_ptr() as usize)?;
        let slot = offset / self.slot_bytes;
        (offset.is_multiple_of(self.slot_bytes) && slot < self.objects.len()).then_some(slot)
    }

    /// Puts a slot back.
    ///
    /// # Safety
    /// The slot was taken from this pool, is put back once, and nobody uses its memory any more.
    ///
    /// # Panics
    /// If there is no such slot.
    pub unsafe fn put(&self, slot: usize) {
        let object = self.objects[slot];
        // SAFETY: the object belongs to this pool and is out (the caller's promise).
        unsafe { ffi::sluice_mempool_put(self.pool.as_ptr(), object.as_ptr()) }
    }

    /// How many slots are in now.
    pub fn available(&self) -> usize {
        // SAFETY: the pool is alive.
        unsafe { ffi::sluice_mempool_available(self.pool.as_ptr()) as usize }
    }

    /// How many slots there are.
    pub fn count(&self) -> usize {
        self.objects.len()
    }
}

impl Drop for Mempool {
    fn drop(&mut self) {
        // SAFETY: created by sluice_mempool_create, freed only here, with no user left.
        unsafe { ffi::sluice_mempool_free(self.pool.as_ptr()) }
    }
}

/// Writes its slot's number into an object and notes the object.
extern "C" fn number(objects: *mut c_void, object: *mut c_void, _index: u32) {
    // SAFETY: `new` passes its own Vec, which nobody else touches during the walk.
    let objects = unsafe { &mut *objects.cast::<Vec<NonNull<c_void>>>() };
    let Some(object) = NonNull::new(object) else { return };
    // SAFETY: each object has room for a u32, aligned to a cache line, and is in the pool, so unused.
    unsafe { object.cast::<u32>().write(objects.len() as u32) };
    objects.push(object);
}
