//! Sans-IO protocol machines: no socket, no clock, no thread; time is an argument.
//!
//! `framing` cuts the byte stream into PDUs, `tcp` is the transport that admin and I/O queues share (receive
//! command, fetch host data, send host data, send response), `io_queue` the NVM command set on top of it,
//! `connect`, `admin` and `discovery` what an admin queue does, `host` the initiator's end. Nothing
//! here knows how data is stored or how bytes travel.

#![forbid(unsafe_code)]

pub mod admin;
pub mod connect;
pub mod controller_shared;
pub mod discovery;
pub mod framing;
pub mod host;
pub mod io_queue;
pub mod queue_shared;
#[cfg(any(test, feature = "fuzzing"))]
pub mod sim;
pub mod tcp;
