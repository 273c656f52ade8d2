//! Consumers at the tail of every partition, beside the producers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sapwood::{Durability, Partition, Tail, Visibility};

use super::seen::Seen;
use super::{BATCH_BYTES, Count, Failure, Failures, Figures, Reading, cannot_begin, check};
use crate::Stop;
use crate::acks::merge;
use crate::load::{Outcome, histogram};
use crate::units::nanos;

/// How often a consumer to which nothing comes looks whether the load is over.
const LOOK: Duration = Duration::from_millis(50);

/// Lets consumers tail all partitions while a load runs, until they have seen all of it. The load is told where the times that it notes
/// count from; it ends early when `abort` is set, as it is when a consumer fails.
///
/// # Errors
/// Before the load begins, if a consumer cannot.
pub fn beside(reading: &Reading<'_>, abort: &AtomicBool, load: impl FnOnce(Instant) -> Outcome) -> Result<(Outcome, Figures), Stop> {
    let made = reading.each().map(|(number, partition_number, partition)| Consumer::new(number, partition_number, partition));
    let consumers: Vec<Consumer> = made.collect::<Result<_, _>>().map_err(cannot_begin)?;
    let task =
        Task { since: Instant::now(), warmup: reading.shape.warmup, over: AtomicBool::new(false), failures: Failures::default(), abort };
    let (outcome, consumers) = thread::scope(|scope| {
        let task = &task;
        let threads: Vec<_> = consumers.into_iter().map(|consumer| scope.spawn(move || consumer.run(task))).collect();
        // However the load ends, also by panic: nobody waits for consumers that are never told.
        let over = Over(&task.over);
        let outcome = load(task.since);
        drop(over);
        let joined = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        (outcome, joined.collect::<Vec<_>>())
    });
    let figures = task.collect(&outcome, consumers);
    Ok((outcome, figures))
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

struct Task<'a> {
    /// Where times count from.
    since: Instant,
    warmup: Duration,
    /// All appends were answered.
    over: AtomicBool,
    failures: Failures,
    abort: &'a AtomicBool,
}

impl Task<'_> {
    fn fail(&self, failure: Failure) {
        self.failures.add(failure);
        self.abort.store(true, Ordering::Relaxed);
    }

    fn collect(self, outcome: &Outcome, consumers: Vec<Consumer>) -> Figures {
        let mut figures = Figures { latency: histogram(), records: 0, bytes: 0, elapsed: Duration::ZERO, failure: None };
        for consumer in consumers {
            let acks = merge(&outcome.acks[usize::try_from(consumer.partition).expect("a u32 fits in usize")]);
            let missed = consumer.seen.compare(acks, nanos(self.warmup), &mut figures.latency);
            // After a failure nobody was to see everything.
            if let Some(missed) = missed
                && !self.failures.any()
            {
                let last = missed.end - 1;
                self.failures.add(consumer.failure(format!("{} to {last} were acknowledged, and did not come", missed.start)));
            }
            figures.records += consumer.count.records;
            figures.bytes += consumer.count.bytes;
            let elapsed = consumer.last.map_or(Duration::ZERO, |last| last.saturating_duration_since(self.since + self.warmup));
            figures.elapsed = figures.elapsed.max(elapsed);
        }
        figures.failure = self.failures.into_first();
        figures
    }
}

struct Consumer {
    number: u32,
    partition: u32,
    tail: Tail,
    seen: Seen,
    /// Of batches that came after the warm-up.
    count: Count,
    /// When the last one came.
    last: Option<Instant>,
}

impl Consumer {
    fn new(number: u32, partition_number: u32, partition: &Partition) -> sapwood::Result<Self> {
        // As far as what was acknowledged: of an append that may be lost in a power loss, nobody learns later than of others.
        let durable = partition.config().durability == Durability::Durable;
        let from = partition.first_offset();
        let tail = partition.tail_with(from, if durable { Visibility::Durable } else { Visibility::Appended })?;
        Ok(Self { number, partition: partition_number, tail, seen: Seen::from(from), count: Count::default(), last: None })
    }

    fn run(mut self, task: &Task<'_>) -> Self {
        if let Err(what) = self.follow(task) {
            task.fail(self.failure(what));
        }
        self
    }

    fn follow(&mut self, task: &Task<'_>) -> Result<(), String> {
        let measured_from = task.since + task.warmup;
        while !task.failures.any() {
            // Looked at before: what is not there then does not come any more.
            let over = task.over.load(Ordering::Acquire);
            let expected = self.tail.position();
            let records = self.tail.next_batch(BATCH_BYTES, Some(if over { Duration::ZERO } else { LOOK }));
            let now = Instant::now();
            let Some(records) = records.map_err(|error| format!("at offset {expected}: {error}"))? else {
                if over {
                    break;
                }
                continue;
            };
            let mut count = self.count;
            check(&records, expected, &mut count)?;
            self.seen.push(records.next_offset(), nanos(now.saturating_duration_since(task.since)));
            if now >= measured_from {
                self.count = count;
                self.last = Some(now);
            }
        }
        Ok(())
    }

    fn failure(&self, what: String) -> Failure {
        Failure { consumer: self.number, partition: self.partition, what }
    }
}
