//! What a power loss leaves, on the simulated disk: acknowledged records at every level's promise, at every point of a run.

use std::path::Path;
use std::time::Duration;

use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Batch, Broker, Durability, Partition, TopicConfig, Visibility};

use crate::format::segment_bases;
use crate::oracle::Found;
use crate::sim::{self, EAGAIN, EINTR, assert_closed, assert_sound_while_open, create, dir, open, tiny, try_open};
use crate::support::{Row, TOPIC, append, assert_in_order, batch, contents, partition_of, read_all, read_up_to, rows, seed};

/// No sync comes by itself within a test.
const FAR: Durability = Durability::Interval { bytes: 1 << 40, time: Duration::from_secs(3600) };

/// A record that tells its offset: 45 bytes.
fn content(offset: u64) -> (Vec<u8>, Vec<u8>) {
    (format!("user-{}", offset % 7).into_bytes(), format!("value-{offset:05}").into_bytes())
}

fn append_next(partition: &Partition, offset: u64) -> sapwood::Result<()> {
    let (key, value) = content(offset);
    let offsets = partition.append(Batch::of(Some(&key), &value).unwrap())?.wait()?;
    assert_eq!(offsets, offset..offset + 1);
    Ok(())
}

/// Opens what a crash left, and finds at least the first `acknowledged` records of the sequence, in order, and nothing else.
/// Then it goes on, and what was found stays also if the power fails again.
#[track_caller]
fn assert_survived(sim: &SimDisk, acknowledged: u64, what: &str) {
    let broker = try_open(sim, &tiny(270)).unwrap_or_else(|error| panic!("{what}: {error}"));
    let rows = if broker.topics().is_empty() { Vec::new() } else { read_all(&partition_of(&broker)) };
    let found = rows.len() as u64;
    assert!(found >= acknowledged, "{what}: {acknowledged} were acknowledged, {found} are there");
    assert_in_order(&rows, 0);
    assert_eq!(contents(&rows), (0..found).map(content).collect::<Vec<_>>(), "{what}");
    if broker.topics().is_empty() {
        broker.create_topic(TOPIC, tiny(270)).unwrap();
    }
    // What was served must not vanish by a second, harder loss.
    sim.power_loss_keeping_nothing();
    drop(broker);
    let broker = open(sim);
    assert_eq!(broker.topics(), [TOPIC], "{what}: the topic is gone after a second loss");
    assert_eq!(read_all(&partition_of(&broker)), rows, "{what}: after a second loss");
    for offset in found..found + 7 {
        append_next(&partition_of(&broker), offset).unwrap();
    }
    assert_sound_while_open(sim);
    broker.close().unwrap();
    let closed = assert_closed(sim, 1);
    assert_eq!(closed.next_offset, found + 7, "{what}");
}

#[test]
fn a_durable_record_survives_the_power_loss_right_after_its_acknowledgement() {
    let seed = seed();
    for (direct, allocate) in [(true, true), (false, true), (true, false), (false, false)] {
        for segment_bytes in [1, 100, 10_000] {
            let sim = SimDisk::new(seed);
            sim.refuse_direct(!direct);
            sim.refuse_allocate(!allocate);
            let broker = open(&sim);
            broker.create_topic(TOPIC, tiny(segment_bytes)).unwrap();
            let partition = partition_of(&broker);
            for offset in 0..10 {
                append_next(&partition, offset).unwrap();
                let what = format!("direct {direct}, allocate {allocate}, segments of {segment_bytes}, {offset}");
                let strict = sim.fork(seed + offset);
                strict.power_loss_keeping_nothing();
                assert_survived(&strict, offset + 1, &what);
                let torn = sim.fork(seed ^ offset);
                torn.tear_pages(true);
                torn.power_loss();
                assert_survived(&torn, offset + 1, &what);
            }
        }
    }
}

