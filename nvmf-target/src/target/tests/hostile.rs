//! Peers that don't play by the rules, over real sockets.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::client::{Client, Identity, eventually, transfer};
use super::{BLOCK, Bench};
use crate::buffer::IoBuf;
use crate::proto::host::HostData;
use crate::target::Limits;
use crate::wire::log_pages::GetLogPage;
use crate::wire::nqn::DISCOVERY_NQN;
use crate::wire::opcode::{admin, nvm};
use crate::wire::{Sqe, Status};

fn hasty() -> Limits {
    Limits { connect_timeout: Duration::from_millis(1500), unconnected_per_peer: 8, ..Limits::default() }
}

/// Reads to the end; what the other side sent.
fn drain(mut stream: TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut bytes = Vec::new();
    // A reset is an end too.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

#[test]
fn half_open_connections_are_closed_and_shut_nobody_out() {
    let bench = Bench::with(hasty());
    let (mut admin, cntlid) = Client::admin(&bench.identity(1));
    let mut io = Client::io(&bench.identity(1), 1, cntlid);
    let idle: Vec<TcpStream> = (0..64).map(|_| TcpStream::connect(bench.address).unwrap()).collect();
    eventually("the flood is bounded", || bench.target.snapshot().connections <= 10);
    assert_eq!(io.write_blocks(1, 0, &[1; BLOCK], BLOCK).unwrap(), Status::SUCCESS);
    let started = Instant::now();
    for stream in idle {
        assert_eq!(drain(stream), b"");
    }
    assert!(started.elapsed() < Duration::from_secs(10));
    eventually("only the honest host is left", || bench.target.snapshot().connections == 2);
    Client::admin(&bench.identity(2));
    assert!(admin.identify(1, 0).is_ok());
}

/// H01 and its kind: nonsense in front of or instead of ICReq ends that connection alone, with a reason where the
/// protocol has one.
#[test]
fn h01_garbage_ends_its_own_connection_only() {
    let bench = Bench::with(hasty());
    let (mut admin, _) = Client::admin(&bench.identity(1));
    let mut ic_req = [0u8; 128];
    (ic_req[0], ic_req[2], ic_req[4]) = (0x00, 128, 128);
    let mut too_long = ic_req;
    too_long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut unknown_version = ic_req;
    unknown_version[8] = 0xFF;
    let mut capsule_first = [0u8; 72];
    (capsule_first[0], capsule_first[2], capsule_first[4]) = (0x04, 72, 72);
    let http = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec();
    for garbage in [too_long.to_vec(), unknown_version.to_vec(), capsule_first.to_vec(), http, vec![0xFF; 4096]] {
        let mut stream = TcpStream::connect(bench.address).unwrap();
        stream.write_all(&garbage).unwrap();
        let answer = drain(stream);
        assert_eq!(answer.first(), Some(&0x03), "C2HTermReq, not {:02x?}", answer.get(..8));
    }
    assert!(admin.identify(1, 0).is_ok());
    drop(admin);
    bench.settle();
}

#[test]
fn a_flood_of_connects_is_served_or_turned_away() {
    let bench = Bench::with(Limits { controllers: 16, unconnected_per_peer: 64, ..Limits::default() });
    let outcomes: Vec<Option<Status>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8u8)
            .map(|thread| {
                let bench = &bench;
                scope.spawn(move || {
                    let attempt = |n: u8| {
                        let identity = bench.identity(thread * 16 + n);
                        Client::connect(&identity, 0, 0xFFFF).ok().map(|(client, cqe)| (client, cqe.status))
                    };
                    // All at once: the connections stay open until the end.
                    (0..16).map(attempt).collect::<Vec<_>>()
                })
            })
            .collect();
        let all: Vec<_> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        assert!(bench.target.snapshot().controllers.len() <= 16);
        all.into_iter().map(|outcome| outcome.map(|(_, status)| status)).collect()
    });
    let accepted = outcomes.iter().filter(|o| **o == Some(Status::SUCCESS)).count();
    let busy = outcomes.iter().filter(|o| **o == Some(Status::CONNECT_CONTROLLER_BUSY)).count();
    assert_eq!(accepted, 16);
    assert!(busy >= 32, "{busy} were told to come again");
    let turned_away = outcomes.iter().filter(|o| o.is_none()).count();
    assert_eq!(accepted + busy + turned_away, 128, "{outcomes:?}");
    bench.settle();
    Client::admin(&bench.identity(1));
}

