//! A topic: a name, its partitions, and which of them a record goes to.

mod import;
mod merged;
mod name;
mod settings;
mod tail;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::clock::Clock;
use crate::config::{MAX_PARTITIONS, Opening, TopicConfig, WaitStrategy};
use crate::error::{Error, Result};
use crate::io::{Disk, EntryKind, Lock};
use crate::partition::{self, BufferBudget, Partition, PartitionDescription, PartitionReport, Placement, Workers};
use crate::record::{Batch, to_usize};
use crate::segment;

use import::Hidden;
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

/// A topic, described.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TopicDescription {
    /// Its name.
    pub name: String,
    /// Its settings, as they are now.
    pub config: TopicConfig,
    /// Its partitions, in the order of their numbers.
    pub partitions: Vec<PartitionDescription>,
}

/// A handle to a topic. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Topic(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    dir: PathBuf,
    /// In the order of their numbers. One that is empty may give its place to another.
    partitions: RwLock<Vec<Partition>>,
    /// No partition is opened any more. Set before the list is looked at by whoever closes, and looked at by whoever changes the list.
    closed: AtomicBool,
    /// Held by whoever takes a partition in.
    importing: Mutex<()>,
    /// Where the next record without a key goes.
    turn: AtomicU32,
}

/// A topic that was opened, and what that found.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) topic: Topic,
    pub(crate) partitions: Vec<PartitionReport>,
    /// What is another's.
    pub(crate) ignored: Vec<PathBuf>,
    pub(crate) unsound: Option<UnsoundSettings>,
}

/// Stored settings of a topic that could not be used.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct UnsoundSettings {
    /// The file. It stays as it is until the topic is altered.
    pub path: PathBuf,
    /// Why not: it could not be read, or a setting is out of range.
    pub cause: Error,
    /// The settings that serve instead: the broker's fallback, with the partitions that were counted and the index interval that the indexes
    /// show.
    pub used: TopicConfig,
}

