//! Space admission: whether a write may begin.
//!
//! Owns the promise that what is admitted will find room. Must not know streams or the cleaner. Invariant: admitted rows
//! and live bytes together stay below what the log can hold with its reserves kept, so that an answered write never
//! fails for lack of space later. Deallocation, cleaning and checkpoints are not admitted here: the reserve is theirs.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::options::{BLOCK_BYTES, Layout, SHARDS_PER_VOLUME};
use super::segments::{Segments, Wanted};
use super::stripe::HEADER_BYTES;

/// Bytes of a segment in a checkpoint, and of a volume with its trees' roots, rounded up.
const SEGMENT_BYTES_IN_CHECKPOINT: u64 = 56;
const VOLUME_BYTES_IN_CHECKPOINT: u64 = 640 + 96 * SHARDS_PER_VOLUME as u64;
/// Of all segments, one in so many is kept back for the pages of one merge.
const PAGE_RESERVE_PART: u64 = 32;
const PAGE_RESERVE_MIN: u64 = 2;
/// Of the room for user data, at most this many parts in a hundred are promised: cleaning needs dead space to work with.
/// And records leave gaps at the ends of stripes.
const FILL_PERCENT: u64 = 80;

/// How the segments of a pool are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserves {
    /// Segments for checkpoints: one in use, one being written, each of at most this many.
    pub checkpoint: u64,
    /// Segments for the pages that a checkpoint writes.
    pub pages: u64,
    /// Segments for cleaning, deletion, and what is under way when space runs out.
    pub cleaning: u64,
}

/// The account.
#[derive(Debug)]
pub struct Admission {
    layout: Layout,
    segments: u64,
    reactors: u64,
    volumes: AtomicU64,
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
            volumes: AtomicU64::new(0),
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

    /// How many volumes there are.
    pub fn set_volumes(&self, count: usize) {
        self.volumes.store(count as u64, Ordering::SeqCst);
    }

    /// What is kept back.
    pub fn reserves(&self) -> Reserves {
        // One volume more than there are: it may be made any time.
        let volumes = self.volumes.load(Ordering::SeqCst) + 1;
        let bytes = self.segments * SEGMENT_BYTES_IN_CHECKPOINT + volumes * VOLUME_BYTES_IN_CHECKPOINT + (64 << 10);
        let one = bytes.div_ceil(self.segment_payload_bytes()) + 1;
        let pages = (self.segments / PAGE_RESERVE_PART).max(PAGE_RESERVE_MIN);
        Reserves { checkpoint: one, pages, cleaning: 2 + 2 * self.reactors }
    }

    /// Bytes of pages that one merge may write, and be sure of the room.
    pub fn merge_bytes(&self) -> u64 {
        self.reserves().pages * self.segment_payload_bytes() / 100 * FILL_PERCENT
    }

    /// Segments that user data may fill: all but two checkpoints, a merge and the cleaning reserve.
    pub fn user_segments(&self) -> u64 {
        let reserves = self.reserves();
        self.segments.saturating_sub(2 * reserves.checkpoint + reserves.pages + reserves.cleaning)
    }

    /// Live bytes that may be promised.
    pub fn live_limit(&self) -> u64 {
        self.user_segments() * self.segment_payload_bytes() / 100 * FILL_PERCENT
    }

    /// Rows that a write of `plain_bytes` in `records` records may take, on its own.
    fn rows_for(&self, bytes: u64) -> i64 {
        let per_row = (BLOCK_BYTES - HEADER_BYTES as u64) * u64::from(self.layout.data_shards);
        (bytes.div_ceil(per_row) + 1) as i64
    }

    /// Asks for room for `bytes` at rest.
    pub fn admit(self: &Arc<Self>, segments: &Segments, bytes: u64) -> Result<Admitted, Refusal> {
        let live = segments.live_total();
        if live + self.rows_in_bytes() + bytes > self.live_limit() {
            return Err(Refusal::Full);
        }
        let rows = self.rows_for(bytes);
        let promised = self.rows.fetch_add(rows, Ordering::SeqCst) + rows;
        let admitted = Admitted { account: Arc::clone(self), rows };
        if self.rows_left(segments.left()) >= promised {
            if self.rows_left(segments.backed_left()) >= promised {
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
    fn rows_left(&self, (listed, free): (u64, u64)) -> i64 {
        let reserves = self.reserves();
        let kept = reserves.checkpoint + reserves.pages;
        let usable = (listed + free.saturating_sub(kept)).saturating_sub(reserves.cleaning);
        // Listed ones alone can be written now.
        (usable.min(listed) * self.rows_per_segment()) as i64
    }

    /// Segments that are to have their room allocated beneath: the reserves, and what is written next.
    pub fn wanted(&self) -> Wanted {
        let reserves = self.reserves();
        let asked = self.asked_rows.load(Ordering::SeqCst).max(0) as u64;
        let listed = 1 + self.reactors + asked.div_ceil(self.rows_per_segment());
        Wanted { listed, total: reserves.checkpoint + reserves.pages + reserves.cleaning + listed }
    }

    /// Who still waits for room beneath asks again.
    pub fn forget_asked(&self) {
        self.asked_rows.store(0, Ordering::SeqCst);
    }

    /// Whether so little is free that the cleaner should work.
    pub fn is_low(&self, segments: &Segments) -> bool {
        let (listed, free) = segments.left();
        let reserves = self.reserves();
        let spare = (listed + free).saturating_sub(reserves.checkpoint + reserves.pages + reserves.cleaning);
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
