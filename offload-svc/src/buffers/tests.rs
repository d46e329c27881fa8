//! One suite for both kinds of buffer memory.

use std::collections::HashSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use nvmf_target::buffer::{BUFFER_ALIGN_BYTES, BufferPool, IoBuf};
use nvmf_target::proto::io_queue::Wanted;

use super::{Buffers, Plan, SizeClass, Wait};

fn class(bytes: usize, count: usize) -> SizeClass {
    SizeClass { bytes, count, reserved: false }
}

fn needs(count: usize) -> Wanted {
    Wanted { len_bytes: 4096, count }
}

/// Five buffers of 4 KiB.
fn one_size() -> Plan {
    Plan::new(vec![class(4 << 10, 5)])
}

fn two_sizes() -> Plan {
    Plan::new(vec![class(64 << 10, 2), class(4 << 10, 5)])
}

/// Takes 4 KiB buffers until there are none.
fn all_of(buffers: &Buffers) -> Vec<IoBuf> {
    std::iter::from_fn(|| buffers.take(4096)).collect()
}

/// Counts its wake-ups.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A future being waited for, with the number of times that it was woken.
struct Waiting {
    future: Pin<Box<Wait>>,
    bell: Arc<Bell>,
}

impl Waiting {
    fn on(buffers: &Buffers, len_bytes: usize) -> Self {
        Self { future: Box::pin(buffers.wait(len_bytes)), bell: Arc::default() }
    }

    fn poll(&mut self) -> Option<IoBuf> {
        let waker = Waker::from(self.bell.clone());
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(buffer) => Some(buffer),
            Poll::Pending => None,
        }
    }

    fn woken(&self) -> usize {
        self.bell.0.load(Ordering::SeqCst)
    }
}

fn every_buffer_is_given_once(buffers: &Buffers) {
    let mut out: Vec<IoBuf> = std::iter::from_fn(|| buffers.take(100)).collect();
    assert_eq!(out.len(), 5);
    let starts: HashSet<_> = out.iter().map(|buffer| buffer.as_ptr() as usize).collect();
    assert_eq!(starts.len(), 5);
    for (i, buffer) in out.iter_mut().enumerate() {
        assert_eq!((buffer.len(), buffer.capacity_bytes()), (100, 4096));
        assert_eq!(buffer.as_ptr() as usize % BUFFER_ALIGN_BYTES, 0);
        buffer.set_len(4096);
        buffer.fill(i as u8);
    }
    for (i, buffer) in out.iter().enumerate() {
        assert!(buffer.iter().all(|&b| b == i as u8), "slots don't overlap");
    }
    assert_eq!(buffers.snapshot()[0].used, 5);
    assert!(buffers.take(100).is_none());
    drop(out);
    assert_eq!(buffers.used_bytes(), 0);
    assert_eq!(all_of(buffers).len(), 5, "all came back");
    assert!(buffers.take(4097).is_none());
    assert_eq!(buffers.largest_bytes(), 4096);
}

fn a_larger_size_helps_out(buffers: &Buffers) {
    let small: Vec<IoBuf> = (0..5).filter_map(|_| buffers.take(4096)).collect();
    assert!(small.iter().all(|buffer| buffer.capacity_bytes() == 4096));
    let large = buffers.take(100).expect("one of the larger size");
    assert_eq!((large.len(), large.capacity_bytes()), (100, 64 << 10));
    let other = Waiting::on(buffers, 4096).poll().expect("the last one");
    let mut small_waiter = Waiting::on(buffers, 4096);
    let mut large_waiter = Waiting::on(buffers, 5000);
    assert!(small_waiter.poll().is_none() && large_waiter.poll().is_none());
    drop(large);
    assert_eq!((small_waiter.woken(), large_waiter.woken()), (0, 1), "each waits for its size");
    assert_eq!(large_waiter.poll().expect("served").len(), 5000);
    drop(small);
    assert!(small_waiter.poll().is_some());
    drop(other);
    assert_eq!(buffers.used_bytes(), 0);
}

fn waiters_are_served_in_order(buffers: &Buffers) {
    let mut out = all_of(buffers);
    let mut first = Waiting::on(buffers, 4096);
    let mut second = Waiting::on(buffers, 512);
    let mut third = Waiting::on(buffers, 4096);
    assert!(first.poll().is_none() && second.poll().is_none() && third.poll().is_none());
    assert_eq!(buffers.snapshot()[0].waiting, 3);
    out.pop();
    assert!(buffers.take(4096).is_none(), "nobody overtakes");
    assert_eq!((first.woken(), second.woken(), third.woken()), (1, 0, 0));
    let one = first.poll().expect("served");
    // One who leaves is passed over, whether served or not.
    out.pop();
    assert_eq!(second.woken(), 1);
    drop(second);
    assert_eq!(third.woken(), 1, "the buffer went on");
    let three = third.poll().expect("served");
    assert_eq!(three.len(), 4096);
    let mut fourth = Waiting::on(buffers, 4096);
    assert!(fourth.poll().is_none());
    drop(fourth);
    drop((one, three, out));
    assert_eq!((buffers.used_bytes(), buffers.snapshot()[0].waiting), (0, 0));
    assert!(buffers.take(4096).is_some());
}

