//! Named damages, applied in place to the files of a partition's directory.
//!
//! Each stands for something that crashes, disks, or people did to logs. [`ALL`] tells what the oracle must find after each.

use std::fs;
use std::path::{Path, PathBuf};

use crate::format::{HEADER, encode, entry, segment_path};
use crate::oracle::{self, Found};

/// Name, and the codes of which the oracle must find every one.
pub const ALL: &[(&str, &[&str])] = &[
    ("flip-value-byte", &["CRC_MISMATCH"]),
    ("flip-key-byte", &["CRC_MISMATCH"]),
    ("flip-timestamp", &["CRC_MISMATCH"]),
    ("flip-crc", &["CRC_MISMATCH"]),
    ("flip-offset", &["OFFSET_GAP"]),
    ("flip-keylen", &[]),
    ("keylen-gt-size", &["KEYLEN_GT_SIZE"]),
    ("keylen-max", &["KEYLEN_GT_SIZE"]),
    ("size-huge", &["BODY_PAST_END"]),
    ("size-wraps", &["BODY_PAST_END"]),
    ("size-top-bit", &["BODY_PAST_END"]),
    ("size-plus-one", &["CRC_MISMATCH"]),
    ("size-minus-one", &["CRC_MISMATCH"]),
    ("truncate-mid-header", &["TORN_HEADER"]),
    ("truncate-mid-body", &["BODY_PAST_END"]),
    ("truncate-at-boundary", &["ENTRY_PAST_LOG"]),
    ("zero-tail", &["ZERO_TAIL"]),
    ("zero-tail-short", &["ZERO_TAIL"]),
    ("garbage-tail", &["OFFSET_GAP"]),
    ("torn-body-prealloc", &["CRC_MISMATCH"]),
    ("torn-header-prealloc", &["OFFSET_BACKWARDS"]),
    ("hole-in-the-middle", &["RECORDS_AFTER_DAMAGE"]),
    ("stale-record-tail", &["OFFSET_BACKWARDS", "STALE_RECORDS"]),
    ("torn-record-in-value", &["BODY_PAST_END"]),
    ("offset-gap", &["OFFSET_GAP"]),
    ("duplicate-offset", &["OFFSET_BACKWARDS"]),
    ("missing-index", &["MISSING_INDEX"]),
    ("missing-timeindex", &["MISSING_INDEX"]),
    ("missing-both-indexes", &["MISSING_INDEX"]),
    ("empty-index", &["EMPTY_INDEX"]),
    ("index-longer-than-log", &["ENTRY_PAST_LOG"]),
    ("index-past-end", &["WRONG_POSITION"]),
    ("index-mid-record", &["WRONG_POSITION"]),
    ("index-out-of-order", &["OFFSET_NOT_INCREASING", "POSITION_NOT_INCREASING"]),
    ("index-partial-entry", &["PARTIAL_ENTRY"]),
    ("index-zero-fill", &["ZERO_ENTRY"]),
    ("index-hole", &["ZERO_ENTRY"]),
    ("timeindex-nonmonotonic", &["TIMESTAMP_NOT_MONOTONIC", "WRONG_TIMESTAMP"]),
    ("clock-backwards", &["TIMESTAMP_BACKWARDS"]),
    ("future-timestamp", &[]),
    ("missing-middle-segment", &["SEGMENT_GAP"]),
    ("segment-overlap", &["SEGMENT_OVERLAP"]),
    ("orphan-index", &["ORPHAN_INDEX"]),
    ("empty-log", &[]),
    ("empty-log-no-index", &["MISSING_INDEX"]),
    ("prealloc-only", &["ZERO_TAIL"]),
    ("empty-log-in-the-middle", &["EMPTY_SEALED_SEGMENT", "SEGMENT_GAP"]),
    ("stray-file", &["STRAY_FILE"]),
    ("stray-dir", &["NOT_A_REGULAR_FILE"]),
    ("wrong-name-file", &["STRAY_FILE"]),
];

/// Bytes as fixed noise: never a record.
pub fn noise(len: usize) -> Vec<u8> {
    let mut state: u32 = 0x9E37_79B9;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_103_515_245).wrapping_add(12345);
            (state >> 16) as u8
        })
        .collect()
}

/// The bases of a partition's segments, ascending.
pub fn bases(dir: &Path) -> Vec<u64> {
    let mut bases: Vec<u64> = fs::read_dir(dir)
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let stem = path.file_stem()?.to_str()?.to_owned();
            let whole = path.extension()? == "log" && stem.len() == 20 && stem.bytes().all(|digit| digit.is_ascii_digit());
            if whole && path.is_file() { stem.parse().ok() } else { None }
        })
        .collect();
    bases.sort_unstable();
    bases
}

