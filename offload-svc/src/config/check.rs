//! What a configuration must fulfil beyond the form of each value: ranges, references, the machine.
//!
//! Owns the rules between keys. Must not start or create anything. Invariant: all problems are found in one go, each
//! with its key, its value and what to do.

use std::collections::HashMap;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use tracing_subscriber::EnvFilter;

use super::error::{Origin, Problem, Reason};
use super::load::{Sources, nearest};
use super::machine::Machine;
use super::names::NameError;
use super::schema::{Config, Namespace, Subsystem};
use super::values::{BackendSpec, BlockSize, ByteSize, MemberSpec};
use crate::pool::options::replay_segments_min;

/// Subsystems that a configuration may have.
pub const MAX_SUBSYSTEMS: usize = 1024;
/// Namespaces of one subsystem.
pub const MAX_NAMESPACES: usize = 1024;
/// The highest namespace id (NN).
pub const MAX_NSID: u32 = 1024;
/// Hosts in one allow list.
pub const MAX_HOSTS: usize = 4096;
/// Listeners.
pub const MAX_LISTENERS: usize = 64;
/// Spares of a pool.
pub const MAX_SPARES: usize = 32;
/// Volumes of a pool.
pub const MAX_VOLUMES: usize = 1024;

/// What a socket's path may have (unix(7)), the zero at its end not counted.
const SOCKET_PATH_BYTES: usize = 107;
/// What the name has in addition while it is not yet the socket's: a dot and a process id.
const SOCKET_SUFFIX_BYTES: usize = 11;

/// Everything that is wrong with `config` on this machine.
pub fn check(config: &Config, sources: &Sources, machine: &Machine) -> Vec<Problem> {
    let mut checker = Checker { config, sources, machine, problems: Vec::new() };
    checker.service();
    checker.reactors();
    checker.sizes();
    checker.pool();
    checker.members();
    checker.volumes();
    checker.subsystems();
    checker.listeners();
    checker.problems
}

struct Checker<'a> {
    config: &'a Config,
    sources: &'a Sources,
    machine: &'a Machine,
    problems: Vec<Problem>,
}

