//! Opening a partition: what is there, what of it holds, and mending the end before anything is served.
//!
//! The active segment is judged first, before a byte is changed: see [`mend`](super::mend). Where the checkpoint fits it, sealed
//! segments before the checkpoint's are believed by their sizes and the ends of their indexes, and no log of theirs is read.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checkpoint::{self, Checkpoint, Checkpoints};
use super::mend::{self, Judged};
use super::note;
use super::sealed::{self, Sealed, open_log};
use super::walk::Way;
use crate::config::{Opening, Recovery, TopicConfig};
use crate::error::{Error, Result};
use crate::io::{Disk, Entry, EntryKind, Open};
use crate::record::Flaw;
use crate::segment::{self, IndexEntry, Kind, Name, Reconciled, Segment};

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
    /// Damage in the active segment that was cut, or records missing from the end that were given up, because
    /// [`OnDamage::CutAside`](crate::OnDamage::CutAside) was asked for. `torn_tail` tells what was cut and where it was copied; none if
    /// the log only ended too early.
    pub repaired: Option<Error>,
    /// Whether the active segment was taken up at a checkpoint, or else all of it was scanned.
    pub from_checkpoint: bool,
    /// Bytes of logs that were read to find this out.
    pub scanned_bytes: u64,
    /// Sealed segments that do not lead to the next one, or, with [`BrokerConfig::check_sealed`](crate::BrokerConfig::check_sealed), do not
    /// hold in all their parts. Every byte stays; a read that meets damage gets an error.
    pub damage: Vec<Error>,
    /// Index files that were written anew.
    pub rebuilt: Vec<PathBuf>,
    /// Names that are not this engine's. They are left alone.
    pub ignored: Vec<PathBuf>,
}

/// Bytes behind the last record of the active segment that were no record: the trace of a write that was never acknowledged,
/// unless [`PartitionReport::repaired`] says otherwise.
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
    pub(super) checkpoints: Checkpoints,
    pub(super) report: PartitionReport,
}

/// Finds out what is in `dir`, and mends its end. Without a segment there are no records, and the next offset is 0.
pub(super) fn recover(
    disk: &Arc<dyn Disk>,
    dir: &Arc<Path>,
    config: &TopicConfig,
    opening: Opening,
    topic: &str,
    partition: u32,
) -> Result<Recovered> {
    let mut report = PartitionReport {
        path: dir.to_path_buf(),
        topic: topic.to_owned(),
        partition,
        segments: 0,
        first_offset: 0,
        next_offset: 0,
        torn_tail: None,
        repaired: None,
        from_checkpoint: false,
        scanned_bytes: 0,
        damage: Vec::new(),
        rebuilt: Vec::new(),
        ignored: Vec::new(),
    };
    let Listed { mut bases, in_the_way, unfinished, checkpoint } = list(&**disk, dir, &mut report)?;
    let mut checkpoints = Checkpoints::open(disk, dir, checkpoint);
    if checkpoints.is_foreign() {
        report.ignored.push(checkpoints.path());
        report.ignored.sort();
    }
    for path in &report.ignored {
        tracing::warn!(path = %path.display(), "not a file of this partition; left alone");
    }
    let newest = checkpoints.newest();
    let disk = &**disk;
    let abandoned = find_abandoned(disk, dir, &bases, newest.as_ref(), config, &mut report)?;
    bases.truncate(bases.len() - usize::from(abandoned.is_some()));
    let active = bases.last().map(|&base| Judged::of(disk, dir, base, newest.as_ref(), config, opening)).transpose()?;
    let known = newest.filter(|checkpoint| bases.binary_search(&checkpoint.base).is_ok());
    if active.is_none()
        && let Some(error) = newest.and_then(|checkpoint| checkpoint.missing(dir, 0))
    {
        mend::refuse(&error, opening)?;
        tracing::error!(%error, "beginning anew, as it was asked for");
        report.repaired = Some(error);
    }
    if let Some(Error::RecordsMissing { from, .. }) = active.as_ref().map_or(report.repaired.as_ref(), Judged::damage) {
        refuse_what_is_in_the_way(disk, &in_the_way, *from)?;
    }
    if newest.is_some() && known.is_none() {
        tracing::warn!(path = %dir.display(), "the checkpoint is of a segment that is not there");
    }
    let sealed = match &active {
        Some(active) => {
            let fitting = |checkpoint: &Checkpoint| Some(&checkpoint.base) != bases.last() || active.fits_checkpoint();
            let believed = known.filter(|checkpoint| opening.recovery == Recovery::FromCheckpoint && fitting(checkpoint));
            sealed::judge(disk, dir, config, opening, &bases, believed.map_or(0, |checkpoint| checkpoint.base), &mut report)?
        }
        None => Vec::new(),
    };
    // From here on things are changed.
    for path in unfinished {
        disk.remove_file(&path).map_err(Error::io("remove", &path))?;
    }
    if let Some(base) = abandoned {
        tracing::warn!(path = %dir.display(), base, "removing an empty segment that was abandoned while it was made");
        segment::remove(disk, dir, base).map_err(Error::io("remove an abandoned segment of", dir))?;
    }
    let Some(active) = active else {
        return Ok(Recovered { segments: Vec::new(), indexed: 0, next_offset: 0, last_timestamp: 0, checkpoints, report });
    };
    let mut segments = Vec::with_capacity(bases.len());
    let mut last_timestamp = 0;
    for judged in sealed {
        let end = judged.mend(disk, config, &mut report)?;
        last_timestamp = end.last_timestamp.max(last_timestamp);
        segments.push(end.segment);
    }
    report.from_checkpoint = active.fits_checkpoint();
    report.scanned_bytes += active.read();
    let (end, indexed) = active.mend(disk, dir, last_timestamp, &mut checkpoints, &mut report)?;
    segments.push(end.segment);
    report.segments = segments.len();
    report.first_offset = bases[0];
    report.next_offset = end.next_offset;
    Ok(Recovered { segments, indexed, next_offset: end.next_offset, last_timestamp: end.last_timestamp, checkpoints, report })
}

