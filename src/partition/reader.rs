//! Reading: batches of records from a reader's own registered buffer, and single records by plain calls.
//!
//! The end of the log comes from memory ([`super::recent`]), the rest from the disk or the page cache.
//! A read never passes the watermark that it was asked for: it is bounded by the segment's own end, which the writer moves
//! only over whole records that were written, so neither preallocated zeros nor a write in flight can be seen. Every
//! record's checksum is verified on every read.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::{Partition, Shared};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::transfer::{Done, Place, Transfers, read_exact_at};
use crate::io::{Action, BLOCK, Buffer, File, RingConfig, Slot, Token};
use crate::record::{Flaw, HEADER_BYTES, Header, Record, to_u64, to_usize};
use crate::segment::{Kind, Segment};

/// How far a reader sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Visibility {
    /// Records that are on the device: what was read once is there after any crash.
    #[default]
    Durable,
    /// Records that the kernel has: a power loss may take back what was read. With
    /// [`Durability::Durable`](crate::Durability::Durable) there is no difference.
    Appended,
}

impl Visibility {
    fn end_of(self, segment: &Segment) -> u64 {
        match self {
            Self::Durable if guard::stands(Guard::ReadsAreDurable) => segment.durable(),
            Self::Durable | Self::Appended => segment.appended(),
        }
    }

    fn end_offset(self, shared: &Shared) -> u64 {
        match self {
            Self::Durable if guard::stands(Guard::ReadsAreDurable) => shared.durable_end(),
            Self::Durable | Self::Appended => shared.appended_end(),
        }
    }

    /// # Errors
    /// [`Error::OffsetOutOfRange`] unless `offset` is one that there is, or the one after.
    fn check(self, shared: &Shared, offset: u64) -> Result<Range<u64>> {
        let range = shared.first_offset()..self.end_offset(shared);
        if offset < range.start || offset > range.end {
            return Err(Error::OffsetOutOfRange { offset, first: range.start, next: range.end });
        }
        Ok(range)
    }
}

/// Reads batches of records. Belongs to one thread at a time, and keeps its partition open.
///
/// ```
/// # fn main() -> sapwood::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let broker = sapwood::Broker::open(dir.path(), Default::default())?;
/// # broker.create_topic("orders", Default::default())?;
/// # broker.produce("orders", None, b"hello")?;
/// let mut reader = broker.topic("orders")?.partition(0)?.reader()?;
/// let mut next = 0;
/// loop {
///     let records = reader.read(next, 1 << 20)?;
///     if records.is_empty() {
///         break; // the end of the log, for the moment
///     }
///     for record in &records {
///         println!("{} {:?}", record.offset, record.value);
///     }
///     next = records.next_offset();
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Reader {
    partition: Partition,
    up_to: Visibility,
    transfers: Transfers,
    /// Registered; absent only while a read is under way.
    buffer: Option<Buffer>,
    /// For a batch that the registered one is too small for.
    large: Option<Buffer>,
    segment: Option<Opened>,
    /// Where the next record lies, if the next read goes on from the last one.
    cursor: Cursor,
}

#[derive(Debug)]
struct Opened {
    segment: Arc<Segment>,
    log: Arc<dyn File>,
    slot: Slot,
    /// Where the segment behind it began when this one was opened. What stands from that offset on is not the log's: a sealed segment's end
    /// may be believed by its length alone. What a writer seals later ends where its records do.
    next_base: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    offset: u64,
    base: u64,
    position: u64,
    known: bool,
}

const READ: Token = Token(0);

impl Reader {
    /// Bytes of a reader's buffer, unless asked for otherwise.
    pub const BUFFER_BYTES: usize = 1 << 20;

    pub(super) fn new(partition: Partition, up_to: Visibility, buffer_bytes: usize) -> Result<Self> {
        let shared = &partition.0.shared;
        shared.check_open()?;
        let buffer_bytes = to_usize(to_u64(buffer_bytes.max(1)).next_multiple_of(BLOCK));
        // A reader may move between threads, so the ring may not insist on one.
        let config = RingConfig { depth: 1, files: 2, buffers: 1, buffer_bytes, one_thread: false };
        let ring = shared.disk.ring(&config).map_err(Error::io("make a ring for", &shared.dir))?;
        let mut transfers = Transfers::new(ring);
        let buffer = transfers.take_buffers().pop();
        Ok(Self { partition, up_to, transfers, buffer, large: None, segment: None, cursor: Cursor::default() })
    }

