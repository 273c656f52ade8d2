//! Logs that become shorter because they are told to: every offset, every step, and what readers are told.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sapwood::inspect::{Inspector, Severity};
use sapwood::io::sim::{Effect, Fault, OpKind};
use sapwood::io::{Disk, OsDisk};
use sapwood::{Batch, Broker, Durability, Error, Partition, ReadMode, ReaderConfig, TopicConfig, Visibility};

use crate::format::{self, Slot, segment_path};
use crate::oracle;
use crate::sim::{self, DATA, EIO, each_disk};
use crate::support::{
    BACKENDS, Rng, Row, TOPIC, append, assert_in_order, batch, config, contents, copy_dir, create, partition_dir, partition_of, read_all,
    scratch, seed, segments_of,
};

/// Segments of three records, more or less.
fn topic(durability: Durability) -> TopicConfig {
    TopicConfig { durability, index_interval: 2, tail_bytes: 8192, commit_bytes: 4096, ..segments_of(300) }
}

const DURABILITIES: [Durability; 3] =
    [Durability::Durable, Durability::Interval { bytes: 200, time: Duration::from_secs(3600) }, Durability::Os];

fn value(number: u64, round: u64) -> Vec<u8> {
    let mut value = format!("{round}:{number}:").into_bytes();
    value.resize(20 + (number * 31 % 97) as usize, b'.');
    value
}

fn fill(partition: &Partition, numbers: std::ops::Range<u64>, round: u64) {
    for number in numbers {
        assert_eq!(append(partition, b"key", &value(number, round)), number);
    }
}

fn open(disk: Arc<dyn Disk>, data: &Path) -> Broker {
    let clock = Arc::new(sapwood::clock::SystemClock::new());
    Broker::open_on(disk, clock, data, config(sapwood::Backend::Auto, topic(Durability::Durable))).unwrap()
}

#[track_caller]
fn assert_rows(partition: &Partition, first: u64, parts: &[(std::ops::Range<u64>, u64)]) {
    let expected: Vec<_> = parts
        .iter()
        .flat_map(|(numbers, round)| {
            numbers.clone().filter(|number| *number >= first).map(move |number| (b"key".to_vec(), value(number, *round)))
        })
        .collect();
    let rows = read_all(partition);
    assert_in_order(&rows, first);
    assert_eq!(contents(&rows), expected);
}

#[track_caller]
fn assert_clean(disk: Arc<dyn Disk>, dir: &Path) {
    let verified = Inspector::on(disk).patience(Duration::ZERO).verify(dir).unwrap();
    assert!(verified.worst().is_none_or(|worst| worst <= Severity::Info), "{:?}", verified.findings);
}

#[test]
fn a_log_is_cut_at_every_offset_and_goes_on_from_there() {
    for durability in DURABILITIES {
        each_disk(|disk, data| {
            let broker = open(disk(), data);
            let partition = broker.create_topic(TOPIC, topic(durability)).unwrap().partition(0).unwrap();
            fill(&partition, 0..20, 0);
            // From the end to the start, and up again each time.
            for (round, cut) in (1..).zip((0..=20).rev()) {
                partition.truncate_after(cut).unwrap();
                assert_eq!((partition.first_offset(), partition.next_offset()), (0, cut));
                partition.sync().unwrap();
                assert_eq!(partition.durable_end(), cut);
                assert_rows(&partition, 0, &[(0..cut, 0)]);
                fill(&partition, cut..24, round);
                partition.sync().unwrap();
                assert_rows(&partition, 0, &[(0..cut, 0), (cut..24, round)]);
                partition.truncate_after(cut).unwrap();
            }
            fill(&partition, 0..20, 99);
            drop(partition);
            broker.close().unwrap();
            let broker = open(disk(), data);
            assert_rows(&partition_of(&broker), 0, &[(0..20, 99)]);
            assert!(broker.report().partitions[0].torn_tail.is_none());
            broker.close().unwrap();
            assert_clean(disk(), &partition_dir(data));
        });
    }
}