fn a_granted_buffer_is_taken_first(buffers: &Buffers) {
    let mut out = all_of(buffers);
    let granted = out.pop().expect("one of five");
    let start = granted.as_ptr();
    let mut waiting = Waiting::on(buffers, 4096);
    // `granted` is in our hands, so the newcomer has to wait.
    assert!(waiting.poll().is_none());
    let taken = buffers.granting([Some(granted), None], || {
        assert!(buffers.take(8192).is_none(), "too large for the grant");
        let taken = buffers.take(1000);
        assert!(buffers.take(1000).is_none(), "one grant, one buffer");
        taken
    });
    let taken = taken.expect("the grant");
    assert_eq!((taken.as_ptr(), taken.len()), (start, 1000));
    buffers.granting([None, Some(taken)], || ());
    assert!(waiting.poll().is_some(), "an unused grant goes to the next");
}

fn buffers_come_back_from_other_threads(buffers: &Buffers) {
    for _ in 0..50 {
        let out = all_of(buffers);
        assert_eq!(out.len(), 5);
        let mut waiting = Waiting::on(buffers, 4096);
        assert!(waiting.poll().is_none());
        std::thread::scope(|scope| {
            for buffer in out {
                scope.spawn(move || drop(buffer));
            }
        });
        assert_eq!(waiting.woken(), 1);
        drop(waiting.poll().expect("served by another thread"));
        assert_eq!(buffers.used_bytes(), 0);
    }
}

/// Two threads take, wait and give back at random; nobody starves, nothing is lost.
fn threads_share_a_pool(buffers: &Buffers) {
    std::thread::scope(|scope| {
        for seed in 0..3_u64 {
            let buffers = buffers.clone();
            scope.spawn(move || {
                super::mark_reactor_thread();
                for round in 0..500_u64 {
                    let held: Vec<_> = (0..(seed + round) % 3).filter_map(|_| buffers.take(4096)).collect();
                    drop(held);
                    let mut buffer = futures::executor::block_on(buffers.wait(4096));
                    buffer.fill(seed as u8);
                    std::thread::yield_now();
                    assert!(buffer.iter().all(|&b| b == seed as u8));
                }
            });
        }
    });
    assert_eq!(buffers.used_bytes(), 0);
    assert_eq!(all_of(buffers).len(), 5);
}

/// A host that keeps what it has been given leaves some for the others, and waits without being in their way.
fn no_host_takes_all(buffers: &Buffers) {
    let (greedy, modest) =
        (buffers.for_host("nqn.2026-11.io.example:greedy"), buffers.for_host("nqn.2026-11.io.example:b"));
    let again = buffers.for_host("nqn.2026-11.io.example:greedy");
    let kept: Vec<IoBuf> = std::iter::from_fn(|| greedy.take(4096)).collect();
    assert_eq!(kept.len(), 3, "three of five");
    assert!(again.take(4096).is_none(), "its other queues share its account");
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    let mut waiting = Box::pin(again.wait(needs(1)).expect("enough of them"));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let first = modest.take(4096).expect("not behind one who must wait for itself");
    assert!(modest.take(4096).is_none(), "it holds as many as are free");
    assert!(buffers.take(4096).is_some(), "the service itself has no bounds");
    drop(first);
    assert_eq!(bell.0.load(Ordering::SeqCst), 0);
    let mut kept = kept;
    kept.truncate(1);
    assert_eq!(bell.0.load(Ordering::SeqCst), 1, "served as soon as it holds little");
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
    drop((waiting, again, greedy, kept));
    assert_eq!(buffers.used_bytes(), 0);
    let newcomer = buffers.for_host("nqn.2026-11.io.example:c");
    let held: Vec<IoBuf> = std::iter::from_fn(|| newcomer.take(1)).collect();
    assert_eq!(held.len(), 3, "an account that was closed begins anew");
}

