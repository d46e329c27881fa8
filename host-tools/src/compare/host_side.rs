//! The host-side way: the host compresses, encrypts, checksums and erasure-codes, and writes the shards to one plain
//! namespace per member.
//!
//! Owns one thread's stream: its part of the namespaces, its keys, its map. Must not know the pool. It is no strawman: the
//! same engines as the service's, work on the next stripe while the last is on the wire, reads of just the blocks that hold
//! a record. Invariant: an extent counts as written once all k+m shards are written and every member has been flushed.

use std::sync::Arc;
use std::time::Instant;

use nvmf_target::buffer::IoBuf;
use offload_svc::stages::cipher::Cipher;
use offload_svc::stages::compress::Compression;
use offload_svc::stages::engines;
use offload_svc::stages::keys::{KeyEpoch, Keyring, LineageId, LineageKey, Salt, SealingKey};
use offload_svc::stages::record::{Birth, Kind, MAX_PLAIN_BYTES, Owner, RecordCodec, Sealing, sealed_bound};
use offload_svc::stages::rs::Code;

use super::StageError;
use super::layout::{self, Piece, SHARD_ALIGN_BYTES};
use super::workload::{Extents, ThreadResult};
use crate::error::ToolError;
use crate::lane::{self, CommandQueue, Completion, IoCommand, Range, Source};

/// Logical blocks within records: as the pool's volumes have them.
const BLOCK_SHIFT: u8 = 12;
/// Payload of a stripe that is aimed at: four shards of 256 KiB with k = 4.
const STRIPE_SHARD_BYTES: usize = 256 << 10;

/// What all streams of the host-side way share.
#[derive(Debug, Clone)]
pub struct HostSetup {
    /// One plain namespace per member, in order: data shards first.
    pub members: Vec<u32>,
    /// Their block size in bytes.
    pub block_bytes: u32,
    /// Blocks of the smallest of them.
    pub block_count: u64,
    /// Longest transfer in bytes.
    pub max_transfer_bytes: usize,
    /// Data shards.
    pub k: usize,
    /// Parity shards.
    pub m: usize,
    /// How records are compressed.
    pub compression: Compression,
    /// How records are encrypted.
    pub cipher: Cipher,
}

/// Where an extent rests.
#[derive(Debug, Clone, Default)]
struct Place {
    /// First block of the stripe's shards, the same on every member.
    slba: u64,
    /// Data bytes of each shard.
    data_bytes: usize,
    /// Each record: where in the payload, how long, and what it is the record of.
    records: Vec<(usize, usize, Birth)>,
}

/// One thread's stream.
pub struct HostStream {
    setup: HostSetup,
    code: Code,
    codec: RecordCodec,
    key: SealingKey,
    lineage: LineageId,
    /// This thread's part of every member, in blocks.
    region: std::ops::Range<u64>,
    next_block: u64,
    sequence: u64,
    generation: u64,
    payload: Vec<u8>,
    map: Vec<Option<Place>>,
}

impl HostStream {
    /// Stream `index` of `streams`.
    pub fn new(setup: &HostSetup, index: usize, streams: usize) -> Result<Self, StageError> {
        let part = setup.block_count / streams.max(1) as u64;
        let start = part * index as u64;
        let keyring = Arc::new(Keyring::new());
        let lineage = LineageId(index as u128 + 1);
        let key = keyring.insert(LineageKey::generate(lineage, KeyEpoch(1), setup.cipher)?);
        let sealing = key.sealing_key(Salt::random()?, engines::chosen());
        Ok(Self {
            setup: setup.clone(),
            code: Code::new(setup.k, setup.m)?,
            codec: RecordCodec::new(*engines::chosen(), keyring),
            key: sealing,
            lineage,
            region: start..start + part,
            next_block: start,
            sequence: 0,
            generation: 0,
            payload: Vec::new(),
            map: Vec::new(),
        })
    }

    /// Writes the extents `first`, `first + step`, …, `depth` of them per group commit.
    pub fn write(
        &mut self,
        extents: &Extents<'_>,
        (first, step): (usize, usize),
        depth: usize,
        queue: &mut impl CommandQueue,
    ) -> Result<ThreadResult, ToolError> {
        let mine: Vec<usize> = (first..extents.count()).step_by(step.max(1)).collect();
        self.map.resize(extents.count(), None);
        let mut result = ThreadResult::default();
        for group in mine.chunks(depth.max(1)) {
            let start = Instant::now();
            self.write_group(extents, group, queue, &mut result)?;
            let elapsed = start.elapsed();
            for &index in group {
                result.latencies.record(elapsed);
                result.user_bytes += extents.get(index).len() as u64;
            }
        }
        Ok(result)
    }

