//! Keeps the process's memory, and so its keys, out of core dumps and away from other users' debuggers.
//!
//! Owns the process-wide switches. Must not know which keys there are. Invariant: after success, neither a crash nor an
//! unprivileged ptrace yields key material.

use nix::errno::Errno;
use nix::sys::resource::{Resource, setrlimit};

/// Which switch the kernel refused.
#[derive(Debug, Clone, Copy, thiserror::Error)]
pub enum ProtectError {
    #[error("prctl(PR_SET_DUMPABLE, 0) failed")]
    Dumpable(#[source] Errno),
    #[error("setrlimit(RLIMIT_CORE, 0) failed")]
    CoreLimit(#[source] Errno),
}

/// Turns core dumps and foreign ptrace off for this process and what it starts. Call before the first key is loaded.
///
/// Not dumpable also keeps `/proc/self/mem` from other users (ptrace(2), "Ptrace access mode checking"). The core limit covers
/// `fs.suid_dumpable=2`, which would dump for root all the same.
pub fn protect_process() -> Result<(), ProtectError> {
    nix::sys::prctl::set_dumpable(false).map_err(ProtectError::Dumpable)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(ProtectError::CoreLimit)
}
