//! What can go wrong, each in a sentence that an operator can act on.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::record::{Flaw, RecordTooLarge};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every failure of this crate. Cheap to clone: one failed write answers many waiting appends.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is outside its limits.
    #[error("{name} is {value}; it must be from {minimum} to {maximum}")]
    InvalidConfig {
        /// The setting.
        name: &'static str,
        /// What it was.
        value: u64,
        /// The least it may be.
        minimum: u64,
        /// The most it may be.
        maximum: u64,
    },
    /// Settled when a topic is made.
    #[error("{name} cannot be changed: it is settled when a topic is made")]
    SettingFixed {
        /// The setting.
        name: &'static str,
    },
    /// Checked before any path is built.
    #[error("{name:?} is no topic name: 1 to 249 of A-Z a-z 0-9 . _ -, not beginning with a dot")]
    InvalidTopicName {
        /// What was asked for.
        name: String,
    },
    /// A topic, or something else, has that name already.
    #[error("the topic {topic:?} exists already")]
    TopicExists {
        /// Its name.
        topic: String,
    },
    /// No topic of that name.
    #[error("there is no topic {topic:?}")]
    TopicNotFound {
        /// The name asked for.
        topic: String,
    },
    /// The topic has fewer partitions.
    #[error("the topic {topic:?} has {partitions} partitions, counted from 0; there is no partition {partition}")]
    PartitionNotFound {
        /// The topic.
        topic: String,
        /// The number asked for.
        partition: u32,
        /// How many there are.
        partitions: u32,
    },
    /// A topic's partition directories are not 0, 1, 2, … up to its number of partitions.
    #[error("the topic in {path:?} should have {partitions} partitions, but the directory of partition {missing} is missing")]
    PartitionMissing {
        /// The topic's directory.
        path: PathBuf,
        /// How many partitions its settings or its other directories tell of.
        partitions: u32,
        /// The first that is missing.
        missing: u32,
    },
    /// Before the first record or past the last one.
    #[error("offset {offset} is out of range: the partition holds {first} up to, not including, {next}")]
    OffsetOutOfRange {
        /// The offset asked for.
        offset: u64,
        /// The first that can be read.
        first: u64,
        /// One past the last that can be read.
        next: u64,
    },
    /// Nothing of it was queued.
    #[error("a batch of {bytes} bytes is larger than max_batch_bytes, {limit}")]
    BatchTooLarge {
        /// Bytes that its records would occupy.
        bytes: u64,
        /// The topic's limit.
        limit: u64,
    },
    /// An append of no record.
    #[error("the batch is empty")]
    EmptyBatch,
    /// The batch that it was for is as before.
    #[error(transparent)]
    RecordTooLarge(#[from] RecordTooLarge),
    /// Another broker has the directory open, in this process or in another one.
    #[error("the data directory {path:?} is in use by another broker")]
    Locked {
        /// The data directory.
        path: PathBuf,
    },
    /// No room for more of the log: the device is full, the quota used up, or the file as large as it may be. Everything that was acknowledged is intact, and appends succeed again once there is room.
    #[error("{}", no_room(path, *needed, *appended))]
    DiskFull {
        /// The file that could not be extended.
        path: PathBuf,
        /// Bytes that were asked for; 0 if there was none for the file itself.
        needed: u64,
        /// How many of the batch's first records are in the log: 0, unless the batch spans segments.
        appended: u64,
    },
    /// No more files can be opened, by this process or on this system. What was asked for was not done, everything that was acknowledged
    /// is intact, and the same succeeds once fewer are open or the limit is raised.
    #[error("{}", too_many_open(path, *limit, *appended))]
    TooManyOpenFiles {
        /// What could not be opened.
        path: PathBuf,
        /// How many this process may have open, `RLIMIT_NOFILE`; none if it is the whole system that has no more.
        limit: Option<u64>,
        /// How many of the batch's first records are in the log: 0, unless a batch was appended that spans segments.
        appended: u64,
    },
    /// The offsets are used up: the last record that a partition can hold has the offset 2^64 - 2. Nothing of the batch was queued for the
    /// device, and all that is in the log stays readable.
    #[error("{path:?} has no offsets left for {records} records: the next one is {next}, and the last that can be given is 2^64 - 2")]
    OffsetsUsedUp {
        /// The partition's directory.
        path: PathBuf,
        /// The offset that the next record would get.
        next: u64,
        /// How many records the batch has.
        records: u64,
    },
    /// The system refused.
    #[error("could not {action} {path:?}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's reason.
        source: Arc<io::Error>,
    },
    /// io_uring was asked for, and the kernel does not grant it.
    #[error(
        "io_uring is not available: {source}; it may be denied by a container's seccomp profile or by kernel.io_uring_disabled, or the kernel is too old. Backend::Auto or Backend::Posix work without it"
    )]
    IoUringUnavailable {
        /// The kernel's answer.
        source: Arc<io::Error>,
    },
    /// Bytes that were a record once are none any more. They stay as they are.
    #[error("{path:?} is damaged at position {position}, where the record {offset} is expected: {flaw}")]
    Damaged {
        /// The segment.
        path: PathBuf,
        /// Where the record starts, in bytes.
        position: u64,
        /// The record that should be there.
        offset: u64,
        /// The check that failed.
        flaw: Flaw,
    },
    /// Records are missing between two segments, or behind the last one.
    #[error("the records {from} up to, not including, {to} are missing from {path:?}")]
    RecordsMissing {
        /// The partition's directory.
        path: PathBuf,
        /// The first that is missing.
        from: u64,
        /// The first that is there again, or that would follow.
        to: u64,
    },
    /// A sealed log is not the one that was sealed, though each of its records passes its checks.
    #[error("{path:?} is not the log that was sealed: its checksum is {computed:08x}, when it was sealed it was {stored:08x}")]
    SumMismatch {
        /// The segment's log.
        path: PathBuf,
        /// The checksum beside it.
        stored: u32,
        /// The checksum of its bytes.
        computed: u32,
    },
    /// What a repair would do is not what its plan showed: something changed since. Nothing was done.
    #[error("{path:?} is not as it was when its repair was planned; plan it anew")]
    PlanOutdated {
        /// The partition's directory.
        path: PathBuf,
    },
    /// A write or a sync failed. What the failed commit held may or may not be in the log, so the partition takes no
    /// more appends until it is opened again. Reads go on.
    #[error("the partition {path:?} stopped at its first failed write and must be opened again: {cause}")]
    Failed {
        /// The partition's directory.
        path: PathBuf,
        /// The failure that stopped it.
        cause: Arc<Error>,
    },
    /// The handle belongs to the process that this one was forked from. Nothing was done: a child may drop such a handle, which waits for
    /// nothing and changes nothing, and open another data directory.
    #[error("{path:?} was opened by the process that this one was forked from, and serves that one alone")]
    Forked {
        /// What was opened.
        path: PathBuf,
    },
    /// A bug of this crate. The process goes on, the partition does not.
    #[error("the writer of {path:?} panicked: {message}")]
    WriterPanicked {
        /// The partition's directory.
        path: PathBuf,
        /// The panic's message.
        message: String,
    },
    /// The partition was sealed, because it moves elsewhere: it takes no more appends here. Reads go on.
    #[error("the partition {path:?} was sealed and moved; it takes no more appends here")]
    Moved {
        /// The partition's directory.
        path: PathBuf,
    },
    /// A partition is to be taken in where there is one with records, or that had some.
    #[error("the partition {partition} of the topic {topic:?} is not empty")]
    PartitionNotEmpty {
        /// The topic.
        topic: String,
        /// The partition's number.
        partition: u32,
    },
    /// Closing took longer than it was given, and goes on by itself. Handles get [`Self::Closed`], and the directory stays locked until the device
    /// has answered: see [`Broker::close_within`](crate::Broker::close_within).
    #[error("{path:?} could not be closed within {limit:?}: the device has not answered yet; it stays locked until then")]
    CloseTimedOut {
        /// The data directory.
        path: PathBuf,
        /// How long it was given.
        limit: Duration,
    },
    /// The broker or the topic was closed, or the topic deleted.
    #[error("{path:?} is closed")]
    Closed {
        /// What was closed.
        path: PathBuf,
    },
}

