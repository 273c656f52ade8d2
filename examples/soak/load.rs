//! The load, in a process of its own.
//!
//! It says a line for all that the history must know, once it was answered or before it begins, as said there: see [`History::hear`].
//! A line is written by one call, so that a kill leaves no half of it in the middle of others.
//!
//! [`History::hear`]: crate::history::History::hear

use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sapwood::{
    Backend, Batch, Broker, BrokerConfig, Durability, Partition, Pinning, ReadMode, ReaderConfig, TopicConfig, Visibility, Writers,
};

use crate::operations;
use crate::record::{Order, Place, Rng, Tag};

/// The topic of which one producer alone appends, and cuts what it appended.
pub const CUT: &str = "cut";
/// The topic whose oldest segments go by themselves.
pub const KEPT: &str = "kept";
/// The topic that comes and goes.
pub const PASSING: &str = "passing";

/// What a seed says of the topics that stay.
pub fn plan(seed: u64) -> Vec<(&'static str, TopicConfig)> {
    let mut rng = Rng::of(seed, u64::MAX);
    let mut topic = |partitions, durability: &[Durability]| TopicConfig {
        partitions,
        segment_bytes: rng.one_of(&[4096, 30_000, 300_000]),
        preallocate_bytes: rng.one_of(&[4096, 65_536]),
        index_interval: rng.one_of(&[1, 7]),
        commit_bytes: rng.one_of(&[4096, 65_536, 1 << 20]),
        durability: rng.one_of(durability),
        ..TopicConfig::default()
    };
    let later = [Durability::Interval { bytes: 100_000, time: Duration::from_millis(5) }, Durability::Os];
    let ahead = TopicConfig { segment_bytes: 2 << 20, preallocate_bytes: 1 << 20, ..topic(1, &[Durability::Durable]) };
    let aged = TopicConfig { segment_age: Some(Duration::from_millis(200)), ..topic(1, &later) };
    let kept = TopicConfig { retention_bytes: Some(400_000), ..topic(2, &[Durability::Durable, Durability::Os]) };
    vec![
        ("durable", topic(2, &[Durability::Durable])),
        ("later", topic(2, &later)),
        ("ahead", ahead),
        ("aged", aged),
        (KEPT, kept),
        (CUT, topic(1, &[Durability::Durable, Durability::Os])),
    ]
}

pub fn config(rng: &mut Rng) -> BrokerConfig {
    BrokerConfig {
        backend: rng.one_of(&[Backend::Auto, Backend::Posix]),
        pinning: rng.one_of(&[Pinning::Auto, Pinning::None]),
        retention_every: rng.one_of(&[None, Some(Duration::from_millis(20))]),
        writers: rng.one_of(&[Writers::PerPartition, Writers::Shared(1), Writers::Shared(2)]),
        // Enough for all, for some, and for none.
        buffer_bytes: rng.one_of(&[1 << 30, 4 << 20, 0]),
        ..BrokerConfig::default()
    }
}

pub fn say(line: &str) {
    // If nobody listens any more, there is nothing to be said.
    let _ = std::io::stdout().lock().write_all(format!("{line}\n").as_bytes());
}

/// What the threads of a life share.
pub struct Shared {
    pub broker: Broker,
    pub data: std::path::PathBuf,
    pub seed: u64,
    pub life: u32,
    stop: AtomicBool,
    /// Of the topics that stay.
    pub partitions: Vec<(Place, Partition)>,
}

impl Shared {
    pub fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Random numbers of one thread.
    fn rng(&self, thread: u64) -> Rng {
        Rng::of(self.seed ^ thread.rotate_left(40), u64::from(self.life))
    }
}

