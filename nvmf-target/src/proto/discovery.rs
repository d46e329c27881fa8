//! The discovery log (NVMe-oF 1.1 §5.3): what a host is told about subsystems and where they are.
//!
//! Owns the making of entries. It must not know connections or which hosts are allowed: its source lists only what
//! the asking host may see. Invariant: an entry's address can be connected to by the host that reads it.

use std::net::{IpAddr, SocketAddr};

use crate::wire::connect::CNTLID_DYNAMIC;
use crate::wire::log_pages::{AddressFamily, DiscoveryEntry, SUBTYPE_NVM, TREQ_DISABLE_SQ_FLOW_CONTROL, TRTYPE_TCP};
use crate::wire::nqn::Nqn;

/// Entries of the admin queue that a host may ask for at least (ASQSZ), and that this target allows.
pub const ADMIN_QUEUE_ENTRIES: u16 = 32;

/// Where subsystems are listened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// PORTID.
    pub id: u16,
    /// The address listened on; may be unspecified (`0.0.0.0`, `::`).
    pub address: SocketAddr,
}

/// What one host sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveryView {
    /// GENCTR.
    pub generation: u64,
    /// The entries.
    pub entries: Vec<DiscoveryEntry>,
}

/// Gives the log as the connected host sees it now.
pub trait DiscoverySource: Send + Sync {
    /// The host's view.
    fn view(&self) -> DiscoveryView;
}

/// The entries of `subsystems` on `ports`, for a host that reached the target at `local`.
pub fn entries<'a>(subsystems: impl Iterator<Item = &'a Nqn>, ports: &[Port], local: IpAddr) -> Vec<DiscoveryEntry> {
    let reachable: Vec<(Port, IpAddr)> =
        ports.iter().filter_map(|port| Some((*port, reachable_address(port.address, local)?))).collect();
    subsystems.flat_map(|nqn| reachable.iter().map(move |(port, address)| entry(nqn, port, *address))).collect()
}

fn entry(nqn: &Nqn, port: &Port, address: IpAddr) -> DiscoveryEntry {
    let family = if address.is_ipv4() { AddressFamily::Ipv4 } else { AddressFamily::Ipv6 };
    DiscoveryEntry {
        trtype: TRTYPE_TCP,
        adrfam: family as u8,
        subtype: SUBTYPE_NVM,
        treq: TREQ_DISABLE_SQ_FLOW_CONTROL,
        portid: port.id,
        cntlid: CNTLID_DYNAMIC,
        asqsz: ADMIN_QUEUE_ENTRIES,
        eflags: 0,
        trsvcid: port.address.port().to_string(),
        subnqn: nqn.as_str().to_owned(),
        traddr: address.to_string(),
        sectype: 0,
    }
}

/// The address to tell. One listened on as a wildcard is reached as the host reached us, if the family is right.
fn reachable_address(listened: SocketAddr, local: IpAddr) -> Option<IpAddr> {
    let address = listened.ip().to_canonical();
    if !address.is_unspecified() {
        return Some(address);
    }
    let local = local.to_canonical();
    // `::` takes IPv4 connections too.
    let taken = listened.is_ipv6() || local.is_ipv4();
    taken.then_some(local)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(listened: &str, local: &str) -> Vec<(u8, String, String)> {
        let nqn = Nqn::parse("nqn.2014-08.org.x:y").unwrap();
        let ports = [Port { id: 1, address: listened.parse().unwrap() }];
        let entries = entries([nqn].iter(), &ports, local.parse().unwrap());
        entries.into_iter().map(|e| (e.adrfam, e.traddr, e.trsvcid)).collect()
    }

    /// H174: IPv6 has ADRFAM 2 and no brackets; a wildcard is told as the address that the host reached.
    #[test]
    fn h174_addresses_are_told_as_a_host_can_use_them() {
        let one = |family, address: &str| vec![(family, address.to_owned(), "4420".to_owned())];
        assert_eq!(told("127.0.0.1:4420", "127.0.0.1"), one(1, "127.0.0.1"));
        assert_eq!(told("[fd00::1]:4420", "::1"), one(2, "fd00::1"));
        assert_eq!(told("[fe80::1%3]:4420", "fe80::1"), one(2, "fe80::1"));
        assert_eq!(told("0.0.0.0:4420", "192.0.2.7"), one(1, "192.0.2.7"));
        assert_eq!(told("[::]:4420", "fd00::9"), one(2, "fd00::9"));
        assert_eq!(told("[::]:4420", "::ffff:192.0.2.7"), one(1, "192.0.2.7"));
        assert_eq!(told("[::ffff:192.0.2.7]:4420", "::1"), one(1, "192.0.2.7"));
        assert_eq!(told("0.0.0.0:4420", "fd00::9"), vec![], "not reachable that way");
    }
}
