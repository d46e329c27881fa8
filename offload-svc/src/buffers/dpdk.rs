//! Slots in DPDK's memory: an rte_mempool for the reactors, a side queue for every other thread.
//!
//! Owns both. Must not know who uses the slots. Invariant: only reactors touch the mempool; a thread that can be
//! preempted anywhere puts slots into the side queue, from which reactors take first.

use std::ptr::NonNull;

use crossbeam_queue::ArrayQueue;
use nvmf_target::buffer::BUFFER_ALIGN_BYTES;
use sdk_bindings::eal::Eal;
use sdk_bindings::mempool::{Mempool, MempoolError};

use super::on_reactor;
use super::store::Store;

pub(super) struct MempoolStore {
    pool: Mempool,
    /// As long as the mempool is large: it never refuses.
    returned: ArrayQueue<usize>,
}

impl MempoolStore {
    pub(super) fn new(eal: &'static Eal, count: usize, slot_bytes: usize) -> Result<Self, MempoolError> {
        let count = u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let pool = Mempool::new(eal, count, slot_bytes, BUFFER_ALIGN_BYTES as u32)?;
        Ok(Self { pool, returned: ArrayQueue::new(count as usize) })
    }
}

// SAFETY: the mempool's slots are disjoint, zeroed at the start, aligned, and live as long as the pool. A slot that
// was taken is in neither the mempool nor the queue, and `put` brings it into one of them.
unsafe impl Store for MempoolStore {
    fn take(&self) -> Option<usize> {
        if let Some(slot) = self.returned.pop() {
            return Some(slot);
        }
        if on_reactor() { self.pool.take() } else { None }
    }

    unsafe fn put(&self, slot: usize) {
        if on_reactor() {
            // SAFETY: the caller's promise.
            unsafe { self.pool.put(slot) }
        } else {
            assert!(self.returned.push(slot).is_ok(), "a slot came back twice");
        }
    }

    fn start_of(&self, slot: usize) -> NonNull<u8> {
        self.pool.start_of(slot)
    }

    fn slot_at(&self, start: NonNull<u8>) -> Option<usize> {
        self.pool.slot_at(start)
    }
}
