//! Connect, with all that is known: who may connect to what, and what has to end first.
//!
//! Invariant: an association is accepted only when no command of the one that it follows can take effect any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Target;
use super::controller::{Association, Controller, EndReason};
use super::registry::{Registry, Subsystem};
use super::views::{ControllerView, HostView};
use crate::proto::admin::facts::ControllerFacts;
use crate::proto::admin::{AdminController, Role, SharedErrorLog};
use crate::proto::connect::{ConnectRequest, Refusal};
use crate::proto::controller_shared::{ControllerLimits, ControllerShared, ControllerState, NamespaceTable};
use crate::proto::queue_shared::QueueShared;
use crate::wire::connect::{InvalidIn, offset};
use crate::wire::nqn::Nqn;
use crate::wire::{ControllerId, QueueId, Status};

/// How long the queue whose id is asked for may take to notice that its connection is dead; one that is still there
/// then is a true duplicate.
const DUPLICATE_GRACE: Duration = Duration::from_millis(2000);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// An accepted association.
pub(super) struct Admitted {
    pub controller: Arc<Controller>,
    pub admin: AdminController,
}

/// Where a connection comes from and goes to, with the means to see whether it is still there.
pub(super) type Origin = (std::net::SocketAddr, std::net::SocketAddr, super::socket::SocketProbe);

/// Admits a new association (Connect of an admin queue).
pub(super) async fn admin_queue(
    target: &Arc<Target>,
    request: &ConnectRequest,
    origin: Origin,
) -> Result<Admitted, Refusal> {
    let (peer, local, socket) = origin;
    let busy = Refusal::of(Status::CONNECT_CONTROLLER_BUSY);
    // Checked before anything of the older association is touched.
    check_allowed(&target.registry(), request)?;
    let mut association = Some(Association {
        subsystem: (!request.subsystem.is_discovery()).then(|| request.subsystem.clone()),
        host: request.host.clone(),
        hostid: request.hostid,
        peer,
        local,
        socket,
        kato_ms: request.kato_ms,
    });
    let deadline = Instant::now() + target.config.limits.drain_timeout;
    loop {
        let predecessors = {
            let mut registry = target.registry();
            check_allowed(&registry, request)?;
            let predecessors = end_predecessors(&registry, association.as_ref(), Instant::now());
            if predecessors == 0
                && let Some(association) = association.take()
            {
                return enter(target, &mut registry, association).ok_or(busy);
            }
            predecessors
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            if target.log_limit.allows(Instant::now()) {
                tracing::info!(%peer, host = ?request.host, predecessors, "an older association of the host isn't over");
            }
            return Err(busy);
        }
        // Woken whenever a controller leaves.
        let _ = tokio::time::timeout(left.min(LOOK_EVERY * 4), target.left.notified()).await;
    }
}

fn check_allowed(registry: &Registry, request: &ConnectRequest) -> Result<(), Refusal> {
    if registry.closing {
        return Err(Refusal::of(Status::CONNECT_CONTROLLER_BUSY));
    }
    if request.subsystem.is_discovery() {
        return Ok(());
    }
    let Some(subsystem) = registry.subsystems.get(&request.subsystem) else {
        // May be created again: the host is told where the fault is, and may retry.
        let mut refusal = Refusal::invalid(InvalidIn::Data, offset::SUBNQN);
        refusal.status = Status::CONNECT_INVALID_PARAMETERS;
        return Err(refusal);
    };
    if !subsystem.allows(&request.host) {
        return Err(Refusal::of(Status::CONNECT_INVALID_HOST.dnr()));
    }
    Ok(())
}

/// Ends the associations that the new one follows. How many are still there?
///
/// One that is on its way out, or would be if its driver had noticed already (its socket is dead), is waited for. A live
/// one between the same two addresses is followed if it has been silent for too long; otherwise the host has two
/// associations, as it may.
fn end_predecessors(registry: &Registry, new: Option<&Association>, now: Instant) -> usize {
    let Some(new) = new else { return 0 };
    let same_host = |c: &&Arc<Controller>| {
        c.subsystem == new.subsystem && c.subsystem.is_some() && c.host == new.host && c.hostid == new.hostid
    };
    let mut waiting = 0;
    for old in registry.controllers.iter().filter(same_host) {
        let same_path = old.peer.ip() == new.peer.ip() && old.local == new.local;
        if !old.is_ending() && (old.socket.is_dead() || same_path && old.is_silent(now)) {
            old.end(EndReason::Succeeded);
        }
        waiting += usize::from(old.is_ending() && !old.is_drained());
    }
    waiting
}