    /// Everything of a group, then one Flush on each member.
    fn write_group(
        &mut self,
        extents: &Extents<'_>,
        group: &[usize],
        queue: &mut impl CommandQueue,
        result: &mut ThreadResult,
    ) -> Result<(), ToolError> {
        let shard_bytes = STRIPE_SHARD_BYTES.min(self.setup.max_transfer_bytes);
        let limit = layout::payload_limit(shard_bytes, self.setup.k);
        let mut writer = ShardWriter::new(queue.capacity());
        let mut open: Vec<usize> = Vec::new();
        for &index in group {
            let bound =
                extents.get(index).chunks(MAX_PLAIN_BYTES).map(|c| sealed_bound(c.len(), BLOCK_SHIFT)).sum::<usize>();
            if !open.is_empty() && self.payload.len() + bound > limit {
                result.written_bytes += self.close_stripe(&mut open, &mut writer, queue)?;
            }
            result.record_bytes += self.seal(index, extents)?;
            open.push(index);
        }
        result.written_bytes += self.close_stripe(&mut open, &mut writer, queue)?;
        writer.finish(queue)?;
        for &nsid in &self.setup.members {
            writer.submit("Flush", IoCommand::Flush { nsid }, queue)?;
        }
        writer.finish(queue)
    }

    /// Seals an extent's records behind what is sealed already; returns how many bytes they are.
    fn seal(&mut self, index: usize, extents: &Extents<'_>) -> Result<u64, StageError> {
        self.generation += 1;
        let mut place = Place::default();
        let plain = extents.get(index);
        let blocks_before = (index * extents.extent_bytes) >> BLOCK_SHIFT;
        for (number, chunk) in plain.chunks(MAX_PLAIN_BYTES).enumerate() {
            let birth = Birth {
                lineage: self.lineage,
                key_epoch: KeyEpoch(1),
                lba: blocks_before as u64 + ((number * MAX_PLAIN_BYTES) >> BLOCK_SHIFT) as u64,
                block_count: (chunk.len() >> BLOCK_SHIFT) as u64,
                block_shift: BLOCK_SHIFT,
                generation: self.generation,
            };
            let owner = Owner { volume: 1, shard: 0 };
            let compression = self.setup.compression;
            let sealing = Sealing { kind: Kind::Data, birth, owner, compression, block_crcs: None };
            let start = self.payload.len();
            self.payload.resize(start + sealed_bound(chunk.len(), BLOCK_SHIFT), 0);
            let out = self.payload.get_mut(start..).unwrap_or_default();
            let header = self.codec.seal(&sealing, chunk, &mut self.key, out)?;
            self.payload.truncate(start + header.record_bytes());
            place.records.push((start, header.record_bytes(), birth));
        }
        let bytes = place.records.iter().map(|(_, len, _)| *len as u64).sum();
        if let Some(slot) = self.map.get_mut(index) {
            *slot = Some(place);
        }
        Ok(bytes)
    }

    /// Encodes what is sealed and submits its shards; returns how many bytes they are.
    fn close_stripe(
        &mut self,
        open: &mut Vec<usize>,
        writer: &mut ShardWriter,
        queue: &mut impl CommandQueue,
    ) -> Result<u64, ToolError> {
        if open.is_empty() {
            return Ok(0);
        }
        self.sequence += 1;
        let shards = layout::shards(&self.code, self.sequence, &self.payload).map_err(StageError::from)?;
        let data_bytes = layout::shard_data_bytes(self.payload.len(), self.setup.k);
        let shard_bytes = shards.first().map_or(0, |s| s.len());
        let blocks = (shard_bytes / self.setup.block_bytes as usize) as u64;
        if self.next_block + blocks > self.region.end {
            self.next_block = self.region.start;
        }
        let slba = self.next_block;
        self.next_block += blocks;
        for index in open.drain(..) {
            if let Some(Some(place)) = self.map.get_mut(index) {
                (place.slba, place.data_bytes) = (slba, data_bytes);
            }
        }
        self.payload.clear();
        let mut written = 0;
        for (buffer, &nsid) in shards.into_iter().zip(&self.setup.members) {
            written += buffer.len() as u64;
            let range = Range { nsid, slba, lba_count: blocks as u32 };
            writer.submit("Write", IoCommand::Write { range, buffer }, queue)?;
        }
        // The next stripe is worked on while this one travels.
        queue.send()?;
        Ok(written)
    }

