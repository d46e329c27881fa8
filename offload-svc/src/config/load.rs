//! From file and environment to a [`Config`].
//!
//! Owns the order (defaults < file < `SLUICE_SECTION__KEY`) and finding the line of a key. Must not know what values
//! mean. Invariant: a key that the schema does not have is an error, whichever way it came in.

use std::path::{Path, PathBuf};

use figment::Figment;
use figment::error::Kind;
use figment::providers::{Format, Serialized, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Metadata, Profile, Provider};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Origin, Problem, Reason};
use super::objects::Objects;
use super::schema::{Config, Subsystem};

const PREFIX: &str = "SLUICE_";
const SEPARATOR: &str = "__";

/// A loaded configuration and where each of its values came from.
#[derive(Debug)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// Finds the origin of a key.
    pub sources: Sources,
}

/// Where the values of a configuration came from.
#[derive(Debug, Clone)]
pub struct Sources {
    file: PathBuf,
    text: String,
    merged: Dict,
    variables: Vec<(String, Vec<String>)>,
    changes: Option<ChangedPlaces>,
}

/// Loads `file` and then what `environment` sets.
///
/// # Errors
/// If the file can't be read, is no TOML, or has a key or value that the schema does not take.
pub fn load(file: &Path, environment: impl IntoIterator<Item = (String, String)>) -> Result<Loaded, ConfigError> {
    let bytes = std::fs::read(file).map_err(|source| ConfigError::Read { file: file.to_owned(), source })?;
    let text = String::from_utf8(bytes)
        .map_err(|e| ConfigError::NotText { file: file.to_owned(), offset: e.utf8_error().valid_up_to() })?;
    parse(file, text, environment)
}

/// Like [`load`], the file's text given.
///
/// # Errors
/// As [`load`].
pub fn parse(
    file: &Path,
    text: String,
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Loaded, ConfigError> {
    let environment: Vec<_> = environment.into_iter().collect();
    let nearly = near_settings(&environment);
    if !nearly.is_empty() {
        return Err(ConfigError::Invalid(nearly));
    }
    let overrides = Overrides::of(environment);
    if let Err(error) = DeTable::parse(&text) {
        return Err(syntax_error(file, &text, error));
    }
    let figment = Figment::new()
        .merge(Serialized::defaults(Config::default()))
        .merge(Toml::string(&text))
        .merge(overrides.clone());
    let merged = figment.extract::<Dict>().unwrap_or_default();
    let sources = Sources { file: file.to_owned(), text, merged, variables: overrides.variables(), changes: None };
    match figment.extract::<Config>() {
        Ok(config) => Ok(Loaded { config, sources }),
        Err(error) => Err(ConfigError::Invalid(error.into_iter().map(|e| problem(&sources, e)).collect())),
    }
}

/// Variables that name a section and a key of it (or nearly) and have one underscore where two belong. Others that begin like
/// ours are not ours: beside a Service called `sluice`, Kubernetes sets SLUICE_SERVICE_HOST and SLUICE_SERVICE_PORT.
fn near_settings(environment: &[(String, String)]) -> Vec<Problem> {
    let sections = Value::serialize(Config::default()).ok().and_then(Value::into_dict).unwrap_or_default();
    let problem = |(variable, _): &(String, String)| {
        let rest = variable.strip_prefix(PREFIX).filter(|rest| !rest.contains(SEPARATOR))?;
        let named = |section: &&String| {
            let section = section.to_ascii_uppercase();
            rest.strip_prefix(section.as_str()).is_some_and(|key| key.starts_with('_'))
        };
        let name = sections.keys().find(named)?;
        let section = name.to_ascii_uppercase();
        let key = rest[section.len()..].trim_start_matches('_');
        let typed = key.to_ascii_lowercase();
        // One slip in a word of some length: with more, most short words would be near to some key.
        let slips = usize::from(typed.len() > 4);
        let near = |known: &&&str| strsim::damerau_levenshtein(&typed, known) <= slips;
        keys_of(name).iter().find(near)?;
        let meant = format!("{PREFIX}{section}{SEPARATOR}{key}");
        let origin = Origin::Environment { variable: variable.clone() };
        Some(Problem { origin, key: String::new(), value: None, reason: Reason::Variable { meant } })
    };
    environment.iter().filter_map(problem).collect()
}

/// The keys that a section has: those that the schema names when it is given one that nobody would have called so.
fn keys_of(section: &str) -> &'static [&'static str] {
    let probe = Dict::from([("?".to_owned(), Value::from(true))]);
    let probe = Figment::from(Serialized::defaults(Config::default())).merge(Serialized::default(section, probe));
    match probe.extract::<Config>().map_err(|error| error.kind) {
        Err(Kind::UnknownField(_, known)) => known,
        _ => &[],
    }
}

