//! Faults that a review of the first version found, each with its kind.

use std::fs;

use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::{Batch, Durability, Partition, Result, TopicConfig};

use crate::sim::{self, EIO, ENOSPC, assert_closed, create, open, tiny};
use crate::support::{TOPIC, each_backend, partition_of, scratch, seed, small};

const EMFILE: i32 = 24;

fn append(partition: &Partition, bytes: usize) -> Result<u64> {
    Ok(partition.append(Batch::of(None, &vec![7; bytes - 28])?)?.wait()?.start)
}

/// A roll that is refused leaves nothing that a power loss could bring back in the way of the records after it.
#[test]
fn a_refused_roll_never_stands_in_the_way_of_opening() {
    let faults = [(OpKind::Create, ".log", ENOSPC), (OpKind::Create, ".log", EMFILE), (OpKind::SyncDir, "/0", ENOSPC)];
    let (mut refused, mut failed) = (0, 0);
    for (kind, path, errno) in faults {
        for removal_fails in [false, true] {
            let first = seed();
            for seed in (0..40).map(|number| first.wrapping_add(number)) {
                let (sim, broker, partition) = create(seed, &tiny(1000));
                append(&partition, 600).unwrap();
                sim.fail(Fault::next(kind, Effect::Error(errno)).path(path));
                if removal_fails {
                    sim.fail(Fault::next(OpKind::RemoveFile, Effect::Error(ENOSPC)).path(".log"));
                }
                let error = append(&partition, 600).unwrap_err();
                let small = append(&partition, 50);
                if error.is_failed() {
                    failed += 1;
                    assert!(small.is_err());
                } else {
                    refused += 1;
                    assert_eq!(error.is_disk_full(), errno == ENOSPC, "{error}");
                    assert_eq!(small.as_ref().ok(), Some(&1), "what fits still fits");
                }
                sim.power_loss();
                drop((partition, broker));
                let broker = open(&sim);
                let partition = partition_of(&broker);
                assert!(partition.next_offset() > u64::from(small.is_ok()), "seed {seed}: {error}");
                append(&partition, 600).unwrap();
                drop(partition);
                broker.close().unwrap();
                assert_closed(&sim, 1);
            }
        }
    }
    assert!(refused > 0 && failed > 0, "{refused} refused, {failed} failed");
}

/// After a failed sync the page cache holds what the device does not. Opening again must not take it for durable.
#[test]
fn what_a_failed_sync_lost_is_not_served_after_opening_again() {
    for durability in [Durability::Os, Durability::Interval { bytes: 1 << 20, time: std::time::Duration::from_secs(3600) }] {
        let (sim, broker, partition) = create(seed(), &TopicConfig { durability, ..tiny(1000) });
        append(&partition, 60).unwrap();
        sim.fail(Fault::next(OpKind::Sync, Effect::Error(EIO)).path(".log"));
        assert!(partition.sync().unwrap_err().is_failed());
        drop(partition);
        assert!(broker.close().is_err());
        let broker = open(&sim);
        let partition = partition_of(&broker);
        let served = partition.durable_end();
        partition.sync().unwrap();
        append(&partition, 990).unwrap();
        partition.sync().unwrap();
        sim.power_loss_keeping_nothing();
        drop((partition, broker));
        let broker = open(&sim);
        let partition = partition_of(&broker);
        assert_eq!(partition.next_offset(), served + 1);
        for offset in 0..partition.next_offset() {
            assert_eq!(partition.read_one(offset).unwrap().offset, offset, "what was served is there, without a hole");
        }
    }
}

/// Index files hold nothing of their own: where they cannot be read, made or written, everything else goes on.
#[test]
fn indexes_that_cannot_be_had_stop_neither_opening_nor_appending() {
    let damages: [fn(&SimDisk); 3] = [
        |sim| {
            for extension in ["index", "timeindex"] {
                sim.overwrite(&sim::dir().join(format!("00000000000000000030.{extension}")), 0, &[0xff; 16]);
            }
            // What a checkpoint vouches for is not looked at.
            sim.overwrite(&sim::dir().join("checkpoint"), 0, &[0; 8192]);
        },
        |_| {},
        |_| {},
    ];
    for (number, damage) in damages.iter().enumerate() {
        for kind in [OpKind::Create, OpKind::Write, OpKind::Open, OpKind::Read] {
            for suffix in [".index", ".timeindex"] {
                let (sim, broker, partition) = create(seed(), &tiny(1000));
                for _ in 0..40 {
                    append(&partition, 100).unwrap();
                }
                drop(partition);
                broker.close().unwrap();
                damage(&sim);
                let chance = if number == 2 { 500_000 } else { 1_000_000 };
                let on = sapwood::io::sim::RandomFault {
                    on: kind,
                    path_suffix: Some(suffix.to_owned()),
                    per_million: chance,
                    effect: Effect::Error(if kind == OpKind::Read { EIO } else { ENOSPC }),
                };
                sim.fail_by_chance(on);
                let broker = open(&sim);
                let partition = partition_of(&broker);
                assert_eq!(append(&partition, 100).unwrap(), 40);
                for offset in 0..41 {
                    assert_eq!(partition.read_one(offset).unwrap().offset, offset, "{kind:?} {suffix}");
                }
                sim.clear_faults();
                for _ in 0..40 {
                    append(&partition, 100).unwrap();
                }
                drop(partition);
                broker.close().unwrap();
                // Whatever was put off is made up for by the next opening at the latest.
                open(&sim).close().unwrap();
                assert_eq!(assert_closed(&sim, 1).next_offset, 81, "{kind:?} {suffix}");
            }
        }
    }
}

/// Other people's directories are neither taken over, nor in the way, nor removed.
#[test]
fn what_only_looks_like_ours_is_left_alone() {
    each_backend(|backend| {
        let data = scratch();
        for file in ["photos/2024/a.jpg", "backup/0/x", ".new-photos/2024/a.jpg", ".del-x/notes.txt", "numbers/4294967295/y"] {
            let path = data.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, b"theirs").unwrap();
        }
        let before = tree(data.path());
        let broker = crate::support::open(data.path(), backend, &small());
        assert!(broker.topics().is_empty());
        assert_eq!(broker.report().ignored.len(), 5, "{:?}", broker.report());
        assert!(broker.report().removed.is_empty());
        for name in ["photos", "backup"] {
            assert!(broker.create_topic(name, TopicConfig::default()).is_err(), "{name}");
        }
        broker.create_topic(TOPIC, small()).unwrap();
        broker.produce(TOPIC, None, b"v").unwrap();
        broker.close().unwrap();
        let after = tree(data.path());
        assert!(before.iter().all(|path| after.contains(path)));
        // A directory of ours with one of theirs in it, whose number is no partition's.
        fs::create_dir_all(data.path().join(TOPIC).join("4294967295")).unwrap();
        let broker = crate::support::open(data.path(), backend, &small());
        assert_eq!(broker.num_partitions(TOPIC).unwrap(), 1);
        broker.produce(TOPIC, None, b"v").unwrap();
    });
}

/// All files below a directory but the lock.
fn tree(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        } else {
            found.push(path);
        }
    }
    found
}
