//! The command line of `nvmf`: nvme-cli's letters where nvme-cli has one.
//!
//! Owns names, defaults and the checks that need no connection. Must not know how commands are carried out.
//! Invariant: a command line that is taken is one that can be carried out; what contradicts itself is refused here.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use nvmf_target::wire::nqn::Nqn;
use parse_size::Config;

use crate::initiator::options::ConnectOptions;

/// A user-space NVMe/TCP host: needs no kernel module and no root.
#[derive(Debug, Parser)]
#[command(name = "nvmf", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// Results as JSON on standard output.
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done · 1 data lost or wrong · 2 bad command line · 3 can't connect, or the \
    connection was lost · 4 a command failed with an NVMe status · 5 a local file failed · 130 interrupted (results are partial)";

/// What `nvmf` does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the subsystems that a discovery controller shows to this host.
    Discover(Discover),
    /// Show a controller and its namespaces.
    Identify(Identify),
    /// Copy from a namespace to a file or standard output.
    Read(Read),
    /// Copy a file or standard input to a namespace.
    Write(Write),
    /// Write blocks that say where they belong, read them back, name every one that is wrong. What was there is lost.
    Verify(Verify),
    /// Measure operations per second and latency. Workloads that write overwrite what is there.
    Perf(Perf),
}

/// Where to connect, and as whom.
#[derive(Debug, Clone, Args)]
pub struct Address {
    /// Transport.
    #[arg(short = 't', long, value_enum, default_value = "tcp")]
    pub transport: Transport,
    /// Address of the target (IPv4, or IPv6 with or without brackets).
    #[arg(short = 'a', long, value_parser = parse_address)]
    pub traddr: IpAddr,
    /// Port of the target.
    #[arg(short = 's', long, default_value_t = 4420, value_parser = clap::value_parser!(u16).range(1..))]
    pub trsvcid: u16,
    /// NQN of this host; by default that of /etc/nvme/hostnqn, or a random one.
    #[arg(short = 'q', long, value_parser = parse_nqn)]
    pub hostnqn: Option<String>,
    /// UUID of this host; by default that of /etc/nvme/hostid, or the one in its NQN.
    #[arg(short = 'I', long)]
    pub hostid: Option<uuid::Uuid>,
    /// Header digests.
    #[arg(short = 'g', long)]
    pub hdr_digest: bool,
    /// Data digests.
    #[arg(short = 'G', long)]
    pub data_digest: bool,
    /// Do without submission queue flow control: reads complete with their last data, one PDU fewer each.
    #[arg(long)]
    pub disable_sqflow: bool,
    /// Keep-alive timeout in seconds; 0 turns it off.
    #[arg(short = 'k', long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(..=4_000_000))]
    pub keep_alive_tmo: u32,
    /// Give up on a command or a connection that makes no progress for this many seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub timeout: u32,
}

/// A subsystem and the queues to open to it.
#[derive(Debug, Clone, Args)]
pub struct Connect {
    /// Where.
    #[command(flatten)]
    pub address: Address,
    /// NQN of the subsystem.
    #[arg(short = 'n', long, value_parser = parse_nqn)]
    pub nqn: String,
    /// I/O queues, each with a thread and a connection of its own.
    #[arg(short = 'i', long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub nr_io_queues: u16,
    /// Entries of an I/O queue (one fewer can be in use).
    #[arg(short = 'Q', long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(2..))]
    pub queue_size: u16,
}

/// Transports that this host speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// NVMe/TCP.
    Tcp,
}

/// `nvmf discover`.
#[derive(Debug, Args)]
pub struct Discover {
    /// Where.
    #[command(flatten)]
    pub address: Address,
}

/// `nvmf identify`.
#[derive(Debug, Args)]
pub struct Identify {
    /// Which subsystem.
    #[command(flatten)]
    pub connect: Connect,
    /// Only this namespace.
    #[arg(long, visible_alias = "nsid", value_parser = clap::value_parser!(u32).range(1..))]
    pub namespace_id: Option<u32>,
}

/// Which bytes of a namespace.
#[derive(Debug, Clone, Args)]
#[command(group = ArgGroup::new("start").multiple(false))]
pub struct Extent {
    /// Namespace.
    #[arg(long, visible_alias = "nsid", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub namespace_id: u32,
    /// First logical block.
    #[arg(long, group = "start")]
    pub start_block: Option<u64>,
    /// First byte (any; need not be at a block).
    #[arg(long, group = "start", value_parser = parse_size)]
    pub offset: Option<u64>,
}

/// `nvmf read`.
#[derive(Debug, Args)]
pub struct Read {
    /// Which subsystem.
    #[command(flatten)]
    pub connect: Connect,
    /// From where.
    #[command(flatten)]
    pub extent: Extent,
    /// How many bytes; by default up to the namespace's end.
    #[arg(short = 'z', long, value_parser = parse_size)]
    pub data_size: Option<u64>,
    /// File to write to; `-` is standard output.
    #[arg(short = 'd', long, default_value = "-")]
    pub data: PathBuf,
}

