//! kill -9 again and again under hosts that verify, while members are lost, come back stale, are replaced, or give way to a spare.
//!
//! On `file:` members and on loop devices. What was acknowledged is there after each start, and a value once seen stays. Never more
//! than m members lack anything at a time. `SLUICE_KILL_ROUNDS` is the number of kills on each kind, `SLUICE_KILL_SEED` another
//! choice of moments and members.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use host_tools::pattern::SplitMix64;
use serde_json::Value;

use crate::devices::{Devices, Kind};
use crate::network::Network;
use crate::process::tail;
use crate::report::Report;
use crate::service::{Service, Setup, find};

const MEMBERS: usize = 6;
/// Two more take the places of members.
const DEVICES: usize = MEMBERS + 2;
const MEMBER_BYTES: u64 = 96 << 20;
/// One pass through all that can happen to members.
const ROUNDS: u64 = 10;
const NEVER_MS: u64 = 86_400_000;
/// Namespace id and what a command moves at most.
const LOADS: [(&str, &str); 2] = [("1", "32KiB"), ("2", "8KiB")];
const RANGE: &str = "24MiB";

pub fn run(report: &mut Report, folder: &Path, kind: Kind) -> Result<()> {
    match Devices::unavailable(kind) {
        Some(reason) => report.skip("killed_again_and_again", reason),
        None => {
            report.check("killed_again_and_again", || killed_again_and_again(folder, kind));
        }
    }
    Ok(())
}

/// What a pass does with the members, two kills in each.
type Scenario = fn(&mut Bench) -> Result<()>;

const SCENARIOS: [Scenario; 5] = [
    Bench::one_away_comes_back_while_it_runs,
    Bench::two_away_come_back_at_a_start,
    Bench::one_is_replaced,
    Bench::one_is_lost_while_it_is_replaced,
    Bench::a_spare_takes_over,
];

fn killed_again_and_again(folder: &Path, kind: Kind) -> Result<()> {
    let number = |name: &str, default| match std::env::var(name) {
        Ok(text) => text.parse::<u64>().with_context(|| format!("{name}={text}")),
        Err(_) => Ok(default),
    };
    let (rounds, seed) = (number("SLUICE_KILL_ROUNDS", ROUNDS)?, number("SLUICE_KILL_SEED", 1)?);
    let mut bench = Bench::new(folder, kind, seed)?;
    for scenario in SCENARIOS.iter().cycle() {
        if bench.kills >= rounds {
            break;
        }
        scenario(&mut bench).with_context(|| format!("seed {seed}, after {} kills", bench.kills))?;
    }
    bench.sound()?;
    println!(
        "        {} kills, {} mounts with members lacking, {} members filled; {} acknowledged writes; longest start {:.1?}",
        bench.kills, bench.degraded, bench.filled, bench.acknowledged, bench.longest
    );
    Ok(())
}

/// The service goes before the devices that it holds open.
struct Bench {
    service: Service<'static>,
    devices: Devices,
    folder: PathBuf,
    random: SplitMix64,
    /// The device in each place.
    places: Vec<usize>,
    /// Devices for places to come: blank, or being filled.
    spares: Vec<usize>,
    /// Devices whose place another has taken.
    left: Vec<usize>,
    /// The lines of the configuration that change.
    configured: (String, String),
    kills: u64,
    degraded: u64,
    filled: u64,
    acknowledged: u64,
    longest: Duration,
}

static NETWORK: Network = Network::UserMode;

/// What the configuration says of spares.
fn spare_lines(specs: &[String], after_ms: u64) -> String {
    format!("spares = {specs:?}\nspare_after_ms = {after_ms}\n")
}

impl Bench {
    fn new(folder: &Path, kind: Kind, seed: u64) -> Result<Bench> {
        let devices = Devices::new(kind, &folder.join("devices"), DEVICES, MEMBER_BYTES)?;
        let specs = |range: std::ops::Range<usize>| range.map(|index| devices.spec(index)).collect::<Vec<_>>();
        let members = specs(0..MEMBERS);
        let spares = spare_lines(&specs(MEMBERS..DEVICES), NEVER_MS);
        let configured = (format!("members = {members:?}"), spares.clone());
        let pool = format!("{spares}checkpoint_interval_ms = 2000");
        let setup = Setup { members, member_size: "96MiB", segment_size: "1MiB", pool, ..Setup::default() };
        let service = Service::start(folder, &NETWORK, &setup)?;
        Ok(Bench {
            service,
            devices,
            folder: folder.to_owned(),
            random: SplitMix64(seed),
            places: (0..MEMBERS).collect(),
            spares: (MEMBERS..DEVICES).collect(),
            left: Vec::new(),
            configured,
            kills: 0,
            degraded: 0,
            filled: 0,
            acknowledged: 0,
            longest: Duration::ZERO,
        })
    }

