//! What failed, short and unordered operations leave behind, and what is too large or too much. The numbers are those of the project's
//! list of failures met by others.

use std::fs;
use std::path::{Path, PathBuf};

use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::{Batch, Durability, Error, Partition, ReaderConfig, TopicConfig, Visibility};

use crate::chain::read_on;
use crate::damage;
use crate::format::{self, segment_path};
use crate::oracle::{assert_closed, assert_sound, scan};
use crate::recovery::DEMO;
use crate::sim::{self, EIO, ENOSPC, tiny};
use crate::support::{
    TOPIC, append, assert_in_order, batch, bytes_in, contents, copy_dir, create, data_with, each_backend, open, partition_dir,
    partition_of, read_all, read_up_to, report_of, scratch, seed, segments_of, small,
};

// ---------------------------------------------------------------- what a failed operation leaves

const LEVELS: [Durability; 3] =
    [Durability::Durable, Durability::Interval { bytes: 1 << 40, time: std::time::Duration::from_secs(3600) }, Durability::Os];

/// A record of 400 bytes that tells its number.
fn large(number: u8) -> (Vec<u8>, Vec<u8>) {
    (b"k".to_vec(), vec![number; 400 - 29])
}

fn try_append(partition: &Partition, number: u8) -> sapwood::Result<u64> {
    Ok(partition.append(batch(&[large(number)]))?.wait()?.start)
}

fn log() -> PathBuf {
    segment_path(&sim::dir(), 0, "log")
}

#[test]
fn b036_b111_b113_a_failed_batch_leaves_no_gap_and_its_offset_to_the_next() {
    let mut refused = 0;
    for durability in LEVELS {
        for direct in [true, false] {
            let partial = |bytes, errno| (OpKind::Write, Effect::ErrorAfterPartial { bytes, errno });
            // A direct write begins with the block that the first record is in; only durable ones are direct.
            let before = if direct && durability == Durability::Durable { 400 } else { 0 };
            let faults =
                [(OpKind::Write, Effect::Error(EIO)), (OpKind::Write, Effect::Error(ENOSPC)), (OpKind::Allocate, Effect::Error(ENOSPC))]
                    .into_iter()
                    .chain([1, 27, 28, 100, 399].map(|bytes| partial(bytes, ENOSPC)))
                    .chain([100, 399].map(|bytes| partial(before + bytes, EIO)));
            for (on, effect) in faults {
                let what = format!("{durability:?}, direct {direct}, {on:?}: {effect:?}");
                let sim = SimDisk::new(seed());
                sim.refuse_direct(!direct);
                let broker = sim::open(&sim);
                // What is allocated ends behind the first record, so that the second needs more.
                let topic = TopicConfig { durability, ..tiny(if on == OpKind::Allocate { 400 } else { 1 << 20 }) };
                broker.create_topic(TOPIC, topic).unwrap();
                let partition = partition_of(&broker);
                try_append(&partition, 0).unwrap();
                sim.fail(Fault::next(on, effect).path(".log"));
                let error = try_append(&partition, 1).unwrap_err();
                assert_eq!(read_up_to(&partition, Visibility::Appended, 0, 1000).len(), 1, "{what}: none of it is readable");
                let (broker, partition) = if error.is_failed() {
                    assert!(try_append(&partition, 2).unwrap_err().is_failed(), "{what}");
                    drop((partition, broker));
                    let broker = sim::open(&sim);
                    let partition = partition_of(&broker);
                    (broker, partition)
                } else {
                    refused += 1;
                    assert!(on == OpKind::Allocate && matches!(error, Error::DiskFull { appended: 0, .. }), "{what}: {error}");
                    (broker, partition)
                };
                for number in 2..4 {
                    assert_eq!(try_append(&partition, number).unwrap(), u64::from(number) - 1, "{what}");
                }
                drop(partition);
                broker.close().unwrap();
                let closed = sim::assert_closed(&sim, 1);
                let found: Vec<_> = closed.records.iter().map(|found| (found.base + found.position / 400, found.value[0])).collect();
                assert_eq!(found, [(0, 0), (1, 2), (2, 3)], "{what}: the place of the failed batch is the next one's");
            }
        }
    }
    assert_eq!(refused, 6, "no room at allocation passes without opening again");
}

