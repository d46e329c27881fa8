//! Pages of the map: what each of them holds, and its bytes.
//!
//! Owns the layout of leaves and nodes and where in the tree each block belongs. Must not know how pages are read or
//! written. Invariant: [`Page::decode`] gives only what [`Page::encode`] could have made for the same page: everything in it
//! lies in the page's own range, in order.

use std::ops::Range;

use super::codec::{CutShort, Reader, Writer};
use super::map::{Extent, RecordLocation, Run, What};
use super::options::{Layout, SHARDS_PER_VOLUME};
use super::shared::Volume;
use super::stripe::StripeLocation;

/// Blocks of a leaf's range: a divisor of a shard's run, whatever the block size, and a multiple of a full record.
pub const LEAF_BLOCKS: u64 = 256;
/// Children of a node.
const FANOUT_BITS: u32 = 8;
/// Children of a node.
pub const FANOUT: usize = 1 << FANOUT_BITS;
/// Levels above the leaves: enough for the largest volume.
pub const HEIGHT_MAX: u8 = 5;
/// Pages are sealed in blocks of 512 bytes.
pub const PAGE_BLOCK_SHIFT: u8 = 9;
const PAGE_BLOCK_BYTES: usize = 1 << PAGE_BLOCK_SHIFT;
/// A page before it is sealed, at most: a node with all children, and an older page beside it. Leaves are shorter.
pub const PAGE_BYTES_MAX: usize =
    (HEAD_BYTES + POINTER_BYTES + FANOUT * (8 + POINTER_BYTES)).next_multiple_of(PAGE_BLOCK_BYTES);
const HEAD_BYTES: usize = 8;
const RUN_BYTES: usize = 40;
const POINTER_BYTES: usize = 40;
const VERSION: u8 = 1;
const FLAG_BASE: u8 = 1;
const FLAG_ORPHAN: u8 = 2;

/// Which page of a shard's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId {
    /// 0: a leaf.
    pub level: u8,
    /// Among those of its level.
    pub index: u64,
}

impl PageId {
    pub fn leaf(index: u64) -> Self {
        Self { level: 0, index }
    }

    /// The page above it that is at `level`, itself included.
    pub fn at_level(self, level: u8) -> Self {
        Self { level, index: self.index >> (FANOUT_BITS * u32::from(level.saturating_sub(self.level))) }
    }

    /// Its place in the node above it.
    pub fn slot(self) -> u8 {
        (self.index % FANOUT as u64) as u8
    }

    /// The index of the first page of `level` beneath it.
    pub fn first_at(self, level: u8) -> u64 {
        self.index << (FANOUT_BITS * u32::from(self.level.saturating_sub(level)))
    }

    /// What stands for the LBA in the birth of its record: no two pages of a volume have the same.
    pub fn address(self, shard: u16) -> u64 {
        u64::from(self.level) << 51 | u64::from(shard) << 46 | self.index
    }

    /// The page of an address, and its shard.
    pub fn of_address(address: u64) -> (u16, Self) {
        let shard = (address >> 46) & u64::from(SHARDS_PER_VOLUME * 2 - 1);
        (shard as u16, Self { level: (address >> 51) as u8, index: address & ((1 << 46) - 1) })
    }
}

/// How the blocks of a shard are dealt to leaves.
#[derive(Debug, Clone, Copy)]
pub struct Leaves {
    run_blocks: u64,
    shard: u64,
}

impl Leaves {
    pub fn of(volume: &Volume, shard: u16) -> Self {
        Self { run_blocks: volume.run_blocks(), shard: shard.into() }
    }

    fn per_run(self) -> u64 {
        self.run_blocks / LEAF_BLOCKS
    }

    /// The first leaf of the shard that ends after `lba`: the one that holds it, where the shard does.
    pub fn at(self, lba: u64) -> u64 {
        let (run, shards) = (lba / self.run_blocks, u64::from(SHARDS_PER_VOLUME));
        let round = run / shards * self.per_run();
        match (run % shards).cmp(&self.shard) {
            std::cmp::Ordering::Less => round,
            std::cmp::Ordering::Equal => round + lba % self.run_blocks / LEAF_BLOCKS,
            std::cmp::Ordering::Greater => round + self.per_run(),
        }
    }

    /// A leaf's blocks.
    pub fn range(self, leaf: u64) -> Range<u64> {
        let run = leaf / self.per_run() * u64::from(SHARDS_PER_VOLUME) + self.shard;
        let first = run * self.run_blocks + leaf % self.per_run() * LEAF_BLOCKS;
        first..first + LEAF_BLOCKS
    }

    /// The leaves that have blocks in a range.
    pub fn within(self, range: &Range<u64>) -> Range<u64> {
        if range.start >= range.end {
            return 0..0;
        }
        let (first, last) = (self.at(range.start), self.at(range.end - 1));
        let upto = if self.range(last).start < range.end { last + 1 } else { last };
        first..upto
    }
}

