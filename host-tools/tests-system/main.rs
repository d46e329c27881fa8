//! Whole-service tests: the built binaries, real Linux hosts in guests, members that fail.
//!
//! `cargo test -p host-tools --test system -- [FILTER...]` runs the suites whose name contains a filter; without one, all
//! but the self-test of the harness. `make test` builds what they need and runs them; `--list` names them.

mod block_members;
mod broken_disk;
mod devices;
mod durability;
mod guest;
mod keys;
mod kill_loop;
mod linux_host;
mod many_hosts;
mod members;
mod network;
mod power_cuts;
mod process;
mod report;
mod seccomp;
mod service;
mod small_disk;
mod small_disks;
mod write_log;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use report::Report;

type Suite = fn(&mut Report, &Path) -> Result<()>;

/// Name, whether it runs when nothing is asked for by name, and the suite.
const SUITES: &[(&str, bool, Suite)] = &[
    ("selftest", false, linux_host::selftest),
    ("guest_script", false, linux_host::script),
    ("given_target", false, linux_host::given_target),
    ("members", true, members::run),
    ("durability", true, durability::run),
    ("kill_loop_files", true, |report, folder| kill_loop::run(report, folder, devices::Kind::File)),
    ("kill_loop_loops", true, |report, folder| kill_loop::run(report, folder, devices::Kind::Loop)),
    ("small_disks", true, small_disks::run),
    ("keys", true, keys::run),
    ("many_hosts", true, many_hosts::run),
    ("block_members", true, block_members::run),
    ("power_cuts", false, power_cuts::run),
    ("linux_6_12", true, |report, folder| linux_host::run(report, folder, "6.12")),
    ("linux_6_1", true, |report, folder| linux_host::run(report, folder, "6.1")),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        for (name, default, _) in SUITES {
            println!("{name}{}", if *default { "" } else { " (only by name)" });
        }
        return ExitCode::SUCCESS;
    }
    if let [first, program, rest @ ..] = &arguments[..]
        && first == seccomp::WITHOUT_IO_URING
    {
        let error = seccomp::run_without_io_uring(program, rest);
        eprintln!("{program}: {error:#}");
        return ExitCode::FAILURE;
    }
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with("--")).collect();
    let keep = std::env::var_os("SLUICE_TEST_KEEP").is_some();
    let mut report = Report::default();
    for (name, default, suite) in SUITES {
        // A whole name means that one only.
        let is_name = |filter: &str| SUITES.iter().any(|(name, ..)| *name == filter);
        let asked = |filter: &&String| {
            let filter = filter.as_str();
            if is_name(filter) { *name == filter } else { name.contains(filter) }
        };
        let wanted = if filters.is_empty() { *default } else { filters.iter().any(asked) };
        if !wanted {
            continue;
        }
        report.group(name);
        match tempfile::Builder::new().prefix(&format!("sluice-{name}-")).disable_cleanup(keep).tempdir() {
            Ok(folder) => {
                if keep {
                    println!("        {name}: files in {}", folder.path().display());
                }
                let failed = report.failed;
                if let Err(error) = suite(&mut report, folder.path()) {
                    report.group(name);
                    report.check("set_up", || Err(error));
                }
                if report.failed > failed && !keep {
                    println!("        {name}: run again with SLUICE_TEST_KEEP=1 to keep its logs");
                }
            }
            Err(error) => {
                report.check("folder", || Err(error.into()));
            }
        }
    }
    println!("test result: {} passed; {} failed; {} skipped", report.passed, report.failed, report.skipped);
    if report.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
