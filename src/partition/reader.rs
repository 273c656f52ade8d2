//! Reading: batches of records as views into a reader's memory, and single records.
//!
//! The end of the log comes from memory ([`super::recent`]), the rest from the disk or the page cache, in pieces ([`super::fetch`]).
//! A read never passes the watermark that it was asked for: it is bounded by the segment's own end, which the writer moves
//! only over whole records that were written, so neither preallocated zeros nor a write in flight can be seen. Every
//! record's checksum is verified on every read, unless that is waived by name.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;

use super::fetch::{Fetcher, Log, Piece};
use super::records::Records;
use super::{Partition, Shared};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::record::{Checker, Flaw, HEADER_BYTES, Header, Record, Run, RunEnd, to_u64, to_usize};
use crate::segment::{Kind, Segment};

mod range;
mod skip;
mod time;

pub use range::TimeRange;
pub(crate) use range::{Span, TimeBounds};
pub use skip::Skipped;

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

    pub(super) fn end_offset(self, shared: &Shared) -> u64 {
        match self {
            Self::Durable if guard::stands(Guard::ReadsAreDurable) => shared.durable_end(),
            Self::Durable | Self::Appended => shared.appended_end(),
        }
    }

    /// Whether there is a record of that offset.
    fn reaches(self, shared: &Shared, offset: u64) -> bool {
        (shared.first_offset()..self.end_offset(shared)).contains(&offset)
    }

    /// # Errors
    /// [`Error::OffsetOutOfRange`] unless `offset` is one that there is, or the one after.
    pub(super) fn check(self, shared: &Shared, offset: u64) -> Result<Range<u64>> {
        let range = shared.first_offset()..self.end_offset(shared);
        if offset < range.start || offset > range.end {
            return Err(Error::OffsetOutOfRange { offset, first: range.start, next: range.end });
        }
        Ok(range)
    }
}

/// How a reader gets at the bytes of a log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ReadMode {
    /// Through the page cache: the fastest way to what is there. The kernel reads ahead.
    #[default]
    Buffered,
    /// Past the page cache (`O_DIRECT`), with [`ReaderConfig::read_ahead`] pieces under way: for large scans of what is on the disk alone,
    /// which then throw nothing out of the cache. Where the file system refuses, as [`Self::Buffered`].
    Direct,
}

/// Whether a reader verifies what it reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Checksums {
    /// Every record, on every read.
    #[default]
    Verified,
    /// None: a damaged key, value or timestamp is handed out as it is. Offsets and lengths are checked all the same.
    Unverified,
}

/// How a reader reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReaderConfig {
    /// How far it sees.
    pub visibility: Visibility,
    /// How it gets at the bytes.
    pub mode: ReadMode,
    /// Bytes that are read at once, rounded up to whole blocks of 4 KiB. A reader has memory for four times as many, and of direct reads for
    /// twice as many more for each that is under way.
    pub piece_bytes: usize,
    /// Pieces under way beside the one that is read, where reads follow each other; of direct reads alone.
    pub read_ahead: usize,
    /// Whether it verifies checksums.
    pub checksums: Checksums,
}

impl Default for ReaderConfig {
    /// Durable records, through the page cache.
    fn default() -> Self {
        Self::by(ReadMode::Buffered)
    }
}

impl ReaderConfig {
    /// The largest pieces: 1 GiB.
    pub const MAX_PIECE_BYTES: usize = 1 << 30;
    /// The most pieces under way.
    pub const MAX_READ_AHEAD: usize = 256;

    /// Durable records, read so, in pieces that were measured to be good for it: 256 KiB, by a reader with 1 MiB of memory, or 1 MiB of direct reads,
    /// by one with 10 MiB.
    pub fn by(mode: ReadMode) -> Self {
        // perf/README.md has the figures: what comes from a device takes few large requests.
        let piece_bytes = match mode {
            ReadMode::Buffered => 256 << 10,
            ReadMode::Direct => 1 << 20,
        };
        Self { visibility: Visibility::Durable, mode, piece_bytes, read_ahead: 3, checksums: Checksums::Verified }
    }

    /// As by default, up to that watermark.
    pub fn up_to(visibility: Visibility) -> Self {
        Self { visibility, ..Self::default() }
    }

