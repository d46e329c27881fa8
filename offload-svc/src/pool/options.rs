//! What the configuration says about a pool, as plain values.
//!
//! Owns the options of format and mount and the formula of what the pool holds in memory. Must not know the
//! configuration file. Invariant: [`Layout::check`] and [`MountOptions::check`] name the option that is wrong.

use std::time::Duration;

use super::superblock::Publication;

/// The size of a member's block: every offset, shard and buffer is a multiple of it.
pub const BLOCK_BYTES: u64 = 4096;
/// Bytes at a member's start that hold the two superblock slots and room to grow.
pub const SUPERBLOCK_AREA_BYTES: u64 = 64 * 1024;
/// The most members a pool can have (Reed-Solomon over GF(2^8), member table in the superblock).
pub const MEMBERS_MAX: usize = 32;
/// A volume's LBA space is cut into runs of this many bytes, dealt round-robin to its shards.
pub const SHARD_RUN_BYTES: u64 = 4 * 1024 * 1024;
/// Shards of every volume: the same on every machine, whatever the number of reactors.
pub const SHARDS_PER_VOLUME: u16 = 16;
/// The most plain bytes in one record.
pub const RECORD_PLAIN_BYTES_MAX: usize = 64 * 1024;

/// One member as it was opened, in the order of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberInput {
    /// How messages name it: `file:var/m0`.
    pub name: String,
    /// Its size in bytes; `None` if it could not be opened. Its [`super::MemberIndex`] stays reserved then.
    pub size_bytes: Option<u64>,
    /// It is a regular file: one that is shorter than its superblock says was cut, and can be made as long again.
    pub can_grow: bool,
    /// Why it could not be opened, in words.
    pub unopened: Option<String>,
}

/// The shape of a pool, fixed when it is formatted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Data shards of a full stripe (k).
    pub data_shards: u8,
    /// Parity shards of every stripe (m).
    pub parity_shards: u8,
    /// A segment's bytes on each member.
    pub segment_bytes: u32,
    /// The longest shard of a stripe, header included, in bytes.
    pub shard_bytes_max: u32,
}

impl Default for Layout {
    fn default() -> Self {
        Self { data_shards: 4, parity_shards: 2, segment_bytes: 4 << 20, shard_bytes_max: 128 << 10 }
    }
}

/// Why a [`Layout`] or [`MountOptions`] can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value}: {rule}")]
pub struct OptionError {
    /// The option's name.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
    /// What it has to be.
    pub rule: &'static str,
}

/// The least segments a member must have room for: open ones, the checkpoint in use and the one being written, and
/// room to clean.
pub const SEGMENTS_MIN: u64 = 16;

impl Layout {
    /// k + m.
    pub fn members(&self) -> usize {
        usize::from(self.data_shards) + usize::from(self.parity_shards)
    }

    /// Checks every field; the first that is wrong is named.
    pub fn check(&self) -> Result<(), OptionError> {
        let fail = |field, value: u64, rule| Err(OptionError { field, value, rule });
        let block = BLOCK_BYTES as u32;
        if self.data_shards == 0 {
            return fail("k", 0, "at least 1 data shard");
        }
        if self.parity_shards == 0 {
            return fail("m", 0, "at least 1 parity shard");
        }
        if self.members() > MEMBERS_MAX {
            return fail("k+m", self.members() as u64, "at most 32 members");
        }
        if !self.shard_bytes_max.is_multiple_of(block) || !((80 << 10)..=(1 << 20)).contains(&self.shard_bytes_max) {
            return fail("shard_bytes_max", self.shard_bytes_max.into(), "a multiple of 4096 from 80 KiB to 1 MiB");
        }
        if !self.segment_bytes.is_multiple_of(block)
            || !(self.shard_bytes_max..=(64 << 20)).contains(&self.segment_bytes)
        {
            let rule = "a multiple of 4096 from shard_bytes_max to 64 MiB";
            return fail("segment_bytes", self.segment_bytes.into(), rule);
        }
        Ok(())
    }

    /// The least size of a member in bytes.
    pub fn member_bytes_min(&self) -> u64 {
        SUPERBLOCK_AREA_BYTES + SEGMENTS_MIN * u64::from(self.segment_bytes)
    }
}

/// Reasons not to mount that somebody has weighed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Force {
    /// A newer set might exist among the members that are missing.
    pub rival: bool,
    /// Answered writes since the last checkpoint are gone from too many members: their blocks show what was there before.
    pub lost_writes: bool,
    /// All members are older than the anchor says.
    pub rolled_back: bool,
}

