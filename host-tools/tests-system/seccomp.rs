//! Running a program where the kernel has no io_uring for it, as with `kernel.io_uring_disabled=2` or in most containers:
//! this test's own program starts again, forbids itself the system call, and becomes the other one.
//!
//! Must not change anything outside its own process.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// The first argument that asks for it; the program and its arguments follow.
pub const WITHOUT_IO_URING: &str = "--without-io-uring";

/// Becomes `program`. Comes back only with the reason why it didn't.
pub fn run_without_io_uring(program: &str, arguments: &[String]) -> anyhow::Error {
    match forbid() {
        Ok(()) => anyhow::Error::from(Command::new(program).args(arguments).exec()),
        Err(error) => error,
    }
}

fn forbid() -> Result<()> {
    let always = Vec::new();
    // What io_uring_setup answers under kernel.io_uring_disabled=2.
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let rules = BTreeMap::from([(libc::SYS_io_uring_setup, always)]);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, std::env::consts::ARCH.try_into()?)?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&program).context("seccomp")
}
