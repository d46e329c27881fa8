//! Space admission: whether a write may begin.
//!
//! Owns the promise that what is admitted will find room. Must not know streams or the cleaner. Invariant: admitted rows
//! and live bytes together stay below what the log can hold with its reserves kept, so that an answered write never
//! fails for lack of space later. Deallocation, cleaning and checkpoints are not admitted here: the reserve is theirs.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::options::{BLOCK_BYTES, Layout, RECORD_PLAIN_BYTES_MAX, SHARDS_PER_VOLUME};
use super::segments::{Segments, Wanted};
use super::stripe::{HEADER_BYTES, StripeLocation};
use crate::stages::record::sealed_bound;

/// Bytes of a segment in a checkpoint, and of a volume with its trees' roots, rounded up.
const SEGMENT_BYTES_IN_CHECKPOINT: u64 = 56;
const VOLUME_BYTES_IN_CHECKPOINT: u64 = 640 + 96 * SHARDS_PER_VOLUME as u64;
/// Of all segments, one in so many is kept back for the pages of one merge.
const PAGE_RESERVE_PART: u64 = 32;
const PAGE_RESERVE_MIN: u64 = 2;
/// Of the segments for user data, one in so many is never promised, besides two for each reactor, which are being written and may
/// hold next to nothing: cleaning needs dead space to work with.
const SLACK_PART: u64 = 20;
/// Of the segments' worth of room that holds nothing alive, one in so many is kept free by the cleaner.
const FREE_PART: u64 = 4;
/// Pages leave gaps at the ends of stripes: of the room kept for them, this many parts in a hundred are counted on.
const PAGES_PERCENT: u64 = 80;

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
    /// Payload bytes of a segment full of the longest records.
    packed_bytes: u64,
    volumes: AtomicU64,
    /// Rows promised to requests that have not been placed yet.
    rows: AtomicI64,
    /// Segments that the streams of fresh records have taken since the mount.
    fresh_segments: AtomicU64,
    /// Segments that the cleaner's round under way has still to take.
    moving: AtomicI64,
    /// The most rows for which a request waits to have their room allocated beneath.
    asked_rows: AtomicI64,
    /// Live bytes, and stripes that had been written, when the cleaner last found nothing to gain; `u64::MAX` when it has not.
    stuck_at: AtomicU64,
    stuck_stripes: AtomicU64,
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
    /// What is counted as alive leaves no room.
    Full,
    /// There would be room, but the cleaner has found nothing to gain.
    Stuck,
}

impl Admission {
    pub fn new(layout: Layout, segments: u32, reactors: usize) -> Self {
        Self {
            layout,
            segments: segments.into(),
            reactors: reactors as u64,
            packed_bytes: packed_bytes(&layout),
            volumes: AtomicU64::new(0),
            rows: AtomicI64::new(0),
            fresh_segments: AtomicU64::new(0),
            moving: AtomicI64::new(0),
            asked_rows: AtomicI64::new(0),
            stuck_at: AtomicU64::new(u64::MAX),
            stuck_stripes: AtomicU64::new(u64::MAX),
            full_until_ms: AtomicU64::new(0),
        }
    }

    /// 4 KiB rows of a segment.
    pub fn rows_per_segment(&self) -> u64 {
        u64::from(self.layout.segment_bytes) / BLOCK_BYTES
    }

    /// Payload bytes of a segment full of the longest records, that leave gaps at the ends of stripes and of the segment.
    pub fn packed_bytes(&self) -> u64 {
        self.packed_bytes
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
        self.reserves().pages * self.segment_payload_bytes() / 100 * PAGES_PERCENT
    }

    /// Segments that user data may fill: all but two checkpoints, a merge and the cleaning reserve.
    pub fn user_segments(&self) -> u64 {
        let reserves = self.reserves();
        self.segments.saturating_sub(2 * reserves.checkpoint + reserves.pages + reserves.cleaning)
    }

    /// Live bytes that may be promised.
    pub fn live_limit(&self) -> u64 {
        let user = self.user_segments();
        user.saturating_sub(2 * self.reactors + user.div_ceil(SLACK_PART)) * self.packed_bytes
    }

    /// Of what user data may fill, what is alive and what is free, in parts of a hundred.
    pub fn fill(&self, segments: &Segments) -> (u64, u64) {
        let (live, room) = (segments.live_total(), (self.user_segments() * self.packed_bytes).max(1));
        let percent = (live * 100 / room).min(100);
        (percent, 100 - percent)
    }

    /// Rows that a write of `bytes` at rest may take, on its own.
    fn rows_for(&self, bytes: u64) -> i64 {
        let per_row = (BLOCK_BYTES - HEADER_BYTES as u64) * u64::from(self.layout.data_shards);
        (bytes.div_ceil(per_row) + 1) as i64
    }

    /// Asks for room for `bytes` at rest, when `stripes` stripes have been written.
    pub fn admit(self: &Arc<Self>, segments: &Segments, stripes: u64, bytes: u64) -> Result<Admitted, Refusal> {
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
        Err(if self.is_stuck(live, stripes) { Refusal::Stuck } else { Refusal::Wait })
    }

