//! Opening after crashes: torn tails, preallocated space, lengths that lie. Case numbers are those of the project's list of failures
//! met by others.
//!
//! The ground is `demo-36-segment-270`: 6 segments of 6 records of 45 bytes, no checkpoint, so what is bad in the newest one is a torn tail.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use sapwood::io::OsDisk;
use sapwood::{Backend, Broker, Error, Flaw, PartitionReport, TopicConfig};
use serde_json::json;
use tempfile::TempDir;

use crate::child::{self, Child, append_and_kill, backend_name, say};
use crate::damage::{self, Target};
use crate::format::{self, BASE_TIME, Content, HEADER, Layout, bytes_to_zero_crc, encode, entry, segment_path};
use crate::oracle::{assert_closed, assert_sound, assert_sound_while_open, check, data_end};
use crate::support::{
    BACKENDS, Row, TestClock, append, assert_in_order, bytes_in, config, contents, create, data_with, data_with_demo, each_backend, open,
    partition_dir, partition_of, read_all, report_of, rows, rows_of, scratch, segments_of, small,
};

const DEMO: &str = "demo-36-segment-270";

/// Damages of the newest segment that leave its records up to some point, and nothing behind that may count.
const TAILS: &[&str] = &[
    "truncate-mid-header",
    "truncate-mid-body",
    "truncate-at-boundary",
    "zero-tail",
    "zero-tail-short",
    "garbage-tail",
    "torn-body-prealloc",
    "torn-header-prealloc",
    "hole-in-the-middle",
    "stale-record-tail",
    "torn-record-in-value",
    "offset-gap",
    "duplicate-offset",
    "flip-value-byte",
    "flip-key-byte",
    "flip-timestamp",
    "flip-crc",
    "flip-offset",
    "keylen-gt-size",
    "keylen-max",
    "size-huge",
    "size-wraps",
    "size-top-bit",
    "size-plus-one",
    "size-minus-one",
];

/// Those behind whose first bad byte whole records lie, and how many.
const WITH_RECORDS_BEHIND: &[(&str, u64)] =
    &[("hole-in-the-middle", 2), ("flip-value-byte", 2), ("keylen-max", 2), ("size-huge", 2), ("offset-gap", 1)];

fn demo_damaged(name: &str) -> (TempDir, std::path::PathBuf) {
    let (data, dir) = data_with(DEMO);
    damage::apply(&dir, name);
    (data, dir)
}

/// Opens, and holds the engine to what the oracle says must be kept: those records, the tail cut and told of, zeros behind it.
/// Gives the broker back, the report and the rows.
fn assert_recovers(data: &Path, backend: Backend, settings: &TopicConfig) -> (Broker, PartitionReport, Vec<Row>) {
    let dir = partition_dir(data);
    let before = check(&dir);
    let newest = before.segments.last().unwrap().clone();
    let log = segment_path(&dir, newest.base, "log");
    let bytes = fs::read(&log).unwrap();
    let torn = data_end(&bytes[newest.valid_end as usize..]) as u64;
    let kept = rows(before.readable_records());

    let broker = open(data, backend, settings);
    let report = report_of(&broker);
    let partition = partition_of(&broker);
    assert_eq!(report.next_offset, before.next_offset, "{report:?}");
    assert_eq!(
        (partition.first_offset(), partition.next_offset(), partition.durable_end()),
        (before.first_offset, before.next_offset, before.next_offset)
    );
    assert_eq!(read_all(&partition), kept);
    assert!(partition.read_one(before.next_offset).unwrap_err().is_out_of_range());
    assert!(report.damage.is_empty(), "{report:?}");
    match &report.torn_tail {
        None => assert_eq!(torn, 0, "{torn} bytes of a torn tail went untold"),
        Some(tail) => {
            assert_eq!((&tail.path, tail.position, tail.bytes), (&log, newest.valid_end, torn), "{tail:?}");
            let flaw_fits = match tail.flaw {
                Flaw::TornHeader { left } => (left as usize) < HEADER,
                Flaw::OffsetGap { expected, .. } => expected == before.next_offset,
                Flaw::BadLength { .. } | Flaw::BadChecksum { .. } => true,
                _ => false,
            };
            assert!(flaw_fits, "{tail:?}");
            match &tail.copy {
                None => assert_eq!(tail.records, 0, "records were found and not copied aside: {tail:?}"),
                Some(copy) => {
                    assert!(tail.records > 0, "{tail:?}");
                    assert_eq!(copy.parent(), Some(&*dir));
                    let name = copy.file_name().unwrap().to_str().unwrap();
                    assert_eq!(name, format!("{:020}.{}.torn", newest.base, tail.position));
                    let start = newest.valid_end as usize;
                    assert!(fs::read(copy).unwrap() == bytes[start..start + torn as usize], "the copy is what was cut");
                }
            }
        }
    }
    let now = assert_sound(&dir);
    assert_eq!(rows(&now.records), kept);
    assert_eq!(now.next_position, before.next_position);
    (broker, report, kept)
}

