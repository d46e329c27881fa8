//! Making a pool of members that hold nothing, and spares for one that is there.
//!
//! Owns the files that are made for it, and their removal. Must not know whether a pool shall be made. Invariant: a start that
//! fails before it has written anything leaves no files of its own; once it has written, nothing is removed, as any member may
//! then be one of a pool.

use std::rc::Rc;

use uuid::Uuid;

use super::prepare;
use super::storage::{StorageError, inputs, open_members, refuse_busy};
use crate::config::Config;
use crate::config::values::MemberSpec;
use crate::pool::{self, Env, FormatError};
use crate::reactor::Reactors;
use crate::reactor::env::ReactorEnv;
use crate::reactor::members::{Members, Missing};

/// Makes a pool of blank members, and of files that are not there yet.
pub(super) async fn make_pool(config: &Config, reactors: &Reactors, members: Members) -> Result<Members, StorageError> {
    // The locks go first, or opening again would find the members in use.
    drop(members);
    let members = open_members(config, Missing::Create { bytes: config.pool.member_size.bytes() }).await?;
    let made = match refuse_unopened(&members, config.pool.members.len()) {
        Ok(()) => format(config, reactors, &members).await,
        Err(error) => Err(error),
    };
    match made {
        Ok(_) => Ok(members),
        Err(error) => {
            take_back(config, &members, &error);
            Err(error)
        }
    }
}

/// Removes the files that this start has made for a pool that was not made, unless the format has written: a member that has its
/// finished superblock, though its writing failed, would be one of a pool that has lost the others. What stays is formatted anew
/// or mounts, at the next start.
fn take_back(config: &Config, members: &Members, error: &StorageError) {
    if !wrote_nothing(error) {
        return;
    }
    let specs = config.pool.members.iter().chain(&config.pool.spares);
    for (index, path) in specs.enumerate().filter_map(|(index, spec)| Some((index, spec.path()?))) {
        if let Some(file) = members.file(index)
            && let Err(error) = file.remove_if_made(path)
        {
            tracing::warn!(path = %path.display(), %error, "made for a pool that was not made, and can't be removed");
        }
    }
}

/// Whether a pool that was not made was given up before anything was written.
fn wrote_nothing(error: &StorageError) -> bool {
    match error {
        StorageError::NotMade { .. } | StorageError::Member { .. } => true,
        StorageError::Format(error) => matches!(
            error,
            FormatError::MemberCount { .. }
                | FormatError::Option(_)
                | FormatError::Missing { .. }
                | FormatError::TooSmall { .. }
                | FormatError::NotBlank { .. }
                | FormatError::NoRoom { .. }
        ),
        _ => false,
    }
}

/// A pool is made of all its members.
fn refuse_unopened(members: &Members, count: usize) -> Result<(), StorageError> {
    refuse_busy(members)?;
    for (index, member) in members.iter().take(count).enumerate() {
        if let Err(error) = &member.file {
            return Err(StorageError::NotMade { index, reason: error.to_string() });
        }
    }
    Ok(())
}

/// Spares that are not there yet are made: nothing can be lost with one that is blank.
pub(super) async fn make_spares(config: &Config, members: &Members) -> Result<(), StorageError> {
    let (pool, members) = (config.pool.clone(), members.clone());
    let make = move || {
        for (index, spec) in pool.spares.iter().enumerate() {
            if let MemberSpec::File(path) = spec
                && let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty())
                && let Err(error) = prepare::make_folder(folder)
            {
                tracing::warn!(folder = %folder.display(), %error, "a spare's folder can't be made");
            }
            let missing = Missing::Create { bytes: pool.member_size.bytes() };
            members.reopen(pool.members.len() + index, spec, missing);
        }
    };
    tokio::task::spawn_blocking(make).await.map_err(|_| StorageError::Bug)
}

async fn format(config: &Config, reactors: &Reactors, members: &Members) -> Result<Uuid, StorageError> {
    let layout = config.pool.layout();
    let (members, mut inputs) = (members.clone(), inputs(members));
    let count = config.pool.members.len();
    // Spares stay blank.
    inputs.truncate(count);
    let work = move |local| async move {
        let env: Rc<dyn Env> = Rc::new(ReactorEnv::new(local, members));
        pool::format(&env, &inputs, layout).await
    };
    let uuid = reactors.call_on(0, work).await??;
    tracing::info!(pool = %uuid, members = count, "blank members formatted: a new pool");
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::config::values::ByteSize;

    /// A format that could not write may have written all the same.
    #[test]
    fn files_are_taken_back_only_if_nothing_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let (there, made) = (folder.path().join("there"), folder.path().join("made"));
        std::fs::write(&there, [0; 4096]).unwrap();
        let mut config = Config::default();
        config.pool.members = [&there, &made].map(|path| MemberSpec::File(path.clone())).to_vec();
        config.pool.member_size = ByteSize(1 << 20);
        let open = || Members::open(&config.pool.members, Missing::Create { bytes: config.pool.member_size.bytes() });
        let name = || "made".to_owned();
        let unwritten = FormatError::Write { name: name(), source: io::ErrorKind::Other.into() };
        take_back(&config, &open(), &StorageError::Format(unwritten));
        assert!(made.exists());
        std::fs::remove_file(&made).unwrap();
        let small = FormatError::TooSmall { name: name(), size_bytes: 1, needed_bytes: 2 };
        take_back(&config, &open(), &StorageError::Format(small));
        assert!(there.exists() && !made.exists());
    }
}