impl Checker<'_> {
    fn report(&mut self, path: &[&str], reason: Reason) {
        self.problems.push(self.sources.problem(path, reason));
    }

    fn range(&mut self, path: &[&str], value: u64, min: u64, max: u64) {
        if !(min..=max).contains(&value) {
            self.report(path, Reason::OutOfRange { min, max });
        }
    }

    fn size(&mut self, path: &[&str], value: ByteSize, unit: ByteSize, min: ByteSize, max: ByteSize) {
        if let Err(reason) = size(value, unit, min, max) {
            self.report(path, reason);
        }
    }

    fn power_of_two(&mut self, path: &[&str], value: u64) {
        if !value.is_power_of_two() {
            let above = value.checked_next_power_of_two().unwrap_or(1 << 63);
            self.report(path, Reason::NotPowerOfTwo { below: above / 2, above });
        }
    }

    fn service(&mut self) {
        let service = &self.config.service;
        if let Err(error) = EnvFilter::builder().parse(&service.log) {
            self.report(&["service", "log"], Reason::LogFilter(Box::new(error)));
        }
        self.file_name(&["service", "socket"], &service.socket);
        // sockaddr_un has room for so many bytes and the zero that ends them (unix(7)); the service first binds a longer name.
        let room = SOCKET_PATH_BYTES - SOCKET_SUFFIX_BYTES;
        if service.socket.as_os_str().len() > room {
            self.report(&["service", "socket"], Reason::TooLongPath { max: room });
        }
        if let Some(state) = &service.state {
            self.file_name(&["service", "state"], state);
        }
        self.range(&["service", "drain_timeout_ms"], service.drain_timeout_ms, 100, 600_000);
    }

    /// A path that a file can have.
    fn file_name(&mut self, key: &[&str], path: &Path) {
        if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            self.report(key, Reason::NotAFilePath);
        } else if path.is_dir() {
            self.report(key, Reason::Folder);
        }
    }

    fn reactors(&mut self) {
        let reactors = &self.config.reactors;
        if let Some(cpus) = &reactors.cpus {
            for cpu in cpus.0.iter().filter(|cpu| !self.machine.cpus.contains(cpu)) {
                let reason = Reason::CpuUnavailable { cpu: *cpu, have: self.machine.cpu_list() };
                self.report(&["reactors", "cpus"], reason);
            }
            if reactors.count != 0 && usize::from(reactors.count) != cpus.0.len() {
                self.report(&["reactors", "count"], Reason::CountAgainstCpus { listed: cpus.0.len() });
            }
        } else if usize::from(reactors.count) > self.machine.cpus.len() {
            let reason = Reason::MoreReactorsThanCpus { have: self.machine.cpu_list(), max: self.machine.cpus.len() };
            self.report(&["reactors", "count"], reason);
        }
        self.range(&["reactors", "spin_us"], reactors.spin_us, 0, 1_000_000);
        self.range(&["reactors", "ring_slots"], reactors.ring_slots.into(), 64, 65_536);
        self.power_of_two(&["reactors", "ring_slots"], reactors.ring_slots.into());
    }

    fn sizes(&mut self) {
        let limits = &self.config.limits;
        let (page, mib) = (ByteSize::kib(4), ByteSize::mib(1));
        self.size(&["buffers", "memory"], self.config.buffers.memory, page, ByteSize::mib(16), ByteSize::gib(1024));
        self.range(&["limits", "hosts"], limits.hosts.into(), 1, 4096);
        self.range(&["limits", "queues"], limits.queues.into(), 1, 128);
        self.range(&["limits", "queue_depth"], limits.queue_depth.into(), 2, 4096);
        // IOCCSZ counts in units of 16 bytes (NVMe-oF 1.1 §4.1); a capsule's data is placed in whole blocks.
        self.size(&["limits", "in_capsule"], limits.in_capsule, ByteSize(512), ByteSize(0), mib);
        self.size(&["limits", "mdts"], limits.mdts, page, page, mib);
        self.power_of_two(&["limits", "mdts"], limits.mdts.bytes());
        self.range(&["limits", "connect_timeout_ms"], limits.connect_timeout_ms, 100, 120_000);
        self.range(&["limits", "slow_reader_timeout_ms"], limits.slow_reader_timeout_ms, 100, 600_000);
    }

    fn pool(&mut self) {
        let pool = &self.config.pool;
        if pool.members.is_empty() {
            return;
        }
        self.file_name(&["pool", "key_file"], &pool.key_file);
        if let Some(anchor) = &pool.anchor {
            self.file_name(&["pool", "anchor"], anchor);
        }
        self.range(&["pool", "k"], pool.k.into(), 1, 31);
        self.range(&["pool", "m"], pool.m.into(), 1, 31);
        let sum = u16::from(pool.k) + u16::from(pool.m);
        if sum > 32 {
            self.report(&["pool", "m"], Reason::TooWide { sum });
        } else if usize::from(sum) != pool.members.len() {
            let (have, want) = (pool.members.len(), usize::from(sum));
            self.report(&["pool", "members"], Reason::MemberCount { have, want, k: pool.k, m: pool.m });
        }
        let (kib64, mib64) = (ByteSize::kib(64), ByteSize::mib(64));
        self.size(&["pool", "segment_size"], pool.segment_size, kib64, ByteSize::mib(1), mib64);
        let least = ByteSize(pool.layout().member_bytes_min().next_multiple_of(1 << 20));
        self.size(&["pool", "member_size"], pool.member_size, ByteSize::kib(4), least, ByteSize(1 << 54));
        self.size(&["pool", "map_memory"], pool.map_memory, ByteSize::kib(4), ByteSize::mib(1), ByteSize::gib(1024));
        self.range(&["pool", "spare_after_ms"], pool.spare_after_ms, 100, 86_400_000);
        if pool.spares.len() > MAX_SPARES {
            self.report(&["pool", "spares"], Reason::OutOfRange { min: 0, max: MAX_SPARES as u64 });
        }
        self.range(&["pool", "member_timeout_ms"], pool.member_timeout_ms, 10, 60_000);
        self.range(&["pool", "slow_read_ms"], pool.slow_read_ms, 0, 60_000);
        self.range(&["pool", "scrub_interval_s"], pool.scrub_interval_s, 0, 366 * 86_400);
        self.range(&["pool", "foreground_p99_ms"], pool.foreground_p99_ms, 1, 60_000);
        self.range(&["pool", "checkpoint_interval_ms"], pool.checkpoint_interval_ms, 100, 3_600_000);
        self.replay_segments();
    }

    fn replay_segments(&mut self) {
        let key = ["pool", "max_replay_segments"];
        let given = u64::from(self.config.pool.max_replay_segments);
        let reactors = super::reactor_count(self.config, self.machine);
        let least = replay_segments_min(reactors);
        self.range(&key, given, 4, 65_536);
        if (4..least).contains(&given) {
            self.report(&key, Reason::ReplaySegments { given, reactors, least });
        }
    }

    fn members(&mut self) {
        let mut first: HashMap<PathBuf, (&str, usize)> = HashMap::new();
        let members = self.config.pool.members.iter().enumerate().map(|(index, member)| ("members", index, member));
        let spares = self.config.pool.spares.iter().enumerate().map(|(index, member)| ("spares", index, member));
        for (list, index, member) in members.chain(spares) {
            let position = index.to_string();
            let key = ["pool", list, position.as_str()];
            if let Some(path) = member.path()
                && let Some((list, earlier)) = first.insert(same_path(path), (list, index))
            {
                let advice = "each member has a file or device of its own";
                self.report(&key, Reason::Duplicate { first: format!("pool.{list}[{earlier}]"), advice });
                continue;
            }
            match member {
                MemberSpec::Block(path) => self.block_device(&key, path),
                MemberSpec::File(path) => self.file(&key, path),
                MemberSpec::Mem(size) => {
                    let least = ByteSize(self.config.pool.layout().member_bytes_min().next_multiple_of(1 << 20));
                    self.size(&key, *size, ByteSize::kib(4), least, ByteSize(1 << 54));
                }
            }
        }
    }

    /// Whether so many members are there that a pool could be on them. A spare may have taken the place of one that is gone.
    fn may_hold_a_pool(&self) -> bool {
        let pool = &self.config.pool;
        let there =
            pool.members.iter().chain(&pool.spares).filter(|member| member.path().is_some_and(Path::exists)).count();
        there >= usize::from(pool.k.max(1))
    }

    fn block_device(&mut self, key: &[&str], path: &Path) {
        let reason = match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => return,
            Ok(_) => Reason::NotBlockDevice { path: path.display().to_string() },
            // A device that died must not keep the rest from serving: the pool says what it lacks.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && self.may_hold_a_pool() => return,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Reason::NoSuchDevice { have: self.machine.block_devices.clone() }
            }
            Err(error) => Reason::Path(error),
        };
        self.report(key, reason);
    }

    fn file(&mut self, key: &[&str], path: &Path) {
        let reason = match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_file() => return,
            Ok(_) => Reason::NotFile { path: path.display().to_string() },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
            Err(error) => Reason::Path(error),
        };
        self.report(key, reason);
    }

    fn volumes(&mut self) {
        let volumes = &self.config.volumes;
        if !volumes.is_empty() && self.config.pool.members.is_empty() {
            self.problems.push(self.sources.problem_at_key(&["volume", "0"], Reason::NoPool));
        }
        self.count(&["volume"], volumes.len(), MAX_VOLUMES);
        let mut first = HashMap::new();
        for (index, volume) in volumes.iter().enumerate() {
            let position = index.to_string();
            if let Some(earlier) = first.insert(&volume.name, index) {
                let advice = "each volume has a name of its own";
                let first = self.sources.shown(&["volume", &earlier.to_string(), "name"]);
                let reason = Reason::Duplicate { first, advice };
                self.report(&["volume", &position, "name"], reason);
            }
            if let Err(reason) = volume_size(volume.size, volume.block_size) {
                self.report(&["volume", &position, "size"], reason);
            }
        }
    }

    fn subsystems(&mut self) {
        let subsystems = &self.config.subsystems;
        self.count(&["subsystem"], subsystems.len(), MAX_SUBSYSTEMS);
        let mut first = HashMap::new();
        let mut backends = HashMap::new();
        for (index, subsystem) in subsystems.iter().enumerate() {
            let position = index.to_string();
            let nqn = ["subsystem", position.as_str(), "nqn"];
            if subsystem.nqn.wire().is_discovery() {
                self.report(&nqn, Reason::Name(NameError::Discovery));
            }
            if let Some(earlier) = first.insert(&subsystem.nqn, index) {
                let advice = "each subsystem has an NQN of its own";
                let first = self.sources.shown(&["subsystem", &earlier.to_string(), "nqn"]);
                self.report(&nqn, Reason::Duplicate { first, advice });
            }
            self.hosts(&position, subsystem);
            self.namespaces(&position, subsystem, &mut backends);
        }
    }

    fn hosts(&mut self, position: &str, subsystem: &Subsystem) {
        self.count(&["subsystem", position, "hosts"], subsystem.hosts.len(), MAX_HOSTS);
        let key = ["subsystem", position, "hosts"];
        // One that was made at run time may get its hosts later.
        if matches!(self.sources.origin(&key), Origin::RunTime { .. }) {
            return;
        }
        match (subsystem.allow_any_host, subsystem.hosts.is_empty()) {
            (true, false) => self.report(&key, Reason::HostsAndAny),
            (false, true) => self.problems.push(self.sources.problem_at_key(&key, Reason::NoHosts)),
            _ => {}
        }
    }

    fn namespaces<'c>(
        &mut self,
        position: &str,
        subsystem: &'c Subsystem,
        backends: &mut HashMap<&'c BackendSpec, String>,
    ) {
        self.count(&["subsystem", position, "namespace"], subsystem.namespaces.len(), MAX_NAMESPACES);
        let mut first = HashMap::new();
        for (index, namespace) in subsystem.namespaces.iter().enumerate() {
            let place = index.to_string();
            let at = |key| ["subsystem", position, "namespace", place.as_str(), key];
            self.range(&at("nsid"), namespace.nsid.into(), 1, MAX_NSID.into());
            if let Some(earlier) = first.insert(namespace.nsid, index) {
                let advice = "each namespace of a subsystem has an id of its own";
                let first = self.sources.shown(&["subsystem", position, "namespace", &earlier.to_string(), "nsid"]);
                self.report(&at("nsid"), Reason::Duplicate { first, advice });
            }
            // The same bytes under two names would have two UUIDs, or one UUID twice in a host (H50).
            let shown = self.sources.shown(&at("backend"));
            if !matches!(namespace.backend, BackendSpec::Mem(_))
                && let Some(first) = backends.insert(&namespace.backend, shown)
            {
                let advice = "a back end serves one namespace; give the hosts access to that one";
                self.report(&at("backend"), Reason::Duplicate { first, advice });
            }
            self.backend(&at("backend"), &at("block_size"), namespace);
        }
    }

    fn backend(&mut self, backend: &[&str], block_size: &[&str], namespace: &Namespace) {
        match &namespace.backend {
            BackendSpec::Pool(_) if self.config.pool.members.is_empty() => self.report(backend, Reason::NoPool),
            BackendSpec::Pool(volume) => {
                // A volume made with offloadctl isn't in the file: whether it exists is known once the pool is mounted.
                if let Err(error) = super::names::check_volume_name(volume) {
                    self.report(backend, Reason::Name(error));
                }
                if namespace.block_size.is_some() {
                    self.report(block_size, Reason::BlockSizeOfVolume);
                }
            }
            BackendSpec::Mem(size) => {
                if let Err(reason) = memory_size(*size, namespace.block_size) {
                    self.report(backend, reason);
                }
            }
            BackendSpec::File(path) => match std::fs::metadata(path) {
                Ok(found) if found.file_type().is_file() => {}
                Ok(_) => self.report(backend, Reason::NotFile { path: path.display().to_string() }),
                Err(error) => self.report(backend, Reason::Path(error)),
            },
            BackendSpec::Block(path) => self.block_device(backend, path),
        }
    }

    fn listeners(&mut self) {
        let listeners = &self.config.listeners;
        self.count(&["listener"], listeners.len(), MAX_LISTENERS);
        let mut first = HashMap::new();
        for (index, listener) in listeners.iter().enumerate() {
            let position = index.to_string();
            self.range(&["listener", &position, "port"], listener.port.into(), 1, 65_535);
            if let Some(earlier) = first.insert((&listener.address, listener.port), index) {
                let advice = "each listener has an address and port of its own";
                let reason =
                    Reason::Duplicate { first: self.sources.shown(&["listener", &earlier.to_string()]), advice };
                self.report(&["listener", &position, "address"], reason);
            }
            if let Err(error) = listener.address.socket(listener.port) {
                self.report(&["listener", &position, "address"], Reason::Path(error));
            }
        }
    }

    fn count(&mut self, path: &[&str], have: usize, max: usize) {
        if have > max {
            self.problems.push(self.sources.problem_at_key(path, Reason::TooMany { have, max }));
        }
    }
}

