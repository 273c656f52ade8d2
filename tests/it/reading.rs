//! Reading: from any offset, across segments, by exactly as many bytes as asked, records of every size.

use sapwood::io::sim::OpKind;
use sapwood::{Backend, Error, Reader, ReaderConfig, Tail, TopicConfig, Visibility};

use crate::format::{self, Layout, segment_bases};
use crate::oracle::assert_closed;
use crate::sim;
use crate::support::{
    Row, TOPIC, append, assert_in_order, batch, contents, create, data_with_demo, each_backend, open, partition_dir, partition_of,
    read_all, read_up_to, rows_of, scratch, segments_of, small,
};

/// From every one of `offsets` the rows from there on come, whole and in order; past the end nothing or an error.
fn assert_every_start(partition: &sapwood::Partition, all: &[Row], offsets: impl IntoIterator<Item = u64>) {
    let (first, next) = (partition.first_offset(), partition.next_offset());
    assert_eq!(next - first, all.len() as u64);
    let mut reader = partition.reader().unwrap();
    for offset in offsets {
        let from_here = &all[(offset - first) as usize..];
        let records = reader.read(offset, 1000).unwrap();
        let rows: Vec<_> = records.iter().map(Row::from).collect();
        assert!(!rows.is_empty(), "nothing at {offset}");
        assert_eq!(rows, from_here[..rows.len()], "from {offset}");
        assert_eq!(Row::from(partition.read_one(offset).unwrap()), from_here[0]);
    }
    let end = reader.read(next, 1000).unwrap();
    assert!(end.is_empty() && end.iter().count() == 0 && end.next_offset() == next);
    let beyond = [first.checked_sub(1), Some(0), Some(next + 1), Some(next + 2), Some(u64::MAX)];
    for wrong in beyond.into_iter().flatten().filter(|offset| !(first..=next).contains(offset)) {
        for error in [reader.read(wrong, 1000).map(drop).unwrap_err(), partition.read_one(wrong).map(drop).unwrap_err()] {
            let named = matches!(error, Error::OffsetOutOfRange { offset, first: f, next: n } if (offset, f, n) == (wrong, first, next));
            assert!(named, "{wrong}: {error}");
        }
    }
    assert!(partition.read_one(next).unwrap_err().is_out_of_range());
}

#[test]
fn every_offset_can_be_started_at() {
    each_backend(|backend| {
        for index_interval in [1, 7, 4096] {
            for segment_bytes in [1, 270, 4096, 1 << 30] {
                let data = scratch();
                let config = TopicConfig { index_interval, ..segments_of(segment_bytes) };
                let (broker, partition) = create(data.path(), backend, &config);
                let count: u64 = if segment_bytes == 1 { 20 } else { 150 };
                let records: Vec<_> = (0..count).map(|i| (format!("user-{}", i % 7), format!("value-{i:05}"))).collect();
                for some in records.chunks(40) {
                    partition.append(batch(some)).unwrap().wait().unwrap();
                }
                let all = read_all(&partition);
                assert_in_order(&all, 0);
                assert_eq!(contents(&all), records.iter().map(|(k, v)| (k.clone().into(), v.clone().into())).collect::<Vec<_>>());
                assert_every_start(&partition, &all, 0..count);
                drop(partition);
                broker.close().unwrap();
                let sizes = records.iter().map(|(k, v)| 28 + k.len() as u64 + v.len() as u64);
                let report = assert_closed(&partition_dir(data.path()), index_interval.into());
                let bases: Vec<_> = report.segments.iter().map(|segment| segment.base).collect();
                assert_eq!(bases, segment_bases(sizes, segment_bytes, 0), "segment_bytes {segment_bytes}");

                let broker = open(data.path(), backend, &small());
                assert_every_start(&partition_of(&broker), &all, 0..count);
            }
        }
    });
}

