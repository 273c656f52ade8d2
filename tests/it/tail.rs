//! The end of the log: records are seen as they come, whoever waits is woken and not before, and every way to end ends the wait.

use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use sapwood::clock::Clock;
use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::io::{Disk, OsDisk};
use sapwood::{Batch, Broker, Durability, Error, Partition, Stepper, Tail, TopicConfig, Visibility};

use crate::format::Layout;
use crate::sim::{DATA, EIO, create as create_simulated, tiny};
use crate::support::{
    BACKENDS, Rng, Row, TOPIC, TestClock, append, assert_in_order, batch, config, contents, data_with_demo, open, partition_of, read_all,
    scratch, seed, segments_of, small,
};

const NO_TIME: Option<Duration> = Some(Duration::ZERO);

/// Never synced but when asked to.
const ON_DEMAND: Durability = Durability::Interval { bytes: 1 << 40, time: Duration::from_secs(3600) };

/// Runs a test on both real backends and on the simulated disk, whose writers are threads here.
pub fn each_disk(topic: &TopicConfig, test: impl Fn(Broker, Partition)) {
    for backend in BACKENDS {
        eprintln!("backend {backend:?}");
        let data = scratch();
        let (broker, partition) = crate::support::create(data.path(), backend, topic);
        test(broker, partition);
    }
    eprintln!("simulated");
    let (_sim, broker, partition) = create_simulated(seed(), topic);
    test(broker, partition);
}

/// Everything that is there now, `max_bytes` at a time.
#[track_caller]
fn take(tail: &mut Tail, max_bytes: usize) -> Vec<Row> {
    let mut rows = Vec::new();
    while let Some(records) = tail.next_batch(max_bytes, NO_TIME).unwrap() {
        assert!(!records.is_empty());
        rows.extend(records.iter().map(Row::from));
        let next = records.next_offset();
        assert_eq!(tail.position(), next);
    }
    rows
}

/// Appends one record without waiting for it.
fn queue(partition: &Partition, value: &str) {
    drop(partition.append(Batch::of(None, value.as_bytes()).unwrap()).unwrap());
}

#[test]
fn a_tail_begins_where_it_is_told_and_past_the_end_nowhere() {
    each_disk(&segments_of(270), |_broker, partition| {
        for number in 0..30 {
            append(&partition, b"key", format!("value {number}").as_bytes());
        }
        let all = read_all(&partition);
        for from in [0, 1, 13, 29, 30] {
            for max_bytes in [1, 100, 1 << 20] {
                let mut tail = partition.tail(from).unwrap();
                assert_eq!(tail.position(), from);
                assert_eq!(take(&mut tail, max_bytes), all[from as usize..]);
                assert_eq!(tail.position(), 30);
                let mut tail = partition.tail(from).unwrap();
                let rows: Vec<Row> = tail.records(NO_TIME).map(|record| record.unwrap().into()).collect();
                assert_eq!((rows, tail.position()), (all[from as usize..].to_vec(), 30));
            }
        }
        for visibility in [Visibility::Durable, Visibility::Appended] {
            for wrong in [31, u64::MAX] {
                let error = partition.tail_with(wrong, visibility).unwrap_err();
                assert!(matches!(error, Error::OffsetOutOfRange { offset, first: 0, next: 30 } if offset == wrong), "{error}");
            }
        }
        let mut tail = partition.tail(7).unwrap();
        assert!(tail.seek(31).unwrap_err().is_out_of_range());
        assert_eq!(tail.next_record(None).unwrap().unwrap().offset, 7);
        tail.seek(28).unwrap();
        assert_eq!(take(&mut tail, 1), all[28..]);
    });
}

