//! Log pages (NVMe Base 2.0 §5.16): layouts of those that this target serves, and of Get Log Page's own fields.
//!
//! It must not know a controller. Invariant: every page has the length that the specification gives it.

use super::identify::ascii_field;
use super::nqn::NQN_FIELD_BYTES;

/// Log page identifiers.
pub mod lid {
    /// Supported Log Pages.
    pub const SUPPORTED: u8 = 0x00;
    /// Error Information.
    pub const ERROR: u8 = 0x01;
    /// SMART / Health Information.
    pub const SMART: u8 = 0x02;
    /// Firmware Slot Information.
    pub const FIRMWARE_SLOT: u8 = 0x03;
    /// Changed Namespace List.
    pub const CHANGED_NAMESPACES: u8 = 0x04;
    /// Commands Supported and Effects.
    pub const EFFECTS: u8 = 0x05;
    /// Asymmetric Namespace Access.
    pub const ANA: u8 = 0x0C;
    /// Feature Identifiers Supported and Effects.
    pub const FEATURES: u8 = 0x12;
    /// Discovery.
    pub const DISCOVERY: u8 = 0x70;
}

/// Get Log Page's own fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GetLogPage {
    /// Log page identifier.
    pub lid: u8,
    /// Retain asynchronous event: reading doesn't clear the event.
    pub retain_event: bool,
    /// How much, in bytes.
    pub len_bytes: u64,
    /// From where: bytes, or an index if `offset_is_index`.
    pub offset: u64,
    /// OT: `offset` is an index into a list.
    pub offset_is_index: bool,
}

impl GetLogPage {
    /// Reads the fields of a 64-byte submission queue entry.
    pub fn decode(sqe: &[u8; 64]) -> Self {
        let dword = |n: usize| u32::from_le_bytes([sqe[n * 4], sqe[n * 4 + 1], sqe[n * 4 + 2], sqe[n * 4 + 3]]);
        let numd = u64::from(dword(10) >> 16) | u64::from(dword(11) & 0xFFFF) << 16;
        Self {
            lid: dword(10) as u8,
            retain_event: dword(10) & 1 << 15 != 0,
            len_bytes: (numd + 1) * 4,
            offset: u64::from(dword(12)) | u64::from(dword(13)) << 32,
            offset_is_index: dword(14) & 1 << 23 != 0,
        }
    }

    /// Writes the fields into a 64-byte submission queue entry; the length is a multiple of 4, not 0.
    pub fn encode_into(&self, sqe: &mut [u8; 64]) {
        let numd = (self.len_bytes / 4).saturating_sub(1);
        let dword10 = u32::from(self.lid) | u32::from(self.retain_event) << 15 | (numd as u32 & 0xFFFF) << 16;
        sqe[40..44].copy_from_slice(&dword10.to_le_bytes());
        sqe[44..46].copy_from_slice(&((numd >> 16) as u16).to_le_bytes());
        sqe[48..56].copy_from_slice(&self.offset.to_le_bytes());
        sqe[58] |= u8::from(self.offset_is_index) << 7;
    }
}

/// Size of an Error Information entry.
pub const ERROR_ENTRY_BYTES: usize = 64;

/// One entry of the Error Information log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorEntry {
    /// Counts up over the life of the controller; 0 is an empty entry.
    pub error_count: u64,
    /// Queue of the command.
    pub sqid: u16,
    /// Its command id.
    pub cid: u16,
    /// Its status field as in the completion: bit 0 phase, 8:1 SC, 11:9 SCT, 14 More, 15 DNR.
    pub status_field: u16,
    /// Byte (7:0) and bit (10:8) of the wrong parameter in the command; FFFFh if there is none.
    pub parameter_location: u16,
    /// The first LBA with the error, or 0.
    pub lba: u64,
    /// Its namespace.
    pub nsid: u32,
    /// Transport type: 3 is TCP.
    pub trtype: u8,
}

