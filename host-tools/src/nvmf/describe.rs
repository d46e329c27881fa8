//! What `discover` and `identify` print.

use std::fmt::Write as _;

use nvmf_target::wire::identify::ascii_text;
use nvmf_target::wire::log_pages::DiscoveryEntry;
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::initiator::discovery::DiscoveryLog;
use crate::initiator::{Controller, Namespace};

/// The log as nvme-cli prints it.
pub fn discovery_text(log: &DiscoveryLog) -> String {
    let mut out = format!("Discovery log: {} records, generation counter {}\n", log.entries.len(), log.generation);
    for (index, entry) in log.entries.iter().enumerate() {
        let _ = write!(
            out,
            "=====Discovery Log Entry {index}======\n\
             trtype:  {}\nadrfam:  {}\nsubtype: {}\ntreq:    {}\nportid:  {}\ntrsvcid: {}\nsubnqn:  {}\ntraddr:  {}\n\
             eflags:  {}\nsectype: {}\n",
            transport(entry),
            family(entry),
            subtype(entry),
            requirement(entry),
            entry.portid,
            entry.trsvcid,
            entry.subnqn,
            entry.traddr,
            flags(entry),
            security(entry),
        );
    }
    out
}

/// The log in nvme-cli's JSON names.
pub fn discovery_json(log: &DiscoveryLog) -> Value {
    let records: Vec<Value> = log
        .entries
        .iter()
        .map(|entry| {
            json!({
                "trtype": transport(entry), "adrfam": family(entry), "subtype": subtype(entry),
                "treq": requirement(entry), "portid": entry.portid, "cntlid": entry.cntlid, "asqsz": entry.asqsz,
                "trsvcid": entry.trsvcid, "subnqn": entry.subnqn, "traddr": entry.traddr,
                "eflags": flags(entry), "sectype": security(entry),
            })
        })
        .collect();
    json!({ "genctr": log.generation, "records": records })
}

fn transport(entry: &DiscoveryEntry) -> String {
    named(entry.trtype, &[(1, "rdma"), (2, "fc"), (3, "tcp"), (254, "loop")])
}

fn family(entry: &DiscoveryEntry) -> String {
    named(entry.adrfam, &[(1, "ipv4"), (2, "ipv6"), (3, "ib"), (4, "fibre-channel"), (254, "loop")])
}

fn subtype(entry: &DiscoveryEntry) -> String {
    named(entry.subtype, &[(1, "discovery subsystem"), (2, "nvme subsystem"), (3, "current discovery subsystem")])
}

fn requirement(entry: &DiscoveryEntry) -> String {
    let channel = named(entry.treq & 3, &[(0, "not specified"), (1, "required"), (2, "not required")]);
    if entry.treq & 4 != 0 { format!("{channel}, sq flow control disable supported") } else { channel }
}

fn security(entry: &DiscoveryEntry) -> String {
    named(entry.sectype, &[(0, "none"), (1, "tls"), (2, "tls13")])
}

fn flags(entry: &DiscoveryEntry) -> String {
    let named: Vec<&str> = [(1, "duplicate discovery information"), (2, "explicit discovery connections")]
        .into_iter()
        .filter(|(bit, _)| entry.eflags & bit != 0)
        .map(|(_, name)| name)
        .collect();
    if named.is_empty() { "none".to_owned() } else { named.join(", ") }
}

fn named(value: u8, names: &[(u8, &str)]) -> String {
    names.iter().find(|(v, _)| *v == value).map_or_else(|| format!("unknown ({value})"), |(_, name)| (*name).to_owned())
}

/// The UUID among a namespace's identification descriptors (NVMe Base 2.0 §5.17.2.3): type 3, 16 bytes.
pub fn uuid_of(descriptors: &[u8]) -> Option<Uuid> {
    let mut rest = descriptors;
    while let [kind, len, _, _, tail @ ..] = rest {
        if *kind == 0 {
            return None;
        }
        let value = tail.get(..usize::from(*len))?;
        if *kind == 3 {
            return Uuid::from_slice(value).ok();
        }
        rest = tail.get(usize::from(*len)..)?;
    }
    None
}

/// A controller and its namespaces.
#[derive(Debug, Serialize)]
pub struct Described {
    controller: DescribedController,
    namespaces: Vec<DescribedNamespace>,
}

#[derive(Debug, Serialize)]
struct DescribedController {
    cntlid: u16,
    subnqn: String,
    serial: String,
    model: String,
    firmware: String,
    version: String,
    max_transfer_bytes: u64,
    in_capsule_bytes: u64,
    max_commands: u16,
    keep_alive_granularity_ms: u32,
    volatile_write_cache: bool,
    max_namespaces: u32,
    compare_and_write: bool,
}

#[derive(Debug, Serialize)]
struct DescribedNamespace {
    nsid: u32,
    uuid: Option<Uuid>,
    nguid: String,
    block_bytes: u32,
    size_blocks: u64,
    size_bytes: u64,
    used_blocks: u64,
    thin: bool,
    deallocated_reads_zero: bool,
    write_protected: bool,
}

