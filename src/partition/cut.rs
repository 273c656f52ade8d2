//! Cutting the end of the log: the records from an offset on are gone, to the byte, and none of them can come back.
//!
//! The order makes a crash at any point harmless. (1) The checkpoint is replaced by one that vouches for nothing that is to go; without it, an opening
//! would take what is missing for damage. (2) Segments go whole, the last one first, each durably before the next: the log is
//! without a gap at any time. (3) The segment in which the cut lies is cut, and synced. What a crash leaves is the log with some of its end.
//!
//! A file with another name besides, a hard link that an export made, is never cut: what stays of it is copied, and takes its place.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::checkpoint::Checkpoint;
use super::{Partition, Shared};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::{Disk, Open};
use crate::partition::queue::Message;
use crate::record::{to_u64, to_usize};
use crate::segment::{self, ENTRY_BYTES, Found, Kind, Name, Scanner, Segment, Step};

/// The cuts since the partition was opened, for readers to find out what became of what they hold.
#[derive(Debug, Default)]
pub(super) struct Cuts {
    count: AtomicU64,
    under_way: AtomicBool,
    /// Where the log ended after each.
    ends: Mutex<Vec<u64>>,
}

impl Cuts {
    /// How many there were.
    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// The least that the log held at the end of any of those after the first `count`.
    pub(super) fn lowest_since(&self, count: u64) -> Option<u64> {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.get(to_usize(count)..)?.iter().min().copied()
    }

    /// To be called when all that went is gone, and before anything is appended.
    fn add(&self, end: u64) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.push(end);
        self.count.store(to_u64(ends.len()), Ordering::Release);
        self.under_way.store(false, Ordering::SeqCst);
    }
}

impl Shared {
    /// Whether an error may come of a cut after the first `count`: also of one that is under way, which is waited for.
    pub(super) fn was_cut_since(&self, count: u64) -> bool {
        if self.cuts.under_way.load(Ordering::SeqCst) {
            drop(self.alone());
        }
        self.cuts.count() != count
    }
}

impl Partition {
    /// Cuts the log so that `offset` is the next one: the records from there on are gone, whoever appended them and however durable they were. All that
    /// was queued before is written first, and counts as cut; what is queued later gets the offsets from `offset` on. Meant for logs that are replicas, and
    /// for repairs.
    ///
    /// A reader or a tail that stands behind `offset` gets [`Error::OffsetOutOfRange`], with the new end, when it reads on.
    ///
    /// # Durability
    /// When this returns, no crash brings a byte of those records back. After a crash before, the log ends somewhere between `offset` and
    /// where it ended, with a whole record.
    ///
    /// # Blocking
    /// Until what is queued before is written, and for the device. Appends wait.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`] unless `offset` is that of a record that there is, or the next one; [`Error::Damaged`] if it cannot be found for damage
    /// before it; what the system says to the first step: nothing was cut then. [`Error::Failed`] for later steps: the partition stops. [`Error::Closed`].
    pub fn truncate_after(&self, offset: u64) -> Result<()> {
        self.0.ask(|answer| Message::TruncateAfter { offset, answer })
    }
}

/// Where a log is to end.
#[derive(Debug)]
pub(super) struct Cut {
    /// The segment that will take the appends.
    segment: Arc<Segment>,
    /// The offset that is next, and its place.
    pub(super) offset: u64,
    pub(super) position: u64,
    /// Entries that its index files keep.
    pub(super) entries: u64,
    /// Of the records that stay.
    pub(super) last_timestamp: u64,
}

impl Cut {
    /// Finds the place of the record `offset`, which is there. Nothing is changed. All index entries of the log are in the files. The caller is
    /// [alone](Shared::alone) from before this until readers are [told](Self::tell).
    pub(super) fn find(shared: &Shared, offset: u64) -> Result<Self> {
        let segment = shared.segment_of(offset).ok_or_else(|| shared.out_of_range(offset))?;
        let disk = &*shared.disk;
        let before = shared.segment_before(segment.base()).and_then(|before| before.read_last_time(disk));
        if segment.base() == offset {
            return Ok(Self { segment, offset, position: 0, entries: 0, last_timestamp: before.unwrap_or(0) });
        }
        let log = segment.open_log(disk)?;
        let path = segment.path(Kind::Log);
        let from = |first, start, entries| {
            let mut scanner = Scanner::new(&*log, &path, start, first, segment.appended());
            let mut last_timestamp = before.unwrap_or(0);
            while scanner.offset() < offset {
                match scanner.next()? {
                    Step::Record(Found { timestamp, .. }) => last_timestamp = last_timestamp.max(timestamp),
                    Step::End => return Err(scanner.damaged(scanner.flaw_of_missing())),
                    Step::Flawed(flaw) => return Err(scanner.damaged(flaw)),
                }
            }
            Ok(Self { segment: Arc::clone(&segment), offset, position: scanner.position(), entries, last_timestamp })
        };
        // From the last entry that both files have of a record that stays, else from the start.
        let by_index = segment::last_entry_below(disk, &segment, offset).map(|entry| from(entry.offset, entry.second, entry.count));
        match by_index {
            Some(found) if !found.as_ref().is_err_and(Error::is_damage) => found,
            _ => from(segment.base(), 0, 0),
        }
    }

