//! What a user does: open, create, append, read, close, and what dropping instead of closing means.

use std::sync::Arc;

use sapwood::io::OsDisk;
use sapwood::{
    Appended, Backend, Batch, Broker, BrokerConfig, Durability, Error, OpenReport, OwnedRecord, Partition, Pinning, Reader, Record, Ticket,
    Topic, TopicConfig, TryAppendError, Visibility,
};

use crate::oracle::{assert_closed, assert_sound};
use crate::support::{
    BACKENDS, TOPIC, TestClock, append, assert_in_order, batch, config, contents, create, each_backend, open, partition_dir, partition_of,
    read_all, read_up_to, scratch, small,
};

#[test]
fn the_example_of_the_readme_works_with_the_defaults() {
    let data = scratch();
    let path = data.path().join("made/with/its/parents");
    let broker = Broker::open(&path, BrokerConfig::default()).unwrap();
    broker.create_topic("orders", TopicConfig { partitions: 3, ..Default::default() }).unwrap();

    let at = broker.produce("orders", Some(b"user-1"), b"hello").unwrap();
    assert_eq!(at, Appended { partition: at.partition, offset: 0 });
    let partition = broker.topic("orders").unwrap().partition(at.partition).unwrap();
    let mut batch = Batch::new();
    batch.push(Some(b"user-1"), b"again").unwrap();
    batch.push(None, b"without a key").unwrap();
    let ticket = partition.append(batch).unwrap();
    assert_eq!(ticket.wait().unwrap(), 1..3);

    let mut reader = partition.reader().unwrap();
    let records = reader.read(0, 1 << 20).unwrap();
    let seen: Vec<_> = records.iter().map(|record| (record.offset, record.key, record.value)).collect();
    assert_eq!(seen, [(0, &b"user-1"[..], &b"hello"[..]), (1, b"user-1", b"again"), (2, b"", b"without a key")]);
    assert_eq!(records.len(), 3);
    assert_eq!(records.next_offset(), 3);

    let owned = broker.consume("orders", at.partition, 1).unwrap();
    assert_eq!((owned.offset, &owned.key[..], &owned.value[..]), (1, &b"user-1"[..], &b"again"[..]));
    assert_eq!(broker.next_offset("orders", at.partition).unwrap(), 3);
    assert_eq!(broker.next_offset("orders", (at.partition + 1) % 3).unwrap(), 0);
    drop(reader);
    broker.close().unwrap();
    for number in 0..3 {
        assert_closed(&path.join("orders").join(number.to_string()), 1);
    }
}

#[test]
fn handles_cross_threads_and_are_cloned_where_that_makes_sense() {
    fn shared<T: Send + Sync + Clone + std::fmt::Debug + 'static>() {}
    fn sent<T: Send + 'static>() {}
    shared::<Broker>();
    shared::<Topic>();
    shared::<Partition>();
    shared::<Batch>();
    shared::<OwnedRecord>();
    shared::<OpenReport>();
    shared::<Error>();
    shared::<Record<'static>>();
    sent::<Reader>();
    sent::<Ticket>();
    sent::<TryAppendError>();
}

#[test]
fn the_backend_asked_for_is_the_one_that_works() {
    let names = BACKENDS.map(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        append(&partition, b"k", b"v");
        broker.backend()
    });
    assert!(["uring", "posix"].contains(&names[0]), "{}", names[0]);
    assert_eq!(names[1], "posix");
    let data = scratch();
    match Broker::open(data.path(), config(Backend::Uring, small())) {
        Ok(broker) => assert_eq!((broker.backend(), names[0]), ("uring", "uring")),
        Err(error) => {
            assert!(matches!(error, Error::IoUringUnavailable { .. }), "{error}");
            assert_eq!(names[0], "posix", "Auto falls back where Uring is refused");
        }
    }
}

#[test]
fn each_backend_reads_what_the_other_wrote() {
    for (writes, reads) in [(BACKENDS[0], BACKENDS[1]), (BACKENDS[1], BACKENDS[0])] {
        let data = scratch();
        let (broker, partition) = create(data.path(), writes, &TopicConfig { segment_bytes: 1000, ..small() });
        for number in 0..100u32 {
            append(&partition, b"key", format!("value {number}").as_bytes());
        }
        let before = read_all(&partition);
        drop(partition);
        broker.close().unwrap();
        let broker = open(data.path(), reads, &small());
        assert_eq!(read_all(&partition_of(&broker)), before);
        append(&partition_of(&broker), b"", b"and on");
        broker.close().unwrap();
        assert_eq!(assert_closed(&partition_dir(data.path()), 1).next_offset, 101);
    }
}

