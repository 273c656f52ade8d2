//! From times to records: exactly what a scan of all would find, whatever the index files say.

use std::fs;
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sapwood::clock::Clock;
use sapwood::io::sim::{OpKind, SimDisk};
use sapwood::io::{Disk, OsDisk};
use sapwood::{Backend, Broker, Checksums, Durability, Partition, ReadMode, Reader, ReaderConfig, TopicConfig, Visibility};

use crate::damage::{self, Target};
use crate::format::{self, Content, Layout, segment_path};
use crate::sim::{self, DATA};
use crate::support::{
    BACKENDS, Rng, Row, TOPIC, TestClock, append, batch, config, create, data_with_demo, each_backend, open, partition_dir, partition_of,
    read_all, rows_of, scratch, seed, segments_of, small,
};

fn readers(partition: &Partition) -> [Reader; 3] {
    [
        partition.reader().unwrap(),
        partition.reader_with(ReaderConfig { mode: ReadMode::Direct, piece_bytes: 4096, ..ReaderConfig::default() }).unwrap(),
        partition.reader_with(ReaderConfig { checksums: Checksums::Unverified, ..ReaderConfig::up_to(Visibility::Appended) }).unwrap(),
    ]
}

/// Times around those of the records, at most so many, and the extremes.
fn times_around(all: &[Row], most: usize) -> Vec<u64> {
    let step = (all.len() / most).max(1);
    let around = all.iter().step_by(step).flat_map(|row| [row.timestamp.saturating_sub(1), row.timestamp, row.timestamp.saturating_add(1)]);
    [0, 1, u64::MAX].into_iter().chain(around).collect()
}

/// The first of these rows at that time or later.
fn scan(rows: &[Row], time: u64, end: u64) -> u64 {
    rows.iter().find(|row| row.timestamp >= time).map_or(end, |row| row.offset)
}

/// `all` are the rows that are whole, in a log that ends at `end`.
#[track_caller]
fn assert_times(partition: &Partition, all: &[Row], end: u64, told: &str) {
    let times = times_around(all, 15);
    for mut reader in readers(partition) {
        for &time in &times {
            assert_eq!(reader.offset_for_time(time).unwrap(), scan(all, time, end), "{time}, {told}");
        }
        for pair in times.chunks(2).chain(times.chunks(7)) {
            let (from, to) = (pair[0], pair[pair.len() - 1]);
            let between = |row: &&Row| from <= row.timestamp && row.timestamp < to;
            if all.len() as u64 == end - partition.first_offset() {
                let rows: Vec<Row> = reader.read_range(from..to).unwrap().map(|record| record.unwrap().into()).collect();
                assert!(rows.iter().eq(all.iter().filter(between)), "{from}..{to}, {told}: {rows:?}");
            }
        }
    }
    let time = times[times.len() / 2];
    assert_eq!(partition.offset_for_time(time).unwrap(), scan(all, time, end), "{time}, {told}");
}

/// Timestamps that never go back, in some pattern.
fn patterns(count: u64) -> Vec<(&'static str, Vec<u64>)> {
    let of = |time: fn(u64) -> u64| (0..count).map(time).collect();
    vec![
        ("even", of(|number| 1000 + number * 10)),
        ("equal", of(|_| 42)),
        ("equal across segments", of(|number| 100 + number / 20)),
        ("uneven", of(|number| number * number * number)),
        ("extremes", of(|number| if number < 30 { 0 } else { u64::MAX })),
    ]
}

/// A data directory with records of those times.
fn data_with_times(data: &Path, times: &[u64], layout: Layout) {
    let contents: Vec<_> =
        (0..).zip(times).map(|(number, &time)| Content::new(b"user-1", format!("value-{number:05}").as_bytes(), time)).collect();
    format::write_partition(&partition_dir(data), &contents, layout);
}

#[test]
fn every_time_is_found_as_a_scan_finds_it() {
    each_backend(|backend| {
        for (index_interval, segment_bytes) in [(1, 1), (1, 270), (2, 270), (7, 2000), (4096, 2000), (1, 1 << 30), (3, 1 << 30)] {
            for (name, times) in patterns(90) {
                let data = scratch();
                data_with_times(data.path(), &times, Layout { segment_bytes, index_interval, base: 7, ..Layout::default() });
                let broker = open(data.path(), backend, &TopicConfig { index_interval: index_interval as u32, ..small() });
                let partition = partition_of(&broker);
                let all = read_all(&partition);
                assert_eq!(all.len(), 90);
                assert_times(&partition, &all, 97, &format!("{name}, {index_interval}, {segment_bytes}"));
                broker.close().unwrap();
            }
        }
    });
}

