//! Features (NVMe Base 2.0 §5.27): their ids, and the values of those that have a layout.
//!
//! It must not know a controller's state.

/// Feature identifiers.
pub mod fid {
    /// Arbitration.
    pub const ARBITRATION: u8 = 0x01;
    /// Power Management.
    pub const POWER_MANAGEMENT: u8 = 0x02;
    /// Temperature Threshold.
    pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
    /// Error Recovery (NVM command set).
    pub const ERROR_RECOVERY: u8 = 0x05;
    /// Volatile Write Cache.
    pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
    /// Number of Queues.
    pub const NUMBER_OF_QUEUES: u8 = 0x07;
    /// Write Atomicity Normal (NVM command set).
    pub const WRITE_ATOMICITY: u8 = 0x0A;
    /// Asynchronous Event Configuration.
    pub const ASYNC_EVENT_CONFIG: u8 = 0x0B;
    /// Keep Alive Timer.
    pub const KEEP_ALIVE_TIMER: u8 = 0x0F;
    /// Host Behavior Support.
    pub const HOST_BEHAVIOR: u8 = 0x16;
    /// Host Identifier.
    pub const HOST_IDENTIFIER: u8 = 0x81;
}

/// Which value Get Features asks for (SEL).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Select {
    /// The value in force.
    Current,
    /// The value after a reset.
    Default,
    /// The saved value; without saving, the default.
    Saved,
    /// What can be done with the feature.
    Capabilities,
}

impl Select {
    /// Reads SEL, bits 10:8 of dword 10; `None` if reserved.
    pub fn decode(cdw10: u32) -> Option<Self> {
        match cdw10 >> 8 & 7 {
            0 => Some(Self::Current),
            1 => Some(Self::Default),
            2 => Some(Self::Saved),
            3 => Some(Self::Capabilities),
            _ => None,
        }
    }
}

/// Dword 0 of Get Features with SEL = supported capabilities.
pub mod capability {
    /// The value can be saved.
    pub const SAVEABLE: u32 = 1;
    /// The value is a namespace's.
    pub const NAMESPACE_SPECIFIC: u32 = 2;
    /// The value can be changed.
    pub const CHANGEABLE: u32 = 4;
}

/// Number of Queues: I/O submission and completion queues, 0-based.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumberOfQueues {
    /// Submission queues, 0-based.
    pub submission: u16,
    /// Completion queues, 0-based.
    pub completion: u16,
}

impl NumberOfQueues {
    /// Reads dword 11 of the command or dword 0 of the completion.
    pub fn decode(value: u32) -> Self {
        Self { submission: value as u16, completion: (value >> 16) as u16 }
    }
    /// The dword.
    pub fn encode(&self) -> u32 {
        u32::from(self.submission) | u32::from(self.completion) << 16
    }
}

/// Asynchronous Event Configuration: which events the host wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AsyncEventConfig(pub u32);

impl AsyncEventConfig {
    /// SMART critical warnings, bits 7:0.
    pub const SMART_CRITICAL: u32 = 0xFF;
    /// Namespace attribute notices.
    pub const NAMESPACE_ATTRIBUTE: u32 = 1 << 8;
    /// Firmware activation notices.
    pub const FIRMWARE_ACTIVATION: u32 = 1 << 9;
    /// Asymmetric namespace access change notices.
    pub const ANA_CHANGE: u32 = 1 << 11;
    /// Discovery log page change notification.
    pub const DISCOVERY_LOG_CHANGE: u32 = 1 << 31;

    /// Whether all of `bits` are on.
    pub fn wants(self, bits: u32) -> bool {
        self.0 & bits == bits
    }
}

/// An asynchronous event, as dword 0 of an Asynchronous Event Request's completion gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AsyncEvent {
    /// Event type: 0 error, 1 health, 2 notice, …
    pub kind: u8,
    /// Event information.
    pub information: u8,
    /// The log page that holds the details, and whose reading clears the event.
    pub log_page: u8,
}

impl AsyncEvent {
    /// Namespace attribute changed.
    pub const NAMESPACE_ATTRIBUTE: Self = Self { kind: 2, information: 0x00, log_page: 0x04 };
    /// Discovery log page change.
    pub const DISCOVERY_LOG_CHANGE: Self = Self { kind: 2, information: 0xF0, log_page: 0x70 };

    /// Dword 0.
    pub fn encode(&self) -> u32 {
        u32::from(self.kind & 7) | u32::from(self.information) << 8 | u32::from(self.log_page) << 16
    }
    /// Reads dword 0.
    pub fn decode(dw0: u32) -> Self {
        Self { kind: (dw0 & 7) as u8, information: (dw0 >> 8) as u8, log_page: (dw0 >> 16) as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_values() {
        assert_eq!(AsyncEvent::NAMESPACE_ATTRIBUTE.encode(), 0x0004_0002);
        assert_eq!(AsyncEvent::DISCOVERY_LOG_CHANGE.encode(), 0x0070_F002);
        assert_eq!(AsyncEvent::decode(0x0070_F002), AsyncEvent::DISCOVERY_LOG_CHANGE);
        assert_eq!(NumberOfQueues { submission: 3, completion: 5 }.encode(), 0x0005_0003);
        assert_eq!(Select::decode(0x300), Some(Select::Capabilities));
        assert_eq!(Select::decode(0x400), None);
    }
}
