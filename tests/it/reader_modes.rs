//! Every way to read, against a list of what was appended: through the page cache and past it, with pieces ahead and without, in pieces of any
//! size, with checksums and without, up to either watermark, on every disk.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sapwood::clock::SystemClock;
use sapwood::io::sim::SimDisk;
use sapwood::io::{Disk, OsDisk};
use sapwood::{
    Backend, Broker, Checksums, Durability, Error, Flaw, Partition, ReadMode, Reader, ReaderConfig, Records, TopicConfig, Visibility,
};

use crate::damage::{self, Target};
use crate::format::{self, HEADER, Layout};
use crate::recovery::DEMO;
use crate::sim::DATA;
use crate::support::{
    BACKENDS, Rng, Row, TOPIC, batch, config, data_with, data_with_demo, each_backend, open, partition_of, rows_of, scratch, seed, small,
};

/// All of them. Pieces are whole blocks of 4 KiB at least.
pub fn ways() -> Vec<ReaderConfig> {
    let mut ways = Vec::new();
    for visibility in [Visibility::Durable, Visibility::Appended] {
        for checksums in [Checksums::Verified, Checksums::Unverified] {
            for piece_bytes in [1, 4097, 1 << 20] {
                for (mode, read_ahead) in [(ReadMode::Buffered, 0), (ReadMode::Buffered, 3), (ReadMode::Direct, 0), (ReadMode::Direct, 3)] {
                    ways.push(ReaderConfig { visibility, mode, piece_bytes, read_ahead, checksums });
                }
            }
        }
    }
    ways
}

/// Opens the data directory of one disk.
type Opener<'a> = &'a dyn Fn() -> Broker;

