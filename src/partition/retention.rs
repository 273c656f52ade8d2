//! Segments that go from the front of the log: because they are old, because there is too much, or because it is asked for.
//!
//! Whole segments go, oldest first, each durably before the next, so that a crash at any point leaves a log without a gap; the one that takes the
//! appends never does. A segment leaves the list before its files do: who looked it up before finds out, by the first offset, why they are gone.
//! Its log goes by its name alone: who has it open reads on in it. Nothing here is done by the writer or waits for it, but that it is asked to
//! begin the next segment.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::shared::Alone;
use super::{Partition, Shared};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::segment::{self, Kind, Segment};

/// What went of one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Removed {
    /// The partition's directory.
    pub path: PathBuf,
    /// Its topic.
    pub topic: String,
    /// Its number.
    pub partition: u32,
    /// The records that are gone; at the end of the range is the first that is there.
    pub records: Range<u64>,
    /// How many segments went.
    pub segments: usize,
    /// Bytes in their logs.
    pub bytes: u64,
}

/// A sealed segment as its retention sees it.
#[derive(Debug, Clone, Copy)]
struct Held {
    bytes: u64,
    /// When its newest record was written, as far as that can be told, nanoseconds since 1970.
    newest: Option<u64>,
}

/// What went so far.
#[derive(Debug, Clone, Copy)]
struct Gone {
    /// The first offset before.
    first: u64,
    segments: usize,
    bytes: u64,
}

impl Gone {
    /// Nothing.
    fn from(first: u64) -> Self {
        Self { first, segments: 0, bytes: 0 }
    }
}

impl Partition {
    /// Removes what its topic's settings no longer keep, with `now` for the time. What went is told also where something hindered the rest.
    pub(crate) fn enforce_retention(&self, now: u64) -> (Removed, Result<()>) {
        let mut gone = Gone::from(self.first_offset());
        let result = self.remove_what_is_not_kept(now, &mut gone);
        (self.removed(gone), result)
    }

    fn remove_what_is_not_kept(&self, now: u64, gone: &mut Gone) -> Result<()> {
        let shared = &self.0.shared;
        let (age, most) = (shared.live.retention_age(), shared.live.retention_bytes());
        // Whoever copies the files of a partition that moves must find them all.
        if (age.is_none() && most.is_none()) || shared.moves() {
            return Ok(());
        }
        shared.check_open()?;
        // All that the active one holds is to go, and the next one is there before it does. Where there is no room for that, those before it go.
        let is_old = age.is_some_and(|age| shared.active_is_older(now, age)) && !shared.has_failed();
        let rolled = if is_old { self.roll() } else { Ok(()) };
        // From here on nobody cuts or removes anything else: what was decided stays right.
        let alone = shared.alone();
        if shared.moves() {
            return Ok(());
        }
        *gone = Gone::from(shared.first_offset());
        let segments = shared.with_segments(<[_]>::to_vec);
        if let Some((active, sealed)) = segments.split_last() {
            let held: Vec<Held> = sealed.iter().map(|segment| shared.held(segment, now, age.is_some())).collect();
            let go = how_many_go(&held, active.appended(), now, age, most);
            if go > 0 {
                shared.remove_before(segments[go].base(), &alone, gone)?;
            }
        }
        rolled
    }

