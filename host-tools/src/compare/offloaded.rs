//! The offloaded way: the host writes plain bytes to a pool namespace and reads them back.
//!
//! Owns one thread's writes and reads. Must not know what the service does with them. Invariant: an extent counts as
//! written when its Write completes, which is when the pool has made it durable.

use nvmf_target::buffer::IoBuf;

use super::workload::{Extents, ThreadResult};
use crate::error::ToolError;
use crate::lane::{self, CommandQueue, Completion, IoCommand, Range, Source};

/// Where the extents lie in the pool namespace.
#[derive(Debug, Clone, Copy)]
pub struct PoolArea {
    /// Namespace.
    pub nsid: u32,
    /// Its block size in bytes.
    pub block_bytes: u32,
    /// First block of extent 0.
    pub slba: u64,
}

/// Writes or reads the extents `first`, `first + step`, …, `depth` at a time.
pub fn run(
    area: PoolArea,
    writing: bool,
    extents: &Extents<'_>,
    (first, step): (usize, usize),
    depth: usize,
    queue: &mut impl CommandQueue,
) -> Result<ThreadResult, ToolError> {
    let depth = depth.min(queue.capacity());
    let mut thread = Thread {
        area,
        writing,
        extents,
        pending: (first..extents.count()).step_by(step.max(1)).collect::<Vec<_>>().into_iter(),
        in_flight: vec![None; depth],
        buffers: (0..depth).map(|_| Some(IoBuf::heap(extents.extent_bytes))).collect(),
        result: ThreadResult::default(),
    };
    lane::run(queue, depth, &mut thread)?;
    Ok(thread.result)
}

struct Thread<'a, 'd> {
    area: PoolArea,
    writing: bool,
    extents: &'a Extents<'d>,
    pending: std::vec::IntoIter<usize>,
    in_flight: Vec<Option<(usize, Range)>>,
    buffers: Vec<Option<IoBuf>>,
    result: ThreadResult,
}

impl Source for Thread<'_, '_> {
    fn next(&mut self, slot: usize) -> Result<Option<IoCommand>, ToolError> {
        let Some(index) = self.pending.next() else { return Ok(None) };
        let bytes = self.extents.get(index);
        let taken = self.buffers.get_mut(slot).and_then(Option::take);
        let mut buffer = taken.unwrap_or_else(|| IoBuf::heap(self.extents.extent_bytes));
        buffer.set_len(bytes.len());
        let block = self.area.block_bytes as usize;
        let slba = self.area.slba + (index * self.extents.extent_bytes / block) as u64;
        let range = Range { nsid: self.area.nsid, slba, lba_count: (bytes.len() / block) as u32 };
        if let Some(place) = self.in_flight.get_mut(slot) {
            *place = Some((index, range));
        }
        if !self.writing {
            return Ok(Some(IoCommand::Read { range, buffer }));
        }
        buffer.copy_from_slice(bytes);
        Ok(Some(IoCommand::Write { range, buffer }))
    }

    fn completed(&mut self, completion: Completion) -> Result<(), ToolError> {
        let Some((index, range)) = self.in_flight.get_mut(completion.slot).and_then(Option::take) else {
            return Ok(());
        };
        if !completion.status.is_success() {
            let what = if self.writing { "Write" } else { "Read" };
            return Err(ToolError::Command { what, range: Some(range), status: completion.status });
        }
        let bytes = self.extents.get(index);
        self.result.latencies.record(completion.latency);
        self.result.user_bytes += bytes.len() as u64;
        if self.writing {
            self.result.written_bytes += bytes.len() as u64;
        } else if completion.buffer.as_deref() == Some(bytes) {
            self.result.verified_bytes += bytes.len() as u64;
        } else {
            self.result.mismatched_bytes += bytes.len() as u64;
        }
        if let Some(place) = self.buffers.get_mut(completion.slot) {
            *place = completion.buffer;
        }
        Ok(())
    }
}
