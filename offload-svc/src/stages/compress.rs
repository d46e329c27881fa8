//! Compression of records: raw LZ4 blocks, zstd frames, or the bytes as they are.
//!
//! Owns the codecs, their reused contexts and the choice that `auto` makes. Must not know records or ciphers. Invariants:
//! what is packed is never longer than the input, and hostile packed bytes give an error or exactly the length asked for.

mod choose;

use std::fmt;
use std::str::FromStr;

use lz4::block::CompressionMode;
use serde::{Deserialize, Serialize};

/// How a volume wants its data compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// As it is.
    None,
    /// Raw LZ4 blocks.
    #[default]
    Lz4,
    /// zstd frames at a level of [`ZSTD_LEVELS`].
    Zstd { level: u8 },
    /// LZ4, or zstd level 1 where that is worth its time, or neither; decided per record.
    Auto,
}

/// The levels that `zstd:<level>` takes.
pub const ZSTD_LEVELS: std::ops::RangeInclusive<u8> = 1..=19;

/// What packed a record's bytes. The numbers are the ids that records hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Codec {
    /// Nothing: the bytes as they are.
    Raw = 0,
    /// One raw LZ4 block (no frame, no length prefix).
    Lz4 = 1,
    /// zstd frames (RFC 8878), without dictionary.
    Zstd = 2,
}

/// A name that is no compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such compression; known: none, lz4, zstd:1 to zstd:19, auto")]
pub struct UnknownCompression;

/// Why bytes were not compressed or decompressed.
#[derive(Debug, thiserror::Error)]
pub enum CompressError {
    #[error("the output is shorter than the input")]
    OutputTooShort,
    #[error("input too long to compress at once")]
    InputTooLong,
    #[error("zstd cannot be set up")]
    Zstd(#[source] std::io::Error),
    #[error("{codec:?} data is damaged")]
    Damaged { codec: Codec, source: std::io::Error },
    #[error("{codec:?} data gives {given_bytes} bytes, not {expected_bytes}")]
    WrongLength { codec: Codec, given_bytes: usize, expected_bytes: usize },
}

/// The longest input in bytes: far over a record, and within every codec's own limit.
pub const MAX_INPUT_BYTES: usize = 1 << 24;

impl Codec {
    /// The codec of an id in a record.
    pub fn from_id(id: u8) -> Option<Self> {
        [Codec::Raw, Codec::Lz4, Codec::Zstd].into_iter().find(|codec| *codec as u8 == id)
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Compression::None => f.write_str("none"),
            Compression::Lz4 => f.write_str("lz4"),
            Compression::Zstd { level } => write!(f, "zstd:{level}"),
            Compression::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for Compression {
    type Err = UnknownCompression;
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "none" => Ok(Compression::None),
            "lz4" => Ok(Compression::Lz4),
            "auto" => Ok(Compression::Auto),
            _ => {
                let level = name.strip_prefix("zstd:").and_then(|level| level.parse().ok());
                let level = level.filter(|level| ZSTD_LEVELS.contains(level)).ok_or(UnknownCompression)?;
                Ok(Compression::Zstd { level })
            }
        }
    }
}

impl Serialize for Compression {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Compression {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

/// Compression contexts, reused: a new zstd context costs five times a 4 KiB record. One per thread.
#[derive(Default)]
pub struct Compressor {
    zstd: Option<(u8, zstd::bulk::Compressor<'static>)>,
    sample: choose::Sampler,
    trial: Vec<u8>,
    #[cfg(test)]
    broken: bool,
}

/// What a compressor did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    pub codec: Codec,
    pub len_bytes: usize,
}

impl Compressor {
    /// Packs `plain` into the front of `out`, which is at least as long. Stored raw where packing saves too little, so
    /// the result is never longer than `plain`. The same input and policy always give the same bytes.
    pub fn pack(&mut self, policy: Compression, plain: &[u8], out: &mut [u8]) -> Result<Packed, CompressError> {
        if plain.len() > MAX_INPUT_BYTES {
            return Err(CompressError::InputTooLong);
        }
        let out = out.get_mut(..plain.len()).ok_or(CompressError::OutputTooShort)?;
        let packed = match policy {
            Compression::None => None,
            Compression::Lz4 => pack_lz4(plain, worthwhile(plain.len()), out),
            Compression::Zstd { level } => self.pack_zstd_unless_random(level, plain, out)?,
            Compression::Auto => self.pack_auto(plain, out)?,
        };
        #[cfg(test)]
        if self.broken
            && let Some(packed) = packed
        {
            out[packed.len_bytes / 2] ^= 0x10;
        }
        Ok(packed.unwrap_or_else(|| {
            out.copy_from_slice(plain);
            Packed { codec: Codec::Raw, len_bytes: plain.len() }
        }))
    }

