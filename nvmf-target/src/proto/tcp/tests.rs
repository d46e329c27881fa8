//! The transport by itself: what a queue's own tests don't reach.

use std::collections::HashMap;

use super::slots::Slots;
use super::transfer::{Ask, Transfer, split_ttag};
use super::*;
use crate::buffer::{BoundedHeapPool, HeapPool};
use crate::proto::framing::HeaderFault;
use crate::proto::sim::{PairConfig, Random, RawHost, connect_sqe};
use crate::wire::opcode::nvm;
use crate::wire::pdu::{CommonHeader, FLAG_LAST, H2CData, PduType};
use crate::wire::{CommandId, Cqe, Status};

fn fresh() -> (TcpQueuePair, Instant) {
    let pool = Arc::new(HeapPool { largest_bytes: 8192 });
    (TcpQueuePair::new(TcpConfig::default(), pool), Instant::now())
}

fn feed(tcp: &mut TcpQueuePair, bytes: &[u8], now: Instant) {
    tcp.receive_slice()[..bytes.len()].copy_from_slice(bytes);
    tcp.received(bytes.len(), now);
}

fn accept(tcp: &mut TcpQueuePair, now: Instant) {
    let Some(TcpEvent::Command { slot, sqe, data }) = tcp.poll_event() else { panic!("a Connect") };
    assert!(matches!(data, CapsuleData::Placed { buffer, intact: true } if buffer.len() == 1024));
    tcp.establish(QueueParams { entries: 8, sq_flow_control: true, in_capsule_bytes: 4096, staging_bytes: 64 << 10 });
    tcp.respond(slot, Cqe::of(sqe.command_id(), Status::SUCCESS), now);
}

/// Bytes that were read with Connect are not lost when the queue's size is settled.
#[test]
fn h07_what_was_read_behind_connect_survives_the_hand_over() {
    let raw = RawHost::fresh(PairConfig::default());
    let connect = raw.capsule(connect_sqe(), 1, Some(&[0; 1024]));
    let flush = raw.capsule(Sqe::new(nvm::FLUSH), 2, None);
    for early in [0, 1, 7, 8, 9, 71] {
        let (mut tcp, now) = fresh();
        feed(&mut tcp, &raw.ic_req(), now);
        feed(&mut tcp, &[&connect, &flush[..early]].concat(), now);
        accept(&mut tcp, now);
        feed(&mut tcp, &flush[early..], now);
        let event = tcp.poll_event();
        let Some(TcpEvent::Command { sqe, .. }) = event else { panic!("{early} bytes early: {event:?}") };
        assert_eq!((sqe.opcode(), sqe.command_id()), (nvm::FLUSH, CommandId(2)));
    }
}

/// Without a pool the data of Connect itself is in the reserve, and whole.
#[test]
fn connect_is_taken_when_the_pool_is_empty() {
    let raw = RawHost::fresh(PairConfig::default());
    let now = Instant::now();
    let mut tcp = TcpQueuePair::new(TcpConfig::default(), Arc::new(BoundedHeapPool::new(0, 8192)));
    let data = Random::new(1).bytes(1024);
    feed(&mut tcp, &raw.ic_req(), now);
    feed(&mut tcp, &raw.capsule(connect_sqe(), 1, Some(&data)), now);
    let Some(TcpEvent::Command { slot, data: held, .. }) = tcp.poll_event() else { panic!("a Connect") };
    assert!(matches!(held, CapsuleData::Reserved { len_bytes: 1024, intact: true }));
    let mut copy = vec![0; 1024];
    tcp.copy_reserved(slot, &mut copy);
    assert!(copy == data);
}

