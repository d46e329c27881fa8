//! `offload-bench`: its command line, and what each command sets up.
//!
//! Owns arguments, the choice of data, and the check that the namespaces fit. Must not know how anything is measured.
//! Invariant: what can be found to be wrong before the first byte is written is refused before it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use offload_svc::stages::cipher::Cipher;
use offload_svc::stages::compress::Compression;

use crate::cli::{Connect, parse_size};
use crate::compare::host_side::HostSetup;
use crate::compare::offloaded::PoolArea;
use crate::compare::report::{CompareReport, Setting};
use crate::compare::service::Service;
use crate::compare::workload::Extents;
use crate::compare::{Comparison, SetupError, THREADS_TRIED};
use crate::corpus::Corpus;
use crate::cpu;
use crate::error::ToolError;
use crate::exit;
use crate::initiator::{Controller, IoQueue, Namespace};
use crate::progress::{self, StopFlag};

/// Benchmarks of the offload: every figure with machine, workload, spread, and whether the bytes were right.
#[derive(Debug, Parser)]
#[command(name = "offload-bench", version)]
pub struct Cli {
    /// What to measure.
    #[command(subcommand)]
    pub command: Command,
}

/// What `offload-bench` measures.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// The same bytes two ways against a running service: processed on the host, and offloaded.
    Compare(Box<Compare>),
}

/// `offload-bench compare`.
#[derive(Debug, Args)]
pub struct Compare {
    /// The subsystem that has the pool namespace and the plain ones.
    #[command(flatten)]
    pub connect: Connect,
    /// The pool namespace: the offloaded way writes plain bytes to it. Its contents are overwritten.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub pool_namespace: u32,
    /// The plain namespaces, one per member: the host-side way writes shards to them. Their contents are overwritten.
    #[arg(long, default_value = "2-7", value_parser = parse_list)]
    pub member_namespaces: NamespaceList,
    /// The user's own data: a file or a folder; by default a mix that every machine has.
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// At most this much of it.
    #[arg(long, default_value = "64MiB", value_parser = parse_size)]
    pub size: u64,
    /// Seed of the generated part of the default mix.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Bytes of one application request.
    #[arg(long, default_value = "128KiB", value_parser = parse_size)]
    pub io_size: u64,
    /// Application requests outstanding, of all threads together.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub outstanding: u16,
    /// Rounds; both ways run in each.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub rounds: u16,
    /// Threads of the host-side way; by default the fastest of 1, 2 and 4.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub host_threads: Option<u16>,
    /// Threads (and queues) of the offloaded way; by default the fastest of 1, 2 and 4.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub offload_threads: Option<u16>,
    /// The service's management socket: gives its process, k and m, the volume's stages, and what is at rest.
    #[arg(long, env = "SLUICE_SERVICE__SOCKET")]
    pub socket: Option<PathBuf>,
    /// `offloadctl`, where it isn't beside this program or on the path.
    #[arg(long)]
    pub offloadctl: Option<PathBuf>,
    /// The service's process, to count its CPU time; by default what the management socket says.
    #[arg(long)]
    pub service_pid: Option<u32>,
    /// Data shards; by default the pool's.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=31))]
    pub k: Option<u8>,
    /// Parity shards; by default the pool's.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=31))]
    pub m: Option<u8>,
    /// Compression of the host-side way; by default the volume's.
    #[arg(long)]
    pub compression: Option<Compression>,
    /// Cipher of the host-side way; by default the volume's.
    #[arg(long, value_parser = parse_cipher)]
    pub cipher: Option<Cipher>,
    /// Also write the report to this file, as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// A build that isn't optimised can show that things work, not how fast.
const BUILD: &str = if cfg!(debug_assertions) { " (DEBUG BUILD: don't use these figures)" } else { "" };

/// Namespace ids, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceList(pub Vec<u32>);

/// `2-7` or `2,3,9`.
fn parse_list(text: &str) -> Result<NamespaceList, String> {
    let mut ids: Vec<u32> = Vec::new();
    let bad = || format!("{text}: write namespace ids as 2-7 or 2,3,9");
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().map_err(|_| bad())?, last.parse().map_err(|_| bad())?);
        if first == 0 || last < first || last - first > 31 {
            return Err(bad());
        }
        for id in first..=last {
            if ids.contains(&id) {
                return Err(format!("{text}: namespace {id} is there twice"));
            }
            ids.push(id);
        }
    }
    Ok(NamespaceList(ids))
}

