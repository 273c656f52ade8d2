//! The comparison: one partition's records as read back, against what its appends were answered with. Pure, so that tests can
//! feed it every kind of wrong log.

use std::fmt;
use std::iter::Peekable;
use std::ops::Range;

use sapwood::Record;

use crate::acks::Ack;
use crate::payload::Payload;

/// How many differences are kept word for word; the others are counted.
pub const SHOWN: usize = 10;

/// Where one partition's records come from.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// What the records hold.
    pub payload: &'a Payload,
    /// How many producers there were.
    pub producers: u32,
    /// The partition.
    pub partition: u32,
    /// Where a key goes.
    pub route: &'a (dyn Fn(&[u8]) -> u32 + Sync),
    /// Appends failed, so that records may be there which no answer tells of.
    pub unanswered: bool,
}

/// What the comparison found.
#[derive(Debug, Default)]
pub struct Findings {
    /// Acknowledged records that are there as they were written.
    pub verified: u64,
    /// Records that belong to no answered append, where that is allowed.
    pub unanswered: u64,
    /// How many differences.
    pub differences: u64,
    /// The first few of them.
    pub shown: Vec<Difference>,
}

impl Findings {
    /// Counts a difference, and keeps it if it is one of the first.
    pub fn add(&mut self, difference: Difference) {
        self.differences += 1;
        if self.shown.len() < SHOWN {
            self.shown.push(difference);
        }
    }

    /// Takes in what another partition's comparison found.
    pub fn absorb(&mut self, other: Self) {
        self.verified += other.verified;
        self.unanswered += other.unanswered;
        self.differences += other.differences;
        self.shown.extend(other.shown);
        self.shown.truncate(SHOWN);
    }
}

/// Something that is not as it was acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// In which partition.
    pub partition: u32,
    /// What.
    pub kind: Kind,
}

/// What can differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Acknowledged, and not in the log.
    Missing { offsets: Range<u64> },
    /// In the log, and no append was answered with it.
    Unexpected { offset: u64 },
    /// The log's offsets are not 0, 1, 2, …
    OffsetGap { found: u64, expected: u64 },
    /// Another key.
    Key { offset: u64, producer: u32, sequence: u64, found: String, expected: String },
    /// Another value.
    Value { offset: u64, producer: u32, sequence: u64, how: ValueDifference },
    /// An append was answered with more or fewer offsets than it had records.
    Count { offsets: Range<u64>, producer: u32, records: u64 },
    /// Two appends were answered with the same offset, or out of their order in the log.
    Overlap { offsets: Range<u64>, producer: u32, end: u64 },
    /// A producer's later append came before its earlier one.
    Order { offsets: Range<u64>, producer: u32, sequence: u64, before: u64 },
    /// A timestamp is less than the one before it.
    Timestamp { offset: u64, found: u64, before: u64 },
    /// Reading stopped.
    Unreadable { offset: u64, error: String },
}

/// How two values differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueDifference {
    /// Bytes read and bytes written.
    pub bytes: (usize, usize),
    /// The first byte that differs.
    pub at: usize,
    /// The record whose value it is instead, as far as one can tell.
    pub is_of: Option<(u32, u64)>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "partition {}: ", self.partition)?;
        match &self.kind {
            Kind::Missing { offsets } => write!(f, "the offsets {} were acknowledged and are missing", span(offsets)),
            Kind::Unexpected { offset } => write!(f, "the record at offset {offset} belongs to no append"),
            Kind::OffsetGap { found, expected } => write!(f, "offset {found} follows where {expected} should"),
            Kind::Key { offset, producer, sequence, found, expected } => {
                write!(f, "offset {offset} has the key {found:?}, not {expected:?} of record {sequence} of producer {producer}")
            }
            Kind::Value { offset, producer, sequence, how } => {
                write!(f, "offset {offset} has not the value of record {sequence} of producer {producer}: ")?;
                if how.bytes.0 != how.bytes.1 {
                    write!(f, "{} bytes instead of {}, ", how.bytes.0, how.bytes.1)?;
                }
                write!(f, "different from byte {} on", how.at)?;
                how.is_of.map_or(Ok(()), |(producer, sequence)| write!(f, "; it is that of record {sequence} of producer {producer}"))
            }
            Kind::Count { offsets, producer, records } => {
                write!(f, "an append of {records} records of producer {producer} was answered with the offsets {}", span(offsets))
            }
            Kind::Overlap { offsets, producer, end } => {
                write!(f, "producer {producer} was answered with the offsets {}, and others with those before {end}", span(offsets))
            }
            Kind::Order { offsets, producer, sequence, before } => write!(
                f,
                "producer {producer}: its record {sequence} has the offsets {}, after its record {before} in one order and before it in the other",
                span(offsets)
            ),
            Kind::Timestamp { offset, found, before } => {
                write!(f, "the timestamp at offset {offset}, {found}, is less than the one before, {before}")
            }
            Kind::Unreadable { offset, error } => {
                write!(f, "reading stopped at offset {offset}, and nothing behind it was compared: {error}")
            }
        }
    }
}

