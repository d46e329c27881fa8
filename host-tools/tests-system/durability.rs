//! What is acknowledged stays, whatever ends the service; what rests on the members is not what the host wrote; a full
//! pool says so and recovers.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::network::Network;
use crate::report::Report;
use crate::service::{NQN, Service, Setup, Subsystem, Volume, find};

pub fn run(report: &mut Report, folder: &Path) -> Result<()> {
    let network = Network::UserMode;
    report.check("at_rest", || at_rest(&folder.join("rest"), &network));
    report.check("sigterm_keeps_everything", || restart(&folder.join("restart"), &network));
    report.check("kill_9_loop", || kill_9_loop(&folder.join("kill"), &network));
    report.check("without_io_uring", || without_io_uring(&folder.join("threads"), &network));
    report.check("as_an_ordinary_user", || as_an_ordinary_user(&folder.join("user"), &network));
    report.check("h128_full_pool", || full_pool(&folder.join("full"), &network));
    report.check("overwritten_many_times", || overwritten(&folder.join("overwritten"), &network));
    Ok(())
}

/// No plaintext and no key in any member; text shrinks, what can't shrink is stored raw.
fn at_rest(folder: &Path, network: &Network) -> Result<()> {
    let setup = Setup { member_size: "128MiB", ..Setup::default() };
    let mut service = Service::start(folder, network, &setup)?;
    let mode = std::fs::metadata(folder.join("pool.key"))?.permissions().mode() & 0o777;
    ensure!(mode == 0o600, "the key file has mode {mode:o}");
    let pattern = b"The quick brown fox knows a pattern that nobody else writes. ";
    let text = folder.join("text");
    File::create(&text)?.write_all(&pattern.repeat((8 << 20) / pattern.len()))?;
    let noise = folder.join("noise");
    std::io::copy(&mut File::open("/dev/urandom")?.take(8 << 20), &mut File::create(&noise)?)?;
    let path = |path: &Path| path.display().to_string();
    let used = |service: &Service| -> Result<u64> {
        let volumes = service.ctl(&["volume", "list"])?;
        find(&volumes, "stored_bytes").and_then(Value::as_u64).context("volume list has no stored_bytes")
    };
    service.nvmf_ok("write", &["-d", &path(&text)], 60)?;
    let after_text = used(&service)?;
    ensure!(after_text < 2 << 20, "8 MiB of repeated text take {after_text} bytes");
    service.nvmf_ok("write", &["--offset", "64MiB", "-d", &path(&noise)], 60)?;
    let raw = used(&service)? - after_text;
    ensure!((8 << 20..9 << 20).contains(&raw), "8 MiB of noise take {raw} bytes");
    for (offset, source) in [("0", &text), ("64MiB", &noise)] {
        let back = folder.join("back");
        let length = std::fs::metadata(source)?.len().to_string();
        service.nvmf_ok("read", &["--offset", offset, "-z", &length, "-d", &path(&back)], 60)?;
        ensure!(std::fs::read(&back)? == std::fs::read(source)?, "{} came back changed", source.display());
    }
    ensure!(service.stop()?.success(), "exit status");
    let key = std::fs::read(folder.join("pool.key"))?;
    let noise_head = std::fs::read(&noise)?[..32].to_vec();
    for member in &service.members {
        let bytes = std::fs::read(member)?;
        ensure!(!contains(&bytes, &pattern[..24]), "{} holds plaintext", member.display());
        ensure!(!contains(&bytes, &noise_head), "{} holds the incompressible data in clear", member.display());
        ensure!(!contains(&bytes, &key), "{} holds the key", member.display());
    }
    Ok(())
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    memchr::memmem::find(bytes, needle).is_some()
}

fn restart(folder: &Path, network: &Network) -> Result<()> {
    let mut service = Service::start(folder, network, &Setup::default())?;
    service.nvmf_ok("verify", &["-z", "32MiB", "--seed", "1"], 60)?;
    service.nvmf_ok("verify", &["--nsid", "2", "-z", "8MiB", "-b", "16KiB", "--seed", "2"], 60)?;
    let status = service.stop()?;
    ensure!(status.success(), "exit status {status}");
    service.launch()?;
    let pool = service.ctl(&["pool", "show"])?;
    ensure!(pool["mount"]["kind"] == "clean", "the mount after SIGTERM: {}", pool["mount"]);
    service.nvmf_ok("verify", &["-z", "32MiB", "--seed", "1", "--check-only"], 60)?;
    service.nvmf_ok("verify", &["--nsid", "2", "-z", "8MiB", "-b", "16KiB", "--seed", "2", "--check-only"], 60)?;
    ensure!(service.stop()?.success(), "exit status");
    Ok(())
}

