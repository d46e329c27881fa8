//! Receipts of deletions, as the management API gives them.
//!
//! Owns their words. Must not know how the pool comes to its verdict. Invariant: a receipt that is pending names every copy
//! that may be left, why, and what ends it.

use crate::manage::view;
use crate::pool::{CopyReason, KeyCopy, KeyFate, ReceiptStatus};

const MEANING: &str = "destroyed: on every member of the pool, what the key can be opened with has been overwritten at the \
     place where it stood, and no member that was away, being filled or replaced still has it. An SSD may keep overwritten \
     blocks in its flash until it erases them: only its own sanitize or secure erase, or destroying it, reaches those. Copies \
     of members made outside the pool (backups, snapshots of a storage system) are not known to it.";

const KEPT: &str = "kept: others of its lineage still read under this key. It is destroyed with the last of them, whose receipt says so.";

pub(super) fn receipt(receipt: &ReceiptStatus) -> view::Receipt {
    let key = match receipt.fate {
        KeyFate::Destroyed => "destroyed",
        KeyFate::Pending => "pending",
        KeyFate::Kept => "kept",
    };
    let check = |(epoch, value): &(u32, String)| view::KeyCheck { epoch: (*epoch).into(), value: value.clone() };
    let stated =
        |stated: &crate::pool::Stated| view::Stated { member: stated.member.to_string(), stated_s: stated.at_s };
    view::Receipt {
        pool: receipt.pool.to_string(),
        volume: receipt.volume.clone(),
        uuid: receipt.uuid.to_string(),
        lineage: receipt.lineage.clone(),
        cipher: receipt.cipher.clone(),
        keys: receipt.keys,
        check_values: receipt.check_values.iter().map(check).collect(),
        deleted_s: receipt.deleted_s,
        key: key.to_owned(),
        destroyed_s: receipt.destroyed_s,
        readers: receipt.readers.clone(),
        copies: receipt.copies.iter().map(copy).collect(),
        stated_destroyed: receipt.stated.iter().map(stated).collect(),
        members: receipt.members.iter().map(ToString::to_string).collect(),
        meaning: if receipt.fate == KeyFate::Kept { KEPT } else { MEANING }.to_owned(),
    }
}

fn copy(copy: &KeyCopy) -> view::KeyCopy {
    let (reason, text) = match copy.reason {
        CopyReason::Active => ("active", "in the set; overwritten with the pool's next superblock".to_owned()),
        CopyReason::Absent { epoch } => (
            "absent",
            format!("not in the set since epoch {epoch}; overwritten when it comes back, or state that it is destroyed"),
        ),
        CopyReason::Filling => ("filling", "being filled to take a place; overwritten when it takes it".to_owned()),
        CopyReason::Replaced { at_s } => (
            "replaced",
            format!(
                "replaced at Unix time {at_s}, and not overwritten then; erase or destroy the device, then state that it is \
                 destroyed"
            ),
        ),
        CopyReason::OlderFormat => (
            "older-format",
            "the volume was made in a pool of format 2 or 1: free space of any member may hold copies until it is written \
             over"
                .to_owned(),
        ),
    };
    view::KeyCopy {
        member: copy.member.map(|member| member.to_string()),
        index: copy.index.map(Into::into),
        source: copy.name.clone(),
        reason: reason.to_owned(),
        text,
    }
}
