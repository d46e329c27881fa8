//! The running service: its parts, its state, and the changes that can be made to it.
//!
//! Owns what each change does to the target. Must not know the management API. Invariant: a change is whole or not made, and
//! outlives a restart.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use nvmf_target::backend::Backend;
use nvmf_target::target::{Departing, SubsystemSpec, Target, TargetError};
use uuid::Uuid;

use super::ServiceError;
use super::changes::{ChangeError, Ledger};
use super::storage::{self, Storage};
use crate::config::check;
use crate::config::error::{ConfigError, Reason};
use crate::config::names::{Nqn, VolumeName};
use crate::config::objects::Objects;
use crate::config::plan::{MemoryPlan, Shortage};
use crate::config::schema::{Listener, Namespace, Subsystem, Volume};
use crate::config::values::{BackendSpec, BlockSize, ByteSize};
use crate::config::{Checked, Config};
use crate::plain::{PlainBackend, PlainError};
use crate::pool::{VolumeError, VolumeStatus};
use crate::reactor::{ReactorFailure, Reactors};

/// What hosts read as the model number.
const MODEL: &str = "Sluice storage offload";

/// Where the service is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    Starting = 0,
    Serving = 1,
    Draining = 2,
}

impl State {
    /// As the status shows it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Draining => "draining",
        }
    }
}

/// See the module.
pub(super) struct Live {
    checked: Checked,
    reactors: Reactors,
    target: Arc<Target>,
    state: AtomicU8,
    ready: OnceLock<Instant>,
    ledger: Ledger,
    storage: Option<Storage>,
}

