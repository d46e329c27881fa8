//! What both ways have in common: the application's writes and reads, and what is measured of them.
//!
//! Owns the cut of the data into extents and the readings before and after a phase. Must not know how either way stores
//! data. Invariant: both ways move the same extents, with the same number outstanding, and are measured by the same clocks.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::service::Service;
use crate::cpu::{self, CpuTime, ThreadTimes};
use crate::error::ToolError;
use crate::initiator::WireBytes;
use crate::stats::{Latencies, LatencySummary, megabytes_per_second, ratio};

/// The application's data as extents, each written and read by one request.
#[derive(Debug, Clone, Copy)]
pub struct Extents<'a> {
    /// All bytes; a multiple of 4 KiB.
    pub data: &'a [u8],
    /// Bytes of one extent; the last may be shorter.
    pub extent_bytes: usize,
}

impl<'a> Extents<'a> {
    /// How many.
    pub fn count(&self) -> usize {
        self.data.len().div_ceil(self.extent_bytes.max(1))
    }

    /// The bytes of extent `index`; empty beyond the last.
    pub fn get(&self, index: usize) -> &'a [u8] {
        let start = index.saturating_mul(self.extent_bytes).min(self.data.len());
        let end = start.saturating_add(self.extent_bytes).min(self.data.len());
        self.data.get(start..end).unwrap_or_default()
    }

    /// The first extents, at most `bytes` long.
    pub fn first(&self, bytes: usize) -> Self {
        let count = (bytes / self.extent_bytes.max(1)).max(1);
        let end = count.saturating_mul(self.extent_bytes).min(self.data.len());
        Self { data: self.data.get(..end).unwrap_or_default(), ..*self }
    }
}

/// How the work of a phase is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// Threads, each with a connection of its own.
    pub threads: usize,
    /// Extents outstanding, of all threads together.
    pub outstanding: usize,
}

impl Shape {
    /// Extents outstanding per thread.
    pub fn per_thread(&self) -> usize {
        (self.outstanding / self.threads.max(1)).max(1)
    }
}

/// What one thread did in a phase.
#[derive(Debug, Clone, Default)]
pub struct ThreadResult {
    /// One entry an extent.
    pub latencies: Latencies,
    /// Bytes of the application that were moved.
    pub user_bytes: u64,
    /// Bytes that were written to namespaces (0 in a read phase).
    pub written_bytes: u64,
    /// Bytes of the records among them, without headers of shards, padding and parity (0 where the host makes none).
    pub record_bytes: u64,
    /// Bytes that were read and found equal to what was written.
    pub verified_bytes: u64,
    /// Bytes of extents that were not.
    pub mismatched_bytes: u64,
}

impl ThreadResult {
    fn merge(&mut self, other: &Self) {
        self.latencies.merge(&other.latencies);
        self.user_bytes += other.user_bytes;
        self.written_bytes += other.written_bytes;
        self.record_bytes += other.record_bytes;
        self.verified_bytes += other.verified_bytes;
        self.mismatched_bytes += other.mismatched_bytes;
    }
}

/// The clocks and counters at one moment.
#[derive(Debug, Clone)]
struct Reading {
    at: Instant,
    host: CpuTime,
    service: Option<ThreadTimes>,
    machine: Duration,
    service_writes: Option<u64>,
    wire: WireBytes,
}

/// Figures of one phase of one round.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    /// Application bytes moved.
    pub user_bytes: u64,
    /// Wall-clock time in seconds.
    pub elapsed_s: f64,
    /// 10^6 application bytes per second.
    pub mb_per_s: Option<f64>,
    /// CPU seconds of the host process per 10^9 application bytes, the kernel's share included.
    pub host_core_s_per_gb: Option<f64>,
    /// The same of the service's process.
    pub service_core_s_per_gb: Option<f64>,
    /// The same of everything else on the machine: kernel threads, interrupts, other programs.
    pub rest_core_s_per_gb: Option<f64>,
    /// PDU bytes from host to target per application byte.
    pub wire_sent_per_byte: Option<f64>,
    /// PDU bytes from target to host per application byte.
    pub wire_received_per_byte: Option<f64>,
    /// Bytes that the service's process wrote to storage per application byte (/proc/PID/io).
    pub storage_written_per_byte: Option<f64>,
    /// Bytes that the host wrote to namespaces per application byte.
    pub namespace_written_per_byte: Option<f64>,
    /// Of these, bytes of records that the host made, without parity, padding and headers of shards.
    pub record_per_byte: Option<f64>,
    /// Latencies of extents.
    pub latency_us: Option<LatencySummary>,
    /// Bytes read and found right.
    pub verified_bytes: u64,
    /// Bytes read and found wrong.
    pub mismatched_bytes: u64,
}

