//! Limits that a process is given, met while it appends: on file descriptors (B150), on threads and on the size of files. In a process of its own
//! each, as they hold for all of one.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, Uid, getrlimit, getuid, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_keep_capabilities, set_thread_res_uid};
use sapwood::clock::Clock;
use sapwood::io::OsDisk;
use sapwood::{Broker, BrokerConfig, Durability, Error, Partition, TopicConfig, Visibility, Writers};
use serde_json::json;

use crate::child::{self, Child, argument, backend, backend_name, say};
use crate::oracle::assert_closed;
use crate::sim::until;
use crate::space::{record, try_append};
use crate::support::{
    TOPIC, TestClock, assert_in_order, config, contents, create, each_backend, open, partition_dir, partition_of, read_all, read_up_to,
    scratch, small,
};
use crate::warnings::Warnings;

/// The soft limit; the hard one stays, so that it can be taken back.
fn limit(resource: Resource, current: Option<u64>) {
    setrlimit(resource, Rlimit { current, ..getrlimit(resource) }).unwrap();
}

/// The topic that the child appends to, as it was told.
fn topic() -> TopicConfig {
    serde_json::from_value(argument("topic")).unwrap()
}

/// Appends up to record `end`. Gives the first error, after as many records more as could be appended in spite of it.
fn append_up_to(partition: &Partition, model: &mut Vec<(Vec<u8>, Vec<u8>)>, end: u64, size: usize) -> Option<Error> {
    let mut first = None;
    for _ in model.len() as u64..end {
        let next = record(model.len() as u64, size);
        match try_append(partition, std::slice::from_ref(&next)) {
            Ok(offsets) => {
                assert_eq!(offsets.start, model.len() as u64);
                model.push(next);
            }
            Err(error) => first = first.or(Some(error)),
        }
        assert!(contents(&read_up_to(partition, Visibility::Appended, 0, 1 << 20)) == *model, "what was acknowledged is intact");
    }
    first
}

/// Appends go on after the limit was taken back; after opening again where the partition stopped. Gives how many records there are then.
fn goes_on(open: (Broker, Partition), mut model: Vec<(Vec<u8>, Vec<u8>)>, has_stopped: bool) -> usize {
    let (mut broker, mut partition) = open;
    if has_stopped {
        drop((partition, broker));
        broker = Broker::open(child::text("data"), config(backend(), topic())).unwrap();
        partition = partition_of(&broker);
        // The one that was answered with the error may be there.
        let found = contents(&read_all(&partition));
        assert!(found.starts_with(&model) && found.len() <= model.len() + 1, "what was acknowledged is intact");
        model = found;
    }
    let end = model.len() as u64 + 100;
    assert!(append_up_to(&partition, &mut model, end, 1000).is_none());
    drop(partition);
    broker.close().unwrap();
    model.len()
}

