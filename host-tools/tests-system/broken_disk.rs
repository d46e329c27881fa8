//! A member on a FUSE file that fails on command: the `fault-file` example as a child process.
//!
//! Must not know what is stored on it. Invariant: no mount outlives its owner.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::process::{Owned, append_to, mortal, run_ok};

pub struct BrokenDisk {
    mountpoint: PathBuf,
    process: Owned,
}

impl BrokenDisk {
    /// Whether this machine can have one; if not, why.
    pub fn unavailable() -> Option<&'static str> {
        if !Path::new("/dev/fuse").exists() {
            return Some("no /dev/fuse here");
        }
        None
    }

    /// Mounts a file of `size_bytes` under `folder`; `name` tells it from others.
    pub fn new(folder: &Path, name: &str, size_bytes: u64) -> Result<BrokenDisk> {
        let backing = folder.join(format!("{name}.backing"));
        std::fs::File::create(&backing)?.set_len(size_bytes)?;
        let mountpoint = folder.join(name);
        std::fs::create_dir_all(&mountpoint)?;
        let mut command = mortal(crate::service::binary("examples/fault-file")?);
        command.arg(&mountpoint).arg(&backing).stdin(Stdio::piped()).stdout(Stdio::null());
        command.stderr(append_to(&folder.join("fault-file.log"))?);
        let disk = BrokenDisk { process: Owned::spawn(&mut command)?, mountpoint };
        let end = Instant::now() + Duration::from_secs(10);
        while !disk.path().exists() {
            ensure!(Instant::now() < end, "fault-file doesn't serve {}", disk.mountpoint.display());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(disk)
    }

    pub fn path(&self) -> PathBuf {
        self.mountpoint.join("data")
    }

    /// "none", "eio", "hang" or "full".
    pub fn fault(&self, fault: &str) -> Result<()> {
        std::fs::write(self.mountpoint.join("fault"), fault).with_context(|| format!("fault {fault}"))
    }

    /// Requests that hang.
    pub fn held(&self) -> Result<u64> {
        let text = std::fs::read_to_string(self.mountpoint.join("fault"))?;
        Ok(text.split_whitespace().nth(1).context("fault file")?.parse()?)
    }
}

impl Drop for BrokenDisk {
    fn drop(&mut self) {
        let _ = self.fault("none");
        // Lazily, so that a file that is still open somewhere doesn't leave the mount behind.
        let _ = run_ok(Command::new("fusermount3").arg("-uz").arg(&self.mountpoint), Duration::from_secs(5));
        drop(self.process.child().stdin.take());
        let _ = self.process.wait(Duration::from_secs(5));
    }
}
