//! `offloadctl`: manages a running offload-svc.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    offload_svc::ctl::run(offload_svc::ctl::Cli::parse())
}
