//! Partitions that move: sealed here, exported while they go on, taken in elsewhere, and nothing believed on the way.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sapwood::inspect::{Inspector, Severity};
use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::io::{Disk, OsDisk};
use sapwood::{Backend, Batch, Broker, Durability, Error, Partition, TopicConfig};

use crate::damage;
use crate::format::{self, segment_path};
use crate::oracle;
use crate::sim::{self, DATA, EIO};
use crate::support::{
    BACKENDS, TOPIC, append, assert_in_order, bytes_in, config, copy_dir, fixture, partition_of, read_all, scratch, seed, segments_of,
};

const DEMO: &str = "demo-36-segment-270";

fn open(disk: Arc<dyn Disk>, data: &Path) -> Broker {
    let clock = Arc::new(sapwood::clock::SystemClock::new());
    Broker::open_on(disk, clock, data, config(Backend::Auto, segments_of(270))).unwrap()
}

/// Runs a test on both real backends and on the simulated disk; the second path is a place for other things on the same disk.
fn each_disk(test: impl Fn(&dyn Fn() -> Arc<dyn Disk>, &Path, &Path)) {
    for backend in BACKENDS {
        let data = scratch();
        test(&|| Arc::new(OsDisk::new(backend).unwrap()), &data.path().join("data"), data.path());
    }
    let sim = SimDisk::new(1);
    sim.make_dirs(Path::new("/made"));
    test(&|| Arc::new(sim.clone()), Path::new(DATA), Path::new("/made"));
}

fn fill(partition: &Partition, count: u64) {
    for _ in 0..count {
        let number = partition.next_offset();
        assert_eq!(append(partition, b"user-1", format!("value-{number:05}").as_bytes()), number);
    }
}

#[track_caller]
fn assert_filled(partition: &Partition, first: u64, next: u64) {
    let rows = read_all(partition);
    assert_in_order(&rows, first);
    assert_eq!((rows.len() as u64, partition.first_offset(), partition.next_offset()), (next - first, first, next));
    assert!(rows.iter().all(|row| row.value == format!("value-{:05}", row.offset).into_bytes()));
}

fn another(broker: &Broker, name: &str) -> Partition {
    broker.create_topic(name, TopicConfig { partitions: 3, ..segments_of(270) }).unwrap().partition(1).unwrap()
}

#[test]
fn a_sealed_partition_answers_what_is_queued_and_takes_no_more_for_good() {
    for durability in [Durability::Durable, Durability::Os] {
        each_disk(|disk, data, _| {
            let broker = open(disk(), data);
            let partition = broker.create_topic(TOPIC, TopicConfig { durability, ..segments_of(270) }).unwrap().partition(0).unwrap();
            fill(&partition, 10);
            partition.sync().unwrap();
            let mut tail = partition.tail(10).unwrap();
            let tickets: Vec<_> = (0..10).map(|_| partition.append(Batch::of(None, b"x").unwrap()).unwrap()).collect();
            assert_eq!(partition.seal().unwrap(), 0..20);
            for (number, ticket) in (10..).zip(tickets) {
                assert_eq!(ticket.wait().unwrap(), number..number + 1);
            }
            let refused = |partition: &Partition| {
                assert!(partition.is_sealed());
                assert!(partition.append(Batch::of(None, b"x").unwrap()).unwrap_err().is_moved());
                assert!(partition.append_and_wait(Batch::of(None, b"x").unwrap()).unwrap_err().is_moved());
                assert!(partition.try_append(Batch::of(None, b"x").unwrap()).unwrap_err().error.unwrap().is_moved());
                for error in [partition.sync(), partition.roll(), partition.truncate_after(3), partition.truncate_before(3).map(drop)] {
                    assert!(error.unwrap_err().is_moved());
                }
                assert_eq!((read_all(partition).len(), partition.durable_end()), (20, 20));
            };
            refused(&partition);
            assert_eq!(partition.seal().unwrap(), 0..20, "it is already");
            for offset in 10..20 {
                assert_eq!(tail.next_record(None).unwrap().unwrap().offset, offset);
            }
            assert!(tail.next_record(None).unwrap_err().is_moved(), "nothing more comes here");
            assert_eq!(broker.enforce_retention().unwrap().failed.len(), 0);
            drop((partition, tail));
            broker.close().unwrap();
            let broker = open(disk(), data);
            let partition = partition_of(&broker);
            refused(&partition);
            partition.unseal().unwrap();
            assert!(partition.append(Batch::of(None, b"x").unwrap()).unwrap_err().is_moved(), "until it is opened again");
            drop(partition);
            broker.close().unwrap();
            let broker = open(disk(), data);
            let partition = partition_of(&broker);
            assert_eq!(append(&partition, b"k", b"v"), 20);
            broker.close().unwrap();
            assert!(partition.seal().unwrap_err().is_closed());
        });
    }
}

