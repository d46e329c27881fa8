//! Configuration errors: where, which key, which value, why, and what to do.
//!
//! Owns how an error is printed: `FILE:LINE: KEY: VALUE: REASON`. Must not know how a check is made. Invariant:
//! every problem carries its key and, where there is one, its value; bytes of a value are escaped.

use std::fmt;
use std::path::PathBuf;

use figment::error::Kind;
use thiserror::Error;

use super::names::NameError;
use super::plan::Shortage;
use super::state::StateError;
use super::values::ByteSize;

/// A configuration that can't be used: every problem found.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("{}: {source}: give an existing file with --config FILE", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file isn't UTF-8.
    #[error("{}: byte {offset} is not UTF-8: a configuration is a TOML text file", file.display())]
    NotText {
        /// The file.
        file: PathBuf,
        /// Where.
        offset: usize,
    },
    /// What stands in it is wrong.
    #[error("{}", Lines(.0))]
    Invalid(Vec<Problem>),
    /// The changes made at run time can't be used.
    #[error("service.state: {0}")]
    State(#[from] StateError),
}

impl ConfigError {
    /// The problems, if the file could be read.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Self::Invalid(problems) => problems,
            Self::Read { .. } | Self::NotText { .. } | Self::State(_) => &[],
        }
    }
}

struct Lines<'a>(&'a [Problem]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            let newline = if index == 0 { "" } else { "\n" };
            write!(f, "{newline}{problem}")?;
        }
        Ok(())
    }
}

/// One thing that is wrong.
#[derive(Debug)]
pub struct Problem {
    /// Where it was set.
    pub origin: Origin,
    /// The key, such as `pool.members[3]`; empty for the whole file.
    pub key: String,
    /// The value as written, if there is one.
    pub value: Option<String>,
    /// What is wrong with it.
    pub reason: Reason,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key.escape_debug())?;
        }
        match &self.value {
            Some(value) if value.is_empty() => write!(f, "\"\": ")?,
            Some(value) => write!(f, "{}: ", value.escape_debug())?,
            None => {}
        }
        write!(f, "{}", self.reason)
    }
}

/// Where a value was set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// In the file, on this line.
    Line {
        /// The file.
        file: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// Nowhere in the file: a default, or a key that is missing.
    File {
        /// The file.
        file: PathBuf,
    },
    /// In an environment variable.
    Environment {
        /// Its name.
        variable: String,
    },
    /// Changed at run time.
    RunTime {
        /// The state file.
        file: PathBuf,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line { file, line } => write!(f, "{}:{line}", file.display()),
            Self::File { file } => write!(f, "{}", file.display()),
            Self::Environment { variable } => write!(f, "environment {}", variable.escape_debug()),
            Self::RunTime { file } => write!(f, "{} (changes made with offloadctl)", file.display()),
        }
    }
}

