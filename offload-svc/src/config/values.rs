//! The values a configuration is made of: sizes, core lists, block sizes, addresses, back ends and members.
//!
//! Owns how each is written and read. Must not know which key a value stands under. Invariant: every type prints
//! exactly what it parses, so a dumped configuration loads to the same configuration.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

pub use crate::stages::cipher::Cipher;
pub use crate::stages::compress::Compression;

/// Why a value does not read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ValueError {
    /// A size that is no number with a binary unit.
    #[error("not a size: write a whole number of bytes or one with KiB, MiB, GiB, TiB or PiB, such as 2GiB")]
    Size,
    /// A size with a decimal unit: refused, since it is so often meant as the binary one.
    #[error("{unit} is ambiguous: write {binary} (powers of 1024) or the number of bytes")]
    DecimalUnit {
        /// As written.
        unit: &'static str,
        /// What was probably meant.
        binary: &'static str,
    },
    /// A size over 2^63-1, which no file can have.
    #[error("larger than 8EiB-1")]
    SizeOverflow,
    /// A core list with an empty piece.
    #[error("an empty core list: write CPUs and ranges such as 0-3,8, or leave the key out")]
    CpusEmpty,
    /// A piece of a core list that is no CPU number or range.
    #[error("not a core list: write CPU numbers and ranges in decimal, such as 0-3,8")]
    CpusSyntax,
    /// A range that ends before it begins.
    #[error("the range {from}-{to} ends before it begins: write {to}-{from}")]
    CpusReversed {
        /// First CPU as written.
        from: u16,
        /// Last CPU as written.
        to: u16,
    },
    /// A CPU that is listed twice.
    #[error("CPU {cpu} is listed twice: one reactor runs on a CPU")]
    CpusTwice {
        /// The CPU.
        cpu: u16,
    },
    /// A block size that is neither 512 nor 4096.
    #[error("not a block size: 512 or 4096")]
    BlockSize,
    /// A back end of no known kind.
    #[error("not a back end: write pool:VOLUME, mem:SIZE, file:PATH or block:PATH")]
    Backend,
    /// A member of no known kind.
    #[error("not a pool member: write file:PATH, block:PATH or mem:SIZE")]
    Member,
    /// A path with nothing in it, or with a NUL byte.
    #[error("a path is missing after the colon")]
    Path,
    /// An address that is no IP address.
    #[error("not an IP address: write an IPv4 address such as 127.0.0.1 or an IPv6 one such as ::1 or fe80::1%eth0")]
    Address,
    /// A scope on an address that is not link-local.
    #[error("only a link-local IPv6 address (fe80::/10) takes a %scope")]
    Scope,
}

/// Implements string (de)serialisation by `FromStr` and `Display`.
macro_rules! as_string {
    ($type:ty, $expecting:literal) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Parse;
                impl Visitor<'_> for Parse {
                    type Value = $type;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expecting)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$type, E> {
                        text.parse().map_err(E::custom)
                    }
                    fn visit_u64<E: de::Error>(self, number: u64) -> Result<$type, E> {
                        number.to_string().parse().map_err(E::custom)
                    }
                    fn visit_i64<E: de::Error>(self, number: i64) -> Result<$type, E> {
                        number.to_string().parse().map_err(E::custom)
                    }
                }
                deserializer.deserialize_any(Parse)
            }
        }
    };
}
pub(super) use as_string;

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

as_string!(ByteSize, "a size such as 2GiB");

const UNITS: [(&str, u32); 6] = [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)];
const DECIMAL_UNITS: [(&str, &str); 10] = [
    ("KB", "KiB"),
    ("kB", "KiB"),
    ("MB", "MiB"),
    ("GB", "GiB"),
    ("TB", "TiB"),
    ("K", "KiB"),
    ("k", "KiB"),
    ("M", "MiB"),
    ("G", "GiB"),
    ("T", "TiB"),
];

