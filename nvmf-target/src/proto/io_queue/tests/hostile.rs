//! Peers that break the rules: the right answer, bounded memory, and an end that disturbs nobody.

use super::*;
use crate::wire::pdu::{CommonHeader, FatalError, PduType, TermReq};

/// Sends bytes and expects the TermReq that names the fault, repeats the header and ends the connection.
#[track_caller]
fn expect_term_req(host: &mut RawHost, name: &str, bytes: &[u8], error: FatalError, info: u32) {
    let replies = host.exchange(bytes);
    let Some(last) = replies.last() else { panic!("{name}: no answer ({:?})", host.pair.closed()) };
    let request = last.term_req().unwrap_or_else(|| panic!("{name}: a TermReq, not {last:?}"));
    assert_eq!((request.fes, request.fei), (error as u16, info), "{name}");
    assert_eq!(request.common.pdu_type, PduType::C2HTermReq as u8, "{name}");
    assert!(!last.data.is_empty() && last.data.len() <= 128, "{name}");
    assert_eq!(host.pair.closed(), Some(CloseReason::ProtocolError { error, info }), "{name}");
    assert_eq!(host.pair.pool.out_bytes(), 0, "{name}: nothing is kept for a dead connection");
    assert!(host.exchange(&[0; 1000]).is_empty(), "{name}: nothing is said after it");
}

fn patched(mut bytes: Vec<u8>, patches: &[(usize, &[u8])]) -> Vec<u8> {
    for (at, with) in patches {
        bytes[*at..*at + with.len()].copy_from_slice(with);
    }
    bytes
}

/// H01: lengths and offsets that no PDU of the type has, with both digests on.
#[test]
fn h01_headers_that_lie_get_the_field_that_is_wrong() {
    const FIELD: FatalError = FatalError::InvalidHeaderField;
    let le = u32::to_le_bytes;
    let cases: [(&str, usize, &[u8], FatalError, u32); 17] = [
        ("type 08h", 0, &[0x08], FIELD, 0),
        ("type FFh", 0, &[0xff], FIELD, 0),
        ("a controller's type", 0, &[0x05], FIELD, 0),
        ("R2T from a host", 0, &[0x09], FIELD, 0),
        ("second ICReq", 0, &[0x00], FatalError::SequenceError, 0),
        ("hlen 255", 2, &[255], FIELD, 2),
        ("hlen 0", 2, &[0], FIELD, 2),
        ("hlen 7", 2, &[7], FIELD, 2),
        ("hlen 71", 2, &[71], FIELD, 2),
        ("hlen 73", 2, &[73], FIELD, 2),
        ("plen 7", 4, &le(7), FIELD, 4),
        ("plen hlen-1", 4, &le(71), FIELD, 4),
        ("plen without digest", 4, &le(72), FIELD, 4),
        ("pdo 3", 3, &[3], FIELD, 3),
        ("pdo past plen", 3, &[200], FIELD, 3),
        ("no header digest", 1, &[0], FIELD, 1),
        // The flag says that data has a digest, the length that there is data, the offset none.
        ("plen huge", 4, &le(u32::MAX), FIELD, 1),
    ];
    for (name, at, with, error, info) in cases {
        let mut host = RawHost::with_digests(PairConfig::default(), true, true);
        let capsule = host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), 1), None);
        expect_term_req(&mut host, name, &patched(capsule, &[(at, with)]), error, info);
    }
    let mut host = RawHost::connected(PairConfig::default());
    let capsule = host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), 1), None);
    let huge = patched(capsule, &[(3, &[72]), (4, &le(u32::MAX))]);
    expect_term_req(&mut host, "plen FFFFFFFFh", &huge, FIELD, 4);
    let mut host = RawHost::connected(PairConfig::default());
    let capsule = host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), 1), None);
    expect_term_req(&mut host, "a digest that wasn't agreed on", &patched(capsule, &[(1, &[1])]), FIELD, 1);
}

#[test]
fn h01_connection_requests_that_lie() {
    const FIELD: FatalError = FatalError::InvalidHeaderField;
    let cases: [(&str, usize, &[u8], FatalError, u32); 7] = [
        ("pfv 1", 8, &[1], FatalError::UnsupportedParameter, 8),
        ("hpda 32", 10, &[32], FIELD, 10),
        ("plen 127", 4, &[127], FIELD, 4),
        ("plen 129", 4, &[129], FIELD, 4),
        ("hlen 24", 2, &[24], FIELD, 2),
        ("ICResp", 0, &[1], FIELD, 0),
        ("a capsule first", 0, &[4], FatalError::SequenceError, 0),
    ];
    for (name, at, with, error, info) in cases {
        let mut host = RawHost::fresh(PairConfig::default());
        let request = host.ic_req();
        expect_term_req(&mut host, name, &patched(request, &[(at, with)]), error, info);
    }
    // As much as can be asked for is no fault.
    let mut host = RawHost::fresh(PairConfig::default());
    let request = patched(host.ic_req(), &[(10, &[31]), (11, &[0xff]), (12, &[0xff; 4])]);
    assert_eq!(host.exchange(&request).len(), 1);
}

