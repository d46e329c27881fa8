//! A throw-away guest with a real Linux NVMe host: boots a Debian kernel in QEMU and runs scripts in it.
//!
//! Software emulation unless `SLUICE_GUEST_ACCEL=kvm`: it proves function, never speed. Must not know what the scripts
//! check. Each script runs under its own time limit, so that a hung host ends a check and not the run.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::network::Network;
use crate::process::{Owned, run_ok, tail};

/// Alone on a machine it takes 10 s; beside other work it may take many times that.
const BOOT_LIMIT: Duration = Duration::from_secs(300);

pub struct Guest {
    qemu: Owned,
    console: ChildStdin,
    state: Arc<(Mutex<State>, Condvar)>,
    folder: PathBuf,
    next: u32,
    prelude: String,
}

#[derive(Default)]
struct State {
    ready: Option<String>,
    done: HashMap<u32, i32>,
    ended: bool,
}

/// A script that runs in the guest.
pub struct Job {
    number: u32,
    deadline: Instant,
}

/// What a guest is made of.
pub struct Virtual<'a> {
    /// "6.1", "6.12".
    pub kernel: &'a str,
    pub kernel_arguments: &'a str,
    /// QEMU's arguments for further devices.
    pub devices: &'a [String],
}

impl Guest {
    /// Boots kernel `version`; `folder` is shared with the guest as /job.
    pub fn boot(version: &str, network: &Network, folder: &Path, kernel_arguments: &str) -> Result<Guest> {
        Guest::boot_with(&Virtual { kernel: version, kernel_arguments, devices: &[] }, network, folder)
    }

