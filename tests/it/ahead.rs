//! Room and zeros ahead of the records: only where no record is, and always as the device wants them.

use sapwood::io::sim::{Effect, OpKind, OpRecord, RandomFault};
use sapwood::{Batch, TopicConfig};

use crate::sim;
use crate::support::seed;

/// Writes to the log, in order.
fn log_writes(ops: &[OpRecord]) -> impl Iterator<Item = &OpRecord> {
    ops.iter().filter(|op| op.kind == OpKind::Write && op.path.extension().is_some_and(|extension| extension == "log"))
}

#[test]
fn zeros_are_written_ahead_of_commits_of_every_size_and_never_over_them() {
    // First some commits into unwritten space are measured: 100 of nothing fill less than a block.
    for (value_bytes, pays) in [(0, false), (1000, true), (4068, true), (25_000, true), (100_000, true), (700_000, false)] {
        let config = TopicConfig { segment_bytes: 256 << 20, preallocate_bytes: 1 << 20, ..TopicConfig::default() };
        let (sim, broker, partition) = sim::create(seed(), &config);
        for _ in 0..100 {
            partition.append(Batch::of(None, &vec![7; value_bytes as usize]).unwrap()).unwrap().wait().unwrap();
        }
        let written_end = partition.next_offset() * (value_bytes + 28);
        drop(partition);
        // Closing waits for what is written beside the commits.
        broker.close().unwrap();
        let ops = sim.ops();
        let (mut records_end, mut zeros) = (0, 0);
        for write in log_writes(&ops) {
            assert!(write.ok, "refused: {write:?}");
            if write.durable {
                records_end = records_end.max(write.position + write.len);
            } else {
                assert!(write.position >= records_end, "zeros over records: {write:?}");
                zeros += write.len;
            }
        }
        assert_eq!(zeros > 0, pays, "{zeros} zeros ahead of records of {value_bytes} bytes");
        assert!(records_end >= written_end, "{records_end} of {written_end} bytes");
        sim::assert_closed(&sim, 1);
    }
}

#[test]
fn index_entries_that_cannot_be_written_cost_no_append_and_no_look_up() {
    let (sim, broker, partition) = sim::create(seed(), &TopicConfig::default());
    partition.append(Batch::of(None, b"before").unwrap()).unwrap().wait().unwrap();
    for path_suffix in [".index", ".timeindex"] {
        let path_suffix = Some(path_suffix.to_owned());
        sim.fail_by_chance(RandomFault { on: OpKind::Write, path_suffix, per_million: 1_000_000, effect: Effect::Error(sim::EIO) });
    }
    for _ in 0..5000 {
        let _ = partition.append(Batch::of(None, b"meanwhile").unwrap()).unwrap();
    }
    partition.sync().unwrap();
    let read = |offset| partition.read_one(offset).unwrap().value;
    assert_eq!([read(0), read(1), read(5000)], ["before", "meanwhile", "meanwhile"].map(bytes::Bytes::from));
    sim.clear_faults();
    drop(partition);
    broker.close().unwrap();
    sim::assert_closed(&sim, 1);
}
