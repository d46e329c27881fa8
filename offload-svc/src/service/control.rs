//! The management API over the running service.
//!
//! Owns which change maps to which refusal. Must not know HTTP. Invariant: reads answer from snapshots and never wait for I/O.

use std::net::SocketAddr;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use nvmf_target::target::TargetError;

use super::changes::ChangeError;
use super::configuration;
use super::live::{ChangeRefused, Live, OpenError, ReleaseError, ResizeError};
use super::members::ComeError;
use super::receipts;
use super::views;
use crate::config::check;
use crate::config::schema::{Listener, Namespace, Subsystem};
use crate::config::values::{BlockSize, ByteSize};
use crate::manage::request::{
    CloneRequest, HostRequest, KeyRotation, ListenerRequest, MemberDestroyed, MemberReplacement, MemberReturn,
    NamespaceRemoval, NamespaceRequest, ScrubRequest, SnapshotRequest, SubsystemRemoval, SubsystemRequest,
    VolumeRemoval, VolumeRequest, VolumeResize,
};
use crate::manage::{CALL_LIMIT, Control, Refusal, RefusalKind, metrics, view};
use crate::pool::{CheckpointError, CloneSpec, MemberError, StatementError, VolumeError, VolumeSpec};

/// See the module.
pub(super) struct ServiceControl(pub(super) Arc<Live>);

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

    fn keys(&self) -> Result<Vec<view::VolumeKey>, Refusal> {
        let pool = self.0.storage().ok_or_else(no_pool)?.pool();
        Ok(pool.keys().iter().map(views::key).collect())
    }

    fn receipts(&self) -> Result<Vec<view::Receipt>, Refusal> {
        let pool = self.0.storage().ok_or_else(no_pool)?.pool();
        Ok(pool.receipts().iter().map(receipts::receipt).collect())
    }

    fn member_destroyed(&self, request: MemberDestroyed) -> BoxFuture<'static, Result<Vec<view::Receipt>, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            pool.member_destroyed(request.member).await.map_err(statement_refusal)?;
            Ok(pool.receipts().iter().map(receipts::receipt).collect())
        }
        .boxed()
    }

    fn rotate_key(&self, request: KeyRotation) -> BoxFuture<'static, Result<view::VolumeKey, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            let rotated = pool.rotate_key(request.volume.as_str()).await.map_err(volume_refusal)?;
            Ok(views::key(&rotated))
        }
        .boxed()
    }

    fn subsystems(&self) -> Vec<view::Subsystem> {
        views::subsystems(&self.0)
    }

    fn listeners(&self) -> Vec<view::Listener> {
        views::listeners(&self.0.target().snapshot())
    }

    fn config(&self) -> view::Configuration {
        configuration::configuration(&self.0)
    }

    fn metrics(&self) -> String {
        metrics::render(views::metrics(&self.0))
    }

    fn create_volume(&self, request: VolumeRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            check_size(request.size, request.block_size)?;
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

    fn delete_volume(&self, request: VolumeRemoval) -> BoxFuture<'static, Result<view::Receipt, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            let released = live.release_volume(&request.name).await.map_err(release_refusal)?;
            let deleted = pool.delete_volume(request.name.as_str()).await;
            live.volume_left(&request.name, released, deleted.is_ok()).await;
            Ok(receipts::receipt(&deleted.map_err(volume_refusal)?))
        }
        .boxed()
    }

    fn snapshot_volume(&self, request: SnapshotRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            let taken = pool.snapshot_volume(request.volume.as_str(), request.name.as_str()).await;
            Ok(views::volume(&live, &taken.map_err(volume_refusal)?))
        }
        .boxed()
    }

    fn clone_volume(&self, request: CloneRequest) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            let spec = CloneSpec { name: request.name.as_str().to_owned(), compression: request.compression };
            let made = pool.clone_volume(request.origin.as_str(), spec).await;
            Ok(views::volume(&live, &made.map_err(volume_refusal)?))
        }
        .boxed()
    }

    fn resize_volume(&self, request: VolumeResize) -> BoxFuture<'static, Result<view::Volume, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let name = request.name.as_str();
            let pool = live.storage().ok_or_else(no_pool)?.pool();
            if let Some(there) = pool.volumes().into_iter().find(|volume| volume.name == name) {
                let block_size = if there.block_bytes == 512 { BlockSize::B512 } else { BlockSize::B4096 };
                check_size(request.size, block_size)?;
            }
            let resized = live.resize_volume(&request.name, request.size).await.map_err(resize_refusal)?;
            Ok(views::volume(&live, &resized))
        }
        .boxed()
    }

    fn replace_member(&self, request: MemberReplacement) -> BoxFuture<'static, Result<view::Coming, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let devices = live.storage().ok_or_else(no_pool)?.devices();
            let coming = devices.replace(&request.old, &request.new).await.map_err(come_refusal)?;
            let advice = format!(
                "it is being filled, and {} serves on until it is full: see pool show. Then put {} in its place in \
                 pool.members; until then add it to pool.spares, so that a restart finds both",
                request.old, request.new
            );
            Ok(view::Coming { index: coming.index.into(), uuid: coming.uuid.to_string(), advice })
        }
        .boxed()
    }

    fn attach_member(&self, request: MemberReturn) -> BoxFuture<'static, Result<view::Coming, Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let devices = live.storage().ok_or_else(no_pool)?.devices();
            let coming = devices.attach(&request.member).await.map_err(come_refusal)?;
            let advice = "it gets what it lacks, and counts then: see pool show".to_owned();
            Ok(view::Coming { index: coming.index.into(), uuid: coming.uuid.to_string(), advice })
        }
        .boxed()
    }

    fn scrub(&self, request: ScrubRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let asked = self.0.storage().map(|storage| storage.pool().scrub(request.run)).ok_or_else(no_pool);
        ready(asked).boxed()
    }

    fn add_subsystem(&self, request: SubsystemRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let SubsystemRequest { nqn, serial, allow_any_host, hosts } = request;
            let subsystem = Subsystem { nqn, serial, allow_any_host, hosts, namespaces: Vec::new() };
            live.add_subsystem(subsystem).await.map_err(refusal)
        }
        .boxed()
    }

    fn remove_subsystem(&self, request: SubsystemRemoval) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let departing = live.remove_subsystem(&request.nqn).await.map_err(refusal)?;
            // Its name is gone already; only the last commands of its hosts are waited for.
            departing.wait(CALL_LIMIT / 2).await.map_err(target_refusal)
        }
        .boxed()
    }

    fn add_namespace(&self, request: NamespaceRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let NamespaceRequest { nqn, nsid, backend, block_size } = request;
            live.add_namespace(&nqn, Namespace { nsid, backend, block_size }).await.map_err(open_refusal)
        }
        .boxed()
    }

    fn remove_namespace(&self, request: NamespaceRemoval) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move { live.remove_namespace(&request.nqn, request.nsid).await.map_err(refusal) }.boxed()
    }

    fn allow_host(&self, request: HostRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move { live.allow_host(&request.nqn, &request.host).await.map_err(refusal) }.boxed()
    }

    fn deny_host(&self, request: HostRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move { live.deny_host(&request.nqn, &request.host).await.map_err(refusal) }.boxed()
    }

    fn add_listener(&self, request: ListenerRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move {
            let address = socket(&request)?;
            let listener = Listener { address: request.address, port: request.port };
            live.add_listener(listener, address).await.map_err(refusal)
        }
        .boxed()
    }

    fn remove_listener(&self, request: ListenerRequest) -> BoxFuture<'static, Result<(), Refusal>> {
        let live = Arc::clone(&self.0);
        async move { live.remove_listener(socket(&request)?).await.map_err(refusal) }.boxed()
    }
}

