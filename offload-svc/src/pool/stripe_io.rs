//! Whole stripes on members: written to all, read from whatever is left.
//!
//! Owns Reed-Solomon over shards, the choice of members, repair. Must not know records. Invariants: a stripe that
//! [`StripeIo::write`] reports written is durable on every member of the current set that holds a part of it, and on k'
//! of them at least, and on every candidate that was there when it began and has not been dropped since; a payload that [`StripeIo::read`] returns matched the checksums of its shards.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::future::join_all;
use nvmf_target::buffer::IoBuf;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::members::{Failure, Incarnation, MemberIo, MemberSet};
use super::options::{BLOCK_BYTES, SUPERBLOCK_AREA_BYTES};
use super::slow::Slowness;
use super::stripe::{HEADER_BYTES, History, Sequence, ShardHeader, StripeLocation};
use crate::stages::crc::crc32c;
use crate::stages::rs::{Code, CodeError};

/// Why a stripe was not written. Nothing of it will come back at a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    #[error("the file system beneath a member is full")]
    NoSpace,
    #[error("fewer than k members are left")]
    TooFewMembers,
}

/// A stripe can't be read or rebuilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{good} good shards of {needed} needed")]
pub struct Lost {
    pub good: usize,
    pub needed: usize,
    /// Shards on members of the set that gave no answer, or an error: they may be good.
    pub unheard: usize,
}

impl Lost {
    /// Whether it might be there after all, once members answer again.
    pub fn may_come_back(&self) -> bool {
        self.good + self.unheard >= self.needed
    }
}

/// A stripe as read.
pub struct Stripe {
    pub header: ShardHeader,
    pub payload: Vec<u8>,
    /// Shards on members of the set that were missing or wrong.
    pub bad: u32,
}

/// What goes into the headers of a stripe besides its place.
#[derive(Debug, Clone, Copy)]
pub struct Label {
    pub sequence: Sequence,
    pub stream: u32,
    pub number: u64,
    pub history: History,
}

/// Where one shard of a stripe goes.
struct Target {
    shard: u8,
    place: usize,
    /// The member at the place, or its candidate.
    index: usize,
    incarnation: Incarnation,
}

/// How that went.
struct Written {
    shard: u8,
    place: usize,
    index: usize,
    incarnation: Incarnation,
    candidate: bool,
    result: Result<(), Failure>,
}

impl Written {
    fn who(&self) -> (usize, Incarnation) {
        (self.place, self.incarnation)
    }
}

/// One reactor's access to stripes.
pub struct StripeIo {
    pub io: MemberIo,
    codes: Vec<Code>,
    /// Buffers that may be held by those who hold several, so that waiting for buffers never ends in a circle.
    budget: Arc<Semaphore>,
    /// By place.
    pub slowness: Vec<Slowness>,
}

impl StripeIo {
    /// `budget_bytes` is what `Env::buffer` is sure to give.
    pub fn new(io: MemberIo, budget_bytes: u64) -> Result<Self, CodeError> {
        let layout = io.set.layout;
        let codes = (1..=layout.data_shards).map(|k| Code::new(k.into(), layout.parity_shards.into()));
        let codes = codes.collect::<Result<_, _>>()?;
        let buffers = budget_bytes / u64::from(layout.shard_bytes_max);
        let buffers = usize::try_from(buffers).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let slowness = (0..io.set.count()).map(|_| Slowness::default()).collect();
        Ok(Self { io, codes, budget: Arc::new(Semaphore::new(buffers)), slowness })
    }

    pub fn set(&self) -> &MemberSet {
        &self.io.set
    }