#[test]
fn produce_and_consume_through_broker_topic_and_partition() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &small());
        let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 2, ..small() }).unwrap();
        assert_eq!((topic.name(), topic.num_partitions(), topic.config().partitions), (TOPIC, 2, 2));
        let here = topic.partition_for(Some(b"key"));
        assert_eq!(broker.produce(TOPIC, Some(b"key"), b"one").unwrap(), Appended { partition: here, offset: 0 });
        assert_eq!(topic.produce(Some(b"key"), b"two").unwrap(), Appended { partition: here, offset: 1 });
        let partition = topic.partition(here).unwrap();
        assert_eq!(append(&partition, b"key", b"three"), 2);
        assert_eq!(partition.path(), data.path().join(TOPIC).join(here.to_string()));
        assert_eq!(partition.config(), topic.config());

        for (offset, value) in [(0, b"one".to_vec()), (1, b"two".to_vec()), (2, b"three".to_vec())] {
            let record = broker.consume(TOPIC, here, offset).unwrap();
            assert_eq!((record.offset, &record.key[..], &record.value[..]), (offset, &b"key"[..], &value[..]));
            let same = partition.read_one(offset).unwrap();
            assert_eq!((same.timestamp, same.key, same.value), (record.timestamp, record.key, record.value));
        }
        let error = broker.consume(TOPIC, here, 3).unwrap_err();
        assert!(matches!(error, Error::OffsetOutOfRange { offset: 3, first: 0, next: 3 }), "{error}");
        assert_eq!((partition.first_offset(), partition.next_offset(), partition.durable_end()), (0, 3, 3));
        let stats = partition.stats();
        assert_eq!((stats.records, stats.bytes, stats.rolls), (3, 3 * 28 + 9 + 3 + 3 + 5, 0));
        assert!((1..=3).contains(&stats.commits), "{stats:?}");
    });
}

#[test]
fn topics_are_told_of_and_can_be_deleted() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &small());
        assert!(broker.topics().is_empty());
        for (name, partitions) in [("zeta", 1), ("alpha", 3), ("Beta", 2), ("10", 1)] {
            let topic = broker.create_topic(name, TopicConfig { partitions, ..small() }).unwrap();
            assert_eq!(topic.num_partitions(), partitions);
            assert_eq!(broker.num_partitions(name).unwrap(), partitions);
        }
        assert_eq!(broker.topics(), ["10", "Beta", "alpha", "zeta"]);
        broker.produce("zeta", None, b"kept").unwrap();
        broker.produce("10", None, b"lost").unwrap();

        let gone = broker.topic("10").unwrap().partition(0).unwrap();
        broker.delete_topic("10").unwrap();
        assert_eq!(broker.topics(), ["Beta", "alpha", "zeta"]);
        assert!(!data.path().join("10").exists());
        let error = gone.append(Batch::of(None, b"late").unwrap()).and_then(Ticket::wait).unwrap_err();
        assert!(error.is_closed(), "{error}");
        for error in [
            broker.topic("10").map(drop).unwrap_err(),
            broker.delete_topic("10").unwrap_err(),
            broker.num_partitions("10").map(drop).unwrap_err(),
            broker.next_offset("10", 0).map(drop).unwrap_err(),
            broker.produce("10", None, b"x").map(drop).unwrap_err(),
            broker.consume("10", 0, 0).map(drop).unwrap_err(),
        ] {
            assert!(matches!(&error, Error::TopicNotFound { topic } if topic == "10"), "{error}");
        }
        drop(gone);

        // The name is free again, and nothing old comes back under it.
        broker.create_topic("10", small()).unwrap();
        assert_eq!(broker.next_offset("10", 0).unwrap(), 0);
        assert_eq!(broker.produce("10", None, b"new").unwrap().offset, 0);
        broker.close().unwrap();

        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.topics(), ["10", "Beta", "alpha", "zeta"]);
        assert_eq!(&broker.consume("10", 0, 0).unwrap().value[..], b"new");
        assert_eq!(&broker.consume("zeta", 0, 0).unwrap().value[..], b"kept");
        assert!(broker.report().removed.is_empty());
    });
}