#[test]
fn a_log_that_was_cut_is_the_same_when_it_is_opened_again() {
    for durability in DURABILITIES {
        each_disk(|disk, data| {
            let mut broker = open(disk(), data);
            broker.create_topic(TOPIC, topic(durability)).unwrap();
            fill(&partition_of(&broker), 0..20, 0);
            for cut in [19, 17, 16, 12, 9, 8, 3, 1, 0] {
                partition_of(&broker).truncate_after(cut).unwrap();
                broker.close().unwrap();
                assert_clean(disk(), &partition_dir(data));
                broker = open(disk(), data);
                assert_rows(&partition_of(&broker), 0, &[(0..cut, 0)]);
            }
            fill(&partition_of(&broker), 0..5, 1);
            partition_of(&broker).sync().unwrap();
            assert_rows(&partition_of(&broker), 0, &[(0..5, 1)]);
        });
    }
}

#[test]
fn the_front_of_a_log_goes_up_to_every_offset_and_stays_away() {
    for durability in DURABILITIES {
        each_disk(|disk, data| {
            let mut broker = open(disk(), data);
            broker.create_topic(TOPIC, topic(durability)).unwrap();
            fill(&partition_of(&broker), 0..20, 0);
            for first in 0..=20 {
                let partition = partition_of(&broker);
                let removed = partition.truncate_before(first).unwrap();
                assert_eq!(removed.records, first.saturating_sub(1)..first);
                assert_eq!(partition.truncate_before(first / 2).unwrap().records, first..first, "what is gone stays gone");
                assert_eq!((partition.first_offset(), partition.next_offset()), (first, 20));
                assert_rows(&partition, first, &[(0..20, 0)]);
                if first > 0 {
                    assert!(matches!(partition.read_one(first - 1), Err(Error::OffsetOutOfRange { first: told, .. }) if told == first));
                    assert!(partition.tail(first - 1).is_err());
                }
                assert_eq!(partition.offset_for_time(0).unwrap(), first);
                if first % 3 == 0 {
                    drop(partition);
                    broker.close().unwrap();
                    assert_clean(disk(), &partition_dir(data));
                    broker = open(disk(), data);
                    assert_eq!(broker.report().partitions[0].first_offset, first);
                    assert_rows(&partition_of(&broker), first, &[(0..20, 0)]);
                }
            }
            let partition = partition_of(&broker);
            assert!(partition.truncate_before(21).unwrap_err().is_out_of_range());
            fill(&partition, 20..23, 0);
            partition.sync().unwrap();
            assert_rows(&partition, 20, &[(20..23, 0)]);
        });
    }
}

#[test]
fn both_ends_keep_their_distance() {
    each_disk(|disk, data| {
        let broker = open(disk(), data);
        let partition = broker.create_topic(TOPIC, topic(Durability::Durable)).unwrap().partition(0).unwrap();
        fill(&partition, 0..20, 0);
        partition.truncate_before(7).unwrap();
        for out in [0, 6, 21, u64::MAX] {
            assert!(matches!(partition.truncate_after(out), Err(Error::OffsetOutOfRange { first: 7, next: 20, .. })), "{out}");
        }
        partition.truncate_after(20).unwrap();
        partition.truncate_after(7).unwrap();
        assert_eq!((partition.first_offset(), partition.next_offset()), (7, 7));
        assert!(read_all(&partition).is_empty());
        fill(&partition, 7..12, 1);
        drop(partition);
        broker.close().unwrap();
        let broker = open(disk(), data);
        assert_rows(&partition_of(&broker), 7, &[(7..12, 1)]);
        broker.close().unwrap();
        let closed = broker_closed(disk(), data);
        assert!(closed.truncate_after(8).unwrap_err().is_closed());
        assert!(closed.truncate_before(8).unwrap_err().is_closed());
        assert!(closed.roll().unwrap_err().is_closed());
    });
}

fn broker_closed(disk: Arc<dyn Disk>, data: &Path) -> Partition {
    let broker = open(disk, data);
    let partition = partition_of(&broker);
    broker.close().unwrap();
    partition
}

