//! Random histories against a plain list of what was appended: batches, sizes, segments, reads, reopening, on both backends.

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestCaseError, TestRng, TestRunner};
use sapwood::{Batch, Durability, TopicConfig, Visibility};

use crate::format::segment_bases;
use crate::oracle::{Found, assert_closed, assert_sound};
use crate::support::{BACKENDS, Rng, Row, TOPIC, config, contents, partition_dir, partition_of, read_up_to, scratch, seed, small};

#[derive(Clone, Debug)]
enum Step {
    /// Batches queued together; key and value lengths of each record.
    Append(Vec<Vec<(usize, usize)>>),
    /// From that part of the log on, in bytes per read.
    Read {
        from: f64,
        max_bytes: usize,
    },
    Sync,
    Reopen {
        close: bool,
        backend: usize,
    },
}

#[derive(Clone, Debug)]
struct History {
    topic: TopicConfig,
    seed: u64,
    steps: Vec<Step>,
}

fn record() -> impl Strategy<Value = (usize, usize)> {
    prop_oneof![
        8 => (0..20usize, 0..200usize),
        2 => (Just(0usize), 0..2usize),
        2 => (0..4usize, 4000..4200usize),
        1 => (0..300usize, 10_000..70_000usize),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let batch = prop::collection::vec(record(), 1..12);
    prop_oneof![
        6 => prop::collection::vec(batch, 1..8).prop_map(Step::Append),
        3 => (0.0..1.0, prop_oneof![0..200usize, 200..100_000usize]).prop_map(|(from, max_bytes)| Step::Read { from, max_bytes }),
        1 => Just(Step::Sync),
        2 => (any::<bool>(), 0..2usize).prop_map(|(close, backend)| Step::Reopen { close, backend }),
    ]
}

fn history() -> impl Strategy<Value = History> {
    let durability = prop_oneof![
        3 => Just(Durability::Durable),
        1 => Just(Durability::Os),
        1 => Just(Durability::Interval { bytes: 10_000, time: std::time::Duration::from_secs(3600) }),
    ];
    let topic = (
        prop_oneof![Just(1), Just(28), Just(270), 100..10_000u64, Just(65_536), Just(1 << 30)],
        prop_oneof![Just(4096u64), Just(8192), Just(65_536)],
        prop_oneof![Just(1u32), Just(2), Just(7), Just(4096)],
        prop_oneof![Just(4096u64), 4096..20_000u64, Just(1 << 20)],
        durability,
    )
        .prop_map(|(segment_bytes, preallocate_bytes, index_interval, commit_bytes, durability)| TopicConfig {
            segment_bytes,
            preallocate_bytes,
            index_interval,
            commit_bytes,
            durability,
            ..small()
        });
    (topic, any::<u64>(), prop::collection::vec(step(), 1..12)).prop_map(|(topic, seed, steps)| History { topic, seed, steps })
}

fn run(history: &History) {
    let data = scratch();
    let dir = partition_dir(data.path());
    let mut rng = Rng::new(history.seed);
    let mut model: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    let mut known: Vec<Row> = Vec::new();
    let mut broker = sapwood::Broker::open(data.path(), config(BACKENDS[0], small())).unwrap();
    broker.create_topic(TOPIC, history.topic.clone()).unwrap();
    let interval = history.topic.index_interval.into();

    for step in history.steps.iter().chain(&[Step::Reopen { close: true, backend: 0 }]) {
        let partition = partition_of(&broker);
        match step {
            Step::Append(batches) => {
                let mut tickets = Vec::new();
                for sizes in batches {
                    let mut batch = Batch::new();
                    let first = model.len() as u64;
                    for &(key, value) in sizes {
                        let (key, value) = (rng.bytes(key), rng.bytes(value));
                        batch.push(Some(&key), &value).unwrap();
                        model.push((key, value));
                    }
                    tickets.push((first..model.len() as u64, partition.append(batch).unwrap()));
                }
                for (expected, ticket) in tickets {
                    assert_eq!(ticket.wait().unwrap(), expected);
                }
                assert_eq!(partition.next_offset(), model.len() as u64);
            }
            Step::Read { from, max_bytes } => {
                let from = (model.len() as f64 * from) as u64;
                let rows = read_up_to(&partition, Visibility::Appended, from, *max_bytes);
                assert!(contents(&rows) == model[from as usize..], "read from {from}");
                let durable = read_up_to(&partition, Visibility::Durable, 0, 1 << 20);
                assert!(durable.len() as u64 <= partition.durable_end());
                assert!(contents(&durable) == model[..durable.len()]);
            }
            Step::Sync => {
                partition.sync().unwrap();
                assert_eq!(partition.durable_end(), model.len() as u64);
            }
            Step::Reopen { close, backend } => {
                let rows = read_up_to(&partition, Visibility::Appended, 0, 1 << 20);
                assert!(contents(&rows) == model);
                assert!(rows[..known.len()] == known, "a timestamp changed");
                known = rows;
                drop(partition);
                if *close {
                    broker.close().unwrap()
                } else {
                    drop(broker)
                }
                let report = if *close { assert_closed(&dir, interval) } else { assert_sound(&dir) };
                assert!(report.records.iter().map(Row::from).eq(known.iter().cloned()));
                let bases: Vec<_> = report.segments.iter().map(|segment| segment.base).collect();
                assert_eq!(bases, segment_bases(report.records.iter().map(Found::bytes), history.topic.segment_bytes, 0));
                broker = sapwood::Broker::open(data.path(), config(BACKENDS[*backend], small())).unwrap();
            }
        }
    }
    assert!(contents(&read_up_to(&partition_of(&broker), Visibility::Durable, 0, 1 << 20)) == model);
}

#[test]
fn a_partition_is_a_list() {
    let seed = seed();
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let settings = ProptestConfig { cases: 40, failure_persistence: None, max_shrink_iters: 200, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(settings, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let outcome = runner.run(&history(), |history| {
        run(&history);
        Ok::<(), TestCaseError>(())
    });
    if let Err(failure) = outcome {
        panic!("SAPWOOD_SEED={seed}: {failure}");
    }
}
