//! What can be made or checked before anything runs: folders, descriptors, and whether addresses are free.
//!
//! Owns the service's own folders. Must not open members. Invariant: where a pool has been served, no folder of its members
//! or key is made, so that a disk that isn't mounted is not papered over by a folder of its name. Spares' folders are made
//! once the pool has been found: nothing can be lost with one.

use std::io;
use std::net::TcpListener;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::storage::outlives_us;
use super::{Forced, ServiceError};
use crate::config::Checked;
use crate::config::values::MemberSpec;

/// Makes the folders of the socket, the state file, the key file and the file members.
pub(super) fn folders(checked: &Checked, force: Forced) -> Result<(), ServiceError> {
    let config = &checked.config;
    folder_of(&config.service.socket, "service.socket")?;
    match folder_of(&config.service.state_file(), "service.state") {
        // Nobody has asked for that place: the service can do without until something is changed.
        Err(error) if config.service.state.is_none() => {
            tracing::warn!("changes made with offloadctl will be refused: {error}");
        }
        made => made?,
    }
    let served_before = checked.state.kept.pool.is_some() && !force.new_pool && outlives_us(config);
    if let Some(anchor) = &config.pool.anchor {
        folder_of(anchor, "pool.anchor")?;
    }
    if config.pool.members.is_empty() || served_before {
        return Ok(());
    }
    folder_of(&config.pool.key_file, "pool.key_file")?;
    for (members, key) in [(&config.pool.members, "pool.members"), (&config.pool.spares, "pool.spares")] {
        for member in members {
            if let MemberSpec::File(path) = member {
                folder_of(path, key)?;
            }
        }
    }
    Ok(())
}

/// Lets the process open as many files as it may, and says so if that is too few for what is configured. `needed` counts
/// connections; members and the rest come on top.
pub(super) fn descriptors(needed: usize) {
    /// Epoll, io_uring, eventfds, members, standard streams.
    const OTHERS: u64 = 512;
    let needed = needed as u64 + OTHERS;
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        let wanted = hard.min(needed.max(soft));
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).map(|()| wanted)
    });
    match raised {
        Ok(may) if may >= needed => {}
        Ok(may) => tracing::warn!(
            may,
            needed,
            "too few file descriptors for all connections that the limits allow: raise RLIMIT_NOFILE (ulimit -n), or lower \
             limits.hosts or limits.queues"
        ),
        Err(error) => tracing::warn!(%error, "the limit of file descriptors can't be read or raised"),
    }
}

fn folder_of(file: &Path, key: &'static str) -> Result<(), ServiceError> {
    let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) else { return Ok(()) };
    make_folder(folder).map_err(|source| ServiceError::Folder { folder: folder.to_owned(), key, source })
}

/// Makes a folder and those above it, unless it is there. What is there and no folder fails where it is used.
pub(super) fn make_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    match std::fs::DirBuilder::new().mode(0o700).recursive(true).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Finds out early that an address is taken, before a pool is touched. The listeners proper are bound last.
pub(super) fn addresses(checked: &Checked) -> Result<(), ServiceError> {
    for (index, listener) in checked.config.listeners.iter().enumerate() {
        let bound = listener.address.socket(listener.port).and_then(TcpListener::bind);
        let endpoint = listener.address.with_port(listener.port);
        let place = checked.sources.shown(&["listener", &index.to_string()]);
        bound.map_err(|source| ServiceError::Address { place, endpoint, source })?;
    }
    Ok(())
}
