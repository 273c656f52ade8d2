//! The active segment's files, the room ahead of the records, and the segment that comes next.
//!
//! Room is allocated a chunk at a time (`fallocate` mode 0: the length grows with it, up front, and is synced before any
//! record relies on it), by the upkeep thread while there still is some; the writer does it itself only where it has used up
//! all. The next segment is made ahead in the same way, under a name of its own, and takes its place by being renamed.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Shared;
use super::index_files::IndexFiles;
use super::upkeep::{Extended, Unextended};
use crate::config::Durability;
use crate::error::{Error, Result, is_full};
use crate::guard::{self, Guard};
use crate::io::transfer::{read_exact_at, write_blocks_at};
use crate::io::{BLOCK, Buffer, Create, Directory, Disk, File, Open};
use crate::record::{to_u64, to_usize};
use crate::segment::{self, Kind, Segment, SumSoFar};

/// Segments and chunks of room below this size are made when they are needed: there is no time to make them ahead, and
/// little to gain.
const WORTH_PREPARING: u64 = 1 << 20;

/// Whether a segment of so many bytes is made ahead.
pub(super) fn is_worth_preparing(segment_bytes: u64) -> bool {
    segment_bytes >= WORTH_PREPARING
}

/// Bytes of zeros in one write beside the commits: none of these waits longer for the device than such a write takes.
const ZEROS: u64 = 256 << 10;

/// The open files of the segment that takes the writes. Used by the writer alone.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) segment: Arc<Segment>,
    pub(super) log: Arc<dyn File>,
    /// Whole blocks past the page cache; else any bytes through it.
    pub(super) direct: bool,
    pub(super) index: Arc<IndexFiles>,
    /// The file's length: room up to here is promised, unless the file system promises nothing.
    pub(super) allocated: u64,
    /// How much to allocate ahead: less than the settings say once that found no room.
    ahead: u64,
    /// Up to here every byte was written once, by records or as zeros.
    pub(super) zeroed: u64,
    /// The file system cannot promise room.
    unpromised: bool,
    /// Of all records that have a place in it.
    pub(super) sum: SumSoFar,
}

/// Why there is no new segment, or no room in this one.
#[derive(Debug)]
pub(super) enum Denied {
    /// Nothing was made or written, or it is gone again: the appends that need it are refused, and a later attempt may succeed.
    Refused(Error),
    /// What stands on the disk is not known.
    Failed(Error),
}

impl Denied {
    /// The log at `path` could not be made. One that is there already is nobody's that is known.
    fn of(error: io::Error, path: &Path) -> Self {
        let is_taken = error.kind() == io::ErrorKind::AlreadyExists;
        let error = full_or_io(error, "create", path, 0);
        if is_taken { Self::Failed(error) } else { Self::Refused(error) }
    }

