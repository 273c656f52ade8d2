//! The judge is judged: the oracle sees each damage, and finds nothing where there is none.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use crate::damage::{self, ALL, Target};
use crate::format::{self, Layout, encode, segment_path};
use crate::oracle::{Severity, assert_closed, assert_sound, check, data_end, scan};
use crate::support::{copy_dir, fixture, rows, rows_of, scratch};

const DEMO: &str = "demo-36-segment-270";

/// Damages that leave all records readable, by name.
const KEEP_ALL: &[&str] = &[
    "zero-tail",
    "zero-tail-short",
    "garbage-tail",
    "stale-record-tail",
    "torn-record-in-value",
    "offset-gap",
    "duplicate-offset",
    "missing-index",
    "missing-timeindex",
    "missing-both-indexes",
    "empty-index",
    "index-longer-than-log",
    "index-past-end",
    "index-mid-record",
    "index-out-of-order",
    "index-partial-entry",
    "index-zero-fill",
    "index-hole",
    "timeindex-nonmonotonic",
    "orphan-index",
    "empty-log",
    "empty-log-no-index",
    "prealloc-only",
    "stray-file",
    "stray-dir",
    "wrong-name-file",
    "segment-overlap",
];
const DROP_ONE: &[&str] =
    &["truncate-mid-header", "truncate-mid-body", "truncate-at-boundary", "torn-body-prealloc", "torn-header-prealloc"];

#[test]
fn clean_partitions_are_clean() {
    let data = scratch();
    for (number, (segment_bytes, index_interval, base, prealloc)) in
        [(200, 1, 0, 0), (200, 100, 0, 0), (1 << 20, 4096, 1_000_000_000_000, 0), (200, 1, 5, 65536), (1, 1, 0, 0)].into_iter().enumerate()
    {
        let dir = data.path().join(number.to_string());
        format::write_partition(&dir, &format::demo(40), Layout { segment_bytes, index_interval, base, prealloc });
        let report = assert_sound(&dir);
        assert_eq!((report.readable, report.next_offset, report.first_offset), (40, base + 40, base));
        assert_eq!(rows(&report.records), rows_of(&format::demo(40), base));
        if prealloc == 0 {
            assert_closed(&dir, index_interval);
        } else {
            assert!(catch_unwind(|| assert_closed(&dir, index_interval)).is_err(), "preallocated space is seen");
        }
    }
    let report = assert_closed(&fixture("worked"), 1);
    assert_eq!((report.next_position, report.next_offset), (115, 3));
}

#[test]
fn each_damage_is_found() {
    let original = rows_of(&format::demo(36), 0);
    for (name, codes) in ALL {
        let data = scratch();
        copy_dir(&fixture(DEMO), data.path());
        damage::apply(data.path(), name);
        let report = check(data.path());
        let found = report.codes();
        assert!(codes.iter().all(|code| found.contains(code)), "{name}: {found:?}");
        let kept = rows(report.readable_records());
        match *name {
            "flip-keylen" => assert!(report.wrong().is_empty() && kept.len() == 36 && kept != original, "what the format cannot see"),
            "clock-backwards" | "future-timestamp" => assert!(kept.len() == 37 && kept[..36] == original),
            name if KEEP_ALL.contains(&name) => assert_eq!(kept, original, "{name}"),
            name if DROP_ONE.contains(&name) => assert_eq!(kept, original[..35], "{name}"),
            name => {
                assert!(!kept.is_empty() && kept.len() < 36, "{name}: {}", kept.len());
                assert_eq!(kept, original[..kept.len()], "{name}");
            }
        }
        let legal = [
            "flip-keylen",
            "zero-tail",
            "zero-tail-short",
            "future-timestamp",
            "empty-log",
            "prealloc-only",
            "stray-file",
            "wrong-name-file",
            "index-zero-fill",
        ];
        assert_eq!(report.wrong().is_empty(), legal.contains(name), "{name}: {:?}", report.findings);
        assert!(report.findings.iter().all(|finding| finding.severity > Severity::Info
            || legal.contains(name)
            || finding.code == "STRAY_FILE"
            || finding.code == "ZERO_TAIL"));
    }
}

