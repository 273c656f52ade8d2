//! Failing writes, syncs and allocations, and power cuts, of the real engine through the real kernel: on a FUSE file system that fails on
//! command and loses what was not synced. Skipped, aloud, where none can be mounted.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::io::ReadWriteFlags;
use sapwood::{Backend, Broker, Durability, Error, OwnedRecord, Partition, Ticket, TopicConfig, Visibility};

use crate::damage::{Target, bases};
use crate::format::{BASE_TIME, encode, segment_path};
use crate::fuse_disk::{Effect, Fault, FuseDisk, Op};
use crate::oracle::{assert_closed, check, scan};
use crate::sim::{EIO, ENOSPC, tiny};
use crate::support::{
    BACKENDS, assert_in_order, batch, bytes_in, config, contents, create, each_backend, open, partition_dir, partition_of, read_all,
    read_up_to, report_of,
};

const EINVAL: i32 = 22;
const EMFILE: i32 = 24;
const ENOSYS: i32 = 38;
const EOPNOTSUPP: i32 = 95;

const FIRST_LOG: &str = "/0/00000000000000000000.log";

const LEVELS: [Durability; 3] =
    [Durability::Durable, Durability::Interval { bytes: 1 << 40, time: Duration::from_secs(3600) }, Durability::Os];

type Content = (Vec<u8>, Vec<u8>);

/// Record number `number` of those that a test appends: mixed sizes, and now and then one that takes several blocks.
fn record(number: u64) -> Content {
    let len = if number % 7 == 6 { 9000 } else { 100 + number * 37 % 300 };
    (number.to_be_bytes().to_vec(), vec![(number as u8) | 1; len as usize])
}

fn try_append(partition: &Partition, number: u64) -> sapwood::Result<u64> {
    Ok(partition.append(batch(&[record(number)]))?.wait()?.start)
}

/// Appends the records from `numbers`, and waits until they are durable.
#[track_caller]
fn append_durably(partition: &Partition, numbers: std::ops::Range<u64>) {
    for number in numbers {
        assert_eq!(try_append(partition, number).unwrap(), number);
    }
    partition.sync().unwrap();
}

fn records(numbers: std::ops::Range<u64>) -> Vec<Content> {
    numbers.map(record).collect()
}

/// A disk with the topic on it, and `count` durable records in it.
fn with_records(disk: &FuseDisk, backend: Backend, topic: &TopicConfig, count: u64) -> (Broker, Partition) {
    let (broker, partition) = create(&disk.data(), backend, topic);
    append_durably(&partition, 0..count);
    (broker, partition)
}

/// The power is cut at this moment and comes back: of the records submitted, 0 up to `submitted`, the first `durable` are there at the
/// least, and nothing but a prefix. Appends go on behind it.
#[track_caller]
fn assert_survives(disk: &mut FuseDisk, (broker, partition): (Broker, Partition), backend: Backend, durable: u64, submitted: u64) {
    let survivor = disk.survivor();
    drop((partition, broker));
    disk.restart_with(survivor);
    let found = assert_opens(disk, backend, durable, submitted);
    // What an opening shows is not lost again.
    let survivor = disk.survivor();
    disk.restart_with(survivor);
    let again = assert_opens(disk, backend, found, found);
    assert_eq!(again, found);
}

/// Opens the disk, checks what is there, appends to it if `submitted` allows for more, and closes it. Gives the end of the log.
#[track_caller]
fn assert_opens(disk: &FuseDisk, backend: Backend, durable: u64, submitted: u64) -> u64 {
    let broker = open(&disk.data(), backend, &tiny(1 << 20));
    if broker.topics().is_empty() {
        assert_eq!(durable, 0, "the topic is gone");
        return 0;
    }
    let partition = partition_of(&broker);
    let rows = read_all(&partition);
    assert_in_order(&rows, 0);
    let mut end = rows.len() as u64;
    assert!((durable..=submitted).contains(&end), "{end} records are there, of {submitted} submitted {durable} were durable");
    assert!(contents(&rows) == records(0..end), "what is there is not what was appended");
    if durable < submitted {
        append_durably(&partition, end..end + 2);
        end += 2;
    }
    let interval = partition.config().index_interval;
    drop(partition);
    broker.close().unwrap();
    assert_closed(&partition_dir(&disk.data()), interval.into());
    end
}