/// Works until it is killed or its input ends; then it closes.
pub fn run(data: &Path, seed: u64, life: u32) {
    say("start");
    // A thread that panics is a failure of all: nobody is to find it silent.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::abort();
    }));
    let broker = Broker::open(data, config(&mut Rng::of(seed, u64::from(life)))).unwrap();
    let mut partitions = Vec::new();
    for (name, config) in plan(seed) {
        if !broker.topics().iter().any(|topic| topic == name) {
            say(&format!("c {name} 0"));
            broker.create_topic(name, config).unwrap();
        }
        let topic = broker.topic(name).unwrap();
        say(&format!("C {name} 0"));
        for partition in topic.partitions() {
            say(&format!("F {name} {} {} {}", partition.number(), partition.first_offset(), partition.next_offset()));
            partitions.push((Place { topic: name.into(), partition: partition.number(), incarnation: 0 }, partition));
        }
    }
    say("open");
    let shared = Shared { broker, data: data.to_owned(), seed, life, stop: AtomicBool::new(false), partitions };
    std::thread::scope(|scope| {
        let shared = &shared;
        for (number, (place, partition)) in (0..).zip(&shared.partitions) {
            for producer in (0..2).filter(|_| place.topic != CUT) {
                scope.spawn(move || {
                    let mut producer = Producer::new(shared, place, partition, producer, shared.rng(number * 8 + u64::from(producer)));
                    while shared.goes_on() {
                        producer.produce();
                        producer.rest(8_000);
                    }
                });
            }
        }
        scope.spawn(|| cut(shared, shared.rng(1001)));
        scope.spawn(|| come_and_go(shared, shared.rng(1002)));
        scope.spawn(|| operations::run(shared, shared.rng(1003)));
        for reader in 0..2 {
            scope.spawn(move || read(shared, shared.rng(1004 + reader)));
            scope.spawn(move || follow(shared, shared.rng(1006 + reader)));
        }
        // Whoever wants it to close ends its input.
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        shared.stop.store(true, Ordering::Relaxed);
    });
    shared.broker.close().unwrap();
    say("closed");
}

/// Appends records that tell what they are.
pub struct Producer<'a> {
    shared: &'a Shared,
    place: &'a Place,
    partition: &'a Partition,
    /// Of the next record.
    pub tag: Tag,
    pub rng: Rng,
}

impl<'a> Producer<'a> {
    pub fn new(shared: &'a Shared, place: &'a Place, partition: &'a Partition, producer: u32, rng: Rng) -> Self {
        Self { shared, place, partition, tag: Tag { life: shared.life, producer, sequence: 0 }, rng }
    }

    fn batch(&mut self) -> Batch {
        let mut batch = self.partition.batch();
        for _ in 0..=self.rng.below(6) {
            batch.push(Some(&self.tag.key(self.place)), &self.tag.value(self.place, self.shared.seed)).unwrap();
            self.tag.sequence += 1;
        }
        batch
    }

    /// Appends some batches in one of the ways that there are, and says what was acknowledged.
    pub fn produce(&mut self) {
        let Place { topic, partition, incarnation } = self.place;
        let producer = self.tag.producer;
        let acknowledged = |offsets: std::ops::Range<u64>, sequence| {
            let (first, count) = (offsets.start, offsets.end - offsets.start);
            say(&format!("A {topic} {partition} {incarnation} {first} {count} {producer} {sequence}"));
        };
        if self.rng.below(4) == 0 {
            let first = self.tag.sequence;
            let batch = self.batch();
            return acknowledged(self.partition.append_and_wait(batch).unwrap(), first);
        }
        let mut window = Vec::new();
        for _ in 0..=self.rng.below(4) {
            let first = self.tag.sequence;
            let mut batch = self.batch();
            let ticket = if self.rng.below(2) == 0 {
                self.partition.append(batch).unwrap()
            } else {
                loop {
                    match self.partition.try_append(batch) {
                        Ok(ticket) => break ticket,
                        Err(refused) => {
                            assert!(refused.error.is_none(), "{refused}");
                            batch = refused.batch;
                            std::thread::yield_now();
                        }
                    }
                }
            };
            window.push((ticket, first));
        }
        for (ticket, first) in window {
            // Now and then nobody waits.
            if self.rng.below(16) > 0 {
                acknowledged(ticket.wait().unwrap(), first);
            }
        }
    }

    pub fn rest(&mut self, most_us: u64) {
        std::thread::sleep(Duration::from_micros(self.rng.below(most_us)));
    }
}

/// Appends to the topic that is cut, and cuts it.
fn cut(shared: &Shared, rng: Rng) {
    let (place, partition) = shared.partitions.iter().find(|(place, _)| place.topic == CUT).unwrap();
    let mut producer = Producer::new(shared, place, partition, 0, rng);
    while shared.goes_on() {
        producer.produce();
        producer.rest(5_000);
        if producer.rng.below(6) == 0 {
            operations::truncate_after(place, partition, &mut producer);
        }
    }
}

