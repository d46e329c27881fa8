//! io_uring: operations given to the kernel, completions taken from it.
//!
//! Owns the ring. Must not know which operations may run (the lanes say so). Invariant: the kernel sees an address
//! only of a buffer that an [`Op`] in the slab owns until the operation's completion has been taken.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, squeue, types};
use nix::libc;
use slab::Slab;

use super::{Action, Op};

/// Slots of the submission queue; more than that waits in `backlog`.
const ENTRIES: u32 = 256;

pub(super) struct Uring {
    ring: IoUring,
    /// Entries that the submission queue had no room for.
    backlog: VecDeque<squeue::Entry>,
    /// Threads that the kernel may use for operations that block.
    workers: u32,
}

impl AsFd for Uring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open as long as the ring, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

/// What to do about a kernel that has no io_uring for us.
pub(super) fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "allow it with sysctl kernel.io_uring_disabled=0, or in the container's seccomp profile"
        }
        Some(libc::ENOMEM) => "raise RLIMIT_MEMLOCK (ulimit -l)",
        Some(libc::ENOSYS) => "the kernel was built without it, or a seccomp profile forbids it",
        Some(libc::EMFILE | libc::ENFILE) => "raise RLIMIT_NOFILE (ulimit -n)",
        _ => "see dmesg",
    }
}

impl Uring {
    pub(super) fn new() -> io::Result<Self> {
        // Completions are made in our own system calls instead of by interrupting us (5.19); the plain set-up is for
        // older kernels.
        let ring = IoUring::builder()
            .setup_clamp()
            .setup_coop_taskrun()
            .setup_single_issuer()
            .build(ENTRIES)
            .or_else(|_| IoUring::builder().setup_clamp().build(ENTRIES))?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        Ok(Self { ring, backlog: VecDeque::new(), workers: 0 })
    }

    /// Lets the kernel use up to `count` threads for operations that block. Its default (4 per CPU) would let one
    /// file that hangs starve all others.
    pub(super) fn allow_workers(&mut self, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX).min(4096);
        if count > self.workers {
            self.workers = count;
            let mut most = [count, 0];
            if let Err(error) = self.ring.submitter().register_iowq_max_workers(&mut most) {
                tracing::warn!("io_uring keeps its limit on worker threads: {error}");
            }
        }
    }

    pub(super) fn submit(&mut self, key: usize, op: &mut Op) {
        let entry = entry(op).user_data(key as u64);
        self.backlog.push_back(entry);
    }

    /// Moves the backlog into the ring and tells the kernel.
    fn flush(&mut self) {
        while !self.backlog.is_empty() {
            let mut queue = self.ring.submission();
            while let Some(entry) = self.backlog.front() {
                // SAFETY: the entry's buffer is owned by its Op in the slab, which stays there, unmoved in memory (an
                // IoBuf is a pointer), until the completion is taken; the file is kept open by the Op as well.
                if unsafe { queue.push(entry) }.is_err() {
                    break;
                }
                self.backlog.pop_front();
            }
            drop(queue);
            if !self.enter() {
                return;
            }
        }
    }

    /// Submits what is in the queue; false if the kernel can't take more now.
    fn enter(&mut self) -> bool {
        match self.ring.submit() {
            Ok(_) => true,
            // Interrupted, or the completion queue must be emptied first: the next turn tries again.
            Err(error) => {
                if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) {
                    tracing::error!("io_uring_enter: {error}");
                }
                false
            }
        }
    }

    pub(super) fn turn(&mut self, ops: &mut Slab<Op>, finished: &mut Vec<(usize, io::Result<()>)>) {
        let unsubmitted = !self.ring.submission().is_empty();
        if !self.backlog.is_empty() {
            self.flush();
        } else if unsubmitted || self.ring.submission().cq_overflow() {
            self.enter();
        }
        let mut again = Vec::new();
        for completion in self.ring.completion() {
            let key = completion.user_data() as usize;
            let Some(op) = ops.get_mut(key) else { continue };
            match op.note(step(completion.result())) {
                Some(result) => finished.push((key, result)),
                None => again.push(key),
            }
        }
        let more = !again.is_empty();
        for key in again {
            if let Some(op) = ops.get_mut(key) {
                self.submit(key, op);
            }
        }
        if more {
            self.flush();
        }
    }
}

fn step(result: i32) -> super::Step {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

fn entry(op: &mut Op) -> squeue::Entry {
    let file = types::Fd(op.file.as_raw_fd());
    let (offset, done) = op.rest();
    let rest = op.buffer.as_mut().map_or(&mut [][..], |buffer| buffer.get_mut(done..).unwrap_or_default());
    let (start, len) = (rest.as_mut_ptr(), u32::try_from(rest.len()).unwrap_or(u32::MAX));
    let flags = if op.file.submission_blocks() { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
    let entry = match op.action {
        Action::Read => opcode::Read::new(file, start, len).offset(offset).build(),
        Action::Write => opcode::Write::new(file, start, len).offset(offset).build(),
        Action::Sync => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        Action::Allocate { len } => opcode::Fallocate::new(file, len).offset(offset).build(),
        Action::PunchHole { len } => {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            opcode::Fallocate::new(file, len).offset(offset).mode(mode).build()
        }
        Action::ZeroRange { len } => {
            let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
            opcode::Fallocate::new(file, len).offset(offset).mode(mode).build()
        }
    };
    entry.flags(flags)
}
