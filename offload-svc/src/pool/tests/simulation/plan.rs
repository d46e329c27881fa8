//! A seed's plan: the shape of the pool, and what happens to it step by step.
//!
//! Owns the choice of everything that a run does. Must not know how it is carried out. Invariants: a seed gives the same plan
//! always; a step means the same whichever others are left out, so that a failing plan can be made shorter.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::super::{Layout, MountOptions, VolumeSpec};
use super::super::lies::Liar;
use super::super::sim::Mode;
use crate::stages::cipher::Cipher;
use crate::stages::compress::Compression;

/// What a plan knows: volumes, of which the first one is there from the start, snapshots, and clones.
pub const NAMES: [&str; 7] = ["v0", "v1", "v2", "s0", "s1", "c0", "c1"];
/// How many of these are volumes of their own.
const VOLUMES: usize = 3;
/// Those that hosts may write to, and how often they do.
const WRITABLE: [usize; 9] = [0, 0, 0, 0, 1, 2, 5, 5, 6];
const CIPHERS: [Cipher; 4] = [Cipher::Aes256Gcm, Cipher::Aes128Gcm, Cipher::Aes128Xts, Cipher::Aes256Xts];
const COMPRESSIONS: [Compression; 4] =
    [Compression::None, Compression::Lz4, Compression::Zstd { level: 1 }, Compression::Auto];

/// Blocks of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    pub volume: usize,
    pub lba: u64,
    pub count: u64,
}

/// One thing that happens. `member` counts the places of the set, from 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Step {
    Write {
        at: At,
        fua: bool,
        wait: bool,
    },
    /// So many writes one after the other, to make segments fill up and die.
    Churn {
        at: At,
        times: u64,
    },
    /// Writes a long range piece by piece, to make the pool full.
    Flood {
        at: At,
    },
    /// Compare and Write of one block.
    Swap(At),
    Deallocate {
        at: At,
        wait: bool,
    },
    WriteZeroes {
        at: At,
        wait: bool,
    },
    Read {
        at: At,
        wait: bool,
    },
    Verify(At),
    Flush {
        volume: usize,
    },
    Create {
        volume: usize,
        wait: bool,
    },
    Delete {
        volume: usize,
        wait: bool,
    },
    Grow {
        volume: usize,
        blocks: u64,
        wait: bool,
    },
    Snapshot {
        of: usize,
        to: usize,
        wait: bool,
    },
    Clone {
        of: usize,
        to: usize,
        wait: bool,
    },
    RotateKey {
        volume: usize,
        wait: bool,
    },
    Checkpoint {
        wait: bool,
    },
    Clean,
    Scrub {
        run: bool,
    },
    Sleep {
        ms: u64,
    },
    /// Waits until nothing is under way.
    Settle,
    /// Everything that may be read is compared.
    CheckAll,
    /// A member begins to fail.
    Away {
        member: usize,
        mode: Mode,
    },
    /// It is well again, if it can.
    Back {
        member: usize,
    },
    /// Bytes change on a member: one in so many pages.
    Rot {
        member: usize,
        one_in: u64,
        seed: u64,
    },
    /// Pages of a member can't be read: one in so many.
    BadPages {
        member: usize,
        one_in: u64,
        seed: u64,
    },
    /// A member lies about so many in a hundred.
    Lie {
        member: usize,
        liar: Liar,
        percent: u32,
        seed: u64,
    },
    /// A spare takes a member's place.
    Replace {
        member: usize,
    },
    /// All members are well, brought up to date and scrubbed.
    Heal,
    /// A clean stop, and the next mount.
    Stop,
    /// The power fails at a write or sync from now, and again at some of the following mounts.
    Crash {
        after: u64,
        again: [Option<u64>; 2],
    },
}

/// What a seed decides.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub layout: Layout,
    pub segments: u64,
    pub specs: Vec<VolumeSpec>,
    pub steps: Vec<Step>,
}

fn one<T: Copy>(rng: &mut StdRng, of: &[T]) -> T {
    of[rng.random_range(0..of.len())]
}

impl Plan {
    pub fn of(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let rng = &mut rng;
        let segment_bytes = one(rng, &[80 << 10, 128 << 10, 256 << 10]);
        let layout = Layout {
            data_shards: rng.random_range(1..=4),
            parity_shards: one(rng, &[1, 1, 2, 2, 3]),
            segment_bytes,
            shard_bytes_max: 80 << 10,
        };
        let segments = one(rng, &[28, 40, 64]);
        let specs: Vec<_> = (0..VOLUMES).map(|volume| spec(rng, volume)).collect();
        let mut taste = Taste::new(rng, &layout, &specs);
        let steps = (0..one(rng, &[40, 80, 160])).map(|_| taste.step(rng)).collect();
        Self { seed, layout, segments, specs, steps }
    }