/// One path of all that lead to the same file, as far as there is a file or a folder for it.
fn same_path(path: &Path) -> PathBuf {
    if let Ok(there) = path.canonicalize() {
        return there;
    }
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (absolute.parent().map(Path::canonicalize), absolute.file_name()) {
        (Some(Ok(folder)), Some(name)) => folder.join(name),
        _ => absolute,
    }
}

fn size(value: ByteSize, unit: ByteSize, min: ByteSize, max: ByteSize) -> Result<(), Reason> {
    if !(min..=max).contains(&value) {
        Err(Reason::SizeOutOfRange { min, max })
    } else if !value.bytes().is_multiple_of(unit.bytes()) {
        Err(Reason::NotMultiple { unit })
    } else {
        Ok(())
    }
}

/// The size of a `mem:` namespace: the rule of the configuration and of changes at run time.
pub fn memory_size(value: ByteSize, block_size: Option<BlockSize>) -> Result<(), Reason> {
    let unit = ByteSize(block_size.unwrap_or(BlockSize::B4096).bytes().into());
    size(value, unit, ByteSize::mib(1), ByteSize(1 << 50))
}

/// The size of a volume: likewise.
pub fn volume_size(value: ByteSize, block_size: BlockSize) -> Result<(), Reason> {
    size(value, ByteSize(block_size.bytes().into()), ByteSize::mib(1), ByteSize(1 << 54))
}

/// A volume's origin that the pool doesn't have.
pub fn missing_origin(sources: &Sources, volume: usize, have: Vec<String>) -> Problem {
    sources.problem(&["volume", &volume.to_string(), "origin"], Reason::NoSuchOrigin { have })
}

/// A volume that a namespace names but that neither the configuration nor the pool has.
pub fn missing_volume(sources: &Sources, subsystem: usize, namespace: usize, volume: &str, have: &[String]) -> Problem {
    let (subsystem, namespace) = (subsystem.to_string(), namespace.to_string());
    let path = ["subsystem", subsystem.as_str(), "namespace", namespace.as_str(), "backend"];
    let nearest = nearest(volume, have.iter().map(String::as_str)).map(str::to_owned);
    sources.problem(&path, Reason::NoSuchVolume { nearest, have: have.to_vec() })
}
