//! What dm-log-writes has kept (Documentation/admin-guide/device-mapper/log-writes.rst): reads it, and makes disks of it as
//! a power cut at any moment may leave them.
//!
//! Must not know what is on the disks. The log is in the order in which writes became durable: what a flush made so stands before
//! it. Invariant: a torn disk lacks nothing that was flushed to it, and holds nothing that its log has later.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use host_tools::pattern::SplitMix64;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const ENTRY_BYTES: usize = 32;

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// The unit in which a disk keeps a write whole.
const TEAR_BYTES: usize = 512;

/// One line of the log.
#[derive(Debug)]
pub struct Entry {
    sector: u64,
    sectors: u64,
    flags: u64,
    /// Where its bytes are in the log.
    data_at: u64,
    /// Of a mark.
    pub label: Option<String>,
}

impl Entry {
    fn is(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }
}

/// A whole log.
pub struct WriteLog {
    file: File,
    sector_bytes: u64,
    pub entries: Vec<Entry>,
}

fn le64(bytes: &[u8], at: usize) -> Result<u64> {
    let field = bytes.get(at..).and_then(|bytes| bytes.first_chunk::<8>()).context("a log cut short")?;
    Ok(u64::from_le_bytes(*field))
}

impl WriteLog {
    pub fn open(path: &Path) -> Result<WriteLog> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let mut head = [0; 28];
        file.read_exact_at(&mut head, 0)?;
        ensure!(le64(&head, 0)? == MAGIC && le64(&head, 8)? == VERSION, "{} is no log of writes", path.display());
        let count = le64(&head, 16)?;
        let sector_bytes = u64::from(u32::from_le_bytes([head[24], head[25], head[26], head[27]]));
        ensure!(
            sector_bytes.is_power_of_two() && (512..=4096).contains(&sector_bytes),
            "sectors of {sector_bytes} bytes"
        );
        let mut log = WriteLog { file, sector_bytes, entries: Vec::new() };
        let mut at = sector_bytes;
        let mut sector = vec![0; usize::try_from(sector_bytes)?];
        for _ in 0..count {
            log.file.read_exact_at(&mut sector, at).context("the log's entries")?;
            let entry = log.entry(&sector, at + sector_bytes)?;
            let bytes = if entry.is(DISCARD | MARK) { 0 } else { entry.sectors * sector_bytes };
            at = entry.data_at + bytes;
            log.entries.push(entry);
        }
        Ok(log)
    }

    fn entry(&self, head: &[u8], data_at: u64) -> Result<Entry> {
        let flags = le64(head, 16)?;
        let label = if flags & MARK != 0 {
            let length = usize::try_from(le64(head, 24)?)?;
            let text = head.get(ENTRY_BYTES..ENTRY_BYTES + length).context("a mark longer than its sector")?;
            Some(String::from_utf8_lossy(text).trim_end_matches('\0').to_owned())
        } else {
            None
        };
        Ok(Entry { sector: le64(head, 0)?, sectors: le64(head, 8)?, flags, data_at, label })
    }

    fn bytes_of(&self, entry: &Entry) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(entry.sectors * self.sector_bytes)?];
        if !entry.is(DISCARD) {
            self.file.read_exact_at(&mut bytes, entry.data_at).context("the log's data")?;
        }
        Ok(bytes)
    }
}

/// Where the disks lie on the device whose writes were logged, in sectors of 512 bytes.
#[derive(Clone, Copy)]
pub struct Slices {
    pub first: u64,
    pub sectors: u64,
    pub count: usize,
}

/// What happens to writes that were complete but not flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// All of them are there.
    None,
    /// Any sector of any of them may not be.
    Any,
}

/// The disks as they were at a moment of the log that only moves on: what had been flushed by then, in files of its own.
pub struct Disks<'a> {
    log: &'a WriteLog,
    slices: Slices,
    folder: PathBuf,
    files: Vec<File>,
    /// Of each disk: what the log has before this is in its file.
    applied: Vec<usize>,
    /// Of each disk: the entries that concern it, in order, and whether they make the ones before durable.
    lines: Vec<Vec<usize>>,
}