fn parse_cipher(text: &str) -> Result<Cipher, String> {
    let known = || Cipher::ALL.iter().map(|c| c.name()).collect::<Vec<_>>().join(", ");
    Cipher::ALL.into_iter().find(|c| c.name() == text).ok_or_else(|| format!("no such cipher; known: {}", known()))
}

/// Carries the command out.
pub fn run(cli: Cli) -> Result<i32, ToolError> {
    let stop = StopFlag::on_signals().map_err(|source| ToolError::System { what: "catching signals", source })?;
    match cli.command {
        Command::Compare(args) => compare(&args, &stop),
    }
}

fn compare(args: &Compare, stop: &StopFlag) -> Result<i32, ToolError> {
    let service = Service::find(args.socket.as_deref(), args.offloadctl.as_deref(), args.service_pid)?;
    let limit = usize::try_from(args.size).unwrap_or(usize::MAX);
    let corpus = match &args.data {
        Some(path) => Corpus::from_path(path, limit)?,
        None => Corpus::default_mix(limit, args.seed),
    };
    let host = Controller::connect(&args.connect.options())?;
    let offload = Controller::connect(&args.connect.options())?;
    let pool = offload.namespace(args.pool_namespace)?;
    let setup = host_setup(args, &service, &host)?;
    let setting = setting(args, &service, &corpus, &setup);
    let mut comparison = Comparison {
        service: &service,
        pool_nqn: &args.connect.nqn,
        pool: PoolArea { nsid: pool.nsid, block_bytes: pool.block_bytes, slba: 0 },
        pool_blocks: pool.block_count,
        extents: Extents { data: &corpus.data, extent_bytes: extent_bytes(args, &pool)? },
        outstanding: usize::from(args.outstanding),
        host_queues: queues(&host, args.host_threads)?,
        pool_queues: queues(&offload, args.offload_threads)?,
        setup,
    };
    let trials = [args.host_threads, args.offload_threads].iter().filter(|t| t.is_none()).count() * THREADS_TRIED.len();
    let bar = progress::steps_bar("compare", trials as u64 + 2 * u64::from(args.rounds));
    let threads = |given: Option<u16>| given.map(usize::from);
    let (host_threads, offload_threads) = (threads(args.host_threads), threads(args.offload_threads));
    let measured = comparison.run(usize::from(args.rounds), host_threads, offload_threads, stop, &bar)?;
    bar.finish_and_clear();
    drop(comparison);
    let report = CompareReport::new(setting, measured);
    print!("{}", report.to_text());
    write_json(args, &report)?;
    for controller in [host, offload] {
        // The measurements are made; a target that went away since is no error.
        let _ = controller.disconnect();
    }
    Ok(match (report.all_right(), report.partial) {
        (_, true) if report.mismatched_bytes == [0, 0] => exit::INTERRUPTED,
        (true, false) => exit::OK,
        _ => exit::DATA_WRONG,
    })
}

fn queues(controller: &Controller, given: Option<u16>) -> Result<Vec<IoQueue>, ToolError> {
    let most = THREADS_TRIED.into_iter().max().unwrap_or(1);
    let wanted = given.map_or(most, usize::from);
    let granted = usize::from(controller.negotiate_queues(wanted as u16)?);
    if given.is_some_and(|given| usize::from(given) > granted) {
        return Err(SetupError::Queues { granted, needed: wanted }.into());
    }
    (1..=granted as u16).map(|qid| controller.open_io_queue(qid).map_err(ToolError::from)).collect()
}

fn extent_bytes(args: &Compare, pool: &Namespace) -> Result<usize, SetupError> {
    let bad = args.io_size == 0 || !args.io_size.is_multiple_of(4096) || args.io_size > pool.max_transfer_bytes;
    if bad {
        return Err(SetupError::IoSize { given: args.io_size, max_bytes: pool.max_transfer_bytes });
    }
    Ok(args.io_size as usize)
}

