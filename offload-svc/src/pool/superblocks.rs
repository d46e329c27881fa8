//! Writing superblocks: the one place where the set and the checkpoint change.
//!
//! Owns the current superblock and its writing on all members of the set. Must not know what a checkpoint holds.
//! Invariant: the set in memory shrinks only after every member that stays has the superblock that says so.

use std::sync::Arc;

use futures::future::join_all;
use tokio::sync::Mutex;

use super::members::{MemberIo, MemberSet, TooFewMembers};
use super::superblock::{SLOT_BYTES, Superblock};

/// One is written at a time; one that hangs doesn't hold up the next at once.
pub const SUPERBLOCKS_UNDER_WAY: usize = 4;

/// The writer of a mounted pool's superblocks.
pub struct Superblocks {
    io: MemberIo,
    current: Mutex<Superblock>,
    /// Each member's own recorded size.
    member_bytes: Vec<u64>,
}

impl Superblocks {
    pub fn new(io: MemberIo, current: Superblock, member_bytes: Vec<u64>) -> Self {
        Self { io, current: Mutex::new(current), member_bytes }
    }

    /// The superblock as it was last written.
    pub fn into_current(self) -> Superblock {
        self.current.into_inner()
    }

    /// Writes the current superblock on members of the set that don't have it yet, as a crash may have cut its
    /// publication short. It goes to the slot that isn't their newest. Members that fail are found out by the next
    /// publication.
    pub async fn catch_up(&self, behind: u32) {
        let current = self.current.lock().await;
        let behind = behind & self.set().mask();
        if behind != 0 {
            self.write_all(&current, behind).await;
        }
    }

    fn set(&self) -> &Arc<MemberSet> {
        &self.io.set
    }

    /// Writes a changed superblock on all members of the set but `without`; members that fail leave the set too. When it
    /// returns `Ok`, the change is durable on every member that is left.
    pub async fn publish(&self, without: u32, change: impl FnOnce(&mut Superblock)) -> Result<(), TooFewMembers> {
        let mut current = self.current.lock().await;
        let mut next = current.clone();
        change(&mut next);
        let mut mask = self.set().mask() & !without;
        loop {
            if self.set().is_failed() || mask.count_ones() < u32::from(next.layout.data_shards) {
                self.set().fail();
                return Err(TooFewMembers);
            }
            next.generation += 1;
            admit(&mut next, mask);
            let failed = self.write_all(&next, mask).await;
            // A slot that has been written may be found again: the generation is spent.
            current.generation = next.generation;
            if failed == 0 {
                self.set().set(mask, next.epoch);
                *current = next;
                return Ok(());
            }
            mask &= !failed;
        }
    }

    async fn write_all(&self, block: &Superblock, mask: u32) -> u32 {
        let members = (0..self.set().count()).filter(|member| mask & (1 << member) != 0);
        let writes = members.map(|member| {
            let own = Superblock {
                index: member as u8,
                member: self.set().members[member].uuid,
                member_bytes: self.member_bytes[member],
                ..block.clone()
            };
            async move {
                let mut buf = self.io.env.buffer(SLOT_BYTES).await;
                buf.copy_from_slice(&own.to_bytes());
                (member, self.io.write_durably(member, Superblock::slot_offset(own.generation), buf).await)
            }
        });
        let results = join_all(writes).await;
        results.iter().filter(|(_, result)| result.is_err()).fold(0, |failed, (member, _)| failed | 1 << member)
    }
}

/// Brings the member table in line with a set; a change starts a new epoch.
fn admit(block: &mut Superblock, mask: u32) {
    let wanted = |index: usize| mask & (1 << index) != 0;
    if block.members.iter().enumerate().any(|(index, member)| member.active != wanted(index)) {
        block.epoch += 1;
    }
    let epoch = block.epoch;
    for (index, member) in block.members.iter_mut().enumerate() {
        member.active = wanted(index);
        if member.active {
            member.epoch = epoch;
        }
    }
}
