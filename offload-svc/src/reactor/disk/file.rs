//! Files, block devices and memory, opened for a reactor's file I/O.
//!
//! Owns the opening: creation at a size, the lock against a second user, direct I/O where the file allows it. Must not
//! know what is stored. Invariant: a file that is there is opened as it is; nothing in it is changed by opening.

use std::ffi::CString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};
use nix::libc;
use nvmf_target::buffer::IoBuf;

/// How to open a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    /// The smallest piece and alignment that will be read and written; decides whether direct I/O is possible.
    pub unit_bytes: usize,
    /// Goes around the page cache where the file allows it.
    pub direct: bool,
    /// Makes the file, sparse and of this size, if it isn't there.
    pub create_bytes: Option<u64>,
}

/// Why a file could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refuses.
    #[error("{}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It could not be made.
    #[error("{}: cannot be made with {bytes} bytes: {source}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// Why.
        source: io::Error,
    },
    /// `file:` of something else.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// `block:` of something else.
    #[error("{}: not a block device", path.display())]
    NotABlockDevice {
        /// The path.
        path: PathBuf,
    },
    /// Someone else has it open for use.
    #[error("{}: in use by another process, or by this service twice", path.display())]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// No memory for a `mem:` one.
    #[error("no memory of {bytes} bytes: {source}")]
    Memory {
        /// How much.
        bytes: u64,
        /// Why.
        source: io::Error,
    },
}

