//! A topic: a name, its partitions, and which of them a record goes to.

mod merged;
mod name;
mod settings;
mod tail;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::clock::Clock;
use crate::config::{MAX_PARTITIONS, Opening, TopicConfig, WaitStrategy};
use crate::error::{Error, Result};
use crate::io::{Disk, EntryKind, Lock};
use crate::partition::{self, Partition, PartitionReport, Placement, Workers};
use crate::record::{Batch, to_usize};
use crate::segment;

pub use merged::Merged;
pub(crate) use name::check_name;
pub use tail::TopicTail;

/// Bytes that a reader of all partitions reads at once from each.
const PIECE_BYTES: usize = 64 << 10;

/// Where a produced record went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Appended {
    /// The partition.
    pub partition: u32,
    /// Its offset there.
    pub offset: u64,
}

/// A handle to a topic. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Topic(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    config: TopicConfig,
    partitions: Vec<Partition>,
    /// Where the next record without a key goes.
    turn: AtomicU32,
}

/// What opening a topic needs besides its directory.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) cores: Cores,
    pub(crate) workers: Workers,
    pub(crate) wait: WaitStrategy,
    pub(crate) opening: Opening,
}

/// The CPUs that writers are pinned to, in turn.
#[derive(Debug, Default)]
pub(crate) struct Cores {
    pub(crate) cores: Vec<core_affinity::CoreId>,
    pub(crate) turn: AtomicU32,
}

impl Cores {
    fn next(&self) -> Option<core_affinity::CoreId> {
        let count = u32::try_from(self.cores.len()).ok().filter(|&count| count > 0)?;
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % count;
        self.cores.get(to_usize(turn.into())).copied()
    }
}

impl Topic {
    /// Makes the directories and settings of a topic in `dir`, an empty directory, all of it durable but for `dir`'s own name.
    pub(crate) fn lay_out(disk: &dyn Disk, dir: &Path, config: &TopicConfig) -> Result<()> {
        for number in 0..config.partitions {
            let path = dir.join(number.to_string());
            disk.create_dir(&path).map_err(Error::io("create", &path))?;
        }
        settings::write(disk, dir, config)?;
        disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))
    }

    /// Whether a directory is a topic's: it holds settings, or a partition with a segment in it. A directory of another's,
    /// which this user may not even read, is none.
    pub(crate) fn is_laid_out(disk: &dyn Disk, dir: &Path) -> Result<bool> {
        let looked = settings::exist(disk, dir).and_then(|exist| if exist { Ok(true) } else { has_segments(disk, dir) });
        match looked {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(false),
            result => result.map_err(Error::io("list", dir)),
        }
    }

    /// The directories of the partitions in `dir`, in the order of their numbers, if it is a topic's or could be; also those that
    /// are not there, though its settings or later ones tell of them.
    pub(crate) fn partition_dirs(disk: &dyn Disk, dir: &Path) -> Result<Vec<PathBuf>> {
        let (numbers, _) = partition_numbers(disk, dir).map_err(Error::io("list", dir))?;
        Ok((0..told_partitions(disk, dir, &numbers)).map(|number| dir.join(number.to_string())).collect())
    }

    /// Whether `partition` is the directory of a partition that its topic tells of, and that is not there.
    pub(crate) fn lacks(disk: &dyn Disk, partition: &Path) -> bool {
        let number = partition.file_name().and_then(partition_number);
        let (Some(dir), Some(number)) = (partition.parent(), number) else { return false };
        // Where nothing can be listed, nothing is told.
        partition_numbers(disk, dir).is_ok_and(|(numbers, _)| !numbers.contains(&number) && number < told_partitions(disk, dir, &numbers))
    }

    /// Whether the directory of a partition may have that name.
    pub(crate) fn is_partition_name(name: &OsStr) -> bool {
        partition_number(name).is_some()
    }

    /// The path of the settings of the topic that `partition` is the directory of a partition of, if there are any and they say nothing.
    pub(crate) fn unsound_settings(disk: &dyn Disk, partition: &Path) -> Option<PathBuf> {
        partition.file_name().and_then(partition_number)?;
        let dir = partition.parent()?;
        let is_unsound = settings::exist(disk, dir).unwrap_or(false) && settings::stored(disk, dir).is_none();
        is_unsound.then(|| settings::path(dir))
    }

    /// Every how many records one is entered in the indexes of this topic, as its settings tell; none without sound settings.
    pub(crate) fn stored_interval(disk: &dyn Disk, dir: &Path) -> Option<u32> {
        settings::stored(disk, dir).map(|config| config.index_interval)
    }

    /// Whether nothing in the directory is another's: what a topic that is half made or half deleted may consist of.
    pub(crate) fn is_all_ours(disk: &dyn Disk, dir: &Path) -> Result<bool> {
        let (numbers, others) = partition_numbers(disk, dir).map_err(Error::io("list", dir))?;
        let ours = |number: &u32| partition::has_only_ours(disk, &dir.join(number.to_string())).map_err(Error::io("list", dir));
        Ok(others.is_empty() && numbers.iter().map(ours).collect::<Result<Vec<_>>>()?.into_iter().all(|ours| ours))
    }

    /// Opens all partitions of the topic in `dir`, with `fallback` for what its own settings do not tell.
    pub(crate) fn open(
        around: &Surroundings,
        dir: &Path,
        name: &str,
        fallback: &TopicConfig,
    ) -> Result<(Self, Vec<PartitionReport>, Vec<PathBuf>)> {
        let (numbers, ignored) = partition_numbers(&*around.disk, dir).map_err(Error::io("list", dir))?;
        let counted = numbers.last().map_or(0, |last| last + 1);
        let config = settings::read(&*around.disk, dir, fallback, counted)?;
        let partitions = config.partitions.max(counted);
        if let Some(missing) = (0..partitions).find(|number| numbers.binary_search(number).is_err()) {
            return Err(Error::PartitionMissing { path: dir.to_owned(), partitions, missing });
        }
        around.disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
        let config = TopicConfig { partitions, ..config };
        let mut opened = Vec::new();
        let mut reports = Vec::new();
        for number in numbers {
            let lock = Arc::clone(&around.lock);
            let (core, workers) = (around.cores.next(), around.workers.clone());
            let placement = Placement { topic: name.to_owned(), number, core, wait: around.wait, lock, workers };
            let dir = dir.join(number.to_string());
            let (partition, report) =
                Partition::open(Arc::clone(&around.disk), Arc::clone(&around.clock), &dir, config.clone(), around.opening, placement)?;
            opened.push(partition);
            reports.push(report);
        }
        let inner = Inner { name: name.to_owned(), config, partitions: opened, turn: AtomicU32::new(0) };
        Ok((Self(Arc::new(inner)), reports, ignored))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its settings.
    pub fn config(&self) -> &TopicConfig {
        &self.0.config
    }

    /// How many partitions it has.
    pub fn num_partitions(&self) -> u32 {
        self.0.config.partitions
    }

    /// A handle to partition `number`, counted from 0.
    ///
    /// # Errors
    /// [`Error::PartitionNotFound`].
    pub fn partition(&self, number: u32) -> Result<Partition> {
        self.get(number).cloned()
    }

    /// All its partitions, in the order of their numbers.
    pub fn partitions(&self) -> &[Partition] {
        &self.0.partitions
    }

    fn get(&self, number: u32) -> Result<&Partition> {
        self.0.partitions.get(to_usize(number.into())).ok_or_else(|| Error::PartitionNotFound {
            topic: self.0.name.clone(),
            partition: number,
            partitions: self.num_partitions(),
        })
    }

    /// The partition for a record: FNV-1a 64 of its key modulo the number of partitions; without a key, or with an empty
    /// one, each in turn.
    pub fn partition_for(&self, key: Option<&[u8]>) -> u32 {
        let partitions = self.num_partitions();
        match key {
            Some(key) if !key.is_empty() => route(key, partitions),
            _ => self.0.turn.fetch_add(1, Ordering::Relaxed) % partitions,
        }
    }

    /// Appends one record to the partition that it belongs to, and waits until it is as durable as the topic asks for.
    ///
    /// # Errors
    /// As for [`Partition::append`] and [`Ticket::wait`](crate::Ticket::wait), and [`Error::RecordTooLarge`].
    pub fn produce(&self, key: Option<&[u8]>, value: &[u8]) -> Result<Appended> {
        let batch = Batch::of(key, value)?;
        let partition = self.partition_for(key);
        let offsets = self.get(partition)?.append_and_wait(batch)?;
        Ok(Appended { partition, offset: offsets.start })
    }

    /// Closes every partition, and tells the first failure.
    pub(crate) fn close(&self) -> Result<()> {
        self.0.partitions.iter().map(Partition::close).fold(Ok(()), Result::and)
    }
}