fn enter(target: &Arc<Target>, registry: &mut Registry, association: Association) -> Option<Admitted> {
    let limits = &target.config.limits;
    let same = |c: &&Arc<Controller>| c.subsystem == association.subsystem && c.host == association.host;
    let of_host = registry.controllers.iter().filter(same).count();
    // Those that have ended and hold nothing any more are about to leave.
    let there = |c: &&Arc<Controller>| !(c.is_ending() && c.is_drained());
    let same_kind = |c: &&Arc<Controller>| c.subsystem.is_some() == association.subsystem.is_some();
    let of_kind = registry.controllers.iter().filter(same_kind).filter(there).count();
    let most = if association.subsystem.is_some() { limits.controllers } else { limits.discovery_controllers };
    if of_kind >= most || of_host >= limits.controllers_per_host {
        return None;
    }
    let cntlid = registry.free_cntlid()?;
    let subsystem = association.subsystem.as_ref().and_then(|nqn| registry.subsystems.get(nqn));
    let table = subsystem.map_or_else(|| Arc::new(NamespaceTable::default()), |s| Arc::clone(&s.table));
    let facts = facts_of(target, &association, subsystem, cntlid);
    let errors = Arc::new(SharedErrorLog::default());
    let controller_limits = ControllerLimits {
        mdts_bytes: 4096 << limits.mdts(),
        in_capsule_bytes: limits.in_capsule_bytes,
        max_queue_entries: limits.queue_entries,
        ..ControllerLimits::default()
    };
    let shared =
        Arc::new(ControllerShared::new(ControllerId(cntlid), controller_limits, table, Some(Arc::clone(&errors) as _)));
    let role = match &association.subsystem {
        Some(nqn) => Role::Io(Arc::new(ControllerView {
            target: Arc::downgrade(target),
            subsystem: nqn.clone(),
            shared: Arc::clone(&shared),
        })),
        None => Role::Discovery(Arc::new(HostView {
            target: Arc::downgrade(target),
            host: association.host.clone(),
            local: association.local.ip(),
        })),
    };
    let now = Instant::now();
    let io_queues = facts.max_io_queues;
    let admin = AdminController::new(role, facts, Arc::clone(&shared), errors, now);
    let controller = Arc::new(Controller::new(association, shared, io_queues, now));
    registry.enter(Arc::clone(&controller));
    Some(Admitted { controller, admin })
}

/// What the new controller will say of itself.
fn facts_of(target: &Target, association: &Association, subsystem: Option<&Subsystem>, cntlid: u16) -> ControllerFacts {
    let limits = &target.config.limits;
    ControllerFacts {
        subsystem: association.subsystem.clone().unwrap_or_else(Nqn::discovery),
        serial: subsystem.map_or_else(|| "DISCOVERY".to_owned(), |s| s.serial.clone()),
        model: subsystem.map_or_else(|| "Sluice discovery".to_owned(), |s| s.model.clone()),
        firmware: target.config.firmware.clone(),
        cntlid,
        hostid: association.hostid,
        mdts: limits.mdts(),
        in_capsule_bytes: limits.in_capsule_bytes,
        max_queue_entries: limits.queue_entries,
        max_io_queues: if subsystem.is_some() { limits.io_queues } else { 0 },
        max_nsid: limits.max_nsid,
        kato_ms: association.kato_ms,
        powered_on: target.started,
    }
}

/// Admits an I/O queue: gives its controller and the registered queue.
pub(super) async fn io_queue(
    target: &Arc<Target>,
    request: &ConnectRequest,
) -> Result<(Arc<Controller>, Arc<QueueShared>), Refusal> {
    let controller = find_controller(target, request)?;
    let queue = Arc::new(QueueShared::new(QueueId(request.qid), request.queue_entries));
    let started = Instant::now();
    loop {
        check_takes_queues(&controller)?;
        let live = match controller.shared.register_queue(Arc::clone(&queue)) {
            Ok(()) => break,
            Err(live) => live,
        };
        let patience = if live.is_closing() { target.config.limits.drain_timeout } else { DUPLICATE_GRACE };
        if started.elapsed() >= patience {
            return Err(Refusal::of(Status::COMMAND_SEQUENCE_ERROR.dnr()));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok((controller, queue))
}

/// Whether the controller is enabled and not on its way out. Asked again once the queue is registered: from then on
/// a reset or an end finds the queue by itself.
pub(super) fn check_takes_queues(controller: &Controller) -> Result<(), Refusal> {
    if controller.is_ending() || controller.shared.state() != ControllerState::Ready {
        return Err(Refusal::of(Status::COMMAND_SEQUENCE_ERROR.dnr()));
    }
    Ok(())
}

fn find_controller(target: &Target, request: &ConnectRequest) -> Result<Arc<Controller>, Refusal> {
    let registry = target.registry();
    let wanted = |c: &&Arc<Controller>| {
        c.shared.cntlid().0 == request.cntlid && c.subsystem.as_ref() == Some(&request.subsystem) && !c.is_ending()
    };
    let invalid = |at| Err(Refusal::invalid(InvalidIn::Data, at));
    let Some(controller) = registry.controllers.iter().find(wanted) else { return invalid(offset::CNTLID) };
    if controller.host != request.host {
        return invalid(offset::HOSTNQN);
    }
    if controller.hostid != request.hostid {
        return invalid(offset::HOSTID);
    }
    if u32::from(request.qid) > controller.io_queues.load(std::sync::atomic::Ordering::Relaxed) {
        return Err(Refusal::invalid(InvalidIn::Command, offset::QID));
    }
    Ok(Arc::clone(controller))
}
