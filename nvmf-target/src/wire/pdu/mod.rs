//! NVMe/TCP PDUs: the common header and the nine types (NVMe/TCP 1.1 §3.6).
//!
//! Owns header layouts only: digests, padding and data follow the header and are the framing machine's. Decoding
//! gives what stands there; whether it is allowed is for `proto::framing` to say.

mod c2h_data;
mod capsule_cmd;
mod capsule_resp;
mod h2c_data;
mod ic_req;
mod ic_resp;
mod r2t;
mod term_req;
#[cfg(test)]
mod tests;

pub use c2h_data::C2HData;
pub use capsule_cmd::CapsuleCmd;
pub use capsule_resp::CapsuleResp;
pub use h2c_data::H2CData;
pub use ic_req::ICReq;
pub use ic_resp::ICResp;
pub use r2t::R2T;
pub use term_req::{FatalError, TERM_REQ_DATA_MAX_BYTES, TermReq};

use super::WireError;
use super::bytes::{put_u32, take, u32_at};

/// Bytes of the common header.
pub const COMMON_HEADER_BYTES: usize = 8;
/// Bytes of the longest header (ICReq, ICResp).
pub const HEADER_MAX_BYTES: usize = 128;

/// FLAGS bit 0: a header digest follows the header.
pub const FLAG_HEADER_DIGEST: u8 = 1;
/// FLAGS bit 1: a data digest follows the data.
pub const FLAG_DATA_DIGEST: u8 = 1 << 1;
/// FLAGS bit 2 of H2CData and C2HData: the last of its R2T or command.
pub const FLAG_LAST: u8 = 1 << 2;
/// FLAGS bit 3 of C2HData: the command succeeded and no CapsuleResp follows.
pub const FLAG_SUCCESS: u8 = 1 << 3;

/// PDU-Type, byte 0 of the common header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PduType {
    ICReq = 0x00,
    ICResp = 0x01,
    H2CTermReq = 0x02,
    C2HTermReq = 0x03,
    CapsuleCmd = 0x04,
    CapsuleResp = 0x05,
    H2CData = 0x06,
    C2HData = 0x07,
    R2T = 0x09,
}

impl PduType {
    /// Every type.
    pub const ALL: [Self; 9] = [
        Self::ICReq,
        Self::ICResp,
        Self::H2CTermReq,
        Self::C2HTermReq,
        Self::CapsuleCmd,
        Self::CapsuleResp,
        Self::H2CData,
        Self::C2HData,
        Self::R2T,
    ];

    /// The type with this code.
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as u8 == byte)
    }

    /// HLEN: the header's fixed length in bytes, without digest.
    pub fn header_bytes(self) -> usize {
        match self {
            Self::ICReq | Self::ICResp => 128,
            Self::CapsuleCmd => 72,
            Self::H2CTermReq | Self::C2HTermReq | Self::CapsuleResp | Self::H2CData | Self::C2HData | Self::R2T => 24,
        }
    }

    /// Host to controller, by who may send it.
    pub fn is_from_host(self) -> bool {
        matches!(self, Self::ICReq | Self::H2CTermReq | Self::CapsuleCmd | Self::H2CData)
    }
}

/// The common header (NVMe/TCP 1.1 §3.6.1). HLEN is the type's own and is written by `encode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommonHeader {
    /// PDU-Type as it came; see [`PduType::from_byte`].
    pub pdu_type: u8,
    /// FLAGS.
    pub flags: u8,
    /// HLEN in bytes.
    pub hlen: u8,
    /// PDO: where the data begins, from the start of the PDU; 0 without data.
    pub pdo: u8,
    /// PLEN: the whole PDU in bytes, digests, padding and data included.
    pub plen: u32,
}

impl CommonHeader {
    /// A header of `pdu_type` without digests or data.
    pub fn bare(pdu_type: PduType) -> Self {
        let hlen = pdu_type.header_bytes() as u8;
        Self { pdu_type: pdu_type as u8, flags: 0, hlen, pdo: 0, plen: u32::from(hlen) }
    }

    /// From the first 8 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<COMMON_HEADER_BYTES>(bytes)?;
        Ok(Self { pdu_type: b[0], flags: b[1], hlen: b[2], pdo: b[3], plen: u32_at(b, 4) })
    }

    /// Into the first 8 of `bytes`.
    pub fn put(&self, bytes: &mut [u8]) {
        bytes[0] = self.pdu_type;
        bytes[1] = self.flags;
        bytes[2] = self.hlen;
        bytes[3] = self.pdo;
        put_u32(bytes, 4, self.plen);
    }

    /// Whether all of `flag`'s bits are set.
    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag == flag
    }
}

/// Any PDU's header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pdu {
    ICReq(ICReq),
    ICResp(ICResp),
    TermReq(TermReq),
    CapsuleCmd(CapsuleCmd),
    CapsuleResp(CapsuleResp),
    H2CData(H2CData),
    C2HData(C2HData),
    R2T(R2T),
}

impl Pdu {
    /// The PDU whose header starts `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let code = CommonHeader::decode(bytes)?.pdu_type;
        let pdu_type = PduType::from_byte(code).ok_or(WireError::Unknown { offset: 0, value: u32::from(code) })?;
        Ok(match pdu_type {
            PduType::ICReq => Self::ICReq(ICReq::decode(bytes)?),
            PduType::ICResp => Self::ICResp(ICResp::decode(bytes)?),
            PduType::H2CTermReq | PduType::C2HTermReq => Self::TermReq(TermReq::decode(bytes)?),
            PduType::CapsuleCmd => Self::CapsuleCmd(CapsuleCmd::decode(bytes)?),
            PduType::CapsuleResp => Self::CapsuleResp(CapsuleResp::decode(bytes)?),
            PduType::H2CData => Self::H2CData(H2CData::decode(bytes)?),
            PduType::C2HData => Self::C2HData(C2HData::decode(bytes)?),
            PduType::R2T => Self::R2T(R2T::decode(bytes)?),
        })
    }

    /// The header's bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::ICReq(pdu) => pdu.encode().to_vec(),
            Self::ICResp(pdu) => pdu.encode().to_vec(),
            Self::TermReq(pdu) => pdu.encode().to_vec(),
            Self::CapsuleCmd(pdu) => pdu.encode().to_vec(),
            Self::CapsuleResp(pdu) => pdu.encode().to_vec(),
            Self::H2CData(pdu) => pdu.encode().to_vec(),
            Self::C2HData(pdu) => pdu.encode().to_vec(),
            Self::R2T(pdu) => pdu.encode().to_vec(),
        }
    }
}
