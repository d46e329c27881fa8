//! Starting the reactors, all or none.
//!
//! Owns the order: platform, buffers, rings, threads, and the wait until each says that it runs. Must not know what
//! reactors do then. Invariant: after a failure nothing of it goes on running.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use tokio::sync::watch;

use super::doorbell::Doorbell;
use super::message::{Mailbox, Message};
use super::platform::{Platform, Running};
use super::settings::Settings;
use super::thread::{self, Rings, Start};
use super::{HugePageShortage, Shared};
use crate::buffers::BuffersError;

/// Why reactors did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration gives no reactor.
    #[error("reactors.count: at least one reactor is needed")]
    NoReactors,
    /// A CPU that doesn't exist or is closed to this process.
    #[error("reactors.cpus: CPU {cpu} is not available to this process")]
    NoSuchCpu {
        /// The CPU.
        cpu: usize,
    },
    /// No memory for buffers.
    #[error(transparent)]
    Buffers(#[from] BuffersError),
    /// Too few hugepages where they are a must.
    #[error(transparent)]
    HugePages(#[from] HugePageShortage),
    /// No thread, or no descriptors for one.
    #[error("a reactor's thread: {0}")]
    Thread(#[source] io::Error),
    /// DPDK's environment.
    #[cfg(feature = "dpdk")]
    #[error("reactors: {0}")]
    Eal(#[from] sdk_bindings::eal::EalError),
    /// A ring.
    #[cfg(feature = "dpdk")]
    #[error("reactors.ring_slots: {0}")]
    Ring(#[from] sdk_bindings::ring::RingError),
    /// An lcore.
    #[cfg(feature = "dpdk")]
    #[error("reactors: {0}")]
    Launch(#[from] sdk_bindings::lcore::LaunchError),
}

pub(super) fn start(settings: &Settings) -> Result<Arc<Shared>, StartError> {
    let count = settings.cpus.len();
    if count == 0 {
        return Err(StartError::NoReactors);
    }
    let platform = Platform::start(settings)?;
    let mailbox = || Doorbell::new().map(|doorbell| Mailbox::new(Arc::new(doorbell))).map_err(StartError::Thread);
    let shared = Arc::new(Shared {
        mailboxes: (0..count).map(|_| mailbox()).collect::<Result<_, _>>()?,
        host_buffers: platform.buffers(&settings.host_buffers)?,
        internal_buffers: platform.buffers(&settings.internal_buffers)?,
        running: Mutex::default(),
        failure: watch::Sender::new(None),
        platform: platform.describe(),
    });
    let rings = rings(&platform, count, settings.ring_slots)?;
    let started = launch(settings, &platform, &shared, rings);
    if started.is_err() {
        stop_all(&shared);
    }
    started.map(|()| shared)
}

/// A ring from each reactor to each other one.
fn rings(platform: &Platform, count: usize, slots: u32) -> Result<Vec<Rings>, StartError> {
    let mut all: Vec<Rings> = (0..count).map(|_| Rings::none(count)).collect();
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            let (producer, consumer) = platform.ring(slots)?;
            all[from].to[to] = Some(producer);
            all[to].from[from] = Some(consumer);
        }
    }
    Ok(all)
}

fn launch(settings: &Settings, platform: &Platform, shared: &Arc<Shared>, rings: Vec<Rings>) -> Result<(), StartError> {
    let (ready, readies) = mpsc::channel();
    for (index, rings) in rings.into_iter().enumerate() {
        let start = Start {
            index,
            shared: shared.clone(),
            rings,
            spin: settings.spin,
            disk: settings.disk,
            ready: ready.clone(),
        };
        let running = platform.launch(index, &settings.cpus[index], move || thread::run(start))?;
        shared.running.lock().unwrap_or_else(PoisonError::into_inner).push(running);
    }
    drop(ready);
    for _ in 0..settings.cpus.len() {
        match readies.recv() {
            Ok(outcome) => outcome.map_err(StartError::Thread)?,
            Err(_) => return Err(StartError::Thread(io::Error::other("it ended at once"))),
        }
    }
    Ok(())
}

fn stop_all(shared: &Arc<Shared>) {
    for mailbox in &shared.mailboxes {
        let _ = mailbox.put(Message::Stop { grace: Duration::ZERO });
    }
    let running = std::mem::take(&mut *shared.running.lock().unwrap_or_else(PoisonError::into_inner));
    running.into_iter().for_each(Running::join);
}
