//! Index files that lie, lack, or stand alone, and segments that are missing: the logs decide.

use std::fs;

use sapwood::{Broker, Error};

use crate::damage;
use crate::format::{self, entry, segment_path};
use crate::oracle::{assert_closed, check};
use crate::recovery::DEMO;
use crate::support::{
    Row, append, bytes_in, config, data_with, each_backend, open, partition_of, read_all, report_of, rows_of, segments_of,
};

#[test]
fn indexes_that_lie_are_written_anew_and_never_believed() {
    let harms = [
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
    ];
    each_backend(|backend| {
        for name in harms {
            for segment in [0, 4, 5] {
                eprintln!("{name} in segment {segment}");
                let (data, dir) = data_with(DEMO);
                damage::apply_to(&dir, name, segment);
                let broker = open(data.path(), backend, &segments_of(270));
                let report = report_of(&broker);
                assert!(report.torn_tail.is_none() && report.damage.is_empty(), "{report:?}");
                assert_eq!(report.next_offset, 36);
                if name.starts_with("missing") || name == "empty-index" {
                    assert!(!report.rebuilt.is_empty(), "what was written anew is told");
                }
                let partition = partition_of(&broker);
                for row in rows_of(&format::demo(36), 0) {
                    assert_eq!(Row::from(partition.read_one(row.offset).unwrap()), row);
                }
                assert_eq!(append(&partition, b"k", b"v"), 36);
                drop(partition);
                broker.close().unwrap();
                // The newest segment's are whole again in any case; a sealed one's where it was seen to lie.
                if segment == 5 || name.starts_with("missing") || name == "empty-index" {
                    assert_closed(&dir, 1);
                }
                let logs: Vec<_> = (0..6).map(|number| fs::read(segment_path(&dir, number * 6, "log")).unwrap()).collect();
                let originals: Vec<_> =
                    (0..6).map(|number| fs::read(segment_path(&crate::support::fixture(DEMO), number * 6, "log")).unwrap()).collect();
                assert!(logs == originals, "the logs are as they were");
            }
        }
    });
}

#[test]
fn an_index_entry_that_leads_elsewhere_is_not_followed() {
    // In the middle of a sealed segment's index, where opening does not look.
    each_backend(|backend| {
        let original = rows_of(&format::demo(36), 0);
        for number in 0..5u64 {
            for position in [0, 45 * number + 1, 45 * (number + 1), 45 * 5, 269, 270, 1 << 40, u64::MAX] {
                for offset in [6 + number, 6, 0, 7 + number, u64::MAX] {
                    let (data, dir) = data_with(DEMO);
                    let path = segment_path(&dir, 6, "index");
                    let mut index = fs::read(&path).unwrap();
                    index[number as usize * 16..][..16].copy_from_slice(&entry(offset, position));
                    fs::write(&path, index).unwrap();
                    let broker = open(data.path(), backend, &segments_of(270));
                    let partition = partition_of(&broker);
                    let mut reader = partition.reader().unwrap();
                    for row in &original[5..13] {
                        assert_eq!(Row::from(partition.read_one(row.offset).unwrap()), *row, "entry {number} is ({offset}, {position})");
                        let first = reader.read(row.offset, 1).unwrap().iter().next().map(Row::from);
                        assert_eq!(first.as_ref(), Some(row), "entry {number} is ({offset}, {position})");
                    }
                }
            }
        }
    });
}

#[test]
fn an_orphaned_index_changes_nothing() {
    each_backend(|backend| {
        for (base, second) in [(36, 0), (100, 5)] {
            let (data, dir) = data_with(DEMO);
            for extension in ["index", "timeindex"] {
                fs::write(segment_path(&dir, base, extension), entry(base, second)).unwrap();
            }
            let broker = open(data.path(), backend, &segments_of(270));
            assert_eq!(report_of(&broker).next_offset, 36);
            let partition = partition_of(&broker);
            assert_eq!(read_all(&partition), rows_of(&format::demo(36), 0));
            // The first of these opens the segment that the orphan is named after.
            for number in 36..50 {
                assert_eq!(append(&partition, b"user-1", b"value-00000"), number);
            }
            drop(partition);
            broker.close().unwrap();
            let report = check(&dir);
            let wrong: Vec<_> = report.wrong().into_iter().filter(|finding| finding.code != "ORPHAN_INDEX").cloned().collect();
            assert!(wrong.is_empty(), "{wrong:#?}");
            assert_eq!(report.next_offset, 50);
        }
    });
}

#[test]
fn a_gap_between_segments_is_told_and_nothing_behind_it_deleted() {
    each_backend(|backend| {
        for gone in [1usize, 3, 4] {
            let (data, dir) = data_with(DEMO);
            for extension in ["log", "index", "timeindex"] {
                fs::remove_file(segment_path(&dir, gone as u64 * 6, extension)).unwrap();
            }
            let before = bytes_in(&dir);
            match Broker::open(data.path(), config(backend, segments_of(270))) {
                Ok(broker) => {
                    let report = report_of(&broker);
                    let (from, to) = (gone as u64 * 6, gone as u64 * 6 + 6);
                    let named = |error: &Error| matches!(error, Error::RecordsMissing { from: f, to: t, .. } if (*f, *t) == (from, to));
                    assert!(report.damage.iter().any(named), "{report:?}");
                    let partition = partition_of(&broker);
                    for row in rows_of(&format::demo(36), 0) {
                        match partition.read_one(row.offset) {
                            Ok(record) => assert_eq!(Row::from(record), row),
                            Err(error) => assert!(error.is_damage() && (from..to).contains(&row.offset), "{}: {error}", row.offset),
                        }
                    }
                    assert_eq!(append(&partition, b"k", b"v"), 36);
                }
                Err(error) => assert!(error.is_damage(), "{error}"),
            }
            let after = bytes_in(&dir);
            assert!(before.iter().all(|(path, bytes)| bytes.is_none() || after.get(path) == Some(bytes)), "what was there stays");
        }
    });
}
