//! The first failed write or sync stops a partition: all that waits and all that comes gets that error, reads go on,
//! opening it again clears it. A panic in the writer is the same, never a hang.

use std::path::Path;
use std::sync::Arc;

use sapwood::io::OsDisk;
use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Batch, Broker, Durability, Error, Partition, Ticket, TopicConfig, Visibility};

use crate::sim::{EIO, ENOSPC, assert_closed, create, dir, open, tiny};
use crate::support::{
    TOPIC, TestClock, append, assert_in_order, batch, config, contents, each_backend, partition_dir, partition_of, read_all, read_up_to,
    scratch, seed, small,
};

fn try_append(partition: &Partition, value: &[u8]) -> sapwood::Result<u64> {
    Ok(partition.append(Batch::of(Some(b"key"), value).unwrap())?.wait()?.start)
}

/// That error, or one that carries it.
#[track_caller]
fn assert_stopped(error: &Error) {
    assert!(error.is_failed(), "{error}");
    let Error::Failed { path, cause } = error else { panic!("{error}") };
    assert_eq!(*path, dir());
    assert!(matches!(&**cause, Error::Io { path, .. } if path.extension().is_some_and(|extension| extension == "log")), "{cause}");
}

/// Everything that can be asked of a stopped partition: appends and syncs get the error, reads work.
#[track_caller]
fn assert_latched(partition: &Partition, acknowledged: &[(Vec<u8>, Vec<u8>)]) {
    for _ in 0..3 {
        assert_stopped(&try_append(partition, b"later").unwrap_err());
        assert_stopped(
            &partition
                .try_append(Batch::of(None, b"later").unwrap())
                .map_err(|refused| refused.error.unwrap())
                .and_then(Ticket::wait)
                .unwrap_err(),
        );
        assert_stopped(&partition.sync().unwrap_err());
    }
    assert_eq!(contents(&read_all(partition)), acknowledged);
    assert_eq!(partition.durable_end(), acknowledged.len() as u64);
    assert_eq!(partition.read_one(0).unwrap().key, acknowledged[0].0);
    assert!(partition.read_one(acknowledged.len() as u64).unwrap_err().is_out_of_range());
}

/// The records before the failure are there; of what failed some may be; it goes on from there without a gap.
fn assert_reopening_clears_it(sim: &SimDisk, acknowledged: &[(Vec<u8>, Vec<u8>)], failed: &[(Vec<u8>, Vec<u8>)]) {
    let broker = open(sim);
    let partition = partition_of(&broker);
    let rows = read_all(&partition);
    assert_in_order(&rows, 0);
    let all = [acknowledged, failed].concat();
    assert!(rows.len() >= acknowledged.len());
    assert_eq!(contents(&rows), all[..rows.len()]);
    assert_eq!(append(&partition, b"key", b"works again"), rows.len() as u64);
    drop(partition);
    broker.close().unwrap();
    let report = assert_closed(sim, 1);
    assert_eq!(report.next_offset, rows.len() as u64 + 1);
}

fn key_and(value: &str) -> (Vec<u8>, Vec<u8>) {
    (b"key".to_vec(), value.as_bytes().to_vec())
}

#[test]
fn a_failed_write_answers_its_commit_and_everything_behind_it() {
    let effects = [
        Effect::Error(EIO),
        // A write that runs out of space behind an allocation that did not is a failed write too.
        Effect::Error(ENOSPC),
        Effect::ErrorAfterPartial { bytes: 0, errno: EIO },
        Effect::ErrorAfterPartial { bytes: 4096, errno: EIO },
        Effect::ErrorAfterPartial { bytes: 1 << 20, errno: EIO },
    ];
    for effect in effects {
        for durability in [Durability::Durable, Durability::Os] {
            let (sim, broker, partition) = create(seed(), &TopicConfig { durability, ..tiny(1 << 20) });
            for value in ["one", "two"] {
                try_append(&partition, value.as_bytes()).unwrap();
            }
            partition.sync().unwrap();
            let acknowledged = [key_and("one"), key_and("two")];

            // One commit in flight, more queued behind it.
            let hold = sim.hold(OpKind::Write, Some(".log"));
            sim.fail(Fault::next(OpKind::Write, effect).path(".log"));
            let mut failed = vec![key_and("in flight")];
            let mut tickets = vec![partition.append(batch(&failed)).unwrap()];
            hold.wait_until_held();
            for number in 0..20 {
                let queued = [key_and(&format!("queued {number}")), key_and("and its twin")];
                tickets.push(partition.append(batch(&queued)).unwrap());
                failed.extend(queued);
            }
            hold.release();
            for ticket in tickets {
                assert_stopped(&ticket.wait().unwrap_err());
            }
            assert_latched(&partition, &acknowledged);
            // The disk works again; that alone must not.
            assert_latched(&partition, &acknowledged);
            drop(partition);
            drop(broker);
            assert_reopening_clears_it(&sim, &acknowledged, &failed);
        }
    }
}

