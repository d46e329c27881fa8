//! What controllers and management see of the registry.

use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use uuid::Uuid;

use super::Target;
use super::controller::Controller;
use super::registry::{Registry, Subsystem};
use super::snapshot::{
    ControllerSnapshot, ListenerSnapshot, NamespaceSnapshot, QueueSnapshot, SubsystemSnapshot, TargetSnapshot,
};
use crate::proto::admin::identify::{NamespaceView, Namespaces};
use crate::proto::controller_shared::ControllerShared;
use crate::proto::discovery::{DiscoverySource, DiscoveryView};
use crate::wire::NamespaceId;
use crate::wire::nqn::Nqn;

/// An I/O controller's namespaces.
pub(super) struct ControllerView {
    pub target: Weak<Target>,
    pub subsystem: Nqn,
    pub shared: Arc<ControllerShared>,
}

impl Namespaces for ControllerView {
    fn get(&self, nsid: u32) -> Option<NamespaceView> {
        let table = self.shared.namespaces();
        let backend = &table.get(NamespaceId(nsid))?.backend;
        Some(NamespaceView {
            geometry: backend.geometry(),
            uuid: backend.uuid(),
            write_protected: backend.write_protected(),
        })
    }

    fn after(&self, nsid: u32) -> Vec<u32> {
        self.shared.namespaces().iter().map(|n| n.nsid.0).filter(|&id| id > nsid).collect()
    }

    fn controllers(&self) -> Vec<u16> {
        let Some(target) = self.target.upgrade() else { return Vec::new() };
        let registry = target.registry();
        let of_it = registry.controllers.iter().filter(|c| c.subsystem.as_ref() == Some(&self.subsystem));
        let mut ids: Vec<u16> = of_it.map(|c| c.shared.cntlid().0).collect();
        ids.sort_unstable();
        ids
    }
}

/// One host's view of the discovery log.
pub(super) struct HostView {
    pub target: Weak<Target>,
    pub host: Nqn,
    pub local: IpAddr,
}

impl DiscoverySource for HostView {
    fn view(&self) -> DiscoveryView {
        match self.target.upgrade() {
            Some(target) => target.registry().discovery_view(&self.host, self.local),
            None => DiscoveryView { generation: 0, entries: Vec::new() },
        }
    }
}

pub(super) fn snapshot(registry: &Registry, connections: usize, now: Instant) -> TargetSnapshot {
    TargetSnapshot {
        subsystems: registry.subsystems.iter().map(|(nqn, s)| subsystem(nqn, s)).collect(),
        listeners: registry
            .listeners
            .iter()
            .map(|(&address, l)| ListenerSnapshot { address, port_id: l.port_id })
            .collect(),
        controllers: registry.controllers.iter().map(|c| controller(c, now)).collect(),
        connections,
    }
}

fn subsystem(nqn: &Nqn, subsystem: &Subsystem) -> SubsystemSnapshot {
    let namespace = |(&nsid, backend): (&u32, &Arc<dyn crate::backend::Backend>)| {
        let geometry = backend.geometry();
        NamespaceSnapshot {
            nsid,
            uuid: backend.uuid(),
            block_bytes: geometry.block_bytes,
            block_count: geometry.block_count,
            used_blocks: geometry.used_blocks,
        }
    };
    SubsystemSnapshot {
        nqn: nqn.to_string(),
        serial: subsystem.serial.clone(),
        model: subsystem.model.clone(),
        allow_any_host: subsystem.allow_any_host,
        hosts: subsystem.hosts.iter().map(Nqn::to_string).collect(),
        namespaces: subsystem.namespaces.iter().map(namespace).collect(),
    }
}

fn controller(controller: &Controller, now: Instant) -> ControllerSnapshot {
    let counters = &controller.shared.counters;
    let queue = |q: Arc<crate::proto::queue_shared::QueueShared>| QueueSnapshot {
        qid: q.qid().0,
        entries: q.entries(),
        in_flight: q.in_flight(),
    };
    ControllerSnapshot {
        cntlid: controller.shared.cntlid().0,
        subsystem: controller.subsystem.as_ref().map(Nqn::to_string),
        host: controller.host.to_string(),
        hostid: Uuid::from_bytes(controller.hostid),
        peer: controller.peer,
        local: controller.local,
        age: now.saturating_duration_since(controller.since),
        kato_ms: controller.kato_ms(),
        ending: controller.is_ending(),
        queues: controller.shared.queues().into_iter().map(queue).collect(),
        read_commands: counters.read_commands.load(Ordering::Relaxed),
        write_commands: counters.write_commands.load(Ordering::Relaxed),
        read_bytes: counters.read_bytes.load(Ordering::Relaxed),
        write_bytes: counters.write_bytes.load(Ordering::Relaxed),
        media_errors: counters.media_errors.load(Ordering::Relaxed),
    }
}
