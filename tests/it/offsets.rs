//! The end of the offsets: the last record that a partition can hold has the offset 2^64 - 2, for one past it must be a number, too.

use std::path::Path;

use sapwood::{Batch, Error, Partition, TopicConfig};

use crate::format::{self, Layout, segment_path};
use crate::oracle::assert_closed;
use crate::support::{batch, contents, each_backend, open, partition_dir, partition_of, read_all, report_of, scratch, segments_of, small};

const END: u64 = u64::MAX;

#[track_caller]
fn assert_used_up(error: &Error, partition: &Partition, count: u64) {
    let Error::OffsetsUsedUp { path, next, records } = error else { panic!("{error}") };
    assert_eq!((path.as_path(), *next, *records), (partition.path(), partition.next_offset(), count));
    assert!(!error.is_failed());
}

/// Such a batch is refused by every way of appending, and nothing changes by it.
#[track_caller]
fn assert_refused(partition: &Partition, count: u64) {
    let records = || batch(&vec![("", "one too many"); count as usize]);
    partition.sync().unwrap();
    let before = (partition.next_offset(), partition.durable_end(), read_all(partition));
    assert_used_up(&partition.append(records()).unwrap().wait().unwrap_err(), partition, count);
    assert_used_up(&partition.append_and_wait(records()).unwrap_err(), partition, count);
    assert_used_up(&partition.try_append(records()).unwrap().wait().unwrap_err(), partition, count);
    // A commit of its own, where there are such.
    let mut large = records();
    large.push(None, &vec![7; 100_000]).unwrap();
    assert_used_up(&partition.append_and_wait(large).unwrap_err(), partition, count + 1);
    partition.sync().unwrap();
    assert!(before == (partition.next_offset(), partition.durable_end(), read_all(partition)));
}

fn data_that_ends_at(data: &Path, next: u64) {
    format::write_partition(&partition_dir(data), &format::demo(36), Layout { base: next - 36, segment_bytes: 270, ..Layout::default() });
}

#[test]
fn the_last_offset_is_given_and_a_batch_that_wants_more_is_refused_whole() {
    each_backend(|backend| {
        for topic in [small(), segments_of(1), TopicConfig { durability: sapwood::Durability::Os, ..segments_of(270) }] {
            let data = scratch();
            data_that_ends_at(data.path(), END - 5);
            let broker = open(data.path(), backend, &topic);
            let partition = partition_of(&broker);
            assert_eq!(partition.next_offset(), END - 5);
            assert_refused(&partition, 6);
            // What fits goes on being taken, up to the very last.
            assert_eq!(partition.append_and_wait(batch(&[("a", "1"), ("b", "2")])).unwrap(), END - 5..END - 3);
            assert_refused(&partition, 4);
            assert_eq!(partition.append(batch(&[("c", "3"), ("d", "4"), ("e", "5")])).unwrap().wait().unwrap(), END - 3..END);
            assert_refused(&partition, 1);
            partition.sync().unwrap();
            assert_eq!((partition.next_offset(), partition.durable_end()), (END, END));

            // All of it is read, by whatever way.
            let rows = read_all(&partition);
            assert_eq!((rows.len(), rows.last().unwrap().offset), (41, END - 1));
            assert_eq!(partition.read_one(END - 1).unwrap().value, b"5"[..]);
            for offset in [END, 0, END - 42] {
                assert!(partition.read_one(offset).unwrap_err().is_out_of_range());
            }
            assert!(partition.reader().unwrap().read(END, 1000).unwrap().is_empty());
            let mut tail = partition.tail(END - 2).unwrap();
            assert_eq!(tail.next_record(None).unwrap().unwrap().offset, END - 2);
            assert_eq!(tail.next_record(None).unwrap().unwrap().offset, END - 1);
            assert_eq!(tail.position(), END);
            assert!(tail.next_record(Some(std::time::Duration::ZERO)).unwrap().is_none());
            drop((tail, partition));
            broker.close().unwrap();
            let closed = assert_closed(&partition_dir(data.path()), 1);
            assert_eq!(closed.next_offset, END);
            let found = sapwood::inspect::verify(partition_dir(data.path())).unwrap().findings;
            assert!(found.iter().all(|finding| finding.severity == sapwood::inspect::Severity::Info), "{found:?}");

            // And again after opening, by the checkpoint and by a scan.
            for scan in [false, true] {
                if scan {
                    std::fs::remove_file(partition_dir(data.path()).join("checkpoint")).unwrap();
                }
                let broker = open(data.path(), backend, &topic);
                assert_eq!(report_of(&broker).next_offset, END);
                let partition = partition_of(&broker);
                assert!(contents(&read_all(&partition)) == contents(&rows));
                assert_refused(&partition, 1);
                drop(partition);
                broker.close().unwrap();
            }
        }
    });
}

#[test]
fn many_producers_at_the_end_get_each_offset_once_and_the_rest_the_error() {
    each_backend(|backend| {
        let data = scratch();
        data_that_ends_at(data.path(), END - 50);
        let broker = open(data.path(), backend, &segments_of(300));
        let partition = partition_of(&broker);
        let mut given: Vec<u64> = std::thread::scope(|scope| {
            let producers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let answers = (0..20).map(|_| partition.append_and_wait(Batch::of(None, b"v").unwrap()));
                        answers
                            .filter_map(|answer| answer.inspect_err(|error| assert!(!error.is_failed(), "{error}")).ok())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            producers.into_iter().flat_map(|producer| producer.join().unwrap()).map(|offsets| offsets.start).collect()
        });
        given.sort_unstable();
        assert_eq!(given, (END - 50..END).collect::<Vec<_>>());
        drop(partition);
        broker.close().unwrap();
        assert_closed(&partition_dir(data.path()), 1);
    });
}

#[test]
fn an_empty_segment_that_begins_at_the_very_end_is_opened_and_takes_nothing() {
    each_backend(|backend| {
        let data = scratch();
        let dir = partition_dir(data.path());
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(segment_path(&dir, END, "log"), b"").unwrap();
        let broker = open(data.path(), backend, &small());
        let partition = partition_of(&broker);
        assert_eq!((partition.first_offset(), partition.next_offset()), (END, END));
        assert_refused(&partition, 1);
        drop(partition);
        broker.close().unwrap();
        assert_eq!(std::fs::metadata(segment_path(&dir, END, "log")).unwrap().len(), 0);
    });
}
