//! Get and Set Features (NVMe Base 2.0 §5.15, §5.27) on a fabrics controller.
//!
//! Owns the values of features; keep-alive and event configuration live in their own machines and are reached
//! through [`Live`]. Invariant: nothing is saveable, and a value that can't be honoured is refused, not kept.

use super::async_event::AsyncEvents;
use super::facts::ControllerFacts;
use super::keep_alive::KeepAlive;
use crate::wire::features::{AsyncEventConfig, NumberOfQueues, Select, capability, fid};
use crate::wire::{Sqe, Status};

/// Bytes of Host Behavior Support.
const HOST_BEHAVIOR_BYTES: usize = 512;
/// Temperature threshold's default for the over-temperature threshold of the composite temperature.
const OVER_TEMPERATURE_DEFAULT: u16 = 0xFFFF;

/// The answer to Get or Set Features: dword 0, and data for some.
#[derive(Debug, PartialEq, Eq, Default)]
pub struct FeatureReply {
    /// Dword 0 of the completion.
    pub dw0: u32,
    /// Data for the host.
    pub data: Option<Vec<u8>>,
}

impl FeatureReply {
    fn dword(dw0: u32) -> Self {
        Self { dw0, data: None }
    }
}

/// The machines that hold some features' values, and what the rest of the controller knows.
pub struct Live<'a> {
    /// The controller.
    pub facts: &'a ControllerFacts,
    /// Event configuration.
    pub events: &'a mut AsyncEvents,
    /// Keep-alive timeout.
    pub keep_alive: &'a mut KeepAlive,
    /// Whether a namespace has a volatile write cache.
    pub write_cache: bool,
    /// Whether an I/O queue was created since the controller was enabled.
    pub queues_created: bool,
    /// Whether `nsid` is one of the controller's namespaces.
    pub namespace_exists: &'a dyn Fn(u32) -> bool,
    /// Now.
    pub now: std::time::Instant,
}

/// Values of the features that have no other home.
#[derive(Debug, Clone)]
pub struct Features {
    discovery: bool,
    arbitration: u32,
    over_temperature: u16,
    under_temperature: u16,
    write_atomicity: u32,
    queues: Option<NumberOfQueues>,
    host_behavior: Box<[u8; HOST_BEHAVIOR_BYTES]>,
}

impl Features {
    /// The defaults of an I/O or of a discovery controller.
    pub fn new(discovery: bool) -> Self {
        Self {
            discovery,
            arbitration: 0,
            over_temperature: OVER_TEMPERATURE_DEFAULT,
            under_temperature: 0,
            write_atomicity: 0,
            queues: None,
            host_behavior: Box::new([0; HOST_BEHAVIOR_BYTES]),
        }
    }

    /// How many I/O queues the host may make now.
    pub fn io_queues(&self, facts: &ControllerFacts) -> u16 {
        self.queues.map_or(facts.max_io_queues, |q| q.submission.saturating_add(1))
    }