/// Why a namespace is not added.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It could not be kept.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// Its size breaks a rule.
    #[error("backend: {spec}: {reason}")]
    Size {
        /// The back end.
        spec: BackendSpec,
        /// The rule.
        reason: Reason,
    },
    /// There is no memory for it.
    #[error("backend: {0}")]
    Memory(#[from] Shortage),
    /// The same bytes twice.
    #[error("backend: {spec}: namespace {nsid} of {nqn} serves it: a back end serves one namespace")]
    Taken {
        /// The back end.
        spec: BackendSpec,
        /// Who has it.
        nqn: String,
        /// Its namespace.
        nsid: u32,
    },
    /// A plain one.
    #[error(transparent)]
    Plain(#[from] PlainError),
    /// The target does not take it.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A volume that isn't there.
    #[error("backend: pool:{name}: no such volume (have: {})", if have.is_empty() { "none".into() } else { have.join(", ") })]
    NoVolume {
        /// The name asked for.
        name: String,
        /// The volumes that are there.
        have: Vec<String>,
    },
    /// A volume without a pool.
    #[error("backend: pool:{name}: there is no pool: list its members in pool.members")]
    NoPool {
        /// The name asked for.
        name: String,
    },
    /// A block size for a volume.
    #[error("block_size: a pool volume has its own")]
    BlockSizeOfVolume,
    /// A bug of ours.
    #[error("opening failed inside; see the log")]
    Bug,
}

/// Why a subsystem, host or listener is not changed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeRefused {
    /// The target does not take it.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// It could not be kept.
    #[error(transparent)]
    Change(#[from] ChangeError),
}

/// Why a volume is not deleted.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// Hosts have it.
    #[error("volume {name}: namespace {nsid} of {nqn} serves it: remove that first")]
    Served {
        /// The volume.
        name: VolumeName,
        /// The subsystem.
        nqn: String,
        /// Its namespace.
        nsid: u32,
    },
    /// Somebody else deletes it at this moment.
    #[error("volume {name}: is being deleted already")]
    Leaving {
        /// The volume.
        name: VolumeName,
    },
    /// It could not be kept.
    #[error(transparent)]
    Change(#[from] ChangeError),
}

/// Why a volume is not resized.
#[derive(Debug, thiserror::Error)]
pub enum ResizeError {
    /// There is no pool.
    #[error("there is no pool: list its members in pool.members of the configuration")]
    NoPool,
    /// The pool refuses.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// It could not be kept.
    #[error(transparent)]
    Change(#[from] ChangeError),
}

/// A volume's object, taken out of the objects while the volume is deleted.
pub(super) struct Released(Option<Volume>);

impl Live {
    pub(super) fn new(checked: Checked, reactors: Reactors, target: Arc<Target>, storage: Option<Storage>) -> Self {
        let pool = storage.as_ref().filter(|_| storage::outlives_us(&checked.config));
        let volumes = storage.as_ref().map(|storage| storage.pool().volumes()).unwrap_or_default();
        let ledger = Ledger::new(&checked, pool.map(|storage| storage.pool().status().uuid), &volumes);
        let state = AtomicU8::new(State::Starting as u8);
        Self { checked, reactors, target, state, ready: OnceLock::new(), ledger, storage }
    }

    /// As it was started.
    pub(super) fn config(&self) -> &Config {
        &self.checked.config
    }

    pub(super) fn checked(&self) -> &Checked {
        &self.checked
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(super) fn reactors(&self) -> &Reactors {
        &self.reactors
    }

    pub(super) fn target(&self) -> &Arc<Target> {
        &self.target
    }

    pub(super) fn storage(&self) -> Option<&Storage> {
        self.storage.as_ref()
    }

    pub(super) fn set_serving(&self) {
        let _ = self.ready.set(Instant::now());
        self.state.store(State::Serving as u8, Ordering::Release);
    }

    pub(super) fn set_draining(&self) {
        self.state.store(State::Draining as u8, Ordering::Release);
    }

    pub(super) fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Starting,
            1 => State::Serving,
            _ => State::Draining,
        }
    }

    /// Resolves if a part of the service fails.
    pub(super) async fn failed(&self) -> ReactorFailure {
        self.reactors.failed().await
    }

    /// A subsystem that is to be there from the start, with its hosts and namespaces.
    pub(super) async fn start_subsystem(&self, index: usize, subsystem: &Subsystem) -> Result<(), ServiceError> {
        self.enter_subsystem(subsystem)?;
        for (place, namespace) in subsystem.namespaces.iter().enumerate() {
            let (nqn, nsid) = (subsystem.nqn.as_str(), namespace.nsid);
            let opened = self.open(nqn, namespace).await;
            match opened.and_then(|backend| Ok(self.target.add_namespace(nqn, nsid, backend)?)) {
                Ok(()) => {}
                Err(OpenError::NoVolume { name, have }) => {
                    let problem = check::missing_volume(&self.checked.sources, index, place, &name, &have);
                    return Err(ConfigError::Invalid(vec![problem]).into());
                }
                Err(source) => return Err(ServiceError::Namespace { nqn: nqn.to_owned(), nsid, source }),
            }
        }
        Ok(())
    }

    /// Opens a back end and adds it as a namespace.
    pub(super) async fn add_namespace(&self, nqn: &Nqn, namespace: Namespace) -> Result<(), OpenError> {
        if let BackendSpec::Mem(size) = namespace.backend {
            self.check_memory(&namespace, size)?;
        }
        // Opening may take long: the others' turns don't wait for it.
        let mut backend = self.open(nqn.as_str(), &namespace).await?;
        let turn = self.ledger.turn().await;
        let objects = self.ledger.objects();
        let taken = objects.namespaces().find(|(_, other)| other.backend == namespace.backend);
        match (&namespace.backend, taken) {
            (BackendSpec::Mem(_), _) | (_, None) => {}
            (spec, Some((nqn, other))) => {
                return Err(OpenError::Taken { spec: spec.clone(), nqn: nqn.to_string(), nsid: other.nsid });
            }
        }
        if let BackendSpec::Pool(name) = &namespace.backend {
            // It may have been deleted meanwhile.
            backend = self.volume(name, namespace.block_size)?;
            if turn.is_leaving(name) {
                return Err(self.no_volume(name));
            }
        }
        let edit = |objects: &mut Objects| {
            if let Some(subsystem) = objects.subsystem_mut(nqn) {
                subsystem.namespaces.push(namespace.clone());
            }
        };
        turn.change(edit, || Ok(self.target.add_namespace(nqn.as_str(), namespace.nsid, backend)?)).await
    }

    /// Removes a namespace; what its back end has been given already finishes.
    pub(super) async fn remove_namespace(&self, nqn: &Nqn, nsid: u32) -> Result<(), ChangeRefused> {
        let turn = self.ledger.turn().await;
        let edit = |objects: &mut Objects| {
            if let Some(subsystem) = objects.subsystem_mut(nqn) {
                subsystem.namespaces.retain(|namespace| namespace.nsid != nsid);
            }
        };
        turn.change(edit, || Ok(self.target.remove_namespace(nqn.as_str(), nsid).map(drop)?)).await
    }

    /// Adds a subsystem with its hosts, or nothing.
    pub(super) async fn add_subsystem(&self, subsystem: Subsystem) -> Result<(), ChangeRefused> {
        let turn = self.ledger.turn().await;
        turn.change(|objects| objects.subsystems.push(subsystem.clone()), || Ok(self.enter_subsystem(&subsystem)?))
            .await
    }

    /// Removes a subsystem and its namespaces; the controllers' end is for the caller to wait for.
    pub(super) async fn remove_subsystem(&self, nqn: &Nqn) -> Result<Departing, ChangeRefused> {
        let turn = self.ledger.turn().await;
        let edit = |objects: &mut Objects| objects.subsystems.retain(|s| s.nqn != *nqn);
        turn.change(edit, || Ok(self.target.delete_subsystem(nqn.as_str())?)).await
    }

    /// Lets a host in.
    pub(super) async fn allow_host(&self, nqn: &Nqn, host: &Nqn) -> Result<(), ChangeRefused> {
        let turn = self.ledger.turn().await;
        let edit = |objects: &mut Objects| {
            if let Some(subsystem) = objects.subsystem_mut(nqn) {
                subsystem.hosts.push(host.clone());
            }
        };
        turn.change(edit, || Ok(self.target.allow_host(nqn.as_str(), host.as_str())?)).await
    }

    /// Keeps a host out.
    pub(super) async fn deny_host(&self, nqn: &Nqn, host: &Nqn) -> Result<(), ChangeRefused> {
        let turn = self.ledger.turn().await;
        let edit = |objects: &mut Objects| {
            if let Some(subsystem) = objects.subsystem_mut(nqn) {
                subsystem.hosts.retain(|there| there != host);
            }
        };
        turn.change(edit, || Ok(self.target.disallow_host(nqn.as_str(), host.as_str())?)).await
    }

    /// Listens on one more address.
    pub(super) async fn add_listener(&self, listener: Listener, address: SocketAddr) -> Result<(), ChangeRefused> {
        let turn = self.ledger.turn().await;
        turn.change(|objects| objects.listeners.push(listener), || Ok(self.target.add_listener(address).map(drop)?))
            .await
    }

    /// Stops listening on an address.
    pub(super) async fn remove_listener(&self, address: SocketAddr) -> Result<(), ChangeRefused> {
        let turn = self.ledger.turn().await;
        // A link-local address may have its scope by name in one place and by number in another.
        let is_it = |listener: &Listener| listener.address.socket(listener.port).is_ok_and(|there| there == address);
        turn.change(
            |objects| objects.listeners.retain(|listener| !is_it(listener)),
            || Ok(self.target.remove_listener(address)?),
        )
        .await
    }

    /// Takes a volume that no namespace serves out of the objects, so that no namespace can take it and a restart doesn't
    /// make it again; the caller deletes it and then says [`Live::volume_left`], with what this returns.
    pub(super) async fn release_volume(&self, name: &VolumeName) -> Result<Released, ReleaseError> {
        let turn = self.ledger.turn().await;
        if let Some((nqn, nsid)) = self.ledger.server_of(name.as_str()) {
            return Err(ReleaseError::Served { name: name.clone(), nqn, nsid });
        }
        if turn.is_leaving(name.as_str()) {
            return Err(ReleaseError::Leaving { name: name.clone() });
        }
        turn.leave(name.as_str());
        // Where the configuration has it, a release that could not be kept is written down again.
        let object = self.ledger.objects().volume(name).cloned();
        if object.is_none() && self.ledger.configured().volume(name).is_none() {
            return Ok(Released(None));
        }
        let edit = |objects: &mut Objects| objects.volumes.retain(|v| v.name != *name);
        let released = turn.change(edit, || Ok::<_, ChangeError>(())).await;
        if released.is_err() {
            self.ledger.left(name.as_str());
        }
        released?;
        Ok(Released(object))
    }

    /// The volume is deleted, or stays: then it stands among the objects again as it did.
    pub(super) async fn volume_left(&self, name: &VolumeName, released: Released, deleted: bool) {
        if let (Released(Some(object)), false) = (released, deleted) {
            let turn = self.ledger.turn().await;
            let back = turn.change(|objects| objects.volumes.push(object), || Ok::<_, ChangeError>(())).await;
            if let Err(error) = back {
                tracing::warn!(volume = %name, "not deleted, and no longer among the objects that are kept: {error}");
            }
        }
        self.ledger.left(name.as_str());
    }

    /// Resizes a volume; where the configuration speaks of it, its new size is kept.
    pub(super) async fn resize_volume(&self, name: &VolumeName, size: ByteSize) -> Result<VolumeStatus, ResizeError> {
        let pool = self.storage.as_ref().ok_or(ResizeError::NoPool)?.pool();
        let turn = self.ledger.turn().await;
        let written = match self.ledger.objects().volume(name) {
            None => None,
            Some(_) => {
                let same = |volume: &&mut Volume| volume.name == *name;
                let edit = |objects: &mut Objects| objects.volumes.iter_mut().filter(same).for_each(|v| v.size = size);
                Some(turn.write(edit).await?)
            }
        };
        let resized = pool.resize_volume(name.as_str(), size.bytes()).await?;
        if let Some((nqn, nsid)) = self.ledger.server_of(name.as_str())
            && let Err(error) = self.target.namespace_resized(&nqn, nsid)
        {
            // Removed in this very moment: then nobody is there to be told.
            tracing::debug!(%error, volume = %name, "hosts not told of the new size");
        }
        if let Some(written) = written {
            turn.keep(written).await?;
        }
        Ok(resized)
    }

    /// A subsystem with its hosts, or nothing.
    fn enter_subsystem(&self, subsystem: &Subsystem) -> Result<(), TargetError> {
        let nqn = subsystem.nqn.as_str();
        let serial = subsystem.serial.as_ref().map(|serial| serial.as_str());
        self.target.create_subsystem(&spec(nqn, serial, subsystem.allow_any_host))?;
        for host in &subsystem.hosts {
            if let Err(error) = self.target.allow_host(nqn, host.as_str()) {
                // Nobody can have connected to a subsystem without namespaces and mean it.
                drop(self.target.delete_subsystem(nqn));
                return Err(error);
            }
        }
        Ok(())
    }

    /// The rules of the configuration for a `mem:` namespace: what breaks them would keep the service from starting again.
    fn check_memory(&self, namespace: &Namespace, size: ByteSize) -> Result<(), OpenError> {
        let spec = namespace.backend.clone();
        check::memory_size(size, namespace.block_size).map_err(|reason| OpenError::Size { spec, reason })?;
        let mut objects = self.ledger.objects();
        if let Some(subsystem) = objects.subsystems.first_mut() {
            subsystem.namespaces.push(namespace.clone());
        }
        let config = objects.put_into(&self.checked.config);
        Ok(MemoryPlan::of(&config, self.checked.reactors, &self.checked.machine).fits()?)
    }

    /// Milliseconds since the service was ready.
    pub(super) fn uptime_ms(&self) -> u64 {
        self.ready.get().map_or(0, |ready| ready.elapsed().as_millis() as u64)
    }

    async fn open(&self, nqn: &str, namespace: &Namespace) -> Result<Arc<dyn Backend>, OpenError> {
        if let BackendSpec::Pool(name) = &namespace.backend {
            return self.volume(name, namespace.block_size);
        }
        let (spec, reactors) = (namespace.backend.clone(), self.reactors.clone());
        let identity = format!("{nqn} {}", namespace.nsid);
        let block_size = namespace.block_size.unwrap_or(BlockSize::B4096);
        // Opening a file may wait for its file system.
        let open = move || PlainBackend::open(&spec, block_size, &identity, &reactors);
        let opened = tokio::task::spawn_blocking(open).await.map_err(|_| OpenError::Bug)?;
        Ok(opened?)
    }

    fn volume(&self, name: &str, block_size: Option<BlockSize>) -> Result<Arc<dyn Backend>, OpenError> {
        let Some(storage) = &self.storage else { return Err(OpenError::NoPool { name: name.to_owned() }) };
        if block_size.is_some() {
            return Err(OpenError::BlockSizeOfVolume);
        }
        storage.pool().volume(name).ok_or_else(|| self.no_volume(name))
    }

    fn no_volume(&self, name: &str) -> OpenError {
        let volumes = self.storage.as_ref().map(|storage| storage.pool().volumes()).unwrap_or_default();
        OpenError::NoVolume { name: name.to_owned(), have: volumes.into_iter().map(|volume| volume.name).collect() }
    }
}

fn spec(nqn: &str, serial: Option<&str>, allow_any_host: bool) -> SubsystemSpec {
    SubsystemSpec {
        nqn: nqn.to_owned(),
        serial: serial.map_or_else(|| serial_of(nqn), str::to_owned),
        model: MODEL.to_owned(),
        allow_any_host,
    }
}

/// A serial number that follows from the name, so that it is the same after every restart: 20 hexadecimal digits.
fn serial_of(nqn: &str) -> String {
    let name = format!("sluice serial number\n{nqn}");
    let digits = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes()).simple().to_string();
    digits.to_uppercase().chars().take(20).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_number_follows_from_the_name() {
        let one = serial_of("nqn.2026-11.io.example:a");
        assert_eq!(one, serial_of("nqn.2026-11.io.example:a"));
        assert_ne!(one, serial_of("nqn.2026-11.io.example:b"));
        assert!(one.len() == 20 && one.bytes().all(|b| b.is_ascii_alphanumeric()));
    }
}
