//! One suite for every kind of ring: against a `VecDeque` as the model, and across two threads.

use std::collections::VecDeque;
use std::sync::Arc;

use proptest::prelude::*;

use super::{Ends, software};

#[derive(Debug, Clone)]
enum Step {
    Push,
    PushBurst(usize),
    Pop(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => Just(Step::Push),
        1 => (0_usize..80).prop_map(Step::PushBurst),
        2 => (0_usize..80).prop_map(Step::Pop),
    ];
    prop::collection::vec(step, 0..60)
}

/// Runs `steps` on the ring and on a queue of the same capacity.
fn agrees_with_the_model((mut producer, mut consumer): Ends<usize>, steps: &[Step]) {
    let capacity = producer.capacity();
    let mut model = VecDeque::new();
    let mut next = 0_usize;
    for step in steps {
        match *step {
            Step::Push => {
                let full = model.len() == capacity;
                match producer.push(Box::new(next)) {
                    Ok(()) => model.push_back(next),
                    Err(back) => assert!(full && *back == next),
                }
                assert_eq!(full, model.len() == capacity && full);
                next += 1;
            }
            Step::PushBurst(n) => {
                let room = capacity - model.len();
                let mut batch: VecDeque<_> = (next..next + n).map(Box::new).collect();
                assert_eq!(producer.push_burst(&mut batch), n.min(room));
                model.extend(next..next + n.min(room));
                assert!(batch.into_iter().map(|b| *b).eq(next + n.min(room)..next + n), "the rest stays, in order");
                next += n;
            }
            Step::Pop(most) => {
                let mut got = Vec::new();
                assert_eq!(consumer.pop_burst(&mut got, most), most.min(model.len()));
                assert!(got.into_iter().map(|b| *b).eq(model.drain(..most.min(model.len()))));
            }
        }
        assert_eq!(consumer.is_empty(), model.is_empty());
    }
}

fn crosses_threads((mut producer, mut consumer): Ends<u64>, count: u64) {
    let sender = std::thread::spawn(move || {
        let mut batch = VecDeque::new();
        let mut next = 0;
        while next < count || !batch.is_empty() {
            while batch.len() < 7 && next < count {
                batch.push_back(Box::new(next));
                next += 1;
            }
            if producer.push_burst(&mut batch) == 0 {
                std::thread::yield_now();
            }
        }
    });
    let mut expected = 0;
    let mut got = Vec::new();
    while expected < count {
        if consumer.pop_burst(&mut got, 32) == 0 {
            std::thread::yield_now();
        }
        for message in got.drain(..) {
            assert_eq!(*message, expected);
            expected += 1;
        }
    }
    sender.join().unwrap();
    assert!(consumer.is_empty());
}

fn drops_the_rest(make: impl Fn() -> Ends<Arc<()>>) {
    let token = Arc::new(());
    let (mut producer, mut consumer) = make();
    for _ in 0..3 {
        assert!(producer.push(Box::new(token.clone())).is_ok());
    }
    let mut got = Vec::new();
    assert_eq!(consumer.pop_burst(&mut got, 1), 1);
    drop((producer, consumer));
    assert_eq!(Arc::strong_count(&token), 2, "one is still in `got`");
    drop(got);
    assert_eq!(Arc::strong_count(&token), 1);
}

macro_rules! suite {
    ($name:ident, $make:expr) => {
        mod $name {
            use super::*;

            proptest! {
                #[test]
                fn behaves_like_a_bounded_queue(slots in 1_usize..70, steps in steps()) {
                    agrees_with_the_model($make(slots), &steps);
                }
            }

            #[test]
            fn carries_messages_between_threads_in_order() {
                crosses_threads($make(64), 200_000);
                crosses_threads($make(1), 2_000);
            }

            #[test]
            fn drops_what_is_left_inside() {
                drops_the_rest(|| $make(8));
            }
        }
    };
}

suite!(software_ring, software);
#[cfg(feature = "dpdk")]
suite!(rte_ring, |slots: usize| crate::ring::rte_ring(crate::reactor::test_eal(), slots as u32).unwrap());