fn syntax_error(file: &Path, text: &str, error: toml::de::Error) -> ConfigError {
    let line = line_of(text, error.span().map_or(0, |span| span.start));
    let origin = Origin::Line { file: file.to_owned(), line };
    let reason = Reason::Syntax(Box::new(error));
    ConfigError::Invalid(vec![Problem { origin, key: String::new(), value: None, reason }])
}

fn problem(sources: &Sources, error: figment::Error) -> Problem {
    let mut path = error.path.clone();
    match error.kind {
        Kind::UnknownField(name, known) => {
            if path.last() != Some(&name) {
                path.push(name.clone());
            }
            let nearest = nearest(&name, known.iter().copied());
            sources.problem_at_key(&path, Reason::UnknownKey { nearest, known })
        }
        Kind::UnknownVariant(name, known) => {
            let nearest = nearest(&name, known.iter().copied());
            sources.problem(&path, Reason::UnknownWord { nearest, known })
        }
        kind @ Kind::MissingField(_) => sources.problem_at_key(&path, Reason::Form(Box::new(kind))),
        kind => sources.problem(&path, Reason::Form(Box::new(kind))),
    }
}

/// The name that was probably meant, if one is near enough.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.into_iter().map(|candidate| (strsim::damerau_levenshtein(name, candidate), candidate));
    let (distance, candidate) = near.min_by_key(|(distance, _)| *distance)?;
    (distance <= 2.max(name.chars().count() / 3)).then_some(candidate)
}

impl Sources {
    /// A problem with the value at `path`, with its origin and the value as it was given.
    pub fn problem(&self, path: &[impl AsRef<str>], reason: Reason) -> Problem {
        let value = self.value(path);
        Problem { value, ..self.problem_at_key(path, reason) }
    }

    /// A problem with the key itself.
    pub fn problem_at_key(&self, path: &[impl AsRef<str>], reason: Reason) -> Problem {
        Problem { origin: self.origin(path), key: self.shown(path), value: None, reason }
    }

    /// The same for the objects that run in place of the `configured` ones; `file` holds the changes. Paths are then the
    /// running objects'.
    pub fn with_changes(self, configured: &Objects, running: &Config, file: &Path) -> Self {
        Self { changes: Some(ChangedPlaces::of(configured, running, file)), ..self }
    }

    /// How a message names `path`.
    pub fn shown(&self, path: &[impl AsRef<str>]) -> String {
        match self.place(path) {
            Place::Configured(path) => show_path(&path),
            Place::RunTime(name) => name,
        }
    }

    fn place(&self, path: &[impl AsRef<str>]) -> Place {
        let path: Vec<&str> = path.iter().map(AsRef::as_ref).collect();
        match &self.changes {
            Some(changes) => changes.place(&path),
            None => Place::Configured(path.into_iter().map(str::to_owned).collect()),
        }
    }

