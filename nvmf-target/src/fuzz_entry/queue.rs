//! A host of any kind against an I/O queue: raw bytes, right capsules with any fields, data for any tag, aborts,
//! time, back ends that answer late, in any order.

use std::time::Duration;

use super::Input;
use crate::proto::controller_shared::ControllerLimits;
use crate::proto::sim::{PairConfig, RawHost};
use crate::wire::sqe::SQE_BYTES;
use crate::wire::{CommandId, NamespaceId, QueueId, SglDescriptor, Sqe};

/// Plays the input against a queue, then ends the connection: nothing may be left.
pub fn queue(bytes: &[u8]) {
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
    let mut last_tag = 0;
    while !input.is_empty() && host.pair.closed().is_none() {
        step(&mut host, &mut input, &mut last_tag);
        assert!(host.pair.shared.in_flight() <= usize::from(entries), "more at back ends than the queue holds");
        assert!(host.pair.pool.out_bytes() <= 16 << 20);
    }
    finish(&mut host);
}

fn step(host: &mut RawHost, input: &mut Input<'_>, last_tag: &mut u16) {
    let bytes = match input.byte() % 8 {
        0 => {
            let len_bytes = usize::from(input.byte());
            input.take(len_bytes).to_vec()
        }
        1..=3 => capsule(host, input),
        4 | 5 => h2c(host, input, *last_tag),
        6 => {
            host.pair.shared.abort(QueueId(1), CommandId(u16::from(input.byte() % 40)));
            host.pair.pass(Duration::from_millis(u64::from(input.byte()) * 100));
            Vec::new()
        }
        _ => {
            host.pair.answer_one();
            Vec::new()
        }
    };
    for reply in host.exchange(&bytes) {
        if let Some(r2t) = reply.r2t() {
            *last_tag = r2t.ttag;
        }
    }
}

/// A capsule whose fields are near enough to right ones to get far.
fn capsule(host: &RawHost, input: &mut Input<'_>) -> Vec<u8> {
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
    let data = vec![what; len_bytes as usize];
    if what & 0x20 != 0 {
        sqe.set_sgl(SglDescriptor::transport(len_bytes));
    } else {
        sqe.set_sgl(SglDescriptor::in_capsule(0, len_bytes));
    }
    if what & 0x40 != 0 {
        // One field of the command is anything.
        let at = usize::from(input.byte()) % SQE_BYTES;
        sqe.0[at] = input.byte();
    }
    let mut bytes = host.capsule_as_is(sqe, (what & 0x20 == 0).then_some(data.as_slice()));
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
    if choice < 32 && !bytes.is_empty() {
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
