//! A running `offload-svc` of a test's own: its configuration, its life and death, and the tools that reach it.
//!
//! Everything lies in one folder. Must not know what a test checks. Invariant: the service ends with its owner.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::network::Network;
use crate::process::{Owned, append_to, run, run_ok, tail};

/// What a test asks of its service.
pub struct Setup {
    /// `[pool] members`, in order; empty for six sparse files.
    pub members: Vec<String>,
    pub member_size: &'static str,
    pub member_timeout_ms: u64,
    pub segment_size: &'static str,
    pub reactors: u16,
    /// Name, size, block size, and further lines.
    pub volumes: Vec<Volume>,
    pub subsystems: Vec<Subsystem>,
    /// Lines for `[limits]`.
    pub limits: &'static str,
    /// Whether the kernel has io_uring for it.
    pub io_uring: bool,
    /// Whether it runs without root's rights, whoever runs the test.
    pub ordinary_user: bool,
    /// Further lines for `[pool]`.
    pub pool: String,
}

pub struct Volume {
    pub name: &'static str,
    pub size: &'static str,
    pub block_size: u32,
    pub compression: &'static str,
}

pub struct Subsystem {
    pub nqn: &'static str,
    /// Namespace id and back end, and the block size of a plain one.
    pub namespaces: Vec<(u32, String, Option<u32>)>,
    /// Hosts that may connect; empty for any.
    pub hosts: Vec<&'static str>,
}

pub const NQN: &str = "nqn.2026-11.test.sluice:disk";

impl Default for Setup {
    /// A 4+2 pool with a volume of 4 KiB and one of 512 B blocks, and a plain memory namespace.
    fn default() -> Setup {
        Setup {
            members: Vec::new(),
            member_size: "768MiB",
            member_timeout_ms: 2000,
            segment_size: "4MiB",
            reactors: 2,
            volumes: vec![
                Volume { name: "v4k", size: "1GiB", block_size: 4096, compression: "lz4" },
                Volume { name: "v512", size: "512MiB", block_size: 512, compression: "lz4" },
            ],
            subsystems: vec![Subsystem {
                nqn: NQN,
                namespaces: vec![
                    (1, "pool:v4k".to_owned(), None),
                    (2, "pool:v512".to_owned(), None),
                    (3, "mem:64MiB".to_owned(), Some(4096)),
                ],
                hosts: Vec::new(),
            }],
            limits: "",
            io_uring: true,
            ordinary_user: false,
            pool: String::new(),
        }
    }
}

pub struct Service<'a> {
    folder: PathBuf,
    network: &'a Network,
    port: u16,
    process: Option<Owned>,
    io_uring: bool,
    ordinary_user: bool,
    pub members: Vec<PathBuf>,
}

/// A user without any rights.
const NOBODY: u32 = 65534;
/// How long a start may take, a mount after a crash included.
const START_LIMIT: Duration = Duration::from_secs(60);

