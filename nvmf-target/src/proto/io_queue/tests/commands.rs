//! What each command does, and what is refused.

use super::*;
use crate::proto::controller_shared::{ControllerLimits, Namespace, NamespaceTable};
use crate::proto::sim::MemBackend;

#[test]
fn every_write_way_reads_back() {
    for (in_capsule_bytes, block_bytes) in [(0, 512), (4096, 512), (8192, 4096), (64 << 10, 4096)] {
        let limits = ControllerLimits { in_capsule_bytes, ..ControllerLimits::default() };
        let config = PairConfig { limits, block_bytes, block_count: 4096, ..PairConfig::default() };
        let mut pair = Pair::connected(config);
        let mut random = Random::new(7);
        for lba_count in [1, 2, 8, 17, 128] {
            let data = random.bytes(lba_count * block_bytes as usize);
            assert!(write(&mut pair, 11, &data).cqe.status.is_success());
            assert!(data_of(read(&mut pair, 11, lba_count as u32)) == data);
        }
        assert_eq!(pair.pool.out_bytes(), 0);
    }
}

/// H15: with in-capsule size 0 every write goes by R2T, and a capsule with data is a framing error.
#[test]
fn h15_in_capsule_size_is_what_is_accepted() {
    for in_capsule_bytes in [0u32, 4096, 8192] {
        let limits = ControllerLimits { in_capsule_bytes, ..ControllerLimits::default() };
        let mut host = RawHost::connected(PairConfig { limits, ..PairConfig::default() });
        if in_capsule_bytes > 0 {
            let data = vec![3; in_capsule_bytes as usize];
            let bytes = host.capsule(ranged(nvm::WRITE, 0, in_capsule_bytes / 512), 1, Some(&data));
            assert_eq!(only_status(&host.exchange(&bytes), 1), Status::SUCCESS);
        }
        let data = vec![3; in_capsule_bytes as usize + 512];
        let bytes = host.capsule(ranged(nvm::WRITE, 0, in_capsule_bytes / 512 + 1), 1, Some(&data));
        let replies = host.exchange(&bytes);
        let request = replies[0].term_req().expect("a TermReq");
        assert_eq!((request.fes, request.fei), (1, 4));
    }
}

/// H17: MDTS is accepted, one block more is 00/02h with DNR and no R2T, and the queue lives.
#[test]
fn h17_mdts_is_the_limit_and_is_refused_before_any_r2t() {
    let mut host = RawHost::connected(PairConfig::default());
    let most = (1 << 20) / 512;
    for opcode in [nvm::READ, nvm::WRITE, nvm::COMPARE] {
        let sqe = ranged_transport(opcode, 0, most + 1, 512);
        assert_eq!(status_of_raw(&mut host, sqe, 1), Status::INVALID_FIELD.dnr());
    }
    let sqe = ranged_transport(nvm::WRITE, 0, most, 512);
    let bytes = host.capsule_as_is(with_cid(sqe, 1), None);
    let ttag = host.exchange(&bytes)[0].r2t().expect("asked for").ttag;
    let data = Random::new(5).bytes(1 << 20);
    let bytes = host.h2c(1, ttag, 0, &data, true);
    assert_eq!(only_status(&host.exchange(&bytes), 1), Status::SUCCESS);
    assert!(host.pair.backend.contents()[..1 << 20] == data);
    let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::READ, 0, most, 512), 1), None);
    let back: Vec<u8> = host.exchange(&bytes).iter().flat_map(|r| r.data.clone()).collect();
    assert!(back == data);
}