/// Appends and syncs are refused with the error that stopped it; what is durable can be read.
#[track_caller]
fn assert_latched(partition: &Partition, durable: u64) {
    for _ in 0..2 {
        assert!(try_append(partition, durable).unwrap_err().is_failed());
        let waiting = partition.try_append(batch(&[record(durable)])).map_err(|refused| refused.error.unwrap());
        assert!(waiting.and_then(Ticket::wait).unwrap_err().is_failed());
        assert!(partition.append_and_wait(batch(&[record(durable)])).unwrap_err().is_failed());
        assert!(partition.sync().unwrap_err().is_failed());
    }
    assert!(contents(&read_all(partition)) == records(0..durable), "what is durable can be read, and nothing else");
    assert_eq!(partition.durable_end(), durable);
}

/// Once for each level and backend, on a disk of its own; not at all where there can be none.
fn each_level(test: impl Fn(&mut FuseDisk, Backend, &TopicConfig)) {
    for durability in LEVELS {
        for backend in BACKENDS {
            let Some(mut disk) = FuseDisk::new() else { return };
            eprintln!("{backend:?}, {durability:?}");
            test(&mut disk, backend, &TopicConfig { durability, ..tiny(1 << 20) });
        }
    }
}

/// The judge is judged first: what is synced stays, what is not goes, and a failed sync is not made up for by a later one.
#[test]
fn the_file_system_keeps_what_was_synced_and_fails_as_told() {
    let Some(mut disk) = FuseDisk::new() else { return };
    let path = disk.path().join("file");
    let open = || fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
    let sync_names = |disk: &FuseDisk| fs::File::open(disk.path()).unwrap().sync_all().unwrap();

    open().write_all(b"no name").unwrap();
    open().sync_all().unwrap();
    let survivor = disk.survivor();
    disk.restart_with(survivor);
    assert!(!path.exists(), "a name that was not synced");

    let mut file = open();
    sync_names(&disk);
    let dsync = |file: &fs::File, bytes: &[u8], at| {
        rustix::io::pwritev2(file, &[std::io::IoSlice::new(bytes)], at, ReadWriteFlags::DSYNC).map_err(|errno| errno.raw_os_error())
    };
    assert_eq!(dsync(&file, b"durable", 0), Ok(7));
    file.seek(SeekFrom::End(0)).unwrap();
    file.write_all(b" and not").unwrap();
    drop(file);
    let survivor = disk.survivor();
    disk.restart_with(survivor);
    assert_eq!(fs::read(&path).unwrap(), b"durable");

    // Past the page cache, too.
    let direct = fs::OpenOptions::new().write(true).custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32).open(&path).unwrap();
    let mut memory = vec![b'x'; 8192];
    let start = memory.as_ptr().align_offset(4096);
    let block = &mut memory[start..start + 4096];
    disk.fail(Fault::once(Op::Sync, "file", EIO));
    assert_eq!(dsync(&direct, block, 0), Err(EIO));
    assert_eq!(dsync(&direct, block, 0), Ok(4096));
    disk.fail(Fault::once(Op::Write, "file", ENOSPC));
    assert_eq!(dsync(&direct, block, 4096), Err(ENOSPC));
    assert_eq!(disk.failures(), 2);
    drop(direct);

    let mut file = open();
    file.seek(SeekFrom::Start(8192)).unwrap();
    file.write_all(&[b'l'; 4096]).unwrap();
    disk.fail(Fault::once(Op::Sync, "file", EIO));
    assert_eq!(file.sync_data().unwrap_err().raw_os_error(), Some(EIO));
    file.sync_data().unwrap();
    let mut shown = vec![0; 4096];
    file.seek(SeekFrom::Start(8192)).unwrap();
    file.read_exact(&mut shown).unwrap();
    assert_eq!(shown, [b'l'; 4096], "the page cache shows it still");
    drop(file);
    let survivor = disk.survivor();
    disk.restart_with(survivor);
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes[..4096], [b'x'; 4096], "written again after a sync that failed");
    assert!(bytes[4096..].iter().all(|&byte| byte == 0), "what a failed sync lost");
}