/// `nvmf write`.
#[derive(Debug, Args)]
pub struct Write {
    /// Which subsystem.
    #[command(flatten)]
    pub connect: Connect,
    /// To where.
    #[command(flatten)]
    pub extent: Extent,
    /// At most this many bytes; by default all there are.
    #[arg(short = 'z', long, value_parser = parse_size)]
    pub data_size: Option<u64>,
    /// File to read from; `-` is standard input.
    #[arg(short = 'd', long, default_value = "-")]
    pub data: PathBuf,
}

/// `nvmf verify`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("mode").multiple(false))]
pub struct Verify {
    /// Which subsystem.
    #[command(flatten)]
    pub connect: Connect,
    /// Namespace.
    #[arg(long, visible_alias = "nsid", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub namespace_id: u32,
    /// First logical block.
    #[arg(long, default_value_t = 0)]
    pub start_block: u64,
    /// How many bytes of the namespace; by default all of it.
    #[arg(short = 'z', long, value_parser = parse_size)]
    pub size: Option<u64>,
    /// Bytes a command moves.
    #[arg(short = 'b', long, default_value = "64KiB", value_parser = parse_size)]
    pub block_size: u64,
    /// Commands in flight per queue.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub queue_depth: u16,
    /// Tells this test's blocks from another's; 1 by default, with a new --journal a random one.
    #[arg(long)]
    pub seed: Option<u64>,
    /// How much of the data can't be compressed, in percent.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub random_percent: u8,
    /// Don't write: read and compare with what a run with the same seed (and --generation) wrote.
    #[arg(long, group = "mode")]
    pub check_only: bool,
    /// Which write the blocks hold.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub generation: u64,
    /// Crash test: overwrite blocks in random order until stopped (or --time is over), and put every write that is issued
    /// and acknowledged into FILE; an existing FILE is gone on with.
    #[arg(long, group = "mode", value_name = "FILE")]
    pub journal: Option<PathBuf>,
    /// Crash test: prove that every write that FILE says was acknowledged is there. What was found is added to FILE, so that
    /// the next check also proves that nothing reverted.
    #[arg(long, group = "mode", value_name = "FILE")]
    pub check_journal: Option<PathBuf>,
    /// With --journal: stop after this many seconds.
    #[arg(long, requires = "journal", value_parser = parse_seconds)]
    pub time: Option<Duration>,
    /// With --journal: this share of the writes are Write Zeroes, in percent.
    #[arg(long, default_value_t = 0, requires = "journal", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub zeroes_percent: u8,
    /// With --journal: this share of the writes are deallocations, in percent.
    #[arg(long, default_value_t = 0, requires = "journal", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub deallocate_percent: u8,
}

/// `nvmf perf`.
#[derive(Debug, Clone, Args)]
#[command(group = ArgGroup::new("limit").multiple(false))]
pub struct Perf {
    /// Which subsystem.
    #[command(flatten)]
    pub connect: Connect,
    /// Namespace.
    #[arg(long, visible_alias = "nsid", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub namespace_id: u32,
    /// Reads or writes, in sequence or at random.
    #[arg(long, value_enum, default_value = "randread")]
    pub rw: Workload,
    /// Share of reads with --rw=rw and --rw=randrw, in percent.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Bytes a command moves.
    #[arg(short = 'b', long, default_value = "4KiB", value_parser = parse_size)]
    pub block_size: u64,
    /// Commands in flight per queue.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub queue_depth: u16,
    /// First logical block.
    #[arg(long, default_value_t = 0)]
    pub start_block: u64,
    /// How many bytes of the namespace; by default all of it.
    #[arg(short = 'z', long, value_parser = parse_size)]
    pub size: Option<u64>,
    /// Stop after this many seconds (10 if neither --time nor --count is given).
    #[arg(long, group = "limit", value_parser = parse_seconds)]
    pub time: Option<Duration>,
    /// Stop after this many commands.
    #[arg(long, group = "limit")]
    pub count: Option<u64>,
    /// How much of the data can't be compressed, in percent.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub random_percent: u8,
    /// Seed of the order and the data.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Orders and mixes of `nvmf perf`, by fio's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    /// Reads in sequence.
    Read,
    /// Writes in sequence.
    Write,
    /// Both in sequence.
    Rw,
    /// Reads at random.
    Randread,
    /// Writes at random.
    Randwrite,
    /// Both at random.
    Randrw,
}

impl Workload {
    /// Share of reads in percent, given that of the mixed workloads.
    pub fn read_percent(self, mix: u8) -> u8 {
        match self {
            Self::Read | Self::Randread => 100,
            Self::Write | Self::Randwrite => 0,
            Self::Rw | Self::Randrw => mix,
        }
    }

