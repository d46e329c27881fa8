use super::*;

const PATTERN: Pattern = Pattern { seed: 42, random_percent: 30 };
const HEADER: JournalHeader = JournalHeader { seed: 42, block_bytes: 4096, nsid: 1 };

fn block(lba: u64, generation: u64) -> Vec<u8> {
    let mut out = vec![0; 4096];
    PATTERN.fill(lba, generation, 4096, &mut out);
    out
}

fn record(event: Event, slba: u64, lba_count: u32, generation: u64) -> Record {
    Record { event, lba_count, slba, generation }
}

fn issued(slba: u64, generation: u64) -> Record {
    record(Event::Issued(Content::Pattern), slba, 1, generation)
}

fn acknowledged(slba: u64, generation: u64) -> Record {
    record(Event::Acknowledged(Content::Pattern), slba, 1, generation)
}

fn model(records: &[Record]) -> Model {
    let mut model = Model::default();
    records.iter().for_each(|r| model.apply(r));
    model
}

fn kind(model: &Model, lba: u64, content: &[u8]) -> Option<ViolationKind> {
    model.check(PATTERN, lba, content).err().map(|v| v.kind)
}

#[test]
fn an_acknowledged_write_must_be_there_and_a_later_issued_one_may() {
    let model = model(&[issued(5, 1), acknowledged(5, 1), issued(5, 2), acknowledged(5, 2), issued(5, 3)]);
    assert_eq!(kind(&model, 5, &block(5, 2)), None);
    assert_eq!(kind(&model, 5, &block(5, 3)), None);
    assert_eq!(kind(&model, 5, &block(5, 1)), Some(ViolationKind::Stale));
    assert_eq!(kind(&model, 5, &block(5, 4)), Some(ViolationKind::Unexpected));
    assert_eq!(kind(&model, 5, &[0; 4096]), Some(ViolationKind::Lost));
    assert_eq!(kind(&model, 5, &[9; 4096]), Some(ViolationKind::Lost));
    assert_eq!(kind(&model, 5, &block(6, 2)), Some(ViolationKind::Misplaced));
}

#[test]
fn half_a_block_is_torn_even_if_both_halves_were_allowed() {
    let model = model(&[issued(5, 1), acknowledged(5, 1), issued(5, 2)]);
    let mut mixed = block(5, 1);
    mixed[2048..].copy_from_slice(&block(5, 2)[2048..]);
    assert_eq!(kind(&model, 5, &mixed), Some(ViolationKind::Torn));
}

#[test]
fn a_write_never_acknowledged_may_be_absent_but_not_in_part() {
    let model = model(&[issued(5, 1)]);
    assert_eq!(kind(&model, 5, &[0; 4096]), None);
    assert_eq!(kind(&model, 5, &[7; 4096]), None, "what was there before the journal");
    assert_eq!(kind(&model, 5, &block(5, 1)), None);
    let mut half = block(5, 1);
    half[512..].fill(0);
    assert_eq!(kind(&model, 5, &half), Some(ViolationKind::Torn));
}

#[test]
fn a_value_once_seen_never_reverts() {
    let mut model = model(&[issued(5, 1), acknowledged(5, 1), issued(5, 2)]);
    let seen_old = model.check(PATTERN, 5, &block(5, 1)).unwrap().expect("an open write was settled");
    let mut after_old = model.clone();
    after_old.apply(&seen_old);
    assert_eq!(kind(&after_old, 5, &block(5, 2)), Some(ViolationKind::Unexpected), "a write seen undone came back");
    let seen_new = model.check(PATTERN, 5, &block(5, 2)).unwrap().expect("an open write was settled");
    model.apply(&seen_new);
    assert_eq!(kind(&model, 5, &block(5, 1)), Some(ViolationKind::Stale), "a write seen was undone");
    assert_eq!(model.check(PATTERN, 5, &block(5, 2)), Ok(None), "nothing is open any more");
}

#[test]
fn a_first_write_seen_absent_stays_absent() {
    let mut model = model(&[issued(5, 1)]);
    let seen = model.check(PATTERN, 5, &[0; 4096]).unwrap().expect("an open write was settled");
    assert_eq!(seen.generation, 0);
    model.apply(&seen);
    assert_eq!(kind(&model, 5, &block(5, 1)), Some(ViolationKind::Unexpected));
    assert_eq!(kind(&model, 5, &[0; 4096]), None);
}