/// What is wrong with a value.
#[derive(Debug, Error)]
pub enum Reason {
    /// Not TOML.
    #[error("{}", one_line(.0.message()))]
    Syntax(#[source] Box<toml::de::Error>),
    /// No such key.
    #[error("unknown key{}", nearest_or_known(.nearest, .known))]
    UnknownKey {
        /// The key that was probably meant.
        nearest: Option<&'static str>,
        /// The keys that may stand here.
        known: &'static [&'static str],
    },
    /// No such word.
    #[error("not one of the words that may stand here{}", nearest_or_known(.nearest, .known))]
    UnknownWord {
        /// The word that was probably meant.
        nearest: Option<&'static str>,
        /// The words that may stand here.
        known: &'static [&'static str],
    },
    /// The value's type or form is wrong.
    #[error("{}", show_kind(.0))]
    Form(Box<Kind>),
    /// Outside its range.
    #[error("out of range: {min} to {max}")]
    OutOfRange {
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// A size outside its range.
    #[error("out of range: {min} to {max}")]
    SizeOutOfRange {
        /// Least.
        min: ByteSize,
        /// Most.
        max: ByteSize,
    },
    /// Not a multiple.
    #[error("must be a multiple of {unit}")]
    NotMultiple {
        /// Of what.
        unit: ByteSize,
    },
    /// Not a power of two.
    #[error("must be a power of two: {below} or {above}")]
    NotPowerOfTwo {
        /// The next lower one.
        below: u64,
        /// The next higher one.
        above: u64,
    },
    /// A name that breaks a rule.
    #[error("{0}")]
    Name(#[source] NameError),
    /// Given twice.
    #[error("the same as {first}: {advice}")]
    Duplicate {
        /// The key that has it already.
        first: String,
        /// What to do.
        advice: &'static str,
    },
    /// The CPU isn't there for us.
    #[error("CPU {cpu} is not available: this process may use {have}")]
    CpuUnavailable {
        /// The CPU.
        cpu: u16,
        /// The ones that are, as a core list.
        have: String,
    },
    /// `count` and `cpus` disagree.
    #[error("reactors.cpus lists {listed}: leave reactors.count out or make them equal")]
    CountAgainstCpus {
        /// The length of the list.
        listed: usize,
    },
    /// More reactors than CPUs.
    #[error("more reactors than CPUs: this process may use {have}, so at most {max}")]
    MoreReactorsThanCpus {
        /// The ones that are, as a core list.
        have: String,
        /// How many.
        max: usize,
    },
    /// A log filter that isn't one.
    #[error("not a log filter: {0}; write a level (error, warn, info, debug, trace) or target=level,…")]
    LogFilter(#[source] Box<tracing_subscriber::filter::ParseError>),
    /// A device that isn't there.
    #[error("no such device (have: {})", list_or_none(.have))]
    NoSuchDevice {
        /// The block devices of this machine.
        have: Vec<String>,
    },
    /// Not a block device.
    #[error("not a block device: use file:{path} for a file")]
    NotBlockDevice {
        /// The path.
        path: String,
    },
    /// A block device where a file is expected.
    #[error("not a regular file: use block:{path} for a block device")]
    NotFile {
        /// The path.
        path: String,
    },
    /// The folder of a file isn't there.
    #[error("the folder {folder} does not exist: create it")]
    NoFolder {
        /// The folder.
        folder: String,
    },
    /// A path that names no file.
    #[error("names no file: give the path of one")]
    NotAFilePath,
    /// A folder where a file is expected.
    #[error("is a folder: give the path of a file in it")]
    Folder,
    /// Longer than the system takes.
    #[error("longer than the {max} bytes that a socket's path may have: choose a shorter one")]
    TooLongPath {
        /// The most.
        max: usize,
    },
    /// An environment variable that is nearly a setting.
    #[error("is no setting: section and key are parted by two underscores: write {meant}")]
    Variable {
        /// What was probably meant.
        meant: String,
    },
    /// Something about the file is in the way.
    #[error("{0}")]
    Path(#[source] std::io::Error),
    /// k+m is not the number of members.
    #[error("{have} members for k={k} m={m}: give {want}, or change pool.k and pool.m")]
    MemberCount {
        /// Given.
        have: usize,
        /// Needed.
        want: usize,
        /// Data shards.
        k: u8,
        /// Parity shards.
        m: u8,
    },
    /// k+m over the limit.
    #[error("k+m is {sum}: at most 32")]
    TooWide {
        /// The sum.
        sum: u16,
    },
    /// Fewer segments in the window than the reactors need.
    #[error(
        "{given} are too few for {reactors} reactors, each of which keeps three open: give {least} or more here, or set fewer \
         reactors with reactors.count or reactors.cpus"
    )]
    ReplaySegments {
        /// Set, or the default.
        given: u64,
        /// How many reactors there would be.
        reactors: usize,
        /// Needed for them.
        least: u64,
    },
    /// A volume or namespace needs a pool.
    #[error("there is no pool: list its members in pool.members")]
    NoPool,
    /// A namespace names no volume.
    #[error("no such volume{}", nearest_or_have(.nearest, .have))]
    NoSuchVolume {
        /// The volume that was probably meant.
        nearest: Option<String>,
        /// The volumes of the configuration.
        have: Vec<String>,
    },
    /// A volume's origin isn't in the pool.
    #[error("the pool has no such volume; it has {}", .have.join(", "))]
    NoSuchOrigin {
        /// The volumes of the pool.
        have: Vec<String>,
    },
    /// A block size on a pool volume's namespace.
    #[error("a pool volume has its own block size: set volume.block_size instead")]
    BlockSizeOfVolume,
    /// No host may ever connect.
    #[error("no host may connect: list host NQNs in hosts or set allow_any_host = true")]
    NoHosts,
    /// A volume can't become what is asked for.
    #[error("the volume has {has}, which stays as it was made: set it back, or make another volume and copy the data")]
    VolumeKeeps {
        /// What it has.
        has: String,
    },
    /// A pool can't become what is asked for.
    #[error("the pool has {has}, as it was formatted: set it back")]
    PoolKeeps {
        /// What it has.
        has: String,
    },
    /// A list of hosts that means nothing.
    #[error("allow_any_host lets every host in: remove one of the two")]
    HostsAndAny,
    /// More than the limit.
    #[error("{have} entries: at most {max}")]
    TooMany {
        /// Given.
        have: usize,
        /// Allowed.
        max: usize,
    },
    /// The memory plan does not fit.
    #[error("{0}")]
    Memory(#[source] Box<Shortage>),
}

fn one_line(text: &str) -> String {
    text.lines().collect::<Vec<_>>().join("; ")
}

fn nearest_or_known(nearest: &Option<&'static str>, known: &[&'static str]) -> String {
    match nearest {
        Some(nearest) => format!(": did you mean '{nearest}'?"),
        None => format!(" (known: {})", known.join(", ")),
    }
}

fn nearest_or_have(nearest: &Option<String>, have: &[String]) -> String {
    match nearest {
        Some(nearest) => format!(": did you mean '{nearest}'? Volumes stand under [[volume]]"),
        None => format!(" (have: {}): add one under [[volume]]", list_or_none(have)),
    }
}

fn list_or_none(have: &[String]) -> String {
    if have.is_empty() { "none".to_owned() } else { have.join(", ") }
}

/// serde's complaint in our words.
fn show_kind(kind: &Kind) -> String {
    match kind {
        Kind::Message(message) => one_line(message),
        Kind::InvalidType(found, expected) => format!("is a {}: expected {expected}", kind_of(found)),
        Kind::InvalidValue(_, expected) => format!("out of range: expected {}", range_of(expected)),
        Kind::MissingField(name) => format!("the key '{name}' is missing: add it"),
        other => other.to_string(),
    }
}

fn kind_of(found: &figment::error::Actual) -> &'static str {
    use figment::error::Actual;
    match found {
        Actual::Bool(_) => "true or false",
        Actual::Unsigned(_) | Actual::Signed(_) => "number",
        Actual::Float(_) => "number with a fraction",
        Actual::Str(_) | Actual::Char(_) => "string",
        Actual::Seq => "list",
        Actual::Map => "table",
        _ => "value of another kind",
    }
}

fn range_of(expected: &str) -> &str {
    match expected {
        "u8" => "0 to 255",
        "u16" => "0 to 65535",
        "u32" => "0 to 4294967295",
        "u64" => "0 to 9223372036854775807",
        other => other,
    }
}
