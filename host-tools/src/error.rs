//! Why a tool ends without having done its work, in words that say what to do, and as an exit code.

use std::io;
use std::path::PathBuf;

use nvmf_target::wire::Status;

use crate::compare::service::ControlError;
use crate::compare::{SetupError, StageError};
use crate::corpus::CorpusError;
use crate::cpu::CpuError;
use crate::exit;
use crate::initiator::ConnectionError;
use crate::journal::JournalError;
use crate::lane::Range;

/// Why a tool stopped.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// Connecting failed, or the connection was lost.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// A command failed.
    #[error("{}", describe_failure(.what, .range, *.status))]
    Command {
        /// Which command.
        what: &'static str,
        /// Which blocks, if it names any.
        range: Option<Range>,
        /// How it failed.
        status: Status,
    },
    /// The namespace isn't there.
    #[error("namespace {nsid} doesn't exist for this host; `nvmf identify` lists those that do{}", existing(.have))]
    NoNamespace {
        /// What was asked for.
        nsid: u32,
        /// What there is.
        have: Vec<u32>,
    },
    /// The namespace has a format that this tool doesn't handle.
    #[error("namespace {nsid} has a format that nvmf doesn't handle (512 to 65536 bytes a block, no metadata)")]
    Format {
        /// Which namespace.
        nsid: u32,
    },
    /// More was asked for than the namespace holds.
    #[error("{what} ends at byte {end}, but namespace {nsid} has {size} bytes")]
    BeyondEnd {
        /// What does.
        what: &'static str,
        /// Where it ends.
        end: u64,
        /// Which namespace.
        nsid: u32,
        /// Its size in bytes.
        size: u64,
    },
    /// A size that doesn't fit the namespace's blocks or the controller's limit.
    #[error(
        "{option} {given}: must be a multiple of the block size {block_bytes} and at most {max_bytes} (this controller's MDTS)"
    )]
    BadSize {
        /// Which option.
        option: &'static str,
        /// What was given.
        given: u64,
        /// Block size in bytes.
        block_bytes: u32,
        /// Longest transfer in bytes.
        max_bytes: u64,
    },
    /// The range to work on holds not even one command.
    #[error("nothing to do: the range holds no whole block")]
    EmptyRange,
    /// Deallocated blocks don't read as zeroes here, so they can't be checked.
    #[error("namespace {nsid} doesn't promise zeroes after Deallocate (DLFEAT); leave --deallocate-percent out")]
    DeallocateUnspecified {
        /// Which namespace.
        nsid: u32,
    },
    /// The journal can't be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A local file failed.
    #[error("{path}: {source}")]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel's CPU counters can't be read.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// There is no data to work on.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// A stage failed on the host.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The service's management socket gave no answer.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The namespaces don't fit what is to be compared.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The system refused something else.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl ToolError {
    /// The exit code for it.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Connection(_) => exit::CONNECTION,
            Self::Command { .. } => exit::COMMAND_FAILED,
            Self::NoNamespace { .. }
            | Self::Format { .. }
            | Self::BeyondEnd { .. }
            | Self::BadSize { .. }
            | Self::EmptyRange
            | Self::Setup(_)
            | Self::DeallocateUnspecified { .. } => exit::USAGE,
            Self::Journal(_)
            | Self::File { .. }
            | Self::Cpu(_)
            | Self::Corpus(_)
            | Self::Stage(_)
            | Self::Control(_)
            | Self::System { .. } => exit::LOCAL,
        }
    }
}

fn existing(have: &[u32]) -> String {
    if have.is_empty() {
        return " (there are none)".to_owned();
    }
    let list: Vec<String> = have.iter().take(16).map(u32::to_string).collect();
    format!(" (have: {}{})", list.join(", "), if have.len() > 16 { ", …" } else { "" })
}

fn describe_failure(what: &str, range: &Option<Range>, status: Status) -> String {
    let place = range.as_ref().map_or_else(String::new, |r| {
        let last = r.slba + u64::from(r.lba_count).saturating_sub(1);
        format!(" of LBA {}-{last}, namespace {}", r.slba, r.nsid)
    });
    let hint = hint(status).map_or_else(String::new, |h| format!("; {h}"));
    format!("{what}{place} failed: {}{hint}", describe_status(status))
}

/// A status by name and numbers: `Capacity Exceeded (sct/sc 0x0/0x81, do not retry)`.
pub fn describe_status(status: Status) -> String {
    let name = status.name().unwrap_or("status unknown to this tool");
    let retry = if status.is_dnr() { ", do not retry" } else { "" };
    format!("{name} (sct/sc {:#x}/{:#x}{retry})", status.sct(), status.sc())
}

/// What the reader of an error can do about it.
pub fn hint(status: Status) -> Option<&'static str> {
    Some(match status.code() {
        Status::CAPACITY_EXCEEDED => "the pool is full: deallocate or delete something, or add space",
        Status::UNRECOVERED_READ => {
            "more members are lost or damaged than parity can rebuild: see `offloadctl pool show`"
        }
        Status::WRITE_FAULT => "the write did not take place: see `offloadctl pool show`",
        Status::INVALID_NAMESPACE => "see `nvmf identify` for the namespaces that exist",
        Status::LBA_OUT_OF_RANGE => "the range lies beyond the namespace's end",
        Status::CONNECT_INVALID_HOST => {
            "the subsystem doesn't allow this host's NQN: allow it, or pass another with -q"
        }
        Status::CONNECT_INVALID_PARAMETERS => "check the subsystem's NQN (-n) with `nvmf discover`",
        Status::CONNECT_CONTROLLER_BUSY => "try again in a moment",
        Status::AUTHENTICATION_REQUIRED => "the subsystem wants authentication, which nvmf doesn't speak",
        Status::TRANSIENT_TRANSPORT_ERROR => "the data arrived damaged; try again",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_place_the_status_and_what_to_do() {
        let range = Some(Range { nsid: 1, slba: 8, lba_count: 4 });
        let error = ToolError::Command { what: "Write", range, status: Status::CAPACITY_EXCEEDED.dnr() };
        assert_eq!(
            error.to_string(),
            "Write of LBA 8-11, namespace 1 failed: Capacity Exceeded (sct/sc 0x0/0x81, do not retry); \
             the pool is full: deallocate or delete something, or add space"
        );
        assert_eq!(error.exit_code(), exit::COMMAND_FAILED);
        let odd = ToolError::Command { what: "Flush", range: None, status: Status::new(7, 0xEE) };
        assert_eq!(odd.to_string(), "Flush failed: status unknown to this tool (sct/sc 0x7/0xee)");
    }
}