/// Runs a test on both real backends, and on the simulated disk, whose rings work beside their thread or do not.
fn each_disk(test: impl Fn(Opener<'_>)) {
    let open = |disk: Arc<dyn Disk>, data: &Path| Broker::open_on(disk, Arc::new(SystemClock::new()), data, config(Backend::Auto, small()));
    for backend in BACKENDS {
        eprintln!("backend {backend:?}");
        let data = scratch();
        test(&|| open(Arc::new(OsDisk::new(backend).unwrap()), data.path()).unwrap());
    }
    for overlap in [false, true] {
        eprintln!("simulated, overlapping: {overlap}");
        let sim = SimDisk::new(1);
        sim.overlap_rings(overlap);
        test(&|| open(Arc::new(sim.clone()), Path::new(DATA)).unwrap());
    }
}

/// The list that a log must read as.
struct Naive {
    rows: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Naive {
    fn new() -> Self {
        Self { rows: Vec::new() }
    }

    /// Appends records of such sizes, in batches of some.
    fn append(&mut self, partition: &Partition, rng: &mut Rng, sizes: &[usize]) {
        let records: Vec<_> = sizes.iter().map(|&size| (rng.bytes(size.min(7)), rng.bytes(size))).collect();
        let mut left = &records[..];
        while !left.is_empty() {
            let (some, others) = left.split_at(1 + rng.below(left.len() as u64) as usize);
            drop(partition.append(batch(some)).unwrap());
            left = others;
        }
        partition.sync().unwrap();
        self.rows.extend(records);
    }

    fn end(&self) -> u64 {
        self.rows.len() as u64
    }

    fn bytes(&self, offset: u64) -> usize {
        let (key, value) = &self.rows[offset as usize];
        HEADER + key.len() + value.len()
    }

    /// What was read from there must be the list's, at least one, as many as were asked for at most.
    #[track_caller]
    fn check(&self, from: u64, max_bytes: usize, records: Records<'_>) -> u64 {
        assert!(records.is_empty() == (from == self.end()), "{} records from {from}", records.len());
        let mut next = from;
        for record in &records {
            let (key, value) = &self.rows[next as usize];
            assert_eq!(record.offset, next);
            assert!(record.key == key && record.value == value, "the bytes of record {next}");
            next += 1;
        }
        let bytes: usize = (from..next).map(|offset| self.bytes(offset)).sum();
        assert_eq!((records.bytes(), records.len() as u64, records.next_offset()), (bytes, next - from, next));
        assert!(records.len() <= 1 || bytes <= max_bytes, "{bytes} bytes for {max_bytes}");
        next
    }

    #[track_caller]
    fn scan(&self, reader: &mut Reader, from: u64, max_bytes: usize) {
        let mut next = from;
        while next < self.end() {
            next = self.check(next, max_bytes, reader.read(next, max_bytes).unwrap());
        }
        assert!(reader.read(next, max_bytes).unwrap().is_empty());
    }

    /// Reads here and there, on from where that ended, and single records.
    #[track_caller]
    fn read_at_random(&self, reader: &mut Reader, rng: &mut Rng, reads: usize) {
        let mut offset = 0;
        for _ in 0..reads {
            let max_bytes = rng.one_of(&[0, 1, 45, 300, 5000, 100_000, usize::MAX]);
            match rng.below(4) {
                0 if offset < self.end() => {
                    let record = reader.read_one(offset).unwrap();
                    let (key, value) = &self.rows[offset as usize];
                    assert!(record.offset == offset && record.key == key && record.value == value, "record {offset} alone");
                    offset += 1;
                }
                1 => offset = rng.below(self.end() + 1),
                _ => offset = self.check(offset, max_bytes, reader.read(offset, max_bytes).unwrap()),
            }
        }
        for wrong in [self.end() + 1, u64::MAX] {
            let error = reader.read(wrong, 100).map(drop).unwrap_err();
            assert!(
                matches!(error, Error::OffsetOutOfRange { offset, first: 0, next } if (offset, next) == (wrong, self.end())),
                "{error}"
            );
        }
        assert!(reader.read_one(self.end()).unwrap_err().is_out_of_range());
    }
}

/// Sizes at which pieces and blocks end, and others.
fn some_sizes(rng: &mut Rng, count: usize) -> Vec<usize> {
    (0..count)
        .map(|_| match rng.below(12) {
            0 => 4096 - HEADER - 7 + rng.below(3) as usize - 1,
            1 => 8192 + rng.below(60) as usize - 30,
            2 => rng.below(30_000) as usize,
            3 => 0,
            _ => rng.below(300) as usize,
        })
        .collect()
}

#[test]
fn every_way_reads_what_was_appended() {
    let seed = seed();
    each_disk(|open| {
        let mut rng = Rng::new(seed);
        for (segment_bytes, index_interval, tail_bytes) in [(20_000, 1, 0), (20_000, 3, 1 << 20), (1 << 30, 4096, 0), (1, 1, 4096)] {
            let topic = TopicConfig { segment_bytes, index_interval, tail_bytes, ..small() };
            eprintln!("segments of {segment_bytes}, index interval {index_interval}");
            let name = format!("{TOPIC}-{segment_bytes}-{index_interval}");
            let mut naive = Naive::new();
            let count = if segment_bytes == 1 { 20 } else { 80 };
            let broker = open();
            let partition = broker.create_topic(&name, topic).unwrap().partition(0).unwrap();
            let sizes = some_sizes(&mut rng, count);
            naive.append(&partition, &mut rng, &sizes);
            drop(partition);
            broker.close().unwrap();
            // Sealed segments, and an active one of which a part was written before and a part is in memory, or not.
            let broker = open();
            let partition = broker.topic(&name).unwrap().partition(0).unwrap();
            let sizes = some_sizes(&mut rng, count / 2);
            naive.append(&partition, &mut rng, &sizes);
            for way in ways() {
                eprintln!("{way:?}");
                let mut reader = partition.reader_with(way).unwrap();
                for max_bytes in [1, 5000, 1 << 20] {
                    naive.scan(&mut reader, 0, max_bytes);
                }
                naive.read_at_random(&mut reader, &mut rng, 60);
                naive.scan(&mut reader, naive.end() / 2, 1000);
            }
            broker.close().unwrap();
        }
    });
}

#[test]
fn records_larger_than_pieces_come_whole() {
    let seed = seed();
    each_disk(|open| {
        let mut rng = Rng::new(seed);
        let broker = open();
        let partition = broker.create_topic(TOPIC, TopicConfig { segment_bytes: 300_000, ..small() }).unwrap().partition(0).unwrap();
        let around = |bytes: usize| [bytes - 1, bytes, bytes + 1];
        let mut sizes: Vec<_> =
            [4096, 8192, 12_288, 16_384, 100_000].into_iter().flat_map(around).map(|bytes| bytes - HEADER - 7).collect();
        sizes.extend([10, 200_000, 20, 8192, 30, 299_000, 5, 5, 400_000, 1]);
        let mut naive = Naive::new();
        naive.append(&partition, &mut rng, &sizes);
        drop(partition);
        broker.close().unwrap();
        let broker = open();
        for way in ways() {
            eprintln!("{way:?}");
            let mut reader = partition_of(&broker).reader_with(way).unwrap();
            for max_bytes in [1, 10_000, 1 << 20] {
                naive.scan(&mut reader, 0, max_bytes);
            }
            naive.read_at_random(&mut reader, &mut rng, 60);
        }
        broker.close().unwrap();
    });
}

#[test]
fn an_empty_partition_reads_as_its_end_in_every_way() {
    each_disk(|open| {
        let broker = open();
        let partition = broker.create_topic(TOPIC, small()).unwrap().partition(0).unwrap();
        let mut naive = Naive::new();
        let mut readers: Vec<Reader> = ways().into_iter().map(|way| partition.reader_with(way).unwrap()).collect();
        let mut rng = Rng::new(1);
        for _ in 0..3 {
            readers.iter_mut().for_each(|reader| naive.read_at_random(reader, &mut rng.clone(), 10));
            // The same readers go on with what comes.
            naive.append(&partition, &mut rng, &[5, 0, 5000]);
        }
        broker.close().unwrap();
        for reader in &mut readers {
            assert!(reader.read(0, 100).unwrap_err().is_closed());
        }
    });
}

/// What stands in the record of that offset.
fn content(offset: u64) -> Vec<u8> {
    let mut rng = Rng::new(offset);
    let len = if offset.is_multiple_of(50) { rng.below(9000) } else { rng.below(200) };
    rng.bytes(len as usize)
}

#[test]
fn every_way_follows_appends_and_rolls() {
    let seed = seed();
    for durability in [Durability::Durable, Durability::Os] {
        each_disk(|open| {
            let broker = open();
            let topic = TopicConfig { durability, segment_bytes: 30_000, tail_bytes: 8192, ..small() };
            let partition = broker.create_topic(TOPIC, topic).unwrap().partition(0).unwrap();
            let over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let mut rng = Rng::new(seed);
                for _ in 0..4 {
                    let (way, mut rng, partition) = (rng.one_of(&ways()), Rng::new(rng.next()), &partition);
                    eprintln!("{way:?}");
                    let over = &over;
                    scope.spawn(move || follow(partition, &way, &mut rng, over));
                }
                let mut next = 0;
                while next < 1500 {
                    let values: Vec<_> = (next..next + 1 + rng.below(20)).map(|offset| ("", content(offset))).collect();
                    next += values.len() as u64;
                    drop(partition.append(batch(&values)).unwrap());
                }
                partition.sync().unwrap();
                over.store(true, Ordering::Release);
            });
            assert!(partition.stats().rolls > 3);
            broker.close().unwrap();
        });
    }
}