#[test]
fn b036_b104_a_write_that_fails_under_way_is_answered_with_all_behind_it_and_overtakes_none() {
    let effects = [Effect::Error(EIO), Effect::Error(ENOSPC)].into_iter();
    for effect in effects.chain([0, 4096, 10_000].map(|bytes| Effect::ErrorAfterPartial { bytes, errno: EIO })) {
        for nth in 1..=5 {
            let sim = SimDisk::new(seed());
            sim.overlap_rings(true);
            let broker = sim::open(&sim);
            broker.create_topic(TOPIC, TopicConfig { commit_bytes: 8192, ..tiny(1 << 20) }).unwrap();
            let partition = partition_of(&broker);
            let hold = sim.hold(OpKind::Write, Some(".log"));
            sim.fail(Fault::next(OpKind::Write, effect).path(".log").nth(nth));
            // So much that the writes behind the first go by the ring, while the next commit is filled.
            let tickets: Vec<_> = (0..60).map(|number| partition.append(batch(&vec![large(number); 10])).unwrap()).collect();
            hold.wait_until_held();
            hold.release();
            let answers: Vec<_> = tickets.into_iter().map(sapwood::Ticket::wait).collect();
            let acknowledged = answers.iter().take_while(|answer| answer.is_ok()).count();
            assert!(answers[acknowledged..].iter().all(|answer| answer.as_ref().is_err_and(Error::is_failed)), "{effect:?}, {nth}");
            assert!(acknowledged < 60 && try_append(&partition, 60).unwrap_err().is_failed(), "{effect:?}, {nth}: it did not happen");
            let expected = |records: usize| (0..records).map(|record| large((record / 10) as u8)).collect::<Vec<_>>();
            let durable = partition.durable_end() as usize;
            assert!(durable >= acknowledged * 10);
            assert!(contents(&read_all(&partition)) == expected(durable), "{effect:?}, {nth}");
            sim.power_loss_keeping_nothing();
            drop((partition, broker));
            let broker = sim::open(&sim);
            assert!(contents(&read_all(&partition_of(&broker))) == expected(durable), "{effect:?}, {nth}: after a power loss");
            assert_eq!(try_append(&partition_of(&broker), 0).unwrap(), durable as u64);
            broker.close().unwrap();
            sim::assert_closed(&sim, 1);
        }
    }
}

#[test]
fn b069_a_reader_that_holds_the_segment_never_sees_what_a_failed_append_wrote() {
    for durability in LEVELS {
        let (sim, broker, partition) = sim::create(seed(), &TopicConfig { durability, ..tiny(1000) });
        try_append(&partition, 0).unwrap();
        partition.sync().unwrap();
        let mut readers = [Visibility::Durable, Visibility::Appended]
            .map(|up_to| partition.reader_with(ReaderConfig { piece_bytes: 4096, ..ReaderConfig::up_to(up_to) }).unwrap());
        readers.iter_mut().for_each(|reader| assert_eq!(read_on(reader, 0, 4096).0.len(), 1));
        sim.fail(Fault::next(OpKind::Write, Effect::ErrorAfterPartial { bytes: 1 << 20, errno: EIO }).path(".log"));
        assert!(try_append(&partition, 1).unwrap_err().is_failed());
        assert_eq!(scan(&sim.read_file(&log()), 0).records.len(), 2, "all of it was written");
        for reader in &mut readers {
            assert!(reader.read(1, 4096).unwrap().is_empty());
            let (rows, error) = read_on(reader, 0, 4096);
            assert!(rows.len() == 1 && error.is_none());
        }
        drop((readers, partition, broker));
        // Opened again, it may be there; but then for good, and once.
        let broker = sim::open(&sim);
        let partition = partition_of(&broker);
        let mut reader = partition.reader().unwrap();
        let (mut model, _) = read_on(&mut reader, 0, 4096);
        assert!(model.len() == 1 || contents(&model)[1] == large(1));
        for number in 2..12 {
            try_append(&partition, number).unwrap();
            partition.sync().unwrap();
            let (rows, error) = read_on(&mut reader, model.len() as u64, 4096);
            assert!(error.is_none() && contents(&rows) == [large(number)], "{rows:?}, {error:?}");
            model.extend(rows);
        }
        assert!(partition.stats().rolls >= 4);
        assert_in_order(&model, 0);
        assert_eq!(read_on(&mut reader, 0, 500).0, model);
    }
}