    /// At random places.
    pub fn is_random(self) -> bool {
        matches!(self, Self::Randread | Self::Randwrite | Self::Randrw)
    }

    /// fio's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Rw => "rw",
            Self::Randread => "randread",
            Self::Randwrite => "randwrite",
            Self::Randrw => "randrw",
        }
    }
}

impl Address {
    /// As options for a connection to `nqn`.
    pub fn options(&self, nqn: &str) -> ConnectOptions {
        let (host_nqn, host_id) = crate::initiator::options::host_identity(self.hostnqn.as_deref(), self.hostid);
        ConnectOptions {
            address: self.traddr,
            port: self.trsvcid,
            subsystem_nqn: nqn.to_owned(),
            host_nqn,
            host_id,
            header_digest: self.hdr_digest,
            data_digest: self.data_digest,
            disable_sq_flow_control: self.disable_sqflow,
            keep_alive: (self.keep_alive_tmo > 0).then(|| Duration::from_secs(u64::from(self.keep_alive_tmo))),
            io_queues: 1,
            queue_size: 32,
            timeout: Duration::from_secs(u64::from(self.timeout)),
        }
    }
}

impl Connect {
    /// As options for a connection.
    pub fn options(&self) -> ConnectOptions {
        let address = self.address.options(&self.nqn);
        ConnectOptions { io_queues: self.nr_io_queues, queue_size: self.queue_size, ..address }
    }
}

/// A size such as 4096, 64KiB, 64k (the same) or 1G.
pub fn parse_size(text: &str) -> Result<u64, String> {
    Config::new().with_binary().parse_size(text).map_err(|error| format!("{error}; write e.g. 4096, 64KiB or 2G"))
}

fn parse_address(text: &str) -> Result<IpAddr, String> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    bare.parse().map_err(|_| "not an IPv4 or IPv6 address (names aren't looked up)".to_owned())
}

fn parse_nqn(text: &str) -> Result<String, String> {
    Nqn::parse(text).map(|nqn| nqn.to_string()).map_err(|error| format!("an NQN {error}"))
}

/// A number of seconds that a clock can hold.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    const AT: &str = "-t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-01.io.sluice:dev";

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn nvme_cli_letters_are_understood() {
        let cli =
            parse(&format!("nvmf perf {AT} -q nqn.2014-08.org.x:h -i 4 -Q 64 -g -G -k 5 --rw randrw -b 4k")).unwrap();
        let Command::Perf(perf) = cli.command else { panic!("not perf") };
        let options = perf.connect.options();
        assert_eq!((options.io_queues, options.queue_size, options.port), (4, 64, 4420));
        assert!(options.header_digest && options.data_digest);
        assert_eq!(options.keep_alive, Some(Duration::from_secs(5)));
        assert_eq!(options.host_nqn, "nqn.2014-08.org.x:h");
        assert_eq!(perf.block_size, 4096);
    }

    #[test]
    fn h174_ipv6_with_and_without_brackets() {
        for address in ["::1", "[::1]"] {
            let cli = parse(&format!("nvmf discover -a {address}")).unwrap();
            let Command::Discover(discover) = cli.command else { panic!("not discover") };
            assert_eq!(discover.address.traddr.to_string(), "::1");
        }
        assert!(parse("nvmf discover -a [::1").is_err());
    }

    #[test]
    fn h153_bad_values_are_refused_with_the_rule() {
        for (line, rule) in [
            ("nvmf discover -a 300.1.1.1".to_owned(), "not an IPv4 or IPv6 address"),
            ("nvmf discover -a 127.0.0.1 -s 0".to_owned(), "1..=65535"),
            ("nvmf discover -a 127.0.0.1 -s 65536".to_owned(), "1..=65535"),
            ("nvmf identify -a 127.0.0.1 -n subsystem".to_owned(), "begin with 'nqn.'"),
            (format!("nvmf identify -a 127.0.0.1 -n nqn.{}", "x".repeat(220)), "1 to 223 bytes long, is 224"),
            (format!("nvmf read {AT} --start-block 1 --offset 2"), "cannot be used with"),
            (format!("nvmf verify {AT} --check-only --journal j"), "cannot be used with"),
            (format!("nvmf verify {AT} --time 3"), "--journal"),
            (format!("nvmf perf {AT} --time=-1"), "--time"),
            (format!("nvmf perf {AT} --time nan"), "--time"),
            (format!("nvmf perf {AT} -b 4q"), "write e.g. 4096, 64KiB or 2G"),
        ] {
            let error = parse(&line).expect_err(&line).to_string();
            assert!(error.contains(rule), "{line}: {error}");
        }
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [("4096", 4096), ("4k", 4096), ("64KiB", 65536), ("1M", 1 << 20), ("2GiB", 2 << 30)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        assert!(parse_size("-1").is_err() && parse_size("").is_err());
    }
}
