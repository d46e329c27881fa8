//! `offload-bench`: parses arguments, runs, turns an error into an exit code.

use clap::Parser;
use host_tools::bench::Cli;

fn main() {
    let code = host_tools::bench::run(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("offload-bench: {error}");
        error.exit_code()
    });
    std::process::exit(code);
}