    /// Reads the records from `offset` on, as many as fit in `max_bytes`, and at least one: a record that is larger comes
    /// alone. At the end of the log there are none.
    ///
    /// The records are borrowed from the reader's buffer; nothing is copied. With more than its size as `max_bytes`, the
    /// reader takes a larger one, which is not registered.
    ///
    /// # Blocking
    /// For the device, where the page cache does not hold what is read.
    ///
    /// # Errors
    /// - [`Error::OffsetOutOfRange`], with the first offset that there is and the end.
    /// - [`Error::Damaged`] if the record at `offset` is none any more; the ones before it were returned by earlier reads,
    ///   and those behind it can be read by their offsets.
    /// - [`Error::RecordsMissing`] if a segment is missing there.
    /// - [`Error::Closed`] once the broker was closed or the topic deleted.
    pub fn read(&mut self, offset: u64, max_bytes: usize) -> Result<Records<'_>> {
        let shared = Arc::clone(&self.partition.0.shared);
        shared.check_open()?;
        let end = self.up_to.check(&shared, offset)?.end;
        if offset == end {
            return Ok(Records { bytes: &[], first: offset, count: 0 });
        }
        self.go_to(&shared, offset)?;
        let mut batch = Batch { filled: 0, next: offset, max_bytes };
        while batch.next < end && batch.filled < max_bytes.max(1) {
            if !self.read_more(&shared, &mut batch)? {
                break;
            }
        }
        let bytes = self.large.as_ref().or(self.buffer.as_ref()).map_or(&[][..], |buffer| &buffer[..batch.filled]);
        Ok(Records { bytes, first: offset, count: batch.next - offset })
    }

    /// The partition that is read.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Finds the record `offset`, unless the last read ended there.
    fn go_to(&mut self, shared: &Shared, offset: u64) -> Result<()> {
        if self.cursor.known && self.cursor.offset == offset {
            return Ok(());
        }
        self.cursor.known = false;
        let segment = shared.segment_of(offset).expect("an offset in range lies behind the first base");
        self.open(shared, segment)?;
        let Some(Opened { segment, log, .. }) = &self.segment else { unreachable!("opened above") };
        let position = segment.locate(&*shared.disk, &**log, offset, self.up_to.end_of(segment));
        let position = position.map_err(|error| missing_or(shared, segment, offset, error))?;
        self.cursor = Cursor { offset, base: segment.base(), position, known: true };
        Ok(())
    }

    fn open(&mut self, shared: &Shared, segment: Arc<Segment>) -> Result<()> {
        if self.segment.as_ref().is_some_and(|opened| opened.segment.base() == segment.base()) {
            return Ok(());
        }
        if let Some(before) = self.segment.take() {
            self.transfers.detach(before.slot);
        }
        let log = segment.open_log(&*shared.disk)?;
        let slot = self.transfers.attach(Arc::clone(&log)).map_err(Error::io("attach to the ring", &segment.path(Kind::Log)))?;
        let next_base = shared.segment_after(segment.base()).map(|next| next.base());
        self.segment = Some(Opened { segment, log, slot, next_base });
        Ok(())
    }

    /// Reads on at the cursor into the batch. False if the batch is to end here.
    fn read_more(&mut self, shared: &Shared, batch: &mut Batch) -> Result<bool> {
        if self.segment.as_ref().is_none_or(|opened| opened.segment.base() != self.cursor.base) {
            let segment = shared.segment_of(self.cursor.base).expect("segments are not removed while a partition is open");
            self.open(shared, segment)?;
        }
        let Some(Opened { segment, next_base, .. }) = &self.segment else { unreachable!("opened above") };
        let end = self.up_to.end_of(segment);
        if self.cursor.position >= end || *next_base == Some(self.cursor.offset) {
            return self.next_segment(shared, batch);
        }
        let want = to_u64(batch.max_bytes - batch.filled.min(batch.max_bytes)).min(end - self.cursor.position);
        let want = if batch.filled == 0 { want.max(to_u64(HEADER_BYTES).min(end - self.cursor.position)) } else { want };
        self.fill(batch.filled, want)?;
        let found = self.check(batch, want, end);
        match found {
            Checked::Records { bytes, next } => {
                batch.filled += bytes;
                batch.next = next;
                self.advance(bytes, next);
                Ok(to_u64(bytes) == want)
            }
            Checked::LargerThanBatch { bytes } => {
                self.fill(0, bytes)?;
                match self.check(batch, bytes, end) {
                    Checked::Records { bytes, next } => {
                        batch.filled = bytes;
                        batch.next = next;
                        self.advance(bytes, next);
                        Ok(false)
                    }
                    Checked::LargerThanBatch { .. } => unreachable!("a whole record was read"),
                    Checked::Flawed(flaw) => self.damage(shared, flaw),
                }
            }
            // What was read before goes out first; the next read begins with the flaw.
            Checked::Flawed(_) if batch.filled > 0 => Ok(false),
            Checked::Flawed(flaw) => self.damage(shared, flaw),
        }
    }

    fn advance(&mut self, bytes: usize, next: u64) {
        self.cursor.position += to_u64(bytes);
        self.cursor.offset = next;
    }

    /// Goes to the start of the next segment. False at the end of the log.
    fn next_segment(&mut self, shared: &Shared, batch: &Batch) -> Result<bool> {
        let Some(next) = shared.segment_after(self.cursor.base) else { return Ok(false) };
        if next.base() == self.cursor.offset {
            self.cursor = Cursor { base: next.base(), position: 0, ..self.cursor };
            return Ok(true);
        }
        let Some(Opened { segment, .. }) = &self.segment else { unreachable!("the cursor's segment is open") };
        // The segment is sealed now. It may have grown between the look at its end and the look at its successor.
        if self.cursor.position < self.up_to.end_of(segment) {
            return Ok(true);
        }
        if batch.filled > 0 {
            return Ok(false);
        }
        Err(Error::RecordsMissing { path: shared.dir.to_path_buf(), from: self.cursor.offset, to: next.base() })
    }

    /// Reads `want` bytes at the cursor to byte `at` of the buffer, in a larger buffer if it must be.
    fn fill(&mut self, at: usize, want: u64) -> Result<()> {
        let Some(Opened { segment, slot, .. }) = &self.segment else { unreachable!("the cursor's segment is open") };
        let path = segment.path(Kind::Log);
        let needed = at + to_usize(want);
        if at == 0 {
            let registered = self.buffer.as_ref().is_some_and(|buffer| needed <= buffer.len());
            let reusable = self.large.as_ref().is_some_and(|large| needed <= large.len());
            self.large = match self.large.take() {
                _ if registered => None,
                large if reusable => large,
                _ => Some(Buffer::new(needed).map_err(Error::io("find memory to read", &path))?),
            };
        } else if self.large.is_none() && self.buffer.as_ref().is_some_and(|buffer| needed > buffer.len()) {
            let mut large = Buffer::new(needed).map_err(Error::io("find memory to read", &path))?;
            if let Some(buffer) = &self.buffer {
                large[..at].copy_from_slice(&buffer[..at]);
            }
            self.large = Some(large);
        } else if let Some(small) = self.large.take_if(|large| needed > large.len()) {
            let mut large = Buffer::new(needed).map_err(Error::io("find memory to read", &path))?;
            large[..at].copy_from_slice(&small[..at]);
            self.large = Some(large);
        }
        let is_large = self.large.is_some();
        let buffer = if is_large { self.large.take() } else { self.buffer.take() };
        let mut buffer = buffer.expect("a reader has its buffer between reads");
        // The end of the log is in memory still, where a consumer that keeps up finds it.
        let in_memory = self.partition.0.shared.recent.read(segment.base(), self.cursor.position, &mut buffer[at..needed]);
        let done = if to_u64(in_memory) == want {
            Done { token: READ, result: Ok(in_memory), buffer }
        } else {
            let place = Place { slot: *slot, position: self.cursor.position, direct: false };
            self.transfers.start(READ, Action::Read, place, buffer, at..needed);
            self.transfers.finish(READ).map_err(Error::io("read", &path))?
        };
        if is_large {
            self.large = Some(done.buffer)
        } else {
            self.buffer = Some(done.buffer)
        };
        match done.result {
            Ok(read) if to_u64(read) == want => Ok(()),
            // Records that were there are gone: somebody cut the file.
            Ok(_) => Err(Error::io("read", &path)(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(Error::io("read", &path)(error)),
        }
    }

    /// Checks the `want` bytes just read behind `batch.filled`: the whole records among them, at least the first.
    fn check(&self, batch: &Batch, want: u64, end: u64) -> Checked {
        let buffer = self.large.as_ref().or(self.buffer.as_ref()).expect("a reader has its buffer between reads");
        let bytes = &buffer[batch.filled..batch.filled + to_usize(want)];
        let next_base = self.segment.as_ref().and_then(|opened| opened.next_base);
        let (mut at, mut next) = (0, batch.next);
        let flaw = loop {
            if at == bytes.len() || next_base == Some(next) {
                return Checked::Records { bytes: at, next };
            }
            match Record::decode(&bytes[at..], next) {
                Ok((_, len)) => {
                    at += len;
                    next += 1;
                }
                Err(flaw) => break flaw,
            }
        };
        if at > 0 {
            // A flaw behind whole records shows again at the start of the next read, if it is more than the batch's end.
            return Checked::Records { bytes: at, next };
        }
        // The first record may only be larger than what was read of it.
        let left = end - self.cursor.position;
        match Header::check(bytes, left, next) {
            Ok(header) if header.record_bytes() > want => {
                // Behind other records it waits for the next read.
                if batch.filled > 0 {
                    Checked::Records { bytes: 0, next }
                } else {
                    Checked::LargerThanBatch { bytes: header.record_bytes() }
                }
            }
            Ok(_) => Checked::Flawed(flaw),
            // Too little of its header was read to tell.
            Err(Flaw::TornHeader { .. }) if left >= to_u64(HEADER_BYTES) => Checked::Records { bytes: 0, next },
            Err(flaw) => Checked::Flawed(flaw),
        }
    }

    fn damage<T>(&mut self, shared: &Shared, flaw: Flaw) -> Result<T> {
        let Some(Opened { segment, log, .. }) = &self.segment else { unreachable!("the cursor's segment is open") };
        let Cursor { offset, position, .. } = self.cursor;
        self.cursor.known = false;
        // The place may have come from an index that lies: only what a scan cannot find either is damage.
        let found = segment.locate_by_scan(&**log, offset, self.up_to.end_of(segment));
        match found {
            Ok(place) if place != position => {
                tracing::warn!(path = %segment.path(Kind::Index).display(), offset, "the index leads to the wrong place");
                Err(Error::Damaged { path: segment.path(Kind::Index), position, offset, flaw })
            }
            Ok(_) => Err(Error::Damaged { path: segment.path(Kind::Log), position, offset, flaw }),
            Err(error) => Err(missing_or(shared, segment, offset, error)),
        }
    }
}

/// Records of one read, on their way into the buffer.
struct Batch {
    filled: usize,
    next: u64,
    max_bytes: usize,
}

enum Checked {
    Records { bytes: usize, next: u64 },
    LargerThanBatch { bytes: u64 },
    Flawed(Flaw),
}

/// Where a segment ends before `offset` and another begins behind it, records are missing, not damaged.
fn missing_or(shared: &Shared, segment: &Segment, offset: u64, error: Error) -> Error {
    match (&error, shared.segment_after(segment.base())) {
        (Error::Damaged { offset: from, position, .. }, Some(next)) if *position == segment.durable() && *from <= offset => {
            Error::RecordsMissing { path: shared.dir.to_path_buf(), from: *from, to: next.base() }
        }
        _ => error,
    }
}

/// Reads the one record `offset`.
pub(super) fn read_one(shared: &Shared, offset: u64) -> Result<OwnedRecord> {
    shared.check_open()?;
    let up_to = Visibility::Durable;
    let range = up_to.check(shared, offset)?;
    if offset == range.end {
        return Err(Error::OffsetOutOfRange { offset, first: range.start, next: range.end });
    }
    let segment = shared.segment_of(offset).expect("an offset in range lies behind the first base");
    let log = segment.open_log(&*shared.disk)?;
    let end = up_to.end_of(&segment);
    let path = segment.path(Kind::Log);
    let at = |position: u64| -> Result<Result<OwnedRecord, Flaw>> {
        let mut header = [0; HEADER_BYTES];
        read_exact_at(&*log, &mut header, position).map_err(Error::io("read", &path))?;
        let header = match Header::check(&header, end - position, offset) {
            Ok(header) => header,
            Err(flaw) => return Ok(Err(flaw)),
        };
        let mut bytes = vec![0; to_usize(header.record_bytes())];
        read_exact_at(&*log, &mut bytes, position).map_err(Error::io("read", &path))?;
        Ok(OwnedRecord::decode(bytes, offset))
    };
    let position = segment.locate(&*shared.disk, &*log, offset, end).map_err(|error| missing_or(shared, &segment, offset, error))?;
    match at(position)? {
        Ok(record) => Ok(record),
        // The place may have come from an index that lies.
        Err(flaw) => {
            let place = if guard::stands(Guard::IndexesAreHints) { segment.locate_by_scan(&*log, offset, end)? } else { position };
            at(place)?.map_err(|_| Error::Damaged { path: path.clone(), position: place, offset, flaw })
        }
    }
}

/// Records that were read together, borrowed from their reader's buffer.
#[derive(Debug, Clone, Copy)]
pub struct Records<'a> {
    bytes: &'a [u8],
    first: u64,
    count: u64,
}

impl<'a> Records<'a> {
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

impl From<Record<'_>> for OwnedRecord {
    /// Copies key and value.
    fn from(record: Record<'_>) -> Self {
        let bytes = Bytes::from([record.key, record.value].concat());
        let (key, value) = (bytes.slice(..record.key.len()), bytes.slice(record.key.len()..));
        Self { offset: record.offset, timestamp: record.timestamp, key, value }
    }
}
