//! The NVMe-oF protocol: bytes to types (`wire`), sans-IO machines (`proto`), the buffers and the trait
//! that a namespace's back end implements (`buffer`, `backend`), and, with the feature `target`, the
//! NVMe/TCP transport and the registry of subsystems. It does not know how data is stored.

pub mod backend;
pub mod buffer;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz_entry;
pub mod proto;
#[cfg(feature = "target")]
pub mod target;
pub mod wire;
