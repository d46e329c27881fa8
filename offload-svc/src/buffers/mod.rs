//! The data path's I/O buffers: a fixed number of each size, waited for in order.
//!
//! Owns size classes, accounting and the queue of those who wait. Must not know what buffers hold or where their
//! memory comes from (`store`: the heap or DPDK's mempool). Invariants: a slot has one owner at a time and comes back
//! once; while someone waits for a class, a buffer of it that comes back goes to the one who has waited longest, of those
//! that have not taken their host's share already (`share`).

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use nvmf_target::buffer::{BUFFER_ALIGN_BYTES, BufferPool, IoBuf};

mod class;
#[cfg(feature = "dpdk")]
mod dpdk;
mod plan;
mod share;
mod store;
mod wait;

#[cfg(test)]
mod tests;

pub use plan::{Plan, SizeClass};
pub use share::HostBuffers;
pub use wait::{Wait, WaitAll};

use class::Class;
use share::{AccountId, Ledger};
use store::HeapStore;
use wait::Need;

/// What a waiter was given: one buffer, or two of a size.
pub type Grant = [Option<IoBuf>; 2];

/// A pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BuffersError {
    /// No memory for one size.
    #[error("no memory for {count} buffers of {bytes} bytes: lower buffers.memory")]
    OutOfMemory {
        /// Buffers of the size.
        count: usize,
        /// The size.
        bytes: usize,
    },
    /// DPDK has no memory for one size.
    #[cfg(feature = "dpdk")]
    #[error("{source}: lower buffers.memory")]
    Mempool {
        /// What DPDK said.
        #[from]
        source: sdk_bindings::mempool::MempoolError,
    },
    /// A plan without a size, or with one that is no multiple of 4 KiB.
    #[error("buffers of {bytes} bytes are not possible: sizes are multiples of {BUFFER_ALIGN_BYTES}")]
    Size {
        /// The size.
        bytes: usize,
    },
}

/// A pool of buffers in size classes. Clones share it.
#[derive(Clone)]
pub struct Buffers {
    /// From small to large.
    classes: Arc<[Arc<Class>]>,
    ledger: Arc<Ledger>,
}

/// One size's state at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassSnapshot {
    /// Size of each buffer.
    pub bytes: usize,
    /// Buffers of this size.
    pub count: usize,
    /// Those in use.
    pub used: usize,
    /// Requests that wait for one.
    pub waiting: usize,
}

impl Buffers {
    /// Buffers in ordinary memory.
    pub fn in_memory(plan: &Plan) -> Result<Self, BuffersError> {
        Self::of(plan, |class| {
            let out_of_memory = BuffersError::OutOfMemory { count: class.count, bytes: class.bytes };
            Ok(Box::new(HeapStore::new(class.count, class.bytes).ok_or(out_of_memory)?))
        })
    }

    /// Buffers in DPDK's memory, in one mempool a size.
    #[cfg(feature = "dpdk")]
    pub fn in_mempools(plan: &Plan, eal: &'static sdk_bindings::eal::Eal) -> Result<Self, BuffersError> {
        Self::of(plan, |class| Ok(Box::new(dpdk::MempoolStore::new(eal, class.count, class.bytes)?)))
    }

    fn of(
        plan: &Plan,
        store: impl Fn(&SizeClass) -> Result<Box<dyn store::Store>, BuffersError>,
    ) -> Result<Self, BuffersError> {
        let (mut classes, ledger) = (Vec::new(), Ledger::default());
        for class in plan.classes() {
            if class.bytes == 0 || !class.bytes.is_multiple_of(BUFFER_ALIGN_BYTES) {
                return Err(BuffersError::Size { bytes: class.bytes });
            }
            classes.push(Class::new(class, store(class)?, ledger.distrusted()));
        }
        Ok(Self { classes: classes.into(), ledger: Arc::new(ledger) })
    }

    /// The sizes that `len_bytes` fits into, from small to large.
    fn classes_for(&self, len_bytes: usize) -> &[Arc<Class>] {
        let first = self.classes.partition_point(|class| class.bytes() < len_bytes);
        &self.classes[first..]
    }

