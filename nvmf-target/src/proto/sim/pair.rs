//! The target's end of one I/O queue with everything around it, and a host at the other end.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::{MemBackend, Random, Replies};
use crate::backend::{Backend, Done, ReplySink};
use crate::buffer::{BoundedHeapPool, BufferPool, HeapPool, IoBuf};
use crate::proto::controller_shared::{ControllerLimits, ControllerShared, ControllerState, Namespace, NamespaceTable};
use crate::proto::host::{Completion, HostConfig, HostData, HostQueuePair};
use crate::proto::io_queue::{Command, IoQueuePair};
use crate::proto::queue_shared::QueueShared;
use crate::proto::tcp::{CloseReason, QueueParams, TcpConfig, TcpEvent, TcpQueuePair};
use crate::wire::opcode::fabrics;
use crate::wire::{ControllerId, Cqe, NamespaceId, QueueId, Sqe, Status};

/// What a [`Pair`] is made of.
#[derive(Debug, Clone)]
pub struct PairConfig {
    /// Decides how the stream is cut and when back ends answer.
    pub seed: u64,
    /// The longest piece of the stream that arrives at once; 0: all of it.
    pub piece_max_bytes: usize,
    /// The target's transport.
    pub tcp: TcpConfig,
    /// The controller's limits.
    pub limits: ControllerLimits,
    /// The host's end.
    pub host: HostConfig,
    /// SQSIZE + 1.
    pub entries: u16,
    /// CATTR bit 2 is 0.
    pub sq_flow_control: bool,
    /// Size of the target's pool.
    pub pool_bytes: usize,
    /// Block size of namespace 1.
    pub block_bytes: u32,
    /// Size of namespace 1.
    pub block_count: u64,
}

impl Default for PairConfig {
    fn default() -> Self {
        Self {
            seed: 1,
            piece_max_bytes: 0,
            tcp: TcpConfig::default(),
            limits: ControllerLimits::default(),
            host: HostConfig { in_capsule_bytes: 8192, ..HostConfig::default() },
            entries: 32,
            sq_flow_control: true,
            pool_bytes: 64 << 20,
            block_bytes: 512,
            block_count: 16 << 10,
        }
    }
}

/// The target's end: before Connect the transport alone, then the queue.
enum TargetEnd {
    Fresh(Box<TcpQueuePair>),
    Connected(Box<IoQueuePair>),
    /// Only while the one becomes the other.
    Between,
}

/// See the module.
pub struct Pair {
    config: PairConfig,
    /// Virtual time.
    pub now: Instant,
    random: Random,
    target: TargetEnd,
    /// The host's end; unused when raw bytes are sent.
    pub host: HostQueuePair,
    /// What the queue shares with its controller.
    pub shared: Arc<ControllerShared>,
    /// Namespace 1.
    pub backend: Arc<MemBackend>,
    /// The target's pool.
    pub pool: Arc<BoundedHeapPool>,
    /// Answers of back ends that wait.
    pub replies: Arc<Replies>,
    /// Back ends answer only through [`Pair::answer_one`].
    pub hold_replies: bool,
    to_target: VecDeque<u8>,
    to_host: VecDeque<u8>,
}

impl Pair {
    /// Both ends, nothing sent yet.
    pub fn new(config: PairConfig) -> Self {
        let backend = Arc::new(MemBackend::new(config.block_bytes, config.block_count));
        let namespace = Namespace {
            nsid: NamespaceId(1),
            backend: Arc::clone(&backend) as Arc<dyn Backend>,
            write_protected: false,
        };
        let table = Arc::new(NamespaceTable::new([namespace]));
        let shared = Arc::new(ControllerShared::new(ControllerId(1), config.limits, table, None));
        shared.set_state(ControllerState::Ready);
        let pool = Arc::new(BoundedHeapPool::new(config.pool_bytes, 4 << 20));
        let admin_pool = Arc::new(HeapPool { largest_bytes: 8192 });
        Self {
            now: Instant::now(),
            random: Random::new(config.seed),
            target: TargetEnd::Fresh(Box::new(TcpQueuePair::new(config.tcp.clone(), admin_pool))),
            host: HostQueuePair::new(config.host.clone()),
            shared,
            backend,
            pool,
            replies: Arc::default(),
            hold_replies: false,
            to_target: VecDeque::new(),
            to_host: VecDeque::new(),
            config,
        }
    }

