//! Members that come back, and others that take their places: filled under load, counted only when they lack nothing.
//!
//! Owns who is brought back when, and the walk over what a member lacks. Must not know requests or maps. Invariants: a
//! candidate is written to from the first moment and read by nobody; it joins the set only after every stripe that was
//! there when it came, and that it lacked, is on it; what is known to be on it is never more than what is.
//!
//! What a member lacks is told by one number: uses of segments with lower sequence numbers are whole on it
//! (`MemberEntry::whole_below`). When a member leaves, the number is that of the oldest use that can still be written to.
//! While it is filled, oldest uses first, the number goes up; what is written meanwhile goes to it as well. So a short
//! absence costs what changed, and a walk that was cut short goes on where it was.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::{Either, select};
use tokio::sync::{Notify, oneshot};

use super::backing::back_candidate;
use super::core::Core;
use super::env::MemberIndex;
use super::members::{Failure, Identity, Incarnation, TooFewMembers};
use super::options::{BLOCK_BYTES, SUPERBLOCK_AREA_BYTES};
use super::pace::Pace;
use super::probe::PROBE_TIMEOUT;
use super::read::Pins;
use super::release::Leaving;
use super::scan::find_stripes;
use super::segments::SegmentUse;
use super::status::{RebuildState, RebuildStatus};
use super::stripe::{ShardHeader, StripeLocation};
use super::superblock::{SLOT_BYTES, Superblock};
use super::superblocks::{Superblocks, WelcomeError};

/// How long a member that has left is let alone before it is asked again; twice as long after each time that it fails.
const FIRST_WAIT: Duration = Duration::from_secs(5);
const LONGEST_WAIT: Duration = Duration::from_secs(300);
/// One that has been in the set for so long is taken to be well again.
const WELL_AFTER: Duration = Duration::from_secs(600);
/// How often a member that still holds requests is looked at.
const HELD_POLL: Duration = Duration::from_secs(1);
/// How often stripes that could not be read are tried again, and after how long.
const RETRIES: usize = 2;
const RETRY_AFTER: Duration = Duration::from_secs(2);
/// How often at least the progress is made durable.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// One that may take a place.
#[derive(Debug, Clone)]
pub struct Comer {
    pub place: usize,
    pub identity: Identity,
    /// It takes the place of another.
    pub replacing: bool,
    /// It need not have a superblock yet.
    pub blank: bool,
}

/// What the keeper shares with the rest of the pool: requests to it, and how far it is.
#[derive(Debug, Default)]
pub struct Rebuilding {
    progress: Mutex<Option<RebuildStatus>>,
    requests: Mutex<Vec<Comer>>,
    /// By place: those that are to take the place of another.
    replacements: Mutex<BTreeMap<usize, Comer>>,
    /// Slots of members that have been replaced and are written to for the last time.
    leaving: Mutex<Vec<MemberIndex>>,
    wake: Notify,
}

