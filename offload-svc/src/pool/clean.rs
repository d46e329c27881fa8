//! Cleaning: moving what is alive out of segments that are mostly dead, so that they come back.
//!
//! Owns the choice of segments (on the coordinator's reactor) and the move of records (on their shard's). Must not know
//! requests. Invariants: a moved record keeps its bytes and birth, and leads to its copy only where the map still led to
//! the original; the original stays until a checkpoint that no longer needs it is durable.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt;
use futures::future::join_all;
use nvmf_target::backend::Outcome;
use tokio::sync::oneshot;

use super::coordinator::Control;
use super::core::{Core, Shard};
use super::map::Extent;
use super::message::{Inner, Message, MoveFailed, MoveRecord, MoveRequest};
use super::page::{LEAF_BLOCKS, PageId};
use super::read::Pins;
use super::scan::{FoundRecord, find_records, find_stripes};
use super::segments::{Candidate, SegmentUse};
use super::shared::{InFlight, Volume};
use super::stream::{Change, Lane};
use super::tree::Found;
use super::write::all_written;
use crate::stages::keys::LineageId;
use crate::stages::record::{Birth, Kind, sealed_bound};

/// Segments fuller than this, in parts of a hundred, are not worth moving.
const FULL_PERCENT: u64 = 96;
/// Segments cleaned before a checkpoint gives them back.
const VICTIMS_MAX: usize = 32;
/// What a round has to gain, in parts of a hundred of a segment.
const GAIN_PERCENT: u64 = 20;
/// Rounds without gain before the cleaner gives up until something changes.
const VAIN_ROUNDS_MAX: u32 = 8;

/// How a round went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    Moved,
    Nothing,
}

/// A segment that could not be emptied, for as long as nothing suggests that it can be.
struct Stuck {
    live: i64,
    checkpoints: u64,
}

/// After so many checkpoints a segment that could not be emptied is tried again: a member may be back, or a snapshot may have been
/// taken in that moment.
const STUCK_CHECKPOINTS: u64 = 16;

impl Stuck {
    fn now(core: &Core, used: SegmentUse) -> Self {
        let shared = &core.shared;
        Self { live: shared.segments.live_bytes(used.index), checkpoints: shared.checkpoints.load(Ordering::Relaxed) }
    }

    fn is_still(&self, core: &Core, used: SegmentUse) -> bool {
        let now = Self::now(core, used);
        now.live == self.live && now.checkpoints < self.checkpoints + STUCK_CHECKPOINTS
    }
}

/// The cleaner's task.
pub async fn run(core: Rc<Core>) {
    let shared = Arc::clone(&core.shared);
    let mut unmovable = HashMap::new();
    // How things were when it gave up: as long as they are so it would give up again.
    let mut given_up = None;
    let state = || (shared.segments.live_total(), shared.stripes_written.load(Ordering::SeqCst));
    loop {
        shared.cleaning.notified().await;
        if given_up == Some(state()) {
            continue;
        }
        shared.cleaner_busy.store(true, Ordering::SeqCst);
        // Only more than there ever was is a gain: pages that one round writes and the next gives back are none. What hosts have
        // taken meanwhile was gained too.
        let (mut vain, mut best) = (0, gained(&core));
        while shared.admission.is_low(&shared.segments)
            && !shared.closing.load(Ordering::SeqCst)
            && !shared.set.is_failed()
        {
            match round(&core, &mut unmovable).await {
                Round::Moved if gained(&core) > best => (vain, best) = (0, gained(&core)),
                Round::Moved => vain += 1,
                Round::Nothing => vain = VAIN_ROUNDS_MAX,
            }
            let stuck = vain >= VAIN_ROUNDS_MAX;
            shared.admission.set_stuck(stuck.then(state));
            shared.space_event.notify_waiters();
            if stuck {
                given_up = Some(state());
                break;
            }
        }
        shared.cleaner_busy.store(false, Ordering::SeqCst);
        if shared.closing.load(Ordering::SeqCst) {
            // The shutdown waits for us.
            shared.space_event.notify_waiters();
        }
    }
}

