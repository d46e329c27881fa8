//! Room beneath segments: what is to be written next is really allocated on the members' file systems.
//!
//! Owns the asking for that room and the giving back of what is left over. Must not know what segments hold. Invariants: the
//! reserve for checkpoints, cleaning and deletion, and what writes have been promised, has its room before it is needed, so
//! that a full file system refuses writes and nothing else; only segments that are free are given back, and none is used
//! while it is.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::{join_all, select};

use super::core::Core;
use super::members::{Failure, MemberIo};
use super::options::SUPERBLOCK_AREA_BYTES;
use super::segments::{Segments, Wanted};

/// How soon a full file system is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Segments that are tried in one round on a full file system: some may have their room from earlier.
const TRIALS_MAX: usize = 32;
/// Free segments beyond what is wanted that keep their room, besides an eighth of all: those that cleaning turns over.
const KEPT_MIN: u64 = 16;

/// The members beneath which there is no room, by place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FullBeneath(pub u32);

fn range_of(io: &MemberIo, segment: u32) -> (u64, u64) {
    let bytes = u64::from(io.set.layout.segment_bytes);
    (SUPERBLOCK_AREA_BYTES + u64::from(segment) * bytes, bytes)
}

/// Allocates a segment on all members of the set and on those that are coming back. Where a member fails otherwise than for
/// want of room, or its file system can't be asked, the first write finds out.
pub async fn back(io: &MemberIo, segment: u32) -> Result<(), FullBeneath> {
    let set = &io.set;
    let (offset, len) = range_of(io, segment);
    // First where there was no room the last time: as long as that is so, the others' room is not used up for nothing.
    for place in (0..set.count()).filter(|place| set.contains(*place) && set.entry(*place).is_full_beneath()) {
        if io.allocate(place, offset, len).await == Err(Failure::NoSpace) {
            return Err(FullBeneath(1 << place));
        }
        set.entry(place).set_full_beneath(false);
    }
    let asked = (0..2 * set.count()).map(|index| async move {
        let (place, incarnation) = (index % set.count(), set.entry(index).incarnation());
        let full = io.allocate(index, offset, len).await == Err(Failure::NoSpace);
        if full && index != place {
            // If it can't be done the pool has failed.
            let _ = io.exclude_all(vec![(place, incarnation)]).await;
        } else if index == place && set.contains(place) {
            set.entry(place).set_full_beneath(full);
        }
        u32::from(full && index == place) << place
    });
    let full = join_all(asked).await.into_iter().fold(0, |full, member| full | member);
    if full == 0 { Ok(()) } else { Err(FullBeneath(full)) }
}

/// Allocates on one that comes back, or takes the place of another, all that has its room on the members of the set.
pub async fn back_candidate(io: &MemberIo, segments: &Segments, candidate: usize) -> Result<(), Failure> {
    io.allocate(candidate, 0, SUPERBLOCK_AREA_BYTES).await.or_else(unless_full)?;
    for segment in segments.backed() {
        let (offset, len) = range_of(io, segment);
        io.allocate(candidate, offset, len).await.or_else(unless_full)?;
    }
    Ok(())
}

fn unless_full(failure: Failure) -> Result<(), Failure> {
    match failure {
        Failure::Error | Failure::Slow => Ok(()),
        failure => Err(failure),
    }
}

/// Before a mount writes its checkpoint: finds or makes room for that and for the reserve. On a full file system the segments
/// that have theirs from earlier are among the free ones.
pub async fn back_for_mount(io: &MemberIo, segments: &Segments, wanted: Wanted) {
    let mut after = None;
    while let Some(segment) = segments.next_unbacked(wanted, after) {
        match back(io, segment).await {
            Ok(()) => segments.set_backed(segment, true),
            Err(FullBeneath(members)) => {
                if after.is_none() {
                    tracing::warn!(members = format!("{members:#b}"), "the file systems beneath members are full");
                }
                after = Some(segment);
            }
        }
    }
    segments.set_full_beneath(segments.next_unbacked(wanted, None).is_some());
}

