//! Appends on a real file system: set `SAPWOOD_BENCH_DIR` to choose which; by default the one of the target directory.
#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sapwood::{Batch, Broker, BrokerConfig, Durability, Partition, TopicConfig};

/// A broker in a directory that goes with it, and its only partition.
struct Fixture {
    partition: Partition,
    _broker: Broker,
    _dir: tempfile::TempDir,
}

fn fixture(durability: Durability) -> Fixture {
    let parent = std::env::var_os("SAPWOOD_BENCH_DIR").unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let dir = tempfile::tempdir_in(parent).unwrap();
    let broker = Broker::open(dir.path(), BrokerConfig::default()).unwrap();
    let topic = broker.create_topic("bench", TopicConfig { durability, ..TopicConfig::default() }).unwrap();
    Fixture { partition: topic.partition(0).unwrap(), _broker: broker, _dir: dir }
}

fn append_and_wait(c: &mut Criterion) {
    for (name, durability) in [("durable", Durability::Durable), ("os", Durability::Os)] {
        let mut group = c.benchmark_group(format!("append/{name}"));
        for size in [100, 1_000, 10_000, 100_000] {
            let fixture = fixture(durability);
            let batch = Batch::of(None, &vec![7; size]).unwrap();
            group.throughput(Throughput::Bytes(batch.bytes()));
            group.bench_function(BenchmarkId::from_parameter(size), |b| {
                b.iter(|| fixture.partition.append(batch.clone()).unwrap().wait().unwrap());
            });
        }
        group.finish();
    }
}

/// 64 batches of one record queued, then all awaited: the writer packs them into few commits.
fn append_pipelined(c: &mut Criterion) {
    let mut group = c.benchmark_group("append/pipelined");
    let fixture = fixture(Durability::Durable);
    let batch = Batch::of(None, &[7; 1_000]).unwrap();
    group.throughput(Throughput::Elements(64));
    group.bench_function("64x1000", |b| {
        b.iter(|| {
            let tickets: Vec<_> = (0..64).map(|_| fixture.partition.append(batch.clone()).unwrap()).collect();
            for ticket in tickets {
                ticket.wait().unwrap();
            }
        });
    });
    group.finish();
}

criterion_group!(benches, append_and_wait, append_pipelined);
criterion_main!(benches);
