//! Rolling into a segment that was made ahead: what was acknowledged survives whatever comes between its steps, and where it
//! cannot be made ahead, it is made when it is needed. And the end of the log, which is read from memory.

use std::path::Path;
use std::time::Duration;

use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::{Batch, Durability, Error, Partition, ReaderConfig, Ticket, TopicConfig, Visibility};

use crate::format::segment_path;
use crate::sim::{self, EIO, ENOSPC, assert_closed, assert_sound, create, names, prepared_is_ready, try_open, until};
use crate::support::{TOPIC, assert_in_order, contents, each_backend, partition_dir, partition_of, read_all, scratch, seed};

const SEGMENT: u64 = 1 << 20;

/// Segments that are large enough to be made ahead, each for five records of [`record`].
fn ahead() -> TopicConfig {
    TopicConfig { segment_bytes: SEGMENT, preallocate_bytes: SEGMENT, ..TopicConfig::default() }
}

fn record(number: u64) -> (Vec<u8>, Vec<u8>) {
    let mut value = number.to_be_bytes().to_vec();
    value.resize(200_000, number.to_le_bytes()[0]);
    (b"k".to_vec(), value)
}

fn send(partition: &Partition, number: u64) -> sapwood::Result<Ticket> {
    let (key, value) = record(number);
    partition.append(Batch::of(Some(&key), &value)?)
}

fn append(partition: &Partition, number: u64) -> sapwood::Result<u64> {
    Ok(send(partition, number)?.wait()?.start)
}

/// The records that the disk holds after a crash of some kind are a beginning of what was submitted, and hold what was
/// acknowledged.
#[track_caller]
fn assert_kept(sim: &SimDisk, acknowledged: u64, what: &str) {
    let broker = try_open(sim, &ahead()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let rows = read_all(&partition_of(&broker));
    assert_in_order(&rows, 0);
    assert!(rows.len() as u64 >= acknowledged, "{what}: {} of {acknowledged} acknowledged records", rows.len());
    let expected: Vec<_> = (0..rows.len() as u64).map(record).collect();
    assert!(contents(&rows) == expected, "{what}: other records");
    assert!(broker.report().partitions.iter().all(|report| report.damage.is_empty()), "{what}");
    assert_sound(sim);
    assert!(!names(sim).iter().any(|name| name.starts_with("prepared")), "{what}: {:?}", names(sim));
    broker.close().unwrap();
    assert_closed(sim, 1);
}

#[test]
fn segments_are_made_ahead_and_take_their_place() {
    for durability in [Durability::Durable, Durability::Os, Durability::Interval { bytes: 300_000, time: Duration::from_secs(3600) }] {
        let (sim, broker, partition) = create(seed(), &TopicConfig { durability, ..ahead() });
        for number in 0..23 {
            assert_eq!(append(&partition, number).unwrap(), number);
        }
        partition.sync().unwrap();
        assert_eq!(partition.durable_end(), 23);
        let ops = sim.ops();
        let renamed = ops.iter().filter(|op| op.kind == OpKind::Rename && op.path.ends_with("prepared.log")).count();
        assert!(renamed >= 3, "{renamed} of 4 segments were made ahead");
        assert_eq!(partition.stats().rolls, 4);
        assert_eq!(contents(&read_all(&partition)), (0..23).map(record).collect::<Vec<_>>());
        drop(partition);
        broker.close().unwrap();
        assert_closed(&sim, 1);
        assert!(!names(&sim).iter().any(|name| name.starts_with("prepared")), "{:?}", names(&sim));
        assert_kept(&sim, 23, "closed");
    }
}

#[test]
fn it_works_the_same_on_this_machine() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = crate::support::create(data.path(), backend, &ahead());
        let tickets: Vec<_> = (0..60).map(|number| send(&partition, number).unwrap()).collect();
        for (number, ticket) in (0..).zip(tickets) {
            assert_eq!(ticket.wait().unwrap().start, number);
        }
        assert_eq!(contents(&read_all(&partition)), (0..60).map(record).collect::<Vec<_>>());
        drop(partition);
        broker.close().unwrap();
        let report = crate::oracle::assert_closed(&partition_dir(data.path()), 1);
        assert_eq!((report.next_offset, report.segments.len()), (60, 12));
    });
}

