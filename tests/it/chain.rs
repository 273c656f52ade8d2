//! The chain of segments and of the records in them: damage in its middle, records and segments that are numbered out of turn, and what
//! lies behind an end. The numbers are those of the project's list of failures met by others.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use sapwood::{Backend, Broker, BrokerConfig, Error, Flaw, OnDamage, Reader, Recovery, TopicConfig};

use crate::damage::{self, Target, noise};
use crate::format::{self, BASE_TIME, Content, Layout, Slot, encode, entry, segment_path};
use crate::recovery::{DEMO, assert_goes_on, assert_recovers};
use crate::support::{
    Row, append, bytes_in, config, data_with, data_with_demo, each_backend, open, partition_dir, partition_of, read_all, report_of,
    rows_of, segments_of, small,
};

/// The bytes of all logs.
fn logs(dir: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let is_log = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "log");
    bytes_in(dir).into_iter().filter(|(path, _)| is_log(path)).collect()
}

/// What a checkpoint says that was written in the demo's newest segment, if that begins at `base` and holds so many records.
fn checkpoint(base: u64, records: u64, clean: bool) -> Slot {
    let next_offset = base + records;
    let last_timestamp = BASE_TIME + next_offset.saturating_sub(1) * 1_000_000;
    Slot { sequence: 5, base, position: records * 45, next_offset, last_timestamp, entries: records, clean }
}

/// Everything that a reader gives from `offset` on, in pieces of so many bytes, until the end or an error.
pub fn read_on(reader: &mut Reader, mut offset: u64, max_bytes: usize) -> (Vec<Row>, Option<Error>) {
    let mut rows = Vec::new();
    loop {
        match reader.read(offset, max_bytes) {
            Ok(records) if records.is_empty() => return (rows, None),
            Ok(records) => {
                rows.extend(records.iter().map(Row::from));
                offset = records.next_offset();
            }
            Err(error) => return (rows, Some(error)),
        }
    }
}

// ---------------------------------------------------------------- damage in the middle

#[test]
fn b017_b019_b024_damage_in_a_sealed_segment_takes_nothing_along_whatever_is_asked_for() {
    let asks =
        [Recovery::FromCheckpoint, Recovery::FullScan].map(|recovery| [(recovery, OnDamage::Refuse), (recovery, OnDamage::CutAside)]);
    let original = rows_of(&format::demo(36), 0);
    each_backend(|backend| {
        for name in ["flip-value-byte", "flip-key-byte", "flip-timestamp", "flip-offset", "flip-crc", "hole-in-the-middle"] {
            for (number, (recovery, on_damage)) in asks.concat().into_iter().enumerate() {
                let segment = [0, 1, 4][(name.len() + number) % 3];
                let (data, dir) = data_with(DEMO);
                damage::apply_to(&dir, name, segment);
                if number % 2 == name.len() % 2 {
                    fs::write(dir.join("checkpoint"), checkpoint(30, 6, true).file(None)).unwrap();
                }
                let before = logs(&dir);
                let at = segment as u64 * 6 + 3;
                for round in 0..2 {
                    let broker =
                        Broker::open(data.path(), BrokerConfig { recovery, on_damage, ..config(backend, segments_of(270)) }).unwrap();
                    let report = report_of(&broker);
                    assert!(report.torn_tail.is_none() && report.repaired.is_none(), "{report:?}");
                    assert_eq!(report.next_offset, 36 + round);
                    let named = |error: &Error| {
                        let log = segment_path(&dir, segment as u64 * 6, "log");
                        matches!(error, Error::Damaged { path, position: 135, offset, .. } if (path, *offset) == (&log, at))
                    };
                    assert!(report.damage.iter().all(named), "{report:?}");
                    let partition = partition_of(&broker);
                    let mut reader = partition.reader().unwrap();
                    let (rows, error) = read_on(&mut reader, 0, 100);
                    assert_eq!(rows, original[..at as usize], "{name} in segment {segment}");
                    assert!(error.as_ref().is_some_and(named), "{error:?}");
                    let behind = (segment as u64 + 1) * 6;
                    assert_eq!(read_on(&mut reader, behind, 100).0[..36 - behind as usize], original[behind as usize..]);
                    assert_eq!(append(&partition, b"user-1", b"value-00036"), 36 + round);
                    drop((reader, partition));
                    broker.close().unwrap();
                    let after = logs(&dir);
                    assert!(before.iter().all(|(path, bytes)| after[path] == *bytes), "{name} in segment {segment}: a log changed");
                }
            }
        }
    });
}

