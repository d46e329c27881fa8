//! ICResp (NVMe/TCP 1.1 §3.6.2.3).

use super::CommonHeader;
use crate::wire::WireError;
use crate::wire::bytes::{put_u16, put_u32, take, u16_at, u32_at};

/// The controller accepts: its first PDU, without digests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ICResp {
    /// Common header.
    pub common: CommonHeader,
    /// PFV: PDU format version; 0.
    pub pfv: u16,
    /// CPDA: alignment of data to the controller, in dwords minus one; at most 31.
    pub cpda: u8,
    /// DGST: bit 0 header digest, bit 1 data digest; at most what ICReq asked for.
    pub dgst: u8,
    /// MAXH2CDATA: most data bytes in one H2CData; a multiple of 4, at least 4096.
    pub maxh2cdata: u32,
}

impl ICResp {
    /// Bytes of the header.
    pub const BYTES: usize = 128;

    /// From the first 128 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<{ Self::BYTES }>(bytes)?;
        Ok(Self {
            common: CommonHeader::decode(b)?,
            pfv: u16_at(b, 8),
            cpda: b[10],
            dgst: b[11],
            maxh2cdata: u32_at(b, 12),
        })
    }

    /// To its 128 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        self.common.put(&mut b);
        put_u16(&mut b, 8, self.pfv);
        b[10] = self.cpda;
        b[11] = self.dgst;
        put_u32(&mut b, 12, self.maxh2cdata);
        b
    }
}
