//! Connect: the checks that need no knowledge of subsystems or hosts (NVMe-oF 1.1 §3.3, NVMe Base 2.0 §6.3).
//!
//! Invariant: what comes out as [`ConnectRequest`] keeps every rule of form; what doesn't is refused with the
//! place of the wrong parameter.

use crate::wire::Status;
use crate::wire::connect::{
    CNTLID_DYNAMIC, CNTLID_MAX, CNTLID_STATIC_ANY, CONNECT_DATA_BYTES, CONNECT_RECFMT, ConnectCommand, ConnectData,
    InvalidIn, invalid_parameter_dw0, offset,
};
use crate::wire::nqn::Nqn;

/// A well-formed Connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectRequest {
    /// Queue; 0 is the admin queue.
    pub qid: u16,
    /// Queue size in entries.
    pub queue_entries: u16,
    /// The host wants no submission queue flow control.
    pub disable_sq_flow_control: bool,
    /// Keep-alive timeout, in ms. Of the admin queue.
    pub kato_ms: u32,
    /// Controller id asked for.
    pub cntlid: u16,
    /// Host identifier.
    pub hostid: [u8; 16],
    /// Host name.
    pub host: Nqn,
    /// Subsystem name.
    pub subsystem: Nqn,
}

/// Why a Connect was refused: status and dword 0 of its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// The status.
    pub status: Status,
    /// Dword 0.
    pub dw0: u32,
}

impl Refusal {
    /// A refusal without a place.
    pub fn of(status: Status) -> Self {
        Self { status, dw0: 0 }
    }

    /// 01/82h: the parameter at `offset` is wrong.
    pub fn invalid(invalid_in: InvalidIn, offset: u16) -> Self {
        let status = Status::CONNECT_INVALID_PARAMETERS.dnr();
        Self { status, dw0: invalid_parameter_dw0(invalid_in, offset) }
    }
}

/// The largest admin queue in entries: hosts ask for 32, and each entry may hold a capsule's data.
pub const ADMIN_ENTRIES_MAX: u16 = 128;

/// Limits of queues that a host may ask for.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    /// Largest queue in entries.
    pub max_queue_entries: u16,
    /// I/O queues of one controller.
    pub max_io_queues: u16,
}

/// Checks the form of a Connect command and its data.
pub fn check(sqe: &[u8; 64], data: &[u8], limits: &QueueLimits) -> Result<ConnectRequest, Refusal> {
    let command = ConnectCommand::decode(sqe);
    if command.recfmt != CONNECT_RECFMT {
        return Err(Refusal::of(Status::CONNECT_INCOMPATIBLE_FORMAT.dnr()));
    }
    let data: &[u8; CONNECT_DATA_BYTES] = data.first_chunk().ok_or(Refusal::of(Status::SGL_LENGTH_INVALID.dnr()))?;
    check_command(&command, limits)?;
    let data = ConnectData::decode(data);
    let name = |field, at| Nqn::from_field(field).map_err(|_| Refusal::invalid(InvalidIn::Data, at));
    let subsystem = name(&data.subnqn, offset::SUBNQN)?;
    let host = name(&data.hostnqn, offset::HOSTNQN)?;
    check_identifiers(&command, &data)?;
    Ok(ConnectRequest {
        qid: command.qid,
        queue_entries: command.sqsize + 1,
        disable_sq_flow_control: command.disables_sq_flow_control(),
        kato_ms: command.kato_ms,
        cntlid: data.cntlid,
        hostid: data.hostid,
        host,
        subsystem,
    })
}

fn check_command(command: &ConnectCommand, limits: &QueueLimits) -> Result<(), Refusal> {
    let invalid = |at| Err(Refusal::invalid(InvalidIn::Command, at));
    // SQSIZE is 0-based, and a queue has two entries at least.
    let entries = command.sqsize.checked_add(1).filter(|entries| *entries >= 2);
    let most =
        if command.qid == 0 { limits.max_queue_entries.min(ADMIN_ENTRIES_MAX) } else { limits.max_queue_entries };
    if entries.is_none_or(|entries| entries > most) {
        return invalid(offset::SQSIZE);
    }
    if command.qid > limits.max_io_queues {
        return invalid(offset::QID);
    }
    Ok(())
}

