//! What goes from the front of a log, when, and what whoever reads there is told.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sapwood::clock::Clock;
use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::io::{Disk, OsDisk};
use sapwood::{Backend, Broker, BrokerConfig, Error, Partition, RetentionReport, Stepper, TopicConfig};

use crate::format::{self, Content, Layout};
use crate::oracle;
use crate::sim::{self, DATA, EIO};
use crate::support::{
    BACKENDS, TOPIC, TestClock, append, assert_in_order, bytes_in, config, partition_dir, partition_of, read_all, scratch, seed,
    segments_of,
};

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// Segments of six of [`record`]s.
fn topic() -> TopicConfig {
    TopicConfig { retention_age: Some(DAY), ..segments_of(270) }
}

/// A record of 45 bytes.
fn record(partition: &Partition) -> u64 {
    append(partition, b"user-1", b"value-00000")
}

fn open_at(disk: Arc<dyn Disk>, clock: &Arc<TestClock>, data: &Path) -> Broker {
    let clock: Arc<dyn Clock> = clock.clone();
    Broker::open_on(disk, clock, data, BrokerConfig { retention_every: None, ..config(Backend::Auto, topic()) }).unwrap()
}

/// Runs a test on both real backends and on the simulated disk, with a clock that shows the present.
fn each_disk(test: impl Fn(&dyn Fn() -> Arc<dyn Disk>, &Path, &Arc<TestClock>)) {
    let now = || Arc::new(TestClock::at(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64));
    sim::each_disk(|disk, data| test(disk, data, &now()));
}

/// Segments that are full, and an empty one behind them if the last record did not open it.
fn seal(partition: &Partition, segments: u64) {
    for _ in 0..segments * 6 {
        record(partition);
    }
    partition.roll().unwrap();
}

#[track_caller]
fn enforce(broker: &Broker) -> (usize, RetentionReport) {
    let report = broker.enforce_retention().unwrap();
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    (report.removed.iter().map(|removed| removed.segments).sum(), report)
}

#[test]
fn b078_every_pass_looks_at_what_was_sealed_since() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        for round in 1..=3 {
            seal(&partition, 3);
            clock.pass(DAY);
            assert_eq!(enforce(&broker).0, 0, "not older yet");
            clock.pass(Duration::from_nanos(1));
            let (gone, report) = enforce(&broker);
            assert_eq!((gone, partition.first_offset(), partition.next_offset()), (3, round * 18, round * 18));
            let removed = &report.removed[0];
            assert_eq!((removed.records.clone(), removed.bytes), ((round - 1) * 18..round * 18, 18 * 45));
            assert_eq!((removed.topic.as_str(), removed.partition), (TOPIC, 0));
        }
        let before = partition.first_offset();
        drop(partition);
        broker.close().unwrap();
        let broker = open_at(disk(), clock, data);
        let partition = partition_of(&broker);
        assert_eq!((partition.first_offset(), partition.next_offset()), (before, before));
        assert_eq!(record(&partition), before);
    });
}

#[test]
fn b079_the_segment_that_takes_the_appends_goes_only_after_the_next_one_began() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        for _ in 0..4 {
            record(&partition);
        }
        clock.pass(DAY);
        assert_eq!(enforce(&broker).0, 0);
        clock.pass(Duration::from_nanos(1));
        assert_eq!(enforce(&broker).0, 1);
        assert_eq!((partition.first_offset(), partition.next_offset(), partition.stats().rolls), (4, 4, 1));
        // An empty one is no older than any.
        clock.pass(YEAR);
        assert_eq!((enforce(&broker).0, partition.stats().rolls), (0, 1));
        assert_eq!(record(&partition), 4);
        assert_eq!(partition.read_one(4).unwrap().value, b"value-00000"[..]);
    });
}

#[test]
fn b081_only_what_is_older_goes_to_the_nanosecond() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        // Three segments, the newest records of which are a nanosecond apart.
        for _ in 0..3 {
            for _ in 0..6 {
                record(&partition);
            }
            clock.pass(Duration::from_nanos(1));
        }
        record(&partition);
        clock.pass(DAY - Duration::from_nanos(3));
        for gone in 0..=3 {
            assert_eq!(partition.first_offset(), gone * 6);
            enforce(&broker);
            assert_eq!(partition.first_offset(), gone * 6, "exactly as old as may be");
            clock.pass(Duration::from_nanos(1));
            enforce(&broker);
        }
    });
}

