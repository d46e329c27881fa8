//! The key-encryption key: 32 bytes from a file or a systemd credential.
//!
//! Owns loading, creating and naming it. Must not know what it wraps. Invariant: a key file that others can read is
//! refused, and an existing one is never overwritten.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hkdf::Hkdf;
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use zeroize::{Zeroize, Zeroizing};

use super::{NoRandomness, random_bytes};

/// Bytes of the key. In a file it stands as twice as many hexadecimal digits and a newline.
pub const KEK_BYTES: usize = 32;
/// More than any well-formed key file has, so that a wrong path doesn't read a disk.
const MAX_FILE_BYTES: u64 = 4096;

/// Where the key comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KekSource {
    /// A file of 64 hexadecimal digits; made with mode 0600 when missing and `create` is set.
    File { path: PathBuf, create: bool },
    /// A systemd credential of that name, in `$CREDENTIALS_DIRECTORY` (systemd.exec(5), `LoadCredentialEncrypted=`).
    Credential { name: String },
}

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KekError {
    #[error("key file {path}: cannot be read", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "key file {path}: does not exist; restore it from your backup, or let the service make one if the pool is new",
        path = path.display()
    )]
    Missing { path: PathBuf },
    #[error("key file {path}: cannot be created", path = path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error(
        "key file {path}: mode {mode:04o} lets others read it; run: chmod 600 {path}, and consider the key as known",
        path = path.display()
    )]
    ReadableByOthers { path: PathBuf, mode: u32 },
    #[error("key file {path}: is not a regular file", path = path.display())]
    NotAFile { path: PathBuf },
    #[error(
        "key file {path}: belongs to user id {owner}; it must be the service's own ({service}) or root's",
        path = path.display()
    )]
    ForeignOwner { path: PathBuf, owner: u32, service: u32 },
    #[error("key file {path}: must hold 64 hexadecimal digits", path = path.display())]
    Malformed { path: PathBuf },
    #[error("credential {name:?}: CREDENTIALS_DIRECTORY is not set; start the service from its systemd unit")]
    NoCredentials { name: String },
    #[error("credential {name:?}: a credential's name has no '/' and is not empty")]
    CredentialName { name: String },
    #[error(transparent)]
    NoRandomness(#[from] NoRandomness),
}

/// A name for a key that says nothing about it: tells "another key" from "damaged".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KekId(pub [u8; 8]);

impl std::fmt::Display for KekId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for KekId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KekId({self})")
    }
}

/// The key-encryption key.
pub struct KeyEncryptionKey {
    secret: Zeroizing<[u8; KEK_BYTES]>,
    id: KekId,
}

impl std::fmt::Debug for KeyEncryptionKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KeyEncryptionKey({})", self.id)
    }
}

impl KeyEncryptionKey {
    /// The key with these bytes.
    pub fn from_secret(secret: Zeroizing<[u8; KEK_BYTES]>) -> Self {
        let mut id = [0u8; 8];
        let derived = Hkdf::<Sha256>::new(None, secret.as_slice()).expand(b"sluice kek id 1", &mut id);
        derived.expect("8 bytes are within what HKDF-SHA256 gives");
        Self { secret, id: KekId(id) }
    }

    /// Its name.
    pub fn id(&self) -> KekId {
        self.id
    }

    pub(super) fn secret(&self) -> &[u8; KEK_BYTES] {
        &self.secret
    }

    /// Reads the key, or makes it where the source says so and nothing is there.
    pub fn load(source: &KekSource) -> Result<Self, KekError> {
        match source {
            KekSource::File { path, create } => match read_key(path, true) {
                Err(KekError::Missing { .. }) if *create => create_key(path),
                other => other,
            },
            KekSource::Credential { name } => {
                if name.is_empty() || name.contains('/') || name == "." || name == ".." {
                    return Err(KekError::CredentialName { name: name.clone() });
                }
                let directory = std::env::var_os("CREDENTIALS_DIRECTORY");
                let directory = directory.ok_or_else(|| KekError::NoCredentials { name: name.clone() })?;
                // systemd itself keeps credentials from other users, by ACLs that the mode bits don't show.
                read_key(&Path::new(&directory).join(name), false)
            }
        }
    }
}

fn read_key(path: &Path, check_mode: bool) -> Result<KeyEncryptionKey, KekError> {
    let unreadable = |source| KekError::Read { path: path.to_owned(), source };
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(KekError::Missing { path: path.to_owned() });
        }
        other => other.map_err(unreadable)?,
    };
    // The open file is judged, not the path: nobody can swap it in between.
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(KekError::NotAFile { path: path.to_owned() });
    }
    if check_mode {
        check_access(path, &metadata)?;
    }
    let mut text = Zeroizing::new(Vec::with_capacity(MAX_FILE_BYTES as usize));
    file.take(MAX_FILE_BYTES).read_to_end(&mut text).map_err(unreadable)?;
    let secret = parse_hex(text.trim_ascii()).ok_or_else(|| KekError::Malformed { path: path.to_owned() })?;
    Ok(KeyEncryptionKey::from_secret(secret))
}

fn check_access(path: &Path, metadata: &std::fs::Metadata) -> Result<(), KekError> {
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KekError::ReadableByOthers { path: path.to_owned(), mode });
    }
    let (owner, service) = (metadata.uid(), nix::unistd::geteuid().as_raw());
    if owner != service && owner != 0 {
        return Err(KekError::ForeignOwner { path: path.to_owned(), owner, service });
    }
    Ok(())
}

/// Made whole under another name, made durable, then linked into place: neither a crash nor a second service leaves half a
/// key or two, and data is never encrypted under a key that a power cut takes away.
pub(super) fn create_key(path: &Path) -> Result<KeyEncryptionKey, KekError> {
    let failed = |source| KekError::Create { path: path.to_owned(), source };
    let secret = Zeroizing::new(random_bytes::<KEK_BYTES>()?);
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let file_name = path.file_name().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
    let mut draft_name = file_name.to_owned();
    draft_name.push(format!(".{}.new", std::process::id()));
    let draft = directory.join(draft_name);
    let placed = write_draft(&draft, secret.as_slice()).and_then(|()| std::fs::hard_link(&draft, path));
    let removed = std::fs::remove_file(&draft);
    match placed {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return read_key(path, true),
        other => other.and(removed).map_err(failed)?,
    }
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)?;
    Ok(KeyEncryptionKey::from_secret(secret))
}

fn write_draft(draft: &Path, secret: &[u8]) -> io::Result<()> {
    // A draft of this name is a leftover of a crashed process with our id: nothing refers to it.
    match std::fs::remove_file(draft) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(draft)?;
    let mut text = Zeroizing::new(Vec::with_capacity(2 * secret.len() + 1));
    for byte in secret {
        text.extend([byte >> 4, byte & 15].map(|digit| b"0123456789abcdef"[usize::from(digit)]));
    }
    text.push(b'\n');
    file.write_all(&text)?;
    file.sync_all()
}

fn parse_hex(text: &[u8]) -> Option<Zeroizing<[u8; KEK_BYTES]>> {
    if text.len() != 2 * KEK_BYTES {
        return None;
    }
    let mut secret = Zeroizing::new([0u8; KEK_BYTES]);
    for (byte, pair) in secret.iter_mut().zip(text.chunks_exact(2)) {
        let mut digits = [char::from(pair[0]).to_digit(16)?, char::from(pair[1]).to_digit(16)?];
        *byte = (digits[0] << 4 | digits[1]) as u8;
        digits.zeroize();
    }
    Some(secret)
}
