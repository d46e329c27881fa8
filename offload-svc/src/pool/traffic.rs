//! What has been written to members, by what it was for: the account behind write amplification.
//!
//! Owns the counters, from the mount on. Must not know who writes. Invariants: every stripe that became durable is counted once,
//! to its last byte; repairs, rebuilds and superblocks are not, as they grow with damage and time and not with writes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::page_writer;
use super::status::WriteTraffic;
use super::stream::MOVED_STREAMS;
use super::stripe::StripeLocation;
use super::{checkpoint_io, options::Layout};

/// The counters.
#[derive(Debug, Default)]
pub struct Traffic {
    user: AtomicU64,
    fresh: AtomicU64,
    moved: AtomicU64,
    pages: AtomicU64,
    checkpoints: AtomicU64,
    padding: AtomicU64,
    parity: AtomicU64,
}

impl Traffic {
    /// A host's write was carried out.
    pub fn user(&self, plain_bytes: u64) {
        self.user.fetch_add(plain_bytes, Ordering::Relaxed);
    }

    /// A stripe of a stream is durable.
    pub fn stripe(&self, layout: &Layout, stream: u32, location: &StripeLocation, payload_bytes: usize) {
        let purpose = match stream {
            checkpoint_io::STREAM => &self.checkpoints,
            page_writer::STREAM => &self.pages,
            MOVED_STREAMS.. => &self.moved,
            _ => &self.fresh,
        };
        let (payload, shard) = (payload_bytes as u64, location.shard_bytes() as u64);
        purpose.fetch_add(payload, Ordering::Relaxed);
        let padding = (shard * u64::from(location.data_shards)).saturating_sub(payload);
        self.padding.fetch_add(padding, Ordering::Relaxed);
        self.parity.fetch_add(shard * u64::from(layout.parity_shards), Ordering::Relaxed);
    }

    /// All of them at a moment.
    pub fn value(&self) -> WriteTraffic {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        WriteTraffic {
            user_bytes: of(&self.user),
            fresh_bytes: of(&self.fresh),
            moved_bytes: of(&self.moved),
            page_bytes: of(&self.pages),
            checkpoint_bytes: of(&self.checkpoints),
            padding_bytes: of(&self.padding),
            parity_bytes: of(&self.parity),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Payload, padding and parity of a stripe are what the members get for it, and go where its stream says.
    #[test]
    fn a_stripe_is_counted_to_its_last_byte() {
        let (traffic, layout) = (Traffic::default(), Layout::default());
        let location = StripeLocation { segment: 0, start_block: 0, shard_blocks: 3, data_shards: 2, rotation: 0 };
        traffic.user(20_000);
        for stream in [0, 7, MOVED_STREAMS, MOVED_STREAMS + 7, page_writer::STREAM, checkpoint_io::STREAM] {
            traffic.stripe(&layout, stream, &location, 20_000);
        }
        let value = traffic.value();
        assert_eq!((value.user_bytes, value.fresh_bytes, value.moved_bytes), (20_000, 40_000, 40_000));
        assert_eq!((value.page_bytes, value.checkpoint_bytes), (20_000, 20_000));
        assert_eq!(value.padding_bytes, 6 * (2 * 3 * 4096 - 20_000));
        assert_eq!(value.parity_bytes, 6 * 2 * 3 * 4096);
        assert_eq!(value.written_bytes(), 6 * 4 * 3 * 4096, "4 shards of 3 blocks");
        assert_eq!(value.amplification(), Some(6.0 * 4.0 * 3.0 * 4096.0 / 20_000.0));
        assert_eq!(value.log_amplification(), Some((120_000 + value.padding_bytes) as f64 / 40_000.0));
        assert_eq!(
            (WriteTraffic::default().amplification(), WriteTraffic::default().log_amplification()),
            (None, None)
        );
    }
}
