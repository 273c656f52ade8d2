//! Whole records that still decode behind a place where the log is none. A hint, not a proof: a value may contain an encoded record.

use std::io;
use std::ops::Range;

use crc32fast::Hasher;

use super::WINDOW;
use crate::io::File;
use crate::io::transfer::read_exact_at;
use crate::record::{HEADER_BYTES, Header, to_u64, to_usize};

/// How many bytes are searched for the beginnings of records.
const SEARCH_BYTES: u64 = 4 << 20;

/// How many bytes the search puts through the checksum before it gives up: crafted bytes could look like a record everywhere.
const SEARCH_EFFORT: u64 = 256 << 20;

/// How far from the expected offset a later one may be.
const NEAR: u64 = 1 << 32;

/// What was found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Survivors {
    /// Records with the expected offset or a later one.
    pub(crate) newer: u64,
    /// Records with earlier offsets.
    pub(crate) older: u64,
    /// Where the first of the newer ones begins.
    pub(crate) first: Option<u64>,
    /// Every place before this one was looked at.
    pub(crate) searched_to: u64,
}

impl Survivors {
    /// Looks for records in bytes `range` of a log whose next record would be `expected`.
    ///
    /// Takes [`SEARCH_BYTES`] of memory, whatever the lengths in it claim.
    pub(crate) fn search(log: &dyn File, range: Range<u64>, expected: u64) -> io::Result<Self> {
        let mut bytes = vec![0; to_usize((range.end - range.start).min(SEARCH_BYTES + to_u64(HEADER_BYTES)))];
        read_exact_at(log, &mut bytes, range.start)?;
        let (mut found, mut at, mut effort) = (Self::default(), range.start, 0);
        let end = range.end.min(range.start + SEARCH_BYTES);
        while at < end {
            let Some(header) = bytes.get(to_usize(at - range.start)..).and_then(<[u8]>::first_chunk).map(Header::parse) else { break };
            let plausible = header.record_bytes() <= range.end - at
                && header.keylen <= header.size
                && header.offset.checked_sub(expected).is_none_or(|ahead| ahead < NEAR);
            if plausible {
                effort += u64::from(header.size);
                if effort > SEARCH_EFFORT {
                    return Ok(Self { searched_to: at, ..found });
                }
                if is_record(log, &bytes, range.start, at, &header)? {
                    found.count(at, header.offset >= expected);
                    at += header.record_bytes();
                    continue;
                }
            }
            at += 1;
        }
        // What is shorter than a header at the end of the log was looked at, too.
        found.searched_to = if end == range.end { end } else { at.min(end) };
        Ok(found)
    }

    fn count(&mut self, at: u64, newer: bool) {
        if newer {
            self.newer += 1;
            self.first.get_or_insert(at);
        } else {
            self.older += 1;
        }
    }
}

/// Whether the checksum holds of the record at `at`, of which `bytes`, those of the log from `start` on, hold at least the header.
fn is_record(log: &dyn File, bytes: &[u8], start: u64, at: u64, header: &Header) -> io::Result<bool> {
    let mut hasher = Hasher::new();
    hasher.update(&header.timestamp.to_be_bytes());
    let (mut from, end) = (at + to_u64(HEADER_BYTES), at + header.record_bytes());
    let here = &bytes[to_usize(from - start)..];
    let here = &here[..here.len().min(to_usize(end - from))];
    hasher.update(here);
    from += to_u64(here.len());
    let mut window = Vec::new();
    while from < end {
        window.resize(to_usize((end - from).min(to_u64(WINDOW))), 0);
        read_exact_at(log, &mut window, from)?;
        hasher.update(&window);
        from += to_u64(window.len());
    }
    Ok(hasher.finalize() == header.crc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Backend, Disk, Open, OsDisk};
    use crate::record::Batch;

    fn record(offset: u64, value: &[u8]) -> Vec<u8> {
        let batch = Batch::of(None, value).unwrap();
        let mut bytes = vec![0; to_usize(batch.bytes())];
        batch.encode_record(0, offset, 1, &mut bytes);
        bytes
    }

    fn search(bytes: &[u8], from: u64, expected: u64) -> Survivors {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, bytes).unwrap();
        let file = OsDisk::new(Backend::Posix).unwrap().open(&path, Open::READ).unwrap();
        Survivors::search(&*file, from..to_u64(bytes.len()), expected).unwrap()
    }

    #[test]
    #[cfg_attr(miri, ignore = "on a real file")]
    fn whole_records_are_counted_wherever_they_lie() {
        let bytes =
            [&[7; 100][..], &record(12, b"a"), &[0; 45], &record(13, b""), &record(9, b"older"), &record(14, b"torn")[..30]].concat();
        let end = to_u64(bytes.len());
        assert_eq!(search(&bytes, 0, 10), Survivors { newer: 2, older: 1, first: Some(100), searched_to: end });
        assert_eq!(search(&bytes, 0, 13), Survivors { newer: 1, older: 2, first: Some(174), searched_to: end });
        assert_eq!(search(&bytes, 101, 10), Survivors { newer: 1, older: 1, first: Some(174), searched_to: end });
        assert_eq!(search(&bytes[..20], 0, 0), Survivors { searched_to: 20, ..Survivors::default() });
        assert_eq!(search(&[], 0, 0), Survivors::default());
    }

    #[test]
    #[cfg_attr(miri, ignore = "on a real file")]
    fn a_record_that_begins_in_the_searched_bytes_may_end_behind_them() {
        let long = record(5, &vec![9; to_usize(SEARCH_BYTES)]);
        let bytes = [&[7; 100][..], &long, &record(6, b"behind")].concat();
        let found = search(&bytes, 0, 5);
        assert_eq!((found.newer, found.first, found.searched_to), (1, Some(100), SEARCH_BYTES));
    }

    #[test]
    #[cfg_attr(miri, ignore = "on a real file")]
    fn crafted_bytes_do_not_keep_the_search_busy_for_ever() {
        // Every 28 bytes a header that claims all that follows.
        let header = |left: usize| Header { offset: 0, size: u32::try_from(left).unwrap(), crc: 0, timestamp: 0, keylen: 0 }.encode();
        let total: usize = 28 * 40_000;
        let bytes: Vec<u8> = (0..40_000).flat_map(|index| header(total - 28 * (index + 1))).collect();
        let found = search(&bytes, 0, 0);
        assert!(found.newer == 0 && found.searched_to < to_u64(total), "{found:?}");
    }
}
