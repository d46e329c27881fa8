use nvmf_target::wire::Status;

use super::*;
use crate::journal::JournalHeader;
use crate::lane::fake::Disk;

fn plan() -> VerifyPlan {
    VerifyPlan {
        nsid: 1,
        block_bytes: 512,
        slba: 100,
        lba_count: 203,
        command_blocks: 8,
        depth: 4,
        pattern: Pattern { seed: 5, random_percent: 40 },
    }
}

fn filled(disk: &Disk) {
    let mut queues = [disk.queue(512), disk.queue(512)];
    let (written, error) = fill(&plan(), 1, &mut queues, &StopFlag::default(), &ProgressBar::hidden());
    assert!(error.is_none());
    assert_eq!(written, 203);
}

fn checked(disk: &Disk, model: &Model) -> CheckReport {
    let mut queues = [disk.queue(512), disk.queue(512), disk.queue(512)];
    let (report, _, error) = check(&plan(), model, None, &mut queues, &StopFlag::default(), &ProgressBar::hidden());
    assert!(error.is_none());
    report
}

#[test]
fn what_was_written_is_found_and_nothing_outside_is_touched() {
    let disk = Disk::default();
    filled(&disk);
    let report = checked(&disk, &Model::uniform(1));
    assert_eq!((report.checked_blocks, report.wrong_blocks(), report.unreadable_blocks()), (203, 0, 0));
    let blocks = disk.blocks.lock().unwrap();
    assert_eq!(
        (blocks.keys().min(), blocks.keys().max(), blocks.len()),
        (Some(&(1 << 48 | 100)), Some(&(1 << 48 | 302)), 203)
    );
}

#[test]
fn each_fault_is_named_with_its_block() {
    let disk = Disk::default();
    disk.lose.lock().unwrap().push(107);
    filled(&disk);
    let block = |lba, generation| {
        let mut out = vec![0; 512];
        plan().pattern.fill(lba, generation, 512, &mut out);
        out
    };
    disk.set(150, block(151, 1));
    disk.set(160, block(160, 2));
    let mut damaged = block(170, 1);
    damaged[99] ^= 1;
    disk.set(170, damaged);
    let report = checked(&disk, &Model::uniform(1));
    assert_eq!(report.checked_blocks, 203);
    assert_eq!(
        report.listed,
        [
            "LBA 107: lost: expected generation 1 (acknowledged), found all zeroes",
            "LBA 150: misplaced: expected generation 1 (acknowledged), found the block of LBA 151, generation 1",
            "LBA 160: unexpected: expected generation 1 (acknowledged), found generation 2",
            "LBA 170: damaged: expected generation 1 (acknowledged), found generation 1, damaged from byte 99 of the block",
        ]
    );
    let stale = checked(&disk, &Model::uniform(2));
    assert_eq!(stale.faults[&ViolationKind::Stale], 199);
    assert_eq!(stale.listed.len(), LISTED);
    assert!(stale.to_text().contains("… and "));
}

#[test]
fn an_unreadable_block_is_told_from_its_neighbours() {
    let disk = Disk::default();
    filled(&disk);
    *disk.fails.lock().unwrap() = Some((205, Status::UNRECOVERED_READ));
    let report = checked(&disk, &Model::uniform(1));
    assert_eq!((report.checked_blocks, report.wrong_blocks(), report.unreadable_blocks()), (203, 0, 1));
    assert_eq!(report.listed, ["LBA 205: unreadable: Unrecovered Read Error (sct/sc 0x2/0x81)"]);
}

#[test]
fn an_interrupted_check_says_that_it_is_partial() {
    let disk = Disk::default();
    filled(&disk);
    let stop = StopFlag::default();
    stop.set();
    let mut queues = [disk.queue(512)];
    let (report, _, _) = check(&plan(), &Model::uniform(1), None, &mut queues, &stop, &ProgressBar::hidden());
    assert!(report.partial && report.checked_blocks == 0);
    assert!(report.to_text().contains("PARTIAL"));
}

