//! The changes made at run time: kept as they were, and put onto a configuration that may have changed.

use std::path::PathBuf;

use proptest::prelude::*;

use super::Config;
use super::merge::{Changes, Overruled, merge};
use super::objects::Objects;
use super::state::{Kept, Prepared, State, StateError};

fn objects(text: &str) -> Objects {
    toml::from_str(text).unwrap()
}

fn changes(configured: &Objects, running: &Objects) -> Changes {
    let (configured, running) = Objects::differences(configured, running);
    Changes { configured, running }
}

const A: &str = "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:a\"\nallow_any_host = true\n\
                 [[subsystem.namespace]]\nnsid = 1\nbackend = \"pool:v\"\n";

fn in_folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.toml");
    (folder, file)
}

fn some_changes() -> Changes {
    let more = A.replace("allow_any_host = true", "hosts = [\"nqn.2026-11.io.example:größe\"]");
    changes(&objects(A), &objects(&(more + "[[listener]]\naddress = \"fe80::1%lo\"\nport = 4421\n")))
}

fn some_kept() -> Kept {
    Kept { changes: some_changes(), pool: Some(uuid::uuid!("2cd2c43b-a90a-45c1-a8cd-86b33ab273b5")) }
}

#[test]
fn changes_are_read_back_as_they_were_written_with_mode_0600() {
    use std::os::unix::fs::PermissionsExt;
    let (folder, file) = in_folder();
    assert_eq!(State::read(&file).unwrap().kept, Kept::default(), "no file: no changes");
    std::fs::write(folder.path().join("state.toml.new"), "left by a crash").unwrap();
    Prepared::write(&file, &some_kept()).unwrap().commit().unwrap();
    let state = State::read(&file).unwrap();
    assert_eq!(state.kept, some_kept());
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    state.check_unchanged().unwrap();
    drop(Prepared::write(&file, &Kept::default()).unwrap());
    assert_eq!(State::read(&file).unwrap().kept, some_kept(), "what got no name changes nothing");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left lying about");
    Prepared::write(&file, &Kept::default()).unwrap().commit().unwrap();
    assert!(matches!(state.check_unchanged(), Err(StateError::Changed(_))));
}

#[test]
fn a_damaged_state_file_is_never_taken_for_other_changes() {
    let (_folder, file) = in_folder();
    Prepared::write(&file, &some_kept()).unwrap().commit().unwrap();
    let whole = std::fs::read(&file).unwrap();
    // In the comments before it the word stands once.
    let head = whole.windows(10).position(|bytes| bytes == b"\ncrc32c = ").unwrap();
    let mut harmless = 0;
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 7);
        for bytes in [&whole[..at], &flipped[..]] {
            std::fs::write(&file, bytes).unwrap();
            match State::read(&file) {
                Ok(state) => {
                    harmless += 1;
                    assert_eq!(state.kept, some_kept(), "byte {at}");
                    assert!(at < head + 16, "byte {at} is covered by the checksum");
                }
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("state.toml: the changes made at run time are damaged: "), "{error}");
                    assert!(error.contains("move it away to start with the configuration alone"), "{error}");
                }
            }
        }
    }
    assert!(harmless > 0, "a comment may say anything");
}

#[test]
fn a_later_version_is_refused_and_an_edited_file_is_taken() {
    let (_folder, file) = in_folder();
    std::fs::write(&file, "version = 3\nnew = true\n").unwrap();
    let error = State::read(&file).unwrap_err().to_string();
    assert!(error.contains("has version 3, this release reads 2: start the release that wrote it"), "{error}");
    std::fs::write(&file, "version = 1\n").unwrap();
    assert_eq!(State::read(&file).unwrap().kept, Kept::default(), "an earlier one had no pool");
    Prepared::write(&file, &some_kept()).unwrap().commit().unwrap();
    let text = std::fs::read_to_string(&file).unwrap().replace("4421", "4422");
    std::fs::write(&file, &text).unwrap();
    assert!(State::read(&file).unwrap_err().to_string().contains("the checksum does not match"));
    let edited: String =
        text.lines().filter(|line| !line.starts_with("crc32c")).map(|line| format!("{line}\n")).collect();
    std::fs::write(&file, edited).unwrap();
    assert_eq!(State::read(&file).unwrap().kept.changes.running.listeners[0].port, 4422);
}