#[test]
fn a_failed_write_stops_the_partition_and_takes_everything_queued_along() {
    for errno in [EIO, ENOSPC] {
        each_level(|disk, backend, topic| {
            let (broker, partition) = with_records(disk, backend, topic, 3);
            disk.fail(Fault::once(Op::Write, FIRST_LOG, errno));
            let hold = disk.hold(Op::Write, FIRST_LOG);
            let mut tickets = vec![partition.append(batch(&[record(3)])).unwrap()];
            hold.wait_until_held();
            tickets.extend((4..20).map(|number| partition.append(batch(&[record(number)])).unwrap()));
            drop(hold);
            for ticket in tickets {
                let error = ticket.wait().unwrap_err();
                assert!(error.is_failed() && error.is_disk_full() == (errno == ENOSPC), "{error}");
            }
            // The disk works again, and that alone must not help.
            assert_latched(&partition, 3);
            assert_eq!(disk.failures(), 1);
            assert_survives(disk, (broker, partition), backend, 3, 20);
        });
    }
}

#[test]
fn b104_a_failed_sync_is_never_made_up_for() {
    for (errno, direct) in [(EIO, true), (ENOSPC, true), (EIO, false)] {
        each_level(|disk, backend, topic| {
            if !direct {
                disk.refuse_direct();
            }
            let (broker, partition) = with_records(disk, backend, topic, 3);
            disk.fail(Fault::once(Op::Sync, FIRST_LOG, errno));
            if topic.durability == Durability::Durable {
                let hold = disk.hold(Op::Sync, FIRST_LOG);
                let mut tickets = vec![partition.append(batch(&[record(3)])).unwrap()];
                hold.wait_until_held();
                tickets.extend((4..20).map(|number| partition.append(batch(&[record(number)])).unwrap()));
                drop(hold);
                for ticket in tickets {
                    assert!(ticket.wait().unwrap_err().is_failed());
                }
            } else {
                // Answered when the kernel has them; what the answers of these levels promise ends at the sync.
                for number in 3..20 {
                    assert_eq!(try_append(&partition, number).unwrap(), number);
                }
                // Read once, they are in the page cache to stay.
                assert!(contents(&read_up_to(&partition, Visibility::Appended, 0, 1 << 20)) == records(0..20));
                assert!(partition.sync().unwrap_err().is_failed());
                let log = fs::read(segment_path(partition.path(), 0, "log")).unwrap();
                assert_eq!(scan(&log, 0).records.len(), 20, "the kernel shows what the disk lost");
            }
            assert_latched(&partition, 3);
            assert_eq!(disk.failures(), 1);

            // Opened again while the kernel still shows what the disk lost: that must not be taken for the truth.
            drop((partition, broker));
            let broker = open(&disk.data(), backend, topic);
            let partition = partition_of(&broker);
            let found = partition.durable_end();
            assert_eq!(contents(&read_all(&partition)), records(0..found));
            assert_survives(disk, (broker, partition), backend, found, 20);
        });
    }
}

#[test]
fn a_failed_sync_in_the_background_stops_the_partition() {
    each_backend(|backend| {
        let Some(mut disk) = FuseDisk::new() else { return };
        let durability = Durability::Interval { bytes: 1, time: Duration::from_secs(3600) };
        let (broker, partition) = with_records(&disk, backend, &TopicConfig { durability, ..tiny(1 << 20) }, 3);
        disk.fail(Fault::once(Op::Sync, FIRST_LOG, EIO));
        let submitted =
            (3..100_000).find(|&number| try_append(&partition, number % 200).is_err()).expect("the sync's failure came to nobody");
        assert!(try_append(&partition, 0).unwrap_err().is_failed() && partition.sync().unwrap_err().is_failed());
        assert!((3..=submitted).contains(&partition.durable_end()));
        let durable = read_all(&partition).len() as u64;
        let survivor = disk.survivor();
        drop((partition, broker));
        disk.restart_with(survivor);
        let broker = open(&disk.data(), backend, &tiny(1 << 20));
        let rows = read_all(&partition_of(&broker));
        assert_in_order(&rows, 0);
        assert!((durable..=submitted).contains(&(rows.len() as u64)));
    });
}

#[test]
fn b111_a_short_write_before_the_failure_leaves_nothing_that_is_read() {
    for bytes in [1, 512, 4096, 5000] {
        each_level(|disk, backend, topic| {
            let topic = TopicConfig { commit_bytes: 1 << 20, ..topic.clone() };
            let (broker, partition) = with_records(disk, backend, &topic, 6);
            // One commit of more than 9,000 bytes, of which so many are written.
            disk.fail(Fault { effect: Effect::Short(bytes), ..Fault::once(Op::Write, FIRST_LOG, 0) });
            disk.fail(Fault { after: 1, ..Fault::always(Op::Write, FIRST_LOG, ENOSPC) });
            let failed = [record(6), record(7)];
            assert!(partition.append(batch(&failed)).unwrap().wait().unwrap_err().is_failed());
            assert_latched(&partition, 6);
            disk.clear_faults();
            assert_survives(disk, (broker, partition), backend, 6, 8);
        });
    }
}