/// kill -9 at moments spread over a load on both block sizes: every write that was acknowledged is there, and nothing
/// that was read once goes back.
fn kill_9_loop(folder: &Path, network: &Network) -> Result<()> {
    let mut service = Service::start(folder, network, &Setup::default())?;
    let journals = [folder.join("journal1"), folder.join("journal2")].map(|path| path.display().to_string());
    let mut longest = Duration::ZERO;
    // Moments in ms, from the first writes to well into checkpoints and cleaning; fixed, so that a run can be repeated.
    for pause in [150, 700, 1900, 350, 2600, 1100, 60, 3300] {
        let start = |nsid: &str, journal: &str, block: &str| {
            let arguments = [
                "--nsid",
                nsid,
                "-z",
                "64MiB",
                "-b",
                block,
                "--journal",
                journal,
                "--time",
                "60",
                "-i",
                "2",
                "--zeroes-percent",
                "5",
                "--deallocate-percent",
                "5",
            ];
            service.nvmf_spawn("verify", &arguments, "load.log")
        };
        let mut loads = [start("1", &journals[0], "16KiB")?, start("2", &journals[1], "4KiB")?];
        std::thread::sleep(Duration::from_millis(500 + pause));
        service.kill_9()?;
        for load in &mut loads {
            load.wait(Duration::from_secs(60)).context("a host whose target died")?;
        }
        longest = longest.max(service.launch()?);
        for (nsid, journal, block) in [("1", &journals[0], "16KiB"), ("2", &journals[1], "4KiB")] {
            let arguments = ["--nsid", nsid, "-z", "64MiB", "-b", block, "--check-journal", journal];
            service.nvmf_ok("verify", &arguments, 120).with_context(|| format!("kill after {pause} ms"))?;
        }
        let pool = service.ctl(&["pool", "show"])?;
        ensure!(pool["mount"]["kind"] == "recovered", "the mount after kill -9: {}", pool["mount"]);
    }
    println!("        longest time from start to serving after kill -9: {longest:.1?}");
    ensure!(service.stop()?.success(), "exit status");
    Ok(())
}

/// Where the kernel has no io_uring for it, the service says so once, with what to do, and
/// serves all the same; what it acknowledges is as durable.
fn without_io_uring(folder: &Path, network: &Network) -> Result<()> {
    let setup = Setup { io_uring: false, ..Setup::default() };
    let mut service = Service::start(folder, network, &setup)?;
    let log = service.log();
    let told: Vec<&str> = log.lines().filter(|line| line.contains("no io_uring")).collect();
    ensure!(told.len() == 1 && told[0].contains("kernel.io_uring_disabled=0"), "it says: {told:?}");
    let journal = folder.join("journal").display().to_string();
    let load = ["-z", "64MiB", "-b", "16KiB", "--journal", &journal, "--time", "60", "-i", "2"];
    let mut host = service.nvmf_spawn("verify", &load, "load.log")?;
    std::thread::sleep(Duration::from_millis(1500));
    service.kill_9()?;
    host.wait(Duration::from_secs(60)).context("a host whose target died")?;
    service.launch()?;
    service.nvmf_ok("verify", &["-z", "64MiB", "-b", "16KiB", "--check-journal", &journal], 120)?;
    ensure!(service.stop()?.success(), "exit status");
    Ok(())
}

/// Without root's rights: served, killed, recovered, and stopped in order.
fn as_an_ordinary_user(folder: &Path, network: &Network) -> Result<()> {
    let mut service = Service::start(folder, network, &Setup { ordinary_user: true, ..Setup::default() })?;
    let status = std::fs::read_to_string(format!("/proc/{}/status", service.id()?))?;
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).map(str::trim);
    ensure!(capabilities.is_some_and(|set| set.bytes().all(|digit| digit == b'0')), "capabilities: {capabilities:?}");
    service.nvmf_ok("verify", &["-z", "32MiB", "--seed", "3"], 60)?;
    service.kill_9()?;
    service.launch()?;
    service.nvmf_ok("verify", &["-z", "32MiB", "--seed", "3", "--check-only"], 60)?;
    ensure!(service.stop()?.success(), "exit status");
    Ok(())
}

