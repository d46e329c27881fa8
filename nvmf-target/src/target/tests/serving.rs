//! Namespaces served, changed and taken away while hosts use them.

use std::sync::Arc;
use std::time::Duration;

use super::client::{Client, eventually, transfer};
use super::{BLOCK, Bench, SUBSYSTEM, spec};
use crate::buffer::IoBuf;
use crate::proto::host::HostData;
use crate::target::testing::MemBackend;
use crate::target::{Limits, TargetError};
use crate::wire::features::{AsyncEvent, AsyncEventConfig, fid};
use crate::wire::identify::{IdentifyController, IdentifyNamespace, decode_namespace_list};
use crate::wire::log_pages::GetLogPage;
use crate::wire::opcode::{admin, nvm};
use crate::wire::{Sqe, Status};

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) ^ (i >> 8) as u8).collect()
}

#[test]
fn what_is_written_is_read_back() {
    let bench = Bench::new();
    for digests in [false, true] {
        let identity = bench.identity(0);
        let mut admin = Client::open(bench.address, digests).unwrap();
        let cntlid = admin.connect_queue(&identity, 0, 0xFFFF, 31).unwrap().dw0 as u16;
        admin.enable();
        let mut io = Client::open(bench.address, digests).unwrap();
        assert!(io.connect_queue(&identity, 1, cntlid, 31).unwrap().status.is_success());
        for (slba, blocks) in [(0, 1), (1, 2), (100, 16), (200, 256)] {
            let bytes = pattern(slba as u8, blocks * BLOCK);
            assert_eq!(io.write_blocks(1, slba, &bytes, BLOCK).unwrap(), Status::SUCCESS);
            assert!(io.read_blocks(1, slba, blocks, BLOCK).unwrap() == bytes, "{blocks} blocks at {slba}");
        }
        assert_eq!(io.write_blocks(2, 0, &[0; BLOCK], BLOCK).unwrap().code(), Status::INVALID_NAMESPACE);
        assert_eq!(io.write_blocks(1, 1024, &[0; BLOCK], BLOCK).unwrap().code(), Status::LBA_OUT_OF_RANGE);
        drop((admin, io));
        bench.settle();
    }
}

/// H15: what Identify says of in-capsule data is what is taken, none at all included.
#[test]
fn h15_in_capsule_data_is_as_advertised() {
    for in_capsule_bytes in [0, 4096, 8192, 1 << 20] {
        let bench = Bench::with(Limits { in_capsule_bytes, ..Limits::default() });
        let identity = bench.identity(0);
        let (mut admin, cntlid) = Client::admin(&identity);
        let bytes = admin.identify(1, 0).unwrap();
        let shown = IdentifyController::decode(bytes[..].try_into().unwrap());
        assert_eq!((shown.ioccsz, shown.sgls >> 20 & 1), (4 + in_capsule_bytes / 16, u32::from(in_capsule_bytes > 0)));
        let mut io = Client::io(&identity, 1, cntlid);
        io.host.configure(32, in_capsule_bytes);
        for blocks in [1, 2, 3, 256] {
            let bytes = pattern(blocks as u8, blocks * BLOCK);
            assert_eq!(io.write_blocks(1, 0, &bytes, BLOCK).unwrap(), Status::SUCCESS);
            assert!(io.read_blocks(1, 0, blocks, BLOCK).unwrap() == bytes, "{blocks} blocks");
        }
        // One block more than fits ends the connection.
        io.host.configure(32, in_capsule_bytes + BLOCK as u32);
        let too_much = pattern(1, in_capsule_bytes as usize + BLOCK);
        if too_much.len() <= 1 << 20 {
            assert!(io.write_blocks(1, 0, &too_much, BLOCK).is_err());
        }
        assert!(admin.identify(1, 0).is_ok());
    }
}

#[test]
fn sixty_four_hosts_with_four_queues_each() {
    let bench = Bench::new();
    std::thread::scope(|scope| {
        for number in 0..64u8 {
            let identity = bench.identity(number);
            scope.spawn(move || {
                let (_admin, cntlid) = Client::admin(&identity);
                let mut queues: Vec<_> = (1..=4).map(|qid| Client::io(&identity, qid, cntlid)).collect();
                for round in 0..4u8 {
                    for (at, queue) in queues.iter_mut().enumerate() {
                        let slba = u64::from(number) * 16 + at as u64 * 4;
                        let bytes = pattern(number ^ round, 4 * BLOCK);
                        assert_eq!(queue.write_blocks(1, slba, &bytes, BLOCK).unwrap(), Status::SUCCESS);
                        assert!(queue.read_blocks(1, slba, 4, BLOCK).unwrap() == bytes);
                    }
                }
            });
        }
    });
    bench.settle();
}

