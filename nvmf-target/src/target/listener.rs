//! Listening: takes connections in for as long as the listener is there, whatever goes wrong with single ones.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};

use super::{Target, TargetError, connection, socket};

/// How long to wait when the system has no more file descriptors or memory for a connection.
const PAUSE: Duration = Duration::from_millis(50);

pub(super) fn add(target: &Arc<Target>, address: SocketAddr) -> Result<SocketAddr, TargetError> {
    let limit = target.config.limits.listeners;
    let mut registry = target.registry();
    if registry.closing {
        return Err(TargetError::ShuttingDown);
    }
    if registry.listeners.contains_key(&address) {
        return Err(TargetError::ListenerExists { address });
    }
    if registry.listeners.len() >= limit {
        return Err(TargetError::Limit { what: "listeners", limit });
    }
    let refused = |source| TargetError::Listen { address, source };
    let _runtime = target.config.runtime.enter();
    let socket = socket::listen(address).and_then(TcpListener::from_std).map_err(refused)?;
    let bound = socket.local_addr().map_err(refused)?;
    let task = target.config.runtime.spawn(accept(Arc::clone(target), socket));
    registry.add_listener(bound, task.abort_handle());
    Ok(bound)
}

async fn accept(target: Arc<Target>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => take_in(&target, stream, peer),
            Err(error) => {
                if target.log_limit.allows(Instant::now()) {
                    tracing::warn!(%error, "can't accept a connection");
                }
                // The connection stays in the backlog; without a pause this would spin on EMFILE.
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

fn take_in(target: &Arc<Target>, stream: TcpStream, peer: SocketAddr) {
    let ticket = match target.connections.enter(peer.ip(), &target.config.limits) {
        Ok(ticket) => ticket,
        Err(reason) => {
            if target.log_limit.allows(Instant::now()) {
                tracing::warn!(%peer, %reason, "connection turned away");
            }
            return;
        }
    };
    let local = match socket::set_up(&stream).and_then(|()| stream.local_addr()) {
        Ok(local) => local,
        Err(error) => {
            // The peer has gone already.
            tracing::debug!(%peer, %error, "connection lost before it began");
            return;
        }
    };
    target.config.runtime.spawn(connection::serve(Arc::clone(target), stream, peer, local, ticket));
}