#[test]
fn a_crash_at_any_step_of_many_rolls_loses_nothing_that_was_acknowledged() {
    let seed = seed();
    let appends = 13;
    // How many operations there are varies a little from run to run: threads take turns as they like.
    let (sim, broker, partition) = create(seed, &ahead());
    let before = sim.state_changes();
    for number in 0..appends {
        append(&partition, number).unwrap();
    }
    let points = sim.state_changes() - before;
    drop((partition, broker));
    assert!(points > 40, "{points}");
    for point in 1..=points {
        for crash in sim::CRASHES {
            let what = format!("{crash} crash at operation {point} of {points}");
            let (sim, broker, partition) = create(seed ^ point, &ahead());
            sim.crash_at_op(point);
            let mut acknowledged = 0;
            for number in 0..appends {
                match append(&partition, number) {
                    Ok(offset) => {
                        assert_eq!(offset, number);
                        acknowledged = number + 1;
                    }
                    Err(_) => break,
                }
            }
            assert!(partition.durable_end() >= acknowledged);
            drop((partition, broker));
            sim::crash(&sim, crash);
            assert_kept(&sim, acknowledged, &what);
        }
    }
}

#[test]
fn the_first_append_of_a_segment_waits_for_its_name() {
    let (sim, broker, partition) = create(seed(), &ahead());
    for number in 0..5 {
        append(&partition, number).unwrap();
    }
    until("the next segment is ready", || prepared_is_ready(&sim));
    let hold = sim.hold(OpKind::SyncDir, None);
    let tickets: Vec<_> = (5..8).map(|number| send(&partition, number).unwrap()).collect();
    hold.wait_until_held();
    until("the records were written", || {
        sim.ops().iter().any(|op| op.kind == OpKind::Write && op.path.ends_with("prepared.log") && op.durable)
    });
    assert_eq!((partition.durable_end(), partition.next_offset()), (5, 5));
    let mut tickets = tickets.into_iter().map(|ticket| ticket.try_wait().expect_err("acknowledged under a name that a crash takes away"));
    let (first, rest) = (tickets.next().unwrap(), tickets.collect::<Vec<_>>());
    // What a power loss leaves now is the log without them.
    let lost = sim.fork(1);
    lost.power_loss_keeping_nothing();
    hold.release();
    assert_eq!(first.wait().unwrap().start, 5);
    for ticket in rest {
        ticket.wait().unwrap();
    }
    assert_eq!(partition.durable_end(), 8);
    drop(partition);
    broker.close().unwrap();
    assert_kept(&lost, 5, "lost");
    assert_kept(&sim, 8, "kept");
}

#[test]
fn a_cut_that_only_the_page_cache_held_is_durable_before_a_checkpoint_vouches_for_it() {
    let (sim, broker, partition) = create(seed(), &ahead());
    for number in 0..5 {
        append(&partition, number).unwrap();
    }
    until("the next segment is ready", || prepared_is_ready(&sim));
    let hold = sim.hold(OpKind::Sync, Some("00000000000000000000.log"));
    append(&partition, 5).unwrap();
    hold.wait_until_held();
    // The process dies here, and the machine once the next process has opened the log.
    let crashed = sim.fork(1);
    hold.release();
    drop((partition, broker));
    crashed.crash_process();
    let broker = try_open(&crashed, &ahead()).unwrap();
    let lost = crashed.fork(2);
    lost.power_loss_keeping_nothing();
    drop(broker);
    assert_kept(&lost, 6, "lost");
    assert_sound(&lost);
}

#[test]
fn a_name_that_cannot_be_made_durable_stops_the_partition() {
    for errno in [EIO, ENOSPC] {
        let (sim, broker, partition) = create(seed(), &ahead());
        for number in 0..5 {
            append(&partition, number).unwrap();
        }
        until("the next segment is ready", || prepared_is_ready(&sim));
        sim.fail(Fault::next(OpKind::SyncDir, Effect::Error(errno)));
        let error = append(&partition, 5).unwrap_err();
        assert!(error.is_failed(), "{error}");
        assert_eq!((partition.durable_end(), read_all(&partition).len()), (5, 5));
        drop((partition, broker));
        sim.power_loss_keeping_nothing();
        assert_kept(&sim, 5, "after the failure");
    }
}

