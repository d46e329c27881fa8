//! The stages that data passes: compression, encryption, checksums and erasure coding, with the engines beneath them.
//!
//! Owns the primitives, the record format ([`record`]), the keys ([`keys`]) and the choice of engines ([`engines`]).
//! Must not know where records rest, who asked for them, or any PDU. Invariant: all engines of a primitive give identical
//! bytes, so what one machine stored, any other reads.

pub mod cipher;
pub mod compress;
pub mod crc;
pub mod engines;
pub mod keys;
pub mod record;
pub mod rs;
