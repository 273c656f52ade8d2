//! Room and zeros ahead of the records: only where no record is.

use sapwood::io::sim::{Effect, OpKind, OpRecord, RandomFault};
use sapwood::{Batch, TopicConfig};

use crate::sim;
use crate::support::seed;

/// Writes to the log, in order.
fn log_writes(ops: &[OpRecord]) -> impl Iterator<Item = &OpRecord> {
    ops.iter().filter(|op| op.kind == OpKind::Write && op.path.extension().is_some_and(|extension| extension == "log"))
}

#[test]
fn commits_of_every_size_take_zeros_along_and_overwrite_no_record() {
    // First some commits into unwritten space are measured: 100 of nothing fill less than a block.
    for (value_bytes, pays) in [(0, false), (1000, true), (4068, true), (25_000, true), (100_000, true), (700_000, false)] {
        let config = TopicConfig { segment_bytes: 256 << 20, preallocate_bytes: 1 << 20, ..TopicConfig::default() };
        let (sim, broker, partition) = sim::create(seed(), &config);
        for _ in 0..100 {
            partition.append(Batch::of(None, &vec![7; value_bytes as usize]).unwrap()).unwrap().wait().unwrap();
        }
        drop(partition);
        broker.close().unwrap();
        let ops = sim.ops();
        let (mut records_end, mut written_end, mut zeros) = (0, 0, 0);
        for write in log_writes(&ops) {
            assert!(write.ok && write.durable, "{write:?}");
            assert_eq!(write.position, records_end / 4096 * 4096, "each goes on in the block in which the last one ended");
            records_end += value_bytes + 28;
            let end = write.position + write.len;
            let blocks_end = records_end.next_multiple_of(4096);
            assert!(end >= blocks_end, "{write:?} does not hold the record up to {records_end}");
            assert!(end == blocks_end || end > written_end, "zeros into space that was written: {write:?}");
            assert!(end <= records_end.next_multiple_of(4096) + (1 << 20), "{write:?}");
            written_end = written_end.max(end);
            zeros += end - blocks_end;
        }
        assert_eq!(zeros > 0, pays, "{zeros} zeros behind records of {value_bytes} bytes");
        assert_eq!(records_end, 100 * (value_bytes + 28));
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
        drop(partition.append(Batch::of(None, b"meanwhile").unwrap()).unwrap());
    }
    partition.sync().unwrap();
    let read = |offset| partition.read_one(offset).unwrap().value;
    assert_eq!([read(0), read(1), read(5000)], ["before", "meanwhile", "meanwhile"].map(bytes::Bytes::from));
    sim.clear_faults();
    drop(partition);
    broker.close().unwrap();
    sim::assert_closed(&sim, 1);
}