// ---------------------------------------------------------------- the order of writes and syncs

#[test]
fn b108_an_acknowledgement_after_a_short_write_covers_the_rest_of_it() {
    for durability in LEVELS {
        for (direct, ring, shorts) in [(true, true, &[512, 4096][..]), (true, false, &[512, 4096]), (false, false, &[1, 27, 28, 512])] {
            for &short in shorts {
                let sim = SimDisk::new(seed());
                sim.refuse_direct(!direct);
                sim.overlap_rings(ring);
                let broker = sim::open(&sim);
                broker.create_topic(TOPIC, TopicConfig { commit_bytes: 8192, durability, ..tiny(1 << 20) }).unwrap();
                let partition = partition_of(&broker);
                let shortened =
                    RandomFault { on: OpKind::Write, path_suffix: Some(".log".into()), per_million: 700_000, effect: Effect::Short(short) };
                sim.fail_by_chance(shortened);
                let mut expected = Vec::new();
                for _ in 0..2 {
                    // While the first is held back the others pile up, which is when a ring is used if there is one.
                    let hold = sim.hold(OpKind::Write, Some(".log"));
                    let batches = [0; 20].map(|_| {
                        let records: Vec<_> = (expected.len()..expected.len() + 25).map(|number| large((number % 251) as u8)).collect();
                        expected.extend_from_slice(&records);
                        batch(&records)
                    });
                    let tickets = batches.map(|batch| partition.append(batch).unwrap());
                    hold.wait_until_held();
                    hold.release();
                    for ticket in tickets {
                        let end = ticket.wait().unwrap().end as usize;
                        if durability != Durability::Durable {
                            partition.sync().unwrap();
                        }
                        let lost = sim.fork(1);
                        lost.power_loss_keeping_nothing();
                        let rows = contents(&read_all(&partition_of(&sim::open(&lost))));
                        let what = format!("{durability:?}, direct {direct}, ring {ring}, {short} bytes");
                        assert!(rows.len() >= end && expected.starts_with(&rows), "{what}: {} of {end} records are left", rows.len());
                    }
                }
                let writes = sim.ops().into_iter().filter(|op| op.kind == OpKind::Write && op.path == log()).count() as u64;
                assert!(
                    writes > partition.stats().commits,
                    "{durability:?}, direct {direct}, ring {ring}, {short} bytes: none of {writes} writes was short"
                );
            }
        }
    }
}

#[test]
fn b109_a_sync_covers_no_write_that_it_did_not_come_after() {
    // One that is asked for while a write is on its way, and those that come by themselves.
    for durability in [Durability::Os, Durability::Interval { bytes: 1, time: std::time::Duration::from_secs(3600) }] {
        for round in 0..20 {
            let (sim, broker, partition) = sim::create(seed(), &TopicConfig { durability, ..tiny(1 << 20) });
            try_append(&partition, 0).unwrap();
            let hold = sim.hold(OpKind::Write, Some(".log"));
            let ticket = partition.append(batch(&[large(1)])).unwrap();
            hold.wait_until_held();
            std::thread::scope(|scope| {
                let syncing = scope.spawn(|| partition.sync());
                for _ in 0..round * 20 {
                    std::thread::yield_now();
                    assert!(partition.durable_end() <= 1 && !syncing.is_finished(), "what is not written is not durable");
                }
                hold.release();
                syncing.join().unwrap().unwrap();
            });
            let lost = sim.fork(1);
            assert_eq!((ticket.wait().unwrap(), partition.durable_end()), (1..2, 2));
            lost.power_loss_keeping_nothing();
            assert_eq!(contents(&read_all(&partition_of(&sim::open(&lost)))), [large(0), large(1)], "{durability:?}");
            drop((partition, broker));
        }
    }
}

