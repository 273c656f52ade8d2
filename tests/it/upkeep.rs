//! What is done beside the appends: it does not hold them up, does not keep an idle writer busy, leaves nothing behind, and loses
//! nothing, also where the next commit is filled beside one that is in flight.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sapwood::clock::Clock;
use sapwood::io::Disk;
use sapwood::io::sim::{Effect, Fault, OpKind, RandomFault, SimDisk};
use sapwood::{Backend, Batch, Broker, Durability, Partition, TopicConfig};

use crate::format::Slot;
use crate::sim::{self, DATA, EIO, ENOSPC, create, names, prepared_is_ready, try_open, until};
use crate::support::{TOPIC, config, partition_of, read_all, report_of, scratch, seed};

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
        // What is still being done after the last append comes to an end; then real time passes in which nothing may be asked.
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

/// A roll makes a checkpoint due; before anything was written, none is begun.
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

/// A checkpoint syncs the indexes, and the writer looks at them while it appends.
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

/// At the levels that sync later, index entries go into the files before their records are durable.
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
        drop(partition.append(Batch::of(None, b"value").unwrap()).unwrap());
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
        // Longer than an idle writer leaves entries in memory.
        std::thread::sleep(Duration::from_millis(120));
        sim.read_file(&sim::dir().join("00000000000000000000.index")).len() as u64 / 16 > partition.durable_end() + 100
    });
    clock.jump(10);
    until("a checkpoint is there", || {
        let _ = append(&partition, 10);
        sim.exists(&sim::dir().join("checkpoint")) && sim.ops().iter().any(|op| op.kind == OpKind::Sync && op.path.ends_with("checkpoint"))
    });
    // Time for what is begun to end, which nothing tells: the promise holds at any moment.
    std::thread::sleep(Duration::from_millis(100));
    let Slot { next_offset, entries, .. } = sim::checkpoint(&sim).unwrap();
    let forked = sim.fork(3);
    forked.crash_process();
    drop((partition, broker));
    let broker = try_open(&forked, &topic).unwrap();
    let report = report_of(&broker);
    assert!(entries <= next_offset, "{entries} entries are vouched for, of records before offset {next_offset}");
    assert!(report.from_checkpoint, "the checkpoint was of no use: {} bytes scanned", report.scanned_bytes);
}

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
    // Time for it to be removed, or wrongly made again, which nothing tells.
    std::thread::sleep(Duration::from_millis(100));
    let left: Vec<_> = names(&sim).into_iter().filter(|name| name.starts_with("prepared")).collect();
    drop(partition);
    broker.close().unwrap();
    let closed: Vec<_> = names(&sim).into_iter().filter(|name| name.starts_with("prepared")).collect();
    assert!(left.is_empty() && closed.is_empty(), "left while open {left:?}, after a clean close {closed:?}");
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

/// Whoever comes after a closing that failed is told of it, too.
#[test]
fn close_is_told_what_failed() {
    let (sim, broker, partition) = create(seed(), &TopicConfig { durability: Durability::Os, ..TopicConfig::default() });
    append(&partition, 10).unwrap();
    sim.fail(Fault::next(OpKind::Sync, Effect::Error(EIO)).path(".log"));
    let first = broker.clone().close();
    let sync = partition.sync();
    let later = partition.append(Batch::of(None, b"x").unwrap()).unwrap_err();
    eprintln!("first {first:?}\nsync {sync:?}\nlater append: {later:?}\ndurable {}", partition.durable_end());
    assert!(first.is_err());
    assert!(later.is_failed(), "the sync on closing failed, and a later append hears: {later}");
}

/// One that is begun before a segment's first commit, and done after it.
#[test]
fn a_checkpoint_begun_on_a_roll_fits_the_segment() {
    let topic = TopicConfig { linger_us: 300_000, ..ahead() };
    let (sim, broker, partition) = create(seed(), &topic);
    for _ in 0..5 {
        append(&partition, 200_000).unwrap();
    }
    until("the next segment is ready", || prepared_is_ready(&sim));
    // The sealing of the old one takes its time, and the checkpoint waits behind it.
    let hold = sim.hold(OpKind::Sync, Some("00000000000000000000.log"));
    append(&partition, 200_000).unwrap();
    hold.wait_until_held();
    hold.release();
    until("the checkpoint is of the new segment", || sim::checkpoint(&sim).is_some_and(|slot| slot.base == 5));
    // Time for the checkpoint's sync to end, which nothing tells: the promise holds at any moment.
    std::thread::sleep(Duration::from_millis(100));
    let forked = sim.fork(3);
    forked.crash_process();
    drop((partition, broker));
    let broker = try_open(&forked, &topic).unwrap();
    let report = report_of(&broker);
    assert!(report.from_checkpoint, "the checkpoint was of no use: {} bytes scanned", report.scanned_bytes);
}

