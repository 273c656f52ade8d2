//! The files of one base offset: their names, their end, and how a record is found in them.
//!
//! A [`Segment`] is shared by the writer that extends it and the readers; it holds no file open. The writer alone moves
//! its ends and adds index entries; both are published only after the bytes they speak of were written.

mod anchors;
mod index;
mod lookup;
mod name;
mod scan;
mod sum;
mod survivors;
mod tail;
mod times;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError};

use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::{Disk, Entry, EntryKind, File, Open};
use crate::record::to_usize;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard};

pub(crate) use anchors::{Anchors, NextWhole};
pub(crate) use index::{ENTRY_BYTES, IndexEntry, count_below};
pub(crate) use lookup::Lookup;
pub(crate) use name::{Kind, Name, is_prepared};
pub(crate) use scan::{Found, Scanner, Step};
pub(crate) use sum::{HeldSum, Sum, SumSoFar, check_whole, make_up_for_sum, put_derived};
pub(crate) use survivors::Survivors;
pub(crate) use tail::{Tail, copy, copy_aside, data_end, is_copy, is_unfinished, set_log_aside};
pub(crate) use times::{Around, Times};

/// One segment of a partition.
#[derive(Debug)]
pub(crate) struct Segment {
    dir: Arc<Path>,
    base: u64,
    /// One past the last byte of the last record that the kernel has.
    appended: AtomicU64,
    /// One past the last byte of the last record that is on the device; never past `appended`.
    durable: AtomicU64,
    /// Entries whose records can be read but that are not in the index files yet.
    pending: Mutex<Vec<IndexEntry>>,
    /// When its first whole record was appended, once somebody asked.
    first_time: OnceLock<u64>,
    /// No record of it has a later timestamp; 0 until that is known.
    last_time: AtomicU64,
}