// ---------------------------------------------------------------- reading

#[test]
fn b066_short_reads_give_the_same_records_and_a_file_that_ends_early_an_error() {
    let sizes = [0usize, 1, 27, 28, 29, 45, 400, 4067, 4068, 4069, 9000];
    let records: Vec<_> = (0..40).map(|number| (vec![b'k'; number % 3], vec![number as u8 | 1; sizes[number % sizes.len()]])).collect();
    let (sim, broker, partition) = sim::create(seed(), &tiny(20_000));
    partition.append(batch(&records)).unwrap().wait().unwrap();
    drop(partition);
    broker.close().unwrap();
    for short in [1, 27, 28, 29, 44, 4095] {
        let broker = sim::open(&sim);
        let partition = partition_of(&broker);
        sim.clear_ops();
        sim.fail_by_chance(RandomFault {
            on: OpKind::Read,
            path_suffix: Some(".log".into()),
            per_million: 1_000_000,
            effect: Effect::Short(short),
        });
        for max_bytes in [1, 100, 5000] {
            assert_eq!(contents(&read_up_to(&partition, Visibility::Durable, 0, max_bytes)), records, "{short} bytes at a time");
        }
        let reads = sim.ops().iter().filter(|op| op.kind == OpKind::Read).count();
        assert!(reads >= 3 * (sim.read_file(&log()).len() / short), "nothing was short");
        sim.clear_faults();
    }
    // Somebody cuts a log while it is read: inside a header, at the end of one, inside a body.
    let broker = sim::open(&sim);
    let partition = partition_of(&broker);
    let segment = sim::assert_sound(&sim).segments[0].clone();
    let found = scan(&sim.read_file(&log()), 0).records;
    let victim = &found[found.len() - 2];
    let bytes = sim.read_file(&log());
    for kept in [0, 1, 13, 27, 28, victim.bytes() - 1] {
        let mut reader = partition.reader_with(ReaderConfig { piece_bytes: 1 << 16, ..ReaderConfig::up_to(Visibility::Durable) }).unwrap();
        // Its buffer holds the whole segment from before.
        assert_eq!(read_on(&mut reader, 0, 1 << 16).0.len(), records.len());
        sim.write_file(&log(), &bytes[..(victim.position + kept) as usize]);
        let (rows, error) = read_on(&mut reader, victim.offset, 1 << 16);
        assert!(rows.is_empty() && error.is_some(), "{kept} bytes of its record {}: {rows:?}", victim.offset);
        assert!(partition.read_one(victim.offset).is_err());
        assert_eq!(read_on(&mut reader, segment.records, 1 << 16).0.len() as u64, records.len() as u64 - segment.records);
        sim.write_file(&log(), &bytes);
        assert_eq!(read_on(&mut reader, 0, 1 << 16).0.len(), records.len(), "it was the file");
    }
}

// ---------------------------------------------------------------- rolling

#[test]
fn b096_an_empty_active_segment_is_not_followed_by_another() {
    each_backend(|backend| {
        for name in ["empty-log", "empty-log-no-index", "prealloc-only"] {
            let (data, dir) = data_with(DEMO);
            damage::apply(&dir, name);
            for round in 0..10 {
                let broker = open(data.path(), backend, &segments_of(270));
                assert_eq!((report_of(&broker).segments, report_of(&broker).next_offset), (7, 36), "{name}");
                if round % 2 == 0 { broker.close().unwrap() } else { drop(broker) }
            }
            let broker = open(data.path(), backend, &segments_of(270));
            let partition = partition_of(&broker);
            // One that is larger than a segment goes where nothing is yet.
            assert_eq!(append(&partition, b"", &[7; 1000]), 36);
            assert_eq!(append(&partition, b"", b"v"), 37);
            drop(partition);
            broker.close().unwrap();
            assert_closed(&dir, 1);
            assert_eq!(damage::bases(&dir), [0, 6, 12, 18, 24, 30, 36, 37], "{name}");
        }
    });
}

