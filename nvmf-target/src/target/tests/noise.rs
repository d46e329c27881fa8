//! Many things at once, and bytes that are nearly right.

use std::io::{IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::client::{Client, Identity};
use super::{BLOCK, Bench, SUBSYSTEM, spec};
use crate::buffer::{HeapPool, IoBuf};
use crate::proto::admin::intake::Intake;
use crate::proto::host::{HostConfig, HostData, HostQueuePair};
use crate::proto::tcp::{QueueParams, TcpConfig, TcpQueuePair};
use crate::target::Limits;
use crate::target::testing::MemBackend;
use crate::wire::connect::{ConnectCommand, ConnectData};
use crate::wire::nqn::{DISCOVERY_NQN, Nqn};
use crate::wire::opcode::{admin, fabrics};
use crate::wire::properties::{self, Configuration, PropertyCommand};
use crate::wire::{CommandId, Cqe, Sqe, Status};

/// xorshift64*, seeded: the same noise in every run.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Namespaces, hosts, subsystems and listeners come and go while hosts do verified I/O: nobody sees an error, and the
/// target ends where it began.
#[test]
fn changes_under_load_disturb_nobody() {
    let bench = Bench::new();
    let before = bench.target.snapshot();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..6u8 {
            let (identity, stop) = (bench.identity(number), &stop);
            scope.spawn(move || {
                let (_admin, cntlid) = Client::admin(&identity);
                let mut io = Client::io(&identity, 1, cntlid);
                let mut round = 0u8;
                while !stop.load(Ordering::Relaxed) {
                    round = round.wrapping_add(1);
                    let slba = u64::from(number) * 8;
                    let bytes = vec![number ^ round; 3 * BLOCK];
                    assert_eq!(io.write_blocks(1, slba, &bytes, BLOCK).unwrap(), Status::SUCCESS);
                    assert!(io.read_blocks(1, slba, 3, BLOCK).unwrap() == bytes);
                }
            });
        }
        let changers: Vec<_> = (0..4u32)
            .map(|thread| {
                let target = Arc::clone(&bench.target);
                let address = bench.address;
                scope.spawn(move || {
                    for round in 0..60u32 {
                        change_and_undo(&target, thread, round);
                        let identity = Identity {
                            subsystem: DISCOVERY_NQN.into(),
                            ..Identity::numbered(address, SUBSYSTEM, 100 + thread as u8)
                        };
                        let (mut discovery, _) = Client::admin(&identity);
                        assert!(discovery.identify(1, 0).is_ok());
                    }
                })
            })
            .collect();
        let results: Vec<_> = changers.into_iter().map(|changer| changer.join()).collect();
        stop.store(true, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok));
    });
    bench.settle();
    let after = bench.target.snapshot();
    assert_eq!((after.subsystems, after.listeners), (before.subsystems, before.listeners));
}

fn change_and_undo(target: &Arc<crate::target::Target>, thread: u32, round: u32) {
    let nsid = 10 + thread;
    let number = 10_000 + u128::from(thread) * 1000 + u128::from(round);
    target.add_namespace(SUBSYSTEM, nsid, MemBackend::new(number, 512, 8)).unwrap();
    let host = format!("nqn.2014-08.org.example:t{thread}");
    target.allow_host(SUBSYSTEM, &host).unwrap();
    let nqn = format!("nqn.2014-08.org.example:sub{thread}");
    target.create_subsystem(&spec(&nqn)).unwrap();
    let listener = target.add_listener("127.0.0.1:0".parse().unwrap()).unwrap();
    target.namespace_resized(SUBSYSTEM, 1).unwrap();
    target.remove_listener(listener).unwrap();
    drop(target.delete_subsystem(&nqn).unwrap());
    target.disallow_host(SUBSYSTEM, &host).unwrap();
    target.remove_namespace(SUBSYSTEM, nsid).unwrap();
}

