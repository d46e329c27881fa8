//! `fault-file MOUNTPOINT BACKING`: a FUSE file system with one file, `data`, that passes through to BACKING and can be
//! made to fail.
//!
//! Writing a word to its file `fault` says how `data` fails from now on: `none`, `eio` (every request), `hang` (requests
//! are held and done once the fault changes), `full` (writes: no space). Reading `fault` gives the word and how many
//! requests are held. It must not know what is stored. Requests held are never lost: they are done, late, like those of
//! a disk that hung. The file system goes when standard input ends, so with whoever started it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    Request, TimeOrNow, WriteFlags,
};

const DATA: INodeNo = INodeNo(2);
const FAULT: INodeNo = INodeNo(3);
/// No attribute is cached: a file that was cut short shows at once.
const NO_CACHE: Duration = Duration::ZERO;

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    Eio,
    Hang,
    Full,
}

impl Fault {
    fn parse(word: &str) -> Option<Fault> {
        Some(match word.trim() {
            "none" => Fault::None,
            "eio" => Fault::Eio,
            "hang" => Fault::Hang,
            "full" => Fault::Full,
            _ => return None,
        })
    }

    fn word(self) -> &'static str {
        match self {
            Fault::None => "none",
            Fault::Eio => "eio",
            Fault::Hang => "hang",
            Fault::Full => "full",
        }
    }
}

struct State {
    fault: Fault,
    held: Vec<Box<dyn FnOnce() + Send>>,
}

struct FaultFile {
    backing: Arc<File>,
    state: Mutex<State>,
}

impl FaultFile {
    /// Runs a request, or holds it back; `fail` answers it when the fault says so. `writes` is whether it takes space.
    fn request<R: Send + 'static>(
        &self,
        reply: R,
        writes: bool,
        fail: impl FnOnce(R, Errno),
        run: impl FnOnce(R, &File) + Send + 'static,
    ) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.fault {
            Fault::Eio => fail(reply, Errno::EIO),
            Fault::Full if writes => fail(reply, Errno::ENOSPC),
            Fault::Hang => {
                let backing = self.backing.clone();
                state.held.push(Box::new(move || run(reply, &backing)));
            }
            Fault::None | Fault::Full => {
                drop(state);
                run(reply, &self.backing);
            }
        }
    }

    fn set(&self, fault: Fault) {
        let held = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.fault = fault;
            if fault == Fault::Hang { Vec::new() } else { std::mem::take(&mut state.held) }
        };
        held.into_iter().for_each(|run| run());
    }

    fn describe(&self) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        format!("{} {}\n", state.fault.word(), state.held.len())
    }

    fn attributes(&self, inode: INodeNo) -> std::io::Result<FileAttr> {
        let size = match inode {
            DATA => self.backing.metadata()?.len(),
            _ => 0,
        };
        let (kind, perm) =
            if inode == INodeNo::ROOT { (FileType::Directory, 0o755) } else { (FileType::RegularFile, 0o644) };
        Ok(FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: nix::unistd::getuid().as_raw(),
            gid: nix::unistd::getgid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for FaultFile {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let inode = match name.to_str() {
            Some("data") if parent == INodeNo::ROOT => DATA,
            Some("fault") if parent == INodeNo::ROOT => FAULT,
            _ => return reply.error(Errno::ENOENT),
        };
        match self.attributes(inode) {
            Ok(attributes) => reply.entry(&NO_CACHE, &attributes, Generation(0)),
            Err(error) => reply.error(error.into()),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(inode) {
            Ok(attributes) => reply.attr(&NO_CACHE, &attributes),
            Err(error) => reply.error(error.into()),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<std::time::SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<std::time::SystemTime>,
        _chgtime: Option<std::time::SystemTime>,
        _bkuptime: Option<std::time::SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let resized = match size {
            Some(size) if inode == DATA => self.backing.set_len(size),
            _ => Ok(()),
        };
        match resized.and_then(|()| self.attributes(inode)) {
            Ok(attributes) => reply.attr(&NO_CACHE, &attributes),
            Err(error) => reply.error(error.into()),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Nothing in the page cache: every read and write of the service meets the fault.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if inode == FAULT {
            let text = self.describe();
            let from = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
            return reply.data(&text.as_bytes()[from..]);
        }
        self.request(reply, false, ReplyData::error, move |reply, backing| {
            let mut bytes = vec![0; size as usize];
            match read_full(backing, &mut bytes, offset) {
                Ok(count) => reply.data(&bytes[..count]),
                Err(error) => reply.error(error.into()),
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        if inode == FAULT {
            return match std::str::from_utf8(data).ok().and_then(Fault::parse) {
                Some(fault) => {
                    self.set(fault);
                    reply.written(length);
                }
                None => reply.error(Errno::EINVAL),
            };
        }
        let bytes = data.to_vec();
        self.request(reply, true, ReplyWrite::error, move |reply, backing| {
            match backing.write_all_at(&bytes, offset) {
                Ok(()) => reply.written(length),
                Err(error) => reply.error(error.into()),
            }
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        if inode == FAULT {
            return reply.ok();
        }
        self.request(reply, false, ReplyEmpty::error, |reply, backing| match backing.sync_data() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error.into()),
        });
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.request(reply, true, ReplyEmpty::error, move |reply, backing| {
            let flags = nix::fcntl::FallocateFlags::from_bits_truncate(mode);
            let done = match (i64::try_from(offset), i64::try_from(length)) {
                (Ok(offset), Ok(length)) => nix::fcntl::fallocate(backing.as_fd(), flags, offset, length),
                _ => Err(nix::errno::Errno::EINVAL),
            };
            match done {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(Errno::from_i32(error as i32)),
            }
        });
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let entries = [(DATA, "data"), (FAULT, "fault")];
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, (inode, name)) in entries.into_iter().enumerate().skip(from) {
            if reply.add(inode, index as u64 + 1, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }
}

/// Reads until the buffer is full or the file ends.
fn read_full(file: &File, bytes: &mut [u8], offset: u64) -> std::io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64)? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(mountpoint), Some(path), None) = (arguments.next(), arguments.next(), arguments.next()) else {
        anyhow::bail!("usage: fault-file MOUNTPOINT BACKING");
    };
    let backing = Arc::new(File::options().read(true).write(true).open(&path)?);
    let state = Mutex::new(State { fault: Fault::None, held: Vec::new() });
    let mut config = fuser::Config::default();
    config.mount_options = vec![MountOption::FSName("sluice-fault-file".to_owned()), MountOption::NoAtime];
    let session = fuser::spawn_mount(FaultFile { backing, state }, &mountpoint, &config)?;
    println!("ready");
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest)?;
    session.umount_and_join()?;
    Ok(())
}
