//! Rings: bounded queues from one thread to one other, for what reactors send each other.
//!
//! Owns the two ends' traits and the choice of implementation: own software ring, or DPDK's rte_ring. Must not know
//! what the messages mean. Invariant: a message comes out exactly once, in order, or is dropped with the ring.

mod primitive;
mod spsc;

#[cfg(feature = "dpdk")]
mod dpdk;
#[cfg(test)]
mod loom_tests;
#[cfg(test)]
mod tests;

/// The end that messages go in at: one thread at a time.
pub trait Producer<M>: Send {
    /// Puts in `message`, or hands it back where the ring is full.
    fn push(&mut self, message: Box<M>) -> Result<(), Box<M>>;
    /// Moves messages from the front of `messages` into the ring while there is room; says how many.
    fn push_burst(&mut self, messages: &mut std::collections::VecDeque<Box<M>>) -> usize;
    /// How many messages fit.
    fn capacity(&self) -> usize;
}

/// The end that messages come out at: one thread at a time.
pub trait Consumer<M>: Send {
    /// Appends up to `most` messages to `messages`; says how many.
    fn pop_burst(&mut self, messages: &mut Vec<Box<M>>, most: usize) -> usize;
    /// Whether nothing is inside now.
    fn is_empty(&self) -> bool;
}

/// Both ends of a ring.
pub type Ends<M> = (Box<dyn Producer<M>>, Box<dyn Consumer<M>>);

/// A software ring of `slots` slots (at least one).
pub fn software<M: Send + 'static>(slots: usize) -> Ends<M> {
    let (producer, consumer) = spsc::ring(slots);
    (Box::new(producer), Box::new(consumer))
}

#[cfg(feature = "dpdk")]
pub use dpdk::rte_ring;
