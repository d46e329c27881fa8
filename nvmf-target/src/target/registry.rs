//! The registry's state: what is configured, and which controllers are live.
//!
//! Owns the rules of changes. It must not know sockets or tasks, beyond keeping a listener's handle. Invariant: a change
//! is made whole or not at all, and every controller that it concerns is told before it returns.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use uuid::Uuid;

use super::controller::{Controller, EndReason};
use super::error::{TargetError, escape};
use super::limits::Limits;
use crate::backend::Backend;
use crate::proto::controller_shared::{Namespace, NamespaceTable};
use crate::proto::discovery::{self, DiscoveryView, Port};
use crate::wire::NamespaceId;
use crate::wire::connect::CNTLID_MAX;
use crate::wire::log_pages::DiscoveryEntry;
use crate::wire::nqn::Nqn;

/// What a subsystem is made with.
#[derive(Debug, Clone)]
pub struct SubsystemSpec {
    /// Its name.
    pub nqn: String,
    /// Serial number: 1 to 20 printable ASCII characters.
    pub serial: String,
    /// Model number: 1 to 40 printable ASCII characters.
    pub model: String,
    /// Lets every host in, whatever the list.
    pub allow_any_host: bool,
}

pub(super) struct Subsystem {
    pub serial: String,
    pub model: String,
    pub allow_any_host: bool,
    pub hosts: BTreeSet<Nqn>,
    pub namespaces: BTreeMap<u32, Arc<dyn Backend>>,
    pub table: Arc<NamespaceTable>,
}

impl Subsystem {
    pub fn allows(&self, host: &Nqn) -> bool {
        self.allow_any_host || self.hosts.contains(host)
    }

    fn rebuild_table(&mut self) {
        let entry = |(&nsid, backend): (&u32, &Arc<dyn Backend>)| Namespace {
            nsid: NamespaceId(nsid),
            backend: Arc::clone(backend),
            write_protected: backend.write_protected(),
        };
        self.table = Arc::new(NamespaceTable::new(self.namespaces.iter().map(entry)));
    }
}

pub(super) struct Listener {
    pub port_id: u16,
    pub task: tokio::task::AbortHandle,
}

/// A discovery controller, and a hash of what it shows: the views themselves would be large.
struct DiscoverySeat {
    controller: Arc<Controller>,
    shown: u64,
}

pub(super) struct Registry {
    pub subsystems: BTreeMap<Nqn, Subsystem>,
    pub listeners: BTreeMap<SocketAddr, Listener>,
    /// Every live controller, those on their way out included.
    pub controllers: Vec<Arc<Controller>>,
    discovery: Vec<DiscoverySeat>,
    generation: u64,
    next_cntlid: u16,
    next_port_id: u16,
    pub closing: bool,
}

impl Registry {
    pub fn new() -> Self {
        Self {
            subsystems: BTreeMap::new(),
            listeners: BTreeMap::new(),
            controllers: Vec::new(),
            discovery: Vec::new(),
            generation: 1,
            next_cntlid: 1,
            next_port_id: 1,
            closing: false,
        }
    }

    pub fn create_subsystem(&mut self, spec: &SubsystemSpec, limits: &Limits) -> Result<(), TargetError> {
        let nqn = TargetError::parse_nqn("subsystem nqn", &spec.nqn)?;
        if nqn.is_discovery() {
            return Err(TargetError::DiscoveryNqn);
        }
        TargetError::check_text("serial", 20, &spec.serial)?;
        TargetError::check_text("model", 40, &spec.model)?;
        if self.closing {
            return Err(TargetError::ShuttingDown);
        }
        if self.subsystems.contains_key(&nqn) {
            return Err(TargetError::SubsystemExists { nqn });
        }
        if self.subsystems.len() >= limits.subsystems {
            return Err(TargetError::Limit { what: "subsystems", limit: limits.subsystems });
        }
        let subsystem = Subsystem {
            serial: spec.serial.clone(),
            model: spec.model.clone(),
            allow_any_host: spec.allow_any_host,
            hosts: BTreeSet::new(),
            namespaces: BTreeMap::new(),
            table: Arc::default(),
        };
        self.subsystems.insert(nqn, subsystem);
        self.discovery_changed();
        Ok(())
    }

    /// Removes the subsystem and ends its controllers.
    pub fn delete_subsystem(&mut self, nqn: &str) -> Result<Nqn, TargetError> {
        let nqn = self.find(nqn)?.0;
        self.subsystems.remove(&nqn);
        self.end_controllers(EndReason::SubsystemDeleted, |c| c.subsystem.as_ref() == Some(&nqn));
        self.discovery_changed();
        Ok(nqn)
    }

