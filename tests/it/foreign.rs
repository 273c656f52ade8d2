//! Partitions that another program wrote: the engine reads them, goes on from their end, and leaves them as it would its own.

use std::fs;

use sapwood::{Backend, TopicConfig, Visibility};

use crate::format::{self, Content, Layout};
use crate::oracle::{assert_closed, assert_sound, assert_sound_while_open, check};
use crate::support::{
    Row, append, assert_in_order, bytes_in, contents, copy_dir, data_with_demo, each_backend, fixture, open, partition_dir, partition_of,
    read_all, read_up_to, report_of, rows, scratch, small,
};

struct Golden {
    name: &'static str,
    records: u64,
    segment_bytes: u64,
    index_interval: u32,
    base: u64,
    prealloc: usize,
}

const GIB: u64 = 1 << 30;
const TRILLION: u64 = 1_000_000_000_000;

#[rustfmt::skip]
const GOLDEN: [Golden; 8] = [
    Golden { name: "demo-36-segment-270", records: 36, segment_bytes: 270, index_interval: 1, base: 0, prealloc: 0 },
    Golden { name: "interval-7-segment-270-base-1e12-prealloc", records: 24, segment_bytes: 270, index_interval: 7, base: TRILLION, prealloc: 8192 },
    Golden { name: "interval-4096-segment-270", records: 18, segment_bytes: 270, index_interval: 4096, base: 0, prealloc: 0 },
    Golden { name: "interval-1-prealloc", records: 5, segment_bytes: GIB, index_interval: 1, base: 0, prealloc: 65536 },
    Golden { name: "interval-7-base-1e12", records: 60, segment_bytes: GIB, index_interval: 7, base: TRILLION, prealloc: 0 },
    Golden { name: "interval-4096-prealloc", records: 9000, segment_bytes: GIB, index_interval: 4096, base: 0, prealloc: 409_600 },
    Golden { name: "segment-1", records: 5, segment_bytes: 1, index_interval: 1, base: 0, prealloc: 0 },
    Golden { name: "no-records", records: 0, segment_bytes: GIB, index_interval: 1, base: 0, prealloc: 0 },
];

/// The settings with which these were written.
fn settings(segment_bytes: u64, index_interval: u32) -> TopicConfig {
    TopicConfig { segment_bytes, index_interval, ..small() }
}

/// The records of the fixture `edge-segment-270`.
fn edge() -> Vec<Content> {
    let text = fs::read_to_string(fixture("edge.jsonl")).unwrap();
    let bytes = |line: &serde_json::Value, name: &str| match line[format!("{name}_hex")].as_str() {
        Some(hex) => (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect(),
        None => line[name].as_str().unwrap().as_bytes().to_vec(),
    };
    text.lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|line| Content { key: bytes(&line, "key"), value: bytes(&line, "value"), timestamp: line["ts"].as_u64().unwrap() })
        .collect()
}

#[test]
fn the_tests_own_writer_makes_the_golden_bytes() {
    let bytes = |dir: &std::path::Path| -> Vec<_> {
        bytes_in(dir).into_iter().filter_map(|(path, bytes)| Some((path.file_name().unwrap().to_owned(), bytes?))).collect()
    };
    for golden in &GOLDEN {
        let data = scratch();
        let Golden { name, segment_bytes, base, prealloc, .. } = *golden;
        let layout = Layout { segment_bytes, index_interval: golden.index_interval.into(), base, prealloc };
        let places = format::write_partition(data.path(), &format::demo(golden.records), layout);
        assert!(bytes(data.path()) == bytes(&fixture(name)), "{name}");
        let found = assert_sound(data.path()).records;
        assert_eq!(places, found.iter().map(|found| (found.offset, found.base, found.position)).collect::<Vec<_>>());
    }
    let data = scratch();
    format::write_partition(data.path(), &edge(), Layout { segment_bytes: 270, ..Layout::default() });
    assert!(bytes(data.path()) == bytes(&fixture("edge-segment-270")));
    let data = scratch();
    let worked = [("user-1", "hello", 0), ("user-2", "world", 1), ("user-1", "foo", 2)];
    let worked = worked.map(|(key, value, time)| Content::new(key.as_bytes(), value.as_bytes(), format::BASE_TIME + time));
    let places = format::write_partition(data.path(), &worked, Layout::default());
    assert!(bytes(data.path()) == bytes(&fixture("worked")));
    assert_eq!(places, [(0, 0, 0), (1, 0, 39), (2, 0, 78)]);
}

