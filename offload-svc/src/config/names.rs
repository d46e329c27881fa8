//! Names that people choose: NQNs, volume names, serial numbers.
//!
//! Owns their rules. Must not know who carries a name. Invariant: a value of these types obeys its rule, and its
//! error says which rule the text broke.

use std::fmt;
use std::str::FromStr;

use nvmf_target::wire::nqn::{Nqn as WireNqn, NqnError};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use super::values::as_string;

/// The longest volume name in bytes.
pub const VOLUME_NAME_MAX_BYTES: usize = 64;
/// The longest serial number in bytes (Identify Controller, SN).
pub const SERIAL_MAX_BYTES: usize = 20;

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
    /// A rule of NQNs.
    #[error("is not an NQN such as nqn.2026-11.io.example:disk0: it {0}")]
    Nqn(#[source] NqnError),
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

/// An NVMe Qualified Name of a subsystem or a host (NVMe Base 2.0 §4.5).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nqn(WireNqn);

as_string!(Nqn, "an NQN such as nqn.2026-11.io.example:disk0");

impl Nqn {
    /// The text.
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// As the protocol's type.
    pub fn wire(&self) -> WireNqn {
        self.0.clone()
    }
}

impl FromStr for Nqn {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        WireNqn::parse(text).map(Self).map_err(NameError::Nqn)
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Checks the rules of a volume's name.
///
/// # Errors
/// The first rule that `text` breaks.
pub fn check_volume_name(text: &str) -> Result<(), NameError> {
    check_length(text, VOLUME_NAME_MAX_BYTES)?;
    let allowed = "a volume name has letters, digits, '.', '_' and '-', and begins with a letter or digit";
    check_characters(text.get(..1).unwrap_or(text), allowed, |c| c.is_ascii_alphanumeric())?;
    check_characters(text, allowed, |c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
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
            nqn(223).as_str(),
            "nqn.2026-11.io.example:a/b%s",
            "nqn.2026-11.io.example:größe",
            "nqn.2014-08.org.nvmexpress.discovery",
        ] {
            assert_eq!(good.parse::<Nqn>().unwrap().wire().as_str(), good);
        }
        let rule = |text: &str| text.parse::<Nqn>().unwrap_err().to_string();
        for (bad, says) in [
            (String::new(), "must be 1 to 223 bytes long, is 0"),
            (nqn(224), "must be 1 to 223 bytes long, is 224"),
            ("nqn.2026-11".to_owned(), "must have a date"),
            ("disk0".to_owned(), "must begin with 'nqn.'"),
            ("nqn.2026-13.io:x".to_owned(), "must have a date"),
            ("nqn.2026-11.io.example:a b".to_owned(), "white space or control characters, does at byte 24"),
            ("nqn.2026-11.io.example:a\n".to_owned(), "white space or control characters, does at byte 24"),
        ] {
            assert!(rule(&bad).contains(says), "{bad:?}: {}", rule(&bad));
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