#[test]
fn the_oldest_go_while_there_is_too_much() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let by_size = TopicConfig { retention_age: None, retention_bytes: Some(3 * 270 + 45), ..topic() };
        let partition = broker.create_topic(TOPIC, by_size).unwrap().partition(0).unwrap();
        for number in 1..=100 {
            record(&partition);
            enforce(&broker);
            let held = partition.next_offset() - partition.first_offset();
            assert!(held * 45 <= 3 * 270 + 45 && held >= 13.min(number), "{held} of {number}");
            assert_eq!(partition.first_offset() % 6, 0);
        }
        let none = TopicConfig { retention_age: None, retention_bytes: Some(0), ..topic() };
        let partition = broker.create_topic("none", none).unwrap().partition(0).unwrap();
        seal(&partition, 3);
        record(&partition);
        enforce(&broker);
        assert_eq!((partition.first_offset(), partition.next_offset()), (18, 19), "the one that takes the appends stays");
    });
}

#[test]
fn b082_a_record_from_the_future_keeps_nothing_for_ever() {
    for backend in BACKENDS {
        let data = scratch();
        let dir = partition_dir(data.path());
        let far = Content { key: b"k".to_vec(), value: b"v".to_vec(), timestamp: u64::MAX };
        format::write_partition(&dir, &[far], Layout::default());
        let now = SystemTime::now();
        let clock = Arc::new(TestClock::at(now.duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64));
        let broker = open_at(Arc::new(OsDisk::new(backend).unwrap()), &clock, data.path());
        let partition = partition_of(&broker);
        partition.roll().unwrap();
        seal(&partition, 3);
        assert_eq!(partition.read_one(18).unwrap().timestamp, u64::MAX, "time does not go back");
        // The file system's word: the second of them was sealed last month.
        let log = File::options().write(true).open(format::segment_path(&dir, 1, "log")).unwrap();
        log.set_modified(now - 30 * DAY).unwrap();
        clock.pass(Duration::from_secs(60));
        assert_eq!(enforce(&broker).0, 2, "and the one before it is no younger");
        clock.pass(10 * YEAR);
        assert_eq!(enforce(&broker).0, 2);
        assert_eq!((partition.first_offset(), partition.next_offset()), (19, 19));
        assert_eq!(record(&partition), 19);
    }
}

#[test]
fn b082_a_record_from_the_future_keeps_not_even_the_segment_that_takes_the_appends_for_ever() {
    for backend in BACKENDS {
        let data = scratch();
        let dir = partition_dir(data.path());
        let start = SystemTime::now();
        let right = Arc::new(TestClock::at(start.duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64));
        let open = || open_at(Arc::new(OsDisk::new(backend).unwrap()), &right, data.path());
        // The kernel goes by the same clock.
        let modified = |base| {
            let log = File::options().write(true).open(format::segment_path(&dir, base, "log")).unwrap();
            log.set_modified(UNIX_EPOCH + Duration::from_nanos(right.wall_ns())).unwrap();
        };
        // For one append the clock is far ahead, and for another, a year later, it is right again: it fits into the same segment.
        let mut broker = open();
        broker.create_topic(TOPIC, topic()).unwrap();
        right.set(right.wall_ns() + (50 * YEAR).as_nanos() as u64);
        record(&partition_of(&broker));
        right.set(right.wall_ns() - (50 * YEAR).as_nanos() as u64);
        for year in 1..5 {
            right.pass(YEAR);
            broker.close().unwrap();
            broker = open();
            let partition = partition_of(&broker);
            assert_eq!(record(&partition), year);
            modified(if year == 1 { 0 } else { year });
            // Opening doubts the clock; then a day has not passed yet, and then it has.
            enforce(&broker);
            right.pass(2 * HOUR);
            assert_eq!(enforce(&broker).0, 0);
            assert_eq!(partition.first_offset(), if year == 1 { 0 } else { year });
            right.pass(DAY);
            assert_eq!(enforce(&broker).0, 1);
            assert_eq!((partition.first_offset(), partition.next_offset()), (year + 1, year + 1));
        }
        broker.close().unwrap();
    }
}

