//! Where a command says that its data is, against what it needs and what came with it.
//!
//! NVMe/TCP takes one descriptor, in the command: data in the capsule (type 01h) or moved by the transport (5Ah)
//! (NVMe/TCP 1.1 §3.4.2; NVMe Base 2.0 §4.1.2). A length that is not the command's is refused: SGLS in Identify
//! says that longer ones aren't taken.

use std::ops::RangeInclusive;

use crate::wire::{Psdt, SglKind, Sqe, Status};

/// Byte of PSDT in the command.
const LOCATION_PSDT: u16 = 1 | 6 << 8;
/// Byte of the descriptor's length.
const LOCATION_LENGTH: u16 = 32;
/// Byte of the descriptor's address.
const LOCATION_ADDRESS: u16 = 24;
/// Byte of the descriptor's type.
const LOCATION_KIND: u16 = 39;
const DESCRIPTOR_BYTES: u32 = 16;

/// A command that can't be done: its status, and the byte of the command that is to blame (FFFFh: none).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rejection {
    pub(super) status: Status,
    pub(super) location: u16,
}

impl Rejection {
    pub(super) fn at(status: Status, location: u16) -> Self {
        Self { status: status.dnr(), location }
    }

    pub(super) fn of(status: Status) -> Self {
        Self { status, location: u16::MAX }
    }
}

/// Checks the descriptor of a command that takes data from the host, and gives its length.
pub(super) fn check_from_host(sqe: &Sqe, allowed: RangeInclusive<u32>, capsule_bytes: u32) -> Result<u32, Rejection> {
    check_psdt(sqe)?;
    let sgl = sqe.sgl();
    match sgl.kind() {
        SglKind::DataBlockOffset => {
            // ICDOFF is 0, and nothing but the data is in the capsule.
            if sgl.address != 0 {
                return Err(Rejection::at(Status::SGL_OFFSET_INVALID, LOCATION_ADDRESS));
            }
            if sgl.len_bytes != capsule_bytes {
                return Err(Rejection::at(Status::SGL_LENGTH_INVALID, LOCATION_LENGTH));
            }
        }
        SglKind::TransportDataBlock if capsule_bytes != 0 => {
            return Err(Rejection::at(Status::SGL_LENGTH_INVALID, LOCATION_LENGTH));
        }
        SglKind::TransportDataBlock => {}
        _ => return Err(wrong_kind(sqe)),
    }
    check_length(sgl.len_bytes, allowed)
}

/// Checks the descriptor of a command that gives data to the host.
pub(super) fn check_to_host(sqe: &Sqe, len_bytes: u32, capsule_bytes: u32) -> Result<u32, Rejection> {
    check_psdt(sqe)?;
    let sgl = sqe.sgl();
    if sgl.kind() != SglKind::TransportDataBlock {
        return Err(wrong_kind(sqe));
    }
    if capsule_bytes != 0 {
        return Err(Rejection::at(Status::SGL_LENGTH_INVALID, LOCATION_LENGTH));
    }
    check_length(sgl.len_bytes, len_bytes..=len_bytes)
}

/// A command without data may not bring any.
pub(super) fn check_without_data(capsule_bytes: u32) -> Result<(), Rejection> {
    if capsule_bytes == 0 { Ok(()) } else { Err(Rejection::at(Status::SGL_LENGTH_INVALID, LOCATION_LENGTH)) }
}

/// PRPs have no meaning over fabrics, and there is no metadata to describe (NVMe Base 2.0 §3.3.3.1).
fn check_psdt(sqe: &Sqe) -> Result<(), Rejection> {
    match sqe.psdt() {
        Psdt::Sgl => Ok(()),
        _ => Err(Rejection::at(Status::INVALID_FIELD, LOCATION_PSDT)),
    }
}

fn check_length(len_bytes: u32, allowed: RangeInclusive<u32>) -> Result<u32, Rejection> {
    if allowed.contains(&len_bytes) {
        Ok(len_bytes)
    } else {
        Err(Rejection::at(Status::SGL_LENGTH_INVALID, LOCATION_LENGTH))
    }
}

/// A segment would hold further descriptors; MSDBD is 1, the one in the command.
fn wrong_kind(sqe: &Sqe) -> Rejection {
    let sgl = sqe.sgl();
    let status = match sgl.kind() {
        SglKind::Segment | SglKind::LastSegment => {
            if sgl.len_bytes == 0 || !sgl.len_bytes.is_multiple_of(DESCRIPTOR_BYTES) {
                Status::INVALID_SGL_SEGMENT
            } else if sgl.len_bytes > DESCRIPTOR_BYTES {
                Status::INVALID_SGL_COUNT
            } else {
                Status::SGL_TYPE_INVALID
            }
        }
        _ => Status::SGL_TYPE_INVALID,
    };
    Rejection::at(status, LOCATION_KIND)
}