fn check_identifiers(command: &ConnectCommand, data: &ConnectData) -> Result<(), Refusal> {
    let invalid = |at| Err(Refusal::invalid(InvalidIn::Data, at));
    if data.hostid == [0; 16] {
        return invalid(offset::HOSTID);
    }
    // The dynamic controller model: the admin queue asks for any controller, an I/O queue for a certain one.
    let fits = match command.qid {
        0 => data.cntlid == CNTLID_DYNAMIC,
        _ => data.cntlid <= CNTLID_MAX,
    };
    const { assert!(CNTLID_STATIC_ANY > CNTLID_MAX, "static 'any' is refused like every id that can't exist") };
    if fits { Ok(()) } else { invalid(offset::CNTLID) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::nqn::NQN_FIELD_BYTES;

    const LIMITS: QueueLimits = QueueLimits { max_queue_entries: 128, max_io_queues: 16 };

    fn field(name: &str) -> [u8; NQN_FIELD_BYTES] {
        let mut field = [0; NQN_FIELD_BYTES];
        field[..name.len()].copy_from_slice(name.as_bytes());
        field
    }

    fn good() -> (ConnectCommand, ConnectData) {
        let command = ConnectCommand { recfmt: 0, qid: 0, sqsize: 31, cattr: 0, kato_ms: 5000 };
        let data = ConnectData {
            hostid: [1; 16],
            cntlid: 0xFFFF,
            subnqn: field("nqn.2014-08.org.x:s"),
            hostnqn: field("nqn.2014-08.org.x:h"),
        };
        (command, data)
    }

    fn checked(change: impl FnOnce(&mut ConnectCommand, &mut ConnectData)) -> Result<ConnectRequest, Refusal> {
        let (mut command, mut data) = good();
        change(&mut command, &mut data);
        let mut sqe = [0; 64];
        command.encode_into(&mut sqe);
        check(&sqe, &data.encode(), &LIMITS)
    }

    #[test]
    fn a_good_one_passes() {
        let request = checked(|_, _| ()).unwrap();
        assert_eq!((request.queue_entries, request.kato_ms, request.cntlid), (32, 5000, 0xFFFF));
        assert_eq!(request.host.as_str(), "nqn.2014-08.org.x:h");
        assert!(checked(|c, d| (c.qid, d.cntlid) = (16, 1)).is_ok());
    }

    #[test]
    fn wrong_parameters_are_named_by_place() {
        let command = |at| Err(Refusal::invalid(InvalidIn::Command, at));
        let data = |at| Err(Refusal::invalid(InvalidIn::Data, at));
        for sqsize in [0, 128, 0xFFFE, 0xFFFF] {
            assert_eq!(checked(|c, _| c.sqsize = sqsize), command(44), "SQSIZE {sqsize}");
        }
        assert_eq!(checked(|c, d| (c.qid, d.cntlid) = (17, 1)), command(42));
        assert_eq!(checked(|_, d| d.cntlid = 1), data(16), "a dynamic controller can't be chosen");
        assert_eq!(checked(|_, d| d.cntlid = 0xFFFE), data(16));
        assert_eq!(checked(|c, _| c.qid = 1), data(16), "an I/O queue needs its controller's id");
        assert_eq!(checked(|c, d| (c.qid, d.cntlid) = (1, 0xFFF0)), data(16));
        assert_eq!(
            checked(|c, _| c.recfmt = 1),
            Err(Refusal { status: Status::CONNECT_INCOMPATIBLE_FORMAT.dnr(), dw0: 0 })
        );
        let large = QueueLimits { max_queue_entries: 4096, ..LIMITS };
        let (mut command, mut full) = good();
        let mut sqe = [0; 64];
        command.sqsize = 128;
        command.encode_into(&mut sqe);
        assert_eq!(check(&sqe, &full.encode(), &large), Err(Refusal::invalid(InvalidIn::Command, 44)), "admin");
        (command.qid, full.cntlid) = (1, 1);
        command.encode_into(&mut sqe);
        assert!(check(&sqe, &full.encode(), &large).is_ok());
        let (command, full) = good();
        command.encode_into(&mut sqe);
        assert_eq!(check(&sqe, &full.encode()[..1023], &LIMITS), Err(Refusal::of(Status::SGL_LENGTH_INVALID.dnr())));
    }

    /// H37: names that aren't NQNs and the all-zero host id, each refused at its place.
    #[test]
    fn h37_bad_names_and_host_ids_are_refused() {
        let long = format!("nqn.2014-08.org.x:{}", "a".repeat(224 - 18));
        let mut not_utf8 = field("nqn.2014-08.org.x:");
        not_utf8[18] = 0xFF;
        let bad = [field(""), field("nqn."), field(&long), [b'a'; 256], not_utf8, field("nqn.2014-08.org.x:\x1b[2J")];
        for name in bad {
            let host = checked(|_, d| d.hostnqn = name).unwrap_err();
            assert_eq!((host.status.code(), host.dw0), (Status::CONNECT_INVALID_PARAMETERS, 0x1_0000 | 512));
            let subsystem = checked(|_, d| d.subnqn = name).unwrap_err();
            assert_eq!((subsystem.status.code(), subsystem.dw0), (Status::CONNECT_INVALID_PARAMETERS, 0x1_0000 | 256));
        }
        assert_eq!(checked(|_, d| d.hostid = [0; 16]), Err(Refusal::invalid(InvalidIn::Data, 0)));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_checked_without_a_panic(
            head in proptest::array::uniform32(proptest::num::u8::ANY),
            tail in proptest::array::uniform32(proptest::num::u8::ANY),
            data in proptest::collection::vec(proptest::num::u8::ANY, 0..1100),
        ) {
            let mut sqe = [0; 64];
            sqe[..32].copy_from_slice(&head);
            sqe[32..].copy_from_slice(&tail);
            let _ = check(&sqe, &data, &LIMITS);
        }
    }
}
