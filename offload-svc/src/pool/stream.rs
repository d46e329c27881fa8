//! A reactor's stripe streams: gather records into stripes, commit them in groups, and apply them in order.
//!
//! Owns the open stripe, the stripes under way and the open segments. Must not know requests. Invariants: a shard's fresh records
//! enter the log in the order of their generations and reach its map in that order; nobody is told that a record is
//! written before its stripe and all stripes before it are durable.
//!
//! There are two, for fresh records and for moved ones, so that what has long been as it is does not share segments with what
//! dies soon. Between them there is no order, and none is needed: a moved record's blocks are held until it is in its place, so
//! nothing else takes their place meanwhile, and what it was made from stays until a checkpoint leads to it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::select;
use tokio::sync::{Notify, oneshot};

use super::core::{Core, Shard};
use super::map::{Extent, RecordLocation, Run, What};
use super::options::{BLOCK_BYTES, Layout};
use super::segments::{Purpose, SegmentUse};
use super::stripe::{History, StripeLocation};
use super::stripe_io::{Label, WriteError};

/// Stream numbers of moved records in stripe headers, from here on by reactor; those of fresh ones begin at 0.
pub const MOVED_STREAMS: u32 = 1 << 16;

/// Which of a reactor's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// What hosts write.
    Fresh,
    /// What the cleaner and key rotation write again.
    Moved,
}

/// How long a stripe of moved records waits for more of them.
const GATHER: Duration = Duration::from_millis(2);
/// Stripes that wait, complete, for their turn; beyond it, appending waits.
const READY_MAX: usize = 2;

/// What a record does to its shard's map once it is durable. Locations are filled in then.
#[derive(Debug, Clone)]
pub enum Change {
    /// Maps a record's blocks to it.
    Insert { lba: u64, blocks: u16, generation: u64, key_epoch: u32 },
    /// Unmaps a range.
    Remove { range: Range<u64>, generation: u64 },
    /// Leads parts of a record to its copy. The record's blocks are held, so nothing else has taken their place.
    Relocate { parts: Vec<(u64, Extent)> },
}

/// Whether a record is durable.
pub type Written = oneshot::Receiver<Result<(), WriteError>>;

struct Entry {
    shard: Rc<Shard>,
    change: Change,
    payload_offset: u32,
    stored_bytes: u32,
    done: oneshot::Sender<Result<(), WriteError>>,
}

#[derive(Default)]
struct Batch {
    payload: Vec<u8>,
    entries: Vec<Entry>,
    /// How young the youngest of its moved records is, by the log's clock.
    written_at: u64,
}

/// A segment that stripes are written to.
struct OpenSegment {
    used: SegmentUse,
    next_block: Cell<u32>,
    under_way: Cell<usize>,
    /// No further stripe goes here.
    sealed: Cell<bool>,
}

/// A stripe under way.
struct Flight {
    batch: Batch,
    /// Where it goes; `None` if no room was found.
    placed: Option<(Rc<OpenSegment>, StripeLocation)>,
    result: Cell<Option<Result<(), WriteError>>>,
}

/// The stream.
pub struct Stream {
    lane: Lane,
    open: RefCell<Batch>,
    ready: RefCell<VecDeque<Batch>>,
    flights: RefCell<VecDeque<Rc<Flight>>>,
    segment: RefCell<Option<Rc<OpenSegment>>>,
    /// Rows of the open segment that are left when all that is complete has its place.
    rows_left: Cell<u32>,
    number: Cell<u64>,
    history: Cell<History>,
    /// Records ever appended, and ever settled.
    appended: Cell<u64>,
    settled_records: Cell<u64>,
    changed: Notify,
    spare: RefCell<Vec<Vec<u8>>>,
}

impl Stream {
    pub fn new(lane: Lane) -> Self {
        Self {
            lane,
            open: RefCell::default(),
            ready: RefCell::default(),
            flights: RefCell::default(),
            segment: RefCell::default(),
            rows_left: Cell::default(),
            number: Cell::default(),
            history: Cell::default(),
            appended: Cell::default(),
            settled_records: Cell::default(),
            changed: Notify::new(),
            spare: RefCell::default(),
        }
    }

    /// Its number in stripe headers.
    pub fn stream_number(&self, reactor: usize) -> u32 {
        match self.lane {
            Lane::Fresh => reactor as u32,
            Lane::Moved => MOVED_STREAMS + reactor as u32,
        }
    }

