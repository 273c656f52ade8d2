//! The load, in a process of its own: producers that append, and a line for each acknowledgement.
//!
//! Lines: `C topic` when a topic was made; `A topic partition first count producer sequence` when records are durable; `E error` for
//! an error, of which there must be none; `end` when there is no more to append. Everything is derived from the seed, but the
//! threads' timing.

use std::io::Write;
use std::path::Path;

use sapwood::{Backend, Batch, Broker, BrokerConfig, Durability, Partition, Pinning, TopicConfig};

use crate::Rng;

pub const PARTITIONS: u32 = 2;
/// Two to a partition.
const PRODUCERS: u32 = 4;
/// What a producer appends at most.
const PRODUCER_BYTES: usize = 3 << 20;

/// What a seed says of topics.
pub struct Plan {
    pub topics: Vec<(&'static str, TopicConfig)>,
}

impl Plan {
    pub fn of(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut topic = |durability: &[Durability]| TopicConfig {
            partitions: PARTITIONS,
            segment_bytes: rng.one_of(&[4096, 30_000, 300_000, 2 << 20]),
            preallocate_bytes: rng.one_of(&[4096, 65_536, 1 << 20]),
            index_interval: rng.one_of(&[1, 7]),
            commit_bytes: rng.one_of(&[4096, 65_536, 1 << 20]),
            durability: rng.one_of(durability),
            ..TopicConfig::default()
        };
        let interval = Durability::Interval { bytes: 100_000, time: std::time::Duration::from_millis(5) };
        Self { topics: vec![("durable", topic(&[Durability::Durable])), ("later", topic(&[interval, Durability::Os]))] }
    }
}

pub fn config(rng: &mut Rng) -> BrokerConfig {
    BrokerConfig { backend: rng.one_of(&[Backend::Auto, Backend::Posix]), pinning: Pinning::None, ..BrokerConfig::default() }
}

/// Names a record. Producers count from 0 for each partition and each life of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag {
    pub life: u32,
    pub producer: u32,
    pub sequence: u64,
}

impl Tag {
    pub fn key(&self) -> Vec<u8> {
        [&self.life.to_be_bytes()[..], &self.producer.to_be_bytes(), &self.sequence.to_be_bytes()].concat()
    }

    pub fn of(key: &[u8]) -> Self {
        assert_eq!(key.len(), 16, "the key of none of the records");
        Self {
            life: u32::from_be_bytes(key[..4].try_into().unwrap()),
            producer: u32::from_be_bytes(key[4..8].try_into().unwrap()),
            sequence: u64::from_be_bytes(key[8..].try_into().unwrap()),
        }
    }

    pub fn value(&self, seed: u64) -> Vec<u8> {
        let mut rng = Rng::new(seed ^ (u64::from(self.life) << 48) ^ (u64::from(self.producer) << 40) ^ self.sequence);
        let len = match rng.below(16) {
            0 => 3000 + rng.below(9000),
            1 => 0,
            _ => rng.below(600),
        };
        let mut value = Vec::with_capacity(len as usize + 8);
        while value.len() < len as usize {
            value.extend(rng.next().to_le_bytes());
        }
        value.truncate(len as usize);
        value
    }
}

fn say(line: &str) {
    // If nobody listens any more, there is nothing to be said.
    let _ = std::io::stdout().lock().write_all(format!("{line}\n").as_bytes());
}

/// Appends until it is killed, or has appended enough.
pub fn run(data: &Path, seed: u64, life: u32) {
    if let Err(error) = load(data, seed, life) {
        say(&format!("E {error}"));
    }
    say("end");
}

fn load(data: &Path, seed: u64, life: u32) -> sapwood::Result<()> {
    let broker = Broker::open(data, config(&mut Rng::new(seed ^ u64::from(life))))?;
    let mut topics = Vec::new();
    for (name, config) in Plan::of(seed).topics {
        let topic = if broker.topics().iter().any(|topic| topic == name) {
            broker.topic(name)?
        } else {
            let topic = broker.create_topic(name, config.clone())?;
            say(&format!("C {name}"));
            topic
        };
        topics.push((name, config.durability == Durability::Durable, topic));
    }
    std::thread::scope(|scope| {
        for (name, durable, topic) in &topics {
            for producer in 0..PRODUCERS {
                scope.spawn(move || {
                    let produced = topic.partition(producer % PARTITIONS).and_then(|partition| {
                        Producer { name, seed, durable: *durable, partition, tag: Tag { life, producer, sequence: 0 } }.produce()
                    });
                    if let Err(error) = produced {
                        say(&format!("E {error}"));
                    }
                });
            }
        }
    });
    // Now and then the power is cut while it closes.
    broker.close()
}

struct Producer<'a> {
    name: &'a str,
    seed: u64,
    durable: bool,
    partition: Partition,
    /// Of the next record.
    tag: Tag,
}

impl Producer<'_> {
    fn produce(&mut self) -> sapwood::Result<()> {
        let mut rng = Rng::new(self.seed ^ (u64::from(self.tag.producer) << 32) ^ u64::from(self.tag.life));
        let mut bytes = 0;
        let mut unsynced = Vec::new();
        while bytes < PRODUCER_BYTES {
            let alone = rng.below(4) == 0;
            let mut window = Vec::new();
            for _ in 0..if alone { 1 } else { 1 + rng.below(4) } {
                let first = self.tag.sequence;
                let batch = self.batch(1 + rng.below(6))?;
                bytes += batch.bytes() as usize;
                if alone {
                    unsynced.push((self.partition.append_and_wait(batch)?, first));
                } else {
                    window.push((self.partition.append(batch)?, first));
                }
            }
            for (ticket, first) in window {
                unsynced.push((ticket.wait()?, first));
            }
            // What is answered is durable here; elsewhere only what a sync was answered for.
            if !self.durable {
                if rng.below(8) > 0 {
                    continue;
                }
                self.partition.sync()?;
            }
            for (offsets, sequence) in unsynced.drain(..) {
                let count = offsets.end - offsets.start;
                say(&format!(
                    "A {} {} {} {count} {} {sequence}",
                    self.name,
                    self.tag.producer % PARTITIONS,
                    offsets.start,
                    self.tag.producer
                ));
            }
        }
        Ok(())
    }

    fn batch(&mut self, records: u64) -> sapwood::Result<Batch> {
        let mut batch = Batch::new();
        for _ in 0..records {
            batch.push(Some(&self.tag.key()), &self.tag.value(self.seed))?;
            self.tag.sequence += 1;
        }
        Ok(batch)
    }
}