    /// How many bytes of each member a full write of `extents` by all `streams` may take at most, in blocks of `setup`.
    pub fn blocks_needed(setup: &HostSetup, extents: &Extents<'_>, streams: usize) -> u64 {
        let stripe_blocks = STRIPE_SHARD_BYTES.min(setup.max_transfer_bytes) as u64 / u64::from(setup.block_bytes);
        let share = (extents.data.len() / setup.k.max(1)) as u64 / u64::from(setup.block_bytes);
        // Worst case: nothing can be compressed, and the last stripe that fits an extent leaves half of itself empty.
        (share * 2).max(stripe_blocks) + stripe_blocks * 2 * streams as u64
    }

    /// Reads the extents back, `depth` of them at a time, opens them and compares them with what was written.
    pub fn read(
        &mut self,
        extents: &Extents<'_>,
        (first, step): (usize, usize),
        depth: usize,
        queue: &mut impl CommandQueue,
    ) -> Result<ThreadResult, ToolError> {
        let pending = (first..extents.count()).step_by(step.max(1)).collect::<Vec<_>>().into_iter();
        let mut reader = Reader {
            stream: self,
            extents,
            pending,
            depth,
            jobs: Vec::new(),
            waiting: Vec::new(),
            in_flight: vec![None; queue.capacity()],
            spare: Vec::new(),
            plain: vec![0; MAX_PLAIN_BYTES],
            result: ThreadResult::default(),
        };
        lane::run(queue, queue.capacity(), &mut reader)?;
        Ok(reader.result)
    }
}

/// Submits commands as far as the queue has room, and waits for all of them.
struct ShardWriter {
    free: Vec<usize>,
    what: Vec<&'static str>,
}

impl ShardWriter {
    fn new(capacity: usize) -> Self {
        Self { free: (0..capacity).collect(), what: vec![""; capacity] }
    }

    fn submit(
        &mut self,
        what: &'static str,
        command: IoCommand,
        queue: &mut impl CommandQueue,
    ) -> Result<(), ToolError> {
        while self.free.is_empty() {
            self.wait(queue)?;
        }
        let Some(slot) = self.free.pop() else { return Ok(()) };
        if let Some(name) = self.what.get_mut(slot) {
            *name = what;
        }
        queue.submit(slot, command)
    }

    fn wait(&mut self, queue: &mut impl CommandQueue) -> Result<(), ToolError> {
        let done = queue.wait()?;
        if !done.status.is_success() {
            let what = self.what.get(done.slot).copied().unwrap_or("Write");
            return Err(ToolError::Command { what, range: None, status: done.status });
        }
        self.free.push(done.slot);
        Ok(())
    }

    fn finish(&mut self, queue: &mut impl CommandQueue) -> Result<(), ToolError> {
        while self.free.len() < self.what.len() {
            self.wait(queue)?;
        }
        Ok(())
    }
}

/// An extent that is being read.
struct Job {
    extent: usize,
    start: Instant,
    /// The payload's bytes from the first record to the last, filled piece by piece.
    bytes: Vec<u8>,
    missing: usize,
}

/// One command of a job.
#[derive(Debug, Clone)]
struct Part {
    job: usize,
    /// Where its bytes go in the job, and where they lie in what is read.
    to: usize,
    from: usize,
    len: usize,
    range: Range,
}

struct Reader<'a, 'd> {
    stream: &'a mut HostStream,
    extents: &'a Extents<'d>,
    pending: std::vec::IntoIter<usize>,
    depth: usize,
    jobs: Vec<Option<Job>>,
    waiting: Vec<Part>,
    in_flight: Vec<Option<Part>>,
    spare: Vec<IoBuf>,
    plain: Vec<u8>,
    result: ThreadResult,
}

