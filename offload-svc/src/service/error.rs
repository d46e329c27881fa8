//! Why the service did not start, failed, or did not stop cleanly.
//!
//! Owns the errors that reach `main` and their exit codes. Must not know how a part works. Invariant: each says what was
//! wrong, where, and what to do, on one line with its sources.

use std::io;
use std::path::PathBuf;

use nvmf_target::target::TargetError;

use super::changes::ChangeError;
use super::live::OpenError;
use super::storage::{CloseError, StorageError};
use crate::config::ConfigError;
use crate::config::state::StateError;
use crate::manage::server::BindError;
use crate::reactor::{ReactorFailure, StartError, TooLittleForBuffers};
use crate::stages::keys::ProtectError;

/// The configuration is wrong.
pub const EXIT_CONFIG: u8 = 3;
/// The service could not start; nothing was left running.
pub const EXIT_START: u8 = 4;
/// The service failed while it served.
pub const EXIT_FAILED: u8 = 5;
/// The service stopped, but not cleanly: the next start recovers from the log.
pub const EXIT_UNCLEAN: u8 = 6;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The configuration, once the pool was there to compare it with.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The program is not what its source says.
    #[error(
        "this program was compiled wrongly, by a Rust with a known fault (rust-lang/rust issue 158206): build it with the \
         repository's .cargo/rustc, or with Rust 1.98.1 or later"
    )]
    Compiler,
    /// Memory can't be kept out of core dumps.
    #[error("the process can't be protected against core dumps")]
    Protect(#[source] ProtectError),
    /// No control plane.
    #[error("the control plane's threads don't start")]
    Runtime(#[source] io::Error),
    /// No signals.
    #[error("signals can't be received")]
    Signals(#[source] io::Error),
    /// A folder for the service's own files can't be made.
    #[error("{}: can't be created; make the folder or change {key}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The key whose file should stand in it.
        key: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The changes made at run time.
    #[error("service.state: {0}")]
    State(#[from] StateError),
    /// They can't be kept.
    #[error("service.state: {0}")]
    Change(#[from] ChangeError),
    /// The management socket.
    #[error(transparent)]
    Socket(#[from] BindError),
    /// The buffers' memory.
    #[error(transparent)]
    Buffers(#[from] TooLittleForBuffers),
    /// The reactors.
    #[error(transparent)]
    Reactors(#[from] StartError),
    /// The pool.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A listener's address is taken or not ours.
    #[error("{place}: {endpoint}: {source}: stop what listens there, or change the address or port")]
    Address {
        /// Its place in the configuration, or among the changes made at run time.
        place: String,
        /// The address and port.
        endpoint: String,
        /// Why.
        source: io::Error,
    },
    /// A namespace's back end.
    #[error("subsystem {nqn}: namespace {nsid}: {source}")]
    Namespace {
        /// The subsystem.
        nqn: String,
        /// The namespace.
        nsid: u32,
        /// Why.
        source: OpenError,
    },
    /// The target refused a part of the configuration.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A reactor ended by a bug.
    #[error(transparent)]
    Reactor(#[from] ReactorFailure),
    /// A part of the start failed by a bug.
    #[error("the start failed inside; see the log")]
    Bug,
    /// It did not stop cleanly.
    #[error("not stopped cleanly: the next start recovers from the log")]
    Stop(#[source] StopError),
}

impl ServiceError {
    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::State(_) | Self::Storage(StorageError::Config(_)) => EXIT_CONFIG,
            Self::Reactor(_) => EXIT_FAILED,
            Self::Stop(_) => EXIT_UNCLEAN,
            _ => EXIT_START,
        }
    }
}

/// Why a stop was not clean.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// Commands did not end in time.
    #[error(transparent)]
    Target(TargetError),
    /// The pool did not close.
    #[error(transparent)]
    Pool(#[from] CloseError),
    /// A second signal came.
    #[error("a second signal came before everything had ended")]
    Hard,
}
