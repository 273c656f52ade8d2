//! Checkpoints: what opening need not read, what is damage and what a torn tail, and that no record ever depends on them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use sapwood::clock::Clock;
use sapwood::io::Disk;
use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::{Backend, Broker, BrokerConfig, Durability, Error, OnDamage, Partition, PartitionReport, Recovery, Result, TopicConfig};

use crate::child::append_and_kill;
use crate::format::{self, BASE_TIME, Layout, SLOT, Slot, segment_path};
use crate::oracle::{assert_closed, assert_sound, check_files};
use crate::sim::{self, DATA, EIO, ENOSPC, dir, tiny};
use crate::support::{
    Row, TOPIC, TestClock, append, assert_in_order, config, contents, copy_dir, create, data_with_demo, each_backend, fixture, open,
    partition_dir, partition_of, read_all, report_of, rows_of, scratch, seed, segments_of, small, snapshot,
};

const DEMO: &str = "demo-36-segment-270";

/// Through the page cache, where nothing but records is written.
fn cached(segment_bytes: u64) -> TopicConfig {
    TopicConfig { durability: Durability::Os, ..tiny(segment_bytes) }
}

/// What is asked of an opening.
#[derive(Clone, Copy, Debug)]
pub struct Ask(Recovery, OnDamage);

pub const USUAL: Ask = Ask(Recovery::FromCheckpoint, OnDamage::Refuse);
pub const CUT: Ask = Ask(Recovery::FromCheckpoint, OnDamage::CutAside);
pub const FULL: Ask = Ask(Recovery::FullScan, OnDamage::Refuse);
const FULL_CUT: Ask = Ask(Recovery::FullScan, OnDamage::CutAside);

pub fn asked(ask: Ask, backend: Backend, fallback: &TopicConfig) -> BrokerConfig {
    BrokerConfig { recovery: ask.0, on_damage: ask.1, ..config(backend, fallback.clone()) }
}

pub fn open_sim(sim: &SimDisk, ask: Ask, fallback: &TopicConfig) -> Result<Broker> {
    let clock: Arc<dyn Clock> = Arc::new(TestClock::at(BASE_TIME));
    Broker::open_on(Arc::new(sim.clone()), clock, DATA, asked(ask, Backend::Auto, fallback))
}

/// The demo's record of that number begins there, if all lie in one segment.
const BYTES: u64 = 45;

/// A sound checkpoint of a partition of demo records in one segment, at record `at` and so many index entries.
fn at(at: u64, entries: u64) -> Slot {
    let last_timestamp = BASE_TIME + at.saturating_sub(1) * 1_000_000;
    Slot { sequence: 5, base: 0, position: at * BYTES, next_offset: at, last_timestamp, entries, clean: false }
}

/// A disk with demo records in one segment, preallocated, and a checkpoint file.
fn demo_disk(records: u64, checkpoint: &[u8]) -> SimDisk {
    let made = scratch();
    format::write_partition(made.path(), &format::demo(records), Layout { prealloc: 1 << 10, ..Layout::default() });
    fs::write(made.path().join("checkpoint"), checkpoint).unwrap();
    let sim = SimDisk::new(1);
    sim.import(made.path(), &dir()).unwrap();
    sim
}

fn log() -> std::path::PathBuf {
    segment_path(&dir(), 0, "log")
}

/// The bytes of all files of the partition.
fn files(sim: &SimDisk) -> BTreeMap<OsString, Vec<u8>> {
    let names = sim.clone().list(&dir()).unwrap().into_iter().map(|entry| entry.name);
    names.map(|name| (name.clone(), sim.read_file(&dir().join(name)))).collect()
}

/// Where logs were read since the operations were last forgotten.
fn reads(sim: &SimDisk) -> Vec<(String, u64, u64)> {
    let is_log = |path: &Path| path.extension().is_some_and(|extension| extension == "log");
    let ops = sim.ops().into_iter().filter(|op| op.kind == OpKind::Read && is_log(&op.path));
    ops.map(|op| (op.path.file_name().unwrap().to_str().unwrap().to_owned(), op.position, op.len)).collect()
}

/// Leaves that slot of the checkpoint file unsound.
fn harm_slot(sim: &SimDisk, slot: usize) {
    let place = slot * SLOT + 20;
    let byte = sim.read_file(&dir().join("checkpoint"))[place];
    sim.overwrite(&dir().join("checkpoint"), place as u64, &[byte ^ 1]);
}

fn now(sim: &SimDisk) -> Slot {
    sim::checkpoint(sim).unwrap()
}

fn fill(partition: &Partition, records: std::ops::Range<u64>) {
    for number in records {
        append(partition, format!("user-{}", number % 7).as_bytes(), format!("value-{number:05}").as_bytes());
    }
}

// ---------------------------------------------------------------- what is not read

