//! Start, end, tasks, timers, messages, failure, and what doing nothing costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use nvmf_target::buffer::BufferPool;

use super::{Running, eventually, on_each_platform, settings};
use crate::reactor::disk::DiskFile;
use crate::reactor::{Reactors, StartError};

#[test]
fn tasks_run_where_they_are_sent() {
    on_each_platform(|dpdk| {
        let reactors = Running::start(&settings(3, dpdk));
        for index in 0..3 {
            let (at, name) = block_on(reactors.call_on(index, |local| async move {
                (local.index(), std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default())
            }))
            .unwrap();
            assert_eq!((at, name.trim()), (index, &*format!("reactor-{index}")));
        }
        assert!(reactors.run_on(3, |_| ()).is_err(), "there is no fourth");
    });
}

/// Far more messages than a ring holds: nothing is lost, the order stays, nobody blocks.
#[test]
fn messages_between_reactors_arrive_in_order() {
    const COUNT: u64 = 20_000;
    on_each_platform(|dpdk| {
        let mut settings = settings(2, dpdk);
        settings.ring_slots = 4;
        let reactors = Running::start(&settings);
        let next = Arc::new(AtomicU64::new(0));
        let sender = reactors.0.clone();
        let counter = next.clone();
        reactors
            .run_on(0, move |_| {
                for i in 0..COUNT {
                    let counter = counter.clone();
                    sender
                        .run_on(1, move |local| {
                            assert_eq!(local.index(), 1);
                            assert_eq!(counter.fetch_add(1, Ordering::Relaxed), i, "in order");
                        })
                        .unwrap();
                }
            })
            .unwrap();
        eventually("all messages", || next.load(Ordering::Relaxed) == COUNT);
        assert_eq!(reactors.failure(), None);
    });
}

/// Two reactors throw one message back and forth: each throw wakes a sleeper or meets one who polls.
#[test]
fn no_wakeup_is_lost_between_reactors() {
    on_each_platform(|dpdk| {
        let mut settings = settings(2, dpdk);
        settings.spin = Duration::from_micros(1);
        let reactors = Running::start(&settings);
        let throws = Arc::new(AtomicU64::new(0));
        fn throw(reactors: Reactors, to: usize, throws: Arc<AtomicU64>) {
            let again = reactors.clone();
            let sent = reactors.run_on(to, move |_| {
                if throws.fetch_add(1, Ordering::Relaxed) < 2_000 {
                    throw(again, 1 - to, throws);
                }
            });
            sent.unwrap();
        }
        throw(reactors.0.clone(), 0, throws.clone());
        eventually("the last throw", || throws.load(Ordering::Relaxed) > 2_000);
    });
}

#[test]
fn timers_and_wakers_of_other_threads_wake_a_sleeping_reactor() {
    on_each_platform(|dpdk| {
        let reactors = Running::start(&settings(1, dpdk));
        let start = Instant::now();
        let (early, late) = block_on(reactors.call_on(0, move |local| async move {
            local.sleep_until(start + Duration::from_millis(30)).await;
            let early = start.elapsed();
            local.sleep_until(start + Duration::from_millis(60)).await;
            (early, start.elapsed())
        }))
        .unwrap();
        assert!(early >= Duration::from_millis(30) && late >= Duration::from_millis(60), "{early:?} {late:?}");
        for _ in 0..20 {
            let (sender, receiver) = futures::channel::oneshot::channel::<u32>();
            let waiting = reactors.call_on(0, move |_| receiver);
            let sending = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(3));
                sender.send(7)
            });
            assert_eq!(block_on(waiting).unwrap(), Ok(7));
            sending.join().unwrap().unwrap();
        }
    });
}

#[test]
fn a_panic_is_reported_and_the_others_go_on() {
    on_each_platform(|dpdk| {
        let reactors = Running::start(&settings(2, dpdk));
        reactors.spawn_on(1, |_| async { panic!("as the test wants") }).unwrap();
        assert_eq!(block_on(reactors.failed()).index, 1);
        eventually("it takes nothing any more", || reactors.run_on(1, |_| ()).is_err());
        assert_eq!(block_on(reactors.call_on(0, |local| async move { local.index() })), Ok(0));
        let from_reactor = reactors.0.clone();
        let sent = block_on(reactors.call_on(0, move |_| async move { from_reactor.run_on(1, |_| ()).is_err() }));
        assert_eq!(sent, Ok(true));
    });
}

