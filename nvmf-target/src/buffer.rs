//! I/O buffers: one owner at a time, given back to their pool on drop.
//!
//! Owns the hand-over between a pool's memory and the code that fills it. Must not know which pool it is:
//! a heap, the software pool and DPDK's mempool all stand behind [`BufferHome`]. Invariant: the memory of an
//! [`IoBuf`] has exactly one owner until it is dropped, and goes back exactly once.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Every buffer starts on this boundary, in bytes, so that direct I/O on 4 KiB sectors can use it.
pub const BUFFER_ALIGN_BYTES: usize = 4096;

/// Where a buffer's memory came from.
///
/// # Safety
/// Memory handed out through [`IoBuf::from_raw`] stays valid and exclusively the `IoBuf`'s until
/// [`BufferHome::give_back`] is called with the same pointer and capacity.
pub unsafe trait BufferHome: Send + Sync {
    /// Takes the memory back. Called once per buffer, on any thread.
    fn give_back(&self, start: NonNull<u8>, capacity_bytes: usize);
}

/// A source of buffers of bounded total size.
pub trait BufferPool: Send + Sync {
    /// A buffer of `len_bytes` (its capacity may be larger), or `None` when none is free now: the caller
    /// waits and holds nothing meanwhile. The contents are unspecified but initialised.
    fn take(&self, len_bytes: usize) -> Option<IoBuf>;
    /// The longest buffer this pool can ever give, in bytes.
    fn largest_bytes(&self) -> usize;
}

/// An owned, 4 KiB-aligned byte buffer.
pub struct IoBuf {
    start: NonNull<u8>,
    len_bytes: usize,
    capacity_bytes: usize,
    home: Arc<dyn BufferHome>,
}

// SAFETY: an IoBuf owns its memory exclusively (contract of BufferHome), so moving it moves the only access.
unsafe impl Send for IoBuf {}
// SAFETY: a shared IoBuf only gives out shared slices.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// Wraps memory that `home` hands out.
    ///
    /// # Safety
    /// `start` points to `capacity_bytes` initialised bytes aligned to [`BUFFER_ALIGN_BYTES`], owned by nobody
    /// else until `home.give_back(start, capacity_bytes)` is called; `len_bytes <= capacity_bytes`.
    pub unsafe fn from_raw(
        start: NonNull<u8>,
        len_bytes: usize,
        capacity_bytes: usize,
        home: Arc<dyn BufferHome>,
    ) -> Self {
        assert!(len_bytes <= capacity_bytes, "buffer longer than its memory");
        Self { start, len_bytes, capacity_bytes, home }
    }

    /// A zeroed buffer on the heap: for the control plane and for tests.
    pub fn heap(len_bytes: usize) -> Self {
        let capacity_bytes = len_bytes.max(1).next_multiple_of(BUFFER_ALIGN_BYTES);
        let layout = heap_layout(capacity_bytes);
        // SAFETY: the layout's size is at least BUFFER_ALIGN_BYTES, so not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        // SAFETY: freshly allocated, zeroed, aligned by the layout, and owned by this IoBuf alone; Heap frees it
        // with the same layout.
        unsafe { Self::from_raw(start, len_bytes, capacity_bytes, Arc::new(Heap)) }
    }

    /// A heap buffer with a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buf = Self::heap(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// How many bytes the memory holds; `len()` can be set up to it.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// Changes the visible length.
    ///
    /// # Panics
    /// If `len_bytes` is over the capacity.
    pub fn set_len(&mut self, len_bytes: usize) {
        assert!(len_bytes <= self.capacity_bytes, "buffer longer than its memory");
        self.len_bytes = len_bytes;
    }
}

impl Deref for IoBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: start..start+capacity is initialised and ours (from_raw's contract); len <= capacity.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in deref, and &mut self makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl Drop for IoBuf {
    fn drop(&mut self) {
        self.home.give_back(self.start, self.capacity_bytes);
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({} of {} bytes)", self.len_bytes, self.capacity_bytes)
    }
}

fn heap_layout(capacity_bytes: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(capacity_bytes, BUFFER_ALIGN_BYTES).expect("a buffer's size fits isize")
}

struct Heap;

// SAFETY: heap memory is unique per allocation and is freed only in give_back.
unsafe impl BufferHome for Heap {
    fn give_back(&self, start: NonNull<u8>, capacity_bytes: usize) {
        // SAFETY: allocated in IoBuf::heap with this very layout; called once, from drop.
        unsafe { std::alloc::dealloc(start.as_ptr(), heap_layout(capacity_bytes)) }
    }
}

