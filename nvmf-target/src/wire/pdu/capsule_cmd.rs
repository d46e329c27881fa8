//! CapsuleCmd (NVMe/TCP 1.1 §3.6.2.6).

use super::CommonHeader;
use crate::wire::bytes::take;
use crate::wire::{Sqe, WireError};

/// A command, with or without data in its capsule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapsuleCmd {
    /// Common header.
    pub common: CommonHeader,
    /// The command.
    pub sqe: Sqe,
}

impl CapsuleCmd {
    /// Bytes of the header.
    pub const BYTES: usize = 72;

    /// From the first 72 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<{ Self::BYTES }>(bytes)?;
        Ok(Self { common: CommonHeader::decode(b)?, sqe: Sqe::decode(&b[8..])? })
    }

    /// To its 72 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        self.common.put(&mut b);
        b[8..].copy_from_slice(&self.sqe.0);
        b
    }
}
