//! The stream cut and joined anywhere, with and without digests, padding, flow control and many R2Ts.

use super::*;
use crate::proto::controller_shared::ControllerLimits;

fn config(seed: u64) -> PairConfig {
    let mut random = Random::new(seed);
    let mut pick = |of: &[usize]| of[random.below(of.len())];
    let in_capsule_bytes = pick(&[0, 512, 4096, 8192]) as u32;
    PairConfig {
        seed,
        piece_max_bytes: pick(&[1, 7, 100, 5000, 70_000, 0]),
        tcp: TcpConfig {
            cpda: pick(&[0, 0, 7, 31]) as u8,
            max_h2c_data_bytes: pick(&[4096, 8192, 128 << 10]) as u32,
            max_r2t_bytes: pick(&[4096, 6000 & !3, 1 << 20]) as u32,
            max_c2h_data_bytes: pick(&[4096, 10_000, 1 << 20]) as u32,
            ..TcpConfig::default()
        },
        limits: ControllerLimits { in_capsule_bytes, ..ControllerLimits::default() },
        host: HostConfig {
            header_digest: pick(&[0, 1]) == 1,
            data_digest: pick(&[0, 1]) == 1,
            hpda: pick(&[0, 7, 31]) as u8,
            maxr2t: pick(&[0, 1, 15]) as u32,
            in_capsule_bytes: 1024,
            staging_bytes: pick(&[1024, 16 << 10, 256 << 10]),
            ..HostConfig::default()
        },
        entries: pick(&[2, 8, 32]) as u16,
        sq_flow_control: pick(&[0, 1]) == 1,
        // Little enough that commands wait for it.
        pool_bytes: pick(&[256 << 10, 8 << 20]),
        block_bytes: 512,
        block_count: 4096,
    }
}

fn small_piece(config: &PairConfig) -> bool {
    (1..100).contains(&config.piece_max_bytes)
}

/// Random reads and writes of many at a time against a model; every byte compared. H07: whatever the cuts, every
/// command completes.
#[test]
fn h07_h11_h14_random_io_over_a_stream_cut_anywhere_is_right() {
    for seed in 0..60 {
        let config = config(seed);
        let rounds = if small_piece(&config) { 4 } else { 30 };
        let mut pair = Pair::connected(config.clone());
        let mut random = Random::new(seed ^ 0xabcd);
        let mut model = vec![0u8; 4096 * 512];
        for _ in 0..rounds {
            batch(&mut pair, &mut random, &mut model, &config);
        }
        assert!(pair.backend.contents() == model, "seed {seed}");
        assert_eq!(pair.pool.out_bytes(), 0, "seed {seed}");
        assert_eq!(pair.closed(), None, "seed {seed}");
    }
}

/// Up to a queue full of commands on disjoint ranges, so that their order doesn't matter.
fn batch(pair: &mut Pair, random: &mut Random, model: &mut [u8], config: &PairConfig) {
    let count = 1 + random.below(usize::from(config.entries));
    let longest = if small_piece(config) { 24 } else { 128 };
    let mut reads = Vec::new();
    for index in 0..count {
        // 4096 blocks over at most 32 commands: 128 blocks each.
        let lba_count = 1 + random.below(longest) as u32;
        let slba = index as u64 * 128;
        let span = slba as usize * 512..(slba as usize + lba_count as usize) * 512;
        if random.below(2) == 0 {
            let data = random.bytes(span.len());
            let sqe = ranged(nvm::WRITE, slba, lba_count);
            pair.submit(sqe, HostData::ToController(IoBuf::copy_of(&data)), index as u64);
            model[span].copy_from_slice(&data);
        } else {
            let sqe = ranged(nvm::READ, slba, lba_count);
            pair.submit(sqe, HostData::FromController(IoBuf::heap(span.len())), index as u64);
            reads.push((index as u64, span));
        }
    }
    pair.run();
    for _ in 0..count {
        let done = pair.host.poll_completion().unwrap_or_else(|| panic!("a command hangs: {:?}", pair.closed()));
        let read = reads.iter().find(|(context, _)| *context == done.context);
        match read {
            Some((_, span)) => assert!(data_of(done) == model[span.clone()], "wrong bytes read"),
            None => assert!(done.cqe.status.is_success(), "{}", done.cqe.status),
        }
    }
    assert_eq!(pair.host.outstanding(), 0);
}

