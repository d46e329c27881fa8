//! Records on members: read by the healthy way or by rebuilding, and the keys that new ones are sealed under.
//!
//! Owns the way from a location and a birth to plain bytes. Must not know what the records are for. Invariant: bytes are
//! handed out only from a record that opened under the birth that was asked for.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{Either, join_all, select};

use super::env::Env;
use super::map::RecordLocation;
use super::members::Failure;
use super::options::BLOCK_BYTES;
use super::segments::Segments;
use super::shared::Volume;
use super::stripe::ShardRange;
use super::stripe_io::SharedStripeIo;
use crate::stages::engines::Engines;
use crate::stages::keys::{KeyEpoch, Keyring, Salt, SealingKey};
use crate::stages::record::{Birth, Kind, MAX_PLAIN_BYTES, RecordCodec};

/// One reactor's access to records.
pub struct RecordIo {
    pub stripes: SharedStripeIo,
    pub segments: Arc<Segments>,
    pub codec: RefCell<RecordCodec>,
    keyring: Arc<Keyring>,
    engines: Engines,
    /// Where records are opened.
    scratch: RefCell<Vec<u8>>,
    sealers: RefCell<HashMap<u32, (KeyEpoch, SealingKey)>>,
    slow_read: Duration,
}

impl RecordIo {
    pub fn new(
        stripes: SharedStripeIo,
        segments: Arc<Segments>,
        keyring: Arc<Keyring>,
        engines: Engines,
        slow_read: Duration,
    ) -> Self {
        let codec = RefCell::new(RecordCodec::new(engines, Arc::clone(&keyring)));
        let (scratch, sealers) = (RefCell::new(vec![0; MAX_PLAIN_BYTES]), RefCell::default());
        Self { stripes, segments, codec, keyring, engines, scratch, sealers, slow_read }
    }

    pub fn env(&self) -> &Rc<dyn Env> {
        &self.stripes.io.env
    }

    pub fn random_u64(&self) -> u64 {
        let mut bytes = [0; 8];
        self.env().random(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Runs `work` with the key that this reactor seals a volume's records of an epoch under: one per mount, reactor,
    /// volume and epoch, under a fresh random salt. `None` if the key is gone.
    pub fn with_sealer<T>(
        &self,
        volume: &Volume,
        epoch: KeyEpoch,
        work: impl FnOnce(&mut SealingKey) -> T,
    ) -> Option<T> {
        let mut sealers = self.sealers.borrow_mut();
        if sealers.get(&volume.id).is_none_or(|(held, _)| *held != epoch) {
            let key = self.keyring.get(volume.lineage, epoch)?;
            let mut salt = [0; 16];
            self.env().random(&mut salt);
            sealers.insert(volume.id, (epoch, key.sealing_key(Salt(salt), &self.engines)));
        }
        sealers.get_mut(&volume.id).map(|(_, sealer)| work(sealer))
    }

    /// Forgets the key of a volume that is gone.
    pub fn forget(&self, volume: &Volume) {
        self.sealers.borrow_mut().remove(&volume.id);
    }

    /// Opens a record and hands its plain bytes to `take`, which says whether they are what they should be; `false` if it is
    /// lost. The caller keeps its segment from being used anew.
    pub async fn read(
        &self,
        location: &RecordLocation,
        kind: Kind,
        birth: &Birth,
        take: impl Fn(&[u8]) -> bool,
    ) -> bool {
        if let Some(bytes) = self.fetch(location).await
            && self.open(&bytes, kind, birth, &take)
        {
            return true;
        }
        self.read_rebuilt(location, kind, birth, &take).await
    }

    /// Reads the whole stripe, rebuilds what is missing, and repairs it on the members.
    async fn read_rebuilt(
        &self,
        location: &RecordLocation,
        kind: Kind,
        birth: &Birth,
        take: &impl Fn(&[u8]) -> bool,
    ) -> bool {
        let Some(sequence) = self.segments.sequence_of(location.stripe.segment) else { return false };
        let read = self.stripes.read_patiently(location.stripe, sequence, self.slow_read).await;
        let Ok(stripe) = read else { return false };
        let start = location.payload_offset as usize;
        let bytes = stripe.payload.get(start..start + location.stored_bytes as usize);
        let opened = bytes.is_some_and(|bytes| self.open(bytes, kind, birth, take));
        if stripe.bad != 0 {
            self.stripes.repair(&stripe).await;
        }
        opened
    }

    fn open(&self, bytes: &[u8], kind: Kind, birth: &Birth, take: &impl Fn(&[u8]) -> bool) -> bool {
        let mut scratch = self.scratch.borrow_mut();
        let opened = self.codec.borrow_mut().open(bytes, kind, birth, &mut scratch);
        if let Err(error) = opened {
            tracing::debug!(?birth, %error, "record does not open");
            return false;
        }
        birth.plain_bytes().and_then(|len| scratch.get(..len)).is_some_and(take)
    }

    /// Waits for reads, but no longer than a member may take before the others are asked.
    async fn in_time<T>(&self, reads: impl Future<Output = T>) -> Option<T> {
        if self.slow_read.is_zero() {
            return Some(reads.await);
        }
        let late = self.env().sleep_until(self.env().now() + self.slow_read);
        match select(pin!(reads), late).await {
            Either::Left((results, _)) => Some(results),
            Either::Right(_) => None,
        }
    }

    /// A record's bytes from the members that hold them, unverified; `None` if one of them does not answer well.
    async fn fetch(&self, location: &RecordLocation) -> Option<Vec<u8>> {
        let pieces: Vec<ShardRange> = location.stripe.pieces(location.payload_offset, location.stored_bytes).collect();
        let span = |piece: &ShardRange| {
            let block = BLOCK_BYTES as u32;
            let start = piece.offset / block * block;
            (start, (piece.offset + piece.len).next_multiple_of(block) - start)
        };
        let members = self.stripes.set().count();
        if pieces.iter().any(|piece| self.stripes.is_slow(location.stripe.member_of(piece.shard, members))) {
            return None;
        }
        let _room = self.stripes.room(pieces.len()).await;
        let base = self.stripes.offset(&location.stripe);
        let answered: Vec<Cell<bool>> = pieces.iter().map(|_| Cell::new(false)).collect();
        let reads = pieces.iter().zip(&answered).map(|(piece, answered)| {
            let (start, len) = span(piece);
            let member = location.stripe.member_of(piece.shard, members);
            async move {
                let result = self.stripes.io.read(member, base + u64::from(start), len as usize).await;
                answered.set(true);
                (member, result)
            }
        });
        let Some(results) = self.in_time(join_all(reads)).await else {
            let slow = pieces.iter().zip(&answered).filter(|(_, answered)| !answered.get());
            let slow: BTreeSet<_> = slow.map(|(piece, _)| location.stripe.member_of(piece.shard, members)).collect();
            slow.into_iter().for_each(|place| self.stripes.was_slow(place, self.slow_read));
            return None;
        };
        let mut bytes = Vec::with_capacity(location.stored_bytes as usize);
        let mut late = 0;
        let mut whole = true;
        for (piece, (member, result)) in pieces.iter().zip(results) {
            match result {
                Ok(buf) => {
                    let start = (piece.offset - span(piece).0) as usize;
                    bytes.extend_from_slice(&buf[start..start + piece.len as usize]);
                }
                Err(failure) => {
                    whole = false;
                    if failure == Failure::Timeout {
                        late |= 1 << member;
                    }
                }
            }
        }
        self.stripes.put_out_later(late).await;
        whole.then_some(bytes)
    }
}