#[test]
fn a_header_digest_that_is_wrong_ends_the_connection() {
    let mut host = RawHost::with_digests(PairConfig::default(), true, false);
    let mut capsule = host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), 1), None);
    capsule[72] ^= 1;
    let came = u32::from_le_bytes([capsule[72], capsule[73], capsule[74], capsule[75]]);
    expect_term_req(&mut host, "header digest", &capsule, FatalError::HeaderDigest, came);
    assert!(host.pair.backend.log().is_empty());
}

/// Data digest errors fail the command alone: 00/22h, to be retried.
#[test]
fn a_data_digest_that_is_wrong_fails_the_command_alone() {
    let mut host = RawHost::with_digests(PairConfig::default(), true, true);
    let mut capsule = host.capsule(ranged(nvm::WRITE, 0, 1), 1, Some(&[7; 512]));
    let end = capsule.len() - 1;
    capsule[end] ^= 0x80;
    assert_eq!(only_status(&host.exchange(&capsule), 1), Status::TRANSIENT_TRANSPORT_ERROR);
    let sqe = ranged_transport(nvm::WRITE, 0, 64, 512);
    let bytes = host.capsule_as_is(with_cid(sqe, 2), None);
    let ttag = host.exchange(&bytes)[0].r2t().expect("asked").ttag;
    // The first of two PDUs is damaged; the second is still taken.
    let mut first = host.h2c(2, ttag, 0, &[7; 16 << 10], false);
    first[100] ^= 1;
    assert!(host.exchange(&first).is_empty());
    let second = host.h2c(2, ttag, 16 << 10, &[7; 16 << 10], true);
    assert_eq!(only_status(&host.exchange(&second), 2), Status::TRANSIENT_TRANSPORT_ERROR);
    assert!(host.pair.backend.log().is_empty());
    assert_eq!(status_of_raw(&mut host, ranged(nvm::FLUSH, 0, 1), 3), Status::SUCCESS);
    assert_eq!(host.pair.pool.out_bytes(), 0);
}

/// H04: data for tags that ask for none.
#[test]
fn h04_data_that_nobody_asked_for_ends_the_connection() {
    const FIELD: FatalError = FatalError::InvalidHeaderField;
    for ttag in [0, 0xffff] {
        let mut host = RawHost::connected(PairConfig::default());
        let data = host.h2c(0, ttag, 0, &[1; 4096], true);
        expect_term_req(&mut host, "before any command", &data, FIELD, 10);
    }
    let mut host = RawHost::connected(PairConfig::default());
    host.pair.hold_replies = true;
    let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::READ, 0, 8, 512), 0), None);
    host.exchange(&bytes);
    let data = host.h2c(0, 0, 0, &[1; 4096], true);
    let replies = host.exchange(&data);
    assert_eq!(replies[0].term_req().map(|t| (t.fes, t.fei)), Some((1, 10)), "for a read in flight");
    assert_eq!(host.pair.shared.in_flight(), 1);
    assert!(host.pair.answer_one());
    assert_eq!((host.pair.shared.in_flight(), host.pair.pool.out_bytes()), (0, 0));

    let mut host = RawHost::connected(PairConfig::default());
    let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::WRITE, 0, 8, 512), 0), None);
    let ttag = host.exchange(&bytes)[0].r2t().expect("asked").ttag;
    let data = host.h2c(0, ttag, 0, &[1; 4096], true);
    assert_eq!(only_status(&host.exchange(&data), 0), Status::SUCCESS);
    expect_term_req(&mut host, "for a write already completed", &data, FIELD, 10);
}

