//! An association: the admin queue, keep-alive in the background, and what the controller says of itself.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nvmf_target::buffer::IoBuf;
use nvmf_target::proto::host::{Completion, HostConfig, HostData};
use nvmf_target::wire::connect::{CATTR_DISABLE_SQ_FLOW_CONTROL, CNTLID_DYNAMIC, ConnectCommand, ConnectData};
use nvmf_target::wire::features::{NumberOfQueues, fid};
use nvmf_target::wire::identify::{IDENTIFY_BYTES, IdentifyController, IdentifyNamespace, cns, decode_namespace_list};
use nvmf_target::wire::log_pages::GetLogPage;
use nvmf_target::wire::nqn::NQN_FIELD_BYTES;
use nvmf_target::wire::opcode::{admin, fabrics};
use nvmf_target::wire::properties::{self, Capabilities, Configuration, ControllerStatus, PropertyCommand};
use nvmf_target::wire::{NamespaceId, Sqe, Status};

use super::{ConnectOptions, Connection, ConnectionError, IoQueue};
use crate::error::ToolError;

/// Entries of the admin queue, as Linux has them.
const ADMIN_ENTRIES: u16 = 32;
/// CAP.MPSMIN 0: MDTS counts pages of this size.
const PAGE_BYTES: u64 = 4096;
/// Longest transfer used, in bytes, where the controller allows more or any.
const MAX_TRANSFER_BYTES: u64 = 1 << 20;
/// Bytes of an I/O queue's command capsule without data.
const CAPSULE_HEAD_BYTES: u32 = 64;
/// CC.SHN 01b: normal shutdown.
const SHUTDOWN_NORMAL: u32 = 1 << 14;

/// A connected controller.
pub struct Controller {
    admin: Arc<Mutex<Connection>>,
    options: ConnectOptions,
    cntlid: u16,
    capabilities: Capabilities,
    identity: IdentifyController,
    keep_alive: Option<KeepAlive>,
}

/// A namespace as Identify describes it.
#[derive(Debug, Clone)]
pub struct Namespace {
    /// Its id.
    pub nsid: u32,
    /// Block size in bytes.
    pub block_bytes: u32,
    /// Size in blocks.
    pub block_count: u64,
    /// Longest transfer in bytes: MDTS, or what this host uses at most.
    pub max_transfer_bytes: u64,
    /// All that Identify Namespace said.
    pub identity: IdentifyNamespace,
}

impl Namespace {
    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.block_count.saturating_mul(u64::from(self.block_bytes))
    }

    /// Deallocated blocks read as zeroes (DLFEAT bits 2:0 = 1).
    pub fn deallocated_reads_zero(&self) -> bool {
        self.identity.dlfeat & 7 == 1
    }
}

impl Controller {
    /// Connects the admin queue, enables the controller and reads its identity.
    pub fn connect(options: &ConnectOptions) -> Result<Self, ConnectionError> {
        let mut admin = Connection::open(options, host_config(options, ADMIN_ENTRIES))?;
        let kato = options.keep_alive.map_or(0, |k| u32::try_from(k.as_millis()).unwrap_or(u32::MAX));
        let dw0 = connect_queue(&mut admin, options, 0, ADMIN_ENTRIES, CNTLID_DYNAMIC, kato)?;
        let cntlid = (dw0 & 0xFFFF) as u16;
        let capabilities = Capabilities::decode(get_property(&mut admin, properties::CAP, true)?);
        enable(&mut admin, capabilities)?;
        let identity = IdentifyController::decode(&identify(&mut admin, cns::CONTROLLER, 0)?);
        let admin = Arc::new(Mutex::new(admin));
        let keep_alive = options.keep_alive.map(|kato| KeepAlive::start(Arc::clone(&admin), kato));
        Ok(Self { admin, options: options.clone(), cntlid, capabilities, identity, keep_alive })
    }

    /// What the controller says of itself.
    pub fn identity(&self) -> &IdentifyController {
        &self.identity
    }

    /// Its id.
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Longest transfer in bytes.
    pub fn max_transfer_bytes(&self) -> u64 {
        match self.identity.mdts {
            0 => MAX_TRANSFER_BYTES,
            shift => PAGE_BYTES.checked_shl(u32::from(shift)).map_or(MAX_TRANSFER_BYTES, |b| b.min(MAX_TRANSFER_BYTES)),
        }
    }

    /// Asks for `wanted` I/O queues; how many of them there may be.
    pub fn negotiate_queues(&self, wanted: u16) -> Result<u16, ConnectionError> {
        let mut sqe = Sqe::new(admin::SET_FEATURES);
        let count = NumberOfQueues { submission: wanted.saturating_sub(1), completion: wanted.saturating_sub(1) };
        sqe.set_dword(10, u32::from(fid::NUMBER_OF_QUEUES)).set_dword(11, count.encode());
        let done = execute(&mut self.lock(), "Set Features (Number of Queues)", sqe, HostData::None)?;
        let granted = NumberOfQueues::decode(done.cqe.dw0);
        Ok(granted.submission.min(granted.completion).saturating_add(1).min(wanted))
    }

