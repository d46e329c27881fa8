//! Associations: who gets in, who follows whom, and what is left when they end.

use std::net::Shutdown;
use std::time::{Duration, Instant};

use super::client::{Client, Identity, eventually, transfer};
use super::{BLOCK, Bench, SUBSYSTEM, spec};
use crate::backend::LbaRange;
use crate::buffer::IoBuf;
use crate::proto::host::HostData;
use crate::target::testing::MemBackend;
use crate::target::{Limits, TargetError};
use crate::wire::nqn::DISCOVERY_NQN;
use crate::wire::opcode::{admin, nvm};
use crate::wire::{Sqe, Status};

#[test]
fn only_hosts_on_the_list_get_in() {
    let bench = Bench::new();
    bench.target.set_allow_any_host(SUBSYSTEM, false).unwrap();
    let identity = bench.identity(1);
    let status = |identity: &Identity| Client::connect(identity, 0, 0xFFFF).unwrap().1.status.code();
    assert_eq!(status(&identity), Status::CONNECT_INVALID_HOST);
    bench.target.allow_host(SUBSYSTEM, &identity.host).unwrap();
    let (mut admin, cntlid) = Client::admin(&identity);
    let mut io = Client::io(&identity, 1, cntlid);
    assert_eq!(status(&bench.identity(2)), Status::CONNECT_INVALID_HOST);
    bench.target.disallow_host(SUBSYSTEM, &identity.host).unwrap();
    assert!(admin.wait_closed() && io.wait_closed(), "a host that is taken off the list is cut");
    assert_eq!(status(&identity), Status::CONNECT_INVALID_HOST);
    drop((admin, io));
    bench.settle();
}

#[test]
fn connects_that_do_not_fit_are_refused_in_place() {
    let bench = Bench::new();
    let identity = bench.identity(1);
    let (_admin, cntlid) = Client::admin(&identity);
    let refused = |identity: &Identity, qid, cntlid| {
        let (_, cqe) = Client::connect(identity, qid, cntlid).unwrap();
        (cqe.status.code(), cqe.dw0)
    };
    let invalid = Status::CONNECT_INVALID_PARAMETERS;
    let unknown = Identity { subsystem: "nqn.2014-08.org.example:none".into(), ..identity.clone() };
    assert_eq!(refused(&unknown, 0, 0xFFFF), (invalid, 0x1_0100));
    assert_eq!(refused(&identity, 1, cntlid + 1), (invalid, 0x1_0010), "no such controller");
    assert_eq!(refused(&identity, 17, cntlid), (invalid, 42), "more queues than there may be");
    assert_eq!(refused(&bench.identity(2), 1, cntlid), (invalid, 0x1_0200), "another host's controller");
    let other_id = Identity { hostid: [77; 16], ..identity.clone() };
    assert_eq!(refused(&other_id, 1, cntlid), (invalid, 0x1_0000));
    // The controller isn't enabled: no I/O queue yet.
    let (mut fresh, cqe) = Client::connect(&bench.identity(3), 0, 0xFFFF).unwrap();
    assert_eq!(refused(&bench.identity(3), 1, cqe.dw0 as u16).0, Status::COMMAND_SEQUENCE_ERROR);
    fresh.enable();
    Client::io(&bench.identity(3), 1, cqe.dw0 as u16);
    // Anything but Connect comes too early, and doesn't end the connection.
    let mut early = Client::open(bench.address, false).unwrap();
    let done = early.run(Sqe::new(admin::KEEP_ALIVE), HostData::None).unwrap();
    assert_eq!(done.cqe.status.code(), Status::COMMAND_SEQUENCE_ERROR);
    assert!(early.connect_queue(&bench.identity(4), 0, 0xFFFF, 31).unwrap().status.is_success());
}

