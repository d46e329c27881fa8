//! H2CTermReq and C2HTermReq (NVMe/TCP 1.1 §3.6.2.4, §3.6.2.5).

use super::CommonHeader;
use crate::wire::WireError;
use crate::wire::bytes::{put_u16, put_u32, take, u16_at, u32_at};

/// Most bytes of the offending PDU's header that may follow: PLEN is at most 24 + 128.
pub const TERM_REQ_DATA_MAX_BYTES: usize = 128;

/// FES: why the connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum FatalError {
    /// 01h: FEI is the offset of the bad field in the PDU header.
    InvalidHeaderField = 0x01,
    /// 02h: a PDU that may not come now.
    SequenceError = 0x02,
    /// 03h: FEI is the header digest that came.
    HeaderDigest = 0x03,
    /// 04h: data outside of what was asked for.
    DataOutOfRange = 0x04,
    /// 05h: more data in one PDU than MAXH2CDATA (to the host: more R2Ts than MAXR2T).
    LimitExceeded = 0x05,
    /// 06h: FEI is the offset of the parameter in the PDU header.
    UnsupportedParameter = 0x06,
}

impl FatalError {
    /// The error with this code.
    pub fn from_code(code: u16) -> Option<Self> {
        Some(match code {
            0x01 => Self::InvalidHeaderField,
            0x02 => Self::SequenceError,
            0x03 => Self::HeaderDigest,
            0x04 => Self::DataOutOfRange,
            0x05 => Self::LimitExceeded,
            0x06 => Self::UnsupportedParameter,
            _ => return None,
        })
    }
}

/// The sender ends the connection; the header of the PDU in error follows as data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TermReq {
    /// Common header; its type says which direction.
    pub common: CommonHeader,
    /// FES as it came; see [`FatalError::from_code`].
    pub fes: u16,
    /// FEI: more about the error.
    pub fei: u32,
}

impl TermReq {
    /// Bytes of the header.
    pub const BYTES: usize = 24;

    /// From the first 24 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<{ Self::BYTES }>(bytes)?;
        // FEI is not aligned: it follows FES directly.
        Ok(Self { common: CommonHeader::decode(b)?, fes: u16_at(b, 8), fei: u32_at(b, 10) })
    }

    /// To its 24 bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut b = [0; Self::BYTES];
        self.common.put(&mut b);
        put_u16(&mut b, 8, self.fes);
        put_u32(&mut b, 10, self.fei);
        b
    }
}