#[test]
fn times_of_a_long_segment_are_found() {
    each_backend(|backend| {
        for index_interval in [1, 100] {
            for (name, times) in patterns(20_000) {
                let data = scratch();
                data_with_times(data.path(), &times, Layout { index_interval, ..Layout::default() });
                let broker = open(data.path(), backend, &TopicConfig { index_interval: index_interval as u32, ..small() });
                let partition = partition_of(&broker);
                let all = read_all(&partition);
                let mut reader = partition.reader().unwrap();
                for time in times_around(&all, 300) {
                    let expected = all.get(all.partition_point(|row| row.timestamp < time)).map_or(20_000, |row| row.offset);
                    assert_eq!(reader.offset_for_time(time).unwrap(), expected, "{time}, {name}");
                }
            }
        }
    });
}

#[test]
fn a_partition_without_records_has_no_time_but_its_end() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &segments_of(270));
        assert_times(&partition, &[], 0, "empty");
        assert_eq!(partition.reader().unwrap().read_range(..).unwrap().count(), 0);
        append(&partition, b"", b"one");
        assert_times(&partition, &read_all(&partition), 1, "one record");
        let readers = readers(&partition);
        broker.close().unwrap();
        for mut reader in readers {
            assert!(reader.offset_for_time(0).unwrap_err().is_closed());
        }
    });
}

#[test]
fn times_that_a_clock_told_are_found_as_they_come() {
    // B091 to B093: a clock that jumps back, one that falls far, and one that stands, over several rolls.
    for walls in [&[100, 200, 150, 300][..], &[1000, 10], &[7]] {
        for simulated in [false, true] {
            let data = scratch();
            let clock = Arc::new(TestClock::at(0));
            let disk: Arc<dyn Disk> = if simulated { Arc::new(SimDisk::new(1)) } else { Arc::new(OsDisk::new(Backend::Auto).unwrap()) };
            let dir = if simulated { Path::new(DATA) } else { data.path() };
            let as_clock: Arc<dyn Clock> = clock.clone();
            let broker = Broker::open_on(disk, as_clock, dir, config(Backend::Auto, small())).unwrap();
            let partition = broker.create_topic(TOPIC, segments_of(270)).unwrap().partition(0).unwrap();
            for number in 0..40 {
                clock.set(walls[number * walls.len() / 40]);
                append(&partition, b"user-1", b"value-00000");
                if number % 7 == 0 {
                    let all = read_all(&partition);
                    assert_times(&partition, &all, all.len() as u64, &format!("{walls:?}"));
                }
            }
            assert!(partition.stats().rolls > 3);
            assert_eq!(partition.offset_for_time(walls[0]).unwrap(), 0);
            broker.close().unwrap();
        }
    }
}

#[test]
fn a_time_that_goes_back_in_a_foreign_log_harms_no_other() {
    each_backend(|backend| {
        let (data, dir) = crate::support::data_with("demo-36-segment-270");
        damage::apply(&dir, "clock-backwards");
        let broker = open(data.path(), backend, &small());
        let partition = partition_of(&broker);
        let all = read_all(&partition);
        for mut reader in readers(&partition) {
            for time in times_around(&all, 40) {
                let offset = reader.offset_for_time(time).unwrap();
                assert!(offset == 37 || all[offset as usize].timestamp >= time, "{offset} at {time}");
            }
        }
    });
}

/// Damages of the time index of one segment, and of both of its indexes.
fn harm_times(name: &str, dir: &Path, base: u64) {
    let path = segment_path(dir, base, "timeindex");
    let mut bytes = fs::read(&path).unwrap();
    match name {
        "missing" => return fs::remove_file(path).unwrap(),
        "both missing" => {
            fs::remove_file(segment_path(dir, base, "index")).unwrap();
            return fs::remove_file(path).unwrap();
        }
        "empty" => bytes.clear(),
        "half" => bytes.truncate(bytes.len() / 2 + 3),
        "zeros" => bytes.fill(0),
        "ones" => bytes.fill(0xff),
        "noise" => bytes = damage::noise(bytes.len()),
        "reversed" => bytes = bytes.chunks(16).rev().flatten().copied().collect(),
        "too late" | "too early" => {
            for entry in bytes.chunks_exact_mut(16) {
                let time = u64::from_be_bytes(entry[8..].try_into().unwrap());
                let time = if name == "too late" { time.saturating_add(200) } else { time.saturating_sub(200) };
                entry[8..].copy_from_slice(&time.to_be_bytes());
            }
        }
        "later offsets" => {
            for entry in bytes.chunks_exact_mut(16) {
                let offset = u64::from_be_bytes(entry[..8].try_into().unwrap());
                entry[..8].copy_from_slice(&(offset + 3).to_be_bytes());
            }
        }
        _ => panic!("no damage is called {name}"),
    }
    fs::write(path, bytes).unwrap();
}

const DAMAGES: [&str; 11] =
    ["missing", "both missing", "empty", "half", "zeros", "ones", "noise", "reversed", "too late", "too early", "later offsets"];

