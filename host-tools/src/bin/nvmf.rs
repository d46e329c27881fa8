//! `nvmf`: parses arguments, runs, turns an error into an exit code.

use clap::Parser;
use host_tools::cli::Cli;

fn main() {
    let code = host_tools::nvmf::run(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("nvmf: {error}");
        error.exit_code()
    });
    std::process::exit(code);
}