fn socket(request: &ListenerRequest) -> Result<SocketAddr, Refusal> {
    if request.port == 0 {
        return Err(Refusal::new(RefusalKind::Invalid, "port: 0: out of range: 1 to 65535"));
    }
    let refuse = |error| Refusal::new(RefusalKind::Invalid, format!("address: {}: {error}", request.address));
    request.address.socket(request.port).map_err(refuse)
}

/// The rule of the configuration: a size that breaks it would keep the service from starting again.
fn check_size(size: ByteSize, block_size: BlockSize) -> Result<(), Refusal> {
    let refuse = |reason| Refusal::new(RefusalKind::Invalid, format!("size: {size}: {reason}"));
    check::volume_size(size, block_size).map_err(refuse)
}

fn no_pool() -> Refusal {
    Refusal::new(RefusalKind::NotFound, "there is no pool: list its members in pool.members of the configuration")
}

fn refusal(error: ChangeRefused) -> Refusal {
    match error {
        ChangeRefused::Target(error) => target_refusal(error),
        ChangeRefused::Change(error) => change_refusal(error),
    }
}

fn release_refusal(error: ReleaseError) -> Refusal {
    match error {
        ReleaseError::Served { .. } | ReleaseError::Leaving { .. } => Refusal::new(RefusalKind::Conflict, error),
        ReleaseError::Change(error) => change_refusal(error),
    }
}

