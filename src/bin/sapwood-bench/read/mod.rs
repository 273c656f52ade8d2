//! Consumers: at the tail beside the load, or over what it wrote, once it is over; and what they measure.
//!
//! They check that they get what they asked for: every offset in turn, or the one of the look-up. That its bytes are right is the
//! checksum's to say, and that they are those of the append is verification's. The first thing that is wrong ends all consumers, and
//! the run is a failed one.

mod seen;
mod tail;
mod written;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hdrhistogram::Histogram;
use sapwood::{Partition, ReadMode, Record, Records};

use crate::Stop;
use crate::args::ReadArg;
use crate::interrupts::Interrupts;
use crate::schedule::Shape;

pub use tail::beside;
pub use written::over;

/// Bytes that a consumer asks for at once: as many as a reader reads at once by itself.
pub const BATCH_BYTES: usize = 256 << 10;

/// Who reads, and how.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// What they do.
    pub what: ReadArg,
    /// Consumers of each partition, a thread each.
    pub consumers: u32,
    /// How they get at the bytes.
    pub mode: ReadMode,
    /// All partitions, in order.
    pub partitions: &'a [Partition],
    /// What load there was; look-ups last as long.
    pub shape: Shape,
    /// Where look-ups go follows from it.
    pub seed: u64,
    /// Ctrl-C.
    pub interrupts: &'a Interrupts,
}

impl Reading<'_> {
    /// Every consumer: its number, that of its partition, and the partition.
    fn each(&self) -> impl Iterator<Item = (u32, u32, &Partition)> {
        let partitions = (0..).zip(self.partitions);
        partitions.flat_map(|(number, partition)| (0..self.consumers).map(move |consumer| (consumer, number, partition)))
    }
}

/// What all consumers measured.
#[derive(Debug)]
pub struct Figures {
    /// In nanoseconds; of what, is [`ReadArg`]'s to say.
    pub latency: Histogram<u64>,
    /// Records read, each as often as there were consumers to read it.
    pub records: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
    /// What that took.
    pub elapsed: Duration,
    /// What went wrong first.
    pub failure: Option<Failure>,
}

/// What a consumer met.
#[derive(Debug)]
pub struct Failure {
    consumer: u32,
    partition: u32,
    what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "consumer {} of partition {}: {}", self.consumer, self.partition, self.what)
    }
}

/// The first failure of several threads.
#[derive(Debug, Default)]
struct Failures {
    any: AtomicBool,
    first: Mutex<Option<Failure>>,
}