#[test]
fn after_a_clean_close_no_log_is_read_and_nothing_written() {
    for durability in [Durability::Durable, Durability::Os] {
        // Records, and bytes of a segment.
        for (records, segment_bytes) in [(0, 270), (1, 270), (6, 270), (40, 270), (300, 1 << 20)] {
            for index_interval in [1, 7] {
                let settings = TopicConfig { durability, index_interval, ..tiny(segment_bytes) };
                let sim = SimDisk::new(seed());
                let broker = open_sim(&sim, USUAL, &settings).unwrap();
                broker.create_topic(TOPIC, settings.clone()).unwrap();
                fill(&partition_of(&broker), 0..records);
                broker.close().unwrap();
                let closed = sim::assert_closed(&sim, index_interval.into());
                let last = closed.segments.last().unwrap();
                let last_timestamp = closed.records.last().map_or(0, |record| record.timestamp);
                assert!(now(&sim).clean);
                assert_eq!((now(&sim).base, now(&sim).position, now(&sim).next_offset), (last.base, last.log_len, records));
                assert_eq!((now(&sim).last_timestamp, now(&sim).entries), (last_timestamp, last.records.div_ceil(index_interval.into())));

                // A power loss takes nothing of it.
                sim.power_loss_keeping_nothing();
                let before = files(&sim);
                sim.clear_ops();
                let broker = open_sim(&sim, USUAL, &settings).unwrap();
                let report = report_of(&broker);
                assert!(report.from_checkpoint && report.scanned_bytes == 0, "{report:?}");
                assert_eq!((report.next_offset, report.segments), (records, closed.segments.len()));
                assert_eq!(reads(&sim), []);
                let changed: Vec<_> =
                    sim.ops().into_iter().filter(|op| op.kind.changes_state() && op.path.starts_with(dir()) && op.path != dir()).collect();
                assert!(changed.is_empty(), "{changed:?}");
                assert_eq!(read_all(&partition_of(&broker)), crate::support::rows(&closed.records));
                broker.close().unwrap();
                assert!(files(&sim) == before);

                // There is an older slot from the start. It may speak of the segment before.
                for slot in 0..2 {
                    let sim = sim.fork(1);
                    harm_slot(&sim, slot);
                    let broker = open_sim(&sim, USUAL, &settings).unwrap();
                    assert!(report_of(&broker).from_checkpoint || closed.segments.len() > 1);
                    assert_eq!(read_all(&partition_of(&broker)), crate::support::rows(&closed.records));
                }

                // And it goes on, at a time that is not before the last record's.
                let clock = Arc::new(TestClock::at(BASE_TIME / 2));
                let broker = Broker::open_on(Arc::new(sim.clone()), clock, DATA, config(Backend::Auto, settings)).unwrap();
                fill(&partition_of(&broker), records..records + 10);
                partition_of(&broker).sync().unwrap();
                let rows = read_all(&partition_of(&broker));
                assert_in_order(&rows, 0);
                assert_eq!(contents(&rows), contents(&rows_of(&format::demo(records + 10), 0)));
                broker.close().unwrap();
                sim::assert_closed(&sim, index_interval.into());
            }
        }
    }
}

#[test]
fn a_clean_close_on_a_real_disk_saves_the_scan_and_a_kill_costs_what_came_after() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        fill(&partition, 0..2000);
        drop(partition);
        broker.close().unwrap();
        let broker = open(data.path(), backend, &small());
        assert!(report_of(&broker).from_checkpoint && report_of(&broker).scanned_bytes == 0, "{:?}", report_of(&broker));
        drop(broker);

        let new: Vec<_> = (0..3).map(|number| (b"user-1".to_vec(), format!("value-{number:05}").into_bytes())).collect();
        assert_eq!(append_and_kill(data.path(), backend, &small(), &new), [2000, 2001, 2002]);
        let len = fs::metadata(segment_path(&partition_dir(data.path()), 0, "log")).unwrap().len();
        let broker = open(data.path(), backend, &small());
        let report = report_of(&broker);
        // The record before the checkpoint shows that the place is right; the rest of the file is records and room, and a window.
        assert!(report.from_checkpoint && report.scanned_bytes <= len - 1999 * BYTES + 4096, "{report:?}");
        assert_eq!(read_all(&partition_of(&broker)).len(), 2003);
        broker.close().unwrap();
        assert_closed(&partition_dir(data.path()), 1);

        let whole = Broker::open(data.path(), asked(FULL, backend, &small())).unwrap();
        let report = report_of(&whole);
        assert!(!report.from_checkpoint && report.scanned_bytes >= 2003 * BYTES, "{report:?}");
    });
}

