//! The state file: the changes made at run time and the pool that was served, kept over restarts.
//!
//! Owns its form and its writing. Must not know what a change means (`merge` does). Invariant: the file is replaced whole or
//! not at all, and one that is damaged or of a later version is an error, never taken for no changes.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use uuid::Uuid;

use super::merge::Changes;
use super::objects::Objects;

/// The version that is written, and the latest that is read. Version 1 had no pool.
const VERSION: i64 = 2;
/// No state is longer: a change that would make it so is refused.
const MAX_BYTES: u64 = 64 << 20;
const HEAD: &str = "# Kept by offload-svc: changes made with offloadctl (the objects as configured, and as they run), and which pool was served.\n\
                    # To edit it, stop the service and remove the line crc32c. Without this file, the configuration alone holds.\n";

/// Why the state file can't be used.
#[derive(Debug, Error)]
pub enum StateError {
    /// The system refuses.
    #[error("{}: can't be read: {source}: check service.state and the file's permissions", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something else has its name.
    #[error("{}: is not a regular file: set service.state to the path of one, or of none yet", .0.display())]
    NotAFile(PathBuf),
    /// Not what was written.
    #[error(
        "{}: the changes made at run time are damaged: {damage}. Restore the file from a copy, or move it away to start with the \
         configuration alone",
        file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        damage: Damage,
    },
    /// Written by a later release.
    #[error(
        "{}: has version {version}, this release reads {VERSION}: start the release that wrote it, or move the file away to \
         start with the configuration alone",
        file.display()
    )]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its version.
        version: i64,
    },
    /// Another service has written to it while this one started.
    #[error("{}: was changed by another service while this one started: start again", .0.display())]
    Changed(PathBuf),
}

/// What is wrong with a state file.
#[derive(Debug, Error)]
pub enum Damage {
    /// Not UTF-8.
    #[error("byte {0} is not UTF-8")]
    NotText(usize),
    /// Too long to be one.
    #[error("it is longer than {MAX_BYTES} bytes")]
    TooLong,
    /// Its text is not what its checksum says.
    #[error("the checksum does not match")]
    Checksum,
    /// Not TOML, or not of this form.
    #[error("{}", .0.message())]
    Form(#[from] toml::de::Error),
    /// No version.
    #[error("the key 'version' is missing")]
    NoVersion,
}

/// Why a file could not be written.
#[derive(Debug, Error)]
#[error("{}: {source}: check the file, its folder and the space there", file.display())]
pub struct WriteError {
    /// The file.
    pub file: PathBuf,
    /// Why.
    pub source: io::Error,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    version: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pool: Option<Uuid>,
    #[serde(default)]
    configured: Objects,
    #[serde(default)]
    running: Objects,
}

/// What the state file keeps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Kept {
    /// The changes made at run time.
    pub changes: Changes,
    /// The pool that was last served: where it was, blank members are not taken for a new one.
    pub pool: Option<Uuid>,
}

/// The state file as it was read.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Where it is.
    pub file: PathBuf,
    /// What it holds.
    pub kept: Kept,
    /// Its bytes; none without a file.
    bytes: Option<Vec<u8>>,
}

impl State {
    /// Reads `file`; where there is none, nothing has been changed and no pool served.
    ///
    /// # Errors
    /// If it is there and can't be read, is damaged, or is of a later version.
    pub fn read(file: &Path) -> Result<Self, StateError> {
        let bytes = read_bytes(file)?;
        let kept = match &bytes {
            None => Kept::default(),
            Some(bytes) => parse(file, bytes)?,
        };
        Ok(Self { file: file.to_owned(), kept, bytes })
    }

    /// Whether the file still is what was read.
    ///
    /// # Errors
    /// If it can't be read or has changed.
    pub fn check_unchanged(&self) -> Result<(), StateError> {
        if read_bytes(&self.file)? == self.bytes { Ok(()) } else { Err(StateError::Changed(self.file.clone())) }
    }
}

