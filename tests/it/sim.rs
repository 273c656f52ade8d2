//! What the tests on the simulated disk share.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sapwood::clock::SystemClock;
use sapwood::io::sim::{OpKind, SimDisk};
use sapwood::io::{Disk, OsDisk};
use sapwood::{Backend, Broker, Partition, Result, TopicConfig};

use crate::format::Slot;
use crate::oracle::{self, Files, Report};
use crate::support::{BACKENDS, TOPIC, config, copy_dir, partition_of, scratch};

/// The data directory on the simulated disk.
pub const DATA: &str = "/made/data";

pub const EINTR: i32 = 4;
pub const EIO: i32 = 5;
pub const EAGAIN: i32 = 11;
pub const ENOSPC: i32 = 28;

/// Settings for a disk in memory: several small segments, allocated in small pieces.
pub fn tiny(segment_bytes: u64) -> TopicConfig {
    TopicConfig { segment_bytes, preallocate_bytes: 4096, commit_bytes: 4096, ..TopicConfig::default() }
}

pub fn try_open(sim: &SimDisk, fallback: &TopicConfig) -> Result<Broker> {
    Broker::open_on(Arc::new(sim.clone()), Arc::new(SystemClock::new()), DATA, config(Backend::Auto, fallback.clone()))
}

#[track_caller]
pub fn open(sim: &SimDisk) -> Broker {
    try_open(sim, &tiny(270)).unwrap()
}

/// A disk with the topic [`TOPIC`] on it, open.
#[track_caller]
pub fn create(seed: u64, topic: &TopicConfig) -> (SimDisk, Broker, Partition) {
    let sim = SimDisk::new(seed);
    let broker = open(&sim);
    broker.create_topic(TOPIC, topic.clone()).unwrap();
    let partition = partition_of(&broker);
    (sim, broker, partition)
}

/// The directory of partition 0 of [`TOPIC`].
pub fn dir() -> PathBuf {
    Path::new(DATA).join(TOPIC).join("0")
}

/// A disk that holds a partition written by another hand, damaged as told.
pub fn with_partition(seed: u64, from: &Path, harm: impl FnOnce(&Path)) -> SimDisk {
    let scratch = scratch();
    let copy = scratch.path().join("copy");
    copy_dir(from, &copy);
    harm(&copy);
    let sim = SimDisk::new(seed);
    sim.import(&copy, &dir()).unwrap();
    sim
}

/// Copies partition 0 out of the disk, and gives it to `judge`.
pub fn exported<T>(sim: &SimDisk, judge: impl FnOnce(&Path) -> T) -> T {
    let scratch = scratch();
    sim.export(&dir(), scratch.path()).unwrap();
    judge(scratch.path())
}

/// The files of partition 0.
pub fn files(sim: &SimDisk) -> Files {
    files_in(sim, &dir())
}

/// Those of a directory.
pub fn files_in(sim: &SimDisk, dir: &Path) -> Files {
    sim.files(dir).into_iter().map(|(name, bytes)| (name.into_string().unwrap(), bytes)).collect()
}

/// The oracle's word on partition 0: nothing but preallocated space and foreign files may be noted.
#[track_caller]
pub fn assert_sound(sim: &SimDisk) -> Report {
    oracle::assert_sound_files(&files(sim))
}

/// The same while appends are under way, or were just now.
#[track_caller]
pub fn assert_sound_while_open(sim: &SimDisk) -> Report {
    oracle::assert_sound_in_time(|| files(sim))
}

/// The same after a clean close.
#[track_caller]
pub fn assert_closed(sim: &SimDisk, index_interval: u64) -> Report {
    oracle::assert_closed_files(&files(sim), index_interval)
}

/// How a machine goes down, by name.
pub const CRASHES: [&str; 4] = ["process", "power", "torn power", "strict"];

/// Takes the machine down in that way.
pub fn crash(sim: &SimDisk, how: &str) {
    match how {
        "process" => sim.crash_process(),
        "power" => sim.power_loss(),
        "torn power" => {
            sim.tear_pages(true);
            sim.power_loss();
        }
        _ => sim.power_loss_keeping_nothing(),
    }
}

/// What lies in the directory of partition 0, by name.
pub fn names(sim: &SimDisk) -> Vec<String> {
    sim.clone().list(&dir()).unwrap().into_iter().map(|entry| entry.name.into_string().unwrap()).collect()
}

/// Waits for upkeep to have done something, which nothing but its effect tells.
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !done() {
        assert!(start.elapsed() < oracle::HANG_LIMIT, "never: {what}");
        // Between two looks: it is the condition that ends the wait.
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Whether the next segment was made ahead, or that was tried.
pub fn prepared_is_ready(sim: &SimDisk) -> bool {
    sim.ops().iter().any(|op| op.kind == OpKind::Sync && op.path.ends_with("prepared.log"))
}

/// What the newest sound slot of the checkpoint says; none if there is no such file.
pub fn checkpoint(sim: &SimDisk) -> Option<Slot> {
    let path = dir().join("checkpoint");
    sim.exists(&path).then(|| Slot::newest(&sim.read_file(&path))).flatten()
}

/// Runs a test on both real backends and on the simulated disk.
pub fn each_disk(test: impl Fn(&dyn Fn() -> Arc<dyn Disk>, &Path)) {
    for backend in BACKENDS {
        let data = scratch();
        test(&|| Arc::new(OsDisk::new(backend).unwrap()), data.path());
    }
    let sim = SimDisk::new(1);
    test(&|| Arc::new(sim.clone()), Path::new(DATA));
}
