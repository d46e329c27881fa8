//! Hosts over loopback: the target's control plane on tokio, I/O queues on reactors, a plain namespace.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nvmf_target::buffer::IoBuf;
use nvmf_target::proto::host::HostData;
use nvmf_target::proto::tcp::TcpConfig;
use nvmf_target::target::{Limits, SubsystemSpec, Target, TargetConfig};
use nvmf_target::wire::opcode::nvm;
use tokio::runtime::Runtime;

use super::client::{Client, SUBSYSTEM, transfer};
use super::{Running, eventually, on_each_platform, scarce, settings};
use crate::config::values::{BackendSpec, BlockSize, ByteSize};
use crate::plain::PlainBackend;
use crate::reactor::Settings;

/// A target on reactors with one namespace of 64 MiB of memory.
struct Bench {
    target: Arc<Target>,
    address: SocketAddr,
    runtime: Runtime,
    reactors: Running,
}

impl Bench {
    fn new(settings: &Settings, tcp: TcpConfig) -> Self {
        let reactors = Running::start(settings);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let target = Target::new(TargetConfig {
            limits: Limits { slow_reader_timeout: tcp.send_timeout, ..Limits::default() },
            firmware: "test".into(),
            tcp,
            io_staging_bytes: 256 << 10,
            queues: Arc::new(reactors.0.clone()),
            runtime: runtime.handle().clone(),
        });
        let spec = BackendSpec::Mem(ByteSize(64 << 20));
        let backend = PlainBackend::open(&spec, BlockSize::B4096, SUBSYSTEM, &reactors).unwrap();
        let subsystem =
            SubsystemSpec { nqn: SUBSYSTEM.into(), serial: "SN1".into(), model: "Test".into(), allow_any_host: true };
        target.create_subsystem(&subsystem).unwrap();
        target.add_namespace(SUBSYSTEM, 1, backend).unwrap();
        let address = target.add_listener("127.0.0.1:0".parse().unwrap()).unwrap();
        Self { target, address, runtime, reactors }
    }

    fn on(dpdk: bool) -> Self {
        Self::new(&settings(2, dpdk), TcpConfig::default())
    }

    /// Host `number`'s admin queue and `queues` I/O queues.
    fn host(&self, number: u8, queues: u16) -> (Client, Vec<Client>) {
        let (admin, cntlid) = Client::connect(self.address, number, 0, 0xFFFF);
        let io = (1..=queues).map(|qid| Client::connect(self.address, number, qid, cntlid).0);
        let io = io.collect();
        (admin, io)
    }

    /// Waits until nothing of any host is left.
    fn settle(&self) {
        eventually("every queue and buffer is given back", || {
            let queues: usize = self.reactors.snapshot().iter().map(|reactor| reactor.queues).sum();
            queues == 0 && self.reactors.host_buffers().used_bytes() == 0
        });
        assert_eq!(self.reactors.internal_buffers().used_bytes(), 0);
        assert_eq!(self.reactors.failure(), None);
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let stopped = self.runtime.block_on(self.target.shutdown(Duration::from_secs(10)));
        if !std::thread::panicking() {
            stopped.unwrap();
        }
    }
}

