//! Many hosts, idle hosts, hostile peers: what one does must not be felt by another, and idleness costs nothing.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::network::Network;
use crate::process::{Owned, tail};
use crate::report::Report;
use crate::service::{NQN, Service, Setup, Subsystem, find};

const HOST_A: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-00000000000a";
const HOST_B: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-00000000000b";

pub fn run(report: &mut Report, folder: &Path) -> Result<()> {
    let network = Network::UserMode;
    report.check("64_hosts_4_queues", || sixty_four(&folder.join("sixty-four"), &network));
    report.check("h149_idle", || idle(&folder.join("idle"), &network));
    report.check("h41_allow_lists", || allow_lists(&folder.join("allow"), &network));
    report.check("hostile_peers", || hostile(&folder.join("hostile"), &network));
    Ok(())
}

fn sixty_four(folder: &Path, network: &Network) -> Result<()> {
    let setup = Setup { limits: "hosts = 80", ..Setup::default() };
    let service = Service::start(folder, network, &setup)?;
    service.nvmf_ok("verify", &["-z", "16MiB", "--seed", "1"], 60)?;
    let mut hosts = Vec::new();
    for index in 0..64 {
        let name = format!("nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-{index:012}");
        let arguments =
            ["-q", &name, "-i", "4", "-z", "16MiB", "--queue-depth", "2", "--time", "15", "--rw", "randread"];
        hosts.push(service.nvmf_spawn("perf", &arguments, &format!("host{index}.log"))?);
    }
    let end = Instant::now() + Duration::from_secs(14);
    let mut most = (0, 0);
    while Instant::now() < end && most < (64, 64 * 4) {
        std::thread::sleep(Duration::from_millis(300));
        most = most.max(connected(&service)?);
    }
    for (index, host) in hosts.iter_mut().enumerate() {
        let status = host.wait(Duration::from_secs(60))?;
        let log = std::fs::read_to_string(folder.join(format!("host{index}.log")))?;
        ensure!(status.success(), "host {index}: {status}: {}", tail(&log, 3));
    }
    ensure!(most == (64, 64 * 4), "at most {} controllers with {} I/O queues at once", most.0, most.1);
    service.nvmf_ok("verify", &["-z", "16MiB", "--seed", "1", "--check-only"], 60)?;
    wait_for_none(&service)
}

/// Controllers of the subsystem, and their I/O queues, as the service counts them.
fn connected(service: &Service) -> Result<(usize, usize)> {
    let status = service.ctl(&["subsystem", "list"])?;
    let controllers =
        find(&status, "controllers").and_then(Value::as_array).context("no controllers in subsystem list")?;
    let queues = controllers
        .iter()
        .map(|controller| match find(controller, "io_queues") {
            Some(Value::Array(queues)) => queues.len(),
            Some(number) => number.as_u64().unwrap_or(0) as usize,
            None => 0,
        })
        .sum();
    Ok((controllers.len(), queues))
}

/// H30: all that the hosts held is given back.
fn wait_for_none(service: &Service) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let now = connected(service)?;
        if now.0 == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{} controllers are left of hosts that are gone", now.0);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// H149: with four hosts connected and nothing to do, under 1 % of a core.
fn idle(folder: &Path, network: &Network) -> Result<()> {
    let service = Service::start(folder, network, &Setup::default())?;
    service.nvmf_ok("verify", &["-z", "16MiB", "--seed", "1"], 60)?;
    // A host that waits for its standard input, connected: as idle as a host gets, keep-alives aside.
    let mut hosts = Vec::new();
    for index in 0..4u32 {
        let name = format!("nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-9000-{index:012}");
        let mut command = service.nvmf("write", NQN, &["-q", &name, "-i", "4", "--offset", "512MiB", "-d", "-"])?;
        hosts.push(Owned::spawn(command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()))?);
    }
    let end = Instant::now() + Duration::from_secs(10);
    while connected(&service)?.0 < 4 {
        ensure!(Instant::now() < end, "only {} of 4 hosts are connected", connected(&service)?.0);
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(Duration::from_secs(2));
    let (before, start) = (service.cpu_seconds()?, Instant::now());
    std::thread::sleep(Duration::from_secs(12));
    let share = 100.0 * (service.cpu_seconds()? - before) / start.elapsed().as_secs_f64();
    println!("        idle with 4 hosts: {share:.2} % of a core");
    ensure!(share < 1.0, "idle with 4 hosts takes {share:.2} % of a core");
    ensure!(connected(&service)?.0 == 4, "idle hosts were dropped");
    Ok(())
}

/// H41: a host sees, and gets into, only what allows it.
fn allow_lists(folder: &Path, network: &Network) -> Result<()> {
    let only_a = "nqn.2026-11.test.sluice:only-a";
    let mut setup = Setup::default();
    setup.subsystems.push(Subsystem {
        nqn: only_a,
        namespaces: vec![(1, "mem:16MiB".to_owned(), Some(512))],
        hosts: vec![HOST_A],
    });
    let mut service = Service::start(folder, network, &setup)?;
    let limit = Duration::from_secs(30);
    for (host, sees) in [(HOST_A, true), (HOST_B, false)] {
        let list = crate::process::run_ok(&mut service.nvmf("discover", NQN, &["-q", host])?, limit)?;
        ensure!(list.contains(NQN), "{host} doesn't see {NQN}");
        ensure!(list.contains(only_a) == sees, "{host} and {only_a}: {}", tail(&list, 12));
        let output = crate::process::run(&mut service.nvmf("identify", only_a, &["-q", host])?, limit)?;
        ensure!(output.status.success() == sees, "{host} connecting to {only_a}: {}", output.status);
    }
    service.ensure_up()
}

