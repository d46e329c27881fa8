//! The management API over the running service.
//!
//! Owns which change maps to which refusal. Must not know HTTP. Invariant: reads answer from snapshots and never wait for I/O.

use std::net::SocketAddr;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use nvmf_target::target::TargetError;

use super::live::{Live, OpenError};
use super::views;
use crate::manage::request::{
    HostRequest, ListenerRequest, NamespaceRemoval, NamespaceRequest, SubsystemRemoval, SubsystemRequest,
    VolumeRemoval, VolumeRequest, VolumeResize,
};
use crate::manage::{CALL_LIMIT, Control, Refusal, RefusalKind, metrics, view};
use crate::pool::{CheckpointError, VolumeError, VolumeSpec};

/// See the module.
pub(super) struct ServiceControl(pub(super) Arc<Live>);

impl ServiceControl {
    fn now(&self, change: impl FnOnce(&Live) -> Result<(), TargetError>) -> BoxFuture<'static, Result<(), Refusal>> {
        ready(change(&self.0).map_err(target_refusal)).boxed()
    }
}

impl Control for ServiceControl {
    fn status(&self) -> view::Status {
        views::status(&self.0)
    }

    fn pool(&self) -> Result<view::Pool, Refusal> {
        self.0.storage().map(views::pool).ok_or_else(no_pool)
    }

    fn volumes(&self) -> Result<Vec<view::Volume>, Refusal> {
        views::volumes(&self.0).ok_or_else(no_pool)
    }

    fn subsystems(&self) -> Vec<view::Subsystem> {
        views::subsystems(&self.0)
    }

    fn listeners(&self) -> Vec<view::Listener> {
        views::listeners(&self.0.target().snapshot())
    }

    fn config(&self) -> String {
        // Every type of the schema has a TOML form; a test dumps them all.
        toml::to_string(self.0.config()).unwrap_or_default()
    }

    fn metrics(&self) -> String {
        metrics::render(views::metrics(&self.0))
    }

    fn create_volume(&self, request: VolumeRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            let made = pool.create_volume(VolumeSpec {
                name: request.name.as_str().to_owned(),
                uuid: None,
                size_bytes: request.size.bytes(),
                block_bytes: request.block_size.bytes(),
                compression: request.compression,
                cipher: request.cipher,
            });
            let made = made.await.map_err(volume_refusal)?;
            Ok(views::volume(&live, &made))
        }
        .boxed()
    }

    fn delete_volume(&self, request: VolumeRemoval) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let name = request.name.as_str();
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            if let Some((nqn, nsid)) = live.server_of(name) {
                let message = format!("volume {name}: namespace {nsid} of {nqn} serves it: remove that first");
                return Err(Refusal { kind: RefusalKind::Conflict, message });
            }
            pool.delete_volume(name).await.map_err(volume_refusal)
        }
        .boxed()
    }

    fn resize_volume(&self, request: VolumeResize) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let name = request.name.as_str();
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            let resized = pool.resize_volume(name, request.size.bytes()).await.map_err(volume_refusal)?;
            if let Some((nqn, nsid)) = live.server_of(name)
                && let Err(error) = live.target().namespace_resized(&nqn, nsid)
            {
                // Removed in this very moment: then nobody is there to be told.
                tracing::debug!(%error, volume = name, "hosts not told of the new size");
            }
            Ok(views::volume(&live, &resized))
        }
        .boxed()
    }

    fn add_subsystem(&self, request: SubsystemRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.now(|live| {
            let serial = request.serial.as_ref().map(|serial| serial.as_str());
            let hosts: Vec<&str> = request.hosts.iter().map(|host| host.as_str()).collect();
            live.add_subsystem(request.nqn.as_str(), serial, request.allow_any_host, &hosts)
        })
    }

    fn remove_subsystem(&self, request: SubsystemRemoval) -> BoxFuture<'static, Result<(), Refusal>> {
        let removed = self.0.remove_subsystem(request.nqn.as_str());
        async move {
            let departing = removed.map_err(target_refusal)?;
            // Its name is gone already; only the last commands of its hosts are waited for.
            departing.wait(CALL_LIMIT / 2).await.map_err(target_refusal)
        }
        .boxed()
    }

    fn add_namespace(&self, request: NamespaceRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let nqn = request.nqn.as_str();
            let added = live.add_namespace(nqn, request.nsid, &request.backend, request.block_size).await;
            added.map_err(open_refusal)
        }
        .boxed()
    }

    fn remove_namespace(&self, request: NamespaceRemoval) -> BoxFuture<'static, Result<(), Refusal>> {
        self.now(|live| live.remove_namespace(request.nqn.as_str(), request.nsid))
    }

    fn allow_host(&self, request: HostRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.now(|live| live.target().allow_host(request.nqn.as_str(), request.host.as_str()))
    }

    fn deny_host(&self, request: HostRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        self.now(|live| live.target().disallow_host(request.nqn.as_str(), request.host.as_str()))
    }

    fn add_listener(&self, request: ListenerRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let done = socket(&request)
            .and_then(|address| self.0.target().add_listener(address).map(drop).map_err(target_refusal));
        ready(done).boxed()
    }

    fn remove_listener(&self, request: ListenerRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let done =
            socket(&request).and_then(|address| self.0.target().remove_listener(address).map_err(target_refusal));
        ready(done).boxed()
    }
}

