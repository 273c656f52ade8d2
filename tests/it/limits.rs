//! Limits that a process is given, met while it appends: on file descriptors (B150) and on the size of files. In a process of its own
//! each, as they hold for all of one.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sapwood::{Broker, Durability, Error, Partition, TopicConfig, Visibility};
use serde_json::json;

use crate::child::{self, Child, argument, backend, backend_name, say};
use crate::oracle::assert_closed;
use crate::space::{record, try_append};
use crate::support::{
    assert_in_order, config, contents, create, each_backend, open, partition_dir, partition_of, read_all, read_up_to, scratch, small,
};

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