#[test]
fn what_an_iterator_did_not_give_out_stays_for_the_tail() {
    each_disk(&small(), |_broker, partition| {
        let values: Vec<_> = (0..10).map(|number| ("", format!("{number}"))).collect();
        partition.append(batch(&values)).unwrap().wait().unwrap();
        let mut tail = partition.tail(0).unwrap();
        assert_eq!(tail.records(None).take(3).map(|record| record.unwrap().offset).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(tail.position(), 3);
        assert_eq!(tail.next_record(None).unwrap().unwrap().offset, 3);
        assert_eq!(tail.next_batch(1, None).unwrap().unwrap().iter().next().unwrap().offset, 4);
        assert_eq!(tail.records(None).next().unwrap().unwrap().offset, 5);
        tail.seek(1).unwrap();
        assert_eq!(tail.records(NO_TIME).count(), 9);
        let mut records = tail.records(NO_TIME);
        assert!(records.next().is_none());
        append(&partition, b"", b"later");
        assert!(records.next().is_none(), "once it ended it has ended");
        assert_eq!(tail.position(), 10);
    });
}

#[test]
fn no_wake_up_is_lost_however_fast_the_next_record_comes() {
    for (durability, rounds) in [(Durability::Durable, 1000), (Durability::Os, 3000)] {
        each_disk(&TopicConfig { durability, ..segments_of(64 << 10) }, |_broker, partition| {
            let mut tail = partition.tail_with(0, Visibility::Appended).unwrap();
            let (seen, was_seen) = mpsc::channel();
            let consumer = thread::spawn(move || {
                for offset in 0..rounds {
                    assert_eq!(tail.next_record(None).unwrap().unwrap().offset, offset);
                    seen.send(offset).unwrap();
                }
            });
            for offset in 0..rounds {
                // By the writer's own thread, and by this one.
                if offset % 3 == 0 {
                    queue(&partition, "x")
                } else {
                    drop(partition.append_and_wait(Batch::of(None, b"x").unwrap()))
                }
                assert_eq!(was_seen.recv(), Ok(offset));
            }
            consumer.join().unwrap();
        });
    }
}

#[test]
fn many_consumers_at_once_each_see_everything() {
    each_disk(&segments_of(16 << 10), |_broker, partition| {
        let records = 2000;
        let start = Barrier::new(9);
        thread::scope(|scope| {
            for consumer in 0..8 {
                let (partition, start) = (&partition, &start);
                scope.spawn(move || {
                    let visibility = if consumer % 2 == 0 { Visibility::Durable } else { Visibility::Appended };
                    let mut tail = partition.tail_with(0, visibility).unwrap();
                    start.wait();
                    let mut rows = Vec::new();
                    while rows.len() < records {
                        if consumer < 4 {
                            rows.push(Row::from(tail.next_record(None).unwrap().unwrap()));
                        } else {
                            rows.extend(tail.next_batch(500, None).unwrap().unwrap().iter().map(Row::from));
                        }
                    }
                    assert_in_order(&rows, 0);
                    let expected = (0..records).map(|number| (Vec::new(), format!("number {number}").into_bytes()));
                    assert!(contents(&rows).into_iter().eq(expected));
                });
            }
            start.wait();
            for number in 0..records {
                queue(&partition, &format!("number {number}"));
            }
        });
    });
}

/// How often this thread gave up its CPU by itself: to sleep, or for a lock.
fn times_slept() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap().trim().parse().unwrap()
}

#[test]
fn a_wait_ends_with_its_time_and_nothing_wakes_it_before() {
    each_disk(&TopicConfig { durability: ON_DEMAND, ..small() }, |_broker, partition| {
        append(&partition, b"", b"not durable");
        let mut tail = partition.tail(0).unwrap();
        assert!(tail.next_batch(100, NO_TIME).unwrap().is_none());
        thread::scope(|scope| {
            let (over, is_over) = mpsc::channel::<()>();
            // What it does not wait for goes on meanwhile.
            let partition = &partition;
            let producer = scope.spawn(move || {
                let mut appended = 0;
                while is_over.try_recv() == Err(mpsc::TryRecvError::Empty) {
                    append(partition, b"", b"not durable");
                    appended += 1;
                    thread::yield_now();
                }
                appended
            });
            let before = times_slept();
            assert!(tail.next_batch(100, Some(Duration::from_millis(150))).unwrap().is_none());
            assert!(tail.next_record(Some(Duration::from_millis(50))).unwrap().is_none());
            let slept = times_slept() - before;
            drop(over);
            assert!(producer.join().unwrap() > 0);
            // Two waits, and a lock now and then.
            assert!((2..=8).contains(&slept), "{slept} times");
        });
        assert_eq!(tail.position(), 0);
        partition.sync().unwrap();
        assert!(!tail.next_batch(100, Some(Duration::from_secs(60))).unwrap().unwrap().is_empty());
    });
}