#[test]
fn a_log_that_the_kernel_too_saw_change_in_the_future_is_as_old_as_its_sealing() {
    for backend in BACKENDS {
        let data = scratch();
        let start = SystemTime::now();
        let clock = Arc::new(TestClock::at(start.duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64));
        let broker = open_at(Arc::new(OsDisk::new(backend).unwrap()), &clock, data.path());
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        clock.set(clock.wall_ns() + (50 * YEAR).as_nanos() as u64);
        record(&partition);
        let log = File::options().write(true).open(format::segment_path(&partition_dir(data.path()), 0, "log")).unwrap();
        log.set_modified(start + 50 * YEAR).unwrap();
        clock.set(clock.wall_ns() - (50 * YEAR).as_nanos() as u64);
        clock.pass(Duration::from_secs(600));
        assert_eq!((enforce(&broker).0, partition.stats().rolls), (0, 1));
        assert_eq!((enforce(&broker).0, partition.stats().rolls), (0, 1), "once");
        clock.pass(DAY);
        assert_eq!(enforce(&broker).0, 1);
        assert_eq!((partition.first_offset(), partition.next_offset()), (1, 1));
        assert_eq!(record(&partition), 1);
    }
}

#[test]
fn b084_a_clock_that_is_wrong_for_a_moment_takes_nothing() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        seal(&partition, 3);
        record(&partition);
        let right = clock.wall_ns();
        clock.set(right + (100 * YEAR).as_nanos() as u64);
        let (gone, report) = enforce(&broker);
        assert_eq!(gone, 0);
        assert!(report.doubted.is_some_and(|ahead| ahead > 99 * YEAR), "{:?}", report.doubted);
        clock.set(right);
        let (gone, report) = enforce(&broker);
        assert_eq!((gone, report.doubted), (0, None));
        assert_eq!((partition.first_offset(), partition.next_offset()), (0, 19));
        // One that stays there is right.
        clock.set(right + YEAR.as_nanos() as u64);
        for (step, gone) in [(Duration::ZERO, 0), (HOUR - Duration::from_secs(1), 0), (Duration::from_secs(2), 4)] {
            clock.pass(step);
            assert_eq!(enforce(&broker).0, gone, "after {step:?}");
        }
        assert_eq!((partition.first_offset(), partition.next_offset()), (19, 19));
    });
}

#[test]
fn after_opening_time_goes_on_from_the_newest_record() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        seal(&partition, 2);
        clock.pass(2 * DAY);
        seal(&partition, 2);
        drop(partition);
        broker.close().unwrap();
        clock.pass(100 * YEAR);
        let broker = open_at(disk(), clock, data);
        let partition = partition_of(&broker);
        assert_eq!(enforce(&broker).0, 2, "those that were too old when the newest record came");
        clock.pass(HOUR);
        assert_eq!(enforce(&broker).0, 2, "and the others once the clock has stayed where it is");
        assert_eq!((partition.first_offset(), partition.next_offset()), (24, 24));
    });
}

#[test]
fn b070_whoever_is_overtaken_is_told_where_the_log_begins() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        seal(&partition, 4);
        record(&partition);
        let mut reader = partition.reader().unwrap();
        let mut tail = partition.tail(0).unwrap();
        assert_eq!(reader.read(0, 100).unwrap().next_offset(), 2);
        assert_eq!(tail.next_record(None).unwrap().unwrap().offset, 0);
        partition.truncate_before(18).unwrap();
        // What it holds it may finish; then it is told, and not before anything is skipped.
        let mut next = 2;
        let told = loop {
            match reader.read(next, 100) {
                Ok(records) => {
                    assert_eq!(records.iter().next().unwrap().offset, next);
                    next = records.next_offset();
                }
                Err(error) => break error,
            }
        };
        assert!(next <= 6 && matches!(told, Error::OffsetOutOfRange { first: 18, next: 25, .. }), "{told} at {next}");
        assert_eq!(reader.read(18, 1 << 20).unwrap().len(), 6);
        let told = loop {
            match tail.next_record(Some(Duration::ZERO)) {
                Ok(record) => assert!(record.unwrap().offset < 18),
                Err(error) => break error,
            }
        };
        assert!(matches!(told, Error::OffsetOutOfRange { first: 18, .. }), "{told}");
        assert!(tail.next_batch(100, Some(Duration::ZERO)).is_err(), "it stays where it is");
        tail.seek(18).unwrap();
        assert_eq!(tail.next_record(None).unwrap().unwrap().offset, 18);
    });
}

