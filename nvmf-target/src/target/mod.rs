//! The running target: the registry of subsystems, namespaces, hosts, listeners and controllers, changed while it
//! serves, and the tokio side: listeners, Connect, admin queues, keep-alive.
//!
//! It must not know how data is stored, and drives no I/O queue itself: those go to a [`QueueHost`].

mod controller;
mod error;
mod limits;
mod queue_host;
mod socket;

pub use controller::EndReason;
pub use error::TargetError;
pub use limits::Limits;
pub use queue_host::{AdoptError, QueueHost, ThreadQueueHost};
