//! What systemd is told: ready, alive, stopping.
//!
//! Owns sd_notify(3) and the watchdog. Must not know what the service does. Invariant: the watchdog is fed only while every
//! reactor answers.

use std::time::Duration;

use sd_notify::NotifyState;

use crate::reactor::Reactors;

/// Says that the service is ready. Without systemd nobody hears it.
pub(super) fn ready() {
    tell(&[NotifyState::Ready]);
}

/// Says that the service is stopping.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd can't be told");
    }
}

/// Feeds the watchdog, if the unit has one, for as long as every reactor answers.
pub(super) async fn watchdog(reactors: Reactors) {
    let Some(interval) = sd_notify::watchdog_enabled() else { return };
    let beat = (interval / 2).max(Duration::from_millis(1));
    loop {
        if all_answer(&reactors, beat / 2).await {
            tell(&[NotifyState::Watchdog]);
        } else {
            tracing::error!("a reactor does not answer: the watchdog is not fed");
        }
        tokio::time::sleep(beat).await;
    }
}

async fn all_answer(reactors: &Reactors, limit: Duration) -> bool {
    let asked = (0..reactors.count()).map(|index| reactors.call_on(index, |_| async {}));
    let answers = tokio::time::timeout(limit, futures::future::join_all(asked)).await;
    answers.is_ok_and(|answers| answers.iter().all(Result::is_ok))
}