#[test]
fn a_partition_moves_with_all_that_it_holds() {
    each_disk(|disk, data, place| {
        let broker = open(disk(), data);
        let partition = broker.create_topic(TOPIC, segments_of(270)).unwrap().partition(0).unwrap();
        fill(&partition, 20);
        partition.truncate_before(8).unwrap();
        partition.seal().unwrap();
        let elsewhere = open(disk(), &place.join("elsewhere"));
        let empty = another(&elsewhere, "moved");
        let report = elsewhere.import_partition("moved", 1, partition.path()).unwrap();
        assert_eq!((report.first_offset, report.next_offset, report.partition), (8, 20, 1));
        assert!(report.damage.is_empty() && report.torn_tail.is_none());
        assert!(empty.append(Batch::of(None, b"x").unwrap()).unwrap_err().is_closed(), "another has its place");
        let moved = elsewhere.topic("moved").unwrap().partition(1).unwrap();
        assert_filled(&moved, 8, 20);
        fill(&moved, 10);
        moved.truncate_after(13).unwrap();
        fill(&moved, 4);
        assert_filled(&partition, 8, 20);
        assert!(!moved.is_sealed());
        let again = elsewhere.import_partition("moved", 1, partition.path()).unwrap_err();
        assert!(matches!(again, Error::PartitionNotEmpty { partition: 1, .. }), "{again}");
        drop((moved, empty));
        elsewhere.close().unwrap();
        let elsewhere = open(disk(), &place.join("elsewhere"));
        assert!(elsewhere.report().ignored.is_empty(), "{:?}", elsewhere.report().ignored);
        assert_filled(&elsewhere.topic("moved").unwrap().partition(1).unwrap(), 8, 17);
        assert_eq!(elsewhere.next_offset("moved", 0).unwrap(), 0);
        elsewhere.close().unwrap();
        for number in 0..3 {
            let verified = Inspector::on(disk()).patience(Duration::ZERO).verify(place.join(format!("elsewhere/moved/{number}"))).unwrap();
            assert!(verified.worst().is_none_or(|worst| worst <= Severity::Info), "{:?}", verified.findings);
        }
    });
}

#[test]
fn an_export_is_what_was_sealed_at_one_moment_whatever_becomes_of_the_partition() {
    for refuse_links in [false, true] {
        let sim = SimDisk::new(2);
        sim.refuse_links(refuse_links);
        sim.make_dirs(Path::new("/made"));
        let scratched = scratch();
        let disks: [(Arc<dyn Disk>, &Path); 2] =
            [(Arc::new(sim.clone()), Path::new("/made")), (Arc::new(OsDisk::new(Backend::Auto).unwrap()), scratched.path())];
        for (disk, place) in disks {
            let broker = open(Arc::clone(&disk), &place.join("data"));
            let partition = broker.create_topic(TOPIC, segments_of(270)).unwrap().partition(0).unwrap();
            fill(&partition, 20);
            partition.truncate_before(2).unwrap();
            let to = place.join("exported");
            let exported = partition.export(&to).unwrap();
            let links = disk.backend() != "sim" || !refuse_links;
            assert_eq!((exported.records.clone(), exported.segments, exported.bytes), (2..18, 3, 18 * 45));
            assert_eq!(exported.copied, if links { 0 } else { 3 });
            // The partition loses all of it, at both ends.
            partition.truncate_after(10).unwrap();
            fill(&partition, 30);
            partition.truncate_before(30).unwrap();
            broker.delete_topic(TOPIC).unwrap();
            let verified = Inspector::on(Arc::clone(&disk)).patience(Duration::ZERO).verify(&to).unwrap();
            assert!(verified.worst().is_none_or(|worst| worst <= Severity::Info), "{:?}", verified.findings);
            another(&broker, "back");
            broker.import_partition("back", 1, &to).unwrap();
            let back = broker.topic("back").unwrap().partition(1).unwrap();
            assert_filled(&back, 2, 18);
            // What was taken in is a copy.
            fill(&back, 3);
            back.truncate_after(4).unwrap();
            another(&broker, "again");
            broker.import_partition("again", 1, &to).unwrap();
            assert_filled(&broker.topic("again").unwrap().partition(1).unwrap(), 2, 18);
        }
    }
}

#[test]
fn an_export_links_and_takes_no_room() {
    let place = scratch();
    let (_broker, partition) = crate::support::create(&place.path().join("data"), Backend::Auto, &segments_of(270));
    fill(&partition, 20);
    sim::until("the sums", || segment_path(partition.path(), 12, "sum").exists());
    let to = place.path().join("to");
    partition.export(&to).unwrap();
    for base in [0, 6, 12] {
        for kind in ["log", "index", "timeindex"] {
            let inode = |dir: &Path| fs::metadata(segment_path(dir, base, kind)).unwrap().ino();
            assert_eq!(inode(&to), inode(partition.path()));
        }
    }
    assert!(!segment_path(&to, 18, "log").exists() && !segment_path(&to, 12, "sum").exists() && segment_path(&to, 6, "sum").exists());
    let report = oracle::check(&to);
    assert!(report.wrong().is_empty(), "{:?}", report.wrong());
    assert_eq!((report.first_offset, report.next_offset), (0, 18));
    // All of it, if nothing is being appended to.
    partition.roll().unwrap();
    assert_eq!(partition.export(place.path().join("all")).unwrap().records, 0..20);
    assert!(partition.export(place.path().join("all")).is_err(), "there is one already");
    partition.truncate_before(20).unwrap();
    let none = partition.export(place.path().join("none")).unwrap();
    assert_eq!((none.records, none.segments), (20..20, 0));
    // Nor is what only the segment holds that takes the appends.
    fill(&partition, 1);
    let none = partition.export(place.path().join("still none")).unwrap();
    assert_eq!((none.records, none.segments), (20..20, 0));
    assert!(partition.export(place.path().join("no/such/place")).is_err());
}

