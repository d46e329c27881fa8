//! What runs on hosts: a user-space NVMe/TCP host (`nvmf`) and the bench that compares offloading with doing the same
//! work on the host (`offload-bench`). It knows the protocol's initiator machine and the stage engines that it measures,
//! nothing else of the service.

pub mod bench;
pub mod cli;
pub mod compare;
pub mod copy;
pub mod corpus;
pub mod cpu;
pub mod error;
pub mod exit;
pub mod initiator;
pub mod journal;
pub mod lane;
pub mod nvmf;
pub mod pattern;
pub mod perf;
pub mod progress;
pub mod stats;
pub mod verify;
