//! A reactor's stripe stream: gathers records into stripes, commits them in groups, and applies them in order.
//!
//! Owns the open stripe, the stripes under way and the open segments. Must not know requests. Invariants: a shard's records
//! enter the log in the order of their generations and reach its map in that order; nobody is told that a record is
//! written before its stripe and all stripes before it are durable.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use tokio::sync::{Notify, oneshot};

use super::core::{Core, Shard};
use super::map::{Extent, RecordLocation, Run, What};
use super::segments::{Purpose, SegmentUse};
use super::stripe::{History, StripeLocation};
use super::stripe_io::{Label, WriteError};

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
#[derive(Default)]
pub struct Stream {
    open: RefCell<Batch>,
    ready: RefCell<VecDeque<Batch>>,
    flights: RefCell<VecDeque<Rc<Flight>>>,
    segment: RefCell<Option<Rc<OpenSegment>>>,
    number: Cell<u64>,
    history: Cell<History>,
    /// Records ever appended, and ever settled.
    appended: Cell<u64>,
    settled_records: Cell<u64>,
    changed: Notify,
    spare: RefCell<Vec<Vec<u8>>>,
}

impl Stream {
    /// Waits until `bytes` more fit the open stripe. The caller appends before it next waits for anything.
    pub async fn room_for(&self, core: &Core, bytes: usize) {
        let most = StripeLocation::payload_bytes_max(&core.shared.set.layout);
        loop {
            let changed = self.changed.notified();
            if self.open.borrow().payload.len() + bytes <= most {
                return;
            }
            if self.ready.borrow().len() < READY_MAX {
                self.close_open();
            } else {
                changed.await;
            }
        }
    }

    fn close_open(&self) {
        let payload = self.spare.borrow_mut().pop().unwrap_or_default();
        let batch = self.open.replace(Batch { payload, entries: Vec::new() });
        if !batch.entries.is_empty() {
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
    pub async fn run(core: Rc<Core>) {
        loop {
            let batch = core.stream.next_batch(&core).await;
            core.stream.commit(&core, batch).await;
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
                // Whoever is ready to run may still join.
                yield_now().await;
                self.close_open();
                continue;
            }
            changed.await;
        }
    }

    async fn commit(&self, core: &Rc<Core>, batch: Batch) {
        let (segment, location) = match self.place(core, batch.payload.len()).await {
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
        let task_core = Rc::clone(core);
        core.stripes.io.env.spawn(Box::pin(async move {
            let label = Label { sequence, stream: task_core.index as u32, number, history };
            let result = task_core.stripes.write(location, label, &flight.batch.payload).await;
            task_core.shared.stripes_written.fetch_add(1, Ordering::Relaxed);
            flight.result.set(Some(result));
            drop(flight);
            task_core.stream.settle(&task_core);
        }));
    }

    /// Room in a segment for a payload.
    async fn place(&self, core: &Core, payload: usize) -> Result<(Rc<OpenSegment>, StripeLocation), WriteError> {
        let layout = &core.shared.set.layout;
        // Payloads are bounded when they are gathered.
        let (shard_blocks, data_shards) = StripeLocation::cut(layout, payload).ok_or(WriteError::NoSpace)?;
        let blocks_per_segment = layout.segment_bytes / super::options::BLOCK_BYTES as u32;
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
                let used = core.take_segment(Purpose::Log).await?;
                let (next_block, under_way) = (Cell::new(0), Cell::new(0));
                let segment = Rc::new(OpenSegment { used, next_block, under_way, sealed: Cell::new(false) });
                self.segment.replace(Some(Rc::clone(&segment)));
                segment
            }
        };
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
        if result == Err(WriteError::NoSpace) {
            core.pause_for_space();
            if let Some((segment, _)) = &flight.placed {
                core.shared.segments.set_backed(segment.used.index, false);
            }
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
            entry.shard.mark_applied(&entry.change);
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
    pub async fn take_segment(&self, purpose: Purpose) -> Result<SegmentUse, WriteError> {
        let begun = self.shared.checkpoints_begun.load(Ordering::SeqCst);
        loop {
            let event = self.shared.space_event.notified();
            if let Some(used) = self.shared.segments.allocate(purpose, self.random_u64()) {
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