/// Makes a topic and appends one by one until it is done or the disk crashes. Tells how many were acknowledged, and whether all went well.
fn workload(sim: &SimDisk, topic: &TopicConfig, records: u64) -> (u64, bool) {
    let Ok(broker) = try_open(sim, &tiny(270)) else { return (0, false) };
    if broker.create_topic(TOPIC, topic.clone()).is_err() {
        return (0, false);
    }
    let partition = partition_of(&broker);
    for offset in 0..records {
        if append_next(&partition, offset).is_err() {
            return (offset, false);
        }
    }
    drop(partition);
    (records, broker.close().is_ok())
}

#[test]
fn b015_a_hundred_appends_survive_a_strict_power_loss_at_every_operation() {
    let seed = seed();
    // Direct and preallocated, where a length may grow with each write, and where nothing can be allocated ahead.
    for (direct, allocate) in [(true, true), (false, true), (true, false), (false, false)] {
        let fresh = || {
            let sim = SimDisk::new(seed);
            sim.refuse_direct(!direct);
            sim.refuse_allocate(!allocate);
            sim
        };
        let topic = TopicConfig { preallocate_bytes: 4096, ..tiny(2000) };
        let whole = fresh();
        assert_eq!(workload(&whole, &topic, 100), (100, true));
        let points = whole.state_changes();
        assert!(points > 100, "{points} operations");
        whole.power_loss_keeping_nothing();
        assert_survived(&whole, 100, "after the close");
        for point in 1..=points {
            let sim = fresh();
            sim.crash_at_op(point);
            let (acknowledged, closed) = workload(&sim, &topic, 100);
            // Index entries are written in quiet moments, so two runs differ by a few operations; and a close does not fail
            // for the indexes, which come last.
            let late = point + 10 > points;
            assert!(sim.crashed() && !closed || closed && late, "operation {point} of {points} was not reached");
            let what = format!("direct {direct}, allocate {allocate}, operation {point} of {points}");
            match point % 4 {
                0 => sim.crash_process(),
                1 => {
                    sim.tear_pages(true);
                    sim.power_loss();
                }
                _ => sim.power_loss_keeping_nothing(),
            }
            assert_survived(&sim, acknowledged, &what);
        }
    }
}

#[test]
fn every_crash_point_of_a_run_with_rolls_leaves_what_was_acknowledged() {
    let seed = seed();
    for (number, durability) in [Durability::Durable, FAR, Durability::Os].into_iter().enumerate() {
        let topic = TopicConfig { durability, ..tiny(100) };
        // The directory above is there; what opening makes in it is under test.
        let fresh = |seed| {
            let sim = SimDisk::new(seed);
            sim.make_dirs(Path::new(sim::DATA).parent().unwrap());
            sim
        };
        let whole = fresh(seed);
        assert_eq!(workload(&whole, &topic, 12), (12, true));
        let points = whole.state_changes();
        for point in 1..=points {
            for crash in ["process", "power", "strict"] {
                let sim = fresh(seed ^ point);
                sim.crash_at_op(point);
                let (acknowledged, _) = workload(&sim, &topic, 12);
                // A crash of the process alone takes nothing that was answered, at any level; a power loss only what the level says.
                let promised = match (number, crash) {
                    (0, _) | (_, "process") => acknowledged,
                    _ => 0,
                };
                match crash {
                    "process" => sim.crash_process(),
                    "power" => sim.power_loss(),
                    _ => sim.power_loss_keeping_nothing(),
                }
                assert_survived(&sim, promised, &format!("{durability:?}, {crash}, operation {point} of {points}"));
            }
        }
    }
}