#[test]
fn an_export_beside_appends_retention_and_rolls_is_whole() {
    let place = scratch();
    let by_size = TopicConfig { retention_bytes: Some(2000), ..segments_of(270) };
    let (broker, partition) = crate::support::create(&place.path().join("data"), Backend::Auto, &by_size);
    thread::scope(|scope| {
        let appends = scope.spawn(|| fill(&partition, 600));
        let retention = scope.spawn(|| {
            while !appends_are_over(&partition, 600) {
                broker.enforce_retention().unwrap();
            }
        });
        let mut number = 0;
        while !appends_are_over(&partition, 600) {
            let to = place.path().join(format!("export-{number}"));
            number += 1;
            let exported = partition.export(&to).unwrap();
            if exported.segments > 0 {
                let report = oracle::check(&to);
                // An index may just be written, where its segment was sealed a moment before.
                let wrong: Vec<_> = report.wrong().into_iter().filter(|finding| finding.file.ends_with("log")).collect();
                assert!(wrong.is_empty(), "{wrong:?}");
                assert_eq!(exported.records, report.first_offset..report.next_offset);
                assert!(report.records.iter().all(|found| found.value == format!("value-{:05}", found.offset).into_bytes()));
            }
            fs::remove_dir_all(&to).unwrap();
        }
        assert!(number > 3, "{number}");
        appends.join().unwrap();
        retention.join().unwrap();
    });
}

fn appends_are_over(partition: &Partition, count: u64) -> bool {
    partition.next_offset() >= count
}

#[test]
fn what_is_damaged_is_not_taken_in_and_its_first_fault_is_named() {
    for name in [
        "flip-value-byte",
        "flip-timestamp",
        "offset-gap",
        "truncate-mid-body",
        "truncate-mid-header",
        "hole-in-the-middle",
        "stale-record-tail",
        "segment-overlap",
        "missing-middle-segment",
        "size-plus-one",
        "keylen-gt-size",
        "garbage-tail",
    ] {
        let place = scratch();
        let from = place.path().join("from");
        copy_dir(&fixture(DEMO), &from);
        damage::apply(&from, name);
        let before = bytes_in(&from);
        let broker = crate::support::open(&place.path().join("data"), Backend::Auto, &segments_of(270));
        let empty = another(&broker, "t");
        let fault = broker.import_partition("t", 1, &from).unwrap_err();
        assert!(matches!(fault, Error::Damaged { .. } | Error::RecordsMissing { .. }), "{name}: {fault}");
        assert!(fault.to_string().contains(from.to_str().unwrap()), "{name}: {fault}");
        assert_eq!(bytes_in(&from), before, "{name}");
        // Nothing happened.
        assert_eq!(append(&empty, b"k", b"v"), 0, "{name}");
        assert_eq!(fs::read_dir(place.path().join("data/t")).unwrap().count(), 4, "{name}");
        let told = broker.import_partition("t", 1, fixture(DEMO)).unwrap_err();
        assert!(matches!(told, Error::PartitionNotEmpty { .. }), "{told}");
        broker.import_partition("t", 2, fixture(DEMO)).unwrap();
        assert_eq!(read_all(&broker.topic("t").unwrap().partition(2).unwrap()).len(), 36);
    }
}

#[test]
fn what_can_be_made_anew_need_not_come_along() {
    for harm in
        ["missing-both-indexes", "index-zero-fill", "empty-index", "orphan-index", "torn-body-prealloc-none", "stray-file", "stray-dir"]
    {
        let place = scratch();
        let from = place.path().join("from");
        copy_dir(&fixture(DEMO), &from);
        if harm == "torn-body-prealloc-none" {
            // Room behind the last record.
            let log = fs::File::options().write(true).open(segment_path(&from, 30, "log")).unwrap();
            log.set_len(1 << 20).unwrap();
        } else {
            damage::apply(&from, harm);
        }
        let broker = crate::support::open(&place.path().join("data"), Backend::Auto, &segments_of(270));
        another(&broker, "t");
        broker.import_partition("t", 1, &from).unwrap();
        let partition = broker.topic("t").unwrap().partition(1).unwrap();
        assert_eq!(append(&partition, b"user-1", b"value-00000"), 36, "{harm}");
        drop(partition);
        broker.close().unwrap();
        let report = oracle::check(&place.path().join("data/t/1"));
        assert!(report.wrong().is_empty(), "{harm}: {:?}", report.wrong());
        assert_eq!((report.next_offset, report.next_position), (37, if report.segments.len() == 7 { 45 } else { 315 }), "{harm}");
    }
}

#[test]
fn a_changed_length_of_a_key_is_noticed_by_the_sum_of_its_log() {
    let place = scratch();
    let (broker, partition) = crate::support::create(&place.path().join("data"), Backend::Auto, &segments_of(270));
    fill(&partition, 20);
    sim::until("the sums", || segment_path(partition.path(), 12, "sum").exists());
    partition.seal().unwrap();
    let from = place.path().join("copy");
    copy_dir(partition.path(), &from);
    let log = segment_path(&from, 6, "log");
    let mut bytes = fs::read(&log).unwrap();
    bytes[27] -= 1;
    fs::write(&log, bytes).unwrap();
    another(&broker, "moved");
    let fault = broker.import_partition("moved", 1, &from).unwrap_err();
    assert!(matches!(&fault, Error::SumMismatch { path, .. } if *path == log), "{fault}");
}

