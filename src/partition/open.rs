//! Opening a partition: what is there, what of it holds, and mending the end before anything is served.
//!
//! The order is what makes an opening that is itself interrupted harmless: whole records of the torn tail are copied
//! aside, durably; then the log is cut and synced; then the indexes are written from the log.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::TopicConfig;
use crate::error::{Error, Result};
use crate::io::{Disk, EntryKind, File, Open};
use crate::record::Flaw;
use crate::segment::{self, Found, IndexEntry, Kind, Name, Reconciled, Scanner, Segment, Step, Tail};

/// What opening a partition found and did.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PartitionReport {
    /// The partition's directory.
    pub path: PathBuf,
    /// Its topic.
    pub topic: String,
    /// Its number.
    pub partition: u32,
    /// How many segments it has.
    pub segments: usize,
    /// The first record's offset.
    pub first_offset: u64,
    /// The offset that the next record gets.
    pub next_offset: u64,
    /// What was cut from behind the last record.
    pub torn_tail: Option<TornTail>,
    /// Sealed segments that do not lead to the next one. Every byte stays; a read that meets the damage gets an error.
    pub damage: Vec<Error>,
    /// Index files that were written anew.
    pub rebuilt: Vec<PathBuf>,
    /// Names that are not this engine's. They are left alone.
    pub ignored: Vec<PathBuf>,
}

/// Bytes behind the last record of the active segment that were no record: the trace of a write that was never acknowledged.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TornTail {
    /// The segment.
    pub path: PathBuf,
    /// Where it was cut: the end of the last record.
    pub position: u64,
    /// Bytes from there to the last one that was not zero.
    pub bytes: u64,
    /// Whole records with later offsets found in them.
    pub records: u64,
    /// Which check ended the log.
    pub flaw: Flaw,
    /// Where the bytes were copied to before they were cut, if they may have held whole records.
    pub copy: Option<PathBuf>,
}

/// A partition whose end is known and sound.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) segments: Vec<Arc<Segment>>,
    /// Entries in the active segment's index files.
    pub(super) indexed: usize,
    pub(super) next_offset: u64,
    pub(super) last_timestamp: u64,
    pub(super) report: PartitionReport,
}

/// Finds out what is in `dir`, and mends its end. Without a segment there are no records, and the next offset is 0.
pub(super) fn recover(disk: &dyn Disk, dir: &Arc<Path>, config: &TopicConfig, topic: &str, partition: u32) -> Result<Recovered> {
    let mut report = PartitionReport {
        path: dir.to_path_buf(),
        topic: topic.to_owned(),
        partition,
        segments: 0,
        first_offset: 0,
        next_offset: 0,
        torn_tail: None,
        damage: Vec::new(),
        rebuilt: Vec::new(),
        ignored: Vec::new(),
    };
    let mut bases = list(disk, dir, &mut report)?;
    remove_abandoned(disk, dir, &mut bases, config)?;
    let Some((&active_base, sealed)) = bases.split_last() else {
        return Ok(Recovered { segments: Vec::new(), indexed: 0, next_offset: 0, last_timestamp: 0, report });
    };
    let mut segments = Vec::with_capacity(bases.len());
    let mut last_timestamp = 0;
    for (index, &base) in sealed.iter().enumerate() {
        let end = check_sealed(disk, dir, base, bases[index + 1], config, &mut report)?;
        last_timestamp = end.last_timestamp.max(last_timestamp);
        segments.push(end.segment);
    }
    let (end, indexed) = recover_active(disk, dir, active_base, config, &mut report)?;
    segments.push(end.segment);
    report.segments = segments.len();
    report.first_offset = bases[0];
    report.next_offset = end.next_offset;
    let last_timestamp = end.last_timestamp.max(last_timestamp);
    Ok(Recovered { segments, indexed, next_offset: end.next_offset, last_timestamp, report })
}

