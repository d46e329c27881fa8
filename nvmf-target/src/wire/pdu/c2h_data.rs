//! C2HData (NVMe/TCP 1.1 §3.6.2.9).

use super::CommonHeader;
use crate::wire::bytes::{put_u16, put_u32, take, u16_at, u32_at};
use crate::wire::{CommandId, WireError};

/// Data to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct C2HData {
    /// Common header.
    pub common: CommonHeader,
    /// CCCID: the command.
    pub cccid: CommandId,
    /// DATAO: where the data goes in the command's buffer.
    pub datao: u32,
    /// DATAL: data bytes in this PDU.
    pub datal: u32,
}

impl C2HData {
    /// Bytes of the header.
    pub const BYTES: usize = 24;

    /// From the first 24 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<{ Self::BYTES }>(bytes)?;
        Ok(Self {
            common: CommonHeader::decode(b)?,
            cccid: CommandId(u16_at(b, 8)),
            datao: u32_at(b, 12),
            datal: u32_at(b, 16),
        })
    }

    /// To its 24 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        self.common.put(&mut b);
        put_u16(&mut b, 8, self.cccid.0);
        put_u32(&mut b, 12, self.datao);
        put_u32(&mut b, 16, self.datal);
        b
    }
}
