//! What the tests share: scratch directories, backends, seeds, clocks, and reading a partition whole.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime};

use sapwood::clock::Clock;
use sapwood::{
    Backend, Batch, Broker, BrokerConfig, OwnedRecord, Partition, PartitionReport, Pinning, ReaderConfig, TopicConfig, Visibility, Writers,
};
use tempfile::TempDir;

use crate::format::{self, Content};
use crate::oracle::Found;

/// The topic that most tests use.
pub const TOPIC: &str = "t";

/// What carries the hot path: io_uring where this machine grants it, and plain system calls.
pub const BACKENDS: [Backend; 2] = [Backend::Auto, Backend::Posix];

/// Runs a test once per backend.
pub fn each_backend(test: impl Fn(Backend)) {
    for backend in BACKENDS {
        eprintln!("backend {backend:?}");
        test(backend);
    }
}

/// A directory of this test's own, in SAPWOOD_TEST_DIR, or else on the disk that holds the build.
pub fn scratch() -> TempDir {
    let home = std::env::var_os("SAPWOOD_TEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    fs::create_dir_all(&home).unwrap();
    tempfile::Builder::new().prefix("it-").tempdir_in(home).unwrap()
}

/// Settings that allocate little.
pub fn small() -> TopicConfig {
    TopicConfig { preallocate_bytes: 64 << 10, ..TopicConfig::default() }
}

pub fn segments_of(segment_bytes: u64) -> TopicConfig {
    TopicConfig { segment_bytes, ..small() }
}

/// A broker's settings, with those that topics without stored ones get.
pub fn config(backend: Backend, fallback: TopicConfig) -> BrokerConfig {
    BrokerConfig { backend, pinning: Pinning::None, writers: writers(), fallback, ..BrokerConfig::default() }
}

/// A thread for each partition, or so many for all as SAPWOOD_TEST_WRITERS says: the suite holds for both.
fn writers() -> Writers {
    match std::env::var("SAPWOOD_TEST_WRITERS") {
        Ok(threads) => Writers::Shared(threads.parse().expect("SAPWOOD_TEST_WRITERS is a number")),
        Err(_) => Writers::PerPartition,
    }
}

/// Opens a data directory for topics of that kind.
#[track_caller]
pub fn open(data: &Path, backend: Backend, fallback: &TopicConfig) -> Broker {
    Broker::open(data, config(backend, fallback.clone())).unwrap()
}

/// Opens a data directory and makes the topic [`TOPIC`] in it.
#[track_caller]
pub fn create(data: &Path, backend: Backend, topic: &TopicConfig) -> (Broker, Partition) {
    let broker = open(data, backend, topic);
    let partition = broker.create_topic(TOPIC, topic.clone()).unwrap().partition(0).unwrap();
    (broker, partition)
}

/// Partition 0 of [`TOPIC`].
#[track_caller]
pub fn partition_of(broker: &Broker) -> Partition {
    broker.topic(TOPIC).unwrap().partition(0).unwrap()
}

/// What opening found in partition 0 of [`TOPIC`].
#[track_caller]
pub fn report_of(broker: &Broker) -> PartitionReport {
    broker.report().partitions.iter().find(|report| report.topic == TOPIC && report.partition == 0).unwrap().clone()
}

/// The directory of partition 0 of [`TOPIC`].
pub fn partition_dir(data: &Path) -> PathBuf {
    data.join(TOPIC).join("0")
}

/// Appends one record and waits for its offset.
#[track_caller]
pub fn append(partition: &Partition, key: &[u8], value: &[u8]) -> u64 {
    let offsets = partition.append(Batch::of(Some(key), value).unwrap()).unwrap().wait().unwrap();
    assert_eq!(offsets.end - offsets.start, 1);
    offsets.start
}

/// A batch of such records.
pub fn batch<K: AsRef<[u8]>, V: AsRef<[u8]>>(records: &[(K, V)]) -> Batch {
    let mut batch = Batch::new();
    for (key, value) in records {
        batch.push(Some(key.as_ref()), value.as_ref()).unwrap();
    }
    batch
}

/// A record, owned and comparable.
#[derive(Clone, PartialEq, Eq)]
pub struct Row {
    pub offset: u64,
    pub timestamp: u64,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let short = |bytes: &[u8]| format!("{}[{}]", bytes[..bytes.len().min(24)].escape_ascii(), bytes.len());
        write!(f, "{} t={} {} = {}", self.offset, self.timestamp, short(&self.key), short(&self.value))
    }
}

