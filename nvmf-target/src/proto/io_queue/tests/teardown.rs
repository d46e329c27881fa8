//! Ends: of transfers, connections, controllers; and what they leave behind.

use std::time::Duration;

use super::*;
use crate::proto::queue_shared::AbortOutcome;

fn writes_in_r2t_wait(host: &mut RawHost, count: u16) -> Vec<u16> {
    let mut ttags = Vec::new();
    for cid in 0..count {
        let sqe = ranged_transport(nvm::WRITE, u64::from(cid) * 16, 16, 512);
        let bytes = host.capsule_as_is(with_cid(sqe, cid), None);
        ttags.push(host.exchange(&bytes)[0].r2t().expect("data is asked for").ttag);
    }
    ttags
}

/// H30: writes that wait for data when the connection goes give their buffers back at once.
#[test]
fn h30_buffers_and_counts_return_to_zero_when_the_connection_goes() {
    for way in 0..3 {
        let mut host = RawHost::connected(PairConfig::default());
        writes_in_r2t_wait(&mut host, 20);
        assert_eq!(host.pair.pool.out_bytes(), 20 * 8192);
        let queue = host.pair.queue().expect("connected");
        match way {
            0 => queue.peer_closed(),
            1 => queue.terminate(),
            _ => host.pair.shared.terminate(),
        }
        host.pair.pass(Duration::ZERO);
        assert!(host.pair.closed().is_some());
        assert_eq!(host.pair.pool.out_bytes(), 0);
        assert_eq!(host.pair.shared.in_flight(), 0);
    }
}

/// Commands at the back end when the connection goes: counted until they are answered, their buffers then free.
#[test]
fn h30_replies_to_a_dead_queue_are_dropped_and_counted() {
    let mut host = RawHost::connected(PairConfig::default());
    host.pair.hold_replies = true;
    for cid in 0..4 {
        let sqe = ranged_transport(nvm::READ, 0, 16, 512);
        let bytes = host.capsule_as_is(with_cid(sqe, cid), None);
        host.exchange(&bytes);
    }
    assert_eq!(host.pair.shared.in_flight(), 4);
    host.pair.queue().expect("connected").peer_closed();
    assert_eq!(host.pair.closed(), Some(CloseReason::PeerClosed));
    for left in (0..4).rev() {
        assert!(host.pair.answer_one());
        assert_eq!(host.pair.shared.in_flight(), left);
    }
    assert_eq!(host.pair.pool.out_bytes(), 0);
    assert!(host.receive().is_empty(), "nothing is said to a peer that is gone");
}

/// Once the controller is terminated, nothing that waits reaches a back end.
#[test]
fn a_terminated_controllers_commands_never_take_effect() {
    let mut host = RawHost::connected(PairConfig::default());
    let ttags = writes_in_r2t_wait(&mut host, 2);
    host.pair.shared.terminate();
    let bytes = host.h2c(0, ttags[0], 0, &[7; 8192], true);
    host.exchange(&bytes);
    assert!(host.pair.backend.log().is_empty());
    assert!(host.pair.backend.contents().iter().all(|b| *b == 0));
    assert_eq!(host.pair.closed(), Some(CloseReason::Terminated));
}

#[test]
fn h30_a_host_that_never_sends_its_data_is_cut() {
    let config = PairConfig::default();
    let timeout = config.tcp.transfer_timeout;
    let mut host = RawHost::connected(config);
    assert_eq!(host.pair.next_deadline(), None, "an idle queue needs no timer");
    writes_in_r2t_wait(&mut host, 1);
    assert_eq!(host.pair.next_deadline(), Some(host.pair.now + timeout));
    host.pair.pass(timeout - Duration::from_millis(1));
    assert_eq!(host.pair.closed(), None);
    host.pair.pass(Duration::from_millis(1));
    assert_eq!(host.pair.closed(), Some(CloseReason::TransferTimeout));
    assert_eq!(host.pair.pool.out_bytes(), 0);
}

/// One byte now and then keeps the connection, but not for ever.
#[test]
fn a_host_that_trickles_its_data_is_cut() {
    let config = PairConfig::default();
    let step = config.tcp.transfer_timeout / 2;
    let mut host = RawHost::connected(config);
    let ttag = writes_in_r2t_wait(&mut host, 1)[0];
    let bytes = host.h2c(0, ttag, 0, &[7; 8192], true);
    let mut steps = 0;
    for byte in bytes {
        host.exchange(&[byte]);
        host.pair.pass(step);
        steps += 1;
        if host.pair.closed().is_some() {
            break;
        }
    }
    assert_eq!((host.pair.closed(), steps), (Some(CloseReason::TransferTimeout), 16));
}

#[test]
fn h30_a_slow_reader_is_cut() {
    let config = PairConfig::default();
    let timeout = config.tcp.send_timeout;
    let mut pair = Pair::connected(config);
    let now = pair.now;
    let sqe = with_cid(ranged(nvm::FLUSH, 0, 1), 1);
    let common = crate::wire::pdu::CommonHeader::bare(crate::wire::pdu::PduType::CapsuleCmd);
    let bytes = crate::wire::pdu::CapsuleCmd { common, sqe }.encode();
    let replies = Arc::clone(&pair.replies);
    let queue = pair.queue().expect("connected");
    queue.receive_slice()[..bytes.len()].copy_from_slice(&bytes);
    queue.received(bytes.len(), now);
    let command = queue.poll_command(now).expect("a flush");
    let done = crate::backend::Done::new(Arc::clone(&replies) as _, command.token);
    command.backend.submit(command.operation, done);
    let (token, reply) = replies.take(0).expect("answered");
    queue.complete(token, reply, now);
    assert_eq!(queue.next_deadline(), Some(now + timeout));
    queue.sent(1, now + timeout / 2);
    queue.tick(now + timeout - Duration::from_millis(1));
    assert_eq!(queue.poll_close(), None);
    queue.tick(now + timeout);
    assert_eq!(queue.poll_close(), Some(CloseReason::SendTimeout), "a byte now and then is no reading");
}