    /// Waits until `bytes` more fit the open stripe. The caller appends before it next waits for anything.
    pub async fn room_for(&self, core: &Core, bytes: usize) {
        let layout = &core.shared.set.layout;
        loop {
            let changed = self.changed.notified();
            let gathered = self.open.borrow().payload.len();
            if gathered + bytes <= self.stripe_room(layout, gathered, bytes) {
                return;
            }
            if self.ready.borrow().len() < READY_MAX {
                self.close_open(layout);
            } else {
                changed.await;
            }
        }
    }

    /// What the open stripe may hold: where only the end of a segment is left, it is made to fit that, if anything does.
    fn stripe_room(&self, layout: &Layout, gathered: usize, bytes: usize) -> usize {
        let most = StripeLocation::payload_bytes_max(layout);
        let tail = StripeLocation::payload_bytes_in(layout, self.rows_left.get()).min(most);
        if gathered.max(bytes) <= tail { tail } else { most }
    }

    fn close_open(&self, layout: &Layout) {
        let payload = self.spare.borrow_mut().pop().unwrap_or_default();
        let batch = self.open.replace(Batch { payload, entries: Vec::new(), written_at: 0 });
        if !batch.entries.is_empty() {
            // As `place` will do it.
            let rows = StripeLocation::cut(layout, batch.payload.len()).map_or(0, |(rows, _)| u32::from(rows));
            let left = self.rows_left.get();
            let whole = layout.segment_bytes / BLOCK_BYTES as u32;
            self.rows_left.set(left.checked_sub(rows).unwrap_or_else(|| whole.saturating_sub(rows)));
            self.ready.borrow_mut().push_back(batch);
            self.changed.notify_waiters();
        }
    }

