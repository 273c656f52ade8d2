//! The data directory: its lock, and the topics in it.
//!
//! A topic appears whole or not at all: it is laid out under a hidden name, which a rename makes its own; and it is deleted
//! the same way backwards. What an interrupted one leaves under a hidden name is removed on opening.

mod closing;
mod remove;
mod retention;
mod topics;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::clock::{Clock, SystemClock};
use crate::config::{BrokerConfig, Pinning, TopicConfig, Writers};
use crate::error::{Error, Result};
use crate::guard::{self, Guard};
use crate::io::{Disk, Entry, EntryKind, Lock, OsDisk, Process, is_out_of_files, parent_of};
#[cfg(feature = "sim")]
use crate::partition::Stepper;
use crate::partition::{BufferBudget, OwnedRecord, PartitionReport, Workers};
use crate::topic::{Appended, Cores, Opened, Surroundings, Topic, TopicDescription, UnsoundSettings, check_name};

use remove::DELETED;
use topics::Topics;

pub use retention::RetentionReport;
use retention::{Schedule, SoundTime};

const LOCK: &str = ".lock";

/// With this in front, a name of 249 bytes still is one of at most 255.
const NEW: &str = ".new-";

/// What opening a data directory found.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OpenReport {
    /// Of every partition of every topic.
    pub partitions: Vec<PartitionReport>,
    /// What is neither a topic nor the engine's own. It is left alone.
    pub ignored: Vec<PathBuf>,
    /// Topics that were half made or half deleted, and are gone now.
    pub removed: Vec<PathBuf>,
    /// Topics whose stored settings could not be used, with what serves instead. One that has none is no such topic.
    pub unsound_settings: Vec<UnsoundSettings>,
}

/// All topics of one data directory. Clones are handles to the same broker.
///
/// # Durability
/// Dropping it loses nothing that was acknowledged; [`Self::close`] tells besides whether everything went well, and gives
/// preallocated space back at once, also while handles to topics, partitions or readers are still held.
#[derive(Debug, Clone)]
pub struct Broker(Arc<Inner>, #[expect(dead_code, reason = "it ends with the last handle")] Option<Arc<Schedule>>);

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    disk: Arc<dyn Disk>,
    report: OpenReport,
    topics: Topics,
    /// What ages go by. Held during a pass.
    time: Mutex<SoundTime>,
    workers: Workers,
    /// Whether threads do its work, not a stepper.
    by_itself: bool,
}

impl Broker {
    /// Opens a data directory, making it if there is none, and all topics in it; what a crash left torn is mended.
    ///
    /// # Durability
    /// Everything that is readable when this returns is on the device.
    ///
    /// # Errors
    /// - [`Error::Locked`] if another broker has the directory; nothing of it was touched.
    /// - [`Error::IoUringUnavailable`] if [`Backend::Uring`](crate::Backend::Uring) was asked for and the kernel refuses.
    /// - [`Error::Damaged`] if records that were acknowledged once are damaged in an active segment; no byte of that partition
    ///   was changed. [`OnDamage::CutAside`](crate::OnDamage::CutAside) opens it without them.
    /// - [`Error::InvalidConfig`], [`Error::PartitionMissing`], and what the system says.
    pub fn open(dir: impl AsRef<Path>, config: BrokerConfig) -> Result<Self> {
        config.validate()?;
        let disk = OsDisk::new(config.backend).map_err(|source| match is_out_of_files(&source) {
            true => Error::io("open", dir.as_ref())(source),
            false => Error::IoUringUnavailable { source: Arc::new(source) },
        })?;
        Self::start(Arc::new(disk), Arc::new(SystemClock::new()), Workers::Threads, dir.as_ref(), &config)
    }

    /// [`Self::open`] over a disk and a clock of the caller's.
    ///
    /// # Errors
    /// As for [`Self::open`].
    #[cfg(feature = "sim")]
    pub fn open_on(disk: Arc<dyn Disk>, clock: Arc<dyn Clock>, dir: impl AsRef<Path>, config: BrokerConfig) -> Result<Self> {
        config.validate()?;
        Self::start(disk, clock, Workers::Threads, dir.as_ref(), &config)
    }

