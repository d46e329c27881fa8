//! Letting a member go that has been replaced: nothing on it shall lead to a key any more.
//!
//! Owns what is written to it last. Must not know receipts. Invariant: it is written to only if no earlier write of ours can
//! still be on its way there, and nobody takes its slot for another device before the last write has come back.

use std::rc::Rc;
use std::sync::Arc;

use futures::future::{Either, select};
use tokio::sync::oneshot;

use super::core::Core;
use super::env::MemberIndex;
use super::members::Identity;
use super::shared::Shared;
use super::superblock::{SLOT_BYTES, Superblock};
use super::superblocks::Superblocks;
use crate::stages::keys::Shield;

/// A member that is about to be replaced and can be let go properly.
pub struct Leaving {
    place: usize,
    identity: Identity,
    slot: Slot,
    /// A superblock in which it is a member.
    block: Superblock,
}

/// Its slot, which stays open.
struct Slot {
    shared: Arc<Shared>,
    index: MemberIndex,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.shared.rebuild.left(self.index);
    }
}

impl Leaving {
    /// The member at a place that another is about to take; none if it is not there, or still holds requests of ours after it
    /// was put out of the set: then it keeps what it has, and that is named.
    pub async fn at(core: &Rc<Core>, superblocks: &Superblocks, place: usize) -> Option<Self> {
        let (set, block) = (&core.shared.set, superblocks.current().await);
        let entry = set.entry(place);
        let (identity, index) = (entry.identity(), entry.slot()?);
        if !set.contains(place) && !entry.is_idle() {
            return None;
        }
        core.shared.rebuild.leave(index);
        let slot = Slot { shared: Arc::clone(&core.shared), index };
        Some(Self { place, identity, slot, block })
    }

    /// Gives it superblocks without a shield. One that can't be written to, or does not answer, keeps what it has.
    pub async fn let_go(self, core: &Rc<Core>, superblocks: &Superblocks) {
        let Self { place, identity, slot, block } = self;
        let (uuid, name) = (identity.uuid, identity.name);
        let mut own = Superblock { index: place as u8, member: uuid, member_bytes: identity.size_bytes, ..block };
        if let Some(pointer) = &mut own.checkpoint {
            pointer.shield = Shield::none();
        }
        let (done, answer) = oneshot::channel();
        let env = Rc::clone(core.env());
        core.env().spawn(Box::pin(async move {
            let mut written = Ok(());
            for offset in [0, SLOT_BYTES as u64] {
                let mut buf = env.buffer(SLOT_BYTES).await;
                buf.copy_from_slice(&own.to_bytes());
                if written.is_ok() {
                    written = env.write(slot.index, offset, buf).await.0;
                }
            }
            if written.is_ok() {
                written = env.sync(slot.index).await;
            }
            drop(slot);
            // Whoever waits may have given up.
            let _ = done.send(written.is_ok());
        }));
        let late = core.env().sleep_until(core.env().now() + core.shared.set.timeout);
        if matches!(select(answer, late).await, Either::Left((Ok(true), _))) {
            superblocks.released(uuid).await;
            core.shared.receipts.released(uuid);
            tracing::info!(place, name, member = %uuid, "replaced, and let go without anything that leads to a key");
        } else {
            tracing::warn!(place, name, member = %uuid, "replaced, and what leads to keys could not be overwritten on it");
        }
    }
}
