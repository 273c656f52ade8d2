//! The first offset that is given out, where that is not the first segment's base: what [`Partition::truncate_before`](super::Partition::truncate_before)
//! remembers of a truncation in the middle of a segment. Without it, the segment's earlier records can be read again.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::PartitionReport;
use super::note::{self, Note};
use crate::error::Result;
use crate::io::Disk;

/// The offset, or 0.
#[derive(Debug)]
pub(super) struct Start(AtomicU64);

impl Start {
    /// Reads the note, if there is one. What is not the engine's is told, and left alone.
    ///
    /// # Errors
    /// What the system says to the engine's own.
    pub(super) fn open(disk: &dyn Disk, dir: &Path, next_offset: u64, report: &mut PartitionReport) -> Result<Self> {
        let offset = Note::Start.look(disk, dir)?.unwrap_or_else(|error| {
            let path = Note::Start.path(dir);
            tracing::warn!(%error, path = %path.display(), "what is called as the note of the first offset is damaged, or another's; records before it can be read again");
            report.ignored.push(path);
            None
        });
        if offset.is_some() {
            note::sync_names(disk, dir)?;
        }
        let start = Self(AtomicU64::new(offset.unwrap_or(0)));
        if start.offset() > next_offset {
            // The records up to there are gone, and their offsets are given again.
            tracing::warn!(path = %Note::Start.path(dir).display(), first = start.offset(), next_offset, "the log ends before its first offset, as noted");
            start.set(disk, dir, next_offset)?;
        }
        Ok(start)
    }

    pub(super) fn offset(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Remembers another offset, durably.
    ///
    /// # Errors
    /// What the system says; the offset is as it was, or the new one, as the note says by now. After a power loss it may be either.
    pub(super) fn set(&self, disk: &dyn Disk, dir: &Path, offset: u64) -> Result<()> {
        let written = Note::Start.write(disk, dir, offset);
        // What the note says, or may say, the next opening goes by: no record may get an offset before that.
        if written.is_ok() || !Note::Start.read(disk, dir).is_ok_and(|held| held != Some(offset)) {
            self.0.store(offset, Ordering::Release);
        }
        written
    }
}
