//! `append_and_wait`: commits that a producer makes on its own thread while it is alone, and what happens when it is not.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use sapwood::clock::{Clock, SystemClock};
use sapwood::io::OsDisk;
use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Batch, Broker, BrokerConfig, Durability, Error, Partition, TopicConfig, WaitStrategy, Writers};

use crate::oracle::assert_closed;
use crate::sim;
use crate::support::{Rng, TOPIC, assert_in_order, config, each_backend, partition_dir, partition_of, read_all, scratch, seed, small};

/// The machine's clocks, which note who asks for the time of an append, and refuse to tell it when asked to.
#[derive(Debug, Default)]
struct Asked {
    clock: SystemClock,
    by: Mutex<HashSet<ThreadId>>,
    breaks: AtomicBool,
}

impl Asked {
    fn take(&self) -> HashSet<ThreadId> {
        std::mem::take(&mut self.by.lock().unwrap())
    }
}

impl Clock for Asked {
    fn wall_ns(&self) -> u64 {
        self.by.lock().unwrap().insert(thread::current().id());
        assert!(!self.breaks.load(Ordering::Relaxed), "the clock is broken");
        self.clock.wall_ns()
    }

    fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }
}

fn one(value: &[u8]) -> Batch {
    Batch::of(None, value).unwrap()
}

fn open_on_sim(sim: &SimDisk, clock: Arc<dyn Clock>, topic: &TopicConfig) -> (Broker, Partition) {
    let config = config(sapwood::Backend::Auto, topic.clone());
    let broker = Broker::open_on(Arc::new(sim.clone()), clock, Path::new(sim::DATA), config).unwrap();
    broker.create_topic(TOPIC, topic.clone()).unwrap();
    let partition = partition_of(&broker);
    (broker, partition)
}

#[test]
fn a_producer_that_is_alone_commits_on_its_own_thread_and_sees_its_record() {
    each_backend(|backend| {
        for durability in [Durability::Durable, Durability::Os, Durability::Interval { bytes: 1 << 20, time: Duration::from_secs(9) }] {
            for wait in [WaitStrategy::Block, WaitStrategy::Spin(Duration::from_micros(300))] {
                let data = scratch();
                let clock = Arc::new(Asked::default());
                let disk = Arc::new(OsDisk::new(backend).unwrap());
                let topic = TopicConfig { durability, ..small() };
                let config = BrokerConfig { wait, ..config(backend, topic.clone()) };
                let broker = Broker::open_on(disk, clock.clone(), data.path(), config).unwrap();
                let partition = broker.create_topic(TOPIC, topic).unwrap().partition(0).unwrap();
                // Opening asks for the time.
                clock.take();
                // The first append makes room, which is the writer's.
                assert_eq!(partition.append(one(b"first")).unwrap().wait().unwrap(), 0..1);
                assert!(!clock.take().contains(&thread::current().id()));
                for offset in 1..200 {
                    assert_eq!(partition.append_and_wait(one(&[7; 300])).unwrap(), offset..offset + 1);
                    assert_eq!(partition.next_offset(), offset + 1);
                    if durability == Durability::Durable {
                        assert_eq!(partition.read_one(offset).unwrap().value, [7; 300][..]);
                    }
                }
                // A writer that watches its queue may be quicker than the next append, and stay at work; left alone, it is free.
                let mut end = 200;
                sim::until("the producer's own thread commits", || {
                    clock.take();
                    thread::sleep(Duration::from_millis(1));
                    assert_eq!(partition.append_and_wait(one(b"after a while")).unwrap(), end..end + 1);
                    end += 1;
                    clock.take().contains(&thread::current().id())
                });
                drop(partition);
                broker.close().unwrap();
                assert_eq!(assert_closed(&partition_dir(data.path()), 1).next_offset, end);
            }
        }
    });
}

