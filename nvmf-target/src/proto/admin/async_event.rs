//! Asynchronous events (NVMe Base 2.0 §5.2): the requests that a host leaves with the controller, and the events
//! that wait for one.
//!
//! It must not know what raises an event. Invariant: at most [`REQUEST_LIMIT`] requests are held; an event is told
//! once, and not again until its log page has been read.

use std::collections::{BTreeSet, VecDeque};

use crate::wire::features::{AsyncEvent, AsyncEventConfig};

/// How many requests are held (AERL + 1).
pub const REQUEST_LIMIT: usize = 4;
/// More changed namespaces than this are told as "all" (NVMe Base 2.0 §5.16.1.5).
const CHANGED_LIMIT: usize = 1024;

/// The events of one controller.
#[derive(Debug, Default)]
pub struct AsyncEvents {
    requests: VecDeque<u16>,
    config: AsyncEventConfig,
    pending: BTreeSet<AsyncEvent>,
    /// Told, and masked until their log page is read.
    told: BTreeSet<AsyncEvent>,
    changed: BTreeSet<u32>,
    changed_too_many: bool,
}

/// A request over the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitExceeded;

impl AsyncEvents {
    /// Holds the request `cid`.
    pub fn request(&mut self, cid: u16) -> Result<(), LimitExceeded> {
        if self.requests.len() >= REQUEST_LIMIT {
            return Err(LimitExceeded);
        }
        self.requests.push_back(cid);
        Ok(())
    }

    /// Gives up the request `cid`, if it is held.
    pub fn abort(&mut self, cid: u16) -> bool {
        let before = self.requests.len();
        self.requests.retain(|&held| held != cid);
        self.requests.len() < before
    }

    /// A request that can be answered now, and the event to answer it with.
    pub fn poll(&mut self) -> Option<(u16, AsyncEvent)> {
        if self.requests.is_empty() {
            return None;
        }
        let event = self.pending.pop_first()?;
        self.told.insert(event);
        Some((self.requests.pop_front()?, event))
    }

    /// The events that the host wants.
    pub fn config(&self) -> AsyncEventConfig {
        self.config
    }

    /// Sets the events that the host wants; those that it no longer wants aren't told any more.
    pub fn set_config(&mut self, config: AsyncEventConfig) {
        self.config = config;
        self.pending.retain(|event| config.wants(config_bit(*event)));
    }

    /// A namespace was added, removed or changed its size.
    pub fn namespace_changed(&mut self, nsid: u32) {
        if self.changed.len() < CHANGED_LIMIT || self.changed.contains(&nsid) {
            self.changed.insert(nsid);
        } else {
            self.changed_too_many = true;
        }
        self.raise(AsyncEvent::NAMESPACE_ATTRIBUTE);
    }

    /// The discovery log is not what it was.
    pub fn discovery_log_changed(&mut self) {
        self.raise(AsyncEvent::DISCOVERY_LOG_CHANGE);
    }

    /// The changed namespaces, in rising order; `None` means more than fit.
    pub fn changed_namespaces(&self) -> Option<Vec<u32>> {
        (!self.changed_too_many).then(|| self.changed.iter().copied().collect())
    }

    /// The host has read `log_page` without asking to retain its event.
    pub fn log_read(&mut self, log_page: u8) {
        self.told.retain(|event| event.log_page != log_page);
        self.pending.retain(|event| event.log_page != log_page);
        if log_page == AsyncEvent::NAMESPACE_ATTRIBUTE.log_page {
            self.changed.clear();
            self.changed_too_many = false;
        }
    }

    /// A controller reset: what was outstanding is gone, unanswered.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// How many requests are held.
    pub fn held(&self) -> usize {
        self.requests.len()
    }

    fn raise(&mut self, event: AsyncEvent) {
        if self.config.wants(config_bit(event)) && !self.told.contains(&event) {
            self.pending.insert(event);
        }
    }
}

/// The configuration bit that lets `event` through.
fn config_bit(event: AsyncEvent) -> u32 {
    match event {
        AsyncEvent::DISCOVERY_LOG_CHANGE => AsyncEventConfig::DISCOVERY_LOG_CHANGE,
        _ => AsyncEventConfig::NAMESPACE_ATTRIBUTE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanting(bits: u32) -> AsyncEvents {
        let mut events = AsyncEvents::default();
        events.set_config(AsyncEventConfig(bits));
        events
    }

    /// H55: exactly AERL + 1 are held, an abort frees its slot.
    #[test]
    fn h55_requests_are_held_up_to_the_limit() {
        let mut events = AsyncEvents::default();
        for cid in 0..REQUEST_LIMIT as u16 {
            assert_eq!(events.request(cid), Ok(()));
        }
        for cid in 100..164 {
            assert_eq!(events.request(cid), Err(LimitExceeded));
        }
        assert!(events.abort(2));
        assert!(!events.abort(2), "only once");
        assert_eq!(events.request(200), Ok(()));
        assert_eq!(events.held(), REQUEST_LIMIT);
    }

    #[test]
    fn an_event_is_told_once_until_its_log_is_read() {
        let mut events = wanting(AsyncEventConfig::NAMESPACE_ATTRIBUTE);
        events.namespace_changed(3);
        assert_eq!(events.poll(), None, "nobody asks");
        events.request(7).unwrap();
        events.request(8).unwrap();
        assert_eq!(events.poll(), Some((7, AsyncEvent::NAMESPACE_ATTRIBUTE)));
        events.namespace_changed(1);
        assert_eq!(events.poll(), None, "masked");
        assert_eq!(events.changed_namespaces(), Some(vec![1, 3]));
        events.log_read(4);
        assert_eq!(events.changed_namespaces(), Some(vec![]));
        assert_eq!(events.poll(), None, "told and read: nothing new");
        events.namespace_changed(1);
        assert_eq!(events.poll(), Some((8, AsyncEvent::NAMESPACE_ATTRIBUTE)));
    }

    #[test]
    fn unwanted_events_stay_silent_but_the_list_is_kept() {
        let mut events = wanting(0);
        events.request(1).unwrap();
        events.namespace_changed(5);
        events.discovery_log_changed();
        assert_eq!(events.poll(), None);
        assert_eq!(events.changed_namespaces(), Some(vec![5]));
        events.set_config(AsyncEventConfig(AsyncEventConfig::DISCOVERY_LOG_CHANGE));
        events.discovery_log_changed();
        assert_eq!(events.poll(), Some((1, AsyncEvent::DISCOVERY_LOG_CHANGE)));
    }

    #[test]
    fn too_many_changes_are_told_as_all() {
        let mut events = wanting(AsyncEventConfig::NAMESPACE_ATTRIBUTE);
        for nsid in 1..=1024 {
            events.namespace_changed(nsid);
        }
        events.namespace_changed(1024);
        assert_eq!(events.changed_namespaces().map(|l| l.len()), Some(1024));
        events.namespace_changed(1025);
        assert_eq!(events.changed_namespaces(), None);
        events.log_read(4);
        assert_eq!(events.changed_namespaces(), Some(vec![]));
    }
}
