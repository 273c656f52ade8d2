//! Index files: where they lead, and how they are written anew.
//!
//! They hold nothing that the log does not: whatever is read from them is a hint that the log must confirm.

use std::io;
use std::path::Path;

use super::Kind;
use crate::io::transfer::{read_exact_at, read_up_to_at, write_all_at};
use crate::io::{Disk, File, Open};
use crate::record::{to_u64, to_usize};

/// Bytes of an entry in either file.
pub(crate) const ENTRY_BYTES: u64 = 16;

/// What the two index files say of one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexEntry {
    pub(crate) offset: u64,
    pub(crate) position: u64,
    pub(crate) timestamp: u64,
}

impl IndexEntry {
    /// The stored form in the file of that kind.
    pub(crate) fn encode(&self, kind: Kind) -> [u8; to_usize(ENTRY_BYTES)] {
        let second = if kind == Kind::TimeIndex { self.timestamp } else { self.position };
        let mut bytes = [0; to_usize(ENTRY_BYTES)];
        bytes[..8].copy_from_slice(&self.offset.to_be_bytes());
        bytes[8..].copy_from_slice(&second.to_be_bytes());
        bytes
    }

    /// All of them, one after another, in the place of what the vector held.
    pub(crate) fn encode_all(entries: &[Self], kind: Kind, into: &mut Vec<u8>) {
        into.clear();
        into.extend(entries.iter().flat_map(|entry| entry.encode(kind)));
    }
}

/// The `index`th entry: offset, and position or timestamp.
pub(super) fn entry_at(file: &dyn File, index: u64) -> io::Result<(u64, u64)> {
    let mut bytes = [0; to_usize(ENTRY_BYTES)];
    read_exact_at(file, &mut bytes, index * ENTRY_BYTES)?;
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 of 16 bytes"));
    Ok((word(0), word(8)))
}

/// How many of the file's first `count` entries, which are in order, are of records below `offset`.
pub(crate) fn count_below(file: &dyn File, count: u64, offset: u64) -> io::Result<u64> {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if entry_at(file, middle)?.0 < offset { low = middle + 1 } else { high = middle }
    }
    Ok(low)
}

/// The last entry at or below `offset`: its offset and position.
///
/// In a sound file this is the answer. In a damaged one it is some entry with an offset in `base..=offset`, or none.
pub(super) fn lookup(file: &dyn File, base: u64, offset: u64) -> io::Result<Option<(u64, u64)>> {
    let count = file.len()? / ENTRY_BYTES;
    let usable = |index: u64| -> io::Result<Option<(u64, u64)>> {
        let entry = entry_at(file, index)?;
        // An all-zero entry past the first is preallocated space, which lies behind every offset.
        let unwritten = entry == (0, 0) && index > 0;
        Ok((!unwritten && (base..=offset).contains(&entry.0)).then_some(entry))
    };
    // Entries are evenly spaced: the spacing of the first two names the place, if the log was written with one interval.
    if let Some(guess) = guess(file, count, base, offset)? {
        let next_is_behind = guess + 1 >= count || usable(guess + 1)?.is_none();
        if let (Some(entry), true) = (usable(guess)?, next_is_behind) {
            return Ok(Some(entry));
        }
    }
    let (mut low, mut high) = (0, count);
    let mut best = None;
    while low < high {
        let middle = low + (high - low) / 2;
        match usable(middle)? {
            Some(entry) => {
                best = Some(entry);
                low = middle + 1;
            }
            None => high = middle,
        }
    }
    Ok(best)
}

fn guess(file: &dyn File, count: u64, base: u64, offset: u64) -> io::Result<Option<u64>> {
    if count < 2 {
        return Ok(None);
    }
    let interval = entry_at(file, 1)?.0.saturating_sub(base);
    Ok(offset.saturating_sub(base).checked_div(interval).map(|guess| guess.min(count - 1)))
}

/// Makes the file hold exactly these bytes behind its first `from`, which it must have and which stay unread; tells whether it
/// had to be changed. What it holds of them stays.
pub(super) fn make(disk: &dyn Disk, path: &Path, from: u64, wanted: &[u8]) -> io::Result<bool> {
    let (file, made) = match disk.open(path, Open::WRITE) {
        Ok(file) => (file, false),
        Err(error) if error.kind() == io::ErrorKind::NotFound && from == 0 => (disk.open(path, Open::NEW)?, true),
        Err(error) => return Err(error),
    };
    let len = file.len()?;
    if len < from {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let common = common(&*file, from, wanted)?;
    let kept = from + to_u64(common);
    if kept < len {
        file.set_len(kept)?;
    }
    write_all_at(&*file, &wanted[common..], kept, false)?;
    Ok(made || kept < len || common < wanted.len())
}

/// How many of the entries in `wanted` the file holds from byte `from` on.
pub(super) fn held(disk: &dyn Disk, path: &Path, from: u64, wanted: &[u8]) -> io::Result<usize> {
    Ok(common(&*disk.open(path, Open::READ)?, from, wanted)? / to_usize(ENTRY_BYTES))
}

/// Leaves the file its first entries.
pub(super) fn cut(disk: &dyn Disk, path: &Path, entries: usize) -> io::Result<()> {
    disk.open(path, Open::WRITE)?.set_len(to_u64(entries) * ENTRY_BYTES)
}

/// How many bytes of `wanted` the file holds from byte `from` on.
fn common(file: &dyn File, from: u64, wanted: &[u8]) -> io::Result<usize> {
    let mut found = vec![0; to_usize(file.len()?.saturating_sub(from).min(to_u64(wanted.len())))];
    let read = read_up_to_at(file, &mut found, from)?;
    Ok(found[..read].iter().zip(wanted).take_while(|(found, wanted)| found == wanted).count())
}
