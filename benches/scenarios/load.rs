//! Load on the engine: closed loops of several producers, and an open loop of one.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use sapwood::{Batch, Broker, BrokerConfig, Partition, Ticket, TopicConfig};
use tempfile::TempDir;

use crate::units::{float, nanos, to_u64};
use crate::{Context, Outcome, named};

/// Before it is due, an open loop's thread watches the clock for so long: a sleeping thread wakes later than it asked to.
pub const WATCH: Duration = Duration::from_micros(80);

/// A broker in a directory of its own with one topic. Both go with it.
pub struct Engine {
    broker: Broker,
    partitions: Vec<Partition>,
    dir: TempDir,
}

impl Engine {
    /// With the default settings but for those of the topic.
    pub fn open(context: &Context, topic: TopicConfig) -> Outcome<Self> {
        Self::open_with(context, BrokerConfig::default(), topic)
    }

    /// With these settings; the backend is the one that was asked for.
    pub fn open_with(context: &Context, broker: BrokerConfig, topic: TopicConfig) -> Outcome<Self> {
        let dir = tempfile::tempdir_in(&context.dir).map_err(named("a directory for the engine"))?;
        let (broker, partitions) = open(dir.path(), BrokerConfig { backend: context.backend, ..broker }, topic)?;
        Ok(Self { broker, partitions, dir })
    }

    /// The partition of this number.
    pub fn partition(&self, number: usize) -> &Partition {
        &self.partitions[number % self.partitions.len()]
    }

    /// Waits until all is on the device, so that the next measurement has the disk to itself.
    pub fn close(self) -> Outcome<()> {
        drop(self.partitions);
        self.broker.close().map_err(named("close the broker"))?;
        self.dir.close().map_err(named("remove the engine's directory"))
    }
}

/// A broker with the topic of the scenarios.
pub fn open(dir: &Path, broker: BrokerConfig, topic: TopicConfig) -> Outcome<(Broker, Vec<Partition>)> {
    let broker = Broker::open(dir, broker).map_err(named("open a broker"))?;
    let topic = broker.create_topic("bench", topic).map_err(named("create a topic"))?;
    let partitions = (0..topic.num_partitions()).map(|number| topic.partition(number)).collect::<Result<_, _>>();
    Ok((broker, partitions.map_err(named("a partition"))?))
}

/// Who appends what.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Threads. They take partitions in turn.
    pub producers: usize,
    /// Records per append.
    pub records: u64,
    /// Bytes of each record's value.
    pub value_bytes: usize,
    /// Appends of one producer that wait for their answer at once.
    pub in_flight: usize,
}

impl Shape {
    /// One record, one append at a time.
    pub fn single(producers: usize, value_bytes: usize) -> Self {
        Self { producers, records: 1, value_bytes, in_flight: 1 }
    }
}

/// How long.
#[derive(Debug, Clone, Copy)]
pub enum Until {
    /// From the end of the warm-up.
    Time(Duration),
    /// Of each producer, the warm-up not counted.
    Appends(u64),
}

/// What a load came to.
pub struct Measured {
    /// Of each append, in nanoseconds.
    pub latency: Histogram<u64>,
    records: u64,
    bytes: u64,
    seconds: f64,
}

impl Measured {
    /// Records per second.
    pub fn records_per_second(&self) -> f64 {
        float(self.records) / self.seconds
    }

    /// MiB of values per second; headers are the engine's own affair.
    pub fn mib_per_second(&self) -> f64 {
        float(self.bytes) / float(1 << 20) / self.seconds
    }
}

