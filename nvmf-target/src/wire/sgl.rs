//! SGL descriptor, 16 bytes (NVMe Base 2.0 §4.1.2, figure 114 on).

use super::bytes::{put_u32, put_u64, u32_at, u64_at};

/// Bytes of a descriptor.
pub const SGL_BYTES: usize = 16;

/// What a descriptor says that it is: type (high nibble) and sub type (low nibble) of byte 15.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SglKind {
    /// 00h: Data Block at an address.
    DataBlock,
    /// 01h: Data Block at an offset into the capsule: in-capsule data.
    DataBlockOffset,
    /// 1xh: Bit Bucket.
    BitBucket,
    /// 2xh: Segment.
    Segment,
    /// 3xh: Last Segment.
    LastSegment,
    /// 4xh: Keyed Data Block (RDMA).
    KeyedDataBlock,
    /// 5Ah: Transport Data Block: the transport moves the data (NVMe/TCP: R2T and C2HData).
    TransportDataBlock,
    /// Anything else.
    Other(u8),
}

impl SglKind {
    /// From byte 15.
    pub fn from_byte(byte: u8) -> Self {
        match (byte >> 4, byte & 0xf) {
            (0, 0) => Self::DataBlock,
            (0, 1) => Self::DataBlockOffset,
            (1, _) => Self::BitBucket,
            (2, _) => Self::Segment,
            (3, _) => Self::LastSegment,
            (4, _) => Self::KeyedDataBlock,
            (5, 0xa) => Self::TransportDataBlock,
            _ => Self::Other(byte),
        }
    }
}

/// A descriptor as it stands in a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SglDescriptor {
    /// Bytes 0–7: address, or offset into the capsule.
    pub address: u64,
    /// Bytes 8–11: length in bytes.
    pub len_bytes: u32,
    /// Byte 15.
    pub kind_byte: u8,
}

impl SglDescriptor {
    /// `len_bytes` of data that the transport moves outside the command capsule; also "no data" when 0.
    pub fn transport(len_bytes: u32) -> Self {
        Self { address: 0, len_bytes, kind_byte: 0x5a }
    }

    /// `len_bytes` of data in the command capsule, `offset` bytes into its data.
    pub fn in_capsule(offset: u64, len_bytes: u32) -> Self {
        Self { address: offset, len_bytes, kind_byte: 0x01 }
    }

    /// What byte 15 says.
    pub fn kind(&self) -> SglKind {
        SglKind::from_byte(self.kind_byte)
    }

    /// From its 16 bytes.
    pub fn decode(bytes: &[u8; SGL_BYTES]) -> Self {
        Self { address: u64_at(bytes, 0), len_bytes: u32_at(bytes, 8), kind_byte: bytes[15] }
    }

    /// To its 16 bytes.
    pub fn encode(&self) -> [u8; SGL_BYTES] {
        let mut bytes = [0; SGL_BYTES];
        put_u64(&mut bytes, 0, self.address);
        put_u32(&mut bytes, 8, self.len_bytes);
        bytes[15] = self.kind_byte;
        bytes
    }
}
