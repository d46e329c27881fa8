//! The Connect command's own fields and data (NVMe-oF 1.1 §3.3, NVMe Base 2.0 §6.3).
//!
//! Owns the layout of the 64-byte command as far as Connect defines it, of its 1,024-byte data, and of the
//! response. It must not know which hosts or subsystems exist. Invariant: every bit pattern decodes; the rules
//! stand in `proto::connect`.

use super::nqn::NQN_FIELD_BYTES;

/// Size of Connect's data.
pub const CONNECT_DATA_BYTES: usize = 1024;
/// The only record format there is.
pub const CONNECT_RECFMT: u16 = 0;
/// "Give me any controller": the dynamic controller model.
pub const CNTLID_DYNAMIC: u16 = 0xFFFF;
/// "Give me any static controller".
pub const CNTLID_STATIC_ANY: u16 = 0xFFFE;
/// The largest controller id that a controller can have.
pub const CNTLID_MAX: u16 = 0xFFEF;

/// Offsets of Connect's fields, for the invalid parameter offset (IPO) of its response.
pub mod offset {
    /// RECFMT, in the command.
    pub const RECFMT: u16 = 40;
    /// QID, in the command.
    pub const QID: u16 = 42;
    /// SQSIZE, in the command.
    pub const SQSIZE: u16 = 44;
    /// CATTR, in the command.
    pub const CATTR: u16 = 46;
    /// KATO, in the command.
    pub const KATO: u16 = 48;
    /// HOSTID, in the data.
    pub const HOSTID: u16 = 0;
    /// CNTLID, in the data.
    pub const CNTLID: u16 = 16;
    /// SUBNQN, in the data.
    pub const SUBNQN: u16 = 256;
    /// HOSTNQN, in the data.
    pub const HOSTNQN: u16 = 512;
}

/// CATTR bit 2: the host asks for submission queue flow control to be disabled.
pub const CATTR_DISABLE_SQ_FLOW_CONTROL: u8 = 1 << 2;
/// CATTR bit 3: the host will delete I/O queues one by one (Disconnect).
pub const CATTR_IO_QUEUE_DELETION: u8 = 1 << 3;

/// Connect's fields in its submission queue entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectCommand {
    /// Record format of the data.
    pub recfmt: u16,
    /// Queue: 0 is the admin queue.
    pub qid: u16,
    /// Queue size, 0-based.
    pub sqsize: u16,
    /// Connect attributes.
    pub cattr: u8,
    /// Keep-alive timeout in ms; 0 is none. Admin queue only.
    pub kato_ms: u32,
}

impl ConnectCommand {
    /// Reads the fields of a 64-byte submission queue entry.
    pub fn decode(sqe: &[u8; 64]) -> Self {
        Self {
            recfmt: u16::from_le_bytes([sqe[40], sqe[41]]),
            qid: u16::from_le_bytes([sqe[42], sqe[43]]),
            sqsize: u16::from_le_bytes([sqe[44], sqe[45]]),
            cattr: sqe[46],
            kato_ms: u32::from_le_bytes([sqe[48], sqe[49], sqe[50], sqe[51]]),
        }
    }

    /// Writes the fields into a 64-byte submission queue entry.
    pub fn encode_into(&self, sqe: &mut [u8; 64]) {
        sqe[40..42].copy_from_slice(&self.recfmt.to_le_bytes());
        sqe[42..44].copy_from_slice(&self.qid.to_le_bytes());
        sqe[44..46].copy_from_slice(&self.sqsize.to_le_bytes());
        sqe[46] = self.cattr;
        sqe[48..52].copy_from_slice(&self.kato_ms.to_le_bytes());
    }

    /// Whether SQ flow control is to be disabled.
    pub fn disables_sq_flow_control(&self) -> bool {
        self.cattr & CATTR_DISABLE_SQ_FLOW_CONTROL != 0
    }
}

