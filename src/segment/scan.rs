//! Walking the records of a log, in constant memory whatever the lengths in it claim.

use std::path::Path;

use crc32fast::Hasher;

use super::WINDOW;
use crate::error::{Error, Result};
use crate::io::File;
use crate::io::transfer::read_exact_at;
use crate::record::{Flaw, HEADER_BYTES, Header, to_u64, to_usize};

/// Bytes of a scanner's first read; each later one is four times as large, up to a window.
const FIRST_WINDOW: u64 = 4096;

/// A record that passed all four checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) offset: u64,
    pub(crate) position: u64,
    pub(crate) timestamp: u64,
}

/// What lies at the scanner's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Record(Found),
    /// Nothing but zeros up to the end.
    End,
    Flawed(Flaw),
}

/// Reads a log record by record, from a record whose position and offset are known.
pub(crate) struct Scanner<'a> {
    file: &'a dyn File,
    path: &'a Path,
    position: u64,
    offset: u64,
    end: u64,
    window: Vec<u8>,
    /// Where in the file the window starts.
    window_at: u64,
    /// Bytes to read next time: a look-up wants one header, a scan everything.
    ahead: u64,
    /// Bytes read so far.
    read: u64,
}

impl<'a> Scanner<'a> {
    /// Starts at byte `position`, where the record `offset` is expected, and treats byte `end` as the end of the file.
    pub(crate) fn new(file: &'a dyn File, path: &'a Path, position: u64, offset: u64, end: u64) -> Self {
        Self { file, path, position, offset, end, window: Vec::new(), window_at: position, ahead: FIRST_WINDOW, read: 0 }
    }

    /// Where the next record is expected.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Which record is expected next.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes of the file it has read.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Checks the record at the current place, and steps past it if it is one.
    pub(crate) fn next(&mut self) -> Result<Step> {
        let header = match self.peek()? {
            Ok(header) => header,
            Err(flaw) => return self.end_or(flaw),
        };
        let Some(following) = self.offset.checked_add(1) else {
            // The last offset that 64 bits hold: no partition gets there, so it is no record of one.
            return self.end_or(Flaw::OffsetGap { found: self.offset, expected: self.offset });
        };
        let computed = self.checksum(&header)?;
        if computed != header.crc {
            return self.end_or(Flaw::BadChecksum { stored: header.crc, computed });
        }
        let found = Found { offset: self.offset, position: self.position, timestamp: header.timestamp };
        self.position += header.record_bytes();
        self.offset = following;
        Ok(Step::Record(found))
    }

    /// The header at the current place, if it passes the checks that concern it.
    pub(crate) fn peek(&mut self) -> Result<Result<Header, Flaw>> {
        let left = self.end.saturating_sub(self.position);
        let expected = self.offset;
        let bytes = self.bytes(self.position, to_usize(left.min(to_u64(HEADER_BYTES))))?;
        Ok(Header::check(bytes, left, expected))
    }

    /// Names the place and what is wrong with it.
    pub(crate) fn damaged(&self, flaw: Flaw) -> Error {
        Error::Damaged { path: self.path.to_owned(), position: self.position, offset: self.offset, flaw }
    }

    /// What a clean end means where a record must be.
    pub(crate) fn flaw_of_missing(&self) -> Flaw {
        Flaw::TornHeader { left: self.end.saturating_sub(self.position).min(to_u64(HEADER_BYTES) - 1) }
    }

    fn end_or(&mut self, flaw: Flaw) -> Result<Step> {
        let mut at = self.position;
        while at < self.end {
            let len = to_usize((self.end - at).min(to_u64(WINDOW)));
            if self.bytes(at, len)?.iter().any(|&byte| byte != 0) {
                return Ok(Step::Flawed(flaw));
            }
            at += to_u64(len);
        }
        Ok(Step::End)
    }

    /// The checksum of the record at the current place, window by window.
    fn checksum(&mut self, header: &Header) -> Result<u32> {
        let mut hasher = Hasher::new();
        hasher.update(&header.timestamp.to_be_bytes());
        let mut at = self.position + to_u64(HEADER_BYTES);
        let end = self.position + header.record_bytes();
        while at < end {
            let len = to_usize((end - at).min(to_u64(WINDOW)));
            hasher.update(self.bytes(at, len)?);
            at += to_u64(len);
        }
        Ok(hasher.finalize())
    }

    /// `len` bytes of the file at `position`, at most a window, all before the end.
    fn bytes(&mut self, position: u64, len: usize) -> Result<&[u8]> {
        let window_end = self.window_at + to_u64(self.window.len());
        if position < self.window_at || position + to_u64(len) > window_end {
            let bytes = self.ahead.max(to_u64(len)).min(self.end - position);
            self.ahead = (self.ahead * 4).min(to_u64(WINDOW));
            self.window.resize(to_usize(bytes), 0);
            self.window_at = position;
            if let Err(error) = read_exact_at(self.file, &mut self.window, position) {
                self.window.clear();
                return Err(Error::io("read", self.path)(error));
            }
            self.read += bytes;
        }
        let start = to_usize(position - self.window_at);
        Ok(&self.window[start..start + len])
    }
}
