use std::collections::BTreeSet;
use std::path::PathBuf;

use super::machine::{FoundMemory, MemoryBound};
use super::values::{BackendSpec, ByteSize, CpuList};
use super::*;

const DEV: &str = include_str!("../../../configs/dev.toml");
const EXAMPLE: &str = include_str!("../../../configs/example.toml");

fn machine() -> Machine {
    Machine {
        cpus: vec![0, 1, 2, 3],
        memory: FoundMemory { bytes: 8 << 30, bound: MemoryBound::Machine },
        block_devices: vec!["nvme0n1".to_owned()],
    }
}

fn load_text(text: &str, environment: &[(&str, &str)]) -> Result<Checked, ConfigError> {
    load_on(text, environment, &machine())
}

fn load_on(text: &str, environment: &[(&str, &str)], machine: &Machine) -> Result<Checked, ConfigError> {
    let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let loaded = load::parse(Path::new("t.toml"), text.to_owned(), environment)?;
    checked(loaded, State::read(Path::new("/nonexistent/state.toml"))?, machine)
}

fn errors(text: &str) -> String {
    load_text(text, &[]).expect_err("a wrong configuration").to_string()
}

/// A dead device among members that are there keeps nobody from starting.
#[test]
fn a_missing_device_of_a_pool_that_may_exist_is_no_mistake() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, b"").unwrap();
        format!("file:{}", path.display())
    };
    let members = [file("a"), file("b"), "block:/dev/nvme9n1".to_owned()];
    let text = format!("[pool]\nk = 2\nm = 1\nmembers = {members:?}\n");
    load_text(&text, &[]).expect("two of three are there");
    std::fs::remove_file(folder.path().join("b")).unwrap();
    assert!(errors(&text).contains("no such device"), "with fewer than k members there is no pool");
    let spared = format!("{text}spares = [{:?}]\n", file("c"));
    load_text(&spared, &[]).expect("a spare may have taken the place of one of them");
}

#[test]
fn the_shipped_configurations_load() {
    let dev = load_text(DEV, &[]).unwrap();
    assert_eq!(dev.config.pool.members.len(), 6);
    assert_eq!(dev.config.subsystems[0].namespaces[0].backend, BackendSpec::Pool("vol0".to_owned()));
    assert_eq!(dev.reactors, 1);
    assert_eq!(load_text("", &[]).unwrap().config, Config::default());
}