#[test]
fn every_cut_keeps_the_whole_records_before_it() {
    let log: Vec<u8> =
        (0..).zip(format::demo(5)).flat_map(|(offset, record)| encode(offset, record.timestamp, &record.key, &record.value)).collect();
    for cut in 0..=log.len() {
        for zeros in [0, 64] {
            let found = scan(&[&log[..cut], &vec![0; zeros]].concat(), 0);
            assert_eq!((found.records.len(), found.valid_end), (cut / 45, cut / 45 * 45), "cut at {cut}");
        }
    }
    let mut silent = Vec::new();
    for bit in 0..log.len() * 8 {
        let mut bytes = log.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        if !scan(&bytes, 0).damaged {
            silent.push(bit / 8 % 45);
        }
    }
    assert!(!silent.is_empty() && silent.iter().all(|byte| (24..28).contains(byte)), "{silent:?}");
}

#[test]
fn a_time_that_goes_back_from_one_segment_to_the_next_is_found() {
    let data = scratch();
    let mut records = format::demo(8);
    records[6].timestamp = records[5].timestamp - 1;
    records[7].timestamp = records[5].timestamp + 1;
    format::write_partition(data.path(), &records, Layout { segment_bytes: 270, ..Layout::default() });
    let report = check(data.path());
    assert_eq!(
        report.wrong().iter().map(|finding| (finding.code, &*finding.file)).collect::<Vec<_>>(),
        [("TIMESTAMP_BACKWARDS", "00000000000000000006.log")]
    );
}

#[test]
fn a_closed_partition_must_be_tidy() {
    type Harm = fn(&Path);
    let harms: [(&str, Harm); 5] = [
        ("zeros behind the active log", |dir| damage::apply(dir, "zero-tail-short")),
        ("zeros behind an index", |dir| damage::apply(dir, "index-zero-fill")),
        ("an entry short", |dir| {
            let target = Target::newest(dir);
            let index = fs::read(&target.index).unwrap();
            fs::write(&target.index, &index[..index.len() - 16]).unwrap();
        }),
        ("a time entry short in a sealed segment", |dir| {
            let target = Target::number(dir, 1);
            let index = fs::read(&target.timeindex).unwrap();
            fs::write(&target.timeindex, &index[16..]).unwrap();
        }),
        ("a gap", |dir| fs::remove_file(segment_path(dir, 12, "log")).unwrap()),
    ];
    for (what, harm) in harms {
        let data = scratch();
        copy_dir(&fixture(DEMO), data.path());
        assert_closed(data.path(), 1);
        harm(data.path());
        assert!(catch_unwind(|| assert_closed(data.path(), 1)).is_err(), "{what} goes unseen");
    }
    assert!(catch_unwind(|| assert_closed(&fixture(DEMO), 2)).is_err(), "another interval goes unseen");
    // Room beyond a file's length, where the file system has such a thing.
    let data = scratch();
    copy_dir(&fixture(DEMO), data.path());
    let log = fs::File::options().write(true).open(segment_path(data.path(), 30, "log")).unwrap();
    if rustix::fs::fallocate(&log, rustix::fs::FallocateFlags::KEEP_SIZE, 0, 1 << 20).is_ok() {
        assert!(catch_unwind(|| assert_closed(data.path(), 1)).is_err(), "blocks that nothing needs go unseen");
    }
}

#[test]
fn the_end_of_data_is_found_to_the_byte() {
    for (bytes, end) in [(vec![], 0), (vec![0; 10_000], 0), (vec![1], 1)] {
        assert_eq!(data_end(&bytes), end);
    }
    for at in [0, 1, 4094, 4095, 4096, 4097, 8191, 8192, 9999] {
        let mut bytes = vec![0; 10_000];
        bytes[at] = 1;
        assert_eq!(data_end(&bytes), at + 1);
    }
}