/// Makes the topic that passes, appends to it, and deletes it, and so on.
fn come_and_go(shared: &Shared, mut rng: Rng) {
    let mut incarnation = shared.life << 16;
    while shared.goes_on() {
        if shared.broker.topics().iter().any(|name| name == PASSING) {
            say(&format!("D {PASSING}"));
            shared.broker.delete_topic(PASSING).unwrap();
            say(&format!("d {PASSING}"));
            say("O delete_topic");
        }
        incarnation += 1;
        let partitions = 1 + rng.below(2) as u32;
        let settings = TopicConfig { partitions, segment_bytes: 4096, preallocate_bytes: 4096, ..TopicConfig::default() };
        say(&format!("c {PASSING} {incarnation}"));
        let topic = shared.broker.create_topic(PASSING, settings).unwrap();
        say(&format!("C {PASSING} {incarnation}"));
        say("O create_topic");
        for partition in topic.partitions() {
            let place = Place { topic: PASSING.into(), partition: partition.number(), incarnation };
            let mut producer = Producer::new(shared, &place, &partition, 0, Rng::new(rng.next()));
            for _ in 0..rng.below(8) {
                producer.produce();
                producer.rest(3_000);
            }
            let mut reader = partition.reader().unwrap();
            say(&format!("R {}", read_from(shared, &place, &mut reader, 0).unwrap()));
        }
    }
}

/// Reads what there is from `offset` on, some hundred KiB at most, and checks it. Gives how many records.
fn read_from(shared: &Shared, place: &Place, reader: &mut sapwood::Reader, offset: u64) -> sapwood::Result<u64> {
    let (mut next, mut order) = (offset, Order::default());
    for _ in 0..8 {
        let records = reader.read(next, 50_000)?;
        for record in &records {
            assert_eq!(record.offset, next, "{place:?}");
            order.follow(place, next, Tag::check(place, shared.seed, (next, record.key, record.value)));
            next += 1;
        }
        if records.is_empty() {
            break;
        }
    }
    Ok(next - offset)
}

/// What may come of reading where others shorten the log meanwhile.
#[track_caller]
fn assert_gone(place: &Place, error: &sapwood::Error) {
    assert!(error.is_out_of_range(), "{place:?}: {error}");
}

/// Reads at random places.
fn read(shared: &Shared, mut rng: Rng) {
    while shared.goes_on() {
        let (place, partition) = &shared.partitions[rng.below(shared.partitions.len() as u64) as usize];
        let config = ReaderConfig {
            piece_bytes: rng.one_of(&[4096, 65_536]),
            ..ReaderConfig::by(rng.one_of(&[ReadMode::Buffered, ReadMode::Direct]))
        };
        let mut reader = partition.reader_with(config).unwrap();
        for _ in 0..10 {
            let (first, end) = (partition.first_offset(), partition.durable_end());
            if first < end {
                let offset = first + rng.below(end - first);
                match read_from(shared, place, &mut reader, offset) {
                    Ok(count) => say(&format!("R {count}")),
                    Err(error) => assert_gone(place, &error),
                }
            }
            std::thread::sleep(Duration::from_micros(rng.below(10_000)));
        }
    }
}

/// Waits at the ends of logs.
fn follow(shared: &Shared, mut rng: Rng) {
    while shared.goes_on() {
        let (place, partition) = &shared.partitions[rng.below(shared.partitions.len() as u64) as usize];
        let visibility = rng.one_of(&[Visibility::Durable, Visibility::Appended]);
        let Ok(mut tail) = partition.tail_with(partition.durable_end(), visibility).inspect_err(|error| assert_gone(place, error)) else {
            continue;
        };
        let (mut order, mut count) = (Order::default(), 0);
        for _ in 0..rng.below(60) {
            let position = tail.position();
            match tail.next_batch(20_000, Some(Duration::from_millis(20))) {
                Ok(None) => {}
                Ok(Some(records)) => {
                    for (offset, record) in (position..).zip(&records) {
                        assert_eq!(record.offset, offset, "{place:?}: a tail misses records");
                        order.follow(place, offset, Tag::check(place, shared.seed, (offset, record.key, record.value)));
                        count += 1;
                    }
                }
                Err(error) => {
                    assert_gone(place, &error);
                    break;
                }
            }
        }
        say(&format!("T {count}"));
    }
}