#[test]
fn h164_zeroed_blocks_must_read_zero_once_acknowledged() {
    let zeroes = |event: fn(Content) -> Event, g| record(event(Content::Zeroes), 5, 1, g);
    let mut model = model(&[issued(5, 1), acknowledged(5, 1), zeroes(Event::Issued, 2)]);
    assert_eq!(kind(&model, 5, &[0; 4096]), None);
    assert_eq!(kind(&model, 5, &block(5, 1)), None);
    model.apply(&zeroes(Event::Acknowledged, 2));
    assert_eq!(kind(&model, 5, &[0; 4096]), None);
    assert_eq!(kind(&model, 5, &block(5, 1)), Some(ViolationKind::Stale));
    assert_eq!(kind(&model, 5, &[3; 4096]), Some(ViolationKind::Lost));
}

#[test]
fn an_acknowledgement_settles_older_unknown_writes() {
    // Write 1's fate was unknown (the connection broke); write 2 on the new association completed.
    let model = model(&[issued(5, 1), issued(5, 2), acknowledged(5, 2)]);
    assert_eq!(kind(&model, 5, &block(5, 1)), Some(ViolationKind::Stale), "an old association's write took effect");
}

#[test]
fn records_survive_the_file_and_a_cut_tail_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let records = [record(Event::Issued(Content::Zeroes), 10, 16, 9), acknowledged(11, 10)];
    let (mut journal, empty) = Journal::open(&path, HEADER).unwrap();
    assert_eq!(empty.last_generation(), 0);
    journal.append(&records).unwrap();
    journal.append(&[acknowledged(12, 11)]).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for cut in 1..RECORD_BYTES {
        std::fs::write(&path, &whole[..whole.len() - cut]).unwrap();
        let (_, model) = Journal::open(&path, HEADER).unwrap();
        assert_eq!(model.last_generation(), 10);
        assert_eq!(model.settled_blocks(), 1);
    }
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let (mut journal, _) = Journal::open(&path, HEADER).unwrap();
    journal.append(&[acknowledged(12, 12)]).unwrap();
    let (_, model) = Journal::open(&path, HEADER).unwrap();
    assert_eq!(model.last_generation(), 12, "appending after a cut keeps records aligned");
    assert_eq!(model.acknowledged_writes(), 2);
}

#[test]
fn a_damaged_or_foreign_journal_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let (mut journal, _) = Journal::open(&path, HEADER).unwrap();
    journal.append(&[issued(1, 1), issued(2, 2)]).unwrap();
    let good = std::fs::read(&path).unwrap();
    for byte in 0..good.len() {
        let mut bad = good.clone();
        bad[byte] ^= 0x10;
        std::fs::write(&path, bad).unwrap();
        assert!(Journal::open(&path, HEADER).is_err(), "byte {byte}");
    }
    std::fs::write(&path, &good).unwrap();
    let other = Journal::open(&path, JournalHeader { seed: 43, ..HEADER });
    assert!(matches!(other, Err(JournalError::Mismatch { what: "seed", journal: 42, now: 43, .. })));
    assert_eq!(Journal::peek(&path).unwrap(), HEADER);
}

#[test]
fn runs_join_neighbours_up_to_the_limit() {
    let model = model(&[record(Event::Issued(Content::Pattern), 10, 5, 1), issued(20, 2)]);
    assert_eq!(model.runs(3), [(10, 3), (13, 2), (20, 1)]);
    assert_eq!(model.runs(100), [(10, 5), (20, 1)]);
}

#[test]
fn a_journal_as_of_a_moment_keeps_the_promises_of_then_and_the_attempts_since() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, then] = ["whole", "then"].map(|name| folder.path().join(name));
    let seen = record(Event::Seen(Content::Pattern), 6, 1, 2);
    let records = [issued(5, 1), acknowledged(5, 1), issued(6, 2), issued(5, 3), acknowledged(5, 3), seen];
    Journal::open(&whole, HEADER).unwrap().0.append(&records).unwrap();
    // Three records, and the length of a fourth one that was being written.
    as_of(&whole, (HEADER_BYTES + 3 * RECORD_BYTES + 7) as u64, &then).unwrap();
    let (_, model) = Journal::open(&then, HEADER).unwrap();
    assert_eq!(model.acknowledged_writes(), 1);
    assert_eq!([1, 3].map(|generation| kind(&model, 5, &block(5, generation))), [None, None]);
    assert_eq!(kind(&model, 5, &[0; 4096]), Some(ViolationKind::Lost));
    assert_eq!([&block(6, 2)[..], &[0; 4096]].map(|content| kind(&model, 6, content)), [None, None]);
    std::fs::write(&whole, b"something else").unwrap();
    assert!(matches!(as_of(&whole, 64, &then), Err(JournalError::NotAJournal { .. })));
}
