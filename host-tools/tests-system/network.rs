//! Where the service listens so that a guest reaches it: a network namespace of our own with a tap (fast, needs root), or
//! the machine's loopback behind QEMU's user-mode network (slow, needs nothing).
//!
//! Must not know who talks over it. The namespace goes when its owner goes.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::process::{mortal, run_ok};

const TAP: &str = "sluicetap0";
const PREFIX: &str = "sluice-test-";

pub enum Network {
    Namespace { name: String },
    UserMode,
}

impl Network {
    /// The fast one where this machine allows it.
    pub fn new() -> Result<Network> {
        if !nix::unistd::geteuid().is_root() {
            return Ok(Network::UserMode);
        }
        remove_stale()?;
        let network = Network::Namespace { name: format!("{PREFIX}{}", std::process::id()) };
        if let Err(error) = network.up() {
            println!("        no network namespace with a tap here, so over QEMU's user-mode network: {error:#}");
            return Ok(Network::UserMode);
        }
        Ok(network)
    }

    fn up(&self) -> Result<()> {
        let Network::Namespace { name } = self else { return Ok(()) };
        let ip = |arguments: &[&str]| run_ok(Command::new("ip").args(arguments), Duration::from_secs(10));
        ip(&["netns", "add", name])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        ip(&["-n", name, "tuntap", "add", "dev", TAP, "mode", "tap", "vnet_hdr"])?;
        ip(&["-n", name, "addr", "add", "192.168.77.1/24", "dev", TAP])?;
        // H10 asks for jumbo frames; they also spare the emulated guest most of its interrupts.
        ip(&["-n", name, "link", "set", TAP, "mtu", "9000", "up"])?;
        Ok(())
    }

    /// The address that the service listens on.
    pub fn listen_address(&self) -> &'static str {
        match self {
            Network::Namespace { .. } => "192.168.77.1",
            Network::UserMode => "127.0.0.1",
        }
    }

    /// The same place as the guest sees it.
    pub fn address_from_guest(&self) -> &'static str {
        match self {
            Network::Namespace { .. } => "192.168.77.1",
            Network::UserMode => "10.0.2.2",
        }
    }

    pub fn guest_kernel_arguments(&self) -> &'static str {
        match self {
            Network::Namespace { .. } => "rig.ip=192.168.77.2/24 rig.mtu=9000",
            Network::UserMode => "rig.ip=10.0.2.15/24 rig.gw=10.0.2.2",
        }
    }

    pub fn qemu_arguments(&self) -> Vec<String> {
        let netdev = match self {
            Network::Namespace { .. } => format!("tap,id=n0,ifname={TAP},script=no,downscript=no"),
            Network::UserMode => "user,id=n0".to_owned(),
        };
        ["-netdev", &netdev, "-device", "virtio-net-pci,netdev=n0,romfile="].map(str::to_owned).to_vec()
    }

    /// A command that will run where the service is reachable.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        match self {
            Network::Namespace { name } => {
                // `ip netns exec` becomes the program, so the process id is the program's own.
                let mut command = mortal("ip");
                command.args(["netns", "exec", name]).arg(program);
                command
            }
            Network::UserMode => mortal(program),
        }
    }
}

/// Namespaces of test runs that were killed: their names hold the process id.
fn remove_stale() -> Result<()> {
    let list = run_ok(Command::new("ip").args(["netns", "list"]), Duration::from_secs(10))?;
    for name in list.lines().filter_map(|line| line.split_whitespace().next()) {
        let Some(id) = name.strip_prefix(PREFIX) else { continue };
        if !std::path::Path::new("/proc").join(id).exists() {
            run_ok(Command::new("ip").args(["netns", "del", name]), Duration::from_secs(10))?;
        }
    }
    Ok(())
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Network::Namespace { name } = self {
            let _ = run_ok(Command::new("ip").args(["netns", "del", name]), Duration::from_secs(10));
        }
    }
}