/// Connect's data, names still unchecked.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectData {
    /// Host identifier.
    pub hostid: [u8; 16],
    /// The controller asked for.
    pub cntlid: u16,
    /// Subsystem name.
    pub subnqn: [u8; NQN_FIELD_BYTES],
    /// Host name.
    pub hostnqn: [u8; NQN_FIELD_BYTES],
}

impl ConnectData {
    /// Reads the data.
    pub fn decode(data: &[u8; CONNECT_DATA_BYTES]) -> Self {
        let mut this = Self { hostid: [0; 16], cntlid: 0, subnqn: [0; NQN_FIELD_BYTES], hostnqn: [0; NQN_FIELD_BYTES] };
        this.hostid.copy_from_slice(&data[0..16]);
        this.cntlid = u16::from_le_bytes([data[16], data[17]]);
        this.subnqn.copy_from_slice(&data[256..512]);
        this.hostnqn.copy_from_slice(&data[512..768]);
        this
    }

    /// Writes the data.
    pub fn encode(&self) -> [u8; CONNECT_DATA_BYTES] {
        let mut data = [0; CONNECT_DATA_BYTES];
        data[0..16].copy_from_slice(&self.hostid);
        data[16..18].copy_from_slice(&self.cntlid.to_le_bytes());
        data[256..512].copy_from_slice(&self.subnqn);
        data[512..768].copy_from_slice(&self.hostnqn);
        data
    }
}

impl std::fmt::Debug for ConnectData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConnectData")
            .field("hostid", &uuid::Uuid::from_bytes(self.hostid))
            .field("cntlid", &self.cntlid)
            .field("subnqn", &escaped(&self.subnqn))
            .field("hostnqn", &escaped(&self.hostnqn))
            .finish()
    }
}

/// What the peer put into a name field, safe to log.
pub fn escaped(field: &[u8]) -> String {
    let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    field.get(..end).unwrap_or_default().escape_ascii().to_string()
}

/// Which part of Connect a refused parameter stands in (IATTR bit 0).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidIn {
    /// The submission queue entry.
    Command,
    /// The data.
    Data,
}

/// Dword 0 of the response to an accepted Connect: the controller id, and no authentication asked for.
pub fn accepted_dw0(cntlid: u16) -> u32 {
    u32::from(cntlid)
}

/// Dword 0 of the response to a Connect refused with 01/82h: where the invalid parameter is.
pub fn invalid_parameter_dw0(invalid_in: InvalidIn, offset: u16) -> u32 {
    let iattr = match invalid_in {
        InvalidIn::Command => 0u32,
        InvalidIn::Data => 1,
    };
    u32::from(offset) | iattr << 16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_and_data_survive_a_round_trip() {
        let command = ConnectCommand { recfmt: 0, qid: 3, sqsize: 127, cattr: 4, kato_ms: 0x01020304 };
        let mut sqe = [0; 64];
        command.encode_into(&mut sqe);
        assert_eq!(sqe[42..52], [3, 0, 127, 0, 4, 0, 4, 3, 2, 1]);
        assert_eq!(ConnectCommand::decode(&sqe), command);
        assert!(command.disables_sq_flow_control());

        let data = ConnectData { hostid: [7; 16], cntlid: 0xFFFF, subnqn: [b's'; 256], hostnqn: [b'h'; 256] };
        assert_eq!(ConnectData::decode(&data.encode()), data);
    }

    #[test]
    fn h37_names_are_never_logged_raw() {
        assert_eq!(escaped(b"a\x1b[2J\n\xff\0rest"), "a\\x1b[2J\\n\\xff");
    }

    #[test]
    fn invalid_parameters_say_where() {
        assert_eq!(invalid_parameter_dw0(InvalidIn::Command, offset::SQSIZE), 44);
        assert_eq!(invalid_parameter_dw0(InvalidIn::Data, offset::HOSTNQN), 0x1_0200);
    }
}