/// The bases of the segments, in order. Everything else is reported.
fn list(disk: &dyn Disk, dir: &Path, report: &mut PartitionReport) -> Result<Vec<u64>> {
    let mut logs = BTreeMap::new();
    let mut indexes = Vec::new();
    for entry in disk.list(dir).map_err(Error::io("list", dir))? {
        let path = dir.join(&entry.name);
        match Name::parse(&entry.name) {
            Some(Name { base, kind: Kind::Log }) if entry.kind == EntryKind::File => {
                logs.insert(base, path);
            }
            Some(Name { base, .. }) if entry.kind == EntryKind::File => indexes.push((base, path)),
            // One that an interrupted opening did not finish, or a next segment that never took its place: no record in it was
            // acknowledged.
            _ if (segment::is_unfinished_copy(&entry.name) || segment::is_prepared(&entry.name)) && entry.kind == EntryKind::File => {
                disk.remove_file(&path).map_err(Error::io("remove", &path))?;
            }
            _ if segment::is_copy(&entry.name) && entry.kind == EntryKind::File => {}
            _ => report.ignored.push(path),
        }
    }
    report.ignored.extend(indexes.into_iter().filter(|(base, _)| !logs.contains_key(base)).map(|(_, path)| path));
    report.ignored.sort();
    for path in &report.ignored {
        tracing::warn!(path = %path.display(), "not a file of this partition; left alone");
    }
    Ok(logs.into_keys().collect())
}

/// Removes a last segment that is empty and begins within the one before it: one that found no room when it was made, whose
/// removal a power loss undid. It holds no byte; the one before it went on.
fn remove_abandoned(disk: &dyn Disk, dir: &Path, bases: &mut Vec<u64>, config: &TopicConfig) -> Result<()> {
    let [.., before, last] = bases[..] else { return Ok(()) };
    let open = |base| {
        let path = dir.join(Name { base, kind: Kind::Log }.to_string());
        let log = disk.open(&path, Open::READ).map_err(Error::io("open", &path))?;
        let len = log.len().map_err(Error::io("measure", &path))?;
        Ok::<_, Error>((log, len, path))
    };
    let (_, last_len, last_path) = open(last)?;
    if last_len > 0 {
        return Ok(());
    }
    let (log, len, log_path) = open(before)?;
    if Walk::over(&*log, &log_path, (before, 0), len, before, config.index_interval)?.next_offset <= last {
        return Ok(());
    }
    tracing::warn!(path = %last_path.display(), "removing an empty segment that was abandoned while it was made");
    segment::remove(disk, dir, last).map_err(Error::io("remove an abandoned segment of", dir))?;
    bases.pop();
    Ok(())
}

/// The end of a segment.
struct End {
    segment: Arc<Segment>,
    next_offset: u64,
    last_timestamp: u64,
}