/// After [`assert_recovers`]: appends, leaves in one of the ways there are, opens again, and finds old and new.
fn assert_goes_on(data: &Path, backend: Backend, settings: &TopicConfig, broker: Broker, kept: &[Row], close: bool) {
    let dir = partition_dir(data);
    let partition = partition_of(&broker);
    let first = partition.first_offset();
    let next = first + kept.len() as u64;
    let new: Vec<_> = (0..5).map(|number| (format!("user-{number}").into_bytes(), format!("again-{number:05}").into_bytes())).collect();
    for (offset, (key, value)) in (next..).zip(&new) {
        assert_eq!(append(&partition, key, value), offset);
    }
    drop(partition);
    if close {
        broker.close().unwrap()
    } else {
        drop(broker)
    }
    if close {
        assert_closed(&dir, settings.index_interval.into());
    }
    let broker = open(data, backend, settings);
    let report = report_of(&broker);
    assert!(report.torn_tail.is_none() && report.damage.is_empty(), "{report:?}");
    let all = read_all(&partition_of(&broker));
    assert_in_order(&all, first);
    assert_eq!(all[..kept.len()], *kept);
    assert_eq!(contents(&all[kept.len()..]), new);
    broker.close().unwrap();
    let report = assert_closed(&dir, settings.index_interval.into());
    assert_eq!(rows(&report.records), all);
}

/// Closed after a recovery, opened again: nothing is found any more, and not one byte changes.
fn assert_reopening_changes_nothing(data: &Path, backend: Backend, settings: &TopicConfig, broker: Broker) {
    broker.close().unwrap();
    assert_closed(&partition_dir(data), settings.index_interval.into());
    let before = bytes_in(data);
    let broker = open(data, backend, settings);
    let report = report_of(&broker);
    assert!(report.torn_tail.is_none() && report.damage.is_empty() && report.rebuilt.is_empty(), "{report:?}");
    broker.close().unwrap();
    assert!(bytes_in(data) == before, "opening and closing changed something");
}

#[test]
fn every_tail_is_cut_told_of_and_followed_by_new_records() {
    each_backend(|backend| {
        for name in TAILS {
            for (close, settings) in [(true, segments_of(270)), (false, segments_of(270)), (true, small()), (false, small())] {
                eprintln!("{name}, close {close}, segments of {}", settings.segment_bytes);
                let (data, _) = demo_damaged(name);
                let (broker, report, kept) = assert_recovers(data.path(), backend, &settings);
                if let Some((_, records)) = WITH_RECORDS_BEHIND.iter().find(|(with, _)| with == name) {
                    let tail = report.torn_tail.unwrap();
                    assert!(tail.records == *records && tail.copy.is_some(), "{tail:?}");
                }
                assert_goes_on(data.path(), backend, &settings, broker, &kept, close);
            }
            let (data, _) = demo_damaged(name);
            let (broker, ..) = assert_recovers(data.path(), backend, &small());
            assert_reopening_changes_nothing(data.path(), backend, &small(), broker);
        }
    });
}

#[test]
fn b001_a_body_that_stayed_zeros_takes_only_its_own_record() {
    each_backend(|backend| {
        let (data, dir) = demo_damaged("torn-body-prealloc");
        let (broker, report, _) = assert_recovers(data.path(), backend, &small());
        assert_eq!(report.next_offset, 35);
        assert_eq!(report.torn_tail.unwrap().position, 225);
        let partition = partition_of(&broker);
        assert_eq!(append(&partition, b"user-1", b"value-00000"), 35);
        drop(partition);
        broker.close().unwrap();
        let report = assert_closed(&dir, 1);
        assert_eq!((report.records[35].base, report.records[35].position), (30, 225));

        // Header and some of the body there, the rest and 4 KiB behind still zeros, for every length of the body.
        for there in 0..17 {
            let (data, dir) = data_with(DEMO);
            let target = Target::newest(&dir);
            let mut bytes = target.bytes.clone();
            bytes[225 + HEADER + there..].fill(0);
            bytes.resize(bytes.len() + 4096, 0);
            fs::write(&target.log, bytes).unwrap();
            let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
            assert_eq!(kept.len(), 35);
            assert!(matches!(report.torn_tail.unwrap().flaw, Flaw::BadChecksum { .. }));
            if there % 4 == 0 {
                assert_goes_on(data.path(), backend, &small(), broker, &kept, there % 8 == 0);
            } else {
                assert_reopening_changes_nothing(data.path(), backend, &small(), broker);
            }
        }
    });
}

