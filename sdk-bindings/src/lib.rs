//! Safe owners over C libraries, one object a file. It does not know what they are used for.
//!
//! Everything that talks to C lives here. The C side is `csrc/shim.c`; `ffi` mirrors its header. With the cargo
//! feature `dpdk` off the crate is empty.

#[cfg(feature = "dpdk")]
pub mod eal;
#[cfg(feature = "dpdk")]
mod ffi;
#[cfg(feature = "dpdk")]
pub mod lcore;
#[cfg(feature = "dpdk")]
pub mod memory;
#[cfg(feature = "dpdk")]
pub mod mempool;
#[cfg(feature = "dpdk")]
pub mod ring;
