//! Partitions that move: an end to the appends here, a snapshot of what is sealed, and another place that takes the files in.
//!
//! A partition is its files. Once it was sealed, any tool may copy them; and sealed segments never change, so that a snapshot of them is a
//! second name for each. Nothing that comes from elsewhere is believed: every record is checked before it is taken in.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::note::Note;
use super::walk::Way;
use super::{CHECKPOINT, HeldCheckpoint, Partition, Shared};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::{Disk, EntryKind, Open, parent_of};
use crate::record::Flaw;
use crate::segment::{self, Kind, Name, Segment};

/// What an export holds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Exported {
    /// The records.
    pub records: Range<u64>,
    /// In how many segments.
    pub segments: usize,
    /// Bytes in their logs.
    pub bytes: u64,
    /// How many of the segments had to be copied: because a file cannot have a second name there, or, of a sealed partition, the last one, which takes
    /// appends again should the partition be unsealed.
    pub copied: usize,
}

impl Partition {
    /// Ends the appends for good, because the partition moves elsewhere: what is queued is written and answered, later appends get [`Error::Moved`], also
    /// after it was opened again, until [`Self::unseal`]. Reads go on. Its directory then holds plain files that change no more; copy them with any
    /// tool, and have them taken in by [`Broker::import_partition`](crate::Broker::import_partition). Gives the offsets of the records that it holds.
    ///
    /// # Durability
    /// When this returns, all records are on the device, at any level, and so is the note that the partition moved.
    ///
    /// # Blocking
    /// Until everything that is queued is written.
    ///
    /// # Errors
    /// [`Error::Failed`], [`Error::Closed`], and what the system says to the note: then it may take appends again once it is opened again.
    pub fn seal(&self) -> Result<Range<u64>> {
        let shared = &self.0.shared;
        shared.check_open()?;
        self.0.end_writer(true)?;
        let _alone = shared.alone();
        shared.check_open()?;
        let records = shared.first_offset()..shared.appended_end();
        if guard::stands(Guard::MovesNoted) {
            Note::Moved.write(&*shared.disk, &shared.dir, records.end)?;
        }
        Ok(records)
    }

    /// Takes back that the partition moved: it takes appends again once it is opened again.
    ///
    /// # Errors
    /// What the system says, and [`Error::Closed`].
    pub fn unseal(&self) -> Result<()> {
        let shared = &self.0.shared;
        let _alone = shared.alone();
        shared.check_open()?;
        Note::Moved.remove(&*shared.disk, &shared.dir)
    }

    /// Whether it takes no more appends because it moved. Not before all that was queued is written, nor if that failed.
    pub fn is_sealed(&self) -> bool {
        self.0.shared.has_moved()
    }

    /// Makes a directory with all segments that take no more records, as they are now: a consistent snapshot, at once and without copying where
    /// files can have a second name there, by copying elsewhere. The partition goes on; retention and truncation change
    /// nothing of it; only an index of which entries still waited in memory is completed. [`Self::roll`] first, and all that was appended before is in
    /// it. It is a partition's directory like any other, and may be read as such; the segments are sealed, so it must not be opened for appends where
    /// it stands, but be [imported](crate::Broker::import_partition).
    ///
    /// # Durability
    /// When this returns it is on the device, whole.
    ///
    /// # Blocking
    /// While it is made, retention and truncation wait; with [`Writers::Shared`](crate::Writers::Shared), a
    /// [`truncate_after`](Self::truncate_after) that waits keeps the other partitions of its thread waiting, too.
    ///
    /// # Errors
    /// [`Error::Io`] if `to` is there already, its parent is not, or anything else that the system says, [`Error::DiskFull`]; nothing is left of it then.
    /// [`Error::Closed`].
    pub fn export(&self, to: impl AsRef<Path>) -> Result<Exported> {
        let (shared, to) = (&self.0.shared, to.as_ref());
        let _alone = shared.alone();
        shared.check_open()?;
        let mut segments = shared.with_segments(<[_]>::to_vec);
        let is_sealed = self.is_sealed();
        if !is_sealed {
            segments.pop();
        }
        // Once it is unsealed, appends go into the last one again.
        let goes_on = segments.last().filter(|_| is_sealed).map(|last| last.base());
        segments.retain(|segment| segment.appended() > 0);
        let disk = &*shared.disk;
        disk.create_dir(to).map_err(Error::io("create", to)).map_err(Error::or_full)?;
        let made = shared.export(&segments, goes_on, to);
        if made.is_err()
            && let Err(error) = remove_export(disk, to, &segments)
        {
            tracing::warn!(%error, path = %to.display(), "what was begun could not be removed");
        }
        made.map_err(Error::or_full)
    }
}

