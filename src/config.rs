//! What a user may choose, with units, defaults and limits.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::io::Backend;

/// Partitions of a topic at most, and one past the largest number of one.
pub(crate) const MAX_PARTITIONS: u32 = 1 << 16;

/// The longest time that a record or a segment may be kept for: 100 years, in milliseconds.
const MAX_AGE_MS: u64 = 100 * 365 * 24 * 3_600_000;

/// Threads that partitions share at most.
const MAX_SHARED_WRITERS: u32 = 1 << 10;

/// How a [`Broker`](crate::Broker) works on this machine. Not stored.
#[derive(Debug, Clone, PartialEq)]
pub struct BrokerConfig {
    /// Which system interface carries reads and writes. Default [`Backend::Auto`].
    pub backend: Backend,
    /// Where writer threads run. Default [`Pinning::Auto`].
    pub pinning: Pinning,
    /// How an idle writer thread waits for appends. Default [`WaitStrategy::Block`].
    pub wait: WaitStrategy,
    /// Which threads work as the partitions' writers. Default [`Writers::PerPartition`].
    pub writers: Writers,
    /// How much memory busy partitions may hold together, for their commits and for the ends of their logs
    /// ([`TopicConfig::commit_bytes`] twice and [`TopicConfig::tail_bytes`] each); what io_uring writes from is registered with the kernel and
    /// counts against RLIMIT_MEMLOCK. A partition takes its share with the second of several commits, and gives it back after 5 s
    /// without one. One for which nothing is left has memory for one commit at a time, and readers at its end read the disk.
    /// Bytes. Default 1 GiB, minimum 0. One partition alone is given what it needs, also if that is more.
    pub buffer_bytes: u64,
    /// For topics whose stored settings are missing or unreadable. Their number of partitions is counted, not taken from here.
    pub fallback: TopicConfig,
    /// How much of the active segments opening reads. Default [`Recovery::FromCheckpoint`].
    pub recovery: Recovery,
    /// What opening does about damage in an active segment. Default [`OnDamage::Refuse`].
    pub on_damage: OnDamage,
    /// Whether opening reads every sealed segment whole, and checks each record and the checksum of the log. What does not hold is told in
    /// [`PartitionReport::damage`](crate::PartitionReport::damage); opening goes on. Default false: whoever reads a record checks it.
    pub check_sealed: bool,
    /// How often the broker removes by itself what its topics no longer keep: see [`Broker::enforce_retention`](crate::Broker::enforce_retention). Default
    /// every minute; none: only when it is called. Minimum 1 ms.
    pub retention_every: Option<Duration>,
}

impl Default for BrokerConfig {
    fn default() -> Self {
        Self {
            backend: Backend::default(),
            pinning: Pinning::default(),
            wait: WaitStrategy::default(),
            writers: Writers::default(),
            buffer_bytes: 1 << 30,
            fallback: TopicConfig::default(),
            recovery: Recovery::default(),
            on_damage: OnDamage::default(),
            check_sealed: false,
            retention_every: Some(Duration::from_secs(60)),
        }
    }
}

impl BrokerConfig {
    /// Checks every setting against its limits.
    pub(crate) fn validate(&self) -> Result<()> {
        check_age("retention_every", self.retention_every)?;
        if let Writers::Shared(threads) = self.writers {
            check("writers.shared", threads.into(), 1, MAX_SHARED_WRITERS.into())?;
        }
        self.fallback.validate()
    }

    pub(crate) fn opening(&self) -> Opening {
        Opening { recovery: self.recovery, on_damage: self.on_damage, check_sealed: self.check_sealed }
    }
}

/// How partitions are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Opening {
    pub(crate) recovery: Recovery,
    pub(crate) on_damage: OnDamage,
    pub(crate) check_sealed: bool,
}

/// How much opening reads of the segment that takes a partition's appends. Sealed segments are never read whole, unless
/// their indexes do not lead to their ends or [`BrokerConfig::check_sealed`] asks for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// From the last checkpoint on; nothing after a clean close; all of it where there is no checkpoint that fits.
    /// Damage before the checkpoint is found by whoever reads the records.
    #[default]
    FromCheckpoint,
    /// All of it, so that damage anywhere in it is found.
    FullScan,
}

