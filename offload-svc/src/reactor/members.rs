//! The pool's members, opened.
//!
//! Owns their descriptors and names. Must not know what is on them. Invariant: a member that can't be opened keeps its
//! place; the pool decides what its absence means.

use std::sync::Arc;

use super::disk::{DiskFile, FileError, Opening};
use crate::config::values::MemberSpec;

/// The smallest piece that members are read and written in.
pub const MEMBER_UNIT_BYTES: usize = 4096;

/// What to do about a `file:` member that isn't there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Make it, sparse, with this size: when a pool is made.
    Create {
        /// Its size.
        bytes: u64,
    },
    /// Go on without it: when a pool exists, a new file in place of a lost one would only hide the loss.
    Leave,
}

/// One member.
#[derive(Debug)]
pub struct Member {
    /// As the configuration has it: `file:var/m0`.
    pub name: String,
    /// What it opened as.
    pub file: Result<Arc<DiskFile>, FileError>,
}

/// All members, in the configuration's order. Clones share them.
#[derive(Debug, Clone)]
pub struct Members {
    members: Arc<[Member]>,
}

impl Members {
    /// Opens them, each locked against a second user. Blocks.
    pub fn open(specs: &[MemberSpec], missing: Missing) -> Self {
        let open = |spec: &MemberSpec| Member { name: spec.to_string(), file: open_one(spec, missing) };
        Self { members: specs.iter().map(open).collect() }
    }

    /// The members.
    pub fn iter(&self) -> impl Iterator<Item = &Member> {
        self.members.iter()
    }

    /// How many the configuration has.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// The open file of a member.
    pub fn file(&self, index: usize) -> Option<&Arc<DiskFile>> {
        self.members.get(index)?.file.as_ref().ok()
    }
}

fn open_one(spec: &MemberSpec, missing: Missing) -> Result<Arc<DiskFile>, FileError> {
    let create_bytes = match missing {
        Missing::Create { bytes } => Some(bytes),
        Missing::Leave => None,
    };
    let opening = Opening { unit_bytes: MEMBER_UNIT_BYTES, direct: true, create_bytes };
    match spec {
        MemberSpec::File(path) => DiskFile::regular(path, &opening),
        MemberSpec::Block(path) => DiskFile::block_device(path, &opening),
        MemberSpec::Mem(size) => DiskFile::memory(size.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::values::ByteSize;

    #[test]
    fn members_are_made_sparse_locked_and_missed_by_name() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m0");
        let specs = [MemberSpec::File(path.clone()), MemberSpec::Mem(ByteSize(1 << 20))];
        let left = Members::open(&specs, Missing::Leave);
        assert!(left.file(0).is_none() && !path.exists());
        let error = left.iter().next().unwrap().file.as_ref().unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()) && error.contains("No such file"), "{error}");

        let made = Members::open(&specs, Missing::Create { bytes: 64 << 20 });
        let sizes: Vec<_> = (0..2).map(|i| made.file(i).unwrap().size_bytes()).collect();
        assert_eq!(sizes, [64 << 20, 1 << 20]);
        let metadata = path.metadata().unwrap();
        assert!(metadata.blocks() * 512 < 1 << 20, "sparse");
        assert_eq!(metadata.mode() & 0o777, 0o600);

        let again = Members::open(&specs, Missing::Create { bytes: 1 << 30 });
        assert!(matches!(again.iter().next().unwrap().file, Err(FileError::InUse { .. })));
        drop(made);
        let reopened = Members::open(&specs, Missing::Create { bytes: 1 << 30 });
        assert_eq!(reopened.file(0).unwrap().size_bytes(), 64 << 20, "what is there stays as it is");
    }

    #[test]
    fn h59_the_wrong_kind_of_thing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let specs = [MemberSpec::Block(path.clone()), MemberSpec::File("/dev/null".into())];
        let members = Members::open(&specs, Missing::Leave);
        let errors: Vec<_> = members.iter().map(|member| member.file.as_ref().unwrap_err().to_string()).collect();
        assert_eq!(errors, [format!("{}: not a block device", path.display()), "/dev/null: not a regular file".into()]);
    }
}
