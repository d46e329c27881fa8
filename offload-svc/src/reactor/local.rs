//! What code that runs on a reactor can use: its executor, its timers, its file I/O, its way to the others.
//!
//! Owns all of these. Must not know sockets (`thread` has them). Invariant: a [`Local`] never leaves its thread.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use async_executor::LocalExecutor;
use futures::FutureExt;
use nvmf_target::buffer::IoBuf;

use super::Shared;
use super::disk::{Action, Disk, DiskFile};
use super::message::Message;
use super::timers::{TimerKey, Timers};
use crate::buffers::{Buffers, Wait};

/// A reactor, seen from the code that runs on it.
#[derive(Clone)]
pub struct Local {
    inner: Rc<Inner>,
}

struct Inner {
    index: usize,
    shared: Arc<Shared>,
    executor: RefCell<Option<Rc<LocalExecutor<'static>>>>,
    timers: RefCell<Timers>,
    disk: Disk,
    /// For each other reactor, what goes to it at the end of the round.
    outgoing: RefCell<Vec<VecDeque<Box<Message>>>>,
    /// What this reactor sends itself.
    own: RefCell<VecDeque<Message>>,
    /// Whether any of `outgoing` may hold something.
    posted: Cell<bool>,
    /// What a task panicked with.
    panic: RefCell<Option<Panic>>,
}

type Panic = Box<dyn Any + Send>;

thread_local! {
    static CURRENT: RefCell<Option<Local>> = const { RefCell::new(None) };
}

/// The reactor that this thread is, if it is one of `shared`'s.
pub(crate) fn current(shared: &Arc<Shared>) -> Option<Local> {
    CURRENT.with_borrow(|current| current.as_ref().filter(|local| Arc::ptr_eq(&local.inner.shared, shared)).cloned())
}

impl Local {
    pub(crate) fn new(index: usize, shared: Arc<Shared>, disk: Disk) -> Self {
        let outgoing = shared.mailboxes.iter().map(|_| VecDeque::new()).collect();
        let inner = Inner {
            index,
            shared,
            executor: RefCell::new(Some(Rc::new(LocalExecutor::new()))),
            timers: RefCell::default(),
            disk,
            outgoing: RefCell::new(outgoing),
            own: RefCell::default(),
            posted: Cell::new(false),
            panic: RefCell::default(),
        };
        Self { inner: Rc::new(inner) }
    }

    /// Makes this thread the reactor until the guard is dropped.
    pub(crate) fn enter(&self) -> Entered {
        CURRENT.set(Some(self.clone()));
        Entered
    }

    /// The reactor that this thread is.
    pub fn current() -> Option<Local> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Which reactor it is, from 0.
    pub fn index(&self) -> usize {
        self.inner.index
    }

    /// All reactors.
    pub fn reactors(&self) -> super::Reactors {
        super::Reactors { shared: self.inner.shared.clone() }
    }