/// What lies in a partition's directory.
struct Listed {
    /// The bases of the segments, in order.
    bases: Vec<u64>,
    /// What has the names of logs and is no regular file.
    in_the_way: Vec<(u64, PathBuf)>,
    /// What was not finished: copies by an interrupted opening, the next segment by a writer.
    unfinished: Vec<PathBuf>,
    /// What has the checkpoint's name.
    checkpoint: Option<EntryKind>,
}

/// Whether a file is called as what the engine notes of a partition beside its segments.
pub(crate) fn is_note(name: &OsStr) -> bool {
    name == checkpoint::NAME || note::is_name(name)
}

/// What the directory holds that is no file of those that this engine makes in a partition, by their names.
pub(crate) fn find_foreign(disk: &dyn Disk, dir: &Path) -> io::Result<Option<PathBuf>> {
    let is_ours = |entry: &Entry| {
        let name = &entry.name;
        entry.kind == EntryKind::File
            && (Name::parse(name).is_some() || segment::is_copy(name) || segment::is_prepared(name) || is_note(name))
    };
    Ok(disk.list(dir)?.iter().find(|entry| !is_ours(entry)).map(|entry| dir.join(&entry.name)))
}

/// Takes in what there is. What is not this engine's is reported.
fn list(disk: &dyn Disk, dir: &Path, report: &mut PartitionReport) -> Result<Listed> {
    let mut logs = BTreeMap::new();
    let (mut indexes, mut sums) = (Vec::new(), Vec::new());
    let (mut in_the_way, mut unfinished, mut checkpoint) = (Vec::new(), Vec::new(), None);
    for entry in disk.list(dir).map_err(Error::io("list", dir))? {
        let path = dir.join(&entry.name);
        match Name::parse(&entry.name) {
            Some(Name { base, kind: Kind::Log }) if entry.kind == EntryKind::File => {
                logs.insert(base, path);
            }
            Some(Name { base, kind: Kind::Log }) => {
                in_the_way.push((base, path.clone()));
                report.ignored.push(path);
            }
            Some(Name { base, kind: Kind::Sum }) if entry.kind == EntryKind::File => sums.push((base, path)),
            Some(Name { base, .. }) if entry.kind == EntryKind::File => indexes.push((base, path)),
            // A copy that an interrupted opening did not finish, or a next segment that never took its place: nothing in it was
            // acknowledged.
            _ if (segment::is_unfinished(&entry.name) || segment::is_prepared(&entry.name)) && entry.kind == EntryKind::File => {
                unfinished.push(path);
            }
            None if segment::is_copy(&entry.name) && !segment::is_unfinished(&entry.name) => {}
            _ if entry.name == checkpoint::NAME => checkpoint = Some(entry.kind),
            _ if note::is_unfinished(&entry.name) && entry.kind == EntryKind::File => unfinished.push(path),
            _ if note::is_name(&entry.name) && entry.kind == EntryKind::File => {}
            _ => report.ignored.push(path),
        }
    }
    let (first, last) = (logs.first_key_value().map(|(&base, _)| base), logs.last_key_value().map(|(&base, _)| base));
    for (base, path) in indexes.into_iter().filter(|(base, _)| !logs.contains_key(base)) {
        // An empty one is left of a segment whose log's name a power loss took back; one before the first log, of a segment whose removal a power
        // loss kept the half of.
        let is_empty = disk.open(&path, Open::READ).and_then(|index| index.len()).is_ok_and(|len| len == 0);
        if is_empty || first.is_some_and(|first| base < first) { unfinished.push(path) } else { report.ignored.push(path) }
    }
    for (base, path) in sums {
        if first.is_some_and(|first| base < first) {
            unfinished.push(path);
        } else if last.is_none_or(|last| base >= last) {
            // That log takes appends again, or is going to be made anew: those behind it were taken away by somebody.
            unfinished.push(path);
        } else if !logs.contains_key(&base) {
            report.ignored.push(path);
        }
    }
    report.ignored.sort();
    Ok(Listed { bases: logs.into_keys().collect(), in_the_way, unfinished, checkpoint })
}