#[test]
fn a_short_write_that_goes_on_is_no_failure() {
    for bytes in [1, 512, 4096, 5000] {
        each_backend(|backend| {
            let Some(mut disk) = FuseDisk::new() else { return };
            let (broker, partition) = with_records(&disk, backend, &tiny(1 << 20), 6);
            disk.fail(Fault { effect: Effect::Short(bytes), ..Fault::once(Op::Write, FIRST_LOG, 0) });
            append_durably(&partition, 6..9);
            assert_eq!(disk.failures(), 1);
            assert_survives(&mut disk, (broker, partition), backend, 9, 9);
        });
    }
}

#[test]
fn b113_b118_no_room_at_allocation_refuses_appends_until_there_is_some() {
    each_level(|disk, backend, topic| {
        let (broker, partition) = with_records(disk, backend, topic, 3);
        disk.fail(Fault::always(Op::Allocate, ".log", ENOSPC));
        let mut end = 3;
        let error = loop {
            match try_append(&partition, end) {
                Ok(_) => end += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::DiskFull { appended: 0, .. }) && !error.is_failed(), "{error}");
        assert!(matches!(try_append(&partition, 6).unwrap_err(), Error::DiskFull { .. }));
        assert!(contents(&read_all(&partition)).starts_with(&records(0..3)));
        disk.clear_faults();
        append_durably(&partition, end..end + 10);
        assert_survives(disk, (broker, partition), backend, end + 10, end + 10);
    });
}

#[test]
fn b116_a_file_system_that_cannot_allocate_serves_as_well() {
    for errno in [EOPNOTSUPP, ENOSYS, EINVAL] {
        for segment_bytes in [5000, 1 << 20] {
            each_level(|disk, backend, topic| {
                disk.fail(Fault::always(Op::Allocate, "", errno));
                let topic = TopicConfig { segment_bytes, ..topic.clone() };
                let (broker, partition) = with_records(disk, backend, &topic, 40);
                assert!(disk.failures() > 0);
                assert_survives(disk, (broker, partition), backend, 40, 40);
            });
        }
    }
}

#[test]
fn b120_indexes_and_checkpoints_that_cannot_be_written_cost_no_record() {
    for on in [Op::Write, Op::Sync, Op::SetLen, Op::Create] {
        for suffix in [".index", ".timeindex", "checkpoint"] {
            for errno in [EIO, ENOSPC] {
                each_backend(|backend| {
                    eprintln!("{on:?} {suffix} {errno}");
                    let Some(mut disk) = FuseDisk::new() else { return };
                    // A topic is not made halves, so it is made before.
                    let (broker, partition) = create(&disk.data(), backend, &tiny(5000));
                    disk.fail(Fault::always(on, suffix, errno));
                    for number in 0..40 {
                        assert_eq!(try_append(&partition, number).unwrap(), number);
                    }
                    for number in 0..40 {
                        let OwnedRecord { key, .. } = partition.read_one(number).unwrap();
                        assert_eq!(key, record(number).0);
                    }
                    assert_survives(&mut disk, (broker, partition), backend, 40, 40);
                });
            }
        }
    }
}

#[test]
fn b106_names_are_durable_before_what_is_in_the_files_is_acknowledged() {
    // Rolls on the spot, and to segments that were made ahead.
    for (segment_bytes, records) in [(300, 12), (5000, 30), (1 << 20, 3)] {
        each_backend(|backend| {
            let Some(mut disk) = FuseDisk::new() else { return };
            let topic = TopicConfig { segment_bytes, ..tiny(0) };
            let mut survivors = Vec::new();
            {
                let (_broker, partition) = create(&disk.data(), backend, &topic);
                for number in 0..records {
                    assert_eq!(try_append(&partition, number).unwrap(), number);
                    survivors.push(disk.survivor());
                }
            }
            for (end, survivor) in (1..).zip(survivors) {
                disk.restart_with(survivor);
                assert_opens(&disk, backend, end, end);
            }
        });
    }
}

/// What comes of one failure at a roll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// No append hears of it.
    Nothing,
    /// The append that needed it is refused, later ones are not.
    Refused,
    /// The partition stops.
    Stops,
}

