//! A host of any kind against an I/O queue: raw bytes, right capsules with any fields, data for any tag, aborts,
//! time, back ends that answer late, in any order.

use std::time::Duration;

use super::Input;
use crate::proto::controller_shared::ControllerLimits;
use crate::proto::sim::{PairConfig, RawHost};
use crate::wire::opcode::nvm;
use crate::wire::pdu::R2T;
use crate::wire::sqe::SQE_BYTES;
use crate::wire::{CommandId, NamespaceId, QueueId, SglDescriptor, Sqe};

/// Plays the input against a queue, then ends the connection: nothing may be left.
pub fn queue(bytes: &[u8]) {
    play(bytes);
}

/// What an input came to: the operations that reached the back end, and writes whose data came by R2T.
pub struct Depth {
    /// In order.
    pub operations: Vec<&'static str>,
    /// R2Ts that got their data.
    pub fetched: usize,
}

/// Likewise, and says how far the input got.
pub fn play(bytes: &[u8]) -> Depth {
    let mut input = Input::new(bytes);
    let choice = input.byte();
    let entries = 1 + u16::from(input.byte() % 32);
    let config = PairConfig {
        seed: u64::from(input.byte()),
        piece_max_bytes: usize::from(input.byte()),
        limits: ControllerLimits {
            mdts_bytes: 64 << 10,
            in_capsule_bytes: [0, 512, 4096, 8192][usize::from(choice & 3)],
            fused_blocks: 8,
            ..ControllerLimits::default()
        },
        entries,
        sq_flow_control: choice & 4 != 0,
        pool_bytes: if choice & 8 != 0 { 64 << 10 } else { 16 << 20 },
        block_count: 1024,
        ..PairConfig::default()
    };
    let mut host = RawHost::with_digests(config, choice & 16 != 0, choice & 32 != 0);
    host.pair.hold_replies = choice & 64 != 0;
    let mut asked = Asked::default();
    while !input.is_empty() && host.pair.closed().is_none() {
        step(&mut host, &mut input, &mut asked);
        assert!(host.pair.shared.in_flight() <= usize::from(entries), "more at back ends than the queue holds");
        assert!(host.pair.pool.out_bytes() <= 16 << 20);
    }
    finish(&mut host);
    Depth { operations: host.pair.backend.log(), fetched: asked.answered }
}

/// R2Ts that wait for their data.
#[derive(Default)]
struct Asked {
    open: Vec<R2T>,
    answered: usize,
}

fn step(host: &mut RawHost, input: &mut Input<'_>, asked: &mut Asked) {
    let bytes = match input.byte() % 8 {
        0 if input.byte() < 8 => {
            let len_bytes = usize::from(input.byte());
            input.take(len_bytes).to_vec()
        }
        0..=2 => capsule(host, input),
        3 => fused_pair(host, input),
        4 => answer(host, input, asked),
        5 if input.byte() < 8 => h2c(host, input, asked.open.last().map_or(0, |r2t| r2t.ttag)),
        6 => {
            host.pair.shared.abort(QueueId(1), CommandId(u16::from(input.byte() % 40)));
            host.pair.pass(Duration::from_millis(u64::from(input.byte())));
            Vec::new()
        }
        _ => {
            host.pair.answer_one();
            Vec::new()
        }
    };
    asked.open.extend(host.exchange(&bytes).iter().filter_map(|reply| reply.r2t().cloned()));
}

/// The right data for one of the R2Ts, whole or in two parts.
fn answer(host: &RawHost, input: &mut Input<'_>, asked: &mut Asked) -> Vec<u8> {
    let choice = input.byte();
    if asked.open.is_empty() {
        return Vec::new();
    }
    let r2t = asked.open.swap_remove(usize::from(choice >> 1) % asked.open.len());
    asked.answered += 1;
    let data = vec![choice; r2t.r2tl as usize];
    let cut = if choice & 1 == 0 { data.len() } else { data.len() / 2 };
    let mut bytes = host.h2c(r2t.cccid.0, r2t.ttag, r2t.r2to, &data[..cut], cut == data.len());
    if cut < data.len() {
        bytes.extend(host.h2c(r2t.cccid.0, r2t.ttag, r2t.r2to + cut as u32, &data[cut..], true));
    }
    damage(&mut bytes, input);
    bytes
}

/// Ranges near the namespace's size.
fn dsm_ranges(input: &mut Input<'_>, count: u32) -> Vec<u8> {
    let range = |_| {
        let (slba, lba_count) = (u64::from(input.u16() % 1030), u32::from(input.byte() % 8));
        [&[0; 4][..], &lba_count.to_le_bytes(), &slba.to_le_bytes()].concat()
    };
    (0..count).flat_map(range).collect()
}

