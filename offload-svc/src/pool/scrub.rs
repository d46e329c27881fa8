//! Scrub: every shard of every stripe in use is read now and then, and what is wrong is put right.
//!
//! Owns the walk and its record in the superblock. Must not know maps. Invariants: a pass reads all that was there when it
//! began and is still in use when its turn comes; its place is durable, so that a restart goes on there.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::select;
use tokio::sync::Notify;

use super::core::Core;
use super::members::{Incarnation, TooFewMembers};
use super::pace::Pace;
use super::read::Pins;
use super::scan::find_stripes;
use super::segments::SegmentUse;
use super::status::{ScrubFinding, ScrubStatus};
use super::stripe::{ShardHeader, StripeLocation};
use super::stripe_io::{Lost, Stripe};
use super::superblock::ScrubRecord;
use super::superblocks::Superblocks;

/// Findings that are kept for the status, newest last.
const FINDINGS_MAX: usize = 64;
/// How often at least the progress is made durable.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// How often the clock is looked at for the next pass.
const CLOCK_INTERVAL: Duration = Duration::from_secs(60);

/// What the scrub shares with the rest of the pool.
#[derive(Debug, Default)]
pub struct Scrubbing {
    status: Mutex<ScrubStatus>,
    wanted: Mutex<Option<bool>>,
    wake: Notify,
}

impl Scrubbing {
    /// Begins a pass, or ends the one that is under way.
    pub fn ask(&self, run: bool) {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = Some(run);
        self.wake.notify_waiters();
    }

