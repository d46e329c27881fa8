//! Segments: which are free, which are being written, which may be written after a crash is replayed, and how much in
//! each is alive.
//!
//! Owns the allocator's state and the live-byte and reader counters. Must not know records or members. Invariants: a
//! segment that holds anything a usable checkpoint or its replay needs is never handed out; and every segment handed out
//! for the log stands in the durable checkpoint's window, so that a mount finds it.
//!
//! A segment is *backed* when its room on the members' file systems is known to be allocated. While one of these is full, only
//! backed segments count as there.
//!
//! The lock here is taken once per segment, not per request; the counters are atomics.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::stripe::Sequence;

/// A segment in one of its uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SegmentUse {
    pub index: u32,
    pub sequence: Sequence,
}

/// What a segment is for at the moment.
/// Uses of segments that were not written to their end at a moment: (segment, sequence number), and the number that the next
/// one would have had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    uses: Vec<(usize, u64)>,
    next: u64,
}

impl Unfinished {
    /// Nothing from `next` on.
    pub fn from(next: u64) -> Self {
        Self { uses: Vec::new(), next }
    }

    pub fn next(&self) -> u64 {
        self.next
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Holds nothing that is needed.
    Free,
    /// Free, and in the window: the log may go on here.
    Listed(Sequence),
    /// A stream writes to it, or stripes of it are under way.
    Open(Sequence),
    /// Written; its live records count, its dead space comes back at a checkpoint after they are gone.
    Closed(Sequence),
    /// Holds the checkpoint in use, or one being written.
    Checkpoint(Sequence),
}

/// What a segment is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The log, for what has been admitted already.
    Log,
    /// A checkpoint.
    Checkpoint,
    /// Pages of maps.
    Pages,
}

struct Inner {
    states: Vec<State>,
    /// Segments of the window that have not been handed out, next one last.
    listed: Vec<SegmentUse>,
    /// Segments handed out since the checkpoint in progress (or else the last one) began, and those open then.
    window: Vec<u32>,
    /// Open segments for pages.
    pages: Vec<u32>,
    next_sequence: u64,
    /// The first number given out by a window that is not durable yet.
    listing: Option<u64>,
    /// By segment: its room is allocated on all members of the set.
    backed: Vec<bool>,
}

/// Segments that are to be backed before they are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Of those that the log can take now.
    pub listed: u64,
    /// Of these and the free ones.
    pub total: u64,
}

impl Wanted {
    /// As many as there are.
    pub const MORE: Self = Self { listed: u64::MAX, total: u64::MAX };
}

/// Counters of one segment.
#[derive(Debug, Default)]
struct Counters {
    /// What trees lead to, their pages included: as checkpoints record it.
    in_trees: AtomicI64,
    /// What layers lead to. What they hide of the trees counts there until they are merged.
    in_layers: AtomicI64,
    readers: AtomicU32,
    /// When the youngest of what it holds was written: the log's clock is the number of uses given out. Not kept over a mount,
    /// which takes it for as old as its use.
    written_at: AtomicU64,
    /// It was taken for pages. Nor is this kept over a mount.
    pages: AtomicBool,
}

/// A segment that could be cleaned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    pub used: SegmentUse,
    pub live: u64,
    /// When the youngest of what it holds was written, by the log's clock.
    pub written_at: u64,
    /// It holds pages of maps.
    pub pages: bool,
}

/// All segments of a pool.
pub struct Segments {
    inner: Mutex<Inner>,
    counters: Vec<Counters>,
    live_total: AtomicI64,
    /// Of these, what trees lead to.
    trees_total: AtomicI64,
    /// What they led to when the last checkpoint had merged the layers.
    merged_live: AtomicI64,
    listed_left: AtomicU64,
    free_left: AtomicU64,
    /// As the two above, of backed ones.
    listed_backed: AtomicU64,
    free_backed: AtomicU64,
    /// A file system beneath a member is full.
    full_beneath: AtomicBool,
}

