//! Reading from the page cache: look-ups, decoding, scans, each beside what the same bytes cost without an engine. `SAPWOOD_BENCH_DIR` chooses
//! the file system; by default it is the one of the target directory.
//!
//! To see what a change does. How far reading is from what it cannot do without is told by the scenarios (perf/README.md), where both
//! sides take turns, also on larger logs and from the disk.
#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

#[path = "scenarios/reads.rs"]
#[allow(dead_code, reason = "the scenarios use the rest of it")]
mod reads;

use std::hint::black_box;
use std::path::PathBuf;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sapwood::{Batch, Broker, BrokerConfig, Partition, Reader, Record, TopicConfig};

use reads::{Blocks, Random, Scan};

const SEGMENT_BYTES: u64 = 16 << 20;
/// Sizes of values, and over how many bytes the checksums beside them are: with its header a record of 100 bytes has 128, in larger ones a
/// checksum's beginning and end count for little.
const SIZES: [(usize, usize); 2] = [(1_000, 0), (100, 128)];

/// A broker in a directory that goes with it, and its only partition: sealed segments that are in the page cache, and an active one.
struct Fixture {
    partition: Partition,
    /// Records of the first segment, and of all sealed ones.
    records: u64,
    sealed: u64,
    _broker: Broker,
    _dir: tempfile::TempDir,
}

impl Fixture {
    fn new(segments: u64, segment_bytes: u64, value_bytes: usize, index_interval: u32) -> Self {
        let parent = std::env::var_os("SAPWOOD_BENCH_DIR").unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
        let dir = tempfile::tempdir_in(parent).unwrap();
        let broker = Broker::open(dir.path(), BrokerConfig::default()).unwrap();
        let topic = broker.create_topic("bench", TopicConfig { segment_bytes, index_interval, ..TopicConfig::default() }).unwrap();
        let partition = topic.partition(0).unwrap();
        let mut batch = Batch::new();
        for _ in 0..100 {
            batch.push(None, &vec![7; value_bytes]).unwrap();
        }
        let append_while = |more: &dyn Fn() -> bool| {
            while more() {
                partition.append_and_wait(batch.clone()).unwrap();
            }
        };
        append_while(&|| partition.stats().rolls < segments);
        let mut bases = Vec::new();
        for entry in std::fs::read_dir(partition.path()).unwrap() {
            let path = entry.unwrap().path();
            // Names of other kinds come and go.
            let base = |path: &PathBuf| path.file_name()?.to_str()?.strip_suffix(".log")?.parse::<u64>().ok();
            if let Some(base) = base(&path) {
                bases.push(base);
                for extension in ["log", "index", "timeindex"] {
                    std::fs::read(path.with_extension(extension)).unwrap();
                }
            }
        }
        bases.sort_unstable();
        let (records, sealed) = (bases[1], bases[bases.len() - 1]);
        // Enough behind them that nothing of them is in the engine's memory any more.
        let filled = partition.stats().bytes;
        append_while(&|| partition.stats().bytes < filled + (8 << 20));
        Self { partition, records, sealed, _broker: broker, _dir: dir }
    }

    /// The first segment's log.
    fn log(&self) -> PathBuf {
        self.partition.path().join(format!("{:020}.log", 0))
    }

    fn log_bytes(&self, value_bytes: usize) -> u64 {
        self.records * u64::try_from(value_bytes + sapwood::HEADER_BYTES).unwrap()
    }
}

