//! The Error Information log (NVMe Base 2.0 §5.16.1.2) of one controller.
//!
//! Invariant: bounded; the newest entry comes first; the count never goes back.

use std::collections::VecDeque;

use crate::wire::log_pages::{ERROR_ENTRY_BYTES, ErrorEntry};

/// How many entries are kept (ELPE + 1).
pub const ENTRY_LIMIT: usize = 64;

/// The last errors of one controller.
#[derive(Debug, Default)]
pub struct ErrorLog {
    entries: VecDeque<ErrorEntry>,
    count: u64,
}

impl ErrorLog {
    /// Adds an error; its `error_count` is set here.
    pub fn push(&mut self, mut entry: ErrorEntry) {
        self.count += 1;
        entry.error_count = self.count;
        self.entries.truncate(ENTRY_LIMIT - 1);
        self.entries.push_front(entry);
    }

    /// How many errors there have been in all.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The log page: all entries that can be, newest first, empty ones zero.
    pub fn page(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.entries.iter().flat_map(ErrorEntry::encode).collect();
        bytes.resize(ENTRY_LIMIT * ERROR_ENTRY_BYTES, 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_newest_and_counts_all() {
        let mut log = ErrorLog::default();
        for cid in 0..100 {
            log.push(ErrorEntry {
                error_count: 0,
                sqid: 1,
                cid,
                status_field: 4,
                parameter_location: 0xFFFF,
                lba: 0,
                nsid: 1,
                trtype: 3,
            });
        }
        let page = log.page();
        assert_eq!((page.len(), log.count()), (64 * 64, 100));
        assert_eq!((page[0], page[10]), (100, 99));
        assert_eq!((page[63 * 64], page[63 * 64 + 10]), (37, 36));
    }
}
