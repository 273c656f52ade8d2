//! SIGKILL at random moments of a run: what was acknowledged is there afterwards, byte for byte.
//!
//! The segments are small, so that rolls and index writes are under way at most moments; some kills hit the opening. Beside the
//! producers a topic is made and deleted over and over.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use sapwood::{Batch, Broker, Durability, Partition, TopicConfig};
use serde_json::json;

use crate::child::{self, Child, argument, backend, backend_name, say};
use crate::oracle::{assert_closed, assert_sound, check};
use crate::support::{BACKENDS, Rng, TOPIC, assert_in_order, config, open, read_all, scratch, seed};

const KILLS: u64 = 50;
/// How often one directory is killed on before a new one is taken.
const KILLS_PER_DIRECTORY: u64 = 5;
const PARTITIONS: u32 = 3;
const PRODUCERS: u64 = 4;
/// The topic that comes and goes.
const PASSING: &str = "passing";

/// The records of the batch with that seed. Parent and child both can make them.
fn records(seed: u64) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut rng = Rng::new(seed);
    let count = 1 + rng.below(6);
    (0..count)
        .map(|_| {
            let (key, value) = match rng.below(12) {
                0 => (0, 0),
                1 => (rng.below(40), 3000 + rng.below(9000)),
                2 => (0, rng.below(64)),
                _ => (rng.below(20), rng.below(300)),
            };
            (rng.bytes(key as usize), rng.bytes(value as usize))
        })
        .collect()
}

/// Appends until it is killed, and tells of each acknowledgement: partition, first offset, end, seed of the batch.
pub fn produce_role() {
    say("start");
    let seed = argument("seed").as_u64().unwrap();
    let broker = open(Path::new(&child::text("data")), backend(), &TopicConfig::default());
    let topic = if broker.topics().iter().all(|name| name != TOPIC) {
        broker.create_topic(TOPIC, serde_json::from_value(argument("topic")).unwrap()).unwrap()
    } else {
        broker.topic(TOPIC).unwrap()
    };
    say("open");
    std::thread::scope(|scope| {
        scope.spawn(|| come_and_go(&broker, &topic.config()));
        for producer in 0..PRODUCERS {
            let topic = topic.clone();
            scope.spawn(move || {
                let mut rng = Rng::new(seed ^ (producer << 32));
                let partitions: Vec<_> = (0..PARTITIONS).map(|number| topic.partition(number).unwrap()).collect();
                loop {
                    let mut window = Vec::new();
                    for _ in 0..=rng.below(4) {
                        let (seed, number) = (rng.next(), rng.below(u64::from(PARTITIONS)));
                        let mut batch = Batch::new();
                        for (key, value) in records(seed) {
                            batch.push(Some(&key), &value).unwrap();
                        }
                        let ticket = partitions[number as usize].append(batch).unwrap();
                        window.push((seed, number, ticket));
                    }
                    for (seed, number, ticket) in window {
                        // Now and then nobody waits.
                        if rng.below(16) > 0 {
                            let offsets = ticket.wait().unwrap();
                            say(&format!("{number} {} {} {seed}", offsets.start, offsets.end));
                        }
                    }
                }
            });
        }
    });
}

/// Makes the topic that passes, appends to it, and deletes it, and so on.
fn come_and_go(broker: &Broker, config: &TopicConfig) {
    loop {
        if broker.topics().iter().any(|name| name == PASSING) {
            broker.delete_topic(PASSING).unwrap();
        }
        broker.create_topic(PASSING, TopicConfig { partitions: 1, ..config.clone() }).unwrap();
        for number in 0..5u64 {
            broker.produce(PASSING, Some(&number.to_be_bytes()), &[7; 200]).unwrap();
        }
    }
}

/// Whole, or gone: what a kill left of the topic that passes.
fn assert_whole_or_gone(broker: &Broker) {
    if let Ok(topic) = broker.topic(PASSING) {
        assert_eq!(topic.num_partitions(), 1);
        let partition = topic.partition(0).unwrap();
        assert_in_order(&read_all(&partition), 0);
        assert_sound(partition.path());
        topic.produce(None, b"works").unwrap();
    }
}

/// Everything acknowledged in one directory so far: by partition, the batch's seed by its first offset.
type Acknowledged = BTreeMap<u32, BTreeMap<u64, u64>>;

/// Runs a child until it has acknowledged so many batches, kills it, and takes down all it acknowledged.
fn run_and_kill(child: &mut Child, until: Until, acknowledged: &mut Acknowledged) -> u64 {
    let mut count = 0;
    let mut killed = false;
    assert_eq!(child.expect_line(), "start");
    if let Until::Opening(turns) = until {
        // However far it comes meanwhile.
        (0..turns).for_each(|_| std::thread::yield_now());
        child.kill();
        killed = true;
    }
    while let Some(line) = child.line() {
        if line == "open" {
            if matches!(until, Until::Open) {
                child.kill();
                killed = true;
            }
            continue;
        }
        let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        let [partition, first, end, seed] = numbers[..] else { panic!("{line}") };
        assert_eq!(end - first, records(seed).len() as u64, "{line}");
        let twice = acknowledged.entry(partition as u32).or_default().insert(first, seed);
        assert!(twice.is_none(), "offset {first} of partition {partition} was given twice");
        count += 1;
        if matches!(until, Until::Acknowledgements(limit) if count == limit) {
            child.kill();
            killed = true;
        }
    }
    assert!(killed, "the child ended by itself");
    count
}