#[test]
fn after_a_crash_only_what_lies_past_the_checkpoint_is_read() {
    for at_record in 0..=12u64 {
        for entries in 0..=at_record {
            for index in [0, entries, 12] {
                let sim = demo_disk(12, &at(at_record, entries).file(None));
                // Past the page cache whole blocks are read: through it, the log of less than one tells more.
                sim.refuse_direct(true);
                // The index files hold more or less than what is vouched for.
                for (extension, second) in [("index", 0u64), ("timeindex", 1)] {
                    let entry = |number: u64| {
                        format::entry(number, if second == 0 { number * BYTES } else { BASE_TIME + number * 1_000_000 }).to_vec()
                    };
                    sim.write_file(&segment_path(&dir(), 0, extension), &(0..index.max(entries)).flat_map(entry).collect::<Vec<_>>());
                }
                sim.clear_ops();
                let broker = open_sim(&sim, USUAL, &cached(1 << 20)).unwrap();
                let report = report_of(&broker);
                let fits = at_record == 0 || entries > 0;
                assert_eq!(report.from_checkpoint, fits, "{at_record}, {entries}");
                let from = if fits { entries.saturating_sub(1) * BYTES } else { 0 };
                let reads = reads(&sim);
                assert!(reads.iter().all(|(_, position, _)| *position >= from), "{at_record}, {entries}: {reads:?}");
                assert_eq!(report.scanned_bytes, reads.iter().map(|(_, _, len)| len).sum::<u64>());
                assert!(report.torn_tail.is_none() && report.damage.is_empty() && report.repaired.is_none(), "{report:?}");
                assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(12), 0));
                // Written down, so that an opening which follows a crash right now finds nothing to do.
                let noted = Slot { sequence: now(&sim).sequence, ..at(12, 12) };
                assert_eq!(now(&sim), noted, "{at_record}, {entries}");
                sim.crash_process();
                drop(broker);
                sim.clear_ops();
                let broker = open_sim(&sim, USUAL, &cached(1 << 20)).unwrap();
                assert!(self::reads(&sim).iter().all(|(_, position, _)| *position >= 11 * BYTES));
                assert_eq!(now(&sim), noted, "nothing is new");
                assert_eq!(append(&partition_of(&broker), b"user-5", b"value-00012"), 12);
                broker.close().unwrap();
                assert_eq!(sim::assert_closed(&sim, 1).next_offset, 13);
            }
        }
    }
}

#[test]
fn sealed_logs_before_the_checkpoint_are_not_read_and_those_behind_it_are() {
    for base in [0u64, 12, 30, 36] {
        let sim = sim::with_partition(1, &fixture(DEMO), |dir| {
            if base == 36 {
                // The last one is sealed as well, and the active one empty.
                for extension in ["log", "index", "timeindex"] {
                    fs::write(segment_path(dir, 36, extension), b"").unwrap();
                }
            }
        });
        let inside = if base == 36 { 0 } else { 3 };
        let last_timestamp = BASE_TIME + (base + 2) * 1_000_000;
        let slot = Slot { base, next_offset: base + inside, entries: inside, last_timestamp, ..at(inside, 0) };
        sim.write_file(&dir().join("checkpoint"), &slot.file(None));
        sim.clear_ops();
        let broker = open_sim(&sim, USUAL, &cached(270)).unwrap();
        let read: Vec<_> = reads(&sim).into_iter().map(|(name, ..)| name).collect();
        for other in (0..36).step_by(6) {
            assert_eq!(read.contains(&format!("{other:020}.log")), other >= base, "{base}, {other}: {read:?}");
        }
        assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(36), 0));
    }
    // One whose size or index does not fit is looked at as if there were no checkpoint.
    type Harm = fn(&Path);
    let harms: [(&str, Harm); 5] = [
        ("log", |path| fs::write(path, &fs::read(path).unwrap()[..200]).unwrap()),
        ("index", |path| fs::remove_file(path).unwrap()),
        ("timeindex", |path| fs::write(path, &fs::read(path).unwrap()[..80]).unwrap()),
        ("index", |path| fs::write(path, [0xff; 96]).unwrap()),
        ("log", |path| fs::write(path, b"").unwrap()),
    ];
    for (extension, harm) in harms {
        let sim = sim::with_partition(1, &fixture(DEMO), |dir| harm(&segment_path(dir, 12, extension)));
        let slot = Slot { base: 30, position: 270, next_offset: 36, entries: 6, clean: true, ..at(36, 0) };
        sim.write_file(&dir().join("checkpoint"), &slot.file(None));
        let broker = open_sim(&sim, USUAL, &cached(270)).unwrap();
        assert_eq!(report_of(&broker).damage.len(), usize::from(extension == "log"));
        assert!(extension == "log" || !report_of(&broker).rebuilt.is_empty(), "{:?}", report_of(&broker));
        assert_eq!(report_of(&broker).next_offset, 36);
    }
}

#[test]
fn zeros_behind_a_sealed_log_stop_no_reader() {
    each_backend(|backend| {
        let (data, dir) = data_with_demo(36, Layout { segment_bytes: 270, ..Layout::default() });
        for base in [0, 12, 24] {
            let path = segment_path(&dir, base, "log");
            fs::write(&path, [fs::read(&path).unwrap(), vec![0; 5000]].concat()).unwrap();
        }
        for _ in 0..3 {
            let broker = open(data.path(), backend, &segments_of(270));
            assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(36), 0));
            broker.close().unwrap();
        }
    });
}

// ---------------------------------------------------------------- damage and torn tails

