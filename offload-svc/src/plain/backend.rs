//! The back end itself: requests onto a file, whatever kind it is.
//!
//! Owns the requests under way. Must not know how file I/O is done (`reactor` does it). Invariant: a request is
//! answered once, with what the file said.

use std::io;
use std::path::Path;
use std::sync::Arc;

use nvmf_target::backend::{Backend, Done, Geometry, LbaRange, Operation, Outcome, Reply};
use nvmf_target::buffer::IoBuf;
use uuid::Uuid;

use super::range_lock::{Access, RangeLocks};
use crate::config::values::{BackendSpec, BlockSize};
use crate::reactor::disk::{DiskFile, FileError, Opening};
use crate::reactor::{Local, Reactors};

/// One piece of a long Compare, Verify or zeroing by hand.
const PIECE_BYTES: u64 = 256 << 10;
/// One piece of a long Deallocate or Write Zeroes: short enough to let others in between.
const HOLE_BYTES: u64 = 256 << 20;

/// Why a plain back end could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum PlainError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// Not one block long.
    #[error("{spec}: {bytes} bytes hold no block of {block_bytes} bytes")]
    TooSmall {
        /// As the configuration has it.
        spec: BackendSpec,
        /// Its size.
        bytes: u64,
        /// Its block size.
        block_bytes: u32,
    },
    /// A pool volume is not plain.
    #[error("{spec}: not a plain back end")]
    NotPlain {
        /// As the configuration has it.
        spec: BackendSpec,
    },
}

/// A plain namespace's back end.
pub struct PlainBackend {
    reactors: Reactors,
    store: Arc<Store>,
    uuid: Uuid,
}

/// What requests work on.
struct Store {
    file: Arc<DiskFile>,
    block_bytes: u32,
    block_count: u64,
    /// Space can be given back.
    deallocate: bool,
    locks: RangeLocks,
}

impl PlainBackend {
    /// Opens what `spec` names. `identity` (the subsystem's name and the nsid) makes its UUID, together with the
    /// machine and `spec`, so that it is the same after every restart and nobody else's. Blocks.
    pub fn open(
        spec: &BackendSpec,
        block_size: BlockSize,
        identity: &str,
        reactors: &Reactors,
    ) -> Result<Arc<Self>, PlainError> {
        let block_bytes = block_size.bytes();
        let opening = Opening { unit_bytes: block_bytes as usize, direct: true, create_bytes: None };
        let file = match spec {
            BackendSpec::Mem(size) => DiskFile::memory(size.0)?,
            BackendSpec::File(path) => DiskFile::regular(path, &opening)?,
            BackendSpec::Block(path) => DiskFile::block_device(path, &opening)?,
            BackendSpec::Pool(_) => return Err(PlainError::NotPlain { spec: spec.clone() }),
        };
        let block_count = file.size_bytes() / u64::from(block_bytes);
        if block_count == 0 {
            return Err(PlainError::TooSmall { spec: spec.clone(), bytes: file.size_bytes(), block_bytes });
        }
        let deallocate = file.gives_space_back();
        let store = Store { file, block_bytes, block_count, deallocate, locks: RangeLocks::default() };
        let uuid = uuid_of(spec, identity);
        Ok(Arc::new(Self { reactors: reactors.clone(), store: Arc::new(store), uuid }))
    }
}

/// A name-based UUID (RFC 9562 version 5).
fn uuid_of(spec: &BackendSpec, identity: &str) -> Uuid {
    let machine = std::fs::read_to_string(Path::new("/etc/machine-id")).unwrap_or_default();
    let name = format!("sluice plain namespace\n{}\n{identity}\n{spec}", machine.trim());
    Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes())
}

