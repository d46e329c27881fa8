//! Members that come and go while the service runs: replaced, attached, taken from the spares, closed.
//!
//! Owns which device is opened when. Must not know how the pool fills a member. Invariant: a device that the pool refuses,
//! or has no use for any more, is closed again.

use std::collections::{HashMap, HashSet};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Mutex as AsyncMutex;

use crate::config::schema;
use crate::config::values::MemberSpec;
use crate::pool::{Coming, MemberError, MemberIndex, MemberState, NewMember, Pool};
use crate::reactor::disk::{DiskFile, FileError};
use crate::reactor::members::{Members, Missing, NoPlace};

/// How often the keeper looks round.
const ROUND: Duration = Duration::from_secs(2);

/// Why a device does not become a member.
#[derive(Debug, thiserror::Error)]
pub enum ComeError {
    /// It can't be opened.
    #[error(transparent)]
    File(#[from] FileError),
    /// The pool refuses it.
    #[error(transparent)]
    Member(#[from] MemberError),
    /// Too many are open.
    #[error(transparent)]
    NoPlace(#[from] NoPlace),
    /// A bug of ours.
    #[error("opening failed inside; see the log")]
    Bug,
}

/// The devices behind a pool.
pub(super) struct Devices {
    pool: Pool,
    members: Members,
    config: schema::Pool,
    /// One change at a time.
    changing: AsyncMutex<()>,
    /// Spares that the pool has refused.
    refused: Mutex<HashSet<u8>>,
}

impl Devices {
    pub(super) fn new(pool: Pool, members: Members, config: schema::Pool) -> Self {
        Self { pool, members, config, changing: AsyncMutex::default(), refused: Mutex::default() }
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn members(&self) -> &Members {
        &self.members
    }

    /// Lets `new` take the place of the member `old`. A file that is not there is made.
    pub(super) async fn replace(&self, old: &str, new: &MemberSpec) -> Result<Coming, ComeError> {
        let _changing = self.changing.lock().await;
        let missing = Missing::Create { bytes: self.config.member_size.bytes() };
        let (slot, file, fresh) = self.open(new, missing).await?;
        let member = NewMember { slot: MemberIndex(slot), name: new.to_string(), size_bytes: file.size_bytes() };
        let coming = self.pool.replace_member(old, member).await;
        if coming.is_err() && fresh {
            self.members.close(slot);
        }
        Ok(coming?)
    }

    /// Brings back the member on `spec`.
    pub(super) async fn attach(&self, spec: &MemberSpec) -> Result<Coming, ComeError> {
        let _changing = self.changing.lock().await;
        let (slot, file, fresh) = self.open(spec, Missing::Leave).await?;
        let member = NewMember { slot: MemberIndex(slot), name: spec.to_string(), size_bytes: file.size_bytes() };
        let coming = self.pool.attach_member(member).await;
        match &coming {
            Ok(_) => self.members.forget_unopened(&spec.to_string()),
            Err(_) if fresh => self.members.close(slot),
            Err(_) => {}
        }
        Ok(coming?)
    }

    /// Opens a device, or finds it open; says whether it was opened now.
    async fn open(&self, spec: &MemberSpec, missing: Missing) -> Result<(u8, Arc<DiskFile>, bool), ComeError> {
        let (members, wanted) = (self.members.clone(), spec.clone());
        let opened = tokio::task::spawn_blocking(move || members.add(&wanted, missing)).await;
        match opened.map_err(|_| ComeError::Bug)?? {
            Ok((slot, file)) => Ok((slot, file, true)),
            // Perhaps by ourselves.
            Err(error @ FileError::InUse { .. }) => {
                self.members.find(&spec.to_string()).map(|(slot, file)| (slot, file, false)).ok_or(error.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Looks after the devices for as long as the service runs.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut away = HashMap::new();
        loop {
            tokio::time::sleep(ROUND).await;
            self.note_away(&mut away);
            self.look_for_missing(&away).await;
            self.use_spares(&away).await;
            self.close_unused().await;
        }
    }

    /// Since when each place is without its member.
    fn note_away(&self, away: &mut HashMap<u8, Instant>) {
        let now = Instant::now();
        for member in self.pool.status().members {
            if matches!(member.state, MemberState::Active | MemberState::Rebuilding) {
                away.remove(&member.index);
            } else {
                away.entry(member.index).or_insert(now);
            }
        }
    }

    /// Members that could not be opened, or whose device is another one now, may be there again.
    async fn look_for_missing(&self, away: &HashMap<u8, Instant>) {
        let names: HashSet<String> = if away.is_empty() {
            return;
        } else {
            let status = self.pool.status();
            let known = status.members.iter().filter(|member| away.contains_key(&member.index));
            let known = known.filter_map(|member| member.name.clone());
            let unopened = self.members.iter().filter(|member| member.file.is_err()).map(|member| member.name.clone());
            known.chain(unopened).collect()
        };
        for spec in names.iter().filter_map(|name| MemberSpec::from_str(name).ok()) {
            if matches!(spec, MemberSpec::Mem(_)) {
                continue;
            }
            let _changing = self.changing.lock().await;
            // One that is open stays open: the pool itself asks it now and then.
            let Ok((slot, file, true)) = self.open(&spec, Missing::Leave).await else { continue };
            let member = NewMember { slot: MemberIndex(slot), name: spec.to_string(), size_bytes: file.size_bytes() };
            match self.pool.attach_member(member).await {
                Ok(coming) => {
                    self.members.forget_unopened(&spec.to_string());
                    tracing::info!(member = %spec, index = coming.index, "a member is there again");
                }
                Err(error) => {
                    tracing::debug!(member = %spec, %error, "still not there");
                    self.members.close(slot);
                }
            }
        }
    }

    /// Lets spares take the places of members that have been away for the configured time.
    async fn use_spares(&self, away: &HashMap<u8, Instant>) {
        let after = Duration::from_millis(self.config.spare_after_ms);
        for (place, since) in away {
            if since.elapsed() < after || self.pool.is_being_replaced(*place) {
                continue;
            }
            let _changing = self.changing.lock().await;
            let Some((slot, name, size_bytes)) = self.spare() else { return };
            let member = NewMember { slot: MemberIndex(slot), name: name.clone(), size_bytes };
            match self.pool.replace_member(&place.to_string(), member).await {
                Ok(_) => tracing::warn!(member = place, spare = name, "a spare takes over"),
                Err(error) => {
                    tracing::error!(spare = name, %error, "a spare can't be used");
                    self.refused.lock().unwrap_or_else(PoisonError::into_inner).insert(slot);
                }
            }
        }
    }

    /// A spare that is there and not in use.
    fn spare(&self) -> Option<(u8, String, u64)> {
        let in_use = self.pool.slots_in_use();
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        self.spare_slots().find_map(|slot| {
            let free = !in_use.contains(&MemberIndex(slot)) && !refused.contains(&slot);
            let member = self.members.at(slot.into()).filter(|_| free)?;
            let size = member.file.as_ref().ok()?.size_bytes();
            Some((slot, member.name.clone(), size))
        })
    }

    fn spare_slots(&self) -> impl Iterator<Item = u8> + use<> {
        let first = self.config.members.len();
        (first..first + self.config.spares.len()).filter_map(|slot| u8::try_from(slot).ok())
    }

    /// Closes what nobody uses: members that have been replaced, and those of another slot since.
    async fn close_unused(&self) {
        let _changing = self.changing.lock().await;
        let in_use = self.pool.slots_in_use();
        let spares: HashSet<u8> = self.spare_slots().collect();
        for slot in 0..=u8::MAX {
            let Some(member) = self.members.at(slot.into()) else { continue };
            if member.file.is_ok() && !in_use.contains(&MemberIndex(slot)) && !spares.contains(&slot) {
                tracing::info!(member = member.name, "closed: the pool does not use it any more");
                self.members.close(slot);
            }
        }
    }
}
