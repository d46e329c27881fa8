//! The whole service as a process: start, serve, stop, crash, start again; and what it refuses.
//!
//! Each test has a folder, ports and a pool of its own; the daemon and `offloadctl` are the built binaries, the host is the
//! project's own over loopback.

mod changes;
mod daemon;
mod durability;
mod manage;
mod refusals;
