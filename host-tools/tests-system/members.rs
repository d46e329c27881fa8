//! Members that fail under a running service, each way a member gets lost: cut short, overwritten, erring, hanging.
//!
//! 4+2: two lost are survived, reads and writes go on; three lost is Unrecovered Read Error, never a wrong byte, and the
//! service stays up. The pool's own simulator covers every moment; here the real members, files and clocks.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::broken_disk::BrokenDisk;
use crate::network::Network;
use crate::report::Report;
use crate::service::{Service, Setup, find};

const MEMBER_BYTES: u64 = 256 << 20;
const MEMBER_TIMEOUT: Duration = Duration::from_millis(1500);
/// What each test writes before the damage.
const SIZE: &str = "48MiB";

/// Six members, of which the first `broken` can be made to fail. The service goes before the disks that it holds open.
struct Bench<'a> {
    service: Service<'a>,
    disks: Vec<BrokenDisk>,
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        // A process with requests in a file that hangs can't be killed.
        let _ = self.fault("none");
    }
}

impl<'a> Bench<'a> {
    fn new(folder: &Path, network: &'a Network, broken: usize) -> Result<Bench<'a>> {
        std::fs::create_dir_all(folder)?;
        let mut disks = Vec::new();
        let mut members = Vec::new();
        for index in 0..6 {
            if index < broken {
                let disk = BrokenDisk::new(folder, &format!("disk{index}"), MEMBER_BYTES)?;
                members.push(format!("file:{}", disk.path().display()));
                disks.push(disk);
            } else {
                members.push(format!("file:{}", folder.join(format!("member{index}")).display()));
            }
        }
        let member_timeout_ms = MEMBER_TIMEOUT.as_millis() as u64;
        let setup = Setup { members, member_size: "256MiB", member_timeout_ms, ..Setup::default() };
        let service = Service::start(folder, network, &setup)?;
        let bench = Bench { service, disks };
        bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "1"], 60).context("before the damage")?;
        Ok(bench)
    }

    fn fault(&self, fault: &str) -> Result<()> {
        self.disks.iter().try_for_each(|disk| disk.fault(fault))
    }

    /// What was written before the damage is right, and writes go on; also after a restart, which mounts degraded.
    fn goes_on(&mut self) -> Result<()> {
        self.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "1", "--check-only"], 90).context("old data")?;
        self.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "2"], 90).context("new data")?;
        self.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "2", "--check-only"], 90).context("new data again")?;
        self.service.ensure_up()
    }

    /// The members as `pool show` has them.
    fn members(&self) -> Result<Vec<Value>> {
        let pool = self.service.ctl(&["pool", "show"])?;
        let members = find(&pool, "members").and_then(Value::as_array).context("pool show lists no members")?;
        ensure!(members.len() == 6, "pool show lists {} members", members.len());
        Ok(members.clone())
    }

    /// Exactly these members are told as damaged: out of the set, or with errors counted.
    fn ensure_named(&self, damaged: &[usize]) -> Result<()> {
        for (index, member) in self.members()?.iter().enumerate() {
            let told = member["state"] != "active" || findings(member) > 0;
            ensure!(told == damaged.contains(&index), "member {index} is shown as {member}");
        }
        Ok(())
    }
}

fn findings(member: &Value) -> u64 {
    ["read_errors", "write_errors", "timeouts", "checksum_errors"].iter().filter_map(|key| member[*key].as_u64()).sum()
}

