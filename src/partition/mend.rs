//! The segment that takes the appends, when its partition is opened: how far it holds, and what of its end must go.
//!
//! [`Judged`] comes first and changes nothing, so that damage can be refused with every byte as it was. [`Judged::mend`]
//! then makes the files what was judged, in an order that makes an opening which is itself interrupted harmless: whole records
//! of the torn tail are copied aside, durably; the log is cut and synced; the indexes are written from the log; and only
//! then the checkpoint tells of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checkpoint::{Checkpoint, Checkpoints};
use super::open::{End, PartitionReport, TornTail, reconcile};
use super::walk::{Walk, Way};
use crate::config::{OnDamage, Opening, Recovery, TopicConfig};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::{Disk, File, Open};
use crate::record::{to_u64, to_usize};
use crate::segment::{self, IndexEntry, Kind, Name, Tail};

/// What is known of the active segment before anything is changed.
pub(super) struct Judged {
    path: PathBuf,
    log: Arc<dyn File>,
    base: u64,
    len: u64,
    walk: Walk,
    /// Entries that the index files hold and that were not read; what is in the walk follows them.
    trusted: u64,
    found: Finding,
    /// Records that were acknowledged are damaged or gone.
    damage: Option<Error>,
}

/// What the checkpoint was good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finding {
    /// There is none, or none of this segment; or it was not asked.
    Unknown,
    /// It is of this segment, and does not fit its files.
    Unfit,
    /// It fits, and the log was scanned from there on.
    Fits,
    /// It was written on a clean close, and nothing happened since.
    Clean,
}

/// The first entries of an active segment's indexes that a checkpoint vouches for.
struct Trusted {
    last: Option<IndexEntry>,
    /// Whether the files hold no others.
    all: bool,
}

impl Judged {
    /// Finds the end of the segment's log, from the checkpoint on if there is one that fits.
    ///
    /// # Errors
    /// [`Error::Damaged`] or [`Error::RecordsMissing`] if what the checkpoint says was durable is not there, and damage is to be refused.
    pub(super) fn of(
        disk: &dyn Disk,
        dir: &Path,
        base: u64,
        checkpoint: Option<&Checkpoint>,
        config: &TopicConfig,
        opening: Opening,
    ) -> Result<Self> {
        let path = dir.join(Name { base, kind: Kind::Log }.to_string());
        let log = disk.open(&path, Open::WRITE).map_err(Error::io("open", &path))?;
        let len = log.len().map_err(Error::io("measure", &path))?;
        let is_of_this = |checkpoint: &&Checkpoint| checkpoint.base == base;
        let wanted = checkpoint.filter(is_of_this).filter(|_| opening.recovery == Recovery::FromCheckpoint);
        let trusted = wanted.and_then(|checkpoint| trusted_entries(disk, dir, checkpoint, config.index_interval));
        // Past the page cache, where that is possible: what is read once needs no place in it.
        let direct = disk.open(&path, Open { direct: true, ..Open::READ }).ok();
        let scanned = direct.as_ref().unwrap_or(&log);
        let way = Way { log: &**scanned, direct: direct.is_some(), path: &path, base, len, interval: config.index_interval };
        let (walk, found) = match (wanted, &trusted) {
            (Some(checkpoint), Some(trusted)) if checkpoint.clean && checkpoint.position == len && trusted.all => {
                (untouched(checkpoint), Finding::Clean)
            }
            _ => {
                // What is judged is what the device holds: after a failed sync, the page cache may show more.
                if guard::stands(Guard::OpeningSyncsLog) {
                    log.sync().map_err(Error::io("sync", &path))?;
                }
                if guard::stands(Guard::OpeningEvicts) {
                    log.evict(wanted.map_or(0, |checkpoint| checkpoint.position)).map_err(Error::io("read anew", &path))?;
                }
                walk(way, wanted.zip(trusted.as_ref()), wanted.is_some())?
            }
        };
        let trusted = if matches!(found, Finding::Fits | Finding::Clean) { wanted.map_or(0, |checkpoint| checkpoint.entries) } else { 0 };
        let damage = checkpoint.and_then(|checkpoint| lost(checkpoint, way, &walk));
        damage.iter().try_for_each(|error| refuse(error, opening))?;
        Ok(Self { path, log, base, len, walk, trusted, found, damage })
    }

    /// Whether the checkpoint fits the files of this segment, so that it may be believed of those before.
    pub(super) fn fits_checkpoint(&self) -> bool {
        matches!(self.found, Finding::Fits | Finding::Clean)
    }

