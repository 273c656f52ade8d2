//! Many producers on one partition: each one's order, one sequence of offsets, group commit.

use std::sync::Arc;
use std::thread;

use sapwood::io::OsDisk;
use sapwood::{Batch, Broker, Ticket, TopicConfig};

use crate::oracle::{assert_closed, assert_sound_while_open};
use crate::support::{
    Rng, TOPIC, TestClock, append, assert_in_order, config, create, each_backend, open, partition_dir, partition_of, read_all, scratch,
    seed, small,
};

const PRODUCERS: u64 = 8;
const BATCHES: u64 = 60;

#[test]
fn offsets_are_contiguous_and_each_producer_keeps_its_order() {
    let seed = seed();
    each_backend(|backend| {
        for (segment_bytes, linger_us, queue_batches) in [(1 << 30, 0, 1024), (3000, 0, 2), (3000, 200, 1024)] {
            let data = scratch();
            let topic = TopicConfig { segment_bytes, linger_us, queue_batches, commit_bytes: 8192, ..small() };
            let (broker, partition) = create(data.path(), backend, &topic);
            let produce = |producer: u64| {
                let mut rng = Rng::new(seed ^ producer);
                let mut sequence = 0u64;
                let (mut sent, mut open) = (Vec::new(), Vec::new());
                let mut before = 0;
                let mut wait = |open: &mut Vec<Ticket>| {
                    for ticket in open.drain(..) {
                        let range = ticket.wait().unwrap();
                        assert!(range.start >= before && range.end > range.start, "{range:?} after {before}");
                        before = range.end;
                    }
                };
                for _ in 0..BATCHES {
                    let mut batch = Batch::new();
                    for _ in 0..=rng.below(4) {
                        let len = rng.below(200) as usize;
                        let value = [&sequence.to_be_bytes()[..], &rng.bytes(len)].concat();
                        batch.push(Some(&producer.to_be_bytes()), &value).unwrap();
                        sent.push(value);
                        sequence += 1;
                    }
                    open.push(partition.append(batch).unwrap());
                    // Some wait often, some run ahead.
                    if rng.below(1 + producer) == 0 {
                        wait(&mut open);
                    }
                }
                wait(&mut open);
                sent
            };
            let produce = &produce;
            let sent: Vec<Vec<Vec<u8>>> = thread::scope(|scope| {
                let threads: Vec<_> = (0..PRODUCERS).map(|producer| scope.spawn(move || produce(producer))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let total: u64 = sent.iter().map(|sent| sent.len() as u64).sum();
            let rows = read_all(&partition);
            assert_in_order(&rows, 0);
            assert_eq!(rows.len() as u64, total);
            for (producer, sent) in (0..PRODUCERS).zip(&sent) {
                let own: Vec<_> = rows.iter().filter(|row| row.key == producer.to_be_bytes()).map(|row| row.value.clone()).collect();
                assert!(own == *sent, "producer {producer}: {} of {} records, or another order", own.len(), sent.len());
            }
            let stats = partition.stats();
            assert_eq!((stats.records, partition.next_offset()), (total, total));
            assert!(stats.commits > 0 && stats.commits <= PRODUCERS * BATCHES + stats.rolls, "{stats:?}");
            assert_sound_while_open(&partition_dir(data.path()));
            drop(partition);
            broker.close().unwrap();
            assert_eq!(assert_closed(&partition_dir(data.path()), 1).next_offset, total);
            let broker = open(data.path(), backend, &small());
            assert!(read_all(&partition_of(&broker)) == rows);
        }
    });
}

#[test]
fn batches_that_wait_together_are_committed_together() {
    each_backend(|backend| {
        let data = scratch();
        let clock = Arc::new(TestClock::at(1));
        let disk = Arc::new(OsDisk::new(backend).unwrap());
        let broker = Broker::open_on(disk, clock.clone(), data.path(), config(backend, small())).unwrap();
        let partition = broker.create_topic(TOPIC, small()).unwrap().partition(0).unwrap();
        clock.hold();
        let tickets: Vec<_> =
            (0..200u32).map(|number| partition.append(Batch::of(None, &number.to_be_bytes()).unwrap()).unwrap()).collect();
        clock.release();
        for (offset, ticket) in (0..).zip(tickets) {
            assert_eq!(ticket.wait().unwrap(), offset..offset + 1);
        }
        // What the writer had taken before it stood still, and all the rest.
        let stats = partition.stats();
        assert!((1..=3).contains(&stats.commits), "{stats:?}");
        assert_eq!(stats.records, 200);
    });
}

#[test]
fn one_producer_that_waits_gets_one_commit_each() {
    each_backend(|backend| {
        let data = scratch();
        let (_broker, partition) = create(data.path(), backend, &small());
        for number in 1..=20u64 {
            partition.append(Batch::of(None, b"alone").unwrap()).unwrap().wait().unwrap();
            assert_eq!((partition.stats().commits, partition.stats().records), (number, number));
        }
    });
}

#[test]
fn topics_and_partitions_do_not_mix() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &small());
        for name in ["a", "b"] {
            broker.create_topic(name, TopicConfig { partitions: 3, segment_bytes: 2000, ..small() }).unwrap();
        }
        thread::scope(|scope| {
            for producer in 0..4u32 {
                let broker = broker.clone();
                scope.spawn(move || {
                    for number in 0..60u32 {
                        for name in ["a", "b"] {
                            let partition = broker.topic(name).unwrap().partition(number % 3).unwrap();
                            let value = format!("{name} {} {producer} {number}", number % 3);
                            partition.append(Batch::of(Some(name.as_bytes()), value.as_bytes()).unwrap()).unwrap().wait().unwrap();
                        }
                    }
                });
            }
        });
        for name in ["a", "b"] {
            for number in 0..3 {
                let rows = read_all(&broker.topic(name).unwrap().partition(number).unwrap());
                assert_in_order(&rows, 0);
                assert_eq!(rows.len(), 80);
                let prefix = format!("{name} {number} ").into_bytes();
                assert!(rows.iter().all(|row| row.key == name.as_bytes() && row.value.starts_with(&prefix)));
            }
        }
        broker.close().unwrap();
    });
}