/// Compare and Write on the same blocks, in the capsule or not.
fn fused_pair(host: &RawHost, input: &mut Input<'_>) -> Vec<u8> {
    let (choice, slba) = (input.byte(), u64::from(input.byte()));
    let mut bytes = Vec::new();
    for (opcode, fuse, transport) in [(nvm::COMPARE, 1, choice & 1 != 0), (nvm::WRITE, 2, choice & 2 != 0)] {
        let mut sqe = Sqe::new(opcode);
        sqe.set_namespace_id(NamespaceId(1)).set_cdw10_11(slba).set_fuse_bits(fuse);
        sqe.set_command_id(CommandId(u16::from(input.byte() % 40)));
        let transport = transport || host.pair.shared.limits().in_capsule_bytes == 0;
        let sgl = if transport { SglDescriptor::transport(512) } else { SglDescriptor::in_capsule(0, 512) };
        sqe.set_sgl(sgl);
        bytes.extend(host.capsule_as_is(sqe, (!transport).then_some(&[choice & 4; 512])));
    }
    damage(&mut bytes, input);
    bytes
}

/// A capsule whose fields are near enough to right ones to get far.
fn capsule(host: &RawHost, input: &mut Input<'_>) -> Vec<u8> {
    let limit = host.pair.shared.limits().in_capsule_bytes;
    const OPCODES: [u8; 8] = [0x00, 0x01, 0x02, 0x05, 0x08, 0x09, 0x0c, 0x7f];
    let what = input.byte();
    let mut sqe = Sqe::new(OPCODES[usize::from(what & 7)]);
    let blocks = u32::from(input.byte() % 16);
    sqe.set_namespace_id(NamespaceId(if what & 0x80 != 0 { input.u32() } else { 1 }));
    sqe.set_cdw10_11(u64::from(input.u16() % 1100)).set_dword(12, blocks);
    if what & 7 == 5 {
        sqe.set_dword(10, blocks).set_dword(11, 4);
    }
    sqe.set_fuse_bits(what >> 3 & 3).set_command_id(CommandId(u16::from(input.byte() % 40)));
    let len_bytes = if what & 7 == 5 { (blocks + 1) * 16 } else { (blocks + 1) * 512 };
    let mut data = vec![what; len_bytes as usize];
    if what & 7 == 5 {
        data = dsm_ranges(input, blocks + 1);
    }
    // Data over the in-capsule limit ends the connection at once: only now and then.
    let transport = what & 0x20 != 0 || (len_bytes > limit && input.byte() > 8);
    if transport {
        sqe.set_sgl(SglDescriptor::transport(len_bytes));
    } else {
        sqe.set_sgl(SglDescriptor::in_capsule(0, len_bytes));
    }
    if what & 0x40 != 0 {
        // One field of the command is anything.
        let at = usize::from(input.byte()) % SQE_BYTES;
        sqe.0[at] = input.byte();
    }
    let mut bytes = host.capsule_as_is(sqe, (!transport).then_some(data.as_slice()));
    damage(&mut bytes, input);
    bytes
}

fn h2c(host: &RawHost, input: &mut Input<'_>, last_tag: u16) -> Vec<u8> {
    let what = input.byte();
    let ttag = if what & 1 == 0 { last_tag } else { input.u16() };
    let cid = u16::from(input.byte() % 40);
    let datao = u32::from(input.byte() % 32) * 512;
    let data = vec![what; usize::from(input.byte() % 32) * 512];
    let mut bytes = host.h2c(cid, ttag, datao, &data, what & 2 != 0);
    damage(&mut bytes, input);
    bytes
}

/// Now and then a byte is another, digests included.
fn damage(bytes: &mut [u8], input: &mut Input<'_>) {
    let choice = input.byte();
    if choice < 3 && !bytes.is_empty() {
        let at = usize::from(input.u16()) % bytes.len();
        bytes[at] ^= choice | 1;
    }
}

fn finish(host: &mut RawHost) {
    if let Some(queue) = host.pair.queue() {
        queue.peer_closed();
    }
    host.pair.run_raw();
    while host.pair.answer_one() {}
    assert!(host.pair.closed().is_some());
    assert_eq!(host.pair.shared.in_flight(), 0, "a request was lost");
    assert_eq!(host.pair.pool.out_bytes(), 0, "a buffer was lost");
}
