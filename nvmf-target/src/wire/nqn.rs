//! NVMe Qualified Names (NVMe Base 2.0 §4.5), for hosts and subsystems.
//!
//! Owns the rules of a name and its 256-byte field on the wire. It must not know which names exist.
//! Invariant: an [`Nqn`] always keeps the rules, wherever it came from.

use std::fmt;
use std::sync::Arc;

/// The longest name in bytes, its terminating NUL not counted.
pub const NQN_MAX_BYTES: usize = 223;
/// The size of the field that holds a name on the wire.
pub const NQN_FIELD_BYTES: usize = 256;
/// The well-known name of the discovery service (NVMe Base 2.0 §4.5).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// A checked NVMe Qualified Name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nqn(Arc<str>);

/// Which rule a name broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NqnError {
    /// Empty, or over the limit.
    #[error("must be 1 to {NQN_MAX_BYTES} bytes long, is {len_bytes}")]
    Length {
        /// What it is.
        len_bytes: usize,
    },
    /// The field has no NUL in it.
    #[error("must end with a NUL within its {NQN_FIELD_BYTES}-byte field")]
    Unterminated,
    /// Not UTF-8.
    #[error("must be UTF-8, isn't from byte {at} on")]
    NotUtf8 {
        /// The first bad byte.
        at: usize,
    },
    /// No `nqn.` in front.
    #[error("must begin with 'nqn.'")]
    Prefix,
    /// No `yyyy-mm.` after the prefix.
    #[error("must have a date 'yyyy-mm.' after 'nqn.'")]
    Date,
    /// The reverse domain name is empty or has a character that a domain name can't have.
    #[error("must have a reverse domain name (letters, digits, '-', '.') after the date; byte {at} is wrong")]
    Domain {
        /// Where it goes wrong.
        at: usize,
    },
    /// White space or a control character.
    #[error("must not hold white space or control characters, does at byte {at}")]
    Character {
        /// The first one.
        at: usize,
    },
}

impl Nqn {
    /// Checks `name` against the rules.
    pub fn parse(name: &str) -> Result<Self, NqnError> {
        check(name)?;
        Ok(Self(name.into()))
    }

    /// Takes a name from its 256-byte field; what follows the NUL doesn't count.
    pub fn from_field(field: &[u8; NQN_FIELD_BYTES]) -> Result<Self, NqnError> {
        let end = field.iter().position(|&b| b == 0).ok_or(NqnError::Unterminated)?;
        let name = std::str::from_utf8(field.get(..end).unwrap_or_default())
            .map_err(|e| NqnError::NotUtf8 { at: e.valid_up_to() })?;
        Self::parse(name)
    }

    /// The well-known discovery name.
    pub fn discovery() -> Self {
        Self(DISCOVERY_NQN.into())
    }

    /// Whether it is the well-known discovery name.
    pub fn is_discovery(&self) -> bool {
        &*self.0 == DISCOVERY_NQN
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name in its NUL-padded field.
    pub fn to_field(&self) -> [u8; NQN_FIELD_BYTES] {
        let mut field = [0; NQN_FIELD_BYTES];
        for (to, from) in field.iter_mut().zip(self.0.bytes()) {
            *to = from;
        }
        field
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_debug())
    }
}

fn check(name: &str) -> Result<(), NqnError> {
    if name.is_empty() || name.len() > NQN_MAX_BYTES {
        return Err(NqnError::Length { len_bytes: name.len() });
    }
    let unprintable = name.char_indices().find(|(_, c)| c.is_control() || c.is_whitespace());
    if let Some((at, _)) = unprintable {
        return Err(NqnError::Character { at });
    }
    let rest = name.strip_prefix("nqn.").ok_or(NqnError::Prefix)?;
    let domain = date(rest).ok_or(NqnError::Date)?;
    let at = name.len() - domain.len();
    // The domain ends at the first ':'; what follows it is the owner's to choose.
    let domain = domain.split(':').next().unwrap_or_default();
    check_domain(domain).map_err(|offset| NqnError::Domain { at: at + offset })
}

/// Takes `yyyy-mm.` off the front.
fn date(text: &str) -> Option<&str> {
    let (date, rest) = text.split_once('.')?;
    let (year, month) = date.split_once('-')?;
    let digits = |s: &str, n| s.len() == n && s.bytes().all(|b| b.is_ascii_digit());
    let month_exists = matches!(month.parse::<u8>(), Ok(1..=12));
    (digits(year, 4) && digits(month, 2) && month_exists).then_some(rest)
}

/// The offset of the first byte that is wrong.
fn check_domain(domain: &str) -> Result<(), usize> {
    let mut at = 0;
    for label in domain.split('.') {
        let bad = label.bytes().position(|b| !b.is_ascii_alphanumeric() && b != b'-');
        if let Some(offset) = bad {
            return Err(at + offset);
        }
        if label.is_empty() || label.starts_with('-') || label.ends_with('-') {
            return Err(at);
        }
        at += label.len() + 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// H153: the field's rule comes with each refusal.
    #[test]
    fn h153_names_of_the_wrong_shape_are_refused_with_their_rule() {
        let prefix = "nqn.2014-08.org.example:";
        let of_length = |n: usize| format!("{prefix}{}", "a".repeat(n - prefix.len()));
        assert!(Nqn::parse(&of_length(223)).is_ok());
        assert_eq!(Nqn::parse(&of_length(224)), Err(NqnError::Length { len_bytes: 224 }));
        assert_eq!(Nqn::parse(""), Err(NqnError::Length { len_bytes: 0 }));
        assert_eq!(Nqn::parse("nqn."), Err(NqnError::Date));
        assert_eq!(Nqn::parse("nqn.2014-13.org.x"), Err(NqnError::Date));
        assert_eq!(Nqn::parse("nqn.2014-0a.org.x"), Err(NqnError::Date));
        assert_eq!(Nqn::parse("nqn.2014-08"), Err(NqnError::Date));
        assert_eq!(Nqn::parse("nqn.2014-08."), Err(NqnError::Domain { at: 12 }));
        assert_eq!(Nqn::parse("nqn.2014-08.a..b"), Err(NqnError::Domain { at: 14 }));
        assert_eq!(Nqn::parse("nqn.2014-08.a/b"), Err(NqnError::Domain { at: 13 }));
        assert_eq!(Nqn::parse("iqn.2014-08.a"), Err(NqnError::Prefix));
        assert_eq!(Nqn::parse("nqn.2014-08.org.x:a b"), Err(NqnError::Character { at: 19 }));
        assert_eq!(Nqn::parse("nqn.2014-08.org.x:a\n"), Err(NqnError::Character { at: 19 }));
        for good in ["nqn.2014-08.org.x", "nqn.2014-08.org.x:a/b%s", "nqn.2014-08.org.x:größe", DISCOVERY_NQN] {
            assert!(Nqn::parse(good).is_ok(), "{good}");
        }
    }

    #[test]
    fn fields_need_a_nul_and_utf8() {
        assert_eq!(Nqn::from_field(&[b'a'; 256]), Err(NqnError::Unterminated));
        assert_eq!(Nqn::from_field(&[0; 256]), Err(NqnError::Length { len_bytes: 0 }));
        let mut field = Nqn::discovery().to_field();
        assert!(Nqn::from_field(&field).unwrap().is_discovery());
        field[200] = 0xff;
        assert!(Nqn::from_field(&field).is_ok(), "bytes behind the NUL don't count");
        field[3] = 0xff;
        assert_eq!(Nqn::from_field(&field), Err(NqnError::NotUtf8 { at: 3 }));
    }
}
