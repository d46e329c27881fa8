//! Drives one admin queue over its socket, and the association's end.
//!
//! Owns the association's life from the accepted Connect on. It must not know admin commands. Invariant: when it
//! returns, every I/O queue of the controller is gone, no back end has a command of it, and the registry has forgotten
//! it.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::net::TcpStream;

use super::connection::{end_reason, linger};
use super::connections::Ticket;
use super::controller::{Controller, EndReason};
use super::{Target, flush};
use crate::proto::admin::queue::{AdminQueuePair, Errand};
use crate::proto::controller_shared::ControllerShared;
use crate::proto::tcp::CloseReason;

/// How often the end of queues is looked for, at first and at most.
const LOOK_FIRST: Duration = Duration::from_millis(1);
const LOOK_LAST: Duration = Duration::from_millis(50);
/// How often a sign of life is looked for where there is a keep-alive timeout.
const LIFE_SIGNS: Duration = Duration::from_millis(500);
/// A shutdown's Flush may take as long as CAP.TO lets a host wait.
const FLUSH_LIMIT: Duration = Duration::from_secs(15);
const SLICES_MAX: usize = 1024;

/// Drives the queue until the association is over and nothing is left of it.
pub(super) async fn drive(
    target: Arc<Target>,
    controller: Arc<Controller>,
    queue: AdminQueuePair,
    stream: Arc<TcpStream>,
    ticket: Ticket,
) {
    let driver = Driver { controller: Arc::clone(&controller), queue, stream: Arc::clone(&stream), errand: None };
    // A task of its own: should it panic, what follows still happens.
    let (reason, detail) = tokio::spawn(driver.run()).await.unwrap_or((EndReason::Internal, None));
    controller.end(reason);
    if target.log_limit.allows(Instant::now()) {
        tracing::info!(
            peer = %controller.peer, host = ?controller.host, cntlid = controller.shared.cntlid().0, %reason, ?detail,
            "association over"
        );
    }
    if matches!(detail, Some(CloseReason::ProtocolError { .. })) {
        linger(&stream).await;
    }
    drop(stream);
    until_drained(&controller).await;
    drop(ticket);
    target.registry().leave(&controller);
    target.left.notify_waiters();
}

async fn until_drained(controller: &Controller) {
    let mut pause = LOOK_FIRST;
    while !controller.is_drained() {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK_LAST);
    }
}

/// An errand that is being run, beside the queue's own work.
type Running = tokio::task::JoinHandle<bool>;

struct Driver {
    controller: Arc<Controller>,
    queue: AdminQueuePair,
    stream: Arc<TcpStream>,
    errand: Option<Running>,
}

impl Driver {
    async fn run(mut self) -> (EndReason, Option<CloseReason>) {
        loop {
            self.write();
            self.share();
            if let Some(errand) = self.queue.poll_errand() {
                let shared = Arc::clone(&self.controller.shared);
                self.errand = Some(tokio::spawn(run_errand(shared, errand)));
            }
            if let Some(reason) = self.news() {
                self.queue.terminate();
                return (reason, None);
            }
            if self.queue.has_expired() {
                self.queue.terminate();
                return (EndReason::KeepAlive, None);
            }
            if let Some(reason) = self.queue.poll_close() {
                return (end_reason(reason), Some(reason));
            }
            self.wait().await;
        }
    }

    /// Tells the rest of the target what the host has set, and that it was heard.
    fn share(&mut self) {
        let admin = self.queue.controller();
        let io_queues = u32::from(admin.io_queues());
        self.controller.io_queues.store(io_queues, Ordering::Relaxed);
        self.controller.set_kato_ms(admin.kato_ms());
        if self.queue.take_life_sign() {
            self.controller.note_life(Instant::now());
        }
        self.controller.release_tickets();
    }

    fn news(&mut self) -> Option<EndReason> {
        let news = self.controller.take_news();
        let now = Instant::now();
        for nsid in news.namespaces {
            self.queue.namespace_changed(nsid, now);
        }
        if news.discovery_log {
            self.queue.discovery_log_changed(now);
        }
        if news.end.is_none() {
            self.write();
        }
        news.end
    }

    async fn wait(&mut self) {
        let readable = !self.queue.receive_slice().is_empty();
        let interest = match (readable, self.queue.has_output()) {
            (_, false) => Interest::READABLE,
            (true, true) => Interest::READABLE | Interest::WRITABLE,
            (false, true) => Interest::WRITABLE,
        };
        let look = (self.controller.kato_ms() > 0).then(|| Instant::now() + LIFE_SIGNS);
        let deadline = [self.queue.next_deadline(), look].into_iter().flatten().min();
        let deadline = deadline.map(tokio::time::Instant::from_std);
        let sleep = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let errand = async {
            match &mut self.errand {
                Some(errand) => errand.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ready = self.stream.ready(interest) => match ready {
                Ok(_) if readable => self.read(),
                Ok(_) => {}
                Err(_) => self.queue.peer_closed(),
            },
            flushed = errand => {
                self.errand = None;
                self.queue.stopped(flushed.unwrap_or(false));
            }
            () = self.controller.news_arrived() => {}
            () = sleep => self.queue.tick(Instant::now()),
        }
    }

    fn read(&mut self) {
        match self.stream.try_read(self.queue.receive_slice()) {
            Ok(0) => self.queue.peer_closed(),
            Ok(n) => self.queue.received(n, Instant::now()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.queue.peer_closed(),
        }
    }

    fn write(&mut self) {
        while self.queue.has_output() {
            let mut slices: Vec<IoSlice<'_>> = Vec::new();
            self.queue.gather(&mut slices);
            slices.truncate(SLICES_MAX);
            match self.stream.try_write_vectored(&slices) {
                Ok(n) => self.queue.sent(n, Instant::now()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.queue.peer_closed(),
            }
        }
    }
}

/// Stops the controller's I/O as a reset or a shutdown wants it; false if something could not be flushed.
async fn run_errand(shared: Arc<ControllerShared>, errand: Errand) -> bool {
    match errand {
        Errand::StopQueues => {
            for queue in shared.queues() {
                queue.terminate();
            }
            until(|| shared.queues().is_empty() && shared.in_flight() == 0).await;
            true
        }
        Errand::DrainAndFlush => {
            until(|| shared.in_flight() == 0).await;
            flush::all(shared, FLUSH_LIMIT).await
        }
    }
}

async fn until(done: impl Fn() -> bool) {
    let mut pause = LOOK_FIRST;
    while !done() {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK_LAST);
    }
}
