//! What was acknowledged: a few bytes per append, in order, so that a run of many millions fits in memory. Pure.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::packed::{put, put_change, take, take_change};

/// One append that was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ack {
    /// Who appended.
    pub producer: u32,
    /// The answer.
    pub offsets: Range<u64>,
    /// The sequences that its records were taken from. With keys, those of them whose key goes to the partition; else all.
    pub sequences: Range<u64>,
    /// When latency counts from, in nanoseconds since a moment of the run; 0 where nobody wants to know.
    pub begun: u64,
}

/// The answers to one producer's appends to one partition, in the order in which they were appended.
///
/// Each entry is five variable-length numbers, relative to the entry before it; 5 bytes in a typical run, and some 3 more where it matters
/// when appends began.
#[derive(Debug, Clone, Default)]
pub struct AckLog {
    bytes: Vec<u8>,
    before: Before,
}

/// What the next entry is relative to: the ends of the entry before, and when that began.
#[derive(Debug, Clone, Copy, Default)]
struct Before {
    offset: u64,
    sequence: u64,
    begun: u64,
}

impl AckLog {
    /// Adds an answer.
    pub fn push(&mut self, offsets: &Range<u64>, sequences: &Range<u64>, begun: u64) {
        for (start, end, before) in
            [(offsets.start, offsets.end, &mut self.before.offset), (sequences.start, sequences.end, &mut self.before.sequence)]
        {
            put_change(&mut self.bytes, *before, start);
            put(&mut self.bytes, end.wrapping_sub(start));
            *before = end;
        }
        put_change(&mut self.bytes, self.before.begun, begun);
        self.before.begun = begun;
    }

    /// All answers, in order.
    pub fn iter(&self, producer: u32) -> impl Iterator<Item = Ack> {
        let mut rest = self.bytes.as_slice();
        let mut before = Before::default();
        std::iter::from_fn(move || {
            let mut range = |before: &mut u64| {
                let start = take_change(&mut rest, *before)?;
                *before = start.wrapping_add(take(&mut rest)?);
                Some(start..*before)
            };
            let offsets = range(&mut before.offset)?;
            let sequences = range(&mut before.sequence)?;
            before.begun = take_change(&mut rest, before.begun)?;
            Some(Ack { producer, offsets, sequences, begun: before.begun })
        })
    }
}

/// One partition's answers over all producers, by offset. Those of one producer stay in their own order, whatever they say.
pub fn merge(logs: &[(u32, AckLog)]) -> impl Iterator<Item = Ack> {
    let mut sources: Vec<_> = logs.iter().map(|(producer, log)| log.iter(*producer)).collect();
    let mut heads: Vec<Option<Ack>> = sources.iter_mut().map(Iterator::next).collect();
    let key = |head: &Option<Ack>, source: usize| head.as_ref().map(|ack| Reverse((ack.offsets.start, source)));
    let mut heap: BinaryHeap<_> = heads.iter().enumerate().filter_map(|(source, head)| key(head, source)).collect();
    std::iter::from_fn(move || {
        let Reverse((_, source)) = heap.pop()?;
        let next = sources[source].next();
        heap.extend(key(&next, source));
        std::mem::replace(&mut heads[source], next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ack(producer: u32, offsets: Range<u64>, sequences: Range<u64>) -> Ack {
        let begun = offsets.start.wrapping_mul(1000);
        Ack { producer, offsets, sequences, begun }
    }

    fn log(acks: &[Ack]) -> AckLog {
        let mut log = AckLog::default();
        for ack in acks {
            log.push(&ack.offsets, &ack.sequences, ack.begun);
        }
        log
    }

    #[test]
    fn what_goes_in_comes_out() {
        let acks = [
            ack(5, 0..1, 0..1),
            ack(5, 1..4, 8..11),
            ack(5, 1000..1001, 11..12),
            ack(5, 3..4, 2..1002), // an answer that goes back is kept as it is, for the check to find
            ack(5, u64::MAX - 1..u64::MAX, u64::MAX..u64::MAX),
            ack(5, 0..0, 0..0),
        ];
        assert_eq!(log(&acks).iter(5).collect::<Vec<_>>(), acks);
        assert_eq!(AckLog::default().iter(0).count(), 0);
    }

    #[test]
    fn an_entry_of_a_typical_run_takes_five_bytes_and_three_more_with_its_time() {
        let bytes = |begun: fn(u64) -> u64| {
            let mut log = AckLog::default();
            for at in 0..1000 {
                log.push(&(at * 8..at * 8 + 1), &(at * 8 + 3..at * 8 + 4), begun(at));
            }
            log.bytes.len()
        };
        assert_eq!(bytes(|_| 0), 5000);
        assert!((7000..=8000).contains(&bytes(|at| 1_000_000_000 + at * 120_000)));
    }

    #[test]
    fn merged_by_offset() {
        let logs = [
            (0, log(&[ack(0, 1..2, 0..1), ack(0, 5..6, 3..4)])),
            (1, AckLog::default()),
            (2, log(&[ack(2, 0..1, 1..2), ack(2, 2..5, 4..7)])),
        ];
        let merged: Vec<_> = merge(&logs).map(|ack| (ack.producer, ack.offsets)).collect();
        assert_eq!(merged, [(2, 0..1), (0, 1..2), (2, 2..5), (0, 5..6)]);
        assert_eq!(merge(&[]).count(), 0);
    }
}
