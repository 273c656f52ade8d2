//! What must be there after a power cut, and nothing else: every acknowledged record at its offset, byte for byte; in each partition a
//! prefix of what was submitted to it, without a gap; the same after opening twice; files as docs/format.md wants them.
//!
//! Every failed check is a panic that says what is wrong.

use std::collections::BTreeMap;
use std::path::Path;

use sapwood::{Broker, BrokerConfig, Partition};

use crate::load::{PARTITIONS, Plan, Tag};
use crate::oracle;

/// Records that were durable before the life that the cut ended, by topic and partition: what an opening found.
pub type History = BTreeMap<(&'static str, u32), Vec<Tag>>;

/// An acknowledgement that arrived before the cut.
#[derive(Clone, Debug)]
pub enum Ack {
    Topic(String),
    Records { topic: String, partition: u32, first: u64, count: u64, tag: Tag },
}

impl Ack {
    /// What a line of the load says, if it is an acknowledgement.
    pub fn of(line: &str, life: u32) -> Option<Self> {
        let words: Vec<_> = line.split(' ').collect();
        let number = |word: &str| word.parse::<u64>().unwrap();
        match words[..] {
            ["C", topic] => Some(Self::Topic(topic.to_owned())),
            ["A", topic, partition, first, count, producer, sequence] => Some(Self::Records {
                topic: topic.to_owned(),
                partition: number(partition) as u32,
                first: number(first),
                count: number(count),
                tag: Tag { life, producer: number(producer) as u32, sequence: number(sequence) },
            }),
            _ => None,
        }
    }
}

/// What was found, and how much of it was acknowledged in this life.
pub struct Found {
    pub history: History,
    pub acknowledged: u64,
    pub records: u64,
    pub torn_tails: u64,
}

/// Opens what the power cut left in `data`, twice, and checks it.
pub fn check(data: &Path, seed: u64, before: &History, acks: &[Ack], config: BrokerConfig) -> Found {
    let broker = open(data, config.clone());
    let topics = broker.topics();
    let torn_tails = broker.report().partitions.iter().filter(|report| report.torn_tail.is_some()).count() as u64;
    for ack in acks {
        let Ack::Topic(topic) = ack else { continue };
        assert!(topics.contains(topic), "the topic {topic} was made, and is gone");
    }
    let mut history = History::new();
    for (name, _) in Plan::of(seed).topics {
        for partition in 0..PARTITIONS {
            let tags =
                if topics.iter().any(|topic| topic == name) { read(&partition_of(&broker, name, partition), seed) } else { Vec::new() };
            let known = before.get(&(name, partition)).map_or(&[][..], Vec::as_slice);
            assert_goes_on(&tags, known, &format!("{name}/{partition}"));
            history.insert((name, partition), tags);
        }
    }
    let acknowledged = acks.iter().map(|ack| assert_there(&history, ack)).sum();
    broker.close().unwrap();
    let directories = || topics.iter().flat_map(|topic| (0..PARTITIONS).map(move |number| data.join(topic).join(number.to_string())));
    let files: Vec<_> = directories().map(|dir| oracle::assert_sound(&dir).records.len()).collect();

    let broker = open(data, config);
    assert_eq!(broker.topics(), topics, "opening a second time found other topics");
    for ((topic, number), tags) in history.iter().filter(|((topic, _), _)| topics.iter().any(|name| name == topic)) {
        let partition = partition_of(&broker, topic, *number);
        assert!(read(&partition, seed) == *tags, "opening {topic}/{number} a second time found other records");
        assert_eq!(append(&partition), tags.len() as u64, "{topic}/{number} does not go on where it ended");
    }
    broker.close().unwrap();
    let more: Vec<_> = directories().map(|dir| oracle::assert_sound(&dir).records.len()).collect();
    assert!(files.iter().map(|records| records + 1).eq(more), "one record more in each partition");
    Found { records: history.values().map(|tags| tags.len() as u64).sum(), history, acknowledged, torn_tails }
}

fn open(data: &Path, config: BrokerConfig) -> Broker {
    Broker::open(data, config).unwrap_or_else(|error| panic!("opening what the power cut left: {error}"))
}

fn partition_of(broker: &Broker, topic: &str, number: u32) -> Partition {
    broker.topic(topic).unwrap().partition(number).unwrap()
}

/// Every record, by name; each holds what its name says.
fn read(partition: &Partition, seed: u64) -> Vec<Tag> {
    let mut reader = partition.reader().unwrap();
    let mut tags = Vec::new();
    assert_eq!(partition.first_offset(), 0);
    loop {
        let offset = tags.len() as u64;
        let records = reader.read(offset, 256 << 10).unwrap_or_else(|error| panic!("reading record {offset}: {error}"));
        if records.is_empty() {
            assert_eq!(offset, partition.next_offset(), "records are counted that cannot be read");
            return tags;
        }
        for record in &records {
            assert_eq!(record.offset, tags.len() as u64, "a gap");
            let tag = Tag::of(record.key);
            assert!(record.value == tag.value(seed), "record {} is not what was appended as {tag:?}", record.offset);
            tags.push(tag);
        }
    }
}

/// What was known stands at the start, and each producer's records of the newest life follow in their order, none left out.
fn assert_goes_on(tags: &[Tag], known: &[Tag], what: &str) {
    assert!(tags.starts_with(known), "{what}: records that an opening had found are gone: {} of {}", tags.len(), known.len());
    let mut next = BTreeMap::new();
    for tag in &tags[known.len()..] {
        let sequence = next.entry((tag.life, tag.producer)).or_insert(0);
        assert_eq!(tag.sequence, *sequence, "{what}: {tag:?} is not what its producer appended next");
        *sequence += 1;
    }
}

/// The records of an acknowledgement are at their offsets. Gives how many they are.
fn assert_there(history: &History, ack: &Ack) -> u64 {
    let Ack::Records { topic, partition, first, count, tag } = ack else { return 0 };
    let (_, tags) = history.iter().find(|((name, number), _)| name == topic && number == partition).unwrap();
    let end = first + count;
    assert!(tags.len() as u64 >= end, "{topic}/{partition}: offsets up to {end} were acknowledged, {} are there", tags.len());
    for (at, number) in (*first..end).zip(0..) {
        let expected = Tag { sequence: tag.sequence + number, ..*tag };
        assert_eq!(tags[at as usize], expected, "{topic}/{partition}: offset {at} is not what was acknowledged");
    }
    *count
}

fn append(partition: &Partition) -> u64 {
    partition.append_and_wait(sapwood::Batch::of(None, b"works again").unwrap()).unwrap().start
}
