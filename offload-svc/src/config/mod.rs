//! The configuration: TOML file and environment, checked, with a memory plan.
//!
//! Owns the schema (`schema`), its values (`values`, `names`), loading (`load`), checking (`check`) against the machine
//! (`machine`) and the plan (`plan`). Must not start anything. Invariant: a [`Config`] returned by [`load_checked`] can be
//! started, as far as can be known without starting it.

pub mod check;
pub mod error;
pub mod load;
pub mod machine;
pub mod names;
pub mod plan;
pub mod schema;
pub mod values;

#[cfg(test)]
mod tests;

use std::path::Path;

pub use error::{ConfigError, Problem, Reason};
pub use load::{Loaded, Sources};
pub use machine::Machine;
pub use plan::MemoryPlan;
pub use schema::Config;

use crate::reactor::Settings;

/// A configuration, checked against a machine.
#[derive(Debug)]
pub struct Checked {
    /// The configuration.
    pub config: Config,
    /// Where its values came from.
    pub sources: Sources,
    /// The memory that it takes.
    pub plan: MemoryPlan,
    /// How many reactors it starts.
    pub reactors: usize,
}

/// Most reactors started by default.
const DEFAULT_REACTORS_MAX: usize = 8;

/// Loads `file` and `environment`, checks every key, and plans the memory.
///
/// # Errors
/// Everything that is wrong, with file, line, key, value, reason and what to do.
pub fn load_checked(
    file: &Path,
    environment: impl IntoIterator<Item = (String, String)>,
    machine: &Machine,
) -> Result<Checked, ConfigError> {
    checked(load::load(file, environment)?, machine)
}

fn checked(loaded: Loaded, machine: &Machine) -> Result<Checked, ConfigError> {
    let Loaded { config, sources } = loaded;
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
        Ok(Checked { config, sources, plan, reactors })
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