async fn round(core: &Rc<Core>, unmovable: &mut HashMap<SegmentUse, Stuck>) -> Round {
    let shared = &core.shared;
    let dead = shared.segments.closed().iter().filter(|(_, live)| *live == 0).count();
    let victims = choose(core, unmovable);
    // What has been overwritten counts as alive until it is merged: then there may be something to gain.
    if dead == 0 && victims.is_empty() && shared.layers.runs() == 0 {
        return Round::Nothing;
    }
    shared.admission.set_moving(victims.iter().map(|used| shared.segments.live_bytes(used.index).max(0) as u64).sum());
    for used in &victims {
        if empty_segment(core, *used).await.is_err() {
            unmovable.insert(*used, Stuck::now(core, *used));
        }
    }
    shared.admission.set_moving(0);
    let (reply, answer) = oneshot::channel();
    let asked = shared.control.unbounded_send(Control::Checkpoint(Some(reply)));
    if asked.is_err() || !matches!(answer.await, Ok(Ok(()))) {
        return Round::Nothing;
    }
    // Now the trees lead to the copies; what still lives in a victim can't be moved.
    let closed: HashMap<SegmentUse, u64> = shared.segments.closed().into_iter().collect();
    for used in victims {
        match closed.get(&used) {
            Some(live) if *live > 0 => drop(unmovable.insert(used, Stuck::now(core, used))),
            _ => drop(shared.cleaned.fetch_add(1, Ordering::Relaxed)),
        }
    }
    unmovable.retain(|used, stuck| closed.contains_key(used) && stuck.is_still(core, *used));
    Round::Moved
}

/// Segments that are free, and all that hosts' writes have taken.
fn gained(core: &Core) -> u64 {
    let (listed, free) = core.shared.segments.left();
    listed + free + core.shared.admission.fresh_segments()
}

/// The segments of the next round.
fn choose(core: &Core, unmovable: &HashMap<SegmentUse, Stuck>) -> Vec<SegmentUse> {
    let shared = &core.shared;
    let mut closed = shared.segments.candidates();
    closed.retain(|candidate| !unmovable.contains_key(&candidate.used));
    let admission = &shared.admission;
    let wanted = Wanted {
        capacity: admission.packed_bytes(),
        room: admission.room_to_move(&shared.segments),
        goal: admission.cleaning_goal(&shared.segments) * admission.packed_bytes(),
    };
    choose_victims(closed, &wanted, shared.segments.next_number())
}

/// What a round is to do, in bytes.
struct Wanted {
    /// What a segment holds.
    capacity: u64,
    /// What may be moved.
    room: u64,
    /// What is to be gained: a segment at least.
    goal: u64,
}

/// Those of closed segments that are to be cleaned at the time `now` of the log's clock: by benefit and cost, or where that does not
/// gain a segment, the emptiest. None if these would gain next to nothing.
fn choose_victims(mut closed: Vec<Candidate>, wanted: &Wanted, now: u64) -> Vec<SegmentUse> {
    let capacity = wanted.capacity;
    closed.retain(|candidate| candidate.live > 0 && candidate.live * 100 < capacity * FULL_PERCENT);
    closed.sort_by_cached_key(|candidate| {
        (Reverse(benefit(candidate, capacity, now)), candidate.live, candidate.used.sequence.number)
    });
    let (chosen, gained) = take_victims(&closed, wanted);
    if gained >= capacity {
        return chosen;
    }
    // Where there is little room, what would pay most in the long run may gain too little now.
    closed.sort_by_key(|candidate| (candidate.live, candidate.used.sequence.number));
    let (chosen, gained) = take_victims(&closed, wanted);
    if gained * 100 >= capacity * GAIN_PERCENT { chosen } else { Vec::new() }
}

/// Free space gained, times how long it stays so, by what it costs to read the segment and to write what lives in it: with u the
/// part that lives, (1 - u) * age / (1 + u). What is old is worth moving even where little of it is dead: it stays where it goes.
fn benefit(candidate: &Candidate, capacity: u64, now: u64) -> u128 {
    let (live, capacity) = (u128::from(candidate.live.min(capacity)), u128::from(capacity));
    let age = u128::from(now.saturating_sub(candidate.written_at)) + 1;
    (((capacity - live) * age) << 16) / (capacity + live)
}