#[test]
fn b073_an_append_on_its_way_lands_where_it_should() {
    let clock = Arc::new(TestClock::at(1_700_000_000_000_000_000));
    let sim = SimDisk::new(seed());
    let broker = open_at(Arc::new(sim.clone()), &clock, Path::new(DATA));
    let by_size = TopicConfig { retention_age: None, retention_bytes: Some(270), ..topic() };
    let partition = broker.create_topic(TOPIC, by_size).unwrap().partition(0).unwrap();
    for _ in 0..20 {
        record(&partition);
    }
    let hold = sim.hold(OpKind::Write, Some("18.log"));
    let ticket = partition.append(sapwood::Batch::of(Some(b"user-1"), b"value-00000").unwrap()).unwrap();
    hold.wait_until_held();
    assert_eq!(enforce(&broker).0, 3, "it waits for no append");
    hold.release();
    assert_eq!(ticket.wait().unwrap(), 20..21);
    assert_in_order(&read_all(&partition), 18);
    assert_eq!(partition.read_one(20).unwrap().value, b"value-00000"[..]);
    drop(partition);
    broker.close().unwrap();
    let report = oracle::check_files(&sim::files_in(&sim, &sim::dir()));
    assert_eq!((report.first_offset, report.next_offset, report.next_position), (18, 21, 135));
}

#[test]
fn b075_there_is_a_first_and_a_next_offset_at_every_moment() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let by_size = TopicConfig { retention_age: None, retention_bytes: Some(0), ..topic() };
        let partition = broker.create_topic(TOPIC, by_size).unwrap().partition(0).unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let (mut first, mut next) = (0, 0);
                    while !over.load(Ordering::Relaxed) {
                        let (first_now, next_now) = (partition.first_offset(), partition.next_offset());
                        assert!(first <= first_now && next <= next_now && first_now <= next_now);
                        (first, next) = (first_now, next_now);
                        match partition.read_one(first) {
                            Ok(record) => assert_eq!(record.offset, first),
                            Err(error) => assert!(error.is_out_of_range(), "{error}"),
                        }
                    }
                });
            }
            for round in 0..40 {
                seal(&partition, 2);
                if round % 2 == 0 {
                    enforce(&broker);
                } else {
                    partition.truncate_before(partition.next_offset()).unwrap();
                }
                assert_eq!(partition.first_offset(), partition.next_offset());
            }
            over.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn b076_a_crash_at_any_step_leaves_the_next_offset_and_a_log_without_a_gap() {
    let seed = seed();
    let filled = || {
        let clock = Arc::new(TestClock::at(1_700_000_000_000_000_000));
        let sim = SimDisk::new(seed);
        let broker = open_at(Arc::new(sim.clone()), &clock, Path::new(DATA));
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        for _ in 0..22 {
            record(&partition);
        }
        clock.pass(DAY + HOUR);
        (sim, broker, partition, clock)
    };
    let (sim, broker, _partition, _) = filled();
    let before = sim.state_changes();
    assert_eq!(enforce(&broker).0, 4);
    let points = sim.state_changes() - before;
    assert!(points > 20, "{points}");
    for point in 1..=points {
        for crash in sim::CRASHES {
            let what = format!("{crash} crash at operation {point} of {points}");
            let (sim, broker, partition, clock) = filled();
            sim.crash_at_op(point);
            let _ = broker.enforce_retention();
            let told = partition.first_offset();
            drop((partition, broker));
            sim::crash(&sim, crash);
            let broker = open_at(Arc::new(sim.clone()), &clock, Path::new(DATA));
            assert_eq!(broker.report().partitions[0].damage.len(), 0, "{what}");
            let partition = partition_of(&broker);
            let first = partition.first_offset();
            assert!(first <= told && first.is_multiple_of(6) || first == 22, "{what}: {first} of {told}");
            assert_eq!(partition.next_offset(), 22, "{what}");
            let rows = read_all(&partition);
            assert_in_order(&rows, first);
            assert_eq!(rows.len() as u64, 22 - first, "{what}");
            assert_eq!(record(&partition), 22);
            drop(partition);
            broker.close().unwrap();
            let report = oracle::check_files(&sim::files_in(&sim, &sim::dir()));
            assert!(report.wrong().is_empty(), "{what}: {:?}", report.wrong());
        }
    }
}