#[test]
fn every_error_names_line_key_value_reason_and_what_to_do() {
    let cases = [
        ("[service\n", "t.toml:1: unclosed table, expected `]`"),
        ("[pool]\nk = 4\nmember = []\n", "t.toml:3: pool.member: unknown key: did you mean 'members'?"),
        ("[pol]\nk = 4\n", "t.toml:1: pol: unknown key: did you mean 'pool'?"),
        (
            "[reactors]\nhugepages = \"offf\"\n",
            "t.toml:2: reactors.hugepages: offf: not one of the words that may stand here: did you mean 'off'?",
        ),
        ("[pool]\nk = \"four\"\n", "t.toml:2: pool.k: four: is a string: expected u8"),
        ("[pool]\nk = 400\n", "t.toml:2: pool.k: 400: out of range: expected 0 to 255"),
        (
            "[limits]\nhosts = 0\nqueue_depth = 1\n",
            "t.toml:2: limits.hosts: 0: out of range: 1 to 4096\nt.toml:3: limits.queue_depth: 1: out of range: 2 to 4096",
        ),
        ("[limits]\nin_capsule = 1048577\n", "t.toml:2: limits.in_capsule: 1048577: out of range: 0B to 1MiB"),
        (
            "[reactors]\ncount = 4\n[pool]\nk = 1\nm = 1\nmembers = [\"mem:128MiB\", \"mem:128MiB\"]\nmax_replay_segments = 9\n",
            "t.toml:7: pool.max_replay_segments: 9: 9 are too few for 4 reactors, each of which keeps three open: give 18 or \
             more here, or set fewer reactors with reactors.count or reactors.cpus",
        ),
        (
            "[pool]\nk = 1\nm = 1\nmembers = [\"mem:128MiB\", \"mem:128MiB\"]\nmax_replay_segments = 3\n",
            "t.toml:5: pool.max_replay_segments: 3: out of range: 4 to 65536",
        ),
        ("[limits]\nin_capsule = 1000\n", "t.toml:2: limits.in_capsule: 1000: must be a multiple of 512B"),
        ("[limits]\nmdts = \"12KiB\"\n", "t.toml:2: limits.mdts: 12KiB: must be a power of two: 8192 or 16384"),
        (
            "[buffers]\nmemory = \"2GB\"\n",
            "t.toml:2: buffers.memory: 2GB: GB is ambiguous: write GiB (powers of 1024) or the number of bytes",
        ),
        (
            "[pool]\nmembers = [\n  \"mem:128MiB\",\n  \"/dev/sdx\",\n]\n",
            "t.toml:4: pool.members[1]: /dev/sdx: not a pool member: write file:PATH, block:PATH or mem:SIZE",
        ),
        (
            "[pool]\nk = 1\nm = 1\nmembers = [\n  \"mem:128MiB\",\n  \"block:/dev/nvme9n1\",\n]\n",
            "t.toml:6: pool.members[1]: block:/dev/nvme9n1: no such device (have: nvme0n1)",
        ),
        (
            "[pool]\nmembers = [\"mem:128MiB\"]\n",
            "t.toml:2: pool.members: 1 members for k=4 m=2: give 6, or change pool.k and pool.m",
        ),
        (
            "[[volume]]\nname = \"a b\"\nsize = \"1GiB\"\n",
            "t.toml:2: volume[0].name: a b: holds ' ' at byte 1: a volume name has letters, digits, '.', '_' and '-', \
             and begins with a letter or digit",
        ),
        ("[[volume]]\nname = \"v\"\n", "t.toml:1: volume[0]: the key 'size' is missing: add it"),
        (
            "[[subsystem]]\nnqn = \"disk\"\n",
            "t.toml:2: subsystem[0].nqn: disk: is not an NQN such as nqn.2026-11.io.example:disk0: it must begin with 'nqn.'",
        ),
        (
            "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:a\"\n",
            "t.toml:1: subsystem[0].hosts: no host may connect: list host NQNs in hosts or set allow_any_host = true",
        ),
        (
            "[[listener]]\naddress = \"127.0.0.1\"\nport = 0\n",
            "t.toml:3: listener[0].port: 0: out of range: 1 to 65535",
        ),
        (
            "[[listener]]\naddress = \"300.1.1.1\"\n",
            "t.toml:2: listener[0].address: 300.1.1.1: not an IP address: write an IPv4 address such as 127.0.0.1 or \
             an IPv6 one such as ::1 or fe80::1%eth0",
        ),
        (
            "[service]\nlog = \"debug,=x=\"\n",
            "t.toml:2: service.log: debug,=x=: not a log filter: invalid filter directive; write a level (error, warn, \
             info, debug, trace) or target=level,…",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(errors(text), expected, "for {text:?}");
    }
}

#[test]
fn the_environment_overrides_the_file_and_is_named_in_errors() {
    let text = "[limits]\nhosts = 5\n[pool]\nk = 1\nm = 1\n";
    let members = ("SLUICE_POOL__MEMBERS", "[\"mem:128MiB\", \"mem:128MiB\"]");
    let loaded = load_text(text, &[("SLUICE_LIMITS__HOSTS", "7"), members, ("SLUICE_HOME", "x")]).unwrap();
    assert_eq!(loaded.config.limits.hosts, 7);
    assert_eq!(loaded.config.pool.members.len(), 2);
    let wrong = |name, value| load_text(text, &[(name, value)]).unwrap_err().to_string();
    assert_eq!(
        wrong("SLUICE_LIMITS__HOST", "7"),
        "environment SLUICE_LIMITS__HOST: limits.host: unknown key: did you mean 'hosts'?"
    );
    assert_eq!(
        wrong("SLUICE_LIMITS__HOSTS", "70000"),
        "environment SLUICE_LIMITS__HOSTS: limits.hosts: 70000: out of range: expected 0 to 65535"
    );
    assert_eq!(
        wrong("SLUICE_LIMITS__HOSTS", "5000"),
        "environment SLUICE_LIMITS__HOSTS: limits.hosts: 5000: out of range: 1 to 4096"
    );
}

#[test]
fn a_variable_with_one_underscore_for_two_is_no_silent_default() {
    let wrong = |name| load_text("", &[(name, "7")]).unwrap_err().to_string();
    assert_eq!(
        wrong("SLUICE_LIMITS_HOSTS"),
        "environment SLUICE_LIMITS_HOSTS: is no setting: section and key are parted by two underscores: write \
         SLUICE_LIMITS__HOSTS"
    );
    for (name, meant) in [
        ("SLUICE_POOL_K", "SLUICE_POOL__K"),
        ("SLUICE_SERVICE_STATE", "SLUICE_SERVICE__STATE"),
        ("SLUICE_POOL_KEYFILE", "SLUICE_POOL__KEYFILE"),
    ] {
        assert!(wrong(name).ends_with(&format!("write {meant}")), "{name}");
    }
    load_text("", &[("SLUICE_TEST_KEEP", "1"), ("SLUICE_POOLSIDE", "x"), ("SLUICE_POOL", "x")]).expect("not ours");
}

/// What Kubernetes sets in every container beside Services called `sluice`, `sluice-pool` and `sluice-limits`.
#[test]
fn variables_that_kubernetes_sets_are_not_ours() {
    let set = |service: &str| {
        let address = |rest: &str, value: &str| (format!("{service}_{rest}"), value.to_owned());
        [
            address("SERVICE_HOST", "10.0.0.1"),
            address("SERVICE_PORT", "4420"),
            address("SERVICE_PORT_NVME_TCP", "4420"),
            address("PORT", "tcp://10.0.0.1:4420"),
            address("PORT_4420_TCP", "tcp://10.0.0.1:4420"),
            address("PORT_4420_TCP_PROTO", "tcp"),
            address("PORT_4420_TCP_PORT", "4420"),
            address("PORT_4420_TCP_ADDR", "10.0.0.1"),
        ]
    };
    let all: Vec<_> = ["SLUICE", "SLUICE_POOL", "SLUICE_LIMITS"].into_iter().flat_map(set).collect();
    let all: Vec<_> = all.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    load_text("", &all).expect("not ours");
}

#[test]
fn paths_that_can_not_be_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().display();
    let members = "members = [\"mem:128MiB\", \"mem:128MiB\"]\nk = 1\nm = 1\n";
    let long = "x".repeat(100);
    let text = format!("[service]\nsocket = \"/run/{long}\"\nstate = \"{dir}\"\n[pool]\n{members}key_file = \"\"\n");
    assert_eq!(
        errors(&text),
        format!(
            "t.toml:2: service.socket: /run/{long}: longer than the 96 bytes that a socket's path may have: choose a shorter \
             one\nt.toml:3: service.state: {dir}: is a folder: give the path of a file in it\n\
             t.toml:8: pool.key_file: \"\": names no file: give the path of one"
        )
    );
    // The same file by other names: as it is written, through a link, and not there yet.
    std::fs::create_dir(folder.path().join("d")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("d"), folder.path().join("link")).unwrap();
    for (one, two) in [("d/m", "./d/m"), ("d/m", "link/m"), ("d/../d/m", "d/m")] {
        let text = format!("[pool]\nk = 1\nm = 1\nmembers = [\"file:{dir}/{one}\", \"file:{dir}/{two}\"]\n");
        let error = errors(&text);
        assert!(
            error.contains(": the same as pool.members[0]: each member has a file or device of its own"),
            "{error}"
        );
    }
}

