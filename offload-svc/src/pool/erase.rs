//! Deletions, as the coordinator brings them to their receipts.
//!
//! Owns when a key counts as gone. Must not know how volumes are deleted otherwise. Invariant: the receipt is durable with
//! the deletion, in one checkpoint, and its verdict is never better than what is durable on members.

use std::sync::Arc;

use uuid::Uuid;

use super::coordinator::Coordinator;
use super::receipts::{Receipt, ReceiptStatus, StatementError, Undo};
use super::shared::{Shared, Volume};
use crate::stages::keys::{Keyring, LineageId, WrappedKey};

impl Coordinator {
    /// Takes down the deletion of a volume that the table of volumes has lost, or of a snapshot that loses its name, for the
    /// next checkpoint to keep.
    pub(super) async fn note_deletion(&self, volume: &Arc<Volume>) -> (Receipt, Undo) {
        let shared = &self.core.shared;
        let receipt = receipt(volume, &shared.keyring, self.core.env().unix_seconds());
        // One that had lost its name before has its receipt from then.
        let undo = shared.receipts.deleted((!volume.is_hidden()).then(|| receipt.clone()));
        self.end_lineage(volume.lineage).await;
        (receipt, undo)
    }

    /// If nothing is left of a lineage, its keys are at rest for the last time under the shield in use now: checkpoints are
    /// taken one at a time, and the next one has the next shield, and none of the keys.
    pub(super) async fn end_lineage(&self, lineage: LineageId) {
        let number = self.superblocks.current().await.shield_number;
        if self.core.shared.of_lineage(lineage).is_empty() {
            self.core.shared.receipts.ended(lineage, number);
        }
    }

    /// The receipt of a deletion that is durable.
    pub(super) fn receipt_of(&self, receipt: Receipt) -> ReceiptStatus {
        self.core.shared.with_receipts(|receipts, around| receipts.status_of(receipt, around))
    }

    /// After a checkpoint: overwrites the shields under which keys of deleted volumes were at rest, where they still are.
    pub(super) async fn settle_receipts(&self) {
        let shared = &self.core.shared;
        if shared.receipts.waits_for_set(shared.set.shields.floor()) {
            // If that fails the pool has, and receipts say what is left: the next mount does it.
            let _ = self.superblocks.write_again().await;
        }
        self.note_destroyed();
    }

    /// Notes which keys are gone by now. The next checkpoint keeps it; whoever asks meanwhile gets the same answer.
    pub(super) fn note_destroyed(&self) {
        let now_s = self.core.env().unix_seconds();
        if self.core.shared.with_receipts(|receipts, around| receipts.settle(now_s, around)) {
            self.core.shared.want_checkpoint();
        }
    }

    pub(super) async fn member_destroyed(&self, member: Uuid) -> Result<(), StatementError> {
        let now_s = self.core.env().unix_seconds();
        let undo = self.core.shared.with_receipts(|receipts, around| receipts.state(member, now_s, around))?;
        if let Err(error) = self.checkpoint(false).await {
            self.core.shared.receipts.take_back(undo);
            return Err(error.into());
        }
        tracing::warn!(%member, "a member is taken to be destroyed, as stated");
        self.note_destroyed();
        Ok(())
    }
}

impl Shared {
    /// Who has the keys of a lineage, by name, one aside.
    pub fn readers(&self, lineage: LineageId, but: Uuid) -> Vec<String> {
        let others = self.of_lineage(lineage).into_iter().filter(|volume| volume.uuid != but);
        let name = |volume: Arc<Volume>| match (volume.is_hidden(), volume.is_snapshot()) {
            (true, _) => format!("{} (a deleted snapshot that is being given back)", volume.name),
            (false, true) => format!("{} (a snapshot)", volume.name),
            (false, false) => volume.name.clone(),
        };
        others.map(name).collect()
    }
}

fn receipt(volume: &Volume, keyring: &Keyring, deleted_s: u64) -> Receipt {
    let keys = volume.keys.wrapped();
    let check_value = |wrapped: &WrappedKey| {
        let key = keyring.get(volume.lineage, wrapped.epoch())?;
        Some((wrapped.epoch(), key.check_value()))
    };
    Receipt {
        volume: volume.name.clone(),
        uuid: volume.uuid,
        lineage: volume.lineage,
        cipher: volume.cipher,
        newest: volume.keys.current(),
        check_values: keys.iter().filter_map(check_value).collect(),
        deleted_s,
        destroyed_s: None,
        born: None,
        last_shield: None,
    }
}