    /// How the pool is mounted for one of its lives.
    pub fn options(&self, life: u64) -> (MountOptions, usize) {
        let mut rng = StdRng::seed_from_u64(self.seed ^ life.wrapping_mul(0x9E37_79B9));
        let rng = &mut rng;
        let options = MountOptions {
            member_timeout: Duration::from_millis(500),
            max_replay_segments: one(rng, &[14, 16, 20]),
            checkpoint_interval: Duration::from_secs(one(rng, &[2, 10])),
            map_bytes_max: one(rng, &[64 << 10, 64 << 10, 128 << 10, 1 << 20, 64 << 20]),
            commits_in_flight: one(rng, &[1, 4]),
            ..MountOptions::default()
        };
        (options, rng.random_range(1..=3))
    }
}

fn spec(rng: &mut StdRng, volume: usize) -> VolumeSpec {
    let block_bytes = one(rng, &[512, 4096, 4096]);
    VolumeSpec {
        name: NAMES[volume].to_owned(),
        uuid: None,
        // Some are far larger than the pool: their maps have more levels.
        size_bytes: one(rng, &[2 << 20, 16 << 20, 1 << 30, 1 << 40]),
        block_bytes,
        compression: one(rng, &COMPRESSIONS),
        cipher: one(rng, &CIPHERS),
    }
}

/// What a seed likes to do.
struct Taste {
    members: usize,
    blocks: Vec<u64>,
    run_blocks: Vec<u64>,
    /// Places that are written again and again.
    spots: Vec<u64>,
    /// Of ten writes, so many go to one of them.
    spots_of_ten: u32,
    longest: u64,
    /// It fills the pool.
    floods: bool,
    /// Weights of: data, volumes, upkeep, members, damage, lives.
    weights: [u32; 6],
}

impl Taste {
    fn new(rng: &mut StdRng, layout: &Layout, specs: &[VolumeSpec]) -> Self {
        let spots = (0..4).map(|_| rng.random_range(0..1 << 30)).collect();
        let of_all = |what: fn(&VolumeSpec) -> u64| {
            (0..NAMES.len()).map(|volume| what(specs.get(volume).unwrap_or(&specs[0]))).collect::<Vec<u64>>()
        };
        Self {
            members: layout.members(),
            // Most copies are of the first volume.
            blocks: of_all(|spec| spec.size_bytes / u64::from(spec.block_bytes)),
            run_blocks: of_all(|spec| (4 << 20) / u64::from(spec.block_bytes)),
            spots,
            spots_of_ten: one(rng, &[3, 8, 10]),
            longest: one(rng, &[8, 40, 200]),
            floods: rng.random_bool(0.4),
            weights: [
                one(rng, &[60, 90]),
                one(rng, &[3, 10]),
                one(rng, &[8, 20]),
                one(rng, &[0, 6, 12]),
                one(rng, &[0, 3, 10]),
                one(rng, &[4, 10]),
            ],
        }
    }

    fn step(&mut self, rng: &mut StdRng) -> Step {
        let mut pick = rng.random_range(0..self.weights.iter().sum());
        let kind = self.weights.iter().position(|weight| {
            let here = pick < *weight;
            pick = pick.saturating_sub(*weight);
            here
        });
        match kind {
            Some(0) | None => self.data(rng),
            Some(1) => self.volumes(rng),
            Some(2) => upkeep(rng),
            Some(3) => self.members(rng),
            Some(4) => self.damage(rng),
            Some(_) => lives(rng),
        }
    }

    fn at(&mut self, rng: &mut StdRng, longest: u64) -> At {
        let volume = one(rng, &WRITABLE);
        let blocks = self.blocks[volume];
        let count = if rng.random_bool(0.6) { rng.random_range(1..5) } else { rng.random_range(1..=longest) };
        let count = count.min(blocks);
        let lba = if rng.random_range(0..10) < self.spots_of_ten {
            // Around the edge of a shard's run as well as elsewhere.
            let spot = one(rng, &self.spots) % blocks;
            let around =
                if spot.is_multiple_of(2) { spot / self.run_blocks[volume] * self.run_blocks[volume] } else { spot };
            (around + rng.random_range(0..60)).saturating_sub(20)
        } else {
            rng.random_range(0..blocks)
        };
        At { volume, lba: lba.min(blocks - count), count }
    }

