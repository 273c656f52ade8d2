//! The active segment's files, and the room ahead of the records.
//!
//! Room is allocated a chunk at a time (`fallocate` mode 0: the length grows with it, up front, and is synced before any
//! record relies on it). Allocated space is not yet written space: on ext4 the first durable write into it costs a
//! journal commit, half as long again as the write. So while commits are small, zeros are written ahead of them.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::Shared;
use crate::config::Durability;
use crate::error::{Error, Result, is_full};
use crate::io::transfer::{read_exact_at, write_all_at};
use crate::io::{BLOCK, Create, Disk, File, Open};
use crate::record::{to_u64, to_usize};
use crate::segment::{self, ENTRY_BYTES, IndexEntry, Kind, Segment};

/// Index entries that wait in memory before they are written, at most: 64 KiB in either file.
const PENDING_ENTRIES: usize = 4096;

/// The open files of the segment that takes the writes. Used by the writer's thread alone.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) segment: Arc<Segment>,
    pub(super) log: Arc<dyn File>,
    /// Whole blocks past the page cache; else any bytes through it.
    pub(super) direct: bool,
    /// The index and the time index, once they are needed.
    indexes: Option<[Arc<dyn File>; 2]>,
    /// Bytes in either index file.
    index_end: u64,
    /// The file's length: room up to here is promised, unless the file system promises nothing.
    allocated: u64,
    /// How much to allocate ahead: less than the settings say once that found no room.
    ahead: u64,
    /// Up to here every byte was written once, by records or as zeros.
    pub(super) zeroed: u64,
    /// Whether index entries could not be written, and that was told.
    index_failed: bool,
    /// Whether an index file could not be sealed: what it holds durably is not known.
    unsealed: bool,
    /// Whether zeros ahead pay: not where space is allocated on writing anyway.
    pub(super) zeroing_pays: bool,
}

/// Why there is no new segment.
#[derive(Debug)]
pub(super) enum NoSegment {
    /// Nothing was made, or it is gone again: the appends that need it are refused, and a later attempt may succeed.
    Refused(Error),
    /// What stands on the disk is not known.
    Failed(Error),
}

impl From<NoSegment> for Error {
    fn from(reason: NoSegment) -> Self {
        let (NoSegment::Refused(error) | NoSegment::Failed(error)) = reason;
        error
    }
}

impl Active {
    /// Makes an empty segment, durable by name.
    pub(super) fn create(shared: &Shared, base: u64) -> Result<Self, NoSegment> {
        let segment = Arc::new(Segment::new(Arc::clone(&shared.dir), base, 0));
        let path = segment.path(Kind::Log);
        let (log, direct) = open_log(shared, &path, Create::New).map_err(|error| {
            let refused = error.kind() != io::ErrorKind::AlreadyExists;
            let error = full_or_io(error, "create", &path, 0);
            if refused { NoSegment::Refused(error) } else { NoSegment::Failed(error) }
        })?;
        let mut active = Self::new(shared, segment, log, direct, 0);
        if let Err(error) = active.open_indexes(&*shared.disk) {
            tracing::warn!(%error, path = %path.display(), "a segment begins without index files; they are made when it is possible");
        }
        match shared.disk.sync_dir(&shared.dir) {
            Ok(()) => Ok(active),
            Err(error) => {
                let error = full_or_io(error, "sync the directory", &shared.dir, 0);
                // A directory whose sync failed otherwise may hold anything.
                let gone = error.is_disk_full() && segment::remove(&*shared.disk, &shared.dir, base).is_ok();
                Err(if gone { NoSegment::Refused(error) } else { NoSegment::Failed(error) })
            }
        }
    }

    /// Opens the files of a segment whose recovery is done: the log ends with the last record, and the index files hold
    /// `indexed` entries.
    pub(super) fn open(shared: &Shared, segment: Arc<Segment>, indexed: usize) -> Result<Self> {
        let path = segment.path(Kind::Log);
        let (log, direct) = open_log(shared, &path, Create::Never).map_err(Error::io("open", &path))?;
        Ok(Self::new(shared, segment, log, direct, to_u64(indexed) * ENTRY_BYTES))
    }

    fn new(shared: &Shared, segment: Arc<Segment>, log: Arc<dyn File>, direct: bool, index_end: u64) -> Self {
        let end = segment.appended();
        let ahead = shared.config.preallocate_bytes;
        Self {
            segment,
            log,
            direct,
            indexes: None,
            index_end,
            index_failed: false,
            unsealed: false,
            allocated: end,
            ahead,
            zeroed: end,
            zeroing_pays: true,
        }
    }

