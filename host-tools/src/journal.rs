//! The journal of a crash test: which writes were issued, which were acknowledged, which were seen afterwards.
//!
//! Owns the file's format and the model of what each block may hold. Must not know how writes travel. Invariants: the
//! record that a write is issued is in the file before the write is sent, and the one that it was acknowledged before
//! the next is sent on its slot, so a kill of either side loses no promise; a value once seen never gives way to an
//! older one.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::pattern::{BlockState, Pattern};

const HEADER_BYTES: usize = 64;
const RECORD_BYTES: usize = 40;
/// The first byte of a record that a write is issued.
const ISSUED: u8 = 1;
const HEADER_MAGIC: [u8; 8] = *b"SLVJRNL1";

/// Why a journal can't be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Opening, reading or writing failed.
    #[error("{path}: {source}")]
    Io {
        /// The journal.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{path}: not a journal of `nvmf verify` (its first bytes differ)")]
    NotAJournal {
        /// The file.
        path: PathBuf,
    },
    /// A record in the middle doesn't carry its checksum.
    #[error("{path}: record {index} is damaged; the journal can't be trusted")]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Which record, from 0.
        index: usize,
    },
    /// The journal belongs to another namespace or test.
    #[error("{path}: the journal was made with {what} {journal}, now it is {now}; use the same or another file")]
    Mismatch {
        /// The journal.
        path: PathBuf,
        /// What differs.
        what: &'static str,
        /// The journal's value.
        journal: u64,
        /// The value of this run.
        now: u64,
    },
}

/// What the journal's first 64 bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalHeader {
    /// The pattern's seed.
    pub seed: u64,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// Namespace.
    pub nsid: u32,
}

/// What a write puts there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The pattern of the record's generation.
    Pattern,
    /// Zeroes (Write Zeroes or Deallocate).
    Zeroes,
}

/// One event in the life of a run of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// About to be sent.
    Issued(Content),
    /// Completed with success.
    Acknowledged(Content),
    /// A check found the blocks to hold this generation (0: what was there before the journal).
    Seen(Content),
}

/// One record: an event for `lba_count` blocks from `slba`, written as `generation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// What happened.
    pub event: Event,
    /// How many blocks.
    pub lba_count: u32,
    /// First block.
    pub slba: u64,
    /// Which write; generations grow over the journal's life.
    pub generation: u64,
}

impl Record {
    fn encode(&self) -> [u8; RECORD_BYTES] {
        let (kind, content) = match self.event {
            Event::Issued(content) => (ISSUED, content),
            Event::Acknowledged(content) => (2, content),
            Event::Seen(content) => (3, content),
        };
        let mut out = [0u8; RECORD_BYTES];
        out[0] = kind;
        out[1] = u8::from(content == Content::Zeroes);
        out[4..8].copy_from_slice(&self.lba_count.to_le_bytes());
        out[8..16].copy_from_slice(&self.slba.to_le_bytes());
        out[16..24].copy_from_slice(&self.generation.to_le_bytes());
        let crc = crc32c::crc32c(&out[..36]);
        out[36..40].copy_from_slice(&crc.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let crc = u32::from_le_bytes(bytes[36..40].try_into().ok()?);
        if crc32c::crc32c(&bytes[..36]) != crc {
            return None;
        }
        let content = match bytes[1] {
            0 => Content::Pattern,
            1 => Content::Zeroes,
            _ => return None,
        };
        let event = match bytes[0] {
            ISSUED => Event::Issued(content),
            2 => Event::Acknowledged(content),
            3 => Event::Seen(content),
            _ => return None,
        };
        Some(Self {
            event,
            lba_count: u32::from_le_bytes(bytes[4..8].try_into().ok()?),
            slba: u64::from_le_bytes(bytes[8..16].try_into().ok()?),
            generation: u64::from_le_bytes(bytes[16..24].try_into().ok()?),
        })
    }
}

impl JournalHeader {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0u8; HEADER_BYTES];
        out[..8].copy_from_slice(&HEADER_MAGIC);
        out[8..16].copy_from_slice(&self.seed.to_le_bytes());
        out[16..20].copy_from_slice(&self.block_bytes.to_le_bytes());
        out[20..24].copy_from_slice(&self.nsid.to_le_bytes());
        let crc = crc32c::crc32c(&out[..60]);
        out[60..64].copy_from_slice(&crc.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.first_chunk::<HEADER_BYTES>()?;
        let crc = u32::from_le_bytes(bytes[60..64].try_into().ok()?);
        if bytes[..8] != HEADER_MAGIC || crc32c::crc32c(&bytes[..60]) != crc {
            return None;
        }
        Some(Self {
            seed: u64::from_le_bytes(bytes[8..16].try_into().ok()?),
            block_bytes: u32::from_le_bytes(bytes[16..20].try_into().ok()?),
            nsid: u32::from_le_bytes(bytes[20..24].try_into().ok()?),
        })
    }
}