impl Shared {
    /// The segment at `goes_on` may take appends again, and is copied.
    fn export(&self, segments: &[Arc<Segment>], goes_on: Option<u64>, to: &Path) -> Result<Exported> {
        let disk = &*self.disk;
        let first = self.first_offset();
        // Without a segment there is no record; behind the last one begins the next, or the log ends.
        let end_behind = |last: &Arc<Segment>| self.segment_after(last.base()).map_or(self.appended_end(), |next| next.base());
        let end = segments.last().map_or(first, end_behind);
        let mut exported = Exported { records: first.min(end)..end, segments: segments.len(), bytes: 0, copied: 0 };
        for (left, segment) in (0..segments.len()).rev().zip(segments) {
            let mut copied = false;
            for kind in [Kind::Log, Kind::Index, Kind::TimeIndex, Kind::Sum] {
                // The last one has no successor there.
                if kind == Kind::Sum && left == 0 {
                    continue;
                }
                let (path, name) = (segment.path(kind), to.join(Name { base: segment.base(), kind }.to_string()));
                let made = if goes_on == Some(segment.base()) {
                    copy(disk, &path, &name).map(|()| false)
                } else {
                    link_or_copy(disk, &path, &name, kind == Kind::Log)
                };
                match made {
                    Ok(linked) => copied |= !linked,
                    // All but the log can be made anew.
                    Err(error) if error.kind() == io::ErrorKind::NotFound && kind != Kind::Log => {}
                    Err(error) => return Err(Error::io("export", &path)(error)),
                }
            }
            exported.bytes += segment.appended();
            exported.copied += usize::from(copied);
        }
        let begins = segments.first().map_or(0, |oldest| oldest.base());
        if begins < exported.records.start {
            Note::Start.write(disk, to, exported.records.start)?;
        }
        disk.sync_dir(to).map_err(Error::io("sync the directory", to))?;
        let parent = parent_of(to);
        disk.sync_dir(parent).map_err(Error::io("sync the directory", parent))?;
        Ok(exported)
    }
}

/// Removes what an export made, by its names: to list them may be what cannot be done.
fn remove_export(disk: &dyn Disk, to: &Path, segments: &[Arc<Segment>]) -> io::Result<()> {
    segments.iter().try_for_each(|segment| segment::remove_files(disk, to, segment.base()))?;
    Note::Start.remove_files(disk, to)?;
    disk.remove_dir(to)
}

/// Gives a file a second name, or copies it durably. Whether it was linked.
fn link_or_copy(disk: &dyn Disk, file: &Path, name: &Path, sync: bool) -> io::Result<bool> {
    match disk.link(file, name) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            copy(disk, file, name)?;
            Ok(false)
        }
        linked => {
            linked?;
            if sync {
                // It may have been cut a moment ago.
                disk.open(name, Open::WRITE)?.sync()?;
            }
            Ok(true)
        }
    }
}

fn copy(disk: &dyn Disk, file: &Path, name: &Path) -> io::Result<()> {
    let from = disk.open(file, Open::READ)?;
    segment::copy(disk, &*from, name, &(0..from.len()?))
}

/// Removes a directory of files.
pub(crate) fn remove_dir(disk: &dyn Disk, dir: &Path) -> io::Result<()> {
    disk.list(dir)?.iter().try_for_each(|entry| disk.remove_file(&dir.join(&entry.name)))?;
    disk.remove_dir(dir)
}

/// Removes a directory of files that came to nothing.
fn remove_made(disk: &dyn Disk, dir: &Path) {
    if let Err(error) = remove_dir(disk, dir) {
        tracing::warn!(%error, path = %dir.display(), "what was begun could not be removed");
    }
}

/// Copies the partition in `from` into `to`, a directory that is made for it, with everything checked: each record, and the checksums of sealed
/// logs. Indexes are made anew. Durable but for `to`'s own name.
///
/// # Errors
/// The first fault: [`Error::Damaged`], [`Error::RecordsMissing`], [`Error::SumMismatch`]; or what the system says. Nothing is left of `to`.
pub(crate) fn take_in(disk: &dyn Disk, from: &Path, to: &Path, interval: u32) -> Result<()> {
    disk.create_dir(to).map_err(Error::io("create", to))?;
    let taken = try_take_in(disk, from, to, interval);
    if taken.is_err() {
        remove_made(disk, to);
    }
    taken
}

