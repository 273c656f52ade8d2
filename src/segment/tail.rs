//! What lies behind the last record of an active log, and setting it aside before it is cut.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::WINDOW;
use super::scan::is_zero;
use crate::io::transfer::{read_exact_at, write_all_at};
use crate::io::{Disk, File, Open};
use crate::record::{HEADER_BYTES, Header, checksum, to_u64, to_usize};

/// How many bytes behind the end are searched for whole records.
const SEARCH_BYTES: u64 = 4 << 20;

/// How many bytes the search puts through the checksum before it gives up: crafted bytes could look like a record everywhere.
const SEARCH_EFFORT: u64 = 256 << 20;

/// The bytes behind a log's last record that are not zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tail {
    /// From the end of the last record to the last byte that is not zero.
    pub(crate) span: Range<u64>,
    /// Whole records with later offsets that were found in it.
    pub(crate) records: u64,
    /// Whether all of it was searched.
    pub(crate) searched: bool,
}

impl Tail {
    /// Looks at bytes `from..end` of a log whose next record would be `expected`; none if they are all zeros.
    pub(crate) fn examine(log: &dyn File, from: u64, end: u64, expected: u64) -> io::Result<Option<Self>> {
        let Some(last) = last_set_byte(log, from..end)? else { return Ok(None) };
        let span = from..last + 1;
        let searched_bytes = (span.end - span.start).min(SEARCH_BYTES);
        let mut bytes = vec![0; to_usize(searched_bytes)];
        read_exact_at(log, &mut bytes, from)?;
        // A whole record may end in zeros: they count as there.
        let zeros = (end - span.end).min(to_u64(WINDOW));
        bytes.resize(bytes.len() + to_usize(zeros), 0);
        let (records, finished) = count_records(&bytes, expected);
        Ok(Some(Self { records, searched: finished && searched_bytes == span.end - span.start, span }))
    }

    /// Whether it may hold a record that somebody could want back.
    pub(crate) fn is_worth_keeping(&self) -> bool {
        self.records > 0 || !self.searched
    }
}

/// Counts the records at or past `expected` that decode at any place; and tells whether the search came to its end.
///
/// A hint, not a proof: a value may contain an encoded record.
fn count_records(bytes: &[u8], expected: u64) -> (u64, bool) {
    let (mut at, mut records, mut effort) = (0, 0, 0);
    while let Some(header) = bytes[at..].first_chunk().map(Header::parse) {
        let fits = header.record_bytes() <= to_u64(bytes.len() - at) && header.keylen <= header.size;
        let plausible = fits && header.offset >= expected && header.offset - expected < 1 << 32;
        if plausible {
            effort += u64::from(header.size);
            if effort > SEARCH_EFFORT {
                return (records, false);
            }
            let end = at + to_usize(header.record_bytes());
            if checksum(header.timestamp, &bytes[at + HEADER_BYTES..end]) == header.crc {
                records += 1;
                at = end;
                continue;
            }
        }
        at += 1;
    }
    (records, true)
}

fn last_set_byte(log: &dyn File, range: Range<u64>) -> io::Result<Option<u64>> {
    let mut window = Vec::new();
    let mut end = range.end;
    while end > range.start {
        let start = end.saturating_sub(to_u64(WINDOW)).max(range.start);
        window.resize(to_usize(end - start), 0);
        read_exact_at(log, &mut window, start)?;
        if !is_zero(&window) {
            let index = window.iter().rposition(|&byte| byte != 0).expect("one byte is not zero");
            return Ok(Some(start + to_u64(index)));
        }
        end = start;
    }
    Ok(None)
}

/// Copies bytes `span` of the log to a file beside it, durably and whole or not at all, and gives its path.
///
/// The name tells segment and position. A copy of the same bytes, left by an opening that was interrupted, is taken for this one.
pub(crate) fn copy_aside(disk: &dyn Disk, log: &dyn File, log_path: &Path, span: &Range<u64>) -> io::Result<PathBuf> {
    let unfinished = log_path.with_extension("torn.tmp");
    {
        let copy = disk.open(&unfinished, Open::EMPTY)?;
        let mut window = Vec::new();
        let mut at = span.start;
        while at < span.end {
            window.resize(to_usize((span.end - at).min(to_u64(WINDOW))), 0);
            read_exact_at(log, &mut window, at)?;
            write_all_at(&*copy, &window, at - span.start, false)?;
            at += to_u64(window.len());
        }
        copy.sync()?;
    }
    let dir = log_path.parent().expect("a log lies in a directory");
    for attempt in 0_u32.. {
        let suffix = if attempt == 0 { format!("{}.torn", span.start) } else { format!("{}-{attempt}.torn", span.start) };
        let path = log_path.with_extension(suffix);
        match disk.rename(&unfinished, &path) {
            Ok(()) => {
                disk.sync_dir(dir)?;
                return Ok(path);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if holds_span(disk, &path, log, span)? {
                    disk.remove_file(&unfinished)?;
                    return Ok(path);
                }
            }
            Err(error) => return Err(error),
        }
    }
    unreachable!("a directory holds fewer files than a u32 counts")
}

/// Whether a file is called as such a copy is, finished or not.
pub(crate) fn is_copy(name: &OsStr) -> bool {
    let name = Path::new(name);
    name.extension().is_some_and(|extension| extension == "torn") || is_unfinished_copy(name.as_os_str())
}

/// Whether a file is called as a copy is before it is whole.
pub(crate) fn is_unfinished_copy(name: &OsStr) -> bool {
    name.to_string_lossy().ends_with(".torn.tmp")
}

/// Whether the file at `path` is a copy of bytes `span` of the log.
fn holds_span(disk: &dyn Disk, path: &Path, log: &dyn File, span: &Range<u64>) -> io::Result<bool> {
    let copy = disk.open(path, Open::READ)?;
    if copy.len()? != span.end - span.start {
        return Ok(false);
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut at = span.start;
    while at < span.end {
        let len = to_usize((span.end - at).min(to_u64(WINDOW)));
        ours.resize(len, 0);
        theirs.resize(len, 0);
        read_exact_at(log, &mut ours, at)?;
        read_exact_at(&*copy, &mut theirs, at - span.start)?;
        if ours != theirs {
            return Ok(false);
        }
        at += to_u64(len);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Batch;

    fn record(offset: u64, value: &[u8]) -> Vec<u8> {
        let batch = Batch::of(None, value).unwrap();
        let mut bytes = vec![0; to_usize(batch.bytes())];
        batch.encode_record(0, offset, 1, &mut bytes);
        bytes
    }

    #[test]
    fn whole_records_are_counted_wherever_they_lie() {
        let bytes =
            [&[7; 100][..], &record(12, b"a"), &[0; 45], &record(13, b""), &record(9, b"older"), &record(14, b"torn")[..30]].concat();
        assert_eq!(count_records(&bytes, 10), (2, true));
        assert_eq!(count_records(&bytes, 13), (1, true));
        assert_eq!(count_records(&bytes[..20], 0), (0, true));
        assert_eq!(count_records(&[], 0), (0, true));
    }

    #[test]
    fn crafted_bytes_do_not_keep_the_search_busy_for_ever() {
        // Every 28 bytes a header that claims all that follows.
        let header = |left: usize| Header { offset: 0, size: u32::try_from(left).unwrap(), crc: 0, timestamp: 0, keylen: 0 }.encode();
        let total: usize = 28 * 40_000;
        let bytes: Vec<u8> = (0..40_000).flat_map(|index| header(total - 28 * (index + 1))).collect();
        assert_eq!(count_records(&bytes, 0), (0, false));
    }
}
