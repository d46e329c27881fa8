//! Plain back ends of each kind against a model, and what they are like.

use std::sync::Arc;
use std::time::Duration;

use nvmf_target::backend::{Backend, Done, LbaRange, Operation, Outcome, Reply, ReplySink};
use nvmf_target::buffer::IoBuf;

use super::{PlainBackend, PlainError};
use crate::buffers::Plan;
use crate::config::schema::HugePages;
use crate::config::values::{BackendSpec, BlockSize, ByteSize};
use crate::reactor::disk::DiskEngine;
use crate::reactor::{Reactors, Settings};

fn reactors() -> Reactors {
    let plan = || Plan::for_memory(4 << 20, 1 << 20).unwrap();
    let settings = Settings {
        cpus: vec![Vec::new(); 1],
        spin: Duration::ZERO,
        ring_slots: 16,
        hugepages: HugePages::Off,
        dpdk: false,
        host_buffers: plan(),
        internal_buffers: plan(),
        disk: DiskEngine::Auto,
    };
    Reactors::start(&settings).unwrap()
}

struct Answers(std::sync::mpsc::Sender<Reply>);

impl ReplySink for Answers {
    fn reply(&self, _token: u64, reply: Reply) {
        self.0.send(reply).unwrap();
    }
}

fn run(backend: &Arc<PlainBackend>, operation: Operation) -> Reply {
    let (sender, answers) = std::sync::mpsc::channel();
    backend.submit(operation, Done::new(Arc::new(Answers(sender)), 1));
    let reply = answers.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(answers.try_recv().is_err(), "one answer");
    reply
}

fn range(slba: u64, lba_count: u64) -> LbaRange {
    LbaRange { slba, lba_count }
}

/// Writes, zeroes, deallocations and compares in a row, checked against a vector of bytes.
fn agrees_with_a_model(backend: &Arc<PlainBackend>) {
    let geometry = backend.geometry();
    let block = geometry.block_bytes as usize;
    let mut model = vec![0_u8; block * geometry.block_count as usize];
    let mut seed = 1_u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for step in 0..300_u64 {
        let slba = random(geometry.block_count);
        let lba_count = 1 + random((geometry.block_count - slba).min(150));
        let here = range(slba, lba_count);
        let bytes = slba as usize * block..(slba + lba_count) as usize * block;
        let data = vec![step as u8 | 1; bytes.len()];
        let outcome = match random(6) {
            0 | 1 => {
                model[bytes].copy_from_slice(&data);
                let buffer = IoBuf::copy_of(&data);
                run(backend, Operation::Write { range: here, buffer, fua: step % 3 == 0 }).outcome
            }
            2 => {
                model[bytes].fill(0);
                let deallocate = step % 2 == 0;
                run(backend, Operation::WriteZeroes { range: here, deallocate, fua: false }).outcome
            }
            3 if geometry.deallocate => {
                model[bytes].fill(0);
                run(backend, Operation::Deallocate { ranges: vec![here, range(slba, 1)] }).outcome
            }
            4 => {
                let expected = IoBuf::copy_of(&model[bytes.clone()]);
                model[bytes].copy_from_slice(&data);
                let buffer = IoBuf::copy_of(&data);
                run(backend, Operation::CompareAndWrite { range: here, expected, buffer, fua: true }).outcome
            }
            _ => {
                let reply = run(backend, Operation::Read { range: here, buffer: IoBuf::heap(bytes.len()) });
                assert!(*reply.buffer.unwrap() == model[bytes], "step {step}: {here:?}");
                reply.outcome
            }
        };
        assert_eq!(outcome, Outcome::Success, "step {step}");
    }
    assert_eq!(run(backend, Operation::Flush).outcome, Outcome::Success);
    let mut wrong = model[..block].to_vec();
    wrong[block - 1] ^= 1;
    let expected = || IoBuf::copy_of(&wrong);
    let compare = Operation::Compare { range: range(0, 1), buffer: expected() };
    assert_eq!(run(backend, compare).outcome, Outcome::CompareFailure);
    let buffer = IoBuf::copy_of(&vec![0xEE; block]);
    let swap = Operation::CompareAndWrite { range: range(0, 1), expected: expected(), buffer, fua: false };
    assert_eq!(run(backend, swap).outcome, Outcome::CompareFailure);
    let same = Operation::Compare { range: range(0, 1), buffer: IoBuf::copy_of(&model[..block]) };
    assert_eq!(run(backend, same).outcome, Outcome::Success, "a failed compare writes nothing");
    let whole = range(0, geometry.block_count);
    assert_eq!(run(backend, Operation::Verify { range: whole }).outcome, Outcome::Success);
    let beyond = range(geometry.block_count, 1);
    assert_eq!(run(backend, Operation::Verify { range: beyond }).outcome, Outcome::LbaOutOfRange);
}

#[test]
fn each_kind_behaves_like_a_vector_of_blocks() {
    let reactors = reactors();
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let bytes = 1000 * u64::from(block_size.bytes());
        let dir = crate::reactor::disk::folder_on_disk();
        let path = dir.path().join("plain");
        std::fs::File::create(&path).unwrap().set_len(bytes + 100).unwrap();
        for spec in [BackendSpec::Mem(ByteSize(bytes)), BackendSpec::File(path)] {
            let backend = PlainBackend::open(&spec, block_size, "test", &reactors).unwrap();
            assert_eq!(backend.geometry().block_count, 1000);
            agrees_with_a_model(&backend);
        }
    }
    assert_eq!(reactors.internal_buffers().used_bytes(), 0);
    reactors.stop(Duration::ZERO);
}

/// H50: identifiers are the same after a restart, and nobody else's.
#[test]
fn h50_identifiers_are_stable_and_unique() {
    let reactors = reactors();
    let spec = BackendSpec::Mem(ByteSize(1 << 20));
    let uuid = |identity: &str| PlainBackend::open(&spec, BlockSize::B4096, identity, &reactors).unwrap().uuid();
    assert_eq!(uuid("nqn.a/1"), uuid("nqn.a/1"));
    assert_ne!(uuid("nqn.a/1"), uuid("nqn.a/2"));
    reactors.stop(Duration::ZERO);
}

#[test]
fn what_can_not_be_opened_is_named() {
    let reactors = reactors();
    let open = |text: &str| {
        let spec: BackendSpec = text.parse().unwrap();
        PlainBackend::open(&spec, BlockSize::B4096, "test", &reactors).err().unwrap()
    };
    assert!(open("file:/nowhere/at/all").to_string().starts_with("/nowhere/at/all: No such file"));
    assert_eq!(open("file:/dev/null").to_string(), "/dev/null: not a regular file");
    assert_eq!(open("mem:512").to_string(), "mem:512B: 512 bytes hold no block of 4096 bytes");
    assert!(matches!(open("pool:v"), PlainError::NotPlain { .. }));
    reactors.stop(Duration::ZERO);
}