#[test]
fn what_cannot_be_removed_stays_readable_and_goes_with_the_next_pass() {
    let clock = Arc::new(TestClock::at(1_700_000_000_000_000_000));
    for (kind, suffix) in
        [(OpKind::RemoveFile, "06.log"), (OpKind::RemoveFile, "06.index"), (OpKind::SyncDir, ""), (OpKind::RemoveFile, "00.log")]
    {
        let sim = SimDisk::new(seed());
        let broker = open_at(Arc::new(sim.clone()), &clock, Path::new(DATA));
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        seal(&partition, 3);
        clock.pass(DAY + HOUR);
        // Upkeep syncs the directory, too: its last job is to note where the new segment begins, in a second slot at least.
        sim::until("rest", || sim::checkpoint(&sim).is_some_and(|slot| slot.base == 18 && slot.sequence > 0));
        sim.fail(Fault::next(kind, Effect::Error(EIO)).path(suffix));
        let report = broker.enforce_retention().unwrap();
        assert_eq!(report.failed.len(), 1, "{kind:?} {suffix}");
        let first = partition.first_offset();
        assert!(first < 18);
        assert_eq!(read_all(&partition).len() as u64, 18 - first);
        assert!(enforce(&broker).0 > 0);
        assert_eq!((partition.first_offset(), partition.next_offset()), (18, 18));
        assert_eq!(record(&partition), 18);
    }
}

#[test]
fn b088_a_segment_that_is_removed_under_a_read_is_read_to_the_end() {
    let clock = Arc::new(TestClock::at(1_700_000_000_000_000_000));
    let sim = SimDisk::new(seed());
    let broker = open_at(Arc::new(sim.clone()), &clock, Path::new(DATA));
    let partition = broker.create_topic(TOPIC, TopicConfig { tail_bytes: 0, ..topic() }).unwrap().partition(0).unwrap();
    seal(&partition, 3);
    clock.pass(DAY + HOUR);
    let hold = sim.hold(OpKind::Read, Some("06.log"));
    thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut reader = partition.reader().unwrap();
                    reader.read(6, 1 << 20).map(|records| records.iter().map(|record| record.value.to_vec()).collect::<Vec<_>>())
                })
            })
            .collect();
        while hold.held() < 4 {
            thread::yield_now();
        }
        assert_eq!(enforce(&broker).0, 3);
        let cut = sim.ops().iter().any(|op| op.kind == OpKind::SetLen && op.path.ends_with("00000000000000000006.log") && op.position == 0);
        assert!(!cut, "a file that a reader may hold was cut");
        hold.release();
        for reader in readers {
            match reader.join().unwrap() {
                Ok(values) => assert_eq!(values, vec![b"value-00000".to_vec(); 6]),
                Err(error) => assert!(error.is_out_of_range(), "{error}"),
            }
        }
    });
}

#[test]
fn a_broker_enforces_retention_by_itself_and_is_gone_when_it_is_dropped() {
    for backend in BACKENDS {
        let data = scratch();
        let config = || BrokerConfig { retention_every: Some(Duration::from_millis(1)), ..config(backend, topic()) };
        let by_size = TopicConfig { retention_age: None, retention_bytes: Some(600), ..topic() };
        Broker::open(data.path(), config()).unwrap().create_topic(TOPIC, by_size).unwrap();
        for round in 1..=30 {
            let broker = Broker::open(data.path(), config()).unwrap();
            let partition = partition_of(&broker);
            for _ in 0..20 {
                record(&partition);
            }
            sim::until("retention", || (partition.next_offset() - partition.first_offset()) * 45 <= 600);
            assert_eq!(partition.next_offset(), round * 20);
            if round % 2 == 0 {
                drop(partition);
                broker.close().unwrap();
            }
        }
        let broker = Broker::open(data.path(), config()).unwrap();
        broker.clone().close().unwrap();
        assert!(broker.enforce_retention().unwrap_err().is_closed());
    }
}