struct CrashTest {
    disk: Disk,
    path: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

impl CrashTest {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { disk: Disk::default(), path: dir.path().join("journal"), _dir: dir }
    }

    fn open(&self) -> (Journal, Model) {
        Journal::open(&self.path, JournalHeader { seed: 5, block_bytes: 512, nsid: 1 }).unwrap()
    }

    /// Overwrites until the connection breaks after `commands`.
    fn load(&self, commands: usize) -> u64 {
        let (journal, model) = self.open();
        *self.disk.breaks_after.lock().unwrap() = Some(commands);
        // One queue: the same commands in every run.
        let mut queues = [self.disk.queue(512)];
        let mix = ZeroingMix { zeroes_percent: 10, deallocate_percent: 10 };
        let journal = Mutex::new(journal);
        let load = Load { mix, journal: &journal, last_generation: model.last_generation(), limit: None };
        let (acknowledged, error) =
            overwrite(&plan(), &load, &mut queues, &StopFlag::default(), &ProgressBar::hidden());
        assert!(matches!(error, Some(ToolError::Connection(_))), "{error:?}");
        *self.disk.breaks_after.lock().unwrap() = None;
        acknowledged
    }

    fn check(&self) -> CheckReport {
        let (mut journal, model) = self.open();
        let runs = model.runs(u64::from(plan().command_blocks));
        let mut queues = [self.disk.queue(512), self.disk.queue(512)];
        let stop = StopFlag::default();
        let (report, seen, error) = check(&plan(), &model, Some(&runs), &mut queues, &stop, &ProgressBar::hidden());
        assert!(error.is_none());
        journal.append(&seen).unwrap();
        report
    }
}

#[test]
fn a_journalled_load_checks_out_over_several_crashes() {
    let test = CrashTest::new();
    for round in 1..=5 {
        let acknowledged = test.load(150 * round);
        assert!(acknowledged > 100, "{acknowledged}");
        let report = test.check();
        assert!(report.checked_blocks > 20 && report.faults.is_empty(), "{}", report.to_text());
    }
    let (_, model) = test.open();
    assert!(model.last_generation() >= 150 * (1 + 2 + 3 + 4 + 5));
}

#[test]
fn a_lost_acknowledged_write_is_found_by_the_journal() {
    let test = CrashTest::new();
    test.load(400);
    assert!(test.check().faults.is_empty());
    let victim = {
        let blocks = test.disk.blocks.lock().unwrap();
        *blocks.keys().find(|key| **key > 1 << 48 | 150).unwrap() & 0xFFFF
    };
    let newest = test.disk.blocks.lock().unwrap().remove(&(1 << 48 | victim)).unwrap();
    let report = test.check();
    assert_eq!((report.faults.len(), report.faults[&ViolationKind::Lost]), (1, 1), "{}", report.to_text());
    assert!(report.listed[0].starts_with(&format!("LBA {victim}: lost")), "{:?}", report.listed);
    test.disk.set(victim, newest);
    assert!(test.check().faults.is_empty(), "a fault that was only looked at isn't written down as right");
}

#[test]
fn an_older_value_after_a_crash_is_stale() {
    let test = CrashTest::new();
    test.load(300);
    let snapshot = test.disk.blocks.lock().unwrap().clone();
    test.load(300);
    // Settles the writes whose fate the crash left open.
    assert!(test.check().faults.is_empty());
    let changed = {
        let mut blocks = test.disk.blocks.lock().unwrap();
        let changed = snapshot.iter().filter(|(lba, old)| blocks.get(lba).is_some_and(|new| new != *old)).count();
        blocks.extend(snapshot);
        changed as u64
    };
    let report = test.check();
    assert!(changed > 20);
    // Blocks that were zeroed in between show as stale too, so there are at least as many as changed.
    assert!(report.faults[&ViolationKind::Stale] >= changed, "{}", report.to_text());
}
