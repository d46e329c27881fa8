//! The software ring: an array of slots between two counters.
//!
//! Owns the slots. Must not know what messages mean, nor which atomics it runs on: `super::primitive` gives std's or
//! loom's. Invariant: slots in `head..tail` hold a message; only the producer moves `tail`, only the consumer `head`.

use std::collections::VecDeque;
use std::mem::MaybeUninit;

use super::primitive::{Arc, AtomicUsize, Ordering, UnsafeCell};

/// A counter on cache lines of its own: the two ends run on different cores.
#[repr(align(128))]
struct Padded(AtomicUsize);

struct Ring<T> {
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    /// Messages taken out so far, modulo 2^64.
    head: Padded,
    /// Messages put in so far, modulo 2^64.
    tail: Padded,
}

// SAFETY: a slot is reached by one end at a time (the counters hand it over), and each end is one thread at a time.
unsafe impl<T: Send> Send for Ring<T> {}
// SAFETY: as for Send.
unsafe impl<T: Send> Sync for Ring<T> {}

/// The end that messages go in at.
pub(super) struct Producer<T> {
    ring: Arc<Ring<T>>,
    tail: usize,
    /// The consumer's counter when it was last looked at: a lower bound.
    head: usize,
}

/// The end that messages come out at.
pub(super) struct Consumer<T> {
    ring: Arc<Ring<T>>,
    head: usize,
    /// The producer's counter when it was last looked at: a lower bound.
    tail: usize,
}

pub(super) fn ring<T>(slots: usize) -> (Producer<T>, Consumer<T>) {
    // A power of two, so that the counters may wrap; `capacity` is what was asked for or more.
    let slots = slots.max(1).next_power_of_two();
    let ring = Arc::new(Ring {
        slots: (0..slots).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
        head: Padded(AtomicUsize::new(0)),
        tail: Padded(AtomicUsize::new(0)),
    });
    (Producer { ring: ring.clone(), tail: 0, head: 0 }, Consumer { ring, head: 0, tail: 0 })
}

impl<T> Ring<T> {
    fn slot(&self, counter: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.slots[counter & (self.slots.len() - 1)]
    }
}

impl<T> Producer<T> {
    pub(super) fn capacity(&self) -> usize {
        self.ring.slots.len()
    }

    /// Free slots, at least; looks at the other end's counter only when fewer than `wanted` are known.
    fn room(&mut self, wanted: usize) -> usize {
        let known = self.capacity() - self.tail.wrapping_sub(self.head);
        if known >= wanted {
            return known;
        }
        // Acquire: the consumer's reads of the slots happen before we write them again.
        self.head = self.ring.head.0.load(Ordering::Acquire);
        self.capacity() - self.tail.wrapping_sub(self.head)
    }

    pub(super) fn push(&mut self, message: T) -> Result<(), T> {
        if self.room(1) == 0 {
            return Err(message);
        }
        self.fill(message);
        self.publish();
        Ok(())
    }

    pub(super) fn push_burst(&mut self, messages: &mut VecDeque<T>) -> usize {
        let n = self.room(messages.len()).min(messages.len());
        for message in messages.drain(..n) {
            self.fill(message);
        }
        if n > 0 {
            self.publish();
        }
        n
    }

    fn fill(&mut self, message: T) {
        self.ring.slot(self.tail).with_mut(|slot| {
            // SAFETY: `room` has shown this slot to be outside head..tail, so it holds no message, and the consumer
            // doesn't touch it until `publish`; only one thread is the producer (&mut self).
            unsafe { (*slot).write(message) };
        });
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        // Release: the slots' contents are seen by whoever sees the counter.
        self.ring.tail.0.store(self.tail, Ordering::Release);
    }
}

impl<T> Consumer<T> {
    fn waiting(&mut self, wanted: usize) -> usize {
        let known = self.tail.wrapping_sub(self.head);
        if known >= wanted {
            return known;
        }
        // Acquire: pairs with `publish`.
        self.tail = self.ring.tail.0.load(Ordering::Acquire);
        self.tail.wrapping_sub(self.head)
    }

    pub(super) fn pop_burst(&mut self, messages: &mut Vec<T>, most: usize) -> usize {
        let n = self.waiting(most).min(most);
        messages.reserve(n);
        for _ in 0..n {
            messages.push(self.take());
        }
        if n > 0 {
            // Release: our reads of the slots happen before the producer writes them again.
            self.ring.head.0.store(self.head, Ordering::Release);
        }
        n
    }

    fn take(&mut self) -> T {
        let message = self.ring.slot(self.head).with_mut(|slot| {
            // SAFETY: the slot is inside head..tail, so the producer has written it and doesn't touch it until head
            // moves; it is read once, since head moves past it.
            unsafe { (*slot).assume_init_read() }
        });
        self.head = self.head.wrapping_add(1);
        message
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ring.tail.0.load(Ordering::Acquire) == self.head
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        // Both ends are gone; nobody else looks at the counters.
        let tail = self.tail.0.load(Ordering::Acquire);
        let mut head = self.head.0.load(Ordering::Acquire);
        while head != tail {
            // SAFETY: slots in head..tail hold messages that nobody has taken.
            self.slot(head).with_mut(|slot| unsafe { (*slot).assume_init_drop() });
            head = head.wrapping_add(1);
        }
    }
}

impl<M: Send> super::Producer<M> for Producer<Box<M>> {
    fn push(&mut self, message: Box<M>) -> Result<(), Box<M>> {
        self.push(message)
    }

    fn push_burst(&mut self, messages: &mut VecDeque<Box<M>>) -> usize {
        self.push_burst(messages)
    }

    fn capacity(&self) -> usize {
        self.capacity()
    }
}

impl<M: Send> super::Consumer<M> for Consumer<Box<M>> {
    fn pop_burst(&mut self, messages: &mut Vec<Box<M>>, most: usize) -> usize {
        self.pop_burst(messages, most)
    }

    fn is_empty(&self) -> bool {
        self.is_empty()
    }
}
