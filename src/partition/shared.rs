//! What the threads of a partition share, those that call it and those that work for it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use super::budget::BufferBudget;
use super::cut::Cuts;
use super::ends::Ends;
use super::live::{Fixed, Live};
use super::recent::Recent;
use super::start::Start;
use super::watch::Watch;
use super::workers::Workers;
use super::{Checkpoint, Checkpoints};
use crate::config::Durability;
use crate::error::{Error, Result};
use crate::io::{BLOCK, Disk, Process};
use crate::metrics::Metrics;
use crate::record::to_usize;
use crate::segment::Segment;

/// Regions of memory for the end of the log at most; where that is less than was asked for, they are larger.
const MOST_KEPT_REGIONS: u64 = 64;

/// What a partition's threads share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) dir: Arc<Path>,
    pub(super) config: Fixed,
    /// The settings that may change.
    pub(super) live: Live,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) segments: RwLock<Vec<Arc<Segment>>>,
    pub(super) ends: Ends,
    pub(super) watches: Watches,
    /// That the writer stopped, and why if it was not told to. Set before it lets go of anything.
    pub(super) stopped: OnceLock<Option<Error>>,
    pub(super) closed: AtomicBool,
    /// That it takes no more appends because it moves elsewhere. Set before its writer is told to end.
    pub(super) moved: AtomicBool,
    /// Whose threads do the work. A child that it forks has none of them.
    pub(super) process: Process,
    pub(super) metrics: Metrics,
    /// The end of the log, in memory.
    pub(super) recent: Recent,
    /// What it may hold in buffers, with the broker's other partitions.
    pub(super) buffers: Arc<BufferBudget>,
    /// Written by one thread at a time: the writer when it closes, else the upkeep thread.
    pub(super) checkpoints: Mutex<Checkpoints>,
    pub(super) cuts: Cuts,
    /// No record before it is given out, also where its segment is still there.
    pub(super) start: Start,
    /// See [`Self::alone`].
    pub(super) removing: Mutex<()>,
    /// See [`Self::with_files`].
    pub(super) files: Mutex<()>,
    pub(super) workers: Workers,
}

/// Who waits for the watermarks to move.
#[derive(Debug)]
pub(super) struct Watches {
    pub(super) appended: Arc<Watch>,
    pub(super) durable: Arc<Watch>,
}

impl Watches {
    /// Has everybody look, who waits: something else than an end's move is news to them.
    pub(super) fn tell_all(&self) {
        self.appended.tell_all();
        self.durable.tell_all();
    }
}

/// That nobody else takes anything from the log, at either end.
pub(super) type Alone<'a> = MutexGuard<'a, ()>;

impl Shared {
    /// To be held by whoever removes segments or cuts the log, from before it finds out which, and to the end by whoever closes. The writer waits for it:
    /// who holds it must not wait for the writer.
    pub(super) fn alone(&self) -> Alone<'_> {
        self.removing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the files of one segment while none are removed: removes them, or puts something beside a log that may be removed.
    /// Taken after [`Self::alone`] where both are. Upkeep takes only this: appends wait for upkeep, which must not wait for an export that copies.
    pub(super) fn with_files<T>(&self, work: impl FnOnce() -> T) -> T {
        let _files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        work()
    }

    pub(super) fn appended_end(&self) -> u64 {
        self.ends.appended()
    }

    pub(super) fn durable_end(&self) -> u64 {
        self.ends.durable()
    }

    pub(super) fn set_appended_end(&self, end: u64) {
        self.ends.set_appended(end);
    }

    pub(super) fn set_durable_end(&self, end: u64) {
        self.ends.set_durable(end);
    }

    /// Wakes those who wait for an end that was moved meanwhile.
    pub(super) fn tell_watchers(&self) {
        self.watches.appended.tell(self.appended_end());
        self.watches.durable.tell(self.durable_end());
    }

    /// Says why the writer stops: the ends move no more.
    pub(super) fn stop(&self, error: Option<Error>) {
        let first = self.stopped.set(error).is_ok();
        assert!(first, "a partition has one writer, which stops once");
        self.watches.tell_all();
    }

    pub(super) fn first_offset(&self) -> u64 {
        self.with_segments(|segments| segments.first().map_or(0, |segment| segment.base())).max(self.start.offset())
    }

