//! The configuration and the changes made at run time, put together.
//!
//! Owns the rule (docs/decisions/0013-run-time-changes.md): who spoke last about a thing decides. What the configuration
//! said when the change was made is kept with the change; where it still says the same, the change holds; where it says
//! something else by now, it was edited later, and holds. A thing is a volume, a listener, a subsystem's serial number and access,
//! one host of a list, one namespace. Must not know files. Invariant: without changes the result is the configuration.

use std::fmt;

use super::names::Nqn;
use super::objects::Objects;
use super::schema::{Listener, Namespace, Subsystem};

/// The changes: what the configuration said of the changed objects when they were changed, and what they became.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Changes {
    /// As configured then.
    pub configured: Objects,
    /// As they ran; what is missing had been removed.
    pub running: Objects,
}

impl Changes {
    /// How many objects are changed.
    pub fn count(&self) -> usize {
        self.running.count() + self.configured.count_missing_in(&self.running)
    }
}

/// A change that no longer holds, since the configuration was edited after it.
#[derive(Debug, Clone, PartialEq)]
pub enum Overruled {
    /// Of a volume.
    Volume(String),
    /// Of a subsystem as a whole: removed then, or no longer configured now.
    Subsystem(String),
    /// Of a subsystem's serial number or access.
    Settings(String),
    /// Of a namespace.
    Namespace(String, u32),
}

impl fmt::Display for Overruled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(name) => write!(f, "volume {name}"),
            Self::Subsystem(nqn) => write!(f, "subsystem {nqn}"),
            Self::Settings(nqn) => write!(f, "serial number and access of subsystem {nqn}"),
            Self::Namespace(nqn, nsid) => write!(f, "namespace {nsid} of subsystem {nqn}"),
        }
    }
}

/// The objects in effect, and the changes that no longer hold.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Merged {
    /// In effect: the configuration's first, in its order.
    pub objects: Objects,
    /// Not in effect.
    pub overruled: Vec<Overruled>,
}

/// Puts `changes` onto what is `configured` now.
pub fn merge(configured: &Objects, changes: &Changes) -> Merged {
    let mut overruled = Vec::new();
    let (then, ran) = (&changes.configured, &changes.running);
    let volumes = each(
        [&configured.volumes, &then.volumes, &ran.volumes],
        |a, b| a.name == b.name,
        |three| {
            overruled.extend(three.overruled().map(|volume| Overruled::Volume(volume.name.to_string())));
            three.last()
        },
    );
    let listeners = each([&configured.listeners, &then.listeners, &ran.listeners], Listener::eq, |three| three.last());
    let subsystems = each(
        [&configured.subsystems, &then.subsystems, &ran.subsystems],
        |a, b| a.nqn == b.nqn,
        |three| subsystem(&three, &mut overruled),
    );
    Merged { objects: Objects { volumes, subsystems, listeners }, overruled }
}

/// One thing as the configuration has it now, as it had it when the change was made, and as it ran then.
struct Three<'a, T> {
    now: Option<&'a T>,
    then: Option<&'a T>,
    ran: Option<&'a T>,
}

impl<'a, T: PartialEq + Clone> Three<'a, T> {
    /// As whoever spoke last has it.
    fn last(&self) -> Option<T> {
        let last = if self.now == self.then { self.ran } else { self.now };
        last.cloned()
    }

    /// The thing, if both spoke of it, and differently.
    fn overruled(&self) -> Option<&'a T> {
        let both = self.now != self.then && self.ran != self.then && self.ran != self.now;
        self.now.or(self.ran).filter(|_| both)
    }
}

/// Every thing that is configured now or that ran: the configuration's first.
fn each<T: PartialEq, U>(
    [now, then, ran]: [&[T]; 3],
    same: impl Fn(&T, &T) -> bool,
    mut decide: impl FnMut(Three<'_, T>) -> Option<U>,
) -> Vec<U> {
    let all = now.iter().chain(ran.iter().filter(|thing| !now.iter().any(|other| same(other, thing))));
    let decided = all.filter_map(|thing| {
        let [now, then, ran] = [now, then, ran].map(|list| list.iter().find(|other| same(other, thing)));
        decide(Three { now, then, ran })
    });
    decided.collect()
}

fn subsystem(three: &Three<'_, Subsystem>, overruled: &mut Vec<Overruled>) -> Option<Subsystem> {
    let (Some(now), Some(ran)) = (three.now, three.ran) else {
        overruled.extend(three.overruled().map(|subsystem| Overruled::Subsystem(subsystem.nqn.to_string())));
        return three.last();
    };
    if three.then == Some(now) {
        return Some(ran.clone());
    }
    let nqn = now.nqn.to_string();
    let settings = |s: &Subsystem| (s.serial.clone(), s.allow_any_host);
    let (is, was, were) = (settings(now), three.then.map(settings), settings(ran));
    let access = Three { now: Some(&is), then: was.as_ref(), ran: Some(&were) };
    overruled.extend(access.overruled().map(|_| Overruled::Settings(nqn.clone())));
    let (serial, allow_any_host) = access.last().unwrap_or_else(|| is.clone());
    let hosts_then: &[Nqn] = three.then.map_or(&[], |then| &then.hosts);
    let namespaces_then: &[Namespace] = three.then.map_or(&[], |then| &then.namespaces);
    let hosts = each([&now.hosts, hosts_then, &ran.hosts], Nqn::eq, |three| three.last());
    let namespaces = each(
        [&now.namespaces, namespaces_then, &ran.namespaces],
        |a, b| a.nsid == b.nsid,
        |three| {
            overruled.extend(three.overruled().map(|namespace| Overruled::Namespace(nqn.clone(), namespace.nsid)));
            three.last()
        },
    );
    Some(Subsystem { nqn: now.nqn.clone(), serial, allow_any_host, hosts, namespaces })
}