impl Segment {
    /// A segment whose records end at byte `end`, all of them durable.
    pub(crate) fn new(dir: Arc<Path>, base: u64, end: u64) -> Self {
        let (appended, durable) = (AtomicU64::new(end), AtomicU64::new(end));
        Self { dir, base, appended, durable, pending: Mutex::default(), first_time: OnceLock::new(), last_time: AtomicU64::new(0) }
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn path(&self, kind: Kind) -> PathBuf {
        self.dir.join(Name { base: self.base, kind }.to_string())
    }

    pub(crate) fn appended(&self) -> u64 {
        self.appended.load(Ordering::Acquire)
    }

    pub(crate) fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    /// The writer wrote records up to byte `end`; `entries` are those to index.
    pub(crate) fn extend(&self, end: u64, entries: &[IndexEntry]) {
        self.pending().extend_from_slice(entries);
        self.appended.store(end, Ordering::Release);
    }

    /// What was appended up to byte `end` is on the device.
    pub(crate) fn set_durable(&self, end: u64) {
        self.durable.store(end, Ordering::Release);
    }

    pub(crate) fn pending(&self) -> MutexGuard<'_, Vec<IndexEntry>> {
        // The vector is whole at every moment that a panic could leave it.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The timestamp of its first whole record, if anybody noted it.
    pub(crate) fn first_time(&self) -> Option<u64> {
        self.first_time.get().copied()
    }

    pub(crate) fn note_first_time(&self, time: u64) {
        // It does not change.
        let _ = self.first_time.set(time);
    }

    /// No record that it has is younger.
    pub(crate) fn note_last_time(&self, time: u64) {
        self.last_time.store(time, Ordering::Release);
    }

    /// The latest timestamp of its records, if that was noted.
    pub(crate) fn last_time(&self) -> Option<u64> {
        Some(self.last_time.load(Ordering::Acquire)).filter(|&time| time > 0)
    }

    /// The same where it was not noted, by a scan from its last index entry on; none where that does not lead to its end.
    pub(crate) fn read_last_time(&self, disk: &dyn Disk) -> Option<u64> {
        if self.last_time().is_none()
            && let Some(time) = self.scan_for_last_time(disk)
        {
            self.note_last_time(time);
        }
        self.last_time()
    }

    fn scan_for_last_time(&self, disk: &dyn Disk) -> Option<u64> {
        let entry = last_entry(disk, &self.path(Kind::Index)).ok()??;
        let log = self.open_log(disk).ok()?;
        let path = self.path(Kind::Log);
        let mut scanner = Scanner::new(&*log, &path, entry.second, entry.offset, self.appended());
        let mut last = None;
        loop {
            match scanner.next().ok()? {
                Step::Record(Found { timestamp, .. }) => last = last.max(Some(timestamp)),
                Step::End => return last,
                Step::Flawed(_) => return None,
            }
        }
    }

    /// The timestamp of its first record, if there is one, and it can be read.
    pub(crate) fn read_first_time(&self, disk: &dyn Disk) -> Option<u64> {
        if self.appended() == 0 || self.first_time().is_some() {
            return self.first_time();
        }
        let log = self.open_log(disk).ok()?;
        match Scanner::new(&*log, &self.path(Kind::Log), 0, self.base, self.appended()).next() {
            Ok(Step::Record(Found { timestamp, .. })) => {
                self.note_first_time(timestamp);
                Some(timestamp)
            }
            _ => None,
        }
    }

    /// Opens the log for reading.
    pub(crate) fn open_log(&self, disk: &dyn Disk) -> Result<Arc<dyn File>> {
        let path = self.path(Kind::Log);
        disk.open(&path, Open::READ).map_err(Error::io("open", &path))
    }

    /// Finds the position of the record `offset`, which lies before byte `end` of `log`, without believing the index: by a scan from the last of its
    /// entries that leads to a whole record, else from the start of the segment.
    ///
    /// # Errors
    /// [`Error::Damaged`] where the scan meets something that is not the next record.
    pub(crate) fn locate(&self, disk: &dyn Disk, log: &dyn File, offset: u64, end: u64) -> Result<u64> {
        Anchors::new(disk, self, log, end).locate(offset)
    }
}

/// Walks from the record `from` (offset, position) to the record `offset`, and gives its position. The record itself is
/// checked as far as its header.
fn walk(log: &dyn File, path: &Path, from: (u64, u64), offset: u64, end: u64) -> Result<u64> {
    let mut scanner = Scanner::new(log, path, from.1, from.0, end);
    while scanner.offset() < offset {
        match scanner.next()? {
            Step::Record(_) => {}
            Step::End => return Err(scanner.damaged(scanner.flaw_of_missing())),
            Step::Flawed(flaw) => return Err(scanner.damaged(flaw)),
        }
    }
    match scanner.peek()? {
        Ok(_) => Ok(scanner.position()),
        Err(flaw) => Err(scanner.damaged(flaw)),
    }
}

/// Where a file of the next segment lies before its base is known.
pub(crate) fn prepared_path(dir: &Path, kind: Kind) -> PathBuf {
    dir.join(name::prepared_name(kind))
}

/// Removes the files of a segment that came to nothing, durably.
pub(crate) fn remove(disk: &dyn Disk, dir: &Path, base: u64) -> io::Result<()> {
    remove_files(disk, dir, base)?;
    disk.sync_dir(dir)
}

/// Removes the files of a segment. Not durable yet. The log goes last: without it the others are nothing.
pub(crate) fn remove_files(disk: &dyn Disk, dir: &Path, base: u64) -> io::Result<()> {
    remove_derived(disk, dir, base)?;
    remove_if_there(disk, &dir.join(Name { base, kind: Kind::Log }.to_string()))
}

/// Removes all that is derived from a log. Not durable yet.
pub(crate) fn remove_derived(disk: &dyn Disk, dir: &Path, base: u64) -> io::Result<()> {
    Kind::DERIVED.into_iter().try_for_each(|kind| remove_if_there(disk, &dir.join(Name { base, kind }.to_string())))
}

/// Whether a file is called as one of a segment, be it the next one.
pub(crate) fn is_of_one(name: &OsStr) -> bool {
    Name::parse(name).is_some() || is_prepared(name)
}

/// Removes a file of a partition that is closed for good, and gives its space back, also while somebody still holds it open to read. One that
/// has another name, as an export has, stays whole under that. Not durable yet.
pub(crate) fn remove_with_space(disk: &dyn Disk, path: &Path) -> io::Result<()> {
    // Later it has no name to be opened by.
    let file = disk.open(path, Open::WRITE);
    disk.remove_file(path)?;
    // Nothing is promised of the space: where this is refused, it comes back with the last reader.
    if let Ok(file) = file {
        let is_named = file.details().map_or(true, |details| details.links > 0);
        if !(is_named && guard::stands(Guard::OtherNamesKept)) {
            file.set_len(0).unwrap_or_else(|error| tracing::debug!(%error, path = %path.display(), "a removed file keeps its space"));
        }
    }
    Ok(())
}

pub(crate) fn remove_if_there(disk: &dyn Disk, path: &Path) -> io::Result<()> {
    match disk.remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether the directory holds a segment; not if there is no such directory.
pub(crate) fn has_any(disk: &dyn Disk, dir: &Path) -> io::Result<bool> {
    let is_log = |entry: &Entry| entry.kind == EntryKind::File && matches!(Name::parse(&entry.name), Some(Name { kind: Kind::Log, .. }));
    match disk.list(dir) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
        entries => Ok(entries?.iter().any(is_log)),
    }
}

/// The end of an index file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastEntry {
    pub(crate) offset: u64,
    /// Position or timestamp.
    pub(crate) second: u64,
    /// How many entries the file has.
    pub(crate) count: u64,
}