#[test]
fn nothing_is_no_partition() {
    let place = scratch();
    let broker = crate::support::open(&place.path().join("data"), Backend::Auto, &segments_of(270));
    another(&broker, "t");
    fs::create_dir(place.path().join("empty")).unwrap();
    for from in ["empty", "missing"] {
        assert!(matches!(broker.import_partition("t", 1, place.path().join(from)), Err(Error::Io { .. })), "{from}");
    }
    assert!(matches!(broker.import_partition("t", 3, fixture(DEMO)), Err(Error::PartitionNotFound { .. })));
    assert!(matches!(broker.import_partition("u", 0, fixture(DEMO)), Err(Error::TopicNotFound { .. })));
    assert!(matches!(broker.import_partition("../u", 0, fixture(DEMO)), Err(Error::InvalidTopicName { .. })));
    assert_eq!(broker.next_offset("t", 1).unwrap(), 0);
}

#[test]
fn a_crash_at_any_step_of_an_import_leaves_the_empty_partition_or_the_whole_one() {
    let seed = seed();
    let made = || {
        let sim = SimDisk::new(seed);
        sim.import(&fixture(DEMO), Path::new("/made/from")).unwrap();
        let broker = open(Arc::new(sim.clone()), Path::new(DATA));
        another(&broker, "t");
        (sim, broker)
    };
    let (sim, broker) = made();
    let before = sim.state_changes();
    broker.import_partition("t", 1, "/made/from").unwrap();
    let points = sim.state_changes() - before;
    assert!(points > 40, "{points}");
    for point in 1..=points {
        for crash in sim::CRASHES {
            let what = format!("{crash} crash at operation {point} of {points}");
            let (sim, broker) = made();
            sim.crash_at_op(point);
            let imported = broker.import_partition("t", 1, "/made/from");
            drop(broker);
            sim::crash(&sim, crash);
            let broker = open(Arc::new(sim.clone()), Path::new(DATA));
            assert!(broker.report().ignored.is_empty(), "{what}: {:?}", broker.report().ignored);
            let partition = broker.topic("t").unwrap().partition(1).unwrap();
            let next = partition.next_offset();
            assert!(next == 36 || (next == 0 && imported.is_err()), "{what}: {next}");
            assert_eq!(read_all(&partition).len() as u64, next, "{what}");
            assert_eq!(append(&partition, b"k", b"v"), next, "{what}");
            let mut names: Vec<_> = sim.files(&Path::new(DATA).join("t")).into_iter().map(|(name, _)| name).collect();
            names.sort();
            assert_eq!(names, ["0", "1", "2", "topic.json"], "{what}");
            drop(partition);
            broker.close().unwrap();
            let report = oracle::check_files(&sim::files_in(&sim, &Path::new(DATA).join("t/1")));
            assert!(report.wrong().is_empty(), "{what}: {:?}", report.wrong());
        }
    }
}

#[test]
fn a_crash_at_any_step_of_an_export_leaves_the_partition_as_it_was() {
    let seed = seed();
    for point in 1..40 {
        for crash in sim::CRASHES {
            let (sim, broker, partition) = sim::create(seed, &segments_of(270));
            fill(&partition, 20);
            sim.crash_at_op(point);
            let exported = partition.export("/made/to");
            drop((partition, broker));
            sim::crash(&sim, crash);
            let what = format!("{crash} crash at operation {point}");
            if exported.is_ok() {
                let report = oracle::check_files(&sim::files_in(&sim, Path::new("/made/to")));
                assert_eq!((report.wrong().len(), report.next_offset), (0, 18), "{what}");
            }
            let broker = open(Arc::new(sim.clone()), Path::new(DATA));
            assert_filled(&partition_of(&broker), 0, 20);
            broker.close().unwrap();
            sim::assert_closed(&sim, 1);
        }
    }
}

#[test]
fn what_fails_on_the_way_is_told_and_leaves_nothing() {
    let seed = seed();
    for kind in
        [OpKind::Create, OpKind::Write, OpKind::Sync, OpKind::SyncDir, OpKind::Rename, OpKind::Read, OpKind::Link, OpKind::CreateDir]
    {
        for nth in 1..8 {
            let what = format!("{kind:?} {nth}");
            let (sim, broker, partition) = sim::create(seed, &segments_of(270));
            fill(&partition, 20);
            another(&broker, "other");
            sim.fail(Fault::next(kind, Effect::Error(EIO)).nth(nth));
            let exported = partition.export("/made/to");
            assert!(exported.is_ok() || !sim.exists(Path::new("/made/to")), "{what}");
            if exported.is_ok() {
                let imported = broker.import_partition("other", 1, "/made/to");
                sim.clear_faults();
                let there = broker.topic("other").unwrap().partition(1).unwrap();
                match imported {
                    Ok(_) => assert_filled(&there, 0, 18),
                    // It is not known which of the two a power loss would leave there.
                    Err(_) if there.reader().is_err() => {}
                    Err(error) => {
                        assert!(matches!(error, Error::Io { .. }), "{what}: {error}");
                        assert!(there.next_offset() == 0 || there.next_offset() == 18, "{what}");
                        fill(&there, 1);
                    }
                }
            }
            sim.clear_faults();
            assert_filled(&partition, 0, 20);
        }
    }
}

#[test]
fn a_format_written_by_another_hand_is_taken_in() {
    let place = scratch();
    let from = place.path().join("from");
    format::write_partition(
        &from,
        &format::demo(100),
        format::Layout { segment_bytes: 1000, index_interval: 3, base: 500, prealloc: 4096 },
    );
    let broker = crate::support::open(&place.path().join("data"), Backend::Auto, &segments_of(270));
    another(&broker, "t");
    let report = broker.import_partition("t", 1, &from).unwrap();
    assert_eq!((report.first_offset, report.next_offset), (500, 600));
    assert_eq!(append(&broker.topic("t").unwrap().partition(1).unwrap(), b"k", b"v"), 600);
}