impl ByteSize {
    /// `n` KiB.
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }
    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }
    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }
    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim_start();
        if number.is_empty() {
            return Err(ValueError::Size);
        }
        if let Some(&(unit, binary)) = DECIMAL_UNITS.iter().find(|(name, _)| *name == unit) {
            return Err(ValueError::DecimalUnit { unit, binary });
        }
        let shift = match unit {
            "" => 0,
            unit => UNITS.iter().find(|(name, _)| *name == unit).ok_or(ValueError::Size)?.1,
        };
        let number: u64 = number.parse().map_err(|_| ValueError::SizeOverflow)?;
        let bytes = number.checked_mul(1 << shift).ok_or(ValueError::SizeOverflow)?;
        if bytes > i64::MAX as u64 { Err(ValueError::SizeOverflow) } else { Ok(Self(bytes)) }
    }
}

impl fmt::Display for ByteSize {
    /// The largest unit that divides it: exact, and read back as the same number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS.iter().find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift);
        let (unit, shift) = exact.copied().unwrap_or(("B", 0));
        f.pad(&format!("{}{unit}", self.0 >> shift))
    }
}

/// Which CPUs the reactors run on, one each, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuList(pub Vec<u16>);

as_string!(CpuList, "a core list such as 0-3,8");

impl FromStr for CpuList {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let number = |piece: &str| {
            let plain = !piece.is_empty() && piece.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| piece.parse::<u16>().ok()).flatten().ok_or(ValueError::CpusSyntax)
        };
        if text.trim().is_empty() {
            return Err(ValueError::CpusEmpty);
        }
        let mut seen = BTreeSet::new();
        let mut cpus = Vec::new();
        for piece in text.split(',').map(str::trim) {
            let (from, to) = match piece.split_once('-') {
                Some((from, to)) => (number(from)?, number(to)?),
                None => (number(piece)?, number(piece)?),
            };
            if to < from {
                return Err(ValueError::CpusReversed { from, to });
            }
            for cpu in from..=to {
                if !seen.insert(cpu) {
                    return Err(ValueError::CpusTwice { cpu });
                }
                cpus.push(cpu);
            }
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        let mut separator = "";
        while let Some((&first, _)) = rest.split_first() {
            let run = rest.iter().zip(first..).take_while(|(cpu, want)| *cpu == want).count();
            let last = first + (run as u16 - 1);
            match run {
                1 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
            rest = &rest[run..];
        }
        Ok(())
    }
}

/// A namespace's logical block size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockSize {
    /// 512 bytes.
    B512,
    /// 4096 bytes.
    B4096,
}

impl BlockSize {
    /// In bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B512 => 512,
            Self::B4096 => 4096,
        }
    }
}

impl FromStr for BlockSize {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text.parse::<ByteSize>() {
            Ok(ByteSize(512)) => Ok(Self::B512),
            Ok(ByteSize(4096)) => Ok(Self::B4096),
            _ => Err(ValueError::BlockSize),
        }
    }
}

impl Serialize for BlockSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(self.bytes())
    }
}

impl<'de> Deserialize<'de> for BlockSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let size = ByteSize::deserialize(deserializer)?;
        size.0.to_string().parse().map_err(de::Error::custom)
    }
}

/// What stands behind a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum BackendSpec {
    /// A volume of the pool.
    Pool(String),
    /// Plain memory, lost at exit.
    Mem(ByteSize),
    /// A plain file.
    File(PathBuf),
    /// A plain block device.
    Block(PathBuf),
}

as_string!(BackendSpec, "a back end such as pool:VOLUME or mem:1GiB");

impl FromStr for BackendSpec {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let (kind, rest) = text.split_once(':').ok_or(ValueError::Backend)?;
        match kind {
            "pool" => Ok(Self::Pool(rest.to_owned())),
            "mem" => Ok(Self::Mem(rest.parse()?)),
            "file" => Ok(Self::File(path(rest)?)),
            "block" => Ok(Self::Block(path(rest)?)),
            _ => Err(ValueError::Backend),
        }
    }
}

