//! Judges a partition's directory by docs/format.md, strictly, and by nothing of the engine.
//!
//! [`check`] reads everything and lists what it finds, each find with a code and a severity:
//! `Info` is legal (preallocated zeros, files of other names), `Warn` and `Error` are not.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::format::{ENTRY, HEADER, crc, segment_path};

/// When a wait for something that must come by itself is taken for a hang.
pub const HANG_LIMIT: Duration = Duration::from_secs(120);

/// How far behind a damage whole records are looked for.
const SEARCH_BYTES: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    Info,
    Warn,
    Error,
}
use Severity::{Error, Info, Warn};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub file: String,
    pub code: &'static str,
    pub at: u64,
    pub severity: Severity,
    pub detail: String,
}

/// A record and where it lies.
#[derive(Clone, PartialEq, Eq)]
pub struct Found {
    pub offset: u64,
    pub timestamp: u64,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub base: u64,
    pub position: u64,
}

impl Found {
    pub fn bytes(&self) -> u64 {
        (HEADER + self.key.len() + self.value.len()) as u64
    }

    pub fn end(&self) -> u64 {
        self.position + self.bytes()
    }
}

impl std::fmt::Debug for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { offset, timestamp, key, value, base, position } = self;
        let short = |bytes: &[u8]| format!("{}[{}]", bytes[..bytes.len().min(24)].escape_ascii(), bytes.len());
        write!(f, "{offset} @{base}:{position} t={timestamp} {} = {}", short(key), short(value))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub base: u64,
    pub log_len: u64,
    /// Where its last whole record ends.
    pub valid_end: u64,
    pub records: u64,
    pub damaged: bool,
    /// No damage or gap lies before it.
    pub in_readable_prefix: bool,
}

#[derive(Clone, Debug)]
pub struct Report {
    pub records: Vec<Found>,
    pub findings: Vec<Finding>,
    pub segments: Vec<Segment>,
    pub first_offset: u64,
    /// How many records can be read from the first one on without meeting damage.
    pub readable: u64,
    pub next_offset: u64,
    /// Where the next record goes in the last segment of the readable prefix.
    pub next_position: u64,
}

impl Report {
    pub fn codes(&self) -> Vec<&'static str> {
        let mut codes: Vec<_> = self.findings.iter().map(|finding| finding.code).collect();
        codes.sort_unstable();
        codes.dedup();
        codes
    }

    /// What is not legal.
    pub fn wrong(&self) -> Vec<&Finding> {
        self.findings.iter().filter(|finding| finding.severity > Info).collect()
    }

    /// Offset, timestamp, key and value of what can be read.
    pub fn readable_records(&self) -> &[Found] {
        &self.records[..self.readable as usize]
    }
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, file: &str, code: &'static str, at: usize, severity: Severity, detail: String) {
        self.0.push(Finding { file: file.into(), code, at: at as u64, severity, detail });
    }
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

pub fn u32_at(bytes: &[u8], at: usize) -> usize {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

/// One past the last byte that is not zero.
pub fn data_end(bytes: &[u8]) -> usize {
    let mut end = bytes.len();
    let block = [0; 4096];
    while end >= block.len() && bytes[end - block.len()..end] == block {
        end -= block.len();
    }
    bytes[..end].iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1)
}

/// `<20 digits>.<extension>` with a base that fits in 64 bits.
fn parse_name(name: &str) -> Option<(u64, &str)> {
    let (digits, extension) = name.split_once('.')?;
    let known = ["log", "index", "timeindex"].contains(&extension);
    let shaped = digits.len() == 20 && digits.bytes().all(|digit| digit.is_ascii_digit());
    if known && shaped { Some((digits.parse().ok()?, extension)) } else { None }
}

/// Whole records that still decode behind a damage: with offsets from `expected` on, before it, and where the first of the former is.
fn survivors(bytes: &[u8], start: usize, expected: u64) -> (u64, u64, usize) {
    let (mut newer, mut older, mut first) = (0, 0, None);
    let mut at = start;
    let end = bytes.len().min(start + SEARCH_BYTES);
    while at + HEADER <= end {
        let (offset, size, keylen) = (u64_at(bytes, at), u32_at(bytes, at + 8), u32_at(bytes, at + 24));
        let near = u128::from(offset) < u128::from(expected) + (1 << 32);
        if near && keylen <= size && size <= bytes.len() - at - HEADER {
            let body = &bytes[at + HEADER..at + HEADER + size];
            if crc(u64_at(bytes, at + 16), &[], body) as usize == u32_at(bytes, at + 12) {
                if offset >= expected {
                    newer += 1;
                    first.get_or_insert(at);
                } else {
                    older += 1;
                }
                at += HEADER + size;
                continue;
            }
        }
        at += 1;
    }
    (newer, older, first.unwrap_or(start))
}

