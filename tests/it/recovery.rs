//! Opening after crashes: torn tails and preallocated space. Case numbers are those of the project's list of failures met by others.
//!
//! The ground is `demo-36-segment-270`: 6 segments of 6 records of 45 bytes, no checkpoint, so what is bad in the newest one is a torn tail.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use sapwood::io::OsDisk;
use sapwood::{Backend, Broker, Error, Flaw, PartitionReport, TopicConfig};
use tempfile::TempDir;

use crate::child::append_and_kill;
use crate::damage::{self, Target};
use crate::format::{self, BASE_TIME, Content, HEADER, Layout, bytes_to_zero_crc, encode, segment_path};
use crate::oracle::{assert_closed, assert_sound, assert_sound_while_open, check, data_end};
use crate::support::{
    Row, TestClock, append, assert_in_order, batch, bytes_in, config, contents, create, data_with, data_with_demo, each_backend, open,
    partition_dir, partition_of, read_all, report_of, rows, rows_of, scratch, segments_of, small, snapshot,
};

pub const DEMO: &str = "demo-36-segment-270";

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

pub fn demo_damaged(name: &str) -> (TempDir, std::path::PathBuf) {
    let (data, dir) = data_with(DEMO);
    damage::apply(&dir, name);
    (data, dir)
}

/// Opens, and holds the engine to what the oracle says must be kept: those records, the tail cut and told of, zeros behind it.
/// Gives the broker back, the report and the rows.
pub fn assert_recovers(data: &Path, backend: Backend, settings: &TopicConfig) -> (Broker, PartitionReport, Vec<Row>) {
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
pub fn assert_goes_on(data: &Path, backend: Backend, settings: &TopicConfig, broker: Broker, kept: &[Row], close: bool) {
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

#[test]
fn whole_records_behind_inserted_bytes_are_copied_aside() {
    each_backend(|backend| {
        // Bytes that belong nowhere, then the expected record and those behind it, all whole.
        for (record, junk) in [(3, 7), (5, 1), (0, 45), (0, 5000)] {
            let (data, dir) = data_with(DEMO);
            let target = Target::newest(&dir);
            let at = target.records[record].position as usize;
            fs::write(&target.log, [&target.bytes[..at], &damage::noise(junk), &target.bytes[at..]].concat()).unwrap();
            let (broker, report, kept) = assert_recovers(data.path(), backend, &small());
            assert_eq!(kept.len(), 30 + record);
            let tail = report.torn_tail.unwrap();
            assert_eq!(tail.records, 6 - record as u64, "{tail:?}");
            assert_goes_on(data.path(), backend, &small(), broker, &kept, record == 0);
        }
    });
}

/// Zeroes the record that stands where the hole was, and takes away what tells that it was acknowledged.
fn damage_again(dir: &Path) {
    fs::remove_file(dir.join("checkpoint")).unwrap();
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

#[test]
fn a_refusal_for_what_is_found_last_leaves_what_could_have_been_mended_as_it_was() {
    for refused in [true, false] {
        let (data, dir) = data_with(DEMO);
        fs::write(segment_path(&dir, 0, "index"), b"").unwrap();
        fs::remove_file(segment_path(&dir, 0, "timeindex")).unwrap();
        fs::remove_file(segment_path(&dir, 6, "index")).unwrap();
        fs::File::options().write(true).open(segment_path(&dir, 6, "log")).unwrap().set_len(8192).unwrap();
        fs::write(dir.join("prepared.log"), [0; 64]).unwrap();
        let in_the_way = segment_path(&dir, 14, "log");
        if refused {
            // Begins within the one before it: neither may answer for what both have.
            fs::copy(segment_path(&dir, 12, "timeindex"), &in_the_way).unwrap();
        }
        let before = snapshot(&dir);
        match Broker::open(data.path(), config(Backend::Posix, small())) {
            Err(error) => {
                assert!(matches!(error, Error::Damaged { ref path, .. } if *path == in_the_way), "{error}");
                assert!(refused && snapshot(&dir) == before, "refused, and changed");
            }
            Ok(broker) => {
                assert!(!refused);
                assert_eq!(report_of(&broker).rebuilt.len(), 3, "otherwise they are mended");
                assert_eq!(read_all(&partition_of(&broker)).len(), 36);
                broker.close().unwrap();
            }
        }
    }
}

#[test]
fn more_lost_index_entries_than_are_held_at_a_time_are_made_anew() {
    const RECORDS: u64 = (1 << 20) + 50_000;
    let data = scratch();
    let settings = TopicConfig { index_interval: 1, segment_bytes: 8 << 20, ..small() };
    let (broker, partition) = create(data.path(), Backend::Posix, &settings);
    let records = vec![(b"", b""); 25_000];
    for _ in 0..RECORDS.div_ceil(25_000) {
        partition.append(batch(&records)).unwrap().wait().unwrap();
    }
    drop(partition);
    broker.close().unwrap();
    let dir = partition_dir(data.path());
    let indexes = || bytes_in(&dir).into_iter().filter(|(path, _)| path.to_string_lossy().ends_with("index")).collect::<Vec<_>>();
    let before = indexes();
    assert!(before.len() > 6, "of more than three segments");
    for (path, _) in &before {
        fs::remove_file(path).unwrap();
    }
    let broker = open(data.path(), Backend::Posix, &settings);
    let report = report_of(&broker);
    let logs = bytes_in(&dir)
        .iter()
        .filter(|(path, _)| path.to_string_lossy().ends_with(".log"))
        .map(|(_, bytes)| bytes.as_ref().unwrap().len())
        .sum::<usize>();
    assert!(report.scanned_bytes as usize > logs && report.damage.is_empty(), "the last ones from a second reading");
    assert!(indexes() == before);
    broker.close().unwrap();
}