/// Reads up to the end until all is there, and now and then elsewhere.
fn follow(partition: &Partition, way: &ReaderConfig, rng: &mut Rng, over: &AtomicBool) {
    let mut reader = partition.reader_with(way.clone()).unwrap();
    let (mut next, mut at) = (0, 0);
    loop {
        let all = over.load(Ordering::Acquire);
        let records = reader.read(at, 1 + rng.below(20_000) as usize).unwrap();
        for record in &records {
            assert_eq!(record.offset, at);
            assert!(record.value == content(at), "the bytes of record {at}, {way:?}");
            at += 1;
        }
        if records.is_empty() && at == partition.next_offset() && all {
            return;
        }
        next = next.max(at);
        at = if rng.below(4) == 0 { rng.below(next + 1) } else { next };
    }
}

/// Damages of index files.
const INDEXES: [&str; 9] = [
    "missing-index",
    "missing-both-indexes",
    "empty-index",
    "index-longer-than-log",
    "index-past-end",
    "index-mid-record",
    "index-out-of-order",
    "index-partial-entry",
    "index-hole",
];

#[test]
fn indexes_that_lie_change_nothing_that_is_read() {
    each_backend(|backend| {
        for index_interval in [1, 2] {
            for name in INDEXES {
                if name == "index-hole" && index_interval == 2 {
                    continue; // Three entries are too few for it.
                }
                eprintln!("{name}, index interval {index_interval}");
                let (data, dir) = data_with_demo(36, Layout { segment_bytes: 270, index_interval, ..Layout::default() });
                let broker = open(data.path(), backend, &TopicConfig { index_interval: index_interval as u32, ..small() });
                let partition = partition_of(&broker);
                // Behind the broker's back, in a sealed segment: what opening mends is another matter.
                damage::apply_to(&dir, name, 2);
                let all = rows_of(&format::demo(36), 0);
                for way in ways() {
                    let mut reader = partition.reader_with(way.clone()).unwrap();
                    for start in (0..36).rev() {
                        let rows: Vec<Row> = reader.read(start, 200).unwrap().iter().map(Row::from).collect();
                        assert!(!rows.is_empty() && rows == all[start as usize..start as usize + rows.len()], "from {start}, {way:?}");
                        assert_eq!(Row::from(reader.read_one(start).unwrap()), all[start as usize]);
                    }
                }
            }
        }
    });
}

