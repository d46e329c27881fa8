//! How a sleeping reactor is woken.
//!
//! Owns an eventfd and the flag that says whether anyone needs to write to it. Must not know what there is to do.
//! Invariant: whoever makes work visible and then rings, wakes a reactor that announced its sleep before it looked
//! for work the last time; so no work waits for a sleeper.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::task::{Wake, Waker};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// One reactor's doorbell. Any thread may ring it.
pub(crate) struct Doorbell {
    event: EventFd,
    asleep: AtomicBool,
}

impl Doorbell {
    pub(crate) fn new() -> io::Result<Self> {
        let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        Ok(Self { event, asleep: AtomicBool::new(false) })
    }

    /// Wakes the reactor if it sleeps. Call it after the work is visible (in a ring, in the inbox).
    pub(crate) fn ring(&self) {
        // Pairs with the fence in `going_to_sleep`: either we see the flag, or the sleeper sees the work.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            // EAGAIN means that 2^64 - 2 rings are unread: it is awake all right.
            let _ = self.event.write(1);
        }
    }

    /// Says that the reactor will sleep unless a last look for work finds some.
    pub(crate) fn going_to_sleep(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that the reactor is awake: nobody needs to write to the eventfd.
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Empties the eventfd after it woke us.
    pub(crate) fn silence(&self) {
        loop {
            match self.event.read() {
                Err(Errno::EINTR) => {}
                // Either it is empty now, or it was.
                _ => return,
            }
        }
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl AsRawFd for Doorbell {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_fd().as_raw_fd()
    }
}

impl Wake for Doorbell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

/// A waker that rings `doorbell`.
pub(crate) fn waker(doorbell: &Arc<Doorbell>) -> Waker {
    Waker::from(doorbell.clone())
}