/// Index files are opened by name when entries are written, and made with the first. A partition whose segment is nearly full and has entries that
/// could not be written so far, and whose next one is ready.
fn create_with_entries_that_wait() -> (SimDisk, Arc<Jumping>, Broker, Partition) {
    let (sim, clock, broker, partition) = create_with(&ahead());
    let (path_suffix, effect) = (Some(".index".to_owned()), Effect::Error(ENOSPC));
    sim.fail_by_chance(RandomFault { on: OpKind::Write, path_suffix, per_million: 1_000_000, effect });
    for _ in 0..5 {
        append(&partition, 200_000).unwrap();
    }
    until("the next segment is ready", || prepared_is_ready(&sim));
    (sim, clock, broker, partition)
}

/// Has the entries written that wait: by the last of these appends upkeep was told to.
fn append_until_entries_are_due(clock: &Jumping, partition: &Partition) {
    for _ in 0..3 {
        // Longer than they are left in memory.
        clock.jump(1);
        append(partition, 10).unwrap();
    }
}

#[track_caller]
fn assert_only_segment(sim: &SimDisk, base: u64) {
    let base = format!("{base:020}.");
    let others: Vec<_> = names(sim).into_iter().filter(|name| !name.starts_with(&base) && name != "checkpoint").collect();
    assert!(others.is_empty(), "of a segment that is gone there is {others:?}");
}

#[test]
fn entries_whose_turn_comes_after_their_segment_went_leave_no_file() {
    let (sim, clock, broker, partition) = create_with_entries_that_wait();
    // Upkeep is at the checkpoint, and the entries come after it.
    let hold = sim.hold(OpKind::Write, Some("checkpoint"));
    clock.jump(10);
    append(&partition, 10).unwrap();
    hold.wait_until_held();
    sim.clear_faults();
    append_until_entries_are_due(&clock, &partition);
    let first_of_next = append(&partition, 200_000).unwrap();
    let removed = partition.truncate_before(first_of_next).unwrap();
    assert_eq!(removed.records, 0..first_of_next);
    hold.release();
    drop(partition);
    broker.close().unwrap();
    assert_only_segment(&sim, first_of_next);
}

#[test]
fn a_segment_that_goes_while_its_entries_are_being_written_leaves_no_file() {
    let (sim, clock, broker, partition) = create_with_entries_that_wait();
    let hold = sim.hold(OpKind::Create, Some("00000000000000000000.index"));
    sim.clear_faults();
    append_until_entries_are_due(&clock, &partition);
    hold.wait_until_held();
    let first_of_next = append(&partition, 200_000).unwrap();
    let removing = {
        let partition = partition.clone();
        std::thread::spawn(move || partition.truncate_before(first_of_next))
    };
    // Time for a removal that does not wait, which nothing tells: one that does may come at any moment.
    std::thread::sleep(Duration::from_millis(100));
    hold.release();
    assert_eq!(removing.join().unwrap().unwrap().records, 0..first_of_next);
    drop(partition);
    broker.close().unwrap();
    assert_only_segment(&sim, first_of_next);
}

/// The simulated disk, with a ring that is said to overlap: the writer's path on io_uring (a commit in flight beside one that is
/// filled) under the simulated disk's crashes and faults, which no other test has.
#[derive(Debug)]
struct Overlapping(SimDisk);

