//! Waiting for a buffer: first come, first served, of those that have not taken their host's share already.
//!
//! Owns the queue of those who wait for one size. Must not know how buffers are stored. Invariant: a waiter holds
//! nothing; it leaves the queue with a buffer, or by being dropped, and then the next one is served.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use nvmf_target::buffer::IoBuf;

use super::Buffers;
use super::class::Class;
use super::share::AccountId;

/// One waiter's place in the queue.
struct Seat {
    account: AccountId,
    len_bytes: usize,
    state: Mutex<State>,
}

enum State {
    Waiting(Waker),
    Served(IoBuf),
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
                let Some(buffer) = class.take_free(seat.account, seat.len_bytes) else { break };
                if let State::Waiting(waker) = std::mem::replace(&mut *lock(&seat.state), State::Served(buffer)) {
                    wakers.push(waker);
                }
                queue.remove(place);
                self.count.fetch_sub(1, Ordering::Relaxed);
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    fn join(&self, account: AccountId, len_bytes: usize, waker: Waker) -> Arc<Seat> {
        let seat = Arc::new(Seat { account, len_bytes, state: Mutex::new(State::Waiting(waker)) });
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

/// A buffer to come: see [`super::Buffers::wait`].
pub struct Wait {
    buffers: Buffers,
    account: AccountId,
    len_bytes: usize,
    /// The place in the queue of the fitting size.
    seat: Option<(Arc<Class>, Arc<Seat>)>,
}

impl Wait {
    pub(super) fn new(buffers: Buffers, account: AccountId, len_bytes: usize) -> Self {
        Self { buffers, account, len_bytes, seat: None }
    }
}

impl Future for Wait {
    type Output = IoBuf;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoBuf> {
        let this = self.get_mut();
        let seat = match &this.seat {
            Some((_, seat)) => {
                if let State::Waiting(waker) = &mut *lock(&seat.state) {
                    waker.clone_from(context.waker());
                }
                seat
            }
            None => {
                if let Some(buffer) = this.buffers.take_unless_awaited(this.account, this.len_bytes) {
                    return Poll::Ready(buffer);
                }
                let Some(class) = this.buffers.classes_for(this.len_bytes).first().cloned() else {
                    return Poll::Pending;
                };
                let seat = class.waiters.join(this.account, this.len_bytes, context.waker().clone());
                class.waiters.serve(&class);
                &this.seat.insert((class, seat)).1
            }
        };
        let mut state = lock(&seat.state);
        match std::mem::replace(&mut *state, State::Left) {
            State::Served(buffer) => {
                drop(state);
                this.seat = None;
                Poll::Ready(buffer)
            }
            waiting => {
                *state = waiting;
                Poll::Pending
            }
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let Some((class, seat)) = self.seat.take() else { return };
        class.waiters.leave(&seat);
        let state = std::mem::replace(&mut *lock(&seat.state), State::Left);
        // A buffer that came too late goes to the next in the queue.
        drop(state);
    }
}