#[test]
fn below_durable_records_are_seen_only_when_asked_for_until_they_are_synced() {
    for durability in [FAR, Durability::Os] {
        let (sim, broker, partition) = create(seed(), &TopicConfig { durability, ..tiny(10_000) });
        for offset in 0..10 {
            append_next(&partition, offset).unwrap();
        }
        assert_eq!((partition.next_offset(), partition.durable_end()), (10, 0), "{durability:?}");
        assert!(partition.reader().unwrap().read(0, 1 << 20).unwrap().is_empty());
        let error = partition.read_one(0).unwrap_err();
        assert!(matches!(error, sapwood::Error::OffsetOutOfRange { offset: 0, first: 0, next: 0 }), "{error}");
        assert!(partition.reader().unwrap().read(1, 1 << 20).unwrap_err().is_out_of_range());
        let seen = read_up_to(&partition, Visibility::Appended, 0, 100);
        assert_eq!(contents(&seen), (0..10).map(content).collect::<Vec<_>>());
        let lost = sim.fork(1);
        lost.power_loss_keeping_nothing();
        assert_survived(&lost, 0, "before the sync");

        partition.sync().unwrap();
        assert_eq!((partition.next_offset(), partition.durable_end()), (10, 10));
        assert_eq!(read_all(&partition), seen);
        append_next(&partition, 10).unwrap();
        assert_eq!((partition.next_offset(), partition.durable_end()), (11, 10));
        assert_eq!(read_all(&partition), seen);
        let kept = sim.fork(2);
        kept.power_loss_keeping_nothing();
        assert_survived(&kept, 10, "after the sync");

        // A clean close syncs.
        drop(partition);
        broker.close().unwrap();
        sim.power_loss_keeping_nothing();
        assert_survived(&sim, 11, "after the close");
    }
}

#[test]
fn an_interval_syncs_after_its_bytes_and_after_its_time() {
    let far = Duration::from_secs(3600);
    for (bytes, time) in [(1000, far), (1 << 40, Duration::from_millis(1))] {
        let (sim, _broker, partition) = create(seed(), &TopicConfig { durability: Durability::Interval { bytes, time }, ..tiny(1 << 20) });
        let hold = sim.hold(OpKind::Sync, Some(".log"));
        let mut appended = 0;
        // Appends are answered although the sync hangs; once it goes through, they are durable.
        while appended * 45 <= 2 * 1000 && hold.held() == 0 {
            append_next(&partition, appended).unwrap();
            appended += 1;
        }
        hold.wait_until_held();
        assert!(time != far || appended * 45 >= 1000, "synced after {appended} records");
        assert_eq!(partition.durable_end(), 0);
        hold.release();
        while partition.durable_end() == 0 {
            std::thread::yield_now();
        }
        let durable = partition.durable_end();
        let lost = sim.fork(3);
        lost.power_loss_keeping_nothing();
        assert_survived(&lost, durable, "after the interval's sync");
    }
}

#[test]
fn b057_nothing_is_seen_before_it_is_durable() {
    for direct in [true, false] {
        for crash in [false, true] {
            let sim = SimDisk::new(seed());
            sim.refuse_direct(!direct);
            let broker = open(&sim);
            broker.create_topic(TOPIC, tiny(10_000)).unwrap();
            let partition = partition_of(&broker);
            append_next(&partition, 0).unwrap();
            let hold = sim.hold(OpKind::Write, Some(".log"));
            let (key, value) = content(1);
            let ticket = partition.append(Batch::of(Some(&key), &value).unwrap()).unwrap();
            hold.wait_until_held();
            let mut reader = partition.reader().unwrap();
            for _ in 0..20 {
                assert!(reader.read(1, 1 << 20).unwrap().is_empty());
                assert_eq!(reader.read(0, 1 << 20).unwrap().iter().count(), 1);
                assert_eq!(partition.durable_end(), 1);
            }
            if crash {
                sim.power_loss_keeping_nothing();
                hold.release();
                assert!(ticket.wait().is_err());
                drop((reader, partition, broker));
                assert_survived(&sim, 1, "power lost before the write was");
            } else {
                hold.release();
                assert_eq!(ticket.wait().unwrap(), 1..2);
                assert_eq!(
                    reader.read(1, 1 << 20).unwrap().iter().map(Row::from).map(|row| (row.key, row.value)).collect::<Vec<_>>(),
                    [content(1)]
                );
            }
        }
    }
}

