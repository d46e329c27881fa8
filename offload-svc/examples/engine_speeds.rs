//! Prints the speed of every engine of every primitive on this machine, engines interleaved, best and median of the rounds.
//!
//! `cargo run --release -p offload-svc --example engine_speeds [ROUNDS]`. One thread, its CPU time; 64 KiB and 4 KiB,
//! cache-warm.

use std::hint::black_box;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use offload_svc::stages::cipher::{gcm, xts};
use offload_svc::stages::compress::{Compression, Compressor, Decompressor};
use offload_svc::stages::{crc, rs};

const ROUND: Duration = Duration::from_millis(5);
/// Reading the clock costs up to a microsecond in a guest: as much as a fast engine takes for 16 KiB.
const CLOCK_EVERY_BYTES: usize = 512 << 10;

struct Contender<'a> {
    name: String,
    bytes: usize,
    work: Box<dyn FnMut() + 'a>,
    rounds: Vec<f64>,
}

impl<'a> Contender<'a> {
    fn new(name: String, bytes: usize, work: impl FnMut() + 'a) -> Self {
        Self { name, bytes, work: Box::new(work), rounds: Vec::new() }
    }

    fn run(&mut self) {
        let (wall, start) = (Instant::now(), cpu_time());
        let mut done = 0usize;
        while wall.elapsed() < ROUND {
            for _ in 0..CLOCK_EVERY_BYTES / self.bytes.min(CLOCK_EVERY_BYTES) {
                (self.work)();
                done += self.bytes;
            }
        }
        self.rounds.push(done as f64 / (cpu_time() - start).as_secs_f64() / 1e9);
    }
}

/// This thread's time on a CPU: what other processes take doesn't count.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("Linux has it").into()
}

fn main() {
    let rounds = std::env::args().nth(1).and_then(|rounds| rounds.parse().ok()).unwrap_or(15);
    let noise: Vec<u8> = (0..65_536u32).map(|index| (index.wrapping_mul(0x9E37_79B1) >> 13) as u8).collect();
    let text = include_bytes!("engine_speeds.rs").repeat(40);
    let mut contenders = Vec::new();
    for size in [4096, 65_536] {
        let plain = &noise[..size];
        contenders.push(Contender::new(format!("memcpy {size}"), size, {
            let mut out = vec![0u8; size];
            move || black_box(&mut out).copy_from_slice(black_box(plain))
        }));
        for engine in crc::Engine::ALL {
            contenders.push(Contender::new(format!("crc32c {} {size}", engine.name()), size, move || {
                black_box(engine.checksum(black_box(plain)));
            }));
        }
        add_ciphers(&mut contenders, plain);
        add_codes(&mut contenders, plain);
        add_codecs(&mut contenders, &text[..size]);
    }
    for _ in 0..rounds {
        contenders.iter_mut().for_each(Contender::run);
    }
    println!("{:<48} {:>8} {:>8}  GB/s of CPU time, {rounds} rounds", "", "median", "best");
    for contender in &mut contenders {
        contender.rounds.sort_by(f64::total_cmp);
        let (median, best) =
            (contender.rounds[contender.rounds.len() / 2], contender.rounds[contender.rounds.len() - 1]);
        println!("{:<48} {median:>8.2} {best:>8.2}", contender.name);
    }
}

fn add_ciphers<'a>(contenders: &mut Vec<Contender<'a>>, plain: &'a [u8]) {
    let size = plain.len();
    let key: Vec<u8> = (0..64).collect();
    for key_bytes in [16, 32] {
        for engine in gcm::Engine::ALL {
            let key = gcm::GcmKey::new(engine, &key[..key_bytes]).expect("a valid key");
            let mut buffer = plain.to_vec();
            let name = format!("aes-{}-gcm seal {} {size}", key_bytes * 8, engine.name());
            contenders.push(Contender::new(name, size, move || {
                black_box(key.seal(&[0; 12], &[0; 92], black_box(&mut buffer)).expect("sealed"));
            }));
        }
    }
    for key_bytes in [32, 64] {
        for engine in xts::Engine::available() {
            for decrypt in [false, true] {
                let key = xts::XtsKey::new(engine, &key[..key_bytes]).expect("a valid key");
                let mut buffer = plain.to_vec();
                let what = if decrypt { "decrypt" } else { "encrypt" };
                let name = format!("aes-{}-xts {what} {} {size}", key_bytes * 4, engine.name());
                contenders.push(Contender::new(name, size, move || {
                    for (index, unit) in black_box(&mut buffer).chunks_exact_mut(4096).enumerate() {
                        let done =
                            if decrypt { key.decrypt(index as u128, unit) } else { key.encrypt(index as u128, unit) };
                        done.expect("a whole data unit");
                    }
                }));
            }
        }
    }
}

fn add_codes<'a>(contenders: &mut Vec<Contender<'a>>, plain: &'a [u8]) {
    let size = plain.len();
    for (data, parity) in [(4, 2), (8, 2), (8, 4)] {
        for engine in rs::Engine::available() {
            let code = rs::Code::with_engine(data, parity, engine).expect("a valid code");
            let shards: Vec<&[u8]> = (0..data).map(|_| plain).collect();
            let mut out = vec![vec![0u8; size]; parity];
            let name = format!("rs {data}+{parity} encode {} {size}", engine.name());
            contenders.push(Contender::new(name, data * size, move || {
                code.encode(black_box(&shards), black_box(&mut out)).expect("encoded");
            }));
            let code = rs::Code::with_engine(data, parity, engine).expect("a valid code");
            let present: Vec<(usize, &[u8])> = (parity..data + parity).map(|index| (index, plain)).collect();
            let mut lost: Vec<(usize, Vec<u8>)> = (0..parity).map(|index| (index, vec![0u8; size])).collect();
            let name = format!("rs {data}+{parity} recover {} {size}", engine.name());
            contenders.push(Contender::new(name, data * size, move || {
                code.recover(black_box(&present), black_box(&mut lost)).expect("recovered");
            }));
        }
    }
}

fn add_codecs<'a>(contenders: &mut Vec<Contender<'a>>, text: &'a [u8]) {
    let size = text.len();
    for policy in [Compression::Lz4, Compression::Zstd { level: 1 }, Compression::Auto] {
        let mut compressor = Compressor::default();
        let mut out = vec![0u8; size];
        let packed = compressor.pack(policy, text, &mut out).expect("packed");
        let mut target = out.clone();
        let name = format!("{policy} pack source code {size} ({} %)", 100 * packed.len_bytes / size);
        contenders.push(Contender::new(name, size, move || {
            black_box(compressor.pack(policy, black_box(text), &mut target).expect("packed"));
        }));
        let mut decompressor = Decompressor::default();
        let mut plain = vec![0u8; size];
        contenders.push(Contender::new(format!("{policy} unpack {size}"), size, move || {
            let bytes = black_box(&out[..packed.len_bytes]);
            decompressor.unpack(packed.codec, bytes, &mut plain).expect("unpacked");
        }));
    }
}