#[test]
fn alone_or_in_company_by_either_call_every_producer_keeps_its_order() {
    let seed = seed();
    each_backend(|backend| {
        for (segment_bytes, wait, durability) in [
            (1 << 30, WaitStrategy::Block, Durability::Durable),
            (5000, WaitStrategy::Block, Durability::Durable),
            (5000, WaitStrategy::Spin(Duration::from_micros(100)), Durability::Durable),
            (2 << 20, WaitStrategy::Block, Durability::Os),
            (2 << 20, WaitStrategy::Spin(Duration::MAX), Durability::Interval { bytes: 9000, time: Duration::from_millis(1) }),
        ] {
            let data = scratch();
            let topic = TopicConfig { segment_bytes, durability, ..small() };
            let broker = Broker::open(data.path(), BrokerConfig { wait, ..config(backend, topic.clone()) }).unwrap();
            let partition = broker.create_topic(TOPIC, topic).unwrap().partition(0).unwrap();
            let produce = |producer: u64| {
                let mut rng = Rng::new(seed ^ producer);
                let (mut before, mut open, mut sent) = (0, Vec::new(), 0_u64);
                for _ in 0..150 {
                    let mut batch = partition.batch();
                    for _ in 0..=rng.below(3) {
                        let len = rng.below(200) as usize;
                        let value = [&sent.to_be_bytes()[..], &rng.bytes(len)].concat();
                        batch.push(Some(&producer.to_be_bytes()), &value).unwrap();
                        sent += 1;
                    }
                    if rng.below(3) == 0 {
                        open.push(partition.append(batch).unwrap());
                        continue;
                    }
                    let range = partition.append_and_wait(batch).unwrap();
                    for ticket in open.drain(..) {
                        let range: std::ops::Range<u64> = ticket.try_wait().expect("what was appended before is answered before").unwrap();
                        assert!(range.start >= before);
                        before = range.end;
                    }
                    assert!(range.start >= before && range.end > range.start, "{range:?} after {before}");
                    before = range.end;
                    if rng.below(20) == 0 {
                        // Long enough for the others to be alone.
                        thread::sleep(Duration::from_millis(2));
                    }
                }
                sent
            };
            let produce = &produce;
            let sent: Vec<u64> = thread::scope(|scope| {
                let threads: Vec<_> = (0..3).map(|producer| scope.spawn(move || produce(producer))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            partition.sync().unwrap();
            let rows = read_all(&partition);
            assert_in_order(&rows, 0);
            assert_eq!(rows.len() as u64, sent.iter().sum::<u64>());
            for (producer, &sent) in (0_u64..).zip(&sent) {
                let own = rows.iter().filter(|row| row.key == producer.to_be_bytes());
                let numbers: Vec<u64> = own.map(|row| u64::from_be_bytes(row.value[..8].try_into().unwrap())).collect();
                assert!(numbers.iter().copied().eq(0..sent), "producer {producer}");
            }
            drop(partition);
            broker.close().unwrap();
            assert_closed(&partition_dir(data.path()), 1);
        }
    });
}

#[test]
fn the_writers_own_thread_wakes_for_what_is_due_after_such_commits() {
    let durability = Durability::Interval { bytes: 1 << 30, time: Duration::from_millis(20) };
    for durability in [Durability::Durable, durability] {
        let sim = SimDisk::new(seed());
        let (broker, partition) = open_on_sim(&sim, Arc::new(SystemClock::new()), &TopicConfig { durability, ..TopicConfig::default() });
        for round in 1..=5 {
            for _ in 0..10 {
                partition.append_and_wait(one(b"due")).unwrap();
            }
            // Nobody appends any more: neither the sync nor the index entries may wait for the next append.
            sim::until("the sync that is due", || partition.durable_end() == round * 10);
            let index = || sim.read_file(&sim::dir().join("00000000000000000000.index"));
            let entries = || index().chunks(16).filter(|entry| entry.iter().any(|&byte| byte != 0)).count();
            // The first entry, of offset 0 at position 0, is all zeros.
            sim::until("the index entries that are due", || entries() as u64 == round * 10 - 1);
        }
        drop(partition);
        broker.close().unwrap();
    }
}

#[test]
fn the_writers_own_thread_sleeps_through_such_commits() {
    // The kernel shows 15 bytes of a thread's name, and tells how often it went to sleep.
    const THREAD: &str = "log sleepers/0";
    let sim = SimDisk::new(seed());
    let config = BrokerConfig { writers: Writers::PerPartition, ..config(sapwood::Backend::Auto, sim::tiny(270)) };
    let broker = Broker::open_on(Arc::new(sim.clone()), Arc::new(sapwood::clock::SystemClock::new()), sim::DATA, config).unwrap();
    let partition = broker.create_topic("sleepers", TopicConfig::default()).unwrap().partition(0).unwrap();
    let sleeps = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
        let task = tasks.into_iter().find(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == THREAD));
        let status = std::fs::read_to_string(task.unwrap().join("status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
        line.split_whitespace().last().unwrap().parse::<u64>().unwrap()
    };
    // The best of several attempts: on a busy machine it is woken for what became due meanwhile.
    let fewest = (0..5).map(|_| {
        let before = sleeps();
        for _ in 0..1000 {
            partition.append_and_wait(one(b"alone")).unwrap();
        }
        sleeps() - before
    });
    let fewest = fewest.min().unwrap();
    assert!(fewest < 250, "{fewest} times for 1000 appends");
    drop(partition);
    broker.close().unwrap();
}

#[test]
fn a_write_that_fails_ends_the_partition_for_everybody() {
    for errno in [sim::EIO, sim::ENOSPC] {
        let sim = SimDisk::new(seed());
        let (broker, partition) = open_on_sim(&sim, Arc::new(SystemClock::new()), &TopicConfig::default());
        for _ in 0..20 {
            partition.append_and_wait(one(b"fine")).unwrap();
        }
        sim.fail(Fault::next(OpKind::Write, Effect::Error(errno)).path(".log"));
        let error = partition.append_and_wait(one(b"lost")).unwrap_err();
        assert!(matches!(error, Error::Failed { .. }), "{error:?}");
        assert_eq!((partition.durable_end(), partition.next_offset()), (20, 20));
        let later = [
            partition.append_and_wait(one(b"later")).unwrap_err(),
            partition.append(one(b"later")).and_then(sapwood::Ticket::wait).unwrap_err(),
            partition.sync().unwrap_err(),
        ];
        assert!(later.iter().all(|error| matches!(error, Error::Failed { .. })), "{later:?}");
        drop(partition);
        assert!(broker.close().is_err());
        sim.clear_faults();
        let broker = sim::open(&sim);
        assert!(partition_of(&broker).next_offset() >= 20);
    }
}

#[test]
fn a_panic_on_the_producers_thread_is_the_writers_end_and_no_panic_of_the_producer() {
    let sim = SimDisk::new(seed());
    let clock = Arc::new(Asked::default());
    let (broker, partition) = open_on_sim(&sim, clock.clone(), &TopicConfig::default());
    partition.append(one(b"room")).unwrap().wait().unwrap();
    while !clock.take().contains(&thread::current().id()) {
        partition.append_and_wait(one(b"fine")).unwrap();
    }
    clock.breaks.store(true, Ordering::Relaxed);
    for error in [partition.append_and_wait(one(b"lost")).unwrap_err(), partition.append_and_wait(one(b"later")).unwrap_err()] {
        let Error::Failed { cause, .. } = &error else { panic!("{error:?}") };
        assert!(matches!(&**cause, Error::WriterPanicked { message, .. } if message.contains("the clock is broken")), "{error:?}");
    }
    drop(partition);
    assert!(broker.close().is_err());
}

#[test]
fn a_full_disk_refuses_and_takes_more_once_there_is_room() {
    let topic = TopicConfig { segment_bytes: 1 << 20, preallocate_bytes: 64 << 10, ..TopicConfig::default() };
    let sim = SimDisk::new(seed());
    let (broker, partition) = open_on_sim(&sim, Arc::new(SystemClock::new()), &topic);
    sim.set_capacity(Some(sim.used() + (300 << 10)));
    let mut taken = 0;
    let error = loop {
        match partition.append_and_wait(one(&[1; 3000])) {
            Ok(range) => {
                assert_eq!(range, taken..taken + 1);
                taken += 1;
            }
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::DiskFull { appended: 0, .. }) && taken > 50, "{error:?} after {taken}");
    sim.set_capacity(None);
    for _ in 0..500 {
        assert_eq!(partition.append_and_wait(one(&[1; 3000])).unwrap(), taken..taken + 1);
        taken += 1;
    }
    drop(partition);
    broker.close().unwrap();
    assert_eq!(sim::assert_closed(&sim, 1).next_offset, taken);
}

#[test]
fn closing_beside_such_commits_loses_nothing_and_hangs_nobody() {
    each_backend(|backend| {
        for wait in [WaitStrategy::Block, WaitStrategy::Spin(Duration::from_millis(1))] {
            let data = scratch();
            let broker = Broker::open(data.path(), BrokerConfig { wait, ..config(backend, small()) }).unwrap();
            let partition = broker.create_topic(TOPIC, small()).unwrap().partition(0).unwrap();
            let produce = || {
                let mut answered = 0;
                loop {
                    match partition.append_and_wait(one(&[9; 100])) {
                        Ok(range) => answered += range.end - range.start,
                        Err(error) => {
                            assert!(matches!(error, Error::Closed { .. }), "{error:?}");
                            return answered;
                        }
                    }
                }
            };
            let answered: u64 = thread::scope(|scope| {
                let threads = [scope.spawn(produce), scope.spawn(produce)];
                while partition.next_offset() < 100 {
                    thread::yield_now();
                }
                broker.close().unwrap();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert!(answered >= 100);
            assert_eq!(assert_closed(&partition_dir(data.path()), 1).next_offset, answered);
        }
    });
}