/// What H2CData may not say about data that was asked for.
#[test]
fn h04_data_outside_of_what_was_asked_for() {
    type Make = fn(&RawHost, u16) -> Vec<u8>;
    const FIELD: FatalError = FatalError::InvalidHeaderField;
    const RANGE: FatalError = FatalError::DataOutOfRange;
    let cases: [(&str, Make, FatalError, u32); 9] = [
        ("another command's id", |h, t| h.h2c(6, t, 0, &[1; 4096], true), FIELD, 8),
        ("another tag", |h, t| h.h2c(5, t + 1, 0, &[1; 4096], true), FIELD, 10),
        ("a gap", |h, t| h.h2c(5, t, 4, &[1; 4092], true), RANGE, 0),
        ("beyond", |h, t| h.h2c(5, t, 0, &[1; 4100], true), RANGE, 0),
        ("far beyond", |h, t| h.h2c(5, t, u32::MAX, &[1; 8], true), RANGE, 0),
        ("last too early", |h, t| h.h2c(5, t, 0, &[1; 2048], true), FIELD, 1),
        ("no data", |h, t| patched(h.h2c(5, t, 0, &[], true), &[(3, &[24])]), FIELD, 4),
        ("datal", |h, t| patched(h.h2c(5, t, 0, &[1; 4096], true), &[(16, &[0, 8])]), FIELD, 16),
        ("over MAXH2CDATA", |h, t| h.h2c(5, t, 0, &[1; (1 << 20) + 4], true), FatalError::LimitExceeded, 0),
    ];
    for (name, make, error, info) in cases {
        let mut host = RawHost::connected(PairConfig::default());
        let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::WRITE, 0, 8, 512), 5), None);
        let ttag = host.exchange(&bytes)[0].r2t().expect("asked").ttag;
        let data = make(&host, ttag);
        expect_term_req(&mut host, name, &data, error, info);
        assert!(host.pair.backend.log().is_empty(), "{name}");
    }
}

/// The same part sent twice.
#[test]
fn h04_data_that_overlaps_what_has_come() {
    let mut host = RawHost::connected(PairConfig::default());
    let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::WRITE, 0, 8, 512), 5), None);
    let ttag = host.exchange(&bytes)[0].r2t().expect("asked").ttag;
    let part = host.h2c(5, ttag, 0, &[1; 2048], false);
    assert!(host.exchange(&part).is_empty());
    expect_term_req(&mut host, "again", &part, FatalError::DataOutOfRange, 0);
}

/// MAXR2T: never more outstanding for one command than the host allows, and in all no byte asked for twice.
#[test]
fn r2ts_keep_the_hosts_limit() {
    for (maxr2t, at_once) in [(0u32, 1), (1, 2), (2, 3), (100, 4), (u32::MAX, 4)] {
        let mut config = PairConfig::default();
        config.tcp.max_r2t_bytes = 4096;
        let mut host = RawHost::fresh(config);
        let request = patched(host.ic_req(), &[(12, &maxr2t.to_le_bytes())]);
        host.exchange(&request);
        let connect = host.capsule(crate::proto::sim::connect_sqe(), 9, Some(&[0; 1024]));
        host.exchange(&connect);
        let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::WRITE, 0, 80, 512), 5), None);
        let mut open: Vec<_> = host.exchange(&bytes).iter().filter_map(|r| r.r2t().cloned()).collect();
        let data = Random::new(1).bytes(40_960);
        let mut asked = 0;
        loop {
            assert!(open.len() <= at_once, "{} outstanding where {at_once} are allowed", open.len());
            // The newest first: parts may be answered in any order.
            let Some(r2t) = open.pop() else { break };
            asked += r2t.r2tl;
            let part = &data[r2t.r2to as usize..][..r2t.r2tl as usize];
            let bytes = host.h2c(5, r2t.ttag, r2t.r2to, part, true);
            open.extend(host.exchange(&bytes).iter().filter_map(|r| r.r2t().cloned()));
        }
        assert_eq!(asked as usize, data.len());
        assert!(host.pair.backend.contents()[..data.len()] == data);
    }
}

/// H21: as many as the queue has entries are always fine; one more is a fault of the host.
#[test]
fn h21_the_queue_is_as_deep_as_it_says() {
    let mut host = RawHost::connected(PairConfig { entries: 32, ..PairConfig::default() });
    host.pair.hold_replies = true;
    let flush = |host: &RawHost, cid| host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), cid), None);
    let all: Vec<u8> = (0..32).flat_map(|cid| flush(&host, cid)).collect();
    assert!(host.exchange(&all).is_empty());
    assert_eq!(host.pair.closed(), None);
    // One answered: its id and place are free at the first byte of the answer.
    assert!(host.pair.answer_one());
    let freed = host.receive()[0].completion().expect("one answer").cqe.cid.0;
    let again = flush(&host, freed);
    assert!(host.exchange(&again).is_empty());
    assert_eq!(host.pair.closed(), None);
    let one_more = flush(&host, 1000);
    let replies = host.exchange(&one_more);
    assert_eq!(replies[0].term_req().map(|t| t.fes), Some(2));
    assert_eq!(host.pair.shared.in_flight(), 32);
    while host.pair.answer_one() {}
    assert_eq!(host.pair.shared.in_flight(), 0);
}

