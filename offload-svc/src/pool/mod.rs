//! The pool: k+m members, an erasure-coded log of records on them, and the volumes whose maps lead into it.
//!
//! Owns everything that rests on members. Must not know NVMe, sockets, io_uring or the configuration file: it meets
//! the outside through [`env::Env`] below and `nvmf_target::backend::Backend` above. Invariant: nothing live is ever
//! overwritten in place, and an answered write is on every member of the current set.
//!
//! # Use
//!
//! ```text
//! inspect(&env, &members).await              -> Inspection      // blank members, a pool, or something else
//! format(&env, &members, layout).await       -> Uuid            // refuses members that are not blank
//! mount(env, &members, options, kek).await   -> Mounted         // on any one reactor, before the others take part
//! Mounted::report() -> &MountReport
//! Mounted::split(reactors, None)             -> (Pool, Vec<ReactorSeed>)   // seeds are Send: one to each reactor
//! PoolReactor::start(env, seed)              -> PoolReactor     // on the reactor's own thread
//! ```
//!
//! [`Pool`] is the handle for volumes, status and shutdown; `Pool::volume(name)` gives the back end of a namespace.
//! Messages to the reactor that owns a shard go through a [`Courier`], by default over `futures::channel`; a service with
//! rings of its own passes one that calls [`PoolReactor::deliver`] on the other side.
//!
//! # Parts
//!
//! On members: `superblock`, `stripe`, `checkpoint`, `page`. In memory: `map`, `layers`, `segments`, `space`, `shared`, and what is
//! known of keys at rest: `shields`, `receipts`. At
//! work on a reactor: `core`, `records`, `tree`, `read`, `write`, `stream`, `merge`, `page_writer`, `clean`; on the first one
//! also `coordinator`, `backing`,
//! and what looks after the members: `rebuild`, `attach`, `release`, `scrub`, at the `pace` that requests leave them. Before all that:
//! `probe`, `mount`.

mod absorb;
mod attach;
mod backing;
mod checkpoint;
mod checkpoint_io;
mod clean;
mod codec;
mod coordinator;
mod core;
pub mod env;
mod erase;
mod family;
mod handle;
mod layers;
mod locks;
mod map;
mod members;
mod merge;
mod message;
mod mount;
pub mod options;
mod pace;
mod page;
mod page_writer;
mod probe;
mod reactor;
mod read;
mod rebuild;
mod receipts;
mod records;
mod release;
mod rotate;
mod scan;
mod scrub;
mod segments;
mod shared;
mod shields;
mod slow;
mod snapshot;
mod space;
pub mod status;
mod stream;
mod stripe;
mod stripe_io;
mod superblock;
mod superblocks;
mod traffic;
mod tree;
mod volume;
mod write;

#[cfg(test)]
mod tests;

pub use attach::{Coming, MemberError, NewMember};
pub use env::{Env, IoResult, MemberIndex};
pub use handle::{CheckpointError, CloneSpec, Pool, VolumeError, VolumeSpec};
pub use message::{Courier, Message};
pub use mount::{MountError, Mounted, mount};
pub use options::{Force, Layout, MemberInput, MemoryNeeds, MountOptions, memory_needs};
pub use probe::{FormatError, Found, FoundText, Inspection, format, inspect};
pub use reactor::{PoolReactor, ReactorSeed};
pub use receipts::{CopyReason, KeyCopy, KeyFate, ReceiptStatus, Stated, StatementError};
pub use status::{
    Health, KeyStatus, MemberState, MemberStatus, MountReport, PoolStatus, RebuildState, RebuildStatus, Remark,
    ScrubFinding, ScrubStatus, Space, VolumeStatus, WriteTraffic,
};
pub use superblock::Publication;
