//! Room on the device: what is allocated ahead is given back, and running out of it is an error that passes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sapwood::io::Disk;
use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Batch, Error, Partition, TopicConfig};

use crate::format::segment_path;
use crate::oracle::{assert_closed, assert_no_spare_blocks, assert_sound};
use crate::sim::{self, DATA, ENOSPC, tiny};
use crate::support::{
    TOPIC, append, assert_in_order, batch, contents, create, each_backend, open, partition_dir, partition_of, read_all, scratch, seed,
};

fn held(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// Whether the file system has room set aside.
fn can_allocate(dir: &Path) -> bool {
    rustix::fs::fallocate(tempfile::tempfile_in(dir).unwrap(), rustix::fs::FallocateFlags::empty(), 0, 4096).is_ok()
}

#[test]
fn b016_sealed_and_closed_files_give_back_what_was_allocated() {
    each_backend(|backend| {
        for preallocate_bytes in [1 << 20, 64 << 20] {
            let data = scratch();
            let topic = TopicConfig { segment_bytes: 64 << 20, preallocate_bytes, ..TopicConfig::default() };
            let (broker, partition) = create(data.path(), backend, &topic);
            let dir = partition_dir(data.path());
            append(&partition, b"", &[7; 1024]);
            let first = segment_path(&dir, 0, "log");
            let (length, while_open) = (fs::metadata(&first).unwrap().len(), held(&first));
            assert!(length > 1052, "nothing is kept ahead");
            assert!(!can_allocate(&dir) || while_open >= 1 << 20, "nothing is allocated ahead: {while_open} bytes held");
            // A record that does not fit in what is left seals the segment.
            append(&partition, b"", &vec![7; 64 << 20]);
            let meta = fs::metadata(&first).unwrap();
            assert_eq!(meta.len(), 1024 + 28);
            for extension in ["log", "index", "timeindex"] {
                assert_no_spare_blocks(&segment_path(&dir, 0, extension));
            }
            append(&partition, b"", b"in a third segment");
            drop(partition);
            broker.close().unwrap();
            // assert_closed looks at the blocks of every file.
            let report = assert_closed(&dir, 1);
            assert_eq!(report.segments.iter().map(|segment| segment.log_len).collect::<Vec<_>>(), [1052, (64 << 20) + 28, 46]);
        }
    });
}

#[test]
fn what_a_crash_left_allocated_is_given_back_later() {
    each_backend(|backend| {
        let data = scratch();
        let topic = TopicConfig { preallocate_bytes: 8 << 20, ..TopicConfig::default() };
        let (broker, partition) = create(data.path(), backend, &topic);
        append(&partition, b"", b"v");
        drop(partition);
        broker.close().unwrap();
        crate::child::append_and_kill(data.path(), backend, &topic, &[(vec![], vec![1; 100])]);
        let log = segment_path(&partition_dir(data.path()), 0, "log");
        assert!(!can_allocate(data.path()) || held(&log) >= 8 << 20, "{} held", held(&log));
        open(data.path(), backend, &topic).close().unwrap();
        assert_closed(&partition_dir(data.path()), 1);
        assert_eq!(fs::metadata(&log).unwrap().len(), 29 + 128);
    });
}

#[test]
fn many_idle_partitions_cost_no_more_than_their_share() {
    each_backend(|backend| {
        let data = scratch();
        let broker = open(data.path(), backend, &TopicConfig::default());
        broker.create_topic(TOPIC, TopicConfig { partitions: 20, preallocate_bytes: 4096, ..TopicConfig::default() }).unwrap();
        let logs = (0..20).map(|number| segment_path(&data.path().join(TOPIC).join(number.to_string()), 0, "log"));
        let total: u64 = logs.filter(|path| path.exists()).map(|path| held(&path)).sum();
        assert!(total <= 20 * (64 << 10), "{total} bytes are held by nothing");
        broker.close().unwrap();
        for number in 0..20 {
            assert_closed(&data.path().join(TOPIC).join(number.to_string()), 1);
        }
    });
}

pub fn try_append(partition: &Partition, records: &[(Vec<u8>, Vec<u8>)]) -> sapwood::Result<std::ops::Range<u64>> {
    partition.append(batch(records))?.wait()
}

/// A record of `size` bytes, header included, that tells its number.
pub fn record(number: u64, size: usize) -> (Vec<u8>, Vec<u8>) {
    let mut value = number.to_be_bytes().to_vec();
    value.resize(size - 28, b'x');
    (vec![], value)
}

#[test]
fn a_full_disk_takes_nothing_and_passes() {
    for segment_bytes in [300, 5000, 9000, 1 << 20] {
        for allocate in [true, false] {
            let sim = SimDisk::new(seed());
            let broker = sim::open(&sim);
            let mut model = Vec::new();
            broker.create_topic(TOPIC, tiny(segment_bytes)).unwrap();
            let partition = partition_of(&broker);
            if !allocate {
                sim.refuse_allocate(true);
            }
            for round in 1..4u64 {
                // Room for a few more pages, then none.
                sim.set_capacity(Some(sim.used() + 5 * 4096));
                let mut refused = 0;
                for number in 0..400 {
                    let next = record(round * 1000 + number, 250);
                    match try_append(&partition, std::slice::from_ref(&next)) {
                        Ok(offsets) => {
                            assert_eq!(offsets, model.len() as u64..model.len() as u64 + 1);
                            model.push(next);
                        }
                        Err(error) => {
                            assert!(error.is_disk_full() && allocate != error.is_failed(), "{error}");
                            assert!(!allocate || matches!(error, Error::DiskFull { appended: 0, .. }), "{error}");
                            refused += 1;
                        }
                    }
                    if refused == 3 {
                        break;
                    }
                }
                assert_eq!(refused, 3, "the disk was never full");
                assert_eq!(contents(&read_all(&partition)), model, "what was acknowledged is intact");
                assert_eq!(partition.next_offset(), model.len() as u64);
                sim.set_capacity(None);
                if !allocate {
                    // Where nothing can be allocated ahead, the write itself fails, and that stops the partition.
                    break;
                }
                let next = record(round, 250);
                assert_eq!(try_append(&partition, std::slice::from_ref(&next)).unwrap().start, model.len() as u64, "there is room again");
                model.push(next);
            }
            drop((partition, broker));
            let broker = sim::open(&sim);
            let rows = read_all(&partition_of(&broker));
            assert_in_order(&rows, 0);
            assert_eq!(contents(&rows)[..model.len()], model);
            broker.close().unwrap();
            sim::assert_closed(&sim, 1);
        }
    }
}

#[test]
fn a_batch_that_fits_in_part_tells_how_much_of_it_is_in_the_log() {
    let (sim, broker, partition) = sim::create(seed(), &tiny(4096));
    let mut model = vec![record(0, 100)];
    try_append(&partition, &model).unwrap();
    sim.set_capacity(Some(sim.used() + 2 * 4096));
    let large: Vec<_> = (1..=200).map(|number| record(number, 200)).collect();
    let error = try_append(&partition, &large).unwrap_err();
    let Error::DiskFull { appended, needed, .. } = &error else { panic!("{error}") };
    assert!(*needed > 0 && *appended < 200, "{error}");
    model.extend_from_slice(&large[..*appended as usize]);
    assert_eq!(partition.next_offset(), model.len() as u64, "{error}");
    sim.set_capacity(None);
    let rest = &large[*appended as usize..];
    assert_eq!(try_append(&partition, rest).unwrap(), model.len() as u64..201);
    model.extend_from_slice(rest);
    assert_eq!(contents(&read_all(&partition)), model);
    drop(partition);
    broker.close().unwrap();
    // Index entries that found no room are made up for by the next opening at the latest.
    sim::open(&sim).close().unwrap();
    assert_eq!(sim::assert_closed(&sim, 1).next_offset, 201);
}

#[test]
fn one_refused_allocation_costs_one_append() {
    for nth in 1..=3 {
        let (sim, broker, partition) = sim::create(seed(), &tiny(8192));
        try_append(&partition, &[record(0, 100)]).unwrap();
        sim.fail(Fault::next(OpKind::Allocate, Effect::Error(ENOSPC)).path(".log").nth(nth));
        let mut model = vec![record(0, 100)];
        let mut refused = 0;
        for number in 1..100 {
            let next = record(number, 1000);
            match try_append(&partition, std::slice::from_ref(&next)) {
                Ok(offsets) => {
                    assert_eq!(offsets.start, model.len() as u64);
                    model.push(next);
                }
                Err(error) => {
                    assert!(matches!(error, Error::DiskFull { appended: 0, .. }), "{error}");
                    refused += 1;
                }
            }
        }
        assert_eq!(refused, 1);
        assert_eq!(contents(&read_all(&partition)), model);
        drop(partition);
        broker.close().unwrap();
        assert_eq!(sim::assert_closed(&sim, 1).next_offset, model.len() as u64);
    }
}

#[test]
fn a_roll_that_finds_no_room_leaves_nothing_that_is_not_whole() {
    let topic = tiny(300);
    let names = |sim: &SimDisk| -> Vec<_> {
        let mut names: Vec<_> = sim.clone().list(&sim::dir()).unwrap().into_iter().map(|entry| entry.name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    for pages in 0..4 {
        let (sim, broker, partition) = sim::create(seed(), &topic);
        try_append(&partition, &[record(0, 250)]).unwrap();
        let before = names(&sim);
        sim.set_capacity(Some(sim.used() + pages * 4096));
        let mut model = vec![record(0, 250)];
        let error = loop {
            let next = record(model.len() as u64, 250);
            match try_append(&partition, std::slice::from_ref(&next)) {
                Ok(_) => model.push(next),
                Err(error) => break error,
            }
            assert!(model.len() < 100, "the disk was never full");
        };
        assert!(matches!(error, Error::DiskFull { .. }), "{error}");
        if model.len() == 1 {
            // The next segment's files may be there already, but nothing is in them.
            let new: Vec<_> = names(&sim).into_iter().filter(|name| !before.contains(name)).collect();
            assert!(new.iter().all(|name| sim.read_file(&sim::dir().join(name)).is_empty()), "{pages} pages: {new:?}");
        }
        let lost = sim.fork(2);
        lost.set_capacity(None);
        lost.power_loss_keeping_nothing();
        let again = sim::open(&lost);
        assert_eq!(contents(&read_all(&partition_of(&again))), model);
        drop(again);
        sim.set_capacity(None);
        let next = record(model.len() as u64, 250);
        try_append(&partition, std::slice::from_ref(&next)).unwrap();
        model.push(next);
        assert_eq!(contents(&read_all(&partition)), model);
        drop(partition);
        broker.close().unwrap();
        // Index entries that found no room are made up for by the next opening at the latest.
        sim::open(&sim).close().unwrap();
        let report = sim::assert_closed(&sim, 1);
        assert_eq!(report.segments.len(), model.len());
    }
}

#[test]
fn a_topic_that_finds_no_room_is_not_made() {
    let topic = TopicConfig { partitions: 3, ..tiny(1 << 20) };
    let mut refused = 0;
    for pages in 0.. {
        let sim = SimDisk::new(seed());
        let broker = sim::open(&sim);
        broker.create_topic("other", tiny(270)).unwrap();
        let before = sim.used();
        sim.set_capacity(Some(before + pages * 4096));
        let made = broker.create_topic(TOPIC, topic.clone());
        match made {
            Ok(_) => {
                assert_eq!(broker.num_partitions(TOPIC).unwrap(), 3);
                break;
            }
            Err(error) => assert!(error.is_disk_full(), "{error}"),
        }
        refused += 1;
        assert_eq!(broker.topics(), ["other"]);
        let mut left: Vec<_> = sim.clone().list(Path::new(DATA)).unwrap().into_iter().map(|entry| entry.name).collect();
        left.sort();
        assert_eq!(left, [".lock", "other"], "{pages} pages");
        assert_eq!(sim.used(), before, "what it took is given back");
        sim.set_capacity(None);
        broker.create_topic(TOPIC, topic.clone()).unwrap();
        let at = broker.produce(TOPIC, Some(b"k"), b"v").unwrap();
        assert_eq!(at.offset, 0);
        broker.close().unwrap();
    }
    assert!(refused > 0, "a topic takes no room at all");
}

#[test]
fn a_failure_at_any_step_of_making_a_topic_leaves_nothing() {
    let topic = TopicConfig { partitions: 2, ..tiny(270) };
    for kind in [OpKind::CreateDir, OpKind::Create, OpKind::Allocate, OpKind::Write, OpKind::Sync, OpKind::SyncDir, OpKind::Rename] {
        for nth in 1.. {
            let sim = SimDisk::new(seed());
            let broker = sim::open(&sim);
            sim.fail(Fault::next(kind, Effect::Error(ENOSPC)).nth(nth));
            let Err(error) = broker.create_topic(TOPIC, topic.clone()) else { break };
            assert!(error.is_disk_full(), "{kind:?} {nth}: {error}");
            sim.clear_faults();
            if broker.topics().is_empty() {
                let hidden = sim.exists(&Path::new(DATA).join(TOPIC));
                assert!(!hidden, "{kind:?} {nth}: refused, but there");
                broker.create_topic(TOPIC, topic.clone()).unwrap_or_else(|error| panic!("{kind:?} {nth}: {error}"));
            }
            assert_eq!(broker.produce(TOPIC, None, b"v").unwrap().offset, 0);
            broker.close().unwrap();
            let broker = sim::open(&sim);
            assert_eq!(broker.topics(), [TOPIC], "{kind:?} {nth}");
            assert!(broker.report().removed.is_empty(), "{kind:?} {nth}: {:?}", broker.report().removed);
        }
    }
}

#[test]
fn without_allocation_everything_works_all_the_same() {
    let sim = SimDisk::new(seed());
    sim.refuse_allocate(true);
    let broker = sim::open(&sim);
    broker.create_topic(TOPIC, tiny(1000)).unwrap();
    let partition = partition_of(&broker);
    let model: Vec<_> = (0..50).map(|number| record(number, 28 + 8 + (number as usize * 37) % 900)).collect();
    for next in &model {
        try_append(&partition, std::slice::from_ref(next)).unwrap();
    }
    assert_eq!(contents(&read_all(&partition)), model);
    sim::assert_sound_while_open(&sim);
    drop(partition);
    broker.close().unwrap();
    assert_eq!(sim::assert_closed(&sim, 1).next_offset, 50);
}

#[test]
fn a_full_disk_can_be_opened_and_read() {
    each_backend(|backend| {
        // On the real disk: nothing is appended by opening, so opening takes no room to speak of.
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &crate::support::segments_of(500));
        for number in 0..20u32 {
            partition.append(Batch::of(None, &number.to_be_bytes()).unwrap()).unwrap().wait().unwrap();
        }
        drop((partition, broker));
        assert_sound(&partition_dir(data.path()));
    });
    let (sim, broker, partition) = sim::create(seed(), &tiny(270));
    for number in 0..20 {
        try_append(&partition, &[record(number, 45)]).unwrap();
    }
    let before = read_all(&partition);
    drop(partition);
    broker.close().unwrap();
    sim.set_capacity(Some(sim.used()));
    let broker = sim::try_open(&sim, &tiny(270)).unwrap();
    let partition = partition_of(&broker);
    assert_eq!(read_all(&partition), before);
    let error = (0..10).find_map(|number| try_append(&partition, &[record(number, 200)]).err()).unwrap();
    assert!(error.is_disk_full() && !error.is_failed(), "{error}");
    sim.set_capacity(None);
    try_append(&partition, &[record(20, 200)]).unwrap();
}