    /// [`Self::open`] over a disk of the caller's, without a thread: everything is done by whoever calls, one step at a time, in the
    /// order that the stepper decides, and by its clock.
    ///
    /// # Errors
    /// As for [`Self::open`].
    #[cfg(feature = "sim")]
    pub fn open_stepped(disk: Arc<dyn Disk>, stepper: &Stepper, dir: impl AsRef<Path>, config: BrokerConfig) -> Result<Self> {
        config.validate()?;
        Self::start(disk, stepper.clock(), Workers::Stepped(stepper.clone()), dir.as_ref(), &config)
    }

    fn start(disk: Arc<dyn Disk>, clock: Arc<dyn Clock>, workers: Workers, dir: &Path, config: &BrokerConfig) -> Result<Self> {
        let process = Process::current().map_err(Error::io("look out for forks of", dir))?;
        create_dirs(&*disk, dir)?;
        let lock: Arc<dyn Lock> = Arc::from(lock(&*disk, dir)?);
        let cores = Cores { cores: cores(&config.pinning), ..Cores::default() };
        let workers = match (workers, config.writers) {
            (Workers::Threads, Writers::Shared(writers)) => Workers::shared(&disk, &clock, dir, writers, || cores.next())?,
            (workers, _) => workers,
        };
        let buffers = BufferBudget::new(config.buffer_bytes);
        let (wait, opening) = (config.wait, config.opening());
        let around = Surroundings { disk: Arc::clone(&disk), clock, lock, cores, workers, buffers, wait, opening };
        let mut report = OpenReport::default();
        let mut topics = BTreeMap::new();
        for (path, name) in list(&*disk, dir, &mut report)? {
            let Opened { topic, partitions, ignored, unsound } = Topic::open(&around, &path, &name, &config.fallback)?;
            report.partitions.extend(partitions);
            report.ignored.extend(ignored);
            report.unsound_settings.extend(unsound);
            topics.insert(name, topic);
        }
        let time = Mutex::new(SoundTime::new(newest_record(&topics, &*around.clock), &*around.clock));
        let by_itself = matches!(around.workers, Workers::Threads | Workers::Shared(_));
        let workers = around.workers.clone();
        let topics = Topics::new(dir.to_owned(), process, around, topics);
        let inner = Arc::new(Inner { dir: dir.to_owned(), disk, report, topics, time, workers, by_itself });
        let every = config.retention_every.filter(|_| by_itself);
        let schedule = every.map(|every| Schedule::start(Arc::clone(&inner), every).map(Arc::new)).transpose();
        Ok(Self(inner, schedule.map_err(Error::io("start a retention thread for", dir))?))
    }

    /// What opening found, and mended.
    pub fn report(&self) -> &OpenReport {
        &self.0.report
    }

