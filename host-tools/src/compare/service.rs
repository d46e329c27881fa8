//! What the service says of itself and what the kernel says of its process.
//!
//! Owns the calls of `offloadctl` and the reading of /proc. Must not know the service's code: it uses the names that
//! scripts use. Invariant: a figure that isn't to be had is absent, not zero.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::cpu::{CpuError, ThreadTimes};

/// The service under test, as far as it is known.
#[derive(Debug, Clone, Default)]
pub struct Service {
    control: Option<Control>,
    pid: Option<u32>,
}

#[derive(Debug, Clone)]
struct Control {
    program: PathBuf,
    socket: PathBuf,
}

/// Why the management socket gives no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// `offloadctl` could not be started.
    #[error("can't run {program}: {source} (build it, or name it with --offloadctl)", program = .program.display())]
    Start {
        /// What was tried.
        program: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It reported a failure.
    #[error("offloadctl {call}: {message}")]
    Failed {
        /// The command.
        call: &'static str,
        /// What it printed.
        message: Box<str>,
    },
    /// Its answer isn't JSON.
    #[error("offloadctl {call}: the answer is no JSON: {source}")]
    Json {
        /// The command.
        call: &'static str,
        /// Where.
        source: serde_json::Error,
    },
}

/// What a volume's data takes.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeUse {
    /// Its name.
    pub name: String,
    /// Its compression, by the name that the configuration uses.
    pub compression: String,
    /// Its cipher, likewise.
    pub cipher: String,
    /// Bytes as hosts see them.
    pub used_bytes: u64,
    /// Bytes as records, parity left out.
    pub stored_bytes: u64,
}

impl Service {
    /// Asks over `socket` where one is given; `pid` overrides what `status` says.
    pub fn find(socket: Option<&Path>, program: Option<&Path>, pid: Option<u32>) -> Result<Self, ControlError> {
        let control = socket.map(|socket| Control {
            program: program.map_or_else(default_program, Path::to_owned),
            socket: socket.to_owned(),
        });
        let mut this = Self { control, pid };
        if pid.is_none() {
            let status = this.call("status", &["status"])?;
            this.pid = status.and_then(|s| s.get("pid")?.as_u64()).and_then(|pid| u32::try_from(pid).ok());
        }
        Ok(this)
    }

    /// The service's process, if it is known.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// CPU time of the service's process so far.
    pub fn cpu(&self) -> Result<Option<ThreadTimes>, CpuError> {
        self.pid.map(ThreadTimes::of).transpose()
    }

    /// Bytes that the process sent towards storage so far (proc_pid_io(5)).
    pub fn storage_written_bytes(&self) -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/io", self.pid?)).ok()?;
        text.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.trim().parse().ok())
    }

    /// k and m of the pool.
    pub fn pool_code(&self) -> Result<Option<(usize, usize)>, ControlError> {
        let pool = self.call("pool show", &["pool", "show"])?;
        Ok(pool.and_then(|pool| {
            let count = |key| usize::try_from(pool.get(key)?.as_u64()?).ok();
            Some((count("k")?, count("m")?))
        }))
    }

    /// The volume that namespace `nsid` of subsystem `nqn` serves.
    pub fn volume(&self, nqn: &str, nsid: u32) -> Result<Option<VolumeUse>, ControlError> {
        let list = self.call("volume list", &["volume", "list"])?;
        Ok(list.and_then(|list| find_volume(&list, nqn, nsid)))
    }

    fn call(&self, call: &'static str, arguments: &[&str]) -> Result<Option<Value>, ControlError> {
        let Some(control) = &self.control else { return Ok(None) };
        let output = Command::new(&control.program)
            .arg("--socket")
            .arg(&control.socket)
            .arg("--json")
            .args(arguments)
            .output()
            .map_err(|source| ControlError::Start { program: control.program.clone(), source })?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr).trim().into();
            return Err(ControlError::Failed { call, message });
        }
        serde_json::from_slice(&output.stdout).map(Some).map_err(|source| ControlError::Json { call, source })
    }
}

/// `offloadctl` beside this program, else on the path.
fn default_program() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("offloadctl")));
    beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from("offloadctl"))
}

fn find_volume(list: &Value, nqn: &str, nsid: u32) -> Option<VolumeUse> {
    let served = format!("{nqn} nsid {nsid}");
    let volumes = list.as_array().or_else(|| list.get("volumes")?.as_array())?;
    let volume = volumes.iter().find(|v| v.get("served_by").and_then(Value::as_str) == Some(&served))?;
    let text = |key| volume.get(key).and_then(Value::as_str).map(str::to_owned);
    let number = |key| volume.get(key).and_then(Value::as_u64);
    Some(VolumeUse {
        name: text("name")?,
        compression: text("compression")?,
        cipher: text("cipher")?,
        used_bytes: number("used_bytes")?,
        stored_bytes: number("stored_bytes")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_volume_behind_a_namespace_is_found_with_exact_numbers() {
        let big = u64::MAX - 1;
        let list = json!([
            {"name": "a", "compression": "lz4", "cipher": "aes-256-gcm", "used_bytes": 1, "stored_bytes": 1,
             "served_by": "nqn.x nsid 2"},
            {"name": "b", "compression": "none", "cipher": "aes-128-xts", "used_bytes": big, "stored_bytes": 7,
             "served_by": "nqn.x nsid 1"},
        ]);
        let volume = find_volume(&list, "nqn.x", 1).unwrap();
        assert_eq!((volume.name.as_str(), volume.used_bytes, volume.stored_bytes), ("b", big, 7));
        assert_eq!(find_volume(&list, "nqn.y", 1), None);
    }

    #[test]
    fn without_a_socket_nothing_is_known_and_nothing_fails() {
        let service = Service::find(None, None, None).unwrap();
        assert_eq!(service.pid(), None);
        assert!(service.cpu().unwrap().is_none());
        assert_eq!(service.storage_written_bytes(), None);
        assert_eq!(service.pool_code().unwrap(), None);
    }

    #[test]
    fn a_missing_offloadctl_is_named() {
        let error = Service::find(Some(Path::new("/none.sock")), Some(Path::new("/no/offloadctl")), None).unwrap_err();
        assert!(error.to_string().contains("/no/offloadctl"), "{error}");
    }

    #[test]
    fn a_process_is_measured_by_its_id() {
        let service = Service::find(None, None, Some(std::process::id())).unwrap();
        assert!(service.cpu().unwrap().is_some());
    }
}
