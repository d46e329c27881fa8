use super::*;
use crate::stats::Latencies;
use std::time::Duration;

fn phase(mb_per_s: f64, wire: f64) -> Phase {
    Phase {
        user_bytes: 100,
        elapsed_s: 1.0,
        mb_per_s: Some(mb_per_s),
        host_core_s_per_gb: Some(1.0),
        service_core_s_per_gb: Some(2.0),
        rest_core_s_per_gb: None,
        wire_sent_per_byte: Some(wire),
        wire_received_per_byte: Some(0.0),
        storage_written_per_byte: None,
        namespace_written_per_byte: None,
        record_per_byte: None,
        latency_us: None,
        verified_bytes: 100,
        mismatched_bytes: 0,
    }
}

fn run(way: Way, round: usize, mb_per_s: f64, wire: f64) -> Run {
    Run { way, round, write: phase(mb_per_s, wire), read: phase(mb_per_s, wire), at_rest_per_byte: Some(0.9) }
}

fn setting(emulated: bool) -> Setting {
    Setting {
        machine: "m".into(),
        versions: "v".into(),
        emulated,
        target: "127.0.0.1:4420".into(),
        k: 4,
        m: 2,
        compression: "lz4".into(),
        cipher: "aes-256-gcm".into(),
        data: Vec::new(),
        data_lines: vec!["1 MB of something".into()],
        data_bytes: 1_000_000,
        extent_bytes: 131_072,
        outstanding: 32,
    }
}

fn report(runs: Vec<Run>, emulated: bool) -> CompareReport {
    let mut latencies = Latencies::default();
    latencies.record(Duration::from_millis(2));
    let of = |way| (way, latencies.clone(), Latencies::default());
    let shape = Shape { threads: 2, outstanding: 32 };
    let latencies = [of(Way::HostSide), of(Way::Offloaded)];
    CompareReport::new(
        setting(emulated),
        Measured { runs, latencies, host_shape: shape, offloaded_shape: shape, partial: false },
    )
}

#[test]
fn a_loss_is_said_as_plainly_as_a_win_and_overlap_is_neither() {
    let loss = report(vec![run(Way::HostSide, 1, 200.0, 1.1), run(Way::Offloaded, 1, 100.0, 1.0)], true);
    let text = loss.to_text();
    assert!(text.contains("Offloading is worse in: write throughput (0.50x), read throughput (0.50x)."), "{text}");
    assert!(text.contains("0.50 worse"), "{text}");
    let win = report(vec![run(Way::HostSide, 1, 100.0, 1.0), run(Way::Offloaded, 1, 250.0, 1.0)], true);
    assert!(win.to_text().contains("Offloading is better in: write throughput (2.50x)"));
    let overlap = vec![
        run(Way::HostSide, 1, 100.0, 1.0),
        run(Way::Offloaded, 1, 110.0, 1.0),
        run(Way::HostSide, 2, 120.0, 1.0),
        run(Way::Offloaded, 2, 130.0, 1.0),
    ];
    assert!(
        report(overlap, true)
            .to_text()
            .contains("No difference beyond the spread of the rounds: write throughput (1.09x)")
    );
}

#[test]
fn emulation_stands_in_the_title_and_in_the_table() {
    let runs = vec![run(Way::HostSide, 1, 100.0, 1.0), run(Way::Offloaded, 1, 100.0, 1.0)];
    let emulated = report(runs.clone(), true);
    assert!(emulated.title.contains("emulated DPU (cores of this machine)"));
    assert!(emulated.to_text().contains("offloaded, emulated DPU"));
    assert!(!report(runs, false).to_text().contains("emulated"));
}

#[test]
fn h162_text_and_json_come_from_the_same_figures() {
    let runs = vec![run(Way::HostSide, 1, 123.0, 1.0), run(Way::Offloaded, 1, 456.0, 1.0)];
    let report = report(runs, true);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["schema"], SCHEMA);
    assert_eq!(json["rows"][0]["host_side"]["median"], 123.0);
    assert_eq!(json["rows"][0]["offloaded"]["n"], 1);
    assert!(report.to_text().contains("123 [123–123]") && report.to_text().contains("456 [456–456]"));
    assert!(!json.to_string().contains("inf"), "no inf, no NaN");
    assert_eq!(report.rows.iter().find(|r| r.metric == "write: other CPU of the machine").unwrap().ratio, None);
}

#[test]
fn the_crossing_link_rate_is_where_the_faster_way_is_held_to_the_slower_ones_speed() {
    // Host-side: 200 MB/s, 1.2 wire bytes a byte. Offloaded: 100 MB/s, 1.0. At 100 x 1.2 x 8 = 0.96 Gbit/s they meet.
    let text = report(vec![run(Way::HostSide, 1, 200.0, 1.2), run(Way::Offloaded, 1, 100.0, 1.0)], true).to_text();
    assert!(text.contains("On a link of less than 0.96 Gbit/s offloading would write faster"), "{text}");
    let never = report(vec![run(Way::HostSide, 1, 200.0, 0.9), run(Way::Offloaded, 1, 100.0, 1.0)], true).to_text();
    assert!(!never.contains("On a link of less than"), "{never}");
}

#[test]
fn a_mismatch_is_shouted_and_nothing_read_is_not_right() {
    let mut bad = run(Way::Offloaded, 1, 100.0, 1.0);
    bad.read.mismatched_bytes = 5;
    let wrong = report(vec![run(Way::HostSide, 1, 100.0, 1.0), bad], true);
    assert!(!wrong.all_right() && wrong.to_text().contains("DATA WAS WRONG"));
    assert!(!report(vec![run(Way::HostSide, 1, 100.0, 1.0)], true).all_right());
    assert!(report(vec![run(Way::HostSide, 1, 1.0, 1.0), run(Way::Offloaded, 1, 1.0, 1.0)], true).all_right());
}