fn span(offsets: &Range<u64>) -> String {
    match offsets.end.checked_sub(offsets.start) {
        Some(1) => offsets.start.to_string(),
        Some(0) | None => format!("{}..{}", offsets.start, offsets.end),
        Some(_) => format!("{} to {}", offsets.start, offsets.end - 1),
    }
}

/// Compares record by record. Feed every record of the partition in order, then call [`Self::finish`].
pub struct Checker<'a, A: Iterator<Item = Ack>> {
    source: Source<'a>,
    acks: Peekable<A>,
    open: Option<OpenAck>,
    /// One past the last acknowledged offset so far, and one past each producer's last sequence.
    acked_end: u64,
    sequence_ends: Vec<u64>,
    /// What the next record should have, and should not be less than.
    offset: u64,
    timestamp: u64,
    /// Offsets found missing, which may go on with those of the next append.
    missing: Range<u64>,
    findings: Findings,
    key: Vec<u8>,
    value: Vec<u8>,
}

/// The append whose records come next.
struct OpenAck {
    producer: u32,
    /// Offsets that were not seen yet.
    offsets: Range<u64>,
    /// Sequences that were not taken yet.
    sequences: Range<u64>,
}

impl<'a, A: Iterator<Item = Ack>> Checker<'a, A> {
    /// For answers in the order of their offsets.
    pub fn new(source: Source<'a>, acks: A) -> Self {
        let producers = usize::try_from(source.producers).expect("a u32 fits in usize");
        Self {
            source,
            acks: acks.peekable(),
            open: None,
            acked_end: 0,
            sequence_ends: vec![0; producers],
            offset: 0,
            timestamp: 0,
            missing: 0..0,
            findings: Findings::default(),
            key: Vec::new(),
            value: Vec::new(),
        }
    }

    fn add(&mut self, kind: Kind) {
        self.tell_missing();
        self.findings.add(Difference { partition: self.source.partition, kind });
    }

    /// These offsets are missing. Those that follow each other are one difference, however many appends they were acknowledged to.
    fn miss(&mut self, offsets: Range<u64>) {
        if offsets.start == self.missing.end {
            self.missing.end = offsets.end;
        } else {
            self.tell_missing();
            self.missing = offsets;
        }
    }

    fn tell_missing(&mut self) {
        let offsets = std::mem::replace(&mut self.missing, 0..0);
        if !offsets.is_empty() {
            self.findings.add(Difference { partition: self.source.partition, kind: Kind::Missing { offsets } });
        }
    }

    /// The next record of the log.
    pub fn record(&mut self, record: &Record<'_>) {
        if record.offset != self.offset {
            self.add(Kind::OffsetGap { found: record.offset, expected: self.offset });
        }
        self.offset = record.offset.saturating_add(1);
        if record.timestamp < self.timestamp {
            self.add(Kind::Timestamp { offset: record.offset, found: record.timestamp, before: self.timestamp });
        }
        self.timestamp = record.timestamp;
        match self.expected(record.offset) {
            Some((producer, sequence)) => self.compare(record, producer, sequence),
            None if self.source.unanswered => self.findings.unanswered += 1,
            None => self.add(Kind::Unexpected { offset: record.offset }),
        }
    }

    /// Reading was given up, for a reason that is a difference or not. What did not come is not missing.
    pub fn abandon(mut self, why: Option<Kind>) -> Findings {
        self.tell_missing();
        why.into_iter().for_each(|why| self.add(why));
        self.findings
    }

