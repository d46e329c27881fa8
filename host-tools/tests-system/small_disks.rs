//! Pools on a real file system that gets full, or whose files get cut.
//!
//! DESIGN 3.6: a full file system beneath a pool refuses writes and nothing else.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::network::Network;
use crate::report::Report;
use crate::service::{NQN, Service, Setup, Subsystem, Volume};
use crate::small_disk::SmallDisk;

const DISK_BYTES: u64 = 512 << 20;

pub fn run(report: &mut Report, folder: &Path) -> Result<()> {
    let network = Network::UserMode;
    report.check("cut_where_nothing_was", || cut(&folder.join("cut"), &network));
    match SmallDisk::unavailable() {
        Some(reason) => report.skip("full_file_system", reason),
        None => drop(report.check("full_file_system", || full(&folder.join("full"), &network))),
    }
    Ok(())
}

fn setup(members: Vec<String>, volumes: [&'static str; 2]) -> Setup {
    let volume = |name| Volume { name, size: "1GiB", block_size: 4096, compression: "none" };
    let namespaces = (1..).zip(volumes).map(|(nsid, name)| (nsid, format!("pool:{name}"), None)).collect();
    Setup {
        members,
        member_size: "256MiB",
        segment_size: "1MiB",
        volumes: volumes.map(volume).into(),
        subsystems: vec![Subsystem { nqn: NQN, namespaces, hosts: Vec::new() }],
        ..Setup::default()
    }
}

fn remarks(service: &Service) -> Result<Vec<String>> {
    let pool = service.ctl(&["pool", "show"])?;
    let members = pool["members"].as_array().context("pool show lists no members")?;
    let texts = members.iter().flat_map(|member| member["remarks"].as_array().cloned().unwrap_or_default());
    Ok(texts.filter_map(|text| text.as_str().map(str::to_owned)).collect())
}

/// Six sparse members share a file system that somebody else fills: Capacity Exceeded for writes; what was acknowledged is
/// there; deallocation, deletion and mounts go on; deletion gives space back.
fn full(folder: &Path, network: &Network) -> Result<()> {
    let disk = SmallDisk::new(folder, DISK_BYTES)?;
    let members = (0..6).map(|index| format!("file:{}", disk.path().join(format!("member{index}")).display()));
    let mut service = Service::start(folder, network, &setup(members.collect(), ["kept", "dropped"]))?;
    let journal = folder.join("journal").display().to_string();
    let load = ["-z", "512MiB", "-b", "64KiB", "--random-percent", "100", "--journal", &journal];
    let check = ["-z", "512MiB", "-b", "64KiB", "--check-journal", &journal];
    service.nvmf_ok("verify", &["--nsid", "2", "-z", "32MiB", "--random-percent", "100", "--seed", "3"], 60)?;
    disk.fill_up()?;
    let text = service.nvmf_fails("verify", &[&load[..], &["--time", "100"]].concat(), 4, 150)?;
    ensure!(text.contains("Capacity Exceeded"), "the host was told: {}", crate::process::tail(&text, 4));
    let told = remarks(&service)?;
    ensure!(told.iter().any(|text| text.contains("file system beneath it is full")), "pool show says {told:?}");
    service.nvmf_ok("verify", &check, 120).context("what was acknowledged")?;
    let deallocate = [&load[..], &["--time", "3", "--deallocate-percent", "100"]].concat();
    service.nvmf_ok("verify", &deallocate, 60).context("deallocating")?;
    for _ in 0..2 {
        service.kill_9()?;
        service.launch().context("a mount on a full file system")?;
        service.nvmf_ok("verify", &check, 120).context("after kill -9")?;
        service.nvmf_ok("verify", &deallocate, 60).context("deallocating after a mount")?;
        disk.fill_up()?;
    }
    ensure!(service.stop()?.success(), "exit status on a full file system");
    service.launch().context("a mount after a clean stop")?;
    let before = disk.free()?;
    service.ctl_do(&["namespace", "remove", NQN, "2"])?;
    service.ctl_do(&["volume", "delete", "dropped"])?;
    let end = Instant::now() + Duration::from_secs(20);
    // What the reserve lacked is taken from it first.
    while disk.free()? < before + (4 << 20) {
        ensure!(Instant::now() < end, "{before} bytes were free before the deletion, {} are after it", disk.free()?);
        std::thread::sleep(Duration::from_millis(100));
    }
    service.nvmf_ok("verify", &check, 120).context("beside the deletion")?;
    ensure!(service.stop()?.success(), "exit status");
    Ok(())
}

/// Three of six members cut behind all that was written: the next start has all of it, says so, and makes them whole.
fn cut(folder: &Path, network: &Network) -> Result<()> {
    let mut service = Service::start(folder, network, &setup(Vec::new(), ["kept", "other"]))?;
    service.nvmf_ok("verify", &["-z", "32MiB", "--random-percent", "100", "--seed", "1"], 60)?;
    ensure!(service.stop()?.success(), "exit status");
    let size = std::fs::metadata(&service.members[0])?.len();
    for index in [0, 2, 5] {
        File::options().write(true).open(&service.members[index])?.set_len(size - (64 << 20))?;
    }
    service.launch()?;
    let told = remarks(&service)?;
    ensure!(told.iter().filter(|text| text.contains("was cut from")).count() == 3, "pool show says {told:?}");
    service.nvmf_ok("verify", &["-z", "32MiB", "--random-percent", "100", "--seed", "1", "--check-only"], 60)?;
    for member in &service.members {
        ensure!(std::fs::metadata(member)?.len() == size, "{} is not as long as it was", member.display());
    }
    let pool: Value = service.ctl(&["pool", "show"])?;
    ensure!(pool["health"]["state"] == "healthy", "{}", pool["health"]);
    ensure!(service.stop()?.success(), "exit status");
    Ok(())
}
