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
    let (broker, partition) = create(Path::new(&child::text("data")), backend(), &topic());
    let mut model = Vec::new();
    assert!(append_up_to(&partition, &mut model, 3, 1000).is_none());
    limit(Resource::Nofile, Some(256));
    let mut taken: Vec<_> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
    taken.truncate(taken.len() - argument("spare").as_u64().unwrap() as usize);
    let refused = (0..100).find_map(|number| broker.create_topic(&format!("more-{number}"), small()).err());
    let refused = refused.expect("a hundred topics need no descriptors");
    assert!(matches!(&refused, Error::TooManyOpenFiles { limit: 256, .. }), "{refused}");
    // A segment holds four records of the size.
    let met = (3..20).find_map(|number| {
        let next = record(number, 1000);
        let result = try_append(&partition, std::slice::from_ref(&next));
        result.map(|_| model.push(next)).err()
    });
    drop(taken);
    assert!(contents(&read_all(&partition)) == model, "what was acknowledged is intact");
    assert!(met.as_ref().is_none_or(Error::is_too_many_open_files), "{met:?}");
    broker.create_topic("more", small()).unwrap();
    let has_stopped = met.as_ref().is_some_and(Error::is_failed);
    let records = goes_on((broker, partition), model, has_stopped);
    let outcome = if has_stopped { "stopped" } else { met.map_or("nothing", |_| "refused") };
    say(&format!("{records} {outcome}"));
}

#[test]
fn b150_a_roll_that_finds_no_descriptor_loses_nothing_and_passes() {
    each_backend(|backend| {
        let outcomes = (0..4).map(|spare| {
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
        // With none left the new segment gets no log. With few it may be the sync of the directory that gets none, and that stops the
        // partition, as any sync does that fails.
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