    pub fn set_allow_any_host(&mut self, nqn: &str, allow: bool) -> Result<(), TargetError> {
        let nqn = self.find(nqn)?.0;
        if let Some(subsystem) = self.subsystems.get_mut(&nqn) {
            subsystem.allow_any_host = allow;
        }
        self.end_disallowed(&nqn);
        self.discovery_changed();
        Ok(())
    }

    pub fn allow_host(&mut self, nqn: &str, host: &str, limits: &Limits) -> Result<(), TargetError> {
        let host = TargetError::parse_nqn("host nqn", host)?;
        let (nqn, subsystem) = self.find(nqn)?;
        if subsystem.hosts.contains(&host) {
            return Err(TargetError::HostExists { nqn, host });
        }
        if subsystem.hosts.len() >= limits.allowed_hosts {
            return Err(TargetError::Limit { what: "hosts of a subsystem", limit: limits.allowed_hosts });
        }
        subsystem.hosts.insert(host);
        self.discovery_changed();
        Ok(())
    }

    /// Takes the host off the list and ends its controllers, unless any host is allowed.
    pub fn disallow_host(&mut self, nqn: &str, host: &str) -> Result<(), TargetError> {
        let host = TargetError::parse_nqn("host nqn", host)?;
        let (nqn, subsystem) = self.find(nqn)?;
        if !subsystem.hosts.remove(&host) {
            return Err(TargetError::NoSuchHost { nqn, host });
        }
        self.end_disallowed(&nqn);
        self.discovery_changed();
        Ok(())
    }

    pub fn add_namespace(
        &mut self,
        nqn: &str,
        nsid: u32,
        backend: Arc<dyn Backend>,
        limits: &Limits,
    ) -> Result<(), TargetError> {
        let nqn = self.find(nqn)?.0;
        if nsid == 0 || nsid > limits.max_nsid {
            return Err(TargetError::Nsid { nsid, max: limits.max_nsid });
        }
        check_backend(&*backend)?;
        let uuid = backend.uuid();
        if let Some((owner, owner_nsid)) = self.owner_of(uuid) {
            return Err(TargetError::DuplicateUuid { uuid, owner, owner_nsid });
        }
        let subsystem = self.find(nqn.as_str())?.1;
        if subsystem.namespaces.contains_key(&nsid) {
            return Err(TargetError::NamespaceExists { nqn, nsid });
        }
        subsystem.namespaces.insert(nsid, backend);
        self.namespaces_changed(&nqn, nsid);
        Ok(())
    }

    /// Commands that arrive from now on don't find the namespace; those at the back end finish.
    pub fn remove_namespace(&mut self, nqn: &str, nsid: u32) -> Result<Arc<dyn Backend>, TargetError> {
        let (nqn, subsystem) = self.find(nqn)?;
        let Some(backend) = subsystem.namespaces.remove(&nsid) else {
            return Err(TargetError::NoSuchNamespace { nqn, nsid });
        };
        self.namespaces_changed(&nqn, nsid);
        Ok(backend)
    }

    /// The namespace's geometry has changed: its hosts are told.
    pub fn namespace_resized(&mut self, nqn: &str, nsid: u32) -> Result<(), TargetError> {
        let (nqn, subsystem) = self.find(nqn)?;
        if !subsystem.namespaces.contains_key(&nsid) {
            return Err(TargetError::NoSuchNamespace { nqn, nsid });
        }
        self.namespaces_changed(&nqn, nsid);
        Ok(())
    }

    pub fn add_listener(&mut self, address: SocketAddr, task: tokio::task::AbortHandle) {
        let port_id = self.next_port_id;
        self.next_port_id = self.next_port_id.checked_add(1).unwrap_or(1);
        self.listeners.insert(address, Listener { port_id, task });
        self.discovery_changed();
    }

    pub fn remove_listener(&mut self, address: SocketAddr) -> Result<(), TargetError> {
        let listener = self.listeners.remove(&address).ok_or(TargetError::NoSuchListener { address })?;
        listener.task.abort();
        self.discovery_changed();
        Ok(())
    }

    /// What `host`, which reached the target at `local`, may see.
    pub fn discovery_view(&self, host: &Nqn, local: IpAddr) -> DiscoveryView {
        DiscoveryView { generation: self.generation, entries: self.visible(host, local) }
    }

