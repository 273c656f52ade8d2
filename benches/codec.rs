//! What encoding and checking records costs, apart from any I/O.
#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sapwood::{Batch, Record};

const SIZES: [usize; 4] = [100, 1_000, 10_000, 100_000];

fn fill_batch(c: &mut Criterion) {
    let mut group = c.benchmark_group("batch/push");
    for size in SIZES {
        let value = vec![7; size];
        let mut batch = Batch::with_capacity(64 * (size + 64));
        group.throughput(Throughput::Bytes(64 * u64::try_from(size).unwrap()));
        group.bench_function(BenchmarkId::from_parameter(size), |b| {
            b.iter(|| {
                batch.clear();
                for _ in 0..64 {
                    batch.push(Some(b"user-1"), black_box(&value)).unwrap();
                }
                batch.bytes()
            });
        });
    }
    group.finish();
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("record/decode");
    for size in SIZES {
        let log = record(0, &vec![7; size]);
        group.throughput(Throughput::Bytes(u64::try_from(log.len()).unwrap()));
        group.bench_function(BenchmarkId::from_parameter(size), |b| b.iter(|| Record::decode(black_box(&log), 0).unwrap().1));
    }
    group.finish();
}

/// One record in its stored form.
fn record(offset: u64, value: &[u8]) -> Vec<u8> {
    let timestamp = 1_700_000_000_000_000_000_u64;
    let mut crc = crc32fast::Hasher::new();
    crc.update(&timestamp.to_be_bytes());
    crc.update(value);
    let size = u32::try_from(value.len()).unwrap();
    let header = sapwood::Header { offset, size, crc: crc.finalize(), timestamp, keylen: 0 };
    [&header.encode()[..], value].concat()
}

criterion_group!(benches, fill_batch, decode);
criterion_main!(benches);
