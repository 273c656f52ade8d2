//! Logs past 4 GiB: positions are 64 bits wide from end to end. Cases B154 and B155.
//!
//! The logs are sparse: records of gigabytes of zeros, which take no room, stand before the real ones behind 4 GiB.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sapwood::io::sim::SimDisk;
use sapwood::io::{Disk, Open};
use sapwood::{Broker, Durability, Partition, ReadMode, ReaderConfig, TopicConfig, Visibility};

use crate::format::{BASE_TIME, ENTRY, HEADER, Slot, crc, encode, entry, segment_path};
use crate::sim;
use crate::support::{
    append, assert_in_order, contents, each_backend, open, partition_dir, partition_of, read_up_to, report_of, scratch, seed, small,
};

const GIB: u64 = 1 << 30;

/// The last record of each giant.
const REAL: (&[u8], &[u8]) = (b"behind", b"a record behind gigabytes of zeros");

/// A segment whose records begin at the places asked for, and end with [`REAL`].
struct Giant {
    /// What is not zero of the log.
    parts: Vec<(u64, Vec<u8>)>,
    len: u64,
    records: u64,
    index: Vec<u8>,
    timeindex: Vec<u8>,
    checkpoint: Vec<u8>,
}

/// The CRC of so many zeros, by halves.
fn zeros(count: u64) -> crc32fast::Hasher {
    let mut hasher = crc32fast::Hasher::new();
    if count <= 1 << 16 {
        hasher.update(&vec![0; count as usize]);
        return hasher;
    }
    let half = zeros(count / 2);
    hasher.combine(&half);
    hasher.combine(&half);
    hasher.update(&vec![0; (count % 2) as usize]);
    hasher
}

impl Giant {
    /// The first record begins at 0, the others there.
    fn of(places: &[u64]) -> Self {
        let (mut parts, mut index, mut timeindex) = (Vec::new(), Vec::new(), Vec::new());
        let (mut at, time) = (0, |offset| BASE_TIME + offset);
        let records = places.len() as u64 + 1;
        for (offset, &next) in (0..).zip(places) {
            let size = u32::try_from(next - at - HEADER as u64).unwrap();
            let mut header = encode(offset, time(offset), b"", b"");
            let mut hasher = crc32fast::Hasher::new();
            hasher.update(&time(offset).to_be_bytes());
            hasher.combine(&zeros(size.into()));
            header[8..12].copy_from_slice(&size.to_be_bytes());
            header[12..16].copy_from_slice(&hasher.finalize().to_be_bytes());
            parts.push((at, header));
            index.extend(entry(offset, at));
            timeindex.extend(entry(offset, time(offset)));
            at = next;
        }
        let real = encode(records - 1, time(records - 1), REAL.0, REAL.1);
        let len = at + real.len() as u64;
        index.extend(entry(records - 1, at));
        timeindex.extend(entry(records - 1, time(records - 1)));
        parts.push((at, real));
        let slot = Slot {
            sequence: 0,
            base: 0,
            position: len,
            next_offset: records,
            last_timestamp: time(records - 1),
            entries: records,
            clean: true,
        };
        Self { parts, len, records, index, timeindex, checkpoint: slot.file(None) }
    }

    fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        let log = fs::File::create(segment_path(dir, 0, "log")).unwrap();
        for (at, bytes) in &self.parts {
            log.write_all_at(bytes, *at).unwrap();
        }
        log.sync_all().unwrap();
        assert_eq!(log.metadata().unwrap().len(), self.len);
        fs::write(segment_path(dir, 0, "index"), &self.index).unwrap();
        fs::write(segment_path(dir, 0, "timeindex"), &self.timeindex).unwrap();
        fs::write(dir.join("checkpoint"), &self.checkpoint).unwrap();
    }

    fn on_a_simulated_disk(&self) -> SimDisk {
        let sim = SimDisk::new(seed());
        let dir = sim::dir();
        sim.make_dirs(&dir);
        for (name, bytes) in [("index", &self.index), ("timeindex", &self.timeindex)] {
            sim.write_file(&segment_path(&dir, 0, name), bytes);
        }
        sim.write_file(&dir.join("checkpoint"), &self.checkpoint);
        let disk = sim.clone();
        let log = disk.open(&segment_path(&dir, 0, "log"), Open::NEW).unwrap();
        for (at, bytes) in &self.parts {
            assert_eq!(log.write_at(bytes, *at, false).unwrap(), bytes.len());
        }
        log.sync().unwrap();
        disk.sync_dir(&dir).unwrap();
        assert_eq!(log.len().unwrap(), self.len);
        sim
    }
}

