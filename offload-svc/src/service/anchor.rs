//! The anchor: how far the pool has come, kept outside it.
//!
//! Owns the file's form and when it is written. Must not know what makes a pool older (`pool` compares). Invariant: it never
//! tells of a publication that is not durable on the whole set.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::config::state::{Prepared, WriteError};
use crate::pool::{Pool, Publication};

/// How soon after a publication the anchor tells of it.
const ROUND: Duration = Duration::from_secs(1);
const VERSION: i64 = 1;
/// More than any anchor has, so that a wrong path doesn't read a disk.
const MAX_BYTES: u64 = 4096;
const HEAD: &str =
    "# Kept by offload-svc: how far the pool has come. Members that are all older than this have been rolled back.\n";

/// Why an anchor can't be used.
#[derive(Debug, thiserror::Error)]
pub enum AnchorError {
    /// The system refuses.
    #[error("{}: can't be read: {source}: check the file's permissions", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not what was written.
    #[error(
        "{}: is no anchor of this release ({reason}): restore it from a copy, or, if you know that the members are the newest \
         ones, move it away",
        file.display()
    )]
    Form {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Of another pool.
    #[error("{}: is the anchor of pool {anchored}, and the members hold pool {found}: set pool.anchor to this pool's own", file.display())]
    OtherPool {
        /// The file.
        file: PathBuf,
        /// Its pool.
        anchored: Uuid,
        /// The members'.
        found: Uuid,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    version: i64,
    pool: Uuid,
    generation: u64,
    mounts: u64,
    /// Hexadecimal, as TOML has no integers that long.
    mount_id: String,
}

/// Reads the anchor of `pool`; none where there is no file.
pub(super) fn read(file: &Path, pool: Uuid) -> Result<Option<Publication>, AnchorError> {
    let at = |source| AnchorError::Read { file: file.to_owned(), source };
    let bad = |reason| AnchorError::Form { file: file.to_owned(), reason };
    match std::fs::metadata(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(at(error)),
        Ok(found) if !found.is_file() || found.len() > MAX_BYTES => return Err(bad("not a short file".to_owned())),
        Ok(_) => {}
    }
    let text = std::fs::read_to_string(file).map_err(at)?;
    let body: Body = toml::from_str(&text).map_err(|error| bad(error.message().to_owned()))?;
    if body.version != VERSION {
        return Err(bad(format!("version {}", body.version)));
    }
    let mount_id = u128::from_str_radix(&body.mount_id, 16).map_err(|error| bad(format!("mount_id: {error}")))?;
    if body.pool != pool {
        return Err(AnchorError::OtherPool { file: file.to_owned(), anchored: body.pool, found: pool });
    }
    Ok(Some(Publication { generation: body.generation, mounts: body.mounts, mount_id }))
}

fn write(file: &Path, pool: Uuid, publication: Publication) -> Result<(), WriteError> {
    let Publication { generation, mounts, mount_id } = publication;
    let body = Body { version: VERSION, pool, generation, mounts, mount_id: format!("{mount_id:032x}") };
    let failed = |error| WriteError { file: file.to_owned(), source: std::io::Error::other(error) };
    let text = toml::to_string(&body).map_err(failed)?;
    Prepared::of_text(file, &format!("{HEAD}{text}"))?.commit()
}

/// The anchor of a pool that is served.
pub(super) struct Anchor {
    file: PathBuf,
    pool: Pool,
    /// What the file has.
    written: Mutex<Written>,
}

#[derive(Default)]
struct Written {
    publication: Option<Publication>,
    error: Option<String>,
}

impl Anchor {
    pub(super) fn new(file: PathBuf, pool: Pool) -> Self {
        Self { file, pool, written: Mutex::default() }
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// The generation that the file has, and why it has no newer one if that failed.
    pub(super) fn state(&self) -> (Option<u64>, Option<String>) {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        (written.publication.map(|publication| publication.generation), written.error.clone())
    }

    /// Writes down the last publication, if the file doesn't have it. Blocks.
    pub(super) fn update(&self) {
        let newest = self.pool.publication();
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if written.publication == Some(newest) {
            return;
        }
        match write(&self.file, self.pool.uuid(), newest) {
            Ok(()) => *written = Written { publication: Some(newest), error: None },
            Err(error) => {
                let error = error.to_string();
                if written.error.as_ref() != Some(&error) {
                    tracing::error!("pool.anchor: {error}");
                }
                written.error = Some(error);
            }
        }
    }

    /// Keeps it up to date for as long as the service runs.
    pub(super) async fn keep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(ROUND).await;
            let this = Arc::clone(&self);
            let _ = tokio::task::spawn_blocking(move || this.update()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_anchor_is_read_back_or_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("anchor");
        let (pool, other) = (Uuid::from_u128(1), Uuid::from_u128(2));
        assert_eq!(read(&file, pool).unwrap(), None);
        let publication = Publication { generation: 77, mounts: 3, mount_id: u128::MAX - 5 };
        write(&file, pool, publication).unwrap();
        assert_eq!(read(&file, pool).unwrap(), Some(publication));
        assert!(read(&file, other).unwrap_err().to_string().contains("is the anchor of pool 00000000-"));
        for text in ["", "version = 2\n", "version = 1\npool = \"x\"\n"] {
            std::fs::write(&file, text).unwrap();
            assert!(read(&file, pool).unwrap_err().to_string().contains("is no anchor of this release ("), "{text}");
        }
    }
}
