//! `offloadctl`: the management API on the command line.
//!
//! Owns commands, what they send, and exit codes. Must not know how the service works. Invariant: with `--json` the answer
//! goes to stdout as the service gave it, number for number; errors go to stderr with a non-zero exit code.

mod configuration;
mod receipts;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::de::DeserializeOwned;

use crate::config::names::{Nqn, Serial, VolumeName};
use crate::config::values::{Address, BackendSpec, BlockSize, ByteSize, Cipher, Compression, MemberSpec};
use crate::manage::client::{Client, ClientError};
use crate::manage::request;
use crate::manage::view::{Coming, Configuration, Listener, Pool, Receipt, Subsystem, Volume, VolumeKey};

/// The service refused.
const EXIT_REFUSED: u8 = 1;
/// The service can't be reached or its answer can't be used.
const EXIT_UNREACHABLE: u8 = 3;

/// Manages a running offload-svc.
///
/// What is changed here is in effect at once and outlives a restart: volumes live in the pool, the rest is kept in the
/// service's state file (service.state). The configuration file stays as it is. Of what is changed both here and, later, in
/// the file, the file's is in effect after the next start; `offloadctl config` shows where each value comes from.
///
/// Exit codes: 0 done, 1 refused by the service, 2 wrong usage, 3 no service that answers.
#[derive(Debug, Parser)]
#[command(name = "offloadctl", version)]
pub struct Cli {
    /// The service's management socket (service.socket in its configuration).
    #[arg(
        long,
        value_name = "PATH",
        global = true,
        help_heading = "For every command",
        env = "SLUICE_SERVICE__SOCKET",
        default_value = "/run/sluice/control.sock"
    )]
    socket: PathBuf,
    /// Answer in JSON: sizes in bytes, numbers exact.
    #[arg(long, global = true, help_heading = "For every command")]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The service: state, reactors, buffers, hosts, listeners.
    Status,
    /// The pool: members, space, health.
    #[command(subcommand)]
    Pool(PoolCommand),
    /// Volumes of the pool, their snapshots and clones.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Keys that volumes are encrypted under.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Subsystems: what hosts connect to, each with namespaces and a list of hosts.
    #[command(subcommand)]
    Subsystem(SubsystemCommand),
    /// Namespaces of subsystems: the block devices that hosts see. `subsystem list` lists them.
    #[command(subcommand)]
    Namespace(NamespaceCommand),
    /// Hosts: who may connect, and who is connected.
    #[command(subcommand)]
    Host(HostCommand),
    /// Listeners: the addresses and ports that hosts connect to.
    #[command(subcommand)]
    Listener(ListenerCommand),
    /// Metrics in the OpenMetrics text format.
    Metrics,
    /// The configuration in effect, as TOML, and where each value comes from.
    ///
    /// A value's origin is `default`, the file and line, the environment, `offloadctl` (changed while the service ran), or
    /// `pool` (a volume that the configuration doesn't have, or has otherwise). The output can be used as a configuration file.
    Config {
        /// Without the origins.
        #[arg(long)]
        plain: bool,
    },
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// Members, space, mount report, counters.
    Show,
    /// Lets a blank device take the place of a member. The old one serves on until the new one is full.
    Replace {
        /// The member that goes: its index, UUID or name as `pool show` has them.
        old: String,
        /// What takes its place: file:PATH (made if it isn't there), block:PATH or mem:SIZE.
        new: MemberSpec,
    },
    /// Reads all that is stored, repairs what is wrong, and says what was where.
    Scrub {
        #[arg(value_enum)]
        what: ScrubCommand,
    },
    /// Brings back a member that was away. Its device is looked for now and then anyway; this does it now.
    Attach {
        /// The member as it is: file:PATH or block:PATH.
        member: MemberSpec,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ScrubCommand {
    /// Begins one, if none runs. It goes on after a restart.
    Start,
    /// Ends the one that runs.
    Stop,
    /// How far it is, and what it has found.
    Status,
}

#[derive(Debug, Subcommand)]
enum VolumeCommand {
    /// Lists the volumes.
    List,
    /// Makes a thin volume.
    Create(VolumeCreate),
    /// Deletes a volume with its data and its key, and prints the receipt. It must not be served: remove its namespace first.
    ///
    /// The receipt says what became of the key: `destroyed`, `pending` with the members on which copies may be left (members that
    /// are away, or were replaced while they did not answer), or `kept` since clones or snapshots need it. `key receipts` shows
    /// how it stands later.
    Delete {
        /// Its name.
        name: VolumeName,
    },
    /// Takes a snapshot: what the volume holds now, under a name of its own. It takes no room of its own until the volume
    /// changes, can be served (read-only) and cloned, and stays when the volume is deleted.
    Snapshot {
        /// The volume.
        volume: VolumeName,
        /// The snapshot's name.
        name: VolumeName,
    },
    /// Makes a writable clone of a snapshot, or of a volume as it is now. It shares room with its origin, and the key.
    Clone {
        /// The snapshot or volume that it begins as.
        origin: VolumeName,
        /// The clone's name.
        name: VolumeName,
        /// How new writes are compressed: none, lz4, zstd:LEVEL (1 to 19) or auto; by default as its origin's.
        #[arg(long)]
        compression: Option<Compression>,
    },
    /// Grows a volume; connected hosts see the new size at once.
    Resize {
        /// Its name.
        name: VolumeName,
        /// The new size, such as 4GiB; never less than it has.
        size: ByteSize,
    },
}

#[derive(Debug, Subcommand)]
enum KeyCommand {
    /// Each volume's key, and how far a rotation is.
    Status,
    /// Receipts of deleted volumes: whether their keys are destroyed, and where copies may be left.
    ///
    /// They are kept in the pool, the last 128 of them. One that is pending is completed by itself once the members that it names
    /// are overwritten: when they come back, or take their places.
    Receipts {
        /// States that a member, which a receipt names, has been destroyed or erased, since it never comes back. Receipts that
        /// waited for it say from then on that this was stated, and when.
        #[arg(long, value_name = "UUID")]
        member_destroyed: Option<uuid::Uuid>,
    },
    /// Gives a volume a new key: for new writes at once; what is there is encrypted anew in the background, and then the older key
    /// is given up.
    Rotate {
        /// The volume's name.
        volume: VolumeName,
    },
}

#[derive(Debug, Args)]
struct VolumeCreate {
    /// Its name: up to 64 letters, digits, '.', '_' and '-'.
    name: VolumeName,
    /// Its size, such as 2GiB: bytes, or a whole number of KiB, MiB, GiB, TiB or PiB.
    size: ByteSize,
    /// Bytes of a logical block: 512 or 4096.
    #[arg(long, default_value = "4096")]
    block_size: BlockSize,
    /// none, lz4, zstd:LEVEL (1 to 19) or auto.
    #[arg(long, default_value_t)]
    compression: Compression,
    /// aes-256-gcm, aes-128-gcm, aes-256-xts or aes-128-xts (XTS doesn't detect tampering).
    #[arg(long, default_value_t)]
    cipher: Cipher,
}

#[derive(Debug, Subcommand)]
enum SubsystemCommand {
    /// Lists the subsystems with their namespaces and hosts.
    List,
    /// Adds a subsystem. Until a host is allowed, nobody can connect to it.
    Add {
        /// Its name, such as nqn.2026-11.io.example:disk0.
        nqn: Nqn,
        /// Its serial number, up to 20 characters; made from the name by default.
        #[arg(long)]
        serial: Option<Serial>,
        /// Lets every host in.
        #[arg(long, conflicts_with = "host")]
        allow_any_host: bool,
        /// A host that may connect, by its NQN (`nvme show-hostnqn`); may be repeated.
        #[arg(long, value_name = "NQN")]
        host: Vec<Nqn>,
    },
    /// Removes a subsystem; its hosts are disconnected.
    Remove {
        /// Its name.
        nqn: Nqn,
    },
}

#[derive(Debug, Subcommand)]
enum NamespaceCommand {
    /// Adds a namespace.
    Add {
        /// The subsystem.
        nqn: Nqn,
        /// Its id, 1 to 1024.
        nsid: u32,
        /// pool:VOLUME; or a plain device without any stages: mem:SIZE (lost at exit), file:PATH or block:PATH.
        backend: BackendSpec,
        /// Bytes of a logical block of a plain device: 512 or 4096 (the default); a volume has its own.
        #[arg(long)]
        block_size: Option<BlockSize>,
    },
    /// Removes a namespace. A volume behind it stays, with its data.
    Remove {
        /// The subsystem.
        nqn: Nqn,
        /// Its id.
        nsid: u32,
    },
}

#[derive(Debug, Subcommand)]
enum HostCommand {
    /// Lists the hosts that may connect, and those that are connected.
    List,
    /// Lets a host in.
    Allow {
        /// The subsystem.
        nqn: Nqn,
        /// The host's NQN (`nvme show-hostnqn`).
        host: Nqn,
    },
    /// Keeps a host out; it is disconnected.
    Deny {
        /// The subsystem.
        nqn: Nqn,
        /// The host's NQN (`nvme show-hostnqn`).
        host: Nqn,
    },
}

#[derive(Debug, Subcommand)]
enum ListenerCommand {
    /// Lists where the service listens.
    List,
    /// Listens on one more address.
    Add(Endpoint),
    /// Stops listening on an address; hosts that are connected through it stay.
    Remove(Endpoint),
}

#[derive(Debug, Args)]
struct Endpoint {
    /// IPv4 or IPv6 address.
    address: Address,
    /// TCP port.
    #[arg(default_value_t = 4420, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
}

/// Carries out the command line; prints the answer or the error.
pub fn run(cli: Cli) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("offloadctl: the runtime does not start: {error}");
            return ExitCode::from(EXIT_UNREACHABLE);
        }
    };
    match runtime.block_on(answer(&cli)) {
        Ok(text) => print(&text),
        Err(error) => {
            eprintln!("offloadctl: {error}");
            ExitCode::from(if matches!(error, ClientError::Refused(_)) { EXIT_REFUSED } else { EXIT_UNREACHABLE })
        }
    }
}

