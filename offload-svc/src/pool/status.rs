//! What a pool reports about itself.
//!
//! Owns the plain structs behind `offloadctl pool show`, `volume list`, the metrics and the mount's log line.
//! Must not know how they are printed. Invariant: the parts of [`Space`] add up to the raw size to the byte.

use std::fmt;

use serde::Serialize;
use uuid::Uuid;

use super::superblock::GivenUp;

/// The whole pool at one moment.
#[derive(Debug, Clone, Serialize)]
pub struct PoolStatus {
    /// The pool's identity.
    pub uuid: Uuid,
    /// Data shards of a full stripe (k).
    pub data_shards: u8,
    /// Parity shards of every stripe (m).
    pub parity_shards: u8,
    /// A segment's bytes on each member.
    pub segment_bytes: u32,
    /// Whether reads and writes are served, and how safely.
    pub health: Health,
    /// The epoch of the current set of members.
    pub epoch: u64,
    /// Every member, in the order of the set.
    pub members: Vec<MemberStatus>,
    /// Where the bytes are.
    pub space: Space,
    /// Segments that a mount after a crash now would have to read.
    pub replay_segments: u64,
    /// The configured bound on it.
    pub max_replay_segments: u64,
    /// Checkpoints taken since the mount.
    pub checkpoints: u64,
    /// Segments that were cleaned since the mount.
    pub cleaned_segments: u64,
    /// What has been written since the mount, and for what.
    pub traffic: WriteTraffic,
    /// Extents in all maps.
    pub map_extents: u64,
    /// Pages of maps that were not in the cache and read from members since the mount.
    pub map_pages_read: u64,
    /// The member that is being filled, or was the last to be.
    pub rebuild: Option<RebuildStatus>,
    /// The scrub that runs, or ran last.
    pub scrub: ScrubStatus,
    /// What the mount found and did.
    pub mount: MountReport,
    /// What mounts have gone on without, by force, since the pool was made.
    pub given_up: GivenUp,
}

/// Bytes of stripes that became durable since the mount, by what they were for: `fresh + moved + page + checkpoint + padding +
/// parity` is what the members were given. Repairs, rebuilds and superblocks are not in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
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
}

impl WriteTraffic {
    /// All that the members were given.
    pub fn written_bytes(&self) -> u64 {
        self.log_bytes() + self.parity_bytes
    }

    fn log_bytes(&self) -> u64 {
        self.fresh_bytes + self.moved_bytes + self.page_bytes + self.checkpoint_bytes + self.padding_bytes
    }

    /// Bytes that the members were given for each byte that a host wrote: compression makes it smaller, all else larger.
    pub fn amplification(&self) -> Option<f64> {
        ratio(self.written_bytes(), self.user_bytes)
    }

    /// Bytes of the log, parity apart, for each byte of fresh records: what the log costs, whatever compression saves and
    /// parity adds.
    pub fn log_amplification(&self) -> Option<f64> {
        ratio(self.log_bytes(), self.fresh_bytes)
    }
}

fn ratio(of: u64, to: u64) -> Option<f64> {
    (to > 0).then(|| of as f64 / to as f64)
}

/// How far the scrub is, and what it has found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ScrubStatus {
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
    /// Where shards were wrong since the service began, the last of them at most.
    pub findings: Vec<ScrubFinding>,
}

/// Wrong shards in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ScrubFinding {
    /// The member.
    pub member: u8,
    /// The segment.
    pub segment: u32,
    /// How many.
    pub shards: u64,
}

/// How well the pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// Every member is in the set.
    Healthy,
    /// Members are missing, no more than the parity covers.
    Degraded,
    /// Fewer than k members are left: writes fail, reads of what can't be rebuilt too.
    Failed,
}