/// What opening does where records that were on the device once, as the partition's checkpoint tells, are damaged or gone
/// from the end of the log, be it that the file of the last segment is. A torn tail, the trace of a write that was never acknowledged, is no damage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum OnDamage {
    /// Opening fails with [`Error::Damaged`], which names the place, or [`Error::RecordsMissing`], which names the records, and changes
    /// no byte of the partition.
    #[default]
    Refuse,
    /// What begins with the damage is copied to a file beside the segment, durably, and cut: the partition goes on with the
    /// last record before it, and gives the offsets of those behind anew. Its report tells of it.
    CutAside,
}

/// Which threads work as the partitions' writers. A producer that is alone commits by itself with either
/// ([`Partition::append_and_wait`](crate::Partition::append_and_wait)).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Writers {
    /// One for each partition, and one for its upkeep while it is busy: the fastest for few partitions. Where the system refuses the latter, the
    /// writer does its work, too, and asks again after a while.
    #[default]
    PerPartition,
    /// So many for all partitions, each of which has its place at one of them, and as many for upkeep, but two at least. For many
    /// partitions of which few are busy at once: those cost no thread each. A partition whose files must be made, or whose file system
    /// refuses direct I/O, keeps the others at its thread waiting meanwhile; [`WaitStrategy::Spin`] does not apply. Minimum 1, maximum 1,024.
    Shared(u32),
}

/// How a writer thread that has nothing to do waits for the next append.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WaitStrategy {
    /// It sleeps, and is woken: costs no CPU, and a few microseconds per append that finds it idle.
    #[default]
    Block,
    /// It watches for so long before it sleeps. Saves the waking while appends come more often than that, and costs a CPU per busy
    /// partition: of use only where there are more CPUs than busy threads. A producer in
    /// [`Partition::append_and_wait`](crate::Partition::append_and_wait) that is alone needs no writer to be woken either way, and sends
    /// one that watches to sleep.
    Spin(Duration),
}

/// Which CPUs the writer threads are pinned to. A producer that commits by itself
/// ([`Partition::append_and_wait`](crate::Partition::append_and_wait)) does so wherever it runs. Where pinning fails, a thread runs unpinned, with a warning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Pinning {
    /// Round robin over the CPUs that the thread which opens the broker may use, from the highest number down.
    /// Where a disk has a single interrupt, its CPU is the best for one writer: see [`Self::Cores`] and `/proc/interrupts`.
    #[default]
    Auto,
    /// The scheduler decides.
    None,
    /// Round robin over these CPU numbers; those outside the inherited mask are left out.
    Cores(Vec<usize>),
}

/// The settings of one topic, stored beside its partitions when it is created. [`Broker::alter_topic`](crate::Broker::alter_topic) says which of them
/// may change later.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TopicConfig {
    /// Number of partitions. Default 1, minimum 1, maximum 65,536.
    pub partitions: u32,
    /// A record that does not fit in what is left of a segment opens a new one; a larger record gets one of its own.
    /// Bytes. Default 1 GiB, minimum 1, maximum 2^62.
    pub segment_bytes: u64,
    /// A segment takes no more records once its first one is so old, also where no more come: the next one begins then. One hour is a common
    /// choice; it bounds how long [`Self::retention_age`] is late. Measured by a clock that never jumps while the partition is open. Default none: by
    /// size alone. Minimum 1 ms, maximum 100 years.
    pub segment_age: Option<Duration>,
    /// Segments whose newest record is older than this go, oldest first: see [`Broker::enforce_retention`](crate::Broker::enforce_retention).
    /// Default none: no segment goes by its age. Minimum 1 ms, maximum 100 years.
    pub retention_age: Option<Duration>,
    /// Segments go, oldest first, while all logs of a partition together are larger than this; the one that takes the appends stays. Bytes, for each
    /// partition. Default none: no segment goes by size. Maximum 2^62.
    pub retention_bytes: Option<u64>,
    /// How much of a segment is allocated on the device ahead of the records, and again when that is used up.
    /// Bytes. Default 64 MiB, minimum 4 KiB, maximum 2^40. Never past the end of the segment.
    pub preallocate_bytes: u64,
    /// Every how many records of a segment one is entered in its indexes. Default 1, minimum 1.
    /// A larger interval saves 32 bytes per record and costs a longer scan per look-up.
    pub index_interval: u32,
    /// What an answered append survives. Default [`Durability::Durable`].
    pub durability: Durability,
    /// How long a commit waits for company after its first batch, while it has room. Microseconds.
    /// Default 0: a commit starts as soon as the one before it is durable. Maximum 60 s.
    pub linger_us: u64,
    /// A commit takes no further record once it holds this much. Bytes. Default 1 MiB, minimum 4 KiB, maximum 1 GiB.
    /// Two buffers of this size are kept per busy partition, beside `tail_bytes`, within [`BrokerConfig::buffer_bytes`].
    pub commit_bytes: u64,
    /// A commit takes no further record once it holds so many. Default 65,536, minimum 1, maximum 2^32.
    pub commit_records: u64,
    /// How much memory keeps the most recent commits readable without the disk, for consumers at the end of the log. Each
    /// commit takes whole blocks of 4 KiB. Bytes, rounded up to whole commits. Default 2 MiB, minimum 0: none, maximum 2^34.
    /// Only where commits pass by the page cache ([`Durability::Durable`]); it serves the other levels as it is.
    pub tail_bytes: u64,
    /// The largest batch: 28 bytes per record, its key and its value. Bytes. Default 128 MiB, minimum 1 KiB, maximum 2^32 + 2^20.
    pub max_batch_bytes: u64,
    /// How much may wait for the writer before `append` blocks. Bytes. Default 64 MiB, minimum 1.
    /// A single batch may exceed it while nothing else waits.
    pub queue_bytes: u64,
    /// How many batches may wait for the writer before `append` blocks. Default 1024, minimum 1, maximum 2^20.
    pub queue_batches: u32,
}