#[test]
fn whoever_spoke_last_about_a_thing_decides() {
    let space = |nsid: u32, backend: &str| format!("[[subsystem.namespace]]\nnsid = {nsid}\nbackend = \"{backend}\"\n");
    let (b, c) = (space(2, "mem:1MiB"), space(2, "mem:2MiB"));
    let listener = "[[listener]]\naddress = \"127.0.0.1\"\nport = 4421\n";
    // As configured when the change was made, as it ran then, as configured now: what runs, and what is overruled.
    let nothing: &[Overruled] = &[];
    let nqn = || "nqn.2026-11.io.example:a".to_owned();
    for (then, ran, now, runs, overruled) in [
        // Changed with offloadctl alone.
        (A, &*format!("{A}{b}"), A, &*format!("{A}{b}"), nothing),
        (A, "", A, "", nothing),
        ("", A, "", A, nothing),
        (listener, "", listener, "", nothing),
        // Edited alone.
        (A, A, &format!("{A}{b}"), &format!("{A}{b}"), nothing),
        (A, A, "", "", nothing),
        // Both, about different things.
        (
            A,
            &format!("{A}{b}"),
            &A.replace("pool:v", "pool:w"),
            &format!("{}{b}", A.replace("pool:v", "pool:w")),
            nothing,
        ),
        // Both, in the same way.
        (A, &format!("{A}{b}"), &format!("{A}{b}"), &format!("{A}{b}"), nothing),
        (A, "", "", "", nothing),
        ("", A, A, A, nothing),
        ("", listener, listener, listener, nothing),
        // Both, otherwise: the edit came later.
        (A, &format!("{A}{b}"), &format!("{A}{c}"), &format!("{A}{c}"), &[Overruled::Namespace(nqn(), 2)]),
        (A, "", &format!("{A}{b}"), &format!("{A}{b}"), &[Overruled::Subsystem(nqn())]),
        (A, &format!("{A}{b}"), "", "", &[Overruled::Subsystem(nqn())]),
        (
            A,
            &A.replace("allow_any", "serial = \"S1\"\nallow_any"),
            &A.replace("allow_any", "serial = \"S2\"\nallow_any"),
            &A.replace("allow_any", "serial = \"S2\"\nallow_any"),
            &[Overruled::Settings(nqn())],
        ),
    ] {
        let [then, ran, now, runs] = [then, ran, now, runs].map(objects);
        let merged = merge(&now, &changes(&then, &ran));
        assert_eq!(merged.objects, runs, "{then:?} {ran:?} {now:?}");
        assert_eq!(merged.overruled, overruled, "{then:?} {ran:?} {now:?}");
    }
}

#[test]
fn a_host_that_was_denied_stays_out_when_others_are_added() {
    let hosts = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| format!("nqn.2026-11.io.example:{name}")).collect();
        objects(&format!("[[subsystem]]\nnqn = \"nqn.2026-11.io.example:a\"\nhosts = {names:?}\n"))
    };
    let denied = changes(&hosts(&["h1", "h2"]), &hosts(&["h2", "h3"]));
    assert_eq!(merge(&hosts(&["h1", "h2", "h4"]), &denied).objects, hosts(&["h2", "h4", "h3"]));
    assert_eq!(merge(&hosts(&["h2"]), &denied).objects, hosts(&["h2", "h3"]));
}

