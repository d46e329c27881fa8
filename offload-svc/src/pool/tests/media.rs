//! What stands on members: superblocks and their damage, wrong members, keys and plaintext, the format's golden image.

use std::rc::Rc;

use nvmf_target::backend::Outcome;
use uuid::Uuid;

use super::super::checkpoint::{Part, Root, SectionWriter};
use super::super::codec::{Reader, Writer};
use super::super::layers::Tree;
use super::super::map::{Extent, RecordLocation, Run, What};
use super::super::message::MergedShard;
use super::super::options::SUPERBLOCK_AREA_BYTES;
use super::super::page::{Body, Page, PageId, PagePointer, Shape};
use super::super::probe::{ChooseError, Found};
use super::super::receipts::{Entry, Receipt};
use super::super::segments::{SegmentUse, Window};
use super::super::shields::Departed;
use super::super::stripe::{History, Sequence, ShardHeader, StripeLocation};
use super::super::superblock::{SLOT_BYTES, Superblock};
use super::super::*;
use super::harness::{LAYOUT, Rig, kek, spec};
use super::model::run_of;
use super::sim::{Disks, World};
use crate::stages::cipher::Cipher;
use crate::stages::crc::crc32c;
use crate::stages::keys::{KeyEpoch, LineageId, Shield};

const MIB: u64 = 1 << 20;

fn volume_rig() -> Rig {
    let rig = Rig::new(LAYOUT, 40, 1).with_volume(16 * MIB, 4096);
    rig.live(1, |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 100, 1).await, Outcome::Success);
    });
    rig
}

fn mount_error(rig: &Rig) -> MountError {
    let world = World::new(&rig.disks, 9);
    let (rig, env) = (rig.clone(), world.env());
    let result = world.run(async move { mount(env, &rig.inputs, rig.options.clone(), kek()).await.err() });
    world.end(9);
    result.expect("no crash").expect("this must not mount")
}

fn assert_intact(rig: &Rig, what: &str) {
    let what = what.to_owned();
    rig.live(7, |live| async move {
        assert_eq!(live.volume("v").stamps(0, 100).await.expect(&what), vec![1; 100], "{what}");
    });
}