impl Default for TopicConfig {
    fn default() -> Self {
        Self {
            partitions: 1,
            segment_bytes: 1 << 30,
            segment_age: None,
            retention_age: None,
            retention_bytes: None,
            preallocate_bytes: 64 << 20,
            index_interval: 1,
            durability: Durability::Durable,
            linger_us: 0,
            commit_bytes: 1 << 20,
            commit_records: 1 << 16,
            tail_bytes: 2 << 20,
            max_batch_bytes: 128 << 20,
            queue_bytes: 64 << 20,
            queue_batches: 1024,
        }
    }
}

impl TopicConfig {
    /// The first setting that `new` has otherwise and that cannot change while the topic is there.
    pub(crate) fn fixed_difference(&self, new: &Self) -> Option<&'static str> {
        let Self {
            partitions,
            segment_bytes: _,
            segment_age: _,
            retention_age: _,
            retention_bytes: _,
            preallocate_bytes,
            index_interval,
            durability,
            linger_us: _,
            commit_bytes,
            commit_records,
            tail_bytes,
            max_batch_bytes: _,
            queue_bytes,
            queue_batches,
        } = new;
        let differences = [
            ("partitions", *partitions != self.partitions),
            ("preallocate_bytes", *preallocate_bytes != self.preallocate_bytes),
            ("index_interval", *index_interval != self.index_interval),
            ("durability", *durability != self.durability),
            ("commit_bytes", *commit_bytes != self.commit_bytes),
            ("commit_records", *commit_records != self.commit_records),
            ("tail_bytes", *tail_bytes != self.tail_bytes),
            ("queue_bytes", *queue_bytes != self.queue_bytes),
            ("queue_batches", *queue_batches != self.queue_batches),
        ];
        differences.into_iter().find(|(_, differs)| *differs).map(|(name, _)| name)
    }

    /// Checks every setting against its limits.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] names the first setting that is out of range.
    pub fn validate(&self) -> Result<()> {
        check("partitions", self.partitions.into(), 1, MAX_PARTITIONS.into())?;
        check("segment_bytes", self.segment_bytes, 1, 1 << 62)?;
        check("preallocate_bytes", self.preallocate_bytes, 1 << 12, 1 << 40)?;
        check_age("segment_age", self.segment_age)?;
        check_age("retention_age", self.retention_age)?;
        check("retention_bytes", self.retention_bytes.unwrap_or(0), 0, 1 << 62)?;
        check("index_interval", self.index_interval.into(), 1, u32::MAX.into())?;
        check("linger_us", self.linger_us, 0, 60_000_000)?;
        check("commit_bytes", self.commit_bytes, 1 << 12, 1 << 30)?;
        check("commit_records", self.commit_records, 1, 1 << 32)?;
        check("tail_bytes", self.tail_bytes, 0, 1 << 34)?;
        check("max_batch_bytes", self.max_batch_bytes, 1 << 10, (1 << 32) + (1 << 20))?;
        check("queue_bytes", self.queue_bytes, 1, 1 << 40)?;
        check("queue_batches", self.queue_batches.into(), 1, 1 << 20)?;
        if let Durability::Interval { bytes, time } = self.durability {
            check("durability.interval.bytes", bytes, 1, 1 << 40)?;
            check("durability.interval.time", u64::try_from(time.as_micros()).unwrap_or(u64::MAX), 1, 3_600_000_000)?;
        }
        Ok(())
    }
}