/// Overwrites a member with bytes that are not its own.
fn overwrite(path: &Path, seed: u64) -> Result<()> {
    let file = File::options().write(true).open(path)?;
    let mut state = seed | 1;
    let mut block = vec![0u8; 1 << 20];
    for offset in (0..MEMBER_BYTES).step_by(block.len()) {
        for word in block.chunks_exact_mut(8) {
            // xorshift64: any bytes do, as long as they are always the same.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        file.write_all_at(&block, offset)?;
    }
    Ok(())
}

/// Flips one bit in every `step` bytes of a member; returns how many.
fn flip(path: &Path, from: u64, step: u64) -> Result<u64> {
    let file = File::options().read(true).write(true).open(path)?;
    let mut byte = [0u8];
    let mut count = 0;
    for offset in (from..file.metadata()?.len()).step_by(usize::try_from(step)?) {
        file.read_exact_at(&mut byte, offset)?;
        file.write_all_at(&[byte[0] ^ 0x10], offset)?;
        count += 1;
    }
    Ok(count)
}

pub fn run(report: &mut Report, folder: &Path) -> Result<()> {
    let network = Network::UserMode;
    report.check("two_truncated", || {
        let mut bench = Bench::new(&folder.join("truncated"), &network, 0)?;
        for index in [2, 3] {
            File::options().write(true).open(&bench.service.members[index])?.set_len(0)?;
        }
        bench.goes_on()?;
        bench.ensure_named(&[2, 3])
    });
    report.check("two_overwritten", || {
        let mut bench = Bench::new(&folder.join("overwritten"), &network, 0)?;
        for index in [0, 5] {
            overwrite(&bench.service.members[index], 42 + index as u64)?;
        }
        bench.goes_on()?;
        bench.ensure_named(&[0, 5])
    });
    report.check("replaced_under_load", || replaced(&folder.join("replaced"), &network));
    report.check("h97_two_away_return_one_after_the_other", || two_away(&folder.join("away"), &network));
    report.check("a_spare_takes_over", || spare(&folder.join("spare"), &network));
    report.check("h100_flipped_bytes_are_repaired_and_counted", || flipped(&folder.join("flipped"), &network));
    if let Some(reason) = BrokenDisk::unavailable() {
        for name in ["two_erring", "two_hanging", "three_lost", "h131_member_full"] {
            report.skip(name, reason);
        }
        return Ok(());
    }
    report.check("two_erring", || {
        let mut bench = Bench::new(&folder.join("erring"), &network, 2)?;
        bench.fault("eio")?;
        bench.goes_on()?;
        bench.ensure_named(&[0, 1])
    });
    report.check("h156_two_hanging", || hanging(&folder.join("hanging"), &network));
    report.check("three_lost", || three_lost(&folder.join("three"), &network));
    report.check("h131_member_full", || member_full(&folder.join("full"), &network));
    Ok(())
}

impl Bench<'_> {
    /// Waits until every member is in the set.
    fn whole(&self, seconds: u64) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(seconds);
        loop {
            let members = self.members()?;
            if members.iter().all(|member| member["state"] == "active") {
                return Ok(());
            }
            ensure!(Instant::now() < end, "not whole after {seconds} s: {members:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// A scrub of everything: what it has found.
    fn scrub(&self) -> Result<Value> {
        self.service.ctl_do(&["pool", "scrub", "start"])?;
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let scrub = self.service.ctl(&["pool", "scrub", "status"])?;
            if scrub["running"] == false && scrub["ended_s"].as_u64().is_some_and(|ended| ended > 0) {
                return Ok(scrub);
            }
            ensure!(Instant::now() < end, "the scrub does not end: {scrub}");
        }
    }

    /// Nothing is wrong anywhere, and without two members, the first of which are given, all is read.
    fn sound_without(&mut self, lost: [usize; 2], seed: &str) -> Result<()> {
        let scrub = self.scrub()?;
        ensure!(scrub["bad_shards"] == 0 && scrub["stripes_lost"] == 0, "the scrub found {scrub}");
        ensure!(scrub["stripes"].as_u64().is_some_and(|stripes| stripes > 0), "the scrub read nothing: {scrub}");
        for index in lost {
            File::options().write(true).open(&self.service.members[index])?.set_len(0)?;
        }
        self.service.nvmf_ok("verify", &["-z", SIZE, "--seed", seed, "--check-only"], 90).context("two others lost")?;
        self.service.ensure_up()
    }
}

/// A member is replaced while a host writes: the old one's file can go when the new one is full, and then any two others.
fn replaced(folder: &Path, network: &Network) -> Result<()> {
    let mut bench = Bench::new(folder, network, 0)?;
    let new = folder.join("new");
    let mut load = bench.service.nvmf_spawn("verify", &["-z", SIZE, "--seed", "4"], "load.log")?;
    bench.service.ctl_do(&["pool", "replace", "3", &format!("file:{}", new.display())])?;
    let end = Instant::now() + Duration::from_secs(90);
    loop {
        let members = bench.members()?;
        if members[3]["source"].as_str().is_some_and(|source| source.ends_with("/new")) {
            break;
        }
        ensure!(Instant::now() < end, "not replaced: {}", bench.service.ctl(&["pool", "show"])?);
        std::thread::sleep(Duration::from_millis(200));
    }
    let status = load.wait(Duration::from_secs(90))?;
    ensure!(status.success(), "the host that wrote meanwhile ended with {status}");
    bench.whole(10)?;
    std::fs::remove_file(&bench.service.members[3])?;
    bench.service.edit_configuration("/member3\"", "/new\"")?;
    bench.service.kill_9()?;
    bench.service.launch()?;
    bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "4", "--check-only"], 90).context("after a new start")?;
    bench.whole(10)?;
    bench.sound_without([0, 5], "4")
}

