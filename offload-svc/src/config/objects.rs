//! The objects of a configuration that can also be changed while the service runs: volumes, subsystems, listeners.
//!
//! Owns finding and comparing them. Must not know the target or the pool. Invariant: an object has the same type here, in the
//! configuration file and in the state file, and so the same rules.

use serde::{Deserialize, Serialize};

use super::Config;
use super::names::{Nqn, VolumeName};
use super::schema::{Listener, Namespace, Subsystem, Volume};

/// Volumes, subsystems and listeners.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Objects {
    /// Volumes.
    #[serde(rename = "volume", skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// Subsystems with their hosts and namespaces.
    #[serde(rename = "subsystem", skip_serializing_if = "Vec::is_empty")]
    pub subsystems: Vec<Subsystem>,
    /// Addresses to listen on.
    #[serde(rename = "listener", skip_serializing_if = "Vec::is_empty")]
    pub listeners: Vec<Listener>,
}

impl Objects {
    /// Those of a configuration.
    pub fn of(config: &Config) -> Self {
        Self {
            volumes: config.volumes.clone(),
            subsystems: config.subsystems.clone(),
            listeners: config.listeners.clone(),
        }
    }

    /// The configuration with these objects in place of its own.
    pub fn put_into(&self, config: &Config) -> Config {
        let Self { volumes, subsystems, listeners } = self.clone();
        Config { volumes, subsystems, listeners, ..config.clone() }
    }

    /// A subsystem by its name.
    pub fn subsystem(&self, nqn: &Nqn) -> Option<&Subsystem> {
        self.subsystems.iter().find(|subsystem| subsystem.nqn == *nqn)
    }

    /// A subsystem by its name, to change it.
    pub fn subsystem_mut(&mut self, nqn: &Nqn) -> Option<&mut Subsystem> {
        self.subsystems.iter_mut().find(|subsystem| subsystem.nqn == *nqn)
    }

    /// A volume by its name.
    pub fn volume(&self, name: &VolumeName) -> Option<&Volume> {
        self.volumes.iter().find(|volume| volume.name == *name)
    }

    /// All namespaces, each with its subsystem's name.
    pub fn namespaces(&self) -> impl Iterator<Item = (&Nqn, &Namespace)> {
        self.subsystems.iter().flat_map(|subsystem| subsystem.namespaces.iter().map(|n| (&subsystem.nqn, n)))
    }

    /// What differs between `configured` and `running`: the objects as the one has them, and as the other does.
    pub fn differences(configured: &Self, running: &Self) -> (Self, Self) {
        let only_in = |these: &Self, those: &Self| Self {
            volumes: these.volumes.iter().filter(|v| those.volume(&v.name) != Some(v)).cloned().collect(),
            subsystems: these.subsystems.iter().filter(|s| those.subsystem(&s.nqn) != Some(s)).cloned().collect(),
            listeners: these.listeners.iter().filter(|l| !those.listeners.contains(l)).cloned().collect(),
        };
        (only_in(configured, running), only_in(running, configured))
    }

    /// How many there are, hosts and namespaces not counted.
    pub fn count(&self) -> usize {
        self.volumes.len() + self.subsystems.len() + self.listeners.len()
    }

    /// How many of them `others` lacks.
    pub fn count_missing_in(&self, others: &Self) -> usize {
        let volumes = self.volumes.iter().filter(|v| others.volume(&v.name).is_none()).count();
        let subsystems = self.subsystems.iter().filter(|s| others.subsystem(&s.nqn).is_none()).count();
        volumes + subsystems + self.listeners.iter().filter(|l| !others.listeners.contains(l)).count()
    }
}
