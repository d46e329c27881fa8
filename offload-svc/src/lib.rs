//! The storage-offload service as a library; the binaries `offload-svc` and `offloadctl` are thin.

pub mod buffers;
pub mod config;
pub mod ctl;
pub mod manage;
pub mod plain;
pub mod pool;
pub mod reactor;
pub mod ring;
pub mod service;
pub mod stages;