impl ErrorEntry {
    /// Writes the entry.
    pub fn encode(&self) -> [u8; ERROR_ENTRY_BYTES] {
        let mut bytes = [0; ERROR_ENTRY_BYTES];
        bytes[0..8].copy_from_slice(&self.error_count.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.sqid.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.cid.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.status_field.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.parameter_location.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.lba.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.nsid.to_le_bytes());
        bytes[29] = self.trtype;
        bytes
    }
}

/// Size of the SMART log.
pub const SMART_BYTES: usize = 512;

/// SMART / Health Information: the figures that a target without a medium of its own can give honestly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SmartLog {
    /// Critical warnings.
    pub critical_warning: u8,
    /// Composite temperature in K. Zero is a temperature too: there is no value for "not reported".
    pub temperature_k: u16,
    /// Available spare in percent.
    pub available_spare: u8,
    /// The spare's threshold in percent.
    pub available_spare_threshold: u8,
    /// Data read, in 1,000 units of 512 bytes, rounded up.
    pub data_units_read: u128,
    /// Data written, in the same unit.
    pub data_units_written: u128,
    /// Read and Compare commands completed.
    pub host_reads: u128,
    /// Write commands completed.
    pub host_writes: u128,
    /// Hours powered on.
    pub power_on_hours: u128,
    /// Data integrity errors.
    pub media_errors: u128,
    /// Entries of the error log over the life of the controller.
    pub error_log_entries: u128,
}

impl SmartLog {
    /// Critical warning: the temperature is at or beyond a threshold.
    pub const WARNING_TEMPERATURE: u8 = 1 << 1;
    /// Bytes in a data unit.
    pub const DATA_UNIT_BYTES: u64 = 512_000;

    /// Writes the page.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; SMART_BYTES];
        bytes[0] = self.critical_warning;
        bytes[1..3].copy_from_slice(&self.temperature_k.to_le_bytes());
        bytes[3] = self.available_spare;
        bytes[4] = self.available_spare_threshold;
        let counters = [
            (32, self.data_units_read),
            (48, self.data_units_written),
            (64, self.host_reads),
            (80, self.host_writes),
            (128, self.power_on_hours),
            (160, self.media_errors),
            (176, self.error_log_entries),
        ];
        for (offset, value) in counters {
            bytes[offset..offset + 16].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }
}

/// Firmware Slot Information: one slot, active, with `revision`.
pub fn firmware_slots(revision: &str) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    bytes[0] = 1;
    bytes[8..16].copy_from_slice(&ascii_field::<8>(revision));
    bytes
}

/// Changed Namespace List: `nsids` in rising order, or FFFFFFFFh alone if there are more than fit.
pub fn changed_namespaces(nsids: Option<&[u32]>) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let all = [0xFFFF_FFFF];
    let nsids = nsids.filter(|list| list.len() <= 1024).unwrap_or(&all);
    for (at, nsid) in bytes.chunks_exact_mut(4).zip(nsids) {
        at.copy_from_slice(&nsid.to_le_bytes());
    }
    bytes
}

/// One entry of the Commands Supported and Effects log.
pub mod effect {
    /// The command is supported (CSUPP).
    pub const SUPPORTED: u32 = 1;
    /// It may change data (LBCC).
    pub const DATA_CHANGED: u32 = 2;
}

/// Commands Supported and Effects: `(opcode, effects)` of the admin and of the I/O commands.
pub fn commands_effects(admin: &[(u8, u32)], io: &[(u8, u32)]) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    for (base, list) in [(0, admin), (1024, io)] {
        for &(opcode, effects) in list {
            let at = base + usize::from(opcode) * 4;
            bytes[at..at + 4].copy_from_slice(&effects.to_le_bytes());
        }
    }
    bytes
}