/// The last entry of an index file; none if there is no file, no entry, or a part of one.
pub(crate) fn last_entry(disk: &dyn Disk, path: &Path) -> io::Result<Option<LastEntry>> {
    let Some((file, len)) = open_index(disk, path)? else { return Ok(None) };
    if len == 0 || !len.is_multiple_of(ENTRY_BYTES) {
        return Ok(None);
    }
    let count = len / ENTRY_BYTES;
    let (offset, second) = index::entry_at(&*file, count - 1)?;
    Ok(Some(LastEntry { offset, second, count }))
}

/// The last of the first `count` entries of an index file, at least one, and whether they are all that the file holds; none if
/// there is no file or it is shorter.
pub(crate) fn entry_before(disk: &dyn Disk, path: &Path, count: u64) -> io::Result<Option<(LastEntry, bool)>> {
    let Some((file, len)) = open_index(disk, path)? else { return Ok(None) };
    if count == 0 || len / ENTRY_BYTES < count {
        return Ok(None);
    }
    let (offset, second) = index::entry_at(&*file, count - 1)?;
    Ok(Some((LastEntry { offset, second, count }, len == count * ENTRY_BYTES)))
}

/// The last entry of a record before `offset`, if both index files have the same entries up to there, and how many these are.
pub(crate) fn last_entry_below(disk: &dyn Disk, segment: &Segment, offset: u64) -> Option<LastEntry> {
    let below = |kind| {
        let path = segment.path(kind);
        let (file, len) = open_index(disk, &path).ok()??;
        let count = count_below(&*file, len / ENTRY_BYTES, offset).ok()?;
        entry_before(disk, &path, count).ok()?
    };
    let ((by_position, _), (by_time, _)) = (below(Kind::Index)?, below(Kind::TimeIndex)?);
    let agree = by_position.count == by_time.count && by_position.offset == by_time.offset;
    (agree && (segment.base()..offset).contains(&by_position.offset) && by_position.second < segment.appended()).then_some(by_position)
}

/// Whether an index file is there and holds nothing.
pub(crate) fn is_empty_index(disk: &dyn Disk, path: &Path) -> io::Result<bool> {
    Ok(open_index(disk, path)?.is_some_and(|(_, len)| len == 0))
}