impl Error {
    pub(crate) fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| {
            let path = path.to_owned();
            if crate::io::is_forked(&source) {
                Self::Forked { path }
            } else if crate::io::is_out_of_files(&source) {
                Self::TooManyOpenFiles { path, limit: crate::io::open_files_limit(&source), appended: 0 }
            } else {
                Self::Io { action, path, source: Arc::new(source) }
            }
        }
    }

    /// [`Self::DiskFull`] for what the system says where there is no room.
    pub(crate) fn or_full(self) -> Self {
        match self {
            Self::Io { ref path, .. } if self.is_disk_full() => Self::DiskFull { path: path.clone(), needed: 0, appended: 0 },
            error => error,
        }
    }

    /// Whether there was no room: on the device, in the quota, or under the limit of a file's size.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::DiskFull { .. } => true,
            Self::Io { source, .. } => is_full(source),
            Self::Failed { cause, .. } => cause.is_disk_full(),
            _ => false,
        }
    }

    /// Whether no more files could be opened.
    pub fn is_too_many_open_files(&self) -> bool {
        match self {
            Self::TooManyOpenFiles { .. } => true,
            Self::Failed { cause, .. } => cause.is_too_many_open_files(),
            _ => false,
        }
    }

    /// Whether the partition stopped and must be opened again.
    pub fn is_failed(&self) -> bool {
        matches!(self, Self::Failed { .. })
    }

    /// Whether the broker or the topic was closed, or the topic deleted.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    /// Whether the partition was sealed, because it moves elsewhere.
    pub fn is_moved(&self) -> bool {
        matches!(self, Self::Moved { .. })
    }

    /// Whether an offset was asked for that is not there.
    pub fn is_out_of_range(&self) -> bool {
        matches!(self, Self::OffsetOutOfRange { .. })
    }

    /// Whether bytes on the disk are not what was written.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::SumMismatch { .. } | Self::RecordsMissing { .. } | Self::PartitionMissing { .. })
    }
}

fn no_room(path: &Path, needed: u64, appended: u64) -> String {
    match needed {
        0 => format!("no room for {path:?}"),
        _ => format!("no room for {needed} more bytes of {path:?}; {appended} records of the batch were appended before"),
    }
}

fn too_many_open(path: &Path, limit: Option<u64>, appended: u64) -> String {
    let mut text = match limit {
        Some(limit) => format!("{path:?} cannot be opened: this process may have {limit} files open (RLIMIT_NOFILE, `ulimit -n`), and has"),
        None => format!("{path:?} cannot be opened: the system has as many files open as it may (fs.file-max)"),
    };
    if appended > 0 {
        text.push_str(&format!("; {appended} records of the batch were appended before"));
    }
    text
}

/// Whether the system ran out of room, the user out of quota, or the file came to its largest size.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}