    /// What carries reads and writes here: `uring` or `posix`.
    pub fn backend(&self) -> &'static str {
        self.0.disk.backend()
    }

    /// Makes a topic. After a crash it is there whole, or not at all. Of several at once that make one of the same name, one does.
    ///
    /// # Blocking
    /// Also until another that makes or deletes a topic of that name is done.
    ///
    /// # Errors
    /// [`Error::InvalidTopicName`], [`Error::InvalidConfig`], [`Error::TopicExists`], [`Error::DiskFull`],
    /// [`Error::Closed`], and what the system says; no topic was made then.
    pub fn create_topic(&self, name: &str, config: TopicConfig) -> Result<Topic> {
        check_name(name)?;
        config.validate()?;
        let claim = self.0.topics.claim_free(name)?;
        let (disk, dir) = (&*self.0.disk, &self.0.dir);
        let hidden = dir.join(format!("{NEW}{name}"));
        let path = dir.join(name);
        remove::make_way(disk, &hidden)?;
        disk.create_dir(&hidden).map_err(Error::io("create", &hidden)).map_err(Error::or_full)?;
        let made = Topic::lay_out(disk, &hidden, &config).and_then(|()| match disk.rename(&hidden, &path) {
            // Something else has the name.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(Error::TopicExists { topic: name.to_owned() }),
            result => result.map_err(Error::io("rename", &hidden)),
        });
        if let Err(error) = made {
            remove::remove_tree(disk, &hidden)
                .unwrap_or_else(|error| tracing::warn!(%error, "a half-made topic is left until the next opening"));
            return Err(Error::or_full(error));
        }
        let named = if guard::stands(Guard::TopicNamesSynced) { disk.sync_dir(dir) } else { Ok(()) };
        let opened = named.map_err(Error::io("sync the directory", dir)).and_then(|()| Topic::open(claim.around(), &path, name, &config));
        match opened {
            Ok(Opened { topic, .. }) => {
                claim.show(topic.clone());
                Ok(topic)
            }
            Err(error) => {
                let removed = remove::hide(disk, dir, name).and_then(|hidden| remove::finish(disk, &hidden));
                removed.unwrap_or_else(|error| tracing::warn!(%error, "a topic that could not be opened is left"));
                Err(Error::or_full(error))
            }
        }
    }

    /// Deletes a topic and all its records. Handles to it get [`Error::Closed`] from then on, as from [`Topic::close`]. Its space is given back
    /// when this returns, also while readers hold its files; but for what has another name. After a crash it is there whole, or not at all.
    ///
    /// # Blocking
    /// Until what was queued for it is written, and until another that makes, alters or deletes a topic of that name is done.
    ///
    /// # Errors
    /// [`Error::TopicNotFound`], [`Error::Closed`]. [`Error::Io`] where there is what the engine did not make, which it names and never deletes: the
    /// topic goes on then. And what else the system says: the topic is closed then. It is still there, and can be deleted
    /// again; or it is gone, and the next opening removes what is left of it.
    pub fn delete_topic(&self, name: &str) -> Result<()> {
        check_name(name)?;
        let (claim, topic) = self.0.topics.claim(name)?;
        remove::check_all_ours(&*self.0.disk, &self.0.dir.join(name))?;
        claim.hide();
        if let Err(error) = topic.close() {
            tracing::warn!(%error, "a topic that is deleted could not be closed cleanly");
        }
        match remove::hide(&*self.0.disk, &self.0.dir, name) {
            Ok(hidden) => remove::finish(&*self.0.disk, &hidden),
            Err(error) => {
                claim.show(topic);
                Err(error)
            }
        }
    }

    /// Changes settings of a topic: `change` is given those that it has, and what it makes of them takes effect at once, with nothing interrupted.
    /// The result is all of them.
    ///
    /// `segment_bytes`, `segment_age`, `retention_age`, `retention_bytes`, `linger_us` and `max_batch_bytes` may change; all others are settled
    /// when a topic is made. Batches that are queued already are written also if they are larger than is allowed now. `change` must not make,
    /// alter or delete topics, or close the broker: it would wait for itself.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use sapwood::{Broker, BrokerConfig, TopicConfig};
    /// # let dir = tempfile::tempdir()?;
    /// # let broker = Broker::open(dir.path(), BrokerConfig::default())?;
    /// # broker.create_topic("orders", TopicConfig::default())?;
    /// let week = Duration::from_secs(7 * 24 * 3600);
    /// let config = broker.alter_topic("orders", |config| config.retention_age = Some(week))?;
    /// assert_eq!(config.retention_age, Some(week));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Durability
    /// When this returns, no crash takes the change back. A crash before leaves the old settings or the new ones.
    ///
    /// # Blocking
    /// Until the settings are on the device, and another that alters or deletes the topic is done. Appends go on meanwhile.
    ///
    /// # Errors
    /// [`Error::SettingFixed`] names one that cannot change, [`Error::InvalidConfig`] one that is out of range; [`Error::TopicNotFound`],
    /// [`Error::DiskFull`], [`Error::Closed`], and what the system says. Nothing changed then; only where the system also refused to have the old settings
    /// put back, which is warned of, the next opening may find the new ones.
    pub fn alter_topic(&self, name: &str, change: impl FnOnce(&mut TopicConfig)) -> Result<TopicConfig> {
        check_name(name)?;
        let (_claim, topic) = self.0.topics.claim(name)?;
        topic.alter(&*self.0.disk, change).map_err(Error::or_full)
    }

    /// Takes in the partition in the directory `from`, which was sealed and copied, or exported, in the place of one that never had a record. Every
    /// record is checked, and the checksums of sealed logs; indexes are made anew. All is copied: nothing of `from` is changed or held on to.
    /// What opening it found is the result: compare its first and next offset with what [`Partition::seal`](crate::Partition::seal) or
    /// [`export`](crate::Partition::export) gave. An end that did not come along is noticed, for the notes beside the segments tell of it; segments that are
    /// missing in front look as if retention had removed them, and an export holds no such notes.
    ///
    /// Handles to the empty partition get [`Error::Closed`] from then on; [`Topic::partition`] gives the new one.
    ///
    /// # Durability
    /// After a crash at any moment the partition is the empty one or the whole new one, and the new one once this returned.
    ///
    /// # Blocking
    /// While everything is read and written. The topic goes on meanwhile, but for altering and deleting it, which wait. Where it is closed
    /// meanwhile, this ends with [`Error::Closed`] once all is copied, and nothing of the copy is left.
    ///
    /// # Errors
    /// The first fault of what is there, by name and place: [`Error::Damaged`], [`Error::RecordsMissing`], [`Error::SumMismatch`].
    /// [`Error::PartitionNotEmpty`], [`Error::TopicNotFound`], [`Error::PartitionNotFound`], [`Error::DiskFull`], [`Error::Closed`], and what the
    /// system says. The empty partition goes on then; only where the system refuses to make the new names durable, neither is served until the broker
    /// is opened again.
    pub fn import_partition(&self, topic: &str, number: u32, from: impl AsRef<Path>) -> Result<PartitionReport> {
        check_name(topic)?;
        let (claim, topic) = self.0.topics.claim(topic)?;
        topic.import(claim.around(), number, from.as_ref()).map_err(Error::or_full)
    }

    /// What there is to say of a topic. See [`Topic::describe`].
    ///
    /// # Errors
    /// As for [`Self::topic`] and [`Topic::describe`].
    pub fn describe_topic(&self, name: &str) -> Result<TopicDescription> {
        self.topic(name)?.describe()
    }

    /// A handle to a topic.
    ///
    /// # Errors
    /// [`Error::InvalidTopicName`], [`Error::TopicNotFound`], [`Error::Closed`].
    pub fn topic(&self, name: &str) -> Result<Topic> {
        check_name(name)?;
        self.0.topics.get(name)
    }

    /// The topics' names, in order. None once the broker is closed.
    pub fn topics(&self) -> Vec<String> {
        self.0.topics.names()
    }

    /// How many partitions a topic has.
    ///
    /// # Errors
    /// As for [`Self::topic`].
    pub fn num_partitions(&self, topic: &str) -> Result<u32> {
        Ok(self.topic(topic)?.num_partitions())
    }

    /// The offset that the next record of a partition gets, but for those queued.
    ///
    /// # Errors
    /// As for [`Self::topic`], and [`Error::PartitionNotFound`].
    pub fn next_offset(&self, topic: &str, partition: u32) -> Result<u64> {
        Ok(self.topic(topic)?.partition(partition)?.next_offset())
    }

    /// Appends one record, and waits until it is as durable as its topic asks for. See [`Topic::produce`].
    ///
    /// # Errors
    /// As for [`Self::topic`] and [`Topic::produce`].
    pub fn produce(&self, topic: &str, key: Option<&[u8]>, value: &[u8]) -> Result<Appended> {
        self.topic(topic)?.produce(key, value)
    }

    /// Reads one durable record. See [`Partition::read_one`](crate::Partition::read_one).
    ///
    /// # Errors
    /// As for [`Self::next_offset`] and [`Partition::read_one`](crate::Partition::read_one).
    pub fn consume(&self, topic: &str, partition: u32, offset: u64) -> Result<OwnedRecord> {
        self.topic(topic)?.partition(partition)?.read_one(offset)
    }
}