/// As many as gain what is wanted, or as there is room for, and the bytes that they gain. Pages go elsewhere than records, and are few.
fn take_victims(sorted: &[Candidate], wanted: &Wanted) -> (Vec<SegmentUse>, u64) {
    let (mut victims, mut gained) = (Vec::new(), 0);
    let (mut left, mut left_for_pages) = (wanted.room, wanted.capacity / 2);
    for candidate in sorted {
        if gained >= wanted.goal {
            break;
        }
        let left = if candidate.pages { &mut left_for_pages } else { &mut left };
        if victims.len() < VICTIMS_MAX && candidate.live <= *left {
            *left -= candidate.live;
            gained += wanted.capacity - candidate.live;
            victims.push(candidate.used);
        }
    }
    (victims, gained)
}

/// Moves all that is alive out of a segment: its records now, its pages with the next checkpoint.
pub(super) async fn empty_segment(core: &Rc<Core>, used: SegmentUse) -> Result<(), MoveFailed> {
    let mut batch = MoveBatch::new(core, core.shared.segments.written_at(used.index));
    // While it is pinned nobody else writes to it: a repair must not hit the segment's next use.
    let _pin = Pins::new(&core.shared.segments, std::iter::once(used.index));
    if core.shared.segments.sequence_of(used.index) != Some(used.sequence) {
        return Ok(());
    }
    for header in find_stripes(&core.stripes, used).await.into_iter().filter(|header| !header.void) {
        // What can't be read can't be moved; if nothing in it is alive, that is no matter.
        let Ok(stripe) = core.stripes.read(header.location, used.sequence).await else { continue };
        if stripe.bad != 0 {
            core.stripes.repair(&stripe).await;
        }
        for record in find_records(header.location, &stripe.payload).0 {
            batch.add(record, &stripe.payload);
        }
        if batch.bytes >= BATCH_BYTES {
            batch.send().await?;
        }
    }
    batch.send().await
}

/// Records of several stripes, so that what is left of them shares new ones.
struct MoveBatch<'a> {
    core: &'a Core,
    /// A record may be led to by any volume of its lineage, whoever wrote it.
    kin: HashMap<LineageId, Arc<[Arc<Volume>]>>,
    by_reactor: BTreeMap<usize, Vec<MoveRecord>>,
    bytes: usize,
    written_at: u64,
}

/// Pages of maps that records are moved for at once.
const GROUPS_AT_ONCE: usize = 16;
/// Records held in memory at once.
const BATCH_BYTES: usize = 4 << 20;

impl<'a> MoveBatch<'a> {
    fn new(core: &'a Core, written_at: u64) -> Self {
        let mut kin: HashMap<LineageId, Vec<Arc<Volume>>> = HashMap::new();
        for volume in core.shared.all_volumes() {
            kin.entry(volume.lineage).or_default().push(volume);
        }
        let kin = kin.into_iter().map(|(lineage, kin)| (lineage, kin.into())).collect();
        Self { core, kin, by_reactor: BTreeMap::new(), bytes: 0, written_at }
    }

    fn add(&mut self, record: FoundRecord, payload: &[u8]) {
        let owner = record.header.owner;
        let kin = self.kin.get(&record.header.birth.lineage);
        let (Some(kin), true) = (kin, record.header.kind.has_payload()) else { return };
        let start = record.location.payload_offset as usize;
        let Some(bytes) = payload.get(start..start + record.location.stored_bytes as usize) else { return };
        self.bytes += bytes.len();
        let reactor = usize::from(owner.shard) % self.core.shared.reactors;
        self.by_reactor.entry(reactor).or_default().push(MoveRecord {
            kin: Arc::clone(kin),
            shard: owner.shard,
            location: record.location,
            header: record.header,
            bytes: bytes.to_vec(),
            written_at: self.written_at,
        });
    }

