//! Completion queue entry, 16 bytes (NVMe Base 2.0 §3.3.3.2; over fabrics the phase tag is reserved).

use super::bytes::{put_u16, put_u32, take, u16_at, u32_at};
use super::{CommandId, QueueId, Status, WireError};

/// Bytes of an entry.
pub const CQE_BYTES: usize = 16;

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// Dword 0: the command's result, low half.
    pub dw0: u32,
    /// Dword 1: the command's result, high half.
    pub dw1: u32,
    /// SQHD. Reserved (FFFFh in Connect's answer) when SQ flow control is off.
    pub sqhd: u16,
    /// SQID; reserved over fabrics.
    pub sqid: QueueId,
    /// CID of the command.
    pub cid: CommandId,
    /// How it ended.
    pub status: Status,
}

impl Cqe {
    /// A completion of `cid` without a result; the transport fills SQHD in.
    pub fn of(cid: CommandId, status: Status) -> Self {
        Self { dw0: 0, dw1: 0, sqhd: 0, sqid: QueueId(0), cid, status }
    }

    /// Dwords 0 and 1 as one number.
    pub fn result(&self) -> u64 {
        u64::from(self.dw0) | u64::from(self.dw1) << 32
    }

    /// From the first 16 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let b = take::<CQE_BYTES>(bytes)?;
        Ok(Self {
            dw0: u32_at(b, 0),
            dw1: u32_at(b, 4),
            sqhd: u16_at(b, 8),
            sqid: QueueId(u16_at(b, 10)),
            cid: CommandId(u16_at(b, 12)),
            status: Status::from_bits(u16_at(b, 14) >> 1),
        })
    }

    /// To its 16 bytes.
    pub fn encode(&self) -> [u8; CQE_BYTES] {
        let mut b = [0; CQE_BYTES];
        put_u32(&mut b, 0, self.dw0);
        put_u32(&mut b, 4, self.dw1);
        put_u16(&mut b, 8, self.sqhd);
        put_u16(&mut b, 10, self.sqid.0);
        put_u16(&mut b, 12, self.cid.0);
        put_u16(&mut b, 14, self.status.bits() << 1);
        b
    }
}
