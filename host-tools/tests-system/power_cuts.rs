//! Power cuts on a real block layer: every write that reached the disk under the members is kept in order (dm-log-writes, in a
//! guest), and disks are made of it as a cut at many moments may leave them: what was not flushed is there, gone or torn.
//!
//! Each of them is mounted by the service on this machine, and must hold what had been acknowledged when the cut came; once seen, a
//! value stays, also when members that were away at the first mount come back. `SLUICE_POWER_CUTS` is the number of cuts,
//! `SLUICE_POWER_LOAD_S` the length of each load, `SLUICE_POWER_SEED` another choice of cuts. `SLUICE_POWER_LOG` is the folder of an
//! earlier run (kept by `SLUICE_TEST_KEEP=1`), to cut its log again; `SLUICE_POWER_ONLY` one cut's number.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use host_tools::journal;
use host_tools::pattern::SplitMix64;

use crate::guest::{Guest, Virtual};
use crate::linux_host::Target;
use crate::network::Network;
use crate::report::Report;
use crate::service::{NQN, Service, Setup, Subsystem, Volume, configuration, find};
use crate::write_log::{Disks, Loss, Slices, WriteLog};

const KERNEL: &str = "6.12";
const MEMBERS: usize = 6;
/// The first member begins somewhere into the disk, so that its flushes are told from those of nobody.
const SLICES: Slices = Slices { first: 2048, sectors: 24 * 2048, count: MEMBERS };
const LOG_BYTES: u64 = 8 << 30;
/// What a member's superblocks lie in.
const SUPERBLOCK_AREA_BYTES: u64 = 64 << 10;
const CUTS: u64 = 32;
/// Seconds of each of the three loads, of which the last one is repeated until something was cleaned.
const LOAD_SECONDS: u64 = 10;

/// The ids of the two namespaces.
const NAMESPACES: [&str; 2] = ["1", "2"];

fn setup(members: Vec<String>) -> Setup {
    let volume = |name, block_size| Volume { name, size: "64MiB", block_size, compression: "lz4" };
    Setup {
        members,
        segment_size: "1MiB",
        // Under emulation beside other work even a healthy disk can be slow.
        member_timeout_ms: 30_000,
        volumes: vec![volume("v4k", 4096), volume("v512", 512)],
        subsystems: vec![Subsystem {
            nqn: NQN,
            namespaces: vec![(1, "pool:v4k".to_owned(), None), (2, "pool:v512".to_owned(), None)],
            hosts: Vec::new(),
        }],
        limits: "hosts = 4\nqueues = 4",
        pool: "map_memory = \"32MiB\"\ncheckpoint_interval_ms = 1500".to_owned(),
        ..Setup::default()
    }
}

pub fn run(report: &mut Report, folder: &Path) -> Result<()> {
    let earlier = std::env::var_os("SLUICE_POWER_LOG").map(PathBuf::from);
    if earlier.is_none() && report.value("load_under_a_log_of_writes", || load(folder)).is_none() {
        return Ok(());
    }
    let source = earlier.as_deref().unwrap_or(folder);
    report.check("what_was_acknowledged_survives_every_cut", || cut_all(source, folder));
    Ok(())
}

/// Runs the load in a guest; then `folder` holds the log, and in `guest` the journals and the pool's key.
fn load(folder: &Path) -> Result<()> {
    let network = Network::UserMode;
    let shared = folder.join("guest");
    crate::block_members::gather(&shared)?;
    let members: Vec<String> = (0..MEMBERS).map(|index| format!("block:/dev/mapper/member{index}")).collect();
    let here = Path::new("/tmp/service");
    // The host is in the guest as well.
    std::fs::write(
        shared.join("config.toml"),
        configuration(here, &network, 4420, &members, &setup(members.clone()))?,
    )?;
    let mut devices = Vec::new();
    let members_bytes = (SLICES.first + SLICES.sectors * MEMBERS as u64) * 512;
    for (serial, bytes) in [("members", members_bytes), ("log", LOG_BYTES)] {
        let path = folder.join(serial);
        File::create(&path)?.set_len(bytes)?;
        // What the guest is told of the disk's cache counts; this machine doesn't go down.
        let drive = format!("file={},if=none,format=raw,cache=unsafe,id={serial}", path.display());
        devices.extend(["-drive".to_owned(), drive]);
        // One queue: flushes end in the order in which they began.
        devices.extend(["-device".to_owned(), format!("virtio-blk-pci,drive={serial},serial={serial},num-queues=1")]);
    }
    let machine = Virtual { kernel: KERNEL, kernel_arguments: "", devices: &devices };
    let mut guest = Guest::boot_with(&machine, &network, &shared)?;
    println!("        {}", guest.booted());
    let target = Target { address: "127.0.0.1", port: 4420, nqn: NQN, nsid_4k: 1, nsid_512: 2 };
    guest.set_prelude(&format!("{}; . /job/lib/block.sh; . /job/lib/power.sh", target.prelude()));
    guest.sh(&format!("power_members {} {}", SLICES.first, SLICES.sectors), 60)?;
    let seconds = variable("SLUICE_POWER_LOAD_S")?.unwrap_or(LOAD_SECONDS);
    guest.sh(&format!("power_load {seconds}"), 600 + 10 * seconds)?;
    guest.sh("power_off", 60)?;
    guest.stop()
}