/// Every superblock of the members, changed by `edit`, checksum put right.
fn edit_superblocks(disks: &Disks, members: std::ops::Range<usize>, edit: impl Fn(&mut [u8])) {
    for disk in &disks.0[members] {
        for slot in 0..2 {
            let at = slot * SLOT_BYTES as u64;
            let mut page = disk.borrow().page(at);
            if page.iter().all(|byte| *byte == 0) {
                continue;
            }
            edit(&mut page);
            let crc = crc32c(&page[..SLOT_BYTES - 4]);
            page[SLOT_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
            disk.borrow_mut().set_page(at, &page);
        }
    }
}

/// H94: superblock fields edited to what can't be, checksum put right: the mount fails with the field named, no panic.
#[test]
fn h94_edited_superblocks_are_refused_with_the_field_named() {
    // (first byte, bytes, part of the message)
    let edits: [(usize, &[u8], &str); 15] = [
        (8, &[4, 0], "format version 4.0"),
        (48, &[200], "index"),
        (49, &[0], "k = 0"),
        (49, &[255], "k+m"),
        (50, &[0], "m = 0"),
        (51, &[9], "code"),
        (52, &[1, 0, 0, 0], "segment_bytes"),
        (56, &[0, 0, 0, 0], "shard_bytes_max"),
        (60, &[255, 255, 255, 255], "member_bytes"),
        (60, &[1, 0, 0, 0], "segments"),
        (80, &[0; 8], "epoch"),
        (88, &[255; 8], "generation"),
        (120, &[255; 4], "checkpoint"),
        (3648, &[255; 8], "shield_number"),
        (3656, &[255; 8], "shield_number"),
    ];
    for (at, bytes, expected) in edits {
        let rig = volume_rig();
        edit_superblocks(&rig.disks, 0..6, |page| page[at..at + bytes.len()].copy_from_slice(bytes));
        let message = mount_error(&rig).to_string();
        assert!(message.contains(expected), "byte {at}: {message:?} does not name {expected:?}");
    }
}

/// One or two members with damaged superblocks are members lost, no more.
#[test]
fn damaged_superblocks_on_two_members_are_survived() {
    let rig = volume_rig();
    edit_superblocks(&rig.disks, 1..3, |page| page[49] = 0);
    assert_intact(&rig, "two superblocks damaged");
}

/// H61: a truncated member is refused and not written to; a longer copy is taken; members in another order are found.
#[test]
fn h61_the_superblock_decides_about_sizes_and_places() {
    let mut rig = volume_rig();
    rig.inputs[2].size_bytes = rig.inputs[2].size_bytes.map(|size| size - MIB);
    let before: Vec<_> = rig.disks.0[2].borrow().pages().map(|(at, page)| (at, page.to_vec())).collect();
    assert_intact(&rig, "truncated");
    let after: Vec<_> = rig.disks.0[2].borrow().pages().map(|(at, page)| (at, page.to_vec())).collect();
    assert!(before == after, "the truncated member was written to");
    let mut rig = volume_rig();
    rig.inputs[4].size_bytes = rig.inputs[4].size_bytes.map(|size| size + MIB);
    assert_intact(&rig, "longer");
    let turned = Disks((0..6).map(|i| std::cell::RefCell::new(rig.disks.0[(i + 2) % 6].borrow().copy())).collect());
    let rig = Rig { disks: Rc::new(turned), ..rig };
    assert_intact(&rig, "another order");
    rig.live(8, |live| async move {
        let names: Vec<_> = live.pool.status().members.into_iter().map(|member| member.name).collect();
        assert_eq!(names[2].as_deref(), Some("mem:0"));
        assert_eq!(live.pool.status().health, Health::Healthy);
    });
}

/// A copy of a member beside it, members of two pools, too few members: refused, with the reason.
#[test]
fn members_that_do_not_belong_are_refused() {
    let (rig, other) = (volume_rig(), volume_rig_of(2));
    *rig.disks.0[5].borrow_mut() = rig.disks.0[4].borrow().copy();
    assert!(matches!(mount_error(&rig), MountError::Members { source: ChooseError::SameMember { .. }, .. }));
    *rig.disks.0[5].borrow_mut() = other.disks.0[5].borrow().copy();
    assert!(matches!(mount_error(&rig), MountError::Members { source: ChooseError::OtherPool { .. }, .. }));
    let mut rig = volume_rig();
    for index in [0, 1, 2] {
        rig.inputs[index].size_bytes = None;
    }
    let error = mount_error(&rig);
    assert!(
        matches!(error, MountError::Members { source: ChooseError::TooFew { present: 3, needed: 4, .. }, .. }),
        "{error}"
    );
}

fn volume_rig_of(seed: u64) -> Rig {
    let rig = Rig::new(LAYOUT, 40, 1);
    let world = World::new(&rig.disks, seed);
    let (inner, env) = (rig.clone(), world.env());
    world.run(async move { format(&env, &inner.inputs, inner.layout).await.expect("blank") }).expect("no crash");
    world.end(seed);
    rig
}

/// Where the missing members could have gone on alone, only force mounts; afterwards they are stale.
#[test]
fn a_set_with_a_possible_rival_mounts_by_force_only() {
    let layout = Layout { data_shards: 2, parity_shards: 2, ..LAYOUT };
    let rig = Rig::new(layout, 40, 1).with_volume(16 * MIB, 4096);
    let mut half = rig.clone();
    half.inputs[0].size_bytes = None;
    half.inputs[1].size_bytes = None;
    assert!(matches!(mount_error(&half), MountError::Members { source: ChooseError::Rival { .. }, .. }));
    half.options.force.rival = true;
    half.live(1, |live| async move {
        assert_eq!(live.volume("v").write_stamp(0, 1, 1).await, Outcome::Success);
    });
    rig.live(2, |live| async move {
        assert_eq!(live.volume("v").stamps(0, 1).await.expect("the forced pair has it"), [1]);
        assert_eq!(live.pool.status().mount.members_stale, [0, 1]);
    });
}

/// Format writes to blank members only, and says what it found; a format cut short at any write can be done again.
#[test]
fn format_takes_blank_members_only_and_can_be_cut_short() {
    for crash_at in 1..30 {
        let rig = Rig::new(LAYOUT, 40, 1);
        let world = World::new(&rig.disks, crash_at);
        world.crash_at.set(Some(crash_at));
        let (inner, env) = (rig.clone(), world.env());
        let cut = world.run(async move { format(&env, &inner.inputs, inner.layout).await.is_ok() });
        world.end(crash_at);
        let world = World::new(&rig.disks, crash_at + 1);
        let (inner, env) = (rig.clone(), world.env());
        let inspection = world.run(async move {
            let inspection = inspect(&env, &inner.inputs).await;
            if inspection == Inspection::Formattable {
                format(&env, &inner.inputs, inner.layout).await.expect("as inspected");
            }
            inspection
        });
        world.end(crash_at);
        if matches!(inspection, Ok(Inspection::Other(_))) {
            // Torn in its very first write: nothing says that this was us.
            assert!(crash_at <= 2, "cut at {crash_at}: {cut:?} {inspection:?}");
            continue;
        }
        rig.live(3, |live| async move { assert!(live.pool.volumes().is_empty()) });
    }
    let rig = Rig::new(LAYOUT, 40, 1);
    rig.disks.0[3].borrow_mut().set_page(8192, &[0, 0, 7, 1]);
    let world = World::new(&rig.disks, 1);
    let (inner, env) = (rig.clone(), world.env());
    let error = world.run(async move { format(&env, &inner.inputs, inner.layout).await.expect_err("data is there") });
    let message = error.expect("no crash").to_string();
    assert_eq!(message, "mem:3: not blank: data from byte 8194 on. Nothing was written");
    assert!(rig.disks.0[0].borrow().pages().next().is_none());
    assert_eq!(Found::Blank, Found::Blank);
}

/// What stands behind the superblocks' place, at the end, or spread over a member is somebody's: it is not formatted, not
/// even where every superblock of a pool was wiped.
#[test]
fn data_further_in_is_no_blank_member() {
    let error_of = |rig: &Rig| {
        let world = World::new(&rig.disks, 1);
        let (inner, env) = (rig.clone(), world.env());
        let error =
            world.run(async move { format(&env, &inner.inputs, inner.layout).await.expect_err("data is there") });
        error.expect("no crash").to_string()
    };
    let size = Rig::new(LAYOUT, 40, 1).inputs[3].size_bytes.expect("there");
    // btrfs has its mark at 64 KiB; md and GPT have theirs near the end.
    for at in [(64 << 10) + 4096 * 3, 1 << 20, size - 4096, size - (100 << 10)] {
        let rig = Rig::new(LAYOUT, 40, 1);
        rig.disks.0[3].borrow_mut().set_page(at, b"_BHRfS_M");
        assert_eq!(error_of(&rig), format!("mem:3: not blank: data from byte {at} on. Nothing was written"));
    }
    let rig = volume_rig();
    for disk in &rig.disks.0 {
        for slot in 0..2 {
            disk.borrow_mut().set_page(slot * SLOT_BYTES as u64, &[0; SLOT_BYTES]);
        }
    }
    assert!(error_of(&rig).contains("not blank"));
}

/// No plaintext at rest: neither data nor a volume's key.
#[test]
fn no_plaintext_at_rest() {
    let rig = Rig::new(LAYOUT, 40, 1).with_volume(16 * MIB, 4096);
    let pattern = b"a pattern that nobody else would write";
    rig.live(1, move |live| async move {
        let vol = live.volume("v");
        let mut block = run_of(1, 0, 1, 4096);
        for slot in 0..60 {
            block[64 * slot..64 * slot + pattern.len()].copy_from_slice(pattern);
            assert_eq!(vol.write(slot as u64, &block).await, Outcome::Success);
        }
    });
    for disk in &rig.disks.0 {
        for (at, page) in disk.borrow().pages() {
            assert!(!page.windows(16).any(|window| window == &pattern[..16]), "plaintext at {at}");
        }
    }
}

/// H101: two copies of one pool under the same key, each writing another text to the same block, give no common keystream.
#[test]
fn h101_copied_members_do_not_repeat_a_keystream() {
    let rig = Rig::new(LAYOUT, 40, 1);
    let world = World::new(&rig.disks, 1);
    let (inner, env) = (rig.clone(), world.env());
    world
        .run(async move {
            format(&env, &inner.inputs, inner.layout).await.expect("blank");
            let pool = inner.start(&env).await.expect("formatted");
            let compression = crate::stages::compress::Compression::None;
            pool.create_volume(VolumeSpec { compression, ..spec("v", MIB, 4096) }).await.expect("room");
            pool.shutdown().await.expect("good");
        })
        .expect("no crash");
    world.end(1);
    let copy = Rig { disks: rig.disks.copy(), ..rig.clone() };
    let (one, two) = (run_of(11, 9, 1, 4096), run_of(13, 9, 1, 4096));
    let plain: Vec<u8> = one.iter().zip(&two).map(|(a, b)| a ^ b).collect();
    // A raw record at the front of a shard: after the headers and one block's checksum comes the text, enciphered.
    let written = |rig: &Rig, seed: u64, text: Vec<u8>| -> Vec<Vec<u8>> {
        rig.live(seed, move |live| async move {
            assert_eq!(live.volume("v").write(9, &text).await, Outcome::Success);
        });
        let is_record = |page: &[u8]| page.starts_with(b"SHRD") && page[256..].starts_with(b"SREC");
        let of_disk = |disk: &std::cell::RefCell<super::sim::Disk>| -> Vec<Vec<u8>> {
            disk.borrow()
                .pages()
                .filter(|(_, page)| is_record(page))
                .map(|(_, page)| page[256 + 116..].to_vec())
                .collect()
        };
        rig.disks.0.iter().flat_map(of_disk).collect()
    };
    let (first, second) = (written(&rig, 2, one), written(&copy, 3, two));
    assert!(!first.is_empty() && !second.is_empty());
    for (a, b) in first.iter().flat_map(|a| second.iter().map(move |b| (a, b))) {
        let cipher: Vec<u8> = a.iter().zip(b).map(|(a, b)| a ^ b).collect();
        assert!(cipher[..64] != plain[..64] && cipher[64..128] != plain[64..128], "keystream repeated");
    }
}

/// DESIGN 3.7: the format of superblocks, pinned.
#[test]
fn golden_superblock() {
    let members = (0..6u128).map(|i| super::super::superblock::MemberEntry {
        uuid: Uuid::from_u128(0x1000 + i),
        active: i != 3,
        epoch: if i == 3 { 4 } else { 5 },
        whole_below: if i == 3 { 0x1234 } else { 0 },
        suspect: i == 4,
        known: if i == 3 { 0x35 } else { 0 },
        shield_floor: if i == 3 { 0x41 } else { 0 },
    });
    let replacement = super::super::superblock::Replacement {
        uuid: Uuid::from_u128(0x2003),
        epoch: 5,
        whole_below: 7,
        known: 0x36,
        shield_floor: 0x42,
    };
    let block = Superblock {
        clean: true,
        formatting: false,
        pool: Uuid::from_u128(0xABCD),
        member: Uuid::from_u128(0x1002),
        index: 2,
        layout: Layout::default(),
        segments: 100,
        member_bytes: SUPERBLOCK_AREA_BYTES + 100 * (4 << 20),
        epoch: 5,
        generation: 77,
        mounts: 3,
        mount_id: 99,
        checkpoint: Some(super::super::superblock::CheckpointPointer {
            root: StripeLocation { segment: 9, start_block: 4, shard_blocks: 1, data_shards: 1, rotation: 3 },
            sequence: Sequence { number: 41, nonce: 42 },
            payload_bytes: 43,
            payload_crc: 44,
            shield: Shield::new([0x5E; 32]),
        }),
        members: members.collect(),
        replacements: (0..6).map(|i| (i == 3).then_some(replacement)).collect(),
        scrub: super::super::superblock::ScrubRecord {
            running: true,
            next: 21,
            stripes: 22,
            bad: 23,
            repaired: 24,
            lost: 25,
            started_s: 26,
            ended_s: 27,
        },
        given_up: super::super::superblock::GivenUp { times: 31, last_s: 32, stripes: 33, segments: 34 },
        shield_number: 0x45,
        shield_floor: 0x44,
        departed: vec![Departed { uuid: Uuid::from_u128(0x3001), place: 2, epoch: 3, floor: 0x40, at_s: 51 }],
    };
    let bytes = block.to_bytes();
    assert_eq!(Superblock::parse(&bytes), Ok(block));
    assert_eq!(bytes[..16], *b"SLUICEPL\x03\x00\x00\x00\x01\x00\x00\x00");
    assert_eq!(format!("{:08x}", crc32c(&bytes[..SLOT_BYTES - 4])), GOLDEN_SUPERBLOCK);
}

/// DESIGN 3.7: a superblock of format 1.0, which knows nothing of members coming back, is read: then all is to be filled.
#[test]
fn a_superblock_of_an_older_minor_version_is_read() {
    let rig = volume_rig();
    edit_superblocks(&rig.disks, 0..6, |page| {
        page[8..12].copy_from_slice(&[1, 0, 0, 0]);
        for place in 0..32 {
            page[192 + 40 * place + 32..192 + 40 * place + 40].fill(0);
        }
        page[1472..2560].fill(0);
    });
    let block = Superblock::parse(&rig.disks.0[0].borrow().page(0)).expect("as 1.0 wrote it");
    assert!(block.replacements.iter().all(Option::is_none) && block.members.iter().all(|line| line.whole_below == 0));
    assert_intact(&rig, "format 1.0");
}

const GOLDEN_SUPERBLOCK: &str = "bf60321b";

/// DESIGN 3.7: the format of a shard's header and of a checkpoint's sections, pinned.
#[test]
fn golden_stripe_and_checkpoint() {
    let stripe = StripeLocation { segment: 3, start_block: 8, shard_blocks: 2, data_shards: 3, rotation: 1 };
    let sequence = Sequence { number: 0x1122, nonce: 0x3344_5566 };
    let header = ShardHeader {
        void: false,
        shard: 1,
        parity_shards: 2,
        pool: Uuid::from_u128(0xABCD),
        location: stripe,
        sequence,
        epoch: 4,
        number: 11,
        stream: 2,
        payload_bytes: 20000,
        shard_crcs: vec![1, 2, 3, 4, 5],
        history: History { settled: 11, written: 0b110 },
    };
    let mut bytes = vec![0; super::super::stripe::HEADER_BYTES];
    header.write_to(&mut bytes);
    assert_eq!(bytes[..8], *b"SHRD\x01\x00\x01\x02");
    assert_eq!(format!("{:08x}", crc32c(&bytes[..bytes.len() - 4])), GOLDEN_SHARD);
    let location = RecordLocation { stripe, payload_offset: 512, stored_bytes: 4210 };
    let extent =
        Extent { location, generation: 1 << 36 | 5, key_epoch: 0, record_offset: 2, record_blocks: 16, count: 7 };
    let used = SegmentUse { index: 3, sequence };
    let window = Window { uses: vec![used], added: vec![used], data: vec![(used, 5000), (used, 0)], next_sequence: 99 };
    let pointer = PagePointer { location, generation: 0x1234_5678_9ABC, key_epoch: 3, blocks: 21 };
    let tree = Tree { height: 2, root: Some(pointer) };
    let mut sections = SectionWriter::default();
    sections.tree(&MergedShard { volume: 1, shard: 15, watermark: 1 << 36, tree });
    sections.window(&window);
    sections.stream(2, 11);
    sections.receipts(&golden_receipts());
    sections.counters(2, 99);
    sections.end();
    assert_eq!(format!("{:08x}", crc32c(&sections.0)), GOLDEN_SECTIONS);
    let root = Root { parts: vec![Part { location: stripe, sequence }], volume_parts: 1 };
    assert_eq!(Root::decode(&root.encode()), Ok(root.clone()));
    assert_eq!(format!("{:08x}", crc32c(&root.encode())), GOLDEN_ROOT);
    golden_pages(extent, pointer);
}

/// One of each kind that a checkpoint keeps of deletions.
fn golden_receipts() -> Vec<Entry> {
    let receipt = Receipt {
        volume: "gone".into(),
        uuid: Uuid::from_u128(0x4001),
        lineage: LineageId(0x4002),
        cipher: Cipher::Aes256Gcm,
        newest: KeyEpoch(1),
        check_values: vec![(KeyEpoch(0), [1; 16]), (KeyEpoch(1), [2; 16])],
        deleted_s: 61,
        destroyed_s: Some(62),
        born: Some(3),
        last_shield: Some(0),
    };
    let departed = Departed { uuid: Uuid::from_u128(0x3001), place: 2, epoch: 3, floor: 0x40, at_s: 51 };
    let entries = vec![
        Entry::Receipt(Receipt { destroyed_s: None, born: None, last_shield: None, ..receipt.clone() }),
        Entry::Receipt(receipt),
        Entry::Birth(LineageId(0x4003), 7),
        Entry::Departed(departed),
        Entry::Statement(Uuid::from_u128(0x3001), 63),
    ];
    for entry in &entries {
        let mut out = Writer::default();
        entry.write(&mut out);
        assert_eq!(Entry::read(&mut Reader::new(&out.0)), Ok(entry.clone()));
        for at in 0..out.0.len() {
            let mut bad = out.0.clone();
            bad[at] ^= 0x81;
            let _ = Entry::read(&mut Reader::new(&bad));
            assert!(Entry::read(&mut Reader::new(&out.0[..at])).is_err());
        }
    }
    entries
}

/// The pages of maps, with all that they can hold; a damaged one is an error and no panic.
fn golden_pages(extent: Extent, pointer: PagePointer) {
    let shape = Shape { layout: Layout::default(), segments: 100 };
    let hole = Run { lba: 1200, count: 60, what: What::Hole };
    let leaf = Page { base: Some(pointer), orphan: true, body: Body::Leaf(vec![Run::record(1030, extent), hole]) };
    let children = vec![(0, Some(pointer)), (7, None), (255, Some(PagePointer { blocks: 3, ..pointer }))];
    let node = Page { base: None, orphan: false, body: Body::Node(children) };
    for (level, page, golden) in [(0, leaf, GOLDEN_LEAF), (2, node, GOLDEN_NODE)] {
        let range = 1024..1280;
        let bytes = page.encode(level, &range);
        assert!(bytes.len().is_multiple_of(512));
        assert_eq!(Page::decode(&bytes, level, &range, &shape), Ok(page), "level {level}");
        assert_eq!(format!("{:08x}", crc32c(&bytes)), golden, "level {level}");
        assert!(Page::decode(&bytes, level + 1, &range, &shape).is_err());
        for at in 0..bytes.len() {
            for value in [0, 1, 0x80, 0xFF] {
                let mut bad = bytes.clone();
                bad[at] = value;
                let _ = Page::decode(&bad, level, &range, &shape);
                let _ = Page::decode(&bytes[..at], level, &range, &shape);
            }
        }
    }
    let id = PageId { level: 3, index: 0x1_2345 };
    assert_eq!(PageId::of_address(id.address(9)), (9, id));
}

const GOLDEN_LEAF: &str = "60c25021";
const GOLDEN_NODE: &str = "dc1c4e47";

const GOLDEN_SHARD: &str = "3a4ae926";
const GOLDEN_SECTIONS: &str = "52dfa4a6";
const GOLDEN_ROOT: &str = "4141d1dc";