#[test]
fn an_export_of_a_sealed_partition_does_not_change_when_that_goes_on() {
    each_disk(|disk, data, place| {
        let broker = open(disk(), data);
        let partition = broker.create_topic(TOPIC, segments_of(270)).unwrap().partition(0).unwrap();
        fill(&partition, 20);
        assert_eq!(partition.seal().unwrap(), 0..20);
        let to = place.join("sealed");
        let exported = partition.export(&to).unwrap();
        assert_eq!((exported.records, exported.segments), (0..20, 4));
        let held = |name: &str| disk().open(&to.join(name), sapwood::io::Open::READ).map(|file| file.len().unwrap()).unwrap();
        let names = ["00000000000000000018.log", "00000000000000000018.index", "00000000000000000018.timeindex"];
        let before = names.map(held);
        partition.unseal().unwrap();
        drop(partition);
        broker.close().unwrap();
        let broker = open(disk(), data);
        let partition = partition_of(&broker);
        fill(&partition, 30);
        assert_eq!(names.map(held), before);
        another(&broker, "back");
        broker.import_partition("back", 1, &to).unwrap();
        assert_filled(&broker.topic("back").unwrap().partition(1).unwrap(), 0, 20);
        broker.close().unwrap();
    });
}

#[test]
fn a_copy_that_lost_its_end_is_not_taken_in() {
    let place = scratch();
    let (broker, partition) = crate::support::create(&place.path().join("data"), Backend::Auto, &segments_of(270));
    fill(&partition, 20);
    assert_eq!(partition.seal().unwrap(), 0..20);
    type Loss = fn(&Path);
    let losses: [(&str, u64, Loss); 4] = [
        ("the last segment", 18, |dir| {
            ["log", "index", "timeindex"].iter().for_each(|kind| fs::remove_file(segment_path(dir, 18, kind)).unwrap())
        }),
        ("the last record", 19, |dir| fs::File::options().write(true).open(segment_path(dir, 18, "log")).unwrap().set_len(45).unwrap()),
        ("all of the last log", 18, |dir| fs::write(segment_path(dir, 18, "log"), b"").unwrap()),
        ("the bytes of the last record", 19, |dir| {
            let bytes = fs::read(segment_path(dir, 18, "log")).unwrap();
            fs::write(segment_path(dir, 18, "log"), [&bytes[..45], &[0; 45]].concat()).unwrap();
        }),
    ];
    // Each of the two notes of where it ended is enough.
    for forgotten in ["", "moved", "checkpoint"] {
        for (what, from, lose) in losses {
            let copy = place.path().join("copy");
            copy_dir(partition.path(), &copy);
            if !forgotten.is_empty() {
                fs::remove_file(copy.join(forgotten)).unwrap();
            }
            lose(&copy);
            let elsewhere = open(Arc::new(OsDisk::new(Backend::Auto).unwrap()), &place.path().join("elsewhere"));
            another(&elsewhere, "moved");
            let error = elsewhere.import_partition("moved", 1, &copy).unwrap_err();
            let named = matches!(&error, Error::RecordsMissing { path, from: first, to: 20 } if *path == copy && *first == from);
            assert!(named, "{what} without {forgotten:?}: {error}");
            assert_eq!(elsewhere.topic("moved").unwrap().partition(1).unwrap().next_offset(), 0);
            elsewhere.close().unwrap();
            fs::remove_dir_all(&copy).unwrap();
            fs::remove_dir_all(place.path().join("elsewhere")).unwrap();
        }
    }
    broker.close().unwrap();
}

// -------------------------------------------------------------------- closed meanwhile

/// Where the disk holds an import, and whether the partition has its place by then: while it is copied, while names change, and while it is opened there.
const PLACES: [(OpKind, &str, bool); 6] = [
    (OpKind::CreateDir, "t/.new-1", false),
    (OpKind::Create, "t/.new-1/00000000000000000006.log", false),
    (OpKind::SyncDir, "t/.new-1", false),
    (OpKind::Rename, "t/1", true),
    (OpKind::Rename, "t/.new-1", true),
    (OpKind::RemoveDir, "t/.old-1", true),
];

/// An import that the disk holds up there, with `close` at work beside it when it goes on, which `closes` tells. Gives what came of both.
fn beside_an_import<T: Send>(
    (kind, place): (OpKind, &str),
    close: impl FnOnce(&Broker) -> T + Send,
    closes: impl FnOnce(&Broker, bool),
) -> (SimDisk, Broker, sapwood::Result<sapwood::PartitionReport>, T) {
    let sim = SimDisk::new(seed());
    sim.import(&fixture(DEMO), Path::new("/made/from")).unwrap();
    let broker = open(Arc::new(sim.clone()), Path::new(DATA));
    another(&broker, "t");
    let hold = sim.hold(kind, Some(place));
    let (imported, closed) = thread::scope(|scope| {
        let importing = scope.spawn(|| broker.import_partition("t", 1, "/made/from"));
        hold.wait_until_held();
        let closing = scope.spawn(|| close(&broker));
        closes(&broker, closing.is_finished());
        assert!(!importing.is_finished());
        hold.release();
        (importing.join().unwrap(), closing.join().unwrap())
    });
    (sim, broker, imported, closed)
}

