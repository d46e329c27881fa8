//! Receipts of deletions: what became of a volume's key, and where it may still be.
//!
//! Owns the records that checkpoints keep of deletions and the verdict on each. Must not know how anything is overwritten.
//! Invariant: a receipt says `destroyed` only while no device that is known of can hold a shield under which the key was
//! at rest, unless somebody has stated that the device is destroyed, and then it says that.
//!
//! The verdict is not kept but found anew each time, from which shields each device may hold ([`super::shields`]): so an older
//! copy of a member that turns up takes it back. A key is at rest only covered, under the shields of the checkpoints that
//! held it: from the epoch in which its lineage began, up to the shield that was in use when it was deleted.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use uuid::Uuid;

use super::codec::{CutShort, Reader, Writer};
use super::shields::{Departed, Holder, Standing};
use crate::stages::cipher::Cipher;
use crate::stages::keys::{CHECK_VALUE_BYTES, KeyEpoch, LineageId};

/// Receipts that a pool keeps; of more, first the oldest go whose keys are destroyed.
const RECEIPTS_MAX: usize = 128;
/// Members that left for good and may hold shields that matter.
pub const DEPARTED_KEPT_MAX: usize = 128;

const KIND_RECEIPT: u8 = 1;
const KIND_BIRTH: u8 = 2;
const KIND_DEPARTED: u8 = 3;
const KIND_STATEMENT: u8 = 4;

/// How one key of a lineage can be recognised.
pub type CheckValue = (KeyEpoch, [u8; CHECK_VALUE_BYTES]);

/// One deletion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    pub volume: String,
    pub uuid: Uuid,
    pub lineage: LineageId,
    pub cipher: Cipher,
    /// The newest key epoch; there were keys of all from 0 on.
    pub newest: KeyEpoch,
    /// Of the keys that there were when it was deleted.
    pub check_values: Vec<CheckValue>,
    /// Unix seconds.
    pub deleted_s: u64,
    /// When its key was found to be destroyed, as far as it is.
    pub destroyed_s: Option<u64>,
    /// The set's epoch when its lineage began; `None`: it began under format 2 or 1, in which keys were not covered.
    pub born: Option<u64>,
    /// The last shield under which its keys were at rest; `None` while others of its lineage need them.
    pub last_shield: Option<u64>,
}

/// What a checkpoint keeps, one by one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    Receipt(Receipt),
    /// The set's epoch when a lineage began that still is.
    Birth(LineageId, u64),
    Departed(Departed),
    /// Somebody has said that a device is destroyed; Unix seconds.
    Statement(Uuid, u64),
}