#[test]
fn what_cannot_be_made_ahead_is_made_when_it_is_needed() {
    let faults = [
        (OpKind::Create, ".log"),
        (OpKind::Allocate, ".log"),
        (OpKind::Sync, ".log"),
        (OpKind::Create, ".index"),
        (OpKind::Create, ".timeindex"),
        (OpKind::Rename, ".log"),
        (OpKind::Rename, ".index"),
        (OpKind::Rename, ".timeindex"),
    ];
    for (on, extension) in faults {
        let (sim, broker, partition) = create(seed(), &ahead());
        let path_suffix = Some(format!("prepared{extension}"));
        sim.fail_by_chance(RandomFault { on, path_suffix, per_million: 1_000_000, effect: Effect::Error(ENOSPC) });
        let mut number = 0;
        let mut refused = 0;
        while number < 23 {
            match append(&partition, number) {
                Ok(offset) => {
                    assert_eq!(offset, number);
                    number += 1;
                }
                // Only the renaming of the log itself can be noticed, by the append that needs it.
                Err(Error::DiskFull { .. }) if on == OpKind::Rename && extension == ".log" => refused += 1,
                Err(error) => panic!("{on:?} {extension}: {error}"),
            }
        }
        assert!(refused <= 4);
        assert_eq!(contents(&read_all(&partition)), (0..23).map(record).collect::<Vec<_>>(), "{on:?} {extension}");
        sim.clear_faults();
        drop(partition);
        broker.close().unwrap();
        // An index that could not take its place is written by the next opening at the latest.
        assert_kept(&sim, 23, &format!("{on:?} {extension}"));
    }
}

#[test]
fn what_is_set_aside_for_the_next_segment_is_given_up_for_this_one() {
    // Room for a whole segment and no more: the next one must not take it.
    let (sim, broker, partition) = create(seed(), &TopicConfig { preallocate_bytes: 64 << 10, ..ahead() });
    append(&partition, 0).unwrap();
    sim.set_capacity(Some(sim.used() + SEGMENT - 200_029 + (32 << 10)));
    for number in 1..5 {
        assert_eq!(append(&partition, number).unwrap(), number, "there is room in this segment");
    }
    let error = append(&partition, 5).unwrap_err();
    assert!(error.is_disk_full() && !error.is_failed(), "{error}");
    sim.set_capacity(None);
    for number in 5..12 {
        assert_eq!(append(&partition, number).unwrap(), number);
    }
    drop(partition);
    broker.close().unwrap();
    assert_kept(&sim, 12, "closed");
}

#[test]
fn leftovers_of_a_next_segment_are_removed_and_never_read() {
    let (sim, broker, partition) = create(seed(), &ahead());
    for number in 0..3 {
        append(&partition, number).unwrap();
    }
    let log = sim.read_file(&sim::dir().join("00000000000000000000.log"));
    drop(partition);
    broker.close().unwrap();
    for name in ["prepared.log", "prepared.index", "prepared.timeindex"] {
        sim.write_file(&sim::dir().join(name), &log);
    }
    assert_kept(&sim, 3, "with leftovers");
    let broker = sim::open(&sim);
    assert!(broker.report().partitions.iter().all(|report| report.ignored.is_empty()));
    broker.delete_topic(TOPIC).unwrap();
    assert!(!sim.exists(Path::new(&sim::dir())));
}

#[test]
fn a_consumer_at_the_end_costs_no_read_of_the_disk() {
    let (sim, broker, partition) = create(seed(), &TopicConfig::default());
    let mut reader = partition.reader().unwrap();
    let mut next = 0;
    sim.clear_ops();
    for number in 0..2000_u64 {
        // Records of every size up to a few blocks, one to a commit and several.
        let records = 1 + number % 3;
        let mut batch = partition.batch();
        for record in 0..records {
            batch.push(Some(&record.to_be_bytes()), &vec![number.to_le_bytes()[0]; (number * 7919 % 9000) as usize]).unwrap();
        }
        partition.append(batch).unwrap().wait().unwrap();
        let mut seen = 0;
        while seen < records {
            let records = reader.read(next, 1 << 20).unwrap();
            for record in &records {
                assert_eq!(record.value.len() as u64, number * 7919 % 9000);
                assert!(record.value.iter().all(|&byte| byte == number.to_le_bytes()[0]));
                seen += 1;
            }
            next = records.next_offset();
        }
    }
    let reads: Vec<_> =
        sim.ops().into_iter().filter(|op| op.kind == OpKind::Read && op.path.ends_with("00000000000000000000.log")).collect();
    // The first record is looked up.
    assert!(reads.len() <= 1, "{} reads, the first {:?}", reads.len(), reads.first());
    // One that comes late reads from the disk what is in memory no more, and the same.
    assert_in_order(&read_all(&partition), 0);
    drop((reader, partition));
    broker.close().unwrap();
}