impl fmt::Display for BackendSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pool(volume) => write!(f, "pool:{volume}"),
            Self::Mem(size) => write!(f, "mem:{size}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Block(path) => write!(f, "block:{}", path.display()),
        }
    }
}

/// One member of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemberSpec {
    /// A file, made sparse at the configured size if it is not there.
    File(PathBuf),
    /// A block device.
    Block(PathBuf),
    /// Memory, lost at exit.
    Mem(ByteSize),
}

as_string!(MemberSpec, "a pool member such as file:/srv/sluice/m0");

impl FromStr for MemberSpec {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let (kind, rest) = text.split_once(':').ok_or(ValueError::Member)?;
        match kind {
            "file" => Ok(Self::File(path(rest)?)),
            "block" => Ok(Self::Block(path(rest)?)),
            "mem" => Ok(Self::Mem(rest.parse()?)),
            _ => Err(ValueError::Member),
        }
    }
}

impl MemberSpec {
    /// The file or device, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) | Self::Block(path) => Some(path),
            Self::Mem(_) => None,
        }
    }
}

impl fmt::Display for MemberSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Block(path) => write!(f, "block:{}", path.display()),
            Self::Mem(size) => write!(f, "mem:{size}"),
        }
    }
}

fn path(text: &str) -> Result<PathBuf, ValueError> {
    if text.is_empty() || text.contains('\0') { Err(ValueError::Path) } else { Ok(PathBuf::from(text)) }
}

/// An address to listen on. Printed bare; [`Address::with_port`] adds the brackets that IPv6 needs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// The address; a v4-mapped IPv6 one is taken as the IPv4 address that it is.
    pub ip: IpAddr,
    /// The interface of a link-local IPv6 address, by name or number.
    pub scope: Option<String>,
}

as_string!(Address, "an IP address");

impl Address {
    /// With the port, reusable on a command line: `127.0.0.1:4420`, `[::1]:4420`, `[fe80::1%eth0]:4420`.
    pub fn with_port(&self, port: u16) -> String {
        match self.ip {
            IpAddr::V4(ip) => format!("{ip}:{port}"),
            IpAddr::V6(_) => format!("[{self}]:{port}"),
        }
    }

    /// The socket address to bind, the scope resolved to an interface index.
    ///
    /// # Errors
    /// If no interface has the scope's name.
    pub fn socket(&self, port: u16) -> std::io::Result<SocketAddr> {
        let scope_id = match self.scope.as_deref() {
            None => 0,
            Some(scope) => match scope.parse::<u32>() {
                Ok(index) => index,
                Err(_) => nix::net::if_::if_nametoindex(scope)?,
            },
        };
        Ok(match self.ip {
            IpAddr::V4(ip) => SocketAddr::from((ip, port)),
            IpAddr::V6(ip) => SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope_id)),
        })
    }
}

impl FromStr for Address {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let inner = match (text.strip_prefix('['), text.strip_suffix(']')) {
            (Some(_), Some(_)) => &text[1..text.len() - 1],
            (None, None) => text,
            _ => return Err(ValueError::Address),
        };
        let (ip, scope) = match inner.split_once('%') {
            Some((ip, scope)) => (ip, Some(scope)),
            None => (inner, None),
        };
        let ip: IpAddr = ip.parse().map_err(|_| ValueError::Address)?;
        let link_local = matches!(ip, IpAddr::V6(ip) if is_link_local(&ip));
        match scope {
            Some(scope) if scope.is_empty() || scope.len() > 15 || !scope.bytes().all(|b| b.is_ascii_graphic()) => {
                Err(ValueError::Address)
            }
            Some(_) if !link_local => Err(ValueError::Scope),
            scope => Ok(Self { ip: ip.to_canonical(), scope: scope.map(str::to_owned) }),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.scope {
            Some(scope) => write!(f, "{}%{scope}", self.ip),
            None => write!(f, "{}", self.ip),
        }
    }
}

