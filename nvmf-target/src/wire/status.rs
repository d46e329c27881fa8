//! Completion status: type, code and the retry bits (NVMe Base 2.0 §3.3.3.2.1, figures 94–102).
//!
//! Owns the code points and their names. Connect's codes (01/80h on) are those of NVMe Base 2.0, figure 386; the
//! same numbers mean other things for other commands.

use std::fmt;

/// The 15 bits of the Status field: SC (7:0), SCT (10:8), CRD (12:11), M (13), DNR (14).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

const MORE: u16 = 1 << 13;
const DNR: u16 = 1 << 14;

impl Status {
    /// Status code `sc` of type `sct`; retry bits clear.
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self(((sct & 7) as u16) << 8 | sc as u16)
    }

    /// From the field's 15 bits (without the phase tag).
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits & 0x7fff)
    }

    /// The field's 15 bits.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Status Code Type.
    pub const fn sct(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// Status Code.
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// With Do Not Retry set: the same command would fail again.
    pub const fn dnr(self) -> Self {
        Self(self.0 | DNR)
    }

    /// With More set: the error log page has more.
    pub const fn more(self) -> Self {
        Self(self.0 | MORE)
    }

    /// Do Not Retry is set.
    pub const fn is_dnr(self) -> bool {
        self.0 & DNR != 0
    }

    /// The status without its retry bits, to compare with the constants.
    pub const fn code(self) -> Self {
        Self(self.0 & 0x7ff)
    }

    /// 00/00h.
    pub const fn is_success(self) -> bool {
        self.code().0 == 0
    }

    /// The specification's name of it, if it is one that is listed here.
    pub fn name(self) -> Option<&'static str> {
        NAMES.iter().find(|(status, _)| *status == self.code()).map(|(_, name)| *name)
    }
}

/// Generic command status (SCT 0).
impl Status {
    /// 00/00h Successful Completion.
    pub const SUCCESS: Self = Self::new(0, 0x00);
    /// 00/01h Invalid Command Opcode.
    pub const INVALID_OPCODE: Self = Self::new(0, 0x01);
    /// 00/02h Invalid Field in Command.
    pub const INVALID_FIELD: Self = Self::new(0, 0x02);
    /// 00/03h Command ID Conflict.
    pub const COMMAND_ID_CONFLICT: Self = Self::new(0, 0x03);
    /// 00/04h Data Transfer Error.
    pub const DATA_TRANSFER_ERROR: Self = Self::new(0, 0x04);
    /// 00/06h Internal Error.
    pub const INTERNAL_ERROR: Self = Self::new(0, 0x06);
    /// 00/07h Command Abort Requested.
    pub const ABORT_REQUESTED: Self = Self::new(0, 0x07);
    /// 00/08h Command Aborted due to SQ Deletion.
    pub const ABORTED_SQ_DELETION: Self = Self::new(0, 0x08);
    /// 00/09h Command Aborted due to Failed Fused Command.
    pub const ABORTED_FAILED_FUSED: Self = Self::new(0, 0x09);
    /// 00/0Ah Command Aborted due to Missing Fused Command.
    pub const ABORTED_MISSING_FUSED: Self = Self::new(0, 0x0a);
    /// 00/0Bh Invalid Namespace or Format.
    pub const INVALID_NAMESPACE: Self = Self::new(0, 0x0b);
    /// 00/0Ch Command Sequence Error.
    pub const COMMAND_SEQUENCE_ERROR: Self = Self::new(0, 0x0c);
    /// 00/0Dh Invalid SGL Segment Descriptor.
    pub const INVALID_SGL_SEGMENT: Self = Self::new(0, 0x0d);
    /// 00/0Eh Invalid Number of SGL Descriptors.
    pub const INVALID_SGL_COUNT: Self = Self::new(0, 0x0e);
    /// 00/0Fh Data SGL Length Invalid.
    pub const SGL_LENGTH_INVALID: Self = Self::new(0, 0x0f);
    /// 00/10h Metadata SGL Length Invalid.
    pub const METADATA_SGL_LENGTH_INVALID: Self = Self::new(0, 0x10);
    /// 00/11h SGL Descriptor Type Invalid.
    pub const SGL_TYPE_INVALID: Self = Self::new(0, 0x11);
    /// 00/14h Atomic Write Unit Exceeded.
    pub const ATOMIC_WRITE_UNIT_EXCEEDED: Self = Self::new(0, 0x14);
    /// 00/15h Operation Denied.
    pub const OPERATION_DENIED: Self = Self::new(0, 0x15);
    /// 00/16h SGL Offset Invalid.
    pub const SGL_OFFSET_INVALID: Self = Self::new(0, 0x16);
    /// 00/18h Host Identifier Inconsistent Format.
    pub const HOST_ID_INCONSISTENT: Self = Self::new(0, 0x18);
    /// 00/19h Keep Alive Timer Expired.
    pub const KEEP_ALIVE_EXPIRED: Self = Self::new(0, 0x19);
    /// 00/1Ah Keep Alive Timeout Invalid.
    pub const KEEP_ALIVE_INVALID: Self = Self::new(0, 0x1a);
    /// 00/1Eh SGL Data Block Granularity Invalid.
    pub const SGL_GRANULARITY_INVALID: Self = Self::new(0, 0x1e);
    /// 00/20h Namespace is Write Protected.
    pub const NAMESPACE_WRITE_PROTECTED: Self = Self::new(0, 0x20);
    /// 00/21h Command Interrupted.
    pub const COMMAND_INTERRUPTED: Self = Self::new(0, 0x21);
    /// 00/22h Transient Transport Error.
    pub const TRANSIENT_TRANSPORT_ERROR: Self = Self::new(0, 0x22);
    /// 00/24h Admin Command Media Not Ready.
    pub const MEDIA_NOT_READY: Self = Self::new(0, 0x24);
    /// 00/80h LBA Out of Range.
    pub const LBA_OUT_OF_RANGE: Self = Self::new(0, 0x80);
    /// 00/81h Capacity Exceeded.
    pub const CAPACITY_EXCEEDED: Self = Self::new(0, 0x81);
    /// 00/82h Namespace Not Ready.
    pub const NAMESPACE_NOT_READY: Self = Self::new(0, 0x82);
    /// 00/83h Reservation Conflict.
    pub const RESERVATION_CONFLICT: Self = Self::new(0, 0x83);
    /// 00/84h Format In Progress.
    pub const FORMAT_IN_PROGRESS: Self = Self::new(0, 0x84);
}

