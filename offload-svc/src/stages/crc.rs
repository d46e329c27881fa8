//! CRC32C (Castagnoli), the checksum of shards, records and plaintext blocks.
//!
//! Owns the engines and their one contract: `append(crc, bytes)` continues a finished checksum, as RFC 3720 §12.1
//! defines it (reflected, initial value and final XOR all ones). Must not know what is checksummed. Invariant: every
//! engine gives the same value as the bitwise oracle for every length and alignment.

use crc_fast::{CrcAlgorithm, Digest};
use serde::Serialize;

/// One implementation of CRC32C.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// The crate `crc32c`: SSE 4.2 or Armv8 CRC instructions three streams wide, tables elsewhere. Portable and default.
    Crc32c,
    /// The crate `crc-fast`: carry-less multiplication folds, chosen by it per CPU.
    CrcFast,
}

impl Engine {
    /// Every engine that runs on this machine, the portable one first.
    pub const ALL: [Engine; 2] = [Engine::Crc32c, Engine::CrcFast];

    /// The name that reports show.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Crc32c => "crc32c",
            Engine::CrcFast => "crc-fast",
        }
    }

    /// The checksum of `bytes`.
    pub fn checksum(self, bytes: &[u8]) -> u32 {
        self.append(0, bytes)
    }

    /// The checksum of what `crc` covers followed by `bytes`. `append(0, bytes)` starts one.
    pub fn append(self, crc: u32, bytes: &[u8]) -> u32 {
        match self {
            Engine::Crc32c => crc32c::crc32c_append(crc, bytes),
            Engine::CrcFast => {
                let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
                digest.update(bytes);
                // A 32-bit algorithm's value always fits; the crate's type serves CRC-64 too.
                digest.finalize() as u32
            }
        }
    }
}

/// The checksum of `bytes`, by the engine that this process chose.
pub fn crc32c(bytes: &[u8]) -> u32 {
    super::engines::chosen().crc.checksum(bytes)
}

/// Continues `crc` over `bytes`, by the engine that this process chose.
pub fn append(crc: u32, bytes: &[u8]) -> u32 {
    super::engines::chosen().crc.append(crc, bytes)
}

/// The checksum of A followed by B from the two checksums and B's length: no byte is read again.
pub fn combine(crc_a: u32, crc_b: u32, len_b_bytes: usize) -> u32 {
    crc32c::crc32c_combine(crc_a, crc_b, len_b_bytes)
}

#[cfg(test)]
mod tests;