    fn pool(&self) -> Result<Value> {
        self.service.ctl(&["pool", "show"])
    }

    /// Kills the service under load some time after `meanwhile` was done; does `after` while it is down; starts it again with the
    /// devices as they are known, and compares.
    fn killed(
        &mut self,
        spare_after_ms: u64,
        meanwhile: impl FnOnce(&mut Bench) -> Result<()>,
        after: impl FnOnce(&mut Bench) -> Result<()>,
    ) -> Result<()> {
        let mut loads = Vec::new();
        for (nsid, block) in LOADS {
            let journal = self.journal(nsid);
            let mix = ["--time", "120", "-i", "2", "--zeroes-percent", "5", "--deallocate-percent", "5"];
            let arguments = [&["--nsid", nsid, "-z", RANGE, "-b", block, "--journal", &journal], &mix[..]].concat();
            loads.push(self.service.nvmf_spawn("verify", &arguments, "load.log")?);
        }
        self.pause(100, 600);
        meanwhile(self)?;
        // From the middle of what has begun to well after its end.
        self.pause(20, 1800);
        for load in &mut loads {
            let said = || std::fs::read_to_string(self.folder.join("load.log")).unwrap_or_default();
            ensure!(load.is_running()?, "a host ended before its target was killed: {}", tail(&said(), 4));
        }
        self.service.kill_9()?;
        for load in &mut loads {
            load.wait(Duration::from_secs(60)).context("a host whose target died")?;
        }
        self.kills += 1;
        after(self)?;
        for index in std::mem::take(&mut self.left) {
            self.devices.blank(index)?;
            self.spares.push(index);
        }
        self.configure(spare_after_ms)?;
        self.longest = self.longest.max(self.service.launch()?);
        let pool = self.pool()?;
        ensure!(pool["mount"]["kind"] == "recovered", "the mount after kill -9: {}", pool["mount"]);
        self.holds()?;
        let lacking = self.refresh()?;
        self.degraded += u64::from(lacking > 0);
        Ok(())
    }

    /// So long, and up to `more_ms` longer.
    fn pause(&mut self, from_ms: u64, more_ms: u64) {
        std::thread::sleep(Duration::from_millis(from_ms + self.random.below(more_ms)));
    }

    fn journal(&self, nsid: &str) -> String {
        self.folder.join(format!("journal{nsid}")).display().to_string()
    }

    /// Every acknowledged write is there.
    fn holds(&mut self) -> Result<()> {
        self.acknowledged = 0;
        for (nsid, block) in LOADS {
            let journal = self.journal(nsid);
            let check = ["--json", "--nsid", nsid, "-z", RANGE, "-b", block, "--check-journal", &journal];
            let text = self.service.nvmf_ok("verify", &check, 120).with_context(|| format!("namespace {nsid}"))?;
            let outcome: Value = serde_json::from_str(&text).context("nvmf --json")?;
            self.acknowledged += outcome["acknowledged"].as_u64().context("acknowledged")?;
        }
        Ok(())
    }

    /// Writes down which devices the next start gets.
    fn configure(&mut self, spare_after_ms: u64) -> Result<()> {
        let specs = |list: &[usize]| list.iter().map(|index| self.devices.spec(*index)).collect::<Vec<_>>();
        let members = format!("members = {:?}", specs(&self.places));
        let spares = spare_lines(&specs(&self.spares), spare_after_ms);
        self.service.edit_configuration(&self.configured.0, &members)?;
        self.service.edit_configuration(&self.configured.1, &spares)?;
        self.configured = (members, spares);
        Ok(())
    }

    /// Takes over from the service which device is in which place; returns how many places lack anything.
    fn refresh(&mut self) -> Result<usize> {
        let pool = self.pool()?;
        let members = find(&pool, "members").and_then(Value::as_array).context("pool show lists no members")?;
        ensure!(members.len() == MEMBERS, "pool show lists {} members", members.len());
        let mut lacking = 0;
        for (place, member) in members.iter().enumerate() {
            if member["state"] != "active" {
                lacking += 1;
                continue;
            }
            let source = member["source"].as_str().context("a member's source")?;
            let device = (0..DEVICES).find(|index| self.devices.spec(*index) == source);
            let device = device.with_context(|| format!("place {place} is on {source}"))?;
            let before = std::mem::replace(&mut self.places[place], device);
            if before != device {
                self.spares.retain(|spare| *spare != device);
                self.left.push(before);
                self.filled += 1;
            }
        }
        ensure!(lacking <= 2, "{lacking} members lack something: {members:?}");
        Ok(lacking)
    }