/// Appends `count` records across several rolls, with one failure in the first of them, and checks what comes of it.
fn at_a_roll(disk: &mut FuseDisk, backend: Backend, topic: &TopicConfig, count: u64, fault: Fault, expected: Outcome) {
    let what = format!("{:?}, {} bytes, {fault:?}", topic.durability, topic.segment_bytes);
    let (broker, partition) = with_records(disk, backend, topic, 1);
    disk.fail(fault);
    let (mut end, mut outcome) = (1, Outcome::Nothing);
    for _ in 0..count {
        match try_append(&partition, end) {
            Ok(offset) => {
                assert_eq!(offset, end, "{what}");
                assert_ne!(outcome, Outcome::Stops, "{what}: an append after the partition stopped");
                end += 1;
            }
            Err(error) if error.is_failed() => outcome = Outcome::Stops,
            Err(error) => {
                assert_eq!(outcome, Outcome::Nothing, "{what}: refused twice for one failure: {error}");
                outcome = Outcome::Refused;
            }
        }
    }
    if outcome != Outcome::Stops && partition.sync().is_err() {
        outcome = Outcome::Stops;
    }
    assert_eq!(disk.failures(), 1, "{what}: it did not happen");
    assert_eq!(outcome, expected, "{what}");
    let durable = partition.durable_end();
    assert!(outcome == Outcome::Stops || durable == end, "{what}: {durable} of {end} are durable after a sync");
    assert!(topic.durability != Durability::Durable || durable >= end, "{what}: {durable} of {end} are durable");
    assert_survives(disk, (broker, partition), backend, durable, end + 1);
}

#[test]
fn one_failure_at_a_roll_loses_nothing() {
    use Outcome::{Nothing, Refused, Stops};
    let cases = [
        (Op::Create, ".log", EIO, Refused),
        (Op::Create, ".log", ENOSPC, Refused),
        (Op::Create, ".log", EMFILE, Refused),
        (Op::Create, ".index", ENOSPC, Nothing),
        (Op::SyncDir, "/0", EIO, Stops),
        (Op::SyncDir, "/0", ENOSPC, Refused),
        (Op::SetLen, FIRST_LOG, EIO, Stops),
        (Op::Sync, FIRST_LOG, EIO, Stops),
        (Op::Allocate, ".log", ENOSPC, Refused),
        // That is no want of room, but nothing was written either.
        (Op::Allocate, ".log", EIO, Refused),
    ];
    for (on, suffix, errno, expected) in cases {
        each_level(|disk, backend, topic| {
            let topic = TopicConfig { segment_bytes: 5000, ..topic.clone() };
            at_a_roll(disk, backend, &topic, 40, Fault::once(on, suffix, errno), expected);
        });
    }
}

#[test]
fn one_failure_at_a_roll_to_a_segment_that_was_made_ahead_loses_nothing() {
    use Outcome::{Nothing, Refused, Stops};
    let cases = [
        (Op::Create, "prepared.log", EIO, Nothing),
        (Op::Create, "prepared.timeindex", ENOSPC, Nothing),
        (Op::Allocate, "prepared.log", ENOSPC, Nothing),
        (Op::Sync, "prepared.log", EIO, Nothing),
        (Op::Rename, ".log", EIO, Refused),
        (Op::Rename, ".log", ENOSPC, Refused),
        (Op::Rename, ".index", EIO, Nothing),
        (Op::SyncDir, "/0", EIO, Stops),
        (Op::SetLen, FIRST_LOG, EIO, Stops),
    ];
    for (on, suffix, errno, expected) in cases {
        each_backend(|backend| {
            let Some(mut disk) = FuseDisk::new() else { return };
            let topic = TopicConfig { preallocate_bytes: 1 << 20, commit_bytes: 1 << 18, ..tiny(1 << 20) };
            at_a_roll(&mut disk, backend, &topic, 900, Fault::once(on, suffix, errno), expected);
        });
    }
}

#[test]
fn b115_a_full_disk_with_a_torn_tail_and_no_index_can_be_read() {
    each_level(|disk, backend, topic| {
        torn_on_a_full_disk(disk, backend, topic, b"half a record, and not more of it");
        let broker = open(&disk.data(), backend, topic);
        let partition = partition_of(&broker);
        assert!(contents(&read_all(&partition)) == records(0..5));
        let error = try_append(&partition, 5).unwrap_err();
        assert!(matches!(error, Error::DiskFull { .. }), "{error}");
        assert!(contents(&read_all(&partition)) == records(0..5));
        disk.clear_faults();
        append_durably(&partition, 5..8);
        assert_survives(disk, (broker, partition), backend, 8, 8);
    });
}