fn socket(request: &ListenerRequest) -> Result<SocketAddr, Refusal> {
    if request.port == 0 {
        return Err(Refusal::new(RefusalKind::Invalid, "port: 0: out of range: 1 to 65535"));
    }
    let refuse = |error| Refusal::new(RefusalKind::Invalid, format!("address: {}: {error}", request.address));
    request.address.socket(request.port).map_err(refuse)
}

fn no_pool() -> Refusal {
    Refusal::new(RefusalKind::NotFound, "there is no pool: list its members in pool.members of the configuration")
}

fn target_refusal(error: TargetError) -> Refusal {
    use TargetError as E;
    let kind = match &error {
        E::NoSuchSubsystem { .. } | E::NoSuchNamespace { .. } | E::NoSuchHost { .. } | E::NoSuchListener { .. } => {
            RefusalKind::NotFound
        }
        E::SubsystemExists { .. }
        | E::NamespaceExists { .. }
        | E::DuplicateUuid { .. }
        | E::HostExists { .. }
        | E::ListenerExists { .. } => RefusalKind::Conflict,
        E::StillBusy { .. } => RefusalKind::Unfinished,
        E::ShuttingDown => RefusalKind::Unavailable,
        _ => RefusalKind::Invalid,
    };
    Refusal::new(kind, error)
}

fn volume_refusal(error: VolumeError) -> Refusal {
    use VolumeError as E;
    let kind = match &error {
        E::NoSuchVolume { .. } => RefusalKind::NotFound,
        E::NameTaken { .. } | E::UuidTaken { .. } => RefusalKind::Conflict,
        E::Checkpoint(CheckpointError::NoSpace | CheckpointError::MemberFull) => RefusalKind::NoSpace,
        E::Checkpoint(_) | E::Closed | E::NoRandomness => RefusalKind::Unavailable,
        E::BadName { .. } | E::BlockSize { .. } | E::Size { .. } | E::Shrink { .. } | E::TooMany { .. } => {
            RefusalKind::Invalid
        }
    };
    Refusal::new(kind, error)
}

fn open_refusal(error: OpenError) -> Refusal {
    match error {
        OpenError::Target(error) => target_refusal(error),
        OpenError::Plain(error) => Refusal::new(RefusalKind::Invalid, format!("backend: {error}")),
        OpenError::NoVolume { .. } | OpenError::NoPool { .. } => Refusal::new(RefusalKind::NotFound, error),
        OpenError::BlockSizeOfVolume => Refusal::new(RefusalKind::Invalid, error),
        OpenError::Bug => Refusal::new(RefusalKind::Internal, error),
    }
}
