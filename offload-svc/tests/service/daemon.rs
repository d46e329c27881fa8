//! A daemon of the test's own, and a host that talks to it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use host_tools::initiator::{ConnectOptions, Controller, IoQueue};
use host_tools::lane::{IoCommand, Range};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nvmf_target::buffer::IoBuf;
use uuid::Uuid;

/// Longest wait for anything: these machines are shared.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The subsystem of every test.
pub const NQN: &str = "nqn.2026-11.io.example:disk0";
/// Members of every pool: 2+1.
pub const MEMBERS: usize = 3;
const BLOCK_BYTES: usize = 4096;

/// A folder with a configuration.
pub struct Site {
    folder: tempfile::TempDir,
    pub port: u16,
    k: usize,
    m: usize,
}

impl Site {
    /// A 2+1 pool with an 64 MiB volume behind namespace 1, and 16 MiB of memory behind namespace 2.
    pub fn new() -> Self {
        Self::of_members(2, MEMBERS - 2)
    }

    /// The same with a pool of k+m members.
    pub fn of_members(k: usize, m: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let site = Self { folder, port: free_port(), k, m };
        site.configure(&site.text());
        site
    }

    pub fn text(&self) -> String {
        let dir = self.path().display();
        let members: Vec<String> = (0..self.k + self.m).map(|i| format!("\"file:{dir}/member-{i}\"")).collect();
        format!(
            "[service]\nsocket = \"{dir}/control.sock\"\nlog = \"info\"\n\
             [reactors]\ncount = 2\nhugepages = \"off\"\n[buffers]\nmemory = \"64MiB\"\n\
             [limits]\nhosts = 8\nqueues = 4\nqueue_depth = 32\n\
             [pool]\nk = {}\nm = {}\nmembers = [{}]\nmember_size = \"128MiB\"\nsegment_size = \"1MiB\"\n\
             map_memory = \"16MiB\"\nkey_file = \"{dir}/pool.key\"\n\
             [[volume]]\nname = \"vol0\"\nsize = \"64MiB\"\n\
             [[subsystem]]\nnqn = \"{NQN}\"\nallow_any_host = true\n\
             [[subsystem.namespace]]\nnsid = 1\nbackend = \"pool:vol0\"\n\
             [[subsystem.namespace]]\nnsid = 2\nbackend = \"mem:16MiB\"\n\
             [[listener]]\naddress = \"127.0.0.1\"\nport = {}\n",
            self.k,
            self.m,
            members.join(", "),
            self.port
        )
    }

