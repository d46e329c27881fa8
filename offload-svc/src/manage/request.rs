//! What clients of the management API send.
//!
//! Owns the bodies of requests. Must not know how they are carried out. Invariant: names, sizes and addresses have the same
//! types, and so the same rules, as in the configuration file.

use serde::{Deserialize, Serialize};

use crate::config::names::{Nqn, Serial, VolumeName};
use crate::config::values::{Address, BackendSpec, BlockSize, ByteSize, Cipher, Compression, MemberSpec};

/// `POST /v1/volume/create`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeRequest {
    /// Its name.
    pub name: VolumeName,
    /// Its size.
    pub size: ByteSize,
    /// Its block size, 4096 by default.
    #[serde(default = "default_block_size")]
    pub block_size: BlockSize,
    /// Its compression, lz4 by default.
    #[serde(default)]
    pub compression: Compression,
    /// Its cipher, aes-256-gcm by default.
    #[serde(default)]
    pub cipher: Cipher,
}

fn default_block_size() -> BlockSize {
    BlockSize::B4096
}

/// `POST /v1/volume/delete`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeRemoval {
    /// Its name.
    pub name: VolumeName,
}

/// `POST /v1/volume/snapshot`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// The volume.
    pub volume: VolumeName,
    /// The snapshot's name.
    pub name: VolumeName,
}

/// `POST /v1/volume/clone`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloneRequest {
    /// The snapshot or volume that it begins as.
    pub origin: VolumeName,
    /// Its name.
    pub name: VolumeName,
    /// Its compression; its origin's where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
}

/// `POST /v1/volume/resize`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeResize {
    /// Its name.
    pub name: VolumeName,
    /// The new size.
    pub size: ByteSize,
}

/// `POST /v1/key/rotate`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRotation {
    /// The volume's name.
    pub volume: VolumeName,
}

/// `POST /v1/subsystem/add`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubsystemRequest {
    /// Its name.
    pub nqn: Nqn,
    /// Its serial number; made from the name where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<Serial>,
    /// Lets every host in.
    #[serde(default)]
    pub allow_any_host: bool,
    /// The hosts that may connect.
    #[serde(default)]
    pub hosts: Vec<Nqn>,
}

/// `POST /v1/subsystem/remove`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubsystemRemoval {
    /// Its name.
    pub nqn: Nqn,
}

/// `POST /v1/namespace/add`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceRequest {
    /// The subsystem.
    pub nqn: Nqn,
    /// Its id.
    pub nsid: u32,
    /// What stands behind it.
    pub backend: BackendSpec,
    /// Block size of a plain back end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<BlockSize>,
}

/// `POST /v1/namespace/remove`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceRemoval {
    /// The subsystem.
    pub nqn: Nqn,
    /// Its id.
    pub nsid: u32,
}

/// `POST /v1/host/allow`, `POST /v1/host/deny`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRequest {
    /// The subsystem.
    pub nqn: Nqn,
    /// The host.
    pub host: Nqn,
}

/// `POST /v1/listener/add`, `POST /v1/listener/remove`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenerRequest {
    /// The address.
    pub address: Address,
    /// The port.
    pub port: u16,
}

/// `POST /v1/pool/replace`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberReplacement {
    /// The member that goes, by index, UUID or name.
    pub old: String,
    /// What takes its place.
    pub new: MemberSpec,
}

/// `POST /v1/pool/scrub`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubRequest {
    /// Begins a scrub, if none runs; otherwise ends the one that does.
    pub run: bool,
}

/// `POST /v1/pool/attach`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberReturn {
    /// The member that is there again.
    pub member: MemberSpec,
}

/// `POST /v1/key/member-destroyed`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberDestroyed {
    /// The member's UUID, as receipts name it.
    pub member: uuid::Uuid,
}