    /// No more records.
    pub fn finish(mut self) -> Findings {
        loop {
            self.close();
            if !self.advance() {
                self.tell_missing();
                return self.findings;
            }
        }
    }

    /// Whose record should be at an offset. Goes forward through the answers; what an answer that is left behind still expects, is missing.
    fn expected(&mut self, offset: u64) -> Option<(u32, u64)> {
        loop {
            match &self.open {
                Some(open) if offset < open.offsets.start => return None,
                Some(open) if offset < open.offsets.end => return self.take(offset),
                Some(_) => self.close(),
                None if self.acks.peek().is_some_and(|next| next.offsets.start <= offset) => {
                    self.advance();
                }
                None => return None,
            }
        }
    }

    /// The record of the open append that should be at the offset, one of those that it was answered with.
    fn take(&mut self, offset: u64) -> Option<(u32, u64)> {
        let open = self.open.as_mut()?;
        let (producer, skipped) = (open.producer, open.offsets.start..offset);
        let mut sequence = None;
        for _ in open.offsets.start..=offset {
            sequence = next_sequence(&self.source, &mut open.sequences, &mut self.key);
            if sequence.is_none() {
                break; // more offsets than records, which was found when the answer came up: the record is nobody's
            }
        }
        open.offsets.start = offset + 1;
        if !skipped.is_empty() {
            self.miss(skipped);
        }
        Some((producer, sequence?))
    }

    /// Ends the open append: what it still expects is missing.
    fn close(&mut self) {
        if let Some(open) = self.open.take()
            && !open.offsets.is_empty()
        {
            self.miss(open.offsets);
        }
    }

    /// Opens the next append. False if there is none.
    fn advance(&mut self) -> bool {
        let Some(Ack { producer, offsets, sequences, .. }) = self.acks.next() else { return false };
        let before = usize::try_from(producer).ok().and_then(|index| self.sequence_ends.get_mut(index));
        let before = before.map_or(0, |end| std::mem::replace(end, sequences.end.max(*end)));
        if sequences.start < before {
            self.add(Kind::Order { offsets: offsets.clone(), producer, sequence: sequences.start, before: before - 1 });
        }
        if offsets.start < self.acked_end {
            self.add(Kind::Overlap { offsets: offsets.clone(), producer, end: self.acked_end });
        }
        let records = self.records(&sequences);
        if offsets.end.checked_sub(offsets.start) != Some(records) {
            self.add(Kind::Count { offsets: offsets.clone(), producer, records });
        }
        self.acked_end = self.acked_end.max(offsets.end);
        self.open = Some(OpenAck { producer, offsets, sequences });
        true
    }

    /// How many of the sequences go to this partition.
    fn records(&mut self, sequences: &Range<u64>) -> u64 {
        if !self.source.payload.keyed() {
            return sequences.end.saturating_sub(sequences.start);
        }
        let mut rest = sequences.clone();
        let mut records = 0;
        while next_sequence(&self.source, &mut rest, &mut self.key).is_some() {
            records += 1;
        }
        records
    }

    fn compare(&mut self, record: &Record<'_>, producer: u32, sequence: u64) {
        let Source { payload, producers, .. } = self.source;
        let offset = record.offset;
        let key = payload.key(sequence, &mut self.key).unwrap_or_default();
        let wrong_key = (record.key != key).then(|| Kind::Key {
            offset,
            producer,
            sequence,
            found: record.key.escape_ascii().to_string(),
            expected: key.escape_ascii().to_string(),
        });
        let value = payload.value(producer, sequence, &mut self.value);
        let wrong_value = (record.value != value).then(|| {
            let same = record.value.iter().zip(value).take_while(|(a, b)| a == b).count();
            let whose = payload.identify(record.value, producers).filter(|whose| *whose != (producer, sequence));
            let how = ValueDifference { bytes: (record.value.len(), value.len()), at: same, is_of: whose };
            Kind::Value { offset, producer, sequence, how }
        });
        self.findings.verified += u64::from(wrong_key.is_none() && wrong_value.is_none());
        for kind in [wrong_key, wrong_value].into_iter().flatten() {
            self.add(kind);
        }
    }
}

