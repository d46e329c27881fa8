//! Cleaning: moving what is alive out of segments that are mostly dead, so that they come back.
//!
//! Owns the choice of segments (on the coordinator's reactor) and the move of records (on their shard's). Must not know
//! requests. Invariants: a moved record keeps its bytes and birth, and leads to its copy only where the map still led to
//! the original; the original stays until a checkpoint that no longer needs it is durable.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::future::join_all;
use nvmf_target::backend::Outcome;
use tokio::sync::oneshot;

use super::coordinator::Control;
use super::core::{Core, Shard};
use super::map::Extent;
use super::message::{Inner, Message, MoveFailed, MoveRecord, MoveRequest};
use super::page::PageId;
use super::read::Pins;
use super::scan::{FoundRecord, find_records, find_stripes};
use super::segments::SegmentUse;
use super::shared::{InFlight, Volume};
use super::stream::Change;
use super::tree::Found;
use super::write::all_written;
use crate::stages::keys::LineageId;
use crate::stages::record::{Kind, sealed_bound};

/// Segments fuller than this, in parts of a hundred, are not worth moving.
const FULL_PERCENT: u64 = 92;
/// Segments cleaned before a checkpoint gives them back.
const VICTIMS_MAX: usize = 16;
/// Rounds without gain before the cleaner gives up until something changes.
const VAIN_ROUNDS_MAX: u32 = 8;
/// Records don't fill stripes to the brim: of a segment's room, this many parts in a hundred are counted on.
const PACKED_PERCENT: u64 = 80;

/// How a round went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    Moved,
    Nothing,
}

