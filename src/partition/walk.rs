//! A scan from one record of a log to its end, and what it leads to.

use std::path::Path;
use std::sync::Arc;

use super::open::End;
use crate::error::{Error, Result};
use crate::io::File;
use crate::record::Flaw;
use crate::segment::{self, Found, IndexEntry, Scanner, Segment, Step};

/// The log that is walked, as it is, and what its records are to be indexed by.
#[derive(Clone, Copy)]
pub(super) struct Way<'a> {
    pub(super) log: &'a dyn File,
    /// Opened for direct I/O.
    pub(super) direct: bool,
    pub(super) path: &'a Path,
    pub(super) base: u64,
    /// Treated as the end of the file.
    pub(super) len: u64,
    pub(super) interval: u32,
}

/// What a scan to the end of a log found.
pub(super) struct Walk {
    /// Where the last record ends, and which offset would be next.
    pub(super) position: u64,
    pub(super) next_offset: u64,
    pub(super) last_timestamp: u64,
    /// What the records are indexed by, those past the start.
    pub(super) entries: Vec<IndexEntry>,
    /// Why it ended, if not by nothing but zeros.
    pub(super) flaw: Option<Flaw>,
    /// The timestamp of the record that it began with, if there is one.
    pub(super) first_timestamp: Option<u64>,
    /// Whether a record begins, or the log ends, at the place and offset that it was to pass through.
    pub(super) passed: bool,
    /// Bytes that were read.
    pub(super) read: u64,
}

impl<'a> Way<'a> {
    /// Walks the whole log.
    pub(super) fn whole(self) -> Result<Walk> {
        self.walk((self.base, 0), None)
    }

    /// Walks from the record `offset` at `position` on.
    pub(super) fn from(self, offset: u64, position: u64) -> Result<Walk> {
        self.walk((offset, position), None)
    }

    /// Walks on from a record that is indexed, and so has the latest timestamp of those up to there. Only records behind it
    /// are to be indexed. On the way it is to come past `through`, an offset and its position, and the entry is to be right.
    pub(super) fn on_from(self, entry: &IndexEntry, through: (u64, u64)) -> Result<Walk> {
        let mut walk = self.walk((entry.offset, entry.position), Some(through))?;
        walk.entries.retain(|found| found.offset > entry.offset);
        walk.passed &= walk.first_timestamp == Some(entry.timestamp);
        Ok(walk)
    }

    fn walk(self, from: (u64, u64), through: Option<(u64, u64)>) -> Result<Walk> {
        let scanner = Scanner::new(self.log, self.path, from.1, from.0, self.len);
        let mut scanner = if self.direct { scanner.in_blocks() } else { scanner };
        let mut entries = Vec::new();
        let (mut first_timestamp, mut last_timestamp) = (None, 0);
        let mut passed = through.is_none();
        let flaw = loop {
            passed |= through == Some((scanner.offset(), scanner.position()));
            match scanner.next()? {
                Step::Record(Found { offset, position, timestamp }) => {
                    // Timestamps in an index never decrease; a record that another writer stamped earlier is left out of it.
                    if segment::is_indexed(self.base, offset, self.interval) && timestamp >= last_timestamp {
                        entries.push(IndexEntry { offset, position, timestamp });
                    }
                    first_timestamp.get_or_insert(timestamp);
                    last_timestamp = timestamp.max(last_timestamp);
                }
                Step::End => break None,
                Step::Flawed(flaw) => break Some(flaw),
            }
        };
        let (position, next_offset, read) = (scanner.position(), scanner.offset(), scanner.bytes_read());
        Ok(Walk { position, next_offset, last_timestamp, entries, flaw, first_timestamp, passed, read })
    }

    /// What is wrong where the walk ended and records should follow.
    pub(super) fn damage(self, walk: &Walk) -> Error {
        let scanner = Scanner::new(self.log, self.path, walk.position, walk.next_offset, self.len);
        scanner.damaged(walk.flaw.unwrap_or_else(|| scanner.flaw_of_missing()))
    }
}

impl Walk {
    /// The end of a segment whose log ends at byte `end`.
    pub(super) fn end(&self, dir: &Arc<Path>, base: u64, end: u64) -> End {
        let segment = Arc::new(Segment::new(Arc::clone(dir), base, end));
        End { segment, next_offset: self.next_offset, last_timestamp: self.last_timestamp }
    }
}