/// Damages of the middle record of a segment, and what a reader must call them.
pub const RECORDS: [(&str, &str); 13] = [
    ("flip-value-byte", "checksum"),
    ("flip-key-byte", "checksum"),
    ("flip-timestamp", "checksum"),
    ("flip-crc", "checksum"),
    ("flip-offset", "offset"),
    ("keylen-gt-size", "length"),
    ("keylen-max", "length"),
    ("size-huge", "length"),
    ("size-wraps", "length"),
    ("size-top-bit", "length"),
    ("size-plus-one", "checksum"),
    ("size-minus-one", "checksum"),
    ("hole-in-the-middle", "offset"),
];

fn kind(flaw: Flaw) -> &'static str {
    match flaw {
        Flaw::BadChecksum { .. } => "checksum",
        Flaw::OffsetGap { .. } => "offset",
        Flaw::BadLength { .. } => "length",
        _ => "another",
    }
}

/// Records that can be had from `start` on, up to the error if one comes.
fn read_from(reader: &mut Reader, start: u64, max_bytes: usize) -> (Vec<Row>, Option<Error>) {
    let mut rows: Vec<Row> = Vec::new();
    loop {
        match reader.read(start + rows.len() as u64, max_bytes) {
            Ok(records) if records.is_empty() => return (rows, None),
            Ok(records) => rows.extend(records.iter().map(Row::from)),
            Err(error) => return (rows, Some(error)),
        }
    }
}

#[test]
fn a_damaged_record_is_named_in_every_way() {
    each_backend(|backend| {
        for (name, called) in RECORDS {
            eprintln!("{name}");
            let (data, dir) = data_with(DEMO);
            let broker = open(data.path(), backend, &small());
            let partition = partition_of(&broker);
            let (target, all) = (Target::number(&dir, 2), rows_of(&format::demo(36), 0));
            let record = target.middle().clone();
            target.damage(name, &record);
            for way in ways() {
                let mut reader = partition.reader_with(way.clone()).unwrap();
                let verified = way.checksums == Checksums::Verified;
                for start in 0..36 {
                    let (rows, error) = read_from(&mut reader, start, 100 + start as usize);
                    let told = format!("{name} from {start}, {way:?}: {error:?}");
                    assert_eq!(partition.read_one(start).is_err(), start == record.offset);
                    // What is handed out unverified is the damaged one alone.
                    for row in rows.iter().filter(|row| verified || row.offset != record.offset) {
                        assert_eq!(row, &all[row.offset as usize], "{told}");
                    }
                    assert!(rows.iter().zip(start..).all(|(row, offset)| row.offset == offset), "{told}");
                    match error {
                        Some(Error::Damaged { path, position, offset, flaw }) => {
                            assert_eq!((path, position, offset), (target.log.clone(), record.position, record.offset), "{told}");
                            assert!(start <= offset && kind(flaw) == called, "{told}");
                            assert!(verified || called != "checksum", "{told}");
                        }
                        Some(error) => panic!("{error}, {told}"),
                        None => assert!(start > record.offset || (!verified && called == "checksum"), "{told}"),
                    }
                }
            }
        }
    });
}