/// Prints to stdout; a reader that went away (`| head`) is no error.
fn print(text: &str) -> ExitCode {
    use std::io::Write;
    let newline = if text.ends_with('\n') || text.is_empty() { "" } else { "\n" };
    match write!(std::io::stdout().lock(), "{text}{newline}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            eprintln!("offloadctl: stdout: {error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

async fn answer(cli: &Cli) -> Result<String, ClientError> {
    let client = Session { client: Client::new(&cli.socket), json: cli.json };
    match &cli.command {
        Command::Status => client.show("/v1/status", show::status).await,
        Command::Pool(command) => pool(&client, command).await,
        Command::Volume(command) => volume(&client, command).await,
        Command::Key(KeyCommand::Receipts { member_destroyed: None }) => {
            client.show("/v1/receipts", |all: &Vec<Receipt>| receipts::list(all)).await
        }
        Command::Key(KeyCommand::Receipts { member_destroyed: Some(member) }) => {
            let body = request::MemberDestroyed { member: *member };
            client.change_and_show("/v1/key/member-destroyed", &body, |all: &Vec<Receipt>| receipts::list(all)).await
        }
        Command::Key(KeyCommand::Status) => client.show("/v1/keys", |keys: &Vec<VolumeKey>| show::keys(keys)).await,
        Command::Key(KeyCommand::Rotate { volume }) => {
            client.change("/v1/key/rotate", &request::KeyRotation { volume: volume.clone() }).await
        }
        Command::Subsystem(command) => subsystem(&client, command).await,
        Command::Namespace(command) => namespace(&client, command).await,
        Command::Host(command) => host(&client, command).await,
        Command::Listener(command) => listener(&client, command).await,
        Command::Metrics => client.text("/v1/metrics").await,
        Command::Config { plain } => {
            client.show("/v1/config", |config: &Configuration| configuration::text(config, *plain)).await
        }
    }
}

async fn pool(client: &Session, command: &PoolCommand) -> Result<String, ClientError> {
    let coming = |coming: &Coming| format!("member {} ({}): {}", coming.index, coming.uuid, coming.advice);
    match command {
        PoolCommand::Show => client.show("/v1/pool", show::pool).await,
        PoolCommand::Replace { old, new } => {
            let body = request::MemberReplacement { old: old.clone(), new: new.clone() };
            client.change_and_show("/v1/pool/replace", &body, coming).await
        }
        PoolCommand::Scrub { what: ScrubCommand::Status } => {
            client.show_part("/v1/pool", |pool: &Pool| pool.scrub.clone(), show::scrub).await
        }
        PoolCommand::Scrub { what } => {
            let body = request::ScrubRequest { run: *what == ScrubCommand::Start };
            client.change("/v1/pool/scrub", &body).await
        }
        PoolCommand::Attach { member } => {
            let body = request::MemberReturn { member: member.clone() };
            client.change_and_show("/v1/pool/attach", &body, coming).await
        }
    }
}

async fn volume(client: &Session, command: &VolumeCommand) -> Result<String, ClientError> {
    match command {
        VolumeCommand::List => client.show("/v1/volumes", |volumes: &Vec<Volume>| show::volumes(volumes)).await,
        VolumeCommand::Create(create) => {
            let body = request::VolumeRequest {
                name: create.name.clone(),
                size: create.size,
                block_size: create.block_size,
                compression: create.compression,
                cipher: create.cipher,
            };
            client.change("/v1/volume/create", &body).await
        }
        VolumeCommand::Delete { name } => {
            let body = request::VolumeRemoval { name: name.clone() };
            client.change_and_show("/v1/volume/delete", &body, receipts::receipt).await
        }
        VolumeCommand::Snapshot { volume, name } => {
            let body = request::SnapshotRequest { volume: volume.clone(), name: name.clone() };
            client.change("/v1/volume/snapshot", &body).await
        }
        VolumeCommand::Clone { origin, name, compression } => {
            let compression = *compression;
            let body = request::CloneRequest { origin: origin.clone(), name: name.clone(), compression };
            client.change("/v1/volume/clone", &body).await
        }
        VolumeCommand::Resize { name, size } => {
            client.change("/v1/volume/resize", &request::VolumeResize { name: name.clone(), size: *size }).await
        }
    }
}

async fn subsystem(client: &Session, command: &SubsystemCommand) -> Result<String, ClientError> {
    match command {
        SubsystemCommand::List => {
            client.show("/v1/subsystems", |subsystems: &Vec<Subsystem>| show::subsystems(subsystems)).await
        }
        SubsystemCommand::Add { nqn, serial, allow_any_host, host } => {
            let body = request::SubsystemRequest {
                nqn: nqn.clone(),
                serial: serial.clone(),
                allow_any_host: *allow_any_host,
                hosts: host.clone(),
            };
            client.change("/v1/subsystem/add", &body).await
        }
        SubsystemCommand::Remove { nqn } => {
            client.change("/v1/subsystem/remove", &request::SubsystemRemoval { nqn: nqn.clone() }).await
        }
    }
}

async fn namespace(client: &Session, command: &NamespaceCommand) -> Result<String, ClientError> {
    match command {
        NamespaceCommand::Add { nqn, nsid, backend, block_size } => {
            let body = request::NamespaceRequest {
                nqn: nqn.clone(),
                nsid: *nsid,
                backend: backend.clone(),
                block_size: *block_size,
            };
            client.change("/v1/namespace/add", &body).await
        }
        NamespaceCommand::Remove { nqn, nsid } => {
            client.change("/v1/namespace/remove", &request::NamespaceRemoval { nqn: nqn.clone(), nsid: *nsid }).await
        }
    }
}

async fn host(client: &Session, command: &HostCommand) -> Result<String, ClientError> {
    let body = |nqn: &Nqn, host: &Nqn| request::HostRequest { nqn: nqn.clone(), host: host.clone() };
    match command {
        HostCommand::List => client.show("/v1/subsystems", |subsystems: &Vec<Subsystem>| show::hosts(subsystems)).await,
        HostCommand::Allow { nqn, host } => client.change("/v1/host/allow", &body(nqn, host)).await,
        HostCommand::Deny { nqn, host } => client.change("/v1/host/deny", &body(nqn, host)).await,
    }
}

async fn listener(client: &Session, command: &ListenerCommand) -> Result<String, ClientError> {
    let body = |e: &Endpoint| request::ListenerRequest { address: e.address.clone(), port: e.port };
    match command {
        ListenerCommand::List => {
            client.show("/v1/listeners", |listeners: &Vec<Listener>| show::listeners(listeners)).await
        }
        ListenerCommand::Add(endpoint) => client.change("/v1/listener/add", &body(endpoint)).await,
        ListenerCommand::Remove(endpoint) => client.change("/v1/listener/remove", &body(endpoint)).await,
    }
}

struct Session {
    client: Client,
    json: bool,
}

impl Session {
    async fn show<T: DeserializeOwned>(
        &self,
        path: &str,
        table: impl FnOnce(&T) -> String,
    ) -> Result<String, ClientError> {
        let body = self.client.get(path).await?;
        if self.json {
            return pretty(&body);
        }
        Ok(table(&serde_json::from_slice(&body)?))
    }

    async fn change(&self, path: &str, body: &impl serde::Serialize) -> Result<String, ClientError> {
        let answer = self.client.post(path, body).await?;
        if self.json { pretty(&answer) } else { Ok("done".to_owned()) }
    }

    /// A part of an answer.
    async fn show_part<T: DeserializeOwned, P: serde::Serialize>(
        &self,
        path: &str,
        part: impl FnOnce(&T) -> P,
        table: impl FnOnce(&P) -> String,
    ) -> Result<String, ClientError> {
        let part = part(&serde_json::from_slice(&self.client.get(path).await?)?);
        if self.json { Ok(serde_json::to_string_pretty(&part)?) } else { Ok(table(&part)) }
    }

    async fn change_and_show<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl serde::Serialize,
        text: impl FnOnce(&T) -> String,
    ) -> Result<String, ClientError> {
        let answer = self.client.post(path, body).await?;
        if self.json { pretty(&answer) } else { Ok(text(&serde_json::from_slice(&answer)?)) }
    }

    async fn text(&self, path: &str) -> Result<String, ClientError> {
        let text = String::from_utf8_lossy(&self.client.get(path).await?).into_owned();
        if self.json { Ok(serde_json::to_string(&text)?) } else { Ok(text) }
    }
}

/// Indented. `serde_json::Value` keeps u64 exact.
fn pretty(body: &[u8]) -> Result<String, ClientError> {
    let value: serde_json::Value = serde_json::from_slice(body)?;
    Ok(serde_json::to_string_pretty(&value)?)
}