    /// Hands the records to their owners and waits until those alive are durable elsewhere.
    async fn send(&mut self) -> Result<(), MoveFailed> {
        self.bytes = 0;
        let answers = std::mem::take(&mut self.by_reactor).into_iter().map(|(reactor, records)| {
            let (done, answer) = oneshot::channel();
            self.core.shared.courier.send(reactor, Message(Inner::Move(MoveRequest { records, done })));
            answer
        });
        let answers: Vec<_> = answers.collect();
        for answer in join_all(answers).await {
            answer.unwrap_or(Err(MoveFailed))?;
        }
        Ok(())
    }
}

impl Core {
    /// Moves those of the records that are alive, and answers when they are durable elsewhere.
    pub async fn move_records(&self, request: MoveRequest) {
        let mut records = request.records;
        records.sort_by_key(|record| (record.header.birth.lineage.0, record.shard, record.header.birth.lba));
        let leaf =
            |record: &MoveRecord| (record.header.birth.lineage, record.shard, record.header.birth.lba / LEAF_BLOCKS);
        let groups = records.chunk_by(|a, b| leaf(a) == leaf(b)).map(|group| self.move_group(group));
        let moved = futures::stream::iter(groups).buffer_unordered(GROUPS_AT_ONCE).collect::<Vec<_>>().await;
        // The cleaner may have ended.
        let _ = request.done.send(moved.into_iter().collect());
    }

    /// Moves records that one page of a map leads to, or its neighbour: it is read once, however little memory there is for pages.
    async fn move_group(&self, records: &[MoveRecord]) -> Result<(), MoveFailed> {
        let mut alive = Vec::new();
        for record in records {
            if self.may_be_alive(record).await {
                alive.push(record);
            }
        }
        // Side by side, so that they share stripes.
        join_all(alive.into_iter().map(|record| self.move_record(record))).await.into_iter().collect()
    }

    async fn may_be_alive(&self, record: &MoveRecord) -> bool {
        if record.header.kind == Kind::Metadata {
            return true;
        }
        for volume in record.kin.iter() {
            // Before it is asked whether the volume goes: while we are at it, it is not forgotten.
            let _in_flight = InFlight::on(volume);
            if !volume.is_closing() {
                let shard = self.shard(volume, record.shard);
                if !self.live_parts(&shard, record).await.is_empty() {
                    return true;
                }
            }
        }
        false
    }

    async fn move_record(&self, record: &MoveRecord) -> Result<(), MoveFailed> {
        for volume in record.kin.iter() {
            self.move_in(volume, record).await?;
        }
        Ok(())
    }

    /// Moves what one volume's map leads to of a record.
    async fn move_in(&self, volume: &Arc<Volume>, record: &MoveRecord) -> Result<(), MoveFailed> {
        let _in_flight = InFlight::on(volume);
        if volume.is_closing() {
            return Ok(());
        }
        let shard = self.shard(volume, record.shard);
        if record.header.kind == Kind::Metadata {
            self.move_page(&shard, record).await;
            return Ok(());
        }
        // Of several volumes, not each leads to it.
        if record.kin.len() > 1 && self.live_parts(&shard, record).await.is_empty() {
            return Ok(());
        }
        self.layer_room().await.map_err(|_| MoveFailed)?;
        let birth = &record.header.birth;
        // What is found alive from here on stays so until the copy is in its place.
        let _held = shard.locks.enter(birth.lba..birth.lba + birth.block_count, true).await;
        let parts = self.live_parts(&shard, record).await;
        if parts.is_empty() {
            return Ok(());
        }
        let runs = runs_of(&parts);
        let outdated = || birth.key_epoch != volume.keys.current();
        let (_, spare_percent) = self.shared.admission.fill(&self.shared.segments);
        if outdated() || is_worth_sealing(birth, record.bytes.len() as u64, &runs, spare_percent) {
            return self.rewrite_live(&shard, runs, record.written_at).await;
        }
        self.stream_of(Lane::Moved).room_for(self, record.bytes.len()).await;
        if outdated() {
            // The volume has got a new key while there was no room.
            return self.rewrite_live(&shard, runs, record.written_at).await;
        }
        self.stream_of(Lane::Moved).note_age(record.written_at);
        let written = self.stream_of(Lane::Moved).append_bytes(&shard, Change::Relocate { parts }, &record.bytes);
        if matches!(written.await, Ok(Ok(()))) { Ok(()) } else { Err(MoveFailed) }
    }

