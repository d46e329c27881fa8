//! The I/O queue against an honest host's machine and against raw bytes.

mod commands;
mod fused;
mod hostile;
mod stream;
mod teardown;

use super::*;
use crate::backend::Backend;
use crate::proto::host::{Completion, HostConfig, HostData};
use crate::proto::sim::{Pair, PairConfig, Random, RawHost};
use crate::proto::tcp::TcpConfig;
use crate::wire::opcode::nvm;
use crate::wire::{QueueId, SglDescriptor};

/// A command on namespace 1 with a block range.
fn ranged(opcode: u8, slba: u64, lba_count: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode);
    sqe.set_namespace_id(NamespaceId(1)).set_cdw10_11(slba).set_dword(12, lba_count - 1);
    sqe
}

/// Likewise, for raw hosts: with the SGL for data that the transport moves.
fn ranged_transport(opcode: u8, slba: u64, lba_count: u32, block_bytes: u32) -> Sqe {
    let mut sqe = ranged(opcode, slba, lba_count);
    sqe.set_sgl(SglDescriptor::transport(lba_count * block_bytes));
    sqe
}

fn write(pair: &mut Pair, slba: u64, data: &[u8]) -> Completion {
    let lba_count = data.len() as u32 / pair.backend.geometry().block_bytes;
    pair.command(ranged(nvm::WRITE, slba, lba_count), HostData::ToController(IoBuf::copy_of(data)))
}

fn read(pair: &mut Pair, slba: u64, lba_count: u32) -> Completion {
    let len = (lba_count * pair.backend.geometry().block_bytes) as usize;
    pair.command(ranged(nvm::READ, slba, lba_count), HostData::FromController(IoBuf::heap(len)))
}

#[track_caller]
fn data_of(completion: Completion) -> Vec<u8> {
    assert!(completion.cqe.status.is_success(), "{}", completion.cqe.status);
    assert!(completion.intact, "the data's digest is wrong");
    let buffer = completion.buffer.expect("a read has a buffer");
    assert_eq!(completion.received_bytes as usize, buffer.len());
    buffer.to_vec()
}

/// A raw host's command without data, and its status.
#[track_caller]
fn status_of_raw(host: &mut RawHost, sqe: Sqe, cid: u16) -> Status {
    let bytes = host.capsule_as_is(with_cid(sqe, cid), None);
    only_status(&host.exchange(&bytes), cid)
}

fn with_cid(mut sqe: Sqe, cid: u16) -> Sqe {
    *sqe.set_command_id(CommandId(cid))
}

#[track_caller]
fn only_status(replies: &[crate::proto::sim::RawReply], cid: u16) -> Status {
    let [reply] = replies else { panic!("one answer, not {replies:?}") };
    let cqe = reply.completion().unwrap_or_else(|| panic!("a completion, not {reply:?}")).cqe;
    assert_eq!(cqe.cid, CommandId(cid));
    cqe.status
}
