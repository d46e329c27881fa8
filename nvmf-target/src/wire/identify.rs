//! Identify data structures (NVMe Base 2.0 §5.17, NVM Command Set 1.0 §4.1.5).
//!
//! Owns their layouts, both ways. It must not know a controller. Invariant: every structure is exactly 4,096
//! bytes, and fields that aren't named here are zero.

use std::ops::Range;

/// Size of every Identify data structure.
pub const IDENTIFY_BYTES: usize = 4096;
/// The nsid that names all namespaces.
pub const NSID_ALL: u32 = 0xFFFF_FFFF;
/// How many nsids a list holds.
pub const LIST_ENTRIES: usize = 1024;
/// How many controller ids a controller list holds.
pub const CONTROLLER_LIST_ENTRIES: usize = 2047;

/// Controller or Namespace Structure values.
pub mod cns {
    /// Namespace, NVM command set.
    pub const NAMESPACE: u8 = 0x00;
    /// Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespace id list.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace identification descriptors.
    pub const NAMESPACE_DESCRIPTORS: u8 = 0x03;
    /// NVM set list.
    pub const NVM_SET_LIST: u8 = 0x04;
    /// Namespace, per I/O command set.
    pub const COMMAND_SET_NAMESPACE: u8 = 0x05;
    /// Controller, per I/O command set.
    pub const COMMAND_SET_CONTROLLER: u8 = 0x06;
    /// Active namespace id list, per I/O command set.
    pub const COMMAND_SET_ACTIVE_NAMESPACES: u8 = 0x07;
    /// Namespace, independent of the I/O command set.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    /// Allocated namespace id list.
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    /// Allocated namespace.
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    /// Controllers attached to a namespace.
    pub const ATTACHED_CONTROLLERS: u8 = 0x12;
    /// Controllers in the subsystem.
    pub const CONTROLLERS: u8 = 0x13;
    /// I/O command sets.
    pub const IO_COMMAND_SETS: u8 = 0x1C;
}

/// Controller types (CNTRLTYPE).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControllerType {
    /// An I/O controller.
    Io = 1,
    /// A discovery controller.
    Discovery = 2,
}

macro_rules! layout {
    ($(#[$meta:meta])* $name:ident { $($(#[$fmeta:meta])* $field:ident : $ty:ty = $offset:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: <$ty as Field>::ZERO,)* }
            }
        }

        impl $name {
            /// Writes the structure.
            pub fn encode(&self) -> Vec<u8> {
                let mut bytes = vec![0; IDENTIFY_BYTES];
                $(self.$field.put(&mut bytes, $offset);)*
                bytes
            }

            /// Reads the structure.
            pub fn decode(bytes: &[u8; IDENTIFY_BYTES]) -> Self {
                Self { $($field: <$ty as Field>::get(bytes, $offset),)* }
            }
        }
    };
}

trait Field: Sized {
    const ZERO: Self;
    fn put(&self, bytes: &mut [u8], offset: usize);
    fn get(bytes: &[u8; IDENTIFY_BYTES], offset: usize) -> Self;
}

macro_rules! integer_field {
    ($($ty:ty),*) => {$(
        impl Field for $ty {
            const ZERO: Self = 0;
            fn put(&self, bytes: &mut [u8], offset: usize) {
                put(bytes, offset, &self.to_le_bytes());
            }
            fn get(bytes: &[u8; IDENTIFY_BYTES], offset: usize) -> Self {
                Self::from_le_bytes(array(bytes, offset))
            }
        }
    )*};
}
integer_field!(u8, u16, u32, u64, u128);

impl<const N: usize> Field for [u8; N] {
    const ZERO: Self = [0; N];
    fn put(&self, bytes: &mut [u8], offset: usize) {
        put(bytes, offset, self);
    }
    fn get(bytes: &[u8; IDENTIFY_BYTES], offset: usize) -> Self {
        array(bytes, offset)
    }
}

/// Copies `value` to `offset`; the offsets are this module's constants, checked by its tests.
fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    if let Some(to) = bytes.get_mut(range(offset, value.len())) {
        to.copy_from_slice(value);
    }
}

fn array<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes.get(range(offset, N)).and_then(|s| s.try_into().ok()).unwrap_or([0; N])
}

fn range(offset: usize, len: usize) -> Range<usize> {
    offset..offset + len
}