impl Disk for Overlapping {
    fn create_dir(&self, path: &Path) -> std::io::Result<()> {
        self.0.create_dir(path)
    }
    fn list(&self, dir: &Path) -> std::io::Result<Vec<sapwood::io::Entry>> {
        self.0.list(dir)
    }
    fn open(&self, path: &Path, how: sapwood::io::Open) -> std::io::Result<Arc<dyn sapwood::io::File>> {
        self.0.open(path, how)
    }
    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        self.0.rename(from, to)
    }
    fn replace(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        self.0.replace(from, to)
    }
    fn link(&self, file: &Path, name: &Path) -> std::io::Result<()> {
        self.0.link(file, name)
    }
    fn remove_file(&self, path: &Path) -> std::io::Result<()> {
        self.0.remove_file(path)
    }
    fn remove_dir(&self, path: &Path) -> std::io::Result<()> {
        self.0.remove_dir(path)
    }
    fn sync_dir(&self, dir: &Path) -> std::io::Result<()> {
        self.0.sync_dir(dir)
    }
    fn open_dir(&self, dir: &Path) -> std::io::Result<Box<dyn sapwood::io::Directory>> {
        self.0.open_dir(dir)
    }
    fn lock(&self, path: &Path) -> std::io::Result<Box<dyn sapwood::io::Lock>> {
        self.0.lock(path)
    }
    fn ring(&self, config: &sapwood::io::RingConfig) -> std::io::Result<Box<dyn sapwood::io::Ring>> {
        self.0.ring(config)
    }
    fn rings_overlap(&self) -> bool {
        true
    }
    fn backend(&self) -> &'static str {
        self.0.backend()
    }
}

fn create_overlapping(seed: u64, topic: &TopicConfig) -> (SimDisk, Broker, Partition) {
    let sim = SimDisk::new(seed);
    let clock = Arc::new(sapwood::clock::SystemClock::new());
    let broker = Broker::open_on(Arc::new(Overlapping(sim.clone())), clock, DATA, config(Backend::Auto, topic.clone())).unwrap();
    broker.create_topic(TOPIC, topic.clone()).unwrap();
    let partition = partition_of(&broker);
    (sim, broker, partition)
}

fn numbered(number: u64) -> Vec<u8> {
    let mut value = number.to_be_bytes().to_vec();
    value.resize(8 + (number * 7919 % 60_000) as usize, number.to_le_bytes()[0]);
    value
}

/// Sends many without waiting, and tells how many were acknowledged, from the first on.
fn flood(partition: &Partition, count: u64) -> u64 {
    let mut tickets = Vec::new();
    for number in 0..count {
        match partition.append(Batch::of(None, &numbered(number)).unwrap()) {
            Ok(ticket) => tickets.push(ticket),
            Err(_) => break,
        }
    }
    let mut acknowledged = 0;
    for ticket in tickets {
        if let Ok(offsets) = ticket.wait() {
            assert_eq!(offsets.start, acknowledged);
            acknowledged += 1;
        }
    }
    acknowledged
}

