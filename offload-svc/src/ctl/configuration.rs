//! The configuration in effect as TOML, each value with its origin as a comment.
//!
//! Owns where the comments stand. Must not know what a key means. Invariant: with or without comments the text loads to the
//! configuration that it shows.

use std::collections::BTreeMap;

use crate::manage::view::Configuration;

/// As TOML.
pub(super) fn text(shown: &Configuration, plain: bool) -> String {
    // Every type of the schema has a TOML form; a test dumps them all.
    let bare = toml::to_string(&shown.config).unwrap_or_default();
    if plain {
        return bare;
    }
    let head = "# Each value with its origin: default, file and line, environment, offloadctl (changed while the service\n\
                # ran), or pool (as the volume is).";
    let file = shown.state_file.escape_debug();
    let mut text = format!("{head} What offloadctl changed is kept in {file}\n\n");
    let mut place = Place::default();
    for line in bare.lines() {
        place.enter(line);
        text += line;
        // A path or a name may hold anything but is escaped in TOML; an origin is not.
        if let Some(origin) = place.key(line).and_then(|key| shown.origins.get(&key)) {
            text += &format!("  # {}", origin.escape_debug());
        }
        text.push('\n');
    }
    text
}

/// The table that a line stands in.
#[derive(Default)]
struct Place {
    table: String,
    /// How many tables of a list have begun, by the list's place.
    begun: BTreeMap<String, usize>,
}

impl Place {
    fn enter(&mut self, line: &str) {
        if let Some(list) = line.strip_prefix("[[").and_then(|rest| rest.strip_suffix("]]")) {
            // Lists nest one deep: the inner one belongs to the last of the outer ones.
            let list = match list.split_once('.') {
                Some((outer, inner)) => format!("{}.{inner}", self.last(outer)),
                None => list.to_owned(),
            };
            *self.begun.entry(list.clone()).or_default() += 1;
            self.table = self.last(&list);
        } else if let Some(table) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            self.table = table.to_owned();
        }
    }

    fn last(&self, list: &str) -> String {
        format!("{list}[{}]", self.begun.get(list).map_or(0, |begun| begun.saturating_sub(1)))
    }

    fn key(&self, line: &str) -> Option<String> {
        let (key, _) = line.split_once(" = ")?;
        Some(if self.table.is_empty() { key.to_owned() } else { format!("{}.{key}", self.table) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn h151_every_value_has_its_origin_and_the_text_still_loads() {
        let config: Config = toml::from_str(include_str!("../../../configs/example.toml")).unwrap();
        let origins = [
            ("service.log", "default"),
            ("pool.members", "/etc/a b.toml:3"),
            ("subsystem[0].namespace[1].backend", "offloadctl\n[x]"),
            ("volume[0].size", "pool"),
        ];
        let origins = origins.map(|(key, origin)| (key.to_owned(), origin.to_owned())).into();
        let shown = Configuration { config: config.clone(), origins, state_file: "/var/lib/s\nt".into() };
        let commented = text(&shown, false);
        for line in
            ["log = \"info\"  # default", "size = \"2GiB\"  # pool", "backend = \"mem:64MiB\"  # offloadctl\\n[x]"]
        {
            assert_eq!(commented.lines().filter(|found| *found == line).count(), 1, "{line} in {commented}");
        }
        assert!(commented.lines().any(|line| line.starts_with("members = ") && line.ends_with("  # /etc/a b.toml:3")));
        assert_eq!(toml::from_str::<Config>(&commented).unwrap(), config);
        assert_eq!(text(&shown, true), toml::to_string(&config).unwrap());
    }
}
