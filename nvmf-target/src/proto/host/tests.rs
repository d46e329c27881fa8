//! The host's machine against controllers that break the rules. Against an honest one it is tested with the queues.

use super::*;
use crate::proto::tcp::CloseReason;
use crate::wire::Status;
use crate::wire::opcode::nvm;
use crate::wire::pdu::{C2HData, CapsuleResp, FLAG_LAST, FLAG_SUCCESS, FatalError, ICResp, PduType, R2T, TermReq};

fn feed(host: &mut HostQueuePair, bytes: &[u8]) {
    host.receive_slice()[..bytes.len()].copy_from_slice(bytes);
    host.received(bytes.len());
}

fn output(host: &mut HostQueuePair) -> Vec<u8> {
    let mut slices: Vec<IoSlice<'_>> = Vec::new();
    host.gather(&mut slices);
    let bytes = slices.concat_bytes();
    host.sent(bytes.len());
    bytes
}

trait ConcatBytes {
    fn concat_bytes(&self) -> Vec<u8>;
}

impl ConcatBytes for Vec<IoSlice<'_>> {
    fn concat_bytes(&self) -> Vec<u8> {
        self.iter().flat_map(|slice| slice.iter().copied()).collect()
    }
}

/// A connected host with a Read of 4 KiB (id 0), a Write of 64 KiB (id 1) and a Flush (id 2) outstanding.
fn busy_host() -> HostQueuePair {
    let mut host = HostQueuePair::new(HostConfig::default());
    assert!(matches!(host.submit(Sqe::new(nvm::FLUSH), HostData::None, 0), Err(SubmitError::NotReady(_))));
    output(&mut host);
    let common = CommonHeader::bare(PduType::ICResp);
    feed(&mut host, &ICResp { common, pfv: 0, cpda: 0, dgst: 0, maxh2cdata: 8192 }.encode());
    assert!(host.is_ready());
    let data = [
        (nvm::READ, HostData::FromController(IoBuf::heap(4096))),
        (nvm::WRITE, HostData::ToController(IoBuf::copy_of(&[5; 64 << 10]))),
        (nvm::FLUSH, HostData::None),
    ];
    for (context, (opcode, data)) in data.into_iter().enumerate() {
        let cid = host.submit(Sqe::new(opcode), data, 100 + context as u64).unwrap();
        assert_eq!(usize::from(cid.0), context);
    }
    output(&mut host);
    host
}

fn c2h(cid: u16, flags: u8, datao: u32, datal: u32) -> Vec<u8> {
    let common = CommonHeader { flags, pdo: 24, plen: 24 + datal, ..CommonHeader::bare(PduType::C2HData) };
    let mut bytes = C2HData { common, cccid: CommandId(cid), datao, datal }.encode().to_vec();
    bytes.resize(24 + datal as usize, 9);
    bytes
}

fn r2t(cid: u16, r2to: u32, r2tl: u32) -> Vec<u8> {
    let common = CommonHeader::bare(PduType::R2T);
    R2T { common, cccid: CommandId(cid), ttag: 77, r2to, r2tl }.encode().to_vec()
}

fn response(cid: u16, status: Status) -> Vec<u8> {
    let common = CommonHeader::bare(PduType::CapsuleResp);
    CapsuleResp { common, cqe: Cqe::of(CommandId(cid), status) }.encode().to_vec()
}

#[test]
fn commands_complete_in_any_order_with_their_buffers() {
    let mut host = busy_host();
    feed(&mut host, &response(2, Status::SUCCESS));
    feed(&mut host, &r2t(1, 0, 64 << 10));
    // MAXH2CDATA is 8192: eight PDUs, the last of which says so.
    let sent = output(&mut host);
    assert_eq!(sent.len(), 8 * (24 + 8192));
    for (index, pdu) in sent.chunks(24 + 8192).enumerate() {
        assert_eq!((pdu[0], pdu[1]), (6, if index == 7 { FLAG_LAST } else { 0 }));
        assert_eq!(u32::from_le_bytes([pdu[12], pdu[13], pdu[14], pdu[15]]) as usize, index * 8192);
    }
    feed(&mut host, &response(1, Status::SUCCESS));
    feed(&mut host, &c2h(0, FLAG_LAST | FLAG_SUCCESS, 0, 4096));
    let done: Vec<_> = std::iter::from_fn(|| host.poll_completion()).collect();
    assert_eq!(done.iter().map(|c| c.context).collect::<Vec<_>>(), [102, 101, 100]);
    assert!(done[2].by_success_flag && done[2].received_bytes == 4096);
    assert!(done[2].buffer.as_ref().is_some_and(|b| b.iter().all(|b| *b == 9)));
    assert!(done[1].buffer.as_ref().is_some_and(|b| b.len() == 64 << 10));
    assert_eq!(host.outstanding(), 0);
}