#[test]
fn sparse_indexes_find_offsets_on_both_sides_of_their_entries() {
    each_backend(|backend| {
        let base = 1_000_000_000_000;
        for (index_interval, prealloc) in [(4096, 0), (4096, 500_000), (1, 0), (7, 0)] {
            let records = 9000;
            let (data, _) = data_with_demo(records, Layout { index_interval, base, prealloc, ..Layout::default() });
            let broker = open(data.path(), backend, &small());
            let all = rows_of(&format::demo(records), base);
            let near = |offset: u64| offset.saturating_sub(2)..offset + 3;
            let offsets = near(2).chain(near(4096)).chain(near(8192)).chain((0..records).step_by(501)).chain([records - 2, records - 1]);
            assert_every_start(&partition_of(&broker), &all, offsets.map(|offset| base + offset));
        }
    });
}

#[test]
fn a_batch_is_the_longest_that_max_bytes_allows() {
    each_backend(|backend| {
        let data = scratch();
        let (_broker, partition) = create(data.path(), backend, &small());
        let sizes = [0usize, 17, 17, 500, 1, 0, 0, 0, 4096, 17, 3, 9000, 1];
        let values: Vec<_> = sizes.iter().map(|&size| ("", vec![7u8; size])).collect();
        partition.append(batch(&values)).unwrap().wait().unwrap();
        let mut reader = partition.reader_with(ReaderConfig { piece_bytes: 1 << 20, ..ReaderConfig::up_to(Visibility::Durable) }).unwrap();
        let whole: u64 = sizes.iter().map(|&size| 28 + size as u64).sum();
        for start in 0..sizes.len() {
            let limits = (0..200).chain([499, 500, 528, 529, 4095, 4096, 4124, 4125, 9027, 9028, 9029, whole - 1, whole, whole + 1]);
            for max_bytes in limits {
                let mut expected = 0;
                let mut bytes = 0;
                for &size in &sizes[start..] {
                    if expected > 0 && bytes + 28 + size as u64 > max_bytes {
                        break;
                    }
                    bytes += 28 + size as u64;
                    expected += 1;
                    if bytes > max_bytes {
                        break;
                    }
                }
                let records = reader.read(start as u64, max_bytes as usize).unwrap();
                assert_eq!(records.iter().count(), expected, "from {start}, {max_bytes} bytes");
                assert_eq!(records.bytes() as u64, bytes, "from {start}, {max_bytes} bytes");
                assert_eq!(records.next_offset(), (start + expected) as u64);
            }
        }
    });
}

#[test]
fn a_record_larger_than_max_bytes_or_than_the_buffer_comes_alone() {
    each_backend(|backend| {
        let data = scratch();
        let (_broker, partition) = create(data.path(), backend, &small());
        let large = vec![9; 1 << 20];
        let records = [b"0123456789".to_vec(), large.clone(), b"9876543210".to_vec()];
        partition.append(batch(&records.clone().map(|value| ("k", value)))).unwrap().wait().unwrap();
        for buffer_bytes in [1, 4096, 64 << 10, 4 << 20] {
            let mut reader =
                partition.reader_with(ReaderConfig { piece_bytes: buffer_bytes, ..ReaderConfig::up_to(Visibility::Durable) }).unwrap();
            for max_bytes in [0, 1, 64 << 10, 1 << 20] {
                for (offset, value) in (0..).zip(&records) {
                    let read = reader.read(offset, max_bytes).unwrap();
                    let first = read.iter().next().unwrap();
                    assert_eq!((first.offset, first.key), (offset, &b"k"[..]));
                    assert!(first.value == value, "the bytes of record {offset}");
                    if value.len() + 29 > max_bytes {
                        assert_eq!(read.iter().count(), 1);
                    }
                    assert!(read.iter().count() == 1 || read.bytes() <= max_bytes);
                }
            }
            // And the reader is as before: no byte of the large record appears in what follows.
            let read = reader.read(2, 4096).unwrap();
            assert_eq!(read.iter().map(|record| record.value.to_vec()).collect::<Vec<_>>(), [records[2].clone()]);
        }
    });
}