#[test]
fn b098_the_old_segment_is_synced_before_the_new_one_acknowledges() {
    for durability in [FAR, Durability::Os, Durability::Durable] {
        let seed = seed();
        let (sim, _broker, partition) = create(seed, &TopicConfig { durability, ..tiny(270) });
        for offset in 0..40 {
            append_next(&partition, offset).unwrap();
            let base = offset / 6 * 6;
            if offset == base && base > 0 {
                let old = dir().join(format!("{:020}.log", base - 6));
                let ops: Vec<_> = sim.ops().into_iter().filter(|op| op.path == old).collect();
                let last_write = ops.iter().rposition(|op| op.kind == OpKind::Write).unwrap();
                let synced = ops[last_write..].iter().any(|op| op.kind == OpKind::Sync);
                assert!(
                    synced || durability == Durability::Durable,
                    "{durability:?}: {old:?} was not synced before {offset} was acknowledged"
                );
            }
            // Whatever the new segment loses, the old ones are whole: no gap.
            let lost = sim.fork(seed ^ offset);
            lost.power_loss_keeping_nothing();
            assert_survived(&lost, if durability == Durability::Durable { offset + 1 } else { base }, "after a roll");
        }
    }
}

#[test]
fn what_recovery_serves_is_durable_first() {
    for durability in [FAR, Durability::Os] {
        let seed = seed();
        let (sim, broker, partition) = create(seed, &TopicConfig { durability, ..tiny(270) });
        for offset in 0..10 {
            append_next(&partition, offset).unwrap();
        }
        // The process dies, the kernel has it all, the disk has not.
        sim.crash_process();
        drop((partition, broker));
        let broker = open(&sim);
        let served = read_all(&partition_of(&broker));
        assert_eq!(served.len(), 10);
        sim.power_loss_keeping_nothing();
        drop(broker);
        assert_eq!(read_all(&partition_of(&open(&sim))), served);
    }
}

#[test]
fn short_and_interrupted_transfers_change_nothing() {
    let seed = seed();
    let record = |number: usize| (vec![b'k'; number % 40], vec![number as u8; [0, 1, 27, 28, 29, 100, 5000, 20_000][number % 8]]);
    let run = |sim: &SimDisk| {
        let broker = open(sim);
        broker.create_topic(TOPIC, TopicConfig { segment_bytes: 30_000, ..tiny(1) }).unwrap();
        let partition = partition_of(&broker);
        for number in 0..40 {
            let some = [record(number), record(number + 1), record(number + 2)];
            partition.append(batch(&some)).unwrap().wait().unwrap();
            assert_eq!(partition.read_one(3 * number as u64 + 1).unwrap().value, some[1].1);
        }
        let rows = read_all(&partition);
        drop(partition);
        broker.close().unwrap();
        contents(&rows)
    };
    let plain = SimDisk::new(seed);
    let expected = run(&plain);
    let bases = |sim: &SimDisk| assert_closed(sim, 1).segments.iter().map(|segment| (segment.base, segment.log_len)).collect::<Vec<_>>();
    for effect in [Effect::ShortBySeed, Effect::Short(4096), Effect::Error(EINTR), Effect::Error(EAGAIN)] {
        for direct in [true, false] {
            let sim = SimDisk::new(seed);
            sim.refuse_direct(!direct);
            for on in [OpKind::Read, OpKind::Write] {
                sim.fail_by_chance(sapwood::io::sim::RandomFault { on, path_suffix: None, per_million: 300_000, effect });
            }
            assert_eq!(run(&sim), expected, "{effect:?}, direct {direct}");
            sim.clear_faults();
            assert_eq!(bases(&sim), bases(&plain));
            let broker = open(&sim);
            assert_eq!(contents(&read_all(&partition_of(&broker))), expected);
        }
    }
}

