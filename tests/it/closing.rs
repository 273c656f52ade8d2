//! Closing within a limit of time, where a write or a sync does not complete: the limit holds, handles are dead, and the directory and what the
//! device may still use are let go of when it has answered, and not before. Case B141.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use sapwood::io::sim::{Effect, Fault, Hold, OpKind, SimDisk};
use sapwood::{Batch, Broker, Durability, Error, Partition, ReadMode, ReaderConfig, TopicConfig, Visibility};

use crate::format::Slot;
use crate::fuse_disk::{FuseDisk, Op};
use crate::oracle::assert_closed_files;
use crate::sim::{self, DATA, EIO, dir, files_in, tiny, until};
use crate::support::{BACKENDS, TOPIC, append, batch, config, contents, create, partition_of, read_all, read_up_to, seed};

/// Too short for anything that hangs, and for the rest it does not matter.
const LIMIT: Duration = Duration::from_millis(20);

/// The log that hangs.
const LOG: &str = "/0/00000000000000000000.log";

fn record(number: u64) -> (Vec<u8>, Vec<u8>) {
    (number.to_be_bytes().to_vec(), vec![number as u8; 3000])
}

#[track_caller]
fn assert_timed_out(closed: sapwood::Result<()>, limit: Duration) {
    match closed {
        Err(error @ Error::CloseTimedOut { .. }) => {
            let Error::CloseTimedOut { path, limit: told } = &error else { unreachable!() };
            assert_eq!((path.to_str().unwrap(), *told), (DATA, limit));
            assert!(!error.is_closed() && error.to_string().contains("stays locked"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

/// Nothing can be asked of it any more, and nothing waits.
#[track_caller]
fn assert_dead(partition: &Partition) {
    let one = || Batch::of(None, b"too late").unwrap();
    for _ in 0..2 {
        assert!(partition.append(one()).unwrap_err().is_closed());
        assert!(partition.append_and_wait(one()).unwrap_err().is_closed());
        assert!(partition.try_append(one()).unwrap_err().error.unwrap().is_closed());
        assert!(partition.sync().unwrap_err().is_closed());
        assert!(partition.roll().unwrap_err().is_closed());
        assert!(partition.truncate_before(0).unwrap_err().is_closed());
        assert!(partition.truncate_after(0).unwrap_err().is_closed());
        assert!(partition.seal().unwrap_err().is_closed());
        assert!(partition.read_one(0).unwrap_err().is_closed());
        assert!(partition.describe().unwrap_err().is_closed());
        assert!(partition.tail(0).and_then(|mut tail| tail.next_batch(1, None).map(drop)).unwrap_err().is_closed());
    }
}

#[track_caller]
fn assert_locked(sim: &SimDisk) {
    let error = sim::try_open(sim, &tiny(270)).map(drop).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
}

/// Opens the directory as soon as it is let go of.
#[track_caller]
fn open_when_let_go_of(sim: &SimDisk) -> Broker {
    let mut broker = None;
    until("the directory is let go of", || {
        match sim::try_open(sim, &tiny(270)) {
            Ok(opened) => broker = Some(opened),
            Err(Error::Locked { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        broker.is_some()
    });
    broker.unwrap()
}

/// What may hang: by which operation, and how the topic has to be for that.
fn cases() -> Vec<(OpKind, Durability, bool)> {
    let interval = Durability::Interval { bytes: 1, time: Duration::from_secs(3600) };
    let mut cases = Vec::new();
    for overlap in [false, true] {
        cases.extend([Durability::Durable, interval, Durability::Os].map(|durability| (OpKind::Write, durability, overlap)));
        // A durable commit is a write; the others are synced later, by upkeep or when it is closed.
        cases.extend([interval, Durability::Os].map(|durability| (OpKind::Sync, durability, overlap)));
    }
    cases
}

#[test]
fn b141_a_disk_that_does_not_answer_holds_up_closing_no_longer_than_its_limit() {
    for (hangs, durability, overlap) in cases() {
        for limit in [Duration::ZERO, LIMIT] {
            eprintln!("{hangs:?}, {durability:?}, overlapping rings {overlap}, {limit:?}");
            let sim = SimDisk::new(seed());
            sim.overlap_rings(overlap);
            let broker = sim::open(&sim);
            // There is room for all: making more would be one more thing that may hang.
            let topic = TopicConfig { durability, partitions: 2, preallocate_bytes: 1 << 20, ..tiny(1 << 20) };
            let topic = broker.create_topic(TOPIC, topic).unwrap();
            let (partition, other) = (topic.partition(0).unwrap(), topic.partition(1).unwrap());
            let model: Vec<_> = (0..5).map(record).collect();
            for record in &model[..2] {
                append(&partition, &record.0, &record.1);
                append(&other, &record.0, &record.1);
            }
            partition.sync().unwrap();
            let mut reader = partition.reader().unwrap();
            let mut tail = partition.tail_with(2, Visibility::Appended).unwrap();
            let (told, end) = mpsc::channel();
            let waits = thread::spawn(move || {
                let mut last = Ok(None);
                while let Ok(records) = &last {
                    told.send(records.is_some()).unwrap();
                    last = tail.next_batch(1 << 20, None).map(|records| records.map(|records| records.len()));
                }
                last.unwrap_err()
            });
            assert!(!end.recv().unwrap());

            let hold = sim.hold(hangs, Some(LOG));
            let first = partition.append(batch(&model[2..3])).unwrap();
            let waiting = match (hangs, durability) {
                (OpKind::Write, _) => {
                    hold.wait_until_held();
                    // Others wait behind it.
                    vec![first, partition.append(batch(&model[3..4])).unwrap(), partition.append(batch(&model[4..])).unwrap()]
                }
                _ => {
                    first.wait().unwrap();
                    partition.append(batch(&model[3..])).unwrap().wait().unwrap();
                    Vec::new()
                }
            };
            let (twin, owner) = (broker.clone(), broker.clone());
            assert_timed_out(broker.close_within(limit), limit);
            hold.wait_until_held();

            // All are told, those that wait at the end of the log among them, and the broker's other handles.
            assert_dead(&partition);
            assert_dead(&other);
            assert!(reader.read(0, 1 << 20).unwrap_err().is_closed());
            assert!(waits.join().unwrap().is_closed());
            assert!(twin.topic(TOPIC).map(drop).unwrap_err().is_closed());
            assert!(twin.create_topic("more", tiny(270)).map(drop).unwrap_err().is_closed());
            assert!(twin.close_within(limit).unwrap_err().is_closed());
            assert!(owner.close().unwrap_err().is_closed());
            let mut waiting: Vec<_> = waiting.into_iter().map(|ticket| ticket.try_wait().expect_err("an answer to what hangs")).collect();

            // The other partition is closed, though this one is not.
            let checkpoint = dir().with_file_name("1").join("checkpoint");
            until("the partition that can be closed is", || {
                sim.exists(&checkpoint) && Slot::newest(&sim.read_file(&checkpoint)).is_some_and(|slot| slot.clean)
            });
            assert_closed_files(&files_in(&sim, checkpoint.parent().unwrap()), 1);

            // Nobody else gets at what the device may still write, also when no handle is left; and no handle waits when it goes.
            assert_locked(&sim);
            drop((reader, other, topic, partition));
            assert_locked(&sim);
            assert!(hold.held() > 0);

            hold.release();
            for (ticket, number) in waiting.drain(..).zip(2..) {
                assert_eq!(ticket.wait().unwrap(), number..number + 1);
            }
            let broker = open_when_let_go_of(&sim);
            let partition = partition_of(&broker);
            assert!(contents(&read_up_to(&partition, Visibility::Appended, 0, 1 << 20)) == model);
            assert_eq!(append(&partition, b"k", b"goes on"), 5);
            drop(partition);
            broker.close_within(long()).unwrap();
            sim::assert_closed(&sim, 1);
        }
    }
}

/// Longer than anything takes that does not hang.
fn long() -> Duration {
    crate::oracle::HANG_LIMIT
}

/// Over the kernel: it has the memory and the file, and a thread that waits within a call, or an operation of a ring that does not complete.
#[test]
fn b141_what_the_kernel_is_at_work_on_stays_its_own_until_it_is_done() {
    for backend in BACKENDS {
        for (hangs, durability) in [(Op::Write, Durability::Durable), (Op::Sync, Durability::Os)] {
            let Some(disk) = FuseDisk::new() else { return };
            eprintln!("{backend:?}, {hangs:?}");
            let topic = TopicConfig { durability, preallocate_bytes: 1 << 20, ..tiny(1 << 20) };
            let (broker, partition) = create(&disk.data(), backend, &topic);
            let model: Vec<_> = (0..200).map(record).collect();
            append(&partition, &model[0].0, &model[0].1);
            partition.sync().unwrap();
            // Where much comes at once, a ring writes.
            let append_all =
                |some: &[_]| some.iter().map(|record| partition.append(batch(std::slice::from_ref(record))).unwrap()).collect();
            let mut tickets: Vec<_> = append_all(&model[1..150]);
            let hold = disk.hold(hangs, LOG);
            tickets.append(&mut append_all(&model[150..]));
            if hangs == Op::Write {
                hold.wait_until_held();
            }
            let error = broker.close_within(LIMIT).unwrap_err();
            assert!(matches!(error, Error::CloseTimedOut { .. }), "{error}");
            hold.wait_until_held();
            assert_dead(&partition);
            drop(partition);
            // Memory that was let go of would be given out again here, and written over.
            let others: Vec<_> = (0..64).map(|_| vec![0xEE_u8; 64 << 10]).collect();
            let error = Broker::open(disk.data(), config(backend, topic.clone())).map(drop).unwrap_err();
            assert!(matches!(error, Error::Locked { .. }), "{error}");
            drop(hold);
            for (number, ticket) in (1..).zip(tickets) {
                assert_eq!(ticket.wait().unwrap(), number..number + 1);
            }
            drop(others);
            let mut broker = None;
            until("the directory is let go of", || {
                broker = Broker::open(disk.data(), config(backend, topic.clone())).ok();
                broker.is_some()
            });
            let broker = broker.unwrap();
            assert!(contents(&read_all(&partition_of(&broker))) == model);
            broker.close_within(long()).unwrap();
        }
    }
}

/// Holds up `call`, on a thread of its own, and closes meanwhile.
#[track_caller]
fn assert_times_out_during(sim: &SimDisk, broker: Broker, hold: Hold, call: impl FnOnce() + Send + 'static) {
    let call = thread::spawn(call);
    hold.wait_until_held();
    assert_timed_out(broker.close_within(LIMIT), LIMIT);
    assert_locked(sim);
    hold.release();
    call.join().unwrap();
    drop(open_when_let_go_of(sim));
}

#[test]
fn b141_calls_that_hang_hold_up_closing_no_longer_than_its_limit() {
    // A topic that is made: its name is not durable yet.
    let (sim, broker, _) = sim::create(seed(), &tiny(270));
    let maker = broker.clone();
    let hold = sim.hold(OpKind::SyncDir, Some(DATA));
    assert_times_out_during(&sim, broker, hold, move || drop(maker.create_topic("more", tiny(270))));

    // Segments that are removed.
    let (sim, broker, partition) = sim::create(seed(), &tiny(270));
    for number in 0..40 {
        append(&partition, b"k", &[number; 100]);
    }
    let hold = sim.hold(OpKind::RemoveFile, Some(".log"));
    let remover = partition.clone();
    assert_times_out_during(&sim, broker, hold, move || drop(remover.truncate_before(30)));
    assert_dead(&partition);

    // A read: nothing of the broker's waits for it.
    let (sim, broker, partition) = sim::create(seed(), &TopicConfig { tail_bytes: 0, ..tiny(1 << 20) });
    append(&partition, b"k", b"v");
    let hold = sim.hold(OpKind::Read, Some(".log"));
    let mut reader = partition.reader_with(ReaderConfig::by(ReadMode::Buffered)).unwrap();
    let read = thread::spawn(move || reader.read(0, 1 << 20).map(|records| records.len()));
    hold.wait_until_held();
    broker.close_within(long()).unwrap();
    drop(sim::open(&sim));
    hold.release();
    let _ = read.join().unwrap();
}

#[test]
fn closing_within_a_limit_closes_all_and_tells_the_first_failure() {
    let sim = SimDisk::new(seed());
    let broker = sim::open(&sim);
    for name in ["a", "b"] {
        let topic = broker.create_topic(name, TopicConfig { partitions: 9, ..tiny(1 << 20) }).unwrap();
        for number in 0..9 {
            append(&topic.partition(number).unwrap(), b"k", b"v");
        }
    }
    let broken = broker.topic("b").unwrap().partition(3).unwrap();
    sim.fail(Fault::next(OpKind::Write, Effect::Error(EIO)).path("b/3/00000000000000000000.log"));
    assert!(broken.append(Batch::of(None, b"v").unwrap()).unwrap().wait().unwrap_err().is_failed());
    let error = broker.close_within(long()).unwrap_err();
    assert!(matches!(&error, Error::Failed { path, .. } if path == broken.path()), "{error}");
    for (name, number) in ["a", "b"].into_iter().flat_map(|name| (0..9).map(move |number| (name, number))) {
        if (name, number) != ("b", 3) {
            let dir = std::path::Path::new(DATA).join(name).join(number.to_string());
            assert_closed_files(&files_in(&sim, &dir), 1);
        }
    }
    drop(sim::open(&sim));
}