layout! {
    /// Identify Controller (CNS 01h): the fields that a fabrics controller has.
    IdentifyController {
        /// Serial number, ASCII, space-padded.
        sn: [u8; 20] = 4,
        /// Model number, ASCII, space-padded.
        mn: [u8; 40] = 24,
        /// Firmware revision, ASCII, space-padded.
        fr: [u8; 8] = 64,
        /// Recommended arbitration burst, as a power of two.
        rab: u8 = 72,
        /// Multi-path and sharing capabilities: bit 0 several ports, 1 several controllers, 3 ANA.
        cmic: u8 = 76,
        /// Maximum data transfer size, 2^n memory pages of 4 KiB; 0 is no limit.
        mdts: u8 = 77,
        /// Controller id.
        cntlid: u16 = 78,
        /// Version.
        ver: u32 = 80,
        /// Optional asynchronous events.
        oaes: u32 = 92,
        /// Controller attributes: bit 0 128-bit host id, 6 traffic-based keep-alive, …
        ctratt: u32 = 96,
        /// Controller type.
        cntrltype: u8 = 111,
        /// Command retry delay times 1 to 3, in 100 ms.
        crdt: [u8; 6] = 128,
        /// Optional admin commands.
        oacs: u16 = 256,
        /// Abort command limit, 0-based.
        acl: u8 = 258,
        /// Asynchronous event request limit, 0-based.
        aerl: u8 = 259,
        /// Firmware updates: bit 0 slot 1 read only, 3:1 number of slots.
        frmw: u8 = 260,
        /// Log page attributes.
        lpa: u8 = 261,
        /// Error log page entries, 0-based.
        elpe: u8 = 262,
        /// Number of power states, 0-based.
        npss: u8 = 263,
        /// Warning composite temperature, K.
        wctemp: u16 = 266,
        /// Critical composite temperature, K.
        cctemp: u16 = 268,
        /// Total NVM capacity in bytes.
        tnvmcap: u128 = 280,
        /// Unallocated NVM capacity in bytes.
        unvmcap: u128 = 296,
        /// Keep-alive granularity, in 100 ms.
        kas: u16 = 320,
        /// Submission queue entry sizes: 7:4 maximum, 3:0 required, powers of two.
        sqes: u8 = 512,
        /// Completion queue entry sizes.
        cqes: u8 = 513,
        /// Maximum outstanding commands of a queue.
        maxcmd: u16 = 514,
        /// The largest nsid.
        nn: u32 = 516,
        /// Optional NVM commands.
        oncs: u16 = 520,
        /// Fused operations: bit 0 Compare and Write.
        fuses: u16 = 522,
        /// Format attributes.
        fna: u8 = 524,
        /// Volatile write cache: bit 0 present, 2:1 Flush with nsid FFFFFFFFh.
        vwc: u8 = 525,
        /// Atomic write unit normal, 0-based blocks.
        awun: u16 = 526,
        /// Atomic write unit power fail, 0-based blocks.
        awupf: u16 = 528,
        /// Atomic compare and write unit, 0-based blocks.
        acwu: u16 = 532,
        /// SGL support.
        sgls: u32 = 536,
        /// Maximum number of allowed namespaces.
        mnan: u32 = 540,
        /// The subsystem's name, NUL-padded.
        subnqn: [u8; 256] = 768,
        /// I/O queue command capsule size in 16 bytes.
        ioccsz: u32 = 1792,
        /// I/O queue response capsule size in 16 bytes.
        iorcsz: u32 = 1796,
        /// In-capsule data offset in 16 bytes.
        icdoff: u16 = 1800,
        /// Fabrics controller attributes: bit 0 static controller model.
        fcatt: u8 = 1802,
        /// Maximum SGL data block descriptors; 0 is no limit.
        msdbd: u8 = 1803,
        /// Optional fabrics commands: bit 0 Disconnect.
        ofcs: u16 = 1804,
        /// Power state 0: maximum power and what follows.
        psd0: [u8; 32] = 2048,
    }
}

