//! What the management API answers with.
//!
//! Owns the shape of the answers: numbers are exact, sizes in bytes, times in the unit of their name. Must not know how they
//! are shown. Invariant: a field, once there, keeps its name and meaning.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::config::Config;

/// `GET /v1/status`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The service's version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Since it was ready.
    pub uptime_ms: u64,
    /// `starting`, `serving`, `draining`.
    pub state: String,
    /// What unfinished work waits for, if anything is known to be slow.
    pub waits_for: String,
    /// What carries the data path: DPDK and its kind of memory, or plain threads.
    pub platform: String,
    /// The data path's threads.
    pub reactors: Vec<Reactor>,
    /// The data path's buffers.
    pub buffers: Vec<BufferClass>,
    /// Subsystems.
    pub subsystems: u64,
    /// Namespaces of all subsystems.
    pub namespaces: u64,
    /// Hosts connected (associations).
    pub controllers: u64,
    /// I/O queues of all of them.
    pub io_queues: u64,
    /// Where it listens.
    pub listeners: Vec<Listener>,
    /// Whether the pool serves, and how well; none without a pool.
    pub pool: Option<PoolHealth>,
}

/// How well the pool is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolHealth {
    /// `healthy`, `degraded` (members are missing, data is served), `failed` (more than m are).
    pub state: String,
    /// Members of the current set that serve.
    pub members_active: u64,
    /// Members of the pool.
    pub members_total: u64,
}

/// One thread of the data path.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Reactor {
    /// Its number.
    pub index: u64,
    /// Connections that it drives.
    pub queues: u64,
    /// Commands that it has completed.
    pub commands: u64,
    /// Bytes received from hosts.
    pub received_bytes: u64,
    /// Bytes sent to hosts.
    pub sent_bytes: u64,
    /// Rounds in which there was something to do.
    pub busy_polls: u64,
    /// Rounds in which there was nothing.
    pub idle_polls: u64,
    /// Times that it slept.
    pub sleeps: u64,
    /// Reads, writes and syncs of members and plain back ends.
    pub storage_ops: u64,
    /// Of these, the ones not answered yet.
    pub storage_in_flight: u64,
    /// Of these, the ones that failed.
    pub storage_errors: u64,
    /// Bytes read from members and plain back ends.
    pub storage_read_bytes: u64,
    /// Bytes written to them.
    pub storage_written_bytes: u64,
    /// Hosts cut because they left their data unread.
    pub slow_readers: u64,
    /// Queues ended since other hosts waited for buffers with which theirs did nothing.
    #[serde(default)]
    pub stalled: u64,
}

/// Buffers of one size.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BufferClass {
    /// `hosts` or `back ends`.
    pub users: String,
    /// The size.
    pub size_bytes: u64,
    /// How many there are.
    pub total: u64,
    /// How many are in use.
    pub used: u64,
    /// Commands that wait for one.
    pub waiting: u64,
}

/// `GET /v1/pool`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Its UUID.
    pub uuid: String,
    /// How well it is.
    pub health: PoolHealth,
    /// Data shards.
    pub k: u64,
    /// Parity shards.
    pub m: u64,
    /// A segment on each member.
    pub segment_bytes: u64,
    /// The epoch of the member set.
    pub epoch: u64,
    /// The members.
    pub members: Vec<Member>,
    /// Members of the configuration that could not be opened: which, and why.
    pub unopened: Vec<(String, String)>,
    /// The member that is being filled, or was the last to be; none if none was.
    #[serde(default)]
    pub rebuild: Option<Rebuild>,
    /// The scrub that runs, or ran last.
    #[serde(default)]
    pub scrub: Scrub,
    /// Where the space goes.
    pub space: Space,
    /// Stored bytes per byte of the user's, record headers included, parity not; none while nothing is stored.
    pub stored_bytes_per_user_byte: Option<f64>,
    /// The same with the parity of full stripes, `(k+m)/k`.
    pub rest_bytes_per_user_byte: Option<f64>,
    /// What the mount did.
    pub mount: MountReport,
    /// What would tell that all members were rolled back together; none where none is configured.
    #[serde(default)]
    pub anchor: Option<Anchor>,
    /// What mounts have gone on without, by force; none if none has.
    #[serde(default)]
    pub given_up: Option<GivenUp>,
    /// Segments that a mount would read now, and at most.
    pub replay_segments: u64,
    /// The configured bound.
    pub replay_segments_max: u64,
    /// Counters.
    pub counters: PoolCounters,
    /// What has been written since the mount, and for what.
    pub written: WriteTraffic,
}

