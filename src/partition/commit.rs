//! One commit: the records of the batches that waited together, encoded where the device reads them from.
//!
//! With direct I/O the buffer stands for whole blocks of the log: it begins with the bytes of the block that holds the
//! end of the log, unchanged, and ends with zeros up to a block's end. Rewriting equal bytes cannot harm an acknowledged
//! record, whatever part of the write a crash leaves.
//!
//! Through the page cache any bytes are written: there a large batch is completed where it is, and is a commit of its own.

use std::ops::{Deref, Range};
use std::time::Duration;

use super::reply::Answerer;
use super::ticket::Answer;
use super::zeroing::Space;
use crate::guard::{self, Guard};
use crate::io::{BLOCK, Buffer};
use crate::record::{Batch, to_u64, to_usize};
use crate::segment::IndexEntry;

/// Who waits for a commit, and the answer.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) answer: Answerer<Answer>,
    pub(super) offsets: Range<u64>,
}

/// What a commit lists, in memory that is used again.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pub(super) waiters: Vec<Waiter>,
    pub(super) entries: Vec<IndexEntry>,
}

/// The memory that a commit is written from.
#[derive(Debug)]
pub(super) enum Memory {
    /// Records copied together.
    Buffer(Buffer),
    /// One batch, as it came.
    Batch(Batch),
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Batch(batch) => batch.stored(),
        }
    }
}

/// Records on their way to one write.
#[derive(Debug)]
pub(super) struct Commit {
    /// Its own until the write takes it.
    memory: Option<Memory>,
    /// Where the buffer's first byte lies in the log.
    at: u64,
    /// Where the first new record lies in the log.
    start: u64,
    /// Bytes of the buffer in use.
    used: usize,
    records: u64,
    /// One past its last record.
    end_offset: u64,
    pub(super) lists: Lists,
    /// When its first record came, for the linger.
    pub(super) since: Duration,
    /// When its write began, and where it went.
    pub(super) launched: (Duration, Space),
}

impl Commit {
    /// An empty commit whose first record goes to byte `start` of the log, behind `prefix`, the bytes of its block before it.
    pub(super) fn new(mut buffer: Buffer, start: u64, prefix: &[u8], lists: Lists, since: Duration) -> Self {
        buffer[..prefix.len()].copy_from_slice(prefix);
        let at = start - to_u64(prefix.len());
        Self {
            memory: Some(Memory::Buffer(buffer)),
            at,
            start,
            used: prefix.len(),
            records: 0,
            end_offset: 0,
            lists,
            since,
            launched: (since, Space::Unwritten),
        }
    }

    /// A commit of one batch alone, whose records were completed in place: the last one is `end_offset - 1`.
    pub(super) fn of_batch(batch: Batch, start: u64, end_offset: u64, lists: Lists, since: Duration) -> Self {
        let (used, records) = (to_usize(batch.bytes()), batch.len());
        Self {
            memory: Some(Memory::Batch(batch)),
            at: start,
            start,
            used,
            records,
            end_offset,
            lists,
            since,
            launched: (since, Space::Unwritten),
        }
    }

    /// Where its first record begins, in the log.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// One past the last byte of its last record, in the log.
    pub(super) fn end(&self) -> u64 {
        self.at + to_u64(self.used)
    }

    /// Bytes of its records.
    pub(super) fn bytes(&self) -> u64 {
        self.end() - self.start
    }

    pub(super) fn records(&self) -> u64 {
        self.records
    }

    pub(super) fn end_offset(&self) -> u64 {
        self.end_offset
    }

    /// Whether `bytes` more fit in the buffer, padding included.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        // The buffer is whole blocks, so the padding always fits where the bytes do.
        matches!(&self.memory, Some(Memory::Buffer(buffer)) if self.used + bytes <= buffer.len())
    }

    /// Adds the record at byte `at` of the batch, which occupies `bytes`; there must be room.
    pub(super) fn push(&mut self, batch: &Batch, at: usize, bytes: usize, offset: u64, timestamp: u64) {
        let range = self.used..self.used + bytes;
        batch.encode_record(at, offset, timestamp, &mut self.buffer_mut()[range]);
        self.used += bytes;
        self.records += 1;
        self.end_offset = offset + 1;
    }

    /// The record that was added last, which occupies so many bytes.
    pub(super) fn newest(&self, bytes: usize) -> &[u8] {
        match &self.memory {
            Some(Memory::Buffer(buffer)) => &buffer[self.used - bytes..self.used],
            _ => &[],
        }
    }

    /// Ends the commit: gives the memory, which of its bytes to write, and where in the log they go.
    ///
    /// With `blocks` these are whole blocks, the last one filled up with zeros and so many `zeros` behind it, and `last_block`
    /// becomes the bytes of the block that holds the end: the next commit's prefix.
    pub(super) fn launch(&mut self, blocks: bool, zeros: usize, last_block: &mut Vec<u8>) -> (Memory, Range<usize>, u64) {
        last_block.clear();
        let used = self.used;
        let mut written = used;
        if blocks {
            written = used.next_multiple_of(to_usize(BLOCK)) + zeros;
            let partial = to_usize(self.end() % BLOCK);
            let buffer = self.buffer_mut();
            buffer[used..written].fill(0);
            last_block.extend_from_slice(&buffer[used - partial..used]);
            if !guard::stands(Guard::LastBlockKept) {
                last_block.fill(0);
            }
        }
        (self.memory.take().expect("a commit is launched once"), 0..written, self.at)
    }

    /// How much more than the padding's end the buffer holds.
    pub(super) fn spare(&self) -> usize {
        match &self.memory {
            Some(Memory::Buffer(buffer)) => buffer.len().saturating_sub(self.used.next_multiple_of(to_usize(BLOCK))),
            _ => 0,
        }
    }

    /// Where its write ends: past the padding.
    pub(super) fn written_end(&self, blocks: bool) -> u64 {
        if blocks { self.end().next_multiple_of(BLOCK) } else { self.end() }
    }

    /// Where its write begins.
    pub(super) fn written_start(&self) -> u64 {
        self.at
    }

    fn buffer_mut(&mut self) -> &mut Buffer {
        match &mut self.memory {
            Some(Memory::Buffer(buffer)) => buffer,
            _ => unreachable!("only a commit that has a buffer, and was not launched, is filled or padded"),
        }
    }
}