#[test]
fn b020_b022_nothing_is_emptied_while_whole_records_lie_behind_the_damage() {
    each_backend(|backend| {
        for overwritten in [vec![0xff; 28], vec![0xff; 45], vec![0xff], vec![0; 45], vec![0; 28], noise(28), noise(44)] {
            let (data, dir) = data_with_demo(21, Layout::default());
            let target = Target::newest(&dir);
            let mut bytes = target.bytes.clone();
            bytes[..overwritten.len()].copy_from_slice(&overwritten);
            fs::write(&target.log, &bytes).unwrap();
            let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
            let tail = report.torn_tail.unwrap();
            assert_eq!((kept.len(), tail.position, tail.records), (0, 0, 20), "{tail:?}");
            let copy = tail.copy.unwrap();
            assert!(fs::read(&copy).unwrap() == bytes, "every byte is set aside");
            assert_goes_on(data.path(), backend, &small(), broker, &kept, overwritten.len() == 28);
            assert!(fs::read(&copy).unwrap() == bytes, "and stays");
        }
    });
}

#[test]
fn b034_b036_whole_records_of_other_offsets_end_the_log() {
    let demo: Vec<_> = (0..).zip(format::demo(36)).map(|(offset, content)| copy_of(offset, &content)).collect();
    // Older ones, one or several, and those that are numbered too high.
    let stale = [0, 6, 29, 30, 34, 35].map(|number| (demo[number].clone(), number as u64, 0));
    let runs = [
        (demo[..6].concat(), 0, 0),
        (demo[30..].concat(), 30, 0),
        ([demo[35].clone(), copy_of(36, &format::demo(37)[36])].concat(), 35, 1),
    ];
    let gaps = [1, 2, 220, 255, 256, 65_536, (1 << 32) - 1, 1 << 32, 1 << 40, u64::MAX - 36];
    let gaps = gaps.map(|gap| (encode(36 + gap, BASE_TIME * 2, b"k", b"gap"), 36 + gap, u64::from(gap < 1 << 32)));
    each_backend(|backend| {
        for (number, (tail, offset, records)) in stale.iter().chain(&runs).chain(&gaps).enumerate() {
            let (data, dir) = data_with(DEMO);
            let target = Target::newest(&dir);
            let room = vec![0; [0, 4096][number % 2]];
            fs::write(&target.log, [&target.bytes[..], tail, &room].concat()).unwrap();
            let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
            let found = report.torn_tail.unwrap();
            assert!(matches!(found.flaw, Flaw::OffsetGap { found, expected: 36 } if found == *offset), "{found:?}");
            assert_eq!((kept.len(), found.records), (36, *records), "{found:?}");
            assert_goes_on(data.path(), backend, &small(), broker, &kept, number % 3 == 0);
        }
    });
}

fn copy_of(offset: u64, content: &Content) -> Vec<u8> {
    encode(offset, content.timestamp, &content.key, &content.value)
}

// ---------------------------------------------------------------- between segments

/// Puts a segment there with records of other contents, indexed.
fn put_segment(dir: &Path, base: u64, records: u64) {
    let (mut log, mut index, mut timeindex) = (Vec::new(), Vec::new(), Vec::new());
    for offset in base..base + records {
        let timestamp = BASE_TIME + offset * 1_000_000;
        index.extend(entry(offset, log.len() as u64));
        timeindex.extend(entry(offset, timestamp));
        log.extend(encode(offset, timestamp, b"other!", b"value-other"));
    }
    for (extension, bytes) in [("log", log), ("index", index), ("timeindex", timeindex)] {
        fs::write(segment_path(dir, base, extension), bytes).unwrap();
    }
}

/// Either opening refuses and names the place, with no log changed; or whoever reads on gets offsets that increase, and the same
/// record for an offset as whoever asks for it alone.
fn assert_one_answer_for_each_offset(data: &Path, backend: Backend, settings: &TopicConfig, what: &str) -> bool {
    let dir = partition_dir(data);
    let before = logs(&dir);
    match Broker::open(data, config(backend, settings.clone())) {
        Err(error) => {
            assert!(error.is_damage(), "{what}: {error}");
            assert!(logs(&dir) == before, "{what}: refused, and changed");
            false
        }
        Ok(broker) => {
            let partition = partition_of(&broker);
            for max_bytes in [1, 100, 1 << 16] {
                let mut reader = partition.reader().unwrap();
                let (rows, _) = read_on(&mut reader, 0, max_bytes);
                for (offset, row) in (0..).zip(rows) {
                    assert_eq!(row.offset, offset, "{what}");
                    assert_eq!(Row::from(partition.read_one(offset).unwrap()), row, "{what}: two answers, {max_bytes} bytes at a time");
                }
            }
            true
        }
    }
}