/// Where records are given up whose log's name something else has, the log that is made anew could not have it: that is said before
/// anything is given up.
fn refuse_what_is_in_the_way(disk: &dyn Disk, in_the_way: &[(u64, PathBuf)], from: u64) -> Result<()> {
    let mut paths = in_the_way.iter().filter(|(base, _)| *base >= from).map(|(_, path)| path);
    paths.try_for_each(|path| disk.open(path, Open::WRITE).map(drop).map_err(Error::io("open", path)))
}

/// Finds a last segment that is empty and begins within the one before it: one that found no room when it was made, whose
/// removal a power loss undid. It holds no byte; the one before it went on.
fn find_abandoned(
    disk: &dyn Disk,
    dir: &Arc<Path>,
    bases: &[u64],
    newest: Option<&Checkpoint>,
    config: &TopicConfig,
    report: &mut PartitionReport,
) -> Result<Option<u64>> {
    let [.., before, last] = *bases else { return Ok(None) };
    let (_, len, _) = open_log(disk, dir, last)?;
    if len > 0 {
        return Ok(None);
    }
    let sealed = Sealed { base: before, next: last };
    // A checkpoint of it was written only when it was in use.
    if newest.is_some_and(|checkpoint| checkpoint.base == last) && sealed.believe(disk, dir, config)?.is_some() {
        return Ok(None);
    }
    let (log, len, path) = open_log(disk, dir, before)?;
    let way = Way { log: &*log, direct: false, path: &path, base: before, len, interval: config.index_interval };
    if sealed.walk_from_index(disk, dir, way, report)?.is_some_and(|walk| walk.next_offset == last) {
        return Ok(None);
    }
    let walk = way.whole()?;
    report.scanned_bytes += walk.read;
    Ok((walk.next_offset > last).then_some(last))
}

/// The end of a segment.
pub(super) struct End {
    pub(super) segment: Arc<Segment>,
    pub(super) next_offset: u64,
    pub(super) last_timestamp: u64,
}

/// Makes the index files what the log says behind their first `trusted` entries, and gives how many they hold behind those then.
pub(super) fn reconcile(disk: &dyn Disk, segment: &Segment, trusted: u64, entries: &[IndexEntry], report: &mut PartitionReport) -> usize {
    let Reconciled { written, kept, error } = segment::reconcile_indexes(disk, segment, trusted, entries);
    report.rebuilt.extend(written);
    if let Some(error) = error {
        tracing::warn!(%error, "an index could not be written anew; look-ups scan the log instead");
    }
    kept
}