    /// Removes the records before `offset`: whole segments at once, and durably; of the segment that it lies in, the earlier records stay on the disk,
    /// and are not given out any more. The first offset is remembered, and with `offset` at the end of the log it is empty, and goes on
    /// from there. What readers hold in memory they may still give out.
    ///
    /// # Durability
    /// When this returns, no crash brings a record before `offset` back to a reader. A crash before leaves the log with some first offset
    /// between the one before and this one.
    ///
    /// # Blocking
    /// Until what is queued before is written, and for the device.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`] past the end of the log; nothing was removed. An `offset` before the first one is no error: there is nothing
    /// to remove. [`Error::Failed`], [`Error::Closed`], [`Error::Moved`], [`Error::DiskFull`], and what the system says: then some of it may be
    /// removed.
    pub fn truncate_before(&self, offset: u64) -> Result<Removed> {
        let shared = &self.0.shared;
        // What is remembered must not outlast the records that it speaks of.
        self.sync()?;
        if offset == shared.durable_end() && offset > shared.first_offset() {
            // Where there is no room for the next one, those before the active one go, which may make some, and the note does for the rest.
            self.roll().or_else(|error| if shared.goes_on() { Ok(()) } else { Err(error) })?;
        }
        // From here on nobody cuts the log: what is found stays right.
        let alone = shared.alone();
        shared.check_open()?;
        if shared.moves() {
            return Err(Error::Moved { path: shared.dir.to_path_buf() });
        }
        let (first, end) = (shared.first_offset(), shared.durable_end());
        if offset > end {
            return Err(Error::OffsetOutOfRange { offset, first, next: end });
        }
        if offset <= first {
            // An attempt before this one may have failed to make it durable.
            shared.disk.sync_dir(&shared.dir).map_err(Error::io("sync the directory", &shared.dir))?;
            return Ok(self.removed(Gone::from(first)));
        }
        // The first segment that holds a record from there on.
        let stays = shared.segment_of(offset).ok_or_else(|| shared.out_of_range(offset))?;
        // Whole segments first: where the disk is full, that gives the note its room.
        let mut gone = Gone::from(first);
        shared.remove_before(stays.base(), &alone, &mut gone)?;
        if stays.base() < offset {
            shared.start.set(&*shared.disk, &shared.dir, offset).map_err(Error::or_full)?;
        }
        Ok(self.removed(gone))
    }

    fn removed(&self, Gone { first, segments, bytes }: Gone) -> Removed {
        let shared = &self.0.shared;
        Removed {
            path: shared.dir.to_path_buf(),
            topic: self.0.topic.clone(),
            partition: self.0.number,
            records: first..shared.first_offset().max(first),
            segments,
            bytes,
        }
    }

    /// The latest timestamp of a record, as far as it is known.
    pub(crate) fn last_time(&self) -> Option<u64> {
        self.0.shared.with_segments(|segments| segments.iter().rev().find_map(|segment| segment.last_time()))
    }
}

impl Shared {
    /// Whether the segment that takes the appends holds records, none of which is to be kept.
    fn active_is_older(&self, now: u64, age: Duration) -> bool {
        let active = self.with_segments(|segments| segments.last().map(Arc::clone));
        let Some(active) = active.filter(|active| active.appended() > 0) else { return false };
        match self.newest(&active, now) {
            Some(newest) => is_older(newest, now, age),
            // The kernel went by the same wrong clock, and would for as long as nobody appends: it notes the sealing anew.
            None => self.last_change(&active).is_some_and(|time| time > now),
        }
    }

    fn held(&self, segment: &Segment, now: u64, by_age: bool) -> Held {
        let newest = if by_age { self.newest(segment, now) } else { None };
        Held { bytes: segment.appended(), newest }
    }

    /// When the newest record of a segment was written. One that is stamped in the future was stamped by a clock that was wrong; then the
    /// kernel's note of when its log changed last, or was sealed, must do, unless that is from the same clock.
    fn newest(&self, segment: &Segment, now: u64) -> Option<u64> {
        let is_past = |time: &u64| *time <= now;
        let stamped = segment.read_last_time(&*self.disk).or_else(|| {
            // None of its records is later than those of the next segment.
            self.segment_after(segment.base()).and_then(|next| next.read_first_time(&*self.disk))
        });
        stamped.filter(is_past).or_else(|| self.last_change(segment).filter(is_past))
    }

    /// When the log of a segment changed last, by the kernel's clock.
    fn last_change(&self, segment: &Segment) -> Option<u64> {
        segment.open_log(&*self.disk).ok()?.details().ok()?.modified_ns
    }