fn resize_refusal(error: ResizeError) -> Refusal {
    match error {
        ResizeError::NoPool => no_pool(),
        ResizeError::Volume(error) => volume_refusal(error),
        ResizeError::Change(error) => change_refusal(error),
    }
}

fn change_refusal(error: ChangeError) -> Refusal {
    let kind = match error {
        ChangeError::NotMade(_) | ChangeError::NotKept(_) => RefusalKind::Unavailable,
        ChangeError::Bug => RefusalKind::Internal,
    };
    Refusal::new(kind, error)
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
        E::NameTaken { .. } | E::UuidTaken { .. } | E::Rotating { .. } | E::IsSnapshot { .. } | E::TooDeep { .. } => {
            RefusalKind::Conflict
        }
        E::Checkpoint(CheckpointError::NoSpace | CheckpointError::MemberFull) => RefusalKind::NoSpace,
        E::Checkpoint(_) | E::Closed | E::NoRandomness => RefusalKind::Unavailable,
        E::BadName { .. } | E::BlockSize { .. } | E::Size { .. } | E::Shrink { .. } | E::TooMany { .. } => {
            RefusalKind::Invalid
        }
    };
    Refusal::new(kind, error)
}

fn statement_refusal(error: StatementError) -> Refusal {
    let kind = match error {
        StatementError::InUse(_) => RefusalKind::Conflict,
        StatementError::NotAwaited(_) => RefusalKind::NotFound,
        StatementError::Checkpoint(CheckpointError::NoSpace | CheckpointError::MemberFull) => RefusalKind::NoSpace,
        StatementError::Checkpoint(_) | StatementError::Closed => RefusalKind::Unavailable,
    };
    Refusal::new(kind, error)
}

fn come_refusal(error: ComeError) -> Refusal {
    use MemberError as E;
    let kind = match &error {
        ComeError::Member(E::NoSuchMember { .. }) => RefusalKind::NotFound,
        ComeError::Member(E::Active { .. } | E::UnderWay { .. } | E::Other { .. } | E::TooManyDeparted { .. }) => {
            RefusalKind::Conflict
        }
        ComeError::Member(E::Closed) | ComeError::NoPlace(_) => RefusalKind::Unavailable,
        ComeError::Bug => RefusalKind::Internal,
        ComeError::File(_) | ComeError::Member(_) => RefusalKind::Invalid,
    };
    Refusal::new(kind, error)
}

fn open_refusal(error: OpenError) -> Refusal {
    match error {
        OpenError::Target(error) => target_refusal(error),
        OpenError::Change(error) => change_refusal(error),
        OpenError::Taken { .. } => Refusal::new(RefusalKind::Conflict, error),
        OpenError::Memory(_) => Refusal::new(RefusalKind::NoSpace, error),
        OpenError::Size { .. } => Refusal::new(RefusalKind::Invalid, error),
        OpenError::Plain(error) => Refusal::new(RefusalKind::Invalid, format!("backend: {error}")),
        OpenError::NoVolume { .. } | OpenError::NoPool { .. } => Refusal::new(RefusalKind::NotFound, error),
        OpenError::BlockSizeOfVolume => Refusal::new(RefusalKind::Invalid, error),
        OpenError::Bug => Refusal::new(RefusalKind::Internal, error),
    }
}