#[test]
fn b038_no_offset_has_two_records_where_segments_overlap() {
    each_backend(|backend| {
        for index_interval in [1, 7] {
            for (base, records) in [(35, 1), (35, 3), (33, 3), (33, 2), (31, 5), (8, 4), (11, 1), (11, 7), (7, 1), (29, 1)] {
                for checkpointed in [None, Some(30), Some(base)] {
                    let layout = Layout { segment_bytes: 270, index_interval, ..Layout::default() };
                    let (data, dir) = data_with_demo(36, layout);
                    put_segment(&dir, base, records);
                    if let Some(of) = checkpointed {
                        let slot = checkpoint(of, if of == 30 { 6 } else { records }, false);
                        let entries = if of == 30 { 6u64.div_ceil(index_interval) } else { records };
                        fs::write(dir.join("checkpoint"), Slot { entries, ..slot }.file(None)).unwrap();
                    }
                    let settings = TopicConfig { index_interval: index_interval as u32, ..segments_of(270) };
                    let what = format!("{records} records from {base}, interval {index_interval}, checkpoint {checkpointed:?}");
                    let opened = assert_one_answer_for_each_offset(data.path(), backend, &settings, &what);
                    assert!(!opened || checkpointed.is_some(), "{what}: without a checkpoint all of it is looked at");
                }
            }
        }
    });
}

#[test]
fn b069_what_lies_behind_the_end_of_a_sealed_log_is_not_read() {
    each_backend(|backend| {
        for base in [0, 12, 24] {
            for checkpointed in [false, true] {
                let next = base + 6;
                let tails = [
                    encode(next, BASE_TIME * 2, b"other!", b"value-other"),
                    [next, next + 1].map(|offset| encode(offset, BASE_TIME * 2, b"other!", b"value-other")).concat(),
                    encode(base, BASE_TIME, b"other!", b"value-other"),
                    noise(100),
                    vec![0; 100],
                ];
                for (number, tail) in tails.into_iter().enumerate() {
                    let (data, dir) = data_with(DEMO);
                    let target = Target::number(&dir, base as usize / 6);
                    fs::write(&target.log, [&target.bytes, &tail[..]].concat()).unwrap();
                    if checkpointed {
                        fs::write(dir.join("checkpoint"), checkpoint(30, 6, true).file(None)).unwrap();
                    }
                    let what = format!("tail {number} behind the segment of {base}, checkpoint {checkpointed}");
                    if assert_one_answer_for_each_offset(data.path(), backend, &segments_of(270), &what) {
                        let broker = open(data.path(), backend, &segments_of(270));
                        assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(36), 0), "{what}");
                    }
                }
            }
        }
    });
}

#[test]
fn b039_a_reader_meets_missing_segments_as_an_error_and_goes_on_behind_them() {
    let original = rows_of(&format::demo(36), 0);
    each_backend(|backend| {
        for gone in [&[1][..], &[1, 2], &[1, 3], &[4], &[1, 2, 3, 4]] {
            for checkpointed in [false, true] {
                let (data, dir) = data_with(DEMO);
                for (segment, extension) in
                    gone.iter().flat_map(|segment| ["log", "index", "timeindex"].map(|extension| (*segment, extension)))
                {
                    fs::remove_file(segment_path(&dir, segment * 6, extension)).unwrap();
                }
                if checkpointed {
                    fs::write(dir.join("checkpoint"), checkpoint(30, 6, true).file(None)).unwrap();
                }
                let before = logs(&dir);
                let broker = open(data.path(), backend, &segments_of(270));
                let partition = partition_of(&broker);
                let mut reader = partition.reader().unwrap();
                let (mut found, mut missing, mut from) = (Vec::new(), Vec::new(), 0);
                loop {
                    let (rows, error) = read_on(&mut reader, from, 100);
                    found.extend(rows);
                    match error {
                        None => break,
                        Some(Error::RecordsMissing { path, from: first, to }) => {
                            assert_eq!((path, first), (dir.clone(), found.last().unwrap().offset + 1));
                            missing.extend(first..to);
                            from = to;
                        }
                        Some(error) => panic!("{error}"),
                    }
                }
                let (lost, kept): (Vec<_>, Vec<_>) = original.iter().cloned().partition(|row| gone.contains(&(row.offset / 6)));
                assert_eq!((found, missing), (kept, lost.iter().map(|row| row.offset).collect::<Vec<_>>()));
                assert!(lost.iter().all(|row| partition.read_one(row.offset).unwrap_err().is_damage()));
                assert_eq!(append(&partition, b"user-1", b"value-00036"), 36);
                drop((reader, partition));
                broker.close().unwrap();
                assert!(before.iter().all(|(path, bytes)| logs(&dir)[path] == *bytes), "what was there stays");
            }
        }
    });
}