/// Opens what is damaged: a torn tail past the checkpoint is cut; damage before it is refused with nothing changed, and cut when
/// that is asked for. `kept` records come before the flaw, and the damage shows to those who `see` it.
fn judge(sim: &SimDisk, kept: u64, checkpointed: u64, sees: [bool; 2], what: &str) {
    for (usual, cutting, sees) in [(USUAL, CUT, sees[0]), (FULL, FULL_CUT, sees[1])] {
        let sim = sim.fork(1);
        if !sees {
            let broker = open_sim(&sim, usual, &cached(1 << 20)).unwrap();
            let error = (0..12).find_map(|offset| partition_of(&broker).read_one(offset).err()).unwrap();
            assert!(error.is_damage(), "{what}: {error}");
            continue;
        }
        let before = files(&sim);
        let bytes = sim.read_file(&log());
        if kept >= checkpointed {
            let broker = open_sim(&sim, usual, &cached(1 << 20)).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(kept), 0), "{what}");
            let torn = crate::oracle::data_end(&bytes[(kept * BYTES) as usize..]) as u64;
            assert_eq!(report_of(&broker).torn_tail.map_or(0, |tail| tail.bytes), torn, "{what}");
            assert!(report_of(&broker).repaired.is_none());
            continue;
        }
        let error = open_sim(&sim, usual, &cached(1 << 20)).unwrap_err();
        let Error::Damaged { path, position, offset, .. } = &error else { panic!("{what}: {error}") };
        assert_eq!((path, *position, *offset), (&log(), kept * BYTES, kept), "{what}: {error}");
        assert!(files(&sim) == before, "{what}: refused, and changed");

        let broker = open_sim(&sim, cutting, &cached(1 << 20)).unwrap_or_else(|error| panic!("{what}: {error}"));
        let report = report_of(&broker);
        assert_eq!(report.repaired.unwrap().to_string(), error.to_string(), "{what}");
        assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(kept), 0), "{what}");
        let gone = &bytes[(kept * BYTES) as usize..];
        let gone = &gone[..crate::oracle::data_end(gone)];
        match report.torn_tail {
            None => assert!(gone.is_empty(), "{what}: {} bytes are nowhere", gone.len()),
            Some(tail) => assert!(sim.read_file(&tail.copy.unwrap()) == gone, "{what}: the copy is what was cut"),
        }
        // From now on there is nothing to complain of, whether it is closed or not, and whichever slot serves.
        sim.crash_process();
        drop(broker);
        for slot in 0..2 {
            let sim = sim.fork(1);
            harm_slot(&sim, slot);
            open_sim(&sim, USUAL, &cached(1 << 20)).unwrap_or_else(|error| panic!("{what}, slot {slot}: {error}"));
        }
        let broker = open_sim(&sim, FULL, &cached(1 << 20)).unwrap();
        let report = report_of(&broker);
        assert!(report.torn_tail.is_none() && report.repaired.is_none() && report.rebuilt.is_empty(), "{what}: {report:?}");
        broker.close().unwrap();
        let after = files(&sim);
        let broker = open_sim(&sim, USUAL, &cached(1 << 20)).unwrap();
        assert_eq!(report_of(&broker).next_offset, kept, "{what}");
        broker.close().unwrap();
        assert!(files(&sim) == after, "{what}: opening again changed something");
    }
}

#[test]
fn a_log_that_ends_before_the_checkpoint_is_damage_and_past_it_a_torn_tail_at_every_length() {
    for (clean, records, room) in [(false, 6, 0), (false, 6, 100), (true, 12, 0)] {
        let checkpoint = Slot { clean, ..at(records, records) };
        let whole = demo_disk(12, &checkpoint.file(Some(&Slot { sequence: 4, ..at(4, 4) })));
        let bytes = whole.read_file(&log());
        for len in 0..=12 * BYTES {
            let sim = whole.fork(1);
            sim.write_file(&log(), &[&bytes[..len as usize], &vec![0; room]].concat());
            judge(&sim, len / BYTES, records, [true; 2], &format!("{len} bytes of the log and {room} zeros"));
        }
    }
}

#[test]
fn every_flipped_byte_is_damage_before_the_checkpoint_and_a_torn_tail_past_it() {
    let whole = demo_disk(12, &at(6, 6).file(Some(&Slot { sequence: 4, ..at(4, 4) })));
    let bytes = whole.read_file(&log());
    for record in 0..12 {
        for byte in 0..BYTES {
            for mask in if byte < 28 { &[1u8, 0x80][..] } else { &[1u8][..] } {
                let place = record * BYTES + byte;
                let sim = whole.fork(1);
                let flipped = bytes[place as usize] ^ mask;
                sim.overwrite(&log(), place, &[flipped]);
                // A keylen that still fits is what the format cannot see.
                if check_files(&sim::files(&sim)).readable == 12 {
                    assert!(byte == 27, "byte {byte}");
                    continue;
                }
                // The usual opening reads from the last trusted entry on, which is that of record 5.
                judge(&sim, record, 6, [record >= 5, true], &format!("byte {byte} of record {record} flipped with {mask:#x}"));
            }
        }
    }
}

