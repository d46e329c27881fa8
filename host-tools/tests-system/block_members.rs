//! A pool on block devices, in a guest: disks with sectors of 4 KiB, odd optimal I/O, boundaries and starts (H108).
//!
//! The service, the host and the devices are all in the guest, as this machine may allow none of those. The checks are shell
//! functions (`guest/in-guest/block.sh`); here stand the disks and the order.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::guest::{Guest, Virtual};
use crate::linux_host::Target;
use crate::network::Network;
use crate::process::run_ok;
use crate::report::Report;
use crate::service::{NQN, binary};

const KERNEL: &str = "6.12";

/// Serial, size in MiB, and what QEMU shall say of it.
const DISKS: &[(&str, u64, &str)] = &[
    ("plain", 192, ""),
    ("sectors", 192, ",logical_block_size=4096,physical_block_size=4096"),
    ("optimal", 192, ",physical_block_size=4096,min_io_size=4096,opt_io_size=45056"),
    ("stripe0", 64, ""),
    ("stripe1", 64, ""),
    ("stripe2", 64, ""),
    ("shifted", 192, ""),
];

/// Name, seconds, script.
const CHECKS: &[(&str, u64, &str)] = &[
    ("formatted_and_served", 240, "block_disks; service_up; unharmed"),
    ("h108_odd_members_carry_a_file_system", 300, "odd_members_carry_a_file_system"),
    ("killed_again_and_again", 600, "killed_again_and_again"),
    ("stopped_and_started", 240, "stopped_and_started"),
    ("in_hugepages", 240, "in_hugepages"),
    ("two_devices_err", 300, "two_devices_err"),
];

pub fn run(report: &mut Report, folder: &Path) -> Result<()> {
    let network = Network::UserMode;
    let shared = folder.join("guest");
    gather(&shared)?;
    let mut devices = Vec::new();
    for (serial, mib, shape) in DISKS {
        let path = folder.join(serial);
        File::create(&path)?.set_len(mib << 20)?;
        // This machine doesn't go down in the test: a flush need not reach its disk.
        let drive = format!("file={},if=none,format=raw,cache=unsafe,id={serial}", path.display());
        devices.extend(["-drive".to_owned(), drive]);
        devices.extend(["-device".to_owned(), format!("virtio-blk-pci,drive={serial},serial={serial}{shape}")]);
    }
    let machine = Virtual { kernel: KERNEL, kernel_arguments: "", devices: &devices };
    let Some(mut guest) = report.value("boot", || Guest::boot_with(&machine, &network, &shared)) else { return Ok(()) };
    println!("        {}", guest.booted());
    let target = Target { address: "127.0.0.1", port: 4420, nqn: NQN, nsid_4k: 1, nsid_512: 2 };
    guest.set_prelude(&format!("{}; . /job/lib/block.sh", target.prelude()));
    for (name, seconds, script) in CHECKS {
        report.check(name, || guest.sh(script, *seconds).map(|_| ()));
    }
    report.check("shut_down", || guest.stop());
    Ok(())
}

/// What the guest needs of ours: the checks, and the programs with the libraries that its initramfs may not have.
pub fn gather(shared: &Path) -> Result<()> {
    crate::linux_host::copy_library(shared)?;
    let programs = shared.join("programs");
    std::fs::create_dir_all(&programs)?;
    for name in ["offload-svc", "offloadctl", "nvmf"] {
        let program = binary(name)?;
        std::fs::copy(&program, programs.join(name)).with_context(|| name.to_owned())?;
        let libraries = run_ok(Command::new("ldd").arg(&program), Duration::from_secs(20))?;
        // Lines such as "libnuma.so.1 => /lib/x86_64-linux-gnu/libnuma.so.1 (0x…)"; libc and its loader belong together.
        let paths = libraries.lines().filter_map(|line| line.split_once(" => ")?.1.split_whitespace().next());
        for path in paths.map(Path::new).filter(|path| path.is_absolute() && !path.ends_with("libc.so.6")) {
            let file_name = path.file_name().context("a library's name")?;
            std::fs::copy(path, programs.join(file_name)).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}
