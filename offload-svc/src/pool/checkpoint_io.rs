//! Writing a checkpoint's stream to members, and reading one back.
//!
//! Owns the cut into stripes and segments. Must not know the sections' meaning. Invariant: the root is written last.

use nvmf_target::buffer::IoBuf;

use super::checkpoint::{DecodeError, Part, Root, Section, next_section};
use super::members::Failure;
use super::page::Shape;
use super::segments::{Purpose, SegmentUse, Segments};
use super::stripe::{History, Sequence, StripeLocation};
use super::stripe_io::{Label, StripeIo, WriteError};
use super::superblock::CheckpointPointer;
use crate::stages::crc::crc32c;
use crate::stages::keys::{SHIELD_BYTES, Shield};

/// Stream number of checkpoints in stripe headers.
pub const STREAM: u32 = u32::MAX;

/// Why a checkpoint was not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WriteFailed {
    #[error("no free segment")]
    NoSegment,
    #[error("more stripes than a root can list")]
    TooLarge,
    #[error("a map page could not be sealed")]
    Seal,
    #[error("a map page got no place")]
    PageLost,
    #[error(transparent)]
    Stripe(#[from] WriteError),
}

/// Why a checkpoint was not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadFailed {
    #[error("stripe {index} of the checkpoint (segment {segment}) is lost: {good} good shards of {needed} needed")]
    Lost { index: usize, segment: u32, good: usize, needed: usize },
    #[error("the root does not match the superblock")]
    RootCrc,
    #[error("checkpoint: {0}")]
    Decode(#[from] DecodeError),
}

/// A checkpoint being written.
pub struct CheckpointWriter<'a> {
    stripes: &'a StripeIo,
    segments: &'a Segments,
    gathered: Vec<u8>,
    root: Root,
    current: Option<(SegmentUse, u32)>,
    /// What covers the wrapped keys in it.
    pub shield: Shield,
    /// Segments taken for it.
    pub used: Vec<SegmentUse>,
}

impl<'a> CheckpointWriter<'a> {
    pub fn new(stripes: &'a StripeIo, segments: &'a Segments) -> Self {
        let mut shield = [0; SHIELD_BYTES];
        stripes.io.env.random(&mut shield);
        let shield = Shield::new(shield);
        Self { stripes, segments, gathered: Vec::new(), root: Root::default(), current: None, shield, used: Vec::new() }
    }

    /// The stripes written up to now that may hold volumes and their wrapped keys.
    pub fn volume_parts(&self) -> &[Part] {
        if self.root.volume_parts == 0 { &self.root.parts } else { self.root.volume_parts() }
    }

    /// Appends sections.
    pub async fn put(&mut self, sections: &[u8]) -> Result<(), WriteFailed> {
        self.gathered.extend_from_slice(sections);
        let most = StripeLocation::payload_bytes_max(&self.stripes.set().layout);
        while self.gathered.len() >= most {
            let rest = self.gathered.split_off(most);
            let payload = std::mem::replace(&mut self.gathered, rest);
            self.write_part(&payload).await?;
        }
        Ok(())
    }

    /// The volumes are out: what follows begins a stripe of its own.
    pub async fn end_volumes(&mut self) -> Result<(), WriteFailed> {
        self.flush().await?;
        self.root.volume_parts = self.root.parts.len() as u32;
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), WriteFailed> {
        if !self.gathered.is_empty() {
            let payload = std::mem::take(&mut self.gathered);
            self.write_part(&payload).await?;
        }
        Ok(())
    }

    async fn write_part(&mut self, payload: &[u8]) -> Result<(), WriteFailed> {
        let part = self.write_stripe(payload).await?;
        self.root.parts.push(part);
        Ok(())
    }

    async fn write_stripe(&mut self, payload: &[u8]) -> Result<Part, WriteFailed> {
        let layout = self.stripes.set().layout;
        let (shard_blocks, data_shards) = StripeLocation::cut(&layout, payload.len()).ok_or(WriteFailed::TooLarge)?;
        let blocks = layout.segment_bytes / super::options::BLOCK_BYTES as u32;
        let (used, start_block) = match self.current {
            Some((used, next)) if next + u32::from(shard_blocks) <= blocks => (used, next),
            _ => (self.next_segment()?, 0),
        };
        self.current = Some((used, start_block + u32::from(shard_blocks)));
        let turn = used.sequence.number + u64::from(start_block);
        let rotation = self.stripes.rotation(turn, data_shards);
        let location = StripeLocation { segment: used.index, start_block, shard_blocks, data_shards, rotation };
        let number = self.root.parts.len() as u64;
        let label = Label { sequence: used.sequence, stream: STREAM, number, history: History::default() };
        self.stripes.write(location, label, payload).await?;
        Ok(Part { location, sequence: used.sequence })
    }