/// A fused pair gets both its buffers at once, or neither and its turn: whoever needs one only doesn't overtake it.
fn a_pair_waits_for_both_and_gets_them(buffers: &Buffers) {
    let (silent, other) = (buffers.for_host("nqn.2026-11.io.example:s"), buffers.for_host("nqn.2026-11.io.example:o"));
    let mut kept: Vec<IoBuf> = std::iter::from_fn(|| silent.take(4096)).collect();
    assert_eq!(kept.len(), 3, "three of five");
    let first = other.take(4096).expect("one of a pair");
    assert!(other.take(4096).is_none(), "one after the other, a pair would be over its share");
    drop(first);
    assert!(other.wait(needs(6)).is_none(), "there are not so many");
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    let mut context = Context::from_waker(&waker);
    let mut pair = Box::pin(other.wait(needs(2)).expect("enough of them"));
    let Poll::Ready([Some(one), Some(two)]) = pair.as_mut().poll(&mut context) else { panic!("both are there") };
    assert!(one.len() == 4096 && two.len() == 4096 && one.as_ptr() != two.as_ptr());
    let mut taken = Some(buffers.granting([Some(one), Some(two)], || [other.take(4096), other.take(4096)]));
    assert!(taken.iter().flatten().all(Option::is_some), "both reach who only knows `take`");
    bell.0.store(0, Ordering::SeqCst);
    // Nothing is free now. One comes back: too little for the pair that is first, and nobody goes before it.
    let mut pair = Box::pin(buffers.for_host("nqn.2026-11.io.example:p").wait(needs(2)).expect("enough of them"));
    assert!(pair.as_mut().poll(&mut context).is_pending());
    let mut single = Waiting::on(buffers, 4096);
    assert!(single.poll().is_none());
    kept.pop();
    assert!(buffers.take(4096).is_none() && single.poll().is_none() && single.woken() == 0);
    assert_eq!(bell.0.load(Ordering::SeqCst), 0, "not woken for one of two");
    kept.pop();
    assert_eq!(bell.0.load(Ordering::SeqCst), 1);
    let Poll::Ready(both) = pair.as_mut().poll(&mut context) else { panic!("both are there") };
    assert_eq!(both.iter().flatten().count(), 2);
    drop(kept);
    assert!(single.poll().is_some(), "then the next");
    // One that gives up leaves what it could not use to those behind it.
    drop(both);
    let mut rest = all_of(buffers);
    let mut pair = Box::pin(other.wait(needs(2)).expect("enough of them"));
    taken.take();
    rest.extend(all_of(buffers));
    assert!(pair.as_mut().poll(&mut context).is_pending());
    let mut single = Waiting::on(buffers, 4096);
    assert!(single.poll().is_none());
    rest.pop();
    assert_eq!(single.woken(), 0);
    drop(pair);
    assert_eq!(single.woken(), 1);
    drop((single, rest));
    assert_eq!(buffers.used_bytes(), 0);
}

/// H111: a path that fails still gives its buffer back; after many failures the pool is full.
fn h111_failures_give_their_buffers_back(buffers: &Buffers) {
    for round in 0..100_000_u32 {
        let attempt = || -> Result<IoBuf, u32> {
            let buffer = buffers.take(4096).ok_or(u32::MAX)?;
            if round % 2 == 0 { Err(round) } else { Ok(buffer) }
        };
        assert_ne!(attempt().err(), Some(u32::MAX));
    }
    assert_eq!(buffers.used_bytes(), 0);
}

macro_rules! suite {
    ($name:ident, $make:expr) => {
        mod $name {
            use super::*;

            fn with(plan: Plan, check: fn(&Buffers)) {
                // A thread of its own, marked as a reactor's.
                let run = || {
                    crate::buffers::mark_reactor_thread();
                    check(&$make(&plan).unwrap());
                };
                std::thread::scope(|scope| scope.spawn(run).join().unwrap());
            }

            #[test]
            fn gives_every_buffer_once() {
                with(one_size(), every_buffer_is_given_once);
            }
            #[test]
            fn serves_waiters_in_order() {
                with(one_size(), waiters_are_served_in_order);
            }
            #[test]
            fn takes_a_granted_buffer_first() {
                with(one_size(), a_granted_buffer_is_taken_first);
            }
            #[test]
            fn takes_buffers_back_from_other_threads() {
                with(one_size(), buffers_come_back_from_other_threads);
            }
            #[test]
            fn helps_out_with_a_larger_size() {
                with(two_sizes(), a_larger_size_helps_out);
            }
            #[test]
            fn is_shared_by_threads() {
                with(one_size(), threads_share_a_pool);
            }
            #[test]
            fn lets_no_host_take_all() {
                with(one_size(), no_host_takes_all);
            }
            #[test]
            fn gives_a_pair_both_or_neither() {
                with(one_size(), a_pair_waits_for_both_and_gets_them);
            }
            #[test]
            fn h111_gives_buffers_back_after_failures() {
                with(one_size(), h111_failures_give_their_buffers_back);
            }
        }
    };
}

suite!(in_memory, Buffers::in_memory);
#[cfg(feature = "dpdk")]
suite!(in_mempools, |plan: &Plan| Buffers::in_mempools(plan, crate::reactor::test_eal()));

#[test]
fn a_reserved_size_is_left_to_those_that_need_it() {
    let plan = two_sizes().with_reserved(16 << 10, 1);
    let buffers = Buffers::in_memory(&plan).unwrap();
    let small: Vec<IoBuf> = std::iter::from_fn(|| buffers.take(4096)).collect();
    assert_eq!((small.len(), buffers.snapshot()[1].used, buffers.snapshot()[2].used), (7, 0, 2));
    let medium = buffers.take(8192).expect("kept for it");
    assert!(Waiting::on(&buffers, 8192).poll().is_none());
    drop((small, medium));
    assert_eq!(buffers.used_bytes(), 0);
}

#[test]
fn sizes_that_break_the_alignment_are_refused() {
    let plan = Plan::new(vec![class(5000, 1)]);
    assert!(Buffers::in_memory(&plan).is_err());
}
