//! A controller of any kind against the host's machine.

use std::io::IoSlice;

use super::Input;
use crate::buffer::IoBuf;
use crate::proto::host::{HostConfig, HostData, HostQueuePair};
use crate::wire::digest::Digest;
use crate::wire::opcode::nvm;
use crate::wire::pdu::{C2HData, CapsuleResp, CommonHeader, ICResp, PduType, R2T};
use crate::wire::{CommandId, Cqe, Sqe, Status};

/// Plays the input against a host with a few commands outstanding.
pub fn host(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let mut host = HostQueuePair::new(HostConfig {
        header_digest: choice & 1 != 0,
        data_digest: choice & 2 != 0,
        entries: 8,
        staging_bytes: 1024,
        ..HostConfig::default()
    });
    let response = ICResp {
        common: CommonHeader::bare(PduType::ICResp),
        pfv: 0,
        cpda: choice >> 3,
        dgst: choice & 3,
        maxh2cdata: 4096,
    };
    feed(&mut host, &response.encode());
    let mut submitted = 0u64;
    let mut ended = 0;
    while !input.is_empty() && host.poll_close().is_none() {
        submitted += u64::from(submit(&mut host, &mut input));
        let bytes = pdu(&mut input, choice);
        feed(&mut host, &bytes);
        ended += std::iter::from_fn(|| host.poll_completion()).count() as u64;
    }
    let left = host.outstanding() as u64;
    assert_eq!(submitted, ended + left, "a command was lost or completed twice");
    host.peer_closed();
    assert_eq!(host.take_abandoned().len() as u64, left);
}

fn submit(host: &mut HostQueuePair, input: &mut Input<'_>) -> bool {
    let choice = input.byte();
    let len_bytes = usize::from(choice >> 2) * 512;
    let (opcode, data) = match choice & 3 {
        0 => (nvm::READ, HostData::FromController(IoBuf::heap(len_bytes))),
        1 => (nvm::WRITE, HostData::ToController(IoBuf::heap(len_bytes))),
        2 => (nvm::FLUSH, HostData::None),
        _ => return false,
    };
    host.submit(Sqe::new(opcode), data, u64::from(choice)).is_ok()
}

/// A PDU whose fields are near enough to right ones to get far, or any bytes.
fn pdu(input: &mut Input<'_>, digests: u8) -> Vec<u8> {
    let (what, cid) = (input.byte(), CommandId(u16::from(input.byte() % 10)));
    let header = |pdu_type, flags| {
        let mut common = CommonHeader::bare(pdu_type);
        common.flags = flags | digests & 1;
        common.plen += u32::from(digests & 1) * 4;
        common
    };
    let offset = u32::from(input.byte() % 70) * 512;
    let len_bytes = u32::from(input.byte() % 70) * 512;
    match what & 3 {
        0 => {
            let common = header(PduType::CapsuleResp, 0);
            let cqe = Cqe::of(cid, Status::from_bits(u16::from(what >> 2)));
            with_digest(CapsuleResp { common, cqe }.encode().to_vec(), digests)
        }
        1 => {
            let r2t = R2T {
                common: header(PduType::R2T, 0),
                cccid: cid,
                ttag: u16::from(what),
                r2to: offset,
                r2tl: len_bytes,
            };
            with_digest(r2t.encode().to_vec(), digests)
        }
        2 => {
            let mut common = header(PduType::C2HData, what & 0xc | digests & 2);
            common.pdo = common.plen as u8;
            common.plen += len_bytes + u32::from(digests >> 1 & 1) * 4;
            let data = vec![what; len_bytes as usize];
            let pdu = C2HData { common, cccid: cid, datao: offset, datal: len_bytes };
            let mut bytes = with_digest(pdu.encode().to_vec(), digests);
            bytes.extend(&data);
            if digests & 2 != 0 {
                bytes.extend(Digest::of(&data).to_bytes());
            }
            bytes
        }
        _ => {
            let len_bytes = usize::from(input.byte());
            input.take(len_bytes).to_vec()
        }
    }
}

fn with_digest(mut header: Vec<u8>, digests: u8) -> Vec<u8> {
    if digests & 1 != 0 {
        header.extend(Digest::of(&header).to_bytes());
    }
    header
}

fn feed(host: &mut HostQueuePair, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let into = host.receive_slice();
        let len = into.len().min(bytes.len());
        if len == 0 {
            break;
        }
        into[..len].copy_from_slice(&bytes[..len]);
        host.received(len);
        bytes = &bytes[len..];
    }
    let mut slices: Vec<IoSlice<'_>> = Vec::new();
    host.gather(&mut slices);
    let waiting = slices.iter().map(|slice| slice.len()).sum();
    host.sent(waiting);
}