#[test]
fn who_asks_for_it_sees_what_is_not_durable_yet() {
    each_disk(&TopicConfig { durability: ON_DEMAND, ..small() }, |_broker, partition| {
        let mut early = partition.tail_with(0, Visibility::Appended).unwrap();
        let mut late = partition.tail(0).unwrap();
        let waiting = thread::spawn(move || {
            let row = Row::from(late.next_record(None).unwrap().unwrap());
            (row, late.partition().durable_end())
        });
        queue(&partition, "one");
        assert_eq!(early.next_record(None).unwrap().unwrap().value, "one");
        assert_eq!(partition.durable_end(), 0);
        assert!(partition.tail(0).unwrap().next_record(NO_TIME).unwrap().is_none());
        assert!(partition.tail(1).unwrap_err().is_out_of_range());
        assert_eq!(partition.tail_with(1, Visibility::Appended).unwrap().position(), 1);
        partition.sync().unwrap();
        assert_eq!(waiting.join().unwrap().1, 1);
    });
}

/// Several tails that wait at the end, each on a thread of its own, and what each of them is told in the end.
fn waiting_tails(partition: &Partition) -> Vec<thread::JoinHandle<Error>> {
    let start = Arc::new(Barrier::new(5));
    let tails = (0..4).map(|number| {
        let visibility = if number % 2 == 0 { Visibility::Durable } else { Visibility::Appended };
        let mut tail = partition.tail_with(partition.durable_end(), visibility).unwrap();
        let timeout = (number < 2).then(|| Duration::from_secs(3600));
        let start = Arc::clone(&start);
        thread::spawn(move || {
            start.wait();
            loop {
                match tail.next_batch(100, timeout) {
                    Ok(records) => assert!(!records.unwrap().is_empty()),
                    Err(error) => {
                        let again = tail.next_record(NO_TIME).unwrap_err();
                        assert_eq!(again.to_string(), error.to_string());
                        return error;
                    }
                }
            }
        })
    });
    let tails = tails.collect();
    start.wait();
    tails
}

#[test]
fn closing_and_deleting_end_the_wait() {
    let ends: [fn(&Broker) -> sapwood::Result<()>; 3] =
        [|broker| broker.clone().close(), |broker| broker.delete_topic(TOPIC), |broker| broker.topic(TOPIC)?.close()];
    for end in ends {
        for round in 0..10 {
            each_disk(&small(), |broker, partition| {
                append(&partition, b"", b"one");
                let tails = waiting_tails(&partition);
                if round % 2 == 0 {
                    queue(&partition, "two");
                }
                end(&broker).unwrap();
                for tail in tails {
                    let error = tail.join().unwrap();
                    assert!(error.is_closed(), "{error}");
                }
                assert!(partition.tail(0).unwrap_err().is_closed());
            });
        }
    }
}

#[test]
fn a_failure_ends_the_wait_once_all_was_read() {
    for effect in [Effect::Error(EIO), Effect::ErrorAfterPartial { bytes: 4096, errno: EIO }] {
        let (sim, broker, partition) = create_simulated(seed(), &tiny(1 << 20));
        append(&partition, b"", b"one");
        append(&partition, b"", b"two");
        let mut behind = partition.tail(0).unwrap();
        let tails = waiting_tails(&partition);
        sim.fail(Fault::next(OpKind::Write, effect).path(".log"));
        let error = partition.append_and_wait(Batch::of(None, b"three").unwrap()).unwrap_err();
        assert!(error.is_failed(), "{error}");
        for tail in tails {
            assert_eq!(tail.join().unwrap().to_string(), error.to_string());
        }
        let mut records = behind.records(None);
        assert_eq!(records.next().unwrap().unwrap().value, "one");
        assert_eq!(records.next().unwrap().unwrap().value, "two");
        assert_eq!(records.next().unwrap().unwrap_err().to_string(), error.to_string());
        assert!(records.next().is_none());
        // A tail may be made of it as before.
        assert_eq!(take_until_error(&mut partition.tail(1).unwrap()), 1);
        drop(broker);
    }
}

fn take_until_error(tail: &mut Tail) -> u64 {
    tail.records(None).map_while(Result::ok).count() as u64
}

#[test]
fn a_failed_sync_ends_those_who_wait_for_it() {
    let (sim, _broker, partition) = create_simulated(seed(), &TopicConfig { durability: ON_DEMAND, ..tiny(1 << 20) });
    let tails = waiting_tails(&partition);
    append(&partition, b"", b"one");
    sim.fail(Fault::next(OpKind::Sync, Effect::Error(EIO)).path(".log"));
    assert!(partition.sync().unwrap_err().is_failed());
    for tail in tails {
        let error = tail.join().unwrap();
        assert!(error.is_failed(), "{error}");
    }
    assert_eq!(take_until_error(&mut partition.tail(0).unwrap()), 0);
    assert_eq!(take_until_error(&mut partition.tail_with(0, Visibility::Appended).unwrap()), 1);
}