fn pattern(seed: u64, len_bytes: usize) -> Vec<u8> {
    let word = |i: usize| (seed << 32 | i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    (0..len_bytes / 8).flat_map(word).collect()
}

#[test]
fn what_was_written_is_read_back_on_any_queue() {
    on_each_platform(|dpdk| {
        let bench = Bench::on(dpdk);
        let (_admin, mut queues) = bench.host(1, 3);
        for (i, len) in [4 << 10, 8 << 10, 128 << 10, 1 << 20].into_iter().enumerate() {
            let slba = 1000 * i as u64;
            let data = pattern(i as u64, len);
            assert!(queues[i % 3].write_blocks(slba, &data).unwrap().is_success());
            for queue in &mut queues {
                assert!(queue.read_blocks(slba, len).unwrap() == data, "{len} bytes");
            }
        }
        let spread: Vec<usize> = bench.reactors.snapshot().iter().map(|reactor| reactor.queues).collect();
        assert!(spread.iter().all(|queues| *queues > 0), "queues are spread over reactors: {spread:?}");
        drop(queues);
        bench.settle();
    });
}

/// H21: a queue filled to its last entry, again and again, with far fewer buffers than commands: each waits for its
/// turn and all complete.
#[test]
fn h21_full_queues_share_few_buffers() {
    on_each_platform(|dpdk| {
        let mut settings = settings(2, dpdk);
        settings.host_buffers = scarce(3);
        let bench = Bench::new(&settings, TcpConfig::default());
        let address = bench.address;
        let (_admin, cntlid) = Client::connect(address, 1, 0, 0xFFFF);
        std::thread::scope(|scope| {
            for qid in 1..=4_u16 {
                scope.spawn(move || {
                    let (mut queue, _) = Client::connect(address, 1, qid, cntlid);
                    for round in 0..6 {
                        let data = |i: u64| pattern(u64::from(qid) << 16 | round << 8 | i, 16 << 10);
                        let slba = |i: u64| u64::from(qid) * 1000 + i * 4;
                        let writes: Vec<_> = (0..31)
                            .map(|i| {
                                let sqe = transfer(nvm::WRITE, slba(i), 16 << 10);
                                queue.submit(sqe, HostData::ToController(IoBuf::copy_of(&data(i)))).unwrap()
                            })
                            .collect();
                        for cid in writes {
                            assert!(queue.finish(cid).unwrap().cqe.status.is_success());
                        }
                        for i in 0..31 {
                            assert!(queue.read_blocks(slba(i), 16 << 10).unwrap() == data(i));
                        }
                    }
                });
            }
        });
        bench.settle();
    });
}

/// H30: hosts that vanish while their writes wait for data leave nothing behind, reset or not.
#[test]
fn h30_nothing_is_left_of_hosts_that_vanish() {
    on_each_platform(|dpdk| {
        let bench = Bench::on(dpdk);
        for round in 0..10_u8 {
            let (admin, mut queues) = bench.host(round, 4);
            for queue in &mut queues {
                for i in 0..16 {
                    let data = HostData::ToController(IoBuf::heap(64 << 10));
                    queue.submit(transfer(nvm::WRITE, i * 16, 64 << 10), data).unwrap();
                }
            }
            if round % 2 == 0 {
                for queue in &queues {
                    nix::sys::socket::setsockopt(
                        &queue.stream,
                        nix::sys::socket::sockopt::Linger,
                        &nix::libc::linger { l_onoff: 1, l_linger: 0 },
                    )
                    .unwrap();
                }
            }
            drop((queues, admin));
            bench.settle();
        }
    });
}

/// A host that asks for data and doesn't take it is cut; the others never notice.
#[test]
fn a_slow_reader_is_cut() {
    on_each_platform(|dpdk| {
        let tcp = TcpConfig { send_timeout: Duration::from_secs(2), ..TcpConfig::default() };
        let bench = Bench::new(&settings(1, dpdk), tcp);
        let (_slow_admin, mut slow) = bench.host(1, 1);
        let (_admin, mut queues) = bench.host(2, 1);
        for _ in 0..31 {
            let into = HostData::FromController(IoBuf::heap(1 << 20));
            slow[0].submit(transfer(nvm::READ, 0, 1 << 20), into).unwrap();
        }
        eventually("it is cut", || bench.reactors.snapshot()[0].slow_readers == 1);
        let data = pattern(5, 64 << 10);
        assert!(queues[0].write_blocks(7, &data).unwrap().is_success());
        assert!(queues[0].read_blocks(7, 64 << 10).unwrap() == data);
        assert!(slow[0].is_closed_soon());
        drop((slow, queues));
        bench.settle();
    });
}

/// A host that is asked for data and never sends it, on many queues, does not keep the others from writing and reading.
#[test]
fn a_host_that_keeps_its_buffers_leaves_some_for_others() {
    on_each_platform(|dpdk| {
        let long = Duration::from_secs(600);
        let tcp = TcpConfig { send_timeout: long, transfer_timeout: long, ..TcpConfig::default() };
        let bench = Bench::new(&settings(2, dpdk), tcp);
        let (_idle_admin, mut idle) = bench.host(1, 4);
        for (queue, len_bytes) in idle.iter_mut().zip([1 << 20, 256 << 10, 64 << 10, 16 << 10]) {
            for _ in 0..31 {
                let data = HostData::ToController(IoBuf::heap(len_bytes));
                queue.submit(transfer(nvm::WRITE, 0, len_bytes), data).unwrap();
            }
        }
        eventually("it holds all that it may", || {
            let sizes = bench.reactors.host_buffers().snapshot();
            sizes.iter().filter(|size| size.bytes >= 64 << 10).all(|size| size.used > 0 && size.waiting > 0)
        });
        let (_admin, mut queues) = bench.host(2, 1);
        for (round, len_bytes) in [4 << 10, 64 << 10, 256 << 10, 1 << 20].into_iter().enumerate() {
            let data = pattern(round as u64, len_bytes);
            assert!(queues[0].write_blocks(1000, &data).unwrap().is_success());
            assert!(queues[0].read_blocks(1000, len_bytes).unwrap() == data, "{len_bytes} bytes");
        }
        drop((idle, queues));
        bench.settle();
    });
}

/// A fused pair takes two buffers. Where a silent host has left as many as another may hold one of, the pair gets both.
#[test]
fn h68_a_fused_pair_completes_beside_a_host_that_keeps_its_buffers() {
    on_each_platform(|dpdk| {
        let long = Duration::from_secs(600);
        let tcp = TcpConfig { send_timeout: long, transfer_timeout: long, ..TcpConfig::default() };
        let mut settings = settings(1, dpdk);
        settings.host_buffers = scarce(4);
        let bench = Bench::new(&settings, tcp);
        let (_idle_admin, mut idle) = bench.host(1, 3);
        for (queue, len_bytes) in idle.iter_mut().zip([1 << 20, 64 << 10, 4 << 10]) {
            queue.host.configure(32, 0);
            for _ in 0..8 {
                let data = HostData::ToController(IoBuf::heap(len_bytes));
                queue.submit(transfer(nvm::WRITE, 0, len_bytes), data).unwrap();
            }
        }
        eventually("it holds all that it may", || {
            let sizes = bench.reactors.host_buffers().snapshot();
            let [small, medium, large] = sizes.as_slice() else { return false };
            small.used == 2 && sizes.iter().all(|size| size.waiting > 0) && medium.used == 1 && large.used == 1
        });
        let (_admin, mut queues) = bench.host(2, 1);
        let queue = &mut queues[0];
        // Without data in capsules, both halves need a buffer before it is asked for.
        queue.host.configure(32, 0);
        for (compared, written) in [(vec![0; 4096], pattern(1, 4096)), (pattern(1, 4096), pattern(2, 4096))] {
            let half = |opcode, bits| *transfer(opcode, 1000, 4096).set_fuse_bits(bits);
            let data = |bytes: &[u8]| HostData::ToController(IoBuf::copy_of(bytes));
            let compare = queue.submit(half(nvm::COMPARE, 1), data(&compared)).unwrap();
            let write = queue.submit(half(nvm::WRITE, 2), data(&written)).unwrap();
            for half in [compare, write] {
                assert!(queue.finish(half).unwrap().cqe.status.is_success());
            }
            assert!(queue.read_blocks(1000, 4096).unwrap() == written);
        }
        drop((idle, queues));
        bench.settle();
    });
}

/// Many hosts that do nothing with their buffers, come back when they are cut, and do it again: another host goes on, though
/// there are fewer buffers than such hosts.
#[test]
fn hosts_that_keep_all_buffers_are_cut_while_another_waits() {
    on_each_platform(|dpdk| {
        let long = Duration::from_secs(600);
        let tcp = TcpConfig { send_timeout: long, transfer_timeout: long, ..TcpConfig::default() };
        let bench = Bench::new(&settings(2, dpdk), tcp);
        let all = bench.reactors.host_buffers().snapshot().last().unwrap().count;
        let keep = |number: u8| {
            let (admin, mut idle) = bench.host(number, 1);
            for _ in 0..31 {
                // Half of them don't send, half don't take.
                if number.is_multiple_of(2) {
                    let data = HostData::ToController(IoBuf::heap(1 << 20));
                    idle[0].submit(transfer(nvm::WRITE, 0, 1 << 20), data).unwrap();
                } else {
                    let into = HostData::FromController(IoBuf::heap(1 << 20));
                    idle[0].submit(transfer(nvm::READ, 0, 1 << 20), into).unwrap();
                }
            }
            (admin, idle)
        };
        let mut hosts: Vec<_> = (10..12 + all as u8).map(keep).collect();
        eventually("they hold all", || {
            let largest = *bench.reactors.host_buffers().snapshot().last().unwrap();
            largest.used == largest.count && largest.waiting > 0
        });
        let (_admin, mut queues) = bench.host(2, 1);
        for round in 0..3u8 {
            let data = pattern(round.into(), 1 << 20);
            assert!(queues[0].write_blocks(1000, &data).unwrap().is_success());
            assert!(queues[0].read_blocks(1000, 1 << 20).unwrap() == data);
            hosts.extend((10..14).map(keep));
        }
        let stalled: u64 = bench.reactors.snapshot().iter().map(|reactor| reactor.stalled).sum();
        assert!(stalled > 0, "the case that this is about");
        drop((hosts, queues));
        bench.settle();
    });
}

/// Connections are closed from our side, commands and all.
#[test]
fn closing_all_queues_ends_every_connection() {
    on_each_platform(|dpdk| {
        let bench = Bench::on(dpdk);
        let (_admin, mut queues) = bench.host(1, 4);
        bench.reactors.close_queues();
        assert!(queues.iter_mut().all(Client::is_closed_soon));
        bench.settle();
    });
}