/// Measures `work`, which returns what each thread did and is given nothing: it owns its queues. `wire` reads the counters
/// of all connections that take part.
pub fn measure<C>(
    service: &Service,
    context: &mut C,
    wire: impl Fn(&C) -> WireBytes,
    work: impl FnOnce(&mut C) -> Result<Vec<ThreadResult>, ToolError>,
) -> Result<(Phase, Latencies), ToolError> {
    let before = read_all(service, wire(context))?;
    let threads = work(context)?;
    let after = read_all(service, wire(context))?;
    let mut total = ThreadResult::default();
    threads.iter().for_each(|t| total.merge(t));
    Ok((phase(&before, &after, &total), total.latencies))
}

fn read_all(service: &Service, wire: WireBytes) -> Result<Reading, ToolError> {
    Ok(Reading {
        service: service.cpu()?,
        service_writes: service.storage_written_bytes(),
        machine: cpu::of_machine()?,
        host: cpu::own()?,
        wire,
        at: Instant::now(),
    })
}

fn phase(before: &Reading, after: &Reading, total: &ThreadResult) -> Phase {
    let elapsed = after.at.duration_since(before.at);
    let bytes = total.user_bytes as f64;
    let per_gb = |time: Duration| ratio(time.as_secs_f64(), bytes / 1e9);
    let host = after.host.since(&before.host).total();
    let service = after.service.as_ref().zip(before.service.as_ref()).map(|(a, b)| a.since(b));
    let machine = after.machine.saturating_sub(before.machine);
    let rest = machine.saturating_sub(host + service.unwrap_or_default());
    let wire = after.wire.since(before.wire);
    let writes = after.service_writes.zip(before.service_writes).map(|(a, b)| a.saturating_sub(b));
    Phase {
        user_bytes: total.user_bytes,
        elapsed_s: elapsed.as_secs_f64(),
        mb_per_s: megabytes_per_second(total.user_bytes, elapsed),
        host_core_s_per_gb: per_gb(host),
        service_core_s_per_gb: service.and_then(per_gb),
        rest_core_s_per_gb: service.and_then(|_| per_gb(rest)),
        wire_sent_per_byte: ratio(wire.sent as f64, bytes),
        wire_received_per_byte: ratio(wire.received as f64, bytes),
        storage_written_per_byte: writes.and_then(|w| ratio(w as f64, bytes)),
        namespace_written_per_byte: ratio(total.written_bytes as f64, bytes),
        record_per_byte: ratio(total.record_bytes as f64, bytes),
        latency_us: total.latencies.summary(),
        verified_bytes: total.verified_bytes,
        mismatched_bytes: total.mismatched_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_cover_the_data_once() {
        let data: Vec<u8> = (0..20_480u32).map(|i| i as u8).collect();
        let extents = Extents { data: &data, extent_bytes: 8192 };
        assert_eq!(extents.count(), 3);
        let joined: Vec<u8> = (0..4).flat_map(|i| extents.get(i).to_vec()).collect();
        assert_eq!(joined, data);
        assert_eq!(extents.get(2).len(), 4096);
        assert_eq!(extents.first(10_000).data.len(), 8192);
        assert_eq!(extents.first(1).count(), 1);
    }

    #[test]
    fn figures_are_per_gigabyte_and_add_up() {
        let start = Instant::now();
        let seconds = |s: f64| Duration::from_secs_f64(s);
        let cpu = |s: f64| CpuTime { user: seconds(s), system: Duration::ZERO };
        let reading = |at, host, service, machine, sent| Reading {
            at,
            host: cpu(host),
            service: Some(ThreadTimes::at(seconds(service))),
            machine: seconds(machine),
            service_writes: Some(sent),
            wire: WireBytes { sent, received: 0 },
        };
        let before = reading(start, 1.0, 1.0, 10.0, 0);
        let after = reading(start + seconds(2.0), 1.5, 2.0, 12.0, 750_000_000);
        let total = ThreadResult { user_bytes: 500_000_000, ..ThreadResult::default() };
        let phase = phase(&before, &after, &total);
        assert_eq!(phase.mb_per_s, Some(250.0));
        assert_eq!(phase.host_core_s_per_gb, Some(1.0));
        assert_eq!(phase.service_core_s_per_gb, Some(2.0));
        assert_eq!(phase.rest_core_s_per_gb, Some(1.0));
        assert_eq!(phase.wire_sent_per_byte, Some(1.5));
        assert_eq!(phase.storage_written_per_byte, Some(1.5));
        assert_eq!(phase.latency_us, None);
        let nothing = super::phase(&before, &before, &ThreadResult::default());
        assert_eq!((nothing.mb_per_s, nothing.host_core_s_per_gb), (None, None), "no inf, no NaN (H160)");
    }
}