/// The next of the sequences that goes to the source's partition.
fn next_sequence(source: &Source<'_>, sequences: &mut Range<u64>, scratch: &mut Vec<u8>) -> Option<u64> {
    sequences.find(|sequence| source.payload.key(*sequence, scratch).is_none_or(|key| (source.route)(key) == source.partition))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::to_u64;

    /// A record of its own memory.
    #[derive(Clone)]
    struct Stored {
        offset: u64,
        timestamp: u64,
        key: Vec<u8>,
        value: Vec<u8>,
    }

    struct Log {
        payload: Payload,
        acks: Vec<Ack>,
        records: Vec<Stored>,
        unanswered: bool,
    }

    /// Three producers append batches of two in turn: 12 records, offsets and sequences alike.
    fn good(payload: Payload) -> Log {
        let acks: Vec<_> = (0..6)
            .map(|at| Ack {
                producer: at % 3,
                offsets: u64::from(at) * 2..u64::from(at) * 2 + 2,
                sequences: u64::from(at) * 2..u64::from(at) * 2 + 2,
                begun: 0,
            })
            .collect();
        let records =
            acks.iter().flat_map(|ack| ack.offsets.clone().map(|offset| stored(&payload, ack.producer, offset, offset))).collect();
        Log { payload, acks, records, unanswered: false }
    }

    fn stored(payload: &Payload, producer: u32, sequence: u64, offset: u64) -> Stored {
        let key = payload.key(sequence, &mut Vec::new()).unwrap_or_default().to_vec();
        Stored { offset, timestamp: 1000 + offset / 2, key, value: payload.value(producer, sequence, &mut Vec::new()).to_vec() }
    }

    fn noise() -> Log {
        good(Payload::noise(24, 0, 7))
    }

    /// Keys of even number go to partition 0, the one that is looked at.
    fn route(key: &[u8]) -> u32 {
        u32::from(key.last().unwrap() % 2)
    }

    fn check(log: &Log) -> Findings {
        let source = Source { payload: &log.payload, producers: 3, partition: 0, route: &route, unanswered: log.unanswered };
        let mut checker = Checker::new(source, log.acks.clone().into_iter());
        for Stored { offset, timestamp, key, value } in &log.records {
            checker.record(&Record { offset: *offset, timestamp: *timestamp, key, value });
        }
        checker.finish()
    }

    /// What was found, and that something was.
    fn kinds(log: &Log) -> Vec<Kind> {
        let findings = check(log);
        assert!(findings.differences > 0, "the difference was not seen");
        findings.shown.into_iter().map(|difference| difference.kind).collect()
    }

    #[test]
    fn a_log_as_written_has_no_difference() {
        for payload in [Payload::noise(0, 0, 7), Payload::noise(1, 0, 7), Payload::noise(24, 0, 7)] {
            let findings = check(&good(payload));
            assert_eq!((findings.verified, findings.differences, findings.unanswered), (12, 0, 0));
        }
        let empty = Log { payload: Payload::noise(1, 0, 0), acks: vec![], records: vec![], unanswered: false };
        assert_eq!(check(&empty).differences, 0);
    }

    #[test]
    fn every_flipped_bit_is_a_difference() {
        for at in 0..12 {
            for bit in 0..24 * 8 {
                let mut log = noise();
                log.records[at].value[bit / 8] ^= 1 << (bit % 8);
                let findings = check(&log);
                assert_eq!((findings.differences, findings.verified), (1, 11));
                let Kind::Value { offset, how, .. } = &findings.shown[0].kind else { panic!("{findings:?}") };
                assert_eq!((*offset, how.at), (log.records[at].offset, bit / 8));
            }
        }
    }

    #[test]
    fn another_length_is_a_difference() {
        for change in [|value: &mut Vec<u8>| value.push(0), |value: &mut Vec<u8>| value.truncate(value.len() - 1), Vec::clear] {
            let mut log = noise();
            change(&mut log.records[5].value);
            assert!(matches!(kinds(&log)[..], [Kind::Value { offset: 5, .. }]));
        }
        let mut log = good(Payload::noise(0, 0, 7));
        log.records[5].value.push(0);
        assert!(matches!(kinds(&log)[..], [Kind::Value { offset: 5, .. }]));
    }

    #[test]
    fn a_key_that_nobody_wrote_is_a_difference() {
        let mut log = noise();
        log.records[3].key = b"key-0".to_vec();
        assert!(matches!(&kinds(&log)[..], [Kind::Key { offset: 3, found, .. }] if found == "key-0"));
    }

    #[test]
    fn missing_at_the_end() {
        for left in 0..12 {
            let mut log = noise();
            log.records.truncate(left);
            let kinds = kinds(&log);
            assert_eq!(kinds, [Kind::Missing { offsets: to_u64(left)..12 }], "one difference, over all appends");
            assert_eq!(check(&log).verified, to_u64(left));
        }
    }

    #[test]
    fn missing_in_the_middle_with_a_gap_of_offsets() {
        for (from, to) in [(0, 1), (1, 2), (2, 4), (3, 4), (1, 9), (0, 11)] {
            let mut log = noise();
            log.records.drain(from..to);
            let findings = check(&log);
            assert_eq!(findings.verified, 12 - to_u64(to - from));
            assert!(findings.shown.iter().any(|d| matches!(d.kind, Kind::OffsetGap { .. })), "{findings:?}");
            assert!(findings.shown.iter().any(|d| matches!(d.kind, Kind::Missing { .. })), "{findings:?}");
        }
    }

    #[test]
    fn missing_in_the_middle_with_offsets_closed_up() {
        let mut log = noise();
        log.records.remove(4);
        for (at, record) in (0..).zip(&mut log.records) {
            record.offset = at;
        }
        let findings = check(&log);
        assert_eq!((findings.verified, findings.differences), (4, 8), "the seven that moved and the one missing at the end");
    }

    #[test]
    fn a_record_twice() {
        let mut log = noise();
        log.records.insert(6, log.records[5].clone());
        assert!(kinds(&log).iter().any(|kind| matches!(kind, Kind::OffsetGap { found: 5, expected: 6 })));
        assert!(kinds(&log).iter().any(|kind| matches!(kind, Kind::Unexpected { offset: 5 })));
        // The same, with the offsets made to fit.
        for (at, record) in (0..).zip(&mut log.records) {
            record.offset = at;
        }
        let kinds = kinds(&log);
        let Kind::Value { offset: 6, how, .. } = &kinds[0] else { panic!("{kinds:?}") };
        assert_eq!(how.is_of, Some((2, 5)), "and it says whose value is there");
        assert!(matches!(kinds.last(), Some(Kind::Unexpected { offset: 12 })));
    }

    #[test]
    fn two_records_exchanged() {
        for (a, b) in [(0, 1), (3, 4), (0, 11)] {
            let mut log = noise();
            log.records.swap(a, b);
            assert!(kinds(&log).iter().any(|kind| matches!(kind, Kind::OffsetGap { .. })));
            // The same, with the offsets made to fit.
            for (at, record) in (0..).zip(&mut log.records) {
                (record.offset, record.timestamp) = (at, 0);
            }
            let kinds = kinds(&log);
            assert_eq!(kinds.len(), 2, "{kinds:?}");
            assert!(kinds.iter().all(|kind| matches!(kind, Kind::Value { .. })));
        }
    }

    #[test]
    fn one_byte_values_tell_neighbours_apart() {
        let mut log = good(Payload::noise(1, 0, 7));
        let (left, right) = log.records.split_at_mut(7);
        std::mem::swap(&mut left[6].value, &mut right[0].value);
        assert_eq!(kinds(&log).len(), 2);
    }

    #[test]
    fn a_record_that_no_append_was_answered_with() {
        let mut log = noise();
        log.acks.remove(2);
        assert!(matches!(kinds(&log)[..], [Kind::Unexpected { offset: 4 }, Kind::Unexpected { offset: 5 }]));
        log.unanswered = true; // after a failed append its records may be there
        let findings = check(&log);
        assert_eq!((findings.verified, findings.unanswered, findings.differences), (10, 2, 0));
    }

    #[test]
    fn after_a_failed_append_acknowledged_records_count_as_ever() {
        let mut log = noise();
        log.unanswered = true;
        log.records.truncate(7);
        assert!(matches!(kinds(&log)[0], Kind::Missing { .. }));
        let mut log = noise();
        log.unanswered = true;
        log.records[0].value[0] ^= 1;
        assert!(matches!(kinds(&log)[0], Kind::Value { offset: 0, .. }));
    }

    #[test]
    fn answers_that_overlap() {
        let mut log = noise();
        log.acks[3].offsets = 5..7;
        assert!(kinds(&log).iter().any(|kind| matches!(kind, Kind::Overlap { producer: 0, .. })));
        let mut log = noise();
        log.acks[3].offsets = 4..6;
        assert!(kinds(&log).iter().any(|kind| matches!(kind, Kind::Overlap { .. })));
    }

    #[test]
    fn answers_with_too_many_or_too_few_offsets() {
        for offsets in [4..5, 4..4, 4..7] {
            let mut log = noise();
            log.acks[2].offsets = offsets;
            assert!(kinds(&log).iter().any(|kind| matches!(kind, Kind::Count { records: 2, .. })));
        }
    }

    #[test]
    fn a_later_append_before_an_earlier_one() {
        let mut log = noise();
        let (early, late) = (log.acks[0].sequences.clone(), log.acks[3].sequences.clone());
        (log.acks[0].sequences, log.acks[3].sequences) = (late, early);
        for (offset, sequence) in [(0, 6), (1, 7), (6, 0), (7, 1)] {
            log.records[offset] = stored(&log.payload, 0, sequence, to_u64(offset));
        }
        let kinds = kinds(&log);
        assert!(matches!(kinds[..], [Kind::Order { producer: 0, sequence: 0, before: 7, .. }]), "{kinds:?}");
    }

    #[test]
    fn a_timestamp_that_goes_back() {
        let mut log = noise();
        log.records[4].timestamp = 5000;
        assert!(matches!(kinds(&log)[..], [Kind::Timestamp { offset: 5, before: 5000, .. }]));
    }

    /// Keys 0 to 3 in turn, batches of five sequences, of which this partition has the even ones.
    fn keyed() -> Log {
        let payload = Payload::noise(24, 4, 7);
        let ack = |producer, offsets, sequences| Ack { producer, offsets, sequences, begun: 0 };
        let acks = vec![ack(0, 0..3, 0..5), ack(1, 3..5, 5..10)];
        let records = [(0, 0), (0, 2), (0, 4), (1, 6), (1, 8)];
        let records = (0..).zip(records).map(|(offset, (producer, sequence))| stored(&payload, producer, sequence, offset)).collect();
        Log { payload, acks, records, unanswered: false }
    }

    #[test]
    fn with_keys_a_partition_has_only_its_own() {
        let findings = check(&keyed());
        assert_eq!((findings.verified, findings.differences), (5, 0), "{findings:?}");
        let mut log = keyed();
        log.records[1].key = b"key-0".to_vec();
        assert!(matches!(&kinds(&log)[..], [Kind::Key { offset: 1, sequence: 2, expected, .. }] if expected == "key-2"));
        let mut log = keyed();
        log.records[1] = stored(&log.payload, 0, 1, 1); // a record of the other partition
        assert!(matches!(kinds(&log)[..], [Kind::Key { .. }, Kind::Value { .. }]));
    }

    #[test]
    fn only_the_first_differences_are_kept_and_all_counted() {
        let mut log = noise();
        for record in &mut log.records {
            record.value.clear();
        }
        let mut findings = check(&log);
        assert_eq!((findings.differences, findings.shown.len(), findings.verified), (12, SHOWN, 0));
        findings.absorb(check(&noise()));
        findings.absorb(check(&log));
        assert_eq!((findings.differences, findings.shown.len(), findings.verified), (24, SHOWN, 12));
    }

    #[test]
    fn every_difference_is_a_sentence() {
        let mut log = noise();
        log.records[6].value = log.records[5].value.clone();
        let text = check(&log).shown[0].to_string();
        assert_eq!(
            text,
            "partition 0: offset 6 has not the value of record 6 of producer 0: different from byte 0 on; it is that of record 5 of producer 2"
        );
        let missing = Difference { partition: 3, kind: Kind::Missing { offsets: 7..9 } };
        assert_eq!(missing.to_string(), "partition 3: the offsets 7 to 8 were acknowledged and are missing");
    }
}