#[test]
fn dropping_without_close_loses_nothing_acknowledged() {
    each_backend(|backend| {
        for durability in
            [Durability::Durable, Durability::Interval { bytes: 1 << 30, time: std::time::Duration::from_secs(3600) }, Durability::Os]
        {
            let data = scratch();
            let config = TopicConfig { segment_bytes: 500, durability, ..small() };
            let mut expected = Vec::new();
            for round in 0..4u32 {
                let broker = open(data.path(), backend, &config);
                if round == 0 {
                    broker.create_topic(TOPIC, config.clone()).unwrap();
                }
                let partition = partition_of(&broker);
                assert_eq!(contents(&read_all(&partition)), expected, "{durability:?}, round {round}");
                assert_eq!(partition.next_offset(), expected.len() as u64);
                for number in 0..20u32 {
                    let (key, value) = (format!("key-{round}").into_bytes(), format!("value-{number}").into_bytes());
                    append(&partition, &key, &value);
                    expected.push((key, value));
                }
                // Whichever handle goes last must not matter.
                if round % 2 == 0 {
                    drop(broker);
                    drop(partition);
                }
            }
            assert_sound(&partition_dir(data.path()));
        }
    });
}

#[test]
fn a_dropped_ticket_is_an_append_that_nobody_waits_for() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        for number in 0..50u32 {
            drop(partition.append(Batch::of(None, format!("unwaited {number}").as_bytes()).unwrap()).unwrap());
        }
        assert_eq!(append(&partition, b"", b"waited"), 50);
        for number in 0..50u32 {
            drop(partition.append(Batch::of(None, format!("late {number}").as_bytes()).unwrap()).unwrap());
        }
        drop(partition);
        broker.close().unwrap();

        let broker = open(data.path(), backend, &small());
        let rows = read_all(&partition_of(&broker));
        assert_in_order(&rows, 0);
        let mut expected: Vec<_> = (0..50).map(|number| format!("unwaited {number}")).collect();
        expected.push("waited".into());
        expected.extend((0..50).map(|number| format!("late {number}")));
        assert_eq!(rows.iter().map(|row| String::from_utf8(row.value.clone()).unwrap()).collect::<Vec<_>>(), expected);
    });
}

#[test]
fn close_finishes_what_is_queued_and_answers_it() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &TopicConfig { segment_bytes: 300, ..small() });
        let tickets: Vec<_> =
            (0..100u32).map(|number| partition.append(Batch::of(None, &number.to_be_bytes()).unwrap()).unwrap()).collect();
        broker.close().unwrap();
        for (number, ticket) in (0..).zip(tickets) {
            assert_eq!(ticket.wait().unwrap(), number..number + 1);
        }
        assert_eq!(assert_closed(&partition_dir(data.path()), 1).next_offset, 100);
    });
}

#[test]
fn after_close_every_other_handle_says_closed() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        append(&partition, b"k", b"v");
        let (twin, topic) = (broker.clone(), broker.topic(TOPIC).unwrap());
        broker.close().unwrap();
        for error in [
            partition.append(Batch::of(None, b"late").unwrap()).and_then(Ticket::wait).map(drop).unwrap_err(),
            partition.try_append(Batch::of(None, b"late").unwrap()).map(drop).unwrap_err().error.unwrap(),
            partition.sync().unwrap_err(),
            topic.produce(None, b"late").map(drop).unwrap_err(),
            twin.produce(TOPIC, None, b"late").map(drop).unwrap_err(),
            twin.create_topic("another", small()).map(drop).unwrap_err(),
            twin.delete_topic(TOPIC).unwrap_err(),
        ] {
            assert!(error.is_closed(), "{error}");
        }
        assert!(!data.path().join("another").exists());
        // The directory is free although handles are left, and what they do does not reach it.
        let again = open(data.path(), backend, &small());
        assert_eq!(partition_of(&again).next_offset(), 1);
        assert!(partition.append(Batch::of(None, b"late").unwrap()).is_err());
        assert_eq!(append(&partition_of(&again), b"k", b"v"), 1);
        drop((twin, topic, partition));
        assert_eq!(append(&partition_of(&again), b"k", b"v"), 2);
    });
}

