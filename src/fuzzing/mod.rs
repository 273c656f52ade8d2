//! What the fuzzers in `fuzz/` drive, one function per target: arbitrary bytes in, a panic out if a promise is broken.
//!
//! Not part of the interface, and only there with the feature `sim`. The same functions run under cargo-fuzz, over the inputs kept
//! in `fuzz/` as an ordinary test (`tests/it/fuzz_corpus.rs`), and under Miri. What must be true is computed by [`format`], which
//! follows docs/format.md and shares no line with the engine; all I/O goes to the simulated disk.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "test code: a failure is a panic with its place, and the numbers are small and chosen here"
)]

mod checkpoint;
mod directory;
mod format;
mod index;
mod record;
mod segment;

pub use checkpoint::checkpoint;
pub use directory::directory;
pub use index::index;
pub use record::record;
pub use segment::segment;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::io::Disk;
use crate::io::sim::SimDisk;
use crate::{
    Batch, Broker, BrokerConfig, Error, OnDamage, OwnedRecord, Partition, Pinning, ReaderConfig, Recovery, Result, Stepper, TopicConfig,
};
use format::{Log, Stored};

const DATA: &str = "/data";
const TOPIC: &str = "t";

/// Stores the topic's settings beside the partition.
fn store_settings(sim: &SimDisk, config: &BrokerConfig) {
    sim.write_file(&dir().with_file_name("topic.json"), &serde_json::to_vec(&config.fallback).unwrap());
}

/// A disk with a partition of these files.
fn disk_with<'a>(files: impl IntoIterator<Item = (&'a String, &'a Vec<u8>)>) -> SimDisk {
    let sim = SimDisk::new(0);
    sim.make_dirs(&dir());
    for (name, bytes) in files {
        sim.write_file(&dir().join(name), bytes);
    }
    sim
}

fn dir() -> PathBuf {
    Path::new(DATA).join(TOPIC).join("0")
}

/// Settings that keep one execution cheap.
fn tiny(index_interval: u32, recovery: Recovery, on_damage: OnDamage) -> BrokerConfig {
    let fallback = TopicConfig {
        segment_bytes: 270,
        preallocate_bytes: 4096,
        commit_bytes: 4096,
        tail_bytes: 0,
        index_interval,
        ..TopicConfig::default()
    };
    BrokerConfig { pinning: Pinning::None, fallback, recovery, on_damage, ..BrokerConfig::default() }
}

/// Without threads: starting and waiting for them takes most of the time otherwise.
fn open(sim: &SimDisk, config: &BrokerConfig) -> Result<(Broker, Partition)> {
    let broker = Broker::open_stepped(Arc::new(sim.clone()), &Stepper::new(0), DATA, config.clone())?;
    let partition = broker.topic(TOPIC)?.partition(0)?;
    Ok((broker, partition))
}

/// All files of the partition, by name.
fn files(sim: &SimDisk) -> BTreeMap<String, Vec<u8>> {
    let entries = sim.clone().list(&dir()).unwrap();
    entries.into_iter().map(|entry| (entry.name.to_string_lossy().into_owned(), sim.read_file(&dir().join(&entry.name)))).collect()
}

/// So many offsets are read at the beginning, at the end, and around what was written, where a segment far away leaves a gap.
const NEAR: u64 = 200;

/// Reads every offset in both ways, each by a look-up of its own; they must agree. What is served must be what `written` says.
fn read_all(partition: &Partition, written: &Log) -> BTreeMap<u64, Result<OwnedRecord>> {
    let mut reader = partition.reader_with(ReaderConfig { piece_bytes: 4096, ..Default::default() }).unwrap();
    let mut found = BTreeMap::new();
    let all = partition.first_offset()..partition.durable_end();
    let middle = written.first();
    let is_near = |range: Range<u64>| range.start.max(all.start)..range.end.min(all.end);
    let near = [all.start..all.start.saturating_add(NEAR), middle..middle.saturating_add(NEAR), all.end.saturating_sub(NEAR)..all.end];
    let offsets: BTreeSet<u64> = near.into_iter().flat_map(is_near).collect();
    // Downwards, so that no read goes on where the one before it ended.
    for offset in offsets.into_iter().rev() {
        let one = partition.read_one(offset);
        match (&one, reader.read(offset, 1)) {
            (Ok(one), Ok(records)) => {
                let records: Vec<OwnedRecord> = records.iter().map(Into::into).collect();
                assert_eq!(records, std::slice::from_ref(one), "the reader and read_one disagree");
            }
            (Err(one), Err(other)) => assert!(
                one.is_damage() && other.is_damage(),
                "the record {offset} may be damaged or missing, and nothing else: {one}, {other}"
            ),
            (one, other) => panic!("the reader and read_one disagree at {offset}: {one:?}, {other:?}"),
        }
        if let Ok(one) = &one {
            assert_is_written(one, written.get(offset));
        }
        found.insert(offset, one);
    }
    found
}

/// The border between key and value is not compared: the format cannot see a keylen that is wrong and not too large.
fn assert_is_written(read: &OwnedRecord, written: Option<&Stored>) {
    let body = [&read.key[..], &read.value[..]].concat();
    let written = written.map(|written| (written.offset, written.timestamp, &written.body));
    assert_eq!(Some((read.offset, read.timestamp, &body)), written, "a record that was never written");
}

/// Appends one record, which must be the next one, and gives its offset.
fn append(partition: &Partition, value: &[u8]) -> u64 {
    let next = partition.next_offset();
    let offsets = partition.append_and_wait(Batch::of(Some(b"new"), value).unwrap()).unwrap();
    assert_eq!(offsets, next..next + 1);
    next
}

/// What an opening may end with, if not well.
fn assert_named(error: &Error) {
    let named = matches!(error, Error::Damaged { .. } | Error::RecordsMissing { .. } | Error::PartitionMissing { .. } | Error::Io { .. });
    assert!(named, "no name for what is wrong with the directory: {error}");
}

/// The input, taken from its front; zeros follow its end.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn word(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    /// At most so many.
    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