#[test]
fn a_writer_that_panics_ends_the_wait() {
    let clock = Arc::new(TestClock::at(1));
    let as_clock: Arc<dyn Clock> = clock.clone();
    let disk = Arc::new(SimDisk::new(seed()));
    let broker = Broker::open_on(disk, as_clock, DATA, config(sapwood::Backend::Auto, tiny(1 << 20))).unwrap();
    broker.create_topic(TOPIC, tiny(1 << 20)).unwrap();
    let partition = partition_of(&broker);
    let tails = waiting_tails(&partition);
    clock.panic_from_now();
    queue(&partition, "one");
    for tail in tails {
        let error = tail.join().unwrap();
        assert!(matches!(&error, Error::Failed { cause, .. } if matches!(**cause, Error::WriterPanicked { .. })), "{error}");
    }
}

#[test]
fn a_damaged_record_is_told_and_can_be_gone_past() {
    let (data, dir) = data_with_demo(60, Layout { segment_bytes: 270, ..Layout::default() });
    let log = dir.join("00000000000000000000.log");
    let mut bytes = std::fs::read(&log).unwrap();
    let second = 28 + u32::from_be_bytes(bytes[8..12].try_into().unwrap()) as usize;
    bytes[second + 28] ^= 1;
    std::fs::write(&log, bytes).unwrap();
    let broker = open(data.path(), sapwood::Backend::Auto, &small());
    let partition = partition_of(&broker);
    let mut tail = partition.tail(0).unwrap();
    let mut records = tail.records(NO_TIME);
    assert_eq!(records.next().unwrap().unwrap().offset, 0);
    let error = records.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::Damaged { offset: 1, .. }), "{error}");
    assert!(records.next().is_none());
    assert_eq!(tail.position(), 1);
    tail.seek(2).unwrap();
    let rest: Vec<Row> = take(&mut tail, 1000);
    assert_in_order(&rest, 2);
    assert_eq!(rest.len(), 58);
}

#[test]
fn the_times_that_a_tail_sees_never_go_back() {
    // B091 to B093: a clock that jumps, one that falls far, one that stands, each over several rolls.
    let walls: [&[u64]; 3] = [&[100, 200, 150, 300], &[1000, 10], &[7]];
    let seen: [&[u64]; 3] = [&[100, 200, 200, 300], &[1000, 1000], &[7]];
    for simulated in [false, true] {
        for (walls, seen) in walls.into_iter().zip(seen) {
            let data = scratch();
            let disk: Arc<dyn Disk> =
                if simulated { Arc::new(SimDisk::new(3)) } else { Arc::new(OsDisk::new(sapwood::Backend::Auto).unwrap()) };
            let dir = if simulated { Path::new(DATA) } else { data.path() };
            let clock = Arc::new(TestClock::at(0));
            let as_clock: Arc<dyn Clock> = clock.clone();
            let broker = Broker::open_on(disk, as_clock, dir, config(sapwood::Backend::Auto, tiny(270))).unwrap();
            let partition = broker.create_topic(TOPIC, tiny(270)).unwrap().partition(0).unwrap();
            let mut tail = partition.tail(0).unwrap();
            for number in 0..50 {
                let at = number.min(walls.len() - 1);
                clock.set(walls[at]);
                queue(&partition, &format!("a value of some length, number {number}"));
                assert_eq!(tail.next_record(None).unwrap().unwrap().timestamp, seen[at], "record {number} of {walls:?}");
            }
            assert!(partition.stats().rolls > 3);
        }
    }
}

fn stepped(seed: u64, topic: &TopicConfig) -> (SimDisk, Stepper, Broker, Partition) {
    let (sim, stepper) = (SimDisk::new(seed), Stepper::new(seed));
    let disk = Arc::new(sim.clone());
    let broker = Broker::open_stepped(disk, &stepper, DATA, config(sapwood::Backend::Auto, TopicConfig::default())).unwrap();
    let partition = broker.create_topic(TOPIC, topic.clone()).unwrap().partition(0).unwrap();
    (sim, stepper, broker, partition)
}