/// What is done with the disks after a cut.
#[derive(Debug, Clone, Copy)]
enum Then {
    /// Mounted and compared.
    Mount,
    /// And killed, and mounted once more.
    MountTwice,
    /// Two members are away at the mount and come back for the next one.
    Without(usize, usize),
}

#[derive(Debug)]
struct Cut {
    number: u64,
    /// The log's entry that no longer came.
    end: usize,
    loss: Loss,
    then: Then,
    seed: u64,
}

fn variable(name: &str) -> Result<Option<u64>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    text.parse().map(Some).with_context(|| format!("{name}={text}"))
}

/// Moments all over the log, every third one around a write of a superblock; in the log's order.
fn plan(log: &WriteLog, near: &[usize], count: u64) -> Result<Vec<Cut>> {
    let mark = |name: &str| log.entries.iter().position(|entry| entry.label.as_deref() == Some(name));
    let first = mark("serving").context("the log has no mark that the service is up")?;
    let near: Vec<usize> = near.iter().copied().filter(|entry| *entry > first).collect();
    ensure!(near.len() > 20, "only {} writes of superblocks in the log", near.len());
    let whole = u64::try_from(log.entries.len())?;
    let seed = variable("SLUICE_POWER_SEED")?.unwrap_or(1);
    let mut cuts = Vec::new();
    for number in 0..count {
        let mut random = SplitMix64(seed.rotate_left(32) ^ number);
        let end = if number == 0 {
            // Everything: the clean stop at the end.
            log.entries.len()
        } else if number % 3 == 0 {
            near[usize::try_from(random.below(near.len() as u64))?] + usize::try_from(random.below(4))?
        } else {
            first + usize::try_from(random.below(whole - first as u64))?
        };
        let away = usize::try_from(random.below(MEMBERS as u64))?;
        let other = (away + 1 + usize::try_from(random.below(MEMBERS as u64 - 1))?) % MEMBERS;
        let then = [Then::Mount, Then::MountTwice, Then::Without(away, other)][usize::try_from(number / 3 % 3)?];
        let loss = if number % 5 == 0 { Loss::None } else { Loss::Any };
        cuts.push(Cut { number, end: end.min(log.entries.len()), loss, then, seed: random.next() });
    }
    cuts.sort_by_key(|cut| cut.end);
    Ok(cuts)
}

#[derive(Default)]
struct Figures {
    cuts: u64,
    sectors_lost: u64,
    clean_mounts: u64,
    longest: Duration,
}

