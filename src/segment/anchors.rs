//! Finding records around damage, by those index entries that the log confirms: anchors.
//!
//! A log without separators tells where a record begins only by the record before it. Behind a damage, what an index entry leads to is a record
//! again if it carries the entry's offset and passes its checks. Bytes are never searched for what looks like a record: a value may hold an
//! encoded one.
//!
//! Between a damage and the anchor behind it the lengths in the headers are followed, and believed if each header but the first has the
//! offset that is due and the last record ends where the anchor begins. A wrong length cannot do that: it would have to be made up for by
//! another one, in a record that shows the right offset in the wrong place.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::index::{self, ENTRY_BYTES};
use super::scan::{Scanner, Step};
use super::{Kind, Segment, walk};
use crate::error::{Error, Result};
use crate::io::{Disk, File, Open, is_no_file};
use crate::record::{HEADER_BYTES, to_u64, to_usize};

/// A record, and where it begins in its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset: u64,
    pub(crate) position: u64,
}

/// What was found from some record on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NextWhole {
    /// The first whole record; none in this log.
    pub(crate) place: Option<Place>,
    /// Where the damage begins that lies between, if one does.
    pub(crate) damaged_from: Option<u64>,
}

/// The index entries of one segment, against its log.
pub(crate) struct Anchors<'a> {
    log: &'a dyn File,
    path: PathBuf,
    base: u64,
    /// One past the last byte of the log that counts.
    end: u64,
    index: Option<Arc<dyn File>>,
    in_file: u64,
    /// Positions of records that are not in the file yet.
    pending: Vec<Place>,
}

impl<'a> Anchors<'a> {
    /// Those of records before byte `end` of `log`, as far as nobody cut it.
    pub(crate) fn new(disk: &dyn Disk, segment: &Segment, log: &'a dyn File, end: u64) -> Self {
        let pending = segment.pending().iter().map(|entry| Place { offset: entry.offset, position: entry.position }).collect();
        let path = segment.path(Kind::Index);
        let opened = disk.open(&path, Open::READ).and_then(|file| written(&*file).map(|count| (file, count)));
        let (index, in_file) = match opened {
            Ok((file, count)) => (Some(file), count),
            Err(error) => {
                if !is_no_file(&error) {
                    tracing::warn!(%error, path = %path.display(), "the index cannot be read; scanning the segment instead");
                }
                (None, 0)
            }
        };
        let end = log.len().map_or(end, |len| end.min(len));
        // More entries than the log has room for records cannot be right, however long somebody made the file.
        let in_file = in_file.min(end / to_u64(HEADER_BYTES));
        Self { log, path: segment.path(Kind::Log), base: segment.base(), end, index, in_file, pending }
    }

    /// One past the last byte of the log that counts and is there.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Finds the position of the record `offset`, which lies before the end, by a walk from the anchor before it, or else by an entry of its own that
    /// leads to its number: the record itself may be damaged. Behind a damage it is found as [`Self::next_whole`] finds it.
    ///
    /// # Errors
    /// [`Error::Damaged`] with the first place behind the anchor where the walk meets something that is not the next record.
    pub(crate) fn locate(&self, offset: u64) -> Result<u64> {
        let from = self.last_before(offset)?;
        let walked = walk(self.log, &self.path, (from.offset, from.position), offset, self.end);
        match walked {
            Err(error @ Error::Damaged { .. }) => match self.own_entry(offset)? {
                Some(position) => Ok(position),
                None => {
                    let place = self.next_whole(offset, u64::MAX)?.place.filter(|place| place.offset == offset);
                    place.map(|place| place.position).ok_or(error)
                }
            },
            result => result,
        }
    }

    /// The first whole record from `offset` on that can be told; `end_offset` is the one behind the last of this log.
    pub(crate) fn next_whole(&self, offset: u64, end_offset: u64) -> Result<NextWhole> {
        let mut from = self.last_before(offset)?;
        let mut damaged_from = None;
        loop {
            let mut scanner = self.scanner(from);
            let damage = loop {
                let place = Place { offset: scanner.offset(), position: scanner.position() };
                match scanner.next()? {
                    Step::Record(_) if place.offset >= offset => return Ok(NextWhole { place: Some(place), damaged_from }),
                    Step::Record(_) => {}
                    Step::End => {
                        // Zeros are no records either.
                        let zeros = Some(place.position).filter(|&position| position < self.end);
                        return Ok(NextWhole { place: None, damaged_from: damaged_from.or(zeros) });
                    }
                    Step::Flawed(_) => break place,
                }
            };
            damaged_from.get_or_insert(damage.position);
            let anchor = self.first_behind(damage)?;
            let found = self.follow_lengths(damage, anchor, end_offset, offset)?;
            match found.or(anchor) {
                // That damage lies before what was asked for.
                Some(place) if place.offset <= offset => (from, damaged_from) = (place, None),
                place => return Ok(NextWhole { place, damaged_from }),
            }
        }
    }