#[test]
fn stopping_drops_tasks_with_all_that_they_hold() {
    on_each_platform(|dpdk| {
        let reactors = Running::start(&settings(2, dpdk));
        let token = Arc::new(());
        for index in 0..2 {
            let held = token.clone();
            reactors
                .spawn_on(index, move |local| async move {
                    let _held = held;
                    let _buffer = local.buffer(4096).await;
                    local.sleep_until(Instant::now() + Duration::from_secs(3600)).await;
                })
                .unwrap();
        }
        eventually("both hold a buffer", || reactors.internal_buffers().used_bytes() == 2 * 4096);
        reactors.stop(Duration::from_secs(5));
        assert_eq!((Arc::strong_count(&token), reactors.internal_buffers().used_bytes()), (1, 0));
        assert!(reactors.run_on(0, |_| ()).is_err());
        assert_eq!(reactors.failure(), None);
    });
}

/// H145: CPUs that are not there are named, before anything runs.
#[test]
fn h145_a_cpu_that_is_not_there_is_named() {
    let mut settings = settings(1, false);
    settings.cpus = vec![vec![1000]];
    let error = Reactors::start(&settings).err().unwrap();
    assert_eq!(error.to_string(), "reactors.cpus: CPU 1000 is not available to this process");
    settings.cpus.clear();
    assert!(matches!(Reactors::start(&settings), Err(StartError::NoReactors)));
}

/// H145: a pinned reactor runs where it was told to.
#[test]
fn h145_reactors_run_on_their_cpus() {
    use nix::sched::{CpuSet, sched_getaffinity};
    let here = sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
    let cpu = (0..CpuSet::count()).find(|cpu| here.is_set(*cpu).unwrap()).unwrap();
    let mut settings = settings(2, false);
    settings.cpus = vec![vec![cpu], vec![cpu]];
    let reactors = Running::start(&settings);
    let cpus = block_on(reactors.call_on(1, |_| async {
        let set = sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
        (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap()).collect::<Vec<_>>()
    }));
    assert_eq!(cpus, Ok(vec![cpu]));
}

/// CPU time of the thread that asks.
fn thread_cpu() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap();
    Duration::from(time)
}

/// H149: a reactor with nothing to do costs next to nothing, whatever is attached to it: here an operation that
/// hangs, a task that waits for a buffer, and a timer far away.
#[test]
fn h149_idle_reactors_sleep() {
    on_each_platform(|dpdk| {
        let reactors = Running::start(&settings(2, dpdk));
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let pipe = DiskFile::of_descriptor(std::fs::File::from(reader));
        let taken = Arc::new(AtomicUsize::new(0));
        let count = taken.clone();
        reactors
            .spawn_on(0, move |local| async move {
                let all: Vec<_> = std::iter::from_fn(|| local.reactors().internal_buffers().take(1 << 20)).collect();
                let buffer = local.buffer(4096).await;
                let hung = local.read(&pipe, 0, buffer);
                count.store(all.len(), Ordering::SeqCst);
                let waits = local.buffer(1 << 20);
                let far = local.sleep_until(Instant::now() + Duration::from_secs(3600));
                let (hung, _, ()) = futures::join!(hung, waits, far);
                assert!(hung.0.is_err(), "the pipe is closed unread");
            })
            .unwrap();
        eventually("it hangs", || taken.load(Ordering::SeqCst) > 0);
        std::thread::sleep(Duration::from_millis(100));
        let cpu_of = |index| block_on(reactors.call_on(index, |_| async { thread_cpu() })).unwrap();
        let before = [cpu_of(0), cpu_of(1)];
        std::thread::sleep(Duration::from_secs(2));
        for (index, before) in before.into_iter().enumerate() {
            let used = cpu_of(index) - before;
            assert!(used < Duration::from_millis(20), "reactor {index} used {used:?} of CPU in 2 s");
        }
        drop(writer);
    });
}