#[test]
fn damage_is_refused_and_cut_aside_on_a_real_disk() {
    each_backend(|backend| {
        for (len, flip) in [(0, None), (100, None), (270, None), (540, Some(45)), (540, Some(539 - 270))] {
            let (data, dir) = data_with_demo(12, Layout::default());
            fs::write(dir.join("checkpoint"), at(12, 12).file(None)).unwrap();
            let path = segment_path(&dir, 0, "log");
            let mut bytes = fs::read(&path).unwrap();
            bytes.truncate(len);
            if let Some(at) = flip {
                bytes[at] ^= 1;
            }
            fs::write(&path, &bytes).unwrap();
            let before = snapshot(&dir);
            let error = Broker::open(data.path(), asked(FULL, backend, &small())).unwrap_err();
            let kept = flip.unwrap_or(len) as u64 / BYTES;
            assert!(matches!(&error, Error::Damaged { offset, .. } if *offset == kept) && error.is_damage(), "{error}");
            assert!(snapshot(&dir) == before, "refused, and changed");
            let broker = Broker::open(data.path(), asked(FULL_CUT, backend, &small())).unwrap();
            let report = report_of(&broker);
            assert!(report.repaired.is_some(), "{report:?}");
            if let Some(tail) = report.torn_tail {
                assert_eq!(fs::read(tail.copy.unwrap()).unwrap(), bytes[(kept * BYTES) as usize..crate::oracle::data_end(&bytes)]);
            }
            assert_eq!(append(&partition_of(&broker), b"k", b"v"), kept);
            broker.close().unwrap();
            assert_closed(&dir, 1);
            let broker = open(data.path(), backend, &small());
            assert!(report_of(&broker).repaired.is_none() && report_of(&broker).torn_tail.is_none());
            assert_eq!(read_all(&partition_of(&broker))[..kept as usize], rows_of(&format::demo(kept), 0));
        }
    });
}

// ---------------------------------------------------------------- checkpoints that are not sound, or not true

fn assert_all_there(sim: &SimDisk, expected: u64, what: &str) -> PartitionReport {
    let broker = open_sim(sim, USUAL, &cached(1 << 20)).unwrap_or_else(|error| panic!("{what}: {error}"));
    let report = report_of(&broker);
    assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(expected), 0), "{what}");
    assert_eq!(append(&partition_of(&broker), b"k", b"v"), expected, "{what}");
    broker.close().unwrap();
    sim::assert_closed(sim, 1);
    report
}

#[test]
fn a_flipped_byte_in_a_slot_leaves_the_older_one_or_nothing() {
    for clean in [false, true] {
        let (older, newer) = (Slot { sequence: 4, ..at(4, 4) }, Slot { clean, ..at(9, 9) });
        for (file, others) in [(newer.file(Some(&older)), true), (newer.file(None), false)] {
            for place in (0..2 * SLOT).filter(|place| place % SLOT < 100 || place % 61 == 0) {
                let mut file = file.clone();
                file[place] ^= 1 << (place % 8);
                let sim = demo_disk(12, &file);
                // Behind the checkpoint's room, a torn tail.
                let len = sim.read_file(&log()).len();
                sim.overwrite(&log(), 12 * BYTES, &vec![7; len - 12 * BYTES as usize]);
                let report = assert_all_there(&sim, 12, &format!("byte {place} flipped"));
                assert!(report.torn_tail.is_some());
                let harmed = place % SLOT < 68 && (others || place >= SLOT);
                let trusted = match (harmed, place >= SLOT) {
                    (true, true) => {
                        if others {
                            4
                        } else {
                            0
                        }
                    }
                    _ => 9,
                };
                assert_eq!(report.from_checkpoint, trusted > 0, "byte {place}");
                assert_eq!(report.scanned_bytes, len as u64 - trusted.max(1) * BYTES + BYTES, "byte {place}");
            }
        }
    }
}

#[test]
fn a_torn_write_of_a_slot_leaves_the_older_one() {
    let (oldest, older, newer) = (Slot { sequence: 3, ..at(3, 3) }, Slot { sequence: 4, ..at(6, 6) }, at(9, 9));
    let (before, after) = (older.file(Some(&oldest)), newer.file(Some(&older)));
    for cut in (0..=2 * SLOT).step_by(512) {
        for file in [[&before[..cut], &after[cut..]].concat(), [&after[..cut], &before[cut..]].concat()] {
            for len in [cut, 2 * SLOT] {
                let sim = demo_disk(12, &file[..len]);
                let report = assert_all_there(&sim, 12, &format!("torn at {cut}, {len} bytes long"));
                assert!(report.from_checkpoint || len == 0, "torn at {cut}, {len} bytes long");
            }
        }
    }
}

#[test]
fn a_checkpoint_that_is_not_of_this_log_loses_no_record_and_makes_none() {
    let demo = sim::with_partition(1, &fixture(DEMO), |_| {});
    let mut refused = 0;
    for base in [0, 7, 24, 30, 36, u64::MAX] {
        for position in [0, 1, 45, 225, 269, 270, 271, 1 << 40, u64::MAX] {
            for next_offset in [0, 30, 31, 35, 36, 37, u64::MAX] {
                for entries in [0, 5, 6, 7, 1 << 60, u64::MAX].into_iter().filter(|&entries| base == 30 || entries == 6) {
                    for clean in [false, true] {
                        let slot =
                            Slot { sequence: 6, base, position, next_offset, last_timestamp: BASE_TIME + 35_000_000, entries, clean };
                        let sim = demo.fork(1);
                        sim.write_file(&dir().join("checkpoint"), &slot.file(None));
                        let before = files(&sim);
                        match open_sim(&sim, USUAL, &cached(270)) {
                            Ok(broker) => {
                                let report = report_of(&broker);
                                assert!(report.torn_tail.is_none() && report.damage.is_empty() && report.repaired.is_none(), "{slot:?}");
                                assert_eq!(report.next_offset, 36, "{slot:?}");
                                assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(36), 0), "{slot:?}");
                                // What was not true is not left to mislead a later opening.
                                let now = now(&sim);
                                let true_at =
                                    |now: Slot| now.base != 30 || (now.position, now.next_offset) == (270, 36) || now.position < 270;
                                assert!(true_at(now), "{slot:?}: {now:?}");
                            }
                            Err(error) => {
                                let is_short = if base == 30 { position > 270 } else { next_offset > 36 };
                                assert!(is_short, "{slot:?}: {error}");
                                assert!(error.is_damage() && files(&sim) == before, "{slot:?}: {error}");
                                refused += 1;
                            }
                        }
                    }
                }
            }
        }
    }
    // Of the last segment by the place, of others by the offset.
    assert_eq!(refused, (3 * 7 * 6 + 5 * 9 * 2) * 2, "where less is there than was durable");
}

