//! For operators: looking at partitions without opening them, and repairing them.
//!
//! - [`verify`] checks everything in a partition's directory. It takes no lock and changes nothing, so it serves on a damaged
//!   partition, and on one that another process is appending to.
//! - [`Inspector::describe`] says what there is in a topic's directory: its settings, and of each partition its offsets and its size.
//! - [`Inspector::read`] gives the records, up to the end or to the damage that ends them.
//! - [`Inspector::plan_repair`] says what a repair would do; [`Inspector::apply`] does it, with everything that is cut set aside first.
//!
//! It is no part of the engine: nothing of it is needed to open a partition, and a [`Broker`](crate::Broker) does not use it. Everything
//! here blocks while it reads; any thread may call it. Memory is bounded whatever the files claim, but for a list of the segments.
//!
//! ```
//! # use sapwood::{Broker, BrokerConfig, TopicConfig, inspect};
//! # let dir = tempfile::tempdir()?;
//! # let broker = Broker::open(dir.path(), BrokerConfig::default())?;
//! # broker.create_topic("orders", TopicConfig::default())?;
//! # broker.produce("orders", None, b"hello")?;
//! # broker.close()?;
//! # let data = dir.path();
//! for partition in inspect::Inspector::new().partitions(data)? {
//!     let report = inspect::verify(&partition)?;
//!     assert!(report.is_clean(), "{:?}", report.findings);
//!     assert_eq!(report.records, 1);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod entries;
mod examine;
mod finding;
mod index;
mod listing;
mod plan;
mod records;
mod repair;
mod survey;
mod topics;
mod verify;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::broker;
use crate::error::{Error, Result};
use crate::io::{Backend, Disk, EntryKind, OsDisk};
use crate::segment;
use crate::topic::Topic;

pub use entries::{StoredEntries, StoredEntry};
pub use finding::{Code, Finding, Severity};
pub use plan::{RepairChoices, RepairPlan, SealedDamage};
pub use records::{Place, StoredRecord, StoredRecords};
pub use repair::Repaired;
pub use topics::{StoredPartition, StoredTopic};
pub use verify::{SegmentReport, VerifyReport};

use listing::Listing;
use survey::Survey;

/// How long what a writer at work could explain is looked at again, unless the caller chooses.
const PATIENCE: Duration = Duration::from_secs(1);

/// Checks every record, index entry, segment boundary, checksum and claim of the checkpoint in a partition's directory, by reading
/// only. See [`Inspector::verify`].
///
/// # Errors
/// What the system says. What is wrong with the partition is no error, but in the report.
pub fn verify(dir: impl AsRef<Path>) -> Result<VerifyReport> {
    Inspector::new().verify(dir)
}

/// Looks at partitions from outside.
#[derive(Debug, Clone)]
pub struct Inspector {
    disk: Arc<dyn Disk>,
    patience: Duration,
}

impl Default for Inspector {
    fn default() -> Self {
        Self::new()
    }
}

impl Inspector {
    /// One for this system's files.
    pub fn new() -> Self {
        let disk = OsDisk::new(Backend::Posix).expect("plain system calls are always there");
        Self { disk: Arc::new(disk), patience: PATIENCE }
    }

    /// One for a disk of the caller's.
    #[cfg(feature = "sim")]
    pub fn on(disk: Arc<dyn Disk>) -> Self {
        Self { disk, patience: PATIENCE }
    }

    /// How long to look again at what another process's writer at work could explain, before it counts as found: a record that
    /// is half there at the end of the log, a file that has not got its name yet. Default 1 s in all; nothing where nothing looks wrong.
    /// Zero where it is known that nobody writes.
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Checks everything in a partition's directory. No lock is taken, nothing is opened for writing, no byte, length or time of
    /// change changes. What is appended meanwhile may or may not be looked at.
    ///
    /// # Blocking
    /// Until all of it is read.
    ///
    /// # Errors
    /// What the system says. What is wrong with the partition is no error, but in the report.
    pub fn verify(&self, dir: impl AsRef<Path>) -> Result<VerifyReport> {
        Ok(VerifyReport::of(&Survey::of(&*self.disk, dir.as_ref(), self.patience)?))
    }