#[test]
fn what_was_queued_before_is_cut_and_what_comes_later_takes_its_place() {
    each_disk(|disk, data| {
        let broker = open(disk(), data);
        let partition = broker.create_topic(TOPIC, topic(Durability::Durable)).unwrap().partition(0).unwrap();
        fill(&partition, 0..5, 0);
        for round in 1..30 {
            let before: Vec<_> = (0..10).map(|number| partition.append(batch(&[(b"key", value(number, 0))])).unwrap()).collect();
            thread::scope(|scope| {
                let cut = scope.spawn(|| partition.truncate_after(5).unwrap());
                for ticket in before {
                    ticket.wait().unwrap();
                }
                cut.join().unwrap();
            });
            fill(&partition, 5..8, round);
            assert_rows(&partition, 0, &[(0..5, 0), (5..8, round)]);
        }
    });
}

#[test]
fn whoever_reads_on_behind_a_cut_is_told_and_sees_no_record_that_is_gone() {
    for mode in [ReadMode::Buffered, ReadMode::Direct] {
        each_disk(|disk, data| {
            let broker = open(disk(), data);
            let partition = broker.create_topic(TOPIC, topic(Durability::Durable)).unwrap().partition(0).unwrap();
            fill(&partition, 0..20, 0);
            // Everything is in their memory.
            let mut readers: Vec<_> =
                (0..20).map(|_| partition.reader_with(ReaderConfig { piece_bytes: 1 << 20, ..ReaderConfig::by(mode) }).unwrap()).collect();
            let mut tails: Vec<_> = (0..20).map(|_| partition.tail(0).unwrap()).collect();
            for (at, (reader, tail)) in (0..).zip(readers.iter_mut().zip(&mut tails)) {
                for offset in 0..=at {
                    assert_eq!(reader.read_one(offset).unwrap().value, value(offset, 0));
                    assert_eq!(tail.next_record(None).unwrap().unwrap().offset, offset);
                }
            }
            partition.truncate_after(10).unwrap();
            fill(&partition, 10..20, 1);
            for (at, (reader, tail)) in (1..).zip(readers.iter_mut().zip(&mut tails)) {
                // `at` records were read.
                if at <= 10 {
                    let next = if at < 10 { value(at, 0) } else { value(10, 1) };
                    assert_eq!(reader.read_one(at).unwrap().value, next);
                    assert_eq!(tail.next_record(None).unwrap().unwrap().value, next);
                } else {
                    assert!(matches!(reader.read(at, 1), Err(Error::OffsetOutOfRange { next: 10, .. })), "{at}");
                    for _ in 0..3 {
                        let told = tail.next_record(None).unwrap_err();
                        assert!(matches!(told, Error::OffsetOutOfRange { next: 10, .. }), "{at}: {told}");
                    }
                    tail.seek(10).unwrap();
                    assert_eq!(tail.next_record(None).unwrap().unwrap().value, value(10, 1));
                    assert_eq!(reader.read_one(10).unwrap().value, value(10, 1));
                }
                for offset in 10..20 {
                    assert_eq!(reader.read_one(offset).unwrap().value, value(offset, 1));
                }
            }
        });
    }
}

#[test]
fn a_tail_that_waits_at_the_end_is_told_of_a_cut_before_it() {
    each_disk(|disk, data| {
        let broker = open(disk(), data);
        let partition = broker.create_topic(TOPIC, topic(Durability::Durable)).unwrap().partition(0).unwrap();
        for round in 0..50 {
            fill(&partition, partition.next_offset()..10, round);
            let mut tails = [10, 10].map(|from| partition.tail(from).unwrap());
            thread::scope(|scope| {
                let [sleeps, times_out] = &mut tails;
                // It sleeps by then, or it does not: the outcome is the same.
                let sleeps = scope.spawn(|| sleeps.next_record(None).map(drop));
                let times_out = scope.spawn(|| times_out.next_batch(100, Some(Duration::from_secs(100))).map(drop));
                if round % 2 == 0 {
                    thread::yield_now();
                }
                partition.truncate_after(9).unwrap();
                for told in [sleeps.join().unwrap(), times_out.join().unwrap()] {
                    assert!(matches!(told, Err(Error::OffsetOutOfRange { offset: 10, next: 9, .. })), "{told:?}");
                }
            });
        }
    });
}