#[derive(Clone, Copy, Debug)]
enum Until {
    /// While it opens, most likely.
    Opening(u64),
    Open,
    Acknowledgements(u64),
}

/// Each acknowledged batch is in `rows` at its offsets, byte for byte.
fn assert_all_there(rows: &[(Vec<u8>, Vec<u8>)], acknowledged: &BTreeMap<u64, u64>, what: &str) {
    let mut end = 0;
    for (&first, &seed) in acknowledged {
        assert!(first >= end, "{what}: the offsets of two batches overlap at {first}");
        let expected = records(seed);
        end = first + expected.len() as u64;
        assert!(end <= rows.len() as u64, "{what}: {end} offsets were acknowledged, {} are there", rows.len());
        assert!(rows[first as usize..end as usize] == expected[..], "{what}: the records from {first} on are not those acknowledged");
    }
}

fn assert_partition(partition: &Partition, acknowledged: &BTreeMap<u64, u64>) -> usize {
    let rows = read_all(partition);
    assert_in_order(&rows, 0);
    assert_eq!(rows.len() as u64, partition.next_offset());
    let contents: Vec<_> = rows.into_iter().map(|row| (row.key, row.value)).collect();
    assert_all_there(&contents, acknowledged, "after recovery");
    contents.len()
}

#[test]
fn what_was_acknowledged_survives_fifty_kills() {
    let seed = seed();
    let mut rng = Rng::new(seed);
    let mut total = 0;
    for directory in 0..KILLS / KILLS_PER_DIRECTORY {
        let data = scratch();
        let interval = Durability::Interval { bytes: 20_000, time: Duration::from_millis(2) };
        let topic = TopicConfig {
            partitions: PARTITIONS,
            segment_bytes: rng.one_of(&[500, 4096, 30_000]),
            preallocate_bytes: rng.one_of(&[4096, 65_536]),
            index_interval: rng.one_of(&[1, 7]),
            commit_bytes: rng.one_of(&[4096, 1 << 20]),
            // A kill of the process takes nothing at any level.
            durability: rng.one_of(&[Durability::Durable, Durability::Durable, interval, Durability::Os]),
            ..TopicConfig::default()
        };
        let mut acknowledged = Acknowledged::new();
        for kill in 0..KILLS_PER_DIRECTORY {
            let backend = BACKENDS[((directory + kill) % 2) as usize];
            let until = match rng.below(8) {
                0 | 7 if kill > 0 => Until::Opening(rng.below(20_000)),
                1 => Until::Open,
                _ => Until::Acknowledgements(1 + rng.below(150)),
            };
            eprintln!("directory {directory}, kill {kill}, {backend:?}, {until:?}, {topic:?}");
            let arguments = json!({ "data": data.path(), "backend": backend_name(backend), "seed": rng.next(), "topic": topic });
            let mut child = Child::start("produce", &arguments);
            total += run_and_kill(&mut child, until, &mut acknowledged);

            // What the engine will find, as the oracle sees it before the engine does.
            for (number, acknowledged) in &acknowledged {
                let dir = data.path().join(TOPIC).join(number.to_string());
                let found: Vec<_> = check(&dir).readable_records().iter().map(|found| (found.key.clone(), found.value.clone())).collect();
                assert_all_there(&found, acknowledged, "as the kill left it");
            }
            if !data.path().join(TOPIC).exists() {
                // Killed before the topic was whole.
                assert!(acknowledged.is_empty());
                continue;
            }
            if kill + 1 < KILLS_PER_DIRECTORY && rng.below(4) == 0 {
                // Not looked at by this process: the next child recovers on its own what the kill left.
                continue;
            }
            let broker = Broker::open(data.path(), config(rng.one_of(&BACKENDS), TopicConfig::default())).unwrap();
            assert_whole_or_gone(&broker);
            let none = BTreeMap::new();
            for number in 0..PARTITIONS {
                let partition = broker.topic(TOPIC).unwrap().partition(number).unwrap();
                assert_partition(&partition, acknowledged.get(&number).unwrap_or(&none));
                assert_sound(partition.path());
            }
            let close = rng.below(2) == 0 || kill + 1 == KILLS_PER_DIRECTORY;
            if close {
                broker.close().unwrap()
            } else {
                drop(broker)
            }
            for number in 0..PARTITIONS {
                let dir = data.path().join(TOPIC).join(number.to_string());
                if close {
                    assert_closed(&dir, topic.index_interval.into())
                } else {
                    assert_sound(&dir)
                };
            }
        }
    }
    assert!(total > KILLS, "{total} batches were acknowledged in all");
}