/// One segment, taken apart.
pub struct Target {
    pub dir: PathBuf,
    pub base: u64,
    pub log: PathBuf,
    pub index: PathBuf,
    pub timeindex: PathBuf,
    pub bytes: Vec<u8>,
    pub records: Vec<Found>,
    /// Where its last record ends.
    pub end: usize,
}

impl Target {
    /// The newest segment of a partition.
    pub fn newest(dir: &Path) -> Self {
        Self::of(dir, *bases(dir).last().unwrap())
    }

    /// The segment of that number, counted from 0.
    pub fn number(dir: &Path, segment: usize) -> Self {
        Self::of(dir, bases(dir)[segment])
    }

    fn of(dir: &Path, base: u64) -> Self {
        let log = segment_path(dir, base, "log");
        let bytes = fs::read(&log).unwrap();
        let oracle::Scan { records, valid_end: end, .. } = oracle::scan(&bytes, base);
        assert!(!records.is_empty(), "{log:?} holds no record to damage");
        let path = |extension| segment_path(dir, base, extension);
        Self { dir: dir.into(), base, log, index: path("index"), timeindex: path("timeindex"), bytes, records, end }
    }

    /// The middle record.
    pub fn middle(&self) -> &Found {
        &self.records[self.records.len() / 2]
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        let mut log = self.bytes.clone();
        log[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        fs::write(&self.log, log).unwrap();
    }

    fn flip(&self, at: u64) {
        self.put(at, &[self.bytes[at as usize] ^ 1]);
    }

    fn replace_tail(&self, at: u64, tail: &[u8]) {
        fs::write(&self.log, [&self.bytes[..at as usize], tail].concat()).unwrap();
    }

    /// Does the named damage, to `record` where it is about one record.
    pub fn damage(&self, name: &str, record: &Found) {
        let at = record.position;
        let body = record.bytes() as u32 - HEADER as u32;
        let tail = self.records.last().unwrap();
        let (end, next) = (self.end as u64, tail.offset + 1);
        let size = |size: u32| self.put(at + 8, &size.to_be_bytes());
        let keylen = |keylen: u32| self.put(at + 24, &keylen.to_be_bytes());
        let new = |extension| segment_path(&self.dir, next, extension);
        match name {
            "flip-value-byte" => self.flip(record.end() - 1),
            "flip-key-byte" => self.flip(at + HEADER as u64),
            "flip-timestamp" => self.flip(at + 16 + 7),
            "flip-crc" => self.flip(at + 12 + 3),
            "flip-offset" => self.put(at, &(record.offset + 256).to_be_bytes()),
            "flip-keylen" => keylen(record.key.len() as u32 - 1),
            "keylen-gt-size" => keylen(body + 1),
            "keylen-max" => keylen(u32::MAX),
            "size-huge" => size(u32::MAX),
            "size-wraps" => size(0xffff_ffe4),
            "size-top-bit" => size(0x8000_0000),
            "size-plus-one" => size(body + 1),
            "size-minus-one" => size(body - 1),
            "truncate-mid-header" => self.replace_tail(tail.position + 13, &[]),
            "truncate-mid-body" => self.replace_tail(end - 1, &[]),
            "truncate-at-boundary" => self.replace_tail(tail.position, &[]),
            "zero-tail" => self.replace_tail(end, &[0; 4096]),
            "zero-tail-short" => self.replace_tail(end, &[0; 13]),
            "garbage-tail" => self.replace_tail(end, &noise(100)),
            "torn-body-prealloc" => self.replace_tail(tail.position + HEADER as u64, &vec![0; tail.bytes() as usize - HEADER + 4096]),
            "torn-header-prealloc" => {
                let body = &self.bytes[tail.position as usize + HEADER..self.end];
                self.replace_tail(tail.position, &[&[0; HEADER], body, &[0; 4096]].concat());
            }
            "hole-in-the-middle" => {
                assert!(record.offset < tail.offset, "later records must be there");
                self.put(at, &vec![0; record.bytes() as usize]);
            }
            "stale-record-tail" => {
                let first = &self.records[0];
                self.replace_tail(end, &self.bytes[first.position as usize..first.end() as usize]);
            }
            "torn-record-in-value" => {
                let inner = encode(next + 1, tail.timestamp + 2, b"k", b"inner");
                let whole = encode(next, tail.timestamp + 1, b"k", &[b"pad", &inner[..], &[0; 32]].concat());
                self.replace_tail(end, &whole[..whole.len() - 5]);
            }
            "offset-gap" => self.replace_tail(end, &encode(next + 1, tail.timestamp + 1, b"k", b"gap")),
            "duplicate-offset" => self.replace_tail(end, &encode(tail.offset, tail.timestamp + 1, b"k", b"dup")),
            "clock-backwards" => self.replace_tail(end, &encode(next, tail.timestamp - 3_600_000_000_000, b"k", b"past")),
            "future-timestamp" => self.replace_tail(end, &encode(next, u64::MAX, b"k", b"future")),
            "missing-index" => fs::remove_file(&self.index).unwrap(),
            "missing-timeindex" => fs::remove_file(&self.timeindex).unwrap(),
            "missing-both-indexes" => {
                fs::remove_file(&self.index).unwrap();
                fs::remove_file(&self.timeindex).unwrap();
            }
            "orphan-index" => ["index", "timeindex"].iter().for_each(|extension| fs::write(new(extension), entry(next, 0)).unwrap()),
            "empty-log" => ["log", "index", "timeindex"].iter().for_each(|extension| fs::write(new(extension), b"").unwrap()),
            "empty-log-no-index" => fs::write(new("log"), b"").unwrap(),
            "prealloc-only" => {
                fs::write(new("log"), [0; 65536]).unwrap();
                ["index", "timeindex"].iter().for_each(|extension| fs::write(new(extension), b"").unwrap());
            }
            "missing-middle-segment" => {
                let base = bases(&self.dir)[1];
                ["log", "index", "timeindex"]
                    .iter()
                    .for_each(|extension| fs::remove_file(segment_path(&self.dir, base, extension)).unwrap());
            }
            "empty-log-in-the-middle" => {
                assert!(bases(&self.dir).len() >= 3, "there must be a middle");
                fs::write(segment_path(&self.dir, bases(&self.dir)[1], "log"), b"").unwrap();
            }
            "segment-overlap" => {
                let path = |extension| segment_path(&self.dir, tail.offset, extension);
                fs::write(path("log"), encode(tail.offset, tail.timestamp, b"k", b"overlap")).unwrap();
                fs::write(path("index"), entry(tail.offset, 0)).unwrap();
                fs::write(path("timeindex"), entry(tail.offset, tail.timestamp)).unwrap();
            }
            "stray-file" => {
                for name in ["README".into(), format!("{:020}.log.tmp", self.base), format!("{:020}.index.swp", self.base), "LOCK".into()] {
                    fs::write(self.dir.join(name), b"not a segment\n").unwrap();
                }
            }
            "stray-dir" => {
                fs::create_dir(self.dir.join("lost+found")).unwrap();
                fs::create_dir(new("log")).unwrap();
            }
            "wrong-name-file" => {
                let base = self.base;
                let names = [
                    format!("{base:019}.log"),
                    format!("{base:021}.log"),
                    "99999999999999999999.log".into(),
                    format!("+{base:019}.log"),
                    format!("{base:020}.LOG"),
                ];
                names.iter().for_each(|name| fs::write(self.dir.join(name), &self.bytes[..self.end]).unwrap());
            }
            _ => self.damage_index(name),
        }
    }

    fn damage_index(&self, name: &str) {
        let mut index = fs::read(&self.index).unwrap();
        let last = index.len().saturating_sub(16);
        let tail = self.records.last().unwrap();
        match name {
            "empty-index" => {
                fs::write(&self.timeindex, b"").unwrap();
                index.clear();
            }
            "index-longer-than-log" => {
                (1..4).for_each(|more| index.extend(entry(tail.offset + more, self.end as u64 + 40 * (more - 1))));
            }
            "index-past-end" => index[last + 8..].copy_from_slice(&(1u64 << 40).to_be_bytes()),
            "index-mid-record" => {
                let position = u64::from_be_bytes(index[last + 8..].try_into().unwrap());
                index[last + 8..].copy_from_slice(&(position + 1).to_be_bytes());
            }
            "index-out-of-order" => index[..32].rotate_left(16),
            "index-partial-entry" => index.extend([0, 0, 0, 0, 0, 0, 0xff]),
            "index-zero-fill" => {
                let timeindex = fs::read(&self.timeindex).unwrap();
                fs::write(&self.timeindex, [&timeindex[..], &[0; 64]].concat()).unwrap();
                index.extend([0; 64]);
            }
            "index-hole" => {
                assert!(index.len() >= 48, "an entry must follow the hole");
                index[16..32].fill(0);
            }
            "timeindex-nonmonotonic" => {
                let mut timeindex = fs::read(&self.timeindex).unwrap();
                let last = timeindex.len() - 8;
                let time = u64::from_be_bytes(timeindex[last..].try_into().unwrap());
                timeindex[last..].copy_from_slice(&(time - 3_600_000_000_000).to_be_bytes());
                fs::write(&self.timeindex, timeindex).unwrap();
            }
            _ => panic!("no damage is called {name}"),
        }
        fs::write(&self.index, index).unwrap();
    }
}

/// Damages the newest segment, where it is about one record the middle one.
pub fn apply(dir: &Path, name: &str) {
    let target = Target::newest(dir);
    target.damage(name, target.middle());
}

/// Damages the segment of that number.
pub fn apply_to(dir: &Path, name: &str, segment: usize) {
    let target = Target::number(dir, segment);
    target.damage(name, target.middle());
}