    /// Appends a record of at most `bound` bytes, which `fill` writes and gives the length of. [`Stream::room_for`] has
    /// been awaited just before.
    pub fn append<E>(
        &self,
        shard: &Rc<Shard>,
        change: Change,
        bound: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<Written, E> {
        let mut open = self.open.borrow_mut();
        let start = open.payload.len();
        open.payload.resize(start + bound, 0);
        let filled = fill(&mut open.payload[start..]);
        let stored = *filled.as_ref().unwrap_or(&0);
        open.payload.truncate(start + stored);
        filled?;
        let (done, written) = oneshot::channel();
        let (payload_offset, stored_bytes) = (start as u32, stored as u32);
        self.appended.set(self.appended.get() + 1);
        open.entries.push(Entry { shard: Rc::clone(shard), change, payload_offset, stored_bytes, done });
        self.changed.notify_waiters();
        Ok(written)
    }

    /// What is appended next has been as it is since then, by the log's clock.
    pub fn note_age(&self, written_at: u64) {
        let mut open = self.open.borrow_mut();
        open.written_at = open.written_at.max(written_at);
    }

    /// Appends a record as it is. As [`Stream::append`].
    pub fn append_bytes(&self, shard: &Rc<Shard>, change: Change, record: &[u8]) -> Written {
        let appended = self.append(shard, change, record.len(), |out| {
            out.copy_from_slice(record);
            Ok::<usize, std::convert::Infallible>(record.len())
        });
        match appended {
            Ok(written) => written,
            Err(never) => match never {},
        }
    }

    /// Ends the open segment if its use is older than the sequence number `below`: one that is hardly written to must not
    /// stay open for ever, since what a member lacks after an absence is counted from the oldest that is open.
    pub fn retire(&self, core: &Core, below: u64) {
        let old = |segment: &Rc<OpenSegment>| segment.used.sequence.number < below;
        let retired = self.segment.borrow_mut().take_if(|segment| old(segment));
        if let Some(segment) = retired {
            segment.sealed.set(true);
            self.rows_left.set(0);
            close_if_done(core, &segment);
        }
    }

    /// How many of its stripes are settled: what is in them is in the maps.
    pub fn settled(&self) -> u64 {
        self.history.get().settled
    }

    /// Nothing gathered, nothing under way.
    pub fn is_idle(&self) -> bool {
        self.open.borrow().entries.is_empty() && self.ready.borrow().is_empty() && self.flights.borrow().is_empty()
    }

    /// Waits until what has been appended up to now is settled, whatever is appended meanwhile.
    pub async fn settled_so_far(&self) {
        let appended = self.appended.get();
        loop {
            let changed = self.changed.notified();
            if self.settled_records.get() >= appended {
                return;
            }
            changed.await;
        }
    }

    /// Waits until all that has been appended is settled.
    pub async fn drained(&self) {
        loop {
            let changed = self.changed.notified();
            if self.is_idle() {
                return;
            }
            changed.await;
        }
    }

    /// Commits for as long as the reactor runs.
    pub async fn run(core: Rc<Core>, lane: Lane) {
        let stream = core.stream_of(lane);
        loop {
            let batch = stream.next_batch(&core).await;
            stream.commit(&core, batch).await;
        }
    }

    /// The next stripe to write: a full one if fewer than the allowed number are under way; one that is not full when
    /// none is, so that whatever arrives during a commit shares the next.
    async fn next_batch(&self, core: &Core) -> Batch {
        loop {
            let changed = self.changed.notified();
            let under_way = self.flights.borrow().len();
            if under_way < core.shared.options.commits_in_flight as usize
                && let Some(batch) = self.ready.borrow_mut().pop_front()
            {
                self.changed.notify_waiters();
                return batch;
            }
            if under_way == 0 && !self.open.borrow().entries.is_empty() {
                match self.lane {
                    // Whoever is ready to run may still join.
                    Lane::Fresh => yield_now().await,
                    // Nobody waits for these, and more are on their way as a rule.
                    Lane::Moved => {
                        let at = core.env().now() + GATHER;
                        drop(select(pin!(self.filled()), core.env().sleep_until(at)).await);
                    }
                }
                if self.ready.borrow().is_empty() {
                    self.close_open(&core.shared.set.layout);
                }
                continue;
            }
            changed.await;
        }
    }

    /// Waits until a stripe is complete.
    async fn filled(&self) {
        loop {
            let changed = self.changed.notified();
            if !self.ready.borrow().is_empty() {
                return;
            }
            changed.await;
        }
    }

    async fn commit(&self, core: &Rc<Core>, batch: Batch) {
        let (segment, location) = match self.place(core, batch.payload.len(), batch.written_at).await {
            Ok(placed) => placed,
            Err(error) => {
                // In its turn: a generation must not count as settled before those below it.
                let flight = Flight { batch, placed: None, result: Cell::new(Some(Err(error))) };
                self.flights.borrow_mut().push_back(Rc::new(flight));
                return self.settle(core);
            }
        };
        segment.under_way.set(segment.under_way.get() + 1);
        let sequence = segment.used.sequence;
        let flight = Rc::new(Flight { batch, placed: Some((segment, location)), result: Cell::new(None) });
        self.flights.borrow_mut().push_back(Rc::clone(&flight));
        let number = self.number.replace(self.number.get() + 1);
        let history = self.history.get();
        let (task_core, lane, stream) = (Rc::clone(core), self.lane, self.stream_number(core.index));
        core.stripes.io.env.spawn(Box::pin(async move {
            let label = Label { sequence, stream, number, history };
            let result = task_core.stripes.write(location, label, &flight.batch.payload).await;
            task_core.shared.stripes_written.fetch_add(1, Ordering::SeqCst);
            flight.result.set(Some(result));
            drop(flight);
            task_core.stream_of(lane).settle(&task_core);
        }));
    }

    /// Room in a segment for a payload.
    async fn place(
        &self,
        core: &Core,
        payload: usize,
        written_at: u64,
    ) -> Result<(Rc<OpenSegment>, StripeLocation), WriteError> {
        let layout = &core.shared.set.layout;
        // Payloads are bounded when they are gathered.
        let (shard_blocks, data_shards) = StripeLocation::cut(layout, payload).ok_or(WriteError::NoSpace)?;
        let blocks_per_segment = layout.segment_bytes / BLOCK_BYTES as u32;
        let current = self.segment.borrow().clone();
        let fits = |segment: &Rc<OpenSegment>| segment.next_block.get() + u32::from(shard_blocks) <= blocks_per_segment;
        let segment = match current {
            Some(segment) if fits(&segment) => segment,
            other => {
                if let Some(full) = other {
                    full.sealed.set(true);
                    self.segment.replace(None);
                    close_if_done(core, &full);
                }
                let used = core.take_segment().await?;
                match self.lane {
                    Lane::Fresh => core.shared.admission.wrote_into_segment(),
                    Lane::Moved => {
                        core.shared.admission.moved_into_segment();
                        core.shared.segments.set_age(used, 0);
                    }
                }
                let (next_block, under_way) = (Cell::new(0), Cell::new(0));
                let segment = Rc::new(OpenSegment { used, next_block, under_way, sealed: Cell::new(false) });
                self.segment.replace(Some(Rc::clone(&segment)));
                segment
            }
        };
        if self.lane == Lane::Moved {
            core.shared.segments.younger(segment.used, written_at);
        }
        let start_block = segment.next_block.replace(segment.next_block.get() + u32::from(shard_blocks));
        let turn = self.number.get() + segment.used.sequence.number;
        let rotation = core.stripes.rotation(turn, data_shards);
        let location = StripeLocation { segment: segment.used.index, start_block, shard_blocks, data_shards, rotation };
        Ok((segment, location))
    }

    /// Applies what is done, in order.
    fn settle(&self, core: &Core) {
        loop {
            let flight = {
                let mut flights = self.flights.borrow_mut();
                match flights.front() {
                    Some(front) if front.result.get().is_some() => flights.pop_front(),
                    _ => None,
                }
            };
            let Some(flight) = flight else { break };
            self.apply(core, flight);
        }
        self.changed.notify_waiters();
    }

    fn apply(&self, core: &Core, flight: Rc<Flight>) {
        let result = flight.result.get().unwrap_or(Err(WriteError::TooFewMembers));
        if let (Err(WriteError::NoSpace), Some((segment, _))) = (result, &flight.placed) {
            core.pause_for_space();
            core.shared.segments.set_backed(segment.used.index, false);
            core.shared.backing.notify_one();
        }
        // Only the task that has just ended held it too.
        let Ok(flight) = Rc::try_unwrap(flight) else { return };
        if flight.placed.is_some() {
            let mut history = self.history.get();
            history.settle(result.is_ok());
            self.history.set(history);
        }
        for entry in flight.batch.entries {
            if let (Ok(()), Some((_, stripe))) = (result, &flight.placed) {
                let (payload_offset, stored_bytes) = (entry.payload_offset, entry.stored_bytes);
                let location = RecordLocation { stripe: *stripe, payload_offset, stored_bytes };
                entry.shard.apply(&core.shared, &entry.change, location);
            }
            // Moved records are in no order with fresh ones: a mount that has not heard of them finds what they were made from.
            if self.lane == Lane::Fresh {
                entry.shard.mark_applied(&entry.change);
            }
            self.settled_records.set(self.settled_records.get() + 1);
            // Whoever asked may have gone.
            let _ = entry.done.send(result);
        }
        let mut payload = flight.batch.payload;
        payload.clear();
        if self.spare.borrow().len() <= READY_MAX {
            self.spare.borrow_mut().push(payload);
        }
        if let Some((segment, _)) = flight.placed {
            segment.under_way.set(segment.under_way.get() - 1);
            close_if_done(core, &segment);
        }
    }
}

fn close_if_done(core: &Core, segment: &OpenSegment) {
    if segment.sealed.get() && segment.under_way.get() == 0 {
        core.shared.segments.close(segment.used);
    }
}

impl Shard {
    /// Brings a durable record into the map.
    pub fn apply(&self, shared: &super::shared::Shared, change: &Change, location: RecordLocation) {
        match change {
            Change::Insert { lba, blocks, generation, key_epoch } => {
                let extent = Extent {
                    location,
                    generation: *generation,
                    key_epoch: *key_epoch,
                    record_offset: 0,
                    record_blocks: *blocks,
                    count: *blocks,
                };
                self.change(shared, Run::record(*lba, extent));
            }
            Change::Remove { range, .. } => {
                let count = range.end - range.start;
                self.change(shared, Run { lba: range.start, count, what: What::Hole });
            }
            Change::Relocate { parts } => {
                for (lba, extent) in parts {
                    self.change(shared, Run::record(*lba, Extent { location, ..*extent }));
                }
            }
        }
    }