impl Backend for PlainBackend {
    fn geometry(&self) -> Geometry {
        let store = &self.store;
        Geometry {
            block_bytes: store.block_bytes,
            block_count: store.block_count,
            used_blocks: store.block_count,
            deallocate: store.deallocate,
            preferred_write_blocks: 4096 / store.block_bytes,
            // What was written to a file or device is safe only after fdatasync.
            volatile_write_cache: !store.file.is_memory(),
        }
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn submit(&self, operation: Operation, done: Done) {
        let store = self.store.clone();
        let start = move |local: &Local| {
            let local_there = local.clone();
            local.spawn(async move { done.finish(store.perform(&local_there, operation).await) });
        };
        match Local::current() {
            Some(local) => start(&local),
            // A caller that is no reactor: any reactor will do. If it has ended, `done` answers for itself.
            None => drop(self.reactors.run_on(0, start)),
        }
    }
}

/// How a request ended, where it did not end well.
type Failed = Outcome;

impl Store {
    async fn perform(&self, local: &Local, operation: Operation) -> Reply {
        match operation {
            Operation::Read { range, buffer } => self.read(local, range, buffer).await,
            Operation::Write { range, buffer, fua } => self.write(local, range, buffer, fua).await,
            Operation::Flush => reply(self.flush(local).await, None),
            Operation::Compare { range, buffer } => {
                let _held = self.locks.claim(range, Access::Read).await;
                reply(self.compare(local, range, &buffer).await, Some(buffer))
            }
            Operation::CompareAndWrite { range, expected, buffer, fua } => {
                self.compare_and_write(local, range, expected, buffer, fua).await
            }
            Operation::WriteZeroes { range, deallocate, fua } => {
                reply(self.write_zeroes(local, range, deallocate, fua).await, None)
            }
            Operation::Deallocate { ranges } => reply(self.deallocate(local, &ranges).await, None),
            Operation::Verify { range } => {
                let _held = self.locks.claim(range, Access::Read).await;
                reply(self.each_piece(local, range, |_, _| Ok(())).await, None)
            }
        }
    }

    /// Where a range begins and how long it is, in bytes; checked once more, since a wrong offset would be somebody
    /// else's data.
    fn bytes_of(&self, range: LbaRange) -> Result<(u64, u64), Failed> {
        let end = range.slba.checked_add(range.lba_count).ok_or(Outcome::LbaOutOfRange)?;
        if end > self.block_count {
            return Err(Outcome::LbaOutOfRange);
        }
        let block = u64::from(self.block_bytes);
        Ok((range.slba * block, range.lba_count * block))
    }

    /// The same, for a range that a buffer goes with.
    fn offset_of(&self, range: LbaRange, buffer: &IoBuf) -> Result<u64, Failed> {
        let (offset, len) = self.bytes_of(range)?;
        if buffer.len() as u64 == len { Ok(offset) } else { Err(Outcome::InternalError) }
    }

    async fn read(&self, local: &Local, range: LbaRange, buffer: IoBuf) -> Reply {
        let offset = match self.offset_of(range, &buffer) {
            Ok(offset) => offset,
            Err(outcome) => return Reply { outcome, buffer: Some(buffer) },
        };
        let _held = self.locks.claim(range, Access::Read).await;
        let (result, buffer) = local.read(&self.file, offset, buffer).await;
        reply(result.map_err(|error| self.unreadable(range.slba, &error)), Some(buffer))
    }

    async fn write(&self, local: &Local, range: LbaRange, buffer: IoBuf, fua: bool) -> Reply {
        let held = self.locks.claim(range, Access::Write).await;
        let (result, buffer) = self.store(local, range, buffer).await;
        drop(held);
        let result = match result {
            Ok(()) if fua => self.flush(local).await,
            result => result,
        };
        reply(result, Some(buffer))
    }

    /// Writes; the range is held.
    async fn store(&self, local: &Local, range: LbaRange, buffer: IoBuf) -> (Result<(), Failed>, IoBuf) {
        match self.offset_of(range, &buffer) {
            Ok(offset) => {
                let (result, buffer) = local.write(&self.file, offset, buffer).await;
                (result.map_err(|error| self.unwritable(&error)), buffer)
            }
            Err(outcome) => (Err(outcome), buffer),
        }
    }

    async fn flush(&self, local: &Local) -> Result<(), Failed> {
        if self.file.is_memory() {
            return Ok(());
        }
        local.sync(&self.file).await.map_err(|error| self.unwritable(&error))
    }

    /// Reads a range piece by piece and shows each, with its offset in the range.
    async fn each_piece(
        &self,
        local: &Local,
        range: LbaRange,
        mut look: impl FnMut(usize, &[u8]) -> Result<(), Failed>,
    ) -> Result<(), Failed> {
        let (offset, len) = self.bytes_of(range)?;
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(PIECE_BYTES);
            let buffer = local.buffer(piece as usize).await;
            let (result, buffer) = local.read(&self.file, offset + done, buffer).await;
            let slba = range.slba + done / u64::from(self.block_bytes);
            result.map_err(|error| self.unreadable(slba, &error))?;
            look(done as usize, &buffer)?;
            done += piece;
        }
        Ok(())
    }

