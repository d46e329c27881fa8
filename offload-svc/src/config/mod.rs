//! The configuration: TOML file, environment and the changes made at run time, checked, with a memory plan.
//!
//! Owns the schema (`schema`), its values (`values`, `names`), loading (`load`), the changes (`state`, `merge`), checking
//! (`check`) against the machine (`machine`) and the plan (`plan`). Must not start anything. Invariant: a [`Config`] returned by [`load_checked`] can be
//! started, as far as can be known without starting it.

pub mod check;
pub mod error;
pub mod load;
pub mod machine;
pub mod merge;
pub mod names;
pub mod objects;
pub mod plan;
pub mod schema;
pub mod state;
pub mod values;

#[cfg(test)]
mod state_tests;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use error::{ConfigError, Problem, Reason};
pub use load::{Loaded, Sources};
pub use machine::Machine;
pub use plan::MemoryPlan;
pub use schema::Config;

use crate::reactor::Settings;
use merge::Overruled;
use objects::Objects;
use state::State;

/// A configuration, checked against a machine.
#[derive(Debug)]
pub struct Checked {
    /// The configuration in effect: file, environment, and what was changed at run time.
    pub config: Config,
    /// The objects as file and environment have them.
    pub configured: Objects,
    /// The changes as they were read.
    pub state: State,
    /// Changes that no longer hold.
    pub overruled: Vec<Overruled>,
    /// What it was checked against.
    pub machine: Machine,
    /// Where its values came from.
    pub sources: Sources,
    /// The same without the changes made at run time.
    pub file_sources: Sources,
    /// The memory that it takes.
    pub plan: MemoryPlan,
    /// How many reactors it starts.
    pub reactors: usize,
}

/// Most reactors started by default.
const DEFAULT_REACTORS_MAX: usize = 8;

/// Loads `file`, `environment` and the changes made at run time, checks every key, and plans the memory.
///
/// # Errors
/// Everything that is wrong, with file, line, key, value, reason and what to do.
pub fn load_checked(
    file: &Path,
    environment: impl IntoIterator<Item = (String, String)>,
    machine: &Machine,
) -> Result<Checked, ConfigError> {
    let loaded = load::load(file, environment)?;
    let state = State::read(&loaded.config.service.state_file())?;
    checked(loaded, state, machine)
}

fn checked(loaded: Loaded, state: State, machine: &Machine) -> Result<Checked, ConfigError> {
    let configured = Objects::of(&loaded.config);
    let merge::Merged { objects, overruled } = merge::merge(&configured, &state.kept.changes);
    let config = objects.put_into(&loaded.config);
    let file_sources = loaded.sources;
    let sources = file_sources.clone().with_changes(&configured, &config, &state.file);
    let mut problems = check::check(&config, &sources, machine);
    let reactors = reactor_count(&config, machine);
    let plan = MemoryPlan::of(&config, reactors, machine);
    if problems.is_empty()
        && let Err(short) = Settings::from_config(&config, reactors)
    {
        let min = values::ByteSize((short.needed_bytes as u64).next_multiple_of(1 << 20));
        let reason = Reason::SizeOutOfRange { min, max: values::ByteSize::gib(1024) };
        problems.push(sources.problem(&["buffers", "memory"], reason));
    }
    if problems.is_empty()
        && let Err(shortage) = plan.fits()
    {
        problems.push(sources.problem_at_key(&[] as &[&str], Reason::Memory(Box::new(shortage))));
    }
    if problems.is_empty() {
        let machine = machine.clone();
        Ok(Checked { config, configured, state, overruled, machine, sources, file_sources, plan, reactors })
    } else {
        Err(ConfigError::Invalid(problems))
    }
}

fn reactor_count(config: &Config, machine: &Machine) -> usize {
    match (&config.reactors.cpus, config.reactors.count) {
        (Some(cpus), _) => cpus.0.len(),
        (None, 0) => machine.cpus.len().clamp(1, DEFAULT_REACTORS_MAX),
        (None, count) => count.into(),
    }
}