    /// The same, where an open that was refused may have made the file: it would stand there as a segment once the log goes on.
    fn of_new(error: io::Error, shared: &Shared, names: &dyn Directory, path: &Path) -> Self {
        let error = match Self::of(error, path) {
            Self::Refused(error) => error,
            failed => return failed,
        };
        let gone = match shared.disk.remove_file(path) {
            Ok(()) => names.sync().is_ok(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if gone { Self::Refused(error) } else { Self::Failed(error) }
    }
}

impl From<Denied> for Error {
    fn from(reason: Denied) -> Self {
        let (Denied::Refused(error) | Denied::Failed(error)) = reason;
        error
    }
}

impl Active {
    /// Makes an empty segment, durable by its name in the open directory `names`.
    pub(super) fn create(shared: &Shared, names: &dyn Directory, base: u64) -> Result<Self, Denied> {
        let segment = Arc::new(Segment::new(Arc::clone(&shared.dir), base, 0));
        let path = segment.path(Kind::Log);
        let (log, direct) = open_log(shared, &path, Create::New).map_err(|error| Denied::of_new(error, shared, names, &path))?;
        let index = IndexFiles::new(Arc::clone(&segment), 0);
        if let Err(error) = index.make(&*shared.disk) {
            tracing::warn!(%error, path = %path.display(), "a segment begins without index files; they are made when it is possible");
        }
        let named = if guard::stands(Guard::NamesBeforeAnswers) { names.sync() } else { Ok(()) };
        match named {
            Ok(()) => Ok(Self::new(shared, segment, log, direct, index)),
            Err(error) => {
                let error = full_or_io(error, "sync the directory", &shared.dir, 0);
                // A directory whose sync failed otherwise may hold anything.
                let gone = error.is_disk_full() && segment::remove(&*shared.disk, &shared.dir, base).is_ok();
                Err(if gone { Denied::Refused(error) } else { Denied::Failed(error) })
            }
        }
    }

    /// Opens the files of a segment whose recovery is done: the log ends with the last record, and the index files hold
    /// `indexed` entries.
    pub(super) fn open(shared: &Shared, segment: Arc<Segment>, indexed: usize) -> Result<Self> {
        let path = segment.path(Kind::Log);
        let (log, direct) = open_log(shared, &path, Create::Never).map_err(Error::io("open", &path))?;
        let index = IndexFiles::new(Arc::clone(&segment), to_u64(indexed));
        Ok(Self::new(shared, segment, log, direct, index))
    }

    fn new(shared: &Shared, segment: Arc<Segment>, log: Arc<dyn File>, direct: bool, index: IndexFiles) -> Self {
        let end = segment.appended();
        let ahead = shared.config.preallocate_bytes;
        let sum = SumSoFar::from(end);
        Self { segment, log, direct, index: Arc::new(index), allocated: end, ahead, zeroed: end, unpromised: false, sum }
    }

    /// Goes on through the page cache, where the file system turns out to refuse direct writes.
    pub(super) fn go_through_the_page_cache(&mut self, shared: &Shared) -> Result<()> {
        let path = self.segment.path(Kind::Log);
        tracing::warn!(path = %path.display(), "the file system refuses direct writes; writing through the page cache");
        self.log = shared.disk.open(&path, Open::WRITE).map_err(Error::io("open", &path))?;
        self.direct = false;
        Ok(())
    }

    /// The bytes of the block that holds the end of the log, up to the end.
    pub(super) fn last_block(&self, disk: &dyn Disk) -> Result<Vec<u8>> {
        let end = self.segment.appended();
        let start = end - end % BLOCK;
        let mut bytes = vec![0; to_usize(end - start)];
        if self.direct && !bytes.is_empty() {
            let path = self.segment.path(Kind::Log);
            // Through the page cache: a direct read would need aligned memory, and the file's end is no block's end.
            let file = self.segment.open_log(disk)?;
            read_exact_at(&*file, &mut bytes, start).map_err(Error::io("read", &path))?;
        }
        Ok(bytes)
    }

    /// Whether there is room up to byte `end`.
    pub(super) fn has_room(&self, end: u64) -> bool {
        end.next_multiple_of(BLOCK) <= self.allocated
    }

    /// Sees to room up to byte `end`, and ahead of it as far as the settings and `limit` say and the device has room.
    ///
    /// # Errors
    /// Where it is refused, no record was written, and what is there is intact.
    pub(super) fn make_room(&mut self, shared: &Shared, end: u64, limit: u64) -> Result<(), Denied> {
        if self.has_room(end) {
            return Ok(());
        }
        let needed = end.next_multiple_of(BLOCK);
        let hoped = needed.max(self.allocated.saturating_add(self.ahead).min(limit)).next_multiple_of(BLOCK);
        let durable = shared.config.durability == Durability::Durable;
        let mut result = self.extend(hoped, durable);
        if hoped > needed && matches!(&result, Err(Unextended::Refused(error)) if is_full(error)) {
            // Some file systems take long to find out; the next attempt asks for less.
            self.ahead /= 2;
            result = self.extend(needed, durable);
        }
        let path = self.segment.path(Kind::Log);
        match result {
            Ok(extended) => {
                self.has_grown(shared, extended);
                Ok(())
            }
            Err(Unextended::Failed(error)) => Err(Denied::Failed(Error::io("sync", &path)(error))),
            Err(Unextended::Refused(error)) => Err(Denied::Refused(full_or_io(error, "allocate room for", &path, needed - self.allocated))),
        }
    }

    fn extend(&mut self, len: u64, durable: bool) -> Result<Extended, Unextended> {
        if self.unpromised {
            return set_len(&*self.log, len, durable);
        }
        match extend(&*self.log, self.allocated..len, durable) {
            Err(Unextended::Refused(error)) if error.kind() == io::ErrorKind::Unsupported => {
                tracing::warn!(path = %self.segment.path(Kind::Log).display(), "the file system cannot allocate ahead; \
                    going on without, so a full disk shows only when records are written");
                self.unpromised = true;
                set_len(&*self.log, len, durable)
            }
            result => result,
        }
    }

    /// The room to make ahead now, with the log's records ending at `end`; none if there is enough.
    pub(super) fn to_extend(&self, end: u64, limit: u64) -> Option<Range<u64>> {
        let worth_it = self.ahead >= WORTH_PREPARING && self.allocated > 0 && !self.unpromised;
        let target = self.allocated.saturating_add(self.ahead).min(limit).next_multiple_of(BLOCK);
        (worth_it && end.saturating_add(self.ahead / 2) > self.allocated && target > self.allocated).then_some(self.allocated..target)
    }

    /// What came of making room ahead.
    ///
    /// # Errors
    /// The failed sync.
    pub(super) fn extended(&mut self, shared: &Shared, result: Result<Extended, Unextended>) -> Result<()> {
        match result {
            Ok(extended) => {
                self.has_grown(shared, extended);
                Ok(())
            }
            Err(Unextended::Refused(error)) => {
                tracing::debug!(%error, path = %self.segment.path(Kind::Log).display(), "no room to allocate ahead");
                self.ahead /= 2;
                Ok(())
            }
            Err(Unextended::Failed(error)) => Err(Error::io("sync", &self.segment.path(Kind::Log))(error)),
        }
    }

    fn has_grown(&mut self, shared: &Shared, Extended { len, written }: Extended) {
        if written && self.zeroed >= self.allocated {
            self.zeroed = len;
        }
        self.allocated = self.allocated.max(len);
        shared.metrics.sync();
    }

    /// Whether zeros ahead pay: not where space is allocated on writing anyway.
    pub(super) fn takes_zeros(&self) -> bool {
        self.direct && !self.unpromised
    }

    /// Whether it is time to make the next segment, with the log's records ending at `end`.
    pub(super) fn wants_successor(&self, shared: &Shared, end: u64) -> bool {
        let limit = shared.live.segment_bytes();
        is_worth_preparing(limit) && end >= limit - (limit / 2).min(shared.config.preallocate_bytes.max(WORTH_PREPARING))
    }

    /// Whether its log holds records and has another name besides, as an export gives it one: then it must not be appended to.
    pub(super) fn is_shared(&self) -> Result<bool> {
        let links = || self.log.details().map_err(Error::io("look at", &self.segment.path(Kind::Log))).map(|found| found.links);
        Ok(self.segment.appended() > 0 && guard::stands(Guard::LinksKept) && links()? > 1)
    }

    /// Ends the files with their last record and entry, durably, and gives the room behind back. Nobody else is at them.
    pub(super) fn seal(&mut self, shared: &Shared) -> Result<()> {
        self.index.write(&*shared.disk, u64::MAX);
        self.cut()?;
        if guard::stands(Guard::SyncsBeforeRolls) {
            self.log.sync().map_err(Error::io("sync", &self.segment.path(Kind::Log)))?;
        }
        shared.metrics.sync();
        self.segment.set_durable(self.segment.appended());
        self.index.seal(&*shared.disk);
        Ok(())
    }

    /// Ends the log with its last record. Not synced.
    pub(super) fn cut(&mut self) -> Result<()> {
        let end = self.segment.appended();
        self.log.set_len(end).map_err(Error::io("cut", &self.segment.path(Kind::Log)))?;
        self.allocated = end;
        self.zeroed = end;
        Ok(())
    }
}

/// The files of the next segment, before its base is known.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) log: Arc<dyn File>,
    pub(super) direct: bool,
    pub(super) allocated: u64,
    pub(super) zeroed: u64,
    unpromised: bool,
}

impl Prepared {
    /// Makes the files, with `room` bytes allocated.
    ///
    /// # Errors
    /// There is no room, or the system refuses: nothing is left behind, and the segment is made when it is needed.
    pub(super) fn make(shared: &Shared, room: u64) -> Result<Self> {
        let made = Self::try_make(shared, room);
        if made.is_err() {
            Self::discard(&*shared.disk, &shared.dir);
        }
        made
    }

