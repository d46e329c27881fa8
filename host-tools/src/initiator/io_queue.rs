//! An I/O queue pair: commands of the NVM command set over one connection.

use std::time::Instant;

use nvmf_target::buffer::IoBuf;
use nvmf_target::proto::host::HostData;
use nvmf_target::wire::opcode::nvm;
use nvmf_target::wire::{NamespaceId, Sqe, Status};

use super::{Connection, ConnectionError, WireBytes};
use crate::error::ToolError;
use crate::lane::{CommandQueue, Completion, IoCommand, Range};

/// Dataset Management's Attribute Deallocate (NVM Command Set 1.0 §3.2.3).
const DSM_DEALLOCATE: u32 = 1 << 2;
/// A range of Dataset Management: attributes, length, start.
const DSM_RANGE_BYTES: usize = 16;

/// A connected I/O queue.
pub struct IoQueue {
    connection: Connection,
    capacity: usize,
    slots: Vec<Slot>,
}

/// What is known of the command in a slot.
#[derive(Debug, Clone)]
struct Slot {
    started: Instant,
    read_bytes: usize,
    /// Its buffer is the caller's, not one made here (the ranges of a deallocation).
    returns_buffer: bool,
}

impl IoQueue {
    /// Over a connection whose Connect was accepted, with `entries` entries.
    pub(super) fn new(connection: Connection, entries: u16) -> Self {
        let capacity = usize::from(entries).saturating_sub(1).max(1);
        let slot = Slot { started: Instant::now(), read_bytes: 0, returns_buffer: false };
        Self { connection, capacity, slots: vec![slot; capacity] }
    }

    /// PDU bytes so far.
    pub fn wire(&self) -> WireBytes {
        self.connection.wire()
    }

    /// One command, and its end; the queue must have none in flight.
    pub fn execute(&mut self, command: IoCommand) -> Result<Completion, ToolError> {
        self.submit(0, command)?;
        self.wait()
    }
}

impl CommandQueue for IoQueue {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn submit(&mut self, slot: usize, command: IoCommand) -> Result<(), ToolError> {
        let returns = matches!(command, IoCommand::Read { .. } | IoCommand::Write { .. });
        let (sqe, data) = encode(command);
        let Some(Slot { started, read_bytes, returns_buffer }) = self.slots.get_mut(slot) else {
            return Err(ConnectionError::QueueFull.into());
        };
        *started = Instant::now();
        *read_bytes = if let HostData::FromController(buffer) = &data { buffer.len() } else { 0 };
        *returns_buffer = returns;
        self.connection.submit(sqe, data, slot as u64)?;
        Ok(())
    }

    fn send(&mut self) -> Result<(), ToolError> {
        Ok(self.connection.push()?)
    }

    fn wait(&mut self) -> Result<Completion, ToolError> {
        let done = self.connection.wait()?;
        let slot = usize::try_from(done.context).unwrap_or(usize::MAX);
        let Some(Slot { started, read_bytes: wanted, returns_buffer }) = self.slots.get(slot) else {
            return Err(ConnectionError::BadAnswer { what: "completion" }.into());
        };
        let received = done.received_bytes as usize;
        let mut status = done.cqe.status;
        if status.is_success() && !done.intact {
            status = Status::TRANSIENT_TRANSPORT_ERROR;
        } else if status.is_success() && received != *wanted {
            return Err(ConnectionError::ShortRead { wanted: *wanted, received }.into());
        }
        let buffer = done.buffer.filter(|_| *returns_buffer);
        Ok(Completion { slot, status, buffer, latency: started.elapsed() })
    }
}

/// The entry and data of a command (NVM Command Set 1.0 §3.2).
fn encode(command: IoCommand) -> (Sqe, HostData) {
    match command {
        IoCommand::Read { range, buffer } => (ranged(nvm::READ, range), HostData::FromController(buffer)),
        IoCommand::Write { range, buffer } => (ranged(nvm::WRITE, range), HostData::ToController(buffer)),
        IoCommand::WriteZeroes { range } => (ranged(nvm::WRITE_ZEROES, range), HostData::None),
        IoCommand::Deallocate { range } => {
            let mut sqe = Sqe::new(nvm::DATASET_MANAGEMENT);
            // Dword 10 is the number of ranges, 0-based: one.
            sqe.set_namespace_id(NamespaceId(range.nsid)).set_dword(11, DSM_DEALLOCATE);
            (sqe, HostData::ToController(dsm_range(range)))
        }
        IoCommand::Flush { nsid } => {
            let mut sqe = Sqe::new(nvm::FLUSH);
            sqe.set_namespace_id(NamespaceId(nsid));
            (sqe, HostData::None)
        }
    }
}

fn ranged(opcode: u8, range: Range) -> Sqe {
    let mut sqe = Sqe::new(opcode);
    sqe.set_namespace_id(NamespaceId(range.nsid)).set_cdw10_11(range.slba);
    sqe.set_dword(12, range.lba_count.saturating_sub(1) & 0xFFFF);
    sqe
}

fn dsm_range(range: Range) -> IoBuf {
    let mut bytes = [0u8; DSM_RANGE_BYTES];
    bytes[4..8].copy_from_slice(&range.lba_count.to_le_bytes());
    bytes[8..16].copy_from_slice(&range.slba.to_le_bytes());
    IoBuf::copy_of(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_as_the_nvm_command_set_has_them() {
        let range = Range { nsid: 3, slba: 0x1_0000_0002, lba_count: 65536 };
        let (read, _) = encode(IoCommand::Read { range, buffer: IoBuf::heap(512) });
        assert_eq!((read.opcode(), read.namespace_id().0, read.cdw10_11()), (0x02, 3, 0x1_0000_0002));
        assert_eq!(read.dword(12), 0xFFFF, "NLB is 0-based");
        let (trim, data) = encode(IoCommand::Deallocate { range: Range { lba_count: 5, ..range } });
        assert_eq!((trim.opcode(), trim.dword(10), trim.dword(11)), (0x09, 0, 4));
        let HostData::ToController(bytes) = data else { panic!("no ranges") };
        assert_eq!(bytes[..], [0, 0, 0, 0, 5, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0]);
        let (flush, _) = encode(IoCommand::Flush { nsid: 3 });
        assert_eq!((flush.opcode(), flush.namespace_id().0), (0, 3));
    }
}