    /// From now on, what is packed is wrong by a bit: for the tests of what catches that.
    #[cfg(test)]
    pub(super) fn break_it(&mut self) {
        self.broken = true;
    }

    /// Random bytes cost zstd's higher levels their full time for nothing: a sample, then LZ4's quick pass, rule them out.
    fn pack_zstd_unless_random(
        &mut self,
        level: u8,
        plain: &[u8],
        out: &mut [u8],
    ) -> Result<Option<Packed>, CompressError> {
        if self.sample.looks_random(plain) && pack_lz4(plain, worthwhile(plain.len()), out).is_none() {
            return Ok(None);
        }
        self.pack_zstd(level, plain, worthwhile(plain.len()), out)
    }

    fn pack_auto(&mut self, plain: &[u8], out: &mut [u8]) -> Result<Option<Packed>, CompressError> {
        let lz4 = pack_lz4(plain, worthwhile(plain.len()), out);
        let lz4_bytes = lz4.map_or(plain.len(), |packed| packed.len_bytes);
        let Some(limit_bytes) = self.sample.zstd_limit_bytes(plain, lz4_bytes) else { return Ok(lz4) };
        let mut trial = std::mem::take(&mut self.trial);
        trial.resize(plain.len(), 0);
        let zstd = self.pack_zstd(choose::ZSTD_LEVEL, plain, limit_bytes, &mut trial);
        if let Ok(Some(packed)) = zstd {
            out[..packed.len_bytes].copy_from_slice(&trial[..packed.len_bytes]);
        }
        self.trial = trial;
        Ok(zstd?.or(lz4))
    }

    fn pack_zstd(
        &mut self,
        level: u8,
        plain: &[u8],
        limit_bytes: usize,
        out: &mut [u8],
    ) -> Result<Option<Packed>, CompressError> {
        let compressor = match &mut self.zstd {
            Some((set, compressor)) => {
                if *set != level {
                    compressor.set_compression_level(i32::from(level)).map_err(CompressError::Zstd)?;
                    *set = level;
                }
                compressor
            }
            empty => {
                let fresh = zstd::bulk::Compressor::new(i32::from(level)).map_err(CompressError::Zstd)?;
                &mut empty.insert((level, fresh)).1
            }
        };
        // The only error left to zstd here is an output that is too short, which is the answer "not worth it".
        let packed = compressor.compress_to_buffer(plain, &mut out[..limit_bytes]);
        Ok(packed.ok().map(|len_bytes| Packed { codec: Codec::Zstd, len_bytes }))
    }
}

/// The longest packed form that is worth decompressing later: it saves 1/64 at least.
fn worthwhile(plain_bytes: usize) -> usize {
    plain_bytes - plain_bytes.div_ceil(64)
}

fn pack_lz4(plain: &[u8], limit_bytes: usize, out: &mut [u8]) -> Option<Packed> {
    if limit_bytes == 0 {
        return None;
    }
    let mode = Some(CompressionMode::FAST(1));
    // Lengths are within MAX_INPUT_BYTES, so the only failure is an output that is too short: "not worth it".
    let len_bytes = lz4::block::compress_to_buffer(plain, mode, false, &mut out[..limit_bytes]).ok()?;
    Some(Packed { codec: Codec::Lz4, len_bytes })
}

/// Decompression contexts, reused. One per thread.
#[derive(Default)]
pub struct Decompressor {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl Decompressor {
    /// Unpacks into the whole of `plain`. `packed` may hold anything: the outcome is an error or `plain.len()` bytes.
    /// On an error the contents of `plain` are unspecified.
    pub fn unpack(&mut self, codec: Codec, packed: &[u8], plain: &mut [u8]) -> Result<(), CompressError> {
        if packed.len() > MAX_INPUT_BYTES || plain.len() > MAX_INPUT_BYTES {
            return Err(CompressError::InputTooLong);
        }
        let damaged = |source| CompressError::Damaged { codec, source };
        let expected_bytes = plain.len();
        let given_bytes = match codec {
            Codec::Raw => {
                if packed.len() == plain.len() {
                    plain.copy_from_slice(packed);
                }
                packed.len()
            }
            Codec::Lz4 => {
                // MAX_INPUT_BYTES fits an i32.
                lz4::block::decompress_to_buffer(packed, Some(expected_bytes as i32), plain).map_err(damaged)?
            }
            Codec::Zstd => {
                let context = match &mut self.zstd {
                    Some(context) => context,
                    empty => empty.insert(zstd::bulk::Decompressor::new().map_err(CompressError::Zstd)?),
                };
                context.decompress_to_buffer(packed, plain).map_err(damaged)?
            }
        };
        if given_bytes == expected_bytes {
            Ok(())
        } else {
            Err(CompressError::WrongLength { codec, given_bytes, expected_bytes })
        }
    }
}

#[cfg(test)]
mod tests;
