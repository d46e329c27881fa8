//! A small ext4 file system of a test's own, in a file, mounted through a loop device.
//!
//! Must not know what is stored on it. Invariant: no mount outlives its owner.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::statvfs::statvfs;
use nix::unistd::Uid;

use crate::process::run_ok;

pub struct SmallDisk {
    mountpoint: PathBuf,
}

impl SmallDisk {
    /// Whether this machine can have one; if not, why.
    pub fn unavailable() -> Option<&'static str> {
        if !Uid::effective().is_root() {
            return Some("mounting needs root");
        }
        if !Path::new("/dev/loop-control").exists() {
            return Some("no loop devices here");
        }
        None
    }

    /// Makes one of `bytes` under `folder` and mounts it.
    pub fn new(folder: &Path, bytes: u64) -> Result<SmallDisk> {
        let (image, mountpoint) = (folder.join("image"), folder.join("disk"));
        std::fs::create_dir_all(&mountpoint)?;
        File::create(&image)?.set_len(bytes)?;
        let limit = Duration::from_secs(30);
        run_ok(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image), limit).context("mkfs.ext4")?;
        run_ok(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&mountpoint), limit).context("mount")?;
        Ok(SmallDisk { mountpoint })
    }

    pub fn path(&self) -> &Path {
        &self.mountpoint
    }

    /// Bytes that are free.
    pub fn free(&self) -> Result<u64> {
        let status = statvfs(&self.mountpoint)?;
        Ok(status.blocks_available() * status.fragment_size())
    }

    /// Takes all that is free with a file of its own.
    pub fn fill_up(&self) -> Result<()> {
        // The file system's own bookkeeping takes a little as well, so in ever smaller pieces.
        let file = self.filler();
        for piece in [16 << 20, 1 << 20, 64 << 10, 4 << 10] {
            for _ in 0..self.free()? / piece {
                let size = std::fs::metadata(&file).map_or(0, |metadata| metadata.len());
                let (offset, length) = (size.to_string(), piece.to_string());
                let mut command = Command::new("fallocate");
                command.args(["-o", &offset, "-l", &length]).arg(&file);
                if run_ok(&mut command, Duration::from_secs(30)).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    fn filler(&self) -> PathBuf {
        self.mountpoint.join("filler")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily, so that a file that is still open somewhere doesn't leave the mount behind.
        let _ = run_ok(Command::new("umount").arg("-l").arg(&self.mountpoint), Duration::from_secs(10));
    }
}