/// H52: a resize is told within a second and every figure agrees; I/O past the end is refused.
#[test]
fn h52_a_resize_is_told() {
    let bench = Bench::new();
    let identity = bench.identity(0);
    let (mut host, cntlid) = Client::admin(&identity);
    let mut set = Sqe::new(admin::SET_FEATURES);
    set.set_dword(10, u32::from(fid::ASYNC_EVENT_CONFIG)).set_dword(11, AsyncEventConfig::NAMESPACE_ATTRIBUTE);
    host.run(set, HostData::None).unwrap();
    let event = host.submit(Sqe::new(admin::ASYNC_EVENT_REQUEST), HostData::None).unwrap();
    let mut io = Client::io(&identity, 1, cntlid);
    assert_eq!(io.write_blocks(1, 1024, &[1; BLOCK], BLOCK).unwrap().code(), Status::LBA_OUT_OF_RANGE);
    bench.backend.resize(2048);
    bench.target.namespace_resized(SUBSYSTEM, 1).unwrap();
    let told = host.finish(event).unwrap();
    assert_eq!(AsyncEvent::decode(told.cqe.dw0), AsyncEvent::NAMESPACE_ATTRIBUTE);
    let mut get = Sqe::new(admin::GET_LOG_PAGE);
    GetLogPage { lid: 4, retain_event: false, len_bytes: 4096, offset: 0, offset_is_index: false }
        .encode_into(&mut get.0);
    assert_eq!(decode_namespace_list(&host.admin_read(get, u32::MAX, 4096).unwrap()), [1]);
    let bytes = host.identify(0, 1).unwrap();
    assert_eq!(IdentifyNamespace::decode(bytes[..].try_into().unwrap()).nsze, 2048);
    assert_eq!(bench.target.snapshot().subsystems[0].namespaces[0].block_count, 2048);
    assert_eq!(io.write_blocks(1, 2047, &[1; BLOCK], BLOCK).unwrap(), Status::SUCCESS);
    assert_eq!(io.write_blocks(1, 2048, &[1; BLOCK], BLOCK).unwrap().code(), Status::LBA_OUT_OF_RANGE);
}

/// H178: a namespace that is taken away and put back under the same nsid is the new one at once.
#[test]
fn h178_namespaces_come_and_go_under_a_host() {
    let bench = Bench::new();
    let identity = bench.identity(0);
    let (mut host, cntlid) = Client::admin(&identity);
    let mut io = Client::io(&identity, 1, cntlid);
    for round in 0..50u8 {
        let backend = MemBackend::new(100 + u128::from(round), 512, 64);
        bench.target.add_namespace(SUBSYSTEM, 3, Arc::clone(&backend) as _).unwrap();
        let shown = IdentifyNamespace::decode(host.identify(0, 3).unwrap()[..].try_into().unwrap());
        assert_eq!(shown.nguid, *crate::backend::Backend::uuid(&*backend).as_bytes());
        assert_eq!(io.write_blocks(3, 0, &[round; 512], 512).unwrap(), Status::SUCCESS);
        assert_eq!(io.read_blocks(3, 0, 1, 512).unwrap(), [round; 512]);
        bench.target.remove_namespace(SUBSYSTEM, 3).unwrap();
        assert_eq!(io.write_blocks(3, 0, &[0; 512], 512).unwrap().code(), Status::INVALID_NAMESPACE);
    }
    assert_eq!(decode_namespace_list(&host.identify(2, 0).unwrap()), [1]);
}

/// H156: control calls don't wait for a back end that hangs; what is in flight ends when it does.
#[test]
fn h156_a_namespace_is_removed_while_its_back_end_hangs() {
    let bench = Bench::new();
    let identity = bench.identity(0);
    let (_host, cntlid) = Client::admin(&identity);
    let mut io = Client::io(&identity, 1, cntlid);
    bench.backend.hold();
    let bytes = pattern(7, BLOCK);
    let cid = io.submit(transfer(nvm::WRITE, 1, 5, 1), HostData::ToController(IoBuf::copy_of(&bytes))).unwrap();
    eventually("the write is at the back end", || bench.backend.waiting() == 1);
    bench.target.remove_namespace(SUBSYSTEM, 1).unwrap();
    let other = MemBackend::new(2, 512, 8);
    bench.target.add_namespace(SUBSYSTEM, 2, other).unwrap();
    assert_eq!(io.write_blocks(2, 0, &[9; 512], 512).unwrap(), Status::SUCCESS);
    assert!(!io.answered(cid, Duration::from_millis(50)));
    bench.backend.release();
    assert_eq!(io.finish(cid).unwrap().cqe.status, Status::SUCCESS);
    assert_eq!(bench.backend.read(crate::backend::LbaRange { slba: 5, lba_count: 1 }), Some(bytes));
}

