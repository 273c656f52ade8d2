//! Consumers over what was written, once the load is over: from the first record to the last, or look-ups here and there.
//!
//! The log stands still, so that what is measured is reading alone, and has an end. It lies as the load left it: durable appends go past
//! the page cache, so that what is read for the first time comes from the device.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use sapwood::{Partition, Reader, ReaderConfig};

use super::{BATCH_BYTES, Count, Failure, Failures, Figures, Reading, cannot_begin, check};
use crate::Stop;
use crate::args::ReadArg;
use crate::load::histogram;
use crate::payload::mix;
use crate::progress::Progress;
use crate::units::{nanos, to_u64};
use crate::verify::settle;

/// Look-ups by time that are checked against the record before the one found, per consumer, when the time is over. The record found is looked at
/// in each.
const CHECKED: usize = 10_000;

/// Lets consumers read all partitions, and waits for them.
///
/// # Errors
/// If they cannot begin.
pub fn over(reading: &Reading<'_>, progress: &Progress) -> Result<Figures, Stop> {
    progress.step(match reading.what {
        ReadArg::CatchUp => "reading all of the log",
        _ => "looking records up",
    });
    let made = reading
        .each()
        .zip(0..)
        .map(|((number, partition_number, partition), place)| Consumer::new(reading, number, partition_number, partition, place));
    let mut consumers: Vec<Consumer<'_>> = made.collect::<Result<_, _>>().map_err(cannot_begin)?;
    let failures = Failures::default();
    let start = Instant::now();
    thread::scope(|scope| {
        for consumer in &mut consumers {
            let failures = &failures;
            scope.spawn(move || consumer.run(start, failures));
        }
    });
    let mut figures = Figures { latency: histogram(), records: 0, bytes: 0, elapsed: Duration::ZERO, failure: failures.into_first() };
    for consumer in consumers {
        figures.latency.add(consumer.latency).expect("a histogram that grows takes every other");
        figures.records += consumer.count.records;
        figures.bytes += consumer.count.bytes;
        figures.elapsed = figures.elapsed.max(consumer.elapsed);
    }
    Ok(figures)
}

struct Consumer<'a> {
    reading: &'a Reading<'a>,
    number: u32,
    partition: u32,
    reader: Reader,
    /// What there is to read.
    offsets: Range<u64>,
    /// How many look-ups at most.
    share: u64,
    /// The number from which the next place to look up follows.
    next: u64,
    latency: Histogram<u64>,
    count: Count,
    elapsed: Duration,
}

impl<'a> Consumer<'a> {
    fn new(reading: &'a Reading<'a>, number: u32, partition_number: u32, partition: &Partition, place: u64) -> sapwood::Result<Self> {
        let visibility = settle(partition)?;
        let end = match visibility {
            sapwood::Visibility::Durable => partition.durable_end(),
            sapwood::Visibility::Appended => partition.next_offset(),
        };
        let config = ReaderConfig { visibility, ..ReaderConfig::by(reading.mode) };
        let all = to_u64(reading.partitions.len()) * u64::from(reading.consumers);
        Ok(Self {
            reading,
            number,
            partition: partition_number,
            reader: partition.reader_with(config)?,
            offsets: partition.first_offset()..end,
            share: reading.shape.records.map_or(u64::MAX, |records| share(records, place, all)),
            next: mix(reading.seed, place),
            latency: histogram(),
            count: Count::default(),
            elapsed: Duration::ZERO,
        })
    }

    fn run(&mut self, start: Instant, failures: &Failures) {
        let deadline = self.reading.shape.duration.and_then(|duration| start.checked_add(duration));
        let interrupts = self.reading.interrupts;
        let stopped = || failures.any() || interrupts.any();
        let over = |now: Instant| stopped() || deadline.is_some_and(|deadline| now >= deadline);
        let read = match self.reading.what {
            ReadArg::Random => self.at_random(start, over),
            ReadArg::Time => self.by_time(start, over),
            ReadArg::CatchUp | ReadArg::Tail => self.catch_up(start, stopped),
        };
        if let Err(what) = read {
            failures.add(Failure { consumer: self.number, partition: self.partition, what });
        }
    }