#[test]
fn a_second_opening_changes_nothing_after_retention() {
    each_disk(|disk, data, clock| {
        let broker = open_at(disk(), clock, data);
        let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
        seal(&partition, 3);
        record(&partition);
        partition.truncate_before(8).unwrap();
        drop(partition);
        broker.close().unwrap();
        if !data.exists() {
            return;
        }
        let before = bytes_in(data);
        for _ in 0..3 {
            let broker = open_at(disk(), clock, data);
            assert_eq!(partition_of(&broker).first_offset(), 8);
            broker.close().unwrap();
            assert_eq!(bytes_in(data), before);
        }
    });
}

#[test]
fn b037_files_of_a_segment_that_went_before_its_indexes_did_are_removed() {
    let data = scratch();
    let dir = partition_dir(data.path());
    format::write_partition(&dir, &format::demo(36), Layout { segment_bytes: 270, ..Layout::default() });
    // A power loss kept the removal of the log alone.
    fs::remove_file(format::segment_path(&dir, 0, "log")).unwrap();
    fs::write(format::segment_path(&dir, 0, "sum"), b"x").unwrap();
    let broker = crate::support::open(data.path(), Backend::Auto, &segments_of(270));
    let partition = partition_of(&broker);
    assert_eq!((partition.first_offset(), partition.next_offset()), (6, 36));
    for kind in ["index", "timeindex", "sum"] {
        assert_eq!(fs::metadata(format::segment_path(&dir, 0, kind)).unwrap_err().kind(), ErrorKind::NotFound, "{kind}");
    }
    assert!(broker.report().partitions[0].ignored.is_empty());
}

// ---------------------------------------------------------------- rolls by age

#[test]
fn b096_an_idle_partition_rolls_when_its_segment_is_old_enough_and_an_empty_one_never() {
    for (segment_bytes, ahead) in [(1 << 30, true), (4096, false)] {
        let stepper = Stepper::new(seed());
        let sim = SimDisk::new(2);
        let by_age = TopicConfig { segment_age: Some(HOUR), preallocate_bytes: 1 << 20, ..segments_of(segment_bytes) };
        let broker = Broker::open_stepped(Arc::new(sim.clone()), &stepper, DATA, config(Backend::Auto, by_age.clone())).unwrap();
        let partition = broker.create_topic(TOPIC, by_age.clone()).unwrap().partition(0).unwrap();
        let rest = |time| {
            stepper.pass(time);
            while stepper.step() {}
            partition.stats().rolls
        };
        rest(5 * HOUR);
        assert_eq!(rest(HOUR), 0, "empty");
        record(&partition);
        assert_eq!(rest(HOUR - Duration::from_millis(1)), 0);
        // The wall clock is none of its business.
        stepper.set_wall_clock(1_900_000_000_000_000_000);
        assert_eq!(rest(Duration::ZERO), 0);
        sim.clear_ops();
        assert_eq!(rest(Duration::from_millis(1)), 1);
        assert_eq!(
            sim.ops().iter().any(|op| op.kind == OpKind::Rename && op.path.ends_with("prepared.log")),
            ahead,
            "made ahead if it is worth it"
        );
        assert_eq!(rest(9 * HOUR), 1, "empty again");
        record(&partition);
        record(&partition);
        drop(partition);
        broker.close().unwrap();
        // Its age goes on when it is opened again.
        stepper.pass(HOUR / 2);
        let broker = Broker::open_stepped(Arc::new(sim.clone()), &stepper, DATA, config(Backend::Auto, by_age)).unwrap();
        let partition = partition_of(&broker);
        let rest = |time| {
            stepper.pass(time);
            while stepper.step() {}
            partition.stats().rolls
        };
        assert_eq!(rest(HOUR / 2 - Duration::from_millis(1)), 0);
        assert_eq!(rest(Duration::from_millis(1)), 1);
        assert_eq!(record(&partition), 3);
        assert_eq!(read_all(&partition).len(), 4);
    }
}

