//! Records that were read: views into a reader's memory, and owned ones.

use bytes::Bytes;

use crate::record::{Flaw, HEADER_BYTES, Header, Record, to_usize};

/// Bytes of records that are copied at once where they are asked for one by one.
pub(super) const AHEAD_BYTES: usize = 64 << 10;

/// Records that were read together, borrowed from their reader's buffer.
#[derive(Debug, Clone, Copy)]
pub struct Records<'a> {
    bytes: &'a [u8],
    first: u64,
    count: u64,
}

impl<'a> Records<'a> {
    /// Whole records, checked, the first of them `first`.
    pub(super) fn new(bytes: &'a [u8], first: u64, count: u64) -> Self {
        Self { bytes, first, count }
    }

    /// The records, in order.
    pub fn iter(&self) -> RecordsIter<'a> {
        RecordsIter { bytes: self.bytes }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        to_usize(self.count)
    }

    /// Whether there is none: the end of the log.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes that they occupy in the log.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The offset to go on reading from.
    pub fn next_offset(&self) -> u64 {
        self.first + self.count
    }
}

impl<'a> IntoIterator for Records<'a> {
    type Item = Record<'a>;
    type IntoIter = RecordsIter<'a>;

    fn into_iter(self) -> RecordsIter<'a> {
        self.iter()
    }
}

impl<'a> IntoIterator for &Records<'a> {
    type Item = Record<'a>;
    type IntoIter = RecordsIter<'a>;

    fn into_iter(self) -> RecordsIter<'a> {
        self.iter()
    }
}

/// Iterates over [`Records`].
#[derive(Debug, Clone)]
pub struct RecordsIter<'a> {
    /// Whole records, checked when they were read.
    bytes: &'a [u8],
}

impl<'a> Iterator for RecordsIter<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        let header = Header::parse(self.bytes.first_chunk()?);
        let (record, rest) = self.bytes.split_at(to_usize(header.record_bytes()));
        self.bytes = rest;
        Some(Record::from_checked(&header, &record[HEADER_BYTES..]))
    }
}

/// A record with memory of its own; clones share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedRecord {
    /// Its number in the partition.
    pub offset: u64,
    /// When it was appended: nanoseconds since 1970-01-01 UTC.
    pub timestamp: u64,
    /// Its key; empty if it has none.
    pub key: Bytes,
    /// Its value.
    pub value: Bytes,
}

impl OwnedRecord {
    pub(crate) fn decode(bytes: Vec<u8>, expected: u64) -> Result<Self, Flaw> {
        let (record, len) = Record::decode(&bytes, expected)?;
        let Record { offset, timestamp, key, .. } = record;
        let value_at = HEADER_BYTES + key.len();
        let bytes = Bytes::from(bytes);
        Ok(Self { offset, timestamp, key: bytes.slice(HEADER_BYTES..value_at), value: bytes.slice(value_at..len) })
    }
}

impl Record<'_> {
    /// The record with memory of its own, to outlive the read: copies key and value.
    pub fn to_owned(&self) -> OwnedRecord {
        let bytes = Bytes::from([self.key, self.value].concat());
        let (key, value) = (bytes.slice(..self.key.len()), bytes.slice(self.key.len()..));
        OwnedRecord { offset: self.offset, timestamp: self.timestamp, key, value }
    }
}

impl From<Record<'_>> for OwnedRecord {
    /// [`Record::to_owned`].
    fn from(record: Record<'_>) -> Self {
        record.to_owned()
    }
}
