//! A real Linux host against the service: one guest a kernel, many checks each.
//!
//! The checks themselves are shell functions (`guest/in-guest/checks.sh`) and run in the guest; here stands their order,
//! their time limits, and what the machine does to the service meanwhile.

use std::path::Path;

use anyhow::{Context, Result};

use crate::guest::Guest;
use crate::network::Network;
use crate::report::Report;

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
pub fn boot(kernel: &str, network: &Network, folder: &Path) -> Result<Guest> {
    let library = folder.join("lib");
    std::fs::create_dir_all(&library)?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/in-guest");
    for name in ["host.sh", "checks.sh", "nvmet.sh"] {
        std::fs::copy(source.join(name), library.join(name)).with_context(|| name.to_owned())?;
    }
    Guest::boot(kernel, network, folder)
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

fn run_all(report: &mut Report, guest: &mut Guest, checks: &[(&str, u64, &str)]) {
    for (name, seconds, script) in checks {
        report.check(name, || guest.sh(script, *seconds).map(|_| ()));
    }
}

/// The harness against the kernel's own target, known good: what fails here is the harness's fault.
pub fn selftest(report: &mut Report, folder: &Path) -> Result<()> {
    for kernel in KERNELS {
        report.group(&format!("selftest-{kernel}"));
        let network = Network::new()?;
        let nqn = "nqn.2026-11.test:nvmet";
        let folder = folder.join(kernel);
        let Some(mut guest) = report.value("boot", || boot(kernel, &network, &folder)) else { continue };
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
