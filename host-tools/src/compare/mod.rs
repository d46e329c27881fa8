//! `offload-bench compare`: the same bytes two ways against a running service, side by side.
//!
//! Owns the order of the runs: who goes first, how often, with how many threads. Must not know how either way stores data.
//! Invariants: the ways take turns within every round; each runs with its own best number of threads; every byte that is
//! read is compared with what was written.

pub mod host_side;
pub mod layout;
pub mod offloaded;
pub mod report;
pub mod service;
pub mod workload;

use indicatif::ProgressBar;
use offload_svc::stages::keys::NoRandomness;
use offload_svc::stages::record::SealError;
use offload_svc::stages::rs::CodeError;
use serde::Serialize;

use crate::error::ToolError;
use crate::initiator::{IoQueue, WireBytes};
use crate::progress::StopFlag;
use crate::stats::Latencies;
use host_side::{HostSetup, HostStream};
use offloaded::PoolArea;
use service::Service;
use workload::{Extents, Phase, Shape, ThreadResult, measure};

/// Numbers of threads tried for each way.
pub const THREADS_TRIED: [usize; 3] = [1, 2, 4];
/// Bytes of a trial run.
const TRIAL_BYTES: usize = 16 << 20;

/// A stage failed on the host.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// A record could not be sealed.
    #[error("sealing a record: {0}")]
    Seal(#[from] SealError),
    /// A stripe could not be encoded.
    #[error("encoding a stripe: {0}")]
    Code(#[from] CodeError),
    /// No random bytes for keys.
    #[error("making keys: {0}")]
    Random(#[from] NoRandomness),
    /// An extent was to be read that was not written.
    #[error("extent {extent} was never written")]
    NeverWritten {
        /// Which one.
        extent: usize,
    },
}

/// The namespaces don't fit what is to be compared.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Not one plain namespace per member.
    #[error(
        "{given} member namespaces were named for {k}+{m}; name one per member, in order, with --member-namespaces"
    )]
    MemberCount {
        /// How many were named.
        given: usize,
        /// Data shards.
        k: usize,
        /// Parity shards.
        m: usize,
    },
    /// The members differ in block size.
    #[error("member namespace {nsid} has blocks of {found} bytes, the first one has {expected}; make them alike")]
    BlockSize {
        /// Which one.
        nsid: u32,
        /// Its block size.
        found: u32,
        /// That of the first.
        expected: u32,
    },
    /// A namespace is too small for the data.
    #[error("namespace {nsid} has {have} bytes, this data needs {need} there; use less data (--size) or a larger one")]
    TooSmall {
        /// Which one.
        nsid: u32,
        /// Its size in bytes.
        have: u64,
        /// Bytes needed.
        need: u64,
    },
    /// An extent isn't a whole number of blocks, or too long.
    #[error("--io-size {given}: must be a multiple of 4096 and at most {max_bytes} (the controller's MDTS)")]
    IoSize {
        /// What was given.
        given: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// The controller grants fewer queues than are tried.
    #[error("the controller grants {granted} I/O queues, {needed} are needed")]
    Queues {
        /// How many it grants.
        granted: usize,
        /// How many are needed.
        needed: usize,
    },
}

/// One of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// The host does the work.
    HostSide,
    /// The service does it.
    Offloaded,
}

/// One way in one round.
#[derive(Debug, Clone, Serialize)]
pub struct Run {
    /// Which way.
    pub way: Way,
    /// From 1.
    pub round: usize,
    /// All extents written.
    pub write: Phase,
    /// All extents read back and compared.
    pub read: Phase,
    /// Bytes at rest per application byte: records and their parity, headers of shards and padding left out.
    pub at_rest_per_byte: Option<f64>,
}

/// All that was measured.
#[derive(Debug)]
pub struct Measured {
    /// Every run, in the order in which they were made.
    pub runs: Vec<Run>,
    /// Write and read latencies of each way over all rounds.
    pub latencies: [(Way, Latencies, Latencies); 2],
    /// How the host-side way was run.
    pub host_shape: Shape,
    /// How the offloaded way was run.
    pub offloaded_shape: Shape,
    /// A signal ended it early.
    pub partial: bool,
}