impl Failures {
    /// Publishes nothing but itself, and a late look at it costs a read: relaxed is enough.
    fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    fn add(&self, failure: Failure) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.any.store(true, Ordering::Relaxed);
    }

    fn into_first(self) -> Option<Failure> {
        self.first.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one consumer counts.
#[derive(Debug, Default, Clone, Copy)]
struct Count {
    records: u64,
    bytes: u64,
}

impl Count {
    fn add(&mut self, record: &Record<'_>) {
        self.records += 1;
        self.bytes += crate::units::to_u64(record.key.len() + record.value.len());
    }
}

/// Looks at every record of a batch: their offsets must go on from `expected`.
fn check(records: &Records<'_>, mut expected: u64, count: &mut Count) -> Result<(), String> {
    for record in records {
        if record.offset != expected {
            return Err(format!("offset {} came where {expected} should", record.offset));
        }
        count.add(&record);
        expected += 1;
    }
    if records.next_offset() == expected {
        Ok(())
    } else {
        Err(format!("a batch of the records before offset {expected} says that {} is next", records.next_offset()))
    }
}

/// A reader or tail that could not be made.
fn cannot_begin(error: sapwood::Error) -> Stop {
    Stop::failed("a consumer could not begin")(error)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;
    use std::time::Instant;

    use sapwood::{Broker, Topic, TopicConfig};

    use super::*;
    use crate::load::{self, Load};
    use crate::payload::Payload;
    use crate::progress::Progress;

    /// A topic of two partitions, and what a load on it needs.
    struct Bench {
        topic: Topic,
        partitions: Vec<Partition>,
        payload: Payload,
        shape: Shape,
        abort: AtomicBool,
        interrupts: Interrupts,
        broker: Broker,
        _dir: tempfile::TempDir,
    }

    /// Small segments, so that reading goes on from one to the next; nothing is kept in memory, so that it is the files that are read.
    fn bench(records: u64) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let broker = Broker::open(dir.path(), sapwood::BrokerConfig::default()).unwrap();
        let config = TopicConfig { partitions: 2, segment_bytes: 4000, index_interval: 3, tail_bytes: 0, ..TopicConfig::default() };
        let topic = broker.create_topic("bench", config).unwrap();
        Bench {
            partitions: (0..2).map(|number| topic.partition(number).unwrap()).collect(),
            topic,
            payload: Payload::noise(20, 5, 1),
            shape: Shape { producers: 2, batch: 3, warmup: Duration::ZERO, duration: None, records: Some(records) },
            abort: AtomicBool::new(false),
            interrupts: Interrupts::default(),
            broker,
            _dir: dir,
        }
    }

    impl Bench {
        fn load(&self, since: Option<Instant>, rate: Option<u64>) -> load::Outcome {
            let Self { topic, partitions, payload, shape, abort, interrupts, .. } = self;
            let load = Load { topic, partitions, payload, shape: *shape, rate, since, abort, interrupts };
            load::run(&load, &Progress::new())
        }

        fn reading(&self, what: ReadArg, consumers: u32) -> Reading<'_> {
            let Self { partitions, shape, interrupts, .. } = self;
            Reading { what, consumers, mode: ReadMode::Buffered, partitions, shape: *shape, seed: 7, interrupts }
        }

        fn over(&self, what: ReadArg, consumers: u32) -> Figures {
            over(&self.reading(what, consumers), &Progress::new()).unwrap()
        }
    }

    fn told(figures: &Figures) -> String {
        figures.failure.as_ref().map(ToString::to_string).unwrap_or_default()
    }

    #[test]
    fn each_tail_sees_every_record_of_its_partition() {
        for rate in [None, Some(20_000)] {
            let bench = bench(400);
            let (outcome, figures) = beside(&bench.reading(ReadArg::Tail, 3), &bench.abort, |since| bench.load(Some(since), rate)).unwrap();
            assert_eq!((outcome.acknowledged, told(&figures)), (400, String::new()), "{rate:?}");
            assert_eq!((figures.records, figures.latency.len(), figures.bytes), (1200, 1200, 3 * outcome.bytes), "{rate:?}");
            assert!(figures.latency.min() > 0 && figures.elapsed > Duration::ZERO, "{rate:?}");
        }
    }

    #[test]
    fn what_tails_saw_in_the_warm_up_is_in_no_figure() {
        let mut bench = bench(1);
        bench.shape = Shape { warmup: Duration::from_secs(3600), records: None, duration: None, ..bench.shape };
        let run = |since| {
            let outcome = std::thread::scope(|scope| {
                let load = scope.spawn(|| bench.load(Some(since), None));
                while bench.partitions.iter().map(Partition::durable_end).sum::<u64>() < 100 {
                    std::thread::yield_now();
                }
                bench.abort.store(true, Ordering::Relaxed);
                load.join().unwrap()
            });
            assert!(outcome.acknowledged >= 100);
            outcome
        };
        let (_, figures) = beside(&bench.reading(ReadArg::Tail, 1), &bench.abort, run).unwrap();
        assert_eq!((figures.records, figures.latency.len(), told(&figures)), (0, 0, String::new()));
    }

    #[test]
    fn a_tail_that_fails_ends_the_load() {
        let bench = bench(u64::MAX);
        let run = |since| {
            bench.broker.delete_topic("bench").unwrap();
            while !bench.abort.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            bench.load(Some(since), None)
        };
        let (outcome, figures) = beside(&bench.reading(ReadArg::Tail, 1), &bench.abort, run).unwrap();
        assert!(told(&figures).contains("at offset 0: "), "{}", told(&figures));
        assert_eq!((outcome.acknowledged, outcome.failed_appends), (0, 0));
    }

    #[test]
    fn who_catches_up_reads_everything_once() {
        let bench = bench(400);
        let outcome = bench.load(None, None);
        let figures = bench.over(ReadArg::CatchUp, 2);
        assert_eq!((figures.records, figures.bytes, told(&figures)), (800, 2 * outcome.bytes, String::new()));
        assert!((4..800).contains(&figures.latency.len()), "{} batches", figures.latency.len());
    }

    #[test]
    fn look_ups_are_as_many_as_were_asked_for() {
        let mut bench = bench(400);
        bench.load(None, None);
        for what in [ReadArg::Random, ReadArg::Time] {
            bench.shape.records = Some(1001);
            let figures = bench.over(what, 2);
            assert_eq!((figures.records, figures.latency.len(), told(&figures)), (1001, 1001, String::new()), "{what:?}");
        }
        bench.shape = Shape { records: None, duration: Some(Duration::from_millis(1)), ..bench.shape };
        for what in [ReadArg::Random, ReadArg::Time] {
            assert!(bench.over(what, 1).failure.is_none());
        }
    }

    #[test]
    fn nothing_is_read_of_an_empty_log() {
        let bench = bench(10);
        for what in [ReadArg::CatchUp, ReadArg::Random, ReadArg::Time] {
            let figures = bench.over(what, 1);
            assert_eq!((figures.records, figures.latency.len(), told(&figures)), (0, 0, String::new()), "{what:?}");
        }
    }

    #[test]
    fn damage_is_met_and_told() {
        let mut bench = bench(400);
        bench.load(None, None);
        let log = bench.partitions[1].path().join(format!("{:020}.log", 0));
        fs::OpenOptions::new().write(true).open(log).unwrap().write_all_at(&[0xff; 8], 28).unwrap();
        bench.shape.records = Some(1 << 20);
        for what in [ReadArg::CatchUp, ReadArg::Random, ReadArg::Time] {
            let figures = bench.over(what, 1);
            assert!(told(&figures).starts_with("consumer 0 of partition 1: at offset 0: "), "{what:?}: {}", told(&figures));
        }
    }
}
