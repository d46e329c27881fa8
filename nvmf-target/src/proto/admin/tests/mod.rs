//! The admin queue against the host's machine, in memory, on virtual time.

use std::io::IoSlice;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::facts::ControllerFacts;
use super::identify::{NamespaceView, Namespaces};
use super::intake::Intake;
use super::queue::{AdminQueuePair, Errand};
use super::*;
use crate::backend::Geometry;
use crate::buffer::{HeapPool, IoBuf};
use crate::proto::connect::{self, QueueLimits};
use crate::proto::controller_shared::{ControllerLimits, NamespaceTable};
use crate::proto::discovery::DiscoveryView;
use crate::proto::host::{Completion, HostConfig, HostData, HostQueuePair};
use crate::proto::queue_shared::QueueShared;
use crate::proto::tcp::{QueueParams, TcpConfig, TcpQueuePair};
use crate::wire::connect::{ConnectCommand, ConnectData, accepted_dw0};
use crate::wire::features::{AsyncEvent, AsyncEventConfig, fid};
use crate::wire::identify::{IdentifyController, IdentifyNamespace, decode_namespace_list};
use crate::wire::log_pages::{GetLogPage, lid};
use crate::wire::nqn::Nqn;
use crate::wire::properties::{self, Configuration};
use crate::wire::{ControllerId, Cqe};

/// The bytes that a machine has ready.
macro_rules! gathered {
    ($machine:expr) => {{
        let mut slices: Vec<IoSlice<'_>> = Vec::new();
        $machine.gather(&mut slices);
        slices.iter().flat_map(|s| s.iter().copied()).collect::<Vec<u8>>()
    }};
}

mod commands;

const HOST: &str = "nqn.2014-08.org.example:host";
const SUBSYSTEM: &str = "nqn.2014-08.org.example:subsystem";

/// Three namespaces: 1 and 3 of 4 KiB blocks, 3 write-protected, 1024 of 512.
struct Three(Mutex<bool>);

impl Namespaces for Three {
    fn get(&self, nsid: u32) -> Option<NamespaceView> {
        let block_bytes = match nsid {
            1 | 3 => 4096,
            1024 => 512,
            _ => return None,
        };
        let geometry = Geometry {
            block_bytes,
            block_count: 1000 + u64::from(nsid),
            used_blocks: 10,
            deallocate: true,
            preferred_write_blocks: 16,
            volatile_write_cache: *self.0.lock().unwrap(),
        };
        Some(NamespaceView { geometry, uuid: Uuid::from_u128(u128::from(nsid)), write_protected: nsid == 3 })
    }
    fn after(&self, nsid: u32) -> Vec<u32> {
        [1, 3, 1024].into_iter().filter(|&id| id > nsid).collect()
    }
    fn controllers(&self) -> Vec<u16> {
        vec![1, 7, 9]
    }
}

struct Log(Mutex<DiscoveryView>);

impl DiscoverySource for Log {
    fn view(&self) -> DiscoveryView {
        self.0.lock().unwrap().clone()
    }
}

/// Both ends of a connected admin queue.
struct Both {
    host: HostQueuePair,
    queue: AdminQueuePair,
    shared: Arc<ControllerShared>,
    now: Instant,
    done: Vec<Completion>,
}

fn facts(kato_ms: u32) -> ControllerFacts {
    ControllerFacts {
        subsystem: Nqn::parse(SUBSYSTEM).unwrap(),
        serial: "SN".into(),
        model: "Model".into(),
        firmware: "1.0".into(),
        cntlid: 7,
        hostid: [9; 16],
        mdts: 8,
        in_capsule_bytes: 8192,
        max_queue_entries: 128,
        max_io_queues: 4,
        max_nsid: 1024,
        kato_ms,
        powered_on: Instant::now(),
    }
}

impl Both {
    fn io() -> Self {
        Self::new(Role::Io(Arc::new(Three(Mutex::new(false)))), 5000)
    }