#[test]
fn field_errors_get_their_status_and_leave_the_queue_alive() {
    let invalid = Status::INVALID_FIELD.dnr();
    let on = |nsid, mut sqe: Sqe| *sqe.set_namespace_id(NamespaceId(nsid));
    let bits = |mut sqe: Sqe, dw12: u32| {
        let now = sqe.dword(12);
        *sqe.set_dword(12, now | dw12)
    };
    let read = ranged_transport(nvm::READ, 0, 1, 512);
    let write = ranged_transport(nvm::WRITE, 0, 1, 512);
    let cases = [
        ("unknown opcode", ranged(0x7d, 0, 1), Status::INVALID_OPCODE.dnr()),
        ("fabrics opcode", ranged(0x7f, 0, 1), Status::INVALID_OPCODE.dnr()),
        ("write uncorrectable", ranged(nvm::WRITE_UNCORRECTABLE, 0, 1), Status::INVALID_OPCODE.dnr()),
        ("namespace 0", on(0, read), Status::INVALID_NAMESPACE.dnr()),
        ("namespace 2", on(2, read), Status::INVALID_NAMESPACE.dnr()),
        ("all namespaces, write", on(u32::MAX, write), Status::INVALID_NAMESPACE.dnr()),
        ("all namespaces, verify", on(u32::MAX, ranged(nvm::VERIFY, 0, 1)), Status::INVALID_NAMESPACE.dnr()),
        ("flush of namespace 0", on(0, ranged(nvm::FLUSH, 0, 1)), Status::INVALID_NAMESPACE.dnr()),
        ("PRACT", bits(read, 1 << 29), invalid),
        ("PRCHK", bits(write, 1 << 26), invalid),
        ("directive", bits(write, 1 << 20), invalid),
        ("past the end", ranged_transport(nvm::READ, 16 << 10, 1, 512), Status::LBA_OUT_OF_RANGE.dnr()),
        ("over the end", ranged_transport(nvm::WRITE, (16 << 10) - 1, 2, 512), Status::LBA_OUT_OF_RANGE.dnr()),
        ("wraps", ranged_transport(nvm::READ, u64::MAX, 2, 512), Status::LBA_OUT_OF_RANGE.dnr()),
        ("verify past the end", ranged(nvm::VERIFY, 16 << 10, 1), Status::LBA_OUT_OF_RANGE.dnr()),
        ("zeroes past the end", ranged(nvm::WRITE_ZEROES, 16 << 10, 1), Status::LBA_OUT_OF_RANGE.dnr()),
    ];
    let mut host = RawHost::connected(PairConfig::default());
    for (name, sqe, status) in cases {
        assert_eq!(status_of_raw(&mut host, sqe, 3), status, "{name}");
    }
    assert!(host.pair.backend.log().is_empty());
    assert_eq!(status_of_raw(&mut host, bits(ranged(nvm::FLUSH, 0, 1), 1 << 31), 3), Status::SUCCESS);
}

#[test]
fn limited_retry_and_fua_bits() {
    let mut pair = Pair::connected(PairConfig::default());
    for (bit, what) in [(31, "write"), (30, "write-fua")] {
        let mut sqe = ranged(nvm::WRITE, 0, 1);
        sqe.set_dword(12, 1 << bit);
        let done = pair.command(sqe, HostData::ToController(IoBuf::heap(512)));
        assert!(done.cqe.status.is_success());
        assert_eq!(pair.backend.log().last(), Some(&what));
    }
}

