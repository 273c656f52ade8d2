//! Reading the records of a range of times, or of offsets.

use std::collections::VecDeque;
use std::ops::{Bound, Range, RangeBounds};

use super::{Reader, Skipped};
use crate::error::Result;
use crate::partition::records::{AHEAD_BYTES, OwnedRecord, Records};

/// From which time on, and before which.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimeBounds {
    /// None where no time is late enough.
    from: Option<u64>,
    /// None where there is no limit.
    before: Option<u64>,
}

impl TimeBounds {
    pub(crate) fn new(times: &impl RangeBounds<u64>) -> Self {
        let from = match times.start_bound() {
            Bound::Included(&time) => Some(time),
            Bound::Excluded(&time) => time.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let before = match times.end_bound() {
            Bound::Included(&time) => time.checked_add(1),
            Bound::Excluded(&time) => Some(time),
            Bound::Unbounded => None,
        };
        Self { from, before }
    }
}

impl Reader {
    /// The records with timestamps in that range, in nanoseconds since 1970-01-01 UTC, up to the end that the log has now: `reader.read_range(from..)`.
    /// It reads all from the first record that is in the range or behind it to the last one before the first that is behind it, which are
    /// the same unless another program wrote timestamps that go back.
    ///
    /// ```
    /// # fn main() -> sapwood::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let broker = sapwood::Broker::open(dir.path(), Default::default())?;
    /// # broker.create_topic("orders", Default::default())?;
    /// # broker.produce("orders", None, b"hello")?;
    /// # let partition = broker.topic("orders")?.partition(0)?;
    /// # let now = partition.read_one(0)?.timestamp;
    /// let minute = 60_000_000_000;
    /// let mut reader = partition.reader()?;
    /// for record in reader.read_range(now - minute..now + minute)? {
    ///     println!("{:?}", record?.value);
    /// }
    /// # assert_eq!(reader.read_range(..)?.count(), 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Self::offset_for_time`].
    pub fn read_range(&mut self, times: impl RangeBounds<u64>) -> Result<TimeRange<'_>> {
        let span = Span::new(self, TimeBounds::new(&times))?;
        Ok(TimeRange { reader: self, span, over: false })
    }
}

/// Reads the records of a range of times: see [`Reader::read_range`]. As an iterator it copies them, and ends after an error.
#[derive(Debug)]
pub struct TimeRange<'a> {
    reader: &'a mut Reader,
    span: Span,
    over: bool,
}

impl TimeRange<'_> {
    /// The offsets of the records that are still to come.
    pub fn offsets(&self) -> Range<u64> {
        self.span.next()..self.span.end
    }

    /// The next records, borrowed, as [`Reader::read`] gives them; none at the end of the range.
    ///
    /// # Errors
    /// As for that. The range stays where it is; [`Self::skip_damaged`] leads on.
    pub fn next_batch(&mut self, max_bytes: usize) -> Result<Option<Records<'_>>> {
        self.span.next_batch(self.reader, max_bytes)
    }

    /// Goes on at the next whole record: see [`Reader::skip_damaged`].
    ///
    /// # Errors
    /// As for that.
    pub fn skip_damaged(&mut self) -> Result<Skipped> {
        self.over = false;
        self.span.skip_damaged(self.reader)
    }
}

impl Iterator for TimeRange<'_> {
    type Item = Result<OwnedRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let next = self.span.next_record(self.reader).transpose();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl std::iter::FusedIterator for TimeRange<'_> {}

/// A range of offsets that a reader goes through.
#[derive(Debug)]
pub(crate) struct Span {
    /// Behind what was read ahead.
    read_to: u64,
    end: u64,
    /// Records that were read already.
    ahead: VecDeque<OwnedRecord>,
}

impl Span {
    /// The records of those times, as far as the reader sees now.
    pub(crate) fn new(reader: &mut Reader, times: TimeBounds) -> Result<Self> {
        let all = reader.config.visibility.end_offset(&reader.partition.0.shared);
        let start = times.from.map_or(Ok(all), |time| reader.offset_for_time(time))?;
        let end = times.before.map_or(Ok(all), |time| reader.offset_for_time(time))?;
        Ok(Self { read_to: start, end: end.max(start), ahead: VecDeque::new() })
    }

    /// The offset of the record that comes next.
    fn next(&self) -> u64 {
        self.ahead.front().map_or(self.read_to, |record| record.offset)
    }

    fn next_batch<'a>(&mut self, reader: &'a mut Reader, max_bytes: usize) -> Result<Option<Records<'a>>> {
        let next = self.next();
        self.ahead.clear();
        self.read_to = next;
        if next == self.end {
            return Ok(None);
        }
        let records = reader.read_before(next, max_bytes, self.end)?;
        self.read_to = records.next_offset();
        Ok(Some(records))
    }

    /// The next record, which stays; none at the end.
    pub(crate) fn peek(&mut self, reader: &mut Reader) -> Result<Option<&OwnedRecord>> {
        if self.ahead.is_empty()
            && let Some(records) = self.next_batch(reader, AHEAD_BYTES)?
        {
            self.ahead.extend(records.iter().map(OwnedRecord::from));
        }
        Ok(self.ahead.front())
    }

    pub(crate) fn next_record(&mut self, reader: &mut Reader) -> Result<Option<OwnedRecord>> {
        self.peek(reader)?;
        Ok(self.ahead.pop_front())
    }

    /// Goes on behind damage, but not beyond the end.
    pub(crate) fn skip_damaged(&mut self, reader: &mut Reader) -> Result<Skipped> {
        let skipped = reader.skip_damaged(self.next())?;
        self.ahead.clear();
        self.read_to = skipped.records.end.min(self.end);
        Ok(skipped)
    }
}
