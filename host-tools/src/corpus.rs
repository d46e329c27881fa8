//! The bytes a comparison runs on: a file or folder of the user's, or a mix that every machine can make.
//!
//! Owns finding, reading and describing them. Must not know what is done with them. Invariants: the same request on the
//! same machine gives the same bytes; what the report says about the data is what was read.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;
use walkdir::WalkDir;

use crate::pattern::SplitMix64;

/// Data is padded with zeroes to a whole number of these, in bytes: the larger logical block size.
pub const PAD_BYTES: usize = 4096;
/// Of one file at most this much is taken into the default mix, so that no single file sets the result.
const MIX_FILE_LIMIT_BYTES: usize = 4 << 20;
/// Standard deviation of the generated weights: that of a typical trained transformer layer.
const WEIGHT_SIGMA: f64 = 0.02;

/// Why there is no data.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// Reading failed.
    #[error("{path}: {source}")]
    Io {
        /// What was read.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Walking a folder failed at its root.
    #[error("reading a folder: {0}")]
    Walk(#[from] walkdir::Error),
    /// There was nothing in it.
    #[error("{path}: no bytes to work on (an empty file, or a folder without readable files)")]
    Empty {
        /// What was asked for.
        path: PathBuf,
    },
}

/// One kind of data within a corpus.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub struct Part {
    /// What it is, in words for the report.
    pub description: String,
    /// How many files were read (0: generated).
    pub files: usize,
    /// How many bytes.
    pub bytes: usize,
}

/// Bytes to work on, and what they are.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The bytes; a multiple of [`PAD_BYTES`].
    pub data: Vec<u8>,
    /// What they are made of, in order.
    pub parts: Vec<Part>,
    /// Files that could not be read and were passed by.
    pub unreadable: usize,
}

impl Corpus {
    /// The user's own file or folder, at most `limit_bytes` of it (a folder's files in path order).
    pub fn from_path(path: &Path, limit_bytes: usize) -> Result<Self, CorpusError> {
        let mut gathered = Gathered::default();
        if path.is_dir() {
            for entry in WalkDir::new(path).sort_by_file_name() {
                let entry = match entry {
                    Ok(entry) => entry,
                    Err(error) if error.depth() == 0 => return Err(error.into()),
                    Err(_) => {
                        gathered.unreadable += 1;
                        continue;
                    }
                };
                if entry.file_type().is_file() && gathered.bytes.len() < limit_bytes {
                    gathered.take_file(entry.path(), limit_bytes - gathered.bytes.len());
                }
            }
        } else {
            read_up_to(path, limit_bytes, &mut gathered.bytes)
                .map_err(|source| CorpusError::Io { path: path.to_owned(), source })?;
            gathered.files = 1;
        }
        if gathered.bytes.is_empty() {
            return Err(CorpusError::Empty { path: path.to_owned() });
        }
        let mut corpus = Self { data: Vec::new(), parts: Vec::new(), unreadable: 0 };
        corpus.add(path.display().to_string(), gathered);
        corpus.pad();
        Ok(corpus)
    }

    /// A quarter each of executables, text, compressed files and bf16 weights; a machine that has less of a kind gives
    /// less, and the report says so.
    pub fn default_mix(total_bytes: usize, seed: u64) -> Self {
        let share = total_bytes / 4;
        let mut corpus = Self { data: Vec::with_capacity(total_bytes + PAD_BYTES), parts: Vec::new(), unreadable: 0 };
        let executables = gather(&["/usr/bin", "/usr/lib"], share, is_elf);
        corpus.add("executables and libraries (ELF files of /usr/bin, /usr/lib)".to_owned(), executables);
        let text = gather(
            &["/usr/share/doc", "/usr/include", "/usr/share/perl5", "/usr/lib/python3", "/usr/share"],
            share,
            is_text,
        );
        corpus.add("text (docs, headers, scripts of /usr)".to_owned(), text);
        let compressed = gather(&["/usr/share", "/boot", "/usr/lib"], share, is_compressed);
        corpus.add("compressed files (.gz, .xz, .zst, .png, .jar and the like of /usr)".to_owned(), compressed);
        let weights = Gathered { bytes: bf16_weights(share, seed), ..Gathered::default() };
        corpus.add(format!("bf16 tensors (normal weights, sigma {WEIGHT_SIGMA}, seed {seed})"), weights);
        corpus.pad();
        corpus
    }

    fn add(&mut self, description: String, gathered: Gathered) {
        self.unreadable += gathered.unreadable;
        if !gathered.bytes.is_empty() {
            self.parts.push(Part { description, files: gathered.files, bytes: gathered.bytes.len() });
            self.data.extend_from_slice(&gathered.bytes);
        }
    }

    fn pad(&mut self) {
        let padding = self.data.len().next_multiple_of(PAD_BYTES) - self.data.len();
        if padding > 0 {
            self.data.resize(self.data.len() + padding, 0);
            self.parts.push(Part { description: "zero padding to a whole block".to_owned(), files: 0, bytes: padding });
        }
    }

    /// The parts in words, one a line.
    pub fn describe(&self) -> Vec<String> {
        let mut lines: Vec<String> = self
            .parts
            .iter()
            .map(|part| {
                let files = if part.files > 0 { format!(", {} files", part.files) } else { String::new() };
                format!("{:.1} MB {}{files}", part.bytes as f64 / 1e6, part.description)
            })
            .collect();
        if self.unreadable > 0 {
            lines.push(format!("{} files passed by: not readable", self.unreadable));
        }
        lines
    }
}

#[derive(Default)]
struct Gathered {
    bytes: Vec<u8>,
    files: usize,
    unreadable: usize,
}