    /// Where the value at `path`, or else the innermost thing around it that was written down, stands.
    pub fn origin(&self, path: &[impl AsRef<str>]) -> Origin {
        match (self.place(path), &self.changes) {
            (Place::RunTime(_), Some(changes)) => Origin::RunTime { file: changes.file.clone() },
            (Place::RunTime(_), None) => Origin::File { file: self.file.clone() },
            (Place::Configured(path), _) => self.origin_in_file(&path).0,
        }
    }

    /// Where the value at `path` was set; none if it is the default.
    pub fn origin_of_value(&self, path: &[impl AsRef<str>]) -> Option<Origin> {
        match self.place(path) {
            Place::RunTime(_) => Some(self.origin(path)),
            Place::Configured(path) => match self.origin_in_file(&path) {
                (origin, true) => Some(origin),
                (_, false) => None,
            },
        }
    }

    /// Where it stands, and whether it itself does or only something around it.
    fn origin_in_file(&self, path: &[String]) -> (Origin, bool) {
        let set = |names: &[String]| names.len() <= path.len() && names.iter().zip(path).all(|(a, b)| a == b);
        if let Some((variable, _)) = self.variables.iter().find(|(_, names)| set(names)) {
            return (Origin::Environment { variable: variable.clone() }, true);
        }
        let found = DeTable::parse(&self.text).ok().and_then(|table| offset_of(&table, path));
        match found {
            Some((offset, depth)) => {
                let origin = Origin::Line { file: self.file.clone(), line: line_of(&self.text, offset) };
                (origin, depth == path.len())
            }
            None => (Origin::File { file: self.file.clone() }, false),
        }
    }

    /// The value as it was given.
    fn value(&self, path: &[impl AsRef<str>]) -> Option<String> {
        match (self.place(path), &self.changes) {
            (Place::Configured(path), _) => value_in(&self.merged, &path),
            (Place::RunTime(_), Some(changes)) => value_in(&changes.values, path),
            (Place::RunTime(_), None) => None,
        }
    }
}