    async fn compare(&self, local: &Local, range: LbaRange, expected: &IoBuf) -> Result<(), Failed> {
        self.offset_of(range, expected)?;
        self.each_piece(local, range, |at, piece| {
            let same = expected.get(at..at + piece.len()).is_some_and(|part| part == piece);
            if same { Ok(()) } else { Err(Outcome::CompareFailure) }
        })
        .await
    }

    async fn compare_and_write(
        &self,
        local: &Local,
        range: LbaRange,
        expected: IoBuf,
        buffer: IoBuf,
        fua: bool,
    ) -> Reply {
        let held = self.locks.claim(range, Access::Write).await;
        if let Err(outcome) = self.compare(local, range, &expected).await {
            return Reply { outcome, buffer: Some(buffer) };
        }
        drop(expected);
        let (result, buffer) = self.store(local, range, buffer).await;
        drop(held);
        let result = match result {
            Ok(()) if fua => self.flush(local).await,
            result => result,
        };
        reply(result, Some(buffer))
    }

    async fn write_zeroes(&self, local: &Local, range: LbaRange, deallocate: bool, fua: bool) -> Result<(), Failed> {
        self.zero(local, range, deallocate && self.deallocate).await?;
        if fua { self.flush(local).await } else { Ok(()) }
    }

    async fn deallocate(&self, local: &Local, ranges: &[LbaRange]) -> Result<(), Failed> {
        for range in ranges {
            self.bytes_of(*range)?;
        }
        if self.deallocate {
            for range in ranges {
                self.zero(local, *range, true).await?;
            }
        }
        Ok(())
    }

    /// Makes a range read as zeroes, in pieces between which others have their turn.
    async fn zero(&self, local: &Local, range: LbaRange, punch: bool) -> Result<(), Failed> {
        self.bytes_of(range)?;
        let most = HOLE_BYTES / u64::from(self.block_bytes);
        let mut done = 0;
        while done < range.lba_count {
            let lba_count = (range.lba_count - done).min(most);
            let piece = LbaRange { slba: range.slba + done, lba_count };
            let held = self.locks.claim(piece, Access::Write).await;
            self.zero_piece(local, piece, punch).await?;
            drop(held);
            done += lba_count;
        }
        Ok(())
    }

    /// By the file system where it can, otherwise by hand.
    async fn zero_piece(&self, local: &Local, range: LbaRange, punch: bool) -> Result<(), Failed> {
        let (offset, len) = self.bytes_of(range)?;
        if len == 0 {
            return Ok(());
        }
        let result = match punch {
            true => local.punch_hole(&self.file, offset, len).await,
            false => local.zero_range(&self.file, offset, len).await,
        };
        match result {
            Ok(()) => Ok(()),
            Err(error) if is_unable(&error) => self.zero_by_hand(local, offset, len).await,
            Err(error) => Err(self.unwritable(&error)),
        }
    }

    async fn zero_by_hand(&self, local: &Local, offset: u64, len: u64) -> Result<(), Failed> {
        let mut buffer = local.buffer(len.min(PIECE_BYTES) as usize).await;
        buffer.fill(0);
        let mut done = 0;
        while done < len {
            buffer.set_len((len - done).min(PIECE_BYTES) as usize);
            let piece = buffer.len() as u64;
            let (result, back) = local.write(&self.file, offset + done, buffer).await;
            result.map_err(|error| self.unwritable(&error))?;
            buffer = back;
            done += piece;
        }
        Ok(())
    }

    fn unreadable(&self, slba: u64, error: &io::Error) -> Failed {
        tracing::warn!("a plain namespace's read failed: {error}");
        Outcome::UnrecoveredRead { slba }
    }

    fn unwritable(&self, error: &io::Error) -> Failed {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Outcome::CapacityExceeded,
            _ => {
                tracing::warn!("a plain namespace's write failed: {error}");
                Outcome::WriteFault
            }
        }
    }
}

/// Whether the file can't do it at all (or not on these boundaries), so that it must be done by hand.
fn is_unable(error: &io::Error) -> bool {
    use nix::libc::{EINVAL, ENODEV, ENOSYS, EOPNOTSUPP};
    matches!(error.raw_os_error(), Some(EOPNOTSUPP | ENOSYS | ENODEV | EINVAL))
}

fn reply(result: Result<(), Failed>, buffer: Option<IoBuf>) -> Reply {
    Reply { outcome: result.err().unwrap_or(Outcome::Success), buffer }
}