#[test]
fn a_log_that_grew_without_its_checkpoint_is_taken_as_it_is() {
    each_backend(|backend| {
        // An old checkpoint, clean or not, beside a log that went on: left by a tool that copied the logs only.
        for clean in [false, true] {
            for records in [1, 6, 7, 35] {
                let (data, dir) = data_with_demo(36, Layout::default());
                fs::write(dir.join("checkpoint"), Slot { clean, ..at(records, records) }.file(None)).unwrap();
                let broker = open(data.path(), backend, &small());
                assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(36), 0));
                assert!(report_of(&broker).from_checkpoint);
                broker.close().unwrap();
                assert_closed(&dir, 1);
            }
        }
    });
}

#[test]
fn a_checkpoint_of_files_that_are_gone_does_not_speak_of_their_successors() {
    let sim = demo_disk(12, &at(12, 12).file(Some(&Slot { sequence: 4, ..at(9, 9) })));
    sim.write_file(&Path::new(DATA).join(TOPIC).join("topic.json"), &serde_json::to_vec(&tiny(1 << 20)).unwrap());
    for extension in ["log", "index", "timeindex"] {
        sim.clone().remove_file(&segment_path(&dir(), 0, extension)).unwrap();
    }
    let before = files(&sim);
    let error = open_sim(&sim, USUAL, &cached(1 << 20)).unwrap_err();
    assert!(matches!(error, Error::RecordsMissing { from: 0, to: 12, .. }), "{error}");
    assert_eq!(files(&sim), before, "a refusal changes nothing");
    let broker = open_sim(&sim, CUT, &cached(1 << 20)).unwrap();
    assert!(report_of(&broker).repaired.is_some());
    assert_eq!(append(&partition_of(&broker), b"k", b"v"), 0);
    sim.crash_process();
    drop(broker);
    // Neither slot may remember what was.
    for slot in 0..2 {
        let sim = sim.fork(1);
        harm_slot(&sim, slot);
        let broker = open_sim(&sim, USUAL, &cached(1 << 20)).unwrap();
        assert_eq!(report_of(&broker).next_offset, 1);
    }
}

// ---------------------------------------------------------------- crashes and errors

#[test]
fn a_crash_at_any_step_of_an_opening_that_writes_a_checkpoint_harms_nothing() {
    let seed = seed();
    // A torn tail with whole records in it, past a checkpoint; the same before it; a log that is merely longer; none at all.
    let hole = |sim: SimDisk, record: u64| {
        sim.overwrite(&log(), record * BYTES, &[0; BYTES as usize]);
        sim
    };
    let older = Slot { sequence: 4, ..at(3, 3) };
    let cases = [
        ("a torn tail", hole(demo_disk(12, &at(6, 6).file(Some(&older))), 8), 8, USUAL),
        ("a longer log", demo_disk(12, &at(6, 6).file(Some(&older))), 12, USUAL),
        ("no checkpoint", hole(demo_disk(12, b""), 8), 8, USUAL),
        ("damage", hole(demo_disk(12, &at(9, 9).file(Some(&Slot { sequence: 4, ..at(8, 8) }))), 6), 6, FULL_CUT),
        ("damage at the end", hole(demo_disk(12, &at(9, 9).file(Some(&Slot { sequence: 4, ..at(8, 8) }))), 8), 8, CUT),
    ];
    for (name, damaged, kept, ask) in cases {
        let straight = damaged.fork(seed);
        let before = straight.state_changes();
        let broker = open_sim(&straight, ask, &cached(1 << 20)).unwrap();
        let points = straight.state_changes() - before;
        drop(broker);
        // One more: what was done to the end is durable.
        for point in 1..=points + 1 {
            for crash in sim::CRASHES {
                let what = format!("{name}: {crash} crash at operation {point} of {points}");
                let sim = damaged.fork(seed ^ point);
                sim.crash_at_op(point);
                let disturbed = open_sim(&sim, ask, &cached(1 << 20));
                if point == points + 1 {
                    // Without a close, which would do it all again.
                    sim::crash(&sim, "strict");
                }
                drop(disturbed);
                if point <= points {
                    sim::crash(&sim, crash);
                }
                // What the caller did not choose yet is refused still, or done already.
                let careful = sim.fork(seed);
                match open_sim(&careful, FULL, &cached(1 << 20)) {
                    Ok(broker) => assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(kept), 0), "{what}"),
                    Err(error) => {
                        let is_uncut = careful.read_file(&log()).len() as u64 > kept * BYTES;
                        assert!(ask.1 == OnDamage::CutAside && error.is_damage() && is_uncut, "{what}: {error}");
                    }
                }
                let broker = open_sim(&sim, ask, &cached(1 << 20)).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(read_all(&partition_of(&broker)), rows_of(&format::demo(kept), 0), "{what}");
                assert_eq!(append(&partition_of(&broker), b"k", b"v"), kept, "{what}");
                broker.close().unwrap();
                assert_eq!(sim::assert_closed(&sim, 1).next_offset, kept + 1, "{what}");
                let broker = open_sim(&sim, USUAL, &cached(1 << 20)).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(report_of(&broker).scanned_bytes == 0, "{what}");
            }
        }
    }
}

