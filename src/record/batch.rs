//! Records on their way to a partition: one buffer per batch, no allocation per record.

use std::fmt;

use super::codec::{HEADER_BYTES, Header, checksum, to_u64, to_usize};

/// Records to append together, in order.
///
/// They lie in one buffer in their stored form, but for the three fields that the partition's writer fills in:
/// offset, timestamp and checksum.
///
/// ```
/// let mut batch = sapwood::Batch::new();
/// batch.push(Some(b"user-1"), b"hello")?;
/// batch.push(None, b"no key")?;
/// assert_eq!((batch.len(), batch.bytes()), (2, 28 + 11 + 28 + 6));
/// # Ok::<(), sapwood::Error>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Batch {
    bytes: Vec<u8>,
    records: u64,
}

/// Key and value together are larger than a record's 32-bit size can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordTooLarge {
    /// Bytes of key and value.
    pub size: u64,
}

impl RecordTooLarge {
    /// The most bytes of key and value that the format can hold.
    pub const LIMIT: u64 = u32::MAX as u64;
}

impl fmt::Display for RecordTooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a record of {} bytes of key and value; the format holds at most {}", self.size, Self::LIMIT)
    }
}

impl std::error::Error for RecordTooLarge {}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty batch with room for so many bytes, each record's 28-byte header counted.
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), records: 0 }
    }

    /// A batch of one record.
    ///
    /// # Errors
    /// [`RecordTooLarge`], as for [`Self::push`].
    pub fn of(key: Option<&[u8]>, value: &[u8]) -> Result<Self, RecordTooLarge> {
        let mut batch = Self::with_capacity(HEADER_BYTES + key.map_or(0, <[u8]>::len) + value.len());
        batch.push(key, value)?;
        Ok(batch)
    }

    /// Adds a record. No key and an empty key are the same.
    ///
    /// # Errors
    /// [`RecordTooLarge`] if key and value exceed 2^32 - 1 bytes; the batch is as before.
    pub fn push(&mut self, key: Option<&[u8]>, value: &[u8]) -> Result<(), RecordTooLarge> {
        let key = key.unwrap_or_default();
        let whole = to_u64(key.len()) + to_u64(value.len());
        let (Ok(size), Ok(keylen)) = (u32::try_from(whole), u32::try_from(key.len())) else {
            return Err(RecordTooLarge { size: whole });
        };
        self.bytes.reserve(HEADER_BYTES + key.len() + value.len());
        self.bytes.extend_from_slice(&Header { offset: 0, size, crc: 0, timestamp: 0, keylen }.encode());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        self.records += 1;
        Ok(())
    }

    /// Number of records.
    pub fn len(&self) -> u64 {
        self.records
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Bytes that the records will occupy in the log.
    pub fn bytes(&self) -> u64 {
        to_u64(self.bytes.len())
    }

    /// Takes all records out; the memory stays for the next ones.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.records = 0;
    }

    /// Bytes of memory that it holds, for records that are in it and those to come.
    pub(crate) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// All records, as they are stored once each was completed.
    pub(crate) fn as_stored(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes of the record at byte `at` of the batch; none at its end.
    pub(crate) fn record_bytes(&self, at: usize) -> Option<usize> {
        let header = self.bytes.get(at..)?.first_chunk()?;
        Some(to_usize(Header::parse(header).record_bytes()))
    }

    /// Completes the record at byte `at` where it is, with its offset and timestamp.
    pub(crate) fn complete_record(&mut self, at: usize, offset: u64, timestamp: u64) {
        let record = &mut self.bytes[at..];
        let mut header = Header { offset, timestamp, ..Header::parse(record.first_chunk().expect("`at` is the place of a record")) };
        header.crc = checksum(timestamp, &record[HEADER_BYTES..to_usize(header.record_bytes())]);
        record[..HEADER_BYTES].copy_from_slice(&header.encode());
    }

    /// All records in their stored form, as far as they were completed.
    pub(crate) fn stored(&self) -> &[u8] {
        &self.bytes
    }

    /// Copies the record at byte `at` to the start of `into`, completed with its offset and timestamp.
    pub(crate) fn encode_record(&self, at: usize, offset: u64, timestamp: u64, into: &mut [u8]) {
        let header = self.bytes[at..].first_chunk().expect("`at` is the place of a record");
        let mut header = Header { offset, timestamp, ..Header::parse(header) };
        let len = to_usize(header.record_bytes());
        let body = &mut into[HEADER_BYTES..len];
        body.copy_from_slice(&self.bytes[at + HEADER_BYTES..at + len]);
        header.crc = checksum(timestamp, body);
        into[..HEADER_BYTES].copy_from_slice(&header.encode());
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch").field("records", &self.records).field("bytes", &self.bytes.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;

    #[test]
    fn a_record_completed_in_place_is_the_one_that_is_copied() {
        let mut batch = Batch::new();
        for len in [0, 1, 7, 100, 5000] {
            batch.push((len % 2 == 1).then_some(b"key"), &vec![9; len]).unwrap();
        }
        let mut copied = vec![0; batch.stored().len()];
        let (mut at, mut offset) = (0, 40);
        while let Some(bytes) = batch.record_bytes(at) {
            batch.encode_record(at, offset, 1_234, &mut copied[at..at + bytes]);
            batch.complete_record(at, offset, 1_234);
            assert_eq!(Record::decode(&batch.stored()[at..], offset).unwrap().1, bytes);
            (at, offset) = (at + bytes, offset + 1);
        }
        assert_eq!((offset, batch.stored()), (45, &copied[..]));
    }
}