#[test]
fn reading_crosses_segments_by_itself() {
    each_backend(|backend| {
        for max_bytes in [1, 45, 46, 89, 90, 100, 269, 270, 271, 1000, 1 << 20] {
            let (data, _) = data_with_demo(36, Layout { segment_bytes: 270, base: 7, ..Layout::default() });
            let broker = open(data.path(), backend, &segments_of(270));
            let partition = partition_of(&broker);
            let all = rows_of(&format::demo(36), 7);
            for start in [7, 11, 12, 13, 42] {
                assert_eq!(
                    read_up_to(&partition, Visibility::Durable, start, max_bytes),
                    all[start as usize - 7..],
                    "{max_bytes} bytes at a time"
                );
            }
        }
    });
}

#[test]
fn a_reader_goes_on_where_records_are_added_after_a_reopen() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &segments_of(1000));
        for number in 0..100u32 {
            append(&partition, b"", &number.to_be_bytes());
        }
        drop(partition);
        drop(broker);
        let broker = open(data.path(), backend, &small());
        let partition = partition_of(&broker);
        let mut reader = partition.reader().unwrap();
        let (mut offset, mut seen) = (95, Vec::new());
        for number in 100..=110u32 {
            loop {
                let records = reader.read(offset, 100).unwrap();
                if records.is_empty() {
                    break;
                }
                seen.extend(records.iter().map(|record| (record.offset, record.value.to_vec())));
                offset = records.next_offset();
            }
            if number < 110 {
                append(&partition, b"", &number.to_be_bytes());
            }
        }
        assert_eq!(seen, (95..110u32).map(|number| (number.into(), number.to_be_bytes().to_vec())).collect::<Vec<_>>());
    });
}

#[test]
fn readers_on_other_threads_follow_the_writer() {
    each_backend(|backend| {
        let data = scratch();
        let (_broker, partition) = create(data.path(), backend, &segments_of(5000));
        let total = 600u64;
        std::thread::scope(|scope| {
            for up_to in [Visibility::Durable, Visibility::Appended] {
                for max_bytes in [60, 1 << 16] {
                    let partition = partition.clone();
                    scope.spawn(move || {
                        let mut reader =
                            partition.reader_with(ReaderConfig { piece_bytes: 1 << 16, ..ReaderConfig::up_to(up_to) }).unwrap();
                        let mut offset = 0;
                        while offset < total {
                            let records = reader.read(offset, max_bytes).unwrap();
                            for record in &records {
                                assert_eq!((record.offset, record.value), (offset, format!("value {offset}").as_bytes()));
                                offset += 1;
                            }
                            assert_eq!(records.next_offset(), offset);
                            std::thread::yield_now();
                        }
                    });
                }
            }
            for number in 0..total {
                assert_eq!(append(&partition, b"", format!("value {number}").as_bytes()), number);
                assert!(partition.durable_end() > number);
            }
        });
    });
}

/// The sizes at which headers, blocks, buffers and commits end.
const SIZES: [usize; 11] = [0, 1, 27, 28, 29, 4067, 4068, 4069, 4070, 4096, 65535];

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    let piece: Vec<u8> = (0..997usize).map(|i| (i.wrapping_mul(31).wrapping_add(seed * 7) % 251) as u8).collect();
    let mut bytes = piece.repeat(len.div_ceil(piece.len()));
    bytes.truncate(len);
    bytes
}