#[test]
fn a_reader_that_is_under_way_while_the_log_is_cut_sees_one_or_the_other() {
    // The record of that offset says in which round it was written, and rounds only grow.
    each_disk(|disk, data| {
        let broker = open(disk(), data);
        let partition = broker.create_topic(TOPIC, topic(Durability::Durable)).unwrap().partition(0).unwrap();
        fill(&partition, 0..12, 100);
        let over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            for visibility in [Visibility::Durable, Visibility::Appended] {
                let (partition, over) = (&partition, &over);
                scope.spawn(move || {
                    let mut reader = partition.reader_with(ReaderConfig::up_to(visibility)).unwrap();
                    let mut newest = [0_u64; 12];
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        for offset in [0, 4, 6, 7, 8, 9, 10, 11] {
                            match reader.read_one(offset) {
                                Ok(record) => {
                                    let text = String::from_utf8(record.value.to_vec()).unwrap();
                                    let mut parts = text.split(':').map(|part| part.parse::<u64>().ok());
                                    let (round, number) = (parts.next().flatten().unwrap(), parts.next().flatten().unwrap());
                                    assert_eq!(number, offset);
                                    assert_eq!(record.value, value(offset, round));
                                    let before = &mut newest[offset as usize];
                                    assert!(round >= *before, "{offset}: {round} after {before}");
                                    *before = round;
                                }
                                Err(error) => assert!(error.is_out_of_range(), "{offset}: {error}"),
                            }
                        }
                    }
                });
            }
            for round in 101..180 {
                partition.truncate_after(5 + round % 4).unwrap();
                fill(&partition, 5 + round % 4..12, round);
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}

#[test]
fn a_cut_leaves_what_else_has_a_file_alone() {
    for backend in BACKENDS {
        let data = scratch();
        let disk = || -> Arc<dyn Disk> { Arc::new(OsDisk::new(backend).unwrap()) };
        let broker = open(disk(), data.path());
        let partition = broker.create_topic(TOPIC, topic(Durability::Durable)).unwrap().partition(0).unwrap();
        fill(&partition, 0..20, 0);
        partition.roll().unwrap();
        let dir = partition_dir(data.path());
        let kept = data.path().join("kept");
        fs::create_dir(&kept).unwrap();
        for entry in fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap()) {
            // What upkeep is just making has another name by now.
            match fs::hard_link(entry.path(), kept.join(entry.file_name())) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
                _ => {}
            }
        }
        let before = crate::support::bytes_in(&kept);
        for cut in [20, 17, 10, 4, 1] {
            partition.truncate_after(cut).unwrap();
            fill(&partition, cut..22, 1 + cut);
        }
        let after = crate::support::bytes_in(&kept);
        for (path, bytes) in before {
            // What took appends when it was linked went on.
            let ended = path.extension().is_some_and(|extension| extension == "log") && !path.ends_with("00000000000000000020.log");
            assert!(!ended || after[&path] == bytes, "{}", path.display());
        }
        drop(partition);
        broker.close().unwrap();
        assert_clean(disk(), &dir);
    }
}