    /// The size that `need` is waited for in: the smallest that fits and can hold all of it.
    fn class_for(&self, need: Need) -> Option<&Arc<Class>> {
        let classes = self.classes_for(need.len_bytes);
        let fitting = classes.first().filter(|class| class.holds(need.count));
        fitting.or_else(|| classes.iter().find(|class| !class.is_reserved() && class.holds(need.count)))
    }

    /// A buffer of `len_bytes` as soon as there is one, in the order of asking.
    ///
    /// # Panics
    /// If `len_bytes` is over [`BufferPool::largest_bytes`]: such a buffer would never come.
    pub fn wait(&self, len_bytes: usize) -> Wait {
        assert!(len_bytes <= self.largest_bytes(), "no buffer is that large");
        Wait::new(self.clone(), AccountId::SERVICE, len_bytes)
    }

    /// The pool as a host's queue uses it: hosts are told apart by `host`, their NQN.
    pub fn for_host(&self, host: &str) -> HostBuffers {
        HostBuffers::new(self.clone(), host)
    }

    /// Takes a buffer of the fitting size or a larger one, unless someone waits for the fitting size.
    fn take_unless_awaited(&self, account: AccountId, len_bytes: usize) -> Option<IoBuf> {
        let (fitting, larger) = self.classes_for(len_bytes).split_first()?;
        // Who waits for the fitting size has found the larger ones empty, too, and comes first.
        if fitting.is_awaited() {
            return None;
        }
        let larger =
            || larger.iter().filter(|class| !class.is_reserved()).find_map(|class| class.take(account, len_bytes));
        fitting.take(account, len_bytes).or_else(larger)
    }

    fn take_for(&self, account: AccountId, len_bytes: usize) -> Option<IoBuf> {
        take_grant(len_bytes).or_else(|| self.take_unless_awaited(account, len_bytes))
    }

    /// Runs `f`, inside which the first [`BufferPool::take`] that a buffer of `granted` is large enough for gets it: how
    /// those that were waited for reach code that only knows `take`. Unused, they go back.
    pub fn granting<R>(&self, granted: Grant, f: impl FnOnce() -> R) -> R {
        let outer = GRANT.with_borrow_mut(|grant| std::mem::replace(grant, granted));
        let result = f();
        let unused = GRANT.with_borrow_mut(|grant| std::mem::replace(grant, outer));
        drop(unused);
        result
    }

    /// State of each size, from small to large.
    pub fn snapshot(&self) -> Vec<ClassSnapshot> {
        self.classes.iter().map(|class| class.snapshot()).collect()
    }

    /// Bytes in use, whole buffers counted.
    pub fn used_bytes(&self) -> usize {
        self.snapshot().iter().map(|class| class.used * class.bytes).sum()
    }
}

impl BufferPool for Buffers {
    fn take(&self, len_bytes: usize) -> Option<IoBuf> {
        self.take_for(AccountId::SERVICE, len_bytes)
    }

    fn largest_bytes(&self) -> usize {
        self.classes.last().map_or(0, |class| class.bytes())
    }
}

thread_local! {
    static GRANT: RefCell<Grant> = const { RefCell::new([None, None]) };
    static ON_REACTOR: Cell<bool> = const { Cell::new(false) };
}

fn take_grant(len_bytes: usize) -> Option<IoBuf> {
    GRANT.with_borrow_mut(|grant| {
        let fits = |buffer: &mut IoBuf| buffer.capacity_bytes() >= len_bytes;
        let mut granted = grant.iter_mut().find_map(|place| place.take_if(fits))?;
        granted.set_len(len_bytes);
        Some(granted)
    })
}

/// Marks this thread as a reactor's: it may use DPDK's mempool directly. Others may be preempted anywhere, so what
/// they give back takes a detour.
pub(crate) fn mark_reactor_thread() {
    ON_REACTOR.set(true);
}

fn on_reactor() -> bool {
    ON_REACTOR.get()
}