impl<'a> Disks<'a> {
    /// Blank disks in `folder`.
    pub fn new(log: &'a WriteLog, slices: Slices, folder: &Path) -> Result<Disks<'a>> {
        std::fs::create_dir_all(folder)?;
        let mut lines = vec![Vec::new(); slices.count];
        for (index, entry) in log.entries.iter().enumerate().filter(|(_, entry)| entry.label.is_none()) {
            lines[slices.disk_of(entry, log.sector_bytes)?].push(index);
        }
        for (disk, lines) in lines.iter().enumerate() {
            ensure!(lines.iter().any(|line| log.entries[*line].is(FLUSH)), "no flush of disk {disk} is in the log");
        }
        let mut files = Vec::new();
        for disk in 0..slices.count {
            let path = folder.join(format!("disk{disk}"));
            let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
            file.set_len(slices.sectors * 512)?;
            files.push(file);
        }
        let applied = vec![0; slices.count];
        Ok(Disks { log, slices, folder: folder.to_owned(), files, applied, lines })
    }

    /// Entries that write within the first `bytes` of a disk.
    pub fn near_the_start(&self, bytes: u64) -> Vec<usize> {
        let is_near = |line: &&usize| {
            let entry = &self.log.entries[**line];
            let from = (entry.sector * self.log.sector_bytes / 512).saturating_sub(self.slices.first);
            entry.sectors > 0 && from % self.slices.sectors < bytes / 512
        };
        let mut near: Vec<usize> = self.lines.iter().flatten().filter(is_near).copied().collect();
        near.sort_unstable();
        near
    }

    /// Writes the disks to `paths` as a power cut just before entry `end` may leave them. `end` never goes back. Returns how many
    /// sectors were lost.
    pub fn cut(&mut self, end: usize, loss: Loss, seed: u64, paths: &[PathBuf]) -> Result<u64> {
        let mut random = SplitMix64(seed);
        let mut lost = 0;
        for (disk, path) in paths.iter().enumerate() {
            let lines: Vec<usize> = self.lines[disk].iter().copied().filter(|line| *line < end).collect();
            let flushed = lines.iter().rfind(|line| self.log.entries[**line].is(FLUSH)).map_or(0, |line| line + 1);
            for line in lines.iter().filter(|line| (self.applied[disk]..flushed).contains(*line)) {
                let entry = &self.log.entries[*line];
                self.files[disk].write_all_at(&self.log.bytes_of(entry)?, self.offset(disk, entry))?;
            }
            self.applied[disk] = self.applied[disk].max(flushed);
            std::fs::copy(self.folder.join(format!("disk{disk}")), path)?;
            let file = File::options().write(true).open(path)?;
            for line in lines.iter().filter(|line| **line >= flushed) {
                lost += self.write_some(&file, disk, &self.log.entries[*line], loss, &mut random)?;
            }
        }
        Ok(lost)
    }

    fn offset(&self, disk: usize, entry: &Entry) -> u64 {
        entry.sector * self.log.sector_bytes - (self.slices.first + disk as u64 * self.slices.sectors) * 512
    }

    /// Writes what is left of an entry that was not flushed; returns how many sectors are not.
    fn write_some(&self, file: &File, disk: usize, entry: &Entry, loss: Loss, random: &mut SplitMix64) -> Result<u64> {
        let bytes = self.log.bytes_of(entry)?;
        let offset = self.offset(disk, entry);
        // Whole, gone, or torn: each is as likely. What was written through to the disk is there.
        let fate = if loss == Loss::None || entry.is(FUA) { 0 } else { random.below(3) };
        let mut lost = 0;
        for (index, sector) in bytes.chunks(TEAR_BYTES).enumerate() {
            if fate == 1 || fate == 2 && random.below(2) == 0 {
                lost += 1;
            } else {
                file.write_all_at(sector, offset + (index * TEAR_BYTES) as u64)?;
            }
        }
        Ok(lost)
    }
}

impl Slices {
    /// The disk that an entry belongs to. A flush has the sector where its disk begins, where dm-flakey maps it (dm-linear doesn't).
    fn disk_of(&self, entry: &Entry, sector_bytes: u64) -> Result<usize> {
        let sector = entry.sector * sector_bytes / 512;
        let disk = sector.checked_sub(self.first).map(|sector| sector / self.sectors);
        let disk = disk.and_then(|disk| usize::try_from(disk).ok()).filter(|disk| *disk < self.count);
        disk.with_context(|| format!("the log has a write on no disk: {entry:?}"))
    }
}