/// Where the records behind the first begin, the last around 2^32, where positions would wrap, or behind it. A look-up of a
/// time reads the first of a segment and those beside what it finds whole: these are small.
fn places() -> Vec<Vec<u64>> {
    let edge = 1 << 32;
    let mut all: Vec<_> = [edge - 16, edge - 1, edge, edge + 1].map(|place| vec![100, place, place + 60]).into();
    all.push(vec![100, 4 * GIB - 10, 5 * GIB - 30, 5 * GIB + 7]);
    all
}

/// Appends some records behind a giant's, and reads them back in all ways. Gives where each begins, and the last ends.
fn goes_on_behind(giant: &Giant, partition: &Partition) -> Vec<u64> {
    let last = giant.records - 1;
    let read = partition.read_one(last).unwrap();
    assert_eq!((&read.key[..], &read.value[..], read.timestamp), (REAL.0, REAL.1, BASE_TIME + last));
    let large = vec![7; 100_000];
    let new: [(&[u8], &[u8]); 4] = [(b"one", b"1"), (b"two", &large), (b"", b""), (b"four", b"4")];
    let mut ends = vec![giant.len];
    for (offset, (key, value)) in (giant.records..).zip(new) {
        assert_eq!(append(partition, key, value), offset);
        ends.push(ends.last().unwrap() + (HEADER + key.len() + value.len()) as u64);
    }
    partition.sync().unwrap();
    let expected: Vec<_> = [REAL].iter().chain(&new).map(|(key, value)| (key.to_vec(), value.to_vec())).collect();
    for from in last..last + 5 {
        let rows = read_up_to(partition, Visibility::Durable, from, 1 << 20);
        assert_in_order(&rows, from);
        assert!(contents(&rows) == expected[(from - last) as usize..], "from {from} on");
    }
    for mode in [ReadMode::Buffered, ReadMode::Direct] {
        let mut reader = partition.reader_with(ReaderConfig::by(mode)).unwrap();
        for offset in (last..last + 5).rev() {
            assert_eq!(reader.read_one(offset).unwrap().value, expected[(offset - last) as usize].1);
        }
    }
    let mut tail = partition.tail(last).unwrap();
    for offset in last..last + 5 {
        assert_eq!(tail.next_record(None).unwrap().unwrap().offset, offset);
    }
    assert_eq!(partition.offset_for_time(BASE_TIME + last).unwrap(), last);
    assert_eq!(partition.offset_for_time(BASE_TIME + last + 1).unwrap(), last + 1);
    ends
}

/// The index leads to the records, and nothing of the log's beginning was written over.
fn assert_files(giant: &Giant, ends: &[u64], log: impl Fn(u64, usize) -> Vec<u8>, len: u64, index: &[u8]) {
    assert_eq!(len, *ends.last().unwrap());
    for (at, bytes) in &giant.parts {
        assert!(log(*at, bytes.len()) == *bytes, "the bytes at {at} were changed");
    }
    let mut entries = giant.index.clone();
    for (offset, place) in (giant.records..).zip(&ends[..ends.len() - 1]) {
        entries.extend(entry(offset, *place));
        assert_eq!(log(*place, 8), offset.to_be_bytes(), "no record begins where the index leads");
    }
    assert!(index == entries, "{:?}", index.chunks(ENTRY).collect::<Vec<_>>());
    // Between the giants' headers and the records behind there are zeros still.
    for at in [4096, 1 << 20, GIB, 2 * GIB + 12_345] {
        assert!(log(at, 4096).iter().all(|byte| *byte == 0), "something was written to {at}");
    }
}

fn settings(durability: Durability) -> TopicConfig {
    TopicConfig { segment_bytes: 8 * GIB, durability, ..small() }
}

#[test]
fn b154_records_behind_four_gib_are_found_appended_and_read() {
    each_backend(|backend| {
        for (places, durability) in places().iter().zip([Durability::Durable, Durability::Os].into_iter().cycle()) {
            eprintln!("{places:?}, {durability:?}");
            let giant = Giant::of(places);
            let data = scratch();
            let dir = partition_dir(data.path());
            giant.write(&dir);
            let topic = settings(durability);
            let broker = open(data.path(), backend, &topic);
            let report = report_of(&broker);
            assert_eq!((report.next_offset, report.scanned_bytes, report.from_checkpoint), (giant.records, 0, true), "{report:?}");
            let partition = partition_of(&broker);
            let ends = goes_on_behind(&giant, &partition);
            drop(partition);
            broker.close().unwrap();
            let log = fs::File::open(segment_path(&dir, 0, "log")).unwrap();
            let bytes = |at, len| {
                let mut bytes = vec![0; len];
                log.read_exact_at(&mut bytes, at).unwrap();
                bytes
            };
            assert_files(&giant, &ends, bytes, log.metadata().unwrap().len(), &fs::read(segment_path(&dir, 0, "index")).unwrap());
            let broker = open(data.path(), backend, &topic);
            assert_eq!(report_of(&broker).next_offset, giant.records + 4);
            assert_eq!(partition_of(&broker).read_one(giant.records + 3).unwrap().value, b"4"[..]);
        }
    });
}

