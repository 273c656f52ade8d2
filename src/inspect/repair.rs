//! Applying a repair, step by step. Each step is durable before the next begins, and harmless when it is repeated.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::examine::{open_log, scanner};
use super::plan::{RepairChoices, RepairPlan, Step, decide};
use super::survey::Survey;
use crate::broker;
use crate::error::{Error, Result};
use crate::io::transfer::write_all_at;
use crate::io::{Disk, File, Lock, Open};
use crate::partition::CHECKPOINT;
use crate::record::to_u64;
use crate::segment::{self, ENTRY_BYTES, IndexEntry, Kind, Name, Step as Scanned, Sum, Tail};
use crate::topic::{Topic, check_name};

/// Entries of an index that are written at once.
const ENTRIES: usize = 1 << 12;

/// What a repair did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Repaired {
    /// Where that lies now which was cut or set aside.
    pub set_aside: Vec<PathBuf>,
}

/// Looks at a partition's directory, and decides.
pub(super) fn plan(disk: &dyn Disk, dir: &Path, choices: RepairChoices) -> Result<RepairPlan> {
    let survey = Survey::of(disk, dir, Duration::ZERO)?;
    let interval = home(disk, dir)?.and_then(|home| Topic::stored_interval(disk, &home.topic));
    Ok(RepairPlan { dir: dir.to_owned(), choices, decided: decide(&survey, choices, interval) })
}

/// Makes the changes, if they are still those that the plan shows.
pub(super) fn apply(disk: &dyn Disk, of: &RepairPlan) -> Result<Repaired> {
    let dir = &of.dir;
    let _lock = lock(disk, dir)?;
    if plan(disk, dir, of.choices)? != *of {
        return Err(Error::PlanOutdated { path: dir.clone() });
    }
    let mut repaired = Repaired::default();
    for step in &of.decided.steps {
        let done = Applying { disk, dir }.step(step, &mut repaired);
        done.map_err(Error::io("repair", &dir.join(step.name())))?;
        disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
    }
    Ok(repaired)
}

/// Where a partition's directory belongs to.
struct Home {
    data: PathBuf,
    topic: PathBuf,
}

/// The data directory that a partition's directory is of, by names and what lies there; none if it stands alone, or is not there.
fn home(disk: &dyn Disk, dir: &Path) -> Result<Option<Home>> {
    let path = match disk.canonical(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        path => path.map_err(Error::io("find", dir))?,
    };
    let (Some(topic), Some(number)) = (path.parent(), path.file_name()) else { return Ok(None) };
    let name = topic.file_name().and_then(|name| name.to_str());
    let (Some(data), Some(name)) = (topic.parent(), name) else { return Ok(None) };
    if !Topic::is_partition_name(number) || check_name(name).is_err() {
        return Ok(None);
    }
    let is_home = broker::has_lock(disk, data)? || Topic::stored_interval(disk, topic).is_some();
    Ok(is_home.then(|| Home { data: data.to_owned(), topic: topic.to_owned() }))
}

/// Whether a directory is, by its place, that of a partition.
pub(super) fn is_at_home(disk: &dyn Disk, dir: &Path) -> Result<bool> {
    Ok(home(disk, dir)?.is_some())
}

/// Keeps brokers away. A directory that stands alone no broker can have open: one that is open lies in a data directory with a lock.
fn lock(disk: &dyn Disk, dir: &Path) -> Result<Option<Box<dyn Lock>>> {
    home(disk, dir)?.map(|home| broker::lock(disk, &home.data)).transpose()
}

struct Applying<'a> {
    disk: &'a dyn Disk,
    dir: &'a Path,
}