/// Command specific status (SCT 1).
impl Status {
    /// 01/01h Invalid Queue Identifier.
    pub const INVALID_QUEUE_ID: Self = Self::new(1, 0x01);
    /// 01/02h Invalid Queue Size.
    pub const INVALID_QUEUE_SIZE: Self = Self::new(1, 0x02);
    /// 01/03h Abort Command Limit Exceeded.
    pub const ABORT_LIMIT_EXCEEDED: Self = Self::new(1, 0x03);
    /// 01/05h Asynchronous Event Request Limit Exceeded.
    pub const ASYNC_EVENT_LIMIT_EXCEEDED: Self = Self::new(1, 0x05);
    /// 01/09h Invalid Log Page.
    pub const INVALID_LOG_PAGE: Self = Self::new(1, 0x09);
    /// 01/0Ah Invalid Format.
    pub const INVALID_FORMAT: Self = Self::new(1, 0x0a);
    /// 01/0Dh Feature Identifier Not Saveable.
    pub const FEATURE_NOT_SAVEABLE: Self = Self::new(1, 0x0d);
    /// 01/0Eh Feature Not Changeable.
    pub const FEATURE_NOT_CHANGEABLE: Self = Self::new(1, 0x0e);
    /// 01/0Fh Feature Not Namespace Specific.
    pub const FEATURE_NOT_NAMESPACE_SPECIFIC: Self = Self::new(1, 0x0f);
    /// 01/16h Namespace Identifier Unavailable.
    pub const NAMESPACE_ID_UNAVAILABLE: Self = Self::new(1, 0x16);
    /// 01/1Ah Namespace Not Attached.
    pub const NAMESPACE_NOT_ATTACHED: Self = Self::new(1, 0x1a);
    /// 01/29h I/O Command Set Not Supported.
    pub const COMMAND_SET_NOT_SUPPORTED: Self = Self::new(1, 0x29);
    /// 01/80h Connect Incompatible Format.
    pub const CONNECT_INCOMPATIBLE_FORMAT: Self = Self::new(1, 0x80);
    /// 01/81h Connect Controller Busy.
    pub const CONNECT_CONTROLLER_BUSY: Self = Self::new(1, 0x81);
    /// 01/82h Connect Invalid Parameters.
    pub const CONNECT_INVALID_PARAMETERS: Self = Self::new(1, 0x82);
    /// 01/83h Connect Restart Discovery.
    pub const CONNECT_RESTART_DISCOVERY: Self = Self::new(1, 0x83);
    /// 01/84h Connect Invalid Host.
    pub const CONNECT_INVALID_HOST: Self = Self::new(1, 0x84);
    /// 01/85h Invalid Queue Type.
    pub const INVALID_QUEUE_TYPE: Self = Self::new(1, 0x85);
    /// 01/90h Discover Restart.
    pub const DISCOVER_RESTART: Self = Self::new(1, 0x90);
    /// 01/91h Authentication Required.
    pub const AUTHENTICATION_REQUIRED: Self = Self::new(1, 0x91);
}