fn value_in(root: &Dict, path: &[impl AsRef<str>]) -> Option<String> {
    let (first, rest) = path.split_first()?;
    let mut value = root.get(first.as_ref())?;
    for step in rest {
        value = match value {
            Value::Dict(_, dict) => dict.get(step.as_ref())?,
            Value::Array(_, items) => items.get(step.as_ref().parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    show_value(value)
}

fn show_value(value: &Value) -> Option<String> {
    match value {
        Value::String(_, text) => Some(text.clone()),
        Value::Char(_, c) => Some(c.to_string()),
        Value::Bool(_, flag) => Some(flag.to_string()),
        Value::Num(_, number) => number
            .to_i128()
            .map(|n| n.to_string())
            .or_else(|| number.to_u128().map(|n| n.to_string()))
            .or_else(|| number.to_f64().map(|n| n.to_string())),
        Value::Empty(..) | Value::Dict(..) | Value::Array(..) => None,
    }
}

/// Which of the running objects stand in the configuration, and where.
#[derive(Debug, Clone)]
struct ChangedPlaces {
    file: PathBuf,
    running: Objects,
    /// The running configuration's values.
    values: Dict,
    volumes: Vec<Option<usize>>,
    subsystems: Vec<SubsystemPlaces>,
    listeners: Vec<Option<usize>>,
}

#[derive(Debug, Clone)]
struct SubsystemPlaces {
    /// Of one that runs as it is configured but for hosts and namespaces.
    itself: Option<usize>,
    /// Its hosts are the configured ones.
    same_hosts: bool,
    hosts: Vec<Option<usize>>,
    namespaces: Vec<Option<usize>>,
}

/// What a path of the running objects leads to.
enum Place {
    /// The path in the configuration.
    Configured(Vec<String>),
    /// A change, by its name.
    RunTime(String),
}

/// Where each of the running things stands in the configuration. Of two that are the same, the first is the first.
fn places<T: PartialEq>(running: &[T], configured: &[T]) -> Vec<Option<usize>> {
    let place = |(index, thing): (usize, &T)| {
        let before = running[..index].iter().filter(|other| *other == thing).count();
        let same = configured.iter().enumerate().filter(|(_, other)| *other == thing);
        same.map(|(place, _)| place).nth(before)
    };
    running.iter().enumerate().map(place).collect()
}

impl ChangedPlaces {
    fn of(configured: &Objects, in_effect: &Config, file: &Path) -> Self {
        let running = Objects::of(in_effect);
        let subsystem = |(index, subsystem): (usize, &Subsystem)| {
            let named = |other: &&Subsystem| other.nqn == subsystem.nqn;
            let before = running.subsystems[..index].iter().filter(named).count();
            let there = configured.subsystems.iter().enumerate().filter(|(_, other)| named(other)).nth(before);
            let same = |other: &Subsystem| {
                (&other.serial, other.allow_any_host) == (&subsystem.serial, subsystem.allow_any_host)
            };
            SubsystemPlaces {
                itself: there.filter(|(_, other)| same(other)).map(|(index, _)| index),
                same_hosts: there.is_some_and(|(_, other)| other.hosts == subsystem.hosts),
                hosts: places(&subsystem.hosts, there.map_or(&[], |(_, other)| &other.hosts)),
                namespaces: places(&subsystem.namespaces, there.map_or(&[], |(_, other)| &other.namespaces)),
            }
        };
        Self {
            file: file.to_owned(),
            volumes: places(&running.volumes, &configured.volumes),
            subsystems: running.subsystems.iter().enumerate().map(subsystem).collect(),
            listeners: places(&running.listeners, &configured.listeners),
            values: Value::serialize(in_effect).ok().and_then(Value::into_dict).unwrap_or_default(),
            running,
        }
    }

    fn place(&self, path: &[&str]) -> Place {
        let mut steps: Vec<String> = path.iter().map(|step| (*step).to_owned()).collect();
        let number = |at: usize| path.get(at).and_then(|step| step.parse::<usize>().ok());
        let (Some(first), Some(index)) = (path.first(), number(1)) else { return Place::Configured(steps) };
        let mut put = |at: usize, place: Option<usize>| match (place, steps.get_mut(at)) {
            (Some(index), Some(step)) => {
                *step = index.to_string();
                true
            }
            _ => false,
        };
        let there = match *first {
            "volume" => put(1, self.volumes.get(index).copied().flatten()),
            "listener" => put(1, self.listeners.get(index).copied().flatten()),
            "subsystem" => {
                let Some(places) = self.subsystems.get(index) else { return Place::Configured(steps) };
                let itself = put(1, places.itself);
                match (path.get(2), number(3)) {
                    (Some(&"namespace"), Some(inner)) => {
                        itself && put(3, places.namespaces.get(inner).copied().flatten())
                    }
                    (Some(&"hosts"), Some(inner)) => itself && put(3, places.hosts.get(inner).copied().flatten()),
                    (Some(&"hosts"), None) => itself && places.same_hosts,
                    _ => itself,
                }
            }
            _ => true,
        };
        if there {
            Place::Configured(steps)
        } else {
            Place::RunTime(self.name(first, index, path.get(2..).unwrap_or(&[])))
        }
    }

    fn name(&self, kind: &str, index: usize, rest: &[&str]) -> String {
        let running = &self.running;
        let (name, rest) = match kind {
            "volume" => (running.volumes.get(index).map(|volume| format!("volume {}", volume.name)), rest),
            "listener" => {
                (running.listeners.get(index).map(|l| format!("listener {}", l.address.with_port(l.port))), rest)
            }
            _ => {
                let subsystem = running.subsystems.get(index);
                let inner = rest
                    .get(1)
                    .and_then(|step| step.parse::<usize>().ok())
                    .filter(|_| rest.first() == Some(&"namespace"));
                let namespace = inner.and_then(|inner| subsystem?.namespaces.get(inner));
                let named = |nsid: u32| format!(" namespace {nsid}");
                let inner = namespace.map(|namespace| named(namespace.nsid)).unwrap_or_default();
                let rest = if inner.is_empty() { rest } else { rest.get(2..).unwrap_or(&[]) };
                (subsystem.map(|subsystem| format!("subsystem {}{inner}", subsystem.nqn)), rest)
            }
        };
        let name = name.unwrap_or_else(|| kind.to_owned());
        if rest.is_empty() { name } else { format!("{name}: {}", show_path(rest)) }
    }
}

/// `pool.members[3]`; a part of one of several tables reads `subsystem[0].namespace[1].nsid`.
pub fn show_path(path: &[impl AsRef<str>]) -> String {
    let mut shown = String::new();
    for step in path.iter().map(AsRef::as_ref) {
        if !step.is_empty() && step.bytes().all(|b| b.is_ascii_digit()) {
            shown.push_str(&format!("[{step}]"));
        } else {
            let dot = if shown.is_empty() { "" } else { "." };
            shown.push_str(&format!("{dot}{step}"));
        }
    }
    shown
}

/// The offset of the innermost part of `path` that is there, and how many steps lead to it.
fn offset_of(root: &Spanned<DeTable<'_>>, path: &[String]) -> Option<(usize, usize)> {
    let mut found = None;
    let mut table = Some(root.get_ref());
    let mut array = None;
    for (depth, step) in path.iter().map(String::as_str).enumerate() {
        let value: &Spanned<DeValue<'_>> = match (table, array) {
            (Some(inner), _) => {
                let Some((key, value)) = inner.iter().find(|(key, _)| key.get_ref().as_ref() == step) else { break };
                found = Some((key.span().start, depth + 1));
                value
            }
            (None, Some(items)) => {
                let items: &toml::de::DeArray<'_> = items;
                let Some(value) = step.parse::<usize>().ok().and_then(|index| items.get(index)) else { break };
                found = Some((value.span().start, depth + 1));
                value
            }
            (None, None) => break,
        };
        table = value.get_ref().as_table();
        array = value.get_ref().as_array();
    }
    found
}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|b| *b == b'\n').count() + 1
}

