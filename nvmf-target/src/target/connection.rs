//! A connection from its acceptance to its Connect: then it is an admin queue's, or goes to the queue host.
//!
//! Invariant: a connection that hasn't connected within the time limit is closed, and what it may make the target hold
//! until then is one staging buffer and one Connect.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::timeout_at;

use super::admission::{self, Admitted};
use super::connections::Ticket;
use super::controller::EndReason;
use super::socket::SocketProbe;
use super::{Target, admin_queue};
use crate::buffer::HeapPool;
use crate::proto::admin::intake::{Intake, Request};
use crate::proto::admin::queue::AdminQueuePair;
use crate::proto::connect::{self, ConnectRequest, QueueLimits, Refusal};
use crate::proto::io_queue::IoQueuePair;
use crate::proto::tcp::{CloseReason, QueueParams, Slot, TcpQueuePair};
use crate::wire::connect::{CONNECT_DATA_BYTES, accepted_dw0};
use crate::wire::opcode::fabrics;
use crate::wire::{CommandId, Cqe, QueueId, Sqe, Status};

/// How many commands that aren't an acceptable Connect a connection may try.
const ATTEMPTS: usize = 8;
/// How long the last bytes of a connection may take to leave, and what still comes is read.
const LINGER: Duration = Duration::from_millis(200);
/// The longest list of slices that one writev takes.
const SLICES_MAX: usize = 1024;

/// Serves one connection to its end, or until it is handed over.
pub(super) async fn serve(target: Arc<Target>, stream: TcpStream, peer: SocketAddr, local: SocketAddr, ticket: Ticket) {
    let pool = Arc::new(HeapPool { largest_bytes: target.config.tcp.admin_in_capsule_bytes as usize });
    let mut config = target.config.tcp.clone();
    config.send_timeout = target.config.limits.slow_reader_timeout;
    let stream = Arc::new(stream);
    let connection = Connecting {
        wire: Wire { tcp: TcpQueuePair::new(config, pool), stream },
        intake: Intake::new(CONNECT_DATA_BYTES as u32),
        target,
        peer,
        local,
        ticket,
    };
    connection.run().await;
}

/// A transport machine and its socket.
struct Wire {
    tcp: TcpQueuePair,
    stream: Arc<TcpStream>,
}

/// What both ends of a wire do next.
enum Step {
    Again,
    Closed(CloseReason),
}

impl Wire {
    /// Moves bytes; waits until there are some to move.
    async fn step(&mut self) -> Step {
        self.flush();
        if let Some(reason) = self.tcp.poll_close() {
            return Step::Closed(reason);
        }
        let readable = !self.tcp.receive_slice().is_empty();
        let interest = match (readable, self.tcp.has_output()) {
            (_, false) => Interest::READABLE,
            (true, true) => Interest::READABLE | Interest::WRITABLE,
            (false, true) => Interest::WRITABLE,
        };
        if self.stream.ready(interest).await.is_err() {
            self.tcp.peer_closed();
        }
        if readable {
            self.read();
        }
        Step::Again
    }

