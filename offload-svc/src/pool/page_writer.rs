//! Writing pages of maps: sealed, gathered into stripes of their own, in segments of their own.
//!
//! Owns the open stripe and the open segment. Must not know trees. Invariants: a page has a place once its stripe is durable,
//! and not before; a mount reads no pages, so nothing here counts until a checkpoint leads to it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::checkpoint_io::WriteFailed;
use super::map::RecordLocation;
use super::options::BLOCK_BYTES;
use super::page::PagePointer;
use super::records::RecordIo;
use super::segments::{Purpose, SegmentUse};
use super::stripe::{History, StripeLocation};
use super::stripe_io::{Label, WriteError};

/// Stream number of pages in stripe headers.
pub const STREAM: u32 = u32::MAX - 1;

/// A page on its way.
pub struct NewPage {
    location: Rc<Cell<Option<RecordLocation>>>,
    pub generation: u64,
    pub key_epoch: u32,
    pub blocks: u16,
}

impl NewPage {
    /// The same page, for another to keep.
    pub fn share(&self) -> Self {
        Self { location: Rc::clone(&self.location), ..*self }
    }

    /// Where it is, once it is durable.
    pub fn pointer(&self) -> Option<PagePointer> {
        let Self { generation, key_epoch, blocks, .. } = *self;
        self.location.get().map(|location| PagePointer { location, generation, key_epoch, blocks })
    }
}

struct Waiting {
    location: Rc<Cell<Option<RecordLocation>>>,
    payload_offset: u32,
    stored_bytes: u32,
}

/// One reactor's writer.
#[derive(Default)]
pub struct PageWriter {
    payload: RefCell<Vec<u8>>,
    waiting: RefCell<Vec<Waiting>>,
    /// The open segment, and its next block.
    segment: Cell<Option<(SegmentUse, u32)>>,
    number: Cell<u64>,
}

impl PageWriter {
    /// Takes a sealed record.
    pub async fn put(
        &self,
        io: &RecordIo,
        record: &[u8],
        birth: &crate::stages::record::Birth,
    ) -> Result<NewPage, WriteFailed> {
        let most = StripeLocation::payload_bytes_max(&io.stripes.set().layout);
        if self.payload.borrow().len() + record.len() > most {
            self.flush(io).await?;
        }
        let mut payload = self.payload.borrow_mut();
        let (payload_offset, stored_bytes) = (payload.len() as u32, record.len() as u32);
        payload.extend_from_slice(record);
        let location = Rc::new(Cell::new(None));
        self.waiting.borrow_mut().push(Waiting { location: Rc::clone(&location), payload_offset, stored_bytes });
        Ok(NewPage {
            location,
            generation: birth.generation,
            key_epoch: birth.key_epoch.0,
            blocks: birth.block_count as u16,
        })
    }

    /// Writes what is gathered; then all of it has its place.
    pub async fn flush(&self, io: &RecordIo) -> Result<(), WriteFailed> {
        let (payload, waiting) = (self.payload.take(), self.waiting.take());
        if payload.is_empty() {
            return Ok(());
        }
        let stripe = self.write(io, &payload).await?;
        for Waiting { location, payload_offset, stored_bytes } in waiting {
            location.set(Some(RecordLocation { stripe, payload_offset, stored_bytes }));
        }
        Ok(())
    }

    async fn write(&self, io: &RecordIo, payload: &[u8]) -> Result<StripeLocation, WriteFailed> {
        let layout = io.stripes.set().layout;
        let (shard_blocks, data_shards) = StripeLocation::cut(&layout, payload.len()).ok_or(WriteFailed::TooLarge)?;
        let blocks = layout.segment_bytes / BLOCK_BYTES as u32;
        let (used, start_block) = match self.segment.get() {
            Some((used, next)) if next + u32::from(shard_blocks) <= blocks => (used, next),
            _ => {
                self.close(io);
                let used = io.segments.allocate(Purpose::Pages, io.random_u64()).ok_or(WriteFailed::NoSegment)?;
                (used, 0)
            }
        };
        self.segment.set(Some((used, start_block + u32::from(shard_blocks))));
        let rotation = io.stripes.rotation(used.sequence.number + u64::from(start_block), data_shards);
        let location = StripeLocation { segment: used.index, start_block, shard_blocks, data_shards, rotation };
        let number = self.number.replace(self.number.get() + 1);
        let label = Label { sequence: used.sequence, stream: STREAM, number, history: History::default() };
        let written = io.stripes.write(location, label, payload).await;
        if written == Err(WriteError::NoSpace) {
            // As much as is known of it is wrong.
            io.segments.set_backed(used.index, false);
            self.close(io);
        }
        Ok(written.map(|()| location)?)
    }

    /// Gives up what is gathered: the merge has failed.
    pub fn discard(&self) {
        self.payload.borrow_mut().clear();
        self.waiting.borrow_mut().clear();
    }

    /// Ends the open segment.
    pub fn close(&self, io: &RecordIo) {
        if let Some((used, _)) = self.segment.take() {
            io.segments.close(used);
        }
    }

    /// Ends it if its use is older than the sequence number `below`, as [`super::stream::Stream::retire`] does.
    pub fn retire(&self, io: &RecordIo, below: u64) {
        if self.segment.get().is_some_and(|(used, _)| used.sequence.number < below) {
            self.close(io);
        }
    }
}