#[test]
fn time_indexes_that_lie_change_no_answer() {
    each_backend(|backend| {
        for (index_interval, segment_bytes) in [(1, 450), (3, 450), (1, 1 << 30)] {
            for (name, times) in patterns(90).into_iter().filter(|(name, _)| !name.contains("equal ")) {
                for damage in DAMAGES {
                    let data = scratch();
                    data_with_times(data.path(), &times, Layout { segment_bytes, index_interval, ..Layout::default() });
                    let broker = open(data.path(), backend, &TopicConfig { index_interval: index_interval as u32, ..small() });
                    let partition = partition_of(&broker);
                    let dir = partition_dir(data.path());
                    damage::bases(&dir).into_iter().for_each(|base| harm_times(damage, &dir, base));
                    let all = read_all(&partition);
                    assert_times(&partition, &all, 90, &format!("{name}, {damage}, {index_interval}, {segment_bytes}"));
                }
            }
        }
    });
}

#[test]
fn damaged_records_have_no_time() {
    let seed = seed();
    for run in 0..60 {
        let seed = seed.wrapping_add(run);
        let mut rng = Rng::new(seed);
        let (name, times) = rng.one_of(&patterns(90));
        let (index_interval, segment_bytes) = rng.one_of(&[(1, 450), (3, 450), (1, 1 << 30), (1000, 450)]);
        let data = scratch();
        data_with_times(data.path(), &times, Layout { segment_bytes, index_interval, ..Layout::default() });
        let topic = TopicConfig { index_interval: index_interval as u32, ..small() };
        let broker = open(data.path(), rng.one_of(&BACKENDS), &topic);
        let partition = partition_of(&broker);
        let all = read_all(&partition);
        let dir = partition_dir(data.path());
        let mut damaged = Vec::new();
        // Flipped in the body, so that it is known which are whole; of the whole segments the first ones, too.
        for segment in 0..damage::bases(&dir).len() {
            let target = Target::number(&dir, segment);
            let mut bytes = target.bytes.clone();
            let every = rng.one_of(&[1, 2, 5, 10]);
            for record in &target.records {
                if rng.below(every) == 0 {
                    bytes[record.end() as usize - 1 - rng.below(10) as usize] ^= 1;
                    damaged.push(record.offset);
                }
            }
            fs::write(&target.log, bytes).unwrap();
        }
        let whole: Vec<Row> = all.into_iter().filter(|row| !damaged.contains(&row.offset)).collect();
        assert_times(&partition, &whole, 90, &format!("seed {seed}, {name}, {damaged:?}"));
    }
}

#[test]
fn ranges_begin_and_end_where_they_say() {
    let (data, dir) = data_with_demo(36, Layout { segment_bytes: 270, ..Layout::default() });
    let broker = open(data.path(), Backend::Auto, &small());
    let partition = partition_of(&broker);
    let all = rows_of(&format::demo(36), 0);
    let time = |offset: usize| all[offset].timestamp;
    let mut reader = partition.reader().unwrap();
    assert_eq!(reader.read_range(..).unwrap().offsets(), 0..36);
    assert_eq!(reader.read_range(time(5)..).unwrap().offsets(), 5..36);
    assert_eq!(reader.read_range(..time(5)).unwrap().offsets(), 0..5);
    assert_eq!(reader.read_range(time(5)..time(7)).unwrap().offsets(), 5..7);
    assert_eq!(reader.read_range(time(5)..=time(7)).unwrap().offsets(), 5..8);
    assert_eq!(reader.read_range((Bound::Excluded(time(5)), Bound::Unbounded)).unwrap().offsets(), 6..36);
    assert_eq!(reader.read_range((Bound::Excluded(u64::MAX), Bound::Unbounded)).unwrap().offsets(), 36..36);
    assert_eq!(reader.read_range(0..=u64::MAX).unwrap().offsets(), 0..36);
    #[allow(clippy::reversed_empty_ranges, reason = "asked for by mistake, it is an empty one")]
    let reversed = time(7)..time(5);
    assert_eq!(reader.read_range(reversed).unwrap().count(), 0);

    // In batches and one by one, in any order.
    for max_bytes in [1, 100, 1 << 20] {
        let mut range = reader.read_range(time(4)..time(20)).unwrap();
        let mut offset = 4;
        while !range.offsets().is_empty() {
            assert_eq!(range.offsets(), offset..20);
            if offset % 3 == 0 {
                assert_eq!(Row::from(range.next().unwrap().unwrap()), all[offset as usize]);
                offset += 1;
            } else {
                let rows: Vec<Row> = range.next_batch(max_bytes).unwrap().unwrap().iter().map(Row::from).collect();
                assert!(!rows.is_empty());
                assert_eq!(rows, all[offset as usize..offset as usize + rows.len()]);
                offset += rows.len() as u64;
            }
        }
        assert_eq!(offset, 20);
        assert!(range.next_batch(max_bytes).unwrap().is_none());
        assert!(range.next().is_none() && range.next().is_none());
    }

    // Past a damage by name alone.
    Target::number(&dir, 1).damage("flip-value-byte", &Target::number(&dir, 1).records[2]);
    let mut range = reader.read_range(time(7)..time(10)).unwrap();
    assert_eq!(range.next().unwrap().unwrap().offset, 7);
    assert!(range.next().unwrap().unwrap_err().is_damage());
    assert!(range.next().is_none());
    assert_eq!(range.skip_damaged().unwrap().records, 8..9);
    assert_eq!(range.next().unwrap().unwrap().offset, 9);
    assert!(range.next().is_none());
}