/// Descriptors run out where topics are made, and where the partition rolls.
pub fn few_files_role() {
    let assert_too_many = |error: &Error| match error {
        Error::TooManyOpenFiles { limit: Some(256), appended: 0, .. } => {}
        error => panic!("{error}"),
    };
    let (broker, partition) = create(Path::new(&child::text("data")), backend(), &topic());
    let mut model = Vec::new();
    assert!(append_up_to(&partition, &mut model, 3, 1000).is_none());
    limit(Resource::Nofile, Some(256));
    let mut taken: Vec<_> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
    taken.truncate(taken.len() - argument("spare").as_u64().unwrap() as usize);
    let before = broker.topics();
    let refused = (0..100).find_map(|number| broker.create_topic(&format!("more-{number}"), small()).err());
    assert_too_many(&refused.expect("a hundred topics need no descriptors"));
    // A segment holds four records of the size.
    let mut met = 0;
    for number in 3..20 {
        let next = record(number, 1000);
        match try_append(&partition, std::slice::from_ref(&next)) {
            Ok(_) => model.push(next),
            Err(error) => {
                assert_too_many(&error);
                met += 1;
                break;
            }
        }
    }
    // The refused one succeeds as soon as there are descriptors, and no sooner.
    let segments = partition.stats().rolls + 1;
    if met > 0 {
        let next = record(model.len() as u64, 1000);
        assert_too_many(&try_append(&partition, std::slice::from_ref(&next)).unwrap_err());
        assert_eq!((partition.stats().rolls + 1, partition.next_offset()), (segments, model.len() as u64));
    }
    drop(taken);
    let logs = fs::read_dir(partition.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(logs.filter(|name| name.ends_with(".log")).count() as u64, segments, "a half-made segment is left");
    assert!(contents(&read_all(&partition)) == model, "what was acknowledged is intact");
    assert!(broker.topics().len() < before.len() + 100);
    broker.create_topic("more", small()).unwrap();
    let records = goes_on((broker, partition), model, false);
    say(&format!("{records} {}", if met > 0 { "refused" } else { "nothing" }));
}

#[test]
fn b150_a_roll_that_finds_no_descriptor_is_refused_and_passes() {
    each_backend(|backend| {
        // With none left there is not even the directory; with few it is the log, or what is beside it that fails.
        let outcomes = (0..6).map(|spare| {
            let data = scratch();
            let topic = TopicConfig { segment_bytes: 5000, ..small() };
            let arguments = json!({ "data": data.path(), "backend": backend_name(backend), "topic": topic, "spare": spare });
            let mut child = Child::start("few files", &arguments);
            let line = child.expect_line();
            assert!(child.finish().success());
            let (records, outcome) = line.split_once(' ').unwrap();
            assert_whole(data.path(), backend, &topic, records.parse().unwrap(), 1000);
            outcome.to_owned()
        });
        let outcomes: Vec<_> = outcomes.collect();
        eprintln!("{outcomes:?}");
        assert_eq!(outcomes[0], "refused");
    });
}

/// What a child acknowledged is there, after closing and opening again.
fn assert_whole(data: &Path, backend: sapwood::Backend, topic: &TopicConfig, records: u64, size: usize) {
    let broker = open(data, backend, topic);
    let rows = read_all(&partition_of(&broker));
    assert_in_order(&rows, 0);
    assert!(contents(&rows) == (0..records).map(|number| record(number, size)).collect::<Vec<_>>());
    broker.close().unwrap();
    assert_closed(&partition_dir(data), topic.index_interval.into());
}

/// A file may not grow beyond 100 KiB.
pub fn small_files_role() {
    let (broker, partition) = create(Path::new(&child::text("data")), backend(), &topic());
    let mut model = Vec::new();
    assert!(append_up_to(&partition, &mut model, 5, 1000).is_none());
    limit(Resource::Fsize, Some(100 << 10));
    let error = append_up_to(&partition, &mut model, 120, 1000).expect("120,000 bytes fit into 100 KiB");
    limit(Resource::Fsize, None);
    let records = goes_on((broker, partition), model, error.is_failed());
    say(&format!("{records} {error}"));
}

#[test]
fn a_limit_on_the_size_of_files_loses_nothing_and_passes() {
    each_backend(|backend| {
        for durability in [Durability::Durable, Durability::Os] {
            // The limit is met by what is allocated ahead, and by what is not.
            for preallocate_bytes in [4096, 64 << 10] {
                let data = scratch();
                let topic = TopicConfig { durability, preallocate_bytes, ..TopicConfig::default() };
                let arguments = json!({ "data": data.path(), "backend": backend_name(backend), "topic": topic });
                let mut child = Child::start("small files", &arguments);
                let line = child.expect_line();
                assert!(child.finish().success());
                let (records, error) = line.split_once(' ').unwrap();
                eprintln!("{durability:?}, {preallocate_bytes}: {error}");
                assert_whole(data.path(), backend, &topic, records.parse().unwrap(), 1000);
            }
        }
    });
}

/// Becomes a user whom the limit on threads holds for, which it does not for root. Files are open to it as before.
fn be_limited() {
    if getuid().is_root() {
        let nobody = Uid::from_raw(65_534);
        set_keep_capabilities(true).unwrap();
        set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let kept = CapabilitySet::DAC_OVERRIDE;
        set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() }).unwrap();
    }
}

