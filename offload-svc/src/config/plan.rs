//! The memory plan: everything that grows with the configuration, summed before anything is started.
//!
//! Owns the formula, which `offload-svc --check` prints. Must not allocate any of it. Invariant: the total is the sum
//! of the lines, and a plan that doesn't fit what was found is refused with the setting that weighs most.

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use thiserror::Error;

use super::machine::{FoundMemory, Machine, MemoryBound};
use super::schema::Config;
use super::values::{BackendSpec, ByteSize, MemberSpec};
use crate::manage::server::{LARGE_BODIES, MAX_CONNECTIONS};
use crate::pool::memory_needs;

/// Bytes that an I/O queue's connection reads at once at most.
pub const QUEUE_STAGING_BYTES: u64 = 128 << 10;

/// What is allocated for things whose size the configuration doesn't set, in bytes.
///
/// Each figure is an upper bound that the module named in its comment keeps.
mod cost {
    use crate::manage::server::{MAX_BODY_BYTES, MAX_HEAD_BYTES, SMALL_BODY_BYTES};

    /// Code, runtime, metrics, log: the process with nothing configured.
    pub(super) const PROCESS: u64 = 48 << 20;
    /// Stack, executor, timers, io_uring and engine contexts of a reactor (`reactor`, `stages`).
    pub(super) const REACTOR: u64 = 8 << 20;
    /// A ring slot: one pointer.
    pub(super) const RING_SLOT: u64 = 8;
    /// A command's state on a queue, its completion included.
    pub(super) const COMMAND: u64 = 512;
    /// An admin queue: 32 commands of up to 4 KiB, log pages, connection.
    pub(super) const ADMIN_QUEUE: u64 = 256 << 10;
    /// A large body of the management API: as it comes, in one piece, and what is parsed of it (`manage`).
    pub(super) const LARGE_BODY: u64 = 4 * MAX_BODY_BYTES as u64;
    /// A connection of the management API: its buffer and a small body (`manage`).
    pub(super) const MANAGEMENT_CONNECTION: u64 = (MAX_HEAD_BYTES + SMALL_BODY_BYTES) as u64;
    /// A namespace, subsystem or volume in the registry.
    pub(super) const OBJECT: u64 = 8 << 10;
}

/// One line of the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    /// What the memory is for.
    pub what: &'static str,
    /// How it comes about, with the numbers.
    pub formula: String,
    /// The keys that change it.
    pub setting: &'static str,
    /// How much.
    pub bytes: u64,
}

/// The plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// What it is made of.
    pub lines: Vec<Line>,
    /// Their sum.
    pub total_bytes: u64,
    /// What may be taken.
    pub found_bytes: u64,
    /// What says so.
    pub found_in: String,
}

/// The plan does not fit.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("memory: needed {needed}, found {found} ({bound}): lower {setting}, which takes {takes}, or give more")]
pub struct Shortage {
    /// The total.
    pub needed: ByteSize,
    /// What there is.
    pub found: ByteSize,
    /// What bounds it.
    pub bound: String,
    /// The keys of the heaviest line.
    pub setting: &'static str,
    /// Its weight.
    pub takes: ByteSize,
}

impl MemoryPlan {
    /// Sums up what `config` takes, with `reactors` reactors.
    pub fn of(config: &Config, reactors: usize, machine: &Machine) -> Self {
        let found = found(config, machine);
        let mut plan =
            Self { lines: Vec::new(), total_bytes: 0, found_bytes: found.bytes, found_in: found.bound.to_string() };
        plan.add("process", "fixed".to_owned(), "service", cost::PROCESS);
        plan.management();
        plan.reactors(config, reactors as u64);
        plan.queues(config);
        plan.storage(config);
        plan
    }

    fn add(&mut self, what: &'static str, formula: String, setting: &'static str, bytes: u64) {
        self.total_bytes = self.total_bytes.saturating_add(bytes);
        self.lines.push(Line { what, formula, setting, bytes });
    }

    fn management(&mut self) {
        let (connections, bodies) = (MAX_CONNECTIONS as u64, LARGE_BODIES as u64);
        let (each, large) = (ByteSize(cost::MANAGEMENT_CONNECTION), ByteSize(cost::LARGE_BODY));
        let formula = format!("{connections} connections x {each} + {bodies} large bodies x {large}");
        let bytes = product(&[connections, each.0]) + product(&[bodies, large.0]);
        self.add("management API", formula, "service", bytes);
    }

