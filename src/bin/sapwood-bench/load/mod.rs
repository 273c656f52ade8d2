//! The load itself: producers append, every answer is taken down with its latency.
//!
//! Latency is that of one append, from the call in the closed loop and from the moment on the timetable in the open one, up to
//! where its answer was taken. An answer is taken late only when its taker is held up by an earlier one (several appends of one
//! producer at once, or of several producers to one partition); so the figures may be too high by that, never too low.

mod batcher;
mod closed;
mod open;
mod recorder;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use sapwood::{Partition, Stats, Topic};

use crate::acks::AckLog;
use crate::interrupts::Interrupts;
use crate::payload::Payload;
use crate::progress::{Live, Progress};
use crate::schedule::{Claims, Shape, Timetable};
use recorder::Recorder;

pub use recorder::histogram;

/// How often the progress line is renewed.
const TICK: Duration = Duration::from_millis(200);

/// What is to be done, and to what.
#[derive(Clone, Copy)]
pub struct Load<'a> {
    /// The topic.
    pub topic: &'a Topic,
    /// All its partitions, in order.
    pub partitions: &'a [Partition],
    /// What the records hold.
    pub payload: &'a Payload,
    /// How many, by whom, for how long.
    pub shape: Shape,
    /// Open loop, with so many records per second.
    pub rate: Option<u64>,
    /// Where the time at which each append began counts from, if that matters afterwards.
    pub since: Option<Instant>,
    /// Set by whoever else fails, which ends the load.
    pub abort: &'a AtomicBool,
    /// Ctrl-C.
    pub interrupts: &'a Interrupts,
}

/// The first append that failed.
#[derive(Debug)]
pub struct Failure {
    /// Whose it was.
    pub producer: u32,
    /// Where it went.
    pub partition: u32,
    /// Why.
    pub error: sapwood::Error,
}

/// What was measured and what was answered.
pub struct Outcome {
    /// Of each measured append, in nanoseconds.
    pub latency: Histogram<u64>,
    /// How late the measured appends of an open loop began, in nanoseconds.
    pub lag: Option<Histogram<u64>>,
    /// Measured records, and bytes of their keys and values.
    pub records: u64,
    /// Bytes of keys and values of the measured records.
    pub bytes: u64,
    /// What the measured records took, from the end of the warm-up to the last answer.
    pub elapsed: Duration,
    /// Records that were answered, warm-up included.
    pub acknowledged: u64,
    /// The answers by partition, and there by producer.
    pub acks: Vec<Vec<(u32, AckLog)>>,
    /// What the engine did for the measured records.
    pub stats: Stats,
    /// Measured records on the timetable that were not appended when time was up; 0 if the load was stopped.
    pub unsent: u64,
    /// The first append that failed, and how many did.
    pub failure: Option<Failure>,
    /// How many appends failed.
    pub failed_appends: u64,
}

/// What all threads of a load share.
struct Control<'a> {
    load: &'a Load<'a>,
    start: Instant,
    live: &'a Live,
    stop: AtomicBool,
    failure: Mutex<Option<Failure>>,
    failed_appends: AtomicU64,
}