fn small_pool() -> Setup {
    Setup {
        member_size: "96MiB",
        segment_size: "1MiB",
        volumes: vec![Volume { name: "thin", size: "4GiB", block_size: 4096, compression: "none" }],
        subsystems: vec![Subsystem {
            nqn: NQN,
            namespaces: vec![(1, "pool:thin".to_owned(), None), (3, "mem:16MiB".to_owned(), Some(4096))],
            hosts: Vec::new(),
        }],
        ..Setup::default()
    }
}

/// H128: ten times over-committed: Capacity Exceeded, every acknowledged block is there, deallocating brings space back.
fn full_pool(folder: &Path, network: &Network) -> Result<()> {
    let mut service = Service::start(folder, network, &small_pool())?;
    let journal = folder.join("journal").display().to_string();
    let load = |more: &[&'static str]| -> Vec<&str> {
        let mut arguments = vec!["-z", "1GiB", "-b", "64KiB", "--random-percent", "100", "--journal", &journal];
        arguments.extend_from_slice(more);
        arguments
    };
    let text = service.nvmf_fails("verify", &load(&["--time", "100"]), 4, 150)?;
    ensure!(text.contains("Capacity Exceeded"), "the host was told: {}", crate::process::tail(&text, 4));
    service.ensure_up()?;
    let check = ["-z", "1GiB", "-b", "64KiB", "--check-journal", &journal];
    service.nvmf_ok("verify", &check, 120).context("what a full pool holds")?;
    let free = |service: &Service| -> Result<u64> {
        let pool = service.ctl(&["pool", "show"])?;
        pool["space"]["free_bytes"].as_u64().context("pool show has no free_bytes")
    };
    let full = free(&service)?;
    service.nvmf_ok("verify", &load(&["--time", "4", "--deallocate-percent", "100"]), 60).context("deallocating")?;
    // It shows with the next checkpoint, every 30 seconds.
    let (mut freed, end) = (free(&service)?, Instant::now() + Duration::from_secs(60));
    while freed <= full + (16 << 20) {
        ensure!(Instant::now() < end, "free: {full} bytes when full, {freed} after deallocating");
        std::thread::sleep(Duration::from_millis(200));
        freed = free(&service)?;
    }
    service.nvmf_ok("verify", &check, 120).context("after deallocating")?;
    service.nvmf_ok("verify", &load(&["--time", "3", "--deallocate-percent", "60"]), 60).context("writes go on")?;
    service.kill_9()?;
    service.launch()?;
    service.nvmf_ok("verify", &check, 120).context("after kill -9")?;
    Ok(())
}

/// A pool overwritten several times over keeps serving, and its sums add up to the byte (H127).
fn overwritten(folder: &Path, network: &Network) -> Result<()> {
    let mut service = Service::start(folder, network, &small_pool())?;
    let count = (4 * (384 << 20) / (64 << 10)).to_string();
    let load = ["--rw", "randwrite", "-b", "64KiB", "-z", "128MiB", "--random-percent", "100", "--count", &count];
    service.nvmf_ok("perf", &load, 240)?;
    service.nvmf_ok("verify", &["-z", "128MiB", "--random-percent", "100", "--seed", "9"], 120)?;
    let pool = service.ctl(&["pool", "show"])?;
    let number = |key: &str| pool["space"][key].as_u64().with_context(|| format!("pool show has no {key}"));
    let usable = number("used_bytes")? + number("free_bytes")?;
    ensure!(usable == number("usable_bytes")?, "H127: used and free are {usable} bytes: {}", pool["space"]);
    let raw = usable + number("parity_bytes")? + number("metadata_bytes")? + number("reserve_bytes")?;
    ensure!(raw == number("raw_bytes")? && raw == 6 * (96 << 20), "H127: {raw} bytes in all: {}", pool["space"]);
    ensure!(pool["counters"]["segments_cleaned"].as_u64() > Some(0), "nothing was cleaned");
    ensure!(service.stop()?.success(), "exit status");
    service.launch()?;
    service.nvmf_ok("verify", &["-z", "128MiB", "--random-percent", "100", "--seed", "9", "--check-only"], 120)?;
    Ok(())
}
