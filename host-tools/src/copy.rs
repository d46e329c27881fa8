//! `nvmf read` and `nvmf write`: bytes between a namespace and a file, at any offset and of any length.
//!
//! Owns the cut into commands, the order of the bytes, and the partial blocks at both ends. Must not know sockets.
//! Invariants: bytes outside the range keep their values; output is in order and never has a byte that was not read with
//! success; a read that ends early says how much it gave.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use nvmf_target::buffer::IoBuf;

use crate::error::ToolError;
use crate::lane::{self, CommandQueue, Completion, IoCommand, Range, Source};
use crate::progress::Watch;

/// A namespace's shape, and how to move data.
#[derive(Debug, Clone, Copy)]
pub struct CopyPlan {
    /// Namespace.
    pub nsid: u32,
    /// Its block size in bytes.
    pub block_bytes: u32,
    /// Its size in blocks.
    pub block_count: u64,
    /// Blocks a command moves.
    pub command_blocks: u32,
    /// Commands in flight.
    pub depth: usize,
}

impl CopyPlan {
    /// Its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.block_count.saturating_mul(u64::from(self.block_bytes))
    }

    fn block(&self) -> u64 {
        u64::from(self.block_bytes)
    }

    fn range(&self, slba: u64, lba_count: u32) -> Range {
        Range { nsid: self.nsid, slba, lba_count }
    }

    /// The commands that cover the bytes `start..end`, whole blocks.
    fn commands(&self, start: u64, end: u64) -> impl Iterator<Item = Range> + use<> {
        let plan = *self;
        let (first, last) = (start / plan.block(), end.div_ceil(plan.block()));
        let step = u64::from(plan.command_blocks);
        (first..last)
            .step_by(plan.command_blocks as usize)
            .map(move |slba| plan.range(slba, step.min(last - slba) as u32))
    }
}

/// Copies `len_bytes` from `offset` to `out`; returns how many bytes were written out.
pub fn read(
    plan: &CopyPlan,
    offset: u64,
    len_bytes: u64,
    queue: &mut impl CommandQueue,
    out: &mut dyn Write,
    path: &Path,
    watch: Watch<'_>,
) -> Result<u64, ToolError> {
    let end = checked_end(plan, "the range", offset, len_bytes)?;
    let mut reader = Reader {
        plan,
        start: offset,
        end,
        ranges: plan.commands(offset, end),
        in_flight: vec![None; plan.depth],
        waiting: BTreeMap::new(),
        next_slba: offset / plan.block(),
        buffers: Vec::new(),
        out,
        path,
        watch,
        written: 0,
    };
    if len_bytes > 0 {
        lane::run(queue, plan.depth, &mut reader)?;
    }
    let written = reader.written;
    out.flush().map_err(|source| file_error(path, source))?;
    Ok(written)
}

fn checked_end(plan: &CopyPlan, what: &'static str, offset: u64, len_bytes: u64) -> Result<u64, ToolError> {
    let size = plan.size_bytes();
    let end = offset.saturating_add(len_bytes);
    if end > size { Err(ToolError::BeyondEnd { what, end, nsid: plan.nsid, size }) } else { Ok(end) }
}

fn file_error(path: &Path, source: io::Error) -> ToolError {
    ToolError::File { path: PathBuf::from(path), source }
}

struct Reader<'a, I> {
    plan: &'a CopyPlan,
    start: u64,
    end: u64,
    ranges: I,
    in_flight: Vec<Option<Range>>,
    /// Completed out of order: by first block, until their turn comes. At most `depth` of them.
    waiting: BTreeMap<u64, IoBuf>,
    next_slba: u64,
    buffers: Vec<IoBuf>,
    out: &'a mut dyn Write,
    path: &'a Path,
    watch: Watch<'a>,
    written: u64,
}

