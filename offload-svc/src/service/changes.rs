//! The running objects, and how a change to them is made and kept.
//!
//! Owns the order of a change: written down beside the state file, made, given its name. Must not know what a change does.
//! Invariants: one change at a time; one that can't be written down is not made; one that was answered with success outlives
//! kill -9 and power cuts.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::config::merge::Changes;
use crate::config::objects::Objects;
use crate::config::schema::Volume;
use crate::config::state::{Kept, Prepared, WriteError};
use crate::config::values::{BackendSpec, ByteSize};
use crate::config::{Checked, Config};
use crate::pool::VolumeStatus;
use uuid::Uuid;

/// Why a change was not made, or not kept.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// It could not be written down.
    #[error("nothing was changed, since it can't be kept over a restart: {0}")]
    NotMade(#[source] WriteError),
    /// It was made; then the written file did not get its name.
    #[error("the change is in effect, but not kept over a restart: {0}. The next change keeps it too")]
    NotKept(#[source] WriteError),
    /// A bug of ours.
    #[error("writing the state file failed inside; see the log")]
    Bug,
}

/// See the module.
pub(super) struct Ledger {
    configured: Objects,
    file: PathBuf,
    /// The pool that is served, or was last.
    pool: Option<Uuid>,
    running: Mutex<Running>,
    turn: tokio::sync::Mutex<()>,
}

struct Running {
    objects: Objects,
    /// Volumes that are being deleted: no namespace may take one.
    leaving: HashSet<String>,
}

/// The right to make a change: nobody else makes one meanwhile.
pub(super) struct Turn<'a> {
    ledger: &'a Ledger,
    _turn: tokio::sync::MutexGuard<'a, ()>,
}

/// A change that is written down and not made yet.
pub(super) struct Written {
    objects: Objects,
    prepared: Prepared,
}

impl Ledger {
    /// `volumes`: what the pool has.
    pub(super) fn new(checked: &Checked, pool: Option<Uuid>, volumes: &[VolumeStatus]) -> Self {
        let mut objects = Objects::of(&checked.config);
        for volume in &mut objects.volumes {
            let there = volumes.iter().find(|there| there.name == volume.name.as_str());
            let has = there.map_or(volume.size, |there| ByteSize(there.size_bytes));
            // A crash between the pool's growth and the state file's new name.
            if has > volume.size && is_changed(checked, volume) {
                tracing::info!(volume = %volume.name, kept = %volume.size, %has, "the pool has the last change of its size");
                volume.size = has;
            }
        }
        let running = Running { objects, leaving: HashSet::new() };
        Self {
            configured: checked.configured.clone(),
            file: checked.state.file.clone(),
            pool: pool.or(checked.state.kept.pool),
            running: Mutex::new(running),
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// Writes down what was found at the start, if the file says otherwise: changes that the configuration has overruled or
    /// caught up with must not come back, and the pool must be known before it is written to.
    pub(super) async fn settle(&self, checked: &Checked) -> Result<(), ChangeError> {
        let turn = self.turn().await;
        let (kept, found) = (self.kept(&self.objects()), &checked.state.kept);
        if kept == *found {
            return Ok(());
        }
        match turn.change(|_| {}, || Ok(())).await {
            // Nobody has asked for a state file there, and nothing has been changed that it must keep.
            Err(error) if checked.config.service.state.is_none() && kept.changes == found.changes => {
                tracing::warn!(
                    "{error}. Without it, members that are missing altogether are taken for a new pool's: set service.state \
                     to a file that can be written"
                );
                Ok(())
            }
            settled => settled,
        }
    }

    /// The objects as they run.
    pub(super) fn objects(&self) -> Objects {
        self.running().objects.clone()
    }

    /// The namespace that serves a volume.
    pub(super) fn server_of(&self, volume: &str) -> Option<(String, u32)> {
        let running = self.running();
        let mut namespaces = running.objects.namespaces();
        let serves = |backend: &BackendSpec| matches!(backend, BackendSpec::Pool(name) if name == volume);
        let (nqn, namespace) = namespaces.find(|(_, namespace)| serves(&namespace.backend))?;
        Some((nqn.to_string(), namespace.nsid))
    }

    /// `config` with the objects that run.
    pub(super) fn in_effect(&self, config: &Config) -> Config {
        self.running().objects.put_into(config)
    }

    /// The objects as configured.
    pub(super) fn configured(&self) -> &Objects {
        &self.configured
    }

    /// Where the changes are kept.
    pub(super) fn file(&self) -> &std::path::Path {
        &self.file
    }

    /// Waits until nobody else makes a change.
    pub(super) async fn turn(&self) -> Turn<'_> {
        Turn { ledger: self, _turn: self.turn.lock().await }
    }

    /// The volume is deleted; its name may be used again.
    pub(super) fn left(&self, volume: &str) {
        self.running().leaving.remove(volume);
    }

    fn kept(&self, objects: &Objects) -> Kept {
        let (configured, running) = Objects::differences(&self.configured, objects);
        Kept { changes: Changes { configured, running }, pool: self.pool }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        // Nothing panics while it is held.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a volume is as it is because of a change made at run time, and not as configured.
pub(super) fn is_changed(checked: &Checked, volume: &Volume) -> bool {
    let as_it_ran = checked.state.kept.changes.running.volume(&volume.name) == Some(volume);
    as_it_ran && checked.configured.volume(&volume.name) != Some(volume)
}

impl Turn<'_> {
    /// Makes a change: `edit` says what it does to the objects, `make` does it.
    pub(super) async fn change<T, E: From<ChangeError>>(
        &self,
        edit: impl FnOnce(&mut Objects),
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let written = self.write(edit).await?;
        let made = make()?;
        self.keep(written).await?;
        Ok(made)
    }

    /// Writes down what `edit` does to the objects, before it is made: dropped, nothing has changed.
    pub(super) async fn write(&self, edit: impl FnOnce(&mut Objects)) -> Result<Written, ChangeError> {
        let mut objects = self.ledger.objects();
        edit(&mut objects);
        let (kept, file) = (self.ledger.kept(&objects), self.ledger.file.clone());
        let prepared = tokio::task::spawn_blocking(move || Prepared::write(&file, &kept)).await;
        let prepared = prepared.map_err(|_| ChangeError::Bug)?.map_err(ChangeError::NotMade)?;
        Ok(Written { objects, prepared })
    }

    /// It has been made.
    pub(super) async fn keep(&self, written: Written) -> Result<(), ChangeError> {
        let Written { objects, prepared } = written;
        self.ledger.running().objects = objects;
        let committed = tokio::task::spawn_blocking(move || prepared.commit()).await;
        committed.map_err(|_| ChangeError::Bug)?.map_err(ChangeError::NotKept)
    }

    /// Lets no namespace take the volume from now on, until [`Ledger::left`].
    pub(super) fn leave(&self, volume: &str) {
        self.ledger.running().leaving.insert(volume.to_owned());
    }

    /// Whether the volume is being deleted.
    pub(super) fn is_leaving(&self, volume: &str) -> bool {
        self.ledger.running().leaving.contains(volume)
    }
}
