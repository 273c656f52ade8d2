//! Reading the records of a directory, or of one log, without a lock: up to the end, or to what is no record.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::examine::{has_moved, heals, open_log, scanner};
use super::listing::Listing;
use crate::error::{Error, Result};
use crate::io::transfer::read_up_to_at;
use crate::io::{Disk, File, Open};
use crate::partition::OwnedRecord;
use crate::record::{Flaw, HEADER_BYTES, Header, to_u64};
use crate::segment::{Kind, Name, Segment, Step};

/// Bytes of records that are read ahead: what waits to be taken is so much, and at most one record more.
const AHEAD: u64 = 256 << 10;

/// A record, and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredRecord {
    /// The record.
    pub record: OwnedRecord,
    /// The base offset of its segment.
    pub base: u64,
    /// Where it begins in the segment's log, in bytes.
    pub position: u64,
}

/// The records of a partition's directory, or of one log, in order.
///
/// After an error there is nothing more; the error says where and why. Without one, [`Self::place`] says where the log ends. A
/// record takes no more memory than it has bytes, all of which were checked before; what a damaged length claims takes none.
#[derive(Debug)]
pub struct StoredRecords {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    patience: Duration,
    from: u64,
    /// The logs that follow, and their bases.
    left: VecDeque<(PathBuf, u64)>,
    at: Option<At>,
    /// Records that wait to be taken.
    waiting: VecDeque<StoredRecord>,
    /// What ended the reading, until it is told.
    error: Option<Error>,
    ended: bool,
}

/// Where the next record is expected.
#[derive(Debug)]
struct At {
    path: PathBuf,
    log: (Arc<dyn File>, bool),
    base: u64,
    position: u64,
    offset: u64,
}

/// The place where a reading is: at its end, that of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// The log.
    pub path: PathBuf,
    /// Where the next record would begin, in bytes.
    pub position: u64,
    /// The offset that it would have.
    pub offset: u64,
}

impl StoredRecords {
    /// The records from offset `from` on in a partition's directory.
    pub(super) fn of_partition(disk: &Arc<dyn Disk>, dir: &Path, from: u64, patience: Duration) -> Result<Self> {
        let bases = Listing::of(&**disk, dir)?.bases();
        let first = bases.partition_point(|&base| base <= from).saturating_sub(1);
        let left = bases[first..].iter().map(|&base| (dir.join(Name { base, kind: Kind::Log }.to_string()), base)).collect();
        Ok(Self::new(disk, dir, from, patience, left))
    }

    /// The records from offset `from` on of one file: a log, or bytes that were cut from one, which begin with a record.
    pub(super) fn of_log(disk: &Arc<dyn Disk>, path: &Path, from: u64, patience: Duration) -> Result<Self> {
        let named = path.file_name().and_then(Name::parse).filter(|name| name.kind == Kind::Log).map(|name| name.base);
        let base = match named {
            Some(base) => base,
            None => first_offset(&**disk, path).map_err(Error::io("read", path))?,
        };
        let dir = path.parent().unwrap_or(Path::new(""));
        Ok(Self::new(disk, dir, from, patience, VecDeque::from([(path.to_owned(), base)])))
    }

    fn new(disk: &Arc<dyn Disk>, dir: &Path, from: u64, patience: Duration, left: VecDeque<(PathBuf, u64)>) -> Self {
        Self {
            disk: Arc::clone(disk),
            dir: dir.to_owned(),
            patience,
            from,
            left,
            at: None,
            waiting: VecDeque::new(),
            error: None,
            ended: false,
        }
    }

    /// Where the reading is, once it has begun; once it has ended, where the log ends. None where there is no log.
    pub fn place(&self) -> Option<Place> {
        self.at.as_ref().map(|at| match self.waiting.front() {
            Some(next) if next.base == at.base => Place { path: at.path.clone(), position: next.position, offset: next.record.offset },
            _ => Place { path: at.path.clone(), position: at.position, offset: at.offset },
        })
    }