/// Where a page rests, and its birth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagePointer {
    pub location: RecordLocation,
    /// Random: no two pages have the same.
    pub generation: u64,
    pub key_epoch: u32,
    /// Its length before it was sealed, in blocks of 512 bytes.
    pub blocks: u16,
}

impl PagePointer {
    pub fn write(&self, out: &mut Writer) {
        out.u64(self.generation).u32(self.key_epoch).u16(self.blocks).u16(0);
        write_location(&self.location, out);
        out.u32(0);
    }

    pub fn read(input: &mut Reader<'_>, shape: &Shape) -> Result<Self, PageError> {
        let (generation, key_epoch, blocks) = (input.u64()?, input.u32()?, input.u16()?);
        input.u16()?;
        let location = read_location(input, shape)?;
        input.u32()?;
        if blocks == 0 || usize::from(blocks) > PAGE_BYTES_MAX / PAGE_BLOCK_BYTES {
            return Err(PageError::Field("length"));
        }
        Ok(Self { location, generation, key_epoch, blocks })
    }
}

/// What locations are checked against.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub layout: Layout,
    pub segments: u32,
}

fn write_location(location: &RecordLocation, out: &mut Writer) {
    let stripe = &location.stripe;
    out.u32(location.stored_bytes).u32(location.payload_offset).u32(stripe.segment).u32(stripe.start_block);
    out.u16(stripe.shard_blocks).u8(stripe.data_shards).u8(stripe.rotation);
}

fn read_location(input: &mut Reader<'_>, shape: &Shape) -> Result<RecordLocation, PageError> {
    let (stored_bytes, payload_offset) = (input.u32()?, input.u32()?);
    let (segment, start_block) = (input.u32()?, input.u32()?);
    let (shard_blocks, data_shards, rotation) = (input.u16()?, input.u8()?, input.u8()?);
    let stripe = StripeLocation { segment, start_block, shard_blocks, data_shards, rotation };
    let end = payload_offset.checked_add(stored_bytes).ok_or(PageError::Field("location"))?;
    if !stripe.fits(&shape.layout, shape.segments, end) {
        return Err(PageError::Field("location"));
    }
    Ok(RecordLocation { stripe, payload_offset, stored_bytes })
}

/// Why bytes are not the page that should be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    #[error("map page cut short")]
    Short(#[from] CutShort),
    #[error("map page version {0} is unknown")]
    Version(u8),
    #[error("map page: field {0} is out of range")]
    Field(&'static str),
}

/// A page. What it doesn't list, its `base` decides: an older page in its place that could not be read when this one was
/// made. An orphan was made while a page above it could not be read: what it doesn't list, the base of that one leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    pub base: Option<PagePointer>,
    pub orphan: bool,
    pub body: Body,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// In order, without overlap. Holes stand only where a base, an ancestor's, or another map beneath could say otherwise.
    Leaf(Vec<Run>),
    /// By slot. `None` as a hole.
    Node(Vec<(u8, Option<PagePointer>)>),
}

impl Page {
    /// What it doesn't list is not there.
    pub fn is_whole(&self) -> bool {
        self.base.is_none() && !self.orphan
    }

    /// Its heap, about.
    pub fn heap_bytes(&self) -> usize {
        let body = match &self.body {
            Body::Leaf(runs) => runs.capacity() * size_of::<Run>(),
            Body::Node(children) => children.capacity() * size_of::<(u8, Option<PagePointer>)>(),
        };
        body + size_of::<Self>()
    }

    /// Its bytes, in whole blocks. Little-endian, version 1:
    ///
    /// | bytes | field | why |
    /// |---|---|---|
    /// | 0 | version, 1 | |
    /// | 1 | level, 0 a leaf | |
    /// | 2 | flags: 1 has a base, 2 orphan | what could not be read when it was made is not forgotten |
    /// | 3 | 0 | |
    /// | 4..6 | entries | |
    /// | 6..8 | 0 | |
    /// | 8..48 | base, if it has one: generation 8, key epoch 4, blocks 2, 0 x 2, location 20, 0 x 4 | |
    /// | then | leaf: first block 1, kind 1 (0 hole, 1 record), blocks 2, record offset 2, record blocks 2, generation 8, key epoch 4, location 20 | the birth of the record stands here, so that another one in its place is found |
    /// | | node: slot 1, kind 1 (0 hole, 1 page), 0 x 6, pointer 40 | |
    ///
    /// A location is: stored bytes 4, payload offset 4, segment 4, first block 4, shard blocks 2, data shards 1, rotation 1.
    pub fn encode(&self, level: u8, range: &Range<u64>) -> Vec<u8> {
        let mut out = Writer::default();
        let flags = if self.base.is_some() { FLAG_BASE } else { 0 } | if self.orphan { FLAG_ORPHAN } else { 0 };
        let entries = match &self.body {
            Body::Leaf(runs) => runs.len(),
            Body::Node(children) => children.len(),
        };
        out.u8(VERSION).u8(level).u8(flags).u8(0).u16(entries as u16).u16(0);
        if let Some(base) = &self.base {
            base.write(&mut out);
        }
        match &self.body {
            Body::Leaf(runs) => runs.iter().for_each(|run| write_run(run, range.start, &mut out)),
            Body::Node(children) => {
                for (slot, child) in children {
                    out.u8(*slot).u8(child.is_some().into()).bytes(&[0; 6]);
                    match child {
                        Some(pointer) => pointer.write(&mut out),
                        None => drop(out.bytes(&[0; POINTER_BYTES])),
                    }
                }
            }
        }
        let whole = out.0.len().next_multiple_of(PAGE_BLOCK_BYTES);
        out.pad_to(whole);
        out.0
    }