/// A pool without a bound, on the heap: for the control plane's small transfers and for tests.
#[derive(Debug, Clone, Copy)]
pub struct HeapPool {
    /// The longest buffer it gives, in bytes.
    pub largest_bytes: usize,
}

impl BufferPool for HeapPool {
    fn take(&self, len_bytes: usize) -> Option<IoBuf> {
        (len_bytes <= self.largest_bytes).then(|| IoBuf::heap(len_bytes))
    }
    fn largest_bytes(&self) -> usize {
        self.largest_bytes
    }
}

/// A pool of bounded size on the heap, which counts what is out: for plain threads, and for tests of what happens
/// when nothing is left.
pub struct BoundedHeapPool {
    home: Arc<CountedHeap>,
    limit_bytes: usize,
    largest_bytes: usize,
}

struct CountedHeap {
    out_bytes: AtomicUsize,
}

impl BoundedHeapPool {
    /// At most `limit_bytes` out at a time (each buffer counts its capacity), at most `largest_bytes` in one buffer.
    pub fn new(limit_bytes: usize, largest_bytes: usize) -> Self {
        Self { home: Arc::new(CountedHeap { out_bytes: AtomicUsize::new(0) }), limit_bytes, largest_bytes }
    }

    /// Bytes that are out now.
    pub fn out_bytes(&self) -> usize {
        self.home.out_bytes.load(Ordering::SeqCst)
    }
}

impl BufferPool for BoundedHeapPool {
    fn take(&self, len_bytes: usize) -> Option<IoBuf> {
        if len_bytes > self.largest_bytes {
            return None;
        }
        let capacity_bytes = len_bytes.max(1).next_multiple_of(BUFFER_ALIGN_BYTES);
        let add = |out: usize| out.checked_add(capacity_bytes).filter(|out| *out <= self.limit_bytes);
        self.home.out_bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).ok()?;
        let layout = heap_layout(capacity_bytes);
        // SAFETY: the layout's size is at least BUFFER_ALIGN_BYTES, so not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        // SAFETY: freshly allocated, zeroed, aligned by the layout, and owned by this IoBuf alone; CountedHeap frees
        // it with the same layout.
        Some(unsafe { IoBuf::from_raw(start, len_bytes, capacity_bytes, Arc::clone(&self.home) as _) })
    }
    fn largest_bytes(&self) -> usize {
        self.largest_bytes
    }
}

// SAFETY: memory comes from BoundedHeapPool::take alone, is unique per allocation and is freed only in give_back.
unsafe impl BufferHome for CountedHeap {
    fn give_back(&self, start: NonNull<u8>, capacity_bytes: usize) {
        // SAFETY: allocated in BoundedHeapPool::take with this very layout; called once, from drop.
        unsafe { std::alloc::dealloc(start.as_ptr(), heap_layout(capacity_bytes)) }
        self.out_bytes.fetch_sub(capacity_bytes, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bounded_pool_gives_no_more_than_its_limit_and_counts_what_is_out() {
        let pool = BoundedHeapPool::new(3 * BUFFER_ALIGN_BYTES, 2 * BUFFER_ALIGN_BYTES);
        assert!(pool.take(2 * BUFFER_ALIGN_BYTES + 1).is_none(), "over the largest");
        let first = pool.take(BUFFER_ALIGN_BYTES + 1);
        assert_eq!(first.as_ref().map(|b| b.len()), Some(BUFFER_ALIGN_BYTES + 1));
        assert!(pool.take(BUFFER_ALIGN_BYTES + 1).is_none(), "one left");
        assert!(pool.take(BUFFER_ALIGN_BYTES).is_some());
        assert_eq!(pool.out_bytes(), 2 * BUFFER_ALIGN_BYTES);
        drop(first);
        assert_eq!(pool.out_bytes(), 0);
    }

    #[test]
    fn heap_buffers_are_aligned_and_zeroed() {
        let buf = IoBuf::heap(5000);
        assert_eq!(buf.len(), 5000);
        assert_eq!(buf.capacity_bytes(), 8192);
        assert_eq!(buf.as_ptr() as usize % BUFFER_ALIGN_BYTES, 0);
        assert!(buf.iter().all(|&b| b == 0));
    }
}
