//! The pool's environment on a reactor.
//!
//! Owns the translation of member numbers into open files. Must not know what the pool stores. Invariant: as the
//! [`Env`] trait says; quarantine and limits are `disk`'s.

use std::io;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use futures::FutureExt;
use futures::future::{LocalBoxFuture, ready};
use nvmf_target::buffer::IoBuf;

use super::local::Local;
use super::members::Members;
use crate::pool::env::{Env, IoResult, MemberIndex};

/// One reactor's environment for the pool.
pub struct ReactorEnv {
    local: Local,
    members: Members,
}

impl ReactorEnv {
    /// The environment of the reactor `local`.
    pub fn new(local: Local, members: Members) -> Self {
        Self { local, members }
    }
}

/// The member was not there when the service started.
fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Env for ReactorEnv {
    fn read(&self, member: MemberIndex, offset: u64, buf: IoBuf) -> LocalBoxFuture<'static, IoResult> {
        match self.members.file(member.0.into()) {
            Some(file) => self.local.read(&file, offset, buf).boxed_local(),
            None => ready((Err(missing()), buf)).boxed_local(),
        }
    }

    fn write(&self, member: MemberIndex, offset: u64, buf: IoBuf) -> LocalBoxFuture<'static, IoResult> {
        match self.members.file(member.0.into()) {
            Some(file) => self.local.write(&file, offset, buf).boxed_local(),
            None => ready((Err(missing()), buf)).boxed_local(),
        }
    }

    fn sync(&self, member: MemberIndex) -> LocalBoxFuture<'static, io::Result<()>> {
        match self.members.file(member.0.into()) {
            Some(file) => self.local.sync(&file).boxed_local(),
            None => ready(Err(missing())).boxed_local(),
        }
    }

    fn allocate(&self, member: MemberIndex, offset: u64, len: u64) -> LocalBoxFuture<'static, io::Result<()>> {
        match self.members.file(member.0.into()) {
            Some(file) if file.is_regular() => self.local.allocate(&file, offset, len).boxed_local(),
            Some(_) => ready(Ok(())).boxed_local(),
            None => ready(Err(missing())).boxed_local(),
        }
    }

    fn release(&self, member: MemberIndex, offset: u64, len: u64) -> LocalBoxFuture<'static, io::Result<()>> {
        match self.members.file(member.0.into()) {
            Some(file) if file.is_regular() => self.local.punch_hole(&file, offset, len).boxed_local(),
            Some(_) => ready(Ok(())).boxed_local(),
            None => ready(Err(missing())).boxed_local(),
        }
    }

    fn grow(&self, member: MemberIndex, size_bytes: u64) -> io::Result<()> {
        self.members.file(member.0.into()).ok_or_else(missing)?.grow(size_bytes)
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn unix_seconds(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    fn sleep_until(&self, at: Instant) -> LocalBoxFuture<'static, ()> {
        self.local.sleep_until(at).boxed_local()
    }

    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        self.local.spawn(task);
    }

    fn buffer(&self, len: usize) -> LocalBoxFuture<'static, IoBuf> {
        self.local.buffer(len).boxed_local()
    }

    fn random(&self, out: &mut [u8]) {
        rand::fill(out);
    }
}
