//! From a time to an offset.

use std::mem;
use std::sync::Arc;

use super::{Checksums, LOOK_BYTES, Reader, ReaderConfig};
use crate::error::Result;
use crate::partition::{Partition, Shared};
use crate::record::{to_u64, to_usize};
use crate::segment::{Around, Segment};

/// Bytes of records that are read at once in search of a time.
const SCAN_BYTES: usize = 64 << 10;

impl Partition {
    /// The offset of the first record that was appended at `time` or later: [`Reader::offset_for_time`] by a durable reader of its own.
    ///
    /// # Errors
    /// As for that and [`Self::reader`].
    pub fn offset_for_time(&self, time: u64) -> Result<u64> {
        let config = ReaderConfig { piece_bytes: SCAN_BYTES, ..ReaderConfig::default() };
        self.reader_with(config)?.offset_for_time(time)
    }
}

impl Reader {
    /// The offset of the first record whose timestamp is `time`, in nanoseconds since 1970-01-01 UTC, or later; the end of the log, as far as the reader
    /// sees it, if there is none yet.
    ///
    /// It is exact, whatever became of the time indexes: these only tell where to look first. Records that are damaged have no time, and are passed over.
    /// Where another program wrote timestamps that go back, which the format forbids, it is the offset of some record with such a timestamp,
    /// or the end.
    ///
    /// The first look-up reads the first record of each of a few segments, as many as a binary search takes; later ones remember them.
    ///
    /// # Blocking
    /// For the device.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed), and [`Error::Io`](crate::Error::Io) where a log cannot be read at all.
    pub fn offset_for_time(&mut self, time: u64) -> Result<u64> {
        let shared = Arc::clone(&self.partition.0.shared);
        shared.check_open()?;
        // A damaged timestamp would lead astray.
        let checksums = mem::replace(&mut self.config.checksums, Checksums::Verified);
        let found = loop {
            self.forget();
            self.see_cuts(&shared, u64::MAX)?;
            let first = shared.first_offset();
            let found = self.search(&shared, time, first);
            // The segments that it looked into may have been removed meanwhile, or cut.
            let changed = match &found {
                Ok(_) => self.cuts != shared.cuts.count(),
                Err(_) => shared.was_cut_since(self.cuts) || shared.first_offset() != first,
            };
            if !changed || shared.check_open().is_err() {
                break found;
            }
        };
        self.config.checksums = checksums;
        shared.if_still_open(found)
    }

    fn search(&mut self, shared: &Shared, time: u64, first: u64) -> Result<u64> {
        let end = self.config.visibility.end_offset(shared);
        let Neighbours { before, behind } = self.segments_around(shared, time, first, end)?;
        // The first record from there on is the answer, if none before it is.
        let high = behind.as_ref().map_or(end, |behind| behind.base().min(end));
        let Some(segment) = before else {
            return Ok(self.first_whole(first, end)?.map_or(end, |(offset, _)| offset));
        };
        // All records up to this one come before the time, if they are whole; or are not given out any more.
        let mut low = if first > segment.base() { first - 1 } else { segment.base() };
        let around = self.around(shared, &segment, behind.as_deref(), time)?;
        if let Some(hint) = around.before.filter(|hint| (low..high).contains(hint)) {
            let most = around.behind.unwrap_or(high).min(hint.saturating_add(shared.config.index_interval.into()));
            match self.scan(hint, most, high, time) {
                Scanned::Found(offset) => return Ok(offset),
                Scanned::UpTo(offset) => low = offset,
                Scanned::Nothing => {}
            }
        }
        self.bisect(low, high, end, time)
    }

    /// The last segment that begins before the time, and the one behind it.
    fn segments_around(&mut self, shared: &Shared, time: u64, first: u64, end: u64) -> Result<Neighbours> {
        // Segments in which no record is whole, and so no answer.
        let mut passed = Vec::new();
        loop {
            let missing = match shared.with_segments(|segments| split(segments, end, &passed, time)) {
                Ok(found) => return Ok(found),
                Err(missing) => missing,
            };
            let next = shared.segment_after(missing.base()).map_or(end, |next| next.base());
            match self.first_whole(missing.base().max(first), next.min(end))? {
                Some((_, time)) => missing.note_first_time(time),
                None => passed.push(missing.base()),
            }
        }
    }