#[track_caller]
fn assert_all_closed(partitions: &[Partition]) {
    for partition in partitions {
        assert!(partition.append(Batch::of(None, b"late").unwrap()).unwrap_err().is_closed());
        assert!(partition.reader().is_err_and(|error| error.is_closed()));
        assert!(partition.read_one(0).unwrap_err().is_closed());
    }
}

/// What the next opening finds is the empty partition or the whole new one, as the import said.
#[track_caller]
fn assert_taken_or_not(sim: &SimDisk, imported: &sapwood::Result<sapwood::PartitionReport>, is_in_place: bool) {
    match imported {
        Ok(report) => assert!(is_in_place && report.next_offset == 36),
        Err(error) => assert!(!is_in_place && error.is_closed(), "{error}"),
    }
    let names: Vec<_> = sim.clone().list(&Path::new(DATA).join("t")).unwrap().into_iter().map(|entry| entry.name).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().starts_with('.')), "{names:?}");
    let broker = open(Arc::new(sim.clone()), Path::new(DATA));
    assert!(broker.report().ignored.is_empty());
    let partition = broker.topic("t").unwrap().partition(1).unwrap();
    assert_eq!(partition.next_offset(), if imported.is_ok() { 36 } else { 0 });
    assert_eq!(read_all(&partition).len() as u64, partition.next_offset());
    assert_eq!(append(&partition, b"k", b"v"), if imported.is_ok() { 36 } else { 0 });
}

#[test]
fn a_topic_that_is_closed_while_a_partition_is_taken_in_stays_closed() {
    for (kind, place, is_in_place) in PLACES {
        let (sim, broker, imported, ()) = beside_an_import(
            (kind, place),
            |broker| {
                let topic = broker.topic("t").unwrap();
                topic.close().unwrap();
                // What was taken in is closed by now, and nothing of it is being written.
                assert_all_closed(&topic.partitions());
            },
            |broker, is_finished| {
                sim::until("the topic is closed", || broker.produce("t", Some(b"k"), b"v").is_err());
                assert!(!is_finished, "{place}");
            },
        );
        let topic = broker.topic("t").unwrap();
        assert_all_closed(&topic.partitions());
        assert!(broker.import_partition("t", 1, "/made/from").unwrap_err().is_closed());
        drop(topic);
        broker.close().unwrap();
        assert_taken_or_not(&sim, &imported, is_in_place);
    }
}

#[test]
fn a_broker_that_is_closed_while_a_partition_is_taken_in_waits_for_it_or_leaves_nothing_open() {
    for (kind, place, is_in_place) in PLACES {
        let (sim, broker, imported, partitions) = beside_an_import(
            (kind, place),
            |broker| {
                let topic = broker.topic("t").unwrap();
                broker.clone().close().unwrap();
                assert_all_closed(&topic.partitions());
                topic.partitions()
            },
            |broker, _| sim::until("the broker is closed", || broker.topic(TOPIC).is_err_and(|error| error.is_closed())),
        );
        assert_eq!(imported.unwrap().next_offset, 36);
        assert_all_closed(&partitions);
        drop((broker, partitions));
        let broker = open(Arc::new(sim.clone()), Path::new(DATA));
        assert_eq!(broker.next_offset("t", 1).unwrap(), 36);
        drop(broker);
        // With a limit that is over before the disk goes on.
        let (done, is_done) = std::sync::mpsc::channel();
        let (sim, broker, imported, partitions) = beside_an_import(
            (kind, place),
            |broker| {
                let topic = broker.topic("t").unwrap();
                let error = broker.clone().close_within(Duration::from_millis(1)).unwrap_err();
                assert!(matches!(error, Error::CloseTimedOut { .. }), "{error}");
                assert_all_closed(&topic.partitions());
                done.send(()).unwrap();
                topic
            },
            |_, _| is_done.recv().unwrap(),
        );
        assert_all_closed(&partitions.partitions());
        drop((broker, partitions));
        sim::until("the data directory is let go of", || sim::try_open(&sim, &segments_of(270)).is_ok());
        assert_taken_or_not(&sim, &imported, is_in_place);
    }
}

#[test]
fn a_topic_is_deleted_after_the_partition_that_is_being_taken_in() {
    for (kind, place, _) in PLACES {
        let (sim, broker, imported, topic) = beside_an_import(
            (kind, place),
            |broker| {
                let topic = broker.topic("t").unwrap();
                broker.delete_topic("t").unwrap();
                topic
            },
            |broker, is_finished| assert!(!is_finished && broker.topic("t").is_ok()),
        );
        assert_eq!(imported.unwrap().next_offset, 36);
        assert_all_closed(&topic.partitions());
        assert!(broker.topics().is_empty() && !sim.exists(&Path::new(DATA).join("t")));
        drop(topic);
        broker.close().unwrap();
    }
}

#[test]
fn an_export_without_records_goes_on_elsewhere_where_it_ended() {
    each_disk(|disk, data, place| {
        let broker = open(disk(), data);
        let partition = broker.create_topic(TOPIC, segments_of(270)).unwrap().partition(0).unwrap();
        fill(&partition, 20);
        partition.truncate_before(20).unwrap();
        let to = place.join("empty");
        let exported = partition.export(&to).unwrap();
        assert_eq!((exported.records, exported.segments), (20..20, 0));
        another(&broker, "back");
        let report = broker.import_partition("back", 1, &to).unwrap();
        assert_eq!((report.first_offset, report.next_offset), (20, 20));
        let back = broker.topic("back").unwrap().partition(1).unwrap();
        fill(&back, 10);
        assert_filled(&back, 20, 30);
        drop(back);
        broker.close().unwrap();
        let broker = open(disk(), data);
        assert_filled(&broker.topic("back").unwrap().partition(1).unwrap(), 20, 30);
        broker.close().unwrap();
    });
}

