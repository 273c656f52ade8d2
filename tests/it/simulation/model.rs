//! What a log must hold: a list of what was submitted, and how much of it was promised to whom.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use sapwood::{Batch, Durability, TopicConfig};

use crate::support::Rng;

/// Why a run is not what it must be.
pub type Verdict<T = ()> = Result<T, String>;

macro_rules! ensure {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(format!($($what)+));
        }
    };
}
pub(crate) use ensure;

/// One record that was submitted; its bytes follow from its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    pub number: u64,
    pub key: usize,
    pub value: usize,
}

impl Sent {
    pub fn key(&self) -> Vec<u8> {
        bytes(self.number, self.key)
    }

    pub fn value(&self) -> Vec<u8> {
        bytes(!self.number, self.value)
    }
}

/// Different for each number in every sector, and cheap.
fn bytes(number: u64, len: usize) -> Vec<u8> {
    let sector = Rng::new(number).bytes(len.min(512));
    let mut bytes = sector.repeat(len.div_ceil(512));
    bytes.truncate(len);
    bytes
}

/// The batch that holds these records.
pub fn batch_of(records: &[Sent]) -> Batch {
    let mut batch = Batch::new();
    for record in records {
        batch.push(Some(&record.key()), &record.value()).unwrap();
    }
    batch
}

/// How a machine goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The kernel keeps what it had.
    Process,
    /// Any part of what was not durable survives, in whole pages.
    Power,
    /// The same, torn at sectors.
    TornPower,
    /// Nothing of it survives.
    StrictPower,
}

impl Crash {
    pub const ALL: [Self; 4] = [Self::Process, Self::Power, Self::TornPower, Self::StrictPower];
}

/// One partition.
#[derive(Clone, Debug)]
pub struct Log {
    pub durability: Durability,
    /// In the order of their offsets: those in the log, and behind them those that may come to be.
    pub records: Vec<Sent>,
    /// Before this, a crash of the process takes nothing.
    pub kept_end: u64,
    /// Before this, a power loss takes nothing.
    pub durable_end: u64,
    /// The first offset is in this range: the least that was acknowledged, and the most that was asked for.
    pub first: (u64, u64),
    pub sealed: Presence,
    /// So many records are being taken in: all of them or none.
    pub all_or_nothing: Option<u64>,
}

impl Log {
    fn new(durability: Durability) -> Self {
        Self { durability, records: Vec::new(), kept_end: 0, durable_end: 0, first: (0, 0), sealed: Presence::Gone, all_or_nothing: None }
    }

    /// The records before that offset were acknowledged.
    pub fn acknowledge(&mut self, end: u64) {
        self.kept_end = self.kept_end.max(end);
        if self.durability == Durability::Durable {
            self.durable_end = self.durable_end.max(end);
        }
    }

    /// Somebody was told that they are on the device: by the watermark, a sync, or by reading them.
    pub fn promise(&mut self, end: u64) {
        self.durable_end = self.durable_end.max(end);
        self.kept_end = self.kept_end.max(end);
    }

    /// The records from there on may be gone at any time.
    pub fn may_be_cut(&mut self, end: u64) {
        self.kept_end = self.kept_end.min(end);
        self.durable_end = self.durable_end.min(end);
    }

    /// How many records must be there after a crash.
    pub fn floor(&self, crash: Crash) -> u64 {
        if crash == Crash::Process { self.kept_end } else { self.durable_end }
    }
}

/// Whether a topic is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    There,
    /// It is being made or deleted, or that failed: either will do, but whole.
    Unknown,
    Gone,
}

#[derive(Clone, Debug)]
pub struct TopicModel {
    pub config: TopicConfig,
    /// Settings that it was to get, and may have got.
    pub unanswered: Vec<TopicConfig>,
    pub presence: Presence,
    pub logs: Vec<Log>,
}

impl TopicModel {
    pub fn new(config: &TopicConfig) -> Self {
        let logs = (0..config.partitions).map(|_| Log::new(config.durability)).collect();
        Self { config: config.clone(), unanswered: Vec::new(), presence: Presence::Unknown, logs }
    }
}

/// Everything that a data directory must hold.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub topics: BTreeMap<String, TopicModel>,
    /// How many records were submitted, to any log.
    pub sent: u64,
    /// How many exports were begun, and where each of those lies that were made, with its files.
    pub begun_exports: u64,
    pub exports: Vec<(PathBuf, Files)>,
}

/// The files of a directory, by name.
pub type Files = Vec<(OsString, Option<Vec<u8>>)>;

impl Model {
    pub fn log(&mut self, topic: &str, partition: u32) -> &mut Log {
        &mut self.topics.get_mut(topic).expect("a script names topics that it made").logs[partition as usize]
    }
}