/// The segments that a checkpoint frees and lists, fixed before it is written.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Closed before the checkpoint began, and dead when the maps had been merged.
    pub freed: Vec<u32>,
    /// The checkpoint before this one.
    pub old_checkpoint: Vec<u32>,
}

impl Segments {
    /// As a mount has found them. `next_sequence` is above every number ever used.
    pub fn new(states: Vec<State>, next_sequence: u64) -> Self {
        let number = |state: &State| match state {
            State::Listed(sequence) | State::Open(sequence) | State::Closed(sequence) | State::Checkpoint(sequence) => {
                sequence.number
            }
            State::Free => 0,
        };
        let counters = states.iter().map(|state| Counters { written_at: number(state).into(), ..Counters::default() });
        let counters = counters.collect();
        let free = states.iter().filter(|state| matches!(state, State::Free)).count() as u64;
        // What has been written has its room.
        let backed = states.iter().map(|state| !matches!(state, State::Free)).collect();
        let (listed, window) = (Vec::new(), Vec::new());
        Self {
            inner: Mutex::new(Inner {
                states,
                listed,
                window,
                pages: Vec::new(),
                next_sequence,
                listing: None,
                backed,
            }),
            counters,
            live_total: AtomicI64::new(0),
            trees_total: AtomicI64::new(0),
            merged_live: AtomicI64::new(0),
            listed_left: AtomicU64::new(0),
            free_left: AtomicU64::new(free),
            listed_backed: AtomicU64::new(0),
            free_backed: AtomicU64::new(0),
            full_beneath: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts live bytes of trees in (or, negative, out). What goes from a layer into a tree is counted in first.
    pub fn count_trees(&self, segment: u32, bytes: i64) {
        if let Some(counters) = self.counters.get(segment as usize) {
            counters.in_trees.fetch_add(bytes, Ordering::SeqCst);
            self.trees_total.fetch_add(bytes, Ordering::SeqCst);
            self.live_total.fetch_add(bytes, Ordering::SeqCst);
        }
    }

    /// Counts live bytes of layers.
    pub fn count_layers(&self, segment: u32, bytes: i64) {
        if let Some(counters) = self.counters.get(segment as usize) {
            counters.in_layers.fetch_add(bytes, Ordering::SeqCst);
            self.live_total.fetch_add(bytes, Ordering::SeqCst);
        }
    }

    /// Live bytes, never too low.
    pub fn live_bytes(&self, segment: u32) -> i64 {
        let Some(counters) = self.counters.get(segment as usize) else { return 0 };
        // In this order: what is on its way from the layers into a tree must be seen.
        let layers = counters.in_layers.load(Ordering::SeqCst);
        layers + counters.in_trees.load(Ordering::SeqCst)
    }

    pub fn live_total(&self) -> u64 {
        self.live_total.load(Ordering::SeqCst).max(0) as u64
    }

    /// What was alive when the last checkpoint had merged all changes from before it: no more, and no less.
    pub fn merged_live(&self) -> u64 {
        self.merged_live.load(Ordering::SeqCst).max(0) as u64
    }

    /// Keeps a segment from being handed out while it is read. Taken while the map still leads to it.
    pub fn pin(&self, segment: u32) {
        if let Some(counters) = self.counters.get(segment as usize) {
            counters.readers.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub fn unpin(&self, segment: u32) {
        if let Some(counters) = self.counters.get(segment as usize) {
            counters.readers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Segments that the log can still take before the next checkpoint, and free ones beyond the window.
    pub fn left(&self) -> (u64, u64) {
        if self.is_full_beneath() {
            return self.backed_left();
        }
        (self.listed_left.load(Ordering::SeqCst), self.free_left.load(Ordering::SeqCst))
    }

    /// The same, of those that are backed: of the log's, those before the first that is not.
    pub fn backed_left(&self) -> (u64, u64) {
        (self.listed_backed.load(Ordering::SeqCst), self.free_backed.load(Ordering::SeqCst))
    }

    /// Whether a file system beneath a member is full.
    pub fn is_full_beneath(&self) -> bool {
        self.full_beneath.load(Ordering::SeqCst)
    }

    pub fn set_full_beneath(&self, full: bool) {
        let inner = self.lock();
        self.full_beneath.store(full, Ordering::SeqCst);
        self.recount(&inner);
    }

    /// The room of a segment is allocated, or was found not to be.
    pub fn set_backed(&self, segment: u32, backed: bool) {
        let mut inner = self.lock();
        if let Some(known) = inner.backed.get_mut(segment as usize) {
            *known = backed;
        }
        self.recount(&inner);
    }

    /// All that are backed, whatever they hold.
    pub fn backed(&self) -> Vec<u32> {
        let inner = self.lock();
        (0..inner.backed.len() as u32).filter(|index| inner.backed[*index as usize]).collect()
    }

    /// The next segment to be backed, if fewer are than wanted: first of those that the log takes next, then of the free ones
    /// by number; with `after`, those behind it in that order, to be tried when it could not be.
    pub fn next_unbacked(&self, wanted: Wanted, after: Option<u32>) -> Option<u32> {
        let inner = self.lock();
        let (listed_backed, free_backed) = self.backed_left();
        let unbacked = |index: &u32| !inner.backed[*index as usize];
        let lacks_total = listed_backed + free_backed < wanted.total;
        if !lacks_total && listed_backed >= wanted.listed {
            return None;
        }
        let listed = inner.listed.iter().rev().map(|used| used.index).filter(unbacked);
        let free = (0..inner.states.len() as u32).filter(|index| inner.states[*index as usize] == State::Free);
        let free = free.filter(unbacked).filter(|index| self.unread(*index) && lacks_total);
        let mut all: Box<dyn Iterator<Item = u32>> =
            if listed_backed < wanted.listed { Box::new(listed.chain(free)) } else { Box::new(free.chain(listed)) };
        match after {
            Some(after) => {
                all.find(|index| *index == after)?;
                all.next()
            }
            None => all.next(),
        }
    }

    /// Takes a free segment's backing away where more than `kept` have it. It is pinned: until that ends nobody uses it.
    pub fn take_surplus(&self, kept: u64) -> Option<u32> {
        let mut inner = self.lock();
        let (listed, free) = self.backed_left();
        if listed + free <= kept {
            return None;
        }
        let surplus = |index: &u32| {
            let at = *index as usize;
            inner.states[at] == State::Free && inner.backed[at] && self.unread(*index)
        };
        let index = (0..inner.states.len() as u32).rev().find(surplus)?;
        inner.backed[index as usize] = false;
        self.pin(index);
        self.recount(&inner);
        Some(index)
    }

    /// Segments that a mount would have to read now.
    pub fn window_len(&self) -> u64 {
        let inner = self.lock();
        (inner.window.len() + inner.pages.len() + inner.listed.len()) as u64
    }

    /// How many segments are in (free or listed, open, closed, checkpoint) use.
    pub fn census(&self) -> [u64; 4] {
        let mut census = [0; 4];
        for state in &self.lock().states {
            let at = match state {
                State::Free | State::Listed(_) => 0,
                State::Open(_) => 1,
                State::Closed(_) => 2,
                State::Checkpoint(_) => 3,
            };
            census[at] += 1;
        }
        census
    }

    /// A segment to write to, or `None` when none can be had before the next checkpoint.
    pub fn allocate(&self, purpose: Purpose, fresh_nonce: u64) -> Option<SegmentUse> {
        let mut inner = self.lock();
        let used = match purpose {
            Purpose::Log => {
                let backed = |used: &SegmentUse| inner.backed[used.index as usize] && self.unread(used.index);
                let at = inner.listed.iter().rposition(backed);
                let any = || inner.listed.iter().rposition(|used| self.unread(used.index));
                let at = at.or_else(|| any().filter(|_| !self.is_full_beneath()))?;
                let used = inner.listed.remove(at);
                inner.states[used.index as usize] = State::Open(used.sequence);
                inner.window.push(used.index);
                used
            }
            Purpose::Pages => {
                let full = self.is_full_beneath();
                let fits = |index: u32, backed: bool| self.unread(index) && inner.backed[index as usize] == backed;
                let free = |backed: bool| {
                    let mut states = inner.states.iter().enumerate();
                    states.find(|(i, state)| **state == State::Free && fits(*i as u32, backed)).map(|(i, _)| i as u32)
                };
                let listed = |backed: bool| inner.listed.iter().rposition(|used| fits(used.index, backed));
                let used = match free(true).or_else(|| free(false).filter(|_| !full)) {
                    Some(index) => SegmentUse { index, sequence: inner.take_sequence(fresh_nonce) },
                    // A mount finds it in the window, and no records for it.
                    None => {
                        let at = listed(true).or_else(|| listed(false).filter(|_| !full))?;
                        let used = inner.listed.remove(at);
                        inner.window.push(used.index);
                        used
                    }
                };
                inner.states[used.index as usize] = State::Open(used.sequence);
                inner.pages.push(used.index);
                used
            }
            Purpose::Checkpoint => {
                let free = |index: &u32| inner.states[*index as usize] == State::Free && self.unread(*index);
                let mut all = (0..inner.states.len() as u32).filter(free);
                let first = all.clone().next();
                let index = match all.find(|index| inner.backed[*index as usize]).or(first) {
                    Some(index) => index,
                    // Pages may have taken them. A mount finds it in the window, with nothing of that use in it.
                    None => {
                        let at = inner.listed.iter().rposition(|used| self.unread(used.index))?;
                        inner.listed.remove(at).index
                    }
                };
                let sequence = inner.take_sequence(fresh_nonce);
                inner.states[index as usize] = State::Checkpoint(sequence);
                SegmentUse { index, sequence }
            }
        };
        self.recount(&inner);
        self.set_age(used, used.sequence.number);
        if let Some(counters) = self.counters.get(used.index as usize) {
            counters.pages.store(purpose == Purpose::Pages, Ordering::Relaxed);
        }
        Some(used)
    }

    /// What a segment will hold is as old as this.
    pub fn set_age(&self, used: SegmentUse, written_at: u64) {
        if let Some(counters) = self.counters.get(used.index as usize) {
            counters.written_at.store(written_at, Ordering::Relaxed);
        }
    }

    /// It holds something that is as young as this.
    pub fn younger(&self, used: SegmentUse, written_at: u64) {
        if let Some(counters) = self.counters.get(used.index as usize) {
            counters.written_at.fetch_max(written_at, Ordering::Relaxed);
        }
    }

    pub fn written_at(&self, segment: u32) -> u64 {
        self.counters.get(segment as usize).map_or(0, |counters| counters.written_at.load(Ordering::Relaxed))
    }

    fn unread(&self, segment: u32) -> bool {
        self.counters.get(segment as usize).is_some_and(|c| c.readers.load(Ordering::SeqCst) == 0)
    }

    /// The stream is done with a segment and no stripe of it is under way.
    pub fn close(&self, used: SegmentUse) {
        let mut inner = self.lock();
        if inner.states.get(used.index as usize) == Some(&State::Open(used.sequence)) {
            inner.states[used.index as usize] = State::Closed(used.sequence);
            inner.pages.retain(|index| *index != used.index);
        }
    }

    /// A checkpoint begins: what is open now or handed out from now on belongs to its window.
    pub fn begin_checkpoint(&self) -> Plan {
        let mut inner = self.lock();
        let mut plan = Plan::default();
        let mut open = Vec::new();
        for (index, state) in inner.states.iter().enumerate() {
            let index = index as u32;
            match state {
                State::Open(_) if !inner.pages.contains(&index) => open.push(index),
                State::Checkpoint(_) => plan.old_checkpoint.push(index),
                _ => {}
            }
        }
        inner.window = open;
        plan
    }

    /// The maps are merged: what was closed before the checkpoint began, and is dead now, comes back with it.
    pub fn settle_plan(&self, plan: &mut Plan) {
        self.merged_live.store(self.trees_total.load(Ordering::SeqCst), Ordering::SeqCst);
        let inner = self.lock();
        let window: HashSet<u32> = inner.window.iter().copied().collect();
        let dead = |index: u32| self.live_bytes(index) == 0 && !window.contains(&index);
        let closed = inner.states.iter().enumerate().filter(|(_, state)| matches!(state, State::Closed(_)));
        plan.freed = closed.map(|(index, _)| index as u32).filter(|index| dead(*index)).collect();
    }

    /// The window of the checkpoint being written: everything that may have been written since it began or may be
    /// written before the next. `extra` more segments are listed from the free ones, if `keep_free` stay, and from
    /// those that the checkpoint frees. They can be handed out once [`Segments::finish_checkpoint`] has been called.
    pub fn window(&self, plan: &Plan, limit: usize, keep_free: usize, mut nonce: impl FnMut() -> u64) -> Window {
        let mut inner = self.lock();
        let mut uses: Vec<SegmentUse> = Vec::new();
        // Pages that a crash leaves unfinished are given up by the mount, like other stripes.
        let pages = inner.pages.iter().filter(|index| !inner.window.contains(index));
        for &index in inner.window.iter().chain(pages) {
            if let State::Open(sequence) | State::Closed(sequence) = inner.states[index as usize] {
                uses.push(SegmentUse { index, sequence });
            }
        }
        let full = self.is_full_beneath();
        if full {
            inner.unlist_unbacked();
        }
        uses.extend(&inner.listed);
        let free = (0..inner.states.len() as u32).filter(|i| inner.states[*i as usize] == State::Free);
        let (mut free, unbacked): (Vec<u32>, Vec<u32>) = free.partition(|index| inner.backed[*index as usize]);
        // Backed ones stay free for the next checkpoint, where that is all there is beneath.
        let kept = free.split_off(free.len().saturating_sub(keep_free));
        free.extend(unbacked.iter().filter(|_| !full));
        let after = free.len() + plan.freed.len() + plan.old_checkpoint.len() + kept.len();
        let mut room = limit.saturating_sub(uses.len()).min(after.saturating_sub(keep_free));
        let mut added = Vec::new();
        inner.listing = Some(inner.next_sequence);
        // Those freed now come last: the members may still be busy with them.
        for &index in free.iter().chain(&plan.freed).chain(&plan.old_checkpoint).chain(&kept) {
            if room == 0 {
                break;
            }
            let sequence = inner.take_sequence(nonce());
            added.push(SegmentUse { index, sequence });
            room -= 1;
        }
        uses.extend(&added);
        let data = inner.states.iter().enumerate().filter_map(|(index, state)| match state {
            State::Open(sequence) | State::Closed(sequence) => {
                let live = self.counters.get(index).map_or(0, |c| c.in_trees.load(Ordering::SeqCst));
                if live < 0 {
                    // A bug of ours. What may be in use is kept.
                    tracing::error!(index, live, "more was taken off a segment than was in it");
                }
                let live = if live < 0 { 1 } else { live as u64 };
                Some((SegmentUse { index: index as u32, sequence: *sequence }, live))
            }
            _ => None,
        });
        Window { data: data.collect(), uses, added, next_sequence: inner.next_sequence }
    }

    /// The checkpoint is durable on the whole set: what it freed is free, what it listed can be handed out.
    pub fn finish_checkpoint(&self, plan: &Plan, window: &Window) {
        let mut inner = self.lock();
        for &index in plan.freed.iter().chain(&plan.old_checkpoint) {
            inner.states[index as usize] = State::Free;
        }
        for used in &window.added {
            // The checkpoint's own last stripes may have taken it meanwhile; a mount then finds nothing of this sequence.
            if inner.states[used.index as usize] == State::Free {
                inner.states[used.index as usize] = State::Listed(used.sequence);
                inner.listed.insert(0, *used);
            }
        }
        inner.listing = None;
        self.recount(&inner);
    }

    /// The checkpoint came to nothing: the segments that it wrote are free again.
    pub fn abandon_checkpoint(&self, written: &[SegmentUse]) {
        let mut inner = self.lock();
        for used in written {
            if inner.states[used.index as usize] == State::Checkpoint(used.sequence) {
                inner.states[used.index as usize] = State::Free;
            }
        }
        self.recount(&inner);
    }

    fn recount(&self, inner: &Inner) {
        let free = inner.states.iter().filter(|state| **state == State::Free).count() as u64;
        let backed = |index: usize| inner.backed.get(index) == Some(&true);
        let states = inner.states.iter().enumerate();
        let free_backed = states.filter(|(index, state)| **state == State::Free && backed(*index)).count() as u64;
        // They are handed out in order: a use that is passed by stays unfinished, and that makes a member's return costly.
        let mut listed = inner.listed.iter().rev().map(|used| backed(used.index as usize));
        let listed_backed = if self.is_full_beneath() {
            listed.filter(|backed| *backed).count() as u64
        } else {
            listed.position(|backed| !backed).unwrap_or(inner.listed.len()) as u64
        };
        self.free_backed.store(free_backed, Ordering::SeqCst);
        self.listed_backed.store(listed_backed, Ordering::SeqCst);
        self.free_left.store(free, Ordering::SeqCst);
        self.listed_left.store(inner.listed.len() as u64, Ordering::SeqCst);
    }

    /// Closed segments: what could be cleaned.
    pub fn candidates(&self) -> Vec<Candidate> {
        let candidate = |(used, live): (SegmentUse, u64)| {
            let pages = self.counters.get(used.index as usize).is_some_and(|c| c.pages.load(Ordering::Relaxed));
            Candidate { used, live, written_at: self.written_at(used.index), pages }
        };
        self.closed().into_iter().map(candidate).collect()
    }

    /// Closed segments with their sequence and live bytes.
    pub fn closed(&self) -> Vec<(SegmentUse, u64)> {
        let inner = self.lock();
        let closed = inner.states.iter().enumerate().filter_map(|(index, state)| match state {
            State::Closed(sequence) => Some(SegmentUse { index: index as u32, sequence: *sequence }),
            _ => None,
        });
        closed.map(|used| (used, self.live_bytes(used.index).max(0) as u64)).collect()
    }

    /// Every use with a lower sequence number has been written to its end: what is written at this moment or later goes to
    /// others.
    pub fn floor(&self) -> u64 {
        let inner = self.lock();
        let unfinished = inner.states.iter().filter_map(|state| match state {
            State::Listed(sequence) | State::Open(sequence) | State::Checkpoint(sequence) => Some(sequence.number),
            State::Free | State::Closed(_) => None,
        });
        unfinished.chain(inner.listing).fold(inner.next_sequence, u64::min)
    }

    /// The uses that have not been written to their end.
    pub fn unfinished(&self) -> Unfinished {
        let inner = self.lock();
        let uses = inner.states.iter().enumerate().filter_map(|(index, state)| match state {
            State::Listed(sequence) | State::Open(sequence) | State::Checkpoint(sequence) => {
                Some((index, sequence.number))
            }
            State::Free | State::Closed(_) => None,
        });
        let next = inner.listing.iter().copied().fold(inner.next_sequence, u64::min);
        Unfinished { uses: uses.collect(), next }
    }

    /// Every use with a lower sequence number was written to its end when `unfinished` was, or holds nothing any more.
    pub fn floor_of(&self, unfinished: &Unfinished) -> u64 {
        let inner = self.lock();
        let still = |(index, number): &&(usize, u64)| match inner.states.get(*index) {
            Some(
                State::Listed(sequence) | State::Open(sequence) | State::Checkpoint(sequence) | State::Closed(sequence),
            ) => sequence.number == *number,
            Some(State::Free) | None => false,
        };
        unfinished.uses.iter().filter(still).map(|(_, number)| *number).fold(unfinished.next, u64::min)
    }

    /// Whether a use has been written to its end.
    pub fn is_closed(&self, used: SegmentUse) -> bool {
        self.lock().states.get(used.index as usize) == Some(&State::Closed(used.sequence))
    }

    /// The next sequence number.
    pub fn next_number(&self) -> u64 {
        self.lock().next_sequence
    }

    /// Segments that hold something, in uses from the sequence number `from` on, oldest first.
    pub fn in_use(&self, from: u64) -> Vec<SegmentUse> {
        let inner = self.lock();
        let used = inner.states.iter().enumerate().filter_map(|(index, state)| match state {
            State::Open(sequence) | State::Closed(sequence) | State::Checkpoint(sequence) => {
                Some(SegmentUse { index: index as u32, sequence: *sequence })
            }
            State::Free | State::Listed(_) => None,
        });
        let mut used: Vec<SegmentUse> = used.filter(|used| used.sequence.number >= from).collect();
        used.sort_by_key(|used| used.sequence.number);
        used
    }

    /// The sequence of a segment that holds data, for reading it.
    pub fn sequence_of(&self, segment: u32) -> Option<Sequence> {
        match self.lock().states.get(segment as usize)? {
            State::Open(sequence) | State::Closed(sequence) | State::Checkpoint(sequence) => Some(*sequence),
            State::Free | State::Listed(_) => None,
        }
    }
}

/// The window that a checkpoint records.
#[derive(Debug, Clone, Default)]
pub struct Window {
    /// All of it: a mount reads these.
    pub uses: Vec<SegmentUse>,
    /// Those that it lists anew.
    pub added: Vec<SegmentUse>,
    /// Segments that hold log data, and what the trees lead to in each, so that a mount knows both without the maps.
    pub data: Vec<(SegmentUse, u64)>,
    pub next_sequence: u64,
}

impl Inner {
    /// Segments without room beneath make way in the window for those that have it. No stripe with their sequence number is
    /// anywhere, so nobody misses them, whichever checkpoint lists them still.
    fn unlist_unbacked(&mut self) {
        let Self { states, listed, backed, .. } = self;
        listed.retain(|used| {
            let stays = backed[used.index as usize];
            if !stays {
                states[used.index as usize] = State::Free;
            }
            stays
        });
    }

    fn take_sequence(&mut self, nonce: u64) -> Sequence {
        let number = self.next_sequence;
        self.next_sequence += 1;
        Sequence { number, nonce }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last stripes of a checkpoint may need one more segment after its window has been drawn up: that one is not
    /// given to the log as well.
    #[test]
    fn a_checkpoints_last_segment_is_not_listed_for_the_log() {
        let segments = Segments::new(vec![State::Free; 8], 1);
        let mut plan = segments.begin_checkpoint();
        segments.settle_plan(&mut plan);
        let first = segments.allocate(Purpose::Checkpoint, 7).unwrap();
        let window = segments.window(&plan, 64, 2, || 9);
        let last = segments.allocate(Purpose::Checkpoint, 7).unwrap();
        assert!(window.added.iter().any(|used| used.index == last.index), "the case that this is about");
        segments.finish_checkpoint(&plan, &window);
        let mut log = Vec::new();
        while let Some(used) = segments.allocate(Purpose::Log, 0) {
            log.push(used.index);
        }
        assert!(!log.contains(&first.index) && !log.contains(&last.index), "{log:?}");
        assert_eq!(log.len(), window.added.len() - 1);
        assert_eq!(segments.sequence_of(last.index), Some(last.sequence));
    }
}