#[test]
fn a_commit_takes_no_more_records_than_it_may() {
    let config = TopicConfig { commit_records: 3, ..small() };
    let (sim, broker, partition) = crate::sim::create(crate::support::seed(), &config);
    append(&partition, b"k", b"first");
    let hold = sim.hold(sapwood::io::sim::OpKind::Write, Some(".log"));
    let tickets: Vec<_> = (0..20u8).map(|number| partition.append(Batch::of(None, &[number]).unwrap()).unwrap()).collect();
    let large = partition.append(crate::support::batch(&vec![("k", "v"); 10])).unwrap();
    hold.wait_until_held();
    hold.release();
    for (offset, ticket) in (1..).zip(tickets) {
        assert_eq!(ticket.wait().unwrap().start, offset);
    }
    assert_eq!(large.wait().unwrap(), 21..31);
    let writes = sim.ops().into_iter().filter(|op| op.kind == sapwood::io::sim::OpKind::Write && op.durable).count();
    assert!(writes >= 11, "31 records in {writes} writes");
    assert!(partition.stats().commits >= 11);
    drop(partition);
    broker.close().unwrap();
}

#[test]
fn a_writer_that_watches_its_queue_does_all_that_one_that_sleeps_does() {
    each_backend(|backend| {
        let data = scratch();
        let wait = sapwood::WaitStrategy::Spin(std::time::Duration::from_micros(200));
        let broker = sapwood::Broker::open(data.path(), sapwood::BrokerConfig { wait, ..config(backend, small()) }).unwrap();
        let partition = broker.create_topic(TOPIC, small()).unwrap().partition(0).unwrap();
        std::thread::scope(|scope| {
            for producer in 0..4u8 {
                let partition = &partition;
                scope.spawn(move || {
                    for number in 0..50u8 {
                        append(partition, &[producer], &[number]);
                        if number % 10 == 0 {
                            // Longer than it watches: it sleeps, and is woken.
                            std::thread::sleep(std::time::Duration::from_millis(2));
                        }
                    }
                });
            }
        });
        partition.sync().unwrap();
        assert_eq!(partition.durable_end(), 200);
        assert_in_order(&read_all(&partition), 0);
        drop(partition);
        broker.close().unwrap();
        assert_closed(&partition_dir(data.path()), 1);
    });
}

#[test]
fn large_batches_are_written_as_they_came_at_the_levels_that_do_not_wait_for_the_device() {
    use sapwood::Durability::{Interval, Os};
    for durability in [Os, Interval { bytes: 200_000, time: std::time::Duration::from_secs(3600) }] {
        let config = TopicConfig { durability, segment_bytes: 2 << 20, index_interval: 7, ..small() };
        let (sim, broker, partition) = crate::sim::create(crate::support::seed(), &config);
        let mut model: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        let mut tickets = Vec::new();
        // Around the size from which on they are not copied, around that of a commit, and small ones between them.
        for (round, records) in [1usize, 60, 66, 70, 200, 1, 1000, 1040, 1100, 3, 2500, 1].into_iter().enumerate() {
            let batch: Vec<_> = (0..records).map(|number| (vec![round as u8], vec![number as u8; 900 + (number * 7) % 90])).collect();
            tickets.push(partition.append(crate::support::batch(&batch)).unwrap());
            model.extend(batch);
        }
        let mut next = 0;
        for ticket in tickets {
            let offsets = ticket.wait().unwrap();
            assert_eq!(offsets.start, next);
            next = offsets.end;
        }
        partition.sync().unwrap();
        assert_eq!((next, partition.durable_end()), (model.len() as u64, model.len() as u64));
        let rows = read_all(&partition);
        assert_in_order(&rows, 0);
        assert!(crate::support::contents(&rows) == model);
        drop((partition, broker));
        sim.power_loss_keeping_nothing();
        let broker = crate::sim::try_open(&sim, &config).unwrap();
        assert!(crate::support::contents(&read_all(&crate::support::partition_of(&broker))) == model);
        broker.close().unwrap();
        crate::sim::assert_closed(&sim, 7);
    }
}
