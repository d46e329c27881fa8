//! What runs on hosts: a user-space NVMe/TCP host (`nvmf`) and the bench that compares offloading with doing the same
//! work on the host (`offload-bench`). It knows the protocol's initiator machine and the stage engines that it measures,
//! nothing else of the service.

pub mod cpu;
pub mod journal;
pub mod pattern;
pub mod stats;