    /// A page of a tree is written anew by the next merge.
    async fn move_page(&self, shard: &Shard, record: &MoveRecord) {
        let (number, id) = PageId::of_address(record.header.birth.lba);
        if number != record.shard {
            return;
        }
        let tree = shard.map.tree();
        if let Found::Page(pointer) = self.maps.find(shard.tree_ref(), tree.sources(id), id).await.0
            && pointer.location == record.location
        {
            shard.map.move_page(id);
        }
    }

    /// Writes what is left of a record that is mostly dead, or under an older key, anew, as a host would. Its blocks are held.
    async fn rewrite_live(&self, shard: &Rc<Shard>, runs: Vec<Range<u64>>, written_at: u64) -> Result<(), MoveFailed> {
        let mut pending = Vec::new();
        for run in runs {
            let plain = self.read_to_memory(shard, run.clone()).await.map_err(|_| MoveFailed)?;
            self.stream_of(Lane::Moved).room_for(self, sealed_bound(plain.len(), shard.volume.block_shift)).await;
            self.stream_of(Lane::Moved).note_age(written_at);
            pending.push(self.log_data(Lane::Moved, shard, run, &plain).map_err(|_| MoveFailed)?);
        }
        if all_written(pending).await == Outcome::Success { Ok(()) } else { Err(MoveFailed) }
    }

    /// The parts of a record that its shard's map still leads to.
    async fn live_parts(&self, shard: &Shard, record: &MoveRecord) -> Vec<(u64, Extent)> {
        let birth = &record.header.birth;
        let runs = self.maps.lookup(shard.tree_ref(), &(birth.lba..birth.lba + birth.block_count)).await;
        let own = |extent: &Extent| extent.generation == birth.generation && extent.location == record.location;
        runs.iter().filter_map(|run| Some((run.lba, *run.extent()?))).filter(|(_, extent)| own(extent)).collect()
    }
}

/// What is left of a record, in runs of blocks.
fn runs_of(parts: &[(u64, Extent)]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (lba, extent) in parts {
        let end = lba + u64::from(extent.count);
        match runs.last_mut() {
            Some(last) if last.end == *lba => last.end = end,
            _ => runs.push(*lba..end),
        }
    }
    runs
}

/// Whether what is left of a record is to be sealed anew: it always is where most blocks are dead. Otherwise where that saves a
/// larger part of the record than half of what is free in the pool: dead blocks that are moved along fill it up. Shorter runs
/// compress less well, which is allowed for.
fn is_worth_sealing(birth: &Birth, stored: u64, runs: &[Range<u64>], spare_percent: u64) -> bool {
    let live: u64 = runs.iter().map(|run| run.end - run.start).sum();
    if live * 2 < birth.block_count || live == birth.block_count {
        return live < birth.block_count;
    }
    let share = (stored * live / birth.block_count.max(1) * 5 / 4).min(live << birth.block_shift);
    let sealed = share + runs.len() as u64 * sealed_bound(0, birth.block_shift) as u64;
    stored.saturating_sub(sealed) * 200 > stored * spare_percent
}

#[cfg(test)]
mod tests {
    use super::super::stripe::Sequence;
    use super::*;

    const CAPACITY: u64 = 1000;

    /// A segment of so many live bytes, whose youngest was written then.
    fn candidate(index: u32, live: u64, written_at: u64) -> Candidate {
        let sequence = Sequence { number: 100 + u64::from(index), nonce: 0 };
        Candidate { used: SegmentUse { index, sequence }, live, written_at, pages: false }
    }