impl Applying<'_> {
    fn path(&self, base: u64, kind: Kind) -> PathBuf {
        self.dir.join(Name { base, kind }.to_string())
    }

    fn step(&self, step: &Step, repaired: &mut Repaired) -> io::Result<()> {
        let (disk, dir) = (self.disk, self.dir);
        match *step {
            Step::CopyAside { base, position, next_offset } => {
                repaired.set_aside.extend(self.copy_aside(base, position, next_offset)?);
                Ok(())
            }
            Step::RemoveCheckpoint { .. } => disk.remove_file(&dir.join(CHECKPOINT)),
            Step::Remove { ref name, .. } => disk.remove_file(&dir.join(name)),
            Step::SetFileAside { ref name } => {
                repaired.set_aside.push(set_file_aside(disk, dir, name)?);
                Ok(())
            }
            Step::SetSegmentAside { base, .. } => {
                // Before the log, durably: without it they would be another's.
                segment::remove_derived(disk, dir, base)?;
                disk.sync_dir(dir)?;
                repaired.set_aside.push(segment::set_log_aside(disk, dir, base)?);
                Ok(())
            }
            Step::RemoveSegment { base } => segment::remove(disk, dir, base),
            Step::Cut { base, position, .. } | Step::CutZeros { base, position } => {
                let log = disk.open(&self.path(base, Kind::Log), Open::WRITE)?;
                log.set_len(position)?;
                log.sync()
            }
            Step::Rebuild { base, kind, interval } => self.rebuild(base, kind, interval),
            Step::WriteSum { base } => self.write_sum(base),
        }
    }

    /// Copies what follows the last record aside, durably.
    fn copy_aside(&self, base: u64, position: u64, next_offset: u64) -> io::Result<Option<PathBuf>> {
        let path = self.path(base, Kind::Log);
        let log = self.disk.open(&path, Open::READ)?;
        let tail = Tail::examine(&*log, position, log.len()?, next_offset)?;
        tail.map(|tail| segment::copy_aside(self.disk, &*log, &path, &tail.span)).transpose()
    }

    /// Makes an index file from the log.
    fn rebuild(&self, base: u64, kind: Kind, interval: u32) -> io::Result<()> {
        let path = self.path(base, Kind::Log);
        segment::put_derived(self.disk, self.dir, Name { base, kind }, |file| {
            let log = open_log(self.disk, &path).map_err(io::Error::other)?;
            let mut scanner = scanner(&log, &path, (base, 0), log.0.len()?);
            let mut entries = Entries { file, kind, at: 0, entries: Vec::with_capacity(ENTRIES), bytes: Vec::new() };
            let mut latest = 0;
            while let Scanned::Record(found) = scanner.next().map_err(io::Error::other)? {
                // Timestamps in an index never decrease; a record that another writer stamped earlier is left out of it.
                if segment::is_indexed(base, found.offset, interval) && found.timestamp >= latest {
                    entries.push(IndexEntry { offset: found.offset, position: found.position, timestamp: found.timestamp })?;
                }
                latest = found.timestamp.max(latest);
            }
            entries.write()
        })
    }

    fn write_sum(&self, base: u64) -> io::Result<()> {
        let path = self.path(base, Kind::Log);
        let log = open_log(self.disk, &path).map_err(io::Error::other)?;
        let mut scanner = scanner(&log, &path, (base, 0), log.0.len()?);
        while let Scanned::Record(_) = scanner.next().map_err(io::Error::other)? {}
        let (bytes, next_offset) = (scanner.position(), scanner.offset());
        Sum::compute(&*self.disk.open(&path, Open::READ)?, base, bytes, next_offset)?.write(self.disk, self.dir)
    }
}

/// Entries on their way to a file, some at a time.
struct Entries<'a> {
    file: &'a dyn File,
    kind: Kind,
    at: u64,
    entries: Vec<IndexEntry>,
    bytes: Vec<u8>,
}

impl Entries<'_> {
    fn push(&mut self, entry: IndexEntry) -> io::Result<()> {
        self.entries.push(entry);
        if self.entries.len() == ENTRIES { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> io::Result<()> {
        IndexEntry::encode_all(&self.entries, self.kind, &mut self.bytes);
        write_all_at(self.file, &self.bytes, self.at, false)?;
        self.at += to_u64(self.entries.len()) * ENTRY_BYTES;
        self.entries.clear();
        Ok(())
    }
}

/// Gives a file a name that nothing reads, the first that is free.
fn set_file_aside(disk: &dyn Disk, dir: &Path, name: &str) -> io::Result<PathBuf> {
    for attempt in 0_u32.. {
        let aside = dir.join(if attempt == 0 { format!("{name}.torn") } else { format!("{name}-{attempt}.torn") });
        match disk.rename(&dir.join(name), &aside) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            renamed => return renamed.map(|()| aside),
        }
    }
    unreachable!("a directory holds fewer files than a u32 counts")
}
