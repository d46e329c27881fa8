//! The checkpoint's contents: a stream of sections, cut into stripes, and a root that lists the stripes.
//!
//! Owns the encoding, both ways. Must not know when a checkpoint is taken. Invariant: a loaded checkpoint is whole: the
//! root's checksum stands in the superblock, each stripe matches its shard checksums, each section its own, and the last
//! section is the end.
//!
//! A section is: tag (1 byte), length of the body (4), CRC32C of the body (4), body. The stream begins with the volumes, in
//! stripes of their own, so that wrapped keys of deleted volumes can be overwritten. These are covered besides, by a shield that
//! stands in the superblocks only: overwriting that is what destroys them for certain.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use tokio::sync::Notify;
use uuid::Uuid;

use super::codec::{CutShort, Reader, Writer};
use super::family::{Family, Role};
use super::layers::Tree;
use super::map::{Extent, RecordLocation};
use super::message::MergedShard;
use super::page::{HEIGHT_MAX, PageError, PagePointer, Shape};
use super::receipts::{Entry, EntryError};
use super::segments::{SegmentUse, Window};
use super::shared::{Usage, UsageDelta, Volume, VolumeKeys};
use super::stripe::{Sequence, StripeLocation};
use crate::stages::cipher::Cipher;
use crate::stages::compress::Compression;
use crate::stages::crc::crc32c;
use crate::stages::keys::{KeyEpoch, LineageId, Shield, WRAPPED_KEY_BYTES, WrappedKey};

const TAG_VOLUME: u8 = b'V';
const TAG_OLDER_KEY: u8 = b'K';
const TAG_FAMILY: u8 = b'F';
const TAG_SHARD: u8 = b'S';
const TAG_EXTENTS: u8 = b'E';
const TAG_WINDOW: u8 = b'W';
const TAG_DATA_SEGMENTS: u8 = b'D';
const TAG_LIVE_SEGMENTS: u8 = b'L';
const TAG_TREE: u8 = b'T';
const TAG_USAGE: u8 = b'U';
const TAG_STREAM: u8 = b'H';
const TAG_COUNTERS: u8 = b'C';
const TAG_RECEIPTS: u8 = b'R';
const TAG_END: u8 = b'Z';
const SECTION_HEAD_BYTES: usize = 9;
/// Longer sections are never written.
const SECTION_BYTES_MAX: usize = 1 << 22;
/// Segments listed in one section, so that a pool of any size stays below that.
const SECTION_USES: usize = 1 << 16;
const ROOT_MAGIC: [u8; 4] = *b"CKPT";
/// Version 1 held the maps themselves, in sections `S` and `E`, and segments without what is alive in them, in `D`. Those are
/// read, and not written any more. Version 2 held wrapped keys that are not covered, and no receipts.
const ROOT_VERSION: u32 = 3;

