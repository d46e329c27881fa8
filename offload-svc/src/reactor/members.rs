//! The pool's members, opened.
//!
//! Owns their descriptors and names. Must not know what is on them. Invariant: a member that can't be opened keeps its
//! place; the pool decides what its absence means. Members that come later get places behind these.

use std::sync::Arc;

use arc_swap::ArcSwapOption;

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

/// Places there are: all that a number of one byte can name.
const PLACES: usize = 256;

/// All members: those of the configuration in its order, then those that came later. Clones share them.
#[derive(Debug, Clone)]
pub struct Members {
    places: Arc<[ArcSwapOption<Member>]>,
    /// How many the configuration has.
    configured: usize,
}

/// No place is left for one more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("too many devices have been opened and are still in use: restart the service first")]
pub struct NoPlace;

impl Members {
    /// Opens them, each locked against a second user. Blocks.
    pub fn open(specs: &[MemberSpec], missing: Missing) -> Self {
        let open = |spec: &MemberSpec| Some(Arc::new(Member { name: spec.to_string(), file: open_one(spec, missing) }));
        let places = specs.iter().map(open).chain(std::iter::repeat(None)).take(PLACES);
        Self { places: places.map(ArcSwapOption::from).collect(), configured: specs.len() }
    }

    /// The members of the configuration that have not been closed since.
    pub fn iter(&self) -> impl Iterator<Item = Arc<Member>> {
        self.places[..self.configured].iter().filter_map(|place| place.load_full())
    }

    /// How many the configuration has.
    pub fn count(&self) -> usize {
        self.configured
    }

    /// The open file of a member.
    pub fn file(&self, index: usize) -> Option<Arc<DiskFile>> {
        self.places.get(index)?.load().as_ref()?.file.as_ref().ok().cloned()
    }

    /// A member at its place.
    pub fn at(&self, index: usize) -> Option<Arc<Member>> {
        self.places.get(index)?.load_full()
    }

    /// The place and the file of one that is open under this name.
    pub fn find(&self, name: &str) -> Option<(u8, Arc<DiskFile>)> {
        (0u8..=u8::MAX).find_map(|index| {
            let member = self.at(index.into())?;
            (member.name == name).then(|| member.file.as_ref().ok().map(|file| (index, Arc::clone(file))))?
        })
    }

    /// Opens one more and gives it a place. Blocks. One caller at a time.
    pub fn add(&self, spec: &MemberSpec, missing: Missing) -> Result<Result<(u8, Arc<DiskFile>), FileError>, NoPlace> {
        let free = |index: &u8| self.places.get(usize::from(*index)).is_some_and(|place| place.load().is_none());
        let first = u8::try_from(self.configured).map_err(|_| NoPlace)?;
        let index = (first..=u8::MAX).find(free).ok_or(NoPlace)?;
        Ok(open_one(spec, missing).map(|file| {
            let member = Member { name: spec.to_string(), file: Ok(Arc::clone(&file)) };
            self.places[usize::from(index)].store(Some(Arc::new(member)));
            (index, file)
        }))
    }

    /// Opens a place of the configuration again that could not be opened. Blocks.
    pub fn reopen(&self, index: usize, spec: &MemberSpec, missing: Missing) {
        if let Some(place) = self.places.get(index)
            && place.load().as_ref().is_some_and(|member| member.file.is_err())
        {
            place.store(Some(Arc::new(Member { name: spec.to_string(), file: open_one(spec, missing) })));
        }
    }

    /// What could not be opened under this name is there now, at another place.
    pub fn forget_unopened(&self, name: &str) {
        for place in &self.places[..self.configured] {
            if place.load().as_ref().is_some_and(|member| member.file.is_err() && member.name == name) {
                place.store(None);
            }
        }
    }

    /// Closes one, as soon as nothing of it is under way.
    pub fn close(&self, index: u8) {
        if let Some(place) = self.places.get(usize::from(index)) {
            place.store(None);
        }
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
        let error = left.at(0).unwrap().file.as_ref().unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()) && error.contains("No such file"), "{error}");

        let made = Members::open(&specs, Missing::Create { bytes: 64 << 20 });
        let sizes: Vec<_> = (0..2).map(|i| made.file(i).unwrap().size_bytes()).collect();
        assert_eq!(sizes, [64 << 20, 1 << 20]);
        let metadata = path.metadata().unwrap();
        assert!(metadata.blocks() * 512 < 1 << 20, "sparse");
        assert_eq!(metadata.mode() & 0o777, 0o600);

        let again = Members::open(&specs, Missing::Create { bytes: 1 << 30 });
        assert!(matches!(again.at(0).unwrap().file, Err(FileError::InUse { .. })));
        drop(made);
        let reopened = Members::open(&specs, Missing::Create { bytes: 1 << 30 });
        assert_eq!(reopened.file(0).unwrap().size_bytes(), 64 << 20, "what is there stays as it is");
    }

    #[test]
    fn only_what_an_opening_has_made_can_be_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let names = ["there", "interrupted", "made", "replaced"];
        std::fs::write(path("there"), [7; 8192]).unwrap();
        std::fs::write(path("interrupted"), "").unwrap();
        let specs = names.map(|name| MemberSpec::File(path(name)));
        let members = Members::open(&specs, Missing::Create { bytes: 1 << 20 });
        std::fs::rename(path("replaced"), path("aside")).unwrap();
        std::fs::write(path("replaced"), "somebody else's").unwrap();
        let removed = |index: usize| members.file(index).unwrap().remove_if_made(&path(names[index])).unwrap();
        assert_eq!([0, 1, 2, 3].map(removed), [false, false, true, false]);
        assert!(!path("made").exists());
        assert_eq!(std::fs::read(path("replaced")).unwrap(), b"somebody else's");
        assert_eq!(path("interrupted").metadata().unwrap().len(), 1 << 20, "completed");
    }

    /// A link to a disk that isn't mounted leads nowhere: nothing is made behind it.
    #[test]
    fn nothing_is_made_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (link, target) = (dir.path().join("m0"), dir.path().join("elsewhere"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let members = Members::open(&[MemberSpec::File(link)], Missing::Create { bytes: 1 << 20 });
        assert!(members.at(0).unwrap().file.is_err() && !target.exists());
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
