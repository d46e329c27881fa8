//! Child processes of the tests: each ends with its owner, by its own id, and its output is kept for the report.
//!
//! Must not know what it runs. Invariant: dropping an owner leaves no process behind.

use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// A child that is killed and reaped when its owner goes.
pub struct Owned {
    child: Child,
    name: String,
}

/// A command for a child that the kernel kills should its owner be killed before it could.
pub fn mortal(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

impl Owned {
    pub fn spawn(command: &mut Command) -> Result<Owned> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("starting {name}"))?;
        Ok(Owned { child, name })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub fn signal(&self, signal: i32) -> Result<()> {
        let id = i32::try_from(self.child.id()).context("process id")?;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), nix::sys::signal::Signal::try_from(signal)?)?;
        Ok(())
    }

    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= end {
                bail!("{} (process {}) still runs after {limit:?}", self.name, self.child.id());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Runs a command to its end within `limit`; its output goes through files, so that no full pipe can stall it.
pub fn run(command: &mut Command, limit: Duration) -> Result<Output> {
    let stdout = tempfile::NamedTempFile::new()?;
    let stderr = tempfile::NamedTempFile::new()?;
    command.stdin(Stdio::null()).stdout(stdout.reopen()?).stderr(stderr.reopen()?);
    let line = describe(command);
    let mut child = Owned::spawn(command)?;
    let status = child.wait(limit).with_context(|| line.clone())?;
    Ok(Output { status, stdout: std::fs::read(stdout.path())?, stderr: std::fs::read(stderr.path())? })
}

/// Like [`run`]; an exit status other than 0 is an error that holds the end of the output.
pub fn run_ok(command: &mut Command, limit: Duration) -> Result<String> {
    let line = describe(command);
    let output = run(command, limit)?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{line}: {}: {} {}", output.status, tail(&stdout, 8), tail(&stderr, 8));
    }
    Ok(stdout)
}

pub fn append_to(path: &Path) -> Result<File> {
    File::options().create(true).append(true).open(path).with_context(|| path.display().to_string())
}

/// The last lines of a text, on one line.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    all[all.len().saturating_sub(lines)..].join(" | ")
}

fn describe(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}