    fn chosen(closed: &[Candidate], room: u64) -> Vec<u32> {
        chosen_for(closed, room, 10 * CAPACITY)
    }

    fn chosen_for(closed: &[Candidate], room: u64, goal: u64) -> Vec<u32> {
        let wanted = Wanted { capacity: CAPACITY, room, goal };
        choose_victims(closed.to_vec(), &wanted, 1000).iter().map(|used| used.index).collect()
    }

    #[test]
    fn victims_are_chosen_by_benefit_and_cost() {
        // (1 - u) * age / (1 + u): 0.7 * 3 / 1.3 = 1.6, 0.25 * 501 / 1.75 = 71.6, 0.7 * 501 / 1.3 = 269.8.
        let closed = [candidate(0, 300, 998), candidate(1, 750, 500), candidate(2, 300, 500)];
        assert_eq!(chosen(&closed, 10_000), [2, 1, 0]);
        // No more than what is wanted.
        assert_eq!(chosen_for(&[closed[2], candidate(3, 200, 400), closed[1]], 10_000, 1000), [3, 2]);
        // What is dead comes back by itself, and what is full gains nothing.
        assert_eq!(chosen(&[candidate(0, 0, 1), candidate(1, 961, 1), candidate(2, 700, 999)], 10_000), [2]);
    }

    #[test]
    fn victims_fit_the_room_that_is_left() {
        let closed = [candidate(0, 600, 1), candidate(1, 500, 2), candidate(2, 400, 3)];
        assert_eq!(chosen(&closed, 1000), [2, 1], "the third does not fit");
        assert_eq!(chosen(&closed, 500), [2]);
        assert!(chosen(&closed, 399).is_empty());
        let pages = Candidate { pages: true, ..candidate(7, 450, 4) };
        assert_eq!(
            chosen(&[closed[0], pages, Candidate { live: 60, ..pages }], 0),
            [7],
            "pages need none of it, but are few"
        );
    }

    /// An old, nearly full segment pays in the long run, but not where that gains nothing now.
    #[test]
    fn with_little_room_the_emptiest_goes_first() {
        let closed = [candidate(0, 900, 1), candidate(1, 300, 998), candidate(2, 350, 998)];
        assert_eq!(chosen(&closed, 1550), [0, 1, 2]);
        assert_eq!(chosen(&closed, 900), [1, 2]);
        // Next to nothing to gain: a checkpoint is not worth it.
        assert!(chosen(&[candidate(0, 900, 1)], 10_000).is_empty());
        let full = [candidate(0, 900, 1), candidate(1, 900, 1), candidate(2, 900, 1)];
        assert_eq!(chosen(&full, 10_000), [0, 1, 2], "together they gain enough");
    }

    /// Dead blocks are left behind where most are dead, or where the pool is short of room.
    #[test]
    fn a_record_is_sealed_anew_where_that_saves_enough() {
        let birth = Birth {
            lineage: crate::stages::keys::LineageId(1),
            key_epoch: crate::stages::keys::KeyEpoch(0),
            lba: 160,
            block_count: 16,
            block_shift: 12,
            generation: 1,
        };
        let raw = sealed_bound(16 << 12, 12) as u64;
        let pays = |stored: u64, runs: &[(u64, u64)], spare_percent: u64| {
            let runs: Vec<Range<u64>> = runs.iter().map(|(start, end)| *start..*end).collect();
            is_worth_sealing(&birth, stored, &runs, spare_percent)
        };
        assert!(pays(raw, &[(160, 167)], 100), "mostly dead");
        assert!(!pays(raw, &[(160, 168), (170, 176)], 60), "there is room");
        assert!(pays(raw, &[(160, 168), (170, 176)], 14), "there is little");
        assert!(!pays(raw, &[(160, 176)], 0), "nothing to gain");
        // Half of the record is alive, in eight pieces that would hardly compress on their own.
        let pieces: Vec<(u64, u64)> = (0..8).map(|piece| (160 + piece * 2, 161 + piece * 2)).collect();
        assert!(!pays(1500, &pieces, 1));
        assert_eq!(runs_of(&[]), []);
    }
}
