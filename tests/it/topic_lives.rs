//! Topics that come and go: closed, deleted while they are in use, made by several at once, and described.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use sapwood::io::Disk;
use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Backend, Batch, Broker, Error, ReadMode, ReaderConfig, TopicConfig};

use crate::format::segment_path;
use crate::oracle::{HANG_LIMIT, assert_sound};
use crate::sim::{self, DATA, EIO, ENOSPC, tiny};
use crate::support::{
    TOPIC, append, batch, contents, create, each_backend, open, partition_dir, partition_of, read_all, scratch, seed, segments_of, small,
};

/// Names in a data directory on the simulated disk, the lock aside.
fn names_in(sim: &SimDisk) -> Vec<String> {
    let all = sim.clone().list(Path::new(DATA)).unwrap().into_iter().map(|entry| entry.name.into_string().unwrap());
    all.filter(|name| name != ".lock").collect()
}

// -------------------------------------------------------------------- one topic keeps nobody from another

/// Does something long to a topic, which the disk holds up in the middle, and sees what others can do meanwhile.
#[track_caller]
fn meanwhile(on: OpKind, path: &'static str, long: impl Fn(&Broker) + Send + Sync + Copy + 'static) {
    let (sim, broker, _) = sim::create(seed(), &tiny(1000));
    let slow = broker.create_topic("slow", tiny(1000)).unwrap().partition(0).unwrap();
    append(&slow, b"k", b"v");
    drop(slow);
    let hold = sim.hold(on, Some(path));
    let worker = thread::spawn({
        let broker = broker.clone();
        move || long(&broker)
    });
    hold.wait_until_held();
    let (done, is_done) = mpsc::channel();
    let others = thread::spawn({
        let broker = broker.clone();
        move || {
            broker.produce(TOPIC, None, b"v").unwrap();
            assert!(broker.topics().contains(&TOPIC.to_owned()));
            broker.create_topic("third", tiny(1000)).unwrap();
            broker.alter_topic("third", |config| config.linger_us = 3).unwrap();
            assert_eq!(broker.describe_topic(TOPIC).unwrap().partitions.len(), 1);
            broker.delete_topic("third").unwrap();
            assert!(matches!(broker.topic("third").unwrap_err(), Error::TopicNotFound { .. }));
            // The name itself can be asked for without waiting, too.
            drop(broker.topic("slow"));
            done.send(()).unwrap();
        }
    });
    let told = is_done.recv_timeout(HANG_LIMIT);
    assert_eq!(hold.held(), 1, "it is at it still");
    hold.release();
    told.expect("others wait for a topic that they did not ask for");
    others.join().unwrap();
    worker.join().unwrap();
    broker.close().unwrap();
}

#[test]
fn making_closing_altering_and_deleting_a_topic_keep_nobody_from_another() {
    meanwhile(OpKind::CreateDir, ".new-new/0", |broker| drop(broker.create_topic("new", tiny(1000)).unwrap()));
    meanwhile(OpKind::Create, "/new/0/00000000000000000000.log", |broker| drop(broker.create_topic("new", tiny(1000)).unwrap()));
    meanwhile(OpKind::Sync, "slow/topic.json.tmp", |broker| {
        broker.alter_topic("slow", |config| config.linger_us = 9).unwrap();
    });
    meanwhile(OpKind::Sync, "/slow/0/00000000000000000000.log", |broker| broker.topic("slow").unwrap().close().unwrap());
    meanwhile(OpKind::Sync, "/slow/0/00000000000000000000.log", |broker| broker.delete_topic("slow").unwrap());
    meanwhile(OpKind::Rename, "/slow", |broker| broker.delete_topic("slow").unwrap());
    meanwhile(OpKind::RemoveFile, ".del-slow/0/00000000000000000000.log", |broker| broker.delete_topic("slow").unwrap());
}