/// What is compared, with the queues to do it.
pub struct Comparison<'a> {
    /// The service.
    pub service: &'a Service,
    /// The subsystem with the pool namespace, as `volume list` names it.
    pub pool_nqn: &'a str,
    /// Where the offloaded way writes; moves on with each round.
    pub pool: PoolArea,
    /// Blocks of the pool namespace.
    pub pool_blocks: u64,
    /// The host-side way's namespaces and stages.
    pub setup: HostSetup,
    /// The data.
    pub extents: Extents<'a>,
    /// Extents outstanding, of all threads together.
    pub outstanding: usize,
    /// Queues of the host-side way, as many as threads are tried.
    pub host_queues: Vec<IoQueue>,
    /// Queues of the offloaded way.
    pub pool_queues: Vec<IoQueue>,
}

impl Comparison<'_> {
    /// Finds each way's best number of threads (unless given), then runs `rounds` rounds.
    pub fn run(
        &mut self,
        rounds: usize,
        host_threads: Option<usize>,
        pool_threads: Option<usize>,
        stop: &StopFlag,
        bar: &ProgressBar,
    ) -> Result<Measured, ToolError> {
        self.check_room()?;
        let host_shape = self.shape(Way::HostSide, host_threads, bar)?;
        let offloaded_shape = self.shape(Way::Offloaded, pool_threads, bar)?;
        let empty = |way| (way, Latencies::default(), Latencies::default());
        let latencies = [empty(Way::HostSide), empty(Way::Offloaded)];
        let mut measured = Measured { runs: Vec::new(), latencies, host_shape, offloaded_shape, partial: false };
        for round in 1..=rounds {
            // Whoever goes first in a round goes second in the next: neither always meets a warm or a busy service.
            let mut order = [(Way::HostSide, host_shape), (Way::Offloaded, offloaded_shape)];
            if round % 2 == 0 {
                order.reverse();
            }
            for (way, shape) in order {
                if stop.is_set() {
                    measured.partial = true;
                    return Ok(measured);
                }
                let (run, written, read) = self.one_run(way, round, shape, self.extents)?;
                measured.runs.push(run);
                if let Some((_, writes, reads)) = measured.latencies.iter_mut().find(|(w, ..)| *w == way) {
                    writes.merge(&written);
                    reads.merge(&read);
                }
                bar.inc(1);
            }
        }
        Ok(measured)
    }

    /// What parity makes of a byte: (k+m)/k.
    fn expansion(&self) -> f64 {
        (self.setup.k + self.setup.m) as f64 / self.setup.k as f64
    }

    fn check_room(&self) -> Result<(), SetupError> {
        let block = u64::from(self.setup.block_bytes);
        let need = HostStream::blocks_needed(&self.setup, &self.extents, self.host_queues.len()) * block;
        let have = self.setup.block_count * block;
        if need > have {
            return Err(SetupError::TooSmall { nsid: self.setup.members.first().copied().unwrap_or(0), have, need });
        }
        let have = self.pool_blocks * u64::from(self.pool.block_bytes);
        let need = self.extents.data.len() as u64;
        if need > have { Err(SetupError::TooSmall { nsid: self.pool.nsid, have, need }) } else { Ok(()) }
    }

    /// The number of threads that does a write and a read of some of the data in the least time.
    fn shape(&mut self, way: Way, given: Option<usize>, bar: &ProgressBar) -> Result<Shape, ToolError> {
        let available = match way {
            Way::HostSide => self.host_queues.len(),
            Way::Offloaded => self.pool_queues.len(),
        };
        let outstanding = self.outstanding;
        let shape = |threads| Shape { threads, outstanding };
        if let Some(threads) = given {
            return Ok(shape(threads.clamp(1, available.max(1))));
        }
        let trial = self.extents.first(TRIAL_BYTES);
        let candidates = THREADS_TRIED.into_iter().filter(|t| *t <= available.min(outstanding)).map(shape);
        let mut best: Option<(f64, Shape)> = None;
        for candidate in candidates.collect::<Vec<_>>() {
            // The first of two warms the path up.
            self.one_run(way, 0, candidate, trial)?;
            let (run, ..) = self.one_run(way, 0, candidate, trial)?;
            let elapsed = run.write.elapsed_s + run.read.elapsed_s;
            if best.is_none_or(|(least, _)| elapsed < least) {
                best = Some((elapsed, candidate));
            }
            bar.inc(1);
        }
        Ok(best.map_or(shape(1), |(_, shape)| shape))
    }

    fn one_run(
        &mut self,
        way: Way,
        round: usize,
        shape: Shape,
        extents: Extents<'_>,
    ) -> Result<(Run, Latencies, Latencies), ToolError> {
        match way {
            Way::HostSide => self.host_side_run(round, shape, extents),
            Way::Offloaded => self.offloaded_run(round, shape, extents),
        }
    }

    fn host_side_run(
        &mut self,
        round: usize,
        shape: Shape,
        extents: Extents<'_>,
    ) -> Result<(Run, Latencies, Latencies), ToolError> {
        let streams = (0..shape.threads).map(|i| HostStream::new(&self.setup, i, shape.threads));
        let mut streams = streams.collect::<Result<Vec<_>, _>>()?;
        let step = shape.threads;
        let (write, written) = measure(self.service, &mut (&mut self.host_queues, &mut streams), host_wire, |c| {
            in_threads(c.0.iter_mut().zip(c.1.iter_mut()), |index, (queue, stream)| {
                stream.write(&extents, (index, step), shape.per_thread(), queue)
            })
        })?;
        let (read, read_latencies) =
            measure(self.service, &mut (&mut self.host_queues, &mut streams), host_wire, |c| {
                in_threads(c.0.iter_mut().zip(c.1.iter_mut()), |index, (queue, stream)| {
                    stream.read(&extents, (index, step), shape.per_thread(), queue)
                })
            })?;
        let at_rest_per_byte = write.record_per_byte.map(|records| records * self.expansion());
        Ok((Run { way: Way::HostSide, round, write, read, at_rest_per_byte }, written, read_latencies))
    }

    fn offloaded_run(
        &mut self,
        round: usize,
        shape: Shape,
        extents: Extents<'_>,
    ) -> Result<(Run, Latencies, Latencies), ToolError> {
        let blocks = (extents.data.len() / self.pool.block_bytes as usize) as u64;
        if self.pool.slba + blocks > self.pool_blocks {
            self.pool.slba = 0;
        }
        let area = self.pool;
        let step = shape.threads;
        let before = self.service.volume(self.pool_nqn, area.nsid)?;
        let phase = |queues: &mut Vec<IoQueue>, writing| {
            measure(
                self.service,
                queues,
                |q| pool_wire(q),
                |queues| {
                    in_threads(queues.iter_mut().take(step), |index, queue| {
                        offloaded::run(area, writing, &extents, (index, step), shape.per_thread(), queue)
                    })
                },
            )
        };
        let (write, written) = phase(&mut self.pool_queues, true)?;
        let after = self.service.volume(self.pool_nqn, area.nsid)?;
        let (read, read_latencies) = phase(&mut self.pool_queues, false)?;
        self.pool.slba += blocks;
        let at_rest_per_byte = before.zip(after).and_then(|(before, after)| {
            let used = after.used_bytes.checked_sub(before.used_bytes)?;
            let stored = after.stored_bytes.checked_sub(before.stored_bytes)?;
            // Overwritten blocks would count on neither side: no figure then.
            let fresh = used == extents.data.len() as u64;
            fresh.then(|| stored as f64 * self.expansion() / used as f64)
        });
        Ok((Run { way: Way::Offloaded, round, write, read, at_rest_per_byte }, written, read_latencies))
    }
}

type HostContext<'a> = (&'a mut Vec<IoQueue>, &'a mut Vec<HostStream>);

fn host_wire(context: &HostContext<'_>) -> WireBytes {
    pool_wire(context.0)
}

fn pool_wire(queues: &[IoQueue]) -> WireBytes {
    queues.iter().map(IoQueue::wire).fold(WireBytes::default(), WireBytes::plus)
}

/// One thread for each item; the first error ends it.
fn in_threads<T: Send>(
    items: impl Iterator<Item = T>,
    work: impl Fn(usize, T) -> Result<ThreadResult, ToolError> + Sync,
) -> Result<Vec<ThreadResult>, ToolError> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items.enumerate().map(|(index, item)| scope.spawn(move || work(index, item))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