/// An open journal, to append to.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    header: JournalHeader,
}

impl Journal {
    /// Opens or makes the journal at `path`, and returns what it already knows. A record that was cut short by a kill
    /// is dropped from the end.
    pub fn open(path: &Path, header: JournalHeader) -> Result<(Self, Model), JournalError> {
        let io_error = |source| JournalError::Io { path: path.to_owned(), source };
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(io_error)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io_error)?;
        if bytes.is_empty() {
            file.write_all(&header.encode()).map_err(io_error)?;
            return Ok((Self { path: path.to_owned(), file, header }, Model::default()));
        }
        let (found, model, whole_bytes) = parse(path, &bytes)?;
        let fields = [
            ("seed", found.seed, header.seed),
            ("a block size of", u64::from(found.block_bytes), u64::from(header.block_bytes)),
            ("namespace", u64::from(found.nsid), u64::from(header.nsid)),
        ];
        if let Some((what, journal, now)) = fields.into_iter().find(|(_, a, b)| a != b) {
            return Err(JournalError::Mismatch { path: path.to_owned(), what, journal, now });
        }
        file.set_len(whole_bytes).map_err(io_error)?;
        Ok((Self { path: path.to_owned(), file, header }, model))
    }

    /// The header of an existing journal, to know its seed before opening it.
    pub fn peek(path: &Path) -> Result<JournalHeader, JournalError> {
        let mut head = [0u8; HEADER_BYTES];
        let mut file = File::open(path).map_err(|source| JournalError::Io { path: path.to_owned(), source })?;
        file.read_exact(&mut head).map_err(|_| JournalError::NotAJournal { path: path.to_owned() })?;
        JournalHeader::decode(&head).ok_or_else(|| JournalError::NotAJournal { path: path.to_owned() })
    }

    /// The seed, block size and namespace it was made with.
    pub fn header(&self) -> JournalHeader {
        self.header
    }

    /// Appends records with one write to the file: when it returns, they outlive a kill of this process. (They need not
    /// outlive a crash of this machine: the target is what is tested.)
    pub fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        let mut bytes = Vec::with_capacity(records.len() * RECORD_BYTES);
        for record in records {
            bytes.extend_from_slice(&record.encode());
        }
        self.file.write_all(&bytes).map_err(|source| JournalError::Io { path: self.path.clone(), source })
    }

    /// Asks the system to bring the journal to its disk.
    pub fn sync(&self) -> Result<(), JournalError> {
        self.file.sync_data().map_err(|source| JournalError::Io { path: self.path.clone(), source })
    }
}

/// Makes a journal at `to` of what the one at `from` promised when it was `promised_bytes` long: records after that only tell
/// which writes may be there as well. It is what a crash at that moment must be checked with.
pub fn as_of(from: &Path, promised_bytes: u64, to: &Path) -> Result<(), JournalError> {
    let at = |path: &Path, source| JournalError::Io { path: path.to_owned(), source };
    let bytes = std::fs::read(from).map_err(|source| at(from, source))?;
    parse(from, &bytes)?;
    let (head, body) = bytes.split_at(HEADER_BYTES);
    let promised = promised_bytes.saturating_sub(HEADER_BYTES as u64) / RECORD_BYTES as u64;
    let mut out = head.to_vec();
    for (record, index) in body.chunks_exact(RECORD_BYTES).zip(0u64..) {
        if index < promised || record[0] == ISSUED {
            out.extend_from_slice(record);
        }
    }
    std::fs::write(to, out).map_err(|source| at(to, source))
}