/// H97: two members away together, back one after the other while the service runs: the first scrub is clean, and two others
/// can go.
fn two_away(folder: &Path, network: &Network) -> Result<()> {
    let mut bench = Bench::new(folder, network, 0)?;
    bench.service.stop()?;
    let paths = [bench.service.members[1].clone(), bench.service.members[4].clone()];
    let aside = paths.clone().map(|path| path.with_extension("away"));
    for (path, aside) in paths.iter().zip(&aside) {
        std::fs::rename(path, aside)?;
    }
    bench.service.launch()?;
    bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "2"], 90).context("two away")?;
    // The first one is found by the service itself.
    std::fs::rename(&aside[0], &paths[0])?;
    let end = Instant::now() + Duration::from_secs(60);
    while bench.members()?[1]["state"] != "active" {
        ensure!(Instant::now() < end, "not back: {:?}", bench.members()?);
        std::thread::sleep(Duration::from_millis(200));
    }
    bench.service.nvmf_ok("verify", &["-z", "8MiB", "--seed", "2"], 60).context("one away")?;
    std::fs::rename(&aside[1], &paths[1])?;
    // It may have been found in this moment.
    let attached = bench.service.ctl_do(&["pool", "attach", &format!("file:{}", paths[1].display())]);
    bench.whole(60).with_context(|| format!("attached: {attached:?}"))?;
    bench.sound_without([0, 2], "2")
}

/// A member that does not come back is replaced by the spare of the configuration.
fn spare(folder: &Path, network: &Network) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let spare = folder.join("spare");
    let pool = format!("spares = [\"file:{}\"]\nspare_after_ms = 1000", spare.display());
    let setup = Setup { member_size: "256MiB", pool, ..Setup::default() };
    let service = Service::start(folder, network, &setup)?;
    let mut bench = Bench { service, disks: Vec::new() };
    bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "1"], 60)?;
    bench.service.kill_9()?;
    std::fs::remove_file(&bench.service.members[2])?;
    bench.service.launch()?;
    bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "3"], 90)?;
    bench.whole(90)?;
    let source = bench.members()?[2]["source"].clone();
    ensure!(source.as_str().is_some_and(|source| source.ends_with("/spare")), "member 2 is {source}");
    bench.service.kill_9()?;
    bench.service.launch()?;
    bench.whole(30).context("after a new start")?;
    bench.sound_without([0, 1], "3")
}

/// H100: one bit in every 64 KiB of two members; read right, repaired, counted, and not found again.
fn flipped(folder: &Path, network: &Network) -> Result<()> {
    let mut bench = Bench::new(folder, network, 0)?;
    // The superblocks at the start are left to the pool's own tests.
    let flipped =
        flip(&bench.service.members[1], 1 << 20, 64 << 10)? + flip(&bench.service.members[4], 1 << 20, 64 << 10)?;
    bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "1", "--check-only"], 90)?;
    let sum = |bench: &Bench, key: &str| -> Result<u64> {
        Ok(bench.members()?.iter().filter_map(|member| member[key].as_u64()).sum())
    };
    let found = sum(&bench, "checksum_errors")?;
    ensure!(found > 0 && found <= flipped, "{found} bad shards counted, {flipped} bits flipped");
    bench.ensure_named(&[1, 4])?;
    let end = Instant::now() + Duration::from_secs(10);
    while sum(&bench, "repaired")? < found {
        ensure!(Instant::now() < end, "{found} bad shards, {} repaired", sum(&bench, "repaired")?);
        std::thread::sleep(Duration::from_millis(100));
    }
    bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "1", "--check-only"], 90)?;
    ensure!(sum(&bench, "checksum_errors")? == found, "the second read found damage again");
    bench.service.ensure_up()
}

