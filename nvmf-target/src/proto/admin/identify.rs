//! Identify (NVMe Base 2.0 §5.17): which structure a command asks for, and what stands in it.
//!
//! It must not know queues or features. Invariant: every answer is exactly one 4,096-byte structure or a status.

use uuid::Uuid;

use super::facts::ControllerFacts;
use super::{async_event, error_log, keep_alive};
use crate::backend::Geometry;
use crate::wire::features::AsyncEventConfig;
use crate::wire::identify::{
    self, ControllerType, IdentifyController, IdentifyIndependentNamespace, IdentifyNamespace, IdentifyNvmController,
    ascii_field, cns,
};
use crate::wire::{Sqe, Status, properties};

/// Abort commands that may be outstanding, 0-based (ACL).
const ABORT_LIMIT: u8 = 3;
/// LPA: command effects, and Get Log Page with offsets and lengths over 4 KiB.
const LPA: u8 = 1 << 1 | 1 << 2;
/// ONCS: Compare, Dataset Management, Write Zeroes, Save/Select in features, Verify.
const ONCS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 7;
/// CTRATT: 128-bit host identifiers, traffic-based keep-alive.
const CTRATT: u32 = 1 | 1 << 6;
/// VWC bits 2:1: Flush with nsid FFFFFFFFh flushes every namespace.
const VWC_FLUSH_ALL: u8 = 3 << 1;
/// SGLS: SGLs, in-capsule offsets, transport data blocks.
const SGLS: u32 = 1 | 1 << 21;
const SGLS_IN_CAPSULE: u32 = 1 << 20;
/// Verify and Write Zeroes move no data and so aren't under MDTS; the I/O queue takes any NLB.
const NO_SIZE_LIMIT: u8 = 0;

/// One namespace as Identify shows it.
#[derive(Debug, Clone)]
pub struct NamespaceView {
    /// Size and shape.
    pub geometry: Geometry,
    /// UUID; NGUID has the same bytes.
    pub uuid: Uuid,
    /// What would change it is refused.
    pub write_protected: bool,
}

/// Where the answers come from.
pub trait Namespaces {
    /// The namespace `nsid`, if the controller has it.
    fn get(&self, nsid: u32) -> Option<NamespaceView>;
    /// All nsids above `nsid`, rising.
    fn after(&self, nsid: u32) -> Vec<u32>;
    /// The subsystem's controllers, rising.
    fn controllers(&self) -> Vec<u16>;
}

/// An Identify command's own fields.
#[derive(Debug, Clone, Copy)]
struct Request {
    cns: u8,
    cntid: u16,
    csi: u8,
    nsid: u32,
}

impl Request {
    fn of(sqe: &Sqe) -> Self {
        Self {
            cns: sqe.dword(10) as u8,
            cntid: (sqe.dword(10) >> 16) as u16,
            csi: (sqe.dword(11) >> 24) as u8,
            nsid: sqe.namespace_id().0,
        }
    }
}

/// Answers an I/O controller's Identify.
pub fn io_controller(sqe: &Sqe, facts: &ControllerFacts, namespaces: &dyn Namespaces) -> Result<Vec<u8>, Status> {
    let request = Request::of(sqe);
    let nsid = request.nsid;
    match request.cns {
        cns::CONTROLLER => Ok(controller(facts, write_cache(namespaces)).encode()),
        cns::NAMESPACE | cns::ALLOCATED_NAMESPACE => existing(nsid, facts, namespaces, |view| namespace(view).encode()),
        cns::ACTIVE_NAMESPACES | cns::ALLOCATED_NAMESPACES => list(nsid, namespaces),
        cns::NAMESPACE_DESCRIPTORS => {
            let view = namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
            Ok(identify::namespace_descriptors(view.uuid.as_bytes(), view.uuid.as_bytes()))
        }
        cns::COMMAND_SET_NAMESPACE => {
            nvm_only(request.csi)?;
            existing(nsid, facts, namespaces, |_| vec![0; identify::IDENTIFY_BYTES])
        }
        cns::COMMAND_SET_CONTROLLER => {
            nvm_only(request.csi)?;
            Ok(IdentifyNvmController { vsl: NO_SIZE_LIMIT, wzsl: NO_SIZE_LIMIT, ..Default::default() }.encode())
        }
        cns::COMMAND_SET_ACTIVE_NAMESPACES => {
            nvm_only(request.csi)?;
            list(nsid, namespaces)
        }
        cns::INDEPENDENT_NAMESPACE => existing(nsid, facts, namespaces, |view| {
            let nsattr = view.write_protected.into();
            IdentifyIndependentNamespace { nmic: 1, nstat: 1, nsattr, ..Default::default() }.encode()
        }),
        cns::ATTACHED_CONTROLLERS => {
            namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
            Ok(controllers(request.cntid, namespaces))
        }
        cns::CONTROLLERS => Ok(controllers(request.cntid, namespaces)),
        cns::IO_COMMAND_SETS => Ok(identify::io_command_sets()),
        _ => Err(Status::INVALID_FIELD.dnr()),
    }
}

/// Answers a discovery controller's Identify: it has no namespaces.
pub fn discovery_controller(sqe: &Sqe, facts: &ControllerFacts) -> Result<Vec<u8>, Status> {
    match Request::of(sqe).cns {
        cns::CONTROLLER => Ok(discovery(facts).encode()),
        _ => Err(Status::INVALID_FIELD.dnr()),
    }
}