/// Checks that a sealed segment leads to the next one, from its last index entry on. What does not hold is reported.
fn check_sealed(disk: &dyn Disk, dir: &Arc<Path>, base: u64, next: u64, config: &TopicConfig, report: &mut PartitionReport) -> Result<End> {
    let path = dir.join(Name { base, kind: Kind::Log }.to_string());
    let log = disk.open(&path, Open::READ).map_err(Error::io("open", &path))?;
    let len = log.len().map_err(Error::io("measure", &path))?;
    if let Some(walk) = walk_from_index(disk, dir, &*log, base, len, config)?
        && walk.next_offset == next
    {
        return Ok(walk.end(dir, base, walk.position));
    }
    // The index is missing, stale or wrong, or the log is damaged: the whole log tells which.
    let walk = Walk::over(&*log, &path, (base, 0), len, base, config.index_interval)?;
    let damage = match walk.flaw {
        // The index stays as well: it may lead to records behind the damage.
        Some(flaw) => Some(Error::Damaged { path, position: walk.position, offset: walk.next_offset, flaw }),
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
    let end = walk.end(dir, base, if walk.flaw.is_none() { walk.position } else { len });
    if walk.flaw.is_none() {
        reconcile(disk, &end.segment, &walk.entries, report);
    }
    Ok(end)
}

/// Walks a sealed log from its last index entry; none if the index files do not lead to a record, or leave too much unindexed.
fn walk_from_index(disk: &dyn Disk, dir: &Path, log: &dyn File, base: u64, len: u64, config: &TopicConfig) -> Result<Option<Walk>> {
    let last = |kind| {
        let path = dir.join(Name { base, kind }.to_string());
        // A file that cannot be read is as good as none: the log tells it all.
        segment::last_entry(disk, &path).unwrap_or_else(|error| {
            tracing::warn!(%error, path = %path.display(), "an index cannot be read");
            None
        })
    };
    let (Some(by_position), Some(by_time)) = (last(Kind::Index), last(Kind::TimeIndex)) else { return Ok(None) };
    let (offset, position) = (by_position.offset, by_position.second);
    if by_position.count != by_time.count || offset != by_time.offset || offset < base || position >= len {
        return Ok(None);
    }
    let path = dir.join(Name { base, kind: Kind::Log }.to_string());
    let walk = Walk::over(log, &path, (offset, position), len, base, config.index_interval)?;
    let sound = walk.flaw.is_none() && walk.next_offset > offset && walk.next_offset - offset <= config.index_interval.into();
    let timestamp = walk.entries.first().map(|entry| entry.timestamp);
    Ok((sound && timestamp.is_none_or(|timestamp| timestamp == by_time.second)).then_some(walk))
}

/// Makes the index files what the log says, and gives how many entries they hold then.
fn reconcile(disk: &dyn Disk, segment: &Segment, entries: &[IndexEntry], report: &mut PartitionReport) -> usize {
    let Reconciled { written, kept, error } = segment::reconcile_indexes(disk, segment, entries);
    report.rebuilt.extend(written);
    if let Some(error) = error {
        tracing::warn!(%error, "an index could not be written anew; look-ups scan the log instead");
    }
    kept
}

/// Finds the end of the active segment, cuts what is behind it, and makes the indexes what the log says. Gives how many
/// entries they hold.
fn recover_active(disk: &dyn Disk, dir: &Arc<Path>, base: u64, config: &TopicConfig, report: &mut PartitionReport) -> Result<(End, usize)> {
    let path = dir.join(Name { base, kind: Kind::Log }.to_string());
    let log = disk.open(&path, Open::WRITE).map_err(Error::io("open", &path))?;
    let len = log.len().map_err(Error::io("measure", &path))?;
    // What is judged is what the device holds: after a failed sync, the page cache may show more.
    log.sync().map_err(Error::io("sync", &path))?;
    log.evict().map_err(Error::io("read anew", &path))?;
    let walk = Walk::over(&*log, &path, (base, 0), len, base, config.index_interval)?;
    if let Some(flaw) = walk.flaw {
        let tail = Tail::examine(&*log, walk.position, len, walk.next_offset).map_err(Error::io("read", &path))?;
        let tail = tail.expect("a flaw is a byte that is not zero");
        let copy = if tail.is_worth_keeping() {
            Some(segment::copy_aside(disk, &*log, &path, &tail.span).map_err(Error::io("copy the torn tail of", &path))?)
        } else {
            None
        };
        let bytes = tail.span.end - tail.span.start;
        tracing::warn!(path = %path.display(), position = walk.position, bytes, records = tail.records, %flaw, copy = ?copy,
            "cutting a torn tail: bytes of a write that was never acknowledged");
        report.torn_tail = Some(TornTail { path: path.clone(), position: walk.position, bytes, records: tail.records, flaw, copy });
    }
    if walk.position < len {
        log.set_len(walk.position).map_err(Error::io("cut", &path))?;
    }
    // What is served from now on must not be lost by a power loss that a process crash came before.
    log.sync().map_err(Error::io("sync", &path))?;
    disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
    let end = walk.end(dir, base, walk.position);
    let kept = reconcile(disk, &end.segment, &walk.entries, report);
    // The writer adds to the files what they lack.
    end.segment.pending().extend_from_slice(&walk.entries[kept..]);
    Ok((end, kept))
}

/// A scan to the end of a log.
struct Walk {
    /// Where the last record ends, and which offset would be next.
    position: u64,
    next_offset: u64,
    last_timestamp: u64,
    /// What the records are indexed by.
    entries: Vec<IndexEntry>,
    /// Why it ended, if not by nothing but zeros.
    flaw: Option<Flaw>,
}

impl Walk {
    fn over(log: &dyn File, path: &Path, from: (u64, u64), len: u64, base: u64, interval: u32) -> Result<Self> {
        let mut scanner = Scanner::new(log, path, from.1, from.0, len);
        let mut entries = Vec::new();
        let mut last_timestamp = 0;
        let flaw = loop {
            match scanner.next()? {
                Step::Record(Found { offset, position, timestamp }) => {
                    // Timestamps in an index never decrease; a record that another writer stamped earlier is left out of it.
                    if segment::is_indexed(base, offset, interval) && timestamp >= last_timestamp {
                        entries.push(IndexEntry { offset, position, timestamp });
                    }
                    last_timestamp = timestamp.max(last_timestamp);
                }
                Step::End => break None,
                Step::Flawed(flaw) => break Some(flaw),
            }
        };
        Ok(Self { position: scanner.position(), next_offset: scanner.offset(), last_timestamp, entries, flaw })
    }

    fn end(&self, dir: &Arc<Path>, base: u64, end: u64) -> End {
        let segment = Arc::new(Segment::new(Arc::clone(dir), base, end));
        End { segment, next_offset: self.next_offset, last_timestamp: self.last_timestamp }
    }
}