    /// Removes the segments that begin before the one that begins at `base`, oldest first, and counts them.
    ///
    /// # Errors
    /// What the system says: the ones before are gone, the others are there.
    fn remove_before(&self, base: u64, _alone: &Alone<'_>, gone: &mut Gone) -> Result<()> {
        loop {
            self.check_open()?;
            let Some(oldest) = self.take_oldest_before(base) else { return Ok(()) };
            if gone.segments == 0 && guard::stands(Guard::SuccessorsBeforeRemovals) {
                // The names of those that stay. One that was just made has none yet, perhaps.
                let synced = self.disk.sync_dir(&self.dir).map_err(Error::io("sync the directory", &self.dir));
                synced.inspect_err(|_| self.put_back(&oldest))?;
            }
            if let Err(error) = self.with_files(|| segment::remove_files(&*self.disk, &self.dir, oldest.base())) {
                self.put_back(&oldest);
                return Err(Error::io("remove", &oldest.path(Kind::Log))(error));
            }
            tracing::debug!(path = %oldest.path(Kind::Log).display(), "a segment was removed from the front of the log");
            gone.segments += 1;
            gone.bytes += oldest.appended();
            if guard::stands(Guard::RemovalsInOrder) {
                // Before the next: a power loss may keep any of the removals since.
                self.disk.sync_dir(&self.dir).map_err(Error::io("sync the directory", &self.dir))?;
            }
        }
    }

    fn take_oldest_before(&self, base: u64) -> Option<Arc<Segment>> {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let goes = segments.len() > 1 && segments[0].base() < base;
        goes.then(|| segments.remove(0))
    }

    fn put_back(&self, segment: &Arc<Segment>) {
        self.segments.write().unwrap_or_else(PoisonError::into_inner).insert(0, Arc::clone(segment));
    }
}

/// "Older than" is strict. What is stamped later than now has no age.
fn is_older(newest: u64, now: u64, age: Duration) -> bool {
    u128::from(now.saturating_sub(newest)) > age.as_nanos()
}

/// How many of the sealed segments go, from the oldest on. None of them can be younger than one behind it, whatever its own time says: so one
/// that was stamped by a clock that was wrong goes with those behind it.
fn how_many_go(sealed: &[Held], active_bytes: u64, now: u64, age: Option<Duration>, most: Option<u64>) -> usize {
    let is_old = |held: &Held| age.is_some_and(|age| held.newest.is_some_and(|newest| is_older(newest, now, age)));
    let by_age = sealed.iter().rposition(is_old).map_or(0, |last| last + 1);
    let mut bytes = active_bytes + sealed.iter().map(|held| held.bytes).sum::<u64>();
    let by_size = sealed.iter().take_while(|held| {
        let goes = most.is_some_and(|most| bytes > most);
        bytes -= held.bytes;
        goes
    });
    by_age.max(by_size.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE: Duration = Duration::from_nanos(100);

    fn by_age(now: u64, times: &[Option<u64>]) -> usize {
        let held: Vec<Held> = times.iter().map(|&newest| Held { bytes: 1, newest }).collect();
        how_many_go(&held, 1, now, Some(AGE), None)
    }

    #[test]
    fn b081_older_than_is_strict() {
        for (newest, goes) in [(899, 1), (900, 0), (901, 0), (1000, 0), (1001, 0), (u64::MAX, 0), (0, 1)] {
            assert_eq!(by_age(1000, &[Some(newest)]), goes, "{newest}");
        }
        assert_eq!(by_age(0, &[Some(u64::MAX)]), 0, "no underflow");
        assert_eq!(by_age(u64::MAX, &[Some(0)]), 1);
    }

    #[test]
    fn none_is_younger_than_one_behind_it() {
        assert_eq!(by_age(1000, &[None, Some(u64::MAX), Some(10), None, Some(950)]), 3);
        assert_eq!(by_age(1000, &[None, None]), 0);
        assert_eq!(by_age(1000, &[]), 0);
    }

    #[test]
    fn the_oldest_go_while_there_is_more_than_may_be() {
        let held: Vec<Held> = [40, 30, 20].map(|bytes| Held { bytes, newest: None }).into();
        let go = |most| how_many_go(&held, 10, 1000, None, Some(most));
        for (most, expected) in [(100, 0), (99, 1), (60, 1), (59, 2), (30, 2), (29, 3), (10, 3), (0, 3)] {
            assert_eq!(go(most), expected, "{most}");
        }
        assert_eq!(how_many_go(&held, 10, 1000, None, None), 0);
        assert_eq!(how_many_go(&held, 10, 1000, Some(AGE), Some(60)), 1, "either suffices");
    }
}
