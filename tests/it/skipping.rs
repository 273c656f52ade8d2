//! Going on behind damage: at the next whole record, never at anything else, with what was passed over told to the byte.

use std::fs;
use std::path::Path;

use sapwood::{Backend, Partition, ReadMode, Reader, ReaderConfig, Skipped, TopicConfig};

use crate::damage::{self, Target};
use crate::format::{self, BASE_TIME, Content, Layout, encode};
use crate::reader_modes::RECORDS;
use crate::support::{
    BACKENDS, Rng, Row, data_with, data_with_demo, each_backend, open, partition_dir, partition_of, rows_of, scratch, seed, small,
};

/// Ways to read that differ in how they get at the bytes.
fn readers(partition: &Partition) -> [Reader; 3] {
    let way = |mode, piece_bytes| partition.reader_with(ReaderConfig { mode, piece_bytes, ..ReaderConfig::default() }).unwrap();
    [way(ReadMode::Buffered, 1), way(ReadMode::Buffered, 1 << 20), way(ReadMode::Direct, 4096)]
}

/// Reads from `start` to the end, past all damage.
#[track_caller]
fn read_past_damage(reader: &mut Reader, start: u64, max_bytes: usize) -> (Vec<Row>, Vec<Skipped>) {
    let (mut rows, mut passed, mut next) = (Vec::new(), Vec::new(), start);
    loop {
        match reader.read(next, max_bytes) {
            Ok(records) if records.is_empty() => return (rows, passed),
            Ok(records) => {
                rows.extend(records.iter().map(Row::from));
                next = records.next_offset();
            }
            Err(error) if error.is_damage() => {
                let skipped = reader.skip_damaged(next).unwrap();
                assert!(skipped.records.start == next && skipped.records.end > next, "{error}, then {skipped:?}");
                next = skipped.records.end;
                passed.push(skipped);
            }
            Err(error) => panic!("at {next}: {error}"),
        }
    }
}

/// Damages that leave the size in the header as it was.
const SIZE_STAYS: [&str; 7] =
    ["flip-value-byte", "flip-key-byte", "flip-timestamp", "flip-crc", "flip-offset", "keylen-gt-size", "keylen-max"];

/// Damages the record in the middle of the third segment, and takes that one's index away.
fn damage_one(dir: &Path, name: &str, index_too: bool) -> Target {
    let target = Target::number(dir, 2);
    target.damage(name, target.middle());
    if index_too {
        damage::apply_to(dir, "missing-index", 2);
    }
    target
}

#[test]
fn a_damaged_record_alone_is_passed_over() {
    each_backend(|backend| {
        for (name, _) in RECORDS {
            // Which index there is, and whether its entries lead to the record behind.
            for (index_interval, missing, leads) in [(1, false, true), (2, false, true), (3, false, false), (1, true, false)] {
                let (data, dir) = data_with_demo(36, Layout { segment_bytes: 270, index_interval, ..Layout::default() });
                let broker = open(data.path(), backend, &TopicConfig { index_interval: index_interval as u32, ..small() });
                let (partition, all) = (partition_of(&broker), rows_of(&format::demo(36), 0));
                damage_one(&dir, name, missing);
                // Records 12 to 17 lie there, 15 is damaged.
                let last = if leads || SIZE_STAYS.contains(&name) { 15 } else { 17 };
                let expected = Skipped { records: 15..last + 1, bytes: 45 * (last - 14) };
                for mut reader in readers(&partition) {
                    let told = format!("{name}, index interval {index_interval}, missing: {missing}");
                    for start in 0..=15 {
                        let (rows, skipped) = read_past_damage(&mut reader, start, 100);
                        assert_eq!(skipped, std::slice::from_ref(&expected), "{told}");
                        let whole = all[start as usize..15].iter().chain(&all[last as usize + 1..]);
                        assert!(rows.iter().eq(whole), "{told}: {rows:?}");
                    }
                    // Where it is whole, nothing is passed over, and what is asked for next comes.
                    for offset in (0..15).chain(last + 1..36) {
                        assert_eq!(reader.skip_damaged(offset).unwrap(), Skipped { records: offset..offset, bytes: 0 }, "{told}");
                        assert_eq!(Row::from(reader.read_one(offset).unwrap()), all[offset as usize], "{told}");
                    }
                    assert_eq!(reader.skip_damaged(36).unwrap(), Skipped { records: 36..36, bytes: 0 });
                    assert!(reader.skip_damaged(37).unwrap_err().is_out_of_range());
                }
            }
        }
    });
}