fn is_link_local(ip: &Ipv6Addr) -> bool {
    ip.segments()[0] & 0xffc0 == 0xfe80
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_and_print_exactly() {
        for (text, bytes) in [("2GiB", 2 << 30), ("1536MiB", 1536 << 20), ("0", 0), ("4097", 4097), ("64 KiB", 65536)] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!(size.0, bytes);
            assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
        }
        assert_eq!("2GB".parse::<ByteSize>(), Err(ValueError::DecimalUnit { unit: "GB", binary: "GiB" }));
        for bad in ["", "GiB", "-1", "1.5GiB", "2gib", "0x10"] {
            assert_eq!(bad.parse::<ByteSize>(), Err(ValueError::Size), "{bad}");
        }
        for bad in ["9223372036854775808", "8192PiB", "99999999999999999999"] {
            assert_eq!(bad.parse::<ByteSize>(), Err(ValueError::SizeOverflow), "{bad}");
        }
    }

    #[test]
    fn h145_core_lists_are_read_or_refused_in_our_words() {
        let cpus = |text: &str| text.parse::<CpuList>().map(|list| list.0);
        assert_eq!(cpus("0-3"), Ok(vec![0, 1, 2, 3]));
        assert_eq!(cpus("200"), Ok(vec![200]));
        assert_eq!(cpus("8, 0-1"), Ok(vec![8, 0, 1]));
        assert_eq!(cpus("0,0"), Err(ValueError::CpusTwice { cpu: 0 }));
        assert_eq!(cpus("3-1"), Err(ValueError::CpusReversed { from: 3, to: 1 }));
        for bad in ["0x3", "@0", "1-", "-1", "0,,1", "70000", "+1", "0-1-2"] {
            assert_eq!(cpus(bad), Err(ValueError::CpusSyntax), "{bad}");
        }
        assert_eq!(cpus(""), Err(ValueError::CpusEmpty));
        assert_eq!(CpuList(vec![0, 1, 2, 8, 5]).to_string(), "0-2,8,5");
    }

    #[test]
    fn h174_addresses_print_so_that_they_can_be_used_again() {
        for (text, shown, with_port) in [
            ("127.0.0.1", "127.0.0.1", "127.0.0.1:4420"),
            ("::1", "::1", "[::1]:4420"),
            ("[fd00::1]", "fd00::1", "[fd00::1]:4420"),
            ("fe80::1%lo", "fe80::1%lo", "[fe80::1%lo]:4420"),
            ("::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1:4420"),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(address.with_port(4420), with_port);
            assert_eq!(shown.parse::<Address>().unwrap(), address);
        }
        assert_eq!("fe80::1%lo".parse::<Address>().unwrap().socket(1).unwrap().to_string(), "[fe80::1%1]:1");
        for bad in ["300.1.1.1", "[::1", "::1]", "", "localhost", "fe80::1%", "1.2.3.4:5"] {
            assert_eq!(bad.parse::<Address>(), Err(ValueError::Address), "{bad}");
        }
        assert_eq!("::1%lo".parse::<Address>(), Err(ValueError::Scope));
    }

    #[test]
    fn back_ends_and_members_round_trip() {
        for text in ["pool:vol0", "mem:1GiB", "file:/tmp/a b", "block:/dev/nvme0n1"] {
            assert_eq!(text.parse::<BackendSpec>().unwrap().to_string(), text);
        }
        for text in ["mem:1GiB", "file:var/m0", "block:/dev/sda"] {
            assert_eq!(text.parse::<MemberSpec>().unwrap().to_string(), text);
        }
        assert_eq!("/dev/sda".parse::<MemberSpec>(), Err(ValueError::Member));
        assert_eq!("file:".parse::<BackendSpec>(), Err(ValueError::Path));
    }
}