#[test]
fn what_stands_twice_is_named_with_both_places() {
    let subsystem = "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:a\"\nallow_any_host = true\n";
    let listener = "[[listener]]\naddress = \"127.0.0.1\"\nport = 4420\n";
    assert_eq!(
        errors(&format!("{subsystem}{subsystem}{listener}{listener}")),
        "t.toml:5: subsystem[1].nqn: nqn.2026-11.io.example:a: the same as subsystem[0].nqn: each subsystem has an NQN of its \
         own\nt.toml:11: listener[1].address: 127.0.0.1: the same as listener[0]: each listener has an address and port of \
         its own"
    );
}

#[test]
fn h145_cpus_are_checked_against_the_ones_we_may_use() {
    let cpus = |list: &str| load_text(&format!("[reactors]\ncpus = \"{list}\"\n"), &[]);
    assert_eq!(cpus("0-3").unwrap().reactors, 4);
    let error = cpus("200").unwrap_err().to_string();
    assert_eq!(error, "t.toml:2: reactors.cpus: 200: CPU 200 is not available: this process may use 0-3");
    let error = cpus("").unwrap_err().to_string();
    assert!(error.starts_with("t.toml:2: reactors.cpus: \"\": an empty core list:"), "{error}");
    let error = errors("[reactors]\ncount = 5\n");
    assert_eq!(error, "t.toml:2: reactors.count: 5: more reactors than CPUs: this process may use 0-3, so at most 4");
    let far = Machine { cpus: vec![126, 200, 201], ..machine() };
    let high = load_on("[reactors]\ncpus = \"200-201\"\n", &[], &far).unwrap();
    assert_eq!(high.config.reactors.cpus, Some(CpuList(vec![200, 201])), "ids over 127 are no special case");
}