#[test]
fn each_of_several_damaged_records_is_named_by_its_own_place() {
    each_backend(|backend| {
        let (data, dir) = data_with_demo(40, Layout::default());
        let broker = open(data.path(), backend, &small());
        let partition = partition_of(&broker);
        let target = Target::newest(&dir);
        let mut bytes = fs::read(&target.log).unwrap();
        let damaged = [3, 7, 8, 21];
        for offset in damaged {
            bytes[target.records[offset].end() as usize - 1] ^= 1;
        }
        fs::write(&target.log, bytes).unwrap();
        for way in ways().into_iter().filter(|way| way.checksums == Checksums::Verified) {
            let mut reader = partition.reader_with(way.clone()).unwrap();
            for start in (0..40).chain((0..40).rev()) {
                let (rows, error) = read_from(&mut reader, start, 1000);
                let expected = damaged.into_iter().map(|offset| offset as u64).find(|offset| *offset >= start);
                assert_eq!(start + rows.len() as u64, expected.unwrap_or(40), "from {start}, {way:?}");
                match (error, expected) {
                    (Some(Error::Damaged { position, offset, .. }), Some(expected)) => {
                        assert_eq!((offset, position), (expected, target.records[expected as usize].position), "from {start}, {way:?}");
                    }
                    (None, None) => {}
                    (error, _) => panic!("from {start}, {way:?}: {error:?}"),
                }
            }
        }
    });
}

/// Cut before it is opened, and while it is open.
#[test]
fn a_log_that_was_cut_is_read_up_to_there_and_behind_is_an_error() {
    each_backend(|backend| {
        let (_data, original) = data_with("interval-4096-segment-270");
        let records = Target::number(&original, 1).records;
        let cuts = records.iter().flat_map(|record| [0, 1, 27, 28, record.bytes() - 1].map(|kept| record.position + kept));
        for (cut, while_open) in cuts.flat_map(|cut| [(cut, false), (cut, true)]) {
            let (data, dir) = data_with("interval-4096-segment-270");
            let target = Target::number(&dir, 1);
            let cut_it = || fs::File::options().write(true).open(&target.log).unwrap().set_len(cut).unwrap();
            if !while_open {
                cut_it();
            }
            let broker = open(data.path(), backend, &small());
            let partition = partition_of(&broker);
            if while_open {
                cut_it();
            }
            let (first, last) = (target.base, target.records.last().unwrap().offset);
            let whole = target.records.iter().filter(|record| record.end() <= cut).count() as u64;
            // The checks of lengths are alike in pieces of every size, and for all that is visible.
            for way in ways().into_iter().filter(|way| way.piece_bytes == 4097 && way.visibility == Visibility::Durable) {
                let told = format!("a log cut at {cut}, {while_open}, {way:?}");
                let mut reader = partition.reader_with(way.clone()).unwrap();
                for record in &target.records {
                    match reader.read_one(record.offset).map(|read| read.offset) {
                        Ok(offset) => assert!(offset == record.offset && record.end() <= cut, "{offset} of {told}"),
                        Err(error) => assert!(error.is_damage() && record.end() > cut, "{error} at {} of {told}", record.offset),
                    }
                    assert_eq!(partition.read_one(record.offset).is_ok(), record.end() <= cut, "{told}");
                }
                let (rows, error) = read_from(&mut reader, first, 1000);
                assert!(rows.len() as u64 == whole && error.is_some_and(|error| error.is_damage()), "{told}");
                assert_eq!(reader.skip_damaged(first + whole).unwrap().records, first + whole..last + 1, "{told}");
                assert_eq!(read_from(&mut reader, last + 1, 1000).0.first().map(|row| row.offset), Some(last + 1), "{told}");
                assert_eq!((reader.offset_for_time(0).unwrap(), reader.offset_for_time(u64::MAX).unwrap()), (0, partition.durable_end()));
            }
        }
    });
}

#[test]
fn settings_out_of_range_are_refused() {
    let (data, _) = data_with(DEMO);
    let broker = open(data.path(), Backend::Auto, &small());
    let partition = partition_of(&broker);
    for mode in [ReadMode::Buffered, ReadMode::Direct] {
        for (piece_bytes, read_ahead, setting) in
            [(usize::MAX, 0, "piece_bytes"), ((1 << 30) + 1, 0, "piece_bytes"), (1, usize::MAX, "read_ahead"), (1, 257, "read_ahead")]
        {
            let refused = partition.reader_with(ReaderConfig { mode, piece_bytes, read_ahead, ..ReaderConfig::default() }).unwrap_err();
            assert!(matches!(refused, Error::InvalidConfig { name, .. } if name == setting), "{refused}");
        }
        for (piece_bytes, read_ahead) in [(0, 0), (1, ReaderConfig::MAX_READ_AHEAD)] {
            let config = ReaderConfig { mode, piece_bytes, read_ahead, ..ReaderConfig::default() };
            assert_eq!(read_from(&mut partition.reader_with(config).unwrap(), 0, 1000).0.len(), 36);
        }
    }
}
