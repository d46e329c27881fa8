//! The configuration in effect, each value with its origin.
//!
//! Owns the walk over the values. Must not know how it is printed. Invariant: what is shown is what runs: objects as they are
//! now, volumes as the pool has them.

use std::collections::BTreeMap;

use figment::value::Value;

use super::live::Live;
use crate::config::error::Origin;
use crate::config::schema::Volume;
use crate::config::values::{BlockSize, ByteSize};
use crate::config::{Config, Sources};
use crate::manage::view;
use crate::pool::VolumeStatus;

/// What `offloadctl config` shows.
pub(super) fn configuration(live: &Live) -> view::Configuration {
    let ledger = live.ledger();
    let mut config = ledger.in_effect(live.config());
    let sources = live.checked().file_sources.clone().with_changes(ledger.configured(), &config, ledger.file());
    let mut origins = BTreeMap::new();
    collect(&config, &sources, &mut origins);
    let volumes = live.storage().map(|storage| storage.pool().volumes()).unwrap_or_default();
    for volume in volumes.iter().filter_map(as_configured) {
        enter(&mut config, &mut origins, volume);
    }
    view::Configuration { config, origins, state_file: ledger.file().display().to_string() }
}

fn collect(config: &Config, sources: &Sources, origins: &mut BTreeMap<String, String>) {
    if let Ok(root) = Value::serialize(config) {
        walk(&root, &mut Vec::new(), &mut |path| {
            let origin = match sources.origin_of_value(path) {
                None => "default".to_owned(),
                Some(Origin::RunTime { .. }) => "offloadctl".to_owned(),
                Some(origin) => origin.to_string(),
            };
            origins.insert(crate::config::load::show_path(path), origin);
        });
    }
}

/// Calls `found` for every value that is no table; a list of plain values is one.
fn walk(value: &Value, path: &mut Vec<String>, found: &mut impl FnMut(&[String])) {
    let mut step = |name: String, inner: &Value, path: &mut Vec<String>| {
        path.push(name);
        walk(inner, path, found);
        path.pop();
    };
    match value {
        Value::Dict(_, dict) => dict.iter().for_each(|(name, inner)| step(name.clone(), inner, path)),
        Value::Array(_, items) if items.iter().any(|item| matches!(item, Value::Dict(..))) => {
            items.iter().enumerate().for_each(|(index, inner)| step(index.to_string(), inner, path));
        }
        _ => found(path),
    }
}

/// A volume of the pool in the configuration's words.
fn as_configured(volume: &VolumeStatus) -> Option<Volume> {
    // A configuration can't make a snapshot.
    if volume.snapshot {
        return None;
    }
    Some(Volume {
        name: volume.name.parse().ok()?,
        size: ByteSize(volume.size_bytes),
        block_size: if volume.block_bytes == 512 { BlockSize::B512 } else { BlockSize::B4096 },
        compression: volume.compression.parse().ok()?,
        cipher: volume.cipher.parse().ok()?,
        origin: None,
    })
}

/// Shows a volume as the pool has it. Where the configuration says otherwise, that is said beside it.
fn enter(config: &mut Config, origins: &mut BTreeMap<String, String>, there: Volume) {
    let Some((index, volume)) = config.volumes.iter_mut().enumerate().find(|(_, volume)| volume.name == there.name)
    else {
        let index = config.volumes.len();
        for key in ["name", "size", "block_size", "compression", "cipher"] {
            origins.insert(format!("volume[{index}].{key}"), "pool".to_owned());
        }
        origins.remove("volume");
        config.volumes.push(there);
        return;
    };
    let mut differs = |key: &str, wanted: String, has: &str| {
        if wanted != has {
            let origin = origins.entry(format!("volume[{index}].{key}")).or_default();
            *origin = format!("pool ({origin}: {wanted})");
        }
    };
    differs("size", volume.size.to_string(), &there.size.to_string());
    differs("block_size", volume.block_size.bytes().to_string(), &there.block_size.bytes().to_string());
    differs("compression", volume.compression.to_string(), &there.compression.to_string());
    differs("cipher", volume.cipher.to_string(), &there.cipher.to_string());
    // What it began as is no matter once it is there, and was said in the file.
    *volume = Volume { origin: volume.origin.take(), ..there };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::objects::Objects;

    #[test]
    fn what_the_pool_has_stands_beside_what_was_asked_for() {
        let text = "[[volume]]\nname = \"a\"\nsize = \"1MiB\"\ncompression = \"none\"\n";
        let mut config: Config = toml::from_str(text).unwrap();
        let mut origins = BTreeMap::from([("volume[0].compression".to_owned(), "t.toml:4".to_owned())]);
        let volume = |name: &str| Volume {
            name: name.parse().unwrap(),
            size: ByteSize::mib(1),
            block_size: BlockSize::B4096,
            compression: "lz4".parse().unwrap(),
            cipher: Default::default(),
            origin: None,
        };
        enter(&mut config, &mut origins, volume("a"));
        enter(&mut config, &mut origins, volume("b"));
        assert_eq!(origins["volume[0].compression"], "pool (t.toml:4: none)");
        assert_eq!(origins["volume[1].cipher"], "pool");
        assert_eq!(Objects::of(&config).volumes, [volume("a"), volume("b")]);
    }
}
