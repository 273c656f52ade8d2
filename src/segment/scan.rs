//! Walking the records of a log, in constant memory whatever the lengths in it claim.

use std::io;
use std::ops::Range;
use std::path::Path;

use crc32fast::Hasher;

use super::WINDOW;
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::transfer::{read_blocks_up_to_at, read_exact_at};
use crate::io::{BLOCK, Buffer, File};
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
    window: Window,
    /// Where in the file the window starts, and how many bytes of it are there.
    window_at: u64,
    window_len: usize,
    /// Bytes to read next time: a look-up wants one header, a scan everything.
    ahead: u64,
    /// Bytes read so far.
    read: u64,
}

impl<'a> Scanner<'a> {
    /// Starts at byte `position`, where the record `offset` is expected, and treats byte `end` as the end of the file.
    pub(crate) fn new(file: &'a dyn File, path: &'a Path, position: u64, offset: u64, end: u64) -> Self {
        Self {
            file,
            path,
            position,
            offset,
            end,
            window: Window::Bytes(Vec::new()),
            window_at: position,
            window_len: 0,
            ahead: FIRST_WINDOW,
            read: 0,
        }
    }

    /// Reads whole blocks, from a file that was opened for direct I/O.
    pub(crate) fn in_blocks(self) -> Self {
        Self { window: Window::Blocks(None), ..self }
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
        if computed != header.crc && guard::stands(Guard::RecordChecksum) {
            return self.end_or(Flaw::BadChecksum { stored: header.crc, computed });
        }
        let found = Found { offset: self.offset, position: self.position, timestamp: header.timestamp };
        self.position += header.record_bytes();
        self.offset = following;
        Ok(Step::Record(found))
    }

    /// The header at the current place, whatever it says; none if fewer bytes are left.
    pub(crate) fn unchecked_header(&mut self) -> Result<Option<Header>> {
        let left = self.end.saturating_sub(self.position);
        let bytes = self.bytes(self.position, to_usize(left.min(to_u64(HEADER_BYTES))))?;
        Ok(bytes.first_chunk().map(Header::parse))
    }

    /// Whether the checksum holds of the record at the current place, which has that header.
    pub(crate) fn is_whole(&mut self, header: &Header) -> Result<bool> {
        Ok(self.checksum(header)? == header.crc)
    }

    /// Steps past what is at the current place as if it were the next record, of that header.
    pub(crate) fn step_over(&mut self, header: &Header) {
        self.position += header.record_bytes();
        self.offset += 1;
    }

    /// The header at the current place, if it passes the checks that concern it.
    pub(crate) fn peek(&mut self) -> Result<Result<Header, Flaw>> {
        let left = self.end.saturating_sub(self.position);
        let expected = self.offset;
        let bytes = self.bytes(self.position, to_usize(left.min(to_u64(HEADER_BYTES))))?;
        Ok(Header::check(bytes, left, expected))
    }

    /// The bytes of the record just stepped past, all of them. It was checked, so the file has as many.
    pub(crate) fn copy(&mut self, found: &Found) -> Result<Vec<u8>> {
        let mut copied = Vec::with_capacity(to_usize(self.position - found.position));
        let mut at = found.position;
        while at < self.position {
            let len = to_usize((self.position - at).min(to_u64(WINDOW)));
            copied.extend_from_slice(self.bytes(at, len)?);
            at += to_u64(len);
        }
        Ok(copied)
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
            // Room that was allocated and not written yet need not be read to be known.
            match self.file.next_data(at).map_err(Error::io("look for data in", self.path))? {
                Some(data) if data < self.end => at = data,
                _ => break,
            }
            let len = to_usize((self.end - at).min(to_u64(WINDOW)));
            if !is_zero(self.bytes(at, len)?) {
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
        let window_end = self.window_at + to_u64(self.window_len);
        if position < self.window_at || position + to_u64(len) > window_end {
            let bytes = self.ahead.max(to_u64(len)).min(self.end - position);
            self.ahead = (self.ahead * 4).min(to_u64(WINDOW));
            self.window_len = 0;
            let wanted = position..position + bytes;
            (self.window_at, self.window_len) = self.window.read(self.file, wanted).map_err(Error::io("read", self.path))?;
            self.read += bytes;
        }
        let start = to_usize(position - self.window_at);
        Ok(&self.window.memory()[start..start + len])
    }
}

/// The memory that a scanner reads into.
enum Window {
    /// Any bytes, as asked for.
    Bytes(Vec<u8>),
    /// Whole blocks.
    Blocks(Option<Buffer>),
}

impl Window {
    /// Reads bytes `wanted` of the file, which has them all. Gives where the memory begins in the file, and how much of it is
    /// there.
    fn read(&mut self, file: &dyn File, wanted: Range<u64>) -> io::Result<(u64, usize)> {
        match self {
            Self::Bytes(memory) => {
                memory.resize(to_usize(wanted.end - wanted.start), 0);
                read_exact_at(file, memory, wanted.start)?;
                Ok((wanted.start, memory.len()))
            }
            Self::Blocks(memory) => {
                let start = wanted.start - wanted.start % BLOCK;
                let len = to_usize(wanted.end.next_multiple_of(BLOCK) - start);
                let memory = match memory {
                    Some(memory) if memory.len() >= len => memory,
                    // Twice a window is one huge page, which the device fills in half the time that it takes for as many small ones.
                    small => small.insert(Buffer::new(if len > WINDOW / 16 { 2 * WINDOW } else { len })?),
                };
                let read = read_blocks_up_to_at(file, &mut memory[..len], start)?;
                // The file may end inside the last block, but not before what was asked for.
                if start + to_u64(read) < wanted.end { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok((start, read)) }
            }
        }
    }

    fn memory(&self) -> &[u8] {
        match self {
            Self::Bytes(memory) => memory,
            Self::Blocks(memory) => memory.as_deref().unwrap_or_default(),
        }
    }
}

/// Whether all bytes are zeros. Block by block without a way out within one, which compilers turn into a few wide instructions.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    let (blocks, rest) = bytes.as_chunks::<256>();
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    blocks.iter().all(|block| is_zero(block)) && is_zero(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_is_found_wherever_it_is() {
        for len in [0, 1, 255, 256, 257, 1000] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in (0..len).step_by(if cfg!(miri) { 37 } else { 1 }) {
                bytes[at] = 1 << (at % 8);
                assert!(!is_zero(&bytes), "{at} of {len}");
                bytes[at] = 0;
            }
        }
    }
}
