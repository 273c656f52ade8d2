//! What is known of the logs from what the load said, and whether what is there fits.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sapwood::{Broker, BrokerConfig, inspect};

use crate::load::{CUT, KEPT, PASSING, config, plan};
use crate::oracle;
use crate::record::{Order, Place, Rng, Tag};

/// What is known of one log.
#[derive(Debug, Default)]
struct Log {
    /// Batches that were acknowledged, by first offset: how many records, and the first one's tag.
    acknowledged: BTreeMap<u64, (u64, Tag)>,
    /// The log was this long at least, and nothing was cut of that.
    least_next: u64,
    /// Records before this one were removed, as was acknowledged; and as was asked for.
    floor: u64,
    asked: u64,
    /// The first offset, and the first segment's base, that were seen before.
    first: u64,
    base: u64,
    /// The log was cut at that offset, as was acknowledged: what is there from it on is younger than that tag.
    cuts: Vec<(u64, Tag)>,
}

impl Log {
    /// The log is cut there, or is about to be.
    fn cut(&mut self, offset: u64) {
        self.acknowledged.split_off(&offset);
        if let Some((&first, (count, _))) = self.acknowledged.iter_mut().next_back() {
            *count = (*count).min(offset - first);
        }
        self.least_next = self.least_next.min(offset);
    }

    /// A first offset that is given out.
    #[track_caller]
    fn see_first(&mut self, first: u64, what: &str) {
        assert!(first >= self.first, "{what}: the first offset went back from {} to {first}", self.first);
        assert!(first >= self.floor, "{what}: the first offset is {first}, and the records before {} were removed", self.floor);
        self.first = first;
    }

    /// The records from `first` to `next`, whatever read them, as tags.
    #[track_caller]
    fn compare(&mut self, first: u64, tags: &[Tag], what: &str) {
        let next = first + tags.len() as u64;
        assert!(next >= self.least_next, "{what}: the log ends at {next}, and {} were acknowledged", self.least_next);
        self.acknowledged.retain(|start, (count, _)| start + *count > first.min(self.floor.max(self.asked)));
        for (&start, &(count, tag)) in &self.acknowledged {
            for (offset, sequence) in (start..start + count).zip(tag.sequence..) {
                let Some(place) = offset.checked_sub(first) else {
                    assert!(offset < self.asked.max(self.first), "{what}: the record {offset} is gone, and nobody removed it");
                    continue;
                };
                let there = tags[place as usize];
                assert_eq!(there, Tag { sequence, ..tag }, "{what}: another record at {offset}");
            }
        }
        for &(offset, tag) in &self.cuts {
            let from = offset.saturating_sub(first).min(tags.len() as u64) as usize;
            let back = tags[from..].iter().find(|there| (there.life, there.sequence) < (tag.life, tag.sequence));
            assert!(back.is_none(), "{what}: {back:?} is back, which was cut at {offset}");
        }
    }
}

/// Whether a topic is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    There(u32),
    /// It is being made, or deleted.
    Either(u32),
}

impl State {
    fn may_be_absent(self) -> bool {
        !matches!(self, Self::There(_))
    }

    fn incarnation(self) -> Option<u32> {
        match self {
            Self::Absent => None,
            Self::There(incarnation) | Self::Either(incarnation) => Some(incarnation),
        }
    }
}

/// Everything known.
pub struct History {
    seed: u64,
    logs: BTreeMap<(String, u32), Log>,
    topics: BTreeMap<String, State>,
    /// How often what was done.
    counts: BTreeMap<String, u64>,
}

impl History {
    pub fn new(seed: u64) -> Self {
        let names = plan(seed).into_iter().map(|(name, _)| name).chain([PASSING]);
        let topics = names.map(|name| (name.to_owned(), State::Absent)).collect();
        Self { seed, logs: BTreeMap::new(), topics, counts: BTreeMap::new() }
    }

    fn count(&mut self, what: &str, more: u64) {
        *self.counts.entry(what.to_owned()).or_default() += more;
    }

    fn log(&mut self, topic: &str, partition: &str) -> &mut Log {
        self.logs.entry((topic.to_owned(), partition.parse().unwrap())).or_default()
    }

