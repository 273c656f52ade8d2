//! Reading all partitions of a topic in the order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::RangeBounds;

use super::{PIECE_BYTES, Topic};
use crate::error::Result;
use crate::partition::{OwnedRecord, Reader, ReaderConfig, Skipped, Span, TimeBounds};
use crate::record::to_usize;

/// The records of all partitions of a topic by their timestamps, those of the same time by their partitions' numbers: made by [`Topic::merged`].
///
/// It gives what was durable when it was made, and ends: of what comes later, the oldest is not known before all of it is there. As an
/// iterator, it ends after an error.
///
/// ```
/// # fn main() -> sapwood::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let broker = sapwood::Broker::open(dir.path(), Default::default())?;
/// # broker.create_topic("orders", sapwood::TopicConfig { partitions: 2, ..Default::default() })?;
/// # broker.produce("orders", None, b"hello")?;
/// # let mut seen = 0;
/// for record in broker.topic("orders")?.merged(..)? {
///     let (partition, record) = record?;
///     println!("{} {partition}/{} {:?}", record.timestamp, record.offset, record.value);
/// #   seen += 1;
/// }
/// # assert_eq!(seen, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Merged {
    sources: Vec<(Reader, Span)>,
    /// The time of the next record of each partition that has one, and is not owed.
    next: BinaryHeap<Reverse<(u64, u32)>>,
    /// The partitions whose next record was not looked at yet.
    owed: Vec<u32>,
    /// Whether the last of those could not be looked at.
    failed: bool,
    over: bool,
}

impl Topic {
    /// The durable records of all partitions with timestamps in that range, in nanoseconds since 1970-01-01 UTC: all with `..`.
    ///
    /// Each partition takes a reader, with 256 KiB of memory.
    ///
    /// # Errors
    /// As for [`Partition::reader`](crate::Partition::reader) and [`Reader::read_range`].
    pub fn merged(&self, times: impl RangeBounds<u64>) -> Result<Merged> {
        let times = TimeBounds::new(&times);
        let mut sources = Vec::new();
        for partition in self.partitions() {
            let mut reader = partition.reader_with(ReaderConfig { piece_bytes: PIECE_BYTES, ..ReaderConfig::default() })?;
            let span = Span::new(&mut reader, times)?;
            sources.push((reader, span));
        }
        Ok(Merged { sources, next: BinaryHeap::new(), owed: (0..self.num_partitions()).collect(), failed: false, over: false })
    }
}

impl Merged {
    /// The next record and the number of its partition; none once all were given.
    ///
    /// # Blocking
    /// For the device, where the page cache does not hold what is read.
    ///
    /// # Errors
    /// As for [`Reader::read`]. No record was lost: the next call tries the same again, and [`Self::skip_damaged`] leads past a damage.
    pub fn next_record(&mut self) -> Result<Option<(u32, OwnedRecord)>> {
        self.failed = true;
        while let Some(&partition) = self.owed.last() {
            let (reader, span) = &mut self.sources[to_usize(partition.into())];
            if let Some(record) = span.peek(reader)? {
                self.next.push(Reverse((record.timestamp, partition)));
            }
            self.owed.pop();
        }
        self.failed = false;
        let Some(Reverse((_, partition))) = self.next.pop() else { return Ok(None) };
        self.owed.push(partition);
        let (reader, span) = &mut self.sources[to_usize(partition.into())];
        Ok(span.next_record(reader)?.map(|record| (partition, record)))
    }

    /// After an error that tells of damage: goes on at the next whole record of that partition, whose number is given with what was passed over. None if
    /// there was no error. See [`Reader::skip_damaged`].
    ///
    /// # Errors
    /// As for that.
    pub fn skip_damaged(&mut self) -> Result<Option<(u32, Skipped)>> {
        self.over = false;
        let Some(&partition) = self.owed.last().filter(|_| self.failed) else { return Ok(None) };
        let (reader, span) = &mut self.sources[to_usize(partition.into())];
        Ok(Some((partition, span.skip_damaged(reader)?)))
    }
}

impl Iterator for Merged {
    type Item = Result<(u32, OwnedRecord)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let next = self.next_record().transpose();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

impl std::iter::FusedIterator for Merged {}