    fn discovery(entries: usize) -> (Self, Arc<Log>) {
        let nqns: Vec<Nqn> =
            (0..entries).map(|n| Nqn::parse(&format!("nqn.2014-08.org.example:s{n}")).unwrap()).collect();
        let ports = [1, 2].map(|id| crate::proto::discovery::Port {
            id,
            address: std::net::SocketAddr::from(([192, 0, 2, id as u8], 4420)),
        });
        let entries = crate::proto::discovery::entries(nqns.iter(), &ports, [192, 0, 2, 1].into());
        let log = Arc::new(Log(Mutex::new(DiscoveryView { generation: 5, entries })));
        (Self::new(Role::Discovery(Arc::clone(&log) as _), 0), log)
    }

    /// Connects and enables.
    fn new(role: Role, kato_ms: u32) -> Self {
        let mut both = Self::connect(role, kato_ms);
        let cqe = both.set_property(properties::CC, u64::from(Configuration::ENABLED.0));
        assert!(cqe.status.is_success());
        both
    }

    fn connect(role: Role, kato_ms: u32) -> Self {
        let now = Instant::now();
        let pool = Arc::new(HeapPool { largest_bytes: 8192 });
        let mut tcp = TcpQueuePair::new(TcpConfig::default(), pool);
        let mut host = HostQueuePair::new(HostConfig { data_digest: true, ..HostConfig::default() });
        let mut intake = Intake::new(4096);
        let facts = facts(kato_ms);
        pump_tcp(&mut host, &mut tcp, now);
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(fabrics::TYPE_CONNECT);
        ConnectCommand { recfmt: 0, qid: 0, sqsize: 31, cattr: 0, kato_ms }.encode_into(&mut sqe.0);
        let data = ConnectData {
            hostid: [9; 16],
            cntlid: 0xFFFF,
            subnqn: facts.subsystem.to_field(),
            hostnqn: Nqn::parse(HOST).unwrap().to_field(),
        };
        host.submit(sqe, HostData::ToController(IoBuf::copy_of(&data.encode())), 1).unwrap();
        pump_tcp(&mut host, &mut tcp, now);
        let request = intake.poll(&mut tcp, now).expect("Connect has come");
        let limits = QueueLimits { max_queue_entries: 128, max_io_queues: 4 };
        let checked = connect::check(&request.sqe.0, &request.data, &limits).unwrap();
        assert_eq!((checked.host.as_str(), checked.subsystem.as_str()), (HOST, SUBSYSTEM));
        tcp.establish(QueueParams {
            entries: checked.queue_entries,
            sq_flow_control: true,
            in_capsule_bytes: 8192,
            staging_bytes: 16384,
        });
        let cqe = Cqe { dw0: accepted_dw0(7), ..Cqe::of(CommandId(0), Status::SUCCESS) };
        tcp.respond(request.slot, cqe, now);
        pump_tcp(&mut host, &mut tcp, now);
        assert_eq!(host.poll_completion().expect("accepted").cqe.dw0, 7);
        host.configure(32, 8192);

        let errors = Arc::new(SharedErrorLog::default());
        let table = Arc::new(NamespaceTable::default());
        let sink = Arc::clone(&errors) as Arc<dyn ErrorSink>;
        let shared = Arc::new(ControllerShared::new(ControllerId(7), ControllerLimits::default(), table, Some(sink)));
        let controller = AdminController::new(role, facts, Arc::clone(&shared), errors, now);
        Self { host, queue: AdminQueuePair::new(tcp, controller), shared, now, done: Vec::new() }
    }

    /// Moves bytes both ways until nothing moves.
    fn pump(&mut self) {
        loop {
            let up = gathered!(self.host);
            self.host.sent(up.len());
            let mut rest = &up[..];
            while !rest.is_empty() {
                let into = self.queue.receive_slice();
                let n = into.len().min(rest.len());
                assert!(n > 0, "the admin queue stopped reading");
                into[..n].copy_from_slice(&rest[..n]);
                rest = &rest[n..];
                self.queue.received(n, self.now);
            }
            let down = gathered!(self.queue);
            self.queue.sent(down.len(), self.now);
            host_receives(&mut self.host, &down);
            while let Some(done) = self.host.poll_completion() {
                self.done.push(done);
            }
            if up.is_empty() && down.is_empty() {
                return;
            }
        }
    }