/// Where one record is damaged, the others are found by their numbers, however far the index has its entries apart.
#[test]
fn records_on_both_sides_of_a_damaged_one_are_read_by_their_offsets() {
    each_backend(|backend| {
        for (name, _) in RECORDS.into_iter().filter(|(name, _)| SIZE_STAYS.contains(name)) {
            for (index_interval, missing) in [(1, false), (2, false), (3, false), (4096, false), (1, true)] {
                let (data, dir) = data_with_demo(36, Layout { segment_bytes: 270, index_interval, ..Layout::default() });
                let broker = open(data.path(), backend, &TopicConfig { index_interval: index_interval as u32, ..small() });
                let (partition, all) = (partition_of(&broker), rows_of(&format::demo(36), 0));
                let target = damage_one(&dir, name, missing);
                for mut reader in readers(&partition) {
                    for row in all.iter().rev() {
                        let told = format!("{name} at {}, {} of interval {index_interval}", target.middle().offset, row.offset);
                        let passed = reader.skip_damaged(row.offset).unwrap().records;
                        assert_eq!(passed.is_empty(), row.offset != target.middle().offset, "{told}: {passed:?}");
                        let alone = partition.read_one(row.offset).map(Row::from);
                        let read = reader.read_one(row.offset).map(Row::from);
                        for read in [alone, read] {
                            match read {
                                Ok(read) => assert!(row.offset != target.middle().offset && read == *row, "{told}: {read:?}"),
                                Err(error) => assert!(row.offset == target.middle().offset && error.is_damage(), "{told}: {error}"),
                            }
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn missing_segments_are_passed_over() {
    each_backend(|backend| {
        for (name, bytes) in [("missing-middle-segment", 0), ("empty-log-in-the-middle", 0)] {
            let (data, dir) = data_with("demo-36-segment-270");
            damage::apply(&dir, name);
            let broker = open(data.path(), backend, &small());
            let partition = partition_of(&broker);
            let all = rows_of(&format::demo(36), 0);
            for mut reader in readers(&partition) {
                let (rows, skipped) = read_past_damage(&mut reader, 0, 100);
                assert_eq!(skipped, [Skipped { records: 6..12, bytes }], "{name}");
                assert!(rows.iter().eq(all[..6].iter().chain(&all[12..])), "{name}: {rows:?}");
                assert_eq!(reader.skip_damaged(9).unwrap(), Skipped { records: 9..12, bytes }, "{name}");
            }
        }
    });
}

#[test]
fn what_is_damaged_to_the_end_is_passed_over_to_the_end() {
    each_backend(|backend| {
        for zeros in [false, true] {
            let (data, dir) = data_with("demo-36-segment-270");
            let broker = open(data.path(), backend, &small());
            let partition = partition_of(&broker);
            // Of the third segment the last two records, and the two last ones as a whole.
            for (segment, from) in [(2, 4 * 45), (4, 0), (5, 0)] {
                let target = Target::number(&dir, segment);
                let mut bytes = target.bytes.clone();
                let noise = damage::noise(bytes.len());
                for at in from..bytes.len() {
                    bytes[at] = if zeros { 0 } else { noise[at] };
                }
                fs::write(&target.log, bytes).unwrap();
            }
            let all = rows_of(&format::demo(36), 0);
            for mut reader in readers(&partition) {
                let (rows, skipped) = read_past_damage(&mut reader, 0, 1000);
                assert_eq!(skipped, [Skipped { records: 16..18, bytes: 90 }, Skipped { records: 24..36, bytes: 540 }]);
                assert!(rows.iter().eq(all[..16].iter().chain(&all[18..24])));
            }
            // So does a tail, which waits there for what comes.
            let mut tail = partition.tail(15).unwrap();
            assert_eq!(tail.next_record(None).unwrap().unwrap().offset, 15);
            assert!(tail.next_record(None).unwrap_err().is_damage());
            assert_eq!(tail.skip_damaged().unwrap().records, 16..18);
            tail.seek(24).unwrap();
            assert_eq!((tail.skip_damaged().unwrap().records, tail.position()), (24..36, 36));
            assert_eq!(crate::support::append(&partition, b"", b"more"), 36);
            assert_eq!(tail.next_record(None).unwrap().unwrap().offset, 36);
        }
    });
}

/// Contents of which some hold whole encoded records, numbered as those behind them.
fn treacherous(rng: &mut Rng, count: u64) -> Vec<Content> {
    (0..count)
        .map(|offset| {
            let mut value = rng.bytes(rng.clone().below(120) as usize);
            if rng.below(2) == 0 {
                for ahead in 0..=rng.below(3) {
                    value.extend(encode(offset + ahead + rng.below(2), BASE_TIME + offset, b"false", b"record"));
                }
                if rng.below(2) == 0 {
                    value.extend(rng.bytes(9));
                }
            }
            Content::new(&rng.bytes(offset as usize % 5), &value, BASE_TIME + offset)
        })
        .collect()
}

/// Harms some bytes, and tells which.
fn harm(rng: &mut Rng, bytes: &mut [u8]) -> std::ops::Range<usize> {
    let at = rng.below(bytes.len() as u64) as usize;
    let len = if rng.below(2) == 0 { 1 } else { 1 + rng.below(400.min((bytes.len() - at) as u64)) as usize };
    let before = bytes[at..at + len].to_vec();
    match rng.below(4) {
        0 => bytes[at] ^= 1 << rng.below(8),
        1 => bytes[at..at + len].fill(0),
        2 => bytes[at..at + len].copy_from_slice(&rng.bytes(len)),
        // What stands elsewhere in the log.
        _ => {
            let from = rng.below((bytes.len() - len + 1) as u64) as usize;
            bytes.copy_within(from..from + len, at);
        }
    }
    let differs: Vec<_> = (0..len).filter(|&i| bytes[at + i] != before[i]).collect();
    differs.first().map_or(at..at, |first| at + first..at + differs.last().unwrap() + 1)
}

/// The border between key and value is the one thing that no checksum of a record covers.
fn body(row: &Row) -> (u64, u64, Vec<u8>) {
    (row.offset, row.timestamp, [&row.key[..], &row.value].concat())
}

#[test]
fn whatever_is_damaged_only_what_was_written_is_read() {
    let seed = seed();
    for run in 0..150 {
        let seed = seed.wrapping_add(run);
        let mut rng = Rng::new(seed);
        let backend: Backend = rng.one_of(&BACKENDS);
        let (data, count) = (scratch(), 120);
        let dir = partition_dir(data.path());
        let contents = treacherous(&mut rng, count);
        let index_interval = rng.one_of(&[1, 1, 2, 7, 1000]);
        let layout = Layout { segment_bytes: rng.one_of(&[2000, 9000, 1 << 30]), index_interval, ..Layout::default() };
        let places = format::write_partition(&dir, &contents, layout);
        let broker = open(data.path(), backend, &TopicConfig { index_interval: index_interval as u32, ..small() });
        let partition = partition_of(&broker);
        let all = rows_of(&contents, 0);

        let mut harmed: Vec<(u64, std::ops::Range<u64>)> = Vec::new();
        for _ in 0..1 + rng.below(5) {
            let base = rng.one_of(&damage::bases(&dir));
            let log = format::segment_path(&dir, base, "log");
            let mut bytes = fs::read(&log).unwrap();
            let range = harm(&mut rng, &mut bytes);
            fs::write(&log, bytes).unwrap();
            harmed.push((base, range.start as u64..range.end as u64));
        }
        let indexes_lie = rng.below(3) == 0;
        if indexes_lie {
            harm_indexes(&mut rng, &dir);
        }
        let assert_written = |row: &Row| {
            let told = all.iter().position(|written| written.timestamp == row.timestamp && body(written).2 == body(row).2);
            // No checksum covers a record's number: one record stands whole under another's where the harm to a header of theirs made it so.
            let header_is_harmed = |record: usize| {
                let (_, base, position) = places[record];
                harmed.iter().any(|(there, range)| *there == base && range.start < position + 28 && range.end > position)
            };
            let is_renumbered = told.is_some_and(|told| header_is_harmed(told) || header_is_harmed(row.offset as usize));
            assert!(told == Some(row.offset as usize) || is_renumbered, "seed {seed}: {row:?} is {told:?}");
        };
        for mut reader in readers(&partition) {
            let (rows, skipped) = read_past_damage(&mut reader, 0, 1 + rng.clone().below(3000) as usize);
            rows.iter().for_each(assert_written);
            // Each record was read or passed over, once, in order.
            let mut told: Vec<u64> =
                rows.iter().map(|row| row.offset).chain(skipped.iter().flat_map(|skipped| skipped.records.clone())).collect();
            assert!(rows.is_sorted_by(|a, b| a.offset < b.offset), "seed {seed}");
            told.sort_unstable();
            assert!(told.into_iter().eq(0..count), "seed {seed}: {skipped:?}");
            // With each record in the index none that is whole was passed over.
            if index_interval == 1 && !indexes_lie {
                for offset in skipped.iter().flat_map(|skipped| skipped.records.clone()) {
                    let (_, base, position) = places[offset as usize];
                    let end = position + encode(0, 0, &contents[offset as usize].key, &contents[offset as usize].value).len() as u64;
                    let hit = |(there, range): &(u64, std::ops::Range<u64>)| *there == base && range.start < end && range.end > position;
                    assert!(harmed.iter().any(hit), "seed {seed}: record {offset} is whole");
                }
            }
            // From anywhere: what can be told of a record is right, too.
            for _ in 0..20 {
                let offset = rng.below(count);
                let next = reader.skip_damaged(offset).unwrap().records.end;
                if next < count {
                    assert_written(&reader.read_one(next).unwrap().into());
                }
            }
        }
    }
}

fn harm_indexes(rng: &mut Rng, dir: &Path) {
    for base in damage::bases(dir) {
        let index = format::segment_path(dir, base, "index");
        let mut bytes = fs::read(&index).unwrap();
        match rng.below(4) {
            0 => {
                fs::remove_file(&index).unwrap();
                continue;
            }
            1 => bytes.truncate(rng.below(bytes.len() as u64 + 1) as usize),
            _ if bytes.is_empty() => {}
            _ => drop(harm(rng, &mut bytes)),
        }
        fs::write(&index, bytes).unwrap();
    }
}