/// A batch of records that is in memory: with checksums, as a reader does it, and gone through once more, as its user does.
fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("read/decode");
    for (size, checksum) in SIZES {
        let fixture = Fixture::new(1, SEGMENT_BYTES, size, 1);
        let bytes = std::fs::read(fixture.log()).unwrap();
        let bytes = &bytes[..(128 << 10) / (size + sapwood::HEADER_BYTES) * (size + sapwood::HEADER_BYTES)];
        group.throughput(Throughput::Bytes(u64::try_from(bytes.len()).unwrap()));
        group.bench_function(BenchmarkId::new("checked", size), |b| {
            b.iter(|| {
                let (mut rest, mut offset) = (black_box(bytes), 0);
                while !rest.is_empty() {
                    rest = &rest[Record::decode(rest, offset).unwrap().1..];
                    offset += 1;
                }
                offset
            });
        });
        let mut reader = fixture.partition.reader().unwrap();
        let records = reader.read(0, bytes.len()).unwrap();
        assert_eq!(records.bytes(), bytes.len());
        group.bench_function(BenchmarkId::new("gone-through", size), |b| {
            b.iter(|| black_box(&records).iter().map(|record| record.value.len()).sum::<usize>());
        });
        let checksum = if checksum == 0 { bytes.len() } else { checksum };
        group.bench_function(BenchmarkId::new("floor-crc", size), |b| {
            b.iter(|| black_box(bytes).chunks(checksum).fold(0, |sum, chunk| sum ^ crc32fast::hash(chunk)));
        });
    }
    group.finish();
}

fn scan(c: &mut Criterion) {
    let mut group = c.benchmark_group("read/scan");
    for (size, checksum) in SIZES {
        let fixture = Fixture::new(1, SEGMENT_BYTES, size, 1);
        group.throughput(Throughput::Bytes(fixture.log_bytes(size)));
        let mut reader = fixture.partition.reader().unwrap();
        group.bench_function(BenchmarkId::new("reader", size), |b| b.iter(|| read_all(&mut reader, fixture.records)));
        let mut floor = Scan::prepare(&fixture.log(), fixture.log_bytes(size), checksum).unwrap();
        group.bench_function(BenchmarkId::new("floor-pread-crc", size), |b| b.iter(|| floor.pass().unwrap()));
    }
    group.finish();
}

fn look_up(c: &mut Criterion) {
    let mut group = c.benchmark_group("read/look-up");
    for interval in [1, 16, 4096] {
        let fixture = Fixture::new(1, SEGMENT_BYTES, 1_000, interval);
        let mut reader = fixture.partition.reader().unwrap();
        let mut random = Random(1);
        group.bench_function(BenchmarkId::new("interval", interval), |b| {
            b.iter(|| reader.read_one(random.below(fixture.records)).unwrap().value.len());
        });
        if interval == 1 {
            let mut floor = Blocks::open(&fixture.log(), fixture.log_bytes(1_000), false).unwrap();
            group.bench_function("floor-pread-4KiB", |b| b.iter(|| floor.read().unwrap()));
        }
    }
    group.finish();
}

/// In 100 segments, beside single records by their offsets.
fn look_up_time(c: &mut Criterion) {
    let mut group = c.benchmark_group("read/look-up-time");
    let fixture = Fixture::new(100, 1 << 20, 1_000, 1);
    let mut reader = fixture.partition.reader().unwrap();
    let mut timestamp = |offset| reader.read_one(offset).unwrap().timestamp;
    let (first, last) = (timestamp(0), timestamp(fixture.sealed - 1));
    let mut random = Random(1);
    group.bench_function("100-segments", |b| {
        b.iter(|| reader.offset_for_time(first + random.below(last - first + 1)).unwrap());
    });
    group.bench_function("point-read", |b| b.iter(|| reader.read_one(random.below(fixture.sealed)).unwrap().value.len()));
    group.finish();
}

/// Bytes of values up to the record before `end`.
fn read_all(reader: &mut Reader, end: u64) -> usize {
    let (mut next, mut bytes) = (0, 0);
    while next < end {
        let records = reader.read(next, 1 << 20).unwrap();
        bytes += records.iter().map(|record| record.value.len()).sum::<usize>();
        next = records.next_offset();
    }
    bytes
}

criterion_group!(benches, decode, scan, look_up, look_up_time);
criterion_main!(benches);
