//! Plain back ends: a namespace that is just memory, a file or a block device, with no stages.
//!
//! Owns their requests. Must not know the pool. Invariant: blocks are never torn: overlapping requests, of which at
//! least one writes, take effect one after the other.

mod backend;
mod range_lock;

#[cfg(test)]
mod tests;

pub use backend::{PlainBackend, PlainError};
