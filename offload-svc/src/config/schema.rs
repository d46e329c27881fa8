//! The configuration file's schema: every section and key, its type and its default.
//!
//! Owns names and defaults; `configs/example.toml` documents them and a test keeps the two together. Must not know
//! what a key is used for. Invariant: no secret ever stands in a configuration, only the path of a key file.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::names::{Nqn, Serial, VolumeName};
use super::values::{Address, BackendSpec, BlockSize, ByteSize, Cipher, Compression, CpuList, MemberSpec};
use crate::pool::{Layout, MountOptions};

/// A whole configuration.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The process: management socket, log, shutdown.
    pub service: Service,
    /// The data path's threads.
    pub reactors: Reactors,
    /// The data path's buffers.
    pub buffers: Buffers,
    /// What hosts may ask for.
    pub limits: Limits,
    /// The pool; without members there is none.
    pub pool: Pool,
    /// Volumes of the pool.
    #[serde(rename = "volume")]
    pub volumes: Vec<Volume>,
    /// Subsystems.
    #[serde(rename = "subsystem")]
    pub subsystems: Vec<Subsystem>,
    /// Addresses to listen on.
    #[serde(rename = "listener")]
    pub listeners: Vec<Listener>,
}

/// `[service]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Service {
    /// Unix socket of the management API.
    pub socket: PathBuf,
    /// The changes made at run time; beside the socket where it is left out ([`Service::state_file`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<PathBuf>,
    /// What to log, in tracing's filter syntax.
    pub log: String,
    /// How log lines look.
    pub log_format: LogFormat,
    /// How long a stop waits for requests under way.
    pub drain_timeout_ms: u64,
    /// Memory the service may take; 0 is what the machine, its control group and its limits leave.
    pub memory: ByteSize,
}

impl Default for Service {
    fn default() -> Self {
        Self {
            socket: PathBuf::from("/run/sluice/control.sock"),
            state: None,
            log: "info".to_owned(),
            log_format: LogFormat::Text,
            drain_timeout_ms: 10_000,
            memory: ByteSize(0),
        }
    }
}

impl Service {
    /// Where the changes made at run time are kept. The default is the socket's path with the ending `.state.toml`, so that
    /// each service has its own; what would stand in /run, which a reboot empties, stands in /var/lib, but for users' own
    /// folders there.
    pub fn state_file(&self) -> PathBuf {
        if let Some(file) = &self.state {
            return file.clone();
        }
        let beside = self.socket.with_extension("state.toml");
        let volatile = ["/run", "/var/run"].iter().find_map(|run| beside.strip_prefix(run).ok());
        let volatile = volatile.filter(|rest| !rest.starts_with("user"));
        volatile.map_or_else(|| beside.clone(), |rest| Path::new("/var/lib").join(rest))
    }
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// `[reactors]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reactors {
    /// How many, where `cpus` is left out; 0 is one for each CPU that the process may use, at most 8.
    pub count: u16,
    /// The CPUs to pin them to, one each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuList>,
    /// How long an idle reactor polls before it sleeps.
    pub spin_us: u64,
    /// DPDK's memory: huge pages, or not.
    pub hugepages: HugePages,
    /// Slots of each ring between two reactors; a power of two.
    pub ring_slots: u32,
}

impl Default for Reactors {
    fn default() -> Self {
        Self { count: 0, cpus: None, spin_us: 20, hugepages: HugePages::Auto, ring_slots: 1024 }
    }
}

/// Whether DPDK's memory lies in huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// Where enough of them are free.
    Auto,
    /// Always; the start fails without.
    On,
    /// Never.
    Off,
}

/// `[buffers]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Buffers {
    /// Memory for I/O buffers, of all sizes together.
    pub memory: ByteSize,
}

impl Default for Buffers {
    fn default() -> Self {
        Self { memory: ByteSize::mib(256) }
    }
}

/// `[limits]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Associations (one a host and subsystem) at a time.
    pub hosts: u16,
    /// I/O queues of one association.
    pub queues: u16,
    /// Entries of one queue.
    pub queue_depth: u16,
    /// In-capsule data of I/O queues.
    pub in_capsule: ByteSize,
    /// Largest transfer of one command (MDTS); a power of two of 4 KiB.
    pub mdts: ByteSize,
    /// How long a new connection may take until its Connect is done.
    pub connect_timeout_ms: u64,
    /// How long a host may leave its data unread before it is cut.
    pub slow_reader_timeout_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            hosts: 64,
            queues: 16,
            queue_depth: 128,
            in_capsule: ByteSize::kib(8),
            mdts: ByteSize::mib(1),
            connect_timeout_ms: 5_000,
            slow_reader_timeout_ms: 30_000,
        }
    }
}