#[test]
fn b003_every_cut_length_keeps_the_whole_records_before_it() {
    each_backend(|backend| {
        // Bare, and with zeros behind the cut as a preallocated file has them; in the last of six segments, and in the only one.
        // Each backend meets every length one way, and some the other way.
        for zeros in [0, 100] {
            let step = if (zeros == 0) == (backend == Backend::Posix) { 1 } else { 11 };
            for (layout, records) in [(Layout { segment_bytes: 270, ..Layout::default() }, 36), (Layout::default(), 5)] {
                let (origin, origin_dir) = data_with_demo(records, layout);
                let target = Target::newest(&origin_dir);
                for cut in (0..=target.bytes.len()).step_by(step) {
                    let data = scratch();
                    let dir = partition_dir(data.path());
                    crate::support::copy_dir(&origin_dir, &dir);
                    let bytes = [&target.bytes[..cut], &vec![0; zeros]].concat();
                    fs::write(segment_path(&dir, target.base, "log"), bytes).unwrap();
                    let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
                    let whole = target.base + target.records.iter().filter(|record| record.end() <= cut as u64).count() as u64;
                    assert_eq!((kept.len() as u64, report.next_offset), (whole, whole), "cut at {cut}, {zeros} zeros behind");
                    if cut % 31 == 0 {
                        assert_goes_on(data.path(), backend, &small(), broker, &kept, cut % 2 == 0);
                    }
                }
                drop(origin);
            }
        }
    });
}

#[test]
fn b004_one_byte_short_drops_that_record_and_says_so() {
    each_backend(|backend| {
        let shapes: [(&[u8], &[u8]); 5] =
            [(b"user-1", b"value"), (b"last key byte", b""), (b"", b"value"), (b"k", &[7; 5000]), (b"", b"\x00\x00\x01")];
        for (key, value) in shapes {
            let data = scratch();
            let dir = partition_dir(data.path());
            let mut records = format::demo(7);
            records.push(Content::new(key, value, BASE_TIME * 2));
            format::write_partition(&dir, &records, Layout { segment_bytes: 8000, ..Layout::default() });
            let target = Target::newest(&dir);
            fs::write(&target.log, &target.bytes[..target.end - 1]).unwrap();
            let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
            assert_eq!(kept, rows_of(&records[..7], 0));
            let tail = report.torn_tail.unwrap();
            // Up to the last byte that is not zero: zeros cannot be told from space that nothing was written to.
            let expected = (target.log.clone(), 7 * 45, data_end(&target.bytes[7 * 45..target.end - 1]) as u64);
            assert_eq!((tail.path.clone(), tail.position, tail.bytes), expected, "{tail:?}");
            assert!(matches!(tail.flaw, Flaw::BadLength { .. }), "{tail:?}");
            assert_goes_on(data.path(), backend, &small(), broker, &kept, true);
        }
        let (data, _) = demo_damaged("truncate-mid-body");
        let (_broker, report, kept) = assert_recovers(data.path(), backend, &small());
        assert_eq!((kept.len(), report.torn_tail.unwrap().bytes), (35, 44));
    });
}

#[test]
fn b005_a_torn_tail_is_cut_before_new_appends() {
    each_backend(|backend| {
        for name in ["truncate-mid-body", "garbage-tail", "torn-body-prealloc", "torn-header-prealloc", "hole-in-the-middle"] {
            for settings in [segments_of(270), segments_of(45), small()] {
                // Left by a kill, so that nothing is tidied up on the way out.
                let (data, dir) = demo_damaged(name);
                let kept = rows(check(&dir).readable_records());
                let new: Vec<_> = (0..5).map(|number| (b"user-1".to_vec(), format!("value-{number:05}").into_bytes())).collect();
                let offsets = append_and_kill(data.path(), backend, &settings, &new);
                let next = kept.len() as u64;
                assert_eq!(offsets, (next..next + 5).collect::<Vec<_>>());
                let broker = open(data.path(), backend, &settings);
                let all = read_all(&partition_of(&broker));
                assert_eq!(all[..kept.len()], kept);
                assert_eq!(contents(&all[kept.len()..]), new);
                assert_in_order(&all, 0);
                assert_sound(&dir);
                broker.close().unwrap();
                assert_eq!(rows(&assert_closed(&dir, 1).records), all);
            }
        }
    });
}

