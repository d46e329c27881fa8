//! The software ring under loom: every interleaving of a small exchange.

mod primitive {
    pub(super) use loom::cell::UnsafeCell;
    pub(super) use loom::sync::Arc;
    pub(super) use loom::sync::atomic::{AtomicUsize, Ordering};
}

use super::{Consumer, Producer};

// The same code a second time, over loom's primitives: that is what this file is for.
#[expect(clippy::duplicate_mod)]
#[path = "spsc.rs"]
mod spsc;

#[test]
fn messages_cross_in_order_and_slots_are_reused() {
    loom::model(|| {
        let (mut producer, mut consumer) = spsc::ring::<Box<usize>>(2);
        let sender = loom::thread::spawn(move || {
            let mut next = 0;
            while next < 3 {
                match producer.push(Box::new(next)) {
                    Ok(()) => next += 1,
                    Err(_) => loom::thread::yield_now(),
                }
            }
        });
        let mut got = Vec::new();
        while got.len() < 3 {
            if consumer.pop_burst(&mut got, 2) == 0 {
                loom::thread::yield_now();
            }
        }
        sender.join().unwrap();
        assert_eq!(got, [Box::new(0), Box::new(1), Box::new(2)]);
        assert!(consumer.is_empty());
    });
}

#[test]
fn what_is_inside_when_both_ends_go_is_dropped_once() {
    loom::model(|| {
        let token = loom::sync::Arc::new(());
        let (mut producer, consumer) = spsc::ring(2);
        let sent = token.clone();
        let sender = loom::thread::spawn(move || producer.push(Box::new(sent)).is_ok());
        drop(consumer);
        assert!(sender.join().unwrap());
        assert_eq!(loom::sync::Arc::strong_count(&token), 1);
    });
}