#[test]
fn a_segment_rolls_by_age_under_a_lone_producer_and_by_itself() {
    for backend in BACKENDS {
        let data = scratch();
        let by_age = TopicConfig { segment_age: Some(Duration::from_millis(5)), ..segments_of(1 << 30) };
        let (_broker, partition) = crate::support::create(data.path(), backend, &by_age);
        let mut next = 0;
        sim::until("three rolls", || {
            let batch = sapwood::Batch::of(None, &[7; 50]).unwrap();
            assert_eq!(partition.append_and_wait(batch).unwrap(), next..next + 1);
            next += 1;
            partition.stats().rolls >= 3
        });
        let rolls = partition.stats().rolls;
        record(&partition);
        sim::until("one more, of itself", || partition.stats().rolls > rolls);
        assert_eq!(read_all(&partition).len() as u64, next + 1);
    }
}

#[test]
fn a_roll_that_is_asked_for_leaves_the_next_segment_behind_durably() {
    let (sim, _broker, partition) = sim::create(seed(), &sim::tiny(4000));
    for number in 1..=5 {
        record(&partition);
        partition.roll().unwrap();
        partition.roll().unwrap();
        assert_eq!(partition.stats().rolls, number, "an empty one is the next already");
        let copy = sim.fork(3);
        copy.power_loss_keeping_nothing();
        let log = format!("{number:020}.log");
        assert!(sim::names(&copy).contains(&log), "{:?}", sim::names(&copy));
    }
    let full = sim.hold(OpKind::Create, Some("6.log"));
    drop(full);
    sim.fail(Fault::next(OpKind::Create, Effect::Error(sim::ENOSPC)).path(".log"));
    record(&partition);
    assert!(partition.roll().unwrap_err().is_disk_full());
    assert_eq!(record(&partition), 6, "the present one goes on");
    partition.roll().unwrap();
    assert_eq!(read_all(&partition).len(), 7);
}

/// Lets `remove` do what it can with no room for the next segment, where the last of four holds a record. Gives the first offset then.
fn without_room_for_the_next(remove: impl Fn(&Broker, &Partition)) -> u64 {
    let sim = SimDisk::new(seed());
    let clock = Arc::new(TestClock::at(YEAR.as_nanos() as u64));
    let broker = open_at(Arc::new(sim.clone()), &clock, Path::new(DATA));
    let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
    seal(&partition, 3);
    let end = record(&partition) + 1;
    clock.pass(2 * DAY);
    let path_suffix = Some(".log".into());
    sim.fail_by_chance(RandomFault { on: OpKind::Create, path_suffix, per_million: 1_000_000, effect: Effect::Error(sim::ENOSPC) });
    remove(&broker, &partition);
    assert_eq!(sim::names(&sim).iter().filter(|name| name.ends_with(".log")).count(), 1);
    let first = partition.first_offset();
    sim.clear_faults();
    assert_eq!(record(&partition), end);
    drop((partition, broker));
    sim.power_loss();
    let broker = open_at(Arc::new(sim.clone()), &clock, Path::new(DATA));
    let partition = partition_of(&broker);
    assert_eq!((partition.first_offset(), partition.next_offset()), (first, end + 1));
    let rows = read_all(&partition);
    assert_in_order(&rows, first);
    assert_eq!(rows.len() as u64, end + 1 - first);
    first
}

#[test]
fn what_is_too_old_goes_also_where_there_is_no_room_for_the_next_segment() {
    let first = without_room_for_the_next(|broker, _| {
        let RetentionReport { removed, failed, .. } = broker.enforce_retention().unwrap();
        assert_eq!((removed[0].segments, removed[0].records.clone()), (3, 0..18));
        assert!(failed.len() == 1 && failed[0].is_disk_full(), "{failed:?}");
    });
    assert_eq!(first, 18);
}

#[test]
fn all_that_is_there_is_truncated_also_where_there_is_no_room_for_the_next_segment() {
    let first = without_room_for_the_next(|_, partition| {
        let removed = partition.truncate_before(19).unwrap();
        assert_eq!((removed.segments, removed.records), (3, 0..19));
        assert!(read_all(partition).is_empty());
    });
    assert_eq!(first, 19);
}