    /// Boots a guest with devices of its own.
    pub fn boot_with(machine: &Virtual, network: &Network, folder: &Path) -> Result<Guest> {
        let kernel_arguments = machine.kernel_arguments;
        let (kernel, initramfs) = images(machine.kernel)?;
        std::fs::create_dir_all(folder)?;
        let accelerator: &[&str] = match std::env::var("SLUICE_GUEST_ACCEL").as_deref() {
            Ok("kvm") => &["-accel", "kvm", "-cpu", "host"],
            _ => &["-accel", "tcg,thread=multi", "-cpu", "max"],
        };
        let append = format!(
            "console=ttyS0 panic=-1 quiet mitigations=off {} {kernel_arguments}",
            network.guest_kernel_arguments()
        );
        let share = format!("local,path={},mount_tag=job,security_model=none", folder.display());
        let mut command = network.command("qemu-system-x86_64");
        command.args(["-machine", "q35", "-m", "2048", "-smp", "4", "-display", "none", "-no-reboot", "-nodefaults"]);
        command.args(accelerator).arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs).args(["-append", &append]);
        command.arg("-serial").arg(format!("file:{}", folder.join("console.log").display()));
        command.args(["-device", "virtio-serial-pci", "-chardev", "stdio,id=c0,signal=off"]);
        command.args(["-device", "virtconsole,chardev=c0", "-virtfs", &share]).args(network.qemu_arguments());
        command.args(machine.devices);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(crate::process::append_to(&folder.join("qemu.log"))?);
        let mut qemu = Owned::spawn(&mut command)?;
        let console = qemu.child().stdin.take().context("console")?;
        let answers = qemu.child().stdout.take().context("console")?;
        let state = Arc::new((Mutex::new(State::default()), Condvar::new()));
        let shared = state.clone();
        std::thread::spawn(move || listen(BufReader::new(answers), &shared));
        let guest = Guest { qemu, console, state, folder: folder.to_owned(), next: 1, prelude: String::new() };
        let ready = guest.await_state(BOOT_LIMIT, |state| state.ready.clone());
        ready.context("waiting for the guest to boot").map(|_| guest)
    }

    /// Shell text that goes before every script from now on.
    pub fn set_prelude(&mut self, prelude: &str) {
        prelude.clone_into(&mut self.prelude);
    }

    /// The kernel's release and the seconds that it took to boot.
    pub fn booted(&self) -> String {
        self.state.0.lock().ok().and_then(|state| state.ready.clone()).unwrap_or_default()
    }

    /// Starts a script beside whatever else runs in the guest.
    pub fn start(&mut self, script: &str, limit: Duration) -> Result<Job> {
        let number = self.next;
        self.next += 1;
        std::fs::write(self.folder.join(format!("{number}.sh")), format!("{}\n{script}\n", self.prelude))?;
        writeln!(self.console, "RUN {number} {}", limit.as_secs()).context("the guest's console")?;
        self.console.flush()?;
        Ok(Job { number, deadline: Instant::now() + limit + Duration::from_secs(20) })
    }

    /// Waits for a script to end; an exit status other than 0 is an error that holds the end of its output.
    pub fn wait(&self, job: Job) -> Result<String> {
        let left = job.deadline.saturating_duration_since(Instant::now());
        let done = self.await_state(left, |state| state.done.get(&job.number).copied());
        let output = self.output(&job);
        match done.with_context(|| format!("script {} so far: {}", job.number, tail(&output, 12)))? {
            0 => Ok(output),
            124 | 137 => bail!("timed out in the guest: {}", tail(&output, 12)),
            status => bail!("exit status {status} in the guest: {}", tail(&output, 12)),
        }
    }

    /// What a script has printed by now.
    pub fn output(&self, job: &Job) -> String {
        let bytes = std::fs::read(self.folder.join(format!("{}.out", job.number))).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn sh(&mut self, script: &str, seconds: u64) -> Result<String> {
        let job = self.start(script, Duration::from_secs(seconds))?;
        self.wait(job)
    }

    /// Pulls the plug: no flush, no FIN.
    pub fn kill(mut self) -> Result<()> {
        self.qemu.kill()
    }

    /// Shuts the guest down.
    pub fn stop(mut self) -> Result<()> {
        writeln!(self.console, "STOP")?;
        self.console.flush()?;
        self.qemu.wait(Duration::from_secs(30)).map(|_| ())
    }

    fn await_state<T>(&self, limit: Duration, pick: impl Fn(&State) -> Option<T>) -> Result<T> {
        let (lock, changed) = &*self.state;
        let end = Instant::now() + limit;
        let Ok(mut state) = lock.lock() else { bail!("the console's reader panicked") };
        loop {
            if let Some(value) = pick(&state) {
                return Ok(value);
            }
            let left = end.saturating_duration_since(Instant::now());
            if state.ended || left.is_zero() {
                let console = std::fs::read(self.folder.join("console.log")).unwrap_or_default();
                let why = if state.ended { "the guest ended" } else { "no answer from the guest in time" };
                bail!("{why}; end of its console: {}", tail(&String::from_utf8_lossy(&console), 12));
            }
            let Ok((next, _)) = changed.wait_timeout(state, left) else { bail!("the console's reader panicked") };
            state = next;
        }
    }
}

fn listen(answers: impl BufRead, shared: &(Mutex<State>, Condvar)) {
    for line in answers.lines().map_while(|line| line.ok()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Ok(mut state) = shared.0.lock() else { return };
        match words[..] {
            ["READY", release, uptime] => state.ready = Some(format!("{release}, up after {uptime} s")),
            ["DONE", number, status] => {
                if let (Ok(number), Ok(status)) = (number.parse(), status.parse()) {
                    state.done.insert(number, status);
                }
            }
            _ => {}
        }
        shared.1.notify_all();
    }
    if let Ok(mut state) = shared.0.lock() {
        state.ended = true;
        shared.1.notify_all();
    }
}

/// Kernel and initramfs for a version, built if it must be.
fn images(version: &str) -> Result<(PathBuf, PathBuf)> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/initramfs.sh");
    let line = run_ok(Command::new(script).arg(version), Duration::from_secs(180))?;
    let mut paths = line.split_whitespace().map(PathBuf::from);
    paths.next().zip(paths.next()).context("initramfs.sh named no images")
}