#[test]
fn b099_a_batch_that_does_not_fit_into_the_rest_of_a_segment_is_whole_in_those_behind() {
    let records: Vec<_> = (0..40).map(|number| (format!("user-{}", number % 7), format!("value-{number:05}"))).collect();
    each_backend(|backend| {
        for room in [0, 1, 10, 44, 45, 46, 250 - 28] {
            let data = scratch();
            let (broker, partition) = create(data.path(), backend, &segments_of(250));
            append(&partition, b"", &vec![7; 250 - 28 - room]);
            assert_eq!(partition.append(batch(&records)).unwrap().wait().unwrap(), 1..41);
            // As a kill leaves it at this moment.
            let killed = scratch();
            copy_dir(data.path(), killed.path());
            drop(partition);
            broker.close().unwrap();
            for (data, torn) in [(data.path(), false), (killed.path(), true)] {
                let broker = open(data, backend, &segments_of(250));
                let rows = read_all(&partition_of(&broker));
                assert_in_order(&rows, 0);
                let expected: Vec<_> = records.iter().map(|(key, value)| (key.clone().into_bytes(), value.clone().into_bytes())).collect();
                assert_eq!(contents(&rows)[1..], expected, "room for {room} bytes, killed: {torn}");
                broker.close().unwrap();
                let closed = assert_closed(&partition_dir(data), 1);
                let sizes = [250 - room as u64].into_iter().chain([45; 40]);
                let bases: Vec<_> = closed.segments.iter().map(|segment| segment.base).collect();
                assert_eq!(bases, format::segment_bases(sizes, 250, 0));
            }
        }
    });
}

#[test]
fn b100_what_is_too_large_takes_no_offset() {
    // Two halves of what a record's size cannot say. Nobody writes to this memory, so it takes none.
    let half = vec![0; 1 << 31];
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &TopicConfig { max_batch_bytes: 1024, ..small() });
        assert_eq!(append(&partition, b"", b"before"), 0);
        let mut batch = batch(&[("k", "in the batch already")]);
        let before = batch.clone();
        let error = batch.push(Some(&half), &half).unwrap_err();
        assert_eq!(error.size, 1 << 32);
        assert!(error.to_string().contains("4294967295") && batch == before, "{error}");
        let error = partition.append(Batch::of(None, &[7; 1024 - 27]).unwrap()).map(drop).unwrap_err();
        assert!(matches!(error, Error::BatchTooLarge { bytes: 1025, limit: 1024 }) && error.to_string().contains("1024"), "{error}");
        assert_eq!(partition.append(batch).unwrap().wait().unwrap(), 1..2);
        assert_eq!(append(&partition, b"", b"after"), 2);
        drop(partition);
        broker.close().unwrap();
        assert_closed(&partition_dir(data.path()), 1);
    });
}

// ---------------------------------------------------------------- room

#[test]
fn b119_hundreds_of_partitions_of_large_segments_take_little_room() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &TopicConfig::default());
        broker.create_topic(TOPIC, TopicConfig { partitions: 200, ..TopicConfig::default() }).unwrap();
        let held: u64 = bytes_in(data.path()).keys().map(|path| held(path)).sum();
        assert!(held < 200 * (64 << 10), "{held} bytes are held by nothing");
        drop(broker);
        let broker = open(data.path(), backend, &TopicConfig::default());
        assert_eq!(broker.num_partitions(TOPIC).unwrap(), 200);
        broker.close().unwrap();
        assert_sound(&data.path().join(TOPIC).join("199"));
    });
}

fn held(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).unwrap().blocks() * 512
}