#[test]
fn a_wait_without_threads_has_the_others_work() {
    let (_sim, stepper, broker, partition) = stepped(seed(), &tiny(270));
    let mut tail = partition.tail(0).unwrap();
    for number in 0..100 {
        queue(&partition, &format!("{number}"));
        assert_eq!(tail.next_record(None).unwrap().unwrap().offset, number);
    }
    // Its time is the stepper's, and while nothing happens, nothing is done: what is there ends, and then no step is taken, seldom ones
    // that stand for spurious wake-ups aside.
    stepper.settle(Duration::from_secs(60));
    let (before, began) = (stepper.steps(), stepper.clock().monotonic());
    assert!(tail.next_batch(100, Some(Duration::from_secs(1_000_000))).unwrap().is_none());
    assert_eq!(stepper.clock().monotonic() - began, Duration::from_secs(1_000_000));
    assert!(stepper.steps() - before <= 3, "{} steps", stepper.steps() - before);
    broker.close().unwrap();
    assert!(tail.next_batch(100, None).unwrap_err().is_closed());
}

#[test]
#[should_panic(expected = "nobody is left who could end this wait")]
fn a_wait_that_nobody_can_end_is_told_without_threads() {
    let (_sim, _stepper, _broker, partition) = stepped(seed(), &tiny(270));
    let _ = partition.tail(0).unwrap().next_record(None);
}

#[test]
fn tails_see_what_was_appended_whatever_the_order_of_things() {
    let first = seed();
    for seed in (first..).take(60) {
        let mut rng = Rng::new(seed);
        let time = Duration::from_millis(1 + rng.below(50));
        let durability = rng.one_of(&[Durability::Durable, Durability::Os, ON_DEMAND, Durability::Interval { bytes: 300, time }]);
        let segment_bytes = rng.one_of(&[1, 270, 4096, 1 << 20]);
        let (sim, stepper, broker, partition) = stepped(seed, &TopicConfig { durability, ..tiny(segment_bytes) });
        sim.overlap_rings(rng.below(2) == 0);
        let visible = |visibility| match visibility {
            Visibility::Durable => partition.durable_end(),
            Visibility::Appended => partition.next_offset(),
        };
        let mut tails: Vec<(Visibility, Tail, u64)> = Vec::new();
        let mut model: Vec<Vec<u8>> = Vec::new();
        for _ in 0..200 {
            match rng.below(8) {
                0..=2 => {
                    let values: Vec<_> = (0..=rng.below(4)).map(|_| rng.bytes(model.len() % 7 * 31)).collect();
                    drop(partition.append(batch(&values.iter().map(|value| ("", value)).collect::<Vec<_>>())).unwrap());
                    model.extend(values);
                }
                3 => drop((0..rng.below(20)).take_while(|_| stepper.step()).count()),
                4 if tails.len() < 5 => {
                    let visibility = rng.one_of(&[Visibility::Durable, Visibility::Appended]);
                    let from = rng.below(visible(visibility) + 1);
                    tails.push((visibility, partition.tail_with(from, visibility).unwrap(), from));
                }
                5 if rng.below(4) == 0 => partition.sync().unwrap(),
                _ if tails.is_empty() => {}
                _ => {
                    let index = rng.below(tails.len() as u64) as usize;
                    let (visibility, tail, position) = &mut tails[index];
                    let there = visible(*visibility);
                    let timeout = rng.one_of(&[NO_TIME, Some(Duration::from_millis(20)), Some(Duration::from_secs(1))]);
                    let rows: Vec<Row> = if rng.below(2) == 0 {
                        let records = tail.next_batch(1 + rng.below(300) as usize, timeout).unwrap();
                        records.iter().flat_map(|records| records.iter()).map(Row::from).collect()
                    } else {
                        let most = 1 + rng.below(5) as usize;
                        tail.records(timeout).take(most).map(|record| record.unwrap().into()).collect()
                    };
                    assert!(!rows.is_empty() || *position == there, "seed {seed}: nothing at {position} of {there}");
                    assert_in_order(&rows, *position);
                    *position += rows.len() as u64;
                    assert!(*position <= visible(*visibility), "seed {seed}: more than is to be seen");
                    for row in rows {
                        assert_eq!(row.value, model[row.offset as usize], "seed {seed}: record {}", row.offset);
                    }
                    assert_eq!(tail.position(), *position);
                }
            }
        }
        partition.sync().unwrap();
        for (_, tail, position) in &mut tails {
            assert_eq!(take(tail, 1 << 20).len() as u64, model.len() as u64 - *position, "seed {seed}");
        }
        broker.close().unwrap();
        assert!(tails.iter_mut().all(|(_, tail, _)| tail.next_record(None).unwrap_err().is_closed()));
    }
}