/// Runs `show` on a namespace. An nsid that could exist but doesn't is shown as zeroes (§5.17.2.1), one that can't
/// exist is refused.
fn existing(
    nsid: u32,
    facts: &ControllerFacts,
    namespaces: &dyn Namespaces,
    show: impl FnOnce(&NamespaceView) -> Vec<u8>,
) -> Result<Vec<u8>, Status> {
    if nsid == 0 || nsid > facts.max_nsid {
        return Err(Status::INVALID_NAMESPACE.dnr());
    }
    Ok(namespaces.get(nsid).map_or_else(|| vec![0; identify::IDENTIFY_BYTES], |view| show(&view)))
}

fn list(after: u32, namespaces: &dyn Namespaces) -> Result<Vec<u8>, Status> {
    if after >= identify::NSID_ALL - 1 {
        return Err(Status::INVALID_NAMESPACE.dnr());
    }
    Ok(identify::namespace_list(namespaces.after(after)))
}

fn controllers(from: u16, namespaces: &dyn Namespaces) -> Vec<u8> {
    let list: Vec<u16> = namespaces.controllers().into_iter().filter(|&id| id >= from).collect();
    identify::controller_list(&list)
}

fn nvm_only(csi: u8) -> Result<(), Status> {
    if csi == 0 { Ok(()) } else { Err(Status::INVALID_FIELD.dnr()) }
}

/// Whether any namespace has a volatile write cache.
pub fn write_cache(namespaces: &dyn Namespaces) -> bool {
    let mut all = namespaces.after(0).into_iter().filter_map(|nsid| namespaces.get(nsid));
    all.any(|view| view.geometry.volatile_write_cache)
}

/// What both kinds of controller have in common.
fn common(facts: &ControllerFacts) -> IdentifyController {
    IdentifyController {
        sn: ascii_field(&facts.serial),
        mn: ascii_field(&facts.model),
        fr: ascii_field(&facts.firmware),
        mdts: facts.mdts,
        cntlid: facts.cntlid,
        ver: properties::VERSION_2_0,
        ctratt: CTRATT,
        acl: ABORT_LIMIT,
        aerl: async_event::REQUEST_LIMIT as u8 - 1,
        elpe: error_log::ENTRY_LIMIT as u8 - 1,
        kas: keep_alive::GRANULARITY_100MS,
        maxcmd: facts.max_queue_entries,
        sgls: SGLS,
        subnqn: facts.subsystem.to_field(),
        msdbd: 1,
        ..Default::default()
    }
}

fn controller(facts: &ControllerFacts, write_cache: bool) -> IdentifyController {
    let in_capsule = if facts.in_capsule_bytes > 0 { SGLS_IN_CAPSULE } else { 0 };
    IdentifyController {
        cmic: 0b11, // Several ports and several controllers; no ANA.
        oaes: AsyncEventConfig::NAMESPACE_ATTRIBUTE,
        cntrltype: ControllerType::Io as u8,
        frmw: 1 | 1 << 1, // One slot, read only.
        lpa: LPA,
        sqes: 0x66,
        cqes: 0x44,
        nn: facts.max_nsid,
        mnan: facts.max_nsid,
        oncs: ONCS,
        fuses: 1,
        vwc: VWC_FLUSH_ALL | u8::from(write_cache),
        // One logical block is atomic, alone, in a power cut, and as Compare and Write: all three 0-based.
        awun: 0,
        awupf: 0,
        acwu: 0,
        sgls: SGLS | in_capsule,
        ioccsz: 4 + facts.in_capsule_bytes / 16,
        iorcsz: 1,
        ..common(facts)
    }
}

fn discovery(facts: &ControllerFacts) -> IdentifyController {
    IdentifyController {
        oaes: AsyncEventConfig::DISCOVERY_LOG_CHANGE,
        cntrltype: ControllerType::Discovery as u8,
        lpa: 1 << 2,
        ..common(facts)
    }
}

fn namespace(view: &NamespaceView) -> IdentifyNamespace {
    const THIN: u8 = 1;
    const WRITE_HINTS: u8 = 1 << 4;
    let geometry = &view.geometry;
    let granule = u16::try_from(geometry.preferred_write_blocks.clamp(1, 1 << 16) - 1).unwrap_or(u16::MAX);
    let thin = geometry.used_blocks < geometry.block_count || geometry.deallocate;
    IdentifyNamespace {
        nsze: geometry.block_count,
        ncap: geometry.block_count,
        nuse: geometry.used_blocks.min(geometry.block_count),
        nsfeat: WRITE_HINTS | if thin { THIN } else { 0 },
        nmic: 1,
        nsattr: view.write_protected.into(),
        // Deallocated blocks read as zeroes, and Write Zeroes may deallocate.
        dlfeat: if geometry.deallocate { 1 | 1 << 3 } else { 0 },
        nvmcap: u128::from(geometry.block_count) * u128::from(geometry.block_bytes),
        npwg: granule,
        npwa: granule,
        nows: granule,
        nguid: *view.uuid.as_bytes(),
        lbaf0: geometry.block_bytes.ilog2() << 16,
        ..Default::default()
    }
}