impl<I: Iterator<Item = Range>> Source for Reader<'_, I> {
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError> {
        // Too much has overtaken the oldest read: wait for it, so that memory stays bounded.
        if self.watch.stop.is_set() || self.waiting.len() > self.plan.depth {
            return Ok(None);
        }
        let Some(range) = self.ranges.next() else { return Ok(None) };
        let bytes = range.lba_count as usize * self.plan.block_bytes as usize;
        let mut buffer =
            self.buffers.pop().filter(|b| b.capacity_bytes() >= bytes).unwrap_or_else(|| IoBuf::heap(bytes));
        buffer.set_len(bytes);
        if let Some(place) = self.in_flight.get_mut(slot) {
            *place = Some(range);
        }
        Ok(Some(IoCommand::Read { range, buffer }))
    }

    fn completed(&mut self, completion: Completion) -> Result<(), ToolError> {
        let range = self.in_flight.get_mut(completion.slot).and_then(Option::take);
        let (Some(range), Some(buffer)) = (range, completion.buffer) else { return Ok(()) };
        if !completion.status.is_success() {
            return Err(ToolError::Command { what: "Read", range: Some(range), status: completion.status });
        }
        self.waiting.insert(range.slba, buffer);
        self.write_out()
    }
}

impl<I> Reader<'_, I> {
    fn write_out(&mut self) -> Result<(), ToolError> {
        while let Some(buffer) = self.waiting.remove(&self.next_slba) {
            let at = self.next_slba * self.plan.block();
            let from = self.start.saturating_sub(at) as usize;
            let to = (self.end - at).min(buffer.len() as u64) as usize;
            let bytes = buffer.get(from..to).unwrap_or_default();
            self.out.write_all(bytes).map_err(|source| file_error(self.path, source))?;
            self.written += bytes.len() as u64;
            self.watch.bar.inc(bytes.len() as u64);
            self.next_slba += buffer.len() as u64 / self.plan.block();
            self.buffers.push(buffer);
        }
        Ok(())
    }
}

/// Copies what `input` gives, at most `limit_bytes`, to `offset`, and makes it durable; returns how many bytes.
pub fn write(
    plan: &CopyPlan,
    offset: u64,
    limit_bytes: u64,
    queue: &mut impl CommandQueue,
    input: &mut dyn Read,
    path: &Path,
    watch: Watch<'_>,
) -> Result<u64, ToolError> {
    checked_end(plan, "the range", offset, 0)?;
    let room = plan.size_bytes() - offset;
    let mut writer = Writer {
        plan,
        at: offset,
        limit: limit_bytes.min(room),
        input,
        path,
        in_flight: vec![None; plan.depth],
        buffers: Vec::new(),
        partial: Vec::new(),
        ended: false,
        watch,
        written: 0,
    };
    lane::run(queue, plan.depth, &mut writer)?;
    let (mut written, partial, ended) = (writer.written, std::mem::take(&mut writer.partial), writer.ended);
    for (at, bytes) in partial {
        merge(plan, at, &bytes, queue)?;
        written += bytes.len() as u64;
    }
    single(queue, "Flush", None, IoCommand::Flush { nsid: plan.nsid })?;
    if !ended && limit_bytes > room && !watch.stop.is_set() && has_more(input, path)? {
        let end = plan.size_bytes().saturating_add(1);
        return Err(ToolError::BeyondEnd { what: "the input", end, nsid: plan.nsid, size: plan.size_bytes() });
    }
    Ok(written)
}

fn has_more(input: &mut dyn Read, path: &Path) -> Result<bool, ToolError> {
    read_whole(input, &mut [0u8; 1], path).map(|n| n > 0)
}

struct Writer<'a> {
    plan: &'a CopyPlan,
    at: u64,
    limit: u64,
    input: &'a mut dyn Read,
    path: &'a Path,
    in_flight: Vec<Option<(Range, u64)>>,
    buffers: Vec<IoBuf>,
    /// Pieces of blocks at both ends (two at most), merged with what is there once all else is written.
    partial: Vec<(u64, Vec<u8>)>,
    ended: bool,
    watch: Watch<'a>,
    written: u64,
}

