//! Names that people choose: NQNs, volume names, serial numbers.
//!
//! Owns their rules. Must not know who carries a name. Invariant: a value of these types obeys its rule, and its
//! error says which rule the text broke.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use super::values::as_string;

/// The longest NQN in bytes (NVMe Base 2.0 §4.7).
pub const NQN_MAX_BYTES: usize = 223;
/// The longest volume name in bytes.
pub const VOLUME_NAME_MAX_BYTES: usize = 64;
/// The longest serial number in bytes (Identify Controller, SN).
pub const SERIAL_MAX_BYTES: usize = 20;
/// The discovery subsystem's own name, which no other subsystem may take.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// The rule that a name breaks.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NameError {
    /// Nothing there.
    #[error("is empty")]
    Empty,
    /// Over the limit.
    #[error("is {len_bytes} bytes long: at most {max_bytes} are allowed")]
    TooLong {
        /// What it has.
        len_bytes: usize,
        /// What is allowed.
        max_bytes: usize,
    },
    /// An NQN without its date.
    #[error("is not an NQN: it must begin with 'nqn.YYYY-MM.', such as nqn.2026-11.io.example:disk0")]
    NqnDate,
    /// An NQN without a domain or without the part after the colon.
    #[error("is not an NQN: 'nqn.YYYY-MM.' must be followed by a reverse domain, a colon and a name of your own")]
    NqnDomain,
    /// A byte that is not allowed.
    #[error("holds {shown} at byte {offset}: {allowed}")]
    Character {
        /// The character, escaped.
        shown: Escaped,
        /// Where.
        offset: usize,
        /// What is allowed instead.
        allowed: &'static str,
    },
    /// A name that belongs to the specification.
    #[error("is the discovery subsystem's own name, which is always there")]
    Discovery,
}

/// A character, shown so that it can't disturb a terminal or a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Escaped(pub char);

impl fmt::Display for Escaped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}'", self.0.escape_debug())
    }
}

/// A string type with a rule, read and written as a string.
macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $check:path, $expecting:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl FromStr for $name {
            type Err = NameError;
            fn from_str(text: &str) -> Result<Self, NameError> {
                $check(text)?;
                Ok(Self(text.to_owned()))
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
        as_string!($name, $expecting);
    };
}

name_type!(
    /// An NVMe Qualified Name of a subsystem or a host (NVMe Base 2.0 §4.7).
    Nqn,
    check_nqn,
    "an NQN such as nqn.2026-11.io.example:disk0"
);
name_type!(
    /// The name of a volume: letters, digits, '.', '_', '-', beginning with a letter or digit.
    VolumeName,
    check_volume_name,
    "a volume name"
);
name_type!(
    /// A subsystem's serial number: printable ASCII.
    Serial,
    check_serial,
    "a serial number"
);

/// Checks the rules of an NQN.
///
/// # Errors
/// The first rule that `text` breaks.
pub fn check_nqn(text: &str) -> Result<(), NameError> {
    check_length(text, NQN_MAX_BYTES)?;
    check_characters(text, "spaces and control characters are not allowed in an NQN", |c| {
        !c.is_whitespace() && !c.is_control()
    })?;
    let (date, rest) = text.strip_prefix("nqn.").and_then(|rest| rest.split_once('.')).ok_or(NameError::NqnDate)?;
    if !is_date(date) {
        return Err(NameError::NqnDate);
    }
    if text == DISCOVERY_NQN {
        return Ok(());
    }
    let (domain, own) = rest.split_once(':').ok_or(NameError::NqnDomain)?;
    let label = |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if own.is_empty() || !domain.split('.').all(label) { Err(NameError::NqnDomain) } else { Ok(()) }
}

/// Checks the rules of a volume's name.
///
/// # Errors
/// The first rule that `text` breaks.
pub fn check_volume_name(text: &str) -> Result<(), NameError> {
    check_length(text, VOLUME_NAME_MAX_BYTES)?;
    check_characters(text, "a volume name has letters, digits, '.', '_' and '-', and begins with a letter or digit", {
        let mut first = true;
        move |c| c.is_ascii_alphanumeric() || (!std::mem::take(&mut first) && matches!(c, '.' | '_' | '-'))
    })
}