/// Supported Log Pages, or Feature Identifiers Supported: 256 entries of 4 bytes.
pub fn supported(entries: &[(u8, u32)]) -> Vec<u8> {
    let mut bytes = vec![0; 1024];
    for &(id, value) in entries {
        let at = usize::from(id) * 4;
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// Size of the discovery log's header and of each entry.
pub const DISCOVERY_ENTRY_BYTES: usize = 1024;

/// Address families (ADRFAM).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressFamily {
    /// IPv4.
    Ipv4 = 1,
    /// IPv6.
    Ipv6 = 2,
}

/// TREQ bit 2: submission queue flow control can be disabled. Bits 1:0 = 0: nothing is said about a secure channel,
/// which is the only other value that nvme-cli up to 2.3 knows together with this bit.
pub const TREQ_DISABLE_SQ_FLOW_CONTROL: u8 = 1 << 2;
/// EFLAGS bit 1: this discovery controller supports explicit persistent connections.
pub const EFLAGS_PERSISTENT: u16 = 1 << 1;
/// SUBTYPE: a subsystem with I/O controllers.
pub const SUBTYPE_NVM: u8 = 2;
/// TRTYPE: TCP.
pub const TRTYPE_TCP: u8 = 3;

/// One entry of the discovery log (NVMe-oF 1.1 §5.3).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DiscoveryEntry {
    /// Transport type.
    pub trtype: u8,
    /// Address family; 1 IPv4, 2 IPv6.
    pub adrfam: u8,
    /// Kind of subsystem.
    pub subtype: u8,
    /// Transport requirements.
    pub treq: u8,
    /// Port.
    pub portid: u16,
    /// Controller id; FFFFh is the dynamic model.
    pub cntlid: u16,
    /// Admin queue size.
    pub asqsz: u16,
    /// Flags.
    pub eflags: u16,
    /// Transport service: the TCP port as text.
    pub trsvcid: String,
    /// The subsystem's name.
    pub subnqn: String,
    /// Transport address.
    pub traddr: String,
    /// TSAS byte 0, SECTYPE: 0 none.
    pub sectype: u8,
}

impl DiscoveryEntry {
    /// Writes the entry.
    pub fn encode(&self) -> [u8; DISCOVERY_ENTRY_BYTES] {
        let mut bytes = [0; DISCOVERY_ENTRY_BYTES];
        bytes[0..4].copy_from_slice(&[self.trtype, self.adrfam, self.subtype, self.treq]);
        bytes[4..6].copy_from_slice(&self.portid.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.cntlid.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.asqsz.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.eflags.to_le_bytes());
        bytes[32..64].copy_from_slice(&ascii_field::<32>(&self.trsvcid));
        text(&mut bytes[256..512], &self.subnqn);
        bytes[512..768].copy_from_slice(&ascii_field::<256>(&self.traddr));
        bytes[768] = self.sectype;
        bytes
    }

    /// Reads an entry; text is cut at its padding and odd bytes are escaped.
    pub fn decode(bytes: &[u8; DISCOVERY_ENTRY_BYTES]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            trtype: bytes[0],
            adrfam: bytes[1],
            subtype: bytes[2],
            treq: bytes[3],
            portid: u16_at(4),
            cntlid: u16_at(6),
            asqsz: u16_at(8),
            eflags: u16_at(10),
            trsvcid: super::identify::ascii_text(&bytes[32..64]),
            subnqn: super::connect::escaped(&bytes[256..512]),
            traddr: super::identify::ascii_text(&bytes[512..768]),
            sectype: bytes[768],
        }
    }
}

/// Copies `value` to a NUL-padded field, leaving room for one NUL.
fn text(field: &mut [u8], value: &str) {
    let room = field.len().min(NQN_FIELD_BYTES) - 1;
    for (to, from) in field.iter_mut().take(room).zip(value.bytes()) {
        *to = from;
    }
}