/// A Connect that is refused leaves room for another one.
#[test]
fn a_refused_connect_may_be_followed_by_another() {
    let raw = RawHost::fresh(PairConfig::default());
    let (mut tcp, now) = fresh();
    feed(&mut tcp, &raw.ic_req(), now);
    for cid in 0..3 {
        feed(&mut tcp, &raw.capsule(connect_sqe(), cid, Some(&[0; 1024])), now);
        let Some(TcpEvent::Command { slot, .. }) = tcp.poll_event() else { panic!("a Connect") };
        tcp.respond(slot, Cqe::of(CommandId(0), Status::CONNECT_INVALID_HOST.dnr()), now);
        let mut slices = Vec::new();
        tcp.gather(&mut slices);
        let waiting = slices.iter().map(|s| s.len()).sum();
        tcp.sent(waiting, now);
    }
    feed(&mut tcp, &raw.capsule(connect_sqe(), 9, Some(&[0; 1024])), now);
    accept(&mut tcp, now);
    assert_eq!((tcp.poll_close(), tcp.outstanding(), tcp.entries()), (None, 0, 8));
}

#[test]
fn slots_and_live_ids_follow_a_model() {
    let mut random = Random::new(4);
    let mut slots = Slots::new(1);
    slots.grow(16);
    let mut model: HashMap<u16, Slot> = HashMap::new();
    for _ in 0..20_000 {
        let cid = (random.below(40) * 1639) as u16;
        assert_eq!(slots.is_live(CommandId(cid)), model.contains_key(&cid));
        assert_eq!((slots.taken(), slots.is_full()), (model.len(), model.len() == 16));
        match model.get(&cid).copied() {
            Some(slot) => {
                let freed = slots.free(slot).map(|o| o.cid);
                assert_eq!(freed, Some(CommandId(cid)));
                assert!(slots.get(slot).is_none() && slots.free(slot).is_none());
                model.remove(&cid);
            }
            None => match slots.take(CommandId(cid)) {
                Some(slot) => {
                    assert!(slot.0 < 16 && !model.values().any(|taken| *taken == slot));
                    model.insert(cid, slot);
                }
                None => assert_eq!(model.len(), 16),
            },
        }
    }
}

fn h2c(ask: &Ask, datao: u32, datal: u32, last: bool) -> H2CData {
    let common = CommonHeader { flags: if last { FLAG_LAST } else { 0 }, ..CommonHeader::bare(PduType::H2CData) };
    H2CData { common, cccid: CommandId(3), ttag: ask.ttag, datao, datal }
}

/// Whatever the sizes and the order of answers: every byte is asked for once, and comes once.
#[test]
fn a_transfer_asks_for_every_byte_once() {
    let mut random = Random::new(6);
    for _ in 0..500 {
        let len_bytes = 1 + random.below(100_000);
        let at_once = 1 + random.below(6);
        let most = 1 + random.below(40_000) as u32;
        let mut transfer = Transfer::new(IoBuf::heap(len_bytes), Instant::now());
        let mut covered = vec![0u8; len_bytes];
        let mut open: Vec<(Ask, u32)> = Vec::new();
        while !transfer.is_whole() {
            while let Some(ask) = transfer.ask(Slot(9), at_once, most) {
                assert_eq!(split_ttag(ask.ttag).0, Slot(9));
                assert!(open.iter().all(|(other, _)| other.ttag != ask.ttag), "a tag used twice");
                open.push((ask, 0));
            }
            assert!(!open.is_empty() && open.len() <= at_once.min(4));
            let index = random.below(open.len());
            let (ask, come) = &mut open[index];
            let left = ask.len_bytes - *come;
            let datal = 1 + random.below(left as usize) as u32;
            let r2t = split_ttag(ask.ttag).1;
            let wrong = h2c(ask, ask.offset + *come + 1, datal, false);
            let refused = Err(HeaderFault::of(FatalError::DataOutOfRange));
            assert_eq!(transfer.check(r2t, CommandId(3), &wrong), refused);
            let right = h2c(ask, ask.offset + *come, datal, datal == left);
            assert_eq!(transfer.check(r2t, CommandId(3), &right), Ok(()));
            transfer.place(right.datao)[..datal as usize].fill(1);
            covered[right.datao as usize..][..datal as usize].iter_mut().for_each(|count| *count += 1);
            transfer.came(r2t, datal, true);
            *come += datal;
            if *come == ask.len_bytes {
                open.swap_remove(index);
            }
        }
        assert!(covered.iter().all(|count| *count == 1));
        let (buffer, intact) = transfer.into_parts();
        assert!(intact && buffer.iter().all(|byte| *byte == 1));
    }
}
