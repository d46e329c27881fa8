//! A real Linux host against the service: one guest a kernel, many checks each.
//!
//! The checks themselves are shell functions (`guest/in-guest/checks.sh`) and run in the guest; here stands their order,
//! their time limits, and what the machine does to the service meanwhile.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::guest::Guest;
use crate::network::Network;
use crate::report::Report;
use crate::service::{NQN, Service, Setup};

/// The kernels that a Linux host is tested with.
pub const KERNELS: [&str; 2] = ["6.1", "6.12"];

/// What a guest needs to know of a target.
pub struct Target<'a> {
    pub address: &'a str,
    pub port: u16,
    pub nqn: &'a str,
    pub nsid_4k: u32,
    pub nsid_512: u32,
}

impl Target<'_> {
    pub fn prelude(&self) -> String {
        let Target { address, port, nqn, nsid_4k, nsid_512 } = self;
        format!(
            "ADDR={address} PORT={port} NQN={nqn} NS4K={nsid_4k} NS512={nsid_512}; . /job/lib/host.sh; . /job/lib/checks.sh"
        )
    }
}

/// Boots a guest with the shell side of the checks in place.
fn boot(kernel: &str, network: &Network, folder: &Path, kernel_arguments: &str) -> Result<Guest> {
    copy_library(folder)?;
    Guest::boot(kernel, network, folder, kernel_arguments)
}

/// Puts the shell side into a guest's folder.
pub fn copy_library(folder: &Path) -> Result<()> {
    let library = folder.join("lib");
    std::fs::create_dir_all(&library)?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/in-guest");
    for name in ["host.sh", "checks.sh", "nvmet.sh", "block.sh", "power.sh"] {
        std::fs::copy(source.join(name), library.join(name)).with_context(|| name.to_owned())?;
    }
    Ok(())
}

/// Checks that any target must pass; (name, seconds, script).
const COMMON: &[(&str, u64, &str)] = &[
    ("discover", 30, "discover"),
    ("h27_persistent_discovery", 60, "discover_persistent"),
    ("digests_and_queues", 240, "digests_and_queues"),
    ("h11_digests_while_neighbours_change", 120, "digests_under_overwrite"),
    ("h10_fio_verify_4k", 240, "fio_4k"),
    ("h164_discard", 60, "discard"),
    ("ext4", 150, "filesystem ext4 $NS4K"),
    ("xfs", 150, "filesystem xfs $NS4K"),
    ("reconnect", 90, "reconnect_loop"),
    ("h25_keep_alive_under_load", 120, "keep_alive_under_load"),
];

/// Further ones for the service; before and after those above, connected with four queues.
const FIRST: &[(&str, u64, &str)] = &[
    ("connect_quietly", 60, "connect_quietly"),
    ("nvme_cli_mandatory", 120, "cli_mandatory"),
    ("nvme_cli_optional", 240, "cli_optional"),
];
const LAST: &[(&str, u64, &str)] = &[
    ("reconnect_for_more", 60, "disconnect_all; connect -i 4"),
    ("fio_verify_512", 180, "fio_512"),
    ("compare_zeroes_dsm_flush_verify", 90, "commands"),
    ("h17_h125_limits", 60, "limits"),
    ("ext4_on_512_byte_blocks", 150, "filesystem ext4 $NS512"),
];

/// One kernel against the service, and what it does when the target or the host goes.
pub fn run(report: &mut Report, folder: &Path, kernel: &str) -> Result<()> {
    report.group(&format!("linux-{kernel}"));
    let network = Network::new()?;
    let mut service = Service::start(&folder.join("service"), &network, &Setup::default())?;
    let guest = report.value("boot", || boot(kernel, &network, &folder.join("guest"), ""));
    let Some(mut guest) = guest else { return Ok(()) };
    println!("        {}", guest.booted());
    let target =
        Target { address: network.address_from_guest(), port: service.port(), nqn: NQN, nsid_4k: 1, nsid_512: 2 };
    guest.set_prelude(&target.prelude());
    if matches!(network, Network::Namespace { .. }) {
        report.check("connect_all", || guest.sh("connect_all", 60).map(|_| ()));
    } else {
        report.skip(
            "connect_all",
            "needs root: behind user-mode networking the discovery log's address isn't the guest's",
        );
    }
    run_all(report, &mut guest, FIRST);
    run_all(report, &mut guest, COMMON);
    run_all(report, &mut guest, LAST);
    report.check("h52_resize_shows_by_itself", || resize(&mut guest, &service));
    report.check("h178_namespace_comes_and_goes", || namespace_comes_and_goes(&mut guest, &service));
    report.check("h137_snapshot_under_a_mounted_file_system", || snapshot(&mut guest, &service));
    report.check("h176_target_killed_and_restarted", || outage(&mut guest, &mut service, Outage::Kill));
    report.check("target_stopped_and_restarted", || outage(&mut guest, &mut service, Outage::Stop));
    report.check("target_is_up", || service.ensure_up());
    report.check("host_killed_while_writing", || host_killed(guest, &mut service, &folder.join("blocks")));
    Ok(())
}

