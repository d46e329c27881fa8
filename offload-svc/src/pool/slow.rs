//! Slow members: reads that the others serve, while it is found out whether a member still answers.
//!
//! Owns who is slow at the moment. Must not know records. Invariants: a read leaves a member out only where enough others
//! are there; a member that is left out is asked all the same, so that one that hangs is put out.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::{Either, select};
use futures::stream::FuturesUnordered;
use nvmf_target::buffer::IoBuf;

use super::members::Failure;
use super::options::BLOCK_BYTES;
use super::stripe::{Sequence, StripeLocation};
use super::stripe_io::{Lost, Stripe, StripeIo};

/// A member that was slow is left out for so many times the time that was too long.
const LEFT_OUT: u32 = 8;

/// What is known of one member.
#[derive(Debug, Default)]
pub struct Slowness {
    until: Cell<Option<Instant>>,
    asked: Cell<bool>,
}

impl StripeIo {
    /// Whether a member was slow a moment ago.
    pub fn is_slow(&self, place: usize) -> bool {
        self.slowness[place].until.get().is_some_and(|until| self.io.env.now() < until)
    }

    /// A read was not answered within `patience`.
    pub fn was_slow(self: &Rc<Self>, place: usize, patience: Duration) {
        let slowness = &self.slowness[place];
        slowness.until.set(Some(self.io.env.now() + patience * LEFT_OUT));
        self.set().entry(place).slow_reads.fetch_add(1, Ordering::Relaxed);
        if slowness.asked.replace(true) {
            return;
        }
        let stripes = Rc::clone(self);
        self.io.env.spawn(Box::pin(async move {
            let began = stripes.io.env.now();
            let answer = stripes.io.read(place, 0, BLOCK_BYTES as usize).await;
            if matches!(answer, Err(Failure::Timeout)) {
                stripes.put_out_later(1 << place).await;
            } else if stripes.io.env.now().saturating_duration_since(began) < patience {
                stripes.slowness[place].until.set(None);
            }
            stripes.slowness[place].asked.set(false);
        }));
    }

    /// Reads a stripe and rebuilds what is missing, without waiting longer than `patience` for members that it can do
    /// without; those are not taken to be wrong.
    pub async fn read_patiently(
        &self,
        location: StripeLocation,
        sequence: Sequence,
        patience: Duration,
    ) -> Result<Stripe, Lost> {
        if !patience.is_zero() {
            let _room = self.room(self.shards(&location).into()).await;
            let bufs = self.read_enough(&location, patience).await;
            let read = self.assemble(location, sequence, &bufs);
            if read.is_ok() || !bufs.iter().any(|buf| matches!(buf, Err(Failure::Slow))) {
                return read;
            }
        }
        self.read(location, sequence).await
    }

    async fn read_enough(&self, location: &StripeLocation, patience: Duration) -> Vec<Result<IoBuf, Failure>> {
        let (offset, len, needed) = (self.offset(location), location.shard_bytes(), usize::from(location.data_shards));
        let count = self.shards(location);
        let place = |shard: u8| location.member_of(shard, self.set().count());
        let quick = (0..count).filter(|shard| self.set().contains(place(*shard)) && !self.is_slow(place(*shard)));
        let all = quick.count() < needed;
        let asked = (0..count).filter(|shard| all || !self.is_slow(place(*shard)));
        let mut reads: FuturesUnordered<_> =
            asked.map(|shard| async move { (shard, self.io.read(place(shard), offset, len).await) }).collect();
        let mut results: Vec<Result<IoBuf, Failure>> = (0..count).map(|_| Err(Failure::Slow)).collect();
        let (mut good, mut late, mut overdue) = (0, false, 0u32);
        let mut deadline = pin!(self.io.env.sleep_until(self.io.env.now() + patience));
        while !(late && good >= needed) {
            let next = if late {
                reads.next().await
            } else {
                match select(reads.next(), deadline.as_mut()).await {
                    Either::Left((next, _)) => next,
                    Either::Right(_) => {
                        late = true;
                        continue;
                    }
                }
            };
            let Some((shard, result)) = next else { break };
            good += usize::from(result.is_ok());
            overdue |= u32::from(matches!(result, Err(Failure::Timeout))) << place(shard);
            results[usize::from(shard)] = result;
        }
        self.put_out_later(overdue).await;
        results
    }
}
