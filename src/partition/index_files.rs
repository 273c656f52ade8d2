//! The two index files of the segment that takes the writes.
//!
//! They hold nothing that the log does not, so nothing waits for them and a failure is told, not acted on: entries wait in
//! memory, where look-ups find them, until they are written in large pieces by the upkeep thread. The writer itself writes the
//! first entry of a segment, and what is left when nobody else is at them.
//!
//! They are open only while something is done with them, one at a time: two descriptors less for each partition, and opening them costs next to
//! nothing beside the thousands of entries that are written at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::transfer::write_all_at;
use crate::io::{Create, Disk, File, Open};
use crate::record::to_u64;
use crate::segment::{self, ENTRY_BYTES, IndexEntry, Kind, Segment, count_below};

/// The index and the time index of one segment. One thread at a time writes them; the lock says which.
#[derive(Debug)]
pub(super) struct IndexFiles {
    segment: Arc<Segment>,
    state: Mutex<State>,
    /// Whether entries could not be written, and that was told.
    failed: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// Bytes in either file.
    end: u64,
    /// Whether anything was done to the files since recovery left them, which synced them.
    touched: bool,
    /// Whether a sync of them failed, or they could not be sealed: what they hold durably is not known, and never will be.
    distrusted: bool,
    /// What is being written, kept for its memory.
    entries: Vec<IndexEntry>,
    bytes: Vec<u8>,
}

impl IndexFiles {
    /// Files that hold `entries` entries; with none, they are made, or emptied, when they are needed.
    pub(super) fn new(segment: Arc<Segment>, entries: u64) -> Self {
        let state = State { end: entries * ENTRY_BYTES, touched: false, distrusted: false, entries: Vec::new(), bytes: Vec::new() };
        Self { segment, state: Mutex::new(state), failed: AtomicBool::new(false) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // `end` moves only after both files were written: right at every moment that a panic could leave it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the files, empty, for a segment that has no entries yet.
    pub(super) fn make(&self, disk: &dyn Disk) -> Result<()> {
        let mut state = self.state();
        KINDS.into_iter().try_for_each(|kind| state.open(&self.segment, disk, kind).map(drop))
    }

    /// Of its segment.
    pub(super) fn base(&self) -> u64 {
        self.segment.base()
    }

    /// Whether the files hold entries, so that a log with acknowledged records does not stand beside an empty index.
    pub(super) fn has_entries(&self) -> bool {
        self.state().end > 0
    }

    /// Writes the entries that wait, of records below `up_to`. Not synced: the log holds all that they say.
    ///
    /// A failure costs look-ups their speed, never a record: the entries stay in memory until the next attempt.
    pub(super) fn write(&self, disk: &dyn Disk, up_to: u64) {
        let mut state = self.state();
        state.entries.clear();
        {
            let pending = self.segment.pending();
            state.entries.extend_from_slice(&pending[..pending.partition_point(|entry| entry.offset < up_to)]);
        }
        let count = state.entries.len();
        if count == 0 {
            return;
        }
        if let Err(error) = state.write(&self.segment, disk) {
            if !self.failed.swap(true, Ordering::Relaxed) {
                tracing::warn!(%error, "index entries could not be written; they wait in memory");
            }
            return;
        }
        self.failed.store(false, Ordering::Relaxed);
        state.end += to_u64(count) * ENTRY_BYTES;
        // Only now: until then a look-up must find them in memory.
        self.segment.pending().drain(..count);
    }

    /// Whether the last attempt to write failed. Waits for nobody.
    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Makes durable what was written, and tells how many entries of records below `up_to` both files hold then; 0 if some of
    /// those wait still, or it could not be done.
    pub(super) fn sync(&self, disk: &dyn Disk, up_to: u64) -> u64 {
        let failed = |action| move |error| Error::io(action, &self.segment.path(Kind::Index))(error);
        let synced = || -> Result<u64> {
            let count = self.state().end / ENTRY_BYTES;
            if self.segment.pending().first().is_some_and(|entry| entry.offset < up_to) {
                return Ok(0);
            }
            // Without the lock: the writer looks at the state, and a sync takes its time.
            let file = |kind| self.state().open(&self.segment, disk, kind);
            if guard::stands(Guard::CheckpointsSyncIndexes) {
                for kind in KINDS {
                    file(kind)?.sync().inspect_err(|_| self.state().distrusted = true).map_err(failed("sync"))?;
                }
            }
            count_below(&*file(Kind::Index)?, count, up_to).map_err(failed("read"))
        };
        synced().unwrap_or_else(|error| {
            tracing::warn!(%error, "an index could not be synced");
            0
        })
    }

    /// Ends the files with the last entry that both hold, durably: opening looks only at the ends of sealed ones. Where that fails, or a
    /// sync failed before, they are removed, for a later sync that succeeds would not make up for it: look-ups scan the log until the next
    /// opening makes them anew.
    pub(super) fn seal(&self, disk: &dyn Disk) {
        if self.failed() {
            // There may have been no descriptor for just that moment, and there is no later attempt.
            self.write(disk, u64::MAX);
        }
        let mut state = self.state();
        let end = state.end;
        let mut sealed = || -> Result<()> {
            if !state.touched {
                return Ok(());
            }
            for kind in KINDS {
                let file = state.open(&self.segment, disk, kind)?;
                let synced = || if guard::stands(Guard::SealsSyncIndexes) { file.sync() } else { Ok(()) };
                let ended = file.set_len(end).and_then(|()| synced());
                ended.map_err(|error| Error::io("end", &self.segment.path(kind))(error))?;
            }
            Ok(())
        };
        if let Err(error) = sealed() {
            tracing::warn!(%error, "an index could not be sealed; it is made anew by the next opening");
            state.distrusted = true;
        }
        if state.distrusted {
            segment::remove_indexes(disk, &self.segment);
        }
    }

    /// Lets go of memory that is kept for the next entries.
    pub(super) fn rest(&self) {
        let mut state = self.state();
        (state.entries, state.bytes) = (Vec::new(), Vec::new());
        self.segment.pending().shrink_to_fit();
    }

    /// How many entries both files hold durably after [`Self::seal`]; 0 if that is not known, or not all could be written.
    pub(super) fn sealed_entries(&self) -> u64 {
        let state = self.state();
        if state.distrusted || !self.segment.pending().is_empty() { 0 } else { state.end / ENTRY_BYTES }
    }
}

const KINDS: [Kind; 2] = [Kind::Index, Kind::TimeIndex];

impl State {
    /// One of the two files; made, or emptied, if they hold no entry yet.
    fn open(&mut self, segment: &Segment, disk: &dyn Disk, kind: Kind) -> Result<Arc<dyn File>> {
        self.touched = true;
        let create = if self.end == 0 { Create::Empty } else { Create::Never };
        let path = segment.path(kind);
        disk.open(&path, Open { create, ..Open::WRITE }).map_err(Error::io("open", &path))
    }

    /// Writes `entries` behind those that are there.
    fn write(&mut self, segment: &Segment, disk: &dyn Disk) -> Result<()> {
        for kind in KINDS {
            let file = self.open(segment, disk, kind)?;
            IndexEntry::encode_all(&self.entries, kind, &mut self.bytes);
            let written = write_all_at(&*file, &self.bytes, self.end, false);
            written.map_err(|error| Error::io("write", &segment.path(kind))(error))?;
        }
        Ok(())
    }
}