#[test]
fn b009_records_behind_a_hole_never_come_back() {
    each_backend(|backend| {
        for hole in 0..5usize {
            for fill in 1..=(6 - hole).min(3) {
                let (data, dir) = data_with(DEMO);
                let target = Target::newest(&dir);
                target.damage("hole-in-the-middle", &target.records[hole]);
                let next = 30 + hole as u64;
                // Each new record fills the place of an old one exactly.
                let new: Vec<_> = (0..fill).map(|number| (b"user-9".to_vec(), format!("filled-{number:04}").into_bytes())).collect();
                let offsets = append_and_kill(data.path(), backend, &small(), &new);
                assert_eq!(offsets, (next..next + fill as u64).collect::<Vec<_>>());

                let broker = open(data.path(), backend, &small());
                let partition = partition_of(&broker);
                assert_eq!(partition.next_offset(), next + fill as u64, "hole {hole}, {fill} filled");
                assert!(report_of(&broker).torn_tail.is_none());
                let all = read_all(&partition);
                assert_eq!(all[..next as usize], rows_of(&format::demo(next), 0));
                assert_eq!(contents(&all[next as usize..]), new);
                assert_eq!(append(&partition, b"user-9", b"the next one"), next + fill as u64);
                assert_eq!(partition.read_one(next + fill as u64).unwrap().value, &b"the next one"[..]);
                assert_sound_while_open(&dir);
            }
        }
    });
}

/// Demo records with one at `at` whose checksum is zero.
fn with_zero_crc(count: u64, at: usize) -> Vec<Content> {
    let mut records = format::demo(count);
    let record = &mut records[at];
    record.value.extend(bytes_to_zero_crc(record.timestamp, &record.key, &record.value));
    assert_eq!(format::crc(record.timestamp, &record.key, &record.value), 0);
    records
}

#[test]
fn b010_a_checksum_of_zero_is_a_checksum() {
    each_backend(|backend| {
        for segment_bytes in [1, 270, 1 << 30] {
            for at in [0, 3, 11] {
                for prealloc in [0, 8192] {
                    let records = with_zero_crc(12, at);
                    let data = scratch();
                    let dir = partition_dir(data.path());
                    format::write_partition(&dir, &records, Layout { segment_bytes, prealloc, ..Layout::default() });
                    let (broker, report, kept) = assert_recovers(data.path(), backend, &segments_of(segment_bytes));
                    assert_eq!(kept, rows_of(&records, 0));
                    assert!(report.torn_tail.is_none());
                    assert_goes_on(data.path(), backend, &segments_of(segment_bytes), broker, &kept, prealloc == 0);
                }
            }
        }
        // Written by the engine itself, at a time that the test knows, as the last record before a crash.
        let data = scratch();
        let clock = Arc::new(TestClock::at(BASE_TIME));
        let broker = Broker::open_on(Arc::new(OsDisk::new(backend).unwrap()), clock, data.path(), config(backend, small())).unwrap();
        let partition = broker.create_topic("t", small()).unwrap().partition(0).unwrap();
        append(&partition, b"k", b"before");
        let value = [&b"made to have none"[..], &bytes_to_zero_crc(BASE_TIME, b"k", b"made to have none")].concat();
        append(&partition, b"k", &value);
        drop((partition, broker));
        let log = fs::read(segment_path(&partition_dir(data.path()), 0, "log")).unwrap();
        assert_eq!(log[35 + 12..35 + 16], [0; 4], "the checksum in the file");
        let broker = open(data.path(), backend, &small());
        assert_eq!(partition_of(&broker).next_offset(), 2);
        assert_eq!(partition_of(&broker).read_one(1).unwrap().value, value);
    });
}

#[test]
fn b011_the_end_is_found_to_the_byte_in_a_preallocated_file() {
    each_backend(|backend| {
        let (data, dir) = data_with("interval-1-prealloc");
        let offsets = append_and_kill(data.path(), backend, &small(), &[(b"user-5".to_vec(), b"value-00005".to_vec())]);
        assert_eq!(offsets, [5]);
        let report = assert_sound(&dir);
        assert_eq!((report.records.len(), report.records[5].position), (6, 225));
        let broker = open(data.path(), backend, &small());
        assert_eq!(contents(&read_all(&partition_of(&broker))), contents(&rows_of(&format::demo(6), 0)));
        broker.close().unwrap();
        assert_eq!(assert_closed(&dir, 1).next_position, 270);

        for records in [0, 1, 5, 91, 92] {
            for zeros in [1, 27, 28, 29, 4095, 4096, 4097, 65536, 200_000] {
                let (data, dir) = data_with_demo(records, Layout { prealloc: records as usize * 45 + zeros, ..Layout::default() });
                let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
                assert!(report.torn_tail.is_none(), "{report:?}");
                assert_eq!(append(&partition_of(&broker), b"user-5", b"value-00005"), records);
                drop(broker);
                let report = assert_sound(&dir);
                let last = report.records.last().unwrap();
                assert_eq!((last.offset, last.position, kept.len() as u64), (records, 45 * records, records));
            }
        }
    });
}

