//! ICReq (NVMe/TCP 1.1 §3.6.2.2).

use super::CommonHeader;
use crate::wire::WireError;
use crate::wire::bytes::{put_u16, put_u32, take, u16_at, u32_at};

/// The host asks for a connection: first PDU on the socket, without digests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ICReq {
    /// Common header.
    pub common: CommonHeader,
    /// PFV: PDU format version; 0.
    pub pfv: u16,
    /// HPDA: alignment of data to the host, in dwords minus one; at most 31.
    pub hpda: u8,
    /// DGST: bit 0 header digest, bit 1 data digest.
    pub dgst: u8,
    /// MAXR2T: outstanding R2Ts for one command, minus one.
    pub maxr2t: u32,
}

impl ICReq {
    /// Bytes of the header.
    pub const BYTES: usize = 128;

    /// From the first 128 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<{ Self::BYTES }>(bytes)?;
        Ok(Self {
            common: CommonHeader::decode(b)?,
            pfv: u16_at(b, 8),
            hpda: b[10],
            dgst: b[11],
            maxr2t: u32_at(b, 12),
        })
    }

    /// To its 128 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        self.common.put(&mut b);
        put_u16(&mut b, 8, self.pfv);
        b[10] = self.hpda;
        b[11] = self.dgst;
        put_u32(&mut b, 12, self.maxr2t);
        b
    }
}