/// Bytes that are none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error("receipt: {0}")]
    Short(#[from] CutShort),
    #[error("receipt: field {0} is out of range")]
    Field(&'static str),
}

impl Entry {
    pub fn write(&self, out: &mut Writer) {
        match self {
            Self::Receipt(receipt) => receipt.write(out.u8(KIND_RECEIPT)),
            Self::Birth(lineage, epoch) => drop(out.u8(KIND_BIRTH).u128(lineage.0).u64(*epoch)),
            Self::Departed(departed) => departed.write(out.u8(KIND_DEPARTED)),
            Self::Statement(uuid, at_s) => drop(out.u8(KIND_STATEMENT).bytes(uuid.as_bytes()).u64(*at_s)),
        }
    }

    pub fn read(input: &mut Reader<'_>) -> Result<Self, EntryError> {
        Ok(match input.u8()? {
            KIND_RECEIPT => Self::Receipt(Receipt::read(input)?),
            KIND_BIRTH => Self::Birth(LineageId(input.u128()?), input.u64()?),
            KIND_DEPARTED => Self::Departed(Departed::read(input)?),
            KIND_STATEMENT => Self::Statement(Uuid::from_bytes(input.array()?), input.u64()?),
            _ => return Err(EntryError::Field("kind")),
        })
    }
}

impl Receipt {
    fn write(&self, out: &mut Writer) {
        // 0 stands for none: no time, epoch or shield of a receipt is 0, but a shield, which is counted from 1 here.
        let last = self.last_shield.map_or(0, |number| number + 1);
        out.bytes(self.uuid.as_bytes()).u128(self.lineage.0).u8(self.cipher.id()).u32(self.newest.0);
        out.u64(self.deleted_s).u64(self.destroyed_s.unwrap_or(0)).u64(self.born.unwrap_or(0)).u64(last);
        out.u8(self.check_values.len() as u8);
        for (epoch, value) in &self.check_values {
            out.u32(epoch.0).bytes(value);
        }
        out.u8(self.volume.len() as u8).bytes(self.volume.as_bytes());
    }

    fn read(input: &mut Reader<'_>) -> Result<Self, EntryError> {
        let some = |value: u64| (value != 0).then_some(value);
        let (uuid, lineage) = (Uuid::from_bytes(input.array()?), LineageId(input.u128()?));
        let (cipher, newest) = (input.u8()?, KeyEpoch(input.u32()?));
        let (deleted_s, destroyed_s) = (input.u64()?, some(input.u64()?));
        let (born, last_shield) = (some(input.u64()?), some(input.u64()?).map(|number| number - 1));
        let mut check_values = Vec::new();
        for _ in 0..input.u8()? {
            check_values.push((KeyEpoch(input.u32()?), input.array()?));
        }
        let len = input.u8()?.into();
        let volume = String::from_utf8(input.bytes(len)?.to_vec()).map_err(|_| EntryError::Field("volume"))?;
        let cipher = Cipher::from_id(cipher).ok_or(EntryError::Field("cipher"))?;
        Ok(Self { volume, uuid, lineage, cipher, newest, check_values, deleted_s, destroyed_s, born, last_shield })
    }

    /// Whether a device may hold what leads to its key.
    fn may_be_on(&self, holder: &Holder) -> bool {
        let last = self.last_shield.is_some_and(|last| holder.floor <= last);
        last && self.born.is_none_or(|born| holder.epoch >= born)
    }
}

/// What became of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeyFate {
    /// No copy is left that could be opened.
    Destroyed,
    /// Copies may be left: see [`ReceiptStatus::copies`].
    Pending,
    /// Others of its lineage need it: see [`ReceiptStatus::readers`].
    Kept,
}

/// Why a copy may be left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyReason {
    /// A member of the set whose second superblock has not been overwritten yet: it is, with the next one.
    Active,
    /// The member is not in the set; it was until this epoch.
    Absent {
        /// The epoch.
        epoch: u64,
    },
    /// It is being filled to take a place, and is overwritten when it does.
    Filling,
    /// It was a member until it was replaced, or given up while it was filled, at this time (Unix seconds).
    Replaced {
        /// The time.
        at_s: u64,
    },
    /// The volume comes from a pool of an older format, whose free space may hold copies that are written over some time.
    OlderFormat,
}

/// Where a copy may be left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeyCopy {
    /// The member; none for all of them.
    pub member: Option<Uuid>,
    /// Its place.
    pub index: Option<u8>,
    /// How the configuration names what stands at the place, where that is this member.
    pub name: Option<String>,
    /// Why.
    pub reason: CopyReason,
}

/// A member that somebody has stated to be destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Stated {
    /// The member.
    pub member: Uuid,
    /// Unix time of the statement.
    pub at_s: u64,
}