#[test]
fn a_failed_sync_is_never_made_up_for_by_a_later_one() {
    for durability in [Durability::Os, Durability::Interval { bytes: 1 << 40, time: std::time::Duration::from_secs(3600) }] {
        for effect in [Effect::Error(EIO), Effect::Error(ENOSPC)] {
            let (sim, broker, partition) = create(seed(), &TopicConfig { durability, ..tiny(1 << 20) });
            try_append(&partition, b"one").unwrap();
            partition.sync().unwrap();
            try_append(&partition, b"two").unwrap();
            sim.fail(Fault::next(OpKind::Sync, effect).path(".log"));
            assert_stopped(&partition.sync().unwrap_err());
            assert_latched(&partition, &[key_and("one")]);
            // What was appended can still be had by those who ask for it by name.
            assert_eq!(contents(&read_up_to(&partition, Visibility::Appended, 0, 100)), [key_and("one"), key_and("two")]);
            drop((partition, broker));
            assert_reopening_clears_it(&sim, &[key_and("one")], &[key_and("two")]);
        }
    }
}

#[test]
fn a_failed_sync_at_a_roll_stops_the_partition() {
    for durability in [Durability::Os, Durability::Interval { bytes: 1 << 40, time: std::time::Duration::from_secs(3600) }] {
        let (sim, broker, partition) = create(seed(), &TopicConfig { durability, ..tiny(100) });
        try_append(&partition, b"one").unwrap();
        try_append(&partition, b"two").unwrap();
        partition.sync().unwrap();
        sim.fail(Fault::next(OpKind::Sync, Effect::Error(EIO)).path("00000000000000000000.log"));
        let error = (0..10).find_map(|number| try_append(&partition, format!("number {number}").as_bytes()).err()).expect("a roll came");
        assert_stopped(&error);
        assert_stopped(&try_append(&partition, b"later").unwrap_err());
        assert!(partition.durable_end() >= 2);
        drop((partition, broker));
        let broker = open(&sim);
        let rows = read_all(&partition_of(&broker));
        assert_in_order(&rows, 0);
        assert_eq!(contents(&rows)[..2], [key_and("one"), key_and("two")]);
    }
}

#[test]
fn other_partitions_go_on() {
    let sim = SimDisk::new(seed());
    let broker = open(&sim);
    let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 2, ..tiny(1 << 20) }).unwrap();
    let (stopped, well) = (topic.partition(0).unwrap(), topic.partition(1).unwrap());
    try_append(&stopped, b"one").unwrap();
    try_append(&well, b"one").unwrap();
    sim.fail(Fault::next(OpKind::Write, Effect::Error(EIO)).path("0/00000000000000000000.log"));
    assert_stopped(&try_append(&stopped, b"two").unwrap_err());
    for offset in 1..20 {
        assert_eq!(try_append(&well, b"more").unwrap(), offset);
        assert_stopped(&try_append(&stopped, b"more").unwrap_err());
    }
    // Closing reports the failure or not, but it ends, and frees the directory.
    drop((stopped, well, topic));
    if let Err(error) = broker.close() {
        assert_stopped(&error);
    }
    let broker = open(&sim);
    assert_eq!(broker.next_offset(TOPIC, 1).unwrap(), 20);
    assert_eq!(append(&broker.topic(TOPIC).unwrap().partition(0).unwrap(), b"k", b"v"), broker.next_offset(TOPIC, 0).unwrap() - 1);
}

