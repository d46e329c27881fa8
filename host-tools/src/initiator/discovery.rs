//! The discovery log (NVMe-oF 1.1 §5): read whole, from one generation.

use nvmf_target::wire::log_pages::{DISCOVERY_ENTRY_BYTES, DiscoveryEntry, decode_discovery_header, lid};

use super::{ConnectionError, Controller};

/// More entries than this are taken for nonsense.
const MAX_ENTRIES: u64 = 65_536;
/// How often a log that changes under the reader is begun again.
const ATTEMPTS: usize = 10;
/// Bytes read at a time: every target serves 4 KiB.
const PIECE_BYTES: u64 = 4096;

/// What this host may connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveryLog {
    /// GENCTR.
    pub generation: u64,
    /// The entries in the target's order.
    pub entries: Vec<DiscoveryEntry>,
}

/// Reads the log; begins again if it changes meanwhile.
pub fn read(controller: &Controller) -> Result<DiscoveryLog, ConnectionError> {
    for _ in 0..ATTEMPTS {
        let (generation, count) = header(controller)?;
        let entries = entries(controller, count)?;
        if header(controller)? == (generation, count) {
            return Ok(DiscoveryLog { generation, entries });
        }
    }
    Err(ConnectionError::BadAnswer { what: "discovery log (it changed each time that it was read)" })
}

fn header(controller: &Controller) -> Result<(u64, u64), ConnectionError> {
    let bytes = controller.log_page(lid::DISCOVERY, 0, DISCOVERY_ENTRY_BYTES as u32)?;
    let header = decode_discovery_header(&bytes).filter(|(_, count)| *count <= MAX_ENTRIES);
    header.ok_or(ConnectionError::BadAnswer { what: "discovery log header" })
}

fn entries(controller: &Controller, count: u64) -> Result<Vec<DiscoveryEntry>, ConnectionError> {
    let mut entries = Vec::new();
    let entry_bytes = DISCOVERY_ENTRY_BYTES as u64;
    let mut left = count * entry_bytes;
    let mut offset = entry_bytes;
    while left > 0 {
        let piece = left.min(PIECE_BYTES);
        let bytes = controller.log_page(lid::DISCOVERY, offset, piece as u32)?;
        let (chunks, _) = bytes.as_chunks::<DISCOVERY_ENTRY_BYTES>();
        entries.extend(chunks.iter().map(DiscoveryEntry::decode));
        offset += piece;
        left -= piece;
    }
    Ok(entries)
}
