//! What one thread takes down of the answers that it takes.

use std::ops::Range;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use sapwood::{Batch, HEADER_BYTES};

use super::Outcome;
use crate::acks::AckLog;
use crate::progress::Gauge;
use crate::units::{nanos, to_u64};

/// One append on its way.
#[derive(Debug, Clone)]
pub struct Pending {
    /// Where latency counts from.
    pub begun: Instant,
    /// Not of the warm-up.
    pub measured: bool,
    /// Whose it is.
    pub producer: u32,
    /// Where it went.
    pub partition: u32,
    /// The sequences its records were taken from.
    pub sequences: Range<u64>,
    /// How many of them are in it.
    pub records: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
}

impl Pending {
    /// A batch of some of the records of `sequences`, from a producer to a partition.
    pub fn of(batch: &Batch, begun: Instant, measured: bool, (producer, partition): (u32, u32), sequences: &Range<u64>) -> Self {
        let bytes = batch.bytes() - batch.len() * to_u64(HEADER_BYTES);
        Self { begun, measured, producer, partition, sequences: sequences.clone(), records: batch.len(), bytes }
    }
}

/// The answers that one thread took.
pub struct Recorder {
    latency: Histogram<u64>,
    records: u64,
    bytes: u64,
    acknowledged: u64,
    last: Option<Instant>,
    /// Where the time of each append counts from, if that matters.
    since: Option<Instant>,
    /// Producer and partition of each log.
    logs: Vec<(u32, u32, AckLog)>,
}

impl Recorder {
    /// Logs for the producers and partitions whose answers come here.
    pub fn new(of: impl Iterator<Item = (u32, u32)>, since: Option<Instant>) -> Self {
        let logs = of.map(|(producer, partition)| (producer, partition, AckLog::default())).collect();
        Self { latency: histogram(), records: 0, bytes: 0, acknowledged: 0, last: None, since, logs }
    }

    /// Takes down an answer that came just now. `log` is the place of its producer and partition.
    pub fn answered(&mut self, append: &Pending, log: usize, offsets: &Range<u64>, gauge: &Gauge) {
        let now = Instant::now();
        let latency = nanos(now.saturating_duration_since(append.begun));
        let begun = self.since.map_or(0, |since| nanos(append.begun.saturating_duration_since(since)));
        self.logs[log].2.push(offsets, &append.sequences, begun);
        self.acknowledged += append.records;
        if append.measured {
            self.latency.record(latency).expect("a histogram that grows takes every number");
            self.records += append.records;
            self.bytes += append.bytes;
            self.last = Some(now);
        }
        gauge.add(append.records, append.bytes, append.measured, latency);
    }

    /// Adds what was taken down to what others took down.
    pub fn hand_in(self, outcome: &mut Outcome, measured_from: Instant) {
        outcome.latency.add(self.latency).expect("a histogram that grows takes every other");
        outcome.records += self.records;
        outcome.bytes += self.bytes;
        outcome.acknowledged += self.acknowledged;
        let elapsed = self.last.map_or(Duration::ZERO, |last| last.saturating_duration_since(measured_from));
        outcome.elapsed = outcome.elapsed.max(elapsed);
        for (producer, partition, log) in self.logs {
            let partition = usize::try_from(partition).expect("a u32 fits in usize");
            outcome.acks[partition].push((producer, log));
        }
    }
}

/// Three significant digits, from a nanosecond to any length: it grows as needed, so that nothing is clipped.
pub fn histogram() -> Histogram<u64> {
    Histogram::new(3).expect("3 significant digits are allowed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_latency_is_clipped() {
        let mut all = histogram();
        for ns in [0, 1, 1_000, 3_600_000_000_000, 1 << 62, u64::MAX] {
            let mut one = histogram();
            one.record(ns).unwrap();
            all.add(one).unwrap();
            assert!(all.max() >= ns);
        }
        assert_eq!(all.len(), 6);
    }
}