    /// Enters a controller; a discovery one is told of changes to what its host sees.
    pub fn enter(&mut self, controller: Arc<Controller>) {
        if controller.subsystem.is_none() {
            let shown = fingerprint(&self.visible(&controller.host, controller.local.ip()));
            self.discovery.push(DiscoverySeat { controller: Arc::clone(&controller), shown });
        }
        self.controllers.push(controller);
    }

    /// Nothing is left of the controller.
    pub fn leave(&mut self, controller: &Arc<Controller>) {
        self.controllers.retain(|c| !Arc::ptr_eq(c, controller));
        self.discovery.retain(|seat| !Arc::ptr_eq(&seat.controller, controller));
    }

    /// A controller id that no live controller has, the one longest unused first.
    pub fn free_cntlid(&mut self) -> Option<u16> {
        for _ in 0..=CNTLID_MAX {
            let id = self.next_cntlid;
            self.next_cntlid = if id >= CNTLID_MAX { 1 } else { id + 1 };
            if self.controllers.iter().all(|c| c.shared.cntlid().0 != id) {
                return Some(id);
            }
        }
        None
    }

    pub fn end_controllers(&self, reason: EndReason, which: impl Fn(&Controller) -> bool) {
        for controller in self.controllers.iter().filter(|c| which(c) && !c.is_ending()) {
            controller.end(reason);
        }
    }

    fn find(&mut self, nqn: &str) -> Result<(Nqn, &mut Subsystem), TargetError> {
        let missing = || TargetError::NoSuchSubsystem { nqn: escape(nqn) };
        let key = Nqn::parse(nqn).map_err(|_| missing())?;
        let subsystem = self.subsystems.get_mut(&key).ok_or_else(missing)?;
        Ok((key, subsystem))
    }

    fn owner_of(&self, uuid: Uuid) -> Option<(Nqn, u32)> {
        let mut all = self.subsystems.iter().flat_map(|(nqn, s)| s.namespaces.iter().map(move |(id, b)| (nqn, id, b)));
        all.find(|(_, _, backend)| backend.uuid() == uuid).map(|(nqn, nsid, _)| (nqn.clone(), *nsid))
    }

    fn namespaces_changed(&mut self, nqn: &Nqn, nsid: u32) {
        let Some(subsystem) = self.subsystems.get_mut(nqn) else { return };
        subsystem.rebuild_table();
        for controller in self.controllers.iter().filter(|c| c.subsystem.as_ref() == Some(nqn)) {
            controller.shared.set_namespaces(Arc::clone(&subsystem.table));
            controller.namespace_changed(nsid);
        }
    }

    fn end_disallowed(&self, nqn: &Nqn) {
        let Some(subsystem) = self.subsystems.get(nqn) else { return };
        self.end_controllers(EndReason::HostRemoved, |c| {
            c.subsystem.as_ref() == Some(nqn) && !subsystem.allows(&c.host)
        });
    }

    fn visible(&self, host: &Nqn, local: IpAddr) -> Vec<DiscoveryEntry> {
        let ports: Vec<Port> = self.listeners.iter().map(|(&address, l)| Port { id: l.port_id, address }).collect();
        let allowed = self.subsystems.iter().filter(|(_, s)| s.allows(host)).map(|(nqn, _)| nqn);
        discovery::entries(allowed, &ports, local)
    }

    /// Tells the discovery controllers whose view is not what it was.
    fn discovery_changed(&mut self) {
        self.generation += 1;
        let mut seats = std::mem::take(&mut self.discovery);
        for seat in &mut seats {
            let now = fingerprint(&self.visible(&seat.controller.host, seat.controller.local.ip()));
            if now != seat.shown {
                seat.shown = now;
                seat.controller.discovery_log_changed();
            }
        }
        self.discovery = seats;
    }
}

fn fingerprint(entries: &[DiscoveryEntry]) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    entries.hash(&mut hasher);
    hasher.finish()
}

fn check_backend(backend: &dyn Backend) -> Result<(), TargetError> {
    let geometry = backend.geometry();
    if !matches!(geometry.block_bytes, 512 | 4096) {
        return Err(TargetError::BlockSize { block_bytes: geometry.block_bytes });
    }
    if geometry.block_count == 0 {
        return Err(TargetError::Empty);
    }
    if backend.uuid().is_nil() {
        return Err(TargetError::NilUuid);
    }
    Ok(())
}