#[test]
fn a_cut_of_a_log_whose_indexes_are_gone_or_wrong_finds_its_place() {
    each_disk(|disk, data| {
        for harm in 0..4 {
            let topic_name = format!("harmed-{harm}");
            let broker = open(disk(), data);
            let partition = broker.create_topic(&topic_name, topic(Durability::Durable)).unwrap().partition(0).unwrap();
            fill(&partition, 0..12, 0);
            partition.roll().unwrap();
            fill(&partition, 12..20, 0);
            let dir = data.join(&topic_name).join("0");
            let bases: Vec<u64> = {
                let names = disk().list(&dir).unwrap().into_iter().map(|entry| entry.name.into_string().unwrap());
                names.filter_map(|name| name.strip_suffix(".log")?.parse().ok()).collect()
            };
            for base in bases {
                let index = segment_path(&dir, base, "index");
                let Ok(file) = disk().open(&index, sapwood::io::Open::WRITE) else { continue };
                match harm {
                    0 => drop(disk().remove_file(&index)),
                    1 => file.set_len(7).unwrap(),
                    2 => drop(file.write_at(&[0xff; 16], 0, false)),
                    _ => drop(file.write_at(&[0; 16], 16, false)),
                }
            }
            for cut in [18, 11, 10, 7, 2] {
                partition.truncate_after(cut).unwrap();
                fill(&partition, cut..cut + 2, 5);
                assert_eq!(partition.read_one(cut).unwrap().value, value(cut, 5));
                assert_eq!(partition.read_one(cut - 1).unwrap().value, value(cut - 1, 0));
                partition.truncate_after(cut).unwrap();
            }
            drop(partition);
            broker.close().unwrap();
            let broker = open(disk(), data);
            let rows: Vec<Row> = read_all(&broker.topic(&topic_name).unwrap().partition(0).unwrap());
            assert_eq!(rows.len(), 2);
            broker.close().unwrap();
            assert_clean(disk(), &dir);
        }
    });
}

#[test]
fn damage_before_the_cut_refuses_it_and_damage_behind_it_goes() {
    let seed = seed();
    let (sim, broker, partition) = sim::create(seed, &TopicConfig { index_interval: 4, ..sim::tiny(4000) });
    fill(&partition, 0..20, 0);
    partition.sync().unwrap();
    let log = segment_path(&sim::dir(), 0, "log");
    let found = oracle::check_files(&sim::files_in(&sim, &sim::dir())).records;
    // A value's last byte.
    sim.overwrite(&log, found[9].end() - 1, b"x");
    let refused = partition.truncate_after(11).unwrap_err();
    assert!(matches!(refused, Error::Damaged { offset: 9, .. }), "{refused}");
    assert_eq!(partition.next_offset(), 20);
    assert_eq!(partition.read_one(15).unwrap().value, value(15, 0));
    partition.truncate_after(9).unwrap();
    fill(&partition, 9..15, 1);
    assert_rows(&partition, 0, &[(0..9, 0), (9..15, 1)]);
    drop(partition);
    broker.close().unwrap();
    sim::assert_closed(&sim, 4);
}

#[test]
fn a_crash_at_any_step_of_a_cut_leaves_a_log_that_ends_in_between() {
    let seed = seed();
    for (durability, cut) in [(Durability::Durable, 4), (Durability::Durable, 6), (Durability::Os, 13)] {
        let filled = || {
            let (sim, broker, partition) = sim::create(seed, &topic(durability));
            fill(&partition, 0..20, 0);
            partition.sync().unwrap();
            (sim, broker, partition)
        };
        let (sim, _broker, partition) = filled();
        let before = sim.state_changes();
        partition.truncate_after(cut).unwrap();
        let points = sim.state_changes() - before;
        assert!(points >= 10, "{points}");
        for point in 1..=points {
            for crash in sim::CRASHES {
                let what = format!("{durability:?}, cut at {cut}: {crash} crash at operation {point} of {points}");
                let (sim, broker, partition) = filled();
                sim.crash_at_op(point);
                let cut_to = partition.truncate_after(cut);
                drop((partition, broker));
                sim::crash(&sim, crash);
                let broker = open(Arc::new(sim.clone()), Path::new(DATA));
                let report = &broker.report().partitions[0];
                assert!(report.damage.is_empty() && report.torn_tail.is_none(), "{what}: {report:?}");
                let partition = partition_of(&broker);
                let end = partition.next_offset();
                assert!((cut..=20).contains(&end) && (cut_to.is_err() || end == cut), "{what}: {end}");
                assert_rows(&partition, 0, &[(0..end, 0)]);
                fill(&partition, end..end + 3, 1);
                drop(partition);
                broker.close().unwrap();
                let report = sim::assert_closed(&sim, 2);
                assert_eq!(report.next_offset, end + 3, "{what}");
            }
        }
    }
}

