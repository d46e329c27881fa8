//! Runs the fuzz targets' entry functions on seeded inputs for some seconds: `fuzz_smoke [SECONDS] [SEED]`.
//!
//! For machines without a nightly compiler. The seed of each input is printed when it fails; running with that seed
//! repeats it first.

use std::cell::Cell;
use std::time::{Duration, Instant};

use nvmf_target::fuzz_entry;
use nvmf_target::proto::sim::Random;

type Entry = fn(&[u8]);

const ENTRIES: [(&str, Entry); 3] =
    [("framing", fuzz_entry::framing), ("queue", fuzz_entry::queue), ("host", fuzz_entry::host)];

thread_local! {
    static RUNNING: Cell<(&'static str, u64)> = const { Cell::new(("", 0)) };
}

fn main() -> std::process::ExitCode {
    let numbers: Result<Vec<u64>, _> = std::env::args().skip(1).map(|arg| arg.parse()).collect();
    let Ok(numbers) = numbers else {
        eprintln!("usage: fuzz_smoke [SECONDS] [SEED]");
        return std::process::ExitCode::FAILURE;
    };
    let until = Instant::now() + Duration::from_secs(numbers.first().copied().unwrap_or(10));
    let first_seed = numbers.get(1).copied().unwrap_or(1);
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let (name, seed) = RUNNING.get();
        eprintln!("fuzz_smoke: {name} fails; repeat with: fuzz_smoke 1 {seed}");
        default_hook(info);
    }));
    let mut inputs = 0u64;
    for seed in first_seed.. {
        if Instant::now() >= until && inputs > 0 {
            break;
        }
        for (name, entry) in ENTRIES {
            RUNNING.set((name, seed));
            entry(&input(name, seed));
            inputs += 1;
        }
    }
    println!("fuzz_smoke: {inputs} inputs from seed {first_seed} on, no failure");
    std::process::ExitCode::SUCCESS
}

/// Random bytes, for framing in the shape of PDU headers now and then, so that more than the first check is reached.
fn input(name: &str, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let len_bytes = 1 + random.below(2000);
    let mut bytes = random.bytes(len_bytes);
    if name == "framing" {
        shape_headers(&mut bytes, &mut random);
    }
    bytes
}

fn shape_headers(bytes: &mut [u8], random: &mut Random) {
    const HEADERS: [(u8, u8); 9] = [(0, 128), (1, 128), (2, 24), (3, 24), (4, 72), (5, 24), (6, 24), (7, 24), (9, 24)];
    let mut at = 3;
    while at + 24 <= bytes.len() {
        let (pdu_type, hlen) = HEADERS[random.below(HEADERS.len())];
        let base = u32::from(hlen) + [0, 4][random.below(2)];
        let data = [0, 8, 100, 600][random.below(4)];
        let plen = base + data + [0, 4][random.below(2)];
        bytes[at..at + 4].copy_from_slice(&[pdu_type, random.below(4) as u8, hlen, base as u8]);
        bytes[at + 4..at + 8].copy_from_slice(&plen.to_le_bytes());
        bytes[at + 16..at + 20].copy_from_slice(&data.to_le_bytes());
        at += plen as usize;
    }
}