fn parse(path: &Path, bytes: &[u8]) -> Result<(JournalHeader, Model, u64), JournalError> {
    let not_ours = || JournalError::NotAJournal { path: path.to_owned() };
    let header = JournalHeader::decode(bytes).ok_or_else(not_ours)?;
    let body = bytes.get(HEADER_BYTES..).unwrap_or_default();
    let mut model = Model::default();
    let mut whole = 0;
    for (index, chunk) in body.chunks_exact(RECORD_BYTES).enumerate() {
        let record = chunk.first_chunk::<RECORD_BYTES>().and_then(Record::decode);
        let record = record.ok_or_else(|| JournalError::Damaged { path: path.to_owned(), index })?;
        model.apply(&record);
        whole = index + 1;
    }
    Ok((header, model, (HEADER_BYTES + whole * RECORD_BYTES) as u64))
}

/// What a block holds or may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    generation: u64,
    content: Content,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct BlockHistory {
    /// The last write known to be there; `None`: whatever was there before the journal.
    settled: Option<Version>,
    /// Writes issued after it whose fate isn't known.
    pending: Vec<Version>,
}

/// What every block that the journal names may hold.
#[derive(Debug, Clone, Default)]
pub struct Model {
    blocks: BTreeMap<u64, BlockHistory>,
    /// Of blocks that `blocks` doesn't name.
    elsewhere: BlockHistory,
    last_generation: u64,
    acknowledged_writes: u64,
}

/// A block that doesn't hold what it must.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which block.
    pub lba: u64,
    /// What it must hold, in words.
    pub expected: String,
    /// What it holds.
    pub found: BlockState,
    /// The kind of fault, in a word.
    pub kind: ViolationKind,
}

/// Kinds of faults a check tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ViolationKind {
    /// An acknowledged write isn't there, nor anything older of ours.
    Lost,
    /// An older write than the acknowledged one is there.
    Stale,
    /// Parts of two writes.
    Torn,
    /// Another block's content.
    Misplaced,
    /// Bytes that nobody wrote.
    Damaged,
    /// A write that was never issued, or was overtaken.
    Unexpected,
    /// Reading failed: an error, but no wrong byte.
    Unreadable,
}

impl ViolationKind {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Stale => "stale",
            Self::Torn => "torn",
            Self::Misplaced => "misplaced",
            Self::Damaged => "damaged",
            Self::Unexpected => "unexpected",
            Self::Unreadable => "unreadable",
        }
    }
}

impl Model {
    /// Every block holds the pattern of `generation`: what a plain verify run expects.
    pub fn uniform(generation: u64) -> Self {
        let settled = Some(Version { generation, content: Content::Pattern });
        Self { elsewhere: BlockHistory { settled, pending: Vec::new() }, ..Self::default() }
    }

    /// Takes in one record.
    pub fn apply(&mut self, record: &Record) {
        self.last_generation = self.last_generation.max(record.generation);
        if matches!(record.event, Event::Acknowledged(_)) {
            self.acknowledged_writes += 1;
        }
        for lba in record.slba..record.slba.saturating_add(u64::from(record.lba_count)) {
            self.blocks.entry(lba).or_default().apply(record.event, record.generation);
        }
    }

    /// The highest generation used so far; the next run begins above it.
    pub fn last_generation(&self) -> u64 {
        self.last_generation
    }

    /// How many writes were acknowledged.
    pub fn acknowledged_writes(&self) -> u64 {
        self.acknowledged_writes
    }

