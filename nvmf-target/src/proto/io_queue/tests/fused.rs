//! Fused Compare and Write (H68).

use super::*;

fn fused(opcode: u8, bits: u8, slba: u64, lba_count: u32) -> Sqe {
    *ranged(opcode, slba, lba_count).set_fuse_bits(bits)
}

fn in_capsule(host: &RawHost, sqe: Sqe, cid: u16, byte: u8) -> Vec<u8> {
    host.capsule(sqe, cid, Some(&[byte; 512]))
}

fn statuses(replies: &[crate::proto::sim::RawReply]) -> Vec<(u16, Status)> {
    replies.iter().filter_map(|r| r.completion()).map(|c| (c.cqe.cid.0, c.cqe.status)).collect()
}

fn pair_of(host: &RawHost, compare: (Sqe, u8), write: (Sqe, u8)) -> Vec<u8> {
    [in_capsule(host, compare.0, 1, compare.1), in_capsule(host, write.0, 2, write.1)].concat()
}

#[test]
fn h68_equal_writes_and_unequal_leaves_the_block_alone() {
    let mut host = RawHost::connected(PairConfig::default());
    let compare = fused(nvm::COMPARE, 1, 5, 1);
    let write = fused(nvm::WRITE, 2, 5, 1);
    let bytes = pair_of(&host, (compare, 0), (write, 9));
    assert_eq!(statuses(&host.exchange(&bytes)), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    let bytes = pair_of(&host, (compare, 0), (write, 7));
    let failed = [(1, Status::COMPARE_FAILURE.dnr()), (2, Status::ABORTED_FAILED_FUSED)];
    assert_eq!(statuses(&host.exchange(&bytes)), failed);
    assert_eq!(host.pair.backend.contents()[5 * 512..6 * 512], [9; 512]);
    assert_eq!(host.pair.backend.log(), ["compare-and-write", "compare-and-write"]);
    assert_eq!(host.pair.pool.out_bytes(), 0);
}

/// Over R2T, one half or both, with the stream in small pieces.
#[test]
fn h68_halves_whose_data_comes_by_r2t() {
    for (compare_in_capsule, write_in_capsule) in [(false, false), (true, false), (false, true)] {
        let mut host = RawHost::connected(PairConfig { piece_max_bytes: 5, ..PairConfig::default() });
        let mut bytes = Vec::new();
        for (cid, opcode, bits, byte, inside) in
            [(1, nvm::COMPARE, 1, 0, compare_in_capsule), (2, nvm::WRITE, 2, 9, write_in_capsule)]
        {
            let sqe = fused(opcode, bits, 5, 1);
            bytes.extend(match inside {
                true => in_capsule(&host, sqe, cid, byte),
                false => {
                    let sqe = *with_cid(sqe, cid).set_sgl(SglDescriptor::transport(512));
                    host.capsule_as_is(sqe, None)
                }
            });
        }
        let asked: Vec<_> = host.exchange(&bytes).iter().filter_map(|r| r.r2t().cloned()).collect();
        assert_eq!(asked.len(), 2 - usize::from(compare_in_capsule) - usize::from(write_in_capsule));
        let mut replies = Vec::new();
        for r2t in asked.iter().rev() {
            let byte = if r2t.cccid.0 == 1 { 0 } else { 9 };
            let data = host.h2c(r2t.cccid.0, r2t.ttag, 0, &[byte; 512], true);
            replies.extend(host.exchange(&data));
        }
        assert_eq!(statuses(&replies), [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
        assert_eq!(host.pair.backend.contents()[5 * 512..6 * 512], [9; 512]);
    }
}

/// The pair takes both buffers or neither: with room for one only it waits without asking for data.
#[test]
fn a_pair_that_finds_one_buffer_takes_none() {
    let mut host = RawHost::connected(PairConfig { pool_bytes: 8192, ..PairConfig::default() });
    let hold = *with_cid(ranged(nvm::WRITE, 0, 1), 9).set_sgl(SglDescriptor::transport(512));
    let bytes = host.capsule_as_is(hold, None);
    let ttag = host.exchange(&bytes)[0].r2t().expect("asked").ttag;
    let bytes = pair_of(&host, (fused(nvm::COMPARE, 1, 5, 1), 0), (fused(nvm::WRITE, 2, 5, 1), 9));
    assert!(host.exchange(&bytes).is_empty());
    assert_eq!(host.pair.pool.out_bytes(), 4096, "only the write that was there before");
    let wanted = host.pair.queue().expect("connected").wants_buffers();
    assert_eq!(wanted, Some(Wanted { len_bytes: 512, count: 2 }), "the driver can wait for both at once");
    let data = host.h2c(9, ttag, 0, &[1; 512], true);
    assert_eq!(statuses(&host.exchange(&data)).len(), 3);
    assert_eq!(host.pair.pool.out_bytes(), 0);
}

#[test]
fn what_is_no_pair_ends_as_the_specification_says() {
    let failed = Status::ABORTED_FAILED_FUSED;
    let missing = Status::ABORTED_MISSING_FUSED;
    let invalid = Status::INVALID_FIELD.dnr();
    let (compare, write) = (fused(nvm::COMPARE, 1, 5, 1), fused(nvm::WRITE, 2, 5, 1));
    let far = fused(nvm::COMPARE, 1, 1 << 40, 1);
    let cases: [(&str, Sqe, Sqe, Status, Status); 9] = [
        ("first then normal", compare, ranged(nvm::WRITE, 5, 1), missing, Status::SUCCESS),
        ("second without first", ranged(nvm::COMPARE, 5, 1), write, Status::SUCCESS, missing),
        ("first is a write", fused(nvm::WRITE, 1, 5, 1), write, invalid, failed),
        ("second is a compare", compare, fused(nvm::COMPARE, 2, 5, 1), failed, invalid),
        ("reserved code", fused(nvm::COMPARE, 3, 5, 1), write, invalid, missing),
        ("ranges differ", compare, fused(nvm::WRITE, 2, 6, 1), invalid, invalid),
        ("first out of range", far, write, Status::LBA_OUT_OF_RANGE.dnr(), failed),
        ("second out of range", compare, fused(nvm::WRITE, 2, 1 << 40, 1), failed, Status::LBA_OUT_OF_RANGE.dnr()),
        (
            "second on no namespace",
            compare,
            *fused(nvm::WRITE, 2, 5, 1).set_namespace_id(NamespaceId(2)),
            failed,
            Status::INVALID_NAMESPACE.dnr(),
        ),
    ];
    for (name, first, second, of_first, of_second) in cases {
        let mut host = RawHost::connected(PairConfig::default());
        let bytes = pair_of(&host, (first, 0), (second, 9));
        let mut got = statuses(&host.exchange(&bytes));
        got.sort_by_key(|(cid, _)| *cid);
        assert_eq!(got, [(1, of_first), (2, of_second)], "{name}");
        let wrote = host.pair.backend.contents().iter().any(|b| *b != 0);
        assert_eq!(wrote, name == "first then normal", "{name}");
        assert_eq!(host.pair.pool.out_bytes(), 0, "{name}");
        assert_eq!(status_of_raw(&mut host, ranged(nvm::FLUSH, 0, 1), 3), Status::SUCCESS, "{name}");
    }
}

#[test]
fn a_pair_longer_than_acwu_is_refused() {
    let mut host = RawHost::connected(PairConfig::default());
    let mut bytes = host.capsule(fused(nvm::COMPARE, 1, 5, 2), 1, Some(&[0; 1024]));
    bytes.extend(host.capsule(fused(nvm::WRITE, 2, 5, 2), 2, Some(&[0; 1024])));
    let exceeded = Status::ATOMIC_WRITE_UNIT_EXCEEDED.dnr();
    assert_eq!(statuses(&host.exchange(&bytes)), [(1, exceeded), (2, exceeded)]);
}

#[test]
fn a_half_with_a_bad_digest_takes_the_other_with_it() {
    for bad in [0, 1] {
        for inside in [true, false] {
            let mut host = RawHost::with_digests(PairConfig::default(), false, true);
            let mut bytes = Vec::new();
            for (index, (opcode, bits)) in [(nvm::COMPARE, 1), (nvm::WRITE, 2)].into_iter().enumerate() {
                let sqe = fused(opcode, bits, 5, 1);
                let cid = index as u16 + 1;
                if inside {
                    let mut capsule = in_capsule(&host, sqe, cid, 0);
                    let end = capsule.len() - 1;
                    capsule[end] ^= u8::from(index == bad);
                    bytes.extend(capsule);
                } else {
                    let sqe = *with_cid(sqe, cid).set_sgl(SglDescriptor::transport(512));
                    bytes.extend(host.capsule_as_is(sqe, None));
                }
            }
            let mut replies = host.exchange(&bytes);
            let asked: Vec<_> = replies.iter().filter_map(|r| r.r2t().cloned()).collect();
            for r2t in asked {
                let mut data = host.h2c(r2t.cccid.0, r2t.ttag, 0, &[0; 512], true);
                let end = data.len() - 1;
                data[end] ^= u8::from(usize::from(r2t.cccid.0) == bad + 1);
                replies.extend(host.exchange(&data));
            }
            let mut want = [(1, Status::ABORTED_FAILED_FUSED), (2, Status::ABORTED_FAILED_FUSED)];
            want[bad].1 = Status::TRANSIENT_TRANSPORT_ERROR;
            let mut got = statuses(&replies);
            got.sort_by_key(|(cid, _)| *cid);
            assert_eq!(got, want, "half {bad}, in capsule: {inside}");
            assert!(host.pair.backend.log().is_empty());
            assert_eq!(host.pair.pool.out_bytes(), 0);
        }
    }
}

/// H68: hosts that race on one block as a counter lose no increment.
#[test]
fn h68_a_counter_by_compare_and_write_loses_nothing() {
    let mut hosts: Vec<Pair> = (0..4)
        .map(|seed| Pair::connected(PairConfig { seed, piece_max_bytes: 700, ..PairConfig::default() }))
        .collect();
    let block = hosts[0].backend.clone();
    for host in &mut hosts {
        let namespace = crate::proto::controller_shared::Namespace {
            nsid: NamespaceId(1),
            backend: block.clone(),
            write_protected: false,
        };
        let table = crate::proto::controller_shared::NamespaceTable::new([namespace]);
        host.shared.set_namespaces(Arc::new(table));
    }
    let mut random = Random::new(3);
    let mut won = 0;
    // What each host read last; two that read the same value race.
    let mut seen = [0u64; 4];
    while won < 2000 {
        let index = random.below(4);
        let host = &mut hosts[index];
        if random.below(3) == 0 {
            let data = data_of(read(host, 5, 1));
            seen[index] = u64::from_le_bytes(data[..8].try_into().expect("eight bytes"));
            continue;
        }
        let block_with = |value: u64| {
            let mut block = IoBuf::heap(512);
            block[..8].copy_from_slice(&value.to_le_bytes());
            HostData::ToController(block)
        };
        host.submit(fused(nvm::COMPARE, 1, 5, 1), block_with(seen[index]), 1);
        host.submit(fused(nvm::WRITE, 2, 5, 1), block_with(seen[index] + 1), 2);
        host.run();
        let done: Vec<_> = std::iter::from_fn(|| host.host.poll_completion()).collect();
        assert_eq!(done.len(), 2);
        let both = done.iter().all(|c| c.cqe.status.is_success());
        assert!(both || done.iter().all(|c| !c.cqe.status.is_success()), "both or neither");
        won += u64::from(both);
    }
    assert_eq!(block.contents()[5 * 512..][..8], won.to_le_bytes());
}