layout! {
    /// Identify Namespace (CNS 00h), without the list of formats beyond the first.
    IdentifyNamespace {
        /// Size in blocks.
        nsze: u64 = 0,
        /// Capacity in blocks.
        ncap: u64 = 8,
        /// Utilisation in blocks.
        nuse: u64 = 16,
        /// Features: bit 0 thin, 4 the NPWG group of fields is defined.
        nsfeat: u8 = 24,
        /// Number of LBA formats, 0-based.
        nlbaf: u8 = 25,
        /// The format in use.
        flbas: u8 = 26,
        /// Bit 0: may be attached to several controllers.
        nmic: u8 = 30,
        /// Reservation capabilities.
        rescap: u8 = 31,
        /// Format progress.
        fpi: u8 = 32,
        /// Deallocate: 2:0 what reads give (1 zeroes), 3 Write Zeroes can deallocate.
        dlfeat: u8 = 33,
        /// Optimal I/O boundary in blocks; 0 is none.
        noiob: u16 = 46,
        /// Capacity in bytes.
        nvmcap: u128 = 48,
        /// Preferred write granularity, 0-based blocks.
        npwg: u16 = 64,
        /// Preferred write alignment, 0-based blocks.
        npwa: u16 = 66,
        /// Preferred deallocate granularity, 0-based blocks.
        npdg: u16 = 68,
        /// Preferred deallocate alignment, 0-based blocks.
        npda: u16 = 70,
        /// Optimal write size, 0-based blocks.
        nows: u16 = 72,
        /// ANA group; 0 where ANA isn't reported.
        anagrpid: u32 = 92,
        /// Attributes: bit 0 write protected.
        nsattr: u8 = 99,
        /// Globally unique id.
        nguid: [u8; 16] = 104,
        /// IEEE extended unique id.
        eui64: [u8; 8] = 120,
        /// LBA format 0: 15:0 metadata bytes, 23:16 log2 of the block size, 25:24 relative performance.
        lbaf0: u32 = 128,
    }
}

impl IdentifyNamespace {
    /// Block size in bytes of the format in use, if it is format 0 and sensible.
    pub fn block_bytes(&self) -> Option<u32> {
        let shift = self.lbaf0 >> 16 & 0xFF;
        (self.flbas & 0xF == 0 && (9..=16).contains(&shift)).then(|| 1 << shift)
    }
}

layout! {
    /// Identify Controller for the NVM command set (CNS 06h, CSI 00h).
    IdentifyNvmController {
        /// Verify size limit, 2^n memory pages; 0 is no limit but MDTS doesn't apply either.
        vsl: u8 = 0,
        /// Write Zeroes size limit, 2^n memory pages; 0 is none.
        wzsl: u8 = 1,
        /// Write Uncorrectable size limit.
        wusl: u8 = 2,
        /// Dataset Management: ranges limit.
        dmrl: u8 = 3,
        /// Dataset Management: blocks a range.
        dmrsl: u32 = 4,
        /// Dataset Management: blocks a command.
        dmsl: u64 = 8,
    }
}

layout! {
    /// Identify Namespace, independent of the I/O command set (CNS 08h).
    IdentifyIndependentNamespace {
        /// Common features: bit 0 rotational, …
        nsfeat: u8 = 0,
        /// Bit 0: may be attached to several controllers.
        nmic: u8 = 1,
        /// Reservation capabilities.
        rescap: u8 = 2,
        /// Format progress.
        fpi: u8 = 3,
        /// ANA group.
        anagrpid: u32 = 4,
        /// Attributes.
        nsattr: u8 = 8,
        /// NVM set.
        nvmsetid: u16 = 10,
        /// Endurance group.
        endgid: u16 = 12,
        /// Status: bit 0 ready.
        nstat: u8 = 14,
    }
}

/// A list of nsids (CNS 02h, 07h, 10h): the first 1,024 of `nsids`, which come in rising order.
pub fn namespace_list(nsids: impl IntoIterator<Item = u32>) -> Vec<u8> {
    let mut bytes = vec![0; IDENTIFY_BYTES];
    for (at, nsid) in bytes.chunks_exact_mut(4).zip(nsids) {
        at.copy_from_slice(&nsid.to_le_bytes());
    }
    bytes
}

/// Reads a list of nsids up to the first zero.
pub fn decode_namespace_list(bytes: &[u8]) -> Vec<u32> {
    let entries = bytes.chunks_exact(4).map(|c| u32::from_le_bytes(array(c, 0)));
    entries.take_while(|&nsid| nsid != 0).collect()
}

/// A controller list (CNS 12h, 13h): the first 2,047 of `cntlids`, which come in rising order.
pub fn controller_list(cntlids: &[u16]) -> Vec<u8> {
    let mut bytes = vec![0; IDENTIFY_BYTES];
    let count = cntlids.len().min(CONTROLLER_LIST_ENTRIES);
    put(&mut bytes, 0, &(count as u16).to_le_bytes());
    for (at, cntlid) in bytes.chunks_exact_mut(2).skip(1).zip(cntlids.iter().take(count)) {
        at.copy_from_slice(&cntlid.to_le_bytes());
    }
    bytes
}

/// The descriptors of a namespace (CNS 03h): NGUID, UUID and the NVM command set's identifier.
pub fn namespace_descriptors(nguid: &[u8; 16], uuid: &[u8; 16]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(IDENTIFY_BYTES);
    for (kind, id) in [(2, &nguid[..]), (3, &uuid[..]), (4, &[0u8][..])] {
        bytes.extend_from_slice(&[kind, id.len() as u8, 0, 0]);
        bytes.extend_from_slice(id);
    }
    bytes.resize(IDENTIFY_BYTES, 0);
    bytes
}