#[test]
fn one_durable_write_carries_a_commit() {
    // No write that is followed by a sync: data and durability in one operation, whatever the commit's size.
    let (sim, _broker, partition) = create(seed(), &tiny(1 << 20));
    append_next(&partition, 0).unwrap();
    for offset in 1..30 {
        sim.clear_ops();
        append_next(&partition, offset).unwrap();
        let ops: Vec<_> = sim.ops().into_iter().filter(|op| op.path.extension().is_some_and(|extension| extension == "log")).collect();
        let writes = ops.iter().filter(|op| op.kind == OpKind::Write).count();
        let syncs = ops.iter().filter(|op| op.kind == OpKind::Sync).count();
        assert_eq!((writes, syncs), (1, 0), "{ops:#?}");
    }
}

#[test]
fn a_lost_index_costs_nothing() {
    // Indexes are never synced on the commit path: after a strict power loss they are gone or short, and made anew.
    let seed = seed();
    let (sim, broker, partition) = create(seed, &tiny(270));
    for offset in 0..20 {
        append_next(&partition, offset).unwrap();
    }
    let before = read_all(&partition);
    drop(partition);
    sim.power_loss_keeping_nothing();
    drop(broker);
    let broker = open(&sim);
    let partition = partition_of(&broker);
    for row in &before {
        assert_eq!(Row::from(partition.read_one(row.offset).unwrap()), *row);
    }
    drop(partition);
    broker.close().unwrap();
    assert_eq!(rows(&assert_closed(&sim, 1).records), before);
}

#[test]
fn a_created_topic_is_whole_or_absent_at_every_crash_point() {
    let seed = seed();
    let topic = TopicConfig { partitions: 3, index_interval: 5, ..tiny(270) };
    let make = |sim: &SimDisk| -> sapwood::Result<()> {
        let broker = try_open(sim, &tiny(270))?;
        broker.create_topic("other", tiny(270))?;
        broker.create_topic(TOPIC, topic.clone()).map(drop)
    };
    let whole = SimDisk::new(seed);
    make(&whole).unwrap();
    let points = whole.state_changes();
    for point in 1..=points {
        for crash in ["process", "power", "strict"] {
            let sim = SimDisk::new(seed ^ point);
            sim.crash_at_op(point);
            let made = make(&sim).is_ok();
            match crash {
                "process" => sim.crash_process(),
                "power" => sim.power_loss(),
                _ => sim.power_loss_keeping_nothing(),
            }
            let what = format!("{crash}, operation {point} of {points}");
            let broker = try_open(&sim, &tiny(270)).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_topics_are_whole(&sim, &broker, &topic, &what);
            assert!(!made || broker.topics().contains(&TOPIC.to_owned()), "{what}: it was there");
        }
    }
}

