//! From an untrusted command to a checked request, once (NVM Command Set 1.0 §3.2).
//!
//! Owns the rules of the NVM command set's fields. Invariant: a [`Request`]'s range lies inside the namespace, its
//! length keeps MDTS, and its data's length is the range's.

use std::sync::Arc;

use super::sgl::{Rejection, check_from_host, check_to_host, check_without_data};
use crate::backend::{Backend, LbaRange};
use crate::proto::controller_shared::{ControllerLimits, Namespace, NamespaceTable};
use crate::wire::bytes::{u32_at, u64_at};
use crate::wire::opcode::nvm;
use crate::wire::{NamespaceId, Sqe, Status};

/// Bytes of one DSM range.
pub(super) const DSM_RANGE_BYTES: usize = 16;
/// What Linux always sends for DSM, whatever the number of ranges: 256 ranges' worth.
const DSM_DATA_MAX_BYTES: u32 = 4096;

/// Bytes of command fields, for the error log's parameter location.
mod location {
    pub(super) const OPCODE: u16 = 0;
    pub(super) const NSID: u16 = 4;
    pub(super) const SLBA: u16 = 40;
    pub(super) const CDW12: u16 = 48;
    pub(super) const PRINFO: u16 = 51 | 2 << 8;
    pub(super) const DTYPE: u16 = 50 | 4 << 8;
}

/// What a command asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Read {
        range: LbaRange,
    },
    Write {
        range: LbaRange,
        fua: bool,
    },
    Compare {
        range: LbaRange,
    },
    Verify {
        range: LbaRange,
    },
    WriteZeroes {
        range: LbaRange,
        deallocate: bool,
        fua: bool,
    },
    /// Data: `range_count` ranges; not `deallocate`: only hints that nothing is done with.
    DatasetManagement {
        range_count: u16,
        deallocate: bool,
    },
    Flush,
}

/// The command's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    None,
    ToHost(u32),
    FromHost(u32),
}

/// Who is to be asked. Nearly always one, which costs no allocation.
#[derive(Clone)]
pub(super) enum Targets {
    None,
    One(Arc<dyn Backend>),
    /// Flush of all namespaces.
    Many(Vec<Arc<dyn Backend>>),
}

impl Targets {
    /// The next one.
    pub(super) fn pop(&mut self) -> Option<Arc<dyn Backend>> {
        match self {
            Self::None => None,
            Self::Many(backends) => backends.pop(),
            Self::One(_) => match std::mem::replace(self, Self::None) {
                Self::One(backend) => Some(backend),
                _ => None,
            },
        }
    }

    /// Nobody is left to be asked.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::None => true,
            Self::One(_) => false,
            Self::Many(backends) => backends.is_empty(),
        }
    }
}

/// A command that may be done.
pub(super) struct Checked {
    pub(super) request: Request,
    pub(super) data: Data,
    pub(super) targets: Targets,
    pub(super) block_bytes: u32,
}

/// Checks a command with `capsule_bytes` of data in its capsule.
pub(super) fn check(
    sqe: &Sqe,
    capsule_bytes: u32,
    namespaces: &NamespaceTable,
    limits: &ControllerLimits,
) -> Result<Checked, Rejection> {
    match sqe.opcode() {
        nvm::FLUSH => check_flush(sqe, capsule_bytes, namespaces),
        nvm::READ | nvm::WRITE | nvm::COMPARE => check_transfer(sqe, capsule_bytes, namespaces, limits),
        nvm::VERIFY | nvm::WRITE_ZEROES => check_range_only(sqe, capsule_bytes, namespaces, limits),
        nvm::DATASET_MANAGEMENT => check_dataset_management(sqe, capsule_bytes, namespaces),
        _ => Err(Rejection::at(Status::INVALID_OPCODE, location::OPCODE)),
    }
}

fn find<'a>(sqe: &Sqe, namespaces: &'a NamespaceTable) -> Result<&'a Namespace, Rejection> {
    // 0 and FFFFFFFFh are in no table.
    let found = namespaces.get(sqe.namespace_id());
    found.ok_or(Rejection::at(Status::INVALID_NAMESPACE, location::NSID))
}

fn find_writable<'a>(sqe: &Sqe, namespaces: &'a NamespaceTable) -> Result<&'a Namespace, Rejection> {
    let namespace = find(sqe, namespaces)?;
    if namespace.write_protected {
        return Err(Rejection::at(Status::NAMESPACE_WRITE_PROTECTED, location::NSID));
    }
    Ok(namespace)
}

fn check_flush(sqe: &Sqe, capsule_bytes: u32, namespaces: &NamespaceTable) -> Result<Checked, Rejection> {
    check_without_data(capsule_bytes)?;
    let targets = if sqe.namespace_id() == NamespaceId::ALL {
        Targets::Many(namespaces.iter().map(|n| Arc::clone(&n.backend)).collect())
    } else {
        Targets::One(Arc::clone(&find(sqe, namespaces)?.backend))
    };
    Ok(Checked { request: Request::Flush, data: Data::None, targets, block_bytes: 0 })
}

