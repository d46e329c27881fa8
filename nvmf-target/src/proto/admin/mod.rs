//! A controller's admin side: what each admin command does (NVMe Base 2.0 §5, NVMe-oF 1.1 §3).
//!
//! Owns the controller's state as a host sees it: properties, features, events, error log, keep-alive. It must not
//! know PDUs, sockets or clocks: a command and its data go in, an answer comes out, and what has to happen outside
//! (queues to stop, caches to flush) is said by [`AdminController::poll_action`]. Invariant: every command is
//! answered once, but for Asynchronous Event Requests, of which a bounded number is held.

pub mod async_event;
pub mod error_log;
pub mod facts;
pub mod feature;
pub mod identify;
pub mod intake;
pub mod keep_alive;
pub mod log_page;
mod pages;
pub mod property;
pub mod queue;

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use self::async_event::AsyncEvents;
use self::error_log::ErrorLog;
use self::facts::ControllerFacts;
use self::feature::{Features, Live};
use self::identify::Namespaces;
use self::keep_alive::{DISCOVERY_IDLE_LIMIT, KeepAlive, Verdict};
use self::property::{Properties, Transition};
use super::controller_shared::{CommandError, ControllerShared, ControllerState, ErrorSink};
use super::discovery::DiscoverySource;
use super::queue_shared::AbortOutcome;
use crate::wire::log_pages::{ErrorEntry, TRTYPE_TCP};
use crate::wire::opcode::{admin, fabrics};
use crate::wire::properties::PropertyCommand;
use crate::wire::{CommandId, NamespaceId, QueueId, Sqe, Status};

/// What kind of controller it is, and where its answers come from.
pub enum Role {
    /// Serves namespaces.
    Io(Arc<dyn Namespaces + Send + Sync>),
    /// Serves the discovery log.
    Discovery(Arc<dyn DiscoverySource>),
}

/// The answer to a command: result, status, and data for the host.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// Dwords 0 and 1 of the completion.
    pub result: u64,
    /// How it ended.
    pub status: Status,
    /// Data for the host, exactly as long as is to be sent. Empty if there is none.
    pub data: Vec<u8>,
}

impl Answer {
    fn result(result: u64) -> Self {
        Self { result, status: Status::SUCCESS, data: Vec::new() }
    }

    fn data(data: Vec<u8>) -> Self {
        Self { result: 0, status: Status::SUCCESS, data }
    }

    /// A failed command.
    pub fn failed(status: Status) -> Self {
        Self { result: 0, status, data: Vec::new() }
    }
}

/// What has to be done outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Close every I/O queue, then call [`AdminController::stopped`].
    StopQueues,
    /// Let what is at back ends finish, flush every namespace that has a write cache, then call
    /// [`AdminController::stopped`].
    StopQueuesAndFlush,
    /// Complete this held Asynchronous Event Request (or one that was aborted).
    Complete(CommandId, u32, Status),
}

/// The error log, shared with the controller's I/O queues.
#[derive(Debug, Default)]
pub struct SharedErrorLog(Mutex<ErrorLog>);