    /// The records from offset `from` on in a partition's directory, or from its first one if that is later. No lock is taken and
    /// nothing is changed; it serves also where the engine refuses to open. Appends of another process that come later are not waited for.
    ///
    /// # Errors
    /// What the system says. The records end with [`Error::Damaged`] or [`Error::RecordsMissing`] where they do not lead on.
    pub fn read(&self, dir: impl AsRef<Path>, from: u64) -> Result<StoredRecords> {
        StoredRecords::of_partition(&self.disk, dir.as_ref(), from, self.patience)
    }

    /// The records from offset `from` on in one segment's log; or in a file of bytes that were cut from one, which say with which
    /// offset they begin.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn read_log(&self, path: impl AsRef<Path>, from: u64) -> Result<StoredRecords> {
        StoredRecords::of_log(&self.disk, path.as_ref(), from, self.patience)
    }

    /// The entries of an index or a time index as they stand there, right or wrong.
    ///
    /// # Errors
    /// What the system says.
    pub fn read_index(&self, path: impl AsRef<Path>) -> Result<StoredEntries> {
        StoredEntries::open(&*self.disk, path.as_ref())
    }

    /// The index and time index files in a partition's directory, in the order of their segments.
    ///
    /// # Errors
    /// What the system says.
    pub fn index_files(&self, dir: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
        let dir = dir.as_ref();
        Ok(Listing::of(&*self.disk, dir)?.index_files().map(|name| dir.join(name.to_string())).collect())
    }

    /// Whether a broker had the directory as its data directory: its lock lies there.
    ///
    /// # Errors
    /// What the system says.
    pub fn is_data_dir(&self, dir: impl AsRef<Path>) -> Result<bool> {
        broker::has_lock(&*self.disk, dir.as_ref())
    }

    /// The partitions' directories in a data directory or a topic's, in order; a partition's directory is its only one. Also those
    /// that are not there, though their topic tells of them: verifying says so. None where there is nothing that the engine could have
    /// made.
    ///
    /// # Errors
    /// What the system says.
    pub fn partitions(&self, dir: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
        let (disk, dir) = (&*self.disk, dir.as_ref());
        if Topic::lacks(disk, dir) || segment::has_any(disk, dir).map_err(Error::io("list", dir))? {
            return Ok(vec![dir.to_owned()]);
        }
        if Topic::is_laid_out(disk, dir)? {
            return Topic::partition_dirs(disk, dir);
        }
        let entries = disk.list(dir).map_err(Error::io("list", dir))?;
        let mut partitions = Vec::new();
        for topic in self.topics(dir)? {
            partitions.extend(Topic::partition_dirs(disk, &topic)?);
        }
        // A partition that was never written to holds nothing yet.
        let is_empty = entries.is_empty() && !repair::is_at_home(disk, dir)?;
        let is_new = !is_empty
            && entries.iter().all(|entry| entry.kind == EntryKind::File)
            && crate::partition::find_foreign(disk, dir).is_ok_and(|foreign| foreign.is_none());
        Ok(if partitions.is_empty() && is_new { vec![dir.to_owned()] } else { partitions })
    }

    /// Says what a repair of a partition's directory would do, by reading only. Nobody should be writing to it.
    ///
    /// It mends a torn tail, damage in the active segment, index files, zeros behind a sealed log, what interruptions left, and a
    /// checkpoint that does not fit; damage in sealed segments and gaps between segments only as `choices` say.
    ///
    /// # Errors
    /// What the system says.
    pub fn plan_repair(&self, dir: impl AsRef<Path>, choices: RepairChoices) -> Result<RepairPlan> {
        repair::plan(&*self.disk, dir.as_ref(), choices)
    }

    /// Does what a plan shows, and nothing else, with the lock of the data directory held. A directory that lies in no data
    /// directory is repaired without one: no broker can have it open.
    ///
    /// # Durability
    /// Each step is durable before the next. What is cut from a log, or whole logs that go, lie durably under a name that is never
    /// read before they go. After an interruption at any point, by a crash or a power loss, planning with the same choices and applying
    /// again leads to the same files.
    ///
    /// # Errors
    /// - [`Error::Locked`] if a broker has the data directory open; nothing was done.
    /// - [`Error::PlanOutdated`] if the plan would not be the same now; nothing was done.
    /// - What the system says; the steps before that one are done, and planning anew goes on with the rest.
    pub fn apply(&self, plan: &RepairPlan) -> Result<Repaired> {
        repair::apply(&*self.disk, plan)
    }
}