#[test]
fn b014_a_segment_that_is_only_preallocated_is_the_empty_active_one() {
    each_backend(|backend| {
        for zeros in [0, 1, 13, 28, 4096, 65536] {
            for indexes in ["none", "empty", "zeros"] {
                let (data, dir) = data_with(DEMO);
                fs::write(segment_path(&dir, 36, "log"), vec![0; zeros]).unwrap();
                for extension in ["index", "timeindex"] {
                    match indexes {
                        "none" => {}
                        "empty" => fs::write(segment_path(&dir, 36, extension), b"").unwrap(),
                        _ => fs::write(segment_path(&dir, 36, extension), [0; 4096]).unwrap(),
                    }
                }
                let broker = open(data.path(), backend, &segments_of(270));
                let report = report_of(&broker);
                assert!(report.torn_tail.is_none() && report.damage.is_empty(), "{report:?}");
                assert_eq!((report.next_offset, report.segments), (36, 7));
                let partition = partition_of(&broker);
                assert_eq!(read_all(&partition), rows_of(&format::demo(36), 0));
                assert_sound(&dir);
                assert_eq!(append(&partition, b"user-1", b"value-00036"), 36);
                let found = assert_sound_while_open(&dir).records.pop().unwrap();
                assert_eq!((found.offset, found.base, found.position), (36, 36, 0));
                drop(partition);
                broker.close().unwrap();
                assert_closed(&dir, 1);
            }
        }
        // And so is one that nothing was ever written to.
        let (data, dir) = data_with(DEMO);
        fs::write(segment_path(&dir, 36, "log"), [0; 65536]).unwrap();
        open(data.path(), backend, &segments_of(270)).close().unwrap();
        assert_eq!(assert_closed(&dir, 1).segments.len(), 7);
    });
}

/// The lengths that wrap, overflow or change sign somewhere.
const LENGTHS: [u32; 9] =
    [0x7fff_ffff, 0x8000_0000, 0x8000_001c, 0xffff_ffe3, 0xffff_ffe4, 0xffff_ffe5, 0xffff_fffe, u32::MAX, 0xffff_f000];

#[test]
fn b025_a_size_that_wraps_ends_the_log_there() {
    each_backend(|backend| {
        for (number, size) in LENGTHS.into_iter().enumerate() {
            for record in [0, 3, 5] {
                let (data, dir) = data_with(DEMO);
                let target = Target::newest(&dir);
                let at = target.records[record].position as usize;
                let mut bytes = target.bytes.clone();
                bytes[at + 8..at + 12].copy_from_slice(&size.to_be_bytes());
                fs::write(&target.log, bytes).unwrap();
                let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
                assert_eq!(kept.len(), 30 + record);
                let flaw = report.torn_tail.unwrap().flaw;
                assert!(matches!(flaw, Flaw::BadLength { size: told, .. } if told == size), "{flaw}");
                assert_goes_on(data.path(), backend, &small(), broker, &kept, number % 2 == 0);
            }
        }
    });
}

/// Damages a record of a sealed segment, and holds the engine to: opening and appending go on, every byte stays, records before the
/// damage and in other segments are served, and a read that meets it gets an error that names it.
fn assert_sealed_damage_is_named(backend: Backend, segment: usize, record: usize, harm: impl Fn(&Target)) -> Flaw {
    let (data, dir) = data_with(DEMO);
    let target = Target::number(&dir, segment);
    harm(&target);
    let damaged = fs::read(&target.log).unwrap();
    assert!(damaged != target.bytes);
    let offset = target.base + record as u64;
    let original = rows_of(&format::demo(36), 0);

    let broker = open(data.path(), backend, &segments_of(270));
    let report = report_of(&broker);
    assert_eq!((report.first_offset, report.next_offset, report.segments), (0, 36, 6), "{report:?}");
    assert!(report.torn_tail.is_none(), "{report:?}");
    let partition = partition_of(&broker);
    let mut reader = partition.reader().unwrap();
    let mut flaw = None;
    let mut assert_named = |error: Error| match error {
        Error::Damaged { path, position, offset: named, flaw: found } => {
            assert_eq!((path, position, named), (target.log.clone(), 45 * record as u64, offset));
            flaw = Some(found);
        }
        other => panic!("the damage of {offset} is told as {other}"),
    };
    for start in 0..=offset {
        // From before the damage its predecessors come first, then the error.
        let mut at = start;
        let error = loop {
            match reader.read(at, 100) {
                Ok(records) => {
                    assert!(!records.is_empty(), "the log ends at {at} for a reader");
                    for row in records.iter().map(Row::from) {
                        assert_eq!(row, original[row.offset as usize]);
                        assert!(row.offset < offset);
                    }
                    at = records.next_offset();
                }
                Err(error) => break error,
            }
        };
        assert_eq!(at, offset);
        assert_named(error);
    }
    assert_named(partition.read_one(offset).unwrap_err());
    // Behind it in its own segment: the right record or an error that names the damage; never another record.
    for behind in offset + 1..target.base + 6 {
        match partition.read_one(behind) {
            Ok(found) => assert_eq!(Row::from(found), original[behind as usize]),
            Err(error) => assert!(matches!(error, Error::Damaged { .. }), "{error}"),
        }
    }
    for row in &original[(target.base + 6) as usize..] {
        assert_eq!(Row::from(partition.read_one(row.offset).unwrap()), *row);
    }
    assert_eq!(append(&partition, b"k", b"goes on"), 36);
    assert_eq!(partition.read_one(36).unwrap().value, &b"goes on"[..]);
    drop((reader, partition));
    broker.close().unwrap();
    assert!(fs::read(&target.log).unwrap() == damaged, "every byte stays");
    assert_eq!(damage::bases(&dir), [0, 6, 12, 18, 24, 30, 36]);
    flaw.unwrap()
}