    /// The record's generation is settled, one way or the other.
    fn mark_applied(&self, change: &Change) {
        if let Change::Insert { generation, .. } | Change::Remove { generation, .. } = change {
            self.applied.set(self.applied.get().max(*generation));
        }
    }
}

/// Lets the other ready tasks of this reactor run first.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(move |context| {
        if std::mem::replace(&mut yielded, true) {
            return std::task::Poll::Ready(());
        }
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

impl Core {
    /// After the file system beneath a member was full: no new writes for a while, then one tries again.
    fn pause_for_space(&self) {
        self.shared.admission.set_full_until(self.now_ms() + FULL_PAUSE_MS);
    }

    /// A segment, as soon as there is one.
    pub async fn take_segment(&self) -> Result<SegmentUse, WriteError> {
        let begun = self.shared.checkpoints_begun.load(Ordering::SeqCst);
        loop {
            let event = self.shared.space_event.notified();
            if let Some(used) = self.shared.segments.allocate(Purpose::Log, self.random_u64()) {
                self.shared.on_segment_taken();
                return Ok(used);
            }
            if self.shared.set.is_failed() {
                return Err(WriteError::TooFewMembers);
            }
            // One that had begun before may have seen the last segments go while it was at it.
            if self.shared.is_refused(begun) {
                return Err(WriteError::NoSpace);
            }
            self.shared.want_checkpoint();
            event.await;
        }
    }
}

/// How long writes are refused after the file system beneath a member was full.
const FULL_PAUSE_MS: u64 = 500;