#[test]
fn a_cut_that_fails_is_refused_or_stops_the_partition_and_never_half_told() {
    let seed = seed();
    for kind in [OpKind::Write, OpKind::Sync, OpKind::SyncDir, OpKind::RemoveFile, OpKind::SetLen, OpKind::Open, OpKind::Read] {
        for nth in 1..12 {
            let what = format!("{kind:?} {nth}");
            let (sim, broker, partition) = sim::create(seed, &topic(Durability::Durable));
            fill(&partition, 0..20, 0);
            partition.sync().unwrap();
            sim.fail(Fault::next(kind, Effect::Error(EIO)).nth(nth));
            match partition.truncate_after(4) {
                Ok(()) => assert_eq!(partition.next_offset(), 4, "{what}"),
                Err(error) if error.is_failed() => {
                    assert!(
                        partition.append(Batch::of(None, b"x").unwrap()).and_then(|ticket| ticket.wait()).unwrap_err().is_failed(),
                        "{what}"
                    );
                }
                Err(error) => {
                    assert!(matches!(error, Error::Io { .. }), "{what}: {error}");
                    assert_eq!(partition.next_offset(), 20, "{what}");
                    sim.clear_faults();
                    assert_rows(&partition, 0, &[(0..20, 0)]);
                    fill(&partition, 20..21, 0);
                    partition.truncate_after(20).unwrap();
                }
            }
            sim.clear_faults();
            drop((partition, broker));
            let broker = open(Arc::new(sim.clone()), Path::new(DATA));
            let end = partition_of(&broker).next_offset();
            assert!((4..=20).contains(&end), "{what}: {end}");
            assert_rows(&partition_of(&broker), 0, &[(0..end, 0)]);
        }
    }
}

#[test]
fn a_checkpoint_that_is_not_the_engines_or_cannot_be_read_does_not_lie_of_a_cut() {
    let (sim, broker, partition) = sim::create(seed(), &sim::tiny(4000));
    fill(&partition, 0..10, 0);
    drop(partition);
    broker.close().unwrap();
    let path = sim::dir().join("checkpoint");
    // Another's: nothing that it says concerns the engine.
    sim.write_file(&path, b"somebody else's");
    let broker = sim::open(&sim);
    partition_of(&broker).truncate_after(5).unwrap();
    broker.close().unwrap();
    assert_eq!(sim.read_file(&path), b"somebody else's");
    let broker = sim::open(&sim);
    assert_rows(&partition_of(&broker), 0, &[(0..5, 0)]);
    broker.close().unwrap();
    // One that cannot be read may say anything.
    let slot = Slot { sequence: 6, base: 0, position: 0, next_offset: 0, last_timestamp: 0, entries: 0, clean: false };
    sim.write_file(&path, &slot.file(None));
    sim.fail(Fault::next(OpKind::Read, Effect::Error(EIO)).path("checkpoint"));
    let broker = sim::open(&sim);
    let refused = partition_of(&broker).truncate_after(3).unwrap_err();
    assert!(matches!(refused, Error::Io { .. }), "{refused}");
    assert_rows(&partition_of(&broker), 0, &[(0..5, 0)]);
}

#[test]
fn the_first_offset_of_a_log_that_lost_its_end_is_no_later_than_the_next() {
    let (sim, broker, partition) = sim::create(seed(), &sim::tiny(4000));
    fill(&partition, 0..10, 0);
    partition.truncate_before(8).unwrap();
    drop(partition);
    broker.close().unwrap();
    // Somebody takes the log and the checkpoint away, and puts an older copy there.
    let log = segment_path(&sim::dir(), 0, "log");
    let found = oracle::check_files(&sim::files_in(&sim, &sim::dir())).records;
    let cut = sim.read_file(&log)[..found[5].position as usize].to_vec();
    sim.write_file(&log, &cut);
    sim.write_file(&sim::dir().join("checkpoint"), &[]);
    let broker = sim::open(&sim);
    let partition = partition_of(&broker);
    assert_eq!((partition.first_offset(), partition.next_offset()), (5, 5));
    fill(&partition, 5..7, 1);
    drop(partition);
    broker.close().unwrap();
    let broker = sim::open(&sim);
    assert_rows(&partition_of(&broker), 5, &[(5..7, 1)]);
}

