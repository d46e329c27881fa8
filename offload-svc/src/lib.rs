//! The storage-offload service as a library; the binaries `offload-svc` and `offloadctl` are thin.

pub mod config;

pub mod pool;
pub mod stages;