    fn read(&mut self) {
        match self.stream.try_read(self.tcp.receive_slice()) {
            Ok(0) => self.tcp.peer_closed(),
            Ok(n) => self.tcp.received(n, Instant::now()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.tcp.peer_closed(),
        }
    }

    fn flush(&mut self) {
        while self.tcp.has_output() {
            let mut slices: Vec<IoSlice<'_>> = Vec::new();
            self.tcp.gather(&mut slices);
            slices.truncate(SLICES_MAX);
            match self.stream.try_write_vectored(&slices) {
                Ok(n) => self.tcp.sent(n, Instant::now()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.tcp.peer_closed(),
            }
        }
    }
}

struct Connecting {
    target: Arc<Target>,
    wire: Wire,
    intake: Intake,
    peer: SocketAddr,
    local: SocketAddr,
    ticket: Ticket,
}

impl Connecting {
    async fn run(mut self) {
        let deadline = tokio::time::Instant::now() + self.target.config.limits.connect_timeout;
        let mut closing = self.target.closing.subscribe();
        for _ in 0..ATTEMPTS {
            let next = tokio::select! {
                next = timeout_at(deadline, next_command(&mut self.wire, &mut self.intake)) => next,
                _ = closing.wait_for(|closing| *closing) => return,
            };
            let request = match next {
                Ok(Ok(request)) => request,
                Ok(Err(reason)) => return self.closed(reason).await,
                Err(_) => {
                    tracing::debug!(peer = %self.peer, "closed: no Connect within the time limit");
                    return;
                }
            };
            match self.connect(request).await {
                Some(again) => self = again,
                None => return,
            }
        }
        self.flush_out().await;
    }

    /// Carries a Connect out. Gives the connection back if it was refused.
    async fn connect(self, request: Request) -> Option<Self> {
        let Request { slot, sqe, data } = request;
        let checked = self.check(&sqe, &data);
        let admitted = match checked {
            Err(refusal) => Err(refusal),
            Ok(request) if request.qid == 0 => return self.connect_admin(slot, request).await,
            Ok(request) => admission::io_queue(&self.target, &request).await.map(|queue| (request, queue)),
        };
        match admitted {
            Ok((request, (controller, queue))) => {
                self.hand_over(slot, &request, controller, queue);
                None
            }
            Err(refusal) => Some(self.refuse(slot, refusal)),
        }
    }

    fn check(&self, sqe: &Sqe, data: &[u8]) -> Result<ConnectRequest, Refusal> {
        if sqe.opcode() != fabrics::FABRICS || sqe.fabrics_type() != fabrics::TYPE_CONNECT {
            return Err(Refusal::of(Status::COMMAND_SEQUENCE_ERROR.dnr()));
        }
        let limits = &self.target.config.limits;
        let limits = QueueLimits { max_queue_entries: limits.queue_entries, max_io_queues: limits.io_queues };
        connect::check(&sqe.0, data, &limits)
    }

    async fn connect_admin(mut self, slot: Slot, request: ConnectRequest) -> Option<Self> {
        let socket = SocketProbe(Arc::downgrade(&self.wire.stream));
        let origin = (self.peer, self.local, socket);
        let Admitted { controller, admin } = match admission::admin_queue(&self.target, &request, origin).await {
            Ok(admitted) => admitted,
            Err(refusal) => return Some(self.refuse(slot, refusal)),
        };
        self.ticket.connected();
        if self.target.log_limit.allows(Instant::now()) {
            tracing::info!(
                peer = %self.peer, host = ?request.host, subsystem = ?request.subsystem,
                cntlid = controller.shared.cntlid().0, kato_ms = request.kato_ms, "host connected"
            );
        }
        let in_capsule_bytes = self.target.config.tcp.admin_in_capsule_bytes;
        let staging_bytes = self.target.config.tcp.staging_bytes;
        self.accept(slot, &request, controller.shared.cntlid().0, in_capsule_bytes, staging_bytes);
        let queue = AdminQueuePair::new(self.wire.tcp, admin);
        admin_queue::drive(self.target, controller, queue, self.wire.stream, self.ticket).await;
        None
    }

    /// Gives a connected I/O queue to the queue host.
    fn hand_over(
        mut self,
        slot: Slot,
        request: &ConnectRequest,
        controller: Arc<super::controller::Controller>,
        queue: Arc<crate::proto::queue_shared::QueueShared>,
    ) {
        let cntlid = controller.shared.cntlid().0;
        let in_capsule_bytes = self.target.config.limits.in_capsule_bytes;
        self.accept(slot, request, cntlid, in_capsule_bytes, self.target.config.io_staging_bytes);
        let pair = IoQueuePair::new(self.wire.tcp, Arc::clone(&controller.shared), Arc::clone(&queue));
        // The queue is registered and the pair exists: from here on an end of the controller reaches it.
        if admission::check_takes_queues(&controller).is_err() {
            return;
        }
        let Some(stream) = Arc::into_inner(self.wire.stream).map(TcpStream::into_std) else { return };
        self.ticket.connected();
        let (queues, host) = (&self.target.config.queues, &controller.host);
        let adopted = stream.map_err(super::AdoptError::from).and_then(|s| queues.adopt(host, pair, s));
        match adopted {
            Ok(()) => controller.hold_ticket(queue, self.ticket),
            Err(error) => {
                if self.target.log_limit.allows(Instant::now()) {
                    tracing::warn!(peer = %self.peer, cntlid, qid = request.qid, %error, "I/O queue not taken over");
                }
            }
        }
    }

    fn accept(
        &mut self,
        slot: Slot,
        request: &ConnectRequest,
        cntlid: u16,
        in_capsule_bytes: u32,
        staging_bytes: usize,
    ) {
        self.wire.tcp.establish(QueueParams {
            entries: request.queue_entries,
            sq_flow_control: !request.disable_sq_flow_control,
            in_capsule_bytes,
            staging_bytes,
        });
        let cqe = Cqe { dw0: accepted_dw0(cntlid), ..Cqe::of(CommandId(0), Status::SUCCESS) };
        self.wire.tcp.respond(slot, cqe, Instant::now());
    }

    fn refuse(mut self, slot: Slot, refusal: Refusal) -> Self {
        if self.target.log_limit.allows(Instant::now()) {
            tracing::info!(peer = %self.peer, status = %refusal.status, dw0 = refusal.dw0, "Connect refused");
        }
        let cqe = Cqe { dw0: refusal.dw0, sqid: QueueId(0), ..Cqe::of(CommandId(0), refusal.status) };
        self.wire.tcp.respond(slot, cqe, Instant::now());
        self
    }

    async fn closed(self, reason: CloseReason) {
        tracing::debug!(peer = %self.peer, ?reason, "connection closed before Connect");
        if matches!(reason, CloseReason::ProtocolError { .. }) {
            linger(&self.wire.stream).await;
        }
    }

    /// Lets the last answer leave.
    async fn flush_out(mut self) {
        let _ = tokio::time::timeout(LINGER, async {
            while self.wire.tcp.has_output() && matches!(self.wire.step().await, Step::Again) {}
        })
        .await;
        linger(&self.wire.stream).await;
    }
}

async fn next_command(wire: &mut Wire, intake: &mut Intake) -> Result<Request, CloseReason> {
    loop {
        if let Some(request) = intake.poll(&mut wire.tcp, Instant::now()) {
            return Ok(request);
        }
        if let Step::Closed(reason) = wire.step().await {
            return Err(reason);
        }
    }
}

/// Ends our side and reads what still comes for a moment, so that the last PDU isn't lost to a reset.
pub(super) async fn linger(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).shutdown(std::net::Shutdown::Write);
    let mut sink = [0; 4096];
    let drain = async {
        while stream.readable().await.is_ok() {
            match stream.try_read(&mut sink) {
                Ok(n) if n > 0 => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
    };
    let _ = tokio::time::timeout(LINGER, drain).await;
}

/// Why the association of an admin queue whose connection ended so is over.
pub(super) fn end_reason(reason: CloseReason) -> EndReason {
    match reason {
        CloseReason::PeerClosed | CloseReason::PeerTerminated { .. } => EndReason::HostClosed,
        CloseReason::SendTimeout => EndReason::SlowReader,
        CloseReason::ProtocolError { .. } | CloseReason::TransferTimeout | CloseReason::Terminated => {
            EndReason::Transport
        }
    }
}