/// H34: a queue id is free again as soon as its connection is gone; one that is alive is defended.
#[test]
fn h34_a_queue_id_is_reused_but_never_shared() {
    let bench = Bench::new();
    let identity = bench.identity(1);
    let (_admin, cntlid) = Client::admin(&identity);
    for round in 0..200 {
        let mut io = Client::io(&identity, 1, cntlid);
        let byte = round as u8;
        assert_eq!(io.write_blocks(1, 3, &[byte; BLOCK], BLOCK).unwrap(), Status::SUCCESS);
        if round % 2 == 0 {
            // A reset instead of a FIN.
            socket2::SockRef::from(&io.stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
    }
    let mut first = Client::io(&identity, 1, cntlid);
    let (_, duplicate) = Client::connect(&identity, 1, cntlid).unwrap();
    assert_eq!(duplicate.status.code(), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(first.read_blocks(1, 3, 1, BLOCK).unwrap(), [199; BLOCK], "the first is unharmed");
}

/// Once a host's new association is accepted, no command of the one before takes effect any more.
#[test]
fn a_successor_waits_for_what_its_predecessor_has_at_the_back_end() {
    let bench = Bench::new();
    let identity = bench.identity(1);
    let (old_admin, cntlid) = Client::admin(&identity);
    let mut old = Client::io(&identity, 1, cntlid);
    bench.backend.hold();
    old.submit(transfer(nvm::WRITE, 1, 9, 1), HostData::ToController(IoBuf::copy_of(&[0xEE; BLOCK]))).unwrap();
    eventually("the write is at the back end", || bench.backend.waiting() == 1);
    drop((old_admin, old));
    let backend = std::sync::Arc::clone(&bench.backend);
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        backend.release();
    });
    let started = Instant::now();
    let (_admin, cntlid) = Client::admin(&identity);
    assert!(started.elapsed() >= Duration::from_millis(250), "accepted while a command could still take effect");
    release.join().unwrap();
    let mut io = Client::io(&identity, 1, cntlid);
    assert_eq!(io.write_blocks(1, 9, &[0x11; BLOCK], BLOCK).unwrap(), Status::SUCCESS);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(bench.backend.read(LbaRange { slba: 9, lba_count: 1 }), Some(vec![0x11; BLOCK]));
}

#[test]
fn a_successor_is_told_to_come_again_if_that_takes_too_long() {
    let bench = Bench::with(Limits { drain_timeout: Duration::from_millis(200), ..Limits::default() });
    let identity = bench.identity(1);
    let (old_admin, cntlid) = Client::admin(&identity);
    let mut old = Client::io(&identity, 1, cntlid);
    bench.backend.hold();
    old.submit(transfer(nvm::WRITE, 1, 9, 1), HostData::ToController(IoBuf::copy_of(&[0xEE; BLOCK]))).unwrap();
    eventually("the write is at the back end", || bench.backend.waiting() == 1);
    drop((old_admin, old));
    let (_, refused) = Client::connect(&identity, 0, 0xFFFF).unwrap();
    assert_eq!(refused.status, Status::CONNECT_CONTROLLER_BUSY, "without DNR");
    let (_other, _) = Client::admin(&bench.identity(2));
    bench.backend.release();
    Client::admin(&identity);
}

/// A host that fell silent (no FIN ever comes) is followed by its next life; one that is alive keeps its association.
#[test]
fn a_silent_predecessor_is_ended_and_a_living_one_is_not() {
    let bench = Bench::new();
    let identity = Identity { kato_ms: 4000, ..bench.identity(1) };
    let (mut silent, first) = Client::admin(&identity);
    let (_second, second) = Client::admin(&identity);
    let live = || bench.target.snapshot().controllers.iter().filter(|c| !c.ending).count();
    assert_eq!(live(), 2, "a host may have two associations");
    assert_ne!(first, second);
    std::thread::sleep(Duration::from_millis(3300));
    let (_third, _) = Client::admin(&identity);
    assert_eq!(live(), 1, "both were silent for too long");
    assert!(silent.wait_closed());
}

#[test]
fn one_host_cannot_take_every_controller() {
    let bench = Bench::with(Limits { controllers_per_host: 3, ..Limits::default() });
    let _few: Vec<_> = (0..3).map(|_| Client::admin(&bench.identity(1))).collect();
    let (_, refused) = Client::connect(&bench.identity(1), 0, 0xFFFF).unwrap();
    assert_eq!(refused.status, Status::CONNECT_CONTROLLER_BUSY);
    Client::admin(&bench.identity(2));
}

#[test]
fn discovery_and_subsystems_have_limits_of_their_own() {
    let bench = Bench::with(Limits { controllers: 2, discovery_controllers: 3, ..Limits::default() });
    let busy = |identity: &Identity| Client::connect(identity, 0, 0xFFFF).unwrap().1.status;
    let discovery = |n| Identity { subsystem: DISCOVERY_NQN.into(), ..bench.identity(n) };
    let mut looking: Vec<_> = (0..3).map(|n| Client::admin(&discovery(n))).collect();
    assert_eq!(busy(&discovery(3)), Status::CONNECT_CONTROLLER_BUSY);
    let mut hosts: Vec<_> = (0..2).map(|n| Client::admin(&bench.identity(n))).collect();
    assert_eq!(busy(&bench.identity(2)), Status::CONNECT_CONTROLLER_BUSY, "no place of discovery's is taken");
    drop(hosts.pop());
    looking.clear();
    eventually("one host has left", || bench.target.snapshot().controllers.len() == 1);
    Client::admin(&bench.identity(2));
}

/// H30: hosts that vanish in the middle of writes are cut by keep-alive, and all that they held comes back.
#[test]
fn h30_nothing_is_left_of_hosts_that_vanish() {
    let bench = Bench::new();
    for round in 0..3 {
        let identity = Identity { kato_ms: 1000, ..bench.identity(round) };
        let (admin, cntlid) = Client::admin(&identity);
        let mut queues: Vec<Client> = (1..=8).map(|qid| Client::io(&identity, qid, cntlid)).collect();
        for queue in &mut queues {
            for n in 0..30 {
                // More than fits the capsule: the target answers with an R2T, which this host never looks at.
                let sqe = transfer(nvm::WRITE, 1, n, 8);
                queue.submit(sqe, HostData::ToController(IoBuf::heap(8 * BLOCK))).unwrap();
            }
        }
        if round == 1 {
            std::thread::sleep(Duration::from_millis(900));
            for queue in &queues {
                socket2::SockRef::from(&queue.stream).set_linger(Some(Duration::ZERO)).unwrap();
            }
            drop(queues);
            bench.settle();
        } else {
            bench.settle();
            drop(queues);
        }
        drop(admin);
    }
}

/// H33: hosts that connect while a subsystem is deleted and made again get in, or are told why not.
#[test]
fn h33_hosts_connect_while_the_subsystem_is_made_again() {
    let bench = Bench::new();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..8 {
            let identity = bench.identity(number);
            let stop = &stop;
            scope.spawn(move || {
                let mut accepted = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let Ok((client, cqe)) = Client::connect(&identity, 0, 0xFFFF) else { continue };
                    if cqe.status.is_success() {
                        accepted += 1;
                        let _ = client.stream.shutdown(Shutdown::Both);
                        continue;
                    }
                    let expected = [
                        Status::CONNECT_INVALID_PARAMETERS,
                        Status::CONNECT_CONTROLLER_BUSY,
                        Status::CONNECT_INVALID_HOST,
                    ];
                    assert!(expected.contains(&cqe.status.code()), "{:?}", cqe.status);
                }
                accepted
            });
        }
        for round in 0..100 {
            let departing = bench.target.delete_subsystem(SUBSYSTEM).unwrap();
            bench.runtime.block_on(departing.wait(Duration::from_secs(5))).unwrap();
            bench.target.create_subsystem(&spec(SUBSYSTEM)).unwrap();
            bench.target.add_namespace(SUBSYSTEM, 1, MemBackend::new(1000 + round, 512, 8)).unwrap();
            bench.target.set_allow_any_host(SUBSYSTEM, true).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let (mut admin, _) = Client::admin(&bench.identity(50));
    assert!(admin.identify(0, 1).unwrap().iter().any(|&b| b != 0));
    drop(admin);
    bench.settle();
}

#[test]
fn deleting_a_subsystem_closes_its_controllers_and_names_those_that_hang() {
    let bench = Bench::new();
    let identity = bench.identity(1);
    let (mut admin, cntlid) = Client::admin(&identity);
    let mut io = Client::io(&identity, 1, cntlid);
    bench.backend.hold();
    io.submit(transfer(nvm::WRITE, 1, 0, 1), HostData::ToController(IoBuf::heap(BLOCK))).unwrap();
    eventually("the write is at the back end", || bench.backend.waiting() == 1);
    let departing = bench.target.delete_subsystem(SUBSYSTEM).unwrap();
    assert!(bench.target.snapshot().subsystems.is_empty());
    let busy = bench.runtime.block_on(departing.wait(Duration::from_millis(100))).unwrap_err();
    assert!(matches!(busy, TargetError::StillBusy { controllers: 1, .. }), "{busy}");
    assert!(admin.wait_closed() && io.wait_closed());
    drop((admin, io));
    bench.backend.release();
    bench.settle();
}

/// A shutdown is complete once the write cache is flushed.
#[test]
fn a_host_s_shutdown_flushes_the_write_cache() {
    use crate::wire::opcode::fabrics;
    use crate::wire::properties::{self, Configuration, PropertyCommand};
    let bench = Bench::new();
    let cached = std::sync::Arc::new(MemBackend::with_cache(5, 512, 8, true));
    bench.target.add_namespace(SUBSYSTEM, 5, std::sync::Arc::clone(&cached) as _).unwrap();
    let (mut admin, _) = Client::admin(&bench.identity(1));
    let mut property = |kind, value| {
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(kind);
        let offset = if kind == fabrics::TYPE_PROPERTY_SET { properties::CC } else { properties::CSTS };
        PropertyCommand { eight_bytes: false, attrib: 0, offset, value }.encode_into(&mut sqe.0);
        admin.run(sqe, HostData::None).unwrap().cqe.dw0
    };
    property(fabrics::TYPE_PROPERTY_SET, u64::from(Configuration::ENABLED.0) | 1 << 14);
    let deadline = Instant::now() + Duration::from_secs(10);
    while property(fabrics::TYPE_PROPERTY_GET, 0) != 1 | 2 << 2 {
        assert!(Instant::now() < deadline, "the shutdown doesn't complete");
    }
    assert_eq!((cached.flushes(), bench.backend.flushes()), (1, 0));
}