    /// Whether `bytes` more did not fit when the last checkpoint had merged the maps, and nothing dead was counted.
    pub fn is_full_for(&self, segments: &Segments, bytes: u64) -> bool {
        segments.merged_live() + bytes > self.live_limit()
    }

    /// Whether a checkpoint should be taken, lest dead bytes that are counted as alive until then refuse writes.
    pub fn is_merge_due(&self, segments: &Segments) -> bool {
        let (limit, merged) = (self.live_limit(), segments.merged_live());
        let counted = segments.live_total() + self.rows_in_bytes();
        counted > merged && counted > limit.saturating_sub(limit.saturating_sub(merged) / 2)
    }

    /// Whether rows are promised to some request.
    pub fn has_promised(&self) -> bool {
        self.rows.load(Ordering::SeqCst) > 0
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
        let moving = self.moving.load(Ordering::SeqCst).max(0) as u64;
        let cleaning = reserves.cleaning.max(moving + self.reactors + 1);
        let usable = (listed + free.saturating_sub(kept)).saturating_sub(cleaning);
        // Listed ones alone can be written now.
        (usable.min(listed) * self.rows_per_segment()) as i64
    }

    /// Bytes at rest that a round of cleaning may move, what has been promised left aside.
    pub fn room_to_move(&self, segments: &Segments) -> u64 {
        let (listed, _) = segments.left();
        let promised = (self.rows.load(Ordering::SeqCst).max(0) as u64).div_ceil(self.rows_per_segment());
        // The fresh streams may need one each at any time, and the streams of moved records leave the ends of theirs.
        listed.saturating_sub(promised + self.reactors) * self.packed_bytes / 4 * 3
    }

    /// A round of cleaning begins that moves so much, or it has ended: requests are promised nothing that it needs.
    pub fn set_moving(&self, bytes: u64) {
        let segments = if bytes == 0 { 0 } else { bytes.div_ceil(self.packed_bytes.max(1)) + self.reactors };
        self.moving.store(segments as i64, Ordering::SeqCst);
    }

    /// The round under way has taken a segment.
    pub fn moved_into_segment(&self) {
        self.moving.fetch_sub(1, Ordering::SeqCst);
    }

    /// Fresh records go into another segment.
    pub fn wrote_into_segment(&self) {
        self.fresh_segments.fetch_add(1, Ordering::SeqCst);
    }

    /// Segments that fresh records have gone into.
    pub fn fresh_segments(&self) -> u64 {
        self.fresh_segments.load(Ordering::SeqCst)
    }

    /// Whether the cleaner has given up, and would do so again: nothing has been written since, and nothing has died.
    fn is_stuck(&self, live: u64, stripes: u64) -> bool {
        self.stuck_at.load(Ordering::SeqCst) == live && self.stuck_stripes.load(Ordering::SeqCst) == stripes
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
        self.lacking(segments) > 0
    }

    /// Segments that a round of cleaning should bring back: some more than are lacking, as each round costs a checkpoint.
    pub fn cleaning_goal(&self, segments: &Segments) -> u64 {
        (self.lacking(segments) + self.low_water(segments.live_total()) / 2).max(1)
    }

    fn lacking(&self, segments: &Segments) -> u64 {
        let (listed, free) = segments.left();
        let reserves = self.reserves();
        let spare = (listed + free).saturating_sub(reserves.checkpoint + reserves.pages + reserves.cleaning);
        self.low_water(segments.live_total()).saturating_sub(spare)
    }

    /// Segments that the cleaner keeps free: a part of those that hold nothing alive, as the more of these are left to hold dead
    /// records, the more of a segment is dead when it is cleaned.
    fn low_water(&self, live: u64) -> u64 {
        let slack = self.user_segments().saturating_sub(live.div_ceil(self.packed_bytes.max(1)));
        (slack / FREE_PART).clamp(1 + self.reactors, (self.segments / 8).max(1 + self.reactors))
    }

    /// The cleaner found nothing to gain with so many live bytes and stripes, or is at work again.
    pub fn set_stuck(&self, state: Option<(u64, u64)>) {
        let (live, stripes) = state.unwrap_or((u64::MAX, u64::MAX));
        self.stuck_at.store(live, Ordering::SeqCst);
        self.stuck_stripes.store(stripes, Ordering::SeqCst);
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

/// As the streams fill a segment, with records that don't compress.
fn packed_bytes(layout: &Layout) -> u64 {
    let record = sealed_bound(RECORD_PLAIN_BYTES_MAX, BLOCK_BYTES.trailing_zeros() as u8);
    let (mut rows, mut bytes) = (layout.segment_bytes / BLOCK_BYTES as u32, 0);
    loop {
        let most = StripeLocation::payload_bytes_max(layout).min(StripeLocation::payload_bytes_in(layout, rows));
        let payload = most / record * record;
        let Some((taken, _)) = StripeLocation::cut(layout, payload) else { return bytes };
        bytes += payload as u64;
        rows = rows.saturating_sub(taken.into());
    }
}