/// How a mounted pool behaves; may differ at every mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    /// A member that does not answer for this long is put out of the set.
    pub member_timeout: Duration,
    /// The most segments that a mount has to read: the bound on the time to the first I/O.
    pub max_replay_segments: u32,
    /// A checkpoint is taken at least this often while there are writes.
    pub checkpoint_interval: Duration,
    /// Stripes that one reactor may have on their way to the members at once.
    pub commits_in_flight: u32,
    /// Memory for maps, in bytes: three quarters for a cache of pages, the rest for changes that are not in pages yet. When
    /// these are many a checkpoint is taken early, and at the bound writes wait for it.
    pub map_bytes_max: u64,
    /// Bytes a second that the filling of a member reads and writes at most; 0: no limit.
    pub rebuild_rate: u64,
    /// Bytes a second that the scrub reads at most; 0: no limit.
    pub scrub_rate: u64,
    /// A scrub begins so long after the last one; zero: only when it is asked for.
    pub scrub_interval: Duration,
    /// What 99 of 100 requests should be answered within while a member is filled or a scrub runs.
    pub foreground_p99: Duration,
    /// A read that a member has not answered by then is served from the others; zero: never.
    pub slow_read: Duration,
    /// What to mount in spite of.
    pub force: Force,
    /// The pool was published like this, or later, the last time that somebody looked: members that are all older have been
    /// rolled back.
    pub anchor: Option<Publication>,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self {
            member_timeout: Duration::from_secs(2),
            max_replay_segments: 96,
            checkpoint_interval: Duration::from_secs(30),
            commits_in_flight: 4,
            map_bytes_max: 1 << 30,
            rebuild_rate: 0,
            scrub_rate: 64 << 20,
            scrub_interval: Duration::ZERO,
            foreground_p99: Duration::from_millis(20),
            slow_read: Duration::from_millis(250),
            force: Force::default(),
            anchor: None,
        }
    }
}

impl MountOptions {
    /// Checks every field; the first that is wrong is named.
    pub fn check(&self) -> Result<(), OptionError> {
        let fail = |field, value: u64, rule| Err(OptionError { field, value, rule });
        if self.member_timeout < Duration::from_millis(10) {
            let value = self.member_timeout.as_millis() as u64;
            return fail("member_timeout_ms", value, "at least 10");
        }
        if self.max_replay_segments < 4 {
            return fail("max_replay_segments", self.max_replay_segments.into(), "at least 4");
        }
        if !(1..=64).contains(&self.commits_in_flight) {
            return fail("commits_in_flight", self.commits_in_flight.into(), "from 1 to 64");
        }
        if self.map_bytes_max < MAP_BYTES_MIN {
            return fail("map_bytes_max", self.map_bytes_max, "at least 64 KiB");
        }
        Ok(())
    }

    /// Checks what depends on the number of reactors.
    pub fn check_reactors(&self, reactors: usize) -> Result<(), OptionError> {
        let value = u64::from(self.max_replay_segments);
        if value < replay_segments_min(reactors) {
            return Err(OptionError {
                field: "max_replay_segments",
                value,
                rule: "at least four for each reactor and 2",
            });
        }
        Ok(())
    }
}

/// The least `max_replay_segments` for so many reactors. Each keeps three segments open, for fresh records, for moved ones and for
/// pages, which stay in the window; with fewer than four times as many nothing could be handed out beside those.
pub const fn replay_segments_min(reactors: usize) -> u64 {
    4 * reactors as u64 + 2
}

/// What a pool needs in memory, for the plan that `--check` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct MemoryNeeds {
    /// The longest buffer that is asked from `Env::buffer`.
    pub largest_buffer_bytes: u64,
    /// Bytes of buffers that `Env::buffer` of each reactor must be able to give out. They must not be shared with the
    /// hosts' data: the pool would wait for requests that wait for it. Half of it is in use at most; the other half covers
    /// what members that hang keep.
    pub buffer_bytes_per_reactor: u64,
    /// Heap bytes of maps.
    pub map_bytes_max: u64,
}

/// The least memory for maps: some pages for each of a few reactors.
pub const MAP_BYTES_MIN: u64 = 64 << 10;
/// Heap bytes of one change that waits to be merged, with its share of the layer's tree.
const LAYER_RUN_BYTES: u64 = 128;

impl MountOptions {
    /// Bytes of pages that are kept in memory, over all reactors.
    pub fn map_cache_bytes(&self) -> u64 {
        self.map_bytes_max / 4 * 3
    }

    /// Changes that may wait to be merged, over all reactors.
    pub fn layer_runs_max(&self) -> u64 {
        self.map_bytes_max / 4 / LAYER_RUN_BYTES
    }
}

/// What a pool of this layout needs in memory.
pub fn memory_needs(layout: &Layout, options: &MountOptions) -> MemoryNeeds {
    let shard = u64::from(layout.shard_bytes_max);
    let stripe = shard * layout.members() as u64;
    MemoryNeeds {
        largest_buffer_bytes: shard,
        // Every stripe in flight, one being read whole for repair, one by the cleaner or a checkpoint.
        buffer_bytes_per_reactor: 2 * stripe * (u64::from(options.commits_in_flight) + 2),
        map_bytes_max: options.map_bytes_max,
    }
}