#[test]
fn a_crash_at_any_step_of_a_close_loses_nothing() {
    let seed = seed();
    let fresh = || {
        let sim = demo_disk(12, &at(9, 9).file(Some(&Slot { sequence: 4, ..at(8, 8) })));
        let broker = open_sim(&sim, USUAL, &tiny(1 << 20)).unwrap();
        fill(&partition_of(&broker), 12..15);
        (sim, broker)
    };
    let (sim, broker) = fresh();
    let before = sim.state_changes();
    broker.close().unwrap();
    let points = sim.state_changes() - before;
    assert!(points >= 6, "{points}");
    for point in 1..=points {
        for strict in [false, true] {
            let (sim, broker) = fresh();
            sim.crash_at_op(point);
            let _ = broker.close();
            if strict {
                sim.power_loss_keeping_nothing()
            } else {
                sim.power_loss()
            }
            let broker = open_sim(&sim, USUAL, &tiny(1 << 20)).unwrap_or_else(|error| panic!("seed {seed}, {point}: {error}"));
            assert_eq!(contents(&read_all(&partition_of(&broker))), contents(&rows_of(&format::demo(15), 0)), "{point}");
        }
    }
}

#[test]
fn index_files_are_vouched_for_only_when_they_are_durable() {
    for suffix in [".index", ".timeindex"] {
        for reopened in [false, true] {
            // On the close that seals them, or on the opening that mends them.
            let sim = if reopened { demo_disk(12, &at(6, 6).file(None)) } else { SimDisk::new(1) };
            let settings = tiny(1 << 20);
            let failing = Fault::next(OpKind::Sync, Effect::Error(EIO)).path(suffix);
            if reopened {
                for (extension, second) in [("index", 0), ("timeindex", BASE_TIME)] {
                    let step = if second == 0 { BYTES } else { 1_000_000 };
                    let entries: Vec<u8> = (0..6).flat_map(|number| format::entry(number, second + number * step)).collect();
                    sim.write_file(&segment_path(&dir(), 0, extension), &entries);
                }
                sim.fail(failing);
                drop(open_sim(&sim, USUAL, &settings).unwrap());
            } else {
                let broker = open_sim(&sim, USUAL, &settings).unwrap();
                broker.create_topic(TOPIC, settings.clone()).unwrap();
                fill(&partition_of(&broker), 0..12);
                sim.fail(failing);
                broker.close().unwrap();
                assert_eq!(now(&sim).entries, 0, "{suffix}");
            }
            sim.power_loss_keeping_nothing();
            let broker = open_sim(&sim, USUAL, &settings).unwrap();
            assert_eq!(report_of(&broker).next_offset, 12);
            broker.close().unwrap();
            sim::assert_closed(&sim, 1);
        }
    }
}

#[test]
fn a_full_scan_finds_what_a_checkpoint_passes_over_and_mends_it_durably() {
    let harmed = demo_disk(12, &Slot { clean: true, ..at(12, 12) }.file(None));
    harmed.write_file(&log(), &harmed.read_file(&log())[..(12 * BYTES) as usize]);
    harmed.overwrite(&segment_path(&dir(), 0, "index"), 3 * 16, &[0xff; 16]);
    for (ask, sees) in [(USUAL, false), (FULL, true)] {
        let sim = harmed.fork(1);
        let broker = open_sim(&sim, ask, &tiny(1 << 20)).unwrap();
        assert_eq!(!report_of(&broker).rebuilt.is_empty(), sees);
        // An index that lies is not believed in any case.
        for row in rows_of(&format::demo(12), 0) {
            assert_eq!(Row::from(partition_of(&broker).read_one(row.offset).unwrap()), row);
        }
        sim.power_loss_keeping_nothing();
        assert_eq!(check_files(&sim::files(&sim)).wrong().is_empty(), sees);
    }
}

#[test]
fn a_time_index_that_lies_at_the_checkpoint_puts_no_record_in_the_future() {
    let sim = demo_disk(12, &at(6, 6).file(None));
    sim.overwrite(&segment_path(&dir(), 0, "timeindex"), 5 * 16 + 8, &u64::MAX.to_be_bytes());
    let broker = open_sim(&sim, USUAL, &tiny(1 << 20)).unwrap();
    assert!(!report_of(&broker).from_checkpoint);
    assert_eq!(append(&partition_of(&broker), b"k", b"v"), 12);
    assert_eq!(partition_of(&broker).read_one(12).unwrap().timestamp, BASE_TIME + 11_000_000);
    broker.close().unwrap();
    sim::assert_closed(&sim, 1);
}