    fn try_make(shared: &Shared, room: u64) -> Result<Self> {
        let path = segment::prepared_path(&shared.dir, Kind::Log);
        let (log, direct) = open_log(shared, &path, Create::Empty).map_err(Error::io("create", &path))?;
        let (allocated, unpromised) = match log.allocate(0..room) {
            Ok(()) => (log.len().map_err(Error::io("measure", &path))?, false),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => (0, true),
            Err(error) => return Err(full_or_io(error, "allocate room for", &path, room)),
        };
        for kind in [Kind::Index, Kind::TimeIndex] {
            let path = segment::prepared_path(&shared.dir, kind);
            shared.disk.open(&path, Open::EMPTY).map_err(Error::io("create", &path))?;
        }
        Ok(Self { log, direct, allocated, zeroed: 0, unpromised })
    }

    /// Writes zeros into the room: all of it if the device does that by itself, else so many bytes of it, whole blocks.
    pub(super) fn write_zeros(&mut self, bytes: u64) -> io::Result<()> {
        if !self.direct || self.unpromised {
            return Ok(());
        }
        if self.log.write_zeroes(0..self.allocated).is_ok() {
            self.zeroed = self.allocated;
            return Ok(());
        }
        let zeros = Buffer::new(to_usize(ZEROS.min(bytes)))?;
        while self.zeroed < bytes {
            let piece = to_usize((bytes - self.zeroed).min(ZEROS));
            write_blocks_at(&*self.log, &zeros[..piece], self.zeroed, false)?;
            self.zeroed += to_u64(piece);
        }
        Ok(())
    }