/// What the bytes of one .log hold.
pub struct Scan {
    pub records: Vec<Found>,
    pub valid_end: usize,
    pub damaged: bool,
}

/// Walks a .log from its start.
pub fn scan(bytes: &[u8], base: u64) -> Scan {
    scan_log("", bytes, base, true, &mut Findings(Vec::new()))
}

fn scan_log(name: &str, bytes: &[u8], base: u64, last: bool, findings: &mut Findings) -> Scan {
    let mut records: Vec<Found> = Vec::new();
    let (mut at, mut expected) = (0, base);
    let data_end = data_end(bytes);
    while at < bytes.len() {
        let left = bytes.len() - at;
        if at >= data_end {
            findings.add(name, "ZERO_TAIL", at, if last { Info } else { Warn }, format!("{left} zero bytes to the end of the file"));
            return Scan { records, valid_end: at, damaged: false };
        }
        let fault = if left < HEADER {
            Some(("TORN_HEADER", format!("{left} bytes left")))
        } else {
            let (offset, size, keylen) = (u64_at(bytes, at), u32_at(bytes, at + 8), u32_at(bytes, at + 24));
            if offset != expected {
                let code = if offset > expected { "OFFSET_GAP" } else { "OFFSET_BACKWARDS" };
                Some((code, format!("found {offset}, expected {expected}")))
            } else if keylen > size {
                Some(("KEYLEN_GT_SIZE", format!("keylen {keylen}, size {size}")))
            } else if size > left - HEADER {
                Some(("BODY_PAST_END", format!("size {size}, {} bytes follow the header", left - HEADER)))
            } else {
                let (timestamp, body) = (u64_at(bytes, at + 16), &bytes[at + HEADER..at + HEADER + size]);
                let (stored, computed) = (u32_at(bytes, at + 12), crc(timestamp, &[], body) as usize);
                if stored == computed {
                    if let Some(before) = records.last().filter(|before| timestamp < before.timestamp) {
                        let detail = format!("{timestamp} after {}", before.timestamp);
                        findings.add(name, "TIMESTAMP_BACKWARDS", at, Warn, detail);
                    }
                    let (key, value) = (body[..keylen].to_vec(), body[keylen..].to_vec());
                    records.push(Found { offset, timestamp, key, value, base, position: at as u64 });
                    at += HEADER + size;
                    expected += 1;
                    continue;
                }
                Some(("CRC_MISMATCH", format!("stored {stored:08x}, computed {computed:08x}")))
            }
        };
        if let Some((code, detail)) = fault {
            findings.add(name, code, at, Error, detail);
            let (newer, older, first) = survivors(bytes, at, expected);
            if newer > 0 {
                findings.add(name, "RECORDS_AFTER_DAMAGE", first, Error, format!("{newer} whole records behind the damage"));
            }
            if older > 0 {
                findings.add(name, "STALE_RECORDS", at, Warn, format!("{older} records with older offsets behind the end"));
            }
            return Scan { records, valid_end: at, damaged: true };
        }
    }
    Scan { records, valid_end: at, damaged: false }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Position,
    Time,
}