    fn catch_up(&mut self, start: Instant, stopped: impl Fn() -> bool) -> Result<(), String> {
        let mut next = self.offsets.start;
        while next < self.offsets.end && !stopped() {
            let begun = Instant::now();
            let records = self.reader.read(next, BATCH_BYTES).map_err(|error| format!("at offset {next}: {error}"))?;
            took(&mut self.latency, begun);
            if records.is_empty() {
                return Err(format!("offset {next} is the end of the log where {} should be", self.offsets.end));
            }
            check(&records, next, &mut self.count)?;
            next = records.next_offset();
            self.elapsed = start.elapsed();
        }
        Ok(())
    }

    fn at_random(&mut self, start: Instant, over: impl Fn(Instant) -> bool) -> Result<(), String> {
        for _ in 0..self.share {
            let Some(offset) = self.somewhere(self.offsets.clone()) else { break };
            let begun = Instant::now();
            if over(begun) {
                break;
            }
            let record = self.reader.read_one(offset).map_err(|error| format!("at offset {offset}: {error}"))?;
            self.elapsed = took(&mut self.latency, begun).saturating_duration_since(start);
            if record.offset != offset {
                return Err(format!("offset {} came where {offset} should", record.offset));
            }
            self.count.add(&record);
        }
        Ok(())
    }

    /// Moments between the first record's and the last one's: each has a record at or after it.
    fn by_time(&mut self, start: Instant, over: impl Fn(Instant) -> bool) -> Result<(), String> {
        let offsets = self.offsets.clone();
        let Some(last) = offsets.end.checked_sub(1).filter(|last| *last >= offsets.start) else { return Ok(()) };
        let times = self.timestamp(offsets.start)?..self.timestamp(last)? + 1;
        let mut found = Vec::new();
        for _ in 0..self.share {
            let Some(time) = self.somewhere(times.clone()) else { break };
            let begun = Instant::now();
            if over(begun) {
                break;
            }
            let offset = self.reader.offset_for_time(time).map_err(|error| format!("at time {time}: {error}"))?;
            let record = self.reader.read_one(offset).map_err(|error| format!("at offset {offset}: {error}"))?;
            self.elapsed = took(&mut self.latency, begun).saturating_duration_since(start);
            if record.timestamp < time {
                return Err(format!("the record at offset {offset} is of {}, and was found for {time}", record.timestamp));
            }
            self.count.add(&record);
            if found.len() < CHECKED {
                found.push((time, offset));
            }
        }
        found.into_iter().try_for_each(|(time, offset)| self.check_first(time, offset))
    }

    /// The record before the one found must be of an earlier time.
    fn check_first(&mut self, time: u64, offset: u64) -> Result<(), String> {
        match offset.checked_sub(1).filter(|before| *before >= self.offsets.start) {
            Some(before) if self.timestamp(before)? >= time => {
                Err(format!("offset {offset} was found for {time}, and {before} is not earlier"))
            }
            _ => Ok(()),
        }
    }

    fn timestamp(&mut self, offset: u64) -> Result<u64, String> {
        Ok(self.reader.read_one(offset).map_err(|error| format!("at offset {offset}: {error}"))?.timestamp)
    }

    /// The next random number of a range, if it holds any.
    fn somewhere(&mut self, range: Range<u64>) -> Option<u64> {
        self.next = mix(self.next, 0);
        Some(range.start + self.next.checked_rem(range.end.saturating_sub(range.start))?)
    }
}

/// Takes down how long something took that ended now, which it gives.
fn took(latency: &mut Histogram<u64>, begun: Instant) -> Instant {
    let now = Instant::now();
    latency.record(nanos(now.saturating_duration_since(begun))).expect("a histogram that grows takes every number");
    now
}

/// What falls to the one at `place` of `all` when so many are shared out.
fn share(total: u64, place: u64, all: u64) -> u64 {
    total / all + u64::from(place < total % all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_out_is_all_there_is() {
        for (total, all) in [(0, 3), (1, 3), (2, 3), (3, 3), (100, 7), (u64::MAX, 2)] {
            let shares: Vec<_> = (0..all).map(|place| share(total, place, all)).collect();
            assert_eq!(shares.iter().sum::<u64>(), total);
            assert!(shares[0] - shares[shares.len() - 1] <= 1, "{shares:?}");
        }
    }
}