#[test]
fn h21_a_live_command_id_is_a_conflict_and_leaves_the_first_alone() {
    let mut host = RawHost::connected(PairConfig::default());
    host.pair.hold_replies = true;
    let flush = host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), 4), None);
    assert!(host.exchange(&flush).is_empty());
    let conflict = Status::COMMAND_ID_CONFLICT.dnr();
    assert_eq!(only_status(&host.exchange(&flush), 4), conflict);
    let with_data = host.capsule(ranged(nvm::WRITE, 0, 16), 4, Some(&[1; 8192]));
    assert_eq!(only_status(&host.exchange(&with_data), 4), conflict);
    assert!(host.pair.answer_one());
    assert_eq!(only_status(&host.receive(), 4), Status::SUCCESS);
    assert_eq!(host.pair.backend.log(), ["flush"]);
}

#[test]
fn sqhd_counts_commands_modulo_the_queue() {
    let mut host = RawHost::connected(PairConfig { entries: 5, ..PairConfig::default() });
    // Connect was the first entry.
    for n in 2..30u16 {
        let bytes = host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), n), None);
        assert_eq!(host.exchange(&bytes)[0].completion().expect("answered").cqe.sqhd, n % 5);
    }
}

#[test]
fn a_second_command_before_connect_is_answered_is_a_sequence_error() {
    let mut host = RawHost::fresh(PairConfig::default());
    let ic_req = host.ic_req();
    host.exchange(&ic_req);
    let connect = host.capsule(crate::proto::sim::connect_sqe(), 9, Some(&[0; 1024]));
    let flush = host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), 1), None);
    let replies = host.exchange(&[connect, flush].concat());
    assert_eq!(replies.last().and_then(|r| r.term_req()).map(|t| t.fes), Some(2));
}

#[test]
fn a_hosts_term_req_ends_the_connection_without_an_answer() {
    for data_bytes in [0u32, 8, 128] {
        let mut host = RawHost::connected(PairConfig::default());
        let mut common = CommonHeader::bare(PduType::H2CTermReq);
        common.plen += data_bytes;
        let mut bytes = TermReq { common, fes: 3, fei: 9 }.encode().to_vec();
        bytes.resize(24 + data_bytes as usize, 0);
        assert!(host.exchange(&bytes).is_empty());
        assert_eq!(host.pair.closed(), Some(CloseReason::PeerTerminated { fes: 3, fei: 9 }));
    }
    for plen in [23u32, 153, u32::MAX] {
        let mut host = RawHost::connected(PairConfig::default());
        let common = CommonHeader { plen, ..CommonHeader::bare(PduType::H2CTermReq) };
        let bytes = TermReq { common, fes: 3, fei: 9 }.encode();
        expect_term_req(&mut host, "plen of a TermReq", &bytes, FatalError::InvalidHeaderField, 4);
    }
}

/// Every prefix of every PDU that a host sends, followed by the end of the stream: nothing happens, nothing is kept.
#[test]
fn truncated_pdus_do_nothing_and_keep_nothing() {
    let make: [fn(&mut RawHost) -> Vec<u8>; 3] = [
        |h| h.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), 1), None),
        |h| h.capsule(ranged(nvm::WRITE, 0, 1), 1, Some(&[1; 512])),
        |h| {
            let bytes = h.capsule_as_is(with_cid(ranged_transport(nvm::WRITE, 0, 1, 512), 2), None);
            let ttag = h.exchange(&bytes)[0].r2t().expect("asked").ttag;
            h.h2c(2, ttag, 0, &[1; 512], true)
        },
    ];
    for make in make {
        for len in (0..80).chain((80..600).step_by(37)) {
            let mut host = RawHost::with_digests(PairConfig::default(), true, true);
            let bytes = make(&mut host);
            let len = len.min(bytes.len() - 1);
            assert!(host.exchange(&bytes[..len]).is_empty());
            assert!(host.pair.backend.log().is_empty());
            host.pair.queue().expect("connected").peer_closed();
            assert_eq!(host.pair.pool.out_bytes(), 0);
            assert_eq!(host.pair.closed(), Some(CloseReason::PeerClosed));
        }
    }
}

/// A TermReq behind output that nobody reads doesn't keep the connection for ever.
#[test]
fn a_term_req_that_can_not_leave_is_given_up() {
    let mut host = RawHost::connected(PairConfig::default());
    let now = host.pair.now;
    let queue = host.pair.queue().expect("connected");
    queue.receive_slice()[..8].copy_from_slice(&[0xff; 8]);
    queue.received(8, now);
    assert_eq!(queue.poll_close(), None, "it waits to be sent");
    let deadline = queue.next_deadline().expect("not for ever");
    queue.tick(deadline);
    assert!(matches!(queue.poll_close(), Some(CloseReason::ProtocolError { .. })));
}