#[test]
fn closing_the_broker_waits_for_who_makes_a_topic() {
    let (sim, broker, _) = sim::create(seed(), &tiny(1000));
    let hold = sim.hold(OpKind::CreateDir, Some(".new-new/0"));
    let making = thread::spawn({
        let broker = broker.clone();
        move || broker.create_topic("new", tiny(1000)).and_then(|topic| topic.produce(None, b"v")).map(drop)
    });
    hold.wait_until_held();
    let closing = thread::spawn({
        let broker = broker.clone();
        move || broker.close()
    });
    sim::until("the broker takes no more orders", || broker.topic(TOPIC).is_err_and(|error| error.is_closed()));
    assert!(broker.create_topic("late", tiny(1000)).unwrap_err().is_closed());
    assert!(broker.delete_topic(TOPIC).unwrap_err().is_closed());
    hold.release();
    // It was made, and then closed.
    closing.join().unwrap().unwrap();
    assert!(making.join().unwrap().is_ok_and(|()| true) || broker.topics().is_empty());
    assert_eq!(sim::open(&sim).topics(), ["new", TOPIC]);
}

// -------------------------------------------------------------------- several at once

#[test]
fn of_two_creations_at_once_one_wins_and_the_other_leaves_nothing_behind() {
    // Wherever the first one is when the second one comes.
    let places = [
        (OpKind::CreateDir, ".new-t"),
        (OpKind::Sync, ".new-t/topic.json"),
        (OpKind::Rename, ".new-t"),
        (OpKind::SyncDir, DATA),
        (OpKind::Create, "/t/1/00000000000000000000.log"),
    ];
    for (on, path) in places {
        for fails in [false, true] {
            let sim = SimDisk::new(seed());
            let broker = sim::open(&sim);
            let hold = sim.hold(on, Some(path));
            let create = |partitions| {
                let broker = broker.clone();
                move || broker.create_topic(TOPIC, TopicConfig { partitions, ..tiny(1000) }).map(drop)
            };
            let first = thread::spawn(create(2));
            hold.wait_until_held();
            let second = thread::spawn(create(3));
            assert!(matches!(broker.topic(TOPIC).unwrap_err(), Error::TopicNotFound { .. }), "nobody has it before it is whole");
            assert!(broker.topics().is_empty());
            if fails {
                sim.fail(Fault::next(on, Effect::Error(EIO)).path(path));
            }
            hold.release();
            let (first, second) = (first.join().unwrap(), second.join().unwrap());
            let what = format!("{on:?} of {path}, fails: {fails}");
            if fails {
                assert!(matches!(first, Err(Error::Io { .. })), "{what}: {first:?}");
                second.unwrap_or_else(|error| panic!("{what}: {error}"));
            } else {
                first.unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(matches!(&second, Err(Error::TopicExists { topic }) if topic == TOPIC), "{what}: {second:?}");
            }
            assert_eq!(names_in(&sim), [TOPIC], "{what}");
            assert_eq!(broker.num_partitions(TOPIC).unwrap(), if fails { 3 } else { 2 });
            broker.produce(TOPIC, None, b"v").unwrap();
            broker.close().unwrap();
            let broker = sim::open(&sim);
            assert!(broker.report().removed.is_empty() && broker.report().ignored.is_empty(), "{what}: {:?}", broker.report());
        }
    }
}

#[test]
fn a_creation_beside_a_deletion_waits_for_it_and_begins_anew() {
    let places = [
        (OpKind::Sync, "/t/0/00000000000000000000.log"),
        (OpKind::Rename, "/t"),
        (OpKind::SyncDir, DATA),
        (OpKind::RemoveFile, ".del-t/0/00000000000000000000.log"),
        (OpKind::RemoveDir, ".del-t"),
    ];
    for (on, path) in places {
        let (sim, broker, partition) = sim::create(seed(), &tiny(1000));
        append(&partition, b"k", b"old");
        let hold = sim.hold(on, Some(path));
        let spawn = |work: fn(&Broker) -> sapwood::Result<()>| {
            let broker = broker.clone();
            thread::spawn(move || work(&broker))
        };
        let deleting = spawn(|broker| broker.delete_topic(TOPIC));
        hold.wait_until_held();
        let creating = spawn(|broker| broker.create_topic(TOPIC, tiny(1000)).map(drop));
        assert!(matches!(broker.topic(TOPIC).unwrap_err(), Error::TopicNotFound { .. }));
        hold.release();
        deleting.join().unwrap().unwrap();
        creating.join().unwrap().unwrap();
        assert!(partition.append(Batch::of(None, b"late").unwrap()).unwrap_err().is_closed());
        assert_eq!(append(&partition_of(&broker), b"k", b"new"), 0, "{on:?} of {path}");
        assert_eq!(names_in(&sim), [TOPIC]);
        sim.power_loss_keeping_nothing();
        drop((partition, broker));
        let rows = read_all(&partition_of(&sim::open(&sim)));
        assert_eq!(contents(&rows), [(b"k".to_vec(), b"new".to_vec())], "{on:?} of {path}");
    }
}