impl From<&Found> for Row {
    fn from(found: &Found) -> Self {
        let Found { offset, timestamp, key, value, .. } = found.clone();
        Self { offset, timestamp, key, value }
    }
}

impl From<sapwood::Record<'_>> for Row {
    fn from(record: sapwood::Record<'_>) -> Self {
        Self { offset: record.offset, timestamp: record.timestamp, key: record.key.to_vec(), value: record.value.to_vec() }
    }
}

impl From<OwnedRecord> for Row {
    fn from(record: OwnedRecord) -> Self {
        Self { offset: record.offset, timestamp: record.timestamp, key: record.key.to_vec(), value: record.value.to_vec() }
    }
}

/// What the oracle found, as rows.
pub fn rows(found: &[Found]) -> Vec<Row> {
    found.iter().map(Row::from).collect()
}

/// What was written by the tests' own writer, as rows.
pub fn rows_of(contents: &[Content], base: u64) -> Vec<Row> {
    (base..)
        .zip(contents.iter().cloned())
        .map(|(offset, Content { key, value, timestamp })| Row { offset, timestamp, key, value })
        .collect()
}

/// Reads from `offset` to the end, `max_bytes` at a time, up to where `up_to` allows.
#[track_caller]
pub fn read_up_to(partition: &Partition, up_to: Visibility, mut offset: u64, max_bytes: usize) -> Vec<Row> {
    let mut reader = partition.reader_with(ReaderConfig { piece_bytes: 1 << 20, ..ReaderConfig::up_to(up_to) }).unwrap();
    let mut rows = Vec::new();
    loop {
        let records = reader.read(offset, max_bytes).unwrap();
        if records.is_empty() {
            assert_eq!(records.next_offset(), offset);
            return rows;
        }
        rows.extend(records.iter().map(Row::from));
        assert_eq!(records.next_offset(), rows.last().unwrap().offset + 1);
        offset = records.next_offset();
    }
}

/// Every durable record.
#[track_caller]
pub fn read_all(partition: &Partition) -> Vec<Row> {
    read_up_to(partition, Visibility::Durable, partition.first_offset(), 256 << 10)
}

/// Keys and values only, where timestamps are the machine's.
pub fn contents(rows: &[Row]) -> Vec<(Vec<u8>, Vec<u8>)> {
    rows.iter().map(|row| (row.key.clone(), row.value.clone())).collect()
}

/// Offsets start at `first` and have no gap; timestamps never go back.
#[track_caller]
pub fn assert_in_order(rows: &[Row], first: u64) {
    for (offset, row) in (first..).zip(rows) {
        assert_eq!(row.offset, offset);
    }
    assert!(rows.is_sorted_by_key(|row| row.timestamp), "a timestamp goes back");
}

/// A partition written by another hand, by its name in tests/fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Copies all files of a directory into a new one. It may be in use.
pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &to.join(entry.file_name()));
        } else {
            unless_gone(&entry.path(), fs::copy(entry.path(), to.join(entry.file_name())));
        }
    }
}

/// A data directory of its own that holds the fixture as partition 0 of [`TOPIC`].
pub fn data_with(name: &str) -> (TempDir, PathBuf) {
    let data = scratch();
    let partition = partition_dir(data.path());
    copy_dir(&fixture(name), &partition);
    (data, partition)
}

