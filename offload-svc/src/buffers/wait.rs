//! Waiting for a buffer: first come, first served, of those that have not taken their host's share already.
//!
//! Owns the queue of those who wait for one size. Must not know how buffers are stored. Invariant: a waiter holds
//! nothing; it leaves the queue with all that it needs, or by being dropped, and then the next one is served.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use nvmf_target::buffer::IoBuf;

use super::class::Class;
use super::share::AccountId;
use super::{Buffers, Grant, on_reactor};

/// One waiter's place in the queue.
struct Seat {
    account: AccountId,
    need: Need,
    state: Mutex<State>,
}

enum State {
    Waiting(Waker),
    Served(Grant),
    Left,
}

/// Those who wait for one size.
#[derive(Default)]
pub(super) struct Waiters {
    /// Length of `queue`, readable without its lock.
    count: AtomicUsize,
    queue: Mutex<VecDeque<Arc<Seat>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic inside these short sections leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waiters {
    /// Whether someone waits.
    pub(super) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Whether someone waits whose account is `wanted`.
    pub(super) fn has(&self, wanted: impl Fn(AccountId) -> bool) -> bool {
        lock(&self.queue).iter().any(|seat| wanted(seat.account))
    }

    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Hands free buffers to those who wait. Called after a buffer came back and after a seat was taken, so that
    /// neither misses the other: each writes first (the slot, the count), then looks.
    pub(super) fn serve(&self, class: &Class) {
        fence(Ordering::SeqCst);
        if !self.any() {
            return;
        }
        let mut wakers = Vec::new();
        {
            let mut queue = lock(&self.queue);
            let mut place = 0;
            while let Some(seat) = queue.get(place) {
                if !class.allows(seat.account) {
                    // Its turn comes when its host has given something back, which serves the queue again.
                    place += 1;
                    continue;
                }
                // Who needs two is not overtaken by those who need one, or would starve.
                let Some(grant) = class.take_all(seat.account, seat.need) else {
                    // This thread may not reach all that is free: the waiter's own, a reactor's, tries again.
                    if seat.need.count > 1
                        && !on_reactor()
                        && class.free() >= seat.need.count
                        && let State::Waiting(waker) = &*lock(&seat.state)
                    {
                        wakers.push(waker.clone());
                    }
                    break;
                };
                if let State::Waiting(waker) = std::mem::replace(&mut *lock(&seat.state), State::Served(grant)) {
                    wakers.push(waker);
                }
                queue.remove(place);
                self.count.fetch_sub(1, Ordering::Relaxed);
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    fn join(&self, account: AccountId, need: Need, waker: Waker) -> Arc<Seat> {
        let seat = Arc::new(Seat { account, need, state: Mutex::new(State::Waiting(waker)) });
        lock(&self.queue).push_back(seat.clone());
        self.count.fetch_add(1, Ordering::Relaxed);
        seat
    }

    fn leave(&self, seat: &Arc<Seat>) {
        let mut queue = lock(&self.queue);
        if let Some(place) = queue.iter().position(|other| Arc::ptr_eq(other, seat)) {
            queue.remove(place);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// What a waiter needs: all of it at once, of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Need {
    /// The length of each.
    pub(super) len_bytes: usize,
    /// One or two.
    pub(super) count: usize,
}

/// A buffer to come: see [`super::Buffers::wait`].
pub struct Wait(WaitAll);

/// One or two buffers to come: see [`super::HostBuffers::wait`].
pub struct WaitAll {
    buffers: Buffers,
    account: AccountId,
    need: Need,
    /// The place in the queue of the fitting size.
    seat: Option<(Arc<Class>, Arc<Seat>)>,
}

impl Wait {
    pub(super) fn new(buffers: Buffers, account: AccountId, len_bytes: usize) -> Self {
        Self(WaitAll::new(buffers, account, Need { len_bytes, count: 1 }))
    }
}

impl WaitAll {
    pub(super) fn new(buffers: Buffers, account: AccountId, need: Need) -> Self {
        Self { buffers, account, need, seat: None }
    }

    /// What is there already. Two at once are only given out in the queue, where nobody else takes one between them.
    fn take_now(&self) -> Option<Grant> {
        let single = self.need.count == 1;
        let one = || self.buffers.take_unless_awaited(self.account, self.need.len_bytes);
        single.then(one).flatten().map(|buffer| [Some(buffer), None])
    }
}

impl Future for Wait {
    type Output = IoBuf;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoBuf> {
        match Pin::new(&mut self.get_mut().0).poll(context) {
            Poll::Ready([Some(buffer), _]) => Poll::Ready(buffer),
            // Never a grant without its first.
            Poll::Ready([None, _]) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Future for WaitAll {
    type Output = Grant;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Grant> {
        let this = self.get_mut();
        let seat = match &this.seat {
            Some((class, seat)) => {
                if let State::Waiting(waker) = &mut *lock(&seat.state) {
                    waker.clone_from(context.waker());
                }
                class.waiters.serve(class);
                seat
            }
            None => {
                if let Some(grant) = this.take_now() {
                    return Poll::Ready(grant);
                }
                let Some(class) = this.buffers.class_for(this.need).cloned() else { return Poll::Pending };
                let seat = class.waiters.join(this.account, this.need, context.waker().clone());
                class.waiters.serve(&class);
                &this.seat.insert((class, seat)).1
            }
        };
        let mut state = lock(&seat.state);
        match std::mem::replace(&mut *state, State::Left) {
            State::Served(grant) => {
                drop(state);
                this.seat = None;
                Poll::Ready(grant)
            }
            waiting => {
                *state = waiting;
                Poll::Pending
            }
        }
    }
}

impl Drop for WaitAll {
    fn drop(&mut self) {
        let Some((class, seat)) = self.seat.take() else { return };
        class.waiters.leave(&seat);
        let state = std::mem::replace(&mut *lock(&seat.state), State::Left);
        // Buffers that came too late go to the next in the queue.
        drop(state);
        // One that stood behind this may need less, and have it now.
        class.waiters.serve(&class);
    }
}