/// The latest timestamp of any record that is not in the future.
fn newest_record(topics: &BTreeMap<String, Topic>, clock: &dyn Clock) -> Option<u64> {
    let now = clock.wall_ns();
    topics.values().flat_map(Topic::partitions).filter_map(|partition| partition.last_time()).filter(|&time| time <= now).max()
}

/// Takes the data directory for this process alone.
pub(crate) fn lock(disk: &dyn Disk, dir: &Path) -> Result<Box<dyn Lock>> {
    let path = dir.join(LOCK);
    disk.lock(&path).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => Error::Locked { path: dir.to_owned() },
        _ => Error::io("lock", &path)(error),
    })
}

/// Whether a directory was a broker's data directory once: it holds the file that is locked.
pub(crate) fn has_lock(disk: &dyn Disk, dir: &Path) -> Result<bool> {
    let is_lock = |entry: &Entry| entry.name == LOCK && entry.kind == EntryKind::File;
    Ok(disk.list(dir).map_err(Error::io("list", dir))?.iter().any(is_lock))
}

/// Makes `dir` and what is missing above it, each durable by name.
fn create_dirs(disk: &dyn Disk, dir: &Path) -> Result<()> {
    match disk.create_dir(dir) {
        Ok(()) => {
            let parent = parent_of(dir);
            disk.sync_dir(parent).map_err(Error::io("sync the directory", parent))
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            // Whoever made it may have crashed before its name was durable. A parent that this user cannot open was not made by us.
            let _ = disk.sync_dir(parent_of(dir));
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => match dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            Some(parent) => {
                create_dirs(disk, parent)?;
                create_dirs(disk, dir)
            }
            None => Err(Error::io("create", dir)(error)),
        },
        Err(error) => Err(Error::io("create", dir)(error)),
    }
}

