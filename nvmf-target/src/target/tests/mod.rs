//! The target over loopback, with real sockets, queue threads and namespaces in memory.

mod association;
mod client;
mod discovery;
mod hostile;
mod noise;
mod serving;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Runtime;

use super::testing::MemBackend;
use super::{Limits, SubsystemSpec, Target, TargetConfig, ThreadQueueHost};
use crate::buffer::HeapPool;
use crate::proto::tcp::TcpConfig;

const SUBSYSTEM: &str = "nqn.2014-08.org.example:subsystem";
const BLOCK: usize = 4096;

/// A target that listens on a free port of 127.0.0.1, with one subsystem of one namespace, open to every host.
struct Bench {
    target: Arc<Target>,
    queues: Arc<ThreadQueueHost>,
    backend: Arc<MemBackend>,
    address: SocketAddr,
    runtime: Runtime,
}

impl Bench {
    fn new() -> Self {
        Self::with(Limits::default())
    }

    fn with(limits: Limits) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let pool = Arc::new(HeapPool { largest_bytes: limits.mdts_bytes as usize });
        let queues = Arc::new(ThreadQueueHost::new(pool, 1024));
        let target = Target::new(TargetConfig {
            limits,
            firmware: "test".into(),
            tcp: TcpConfig::default(),
            io_staging_bytes: 64 << 10,
            queues: Arc::clone(&queues) as _,
            runtime: runtime.handle().clone(),
        });
        let backend = MemBackend::new(1, BLOCK as u32, 1024);
        target.create_subsystem(&spec(SUBSYSTEM)).unwrap();
        target.set_allow_any_host(SUBSYSTEM, true).unwrap();
        target.add_namespace(SUBSYSTEM, 1, Arc::clone(&backend) as _).unwrap();
        let address = target.add_listener("127.0.0.1:0".parse().unwrap()).unwrap();
        Self { target, queues, backend, address, runtime }
    }

    fn identity(&self, number: u8) -> client::Identity {
        client::Identity::numbered(self.address, SUBSYSTEM, number)
    }

    /// Waits until no host is left and everything that one needed has been given back.
    fn settle(&self) {
        client::eventually("nothing is left of the hosts", || {
            let snapshot = self.target.snapshot();
            snapshot.controllers.is_empty() && snapshot.connections == 0 && self.queues.queues() == 0
        });
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.backend.release();
        let stopped = self.runtime.block_on(self.target.shutdown(Duration::from_secs(10)));
        if !std::thread::panicking() {
            stopped.unwrap();
        }
    }
}

fn spec(nqn: &str) -> SubsystemSpec {
    SubsystemSpec { nqn: nqn.into(), serial: "SN1".into(), model: "Test".into(), allow_any_host: false }
}
