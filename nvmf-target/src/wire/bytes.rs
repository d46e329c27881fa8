//! Little-endian fields at fixed offsets.
//!
//! Owns the reading and writing of integers in byte arrays whose size the caller has checked. Invariant: on a
//! fixed-size array an offset is a constant of the layout, never a value from a peer.

use super::WireError;

/// The first `N` bytes of `bytes` as an array.
pub fn take<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], WireError> {
    bytes.first_chunk::<N>().ok_or(WireError::Short { need: N, have: bytes.len() })
}

/// The u16 at `at`.
pub fn u16_at<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The u32 at `at`.
pub fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

/// The u64 at `at`.
pub fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Stores `value` at `at`.
pub fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

/// Stores `value` at `at`.
pub fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// Stores `value` at `at`.
pub fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}