#[test]
fn b026_a_length_with_its_top_bit_set_stops_recovery_and_reading_cleanly() {
    each_backend(|backend| {
        let (data, dir) = demo_damaged("size-top-bit");
        let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
        assert!(matches!(report.torn_tail.unwrap().flaw, Flaw::BadLength { size: 0x8000_0000, .. }));
        assert_goes_on(data.path(), backend, &small(), broker, &kept, true);
        assert_eq!(damage::bases(&dir).len(), 6);
        for segment in [0, 2, 4] {
            for record in [0, 3, 5] {
                for size in [0x8000_0000u32, 0x8000_0011, u32::MAX, 0xffff_ffe4, 18] {
                    let flaw = assert_sealed_damage_is_named(backend, segment, record, |target| {
                        let mut bytes = target.bytes.clone();
                        bytes[record * 45 + 8..record * 45 + 12].copy_from_slice(&size.to_be_bytes());
                        fs::write(&target.log, bytes).unwrap();
                    });
                    if size > 18 {
                        assert!(matches!(flaw, Flaw::BadLength { size: told, .. } if told == size), "{flaw}");
                    }
                }
            }
        }
    });
}

/// The address space that recovery must do with, beyond what the process has when it begins.
const ADDRESS_SPACE: u64 = 1_000_000 << 10;

/// Opens and reads everything under a limit, and tells the peak of its memory.
pub fn recover_role() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::As, Rlimit { current: Some(ADDRESS_SPACE), maximum: Some(ADDRESS_SPACE) }).unwrap();
    let too_much = vec![0u8; 0].try_reserve_exact(0xffff_ffff);
    assert!(too_much.is_err(), "the limit does not bite");
    let broker = open(Path::new(&child::text("data")), child::backend(), &small());
    let partition = partition_of(&broker);
    let mut reader = partition.reader().unwrap();
    let (mut offset, mut damaged) = (partition.first_offset(), 0);
    while offset < partition.next_offset() {
        match reader.read(offset, 1000) {
            Ok(records) => offset = records.next_offset(),
            Err(error) => {
                assert!(matches!(error, Error::Damaged { .. }), "{error}");
                damaged += 1;
                offset += 1;
            }
        }
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim().trim_end_matches(" kB");
    say(&format!("{} {damaged} {peak}", partition.next_offset()));
}

#[test]
fn b027_no_length_is_believed_before_it_is_checked() {
    let recover = |data: &Path, backend: Backend| -> [u64; 3] {
        let mut child = Child::start("recover", &json!({ "data": data, "backend": backend_name(backend) }));
        let line = child.expect_line();
        assert!(child.finish().success());
        let numbers: Vec<_> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    };
    each_backend(|backend| {
        let (data, _) = data_with(DEMO);
        let [next, damaged, clean_peak] = recover(data.path(), backend);
        assert_eq!((next, damaged), (36, 0));
        for name in ["size-huge", "keylen-max", "size-top-bit", "size-wraps"] {
            // In the newest segment, and in a sealed one.
            let (data, dir) = data_with(DEMO);
            damage::apply(&dir, name);
            damage::apply_to(&dir, name, 2);
            let [next, damaged, peak] = recover(data.path(), backend);
            assert_eq!(next, 33, "{name}");
            assert!((1..=3).contains(&damaged), "{name}: {damaged}");
            assert!(peak < clean_peak + (8 << 10), "{name}: {peak} KiB at the peak, {clean_peak} KiB without damage");
        }
    });
}