#[test]
fn threads_that_make_and_delete_one_name_in_a_loop_never_mix_its_lives() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &small());
        let (made, deleted, life) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for thread in 0..4 {
                let (broker, made, deleted, life) = (&broker, &made, &deleted, &life);
                scope.spawn(move || {
                    for round in 0..40 {
                        if (thread + round) % 2 == 0 {
                            match broker.create_topic(TOPIC, small()) {
                                Ok(topic) => {
                                    made.fetch_add(1, Ordering::SeqCst);
                                    let number = life.fetch_add(1, Ordering::SeqCst).to_be_bytes();
                                    let mut offsets = BTreeSet::new();
                                    // As long as it lives, its records are its own.
                                    for _ in 0..5 {
                                        match topic.produce(None, &number) {
                                            Ok(at) => assert!(offsets.insert(at.offset) && at.offset < 5, "{at:?}"),
                                            Err(error) => assert!(error.is_closed(), "{error}"),
                                        }
                                    }
                                    let partition = topic.partition(0).unwrap();
                                    for offset in offsets {
                                        match partition.read_one(offset) {
                                            Ok(record) => assert_eq!(record.value[..], number),
                                            Err(error) => assert!(error.is_closed(), "{error}"),
                                        }
                                    }
                                }
                                Err(error) => assert!(matches!(error, Error::TopicExists { .. }), "{error}"),
                            }
                        } else {
                            match broker.delete_topic(TOPIC) {
                                Ok(()) => drop(deleted.fetch_add(1, Ordering::SeqCst)),
                                Err(error) => assert!(matches!(error, Error::TopicNotFound { .. }), "{error}"),
                            }
                        }
                    }
                });
            }
        });
        let left = made.into_inner() - deleted.into_inner();
        assert_eq!(broker.topics().len() as u64, left);
        broker.close().unwrap();
        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.topics().len() as u64, left);
        assert!(broker.report().removed.is_empty() && broker.report().ignored.is_empty(), "{:?}", broker.report());
    });
}

// -------------------------------------------------------------------- closing

