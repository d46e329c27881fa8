//! Opcodes and the low bits that give a command's data direction (NVMe Base 2.0 §3.3.3.1, figure 88).

/// Admin commands (NVMe Base 2.0, figure 138).
pub mod admin {
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0a;
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0c;
    pub const NAMESPACE_MANAGEMENT: u8 = 0x0d;
    pub const FIRMWARE_COMMIT: u8 = 0x10;
    pub const FIRMWARE_IMAGE_DOWNLOAD: u8 = 0x11;
    pub const DEVICE_SELF_TEST: u8 = 0x14;
    pub const NAMESPACE_ATTACHMENT: u8 = 0x15;
    pub const KEEP_ALIVE: u8 = 0x18;
    pub const FORMAT_NVM: u8 = 0x80;
    pub const SANITIZE: u8 = 0x84;
}

/// Fabrics commands: one opcode, the type in byte 4 (NVMe Base 2.0 §6).
pub mod fabrics {
    pub const FABRICS: u8 = 0x7f;
    pub const TYPE_PROPERTY_SET: u8 = 0x00;
    pub const TYPE_CONNECT: u8 = 0x01;
    pub const TYPE_PROPERTY_GET: u8 = 0x04;
    pub const TYPE_AUTHENTICATION_SEND: u8 = 0x05;
    pub const TYPE_AUTHENTICATION_RECEIVE: u8 = 0x06;
    pub const TYPE_DISCONNECT: u8 = 0x08;
}

/// I/O commands of the NVM command set (NVM Command Set 1.0, figure 17).
pub mod nvm {
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const WRITE_UNCORRECTABLE: u8 = 0x04;
    pub const COMPARE: u8 = 0x05;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    pub const VERIFY: u8 = 0x0c;
    pub const RESERVATION_REGISTER: u8 = 0x0d;
    pub const RESERVATION_REPORT: u8 = 0x0e;
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    pub const RESERVATION_RELEASE: u8 = 0x15;
    pub const COPY: u8 = 0x19;
}

/// Where a command's data goes, by the low two bits of its opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// 00b: no data.
    None,
    /// 01b: host to controller.
    ToController,
    /// 10b: controller to host.
    ToHost,
    /// 11b: both ways.
    Both,
}

impl Direction {
    /// The direction of `opcode`; of a Fabrics command's type, pass that instead.
    pub fn of(opcode: u8) -> Self {
        match opcode & 3 {
            0 => Self::None,
            1 => Self::ToController,
            2 => Self::ToHost,
            _ => Self::Both,
        }
    }
}