/// H19 as far as TCP has it: descriptors that lie about kind, length or place.
#[test]
fn sgls_that_lie_get_their_status() {
    let sgl = |address, len_bytes, kind_byte| SglDescriptor { address, len_bytes, kind_byte };
    let cases: [(&str, u8, SglDescriptor, usize, Status); 19] = [
        ("short", nvm::WRITE, sgl(0, 511, 0x5a), 0, Status::SGL_LENGTH_INVALID),
        ("long", nvm::WRITE, sgl(0, 1024, 0x5a), 0, Status::SGL_LENGTH_INVALID),
        ("empty", nvm::WRITE, sgl(0, 0, 0x5a), 0, Status::SGL_LENGTH_INVALID),
        ("huge", nvm::WRITE, sgl(0, u32::MAX, 0x5a), 0, Status::SGL_LENGTH_INVALID),
        ("read short", nvm::READ, sgl(0, 256, 0x5a), 0, Status::SGL_LENGTH_INVALID),
        ("read in capsule", nvm::READ, sgl(0, 512, 0x01), 0, Status::SGL_TYPE_INVALID),
        ("nothing in the capsule", nvm::WRITE, sgl(0, 512, 0x01), 0, Status::SGL_LENGTH_INVALID),
        ("half in the capsule", nvm::WRITE, sgl(0, 512, 0x01), 256, Status::SGL_LENGTH_INVALID),
        ("more in the capsule", nvm::WRITE, sgl(0, 512, 0x01), 1024, Status::SGL_LENGTH_INVALID),
        ("beyond the capsule", nvm::WRITE, sgl(512, 512, 0x01), 512, Status::SGL_OFFSET_INVALID),
        ("far beyond", nvm::WRITE, sgl(u64::MAX, 512, 0x01), 512, Status::SGL_OFFSET_INVALID),
        ("data in both places", nvm::WRITE, sgl(0, 512, 0x5a), 512, Status::SGL_LENGTH_INVALID),
        ("read brings data", nvm::READ, sgl(0, 512, 0x5a), 512, Status::SGL_LENGTH_INVALID),
        ("address", nvm::WRITE, sgl(0, 512, 0x00), 0, Status::SGL_TYPE_INVALID),
        ("bit bucket", nvm::READ, sgl(0, 512, 0x10), 0, Status::SGL_TYPE_INVALID),
        ("keyed", nvm::WRITE, sgl(0, 512, 0x40), 0, Status::SGL_TYPE_INVALID),
        ("segment of odd length", nvm::WRITE, sgl(0, 17, 0x21), 0, Status::INVALID_SGL_SEGMENT),
        ("last segment of 16", nvm::WRITE, sgl(0, 256, 0x31), 256, Status::INVALID_SGL_COUNT),
        ("empty segment", nvm::WRITE, sgl(0, 0, 0x31), 0, Status::INVALID_SGL_SEGMENT),
    ];
    let mut host = RawHost::connected(PairConfig::default());
    for (name, opcode, sgl, capsule_bytes, status) in cases {
        let sqe = with_cid(*ranged(opcode, 0, 1).set_sgl(sgl), 6);
        let data = vec![1; capsule_bytes];
        let bytes = host.capsule_as_is(sqe, (capsule_bytes > 0).then_some(&data));
        assert_eq!(only_status(&host.exchange(&bytes), 6), status.dnr(), "{name}");
    }
    for psdt in [0, 2, 3] {
        let mut sqe = ranged_transport(nvm::READ, 0, 1, 512);
        sqe.set_psdt_bits(psdt);
        assert_eq!(status_of_raw(&mut host, sqe, 6), Status::INVALID_FIELD.dnr(), "PSDT {psdt}");
    }
    assert!(host.pair.backend.log().is_empty());
    assert_eq!(host.pair.pool.out_bytes(), 0);
}

#[test]
fn flush_of_all_namespaces_asks_each_one() {
    let mut pair = Pair::connected(PairConfig::default());
    let second = Arc::new(MemBackend::new(4096, 16));
    let namespace = |nsid, backend| Namespace { nsid: NamespaceId(nsid), backend, write_protected: false };
    let table = NamespaceTable::new([namespace(1, pair.backend.clone() as _), namespace(7, second.clone() as _)]);
    pair.shared.set_namespaces(Arc::new(table));
    let mut sqe = Sqe::new(nvm::FLUSH);
    sqe.set_namespace_id(NamespaceId::ALL);
    assert!(pair.command(sqe, HostData::None).cqe.status.is_success());
    assert_eq!((pair.backend.log(), second.log()), (vec!["flush"], vec!["flush"]));
    pair.shared.set_namespaces(Arc::default());
    assert!(pair.command(sqe, HostData::None).cqe.status.is_success(), "nothing to flush");
    assert_eq!(pair.shared.in_flight(), 0);
}

#[test]
fn compare_says_equal_and_unequal() {
    let mut pair = Pair::connected(PairConfig::default());
    pair.backend.set(512, &[9; 512]);
    for (byte, status) in [(9, Status::SUCCESS), (8, Status::COMPARE_FAILURE.dnr())] {
        let data = HostData::ToController(IoBuf::copy_of(&[byte; 512]));
        assert_eq!(pair.command(ranged(nvm::COMPARE, 1, 1), data).cqe.status, status);
    }
}

/// H66: neighbouring ranges zeroed, with and without DEAC, up to NLB FFFFh.
#[test]
fn h66_write_zeroes_zeroes_all_of_the_range() {
    let mut pair = Pair::connected(PairConfig { block_count: 70_000, ..PairConfig::default() });
    for deac in [0u32, 1 << 25] {
        let random = Random::new(8).bytes(24 * 512);
        pair.backend.set(0, &random);
        for slba in [0, 8, 16] {
            let mut sqe = ranged(nvm::WRITE_ZEROES, slba, 8);
            sqe.set_dword(12, 7 | deac);
            assert!(pair.command(sqe, HostData::None).cqe.status.is_success());
        }
        assert!(data_of(read(&mut pair, 0, 24)).iter().all(|b| *b == 0));
        let what = if deac == 0 { "write-zeroes" } else { "write-zeroes-deallocate" };
        assert_eq!(pair.backend.log().iter().filter(|w| **w == what).count(), 3);
    }
    let sqe = ranged(nvm::WRITE_ZEROES, 100, 65_536);
    assert!(pair.command(sqe, HostData::None).cqe.status.is_success());
    let limits = ControllerLimits { write_zeroes_bytes: Some(1 << 20), ..ControllerLimits::default() };
    let mut pair = Pair::connected(PairConfig { limits, ..PairConfig::default() });
    let over = pair.command(ranged(nvm::WRITE_ZEROES, 0, 2049), HostData::None);
    assert_eq!(over.cqe.status, Status::INVALID_FIELD.dnr());
    let most = pair.command(ranged(nvm::WRITE_ZEROES, 0, 2048), HostData::None);
    assert!(most.cqe.status.is_success());
}

