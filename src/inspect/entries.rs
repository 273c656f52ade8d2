//! Reading the entries of an index file, one by one, believing none of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::io::transfer::read_exact_at;
use crate::io::{Disk, File, Open};
use crate::record::{to_u64, to_usize};
use crate::segment::{ENTRY_BYTES, data_end};

/// Bytes read at once, whole entries.
const CHUNK: u64 = 64 << 10;

/// An entry as it stands in an index file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredEntry {
    /// Where it stands, in bytes.
    pub at: u64,
    /// The record's offset.
    pub offset: u64,
    /// The record's position in the log, or in a time index its timestamp.
    pub second: u64,
}

/// The entries of an index or a time index, up to the zeros behind them.
#[derive(Debug)]
pub struct StoredEntries {
    path: PathBuf,
    file: Arc<dyn File>,
    at: u64,
    end: u64,
    stray: u64,
    chunk: Vec<u8>,
    chunk_at: u64,
}

impl StoredEntries {
    pub(super) fn open(disk: &dyn Disk, path: &Path) -> Result<Self> {
        let file = disk.open(path, Open::READ).map_err(Error::io("open", path))?;
        let len = file.len().map_err(Error::io("measure", path))?;
        let data = data_end(&*file, 0..len).map_err(Error::io("read", path))?;
        // The first entry of a segment with base 0 is all zeros, and one.
        let whole = len - len % ENTRY_BYTES;
        let end = data.max(ENTRY_BYTES).next_multiple_of(ENTRY_BYTES).min(whole);
        let stray = if data > whole { len - whole } else { 0 };
        Ok(Self { path: path.to_owned(), file, at: 0, end, stray, chunk: Vec::new(), chunk_at: 0 })
    }

    /// Where the entries end, in bytes.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Bytes behind the last entry that are no entry.
    pub fn stray_bytes(&self) -> u64 {
        self.stray
    }

    fn entry(&mut self) -> Result<StoredEntry> {
        if self.at >= self.chunk_at + to_u64(self.chunk.len()) {
            self.chunk.resize(to_usize((self.end - self.at).min(CHUNK)), 0);
            self.chunk_at = self.at;
            read_exact_at(&*self.file, &mut self.chunk, self.at).map_err(Error::io("read", &self.path))?;
        }
        let from = to_usize(self.at - self.chunk_at);
        let word = |at: usize| u64::from_be_bytes(self.chunk[at..at + 8].try_into().expect("8 bytes of an entry"));
        Ok(StoredEntry { at: self.at, offset: word(from), second: word(from + 8) })
    }
}

impl Iterator for StoredEntries {
    type Item = Result<StoredEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at + ENTRY_BYTES > self.end {
            return None;
        }
        let entry = self.entry();
        // After an error there is nothing more.
        self.at = if entry.is_ok() { self.at + ENTRY_BYTES } else { self.end };
        Some(entry)
    }
}