impl SharedErrorLog {
    fn with<T>(&self, f: impl FnOnce(&mut ErrorLog) -> T) -> T {
        // The log is whole after every push, even if a thread that held it died.
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ErrorSink for SharedErrorLog {
    fn record(&self, error: CommandError) {
        let entry = ErrorEntry {
            error_count: 0,
            sqid: error.qid.0,
            cid: error.cid.0,
            status_field: error.status.bits() << 1,
            parameter_location: error.parameter_location,
            lba: error.lba,
            nsid: error.nsid.0,
            trtype: TRTYPE_TCP,
        };
        self.with(|log| log.push(entry));
    }
}

/// See the module.
pub struct AdminController {
    role: Role,
    facts: ControllerFacts,
    shared: Arc<ControllerShared>,
    properties: Properties,
    features: Features,
    events: AsyncEvents,
    keep_alive: KeepAlive,
    errors: Arc<SharedErrorLog>,
    aborted: Vec<CommandId>,
    /// A command has arrived since the keep-alive timer was last asked.
    heard: bool,
    transition: Option<Action>,
}

impl AdminController {
    /// The admin side of a controller that has just been connected to. `errors` is what the controller's queues
    /// record their failed commands in.
    pub fn new(
        role: Role,
        facts: ControllerFacts,
        shared: Arc<ControllerShared>,
        errors: Arc<SharedErrorLog>,
        now: Instant,
    ) -> Self {
        let discovery = matches!(role, Role::Discovery(_));
        let fallback = discovery.then_some(DISCOVERY_IDLE_LIMIT);
        Self {
            properties: Properties::new(facts.max_queue_entries),
            features: Features::new(discovery),
            events: AsyncEvents::default(),
            keep_alive: KeepAlive::new(facts.kato_ms, fallback, now),
            errors,
            aborted: Vec::new(),
            heard: false,
            transition: None,
            role,
            facts,
            shared,
        }
    }

    /// What the controller says of itself.
    pub fn facts(&self) -> &ControllerFacts {
        &self.facts
    }

    /// Whether an I/O queue may be created now.
    pub fn takes_queues(&self) -> bool {
        self.properties.takes_queues()
    }

    /// How many I/O queues the host may create.
    pub fn io_queues(&self) -> u16 {
        self.features.io_queues(&self.facts)
    }

    /// The keep-alive timeout in force, in ms, as the host set it.
    pub fn kato_ms(&self) -> u32 {
        self.keep_alive.kato_ms()
    }

    /// How many bytes of data the host sends with a command: what is bounded before anything is received.
    pub fn data_limit_bytes() -> u32 {
        // Connect's 1,024 bytes and Host Behavior's 512 are the longest there are.
        4096
    }

    /// Carries a command out. `None`: it is held (Asynchronous Event Request).
    pub fn command(&mut self, sqe: &Sqe, data: &[u8], now: Instant) -> Option<Answer> {
        self.shared.note_traffic();
        let outcome = self.dispatch(sqe, data, now);
        let outcome = outcome.and_then(|held_or| match held_or {
            Some(answer) => fit(answer, sqe).map(Some),
            None => Ok(None),
        });
        outcome.unwrap_or_else(|status| {
            self.record(sqe, status);
            Some(Answer::failed(status))
        })
    }

    /// What has to be done next, until there is nothing.
    pub fn poll_action(&mut self) -> Option<Action> {
        if let Some(action) = self.transition.take() {
            return Some(action);
        }
        if let Some(cid) = self.aborted.pop() {
            return Some(Action::Complete(cid, 0, Status::ABORT_REQUESTED));
        }
        let (cid, event) = self.events.poll()?;
        Some(Action::Complete(CommandId(cid), event.encode(), Status::SUCCESS))
    }

    /// The queues have stopped, and what had to be flushed is, or could not be: then the controller says that it has
    /// failed instead of a shutdown that it did not do.
    pub fn stopped(&mut self, flushed: bool) {
        if flushed {
            self.properties.stopped();
        } else {
            self.properties.failed();
        }
    }

    /// A namespace was added, removed or resized.
    pub fn namespace_changed(&mut self, nsid: u32) {
        self.events.namespace_changed(nsid);
    }

    /// This host's discovery log has changed.
    pub fn discovery_log_changed(&mut self) {
        self.events.discovery_log_changed();
    }

    /// When to call [`AdminController::check_keep_alive`].
    pub fn next_deadline(&self) -> Option<Instant> {
        self.keep_alive.deadline()
    }

    /// Whether the host is still there.
    pub fn check_keep_alive(&mut self, now: Instant) -> Verdict {
        let (heard, shared) = (&mut self.heard, &self.shared);
        self.keep_alive.check(now, || std::mem::take(heard) | shared.take_traffic())
    }

    /// Whether a command has arrived on any of the controller's queues since the last call.
    pub fn take_life_sign(&mut self) -> bool {
        let heard = self.shared.take_traffic();
        self.heard |= heard;
        heard
    }

    fn dispatch(&mut self, sqe: &Sqe, data: &[u8], now: Instant) -> Result<Option<Answer>, Status> {
        if sqe.opcode() == fabrics::FABRICS {
            return self.fabrics(sqe).map(Some);
        }
        if !self.properties.ready() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr());
        }
        let answer = match sqe.opcode() {
            admin::GET_LOG_PAGE => Answer::data(self.log_page(sqe, now)?),
            admin::IDENTIFY => Answer::data(self.identify(sqe)?),
            admin::ABORT => Answer::result(self.abort(sqe)),
            admin::SET_FEATURES | admin::GET_FEATURES => self.feature(sqe, data, now)?,
            admin::ASYNC_EVENT_REQUEST => {
                let limit = Status::ASYNC_EVENT_LIMIT_EXCEEDED.dnr();
                self.events.request(sqe.command_id().0).map_err(|_| limit)?;
                return Ok(None);
            }
            admin::KEEP_ALIVE => {
                self.keep_alive.restart(now);
                Answer::result(0)
            }
            _ => return Err(Status::INVALID_OPCODE.dnr()),
        };
        Ok(Some(answer))
    }