    /// Waits until nothing lacks anything and nothing is being filled.
    fn whole(&mut self) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            let pool = self.pool()?;
            let is_filling = pool["rebuild"]["state"] == "running" || pool["rebuild"]["state"] == "failed";
            if self.refresh()? == 0 && !is_filling {
                return Ok(());
            }
            ensure!(Instant::now() < end, "it does not get whole: {pool}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn some_place(&mut self) -> Result<usize> {
        Ok(usize::try_from(self.random.below(MEMBERS as u64))?)
    }

    /// A place, and another one.
    fn two_places(&mut self) -> Result<(usize, usize)> {
        let first = self.some_place()?;
        let further = 1 + usize::try_from(self.random.below(MEMBERS as u64 - 1))?;
        Ok((first, (first + further) % MEMBERS))
    }

    fn replace(&mut self, place: usize) -> Result<()> {
        let new = *self.spares.first().context("no blank device is left")?;
        self.service.ctl_do(&["pool", "replace", &place.to_string(), &self.devices.spec(new)])
    }

    fn one_away_comes_back_while_it_runs(&mut self) -> Result<()> {
        self.whole()?;
        let place = self.some_place()?;
        let device = self.places[place];
        self.killed(NEVER_MS, |_| Ok(()), |bench| bench.devices.take_away(device)).context("one goes")?;
        let comes_back = |bench: &mut Bench| {
            bench.pause(0, 500);
            bench.devices.bring_back(device)?;
            // It is found by the service, or it is told; whichever comes first.
            if bench.random.below(2) == 0 {
                let _ = bench.service.ctl_do(&["pool", "attach", &bench.devices.spec(device)]);
            }
            Ok(())
        };
        self.killed(NEVER_MS, comes_back, |_| Ok(())).context("it is back, stale")
    }

    fn two_away_come_back_at_a_start(&mut self) -> Result<()> {
        self.whole()?;
        let (first, second) = self.two_places()?;
        let (first, second) = (self.places[first], self.places[second]);
        let go = |bench: &mut Bench| {
            bench.devices.take_away(first)?;
            bench.devices.take_away(second)
        };
        self.killed(NEVER_MS, |_| Ok(()), go).context("two go")?;
        let come_back = |bench: &mut Bench| {
            bench.devices.bring_back(first)?;
            bench.devices.bring_back(second)
        };
        self.killed(NEVER_MS, |_| Ok(()), come_back).context("two are back, stale")
    }

    fn one_is_replaced(&mut self) -> Result<()> {
        self.whole()?;
        let place = self.some_place()?;
        self.killed(NEVER_MS, |bench| bench.replace(place), |_| Ok(())).context("a member is being replaced")?;
        self.killed(NEVER_MS, |_| Ok(()), |_| Ok(())).context("it is still being replaced")
    }

    fn one_is_lost_while_it_is_replaced(&mut self) -> Result<()> {
        self.whole()?;
        let place = self.some_place()?;
        let old = self.places[place];
        self.killed(NEVER_MS, |bench| bench.replace(place), |bench| bench.devices.take_away(old))
            .context("a member goes while it is being replaced")?;
        self.killed(NEVER_MS, |_| Ok(()), |_| Ok(())).context("it has gone while it was being replaced")?;
        self.whole()?;
        ensure!(self.places[place] != old, "a device that is gone is still in its place");
        Ok(())
    }

    fn a_spare_takes_over(&mut self) -> Result<()> {
        self.whole()?;
        let place = self.some_place()?;
        let old = self.places[place];
        self.killed(300, |_| Ok(()), |bench| bench.devices.take_away(old)).context("one goes")?;
        let time_for_it = |bench: &mut Bench| {
            bench.pause(300, 1500);
            Ok(())
        };
        self.killed(300, time_for_it, |_| Ok(())).context("a spare takes over")?;
        self.whole()?;
        ensure!(self.places[place] != old, "no spare has taken over");
        Ok(())
    }

    /// At the end: nothing is wrong anywhere, and any two members are enough too few.
    fn sound(&mut self) -> Result<()> {
        self.whole()?;
        self.service.ctl_do(&["pool", "scrub", "start"])?;
        let end = Instant::now() + Duration::from_secs(120);
        let scrub = loop {
            std::thread::sleep(Duration::from_millis(200));
            let scrub = self.service.ctl(&["pool", "scrub", "status"])?;
            if scrub["running"] == false && scrub["ended_s"].as_u64().is_some_and(|ended| ended > 0) {
                break scrub;
            }
            ensure!(Instant::now() < end, "the scrub does not end: {scrub}");
        };
        ensure!(scrub["bad_shards"] == 0 && scrub["stripes_lost"] == 0, "the scrub found {scrub}");
        let (first, second) = self.two_places()?;
        let (first, second) = (self.places[first], self.places[second]);
        self.service.kill_9()?;
        self.devices.take_away(first)?;
        self.devices.take_away(second)?;
        // The configuration has not heard of the last replacement: that device is one of the spares.
        self.service.launch()?;
        self.holds().context("without any two members")
    }
}
