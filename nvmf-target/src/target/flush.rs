//! Flushes every namespace of a controller that has a volatile write cache: part of its shutdown.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::backend::{Done, Operation, Outcome, Reply, ReplySink};
use crate::proto::controller_shared::ControllerShared;

struct Waiting(Mutex<Option<oneshot::Sender<Outcome>>>);

impl ReplySink for Waiting {
    fn reply(&self, _token: u64, reply: Reply) {
        if let Some(sender) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Nobody waits any more once the time limit has passed.
            let _ = sender.send(reply.outcome);
        }
    }
}

/// Whether all was flushed within `limit`.
pub(super) async fn all(shared: Arc<ControllerShared>, limit: Duration) -> bool {
    let mut waits = Vec::new();
    for namespace in shared.namespaces().iter() {
        if namespace.backend.geometry().volatile_write_cache {
            let (sender, receiver) = oneshot::channel();
            let sink = Arc::new(Waiting(Mutex::new(Some(sender))));
            namespace.backend.submit(Operation::Flush, Done::new(sink, 0));
            waits.push(receiver);
        }
    }
    let deadline = tokio::time::Instant::now() + limit;
    for wait in waits {
        if !matches!(tokio::time::timeout_at(deadline, wait).await, Ok(Ok(Outcome::Success))) {
            return false;
        }
    }
    true
}