    /// Carries one command out and gives its completion.
    fn run(&mut self, sqe: Sqe, data: HostData) -> Completion {
        let cid = self.host.submit(sqe, data, 0).unwrap();
        self.pump();
        let at = self.done.iter().position(|c| c.cid == cid).expect("an answer");
        self.done.remove(at)
    }

    fn plain(&mut self, sqe: Sqe) -> Cqe {
        self.run(sqe, HostData::None).cqe
    }

    fn reads(&mut self, sqe: Sqe, len_bytes: usize) -> Result<Vec<u8>, Status> {
        let done = self.run(sqe, HostData::FromController(IoBuf::heap(len_bytes)));
        assert!(done.intact);
        if !done.cqe.status.is_success() {
            return Err(done.cqe.status.code());
        }
        Ok(done.buffer.unwrap()[..done.received_bytes as usize].to_vec())
    }

    fn set_property(&mut self, offset: u32, value: u64) -> Cqe {
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(fabrics::TYPE_PROPERTY_SET);
        PropertyCommand { eight_bytes: false, attrib: 0, offset, value }.encode_into(&mut sqe.0);
        self.plain(sqe)
    }

    fn property(&mut self, offset: u32, eight_bytes: bool) -> Cqe {
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(fabrics::TYPE_PROPERTY_GET);
        PropertyCommand { eight_bytes, attrib: 0, offset, value: 0 }.encode_into(&mut sqe.0);
        self.plain(sqe)
    }

    fn identify(&mut self, cns: u8, nsid: u32, csi: u8) -> Result<Vec<u8>, Status> {
        let mut sqe = Sqe::new(admin::IDENTIFY);
        sqe.set_namespace_id(NamespaceId(nsid)).set_dword(10, u32::from(cns)).set_dword(11, u32::from(csi) << 24);
        self.reads(sqe, 4096)
    }

    fn log(&mut self, lid: u8, offset: u64, len_bytes: u64) -> Result<Vec<u8>, Status> {
        self.log_retaining(lid, offset, len_bytes, false)
    }

    fn log_retaining(&mut self, lid: u8, offset: u64, len_bytes: u64, retain: bool) -> Result<Vec<u8>, Status> {
        let mut sqe = Sqe::new(admin::GET_LOG_PAGE);
        sqe.set_namespace_id(NamespaceId::ALL);
        GetLogPage { lid, retain_event: retain, len_bytes, offset, offset_is_index: false }.encode_into(&mut sqe.0);
        self.reads(sqe, len_bytes as usize)
    }

    fn feature(&mut self, opcode: u8, dw10: u32, dw11: u32) -> Cqe {
        let mut sqe = Sqe::new(opcode);
        sqe.set_dword(10, dw10).set_dword(11, dw11);
        self.plain(sqe)
    }

    fn set(&mut self, fid: u8, dw11: u32) -> Cqe {
        self.feature(admin::SET_FEATURES, u32::from(fid), dw11)
    }

    fn get(&mut self, fid: u8) -> Cqe {
        self.feature(admin::GET_FEATURES, u32::from(fid), 0)
    }

    fn request_event(&mut self) -> CommandId {
        let cid = self.host.submit(Sqe::new(admin::ASYNC_EVENT_REQUEST), HostData::None, 0).unwrap();
        self.pump();
        cid
    }
}

fn host_receives(host: &mut HostQueuePair, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let into = host.receive_slice();
        let n = into.len().min(bytes.len());
        assert!(n > 0, "the host stopped reading");
        into[..n].copy_from_slice(&bytes[..n]);
        bytes = &bytes[n..];
        host.received(n);
    }
}

fn pump_tcp(host: &mut HostQueuePair, tcp: &mut TcpQueuePair, now: Instant) {
    loop {
        let up = gathered!(host);
        host.sent(up.len());
        let mut rest = &up[..];
        while !rest.is_empty() {
            let into = tcp.receive_slice();
            let n = into.len().min(rest.len());
            into[..n].copy_from_slice(&rest[..n]);
            rest = &rest[n..];
            tcp.received(n, now);
        }
        let down = gathered!(tcp);
        tcp.sent(down.len(), now);
        host_receives(host, &down);
        if up.is_empty() && down.is_empty() {
            return;
        }
    }
}
