//! One command's data on its way from the host: which parts were asked for, and what has come.
//!
//! Owns R2T's rules (NVMe/TCP 1.1 §3.3.2.1): at most MAXR2T of a command outstanding, data of each in order and
//! without gaps, nothing outside of it. Invariant: a byte of the buffer is written by the one H2CData that an
//! outstanding R2T allows for it.

use std::time::Instant;

use super::Slot;
use crate::buffer::IoBuf;
use crate::proto::framing::HeaderFault;
use crate::wire::CommandId;
use crate::wire::pdu::{FLAG_LAST, FatalError, H2CData};

/// R2Ts that one command may have outstanding, whatever the host allows: more gain nothing.
pub(super) const R2TS_MAX: usize = 4;

/// Offsets of H2CData fields, for FEI.
const OFFSET_FLAGS: u32 = 1;
const OFFSET_CCCID: u32 = 8;
/// Where TTAG stands.
pub(super) const OFFSET_TTAG: u32 = 10;

#[derive(Debug, Clone, Copy)]
struct Asked {
    next: u32,
    end: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Transfer {
    buffer: IoBuf,
    began: Instant,
    asked: [Option<Asked>; R2TS_MAX],
    asked_bytes: u32,
    come_bytes: u32,
    intact: bool,
}

/// An R2T to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) ttag: u16,
    pub(super) offset: u32,
    pub(super) len_bytes: u32,
}

/// The slot and R2T that a TTAG names.
pub(super) fn split_ttag(ttag: u16) -> (Slot, usize) {
    (Slot(ttag / R2TS_MAX as u16), usize::from(ttag) % R2TS_MAX)
}

impl Transfer {
    pub(super) fn new(buffer: IoBuf, began: Instant) -> Self {
        Self { buffer, began, asked: [None; R2TS_MAX], asked_bytes: 0, come_bytes: 0, intact: true }
    }

    pub(super) fn began(&self) -> Instant {
        self.began
    }

    /// The next R2T, if one more is allowed and something is left to ask for.
    pub(super) fn ask(&mut self, slot: Slot, max_outstanding: usize, max_bytes: u32) -> Option<Ask> {
        let allowed = max_outstanding.min(R2TS_MAX);
        if self.asked.iter().flatten().count() >= allowed {
            return None;
        }
        let free = self.asked.iter().position(Option::is_none)?;
        let len_bytes = (self.buffer.len() as u32).saturating_sub(self.asked_bytes).min(max_bytes);
        if len_bytes == 0 {
            return None;
        }
        let offset = self.asked_bytes;
        self.asked_bytes += len_bytes;
        self.asked[free] = Some(Asked { next: offset, end: offset + len_bytes });
        Some(Ask { ttag: slot.0 * R2TS_MAX as u16 + free as u16, offset, len_bytes })
    }

    /// Whether this H2CData answers the R2T `index` rightly.
    pub(super) fn check(&self, index: usize, cid: CommandId, data: &H2CData) -> Result<(), HeaderFault> {
        let asked = self.asked[index].as_ref().ok_or(HeaderFault::field(OFFSET_TTAG))?;
        if data.cccid != cid {
            return Err(HeaderFault::field(OFFSET_CCCID));
        }
        let left = asked.end - asked.next;
        if data.datao != asked.next || data.datal > left {
            return Err(HeaderFault::of(FatalError::DataOutOfRange));
        }
        // A host that says "last" too early would never send the rest. One that forgets to say it at the end does no
        // harm.
        if data.common.has(FLAG_LAST) && data.datal != left {
            return Err(HeaderFault::field(OFFSET_FLAGS));
        }
        Ok(())
    }

    /// The place of `[offset, end of buffer)`.
    pub(super) fn place(&mut self, offset: u32) -> &mut [u8] {
        self.buffer.get_mut(offset as usize..).unwrap_or_default()
    }

    /// An H2CData of `len_bytes` for R2T `index` has come whole.
    pub(super) fn came(&mut self, index: usize, len_bytes: u32, intact: bool) {
        self.come_bytes += len_bytes;
        self.intact &= intact;
        if let Some(asked) = &mut self.asked[index] {
            asked.next += len_bytes;
            if asked.next == asked.end {
                self.asked[index] = None;
            }
        }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.come_bytes as usize == self.buffer.len()
    }

    pub(super) fn into_parts(self) -> (IoBuf, bool) {
        (self.buffer, self.intact)
    }
}
