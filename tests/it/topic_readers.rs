//! Several partitions at once: in the order of time, and as records come.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Backend, Batch, Broker, Durability, Error, Stepper, Topic, TopicConfig, TopicTail, Visibility};

use crate::damage::Target;
use crate::format::{self, Content, Layout};
use crate::sim::{DATA, EIO, tiny, try_open};
use crate::support::{BACKENDS, Rng, Row, TOPIC, append, batch, config, each_backend, open, read_all, scratch, seed, small};

const NO_TIME: Option<Duration> = Some(Duration::ZERO);

/// A topic of so many partitions on both real backends and on the simulated disk.
fn each_disk(partitions: u32, test: impl Fn(Broker, Topic)) {
    let settings = TopicConfig { partitions, segment_bytes: 1000, ..tiny(1000) };
    for backend in BACKENDS {
        eprintln!("backend {backend:?}");
        let data = scratch();
        let broker = open(data.path(), backend, &settings);
        let topic = broker.create_topic(TOPIC, settings.clone()).unwrap();
        test(broker, topic);
    }
    eprintln!("simulated");
    let broker = try_open(&SimDisk::new(1), &settings).unwrap();
    let topic = broker.create_topic(TOPIC, settings.clone()).unwrap();
    test(broker, topic);
}

/// A topic whose partitions another hand wrote, with times that never go back in each and are often the same; one of them is empty.
fn data_with_times(data: &Path, rng: &mut Rng, partitions: u64) -> Vec<(u32, Row)> {
    let mut all = Vec::new();
    for number in 0..partitions {
        let mut time = rng.below(20);
        let count = if number == 1 { 0 } else { 20 + rng.below(80) };
        let contents: Vec<_> = (0..count)
            .map(|_| {
                time += rng.below(3);
                Content::new(b"key", &rng.bytes(rng.clone().below(40) as usize), time)
            })
            .collect();
        let dir = data.join(TOPIC).join(number.to_string());
        format::write_partition(&dir, &contents, Layout { segment_bytes: 500, ..Layout::default() });
        all.extend(crate::support::rows_of(&contents, 0).into_iter().map(|row| (number as u32, row)));
    }
    all.sort_by_key(|(partition, row)| (row.timestamp, *partition, row.offset));
    all
}

#[test]
fn a_merge_is_in_the_order_of_time_and_of_partitions() {
    let seed = seed();
    each_backend(|backend| {
        for partitions in [1, 2, 5] {
            let mut rng = Rng::new(seed);
            let data = scratch();
            let all = data_with_times(data.path(), &mut rng, partitions);
            let broker = open(data.path(), backend, &small());
            let topic = broker.topic(TOPIC).unwrap();
            let merged = |times: (std::ops::Bound<u64>, std::ops::Bound<u64>)| -> Vec<(u32, Row)> {
                topic.merged(times).unwrap().map(|record| record.unwrap()).map(|(partition, record)| (partition, record.into())).collect()
            };
            use std::ops::Bound::{Excluded, Included, Unbounded};
            assert_eq!(merged((Unbounded, Unbounded)), all);
            for _ in 0..20 {
                let (from, to) = (rng.below(120), rng.below(120));
                let between = all.iter().filter(|(_, row)| from <= row.timestamp && row.timestamp < to);
                assert!(merged((Included(from), Excluded(to))).iter().eq(between), "{from}..{to}");
                let until = all.iter().filter(|(_, row)| row.timestamp <= to);
                assert!(merged((Unbounded, Included(to))).iter().eq(until), "..={to}");
            }
            broker.close().unwrap();
            assert!(topic.merged(..).unwrap_err().is_closed());
        }
    });
}

#[test]
fn a_merge_ends_where_the_log_ended_when_it_was_made() {
    each_disk(3, |_broker, topic| {
        for number in 0..3 {
            append(&topic.partition(number).unwrap(), b"", b"before");
        }
        let mut merged = topic.merged(..).unwrap();
        for number in 0..3 {
            append(&topic.partition(number).unwrap(), b"", b"after");
        }
        let mut seen = Vec::new();
        while let Some((partition, record)) = merged.next_record().unwrap() {
            assert_eq!(record.value, "before");
            seen.push(partition);
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2]);
        assert_eq!(merged.skip_damaged().unwrap(), None, "nothing is damaged");
    });
}