/// Every entry must be one that the log backs, in strictly increasing order.
fn check_index(name: &str, bytes: &[u8], kind: Kind, base: u64, records: &[Found], last: bool, findings: &mut Findings) {
    let odd = bytes.len() % ENTRY;
    if odd != 0 {
        findings.add(name, "PARTIAL_ENTRY", bytes.len() - odd, Error, format!("{odd} stray bytes"));
    }
    if !records.is_empty() && bytes.len() < ENTRY {
        findings.add(name, "EMPTY_INDEX", 0, Error, format!("the log holds {} records", records.len()));
    }
    let mut before: Option<(u64, u64)> = None;
    for (number, entry) in bytes.chunks_exact(ENTRY).enumerate() {
        let at = number * ENTRY;
        let (offset, second) = (u64_at(entry, 0), u64_at(entry, 8));
        if (offset, second) == (0, 0) && !(number == 0 && base == 0) {
            let rest_is_zero = data_end(&bytes[at..]) == 0;
            findings.add(name, "ZERO_ENTRY", at, if last && rest_is_zero { Info } else { Error }, "unwritten space".into());
            if rest_is_zero {
                break;
            }
            continue;
        }
        let wrong = |code, right: u64| (code, format!("offset {offset} has {right}, the entry says {second}"));
        let fault = match offset.checked_sub(base).map(|number| records.get(number as usize)) {
            None => Some(("ENTRY_BEFORE_BASE", format!("offset {offset}, base {base}"))),
            Some(None) => Some(("ENTRY_PAST_LOG", format!("offset {offset}, the log holds {} records", records.len()))),
            Some(Some(record)) if kind == Kind::Position && record.position != second => Some(wrong("WRONG_POSITION", record.position)),
            Some(Some(record)) if kind == Kind::Time && record.timestamp != second => Some(wrong("WRONG_TIMESTAMP", record.timestamp)),
            Some(Some(_)) => None,
        };
        if let Some((code, detail)) = fault {
            findings.add(name, code, at, Error, detail);
        }
        if let Some((before_offset, before_second)) = before {
            if offset <= before_offset {
                findings.add(name, "OFFSET_NOT_INCREASING", at, Error, format!("{offset} after {before_offset}"));
            }
            if kind == Kind::Position && second <= before_second {
                findings.add(name, "POSITION_NOT_INCREASING", at, Error, format!("{second} after {before_second}"));
            }
            if kind == Kind::Time && second < before_second {
                findings.add(name, "TIMESTAMP_NOT_MONOTONIC", at, Error, format!("{second} after {before_second}"));
            }
        }
        before = Some((offset, second));
    }
}

/// What lies in a directory, by name: each file's bytes, and what is no file without any.
pub type Files = BTreeMap<String, Option<Vec<u8>>>;

fn files_in(dir: &Path) -> Files {
    let entries = fs::read_dir(dir).unwrap().map(|entry| {
        let entry = entry.unwrap();
        let is_file = entry.file_type().unwrap().is_file();
        let name = entry.file_name().to_string_lossy().into_owned();
        // Of other files only the names matter; a partition in use may have renamed them by now.
        let bytes = if is_file && parse_name(&name).is_some() { fs::read(entry.path()).unwrap() } else { Vec::new() };
        (name, is_file.then_some(bytes))
    });
    entries.collect()
}

/// Everything that can be said of a partition's directory.
pub fn check(dir: &Path) -> Report {
    check_files(&files_in(dir))
}

/// The same of one that may be on no disk.
pub fn check_files(entries: &Files) -> Report {
    let mut findings = Findings(Vec::new());
    let mut files: BTreeMap<u64, BTreeMap<&'static str, &[u8]>> = BTreeMap::new();
    for (name, bytes) in entries {
        let Some(bytes) = bytes else {
            findings.add(name, "NOT_A_REGULAR_FILE", 0, Warn, "a directory, link or special file".into());
            continue;
        };
        if let Some((base, extension)) = parse_name(name) {
            let extension = ["log", "index", "timeindex"].into_iter().find(|known| *known == extension).unwrap();
            files.entry(base).or_default().insert(extension, bytes);
        } else {
            findings.add(name, "STRAY_FILE", 0, Info, "not a segment's name".into());
        }
    }
    for (base, parts) in &files {
        for extension in parts.keys().filter(|_| !parts.contains_key("log")) {
            findings.add(&format!("{base:020}.{extension}"), "ORPHAN_INDEX", 0, Warn, "no .log of that name".into());
        }
    }
    files.retain(|_, parts| parts.contains_key("log"));

    let mut report = Report {
        records: Vec::new(),
        findings: Vec::new(),
        segments: Vec::new(),
        first_offset: files.keys().next().copied().unwrap_or(0),
        readable: 0,
        next_offset: 0,
        next_position: 0,
    };
    let (mut broken, mut expected): (bool, Option<u64>) = (false, None);
    let mut last_timestamp = 0;
    for (number, (&base, parts)) in files.iter().enumerate() {
        let last = number == files.len() - 1;
        let name = format!("{base:020}.log");
        if let Some(expected) = expected.filter(|expected| *expected != base) {
            let code = if base > expected { "SEGMENT_GAP" } else { "SEGMENT_OVERLAP" };
            findings.add(&name, code, 0, Error, format!("the segment before it ends before {expected}"));
            broken = true;
        }
        let scan = scan_log(&name, parts["log"], base, last, &mut findings);
        if scan.records.is_empty() && !last {
            findings.add(&name, "EMPTY_SEALED_SEGMENT", 0, Warn, "no record, and a newer segment is there".into());
        }
        if let (Some(first), Some(newest)) = (scan.records.first(), scan.records.last()) {
            if first.timestamp < last_timestamp {
                let detail = format!("{} after {last_timestamp}, in the segment before", first.timestamp);
                findings.add(&name, "TIMESTAMP_BACKWARDS", 0, Warn, detail);
            }
            last_timestamp = newest.timestamp;
        }
        for (extension, kind) in [("index", Kind::Position), ("timeindex", Kind::Time)] {
            let name = format!("{base:020}.{extension}");
            match parts.get(extension) {
                None => findings.add(&name, "MISSING_INDEX", 0, Warn, "the log is there, the index is not".into()),
                Some(bytes) => check_index(&name, bytes, kind, base, &scan.records, last, &mut findings),
            }
        }
        let records = scan.records.len() as u64;
        if !broken {
            report.readable += records;
            report.next_position = scan.valid_end as u64;
        }
        report.segments.push(Segment {
            base,
            log_len: parts["log"].len() as u64,
            valid_end: scan.valid_end as u64,
            records,
            damaged: scan.damaged,
            in_readable_prefix: !broken,
        });
        broken |= scan.damaged;
        expected = Some(base + records);
        report.records.extend(scan.records);
    }
    report.next_offset = report.first_offset + report.readable;
    report.findings = findings.0;
    report
}