fn dsm(range_count: u32, deallocate: bool) -> Sqe {
    let mut sqe = Sqe::new(nvm::DATASET_MANAGEMENT);
    sqe.set_namespace_id(NamespaceId(1)).set_dword(10, range_count - 1).set_dword(11, u32::from(deallocate) << 2);
    sqe
}

fn dsm_data(ranges: &[(u32, u64)], len_bytes: usize) -> HostData {
    let mut data = IoBuf::heap(len_bytes);
    for (place, (lba_count, slba)) in data.as_chunks_mut::<16>().0.iter_mut().zip(ranges) {
        place[4..8].copy_from_slice(&lba_count.to_le_bytes());
        place[8..].copy_from_slice(&slba.to_le_bytes());
    }
    HostData::ToController(data)
}

/// Linux sends 4096 bytes whatever the number of ranges.
#[test]
fn deallocate_takes_1_to_256_ranges_and_linux_data_length() {
    for in_capsule_bytes in [0, 8192] {
        let limits = ControllerLimits { in_capsule_bytes, ..ControllerLimits::default() };
        let mut pair = Pair::connected(PairConfig { limits, ..PairConfig::default() });
        pair.backend.set(0, &vec![5; 8 << 20]);
        let done = pair.command(dsm(1, true), dsm_data(&[(3, 2)], 4096));
        assert!(done.cqe.status.is_success());
        let ranges: Vec<(u32, u64)> = (0..256).map(|i| (1, 100 + 2 * i)).collect();
        assert!(pair.command(dsm(256, true), dsm_data(&ranges, 4096)).cqe.status.is_success());
        let contents = pair.backend.contents();
        for lba in 0..(16 << 10) {
            let zero = (2..5).contains(&lba) || ((100..612).contains(&lba) && lba % 2 == 0);
            let want = if zero { 0 } else { 5 };
            assert!(contents[lba * 512..][..512].iter().all(|b| *b == want), "block {lba}");
        }
    }
}

#[test]
fn deallocate_refuses_what_it_must_and_ignores_hints() {
    let mut pair = Pair::connected(PairConfig::default());
    pair.backend.set(0, &[5; 4096]);
    let out_of_range = Status::LBA_OUT_OF_RANGE.dnr();
    for ranges in [[(1, 0), (1, 16 << 10)], [(1, 0), (u32::MAX, 0)], [(1, 0), (2, u64::MAX)], [(0, 1 << 50), (1, 0)]] {
        assert_eq!(pair.command(dsm(2, true), dsm_data(&ranges, 32)).cqe.status, out_of_range);
    }
    let short = pair.command(dsm(2, true), dsm_data(&[(1, 0)], 16)).cqe.status;
    assert_eq!(short, Status::SGL_LENGTH_INVALID.dnr());
    let long = pair.command(dsm(2, true), dsm_data(&[(1, 0)], 8192)).cqe.status;
    assert_eq!(long, Status::SGL_LENGTH_INVALID.dnr());
    assert!(pair.command(dsm(1, false), dsm_data(&[(8, 0)], 16)).cqe.status.is_success());
    assert!(pair.command(dsm(2, true), dsm_data(&[(0, 0), (0, 5)], 32)).cqe.status.is_success());
    assert!(pair.backend.log().is_empty(), "nothing was deallocated");
    assert_eq!((pair.pool.out_bytes(), pair.shared.in_flight()), (0, 0));
}