/// A receipt as it stands now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReceiptStatus {
    /// The pool.
    pub pool: Uuid,
    /// The volume's name.
    pub volume: String,
    /// Its identity.
    pub uuid: Uuid,
    /// Whose key it was, in hexadecimal.
    pub lineage: String,
    /// What the key was for.
    pub cipher: String,
    /// How many keys there were, of epochs from 0 on.
    pub keys: u64,
    /// Key epoch and check value, in hexadecimal, of those that there were last.
    pub check_values: Vec<(u32, String)>,
    /// Unix time of the deletion.
    pub deleted_s: u64,
    /// What became of the key.
    pub fate: KeyFate,
    /// Unix time at which it was found to be destroyed.
    pub destroyed_s: Option<u64>,
    /// Who still needs it.
    pub readers: Vec<String>,
    /// Where copies may be left.
    pub copies: Vec<KeyCopy>,
    /// Members that would be among these, had nobody stated that they are destroyed.
    pub stated: Vec<Stated>,
    /// The members of the pool now: what was overwritten was overwritten on those that are in the set.
    pub members: Vec<Uuid>,
}

/// Why a member was not taken to be destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StatementError {
    #[error("member {0} is in use")]
    InUse(Uuid),
    #[error("no receipt waits for a member {0}: key receipts lists those that one waits for")]
    NotAwaited(Uuid),
    #[error(transparent)]
    Checkpoint(#[from] super::handle::CheckpointError),
    #[error("the pool is closed")]
    Closed,
}

/// All that is kept of deletions.
#[derive(Debug, Default)]
pub struct Receipts(Mutex<Book>);

#[derive(Debug, Default, Clone)]
struct Book {
    receipts: Vec<Receipt>,
    births: BTreeMap<LineageId, u64>,
    departed: Vec<Departed>,
    statements: BTreeMap<Uuid, u64>,
}

/// What is known of the pool around the receipts at one moment.
pub struct Surroundings<'a> {
    pub pool: Uuid,
    pub holders: &'a [Holder],
    /// As the superblocks name them, the book's own aside.
    pub departed: &'a [Departed],
    /// Names of what has a lineage, one UUID aside.
    pub readers: &'a dyn Fn(LineageId, Uuid) -> Vec<String>,
    /// How the configuration names a member.
    pub name: &'a dyn Fn(Uuid) -> Option<String>,
}

impl Receipts {
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As a checkpoint has it.
    pub fn load(&self, entry: Entry) {
        let mut book = self.lock();
        match entry {
            Entry::Receipt(receipt) => book.receipts.push(receipt),
            Entry::Birth(lineage, epoch) => drop(book.births.insert(lineage, epoch)),
            Entry::Departed(departed) => book.departed.push(departed),
            Entry::Statement(uuid, at_s) => drop(book.statements.insert(uuid, at_s)),
        }
    }

    /// For a checkpoint, with those that left since the last one.
    pub fn entries(&self, departed: &[Departed]) -> Vec<Entry> {
        let mut book = self.lock();
        book.add_departed(departed);
        book.prune();
        let receipts = book.receipts.iter().cloned().map(Entry::Receipt);
        let births = book.births.iter().map(|(lineage, epoch)| Entry::Birth(*lineage, *epoch));
        let departed = book.departed.iter().copied().map(Entry::Departed);
        let statements = book.statements.iter().map(|(uuid, at_s)| Entry::Statement(*uuid, *at_s));
        receipts.chain(births).chain(departed).chain(statements).collect()
    }

    /// A lineage begins in this epoch of the set.
    pub fn begin(&self, lineage: LineageId, epoch: u64) {
        self.lock().births.insert(lineage, epoch);
    }

    /// It has come to nothing.
    pub fn forget(&self, lineage: LineageId) {
        self.lock().births.remove(&lineage);
    }

    /// A volume is deleted; none if there is a receipt for it. Gives what [`Receipts::take_back`] takes.
    pub fn deleted(&self, receipt: Option<Receipt>) -> Undo {
        let mut book = self.lock();
        let undo = Undo(book.clone());
        if let Some(mut receipt) = receipt {
            receipt.born = book.births.get(&receipt.lineage).copied();
            book.receipts.push(receipt);
        }
        undo
    }

