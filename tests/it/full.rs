//! A real file system that is full: met when room is allocated, when an append is written, when index entries are, and at a roll.
//!
//! Needs a small file system of its own, named by SAPWOOD_FULL_DIR, and one test at a time on it: scripts/filesystems sees to both.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use sapwood::{Backend, Broker, Error, Partition, TopicConfig};
use tempfile::TempDir;

use crate::format::{ENTRY, segment_path};
use crate::oracle::{assert_closed, check};
use crate::space::{record, try_append};
use crate::support::{contents, create, each_backend, open, partition_dir, partition_of, read_all};

/// Whether the file system writes a block that is rewritten to another place, and so wants new room for it (btrfs).
fn copies_on_write(dir: &Path) -> bool {
    const BTRFS: u64 = 0x9123_683E;
    rustix::fs::statfs(dir).unwrap().f_type as u64 == BTRFS
}

/// The file system that may be filled up.
fn home() -> Option<PathBuf> {
    let home = std::env::var_os("SAPWOOD_FULL_DIR").map(PathBuf::from);
    if home.is_none() {
        eprintln!("skipped: SAPWOOD_FULL_DIR names no file system that may be filled up");
    }
    home
}

#[test]
fn a_file_system_that_is_full_loses_nothing_and_passes() {
    let Some(home) = home() else { return };
    const ROOM: u64 = 8 << 20;
    let topic = TopicConfig { segment_bytes: 2 << 20, preallocate_bytes: 1 << 20, ..TopicConfig::default() };
    each_backend(|backend| {
        let data = tempfile::tempdir_in(&home).unwrap();
        let ballast = data.path().join("ballast");
        let data = data.path().join("data");
        let (mut broker, mut partition) = create(&data, backend, &topic);
        let mut model = Vec::new();
        for round in 0..3 {
            let file = fs::File::create(&ballast).unwrap();
            let free = rustix::fs::statvfs(&home).unwrap();
            let free = (free.f_bavail * free.f_frsize).saturating_sub(ROOM);
            if free > 0 {
                rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, free).unwrap();
            }
            let mut refused = 0;
            while refused < 3 {
                let number = model.len() as u64;
                assert!(number < 6 * ROOM / 1000, "it was never full");
                let next = record(number, 1000 + (number * 7919 % 60_000) as usize);
                match try_append(&partition, std::slice::from_ref(&next)) {
                    Ok(offsets) => {
                        assert_eq!(offsets.start, number);
                        model.push(next);
                    }
                    Err(error) => {
                        assert!(error.is_disk_full(), "{error}");
                        eprintln!("round {round}: {number} records, then: {error}");
                        // A block that is rewritten needs no room where it lies, but a new place needs some.
                        assert!(!error.is_failed() || copies_on_write(&home), "{error}");
                        refused = if error.is_failed() { 3 } else { refused + 1 };
                    }
                }
            }
            assert!(contents(&read_all(&partition)) == model, "what was acknowledged is intact");
            drop(file);
            fs::remove_file(&ballast).unwrap();
            // The room is given back by some file systems with their next commit.
            rustix::fs::syncfs(fs::File::open(&home).unwrap()).unwrap();
            let more: Vec<_> = (0..32).map(|number| record(model.len() as u64 + number, 100_000)).collect();
            match try_append(&partition, &more) {
                Ok(_) => model.extend(more),
                Err(error) => {
                    assert!(error.is_failed() && copies_on_write(&home), "there is room again: {error}");
                    drop((partition, broker));
                    broker = open(&data, backend, &topic);
                    partition = partition_of(&broker);
                    // What was not acknowledged may be there, too.
                    let found = contents(&read_all(&partition));
                    assert!(found.starts_with(&model) && found.len() <= model.len() + more.len(), "what was acknowledged is intact");
                    model = found;
                    try_append(&partition, &more).unwrap();
                    model.extend(more);
                }
            }
        }
        drop(partition);
        broker.close().unwrap();
        assert_closed(&partition_dir(&data), topic.index_interval.into());
        let broker = open(&data, backend, &topic);
        assert!(contents(&read_all(&partition_of(&broker))) == model, "what was acknowledged is intact after opening again");
    });
}