    /// Opens the index files, and empties them if none of their entries is this segment's.
    fn open_indexes(&mut self, disk: &dyn Disk) -> Result<&[Arc<dyn File>; 2]> {
        if self.indexes.is_none() {
            let create = if self.index_end == 0 { Create::Empty } else { Create::Never };
            let open = |kind| {
                let path = self.segment.path(kind);
                disk.open(&path, Open { create, ..Open::WRITE }).map_err(Error::io("open", &path))
            };
            self.indexes = Some([open(Kind::Index)?, open(Kind::TimeIndex)?]);
        }
        Ok(self.indexes.as_ref().expect("opened above"))
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

    /// Sees to room up to byte `end`, and ahead of it as far as the settings and `limit` say and the device has room.
    ///
    /// # Errors
    /// [`Error::DiskFull`]: nothing was written, and what is there is intact.
    pub(super) fn make_room(&mut self, shared: &Shared, end: u64, limit: u64) -> Result<()> {
        let needed = end.next_multiple_of(BLOCK);
        if needed <= self.allocated {
            return Ok(());
        }
        let path = self.segment.path(Kind::Log);
        let hoped = needed.max(self.allocated.saturating_add(self.ahead).min(limit)).next_multiple_of(BLOCK);
        let mut result = self.allocate(hoped);
        if hoped > needed && matches!(&result, Err(error) if is_full(error)) {
            // Some file systems take long to find out; the next attempt asks for less.
            self.ahead /= 2;
            result = self.allocate(needed);
        }
        if let Err(error) = result {
            // A part may have been allocated. The records' end is far below; what is beyond can be given back.
            let _ = self.log.set_len(self.allocated);
            return Err(full_or_io(error, "allocate room for", &path, needed - self.allocated));
        }
        // The new length must not be younger than the records in it.
        if shared.config.durability == Durability::Durable {
            self.log.sync().map_err(Error::io("sync", &path))?;
            shared.metrics.sync();
        }
        self.allocated = self.log.len().map_err(Error::io("measure", &path))?;
        Ok(())
    }

    fn allocate(&mut self, len: u64) -> io::Result<()> {
        match self.log.allocate(self.allocated..len) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                if self.zeroing_pays {
                    tracing::warn!(path = %self.segment.path(Kind::Log).display(), "the file system cannot allocate ahead; \
                        going on without, so a full disk shows only when records are written");
                    self.zeroing_pays = false;
                }
                self.log.set_len(len)
            }
            result => result,
        }
    }

    /// Room that was never written, behind byte `from`: the whole blocks to write zeros to next, at most `bytes`.
    pub(super) fn to_zero(&self, from: u64, bytes: u64) -> Range<u64> {
        let start = self.zeroed.max(from).next_multiple_of(BLOCK);
        let room = self.allocated - self.allocated % BLOCK;
        start..room.min(start.saturating_add(bytes)).max(start)
    }

    /// Whether enough index entries wait to be worth two writes.
    pub(super) fn owes_index(&self) -> bool {
        !self.index_failed && self.segment.pending().len() >= PENDING_ENTRIES
    }

    /// Whether the index files hold no entry yet: the first is not left waiting, so that a log with acknowledged records
    /// never stands beside an empty index.
    pub(super) fn owes_first_entry(&self) -> bool {
        self.index_end == 0 && !self.index_failed
    }

    /// Writes the index entries that wait. Not synced: the log holds all that they say.
    ///
    /// A failure costs look-ups their speed, never a record: it is told, and the entries stay in memory until a quiet moment.
    pub(super) fn write_index(&mut self, disk: &dyn Disk) {
        let entries = self.segment.pending().clone();
        if entries.is_empty() {
            return;
        }
        if let Err(error) = self.try_write_index(disk, &entries) {
            if !self.index_failed {
                tracing::warn!(%error, "index entries could not be written; they wait in memory");
            }
            self.index_failed = true;
            return;
        }
        self.index_failed = false;
        self.index_end += to_u64(entries.len()) * ENTRY_BYTES;
        // Only now: until then a look-up must find them in memory.
        self.segment.pending().drain(..entries.len());
    }

    fn try_write_index(&mut self, disk: &dyn Disk, entries: &[IndexEntry]) -> Result<()> {
        let end = self.index_end;
        let segment = Arc::clone(&self.segment);
        for (kind, file) in [Kind::Index, Kind::TimeIndex].into_iter().zip(self.open_indexes(disk)?) {
            let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.encode(kind)).collect();
            write_all_at(&**file, &bytes, end, false).map_err(Error::io("write", &segment.path(kind)))?;
        }
        Ok(())
    }

    /// Ends the files with their last record and entry, durably, and gives the room behind back.
    pub(super) fn seal(&mut self, shared: &Shared) -> Result<()> {
        self.write_index(&*shared.disk);
        let path = self.segment.path(Kind::Log);
        let end = self.segment.appended();
        self.log.set_len(end).map_err(Error::io("cut", &path))?;
        self.allocated = end;
        self.zeroed = end;
        self.log.sync().map_err(Error::io("sync", &path))?;
        shared.metrics.sync();
        self.segment.set_durable(end);
        self.seal_indexes();
        Ok(())
    }

    /// Ends the index files with the last entry that both hold, durably: opening looks only at the ends of sealed ones.
    fn seal_indexes(&mut self) {
        for file in self.indexes.iter().flatten() {
            if let Err(error) = file.set_len(self.index_end).and_then(|()| file.sync()) {
                tracing::warn!(%error, path = %self.segment.path(Kind::Index).display(), "an index could not be synced; the next opening looks at it");
                self.unsealed = true;
            }
        }
    }

    /// How many entries both index files hold durably after [`Self::seal`]; 0 if that is not known, or not all could be written.
    pub(super) fn sealed_entries(&self) -> u64 {
        if self.unsealed || !self.segment.pending().is_empty() { 0 } else { self.index_end / ENTRY_BYTES }
    }
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
