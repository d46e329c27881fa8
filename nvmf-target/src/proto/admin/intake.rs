//! Commands with their data, whole: what the admin side and Connect work on.
//!
//! Owns the fetching of a command's data, in the capsule or by R2T, up to a limit. It must not know what commands do.
//! Invariant: a command that isn't handed out is answered here; what waits for data is bounded by the queue's size.

use std::time::Instant;

use crate::buffer::IoBuf;
use crate::proto::tcp::{CapsuleData, Slot, TcpEvent, TcpQueuePair};
use crate::wire::opcode::{Direction, fabrics};
use crate::wire::{CommandId, Cqe, Psdt, SglKind, Sqe, Status};

/// A command and its data.
#[derive(Debug)]
pub struct Request {
    /// Its name on the connection.
    pub slot: Slot,
    /// The command.
    pub sqe: Sqe,
    /// What the host sent with it; empty if nothing.
    pub data: Vec<u8>,
}

/// Commands whose data is still to come.
#[derive(Debug)]
pub struct Intake {
    limit_bytes: u32,
    waiting: Vec<(Slot, Sqe)>,
}

/// Where a command's data is.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    Nowhere,
    Capsule,
    Fetch(u32),
}

impl Intake {
    /// Takes commands with at most `limit_bytes` of data.
    pub fn new(limit_bytes: u32) -> Self {
        Self { limit_bytes, waiting: Vec::new() }
    }

    /// The next whole command.
    pub fn poll(&mut self, tcp: &mut TcpQueuePair, now: Instant) -> Option<Request> {
        loop {
            let (slot, sqe, data) = match tcp.poll_event()? {
                TcpEvent::Command { slot, sqe, data } => match self.arrived(slot, &sqe, data, tcp, now) {
                    Ok(Some(data)) => (slot, sqe, Ok(data)),
                    Ok(None) => continue,
                    Err(status) => (slot, sqe, Err(status)),
                },
                TcpEvent::Fetched { slot, buffer, intact } => {
                    let Some(at) = self.waiting.iter().position(|(waiting, _)| *waiting == slot) else { continue };
                    let (_, sqe) = self.waiting.swap_remove(at);
                    (slot, sqe, if intact { Ok(buffer.to_vec()) } else { Err(Status::TRANSIENT_TRANSPORT_ERROR) })
                }
            };
            match data {
                Ok(data) => return Some(Request { slot, sqe, data }),
                Err(status) => {
                    tracing::debug!(opcode = sqe.opcode(), ?status, "command refused");
                    tcp.respond(slot, Cqe::of(CommandId(0), status), now);
                }
            }
        }
    }

    /// The data of a command that has just arrived; `None` if it has to be fetched first.
    fn arrived(
        &mut self,
        slot: Slot,
        sqe: &Sqe,
        data: CapsuleData,
        tcp: &mut TcpQueuePair,
        now: Instant,
    ) -> Result<Option<Vec<u8>>, Status> {
        match source(sqe, data.len_bytes(), self.limit_bytes)? {
            Source::Nowhere => Ok(Some(Vec::new())),
            Source::Fetch(len_bytes) => {
                self.waiting.push((slot, *sqe));
                tcp.fetch(slot, IoBuf::heap(len_bytes as usize), now);
                Ok(None)
            }
            Source::Capsule if !data.is_intact() => Err(Status::TRANSIENT_TRANSPORT_ERROR),
            Source::Capsule => Ok(Some(match data {
                CapsuleData::None => Vec::new(),
                CapsuleData::Placed { buffer, .. } => buffer.to_vec(),
                CapsuleData::Reserved { len_bytes, .. } => {
                    let mut copy = vec![0; len_bytes as usize];
                    tcp.copy_reserved(slot, &mut copy);
                    copy
                }
            })),
        }
    }
}

/// Where the command says that its data is (NVMe/TCP 1.1 §3.4.1): one descriptor, in the capsule or by the transport.
fn source(sqe: &Sqe, capsule_bytes: u32, limit_bytes: u32) -> Result<Source, Status> {
    let code = if sqe.opcode() == fabrics::FABRICS { sqe.fabrics_type() } else { sqe.opcode() };
    let sgl = sqe.sgl();
    if Direction::of(code) != Direction::ToController {
        return if capsule_bytes == 0 { Ok(Source::Nowhere) } else { Err(Status::SGL_LENGTH_INVALID.dnr()) };
    }
    if sqe.psdt() != Psdt::Sgl {
        return Err(Status::INVALID_FIELD.dnr());
    }
    match sgl.kind() {
        SglKind::DataBlockOffset if sgl.address != 0 => Err(Status::SGL_OFFSET_INVALID.dnr()),
        SglKind::DataBlockOffset if sgl.len_bytes == capsule_bytes => Ok(Source::Capsule),
        SglKind::TransportDataBlock if capsule_bytes != 0 => Err(Status::SGL_LENGTH_INVALID.dnr()),
        SglKind::TransportDataBlock if sgl.len_bytes == 0 => Ok(Source::Nowhere),
        SglKind::TransportDataBlock if sgl.len_bytes <= limit_bytes => Ok(Source::Fetch(sgl.len_bytes)),
        SglKind::DataBlockOffset | SglKind::TransportDataBlock => Err(Status::SGL_LENGTH_INVALID.dnr()),
        // Some hosts leave the descriptor of a command that turns out to have no data all zero.
        SglKind::DataBlock if sgl.len_bytes == 0 && capsule_bytes == 0 => Ok(Source::Nowhere),
        _ => Err(Status::SGL_TYPE_INVALID.dnr()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::SglDescriptor;
    use crate::wire::opcode::admin;

    fn of(opcode: u8, sgl: SglDescriptor, capsule_bytes: u32) -> Result<Source, Status> {
        let mut sqe = Sqe::new(opcode);
        sqe.set_sgl(sgl);
        source(&sqe, capsule_bytes, 4096)
    }

    #[test]
    fn descriptors_that_lie_are_refused() {
        let set = admin::SET_FEATURES;
        let length = Err(Status::SGL_LENGTH_INVALID.dnr());
        assert_eq!(of(set, SglDescriptor::in_capsule(0, 512), 512), Ok(Source::Capsule));
        assert_eq!(of(set, SglDescriptor::transport(4096), 0), Ok(Source::Fetch(4096)));
        assert_eq!(of(set, SglDescriptor::transport(0), 0), Ok(Source::Nowhere));
        assert_eq!(of(set, SglDescriptor::transport(4097), 0), length, "over the limit");
        assert_eq!(of(set, SglDescriptor::transport(512), 512), length, "says R2T, but data came");
        assert_eq!(of(set, SglDescriptor::in_capsule(0, 511), 512), length);
        assert_eq!(of(set, SglDescriptor::in_capsule(0, 512), 0), length);
        assert_eq!(of(set, SglDescriptor::in_capsule(8, 512), 512), Err(Status::SGL_OFFSET_INVALID.dnr()));
        let keyed = SglDescriptor { address: 0, len_bytes: 512, kind_byte: 0x40 };
        assert_eq!(of(set, keyed, 512), Err(Status::SGL_TYPE_INVALID.dnr()));
        assert_eq!(of(admin::IDENTIFY, SglDescriptor::transport(4096), 0), Ok(Source::Nowhere));
        assert_eq!(of(admin::IDENTIFY, SglDescriptor::transport(4096), 4), length, "data for a reading command");
    }
}