/// What opening a topic needs besides its directory.
#[derive(Debug)]
pub(crate) struct Surroundings {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) cores: Cores,
    pub(crate) workers: Workers,
    pub(crate) buffers: Arc<BufferBudget>,
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
    pub(crate) fn next(&self) -> Option<core_affinity::CoreId> {
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
        let numbers = Listed::of(disk, dir).map_err(Error::io("list", dir))?.numbers;
        Ok((0..told_partitions(disk, dir, &numbers)).map(|number| dir.join(number.to_string())).collect())
    }

    /// Whether `partition` is the directory of a partition that its topic tells of, and that is not there.
    pub(crate) fn lacks(disk: &dyn Disk, partition: &Path) -> bool {
        let number = partition.file_name().and_then(partition_number);
        let (Some(dir), Some(number)) = (partition.parent(), number) else { return false };
        // Where nothing can be listed, nothing is told.
        Listed::of(disk, dir)
            .is_ok_and(|Listed { numbers, .. }| !numbers.contains(&number) && number < told_partitions(disk, dir, &numbers))
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

    /// The settings of the topic in `dir`, if it has any.
    ///
    /// # Errors
    /// They cannot be used, and why.
    pub(crate) fn stored_settings(disk: &dyn Disk, dir: &Path) -> Result<Option<TopicConfig>> {
        settings::look(disk, dir)
    }

    /// What is another's in the directory of a topic, be it half made or half deleted.
    pub(crate) fn find_foreign(disk: &dyn Disk, dir: &Path) -> Result<Option<PathBuf>> {
        let Listed { numbers, hidden, linked, others, .. } = Listed::of(disk, dir).map_err(Error::io("list", dir))?;
        if let Some(foreign) = others.into_iter().chain(linked).next() {
            return Ok(Some(foreign));
        }
        let numbered = numbers.iter().map(|number| dir.join(number.to_string()));
        for partition in numbered.chain(hidden.iter().map(|hidden| hidden.path(dir))) {
            if let Some(foreign) = partition::find_foreign(disk, &partition).map_err(Error::io("list", &partition))? {
                return Ok(Some(foreign));
            }
        }
        Ok(None)
    }

    /// Opens all partitions of the topic in `dir`, with `fallback` where it has no settings of its own that can be used.
    pub(crate) fn open(around: &Surroundings, dir: &Path, name: &str, fallback: &TopicConfig) -> Result<Opened> {
        let mut listed = Listed::of(&*around.disk, dir).map_err(Error::io("list", dir))?;
        import::finish(&*around.disk, dir, &mut listed)?;
        let Listed { numbers, unfinished, others, .. } = listed;
        let counted = numbers.last().map_or(0, |last| last + 1);
        let (config, unsound) = settings::read(&*around.disk, dir, fallback, counted)?;
        let partitions = config.partitions.max(counted);
        if let Some(missing) = (0..partitions).find(|number| numbers.binary_search(number).is_err()) {
            return Err(Error::PartitionMissing { path: dir.to_owned(), partitions, missing });
        }
        if unfinished {
            settings::remove_unfinished(&*around.disk, dir)?;
        }
        // Which settings those are that are served, too.
        around.disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
        let config = TopicConfig { partitions, ..config };
        let unsound = unsound.map(|cause| UnsoundSettings { path: settings::path(dir), cause, used: config.clone() });
        let mut opened = Vec::new();
        let mut reports = Vec::new();
        for number in numbers {
            let (partition, report) = open_partition(around, dir, name, number, &config)?;
            opened.push(partition);
            reports.push(report);
        }
        let inner = Inner {
            name: name.to_owned(),
            dir: dir.to_owned(),
            partitions: RwLock::new(opened),
            closed: AtomicBool::new(false),
            importing: Mutex::default(),
            turn: AtomicU32::new(0),
        };
        Ok(Opened { topic: Self(Arc::new(inner)), partitions: reports, ignored: others, unsound })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its settings, as they are now.
    pub fn config(&self) -> TopicConfig {
        self.with_partitions(|partitions| partitions.first().expect("a topic has a partition").config())
    }

    /// Its settings, and of each partition its offsets, its segments, and what it takes on the disk.
    ///
    /// # Blocking
    /// While the length of each of its files is asked for.
    ///
    /// # Errors
    /// [`Error::Closed`], and what the system says.
    pub fn describe(&self) -> Result<TopicDescription> {
        let partitions = self.partitions().iter().map(Partition::describe).collect::<Result<_>>()?;
        Ok(TopicDescription { name: self.0.name.clone(), config: self.config(), partitions })
    }

    /// How many partitions it has.
    pub fn num_partitions(&self) -> u32 {
        u32::try_from(self.with_partitions(<[_]>::len)).expect("2^16 at most")
    }

    /// A handle to partition `number`, counted from 0.
    ///
    /// # Errors
    /// [`Error::PartitionNotFound`].
    pub fn partition(&self, number: u32) -> Result<Partition> {
        let found = self.with_partitions(|partitions| partitions.get(to_usize(number.into())).cloned());
        found.ok_or_else(|| Error::PartitionNotFound { topic: self.0.name.clone(), partition: number, partitions: self.num_partitions() })
    }

    /// All its partitions, in the order of their numbers.
    pub fn partitions(&self) -> Vec<Partition> {
        self.with_partitions(<[_]>::to_vec)
    }

    fn with_partitions<T>(&self, look: impl FnOnce(&[Partition]) -> T) -> T {
        look(&self.0.partitions.read().unwrap_or_else(PoisonError::into_inner))
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
        let offsets = self.partition(partition)?.append_and_wait(batch)?;
        Ok(Appended { partition, offset: offsets.start })
    }

    /// Lets `change` have the settings, checks what came of it, and goes on with that once it is stored. Whoever calls sees to it that nobody else
    /// does so, or deletes the topic, meanwhile.
    pub(crate) fn alter(&self, disk: &dyn Disk, change: impl FnOnce(&mut TopicConfig)) -> Result<TopicConfig> {
        self.partitions().iter().try_for_each(Partition::check_open)?;
        let old = self.config();
        let mut new = old.clone();
        change(&mut new);
        if let Some(name) = old.fixed_difference(&new) {
            return Err(Error::SettingFixed { name });
        }
        new.validate()?;
        if new != old {
            settings::replace(disk, &self.0.dir, &old, &new)?;
            self.partitions().iter().for_each(|partition| partition.set_live(&new));
        }
        Ok(new)
    }

    /// Closes the topic: everything that is queued is written, preallocated space is given back, and its threads and files are let go of. All
    /// handles to it and to its partitions, readers and tails get [`Error::Closed`] from then on, and who waits at its end is told so, too.
    /// The broker still has it by its name, closed: it can be deleted, and it serves again once the broker is opened again.
    ///
    /// # Blocking
    /// Until what was queued before is answered. A [partition that is being taken in](crate::Broker::import_partition) is waited for, too, as far as it is
    /// copied: that either gives up with [`Error::Closed`], and leaves nothing behind, or the partition has its place already and is closed with the others.
    ///
    /// # Errors
    /// The first failure; everything is closed all the same. A partition that had stopped tells why.
    pub fn close(&self) -> Result<()> {
        self.0.closed.store(true, Ordering::SeqCst);
        let closed = self.partitions().iter().map(Partition::close).fold(Ok(()), Result::and);
        if !matches!(closed, Err(Error::Forked { .. })) {
            drop(self.0.importing.lock());
        }
        closed
    }

    /// All handles are told that it is closed, whether or not whoever closes it comes to an end.
    pub(crate) fn leave_to_close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.partitions().iter().for_each(Partition::leave_to_close);
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
    for number in Listed::of(disk, dir)?.numbers {
        if segment::has_any(disk, &dir.join(number.to_string()))? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn open_partition(
    around: &Surroundings,
    dir: &Path,
    topic: &str,
    number: u32,
    config: &TopicConfig,
) -> Result<(Partition, PartitionReport)> {
    let lock = Arc::clone(&around.lock);
    let (core, workers, buffers) = (around.cores.next(), around.workers.clone(), Arc::clone(&around.buffers));
    let placement = Placement { topic: topic.to_owned(), number, core, wait: around.wait, lock, workers, buffers };
    let dir = dir.join(number.to_string());
    Partition::open(Arc::clone(&around.disk), Arc::clone(&around.clock), &dir, config.clone(), around.opening, placement)
}

/// What lies in a topic's directory.
struct Listed {
    /// The partitions' numbers, in order.
    numbers: Vec<u32>,
    /// Partitions' directories that an interrupted import left; those to come first.
    hidden: Vec<Hidden>,
    /// Whether new settings lie there that never took the place of the old ones.
    unfinished: bool,
    /// What has the name of the settings, where that is no regular file: another put it there, to be read by all the same.
    linked: Option<PathBuf>,
    /// What is neither a partition nor settings.
    others: Vec<PathBuf>,
}

impl Listed {
    fn of(disk: &dyn Disk, dir: &Path) -> io::Result<Self> {
        let mut listed = Self { numbers: Vec::new(), hidden: Vec::new(), unfinished: false, linked: None, others: Vec::new() };
        for entry in disk.list(dir)? {
            match partition_number(&entry.name) {
                Some(number) if entry.kind == EntryKind::Directory => listed.numbers.push(number),
                _ if Hidden::parse(&entry).is_some() => listed.hidden.extend(Hidden::parse(&entry)),
                _ if settings::is_name(&entry.name) => listed.linked = (entry.kind != EntryKind::File).then(|| dir.join(&entry.name)),
                _ if settings::is_unfinished(&entry) => listed.unfinished = true,
                _ => listed.others.push(dir.join(&entry.name)),
            }
        }
        listed.numbers.sort_unstable();
        listed.hidden.sort_by_key(|hidden| !hidden.is_new());
        listed.others.sort();
        Ok(listed)
    }
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
