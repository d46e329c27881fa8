//! Which engine runs each primitive in this process, and why.
//!
//! Owns the choice: by CPU feature, then by a calibration of a few milliseconds, once per process. Must not know what the
//! primitives are used for. Invariant: the choice changes speed only, never a byte.

use std::hint::black_box;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::cipher::{gcm, xts};
use super::{crc, rs};

/// One engine per primitive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Engines {
    pub crc: crc::Engine,
    pub rs: rs::Engine,
    pub gcm: gcm::Engine,
    pub xts: xts::Engine,
}

impl Engines {
    /// The portable engines: what runs everywhere, and the oracle.
    pub fn portable() -> Self {
        Self { crc: crc::Engine::Crc32c, rs: rs::Engine::Portable, gcm: gcm::Engine::AesGcm, xts: xts::Engine::Aes }
    }
}

/// What [`explain`] says.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// Bytes each engine was timed on.
    pub calibration_bytes: usize,
    pub primitives: Vec<Primitive>,
}

/// For people: one line per engine, the chosen one marked.
impl std::fmt::Display for Explanation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for primitive in &self.primitives {
            writeln!(f, "{}: {} ({})", primitive.name, primitive.chosen, primitive.why)?;
            for engine in &primitive.engines {
                let mark = if engine.name == primitive.chosen { '*' } else { ' ' };
                writeln!(f, "  {mark} {:<22} {:>7.2} GB/s", engine.name, engine.gigabytes_per_second)?;
            }
        }
        write!(f, "measured on {} KiB at start-up, one thread", self.calibration_bytes >> 10)
    }
}

/// One primitive and its engines.
#[derive(Clone, Debug, Serialize)]
pub struct Primitive {
    pub name: &'static str,
    pub chosen: &'static str,
    pub why: Why,
    pub engines: Vec<Measured>,
}

/// One engine as measured at start-up.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Measured {
    pub name: &'static str,
    pub gigabytes_per_second: f64,
}

/// Why an engine was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// The fastest of several that this CPU runs, by the start-up calibration.
    FastestMeasured,
    /// The only one that this CPU runs.
    OnlyOne,
    /// The codec is part of the format, and one library serves it everywhere.
    NamedByFormat,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Why::FastestMeasured => "fastest of those this CPU runs, measured at start-up",
            Why::OnlyOne => "the only one this CPU runs",
            Why::NamedByFormat => "the library that serves this format",
        })
    }
}

/// The engines of this process. The first call measures, for a few milliseconds.
pub fn chosen() -> &'static Engines {
    &choice().0
}

/// Every primitive with its engines, the chosen one and the reason, as measured when this process chose.
pub fn explain() -> &'static Explanation {
    &choice().1
}

/// A record's size: what the data path hands over at once.
const CALIBRATION_BYTES: usize = 64 << 10;
/// Timed long enough to outlast a scheduler hiccup in one of the rounds, short enough that start-up doesn't notice.
const CALIBRATION_ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_micros(120);
/// Reading the clock costs up to a microsecond in a guest: a third of what the fastest engine takes for one call.
const CALLS_PER_CLOCK: usize = 4;

fn choice() -> &'static (Engines, Explanation) {
    static CHOICE: OnceLock<(Engines, Explanation)> = OnceLock::new();
    CHOICE.get_or_init(measure)
}

fn measure() -> (Engines, Explanation) {
    let mut bytes = vec![0u8; CALIBRATION_BYTES];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = (index as u32).wrapping_mul(0x9E37_79B1).to_be_bytes()[0];
    }
    let (crc, crc_row) = pick("crc32c", &crc::Engine::ALL, crc::Engine::name, |engine| {
        let bytes = &bytes;
        Box::new(move || {
            black_box(engine.checksum(black_box(bytes)));
        })
    });
    let (rs, rs_row) =
        pick("reed-solomon-4+2", &rs::Engine::available(), rs::Engine::name, |engine| encode(engine, &bytes));
    let (gcm, gcm_row) = pick("aes-256-gcm", &gcm::Engine::ALL, gcm::Engine::name, |engine| seal(engine, &bytes));
    let (xts, xts_row) =
        pick("aes-256-xts", &xts::Engine::available(), xts::Engine::name, |engine| units(engine, &bytes));
    let explanation = Explanation {
        calibration_bytes: CALIBRATION_BYTES,
        primitives: vec![crc_row, rs_row, gcm_row, xts_row, by_format("lz4", "liblz4"), by_format("zstd", "libzstd")],
    };
    (Engines { crc, rs, gcm, xts }, explanation)
}