    /// Runs `task` on this reactor, some time after this call returns.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let panic = Rc::downgrade(&self.inner);
        let guarded = async move {
            // The executor would keep a task's panic for whoever awaits the task: nobody does.
            if let (Err(words), Some(inner)) = (AssertUnwindSafe(task).catch_unwind().await, panic.upgrade()) {
                inner.panic.replace(Some(words));
            }
        };
        // None: the reactor is ending, and its tasks with it.
        if let Some(executor) = &*self.inner.executor.borrow() {
            executor.spawn(guarded).detach();
        }
    }

    /// Resolves at `at`, or soon after.
    pub fn sleep_until(&self, at: Instant) -> Sleep {
        Sleep { local: Rc::downgrade(&self.inner), at, key: None }
    }

    /// Fills `buffer` from the file. This and the following start at once; dropping the future changes nothing about
    /// that, and the buffer stays with the kernel until it is done.
    pub fn read(&self, file: &Arc<DiskFile>, offset: u64, buffer: IoBuf) -> impl Future<Output = Transfer> + use<> {
        self.inner.disk.start(file, Action::Read, offset, Some(buffer)).map(with_buffer)
    }

    /// Stores `buffer` in the file.
    pub fn write(&self, file: &Arc<DiskFile>, offset: u64, buffer: IoBuf) -> impl Future<Output = Transfer> + use<> {
        self.inner.disk.start(file, Action::Write, offset, Some(buffer)).map(with_buffer)
    }

    /// Makes what was written to the file durable (fdatasync).
    pub fn sync(&self, file: &Arc<DiskFile>) -> impl Future<Output = io::Result<()>> + use<> {
        self.without_buffer(file, Action::Sync, 0)
    }

    /// Makes a range read as zeroes and gives its space back.
    pub fn punch_hole(
        &self,
        file: &Arc<DiskFile>,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + use<> {
        self.without_buffer(file, Action::PunchHole { len }, offset)
    }

    /// Sets room aside for a range, whose contents stay.
    pub fn allocate(
        &self,
        file: &Arc<DiskFile>,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + use<> {
        self.without_buffer(file, Action::Allocate { len }, offset)
    }

    /// Makes a range read as zeroes, its space kept.
    pub fn zero_range(
        &self,
        file: &Arc<DiskFile>,
        offset: u64,
        len: u64,
    ) -> impl Future<Output = io::Result<()>> + use<> {
        self.without_buffer(file, Action::ZeroRange { len }, offset)
    }

    fn without_buffer(
        &self,
        file: &Arc<DiskFile>,
        action: Action,
        offset: u64,
    ) -> impl Future<Output = io::Result<()>> + use<> {
        self.inner.disk.start(file, action, offset, None).map(|(result, _)| result)
    }

    /// A buffer from the back ends' own pool, as soon as there is one.
    pub fn buffer(&self, len_bytes: usize) -> Wait {
        self.inner.shared.internal_buffers.wait(len_bytes)
    }

    /// The pool that hosts' data goes into.
    pub fn host_buffers(&self) -> &Buffers {
        &self.inner.shared.host_buffers
    }

    /// Leaves a message for reactor `to`; it goes off at the end of the round.
    pub(crate) fn post(&self, to: usize, message: Message) {
        if to == self.inner.index {
            self.inner.own.borrow_mut().push_back(message);
        } else if let Some(queue) = self.inner.outgoing.borrow_mut().get_mut(to) {
            queue.push_back(Box::new(message));
        }
        self.inner.posted.set(true);
    }

    /// Whether messages wait to go off.
    pub(crate) fn has_posted(&self) -> bool {
        self.inner.posted.get()
    }

    /// Takes what this reactor sent itself.
    pub(crate) fn take_own(&self) -> VecDeque<Message> {
        std::mem::take(&mut *self.inner.own.borrow_mut())
    }

    /// Lets `send` move the messages for each other reactor; what it leaves stays for the next round.
    pub(crate) fn send_posted(&self, mut send: impl FnMut(usize, &mut VecDeque<Box<Message>>)) {
        self.inner.posted.set(!self.inner.own.borrow().is_empty());
        let mut outgoing = self.inner.outgoing.borrow_mut();
        for (to, queue) in outgoing.iter_mut().enumerate().filter(|(_, queue)| !queue.is_empty()) {
            send(to, queue);
            if !queue.is_empty() {
                self.inner.posted.set(true);
            }
        }
    }

    /// Runs up to `most` tasks; says how many.
    pub(crate) fn run_tasks(&self, most: usize) -> usize {
        let Some(executor) = self.inner.executor.borrow().clone() else { return 0 };
        let count = (0..most).take_while(|_| executor.try_tick()).count();
        self.pass_panic_on();
        count
    }

    /// A task's panic is the reactor's: what the task was in the middle of, nobody will ever finish.
    fn pass_panic_on(&self) {
        let panic = self.inner.panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Arranges for `waker` to be woken when a task becomes ready, as long as the returned watch lives; `None` if one
    /// is ready already (and has run).
    pub(crate) fn watch_tasks(&self, waker: &Waker) -> Option<TaskWatch> {
        let executor = self.inner.executor.borrow().clone()?;
        let mut tick: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move { executor.tick().await });
        match tick.as_mut().poll(&mut Context::from_waker(waker)) {
            Poll::Ready(()) => {
                self.pass_panic_on();
                None
            }
            Poll::Pending => Some(TaskWatch { _tick: tick }),
        }
    }

    /// Fires the timers that are due; says whether there were any.
    pub(crate) fn fire_timers(&self, now: Instant) -> bool {
        let mut any = false;
        loop {
            let due = self.inner.timers.borrow_mut().pop_due(now);
            let Some(waker) = due else { return any };
            waker.wake();
            any = true;
        }
    }

    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.inner.timers.borrow().next_at()
    }

    /// Drops every task.
    pub(crate) fn end_tasks(&self) {
        let executor = self.inner.executor.borrow_mut().take();
        drop(executor);
    }
}

/// How a read or write ended, and its buffer.
pub type Transfer = (io::Result<()>, IoBuf);

fn with_buffer((result, buffer): (io::Result<()>, Option<IoBuf>)) -> Transfer {
    // Reads and writes start with a buffer, and it comes back; an empty one stands in for what can't be missing.
    (result, buffer.unwrap_or_else(|| IoBuf::heap(0)))
}

/// While it lives, this thread is a reactor.
pub(crate) struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(local) = CURRENT.take() {
            // Also after a panic: what tasks hold (commands to be answered, buffers) is given back.
            local.end_tasks();
        }
    }
}

/// See [`Local::watch_tasks`].
pub(crate) struct TaskWatch {
    _tick: Pin<Box<dyn Future<Output = ()>>>,
}

/// A moment to come: see [`Local::sleep_until`].
pub struct Sleep {
    local: Weak<Inner>,
    at: Instant,
    key: Option<TimerKey>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // The reactor is gone: nothing will happen here any more.
        let Some(local) = self.local.upgrade() else { return Poll::Pending };
        let mut timers = local.timers.borrow_mut();
        match self.key {
            Some(key) if timers.update(key, context.waker()) => Poll::Pending,
            Some(_) => {
                self.key = None;
                Poll::Ready(())
            }
            None if self.at <= Instant::now() => Poll::Ready(()),
            None => {
                self.key = Some(timers.add(self.at, context.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let (Some(key), Some(local)) = (self.key, self.local.upgrade()) {
            local.timers.borrow_mut().remove(key);
        }
    }
}