/// Runs it on a thread of its own, on the CPU with the highest number, to which the engine pins its first writer, too: where a disk has
/// one interrupt, the CPU decides how long a write takes, and whatever is compared must not differ in that.
pub fn alone<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let pinned = || {
        if let Some(cpu) = core_affinity::get_core_ids().and_then(|cpus| cpus.into_iter().max_by_key(|cpu| cpu.id)) {
            // Where it is refused, the scheduler decides, as it does for the writer.
            let _ = core_affinity::set_for_current(cpu);
        }
        work()
    };
    thread::scope(|scope| scope.spawn(pinned).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// The batch of the next append, in the memory of one that was written before.
pub fn make_batch(partition: &Partition, value: &[u8], records: u64) -> Outcome<Batch> {
    let mut batch = partition.batch();
    for _ in 0..records {
        batch.push(None, value).map_err(named("a record"))?;
    }
    Ok(batch)
}

/// Each producer waits for the answer to its oldest append before it appends again.
pub fn closed(engine: &Engine, shape: Shape, warmup: Duration, until: Until) -> Outcome<Measured> {
    if shape.producers == 1 {
        let share = alone(|| produce(engine.partition(0), shape, Instant::now() + warmup, until));
        return sum(vec![share], shape);
    }
    let together = Barrier::new(shape.producers);
    let shares: Vec<Outcome<Share>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..shape.producers)
            .map(|number| {
                let (partition, together) = (engine.partition(number), &together);
                scope.spawn(move || {
                    together.wait();
                    produce(partition, shape, Instant::now() + warmup, until)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    sum(shares, shape)
}

/// What one producer measured.
struct Share {
    latency: Histogram<u64>,
    from: Instant,
    ended: Instant,
}

impl Share {
    fn new(from: Instant) -> Self {
        let latency = Histogram::new(3).expect("3 significant digits are allowed");
        Self { latency, from, ended: from }
    }

    /// Appends that began in the warm-up do not count.
    fn answered(&mut self, begun: Instant) {
        let now = Instant::now();
        if begun >= self.from {
            self.latency.record(nanos(now.duration_since(begun))).expect("a histogram that grows takes every number");
            self.ended = now;
        }
    }
}

fn sum(shares: Vec<Outcome<Share>>, shape: Shape) -> Outcome<Measured> {
    let shares: Vec<Share> = shares.into_iter().collect::<Result<_, _>>()?;
    let mut latency = Histogram::new(3).expect("3 significant digits are allowed");
    for share in &shares {
        latency.add(&share.latency).expect("a histogram that grows takes every number");
    }
    let begun = shares.iter().map(|share| share.from).min();
    let ended = shares.iter().map(|share| share.ended).max();
    let seconds = begun.zip(ended).map_or(0.0, |(begun, ended)| ended.duration_since(begun).as_secs_f64());
    if latency.is_empty() || seconds <= 0.0 {
        return Err("no append began and ended in the measured time".to_owned());
    }
    let records = latency.len() * shape.records;
    Ok(Measured { latency, records, bytes: records * to_u64(shape.value_bytes), seconds })
}

fn produce(partition: &Partition, shape: Shape, from: Instant, until: Until) -> Outcome<Share> {
    let value = vec![7; shape.value_bytes]; // not zeros, which some devices need not store
    let mut share = Share::new(from);
    let mut in_flight: VecDeque<(Instant, Ticket)> = VecDeque::with_capacity(shape.in_flight);
    let mut measured = 0;
    loop {
        let batch = make_batch(partition, &value, shape.records)?;
        let begun = Instant::now();
        let over = match until {
            // One append is measured, however slow it is.
            Until::Time(time) => begun >= from + time && measured > 0,
            Until::Appends(appends) => measured >= appends,
        };
        if over {
            break;
        }
        measured += u64::from(begun >= from);
        if shape.in_flight == 1 {
            partition.append_and_wait(batch).map_err(named("append"))?;
            share.answered(begun);
            continue;
        }
        in_flight.push_back((begun, partition.append(batch).map_err(named("append"))?));
        if in_flight.len() >= shape.in_flight {
            take_oldest(&mut in_flight, &mut share)?;
        }
    }
    while !in_flight.is_empty() {
        take_oldest(&mut in_flight, &mut share)?;
    }
    Ok(share)
}

fn take_oldest(in_flight: &mut VecDeque<(Instant, Ticket)>, share: &mut Share) -> Outcome<()> {
    if let Some((begun, ticket)) = in_flight.pop_front() {
        ticket.wait().map_err(named("append"))?;
        share.answered(begun);
    }
    Ok(())
}

/// One producer appends by a timetable of so many appends per second, whatever became of earlier ones. Latency counts from the
/// moment on the timetable. Between appends the same thread takes the answers, so that no third thread competes for the CPUs.
pub fn timetable(engine: &Engine, shape: Shape, per_second: f64, warmup: Duration, time: Duration) -> Outcome<Measured> {
    let share = alone(|| append_by_timetable(engine.partition(0), shape, per_second, warmup, time));
    sum(vec![share], shape)
}

fn append_by_timetable(partition: &Partition, shape: Shape, per_second: f64, warmup: Duration, time: Duration) -> Outcome<Share> {
    let value = vec![7; shape.value_bytes];
    let step = Duration::from_secs_f64(1.0 / per_second.max(1.0));
    let start = Instant::now();
    let mut share = Share::new(start + warmup);
    let end = start + warmup + time;
    let mut in_flight: VecDeque<(Instant, Ticket)> = VecDeque::new();
    let mut due = start;
    while due < end {
        let batch = make_batch(partition, &value, shape.records)?;
        answers_until(due, &mut in_flight, &mut share)?;
        in_flight.push_back((due, partition.append(batch).map_err(named("append"))?));
        due += step;
    }
    while !in_flight.is_empty() {
        take_oldest(&mut in_flight, &mut share)?;
    }
    Ok(share)
}

/// Takes the answers that come before this moment, and returns at it.
fn answers_until(due: Instant, in_flight: &mut VecDeque<(Instant, Ticket)>, share: &mut Share) -> Outcome<()> {
    loop {
        let now = Instant::now();
        if now >= due {
            return Ok(());
        }
        let left = (due - now).saturating_sub(WATCH);
        match in_flight.pop_front() {
            None if left.is_zero() => std::hint::spin_loop(),
            // Until the timetable's next append, but for the end, which is watched for.
            None => thread::sleep(left),
            Some((begun, ticket)) => match if left.is_zero() { ticket.try_wait() } else { ticket.wait_timeout(left) } {
                Ok(answer) => {
                    answer.map_err(named("append"))?;
                    share.answered(begun);
                }
                Err(ticket) => in_flight.push_front((begun, ticket)),
            },
        }
    }
}