    /// Lets `look` see the segments, by base. Never empty, once the partition is open.
    pub(super) fn with_segments<T>(&self, look: impl FnOnce(&[Arc<Segment>]) -> T) -> T {
        look(&self.segments.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn push_segment(&self, segment: Arc<Segment>) {
        self.segments.write().unwrap_or_else(PoisonError::into_inner).push(segment);
    }

    /// The segment that holds the record `offset`, if any does: the last one that begins at or before it.
    pub(super) fn segment_of(&self, offset: u64) -> Option<Arc<Segment>> {
        self.with_segments(|segments| {
            let behind = segments.partition_point(|segment| segment.base() <= offset);
            segments[..behind].last().map(Arc::clone)
        })
    }

    /// Whether the segment that begins at `base` is there, and was not removed.
    pub(super) fn has_segment(&self, base: u64) -> bool {
        self.with_segments(|segments| segments.binary_search_by_key(&base, |segment| segment.base()).is_ok())
    }

    /// The segment before the one that begins at `base`.
    pub(super) fn segment_before(&self, base: u64) -> Option<Arc<Segment>> {
        self.with_segments(|segments| {
            let before = segments.partition_point(|segment| segment.base() < base).checked_sub(1)?;
            Some(Arc::clone(&segments[before]))
        })
    }

    /// The segment behind the one that begins at `base`.
    pub(super) fn segment_after(&self, base: u64) -> Option<Arc<Segment>> {
        self.with_segments(|segments| segments.get(segments.partition_point(|segment| segment.base() <= base)).map(Arc::clone))
    }

    /// What whoever waits for a writer that is gone is told.
    ///
    /// Waits for the writer's last word: a panic drops the answers in its hands before anybody can say why.
    pub(super) fn why_stopped(&self) -> Error {
        self.workers.work_until(|| self.stopped.get().is_some());
        match self.stopped.wait() {
            Some(cause) => Error::Failed { path: self.dir.to_path_buf(), cause: Arc::new(cause.clone()) },
            None if self.moved.load(Ordering::Acquire) && self.check_open().is_ok() => Error::Moved { path: self.dir.to_path_buf() },
            None => Error::Closed { path: self.dir.to_path_buf() },
        }
    }

    /// Notes how far the log is durable. A failure is told, and costs the next opening a longer scan.
    pub(super) fn write_checkpoint(&self, checkpoint: &Checkpoint) {
        // A write that a panic interrupted leaves the slot before sound, and is made again.
        let mut checkpoints = self.checkpoints.lock().unwrap_or_else(PoisonError::into_inner);
        let written = checkpoints.write(checkpoint);
        checkpoints.tell(written);
    }

    /// Whether it was told to end because it moves elsewhere, and did not fail since.
    pub(super) fn moves(&self) -> bool {
        self.moved.load(Ordering::Acquire) && !self.has_failed()
    }

    /// Whether it ended, with all on the device, because it moves elsewhere.
    pub(super) fn has_moved(&self) -> bool {
        self.moved.load(Ordering::Acquire) && matches!(self.stopped.get(), Some(None))
    }

    /// Whether it takes appends, as far as can be told now.
    pub(super) fn goes_on(&self) -> bool {
        self.check_open().is_ok() && !self.has_failed() && !self.moved.load(Ordering::Acquire)
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self.stopped.get(), Some(Some(_)))
    }

    /// Whether this still is the process that opened it. To be asked before any lock that a thread of the parent may have held.
    pub(super) fn check_process(&self) -> Result<()> {
        if self.process.is_current() { Ok(()) } else { Err(Error::Forked { path: self.dir.to_path_buf() }) }
    }

    /// # Errors
    /// [`Error::Closed`] if it was left to close by itself, and has not yet: nobody knows when its writer answers.
    pub(super) fn check_answers(&self) -> Result<()> {
        if self.stopped.get().is_none() { self.check_open() } else { self.check_process() }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed { path: self.dir.to_path_buf() }) } else { Ok(()) }
    }

    /// What was found in the files, unless the topic was deleted meanwhile: then an error is no failure of the device, and a record may be one of a
    /// topic that was made under the same name.
    pub(super) fn if_still_open<T>(&self, found: Result<T>) -> Result<T> {
        self.check_open().and(found)
    }

    pub(super) fn out_of_range(&self, offset: u64) -> Error {
        Error::OffsetOutOfRange { offset, first: self.first_offset(), next: self.appended_end() }
    }

    /// How the memory of a busy writer is made: how many regions of how many bytes. Two are commits', the one that is written and the
    /// one that is filled, the rest keeps what was written.
    pub(super) fn regions(&self) -> (usize, usize) {
        let tail = if self.config.durability == Durability::Durable { self.config.tail_bytes } else { 0 };
        // The kernel registers a limited number of them.
        let region = self.config.commit_bytes.max(tail / MOST_KEPT_REGIONS).next_multiple_of(BLOCK);
        let kept = tail.div_ceil(region);
        (2 + to_usize(kept), to_usize(region))
    }
}