/// Media and data integrity errors (SCT 2).
impl Status {
    /// 02/80h Write Fault.
    pub const WRITE_FAULT: Self = Self::new(2, 0x80);
    /// 02/81h Unrecovered Read Error.
    pub const UNRECOVERED_READ: Self = Self::new(2, 0x81);
    /// 02/85h Compare Failure.
    pub const COMPARE_FAILURE: Self = Self::new(2, 0x85);
    /// 02/86h Access Denied.
    pub const ACCESS_DENIED: Self = Self::new(2, 0x86);
    /// 02/87h Deallocated or Unwritten Logical Block.
    pub const DEALLOCATED_BLOCK: Self = Self::new(2, 0x87);
}

/// Path related status (SCT 3).
impl Status {
    /// 03/00h Internal Path Error.
    pub const INTERNAL_PATH_ERROR: Self = Self::new(3, 0x00);
    /// 03/01h Asymmetric Access Persistent Loss.
    pub const ANA_PERSISTENT_LOSS: Self = Self::new(3, 0x01);
    /// 03/02h Asymmetric Access Inaccessible.
    pub const ANA_INACCESSIBLE: Self = Self::new(3, 0x02);
    /// 03/03h Asymmetric Access Transition.
    pub const ANA_TRANSITION: Self = Self::new(3, 0x03);
}