    /// What the time index of a segment says, and the times at its ends, if they are known.
    fn around(&mut self, shared: &Shared, segment: &Arc<Segment>, behind: Option<&Segment>, time: u64) -> Result<Around> {
        self.forget();
        self.open(shared, Arc::clone(segment))?;
        let Some(log) = &mut self.log else { unreachable!("opened above") };
        Ok(log.times.around(&*shared.disk, segment, time, segment.first_time(), behind.and_then(Segment::first_time)))
    }

    /// Looks for the first record that does not come before the time, from one that should on, up to the record `most`, which should not.
    fn scan(&mut self, from: u64, most: u64, high: u64, time: u64) -> Scanned {
        let mut scanned = Scanned::Nothing;
        let (mut next, mut bytes) = (from, to_usize(LOOK_BYTES));
        while next <= most && next < high {
            // What is damaged is passed over by the bisection.
            let Ok(records) = self.read_before(next, bytes, high) else { break };
            for record in &records {
                match scanned {
                    _ if record.timestamp < time => scanned = Scanned::UpTo(record.offset),
                    // The index lied about the first of them, so records before it may come behind the time as well.
                    Scanned::Nothing => return scanned,
                    _ => return Scanned::Found(record.offset),
                }
            }
            next = records.next_offset();
            bytes = SCAN_BYTES;
            self.first_bytes = Some(to_u64(bytes));
        }
        scanned
    }

    /// The same by bisecting the records between two: all up to `low` come before the time, none from `high` on.
    fn bisect(&mut self, mut low: u64, mut high: u64, end: u64, time: u64) -> Result<u64> {
        let (mut found, beyond) = (None, high);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match self.first_whole(middle, high)? {
                Some((offset, there)) if there < time => low = offset,
                Some((offset, _)) => (high, found) = (middle, Some(offset)),
                None => high = middle,
            }
        }
        match found {
            Some(offset) => Ok(offset),
            None => Ok(self.first_whole(beyond, end)?.map_or(end, |(offset, _)| offset)),
        }
    }

    /// Offset and timestamp of the first whole record from `offset` on and before `end`.
    fn first_whole(&mut self, offset: u64, end: u64) -> Result<Option<(u64, u64)>> {
        let (mut from, mut gone_past) = (offset, None);
        loop {
            match self.read_before(from, 1, end) {
                Ok(records) => return Ok(records.iter().next().map(|record| (record.offset, record.timestamp))),
                Err(error) if error.is_damage() && gone_past != Some(from) => {
                    from = self.skip_damaged(from)?.records.end;
                    gone_past = Some(from);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// How far a scan for a time came.
#[derive(Debug, Clone, Copy)]
enum Scanned {
    /// Not even the first record comes before it.
    Nothing,
    /// This record comes before it.
    UpTo(u64),
    /// This one is the first that does not.
    Found(u64),
}

/// Segments around a time.
struct Neighbours {
    /// The last one that begins before it.
    before: Option<Arc<Segment>>,
    behind: Option<Arc<Segment>>,
}

/// The segments around a time, of those that begin before the end, apart from those passed over; or one whose beginning must be known first.
fn split(segments: &[Arc<Segment>], end: u64, passed: &[u64], time: u64) -> Result<Neighbours, Arc<Segment>> {
    // Somebody who sees further may have noted the times of those behind it.
    let (mut low, mut high) = (0, segments.partition_point(|segment| segment.base() < end));
    while low < high {
        let middle = low + (high - low) / 2;
        let known = (middle..high).find(|&number| !passed.contains(&segments[number].base()));
        match known.map(|number| (number, segments[number].first_time())) {
            None => high = middle,
            Some((number, None)) => return Err(Arc::clone(&segments[number])),
            Some((number, Some(first))) if first < time => low = number + 1,
            Some(_) => high = middle,
        }
    }
    let before = low.checked_sub(1).map(|number| Arc::clone(&segments[number]));
    Ok(Neighbours { before, behind: segments.get(low).map(Arc::clone) })
}
