//! Identifiers as distinct types, so that one can't be passed for another.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($int:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $int);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// CID: names a command within its submission queue.
    CommandId(u16)
}
id! {
    /// QID: 0 is the admin queue.
    QueueId(u16)
}
id! {
    /// NSID: names a namespace within its subsystem.
    NamespaceId(u32)
}
id! {
    /// CNTLID: names a controller within its subsystem.
    ControllerId(u16)
}

impl NamespaceId {
    /// FFFFFFFFh: every namespace that the controller has.
    pub const ALL: Self = Self(u32::MAX);
}