#[track_caller]
fn assert_flood(sim: &SimDisk, acknowledged: u64, what: &str) {
    let broker = try_open(sim, &ahead()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let rows = read_all(&partition_of(&broker));
    assert!(rows.len() as u64 >= acknowledged, "{what}: {} of {acknowledged}", rows.len());
    for (number, row) in (0..).zip(&rows) {
        assert!(row.offset == number && row.value == numbered(number), "{what}: record {number}");
    }
    broker.close().unwrap();
    sim::assert_closed(sim, 1);
}

#[test]
fn crashes_beside_a_commit_in_flight_lose_nothing_acknowledged() {
    let seed = seed();
    let topic = TopicConfig { commit_bytes: 256 << 10, tail_bytes: 512 << 10, ..ahead() };
    let (sim, broker, partition) = create_overlapping(seed, &topic);
    let before = sim.state_changes();
    assert_eq!(flood(&partition, 100), 100);
    let points = sim.state_changes() - before;
    drop((partition, broker));
    assert_flood(&sim, 100, "no crash");
    for point in 1..=points {
        for crash in 0..3 {
            let what = format!("crash {crash} at operation {point} of {points}");
            let (sim, broker, partition) = create_overlapping(seed ^ point, &topic);
            sim.crash_at_op(point);
            let acknowledged = flood(&partition, 100);
            drop((partition, broker));
            match crash {
                0 => sim.crash_process(),
                1 => {
                    sim.tear_pages(true);
                    sim.power_loss();
                }
                _ => sim.power_loss_keeping_nothing(),
            }
            assert_flood(&sim, acknowledged, &what);
        }
    }
}

#[test]
fn direct_writes_refused_in_flight_go_through_the_page_cache() {
    let topic = TopicConfig { commit_bytes: 256 << 10, tail_bytes: 512 << 10, ..ahead() };
    for refused in 1..12 {
        for partial in [false, true] {
            let (sim, broker, partition) = create_overlapping(seed(), &topic);
            let effect = if partial { Effect::ErrorAfterPartial { bytes: 8192, errno: 22 } } else { Effect::Error(22) };
            sim.fail(Fault::next(OpKind::Write, effect).path(".log").nth(refused));
            sim.fail_by_chance(RandomFault {
                on: OpKind::Write,
                path_suffix: Some(".log".into()),
                per_million: 300_000,
                effect: Effect::ShortBySeed,
            });
            let acknowledged = flood(&partition, 150);
            assert_eq!(acknowledged, 150);
            assert_eq!(read_all(&partition).len(), 150);
            drop((partition, broker));
            sim.clear_faults();
            sim.power_loss_keeping_nothing();
            assert_flood(&sim, 150, &format!("refused {refused} {partial}"));
        }
    }
}

fn open_overlapping(sim: &SimDisk, topic: &TopicConfig) -> sapwood::Result<Broker> {
    let clock = Arc::new(sapwood::clock::SystemClock::new());
    Broker::open_on(Arc::new(Overlapping(sim.clone())), clock, DATA, config(Backend::Auto, topic.clone()))
}

/// Several lives of a partition: floods, rolls, refusals for want of room, short writes, direct writes that are refused, and
/// crashes anywhere. What was acknowledged is at its offset afterwards, and nothing that was never sent.
#[test]
fn lives_of_floods_refusals_and_crashes_keep_what_was_acknowledged() {
    let seed = seed();
    for run in 0..15 {
        let mut rng = crate::support::Rng::new(seed ^ run);
        let durability = rng.one_of(&[
            Durability::Durable,
            Durability::Durable,
            Durability::Os,
            Durability::Interval { bytes: 200_000, time: Duration::from_millis(2) },
        ]);
        let topic = TopicConfig {
            durability,
            segment_bytes: rng.one_of(&[1 << 20, 2 << 20, 3_000_000]),
            preallocate_bytes: rng.one_of(&[1 << 20, 64 << 10, 4 << 20]),
            commit_bytes: rng.one_of(&[64 << 10, 256 << 10, 1 << 20]),
            tail_bytes: rng.one_of(&[0, 512 << 10]),
            linger_us: rng.one_of(&[0, 0, 300]),
            ..TopicConfig::default()
        };
        let sim = SimDisk::new(rng.next());
        let mut broker = open_overlapping(&sim, &topic).unwrap();
        broker.create_topic(TOPIC, topic.clone()).unwrap();
        let mut acknowledged = std::collections::BTreeMap::new();
        let mut number = 0;
        for life in 0..4 {
            let what = format!("run {run}, life {life}, {topic:?}");
            let partition = partition_of(&broker);
            if rng.below(2) == 0 {
                sim.set_capacity(Some(sim.used() + rng.below(5 << 20)));
            }
            if rng.below(2) == 0 {
                let on = rng.one_of(&[OpKind::Allocate, OpKind::Rename, OpKind::Create]);
                sim.fail_by_chance(RandomFault { on, path_suffix: None, per_million: 300_000, effect: Effect::Error(ENOSPC) });
            }
            sim.fail_by_chance(RandomFault { on: OpKind::Write, path_suffix: None, per_million: 100_000, effect: Effect::ShortBySeed });
            if rng.below(4) == 0 && durability == Durability::Durable {
                sim.fail(Fault::next(OpKind::Write, Effect::Error(22)).path(".log").nth(1 + rng.below(20)));
            }
            if rng.below(4) > 0 {
                sim.crash_at_op(1 + rng.below(250));
            }
            let mut tickets = Vec::new();
            for _ in 0..150 {
                let mut batch = Batch::new();
                for _ in 0..1 + rng.below(4) {
                    let mut value = numbered(number);
                    value.truncate(8 + rng.one_of(&[50, 5000, 60_000]));
                    batch.push(None, &value).unwrap();
                    number += 1;
                }
                let sent = number - batch.len();
                if rng.below(4) == 0 {
                    match partition.append_and_wait(batch) {
                        Ok(offsets) => acknowledged.extend(offsets.zip(sent..)),
                        Err(sapwood::Error::DiskFull { .. }) => {}
                        Err(_) => break,
                    }
                    continue;
                }
                match partition.append(batch) {
                    Ok(ticket) => tickets.push((sent, ticket)),
                    Err(_) => break,
                }
                if rng.below(40) == 0 {
                    let _ = partition.sync();
                }
                if rng.below(10) == 0 {
                    // Lets the commits before this one end at another moment each time.
                    std::thread::sleep(Duration::from_micros(rng.below(2000)));
                }
            }
            for (sent, ticket) in tickets {
                if let Ok(offsets) = ticket.wait() {
                    for (offset, sent) in offsets.zip(sent..) {
                        acknowledged.insert(offset, sent);
                    }
                }
            }
            let synced = partition.durable_end();
            let crashed = sim.crashed();
            sim.clear_faults();
            sim.set_capacity(None);
            if !crashed && rng.below(2) == 0 {
                drop(partition);
                let _ = broker.close();
            } else {
                drop((partition, broker));
            }
            let process = rng.below(2) == 0;
            match (process, rng.below(2)) {
                (true, _) => sim.crash_process(),
                (_, 0) => sim.power_loss_keeping_nothing(),
                _ => {
                    sim.tear_pages(true);
                    sim.power_loss()
                }
            }
            if !process && durability != Durability::Durable {
                acknowledged.retain(|&offset, _| offset < synced);
            }
            broker = open_overlapping(&sim, &topic).unwrap_or_else(|error| panic!("{what}: {error}"));
            let rows = read_all(&partition_of(&broker));
            assert!(rows.len() as u64 >= synced, "{what}: {} records, {synced} were durable", rows.len());
            let mut before = None;
            for (offset, row) in (0..).zip(&rows) {
                assert_eq!(row.offset, offset, "{what}");
                let sent = u64::from_be_bytes(row.value[..8].try_into().unwrap());
                assert!(sent < number && numbered(sent).starts_with(&row.value), "{what}: record {offset}");
                assert!(before < Some(sent), "{what}: record {offset} was sent before the one before it");
                before = Some(sent);
                assert!(acknowledged.get(&offset).is_none_or(|&acknowledged| acknowledged == sent), "{what}: another record at {offset}");
            }
            if let Some((&last, _)) = acknowledged.last_key_value() {
                assert!(last < rows.len() as u64, "{what}: {last} was acknowledged, and there are {}", rows.len());
            }
            assert!(broker.report().partitions.iter().all(|report| report.damage.is_empty()), "{what}: {:?}", broker.report());
            sim::assert_sound(&sim);
            acknowledged = (0..).zip(&rows).map(|(offset, row)| (offset, u64::from_be_bytes(row.value[..8].try_into().unwrap()))).collect();
        }
    }
}

/// Power goes after a roll into a segment that was made ahead, and before the old one's indexes are synced: pages of them are lost,
/// and the last ones are not.
#[test]
fn indexes_that_a_power_loss_tore_before_they_were_sealed_are_mended() {
    let (sim, broker, partition) = create(seed(), &ahead());
    for _ in 0..600 {
        append(&partition, 1700).unwrap();
    }
    until("the next segment is ready", || prepared_is_ready(&sim));
    let hold = sim.hold(OpKind::Sync, Some("00000000000000000000.log"));
    let mut last = 600;
    while partition.stats().rolls == 0 {
        last = append(&partition, 1700).unwrap();
    }
    hold.wait_until_held();
    let forks: Vec<_> = (0..60).map(|seed| sim.fork(seed)).collect();
    hold.release();
    drop((partition, broker));
    let mut torn = Vec::new();
    for (number, fork) in forks.into_iter().enumerate() {
        fork.power_loss();
        let broker = try_open(&fork, &ahead()).unwrap();
        assert!(partition_of(&broker).durable_end() > last);
        broker.close().unwrap();
        let index = |name: &str| fork.read_file(&sim::dir().join(name));
        let zeros = |bytes: Vec<u8>| bytes.chunks(16).skip(1).filter(|entry| entry.iter().all(|&byte| byte == 0)).count();
        let zeros = (zeros(index("00000000000000000000.index")), zeros(index("00000000000000000000.timeindex")));
        if zeros != (0, 0) {
            torn.push((number, zeros));
        }
    }
    assert!(torn.is_empty(), "zero entries in sealed indexes after opening and a clean close (fork, (index, timeindex)): {torn:?}");
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
