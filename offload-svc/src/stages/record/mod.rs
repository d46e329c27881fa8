//! Records: runs of up to 64 KiB of one volume, compressed, encrypted and checksummed, as they rest in the log.
//!
//! Owns sealing and opening. Must not know stripes, members or maps. Invariants: what opens is what was sealed, under the
//! birth that was asked for, or it is an error; after an error the caller's buffer holds no plaintext; the same inputs give
//! the same bytes on every machine.

mod codec;
mod header;

pub use codec::{OpenError, RecordCodec, SealError, Sealing};
pub use header::{
    Birth, HEADER_BYTES, Header, HeaderError, Kind, MAX_BLOCK_SHIFT, MAX_PLAIN_BYTES, MAX_RECORD_BYTES,
    MIN_BLOCK_SHIFT, Owner, sealed_bound,
};

#[cfg(test)]
mod tests;