impl<'a> Service<'a> {
    /// Writes the configuration and starts the service.
    pub fn start(folder: &Path, network: &'a Network, setup: &Setup) -> Result<Service<'a>> {
        std::fs::create_dir_all(folder)?;
        let port = free_port()?;
        let mut specs = setup.members.clone();
        if specs.is_empty() {
            specs = (0..6).map(|index| format!("file:{}", folder.join(format!("member{index}")).display())).collect();
        }
        let members =
            specs.iter().map(|spec| PathBuf::from(spec.split_once(':').map_or("", |(_, path)| path))).collect();
        std::fs::write(folder.join("config.toml"), configuration(folder, network, port, &specs, setup)?)?;
        let (io_uring, ordinary_user) = (setup.io_uring, setup.ordinary_user);
        let mut service =
            Service { folder: folder.to_owned(), network, port, process: None, io_uring, ordinary_user, members };
        service.launch()?;
        Ok(service)
    }

    /// Starts the process again, with the same configuration; returns how long it took until it served.
    pub fn launch(&mut self) -> Result<Duration> {
        let start = Instant::now();
        let mut program = binary("offload-svc")?;
        if self.ordinary_user {
            program = self.for_everyone(&program)?;
        }
        let mut command = if self.io_uring {
            self.network.command(program)
        } else {
            let mut command = self.network.command(std::env::current_exe()?);
            command.arg(crate::seccomp::WITHOUT_IO_URING).arg(program);
            command
        };
        command.arg("--config").arg(self.folder.join("config.toml"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(append_to(&self.log_path())?);
        if self.ordinary_user && nix::unistd::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let mut process = Owned::spawn(&mut command)?;
        let stdout = process.child().stdout.take().context("stdout")?;
        let (send, attach_line) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(|line| line.ok()) {
                if line.contains("nvme connect") {
                    let _ = send.send(line);
                }
            }
        });
        loop {
            if attach_line.recv_timeout(Duration::from_millis(50)).is_ok() {
                break;
            }
            if let Ok(status) = process.wait(Duration::ZERO) {
                bail!("offload-svc ended at its start: {status}: {}", tail(&self.log(), 6));
            }
            ensure!(
                start.elapsed() < START_LIMIT,
                "offload-svc isn't ready after {START_LIMIT:?}: {}",
                tail(&self.log(), 6)
            );
        }
        self.process = Some(process);
        Ok(start.elapsed())
    }

    /// The program where any user can run it, in a folder that is that user's.
    fn for_everyone(&self, program: &Path) -> Result<PathBuf> {
        let copy = self.folder.join("offload-svc");
        std::fs::copy(program, &copy)?;
        if nix::unistd::geteuid().is_root() {
            let above = self.folder.parent().context("a folder around the service's")?;
            std::fs::set_permissions(above, std::fs::Permissions::from_mode(0o755))?;
            std::os::unix::fs::chown(&self.folder, Some(NOBODY), Some(NOBODY))?;
        }
        Ok(copy)
    }

    /// Changes the configuration of the next start.
    pub fn edit_configuration(&self, from: &str, to: &str) -> Result<()> {
        let path = self.folder.join("config.toml");
        let text = std::fs::read_to_string(&path)?;
        ensure!(text.contains(from), "the configuration has no {from:?}");
        Ok(std::fs::write(path, text.replace(from, to))?)
    }

    pub fn kill_9(&mut self) -> Result<()> {
        self.process.take().context("the service doesn't run")?.kill()
    }

    /// SIGTERM, and the exit status.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        let mut process = self.process.take().context("the service doesn't run")?;
        process.signal(libc::SIGTERM)?;
        process.wait(Duration::from_secs(60)).with_context(|| tail(&self.log(), 6))
    }

    /// It still runs, as the same process, and says so when asked.
    pub fn ensure_up(&mut self) -> Result<()> {
        let log = self.log_path();
        let process = self.process.as_mut().context("the service doesn't run")?;
        if !process.is_running()? {
            let status = process.wait(Duration::ZERO)?;
            let log = std::fs::read_to_string(log).unwrap_or_default();
            bail!("the service has ended: {status} (signal {:?}): {}", status.signal(), tail(&log, 6));
        }
        self.ctl(&["status"]).map(|_| ())
    }

    pub fn id(&self) -> Result<u32> {
        Ok(self.process.as_ref().context("the service doesn't run")?.id())
    }

    pub fn log(&self) -> String {
        std::fs::read(self.log_path()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.join("service.log")
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Has `offloadctl` change something.
    pub fn ctl_do(&self, arguments: &[&str]) -> Result<()> {
        run_ok(&mut self.ctl_command(arguments)?, Duration::from_secs(20)).map(|_| ())
    }

    /// What `offloadctl --json` shows.
    pub fn ctl(&self, arguments: &[&str]) -> Result<Value> {
        let text = run_ok(&mut self.ctl_command(arguments)?, Duration::from_secs(20))?;
        serde_json::from_str(&text)
            .with_context(|| format!("offloadctl {arguments:?} printed no JSON: {}", tail(&text, 3)))
    }

    fn ctl_command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(binary("offloadctl")?);
        command.arg("--socket").arg(self.folder.join("control.sock")).arg("--json").args(arguments);
        Ok(command)
    }

    /// An `nvmf` command against subsystem `nqn`; its words follow.
    pub fn nvmf(&self, verb: &str, nqn: &str, arguments: &[&str]) -> Result<Command> {
        let mut command = self.network.command(binary("nvmf")?);
        let port = self.port.to_string();
        command.args([verb, "-t", "tcp", "-a", self.network.listen_address(), "-s", &port]);
        if verb != "discover" {
            command.args(["-n", nqn]);
        }
        command.args(arguments);
        Ok(command)
    }

    /// Runs `nvmf` to its end; anything but success is an error.
    pub fn nvmf_ok(&self, verb: &str, arguments: &[&str], seconds: u64) -> Result<String> {
        run_ok(&mut self.nvmf(verb, NQN, arguments)?, Duration::from_secs(seconds))
    }

    /// Runs `nvmf`, which must fail with this exit code; its output.
    pub fn nvmf_fails(&self, verb: &str, arguments: &[&str], code: i32, seconds: u64) -> Result<String> {
        let output = run(&mut self.nvmf(verb, NQN, arguments)?, Duration::from_secs(seconds))?;
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(
            output.status.code() == Some(code),
            "nvmf {verb}: {} instead of {code}: {}",
            output.status,
            tail(&text, 8)
        );
        Ok(text)
    }

    /// Starts a long `nvmf` command; its output goes to `name` in the service's folder.
    pub fn nvmf_spawn(&self, verb: &str, arguments: &[&str], name: &str) -> Result<Owned> {
        let log = append_to(&self.folder.join(name))?;
        let mut command = self.nvmf(verb, NQN, arguments)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Owned::spawn(&mut command)
    }

    /// CPU seconds that the process has used, all threads.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id()?))?;
        let after = stat.rsplit_once(')').context("/proc/PID/stat")?.1;
        let fields: Vec<&str> = after.split_whitespace().collect();
        let ticks = |index: usize| -> Result<f64> { Ok(fields.get(index).context("/proc/PID/stat")?.parse::<f64>()?) };
        // utime and stime are fields 14 and 15 of proc(5), in ticks of 1/100 s.
        Ok((ticks(11)? + ticks(12)?) / 100.0)
    }

