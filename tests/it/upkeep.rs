//! What is done beside the appends: it does not hold them up, does not keep an idle writer busy, and leaves nothing behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sapwood::clock::Clock;
use sapwood::io::Disk;
use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::{Backend, Batch, Broker, Durability, Partition, TopicConfig};

use crate::oracle::HANG_LIMIT;
use crate::sim::{self, DATA, EIO, ENOSPC, create, try_open};
use crate::support::{TOPIC, config, partition_of, report_of, scratch, seed};

const SEGMENT: u64 = 1 << 20;

/// A clock whose monotonic time can be moved on, and that counts how often it is asked.
#[derive(Debug)]
struct Jumping {
    start: Instant,
    ahead: AtomicU64,
    asked: AtomicU64,
}

impl Jumping {
    fn new() -> Arc<Self> {
        Arc::new(Self { start: Instant::now(), ahead: AtomicU64::new(0), asked: AtomicU64::new(0) })
    }

    fn jump(&self, seconds: u64) {
        self.ahead.fetch_add(seconds, Ordering::SeqCst);
    }

    /// How often it was asked in a time in which nothing happens.
    fn asked_while_idle(&self) -> u64 {
        std::thread::sleep(Duration::from_millis(300));
        let before = self.asked.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(500));
        self.asked.load(Ordering::SeqCst) - before
    }
}

impl Clock for Jumping {
    fn wall_ns(&self) -> u64 {
        1
    }

    fn monotonic(&self) -> Duration {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.start.elapsed() + Duration::from_secs(self.ahead.load(Ordering::SeqCst))
    }
}

fn open_with(sim: &SimDisk, clock: &Arc<Jumping>, topic: &TopicConfig) -> Broker {
    Broker::open_on(Arc::new(sim.clone()), Arc::clone(clock) as Arc<dyn Clock>, DATA, config(Backend::Auto, topic.clone())).unwrap()
}

fn create_with(topic: &TopicConfig) -> (SimDisk, Arc<Jumping>, Broker, Partition) {
    let (sim, clock) = (SimDisk::new(seed()), Jumping::new());
    let broker = open_with(&sim, &clock, topic);
    broker.create_topic(TOPIC, topic.clone()).unwrap();
    let partition = partition_of(&broker);
    (sim, clock, broker, partition)
}

fn ahead() -> TopicConfig {
    TopicConfig { segment_bytes: SEGMENT, preallocate_bytes: SEGMENT, ..TopicConfig::default() }
}

fn append(partition: &Partition, bytes: usize) -> sapwood::Result<u64> {
    Ok(partition.append(Batch::of(None, &vec![7; bytes])?)?.wait()?.start)
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < HANG_LIMIT.min(Duration::from_secs(20)), "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn names(sim: &SimDisk) -> Vec<String> {
    sim.clone().list(&sim::dir()).unwrap().into_iter().map(|entry| entry.name.into_string().unwrap()).collect()
}

fn prepared_is_ready(sim: &SimDisk) -> bool {
    sim.ops().iter().any(|op| op.kind == OpKind::Sync && op.path.ends_with("prepared.log"))
}

/// After a reopening, a roll sets `unnoted`, and the append that asked for it is refused: nothing was written yet, so
/// `look_ahead` returns at once, and the due checkpoint lets the writer wait for no time at all, again and again.
#[test]
fn a_writer_whose_first_append_rolled_and_was_refused_does_not_spin() {
    let topic = TopicConfig { segment_bytes: 64 << 10, preallocate_bytes: 64 << 10, ..TopicConfig::default() };
    let (sim, clock, broker, partition) = create_with(&topic);
    append(&partition, 60_000).unwrap();
    drop(partition);
    broker.close().unwrap();
    let broker = open_with(&sim, &clock, &topic);
    let partition = partition_of(&broker);
    sim.set_capacity(Some(sim.used()));
    for _ in 0..2 {
        let error = append(&partition, 60_000).unwrap_err();
        assert!(error.is_disk_full(), "{error}");
        clock.jump(10);
    }
    let asked = clock.asked_while_idle();
    assert!(asked < 50, "idle, and the writer asked for the time {asked} times in 500 ms");
}

