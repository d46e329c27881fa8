//! A blocking host for tests: one socket and one host queue pair each.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::buffer::IoBuf;
use crate::proto::host::{Completion, HostConfig, HostData, HostQueuePair};
use crate::wire::connect::{ConnectCommand, ConnectData};
use crate::wire::opcode::{admin, fabrics, nvm};
use crate::wire::properties::{self, Configuration, PropertyCommand};
use crate::wire::{CommandId, Cqe, NamespaceId, Sqe, Status};

/// How long a test waits for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Who connects, and to what.
#[derive(Clone)]
pub(super) struct Identity {
    pub address: SocketAddr,
    pub host: String,
    pub hostid: [u8; 16],
    pub subsystem: String,
    pub kato_ms: u32,
}

impl Identity {
    /// Host number `number`.
    pub fn numbered(address: SocketAddr, subsystem: &str, number: u8) -> Self {
        Self {
            address,
            host: format!("nqn.2014-08.org.example:host{number}"),
            hostid: [number + 1; 16],
            subsystem: subsystem.to_owned(),
            kato_ms: 0,
        }
    }
}

pub(super) struct Client {
    pub stream: TcpStream,
    pub host: HostQueuePair,
    done: Vec<Completion>,
}

impl Client {
    /// A connection with its ICReq answered.
    pub fn open(address: SocketAddr, digests: bool) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        stream.set_nodelay(true)?;
        let config =
            HostConfig { header_digest: digests, data_digest: digests, in_capsule_bytes: 1024, ..Default::default() };
        let mut client = Self { stream, host: HostQueuePair::new(config), done: Vec::new() };
        client.until(|client| client.host.is_ready())?;
        Ok(client)
    }

    /// Opens a connection and connects a queue; gives Connect's answer.
    pub fn connect(identity: &Identity, qid: u16, cntlid: u16) -> io::Result<(Self, Cqe)> {
        let mut client = Self::open(identity.address, false)?;
        let cqe = client.connect_queue(identity, qid, cntlid, 31)?;
        Ok((client, cqe))
    }

    pub fn connect_queue(&mut self, identity: &Identity, qid: u16, cntlid: u16, sqsize: u16) -> io::Result<Cqe> {
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(fabrics::TYPE_CONNECT);
        ConnectCommand { recfmt: 0, qid, sqsize, cattr: 0, kato_ms: identity.kato_ms }.encode_into(&mut sqe.0);
        let field = |name: &str| {
            let mut field = [0; 256];
            field[..name.len()].copy_from_slice(name.as_bytes());
            field
        };
        let data = ConnectData {
            hostid: identity.hostid,
            cntlid,
            subnqn: field(&identity.subsystem),
            hostnqn: field(&identity.host),
        };
        let done = self.run(sqe, HostData::ToController(IoBuf::copy_of(&data.encode())))?;
        if done.cqe.status.is_success() {
            self.host.configure(sqsize + 1, if qid == 0 { 1024 } else { 8192 });
        }
        Ok(done.cqe)
    }

    /// An enabled association.
    pub fn admin(identity: &Identity) -> (Self, u16) {
        let (mut client, cqe) = Self::connect(identity, 0, 0xFFFF).expect("a connection");
        assert!(cqe.status.is_success(), "{:?} {:#x}", cqe.status, cqe.dw0);
        client.enable();
        (client, cqe.dw0 as u16)
    }

    pub fn enable(&mut self) {
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(fabrics::TYPE_PROPERTY_SET);
        let value = u64::from(Configuration::ENABLED.0);
        PropertyCommand { eight_bytes: false, attrib: 0, offset: properties::CC, value }.encode_into(&mut sqe.0);
        assert!(self.run(sqe, HostData::None).expect("an answer").cqe.status.is_success());
    }

    /// A connected I/O queue.
    pub fn io(identity: &Identity, qid: u16, cntlid: u16) -> Self {
        let (client, cqe) = Self::connect(identity, qid, cntlid).expect("a connection");
        assert!(cqe.status.is_success(), "{:?} {:#x}", cqe.status, cqe.dw0);
        client
    }

    /// Carries a command out.
    pub fn run(&mut self, sqe: Sqe, data: HostData) -> io::Result<Completion> {
        let cid = self.submit(sqe, data)?;
        self.finish(cid)
    }

    pub fn submit(&mut self, sqe: Sqe, data: HostData) -> io::Result<CommandId> {
        let cid = self.host.submit(sqe, data, 0).map_err(io::Error::other)?;
        self.write()?;
        Ok(cid)
    }

    pub fn finish(&mut self, cid: CommandId) -> io::Result<Completion> {
        self.until(|client| client.done.iter().any(|c| c.cid == cid))?;
        let at = self.done.iter().position(|c| c.cid == cid).ok_or(io::ErrorKind::NotFound)?;
        Ok(self.done.swap_remove(at))
    }

    /// Whether the command has been answered, after looking for `wait`.
    pub fn answered(&mut self, cid: CommandId, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        while Instant::now() < deadline {
            if self.turn().is_err() {
                return false;
            }
            if self.done.iter().any(|c| c.cid == cid) {
                return true;
            }
        }
        false
    }

    pub fn write_blocks(&mut self, nsid: u32, slba: u64, bytes: &[u8], block_bytes: usize) -> io::Result<Status> {
        let sqe = transfer(nvm::WRITE, nsid, slba, bytes.len() / block_bytes);
        self.run(sqe, HostData::ToController(IoBuf::copy_of(bytes))).map(|done| done.cqe.status)
    }

    pub fn read_blocks(&mut self, nsid: u32, slba: u64, blocks: usize, block_bytes: usize) -> io::Result<Vec<u8>> {
        let sqe = transfer(nvm::READ, nsid, slba, blocks);
        let done = self.run(sqe, HostData::FromController(IoBuf::heap(blocks * block_bytes)))?;
        if !done.cqe.status.is_success() || !done.intact {
            return Err(io::Error::other(format!("{:?}", done.cqe.status)));
        }
        Ok(done.buffer.map(|b| b.to_vec()).unwrap_or_default())
    }

    pub fn admin_read(&mut self, mut sqe: Sqe, nsid: u32, len_bytes: usize) -> Result<Vec<u8>, Status> {
        sqe.set_namespace_id(NamespaceId(nsid));
        let done = self.run(sqe, HostData::FromController(IoBuf::heap(len_bytes))).expect("an answer");
        if done.cqe.status.is_success() { Ok(done.buffer.expect("data").to_vec()) } else { Err(done.cqe.status.code()) }
    }

    pub fn identify(&mut self, cns: u8, nsid: u32) -> Result<Vec<u8>, Status> {
        let mut sqe = Sqe::new(admin::IDENTIFY);
        sqe.set_dword(10, u32::from(cns));
        self.admin_read(sqe, nsid, 4096)
    }

    /// Waits for the other side to close.
    pub fn wait_closed(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self.turn().is_err() {
                return true;
            }
        }
        false
    }

    fn until(&mut self, done: impl Fn(&Self) -> bool) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            if Instant::now() >= deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.turn()?;
        }
        Ok(())
    }

    fn turn(&mut self) -> io::Result<()> {
        self.write()?;
        match self.stream.read(self.host.receive_slice()) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => self.host.received(n),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(e) => return Err(e),
        }
        while let Some(done) = self.host.poll_completion() {
            self.done.push(done);
        }
        if self.host.poll_close().is_some() { Err(io::ErrorKind::ConnectionAborted.into()) } else { self.write() }
    }

    fn write(&mut self) -> io::Result<()> {
        while self.host.has_output() {
            let mut slices: Vec<IoSlice<'_>> = Vec::new();
            self.host.gather(&mut slices);
            let n = (&self.stream).write_vectored(&slices)?;
            self.host.sent(n);
        }
        Ok(())
    }
}

/// A Read, Write or Compare command.
pub(super) fn transfer(opcode: u8, nsid: u32, slba: u64, blocks: usize) -> Sqe {
    let mut sqe = Sqe::new(opcode);
    sqe.set_namespace_id(NamespaceId(nsid)).set_cdw10_11(slba).set_dword(12, blocks as u32 - 1);
    sqe
}

/// Waits until `done` for a while.
pub(super) fn eventually(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