/// A member that is filled: one that comes back, or one that replaces another.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rebuild {
    /// Its place.
    pub index: u64,
    /// Its name.
    pub source: String,
    /// Its UUID.
    pub uuid: String,
    /// It replaces another.
    pub replacing: bool,
    /// `running`, `done`, `failed` (it is tried again).
    pub state: String,
    /// Segments that it lacked, or may have lacked.
    pub segments_total: u64,
    /// Of these, the ones that are whole.
    pub segments_done: u64,
    /// Bytes written to it for that.
    pub written_bytes: u64,
    /// Stripes that could not be read.
    pub stripes_lost: u64,
    /// How long it has taken.
    pub elapsed_ms: u64,
    /// How much longer it takes at this pace.
    pub left_ms: Option<u64>,
}

/// The pool's anchor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Anchor {
    /// Its file.
    pub file: String,
    /// The publication that it tells of; none yet.
    pub generation: Option<u64>,
    /// The pool's newest one.
    pub newest: u64,
    /// Why it could not be written, if it could not.
    pub error: Option<String>,
}

/// Answered writes that are gone, and with which the pool was mounted all the same (`--force lost-writes`).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GivenUp {
    /// How many mounts have.
    pub times: u64,
    /// Unix time of the last one.
    pub last_s: u64,
    /// Stripes with answered writes that could not be read.
    pub stripes: u64,
    /// Segments in which there may have been some: too few members answered.
    pub segments: u64,
}

/// How far the scrub is, and what it has found.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Scrub {
    /// A pass is under way.
    pub running: bool,
    /// When this pass, or else the last one, began, in Unix seconds; 0: there was none.
    pub started_s: u64,
    /// When the last pass ended, in Unix seconds; 0: none has.
    pub ended_s: u64,
    /// Segments that this pass has still to read.
    pub segments_left: u64,
    /// Stripes that it has read.
    pub stripes: u64,
    /// Shards that were wrong.
    pub bad_shards: u64,
    /// Of these, the ones that are right again.
    pub repaired_shards: u64,
    /// Stripes that can't be read: beyond m losses.
    pub stripes_lost: u64,
    /// Where shards were wrong since the service began.
    pub findings: Vec<Finding>,
}

/// Wrong shards in one segment of a member.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The member.
    pub member: u64,
    /// The segment.
    pub segment: u64,
    /// How many.
    pub shards: u64,
}

/// Answer of `POST /v1/pool/replace` and `/v1/pool/attach`: what has begun.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Coming {
    /// The place.
    pub index: u64,
    /// The member that comes.
    pub uuid: String,
    /// What to do next.
    pub advice: String,
}

/// One member.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its place.
    pub index: u64,
    /// As configured; empty if this mount was not given it.
    pub source: String,
    /// Its UUID.
    pub uuid: String,
    /// `active`, `out` (put out of the set while serving), `missing`, `stale`.
    pub state: String,
    /// The epoch in which it was last part of the set.
    pub epoch: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes and syncs that failed.
    pub write_errors: u64,
    /// Requests that took longer than the member timeout.
    pub timeouts: u64,
    /// Shards whose checksum was wrong.
    pub checksum_errors: u64,
    /// Shards rebuilt and written again.
    pub repaired: u64,
    /// Reads that the other members served since this one took too long.
    #[serde(default)]
    pub slow_reads: u64,
    /// What is out of the ordinary about it.
    #[serde(default)]
    pub remarks: Vec<String>,
}

