//! `nvmf` against a target in memory, over real sockets on the loopback address.

use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nvmf_target::buffer::HeapPool;
use nvmf_target::proto::tcp::TcpConfig;
use nvmf_target::target::testing::MemBackend;
use nvmf_target::target::{Limits, SubsystemSpec, Target, TargetConfig, ThreadQueueHost};
use nvmf_target::wire::nqn::Nqn;

const NQN: &str = "nqn.2026-11.io.sluice:loopback";
const BLOCKS: u64 = 4096;

/// A target with a namespace of each block size: 1 has 512 bytes a block, 2 has 4096.
struct Rig {
    runtime: tokio::runtime::Runtime,
    target: Arc<Target>,
    address: std::net::SocketAddr,
    folder: tempfile::TempDir,
}

impl Rig {
    fn on(address: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let limits = Limits::default();
        let pool = Arc::new(HeapPool { largest_bytes: limits.mdts_bytes as usize });
        let target = Target::new(TargetConfig {
            limits,
            firmware: "test".into(),
            tcp: TcpConfig::default(),
            io_staging_bytes: 256 << 10,
            queues: Arc::new(ThreadQueueHost::new(pool, 64)),
            runtime: runtime.handle().clone(),
        });
        let nqn = NQN.to_owned();
        let spec = SubsystemSpec { nqn: nqn.clone(), serial: "S1".into(), model: "M".into(), allow_any_host: true };
        target.create_subsystem(&spec).unwrap();
        target.add_namespace(&nqn, 1, MemBackend::new(1, 512, BLOCKS)).unwrap();
        target.add_namespace(&nqn, 2, MemBackend::new(2, 4096, BLOCKS)).unwrap();
        let address = target.add_listener(address.parse().unwrap()).unwrap();
        Self { runtime, target, address, folder: tempfile::tempdir().unwrap() }
    }

    fn new() -> Self {
        Self::on("127.0.0.1:0")
    }

    fn command(&self, line: &str) -> Command {
        let mut words = line.split_whitespace();
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvmf"));
        command.args(words.next());
        command.args(["-t", "tcp", "-a", &self.address.ip().to_string(), "-s", &self.address.port().to_string()]);
        if !line.starts_with("discover") {
            command.args(["-n", NQN]);
        }
        command.args(words).current_dir(self.folder.path()).stdin(Stdio::null());
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    /// Runs a command that must succeed; gives its standard output.
    fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{line}: {:?}\n{out}\n{err}", output.status);
        out.into_owned()
    }

    /// Runs a command that must end with `code`; gives its standard error.
    fn fails(&self, line: &str, code: i32) -> String {
        let output = self.run(line);
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{line}: {err}");
        err
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.runtime.block_on(self.target.shutdown(Duration::from_secs(5)));
    }
}

fn bytes(len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    host_tools::pattern::SplitMix64(3).fill(&mut out);
    out
}