type Work<'a> = Box<dyn FnMut() + 'a>;

/// Times every engine in interleaved rounds, so that a slow moment of the machine hits all, and takes the best round of each.
fn pick<'a, E: Copy>(
    name: &'static str,
    engines: &[E],
    engine_name: fn(E) -> &'static str,
    work: impl Fn(E) -> Work<'a>,
) -> (E, Primitive) {
    let mut contenders: Vec<(E, Work<'a>, f64)> = engines.iter().map(|&engine| (engine, work(engine), 0.0)).collect();
    for _ in 0..CALIBRATION_ROUNDS {
        for (_, work, best) in &mut contenders {
            *best = best.max(gigabytes_per_second(work));
        }
    }
    let measured = contenders
        .iter()
        .map(|(engine, _, best)| Measured { name: engine_name(*engine), gigabytes_per_second: *best })
        .collect();
    let fastest =
        contenders.iter().max_by(|a, b| a.2.total_cmp(&b.2)).expect("every primitive has a portable engine").0;
    let why = if engines.len() > 1 { Why::FastestMeasured } else { Why::OnlyOne };
    (fastest, Primitive { name, chosen: engine_name(fastest), why, engines: measured })
}

fn gigabytes_per_second(work: &mut Work<'_>) -> f64 {
    let (wall, cpu) = (Instant::now(), cpu_time());
    let mut bytes = 0usize;
    loop {
        for _ in 0..CALLS_PER_CLOCK {
            work();
        }
        bytes += CALLS_PER_CLOCK * CALIBRATION_BYTES;
        let elapsed = wall.elapsed();
        if elapsed >= ROUND {
            // On a loaded machine the thread's own time says more; where there is no such clock, the wall has to do.
            let spent = cpu.and_then(|start| cpu_time()?.checked_sub(start)).filter(|spent| !spent.is_zero());
            return bytes as f64 / spent.unwrap_or(elapsed).as_secs_f64() / 1e9;
        }
    }
}

fn cpu_time() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).ok().map(Duration::from)
}

fn encode(engine: rs::Engine, bytes: &[u8]) -> Work<'_> {
    let code = rs::Code::with_engine(4, 2, engine).expect("4+2 is a valid code");
    let data: Vec<&[u8]> = bytes.chunks_exact(CALIBRATION_BYTES / 4).collect();
    let mut parity = [vec![0u8; CALIBRATION_BYTES / 4], vec![0u8; CALIBRATION_BYTES / 4]];
    Box::new(move || code.encode(black_box(&data), black_box(&mut parity)).expect("shards fit the code"))
}

fn seal(engine: gcm::Engine, bytes: &[u8]) -> Work<'static> {
    let key = gcm::GcmKey::new(engine, &[0x5A; 32]).expect("a 32-byte key");
    let mut buffer = bytes.to_vec();
    Box::new(move || {
        black_box(key.seal(&[0; gcm::NONCE_BYTES], &[], black_box(&mut buffer)).expect("64 KiB fit GCM"));
    })
}

fn units(engine: xts::Engine, bytes: &[u8]) -> Work<'static> {
    let key: [u8; 64] = std::array::from_fn(|index| index as u8);
    let key = xts::XtsKey::new(engine, &key).expect("a 64-byte key with different halves");
    let mut buffer = bytes.to_vec();
    Box::new(move || {
        for (unit, data) in black_box(&mut buffer).chunks_exact_mut(4096).enumerate() {
            key.encrypt(unit as u128, data).expect("4 KiB is a data unit");
        }
    })
}

fn by_format(name: &'static str, library: &'static str) -> Primitive {
    Primitive { name, chosen: library, why: Why::NamedByFormat, engines: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_primitive_names_one_of_its_engines() {
        let explanation = explain();
        assert_eq!(explanation.primitives.len(), 6);
        for primitive in &explanation.primitives {
            if primitive.why == Why::NamedByFormat {
                continue;
            }
            assert!(primitive.engines.iter().any(|engine| engine.name == primitive.chosen), "{primitive:?}");
            assert!(primitive.engines.iter().all(|engine| engine.gigabytes_per_second > 0.0), "{primitive:?}");
        }
        let text = explanation.to_string();
        assert_eq!(text.matches("  * ").count(), 4, "{text}");
        let json = serde_json::to_value(explanation).unwrap();
        assert_eq!(json["primitives"][0]["name"], "crc32c");
    }
}
