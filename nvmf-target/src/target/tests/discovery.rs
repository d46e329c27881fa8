//! The discovery service over loopback.

use std::time::Duration;

use super::client::{Client, Identity};
use super::{Bench, SUBSYSTEM, spec};
use crate::proto::host::HostData;
use crate::wire::features::{AsyncEvent, AsyncEventConfig, fid};
use crate::wire::log_pages::{DiscoveryEntry, GetLogPage, decode_discovery_header};
use crate::wire::nqn::DISCOVERY_NQN;
use crate::wire::opcode::admin;
use crate::wire::{CommandId, Sqe, Status};

const A: &str = "nqn.2014-08.org.example:a";
const B: &str = "nqn.2014-08.org.example:b";

struct Discoverer {
    client: Client,
}

impl Discoverer {
    fn new(bench: &Bench, number: u8) -> Self {
        let identity = Identity { subsystem: DISCOVERY_NQN.into(), ..bench.identity(number) };
        Self { client: Client::admin(&identity).0 }
    }

    fn read(&mut self, offset: u64, len_bytes: u64) -> Vec<u8> {
        let mut sqe = Sqe::new(admin::GET_LOG_PAGE);
        GetLogPage { lid: 0x70, retain_event: false, len_bytes, offset, offset_is_index: false }
            .encode_into(&mut sqe.0);
        self.client.admin_read(sqe, 0, len_bytes as usize).unwrap()
    }

    fn log(&mut self) -> (u64, Vec<DiscoveryEntry>) {
        let (generation, count) = decode_discovery_header(&self.read(0, 1024)).unwrap();
        let bytes = self.read(1024, count.max(1) * 1024);
        let entries = bytes.chunks_exact(1024).take(count as usize);
        (generation, entries.map(|e| DiscoveryEntry::decode(e.try_into().unwrap())).collect())
    }

    fn names(&mut self) -> Vec<String> {
        self.log().1.into_iter().map(|e| e.subnqn).collect()
    }

    fn ask_for_events(&mut self) -> CommandId {
        let mut set = Sqe::new(admin::SET_FEATURES);
        set.set_dword(10, u32::from(fid::ASYNC_EVENT_CONFIG)).set_dword(11, AsyncEventConfig::DISCOVERY_LOG_CHANGE);
        self.client.run(set, HostData::None).unwrap();
        self.client.submit(Sqe::new(admin::ASYNC_EVENT_REQUEST), HostData::None).unwrap()
    }
}

/// H41: each host sees what it may connect to, and hears of changes to that only.
#[test]
fn h41_hosts_see_what_they_may_connect_to() {
    let bench = Bench::new();
    for (nqn, host) in [(A, 1), (B, 2)] {
        bench.target.create_subsystem(&spec(nqn)).unwrap();
        bench.target.allow_host(nqn, &bench.identity(host).host).unwrap();
    }
    let mut hosts: Vec<_> = (1..=3).map(|n| Discoverer::new(&bench, n)).collect();
    assert_eq!(hosts[0].names(), [A, SUBSYSTEM]);
    assert_eq!(hosts[1].names(), [B, SUBSYSTEM]);
    assert_eq!(hosts[2].names(), [SUBSYSTEM]);
    let events: Vec<_> = hosts.iter_mut().map(Discoverer::ask_for_events).collect();
    bench.target.disallow_host(A, &bench.identity(1).host).unwrap();
    let told = hosts[0].client.finish(events[0]).unwrap();
    assert_eq!(AsyncEvent::decode(told.cqe.dw0), AsyncEvent::DISCOVERY_LOG_CHANGE);
    assert_eq!(hosts[0].names(), [SUBSYSTEM]);
    for n in [1, 2] {
        assert!(!hosts[n].client.answered(events[n], Duration::from_millis(60)), "host {} has nothing new", n + 1);
    }
    // A change that concerns everyone reaches everyone.
    bench.target.add_listener("127.0.0.1:0".parse().unwrap()).unwrap();
    for n in [1, 2] {
        hosts[n].client.finish(events[n]).unwrap();
    }
    assert_eq!(hosts[2].names(), [SUBSYSTEM, SUBSYSTEM], "once a listener");
}

/// H39, over the wire: 40 subsystems on 2 listeners are 80 entries, in any pieces.
#[test]
fn h39_a_long_log_is_whole() {
    let bench = Bench::new();
    bench.target.delete_subsystem(SUBSYSTEM).unwrap();
    bench.target.add_listener("127.0.0.1:0".parse().unwrap()).unwrap();
    for n in 0..40 {
        let nqn = format!("nqn.2014-08.org.example:s{n:02}");
        bench.target.create_subsystem(&spec(&nqn)).unwrap();
        bench.target.set_allow_any_host(&nqn, true).unwrap();
    }
    let mut host = Discoverer::new(&bench, 1);
    let whole = host.read(0, 81 * 1024);
    assert_eq!(decode_discovery_header(&whole).map(|(_, count)| count), Some(80));
    for piece in [1024u64, 4096, 16384] {
        let pieces: Vec<u8> =
            (0..81 * 1024).step_by(piece as usize).flat_map(|at| host.read(at, piece.min(81 * 1024 - at))).collect();
        assert!(pieces == whole, "in pieces of {piece}");
    }
    let entry = DiscoveryEntry::decode(whole[1024..2048].try_into().unwrap());
    assert_eq!((entry.trtype, entry.adrfam, entry.subtype, entry.cntlid), (3, 1, 2, 0xFFFF));
    assert_eq!((entry.traddr.as_str(), entry.asqsz), ("127.0.0.1", 32));
}

/// H174: an IPv6 listener works and is told as one.
#[test]
fn h174_ipv6_listeners() {
    let bench = Bench::new();
    let address = match bench.target.add_listener("[::1]:0".parse().unwrap()) {
        Ok(address) => address,
        Err(error) => return println!("SKIPPED: no IPv6 on this machine: {error}"),
    };
    bench.target.remove_listener(bench.address).unwrap();
    let identity = Identity { address, subsystem: DISCOVERY_NQN.into(), ..bench.identity(1) };
    let mut host = Discoverer { client: Client::admin(&identity).0 };
    let (_, entries) = host.log();
    assert_eq!(entries.len(), 1);
    let port = address.port().to_string();
    assert_eq!((entries[0].adrfam, &*entries[0].traddr, &*entries[0].trsvcid), (2, "::1", &*port));
    let io = Identity { address, ..bench.identity(1) };
    let (_admin, cntlid) = Client::admin(&io);
    Client::io(&io, 1, cntlid);
}

#[test]
fn a_discovery_controller_has_no_io_queues() {
    let bench = Bench::new();
    let identity = Identity { subsystem: DISCOVERY_NQN.into(), ..bench.identity(1) };
    let (_admin, cntlid) = Client::admin(&identity);
    let (_, refused) = Client::connect(&identity, 1, cntlid).unwrap();
    assert_eq!(refused.status.code(), Status::CONNECT_INVALID_PARAMETERS);
}
