use offload_svc::stages::cipher::Cipher;
use offload_svc::stages::compress::Compression;

use super::*;
use crate::lane::fake::Disk;
use crate::pattern::SplitMix64;

/// One disk for all members: each namespace's blocks must not meet another's, so the fake keeps them apart by nsid.
fn setup(compression: Compression, cipher: Cipher, block_bytes: u32) -> HostSetup {
    HostSetup {
        members: vec![2, 3, 4, 5, 6, 7],
        block_bytes,
        block_count: 64 << 20 >> block_bytes.trailing_zeros(),
        max_transfer_bytes: 128 << 10,
        k: 4,
        m: 2,
        compression,
        cipher,
    }
}

fn data(len: usize) -> Vec<u8> {
    let mut data = vec![0u8; len];
    SplitMix64(4).fill(&mut data[..len / 2]);
    data
}

#[test]
fn what_the_host_side_way_writes_it_reads_back_with_every_stage() {
    let bytes = data(1_000 << 12);
    let extents = Extents { data: &bytes, extent_bytes: 128 << 10 };
    for (compression, cipher) in [
        (Compression::Lz4, Cipher::Aes256Gcm),
        (Compression::None, Cipher::Aes128Xts),
        (Compression::Zstd { level: 1 }, Cipher::Aes256Xts),
    ] {
        for block_bytes in [512, 4096] {
            let disk = Disk::default();
            let setup = setup(compression, cipher, block_bytes);
            let mut queue = disk.queue(block_bytes as usize);
            for streams in [1, 3] {
                for index in 0..streams {
                    let mut stream = HostStream::new(&setup, index, streams).unwrap();
                    let written = stream.write(&extents, (index, streams), 5, &mut queue).unwrap();
                    let read = stream.read(&extents, (index, streams), 3, &mut queue).unwrap();
                    assert_eq!(read.verified_bytes, written.user_bytes);
                    assert_eq!((read.mismatched_bytes, read.latencies.count()), (0, written.latencies.count()));
                    let least = if compression == Compression::None { written.user_bytes * 3 / 2 } else { 1 };
                    assert!(written.written_bytes >= least);
                }
            }
        }
    }
}

#[test]
fn compression_and_parity_show_in_what_is_written() {
    let bytes = data(2_048 << 12);
    let extents = Extents { data: &bytes, extent_bytes: 256 << 10 };
    let disk = Disk::default();
    let mut stream = HostStream::new(&setup(Compression::Lz4, Cipher::Aes256Gcm, 4096), 0, 1).unwrap();
    let written = stream.write(&extents, (0, 1), 8, &mut disk.queue(4096)).unwrap();
    let per_byte = written.written_bytes as f64 / written.user_bytes as f64;
    // Half of the data is random, half zeroes: 0.5 times 6/4, and what stripes lose at their ends.
    assert!((0.75..0.90).contains(&per_byte), "{per_byte}");
}

#[test]
fn a_damaged_record_is_counted_as_a_mismatch() {
    let bytes = data(64 << 12);
    let extents = Extents { data: &bytes, extent_bytes: 64 << 10 };
    let disk = Disk::default();
    let mut queue = disk.queue(4096);
    let mut stream = HostStream::new(&setup(Compression::None, Cipher::Aes256Gcm, 4096), 0, 1).unwrap();
    stream.write(&extents, (0, 1), 4, &mut queue).unwrap();
    {
        let mut blocks = disk.blocks.lock().unwrap();
        let victim = *blocks.keys().filter(|lba| **lba >> 48 == 2).min().unwrap();
        blocks.get_mut(&victim).unwrap()[1000] ^= 1;
    }
    let read = stream.read(&extents, (0, 1), 4, &mut queue).unwrap();
    assert_eq!((read.mismatched_bytes, read.verified_bytes), (64 << 10, bytes.len() as u64 - (64 << 10)));
}

#[test]
fn the_offloaded_way_counts_what_it_verified() {
    let bytes = data((100 << 12) + 4096);
    let extents = Extents { data: &bytes, extent_bytes: 32 << 10 };
    let disk = Disk::default();
    let mut queue = disk.queue(512);
    let area = PoolArea { nsid: 1, block_bytes: 512, slba: 40 };
    let written = offloaded::run(area, true, &extents, (0, 1), 4, &mut queue).unwrap();
    assert_eq!(written.written_bytes, bytes.len() as u64);
    let read = offloaded::run(area, false, &extents, (0, 1), 4, &mut queue).unwrap();
    assert_eq!((read.verified_bytes, read.mismatched_bytes), (bytes.len() as u64, 0));
    disk.blocks.lock().unwrap().remove(&(1 << 48 | 41));
    let read = offloaded::run(area, false, &extents, (0, 1), 4, &mut queue).unwrap();
    assert_eq!(read.mismatched_bytes, 32 << 10);
}

#[test]
fn the_room_asked_for_covers_what_is_written() {
    for len in [4096, 1 << 20, 5 << 20] {
        let mut bytes = vec![0u8; len];
        SplitMix64(8).fill(&mut bytes);
        let extents = Extents { data: &bytes, extent_bytes: 128 << 10 };
        let mut setup = setup(Compression::Lz4, Cipher::Aes256Gcm, 4096);
        for streams in [1, 4] {
            setup.block_count = HostStream::blocks_needed(&setup, &extents, streams);
            let disk = Disk::default();
            let mut queue = disk.queue(4096);
            let mut all: Vec<_> = (0..streams).map(|i| HostStream::new(&setup, i, streams).unwrap()).collect();
            for (index, stream) in all.iter_mut().enumerate() {
                stream.write(&extents, (index, streams), 2, &mut queue).unwrap();
            }
            for (index, stream) in all.iter_mut().enumerate() {
                let read = stream.read(&extents, (index, streams), 2, &mut queue).unwrap();
                assert_eq!(read.mismatched_bytes, 0, "{len} bytes, {streams} streams");
            }
        }
    }
}
