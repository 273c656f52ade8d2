//! Failures met by others that no other module is about: damage in the middle of a log and between segments, and what a failed operation
//! leaves behind. The numbers are those of the project's list.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::{
    Backend, Batch, Broker, BrokerConfig, Durability, Error, Flaw, OnDamage, Partition, ReadUpTo, Reader, Recovery, TopicConfig,
};

use crate::damage::{self, Target, noise};
use crate::format::{self, BASE_TIME, Content, Layout, Slot, encode, entry, segment_path};
use crate::oracle::{assert_closed, assert_sound, scan};
use crate::recovery::{DEMO, assert_goes_on, assert_recovers};
use crate::sim::{self, EIO, ENOSPC, tiny};
use crate::support::{
    Row, TOPIC, append, assert_in_order, batch, bytes_in, config, contents, copy_dir, create, data_with, data_with_demo, each_backend,
    open, partition_dir, partition_of, read_all, read_up_to, report_of, rows_of, scratch, seed, segments_of, small,
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
fn read_on(reader: &mut Reader, mut offset: u64, max_bytes: usize) -> (Vec<Row>, Option<Error>) {
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
                assert_eq!(read_up_to(&partition, ReadUpTo::Appended, 0, 1000).len(), 1, "{what}: none of it is readable");
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
fn b069_a_reader_that_holds_the_segment_never_sees_what_a_failed_append_wrote() {
    for durability in LEVELS {
        let (sim, broker, partition) = sim::create(seed(), &TopicConfig { durability, ..tiny(1000) });
        try_append(&partition, 0).unwrap();
        partition.sync().unwrap();
        let mut readers = [ReadUpTo::Durable, ReadUpTo::Appended].map(|up_to| partition.reader_with(up_to, 4096).unwrap());
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
        for (direct, shorts) in [(true, &[512, 4096][..]), (false, &[1, 27, 28, 512, 4096])] {
            for &short in shorts {
                let sim = SimDisk::new(seed());
                sim.refuse_direct(!direct);
                let broker = sim::open(&sim);
                broker.create_topic(TOPIC, TopicConfig { commit_bytes: 1 << 16, durability, ..tiny(1 << 20) }).unwrap();
                let partition = partition_of(&broker);
                for round in 0..5u8 {
                    let records: Vec<_> = (0..20).map(|number| large(round * 20 + number)).collect();
                    sim.clear_ops();
                    sim.fail(Fault::next(OpKind::Write, Effect::Short(short)).path(".log"));
                    partition.append(batch(&records)).unwrap().wait().unwrap();
                    if durability != Durability::Durable {
                        partition.sync().unwrap();
                    }
                    let writes = sim.ops().into_iter().filter(|op| op.kind == OpKind::Write && op.path == log()).count();
                    assert!(writes >= 2, "nothing was short");
                    let lost = sim.fork(1);
                    lost.power_loss_keeping_nothing();
                    let rows = read_all(&partition_of(&sim::open(&lost)));
                    let expected: Vec<_> = (0..(round + 1) * 20).map(large).collect();
                    assert!(contents(&rows) == expected, "{durability:?}, direct {direct}, {short} bytes: {} records", rows.len());
                }
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
            assert_eq!(contents(&read_up_to(&partition, ReadUpTo::Durable, 0, max_bytes)), records, "{short} bytes at a time");
        }
        assert!(sim.ops().iter().filter(|op| op.kind == OpKind::Read).count() > 3 * 40, "nothing was short");
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
        let mut reader = partition.reader_with(ReadUpTo::Durable, 1 << 16).unwrap();
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
