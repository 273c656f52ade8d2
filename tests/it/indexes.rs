//! Index files that lie, lack, or stand alone, and segments that are missing: the logs decide. Case numbers are those of the project's
//! list of failures met by others.

use std::fs;
use std::path::Path;

use sapwood::{Backend, Broker, Error, TopicConfig};

use crate::damage;
use crate::format::{self, Layout, entry, segment_path};
use crate::oracle::{assert_closed, check};
use crate::recovery::DEMO;
use crate::support::{
    Row, TOPIC, append, bytes_in, config, create, data_with, data_with_demo, each_backend, open, partition_dir, partition_of, read_all,
    report_of, rows_of, scratch, segments_of,
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
        for (base, second) in [(36, 0), (100, 5), (8, 90)] {
            let (data, dir) = data_with(DEMO);
            let orphans = ["index", "timeindex"].map(|extension| segment_path(&dir, base, extension));
            orphans.iter().for_each(|path| fs::write(path, entry(base, second)).unwrap());
            let broker = open(data.path(), backend, &segments_of(270));
            assert_eq!((report_of(&broker).next_offset, &report_of(&broker).ignored[..]), (36, &orphans[..]));
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

/// The same index files as before the harm, entry by entry, and the logs untouched.
fn assert_made_whole(dir: &Path, logs: &[Vec<u8>], index_interval: u32) {
    assert_closed(dir, index_interval.into());
    assert!(self::logs(dir) == logs, "the logs of {dir:?} are as they were");
}

fn logs(dir: &Path) -> Vec<Vec<u8>> {
    damage::bases(dir).into_iter().map(|base| fs::read(segment_path(dir, base, "log")).unwrap()).collect()
}

#[test]
fn b042_zeros_in_every_index_of_fifty_partitions_are_replaced_by_what_a_clean_run_writes() {
    // Behind the entries, in the place of all of them, and in the place of all but the first.
    let harms: [fn(&mut Vec<u8>); 3] = [|index| index.extend([0; 64]), |index| index.fill(0), |index| index[16..].fill(0)];
    each_backend(|backend| {
        for (index_interval, harm) in [1, 3, 1].into_iter().zip(harms) {
            let data = scratch();
            let layout = Layout { segment_bytes: 270, index_interval: index_interval.into(), ..Layout::default() };
            let dirs: Vec<_> = (0..50).map(|number| data.path().join(TOPIC).join(number.to_string())).collect();
            for dir in &dirs {
                format::write_partition(dir, &format::demo(36), layout);
                for (base, extension) in (0..36).step_by(6).flat_map(|base| [(base, "index"), (base, "timeindex")]) {
                    let path = segment_path(dir, base, extension);
                    let mut index = fs::read(&path).unwrap();
                    harm(&mut index);
                    fs::write(path, index).unwrap();
                }
            }
            let before = logs(&dirs[0]);
            let broker = open(data.path(), backend, &TopicConfig { index_interval, ..segments_of(270) });
            assert!(broker.report().partitions.iter().all(|report| report.damage.is_empty() && report.rebuilt.len() == 12));
            let partition = broker.topic(TOPIC).unwrap().partition(49).unwrap();
            assert_eq!(read_all(&partition), rows_of(&format::demo(36), 0));
            drop(partition);
            broker.close().unwrap();
            dirs.iter().for_each(|dir| assert_made_whole(dir, &before, index_interval));
        }
    });
}

/// Writes over the index files of one segment, and holds opening to making them whole again, and telling of it.
fn assert_rebuilt(backend: Backend, segment: u64, extensions: &[&str], harm: impl Fn(Vec<u8>) -> Vec<u8>) {
    let (data, dir) = data_with(DEMO);
    let before = logs(&dir);
    let paths: Vec<_> = extensions.iter().map(|extension| segment_path(&dir, segment * 6, extension)).collect();
    paths.iter().for_each(|path| fs::write(path, harm(fs::read(path).unwrap())).unwrap());
    let broker = open(data.path(), backend, &segments_of(270));
    let report = report_of(&broker);
    assert!(report.torn_tail.is_none() && report.damage.is_empty(), "{report:?}");
    assert!(paths.iter().all(|path| report.rebuilt.contains(path)), "segment {segment}, {extensions:?}: {report:?}");
    let partition = partition_of(&broker);
    for row in rows_of(&format::demo(36), 0) {
        assert_eq!(Row::from(partition.read_one(row.offset).unwrap()), row);
    }
    drop(partition);
    broker.close().unwrap();
    assert_made_whole(&dir, &before, 1);
}

const BOTH: [&str; 2] = ["index", "timeindex"];

#[test]
fn b045_a_part_of_an_entry_is_cut_at_every_length() {
    each_backend(|backend| {
        for stray in 1..16 {
            for segment in [0, 4, 5] {
                let extensions = [&BOTH[..1], &BOTH[1..], &BOTH][stray % 3];
                // As zeros it might be taken for room that was allocated ahead.
                let byte = [0, 0xff][stray / 3 % 2];
                assert_rebuilt(backend, segment, extensions, |index| [index, vec![byte; stray]].concat());
            }
        }
    });
}

#[test]
fn b047_indexes_of_other_bytes_are_written_anew() {
    let harms: [fn(Vec<u8>) -> Vec<u8>; 6] = [
        |index| vec![0xff; index.len()],
        |index| damage::noise(index.len()),
        |_| damage::noise(16 * 300),
        |_| vec![0xff; 16],
        |index| index[..32].to_vec(),
        // The last record's time an hour too early, or its position one byte too high.
        |mut index| {
            let second = u64::from_be_bytes(*index.last_chunk().unwrap());
            let wrong = if second > 1 << 32 { second - 3_600_000_000_000 } else { second + 1 };
            *index.last_chunk_mut().unwrap() = wrong.to_be_bytes();
            index
        },
    ];
    each_backend(|backend| {
        for harm in harms {
            for extensions in [&BOTH[..], &BOTH[..1], &BOTH[1..]] {
                for segment in [0, 4, 5] {
                    assert_rebuilt(backend, segment, extensions, harm);
                }
            }
        }
    });
}

#[test]
fn b049_an_index_of_one_entry_of_zeros_is_no_empty_one() {
    each_backend(|backend| {
        for (close, checkpoint) in [(true, true), (true, false), (false, true), (false, false)] {
            let data = scratch();
            let dir = partition_dir(data.path());
            let (broker, partition) = create(data.path(), backend, &segments_of(270));
            append(&partition, b"user-0", b"value-00000");
            drop(partition);
            if close {
                broker.close().unwrap()
            } else {
                drop(broker)
            }
            if !checkpoint {
                fs::remove_file(dir.join("checkpoint")).unwrap();
            }
            let broker = open(data.path(), backend, &segments_of(270));
            assert_eq!(report_of(&broker).next_offset, 1, "close {close}, checkpoint {checkpoint}");
            assert_eq!(append(&partition_of(&broker), b"user-1", b"value-00001"), 1);
            assert_eq!(read_all(&partition_of(&broker)).len(), 2);
            broker.close().unwrap();
            assert_closed(&dir, 1);
        }
        // Anywhere else it is none.
        let (data, dir) = data_with_demo(1, Layout { base: 7, ..Layout::default() });
        BOTH.iter().for_each(|extension| fs::write(segment_path(&dir, 7, extension), [0; 16]).unwrap());
        let broker = open(data.path(), backend, &segments_of(270));
        assert_eq!((report_of(&broker).next_offset, report_of(&broker).rebuilt.len()), (8, 2));
        broker.close().unwrap();
        assert_closed(&dir, 1);
    });
}

#[test]
fn b053_opening_again_and_again_enters_nothing_twice() {
    each_backend(|backend| {
        for index_interval in [1, 4] {
            for (close, checkpoint) in [(true, true), (true, false), (false, true), (false, false)] {
                let layout = Layout { segment_bytes: 540, index_interval: index_interval.into(), ..Layout::default() };
                let (data, dir) = data_with_demo(16, layout);
                let topic = TopicConfig { index_interval, ..segments_of(540) };
                let indexes = || BOTH.map(|extension| fs::read(segment_path(&dir, 12, extension)).unwrap());
                let before = indexes();
                for _ in 0..5 {
                    let broker = open(data.path(), backend, &topic);
                    assert!(report_of(&broker).rebuilt.is_empty(), "{:?}", report_of(&broker));
                    if close {
                        broker.close().unwrap()
                    } else {
                        drop(broker)
                    }
                    assert!(indexes() == before, "close {close}, checkpoint {checkpoint}");
                    if !checkpoint {
                        fs::remove_file(dir.join("checkpoint")).unwrap();
                    }
                }
                let broker = open(data.path(), backend, &topic);
                assert_eq!(append(&partition_of(&broker), b"user-2", b"value-00016"), 16);
                broker.close().unwrap();
                let after = indexes();
                assert!((0..2).all(|kind| after[kind].starts_with(&before[kind]) && after[kind].len() == before[kind].len() + 16));
                assert_closed(&dir, index_interval.into());
            }
        }
    });
}

#[test]
fn b055_indexes_of_the_newest_segments_that_end_too_early_are_made_whole_in_each() {
    each_backend(|backend| {
        for kept in [0, 1, 3, 5] {
            for extensions in [&BOTH[..], &BOTH[..1], &BOTH[1..]] {
                let (data, dir) = data_with(DEMO);
                let before = logs(&dir);
                for base in [18, 24, 30] {
                    for extension in extensions {
                        let path = segment_path(&dir, base, extension);
                        fs::write(&path, &fs::read(&path).unwrap()[..kept * 16]).unwrap();
                    }
                }
                let broker = open(data.path(), backend, &segments_of(270));
                assert_eq!(report_of(&broker).next_offset, 36);
                let partition = partition_of(&broker);
                for row in rows_of(&format::demo(36), 0) {
                    assert_eq!(Row::from(partition.read_one(row.offset).unwrap()), row);
                }
                drop(partition);
                broker.close().unwrap();
                assert_made_whole(&dir, &before, 1);
            }
        }
    });
}