    /// Both ends, connected, with an honest host.
    pub fn connected(config: PairConfig) -> Self {
        let mut pair = Self::new(config);
        pair.run();
        let data = HostData::ToController(IoBuf::heap(1024));
        pair.submit(connect_sqe(), data, u64::MAX);
        pair.run();
        let completion = pair.host.poll_completion();
        assert!(completion.is_some_and(|c| c.cqe.status.is_success()), "Connect is answered");
        pair.host.configure(pair.config.entries, pair.config.limits.in_capsule_bytes);
        pair
    }

    /// The target's queue, once connected.
    pub fn queue(&mut self) -> Option<&mut IoQueuePair> {
        match &mut self.target {
            TargetEnd::Connected(queue) => Some(queue),
            _ => None,
        }
    }

    /// Submits a command on the host's end.
    ///
    /// # Panics
    /// If the host's machine doesn't take it.
    pub fn submit(&mut self, sqe: Sqe, data: HostData, context: u64) {
        self.host.submit(sqe, data, context).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Does one command and gives its completion.
    ///
    /// # Panics
    /// If it doesn't complete, or another one does first.
    pub fn command(&mut self, sqe: Sqe, data: HostData) -> Completion {
        self.submit(sqe, data, 77);
        self.run();
        let done = self.host.poll_completion().unwrap_or_else(|| panic!("no completion: {:?}", self.closed()));
        assert_eq!(done.context, 77, "another command completed");
        done
    }

    /// Bytes that a host of the test's own making sends.
    pub fn send_raw(&mut self, bytes: &[u8]) {
        self.to_target.extend(bytes);
    }

    /// Takes all bytes that the target has sent.
    pub fn take_raw(&mut self) -> Vec<u8> {
        self.to_host.drain(..).collect()
    }

    /// Runs the target's end until nothing moves: raw bytes stay for [`Pair::take_raw`].
    pub fn run_raw(&mut self) {
        while self.step_target() {}
    }

    /// Runs both ends until nothing moves.
    pub fn run(&mut self) {
        loop {
            let mut moved = self.step_target();
            moved |= self.step_host();
            if !moved {
                return;
            }
        }
    }

    /// Why the target's end closed, if it did.
    pub fn closed(&self) -> Option<CloseReason> {
        match &self.target {
            TargetEnd::Fresh(tcp) => tcp.poll_close(),
            TargetEnd::Connected(queue) => queue.poll_close(),
            TargetEnd::Between => None,
        }
    }

    /// Lets virtual time pass.
    pub fn pass(&mut self, time: Duration) {
        self.now += time;
        match &mut self.target {
            TargetEnd::Fresh(tcp) => tcp.tick(self.now),
            TargetEnd::Connected(queue) => queue.tick(self.now),
            TargetEnd::Between => {}
        }
    }

    /// When the target's end wants to be woken.
    pub fn next_deadline(&self) -> Option<Instant> {
        match &self.target {
            TargetEnd::Fresh(tcp) => tcp.next_deadline(),
            TargetEnd::Connected(queue) => queue.next_deadline(),
            TargetEnd::Between => None,
        }
    }

    /// Delivers the oldest answer of a back end.
    pub fn answer_oldest(&mut self) -> bool {
        let Some((token, reply)) = self.replies.take(0) else { return false };
        let now = self.now;
        if let Some(queue) = self.queue() {
            queue.complete(token, reply, now);
        }
        true
    }

    /// Delivers one back end's answer, whichever.
    pub fn answer_one(&mut self) -> bool {
        let index = self.random.below(self.replies.len());
        let Some((token, reply)) = self.replies.take(index) else { return false };
        let now = self.now;
        if let Some(queue) = self.queue() {
            queue.complete(token, reply, now);
        }
        true
    }

    fn piece(&mut self, available: usize) -> usize {
        match self.config.piece_max_bytes {
            0 => available,
            most => available.min(1 + self.random.below(most)),
        }
    }

    /// One round of the target's end; false: nothing moved.
    fn step_target(&mut self) -> bool {
        let mut moved = self.feed_target();
        self.connect_if_asked();
        moved |= self.submit_all();
        if !self.hold_replies && self.random.below(3) > 0 {
            moved |= self.answer_one();
        }
        moved |= !self.hold_replies && !self.replies.is_empty();
        let (now, pool_waits) = (self.now, self.queue().is_some_and(|queue| queue.wants_buffers().is_some()));
        if pool_waits && let Some(queue) = self.queue() {
            queue.buffers_available(now);
            moved |= queue.wants_buffers().is_none();
        }
        moved | self.drain_target()
    }

    fn feed_target(&mut self) -> bool {
        let piece = self.piece(self.to_target.len());
        let now = self.now;
        let into = match &mut self.target {
            TargetEnd::Fresh(tcp) => tcp.receive_slice(),
            TargetEnd::Connected(queue) => queue.receive_slice(),
            TargetEnd::Between => &mut [],
        };
        let len = piece.min(into.len());
        if len == 0 {
            return false;
        }
        for (to, byte) in into.iter_mut().zip(self.to_target.drain(..len)) {
            *to = byte;
        }
        match &mut self.target {
            TargetEnd::Fresh(tcp) => tcp.received(len, now),
            TargetEnd::Connected(queue) => queue.received(len, now),
            TargetEnd::Between => {}
        }
        true
    }

    /// Accepts a Connect, as the control plane would.
    fn connect_if_asked(&mut self) {
        let TargetEnd::Fresh(tcp) = &mut self.target else { return };
        let Some(event) = tcp.poll_event() else { return };
        let TcpEvent::Command { slot, sqe, .. } = event else { return };
        if sqe.opcode() != fabrics::FABRICS {
            let cqe = Cqe::of(sqe.command_id(), Status::COMMAND_SEQUENCE_ERROR.dnr());
            return tcp.respond(slot, cqe, self.now);
        }
        let TargetEnd::Fresh(mut tcp) = std::mem::replace(&mut self.target, TargetEnd::Between) else { return };
        tcp.establish(QueueParams {
            entries: self.config.entries,
            sq_flow_control: self.config.sq_flow_control,
            in_capsule_bytes: self.config.limits.in_capsule_bytes,
            staging_bytes: 64 << 10,
        });
        tcp.respond(slot, Cqe::of(sqe.command_id(), Status::SUCCESS), self.now);
        let shared_queue = Arc::new(QueueShared::new(QueueId(1), self.config.entries));
        let registered = self.shared.register_queue(Arc::clone(&shared_queue));
        assert!(registered.is_ok(), "queue 1 is free");
        let mut queue = IoQueuePair::new(*tcp, Arc::clone(&self.shared), shared_queue);
        let pool: Arc<dyn BufferPool> = Arc::clone(&self.pool) as _;
        queue.attach(pool, Waker::noop().clone(), self.now);
        self.target = TargetEnd::Connected(Box::new(queue));
    }

    fn submit_all(&mut self) -> bool {
        let mut moved = false;
        let (now, replies) = (self.now, Arc::clone(&self.replies));
        let Some(queue) = self.queue() else { return false };
        while let Some(Command { token, backend, operation }) = queue.poll_command(now) {
            backend.submit(operation, Done::new(Arc::clone(&replies) as Arc<dyn ReplySink>, token));
            moved = true;
        }
        moved
    }

    fn drain_target(&mut self) -> bool {
        let most = self.piece(usize::MAX);
        let mut slices: Vec<IoSlice<'_>> = Vec::new();
        match &self.target {
            TargetEnd::Fresh(tcp) => tcp.gather(&mut slices),
            TargetEnd::Connected(queue) => queue.gather(&mut slices),
            TargetEnd::Between => {}
        }
        let len = copy_out(&slices, most, &mut self.to_host);
        if len == 0 {
            return false;
        }
        match &mut self.target {
            TargetEnd::Fresh(tcp) => tcp.sent(len, self.now),
            TargetEnd::Connected(queue) => queue.sent(len, self.now),
            TargetEnd::Between => {}
        }
        true
    }

    fn step_host(&mut self) -> bool {
        let piece = self.piece(self.to_host.len());
        let into = self.host.receive_slice();
        let len = piece.min(into.len());
        for (to, byte) in into.iter_mut().zip(self.to_host.drain(..len)) {
            *to = byte;
        }
        self.host.received(len);
        let most = self.piece(usize::MAX);
        let mut slices: Vec<IoSlice<'_>> = Vec::new();
        self.host.gather(&mut slices);
        let sent = copy_out(&slices, most, &mut self.to_target);
        self.host.sent(sent);
        len > 0 || sent > 0
    }
}

/// Appends up to `most` bytes of the slices, and says how many.
fn copy_out(slices: &[IoSlice<'_>], most: usize, to: &mut VecDeque<u8>) -> usize {
    let mut left = most;
    for slice in slices {
        let len = slice.len().min(left);
        to.extend(&slice[..len]);
        left -= len;
    }
    most - left
}

/// A Connect command; its data is not looked at here.
pub fn connect_sqe() -> Sqe {
    let mut sqe = Sqe::new(fabrics::FABRICS);
    sqe.set_fabrics_type(fabrics::TYPE_CONNECT);
    sqe
}
