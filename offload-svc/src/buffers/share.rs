//! How many buffers of each size a host holds, so that one that does nothing with them can't keep the others waiting.
//!
//! Owns the accounts. Must not know what buffers are for. Invariant: a host takes one more buffer of a size only while it
//! holds fewer of it than are free (the dynamic threshold of shared-memory switches: Choudhury and Hahne, IEEE/ACM
//! Transactions on Networking 6(2), 1998, with alpha = 1): n hosts that hold all they can leave 1/(n+1) of them free. One that
//! was cut since others waited for what it did nothing with takes none of the last half for a minute.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvmf_target::buffer::{BufferPool, IoBuf};
use nvmf_target::proto::io_queue::Wanted;

use super::Buffers;
use super::wait::{Need, WaitAll};

/// Accounts of one pool; with more hosts than that, some share one.
pub(super) const ACCOUNTS: usize = 4097;

/// How long a host that did nothing with its buffers while others waited may use only what is left over.
const DISTRUST: Duration = Duration::from_secs(60);

/// Which accounts may use only what is left over, and until when.
#[derive(Debug, Clone)]
pub(super) struct Distrusted {
    began: Instant,
    /// Milliseconds since it began; 0: not at all.
    until: Arc<[AtomicU64]>,
}

impl Default for Distrusted {
    fn default() -> Self {
        Self { began: Instant::now(), until: (0..ACCOUNTS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Distrusted {
    pub(super) fn has(&self, account: AccountId) -> bool {
        let until = self.until[account.index()].load(Ordering::Relaxed);
        // The clock is only asked for the few that are.
        until > 0 && (self.began.elapsed().as_millis() as u64) < until
    }

    fn set(&self, account: AccountId, until: Option<Instant>) {
        let until = until.map_or(0, |until| until.saturating_duration_since(self.began).as_millis() as u64);
        self.until[account.index()].store(until, Ordering::Relaxed);
    }
}

/// Names an account. That of the service itself has no bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AccountId(u16);

impl AccountId {
    /// Whoever takes buffers without being a host.
    pub(super) const SERVICE: Self = Self(0);

    pub(super) fn index(self) -> usize {
        self.0.into()
    }

    pub(super) fn of_index(index: usize) -> Self {
        Self(index as u16)
    }
}

/// Which host has which account.
#[derive(Default)]
pub(super) struct Ledger {
    accounts: Mutex<Accounts>,
    distrusted: Distrusted,
}

#[derive(Default)]
struct Accounts {
    /// By the host's name: its account and the number of its handles.
    open: HashMap<Arc<str>, (AccountId, usize)>,
    /// Accounts that were closed, to be used again.
    closed: Vec<AccountId>,
    /// Accounts that have been used.
    used: usize,
    /// Hosts that are distrusted, and until when.
    distrust: HashMap<Arc<str>, Instant>,
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, Accounts> {
        // Nothing panics while it is held.
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn distrusted(&self) -> &Distrusted {
        &self.distrusted
    }

    fn distrust(&self, host: &Arc<str>, account: AccountId, now: Instant) {
        let mut accounts = self.lock();
        accounts.distrust.retain(|_, until| *until > now);
        if accounts.distrust.len() < ACCOUNTS {
            accounts.distrust.insert(Arc::clone(host), now + DISTRUST);
        }
        self.distrusted.set(account, Some(now + DISTRUST));
    }

    fn open(&self, host: &str) -> (Arc<str>, AccountId) {
        let mut accounts = self.lock();
        if let Some((name, _)) = accounts.open.get_key_value(host) {
            let name = Arc::clone(name);
            let (id, handles) = accounts.open.get_mut(&name).expect("found just now");
            *handles += 1;
            return (name, *id);
        }
        let id = accounts.closed.pop().unwrap_or_else(|| {
            accounts.used += 1;
            AccountId::of_index(1 + (accounts.used - 1) % (ACCOUNTS - 1))
        });
        let until = accounts.distrust.get(host).copied();
        self.distrusted.set(id, until);
        let name: Arc<str> = host.into();
        accounts.open.insert(Arc::clone(&name), (id, 1));
        (name, id)
    }

    fn close(&self, name: &Arc<str>) {
        let mut accounts = self.lock();
        let Some((id, handles)) = accounts.open.get_mut(name) else { return };
        *handles -= 1;
        if *handles == 0 {
            let id = *id;
            accounts.open.remove(name);
            // What is still out under it comes back under it, whoever has it then.
            accounts.closed.push(id);
        }
    }
}

/// The pool as one host's queue uses it.
pub struct HostBuffers {
    buffers: Buffers,
    name: Arc<str>,
    account: AccountId,
}

impl HostBuffers {
    pub(super) fn new(buffers: Buffers, host: &str) -> Self {
        let (name, account) = buffers.ledger.open(host);
        Self { buffers, name, account }
    }

    /// All that `wanted` says as soon as this host may have it, in the order of asking; `None` if there are not so many
    /// buffers of that size: they would never come.
    pub fn wait(&self, wanted: Wanted) -> Option<WaitAll> {
        let need = Need { len_bytes: wanted.len_bytes, count: wanted.count };
        self.buffers.class_for(need)?;
        Some(WaitAll::new(self.buffers.clone(), self.account, need))
    }
}

impl HostBuffers {
    /// The host's name.
    pub fn host(&self) -> &str {
        &self.name
    }

    /// The same, shared.
    pub fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// Whether the host has nothing of the size that it wants, through no fault of its own.
    pub fn is_starved(&self, wanted: Wanted) -> bool {
        let need = Need { len_bytes: wanted.len_bytes, count: wanted.count };
        let holds_none = self.buffers.class_for(need).is_some_and(|class| class.held_by(self.account) == 0);
        holds_none && !self.buffers.ledger.distrusted().has(self.account)
    }

    /// The host did nothing with its buffers while others waited: for a while it gets what is left over.
    pub fn distrust(&self, now: Instant) {
        self.buffers.ledger.distrust(&self.name, self.account, now);
    }
}

impl Drop for HostBuffers {
    fn drop(&mut self) {
        self.buffers.ledger.close(&self.name);
    }
}

impl BufferPool for HostBuffers {
    fn take(&self, len_bytes: usize) -> Option<IoBuf> {
        self.buffers.take_for(self.account, len_bytes)
    }

    fn largest_bytes(&self) -> usize {
        self.buffers.largest_bytes()
    }
}