#[test]
fn h50_the_same_bytes_are_never_two_namespaces() {
    let subsystem = |name: &str| {
        format!(
            "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:{name}\"\nallow_any_host = true\n\
             [[subsystem.namespace]]\nnsid = 1\nbackend = \"file:/proc/self/exe\"\n"
        )
    };
    assert_eq!(
        errors(&(subsystem("a") + &subsystem("b"))),
        "t.toml:12: subsystem[1].namespace[0].backend: file:/proc/self/exe: the same as \
         subsystem[0].namespace[0].backend: a back end serves one namespace; give the hosts access to that one"
    );
}

fn load_changed(text: &str, then: &str, ran: &str) -> Result<Checked, ConfigError> {
    let objects = |text: &str| toml::from_str::<objects::Objects>(text).unwrap();
    let (configured, running) = objects::Objects::differences(&objects(then), &objects(ran));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("state.toml");
    let kept = state::Kept { changes: merge::Changes { configured, running }, pool: None };
    state::Prepared::write(&file, &kept).unwrap().commit().unwrap();
    let loaded = load::parse(Path::new("t.toml"), text.to_owned(), [])?;
    let mut state = State::read(&file).unwrap();
    state.file = PathBuf::from("state.toml");
    checked(loaded, state, &machine())
}

#[test]
fn what_is_wrong_with_a_change_is_said_of_the_change_and_of_the_rest_by_its_line() {
    let one = "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:a\"\nallow_any_host = true\n";
    let two = "[[subsystem.namespace]]\nnsid = 2\nbackend = \"file:/nonexistent/b\"\n";
    let other = "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:b\"\nhosts = [\"nqn.2026-11.io.example:h\"]\n";
    let first = "[[subsystem.namespace]]\nnsid = 1\nbackend = \"file:/nonexistent/a\"\n";
    // The first one was removed, the other one has a namespace more, and one came that has no hosts yet.
    let configured = format!("{other}{one}{first}");
    let added = "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:c\"\n";
    let ran = format!("{one}{first}{two}{added}");
    let error = load_changed(&configured, &configured, &ran).unwrap_err().to_string();
    assert_eq!(
        error,
        "t.toml:9: subsystem[1].namespace[0].backend: file:/nonexistent/a: No such file or directory (os error 2)\n\
         state.toml (changes made with offloadctl): subsystem nqn.2026-11.io.example:a namespace 2: backend: \
         file:/nonexistent/b: No such file or directory (os error 2)"
    );
    let origin =
        |checked: &Checked, path: &[&str]| checked.sources.origin_of_value(path).map(|origin| origin.to_string());
    let (one, first) = (format!("{one}{}", first.replace("file:/nonexistent/a", "mem:1MiB")), "");
    let changed = load_changed(&one, &one, &format!("{one}[[listener]]\naddress = \"::1\"\n{first}")).unwrap();
    assert_eq!(origin(&changed, &["subsystem", "0", "namespace", "0", "backend"]).as_deref(), Some("t.toml:6"));
    assert_eq!(
        origin(&changed, &["listener", "0", "port"]).as_deref(),
        Some("state.toml (changes made with offloadctl)")
    );
    assert_eq!(origin(&changed, &["limits", "hosts"]), None, "a default");
}