#[test]
fn what_says_where_the_log_begins_is_never_needed_to_read_it() {
    for backend in BACKENDS {
        let data = scratch();
        let disk = || -> Arc<dyn Disk> { Arc::new(OsDisk::new(backend).unwrap()) };
        let broker = open(disk(), data.path());
        let partition = broker.create_topic(TOPIC, segments_of(4000)).unwrap().partition(0).unwrap();
        fill(&partition, 0..10, 0);
        partition.truncate_before(4).unwrap();
        drop(partition);
        broker.close().unwrap();
        let start = partition_dir(data.path()).join("start");
        let bytes = fs::read(&start).unwrap();
        for wrong in [None, Some(&b""[..]), Some(&b"not the engine's"[..]), Some(&bytes[..23])] {
            let copy = scratch();
            copy_dir(data.path(), copy.path());
            let start = partition_dir(copy.path()).join("start");
            match wrong {
                None => fs::remove_file(&start).unwrap(),
                Some(bytes) => fs::write(&start, bytes).unwrap(),
            }
            let broker = open(disk(), copy.path());
            assert_rows(&partition_of(&broker), 0, &[(0..10, 0)]);
            let ignored = &broker.report().partitions[0].ignored;
            assert_eq!(ignored.contains(&start), wrong.is_some());
            if wrong.is_some_and(|wrong| !wrong.starts_with(&bytes[..8])) {
                assert!(partition_of(&broker).truncate_before(5).is_err(), "it is another's, for all that is known");
                assert_eq!(fs::read(&start).ok().as_deref(), wrong);
            } else {
                partition_of(&broker).truncate_before(5).unwrap();
                assert_rows(&partition_of(&broker), 5, &[(5..10, 0)]);
            }
        }
    }
}

#[test]
fn the_files_are_what_the_format_says_after_each_step() {
    let data = scratch();
    let broker = open(Arc::new(OsDisk::new(sapwood::Backend::Auto).unwrap()), data.path());
    let partition =
        broker.create_topic(TOPIC, TopicConfig { index_interval: 1, ..topic(Durability::Durable) }).unwrap().partition(0).unwrap();
    fill(&partition, 0..20, 0);
    let dir = partition_dir(data.path());
    let sound = |first: u64, next: u64| {
        partition.sync().unwrap();
        let report = oracle::check(&dir);
        let wrong: Vec<_> = report.wrong().into_iter().filter(|finding| finding.code != "EMPTY_INDEX").collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        assert_eq!((report.first_offset, report.next_offset), (first, next));
    };
    partition.truncate_after(13).unwrap();
    sound(0, 13);
    partition.truncate_before(7).unwrap();
    let base = oracle::check(&dir).first_offset;
    assert!(base <= 7 && format::segment_path(&dir, base, "log").exists());
    sound(base, 13);
    partition.truncate_before(13).unwrap();
    sound(13, 13);
    fill(&partition, 13..14, 0);
    sound(13, 14);
}

