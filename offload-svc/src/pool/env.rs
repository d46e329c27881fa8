//! The pool's only way to the outside: members, time, memory, tasks, entropy.
//!
//! Owns the [`Env`] trait, which a reactor implements over io_uring and the tests over simulated members on
//! virtual time. Must not know either of them. Invariant: a buffer given to `read` or `write` belongs to the
//! environment until it comes back in the result, even if the future is dropped.

use std::fmt;
use std::io;
use std::time::Instant;

use futures::future::LocalBoxFuture;
use nvmf_target::buffer::IoBuf;

/// A member as the configuration numbers them: the position in the list of members. The pool finds out from the
/// superblocks which member of the set that is, so the list may be reordered between mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberIndex(pub u8);

impl fmt::Display for MemberIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "members[{}]", self.0)
    }
}

/// How a member's read or write ended; the buffer comes back with it.
pub type IoResult = (io::Result<()>, IoBuf);

/// What one reactor gives the pool; used as `Rc<dyn Env>` on that reactor's thread alone.
///
/// Offsets and lengths are multiples of 4096. A short read or write is an error of kind `UnexpectedEof`
/// (`WriteZero`). "No space" beneath a member must come as `ErrorKind::StorageFull` (or `QuotaExceeded`): the pool
/// answers it with Capacity Exceeded and keeps the member.
pub trait Env {
    /// Fills the whole buffer from `member`, starting at byte `offset`.
    fn read(&self, member: MemberIndex, offset: u64, buf: IoBuf) -> LocalBoxFuture<'static, IoResult>;
    /// Writes the whole buffer. Not durable before the next [`Env::sync`] that starts after it has completed.
    fn write(&self, member: MemberIndex, offset: u64, buf: IoBuf) -> LocalBoxFuture<'static, IoResult>;
    /// Makes every completed write durable (fdatasync).
    fn sync(&self, member: MemberIndex) -> LocalBoxFuture<'static, io::Result<()>>;
    /// Sets room aside for a range of a member, whose contents stay. Where nothing is to be done (a device, memory) it
    /// succeeds; where the file system can't, it fails otherwise than with "no space".
    fn allocate(&self, member: MemberIndex, offset: u64, len: u64) -> LocalBoxFuture<'static, io::Result<()>>;
    /// Gives the room of a range back, whose contents don't matter any more. It may do nothing.
    fn release(&self, member: MemberIndex, offset: u64, len: u64) -> LocalBoxFuture<'static, io::Result<()>>;
    /// Makes a member that is a regular file as long as this, if it is shorter; what is added reads as zeroes. May wait for
    /// the file system: asked for before anything is served only.
    fn grow(&self, member: MemberIndex, size_bytes: u64) -> io::Result<()>;
    /// The clock that `sleep_until` goes by.
    fn now(&self) -> Instant;
    /// Seconds since 1970.
    fn unix_seconds(&self) -> u64;
    /// Completes at `at` or soon after.
    fn sleep_until(&self, at: Instant) -> LocalBoxFuture<'static, ()>;
    /// Runs `task` on this reactor.
    fn spawn(&self, task: LocalBoxFuture<'static, ()>);
    /// A buffer of `len` bytes (any multiple of 4096 up to [`MemoryNeeds::largest_buffer_bytes`]); waits while none
    /// is free. The contents are unspecified.
    ///
    /// [`MemoryNeeds::largest_buffer_bytes`]: super::MemoryNeeds::largest_buffer_bytes
    fn buffer(&self, len: usize) -> LocalBoxFuture<'static, IoBuf>;
    /// Fills `out` with unpredictable bytes.
    fn random(&self, out: &mut [u8]);
}
