//! Opening a partition's sealed segments: all are judged before a byte of any is changed, then those that need it are mended.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::open::{End, PartitionReport, reconcile};
use super::walk::{Walk, Way};
use crate::config::{Opening, TopicConfig};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::{Disk, File, Open};
use crate::record::{Flaw, HEADER_BYTES, to_u64};
use crate::segment::{self, IndexEntry, Kind, LastEntry, Name, Segment};

/// Index entries that are held, of all segments together, until it is known that the opening is not refused: 24 MiB. The log is read
/// once more for those beyond.
const ENTRIES_HELD: usize = 1 << 20;

/// A segment that others follow.
pub(super) struct Sealed {
    pub(super) base: u64,
    /// Where the next one begins.
    pub(super) next: u64,
}

/// A sealed segment whose end is known, and what its files need.
pub(super) struct Judged {
    end: End,
    mending: Option<Mending>,
}

/// What a sealed segment's files are made to be.
struct Mending {
    /// The length of the log as it is.
    len: u64,
    /// No other sealed one follows: it can have been left before its files were synced.
    is_last: bool,
    indexes: Indexes,
}

enum Indexes {
    Kept,
    Anew(Vec<IndexEntry>),
    /// As the log tells, which is read once more.
    AnewFromLog,
}

/// Judges all but the last of the segments at `bases`. Those below `believed` are believed where their sizes and indexes fit together.
///
/// # Errors
///
/// [`Error::Damaged`] where two segments have the same offsets: neither answer may be given.
pub(super) fn judge(
    disk: &dyn Disk,
    dir: &Arc<Path>,
    config: &TopicConfig,
    opening: Opening,
    bases: &[u64],
    believed: u64,
    report: &mut PartitionReport,
) -> Result<Vec<Judged>> {
    let mut room = ENTRIES_HELD;
    let judge = |(index, pair): (usize, &[u64])| {
        let sealed = Sealed { base: pair[0], next: pair[1] };
        let end = if sealed.base < believed { sealed.believe(disk, dir, config)? } else { None };
        let judged = match end {
            Some(end) => Judged { end, mending: None },
            None => sealed.check(disk, dir, config, index + 2 == bases.len(), &mut room, report)?,
        };
        if opening.check_sealed {
            check_whole(disk, &judged.end.segment, report)?;
        }
        Ok(judged)
    };
    bases.windows(2).enumerate().map(judge).collect()
}

impl Judged {
    /// Makes the segment's log end with its last record, and its indexes what the log says, durably.
    pub(super) fn mend(self, disk: &dyn Disk, config: &TopicConfig, report: &mut PartitionReport) -> Result<End> {
        let Self { end, mending } = self;
        let Some(Mending { len, is_last, indexes }) = mending else { return Ok(end) };
        let segment = &end.segment;
        let path = segment.path(Kind::Log);
        give_back_room(disk, &path, segment.appended(), len, is_last)?;
        let entries = match indexes {
            Indexes::Kept => return Ok(end),
            Indexes::Anew(entries) => entries,
            Indexes::AnewFromLog => {
                let (base, len, interval) = (segment.base(), segment.appended(), config.index_interval);
                let walk = Way { log: &*segment.open_log(disk)?, direct: false, path: &path, base, len, interval }.whole()?;
                report.scanned_bytes += walk.read;
                walk.entries
            }
        };
        reconcile(disk, segment, 0, &entries, report);
        // Before a checkpoint of a later segment makes opening believe them.
        if let Err(error) = segment::sync_indexes(disk, segment) {
            tracing::warn!(%error, "an index could not be synced; it is made anew by the next opening");
            segment::remove_indexes(disk, segment);
        }
        Ok(end)
    }
}

impl Indexes {
    /// Holds the entries while there is room for them.
    fn anew(entries: Vec<IndexEntry>, room: &mut usize) -> Self {
        match room.checked_sub(entries.len()) {
            Some(left) => {
                *room = left;
                Self::Anew(entries)
            }
            None => Self::AnewFromLog,
        }
    }
}

impl Sealed {
    /// Whether its size and the ends of its indexes fit together and lead to the next segment; no byte of its log is read.
    pub(super) fn believe(&self, disk: &dyn Disk, dir: &Arc<Path>, config: &TopicConfig) -> Result<Option<End>> {
        let (_, len, _) = open_log(disk, dir, self.base)?;
        let Some((by_position, by_time)) = self.last_entries(disk, dir) else { return Ok(None) };
        let is_near = self.next.checked_sub(by_position.offset).is_some_and(|left| (1..=config.index_interval.into()).contains(&left));
        let has_record = len.checked_sub(by_position.second).is_some_and(|left| left >= to_u64(HEADER_BYTES));
        let segment = Arc::new(Segment::new(Arc::clone(dir), self.base, len));
        let end = End { segment, next_offset: self.next, last_timestamp: by_time.second };
        Ok((is_near && has_record).then_some(end))
    }

