//! Devices that come and go: files, or loop devices on files, each under a name that stays.
//!
//! Must not know what is on them. Invariant: no loop device is left when the owner goes.

use std::fs::File;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process::run_ok;

const LIMIT: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `file:` members.
    File,
    /// `block:` members, loop devices.
    Loop,
}

pub struct Devices {
    kind: Kind,
    folder: PathBuf,
    bytes: u64,
    /// The loop device under each name.
    attached: Vec<Option<String>>,
}

impl Devices {
    /// `count` blank devices; files are left to be made by who uses them.
    pub fn new(kind: Kind, folder: &Path, count: usize, bytes: u64) -> Result<Devices> {
        std::fs::create_dir_all(folder)?;
        let mut devices = Devices { kind, folder: folder.to_owned(), bytes, attached: vec![None; count] };
        for index in 0..count {
            devices.blank(index)?;
        }
        Ok(devices)
    }

    /// Why this machine can't have such devices, if it can't.
    pub fn unavailable(kind: Kind) -> Option<&'static str> {
        let is_there = nix::unistd::geteuid().is_root() && Path::new("/dev/loop-control").exists();
        (kind == Kind::Loop && !is_there).then_some("loop devices need root and /dev/loop-control")
    }

    /// What a member is called in a configuration.
    pub fn spec(&self, index: usize) -> String {
        let scheme = if self.kind == Kind::File { "file" } else { "block" };
        format!("{scheme}:{}", self.name(index).display())
    }

    fn name(&self, index: usize) -> PathBuf {
        self.folder.join(format!("disk{index}"))
    }

    /// Where the bytes are that a loop device shows, or a file while it is away.
    fn backing(&self, index: usize) -> PathBuf {
        self.folder.join(format!("disk{index}.bytes"))
    }

    /// The device goes as if it had been pulled out, with what is on it.
    pub fn take_away(&mut self, index: usize) -> Result<()> {
        match self.kind {
            Kind::File => std::fs::rename(self.name(index), self.backing(index))?,
            Kind::Loop => self.detach(index)?,
        }
        Ok(())
    }

    /// It is there again, as it was.
    pub fn bring_back(&mut self, index: usize) -> Result<()> {
        match self.kind {
            Kind::File => std::fs::rename(self.backing(index), self.name(index))?,
            Kind::Loop => {
                let find = ["--find", "--show"];
                let device = run_ok(Command::new("losetup").args(find).arg(self.backing(index)), LIMIT)?;
                let device = device.trim().to_owned();
                let linked = symlink(&device, self.name(index));
                self.attached[index] = Some(device);
                linked.context("a name for the loop device")?;
            }
        }
        Ok(())
    }

    /// A new device under an old name. It must not be in use.
    pub fn blank(&mut self, index: usize) -> Result<()> {
        if self.attached[index].is_some() {
            self.detach(index)?;
        }
        for path in [self.name(index), self.backing(index)] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        if self.kind == Kind::Loop {
            File::create(self.backing(index))?.set_len(self.bytes)?;
            self.bring_back(index)?;
        }
        Ok(())
    }

    fn detach(&mut self, index: usize) -> Result<()> {
        let Some(device) = self.attached[index].take() else { return Ok(()) };
        run_ok(Command::new("losetup").args(["--detach", &device]), LIMIT)?;
        Ok(std::fs::remove_file(self.name(index))?)
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        for index in 0..self.attached.len() {
            let _ = self.detach(index);
        }
    }
}