/// While the directory's sync takes longer than the checkpoint's age.
#[test]
fn a_writer_that_waits_for_a_name_does_not_spin() {
    let (sim, clock, _broker, partition) = create_with(&ahead());
    for _ in 0..5 {
        append(&partition, 200_000).unwrap();
    }
    until("the next segment is ready", || prepared_is_ready(&sim));
    let hold = sim.hold(OpKind::SyncDir, None);
    let ticket = partition.append(Batch::of(None, &vec![7; 200_000]).unwrap()).unwrap();
    hold.wait_until_held();
    clock.jump(10);
    let another = partition.append(Batch::of(None, b"value").unwrap()).unwrap();
    let asked = clock.asked_while_idle();
    hold.release();
    ticket.wait().unwrap();
    another.wait().unwrap();
    assert!(asked < 50, "waiting, and the writer asked for the time {asked} times in 500 ms");
}

/// The checkpoint syncs the indexes under the lock that `IndexFiles::failed` takes, which the writer asks as soon as 4096
/// entries wait: appends wait for the sync of an index.
#[test]
fn appends_do_not_wait_for_the_sync_of_an_index() {
    let (sim, clock, _broker, partition) = create_with(&TopicConfig::default());
    append(&partition, 10).unwrap();
    let hold = sim.hold(OpKind::Sync, Some(".index"));
    clock.jump(10);
    append(&partition, 10).unwrap();
    hold.wait_until_held();
    let mut late = None;
    for number in 0..20 {
        let mut batch = Batch::new();
        for _ in 0..500 {
            batch.push(None, b"value").unwrap();
        }
        match partition.append(batch).unwrap().wait_timeout(Duration::from_secs(3)) {
            Ok(answer) => drop(answer.unwrap()),
            Err(ticket) => {
                late = Some((number, ticket));
                break;
            }
        }
    }
    hold.release();
    assert!(late.is_none(), "batch {} waits for the sync of an index", late.unwrap().0);
}

/// At the levels that sync later, index entries go into the files before their records are durable; the checkpoint vouches for
/// all that the files hold, also past its position, and the next opening takes it for one that does not fit.
#[test]
fn a_checkpoint_vouches_for_no_entry_past_its_position() {
    let topic = TopicConfig { durability: Durability::Os, ..TopicConfig::default() };
    let (sim, clock, broker, partition) = create_with(&topic);
    for _ in 0..100 {
        append(&partition, 1000).unwrap();
    }
    // Durable up to here once this is released; entries go on.
    let hold = sim.hold(OpKind::Sync, Some(".log"));
    let syncing = {
        let partition = partition.clone();
        std::thread::spawn(move || partition.sync())
    };
    hold.wait_until_held();
    for _ in 0..5000 {
        let _ = partition.append(Batch::of(None, b"value").unwrap()).unwrap();
    }
    append(&partition, 10).unwrap();
    until("indexes are begun", || {
        clock.jump(1);
        let _ = append(&partition, 10);
        partition.next_offset() > 5110
    });
    hold.release();
    syncing.join().unwrap().unwrap();
    until("entries past the durable end are in the file", || {
        append(&partition, 10).unwrap();
        std::thread::sleep(Duration::from_millis(120));
        sim.read_file(&sim::dir().join("00000000000000000000.index")).len() as u64 / 16 > partition.durable_end() + 100
    });
    clock.jump(10);
    until("a checkpoint is there", || {
        let _ = append(&partition, 10);
        sim.exists(&sim::dir().join("checkpoint")) && sim.ops().iter().any(|op| op.kind == OpKind::Sync && op.path.ends_with("checkpoint"))
    });
    std::thread::sleep(Duration::from_millis(100));
    let durable = partition.durable_end();
    let word = |slot: usize, at: usize| u64::from_be_bytes(slot_bytes(&slot_of(&slot_vec(&sim), slot), at));
    let newest = if word(0, 16) > word(1, 16) { 0 } else { 1 };
    let (next_offset, entries) = (word(newest, 40), word(newest, 56));
    eprintln!("durable end {durable}, checkpoint: next offset {next_offset}, entries {entries}");
    let forked = sim.fork(3);
    forked.crash_process();
    drop((partition, broker));
    let broker = try_open(&forked, &topic).unwrap();
    let report = report_of(&broker);
    assert!(entries <= next_offset, "{entries} entries are vouched for, of records before offset {next_offset}");
    assert!(report.from_checkpoint, "the checkpoint was of no use: {} bytes scanned", report.scanned_bytes);
}