#[test]
fn b029_a_key_longer_than_its_record_is_refused() {
    each_backend(|backend| {
        for keylen in [18u32, 19, 17 + HEADER as u32, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
            for record in [0, 3, 5] {
                let harm = |target: &Target| {
                    let mut bytes = target.bytes.clone();
                    bytes[record * 45 + 24..record * 45 + 28].copy_from_slice(&keylen.to_be_bytes());
                    fs::write(&target.log, bytes).unwrap();
                };
                let (data, dir) = data_with(DEMO);
                harm(&Target::newest(&dir));
                let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
                assert_eq!(kept.len(), 30 + record);
                let flaw = report.torn_tail.unwrap().flaw;
                assert!(matches!(flaw, Flaw::BadLength { size: 17, keylen: told, .. } if told == keylen), "{flaw}");
                assert_goes_on(data.path(), backend, &small(), broker, &kept, record == 0);
                let flaw = assert_sealed_damage_is_named(backend, 1, record, harm);
                assert!(matches!(flaw, Flaw::BadLength { size: 17, keylen: told, .. } if told == keylen), "{flaw}");
            }
        }
    });
}

#[test]
fn b030_a_shorter_key_length_cannot_be_seen_and_nothing_else_passes() {
    each_backend(|backend| {
        // The known limit, pinned: one byte of the key becomes the value's first.
        for segment in [1, 5] {
            let (data, dir) = data_with(DEMO);
            damage::apply_to(&dir, "flip-keylen", segment);
            let broker = open(data.path(), backend, &small());
            assert!(report_of(&broker).torn_tail.is_none() && report_of(&broker).damage.is_empty());
            let rows = read_all(&partition_of(&broker));
            let moved = segment * 6 + 3;
            let original = rows_of(&format::demo(36), 0);
            let expected = [&original[moved].key[5..], &original[moved].value].concat();
            assert_eq!((&rows[moved].key[..], &rows[moved].value), (&b"user-"[..], &expected));
            assert_eq!((&rows[..moved], &rows[moved + 1..]), (&original[..moved], &original[moved + 1..]));
        }

        // Every bit of a record, each flipped in a sealed segment of its own.
        let bits = 45 * 8;
        let (data, dir) = data_with_demo(bits + 1, Layout { segment_bytes: 1, ..Layout::default() });
        let original = rows_of(&format::demo(bits + 1), 0);
        for bit in 0..bits as usize {
            let path = segment_path(&dir, bit as u64, "log");
            let mut bytes = fs::read(&path).unwrap();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, bytes).unwrap();
        }
        let broker = open(data.path(), backend, &segments_of(1));
        let partition = partition_of(&broker);
        assert_eq!(partition.next_offset(), bits + 1);
        let mut silent = 0;
        for bit in 0..bits {
            match partition.read_one(bit) {
                Ok(record) => {
                    assert!((24..28).contains(&(bit / 8)), "bit {bit} passed");
                    let body = [record.key.clone(), record.value.clone()].concat();
                    let row = &original[bit as usize];
                    assert_eq!((body, record.timestamp), ([&row.key[..], &row.value].concat(), row.timestamp));
                    silent += 1;
                }
                Err(error) => assert!(matches!(error, Error::Damaged { offset, position: 0, .. } if offset == bit), "{error}"),
            }
        }
        assert!((1..32).contains(&silent), "{silent} bits of keylen pass: those that stay within the record");
        assert_eq!(append(&partition, b"k", b"goes on"), bits + 1);
    });
}

#[test]
fn b030_no_flipped_bit_of_the_newest_record_passes_but_in_keylen() {
    for (backend, step) in [(BACKENDS[0], 11), (BACKENDS[1], 1)] {
        for bit in (0..45 * 8).step_by(step) {
            let (data, dir) = data_with(DEMO);
            let target = Target::newest(&dir);
            let mut bytes = target.bytes.clone();
            bytes[225 + bit / 8] ^= 1 << (bit % 8);
            fs::write(&target.log, bytes).unwrap();
            let (_broker, report, kept) = assert_recovers(data.path(), backend, &small());
            let passed = kept.len() == 36;
            assert!(!passed || (24..28).contains(&(bit / 8)), "bit {bit} passed");
            assert_eq!(passed, report.torn_tail.is_none());
        }
    }
}

#[test]
fn b031_a_size_off_by_one_shifts_nothing() {
    each_backend(|backend| {
        for delta in [-1i32, 1, -17, 45, 28] {
            for record in [0usize, 2, 4] {
                let harm = |target: &Target| {
                    let mut bytes = target.bytes.clone();
                    let size = (17 + delta).cast_unsigned();
                    bytes[record * 45 + 8..record * 45 + 12].copy_from_slice(&size.to_be_bytes());
                    fs::write(&target.log, bytes).unwrap();
                };
                let (data, dir) = data_with(DEMO);
                harm(&Target::newest(&dir));
                let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
                assert_eq!(kept, rows_of(&format::demo(30 + record as u64), 0));
                let flaw = report.torn_tail.unwrap().flaw;
                let named = match 17 + delta {
                    // Shorter than the key, or past the end of the log.
                    0 => matches!(flaw, Flaw::BadLength { .. }),
                    size if record * 45 + HEADER + size as usize > 270 => matches!(flaw, Flaw::BadLength { .. }),
                    _ => matches!(flaw, Flaw::BadChecksum { .. }),
                };
                assert!(named, "{delta}: {flaw}");
                assert_goes_on(data.path(), backend, &small(), broker, &kept, delta > 0);
                assert_sealed_damage_is_named(backend, 3, record, harm);
            }
        }
    });
}