/// `[pool]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pool {
    /// Data shards of a stripe.
    pub k: u8,
    /// Parity shards of a stripe: how many members may be lost.
    pub m: u8,
    /// The members, k+m of them, in the order in which they were first given.
    pub members: Vec<MemberSpec>,
    /// Blank devices, of which one takes over where a member is away for too long.
    pub spares: Vec<MemberSpec>,
    /// How long a member may be away before a spare takes over.
    pub spare_after_ms: u64,
    /// Size of a `file:` member that is not there yet.
    pub member_size: ByteSize,
    /// Size of one segment on each member.
    pub segment_size: ByteSize,
    /// After this time without an answer a member is passed by.
    pub member_timeout_ms: u64,
    /// A read that a member has not answered by then is served from the others; 0: never.
    pub slow_read_ms: u64,
    /// Bytes a second that the filling of a member reads and writes at most; 0: no limit.
    pub rebuild_rate: ByteSize,
    /// Bytes a second that a scrub reads at most; 0: no limit.
    pub scrub_rate: ByteSize,
    /// A scrub begins so long after the last one; 0: only when it is asked for.
    pub scrub_interval_s: u64,
    /// While a member is filled or a scrub runs, 99 of 100 requests should be answered within this time.
    pub foreground_p99_ms: u64,
    /// A checkpoint is taken at least this often while there are writes.
    pub checkpoint_interval_ms: u64,
    /// Segments that a mount reads at most.
    pub max_replay_segments: u32,
    /// Memory for the volumes' maps: a cache of their pages, and changes that are not in pages yet. Maps may be many times as large.
    pub map_memory: ByteSize,
    /// A file outside the pool that keeps how far the pool has come, so that members which are all rolled back are noticed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anchor: Option<PathBuf>,
    /// The key-encryption key: 32 bytes, made at the first start with mode 0600.
    pub key_file: PathBuf,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            k: 4,
            m: 2,
            members: Vec::new(),
            spares: Vec::new(),
            spare_after_ms: 300_000,
            member_size: ByteSize::gib(1),
            segment_size: ByteSize::mib(4),
            member_timeout_ms: 2_000,
            slow_read_ms: 250,
            rebuild_rate: ByteSize(0),
            scrub_rate: ByteSize::mib(64),
            scrub_interval_s: 0,
            foreground_p99_ms: 20,
            checkpoint_interval_ms: 30_000,
            max_replay_segments: 96,
            map_memory: ByteSize::gib(1),
            anchor: None,
            key_file: PathBuf::from("/etc/sluice/pool.key"),
        }
    }
}

impl Pool {
    /// What a format makes.
    pub fn layout(&self) -> Layout {
        Layout {
            data_shards: self.k,
            parity_shards: self.m,
            // At most 64 MiB: checked.
            segment_bytes: u32::try_from(self.segment_size.bytes()).unwrap_or(u32::MAX),
            ..Layout::default()
        }
    }

    /// How a mounted pool behaves.
    pub fn mount_options(&self) -> MountOptions {
        MountOptions {
            member_timeout: Duration::from_millis(self.member_timeout_ms),
            max_replay_segments: self.max_replay_segments,
            checkpoint_interval: Duration::from_millis(self.checkpoint_interval_ms),
            slow_read: Duration::from_millis(self.slow_read_ms),
            rebuild_rate: self.rebuild_rate.bytes(),
            scrub_rate: self.scrub_rate.bytes(),
            scrub_interval: Duration::from_secs(self.scrub_interval_s),
            foreground_p99: Duration::from_millis(self.foreground_p99_ms),
            map_bytes_max: self.map_memory.bytes(),
            ..MountOptions::default()
        }
    }
}

/// `[[volume]]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Volume {
    /// Its name, unique in the pool.
    pub name: VolumeName,
    /// Its size as hosts see it.
    pub size: ByteSize,
    /// Its logical block size.
    #[serde(default = "four_kib_blocks")]
    pub block_size: BlockSize,
    /// How its data is compressed.
    #[serde(default)]
    pub compression: Compression,
    /// How its data is encrypted.
    #[serde(default)]
    pub cipher: Cipher,
    /// The snapshot or volume of the pool that it begins as, where it is made; empty by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<VolumeName>,
}

fn four_kib_blocks() -> BlockSize {
    BlockSize::B4096
}

/// `[[subsystem]]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subsystem {
    /// Its name.
    pub nqn: Nqn,
    /// Its serial number; made from the name where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<Serial>,
    /// Lets every host in; otherwise only `hosts`.
    #[serde(default)]
    pub allow_any_host: bool,
    /// The hosts that may connect.
    #[serde(default)]
    pub hosts: Vec<Nqn>,
    /// Its namespaces.
    #[serde(default, rename = "namespace")]
    pub namespaces: Vec<Namespace>,
}

/// `[[subsystem.namespace]]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Namespace {
    /// Its id, 1 and up.
    pub nsid: u32,
    /// What stands behind it.
    pub backend: BackendSpec,
    /// Block size of a plain back end; a pool volume has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<BlockSize>,
}

/// `[[listener]]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listener {
    /// IPv4 or IPv6 address.
    pub address: Address,
    /// TCP port.
    #[serde(default = "nvme_port")]
    pub port: u16,
}

fn nvme_port() -> u16 {
    4420
}