    /// Reads some records, or comes to an end.
    fn fill(&mut self) -> Result<()> {
        let mut at = match self.at.take() {
            Some(at) => at,
            None => match self.left.pop_front() {
                Some((path, base)) => self.begin(path, base)?,
                None => {
                    self.ended = true;
                    return Ok(());
                }
            },
        };
        let read = self.read_some(&mut at);
        let is_over = match &read {
            Ok(is_over) => *is_over,
            Err(_) => false,
        };
        let next = (at.offset, self.left.front().cloned());
        match next {
            (expected, Some((path, base))) if is_over => {
                self.at = Some(at);
                self.check_follows(expected, &path, base)?;
                self.left.pop_front();
                self.at = Some(self.begin(path, base)?);
            }
            _ => {
                self.ended = is_over;
                self.at = Some(at);
            }
        }
        read.map(drop)
    }

    fn check_follows(&self, expected: u64, path: &Path, base: u64) -> Result<()> {
        if base > expected {
            return Err(Error::RecordsMissing { path: self.dir.clone(), from: expected, to: base });
        }
        if base < expected {
            let flaw = Flaw::OffsetGap { found: base, expected };
            return Err(Error::Damaged { path: path.to_owned(), position: 0, offset: expected, flaw });
        }
        Ok(())
    }

    /// Opens a log, and finds the first record that is wanted of it.
    fn begin(&self, path: PathBuf, base: u64) -> Result<At> {
        let log = open_log(&*self.disk, &path)?;
        let (mut position, mut offset) = (0, base);
        let is_segment = path.file_name().and_then(Name::parse).is_some();
        if self.from > base && is_segment {
            let file = self.disk.open(&path, Open::READ).map_err(Error::io("open", &path))?;
            let len = file.len().map_err(Error::io("measure", &path))?;
            let segment = Segment::new(Arc::from(self.dir.as_path()), base, len);
            // Where that leads to nothing, reading from the start finds out why.
            if let Ok(found) = segment.locate(&*self.disk, &*file, self.from, len) {
                (position, offset) = (found, self.from);
            }
        }
        Ok(At { path, log, base, position, offset })
    }

    /// Reads records of one log, and tells whether it is over.
    fn read_some(&mut self, at: &mut At) -> Result<bool> {
        let len = at.log.0.len().map_err(Error::io("measure", &at.path))?;
        let mut scanner = scanner(&at.log, &at.path, (at.offset, at.position), len);
        let start = at.position;
        let mut read = 0;
        let outcome = loop {
            if read >= AHEAD {
                break Ok(false);
            }
            match scanner.next() {
                Ok(Step::Record(found)) if found.offset < self.from => {}
                Ok(Step::Record(found)) => {
                    let bytes = match scanner.copy(&found) {
                        Ok(bytes) => bytes,
                        Err(error) => break Err(error),
                    };
                    read += to_u64(bytes.len());
                    match OwnedRecord::decode(bytes, found.offset) {
                        Ok(record) => self.waiting.push_back(StoredRecord { record, base: at.base, position: found.position }),
                        Err(flaw) => break Err(scanner.damaged(flaw)),
                    }
                }
                Ok(Step::End) => break Ok(true),
                Ok(Step::Flawed(flaw)) => break Err(scanner.damaged(flaw)),
                Err(error) => break Err(error),
            }
        };
        (at.position, at.offset) = (scanner.position(), scanner.offset());
        match outcome {
            // A writer cut the room behind the records while it was read.
            Err(error) if has_moved(&error) && at.position > start => Ok(false),
            Err(Error::Damaged { .. }) if self.left.len() < 2 && heals(&*self.disk, &at.path, (at.offset, at.position), self.patience)? => {
                Ok(true)
            }
            outcome => outcome,
        }
    }
}

impl Iterator for StoredRecords {
    type Item = Result<StoredRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(record) = self.waiting.pop_front() {
                return Some(Ok(record));
            }
            if let Some(error) = self.error.take() {
                return Some(Err(error));
            }
            if self.ended {
                return None;
            }
            if let Err(error) = self.fill() {
                self.error = Some(error);
                self.ended = true;
            }
        }
    }
}

/// The offset in the header that a file begins with; 0 if it is too short for one.
fn first_offset(disk: &dyn Disk, path: &Path) -> io::Result<u64> {
    let mut header = [0; HEADER_BYTES];
    let read = read_up_to_at(&*disk.open(path, Open::READ)?, &mut header, 0)?;
    Ok(if read == HEADER_BYTES { Header::parse(&header).offset } else { 0 })
}