/// A write answered while its data still waits to be sent keeps its buffer until then.
#[test]
fn an_early_answer_waits_for_the_buffer() {
    let mut host = busy_host();
    feed(&mut host, &r2t(1, 0, 64 << 10));
    feed(&mut host, &response(1, Status::INTERNAL_ERROR));
    assert!(host.poll_completion().is_none());
    host.sent(100);
    assert!(host.poll_completion().is_none());
    output(&mut host);
    let done = host.poll_completion().unwrap();
    assert_eq!((done.context, done.cqe.status), (101, Status::INTERNAL_ERROR));
    assert!(done.buffer.is_some());
}

#[test]
fn controllers_that_break_the_rules_get_a_term_req() {
    const FIELD: FatalError = FatalError::InvalidHeaderField;
    const RANGE: FatalError = FatalError::DataOutOfRange;
    let cases: [(&str, Vec<u8>, FatalError, u32); 13] = [
        ("an answer to nothing", response(3, Status::SUCCESS), FIELD, 20),
        ("an id out of range", response(60_000, Status::SUCCESS), FIELD, 20),
        ("data for nothing", c2h(9, FLAG_LAST, 0, 512), FIELD, 8),
        ("data for a write", c2h(1, FLAG_LAST, 0, 512), FIELD, 8),
        ("data for a flush", c2h(2, FLAG_LAST, 0, 512), FIELD, 8),
        ("a gap", c2h(0, 0, 512, 512), RANGE, 0),
        ("over the buffer", c2h(0, 0, 0, 4100), RANGE, 0),
        ("after the last", [c2h(0, FLAG_LAST, 0, 512), c2h(0, 0, 512, 512)].concat(), FatalError::SequenceError, 0),
        ("R2T for a read", r2t(0, 0, 512), FIELD, 8),
        ("R2T over the buffer", r2t(1, 0, (64 << 10) + 1), RANGE, 0),
        ("R2T far over", r2t(1, 0, u32::MAX), RANGE, 0),
        ("R2T twice", [r2t(1, 0, 4096), r2t(1, 0, 4096)].concat(), RANGE, 0),
        ("a second ICResp", vec![1, 0, 128, 0, 128, 0, 0, 0], FatalError::SequenceError, 0),
    ];
    for (name, bytes, error, info) in cases {
        let mut host = busy_host();
        feed(&mut host, &bytes);
        assert_eq!(host.poll_close(), None, "{name}: first it says so");
        let sent = output(&mut host);
        let at = sent.iter().rposition(|_| true).map_or(0, |_| sent.len() - 24 - sent_header_bytes(&bytes));
        let request = TermReq::decode(&sent[at..]).unwrap();
        assert_eq!((request.common.pdu_type, request.fes, request.fei), (2, error as u16, info), "{name}");
        assert_eq!(host.poll_close(), Some(CloseReason::ProtocolError { error, info }), "{name}");
        assert_eq!(host.take_abandoned().len(), 3, "{name}");
        assert!(matches!(host.submit(Sqe::new(nvm::FLUSH), HostData::None, 0), Err(SubmitError::Closed(_))));
    }
}

/// What the TermReq repeats: the whole header, or where that can't be told its first 8 bytes.
fn sent_header_bytes(bytes: &[u8]) -> usize {
    if bytes.len() == 8 { 8 } else { 24 }
}

#[test]
fn the_queue_is_full_at_its_size_and_ids_are_not_reused_at_once() {
    let mut host = busy_host();
    host.configure(4, 4096);
    let fourth = host.submit(Sqe::new(nvm::FLUSH), HostData::None, 4).unwrap();
    assert!(matches!(host.submit(Sqe::new(nvm::FLUSH), HostData::None, 5), Err(SubmitError::QueueFull(_))));
    feed(&mut host, &response(fourth.0, Status::SUCCESS));
    let fifth = host.submit(Sqe::new(nvm::FLUSH), HostData::None, 5).unwrap();
    assert_ne!(fourth, fifth);
}

#[test]
fn what_is_abandoned_comes_back() {
    let mut host = busy_host();
    feed(&mut host, &r2t(1, 0, 64 << 10));
    host.peer_closed();
    assert_eq!(host.poll_close(), Some(CloseReason::PeerClosed));
    let mut abandoned = host.take_abandoned();
    abandoned.sort_by_key(|(context, _)| *context);
    let lengths: Vec<_> = abandoned.iter().map(|(context, b)| (*context, b.as_ref().map(|b| b.len()))).collect();
    assert_eq!(lengths, [(100, Some(4096)), (101, Some(64 << 10)), (102, None)]);
}
