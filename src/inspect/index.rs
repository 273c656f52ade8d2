//! Checks an index file against its log while that is walked, in constant memory.
//!
//! The entries of a sound file come in the order of the records, so one walk serves log and indexes. An entry out of that
//! order is looked up by a walk of its own, from the nearest of some records whose places are kept.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::finding::{Code, Find, Finding, Severity};
use crate::error::{Error, Result};
use crate::io::transfer::read_exact_at;
use crate::io::{Disk, File, Open, is_no_file};
use crate::record::{to_u64, to_usize};
use crate::segment::{ENTRY_BYTES, Found, Kind, Name, Scanner, Step};

/// Bytes of a file read at once, whole entries.
const CHUNK: u64 = 64 << 10;

/// So many findings of one file are told. Behind these it is no index any more, and telling all would take as much memory as it.
const MAX_FINDINGS: usize = 1000;

/// How many records' places are kept at most.
const MAX_SAMPLES: usize = 1 << 16;

/// Finds records that the walk has passed.
pub(super) struct Locator<'a> {
    log: &'a dyn File,
    path: &'a Path,
    len: u64,
    /// Every `stride`th record.
    samples: Vec<Found>,
    stride: u64,
    seen: u64,
    scanner: Option<Scanner<'a>>,
}

impl<'a> Locator<'a> {
    /// For a log of `len` bytes, not opened for direct I/O.
    pub(super) fn new(log: &'a dyn File, path: &'a Path, len: u64) -> Self {
        Self { log, path, len, samples: Vec::new(), stride: 1, seen: 0, scanner: None }
    }

    /// The walk passed this record.
    pub(super) fn note(&mut self, found: &Found) {
        if self.seen.is_multiple_of(self.stride) {
            self.samples.push(*found);
        }
        self.seen += 1;
        if self.samples.len() == MAX_SAMPLES {
            let mut keep = false;
            self.samples.retain(|_| {
                keep = !keep;
                keep
            });
            self.stride *= 2;
        }
    }

    /// The record of that offset, which the walk has passed.
    fn find(&mut self, offset: u64) -> Result<Option<Found>> {
        let Some(sample) = self.samples[..self.samples.partition_point(|sample| sample.offset <= offset)].last() else { return Ok(None) };
        let near = |scanner: &Scanner<'_>| (sample.offset..=offset).contains(&scanner.offset());
        if !self.scanner.as_ref().is_some_and(near) {
            self.scanner = Some(Scanner::new(self.log, self.path, sample.position, sample.offset, self.len));
        }
        let scanner = self.scanner.as_mut().expect("made above");
        loop {
            match scanner.next()? {
                Step::Record(found) if found.offset == offset => return Ok(Some(found)),
                Step::Record(_) => {}
                // It was a record when the walk passed it: the file changes under our eyes.
                Step::End | Step::Flawed(_) => return Ok(None),
            }
        }
    }
}

/// One index file while its log is walked.
pub(super) struct IndexCheck {
    path: PathBuf,
    kind: Kind,
    base: u64,
    is_last: bool,
    file: Arc<dyn File>,
    pub(super) len: u64,
    /// Everything from here on is zeros.
    data_end: u64,
    /// The next entry.
    at: u64,
    chunk: Vec<u8>,
    chunk_at: u64,
    before: Option<(u64, u64)>,
    interval: Option<u32>,
    done: bool,
    findings: Vec<Finding>,
}

impl IndexCheck {
    /// Measures the file: what it holds now is checked, and only that. None if there is no such file.
    pub(super) fn open(disk: &dyn Disk, dir: &Path, base: u64, kind: Kind, is_last: bool) -> Result<Option<Self>> {
        let path = dir.join(Name { base, kind }.to_string());
        let file = match disk.open(&path, Open::READ) {
            Err(error) if is_no_file(&error) => return Ok(None),
            file => file.map_err(Error::io("open", &path))?,
        };
        let len = file.len().map_err(Error::io("measure", &path))?;
        let data_end = crate::segment::data_end(&*file, 0..len).map_err(Error::io("read", &path))?;
        let (chunk, findings) = (Vec::new(), Vec::new());
        Ok(Some(Self {
            path,
            kind,
            base,
            is_last,
            file,
            len,
            data_end,
            at: 0,
            chunk,
            chunk_at: 0,
            before: None,
            interval: None,
            done: false,
            findings,
        }))
    }

    /// The walk comes to this record; `passed` has those before it, and this one.
    pub(super) fn pass(&mut self, record: &Found, passed: &mut Locator<'_>) -> Result<()> {
        while let Some((offset, second)) = self.peek()? {
            if offset > record.offset {
                break;
            }
            let found = if offset == record.offset { Some(*record) } else { self.look_up(offset, passed)? };
            self.judge(offset, second, found);
        }
        Ok(())
    }