    /// The features that there are, with their capabilities, for log page 12h.
    pub fn supported(&self) -> &'static [(u8, u32)] {
        const CHANGEABLE: u32 = capability::CHANGEABLE;
        const IO: &[(u8, u32)] = &[
            (fid::ARBITRATION, CHANGEABLE),
            (fid::POWER_MANAGEMENT, CHANGEABLE),
            (fid::TEMPERATURE_THRESHOLD, CHANGEABLE),
            (fid::ERROR_RECOVERY, capability::NAMESPACE_SPECIFIC),
            (fid::VOLATILE_WRITE_CACHE, 0),
            (fid::NUMBER_OF_QUEUES, CHANGEABLE),
            (fid::WRITE_ATOMICITY, CHANGEABLE),
            (fid::ASYNC_EVENT_CONFIG, CHANGEABLE),
            (fid::KEEP_ALIVE_TIMER, CHANGEABLE),
            (fid::HOST_BEHAVIOR, CHANGEABLE),
            (fid::HOST_IDENTIFIER, 0),
        ];
        const DISCOVERY: &[(u8, u32)] = &[(fid::ASYNC_EVENT_CONFIG, CHANGEABLE), (fid::KEEP_ALIVE_TIMER, CHANGEABLE)];
        if self.discovery { DISCOVERY } else { IO }
    }

    fn capabilities(&self, id: u8, live: &Live<'_>) -> Option<u32> {
        if id == fid::VOLATILE_WRITE_CACHE && !live.write_cache {
            return None;
        }
        self.supported().iter().find(|(known, _)| *known == id).map(|(_, caps)| *caps)
    }

    /// Get Features.
    pub fn get(&self, sqe: &Sqe, live: &Live<'_>) -> Result<FeatureReply, Status> {
        let id = sqe.dword(10) as u8;
        let select = Select::decode(sqe.dword(10)).ok_or(Status::INVALID_FIELD.dnr())?;
        let capabilities = self.capabilities(id, live).ok_or(Status::INVALID_FIELD.dnr())?;
        match select {
            Select::Capabilities => Ok(FeatureReply::dword(capabilities)),
            Select::Current => self.value(id, sqe, live),
            // Nothing is saved, so the saved value is the default.
            Select::Default | Select::Saved => Self::new(self.discovery).default_value(id, sqe, live),
        }
    }

    /// Set Features; `data` is what came with the command.
    pub fn set(&mut self, sqe: &Sqe, data: &[u8], live: &mut Live<'_>) -> Result<FeatureReply, Status> {
        let id = sqe.dword(10) as u8;
        let capabilities = self.capabilities(id, live).ok_or(Status::INVALID_FIELD.dnr())?;
        if sqe.dword(10) >> 31 != 0 {
            return Err(Status::FEATURE_NOT_SAVEABLE.dnr());
        }
        let nsid = sqe.namespace_id().0;
        if capabilities & capability::NAMESPACE_SPECIFIC == 0 && nsid != 0 && nsid != u32::MAX {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr());
        }
        self.change(id, sqe.dword(11), data, live)
    }

    fn value(&self, id: u8, sqe: &Sqe, live: &Live<'_>) -> Result<FeatureReply, Status> {
        let dw0 = match id {
            fid::ARBITRATION => self.arbitration,
            fid::POWER_MANAGEMENT => 0,
            fid::TEMPERATURE_THRESHOLD => u32::from(self.temperature(sqe.dword(11))?),
            fid::ERROR_RECOVERY => {
                let nsid = sqe.namespace_id().0;
                let exists = nsid == u32::MAX || (live.namespace_exists)(nsid);
                if !exists {
                    return Err(Status::INVALID_NAMESPACE.dnr());
                }
                0
            }
            fid::VOLATILE_WRITE_CACHE => 1,
            fid::NUMBER_OF_QUEUES => self.queues.unwrap_or(all_queues(live.facts)).encode(),
            fid::WRITE_ATOMICITY => self.write_atomicity,
            fid::ASYNC_EVENT_CONFIG => live.events.config().0,
            fid::KEEP_ALIVE_TIMER => live.keep_alive.kato_ms(),
            fid::HOST_BEHAVIOR => {
                return Ok(FeatureReply { dw0: 0, data: Some(self.host_behavior.to_vec()) });
            }
            fid::HOST_IDENTIFIER => return host_identifier(sqe.dword(11), live.facts),
            _ => return Err(Status::INVALID_FIELD.dnr()),
        };
        Ok(FeatureReply::dword(dw0))
    }

    /// The value after a reset. `self` holds the defaults already; what lives elsewhere is answered here.
    fn default_value(&self, id: u8, sqe: &Sqe, live: &Live<'_>) -> Result<FeatureReply, Status> {
        match id {
            fid::ASYNC_EVENT_CONFIG => Ok(FeatureReply::dword(0)),
            fid::KEEP_ALIVE_TIMER => Ok(FeatureReply::dword(live.facts.kato_ms)),
            _ => self.value(id, sqe, live),
        }
    }

    fn change(&mut self, id: u8, dw11: u32, data: &[u8], live: &mut Live<'_>) -> Result<FeatureReply, Status> {
        let invalid = Status::INVALID_FIELD.dnr();
        match id {
            fid::ARBITRATION => self.arbitration = dw11 & 0xFFFF_FF07,
            // There is one power state, 0, and no workload hint to act on.
            fid::POWER_MANAGEMENT if dw11 & 0x1F == 0 => {}
            fid::POWER_MANAGEMENT => return Err(invalid),
            fid::TEMPERATURE_THRESHOLD => self.set_temperature(dw11)?,
            fid::ERROR_RECOVERY | fid::HOST_BEHAVIOR | fid::VOLATILE_WRITE_CACHE | fid::HOST_IDENTIFIER => {
                self.set_special(id, dw11, data)?;
            }
            fid::NUMBER_OF_QUEUES => return self.set_queues(dw11, live),
            fid::WRITE_ATOMICITY => self.write_atomicity = dw11 & 1,
            fid::ASYNC_EVENT_CONFIG => {
                let known = if self.discovery {
                    AsyncEventConfig::DISCOVERY_LOG_CHANGE
                } else {
                    AsyncEventConfig::SMART_CRITICAL | AsyncEventConfig::NAMESPACE_ATTRIBUTE
                };
                // Hosts set bits by what OAES offers; others could never be honoured.
                live.events.set_config(AsyncEventConfig(dw11 & known));
            }
            fid::KEEP_ALIVE_TIMER => live.keep_alive.set(dw11, live.now),
            _ => return Err(invalid),
        }
        Ok(FeatureReply::default())
    }

    fn set_special(&mut self, id: u8, dw11: u32, data: &[u8]) -> Result<(), Status> {
        match id {
            // TLER and DULBE stay 0.
            fid::ERROR_RECOVERY if dw11 & 0x1_FFFF == 0 => Ok(()),
            // The cache is as its back end is configured.
            fid::VOLATILE_WRITE_CACHE if dw11 & 1 == 1 => Ok(()),
            fid::ERROR_RECOVERY | fid::VOLATILE_WRITE_CACHE => Err(Status::FEATURE_NOT_CHANGEABLE.dnr()),
            // Set by Connect (NVMe Base 2.0 §5.27.1.25).
            fid::HOST_IDENTIFIER => Err(Status::COMMAND_SEQUENCE_ERROR.dnr()),
            _ => {
                let data: &[u8; HOST_BEHAVIOR_BYTES] = data.first_chunk().ok_or(Status::SGL_LENGTH_INVALID.dnr())?;
                // ACRE is 0 or 1; the other behaviours belong to features that aren't offered.
                let known = data[0] <= 1 && data[1..].iter().all(|&b| b == 0);
                if !known {
                    return Err(Status::INVALID_FIELD.dnr());
                }
                *self.host_behavior = *data;
                Ok(())
            }
        }
    }

    fn set_queues(&mut self, dw11: u32, live: &Live<'_>) -> Result<FeatureReply, Status> {
        let asked = NumberOfQueues::decode(dw11);
        if asked.submission == u16::MAX || asked.completion == u16::MAX {
            return Err(Status::INVALID_FIELD.dnr());
        }
        if live.queues_created {
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr());
        }
        let most = all_queues(live.facts);
        // Over fabrics a queue is a pair, so both numbers are the same.
        let pairs = asked.submission.min(asked.completion).min(most.submission);
        let granted = NumberOfQueues { submission: pairs, completion: pairs };
        self.queues = Some(granted);
        Ok(FeatureReply::dword(granted.encode()))
    }

    /// Whether a composite temperature is at or beyond a threshold (NVMe Base 2.0 §5.27.1.3).
    pub fn temperature_beyond_threshold(&self, kelvin: u16) -> bool {
        kelvin >= self.over_temperature || kelvin <= self.under_temperature
    }

    fn temperature(&self, dw11: u32) -> Result<u16, Status> {
        match threshold(dw11)? {
            Threshold::Over => Ok(self.over_temperature),
            Threshold::Under => Ok(self.under_temperature),
        }
    }

    fn set_temperature(&mut self, dw11: u32) -> Result<(), Status> {
        // "All sensors" (TMPSEL Fh) includes the composite one.
        let composite = if dw11 >> 16 & 0xF == 0xF { dw11 & !(0xF << 16) } else { dw11 };
        match threshold(composite)? {
            Threshold::Over => self.over_temperature = dw11 as u16,
            Threshold::Under => self.under_temperature = dw11 as u16,
        }
        Ok(())
    }
}

enum Threshold {
    Over,
    Under,
}

/// TMPSEL and THSEL: only the composite temperature has thresholds.
fn threshold(dw11: u32) -> Result<Threshold, Status> {
    match (dw11 >> 16 & 0xF, dw11 >> 20 & 3) {
        (0, 0) => Ok(Threshold::Over),
        (0, 1) => Ok(Threshold::Under),
        _ => Err(Status::INVALID_FIELD.dnr()),
    }
}

fn all_queues(facts: &ControllerFacts) -> NumberOfQueues {
    let most = facts.max_io_queues.saturating_sub(1);
    NumberOfQueues { submission: most, completion: most }
}

/// Over fabrics the identifier has 128 bits, and EXHID says so (NVMe Base 2.0 §5.27.1.25).
fn host_identifier(dw11: u32, facts: &ControllerFacts) -> Result<FeatureReply, Status> {
    if dw11 & 1 == 0 {
        return Err(Status::INVALID_FIELD.dnr());
    }
    Ok(FeatureReply { dw0: 0, data: Some(facts.hostid.to_vec()) })
}
