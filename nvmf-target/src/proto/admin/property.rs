//! Enable, reset and shutdown: what writing CC does (NVMe Base 2.0 §3.5, §3.6).
//!
//! Owns CC and CSTS. It must not know queues: it says what has to be done ([`Transition`]) and is told when it is.
//! Invariant: RDY is only ever set while EN is; a shutdown is complete only once the queues have stopped and the
//! write cache is flushed.

use crate::wire::properties::{self, Capabilities, Configuration, ControllerStatus, ShutdownStatus};

/// Longest time from EN to RDY that CAP.TO promises: 15 s.
const READY_TIMEOUT_500MS: u8 = 30;

/// CC and CSTS of one controller.
#[derive(Debug, Clone)]
pub struct Properties {
    capabilities: Capabilities,
    configuration: Configuration,
    status: ControllerStatus,
}

/// What a change of CC asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    /// Nothing.
    None,
    /// The controller is ready now.
    Enabled,
    /// Stop every I/O queue; then [`Properties::stopped`].
    Reset,
    /// Stop every I/O queue and flush; then [`Properties::stopped`].
    Shutdown,
}

/// A property that isn't there, or can't be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoSuchProperty;

impl Properties {
    /// Those of a new controller whose queues have at most `max_queue_entries`.
    pub fn new(max_queue_entries: u16) -> Self {
        Self {
            capabilities: Capabilities {
                mqes: max_queue_entries.saturating_sub(1),
                timeout_500ms: READY_TIMEOUT_500MS,
            },
            configuration: Configuration::default(),
            status: ControllerStatus::default(),
        }
    }

    /// Whether commands other than fabrics ones are taken.
    pub fn ready(&self) -> bool {
        self.configuration.enabled() && self.status.ready
    }

    /// Whether I/O queues may be made: ready, and no shutdown asked for.
    pub fn takes_queues(&self) -> bool {
        self.ready() && self.status.shutdown == ShutdownStatus::Normal
    }

    /// Property Get.
    pub fn get(&self, offset: u32, eight_bytes: bool) -> Result<u64, NoSuchProperty> {
        match (offset, eight_bytes) {
            (properties::CAP, true) => Ok(self.capabilities.encode()),
            (properties::VS, false) => Ok(u64::from(properties::VERSION_2_0)),
            (properties::CC, false) => Ok(u64::from(self.configuration.0)),
            (properties::CSTS, false) => Ok(u64::from(self.status.encode())),
            _ => Err(NoSuchProperty),
        }
    }

    /// Property Set.
    pub fn set(&mut self, offset: u32, eight_bytes: bool, value: u64) -> Result<Transition, NoSuchProperty> {
        match (offset, eight_bytes) {
            (properties::CC, false) => Ok(self.configure(Configuration(value as u32))),
            _ => Err(NoSuchProperty),
        }
    }

    /// The queues have stopped and what had to be flushed is: ends a reset or shutdown.
    pub fn stopped(&mut self) {
        if self.status.shutdown == ShutdownStatus::Occurring {
            self.status.shutdown = ShutdownStatus::Complete;
        }
        if !self.configuration.enabled() {
            self.status.ready = false;
        }
    }

    /// Something went wrong that only a reset can mend.
    pub fn failed(&mut self) {
        self.status.fatal = true;
    }

    fn configure(&mut self, new: Configuration) -> Transition {
        let old = std::mem::replace(&mut self.configuration, new);
        if old.enabled() && !new.enabled() {
            self.status.fatal = false;
            self.status.shutdown = ShutdownStatus::Normal;
            return Transition::Reset;
        }
        if new.enabled() && !old.enabled() {
            return self.enable(new);
        }
        if old.shutdown() == 0 && new.shutdown() != 0 && self.status.shutdown == ShutdownStatus::Normal {
            self.status.shutdown = ShutdownStatus::Occurring;
            return Transition::Shutdown;
        }
        Transition::None
    }

    fn enable(&mut self, new: Configuration) -> Transition {
        // Entry sizes may be set later in CC, before the first I/O queue; a host over fabrics sets all at once.
        let fits = new.command_set() == 0
            && new.memory_page_shift() == 0
            && new.arbitration() == 0
            && new.io_sqe_shift() == 6
            && new.io_cqe_shift() == 4;
        self.status = ControllerStatus { ready: fits, fatal: !fits, shutdown: ShutdownStatus::Normal };
        if fits { Transition::Enabled } else { Transition::None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHUTDOWN_NORMAL: u32 = 1 << 14;

    fn csts(properties: &Properties) -> u64 {
        properties.get(properties::CSTS, false).unwrap()
    }

    fn cc(properties: &mut Properties, value: u32) -> Transition {
        properties.set(properties::CC, false, u64::from(value)).unwrap()
    }

    #[test]
    fn a_controller_lives_and_ends() {
        let mut p = Properties::new(128);
        assert!(!p.ready());
        assert_eq!(cc(&mut p, Configuration::ENABLED.0), Transition::Enabled);
        assert_eq!((csts(&p), p.takes_queues()), (1, true));
        assert_eq!(cc(&mut p, Configuration::ENABLED.0 | SHUTDOWN_NORMAL), Transition::Shutdown);
        assert_eq!((csts(&p), p.takes_queues()), (1 | 1 << 2, false));
        assert_eq!(cc(&mut p, Configuration::ENABLED.0 | SHUTDOWN_NORMAL), Transition::None, "said twice");
        p.stopped();
        assert_eq!(csts(&p), 1 | 2 << 2);
    }

    #[test]
    fn a_reset_is_over_once_the_queues_have_stopped() {
        let mut p = Properties::new(128);
        cc(&mut p, Configuration::ENABLED.0);
        assert_eq!(cc(&mut p, 0), Transition::Reset);
        assert_eq!((csts(&p), p.ready()), (1, false), "still going down, but takes nothing");
        p.stopped();
        assert_eq!(csts(&p), 0);
        assert_eq!(cc(&mut p, Configuration::ENABLED.0), Transition::Enabled);
    }

    #[test]
    fn a_configuration_that_cannot_work_is_fatal() {
        let mut p = Properties::new(128);
        for odd in [1, 1 | 6 << 16, Configuration::ENABLED.0 | 1 << 7, Configuration::ENABLED.0 | 6 << 4] {
            assert_eq!(cc(&mut p, odd), Transition::None, "{odd:#x}");
            assert_eq!((csts(&p), p.ready()), (2, false));
            assert_eq!(cc(&mut p, 0), Transition::Reset);
            p.stopped();
            assert_eq!(csts(&p), 0);
        }
    }

    #[test]
    fn properties_have_one_size_and_most_are_read_only() {
        let mut p = Properties::new(128);
        assert_eq!(p.get(properties::CAP, true), Ok(0x0000_0020_1E01_007F));
        assert_eq!(p.get(properties::VS, false), Ok(0x0002_0000));
        for (offset, eight) in [(properties::CAP, false), (properties::VS, true), (4, false), (0x20, false), (!0, true)]
        {
            assert_eq!(p.get(offset, eight), Err(NoSuchProperty));
        }
        for offset in [properties::CAP, properties::VS, properties::CSTS, properties::NSSR, 0x1000] {
            assert_eq!(p.set(offset, false, 1), Err(NoSuchProperty));
        }
    }
}