/// Appends records of these sizes one by one and together, and reads them back before and after a reopen.
fn assert_sizes_survive(backend: Backend, sizes: &[usize], config: &TopicConfig) {
    let data = scratch();
    let (broker, partition) = create(data.path(), backend, config);
    let shapes = |index: usize, size: usize| match index % 3 {
        0 => (vec![], pattern(size, size)),
        1 => (pattern(size, size), vec![]),
        _ => (pattern(1, size / 3), pattern(2, size - size / 3)),
    };
    let records: Vec<_> = sizes.iter().enumerate().map(|(index, &size)| shapes(index, size)).collect();
    for (key, value) in &records {
        append(&partition, key, value);
    }
    let together = partition.append(batch(&records)).unwrap().wait().unwrap();
    assert_eq!(together, records.len() as u64..2 * records.len() as u64);
    let twice: Vec<_> = records.iter().chain(&records).collect();
    let assert_all = |partition: &sapwood::Partition| {
        let mut reader = partition.reader().unwrap();
        let mut offset = 0;
        while offset < twice.len() as u64 {
            let read = reader.read(offset, 1 << 20).unwrap();
            for record in &read {
                let (key, value) = twice[offset as usize];
                assert_eq!((record.offset, record.key.len(), record.value.len()), (offset, key.len(), value.len()));
                assert!(record.key == key && record.value == value, "the bytes of record {offset}");
                offset += 1;
            }
            assert!(!read.is_empty());
        }
        for (offset, (key, value)) in (0..).zip(&twice) {
            let record = partition.read_one(offset).unwrap();
            assert!(record.key == *key && record.value == *value, "the bytes of record {offset}");
        }
    };
    assert_all(&partition);
    drop(partition);
    broker.close().unwrap();
    let report = assert_closed(&partition_dir(data.path()), config.index_interval.into());
    let sizes = twice.iter().map(|(key, value)| (28 + key.len() + value.len()) as u64);
    assert_eq!(report.segments.iter().map(|segment| segment.base).collect::<Vec<_>>(), segment_bases(sizes, config.segment_bytes, 0));
    let broker = open(data.path(), backend, config);
    assert_all(&partition_of(&broker));
}

#[test]
fn records_of_every_size_in_segments_of_every_size() {
    each_backend(|backend| {
        for segment_bytes in [1, 270, 4096, 1 << 30] {
            for commit_bytes in [4096, 1 << 20] {
                assert_sizes_survive(backend, &SIZES, &TopicConfig { commit_bytes, ..segments_of(segment_bytes) });
            }
        }
    });
}

#[test]
fn records_of_one_and_of_three_mebibytes() {
    each_backend(|backend| {
        for segment_bytes in [4096, 2 << 20, 1 << 30] {
            assert_sizes_survive(backend, &[1 << 20, 5, (3 << 20) + 1, (1 << 20) - 28], &segments_of(segment_bytes));
        }
    });
}

#[test]
fn a_record_of_64_mebibytes() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &TopicConfig::default());
        let large = pattern(3, 64 << 20);
        assert_eq!(append(&partition, b"k", b"before"), 0);
        assert_eq!(append(&partition, b"k", &large), 1);
        assert_eq!(append(&partition, b"k", b"after"), 2);
        assert!(partition.read_one(1).unwrap().value == large);
        drop(partition);
        broker.close().unwrap();
        let broker = open(data.path(), backend, &TopicConfig::default());
        let partition = partition_of(&broker);
        let mut reader = partition.reader().unwrap();
        let read = reader.read(1, 4096).unwrap();
        assert_eq!(read.iter().count(), 1);
        assert!(read.iter().next().unwrap().value == large);
        let last = reader.read(2, 4096).unwrap();
        assert_eq!(last.iter().next().unwrap().value, b"after");
    });
}

#[test]
fn a_record_larger_than_a_segment_gets_one_of_its_own() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &segments_of(4096));
        let sizes = [10usize, 10, 4096 - 28, 10, 4096 - 27, 20_000, 10, 100_000, 100_000, 0];
        let records: Vec<_> = sizes.iter().enumerate().map(|(index, &size)| ("", pattern(index, size))).collect();
        // Alone and amid others of one batch.
        partition.append(batch(&records)).unwrap().wait().unwrap();
        for (key, value) in &records {
            append(&partition, key.as_bytes(), value);
        }
        let rows = read_all(&partition);
        assert!(contents(&rows).iter().zip(records.iter().chain(&records)).all(|(row, record)| row.1 == record.1));
        assert_eq!(rows.len(), 2 * records.len());
        let rolls = partition.stats().rolls;
        drop(partition);
        broker.close().unwrap();
        let report = assert_closed(&partition_dir(data.path()), 1);
        let expected = segment_bases(sizes.iter().chain(&sizes).map(|&size| size as u64 + 28), 4096, 0);
        assert_eq!(report.segments.iter().map(|segment| segment.base).collect::<Vec<_>>(), expected);
        assert_eq!(rolls, expected.len() as u64 - 1);
        assert!(report.segments.iter().all(|segment| segment.log_len <= 4096 || segment.records == 1));
    });
}