    fn next_segment(&mut self) -> Result<SegmentUse, WriteFailed> {
        let mut nonce = [0; 8];
        self.stripes.io.env.random(&mut nonce);
        let used = self.segments.allocate(Purpose::Checkpoint, u64::from_le_bytes(nonce));
        let used = used.ok_or(WriteFailed::NoSegment)?;
        self.used.push(used);
        Ok(used)
    }

    /// Writes what is left, then the root; gives the pointer for the superblock and the root itself.
    pub async fn finish(&mut self) -> Result<(CheckpointPointer, Root), WriteFailed> {
        self.flush().await?;
        let payload = self.root.encode();
        let root = self.write_stripe(&payload).await?;
        let pointer = CheckpointPointer {
            root: root.location,
            sequence: root.sequence,
            payload_bytes: payload.len() as u32,
            payload_crc: crc32c(&payload),
            shield: self.shield.clone(),
        };
        Ok((pointer, std::mem::take(&mut self.root)))
    }
}

/// Reads a checkpoint, handing each section to `take`; gives the root.
pub async fn read(
    stripes: &StripeIo,
    pointer: &CheckpointPointer,
    mut take: impl FnMut(Section) -> Result<(), DecodeError>,
) -> Result<Root, ReadFailed> {
    let payload = read_part(stripes, 0, pointer.root, pointer.sequence).await?;
    if payload.len() != pointer.payload_bytes as usize || crc32c(&payload) != pointer.payload_crc {
        return Err(ReadFailed::RootCrc);
    }
    let root = Root::decode(&payload)?;
    let shape = Shape { layout: stripes.set().layout, segments: stripes.set().segment_count };
    let mut gathered: Vec<u8> = Vec::new();
    let mut ended = false;
    for (index, part) in root.parts.iter().enumerate() {
        let set = stripes.set();
        if !part.location.fits(&set.layout, set.segment_count, 1) {
            return Err(DecodeError::Field("root part").into());
        }
        gathered.extend(read_part(stripes, index + 1, part.location, part.sequence).await?);
        let mut at = 0;
        while let Some((section, len)) = next_section(&gathered[at..], &shape, &pointer.shield)? {
            at += len;
            ended = matches!(section, Section::End);
            take(section)?;
        }
        gathered.drain(..at);
    }
    if ended && gathered.is_empty() { Ok(root) } else { Err(DecodeError::NoEnd.into()) }
}

async fn read_part(
    stripes: &StripeIo,
    index: usize,
    location: StripeLocation,
    sequence: Sequence,
) -> Result<Vec<u8>, ReadFailed> {
    let stripe = stripes.read(location, sequence).await.map_err(|lost| ReadFailed::Lost {
        index,
        segment: location.segment,
        good: lost.good,
        needed: lost.needed,
    })?;
    Ok(stripe.payload)
}

/// Overwrites stripes with volumes that no longer count, so that no wrapped key of a deleted volume, or that a volume has
/// given up, stays behind on the members of the set and those that are coming back.
pub async fn erase(stripes: &StripeIo, parts: &[Part]) {
    let set = stripes.set();
    for part in parts {
        let (offset, len) = (stripes.offset(&part.location), part.location.shard_bytes());
        for index in 0..2 * set.count() {
            let (place, incarnation) = (index % set.count(), set.entry(index).incarnation());
            let mut buf = IoBuf::heap(len);
            buf.fill(0);
            // A late write of zeroes could hit the segment's next use, so a member that doesn't answer leaves the set. One
            // that has left keeps its copy.
            if stripes.io.write_durably(index, offset, buf).await != Err(Failure::Timeout) {
                continue;
            }
            if index == place {
                stripes.put_out_later(1 << place).await;
            } else {
                // If it can't be done the pool has failed.
                let _ = stripes.io.exclude_all(vec![(place, incarnation)]).await;
            }
        }
    }
}