    /// The last anchor at or before `offset`; the beginning of the log, unconfirmed, if there is none.
    fn last_before(&self, offset: u64) -> Result<Place> {
        for number in (0..self.count_below(offset.saturating_add(1))).rev() {
            let Some(place) = self.entry(number) else { break };
            if place.offset <= offset && self.confirms(place)? {
                return Ok(place);
            }
        }
        Ok(Place { offset: self.base, position: 0 })
    }

    /// The first anchor behind a damage.
    fn first_behind(&self, damage: Place) -> Result<Option<Place>> {
        for number in self.count_below(damage.offset.saturating_add(1)).. {
            let Some(place) = self.entry(number) else { break };
            if place.offset > damage.offset && place.position > damage.position && self.confirms(place)? {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    /// Follows the lengths from a damaged record to the anchor, or to the end, and gives the first whole record from `wanted` on, if
    /// they lead there.
    fn follow_lengths(&self, damage: Place, anchor: Option<Place>, end_offset: u64, wanted: u64) -> Result<Option<Place>> {
        let (goal, limit) = anchor.map_or((end_offset, self.end), |anchor| (anchor.offset, anchor.position));
        let mut scanner = self.scanner(damage);
        let mut found = None;
        while scanner.offset() < goal && scanner.position() < limit {
            let place = Place { offset: scanner.offset(), position: scanner.position() };
            let header = if place == damage { scanner.unchecked_header()? } else { scanner.peek()?.ok() };
            let Some(header) = header.filter(|header| header.record_bytes() <= limit - place.position) else { return Ok(None) };
            if found.is_none() && place.offset >= wanted && place != damage && scanner.is_whole(&header)? {
                found = Some(place);
            }
            scanner.step_over(&header);
        }
        let leads_there = match anchor {
            Some(anchor) => scanner.position() == anchor.position && scanner.offset() == anchor.offset,
            None => scanner.position() == self.end || scanner.peek()?.is_ok(),
        };
        Ok(found.filter(|_| leads_there))
    }

    /// Where the entry of the record `offset` leads, if there is one and the number stands there.
    fn own_entry(&self, offset: u64) -> Result<Option<u64>> {
        let own = self.entry(self.count_below(offset)).filter(|place| place.offset == offset && place.position < self.end);
        let Some(place) = own else { return Ok(None) };
        let header = self.scanner(place).unchecked_header()?;
        Ok(header.filter(|header| header.offset == offset).map(|_| place.position))
    }

    /// Whether a whole record of that offset is there.
    fn confirms(&self, place: Place) -> Result<bool> {
        if place.offset < self.base || place.position >= self.end {
            return Ok(false);
        }
        let mut scanner = self.scanner(place);
        let header = scanner.peek()?;
        header.map_or(Ok(false), |header| scanner.is_whole(&header))
    }

    fn scanner(&self, from: Place) -> Scanner<'_> {
        Scanner::new(self.log, &self.path, from.position, from.offset, self.end)
    }

    /// How many entries are of records below `offset`, if they are in order.
    fn count_below(&self, offset: u64) -> u64 {
        let pending = || to_u64(self.pending.partition_point(|place| place.offset < offset));
        let Some(file) = &self.index else { return pending() };
        let below = self.told(index::count_below(&**file, self.in_file, offset)).unwrap_or(0);
        if below < self.in_file { below } else { below + pending() }
    }

    /// The entry of that number; none past the last one, or where the index cannot be read.
    fn entry(&self, number: u64) -> Option<Place> {
        match &self.index {
            Some(file) if number < self.in_file => {
                let (offset, position) = self.told(index::entry_at(&**file, number))?;
                Some(Place { offset, position })
            }
            _ => self.pending.get(to_usize(number - self.in_file)).copied(),
        }
    }

    /// An index that cannot be read is as good as none.
    fn told<T>(&self, read: io::Result<T>) -> Option<T> {
        read.inspect_err(|error| tracing::warn!(%error, path = %self.path.display(), "the index of a log cannot be read")).ok()
    }
}

/// How many entries an index file has before preallocated room: entries of zeros past the first.
fn written(file: &dyn File) -> io::Result<u64> {
    let count = file.len()? / ENTRY_BYTES;
    let is_room = |number: u64| -> io::Result<bool> { Ok(number > 0 && index::entry_at(file, number)? == (0, 0)) };
    if count == 0 || !is_room(count - 1)? {
        return Ok(count);
    }
    let (mut low, mut high) = (0, count - 1);
    while low < high {
        let middle = low + (high - low) / 2;
        if is_room(middle)? { high = middle } else { low = middle + 1 }
    }
    Ok(low)
}