    /// Nothing has a lineage any more: what was kept for others of it goes as well.
    pub fn ended(&self, lineage: LineageId, last_shield: u64) {
        let mut book = self.lock();
        let all =
            book.receipts.iter_mut().filter(|receipt| receipt.lineage == lineage && receipt.last_shield.is_none());
        all.for_each(|receipt| receipt.last_shield = Some(last_shield));
        book.births.remove(&lineage);
    }

    /// The deletion has failed.
    pub fn take_back(&self, undo: Undo) {
        *self.lock() = undo.0;
    }

    /// Whether no more members may be replaced before somebody states what became of those before.
    pub fn is_crowded(&self) -> bool {
        self.lock().departed.len() >= DEPARTED_KEPT_MAX
    }

    /// A device that was let go has nothing any more.
    pub fn released(&self, uuid: Uuid) {
        self.lock().departed.retain(|departed| departed.uuid != uuid);
    }

    /// Somebody says that a device is destroyed.
    pub fn state(&self, uuid: Uuid, at_s: u64, around: &Surroundings<'_>) -> Result<Undo, StatementError> {
        let in_use = |holder: &&Holder| holder.uuid == uuid && holder.standing != Standing::Absent;
        if around.holders.iter().any(|holder| in_use(&holder)) {
            return Err(StatementError::InUse(uuid));
        }
        let mut book = self.lock();
        book.add_departed(around.departed);
        let holders = book.holders(around);
        let awaited = |receipt: &Receipt| holders.iter().any(|holder| holder.uuid == uuid && receipt.may_be_on(holder));
        if !book.receipts.iter().any(awaited) {
            return Err(StatementError::NotAwaited(uuid));
        }
        let undo = Undo(book.clone());
        book.statements.insert(uuid, at_s);
        Ok(undo)
    }

    /// Notes which keys are destroyed since the last time; whether there were any.
    pub fn settle(&self, now_s: u64, around: &Surroundings<'_>) -> bool {
        let mut book = self.lock();
        book.add_departed(around.departed);
        // One that is there again was not destroyed.
        let active = |uuid: &Uuid| {
            around.holders.iter().any(|holder| holder.uuid == *uuid && holder.standing == Standing::Active)
        };
        book.statements.retain(|uuid, _| !active(uuid));
        let holders = book.holders(around);
        let mut changed = false;
        for at in 0..book.receipts.len() {
            let fate = book.fate(&book.receipts[at], &holders);
            let receipt = &mut book.receipts[at];
            let destroyed = (fate == KeyFate::Destroyed).then(|| receipt.destroyed_s.unwrap_or(now_s));
            if destroyed != receipt.destroyed_s {
                tracing::info!(volume = receipt.volume, lineage = %hex(&receipt.lineage.0.to_be_bytes()), ?fate, "deletion receipt");
                (receipt.destroyed_s, changed) = (destroyed, true);
            }
        }
        changed
    }

    /// Whether any waits for the set itself.
    pub fn waits_for_set(&self, floor: u64) -> bool {
        self.lock().receipts.iter().any(|receipt| receipt.last_shield.is_some_and(|last| floor <= last))
    }

    /// The receipt of a volume, which is `receipt` if none is kept.
    pub fn status_of(&self, receipt: Receipt, around: &Surroundings<'_>) -> ReceiptStatus {
        let mut book = self.lock().clone();
        book.add_departed(around.departed);
        let kept = book.receipts.iter().rfind(|kept| kept.uuid == receipt.uuid);
        book.status(kept.unwrap_or(&receipt), &book.holders(around), around)
    }

    /// All of them, oldest first.
    pub fn status(&self, around: &Surroundings<'_>) -> Vec<ReceiptStatus> {
        let mut book = self.lock().clone();
        book.add_departed(around.departed);
        let holders = book.holders(around);
        book.receipts.iter().map(|receipt| book.status(receipt, &holders, around)).collect()
    }
}

/// The book as it was, should the deletion fail.
#[must_use]
pub struct Undo(Book);

impl Book {
    fn add_departed(&mut self, departed: &[Departed]) {
        for departed in departed {
            if !self.departed.iter().any(|known| known.uuid == departed.uuid) {
                self.departed.push(*departed);
            }
        }
    }