/// The same with demo records written by the tests' own writer.
pub fn data_with_demo(records: u64, layout: format::Layout) -> (TempDir, PathBuf) {
    let data = scratch();
    let partition = partition_dir(data.path());
    format::write_partition(&partition, &format::demo(records), layout);
    (data, partition)
}

/// All that a directory holds, with the times of the last changes.
pub fn snapshot(dir: &Path) -> BTreeMap<PathBuf, (Option<Vec<u8>>, SystemTime)> {
    let mut all = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        let Some(meta) = unless_gone(&path, fs::symlink_metadata(&path)) else { continue };
        if meta.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let bytes = if meta.is_file() { unless_gone(&path, fs::read(&path)) } else { None };
        if bytes.is_some() || !meta.is_file() {
            all.insert(path, (bytes, meta.modified().unwrap()));
        }
    }
    all
}

/// Nothing where the file has been renamed or removed meanwhile, as upkeep's temporary ones are.
#[track_caller]
fn unless_gone<T>(path: &Path, found: std::io::Result<T>) -> Option<T> {
    match found {
        Ok(found) => Some(found),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

/// The bytes of all files, times aside.
pub fn bytes_in(dir: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    snapshot(dir).into_iter().map(|(path, (bytes, _))| (path, bytes)).collect()
}

/// Random numbers, reproducible (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn one_of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize].clone()
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend(self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

/// The seed of a random test: SAPWOOD_SEED, or a new one. Printed, so that a failure can be had again.
pub fn seed() -> u64 {
    let seed = match std::env::var("SAPWOOD_SEED") {
        Ok(text) => text.parse().expect("SAPWOOD_SEED is a number"),
        Err(_) => RandomState::new().hash_one(SystemTime::now()),
    };
    eprintln!("SAPWOOD_SEED={seed}");
    seed
}

/// A clock that tests hold in their hands. Its wall clock says what it was told to, may be held back, and may panic.
#[derive(Debug)]
pub struct TestClock {
    start: Instant,
    passed: Mutex<Duration>,
    wall: AtomicU64,
    step: AtomicU64,
    panics: AtomicBool,
    held: Mutex<bool>,
    released: Condvar,
}

impl TestClock {
    pub fn at(wall: u64) -> Self {
        Self {
            start: Instant::now(),
            passed: Mutex::default(),
            wall: AtomicU64::new(wall),
            step: AtomicU64::new(0),
            panics: AtomicBool::new(false),
            held: Mutex::new(false),
            released: Condvar::new(),
        }
    }

    pub fn set(&self, wall: u64) {
        self.wall.store(wall, Ordering::SeqCst);
    }

    /// Lets so much time pass, on both clocks. Threads that wait for a time do not notice.
    pub fn pass(&self, time: Duration) {
        *self.passed.lock().unwrap() += time;
        self.wall.fetch_add(time.as_nanos() as u64, Ordering::SeqCst);
    }

    /// How far the wall clock moves each time it is asked.
    pub fn step_by(&self, step: u64) {
        self.step.store(step, Ordering::SeqCst);
    }

    /// From now on whoever asks for the wall clock waits for [`Self::release`].
    pub fn hold(&self) {
        *self.held.lock().unwrap() = true;
    }

    pub fn release(&self) {
        *self.held.lock().unwrap() = false;
        self.released.notify_all();
    }

    /// From now on whoever asks for the wall clock panics.
    pub fn panic_from_now(&self) {
        self.panics.store(true, Ordering::SeqCst);
    }
}

impl Clock for TestClock {
    fn wall_ns(&self) -> u64 {
        assert!(!self.panics.load(Ordering::SeqCst), "the test's clock panics, as it was told to");
        drop(self.released.wait_while(self.held.lock().unwrap(), |held| *held).unwrap());
        self.wall.fetch_add(self.step.load(Ordering::SeqCst), Ordering::SeqCst)
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed() + *self.passed.lock().unwrap()
    }
}