    /// Checks that it leads to the next one: from its last index entry on, or, if no other sealed one follows, all of it, and then its
    /// length and its indexes are to be what the log says, durably. What does not hold is reported.
    fn check(
        &self,
        disk: &dyn Disk,
        dir: &Arc<Path>,
        config: &TopicConfig,
        is_last: bool,
        room: &mut usize,
        report: &mut PartitionReport,
    ) -> Result<Judged> {
        let Self { base, next } = *self;
        let (log, len, path) = open_log(disk, dir, base)?;
        let way = Way { log: &*log, direct: false, path: &path, base, len, interval: config.index_interval };
        if !is_last
            && let Some(walk) = self.walk_from_index(disk, dir, way, report)?
            && walk.next_offset == next
        {
            let end = walk.end(dir, base, walk.position);
            return Ok(Judged { end, mending: Some(Mending { len, is_last, indexes: Indexes::Kept }) });
        }
        // The index is missing, stale or wrong, or the log is damaged: the whole log tells which.
        let walk = way.whole()?;
        report.scanned_bytes += walk.read;
        let damage = match walk.flaw {
            // The index stays as well: it may lead to records behind the damage.
            Some(_) => Some(way.damage(&walk)),
            None if walk.next_offset > next => {
                // Two answers for one offset: neither may be given.
                let path = dir.join(Name { base: next, kind: Kind::Log }.to_string());
                let flaw = Flaw::OffsetGap { found: next, expected: walk.next_offset };
                return Err(Error::Damaged { path, position: 0, offset: walk.next_offset, flaw });
            }
            None if walk.next_offset < next => Some(Error::RecordsMissing { path: dir.to_path_buf(), from: walk.next_offset, to: next }),
            None => None,
        };
        if let Some(error) = damage {
            tracing::error!(%error, "damage in a sealed segment");
            report.damage.push(error);
        }
        if walk.flaw.is_some() {
            return Ok(Judged { end: walk.end(dir, base, len), mending: None });
        }
        let end = walk.end(dir, base, walk.position);
        Ok(Judged { end, mending: Some(Mending { len, is_last, indexes: Indexes::anew(walk.entries, room) }) })
    }

    /// Walks the log from its last index entry; none if the index files do not lead to a record, or leave too much unindexed.
    pub(super) fn walk_from_index(&self, disk: &dyn Disk, dir: &Path, way: Way<'_>, report: &mut PartitionReport) -> Result<Option<Walk>> {
        let Some((by_position, by_time)) = self.last_entries(disk, dir) else { return Ok(None) };
        let (offset, position) = (by_position.offset, by_position.second);
        if position >= way.len {
            return Ok(None);
        }
        let walk = way.from(offset, position)?;
        report.scanned_bytes += walk.read;
        let sound = walk.flaw.is_none() && walk.next_offset > offset && walk.next_offset - offset <= way.interval.into();
        let timestamp = walk.entries.first().map(|entry| entry.timestamp);
        Ok((sound && timestamp.is_none_or(|timestamp| timestamp == by_time.second)).then_some(walk))
    }

    /// The last entries of both indexes, if they are of one record of this segment.
    fn last_entries(&self, disk: &dyn Disk, dir: &Path) -> Option<(LastEntry, LastEntry)> {
        let last = |kind| {
            let path = dir.join(Name { base: self.base, kind }.to_string());
            // A file that cannot be read is as good as none: the log tells it all.
            segment::last_entry(disk, &path).unwrap_or_else(|error| {
                tracing::warn!(%error, path = %path.display(), "an index cannot be read");
                None
            })
        };
        let (by_position, by_time) = (last(Kind::Index)?, last(Kind::TimeIndex)?);
        let agree = by_position.count == by_time.count && by_position.offset == by_time.offset && by_position.offset >= self.base;
        agree.then_some((by_position, by_time))
    }
}

/// Opens and measures a log.
pub(super) fn open_log(disk: &dyn Disk, dir: &Path, base: u64) -> Result<(Arc<dyn File>, u64, PathBuf)> {
    let path = dir.join(Name { base, kind: Kind::Log }.to_string());
    let log = disk.open(&path, Open::READ).map_err(Error::io("open", &path))?;
    let len = log.len().map_err(Error::io("measure", &path))?;
    Ok((log, len, path))
}

/// Reads all of a sealed segment. What does not hold is reported, unless it was already.
fn check_whole(disk: &dyn Disk, segment: &Segment, report: &mut PartitionReport) -> Result<()> {
    let (damage, read) = segment::check_whole(disk, segment)?;
    report.scanned_bytes += read;
    let is_told = |error: &Error, told: &Error| error.to_string() == told.to_string();
    if let Some(error) = damage.filter(|error| !report.damage.iter().any(|told| is_told(error, told))) {
        tracing::error!(%error, "damage in a sealed segment");
        report.damage.push(error);
    }
    Ok(())
}

/// Ends a sealed log with its last record, where a power loss undid that: nothing but zeros is behind. The last one may have been cut
/// just before a crash of the process, and that not be durable: before a checkpoint of the next segment makes opening believe the
/// length, it is made so.
fn give_back_room(disk: &dyn Disk, path: &Path, end: u64, len: u64, is_last: bool) -> Result<()> {
    if end == len && !(is_last && guard::stands(Guard::OpeningSyncsSealed)) {
        return Ok(());
    }
    let cut = disk.open(path, Open::WRITE).and_then(|log| {
        if end < len {
            log.set_len(end)?;
        }
        log.sync()
    });
    cut.map_err(Error::io("cut", path))
}
