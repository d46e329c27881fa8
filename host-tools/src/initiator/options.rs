//! What a connection needs to know, and who this host says that it is.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use uuid::Uuid;

const UUID_NQN_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// How to connect to one subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Address of the listener.
    pub address: IpAddr,
    /// Port of the listener.
    pub port: u16,
    /// Subsystem.
    pub subsystem_nqn: String,
    /// This host's NQN.
    pub host_nqn: String,
    /// This host's id.
    pub host_id: Uuid,
    /// Ask for header digests.
    pub header_digest: bool,
    /// Ask for data digests.
    pub data_digest: bool,
    /// Ask for submission queue flow control to be off: completions may then come with the data.
    pub disable_sq_flow_control: bool,
    /// Keep-alive timeout; `None` turns it off.
    pub keep_alive: Option<Duration>,
    /// How many I/O queues to open; the target may grant fewer.
    pub io_queues: u16,
    /// Entries of each I/O queue.
    pub queue_size: u16,
    /// Longest wait without progress.
    pub timeout: Duration,
}

impl ConnectOptions {
    /// Where to connect to.
    pub fn socket_address(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// The NQN and id to use: the ones given, else the machine's (nvme-cli's files), else random ones.
pub fn host_identity(nqn: Option<&str>, id: Option<Uuid>) -> (String, Uuid) {
    let file = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let nqn = nqn.map(str::to_owned).or_else(|| file("/etc/nvme/hostnqn").filter(|n| n.starts_with("nqn.")));
    let id = id
        .or_else(|| nqn.as_deref().and_then(uuid_of_nqn))
        .or_else(|| file("/etc/nvme/hostid").and_then(|text| text.parse().ok()))
        .unwrap_or_else(Uuid::new_v4);
    (nqn.unwrap_or_else(|| format!("{UUID_NQN_PREFIX}{id}")), id)
}

fn uuid_of_nqn(nqn: &str) -> Option<Uuid> {
    nqn.strip_prefix(UUID_NQN_PREFIX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_follows_the_nqn_so_that_one_host_has_one_id() {
        let id = Uuid::from_u128(5);
        let nqn = format!("{UUID_NQN_PREFIX}{id}");
        assert_eq!(host_identity(Some(&nqn), None), (nqn.clone(), id));
        let other = Uuid::from_u128(6);
        assert_eq!(host_identity(Some(&nqn), Some(other)).1, other);
        let (named, named_id) = host_identity(Some("nqn.2026-01.x:h"), None);
        assert_eq!(named, "nqn.2026-01.x:h");
        assert!(!named_id.is_nil());
    }
}