#[test]
fn a_checkpoint_that_cannot_be_read_or_written_costs_time_only() {
    for chance in [1_000_000, 400_000] {
        for kind in [OpKind::Open, OpKind::Create, OpKind::Read, OpKind::Write, OpKind::Sync, OpKind::SyncDir, OpKind::Len] {
            for errno in [EIO, ENOSPC] {
                for file in [at(6, 6).file(Some(&Slot { sequence: 4, ..at(4, 4) })), at(6, 6).file(None), Vec::new()] {
                    let sim = demo_disk(12, &file);
                    if file.is_empty() {
                        sim.clone().remove_file(&dir().join("checkpoint")).unwrap();
                    }
                    let suffix = if kind == OpKind::SyncDir { "no such directory" } else { "/checkpoint" };
                    sim.fail_by_chance(RandomFault {
                        on: kind,
                        path_suffix: Some(suffix.to_owned()),
                        per_million: chance,
                        effect: Effect::Error(errno),
                    });
                    let mut expected = 12;
                    for round in 0..4 {
                        let broker = open_sim(&sim, USUAL, &tiny(1 << 20)).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
                        assert!(report_of(&broker).ignored.is_empty());
                        assert_eq!(report_of(&broker).next_offset, expected, "{kind:?}");
                        fill(&partition_of(&broker), expected..expected + 3);
                        expected += 3;
                        if round % 2 == 0 {
                            broker.close().unwrap();
                        } else {
                            sim.power_loss();
                            drop(broker);
                        }
                    }
                    sim.clear_faults();
                    let broker = open_sim(&sim, USUAL, &tiny(1 << 20)).unwrap();
                    assert_eq!(contents(&read_all(&partition_of(&broker))), contents(&rows_of(&format::demo(expected), 0)), "{kind:?}");
                    broker.close().unwrap();
                    sim::assert_closed(&sim, 1);
                    assert!(now(&sim).clean, "{kind:?}");
                }
            }
        }
    }
}

#[test]
fn what_only_has_the_name_is_left_alone() {
    each_backend(|backend| {
        let makes: [fn(&Path); 4] = [
            |path| fs::write(path, b"another program's\n").unwrap(),
            |path| fs::write(path, [b'x'; 10_000]).unwrap(),
            |path| fs::create_dir(path).unwrap(),
            |path| std::os::unix::fs::symlink("elsewhere", path).unwrap(),
        ];
        for make in makes {
            let (data, dir) = data_with_demo(12, Layout::default());
            let path = dir.join("checkpoint");
            make(&path);
            let theirs = |data: &Path| snapshot(data).remove(&path).unwrap();
            let before = theirs(data.path());
            for expected in 12..15 {
                let broker = open(data.path(), backend, &small());
                assert_eq!(report_of(&broker).ignored, std::slice::from_ref(&path));
                assert_eq!(append(&partition_of(&broker), b"k", b"v"), expected);
                broker.close().unwrap();
                assert!(theirs(data.path()) == before);
            }
            assert!(!dir.join("elsewhere").exists());
            if path.is_file() {
                assert_closed(&dir, 1);
            }
        }
    });
}

#[test]
fn the_segments_files_alone_are_enough() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &segments_of(270));
        fill(&partition, 0..100);
        drop(partition);
        broker.close().unwrap();
        let dir = partition_dir(data.path());
        let rows = crate::support::rows(&assert_closed(&dir, 1).records);
        assert!(dir.join("checkpoint").exists(), "there is one to take away");
        for path in [dir.join("checkpoint"), data.path().join(TOPIC).join("topic.json"), data.path().join(".lock")] {
            fs::remove_file(path).unwrap();
        }
        let copy = scratch();
        copy_dir(data.path(), copy.path());
        let broker = open(copy.path(), backend, &segments_of(270));
        assert!(!report_of(&broker).from_checkpoint && report_of(&broker).scanned_bytes > 0);
        assert_eq!(read_all(&partition_of(&broker)), rows);
        broker.close().unwrap();
        assert_sound(&partition_dir(copy.path()));
        assert!(rows.iter().map(|row: &Row| row.offset).eq(0..100));
    });
}

#[test]
fn a_checkpoint_is_deleted_with_its_topic() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        fill(&partition, 0..3);
        drop(partition);
        broker.close().unwrap();
        // As a deletion leaves it that was interrupted.
        fs::rename(data.path().join(TOPIC), data.path().join(format!(".del-{TOPIC}"))).unwrap();
        let broker = open(data.path(), backend, &small());
        assert_eq!(broker.report().removed, [data.path().join(format!(".del-{TOPIC}"))]);
        broker.create_topic(TOPIC, small()).unwrap();
        fill(&partition_of(&broker), 0..3);
        broker.delete_topic(TOPIC).unwrap();
        assert!(broker.topics().is_empty());
        broker.close().unwrap();
    });
}