impl Source for Reader<'_, '_> {
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError> {
        if self.waiting.is_empty() && self.jobs.iter().flatten().count() < self.depth {
            self.start_job()?;
        }
        let Some(part) = self.waiting.pop() else { return Ok(None) };
        let bytes = part.range.lba_count as usize * self.stream.setup.block_bytes as usize;
        let fits = self.spare.iter().position(|b| b.capacity_bytes() >= bytes);
        let mut buffer = fits.map_or_else(|| IoBuf::heap(bytes), |at| self.spare.swap_remove(at));
        buffer.set_len(bytes);
        let range = part.range;
        if let Some(place) = self.in_flight.get_mut(slot) {
            *place = Some(part);
        }
        Ok(Some(IoCommand::Read { range, buffer }))
    }

    fn completed(&mut self, completion: Completion) -> Result<(), ToolError> {
        let part = self.in_flight.get_mut(completion.slot).and_then(Option::take);
        let (Some(part), Some(buffer)) = (part, completion.buffer) else { return Ok(()) };
        if !completion.status.is_success() {
            return Err(ToolError::Command { what: "Read", range: Some(part.range), status: completion.status });
        }
        let Some(Some(job)) = self.jobs.get_mut(part.job) else { return Ok(()) };
        let (to, from) = (part.to..part.to + part.len, part.from..part.from + part.len);
        if let (Some(to), Some(from)) = (job.bytes.get_mut(to), buffer.get(from)) {
            to.copy_from_slice(from);
        }
        job.missing -= 1;
        if job.missing == 0 {
            self.finish_job(part.job);
        }
        self.spare.push(buffer);
        Ok(())
    }
}

impl Reader<'_, '_> {
    fn start_job(&mut self) -> Result<(), ToolError> {
        let Some(extent) = self.pending.next() else { return Ok(()) };
        let Some(Some(place)) = self.stream.map.get(extent) else {
            return Err(StageError::NeverWritten { extent }.into());
        };
        let start = place.records.first().map_or(0, |(offset, ..)| *offset);
        let end = place.records.last().map_or(0, |(offset, len, _)| offset + len);
        let pieces = layout::pieces(place.data_bytes, start, end - start);
        let number = self.jobs.iter().position(Option::is_none).unwrap_or(self.jobs.len());
        let job = Job { extent, start: Instant::now(), bytes: vec![0; end - start], missing: pieces.len() };
        let mut to = 0;
        for piece in pieces {
            let part = self.part(number, to, piece, place.slba);
            to += piece.len;
            self.waiting.push(part);
        }
        match self.jobs.get_mut(number) {
            Some(slot) => *slot = Some(job),
            None => self.jobs.push(Some(job)),
        }
        Ok(())
    }

    /// The whole blocks that hold a piece.
    fn part(&self, job: usize, to: usize, piece: Piece, slba: u64) -> Part {
        let block = (self.stream.setup.block_bytes as usize).max(SHARD_ALIGN_BYTES);
        let first = piece.offset / block * block;
        let end = (piece.offset + piece.len).next_multiple_of(block);
        let block_bytes = self.stream.setup.block_bytes as usize;
        let range = Range {
            nsid: self.stream.setup.members.get(piece.shard).copied().unwrap_or(0),
            slba: slba + (first / block_bytes) as u64,
            lba_count: ((end - first) / block_bytes) as u32,
        };
        Part { job, to, from: piece.offset - first, len: piece.len, range }
    }

    fn finish_job(&mut self, number: usize) {
        let Some(job) = self.jobs.get_mut(number).and_then(Option::take) else { return };
        let wanted = self.extents.get(job.extent);
        let right = self.open_and_compare(&job, wanted);
        self.result.latencies.record(job.start.elapsed());
        self.result.user_bytes += wanted.len() as u64;
        if right {
            self.result.verified_bytes += wanted.len() as u64;
        } else {
            self.result.mismatched_bytes += wanted.len() as u64;
        }
    }

    fn open_and_compare(&mut self, job: &Job, wanted: &[u8]) -> bool {
        let Some(Some(place)) = self.stream.map.get(job.extent) else { return false };
        let start = place.records.first().map_or(0, |(offset, ..)| *offset);
        place.records.iter().zip(wanted.chunks(MAX_PLAIN_BYTES)).all(|((offset, len, birth), chunk)| {
            let at = offset - start;
            let record = job.bytes.get(at..at + len).unwrap_or_default();
            let opened = self.stream.codec.open(record, Kind::Data, birth, &mut self.plain).is_ok();
            opened && self.plain.get(..chunk.len()) == Some(chunk)
        })
    }
}