#[test]
fn a_closed_topic_answers_what_was_in_flight_and_nothing_later() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &small());
        broker.create_topic("other", small()).unwrap();
        let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 2, ..small() }).unwrap();
        let partition = topic.partition(0).unwrap();
        append(&partition, b"k", b"first");
        let mut reader = partition.reader().unwrap();
        let mut tail = partition.tail(0).unwrap();
        let tickets: Vec<_> = (0..50).map(|_| partition.append(Batch::of(Some(b"k"), b"queued").unwrap()).unwrap()).collect();
        topic.close().unwrap();
        for (number, ticket) in (1..).zip(tickets) {
            assert_eq!(ticket.wait().unwrap(), number..number + 1, "what was queued before is written");
        }
        let one = || Batch::of(None, b"late").unwrap();
        let errors = [
            partition.append(one()).map(drop).unwrap_err(),
            partition.append_and_wait(one()).map(drop).unwrap_err(),
            partition.try_append(one()).unwrap_err().error.expect("it is not that the queue is full"),
            partition.sync().unwrap_err(),
            partition.reader().map(drop).unwrap_err(),
            partition.read_one(0).map(drop).unwrap_err(),
            partition.tail(0).map(drop).unwrap_err(),
            partition.describe().map(drop).unwrap_err(),
            reader.read(0, 100).map(drop).unwrap_err(),
            tail.next_record(None).map(drop).unwrap_err(),
            topic.produce(None, b"late").map(drop).unwrap_err(),
            topic.describe().map(drop).unwrap_err(),
            topic.tail([0, 0]).map(drop).unwrap_err(),
            topic.partition(1).unwrap().append(one()).map(drop).unwrap_err(),
            broker.topic(TOPIC).unwrap().produce(None, b"late").map(drop).unwrap_err(),
            broker.produce(TOPIC, None, b"late").map(drop).unwrap_err(),
            broker.consume(TOPIC, 0, 0).map(drop).unwrap_err(),
            broker.alter_topic(TOPIC, |config| config.linger_us = 1).map(drop).unwrap_err(),
            broker.describe_topic(TOPIC).map(drop).unwrap_err(),
        ];
        for (number, error) in errors.iter().enumerate() {
            assert!(error.is_closed(), "{number}: {error}");
        }
        topic.close().expect("closing twice is closing once");
        assert!(matches!(broker.create_topic(TOPIC, small()).unwrap_err(), Error::TopicExists { .. }), "it is there, closed");
        assert_eq!(broker.topics(), ["other", TOPIC]);
        broker.produce("other", None, b"goes on").unwrap();
        // No file of it is open, but by readers, no room is kept, and its files are whole.
        drop((reader, tail));
        crate::oracle::assert_closed(&partition_dir(data.path()), 1);
        let dir = fs::canonicalize(data.path().join(TOPIC)).unwrap();
        let held = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
        let held: Vec<_> = held.filter(|path| path.starts_with(&dir)).collect();
        assert!(held.is_empty(), "{held:?}");
        // The directory is the broker's still; opened again, the topic serves.
        assert!(matches!(Broker::open(data.path(), crate::support::config(backend, small())).unwrap_err(), Error::Locked { .. }));
        broker.close().unwrap();
        let broker = open(data.path(), backend, &small());
        assert_eq!(append(&partition_of(&broker), b"k", b"again"), 51);
        broker.topic(TOPIC).unwrap().close().unwrap();
        broker.delete_topic(TOPIC).unwrap();
        broker.create_topic(TOPIC, small()).unwrap();
        assert_eq!(append(&partition_of(&broker), b"k", b"anew"), 0);
    });
}