fn check(name: &'static str, value: u64, minimum: u64, maximum: u64) -> Result<()> {
    if (minimum..=maximum).contains(&value) { Ok(()) } else { Err(Error::InvalidConfig { name, value, minimum, maximum }) }
}

/// Times of a millisecond at least, and told in them.
fn check_age(name: &'static str, age: Option<Duration>) -> Result<()> {
    check(name, age.map_or(1, |age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)), 1, MAX_AGE_MS)
}

/// When an append is answered, and what a power loss can take after that. A crash of the process alone takes nothing
/// that was answered, at any level.
///
/// Readers see what is on the device, at every level, unless they ask for [`Visibility::Appended`](crate::Visibility).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Answered when its commit is on the device. A power loss takes nothing that was answered.
    #[default]
    Durable,
    /// Answered when the kernel has it; synced after so many bytes or so long, whichever is first.
    /// A power loss takes at most what came after the last sync.
    Interval {
        /// Bytes written since the last sync. Minimum 1, maximum 2^40.
        bytes: u64,
        /// Time since the first write after the last sync. Minimum 1 µs, maximum 1 h.
        time: Duration,
    },
    /// Answered when the kernel has it; synced when a segment is sealed, on `sync`, and on a clean close.
    /// A power loss takes what the kernel had not written by itself.
    Os,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_round_trip() {
        let config = TopicConfig::default();
        config.validate().unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<TopicConfig>(&text).unwrap(), config);
        assert_eq!(serde_json::from_str::<TopicConfig>("{}").unwrap(), config);
    }

    #[test]
    fn each_setting_is_checked() {
        let default = TopicConfig::default;
        let interval = |bytes, time| Durability::Interval { bytes, time };
        let wrong = [
            ("partitions", TopicConfig { partitions: 0, ..default() }),
            ("segment_bytes", TopicConfig { segment_bytes: 0, ..default() }),
            ("segment_bytes", TopicConfig { segment_bytes: u64::MAX, ..default() }),
            ("preallocate_bytes", TopicConfig { preallocate_bytes: 0, ..default() }),
            ("segment_age", TopicConfig { segment_age: Some(Duration::from_micros(999)), ..default() }),
            ("retention_age", TopicConfig { retention_age: Some(Duration::MAX), ..default() }),
            ("retention_bytes", TopicConfig { retention_bytes: Some(u64::MAX), ..default() }),
            ("index_interval", TopicConfig { index_interval: 0, ..default() }),
            ("linger_us", TopicConfig { linger_us: u64::MAX, ..default() }),
            ("commit_bytes", TopicConfig { commit_bytes: 1, ..default() }),
            ("commit_records", TopicConfig { commit_records: 0, ..default() }),
            ("tail_bytes", TopicConfig { tail_bytes: u64::MAX, ..default() }),
            ("max_batch_bytes", TopicConfig { max_batch_bytes: 0, ..default() }),
            ("queue_bytes", TopicConfig { queue_bytes: 0, ..default() }),
            ("queue_batches", TopicConfig { queue_batches: 0, ..default() }),
            ("durability.interval.bytes", TopicConfig { durability: interval(0, Duration::from_secs(1)), ..default() }),
            ("durability.interval.time", TopicConfig { durability: interval(1, Duration::MAX), ..default() }),
        ];
        for (setting, config) in wrong {
            let error = config.validate().unwrap_err();
            assert!(matches!(error, Error::InvalidConfig { name, .. } if name == setting), "{setting}: {error}");
        }
    }
}