    /// Connects I/O queue `qid` (from 1).
    pub fn open_io_queue(&self, qid: u16) -> Result<IoQueue, ConnectionError> {
        let entries = self.options.queue_size.min(self.capabilities.mqes.saturating_add(1)).max(2);
        let mut connection = Connection::open(&self.options, host_config(&self.options, entries))?;
        connect_queue(&mut connection, &self.options, qid, entries, self.cntlid, 0)?;
        let capsule_bytes = self.identity.ioccsz.saturating_mul(16);
        let in_capsule = if self.identity.icdoff == 0 { capsule_bytes.saturating_sub(CAPSULE_HEAD_BYTES) } else { 0 };
        connection.configure(entries, in_capsule);
        Ok(IoQueue::new(connection, entries))
    }

    /// As many I/O queues as the options ask for and the controller grants.
    pub fn open_io_queues(&self) -> Result<Vec<IoQueue>, ConnectionError> {
        let granted = self.negotiate_queues(self.options.io_queues)?;
        (1..=granted).map(|qid| self.open_io_queue(qid)).collect()
    }

    /// The ids of all namespaces that this host may use.
    pub fn namespace_ids(&self) -> Result<Vec<u32>, ConnectionError> {
        let mut all: Vec<u32> = Vec::new();
        loop {
            let after = all.last().copied().unwrap_or(0);
            let page = decode_namespace_list(&identify(&mut self.lock(), cns::ACTIVE_NAMESPACES, after)?);
            // A list that doesn't rise would make this loop endless.
            if page.first().is_some_and(|first| *first <= after)
                || page.windows(2).any(|w| matches!(w, [a, b] if a >= b))
            {
                return Err(ConnectionError::BadAnswer { what: "namespace list" });
            }
            let full = page.len() >= nvmf_target::wire::identify::LIST_ENTRIES;
            all.extend(page);
            if !full {
                return Ok(all);
            }
        }
    }

    /// The namespace `nsid`.
    pub fn namespace(&self, nsid: u32) -> Result<Namespace, ToolError> {
        let have = self.namespace_ids()?;
        if !have.contains(&nsid) {
            return Err(ToolError::NoNamespace { nsid, have });
        }
        let identity = IdentifyNamespace::decode(&identify(&mut self.lock(), cns::NAMESPACE, nsid)?);
        let metadata_bytes = identity.lbaf0 & 0xFFFF;
        let block_bytes = identity.block_bytes().filter(|_| metadata_bytes == 0).ok_or(ToolError::Format { nsid })?;
        let max_transfer_bytes = self.max_transfer_bytes();
        Ok(Namespace { nsid, block_bytes, block_count: identity.nsze, max_transfer_bytes, identity })
    }

    /// The identification descriptors of a namespace (CNS 03h), raw.
    pub fn namespace_descriptors(&self, nsid: u32) -> Result<[u8; IDENTIFY_BYTES], ConnectionError> {
        identify(&mut self.lock(), cns::NAMESPACE_DESCRIPTORS, nsid)
    }

    /// `len_bytes` of a log page from `offset`.
    pub fn log_page(&self, lid: u8, offset: u64, len_bytes: u32) -> Result<IoBuf, ConnectionError> {
        let get =
            GetLogPage { lid, retain_event: true, len_bytes: u64::from(len_bytes), offset, offset_is_index: false };
        let mut sqe = Sqe::new(admin::GET_LOG_PAGE);
        sqe.set_namespace_id(NamespaceId::ALL);
        get.encode_into(&mut sqe.0);
        let done =
            execute(&mut self.lock(), "Get Log Page", sqe, HostData::FromController(IoBuf::heap(len_bytes as usize)))?;
        done.buffer.ok_or(ConnectionError::BadAnswer { what: "log page" })
    }

