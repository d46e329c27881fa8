//! A namespace in memory, and where its replies wait.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use crate::backend::{Backend, Done, Geometry, LbaRange, Operation, Outcome, Reply, ReplySink};

/// A namespace in memory that answers at once.
pub struct MemBackend {
    geometry: Geometry,
    bytes: Mutex<Vec<u8>>,
    log: Mutex<Vec<&'static str>>,
}

impl MemBackend {
    /// `block_count` blocks of `block_bytes`, all zero.
    pub fn new(block_bytes: u32, block_count: u64) -> Self {
        let geometry = Geometry {
            block_bytes,
            block_count,
            used_blocks: block_count,
            deallocate: true,
            preferred_write_blocks: 1,
            volatile_write_cache: true,
        };
        let bytes = Mutex::new(vec![0; block_bytes as usize * block_count as usize]);
        Self { geometry, bytes, log: Mutex::default() }
    }

    /// A copy of all bytes.
    pub fn contents(&self) -> Vec<u8> {
        self.lock().clone()
    }

    /// Stores `bytes` from `offset` on.
    pub fn set(&self, offset: usize, bytes: &[u8]) {
        self.lock()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// The kinds of operations that came, in order.
    pub fn log(&self) -> Vec<&'static str> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, what: &'static str) {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    fn span(&self, range: LbaRange) -> std::ops::Range<usize> {
        let block = self.geometry.block_bytes as usize;
        let end = range.slba + range.lba_count;
        assert!(end <= self.geometry.block_count, "the queue checks ranges");
        range.slba as usize * block..end as usize * block
    }

    fn run(&self, operation: Operation) -> Reply {
        match operation {
            Operation::Read { range, mut buffer } => {
                self.note("read");
                buffer.copy_from_slice(&self.lock()[self.span(range)]);
                Reply { outcome: Outcome::Success, buffer: Some(buffer) }
            }
            Operation::Write { range, buffer, fua } => {
                self.note(if fua { "write-fua" } else { "write" });
                self.lock()[self.span(range)].copy_from_slice(&buffer);
                Reply { outcome: Outcome::Success, buffer: Some(buffer) }
            }
            Operation::Flush => {
                self.note("flush");
                Reply::of(Outcome::Success)
            }
            Operation::Compare { range, buffer } => {
                self.note("compare");
                let equal = self.lock()[self.span(range)] == buffer[..];
                Reply::of(if equal { Outcome::Success } else { Outcome::CompareFailure })
            }
            Operation::CompareAndWrite { range, expected, buffer, .. } => {
                self.note("compare-and-write");
                let mut bytes = self.lock();
                if bytes[self.span(range)] != expected[..] {
                    return Reply::of(Outcome::CompareFailure);
                }
                bytes[self.span(range)].copy_from_slice(&buffer);
                Reply::of(Outcome::Success)
            }
            Operation::WriteZeroes { range, deallocate, .. } => {
                self.note(if deallocate { "write-zeroes-deallocate" } else { "write-zeroes" });
                self.lock()[self.span(range)].fill(0);
                Reply::of(Outcome::Success)
            }
            Operation::Deallocate { ranges } => {
                self.note("deallocate");
                for range in ranges {
                    self.lock()[self.span(range)].fill(0);
                }
                Reply::of(Outcome::Success)
            }
            Operation::Verify { range } => {
                self.note("verify");
                let _ = self.span(range);
                Reply::of(Outcome::Success)
            }
        }
    }
}

impl Backend for MemBackend {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }
    fn uuid(&self) -> Uuid {
        Uuid::from_u128(u128::from(self.geometry.block_count))
    }
    fn submit(&self, operation: Operation, done: Done) {
        done.finish(self.run(operation));
    }
}

/// Replies that wait until the test delivers them.
#[derive(Default)]
pub struct Replies(Mutex<VecDeque<(u64, Reply)>>);

impl Replies {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// None waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the one at `index`.
    pub fn take(&self, index: usize) -> Option<(u64, Reply)> {
        self.lock().remove(index)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, Reply)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReplySink for Replies {
    fn reply(&self, token: u64, reply: Reply) {
        self.lock().push_back((token, reply));
    }
}