#[test]
fn a_partition_of_which_it_cannot_be_read_whether_it_moved_is_not_opened() {
    for (name, kind) in [("moved", OpKind::Open), ("moved", OpKind::Read), ("start", OpKind::Open), ("start", OpKind::Read)] {
        let sim = SimDisk::new(5);
        let broker = open(Arc::new(sim.clone()), Path::new(DATA));
        let partition = broker.create_topic(TOPIC, segments_of(4000)).unwrap().partition(0).unwrap();
        fill(&partition, 10);
        partition.truncate_before(4).unwrap();
        partition.seal().unwrap();
        drop(partition);
        broker.close().unwrap();
        sim.fail(Fault::next(kind, Effect::Error(EIO)).path(name));
        let clock = Arc::new(sapwood::clock::SystemClock::new());
        let opened = Broker::open_on(Arc::new(sim.clone()), clock, Path::new(DATA), config(Backend::Auto, segments_of(270)));
        let error = opened.unwrap_err();
        assert!(matches!(&error, Error::Io { path, .. } if path.ends_with(name)), "{name}: {error}");
        sim.clear_faults();
        let broker = open(Arc::new(sim.clone()), Path::new(DATA));
        assert!(partition_of(&broker).is_sealed());
        assert_filled(&partition_of(&broker), 4, 10);
        broker.close().unwrap();
    }
}

#[test]
fn a_partition_whose_note_that_it_moved_is_damaged_takes_no_appends_until_it_is_unsealed() {
    let data = scratch();
    let reopened = || crate::support::open(data.path(), Backend::Posix, &segments_of(4000));
    let (broker, partition) = crate::support::create(data.path(), Backend::Posix, &segments_of(4000));
    fill(&partition, 5);
    partition.seal().unwrap();
    let note = partition.path().join("moved");
    drop(partition);
    broker.close().unwrap();
    let mut bytes = std::fs::read(&note).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&note, &bytes).unwrap();
    let broker = reopened();
    let partition = partition_of(&broker);
    assert!(partition.is_sealed() && partition.append_and_wait(Batch::of(None, b"x").unwrap()).unwrap_err().is_moved());
    assert_filled(&partition, 0, 5);
    partition.unseal().unwrap();
    drop(partition);
    broker.close().unwrap();
    let broker = reopened();
    fill(&partition_of(&broker), 5);
    assert_filled(&partition_of(&broker), 0, 10);
}

#[test]
fn what_is_appended_after_an_import_that_could_not_take_its_place_survives_a_power_loss() {
    for seed in 0..64 {
        let sim = SimDisk::new(seed);
        sim.import(&fixture(DEMO), Path::new("/made/from")).unwrap();
        let broker = open(Arc::new(sim.clone()), Path::new(DATA));
        another(&broker, "t");
        sim.fail(Fault::next(OpKind::Rename, Effect::Error(EIO)).path("t/.new-1"));
        let error = broker.import_partition("t", 1, "/made/from").unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        fill(&broker.topic("t").unwrap().partition(1).unwrap(), 5);
        sim.power_loss();
        drop(broker);
        let broker = open(Arc::new(sim.clone()), Path::new(DATA));
        let partition = broker.topic("t").unwrap().partition(1).unwrap();
        assert_eq!(partition.next_offset(), 5, "seed {seed}");
        assert_filled(&partition, 0, 5);
        drop(partition);
        broker.close().unwrap();
    }
}

#[test]
fn a_seal_that_is_taken_back_again_after_that_failed_stays_taken_back() {
    let (sim, broker, partition) = sim::create(seed(), &segments_of(4000));
    fill(&partition, 5);
    partition.seal().unwrap();
    sim.fail(Fault::next(OpKind::SyncDir, Effect::Error(EIO)));
    assert!(partition.unseal().is_err());
    partition.unseal().unwrap();
    sim.power_loss_keeping_nothing();
    drop((partition, broker));
    let broker = sim::open(&sim);
    assert!(!partition_of(&broker).is_sealed());
    fill(&partition_of(&broker), 1);
    broker.close().unwrap();
}

#[test]
fn a_partition_that_failed_before_it_was_sealed_is_not_sealed() {
    let (sim, broker, partition) = sim::create(seed(), &segments_of(4000));
    fill(&partition, 5);
    sim.fail(Fault::next(OpKind::Write, Effect::ErrorAfterPartial { bytes: 1 << 20, errno: EIO }));
    assert!(partition.append_and_wait(Batch::of(None, &[7; 300]).unwrap()).unwrap_err().is_failed());
    assert!(partition.seal().unwrap_err().is_failed());
    assert!(!partition.is_sealed());
    // What was never acknowledged is in none.
    let exported = partition.export("/made/to").unwrap();
    assert_eq!((exported.records, exported.segments), (0..0, 0));
    drop((partition, broker));
    let broker = sim::open(&sim);
    let partition = partition_of(&broker);
    assert!(!partition.is_sealed() && partition.next_offset() >= 5);
    append(&partition, b"k", b"v");
}