#[test]
fn write_protected_namespaces_refuse_what_changes_them() {
    let mut pair = Pair::connected(PairConfig::default());
    let backend = pair.backend.clone() as _;
    let table = NamespaceTable::new([Namespace { nsid: NamespaceId(1), backend, write_protected: true }]);
    pair.shared.set_namespaces(Arc::new(table));
    let refused = Status::NAMESPACE_WRITE_PROTECTED.dnr();
    assert_eq!(write(&mut pair, 0, &[1; 512]).cqe.status, refused);
    assert_eq!(pair.command(ranged(nvm::WRITE_ZEROES, 0, 1), HostData::None).cqe.status, refused);
    assert_eq!(pair.command(dsm(1, true), dsm_data(&[(1, 0)], 16)).cqe.status, refused);
    data_of(read(&mut pair, 0, 1));
    assert!(pair.command(ranged(nvm::VERIFY, 0, 8), HostData::None).cqe.status.is_success());
}

/// More commands than the pool has room for: all wait, none holds anything, all complete in order.
#[test]
fn commands_wait_for_the_pool_first_come_first_served() {
    let mut host = RawHost::connected(PairConfig { pool_bytes: 8192, ..PairConfig::default() });
    host.pair.hold_replies = true;
    let mut asked = Vec::new();
    for cid in 0..12 {
        let read = host.capsule_as_is(with_cid(ranged_transport(nvm::READ, 0, 8, 512), cid), None);
        assert!(host.exchange(&read).is_empty());
        // In-capsule data must not overtake those that wait.
        let write = host.capsule(ranged(nvm::WRITE, 100 + u64::from(cid), 1), 100 + cid, Some(&[cid as u8; 512]));
        assert!(host.exchange(&write).is_empty());
        asked.extend([cid, 100 + cid]);
    }
    assert_eq!((host.pair.pool.out_bytes(), host.pair.replies.len()), (8192, 2));
    let mut order = Vec::new();
    while host.pair.answer_oldest() {
        order.extend(host.receive().iter().filter_map(|r| r.completion()).map(|c| c.cqe.cid.0));
        assert!(host.pair.pool.out_bytes() <= 8192);
    }
    assert_eq!(order, asked);
    for cid in 0..12 {
        assert_eq!(host.pair.backend.contents()[(100 + cid) * 512], cid as u8);
    }
}

/// The line may be gone before the pool that serves it is there.
#[test]
fn commands_that_arrive_before_the_pool_is_attached_are_done_after_it() {
    let mut host = RawHost::fresh(PairConfig::default());
    host.exchange(&host.ic_req());
    let connect = host.capsule(crate::proto::sim::connect_sqe(), 9, Some(&[0; 1024]));
    host.exchange(&connect);
    // `Pair` attaches at once; a second queue of the same shape does not.
    let shared = Arc::clone(&host.pair.shared);
    let queue_shared = Arc::new(QueueShared::new(QueueId(2), 8));
    let pool: Arc<dyn BufferPool> = Arc::clone(&host.pair.pool) as _;
    let now = host.pair.now;
    let mut tcp = TcpQueuePair::new(TcpConfig::default(), Arc::clone(&pool));
    feed(&mut tcp, &host.ic_req(), now);
    feed(&mut tcp, &connect, now);
    let Some(TcpEvent::Command { slot, .. }) = tcp.poll_event() else { panic!("a Connect") };
    tcp.establish(crate::proto::tcp::QueueParams {
        entries: 8,
        sq_flow_control: true,
        in_capsule_bytes: 8192,
        staging_bytes: 4096,
    });
    tcp.respond(slot, Cqe::of(CommandId(9), Status::SUCCESS), now);
    let mut queue = IoQueuePair::new(tcp, shared, queue_shared);
    let bytes = host.capsule(ranged(nvm::WRITE, 0, 1), 3, Some(&[4; 512]));
    let into = queue.receive_slice();
    into[..bytes.len()].copy_from_slice(&bytes);
    queue.received(bytes.len(), now);
    assert!(queue.poll_command(now).is_none());
    queue.attach(pool, Waker::noop().clone(), now);
    let command = queue.poll_command(now).expect("it waited");
    let Operation::Write { buffer, .. } = command.operation else { panic!("a write") };
    assert!(buffer.iter().all(|b| *b == 4) && buffer.len() == 512);
}

fn feed(tcp: &mut TcpQueuePair, bytes: &[u8], now: Instant) {
    tcp.receive_slice()[..bytes.len()].copy_from_slice(bytes);
    tcp.received(bytes.len(), now);
}