/// A partition that is open or was left without a close: nothing but preallocated space and foreign files may be noted.
#[track_caller]
pub fn assert_sound(dir: &Path) -> Report {
    assert_sound_files(&files_in(dir))
}

/// The same of a directory that may be on no disk.
#[track_caller]
pub fn assert_sound_files(files: &Files) -> Report {
    let report = check_files(files);
    assert!(report.wrong().is_empty(), "{:#?}\nsegments {:#?}", report.wrong(), report.segments);
    report
}

/// A partition that takes appends at this moment. Index entries are written beside the commits, so the newest segment's first
/// ones may be on their way; but they come, without anything being asked for.
#[track_caller]
pub fn assert_sound_while_open(dir: &Path) -> Report {
    assert_sound_in_time(|| files_in(dir))
}

/// The same of what is looked at again and again.
#[track_caller]
pub fn assert_sound_in_time(look: impl Fn() -> Files) -> Report {
    let start = Instant::now();
    loop {
        let files = look();
        let report = check_files(&files);
        let newest = report.segments.last().map(|segment| format!("{:020}.", segment.base)).unwrap_or_default();
        let under_way = |finding: &&Finding| finding.code == "EMPTY_INDEX" && finding.file.starts_with(&newest);
        if report.wrong().is_empty() || !report.wrong().iter().all(under_way) || start.elapsed() > HANG_LIMIT {
            return assert_sound_files(&files);
        }
        std::thread::yield_now();
    }
}

/// A partition after a clean close: sound, each .log ends with its last record, each index holds exactly the records 0, n, 2n, …
/// of its segment, and no file keeps more blocks of the device than its bytes need.
#[track_caller]
pub fn assert_closed(dir: &Path, index_interval: u64) -> Report {
    let report = assert_closed_files(&files_in(dir), index_interval);
    for segment in &report.segments {
        for extension in ["log", "index", "timeindex"] {
            assert_no_spare_blocks(&segment_path(dir, segment.base, extension));
        }
    }
    report
}

/// The same of a directory that may be on no disk, whose files have no blocks: their lengths speak for them.
#[track_caller]
pub fn assert_closed_files(files: &Files, index_interval: u64) -> Report {
    let report = assert_sound_files(files);
    for segment in &report.segments {
        let base = segment.base;
        assert_eq!(segment.log_len, segment.valid_end, "the .log of {base} ends with its last record");
        let records = &report.records[(base - report.first_offset) as usize..][..segment.records as usize];
        for (extension, second) in [("index", (|record| record.position) as fn(&Found) -> u64), ("timeindex", |record| record.timestamp)] {
            let name = format!("{base:020}.{extension}");
            let bytes = files[&name].as_ref().unwrap();
            let entries: Vec<_> = bytes.chunks(ENTRY).map(|entry| (u64_at(entry, 0), u64_at(entry, 8))).collect();
            let wanted: Vec<_> = records.iter().step_by(index_interval as usize).map(|record| (record.offset, second(record))).collect();
            assert_eq!(entries, wanted, "{name}");
        }
    }
    report
}

/// Room on the device beyond the file's length was given back, but for one block of the file system.
#[track_caller]
pub fn assert_no_spare_blocks(path: &Path) {
    let meta = fs::metadata(path).unwrap();
    let (held, block) = (meta.blocks() * 512, meta.blksize());
    assert!(held <= meta.len().next_multiple_of(block) + block, "{path:?} of {} bytes holds {held} bytes of the device", meta.len());
}
