//! The running service: its parts, its state, and the changes that can be made to it.
//!
//! Owns which back end serves which namespace. Must not know the management API. Invariant: a change is whole or not made.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use nvmf_target::backend::Backend;
use nvmf_target::target::{Departing, SubsystemSpec, Target, TargetError};
use uuid::Uuid;

use super::ServiceError;
use super::storage::Storage;
use crate::config::check;
use crate::config::error::ConfigError;
use crate::config::schema::Subsystem;
use crate::config::values::{BackendSpec, BlockSize};
use crate::config::{Checked, Config};
use crate::plain::{PlainBackend, PlainError};
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

/// A subsystem's name and a namespace's id.
pub(super) type Place = (String, u32);

/// See the module.
pub(super) struct Live {
    checked: Checked,
    reactors: Reactors,
    target: Arc<Target>,
    state: AtomicU8,
    ready: OnceLock<Instant>,
    places: Mutex<BTreeMap<Place, BackendSpec>>,
    storage: Option<Storage>,
}

/// Why a back end does not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
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

impl Live {
    pub(super) fn new(checked: Checked, reactors: Reactors, target: Arc<Target>, storage: Option<Storage>) -> Self {
        Self {
            checked,
            reactors,
            target,
            state: AtomicU8::new(State::Starting as u8),
            ready: OnceLock::new(),
            places: Mutex::default(),
            storage,
        }
    }

    pub(super) fn config(&self) -> &Config {
        &self.checked.config
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

    /// A subsystem of the configuration, with its hosts and namespaces.
    pub(super) async fn start_subsystem(&self, index: usize, subsystem: &Subsystem) -> Result<(), ServiceError> {
        let nqn = subsystem.nqn.as_str();
        let serial = subsystem.serial.as_ref().map(|serial| serial.as_str());
        let hosts: Vec<&str> = subsystem.hosts.iter().map(|host| host.as_str()).collect();
        self.add_subsystem(nqn, serial, subsystem.allow_any_host, &hosts)?;
        for (place, namespace) in subsystem.namespaces.iter().enumerate() {
            let (nsid, backend) = (namespace.nsid, &namespace.backend);
            match self.add_namespace(nqn, nsid, backend, namespace.block_size).await {
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
    pub(super) async fn add_namespace(
        &self,
        nqn: &str,
        nsid: u32,
        spec: &BackendSpec,
        block_size: Option<BlockSize>,
    ) -> Result<(), OpenError> {
        let backend = self.open(nqn, nsid, spec, block_size).await?;
        // Under the lock, so that what is shown and what a volume's deletion checks is what the target has.
        let mut places = self.places();
        self.target.add_namespace(nqn, nsid, backend)?;
        places.insert((nqn.to_owned(), nsid), spec.clone());
        Ok(())
    }

    /// Removes a namespace; what its back end has been given already finishes.
    pub(super) fn remove_namespace(&self, nqn: &str, nsid: u32) -> Result<(), TargetError> {
        let mut places = self.places();
        self.target.remove_namespace(nqn, nsid)?;
        places.remove(&(nqn.to_owned(), nsid));
        Ok(())
    }

    /// Adds a subsystem with its hosts, or nothing.
    pub(super) fn add_subsystem(
        &self,
        nqn: &str,
        serial: Option<&str>,
        allow_any_host: bool,
        hosts: &[&str],
    ) -> Result<(), TargetError> {
        self.target.create_subsystem(&spec(nqn, serial, allow_any_host))?;
        for host in hosts {
            if let Err(error) = self.target.allow_host(nqn, host) {
                // Nobody can have connected to a subsystem without namespaces and mean it.
                drop(self.target.delete_subsystem(nqn));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Removes a subsystem and forgets its namespaces; the controllers' end is for the caller to wait for.
    pub(super) fn remove_subsystem(&self, nqn: &str) -> Result<Departing, TargetError> {
        let mut places = self.places();
        let departing = self.target.delete_subsystem(nqn)?;
        places.retain(|(subsystem, _), _| subsystem != nqn);
        Ok(departing)
    }

    /// What stands behind each namespace.
    pub(super) fn backends(&self) -> BTreeMap<Place, BackendSpec> {
        self.places().clone()
    }

    /// Milliseconds since the service was ready.
    pub(super) fn uptime_ms(&self) -> u64 {
        self.ready.get().map_or(0, |ready| ready.elapsed().as_millis() as u64)
    }

    async fn open(
        &self,
        nqn: &str,
        nsid: u32,
        backend: &BackendSpec,
        block_size: Option<BlockSize>,
    ) -> Result<Arc<dyn Backend>, OpenError> {
        if let BackendSpec::Pool(name) = backend {
            return self.volume(name, block_size);
        }
        let (spec, identity, reactors) = (backend.clone(), format!("{nqn} {nsid}"), self.reactors.clone());
        let block_size = block_size.unwrap_or(BlockSize::B4096);
        // Opening a file may wait for its file system.
        let open = move || PlainBackend::open(&spec, block_size, &identity, &reactors);
        let opened = tokio::task::spawn_blocking(open).await.map_err(|_| OpenError::Bug)?;
        Ok(opened?)
    }

    fn volume(&self, name: &str, block_size: Option<BlockSize>) -> Result<Arc<dyn Backend>, OpenError> {
        let name = name.to_owned();
        let Some(storage) = &self.storage else { return Err(OpenError::NoPool { name }) };
        if block_size.is_some() {
            return Err(OpenError::BlockSizeOfVolume);
        }
        storage.pool().volume(&name).ok_or_else(|| {
            let have = storage.pool().volumes().into_iter().map(|volume| volume.name).collect();
            OpenError::NoVolume { name, have }
        })
    }

    /// The namespace that serves a volume.
    pub(super) fn server_of(&self, volume: &str) -> Option<Place> {
        let serves = |(_, spec): &(&Place, &BackendSpec)| matches!(spec, BackendSpec::Pool(name) if name == volume);
        self.places().iter().find(serves).map(|(place, _)| place.clone())
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<Place, BackendSpec>> {
        // Nothing panics while it is held.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
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