/// Peers that break the protocol, stall, and flood, while a host verifies: it never notices, memory stays bounded, and
/// nothing of them is left. What each violation is answered with, the protocol's own tests say.
fn hostile(folder: &Path, network: &Network) -> Result<()> {
    let mut service = Service::start(folder, network, &Setup::default())?;
    service.nvmf_ok("verify", &["-z", "64MiB", "--seed", "1"], 60)?;
    let before = service.resident_kib()?;
    let arguments = [
        "-z",
        "64MiB",
        "--journal",
        &folder.join("journal").display().to_string(),
        "--time",
        "15",
        "-g",
        "-G",
        "-k",
        "2",
    ];
    let mut victim = service.nvmf_spawn("verify", &arguments, "victim.log")?;
    let address = ("127.0.0.1", service.port());
    let connect = || -> Result<TcpStream> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.set_write_timeout(Some(Duration::from_secs(2)))?;
        Ok(stream)
    };
    // Half-open: connected and silent, or silent in the middle of the first PDU.
    let silent: Vec<TcpStream> = (0..32).map(|_| connect()).collect::<Result<_>>()?;
    let halfway: Vec<TcpStream> = (0..32)
        .map(|count| {
            let mut stream = connect()?;
            stream.write_all(&ic_req()[..count * 4])?;
            Ok(stream)
        })
        .collect::<Result<_>>()?;
    // H01 and kin: each is answered (TermReq) and closed; a wrong one is never waited for.
    let mut cases = 0;
    for bytes in bad_starts() {
        let mut stream = connect()?;
        // The target may close while we write: that is an answer too.
        let _ = stream.write_all(&bytes);
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        let timed_out = matches!(&read, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
        ensure!(!timed_out, "{:02x?} is still open after 10 s", &bytes[..bytes.len().min(24)]);
        cases += 1;
    }
    // A flood of connects, each gone at once; half of them with a reset.
    for round in 0..400 {
        let mut stream = connect()?;
        stream.write_all(&ic_req())?;
        if round % 2 == 0 {
            stream.shutdown(Shutdown::Both)?;
        }
    }
    // Sends and never reads.
    let mut slow = connect()?;
    slow.write_all(&ic_req())?;
    for _ in 0..20_000 {
        if slow.write_all(&[0u8; 1024]).is_err() {
            break;
        }
    }
    let status = victim.wait(Duration::from_secs(60))?;
    let log = std::fs::read_to_string(folder.join("victim.log"))?;
    ensure!(status.success(), "the host beside them ended with {status}: {}", tail(&log, 4));
    let check = ["-z", "64MiB", "--check-journal", &folder.join("journal").display().to_string()];
    service.nvmf_ok("verify", &check, 60)?;
    drop((silent, halfway, slow));
    wait_for_none(&service)?;
    let growth = service.resident_kib()?.saturating_sub(before);
    println!("        {cases} bad starts; memory grew by {growth} KiB");
    ensure!(growth < 64 << 10, "memory grew by {growth} KiB");
    service.ensure_up()
}

/// ICReq of NVMe/TCP 1.0 §3.6.2.2: no digests, no alignment.
fn ic_req() -> [u8; 128] {
    let mut pdu = [0; 128];
    (pdu[2], pdu[4]) = (128, 128);
    pdu
}

fn bad_starts() -> Vec<Vec<u8>> {
    let mut cases = Vec::new();
    // Another protocol altogether, and noise.
    cases.push(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(8));
    cases.push((0..512u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect());
    // Every PDU type but ICReq first; lengths that lie.
    for kind in (1..=9).chain([0x20, 0xff]) {
        let mut pdu = ic_req().to_vec();
        pdu[0] = kind;
        cases.push(pdu);
    }
    for (offset, bytes) in [
        (2, vec![0]),
        (2, vec![255]),
        (3, vec![3]),
        (4, vec![7, 0, 0, 0]),
        (4, vec![255; 4]),
        (8, vec![9, 0]),
        (11, vec![255]),
    ] {
        let mut pdu = ic_req().to_vec();
        pdu[offset..offset + bytes.len()].copy_from_slice(&bytes);
        cases.push(pdu);
    }
    // After a good ICReq: a command capsule whose header lies (H01), data that nobody asked for (H04), ICReq again.
    for (kind, header, length, pdo) in [
        (4, 255, 259, 0),
        (4, 0, 72, 0),
        (4, 71, 72, 0),
        (4, 72, u32::MAX, 0),
        (4, 72, 80, 3),
        (6, 24, 4120, 24),
        (0, 128, 128, 0),
        (5, 24, 24, 0),
        (9, 24, 24, 0),
    ] {
        let mut bytes = ic_req().to_vec();
        bytes.extend_from_slice(&[kind, 0, header, pdo]);
        bytes.extend_from_slice(&u32::to_le_bytes(length));
        bytes.resize(128 + 4120, 0);
        cases.push(bytes);
    }
    cases
}