/// The I/O command set combinations (CNS 1Ch): one, the NVM command set alone.
pub fn io_command_sets() -> Vec<u8> {
    let mut bytes = vec![0; IDENTIFY_BYTES];
    put(&mut bytes, 0, &1u64.to_le_bytes());
    bytes
}

/// `text` as an ASCII field padded with spaces, cut at its end.
pub fn ascii_field<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = if (0x20..0x7F).contains(&from) { from } else { b'?' };
    }
    field
}

/// The text of an ASCII field: without its padding, odd bytes escaped.
pub fn ascii_text(field: &[u8]) -> String {
    let end = field.iter().rposition(|&b| b != b' ' && b != 0).map_or(0, |p| p + 1);
    field.get(..end).unwrap_or_default().escape_ascii().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(bytes: &[u8]) -> &[u8; IDENTIFY_BYTES] {
        bytes.try_into().unwrap()
    }

    #[test]
    fn controllers_survive_a_round_trip_at_the_offsets_of_the_specification() {
        let controller = IdentifyController {
            sn: ascii_field("SN1"),
            mn: ascii_field("Sluice"),
            cntlid: 0x0102,
            mdts: 8,
            nn: 1024,
            aerl: 3,
            subnqn: [b'q'; 256],
            ioccsz: 516,
            ofcs: 1,
            psd0: [9; 32],
            tnvmcap: 1 << 100,
            ..Default::default()
        };
        let bytes = controller.encode();
        assert_eq!(IdentifyController::decode(block(&bytes)), controller);
        assert_eq!(&bytes[4..8], b"SN1 ");
        assert_eq!((bytes[77], bytes[78], bytes[79], bytes[259]), (8, 2, 1, 3));
        assert_eq!(&bytes[516..520], &1024u32.to_le_bytes());
        assert_eq!(&bytes[1792..1796], &516u32.to_le_bytes());
        assert_eq!((bytes[1804], bytes[2048], bytes[2079], bytes[2080]), (1, 9, 9, 0));
    }

    #[test]
    fn namespaces_survive_a_round_trip_at_the_offsets_of_the_specification() {
        let namespace = IdentifyNamespace { nsze: 7, nguid: [5; 16], lbaf0: 12 << 16, nows: 15, ..Default::default() };
        let bytes = namespace.encode();
        assert_eq!(IdentifyNamespace::decode(block(&bytes)), namespace);
        assert_eq!(namespace.block_bytes(), Some(4096));
        assert_eq!((bytes[0], bytes[72], bytes[104], bytes[119], bytes[130]), (7, 15, 5, 5, 12));
    }

    #[test]
    fn a_foreign_format_has_no_block_size() {
        let of =
            |flbas, shift: u32| IdentifyNamespace { flbas, lbaf0: shift << 16, ..Default::default() }.block_bytes();
        assert_eq!((of(0, 9), of(1, 9), of(0, 8), of(0, 255)), (Some(512), None, None, None));
    }

    #[test]
    fn lists_stop_at_their_size() {
        let bytes = namespace_list(1..=2000);
        assert_eq!(bytes.len(), IDENTIFY_BYTES);
        assert_eq!(decode_namespace_list(&bytes), (1..=1024).collect::<Vec<_>>());
        let all: Vec<u16> = (1..=3000).collect();
        let bytes = controller_list(&all);
        assert_eq!((bytes.len(), &bytes[..4]), (IDENTIFY_BYTES, &[0xFF, 0x07, 1, 0][..]));
        assert_eq!(&bytes[4094..], &2047u16.to_le_bytes());
    }

    #[test]
    fn descriptors_name_both_ids_and_the_command_set() {
        let bytes = namespace_descriptors(&[1; 16], &[2; 16]);
        assert_eq!(bytes.len(), IDENTIFY_BYTES);
        assert_eq!(&bytes[..5], &[2, 16, 0, 0, 1]);
        assert_eq!(&bytes[20..25], &[3, 16, 0, 0, 2]);
        assert_eq!(&bytes[40..46], &[4, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn text_is_padded_and_never_given_out_raw() {
        assert_eq!(&ascii_field::<6>("ab\n"), b"ab?   ");
        assert_eq!(&ascii_field::<2>("abc"), b"ab");
        assert_eq!(ascii_text(b"ab \x1b  "), "ab \\x1b");
    }
}
