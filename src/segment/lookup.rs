//! From an offset to a place in the log: one read of the index file, where its entries are evenly spaced.

use std::io;
use std::sync::Arc;

use super::index::{self, ENTRY_BYTES};
use super::{Kind, Segment};
use crate::io::transfer::read_up_to_at;
use crate::io::{Disk, File, Open, is_no_file};
use crate::record::to_usize;

/// A record at or before the one asked for. The log must confirm it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hint {
    pub(crate) offset: u64,
    pub(crate) position: u64,
    /// Where the record of the next entry begins, which is behind the one asked for.
    pub(crate) next: Option<u64>,
}

/// A segment's index file, open from the first look-up on.
#[derive(Debug)]
pub(crate) struct Lookup {
    file: Option<Arc<dyn File>>,
    /// How many records the entries are apart, as far as is known.
    interval: u64,
}

impl Lookup {
    /// For a segment whose index was written at that interval, or at another one.
    pub(crate) fn new(interval: u32) -> Self {
        Self { file: None, interval: u64::from(interval.max(1)) }
    }

    /// The last indexed record at or before `offset`; none if the index does not help.
    pub(crate) fn find(&mut self, disk: &dyn Disk, segment: &Segment, offset: u64) -> Option<Hint> {
        {
            let pending = segment.pending();
            let behind = pending.partition_point(|entry| entry.offset <= offset);
            if let Some(entry) = pending[..behind].last() {
                let next = pending.get(behind).map(|next| next.position);
                return Some(Hint { offset: entry.offset, position: entry.position, next });
            }
        }
        match self.find_in_file(disk, segment, offset) {
            Ok(hint) => hint,
            Err(error) if is_no_file(&error) => None,
            Err(error) => {
                tracing::warn!(%error, path = %segment.path(Kind::Index).display(), "the index cannot be read; scanning the segment instead");
                None
            }
        }
    }

    fn find_in_file(&mut self, disk: &dyn Disk, segment: &Segment, offset: u64) -> io::Result<Option<Hint>> {
        let file = match &self.file {
            Some(file) => Arc::clone(file),
            None => {
                let file = disk.open(&segment.path(Kind::Index), Open::READ)?;
                self.file = Some(Arc::clone(&file));
                file
            }
        };
        if let Some(hint) = self.compute(&*file, segment.base(), offset)? {
            return Ok(Some(hint));
        }
        let found = index::lookup(&*file, segment.base(), offset)?;
        // What the first two entries say may serve the next time.
        if let (Ok((first, _)), Ok((second, _))) = (index::entry_at(&*file, 0), index::entry_at(&*file, 1))
            && let Some(interval) = second.checked_sub(first).filter(|&interval| interval > 0)
        {
            self.interval = interval;
        }
        Ok(found.map(|(offset, position)| Hint { offset, position, next: None }))
    }

    /// The entry in the place where it stands if the interval is what it is held for, and the one behind it.
    fn compute(&self, file: &dyn File, base: u64, offset: u64) -> io::Result<Option<Hint>> {
        let Some(number) = offset.checked_sub(base).map(|behind| behind / self.interval) else { return Ok(None) };
        let mut bytes = [0; 2 * to_usize(ENTRY_BYTES)];
        let Some(place) = number.checked_mul(ENTRY_BYTES) else { return Ok(None) };
        let read = read_up_to_at(file, &mut bytes, place)?;
        let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 of 32 bytes"));
        if read < to_usize(ENTRY_BYTES) || word(0) != base + number * self.interval {
            return Ok(None);
        }
        let next = (read == bytes.len() && word(16) > offset).then(|| word(24));
        Ok(Some(Hint { offset: word(0), position: word(8), next }))
    }
}