#[test]
fn a_merge_goes_past_damage_by_name_alone() {
    let seed = seed();
    each_backend(|backend| {
        let data = scratch();
        let all = data_with_times(data.path(), &mut Rng::new(seed), 4);
        let broker = open(data.path(), backend, &small());
        let topic = broker.topic(TOPIC).unwrap();
        let mut lost = Vec::new();
        for (partition, name) in [(0, "flip-value-byte"), (2, "hole-in-the-middle"), (3, "size-huge")] {
            let target = Target::number(&data.path().join(TOPIC).join(partition.to_string()), 1);
            target.damage(name, target.middle());
            lost.push((partition, target.middle().offset));
        }
        let whole = all.iter().filter(|(partition, row)| !lost.contains(&(*partition, row.offset)));
        let mut merged = topic.merged(..).unwrap();
        let (mut rows, mut skipped) = (Vec::new(), Vec::new());
        loop {
            match merged.next_record() {
                Ok(None) => break,
                Ok(Some((partition, record))) => {
                    rows.push((partition, Row::from(record)));
                    assert_eq!(merged.skip_damaged().unwrap(), None);
                }
                Err(error) => {
                    assert!(error.is_damage(), "{error}");
                    assert_eq!(merged.next_record().unwrap_err().to_string(), error.to_string());
                    let (partition, what) = merged.skip_damaged().unwrap().unwrap();
                    assert_eq!(what.records.end - what.records.start, 1);
                    skipped.push((partition, what.records.start));
                }
            }
        }
        skipped.sort_unstable();
        assert_eq!(skipped, lost);
        assert!(rows.iter().eq(whole));
        // As an iterator it ends there.
        let mut merged = topic.merged(..).unwrap();
        assert!(merged.by_ref().last().unwrap().unwrap_err().is_damage());
        assert!(merged.next().is_none());
    });
}

/// Everything that is there now.
fn take(tail: &mut TopicTail, max_bytes: usize) -> BTreeMap<u32, Vec<Row>> {
    let mut rows: BTreeMap<u32, Vec<Row>> = BTreeMap::new();
    while let Some((partition, records)) = tail.next_batch(max_bytes, NO_TIME).unwrap() {
        assert!(!records.is_empty());
        rows.entry(partition).or_default().extend(records.iter().map(Row::from));
    }
    rows
}

fn from_the_start(topic: &Topic) -> TopicTail {
    topic.tail(topic.partitions().iter().map(|partition| partition.first_offset())).unwrap()
}

#[test]
fn a_tail_of_a_topic_takes_what_is_there_in_turns() {
    each_disk(3, |_broker, topic| {
        for number in 0..30 {
            append(&topic.partition(number % 2).unwrap(), b"key", format!("value {number}").as_bytes());
        }
        let all: Vec<_> = topic.partitions().iter().map(read_all).collect();
        for max_bytes in [1, 100, 1 << 20] {
            let mut tail = from_the_start(&topic);
            let rows = take(&mut tail, max_bytes);
            assert_eq!(rows.into_iter().collect::<Vec<_>>(), [(0, all[0].clone()), (1, all[1].clone())]);
            assert_eq!(tail.positions(), [15, 15, 0]);
        }
        // Nobody is kept waiting by the one before.
        let mut tail = from_the_start(&topic);
        let turns: Vec<u32> = (0..6).map(|_| tail.next_record(NO_TIME).unwrap().unwrap().0).collect();
        assert_eq!(turns, [0, 1, 0, 1, 0, 1]);
        let mut tail = topic.tail([3, 15, 0]).unwrap();
        assert_eq!(tail.next_record(None).unwrap().unwrap().1.offset, 3);
        tail.tail_of(1).unwrap().seek(14).unwrap();
        assert_eq!(tail.next_record(None).unwrap().map(|(partition, record)| (partition, record.offset)), Some((1, 14)));
        for wrong in [vec![0, 0], vec![0, 0, 0, 0], vec![]] {
            let given = wrong.len() as u64;
            let error = topic.tail(wrong).unwrap_err();
            assert!(matches!(error, Error::InvalidConfig { value, minimum: 3, maximum: 3, .. } if value == given), "{error}");
        }
        assert!(topic.tail([0, 16, 0]).unwrap_err().is_out_of_range());
        assert!(matches!(tail.tail_of(3).unwrap_err(), Error::PartitionNotFound { partition: 3, partitions: 3, .. }));
    });
}

#[test]
fn no_wake_up_is_lost_whichever_partition_the_next_record_comes_to() {
    let seed = seed();
    each_disk(4, |_broker, topic| {
        let rounds = 800;
        let mut tail = from_the_start(&topic);
        let (seen, was_seen) = mpsc::channel();
        let consumer = thread::spawn(move || {
            for _ in 0..rounds {
                let (partition, record) = tail.next_record(None).unwrap().unwrap();
                seen.send((partition, record.value)).unwrap();
            }
        });
        let mut rng = Rng::new(seed);
        for round in 0..rounds {
            let (partition, value) = (rng.below(4) as u32, format!("round {round}"));
            drop(topic.partition(partition).unwrap().append(Batch::of(None, value.as_bytes()).unwrap()).unwrap());
            // The next one only once this one was seen.
            assert_eq!(was_seen.recv().unwrap(), (partition, value.into()));
        }
        consumer.join().unwrap();
    });
}