    /// Makes what was prepared durable, all but its name; else nothing is left of it.
    pub(super) fn synced(self, shared: &Shared) -> Result<Self> {
        let path = segment::prepared_path(&shared.dir, Kind::Log);
        match self.log.sync() {
            Ok(()) => Ok(self),
            Err(error) => {
                Self::discard(&*shared.disk, &shared.dir);
                Err(Error::io("sync", &path)(error))
            }
        }
    }

    /// Gives the files the name of the segment `base`. The name is not durable yet.
    pub(super) fn take_place(self, shared: &Shared, base: u64) -> Result<Active, Denied> {
        let segment = Arc::new(Segment::new(Arc::clone(&shared.dir), base, 0));
        let rename = |kind| shared.disk.rename(&segment::prepared_path(&shared.dir, kind), &segment.path(kind));
        // The log first: without index files it is a segment all the same, which opening completes; they alone would be nothing.
        rename(Kind::Log).map_err(|error| Denied::of(error, &segment.path(Kind::Log)))?;
        for kind in [Kind::Index, Kind::TimeIndex] {
            if let Err(error) = rename(kind) {
                tracing::warn!(%error, path = %segment.path(kind).display(), "a segment begins without index files; they are made when it is possible");
            }
        }
        let index = IndexFiles::new(Arc::clone(&segment), 0);
        let mut active = Active::new(shared, segment, self.log, self.direct, index);
        active.allocated = self.allocated;
        active.zeroed = self.zeroed;
        active.unpromised = self.unpromised;
        Ok(active)
    }

    /// Removes what was prepared. It holds nothing, and what cannot be removed now the next opening removes.
    pub(super) fn discard(disk: &dyn Disk, dir: &Path) {
        for kind in [Kind::TimeIndex, Kind::Index, Kind::Log] {
            let path: PathBuf = segment::prepared_path(dir, kind);
            match disk.remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, path = %path.display(), "an unused file could not be removed");
                }
                _ => {}
            }
        }
    }
}

/// Makes room for bytes `range` of a log, where it ends now; written room if the device does that by itself.
pub(super) fn extend(log: &dyn File, range: Range<u64>, durable: bool) -> Result<Extended, Unextended> {
    let start = range.start;
    if let Err(error) = log.allocate(range.clone()) {
        // A part may have been allocated. The records' end is far below; what is beyond can be given back.
        let _ = log.set_len(start);
        return Err(Unextended::Refused(error));
    }
    // Most devices cannot; then commits bring their zeros.
    let written = durable && log.write_zeroes(range).is_ok();
    Ok(Extended { len: synced_len(log, durable)?, written })
}

/// The same where the file system promises nothing.
fn set_len(log: &dyn File, len: u64, durable: bool) -> Result<Extended, Unextended> {
    log.set_len(len).map_err(Unextended::Refused)?;
    Ok(Extended { len: synced_len(log, durable)?, written: false })
}

fn synced_len(log: &dyn File, durable: bool) -> Result<u64, Unextended> {
    // The new length must not be younger than the records in it.
    if durable {
        log.sync().map_err(Unextended::Failed)?;
    }
    log.len().map_err(Unextended::Failed)
}

/// Opens the log as its durability wants it: past the page cache where the file system allows.
fn open_log(shared: &Shared, path: &Path, create: Create) -> io::Result<(Arc<dyn File>, bool)> {
    let how = Open { write: true, create, direct: shared.config.durability == Durability::Durable };
    match shared.disk.open(path, how) {
        Err(error) if how.direct && error.kind() == io::ErrorKind::InvalidInput => {
            tracing::info!(path = %path.display(), "the file system refuses direct I/O; writing through the page cache");
            // The refused attempt may have made the file.
            let create = if create == Create::New { Create::Empty } else { create };
            Ok((shared.disk.open(path, Open { direct: false, create, ..how })?, false))
        }
        result => Ok((result?, how.direct)),
    }
}

fn full_or_io(error: io::Error, action: &'static str, path: &Path, needed: u64) -> Error {
    if is_full(&error) { Error::DiskFull { path: path.to_owned(), needed, appended: 0 } } else { Error::io(action, path)(error) }
}
