//! Whether a PDU header may stand where it does: pure functions that say what is wrong and at which byte.
//!
//! The order of the checks is the order in which fields can be trusted: type, sequence, HLEN, PLEN, FLAGS, PDO
//! (NVMe/TCP 1.1 §3.5.2, §3.6.1).

use crate::wire::digest::DIGEST_BYTES;
use crate::wire::pdu::{
    CommonHeader, FLAG_DATA_DIGEST, FLAG_HEADER_DIGEST, FLAG_LAST, FLAG_SUCCESS, FatalError, ICReq, ICResp, Pdu,
    PduType, TERM_REQ_DATA_MAX_BYTES, TermReq,
};

/// Offsets of common header fields, for FEI.
mod field {
    pub(super) const TYPE: u32 = 0;
    pub(super) const FLAGS: u32 = 1;
    pub(super) const HLEN: u32 = 2;
    pub(super) const PDO: u32 = 3;
    pub(super) const PLEN: u32 = 4;
    pub(super) const PFV: u32 = 8;
    pub(super) const ALIGNMENT: u32 = 10;
    pub(super) const DGST: u32 = 11;
    pub(super) const MAXH2CDATA: u32 = 12;
    pub(super) const DATAL: u32 = 16;
}

/// MAXH2CDATA may not be less (NVMe/TCP 1.1 §3.6.2.3).
const MAXH2CDATA_MIN_BYTES: u32 = 4096;
const ALIGNMENT_MAX: u8 = 31;

/// FES and FEI of the TermReq that answers a bad header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{error:?}, information {info:#x}")]
pub struct HeaderFault {
    /// FES.
    pub error: FatalError,
    /// FEI.
    pub info: u32,
}

impl HeaderFault {
    /// The field at `offset` of the header is wrong.
    pub fn field(offset: u32) -> Self {
        Self { error: FatalError::InvalidHeaderField, info: offset }
    }

    /// An error that has no place in the header.
    pub fn of(error: FatalError) -> Self {
        Self { error, info: 0 }
    }
}

/// Which end receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receiver {
    /// The controller: PDUs come from a host.
    Controller,
    /// The host: PDUs come from a controller.
    Host,
}

/// What the receiver allows now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Who receives.
    pub receiver: Receiver,
    /// ICReq and ICResp have been exchanged.
    pub connected: bool,
    /// Header digests were agreed on (a host that waits for ICResp: asked for).
    pub header_digest: bool,
    /// Data digests were agreed on (likewise).
    pub data_digest: bool,
    /// The receiver's data alignment in bytes: (CPDA or HPDA + 1) * 4.
    pub align_bytes: u32,
    /// Most data in a command capsule.
    pub capsule_data_max_bytes: u32,
    /// Most data in an H2CData or C2HData.
    pub data_max_bytes: u32,
}

/// What follows a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The type.
    pub pdu_type: PduType,
    /// Where the data starts, from the start of the PDU.
    pub data_offset: u32,
    /// How long it is; 0: none.
    pub data_bytes: u32,
    /// A header digest follows the header.
    pub header_digest: bool,
    /// A data digest follows the data.
    pub data_digest: bool,
}

/// Checks the first 8 bytes of a PDU.
pub fn check_common(common: &CommonHeader, rules: &Rules) -> Result<Layout, HeaderFault> {
    let pdu_type = PduType::from_byte(common.pdu_type).ok_or(HeaderFault::field(field::TYPE))?;
    if pdu_type.is_from_host() != (rules.receiver == Receiver::Controller) {
        return Err(HeaderFault::field(field::TYPE));
    }
    check_sequence(pdu_type, rules)?;
    if usize::from(common.hlen) != pdu_type.header_bytes() {
        return Err(HeaderFault::field(field::HLEN));
    }
    let bare = Layout { pdu_type, data_offset: 0, data_bytes: 0, header_digest: false, data_digest: false };
    match pdu_type {
        PduType::ICReq | PduType::ICResp => {
            let right = common.plen == u32::from(common.hlen);
            if right { Ok(bare) } else { Err(HeaderFault::field(field::PLEN)) }
        }
        PduType::H2CTermReq | PduType::C2HTermReq => check_term_req(common, bare),
        PduType::CapsuleResp | PduType::R2T => {
            let layout = check_header_digest(common, rules, bare)?;
            let right = common.plen == base_bytes(common, &layout);
            if right { Ok(layout) } else { Err(HeaderFault::field(field::PLEN)) }
        }
        PduType::CapsuleCmd | PduType::H2CData | PduType::C2HData => check_data(common, rules, bare),
    }
}

fn check_sequence(pdu_type: PduType, rules: &Rules) -> Result<(), HeaderFault> {
    let right = match pdu_type {
        PduType::ICReq | PduType::ICResp => !rules.connected,
        PduType::H2CTermReq | PduType::C2HTermReq => true,
        _ => rules.connected,
    };
    if right { Ok(()) } else { Err(HeaderFault::of(FatalError::SequenceError)) }
}

fn check_term_req(common: &CommonHeader, bare: Layout) -> Result<Layout, HeaderFault> {
    let header_bytes = TermReq::BYTES as u32;
    let data_bytes = common.plen.checked_sub(header_bytes);
    match data_bytes.filter(|bytes| *bytes <= TERM_REQ_DATA_MAX_BYTES as u32) {
        Some(data_bytes) => Ok(Layout { data_offset: header_bytes, data_bytes, ..bare }),
        None => Err(HeaderFault::field(field::PLEN)),
    }
}