#[test]
fn all_partitions_are_followed_while_they_grow() {
    each_disk(3, |_broker, topic| {
        let each = 200u64;
        thread::scope(|scope| {
            for partition in topic.partitions() {
                scope.spawn(move || {
                    for number in 0..each {
                        drop(partition.append(Batch::of(None, &number.to_be_bytes()).unwrap()).unwrap());
                    }
                });
            }
            let mut tail = from_the_start(&topic);
            let mut next = [0u64; 3];
            while next != [each; 3] {
                let (partition, records) = tail.next_batch(500, None).unwrap().unwrap();
                for record in &records {
                    let next = &mut next[partition as usize];
                    assert_eq!((record.offset, record.value), (*next, &next.to_be_bytes()[..]));
                    *next += 1;
                }
            }
            assert_eq!(tail.positions(), next);
            assert!(tail.next_batch(500, Some(Duration::from_millis(20))).unwrap().is_none());
        });
    });
}

#[test]
fn who_asks_for_it_sees_what_is_not_durable_yet_in_any_partition() {
    let data = scratch();
    let durability = Durability::Interval { bytes: 1 << 40, time: Duration::from_secs(3600) };
    let settings = TopicConfig { partitions: 2, durability, ..small() };
    let broker = open(data.path(), Backend::Auto, &settings);
    let topic = broker.create_topic(TOPIC, settings).unwrap();
    append(&topic.partition(1).unwrap(), b"", b"one");
    let mut early = topic.tail_with([0, 0], Visibility::Appended).unwrap();
    let mut late = from_the_start(&topic);
    assert_eq!(early.next_record(None).unwrap().unwrap().1.value, "one");
    assert!(late.next_record(NO_TIME).unwrap().is_none());
    topic.partition(1).unwrap().sync().unwrap();
    assert_eq!(late.next_record(None).unwrap().unwrap().0, 1);
}

#[test]
fn closing_and_deleting_end_the_wait_for_all() {
    for deletes in [false, true] {
        each_disk(3, |broker, topic| {
            let start = Arc::new(Barrier::new(2));
            let (mut tail, ready) = (from_the_start(&topic), Arc::clone(&start));
            let waiting = thread::spawn(move || {
                ready.wait();
                tail.next_batch(100, None).map(|records| records.is_some()).unwrap_err()
            });
            start.wait();
            if deletes {
                broker.delete_topic(TOPIC).unwrap()
            } else {
                broker.close().unwrap()
            }
            let error = waiting.join().unwrap();
            assert!(error.is_closed(), "{error}");
        });
    }
}

#[test]
fn a_partition_that_failed_keeps_no_other_from_being_read() {
    let sim = SimDisk::new(1);
    let settings = TopicConfig { partitions: 3, ..tiny(1 << 20) };
    let broker = try_open(&sim, &settings).unwrap();
    let topic = broker.create_topic(TOPIC, settings).unwrap();
    for partition in topic.partitions() {
        append(&partition, b"", b"one");
    }
    let mut tail = from_the_start(&topic);
    sim.fail(Fault::next(OpKind::Write, Effect::Error(EIO)).path(".log"));
    let error = topic.partition(0).unwrap().append_and_wait(Batch::of(None, b"two").unwrap()).unwrap_err();
    assert!(error.is_failed(), "{error}");
    // What was there is read first, of the one that failed, too.
    let mut seen: Vec<_> = (0..3).map(|_| tail.next_record(NO_TIME).unwrap().unwrap().0).collect();
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2]);
    for _ in 0..2 {
        assert_eq!(tail.next_batch(100, None).map(drop).unwrap_err().to_string(), error.to_string());
        append(&topic.partition(2).unwrap(), b"", b"more");
        assert_eq!(tail.next_record(None).unwrap().unwrap().0, 2);
    }
}

#[test]
fn a_wait_for_several_without_threads_has_the_others_work() {
    for seed in 0..30 {
        let (sim, stepper) = (SimDisk::new(seed), Stepper::new(seed));
        let settings = TopicConfig { partitions: 3, ..tiny(270) };
        let broker = Broker::open_stepped(Arc::new(sim), &stepper, DATA, config(Backend::Auto, settings.clone())).unwrap();
        let topic = broker.create_topic(TOPIC, settings).unwrap();
        let mut tail = from_the_start(&topic);
        assert!(tail.next_record(Some(Duration::from_secs(1))).unwrap().is_none());
        let mut rng = Rng::new(seed);
        let mut sent = BTreeMap::new();
        for number in 0..60u64 {
            let partition = rng.below(3) as u32;
            drop(topic.partition(partition).unwrap().append(batch(&[("", number.to_be_bytes())])).unwrap());
            sent.entry(partition).or_insert_with(Vec::new).push(number.to_be_bytes().to_vec());
            if rng.below(4) == 0 {
                let (partition, record) = tail.next_record(None).unwrap().unwrap();
                assert_eq!(record.value, sent[&partition][record.offset as usize]);
            }
        }
        while tail.positions().iter().sum::<u64>() < 60 {
            let (partition, record) = tail.next_record(None).unwrap().unwrap();
            assert_eq!(record.value, sent[&partition][record.offset as usize]);
        }
        assert!(tail.next_record(Some(Duration::from_secs(1))).unwrap().is_none());
        broker.close().unwrap();
    }
}