fn upkeep_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    tasks.filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "log upkeep")).count()
}

/// No thread is to be had from before the first append on, and again after a while in which there was one.
pub fn no_threads_role() {
    let warnings = Warnings::collect();
    be_limited();
    let clock = Arc::new(TestClock::at(1 << 60));
    let config = BrokerConfig { writers: Writers::PerPartition, retention_every: None, ..config(backend(), small()) };
    let disk = Arc::new(OsDisk::new(backend()).unwrap());
    let broker = Broker::open_on(disk, Arc::clone(&clock) as Arc<dyn Clock>, child::text("data"), config).unwrap();
    let partition = broker.create_topic(TOPIC, topic()).unwrap().partition(0).unwrap();
    limit(Resource::Nproc, Some(0));
    assert!(thread::Builder::new().spawn(|| ()).is_err(), "the limit does not hold");
    let mut model = Vec::new();
    assert!(append_up_to(&partition, &mut model, 60, 1000).is_none());
    partition.sync().unwrap();
    partition.roll().unwrap();
    // What is put off comes nevertheless: a checkpoint, index entries.
    clock.pass(Duration::from_secs(6));
    assert!(append_up_to(&partition, &mut model, 61, 1000).is_none());
    let rolls = partition.stats().rolls;
    assert!(rolls > 10, "{rolls}");
    partition.truncate_before(8).unwrap();
    partition.truncate_after(58).unwrap();
    model.truncate(58);
    let rows = read_up_to(&partition, Visibility::Durable, 8, 1 << 20);
    assert!(contents(&rows) == model[8..] || topic().durability != Durability::Durable);
    // It asks again after a while, and not before, and is refused again.
    let append_more = |model: &mut Vec<_>, end| {
        for number in model.len() as u64..end {
            let next = record(number, 1000);
            try_append(&partition, std::slice::from_ref(&next)).unwrap();
            model.push(next);
        }
    };
    clock.pass(Duration::from_secs(11));
    append_more(&mut model, 70);
    assert_eq!(upkeep_threads(), 0);
    let told = warnings.all();
    limit(Resource::Nproc, getrlimit(Resource::Nproc).maximum);
    clock.pass(Duration::from_secs(11));
    until("a thread", || {
        let end = model.len() as u64 + 1;
        append_more(&mut model, end);
        upkeep_threads() == 1
    });
    append_more(&mut model, 90);
    assert_eq!(warnings.all(), told, "no other warning");
    let end = model.len();
    drop(partition);
    broker.close().unwrap();
    say(&json!((end, told)).to_string());
}

#[test]
fn a_partition_that_is_refused_a_thread_for_upkeep_goes_on_without() {
    each_backend(|backend| {
        for durability in [Durability::Durable, Durability::Os, Durability::Interval { bytes: 3000, time: Duration::from_millis(1) }] {
            let data = scratch();
            let topic = TopicConfig { segment_bytes: 5000, durability, ..small() };
            let arguments = json!({ "data": data.path(), "backend": backend_name(backend), "topic": topic });
            let mut child = Child::start("no threads", &arguments);
            let (end, told): (usize, Vec<String>) = serde_json::from_str(&child.expect_line()).unwrap();
            assert!(child.finish().success());
            assert!(told.len() == 1 && told[0].contains("RLIMIT_NPROC"), "{told:?}");
            let broker = open(data.path(), backend, &topic);
            let rows = read_up_to(&partition_of(&broker), Visibility::Durable, 8, 1 << 20);
            assert_in_order(&rows, 8);
            assert!(contents(&rows) == (8..end as u64).map(|number| record(number, 1000)).collect::<Vec<_>>());
            broker.close().unwrap();
        }
    });
}
