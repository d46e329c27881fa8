//! Cuts a byte stream into PDUs, whatever pieces it comes in.
//!
//! Owns the staging buffer, the header checks and both digests. Must not know commands: who receives decides where
//! data goes. Invariant: nothing is ever sized by a length that the peer sent; a header is looked at only after its
//! length has been found to be its type's own.

mod check;
#[cfg(test)]
mod tests;

pub use check::{HeaderFault, Layout, Receiver, Rules, check_common, check_pdu};

use crate::wire::digest::{DIGEST_BYTES, Digest};
use crate::wire::pdu::{COMMON_HEADER_BYTES, CommonHeader, FatalError, HEADER_MAX_BYTES, Pdu};

/// The smallest staging buffer: the longest header with its digest, several times over.
const STAGING_MIN_BYTES: usize = 1024;

/// From this many missing data bytes on, reading straight into the data's place beats staging and copying: the copy
/// of less costs no more than the extra read call does.
const IN_PLACE_MIN_BYTES: usize = 32 << 10;

/// What the stream holds next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Nothing whole: more bytes are needed.
    Starved,
    /// A header that keeps the rules, its digest checked. Data follows if `data_bytes` isn't 0, and then `End`.
    Header(Pdu, Layout),
    /// The next bytes of the PDU's data.
    Data(&'a [u8]),
    /// The PDU's data is over. `intact`: its digest is right, or there is none.
    End {
        /// The data is what was sent.
        intact: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Common,
    Header(Layout),
    Padding(Layout),
    Data(Layout),
    DataDigest,
}

/// See the module.
#[derive(Debug)]
pub struct Framer {
    staging: Box<[u8]>,
    start: usize,
    end: usize,
    phase: Phase,
    left_bytes: usize,
    digest: Digest,
    header: [u8; HEADER_MAX_BYTES],
    header_bytes: usize,
}

impl Framer {
    /// An empty one with `staging_bytes` of room.
    pub fn new(staging_bytes: usize) -> Self {
        Self {
            staging: vec![0; staging_bytes.max(STAGING_MIN_BYTES)].into_boxed_slice(),
            start: 0,
            end: 0,
            phase: Phase::Common,
            left_bytes: 0,
            digest: Digest::new(),
            header: [0; HEADER_MAX_BYTES],
            header_bytes: 0,
        }
    }

    /// Changes the room for staging; what is there already stays.
    pub fn resize(&mut self, staging_bytes: usize) {
        let kept = &self.staging[self.start..self.end];
        let mut staging = vec![0; staging_bytes.max(STAGING_MIN_BYTES).max(kept.len())].into_boxed_slice();
        staging[..kept.len()].copy_from_slice(kept);
        (self.start, self.end, self.staging) = (0, kept.len(), staging);
    }

    /// The header of the PDU that is being received, or as much of it as was looked at: what a TermReq repeats.
    pub fn header(&self) -> &[u8] {
        &self.header[..self.header_bytes]
    }

    /// The room for the next bytes.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 && self.end > self.staging.len() / 2 {
            self.staging.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.staging[self.end..]
    }

    /// `len_bytes` were put into [`Framer::room`].
    ///
    /// # Panics
    /// If there wasn't that much room: a fault of the driver.
    pub fn filled(&mut self, len_bytes: usize) {
        assert!(len_bytes <= self.staging.len() - self.end, "more bytes than there was room for");
        self.end += len_bytes;
    }

    /// How many data bytes may be read straight into their place, if it is worth it and staging is empty.
    pub fn in_place_bytes(&self) -> Option<usize> {
        let in_data = matches!(self.phase, Phase::Data(_));
        (in_data && self.start == self.end && self.left_bytes >= IN_PLACE_MIN_BYTES).then_some(self.left_bytes)
    }

    /// `bytes` were read straight into their place.
    ///
    /// # Panics
    /// If they are more than [`Framer::in_place_bytes`] said: a fault of the driver.
    pub fn placed(&mut self, bytes: &[u8]) {
        let Phase::Data(layout) = self.phase else { panic!("no data is being received") };
        assert!(bytes.len() <= self.left_bytes, "more bytes than the data has");
        if layout.data_digest {
            self.digest.update(bytes);
        }
        self.left_bytes -= bytes.len();
    }

    /// The next step. An error is fatal for the connection.
    pub fn step(&mut self, rules: &Rules) -> Result<Step<'_>, HeaderFault> {
        loop {
            match self.phase {
                Phase::Common => {
                    let Some(common) = self.common_header() else { return Ok(Step::Starved) };
                    self.phase = Phase::Header(check_common(&common, rules)?);
                }
                Phase::Header(layout) => return self.whole_header(layout, rules),
                Phase::Padding(layout) => {
                    self.consume_up_to_left();
                    if self.left_bytes > 0 {
                        return Ok(Step::Starved);
                    }
                    self.left_bytes = layout.data_bytes as usize;
                    self.digest = Digest::new();
                    self.phase = Phase::Data(layout);
                }
                Phase::Data(layout) if self.left_bytes > 0 => {
                    let from = self.start;
                    if self.consume_up_to_left() == 0 {
                        return Ok(Step::Starved);
                    }
                    let data = &self.staging[from..self.start];
                    if layout.data_digest {
                        self.digest.update(data);
                    }
                    return Ok(Step::Data(data));
                }
                Phase::Data(layout) if layout.data_digest => self.phase = Phase::DataDigest,
                Phase::Data(_) => {
                    self.phase = Phase::Common;
                    return Ok(Step::End { intact: true });
                }
                Phase::DataDigest => {
                    let Some(found) = self.peek::<DIGEST_BYTES>(0) else { return Ok(Step::Starved) };
                    self.start += DIGEST_BYTES;
                    self.phase = Phase::Common;
                    return Ok(Step::End { intact: Digest::from_bytes(found) == self.digest });
                }
            }
        }
    }

    fn common_header(&mut self) -> Option<CommonHeader> {
        let bytes = self.peek::<COMMON_HEADER_BYTES>(0)?;
        self.keep_header(COMMON_HEADER_BYTES);
        CommonHeader::decode(&bytes).ok()
    }

    fn whole_header(&mut self, layout: Layout, rules: &Rules) -> Result<Step<'_>, HeaderFault> {
        let header_bytes = layout.pdu_type.header_bytes();
        let digest_bytes = if layout.header_digest { DIGEST_BYTES } else { 0 };
        if self.end - self.start < header_bytes + digest_bytes {
            return Ok(Step::Starved);
        }
        self.keep_header(header_bytes);
        if layout.header_digest {
            let found = self.peek::<DIGEST_BYTES>(header_bytes).map_or(Digest::new(), Digest::from_bytes);
            if found != Digest::of(self.header()) {
                return Err(HeaderFault { error: FatalError::HeaderDigest, info: found.value() });
            }
        }
        // The type is known and the header whole, so it decodes; if not, the type is what doesn't fit.
        let pdu = Pdu::decode(self.header()).map_err(|_| HeaderFault::field(0))?;
        check_pdu(&pdu, &layout, rules)?;
        self.start += header_bytes + digest_bytes;
        self.left_bytes = (layout.data_offset as usize).saturating_sub(header_bytes + digest_bytes);
        self.phase = if layout.data_bytes > 0 { Phase::Padding(layout) } else { Phase::Common };
        Ok(Step::Header(pdu, layout))
    }

    fn keep_header(&mut self, len_bytes: usize) {
        self.header[..len_bytes].copy_from_slice(&self.staging[self.start..self.start + len_bytes]);
        self.header_bytes = len_bytes;
    }

    fn peek<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.staging[self.start..self.end].get(at..)?.first_chunk().copied()
    }

    /// Consumes what is staged of the `left_bytes`.
    fn consume_up_to_left(&mut self) -> usize {
        let len_bytes = self.left_bytes.min(self.end - self.start);
        self.start += len_bytes;
        self.left_bytes -= len_bytes;
        len_bytes
    }
}
