//! Controller properties (NVMe Base 2.0 §3.1.3; over fabrics by Property Get and Set, NVMe-oF 1.1 §3.5, §3.6).
//!
//! Owns their offsets, sizes and bits. It must not know a controller's state.

/// Offset of CAP, 8 bytes, read only.
pub const CAP: u32 = 0x00;
/// Offset of VS, 4 bytes, read only.
pub const VS: u32 = 0x08;
/// Offset of CC, 4 bytes.
pub const CC: u32 = 0x14;
/// Offset of CSTS, 4 bytes, read only but for NSSRO.
pub const CSTS: u32 = 0x1C;
/// Offset of NSSR, 4 bytes.
pub const NSSR: u32 = 0x20;
/// What to write to NSSR for a subsystem reset: "NVMe".
pub const NSSR_RESET: u64 = 0x4E56_4D65;
/// VS of the version that this target keeps to: 2.0.
pub const VERSION_2_0: u32 = 0x0002_0000;

/// CAP, the controller's capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Largest queue, 0-based (MQES).
    pub mqes: u16,
    /// Longest time from enable to ready, in 500 ms (TO).
    pub timeout_500ms: u8,
}

impl Capabilities {
    /// The value of the property. Contiguous queues required, NVM command set, 4 KiB memory pages only.
    pub fn encode(&self) -> u64 {
        const CQR: u64 = 1 << 16;
        const CSS_NVM: u64 = 1 << 37;
        u64::from(self.mqes) | CQR | u64::from(self.timeout_500ms) << 24 | CSS_NVM
    }

    /// Reads a value.
    pub fn decode(value: u64) -> Self {
        Self { mqes: value as u16, timeout_500ms: (value >> 24) as u8 }
    }
}

/// CC, the controller's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Configuration(pub u32);

impl Configuration {
    /// What a host sets for the NVM command set: 64-byte SQEs, 16-byte CQEs, enabled.
    pub const ENABLED: Self = Self(1 | 6 << 16 | 4 << 20);

    /// EN.
    pub fn enabled(self) -> bool {
        self.0 & 1 != 0
    }
    /// CSS: the command set selected.
    pub fn command_set(self) -> u8 {
        (self.0 >> 4 & 7) as u8
    }
    /// MPS: memory page size, 2^(12 + MPS).
    pub fn memory_page_shift(self) -> u8 {
        (self.0 >> 7 & 0xF) as u8
    }
    /// AMS: the arbitration mechanism.
    pub fn arbitration(self) -> u8 {
        (self.0 >> 11 & 7) as u8
    }
    /// SHN: the shutdown asked for.
    pub fn shutdown(self) -> u8 {
        (self.0 >> 14 & 3) as u8
    }
    /// IOSQES, as a power of two.
    pub fn io_sqe_shift(self) -> u8 {
        (self.0 >> 16 & 0xF) as u8
    }
    /// IOCQES, as a power of two.
    pub fn io_cqe_shift(self) -> u8 {
        (self.0 >> 20 & 0xF) as u8
    }
}

/// SHST of CSTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShutdownStatus {
    /// No shutdown was asked for.
    #[default]
    Normal = 0,
    /// Under way.
    Occurring = 1,
    /// Done.
    Complete = 2,
}

/// CSTS, the controller's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ControllerStatus {
    /// RDY.
    pub ready: bool,
    /// CFS: it can't go on, only a reset helps.
    pub fatal: bool,
    /// SHST.
    pub shutdown: ShutdownStatus,
}

impl ControllerStatus {
    /// The value of the property.
    pub fn encode(&self) -> u32 {
        u32::from(self.ready) | u32::from(self.fatal) << 1 | (self.shutdown as u32) << 2
    }

    /// Reads a value; the reserved SHST reads as complete.
    pub fn decode(value: u32) -> Self {
        let shutdown = match value >> 2 & 3 {
            0 => ShutdownStatus::Normal,
            1 => ShutdownStatus::Occurring,
            _ => ShutdownStatus::Complete,
        };
        Self { ready: value & 1 != 0, fatal: value & 2 != 0, shutdown }
    }
}

/// A Property Get or Set command's own fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PropertyCommand {
    /// 8 bytes (ATTRIB bit 0) instead of 4.
    pub eight_bytes: bool,
    /// ATTRIB's other bits, which must be 0 (2..0 is the size; anything over 1 is reserved).
    pub attrib: u8,
    /// OFST.
    pub offset: u32,
    /// VALUE, for Set.
    pub value: u64,
}

impl PropertyCommand {
    /// Reads the fields of a 64-byte submission queue entry.
    pub fn decode(sqe: &[u8; 64]) -> Self {
        let attrib = sqe[40];
        let value = u64::from_le_bytes([sqe[48], sqe[49], sqe[50], sqe[51], sqe[52], sqe[53], sqe[54], sqe[55]]);
        Self {
            eight_bytes: attrib & 7 == 1,
            attrib,
            offset: u32::from_le_bytes([sqe[44], sqe[45], sqe[46], sqe[47]]),
            value,
        }
    }

    /// Writes the fields into a 64-byte submission queue entry.
    pub fn encode_into(&self, sqe: &mut [u8; 64]) {
        sqe[40] = self.attrib & !7 | u8::from(self.eight_bytes);
        sqe[44..48].copy_from_slice(&self.offset.to_le_bytes());
        sqe[48..56].copy_from_slice(&self.value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_values() {
        // As a Linux host prints them: MQES 127, CQR, TO 15 s, NVM command set.
        let cap = Capabilities { mqes: 127, timeout_500ms: 30 };
        assert_eq!(cap.encode(), 0x0000_0020_1E01_007F);
        assert_eq!(Capabilities::decode(cap.encode()), cap);
        assert_eq!(Configuration::ENABLED.0, 0x0046_0001);
        let csts = ControllerStatus { ready: true, fatal: false, shutdown: ShutdownStatus::Complete };
        assert_eq!(csts.encode(), 9);
        assert_eq!(ControllerStatus::decode(9), csts);
    }

    #[test]
    fn property_commands_survive_a_round_trip() {
        let set = PropertyCommand { eight_bytes: false, attrib: 0, offset: CC, value: 0x46_0001 };
        let mut sqe = [0; 64];
        set.encode_into(&mut sqe);
        assert_eq!(PropertyCommand::decode(&sqe), set);
    }
}
