//! File I/O by both engines: results, ends of files, and files that hang.

use std::fs::File;
use std::future::Future;
use std::io::{self, Write};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use nvmf_target::buffer::{BufferPool, IoBuf};

use super::{Action, Disk, DiskEngine, DiskFile, LANE_DEPTH, Opening};
use crate::buffers::{Buffers, Plan, SizeClass};
use crate::reactor::doorbell::Doorbell;

fn disk(engine: DiskEngine) -> Disk {
    Disk::new(engine, Arc::new(Doorbell::new().unwrap()), Arc::default())
}

/// Turns the disk until `future` is done.
fn wait<F: Future + Unpin>(disk: &Disk, mut future: F) -> F::Output {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Poll::Ready(output) = std::pin::Pin::new(&mut future).poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
        assert!(Instant::now() < deadline, "not done");
        disk.turn();
        std::thread::yield_now();
    }
}

fn on_each_engine(check: impl Fn(&Disk)) {
    for engine in [DiskEngine::Auto, DiskEngine::Threads] {
        check(&disk(engine));
    }
}

fn file_of(bytes: u64, direct: bool) -> (tempfile::TempDir, Arc<DiskFile>) {
    let dir = crate::reactor::disk::folder_on_disk();
    let opening = Opening { unit_bytes: 4096, direct, create_bytes: Some(bytes) };
    let file = DiskFile::regular(&dir.path().join("file"), &opening).unwrap();
    (dir, file)
}

fn buffer(len: usize, byte: u8) -> IoBuf {
    let mut buffer = IoBuf::heap(len);
    buffer.fill(byte);
    buffer
}

fn writes_are_read_back(disk: &Disk, file: &Arc<DiskFile>) {
    let writes: Vec<_> =
        (0..100_u8).map(|i| disk.start(file, Action::Write, u64::from(i) * 8192, Some(buffer(8192, i)))).collect();
    for write in writes {
        assert!(wait(disk, write).0.is_ok());
    }
    assert!(wait(disk, disk.start(file, Action::Sync, 0, None)).0.is_ok());
    assert!(wait(disk, disk.start(file, Action::PunchHole { len: 8192 }, 8192 * 7, None)).0.is_ok());
    for i in (0..100_u8).rev() {
        let read = disk.start(file, Action::Read, u64::from(i) * 8192, Some(buffer(8192, 0xFF)));
        let (result, buffer) = wait(disk, read);
        let expected = if i == 7 { 0 } else { i };
        assert!(result.is_ok() && buffer.unwrap().iter().all(|&b| b == expected), "{i}");
    }
    assert_eq!(disk.under_way(), 0);
}

#[test]
fn each_engine_reads_what_it_wrote() {
    on_each_engine(|disk| {
        writes_are_read_back(disk, &DiskFile::memory(1 << 20).unwrap());
        for direct in [false, true] {
            let (_dir, file) = file_of(1 << 20, direct);
            writes_are_read_back(disk, &file);
        }
    });
}

/// A member that was cut short: an error, and no byte made up.
#[test]
fn reading_past_the_end_is_an_error() {
    on_each_engine(|disk| {
        let (_dir, file) = file_of(16 << 10, false);
        for offset in [12 << 10, 16 << 10, 1 << 40] {
            let (result, buffer) = wait(disk, disk.start(&file, Action::Read, offset, Some(buffer(8192, 0))));
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{offset}");
            assert_eq!(buffer.unwrap().len(), 8192);
        }
    });
}

#[test]
fn errors_of_the_system_arrive_as_they_are() {
    on_each_engine(|disk| {
        let full = DiskFile::of_descriptor(File::options().write(true).open("/dev/full").unwrap());
        let (result, _) = wait(disk, disk.start(&full, Action::Write, 0, Some(buffer(4096, 1))));
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::StorageFull);
        let (result, _) = wait(disk, disk.start(&full, Action::Read, 0, Some(buffer(4096, 1))));
        assert_eq!(result.unwrap_err().raw_os_error(), Some(nix::libc::EBADF));
    });
}

