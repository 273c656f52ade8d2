//! The open loop: producers append by the timetable, whatever became of earlier appends. Collectors, one per partition, take the
//! answers in order and as they come. What a producer is held up by a full queue counts as latency of the appends that were due meanwhile.

use std::io::Write;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use sapwood::Ticket;

use super::batcher::Batcher;
use super::recorder::{Pending, Recorder, histogram};
use super::{Control, Finished};
use crate::schedule::Timetable;
use crate::units::nanos;

/// Answers of one partition that wait to be taken; more than an engine's queue holds, so that it is the queue which holds producers up.
const UNTAKEN: usize = 1 << 16;
/// How often a producer that waits for its next append looks whether there will be one.
const LOOK: Duration = Duration::from_millis(50);
/// How far behind the timetable appends may still begin after the end: what a stall just before the end held up still counts.
const GRACE: Duration = Duration::from_secs(1);

type Answer = (Pending, Ticket);

/// Producers and collectors, until the timetable ends.
pub(super) fn run(control: &Control<'_>, table: &Timetable) -> Finished {
    thread::scope(|scope| {
        let mut senders = Vec::new();
        let mut collectors = Vec::new();
        for (partition, _) in (0..).zip(control.load.partitions) {
            let (sender, receiver) = sync_channel(UNTAKEN);
            senders.push(sender);
            collectors.push(scope.spawn(move || collect(control, partition, &receiver)));
        }
        let producers: Vec<_> = (0..control.load.shape.producers)
            .map(|number| {
                let producer = Producer { control, table, number, answers: senders.clone(), lag: histogram(), sent: 0 };
                scope.spawn(move || producer.run())
            })
            .collect();
        drop(senders);
        let mut lag = histogram();
        let mut sent = 0;
        for (producer_lag, producer_sent) in producers.into_iter().map(joined) {
            lag.add(producer_lag).expect("a histogram that grows takes every other");
            sent += producer_sent;
        }
        Finished { recorders: collectors.into_iter().map(joined).collect(), lag: Some(lag), sent }
    })
}

fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn collect(control: &Control<'_>, partition: u32, answers: &Receiver<Answer>) -> Recorder {
    let mut recorder = control.recorder((0..control.load.shape.producers).map(|producer| (producer, partition)));
    let gauge = control.live.gauge(partition);
    for (pending, ticket) in answers {
        let log = usize::try_from(pending.producer).expect("a u32 fits in usize");
        match ticket.wait() {
            Ok(offsets) => recorder.answered(&pending, log, &offsets, gauge),
            Err(error) => control.fail(pending.producer, pending.partition, error),
        }
    }
    recorder
}

struct Producer<'a> {
    control: &'a Control<'a>,
    table: &'a Timetable,
    number: u32,
    answers: Vec<SyncSender<Answer>>,
    lag: Histogram<u64>,
    sent: u64,
}

impl Producer<'_> {
    fn run(mut self) -> (Histogram<u64>, u64) {
        precise_sleep();
        let Control { load, start, .. } = *self.control;
        let deadline = load.shape.deadline();
        let mut batcher = Batcher::new(load, self.number);
        let mut batches = Vec::new();
        for turn in 0.. {
            let slot = self.table.slot(self.number, turn);
            let (due, sequences) = (self.table.due(slot), self.table.sequences(slot));
            if sequences.is_empty() || deadline.is_some_and(|deadline| due >= deadline) {
                break;
            }
            batcher.make(&sequences, &mut batches);
            let due = start + due;
            if !self.wait_until(due) || deadline.is_some_and(|deadline| start.elapsed() > deadline.saturating_add(GRACE)) {
                break;
            }
            let measured = self.table.is_measured(slot);
            if measured {
                self.lag.record(nanos(due.elapsed())).expect("a histogram that grows takes every number");
            }
            for (partition, batch) in batches.drain(..) {
                let pending = Pending::of(&batch, due, measured, (self.number, partition), &sequences);
                self.append(pending, batch);
            }
        }
        (self.lag, self.sent)
    }

    fn append(&mut self, pending: Pending, batch: sapwood::Batch) {
        let partition = usize::try_from(pending.partition).expect("a u32 fits in usize");
        match self.control.load.partitions[partition].append(batch) {
            Ok(ticket) => {
                self.sent += if pending.measured { pending.records } else { 0 };
                self.answers[partition].send((pending, ticket)).expect("a collector takes answers until the last producer ended");
            }
            Err(error) => self.control.fail(pending.producer, pending.partition, error),
        }
    }

    /// False if the load is stopped meanwhile.
    fn wait_until(&self, due: Instant) -> bool {
        loop {
            if self.control.stopped() {
                return false;
            }
            match due.checked_duration_since(Instant::now()) {
                None | Some(Duration::ZERO) => return true,
                // Until the timetable's next record; a stop is looked for meanwhile.
                Some(wait) => thread::sleep(wait.min(LOOK)),
            }
        }
    }
}

/// The kernel wakes a sleeper up to 50 µs late to save power. That would be in every latency of the open loop, so this thread declines;
/// where it may not, the figures are a little higher, and the lag in the report says so.
fn precise_sleep() {
    // "self" would be the process's first thread; a thread's own number stands at the end of this link.
    let thread = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    let Some(number) = thread.file_name() else { return };
    let path = std::path::Path::new("/proc").join(number).join("timerslack_ns");
    let _ = std::fs::OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(b"1"));
}