/// The environment's part: `SLUICE_SECTION__KEY=VALUE`, the value in TOML's notation or a bare word.
#[derive(Debug, Clone)]
struct Overrides(Vec<(String, Vec<String>, String)>);

impl Overrides {
    fn of(environment: impl IntoIterator<Item = (String, String)>) -> Self {
        let settings = environment.into_iter().filter_map(|(variable, value)| {
            let rest = variable.strip_prefix(PREFIX)?;
            rest.contains(SEPARATOR).then(|| {
                let path = rest.split(SEPARATOR).map(str::to_ascii_lowercase).collect();
                (variable.clone(), path, value)
            })
        });
        Self(settings.collect())
    }

    fn variables(&self) -> Vec<(String, Vec<String>)> {
        self.0.iter().map(|(variable, path, _)| (variable.clone(), path.clone())).collect()
    }
}

impl Provider for Overrides {
    fn metadata(&self) -> Metadata {
        Metadata::named("environment")
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let mut root = Dict::new();
        for (_, path, text) in &self.0 {
            let value: Value = match text.parse() {
                Ok(value) => value,
                Err(never) => match never {},
            };
            insert(&mut root, path, value);
        }
        Ok(Map::from([(Profile::Default, root)]))
    }
}

fn insert(dict: &mut Dict, path: &[String], value: Value) {
    match path {
        [] => {}
        [last] => {
            dict.insert(last.clone(), value);
        }
        [first, rest @ ..] => {
            let inner = dict.entry(first.clone()).or_insert_with(|| Value::from(Dict::new()));
            if !matches!(inner, Value::Dict(..)) {
                *inner = Value::from(Dict::new());
            }
            if let Value::Dict(_, inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}