    fn wanted(&self) -> Option<bool> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn is_asked(&self) -> bool {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub fn status(&self) -> ScrubStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn show(&self, change: impl FnOnce(&mut ScrubStatus)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The scrub's task, on the coordinator's reactor.
pub struct Scrub {
    core: Rc<Core>,
    superblocks: Rc<Superblocks>,
    pace: Pace,
    record: Cell<ScrubRecord>,
    findings: RefCell<BTreeMap<(u8, u32), u64>>,
    saved: Cell<Instant>,
    /// Members that were suspect when this pass began, from the beginning.
    suspects: RefCell<Vec<(usize, Incarnation)>>,
}

/// How a pass ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Whole,
    Stopped,
    Closing,
}

impl Scrub {
    pub fn new(core: Rc<Core>, superblocks: Rc<Superblocks>, record: ScrubRecord) -> Self {
        let (pace, saved) = (Pace::new(core.shared.options.scrub_rate), Cell::new(core.env().now()));
        let (record, findings, suspects) = (Cell::new(record), RefCell::default(), RefCell::default());
        let scrub = Self { core, superblocks, pace, record, findings, saved, suspects };
        scrub.show(0);
        scrub
    }

    pub async fn run(self) {
        let shared = &self.core.shared;
        loop {
            let woken = shared.scrub.wake.notified();
            let mut woken = std::pin::pin!(woken);
            woken.as_mut().enable();
            let changes = match shared.scrub.wanted() {
                Some(run) => Some(run),
                None => (!self.record.get().running && self.is_due()).then_some(true),
            };
            if let Some(run) = changes {
                if run {
                    self.begin().await
                } else {
                    self.end_record()
                }
                if self.save().await.is_err() {
                    return;
                }
            }
            if shared.is_closing() || shared.set.is_failed() {
                return;
            }
            if self.record.get().running {
                match self.pass().await {
                    Ok(Ended::Whole) => {
                        self.end_record();
                        tracing::info!(record = ?self.record.get(), "scrub: pass ended");
                        if self.save_end().await.is_err() {
                            return;
                        }
                    }
                    Ok(Ended::Stopped) => {}
                    Ok(Ended::Closing) | Err(TooFewMembers) => return,
                }
            } else if shared.options.scrub_interval.is_zero() {
                woken.await;
            } else {
                let at = self.core.env().now() + CLOCK_INTERVAL;
                drop(select(woken, self.core.env().sleep_until(at)).await);
            }
        }
    }

    fn is_due(&self) -> bool {
        let interval = self.core.shared.options.scrub_interval;
        let ended = Duration::from_secs(self.record.get().ended_s);
        let now = Duration::from_secs(self.core.env().unix_seconds());
        !interval.is_zero() && now >= ended.saturating_add(interval)
    }

    async fn begin(&self) {
        if !self.record.get().running {
            let set = &self.core.shared.set;
            let members = self.superblocks.current().await.members;
            let suspects = members.iter().enumerate().filter(|(_, member)| member.suspect);
            *self.suspects.borrow_mut() = suspects.map(|(place, _)| (place, set.entry(place).incarnation())).collect();
            self.findings.borrow_mut().clear();
            let (started_s, ended_s) = (self.core.env().unix_seconds(), self.record.get().ended_s);
            self.record.set(ScrubRecord { running: true, started_s, ended_s, ..ScrubRecord::default() });
        }
    }

    fn end_record(&self) {
        let mut record = self.record.get();
        if record.running {
            (record.running, record.ended_s) = (false, self.core.env().unix_seconds());
            self.record.set(record);
        }
        self.show(0);
    }

    /// Everything in use from the recorded place on.
    async fn pass(&self) -> Result<Ended, TooFewMembers> {
        let shared = &self.core.shared;
        let work = shared.segments.in_use(self.record.get().next);
        let mut left = work.len() as u64;
        for used in work {
            self.show(left);
            self.segment(used).await;
            if let Some(ended) = self.cut_short() {
                return Ok(ended);
            }
            left -= 1;
            let mut record = self.record.get();
            record.next = used.sequence.number + 1;
            self.record.set(record);
            if self.core.env().now().saturating_duration_since(self.saved.get()) >= PROGRESS_INTERVAL {
                self.save().await?;
            }
        }
        Ok(Ended::Whole)
    }

    fn cut_short(&self) -> Option<Ended> {
        let shared = &self.core.shared;
        if shared.is_closing() {
            return Some(Ended::Closing);
        }
        shared.scrub.is_asked().then_some(Ended::Stopped)
    }

    async fn save(&self) -> Result<(), TooFewMembers> {
        self.saved.set(self.core.env().now());
        let record = self.record.get();
        self.superblocks.publish(|block| block.scrub = record).await
    }

    /// A pass has ended: members that were in the set all along, and of which all that was wrong is right again, are suspect
    /// no more.
    async fn save_end(&self) -> Result<(), TooFewMembers> {
        self.saved.set(self.core.env().now());
        let (record, set) = (self.record.get(), &self.core.shared.set);
        let suspects = std::mem::take(&mut *self.suspects.borrow_mut());
        let seen = |(place, incarnation): &(usize, Incarnation)| {
            record.bad == record.repaired && record.lost == 0 && set.contains(*place) && set.is(*place, *incarnation)
        };
        self.superblocks
            .publish(|block| {
                block.scrub = record;
                for (place, _) in suspects.iter().filter(|suspect| seen(suspect)) {
                    block.members[*place].suspect = false;
                }
            })
            .await
    }

    async fn segment(&self, used: SegmentUse) {
        let (segments, stripes) = (&self.core.shared.segments, &self.core.stripes);
        let _pin = Pins::new(segments, std::iter::once(used.index));
        if segments.sequence_of(used.index) != Some(used.sequence) {
            return;
        }
        for header in find_stripes(stripes, used).await.into_iter().filter(|header| !header.void) {
            if self.cut_short().is_some() {
                return;
            }
            let shards = u64::from(header.location.data_shards + header.parity_shards);
            let bytes = shards * header.location.shard_bytes() as u64;
            self.pace.spend(&**self.core.env(), &self.core.shared.foreground, bytes).await;
            let mut record = self.record.get();
            record.stripes += 1;
            // Nobody overwrites old stripes for good while one of them could be repaired.
            let _erasing = self.core.shared.erasing.lock().await;
            match self.read_settled(&header, used).await {
                Ok(stripe) if stripe.bad == 0 => {}
                Ok(stripe) => {
                    record.bad += u64::from(stripe.bad.count_ones());
                    record.repaired += u64::from(stripes.repair(&stripe).await.count_ones());
                    for shard in (0..32u8).filter(|shard| stripe.bad & (1 << shard) != 0) {
                        self.find(stripes.set().count(), &header.location, shard);
                    }
                }
                // What was never finished looks like that too; nothing in it is alive then.
                Err(_) if segments.live_bytes(used.index) == 0 => {}
                Err(lost) => {
                    tracing::error!(segment = used.index, ?header.location, %lost, "scrub: a stripe can't be read");
                    record.lost += 1;
                }
            }
            self.record.set(record);
        }
    }

    /// Reads a stripe; one that is being written looks wrong until it is done.
    async fn read_settled(&self, header: &ShardHeader, used: SegmentUse) -> Result<Stripe, Lost> {
        let stripes = &self.core.stripes;
        match stripes.read(header.location, used.sequence).await {
            Ok(stripe) if stripe.bad == 0 => Ok(stripe),
            _ => {
                stripes.set().writes.passed().await;
                stripes.read(header.location, used.sequence).await
            }
        }
    }

    fn find(&self, members: usize, location: &StripeLocation, shard: u8) {
        let (member, segment) = (location.member_of(shard, members) as u8, location.segment);
        tracing::warn!(member, segment, block = location.start_block, "scrub: a shard was wrong");
        *self.findings.borrow_mut().entry((member, segment)).or_default() += 1;
    }

    fn show(&self, left: u64) {
        let (record, findings) = (self.record.get(), self.findings.borrow());
        let kept = findings.len().saturating_sub(FINDINGS_MAX);
        let findings: Vec<ScrubFinding> = findings
            .iter()
            .skip(kept)
            .map(|((member, segment), shards)| ScrubFinding { member: *member, segment: *segment, shards: *shards })
            .collect();
        self.core.shared.scrub.show(|status| {
            *status = ScrubStatus {
                running: record.running,
                started_s: record.started_s,
                ended_s: record.ended_s,
                segments_left: left,
                stripes: record.stripes,
                bad_shards: record.bad,
                repaired_shards: record.repaired,
                stripes_lost: record.lost,
                findings,
            };
        });
    }
}
