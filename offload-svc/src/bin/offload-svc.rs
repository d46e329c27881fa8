//! `offload-svc`: serves NVMe-oF from a pool, or checks a configuration, or explains the engines.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
use offload_svc::config::{self, Checked, Machine};
use offload_svc::pool::Force;
use offload_svc::service::{self, Forced, ServiceError};

/// The storage-offload service: an NVMe-oF target that compresses, encrypts, checksums and erasure-codes inline.
///
/// Exit codes: 0 stopped cleanly, 2 wrong usage, 3 wrong configuration, 4 could not start (nothing is left running),
/// 5 failed while serving, 6 stopped, but not cleanly (the next start recovers from the log).
#[derive(Debug, Parser)]
#[command(name = "offload-svc", version)]
struct Cli {
    /// The configuration file (TOML). SLUICE_SECTION__KEY in the environment overrides it; changes made with offloadctl, kept in
    /// service.state, come on top. Of what was changed in both, the later change holds.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the configuration, print the memory plan, and exit.
    #[arg(long, requires = "config")]
    check: bool,
    /// Start in spite of a reason not to, which the refused start has named; may be repeated. For this start only.
    #[arg(long, value_name = "REASON", value_enum, requires = "config", conflicts_with = "check")]
    force: Vec<ForceReason>,
    /// With --check or explain: JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// What `--force` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ForceReason {
    /// So many members are missing that they could be in use elsewhere as a newer pool. If they are, both go on apart, and
    /// what one of the two writes from then on is lost.
    Rival,
    /// Writes that were completed can't be read from the members that are there: their blocks show what was there before.
    LostWrites,
    /// All members are older than pool.anchor says: somebody has put older copies in their place. What was written since is
    /// lost.
    RolledBack,
    /// None of the members holds the pool that was served before: a new, empty pool is made on them.
    NewPool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Which engine runs each primitive on this machine, and why.
    Explain,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match (&cli.command, &cli.config) {
        (Some(Command::Explain), _) => print(service::explain(cli.json).map_err(Into::into)),
        (None, Some(file)) => match config::load_checked(file, environment(), &Machine::probe()) {
            Ok(checked) if cli.check => print(check(&checked, cli.json)),
            Ok(checked) => serve(checked, force(&cli.force)),
            Err(error) => fail(&error.into()),
        },
        (None, None) => {
            let error = Cli::command().error(ErrorKind::MissingRequiredArgument, "give --config FILE, or a subcommand");
            error.exit()
        }
    }
}

/// The environment, as far as it is text: a setting that isn't can't be one of ours.
fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

fn check(checked: &Checked, json: bool) -> anyhow::Result<String> {
    if json {
        return Ok(serde_json::to_string_pretty(&checked.plan)?);
    }
    let mut text =
        format!("{}\nthe configuration is right; it starts {} reactors", checked.plan.table(), checked.reactors);
    let changed = checked.state.kept.changes.count();
    if changed > 0 {
        text += &format!("\n{changed} objects changed with offloadctl: {}", checked.state.file.display());
    }
    for overruled in &checked.overruled {
        text += &format!(
            "\n{overruled}: changed with offloadctl, and in the configuration since then: the configuration holds"
        );
    }
    Ok(text)
}

fn force(reasons: &[ForceReason]) -> Forced {
    let given = |reason| reasons.contains(&reason);
    let mount = Force {
        rival: given(ForceReason::Rival),
        lost_writes: given(ForceReason::LostWrites),
        rolled_back: given(ForceReason::RolledBack),
    };
    Forced { mount, new_pool: given(ForceReason::NewPool) }
}

fn serve(checked: Checked, force: Forced) -> ExitCode {
    service::log_to_stderr(&checked.config.service);
    match service::run(checked, force, announce) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// The one line on stdout. Nobody has to read it.
fn announce(attach: &str) {
    if let Err(error) = writeln!(std::io::stdout(), "{attach}") {
        tracing::warn!(%error, attach, "stdout does not take the line that says how to attach");
    }
}

/// One line with its sources: what, where, why, what to do.
fn fail(error: &ServiceError) -> ExitCode {
    let mut line = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let text = cause.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        source = cause.source();
    }
    eprintln!("offload-svc: {line}");
    ExitCode::from(error.exit_code())
}

fn print(text: anyhow::Result<String>) -> ExitCode {
    match text {
        Ok(text) => match writeln!(std::io::stdout(), "{text}") {
            // A reader that went away (`| head`) has what it wanted.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
            _ => ExitCode::SUCCESS,
        },
        Err(error) => {
            eprintln!("offload-svc: {error:#}");
            ExitCode::FAILURE
        }
    }
}