    /// The page of `level` that covers `range` (of a leaf: its blocks).
    pub fn decode(bytes: &[u8], level: u8, range: &Range<u64>, shape: &Shape) -> Result<Self, PageError> {
        let mut input = Reader::new(bytes);
        let version = input.u8()?;
        if version != VERSION {
            return Err(PageError::Version(version));
        }
        let (own_level, flags) = (input.u8()?, input.u8()?);
        input.u8()?;
        let entries = input.u16()?;
        input.u16()?;
        if own_level != level || flags & !(FLAG_BASE | FLAG_ORPHAN) != 0 {
            return Err(PageError::Field("level"));
        }
        let base = if flags & FLAG_BASE != 0 { Some(PagePointer::read(&mut input, shape)?) } else { None };
        let body = if level == 0 {
            Body::Leaf(read_runs(&mut input, entries, range, shape)?)
        } else {
            Body::Node(read_children(&mut input, entries, shape)?)
        };
        Ok(Self { base, orphan: flags & FLAG_ORPHAN != 0, body })
    }
}

fn write_run(run: &Run, first: u64, out: &mut Writer) {
    let head = |out: &mut Writer, kind: u8| {
        // Within the leaf's range.
        out.u8((run.lba - first) as u8).u8(kind).u16(run.count as u16);
    };
    match run.extent() {
        Some(extent) => {
            head(out, 1);
            out.u16(extent.record_offset).u16(extent.record_blocks).u64(extent.generation).u32(extent.key_epoch);
            write_location(&extent.location, out);
        }
        None => {
            head(out, 0);
            out.bytes(&[0; RUN_BYTES - 4]);
        }
    }
}

fn read_runs(input: &mut Reader<'_>, entries: u16, range: &Range<u64>, shape: &Shape) -> Result<Vec<Run>, PageError> {
    let mut runs = Vec::with_capacity(usize::from(entries).min(LEAF_BLOCKS as usize));
    let mut at = range.start;
    for _ in 0..entries {
        let (first, kind, count) = (input.u8()?, input.u8()?, input.u16()?);
        let lba = range.start + u64::from(first);
        if lba < at || count == 0 || lba + u64::from(count) > range.end {
            return Err(PageError::Field("blocks"));
        }
        at = lba + u64::from(count);
        let what = match kind {
            0 => {
                input.bytes(RUN_BYTES - 4)?;
                What::Hole
            }
            1 => What::Record(read_extent(input, count, shape)?),
            _ => return Err(PageError::Field("kind")),
        };
        runs.push(Run { lba, count: count.into(), what });
    }
    Ok(runs)
}

fn read_extent(input: &mut Reader<'_>, count: u16, shape: &Shape) -> Result<Extent, PageError> {
    let (record_offset, record_blocks) = (input.u16()?, input.u16()?);
    let (generation, key_epoch) = (input.u64()?, input.u32()?);
    let location = read_location(input, shape)?;
    if u32::from(record_offset) + u32::from(count) > u32::from(record_blocks) {
        return Err(PageError::Field("record"));
    }
    Ok(Extent { location, generation, key_epoch, record_offset, record_blocks, count })
}

fn read_children(
    input: &mut Reader<'_>,
    entries: u16,
    shape: &Shape,
) -> Result<Vec<(u8, Option<PagePointer>)>, PageError> {
    let mut children: Vec<(u8, Option<PagePointer>)> = Vec::with_capacity(usize::from(entries).min(FANOUT));
    for _ in 0..entries {
        let (slot, kind) = (input.u8()?, input.u8()?);
        input.bytes(6)?;
        if children.last().is_some_and(|(last, _)| *last >= slot) {
            return Err(PageError::Field("slot"));
        }
        let child = match kind {
            0 => {
                input.bytes(POINTER_BYTES)?;
                None
            }
            1 => Some(PagePointer::read(input, shape)?),
            _ => return Err(PageError::Field("kind")),
        };
        children.push((slot, child));
    }
    Ok(children)
}