/// The cleaner's task.
pub async fn run(core: Rc<Core>) {
    let shared = Arc::clone(&core.shared);
    let mut unmovable = HashSet::new();
    // How things were when it gave up: as long as they are so it would give up again.
    let mut given_up = None;
    let state = || (shared.segments.live_total(), shared.stripes_written.load(Ordering::Relaxed));
    loop {
        shared.cleaning.notified().await;
        if given_up == Some(state()) {
            continue;
        }
        shared.cleaner_busy.store(true, Ordering::SeqCst);
        // Only more than there ever was is a gain: pages that one round writes and the next gives back are none.
        let (mut vain, mut best) = (0, available(&core));
        while shared.admission.is_low(&shared.segments)
            && !shared.closing.load(Ordering::SeqCst)
            && !shared.set.is_failed()
        {
            match round(&core, &mut unmovable).await {
                Round::Moved if available(&core) > best => (vain, best) = (0, available(&core)),
                Round::Moved => vain += 1,
                Round::Nothing => vain = VAIN_ROUNDS_MAX,
            }
            let stuck = vain >= VAIN_ROUNDS_MAX;
            shared.admission.set_stuck(stuck.then(|| shared.segments.live_total()));
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

async fn round(core: &Rc<Core>, unmovable: &mut HashSet<SegmentUse>) -> Round {
    let shared = &core.shared;
    let dead = shared.segments.closed().iter().filter(|(_, live)| *live == 0).count();
    let victims = choose(core, unmovable);
    // What has been overwritten counts as alive until it is merged: then there may be something to gain.
    if dead == 0 && victims.is_empty() && shared.layers.runs() == 0 {
        return Round::Nothing;
    }
    for used in &victims {
        if empty_segment(core, *used).await.is_err() {
            unmovable.insert(*used);
        }
    }
    let (reply, answer) = oneshot::channel();
    let asked = shared.control.unbounded_send(Control::Checkpoint(Some(reply)));
    if asked.is_err() || !matches!(answer.await, Ok(Ok(()))) {
        return Round::Nothing;
    }
    // Now the trees lead to the copies; what still lives in a victim can't be moved.
    let closed: HashMap<SegmentUse, u64> = shared.segments.closed().into_iter().collect();
    for used in victims {
        match closed.get(&used) {
            Some(live) if *live > 0 => drop(unmovable.insert(used)),
            _ => drop(shared.cleaned.fetch_add(1, Ordering::Relaxed)),
        }
    }
    unmovable.retain(|used| closed.contains_key(used));
    Round::Moved
}

fn available(core: &Core) -> u64 {
    let (listed, free) = core.shared.segments.left();
    listed + free
}

/// The emptiest segments, as many as there is room to move, if that gains one at least.
fn choose(core: &Core, unmovable: &HashSet<SegmentUse>) -> Vec<SegmentUse> {
    let shared = &core.shared;
    let capacity = shared.admission.segment_payload_bytes();
    let (listed, _) = shared.segments.left();
    let room = listed.saturating_sub(1) * capacity / 100 * 80;
    let mut closed = shared.segments.closed();
    closed.retain(|(used, live)| *live > 0 && live * 100 < capacity * FULL_PERCENT && !unmovable.contains(used));
    closed.sort_by_key(|(used, live)| (*live, used.sequence.number));
    let (mut victims, mut moved) = (Vec::new(), 0);
    for (used, live) in closed {
        if victims.len() == VICTIMS_MAX || moved + live > room {
            break;
        }
        moved += live;
        victims.push(used);
    }
    if (victims.len() as u64) > moved.div_ceil(capacity / 100 * PACKED_PERCENT) { victims } else { Vec::new() }
}

/// Moves all that is alive out of a segment: its records now, its pages with the next checkpoint.
pub(super) async fn empty_segment(core: &Rc<Core>, used: SegmentUse) -> Result<(), MoveFailed> {
    let mut batch = MoveBatch::new(core);
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
}

/// Records held in memory at once.
const BATCH_BYTES: usize = 4 << 20;

impl<'a> MoveBatch<'a> {
    fn new(core: &'a Core) -> Self {
        let mut kin: HashMap<LineageId, Vec<Arc<Volume>>> = HashMap::new();
        for volume in core.shared.all_volumes() {
            kin.entry(volume.lineage).or_default().push(volume);
        }
        let kin = kin.into_iter().map(|(lineage, kin)| (lineage, kin.into())).collect();
        Self { core, kin, by_reactor: BTreeMap::new(), bytes: 0 }
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
        // Side by side, so that they share stripes.
        let moved = join_all(request.records.iter().map(|record| self.move_record(record))).await;
        // The cleaner may have ended.
        let _ = request.done.send(moved.into_iter().collect());
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
        if self.live_parts(&shard, record).await.is_empty() {
            return Ok(());
        }
        self.layer_room().await.map_err(|_| MoveFailed)?;
        let birth = &record.header.birth;
        // What is found alive from here on stays so until the copy is in its place.
        let _held = shard.locks.enter(birth.lba..birth.lba + birth.block_count, true).await;
        let parts = self.live_parts(&shard, record).await;
        let live: u64 = parts.iter().map(|(_, extent)| u64::from(extent.count)).sum();
        let outdated = || birth.key_epoch != volume.keys.current();
        if outdated() || live * 2 < birth.block_count {
            return self.rewrite_live(&shard, parts).await;
        }
        self.stream.room_for(self, record.bytes.len()).await;
        if outdated() {
            // The volume has got a new key while there was no room.
            return self.rewrite_live(&shard, parts).await;
        }
        let written = self.stream.append_bytes(&shard, Change::Relocate { parts }, &record.bytes);
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
    async fn rewrite_live(&self, shard: &Rc<Shard>, parts: Vec<(u64, Extent)>) -> Result<(), MoveFailed> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (lba, extent) in parts {
            let end = lba + u64::from(extent.count);
            match runs.last_mut() {
                Some(last) if last.end == lba => last.end = end,
                _ => runs.push(lba..end),
            }
        }
        for run in runs {
            let plain = self.read_to_memory(shard, run.clone()).await.map_err(|_| MoveFailed)?;
            self.stream.room_for(self, sealed_bound(plain.len(), shard.volume.block_shift)).await;
            let written = self.log_data(shard, run, &plain).map_err(|_| MoveFailed)?;
            if all_written(vec![written]).await != Outcome::Success {
                return Err(MoveFailed);
            }
        }
        Ok(())
    }

    /// The parts of a record that its shard's map still leads to.
    async fn live_parts(&self, shard: &Shard, record: &MoveRecord) -> Vec<(u64, Extent)> {
        let birth = &record.header.birth;
        let runs = self.maps.lookup(shard.tree_ref(), &(birth.lba..birth.lba + birth.block_count)).await;
        let own = |extent: &Extent| extent.generation == birth.generation && extent.location == record.location;
        runs.iter().filter_map(|run| Some((run.lba, *run.extent()?))).filter(|(_, extent)| own(extent)).collect()
    }
}