    /// How many blocks have an acknowledged (or seen) write.
    pub fn settled_blocks(&self) -> usize {
        self.blocks.values().filter(|b| b.settled.is_some()).count()
    }

    /// Runs of neighbouring blocks that the journal names, each at most `max_blocks` long.
    pub fn runs(&self, max_blocks: u64) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for &lba in self.blocks.keys() {
            match runs.last_mut() {
                Some((start, count)) if *start + *count == lba && *count < max_blocks.max(1) => *count += 1,
                _ => runs.push((lba, 1)),
            }
        }
        runs
    }

    /// Compares one block that was read with what it may hold. On success gives the record to append, so that the
    /// value seen can't be taken back later; `None` where nothing was open.
    pub fn check(&self, pattern: Pattern, lba: u64, block: &[u8]) -> Result<Option<Record>, Violation> {
        let state = pattern.inspect(lba, block);
        let history = self.blocks.get(&lba).unwrap_or(&self.elsewhere);
        match history.matching(&state) {
            Ok(version) if history.pending.is_empty() && history.settled == version => Ok(None),
            Ok(version) => {
                let version = version.unwrap_or(Version { generation: 0, content: Content::Pattern });
                let event = Event::Seen(version.content);
                Ok(Some(Record { event, lba_count: 1, slba: lba, generation: version.generation }))
            }
            Err(kind) => Err(Violation { lba, expected: history.describe(), found: state, kind }),
        }
    }
}

impl BlockHistory {
    fn apply(&mut self, event: Event, generation: u64) {
        match event {
            Event::Issued(content) => self.pending.push(Version { generation, content }),
            Event::Acknowledged(content) => {
                self.settled = Some(Version { generation, content });
                self.pending.retain(|p| p.generation > generation);
            }
            Event::Seen(content) => {
                self.settled = (generation != 0).then_some(Version { generation, content });
                self.pending.clear();
            }
        }
    }

    /// Which allowed version `state` is (`None`: content from before the journal), or what is wrong with it.
    fn matching(&self, state: &BlockState) -> Result<Option<Version>, ViolationKind> {
        match state {
            BlockState::Whole { generation } => self.matching_generation(*generation).map(Some),
            BlockState::Zero => self.matching_zeroes(),
            BlockState::Foreign { .. } if self.settled.is_none() => Ok(None),
            BlockState::Foreign { .. } => Err(ViolationKind::Lost),
            BlockState::Misplaced { .. } => Err(ViolationKind::Misplaced),
            BlockState::Torn { .. } => Err(ViolationKind::Torn),
            BlockState::Damaged { .. } => Err(ViolationKind::Damaged),
        }
    }

    fn matching_generation(&self, generation: u64) -> Result<Version, ViolationKind> {
        let allowed = self.settled.iter().chain(&self.pending);
        if let Some(version) = allowed.clone().find(|v| v.generation == generation && v.content == Content::Pattern) {
            return Ok(*version);
        }
        match self.settled {
            Some(settled) if generation < settled.generation => Err(ViolationKind::Stale),
            _ => Err(ViolationKind::Unexpected),
        }
    }

    /// The newest zeroing that may be there: with more than one pending, seeing zeroes doesn't tell which.
    fn matching_zeroes(&self) -> Result<Option<Version>, ViolationKind> {
        let zeroing = self.pending.iter().rev().chain(&self.settled).find(|v| v.content == Content::Zeroes);
        match (zeroing, self.settled) {
            (Some(version), _) => Ok(Some(*version)),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(ViolationKind::Lost),
        }
    }

    fn describe(&self) -> String {
        let name = |v: &Version| match v.content {
            Content::Pattern => format!("generation {}", v.generation),
            Content::Zeroes => format!("zeroes (generation {})", v.generation),
        };
        let mut words = match &self.settled {
            Some(settled) => format!("{} (acknowledged)", name(settled)),
            None => "what was there before".to_owned(),
        };
        for pending in &self.pending {
            words.push_str(&format!(" or {} (issued)", name(pending)));
        }
        words
    }
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