/// A topic on a file system that can be filled up, and what was acknowledged.
struct Case {
    home: PathBuf,
    topic: TopicConfig,
    backend: Backend,
    open: Option<(Broker, Partition)>,
    model: Vec<(Vec<u8>, Vec<u8>)>,
    /// Takes all the room there is.
    filler: Option<PathBuf>,
    data: TempDir,
}

impl Case {
    fn new(home: &Path, backend: Backend, topic: TopicConfig) -> Self {
        let data = tempfile::tempdir_in(home).unwrap();
        let open = Some(create(&data.path().join("data"), backend, &topic));
        Self { home: home.to_owned(), topic, backend, open, model: Vec::new(), filler: None, data }
    }

    fn data(&self) -> PathBuf {
        self.data.path().join("data")
    }

    fn partition(&self) -> &Partition {
        &self.open.as_ref().unwrap().1
    }

    /// Appends the next record, of so many bytes.
    fn append(&mut self, size: usize) -> sapwood::Result<()> {
        let next = record(self.model.len() as u64, size);
        let offsets = try_append(self.partition(), std::slice::from_ref(&next))?;
        assert_eq!(offsets.start, self.model.len() as u64);
        self.model.push(next);
        Ok(())
    }

    /// Takes the room until not a block is to be had.
    fn fill(&mut self) {
        let path = self.data.path().join("filler");
        let filler = fs::File::create(&path).unwrap();
        let mut len = 0;
        for _ in 0..4 {
            let mut piece = 64 << 20;
            while piece >= 4096 {
                match rustix::fs::fallocate(&filler, FallocateFlags::empty(), len, piece) {
                    Ok(()) => len += piece,
                    Err(rustix::io::Errno::NOSPC) => piece /= 2,
                    Err(other) => panic!("{other}"),
                }
            }
            // What others freed or promised shows with the next commit.
            rustix::fs::syncfs(&filler).unwrap();
        }
        self.filler = Some(path);
    }

    fn free(&mut self) {
        fs::remove_file(self.filler.take().unwrap()).unwrap();
        rustix::fs::syncfs(fs::File::open(&self.home).unwrap()).unwrap();
    }

    /// An error of a full disk. It leaves the partition as it was where a block that is rewritten needs no room.
    #[track_caller]
    fn assert_full(&self, error: &Error) {
        assert!(error.is_disk_full(), "{error}");
        assert!(matches!(error, Error::DiskFull { appended: 0, .. }) || (error.is_failed() && copies_on_write(&self.home)), "{error}");
        assert!(contents(&read_all(self.partition())) == self.model, "what was acknowledged is intact");
    }

    /// There is room again: appends go on, after opening again only if they were stopped. Then all is as after any run.
    fn goes_on(mut self, error: &Error) {
        self.free();
        if error.is_failed() {
            self.open = None;
            let broker = open(&self.data(), self.backend, &self.topic);
            let partition = partition_of(&broker);
            let found = contents(&read_all(&partition));
            // What was not acknowledged may be there, too.
            assert!(found.starts_with(&self.model) && found.len() <= self.model.len() + 1, "what was acknowledged is intact");
            self.model = found;
            self.open = Some((broker, partition));
        }
        for _ in 0..200 {
            self.append(5000).unwrap();
        }
        self.is_intact();
    }

    /// The write of a batch failed: of its records, some may be there.
    fn assert_stopped_with_part_of(mut self, batch: &[(Vec<u8>, Vec<u8>)], error: &Error) {
        assert!(error.is_failed() && error.is_disk_full(), "{error}");
        self.free();
        self.open = None;
        let broker = open(&self.data(), self.backend, &self.topic);
        let partition = partition_of(&broker);
        let found = contents(&read_all(&partition));
        self.model.extend_from_slice(batch);
        assert!(!found.is_empty() && self.model.starts_with(&found), "what was acknowledged is intact");
        self.model = found;
        self.open = Some((broker, partition));
        self.is_intact();
    }

