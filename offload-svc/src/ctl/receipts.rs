//! Receipts of deletions for people.
//!
//! Owns their layout. Must not ask anything. Invariant: what a pending receipt waits for is always shown.

use super::show::{safe, table};
use crate::manage::view::Receipt;

/// One receipt, whole: what `volume delete` prints.
pub(super) fn receipt(receipt: &Receipt) -> String {
    let mut rows = table(["deletion receipt", ""], &[]);
    rows.add_row(["volume", &safe(&receipt.volume)]);
    rows.add_row(["volume UUID", &receipt.uuid]);
    rows.add_row(["pool", &receipt.pool]);
    rows.add_row(["deleted", &utc(receipt.deleted_s)]);
    rows.add_row(["key", &fate(receipt)]);
    rows.add_row(["cipher", &receipt.cipher]);
    rows.add_row(["lineage", &receipt.lineage]);
    rows.add_row(["keys of it", &receipt.keys.to_string()]);
    for check in &receipt.check_values {
        rows.add_row([format!("check value of key {}", check.epoch), check.value.clone()]);
    }
    rows.add_row(["members", &receipt.members.join("\n")]);
    let notes = notes(receipt);
    format!("{rows}\n{notes}{}", wrap(&receipt.meaning))
}

/// All of them, a line each, and what they wait for.
pub(super) fn list(receipts: &[Receipt]) -> String {
    if receipts.is_empty() {
        return "no volume has been deleted".to_owned();
    }
    let mut rows = table(["volume", "lineage", "cipher", "deleted", "key"], &[]);
    let mut text = String::new();
    for receipt in receipts {
        let (volume, lineage) = (safe(&receipt.volume), receipt.lineage.clone());
        rows.add_row([volume, lineage, receipt.cipher.clone(), utc(receipt.deleted_s), fate(receipt)]);
        let notes = notes(receipt);
        if !notes.is_empty() {
            text += &format!("{}:\n{notes}", safe(&receipt.volume));
        }
    }
    format!("{rows}\n{text}")
}

fn fate(receipt: &Receipt) -> String {
    match receipt.destroyed_s {
        Some(at_s) => format!("{}, {}", receipt.key, utc(at_s)),
        None => receipt.key.clone(),
    }
}

/// Where copies may be left, who needs the key, and what was stated.
fn notes(receipt: &Receipt) -> String {
    let mut text = String::new();
    for copy in &receipt.copies {
        let place = copy.index.map_or_else(String::new, |index| format!(" (place {index})"));
        let source = copy.source.as_ref().map_or_else(String::new, |source| format!(" {}", safe(source)));
        let member =
            copy.member.as_deref().map_or_else(|| "any member".to_owned(), |member| format!("member {member}"));
        text += &format!("  a copy may be left on {member}{place}{source}: {}\n", copy.text);
    }
    for reader in &receipt.readers {
        text += &format!("  still read by {}\n", safe(reader));
    }
    for stated in &receipt.stated_destroyed {
        text += &format!("  member {}: destroyed, as was stated on {}\n", stated.member, utc(stated.stated_s));
    }
    text
}

/// `2026-12-01 04:05:24 UTC`
fn utc(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    // Days from 0000-03-01, in eras of 400 years that begin with March (Hinnant, `civil_from_days`).
    let day = days + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * shifted + 2) / 5 + 1, if shifted < 10 { shifted + 3 } else { shifted - 9 });
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", second / 3600, second / 60 % 60, second % 60)
}

/// In lines of 100 characters at most.
fn wrap(text: &str) -> String {
    let (mut lines, mut line) = (Vec::new(), String::new());
    for word in text.split_whitespace() {
        if !line.is_empty() && line.len() + word.len() >= 100 {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    lines.push(line);
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manage::view::{KeyCopy, Stated};

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_796_098_524), "2026-12-01 04:15:24 UTC");
        assert_eq!(utc(4_107_542_399), "2100-02-28 23:59:59 UTC");
        assert_eq!(utc(4_107_542_400), "2100-03-01 00:00:00 UTC");
    }

    #[test]
    fn a_pending_receipt_says_what_it_waits_for() {
        let copy = KeyCopy {
            member: Some("c0ffee".into()),
            index: Some(3),
            source: Some("file:m3\u{1b}".into()),
            reason: "absent".into(),
            text: "not in the set since epoch 4".into(),
        };
        let stated = Stated { member: "dead".into(), stated_s: 0 };
        let waits = Receipt {
            volume: "v".into(),
            key: "pending".into(),
            copies: vec![copy],
            stated_destroyed: vec![stated],
            meaning: "what it means".into(),
            ..Receipt::default()
        };
        for text in [receipt(&waits), list(std::slice::from_ref(&waits))] {
            assert!(text.contains("pending"), "{text}");
            assert!(text.contains("member c0ffee (place 3) file:m3\\u{1b}: not in the set since epoch 4"), "{text}");
            assert!(text.contains("member dead: destroyed, as was stated on 1970-01-01"), "{text}");
        }
        assert!(receipt(&waits).ends_with("what it means"));
        assert!(list(&[]).starts_with("no volume"));
    }
}