/// H52: a volume that grows is seen by a connected host without a rescan.
fn resize(guest: &mut Guest, service: &Service) -> Result<()> {
    service.ctl_do(&["volume", "resize", "v4k", "1280MiB"])?;
    guest.sh(&format!("size_becomes $NS4K {} 3", 1280u64 << 20), 30)?;
    Ok(())
}

/// H178: a namespace that is added is seen, and one that is removed goes.
fn namespace_comes_and_goes(guest: &mut Guest, service: &Service) -> Result<()> {
    for _ in 0..3 {
        service.ctl_do(&["namespace", "add", NQN, "9", "mem:32MiB"])?;
        guest.sh("n=$(namespace 9 3); dd if=/dev/urandom of=$n bs=64k count=16 oflag=direct", 30)?;
        service.ctl_do(&["namespace", "remove", NQN, "9"])?;
        guest.sh("namespace_gone 9 3", 30)?;
    }
    Ok(())
}

/// A snapshot under a file system that is written to: a clone of it mounts, with every file that was synced before. The namespaces
/// come up by themselves, the snapshot's read-only; deleting them leaves the origin as it is.
fn snapshot(guest: &mut Guest, service: &Service) -> Result<()> {
    guest.sh("disconnect_all; connect -i 4", 60)?;
    let writer = guest.start("ext4_writer 12", Duration::from_secs(90))?;
    std::thread::sleep(Duration::from_secs(5));
    guest.sh("cp /tmp/synced /tmp/before", 30)?;
    service.ctl_do(&["volume", "snapshot", "v4k", "snap"])?;
    service.ctl_do(&["volume", "clone", "snap", "copy"])?;
    service.ctl_do(&["namespace", "add", NQN, "9", "pool:snap"])?;
    guest.sh("namespace 9 5", 30)?;
    service.ctl_do(&["namespace", "add", NQN, "10", "pool:copy"])?;
    guest.wait(writer)?;
    println!("        {}", guest.sh("snapshot_check 9 10", 90)?.trim_end());
    for (nsid, volume) in [("9", "snap"), ("10", "copy")] {
        service.ctl_do(&["namespace", "remove", NQN, nsid])?;
        guest.sh(&format!("namespace_gone {nsid} 5"), 30)?;
        service.ctl_do(&["volume", "delete", volume])?;
    }
    // A kernel that looks at a namespace in the moment in which it goes says so, and means nothing by it.
    guest.sh("dmesg_mark; ext4_writer_check", 90)?;
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Outage {
    Kill,
    Stop,
}

/// The target goes away under a mounted ext4 and comes back: the host reconnects by itself, stays mounted, has every file.
fn outage(guest: &mut Guest, service: &mut Service, outage: Outage) -> Result<()> {
    guest.sh("disconnect_all; dmesg_mark; connect -i 4 -k 5 --reconnect-delay=1 --ctrl-loss-tmo=600", 60)?;
    let writer = guest.start("ext4_writer 24", Duration::from_secs(120))?;
    let end = Instant::now() + Duration::from_secs(30);
    while !guest.output(&writer).contains("writing") {
        ensure!(Instant::now() < end, "the writer doesn't start: {}", guest.output(&writer));
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(Duration::from_secs(6));
    match outage {
        Outage::Kill => service.kill_9()?,
        Outage::Stop => ensure!(service.stop()?.success(), "exit status"),
    }
    std::thread::sleep(Duration::from_secs(4));
    let served_after = service.launch()?;
    println!("        served {served_after:.1?} after its start");
    let files = guest.wait(writer)?;
    println!("        {}", files.lines().last().unwrap_or_default());
    guest.sh("ext4_writer_check", 90)?;
    Ok(())
}

/// The host's plug is pulled in the middle of its writes: the target gives back what it held, and what the host was told
/// is there.
fn host_killed(mut guest: Guest, service: &mut Service, scratch: &Path) -> Result<()> {
    guest.sh("disconnect_all; connect -i 4 -k 3", 60)?;
    let writer = guest.start("block_writer", Duration::from_secs(120))?;
    let end = Instant::now() + Duration::from_secs(100);
    let written = |guest: &Guest| guest.output(&writer).lines().filter_map(|line| line.parse::<u64>().ok()).max();
    while written(&guest).is_none_or(|last| last < 40) {
        ensure!(Instant::now() < end, "the writer is slow: {:?}", written(&guest));
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = written(&guest).unwrap_or_default();
    guest.kill()?;
    let length = (4096 * (before + 1)).to_string();
    let file = scratch.display().to_string();
    service.nvmf_ok("read", &["--nsid", "1", "-z", &length, "-d", &file], 30)?;
    let bytes = std::fs::read(scratch)?;
    for (index, block) in bytes.chunks(4096).enumerate() {
        let unit = format!("block{index:011}");
        ensure!(
            block.chunks(16).all(|chunk| chunk == unit.as_bytes()),
            "block {index} of {before} isn't what was acknowledged"
        );
    }
    // No FIN came: only the keep-alive timeout (3 s) tells the target.
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let list = service.ctl(&["subsystem", "list"])?;
        if crate::service::find(&list, "controllers").and_then(|list| list.as_array()).is_some_and(Vec::is_empty) {
            break;
        }
        ensure!(Instant::now() < end, "the dead host's controller is still there: {list}");
        std::thread::sleep(Duration::from_millis(200));
    }
    service.nvmf_ok("verify", &["-z", "16MiB", "--seed", "3"], 60)?;
    service.ensure_up()
}

fn run_all(report: &mut Report, guest: &mut Guest, checks: &[(&str, u64, &str)]) {
    for (name, seconds, script) in checks {
        report.check(name, || guest.sh(script, *seconds).map(|_| ()));
    }
}

/// A target that runs already on this machine's loopback: `SLUICE_TARGET=PORT,NQN,NSID_4K,NSID_512`, both kernels.
pub fn given_target(report: &mut Report, folder: &Path) -> Result<()> {
    let given = std::env::var("SLUICE_TARGET").context("SLUICE_TARGET=PORT,NQN,NSID_4K,NSID_512")?;
    let network = Network::UserMode;
    let prelude = self::given(&network, &given)?;
    let only = std::env::var("SLUICE_GUEST_KERNEL").ok();
    for kernel in KERNELS.into_iter().filter(|kernel| only.as_deref().is_none_or(|only| only == *kernel)) {
        report.group(&format!("given-{kernel}"));
        let Some(mut guest) = report.value("boot", || boot(kernel, &network, &folder.join(kernel), "")) else {
            continue;
        };
        guest.set_prelude(&prelude);
        run_all(report, &mut guest, FIRST);
        run_all(report, &mut guest, COMMON);
        run_all(report, &mut guest, LAST);
        report.check("shut_down", || guest.stop());
    }
    Ok(())
}

/// A script of one's own in a guest: `SLUICE_GUEST_SCRIPT=FILE`, with the checks' functions at hand and `SLUICE_TARGET` too.
pub fn script(report: &mut Report, folder: &Path) -> Result<()> {
    let path = std::env::var("SLUICE_GUEST_SCRIPT").context("SLUICE_GUEST_SCRIPT=FILE")?;
    let script = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let kernel = std::env::var("SLUICE_GUEST_KERNEL").unwrap_or_else(|_| "6.12".to_owned());
    let network = Network::UserMode;
    let mut guest = boot(&kernel, &network, folder, "")?;
    guest.set_prelude(&given(&network, &std::env::var("SLUICE_TARGET").unwrap_or_default())?);
    report.check(&path, || {
        let output = guest.sh(&format!("set -x; {script}"), 600);
        println!("{}", output.as_deref().unwrap_or_default());
        output.map(|_| ())
    });
    guest.stop()
}

/// The prelude for `PORT,NQN,NSID_4K,NSID_512`; without any, a port that nothing answers on.
fn given(network: &Network, target: &str) -> Result<String> {
    let words: Vec<&str> = target.split(',').collect();
    let (port, nqn, nsid_4k, nsid_512) = match words[..] {
        [""] => ("4420", NQN, "1", "2"),
        [port, nqn, nsid_4k, nsid_512] => (port, nqn, nsid_4k, nsid_512),
        _ => bail!("SLUICE_TARGET=PORT,NQN,NSID_4K,NSID_512"),
    };
    let (port, nsid_4k, nsid_512) = (port.parse()?, nsid_4k.parse()?, nsid_512.parse()?);
    Ok(Target { address: network.address_from_guest(), port, nqn, nsid_4k, nsid_512 }.prelude())
}

/// The harness against the kernel's own target, known good: what fails here is the harness's fault.
pub fn selftest(report: &mut Report, folder: &Path) -> Result<()> {
    for kernel in KERNELS {
        report.group(&format!("selftest-{kernel}"));
        let network = Network::new()?;
        let nqn = "nqn.2026-11.test:nvmet";
        let folder = folder.join(kernel);
        // 6.1's own target trips over hardened usercopy when its host sits on the same machine's loopback.
        let arguments = "hardened_usercopy=off";
        let Some(mut guest) = report.value("boot", || boot(kernel, &network, &folder, arguments)) else { continue };
        println!("        {}", guest.booted());
        report.check("nvmet", || {
            guest.sh(&format!(". /job/lib/nvmet.sh; nvmet_up {nqn} 127.0.0.1 4420 500"), 30).map(|_| ())
        });
        guest.set_prelude(&Target { address: "127.0.0.1", port: 4420, nqn, nsid_4k: 1, nsid_512: 1 }.prelude());
        run_all(report, &mut guest, COMMON);
        report.check("shut_down", || guest.stop());
    }
    Ok(())
}
