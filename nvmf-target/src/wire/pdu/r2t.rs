//! R2T (NVMe/TCP 1.1 §3.6.2.10).

use super::CommonHeader;
use crate::wire::bytes::{put_u16, put_u32, take, u16_at, u32_at};
use crate::wire::{CommandId, WireError};

/// Ready to transfer: the controller asks for a part of a command's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct R2T {
    /// Common header.
    pub common: CommonHeader,
    /// CCCID: the command.
    pub cccid: CommandId,
    /// TTAG: to be repeated in the H2CData that answers.
    pub ttag: u16,
    /// R2TO: first byte asked for.
    pub r2to: u32,
    /// R2TL: bytes asked for.
    pub r2tl: u32,
}

impl R2T {
    /// Bytes of the header.
    pub const BYTES: usize = 24;

    /// From the first 24 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<{ Self::BYTES }>(bytes)?;
        Ok(Self {
            common: CommonHeader::decode(b)?,
            cccid: CommandId(u16_at(b, 8)),
            ttag: u16_at(b, 10),
            r2to: u32_at(b, 12),
            r2tl: u32_at(b, 16),
        })
    }

    /// To its 24 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        self.common.put(&mut b);
        put_u16(&mut b, 8, self.cccid.0);
        put_u16(&mut b, 10, self.ttag);
        put_u32(&mut b, 12, self.r2to);
        put_u32(&mut b, 16, self.r2tl);
        b
    }
}
