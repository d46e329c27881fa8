//! A namespace in memory, for tests.
//!
//! Invariant: requests take effect at once, in the order in which they come, unless the backend is held: then they
//! wait, in order, until it is released.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use crate::backend::{Backend, Done, Geometry, LbaRange, Operation, Outcome, Reply};

/// See the module.
pub struct MemBackend {
    uuid: Uuid,
    block_bytes: u32,
    write_cache: bool,
    state: Mutex<State>,
}

struct State {
    bytes: Vec<u8>,
    held: Option<Vec<(Operation, Done)>>,
    flushes: usize,
}

impl MemBackend {
    /// `block_count` zeroed blocks; `number` makes the UUID.
    pub fn new(number: u128, block_bytes: u32, block_count: u64) -> Arc<Self> {
        Arc::new(Self::with_cache(number, block_bytes, block_count, false))
    }

    /// One that says it has a volatile write cache, if `write_cache`.
    pub fn with_cache(number: u128, block_bytes: u32, block_count: u64, write_cache: bool) -> Self {
        let bytes = vec![0; block_bytes as usize * block_count as usize];
        let state = State { bytes, held: None, flushes: 0 };
        // Version 4, so that hosts take it for a UUID.
        let uuid = uuid::Builder::from_random_bytes((number + 1).to_le_bytes()).into_uuid();
        Self { uuid, block_bytes, write_cache, state: Mutex::new(state) }
    }

    /// From now on requests wait.
    pub fn hold(&self) {
        self.lock().held.get_or_insert_default();
    }

    /// Carries out what waits, and no longer waits. Gives how many there were.
    pub fn release(&self) -> usize {
        let held = self.lock().held.take().unwrap_or_default();
        let count = held.len();
        for (operation, done) in held {
            self.carry_out(operation, done);
        }
        count
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.lock().held.as_ref().map_or(0, Vec::len)
    }

    /// Flushes carried out.
    pub fn flushes(&self) -> usize {
        self.lock().flushes
    }

    /// Changes the size.
    pub fn resize(&self, block_count: u64) {
        let len = self.block_bytes as usize * block_count as usize;
        self.lock().bytes.resize(len, 0);
    }

    /// A copy of a range.
    pub fn read(&self, range: LbaRange) -> Option<Vec<u8>> {
        let state = self.lock();
        self.place(range, &state.bytes).and_then(|r| state.bytes.get(r)).map(<[u8]>::to_vec)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, range: LbaRange, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
        let block = u64::from(self.block_bytes);
        let start = range.slba.checked_mul(block)?;
        let end = range.slba.checked_add(range.lba_count)?.checked_mul(block)?;
        (end <= bytes.len() as u64).then_some(start as usize..end as usize)
    }

    fn carry_out(&self, operation: Operation, done: Done) {
        let reply = self.execute(operation).unwrap_or_else(|| Reply::of(Outcome::LbaOutOfRange));
        done.finish(reply);
    }

    fn execute(&self, operation: Operation) -> Option<Reply> {
        let mut state = self.lock();
        let bytes = &mut state.bytes;
        let ok = |buffer| Reply { outcome: Outcome::Success, buffer };
        match operation {
            Operation::Read { range, mut buffer } => {
                let place = self.place(range, bytes)?;
                buffer.copy_from_slice(bytes.get(place)?);
                Some(ok(Some(buffer)))
            }
            Operation::Write { range, buffer, .. } => {
                let place = self.place(range, bytes)?;
                bytes.get_mut(place)?.copy_from_slice(&buffer);
                Some(ok(Some(buffer)))
            }
            Operation::Flush => {
                state.flushes += 1;
                Some(ok(None))
            }
            Operation::Compare { range, buffer } => {
                let place = self.place(range, bytes)?;
                let equal = bytes.get(place)? == &buffer[..];
                let outcome = if equal { Outcome::Success } else { Outcome::CompareFailure };
                Some(Reply { outcome, buffer: Some(buffer) })
            }
            Operation::CompareAndWrite { range, expected, buffer, .. } => {
                let place = self.place(range, bytes)?;
                let to = bytes.get_mut(place)?;
                if to != &expected[..] {
                    return Some(Reply { outcome: Outcome::CompareFailure, buffer: Some(buffer) });
                }
                to.copy_from_slice(&buffer);
                Some(ok(Some(buffer)))
            }
            Operation::WriteZeroes { range, .. } => {
                let place = self.place(range, bytes)?;
                bytes.get_mut(place)?.fill(0);
                Some(ok(None))
            }
            Operation::Deallocate { ranges } => {
                for range in ranges {
                    let place = self.place(range, bytes)?;
                    bytes.get_mut(place)?.fill(0);
                }
                Some(ok(None))
            }
            Operation::Verify { range } => self.place(range, bytes).map(|_| ok(None)),
        }
    }
}

impl Backend for MemBackend {
    fn geometry(&self) -> Geometry {
        let block_count = self.lock().bytes.len() as u64 / u64::from(self.block_bytes);
        Geometry {
            block_bytes: self.block_bytes,
            block_count,
            used_blocks: block_count,
            deallocate: true,
            preferred_write_blocks: 1,
            volatile_write_cache: self.write_cache,
        }
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn submit(&self, operation: Operation, done: Done) {
        let mut state = self.lock();
        if let Some(held) = &mut state.held {
            held.push((operation, done));
            return;
        }
        drop(state);
        self.carry_out(operation, done);
    }
}
