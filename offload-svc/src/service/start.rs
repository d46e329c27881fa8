//! Bringing the service up: everything or nothing.
//!
//! Owns the order: folders and socket, reactors, pool, subsystems, and listeners last. Must not know what comes after.
//! Invariant: when it fails, the pool is closed, the reactors are ended, and nothing listens.

use std::sync::Arc;
use std::time::Duration;

use nvmf_target::proto::tcp::TcpConfig;
use nvmf_target::target::{Limits, Target, TargetConfig};
use tokio::runtime::Handle;

use super::live::Live;
use super::storage::{self, Storage};
use super::{Forced, ServiceError, prepare};
use crate::config::check::{MAX_HOSTS, MAX_LISTENERS, MAX_NSID, MAX_SUBSYSTEMS};
use crate::config::plan::QUEUE_STAGING_BYTES;
use crate::config::{Checked, Config};
use crate::manage::server::{MAX_CONNECTIONS as MANAGEMENT_CONNECTIONS, Socket};
use crate::reactor::{Reactors, Settings};

/// A service that is up and not yet announced.
pub(super) struct Started {
    /// Everything that runs.
    pub(super) live: Arc<Live>,
    /// The management socket, bound and not yet served.
    pub(super) socket: Socket,
    /// How to attach.
    pub(super) attach: String,
}

/// Starts everything that `checked` asks for.
pub(super) async fn start(checked: Checked, force: Forced) -> Result<Started, ServiceError> {
    prepare::folders(&checked, force)?;
    let socket = Socket::bind(&checked.config.service.socket)?;
    // Nobody else has this socket now, so nobody else changes the state file.
    checked.state.check_unchanged()?;
    prepare::addresses(&checked)?;
    prepare::descriptors(limits(&checked.config).connections + MANAGEMENT_CONNECTIONS);
    let settings = Settings::from_config(&checked.config, checked.reactors)?;
    // EAL and the reactors' threads are waited for.
    let reactors = tokio::task::spawn_blocking(move || Reactors::start(&settings)).await;
    let reactors = reactors.map_err(|_| ServiceError::Bug)??;
    tracing::info!(count = reactors.count(), platform = reactors.platform(), "reactors run");
    let attach = attach_line(&checked.config);
    match bring_up(checked, force, reactors.clone()).await {
        Ok(live) => Ok(Started { live, socket, attach }),
        Err(error) => {
            let _ = tokio::task::spawn_blocking(move || reactors.stop(Duration::from_secs(1))).await;
            Err(error)
        }
    }
}

async fn bring_up(checked: Checked, force: Forced, reactors: Reactors) -> Result<Arc<Live>, ServiceError> {
    let target = Target::new(TargetConfig {
        limits: limits(&checked.config),
        firmware: firmware(),
        tcp: tcp(&checked.config),
        io_staging_bytes: QUEUE_STAGING_BYTES as usize,
        queues: Arc::new(reactors.clone()),
        runtime: Handle::current(),
    });
    let storage = Storage::open(&checked, force, &reactors).await?;
    let live = Arc::new(Live::new(checked, reactors, target, storage));
    match populate(&live).await {
        Ok(()) => Ok(live),
        Err(error) => {
            if let Some(storage) = live.storage()
                && let Err(error) = storage::close(storage, storage::CLOSE_LIMIT).await
            {
                tracing::warn!(%error, "after the failed start");
            }
            Err(error)
        }
    }
}

/// Subsystems first, listeners last.
async fn populate(live: &Live) -> Result<(), ServiceError> {
    for (index, subsystem) in live.config().subsystems.iter().enumerate() {
        live.start_subsystem(index, subsystem).await?;
    }
    for overruled in &live.checked().overruled {
        tracing::warn!(
            "{overruled}: changed with offloadctl, and in the configuration since then: the configuration holds"
        );
    }
    live.ledger().settle(live.checked()).await?;
    for (index, listener) in live.config().listeners.iter().enumerate() {
        let endpoint = listener.address.with_port(listener.port);
        let address = listener.address.socket(listener.port);
        let place = live.checked().sources.shown(&["listener", &index.to_string()]);
        let address = address.map_err(|source| ServiceError::Address { place, endpoint, source })?;
        live.target().add_listener(address)?;
    }
    Ok(())
}

fn limits(config: &Config) -> Limits {
    let limits = &config.limits;
    let hosts = usize::from(limits.hosts);
    // Each host may have a discovery connection besides, and all its queues' connections.
    let connections = hosts * (2 + usize::from(limits.queues)) + 64;
    Limits {
        controllers: hosts,
        discovery_controllers: hosts,
        io_queues: limits.queues,
        queue_entries: limits.queue_depth,
        in_capsule_bytes: limits.in_capsule.bytes() as u32,
        mdts_bytes: limits.mdts.bytes() as u32,
        subsystems: MAX_SUBSYSTEMS,
        max_nsid: MAX_NSID,
        allowed_hosts: MAX_HOSTS,
        listeners: MAX_LISTENERS,
        connections,
        // Many hosts may stand behind one address (a gateway, virtual machines).
        connections_per_peer: connections,
        connect_timeout: Duration::from_millis(limits.connect_timeout_ms),
        slow_reader_timeout: Duration::from_millis(limits.slow_reader_timeout_ms),
        ..Limits::default()
    }
}

fn tcp(config: &Config) -> TcpConfig {
    let slow = Duration::from_millis(config.limits.slow_reader_timeout_ms);
    TcpConfig { transfer_timeout: slow, send_timeout: slow, ..TcpConfig::default() }
}

/// The version as Identify's FR field can hold it: 8 characters.
fn firmware() -> String {
    env!("CARGO_PKG_VERSION").chars().take(8).collect()
}

/// The line that says how to attach. Linux gives up a lost controller after 10 minutes by default: half an hour outlasts a
/// restart of the machine.
fn attach_line(config: &Config) -> String {
    let (Some(subsystem), Some(listener)) = (config.subsystems.first(), config.listeners.first()) else {
        return "no subsystem or listener is configured: add them with offloadctl".to_owned();
    };
    let mut address = listener.address.clone();
    if address.ip.is_unspecified() {
        address.ip = match address.ip {
            std::net::IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            std::net::IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        };
    }
    format!("nvme connect -t tcp -a {address} -s {} -n {} --ctrl-loss-tmo=1800", listener.port, subsystem.nqn)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h174_the_attach_line_can_be_used_as_it_is() {
        for (address, shown) in [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1")]
        {
            let text = format!(
                "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:a\"\nallow_any_host = true\n\
                 [[listener]]\naddress = \"{address}\"\nport = 4421\n"
            );
            let config: Config = toml::from_str(&text).unwrap();
            let line =
                format!("nvme connect -t tcp -a {shown} -s 4421 -n nqn.2026-11.io.example:a --ctrl-loss-tmo=1800");
            assert_eq!(attach_line(&config), line);
        }
    }
}