fn host_setup(args: &Compare, service: &Service, host: &Controller) -> Result<HostSetup, ToolError> {
    let (pool_k, pool_m) = service.pool_code()?.unwrap_or((4, 2));
    let (k, m) = (args.k.map_or(pool_k, usize::from), args.m.map_or(pool_m, usize::from));
    let members = args.member_namespaces.0.clone();
    if members.len() != k + m {
        return Err(SetupError::MemberCount { given: members.len(), k, m }.into());
    }
    let namespaces = members.iter().map(|&nsid| host.namespace(nsid)).collect::<Result<Vec<_>, _>>()?;
    let block_bytes = namespaces.first().map_or(0, |n| n.block_bytes);
    if let Some(odd) = namespaces.iter().find(|n| n.block_bytes != block_bytes) {
        let (nsid, found) = (odd.nsid, odd.block_bytes);
        return Err(SetupError::BlockSize { nsid, found, expected: block_bytes }.into());
    }
    let volume = service.volume(&args.connect.nqn, args.pool_namespace)?;
    let volume_compression = volume.as_ref().and_then(|v| v.compression.parse().ok());
    let volume_cipher = volume.as_ref().and_then(|v| parse_cipher(&v.cipher).ok());
    Ok(HostSetup {
        members,
        block_bytes,
        block_count: namespaces.iter().map(|n| n.block_count).min().unwrap_or(0),
        max_transfer_bytes: host.max_transfer_bytes() as usize,
        k,
        m,
        compression: args.compression.or(volume_compression).unwrap_or_default(),
        cipher: args.cipher.or(volume_cipher).unwrap_or_default(),
    })
}

fn setting(args: &Compare, service: &Service, corpus: &Corpus, setup: &HostSetup) -> Setting {
    let address = &args.connect.address;
    let pid =
        service.pid().map_or_else(|| "process unknown: no CPU figures of it".to_owned(), |p| format!("process {p}"));
    Setting {
        machine: cpu::describe_machine(),
        versions: format!("offload-bench {}{BUILD}", env!("CARGO_PKG_VERSION")),
        emulated: address.traddr.is_loopback() || service.pid().is_some(),
        target: format!("{} ({pid})", std::net::SocketAddr::new(address.traddr, address.trsvcid)),
        k: setup.k,
        m: setup.m,
        compression: setup.compression.to_string(),
        cipher: setup.cipher.name().to_owned(),
        data: corpus.parts.clone(),
        data_lines: corpus.describe(),
        data_bytes: corpus.data.len(),
        extent_bytes: args.io_size as usize,
        outstanding: usize::from(args.outstanding),
    }
}

fn write_json(args: &Compare, report: &CompareReport) -> Result<(), ToolError> {
    let Some(path) = &args.json else { return Ok(()) };
    let file_error = |source| ToolError::File { path: path.clone(), source };
    let text = serde_json::to_vec_pretty(report).map_err(|error| file_error(error.into()))?;
    std::fs::write(path, text).map_err(file_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
        crate::cli::Cli::command().debug_assert();
    }

    #[test]
    fn namespace_lists() {
        assert_eq!(parse_list("2-7"), Ok(NamespaceList(vec![2, 3, 4, 5, 6, 7])));
        assert_eq!(parse_list("9,3,4-5"), Ok(NamespaceList(vec![9, 3, 4, 5])));
        for bad in ["", "0", "5-2", "a", "1-2-3", "1-4000000000", "3,3", "2-4,3"] {
            assert!(parse_list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn stages_are_named_as_in_the_configuration() {
        let parse = |extra: &str| {
            let line = format!("offload-bench compare -a 127.0.0.1 -n nqn.2026-01.io.sluice:dev {extra}");
            Cli::try_parse_from(line.split_whitespace())
        };
        let Command::Compare(args) = parse("--compression zstd:3 --cipher aes-128-xts").unwrap().command;
        assert_eq!(args.cipher, Some(Cipher::Aes128Xts));
        assert_eq!(args.compression.unwrap().to_string(), "zstd:3");
        assert!(parse("--compression zip").is_err());
        let error = parse("--cipher rot13").unwrap_err().to_string();
        assert!(error.contains("known: aes-256-gcm"), "{error}");
    }
}