/// FNV-1a, 64 bits, modulo the partitions. <http://www.isthe.com/chongo/tech/comp/fnv/>
fn route(key: &[u8], partitions: u32) -> u32 {
    const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let hash = key.iter().fold(OFFSET_BASIS, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    u32::try_from(hash % u64::from(partitions)).expect("less than a u32")
}

/// Whether any partition in `dir` holds a segment.
fn has_segments(disk: &dyn Disk, dir: &Path) -> io::Result<bool> {
    for number in partition_numbers(disk, dir)?.0 {
        if segment::has_any(disk, &dir.join(number.to_string()))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The partitions' numbers, in order, and the entries that are none and no settings.
fn partition_numbers(disk: &dyn Disk, dir: &Path) -> io::Result<(Vec<u32>, Vec<PathBuf>)> {
    let (mut numbers, mut others) = (Vec::new(), Vec::new());
    for entry in disk.list(dir)? {
        match partition_number(&entry.name) {
            Some(number) if entry.kind == EntryKind::Directory => numbers.push(number),
            _ if settings::is_name(&entry.name) => {}
            _ => others.push(dir.join(&entry.name)),
        }
    }
    numbers.sort_unstable();
    others.sort();
    Ok((numbers, others))
}

/// The number of the partition whose directory has that name: in decimal, without leading zeros, exactly what the number prints as.
fn partition_number(name: &OsStr) -> Option<u32> {
    let name = name.to_str()?;
    name.parse().ok().filter(|number: &u32| *number < MAX_PARTITIONS && number.to_string() == name)
}

/// How many partitions the topic in `dir` tells of, in which those of these numbers lie.
fn told_partitions(disk: &dyn Disk, dir: &Path, numbers: &[u32]) -> u32 {
    let counted = numbers.last().map_or(0, |last| last + 1);
    settings::stored(disk, dir).map_or(counted, |config| config.partitions.max(counted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_routed_by_fnv_1a() {
        // The published test values of FNV-1a 64.
        for (key, hash) in [(&b"a"[..], 0xaf63_dc4c_8601_ec8c_u64), (b"foobar", 0x8594_4171_f739_67e8)] {
            for partitions in [1, 2, 3, 7, 1 << 16] {
                assert_eq!(u64::from(route(key, partitions)), hash % u64::from(partitions));
            }
        }
    }
}
