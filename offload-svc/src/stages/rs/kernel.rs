//! Engines of Reed-Solomon: outputs = rows x sources over GF(2^8), byte by byte.
//!
//! Owns the inner loop and nothing else: coefficients and slices come checked. Must not know codes or plans. Invariant:
//! every engine fills the outputs with the same bytes as [`Engine::Portable`], for every length and alignment.

use reed_solomon_erasure::galois_8;
use serde::Serialize;

#[cfg(target_arch = "x86_64")]
#[path = "kernel_avx2.rs"]
mod avx2;

/// One implementation of the inner loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// `reed-solomon-erasure`'s table-driven slice operations: runs everywhere, and is the oracle.
    Portable,
    /// Our kernel: two 16-entry table look-ups a byte by `vpshufb`, up to four outputs a pass over the sources.
    Avx2,
}

/// Columns worked on at a time, so that sources stay in the first-level cache while several outputs are made from them.
const BLOCK_BYTES: usize = 4096;

impl Engine {
    /// The engines that run on this CPU, the portable one first.
    pub fn available() -> Vec<Engine> {
        let mut engines = vec![Engine::Portable];
        if Engine::Avx2.is_supported() {
            engines.push(Engine::Avx2);
        }
        engines
    }

    /// Whether this CPU can run it.
    pub fn is_supported(self) -> bool {
        match self {
            Engine::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => std::arch::is_x86_feature_detected!("avx2"),
            #[cfg(not(target_arch = "x86_64"))]
            Engine::Avx2 => false,
        }
    }

    /// The name that reports show.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Portable => "reed-solomon-erasure",
            Engine::Avx2 => "avx2-pshufb",
        }
    }

    /// `outputs[r] = sum over s of rows[r * sources.len() + s] * sources[s]`. All slices have one length, checked by the
    /// caller. An engine that this CPU lacks gives way to the portable one.
    pub(super) fn multiply(self, rows: &[u8], sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let len_bytes = sources.first().map_or(0, |source| source.len());
        debug_assert_eq!(rows.len(), sources.len() * outputs.len());
        let mut start = 0;
        while start < len_bytes {
            let end = len_bytes.min(start + BLOCK_BYTES);
            #[cfg(target_arch = "x86_64")]
            if self == Engine::Avx2 && avx2::multiply(rows, sources, outputs, start..end) {
                start = end;
                continue;
            }
            multiply_portable(rows, sources, outputs, start..end);
            start = end;
        }
    }
}

fn multiply_portable(rows: &[u8], sources: &[&[u8]], outputs: &mut [&mut [u8]], range: std::ops::Range<usize>) {
    for (row, output) in rows.chunks_exact(sources.len()).zip(outputs) {
        let output = &mut output[range.clone()];
        for (position, (&factor, source)) in row.iter().zip(sources).enumerate() {
            let source = &source[range.clone()];
            if position == 0 {
                galois_8::mul_slice(factor, source, output);
            } else {
                galois_8::mul_slice_xor(factor, source, output);
            }
        }
    }
}