#[test]
fn an_index_that_cannot_be_written_costs_no_append() {
    for kind in [OpKind::Write, OpKind::Sync, OpKind::Allocate] {
        for extension in [".index", ".timeindex"] {
            for errno in [EIO, ENOSPC] {
                let (sim, broker, partition) = create(seed(), &tiny(1 << 20));
                sim.fail_by_chance(sapwood::io::sim::RandomFault {
                    on: kind,
                    path_suffix: Some(extension.into()),
                    per_million: 1_000_000,
                    effect: Effect::Error(errno),
                });
                for number in 0..20u64 {
                    assert_eq!(try_append(&partition, format!("number {number}").as_bytes()).unwrap(), number);
                }
                for number in 0..20u64 {
                    assert_eq!(partition.read_one(number).unwrap().value, format!("number {number}"));
                }
                let before = read_all(&partition);
                drop((partition, broker));
                sim.clear_faults();
                let broker = open(&sim);
                assert_eq!(read_all(&partition_of(&broker)), before);
                broker.close().unwrap();
                assert_closed(&sim, 1);
            }
        }
    }
}

#[test]
fn a_read_that_fails_fails_alone() {
    let (sim, broker, partition) = create(seed(), &tiny(270));
    for number in 0..20u64 {
        try_append(&partition, format!("number {number}").as_bytes()).unwrap();
    }
    drop((partition, broker));
    let broker = open(&sim);
    let partition = partition_of(&broker);
    let mut reader = partition.reader().unwrap();
    for offset in [0, 7, 19] {
        sim.fail(Fault::next(OpKind::Read, Effect::Error(EIO)).path(".log"));
        // Served from memory, or an error that names the file; never other bytes.
        match reader.read(offset, 1000) {
            Ok(records) => assert_eq!(records.iter().next().unwrap().value, format!("number {offset}").as_bytes()),
            Err(error) => assert!(matches!(error, Error::Io { .. }), "{error}"),
        }
        sim.clear_faults();
        assert_eq!(reader.read(offset, 1000).unwrap().iter().next().unwrap().value, format!("number {offset}").as_bytes());
    }
    assert_eq!(try_append(&partition, b"goes on").unwrap(), 20);
}

fn is_a_panic(error: &Error) -> bool {
    match error {
        Error::WriterPanicked { .. } => true,
        Error::Failed { cause, .. } => is_a_panic(cause),
        _ => false,
    }
}

/// After the writer panicked at what was appended last.
fn assert_panicked(partition: &Partition, tickets: Vec<Ticket>, acknowledged: u64) {
    for ticket in tickets {
        let error = ticket.wait().unwrap_err();
        assert!(is_a_panic(&error), "{error}");
    }
    for _ in 0..3 {
        assert!(is_a_panic(&try_append(partition, b"later").unwrap_err()));
        assert!(is_a_panic(&partition.sync().unwrap_err()));
    }
    assert_eq!(read_all(partition).len() as u64, acknowledged, "reads go on");
}

#[test]
fn a_panic_in_the_writer_is_an_error_not_a_hang() {
    each_backend(|backend| {
        let data = scratch();
        let clock = Arc::new(TestClock::at(1));
        let disk = Arc::new(OsDisk::new(backend).unwrap());
        let broker = Broker::open_on(disk, clock.clone(), data.path(), config(backend, small())).unwrap();
        let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 2, ..small() }).unwrap();
        let (partition, other) = (topic.partition(0).unwrap(), topic.partition(1).unwrap());
        for _ in 0..3 {
            append(&partition, b"k", b"v");
        }
        append(&other, b"k", b"v");
        clock.hold();
        let tickets: Vec<_> = (0..10).map(|_| partition.append(Batch::of(None, b"lost").unwrap()).unwrap()).collect();
        clock.panic_from_now();
        clock.release();
        // The first may have been asked for its time already; then it went through.
        let mut tickets = tickets.into_iter();
        let mut acknowledged = 3;
        let first = tickets.next().unwrap().wait();
        match first {
            Ok(offsets) => acknowledged = offsets.end,
            Err(error) => assert!(is_a_panic(&error), "{error}"),
        }
        let mut left = Vec::new();
        for ticket in tickets {
            left.push(ticket);
        }
        // Those of one commit with the first share its fate.
        let answers: Vec<_> = left.into_iter().map(Ticket::wait).collect();
        for answer in answers {
            match answer {
                Ok(offsets) => {
                    assert_eq!(offsets.start, acknowledged);
                    acknowledged = offsets.end;
                }
                Err(error) => assert!(is_a_panic(&error), "{error}"),
            }
        }
        assert_panicked(
            &partition,
            vec![partition.append(Batch::of(None, b"lost").unwrap())].into_iter().flatten().collect(),
            acknowledged,
        );
        drop((partition, other, topic));
        drop(broker);
        let broker = crate::support::open(data.path(), backend, &small());
        let partition = partition_of(&broker);
        assert!(partition.next_offset() >= acknowledged);
        append(&partition, b"k", b"v");
        drop(partition);
        broker.close().unwrap();
        crate::oracle::assert_closed(&partition_dir(data.path()), 1);
    });
}