/// Opens such a partition, reads it, appends on, and checks it by the oracle while open, after a close and after a drop.
fn assert_taken_over(original: &std::path::Path, backend: Backend, settings: &TopicConfig) {
    let expected = check(original);
    let old = rows(&expected.records);
    let (first, next) = (expected.first_offset, expected.next_offset);
    let data = scratch();
    let dir = partition_dir(data.path());
    copy_dir(original, &dir);

    let broker = open(data.path(), backend, settings);
    let report = report_of(&broker);
    assert_eq!((report.first_offset, report.next_offset, report.segments), (first, next, expected.segments.len()), "{report:?}");
    assert_eq!(report.path, dir);
    assert!(report.torn_tail.is_none() && report.damage.is_empty() && report.ignored.is_empty(), "{report:?}");
    assert!(broker.report().ignored.is_empty() && broker.report().removed.is_empty());
    let partition = partition_of(&broker);
    assert_eq!((partition.first_offset(), partition.next_offset(), partition.durable_end()), (first, next, next));
    assert!(read_all(&partition) == old);
    let mut reader = partition.reader().unwrap();
    for (offset, row) in (first..next).zip(&old).step_by(if old.len() > 200 { 97 } else { 1 }) {
        assert_eq!(Row::from(partition.read_one(offset).unwrap()), *row);
        assert_eq!(Row::from(reader.read(offset, 1).unwrap().iter().next().unwrap()), *row);
    }
    for (number, key, value) in
        [(0, "user-1", "value-00000"), (1, "", ""), (2, "k", ""), (3, "", "v"), (4, "key", "and a longer value than any before it")]
    {
        assert_eq!(append(&partition, key.as_bytes(), value.as_bytes()), next + number);
    }
    let all = read_all(&partition);
    assert!(all[..old.len()] == old);
    assert_in_order(&all, first);
    assert_sound_while_open(&dir);
    drop((reader, partition));
    broker.close().unwrap();
    let closed = assert_closed(&dir, settings.index_interval.into());
    assert!(rows(&closed.records) == all);
    let sizes = closed.records.iter().map(crate::oracle::Found::bytes);
    assert_eq!(
        closed.segments.iter().map(|segment| segment.base).collect::<Vec<_>>(),
        format::segment_bases(sizes, settings.segment_bytes, first),
        "the roll goes on as it was"
    );

    // Opening what was closed cleanly changes nothing, at all.
    let before = bytes_in(&dir);
    let broker = open(data.path(), backend, settings);
    let report = report_of(&broker);
    assert!(report.torn_tail.is_none() && report.damage.is_empty() && report.rebuilt.is_empty(), "{report:?}");
    assert!(read_all(&partition_of(&broker)) == all);
    broker.close().unwrap();
    assert!(bytes_in(&dir) == before);

    let broker = open(data.path(), backend, settings);
    append(&partition_of(&broker), b"left", b"without a close");
    drop(broker);
    assert!(rows(&assert_sound(&dir).records)[..all.len()] == all);
    let broker = open(data.path(), backend, settings);
    assert_eq!(read_up_to(&partition_of(&broker), Visibility::Durable, next, 1 << 16).len(), 6);
    broker.close().unwrap();
    assert_closed(&dir, settings.index_interval.into());
}

#[test]
fn golden_partitions_are_taken_over() {
    each_backend(|backend| {
        for golden in &GOLDEN {
            eprintln!("{}", golden.name);
            assert_taken_over(&fixture(golden.name), backend, &settings(golden.segment_bytes, golden.index_interval));
        }
        assert_taken_over(&fixture("worked"), backend, &small());
        assert_taken_over(&fixture("edge-segment-270"), backend, &settings(270, 1));
    });
}

#[test]
fn every_layout_is_taken_over() {
    each_backend(|backend| {
        for segment_bytes in [1, 270, GIB] {
            for index_interval in [1, 7, 4096] {
                for base in [0, TRILLION] {
                    for prealloc in [0, 65536] {
                        let data = scratch();
                        let layout = Layout { segment_bytes, index_interval, base, prealloc };
                        format::write_partition(data.path(), &format::demo(if segment_bytes == 1 { 4 } else { 20 }), layout);
                        eprintln!("{layout:?}");
                        assert_taken_over(data.path(), backend, &settings(segment_bytes, u32::try_from(index_interval).unwrap()));
                    }
                }
            }
        }
    });
}

#[test]
fn settings_may_differ_from_those_it_was_written_with() {
    each_backend(|backend| {
        for (segment_bytes, interval) in [(270, 7), (GIB, 1), (1, 3), (100_000, 4096)] {
            let (data, dir) = data_with_demo(36, Layout { segment_bytes: 270, index_interval: 2, ..Layout::default() });
            for round in 0..3 {
                let broker = open(data.path(), backend, &settings(segment_bytes, interval));
                let partition = partition_of(&broker);
                assert_eq!(read_all(&partition)[..36], rows(&check(&fixture("demo-36-segment-270")).records));
                for number in 0..10 {
                    assert_eq!(append(&partition, b"user-1", b"value-00000"), 36 + round * 10 + number);
                }
                drop(partition);
                if round == 1 {
                    drop(broker)
                } else {
                    broker.close().unwrap()
                }
                // Entries of two intervals may meet in one index; every one of them must be right.
                assert_sound(&dir);
            }
            let broker = open(data.path(), backend, &settings(segment_bytes, interval));
            let rows = read_all(&partition_of(&broker));
            assert_eq!(rows.len(), 66);
            assert!(contents(&rows)[36..].iter().all(|content| *content == (b"user-1".to_vec(), b"value-00000".to_vec())));
        }
    });
}

#[test]
fn a_partition_without_records_goes_on_and_a_directory_without_a_segment_is_none() {
    each_backend(|backend| {
        let data = scratch();
        let dir = partition_dir(data.path());
        fs::create_dir_all(&dir).unwrap();
        let broker = open(data.path(), backend, &small());
        assert!(broker.topics().is_empty() && broker.report().ignored.len() == 1, "{:?}", broker.report());
        broker.close().unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "nothing is made in what is not ours");
        fs::write(dir.join("00000000000000000000.log"), b"").unwrap();
        let broker = open(data.path(), backend, &small());
        assert_eq!(append(&partition_of(&broker), b"k", b"v"), 0);
        broker.close().unwrap();
        assert_eq!(assert_closed(&dir, 1).next_offset, 1);
    });
}