    fn check(&self) -> Result<()> {
        let settings = [("piece_bytes", self.piece_bytes, Self::MAX_PIECE_BYTES), ("read_ahead", self.read_ahead, Self::MAX_READ_AHEAD)];
        match settings.into_iter().find(|(_, value, maximum)| value > maximum) {
            Some((name, value, maximum)) => Err(Error::InvalidConfig { name, value: to_u64(value), minimum: 0, maximum: to_u64(maximum) }),
            None => Ok(()),
        }
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
    config: ReaderConfig,
    fetcher: Fetcher,
    log: Option<Log>,
    /// The segment behind, where it is read ahead.
    next_log: Option<Log>,
    piece: Option<Piece>,
    /// Where the next record lies, if that is known.
    cursor: Option<Cursor>,
    /// Bytes to read at once, until it shows that reads follow each other.
    first_bytes: Option<u64>,
    /// The log's cuts when what is held here was read.
    cuts: u64,
    checker: Checker,
}

/// A record's place.
#[derive(Debug, Clone, Copy)]
struct Cursor {
    offset: u64,
    base: u64,
    position: u64,
    /// Only an index says so, or a length that was not verified.
    is_hint: bool,
}

/// What is to be done at the cursor.
enum Found {
    /// So many whole records, in so many bytes.
    Records {
        count: u64,
        bytes: usize,
    },
    /// More bytes are needed, so many at least from the cursor on.
    Short(u64),
    Flawed(Flaw),
}

impl Reader {
    pub(super) fn new(partition: Partition, config: ReaderConfig) -> Result<Self> {
        let shared = &partition.0.shared;
        config.check()?;
        shared.check_open()?;
        let cuts = shared.cuts.count();
        // Where a ring does not work beside this thread, reads ahead would only be waited for earlier.
        let ahead = if config.mode == ReadMode::Direct && shared.disk.rings_overlap() { config.read_ahead } else { 0 };
        let fetcher = Fetcher::new(&*shared.disk, config.piece_bytes, ahead).map_err(Error::io("make a reader for", &shared.dir))?;
        Ok(Self {
            partition,
            config,
            fetcher,
            log: None,
            next_log: None,
            piece: None,
            cursor: None,
            first_bytes: None,
            cuts,
            checker: Checker::new(),
        })
    }

    /// Reads the records from `offset` on, as many as fit in `max_bytes` and in what is read at once, and at least one: a record that is
    /// larger comes alone. At the end of the log there are none.
    ///
    /// The records are borrowed from the reader's memory; nothing is copied. Reads that follow each other go on where the last one ended,
    /// without a look-up.
    ///
    /// # Blocking
    /// For the device, where neither memory nor the page cache holds what is read.
    ///
    /// # Errors
    /// - [`Error::OffsetOutOfRange`], with the first offset that there is and the end.
    /// - [`Error::Damaged`] if the record at `offset` is none any more; the ones before it were returned by earlier reads,
    ///   and those behind it can be read by their offsets.
    /// - [`Error::RecordsMissing`] if a segment is missing there.
    /// - [`Error::Io`] if the log cannot be read.
    /// - [`Error::Closed`] once the broker was closed or the topic deleted.
    pub fn read(&mut self, offset: u64, max_bytes: usize) -> Result<Records<'_>> {
        self.read_before(offset, max_bytes, u64::MAX)
    }