/// The topics' directories and names. Left-overs of the engine's own are removed, everything else is reported.
fn list(disk: &dyn Disk, dir: &Path, report: &mut OpenReport) -> Result<Vec<(PathBuf, String)>> {
    let mut topics = Vec::new();
    for entry in disk.list(dir).map_err(Error::io("list", dir))? {
        let path = dir.join(&entry.name);
        let name = entry.name.to_str().unwrap_or_default();
        let left_over = name.strip_prefix(NEW).or_else(|| name.strip_prefix(DELETED)).is_some_and(|name| check_name(name).is_ok());
        match entry.kind {
            EntryKind::File if name == LOCK => {}
            // Names with a dot in front are the engine's, but what another put there is still another's.
            EntryKind::Directory if left_over && Topic::find_foreign(disk, &path)?.is_none() => {
                tracing::warn!(path = %path.display(), "removing a topic that was half made or half deleted");
                remove::remove_hidden(disk, &path)?;
                report.removed.push(path);
            }
            EntryKind::Directory if check_name(name).is_ok() && Topic::is_laid_out(disk, &path)? => topics.push((path, name.to_owned())),
            _ => report.ignored.push(path),
        }
    }
    // What is served from now on must not be lost by a power loss that a process crash came before: the names of topics, too.
    disk.sync_dir(dir).map_err(Error::io("sync the directory", dir))?;
    topics.sort();
    report.ignored.sort();
    report.removed.sort();
    Ok(topics)
}

/// The CPUs to pin writers to, all of them within the mask that this thread inherited.
fn cores(pinning: &Pinning) -> Vec<core_affinity::CoreId> {
    let allowed = || core_affinity::get_core_ids().unwrap_or_default();
    match pinning {
        Pinning::None => Vec::new(),
        // CPU 0 is where much of a kernel's own work happens unless told otherwise: it comes last.
        Pinning::Auto => allowed().into_iter().rev().collect(),
        Pinning::Cores(wanted) => {
            let (inside, outside): (Vec<_>, Vec<_>) = wanted.iter().partition(|&&id| allowed().iter().any(|core| core.id == id));
            if !outside.is_empty() {
                tracing::warn!(cpus = ?outside, "not in the inherited CPU mask; writers are pinned to the others, or to none");
            }
            inside.into_iter().map(|&id| core_affinity::CoreId { id }).collect()
        }
    }
}
