//! Space admission: whether a write may begin.
//!
//! Owns the promise that what is admitted will find room. Must not know streams or the cleaner. Invariant: admitted rows
//! and live bytes together stay below what the log can hold with its reserves kept, so that an answered write never
//! fails for lack of space later. Deallocation, cleaning and checkpoints are not admitted here: the reserve is theirs.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::options::{BLOCK_BYTES, Layout};
use super::segments::{Segments, Wanted};
use super::stripe::HEADER_BYTES;

/// Bytes of one extent in a checkpoint, rounded up.
pub const EXTENT_BYTES_IN_CHECKPOINT: u64 = 64;
/// Of the room for user data, at most this many parts in a hundred are promised: cleaning needs dead space to work with.
/// And records leave gaps at the ends of stripes.
const FILL_PERCENT: u64 = 80;

/// How the segments of a pool are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserves {
    /// Segments for checkpoints: one in use, one being written, each of at most this many.
    pub checkpoint: u64,
    /// Segments for cleaning, deletion, and what is under way when space runs out.
    pub cleaning: u64,
}

/// The account.
#[derive(Debug)]
pub struct Admission {
    layout: Layout,
    segments: u64,
    reactors: u64,
    /// Rows promised to requests that have not been placed yet.
    rows: AtomicI64,
    /// The most rows for which a request waits to have their room allocated beneath.
    asked_rows: AtomicI64,
    /// Live bytes when the cleaner last found nothing to gain; `u64::MAX` when it has not.
    stuck_at: AtomicU64,
    /// Until this time (in milliseconds of the pool's clock) the file system beneath a member is taken to be full.
    full_until_ms: AtomicU64,
}

/// Why a write was not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Dead space may come back soon: wait for the cleaner.
    Wait,
    /// There is room, but it has still to be allocated on the file systems beneath.
    Unbacked,
    /// Full.
    Full,
}

impl Admission {
    pub fn new(layout: Layout, segments: u32, reactors: usize) -> Self {
        Self {
            layout,
            segments: segments.into(),
            reactors: reactors as u64,
            rows: AtomicI64::new(0),
            asked_rows: AtomicI64::new(0),
            stuck_at: AtomicU64::new(u64::MAX),
            full_until_ms: AtomicU64::new(0),
        }
    }

    /// 4 KiB rows of a segment.
    pub fn rows_per_segment(&self) -> u64 {
        u64::from(self.layout.segment_bytes) / BLOCK_BYTES
    }

    /// Payload bytes that a segment holds when it is packed with full stripes.
    pub fn segment_payload_bytes(&self) -> u64 {
        let shard = u64::from(self.layout.shard_bytes_max);
        let stripes = u64::from(self.layout.segment_bytes) / shard;
        stripes * (shard - HEADER_BYTES as u64) * u64::from(self.layout.data_shards)
    }

    /// Reserves for `extents` mapped extents.
    pub fn reserves(&self, extents: u64) -> Reserves {
        let bytes = extents * EXTENT_BYTES_IN_CHECKPOINT + (64 << 10);
        let one = bytes.div_ceil(self.segment_payload_bytes()) + 1;
        Reserves { checkpoint: one, cleaning: 2 + 2 * self.reactors }
    }

    /// Segments that user data may fill: all but two checkpoints and the cleaning reserve.
    pub fn user_segments(&self, extents: u64) -> u64 {
        let reserves = self.reserves(extents);
        self.segments.saturating_sub(2 * reserves.checkpoint + reserves.cleaning)
    }

    /// Live bytes that may be promised.
    pub fn live_limit(&self, extents: u64) -> u64 {
        self.user_segments(extents) * self.segment_payload_bytes() / 100 * FILL_PERCENT
    }

    /// Rows that a write of `plain_bytes` in `records` records may take, on its own.
    fn rows_for(&self, bytes: u64) -> i64 {
        let per_row = (BLOCK_BYTES - HEADER_BYTES as u64) * u64::from(self.layout.data_shards);
        (bytes.div_ceil(per_row) + 1) as i64
    }

    /// Asks for room for `bytes` at rest.
    pub fn admit(self: &Arc<Self>, segments: &Segments, extents: u64, bytes: u64) -> Result<Admitted, Refusal> {
        let live = segments.live_total();
        if live + self.rows_in_bytes() + bytes > self.live_limit(extents) {
            return Err(Refusal::Full);
        }
        let rows = self.rows_for(bytes);
        let promised = self.rows.fetch_add(rows, Ordering::SeqCst) + rows;
        let admitted = Admitted { account: Arc::clone(self), rows };
        if self.rows_left(segments.left(), extents) >= promised {
            if self.rows_left(segments.backed_left(), extents) >= promised {
                return Ok(admitted);
            }
            self.asked_rows.fetch_max(promised, Ordering::SeqCst);
            return Err(Refusal::Unbacked);
        }
        // Unless something has died since the cleaner gave up, it would give up again.
        let stuck = self.stuck_at.load(Ordering::SeqCst);
        let gained = stuck.saturating_sub(live);
        Err(if stuck != u64::MAX && gained < self.segment_payload_bytes() { Refusal::Full } else { Refusal::Wait })
    }

    /// Payload bytes of the rows promised.
    fn rows_in_bytes(&self) -> u64 {
        let per_row = (BLOCK_BYTES - HEADER_BYTES as u64) * u64::from(self.layout.data_shards);
        self.rows.load(Ordering::SeqCst).max(0) as u64 * per_row
    }

    /// Rows that users can still have before the next checkpoint, the reserve kept.
    fn rows_left(&self, (listed, free): (u64, u64), extents: u64) -> i64 {
        let reserves = self.reserves(extents);
        let usable = (listed + free.saturating_sub(reserves.checkpoint)).saturating_sub(reserves.cleaning);
        // Listed ones alone can be written now.
        (usable.min(listed) * self.rows_per_segment()) as i64
    }

    /// Segments that are to have their room allocated beneath: the reserves, and what is written next.
    pub fn wanted(&self, extents: u64) -> Wanted {
        let reserves = self.reserves(extents);
        let asked = self.asked_rows.load(Ordering::SeqCst).max(0) as u64;
        let listed = 1 + self.reactors + asked.div_ceil(self.rows_per_segment());
        Wanted { listed, total: reserves.checkpoint + reserves.cleaning + listed }
    }

    /// Who still waits for room beneath asks again.
    pub fn forget_asked(&self) {
        self.asked_rows.store(0, Ordering::SeqCst);
    }

    /// Whether so little is free that the cleaner should work.
    pub fn is_low(&self, segments: &Segments, extents: u64) -> bool {
        let (listed, free) = segments.left();
        let reserves = self.reserves(extents);
        let spare = (listed + free).saturating_sub(reserves.checkpoint + reserves.cleaning);
        spare < (self.segments / 8).max(3)
    }

    /// The cleaner found nothing to gain, or is at work again.
    pub fn set_stuck(&self, live: Option<u64>) {
        self.stuck_at.store(live.unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// The file system beneath a member is full; asked again after a while.
    pub fn set_full_until(&self, ms: u64) {
        self.full_until_ms.store(ms, Ordering::SeqCst);
    }

    pub fn is_full_beneath(&self, now_ms: u64) -> bool {
        now_ms < self.full_until_ms.load(Ordering::SeqCst)
    }
}

/// Room promised to one request; given back when it is placed or fails.
#[derive(Debug)]
pub struct Admitted {
    account: Arc<Admission>,
    rows: i64,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.account.rows.fetch_sub(self.rows, Ordering::SeqCst);
    }
}