    /// Takes in what a life said, a line at a time:
    ///
    /// | line | |
    /// | --- | --- |
    /// | `start`, `open`, `closed` | how far it came |
    /// | `F topic partition first next` | what an opening found |
    /// | `c topic incarnation`, `C …` | a topic is about to be made, is there |
    /// | `D topic`, `d topic` | it is about to be deleted, is gone |
    /// | `A topic partition incarnation first count producer sequence` | records were acknowledged |
    /// | `B topic partition offset`, `b …` | the records before it are about to be removed, are gone |
    /// | `X topic partition offset`, `x … sequence` | those from there on are about to be cut, are gone; what comes next has that number |
    /// | `O name` | an operation was done |
    /// | `R count`, `T count` | so many records were read, came to a tail |
    #[track_caller]
    pub fn hear(&mut self, said: &[String], killed: bool, context: &str) {
        let life = self.counts.get("lives").copied().unwrap_or(0) as u32;
        self.count("lives", 1);
        self.count(if killed { "kills" } else { "closes" }, 1);
        if killed && !said.iter().any(|line| line == "open") {
            self.count("kills while opening", 1);
        }
        let number = |text: &str| text.parse::<u64>().unwrap();
        for line in said {
            let what = format!("{context}, {line:?}");
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["start" | "open" | "closed"] => {}
                ["F", topic, partition, first, next] => {
                    let log = self.log(topic, partition);
                    log.see_first(number(first), &what);
                    assert!(number(next) >= log.least_next, "{what}: {} were acknowledged", log.least_next);
                }
                ["c", topic, incarnation] => {
                    let state = self.topics.get_mut(topic).unwrap();
                    assert!(state.may_be_absent(), "{what}: it is gone, and nobody deleted it");
                    *state = State::Either(incarnation.parse().unwrap());
                    self.logs.retain(|(name, _), _| name != topic);
                }
                ["C", topic, incarnation] => {
                    let state = self.topics[topic];
                    assert_eq!(state.incarnation(), Some(incarnation.parse().unwrap()), "{what}: nobody made it");
                    self.topics.insert(topic.to_owned(), State::There(incarnation.parse().unwrap()));
                }
                ["D", topic] => {
                    let state = self.topics.get_mut(topic).unwrap();
                    *state = State::Either(state.incarnation().unwrap_or_else(|| panic!("{what}: a deleted topic is back")));
                    self.logs.retain(|(name, _), _| name != topic);
                }
                ["d", topic] => {
                    self.topics.insert(topic.to_owned(), State::Absent);
                }
                ["A", topic, partition, _, first, count, producer, sequence] => {
                    let (first, count) = (number(first), number(count));
                    let log = self.log(topic, partition);
                    let tag = Tag { life, producer: producer.parse().unwrap(), sequence: number(sequence) };
                    let twice = log.acknowledged.insert(first, (count, tag));
                    assert!(twice.is_none(), "{what}: the offset {first} was given twice");
                    log.least_next = log.least_next.max(first + count);
                    self.count("records acknowledged", count);
                }
                ["B", topic, partition, offset] => {
                    let log = self.log(topic, partition);
                    log.asked = log.asked.max(number(offset));
                }
                ["b", topic, partition, offset] => {
                    let log = self.log(topic, partition);
                    log.floor = log.floor.max(number(offset));
                    log.asked = log.asked.max(log.floor);
                }
                ["X", topic, partition, offset] => self.log(topic, partition).cut(number(offset)),
                ["x", topic, partition, offset, sequence] => {
                    let (offset, tag) = (number(offset), Tag { life, producer: 0, sequence: number(sequence) });
                    let log = self.log(topic, partition);
                    log.cuts.retain(|(before, _)| *before < offset);
                    log.cuts.push((offset, tag));
                }
                ["O", name] => self.count(name, 1),
                ["R", count] => self.count("records read", number(count)),
                ["T", count] => self.count("records by tails", number(count)),
                _ => panic!("{what}: no such line"),
            }
        }
    }

    /// The logs that are known of, each with where it lies and what its records must say.
    fn places(&self, data: &Path) -> Vec<(Place, PathBuf)> {
        let place = |(topic, partition): &(String, u32)| {
            let incarnation = self.topics[topic].incarnation()?;
            Some((Place { topic: topic.clone(), partition: *partition, incarnation }, data.join(topic).join(partition.to_string())))
        };
        self.logs.keys().filter_map(place).collect()
    }

    /// Compares what is on the disk, which nobody has opened since, with what is known.
    #[track_caller]
    pub fn check(&mut self, data: &Path, context: &str) {
        for (place, dir) in self.places(data) {
            let what = format!("{context}, {place:?}, as it lies there");
            if !dir.exists() {
                assert!(self.topics[&place.topic].may_be_absent(), "{what}: it is gone");
                continue;
            }
            let report = oracle::check(&dir);
            let (mut tags, mut order) = (Vec::new(), Order::default());
            for (offset, record) in (report.first_offset..).zip(report.readable_records()) {
                assert_eq!(record.offset, offset, "{what}");
                let tag = Tag::check(&place, self.seed, (offset, &record.key, &record.value));
                order.follow(&place, offset, tag);
                tags.push(tag);
            }
            self.count("records checked", tags.len() as u64);
            let kept = plan(self.seed).into_iter().find(|(name, _)| *name == place.topic).filter(|_| place.topic == KEPT);
            let log = self.logs.get_mut(&(place.topic.clone(), place.partition)).unwrap();
            let base = report.first_offset;
            assert!(base >= log.base, "{what}: the segment {base} is back, the first one was {} before", log.base);
            log.base = base;
            if let [_, second, ..] = &report.segments[..] {
                assert!(second.base > log.floor, "{what}: a segment is there all of whose records were removed");
            }
            if let Some((_, settings)) = kept {
                // A segment goes only while there is more than is to be kept.
                let held: u64 = report.segments.iter().map(|segment| segment.valid_end).sum();
                let least = settings.retention_bytes.unwrap().saturating_sub(settings.segment_bytes.max(16 << 10));
                assert!(base == 0 || held >= least, "{what}: only {held} bytes were kept");
                log.asked = log.asked.max(base);
            }
            log.compare(base, &tags, &what);
        }
    }

    /// Opens the directory and reads all of it, and closes it, and looks at it once more.
    #[track_caller]
    pub fn check_by_the_engine(&mut self, data: &Path, rng: &mut Rng, context: &str) {
        // What goes by itself must not go while it is read.
        let config = BrokerConfig { retention_every: None, ..config(rng) };
        let broker = Broker::open(data, config).unwrap_or_else(|error| panic!("{context}: {error}"));
        self.count("openings by the judge", 1);
        for report in &broker.report().partitions {
            assert!(report.damage.is_empty() && report.repaired.is_none(), "{context}: {report:?}");
        }
        for (topic, state) in &self.topics {
            let is_there = broker.topics().contains(topic);
            assert!(is_there || state.may_be_absent(), "{context}: the topic {topic} is gone");
            assert!(!is_there || state.incarnation().is_some(), "{context}: the topic {topic} is back");
        }
        for (place, _) in self.places(data) {
            let what = format!("{context}, {place:?}, opened");
            let Ok(partition) = broker.topic(&place.topic).and_then(|topic| topic.partition(place.partition)) else { continue };
            let first = partition.first_offset();
            let mut reader = partition.reader().unwrap();
            let (mut tags, mut order, mut next) = (Vec::new(), Order::default(), first);
            loop {
                let records = reader.read(next, 100_000).unwrap_or_else(|error| panic!("{what}: {error}"));
                for record in &records {
                    assert_eq!(record.offset, next, "{what}");
                    let tag = Tag::check(&place, self.seed, (next, record.key, record.value));
                    order.follow(&place, next, tag);
                    tags.push(tag);
                    next += 1;
                }
                if records.is_empty() {
                    break;
                }
            }
            assert_eq!(next, partition.next_offset(), "{what}");
            self.count("records read by the judge", tags.len() as u64);
            let log = self.logs.get_mut(&(place.topic.clone(), place.partition)).unwrap();
            log.see_first(first, &what);
            // By itself the engine removes only there.
            log.asked = if place.topic == KEPT { log.asked.max(first) } else { log.asked };
            log.compare(first, &tags, &what);
            assert!(
                place.topic == KEPT || place.topic == CUT || first <= log.asked,
                "{what}: nobody asked for a log that begins at {first}"
            );
        }
        broker.close().unwrap_or_else(|error| panic!("{context}: {error}"));
        for (_, dir) in self.places(data).iter().filter(|(_, dir)| dir.exists()) {
            oracle::assert_sound(dir);
            let found = inspect::verify(dir).unwrap().findings;
            assert!(found.iter().all(|finding| finding.severity == inspect::Severity::Info), "{context}: {found:?}");
        }
    }

    /// What was done in all.
    pub fn summary(&self, lives: u32, time: Duration) -> String {
        let lines = self.counts.iter().map(|(what, count)| format!("  {count:>12} {what}\n"));
        format!("soak: {lives} lives in {} s from seed {}, nothing wrong\n{}", time.as_secs(), self.seed, lines.collect::<String>())
    }
}