/// H10: SUCCESS only on the last C2HData, only without SQ flow control, and then no CapsuleResp.
#[test]
fn h10_success_flag_obeys_the_hosts_cattr() {
    for sq_flow_control in [true, false] {
        let mut pair = Pair::connected(PairConfig { sq_flow_control, ..PairConfig::default() });
        let done = read(&mut pair, 0, 128);
        assert_eq!(done.by_success_flag, !sq_flow_control);
        assert_eq!(done.cqe.sqhd == u16::MAX, !sq_flow_control);
        data_of(done);
        assert!(pair.host.poll_completion().is_none());
        let failed = read(&mut pair, 1 << 40, 1);
        assert_eq!(failed.cqe.status, Status::LBA_OUT_OF_RANGE.dnr());
        assert!(!failed.by_success_flag);
    }
}

/// H14: offsets without gaps, lengths that add up, PDO on HPDA's boundary, LAST exactly once.
#[test]
fn h14_read_data_is_gap_free_aligned_and_ends_once() {
    for (hpda, len_bytes) in [(0, 128 << 10), (7, 128 << 10), (31, 1 << 20)] {
        let mut config = PairConfig::default();
        config.host.hpda = hpda;
        config.tcp.max_c2h_data_bytes = 48 << 10;
        let mut host = RawHost::fresh(config);
        let mut request = host.ic_req();
        (request[10], request[11]) = (hpda, 2);
        host.exchange(&request);
        let connect = host.capsule(crate::proto::sim::connect_sqe(), 9, Some(&[0; 1024]));
        // The raw host has no digest of its own to add: data digests are on, so it adds this one.
        let mut connect = connect;
        connect[1] |= 2;
        connect[4..8].copy_from_slice(&(72u32 + 1024 + 4).to_le_bytes());
        connect.extend(crate::wire::digest::Digest::of(&[0; 1024]).to_bytes());
        assert!(host.exchange(&connect)[0].completion().is_some());
        host.set_digests(false, true);
        let sqe = ranged_transport(nvm::READ, 3, len_bytes / 512, 512);
        let bytes = host.capsule_as_is(with_cid(sqe, 5), None);
        let replies = host.exchange(&bytes);
        let align = (u32::from(hpda) + 1) * 4;
        let mut next = 0;
        let mut lasts = 0;
        for data in replies.iter().filter_map(|r| r.c2h()) {
            assert_eq!((data.cccid, data.datao), (CommandId(5), next));
            assert_eq!(u32::from(data.common.pdo) % align, 0);
            next += data.datal;
            lasts += u32::from(data.common.has(crate::wire::pdu::FLAG_LAST));
            assert!(!data.common.has(crate::wire::pdu::FLAG_SUCCESS));
        }
        assert_eq!((next, lasts), (len_bytes, 1));
        assert!(replies.last().is_some_and(|r| r.completion().is_some()));
    }
}

/// H07: the last four bytes come alone, with the next capsule, or byte by byte.
#[test]
fn h07_the_last_bytes_of_a_payload_in_any_company() {
    for data_digest in [false, true] {
        for way in 0..3 {
            let mut host = RawHost::with_digests(PairConfig::default(), false, data_digest);
            let data = Random::new(way).bytes(128 << 10);
            let sqe = ranged_transport(nvm::WRITE, 0, 256, 512);
            let bytes = host.capsule_as_is(with_cid(sqe, 1), None);
            let ttag = host.exchange(&bytes)[0].r2t().expect("data is asked for").ttag;
            let pdu = host.h2c(1, ttag, 0, &data, true);
            let (most, rest) = pdu.split_at(pdu.len() - 4);
            assert!(host.exchange(most).is_empty());
            let replies = match way {
                0 => host.exchange(rest),
                1 => {
                    let next = host.capsule_as_is(with_cid(ranged(nvm::FLUSH, 0, 1), 2), None);
                    host.exchange(&[rest, &next].concat())
                }
                _ => rest.iter().flat_map(|byte| host.exchange(&[*byte])).collect(),
            };
            assert_eq!(replies.len(), if way == 1 { 2 } else { 1 });
            assert!(replies.iter().all(|r| r.completion().is_some_and(|c| c.cqe.status.is_success())));
            assert!(host.pair.backend.contents()[..data.len()] == data);
        }
    }
}