    /// Sees to it that no checkpoint vouches for what is to go.
    ///
    /// # Errors
    /// What the system says. Nothing else was changed.
    pub(super) fn announce(&self, shared: &Shared) -> Result<()> {
        if !guard::stands(Guard::CutsAnnounced) {
            return Ok(());
        }
        let Self { segment, offset, position, entries, last_timestamp } = self;
        let checkpoint = Checkpoint {
            base: segment.base(),
            position: *position,
            next_offset: *offset,
            last_timestamp: *last_timestamp,
            entries: *entries,
            clean: false,
        };
        let mut checkpoints = shared.checkpoints.lock().unwrap_or_else(PoisonError::into_inner);
        checkpoints.take_back(&checkpoint).map_err(Error::io("write", &checkpoints.path()))
    }

    /// Takes the records from the readers, and then from the disk. Gives the segment that goes on.
    ///
    /// # Errors
    /// What the system says: the log on the disk ends somewhere, and what this knows of it is wrong.
    pub(super) fn make(&self, shared: &Shared) -> Result<Arc<Segment>> {
        let (disk, dir, base) = (&*shared.disk, &shared.dir, self.segment.base());
        shared.cuts.under_way.store(true, Ordering::SeqCst);
        shared.set_durable_end(self.offset);
        shared.set_appended_end(self.offset);
        let gone = {
            let mut segments = shared.segments.write().unwrap_or_else(PoisonError::into_inner);
            let stay = segments.partition_point(|segment| segment.base() <= base);
            segments.split_off(stay)
        };
        // An index that outlived its log could be taken for the trace of records that are missing.
        for segment in &gone {
            segment::remove_derived(disk, dir, segment.base()).map_err(Error::io("remove the indexes of", &segment.path(Kind::Log)))?;
        }
        if !gone.is_empty() {
            disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
        }
        for segment in gone.iter().rev() {
            let path = segment.path(Kind::Log);
            disk.remove_file(&path).map_err(Error::io("remove", &path))?;
            if guard::stands(Guard::CutsFromTheEnd) {
                disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
            }
        }
        // It is none of a sealed log any more.
        let sum = self.segment.path(Kind::Sum);
        segment::remove_if_there(disk, &sum).map_err(Error::io("remove", &sum))?;
        // The log last: as long as it has another name, so may its indexes, and an opening appends to none of them.
        let entries = self.entries * ENTRY_BYTES;
        for (kind, len) in [(Kind::Index, entries), (Kind::TimeIndex, entries), (Kind::Log, self.position)] {
            cut_file(disk, dir, Name { base, kind }, len)?;
        }
        disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
        let segment = Arc::new(Segment::new(Arc::clone(dir), base, self.position));
        segment.note_last_time(self.last_timestamp);
        let mut segments = shared.segments.write().unwrap_or_else(PoisonError::into_inner);
        let last = segments.last_mut().expect("the segment of the cut stays");
        *last = Arc::clone(&segment);
        Ok(segment)
    }

    /// Tells readers, once nothing that they could hold is the log's any more.
    pub(super) fn tell(&self, shared: &Shared) {
        shared.cuts.add(self.offset);
        shared.watches.tell_all();
    }
}

/// Ends a file at that length, durably. An index that is not there stays away.
fn cut_file(disk: &dyn Disk, dir: &Path, name: Name, len: u64) -> Result<()> {
    let path = dir.join(name.to_string());
    let file = match disk.open(&path, Open::WRITE) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && name.kind != Kind::Log => return Ok(()),
        file => file.map_err(Error::io("open", &path))?,
    };
    let held = file.len().map_err(Error::io("measure", &path))?;
    let links = file.details().map_err(Error::io("look at", &path))?.links;
    if links > 1 && guard::stands(Guard::LinksKept) {
        let copy = segment::prepared_path(dir, Kind::Log);
        segment::copy(disk, &*file, &copy, &(0..len.min(held))).map_err(Error::io("copy what stays of", &path))?;
        return disk.replace(&copy, &path).and_then(|()| disk.sync_dir(dir)).map_err(Error::io("replace", &path));
    }
    let cut = || {
        if held > len {
            file.set_len(len)?;
        }
        if guard::stands(Guard::CutsSynced) { file.sync() } else { Ok(()) }
    };
    cut().map_err(Error::io("cut", &path))
}
