//! H2CData (NVMe/TCP 1.1 §3.6.2.8).

use super::CommonHeader;
use crate::wire::bytes::{put_u16, put_u32, take, u16_at, u32_at};
use crate::wire::{CommandId, WireError};

/// Data from the host, answering an R2T.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct H2CData {
    /// Common header.
    pub common: CommonHeader,
    /// CCCID: the command.
    pub cccid: CommandId,
    /// TTAG: the R2T that it answers.
    pub ttag: u16,
    /// DATAO: where the data goes in the command's buffer.
    pub datao: u32,
    /// DATAL: data bytes in this PDU.
    pub datal: u32,
}

impl H2CData {
    /// Bytes of the header.
    pub const BYTES: usize = 24;

    /// From the first 24 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<{ Self::BYTES }>(bytes)?;
        Ok(Self {
            common: CommonHeader::decode(b)?,
            cccid: CommandId(u16_at(b, 8)),
            ttag: u16_at(b, 10),
            datao: u32_at(b, 12),
            datal: u32_at(b, 16),
        })
    }

    /// To its 24 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        self.common.put(&mut b);
        put_u16(&mut b, 8, self.cccid.0);
        put_u16(&mut b, 10, self.ttag);
        put_u32(&mut b, 12, self.datao);
        put_u32(&mut b, 16, self.datal);
        b
    }
}