impl Writer<'_> {
    /// The next whole blocks of the input; pieces of blocks go to `partial`.
    fn next_blocks(&mut self) -> Result<Option<(u64, IoBuf)>, ToolError> {
        let block = self.plan.block();
        while !self.ended && self.limit > 0 {
            let into = self.at % block;
            let command_bytes = u64::from(self.plan.command_blocks) * block;
            let wanted = if into > 0 { block - into } else { command_bytes }.min(self.limit);
            let mut buffer = self.buffers.pop().unwrap_or_else(|| IoBuf::heap(command_bytes as usize));
            buffer.set_len(wanted as usize);
            let got = read_whole(self.input, &mut buffer, self.path)?;
            self.ended = (got as u64) < wanted;
            let start = self.at;
            self.at += got as u64;
            self.limit -= got as u64;
            let whole = if into > 0 { 0 } else { got - got % block as usize };
            let rest = buffer.get(whole..got).unwrap_or_default();
            if !rest.is_empty() {
                self.partial.push((start + whole as u64, rest.to_vec()));
            }
            buffer.set_len(whole);
            if whole > 0 {
                return Ok(Some((start / block, buffer)));
            }
            self.buffers.push(buffer);
        }
        Ok(None)
    }
}

impl Source for Writer<'_> {
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError> {
        if self.watch.stop.is_set() {
            return Ok(None);
        }
        let Some((slba, buffer)) = self.next_blocks()? else { return Ok(None) };
        let bytes = buffer.len() as u64;
        let range = self.plan.range(slba, (bytes / self.plan.block()) as u32);
        if let Some(place) = self.in_flight.get_mut(slot) {
            *place = Some((range, bytes));
        }
        Ok(Some(IoCommand::Write { range, buffer }))
    }

    fn completed(&mut self, completion: Completion) -> Result<(), ToolError> {
        let Some((range, bytes)) = self.in_flight.get_mut(completion.slot).and_then(Option::take) else {
            return Ok(());
        };
        if !completion.status.is_success() {
            return Err(ToolError::Command { what: "Write", range: Some(range), status: completion.status });
        }
        self.written += bytes;
        self.watch.bar.inc(bytes);
        self.buffers.extend(completion.buffer);
        Ok(())
    }
}

/// Writes a piece of one block over what the block holds.
fn merge(plan: &CopyPlan, at: u64, bytes: &[u8], queue: &mut impl CommandQueue) -> Result<(), ToolError> {
    let range = plan.range(at / plan.block(), 1);
    let buffer = IoBuf::heap(plan.block_bytes as usize);
    let buffer = single(queue, "Read", Some(range), IoCommand::Read { range, buffer })?;
    let Some(mut buffer) = buffer else { return Ok(()) };
    let from = (at % plan.block()) as usize;
    if let Some(place) = buffer.get_mut(from..from + bytes.len()) {
        place.copy_from_slice(bytes);
    }
    single(queue, "Write", Some(range), IoCommand::Write { range, buffer })?;
    Ok(())
}

fn single(
    queue: &mut impl CommandQueue,
    what: &'static str,
    range: Option<Range>,
    command: IoCommand,
) -> Result<Option<IoBuf>, ToolError> {
    queue.submit(0, command)?;
    let done = queue.wait()?;
    if done.status.is_success() {
        Ok(done.buffer)
    } else {
        Err(ToolError::Command { what, range, status: done.status })
    }
}

