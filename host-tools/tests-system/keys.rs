//! Keys: rotated while hosts write, and over kill -9.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::network::Network;
use crate::report::Report;
use crate::service::{Service, Setup};

pub fn run(report: &mut Report, folder: &Path) -> Result<()> {
    let network = Network::UserMode;
    report.check("h112_rotated_under_load", || rotated(&folder.join("rotated"), &network));
    Ok(())
}

/// H112: two rotations while a host writes, the second cut by kill -9 again and again; it goes on by itself, and all is right.
fn rotated(folder: &Path, network: &Network) -> Result<()> {
    let mut service = Service::start(folder, network, &Setup::default())?;
    let volume = volume_of(&service)?;
    service.nvmf_ok("verify", &["-z", "64MiB", "--seed", "1"], 90)?;
    let elsewhere = ["--start-block", "100000", "-z", "128MiB", "--seed", "9"];
    let mut load = service.nvmf_spawn("verify", &elsewhere, "load.log")?;
    service.ctl_do(&["key", "rotate", &volume])?;
    let key = key_of(&service, &volume)?;
    ensure!(key["epoch"] == 1, "right after the rotation: {key}");
    service.nvmf_ok("verify", &["-z", "64MiB", "--seed", "1", "--check-only"], 90)?;
    ensure!(load.wait(Duration::from_secs(60))?.success(), "the load ended with an error");
    until_done(&service, &volume)?;
    service.nvmf_ok("verify", &["-z", "64MiB", "--seed", "1", "--check-only"], 90)?;
    service.ctl_do(&["key", "rotate", &volume])?;
    for _ in 0..3 {
        service.kill_9()?;
        service.launch()?;
        ensure!(key_of(&service, &volume)?["epoch"] == 2, "after kill -9: {}", key_of(&service, &volume)?);
    }
    until_done(&service, &volume)?;
    service.nvmf_ok("verify", &["-z", "64MiB", "--seed", "1", "--check-only"], 90)?;
    ensure!(service.stop()?.success(), "exit status");
    service.launch()?;
    service.nvmf_ok("verify", &["-z", "64MiB", "--seed", "1", "--check-only"], 90)?;
    service.ensure_up()
}

/// The volume behind namespace 1: the oldest.
fn volume_of(service: &Service) -> Result<String> {
    let keys = service.ctl(&["key", "status"])?;
    Ok(keys[0]["volume"].as_str().unwrap_or_default().to_owned())
}

fn key_of(service: &Service, volume: &str) -> Result<Value> {
    let keys = service.ctl(&["key", "status"])?;
    let list = keys.as_array().cloned().unwrap_or_default();
    Ok(list.into_iter().find(|key| key["volume"] == volume).unwrap_or_default())
}

fn until_done(service: &Service, volume: &str) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let key = key_of(service, volume)?;
        if key["rotating"] == false {
            ensure!(key["left_bytes"] == 0, "{key}");
            return Ok(());
        }
        ensure!(Instant::now() < end, "the rotation does not end: {key}");
        std::thread::sleep(Duration::from_millis(200));
    }
}