#[test]
fn h155_limits_are_named() {
    let mut text = "[[subsystem]]\nnqn = \"nqn.2026-11.io.example:a\"\nallow_any_host = true\n".to_owned();
    for nsid in 1..=256 {
        text += &format!("[[subsystem.namespace]]\nnsid = {nsid}\nbackend = \"mem:1MiB\"\n");
    }
    assert_eq!(load_text(&text, &[]).unwrap().config.subsystems[0].namespaces.len(), 256);
    for nsid in 257..=1025 {
        text += &format!("[[subsystem.namespace]]\nnsid = {nsid}\nbackend = \"mem:1MiB\"\n");
    }
    let error = errors(&text);
    assert!(error.contains("subsystem[0].namespace: 1025 entries: at most 1024"), "{error}");
    let hosts: Vec<String> = (0..1000).map(|i| format!("\"nqn.2026-11.io.example:h{i}\"")).collect();
    let text = format!("[[subsystem]]\nnqn = \"nqn.2026-11.io.example:a\"\nhosts = [{}]\n", hosts.join(","));
    assert_eq!(load_text(&text, &[]).unwrap().config.subsystems[0].hosts.len(), 1000);
    let size = (1u64 << 53) + 4096;
    let text =
        format!("[pool]\nk=1\nm=1\nmembers=[\"mem:128MiB\",\"mem:128MiB\"]\n[[volume]]\nname=\"v\"\nsize={size}\n");
    let unbounded = Machine { memory: FoundMemory { bytes: u64::MAX, ..machine().memory }, ..machine() };
    assert_eq!(load_on(&text, &[], &unbounded).unwrap().config.volumes[0].size.bytes(), size, "exact over 2^53");
}

#[test]
fn h151_a_dumped_configuration_loads_to_the_same() {
    let loaded = load_text(EXAMPLE, &[("SLUICE_REACTORS__CPUS", "1-2"), ("SLUICE_LIMITS__HOSTS", "3")]).unwrap();
    let dump = toml::to_string(&loaded.config).unwrap();
    let again = load_text(&dump, &[]).unwrap();
    assert_eq!(again.config, loaded.config);
    assert_eq!(toml::to_string(&again.config).unwrap(), dump, "byte for byte");
}

/// `section.key` of every key in a value, list positions left out.
fn keys(value: &toml::Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        toml::Value::Table(table) => {
            for (key, inner) in table {
                let dot = if path.is_empty() { "" } else { "." };
                keys(inner, &format!("{path}{dot}{key}"), found);
            }
        }
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
            items.iter().for_each(|item| keys(item, path, found));
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

#[test]
fn h151_the_example_has_every_key_with_its_default() {
    let mut shown: toml::Table = EXAMPLE.parse().unwrap();
    let uncommented = EXAMPLE.replace("# cpus = ", "cpus = ").replace("# state = ", "state = ");
    let mut in_example = BTreeSet::new();
    keys(&toml::Value::Table(uncommented.parse().unwrap()), "", &mut in_example);
    let many = Machine { cpus: (0..9).collect(), ..machine() };
    let full = load_on(&uncommented, &[("SLUICE_REACTORS__COUNT", "5")], &many).unwrap().config;
    let mut in_schema = BTreeSet::new();
    keys(&toml::Value::try_from(&full).unwrap(), "", &mut in_schema);
    assert_eq!(in_example, in_schema);

    for objects in ["volume", "subsystem", "listener"] {
        shown.remove(objects);
    }
    shown["pool"].as_table_mut().unwrap().remove("members");
    let defaults: Config = shown.try_into().unwrap();
    assert_eq!(defaults, Config::default(), "what the example shows as default is the default");
}

#[test]
fn h24_the_plan_sums_up_and_says_what_is_short() {
    let plan = load_text(DEV, &[]).unwrap().plan;
    assert_eq!(plan.total_bytes, plan.lines.iter().map(|line| line.bytes).sum::<u64>());
    let table = plan.table();
    for line in &plan.lines {
        assert!(table.contains(&line.bytes.to_string()), "{} is in the table", line.what);
    }
    for mib in [64u64, 256] {
        let small =
            FoundMemory { bytes: mib << 20, bound: MemoryBound::ControlGroup("/sys/fs/cgroup/s/memory.max".into()) };
        let error = load_on(DEV, &[], &Machine { memory: small, ..machine() }).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1);
        let found = format!("found {} (/sys/fs/cgroup/s/memory.max): lower ", ByteSize::mib(mib));
        assert!(error.starts_with("t.toml: memory: needed ") && error.contains(&found), "{error}");
    }
    let huge = load_text("[limits]\nhosts = 4096\nqueues = 128\nqueue_depth = 4096\nin_capsule = \"1MiB\"\n", &[]);
    assert!(huge.unwrap_err().to_string().contains("lower limits.hosts, limits.queues"), "no overflow on the way");
}