/// Where the space goes, in bytes: `raw = usable + parity + metadata + reserve`, `usable = used + free`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Space {
    /// All members together.
    pub raw_bytes: u64,
    /// What user data can take.
    pub usable_bytes: u64,
    /// The parity's share of all segments.
    pub parity_bytes: u64,
    /// Superblocks, tails shorter than a segment, checkpoints.
    pub metadata_bytes: u64,
    /// Of the metadata: checkpoints.
    pub checkpoint_bytes: u64,
    /// Kept for cleaning and checkpoints.
    pub reserve_bytes: u64,
    /// Live records as they are stored.
    pub used_bytes: u64,
    /// Free for user data, now or after cleaning.
    pub free_bytes: u64,
    /// Of the free: dead records, padding, headers and room in open segments, which come back by cleaning.
    pub reclaimable_bytes: u64,
    /// What users have stored, before compression.
    pub user_bytes: u64,
    /// What compression saves of it, less what records add.
    pub saved_bytes: i64,
}

/// What a mount did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MountReport {
    /// `formatted` (this start made the pool), `clean` (it had been closed properly), `recovered` (it had not).
    pub kind: String,
    /// How long it took.
    pub duration_ms: u64,
    /// Segments that were read.
    pub segments_scanned: u64,
    /// Stripes found after the checkpoint and applied.
    pub stripes_replayed: u64,
    /// Of these, those that lacked shards, which were written again.
    pub stripes_healed: u64,
    /// Unfinished stripes that were given up; none had been acknowledged.
    pub stripes_discarded: u64,
    /// Records put into the map.
    pub records_replayed: u64,
    /// Members that were missing or unreadable.
    pub members_missing: Vec<u64>,
    /// Members that were there with an older epoch.
    pub members_stale: Vec<u64>,
    /// In one line.
    pub summary: String,
}

/// What the pool has done since the mount.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolCounters {
    /// Checkpoints taken.
    pub checkpoints: u64,
    /// Segments cleaned.
    pub segments_cleaned: u64,
    /// Extents in all maps now.
    pub map_extents: u64,
    /// Pages of maps that were not in the cache and read from members.
    pub map_pages_read: u64,
}

/// Bytes that became durable since the mount, by what they were for; all but the first add up to what the members were given.
/// Repairs, rebuilds and superblocks are not in it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct WriteTraffic {
    /// What hosts have written, before compression.
    pub user_bytes: u64,
    /// Records of that, as they were stored.
    pub fresh_bytes: u64,
    /// Records that cleaning and key rotation have written again.
    pub moved_bytes: u64,
    /// Pages of maps.
    pub page_bytes: u64,
    /// Checkpoints.
    pub checkpoint_bytes: u64,
    /// Headers of shards, and room that records have left in stripes.
    pub padding_bytes: u64,
    /// Parity of all that.
    pub parity_bytes: u64,
    /// Bytes that the members were given for each byte that hosts wrote; none before the first.
    pub amplification: Option<f64>,
    /// Bytes of the log, parity apart, for each byte of fresh records: what the log costs, whatever compression saves.
    pub log_amplification: Option<f64>,
}

/// `GET /v1/volumes`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Its size as hosts see it.
    pub size_bytes: u64,
    /// Its block size.
    pub block_bytes: u64,
    /// How it is compressed.
    pub compression: String,
    /// How it is encrypted.
    pub cipher: String,
    /// What hosts have written and not deallocated.
    pub used_bytes: u64,
    /// What that takes as records, before parity; what it shares with its origin counts there.
    pub stored_bytes: u64,
    /// A snapshot: hosts can read it, and nobody can change it.
    #[serde(default)]
    pub snapshot: bool,
    /// The snapshot that it lies upon: it holds what has changed since.
    #[serde(default)]
    pub origin: Option<String>,
    /// `stored / used`; none while nothing is stored.
    pub ratio: Option<f64>,
    /// The namespace that serves it: `NQN nsid N`.
    pub served_by: Option<String>,
}

/// `GET /v1/keys`: the keys of one volume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeKey {
    /// The volume's name.
    pub volume: String,
    /// Its cipher.
    pub cipher: String,
    /// Which of its keys new records are sealed under, from 0.
    pub epoch: u64,
    /// Whether records are being carried over from the key before.
    pub rotating: bool,
    /// Bytes at rest under the key before.
    pub left_bytes: u64,
    /// Bytes at rest in all.
    pub stored_bytes: u64,
}