fn try_take_in(disk: &dyn Disk, from: &Path, to: &Path, interval: u32) -> Result<()> {
    let held = |note: Note| note.read(disk, from).map_err(Error::io("read", &note.path(from)));
    let (bases, first) = (bases_in(disk, from)?, held(Note::Start)?);
    let dir: Arc<Path> = Arc::from(to);
    let mut end = first.unwrap_or(0);
    if bases.is_empty() {
        // It may hold no record any more.
        let Some(base) = first else {
            return Err(Error::io("import", from)(io::Error::new(io::ErrorKind::NotFound, "it holds no segment of a partition")));
        };
        let path = to.join(Name { base, kind: Kind::Log }.to_string());
        disk.open(&path, Open::NEW).and_then(|log| log.sync()).map_err(Error::io("create", &path))?;
    }
    for (number, &base) in bases.iter().enumerate() {
        let name = |kind| Name { base, kind }.to_string();
        let source = from.join(name(Kind::Log));
        let path = to.join(name(Kind::Log));
        copy(disk, &source, &path).map_err(Error::io("copy", &source))?;
        let log = disk.open(&path, Open::WRITE).map_err(Error::io("open", &path))?;
        let len = log.len().map_err(Error::io("measure", &path))?;
        // Whatever is told is told of the file that it comes from.
        let way = Way { log: &*log, direct: false, path: &source, base, len, interval };
        let walk = way.whole()?;
        if walk.flaw.is_some() {
            return Err(way.damage(&walk));
        }
        end = walk.next_offset;
        match bases.get(number + 1) {
            Some(&next) if walk.next_offset > next => {
                let flaw = Flaw::OffsetGap { found: next, expected: walk.next_offset };
                let path = from.join(Name { base: next, kind: Kind::Log }.to_string());
                return Err(Error::Damaged { path, position: 0, offset: walk.next_offset, flaw });
            }
            Some(&next) if walk.next_offset < next => {
                return Err(Error::RecordsMissing { path: from.to_owned(), from: walk.next_offset, to: next });
            }
            _ => {}
        }
        if walk.position < len {
            // Room for records to come, or that a crash left behind a sealed log.
            log.set_len(walk.position).and_then(|()| log.sync()).map_err(Error::io("cut", &path))?;
        }
        let segment = Segment::new(Arc::clone(&dir), base, walk.position);
        let reconciled = segment::reconcile_indexes(disk, &segment, 0, &walk.entries);
        reconciled.error.map_or(Ok(()), Err)?;
        segment::sync_indexes(disk, &segment)?;
        if number + 1 < bases.len() {
            let sum = from.join(name(Kind::Sum));
            match copy(disk, &sum, &to.join(name(Kind::Sum))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(Error::io("copy", &sum)(error)),
                _ => {}
            }
            let (fault, _) = segment::check_whole(disk, &segment)?;
            fault.map_or(Ok(()), |fault| Err(of_source(fault, &source)))?;
        }
    }
    // What came with the segments may tell how far they went.
    let path = from.join(CHECKPOINT);
    let checkpoint = match HeldCheckpoint::look(disk, &path).map_err(Error::io("read", &path))? {
        HeldCheckpoint::Ours(newest) => newest.map(|(_, checkpoint)| checkpoint.next_offset),
        HeldCheckpoint::Nothing | HeldCheckpoint::Foreign => None,
    };
    let ends = [held(Note::Moved)?, checkpoint, first];
    if let Some(&to) = ends.iter().flatten().max().filter(|&&told| told > end) {
        return Err(Error::RecordsMissing { path: from.to_owned(), from: end, to });
    }
    if let Some(first) = first {
        Note::Start.write(disk, to, first)?;
    }
    disk.sync_dir(to).map_err(Error::io("sync the directory", to))
}

/// The same fault, of the file that was copied.
fn of_source(fault: Error, source: &Path) -> Error {
    let path: PathBuf = source.to_owned();
    match fault {
        Error::Damaged { position, offset, flaw, .. } => Error::Damaged { path, position, offset, flaw },
        Error::SumMismatch { stored, computed, .. } => Error::SumMismatch { path, stored, computed },
        other => other,
    }
}

/// The bases of the segments in a directory, in order.
fn bases_in(disk: &dyn Disk, dir: &Path) -> Result<Vec<u64>> {
    let mut bases = Vec::new();
    for entry in disk.list(dir).map_err(Error::io("list", dir))? {
        if let Some(Name { base, kind: Kind::Log }) = Name::parse(&entry.name)
            && entry.kind == EntryKind::File
        {
            bases.push(base);
        }
    }
    bases.sort_unstable();
    Ok(bases)
}