#[test]
fn b033_empty_keys_and_values_are_records_also_at_the_end() {
    each_backend(|backend| {
        let records: Vec<(Vec<u8>, Vec<u8>)> =
            [("", ""), ("", "v"), ("k", ""), ("", ""), ("", ""), ("", "")].map(|(key, value)| (key.into(), value.into())).into();
        for segment_bytes in [1, 28, 60, 1 << 30] {
            let data = scratch();
            let settings = segments_of(segment_bytes);
            let (broker, partition) = create(data.path(), backend, &settings);
            assert_eq!(
                partition.append(sapwood::Batch::of(None, b"").unwrap()).unwrap().wait().unwrap(),
                0..1,
                "no key and an empty one are the same"
            );
            drop(partition);
            broker.close().unwrap();
            let offsets = append_and_kill(data.path(), backend, &settings, &records);
            assert_eq!(offsets, (1..7).collect::<Vec<_>>());
            let dir = partition_dir(data.path());
            let found = check(&dir).records;
            assert_eq!(found.iter().map(crate::oracle::Found::bytes).collect::<Vec<_>>(), [28, 28, 29, 29, 28, 28, 28]);
            for close in [false, true] {
                let broker = open(data.path(), backend, &settings);
                let all = read_all(&partition_of(&broker));
                assert_in_order(&all, 0);
                assert_eq!(contents(&all[1..]), records);
                assert_eq!(contents(&all[..1]), [(vec![], vec![])]);
                assert_sound(&dir);
                if close { broker.close().unwrap() } else { drop(broker) }
            }
            assert_closed(&dir, 1);
        }
    });
}

#[test]
fn sealed_damage_of_every_kind_stops_neither_opening_nor_appending() {
    each_backend(|backend| {
        let kinds =
            ["flip-value-byte", "flip-key-byte", "flip-timestamp", "flip-crc", "flip-offset", "keylen-gt-size", "keylen-max", "size-huge"];
        for name in kinds.into_iter().chain(["size-wraps", "size-plus-one", "size-minus-one", "hole-in-the-middle"]) {
            for segment in [0, 4] {
                eprintln!("{name} in segment {segment}");
                assert_sealed_damage_is_named(backend, segment, 3, |target| target.damage(name, target.middle()));
            }
        }
    });
}

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

#[test]
fn whole_records_that_were_cut_lie_beside_and_are_never_taken_for_the_log() {
    each_backend(|backend| {
        let (data, dir) = demo_damaged("hole-in-the-middle");
        let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
        let copy = report.torn_tail.unwrap().copy.unwrap();
        let saved = fs::read(&copy).unwrap();
        // The two whole ones can be had from it by hand.
        let newest = format::demo(36);
        let whole = |offset: u64| {
            let content = &newest[offset as usize];
            encode(offset, content.timestamp, &content.key, &content.value)
        };
        assert_eq!(saved[45..], [whole(34), whole(35)].concat());
        assert_goes_on(data.path(), backend, &small(), broker, &kept, true);
        let broker = open(data.path(), backend, &small());
        assert_eq!(fs::read(&copy).unwrap(), saved, "it stays");
        assert_eq!(partition_of(&broker).next_offset(), 38);
        // The same tear once more, at the same place: the first copy is not lost.
        broker.close().unwrap();
        damage_again(&dir);
        let (_broker, report, _) = assert_recovers_with_a_second_copy(data.path(), backend);
        let second = report.torn_tail.unwrap().copy.unwrap();
        assert_eq!(fs::read(&copy).unwrap(), saved);
        assert!(second != copy && !fs::read(&second).unwrap().is_empty());
    });
}

/// Zeroes the record that stands where the hole was.
fn damage_again(dir: &Path) {
    let target = Target::newest(dir);
    target.damage("hole-in-the-middle", &target.records[3]);
}

fn assert_recovers_with_a_second_copy(data: &Path, backend: Backend) -> (Broker, PartitionReport, Vec<Row>) {
    let before = check(&partition_dir(data));
    let broker = open(data, backend, &small());
    let report = report_of(&broker);
    assert_eq!(report.next_offset, before.next_offset);
    let rows = read_all(&partition_of(&broker));
    (broker, report, rows)
}