/// `GET /v1/receipts`, `POST /v1/volume/delete`: what became of a deleted volume's key.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// The pool's UUID.
    pub pool: String,
    /// The volume's name.
    pub volume: String,
    /// Its UUID.
    pub uuid: String,
    /// The lineage that its keys were of, which it shared with its clones and snapshots.
    pub lineage: String,
    /// What the keys were for.
    pub cipher: String,
    /// How many keys the lineage had, one after the other.
    pub keys: u64,
    /// Those that there were at the deletion.
    pub check_values: Vec<KeyCheck>,
    /// Unix time of the deletion.
    pub deleted_s: u64,
    /// `destroyed` (no copy is left that could be opened), `pending` (see `copies`), `kept` (see `readers`).
    pub key: String,
    /// Unix time at which the key was found to be destroyed; none if it is not, or was just now.
    pub destroyed_s: Option<u64>,
    /// Volumes, clones and snapshots that still need the key.
    pub readers: Vec<String>,
    /// Where copies may be left.
    pub copies: Vec<KeyCopy>,
    /// Members that may have had copies and are destroyed, as somebody has stated.
    pub stated_destroyed: Vec<Stated>,
    /// UUIDs of the pool's members now.
    pub members: Vec<String>,
    /// What `destroyed` means and what it does not.
    pub meaning: String,
}

/// By which a key can be recognised: HKDF-SHA256 of it over `sluice key check value 1`, 16 bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyCheck {
    /// Which of the lineage's keys, from 0.
    pub epoch: u64,
    /// In hexadecimal.
    pub value: String,
}

/// Where a copy of a key may be left.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyCopy {
    /// The member's UUID; none if it may be any.
    pub member: Option<String>,
    /// Its place in the pool.
    pub index: Option<u64>,
    /// Where the configuration has it, if it is there.
    pub source: Option<String>,
    /// `active`, `absent`, `filling`, `replaced`, `older-format`.
    pub reason: String,
    /// The same in words, with what ends it.
    pub text: String,
}

/// A statement that a member is destroyed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stated {
    /// The member's UUID.
    pub member: String,
    /// Unix time of the statement.
    pub stated_s: u64,
}

/// `GET /v1/subsystems`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Subsystem {
    /// Its name.
    pub nqn: String,
    /// Its serial number.
    pub serial: String,
    /// Lets every host in.
    pub allow_any_host: bool,
    /// The hosts that may connect.
    pub hosts: Vec<String>,
    /// Its namespaces.
    pub namespaces: Vec<Namespace>,
    /// Hosts that are connected.
    pub controllers: Vec<Controller>,
}

/// One namespace.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Namespace {
    /// Its id.
    pub nsid: u32,
    /// What stands behind it.
    pub backend: String,
    /// Its UUID.
    pub uuid: String,
    /// Its size.
    pub size_bytes: u64,
    /// Its block size.
    pub block_bytes: u64,
}

/// One association.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Controller {
    /// Its id.
    pub cntlid: u64,
    /// The host's name.
    pub host: String,
    /// Where it comes from.
    pub peer: String,
    /// Its I/O queues.
    pub io_queues: u64,
    /// Its keep-alive time; 0 is none.
    pub kato_ms: u64,
    /// How long it has been connected.
    pub age_ms: u64,
    /// Commands that back ends have and haven't answered.
    pub in_flight: u64,
    /// Reads and compares that succeeded.
    pub read_commands: u64,
    /// Writes that succeeded.
    pub write_commands: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Commands that ended with a media error.
    pub media_errors: u64,
}

/// `GET /v1/config`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Configuration {
    /// What is in effect: defaults, file, environment, changes made at run time, and the pool's volumes as they are.
    pub config: Config,
    /// Where each value comes from, by its key, such as `subsystem[0].namespace[1].backend`: `default`, `FILE:LINE`,
    /// `environment NAME`, `offloadctl`, `pool`.
    pub origins: BTreeMap<String, String>,
    /// Where the changes made at run time are kept.
    pub state_file: String,
}

/// One listener.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listener {
    /// The transport: `tcp`.
    pub transport: String,
    /// The address, bare.
    pub address: String,
    /// The port.
    pub port: u16,
    /// Both, reusable: `[::1]:4420`.
    pub endpoint: String,
}