    fn data(&mut self, rng: &mut StdRng) -> Step {
        let (longest, wait) = (self.longest, rng.random_bool(0.4));
        match rng.random_range(0..20) {
            0 if self.floods => self.flood(rng),
            0..8 => Step::Write { at: self.at(rng, longest), fua: rng.random_bool(0.1), wait },
            8..10 => Step::Churn { at: self.at(rng, longest), times: rng.random_range(5..40) },
            10 => Step::Swap(At { count: 1, ..self.at(rng, 1) }),
            11 => Step::Deallocate { at: self.at(rng, 4 * longest), wait },
            12 => Step::WriteZeroes { at: self.at(rng, 2 * longest), wait },
            13 if rng.random_bool(0.4) => Step::Deallocate { at: self.wide(rng), wait },
            13 => Step::Deallocate { at: self.at(rng, 4 * longest), wait },
            14..18 => Step::Read { at: self.anywhere(rng), wait },
            18 => Step::Verify(self.anywhere(rng)),
            _ => Step::Flush { volume: rng.random_range(0..NAMES.len()) },
        }
    }

    /// Snapshots included.
    fn anywhere(&mut self, rng: &mut StdRng) -> At {
        let at = self.at(rng, self.longest);
        if at.volume == 0 && rng.random_bool(0.4) { At { volume: one(rng, &[3, 4]), ..at } } else { at }
    }

    fn flood(&mut self, rng: &mut StdRng) -> Step {
        let at = self.at(rng, 1);
        let count = rng.random_range(200..2000).min(self.blocks[at.volume] - at.lba);
        Step::Flood { at: At { count, ..at } }
    }

    /// A range over many shards and leaves.
    fn wide(&mut self, rng: &mut StdRng) -> At {
        let at = self.at(rng, 1);
        let count = (self.run_blocks[at.volume] * rng.random_range(1..4)).min(self.blocks[at.volume] - at.lba);
        At { count, ..at }
    }

    fn volumes(&mut self, rng: &mut StdRng) -> Step {
        let (volume, wait) = (rng.random_range(0..VOLUMES), rng.random_bool(0.5));
        match rng.random_range(0..20) {
            0..4 => Step::Create { volume, wait },
            4..9 => Step::Delete { volume: rng.random_range(0..NAMES.len()), wait },
            9..11 => {
                let volume = one(rng, &WRITABLE);
                let blocks = self.blocks[volume] + rng.random_range(1..2 * self.run_blocks[volume]);
                // What follows goes there too, where the volume has grown.
                self.blocks[volume] = blocks;
                Step::Grow { volume, blocks, wait }
            }
            11..15 => Step::Snapshot { of: one(rng, &WRITABLE), to: one(rng, &[3, 4]), wait },
            15..18 => Step::Clone { of: one(rng, &[0, 1, 3, 3, 4, 5]), to: one(rng, &[5, 6]), wait },
            _ => Step::RotateKey { volume: one(rng, &WRITABLE), wait },
        }
    }

    fn members(&mut self, rng: &mut StdRng) -> Step {
        let member = rng.random_range(0..self.members);
        let modes = [Mode::Broken, Mode::WriteBroken, Mode::Hung, Mode::Truncated];
        match rng.random_range(0..10) {
            0..4 => Step::Away { member, mode: one(rng, &modes) },
            4..7 => Step::Back { member },
            7 => Step::Replace { member },
            _ => Step::Heal,
        }
    }

    fn damage(&mut self, rng: &mut StdRng) -> Step {
        let (member, seed) = (rng.random_range(0..self.members), rng.random_range(0..1 << 20));
        let liars = [
            Liar::Flips,
            Liar::Tears,
            Liar::Misdirects,
            Liar::Loses,
            Liar::Delays,
            Liar::Garbles,
            Liar::All,
            Liar::All,
        ];
        match rng.random_range(0..10) {
            0..3 => Step::Rot { member, one_in: one(rng, &[1, 3, 20]), seed },
            3..5 => Step::BadPages { member, one_in: one(rng, &[1, 3, 20]), seed },
            5..9 => Step::Lie { member, liar: one(rng, &liars), percent: one(rng, &[3, 30, 100]), seed },
            _ => Step::Heal,
        }
    }
}

fn upkeep(rng: &mut StdRng) -> Step {
    match rng.random_range(0..12) {
        0..4 => Step::Checkpoint { wait: rng.random_bool(0.5) },
        4..6 => Step::Clean,
        6 => Step::Scrub { run: rng.random_bool(0.8) },
        7..10 => Step::Sleep { ms: one(rng, &[1, 30, 800, 5000]) },
        10 => Step::CheckAll,
        _ => Step::Settle,
    }
}

fn lives(rng: &mut StdRng) -> Step {
    if rng.random_bool(0.2) {
        return Step::Stop;
    }
    let after = one(rng, &[1, 8, 60, 400]);
    let mut again = [None; 2];
    if rng.random_bool(0.5) {
        again[0] = Some(rng.random_range(1..60));
        again[1] = rng.random_bool(0.5).then(|| rng.random_range(1..60));
    }
    Step::Crash { after: rng.random_range(0..after) + 1, again }
}