#[test]
fn a_torn_tail_with_a_whole_record_is_not_cut_before_there_is_room_for_a_copy() {
    each_level(|disk, backend, topic| {
        let tail = [vec![0xFF; 40], encode(5, BASE_TIME, b"key", b"value")].concat();
        torn_on_a_full_disk(disk, backend, topic, &tail);
        let dir = partition_dir(&disk.data());
        let before = bytes_in(&dir);
        let refused = Broker::open(disk.data(), config(backend, topic.clone())).unwrap_err();
        assert!(refused.is_disk_full(), "{refused}");
        assert!(bytes_in(&dir) == before, "refused, and changed something");
        disk.clear_faults();
        let report = report_of(&open(&disk.data(), backend, topic));
        let copy = fs::read(report.torn_tail.unwrap().copy.unwrap()).unwrap();
        assert!(copy == tail, "what was cut is not what was copied");
        assert_opens(disk, backend, 5, 8);
    });
}

#[test]
fn b023_damage_in_a_sealed_segment_takes_nothing_along_on_a_full_disk() {
    each_level(|disk, backend, topic| {
        let topic = TopicConfig { segment_bytes: 1000, ..topic.clone() };
        let (broker, partition) = with_records(disk, backend, &topic, 20);
        drop(partition);
        broker.close().unwrap();
        let dir = partition_dir(&disk.data());
        let damaged = Target::number(&dir, 2);
        damaged.damage("flip-crc", &damaged.records[0]);
        // Indexes are missing in front of it and behind, and no checkpoint lets opening pass them by.
        for segment in [0, 2, 3] {
            fs::remove_file(segment_path(&dir, bases(&dir)[segment], "index")).unwrap();
        }
        fs::remove_file(dir.join("checkpoint")).unwrap();
        let logs = || bases(&dir).into_iter().map(|base| (base, fs::read(segment_path(&dir, base, "log")).unwrap())).collect::<Vec<_>>();
        let before = logs();
        assert!(before.len() >= 6);
        for on in [Op::Write, Op::Allocate, Op::Create] {
            disk.fail(Fault::always(on, "", ENOSPC));
        }
        let assert_readable = |broker: &Broker| {
            let partition = partition_of(broker);
            let lost = (0..20).filter(|&offset| match partition.read_one(offset) {
                Ok(found) => {
                    assert!((found.key.to_vec(), found.value.to_vec()) == record(offset));
                    false
                }
                Err(error) => {
                    assert!(error.is_damage(), "{error}");
                    true
                }
            });
            assert_eq!(lost.collect::<Vec<_>>(), [damaged.base]);
        };
        assert_readable(&open(&disk.data(), backend, &topic));
        assert!(logs() == before, "without room");
        disk.clear_faults();
        let broker = open(&disk.data(), backend, &topic);
        assert_readable(&broker);
        assert_eq!(try_append(&partition_of(&broker), 20).unwrap(), 20);
        broker.close().unwrap();
        assert!(logs()[..before.len() - 1] == before[..before.len() - 1], "and with");
    });
}

/// Five records, a torn tail behind them, no index, and no room.
fn torn_on_a_full_disk(disk: &mut FuseDisk, backend: Backend, topic: &TopicConfig, tail: &[u8]) {
    let (broker, partition) = with_records(disk, backend, topic, 5);
    let survivor = disk.survivor();
    drop((partition, broker));
    disk.restart_with(survivor);
    harm(&partition_dir(&disk.data()), tail);
    for on in [Op::Write, Op::Allocate, Op::Create] {
        disk.fail(Fault::always(on, "", ENOSPC));
    }
}

/// Puts a torn tail behind the log's records, and removes its index.
fn harm(dir: &Path, tail: &[u8]) {
    let end = check(dir).next_position;
    let log = fs::OpenOptions::new().write(true).open(segment_path(dir, 0, "log")).unwrap();
    log.write_all_at(tail, end).unwrap();
    log.sync_all().unwrap();
    fs::remove_file(segment_path(dir, 0, "index")).unwrap();
    fs::File::open(dir).unwrap().sync_all().unwrap();
}
