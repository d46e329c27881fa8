//! The sockets beneath the protocol's initiator machine: connections, an association, its queues and namespaces.
//!
//! Owns sockets, time-outs and keep-alive. Must not know what is done with the data. Invariants: a read whose data didn't
//! arrive whole and intact is an error, whatever its status says; nothing waits longer than the time-out without progress.

pub mod connection;
pub mod controller;
pub mod discovery;
pub mod io_queue;
pub mod options;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use nvmf_target::proto::tcp::CloseReason;
use nvmf_target::wire::Status;

pub use connection::{Connection, WireBytes};
pub use controller::{Controller, Namespace};
pub use io_queue::IoQueue;
pub use options::ConnectOptions;

use crate::error::{describe_status, hint};

/// Why there is no connection, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The TCP connection could not be made.
    #[error("can't connect to {address}: {source} (is the target running, and listening there?)")]
    Connect {
        /// Where to.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The target refused the association or a queue.
    #[error("the target refused {what}: {}{}", describe_status(*.status), with_hint(*.status, *.dw0))]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// Its answer.
        status: Status,
        /// Dword 0: where a wrong parameter stands.
        dw0: u32,
    },
    /// The controller didn't become ready.
    #[error("the controller didn't become ready within {}", seconds(*.0))]
    NotReady(Duration),
    /// The connection ended.
    #[error("connection lost: {}; {in_flight} commands were in flight", describe_close(*.reason))]
    Ended {
        /// Why.
        reason: CloseReason,
        /// Commands whose fate isn't known.
        in_flight: usize,
    },
    /// The socket failed.
    #[error("connection lost: {source}; {in_flight} commands were in flight")]
    Socket {
        /// What the system said.
        source: io::Error,
        /// Commands whose fate isn't known.
        in_flight: usize,
    },
    /// Nothing came for too long.
    #[error("no answer for {}; {in_flight} commands were in flight (--timeout sets the limit)", seconds(*.waited))]
    Timeout {
        /// How long.
        waited: Duration,
        /// Commands whose fate isn't known.
        in_flight: usize,
    },
    /// A read was completed with success without all of its data.
    #[error("the target completed a read of {wanted} bytes with {received}")]
    ShortRead {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that came.
        received: usize,
    },
    /// More commands were submitted than the queue takes: a bug of this program.
    #[error("the queue can't take another command")]
    QueueFull,
    /// The answer to an admin command has another shape than the specification gives it.
    #[error("the target's {what} makes no sense")]
    BadAnswer {
        /// Which answer.
        what: &'static str,
    },
    /// An admin command failed.
    #[error("{what} failed: {}{}", describe_status(*.status), with_hint(*.status, 0))]
    Admin {
        /// Which command.
        what: &'static str,
        /// Its status.
        status: Status,
    },
}

fn seconds(duration: Duration) -> String {
    format!("{:.0} s", duration.as_secs_f64())
}

fn with_hint(status: Status, dw0: u32) -> String {
    // NVMe Base 2.0 §6.3: where the parameter that was refused stands.
    let place = if status.code() == Status::CONNECT_INVALID_PARAMETERS && dw0 != 0 {
        let part = if dw0 >> 16 & 1 == 1 { "data" } else { "command" };
        format!(", at byte {} of Connect's {part}", dw0 & 0xFFFF)
    } else {
        String::new()
    };
    hint(status).map_or(place.clone(), |hint| format!("{place}; {hint}"))
}

fn describe_close(reason: CloseReason) -> String {
    match reason {
        CloseReason::ProtocolError { error, info } => {
            format!("the target broke the protocol ({error:?}, at {info})")
        }
        CloseReason::PeerTerminated { fes, fei } => {
            format!("the target ended it with C2HTermReq (FES {fes:#x}, FEI {fei:#x})")
        }
        CloseReason::PeerClosed => "the target closed it".to_owned(),
        CloseReason::TransferTimeout => "the target stopped in the middle of a transfer".to_owned(),
        CloseReason::SendTimeout => "the target stopped taking data".to_owned(),
        CloseReason::Terminated => "this host ended it".to_owned(),
    }
}
