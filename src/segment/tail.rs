//! What lies behind the last record of an active log, and setting it aside before it is cut.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::scan::is_zero;
use super::{Kind, Name, Survivors, WINDOW, name};
use crate::io::transfer::{read_exact_at, write_all_at};
use crate::io::{Disk, File, Open};
use crate::record::{to_u64, to_usize};

/// The bytes behind a log's last record that are not zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tail {
    /// From the end of the last record to the last byte that is not zero.
    pub(crate) span: Range<u64>,
    /// Whole records with later offsets that were found in it.
    pub(crate) records: u64,
    /// Whether all of it was searched.
    pub(crate) searched: bool,
}

impl Tail {
    /// Looks at bytes `from..end` of a log whose next record would be `expected`; none if they are all zeros.
    pub(crate) fn examine(log: &dyn File, from: u64, end: u64, expected: u64) -> io::Result<Option<Self>> {
        let Some(last) = last_set_byte(log, from..end)? else { return Ok(None) };
        let span = from..last + 1;
        let found = Survivors::search(log, from..end, expected)?;
        Ok(Some(Self { records: found.newer, searched: found.searched_to >= span.end, span }))
    }

    /// Whether it may hold a record that somebody could want back.
    pub(crate) fn is_worth_keeping(&self) -> bool {
        self.records > 0 || !self.searched
    }
}

/// One past the last byte of `range` that is not zero; its start if there is none.
pub(crate) fn data_end(file: &dyn File, range: Range<u64>) -> io::Result<u64> {
    let start = range.start;
    Ok(last_set_byte(file, range)?.map_or(start, |last| last + 1))
}

fn last_set_byte(log: &dyn File, range: Range<u64>) -> io::Result<Option<u64>> {
    let mut window = Vec::new();
    let (mut end, mut step) = (range.end, to_u64(WINDOW));
    while end > range.start {
        let start = end.saturating_sub(step).max(range.start);
        // A hole need not be read to be known, and one that is large is passed in a few steps that grow.
        if log.next_data(start)?.is_none_or(|data| data >= end) {
            (end, step) = (start, step.saturating_mul(2));
            continue;
        }
        if step > to_u64(WINDOW) {
            step = to_u64(WINDOW);
            continue;
        }
        window.resize(to_usize(end - start), 0);
        read_exact_at(log, &mut window, start)?;
        if !is_zero(&window) {
            let index = window.iter().rposition(|&byte| byte != 0).expect("one byte is not zero");
            return Ok(Some(start + to_u64(index)));
        }
        end = start;
    }
    Ok(None)
}

/// Copies bytes `span` of the log to a file beside it, durably and whole or not at all, and gives its path.
///
/// The name tells segment and position. A copy of the same bytes, left by an opening that was interrupted, is taken for this one.
/// Holes stay holes.
pub(crate) fn copy_aside(disk: &dyn Disk, log: &dyn File, log_path: &Path, span: &Range<u64>) -> io::Result<PathBuf> {
    let unfinished = log_path.with_extension("torn.tmp");
    if let Err(error) = copy(disk, log, &unfinished, span) {
        // On a full disk, what could be copied would take the room of others' copies.
        let _ = disk.remove_file(&unfinished);
        return Err(error);
    }
    let dir = log_path.parent().expect("a log lies in a directory");
    for path in copies_of(log_path, span.start) {
        match disk.rename(&unfinished, &path) {
            Ok(()) => {
                disk.sync_dir(dir)?;
                return Ok(path);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if holds_span(disk, &path, log, span)? {
                    disk.remove_file(&unfinished)?;
                    return Ok(path);
                }
            }
            Err(error) => return Err(error),
        }
    }
    unreachable!("a directory holds fewer files than a u32 counts")
}

/// Copies bytes `span` of a file to a new one, durable but for its name. Holes stay holes.
pub(crate) fn copy(disk: &dyn Disk, log: &dyn File, path: &Path, span: &Range<u64>) -> io::Result<()> {
    let copy = disk.open(path, Open::EMPTY)?;
    copy.set_len(span.end - span.start)?;
    let mut window = Vec::new();
    let mut at = span.start;
    while let Some(data) = log.next_data(at)?.filter(|&data| data < span.end) {
        at = data;
        window.resize(to_usize((span.end - at).min(to_u64(WINDOW))), 0);
        read_exact_at(log, &mut window, at)?;
        write_all_at(&*copy, &window, at - span.start, false)?;
        at += to_u64(window.len());
    }
    copy.sync()
}

/// Gives a whole log the name of a copy of all its bytes, durably, and tells it: no segment any more.
pub(crate) fn set_log_aside(disk: &dyn Disk, dir: &Path, base: u64) -> io::Result<PathBuf> {
    let log = dir.join(Name { base, kind: Kind::Log }.to_string());
    disk.open(&log, Open::WRITE)?.sync()?;
    for path in copies_of(&log, 0) {
        match disk.rename(&log, &path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            renamed => {
                renamed?;
                disk.sync_dir(dir)?;
                return Ok(path);
            }
        }
    }
    unreachable!("a directory holds fewer files than a u32 counts")
}

/// The names for copies of what began at that position of the log, in the order in which they are taken.
fn copies_of(log_path: &Path, position: u64) -> impl Iterator<Item = PathBuf> {
    (0_u32..).map(move |attempt| {
        log_path.with_extension(if attempt == 0 { format!("{position}.torn") } else { format!("{position}-{attempt}.torn") })
    })
}

/// Whether a file is called as such a copy is, finished or not, or as another file that is not whole.
pub(crate) fn is_copy(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "torn") || is_unfinished(name)
}

/// Whether a file is called as a copy, or a file derived from a log, is before it is whole.
pub(crate) fn is_unfinished(name: &OsStr) -> bool {
    name.to_string_lossy().ends_with(".torn.tmp") || name::is_unfinished(name)
}

/// Whether the file at `path` is a copy of bytes `span` of the log.
fn holds_span(disk: &dyn Disk, path: &Path, log: &dyn File, span: &Range<u64>) -> io::Result<bool> {
    let copy = disk.open(path, Open::READ)?;
    if copy.len()? != span.end - span.start {
        return Ok(false);
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut at = span.start;
    // Where both are holes, both are zeros.
    let next_data = |at: u64| -> io::Result<Option<u64>> {
        let theirs = copy.next_data(at - span.start)?.map(|data| data + span.start);
        Ok(log.next_data(at)?.into_iter().chain(theirs).min().filter(|&data| data < span.end))
    };
    while let Some(data) = next_data(at)? {
        at = data;
        let len = to_usize((span.end - at).min(to_u64(WINDOW)));
        ours.resize(len, 0);
        theirs.resize(len, 0);
        read_exact_at(log, &mut ours, at)?;
        read_exact_at(&*copy, &mut theirs, at - span.start)?;
        if ours != theirs {
            return Ok(false);
        }
        at += to_u64(len);
    }
    Ok(true)
}