    /// The right to hold `count` buffers at once, taken before the first of them: who holds some and waits for more must
    /// not wait for others like it. One alone needs no right.
    pub async fn room(&self, count: usize) -> Option<OwnedSemaphorePermit> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if count < 2 { None } else { Arc::clone(&self.budget).acquire_many_owned(count).await.ok() }
    }

    /// Where a stripe begins on a member.
    pub fn offset(&self, location: &StripeLocation) -> u64 {
        let segment = u64::from(location.segment) * u64::from(self.set().layout.segment_bytes);
        SUPERBLOCK_AREA_BYTES + segment + location.offset_in_segment()
    }

    pub fn shards(&self, location: &StripeLocation) -> u8 {
        location.data_shards + self.set().layout.parity_shards
    }

    /// The rotation, `turn` as a wish, that puts the most shards of a stripe on members of the set.
    pub fn rotation(&self, turn: u64, data_shards: u8) -> u8 {
        let (members, mask) = (self.set().count(), self.set().mask());
        let shards = usize::from(data_shards) + usize::from(self.set().layout.parity_shards);
        let wish = (turn % members as u64) as usize;
        let live = |first: usize| (0..shards).filter(|i| mask & (1 << ((first + i) % members)) != 0).count();
        let mut best = wish;
        for step in 1..members {
            let first = (wish + step) % members;
            if live(first) > live(best) {
                best = first;
            }
        }
        best as u8
    }

    /// Writes a stripe, and waits until it is durable.
    pub async fn write(&self, location: StripeLocation, label: Label, payload: &[u8]) -> Result<(), WriteError> {
        // Before looking who takes part: a candidate that is not seen here is filled only after we are done.
        let _under_way = self.set().writes.enter();
        let targets = self.targets(&location);
        let _room = self.room(targets.len()).await;
        let (header, bodies) = self.encode(location, label, payload).await;
        let results = self.write_targets(&location, targets, bodies).await;
        let full = |written: &Written| !written.candidate && written.result == Err(Failure::NoSpace);
        if results.iter().any(full) {
            self.retract(&header, &results).await;
            return Err(WriteError::NoSpace);
        }
        let settled = self.settle(&location, &results).await;
        if settled.is_err() {
            // The pool has failed, and what can still be reached is told; a later mount then finds the marks.
            self.retract(&header, &results).await;
        } else {
            self.set().traffic.stripe(&self.set().layout, label.stream, &location, payload.len());
        }
        settled
    }

    /// Who gets the shards of a stripe: the members at its places, and the candidates for these.
    fn targets(&self, location: &StripeLocation) -> Vec<Target> {
        let set = self.set();
        let mut targets = Vec::with_capacity(usize::from(self.shards(location)) + 1);
        for shard in 0..self.shards(location) {
            let place = location.member_of(shard, set.count());
            let incarnation = set.entry(place).incarnation();
            targets.push(Target { shard, place, index: place, incarnation });
            let index = set.candidate(place);
            // One that has just become the member is the same in both places.
            if set.joining() & (1 << place) != 0 && !set.is(index, incarnation) {
                targets.push(Target { shard, place, index, incarnation: set.entry(index).incarnation() });
            }
        }
        targets
    }

    async fn write_targets(
        &self,
        location: &StripeLocation,
        targets: Vec<Target>,
        mut bodies: Vec<IoBuf>,
    ) -> Vec<Written> {
        let offset = self.offset(location);
        let mut writes = Vec::with_capacity(targets.len());
        // From the back, as the last target of a shard takes the buffer itself.
        for target in targets.into_iter().rev() {
            let shard = usize::from(target.shard);
            let buf = if target.index == target.place {
                bodies.pop()
            } else if let Some(body) = bodies.get(shard) {
                let mut copy = self.io.env.buffer(body.len()).await;
                copy.copy_from_slice(body);
                Some(copy)
            } else {
                None
            };
            writes.extend(buf.map(|buf| async move {
                let result = self.io.write_durably(target.index, offset, buf).await;
                let Target { shard, place, index, incarnation } = target;
                Written { shard, place, index, incarnation, candidate: index != place, result }
            }));
        }
        join_all(writes).await
    }

    /// Puts out the members and candidates that failed; then enough must be left that did not.
    async fn settle(&self, location: &StripeLocation, results: &[Written]) -> Result<(), WriteError> {
        let failed = |written: &&Written| written.candidate && written.result.is_err();
        let candidates: Vec<_> = results.iter().filter(failed).map(Written::who).collect();
        if !candidates.is_empty() {
            self.io.exclude_all(candidates).await.map_err(|_| WriteError::TooFewMembers)?;
        }
        loop {
            let mask = self.set().mask();
            // A candidate may have become the member meanwhile: then its result counts for the place.
            let counts = |written: &&Written| {
                mask & (1 << written.place) != 0 && self.set().entry(written.place).incarnation() == written.incarnation
            };
            let failed: Vec<_> =
                results.iter().filter(counts).filter(|written| written.result.is_err()).map(Written::who).collect();
            if failed.is_empty() {
                let written = results.iter().filter(counts).filter(|written| written.result.is_ok()).count();
                // Fewer than k' shards happen only when the pool has failed.
                let enough = written >= usize::from(location.data_shards) && !self.set().is_failed();
                return if enough { Ok(()) } else { Err(WriteError::TooFewMembers) };
            }
            self.io.exclude_all(failed).await.map_err(|_| WriteError::TooFewMembers)?;
        }
    }

    /// Makes the shards of a payload, headers included.
    async fn encode(&self, location: StripeLocation, label: Label, payload: &[u8]) -> (ShardHeader, Vec<IoBuf>) {
        let (data, shards) = (usize::from(location.data_shards), self.shards(&location));
        let mut bufs = Vec::with_capacity(shards.into());
        for _ in 0..shards {
            bufs.push(self.io.env.buffer(location.shard_bytes()).await);
        }
        let mut parts = payload.chunks(location.shard_payload_bytes());
        for buf in &mut bufs[..data] {
            let part = parts.next().unwrap_or_default();
            let (used, rest) = buf[HEADER_BYTES..].split_at_mut(part.len());
            used.copy_from_slice(part);
            rest.fill(0);
        }
        let (sources, parity) = bufs.split_at_mut(data);
        let sources: Vec<&[u8]> = sources.iter().map(|buf| &buf[HEADER_BYTES..]).collect();
        let mut parity: Vec<&mut [u8]> = parity.iter_mut().map(|buf| &mut buf[HEADER_BYTES..]).collect();
        let encoded = self.codes[data - 1].encode(&sources, &mut parity);
        debug_assert!(encoded.is_ok(), "counts and lengths are this pool's own");
        let mut header = ShardHeader {
            void: false,
            shard: 0,
            parity_shards: self.set().layout.parity_shards,
            pool: self.set().pool,
            location,
            sequence: label.sequence,
            epoch: self.set().epoch(),
            number: label.number,
            stream: label.stream,
            payload_bytes: payload.len() as u32,
            shard_crcs: bufs.iter().map(|buf| crc32c(&buf[HEADER_BYTES..])).collect(),
            history: label.history,
        };
        for (shard, buf) in bufs.iter_mut().enumerate() {
            header.shard = shard as u8;
            header.write_to(buf);
        }
        (header, bufs)
    }

    /// Marks the shards that were written of a failed stripe void, so that no mount brings it back. A member that can't
    /// be told is put out.
    async fn retract(&self, header: &ShardHeader, results: &[Written]) {
        let offset = self.offset(&header.location);
        let voids = results.iter().filter(|written| written.result != Err(Failure::Gone)).map(|written| async move {
            let voided =
                self.io.write_durably(written.index, offset, self.void_mark(header, written.shard).await).await;
            // Where there was no room for the shard, none of it may be there: then no room for the mark is no harm,
            // as the first block is what lacks.
            let harmless = written.result == Err(Failure::NoSpace) && voided == Err(Failure::NoSpace);
            (written.who(), harmless || voided.is_ok())
        });
        let results = join_all(voids).await;
        let failed: Vec<_> = results.into_iter().filter(|(_, told)| !told).map(|(who, _)| who).collect();
        if !failed.is_empty() && self.io.exclude_all(failed).await.is_err() {
            self.set().fail();
        }
    }

    /// Marks a stripe of an earlier mount void that was never finished. Where that fails, no harm is done.
    pub async fn give_up(&self, header: &ShardHeader) {
        let offset = self.offset(&header.location);
        let marks = (0..self.shards(&header.location)).map(|shard| async move {
            let place = header.location.member_of(shard, self.set().count());
            self.io.write_durably(place, offset, self.void_mark(header, shard).await).await
        });
        join_all(marks).await;
    }

    /// The first block of a shard that says that the stripe was given up.
    pub async fn void_mark(&self, header: &ShardHeader, shard: u8) -> IoBuf {
        let mut buf = self.io.env.buffer(BLOCK_BYTES as usize).await;
        buf.fill(0);
        ShardHeader { void: true, shard, ..header.clone() }.write_to(&mut buf);
        buf
    }

    /// Reads a stripe from all members of the set and rebuilds what is missing.
    pub async fn read(&self, location: StripeLocation, sequence: Sequence) -> Result<Stripe, Lost> {
        let shards = self.shards(&location);
        let _room = self.room(shards.into()).await;
        let bufs = self.read_shards(&location).await;
        self.assemble(location, sequence, &bufs)
    }

    async fn read_shards(&self, location: &StripeLocation) -> Vec<Result<IoBuf, Failure>> {
        let (offset, len) = (self.offset(location), location.shard_bytes());
        let reads = (0..self.shards(location)).map(|shard| {
            let member = location.member_of(shard, self.set().count());
            async move { (member, self.io.read(member, offset, len).await) }
        });
        let results = join_all(reads).await;
        let late = mask_of(&results, |result| matches!(result, Err(Failure::Timeout)));
        self.put_out_later(late).await;
        let result_of = |(member, result): (usize, Result<IoBuf, Failure>)| match result {
            // Nothing counts any more that only it has.
            Err(Failure::Timeout) if !self.set().contains(member) => Err(Failure::Gone),
            result => result,
        };
        results.into_iter().map(result_of).collect()
    }

    /// Puts out members that did not answer a read, unless that would leave too few: then errors say so by themselves.
    pub async fn put_out_later(&self, members: u32) {
        let members = members & self.set().mask();
        if members != 0 && self.set().can_lose(members) {
            // If it can't be done the pool has failed, and reads go on as far as they can.
            let _ = self.io.exclude(members).await;
        }
    }

    /// Finds the good shards among what was read, and the payload behind them.
    pub fn assemble(
        &self,
        location: StripeLocation,
        sequence: Sequence,
        bufs: &[Result<IoBuf, Failure>],
    ) -> Result<Stripe, Lost> {
        let needed = usize::from(location.data_shards);
        let headers: Vec<Option<ShardHeader>> = bufs
            .iter()
            .enumerate()
            .map(|(shard, buf)| {
                let header = self.parse_header(buf.as_ref().ok()?)?;
                let fits =
                    header.location == location && header.sequence == sequence && usize::from(header.shard) == shard;
                fits.then_some(header)
            })
            .collect();
        let unheard = bufs.iter().filter(|buf| matches!(buf, Err(Failure::Timeout | Failure::Error))).count();
        let lost = |good: u32| Lost { good: good.count_ones() as usize, needed, unheard };
        let Some(header) = reference(&headers) else { return Err(lost(0)) };
        let (mut good, mut bad) = (0u32, 0u32);
        for (shard, buf) in bufs.iter().enumerate() {
            let own = headers[shard].as_ref().is_some_and(|own| own.same_stripe(&header));
            match buf {
                Ok(buf) if own && header.body_matches(shard as u8, buf) => good |= 1 << shard,
                Err(Failure::Gone | Failure::Slow) => {}
                _ => bad |= 1 << shard,
            }
        }
        if (good.count_ones() as usize) < needed {
            return Err(lost(good));
        }
        let payload = self.payload(&header, good, bufs).ok_or(lost(good))?;
        Ok(Stripe { header, payload, bad })
    }

    /// The header at the front of a shard, if it is one of this pool.
    pub fn parse_header(&self, shard: &[u8]) -> Option<ShardHeader> {
        let header = ShardHeader::parse(shard, &self.set().layout, self.set().segment_count).ok()?;
        (header.pool == self.set().pool).then_some(header)
    }

    fn payload(&self, header: &ShardHeader, good: u32, bufs: &[Result<IoBuf, Failure>]) -> Option<Vec<u8>> {
        let location = &header.location;
        let (data, body) = (usize::from(location.data_shards), location.shard_payload_bytes());
        let mut payload = vec![0u8; location.payload_capacity()];
        let is_good = |shard: usize| good & (1 << shard) != 0;
        let present: Vec<(usize, &[u8])> = bufs
            .iter()
            .enumerate()
            .filter(|(shard, _)| is_good(*shard))
            .filter_map(|(shard, buf)| Some((shard, &buf.as_ref().ok()?[HEADER_BYTES..])))
            .collect();
        let mut wanted: Vec<(usize, &mut [u8])> = Vec::new();
        for (shard, part) in payload.chunks_mut(body).enumerate() {
            match bufs.get(shard) {
                Some(Ok(buf)) if is_good(shard) => part.copy_from_slice(&buf[HEADER_BYTES..]),
                _ => wanted.push((shard, part)),
            }
        }
        if !wanted.is_empty() {
            self.codes.get(data - 1)?.recover(&present, &mut wanted).ok()?;
        }
        payload.truncate(header.payload_bytes as usize);
        Some(payload)
    }

    /// The shard of a stripe that lies at a place, if one does.
    pub fn shard_at(&self, location: &StripeLocation, place: usize) -> Option<u8> {
        (0..self.shards(location)).find(|shard| location.member_of(*shard, self.set().count()) == place)
    }

    /// One shard of a stripe, made from its payload; `None` if that does not give the stripe that was written.
    pub async fn remake(&self, stripe: &Stripe, shard: u8) -> Option<IoBuf> {
        let ShardHeader { sequence, stream, number, history, .. } = stripe.header;
        let label = Label { sequence, stream, number, history };
        let location = stripe.header.location;
        let _room = self.room(self.shards(&location).into()).await;
        let (header, mut bodies) = self.encode(location, label, &stripe.payload).await;
        let same = header.shard_crcs == stripe.header.shard_crcs && usize::from(shard) < bodies.len();
        same.then(|| bodies.swap_remove(shard.into()))
    }

    /// Writes the bad shards of a stripe again; gives those that were. Counts both per member.
    pub async fn repair(&self, stripe: &Stripe) -> u32 {
        let ShardHeader { sequence, stream, number, history, .. } = stripe.header;
        let label = Label { sequence, stream, number, history };
        let location = stripe.header.location;
        let _room = self.room(self.shards(&location).into()).await;
        let (header, bodies) = self.encode(location, label, &stripe.payload).await;
        if header.shard_crcs != stripe.header.shard_crcs {
            return 0;
        }
        let offset = self.offset(&location);
        let wanted = bodies.into_iter().enumerate().filter(|(shard, _)| stripe.bad & (1 << shard) != 0);
        let writes = wanted.map(|(shard, buf)| {
            let member = location.member_of(shard as u8, self.set().count());
            self.set().entry(member).bad_shards.fetch_add(1, Ordering::Relaxed);
            async move { (shard, member, self.io.write_durably(member, offset, buf).await) }
        });
        let (mut repaired, mut failed) = (0, 0);
        for (shard, member, result) in join_all(writes).await {
            match result {
                Ok(()) => {
                    self.set().entry(member).repaired_shards.fetch_add(1, Ordering::Relaxed);
                    repaired |= 1 << shard;
                }
                Err(Failure::Error | Failure::Timeout) => failed |= 1 << member,
                Err(Failure::NoSpace | Failure::Gone | Failure::Slow) => {}
            }
        }
        self.put_out_later(failed).await;
        repaired
    }
}

/// The header that most shards agree on; none if the stripe was given up, which any one mark tells: a stripe that has been
/// answered is never marked.
fn reference(headers: &[Option<ShardHeader>]) -> Option<ShardHeader> {
    if headers.iter().flatten().any(|header| header.void) {
        return None;
    }
    let votes = |header: &ShardHeader| headers.iter().flatten().filter(|other| other.same_stripe(header)).count();
    headers.iter().flatten().max_by_key(|header| votes(header)).cloned()
}

fn mask_of<T>(results: &[(usize, T)], wanted: impl Fn(&T) -> bool) -> u32 {
    results.iter().filter(|(_, result)| wanted(result)).fold(0, |mask, (member, _)| mask | 1 << member)
}

/// Shared by all parts of one reactor.
pub type SharedStripeIo = Rc<StripeIo>;