    fn is_intact(&mut self) {
        assert!(contents(&read_all(self.partition())) == self.model);
        let (broker, partition) = self.open.take().unwrap();
        drop(partition);
        broker.close().unwrap();
        // Index entries that found no room are made up for by the next opening at the latest.
        let broker = open(&self.data(), self.backend, &self.topic);
        assert!(contents(&read_all(&partition_of(&broker))) == self.model);
        broker.close().unwrap();
        assert_closed(&partition_dir(&self.data()), self.topic.index_interval.into());
    }
}

/// Appends until it is refused, `most` times at the most.
fn until_full(case: &mut Case, size: usize, most: usize) -> Error {
    (0..most).find_map(|_| case.append(size).err()).expect("it was never full")
}

#[test]
fn full_when_room_is_allocated() {
    let Some(home) = home() else { return };
    each_backend(|backend| {
        let topic = TopicConfig { segment_bytes: 32 << 20, preallocate_bytes: 1 << 20, ..TopicConfig::default() };
        let mut case = Case::new(&home, backend, topic);
        case.append(1000).unwrap();
        case.fill();
        // Beyond what was allocated at once and, perhaps, ahead.
        let error = until_full(&mut case, 5000, (4 << 20) / 5000);
        eprintln!("{} records, then: {error}", case.model.len());
        case.assert_full(&error);
        if !error.is_failed() {
            let end = check(&partition_dir(&case.data())).next_position;
            let allocated = fs::metadata(segment_path(&partition_dir(&case.data()), 0, "log")).unwrap().len();
            assert!(end + 5000 > allocated, "refused with room left: {end} of {allocated}");
            for _ in 0..3 {
                let again = case.append(5000).unwrap_err();
                case.assert_full(&again);
            }
        }
        case.goes_on(&error);
    });
}

/// Segments of 256 KiB, allocated as a whole, hold 255 such records, to the last block.
const RECORD: usize = 1028;
const FITS: usize = 255;

#[test]
fn full_when_appends_are_written_and_at_a_roll() {
    let Some(home) = home() else { return };
    each_backend(|backend| {
        let topic = TopicConfig { segment_bytes: 256 << 10, preallocate_bytes: 1 << 20, ..TopicConfig::default() };
        let mut case = Case::new(&home, backend, topic);
        case.append(RECORD).unwrap();
        case.fill();
        let error = until_full(&mut case, RECORD, FITS);
        eprintln!("{} records, then: {error}", case.model.len());
        case.assert_full(&error);
        if !error.is_failed() {
            assert_eq!(case.model.len(), FITS, "room that was allocated is there for the appends, and not for more");
            for _ in 0..3 {
                let again = case.append(RECORD).unwrap_err();
                case.assert_full(&again);
            }
        }
        case.goes_on(&error);
    });
}

#[test]
fn full_when_index_entries_are_written() {
    let Some(home) = home() else { return };
    each_backend(|backend| {
        let topic = TopicConfig { segment_bytes: 32 << 20, preallocate_bytes: 4 << 20, ..TopicConfig::default() };
        let mut case = Case::new(&home, backend, topic);
        case.append(100).unwrap();
        case.fill();
        // Some twenty blocks of either index, and a part of the room that the log has.
        let more: Vec<_> = (1..5000).map(|number| record(number, 100)).collect();
        match try_append(case.partition(), &more) {
            Ok(_) => case.model.extend(more),
            Err(error) => {
                assert!(copies_on_write(&home), "{error}");
                case.assert_stopped_with_part_of(&more, &error);
                return;
            }
        }
        for number in (0..5000).step_by(613) {
            assert_eq!(case.partition().read_one(number).unwrap().value, case.model[number as usize].1);
        }
        let index = segment_path(&partition_dir(&case.data()), 0, "index");
        let entries = fs::metadata(index).unwrap().len() / ENTRY as u64;
        assert!(entries < 5000, "the index found room");
        // Closing writes what waits in memory, once more after the log gave its room back.
        let (broker, partition) = case.open.take().unwrap();
        drop(partition);
        broker.close().unwrap();
        case.free();
        let broker = open(&case.data(), backend, &case.topic);
        let partition = partition_of(&broker);
        case.open = Some((broker, partition));
        case.is_intact();
    });
}
