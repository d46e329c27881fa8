//! Wire types: bytes to types and back, one type a file.
//!
//! Owns byte layouts and code points of NVMe Base 2.x, NVMe over Fabrics 1.1, the NVM command set and the
//! NVMe/TCP transport 1.1. Must not know connections, state or time. Invariant: decoding never panics, whatever
//! the bytes; what encodes decodes to itself.

#![forbid(unsafe_code)]

pub mod bytes;
pub mod connect;
pub mod cqe;
pub mod digest;
pub mod features;
pub mod identify;
pub mod ids;
pub mod log_pages;
pub mod nqn;
pub mod opcode;
pub mod pdu;
pub mod properties;
pub mod sgl;
pub mod sqe;
pub mod status;

pub use cqe::Cqe;
pub use ids::{CommandId, ControllerId, NamespaceId, QueueId};
pub use sgl::{SglDescriptor, SglKind};
pub use sqe::{Fuse, Psdt, Sqe};
pub use status::Status;

/// Why bytes aren't the wire type that they were decoded as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Fewer bytes than the type has.
    #[error("{have} bytes where {need} are needed")]
    Short {
        /// Bytes that the type has.
        need: usize,
        /// Bytes that were there.
        have: usize,
    },
    /// A code point that names no known value.
    #[error("unknown value {value:#x} at byte {offset}")]
    Unknown {
        /// Where the field starts.
        offset: usize,
        /// What was found there.
        value: u32,
    },
}