impl Gathered {
    fn take_file(&mut self, path: &Path, limit_bytes: usize) {
        let before = self.bytes.len();
        match read_up_to(path, limit_bytes, &mut self.bytes) {
            Ok(()) => self.files += 1,
            Err(_) => {
                self.bytes.truncate(before);
                self.unreadable += 1;
            }
        }
    }
}

fn read_up_to(path: &Path, limit_bytes: usize, out: &mut Vec<u8>) -> io::Result<()> {
    std::fs::File::open(path)?.take(limit_bytes as u64).read_to_end(out)?;
    Ok(())
}

fn gather(roots: &[&str], share_bytes: usize, wanted: fn(&Path) -> bool) -> Gathered {
    let mut gathered = Gathered::default();
    for root in roots {
        // A root that a machine doesn't have gives one error and no files.
        for entry in WalkDir::new(root).sort_by_file_name().into_iter().flatten() {
            if gathered.bytes.len() >= share_bytes {
                return gathered;
            }
            if entry.file_type().is_file() && wanted(entry.path()) {
                let limit = MIX_FILE_LIMIT_BYTES.min(share_bytes - gathered.bytes.len());
                gathered.take_file(entry.path(), limit);
            }
        }
    }
    gathered
}

fn starts_with(path: &Path, magic: &[u8]) -> bool {
    let mut head = Vec::new();
    read_up_to(path, magic.len(), &mut head).is_ok() && head == magic
}

fn is_elf(path: &Path) -> bool {
    starts_with(path, b"\x7fELF")
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e))
}

fn is_compressed(path: &Path) -> bool {
    has_extension(path, &["gz", "xz", "zst", "bz2", "deb", "png", "jpg", "jar", "whl", "crate", "zip", "woff2"])
}

fn is_text(path: &Path) -> bool {
    if is_compressed(path) {
        return false;
    }
    let mut head = Vec::new();
    read_up_to(path, 1024, &mut head).is_ok() && !head.is_empty() && !head.contains(&0)
}

/// Normally distributed weights (Box-Muller), rounded to the nearest bf16, ties to even, little-endian.
fn bf16_weights(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = SplitMix64(seed);
    let mut unit = move || ((random.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let mut out = Vec::with_capacity(bytes + 4);
    while out.len() < bytes {
        let (radius, angle) = ((-2.0 * unit().ln()).sqrt() * WEIGHT_SIGMA, 2.0 * std::f64::consts::PI * unit());
        for weight in [radius * angle.cos(), radius * angle.sin()] {
            out.extend_from_slice(&to_bf16(weight as f32).to_le_bytes());
        }
    }
    out.truncate(bytes);
    out
}

fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let round = 0x7FFF + ((bits >> 16) & 1);
    (bits.wrapping_add(round) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_even() {
        assert_eq!(to_bf16(1.0), 0x3F80);
        assert_eq!(to_bf16(f32::from_bits(0x3F80_8000)), 0x3F80, "a tie goes to the even one below");
        assert_eq!(to_bf16(f32::from_bits(0x3F81_8000)), 0x3F82, "a tie goes to the even one above");
        assert_eq!(to_bf16(f32::from_bits(0x3F80_8001)), 0x3F81);
    }

    #[test]
    fn weights_are_normal_and_repeatable() {
        let bytes = bf16_weights(200_000, 1);
        assert_eq!(bytes, bf16_weights(200_000, 1));
        assert_ne!(bytes, bf16_weights(200_000, 2));
        let values: Vec<f64> = bytes
            .chunks(2)
            .map(|b| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)))
            .collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let sigma = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
        assert!(mean.abs() < 0.0005 && (sigma - WEIGHT_SIGMA).abs() < 0.0005, "mean {mean}, sigma {sigma}");
    }

    #[test]
    fn a_folder_is_read_in_order_padded_and_limited() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(dir.path().join("b"), vec![2u8; 3000]).unwrap();
        std::fs::write(dir.path().join("a"), vec![1u8; 3000]).unwrap();
        std::fs::write(dir.path().join("sub/c"), vec![3u8; 10]).unwrap();
        let corpus = Corpus::from_path(dir.path(), 1 << 20).unwrap();
        assert_eq!(corpus.data.len(), 8192);
        assert_eq!((corpus.parts[0].files, corpus.parts[0].bytes), (3, 6010));
        assert_eq!((corpus.data[0], corpus.data[3000], corpus.data[6000], corpus.data[6010]), (1, 2, 3, 0));
        assert_eq!(corpus.parts.iter().map(|p| p.bytes).sum::<usize>(), corpus.data.len());
        assert_eq!(Corpus::from_path(dir.path(), 4096).unwrap().data.len(), 4096);
        assert!(matches!(Corpus::from_path(&dir.path().join("none"), 9), Err(CorpusError::Io { .. })));
        std::fs::write(dir.path().join("empty"), b"").unwrap();
        assert!(matches!(Corpus::from_path(&dir.path().join("empty"), 9), Err(CorpusError::Empty { .. })));
    }

    #[test]
    fn the_mix_is_what_its_parts_say_and_repeats() {
        let mix = Corpus::default_mix(1 << 20, 3);
        assert_eq!(mix.parts.iter().map(|p| p.bytes).sum::<usize>(), mix.data.len());
        assert!(mix.data.len().is_multiple_of(PAD_BYTES) && mix.data.len() <= (1 << 20) + PAD_BYTES);
        assert_eq!(mix.data, Corpus::default_mix(1 << 20, 3).data);
        assert!(mix.describe().iter().any(|l| l.contains("bf16")), "{:?}", mix.describe());
    }
}