#[test]
fn a_panic_in_the_middle_of_a_write_is_an_error_not_a_hang() {
    for on in [OpKind::Write, OpKind::Allocate, OpKind::Create, OpKind::SyncDir] {
        let (sim, broker, partition) = create(seed(), &tiny(100));
        try_append(&partition, b"one").unwrap();
        try_append(&partition, b"two").unwrap();
        sim.fail(Fault::next(on, Effect::Panic));
        // The next ones write, and roll: all of these operations come.
        let error = (0..10).find_map(|_| try_append(&partition, b"lost").err()).unwrap_or_else(|| panic!("no {on:?} came"));
        assert!(is_a_panic(&error), "{on:?}: {error}");
        let acknowledged = partition.durable_end();
        assert_panicked(&partition, Vec::new(), acknowledged);
        // Closing ends, and says so or not.
        drop(partition);
        drop(broker.close());
        let broker = open(&sim);
        let rows = read_all(&partition_of(&broker));
        assert_in_order(&rows, 0);
        assert!(rows.len() as u64 >= acknowledged && acknowledged >= 2, "{on:?}");
        assert_eq!(append(&partition_of(&broker), b"k", b"v"), rows.len() as u64);
    }
}

#[test]
fn dropping_with_appends_in_flight_answers_them_and_ends() {
    let (sim, broker, partition) = create(seed(), &tiny(1 << 20));
    try_append(&partition, b"first").unwrap();
    let hold = sim.hold(OpKind::Write, Some(".log"));
    let tickets: Vec<_> = (0..100).map(|number: u32| partition.append(Batch::of(None, &number.to_be_bytes()).unwrap()).unwrap()).collect();
    hold.wait_until_held();
    let dropping = std::thread::spawn(move || {
        drop(partition);
        drop(broker);
    });
    hold.release();
    dropping.join().unwrap();
    let answers: Vec<_> = tickets.into_iter().map(Ticket::wait).collect();
    let acknowledged = answers.iter().take_while(|answer| answer.is_ok()).count();
    assert!(answers[acknowledged..].iter().all(|answer| answer.as_ref().is_err_and(Error::is_closed)), "{answers:?}");
    sim.power_loss_keeping_nothing();
    let broker = open(&sim);
    assert!(partition_of(&broker).next_offset() > acknowledged as u64);
    let rows = read_all(&partition_of(&broker));
    assert!((1..).zip(&rows[1..]).all(|(number, row)| row.value == (number - 1u32).to_be_bytes()));
}

#[test]
fn a_disk_that_went_away_answers_every_call() {
    let (sim, broker, partition) = create(seed(), &tiny(1 << 20));
    try_append(&partition, b"one").unwrap();
    sim.crash_process();
    assert!(try_append(&partition, b"two").is_err());
    assert!(partition.sync().is_err());
    assert!(broker.create_topic("another", tiny(270)).is_err());
    drop(partition);
    drop(broker.close());
    assert_eq!(partition_of(&open(&sim)).next_offset(), 1);
    assert!(sim.exists(Path::new(crate::sim::DATA)));
}