/// A few subsystems, namespaces, hosts, listeners and volumes, which often coincide.
fn any_objects() -> impl Strategy<Value = Objects> {
    let subsystem =
        (any::<bool>(), prop::collection::btree_set(0..3u8, 0..3), prop::collection::btree_map(1..4u32, 1..3u8, 0..3));
    let subsystems = prop::collection::btree_map(0..3u8, subsystem, 0..3);
    let others = (prop::collection::btree_map(0..2u8, 1..3u8, 0..2), prop::collection::btree_set(1..4u16, 0..3));
    (subsystems, others).prop_map(|(subsystems, (volumes, listeners))| {
        let mut text = String::new();
        for (name, size) in volumes {
            text += &format!("[[volume]]\nname = \"v{name}\"\nsize = \"{size}MiB\"\n");
        }
        for (name, (any_host, hosts, namespaces)) in subsystems {
            let hosts: Vec<String> = hosts.iter().map(|host| format!("nqn.2026-11.io.example:h{host}")).collect();
            text += &format!("[[subsystem]]\nnqn = \"nqn.2026-11.io.example:s{name}\"\n");
            text += &format!("allow_any_host = {any_host}\nhosts = {hosts:?}\n");
            for (nsid, backend) in namespaces {
                text += &format!("[[subsystem.namespace]]\nnsid = {nsid}\nbackend = \"mem:{backend}MiB\"\n");
            }
        }
        for port in listeners {
            text += &format!("[[listener]]\naddress = \"127.0.0.1\"\nport = {port}\n");
        }
        objects(&text)
    })
}

/// In one order, so that two can be compared.
fn sorted(mut objects: Objects) -> Objects {
    objects.volumes.sort_by(|a, b| a.name.cmp(&b.name));
    objects.listeners.sort_by_key(|listener| listener.port);
    objects.subsystems.sort_by(|a, b| a.nqn.cmp(&b.nqn));
    for subsystem in &mut objects.subsystems {
        subsystem.hosts.sort();
        subsystem.namespaces.sort_by_key(|namespace| namespace.nsid);
    }
    objects
}

proptest! {
    #[test]
    fn h151_merging_keeps_what_nobody_changed(then in any_objects(), ran in any_objects(), now in any_objects()) {
        prop_assert_eq!(&merge(&now, &Changes::default()).objects, &now, "without changes: the configuration");
        prop_assert_eq!(sorted(merge(&then, &changes(&then, &ran)).objects), ran.clone(), "unedited: as it ran");
        let merged = merge(&now, &changes(&then, &ran));
        // Written down at the start, the same comes out of the next one, and nothing is overruled twice.
        let again = merge(&now, &changes(&now, &merged.objects));
        prop_assert_eq!(sorted(again.objects), sorted(merged.objects.clone()));
        prop_assert_eq!(again.overruled, Vec::new());
        let caught_up = merge(&ran, &changes(&then, &ran));
        prop_assert_eq!((sorted(caught_up.objects), caught_up.overruled), (ran, Vec::new()), "edited to what ran");
        let loaded: Objects = toml::from_str(&toml::to_string(&merged.objects).unwrap()).unwrap();
        prop_assert_eq!(loaded, merged.objects);
    }
}

#[test]
fn the_state_file_stands_beside_the_socket_but_not_in_run() {
    for (socket, state) in [
        ("var/control.sock", "var/control.state.toml"),
        ("/srv/a/b.sock", "/srv/a/b.state.toml"),
        ("/run/sluice/control.sock", "/var/lib/sluice/control.state.toml"),
        ("/running/x", "/running/x.state.toml"),
        ("/run/user/1000/sluice.sock", "/run/user/1000/sluice.state.toml"),
    ] {
        let config: Config = toml::from_str(&format!("[service]\nsocket = \"{socket}\"\n")).unwrap();
        assert_eq!(config.service.state_file(), PathBuf::from(state));
    }
    let config: Config = toml::from_str("[service]\nstate = \"/x\"\n").unwrap();
    assert_eq!(config.service.state_file(), PathBuf::from("/x"));
}
