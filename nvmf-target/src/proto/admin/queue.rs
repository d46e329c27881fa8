//! The admin queue pair: the transport and the controller's admin side, joined.
//!
//! Owns the order of things on one connection. It must not know sockets. It has the same shape as an I/O queue pair:
//! bytes in, bytes out, time as an argument. Invariant: while an answer is still to be sent no other command is carried
//! out, so that one connection never holds more than one answer's data.

use std::io::IoSlice;
use std::time::Instant;

use super::intake::{Intake, Request};
use super::keep_alive::Verdict;
use super::{Action, AdminController, Answer};
use crate::buffer::IoBuf;
use crate::proto::tcp::{CloseReason, Slot, TcpQueuePair};
use crate::wire::{CommandId, Cqe, QueueId, Status};

/// What the driver has to do, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Errand {
    /// Close every I/O queue, then call [`AdminQueuePair::stopped`].
    StopQueues,
    /// Wait until no command is at a back end, flush, then call [`AdminQueuePair::stopped`].
    DrainAndFlush,
}

/// See the module.
pub struct AdminQueuePair {
    tcp: TcpQueuePair,
    intake: Intake,
    pub(super) controller: AdminController,
    /// Slots of held Asynchronous Event Requests.
    held: Vec<(CommandId, Slot)>,
    errand: Option<Errand>,
    expired: bool,
}

impl AdminQueuePair {
    /// The queue whose Connect was accepted on `tcp`.
    pub fn new(tcp: TcpQueuePair, controller: AdminController) -> Self {
        let intake = Intake::new(AdminController::data_limit_bytes());
        Self { tcp, intake, controller, held: Vec::new(), errand: None, expired: false }
    }

    /// The controller's admin side.
    pub fn controller(&self) -> &AdminController {
        &self.controller
    }

    /// Where the next received bytes go; empty: don't read now.
    pub fn receive_slice(&mut self) -> &mut [u8] {
        self.tcp.receive_slice()
    }

    /// `len_bytes` were read into it.
    pub fn received(&mut self, len_bytes: usize, now: Instant) {
        self.tcp.received(len_bytes, now);
        self.work(now);
    }

    /// Appends the bytes that are ready to be sent.
    pub fn gather<'a>(&'a self, out: &mut Vec<IoSlice<'a>>) {
        self.tcp.gather(out);
    }

    /// Bytes are ready to be sent.
    pub fn has_output(&self) -> bool {
        self.tcp.has_output()
    }

    /// The socket took `len_bytes` of them.
    pub fn sent(&mut self, len_bytes: usize, now: Instant) {
        self.tcp.sent(len_bytes, now);
        self.work(now);
    }

    /// The socket's read side ended, or it failed.
    pub fn peer_closed(&mut self) {
        self.tcp.peer_closed();
    }

    /// Our side ends the connection.
    pub fn terminate(&mut self) {
        self.tcp.terminate();
    }

    /// A deadline passed.
    pub fn tick(&mut self, now: Instant) {
        self.tcp.tick(now);
        if self.controller.check_keep_alive(now) == Verdict::Expired {
            self.expired = true;
        }
        self.work(now);
    }

    /// When `tick` is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        [self.tcp.next_deadline(), self.controller.next_deadline()].into_iter().flatten().min()
    }

    /// The connection is over.
    pub fn poll_close(&self) -> Option<CloseReason> {
        self.tcp.poll_close()
    }

    /// The host has been silent for its keep-alive timeout: the association is to end.
    pub fn has_expired(&self) -> bool {
        self.expired
    }

    /// What the driver has to do next.
    pub fn poll_errand(&mut self) -> Option<Errand> {
        self.errand.take()
    }

    /// The errand is done; `flushed` is false if something could not be made durable.
    pub fn stopped(&mut self, flushed: bool) {
        self.controller.stopped(flushed);
    }

    /// A namespace was added, removed or resized.
    pub fn namespace_changed(&mut self, nsid: u32, now: Instant) {
        self.controller.namespace_changed(nsid);
        self.act(now);
    }

    /// This host's discovery log has changed.
    pub fn discovery_log_changed(&mut self, now: Instant) {
        self.controller.discovery_log_changed();
        self.act(now);
    }

    /// Whether a command has arrived on any of the controller's queues since the last call.
    pub fn take_life_sign(&mut self) -> bool {
        self.controller.take_life_sign()
    }

    /// Asynchronous Event Requests that are held.
    pub fn held_requests(&self) -> usize {
        self.held.len()
    }

    fn work(&mut self, now: Instant) {
        while !self.tcp.has_output() && self.tcp.poll_close().is_none() {
            let Some(request) = self.intake.poll(&mut self.tcp, now) else { break };
            self.carry_out(request, now);
            self.act(now);
        }
    }

    fn carry_out(&mut self, request: Request, now: Instant) {
        let Request { slot, sqe, data } = request;
        match self.controller.command(&sqe, &data, now) {
            Some(answer) => self.answer(slot, answer, now),
            None => self.held.push((sqe.command_id(), slot)),
        }
    }

    /// Does what follows from a command or an event.
    fn act(&mut self, now: Instant) {
        while let Some(action) = self.controller.poll_action() {
            match action {
                Action::StopQueues => {
                    // A reset: what is outstanding ends without an answer, but the transport wants its slots back.
                    for (_, slot) in std::mem::take(&mut self.held) {
                        self.tcp.respond(slot, cqe(0, Status::ABORTED_SQ_DELETION), now);
                    }
                    self.errand = Some(Errand::StopQueues);
                }
                Action::StopQueuesAndFlush => self.errand = Some(Errand::DrainAndFlush),
                Action::Complete(cid, dw0, status) => {
                    if let Some(at) = self.held.iter().position(|(held, _)| *held == cid) {
                        let (_, slot) = self.held.swap_remove(at);
                        self.tcp.respond(slot, cqe(u64::from(dw0), status), now);
                    }
                }
            }
        }
    }

    fn answer(&mut self, slot: Slot, answer: Answer, now: Instant) {
        let cqe = cqe(answer.result, answer.status);
        if answer.data.is_empty() {
            self.tcp.respond(slot, cqe, now);
        } else {
            self.tcp.send_data(slot, IoBuf::copy_of(&answer.data), cqe, now);
        }
    }
}

/// A completion; the transport fills in the rest.
fn cqe(result: u64, status: Status) -> Cqe {
    Cqe { dw0: result as u32, dw1: (result >> 32) as u32, sqhd: 0, sqid: QueueId(0), cid: CommandId(0), status }
}