/// Keeps the room ahead of the writes for as long as the reactor runs.
pub async fn run(core: Rc<Core>) {
    let shared = Arc::clone(&core.shared);
    let mut after = None;
    loop {
        let woken = shared.backing.notified();
        if shared.set.is_failed() {
            return;
        }
        let was_full = is_full(&core);
        let full = round(&core, &mut after).await;
        // What has come free goes to others as well where there is no room left.
        give_back(&core, was_full || is_full(&core)).await;
        if full {
            drop(select(std::pin::pin!(woken), core.env().sleep_until(core.env().now() + ASK_AGAIN)).await);
        } else {
            woken.await;
        }
    }
}

fn is_full(core: &Core) -> bool {
    core.shared.segments.is_full_beneath() || {
        let set = &core.shared.set;
        set.places().iter().enumerate().any(|(place, member)| set.contains(place) && member.is_full_beneath())
    }
}

/// Gets what is wanted as far as there is room; whether a file system beneath a member is full.
async fn round(core: &Core, after: &mut Option<u32>) -> bool {
    let (shared, io) = (&core.shared, &core.stripes.io);
    let was_full = shared.segments.is_full_beneath();
    let wanted = shared.admission.wanted();
    // While it is full somewhere, one more is tried even if all that is wanted is there, to learn when it is not any more.
    let mut probe = is_full(core);
    let (mut trials, mut refused, mut turned) = (0, false, false);
    while trials < TRIALS_MAX {
        let next = shared.segments.next_unbacked(wanted, *after);
        let Some(segment) = next.or_else(|| shared.segments.next_unbacked(Wanted::MORE, *after).filter(|_| probe))
        else {
            if after.take().is_none() || turned {
                break;
            }
            turned = true;
            continue;
        };
        probe = false;
        match back(io, segment).await {
            Ok(()) => shared.segments.set_backed(segment, true),
            Err(FullBeneath(_)) => {
                (*after, refused) = (Some(segment), true);
                trials += 1;
            }
        }
        shared.space_event.notify_waiters();
    }
    let lacking = shared.segments.next_unbacked(wanted, None).is_some();
    shared.admission.forget_asked();
    shared.segments.set_full_beneath(lacking && refused);
    if lacking && refused && !was_full {
        tracing::warn!("a file system beneath a member is full: new writes are refused, all else goes on");
        // Admission counts otherwise now, and the window makes way for segments that have their room.
        shared.cleaning.notify_one();
        shared.want_checkpoint();
    }
    shared.space_event.notify_waiters();
    refused || lacking
}

/// Gives room back that free segments hold beyond what is kept.
async fn give_back(core: &Core, full: bool) {
    let (shared, io) = (&core.shared, &core.stripes.io);
    let wanted = shared.admission.wanted();
    let turned_over = (u64::from(shared.set.segment_count) / 8).max(3) + KEPT_MIN;
    let kept = wanted.total + if full { 0 } else { turned_over };
    while let Some(segment) = shared.segments.take_surplus(kept) {
        let (offset, len) = range_of(io, segment);
        let set = &io.set;
        let mut late = 0;
        for index in 0..2 * set.count() {
            let (place, incarnation) = (index % set.count(), set.entry(index).incarnation());
            if io.release(index, offset, len).await != Err(Failure::Timeout) {
                continue;
            }
            // A late one could hit the segment's next use, so who does not answer leaves the set.
            if index == place {
                late |= 1 << place;
            } else if io.exclude_all(vec![(place, incarnation)]).await.is_err() {
                return;
            }
        }
        core.stripes.put_out_later(late).await;
        if late & set.mask() != 0 {
            // It could not be put out: the segment stays out of use.
            continue;
        }
        shared.segments.unpin(segment);
        shared.given_back.fetch_add(1, Ordering::Relaxed);
    }
}