#[test]
fn appends_that_wait_for_room_end_when_the_topic_is_closed_or_deleted() {
    for deletes in [false, true] {
        let config = TopicConfig { queue_batches: 1, ..tiny(1 << 20) };
        let (sim, broker, partition) = sim::create(seed(), &config);
        append(&partition, b"", b"one");
        let hold = sim.hold(OpKind::Write, Some(".log"));
        let producers: Vec<_> = (0..6)
            .map(|_| {
                let partition = partition.clone();
                thread::spawn(move || {
                    let mut answered = 0;
                    loop {
                        match partition.append(Batch::of(None, b"v").unwrap()).and_then(sapwood::Ticket::wait) {
                            Ok(_) => answered += 1,
                            Err(error) if error.is_closed() => return answered,
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        hold.wait_until_held();
        let ending = thread::spawn({
            let broker = broker.clone();
            move || if deletes { broker.delete_topic(TOPIC) } else { broker.topic(TOPIC).unwrap().close() }
        });
        hold.release();
        ending.join().unwrap().unwrap();
        let answered: u64 = producers.into_iter().map(|producer| producer.join().unwrap()).sum();
        if !deletes {
            assert_eq!(sim::assert_closed(&sim, 1).next_offset, 1 + answered, "what was answered is there, and nothing else");
        }
        assert_eq!(names_in(&sim).len(), usize::from(!deletes));
    }
}

// -------------------------------------------------------------------- deleting

#[test]
fn the_space_of_a_deleted_topic_comes_back_while_readers_hold_its_files() {
    each_backend(|backend| {
        for mode in [ReadMode::Buffered, ReadMode::Direct] {
            let data = scratch();
            let (broker, partition) = create(data.path(), backend, &segments_of(20_000));
            for number in 0..20u8 {
                append(&partition, b"k", &[number; 5000]);
            }
            let mut reader = partition.reader_with(ReaderConfig { piece_bytes: 4096, ..ReaderConfig::by(mode) }).unwrap();
            assert_eq!(reader.read(0, 1).unwrap().len(), 1);
            let dir = partition_dir(data.path());
            let bases: Vec<_> = crate::oracle::assert_sound_while_open(&dir).segments.iter().map(|segment| segment.base).collect();
            assert!(bases.len() > 4, "{bases:?}");
            // As another process does that looks at it just then.
            let held: Vec<_> =
                bases.iter().flat_map(|&base| ["log", "index"].map(|kind| File::open(segment_path(&dir, base, kind)).unwrap())).collect();
            // And as an export does.
            let export = data.path().join("export.log");
            fs::hard_link(segment_path(&dir, bases[1], "log"), &export).unwrap();
            let exported = fs::read(&export).unwrap();
            broker.delete_topic(TOPIC).unwrap();
            for (number, file) in held.iter().enumerate() {
                let meta = file.metadata().unwrap();
                if number == 2 {
                    assert_eq!((meta.nlink(), meta.len()), (1, exported.len() as u64), "it has another name");
                } else {
                    assert_eq!((meta.nlink(), meta.len(), meta.blocks()), (0, 0, 0), "file {number}");
                }
            }
            assert!(fs::read(&export).unwrap() == exported);
            assert!(reader.read(0, 1).unwrap_err().is_closed());
            assert!(!data.path().join(TOPIC).exists());
        }
    });
}

/// A copy that was set aside is deleted with its topic, and nothing is done to those who have it open.
#[test]
fn what_was_set_aside_keeps_its_bytes_for_who_holds_it() {
    let data = scratch();
    let (broker, partition) = create(data.path(), Backend::Auto, &small());
    append(&partition, b"k", b"v");
    let path = partition_dir(data.path()).join("00000000000000000000.30.torn");
    fs::write(&path, b"once").unwrap();
    let held = File::open(&path).unwrap();
    broker.delete_topic(TOPIC).unwrap();
    assert_eq!((held.metadata().unwrap().nlink(), held.metadata().unwrap().len()), (0, 4));
}

#[test]
fn a_deletion_that_fails_can_be_made_again_and_brings_nothing_back() {
    let faults = [
        (Fault::next(OpKind::Rename, Effect::Error(EIO)).path("/t"), true),
        (Fault::next(OpKind::SyncDir, Effect::Error(EIO)).path("data"), false),
        (Fault::next(OpKind::RemoveFile, Effect::Error(EIO)).path(".log"), false),
        (Fault::next(OpKind::RemoveDir, Effect::Error(EIO)).path(".del-t/0"), false),
        (Fault::next(OpKind::RemoveDir, Effect::Error(EIO)).path(".del-t"), false),
    ];
    for (number, (fault, is_there)) in faults.into_iter().enumerate() {
        let (sim, broker, partition) = sim::create(seed(), &tiny(300));
        for offset in 0..9 {
            assert_eq!(append(&partition, b"k", &[7; 90]), offset);
        }
        sim.fail(fault);
        let error = broker.delete_topic(TOPIC).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "fault {number}: {error}");
        assert!(partition.read_one(0).unwrap_err().is_closed(), "fault {number}");
        assert_eq!(broker.topics().len(), usize::from(is_there), "fault {number}");
        if is_there {
            assert!(matches!(broker.create_topic(TOPIC, tiny(300)).unwrap_err(), Error::TopicExists { .. }));
            broker.delete_topic(TOPIC).unwrap();
        }
        assert!(matches!(broker.delete_topic(TOPIC).unwrap_err(), Error::TopicNotFound { .. }), "fault {number}");
        broker.create_topic(TOPIC, tiny(300)).unwrap();
        assert_eq!(append(&partition_of(&broker), b"k", b"new"), 0, "fault {number}");
        if number % 2 == 0 {
            broker.delete_topic(TOPIC).unwrap();
            broker.create_topic(TOPIC, tiny(300)).unwrap();
        }
        sim.power_loss_keeping_nothing();
        drop((partition, broker));
        let broker = sim::open(&sim);
        assert_eq!((broker.topics(), names_in(&sim)), (vec![TOPIC.to_owned()], vec![TOPIC.to_owned()]), "fault {number}");
        assert_eq!(partition_of(&broker).next_offset(), u64::from(number % 2 == 1), "fault {number}");
    }
}

#[test]
fn a_file_that_cannot_be_emptied_is_deleted_all_the_same() {
    for fault in [Fault::next(OpKind::Open, Effect::Error(24)), Fault::next(OpKind::SetLen, Effect::Error(EIO))] {
        let (sim, broker, partition) = sim::create(seed(), &tiny(300));
        append(&partition, b"k", &[7; 90]);
        sim.fail(fault.path(".del-t/0/00000000000000000000.log"));
        broker.delete_topic(TOPIC).unwrap();
        assert!(names_in(&sim).is_empty());
    }
}

/// B072: readers that are at it when the topic goes, and comes again under the same name, see their own records or `Closed`.
#[test]
fn b072_readers_of_a_topic_that_is_deleted_end_with_closed_and_see_nothing_of_another() {
    each_backend(|backend| {
        let data = scratch();
        let config = TopicConfig { tail_bytes: 0, ..segments_of(700) };
        let broker = open(data.path(), backend, &config);
        for life in 0..25u8 {
            let topic = broker.create_topic(TOPIC, config.clone()).unwrap();
            let partition = topic.partition(0).unwrap();
            for _ in 0..4 {
                partition.append(batch(&[([life], [life; 200]); 4])).unwrap().wait().unwrap();
            }
            thread::scope(|scope| {
                let readers: Vec<_> = (0..8u64)
                    .map(|number| {
                        let partition = &partition;
                        let mode = if number % 2 == 0 { ReadMode::Buffered } else { ReadMode::Direct };
                        scope.spawn(move || -> Result<(), Error> {
                            let mut reader = partition.reader_with(ReaderConfig { piece_bytes: 4096, ..ReaderConfig::by(mode) })?;
                            for round in number.. {
                                let from = round * 5 % 16;
                                let records = reader.read(from, 400)?;
                                assert!(!records.is_empty(), "it ends with an error, not without records");
                                for (offset, record) in (from..).zip(&records) {
                                    assert_eq!((record.offset, record.key, record.value), (offset, &[life][..], &[life; 200][..]));
                                }
                                assert_eq!(reader.read_one(round % 16)?.value, [life; 200]);
                            }
                            unreachable!("it reads until it is closed")
                        })
                    })
                    .collect();
                broker.delete_topic(TOPIC).unwrap();
                if life % 2 == 0 {
                    // What comes next under that name is not theirs.
                    let next = broker.create_topic(TOPIC, config.clone()).unwrap().partition(0).unwrap();
                    next.append(batch(&[([255], [255; 200]); 16])).unwrap().wait().unwrap();
                }
                for reader in readers {
                    let error = reader.join().unwrap().unwrap_err();
                    assert!(error.is_closed(), "{error}");
                }
            });
            if life % 2 == 0 {
                broker.delete_topic(TOPIC).unwrap();
            }
        }
    });
}

// -------------------------------------------------------------------- names

/// B087: whatever is left of an old topic, under its own name or a hidden one: a new one begins empty, or is refused.
#[test]
fn b087_what_is_left_of_an_old_topic_never_mixes_with_a_new_one() {
    each_backend(|backend| {
        for places in [&["t"][..], &[".del-t"], &[".new-t"], &["t", ".del-t"], &["t", ".del-t", ".new-t"]] {
            for part in ["0/00000000000000000000.log", "0/00000000000000000000.index", "0", "1/00000000000000000006.log", "topic.json"] {
                let data = scratch();
                let other = scratch();
                let (broker, partition) = create(other.path(), backend, &TopicConfig { partitions: 2, ..segments_of(270) });
                for _ in 0..12 {
                    append(&partition, b"k", b"old");
                }
                drop(partition);
                broker.close().unwrap();
                for place in places {
                    let to = data.path().join(place).join(part);
                    fs::create_dir_all(to.parent().unwrap()).unwrap();
                    match part {
                        "0" => fs::create_dir(&to).unwrap(),
                        _ => drop(fs::copy(other.path().join("t").join(part.replace("1/", "0/").replace("6.log", "0.log")), &to).unwrap()),
                    }
                }
                let what = format!("{part} in {places:?}");
                let Ok(broker) = Broker::open(data.path(), crate::support::config(backend, small())) else {
                    // A topic of which a part is missing is not opened; it must be a part of one.
                    assert!(places.contains(&"t"), "{what}");
                    continue;
                };
                let is_whole = broker.topics() == [TOPIC];
                match broker.create_topic(TOPIC, small()) {
                    Ok(topic) => {
                        assert!(!is_whole, "{what}");
                        assert_eq!(topic.produce(None, b"new").unwrap().offset, 0, "{what}");
                    }
                    Err(error) => {
                        assert!(matches!(error, Error::TopicExists { .. }), "{what}: {error}");
                        if is_whole {
                            broker.delete_topic(TOPIC).unwrap();
                            broker.create_topic(TOPIC, small()).unwrap();
                            assert_eq!(broker.produce(TOPIC, None, b"new").unwrap().offset, 0, "{what}");
                        }
                    }
                }
                if broker.topic(TOPIC).is_ok() {
                    let rows = read_all(&partition_of(&broker));
                    assert_eq!(contents(&rows), [(vec![], b"new".to_vec())], "{what}");
                    broker.close().unwrap();
                    assert_sound(&partition_dir(data.path()));
                }
            }
        }
    });
}

/// B089: every name outside the alphabet, before anything is asked of the system.
#[test]
fn b089_no_name_outside_the_alphabet_reaches_the_system() {
    let (sim, broker, _) = sim::create(1, &tiny(270));
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let mut wrong: Vec<String> = ["", ".", "..", "...", "../x", "a/../../x", "/abs", "./t", "t/", "t/0", ".lock", ".new-t", ".del-t", ".t"]
        .map(str::to_owned)
        .into();
    // Each byte that text can hold, and some longer ones, alone, first, in the middle and last.
    let others = ['\u{80}', 'ü', '\u{301}', '\u{2024}', '\u{2215}', '日', '\u{fffd}', '\u{1f980}'];
    for bad in (0..128u8).map(char::from).chain(others).filter(|&c| !is_allowed(c)) {
        wrong.extend([format!("{bad}"), format!("{bad}t"), format!("t{bad}t"), format!("t{bad}")]);
    }
    wrong.extend((250..=256).chain([1000, 1 << 20]).map(|len| "x".repeat(len)));
    assert!(wrong.len() > 250);
    // The writer's thread may still be at something of its own.
    broker.topic(TOPIC).unwrap().close().unwrap();
    sim.clear_ops();
    for name in &wrong {
        let errors = [
            broker.create_topic(name, tiny(270)).map(drop).unwrap_err(),
            broker.delete_topic(name).unwrap_err(),
            broker.alter_topic(name, |_| unreachable!("it is not asked")).map(drop).unwrap_err(),
            broker.describe_topic(name).map(drop).unwrap_err(),
            broker.topic(name).map(drop).unwrap_err(),
            broker.produce(name, None, b"v").map(drop).unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(&error, Error::InvalidTopicName { name: told } if told == name), "{name:?}: {error}");
        }
    }
    assert_eq!(sim.ops().len(), 0, "{:?}", sim.ops());
}

/// B090: whatever length is accepted can be made, altered, deleted, and cleared away half made and half deleted.
#[test]
fn b090_names_of_every_length_work_under_all_their_names_or_are_refused() {
    let data = scratch();
    let open = || open(data.path(), Backend::Posix, &small());
    let mut broker = open();
    for len in 1..=256 {
        let name = "n".repeat(len);
        let made = broker.create_topic(&name, small());
        if len > 249 {
            assert!(matches!(made.unwrap_err(), Error::InvalidTopicName { .. }), "{len}");
            continue;
        }
        made.unwrap_or_else(|error| panic!("{len}: {error}")).produce(None, b"v").unwrap();
        if len % 31 == 0 || len > 240 {
            broker.alter_topic(&name, |config| config.linger_us = 1).unwrap_or_else(|error| panic!("{len}: {error}"));
            // As a crash leaves them.
            broker.close().unwrap();
            for hidden in [".new-", ".del-"] {
                crate::support::copy_dir(&data.path().join(&name), &data.path().join(format!("{hidden}{name}")));
            }
            broker = open();
            assert_eq!((broker.report().removed.len(), broker.topics()), (2, vec![name.clone()]), "{len}");
        }
        broker.delete_topic(&name).unwrap_or_else(|error| panic!("{len}: {error}"));
        let left: Vec<_> = fs::read_dir(data.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [".lock"], "{len}");
    }
}

// -------------------------------------------------------------------- describing

#[test]
fn a_topic_is_described_as_it_is() {
    each_backend(|backend| {
        let data = scratch();
        let config = TopicConfig { partitions: 2, ..segments_of(270) };
        let broker = open(data.path(), backend, &small());
        let topic = broker.create_topic(TOPIC, config.clone()).unwrap();
        let partition = topic.partition(1).unwrap();
        for number in 0..10u8 {
            append(&partition, b"key", &[number; 59]);
        }
        let description = broker.describe_topic(TOPIC).unwrap();
        assert_eq!((description.name.as_str(), &description.config), (TOPIC, &config));
        let [empty, full] = &description.partitions[..] else { panic!("{description:?}") };
        assert_eq!((empty.number, empty.first_offset, empty.next_offset, empty.durable_end, empty.segments), (0, 0, 0, 0, 1));
        assert_eq!((full.number, full.first_offset, full.next_offset, full.durable_end, full.segments), (1, 0, 10, 10, 4));
        assert!(empty.failure.is_none() && full.failure.is_none());
        assert!(full.bytes_on_disk >= 900 && full.bytes_on_disk > empty.bytes_on_disk, "{description:?}");
        broker.close().unwrap();
        assert!(topic.describe().unwrap_err().is_closed());
        let broker = open(data.path(), backend, &small());
        let described = broker.topic(TOPIC).unwrap().partition(1).unwrap();
        broker.topic(TOPIC).unwrap().partition(0).unwrap();
        let dir = data.path().join(TOPIC).join("1");
        let bytes: u64 = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        assert_eq!(described.describe().unwrap().bytes_on_disk, bytes);
    });
}

#[test]
fn a_description_tells_of_a_failure() {
    let (sim, broker, partition) = sim::create(seed(), &tiny(1 << 20));
    append(&partition, b"k", b"v");
    sim.fail(Fault::next(OpKind::Write, Effect::Error(EIO)).path(".log"));
    let error = partition.append_and_wait(Batch::of(None, b"lost").unwrap()).unwrap_err();
    let description = broker.describe_topic(TOPIC).unwrap();
    let failure = description.partitions[0].failure.as_ref().expect("it failed");
    assert_eq!(failure.to_string(), error.to_string());
    assert_eq!((description.partitions[0].next_offset, description.partitions[0].durable_end), (1, 1));
    // No room is no failure of the partition.
    let (sim, broker, partition) = sim::create(seed(), &tiny(1 << 20));
    sim.fail(Fault::next(OpKind::Allocate, Effect::Error(ENOSPC)));
    drop(partition.append_and_wait(Batch::of(None, &[0; 9000]).unwrap()));
    assert!(broker.describe_topic(TOPIC).unwrap().partitions[0].failure.is_none());
}