    /// [`Self::read`] as if the log ended at `limit`.
    fn read_before(&mut self, offset: u64, max_bytes: usize, limit: u64) -> Result<Records<'_>> {
        let shared = Arc::clone(&self.partition.0.shared);
        shared.check_open()?;
        let (count, bytes) = loop {
            self.see_cuts(&shared, offset)?;
            let end = self.config.visibility.check(&shared, offset)?.end.min(limit);
            if offset >= end {
                return Ok(Records::new(&[], offset, 0));
            }
            let found = self.find(&shared, offset, to_u64(max_bytes), end);
            if let Some(found) = self.settle(&shared, offset, found) {
                break found?;
            }
        };
        let Some(cursor) = &mut self.cursor else { unreachable!("records were found there") };
        let (base, position) = (cursor.base, cursor.position);
        // Lengths that were not verified may lead astray.
        let is_hint = self.config.checksums == Checksums::Unverified;
        *cursor = Cursor { offset: cursor.offset + count, position: position + to_u64(bytes), base, is_hint };
        let there = self.piece.as_ref().map_or(&[][..], |piece| piece.bytes(base, position));
        Ok(Records::new(&there[..bytes], offset, count))
    }

    /// Reads the record `offset`: where its segment is open already, by one read of the index and one of the log.
    ///
    /// # Errors
    /// As for [`Self::read`], and [`Error::OffsetOutOfRange`] also at the end.
    pub fn read_one(&mut self, offset: u64) -> Result<Record<'_>> {
        let shared = Arc::clone(&self.partition.0.shared);
        let record = self.read(offset, 1)?.iter().next();
        record.ok_or_else(|| Error::OffsetOutOfRange { offset, first: shared.first_offset(), next: offset })
    }

    /// The partition that is read.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// What was found of the record `offset`; none if its segment was removed meanwhile or the log was cut: then it is to be looked for again.
    fn settle<T>(&mut self, shared: &Shared, offset: u64, found: Result<T>) -> Option<Result<T>> {
        let changed = match &found {
            Ok(_) => self.cuts != shared.cuts.count(),
            Err(_) => shared.was_cut_since(self.cuts) || !self.config.visibility.reaches(shared, offset),
        };
        if changed || found.is_err() {
            self.forget();
        }
        // Of a topic that was deleted meanwhile, nothing is given out.
        match shared.check_open() {
            Err(closed) => Some(Err(closed)),
            Ok(()) => (!changed).then_some(found),
        }
    }

    /// Forgets what it holds of a log that was cut since.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`], once, if a read is to go on from a record that was cut: those that took its place are others.
    fn see_cuts(&mut self, shared: &Shared, offset: u64) -> Result<()> {
        let cuts = shared.cuts.count();
        if cuts == self.cuts {
            return Ok(());
        }
        let lowest = shared.cuts.lowest_since(std::mem::replace(&mut self.cuts, cuts));
        let goes_on = self.cursor.is_some_and(|cursor| cursor.offset == offset);
        self.forget();
        // The files may be others by now.
        for log in self.log.take().into_iter().chain(self.next_log.take()) {
            self.fetcher.close(&log)?;
        }
        match lowest.filter(|&lowest| goes_on && offset > lowest) {
            Some(next) => Err(Error::OffsetOutOfRange { offset, first: shared.first_offset(), next }),
            None => Ok(()),
        }
    }

    /// Brings records from `offset` on into the piece, at the cursor. Gives how many, and their bytes.
    fn find(&mut self, shared: &Shared, offset: u64, max_bytes: u64, end: u64) -> Result<(u64, usize)> {
        self.go_to(shared, offset, max_bytes)?;
        loop {
            let (Some(cursor), Some(log)) = (self.cursor, &self.log) else { unreachable!("the record was looked up") };
            let visible = self.config.visibility.end_of(&log.segment);
            if cursor.position >= visible || log.next_base == Some(cursor.offset) {
                self.next_segment(shared)?;
                continue;
            }
            let found = self.look(offset, max_bytes, end, visible);
            let (Some(cursor), Some(log)) = (self.cursor, &self.log) else { unreachable!("the record was looked up") };
            match found {
                Found::Records { count, bytes } if count > 0 => return Ok((count, bytes)),
                // Records before the one asked for were passed.
                Found::Records { .. } => {}
                Found::Short(needed) => self.fetch(shared, needed, visible)?,
                Found::Flawed(_) if cursor.is_hint && guard::stands(Guard::IndexesAreHints) => {
                    tracing::warn!(path = %log.segment.path(Kind::Log).display(), offset, "what led to a record is wrong; scanning the segment instead");
                    let position = log.segment.locate(&*shared.disk, &*log.file, offset, visible);
                    let position = position.map_err(|error| missing_or(shared, &log.segment, offset, error))?;
                    self.cursor = Some(Cursor { offset, base: cursor.base, position, is_hint: false });
                }
                Found::Flawed(flaw) => return Err(self.damage(shared, cursor, flaw, visible)),
            }
        }
    }

    /// Sets the cursor to the record `offset`, or to one before it that is indexed, unless the last read ended there.
    fn go_to(&mut self, shared: &Shared, offset: u64, max_bytes: u64) -> Result<()> {
        if self.cursor.is_some_and(|cursor| cursor.offset == offset) {
            return Ok(());
        }
        self.forget();
        // It may have been removed since the offset was in range.
        let segment = shared.segment_of(offset).ok_or_else(|| shared.out_of_range(offset))?;
        let base = segment.base();
        self.open(shared, segment)?;
        let Some(log) = &mut self.log else { unreachable!("opened above") };
        let visible = self.config.visibility.end_of(&log.segment);
        if offset == base {
            // No index needs to tell where the first record is.
            self.cursor = Some(Cursor { offset, base, position: 0, is_hint: false });
            self.first_bytes = Some(LOOK_BYTES.max(max_bytes));
            return Ok(());
        }
        let hint = log.lookup.find(&*shared.disk, &log.segment, offset);
        let hint = hint.filter(|hint| hint.position < visible && (base..=offset).contains(&hint.offset));
        self.cursor = Some(match hint {
            Some(hint) => Cursor { offset: hint.offset, base, position: hint.position, is_hint: true },
            None => {
                let position = log.segment.locate(&*shared.disk, &*log.file, offset, visible);
                let position = position.map_err(|error| missing_or(shared, &log.segment, offset, error))?;
                Cursor { offset, base, position, is_hint: false }
            }
        });
        // Where the next entry tells the end, a record that is looked up alone takes one read, and no byte more than it must.
        let known = hint.and_then(|hint| hint.next.map(|next| next.saturating_sub(hint.position)));
        self.first_bytes = Some(known.unwrap_or(LOOK_BYTES).max(max_bytes));
        Ok(())
    }

    /// Forgets where it is: what is read anew is asked of the log anew.
    fn forget(&mut self) {
        self.cursor = None;
        if let Some(piece) = self.piece.take() {
            self.fetcher.give_back(piece);
        }
    }

    /// Opens the log of a segment in the place of the one that is read.
    fn open(&mut self, shared: &Shared, segment: Arc<Segment>) -> Result<()> {
        let base = segment.base();
        if self.log.as_ref().is_some_and(|log| log.segment.base() == base) {
            return Ok(());
        }
        if let Some(log) = self.log.take() {
            self.fetcher.close(&log)?;
        }
        if let Some(next) = self.next_log.take() {
            if next.segment.base() == base {
                self.log = Some(next);
                return Ok(());
            }
            self.fetcher.close(&next)?;
        }
        self.log = Some(self.open_log(shared, segment)?);
        Ok(())
    }

    fn open_log(&mut self, shared: &Shared, segment: Arc<Segment>) -> Result<Log> {
        let next_base = shared.segment_after(segment.base()).map(|next| next.base());
        let direct = self.config.mode == ReadMode::Direct;
        self.fetcher.open(&*shared.disk, segment, shared.config.index_interval, next_base, direct)
    }

    /// Goes to the start of the next segment, if the log goes on there.
    fn next_segment(&mut self, shared: &Shared) -> Result<()> {
        let (Some(cursor), Some(log)) = (self.cursor, &self.log) else { unreachable!("the record was looked up") };
        let next = shared.segment_after(cursor.base);
        if let Some(next) = next.as_ref().filter(|next| next.base() == cursor.offset) {
            self.open(shared, Arc::clone(next))?;
            self.cursor = Some(Cursor { base: cursor.offset, position: 0, is_hint: false, ..cursor });
            return Ok(());
        }
        // It may have grown between the look at its end and the look at its successor.
        if cursor.position < self.config.visibility.end_of(&log.segment) && log.next_base != Some(cursor.offset) {
            return Ok(());
        }
        match next {
            Some(next) => Err(Error::RecordsMissing { path: shared.dir.to_path_buf(), from: cursor.offset, to: next.base() }),
            None => Err(self.damage(shared, cursor, Flaw::TornHeader { left: 0 }, cursor.position)),
        }
    }

    /// Looks at what is in memory at the cursor. Passes records before `offset`.
    fn look(&mut self, offset: u64, max_bytes: u64, end: u64, visible: u64) -> Found {
        let (Some(cursor), Some(log)) = (&mut self.cursor, &self.log) else { unreachable!("the record was looked up") };
        let bytes = self.piece.as_ref().map_or(&[][..], |piece| piece.bytes(cursor.base, cursor.position));
        let left = visible - cursor.position;
        // Of these, headers alone are looked at: they lead on, and are nobody's.
        let (mut at, mut next) = (0, cursor.offset);
        while next < offset {
            let (rest, left) = (bytes.get(at..).unwrap_or_default(), left - to_u64(at));
            match Header::check(rest, left, next) {
                Ok(header) => {
                    at += to_usize(header.record_bytes());
                    next += 1;
                }
                Err(_) if rest.len() < HEADER_BYTES && left >= to_u64(HEADER_BYTES) => break,
                Err(flaw) => return Found::Flawed(flaw),
            }
        }
        if at > 0 {
            cursor.position += to_u64(at);
            cursor.offset = next;
            return Found::Records { count: 0, bytes: 0 };
        } else if next < offset {
            return Found::Short(to_u64(HEADER_BYTES));
        }
        let end = log.next_base.map_or(end, |next_base| end.min(next_base));
        let checker = (self.config.checksums == Checksums::Verified).then_some(&mut self.checker);
        let Run { count, bytes, end } = Run::of(bytes, left, next..end, max_bytes, checker);
        match end {
            RunEnd::Short(needed) if count == 0 => Found::Short(needed),
            RunEnd::Flawed(flaw) if count == 0 => Found::Flawed(flaw),
            // A flaw behind whole records shows again at the start of the next read.
            _ => Found::Records { count, bytes },
        }
    }

    /// Brings bytes from the cursor on into memory, `needed` of them in the end: it may take several calls.
    fn fetch(&mut self, shared: &Shared, needed: u64, visible: u64) -> Result<()> {
        let (Some(cursor), Some(log)) = (self.cursor, &self.log) else { unreachable!("the record was looked up") };
        let before = self.piece.take();
        let here = before.as_ref().map_or(&[][..], |before| before.bytes(cursor.base, cursor.position));
        let (carried, header) = (to_u64(here.len()), here.first_chunk::<HEADER_BYTES>().copied());
        let most = self.fetcher.piece_bytes();
        let large = carried > most || needed > carried + most;
        let first = self.first_bytes.take_if(|_| !large);
        let fetched = if large {
            self.fetcher.fetch_large(log, before, cursor.position, needed, visible)
        } else {
            let wanted = first.unwrap_or(most).max(needed - carried);
            self.fetcher.fetch(log, &shared.recent, before, cursor.position, wanted, visible)
        };
        let piece = match fetched {
            Ok(piece) => piece,
            Err(error) => return Err(self.cut_or(shared, cursor, header.as_ref().map_or(&[][..], |header| header), error)),
        };
        let from = piece.end();
        self.piece = Some(piece);
        if first.is_none() && !large {
            self.fetcher.ask_ahead(log, from, visible);
            self.ask_beyond(shared, from, visible)?;
        }
        Ok(())
    }

    /// Names the damage where a log ends before what was written, because somebody cut it: within the record at the cursor, of whose header so
    /// much is known.
    fn cut_or(&self, shared: &Shared, cursor: Cursor, header: &[u8], error: Error) -> Error {
        let Some(log) = &self.log else { return error };
        let is_cut = matches!(&error, Error::Io { source, .. } if source.kind() == ErrorKind::UnexpectedEof);
        match log.file.len() {
            Ok(len) if is_cut => match Header::check(header, len.saturating_sub(cursor.position), cursor.offset) {
                Err(flaw) => self.damage(shared, cursor, flaw, len),
                Ok(_) => error,
            },
            _ => error,
        }
    }

    /// Asks for the beginning of the next segment, where all of this one was asked for.
    fn ask_beyond(&mut self, shared: &Shared, from: u64, visible: u64) -> Result<()> {
        let Some(log) = &self.log else { return Ok(()) };
        if !self.fetcher.may_ask_beyond(log, from, visible) {
            return Ok(());
        }
        let Some(next) = shared.segment_after(log.segment.base()) else { return Ok(()) };
        let visible = self.config.visibility.end_of(&next);
        if self.next_log.as_ref().is_some_and(|log| log.segment.base() != next.base())
            && let Some(other) = self.next_log.take()
        {
            self.fetcher.close(&other)?;
        }
        if self.next_log.is_none() {
            self.next_log = Some(self.open_log(shared, next)?);
        }
        if let Some(next) = &self.next_log {
            self.fetcher.ask_ahead(next, 0, visible);
        }
        Ok(())
    }

    fn damage(&self, shared: &Shared, cursor: Cursor, flaw: Flaw, visible: u64) -> Error {
        let Some(log) = &self.log else { unreachable!("the record was looked up") };
        let Cursor { offset, position, .. } = cursor;
        match log.segment.locate(&*shared.disk, &*log.file, offset, visible) {
            Ok(_) => Error::Damaged { path: log.segment.path(Kind::Log), position, offset, flaw },
            Err(error) => missing_or(shared, &log.segment, offset, error),
        }
    }
}

/// Bytes that a look-up reads where the index does not tell how many there are to the record behind.
pub(super) const LOOK_BYTES: u64 = 4096;

/// Where a segment ends before `offset` and another begins behind it, records are missing, not damaged.
fn missing_or(shared: &Shared, segment: &Segment, offset: u64, error: Error) -> Error {
    match (&error, shared.segment_after(segment.base())) {
        (Error::Damaged { offset: from, position, .. }, Some(next)) if *position == segment.durable() && *from <= offset => {
            Error::RecordsMissing { path: shared.dir.to_path_buf(), from: *from, to: next.base() }
        }
        _ => error,
    }
}