/// Opens and measures an index file, if there is one.
fn open_index(disk: &dyn Disk, path: &Path) -> io::Result<Option<(Arc<dyn File>, u64)>> {
    match disk.open(path, Open::READ) {
        Ok(file) => {
            let len = file.len()?;
            Ok(Some((file, len)))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Puts both index files on the device.
pub(crate) fn sync_indexes(disk: &dyn Disk, segment: &Segment) -> Result<()> {
    for kind in [Kind::Index, Kind::TimeIndex] {
        let path = segment.path(kind);
        disk.open(&path, Open::WRITE).and_then(|file| file.sync()).map_err(Error::io("sync", &path))?;
    }
    Ok(())
}

/// Removes index files of which it is not known what the device holds: a sync that succeeds later would not make up for one that failed.
/// Look-ups scan the log until the next opening makes them anew.
pub(crate) fn remove_indexes(disk: &dyn Disk, segment: &Segment) {
    for kind in [Kind::TimeIndex, Kind::Index] {
        let path = segment.path(kind);
        match disk.remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, path = %path.display(), "an index that does not hold could not be removed");
            }
            _ => {}
        }
    }
}

/// The interval at which the segments in `dir` are indexed, as the first two entries of the first index that has two tell.
pub(crate) fn guess_interval(disk: &dyn Disk, dir: &Path) -> io::Result<Option<u32>> {
    for entry in disk.list(dir)? {
        if entry.kind != EntryKind::File || !matches!(Name::parse(&entry.name), Some(Name { kind: Kind::Index, .. })) {
            continue;
        }
        let file = disk.open(&dir.join(&entry.name), Open::READ)?;
        if file.len()? < 2 * ENTRY_BYTES {
            continue;
        }
        let interval = index::entry_at(&*file, 1)?.0.checked_sub(index::entry_at(&*file, 0)?.0);
        if let Some(interval) = interval.and_then(|interval| u32::try_from(interval).ok()).filter(|&interval| interval > 0) {
            return Ok(Some(interval));
        }
    }
    Ok(None)
}

/// What became of a segment's index files.
#[derive(Debug, Default)]
pub(crate) struct Reconciled {
    /// Those that had to be written.
    pub(crate) written: Vec<PathBuf>,
    /// How many of the entries both files hold now, behind those trusted.
    pub(crate) kept: usize,
    /// Why not all of them.
    pub(crate) error: Option<Error>,
}

/// Makes the two index files exactly what `entries` say behind their first `trusted`, which stay unread; where that fails, the
/// longest beginning that both can hold.
///
/// Read first and written only where they differ, so that opening a sound partition changes no byte of them. A failure is
/// no reason to stop: the files hold nothing that the log does not.
pub(crate) fn reconcile_indexes(disk: &dyn Disk, segment: &Segment, trusted: u64, entries: &[IndexEntry]) -> Reconciled {
    let mut result = Reconciled { kept: entries.len(), ..Reconciled::default() };
    let from = trusted * ENTRY_BYTES;
    let wanted = |kind| -> Vec<u8> { entries.iter().flat_map(|entry| entry.encode(kind)).collect() };
    for kind in [Kind::Index, Kind::TimeIndex] {
        let path = segment.path(kind);
        match index::make(disk, &path, from, &wanted(kind)) {
            Ok(true) => result.written.push(path),
            Ok(false) => {}
            Err(error) => {
                result.kept = 0;
                result.error = Some(Error::io("write", &path)(error));
            }
        }
    }
    if result.error.is_some() {
        let held = |kind| index::held(disk, &segment.path(kind), from, &wanted(kind)).unwrap_or(0);
        result.kept = held(Kind::Index).min(held(Kind::TimeIndex));
        for kind in [Kind::Index, Kind::TimeIndex] {
            // Cutting takes no room. Where it fails too, the next writer of the file cuts it.
            let _ = index::cut(disk, &segment.path(kind), to_usize(trusted) + result.kept);
        }
    }
    result
}

/// The records `base`, `base + interval`, … are indexed.
pub(crate) fn is_indexed(base: u64, offset: u64, interval: u32) -> bool {
    (offset - base).is_multiple_of(interval.into())
}

/// Bytes read at once by scans.
const WINDOW: usize = to_usize(1 << 20);