#[test]
fn try_append_gives_the_batch_back_while_the_queue_is_full() {
    each_backend(|backend| {
        for limit in ["batches", "bytes"] {
            let data = scratch();
            let clock = Arc::new(TestClock::at(1_000));
            let disk = Arc::new(OsDisk::new(backend).unwrap());
            let broker = Broker::open_on(disk, clock.clone(), data.path(), config(backend, small())).unwrap();
            let topic = match limit {
                "batches" => TopicConfig { queue_batches: 3, ..small() },
                _ => TopicConfig { queue_bytes: 100, ..small() },
            };
            let partition = broker.create_topic(TOPIC, topic).unwrap().partition(0).unwrap();
            append(&partition, b"k", b"first");

            // The writer stands still at its next timestamp, so what is queued stays queued.
            clock.hold();
            let mut tickets = Vec::new();
            let refused = loop {
                assert!(tickets.len() < 100, "the queue has no limit");
                match partition.try_append(Batch::of(Some(b"k"), format!("value {}", tickets.len()).as_bytes()).unwrap()) {
                    Ok(ticket) => tickets.push(ticket),
                    Err(refused) => break refused,
                }
            };
            assert!(refused.error.is_none(), "{limit}: full is no failure");
            assert_eq!(refused.batch, Batch::of(Some(b"k"), format!("value {}", tickets.len()).as_bytes()).unwrap());
            clock.release();

            let queued = tickets.len() as u64;
            // Beside what the writer had taken: three batches, or as many of 36 bytes as 100 bytes hold.
            assert!(queued >= if limit == "batches" { 3 } else { 2 }, "{limit}: {queued}");
            for (offset, ticket) in (1..).zip(tickets) {
                assert_eq!(ticket.wait().unwrap(), offset..offset + 1);
            }
            // A blocking append waits for room instead; here room is there again.
            assert_eq!(partition.append(refused.batch).unwrap().wait().unwrap(), queued + 1..queued + 2);
        }
    });
}

#[test]
fn tickets_can_be_asked_without_waiting() {
    let data = scratch();
    let clock = Arc::new(TestClock::at(1_000));
    let broker =
        Broker::open_on(Arc::new(OsDisk::new(Backend::Posix).unwrap()), clock.clone(), data.path(), config(Backend::Posix, small()))
            .unwrap();
    let partition = broker.create_topic(TOPIC, small()).unwrap().partition(0).unwrap();
    clock.hold();
    let first = partition.append(batch(&[("a", "1"), ("b", "2")])).unwrap();
    let second = partition.append(batch(&[("c", "3")])).unwrap();
    let first = first.try_wait().map(drop).unwrap_err().wait_timeout(std::time::Duration::ZERO).map(drop).unwrap_err();
    clock.release();
    // Answers come in the order of the queue: once the second is answered, the first is too.
    assert_eq!(second.wait().unwrap(), 2..3);
    assert_eq!(first.try_wait().unwrap().unwrap(), 0..2);
}

#[test]
fn a_batch_that_is_too_large_queues_nothing() {
    each_backend(|backend| {
        let data = scratch();
        let (_broker, partition) = create(data.path(), backend, &TopicConfig { max_batch_bytes: 1024, ..small() });
        append(&partition, b"", b"before");
        let fits = Batch::of(None, &[1; 1024 - 28]).unwrap();
        assert_eq!(fits.bytes(), 1024);
        for large in [Batch::of(None, &[1; 1025 - 28]).unwrap(), batch(&[(vec![1; 500], vec![2; 400]), (vec![], vec![0; 69])])] {
            assert_eq!(large.bytes(), 1025);
            let error = partition.append(large.clone()).map(drop).unwrap_err();
            assert!(matches!(error, Error::BatchTooLarge { bytes: 1025, limit: 1024 }), "{error}");
            let refused = partition.try_append(large.clone()).map(drop).unwrap_err();
            assert!(matches!(refused.error, Some(Error::BatchTooLarge { bytes: 1025, limit: 1024 })));
            assert_eq!(refused.batch, large);
        }
        assert_eq!(partition.append(fits).unwrap().wait().unwrap(), 1..2);
        assert_eq!(append(&partition, b"", b"after"), 2);
        assert_eq!(partition.next_offset(), 3);
    });
}

#[test]
fn an_empty_batch_is_an_error_and_nothing_else() {
    let data = scratch();
    let (_broker, partition) = create(data.path(), Backend::Auto, &small());
    assert!(matches!(partition.append(Batch::new()).map(drop), Err(Error::EmptyBatch)));
    assert!(matches!(partition.try_append(Batch::new()).map(drop).unwrap_err().error, Some(Error::EmptyBatch)));
    assert_eq!(append(&partition, b"", b""), 0);
}