    fn reactors(&mut self, config: &Config, reactors: u64) {
        let each = ByteSize(cost::REACTOR);
        self.add("reactors", format!("{reactors} x {each}"), "reactors.count", product(&[reactors, each.0]));
        let slots = config.reactors.ring_slots;
        let pairs = product(&[reactors, reactors.saturating_sub(1)]);
        let formula =
            format!("{reactors} x {} pairs x {slots} slots x {} B", reactors.saturating_sub(1), cost::RING_SLOT);
        let bytes = product(&[pairs, slots.into(), cost::RING_SLOT]);
        self.add("rings", formula, "reactors.ring_slots", bytes);
        let memory = config.buffers.memory;
        self.add("I/O buffers", "buffers.memory".to_owned(), "buffers.memory", memory.0);
    }

    fn queues(&mut self, config: &Config) {
        let limits = &config.limits;
        let (hosts, queues, depth) = (u64::from(limits.hosts), u64::from(limits.queues), u64::from(limits.queue_depth));
        let in_capsule = limits.in_capsule;
        self.add(
            "in-capsule data",
            format!("{hosts} hosts x {queues} queues x {depth} commands x {in_capsule}"),
            "limits.hosts, limits.queues, limits.queue_depth or limits.in_capsule",
            product(&[hosts, queues, depth, in_capsule.0]),
        );
        let staging = ByteSize(QUEUE_STAGING_BYTES);
        self.add(
            "I/O queues",
            format!("{hosts} hosts x {queues} queues x ({staging} + {depth} commands x {} B)", cost::COMMAND),
            "limits.hosts, limits.queues or limits.queue_depth",
            product(&[hosts, queues, staging.0 + depth * cost::COMMAND]),
        );
        let admin = ByteSize(cost::ADMIN_QUEUE);
        // As many discovery connections as associations may be there besides.
        self.add("admin queues", format!("2 x {hosts} x {admin}"), "limits.hosts", product(&[2, hosts, admin.0]));
    }

    fn storage(&mut self, config: &Config) {
        if !config.pool.members.is_empty() {
            let needs = memory_needs(&config.pool.layout(), &config.pool.mount_options());
            let formula = "3/4 for pages of maps, 1/4 for changes that are not in pages yet".to_owned();
            self.add("volumes' maps", formula, "pool.map_memory", needs.map_bytes_max);
        }
        let namespaces = config.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
        let plain = namespaces.clone().filter_map(|namespace| match namespace.backend {
            BackendSpec::Mem(size) => Some(size.0),
            _ => None,
        });
        let plain = plain.fold(0, u64::saturating_add);
        self.add("mem: namespaces", "their sizes".to_owned(), "subsystem.namespace.backend", plain);
        let members = config.pool.members.iter().chain(&config.pool.spares).filter_map(|member| match member {
            MemberSpec::Mem(size) => Some(size.0),
            _ => None,
        });
        let members = members.fold(0, u64::saturating_add);
        self.add("mem: members", "their sizes".to_owned(), "pool.members", members);
        let objects = (config.subsystems.len() + config.volumes.len() + namespaces.count()) as u64;
        let each = ByteSize(cost::OBJECT);
        self.add("objects", format!("{objects} x {each}"), "subsystems and volumes", product(&[objects, each.0]));
    }

    /// Checks the plan against what was found.
    ///
    /// # Errors
    /// If it doesn't fit.
    pub fn fits(&self) -> Result<(), Shortage> {
        if self.total_bytes <= self.found_bytes {
            return Ok(());
        }
        let heaviest = self.lines.iter().max_by_key(|line| line.bytes);
        let (setting, takes) = heaviest.map_or(("service", 0), |line| (line.setting, line.bytes));
        Err(Shortage {
            needed: rounded(self.total_bytes),
            found: rounded(self.found_bytes),
            bound: self.found_in.clone(),
            setting,
            takes: rounded(takes),
        })
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header(["memory for", "formula", "set by", "bytes"]);
        for line in &self.lines {
            table.add_row([
                line.what.to_owned(),
                line.formula.clone(),
                line.setting.to_owned(),
                line.bytes.to_string(),
            ]);
        }
        table.add_row(["total".to_owned(), String::new(), String::new(), self.total_bytes.to_string()]);
        table.add_row(["found".to_owned(), self.found_in.clone(), String::new(), self.found_bytes.to_string()]);
        if let Some(column) = table.column_mut(3) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.to_string()
    }
}

fn found(config: &Config, machine: &Machine) -> FoundMemory {
    let configured = config.service.memory.0;
    if configured != 0 && configured < machine.memory.bytes {
        return FoundMemory { bytes: configured, bound: MemoryBound::Configured };
    }
    machine.memory.clone()
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().copied().fold(1, u64::saturating_mul)
}

/// To whole MiB: what a person reads in one line.
fn rounded(bytes: u64) -> ByteSize {
    if bytes < 1 << 20 { ByteSize(bytes) } else { ByteSize(bytes >> 20 << 20) }
}
