//! One lane of I/O: a queue, its slots, and the source that keeps them full.
//!
//! Owns the closed loop that every workload runs. Must not know sockets or PDUs on one side, nor what the workload is on
//! the other. Invariant: a source hears of every command that it gave exactly once, or the loop ends with an error.

use std::time::Duration;

use nvmf_target::buffer::IoBuf;
use nvmf_target::wire::Status;

use crate::error::ToolError;

/// An I/O command of the NVM command set. Buffers are as long as the range.
#[derive(Debug)]
pub enum IoCommand {
    /// Fill the buffer with the range.
    Read {
        /// Which blocks.
        range: Range,
        /// Where to.
        buffer: IoBuf,
    },
    /// Store the buffer.
    Write {
        /// Which blocks.
        range: Range,
        /// What.
        buffer: IoBuf,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Which blocks.
        range: Range,
    },
    /// Give the range's space back; it reads as zeroes afterwards where the namespace says so (DLFEAT).
    Deallocate {
        /// Which blocks.
        range: Range,
    },
    /// Make everything that completed before durable.
    Flush {
        /// Of which namespace.
        nsid: u32,
    },
}

/// Blocks of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Namespace.
    pub nsid: u32,
    /// First block.
    pub slba: u64,
    /// How many, 1 to 65,536.
    pub lba_count: u32,
}

/// How a command ended.
#[derive(Debug)]
pub struct Completion {
    /// The slot it was submitted with.
    pub slot: usize,
    /// Its status.
    pub status: Status,
    /// The buffer of a read (filled) or a write; none of other commands.
    pub buffer: Option<IoBuf>,
    /// From submission to completion.
    pub latency: Duration,
}

/// A queue that commands go to and completions come from.
pub trait CommandQueue {
    /// How many commands can be in flight.
    fn capacity(&self) -> usize;
    /// Gives a command to the queue; it need not have been sent when this returns.
    fn submit(&mut self, slot: usize, command: IoCommand) -> Result<(), ToolError>;
    /// Sends what is waiting as far as that goes without waiting.
    fn send(&mut self) -> Result<(), ToolError>;
    /// Sends what is waiting, and waits until a command completes.
    fn wait(&mut self) -> Result<Completion, ToolError>;
}

/// Where a lane's commands come from, and who hears of their end.
pub trait Source {
    /// The next command for a free slot; `None` when there is none now. Asked again after each completion; when nothing is
    /// in flight, `None` is the end.
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError>;
    /// A command ended.
    fn completed(&mut self, completion: Completion) -> Result<(), ToolError>;
}

/// Keeps up to `depth` commands in flight until the source has no more, and waits for the last.
pub fn run(queue: &mut impl CommandQueue, depth: usize, source: &mut impl Source) -> Result<(), ToolError> {
    let depth = depth.clamp(1, queue.capacity().max(1));
    // A source that has nothing for a slot now may have something after the next completion.
    let mut idle: Vec<usize> = (0..depth).rev().collect();
    loop {
        while let Some(&slot) = idle.last() {
            let Some(command) = source.next(slot)? else { break };
            queue.submit(slot, command)?;
            idle.pop();
        }
        if idle.len() >= depth {
            return Ok(());
        }
        let completion = queue.wait()?;
        idle.push(completion.slot);
        source.completed(completion)?;
    }
}

/// A namespace in memory with faults on demand, for the tests of workloads.
#[cfg(test)]
pub(crate) mod fake {
    use std::collections::{HashMap, VecDeque};
    use std::sync::{Arc, Mutex};

    use nvmf_target::proto::tcp::CloseReason;

    use super::*;
    use crate::error::ToolError;
    use crate::initiator::ConnectionError;

    fn broken() -> ToolError {
        ConnectionError::Ended { reason: CloseReason::PeerClosed, in_flight: 0 }.into()
    }