impl Control<'_> {
    /// Whether no further append should begin.
    fn stopped(&self) -> bool {
        // Flags that publish nothing, and a late look at them costs an append: relaxed is enough.
        self.stop.load(Ordering::Relaxed) || self.load.abort.load(Ordering::Relaxed) || self.load.interrupts.any()
    }

    /// What the answers of some producers and partitions are taken down in.
    fn recorder(&self, of: impl Iterator<Item = (u32, u32)>) -> Recorder {
        Recorder::new(of, self.load.since)
    }

    /// Takes down a failure and ends the load.
    fn fail(&self, producer: u32, partition: u32, error: sapwood::Error) {
        self.failed_appends.fetch_add(1, Ordering::Relaxed);
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(Failure { producer, partition, error });
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// What the threads of a load hand in.
struct Finished {
    recorders: Vec<Recorder>,
    lag: Option<Histogram<u64>>,
    /// Measured records that were handed to the engine.
    sent: u64,
}

/// Runs the load to its end, and waits for every answer.
pub fn run(load: &Load<'_>, progress: &Progress) -> Outcome {
    let live = Live::new(workers(load), progress.is_visible());
    let control = Control {
        load,
        start: Instant::now(),
        live: &live,
        stop: AtomicBool::new(false),
        failure: Mutex::new(None),
        failed_appends: AtomicU64::new(0),
    };
    let table = load.rate.map(|rate| Timetable::new(load.shape, rate));
    let (finished, before) = match table {
        Some(table) => watched(&control, progress, |control| open::run(control, &table)),
        None => watched(&control, progress, |control| closed::run(control, &Claims::new(control.load.shape))),
    };
    collect(control, finished, before, table.as_ref())
}

/// Threads that take answers.
fn workers(load: &Load<'_>) -> usize {
    if load.rate.is_some() { load.partitions.len() } else { usize::try_from(load.shape.producers).expect("a u32 fits in usize") }
}

/// Does the work on other threads, and meanwhile shows how it goes and notes what the engine had done when the warm-up ended.
fn watched(control: &Control<'_>, progress: &Progress, work: impl FnOnce(&Control<'_>) -> Finished + Send) -> (Finished, Stats) {
    let Control { load, start, .. } = control;
    let mut before = stats(load.partitions);
    let mut warm = !load.shape.warmup.is_zero();
    let watcher = thread::current();
    let done = AtomicBool::new(false);
    let finished = thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let ended = Ended { done: &done, watcher };
            let finished = work(control);
            drop(ended);
            finished
        });
        while !done.load(Ordering::Acquire) {
            let elapsed = start.elapsed();
            if warm && elapsed >= load.shape.warmup {
                before = stats(load.partitions);
                warm = false;
            }
            let wait = if warm { TICK.min(load.shape.warmup - elapsed) } else { TICK };
            progress.show(control.live, &load.shape, elapsed);
            thread::park_timeout(wait);
        }
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    // A load that ended within its warm-up did nothing that is measured.
    (finished, if warm { stats(load.partitions) } else { before })
}

/// Tells the watching thread of the end, also of one by panic.
struct Ended<'a> {
    done: &'a AtomicBool,
    watcher: thread::Thread,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        self.watcher.unpark();
    }
}

fn collect(control: Control<'_>, finished: Finished, before: Stats, table: Option<&Timetable>) -> Outcome {
    let load = control.load;
    let measured_from = control.start + load.shape.warmup;
    let after = stats(load.partitions);
    let mut outcome = Outcome {
        latency: histogram(),
        lag: finished.lag,
        records: 0,
        bytes: 0,
        elapsed: Duration::ZERO,
        acknowledged: 0,
        acks: load.partitions.iter().map(|_| Vec::new()).collect(),
        stats: difference(after, before),
        unsent: table.filter(|_| !control.stopped()).map_or(0, |table| table.measured_records().saturating_sub(finished.sent)),
        failure: control.failure.into_inner().unwrap_or_else(PoisonError::into_inner),
        failed_appends: control.failed_appends.into_inner(),
    };
    for recorder in finished.recorders {
        recorder.hand_in(&mut outcome, measured_from);
    }
    if let Some(table) = table {
        // The last append is due before its step on the timetable is over; it took the whole step.
        outcome.elapsed = outcome.elapsed.max(table.span(outcome.records));
    }
    outcome
}

/// The sum over partitions.
fn stats(partitions: &[Partition]) -> Stats {
    let mut sum = Stats::default();
    for stats in partitions.iter().map(Partition::stats) {
        sum.commits += stats.commits;
        sum.records += stats.records;
        sum.bytes += stats.bytes;
        sum.rolls += stats.rolls;
        sum.syncs += stats.syncs;
    }
    sum
}

fn difference(mut after: Stats, before: Stats) -> Stats {
    after.commits -= before.commits;
    after.records -= before.records;
    after.bytes -= before.bytes;
    after.rolls -= before.rolls;
    after.syncs -= before.syncs;
    after
}