#[test]
fn owned_records_outlive_everything_they_came_from() {
    let data = scratch();
    let (broker, partition) = create(data.path(), Backend::Auto, &small());
    append(&partition, b"key", b"value");
    let record = broker.consume(TOPIC, 0, 0).unwrap();
    let twin = record.clone();
    drop(partition);
    broker.close().unwrap();
    drop(data);
    assert_eq!((&record.key[..], &record.value[..]), (&b"key"[..], &b"value"[..]));
    assert_eq!(twin.value, record.value);
}

#[test]
fn a_partition_without_records_reads_as_its_end() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        let check = |partition: &sapwood::Partition| {
            assert_eq!((partition.first_offset(), partition.next_offset(), partition.durable_end()), (0, 0, 0));
            assert!(partition.reader().unwrap().read(0, 100).unwrap().is_empty());
            let error = partition.read_one(0).unwrap_err();
            assert!(matches!(error, Error::OffsetOutOfRange { offset: 0, first: 0, next: 0 }), "{error}");
            assert!(partition.reader().unwrap().read(1, 100).unwrap_err().is_out_of_range());
        };
        check(&partition);
        drop(partition);
        broker.close().unwrap();
        assert_closed(&partition_dir(data.path()), 1);
        let broker = open(data.path(), backend, &small());
        check(&partition_of(&broker));
    });
}

/// A read that has begun when its topic is deleted, and perhaps made again under the same name, gets nothing of either.
#[test]
fn what_is_read_of_a_topic_that_is_deleted_meanwhile_is_closed() {
    type Way = fn(&sapwood::Partition, Reader, Tail) -> Result<(), Error>;
    let ways: [Way; 6] = [
        |_, mut reader, _| reader.read(7, 1).map(drop),
        |_, mut reader, _| reader.read_one(7).map(drop),
        |_, mut reader, _| reader.skip_damaged(7).map(drop),
        |_, mut reader, _| reader.offset_for_time(u64::MAX).map(drop),
        |_, _, mut tail| tail.next_record(None).map(drop),
        |partition, _, _| partition.read_one(7).map(drop),
    ];
    for (again, way) in [false, true].into_iter().flat_map(|again| ways.map(|way| (again, way))) {
        // Nothing of what was written is in memory, so the log must be opened.
        let config = TopicConfig { tail_bytes: 0, ..segments_of(300) };
        let (sim, broker, partition) = sim::create(1, &config);
        let fill = |partition: &sapwood::Partition| {
            for number in 0..9 {
                append(partition, b"", &[number; 72]);
            }
        };
        fill(&partition);
        let (reader, tail) = (partition.reader().unwrap(), partition.tail(7).unwrap());
        // Under its own name: what deletes it opens it, too, under a hidden one.
        let hold = sim.hold(OpKind::Open, Some("/t/0/00000000000000000006.log"));
        let read = std::thread::scope(|scope| {
            let reading = scope.spawn(|| way(&partition, reader, tail));
            hold.wait_until_held();
            broker.delete_topic(TOPIC).unwrap();
            if again {
                fill(&broker.create_topic(TOPIC, config).unwrap().partition(0).unwrap());
            }
            hold.release();
            reading.join().unwrap()
        });
        assert!(matches!(&read, Err(error) if error.is_closed()), "{read:?}");
    }
}