fn slot_vec(sim: &SimDisk) -> Vec<u8> {
    sim.read_file(&sim::dir().join("checkpoint"))
}

fn slot_of(file: &[u8], slot: usize) -> Vec<u8> {
    file[slot * 4096..].to_vec()
}

fn slot_bytes(slot: &[u8], at: usize) -> [u8; 8] {
    slot[at..at + 8].try_into().unwrap()
}

/// Room that a next segment took whose sync failed is neither given up for this segment nor given back on closing.
#[test]
fn what_is_left_of_a_next_segment_that_could_not_be_made_is_gone() {
    let (sim, broker, partition) = create(seed(), &TopicConfig { preallocate_bytes: 64 << 10, ..ahead() });
    sim.fail_by_chance(RandomFault {
        on: OpKind::Sync,
        path_suffix: Some("prepared.log".into()),
        per_million: 1_000_000,
        effect: Effect::Error(ENOSPC),
    });
    for _ in 0..4 {
        append(&partition, 200_000).unwrap();
    }
    until("it was tried", || prepared_is_ready(&sim));
    std::thread::sleep(Duration::from_millis(100));
    let left: Vec<_> = names(&sim).into_iter().filter(|name| name.starts_with("prepared")).collect();
    drop(partition);
    broker.close().unwrap();
    let closed: Vec<_> = names(&sim).into_iter().filter(|name| name.starts_with("prepared")).collect();
    assert!(left.is_empty() && closed.is_empty(), "left while open {left:?}, after a clean close {closed:?}");
}

/// "Later calls tell the same."
#[test]
fn a_close_that_failed_fails_again() {
    let (sim, broker, partition) = create(seed(), &TopicConfig { durability: Durability::Os, ..TopicConfig::default() });
    append(&partition, 10).unwrap();
    sim.fail(Fault::next(OpKind::Sync, Effect::Error(EIO)).path(".log"));
    let first = broker.clone().close();
    let later = partition.append(Batch::of(None, b"x").unwrap()).unwrap_err();
    assert!(first.is_err() && later.is_failed(), "{first:?}, {later}");
    assert!(broker.close().is_err(), "the second close is content");
}

/// Settings that are valid ask io_uring for more buffers than it registers (16384).
#[test]
fn a_long_tail_of_small_commits_opens() {
    let data = scratch();
    let topic = TopicConfig { commit_bytes: 4096, tail_bytes: 65 << 20, preallocate_bytes: 64 << 10, ..TopicConfig::default() };
    for backend in [Backend::Posix, Backend::Auto] {
        let broker = Broker::open(data.path().join(format!("{backend:?}")), config(backend, topic.clone())).unwrap();
        broker.create_topic(TOPIC, topic.clone()).unwrap_or_else(|error| panic!("{backend:?}: {error}"));
        broker.close().unwrap();
    }
}

#[test]
fn close_is_told_what_failed() {
    let (sim, _broker, partition) = create(seed(), &TopicConfig { durability: Durability::Os, ..TopicConfig::default() });
    append(&partition, 10).unwrap();
    let broker = _broker;
    sim.fail(Fault::next(OpKind::Sync, Effect::Error(EIO)).path(".log"));
    let first = broker.clone().close();
    assert!(partition.sync().is_err());
    let later = partition.append(Batch::of(None, b"x").unwrap()).unwrap_err();
    assert!(first.is_err());
    assert!(later.is_failed(), "the sync on closing failed, and a later append hears: {later}");
}