    /// Where a block lies in [`Disk::blocks`]: namespaces are kept apart.
    fn key(range: Range, lba: u64) -> u64 {
        u64::from(range.nsid) << 48 | lba
    }

    /// The blocks, shared by several queues.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct Disk {
        pub blocks: Arc<Mutex<HashMap<u64, Vec<u8>>>>,
        /// Writes to these blocks complete and are lost.
        pub lose: Arc<Mutex<Vec<u64>>>,
        /// After this many more commands the connection breaks.
        pub breaks_after: Arc<Mutex<Option<usize>>>,
        /// Reads and writes of this block fail with this status.
        pub fails: Arc<Mutex<Option<(u64, Status)>>>,
    }

    #[derive(Debug)]
    pub(crate) struct Queue {
        pub disk: Disk,
        pub block_bytes: usize,
        pub depth: usize,
        ready: VecDeque<Completion>,
        turn: usize,
    }

    impl Disk {
        pub(crate) fn queue(&self, block_bytes: usize) -> Queue {
            Queue { disk: self.clone(), block_bytes, depth: 8, ready: VecDeque::new(), turn: 0 }
        }
        /// Sets a block of namespace 1.
        pub(crate) fn set(&self, lba: u64, block: Vec<u8>) {
            self.blocks.lock().unwrap().insert(1 << 48 | lba, block);
        }
    }

    impl Queue {
        fn execute(&self, command: IoCommand) -> (Status, Option<IoBuf>) {
            let mut blocks = self.disk.blocks.lock().unwrap();
            let fails = *self.disk.fails.lock().unwrap();
            let hit = |range: Range| {
                fails.filter(|(lba, _)| (range.slba..range.slba + u64::from(range.lba_count)).contains(lba))
            };
            match command {
                IoCommand::Read { range, mut buffer } => {
                    for (out, lba) in buffer.chunks_mut(self.block_bytes).zip(range.slba..) {
                        match blocks.get(&key(range, lba)) {
                            Some(block) => out.copy_from_slice(block),
                            None => out.fill(0),
                        }
                    }
                    (hit(range).map_or(Status::SUCCESS, |(_, status)| status), Some(buffer))
                }
                IoCommand::Write { range, buffer } => {
                    if let Some((_, status)) = hit(range) {
                        return (status, Some(buffer));
                    }
                    let lose = self.disk.lose.lock().unwrap();
                    for (block, lba) in buffer.chunks(self.block_bytes).zip(range.slba..) {
                        if !lose.contains(&lba) {
                            blocks.insert(key(range, lba), block.to_vec());
                        }
                    }
                    (Status::SUCCESS, Some(buffer))
                }
                IoCommand::WriteZeroes { range } | IoCommand::Deallocate { range } => {
                    (range.slba..range.slba + u64::from(range.lba_count)).for_each(|lba| {
                        blocks.remove(&key(range, lba));
                    });
                    (Status::SUCCESS, None)
                }
                IoCommand::Flush { .. } => (Status::SUCCESS, None),
            }
        }
    }

    impl CommandQueue for Queue {
        fn capacity(&self) -> usize {
            self.depth
        }
        fn submit(&mut self, slot: usize, command: IoCommand) -> Result<(), ToolError> {
            if let Some(left) = self.disk.breaks_after.lock().unwrap().as_mut() {
                *left = left.checked_sub(1).ok_or_else(broken)?;
            }
            let (status, buffer) = self.execute(command);
            self.ready.push_back(Completion { slot, status, buffer, latency: Duration::from_micros(5) });
            Ok(())
        }
        fn send(&mut self) -> Result<(), ToolError> {
            Ok(())
        }
        fn wait(&mut self) -> Result<Completion, ToolError> {
            // Completions come in another order than commands went, the same in every run.
            self.turn = self.turn.wrapping_mul(5).wrapping_add(3);
            let pick = self.turn % self.ready.len().max(1);
            self.ready.remove(pick).ok_or_else(broken)
        }
    }
}
