//! Submission queue entry, 64 bytes (NVMe Base 2.0 §3.3.3.1, figures 86–88).

use std::fmt;

use super::bytes::{put_u16, put_u32, put_u64, take, u16_at, u32_at, u64_at};
use super::sgl::{SGL_BYTES, SglDescriptor};
use super::{CommandId, NamespaceId, WireError};

/// Bytes of an entry.
pub const SQE_BYTES: usize = 64;

/// FUSE, bits 9:8 of dword 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fuse {
    /// 00b: a command of its own.
    Normal,
    /// 01b: first of a fused pair.
    First,
    /// 10b: second of a fused pair.
    Second,
    /// 11b.
    Reserved,
}

/// PSDT, bits 15:14 of dword 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Psdt {
    /// 00b: PRPs; not allowed over fabrics.
    Prp,
    /// 01b: SGL, metadata contiguous.
    Sgl,
    /// 10b: SGL, metadata through an SGL.
    SglMetadataSgl,
    /// 11b.
    Reserved,
}

/// A command as it came.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sqe(pub [u8; SQE_BYTES]);

impl Sqe {
    /// A command with `opcode`, all else zero but PSDT, which fabrics want to be 01b.
    pub fn new(opcode: u8) -> Self {
        let mut sqe = Self([0; SQE_BYTES]);
        sqe.0[0] = opcode;
        sqe.0[1] = 0x40;
        sqe
    }

    /// From the first 64 of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        take::<SQE_BYTES>(bytes).map(|b| Self(*b))
    }

    /// OPC.
    pub fn opcode(&self) -> u8 {
        self.0[0]
    }

    /// FCTYPE of a Fabrics command.
    pub fn fabrics_type(&self) -> u8 {
        self.0[4]
    }

    /// FUSE.
    pub fn fuse(&self) -> Fuse {
        match self.0[1] & 3 {
            0 => Fuse::Normal,
            1 => Fuse::First,
            2 => Fuse::Second,
            _ => Fuse::Reserved,
        }
    }

    /// PSDT.
    pub fn psdt(&self) -> Psdt {
        match self.0[1] >> 6 {
            0 => Psdt::Prp,
            1 => Psdt::Sgl,
            2 => Psdt::SglMetadataSgl,
            _ => Psdt::Reserved,
        }
    }

    /// CID.
    pub fn command_id(&self) -> CommandId {
        CommandId(u16_at(&self.0, 2))
    }

    /// NSID.
    pub fn namespace_id(&self) -> NamespaceId {
        NamespaceId(u32_at(&self.0, 4))
    }

    /// SGL1.
    pub fn sgl(&self) -> SglDescriptor {
        let mut bytes = [0; SGL_BYTES];
        bytes.copy_from_slice(&self.0[24..40]);
        SglDescriptor::decode(&bytes)
    }

    /// Command dword `index`, 0 to 15.
    ///
    /// # Panics
    /// If `index` is over 15, which is a fault of the caller.
    pub fn dword(&self, index: usize) -> u32 {
        u32_at(&self.0, index * 4)
    }

    /// Dwords 10 and 11 as one number: SLBA of NVM commands.
    pub fn cdw10_11(&self) -> u64 {
        u64_at(&self.0, 40)
    }

    /// Sets FCTYPE.
    pub fn set_fabrics_type(&mut self, fctype: u8) -> &mut Self {
        self.0[4] = fctype;
        self
    }

    /// Sets FUSE by its two bits.
    pub fn set_fuse_bits(&mut self, bits: u8) -> &mut Self {
        self.0[1] = (self.0[1] & !3) | (bits & 3);
        self
    }

    /// Sets PSDT by its two bits.
    pub fn set_psdt_bits(&mut self, bits: u8) -> &mut Self {
        self.0[1] = (self.0[1] & 0x3f) | (bits << 6);
        self
    }

    /// Sets CID.
    pub fn set_command_id(&mut self, cid: CommandId) -> &mut Self {
        put_u16(&mut self.0, 2, cid.0);
        self
    }

    /// Sets NSID.
    pub fn set_namespace_id(&mut self, nsid: NamespaceId) -> &mut Self {
        put_u32(&mut self.0, 4, nsid.0);
        self
    }

    /// Sets SGL1.
    pub fn set_sgl(&mut self, sgl: SglDescriptor) -> &mut Self {
        self.0[24..40].copy_from_slice(&sgl.encode());
        self
    }

    /// Sets command dword `index`, 0 to 15.
    ///
    /// # Panics
    /// If `index` is over 15, which is a fault of the caller.
    pub fn set_dword(&mut self, index: usize, value: u32) -> &mut Self {
        put_u32(&mut self.0, index * 4, value);
        self
    }

    /// Sets dwords 10 and 11.
    pub fn set_cdw10_11(&mut self, value: u64) -> &mut Self {
        put_u64(&mut self.0, 40, value);
        self
    }
}

impl fmt::Debug for Sqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqe")
            .field("opcode", &format_args!("{:#04x}", self.opcode()))
            .field("fuse", &self.fuse())
            .field("cid", &self.command_id().0)
            .field("nsid", &self.namespace_id().0)
            .field("sgl", &self.sgl())
            .field("cdw10", &self.dword(10))
            .field("cdw11", &self.dword(11))
            .field("cdw12", &self.dword(12))
            .field("cdw13", &self.dword(13))
            .finish()
    }
}