/// Both ends are asked for at once, over and over, at places that cross each other. Whatever each gets, the log is whole, and what is appended
/// afterwards stays.
#[test]
fn both_ends_at_once_leave_a_log_that_goes_on() {
    let mut rng = Rng::new(seed());
    for backend in BACKENDS {
        for segment_bytes in [300, 1 << 20] {
            let data = scratch();
            let settings = TopicConfig { retention_bytes: Some(900), ..segments_of(segment_bytes) };
            let (broker, partition) = create(data.path(), backend, &settings);
            let mut values: Vec<Vec<u8>> = Vec::new();
            for round in 0..60 {
                while values.len() < partition.first_offset() as usize + 60 {
                    values.push(value(values.len() as u64, round));
                    assert_eq!(append(&partition, b"key", values.last().unwrap()), values.len() as u64 - 1);
                }
                let (first, next) = (partition.first_offset(), partition.next_offset());
                let (cut, start) = (first + rng.below(next - first + 1), first + rng.below(next - first + 1));
                let by_itself = rng.below(2) == 0;
                let is_told = |result: &Result<_, Error>| matches!(result, Ok(_) | Err(Error::OffsetOutOfRange { .. }));
                let (cut_there, begins_there) = thread::scope(|scope| {
                    let cutting = scope.spawn(|| {
                        let result = partition.truncate_after(cut);
                        assert!(is_told(&result.as_ref().map(drop).map_err(Clone::clone)), "{result:?}");
                        // What is acknowledged from here on is nobody's to remove but the front's.
                        result.is_ok().then(|| append(&partition, b"key", b"after the cut"))
                    });
                    let shortening = scope.spawn(|| {
                        if by_itself {
                            broker.enforce_retention().unwrap();
                            return None;
                        }
                        let result = partition.truncate_before(start);
                        assert!(is_told(&result.as_ref().map(drop).map_err(Clone::clone)), "{result:?}");
                        result.is_ok().then_some(start)
                    });
                    (cutting.join().unwrap(), shortening.join().unwrap())
                });
                if let Some(offset) = cut_there {
                    assert_eq!(offset, cut);
                    values.truncate(cut as usize);
                    values.push(b"after the cut".to_vec());
                }
                let (first_now, next_now) = (partition.first_offset(), partition.next_offset());
                assert!(first_now >= begins_there.unwrap_or(first) && next_now == values.len() as u64, "round {round}, seed in the output");
                assert!(first_now <= next_now, "round {round}: {first_now}..{next_now}");
                let rows = read_all(&partition);
                assert_in_order(&rows, first_now);
                assert!(rows.iter().map(|row| &row.value).eq(&values[first_now as usize..]), "round {round}");
                if by_itself && cut_there.is_some() {
                    assert!(first_now <= cut, "the newest record is never too much");
                }
            }
            let (first, rows) = (partition.first_offset(), read_all(&partition));
            drop(partition);
            broker.close().unwrap();
            let broker = crate::support::open(data.path(), backend, &settings);
            let partition = partition_of(&broker);
            assert_eq!((partition.first_offset(), read_all(&partition)), (first, rows));
            broker.close().unwrap();
        }
    }
}

#[test]
fn what_is_appended_after_a_cut_is_readable_where_an_earlier_truncation_of_the_front_failed() {
    // The first sync is of the names in the directory, after the note has its own.
    for kind in [OpKind::Create, OpKind::Write, OpKind::Sync, OpKind::Rename, OpKind::SyncDir] {
        for crash in sim::CRASHES {
            let (sim, broker, partition) = sim::create(seed(), &segments_of(4000));
            fill(&partition, 0..30, 0);
            sim.fail(Fault::next(kind, Effect::Error(EIO)).path(if kind == OpKind::SyncDir { "t/0" } else { "start.tmp" }));
            partition.truncate_before(20).unwrap_err();
            sim.clear_faults();
            let _ = partition.truncate_after(10);
            let next = partition.next_offset();
            fill(&partition, next..35, 1);
            sim::crash(&sim, crash);
            drop((partition, broker));
            let broker = sim::open(&sim);
            let partition = partition_of(&broker);
            for offset in next..35 {
                assert_eq!(partition.read_one(offset).unwrap().value[..], value(offset, 1)[..], "{kind:?}, {crash}: {offset}");
            }
        }
    }
}

#[test]
fn a_truncation_of_the_front_that_is_made_again_after_it_failed_is_durable() {
    for offset in [10, 15] {
        let (sim, broker, partition) = sim::create(seed(), &segments_of(4000));
        fill(&partition, 0..10, 0);
        partition.roll().unwrap();
        fill(&partition, 10..20, 0);
        // The first is of the names of those that stay.
        sim.fail(Fault::next(OpKind::SyncDir, Effect::Error(EIO)).nth(if offset == 10 { 2 } else { 3 }));
        partition.truncate_before(offset).unwrap_err();
        partition.truncate_before(offset).unwrap();
        sim.power_loss_keeping_nothing();
        drop((partition, broker));
        let broker = sim::open(&sim);
        assert_eq!(partition_of(&broker).first_offset(), offset);
    }
}
