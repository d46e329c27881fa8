//! The pool: k+m members, an erasure-coded log of records on them, and the volumes whose maps lead into it.
//!
//! Owns everything that rests on members. Must not know NVMe, sockets, io_uring or the configuration file: it meets
//! the outside through [`env::Env`] below and `nvmf_target::backend::Backend` above. Invariant: nothing live is ever
//! overwritten in place, and an answered write is on every member of the current set.
//!
//! # Use
//!
//! ```text
//! inspect(env, &members)                 -> Inspection         // blank members, a pool, or something else
//! format(env, &members, layout)          -> PoolUuid           // refuses members that are not blank
//! mount(env, &members, options, keys)    -> Mounted            // on any one reactor, before the others start
//! Mounted::report() -> &MountReport
//! Mounted::split(reactors, courier)      -> (Pool, Vec<ReactorSeed>)   // seeds are Send: one to each reactor
//! PoolReactor::start(env, seed)          -> PoolReactor        // on the reactor's thread
//! PoolReactor::deliver(message)                                // if the service brings its own Courier
//! Pool: Clone + Send + Sync
//!   volume(name) -> Option<Arc<dyn Backend>>     create_volume(spec).await     delete_volume(name).await
//!   resize_volume(name, bytes).await             volumes() -> Vec<VolumeStatus>
//!   status() -> PoolStatus                       checkpoint().await            shutdown().await
//! ```
//!
//! Messages to the reactor that owns a shard go through a [`Courier`](env), by default over `futures::channel`; a
//! service with rings of its own passes one that calls `PoolReactor::deliver` on the other side.

pub mod env;
pub mod options;
pub mod status;

pub use env::{Env, IoResult, MemberIndex};
pub use options::{Layout, MemberInput, MemoryNeeds, MountOptions, memory_needs};
pub use status::{Health, MemberState, MemberStatus, MountReport, PoolStatus, Space, VolumeStatus};