#[test]
fn a_partition_is_not_sealed_before_all_is_written() {
    let (sim, broker, partition) = sim::create(seed(), &segments_of(4000));
    fill(&partition, 5);
    let hold = sim.hold(OpKind::Write, Some("checkpoint"));
    let exported = thread::scope(|scope| {
        let sealing = scope.spawn(|| partition.seal());
        hold.wait_until_held();
        assert!(!partition.is_sealed());
        let exported = partition.export("/made/to").unwrap();
        hold.release();
        assert_eq!(sealing.join().unwrap().unwrap(), 0..5);
        exported
    });
    assert_eq!((exported.records, exported.segments), (0..0, 0));
    assert!(partition.is_sealed());
    assert_eq!(partition.export("/made/all").unwrap().records, 0..5);
    drop(broker);
}

#[test]
fn a_copy_whose_first_offset_lies_behind_its_end_is_not_taken_in() {
    let (sim, broker, partition) = sim::create(seed(), &segments_of(4000));
    fill(&partition, 20);
    partition.truncate_before(15).unwrap();
    partition.roll().unwrap();
    partition.export("/made/to").unwrap();
    let log = Path::new("/made/to/00000000000000000000.log");
    let bytes = sim.read_file(log);
    sim.write_file(log, &bytes[..bytes.len() / 2]);
    another(&broker, "other");
    let imported = broker.import_partition("other", 1, "/made/to");
    assert!(matches!(imported, Err(Error::RecordsMissing { from: 10, to: 15, .. })), "{imported:?}");
}

#[test]
fn an_export_does_not_change_when_a_cut_beside_it_is_interrupted() {
    let seed = seed();
    let made = || {
        let (sim, broker, partition) = sim::create(seed, &segments_of(270));
        fill(&partition, 20);
        partition.roll().unwrap();
        fill(&partition, 2);
        partition.export("/made/to").unwrap();
        (sim, broker, partition)
    };
    let (sim, _broker, partition) = made();
    let before = sim.state_changes();
    partition.truncate_after(19).unwrap();
    let points = sim.state_changes() - before;
    for point in 1..=points {
        for crash in sim::CRASHES {
            let (sim, broker, partition) = made();
            let before = sim::files_in(&sim, Path::new("/made/to"));
            sim.crash_at_op(point);
            // The last of what is counted may be upkeep's.
            let cut = partition.truncate_after(19);
            drop((partition, broker));
            sim::crash(&sim, crash);
            let broker = open(Arc::new(sim.clone()), Path::new(DATA));
            let partition = partition_of(&broker);
            let next = partition.next_offset();
            assert!(next == 19 || ((20..=22).contains(&next) && cut.is_err()));
            fill(&partition, 3);
            assert_filled(&partition, 0, partition.next_offset());
            drop(partition);
            broker.close().unwrap();
            let after = sim::files_in(&sim, Path::new("/made/to"));
            assert!(after == before, "{crash} crash at operation {point} of {points}");
        }
    }
}

/// Segments that are made ahead, of which one is full and the next is there.
fn made_ahead() -> (SimDisk, Broker, Partition) {
    let topic = TopicConfig { segment_bytes: 1 << 20, preallocate_bytes: 1 << 20, ..TopicConfig::default() };
    let (sim, broker, partition) = sim::create(seed(), &topic);
    for _ in 0..3 {
        append(&partition, b"k", &[1; 300_000]);
    }
    sim::until("the next segment is ready", || sim::prepared_is_ready(&sim));
    (sim, broker, partition)
}

#[test]
fn an_export_does_not_change_when_a_power_loss_takes_the_next_segment_back() {
    let (sim, broker, partition) = made_ahead();
    let hold = sim.hold(OpKind::SyncDir, Some("t/0"));
    let ticket = partition.append(Batch::of(None, &[1; 300_000]).unwrap()).unwrap();
    hold.wait_until_held();
    assert_eq!(partition.export("/made/to").unwrap().records, 0..3);
    let log = |sim: &SimDisk| sim.read_file(Path::new("/made/to/00000000000000000000.log"));
    let before = log(&sim);
    sim.power_loss_keeping_nothing();
    hold.release();
    assert!(ticket.wait().is_err());
    drop((partition, broker));
    let broker = open(Arc::new(sim.clone()), Path::new(DATA));
    let partition = partition_of(&broker);
    assert_eq!(append(&partition, b"k", b"v"), 3);
    assert_eq!(read_all(&partition).len(), 4);
    drop(partition);
    broker.close().unwrap();
    assert!(log(&sim) == before);
    sim::assert_closed(&sim, 1);
}

#[test]
fn appends_go_on_while_an_export_copies() {
    let (sim, broker, partition) = sim::create(seed(), &segments_of(4000));
    sim.refuse_links(true);
    fill(&partition, 20);
    partition.roll().unwrap();
    fill(&partition, 1);
    let hold = sim.hold(OpKind::Write, Some("/made/to/00000000000000000000.log"));
    thread::scope(|scope| {
        let exporting = scope.spawn(|| partition.export("/made/to").unwrap());
        hold.wait_until_held();
        let (send, receive) = std::sync::mpsc::channel();
        scope.spawn(|| {
            let send = send;
            for number in 0..200 {
                append(&partition, b"k", &[1; 100]);
                let _ = send.send(number);
            }
        });
        let mut last = None;
        while let Ok(number) = receive.recv_timeout(oracle::HANG_LIMIT) {
            last = Some(number);
        }
        hold.release();
        exporting.join().unwrap();
        assert_eq!(last, Some(199));
    });
    drop(broker);
}
