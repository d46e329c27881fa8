//! Zeroed memory from EAL's heap (hugepages where EAL has them).
//!
//! Owns one allocation. Must not know what lies in it. Invariant: the memory is freed once, by its owner's drop.

use std::ffi::{CString, c_void};
use std::ptr::NonNull;

use crate::eal::Eal;
use crate::ffi;

/// No memory for it: EAL's share (`memory_mib`) is used up.
#[derive(Debug, thiserror::Error)]
#[error("DPDK has no {bytes} bytes left in one piece")]
pub struct OutOfMemory {
    /// How much was asked for.
    pub bytes: usize,
}

/// Zeroed, aligned memory.
pub struct Zone {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a Zone only owns the allocation; access goes through raw pointers, whose users answer for it.
unsafe impl Send for Zone {}
// SAFETY: as for Send; EAL's heap locks itself.
unsafe impl Sync for Zone {}

impl Zone {
    /// Takes `bytes` zeroed bytes, aligned to `align` (a power of two). `_eal` shows that EAL has started.
    pub fn new(_eal: &'static Eal, name: &str, bytes: usize, align: u32) -> Result<Self, OutOfMemory> {
        let name = CString::new(name.replace('\0', "")).unwrap_or_default();
        // SAFETY: the name is NUL-terminated and alive during the call.
        let start = unsafe { ffi::sluice_zmalloc(name.as_ptr(), bytes, align) };
        let start = NonNull::new(start.cast::<u8>()).ok_or(OutOfMemory { bytes })?;
        Ok(Self { start, bytes })
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Zone {
    fn drop(&mut self) {
        // SAFETY: allocated by sluice_zmalloc, freed only here.
        unsafe { ffi::sluice_free(self.start.as_ptr().cast::<c_void>()) }
    }
}
