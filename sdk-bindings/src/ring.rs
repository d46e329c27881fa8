//! rte_ring with one producer and one consumer: pointers from one thread to another.
//!
//! Owns the ring and, through its two ends, the right to use each side from one thread at a time. Must not know what
//! the pointers mean. Invariant: a pointer comes out exactly as often as it went in, in order; what is left when
//! both ends are gone is handed to the `leftover` function.

use std::ffi::{CString, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::eal::Eal;
use crate::ffi;

/// No memory (or no more names) for a ring.
#[derive(Debug, thiserror::Error)]
#[error("DPDK could not make a ring of {slots} slots: {source}")]
pub struct RingError {
    /// Slots asked for.
    pub slots: u32,
    /// DPDK's reason.
    pub source: io::Error,
}

/// What the ring carries: pointers that mean something to both ends alone.
pub type Item = NonNull<c_void>;

struct Ring {
    ring: NonNull<c_void>,
    leftover: fn(Item),
}

// SAFETY: rte_ring is made for use from several threads; which of them is the producer and which the consumer, the
// two unclonable ends below say.
unsafe impl Send for Ring {}
// SAFETY: as for Send: `Producer` calls only enqueue functions, `Consumer` only dequeue functions.
unsafe impl Sync for Ring {}

impl Drop for Ring {
    fn drop(&mut self) {
        let mut item = std::ptr::null_mut();
        // SAFETY: both ends are gone, so this thread is the only user; one slot is written for n = 1.
        while unsafe { ffi::sluice_ring_dequeue_burst(self.ring.as_ptr(), &mut item, 1) } == 1 {
            if let Some(item) = Item::new(item) {
                (self.leftover)(item);
            }
        }
        // SAFETY: created by sluice_ring_create, freed only here, with no user left.
        unsafe { ffi::sluice_ring_free(self.ring.as_ptr()) }
    }
}

/// The end that puts pointers in.
pub struct Producer(Arc<Ring>);

/// The end that takes pointers out.
pub struct Consumer(Arc<Ring>);

/// A ring of exactly `slots` slots. `leftover` disposes of what is still inside when both ends are gone.
pub fn ring(_eal: &'static Eal, slots: u32, leftover: fn(Item)) -> Result<(Producer, Consumer), RingError> {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    let name = format!("sluice_r{}", NAMES.fetch_add(1, Ordering::Relaxed));
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: the name is NUL-terminated and alive during the call; EAL has started.
    let ring = unsafe { ffi::sluice_ring_create(name.as_ptr(), slots) };
    let ring = NonNull::new(ring).ok_or_else(|| RingError { slots, source: last_error() })?;
    let ring = Arc::new(Ring { ring, leftover });
    Ok((Producer(ring.clone()), Consumer(ring)))
}

/// DPDK's errno for the last call on this thread.
pub(crate) fn last_error() -> io::Error {
    // SAFETY: reads a thread-local of DPDK.
    io::Error::from_raw_os_error(unsafe { ffi::sluice_errno() })
}

impl Producer {
    /// Puts in as many of `items` as there is room for, from the first on, and says how many.
    pub fn push_burst(&mut self, items: &[Item]) -> usize {
        let n = u32::try_from(items.len()).unwrap_or(u32::MAX);
        // SAFETY: `&mut self` on the only producer; NonNull<c_void> has a pointer's layout, and n of them are
        // readable.
        unsafe { ffi::sluice_ring_enqueue_burst(self.0.ring.as_ptr(), items.as_ptr().cast(), n) as usize }
    }

    /// How many pointers it can hold.
    pub fn capacity(&self) -> usize {
        // SAFETY: the ring is alive.
        unsafe { ffi::sluice_ring_capacity(self.0.ring.as_ptr()) as usize }
    }

    /// Whether the other end is gone.
    pub fn is_closed(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

impl Consumer {
    /// Appends up to `most` pointers to `items`, and says how many.
    pub fn pop_burst(&mut self, items: &mut Vec<Item>, most: usize) -> usize {
        items.reserve(most);
        let spare = items.spare_capacity_mut();
        let n = u32::try_from(most.min(spare.len())).unwrap_or(u32::MAX);
        // SAFETY: `&mut self` on the only consumer; n slots are writable.
        let taken =
            unsafe { ffi::sluice_ring_dequeue_burst(self.0.ring.as_ptr(), spare.as_mut_ptr().cast(), n) as usize };
        // SAFETY: the first `taken` spare slots were written, with pointers that the producer had as NonNull.
        unsafe { items.set_len(items.len() + taken) };
        taken
    }

    /// Whether nothing is inside now.
    pub fn is_empty(&self) -> bool {
        // SAFETY: the ring is alive.
        unsafe { ffi::sluice_ring_count(self.0.ring.as_ptr()) == 0 }
    }
}