/// H57: what a back end has is not said to be aborted, and each command ends once.
#[test]
fn h57_an_abort_of_what_the_back_end_has_is_honest() {
    let bench = Bench::new();
    let identity = bench.identity(0);
    let (mut host, cntlid) = Client::admin(&identity);
    let mut io = Client::io(&identity, 1, cntlid);
    bench.backend.hold();
    let cids: Vec<_> = (0..31)
        .map(|n| {
            let data = HostData::ToController(IoBuf::copy_of(&pattern(n, BLOCK)));
            io.submit(transfer(nvm::WRITE, 1, u64::from(n), 1), data).unwrap()
        })
        .collect();
    eventually("all are at the back end", || bench.backend.waiting() == 31);
    for cid in &cids {
        let mut abort = Sqe::new(admin::ABORT);
        abort.set_dword(10, 1 | u32::from(cid.0) << 16);
        assert_eq!(host.run(abort, HostData::None).unwrap().cqe.dw0 & 1, 1, "too late");
    }
    assert_eq!(bench.backend.release(), 31);
    for (n, cid) in cids.into_iter().enumerate() {
        assert_eq!(io.finish(cid).unwrap().cqe.status, Status::SUCCESS);
        assert!(io.read_blocks(1, n as u64, 1, BLOCK).unwrap() == pattern(n as u8, BLOCK));
    }
}

/// H50, H59: two namespaces of one identity, or of odd shape, are refused with the reason.
#[test]
fn h50_the_registry_refuses_what_hosts_could_not_tell_apart() {
    let bench = Bench::new();
    let refused = |nsid, backend| bench.target.add_namespace(SUBSYSTEM, nsid, backend).unwrap_err();
    let duplicate = refused(2, MemBackend::new(1, 512, 8));
    assert!(matches!(duplicate, TargetError::DuplicateUuid { owner_nsid: 1, .. }));
    assert!(duplicate.to_string().contains(SUBSYSTEM), "{duplicate}");
    bench.target.create_subsystem(&spec("nqn.2014-08.org.example:other")).unwrap();
    let other = bench.target.add_namespace("nqn.2014-08.org.example:other", 1, MemBackend::new(1, 512, 8));
    assert!(matches!(other, Err(TargetError::DuplicateUuid { .. })));
    assert!(matches!(refused(1, MemBackend::new(9, 512, 8)), TargetError::NamespaceExists { nsid: 1, .. }));
    assert!(matches!(refused(0, MemBackend::new(9, 512, 8)), TargetError::Nsid { nsid: 0, max: 1024 }));
    assert!(matches!(refused(1025, MemBackend::new(9, 512, 8)), TargetError::Nsid { .. }));
    assert!(matches!(refused(2, MemBackend::new(9, 1024, 8)), TargetError::BlockSize { block_bytes: 1024 }));
    assert!(matches!(refused(2, MemBackend::new(9, 512, 0)), TargetError::Empty));
    assert_eq!(bench.target.snapshot().subsystems.len(), 2);
}

/// H153, H155: bad names are refused with field, rule and value; long lists work.
#[test]
fn h153_h155_names_and_lists() {
    let bench = Bench::new();
    let target = &bench.target;
    for bad in ["", "nqn.", "nqn.2014-08.org.x:a b", "nqn.2014-08.org.x:\n", &"x".repeat(224)] {
        let error = target.create_subsystem(&spec(bad)).unwrap_err();
        assert!(matches!(error, TargetError::Nqn { field: "subsystem nqn", .. }), "{error}");
        assert!(!error.to_string().contains('\n'));
        assert!(target.allow_host(SUBSYSTEM, bad).is_err());
    }
    assert!(matches!(target.create_subsystem(&spec(SUBSYSTEM)), Err(TargetError::SubsystemExists { .. })));
    assert!(matches!(
        target.create_subsystem(&spec("nqn.2014-08.org.nvmexpress.discovery")),
        Err(TargetError::DiscoveryNqn)
    ));
    let long_serial = crate::target::SubsystemSpec { serial: "x".repeat(21), ..spec("nqn.2014-08.org.x:y") };
    assert!(matches!(target.create_subsystem(&long_serial), Err(TargetError::Text { field: "serial", .. })));
    for n in 0..1000 {
        target.allow_host(SUBSYSTEM, &format!("nqn.2014-08.org.example:h{n}")).unwrap();
    }
    assert_eq!(target.snapshot().subsystems[0].hosts.len(), 1000);
    assert!(matches!(target.allow_host(SUBSYSTEM, "nqn.2014-08.org.example:h7"), Err(TargetError::HostExists { .. })));
    for nsid in 2..=256 {
        target.add_namespace(SUBSYSTEM, nsid, MemBackend::new(u128::from(nsid), 512, 8)).unwrap();
    }
    assert_eq!(target.snapshot().subsystems[0].namespaces.len(), 256);
    assert!(matches!(target.delete_subsystem("nqn.2014-08.org.x:none"), Err(TargetError::NoSuchSubsystem { .. })));
    assert!(matches!(target.remove_listener("127.0.0.1:1".parse().unwrap()), Err(TargetError::NoSuchListener { .. })));
    assert!(matches!(target.add_listener(bench.address), Err(TargetError::ListenerExists { .. })));
    assert!(matches!(target.add_listener("192.0.2.1:1".parse().unwrap()), Err(TargetError::Listen { .. })));
}