impl Rebuilding {
    /// Hands a member over to be brought in.
    pub fn ask(&self, comer: Comer) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(comer);
        self.wake.notify_waiters();
    }

    /// Whether one that is to replace a place's member waits for its turn.
    pub fn is_asked(&self, place: usize) -> bool {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.iter().any(|comer| comer.replacing && comer.place == place) || self.replacements().contains_key(&place)
    }

    /// The slots of those that wait for their turn, and of those that are being let go.
    pub fn waiting(&self) -> Vec<MemberIndex> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let replacements = self.replacements();
        let coming = requests.iter().chain(replacements.values()).filter_map(|comer| comer.identity.slot);
        coming.chain(self.leaving().iter().copied()).collect()
    }

    /// A slot stays open until [`Rebuilding::left`].
    pub fn leave(&self, slot: MemberIndex) {
        self.leaving().push(slot);
    }

    /// The last write to a slot has come back.
    pub fn left(&self, slot: MemberIndex) {
        self.leaving().retain(|other| *other != slot);
    }

    fn leaving(&self) -> MutexGuard<'_, Vec<MemberIndex>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replacements(&self) -> MutexGuard<'_, BTreeMap<usize, Comer>> {
        self.replacements.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The member that is being filled, or was the last to be.
    pub fn status(&self) -> Option<RebuildStatus> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn show(&self, status: RebuildStatus) {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
    }

    fn end(&self, state: RebuildState) {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(status) = progress.as_mut().filter(|status| status.state == RebuildState::Running) {
            (status.state, status.left_ms) = (state, None);
        }
    }

    fn take_requests(&self) -> Vec<Comer> {
        std::mem::take(&mut *self.requests.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Why a member was not brought back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Stop {
    #[error("it does not answer")]
    NoAnswer,
    #[error("what stands there is not this member")]
    OtherMember,
    #[error("it has failed")]
    Failed,
    #[error("the file system beneath it has no room for what it has to hold")]
    NoRoom,
    #[error(transparent)]
    Welcome(#[from] WelcomeError),
    #[error(transparent)]
    TooFewMembers(#[from] TooFewMembers),
    #[error("the pool is being closed")]
    Closing,
}

/// When a place is looked at again.
#[derive(Debug, Clone, Copy)]
struct Wait {
    /// `None` while it is in the set.
    at: Option<Instant>,
    next: Duration,
    /// When its member was taken into the set.
    joined: Option<Instant>,
}

impl Wait {
    fn schedule(&mut self, now: Instant) {
        if self.joined.take().is_some_and(|joined| now.saturating_duration_since(joined) >= WELL_AFTER) {
            self.next = FIRST_WAIT;
        }
        self.at = Some(now + self.next);
        self.next = (self.next * 2).min(LONGEST_WAIT);
    }
}

/// The keeper of the set, on the coordinator's reactor: brings back one member at a time.
pub struct Keeper {
    core: Rc<Core>,
    superblocks: Rc<Superblocks>,
    waits: RefCell<Vec<Wait>>,
    pace: Pace,
}

impl Keeper {
    /// `returning` are there already and are tried at once.
    pub fn new(core: Rc<Core>, superblocks: Rc<Superblocks>, returning: Vec<Comer>) -> Self {
        let wait = Wait { at: None, next: FIRST_WAIT, joined: None };
        let waits = RefCell::new(vec![wait; core.shared.set.count()]);
        let pace = Pace::new(core.shared.options.rebuild_rate);
        let keeper = Self { core, superblocks, waits, pace };
        returning.into_iter().for_each(|comer| keeper.take(comer));
        keeper
    }

    fn now(&self) -> Instant {
        self.core.env().now()
    }

    /// Someone who is to be tried now.
    fn take(&self, comer: Comer) {
        let place = comer.place;
        if let Some(wait) = self.waits.borrow_mut().get_mut(place) {
            (wait.at, wait.next) = (Some(self.now()), FIRST_WAIT);
        }
        if comer.replacing {
            self.core.shared.rebuild.replacements().insert(place, comer);
        } else if !self.core.shared.set.contains(place) {
            self.core.shared.set.identify(place, comer.identity);
        }
    }

    pub async fn run(self) {
        let shared = &self.core.shared;
        loop {
            let (mut changed, mut woken) = (pin!(shared.set.changed.notified()), pin!(shared.rebuild.wake.notified()));
            changed.as_mut().enable();
            woken.as_mut().enable();
            shared.rebuild.take_requests().into_iter().for_each(|comer| self.take(comer));
            if shared.set.is_failed() || shared.is_closing() {
                return;
            }
            match self.next() {
                Next::Now(comer) => self.try_one(comer).await,
                Next::At(at) => drop(select(select(changed, woken), self.core.env().sleep_until(at)).await),
                Next::Never => {
                    select(changed, woken).await;
                }
            }
        }
    }

    /// Who is to be tried now, or when somebody is.
    fn next(&self) -> Next {
        let (set, now) = (&self.core.shared.set, self.now());
        let mut waits = self.waits.borrow_mut();
        let mut soonest = None::<Instant>;
        for (place, wait) in waits.iter_mut().enumerate() {
            let replacement = self.core.shared.rebuild.replacements().get(&place).cloned();
            let there = || set.entry(place).identity();
            let own = || Comer { place, identity: there(), replacing: false, blank: false };
            let away = !set.contains(place) && set.entry(place).slot().is_some();
            let Some(comer) = replacement.or_else(|| away.then(own)) else {
                wait.at = None;
                continue;
            };
            if wait.at.is_none() {
                wait.schedule(now);
            }
            let idle = set.entry(set.candidate(place)).is_idle() && (comer.replacing || set.entry(place).is_idle());
            let at = wait.at.unwrap_or(now);
            if at <= now && idle {
                return Next::Now(comer);
            }
            let at = at.max(now + if idle { Duration::ZERO } else { HELD_POLL });
            soonest = Some(soonest.map_or(at, |soonest| soonest.min(at)));
        }
        soonest.map_or(Next::Never, Next::At)
    }

    async fn try_one(&self, comer: Comer) {
        let (place, name) = (comer.place, comer.identity.name.clone());
        let result = self.bring_in(&comer).await;
        self.core.shared.rebuild.end(if result.is_ok() { RebuildState::Done } else { RebuildState::Failed });
        let mut waits = self.waits.borrow_mut();
        let Some(wait) = waits.get_mut(place) else { return };
        match result {
            Ok(()) => {
                (wait.at, wait.joined) = (None, Some(self.now()));
                if comer.replacing {
                    self.core.shared.rebuild.replacements().remove(&place);
                }
                tracing::info!(place, name, "member is in the set");
            }
            Err(Stop::Closing) => {}
            // It has become the member already.
            Err(Stop::Welcome(WelcomeError::Taken)) if comer.replacing => {
                wait.at = None;
                self.core.shared.rebuild.replacements().remove(&place);
            }
            Err(error) => {
                wait.schedule(self.now());
                tracing::warn!(place, name, %error, "member is not back yet");
            }
        }
    }

    async fn bring_in(&self, comer: &Comer) -> Result<(), Stop> {
        let set = &self.core.shared.set;
        let own = self.look(comer).await?;
        let own = own.filter(|own| own.pool == set.pool && own.member == comer.identity.uuid);
        if own.is_none() && !comer.blank {
            return Err(Stop::OtherMember);
        }
        let (place, identity) = (comer.place, comer.identity.clone());
        let own = own.as_ref();
        let (incarnation, below) = self.superblocks.welcome(place, identity, comer.replacing, own).await?;
        // What was on its way before did not go to the candidate; from here on all is there to be found, or goes to it.
        set.writes.passed().await;
        let fill = Fill::new(self, comer, incarnation);
        let (stripes, segments) = (&self.core.stripes, &self.core.shared.segments);
        let filled = match back_candidate(&stripes.io, segments, set.candidate(place)).await {
            Ok(()) => fill.walk(below).await,
            Err(Failure::NoSpace) => Err(Stop::NoRoom),
            Err(_) => Err(Stop::Failed),
        };
        match filled {
            Ok(()) => {}
            Err(Stop::Closing) => return Err(Stop::Closing),
            Err(stop) => {
                self.superblocks.exclude(&[(place, incarnation)]).await?;
                return Err(stop);
            }
        }
        let leaving = if comer.replacing { Leaving::at(&self.core, &self.superblocks, place).await } else { None };
        let promoted = self.superblocks.promote(place, incarnation).await?;
        if promoted {
            set.writes.passed().await;
            set.end_join(place);
            if let Some(leaving) = leaving {
                leaving.let_go(&self.core, &self.superblocks).await;
            }
            // What was pending on a member may be done, and who left stands in a checkpoint then.
            self.core.shared.want_checkpoint();
        }
        if promoted && set.is(place, incarnation) && set.contains(place) { Ok(()) } else { Err(Stop::Failed) }
    }

    /// The superblock on a device, if it answers and has one. Its end is read as well: a member that was cut short since
    /// does not come back.
    async fn look(&self, comer: &Comer) -> Result<Option<Superblock>, Stop> {
        let set = &self.core.shared.set;
        let slot = comer.identity.slot.ok_or(Stop::NoAnswer)?;
        let segments = u64::from(set.segment_count) * u64::from(set.layout.segment_bytes);
        let end = SUPERBLOCK_AREA_BYTES + segments - BLOCK_BYTES;
        let held = set.entry(set.candidate(comer.place)).hold();
        let env = Rc::clone(self.core.env());
        let (done, answer) = oneshot::channel();
        self.core.env().spawn(Box::pin(async move {
            let mut found = Ok(None::<Superblock>);
            for offset in [0, SLOT_BYTES as u64, end] {
                let (result, buf) = env.read(slot, offset, env.buffer(SLOT_BYTES).await).await;
                match (result, &mut found) {
                    (Err(_), _) if offset == end => found = Err(Stop::NoAnswer),
                    (Ok(()), Ok(best)) if offset != end => {
                        let newer =
                            |own: &Superblock| best.as_ref().is_none_or(|best| own.state_id() > best.state_id());
                        if let Some(own) = Superblock::parse(&buf).ok().filter(newer) {
                            *best = Some(own);
                        }
                    }
                    _ => {}
                }
            }
            drop(held);
            // Nobody waits for what comes late.
            let _ = done.send(found);
        }));
        let late = self.core.env().sleep_until(self.now() + PROBE_TIMEOUT);
        match select(answer, late).await {
            Either::Left((found, _)) => found.unwrap_or(Err(Stop::NoAnswer)),
            Either::Right(_) => Err(Stop::NoAnswer),
        }
    }
}

enum Next {
    Now(Comer),
    At(Instant),
    Never,
}

/// One walk.
struct Fill<'a> {
    keeper: &'a Keeper,
    place: usize,
    incarnation: Incarnation,
    started: Instant,
    saved: Cell<Instant>,
    status: RefCell<RebuildStatus>,
    /// It has never held anything of this pool.
    fresh: bool,
}

impl<'a> Fill<'a> {
    fn new(keeper: &'a Keeper, comer: &Comer, incarnation: Incarnation) -> Self {
        let started = keeper.now();
        let status = RebuildStatus {
            index: comer.place as u8,
            uuid: comer.identity.uuid,
            name: comer.identity.name.clone(),
            replacing: comer.replacing,
            state: RebuildState::Running,
            segments_total: 0,
            segments_done: 0,
            written_bytes: 0,
            stripes_lost: 0,
            elapsed_ms: 0,
            left_ms: None,
        };
        let saved = Cell::new(started);
        let (status, fresh) = (RefCell::new(status), comer.replacing);
        Self { keeper, place: comer.place, incarnation, started, saved, status, fresh }
    }

    fn core(&self) -> &Rc<Core> {
        &self.keeper.core
    }

    /// Everything in use from `below` on that was there when the candidate came. What is used anew since goes to it.
    async fn walk(&self, below: u64) -> Result<(), Stop> {
        let work = self.core().shared.segments.in_use(below);
        tracing::info!(place = self.place, segments = work.len(), below, "a member is brought up to date");
        self.status.borrow_mut().segments_total = work.len() as u64;
        self.show();
        let mut unread = Vec::new();
        for used in work {
            self.check()?;
            if self.copy_segment(used).await? > 0 {
                unread.push(used);
            }
            self.status.borrow_mut().segments_done += 1;
            self.show();
            let whole_below = unread.first().map_or(used.sequence.number + 1, |first| first.sequence.number);
            self.save(whole_below).await?;
        }
        self.try_again(unread).await
    }

    /// Stripes that could not be read may be there again in a moment, as members fail and come back. What stays away was
    /// never finished, or is lost to the pool as well as to the candidate.
    async fn try_again(&self, mut unread: Vec<SegmentUse>) -> Result<(), Stop> {
        for _ in 0..RETRIES {
            if unread.is_empty() {
                break;
            }
            self.core().env().sleep_until(self.keeper.now() + RETRY_AFTER).await;
            let mut left = Vec::new();
            for used in unread {
                self.check()?;
                if self.copy_segment(used).await? > 0 {
                    left.push(used);
                }
            }
            unread = left;
        }
        let (segments, mut lost) = (&self.core().shared.segments, 0);
        for used in unread.iter().filter(|used| segments.live_bytes(used.index) > 0) {
            lost += self.copy_segment(*used).await?;
        }
        self.status.borrow_mut().stripes_lost = lost;
        if lost > 0 {
            tracing::error!(
                place = self.place,
                lost,
                "stripes can't be read, so a member that comes back lacks them too"
            );
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Stop> {
        let (shared, set) = (&self.core().shared, &self.core().shared.set);
        let named = set.is(set.candidate(self.place), self.incarnation);
        if shared.is_closing() {
            Err(Stop::Closing)
        } else if set.joining() & (1 << self.place) == 0 || !named {
            Err(Stop::Failed)
        } else {
            Ok(())
        }
    }

    fn show(&self) {
        let mut status = self.status.borrow_mut();
        let elapsed = self.keeper.now().saturating_duration_since(self.started).as_millis() as u64;
        status.elapsed_ms = elapsed;
        let left = status.segments_total - status.segments_done;
        status.left_ms = (elapsed * left).checked_div(status.segments_done);
        self.core().shared.rebuild.show(status.clone());
    }

    /// Notes that all uses below `below` are whole; makes it durable now and then.
    async fn save(&self, below: u64) -> Result<(), Stop> {
        let now = self.keeper.now();
        if now.saturating_duration_since(self.saved.get()) >= PROGRESS_INTERVAL {
            self.saved.set(now);
            self.keeper.superblocks.progress(self.place, self.incarnation, below).await?;
        }
        Ok(())
    }

    /// Brings one use of a segment to the candidate; gives how many stripes could not be read.
    async fn copy_segment(&self, used: SegmentUse) -> Result<u64, Stop> {
        let (segments, stripes) = (&self.core().shared.segments, &self.core().stripes);
        // While it is pinned nobody else begins to use it.
        let _pin = Pins::new(segments, std::iter::once(used.index));
        if segments.sequence_of(used.index) != Some(used.sequence) {
            return Ok(0);
        }
        // Before looking: in one that is still written to, what is not found may be on its way.
        let closed = segments.is_closed(used);
        let (mut row, mut unread) = (0, 0);
        let mut gaps = Vec::new();
        for header in find_stripes(stripes, used).await {
            self.check()?;
            gaps.push(row..header.location.start_block);
            row = header.location.start_block + u32::from(header.location.shard_blocks);
            unread += u64::from(!self.copy_stripe(&header, used).await.map_err(|_| Stop::Failed)?);
        }
        gaps.push(row..stripes.set().layout.segment_bytes / BLOCK_BYTES as u32);
        if closed && !self.fresh {
            for gap in gaps {
                self.clear_strays(used, gap).await.map_err(|_| Stop::Failed)?;
            }
        }
        stripes.io.sync(stripes.set().candidate(self.place)).await.map_err(|_| Stop::Failed)?;
        Ok(unread)
    }

    /// What the candidate has of this use where the set has nothing was never finished: it must not come up again as
    /// something that is lost.
    async fn clear_strays(&self, used: SegmentUse, rows: Range<u32>) -> Result<(), Failure> {
        let stripes = &self.core().stripes;
        let index = stripes.set().candidate(self.place);
        let most = stripes.set().layout.shard_bytes_max / BLOCK_BYTES as u32;
        for first in rows.clone().step_by(most as usize) {
            let count = most.min(rows.end - first) as usize;
            let at = StripeLocation {
                segment: used.index,
                start_block: first,
                shard_blocks: 1,
                data_shards: 1,
                rotation: 0,
            };
            let offset = stripes.offset(&at);
            let read = stripes.io.read(index, offset, count * BLOCK_BYTES as usize).await?;
            let stray = |block: &[u8]| stripes.parse_header(block).is_some_and(|own| own.sequence == used.sequence);
            for (row, block) in read.chunks(BLOCK_BYTES as usize).enumerate().filter(|(_, block)| stray(block)) {
                let mut buf = self.core().env().buffer(block.len()).await;
                buf.fill(0);
                stripes.io.write(index, offset + row as u64 * BLOCK_BYTES, buf).await?;
            }
        }
        Ok(())
    }

    /// `false` if the stripe could not be read.
    async fn copy_stripe(&self, header: &ShardHeader, used: SegmentUse) -> Result<bool, Failure> {
        let stripes = &self.core().stripes;
        let Some(shard) = stripes.shard_at(&header.location, self.place) else { return Ok(true) };
        let (index, offset) = (stripes.set().candidate(self.place), stripes.offset(&header.location));
        // It is read from k members, and written.
        let bytes = (u64::from(header.location.data_shards) + 1) * header.location.shard_bytes() as u64;
        self.keeper.pace.spend(&**self.core().env(), &self.core().shared.foreground, bytes).await;
        let _erasing = self.core().shared.erasing.lock().await;
        let buf = if header.void {
            stripes.void_mark(header, shard).await
        } else {
            let Ok(stripe) = stripes.read(header.location, used.sequence).await else { return Ok(false) };
            if stripe.bad != 0 {
                stripes.repair(&stripe).await;
            }
            let Some(buf) = stripes.remake(&stripe, shard).await else { return Ok(false) };
            buf
        };
        self.status.borrow_mut().written_bytes += buf.len() as u64;
        stripes.io.write(index, offset, buf).await?;
        Ok(true)
    }
}
