//! EAL as the service starts it. It starts once per process, so each case is a process of its own: this program again,
//! with the case's name in the environment.
#![cfg(feature = "dpdk")]

use std::os::unix::process::CommandExt;
use std::process::{Command, Output};
use std::ptr::NonNull;
use std::sync::mpsc;

use sdk_bindings::eal::{Eal, EalConfig, EalError, LcorePlan, Memory};
use sdk_bindings::lcore::{self, LaunchError, Lcore};
use sdk_bindings::memory::Zone;
use sdk_bindings::mempool::Mempool;
use sdk_bindings::ring::{self, Item};

const CASE: &str = "SDK_BINDINGS_CASE";

fn config(memory: Memory, lcores: usize) -> EalConfig {
    EalConfig { memory, memory_mib: 64, lcores: vec![LcorePlan::default(); lcores] }
}

/// Runs `case` in a process of its own, as user `uid`.
fn run_as(case: &str, uid: Option<u32>) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env(CASE, case);
    command.current_dir("/").env_remove("HOME").env_remove("XDG_RUNTIME_DIR");
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    command.output().unwrap()
}

fn passes(case: &str, uid: Option<u32>) {
    let output = run_as(case, uid);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{case}: {out}\n{err}");
    assert!(!out.contains("EAL") && !out.contains("Usage"), "DPDK prints nothing of its own: {out}");
    // Before it gives up, it writes one line to stderr, past its log; the service looks for hugepages first.
    assert!(!err.contains("EAL") || case == "no hugepages", "DPDK prints nothing of its own: {err}");
}

/// The child's side: the case named in the environment, nothing without one.
#[test]
fn child() {
    match std::env::var(CASE).as_deref() {
        Ok("works") => everything_works(),
        Ok("twice") => starts_once(),
        Ok("no hugepages") => hugepages_are_missed(),
        Ok("panic") => a_panic_ends_at_the_border(),
        _ => {}
    }
}

#[test]
fn h147_it_works_without_hugepages_and_hugetlbfs() {
    passes("works", None);
}

#[test]
fn it_works_without_root() {
    // SAFETY: reads the user id.
    if unsafe { libc::geteuid() } != 0 {
        return passes("works", None);
    }
    passes("works", Some(65534));
}

#[test]
fn it_starts_once() {
    passes("twice", None);
}

#[test]
fn h147_missing_hugepages_are_an_error_and_no_usage_text() {
    passes("no hugepages", None);
}

#[test]
fn a_panic_on_an_lcore_comes_back_to_the_owner() {
    passes("panic", None);
}

fn everything_works() {
    let eal = Eal::start(&config(Memory::OrdinaryPages, 2)).unwrap();
    assert_eq!(eal.workers(), 2);
    assert!(Eal::version().starts_with("DPDK"));
    assert_eq!(lcore::current(), None, "this thread is not DPDK's");
    lcores_carry_rings(eal);
    mempools_give_each_slot_once(eal);
    memory_is_zeroed_aligned_and_bounded(eal);
}

fn lcores_carry_rings(eal: &'static Eal) {
    let (mut producer, mut consumer) = ring::ring(eal, 8, |_| panic!("nothing is left over")).unwrap();
    assert_eq!(producer.capacity(), 8);
    let count = 100_000_usize;
    let sender = Lcore::launch(eal, move || {
        let mut next = 1;
        while next <= count {
            let items: Vec<Item> = (next..(next + 5).min(count + 1)).filter_map(as_item).collect();
            next += producer.push_burst(&items);
            std::thread::yield_now();
        }
    })
    .unwrap();
    let (result, results) = mpsc::channel();
    let receiver = Lcore::launch(eal, move || {
        let (mut got, mut expected) = (Vec::new(), 1);
        while expected <= count {
            consumer.pop_burst(&mut got, 32);
            for item in got.drain(..) {
                assert_eq!(Some(item), as_item(expected));
                expected += 1;
            }
            std::thread::yield_now();
        }
        result.send((consumer.is_empty(), lcore::current())).unwrap();
    })
    .unwrap();
    assert!(matches!(Lcore::launch(eal, || ()), Err(LaunchError::NoneIdle { workers: 2 })));
    assert_ne!(sender.id(), receiver.id());
    let id = receiver.id();
    assert!(sender.wait(eal).is_ok() && receiver.wait(eal).is_ok());
    assert_eq!(results.recv().unwrap(), (true, Some(id)));
    // The lcores are idle again.
    for _ in 0..10 {
        assert!(Lcore::launch(eal, || ()).unwrap().wait(eal).is_ok());
    }
}

/// A number that passes for a pointer; nobody follows it.
fn as_item(number: usize) -> Option<Item> {
    NonNull::new(std::ptr::without_provenance_mut(number))
}

fn mempools_give_each_slot_once(eal: &'static Eal) {
    let pool = Mempool::new(eal, 100, 8192, 4096).unwrap();
    assert_eq!((pool.count(), pool.available()), (100, 100));
    let mut slots: Vec<usize> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(pool.available(), 0);
    for slot in &slots {
        let start = pool.start_of(*slot);
        assert_eq!((start.as_ptr() as usize % 4096, pool.slot_at(start)), (0, Some(*slot)));
        // SAFETY: the slot is ours, 8192 bytes long.
        unsafe { start.as_ptr().write_bytes(*slot as u8, 8192) };
    }
    for slot in &slots {
        // SAFETY: as above; the memory is initialised.
        let bytes = unsafe { std::slice::from_raw_parts(pool.start_of(*slot).as_ptr(), 8192) };
        assert!(bytes.iter().all(|&b| b == *slot as u8), "slots don't overlap");
        // SAFETY: taken above, put back once, no longer used.
        unsafe { pool.put(*slot) };
    }
    slots.sort_unstable();
    assert!(slots.into_iter().eq(0..100));
    assert_eq!(pool.available(), 100);
    assert_eq!(pool.slot_at(NonNull::dangling()), None);
}

fn memory_is_zeroed_aligned_and_bounded(eal: &'static Eal) {
    let zone = Zone::new(eal, "test", 1 << 20, 4096).unwrap();
    assert_eq!((zone.start().as_ptr() as usize % 4096, zone.bytes()), (0, 1 << 20));
    // SAFETY: the zone is a MiB of initialised memory, ours alone.
    let bytes = unsafe { std::slice::from_raw_parts(zone.start().as_ptr(), zone.bytes()) };
    assert!(bytes.iter().all(|&b| b == 0));
    let error = Zone::new(eal, "test", 1 << 30, 4096).err().expect("more than EAL has");
    assert_eq!(error.bytes, 1 << 30);
    assert!(Mempool::new(eal, 1000, 1 << 20, 4096).is_err());
}

fn starts_once() {
    Eal::start(&config(Memory::OrdinaryPages, 1)).unwrap();
    let again = Eal::start(&config(Memory::OrdinaryPages, 1));
    assert!(matches!(again, Err(EalError::AlreadyStarted)));
}

fn hugepages_are_missed() {
    let mut config = config(Memory::HugePages, 1);
    // More than any machine has.
    config.memory_mib = 1 << 24;
    let error = Eal::start(&config).err().expect("there are not so many hugepages");
    assert!(matches!(error, EalError::Refused { .. }), "{error}");
}

fn a_panic_ends_at_the_border() {
    let eal = Eal::start(&config(Memory::OrdinaryPages, 1)).unwrap();
    let panic = Lcore::launch(eal, || panic!("as the test wants")).unwrap().wait(eal).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"as the test wants"));
    assert!(Lcore::launch(eal, || ()).unwrap().wait(eal).is_ok(), "the lcore lives on");
}