fn read_bytes(file: &Path) -> Result<Option<Vec<u8>>, StateError> {
    let at = |source| StateError::Read { file: file.to_owned(), source };
    let damaged = |damage| StateError::Damaged { file: file.to_owned(), damage };
    match std::fs::metadata(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at(error)),
        Ok(found) if !found.is_file() => Err(StateError::NotAFile(file.to_owned())),
        Ok(found) if found.len() > MAX_BYTES => Err(damaged(Damage::TooLong)),
        Ok(_) => std::fs::read(file).map(Some).map_err(at),
    }
}

fn parse(file: &Path, bytes: &[u8]) -> Result<Kept, StateError> {
    let damaged = |damage| StateError::Damaged { file: file.to_owned(), damage };
    let text = str::from_utf8(bytes).map_err(|error| damaged(Damage::NotText(error.valid_up_to())))?;
    let body = checked_body(text).map_err(damaged)?;
    let table: toml::Table = body.parse().map_err(|error| damaged(Damage::Form(error)))?;
    match table.get("version").and_then(toml::Value::as_integer) {
        None => return Err(damaged(Damage::NoVersion)),
        Some(version) if version > VERSION => return Err(StateError::Newer { file: file.to_owned(), version }),
        Some(_) => {}
    }
    let Body { pool, configured, running, .. } = toml::from_str(&body).map_err(|error| damaged(Damage::Form(error)))?;
    Ok(Kept { changes: Changes { configured, running }, pool })
}

/// The text behind the line with the checksum. A file without that line was edited by hand and is taken as it is.
fn checked_body(text: &str) -> Result<String, Damage> {
    let start = text.lines().position(|line| line.starts_with("crc32c"));
    let Some(start) = start else { return Ok(text.to_owned()) };
    let mut lines = text.split_inclusive('\n');
    let line = lines.by_ref().nth(start).unwrap_or_default();
    let body: String = lines.collect();
    let given = line.trim_end().strip_prefix("crc32c = \"").and_then(|rest| rest.strip_suffix('"'));
    if given == Some(checksum(&body).as_str()) { Ok(body) } else { Err(Damage::Checksum) }
}

fn checksum(body: &str) -> String {
    format!("{:08x}", crc32c::crc32c(body.as_bytes()))
}

/// A new state file, written and durable, that doesn't have its name yet. Dropped, it is gone.
#[derive(Debug)]
pub struct Prepared {
    file: PathBuf,
    temporary: PathBuf,
    committed: bool,
}

impl Prepared {
    /// Writes `kept` beside `file`. What can be expected to fail (space, permissions) fails here. Blocks.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn write(file: &Path, kept: &Kept) -> Result<Self, WriteError> {
        let Kept { changes: Changes { configured, running }, pool } = kept.clone();
        let at = |source| WriteError { file: file.to_owned(), source };
        let body = toml::to_string(&Body { version: VERSION, pool, configured, running });
        let body = body.map_err(|error| at(io::Error::other(error)))?;
        let text = format!("{HEAD}crc32c = \"{}\"\n{body}", checksum(&body));
        if text.len() as u64 > MAX_BYTES {
            return Err(at(io::ErrorKind::FileTooLarge.into()));
        }
        Self::of_text(file, &text)
    }

    /// The same with any text: for other files that are replaced whole.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn of_text(file: &Path, text: &str) -> Result<Self, WriteError> {
        let at = |source| WriteError { file: file.to_owned(), source };
        let mut temporary = file.as_os_str().to_owned();
        temporary.push(".new");
        let prepared = Self { file: file.to_owned(), temporary: temporary.into(), committed: false };
        prepared.fill(text.as_bytes()).map_err(at)?;
        Ok(prepared)
    }

    fn fill(&self, bytes: &[u8]) -> io::Result<()> {
        match std::fs::remove_file(&self.temporary) {
            // Left by a crash.
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.temporary)?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    /// Gives it its name, durably. Blocks.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn commit(mut self) -> Result<(), WriteError> {
        let at = |source| WriteError { file: self.file.clone(), source };
        std::fs::rename(&self.temporary, &self.file).map_err(at)?;
        self.committed = true;
        let at = |source| WriteError { file: self.file.clone(), source };
        sync_folder(&self.file).map_err(at)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if !self.committed {
            // If it stays, the next change replaces it.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

fn sync_folder(file: &Path) -> io::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}
