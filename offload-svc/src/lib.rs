//! The storage-offload service as a library; the binaries `offload-svc` and `offloadctl` are thin.

pub mod buffers;
pub mod config;
pub mod plain;
pub mod pool;
pub mod stages;
pub mod reactor;
pub mod ring;