/// Opens a giant on the simulated disk.
fn open_simulated(sim: &SimDisk, topic: &TopicConfig) -> (Broker, Partition) {
    let broker = sim::try_open(sim, topic).unwrap();
    let partition = partition_of(&broker);
    (broker, partition)
}

#[test]
fn b155_crashes_and_torn_tails_behind_four_gib_are_recovered_from() {
    for places in places() {
        for crash in sim::CRASHES {
            eprintln!("{places:?}, {crash}");
            let giant = Giant::of(&places);
            let sim = giant.on_a_simulated_disk();
            let topic = settings(Durability::Durable);
            let (broker, partition) = open_simulated(&sim, &topic);
            let ends = goes_on_behind(&giant, &partition);
            drop((partition, broker));
            sim::crash(&sim, crash);
            // A record that was torn.
            let end = *ends.last().unwrap();
            let torn = encode(giant.records + 4, BASE_TIME * 2, b"torn", &[9; 500]);
            sim.overwrite(&segment_path(&sim::dir(), 0, "log"), end, &torn[..300]);
            let (broker, partition) = open_simulated(&sim, &topic);
            let report = report_of(&broker);
            let cut = report.torn_tail.as_ref().expect("the torn record is told of");
            assert_eq!((cut.position, cut.bytes, report.next_offset), (end, 300, giant.records + 4), "{report:?}");
            assert!(report.scanned_bytes < 16 << 20, "{report:?}");
            assert_eq!(append(&partition, b"k", b"after the crash"), giant.records + 4);
            assert_eq!(partition.read_one(giant.records + 4).unwrap().value, b"after the crash"[..]);
            assert_eq!(partition.read_one(giant.records + 3).unwrap().value, b"4"[..]);
            drop(partition);
            broker.close().unwrap();
            let len = sim.clone().open(&segment_path(&sim::dir(), 0, "log"), Open::READ).unwrap().len().unwrap();
            assert_eq!(len, end + (HEADER + 1 + 15) as u64);
        }
    }
}

#[test]
fn b155_a_segment_ends_where_it_should_behind_four_gib_and_is_scanned_whole() {
    let giant = Giant::of(&[100, (1 << 32) + 1]);
    for spare in [0, 1] {
        let sim = giant.on_a_simulated_disk();
        // One more record fits, to the byte, or misses it by one.
        let fits = (HEADER + 1 + 100) as u64;
        let topic = TopicConfig { segment_bytes: giant.len + fits - spare, ..small() };
        // Nobody vouches for the log: all of it is read.
        let disk = sim.clone();
        disk.remove_file(&sim::dir().join("checkpoint")).unwrap();
        let (broker, partition) = open_simulated(&sim, &topic);
        let report = report_of(&broker);
        assert_eq!((report.next_offset, report.torn_tail.is_none()), (3, true), "{report:?}");
        assert!(report.scanned_bytes >= giant.len, "{report:?}");
        for offset in 3..6 {
            assert_eq!(append(&partition, b"k", &[7; 100]), offset);
        }
        assert_eq!(partition.stats().rolls, 1);
        assert_eq!(partition.read_one(3).unwrap().value, [7; 100][..]);
        let rows = read_up_to(&partition, Visibility::Durable, 2, 1 << 20);
        assert_in_order(&rows, 2);
        assert_eq!(rows.len(), 4);
        drop(partition);
        broker.close().unwrap();
        let dir = sim::dir();
        let len = |base| sim.clone().open(&segment_path(&dir, base, "log"), Open::READ).unwrap().len().unwrap();
        assert_eq!((len(0), len(4 - spare)), (giant.len + (1 - spare) * fits, (2 + spare) * fits));
        // The checksum of the sealed log as a whole speaks of its length.
        let sum = sim.read_file(&segment_path(&dir, 0, "sum"));
        assert_eq!((&sum[16..24], &sum[24..32]), (&len(0).to_be_bytes()[..], &(4 - spare).to_be_bytes()[..]));
    }
    // The test's own checksum of zeros is the one over the bytes.
    assert_eq!(zeros(200_001).finalize(), crc32fast::hash(&vec![0; 200_001]));
    assert_eq!(crc(0, b"", b""), zeros(8).finalize());
}