/// Why a checkpoint can't be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("cut short")]
    Short(#[from] CutShort),
    #[error(transparent)]
    Page(#[from] PageError),
    #[error(transparent)]
    Entry(#[from] EntryError),
    #[error("section {tag:#x}: checksum is wrong")]
    SectionCrc { tag: u8 },
    #[error("section {tag:#x} is unknown")]
    UnknownSection { tag: u8 },
    #[error("field {0} is out of range")]
    Field(&'static str),
    #[error("the end is missing")]
    NoEnd,
}

/// One stripe of the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub location: StripeLocation,
    pub sequence: Sequence,
}

/// The root: where the stream's stripes are, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Root {
    pub parts: Vec<Part>,
    /// The first so many hold the volumes.
    pub volume_parts: u32,
}

impl Root {
    /// The stripes with the volumes and their wrapped keys.
    pub fn volume_parts(&self) -> &[Part] {
        self.parts.get(..self.volume_parts as usize).unwrap_or_default()
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.bytes(&ROOT_MAGIC).u32(ROOT_VERSION).u32(self.parts.len() as u32).u32(self.volume_parts);
        for part in &self.parts {
            part.location.write(&mut out);
            out.u64(part.sequence.number).u64(part.sequence.nonce);
        }
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut input = Reader::new(bytes);
        if input.array::<4>()? != ROOT_MAGIC || !(1..=ROOT_VERSION).contains(&input.u32()?) {
            return Err(DecodeError::Field("root"));
        }
        let (count, volume_parts) = (input.u32()?, input.u32()?);
        let mut parts = Vec::new();
        for _ in 0..count {
            let location = StripeLocation::read(&mut input)?;
            let sequence = Sequence { number: input.u64()?, nonce: input.u64()? };
            parts.push(Part { location, sequence });
        }
        Ok(Self { parts, volume_parts })
    }
}

/// A decoded section.
pub enum Section {
    Volume(Box<Volume>),
    /// A key that some of the volume's records are still sealed under.
    OlderKey {
        volume: u32,
        wrapped: WrappedKey,
    },
    /// The volume is a snapshot, or lies upon one.
    Family {
        volume: u32,
        snapshot: bool,
        hidden: bool,
        parent: Option<u32>,
    },
    /// All generations of the shard up to the watermark are in its extents.
    Shard {
        volume: u32,
        shard: u16,
        watermark: u64,
    },
    Extents {
        volume: u32,
        shard: u16,
        extents: Vec<(u64, Extent)>,
    },
    /// The shard's map up to the watermark.
    Tree {
        volume: u32,
        shard: u16,
        watermark: u64,
        tree: Tree,
    },
    /// What the trees of a volume lead to.
    Usage {
        volume: u32,
        usage: UsageDelta,
    },
    Window(Vec<SegmentUse>),
    DataSegments(Vec<SegmentUse>),
    /// Segments that hold data, with the bytes that trees lead to.
    LiveSegments(Vec<(SegmentUse, u64)>),
    /// The first `settled` stripes of a stream of this mount need no replay.
    Stream {
        stream: u32,
        settled: u64,
    },
    Counters {
        next_volume: u32,
        next_sequence: u64,
    },
    /// What is kept of deletions.
    Receipts(Box<Entry>),
    End,
}

/// Builds sections.
#[derive(Default)]
pub struct SectionWriter(pub Vec<u8>);

impl SectionWriter {
    fn section(&mut self, tag: u8, body: &Writer) {
        let body = &body.0;
        let mut head = Writer::default();
        head.u8(tag).u32(body.len() as u32).u32(crc32c(body));
        self.0.extend_from_slice(&head.0);
        self.0.extend_from_slice(body);
    }

    /// A volume, with the size to be recorded; its wrapped keys are covered.
    pub fn volume(&mut self, volume: &Volume, blocks: u64, shield: &Shield) {
        let mut out = Writer::default();
        let (compression, level) = match volume.compression {
            Compression::None => (0, 0),
            Compression::Lz4 => (1, 0),
            Compression::Zstd { level } => (2, level),
            Compression::Auto => (3, 0),
        };
        out.u32(volume.id).bytes(volume.uuid.as_bytes()).u8(volume.block_shift).u64(blocks);
        let mut keys = volume.keys.wrapped();
        // One at least, always.
        let Some(newest) = keys.pop() else { return };
        out.u8(compression).u8(level).u8(volume.cipher.id()).u128(volume.lineage.0).u32(newest.epoch().0);
        out.bytes(&shield.cover(&newest)).u8(volume.name.len() as u8).bytes(volume.name.as_bytes());
        self.section(TAG_VOLUME, &out);
        for older in keys {
            let mut out = Writer::default();
            out.u32(volume.id).bytes(&shield.cover(&older));
            self.section(TAG_OLDER_KEY, &out);
        }
        let parent = volume.parent();
        if volume.is_snapshot() || parent.is_some() {
            let mut out = Writer::default();
            out.u32(volume.id).u8(volume.is_snapshot().into()).u8(volume.is_hidden().into());
            // No volume has the id 0.
            out.u32(parent.map_or(0, |parent| parent.id));
            self.section(TAG_FAMILY, &out);
        }
    }

    pub fn tree(&mut self, shard: &MergedShard) {
        let mut out = Writer::default();
        let tree = &shard.tree;
        out.u32(shard.volume).u16(shard.shard).u64(shard.watermark).u8(tree.height).u8(tree.root.is_some().into());
        if let Some(root) = &tree.root {
            root.write(&mut out);
        }
        self.section(TAG_TREE, &out);
    }

    pub fn usage(&mut self, volume: &Volume) {
        let usage = volume.in_trees.value();
        let mut out = Writer::default();
        out.u32(volume.id);
        for value in [usage.extents, usage.blocks, usage.stored_bytes, usage.map_bytes].iter().chain(&usage.by_epoch) {
            // None is negative, once all is merged.
            out.u64((*value).max(0) as u64);
        }
        self.section(TAG_USAGE, &out);
    }

    pub fn window(&mut self, window: &Window) {
        for uses in window.uses.chunks(SECTION_USES) {
            let mut out = Writer::default();
            out.u32(uses.len() as u32);
            uses.iter().for_each(|used| write_use(used, &mut out));
            self.section(TAG_WINDOW, &out);
        }
        for uses in window.data.chunks(SECTION_USES) {
            let mut out = Writer::default();
            out.u32(uses.len() as u32);
            for (used, live) in uses {
                write_use(used, &mut out);
                out.u64(*live);
            }
            self.section(TAG_LIVE_SEGMENTS, &out);
        }
    }

    pub fn stream(&mut self, stream: u32, settled: u64) {
        let mut out = Writer::default();
        out.u32(stream).u64(settled);
        self.section(TAG_STREAM, &out);
    }

    pub fn counters(&mut self, next_volume: u32, next_sequence: u64) {
        let mut out = Writer::default();
        out.u32(next_volume).u64(next_sequence);
        self.section(TAG_COUNTERS, &out);
    }

    pub fn receipts(&mut self, entries: &[Entry]) {
        for entry in entries {
            let mut out = Writer::default();
            entry.write(&mut out);
            self.section(TAG_RECEIPTS, &out);
        }
    }

    pub fn end(&mut self) {
        self.section(TAG_END, &Writer::default());
    }
}

/// Takes the next whole section off the front of `bytes`; `None` if it isn't all there yet.
pub fn next_section(bytes: &[u8], shape: &Shape, shield: &Shield) -> Result<Option<(Section, usize)>, DecodeError> {
    let mut input = Reader::new(bytes);
    if bytes.len() < SECTION_HEAD_BYTES {
        return Ok(None);
    }
    let (tag, len, crc) = (input.u8()?, input.u32()? as usize, input.u32()?);
    if len > SECTION_BYTES_MAX {
        return Err(DecodeError::Field("section length"));
    }
    let Ok(body) = input.bytes(len) else { return Ok(None) };
    if crc32c(body) != crc {
        return Err(DecodeError::SectionCrc { tag });
    }
    let mut body = Reader::new(body);
    let section = match tag {
        TAG_VOLUME => Section::Volume(Box::new(read_volume(&mut body, shield)?)),
        TAG_OLDER_KEY => Section::OlderKey { volume: body.u32()?, wrapped: read_key(&mut body, shield)? },
        TAG_FAMILY => read_family(&mut body)?,
        TAG_SHARD => Section::Shard { volume: body.u32()?, shard: body.u16()?, watermark: body.u64()? },
        TAG_EXTENTS => read_extents(&mut body)?,
        TAG_TREE => read_tree(&mut body, shape)?,
        TAG_USAGE => Section::Usage { volume: body.u32()?, usage: read_usage(&mut body)? },
        TAG_LIVE_SEGMENTS => Section::LiveSegments(read_live(&mut body)?),
        TAG_WINDOW => Section::Window(read_uses(&mut body)?),
        TAG_DATA_SEGMENTS => Section::DataSegments(read_uses(&mut body)?),
        TAG_STREAM => Section::Stream { stream: body.u32()?, settled: body.u64()? },
        TAG_COUNTERS => Section::Counters { next_volume: body.u32()?, next_sequence: body.u64()? },
        TAG_RECEIPTS => Section::Receipts(Box::new(Entry::read(&mut body)?)),
        TAG_END => Section::End,
        _ => return Err(DecodeError::UnknownSection { tag }),
    };
    Ok(Some((section, SECTION_HEAD_BYTES + len)))
}

fn read_volume(body: &mut Reader<'_>, shield: &Shield) -> Result<Volume, DecodeError> {
    let (id, uuid) = (body.u32()?, Uuid::from_bytes(body.array()?));
    let (block_shift, block_count) = (body.u8()?, body.u64()?);
    let (compression, level, cipher) = (body.u8()?, body.u8()?, body.u8()?);
    let (lineage, key_epoch) = (LineageId(body.u128()?), KeyEpoch(body.u32()?));
    let wrapped = read_key(body, shield)?;
    if (wrapped.lineage(), wrapped.epoch()) != (lineage, key_epoch) {
        return Err(DecodeError::Field("wrapped key"));
    }
    let name_len = body.u8()?.into();
    let name = String::from_utf8(body.bytes(name_len)?.to_vec()).map_err(|_| DecodeError::Field("volume name"))?;
    let compression = match compression {
        0 => Compression::None,
        1 => Compression::Lz4,
        2 => Compression::Zstd { level },
        3 => Compression::Auto,
        _ => return Err(DecodeError::Field("compression")),
    };
    if !matches!(block_shift, 9 | 12) || block_count == 0 || block_count > u64::MAX >> (block_shift + 8) {
        return Err(DecodeError::Field("volume size"));
    }
    Ok(Volume {
        id,
        uuid,
        name,
        block_shift,
        block_count: AtomicU64::new(block_count),
        compression,
        cipher: Cipher::from_id(cipher).ok_or(DecodeError::Field("cipher"))?,
        lineage,
        keys: Arc::new(VolumeKeys::new(wrapped)),
        family: Family::new(Role::Writable, None),
        closing: AtomicBool::new(false),
        in_trees: Usage::default(),
        in_layers: Usage::default(),
        in_flight: AtomicU64::new(0),
        idle: Notify::new(),
    })
}

fn read_family(body: &mut Reader<'_>) -> Result<Section, DecodeError> {
    let volume = body.u32()?;
    let (snapshot, hidden, parent) = (body.u8()?, body.u8()?, body.u32()?);
    if snapshot > 1 || hidden > snapshot {
        return Err(DecodeError::Field("family"));
    }
    let parent = (parent != 0).then_some(parent);
    Ok(Section::Family { volume, snapshot: snapshot == 1, hidden: hidden == 1, parent })
}

fn read_key(body: &mut Reader<'_>, shield: &Shield) -> Result<WrappedKey, DecodeError> {
    shield.uncover(&body.array::<WRAPPED_KEY_BYTES>()?).map_err(|_| DecodeError::Field("wrapped key"))
}

fn read_extents(body: &mut Reader<'_>) -> Result<Section, DecodeError> {
    let (volume, shard, count) = (body.u32()?, body.u16()?, body.u32()?);
    let mut extents = Vec::new();
    for _ in 0..count {
        let (lba, count, record_offset, record_blocks) = (body.u64()?, body.u16()?, body.u16()?, body.u16()?);
        body.u16()?;
        let (generation, key_epoch, stored_bytes, payload_offset) =
            (body.u64()?, body.u32()?, body.u32()?, body.u32()?);
        let stripe = StripeLocation::read(body)?;
        let within = u32::from(record_offset) + u32::from(count) <= u32::from(record_blocks);
        if count == 0 || !within || lba > u64::MAX / 2 {
            return Err(DecodeError::Field("extent"));
        }
        let location = RecordLocation { stripe, payload_offset, stored_bytes };
        extents.push((lba, Extent { location, generation, key_epoch, record_offset, record_blocks, count }));
    }
    Ok(Section::Extents { volume, shard, extents })
}

fn read_tree(body: &mut Reader<'_>, shape: &Shape) -> Result<Section, DecodeError> {
    let (volume, shard, watermark) = (body.u32()?, body.u16()?, body.u64()?);
    let (height, has_root) = (body.u8()?, body.u8()?);
    if height > HEIGHT_MAX {
        return Err(DecodeError::Field("height"));
    }
    let root = if has_root == 0 { None } else { Some(PagePointer::read(body, shape)?) };
    Ok(Section::Tree { volume, shard, watermark, tree: Tree { height, root } })
}

fn read_usage(body: &mut Reader<'_>) -> Result<UsageDelta, DecodeError> {
    let mut next = || body.u64()?.try_into().map_err(|_| DecodeError::Field("usage"));
    Ok(UsageDelta {
        extents: next()?,
        blocks: next()?,
        stored_bytes: next()?,
        map_bytes: next()?,
        by_epoch: [next()?, next()?],
    })
}

fn write_use(used: &SegmentUse, out: &mut Writer) {
    out.u32(used.index).u64(used.sequence.number).u64(used.sequence.nonce);
}

fn read_live(body: &mut Reader<'_>) -> Result<Vec<(SegmentUse, u64)>, DecodeError> {
    let count = body.u32()?;
    let mut uses = Vec::new();
    for _ in 0..count {
        let (used, live) = (read_use(body)?, body.u64()?);
        if live > u64::from(u32::MAX) * 32 {
            return Err(DecodeError::Field("live bytes"));
        }
        uses.push((used, live));
    }
    Ok(uses)
}

fn read_use(body: &mut Reader<'_>) -> Result<SegmentUse, DecodeError> {
    let index = body.u32()?;
    Ok(SegmentUse { index, sequence: Sequence { number: body.u64()?, nonce: body.u64()? } })
}

fn read_uses(body: &mut Reader<'_>) -> Result<Vec<SegmentUse>, DecodeError> {
    let count = body.u32()?;
    let mut uses = Vec::new();
    for _ in 0..count {
        uses.push(read_use(body)?);
    }
    Ok(uses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::options::Layout;

    const LAYOUT: Layout =
        Layout { data_shards: 4, parity_shards: 2, segment_bytes: 1 << 20, shard_bytes_max: 128 << 10 };
    const SHAPE: Shape = Shape { layout: LAYOUT, segments: 1000 };

    /// A pool of many segments lists them in sections that its own reader takes; none is listed in one, too.
    #[test]
    fn segment_lists_of_any_length_are_read_back() {
        for count in [0u32, 1, 65_536, 65_537, 300_000] {
            let used = |index| (SegmentUse { index, sequence: Sequence { number: index.into(), nonce: 5 } }, 7);
            let window = Window { data: (0..count).map(used).collect(), ..Window::default() };
            let mut sections = SectionWriter::default();
            sections.window(&window);
            let (mut at, mut read) = (0, Vec::new());
            while at < sections.0.len() {
                let (section, len) =
                    next_section(&sections.0[at..], &SHAPE, &Shield::none()).unwrap().expect("a whole section");
                at += len;
                if let Section::LiveSegments(uses) = section {
                    read.extend(uses);
                }
            }
            assert_eq!(read, window.data, "{count} segments");
        }
    }
}