#[test]
fn without_memory_for_the_end_it_is_read_from_the_disk() {
    let (_, broker, partition) = create(seed(), &TopicConfig { tail_bytes: 0, ..TopicConfig::default() });
    for number in 0..20 {
        append(&partition, number).unwrap();
    }
    assert_eq!(contents(&read_all(&partition)), (0..20).map(record).collect::<Vec<_>>());
    drop(partition);
    broker.close().unwrap();
}

#[test]
fn many_consumers_at_the_end_see_what_was_appended_while_it_is_overwritten() {
    each_backend(|backend| {
        let data = scratch();
        // Little memory, so that commits leave it under the readers' hands.
        let topic = TopicConfig { commit_bytes: 64 << 10, tail_bytes: 128 << 10, ..TopicConfig::default() };
        let (broker, partition) = crate::support::create(data.path(), backend, &topic);
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|_| {
                    let partition = partition.clone();
                    scope.spawn(move || {
                        let mut reader = partition
                            .reader_with(ReaderConfig { piece_bytes: 32 << 10, ..ReaderConfig::up_to(Visibility::Durable) })
                            .unwrap();
                        let mut next = 0;
                        while next < 4000 {
                            let records = reader.read(next, 32 << 10).unwrap();
                            for record in &records {
                                let number = u64::from_be_bytes(record.value[..8].try_into().unwrap());
                                assert_eq!(number, record.offset);
                            }
                            next = records.next_offset();
                        }
                    })
                })
                .collect();
            for number in 0..4000_u64 {
                let mut value = number.to_be_bytes().to_vec();
                value.resize(8 + (number * 31 % 3000) as usize, 7);
                let ticket = partition.append(Batch::of(None, &value).unwrap()).unwrap();
                if number % 8 == 7 {
                    ticket.wait().unwrap();
                }
            }
            for reader in readers {
                reader.join().unwrap();
            }
        });
        drop(partition);
        broker.close().unwrap();
    });
}

#[test]
fn direct_writes_that_are_refused_go_through_the_page_cache() {
    for refused in 1..4 {
        let (sim, broker, partition) = create(seed(), &ahead());
        // Opening with O_DIRECT succeeds on some file systems that refuse the write.
        sim.fail(Fault::next(OpKind::Write, Effect::Error(22)).path("00000000000000000000.log").nth(refused));
        for number in 0..12 {
            assert_eq!(append(&partition, number).unwrap(), number);
        }
        assert_eq!(contents(&read_all(&partition)), (0..12).map(record).collect::<Vec<_>>());
        drop((partition, broker));
        sim.power_loss_keeping_nothing();
        assert_kept(&sim, 12, "after a power loss");
    }
}

#[test]
fn a_log_that_could_not_be_opened_is_not_left_behind() {
    // Where direct I/O is refused, the attempt that is refused makes the file.
    let (sim, broker, partition) = create(seed(), &sim::tiny(270));
    crate::support::append(&partition, b"key", &[7; 200]);
    sim.refuse_direct(true);
    // The second attempt, through the page cache.
    sim.fail(Fault { on: OpKind::Create, path_suffix: Some(".log".into()), nth: 2, effect: Effect::Error(EIO) });
    let refused = partition.append_and_wait(Batch::of(Some(b"key"), &[8; 200]).unwrap()).unwrap_err();
    assert!(!refused.is_failed(), "{refused}");
    assert!(!sim.exists(&segment_path(&sim::dir(), 1, "log")), "an empty log of a segment that there is not");
    // What fits goes on, and the next segment begins behind it, also after a power loss that takes whatever it can.
    assert_eq!(crate::support::append(&partition, b"", b"small"), 1);
    assert_eq!(crate::support::append(&partition, b"key", &[9; 200]), 2);
    for seed in 0..20 {
        let sim = sim.fork(seed);
        sim.power_loss();
        let broker = try_open(&sim, &sim::tiny(270)).unwrap();
        assert_eq!(read_all(&partition_of(&broker)).len(), 3);
    }
    drop(partition);
    broker.close().unwrap();
    assert_closed(&sim, 1);
}