const NAMES: &[(Status, &str)] = &[
    (Status::SUCCESS, "Successful Completion"),
    (Status::INVALID_OPCODE, "Invalid Command Opcode"),
    (Status::INVALID_FIELD, "Invalid Field in Command"),
    (Status::COMMAND_ID_CONFLICT, "Command ID Conflict"),
    (Status::DATA_TRANSFER_ERROR, "Data Transfer Error"),
    (Status::INTERNAL_ERROR, "Internal Error"),
    (Status::ABORT_REQUESTED, "Command Abort Requested"),
    (Status::ABORTED_SQ_DELETION, "Command Aborted due to SQ Deletion"),
    (Status::ABORTED_FAILED_FUSED, "Command Aborted due to Failed Fused Command"),
    (Status::ABORTED_MISSING_FUSED, "Command Aborted due to Missing Fused Command"),
    (Status::INVALID_NAMESPACE, "Invalid Namespace or Format"),
    (Status::COMMAND_SEQUENCE_ERROR, "Command Sequence Error"),
    (Status::INVALID_SGL_SEGMENT, "Invalid SGL Segment Descriptor"),
    (Status::INVALID_SGL_COUNT, "Invalid Number of SGL Descriptors"),
    (Status::SGL_LENGTH_INVALID, "Data SGL Length Invalid"),
    (Status::METADATA_SGL_LENGTH_INVALID, "Metadata SGL Length Invalid"),
    (Status::SGL_TYPE_INVALID, "SGL Descriptor Type Invalid"),
    (Status::ATOMIC_WRITE_UNIT_EXCEEDED, "Atomic Write Unit Exceeded"),
    (Status::OPERATION_DENIED, "Operation Denied"),
    (Status::SGL_OFFSET_INVALID, "SGL Offset Invalid"),
    (Status::HOST_ID_INCONSISTENT, "Host Identifier Inconsistent Format"),
    (Status::KEEP_ALIVE_EXPIRED, "Keep Alive Timer Expired"),
    (Status::KEEP_ALIVE_INVALID, "Keep Alive Timeout Invalid"),
    (Status::SGL_GRANULARITY_INVALID, "SGL Data Block Granularity Invalid"),
    (Status::NAMESPACE_WRITE_PROTECTED, "Namespace is Write Protected"),
    (Status::COMMAND_INTERRUPTED, "Command Interrupted"),
    (Status::TRANSIENT_TRANSPORT_ERROR, "Transient Transport Error"),
    (Status::MEDIA_NOT_READY, "Admin Command Media Not Ready"),
    (Status::LBA_OUT_OF_RANGE, "LBA Out of Range"),
    (Status::CAPACITY_EXCEEDED, "Capacity Exceeded"),
    (Status::NAMESPACE_NOT_READY, "Namespace Not Ready"),
    (Status::RESERVATION_CONFLICT, "Reservation Conflict"),
    (Status::FORMAT_IN_PROGRESS, "Format In Progress"),
    (Status::INVALID_QUEUE_ID, "Invalid Queue Identifier"),
    (Status::INVALID_QUEUE_SIZE, "Invalid Queue Size"),
    (Status::ABORT_LIMIT_EXCEEDED, "Abort Command Limit Exceeded"),
    (Status::ASYNC_EVENT_LIMIT_EXCEEDED, "Asynchronous Event Request Limit Exceeded"),
    (Status::INVALID_LOG_PAGE, "Invalid Log Page"),
    (Status::INVALID_FORMAT, "Invalid Format"),
    (Status::FEATURE_NOT_SAVEABLE, "Feature Identifier Not Saveable"),
    (Status::FEATURE_NOT_CHANGEABLE, "Feature Not Changeable"),
    (Status::FEATURE_NOT_NAMESPACE_SPECIFIC, "Feature Not Namespace Specific"),
    (Status::NAMESPACE_ID_UNAVAILABLE, "Namespace Identifier Unavailable"),
    (Status::NAMESPACE_NOT_ATTACHED, "Namespace Not Attached"),
    (Status::COMMAND_SET_NOT_SUPPORTED, "I/O Command Set Not Supported"),
    (Status::CONNECT_INCOMPATIBLE_FORMAT, "Connect Incompatible Format"),
    (Status::CONNECT_CONTROLLER_BUSY, "Connect Controller Busy"),
    (Status::CONNECT_INVALID_PARAMETERS, "Connect Invalid Parameters"),
    (Status::CONNECT_RESTART_DISCOVERY, "Connect Restart Discovery"),
    (Status::CONNECT_INVALID_HOST, "Connect Invalid Host"),
    (Status::INVALID_QUEUE_TYPE, "Invalid Queue Type"),
    (Status::DISCOVER_RESTART, "Discover Restart"),
    (Status::AUTHENTICATION_REQUIRED, "Authentication Required"),
    (Status::WRITE_FAULT, "Write Fault"),
    (Status::UNRECOVERED_READ, "Unrecovered Read Error"),
    (Status::COMPARE_FAILURE, "Compare Failure"),
    (Status::ACCESS_DENIED, "Access Denied"),
    (Status::DEALLOCATED_BLOCK, "Deallocated or Unwritten Logical Block"),
    (Status::INTERNAL_PATH_ERROR, "Internal Path Error"),
    (Status::ANA_PERSISTENT_LOSS, "Asymmetric Access Persistent Loss"),
    (Status::ANA_INACCESSIBLE, "Asymmetric Access Inaccessible"),
    (Status::ANA_TRANSITION, "Asymmetric Access Transition"),
];

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02X}/{:02X}h", self.sct(), self.sc())?;
        if self.is_dnr() { f.write_str("+DNR") } else { Ok(()) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.name().unwrap_or("unlisted status"), self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_bits_stand_where_the_spec_has_them() {
        for (i, (status, _)) in NAMES.iter().enumerate() {
            assert!(NAMES[i + 1..].iter().all(|(other, _)| other != status), "{status:?} is listed twice");
        }
        assert_eq!(Status::LBA_OUT_OF_RANGE.dnr().bits(), 0x4080);
        assert_eq!(Status::COMPARE_FAILURE.bits(), 0x0285);
        assert_eq!(Status::INVALID_FIELD.dnr().code(), Status::INVALID_FIELD);
        assert_eq!(format!("{}", Status::INVALID_FIELD.dnr()), "Invalid Field in Command (00/02h+DNR)");
    }
}