/// One member.
#[derive(Debug, Clone, Serialize)]
pub struct MemberStatus {
    /// Its place in the set.
    pub index: u8,
    /// Its identity.
    pub uuid: Uuid,
    /// How the configuration names it, if it was given at this mount.
    pub name: Option<String>,
    /// Whether its data counts.
    pub state: MemberState,
    /// The epoch in which it was last part of the set.
    pub epoch: u64,
    /// Reads that the member answered with an error.
    pub read_errors: u64,
    /// Writes and syncs that the member answered with an error.
    pub write_errors: u64,
    /// Requests that it did not answer in time.
    pub timeouts: u64,
    /// Shards whose checksum or header was wrong.
    pub bad_shards: u64,
    /// Shards that were rebuilt and written back.
    pub repaired_shards: u64,
    /// Reads that the other members served since this one took too long.
    pub slow_reads: u64,
    /// What is out of the ordinary about it.
    pub remarks: Vec<Remark>,
}

/// What is out of the ordinary about a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remark {
    /// An older copy of it was there at the mount: it is read through and brought up to date.
    RolledBack {
        /// How many publications of the superblock it lacked.
        publications: u64,
    },
    /// It told of another history than the rest at the mount: it is brought up to date.
    OtherHistory,
    /// Its file was shorter than its superblock says when the pool was mounted: what is lost is found and repaired.
    Cut {
        /// What it had.
        from_bytes: u64,
        /// What was left.
        to_bytes: u64,
    },
    /// The file system beneath it is full: writes get Capacity Exceeded.
    FileSystemFull,
    /// It had missed one publication at the mount: a crash in that moment, or an older copy. A scrub finds what it lacks.
    OneBehind,
    /// Reads have met the end of its file since the mount: it was cut while in use.
    CutInUse,
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RolledBack { publications } => {
                write!(f, "rolled back: superblock {publications} publications behind when it was found")
            }
            Self::Cut { from_bytes, to_bytes } => {
                write!(f, "its file was cut from {from_bytes} to {to_bytes} bytes before the pool was mounted")
            }
            Self::FileSystemFull => f.write_str(
                "the file system beneath it is full: new writes get Capacity Exceeded; make room there, or deallocate",
            ),
            Self::OneBehind => f.write_str(
                "its superblock was one publication behind when the pool was mounted: a crash in that moment, or an older copy",
            ),
            Self::CutInUse => {
                f.write_str("its file has been cut while in use: what is lost is repaired as it is found")
            }
            Self::OtherHistory => f.write_str("a copy with a history of its own when the pool was mounted"),
        }
    }
}

/// Whether a member's data counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemberState {
    /// Part of the set.
    Active,
    /// Put out of the set while serving.
    Out,
    /// Not there at the mount.
    #[default]
    Missing,
    /// There, but of an older epoch.
    Stale,
    /// Coming back: it is written to and brought up to date, and counts for nothing until it is.
    Rebuilding,
}

/// How the filling of a member goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RebuildState {
    /// Under way.
    Running,
    /// The member is in the set.
    Done,
    /// It failed, and is tried again.
    Failed,
}

/// A member that is being filled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RebuildStatus {
    /// Its place in the set.
    pub index: u8,
    /// Its identity.
    pub uuid: Uuid,
    /// How the configuration names it.
    pub name: Option<String>,
    /// It takes the place of another; otherwise it comes back to its own.
    pub replacing: bool,
    /// How it goes, or went.
    pub state: RebuildState,
    /// Segments that it lacked, or may have lacked, when this began.
    pub segments_total: u64,
    /// Of these, the ones that are whole.
    pub segments_done: u64,
    /// Bytes written to it for that.
    pub written_bytes: u64,
    /// Stripes that could not be read: beyond m losses.
    pub stripes_lost: u64,
    /// How long it has been at it.
    pub elapsed_ms: u64,
    /// How much longer it takes at this pace; none before there is a pace.
    pub left_ms: Option<u64>,
}