/// What a host sends: ICReq and Connect; then, once that is answered, enable, Identify, Set Features with data, an event
/// request. The second value is where the first part ends.
fn a_host_s_bytes(subsystem: &str) -> (Vec<u8>, usize) {
    let now = Instant::now();
    let mut host = HostQueuePair::new(HostConfig { in_capsule_bytes: 1024, ..HostConfig::default() });
    let mut tcp = TcpQueuePair::new(TcpConfig::default(), Arc::new(HeapPool { largest_bytes: 8192 }));
    let mut intake = Intake::new(4096);
    let mut all = Vec::new();
    let mut connected = false;
    let mut first_part = 0;
    for step in 0..6 {
        match step {
            0 => {}
            1 => {
                let mut sqe = Sqe::new(fabrics::FABRICS);
                sqe.set_fabrics_type(fabrics::TYPE_CONNECT);
                ConnectCommand { recfmt: 0, qid: 0, sqsize: 31, cattr: 0, kato_ms: 5000 }.encode_into(&mut sqe.0);
                let data = ConnectData {
                    hostid: [5; 16],
                    cntlid: 0xFFFF,
                    subnqn: Nqn::parse(subsystem).unwrap().to_field(),
                    hostnqn: Nqn::parse("nqn.2014-08.org.example:noise").unwrap().to_field(),
                };
                host.submit(sqe, HostData::ToController(IoBuf::copy_of(&data.encode())), 0).unwrap();
            }
            2 => {
                let mut sqe = Sqe::new(fabrics::FABRICS);
                sqe.set_fabrics_type(fabrics::TYPE_PROPERTY_SET);
                let value = u64::from(Configuration::ENABLED.0);
                PropertyCommand { eight_bytes: false, attrib: 0, offset: properties::CC, value }
                    .encode_into(&mut sqe.0);
                host.submit(sqe, HostData::None, 0).unwrap();
            }
            3 => {
                let mut sqe = Sqe::new(admin::IDENTIFY);
                sqe.set_dword(10, 1);
                host.submit(sqe, HostData::FromController(IoBuf::heap(4096)), 0).unwrap();
            }
            4 => {
                let mut sqe = Sqe::new(admin::SET_FEATURES);
                sqe.set_dword(10, 0x16);
                host.submit(sqe, HostData::ToController(IoBuf::heap(512)), 0).unwrap();
            }
            _ => _ = host.submit(Sqe::new(admin::ASYNC_EVENT_REQUEST), HostData::None, 0).unwrap(),
        }
        let mut slices: Vec<IoSlice<'_>> = Vec::new();
        host.gather(&mut slices);
        let up: Vec<u8> = slices.iter().flat_map(|s| s.iter().copied()).collect();
        host.sent(up.len());
        tcp.receive_slice()[..up.len()].copy_from_slice(&up);
        tcp.received(up.len(), now);
        all.extend(up);
        while let Some(request) = intake.poll(&mut tcp, now) {
            if !std::mem::replace(&mut connected, true) {
                let params =
                    QueueParams { entries: 32, sq_flow_control: true, in_capsule_bytes: 8192, staging_bytes: 16384 };
                tcp.establish(params);
            }
            tcp.respond(request.slot, Cqe::of(CommandId(0), Status::SUCCESS), now);
        }
        let mut slices: Vec<IoSlice<'_>> = Vec::new();
        tcp.gather(&mut slices);
        let down: Vec<u8> = slices.iter().flat_map(|s| s.iter().copied()).collect();
        tcp.sent(down.len(), now);
        host.receive_slice()[..down.len()].copy_from_slice(&down);
        host.received(down.len());
        if step == 1 {
            host.configure(32, 1024);
            first_part = all.len();
        }
        while host.poll_completion().is_some() {}
    }
    (all, first_part)
}

/// Sends what a host sends, in pieces as `noise` has it, and reads what comes back; its length.
fn converse(bench: &Bench, bytes: &[u8], first_part: usize, noise: &mut Noise) -> usize {
    const IC_RESP_AND_CONNECT: usize = 128 + 24;
    let mut stream = TcpStream::connect(bench.address).unwrap();
    let (first, second) = bytes.split_at(first_part.min(bytes.len()));
    let mut answer = Vec::new();
    for (part, patience) in [(first, 200), (second, 10_000)] {
        let mut rest = part;
        while !rest.is_empty() {
            let piece = 1 + noise.below(rest.len().min(700));
            // Closed already: as it may be.
            if stream.write_all(&rest[..piece]).is_err() {
                break;
            }
            rest = &rest[piece..];
        }
        let last = patience > 1000;
        if last {
            let _ = stream.shutdown(Shutdown::Write);
        }
        stream.set_read_timeout(Some(Duration::from_millis(patience))).unwrap();
        let limit = if last { u64::MAX } else { IC_RESP_AND_CONNECT as u64 };
        let _ = Read::by_ref(&mut stream).take(limit).read_to_end(&mut answer);
    }
    answer.len()
}

/// A host's bytes with a few of them changed, cut or doubled, in pieces of any size: the target answers or closes, and
/// keeps nothing.
#[test]
fn nearly_right_bytes_leave_nothing_behind() {
    let bench = Bench::with(Limits { connect_timeout: Duration::from_millis(1500), ..Limits::default() });
    let mut noise = Noise(0x5EED);
    let good = [a_host_s_bytes(SUBSYSTEM), a_host_s_bytes(DISCOVERY_NQN)];
    let mut far = 0;
    for round in 0..400 {
        let (bytes, first_part) = &good[round % 2];
        let mut bytes = bytes.clone();
        // Every tenth stays as it is; in half of the others only what follows Connect is changed.
        let from = if noise.below(2) == 0 { 0 } else { *first_part };
        let changes = if round % 10 == 0 { 0 } else { noise.below(6) };
        for _ in 0..changes {
            let at = from + noise.below(bytes.len() - from);
            bytes[at] ^= 1 << noise.below(8);
        }
        if changes > 0 {
            match noise.below(4) {
                0 => bytes.truncate(noise.below(bytes.len())),
                1 => bytes.extend_from_within(from..),
                _ => {}
            }
        }
        far += usize::from(converse(&bench, &bytes, *first_part, &mut noise) >= 128 + 24 + 4096);
    }
    assert!(far >= 40, "only {far} got as far as Identify");
    bench.settle();
    let (mut admin, cntlid) = Client::admin(&bench.identity(1));
    assert!(admin.identify(1, 0).is_ok());
    Client::io(&bench.identity(1), 1, cntlid);
}