/// The topic is there with all it has or not at all, nothing hidden is left, and its name works.
fn assert_topics_are_whole(sim: &SimDisk, broker: &Broker, topic: &TopicConfig, what: &str) {
    use sapwood::io::Disk;
    if broker.topics().iter().any(|name| name == TOPIC) {
        assert_eq!(broker.topic(TOPIC).unwrap().config(), *topic, "{what}");
    } else {
        broker.create_topic(TOPIC, topic.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    assert_eq!(broker.num_partitions(TOPIC).unwrap(), 3);
    for number in 0..3 {
        let partition = broker.topic(TOPIC).unwrap().partition(number).unwrap();
        let next = partition.next_offset();
        assert_eq!(append(&partition, b"k", b"v"), next, "{what}");
    }
    let names: Vec<_> = sim.clone().list(Path::new(sim::DATA)).unwrap().into_iter().map(|entry| entry.name).collect();
    let hidden: Vec<_> = names.iter().filter(|name| name.to_str().unwrap().starts_with('.') && *name != ".lock").collect();
    assert!(hidden.is_empty(), "{what}: {hidden:?} is left");
}

#[test]
fn b086_a_deleted_topic_is_whole_or_gone_at_every_crash_point() {
    let seed = seed();
    let topic = TopicConfig { partitions: 3, ..tiny(100) };
    let prepared = SimDisk::new(seed);
    let broker = open(&prepared);
    broker.create_topic(TOPIC, topic.clone()).unwrap();
    for number in 0..3 {
        let partition = broker.topic(TOPIC).unwrap().partition(number).unwrap();
        for offset in 0..8 {
            append_next(&partition, offset).unwrap();
        }
    }
    broker.close().unwrap();
    let delete = |sim: &SimDisk| -> sapwood::Result<()> { try_open(sim, &tiny(270))?.delete_topic(TOPIC) };
    let whole = prepared.fork(1);
    let before = whole.state_changes();
    delete(&whole).unwrap();
    let points = whole.state_changes() - before;
    assert!(points > 30, "{points} operations");
    for point in 1..=points {
        for crash in ["process", "power", "strict"] {
            let sim = prepared.fork(seed ^ point);
            sim.crash_at_op(point);
            let deleted = delete(&sim).is_ok();
            match crash {
                "process" => sim.crash_process(),
                "power" => sim.power_loss(),
                _ => sim.power_loss_keeping_nothing(),
            }
            let what = format!("{crash}, operation {point} of {points}");
            let broker = try_open(&sim, &tiny(270)).unwrap_or_else(|error| panic!("{what}: {error}"));
            if broker.topics().is_empty() {
                assert_topics_are_whole(&sim, &broker, &topic, &what);
                assert_eq!(broker.next_offset(TOPIC, 0).unwrap(), 1, "{what}: nothing old comes back");
            } else {
                assert!(!deleted, "{what}: it was gone");
                for number in 0..3 {
                    let rows = read_all(&broker.topic(TOPIC).unwrap().partition(number).unwrap());
                    assert_eq!(contents(&rows), (0..8).map(content).collect::<Vec<_>>(), "{what}");
                }
                assert_topics_are_whole(&sim, &broker, &topic, &what);
            }
        }
    }
}

#[test]
fn segments_end_at_the_exact_byte() {
    // Records of 45 bytes that fit to the byte, and by one byte do not; one by one, and in one batch.
    for segment_bytes in (43..=47).chain(88..=92).chain(133..=137).chain(4094..=4097) {
        let (sim, broker, partition) = create(1, &tiny(segment_bytes));
        for offset in 0..3 {
            append_next(&partition, offset).unwrap();
        }
        partition.append(batch(&(3..93).map(content).collect::<Vec<_>>())).unwrap().wait().unwrap();
        drop(partition);
        broker.close().unwrap();
        let bases: Vec<_> = assert_closed(&sim, 1).segments.iter().map(|segment| segment.base).collect();
        assert_eq!(bases, segment_bases([45; 93], segment_bytes, 0), "segments of {segment_bytes}");
    }
}

#[test]
fn writes_stay_inside_what_was_allocated_and_segments_inside_their_size() {
    let (sim, broker, partition) = create(seed(), &TopicConfig { preallocate_bytes: 8192, ..tiny(20_000) });
    for offset in 0..1000 {
        append_next(&partition, offset).unwrap();
    }
    drop(partition);
    broker.close().unwrap();
    let report = assert_closed(&sim, 1);
    assert!(report.segments.iter().all(|segment| segment.log_len <= 20_000));
    let bytes: u64 = report.records.iter().map(Found::bytes).sum();
    assert_eq!((report.next_offset, bytes), (1000, 45_000));
}

#[test]
fn a_crash_in_the_middle_of_a_write_leaves_the_records_before_it() {
    let seed = seed();
    for round in 0..40 {
        let (sim, broker, partition) = create(seed ^ round, &tiny(1 << 16));
        let before = 1 + round % 9;
        for offset in 0..before {
            append_next(&partition, offset).unwrap();
        }
        sim.tear_pages(round % 2 == 0);
        sim.fail(Fault::next(OpKind::Write, Effect::Crash).path(".log"));
        let lost: Vec<_> = (before..before + 50).map(content).collect();
        assert!(partition.append(batch(&lost)).and_then(sapwood::Ticket::wait).is_err());
        if round % 3 == 0 {
            sim.crash_process()
        } else {
            sim.power_loss()
        }
        drop((partition, broker));
        assert_survived(&sim, before, "a write was in flight");
    }
}
