//! Exit codes of the tools, the same for all.

/// Done, and everything is right.
pub const OK: i32 = 0;
/// Data is lost or wrong.
pub const DATA_WRONG: i32 = 1;
/// The command line can't be carried out (clap uses the same).
pub const USAGE: i32 = 2;
/// Can't connect, or the connection was lost.
pub const CONNECTION: i32 = 3;
/// A command failed with an NVMe status.
pub const COMMAND_FAILED: i32 = 4;
/// A local file or the system failed.
pub const LOCAL: i32 = 5;
/// Ended early by a signal; what was printed is partial.
pub const INTERRUPTED: i32 = 130;
