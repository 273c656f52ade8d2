//! When a consumer saw which records: a few bytes per batch, put beside the answers once the load is over. Pure.
//!
//! So latency from append to record seen needs nothing in the records: not their bytes, which verification compares, and of which a
//! line of a file may have none.

use std::ops::Range;

use hdrhistogram::Histogram;

use crate::acks::Ack;
use crate::packed::{put_change, take_change};

/// What one consumer saw of one partition, in order.
#[derive(Debug)]
pub struct Seen {
    bytes: Vec<u8>,
    first: u64,
    /// Of the last batch: one past its last offset, and when it came.
    last: Batch,
}

#[derive(Debug, Clone, Copy)]
struct Batch {
    end: u64,
    at: u64,
}

impl Seen {
    /// Nothing yet; it will begin at an offset.
    pub fn from(first: u64) -> Self {
        Self { bytes: Vec::new(), first, last: Batch { end: first, at: 0 } }
    }

    /// The next batch ended before an offset, and came at a time.
    pub fn push(&mut self, end: u64, at: u64) {
        put_change(&mut self.bytes, self.last.end, end);
        put_change(&mut self.bytes, self.last.at, at);
        self.last = Batch { end, at };
    }

    fn iter(&self) -> impl Iterator<Item = Batch> {
        let mut rest = self.bytes.as_slice();
        let mut before = Batch { end: self.first, at: 0 };
        std::iter::from_fn(move || {
            before = Batch { end: take_change(&mut rest, before.end)?, at: take_change(&mut rest, before.at)? };
            Some(before)
        })
    }

    /// Takes down, for each record of the appends that began at `measured_from` or later, the time from there until it was seen. The answers come
    /// in the order of their offsets, their times count from the same moment as those seen. Gives the first offsets that
    /// were acknowledged and never seen, if there are any.
    pub fn compare(&self, acks: impl Iterator<Item = Ack>, measured_from: u64, latency: &mut Histogram<u64>) -> Option<Range<u64>> {
        let mut batches = self.iter();
        let mut batch = Batch { end: self.first, at: 0 };
        for ack in acks {
            let mut from = ack.offsets.start;
            while from < ack.offsets.end {
                while batch.end <= from {
                    let Some(next) = batches.next() else { return Some(from..ack.offsets.end) };
                    batch = next;
                }
                let to = ack.offsets.end.min(batch.end);
                if ack.begun >= measured_from {
                    let took = batch.at.saturating_sub(ack.begun);
                    latency.record_n(took, to - from).expect("a histogram that grows takes every number");
                }
                from = to;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(offsets: Range<u64>, begun: u64) -> Ack {
        Ack { producer: 0, sequences: offsets.clone(), offsets, begun }
    }

    fn seen(first: u64, batches: &[(u64, u64)]) -> Seen {
        let mut seen = Seen::from(first);
        batches.iter().for_each(|(end, at)| seen.push(*end, *at));
        seen
    }

    /// Latencies with their counts, and what was missed.
    fn compare(seen: &Seen, acks: &[Ack], measured_from: u64) -> (Vec<(u64, u64)>, Option<Range<u64>>) {
        let mut latency = Histogram::new(3).unwrap();
        let missed = seen.compare(acks.iter().cloned(), measured_from, &mut latency);
        let counts = latency.iter_recorded().map(|value| (value.value_iterated_to(), value.count_since_last_iteration())).collect();
        (counts, missed)
    }

    #[test]
    fn each_record_counts_from_its_append_to_its_batch() {
        let acks = [ack(0..2, 100), ack(2..5, 150), ack(5..6, 300)];
        let (latencies, missed) = compare(&seen(0, &[(1, 200), (4, 250), (6, 400)]), &acks, 0);
        // 0: 100; 1: 150; 2 and 3: 100; 4: 250; 5: 100.
        assert_eq!((latencies, missed), (vec![(100, 4), (150, 1), (250, 1)], None));
    }

    #[test]
    fn what_began_in_the_warm_up_does_not_count() {
        let acks = [ack(0..2, 100), ack(2..5, 150), ack(5..6, 300)];
        assert_eq!(compare(&seen(0, &[(6, 400)]), &acks, 150).0, [(100, 1), (250, 3)]);
    }

    #[test]
    fn appends_that_were_never_answered_count_for_nobody() {
        let acks = [ack(1..2, 100), ack(4..5, 100)];
        assert_eq!(compare(&seen(0, &[(3, 200), (9, 300)]), &acks, 0), (vec![(100, 1), (200, 1)], None));
    }

    #[test]
    fn what_was_acknowledged_and_not_seen_is_told() {
        let acks = [ack(7..9, 100), ack(9..12, 100), ack(12..13, 100)];
        assert_eq!(compare(&seen(7, &[(10, 200)]), &acks, 0), (vec![(100, 3)], Some(10..12)));
        assert_eq!(compare(&seen(7, &[]), &acks, 0), (vec![], Some(7..9)));
        assert_eq!(compare(&seen(7, &[]), &[], 0), (vec![], None));
    }

    #[test]
    fn a_batch_takes_few_bytes() {
        let mut seen = Seen::from(0);
        (0..1000).for_each(|at| seen.push(at * 3, 1_000_000_000 + at * 120_000));
        assert!(seen.bytes.len() <= 4005, "{}", seen.bytes.len());
    }
}