    /// Resident memory in KiB.
    pub fn resident_kib(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()?))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").trim().parse()?)
    }
}

/// The first value of this key, however deep it lies.
pub fn find<'v>(value: &'v Value, key: &str) -> Option<&'v Value> {
    match value {
        Value::Object(map) => map.get(key).or_else(|| map.values().find_map(|inner| find(inner, key))),
        Value::Array(items) => items.iter().find_map(|inner| find(inner, key)),
        _ => None,
    }
}

/// The configuration of a service whose files lie in `folder`.
pub fn configuration(folder: &Path, network: &Network, port: u16, members: &[String], setup: &Setup) -> Result<String> {
    let mut text = String::new();
    let folder = folder.display();
    writeln!(text, "[service]\nsocket = \"{folder}/control.sock\"\n")?;
    writeln!(text, "[reactors]\ncount = {}\n", setup.reactors)?;
    writeln!(text, "[buffers]\nmemory = \"64MiB\"\n\n[limits]\n{}\n", setup.limits)?;
    writeln!(text, "[pool]\nk = 4\nm = 2\nmembers = {members:?}\nmember_size = \"{}\"", setup.member_size)?;
    writeln!(text, "segment_size = \"{}\"\nmember_timeout_ms = {}", setup.segment_size, setup.member_timeout_ms)?;
    writeln!(text, "key_file = \"{folder}/pool.key\"\n{}\n", setup.pool)?;
    for Volume { name, size, block_size, compression } in &setup.volumes {
        writeln!(text, "[[volume]]\nname = \"{name}\"\nsize = \"{size}\"\nblock_size = {block_size}")?;
        writeln!(text, "compression = \"{compression}\"\n")?;
    }
    for subsystem in &setup.subsystems {
        writeln!(text, "[[subsystem]]\nnqn = \"{}\"\nallow_any_host = {}", subsystem.nqn, subsystem.hosts.is_empty())?;
        writeln!(text, "hosts = {:?}", subsystem.hosts)?;
        for (nsid, backend, block_size) in &subsystem.namespaces {
            writeln!(text, "[[subsystem.namespace]]\nnsid = {nsid}\nbackend = \"{backend}\"")?;
            if let Some(block_size) = block_size {
                writeln!(text, "block_size = {block_size}")?;
            }
        }
        writeln!(text)?;
    }
    writeln!(text, "[[listener]]\naddress = \"{}\"\nport = {port}", network.listen_address())?;
    Ok(text)
}

/// A port that was free a moment ago; the namespace of a test has all of them.
fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// A built program: beside this test's own (`target/release`), or where `SLUICE_BIN_DIR` says.
pub fn binary(name: &str) -> Result<PathBuf> {
    let folder = match std::env::var_os("SLUICE_BIN_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => {
            let own = std::env::current_exe()?;
            own.parent().and_then(Path::parent).context("this test's own path")?.to_owned()
        }
    };
    let path = folder.join(name);
    ensure!(path.exists(), "{} isn't built (cargo build --release --bins; make test does)", path.display());
    Ok(path)
}