/// The discovery log: header and entries.
pub fn discovery_log(generation: u64, entries: &[DiscoveryEntry]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity((entries.len() + 1) * DISCOVERY_ENTRY_BYTES);
    bytes.extend_from_slice(&generation.to_le_bytes());
    bytes.extend_from_slice(&(entries.len() as u64).to_le_bytes());
    bytes.resize(DISCOVERY_ENTRY_BYTES, 0);
    for entry in entries {
        bytes.extend_from_slice(&entry.encode());
    }
    bytes
}

/// Reads the header of a discovery log: its generation and number of entries.
pub fn decode_discovery_header(bytes: &[u8]) -> Option<(u64, u64)> {
    let generation = bytes.get(0..8)?.try_into().ok()?;
    let count = bytes.get(8..16)?.try_into().ok()?;
    Some((u64::from_le_bytes(generation), u64::from_le_bytes(count)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_log_page_survives_a_round_trip() {
        let get = GetLogPage {
            lid: 0x70,
            retain_event: true,
            len_bytes: 1 << 20,
            offset: 5 << 32 | 8,
            offset_is_index: false,
        };
        let mut sqe = [0; 64];
        get.encode_into(&mut sqe);
        assert_eq!(GetLogPage::decode(&sqe), get);
        assert_eq!(GetLogPage::decode(&[0; 64]).len_bytes, 4, "NUMD is 0-based");
        assert_eq!(GetLogPage::decode(&[0xFF; 64]).len_bytes, 1 << 34);
    }

    #[test]
    fn pages_have_their_length_and_place() {
        assert_eq!(firmware_slots("1.0").len(), 512);
        assert_eq!(&firmware_slots("1.0")[8..16], b"1.0     ");
        let smart = SmartLog { media_errors: 3, error_log_entries: 4, ..Default::default() }.encode();
        assert_eq!((smart.len(), smart[160], smart[176]), (512, 3, 4));
        assert_eq!(supported(&[(0xFF, 1)])[1020..], [1, 0, 0, 0]);
        let effects = commands_effects(&[(0x06, effect::SUPPORTED)], &[(0xFF, 3)]);
        assert_eq!((effects.len(), effects[24], effects[1024 + 1020]), (4096, 1, 3));
        let error = ErrorEntry {
            error_count: 1,
            sqid: 2,
            cid: 3,
            status_field: 4,
            parameter_location: 5,
            lba: 6,
            nsid: 7,
            trtype: 3,
        };
        assert_eq!(error.encode()[..30], {
            let mut e = [0; 30];
            (e[0], e[8], e[10], e[12], e[14], e[16], e[24], e[29]) = (1, 2, 3, 4, 5, 6, 7, 3);
            e
        });
    }

    #[test]
    fn too_many_changes_become_all() {
        let many: Vec<u32> = (1..=1025).collect();
        assert_eq!(&changed_namespaces(Some(&many))[..8], &[0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0]);
        assert_eq!(&changed_namespaces(Some(&many[..1024]))[4092..], &1024u32.to_le_bytes());
        assert_eq!(&changed_namespaces(None)[..4], &[0xFF; 4]);
    }

    #[test]
    fn discovery_entries_survive_a_round_trip() {
        let entry = DiscoveryEntry {
            trtype: TRTYPE_TCP,
            adrfam: AddressFamily::Ipv6 as u8,
            subtype: SUBTYPE_NVM,
            treq: 6,
            portid: 1,
            cntlid: 0xFFFF,
            asqsz: 32,
            eflags: 0,
            trsvcid: "4420".into(),
            subnqn: "nqn.2014-08.org.x:y".into(),
            traddr: "fd00::1".into(),
            sectype: 0,
        };
        assert_eq!(DiscoveryEntry::decode(&entry.encode()), entry);
        let log = discovery_log(9, &[entry.clone(), entry]);
        assert_eq!(log.len(), 3 * 1024);
        assert_eq!(decode_discovery_header(&log), Some((9, 2)));
        assert_eq!(decode_discovery_header(&log[..15]), None);
    }
}