#[test]
fn discover_and_identify_say_what_there_is() {
    let rig = Rig::new();
    let log: serde_json::Value = serde_json::from_str(&rig.ok("discover --json")).unwrap();
    let record = log["records"].as_array().unwrap().iter().find(|r| r["subnqn"] == NQN).expect("our subsystem");
    assert_eq!(record["trsvcid"], rig.address.port().to_string());
    let seen: serde_json::Value = serde_json::from_str(&rig.ok("identify --json")).unwrap();
    assert_eq!(seen["controller"]["subnqn"], NQN);
    let sizes: Vec<u64> =
        seen["namespaces"].as_array().unwrap().iter().map(|n| n["size_bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [BLOCKS * 512, BLOCKS * 4096]);
    assert!(rig.ok("identify --namespace-id 2").contains("4096 blocks of 4096"));
}

#[test]
fn h174_the_same_over_ipv6() {
    let rig = Rig::on("[::1]:0");
    assert!(rig.ok("discover").contains("traddr:  ::1\n"));
    rig.ok("verify --namespace-id 2 --size 1MiB");
}

#[test]
fn any_bytes_come_back_with_every_combination_of_digests_and_flow_control() {
    let rig = Rig::new();
    let data = bytes(1_234_567);
    std::fs::write(rig.folder.path().join("in"), &data).unwrap();
    for (case, flags) in ["", "-g", "-G", "-g -G", "--disable-sqflow", "--disable-sqflow -g -G -Q 2"].iter().enumerate()
    {
        for nsid in [1, 2] {
            let at = format!("--nsid {nsid} --offset {}", 511 + 4096 * case);
            rig.ok(&format!("write {flags} {at} -d in"));
            rig.ok(&format!("read {flags} {at} -z {} -d out", data.len()));
            assert!(std::fs::read(rig.folder.path().join("out")).unwrap() == data, "{flags}, namespace {nsid}");
        }
    }
}

#[test]
fn standard_input_and_output_carry_data_alone() {
    let rig = Rig::new();
    let data = bytes(100_001);
    std::fs::write(rig.folder.path().join("in"), &data).unwrap();
    let input = std::fs::File::open(rig.folder.path().join("in")).unwrap();
    assert!(rig.command("write --nsid 2").stdin(input).status().unwrap().success());
    let output = rig.run("read --nsid 2 -z 100001");
    assert!(output.status.success() && output.stdout == data);
}

#[test]
fn verify_finds_what_was_overwritten() {
    let rig = Rig::new();
    rig.ok("verify --nsid 2 -i 3 --block-size 128KiB -g -G");
    rig.ok("verify --nsid 2 --check-only");
    std::fs::write(rig.folder.path().join("in"), bytes(10)).unwrap();
    rig.ok("write --nsid 2 --offset 409610 -d in");
    let output = rig.run("verify --nsid 2 --check-only --json");
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["check"]["checked_blocks"], BLOCKS);
    let listed = report["check"]["listed"].as_array().unwrap();
    assert!(listed.len() == 1 && listed[0].as_str().unwrap().starts_with("LBA 100: torn"), "{listed:?}");
}

#[test]
fn a_journalled_load_with_zeroes_and_deallocations_checks_out_beside_older_test_blocks() {
    let rig = Rig::new();
    rig.ok("verify --nsid 1 --block-size 4KiB");
    let load =
        "verify --nsid 1 --block-size 4KiB -i 3 --journal j --time 0.5 --zeroes-percent 15 --deallocate-percent 15";
    for _ in 0..2 {
        rig.ok(load);
        let report: serde_json::Value =
            serde_json::from_str(&rig.ok("verify --nsid 1 --block-size 4KiB --check-journal j --json")).unwrap();
        assert!(
            report["acknowledged"].as_u64().unwrap() > 0 && report["check"]["checked_blocks"].as_u64().unwrap() > 0
        );
        assert_eq!(report["check"]["faults"], serde_json::json!({}));
    }
    rig.fails("verify --nsid 2 --journal j --time 0.1", 5);
}

#[test]
fn a_load_whose_target_goes_away_ends_with_its_acknowledged_writes_in_the_journal() {
    let rig = Rig::new();
    let child = rig
        .command("verify --nsid 2 -i 2 --journal j --time 60 --json")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let journal = rig.folder.path().join("j");
    while journal.metadata().map_or(0, |m| m.len()) < 20_000 {
        std::thread::sleep(Duration::from_millis(10));
    }
    rig.runtime.block_on(async { drop(rig.target.delete_subsystem(NQN).unwrap()) });
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(3 | 4)), "{:?}: {error}", output.status);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let header = host_tools::journal::Journal::peek(&journal).unwrap();
    let (_, model) = host_tools::journal::Journal::open(&journal, header).unwrap();
    assert_eq!(report["acknowledged"].as_u64().unwrap(), model.acknowledged_writes());
    assert!(!report["error"].as_str().unwrap().is_empty());
}

#[test]
fn h160_perf_counts_what_it_did() {
    let rig = Rig::new();
    for (flags, commands) in [("--count 1", 1), ("--count 3000 -i 2 --rw randrw", 3000), ("--time 0", 0)] {
        let text = rig.ok(&format!("perf --nsid 2 {flags} --json"));
        let report: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(report["total"]["commands"], commands);
        let lanes: u64 = report["lane_commands"].as_array().unwrap().iter().map(|c| c.as_u64().unwrap()).sum();
        assert_eq!(lanes, commands);
        assert!(!text.contains("inf") && !text.contains("NaN"), "{text}");
    }
}

#[test]
fn h160_an_interrupted_perf_run_reports_what_it_measured() {
    let rig = Rig::new();
    let child = rig.command("perf --nsid 2 --time 600 --json").stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["partial"], true);
    assert!(report["elapsed_s"].as_f64().unwrap() < 60.0);
}

#[test]
fn what_goes_wrong_is_said_with_its_own_exit_code() {
    let rig = Rig::new();
    assert!(rig.fails("read --nsid 9 -z 1", 2).contains("have: 1, 2"));
    assert!(rig.fails("read --nsid 1 --offset 2MiB -z 1", 2).contains("has 2097152 bytes"));
    assert!(rig.fails("perf --nsid 2 -b 512", 2).contains("multiple of the block size 4096"));
    assert!(rig.fails("perf --nsid 2 -b 64MiB", 2).contains("MDTS"));
    assert!(rig.fails("write --nsid 1 -d missing", 5).contains("missing: No such file"));
    let mut other = Command::new(env!("CARGO_BIN_EXE_nvmf"));
    let port = rig.address.port().to_string();
    let output = other.args(["identify", "-a", "127.0.0.1", "-s", &port, "-n", "nqn.2026-11.io.x:y"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3));
    assert!(error.contains("sct/sc 0x1/0x82") && error.contains("nvmf discover"), "{error}");
}

#[test]
fn a_host_that_is_not_allowed_is_told_so() {
    let rig = Rig::new();
    let nqn = "nqn.2026-11.io.sluice:closed".to_owned();
    let spec = SubsystemSpec { nqn: nqn.clone(), serial: "S2".into(), model: "M".into(), allow_any_host: false };
    rig.target.create_subsystem(&spec).unwrap();
    let port = rig.address.port().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvmf"));
    let output = command.args(["identify", "-a", "127.0.0.1", "-s", &port, "-n", &nqn]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3));
    assert!(error.contains("sct/sc 0x1/0x84") && error.contains("-q"), "{error}");
    assert!(Nqn::parse(&nqn).is_ok());
}
