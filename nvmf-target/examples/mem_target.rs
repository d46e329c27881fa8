//! A target with one namespace in memory: for hosts to be tried against, without the service.
//!
//! `mem_target [ADDRESS:PORT] [SIZE_MIB] [BLOCK_BYTES] [NQN]`: by default 127.0.0.1:4420, 256 MiB, 4096,
//! `nqn.2014-08.org.sluice:mem`. It serves until it gets SIGTERM or SIGINT. RUST_LOG sets what it logs.

use std::sync::Arc;
use std::time::Duration;

use nvmf_target::buffer::HeapPool;
use nvmf_target::proto::tcp::TcpConfig;
use nvmf_target::target::testing::MemBackend;
use nvmf_target::target::{Limits, SubsystemSpec, Target, TargetConfig, ThreadQueueHost};
use tokio::signal::unix::{SignalKind, signal};

const QUEUES_MAX: usize = 4096;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let mut arguments = std::env::args().skip(1);
    let mut argument = |default: &str| arguments.next().unwrap_or_else(|| default.to_owned());
    let address = argument("127.0.0.1:4420").parse()?;
    let size_bytes = argument("256").parse::<u64>()? << 20;
    let block_bytes: u32 = argument("4096").parse()?;
    let nqn = argument("nqn.2014-08.org.sluice:mem");

    let limits = Limits::default();
    let pool = Arc::new(HeapPool { largest_bytes: limits.mdts_bytes as usize });
    let target = Target::new(TargetConfig {
        limits,
        firmware: env!("CARGO_PKG_VERSION").into(),
        tcp: TcpConfig::default(),
        io_staging_bytes: 256 << 10,
        queues: Arc::new(ThreadQueueHost::new(pool, QUEUES_MAX)),
        runtime: tokio::runtime::Handle::current(),
    });
    target.create_subsystem(&SubsystemSpec {
        nqn: nqn.clone(),
        serial: "MEM0001".into(),
        model: "Sluice mem target".into(),
        allow_any_host: true,
    })?;
    target.add_namespace(&nqn, 1, MemBackend::new(1, block_bytes, size_bytes / u64::from(block_bytes)))?;
    let bound = target.add_listener(address)?;
    println!("nvme connect -t tcp -a {} -s {} -n {nqn}", bound.ip(), bound.port());

    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    target.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}