fn cut_all(source: &Path, folder: &Path) -> Result<()> {
    let log = WriteLog::open(&source.join("log"))?;
    let mut disks = Disks::new(&log, SLICES, &folder.join("flushed"))?;
    let near = disks.near_the_start(SUPERBLOCK_AREA_BYTES);
    let count = variable("SLUICE_POWER_CUTS")?.unwrap_or(CUTS);
    let only = variable("SLUICE_POWER_ONLY")?;
    println!("        {} entries in the log, {} of them superblocks", log.entries.len(), near.len());
    let (mut figures, mut failures) = (Figures::default(), Vec::new());
    for cut in plan(&log, &near, count)?.iter().filter(|cut| only.is_none_or(|only| cut.number == only)) {
        let place = folder.join(format!("cut{}", cut.number));
        match survives(&log, &mut disks, cut, &source.join("guest"), &place, &mut figures) {
            Ok(()) => std::fs::remove_dir_all(&place)?,
            Err(error) => {
                println!("        {cut:?}: {error:#}");
                failures.push(cut.number);
                // What failed stays for a look at it, but not so much that the disk gets full.
                if failures.len() > 8 {
                    std::fs::remove_dir_all(&place)?;
                }
            }
        }
    }
    let Figures { cuts, sectors_lost, clean_mounts, longest } = figures;
    println!(
        "        {cuts} cuts, {sectors_lost} sectors lost in them, {clean_mounts} mounts as after a clean stop, longest start {longest:.1?}"
    );
    ensure!(failures.is_empty(), "{} cuts of {cuts} failed: {failures:?}", failures.len());
    ensure!(cuts > 0 && (sectors_lost > 0 || only.is_some()), "nothing was tried");
    Ok(())
}

/// How long the journals were when what stands before `end` was durable for certain.
fn promised(log: &WriteLog, end: usize) -> Result<[u64; 2]> {
    let label = log.entries[..end].iter().rev().find_map(|entry| entry.label.as_deref()?.strip_prefix("acknowledged:"));
    let Some((first, second)) = label.and_then(|sizes| sizes.split_once(':')) else { return Ok([0, 0]) };
    Ok([first.parse()?, second.parse()?])
}

fn survives(
    log: &WriteLog,
    disks: &mut Disks,
    cut: &Cut,
    loaded: &Path,
    folder: &Path,
    figures: &mut Figures,
) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let paths: Vec<PathBuf> = (0..MEMBERS).map(|index| folder.join(format!("member{index}"))).collect();
    figures.cuts += 1;
    figures.sectors_lost += disks.cut(cut.end, cut.loss, cut.seed, &paths)?;
    std::fs::copy(loaded.join("pool.key"), folder.join("pool.key"))?;
    for (nsid, bytes) in NAMESPACES.iter().zip(promised(log, cut.end)?) {
        journal::as_of(&loaded.join(format!("journal{nsid}")), bytes, &folder.join(format!("journal{nsid}")))?;
    }
    let aside = |index: usize| paths[index].with_extension("away");
    if let Then::Without(one, other) = cut.then {
        std::fs::rename(&paths[one], aside(one))?;
        std::fs::rename(&paths[other], aside(other))?;
    }
    let members = paths.iter().map(|path| format!("file:{}", path.display())).collect();
    let network = Network::UserMode;
    let start = Instant::now();
    let mut service = Service::start(folder, &network, &setup(members))?;
    figures.longest = figures.longest.max(start.elapsed());
    let pool = service.ctl(&["pool", "show"])?;
    match pool["mount"]["kind"].as_str() {
        Some("clean") => figures.clean_mounts += 1,
        Some("recovered") => {}
        kind => bail!("the mount is {kind:?}: {}", pool["mount"]),
    }
    holds(&service, folder).context("after the cut")?;
    match cut.then {
        Then::Mount => return whole(&service),
        Then::MountTwice => {}
        Then::Without(one, other) => {
            service.kill_9()?;
            std::fs::rename(aside(one), &paths[one])?;
            std::fs::rename(aside(other), &paths[other])?;
            service.launch().context("with the two members that were away")?;
            holds(&service, folder).context("with the two members that were away")?;
            whole(&service)?;
        }
    }
    service.kill_9()?;
    service.launch().context("once more")?;
    holds(&service, folder).context("once more")?;
    whole(&service)
}

fn holds(service: &Service, folder: &Path) -> Result<()> {
    for nsid in NAMESPACES {
        let journal = folder.join(format!("journal{nsid}")).display().to_string();
        let check = ["--nsid", nsid, "-z", "20MiB", "-b", "32KiB", "--check-journal", &journal];
        service.nvmf_ok("verify", &check, 120).with_context(|| format!("namespace {nsid}"))?;
    }
    Ok(())
}

/// Waits until every member is in the set.
fn whole(service: &Service) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let pool = service.ctl(&["pool", "show"])?;
        let members = find(&pool, "members").and_then(|list| list.as_array()).context("pool show lists no members")?;
        if members.len() == MEMBERS && members.iter().all(|member| member["state"] == "active") {
            return Ok(());
        }
        ensure!(Instant::now() < end, "not whole: {members:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
