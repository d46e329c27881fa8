//! The service put together: start, serve, drain, stop.
//!
//! Owns the order in which the parts come up and go down, and the process around them. Must not know what any part does
//! inside. Invariant: nothing listens before everything behind it is there, and after a failed start nothing does.

mod anchor;
mod changes;
mod compiler;
mod configuration;
mod control;
mod error;
mod explain;
mod live;
mod log;
mod making;
mod members;
mod prepare;
mod receipts;
mod signals;
mod start;
mod storage;
mod systemd;
mod views;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

pub use anchor::AnchorError;
pub use error::{ServiceError, StopError};
pub use explain::explain;
pub use log::log_to_stderr;
pub use storage::{CloseError, StorageError};

use crate::config::Checked;
use crate::manage::server;
use crate::pool::Force;
use control::ServiceControl;
use live::Live;
use signals::Signals;

/// Threads of the control plane: accepting, admin queues, management. One may be preempted without the other waiting.
const CONTROL_THREADS: usize = 2;

/// In spite of what the service starts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forced {
    /// In spite of what the pool is mounted.
    pub mount: Force,
    /// A pool is made although another one was served before and is not there.
    pub new_pool: bool,
}

/// Runs the service until it is told to stop. `force` says in spite of what it starts. `announce` gets the line that
/// says how to attach, once it is ready.
///
/// # Errors
/// If it can't start, if a part of it fails, or if it can't stop cleanly.
pub fn run(checked: Checked, force: Forced, announce: impl FnOnce(&str)) -> Result<(), ServiceError> {
    if !compiler::compiles_rightly() {
        return Err(ServiceError::Compiler);
    }
    crate::stages::keys::protect_process().map_err(ServiceError::Protect)?;
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(CONTROL_THREADS).thread_name("control").enable_all().build();
    let runtime = runtime.map_err(ServiceError::Runtime)?;
    let result = runtime.block_on(serve(checked, force, announce));
    // Whatever a failed stop left running must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Time that the pool has to close, however long the target has taken.
const CLOSE_LEAST: Duration = Duration::from_secs(2);

async fn serve(checked: Checked, force: Forced, announce: impl FnOnce(&str)) -> Result<(), ServiceError> {
    let mut signals = Signals::new().map_err(ServiceError::Signals)?;
    let drain = Duration::from_millis(checked.config.service.drain_timeout_ms);
    let started = tokio::select! {
        started = start::start(checked, force) => started?,
        signal = signals.next() => {
            tracing::info!(signal, "told to stop while starting");
            return Ok(());
        }
    };
    let start::Started { live, socket, attach } = started;
    let (stop_manage, stopped) = watch::channel(false);
    let manage = tokio::spawn(server::serve(socket, Arc::new(ServiceControl(Arc::clone(&live))), stopped));
    live.set_serving();
    announce(&attach);
    systemd::ready();
    let watchdog = tokio::spawn(systemd::watchdog(live.reactors().clone()));
    let failed = tokio::select! {
        signal = signals.next() => {
            tracing::info!(signal, "told to stop: draining");
            None
        }
        failure = live.failed() => Some(failure),
    };
    watchdog.abort();
    systemd::stopping();
    let stopped = tokio::select! {
        stopped = stop(&live, drain) => stopped,
        signal = signals.next() => {
            tracing::error!(signal, "told to stop again: giving up what is under way");
            Err(StopError::Hard)
        }
    };
    let _ = stop_manage.send(true);
    if stopped.is_ok() {
        let _ = manage.await;
    } else {
        manage.abort();
    }
    match failed {
        Some(failure) => Err(failure.into()),
        None => stopped.map_err(ServiceError::Stop),
    }
}

/// Stops listening, lets commands under way finish, closes the pool, ends the reactors.
async fn stop(live: &Arc<Live>, limit: Duration) -> Result<(), StopError> {
    let began = Instant::now();
    live.set_draining();
    let left = || limit.saturating_sub(began.elapsed());
    let mut first = live.target().shutdown(left()).await.map_err(StopError::Target).err();
    live.reactors().close_queues();
    if let Some(storage) = live.storage()
        && let Err(error) = storage::close(storage, left().max(CLOSE_LEAST)).await
    {
        first.get_or_insert(error.into());
    }
    let reactors = live.reactors().clone();
    let grace = left().min(Duration::from_secs(1));
    // Joins threads: not on a thread of the runtime.
    let ended = tokio::task::spawn_blocking(move || reactors.stop(grace)).await;
    if ended.is_err() {
        first.get_or_insert(StopError::Hard);
    }
    tracing::info!(ms = began.elapsed().as_millis() as u64, clean = first.is_none(), "stopped");
    first.map_or(Ok(()), Err)
}
