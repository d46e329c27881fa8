//! Why a change of the registry was refused, in words for whoever asked for it.

use std::io;
use std::net::SocketAddr;

use uuid::Uuid;

use crate::wire::nqn::{Nqn, NqnError};

/// A refused change: the field, the rule and the value; nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// A name breaks the rules of NQNs.
    #[error("{field}: {rule} (is '{value}')")]
    Nqn {
        /// Whose name.
        field: &'static str,
        /// What was given, escaped.
        value: String,
        /// The rule that it breaks.
        rule: NqnError,
    },
    /// The discovery subsystem's name is taken by definition.
    #[error("subsystem nqn: must not be the discovery subsystem's well-known name")]
    DiscoveryNqn,
    /// A text field breaks its rule.
    #[error("{field}: must be 1 to {max_bytes} printable ASCII characters (is '{value}')")]
    Text {
        /// Which field.
        field: &'static str,
        /// Its limit.
        max_bytes: usize,
        /// What was given, escaped.
        value: String,
    },
    /// There is one of that name.
    #[error("subsystem nqn: '{nqn}' exists already")]
    SubsystemExists {
        /// Its name.
        nqn: Nqn,
    },
    /// There is none of that name.
    #[error("subsystem nqn: there is no '{nqn}'")]
    NoSuchSubsystem {
        /// The name asked for, escaped.
        nqn: String,
    },
    /// The nsid can't be used.
    #[error("nsid: must be 1 to {max} (is {nsid})")]
    Nsid {
        /// What was given.
        nsid: u32,
        /// The largest possible.
        max: u32,
    },
    /// The nsid is taken.
    #[error("nsid: {nsid} of '{nqn}' is taken already")]
    NamespaceExists {
        /// The subsystem.
        nqn: Nqn,
        /// The nsid.
        nsid: u32,
    },
    /// There is no such namespace.
    #[error("nsid: '{nqn}' has no namespace {nsid}")]
    NoSuchNamespace {
        /// The subsystem.
        nqn: Nqn,
        /// The nsid.
        nsid: u32,
    },
    /// Another namespace has the same UUID; hosts would take both for one.
    #[error("uuid: {uuid} belongs to namespace {owner_nsid} of '{owner}' already")]
    DuplicateUuid {
        /// The UUID.
        uuid: Uuid,
        /// Who has it.
        owner: Nqn,
        /// Its namespace.
        owner_nsid: u32,
    },
    /// The all-zero UUID, which means "none".
    #[error("uuid: must not be all zero")]
    NilUuid,
    /// A block size that hosts can't be offered.
    #[error("block size: must be 512 or 4096 (is {block_bytes})")]
    BlockSize {
        /// What the back end says.
        block_bytes: u32,
    },
    /// A namespace of no blocks.
    #[error("size: must be at least one block")]
    Empty,
    /// The host is in the list already.
    #[error("host nqn: '{host}' is allowed on '{nqn}' already")]
    HostExists {
        /// The subsystem.
        nqn: Nqn,
        /// The host.
        host: Nqn,
    },
    /// The host isn't in the list.
    #[error("host nqn: '{host}' isn't in the list of '{nqn}'")]
    NoSuchHost {
        /// The subsystem.
        nqn: Nqn,
        /// The host.
        host: Nqn,
    },
    /// An address that can't be listened on.
    #[error("address: must be an IPv4 or IPv6 address without brackets, IPv6 link-local with %scope (is '{value}')")]
    Address {
        /// What was given, escaped.
        value: String,
    },
    /// There is a listener on it.
    #[error("listener: {address} is listened on already")]
    ListenerExists {
        /// The address.
        address: SocketAddr,
    },
    /// There is no listener on it.
    #[error("listener: there is none on {address}")]
    NoSuchListener {
        /// The address.
        address: SocketAddr,
    },
    /// The system refused the address.
    #[error("listener: can't listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
    /// A limit of the configuration.
    #[error("{what}: the limit is {limit}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// How many.
        limit: usize,
    },
    /// The target is going down.
    #[error("the target is shutting down")]
    ShuttingDown,
    /// Commands of a controller that was closed haven't ended in the time given.
    #[error("'{nqn}': {controllers} controllers still have commands in flight after {waited_ms} ms")]
    StillBusy {
        /// The subsystem.
        nqn: Nqn,
        /// How many controllers.
        controllers: usize,
        /// How long was waited.
        waited_ms: u64,
    },
}

impl TargetError {
    /// Checks a name given for `field`.
    pub(super) fn parse_nqn(field: &'static str, value: &str) -> Result<Nqn, Self> {
        Nqn::parse(value).map_err(|rule| Self::Nqn { field, value: escape(value), rule })
    }

    /// Checks a text of printable ASCII.
    pub(super) fn check_text(field: &'static str, max_bytes: usize, value: &str) -> Result<(), Self> {
        let printable = value.bytes().all(|b| (0x20..0x7F).contains(&b));
        if printable && (1..=max_bytes).contains(&value.len()) && value.trim() == value {
            return Ok(());
        }
        Err(Self::Text { field, max_bytes, value: escape(value) })
    }
}

/// A value that somebody gave, fit for a message: escaped, and cut where it is long.
pub(super) fn escape(value: &str) -> String {
    const SHOWN: usize = 300;
    let mut shown: String = value.escape_debug().take(SHOWN).collect();
    if value.len() > SHOWN {
        shown.push('…');
    }
    shown
}