/// Fills `out` as far as the input goes (pipes give a little at a time).
fn read_whole(input: &mut dyn Read, out: &mut [u8], path: &Path) -> Result<usize, ToolError> {
    let mut got = 0;
    while let Some(room) = out.get_mut(got..).filter(|room| !room.is_empty()) {
        match input.read(room) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(file_error(path, source)),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use indicatif::ProgressBar;
    use nvmf_target::wire::Status;

    use super::*;
    use crate::lane::fake::Disk;
    use crate::pattern::SplitMix64;
    use crate::progress::StopFlag;

    const PLAN: CopyPlan = CopyPlan { nsid: 1, block_bytes: 512, block_count: 100, command_blocks: 4, depth: 3 };

    fn put(disk: &Disk, offset: u64, bytes: &[u8]) -> Result<u64, ToolError> {
        // A reader that gives little at a time, as a pipe does.
        struct Pipe<'a>(&'a [u8]);
        impl Read for Pipe<'_> {
            fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
                let n = out.len().min(777);
                self.0.read(&mut out[..n])
            }
        }
        let stop = StopFlag::default();
        let mut input = Pipe(bytes);
        {
            let watch = Watch { stop: &stop, bar: &ProgressBar::hidden() };
            write(&PLAN, offset, u64::MAX, &mut disk.queue(512), &mut input, Path::new("in"), watch)
        }
    }

    fn get(disk: &Disk, offset: u64, len_bytes: u64) -> Result<Vec<u8>, ToolError> {
        let mut out = Vec::new();
        let stop = StopFlag::default();
        let bar = ProgressBar::hidden();
        let n = read(
            &PLAN,
            offset,
            len_bytes,
            &mut disk.queue(512),
            &mut out,
            Path::new("out"),
            Watch { stop: &stop, bar: &bar },
        )?;
        assert_eq!(n, out.len() as u64);
        Ok(out)
    }

    #[test]
    fn any_offset_and_length_reads_back_and_leaves_the_rest_alone() {
        let mut random = SplitMix64(1);
        for case in 0..300 {
            let disk = Disk::default();
            let mut expected = vec![0u8; 51_200];
            random.fill(&mut expected);
            assert_eq!(put(&disk, 0, &expected).unwrap(), 51_200);
            let offset = random.below(51_200);
            let len = random.below((51_200 - offset).min(if case % 2 == 0 { 1200 } else { 51_200 }) + 1);
            let mut bytes = vec![0u8; len as usize];
            random.fill(&mut bytes);
            assert_eq!(put(&disk, offset, &bytes).unwrap(), len);
            expected[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
            assert_eq!(get(&disk, 0, 51_200).unwrap(), expected, "offset {offset}, {len} bytes");
            assert_eq!(get(&disk, offset, len).unwrap(), bytes);
        }
    }

    #[test]
    fn beyond_the_end_is_refused_and_input_that_doesnt_fit_is_not_cut_in_silence() {
        let disk = Disk::default();
        assert!(matches!(get(&disk, 51_000, 201), Err(ToolError::BeyondEnd { end: 51_201, size: 51_200, .. })));
        assert!(matches!(get(&disk, u64::MAX, 2), Err(ToolError::BeyondEnd { .. })));
        assert!(matches!(put(&disk, 51_201, b"x"), Err(ToolError::BeyondEnd { .. })));
        assert!(matches!(put(&disk, 51_000, &[7; 201]), Err(ToolError::BeyondEnd { .. })));
        assert_eq!(put(&disk, 51_000, &[7; 200]).unwrap(), 200);
        assert_eq!(put(&disk, 51_200, b"").unwrap(), 0);
        assert_eq!(get(&disk, 51_200, 0).unwrap(), b"");
    }

    #[test]
    fn a_failed_read_gives_no_byte_from_there_on() {
        let disk = Disk::default();
        put(&disk, 0, &[9; 20_000]).unwrap();
        *disk.fails.lock().unwrap() = Some((10, Status::UNRECOVERED_READ));
        let mut out = Vec::new();
        let stop = StopFlag::default();
        let bar = ProgressBar::hidden();
        let outcome =
            read(&PLAN, 0, 20_000, &mut disk.queue(512), &mut out, Path::new("out"), Watch { stop: &stop, bar: &bar });
        assert!(matches!(outcome, Err(ToolError::Command { what: "Read", .. })));
        assert!(out.len() <= 10 * 512 && out.iter().all(|b| *b == 9), "{} bytes", out.len());
    }
}
