//! A blocking host for tests: one socket and one host queue pair.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use nvmf_target::buffer::IoBuf;
use nvmf_target::proto::host::{Completion, HostConfig, HostData, HostQueuePair};
use nvmf_target::wire::connect::{ConnectCommand, ConnectData};
use nvmf_target::wire::opcode::{fabrics, nvm};
use nvmf_target::wire::properties::{self, Configuration, PropertyCommand};
use nvmf_target::wire::{CommandId, Cqe, NamespaceId, Sqe, Status};

use super::PATIENCE;

pub(super) const SUBSYSTEM: &str = "nqn.2014-08.org.example:reactors";

pub(super) struct Client {
    pub(super) stream: TcpStream,
    pub(super) host: HostQueuePair,
    pub(super) done: Vec<Completion>,
}

impl Client {
    /// Host `number`'s connected queue `qid`; `cntlid` is FFFFh for an admin queue.
    pub(super) fn connect(address: SocketAddr, number: u8, qid: u16, cntlid: u16) -> (Self, u16) {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        stream.set_nodelay(true).unwrap();
        let config =
            HostConfig { header_digest: true, data_digest: true, in_capsule_bytes: 1024, ..Default::default() };
        let mut client = Self { stream, host: HostQueuePair::new(config), done: Vec::new() };
        client.until(|client| client.host.is_ready()).unwrap();
        let cqe = client.send_connect(number, qid, cntlid);
        assert!(cqe.status.is_success(), "{:?} {:#x}", cqe.status, cqe.dw0);
        client.host.configure(32, if qid == 0 { 1024 } else { 8192 });
        if qid == 0 {
            client.enable();
        }
        (client, cqe.dw0 as u16)
    }

    fn send_connect(&mut self, number: u8, qid: u16, cntlid: u16) -> Cqe {
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(fabrics::TYPE_CONNECT);
        ConnectCommand { recfmt: 0, qid, sqsize: 31, cattr: 0, kato_ms: 0 }.encode_into(&mut sqe.0);
        let field = |name: &str| {
            let mut field = [0; 256];
            field[..name.len()].copy_from_slice(name.as_bytes());
            field
        };
        let hostnqn = field(&format!("nqn.2014-08.org.example:host{number}"));
        let data = ConnectData { hostid: [number + 1; 16], cntlid, subnqn: field(SUBSYSTEM), hostnqn };
        self.run(sqe, HostData::ToController(IoBuf::copy_of(&data.encode()))).unwrap().cqe
    }

    fn enable(&mut self) {
        let mut sqe = Sqe::new(fabrics::FABRICS);
        sqe.set_fabrics_type(fabrics::TYPE_PROPERTY_SET);
        let value = u64::from(Configuration::ENABLED.0);
        PropertyCommand { eight_bytes: false, attrib: 0, offset: properties::CC, value }.encode_into(&mut sqe.0);
        assert!(self.run(sqe, HostData::None).unwrap().cqe.status.is_success());
    }

    pub(super) fn run(&mut self, sqe: Sqe, data: HostData) -> io::Result<Completion> {
        let cid = self.submit(sqe, data)?;
        self.finish(cid)
    }

    pub(super) fn submit(&mut self, sqe: Sqe, data: HostData) -> io::Result<CommandId> {
        let cid = self.host.submit(sqe, data, 0).map_err(io::Error::other)?;
        self.write()?;
        Ok(cid)
    }

    pub(super) fn finish(&mut self, cid: CommandId) -> io::Result<Completion> {
        self.until(|client| client.done.iter().any(|done| done.cid == cid))?;
        let at = self.done.iter().position(|done| done.cid == cid).ok_or(io::ErrorKind::NotFound)?;
        Ok(self.done.swap_remove(at))
    }

    pub(super) fn write_blocks(&mut self, slba: u64, bytes: &[u8]) -> io::Result<Status> {
        let sqe = transfer(nvm::WRITE, slba, bytes.len());
        self.run(sqe, HostData::ToController(IoBuf::copy_of(bytes))).map(|done| done.cqe.status)
    }

    pub(super) fn read_blocks(&mut self, slba: u64, len_bytes: usize) -> io::Result<Vec<u8>> {
        let done = self.run(transfer(nvm::READ, slba, len_bytes), HostData::FromController(IoBuf::heap(len_bytes)))?;
        if !done.cqe.status.is_success() || !done.intact {
            return Err(io::Error::other(format!("{:?}", done.cqe.status)));
        }
        Ok(done.buffer.map(|buffer| buffer.to_vec()).unwrap_or_default())
    }

    /// Waits for the other side to close.
    pub(super) fn is_closed_soon(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self.turn().is_err() {
                return true;
            }
        }
        false
    }

    pub(super) fn until(&mut self, done: impl Fn(&Self) -> bool) -> io::Result<()> {
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
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
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

/// A command on a range of 4 KiB blocks of namespace 1.
pub(super) fn transfer(opcode: u8, slba: u64, len_bytes: usize) -> Sqe {
    let mut sqe = Sqe::new(opcode);
    sqe.set_namespace_id(NamespaceId(1)).set_cdw10_11(slba).set_dword(12, (len_bytes / 4096) as u32 - 1);
    sqe
}