/// PLEN must have room for the header and its digest before FLAGS is worth a look: a PDU that is too short is the
/// plainer fault.
fn check_header_digest(common: &CommonHeader, rules: &Rules, bare: Layout) -> Result<Layout, HeaderFault> {
    let layout = Layout { header_digest: rules.header_digest, ..bare };
    if common.plen < base_bytes(common, &layout) {
        return Err(HeaderFault::field(field::PLEN));
    }
    if common.has(FLAG_HEADER_DIGEST) != rules.header_digest {
        return Err(HeaderFault::field(field::FLAGS));
    }
    Ok(layout)
}

fn base_bytes(common: &CommonHeader, layout: &Layout) -> u32 {
    u32::from(common.hlen) + if layout.header_digest { DIGEST_BYTES as u32 } else { 0 }
}

fn check_data(common: &CommonHeader, rules: &Rules, bare: Layout) -> Result<Layout, HeaderFault> {
    let layout = check_header_digest(common, rules, bare)?;
    let base = base_bytes(common, &layout);
    let pdo = u32::from(common.pdo);
    if common.has(FLAG_DATA_DIGEST) && !rules.data_digest {
        return Err(HeaderFault::field(field::FLAGS));
    }
    if common.plen == base {
        return check_without_data(common, layout);
    }
    if common.has(FLAG_DATA_DIGEST) != rules.data_digest {
        return Err(HeaderFault::field(field::FLAGS));
    }
    if pdo < base || !pdo.is_multiple_of(rules.align_bytes) || pdo > common.plen {
        return Err(HeaderFault::field(field::PDO));
    }
    let digest_bytes = if rules.data_digest { DIGEST_BYTES as u32 } else { 0 };
    let data_bytes = (common.plen - pdo).checked_sub(digest_bytes).filter(|bytes| *bytes > 0);
    let data_bytes = data_bytes.ok_or(HeaderFault::field(field::PLEN))?;
    let layout = Layout { data_offset: pdo, data_bytes, data_digest: rules.data_digest, ..layout };
    check_data_limit(layout, rules)
}

/// Only a command capsule may come without data; its PDO is then meaningless, but hosts set it to 0 or to where data
/// would be.
fn check_without_data(common: &CommonHeader, layout: Layout) -> Result<Layout, HeaderFault> {
    if layout.pdu_type != PduType::CapsuleCmd {
        return Err(HeaderFault::field(field::PLEN));
    }
    let pdo = u32::from(common.pdo);
    let plausible = pdo == 0 || (u32::from(common.hlen)..=common.plen).contains(&pdo);
    if plausible { Ok(layout) } else { Err(HeaderFault::field(field::PDO)) }
}

fn check_data_limit(layout: Layout, rules: &Rules) -> Result<Layout, HeaderFault> {
    match layout.pdu_type {
        PduType::CapsuleCmd if layout.data_bytes > rules.capsule_data_max_bytes => Err(HeaderFault::field(field::PLEN)),
        PduType::H2CData if layout.data_bytes > rules.data_max_bytes => Err(HeaderFault::of(FatalError::LimitExceeded)),
        PduType::C2HData if layout.data_bytes > rules.data_max_bytes => {
            Err(HeaderFault::of(FatalError::DataOutOfRange))
        }
        _ => Ok(layout),
    }
}

/// Checks the fields of a whole header that need no knowledge of commands.
pub fn check_pdu(pdu: &Pdu, layout: &Layout, rules: &Rules) -> Result<(), HeaderFault> {
    match pdu {
        Pdu::ICReq(ICReq { pfv, hpda, .. }) => check_connection(*pfv, *hpda),
        Pdu::ICResp(response) => check_ic_resp(response, rules),
        Pdu::H2CData(data) if data.datal != layout.data_bytes => Err(HeaderFault::field(field::DATAL)),
        Pdu::C2HData(data) if data.datal != layout.data_bytes => Err(HeaderFault::field(field::DATAL)),
        // SUCCESS stands in for the completion, which can only follow the last data (§3.6.2.9).
        Pdu::C2HData(data) if data.common.has(FLAG_SUCCESS) && !data.common.has(FLAG_LAST) => {
            Err(HeaderFault::field(field::FLAGS))
        }
        Pdu::R2T(r2t) if r2t.r2tl == 0 => Err(HeaderFault::field(field::DATAL)),
        _ => Ok(()),
    }
}

fn check_connection(pfv: u16, alignment: u8) -> Result<(), HeaderFault> {
    if pfv != 0 {
        return Err(HeaderFault { error: FatalError::UnsupportedParameter, info: field::PFV });
    }
    if alignment > ALIGNMENT_MAX {
        return Err(HeaderFault::field(field::ALIGNMENT));
    }
    Ok(())
}

fn check_ic_resp(response: &ICResp, rules: &Rules) -> Result<(), HeaderFault> {
    check_connection(response.pfv, response.cpda)?;
    let asked = u8::from(rules.header_digest) | u8::from(rules.data_digest) << 1;
    if response.dgst & 3 & !asked != 0 {
        return Err(HeaderFault::field(field::DGST));
    }
    if response.maxh2cdata < MAXH2CDATA_MIN_BYTES || !response.maxh2cdata.is_multiple_of(4) {
        return Err(HeaderFault::field(field::MAXH2CDATA));
    }
    Ok(())
}
