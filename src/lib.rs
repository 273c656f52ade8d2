//! An embeddable, append-only, partitioned commit log for Linux, on io_uring.
//!
//! A [`Broker`] holds a data directory of topics; a [`Topic`] has partitions; a [`Partition`] is one log, appended to by
//! [`Batch`] and read by [`Reader`]. An acknowledged append is on the device, unless the topic's [`Durability`] says otherwise.
//! The README has an example, docs/format.md what stands on the disk, ARCHITECTURE.md how it works.
//!
//! The library never prints, exits, or reads the environment. It warns through `tracing`.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("sapwood is for 64-bit Linux");

mod broker;
#[cfg(feature = "sim")]
pub mod clock;
#[cfg(not(feature = "sim"))]
mod clock;
mod config;
mod error;
#[cfg(feature = "sim")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "sim")]
pub mod guard;
#[cfg(not(feature = "sim"))]
mod guard;
pub mod inspect;
#[cfg(feature = "sim")]
pub mod io;
#[cfg(not(feature = "sim"))]
mod io;
mod metrics;
mod partition;
mod record;
mod segment;
mod sync;
mod topic;

pub use broker::{Broker, OpenReport, RetentionReport};
pub use config::{BrokerConfig, Durability, OnDamage, Pinning, Recovery, TopicConfig, WaitStrategy, Writers};
pub use error::{Error, Result};
pub use io::Backend;
pub use metrics::Stats;
#[cfg(feature = "sim")]
pub use partition::Stepper;
#[cfg(feature = "async")]
pub use partition::TailStream;
pub use partition::{
    Checksums, Exported, OwnedRecord, Partition, PartitionDescription, PartitionReport, ReadMode, Reader, ReaderConfig, Records,
    RecordsIter, Removed, Skipped, Tail, TailEvent, TailRecords, Ticket, TimeRange, TornTail, TryAppendError, Visibility,
};
pub use record::{Batch, Flaw, HEADER_BYTES, Header, Record, RecordTooLarge};
pub use topic::{Appended, Merged, Topic, TopicDescription, TopicTail, UnsoundSettings};

/// Runs the README's examples as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