    fn fabrics(&mut self, sqe: &Sqe) -> Result<Answer, Status> {
        let command = PropertyCommand::decode(&sqe.0);
        // Without DNR: nvme-cli 2.3 takes a property for absent only if it finds 0002h and not a bit more.
        let invalid = Status::INVALID_FIELD;
        match sqe.fabrics_type() {
            fabrics::TYPE_PROPERTY_GET | fabrics::TYPE_PROPERTY_SET if command.attrib & 7 > 1 => Err(invalid),
            fabrics::TYPE_PROPERTY_GET => {
                let value = self.properties.get(command.offset, command.eight_bytes);
                value.map(Answer::result).map_err(|_| invalid)
            }
            fabrics::TYPE_PROPERTY_SET => {
                let set = self.properties.set(command.offset, command.eight_bytes, command.value);
                self.transition(set.map_err(|_| invalid)?);
                Ok(Answer::result(0))
            }
            // This queue is connected already.
            fabrics::TYPE_CONNECT => Err(Status::COMMAND_SEQUENCE_ERROR.dnr()),
            _ => Err(Status::INVALID_OPCODE.dnr()),
        }
    }

    fn transition(&mut self, transition: Transition) {
        match transition {
            Transition::None => {}
            Transition::Enabled => self.shared.set_state(ControllerState::Ready),
            Transition::Reset => {
                self.shared.set_state(ControllerState::Disabled);
                self.events.reset();
                self.features = Features::new(matches!(self.role, Role::Discovery(_)));
                self.transition = Some(Action::StopQueues);
            }
            Transition::Shutdown => {
                self.shared.set_state(ControllerState::ShuttingDown);
                self.transition = Some(Action::StopQueuesAndFlush);
            }
        }
    }

    fn identify(&self, sqe: &Sqe) -> Result<Vec<u8>, Status> {
        match &self.role {
            Role::Io(namespaces) => identify::io_controller(sqe, &self.facts, &**namespaces),
            Role::Discovery(_) => identify::discovery_controller(sqe, &self.facts),
        }
    }

    /// Dword 0 bit 0 is 0 only for a command that will not take effect any more (§5.1).
    fn abort(&mut self, sqe: &Sqe) -> u64 {
        const NOT_ABORTED: u64 = 1;
        let qid = QueueId(sqe.dword(10) as u16);
        let cid = CommandId((sqe.dword(10) >> 16) as u16);
        if qid.0 == 0 {
            // Every other admin command is answered before the next one is looked at.
            let held = self.events.abort(cid.0);
            if held {
                self.aborted.push(cid);
            }
            return if held { 0 } else { NOT_ABORTED };
        }
        match self.shared.abort(qid, cid) {
            AbortOutcome::Aborted => 0,
            _ => NOT_ABORTED,
        }
    }

    fn feature(&mut self, sqe: &Sqe, data: &[u8], now: Instant) -> Result<Answer, Status> {
        let namespaces = match &self.role {
            Role::Io(namespaces) => Some(Arc::clone(namespaces)),
            Role::Discovery(_) => None,
        };
        let exists = |nsid| namespaces.as_ref().is_some_and(|n| n.get(nsid).is_some());
        let mut live = Live {
            facts: &self.facts,
            events: &mut self.events,
            keep_alive: &mut self.keep_alive,
            write_cache: namespaces.as_ref().is_some_and(|n| identify::write_cache(&**n)),
            queues_created: !self.shared.queues().is_empty(),
            namespace_exists: &exists,
            now,
        };
        let reply = match sqe.opcode() {
            admin::SET_FEATURES => self.features.set(sqe, data, &mut live)?,
            _ => self.features.get(sqe, &live)?,
        };
        Ok(Answer { result: u64::from(reply.dw0), status: Status::SUCCESS, data: reply.data.unwrap_or_default() })
    }

    fn record(&self, sqe: &Sqe, status: Status) {
        tracing::debug!(cntlid = self.facts.cntlid, ?sqe, ?status, "admin command refused");
        let nsid = if sqe.opcode() == fabrics::FABRICS { NamespaceId(0) } else { sqe.namespace_id() };
        self.errors.record(CommandError {
            qid: QueueId(0),
            cid: sqe.command_id(),
            status,
            parameter_location: 0xFFFF,
            lba: 0,
            nsid,
        });
    }
}

/// Data must fit the buffer that the command describes (SGL length), or nothing is sent.
fn fit(answer: Answer, sqe: &Sqe) -> Result<Answer, Status> {
    if answer.data.len() > sqe.sgl().len_bytes as usize {
        return Err(Status::SGL_LENGTH_INVALID.dnr());
    }
    Ok(answer)
}