    /// What was acknowledged and is damaged or gone.
    pub(super) fn damage(&self) -> Option<&Error> {
        self.damage.as_ref()
    }

    /// Bytes of the log that were read.
    pub(super) fn read(&self) -> u64 {
        self.walk.read
    }

    /// Cuts what is behind the end, and makes the indexes what the log says. Gives how many entries they hold.
    pub(super) fn mend(
        mut self,
        disk: &dyn Disk,
        dir: &Arc<Path>,
        before: u64,
        checkpoints: &mut Checkpoints,
        report: &mut PartitionReport,
    ) -> Result<(End, usize)> {
        let mut end = self.walk.end(dir, self.base, self.walk.position);
        end.last_timestamp = end.last_timestamp.max(before);
        if self.found == Finding::Clean {
            return Ok((end, to_usize(self.trusted)));
        }
        self.cut(disk, dir, &end, checkpoints, report)?;
        let rebuilt = report.rebuilt.len();
        let kept = if guard::stands(Guard::OpeningMendsIndexes) {
            reconcile(disk, &end.segment, self.trusted, &self.walk.entries, report)
        } else {
            self.walk.entries.len()
        };
        let kept = self.note(disk, &end, kept, report.rebuilt.len() > rebuilt, checkpoints);
        // The writer adds to the files what they lack.
        end.segment.pending().extend(self.walk.entries.drain(..).skip(kept));
        Ok((end, to_usize(self.trusted) + kept))
    }

    /// Leaves the log with its last record, durably, and sets aside first what may be worth keeping.
    fn cut(&mut self, disk: &dyn Disk, dir: &Path, end: &End, checkpoints: &mut Checkpoints, report: &mut PartitionReport) -> Result<()> {
        let (path, log, walk) = (&self.path, &*self.log, &self.walk);
        if let Some(flaw) = walk.flaw {
            let tail = Tail::examine(log, walk.position, self.len, walk.next_offset).map_err(Error::io("read", path))?;
            let tail = tail.expect("a flaw is a byte that is not zero");
            // Of what was acknowledged once, every byte may be missed.
            let is_missed = tail.is_worth_keeping() || self.damage.is_some();
            let copy = if is_missed && guard::stands(Guard::OpeningCopiesAside) {
                Some(segment::copy_aside(disk, log, path, &tail.span).map_err(Error::io("copy the torn tail of", path))?)
            } else {
                None
            };
            let bytes = tail.span.end - tail.span.start;
            if self.damage.is_none() {
                tracing::warn!(path = %path.display(), position = walk.position, bytes, records = tail.records, %flaw, copy = ?copy,
                    "cutting a torn tail: bytes of a write that was never acknowledged");
            }
            report.torn_tail = Some(TornTail { path: path.clone(), position: walk.position, bytes, records: tail.records, flaw, copy });
        }
        if let Some(error) = self.damage.take() {
            tracing::error!(%error, "cutting damage, as it was asked for; what is cut is copied aside");
            // Before the cut, or else an opening after one that is interrupted between would meet the same damage again.
            self.found = Finding::Unfit;
            let replaced = checkpoints.replace(&checkpoint_at(end, 0));
            checkpoints.tell(replaced);
            report.repaired = Some(error);
        }
        if self.walk.position < self.len && guard::stands(Guard::OpeningCutsTail) {
            self.log.set_len(self.walk.position).map_err(Error::io("cut", &self.path))?;
        }
        // What is served from now on must not be lost by a power loss that a process crash came before.
        if guard::stands(Guard::OpeningSyncsLog) {
            self.log.sync().map_err(Error::io("sync", &self.path))?;
        }
        if guard::stands(Guard::OpeningSyncsNames) { disk.sync_dir(dir).map_err(Error::io("sync the directory", dir)) } else { Ok(()) }
    }

    /// Writes down what was found out, so that an opening after this one need not find it out again. Gives how many of the
    /// entries in the walk count as held by the index files.
    fn note(&self, disk: &dyn Disk, end: &End, kept: usize, rewritten: bool, checkpoints: &mut Checkpoints) -> usize {
        let noted = |entries| checkpoint_at(end, entries);
        let entries = self.trusted + to_u64(kept);
        let is_noted = checkpoints.newest().is_some_and(|newest| newest.says_the_same(&noted(entries)));
        // Of a partition that never had a record there is nothing to tell; opening it again then changes nothing.
        let is_new = !checkpoints.are_there() && end.next_offset == 0;
        if !checkpoints.is_usable() || is_new || (is_noted && !rewritten) {
            return kept;
        }
        if let Err(error) = segment::sync_indexes(disk, &end.segment) {
            tracing::warn!(%error, "an index could not be synced; its newest entries are written again");
            return 0;
        }
        // Of a checkpoint that does not fit, the one before it need not fit either.
        let is_old = self.found == Finding::Fits || checkpoints.newest().is_none_or(|newest| newest.base < end.segment.base());
        let written = if is_old { checkpoints.write(&noted(entries)) } else { checkpoints.replace(&noted(entries)) };
        checkpoints.tell(written);
        kept
    }
}

