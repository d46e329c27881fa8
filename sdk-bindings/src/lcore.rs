//! Worker lcores: DPDK's threads, one function at a time on each.
//!
//! Owns the launch of a closure on an idle lcore and the wait for its end. Must not know what it runs. Invariant: a
//! closure runs exactly once, or is handed back unrun with the error; a panic in it ends at this border.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;

use crate::eal::Eal;
use crate::ffi;

/// Why a closure was not started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Every worker lcore runs something.
    #[error("all {workers} DPDK lcores are in use")]
    NoneIdle {
        /// How many there are.
        workers: usize,
    },
    /// DPDK refused, or its main thread has ended.
    #[error("DPDK did not start lcore {lcore} (errno {errno})")]
    Refused {
        /// The lcore.
        lcore: u32,
        /// DPDK's errno.
        errno: i32,
    },
}

type Job = Box<dyn FnOnce() + Send>;
type Panic = Box<dyn Any + Send>;

/// A launched closure.
pub struct Lcore {
    id: u32,
    ended: mpsc::Receiver<Option<Panic>>,
}

impl Lcore {
    /// Runs `job` on an idle worker lcore.
    pub fn launch(eal: &'static Eal, job: impl FnOnce() + Send + 'static) -> Result<Self, LaunchError> {
        let id = eal.claim_lcore().ok_or(LaunchError::NoneIdle { workers: eal.workers() })?;
        let (end, ended) = mpsc::sync_channel(1);
        let (outcome, outcomes) = mpsc::sync_channel(1);
        let job: Job = Box::new(move || {
            let panic = catch_unwind(AssertUnwindSafe(job)).err();
            // Nobody may be waiting for the end: that's the owner's choice.
            let _ = end.send(panic);
        });
        let request = LaunchRequest { lcore: id, job, outcome };
        let errno = match eal.request_launch(request) {
            Ok(()) => outcomes.recv().unwrap_or(libc::ECANCELED),
            Err(_) => libc::ESRCH,
        };
        if errno == 0 {
            return Ok(Self { id, ended });
        }
        eal.release_lcore(id);
        Err(LaunchError::Refused { lcore: id, errno })
    }

    /// DPDK's number for the lcore.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Waits until the closure has ended; `Err` holds its panic. The lcore is idle again afterwards.
    pub fn wait(self, eal: &'static Eal) -> Result<(), Panic> {
        let panic = self.ended.recv().unwrap_or(None);
        // The closure has sent its last word; the lcore's thread is a few instructions away from its wait state.
        // SAFETY: the shim checks the id.
        while unsafe { ffi::sluice_lcore_is_waiting(self.id) } == 0 {
            std::thread::yield_now();
        }
        eal.release_lcore(self.id);
        panic.map_or(Ok(()), Err)
    }

    /// Whether the closure has ended.
    pub fn is_ended(&self) -> bool {
        // SAFETY: the shim checks the id.
        unsafe { ffi::sluice_lcore_is_waiting(self.id) != 0 }
    }
}

/// The lcore that this thread is, if it is one.
pub fn current() -> Option<u32> {
    // SAFETY: reads a thread-local of DPDK.
    let id = unsafe { ffi::sluice_lcore_current() };
    (id != u32::MAX).then_some(id)
}

/// A launch on its way to the main lcore's thread.
pub(crate) struct LaunchRequest {
    lcore: u32,
    job: Job,
    outcome: mpsc::SyncSender<i32>,
}

impl LaunchRequest {
    /// Launches and reports the errno (0: it runs).
    pub(crate) fn perform(self) {
        let arg = Box::into_raw(Box::new(self.job));
        // SAFETY: `entry` takes the box back exactly once, on the lcore; if the launch fails, it never runs and the
        // box is taken back here.
        let ret = unsafe { ffi::sluice_lcore_launch(entry, arg.cast::<c_void>(), self.lcore) };
        if ret < 0 {
            // SAFETY: the launch failed, so `entry` will not see this pointer.
            drop(unsafe { Box::from_raw(arg) });
        }
        let _ = self.outcome.send(if ret < 0 { -ret } else { 0 });
    }
}

extern "C" fn entry(arg: *mut c_void) -> c_int {
    // SAFETY: `arg` is the box that `perform` leaked for this call alone.
    let job = unsafe { Box::from_raw(arg.cast::<Job>()) };
    // The job itself catches panics; this is the last border before C.
    match catch_unwind(AssertUnwindSafe(job)) {
        Ok(()) => 0,
        Err(_) => -1,
    }
}