/// A pipe stands for a file that hangs: reads don't end until something is written.
fn hung() -> (Arc<DiskFile>, File) {
    let (reader, writer) = nix::unistd::pipe().unwrap();
    (DiskFile::of_descriptor(File::from(reader)), File::from(writer))
}

/// H144: a buffer that the kernel has stays out of the pool when its future is dropped, until the kernel gives it
/// back; those that it doesn't have yet come back at once; other files go on.
#[test]
fn h144_a_hung_file_keeps_its_buffers_and_only_those() {
    on_each_engine(|disk| {
        let plan = Plan::new(vec![SizeClass { bytes: 4096, count: LANE_DEPTH + 16, reserved: false }]);
        let pool = Buffers::in_memory(&plan).unwrap();
        let (pipe, mut writer) = hung();
        let mut reads: Vec<_> =
            (0..LANE_DEPTH + 8).map(|_| disk.start(&pipe, Action::Read, 0, Some(pool.take(4096).unwrap()))).collect();
        for _ in 0..10 {
            disk.turn();
        }
        assert_eq!((disk.under_way(), pool.snapshot()[0].used), (LANE_DEPTH, LANE_DEPTH + 8));
        reads.drain(4..);
        assert_eq!(pool.snapshot()[0].used, LANE_DEPTH, "those that were waiting came back");

        let (_dir, file) = file_of(1 << 20, false);
        writes_are_read_back_beside(disk, &file, LANE_DEPTH);

        // More than a pipe holds.
        let writing = std::thread::spawn(move || writer.write_all(&[7; 4096 * LANE_DEPTH]));
        for read in reads {
            let (result, buffer) = wait(disk, read);
            assert!(result.is_ok() && buffer.unwrap().iter().all(|&b| b == 7));
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while disk.under_way() > 0 {
            assert!(Instant::now() < deadline);
            disk.turn();
        }
        assert_eq!(pool.used_bytes(), 0);
        writing.join().unwrap().unwrap();
    });
}

fn writes_are_read_back_beside(disk: &Disk, file: &Arc<DiskFile>, hung: usize) {
    for i in 0..20_u8 {
        assert!(wait(disk, disk.start(file, Action::Write, 4096, Some(buffer(4096, i)))).0.is_ok());
        assert!(wait(disk, disk.start(file, Action::Sync, 0, None)).0.is_ok());
        let (_, read) = wait(disk, disk.start(file, Action::Read, 4096, Some(buffer(4096, 0xFF))));
        assert!(read.unwrap().iter().all(|&b| b == i));
    }
    assert_eq!(disk.under_way(), hung);
}

/// H144: what is still with the kernel when the disk goes is never freed, and nothing crashes.
#[test]
fn h144_a_disk_that_goes_leaves_the_kernel_its_buffers() {
    for engine in [DiskEngine::Auto, DiskEngine::Threads] {
        let disk = disk(engine);
        let plan = Plan::new(vec![SizeClass { bytes: 4096, count: 2, reserved: false }]);
        let pool = Buffers::in_memory(&plan).unwrap();
        let (pipe, mut writer) = hung();
        let read = disk.start(&pipe, Action::Read, 0, pool.take(4096));
        disk.turn();
        drop(read);
        drop(disk);
        assert_eq!(pool.snapshot()[0].used, 1);
        writer.write_all(&[1; 4096]).unwrap();
    }
}

/// H144: without locked memory the engine works all the same, or another takes its place.
#[test]
fn h144_no_locked_memory() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
    setrlimit(Resource::RLIMIT_MEMLOCK, 0, hard).unwrap();
    let disk = disk(DiskEngine::Auto);
    setrlimit(Resource::RLIMIT_MEMLOCK, soft, hard).unwrap();
    let (_dir, file) = file_of(1 << 20, true);
    writes_are_read_back(&disk, &file);
}