/// Two members hang for a minute: I/O goes on within the member timeout, the control plane and keep-alives answer all the
/// while, and the members may come back late without harm.
fn hanging(folder: &Path, network: &Network) -> Result<()> {
    let mut bench = Bench::new(folder, network, 2)?;
    // A host that was there before, with a short keep-alive timeout, and stays.
    let log = "steady.log";
    let mut steady = bench.service.nvmf_spawn(
        "perf",
        &["--nsid", "3", "-k", "2", "--rw", "randrw", "--queue-depth", "1", "--time", "62"],
        log,
    )?;
    std::thread::sleep(Duration::from_secs(1));
    bench.fault("hang")?;
    let start = Instant::now();
    bench.service.nvmf_ok("verify", &["-z", "4KiB", "-b", "4KiB", "--seed", "7", "--start-block", "100000"], 30)?;
    let first = start.elapsed();
    ensure!(first < MEMBER_TIMEOUT * 3, "a write took {first:?} with a member timeout of {MEMBER_TIMEOUT:?}");
    for _ in 0..10 {
        let start = Instant::now();
        bench.service.ctl(&["status"])?;
        let asked = start.elapsed();
        ensure!(asked < Duration::from_millis(500), "offloadctl status took {asked:?}");
    }
    bench.goes_on()?;
    bench.ensure_named(&[0, 1])?;
    let status = steady.wait(Duration::from_secs(120))?;
    let text = std::fs::read_to_string(folder.join(log))?;
    ensure!(status.success(), "the steady host ended with {status}: {}", crate::process::tail(&text, 4));
    println!("        {} requests held at the end", bench.disks[0].held()? + bench.disks[1].held()?);
    bench.fault("none")?;
    std::thread::sleep(Duration::from_secs(1));
    bench
        .service
        .nvmf_ok("verify", &["-z", SIZE, "--seed", "2", "--check-only"], 90)
        .context("after the members came back")?;
    bench.service.ensure_up()
}

/// Beyond m: an error for what can't be rebuilt, never a wrong byte, no hang; when the members are back, all is right.
fn three_lost(folder: &Path, network: &Network) -> Result<()> {
    let mut bench = Bench::new(folder, network, 3)?;
    bench.fault("eio")?;
    let text = bench.service.nvmf_fails("verify", &["-z", SIZE, "--seed", "1", "--check-only"], 4, 120)?;
    ensure!(text.contains("Unrecovered Read Error"), "the host was told: {}", crate::process::tail(&text, 4));
    bench.service.ensure_up()?;
    bench.service.nvmf_ok("verify", &["--nsid", "3", "-z", "8MiB", "--seed", "5"], 60).context("another namespace")?;
    // Lifted, the data of members that only erred is all there: a new start reads it.
    bench.fault("none")?;
    bench.service.kill_9()?;
    bench.service.launch()?;
    bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "1", "--check-only"], 90).context("after a new start")?;
    Ok(())
}

/// H131: a member's file system is full: Capacity Exceeded, the member isn't faulted, and space makes it go on.
fn member_full(folder: &Path, network: &Network) -> Result<()> {
    let mut bench = Bench::new(folder, network, 1)?;
    bench.fault("full")?;
    let text = bench.service.nvmf_fails("verify", &["-z", SIZE, "--seed", "3"], 4, 90)?;
    ensure!(text.contains("Capacity Exceeded"), "the host was told: {}", crate::process::tail(&text, 4));
    ensure!(
        bench.members()?.iter().all(|member| member["state"] == "active"),
        "no space was taken for a broken member"
    );
    bench.fault("none")?;
    // A pool that was told "no space" asks again after a while.
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match bench.service.nvmf_ok("verify", &["-z", SIZE, "--seed", "3"], 90) {
            Ok(_) => break,
            Err(error) if Instant::now() > end => return Err(error.context("with space again")),
            Err(_) => std::thread::sleep(Duration::from_millis(300)),
        }
    }
    bench.service.ensure_up()
}