#[test]
fn partitions_and_topics_that_are_not_there_are_named() {
    let data = scratch();
    let broker = open(data.path(), Backend::Auto, &small());
    let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 2, ..small() }).unwrap();
    for number in [2, 3, u32::MAX] {
        for error in [
            topic.partition(number).map(drop).unwrap_err(),
            broker.next_offset(TOPIC, number).map(drop).unwrap_err(),
            broker.consume(TOPIC, number, 0).map(drop).unwrap_err(),
        ] {
            assert!(
                matches!(&error, Error::PartitionNotFound { topic, partition, partitions: 2 } if topic == TOPIC && *partition == number),
                "{error}"
            );
        }
    }
    assert!(matches!(broker.topic("none").map(drop), Err(Error::TopicNotFound { topic }) if topic == "none"));
}

#[test]
fn settings_out_of_range_are_named_and_make_nothing() {
    let data = scratch();
    let broker = open(data.path(), Backend::Auto, &small());
    let wrong = [
        ("partitions", TopicConfig { partitions: 0, ..small() }),
        ("partitions", TopicConfig { partitions: 65_537, ..small() }),
        ("segment_bytes", TopicConfig { segment_bytes: 0, ..small() }),
        ("preallocate_bytes", TopicConfig { preallocate_bytes: 4095, ..small() }),
        ("index_interval", TopicConfig { index_interval: 0, ..small() }),
        ("commit_bytes", TopicConfig { commit_bytes: 0, ..small() }),
        ("max_batch_bytes", TopicConfig { max_batch_bytes: 1023, ..small() }),
        ("queue_batches", TopicConfig { queue_batches: 0, ..small() }),
        ("linger_us", TopicConfig { linger_us: 60_000_001, ..small() }),
    ];
    for (setting, topic) in wrong {
        let error = broker.create_topic(TOPIC, topic).map(drop).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { name, .. } if name == setting), "{setting}: {error}");
        assert!(broker.topics().is_empty());
        assert!(!data.path().join(TOPIC).exists());
    }
    broker.create_topic(TOPIC, small()).unwrap();
}

#[test]
fn fallback_settings_are_checked_too() {
    let data = scratch();
    let fallback = TopicConfig { index_interval: 0, ..small() };
    let error = Broker::open(data.path().join("new"), config(Backend::Auto, fallback)).map(drop).unwrap_err();
    assert!(matches!(error, Error::InvalidConfig { name: "index_interval", value: 0, .. }), "{error}");
    assert!(!data.path().join("new").exists());
}

#[test]
fn pinning_never_stops_anything() {
    for pinning in [Pinning::Auto, Pinning::None, Pinning::Cores(vec![0]), Pinning::Cores(vec![]), Pinning::Cores(vec![1023, usize::MAX])] {
        let data = scratch();
        let broker = Broker::open(data.path(), BrokerConfig { pinning, ..config(Backend::Auto, small()) }).unwrap();
        // More writers than CPUs.
        let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 9, ..small() }).unwrap();
        for number in 0..9 {
            assert_eq!(append(&topic.partition(number).unwrap(), b"k", b"v"), 0);
        }
    }
}

#[test]
fn sync_makes_what_was_answered_durable_at_every_level() {
    each_backend(|backend| {
        let far = std::time::Duration::from_secs(3600);
        for durability in [Durability::Durable, Durability::Interval { bytes: 1 << 40, time: far }, Durability::Os] {
            let data = scratch();
            let (_broker, partition) = create(data.path(), backend, &TopicConfig { durability, segment_bytes: 400, ..small() });
            for number in 0..30u64 {
                append(&partition, b"key", b"value");
                assert_eq!(partition.next_offset(), number + 1);
                assert!(partition.durable_end() <= number + 1);
                assert_eq!(read_up_to(&partition, Visibility::Appended, 0, 1 << 16).len() as u64, number + 1, "{durability:?}");
                if number % 7 == 6 {
                    partition.sync().unwrap();
                    assert_eq!(partition.durable_end(), number + 1, "{durability:?}");
                    assert_eq!(read_all(&partition).len() as u64, number + 1);
                }
            }
        }
    });
}