/// What the checkpoint says was durable, and the walk of the last segment's log did not come to.
fn lost(checkpoint: &Checkpoint, way: Way<'_>, walk: &Walk) -> Option<Error> {
    if checkpoint.base == way.base {
        return (walk.position < checkpoint.position).then(|| way.damage(walk));
    }
    // It is of a segment that is not there, or not the last one any more.
    let missing = checkpoint.missing(way.path.parent().unwrap_or(way.path), walk.next_offset)?;
    Some(if walk.flaw.is_some() { way.damage(walk) } else { missing })
}

/// Fails with the damage, unless it is to be cut.
pub(super) fn refuse(damage: &Error, opening: Opening) -> Result<()> {
    let refused = opening.on_damage == OnDamage::Refuse && guard::stands(Guard::OpeningRefusesDamage);
    if refused { Err(damage.clone()) } else { Ok(()) }
}

fn checkpoint_at(end: &End, entries: u64) -> Checkpoint {
    let segment = &end.segment;
    Checkpoint {
        base: segment.base(),
        position: segment.durable(),
        next_offset: end.next_offset,
        last_timestamp: end.last_timestamp,
        entries,
        clean: false,
    }
}

/// What a walk from a checkpoint would find that nothing was written after.
fn untouched(checkpoint: &Checkpoint) -> Walk {
    let Checkpoint { position, next_offset, last_timestamp, .. } = *checkpoint;
    Walk { position, next_offset, last_timestamp, entries: Vec::new(), flaw: None, first_timestamp: None, passed: true, read: 0 }
}

/// Walks from the checkpoint's last index entry, if that leads to a record at the checkpoint's place; else from the start.
fn walk(way: Way<'_>, from: Option<(&Checkpoint, &Trusted)>, asked: bool) -> Result<(Walk, Finding)> {
    let mut read = 0;
    if let Some((checkpoint, trusted)) = from
        && checkpoint.position <= way.len
    {
        let through = (checkpoint.next_offset, checkpoint.position);
        let walked = match &trusted.last {
            Some(entry) => way.on_from(entry, through)?,
            None => way.whole()?,
        };
        if walked.passed {
            let last_timestamp = walked.last_timestamp.max(checkpoint.last_timestamp);
            return Ok((Walk { last_timestamp, ..walked }, Finding::Fits));
        }
        read = walked.read;
    }
    if asked {
        tracing::warn!(path = %way.path.display(), "the checkpoint does not fit the segment; scanning all of it");
    }
    let walked = way.whole()?;
    Ok((Walk { read: walked.read + read, ..walked }, if asked { Finding::Unfit } else { Finding::Unknown }))
}

/// The entries of the index files that the checkpoint vouches for; none if the files do not hold them.
fn trusted_entries(disk: &dyn Disk, dir: &Path, checkpoint: &Checkpoint, interval: u32) -> Option<Trusted> {
    let Checkpoint { base, position, next_offset, last_timestamp, entries, clean } = *checkpoint;
    let entry = |kind| {
        let path = dir.join(Name { base, kind }.to_string());
        segment::entry_before(disk, &path, entries).unwrap_or_else(|error| {
            tracing::warn!(%error, path = %path.display(), "an index cannot be read");
            None
        })
    };
    if position == 0 {
        let none = |kind| segment::is_empty_index(disk, &dir.join(Name { base, kind }.to_string())).unwrap_or(false);
        let fits = entries == 0 && next_offset == base;
        return fits.then(|| Trusted { last: None, all: none(Kind::Index) && none(Kind::TimeIndex) });
    }
    let ((by_position, all), (by_time, all_times)) = (entry(Kind::Index)?, entry(Kind::TimeIndex)?);
    let last = IndexEntry { offset: by_position.offset, position: by_position.second, timestamp: by_time.second };
    let fits = by_time.offset == last.offset && (base..next_offset).contains(&last.offset) && last.position < position;
    // After a clean close nothing else will be looked at.
    let is_near = next_offset.saturating_sub(last.offset) <= interval.into() && last.timestamp <= last_timestamp;
    (fits && (is_near || !clean)).then_some(Trusted { last: Some(last), all: all && all_times })
}