impl Described {
    /// What the controller says of itself and of these namespaces.
    pub fn of(controller: &Controller, namespaces: &[(Namespace, Option<Uuid>)]) -> Self {
        let id = controller.identity();
        let controller = DescribedController {
            cntlid: controller.cntlid(),
            subnqn: nvmf_target::wire::connect::escaped(&id.subnqn),
            serial: ascii_text(&id.sn),
            model: ascii_text(&id.mn),
            firmware: ascii_text(&id.fr),
            version: format!("{}.{}.{}", id.ver >> 16, id.ver >> 8 & 0xFF, id.ver & 0xFF),
            max_transfer_bytes: controller.max_transfer_bytes(),
            in_capsule_bytes: (u64::from(id.ioccsz) * 16).saturating_sub(64),
            max_commands: id.maxcmd,
            keep_alive_granularity_ms: u32::from(id.kas) * 100,
            volatile_write_cache: id.vwc & 1 != 0,
            max_namespaces: id.nn,
            compare_and_write: id.fuses & 1 != 0,
        };
        let namespaces = namespaces
            .iter()
            .map(|(namespace, uuid)| DescribedNamespace {
                nsid: namespace.nsid,
                uuid: *uuid,
                nguid: namespace.identity.nguid.iter().map(|b| format!("{b:02x}")).collect(),
                block_bytes: namespace.block_bytes,
                size_blocks: namespace.block_count,
                size_bytes: namespace.size_bytes(),
                used_blocks: namespace.identity.nuse,
                thin: namespace.identity.nsfeat & 1 != 0,
                deallocated_reads_zero: namespace.deallocated_reads_zero(),
                write_protected: namespace.identity.nsattr & 1 != 0,
            })
            .collect();
        Self { controller, namespaces }
    }

    /// As text.
    pub fn to_text(&self) -> String {
        let c = &self.controller;
        let mut out = String::new();
        let _ = writeln!(out, "controller {} of {}", c.cntlid, c.subnqn);
        let _ = writeln!(out, "  model {}, serial {}, firmware {}, NVMe {}", c.model, c.serial, c.firmware, c.version);
        let _ = writeln!(
            out,
            "  longest transfer {} bytes, in-capsule data {} bytes, {} commands a queue, keep-alive granularity {} ms",
            c.max_transfer_bytes, c.in_capsule_bytes, c.max_commands, c.keep_alive_granularity_ms
        );
        let cache = if c.volatile_write_cache {
            "present: Flush makes writes durable"
        } else {
            "none: completed writes are durable"
        };
        let _ = writeln!(out, "  volatile write cache {cache}; fused compare-and-write {}", yes(c.compare_and_write));
        for n in &self.namespaces {
            let uuid = n.uuid.map_or_else(|| "no UUID".to_owned(), |u| u.to_string());
            let _ = writeln!(
                out,
                "namespace {}: {} bytes = {} blocks of {}, {} used, {uuid}{}; deallocated blocks read zero: {}{}",
                n.nsid,
                n.size_bytes,
                n.size_blocks,
                n.block_bytes,
                n.used_blocks,
                if n.thin { ", thin" } else { "" },
                yes(n.deallocated_reads_zero),
                if n.write_protected { ", write-protected" } else { "" },
            );
        }
        if self.namespaces.is_empty() {
            out.push_str("no namespaces\n");
        }
        out
    }
}

fn yes(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> DiscoveryEntry {
        DiscoveryEntry {
            trtype: 3,
            adrfam: 2,
            subtype: 2,
            treq: 6,
            portid: 1,
            cntlid: 0xFFFF,
            asqsz: 32,
            eflags: 0,
            trsvcid: "4420".into(),
            subnqn: "nqn.2026-01.io.sluice:dev".into(),
            traddr: "::1".into(),
            sectype: 0,
        }
    }

    #[test]
    fn h174_an_ipv6_entry_prints_as_it_can_be_given_back() {
        let log = DiscoveryLog { generation: 7, entries: vec![entry()] };
        let text = discovery_text(&log);
        for line in [
            "1 records, generation counter 7",
            "adrfam:  ipv6\n",
            "traddr:  ::1\n",
            "trsvcid: 4420\n",
            "subtype: nvme subsystem\n",
        ] {
            assert!(text.contains(line), "{line} not in:\n{text}");
        }
        let json = discovery_json(&log);
        assert_eq!(json["records"][0]["traddr"], "::1");
        assert_eq!(json["records"][0]["treq"], "not required, sq flow control disable supported");
    }

    #[test]
    fn descriptors_of_any_length_are_walked_without_harm() {
        let mut bytes = vec![2, 16, 0, 0];
        bytes.extend([9; 16]);
        bytes.extend([3, 16, 0, 0]);
        bytes.extend([5; 16]);
        bytes.resize(4096, 0);
        assert_eq!(uuid_of(&bytes), Some(Uuid::from_bytes([5; 16])));
        assert_eq!(uuid_of(&[3, 16, 0, 0, 1]), None, "cut short");
        assert_eq!(uuid_of(&[3, 4, 0, 0, 1, 2, 3, 4]), None, "a UUID of the wrong length");
        assert_eq!(uuid_of(&[0; 64]), None);
        assert_eq!(uuid_of(&[]), None);
    }
}
