//! CapsuleResp (NVMe/TCP 1.1 §3.6.2.7).

use super::CommonHeader;
use crate::wire::bytes::take;
use crate::wire::{Cqe, WireError};

/// A completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapsuleResp {
    /// Common header.
    pub common: CommonHeader,
    /// The completion.
    pub cqe: Cqe,
}

impl CapsuleResp {
    /// Bytes of the header.
    pub const BYTES: usize = 24;

    /// From the first 24 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<{ Self::BYTES }>(bytes)?;
        Ok(Self { common: CommonHeader::decode(b)?, cqe: Cqe::decode(&b[8..])? })
    }

    /// To its 24 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        self.common.put(&mut b);
        b[8..].copy_from_slice(&self.cqe.encode());
        b
    }
}
