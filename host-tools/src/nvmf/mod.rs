//! The commands of `nvmf`, each a function from its arguments to an exit code.
//!
//! Owns what is printed and with which code a run ends. Must not know PDUs. Invariants: results go to standard output,
//! all else to standard error; with `--json` standard output holds one JSON value and nothing else.

mod describe;
mod verify;

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::cli::{Cli, Command, Connect, Discover, Extent, Identify, Perf};
use crate::copy::{self, CopyPlan};
use crate::error::ToolError;
use crate::exit;
use crate::initiator::{Controller, IoQueue, Namespace, discovery};
use crate::perf::{self, Limit, PerfPlan};
use crate::progress::{self, StopFlag, Watch};

/// Commands in flight of `read` and `write`: enough to hide the network's delay, few enough to stay small.
const COPY_DEPTH: usize = 16;
/// Bytes a command of `read` and `write` moves at most.
const COPY_COMMAND_BYTES: u64 = 256 << 10;
/// How long `perf` runs when nothing is said.
const DEFAULT_PERF_TIME: Duration = Duration::from_secs(10);

/// Carries the command out.
pub fn run(cli: Cli) -> Result<i32, ToolError> {
    let stop = StopFlag::on_signals().map_err(|source| ToolError::System { what: "catching signals", source })?;
    match cli.command {
        Command::Discover(args) => discover(&args, cli.json),
        Command::Identify(args) => identify(&args, cli.json),
        Command::Read(args) => read(&args, &stop),
        Command::Write(args) => write(&args, &stop),
        Command::Verify(args) => verify::run(&args, cli.json, &stop),
        Command::Perf(args) => perf(&args, cli.json, &stop),
    }
}

fn discover(args: &Discover, json: bool) -> Result<i32, ToolError> {
    let options = args.address.options(nvmf_target::wire::nqn::DISCOVERY_NQN);
    let controller = Controller::connect(&options)?;
    let log = discovery::read(&controller)?;
    goodbye(controller);
    if json { print_json(&describe::discovery_json(&log)) } else { print_text(&describe::discovery_text(&log)) }
}

fn identify(args: &Identify, json: bool) -> Result<i32, ToolError> {
    let controller = Controller::connect(&args.connect.options())?;
    let nsids = match args.namespace_id {
        Some(nsid) => vec![nsid],
        None => controller.namespace_ids()?,
    };
    let mut namespaces = Vec::new();
    for nsid in nsids {
        let uuid = describe::uuid_of(&controller.namespace_descriptors(nsid)?);
        namespaces.push((controller.namespace(nsid)?, uuid));
    }
    let described = describe::Described::of(&controller, &namespaces);
    goodbye(controller);
    if json { print_json(&described) } else { print_text(&described.to_text()) }
}

/// An association with its queues, and the namespace to work on.
struct Session {
    controller: Controller,
    namespace: Namespace,
    queues: Vec<IoQueue>,
}

impl Session {
    fn open(connect: &Connect, nsid: u32) -> Result<Self, ToolError> {
        let controller = Controller::connect(&connect.options())?;
        let namespace = controller.namespace(nsid)?;
        let queues = controller.open_io_queues()?;
        if queues.len() < usize::from(connect.nr_io_queues) {
            eprintln!(
                "note: the controller grants {} I/O queues of the {} asked for",
                queues.len(),
                connect.nr_io_queues
            );
        }
        Ok(Self { controller, namespace, queues })
    }

    fn close(self) {
        drop(self.queues);
        goodbye(self.controller);
    }

    /// Blocks of a command of `bytes`, which `option` gave.
    fn command_blocks(&self, option: &'static str, bytes: u64) -> Result<u32, ToolError> {
        let block = u64::from(self.namespace.block_bytes);
        let max_bytes = self.namespace.max_transfer_bytes;
        let blocks = u32::try_from(bytes / block).unwrap_or(u32::MAX);
        if bytes == 0 || !bytes.is_multiple_of(block) || bytes > max_bytes || blocks > 1 << 16 {
            let block_bytes = self.namespace.block_bytes;
            return Err(ToolError::BadSize { option, given: bytes, block_bytes, max_bytes });
        }
        Ok(blocks)
    }

    /// How many blocks from `slba` on: as many as `bytes` holds, or all.
    fn blocks_from(&self, slba: u64, bytes: Option<u64>) -> Result<u64, ToolError> {
        let (nsid, size) = (self.namespace.nsid, self.namespace.size_bytes());
        let block = u64::from(self.namespace.block_bytes);
        let left = self.namespace.block_count.saturating_sub(slba);
        let wanted = bytes.map_or(left, |bytes| bytes / block);
        if wanted > left {
            let end = slba.saturating_add(wanted).saturating_mul(block);
            return Err(ToolError::BeyondEnd { what: "the range", end, nsid, size });
        }
        if wanted == 0 { Err(ToolError::EmptyRange) } else { Ok(wanted) }
    }
}

/// Ends the association in order; the work is done, so a target that has gone away meanwhile is no error.
fn goodbye(controller: Controller) {
    let _ = controller.disconnect();
}