fn check_serial(text: &str) -> Result<(), NameError> {
    check_length(text, SERIAL_MAX_BYTES)?;
    check_characters(text, "a serial number has printable ASCII only, and no spaces", |c| c.is_ascii_graphic())
}

fn check_length(text: &str, max_bytes: usize) -> Result<(), NameError> {
    match text.len() {
        0 => Err(NameError::Empty),
        len_bytes if len_bytes > max_bytes => Err(NameError::TooLong { len_bytes, max_bytes }),
        _ => Ok(()),
    }
}

fn check_characters(text: &str, allowed: &'static str, mut fits: impl FnMut(char) -> bool) -> Result<(), NameError> {
    match text.char_indices().find(|(_, c)| !fits(*c)) {
        Some((offset, c)) => Err(NameError::Character { shown: Escaped(c), offset, allowed }),
        None => Ok(()),
    }
}

fn is_date(date: &str) -> bool {
    let Some((year, month)) = date.split_once('-') else { return false };
    let digits = |s: &str, len| s.len() == len && s.bytes().all(|b| b.is_ascii_digit());
    digits(year, 4) && digits(month, 2) && matches!(month.parse(), Ok(1..=12))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nqn(len_bytes: usize) -> String {
        let start = "nqn.2026-11.io.example:";
        format!("{start}{}", "d".repeat(len_bytes - start.len()))
    }

    #[test]
    fn h153_nqn_rules_name_the_rule() {
        for good in [
            nqn(NQN_MAX_BYTES).as_str(),
            "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001",
            "nqn.2026-11.io.example:a/b%s",
            "nqn.2026-11.io.example:größe",
            DISCOVERY_NQN,
        ] {
            assert_eq!(check_nqn(good), Ok(()), "{good}");
        }
        assert_eq!(check_nqn(""), Err(NameError::Empty));
        assert_eq!(check_nqn(&nqn(224)), Err(NameError::TooLong { len_bytes: 224, max_bytes: 223 }));
        for bad in ["nqn.2026-11", "disk0", "nqn.", "nqn.26-11.io:x", "nqn.2026-13.io:x", "NQN.2026-11.io:x"] {
            assert_eq!(check_nqn(bad), Err(NameError::NqnDate), "{bad}");
        }
        for bad in ["nqn.2026-11.io.example", "nqn.2026-11.io.example:", "nqn.2026-11.:x", "nqn.2026-11.io..a:x"] {
            assert_eq!(check_nqn(bad), Err(NameError::NqnDomain), "{bad}");
        }
        for (bad, shown) in [("nqn.2026-11.io.example:a b", "' '"), ("nqn.2026-11.io.example:a\n", "'\\n'")] {
            let error = check_nqn(bad).unwrap_err().to_string();
            assert!(error.starts_with(&format!("holds {shown} at byte ")), "{error}");
        }
    }

    #[test]
    fn h153_volume_names_and_serials_name_the_rule() {
        for good in ["v", "vol-0_a.b", &"v".repeat(64)] {
            assert_eq!(check_volume_name(good), Ok(()), "{good}");
        }
        assert_eq!(check_volume_name(""), Err(NameError::Empty));
        assert_eq!(check_volume_name(&"v".repeat(65)), Err(NameError::TooLong { len_bytes: 65, max_bytes: 64 }));
        for (bad, offset) in [("-v", 0), (".", 0), ("a b", 1), ("a/b", 1), ("a\n", 1), ("a%s", 1), ("vö", 1)] {
            let Err(NameError::Character { offset: found, .. }) = check_volume_name(bad) else { panic!("{bad}") };
            assert_eq!(found, offset, "{bad}");
        }
        assert!("SLUICE0001".parse::<Serial>().is_ok());
        assert!("SLUICE 1".parse::<Serial>().is_err());
        assert!("S".repeat(21).parse::<Serial>().is_err());
    }
}