/// The host takes nothing for a while: output is bounded, receiving stops, and goes on when it reads again.
#[test]
fn h21_a_host_that_does_not_read_stops_being_read_and_recovers() {
    let mut pair = Pair::connected(PairConfig { entries: 8, ..PairConfig::default() });
    let now = pair.now;
    let flood: Vec<u8> = (0..1000u16)
        .flat_map(|cid| {
            let sqe = with_cid(ranged(nvm::FLUSH, 0, 1), cid);
            let common = crate::wire::pdu::CommonHeader::bare(crate::wire::pdu::PduType::CapsuleCmd);
            crate::wire::pdu::CapsuleCmd { common, sqe }.encode()
        })
        .collect();
    let mut fed = 0;
    let replies = Arc::clone(&pair.replies);
    let queue = pair.queue().expect("connected");
    // Feeds without ever sending: what is unsent must stay below a queue's worth.
    while fed < flood.len() {
        let into = queue.receive_slice();
        let len = into.len().min(72);
        if len == 0 {
            break;
        }
        into[..len].copy_from_slice(&flood[fed..fed + len]);
        fed += len;
        queue.received(len, now);
        while let Some(Command { token, backend, operation }) = queue.poll_command(now) {
            backend.submit(operation, crate::backend::Done::new(Arc::clone(&replies) as _, token));
            let (token, reply) = replies.take(0).expect("the back end answers at once");
            queue.complete(token, reply, now);
        }
    }
    assert!(fed < 20 * 72, "back-pressure after about a queue full, not after {fed} bytes");
    let mut slices = Vec::new();
    queue.gather(&mut slices);
    let waiting: usize = slices.iter().map(|s| s.len()).sum();
    assert!(waiting <= 9 * 24, "{waiting} bytes wait");
    assert_eq!(queue.poll_close(), None);
    // The host reads: all that was taken is answered, and the queue goes on.
    pair.run_raw();
    assert_eq!(pair.take_raw().len() / 24, fed / 72);
    pair.send_raw(&flood[fed..fed + 72]);
    pair.run_raw();
    assert_eq!(pair.take_raw().len(), 24);
    assert_eq!(pair.closed(), None);
}

/// H11: what is sent is what its digest was made of, though the block is overwritten while it waits to be sent.
#[test]
fn h11_a_block_overwritten_while_it_is_being_sent_keeps_its_digest() {
    for lba_count in [1u32, 16, 2048] {
        let mut config = PairConfig { piece_max_bytes: 300, ..PairConfig::default() };
        (config.host.header_digest, config.host.data_digest) = (true, true);
        let mut pair = Pair::connected(config);
        let old = Random::new(2).bytes(lba_count as usize * 512);
        pair.backend.set(0, &old);
        pair.hold_replies = true;
        let data = HostData::FromController(IoBuf::heap(old.len()));
        pair.submit(ranged(nvm::READ, 0, lba_count), data, 1);
        pair.run();
        assert!(pair.answer_one());
        pair.backend.set(0, &vec![0xee; old.len()]);
        pair.run();
        let done = pair.host.poll_completion().expect("the read completes");
        assert!(data_of(done) == old);
    }
}

/// The output of a queue whose host doesn't read stays within what the memory plan counts.
#[test]
fn what_a_queue_holds_for_a_host_that_does_not_read_is_bounded() {
    let mut host = RawHost::connected(PairConfig { entries: 8, ..PairConfig::default() });
    let now = host.pair.now;
    let reads: Vec<u8> = (0..100u16)
        .flat_map(|cid| host.capsule_as_is(with_cid(ranged_transport(nvm::READ, 0, 8, 512), cid), None))
        .collect();
    let replies = Arc::clone(&host.pair.replies);
    let queue = host.pair.queue().expect("connected");
    for capsule in reads.chunks(72) {
        let into = queue.receive_slice();
        if into.is_empty() {
            break;
        }
        into[..72].copy_from_slice(capsule);
        queue.received(72, now);
        while let Some(command) = queue.poll_command(now) {
            let done = crate::backend::Done::new(Arc::clone(&replies) as _, command.token);
            command.backend.submit(command.operation, done);
            let (token, reply) = replies.take(0).expect("answered at once");
            queue.complete(token, reply, now);
        }
    }
    let mut slices = Vec::new();
    queue.gather(&mut slices);
    let waiting: usize = slices.iter().map(|s| s.len()).sum();
    assert!(queue.receive_slice().is_empty(), "back-pressure");
    assert!(waiting <= 8 * (4096 + 512), "{waiting} bytes wait");
    assert_eq!(host.pair.pool.out_bytes(), 0, "small reads don't hold the pool's buffers");
}