fn check_transfer(
    sqe: &Sqe,
    capsule_bytes: u32,
    namespaces: &NamespaceTable,
    limits: &ControllerLimits,
) -> Result<Checked, Rejection> {
    let is_write = sqe.opcode() == nvm::WRITE;
    let namespace = if is_write { find_writable(sqe, namespaces)? } else { find(sqe, namespaces)? };
    check_protection(sqe)?;
    if is_write {
        check_directive(sqe)?;
    }
    let geometry = namespace.backend.geometry();
    let lba_count = block_count(sqe);
    // MDTS before the range, so that a host that probes for it near the end learns the right thing.
    let len_bytes = lba_count.saturating_mul(u64::from(geometry.block_bytes));
    let len_bytes = u32::try_from(len_bytes).ok().filter(|bytes| *bytes <= limits.mdts_bytes);
    let len_bytes = len_bytes.ok_or(Rejection::at(Status::INVALID_FIELD, location::CDW12))?;
    let range = check_range(sqe, lba_count, geometry.block_count)?;
    let fua = sqe.dword(12) & 1 << 30 != 0;
    let (request, data) = match sqe.opcode() {
        nvm::READ => (Request::Read { range }, Data::ToHost(check_to_host(sqe, len_bytes, capsule_bytes)?)),
        opcode => {
            let len_bytes = check_from_host(sqe, len_bytes..=len_bytes, capsule_bytes)?;
            let is_compare = opcode == nvm::COMPARE;
            let request = if is_compare { Request::Compare { range } } else { Request::Write { range, fua } };
            (request, Data::FromHost(len_bytes))
        }
    };
    let targets = Targets::One(Arc::clone(&namespace.backend));
    Ok(Checked { request, data, targets, block_bytes: geometry.block_bytes })
}

fn check_range_only(
    sqe: &Sqe,
    capsule_bytes: u32,
    namespaces: &NamespaceTable,
    limits: &ControllerLimits,
) -> Result<Checked, Rejection> {
    let is_verify = sqe.opcode() == nvm::VERIFY;
    let namespace = if is_verify { find(sqe, namespaces)? } else { find_writable(sqe, namespaces)? };
    check_protection(sqe)?;
    check_without_data(capsule_bytes)?;
    let geometry = namespace.backend.geometry();
    let lba_count = block_count(sqe);
    let len_bytes = lba_count.saturating_mul(u64::from(geometry.block_bytes));
    let too_long = limits.write_zeroes_bytes.is_some_and(|most| len_bytes > u64::from(most));
    if !is_verify && too_long {
        return Err(Rejection::at(Status::INVALID_FIELD, location::CDW12));
    }
    let range = check_range(sqe, lba_count, geometry.block_count)?;
    let cdw12 = sqe.dword(12);
    let request = if is_verify {
        Request::Verify { range }
    } else {
        Request::WriteZeroes { range, deallocate: cdw12 & 1 << 25 != 0, fua: cdw12 & 1 << 30 != 0 }
    };
    let targets = Targets::One(Arc::clone(&namespace.backend));
    Ok(Checked { request, data: Data::None, targets, block_bytes: geometry.block_bytes })
}

fn check_dataset_management(sqe: &Sqe, capsule_bytes: u32, namespaces: &NamespaceTable) -> Result<Checked, Rejection> {
    let namespace = find_writable(sqe, namespaces)?;
    // NR is 0-based and 8 bits wide: 1 to 256 ranges.
    let range_count = (sqe.dword(10) & 0xff) as u16 + 1;
    let deallocate = sqe.dword(11) & 1 << 2 != 0;
    let need = u32::from(range_count) * DSM_RANGE_BYTES as u32;
    let len_bytes = check_from_host(sqe, need..=DSM_DATA_MAX_BYTES, capsule_bytes)?;
    Ok(Checked {
        request: Request::DatasetManagement { range_count, deallocate },
        data: Data::FromHost(len_bytes),
        targets: Targets::One(Arc::clone(&namespace.backend)),
        block_bytes: 0,
    })
}

/// NLB is 0-based.
fn block_count(sqe: &Sqe) -> u64 {
    u64::from(sqe.dword(12) & 0xffff) + 1
}

fn check_range(sqe: &Sqe, lba_count: u64, size: u64) -> Result<LbaRange, Rejection> {
    let slba = sqe.cdw10_11();
    match slba.checked_add(lba_count) {
        Some(end) if end <= size => Ok(LbaRange { slba, lba_count }),
        _ => Err(Rejection::at(Status::LBA_OUT_OF_RANGE, location::SLBA)),
    }
}

/// No namespace has protection information: any PRACT or PRCHK bit asks for what isn't there.
fn check_protection(sqe: &Sqe) -> Result<(), Rejection> {
    if sqe.dword(12) >> 26 & 0xf == 0 { Ok(()) } else { Err(Rejection::at(Status::INVALID_FIELD, location::PRINFO)) }
}

/// Directives aren't supported (OACS bit 5 is 0).
fn check_directive(sqe: &Sqe) -> Result<(), Rejection> {
    if sqe.dword(12) >> 20 & 0xf == 0 { Ok(()) } else { Err(Rejection::at(Status::INVALID_FIELD, location::DTYPE)) }
}

/// The ranges of a DSM command's data, all inside a namespace of `size` blocks. Empty ones are left out.
pub(super) fn dsm_ranges(data: &[u8], range_count: u16, size: u64) -> Result<Vec<LbaRange>, Rejection> {
    let (ranges, _) = data.as_chunks::<DSM_RANGE_BYTES>();
    let mut checked = Vec::with_capacity(usize::from(range_count));
    for range in ranges.iter().take(usize::from(range_count)) {
        let (lba_count, slba) = (u64::from(u32_at(range, 4)), u64_at(range, 8));
        match slba.checked_add(lba_count) {
            Some(end) if end <= size && lba_count > 0 => checked.push(LbaRange { slba, lba_count }),
            Some(end) if end <= size => {}
            _ => return Err(Rejection::at(Status::LBA_OUT_OF_RANGE, u16::MAX)),
        }
    }
    Ok(checked)
}