    pub fn configure(&self, text: &str) {
        std::fs::write(self.config(), text).unwrap();
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn config(&self) -> PathBuf {
        self.path().join("sluice.toml")
    }

    pub fn member(&self, index: usize) -> PathBuf {
        self.path().join(format!("member-{index}"))
    }

    /// Starts the daemon and waits until it says how to attach.
    pub fn start(&self) -> Daemon {
        self.start_with(&[])
    }

    /// The same, with environment variables.
    pub fn start_with(&self, environment: &[(&str, &str)]) -> Daemon {
        self.start_by(&[], environment)
    }

    /// The same, with arguments.
    pub fn start_by(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Daemon {
        let mut command = daemon_command(&self.config());
        command.args(arguments);
        let mut child = command.envs(environment.iter().copied()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = child.stdout.take().unwrap();
        let (sender, line) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let attach = line.recv_timeout(PATIENCE).expect("the daemon says how to attach");
        Daemon { child, attach, lines: line, port: self.port, socket: self.path().join("control.sock") }
    }

    /// Runs the daemon to its end, which must be a refusal; gives exit code and stderr.
    pub fn refused(&self, config: &Path) -> (i32, String) {
        self.refused_with(config, &[])
    }

    /// The same, with arguments.
    pub fn refused_with(&self, config: &Path, arguments: &[&str]) -> (i32, String) {
        let output = ended(daemon_command(config).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()));
        assert!(output.stdout.is_empty(), "a refused start announces nothing");
        (output.status.code().expect("an exit code"), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// What `--check` prints, on stdout or stderr.
    pub fn check(&self) -> String {
        let output = ended(daemon_command(&self.config()).arg("--check").stdout(Stdio::piped()).stderr(Stdio::piped()));
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }

    /// `offloadctl` with `args`.
    pub fn ctl(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_offloadctl"));
        command.arg("--socket").arg(self.path().join("control.sock")).args(args);
        ended(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    }

    /// `offloadctl --json` with `args`, which must succeed.
    pub fn ask(&self, args: &[&str]) -> serde_json::Value {
        let output = self.ctl(&[&["--json"], args].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "offloadctl {args:?}: {stderr}");
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn daemon_command(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offload-svc"));
    command.arg("--config").arg(config).stdin(Stdio::null());
    command
}

/// Waits for a command to end, but not for ever.
fn ended(command: &mut Command) -> Output {
    let child = command.spawn().unwrap();
    let pid = Pid::from_raw(child.id() as i32);
    let (sender, output) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match output.recv_timeout(PATIENCE) {
        Ok(output) => output.unwrap(),
        Err(_) => {
            let _ = kill(pid, Signal::SIGKILL);
            panic!("{command:?} does not end");
        }
    }
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// A running daemon; killed when dropped.
pub struct Daemon {
    child: Child,
    pub attach: String,
    lines: std::sync::mpsc::Receiver<String>,
    port: u16,
    socket: PathBuf,
}

impl Daemon {
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Tells it to stop; gives its exit code.
    pub fn stop(mut self) -> i32 {
        self.signal(Signal::SIGTERM);
        let code = self.wait();
        assert!(self.lines.try_recv().is_err(), "exactly one line on stdout");
        assert!(!self.socket.exists(), "the management socket is gone");
        code
    }

    /// Waits for its end; gives its exit code.
    pub fn wait(&mut self) -> i32 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().expect("an exit code");
            }
            assert!(Instant::now() < deadline, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// kill -9.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// A host with one I/O queue.
    pub fn connect(&self) -> Host {
        self.connect_to(IpAddr::V4(Ipv4Addr::LOCALHOST), NQN)
    }

    pub fn connect_to(&self, address: IpAddr, nqn: &str) -> Host {
        let controller = Controller::connect(&options(address, self.port, nqn)).unwrap();
        let queue = controller.open_io_queue(1).unwrap();
        Host { controller, queue }
    }

    /// Why a host can't connect.
    pub fn connect_error(&self, nqn: &str) -> Option<String> {
        Controller::connect(&options(Ipv4Addr::LOCALHOST.into(), self.port, nqn)).err().map(|error| error.to_string())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options(address: IpAddr, port: u16, nqn: &str) -> ConnectOptions {
    let host_id = Uuid::new_v4();
    ConnectOptions {
        address,
        port,
        subsystem_nqn: nqn.to_owned(),
        host_nqn: format!("nqn.2014-08.org.nvmexpress:uuid:{host_id}"),
        host_id,
        header_digest: true,
        data_digest: true,
        disable_sq_flow_control: false,
        keep_alive: None,
        io_queues: 1,
        queue_size: 32,
        timeout: PATIENCE,
    }
}

/// A connected host.
pub struct Host {
    pub controller: Controller,
    queue: IoQueue,
}

impl Host {
    /// Writes blocks of one pattern each: `(lba, stamp)`.
    pub fn write(&mut self, nsid: u32, lba: u64, stamp: u64) {
        self.try_write(nsid, lba, stamp).unwrap();
    }

    pub fn try_write(&mut self, nsid: u32, lba: u64, stamp: u64) -> Result<(), String> {
        let buffer = IoBuf::copy_of(&pattern(lba, stamp));
        let range = Range { nsid, slba: lba, lba_count: 1 };
        let done = self.queue.execute(IoCommand::Write { range, buffer }).map_err(|error| error.to_string())?;
        if done.status.is_success() { Ok(()) } else { Err(format!("{:?}", done.status)) }
    }

    /// The stamp of a block: 0 if it is all zeroes; none if it is neither that nor a pattern of this place.
    pub fn stamp(&mut self, nsid: u32, lba: u64) -> Option<u64> {
        let range = Range { nsid, slba: lba, lba_count: 1 };
        let done = self.queue.execute(IoCommand::Read { range, buffer: IoBuf::heap(BLOCK_BYTES) }).unwrap();
        assert!(done.status.is_success(), "read of LBA {lba}: {:?}", done.status);
        let block = done.buffer.unwrap();
        if block.iter().all(|byte| *byte == 0) {
            return Some(0);
        }
        let stamp = u64::from_le_bytes(block[..8].try_into().unwrap());
        (block[..] == pattern(lba, stamp)[..]).then_some(stamp)
    }

    /// That every block has one of the stamps that it may have.
    pub fn check(&mut self, nsid: u32, expected: &BTreeMap<u64, Vec<u64>>) {
        for (lba, stamps) in expected {
            let found = self.stamp(nsid, *lba);
            assert!(
                found.is_some_and(|found| stamps.contains(&found)),
                "LBA {lba}: {found:?}, expected one of {stamps:?}"
            );
        }
    }
}

/// A block that says where and when it was written, half of it incompressible.
fn pattern(lba: u64, stamp: u64) -> Vec<u8> {
    let mut block = vec![0u8; BLOCK_BYTES];
    block[..8].copy_from_slice(&stamp.to_le_bytes());
    block[8..16].copy_from_slice(&lba.to_le_bytes());
    let mut state = (lba << 32 ^ stamp).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for word in block[16..BLOCK_BYTES / 2].chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    block
}
