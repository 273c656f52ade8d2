//! One commit: the records of the batches that waited together, encoded where the device reads them from.
//!
//! With direct I/O the buffer stands for whole blocks of the log: it begins with the bytes of the block that holds the
//! end of the log, unchanged, and ends with zeros up to a block's end. Rewriting equal bytes cannot harm an acknowledged
//! record, whatever part of the write a crash leaves.

use std::ops::Range;

use super::reply::Answerer;
use super::ticket::Answer;
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

/// Records on their way to one write.
#[derive(Debug)]
pub(super) struct Commit {
    /// Its own until the write takes it.
    buffer: Option<Buffer>,
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
    pub(super) since: std::time::Duration,
}

impl Commit {
    /// An empty commit whose first record goes to byte `start` of the log, behind `prefix`, the bytes of its block before it.
    pub(super) fn new(mut buffer: Buffer, start: u64, prefix: &[u8], lists: Lists, since: std::time::Duration) -> Self {
        buffer[..prefix.len()].copy_from_slice(prefix);
        let at = start - to_u64(prefix.len());
        Self {
            buffer: Some(buffer),
            at,
            start,
            used: prefix.len(),
            records: 0,
            end_offset: 0,
            lists,
            since,
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
        self.buffer.as_ref().is_some_and(|buffer| self.used + bytes <= buffer.len())
    }

    /// Adds the record at byte `at` of the batch, which occupies `bytes`; there must be room.
    pub(super) fn push(&mut self, batch: &Batch, at: usize, bytes: usize, offset: u64, timestamp: u64) {
        let range = self.used..self.used + bytes;
        batch.encode_record(at, offset, timestamp, &mut self.buffer_mut()[range]);
        self.used += bytes;
        self.records += 1;
        self.end_offset = offset + 1;
    }

    /// Ends the commit: gives the buffer, which of its bytes to write, and where in the log they go.
    ///
    /// With `blocks` these are whole blocks, the last one filled up with zeros, and `last_block` becomes the bytes of the
    /// block that holds the end: the next commit's prefix.
    pub(super) fn launch(&mut self, blocks: bool, last_block: &mut Vec<u8>) -> (Buffer, Range<usize>, u64) {
        last_block.clear();
        let used = self.used;
        let written = if blocks { to_usize(to_u64(used).next_multiple_of(BLOCK)) } else { used };
        let partial = if blocks { to_usize(self.end() % BLOCK) } else { 0 };
        let buffer = self.buffer_mut();
        buffer[used..written].fill(0);
        last_block.extend_from_slice(&buffer[used - partial..used]);
        (self.buffer.take().expect("checked by buffer_mut"), 0..written, self.at)
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
        self.buffer.as_mut().expect("a commit has its buffer until it is launched")
    }
}