    /// Says goodbye: an orderly shutdown of the controller. The I/O queues must be gone.
    pub fn disconnect(mut self) -> Result<(), ConnectionError> {
        self.keep_alive = None;
        set_property(&mut self.lock(), properties::CC, u64::from(Configuration::ENABLED.0 | SHUTDOWN_NORMAL))
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A thread that panicked with the lock held leaves a connection that is at worst closed.
        self.admin.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn host_config(options: &ConnectOptions, entries: u16) -> HostConfig {
    HostConfig {
        header_digest: options.header_digest,
        data_digest: options.data_digest,
        entries,
        ..HostConfig::default()
    }
}

/// Connect (NVMe Base 2.0 §6.3); gives dword 0 of the answer.
fn connect_queue(
    connection: &mut Connection,
    options: &ConnectOptions,
    qid: u16,
    entries: u16,
    cntlid: u16,
    kato_ms: u32,
) -> Result<u32, ConnectionError> {
    let mut sqe = Sqe::new(fabrics::FABRICS);
    sqe.set_fabrics_type(fabrics::TYPE_CONNECT);
    let cattr = if options.disable_sq_flow_control { CATTR_DISABLE_SQ_FLOW_CONTROL } else { 0 };
    let command = ConnectCommand { recfmt: 0, qid, sqsize: entries.saturating_sub(1), cattr, kato_ms };
    command.encode_into(&mut sqe.0);
    let data = ConnectData {
        hostid: *options.host_id.as_bytes(),
        cntlid,
        subnqn: name_field(&options.subsystem_nqn),
        hostnqn: name_field(&options.host_nqn),
    };
    connection.submit(sqe, HostData::ToController(IoBuf::copy_of(&data.encode())), 0)?;
    let done = connection.wait()?;
    if done.cqe.status.is_success() {
        return Ok(done.cqe.dw0);
    }
    let what = if qid == 0 { "the association" } else { "an I/O queue" };
    Err(ConnectionError::Refused { what, status: done.cqe.status, dw0: done.cqe.dw0 })
}

fn name_field(name: &str) -> [u8; NQN_FIELD_BYTES] {
    let mut field = [0u8; NQN_FIELD_BYTES];
    // The last byte stays NUL.
    for (to, from) in field.iter_mut().take(NQN_FIELD_BYTES - 1).zip(name.bytes()) {
        *to = from;
    }
    field
}

fn execute(
    connection: &mut Connection,
    what: &'static str,
    sqe: Sqe,
    data: HostData,
) -> Result<Completion, ConnectionError> {
    let wanted = if let HostData::FromController(buffer) = &data { buffer.len() } else { 0 };
    connection.submit(sqe, data, 0)?;
    let done = connection.wait()?;
    if !done.cqe.status.is_success() {
        return Err(ConnectionError::Admin { what, status: done.cqe.status });
    }
    if !done.intact {
        return Err(ConnectionError::Admin { what, status: Status::TRANSIENT_TRANSPORT_ERROR });
    }
    if done.received_bytes as usize != wanted {
        return Err(ConnectionError::ShortRead { wanted, received: done.received_bytes as usize });
    }
    Ok(done)
}

fn identify(connection: &mut Connection, cns: u8, nsid: u32) -> Result<[u8; IDENTIFY_BYTES], ConnectionError> {
    let mut sqe = Sqe::new(admin::IDENTIFY);
    sqe.set_namespace_id(NamespaceId(nsid)).set_dword(10, u32::from(cns));
    let done = execute(connection, "Identify", sqe, HostData::FromController(IoBuf::heap(IDENTIFY_BYTES)))?;
    let bytes = done.buffer.as_deref().and_then(|b| b.first_chunk::<IDENTIFY_BYTES>().copied());
    bytes.ok_or(ConnectionError::BadAnswer { what: "Identify data" })
}

fn property(fctype: u8, command: PropertyCommand) -> Sqe {
    let mut sqe = Sqe::new(fabrics::FABRICS);
    sqe.set_fabrics_type(fctype);
    command.encode_into(&mut sqe.0);
    sqe
}

fn get_property(connection: &mut Connection, offset: u32, eight_bytes: bool) -> Result<u64, ConnectionError> {
    let command = PropertyCommand { eight_bytes, attrib: 0, offset, value: 0 };
    let done = execute(connection, "Property Get", property(fabrics::TYPE_PROPERTY_GET, command), HostData::None)?;
    Ok(done.cqe.result())
}

fn set_property(connection: &mut Connection, offset: u32, value: u64) -> Result<(), ConnectionError> {
    let command = PropertyCommand { eight_bytes: false, attrib: 0, offset, value };
    execute(connection, "Property Set", property(fabrics::TYPE_PROPERTY_SET, command), HostData::None)?;
    Ok(())
}

/// Sets CC.EN and waits for CSTS.RDY, at most CAP.TO (NVMe Base 2.0 §3.5.3).
fn enable(connection: &mut Connection, capabilities: Capabilities) -> Result<(), ConnectionError> {
    set_property(connection, properties::CC, u64::from(Configuration::ENABLED.0))?;
    let limit = Duration::from_millis(500 * u64::from(capabilities.timeout_500ms.max(1)));
    let start = Instant::now();
    loop {
        let status = ControllerStatus::decode(get_property(connection, properties::CSTS, false)? as u32);
        if status.ready {
            return Ok(());
        }
        if start.elapsed() > limit {
            return Err(ConnectionError::NotReady(limit));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A thread that sends Keep Alive three times per time-out, until dropped.
struct KeepAlive {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl KeepAlive {
    fn start(admin: Arc<Mutex<Connection>>, kato: Duration) -> Self {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let shared = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped_within(&shared, kato / 3) {
                let mut admin = admin.lock().unwrap_or_else(PoisonError::into_inner);
                // When the admin connection is lost, the target ends the I/O queues; their users say so.
                if execute(&mut admin, "Keep Alive", Sqe::new(admin::KEEP_ALIVE), HostData::None).is_err() {
                    return;
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

fn stopped_within(stop: &(Mutex<bool>, Condvar), wait: Duration) -> bool {
    let guard = stop.0.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = stop.1.wait_timeout_while(guard, wait, |stopped| !*stopped);
    *waited.unwrap_or_else(PoisonError::into_inner).0
}

impl Drop for KeepAlive {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // It can only have panicked by a bug of ours, which its message has already told.
            let _ = thread.join();
        }
    }
}
