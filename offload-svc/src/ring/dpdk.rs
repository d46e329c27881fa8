//! rte_ring behind the ring's traits.
//!
//! Owns the way of a box through a ring of pointers. Must not know what the messages mean. Invariant: each pointer in
//! the ring is a leaked box, and whoever takes it out owns it.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::NonNull;

use sdk_bindings::eal::Eal;
use sdk_bindings::ring::{self, Item, RingError};

use super::{Consumer, Ends, Producer};

/// How many pointers go over at once.
const BURST: usize = 32;

/// An rte_ring of `slots` slots.
pub fn rte_ring<M: Send + 'static>(eal: &'static Eal, slots: u32) -> Result<Ends<M>, RingError> {
    let (producer, consumer) = ring::ring(eal, slots, drop_box::<M>)?;
    let producer = RteProducer { end: producer, batch: Vec::with_capacity(BURST), marker: PhantomData };
    let consumer = RteConsumer { end: consumer, batch: Vec::with_capacity(BURST), marker: PhantomData };
    Ok((Box::new(producer), Box::new(consumer)))
}

fn leak<M>(message: Box<M>) -> Item {
    // SAFETY: a box's pointer is not null.
    unsafe { NonNull::new_unchecked(Box::into_raw(message)) }.cast::<c_void>()
}

/// # Safety
/// `item` came from `leak::<M>` and is used once.
unsafe fn own<M>(item: Item) -> Box<M> {
    // SAFETY: the caller's promise.
    unsafe { Box::from_raw(item.cast::<M>().as_ptr()) }
}

fn drop_box<M>(item: Item) {
    // SAFETY: only `leak::<M>` feeds this ring, and what is left in it at its end has no other owner.
    drop(unsafe { own::<M>(item) });
}

struct RteProducer<M> {
    end: ring::Producer,
    batch: Vec<Item>,
    marker: PhantomData<fn(Box<M>)>,
}

// The pointers in `batch` are boxes of M, which is Send; between calls it is empty.
// SAFETY: see above.
unsafe impl<M: Send> Send for RteProducer<M> {}

struct RteConsumer<M> {
    end: ring::Consumer,
    batch: Vec<Item>,
    marker: PhantomData<fn() -> Box<M>>,
}

// SAFETY: as for RteProducer.
unsafe impl<M: Send> Send for RteConsumer<M> {}

impl<M: Send> Producer<M> for RteProducer<M> {
    fn push(&mut self, message: Box<M>) -> Result<(), Box<M>> {
        let item = leak(message);
        if self.end.push_burst(&[item]) == 1 {
            return Ok(());
        }
        // SAFETY: the ring did not take it, so it is ours again.
        Err(unsafe { own(item) })
    }

    fn push_burst(&mut self, messages: &mut VecDeque<Box<M>>) -> usize {
        let mut total = 0;
        while !messages.is_empty() {
            let n = messages.len().min(BURST);
            self.batch.extend(messages.drain(..n).map(leak));
            let pushed = self.end.push_burst(&self.batch);
            total += pushed;
            for item in self.batch.drain(pushed..).rev() {
                // SAFETY: the ring did not take it, so it is ours again.
                messages.push_front(unsafe { own(item) });
            }
            self.batch.clear();
            if pushed < n {
                break;
            }
        }
        total
    }

    fn capacity(&self) -> usize {
        self.end.capacity()
    }
}

impl<M: Send> Consumer<M> for RteConsumer<M> {
    fn pop_burst(&mut self, messages: &mut Vec<Box<M>>, most: usize) -> usize {
        let n = self.end.pop_burst(&mut self.batch, most);
        // SAFETY: only `leak::<M>` feeds this ring, and each pointer comes out once.
        messages.extend(self.batch.drain(..).map(|item| unsafe { own::<M>(item) }));
        n
    }

    fn is_empty(&self) -> bool {
        self.end.is_empty()
    }
}