/// A reader that is slow but reads is kept.
#[test]
fn a_reader_that_takes_its_time_is_kept() {
    let config = PairConfig::default();
    let step = config.tcp.send_timeout - Duration::from_millis(1);
    let mut host = RawHost::connected(config);
    let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::READ, 0, 2048, 512), 1), None);
    let mut now = host.pair.now;
    let replies = Arc::clone(&host.pair.replies);
    let queue = host.pair.queue().expect("connected");
    queue.receive_slice()[..bytes.len()].copy_from_slice(&bytes);
    queue.received(bytes.len(), now);
    let command = queue.poll_command(now).expect("a read");
    command.backend.submit(command.operation, crate::backend::Done::new(Arc::clone(&replies) as _, command.token));
    let (token, reply) = replies.take(0).expect("answered");
    queue.complete(token, reply, now);
    for _ in 0..15 {
        now += step;
        queue.tick(now);
        assert_eq!(queue.poll_close(), None);
        queue.sent(64 << 10, now);
    }
    now += step;
    queue.sent((64 << 10) + 48, now);
    assert!(!queue.has_output());
    assert_eq!(queue.next_deadline(), None);
}

/// H57: aborted before its data came: the data is taken, nothing is written, 00/07h.
#[test]
fn h57_an_aborted_write_never_reaches_the_back_end() {
    let mut host = RawHost::connected(PairConfig::default());
    let ttags = writes_in_r2t_wait(&mut host, 2);
    let outcome = host.pair.shared.abort(QueueId(1), CommandId(0));
    assert_eq!(outcome, AbortOutcome::Aborted);
    host.pair.pass(Duration::ZERO);
    assert!(host.receive().is_empty(), "its data is still to come");
    let bytes = host.h2c(0, ttags[0], 0, &[7; 8192], true);
    assert_eq!(only_status(&host.exchange(&bytes), 0), Status::ABORT_REQUESTED);
    let bytes = host.h2c(1, ttags[1], 0, &[8; 8192], true);
    assert_eq!(only_status(&host.exchange(&bytes), 1), Status::SUCCESS);
    assert_eq!(host.pair.backend.log(), ["write"]);
    assert_eq!(host.pair.shared.abort(QueueId(1), CommandId(0)), AbortOutcome::NotFound);
    assert_eq!(host.pair.shared.abort(QueueId(9), CommandId(0)), AbortOutcome::NotFound);
}

/// H57: at the back end, Abort says so and the command ends as it ends, once.
#[test]
fn h57_abort_of_a_submitted_command_is_too_late() {
    let mut host = RawHost::connected(PairConfig::default());
    host.pair.hold_replies = true;
    let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::READ, 0, 1, 512), 4), None);
    assert!(host.exchange(&bytes).is_empty());
    assert_eq!(host.pair.shared.abort(QueueId(1), CommandId(4)), AbortOutcome::TooLate);
    host.pair.answer_one();
    let replies = host.receive();
    assert_eq!(replies.len(), 2, "data and one completion");
}

/// Abort of commands that wait for the pool, one half of a fused pair among them.
#[test]
fn h57_abort_while_waiting_for_buffers() {
    let config = PairConfig { pool_bytes: 8192, ..PairConfig::default() };
    let mut host = RawHost::connected(config);
    let ttag = writes_in_r2t_wait(&mut host, 1)[0];
    for cid in 1..=3 {
        let bytes = host.capsule_as_is(with_cid(ranged_transport(nvm::READ, 0, 8, 512), cid), None);
        assert!(host.exchange(&bytes).is_empty());
    }
    assert_eq!(host.pair.queue().expect("connected").wants_buffers(), Some(Wanted { len_bytes: 4096, count: 1 }));
    assert_eq!(host.pair.shared.abort(QueueId(1), CommandId(2)), AbortOutcome::Aborted);
    host.pair.pass(Duration::ZERO);
    assert_eq!(only_status(&host.receive(), 2), Status::ABORT_REQUESTED);
    let bytes = host.h2c(0, ttag, 0, &[7; 8192], true);
    let replies = host.exchange(&bytes);
    let mut done: Vec<u16> = replies.iter().filter_map(|r| r.completion()).map(|c| c.cqe.cid.0).collect();
    done.sort_unstable();
    assert_eq!(done, [0, 1, 3]);
}

#[test]
fn commands_before_ready_and_after_shutdown_are_refused() {
    let mut host = RawHost::connected(PairConfig::default());
    let refused = Status::COMMAND_SEQUENCE_ERROR.dnr();
    for state in [ControllerState::Disabled, ControllerState::ShuttingDown] {
        host.pair.shared.set_state(state);
        assert_eq!(status_of_raw(&mut host, ranged(nvm::FLUSH, 0, 1), 1), refused);
    }
    host.pair.shared.set_state(ControllerState::Ready);
    assert_eq!(status_of_raw(&mut host, ranged(nvm::FLUSH, 0, 1), 1), Status::SUCCESS);
}

/// H34: the queue id is free as soon as the queue pair is dropped, not before.
#[test]
fn h34_a_queue_id_is_free_once_its_queue_pair_is_gone() {
    let host = RawHost::connected(PairConfig::default());
    let shared = Arc::clone(&host.pair.shared);
    let second = || Arc::new(QueueShared::new(QueueId(1), 2));
    let live = shared.register_queue(second()).expect_err("the first lives");
    assert!(!live.is_gone());
    drop(host);
    assert!(shared.register_queue(second()).is_ok());
}