#[test]
fn a_look_up_opens_few_of_many_segments() {
    let times: Vec<u64> = (0..1000).map(|number| 5 + number * 10).collect();
    let from = scratch();
    data_with_times(from.path(), &times, Layout { segment_bytes: 1, ..Layout::default() });
    let sim = SimDisk::new(1);
    sim.import(&partition_dir(from.path()), &sim::dir()).unwrap();
    let broker = sim::open(&sim);
    let partition = partition_of(&broker);
    let mut reader = partition.reader().unwrap();
    let mut opened = |time| {
        sim.clear_ops();
        assert_eq!(reader.offset_for_time(time).unwrap(), scan(&read_rows(&times), time, 1000));
        sim.ops()
            .iter()
            .filter(|op| op.kind == OpKind::Open)
            .map(|op| op.path.file_stem().unwrap().to_owned())
            .collect::<std::collections::BTreeSet<_>>()
            .len()
    };
    // Ten to find the segment, and its neighbour.
    let first = opened(3333);
    assert!((1..=12).contains(&first), "{first} segments were opened");
    let again = opened(3334);
    assert!(again <= 2, "{again} segments were opened again");
    let next = opened(3343);
    assert!(next <= 4, "{next} segments were opened for the next record's time");
}

/// Rows of those times, and nothing else of them.
fn read_rows(times: &[u64]) -> Vec<Row> {
    (0..).zip(times).map(|(offset, &timestamp)| Row { offset, timestamp, key: vec![], value: vec![] }).collect()
}

#[test]
fn what_is_not_durable_yet_has_a_time_for_those_alone_who_see_it() {
    each_backend(|backend| {
        let data = scratch();
        let durability = Durability::Interval { bytes: 1 << 40, time: Duration::from_secs(3600) };
        let (_broker, partition) = create(data.path(), backend, &TopicConfig { durability, ..segments_of(270) });
        let mut early = partition.reader_with(ReaderConfig::up_to(Visibility::Appended)).unwrap();
        let mut late = partition.reader().unwrap();
        for number in 1..=30 {
            append(&partition, b"user-1", b"value-00000");
            assert_eq!(early.offset_for_time(u64::MAX).unwrap(), number);
            assert_eq!(early.offset_for_time(0).unwrap(), 0);
            // A roll makes durable what was before it.
            let end = partition.durable_end();
            assert!(end < number, "the last record is not durable");
            for time in [0, 1, u64::MAX] {
                assert_eq!(late.offset_for_time(time).unwrap(), if time == u64::MAX { end } else { 0 });
            }
        }
        partition.sync().unwrap();
        assert_eq!(late.offset_for_time(u64::MAX).unwrap(), 30);
    });
}

#[test]
fn times_are_found_beside_appends_and_rolls() {
    let seed = seed();
    each_backend(|backend| {
        let data = scratch();
        let (_broker, partition) = create(data.path(), backend, &TopicConfig { index_interval: 3, ..segments_of(5000) });
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for number in 0..2 {
                let (partition, over, mut rng) = (&partition, &over, Rng::new(seed ^ number));
                scope.spawn(move || {
                    let mut reader = partition.reader().unwrap();
                    while !over.load(Ordering::Acquire) {
                        let end = partition.durable_end();
                        if end == 0 {
                            std::thread::yield_now();
                            continue;
                        }
                        let time = partition.read_one(rng.below(end)).unwrap().timestamp + rng.below(3) - 1;
                        let found = reader.offset_for_time(time).unwrap();
                        assert!(found == 0 || partition.read_one(found - 1).unwrap().timestamp < time, "{found} is too late");
                        assert!(found >= end || partition.read_one(found).unwrap().timestamp >= time, "{found} is too early");
                    }
                });
            }
            for _ in 0..400 {
                partition.append_and_wait(batch(&[("key", "value"), ("", "another")])).unwrap();
            }
            over.store(true, Ordering::Release);
        });
        assert!(partition.stats().rolls > 3);
    });
}