fn copy_setup(connect: &Connect, extent: &Extent) -> Result<(Session, IoQueue, CopyPlan, u64), ToolError> {
    let mut connect = connect.clone();
    connect.nr_io_queues = 1;
    let mut session = Session::open(&connect, extent.namespace_id)?;
    let namespace = &session.namespace;
    let block = u64::from(namespace.block_bytes);
    let offset = extent.offset.unwrap_or_else(|| extent.start_block.unwrap_or(0).saturating_mul(block));
    let plan = CopyPlan {
        nsid: namespace.nsid,
        block_bytes: namespace.block_bytes,
        block_count: namespace.block_count,
        command_blocks: (COPY_COMMAND_BYTES.min(namespace.max_transfer_bytes) / block).max(1) as u32,
        depth: COPY_DEPTH,
    };
    let queue = session.queues.pop().ok_or(crate::initiator::ConnectionError::QueueFull)?;
    Ok((session, queue, plan, offset))
}

fn read(args: &crate::cli::Read, stop: &StopFlag) -> Result<i32, ToolError> {
    let (session, mut queue, plan, offset) = copy_setup(&args.connect, &args.extent)?;
    let len = args.data_size.unwrap_or_else(|| plan.size_bytes().saturating_sub(offset));
    let (mut out, path) = output(&args.data)?;
    let bar = progress::bytes_bar("read", len);
    let copied = copy::read(&plan, offset, len, &mut queue, &mut *out, &path, Watch { stop, bar: &bar })?;
    bar.finish_and_clear();
    drop(queue);
    session.close();
    Ok(ended("read", copied, copied < len))
}

fn write(args: &crate::cli::Write, stop: &StopFlag) -> Result<i32, ToolError> {
    let (session, mut queue, plan, offset) = copy_setup(&args.connect, &args.extent)?;
    let (mut input, path, len) = input(&args.data)?;
    let limit = args.data_size.unwrap_or(u64::MAX);
    let bar =
        len.map_or_else(|| progress::counter("written bytes:"), |len| progress::bytes_bar("write", len.min(limit)));
    let copied = copy::write(&plan, offset, limit, &mut queue, &mut *input, &path, Watch { stop, bar: &bar })?;
    bar.finish_and_clear();
    drop(queue);
    session.close();
    Ok(ended("wrote", copied, stop.is_set()))
}

fn ended(verb: &str, bytes: u64, partial: bool) -> i32 {
    let note = if partial { " (PARTIAL: interrupted)" } else { "" };
    eprintln!("{verb} {bytes} bytes{note}");
    if partial { exit::INTERRUPTED } else { exit::OK }
}

fn output(path: &Path) -> Result<(Box<dyn Write>, PathBuf), ToolError> {
    if path == Path::new("-") {
        return Ok((Box::new(io::BufWriter::with_capacity(1 << 20, io::stdout())), "standard output".into()));
    }
    let file = File::create(path).map_err(|source| ToolError::File { path: path.to_owned(), source })?;
    Ok((Box::new(file), path.to_owned()))
}

/// What to read from, its name, and its length where that is known.
type Input = (Box<dyn Read>, PathBuf, Option<u64>);

fn input(path: &Path) -> Result<Input, ToolError> {
    if path == Path::new("-") {
        return Ok((Box::new(io::stdin()), "standard input".into(), None));
    }
    let file = File::open(path).map_err(|source| ToolError::File { path: path.to_owned(), source })?;
    let len = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|m| m.len());
    Ok((Box::new(file), path.to_owned(), len))
}

fn perf(args: &Perf, json: bool, stop: &StopFlag) -> Result<i32, ToolError> {
    let mut session = Session::open(&args.connect, args.namespace_id)?;
    let command_blocks = session.command_blocks("--block-size", args.block_size)?;
    let blocks = session.blocks_from(args.start_block, args.size)?;
    let positions = blocks / u64::from(command_blocks);
    if positions == 0 {
        return Err(ToolError::EmptyRange);
    }
    let limit = match (args.count, args.time) {
        (Some(count), _) => Limit::Count(count),
        (None, time) => Limit::Time(time.unwrap_or(DEFAULT_PERF_TIME)),
    };
    let plan = PerfPlan {
        nsid: args.namespace_id,
        block_bytes: session.namespace.block_bytes,
        slba: args.start_block,
        positions,
        command_blocks,
        depth: usize::from(args.queue_depth),
        read_percent: args.rw.read_percent(args.rwmixread),
        random: args.rw.is_random(),
        limit,
        seed: args.seed,
        random_percent: args.random_percent,
    };
    let bar = match limit {
        Limit::Count(count) => progress::steps_bar(args.rw.name(), count),
        Limit::Time(time) => progress::steps_bar(args.rw.name(), time.as_millis() as u64),
    };
    let (report, error) = perf::run(&plan, &mut session.queues, stop, &bar);
    bar.finish_and_clear();
    if json {
        print_json(&report)?
    } else {
        print_text(&report.to_text())?
    };
    if let Some(error) = error {
        return Err(error);
    }
    session.close();
    Ok(if report.partial { exit::INTERRUPTED } else { exit::OK })
}

fn print_json(value: &impl Serialize) -> Result<i32, ToolError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| ToolError::System { what: "writing JSON", source: io::Error::other(error) })?;
    print_text(&(text + "\n"))
}

fn print_text(text: &str) -> Result<i32, ToolError> {
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        // Whoever read the output has had enough of it.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(exit::OK),
        Err(source) => Err(ToolError::System { what: "writing to standard output", source }),
        Ok(()) => Ok(exit::OK),
    }
}