    /// What no lineage that is or was needs to know any more, and receipts beyond the most.
    fn prune(&mut self) {
        let Self { receipts, births, departed, .. } = self;
        departed.retain(|gone| {
            let holder = Holder::from(*gone);
            let lives = births.values().any(|born| gone.epoch >= *born);
            lives || receipts.iter().any(|receipt| receipt.may_be_on(&holder))
        });
        while self.receipts.len() > RECEIPTS_MAX {
            let done = self.receipts.iter().position(|receipt| receipt.destroyed_s.is_some());
            let gone = self.receipts.remove(done.unwrap_or(0));
            tracing::warn!(volume = gone.volume, "its deletion receipt is too old to be kept beside the newer ones");
        }
    }

    fn holders(&self, around: &Surroundings<'_>) -> Vec<Holder> {
        let departed = self.departed.iter().copied().map(Holder::from);
        around.holders.iter().copied().chain(departed).collect()
    }

    /// Those that may hold a receipt's key, and those that would but for a statement.
    fn on<'a>(
        &'a self,
        receipt: &'a Receipt,
        holders: &'a [Holder],
    ) -> impl Iterator<Item = (&'a Holder, Option<u64>)> {
        let on = holders.iter().filter(|holder| receipt.may_be_on(holder));
        on.map(|holder| (holder, self.statements.get(&holder.uuid).copied()))
    }

    fn fate(&self, receipt: &Receipt, holders: &[Holder]) -> KeyFate {
        if receipt.last_shield.is_none() {
            return KeyFate::Kept;
        }
        let left = receipt.born.is_none() || self.on(receipt, holders).any(|(_, stated)| stated.is_none());
        if left { KeyFate::Pending } else { KeyFate::Destroyed }
    }

    fn status(&self, receipt: &Receipt, holders: &[Holder], around: &Surroundings<'_>) -> ReceiptStatus {
        let fate = self.fate(receipt, holders);
        let mut copies: Vec<KeyCopy> = Vec::new();
        let mut stated = Vec::new();
        for (holder, statement) in self.on(receipt, holders) {
            match statement {
                Some(at_s) => stated.push(Stated { member: holder.uuid, at_s }),
                None => copies.push(copy(holder, around)),
            }
        }
        if receipt.born.is_none() && fate == KeyFate::Pending {
            copies.push(KeyCopy { member: None, index: None, name: None, reason: CopyReason::OlderFormat });
        }
        let members = around.holders.iter().filter(|holder| holder.standing != Standing::Filling);
        ReceiptStatus {
            pool: around.pool,
            volume: receipt.volume.clone(),
            uuid: receipt.uuid,
            lineage: hex(&receipt.lineage.0.to_be_bytes()),
            cipher: receipt.cipher.name().to_owned(),
            keys: u64::from(receipt.newest.0) + 1,
            check_values: receipt.check_values.iter().map(|(epoch, value)| (epoch.0, hex(value))).collect(),
            deleted_s: receipt.deleted_s,
            fate,
            destroyed_s: receipt.destroyed_s.filter(|_| fate == KeyFate::Destroyed),
            readers: if fate == KeyFate::Kept { (around.readers)(receipt.lineage, receipt.uuid) } else { Vec::new() },
            copies,
            stated,
            members: members.map(|holder| holder.uuid).collect(),
        }
    }
}

fn copy(holder: &Holder, around: &Surroundings<'_>) -> KeyCopy {
    let reason = match holder.standing {
        Standing::Active => CopyReason::Active,
        Standing::Absent => CopyReason::Absent { epoch: holder.epoch },
        Standing::Filling => CopyReason::Filling,
        Standing::Departed { at_s } => CopyReason::Replaced { at_s },
    };
    KeyCopy { member: Some(holder.uuid), index: Some(holder.place), name: (around.name)(holder.uuid), reason }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