/// Where the bytes are: `raw = metadata + parity + reserve + checkpoint + used + reclaimable + free`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Space {
    /// All members together.
    pub raw_bytes: u64,
    /// Superblocks, tails shorter than a segment, and the pages of maps.
    pub metadata_bytes: u64,
    /// The parity's share of all segments.
    pub parity_bytes: u64,
    /// Kept back for cleaning and checkpoints.
    pub reserve_bytes: u64,
    /// Held by checkpoints.
    pub checkpoint_bytes: u64,
    /// Live records as they are stored. What has been overwritten or deallocated since the last checkpoint counts still.
    pub used_bytes: u64,
    /// Dead records, padding, headers, and room in open segments: comes back by cleaning.
    pub reclaimable_bytes: u64,
    /// Free for user data.
    pub free_bytes: u64,
    /// Plain bytes that the live records stand for.
    pub logical_bytes: u64,
}

impl Space {
    /// Bytes that user data can take: all but metadata and parity.
    pub fn usable_bytes(&self) -> u64 {
        self.raw_bytes - self.metadata_bytes - self.parity_bytes
    }

    /// Bytes saved by compression, less what records add.
    pub fn saved_bytes(&self) -> i64 {
        self.logical_bytes as i64 - self.used_bytes as i64
    }
}

/// One volume.
#[derive(Debug, Clone, Serialize)]
pub struct VolumeStatus {
    /// Its name, unique in the pool.
    pub name: String,
    /// Its identity, the namespace's UUID.
    pub uuid: Uuid,
    /// Size in bytes as hosts see it.
    pub size_bytes: u64,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// Compression of new writes.
    pub compression: String,
    /// Cipher of the volume.
    pub cipher: String,
    /// Mapped bytes as hosts see them.
    pub used_bytes: u64,
    /// Bytes at rest for them, headers included, parity not; what it shares with its origin counts there.
    pub stored_bytes: u64,
    /// Hosts can read it, and nobody can change it.
    pub snapshot: bool,
    /// The snapshot that it began as, or of which it holds what has changed since.
    pub origin: Option<String>,
}

/// The keys of one volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeyStatus {
    /// The volume's name.
    pub volume: String,
    /// Its cipher.
    pub cipher: String,
    /// Which of its keys new records are sealed under, from 0.
    pub epoch: u32,
    /// An older key still exists: records are being carried over to the new one.
    pub rotating: bool,
    /// Bytes at rest under the older key, the map's pages included. What has been carried over counts still until the next
    /// checkpoint.
    pub left_bytes: u64,
    /// Bytes at rest in all, the map's pages included.
    pub stored_bytes: u64,
}

/// What a mount found and did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct MountReport {
    /// The last user closed the pool properly.
    pub clean: bool,
    /// Segments that were read for replay.
    pub segments_scanned: u64,
    /// Stripes found after the checkpoint and applied.
    pub stripes_replayed: u64,
    /// Of these, those that lacked shards, which were written again.
    pub stripes_healed: u64,
    /// Unfinished stripes that were given up; none of them had been acknowledged.
    pub stripes_discarded: u64,
    /// Stripes with answered writes that were gone, where the mount was forced to go on without them.
    pub stripes_lost: u64,
    /// Records applied from replayed stripes.
    pub records_replayed: u64,
    /// Members of the set that were missing or unreadable.
    pub members_missing: Vec<u8>,
    /// Members that were there with an older epoch.
    pub members_stale: Vec<u8>,
    /// Of these, older copies of members that the set counted.
    pub members_rolled_back: Vec<u8>,
    /// Members whose files had been cut.
    pub members_cut: Vec<u8>,
    /// Volumes found.
    pub volumes: u64,
    /// How long it took.
    pub duration_ms: u64,
}

impl fmt::Display for MountReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.clean { "clean" } else { "unclean" };
        write!(
            f,
            "pool mounted ({how}): {} volumes; {} segments scanned, {} stripes replayed ({} records), {} healed, \
             {} unfinished discarded; members missing {:?}, stale {:?}, of these rolled back {:?}, cut {:?}; {} ms",
            self.volumes,
            self.segments_scanned,
            self.stripes_replayed,
            self.records_replayed,
            self.stripes_healed,
            self.stripes_discarded,
            self.members_missing,
            self.members_stale,
            self.members_rolled_back,
            self.members_cut,
            self.duration_ms,
        )
    }
}