impl FileError {
    /// Whether it says that nothing has that name.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Open { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// An open file, device or piece of memory.
#[derive(Debug)]
pub struct DiskFile {
    file: Handle,
    /// Unique in this process.
    id: u64,
    size_bytes: u64,
    kind: Kind,
    direct: bool,
    submission_blocks: bool,
    /// This opening has made it: it was not there, and was not made by anyone else meanwhile.
    made: bool,
}

/// The open descriptor; the lock goes with it.
#[derive(Debug)]
enum Handle {
    Locked(Flock<File>),
    Plain(File),
}

impl Handle {
    fn file(&self) -> &File {
        match self {
            Self::Locked(file) => file,
            Self::Plain(file) => file,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Regular,
    BlockDevice,
    Memory,
}

impl DiskFile {
    /// Opens (or makes) a regular file.
    pub fn regular(path: &Path, opening: &Opening) -> Result<Arc<Self>, FileError> {
        let made = match opening.create_bytes {
            Some(bytes) => create(path, bytes)?,
            None => None,
        };
        let (file, direct) = open(path, opening)?;
        let metadata = file.file().metadata().map_err(|source| FileError::Open { path: path.to_owned(), source })?;
        if !metadata.is_file() {
            return Err(FileError::NotAFile { path: path.to_owned() });
        }
        // Another file may have got the name since.
        let made = made.is_some_and(|made| made == identity(&metadata));
        Ok(Self::of_kind(file, metadata.len(), Kind::Regular, direct, made))
    }

    /// Opens a block device.
    pub fn block_device(path: &Path, opening: &Opening) -> Result<Arc<Self>, FileError> {
        let failed = |source| FileError::Open { path: path.to_owned(), source };
        // Looked at before it is opened: opening a FIFO or a tape does things.
        if !path.metadata().map_err(failed)?.file_type().is_block_device() {
            return Err(FileError::NotABlockDevice { path: path.to_owned() });
        }
        let (file, direct) = open(path, opening)?;
        let size_bytes = file.file().seek(SeekFrom::End(0)).map_err(failed)?;
        Ok(Self::new(file, size_bytes, Kind::BlockDevice, direct))
    }

    /// Memory of a size, taken as it is written to and gone with the last user.
    pub fn memory(bytes: u64) -> Result<Arc<Self>, FileError> {
        use nix::sys::memfd::{MFdFlags, memfd_create};
        let failed = |source: io::Error| FileError::Memory { bytes, source };
        let name = CString::new("sluice").unwrap_or_default();
        let descriptor = memfd_create(name.as_c_str(), MFdFlags::MFD_CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let file = File::from(descriptor);
        file.set_len(bytes).map_err(failed)?;
        Ok(Self::new(Handle::Plain(file), bytes, Kind::Memory, false))
    }

    fn new(file: Handle, size_bytes: u64, kind: Kind, direct: bool) -> Arc<Self> {
        Self::of_kind(file, size_bytes, kind, direct, false)
    }

    fn of_kind(file: Handle, size_bytes: u64, kind: Kind, direct: bool, made: bool) -> Arc<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let submission_blocks = kind == Kind::Regular && direct && !honours_nowait(file.file());
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { file, id, size_bytes, kind, direct, submission_blocks, made })
    }

    /// An open descriptor of any kind, for tests of what hangs.
    #[cfg(test)]
    pub(crate) fn of_descriptor(file: File) -> Arc<Self> {
        Self::new(Handle::Plain(file), 0, Kind::Regular, false)
    }

    /// Its size when it was opened.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether I/O goes around the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether handing a request to io_uring may wait for its answer, so that a kernel thread must do it.
    pub(crate) fn submission_blocks(&self) -> bool {
        self.submission_blocks
    }

    /// Whether it is memory.
    pub fn is_memory(&self) -> bool {
        self.kind == Kind::Memory
    }

    /// Whether it is a block device.
    pub fn is_block_device(&self) -> bool {
        self.kind == Kind::BlockDevice
    }

    /// Whether it is a regular file.
    pub fn is_regular(&self) -> bool {
        self.kind == Kind::Regular
    }

    /// Makes a regular file that is shorter as long as `bytes`; what is added reads as zeroes.
    pub fn grow(&self, bytes: u64) -> io::Result<()> {
        if !self.is_regular() || self.file().metadata()?.len() >= bytes {
            return Ok(());
        }
        self.file().set_len(bytes)?;
        self.file().sync_all()
    }

    /// Removes `path` if it leads to this file and this opening has made it; says whether it did. It is locked until it is
    /// closed, so nobody else uses it.
    pub fn remove_if_made(&self, path: &Path) -> io::Result<bool> {
        if !self.made || identity(&path.symlink_metadata()?) != identity(&self.file().metadata()?) {
            return Ok(false);
        }
        std::fs::remove_file(path).map(|()| true)
    }

    /// Whether space that is deallocated is given back, and reads as zeroes afterwards.
    pub fn gives_space_back(&self) -> bool {
        match self.kind {
            Kind::Memory => true,
            // Beyond its end: tells whether the file system can, and changes nothing.
            Kind::Regular => {
                let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                let end = i64::try_from(self.size_bytes.next_multiple_of(4096)).unwrap_or(i64::MAX - 4096);
                fallocate(self.file(), flags, end, 4096).is_ok()
            }
            Kind::BlockDevice => self.device_setting("write_zeroes_unmap_max_hw_bytes", "discard_max_bytes") > 0,
        }
    }

    /// A number from the device's queue in sysfs: the first of the two files that is there.
    fn device_setting(&self, name: &str, older_name: &str) -> u64 {
        let Ok(metadata) = self.file().metadata() else { return 0 };
        let (major, minor) = (nix::sys::stat::major(metadata.rdev()), nix::sys::stat::minor(metadata.rdev()));
        let device = format!("/sys/dev/block/{major}:{minor}");
        // A partition has no queue of its own: its disk's is one level up.
        let read = |name: &str| {
            ["queue", "../queue"]
                .iter()
                .find_map(|queue| std::fs::read_to_string(format!("{device}/{queue}/{name}")).ok()?.trim().parse().ok())
        };
        read(name).or_else(|| read(older_name)).unwrap_or(0)
    }

    /// The open file. Only for what can't block: a reactor's I/O goes through its `Disk`.
    pub fn file(&self) -> &File {
        self.file.file()
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn never_blocks(&self) -> bool {
        self.is_memory()
    }
}

impl AsRawFd for DiskFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file().as_raw_fd()
    }
}

/// Makes a sparse file unless there is one; gives its identity if it was made. An empty one counts as one whose making was
/// interrupted, and is completed.
fn create(path: &Path, bytes: u64) -> Result<Option<(u64, u64)>, FileError> {
    let failed = |source| FileError::Create { path: path.to_owned(), bytes, source };
    let mut writing = OpenOptions::new();
    writing.write(true).mode(0o600);
    let (file, made) = match path.metadata() {
        Ok(metadata) if metadata.is_file() && metadata.len() == 0 => (writing.open(path).map_err(failed)?, None),
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match writing.create_new(true).open(path) {
            Ok(file) => {
                let made = identity(&file.metadata().map_err(failed)?);
                (file, Some(made))
            }
            // It came meanwhile, and is opened as it is.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(failed(error)),
        },
        Err(error) => return Err(failed(error)),
    };
    file.set_len(bytes).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    // The name must outlive a power cut as well.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
    Ok(made)
}

/// Device and inode.
fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Opens and locks; says whether for direct I/O.
fn open(path: &Path, opening: &Opening) -> Result<(Handle, bool), FileError> {
    let failed = |source| FileError::Open { path: path.to_owned(), source };
    if opening.direct {
        match options().custom_flags(libc::O_DIRECT | libc::O_CLOEXEC | libc::O_NOCTTY).open(path) {
            Ok(file) if direct_works(&file, opening.unit_bytes) => return locked(file, path).map(|file| (file, true)),
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(failed(error)),
        }
    }
    let file = options().custom_flags(libc::O_CLOEXEC | libc::O_NOCTTY).open(path).map_err(failed)?;
    locked(file, path).map(|file| (file, false))
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    options
}

/// Whether direct I/O takes pieces of this size, tried by a read.
fn direct_works(file: &File, unit_bytes: usize) -> bool {
    let mut piece = IoBuf::heap(unit_bytes);
    // A second unit in the first 4 KiB shows whether offsets that small are taken, too.
    file.read_at(&mut piece, unit_bytes as u64 % 4096).is_ok()
}

/// Whether direct I/O on this file system turns back rather than wait when io_uring first tries a request inline. FUSE, for
/// one, doesn't (seen on 6.18: a file that hung stopped the reactor); those known to are listed, others are not trusted.
fn honours_nowait(file: &File) -> bool {
    use nix::sys::statfs::{BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, fstatfs};
    fstatfs(file)
        .is_ok_and(|status| [EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC].contains(&status.filesystem_type()))
}

fn locked(file: File, path: &Path) -> Result<Handle, FileError> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(file) => Ok(Handle::Locked(file)),
        Err((_, Errno::EWOULDBLOCK)) => Err(FileError::InUse { path: path.to_owned() }),
        // A file system without locks must not keep anyone from using it.
        Err((file, Errno::ENOTSUP | Errno::ENOLCK | Errno::ENOSYS)) => Ok(Handle::Plain(file)),
        Err((_, errno)) => Err(FileError::Open { path: path.to_owned(), source: errno.into() }),
    }
}