/// A host that asks for much and reads nothing is cut, on an admin queue and on an I/O queue.
#[test]
fn slow_readers_are_cut() {
    let bench = Bench::with(Limits { slow_reader_timeout: Duration::from_millis(400), ..Limits::default() });
    let discovery = Identity { subsystem: DISCOVERY_NQN.into(), ..bench.identity(1) };
    let (mut admin, _) = Client::admin(&discovery);
    let identity = bench.identity(2);
    let (_healthy, cntlid) = Client::admin(&identity);
    let mut io = Client::io(&identity, 1, cntlid);
    for _ in 0..30 {
        let mut sqe = Sqe::new(admin::GET_LOG_PAGE);
        GetLogPage { lid: 0x70, retain_event: true, len_bytes: 1 << 20, offset: 0, offset_is_index: false }
            .encode_into(&mut sqe.0);
        let _ = admin.submit(sqe, HostData::FromController(IoBuf::heap(1 << 20)));
        let _ = io.submit(transfer(nvm::READ, 1, 0, 256), HostData::FromController(IoBuf::heap(1 << 20)));
    }
    eventually("both are cut", || {
        let snapshot = bench.target.snapshot();
        snapshot.controllers.len() == 1 && snapshot.controllers[0].queues.is_empty()
    });
    let mut again = Client::io(&identity, 1, cntlid);
    assert_eq!(again.write_blocks(1, 0, &[1; BLOCK], BLOCK).unwrap(), Status::SUCCESS);
}

/// Runs in a process of its own, since it takes all file descriptors there are.
#[test]
fn the_listener_survives_a_lack_of_file_descriptors() {
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "target::tests::hostile::without_file_descriptors", "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "run by the_listener_survives_a_lack_of_file_descriptors"]
fn without_file_descriptors() {
    use nix::sys::resource::{Resource, setrlimit};
    let bench = Bench::new();
    let (mut admin, _) = Client::admin(&bench.identity(1));
    setrlimit(Resource::RLIMIT_NOFILE, 128, 128).unwrap();
    let mut taken: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).take(128).collect();
    // One descriptor for our own end; none is left for the target's.
    drop(taken.pop());
    let identity = bench.identity(2);
    let host = std::thread::spawn(move || Client::connect(&identity, 0, 0xFFFF).map(|(_, cqe)| cqe.status));
    std::thread::sleep(Duration::from_millis(500));
    assert!(!host.is_finished(), "nobody could have accepted it");
    assert!(admin.identify(1, 0).is_ok(), "others are served meanwhile");
    taken.clear();
    assert_eq!(host.join().unwrap().unwrap(), Status::SUCCESS);
}

/// H04: data for commands that never asked for it ends the connection; others go on.
#[test]
fn h04_unsolicited_data_ends_its_own_connection_only() {
    let bench = Bench::new();
    let identity = bench.identity(1);
    let (mut admin, cntlid) = Client::admin(&identity);
    let mut other = Client::io(&identity, 2, cntlid);
    for ttag in [0u16, 0xFFFF] {
        let io = Client::io(&identity, 1, cntlid);
        let mut pdu = vec![0u8; 24 + 4096];
        let plen = pdu.len() as u32;
        (pdu[0], pdu[1], pdu[2], pdu[3]) = (0x06, 1 << 2, 24, 24);
        pdu[4..8].copy_from_slice(&plen.to_le_bytes());
        pdu[10..12].copy_from_slice(&ttag.to_le_bytes());
        pdu[16..20].copy_from_slice(&4096u32.to_le_bytes());
        (&io.stream).write_all(&pdu).unwrap();
        let answer = drain(io.stream);
        assert_eq!(answer.first(), Some(&0x03), "C2HTermReq");
        assert!(matches!(answer.get(8), Some(1 | 2)), "FES 01h or 02h");
    }
    assert_eq!(other.write_blocks(1, 0, &[1; BLOCK], BLOCK).unwrap(), Status::SUCCESS);
    assert!(admin.identify(1, 0).is_ok());
}