    /// The walk came to the end of the log, where `end` would be the next offset. Gives what was found, and how far the first two
    /// entries are apart.
    pub(super) fn finish(mut self, end: u64, passed: &mut Locator<'_>) -> Result<(Vec<Finding>, Option<u32>)> {
        while let Some((offset, second)) = self.peek()? {
            let found = if offset < end { self.look_up(offset, passed)? } else { None };
            self.judge(offset, second, found);
        }
        let odd = self.len % ENTRY_BYTES;
        if odd != 0 {
            self.add(Find::error(Code::PartialEntry, self.len - odd, format!("{odd} bytes are no entry")));
        }
        if end > self.base && self.len < ENTRY_BYTES {
            self.add(Find::error(Code::EmptyIndex, 0, format!("the log holds {} records, the index no entry", end - self.base)));
        }
        Ok((self.findings, self.interval))
    }

    fn look_up(&self, offset: u64, passed: &mut Locator<'_>) -> Result<Option<Found>> {
        if offset < self.base { Ok(None) } else { passed.find(offset) }
    }

    /// The next entry that is one. Entries of zeros are passed, or end the list.
    fn peek(&mut self) -> Result<Option<(u64, u64)>> {
        while !self.done && self.at + ENTRY_BYTES <= self.len {
            let entry = self.entry()?;
            let is_first = self.at == 0 && self.base == 0;
            if entry != (0, 0) || is_first {
                return Ok(Some(entry));
            }
            let rest_is_zero = self.at >= self.data_end;
            let severity = if self.is_last && rest_is_zero { Severity::Info } else { Severity::Error };
            self.add(Find { severity, ..Find::error(Code::ZeroEntry, self.at, "an entry of zeros: space that was not written") });
            self.done |= rest_is_zero;
            self.at += ENTRY_BYTES;
        }
        Ok(None)
    }

    fn entry(&mut self) -> Result<(u64, u64)> {
        if self.at < self.chunk_at || self.at + ENTRY_BYTES > self.chunk_at + to_u64(self.chunk.len()) {
            self.chunk.resize(to_usize((self.len - self.at).min(CHUNK)), 0);
            self.chunk_at = self.at;
            read_exact_at(&*self.file, &mut self.chunk, self.at).map_err(Error::io("read", &self.path))?;
        }
        let from = to_usize(self.at - self.chunk_at);
        let word = |at: usize| u64::from_be_bytes(self.chunk[at..at + 8].try_into().expect("8 bytes of an entry"));
        Ok((word(from), word(from + 8)))
    }

    /// Says what is wrong with the entry at the current place, and goes on to the next.
    fn judge(&mut self, offset: u64, second: u64, found: Option<Found>) {
        let at = self.at;
        self.at += ENTRY_BYTES;
        let is_index = self.kind == Kind::Index;
        let told = match found {
            None if offset < self.base => Some((Code::EntryBeforeBase, format!("offset {offset}, the segment begins with {}", self.base))),
            None => Some((Code::EntryPastLog, format!("offset {offset} is none of the log's"))),
            Some(record) if is_index && record.position != second => {
                Some((Code::WrongPosition, format!("the record {offset} is at {}, the entry says {second}", record.position)))
            }
            Some(record) if !is_index && record.timestamp != second => {
                Some((Code::WrongTimestamp, format!("the record {offset} has {}, the entry says {second}", record.timestamp)))
            }
            Some(_) => None,
        };
        if let Some((code, sentence)) = told {
            self.add(Find::error(code, at, sentence));
        }
        if let Some((before, second_before)) = self.before {
            if self.interval.is_none() {
                self.interval =
                    offset.checked_sub(before).and_then(|interval| u32::try_from(interval).ok()).filter(|&interval| interval > 0);
            }
            if offset <= before {
                self.add(Find::error(Code::OffsetNotIncreasing, at, format!("offset {offset} after {before}")));
            }
            if is_index && second <= second_before {
                self.add(Find::error(Code::PositionNotIncreasing, at, format!("position {second} after {second_before}")));
            }
            if !is_index && second < second_before {
                self.add(Find::error(Code::TimestampNotMonotonic, at, format!("timestamp {second} after {second_before}")));
            }
        }
        self.before = Some((offset, second));
    }

    fn add(&mut self, find: Find) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(find.of(&self.path));
        } else if self.findings.len() == MAX_FINDINGS {
            self.findings.push(Find::error(Code::MoreFindings, find.position, "and more, which are not told").of(&self.path));
            self.done = true;
        }
    }
}
