//! Many partitions in one broker: what they hold when they rest and when they do not, the limits of a process that they meet (B123, B125),
//! and threads that they share.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use sapwood::clock::{Clock, SystemClock};
use sapwood::io::sim::{Effect, Fault, OpKind, SimDisk};
use sapwood::io::{
    BlockingRing, Buffer, Completion, Directory, Disk, Entry, File, Lock, Op, Open, OsDisk, Rejected, Ring, RingConfig, Slot, Token, Waker,
};
use sapwood::{Backend, Batch, Broker, BrokerConfig, Durability, Error, Partition, Ticket, Topic, TopicConfig, Writers};
use serde_json::json;

use crate::child::{self, Child, argument, backend, backend_name, say};
use crate::oracle::assert_closed;
use crate::sim::{DATA, EIO};
use crate::support::{
    Rng, TOPIC, append, assert_in_order, config, contents, each_backend, open, partition_of, read_all, scratch, seed, small,
};
use crate::warnings::Warnings;

/// How long a test waits for what must come before it takes itself for stuck.
const HANG_LIMIT: Duration = Duration::from_secs(120);

/// A writer rests after 5 s.
const LONGER_THAN_WORK_IS_PUT_OFF: Duration = Duration::from_secs(7);

#[track_caller]
fn until(mut ready: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < HANG_LIMIT, "it does not come");
        thread::sleep(Duration::from_millis(20));
    }
}

// ---------------------------------------------------------------- what a process holds

fn open_files() -> usize {
    // Without the one that lists them.
    fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

fn status(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

/// The threads of this process, each with what the kernel says of it. Without its own workers for rings, to which some file systems
/// leave what others do in the call: one that has nothing to do stays, and looks every 5 s.
fn tasks() -> impl Iterator<Item = (String, String)> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap());
    // One that ended meanwhile says nothing any more.
    let tasks =
        tasks.map(|task| (task.file_name().into_string().unwrap(), fs::read_to_string(task.path().join("status")).unwrap_or_default()));
    tasks.filter(|(_, status)| !status.starts_with("Name:\tiou-wrk-"))
}

fn threads() -> usize {
    tasks().count()
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// How often each thread but the one that calls was taken off its CPU, and so had run before.
fn wakes() -> BTreeMap<String, String> {
    let own = rustix::thread::gettid().as_raw_nonzero().to_string();
    let switches = |status: &str| status.lines().filter(|line| line.contains("ctxt_switches")).collect();
    tasks().filter(|(task, _)| *task != own).map(|(task, status)| (task, switches(&status))).collect()
}

fn writers() -> Writers {
    match argument("writers").as_u64().unwrap() {
        0 => Writers::PerPartition,
        threads => Writers::Shared(threads as u32),
    }
}

fn broker_config(writers: Writers) -> BrokerConfig {
    // The thread of retention looks every minute, for all partitions together.
    BrokerConfig { writers, retention_every: None, ..config(backend(), small()) }
}

/// Partitions that all took a record rest, and hold next to nothing.
pub fn rest_role() {
    let count = argument("partitions").as_u64().unwrap() as u32;
    let (files_before, threads_before) = (open_files(), threads());
    let broker = Broker::open(child::text("data"), broker_config(writers())).unwrap();
    let topic = TopicConfig { partitions: count, preallocate_bytes: 4096, ..TopicConfig::default() };
    let topic = broker.create_topic(TOPIC, topic).unwrap();
    let memory_before = status("VmRSS");
    // Twice, so that each was busy: its upkeep began, and it took memory from the pool.
    for round in 0..2 {
        for partition in topic.partitions() {
            assert_eq!(append(&partition, b"key", b"value"), round);
        }
    }
    let shared = match writers() {
        Writers::PerPartition => count as usize,
        Writers::Shared(writers) => (writers + writers.max(2)) as usize,
    };
    // The lock; a ring and its eventfd for each shared thread.
    let own = 8;
    // Those that rest are woken by nothing, and hold nothing but their logs: so it is once nobody woke for longer than what is put off.
    let mut before = BTreeMap::new();
    until(|| {
        let files = open_files() - files_before;
        assert!(files <= 4 * count as usize + own, "{files} files of {count} partitions");
        thread::sleep(LONGER_THAN_WORK_IS_PUT_OFF);
        std::mem::replace(&mut before, wakes()) == before
    });
    let (files, threads_now) = (open_files() - files_before, threads() - threads_before);
    let grown = status("VmRSS").saturating_sub(memory_before);
    say(&format!("{files} files, {threads_now} threads, {grown} KiB more"));
    assert!(files <= count as usize + own, "{files} files of {count} partitions");
    assert_eq!(threads_now, shared);
    // They go on where they were.
    for partition in topic.partitions().iter().step_by(97) {
        assert_eq!(append(partition, b"key", b"once more"), 2);
        assert_eq!(contents(&read_all(partition)).len(), 3);
    }
    drop(topic);
    broker.close().unwrap();
    assert_eq!((open_files(), threads()), (files_before, threads_before));
    say(&grown.to_string());
}

/// Gives the memory that the partitions grew by, KiB.
fn rest(partitions: u32, writers: u32) -> u64 {
    let data = scratch();
    let arguments = json!({ "data": data.path(), "backend": "auto", "partitions": partitions, "writers": writers });
    let mut child = Child::start("rest", &arguments);
    eprintln!("{partitions} partitions, {writers} shared writers: {}", child.expect_line());
    let grown = child.expect_line().parse().unwrap();
    assert!(child.finish().success());
    grown
}

#[test]
fn two_thousand_partitions_at_rest_hold_one_file_each_and_wake_for_nothing() {
    let grown = rest(2000, 2);
    assert!(grown < 2000 * 32, "{grown} KiB");
}

#[test]
fn partitions_at_rest_with_a_thread_each_hold_one_file_each_and_wake_for_nothing() {
    let grown = rest(150, 0);
    // Their threads' stacks, too.
    assert!(grown < 150 * 96, "{grown} KiB");
}

// ---------------------------------------------------------------- limits

fn limit(resource: Resource, current: u64) {
    setrlimit(resource, Rlimit { current: Some(current), ..getrlimit(resource) }).unwrap();
}

/// Without the right to lock as much memory as one likes, which root has.
fn give_up_locking() {
    let CapabilitySets { effective, permitted, inheritable } = capabilities(None).unwrap();
    let none = CapabilitySet::IPC_LOCK;
    set_capabilities(None, CapabilitySets { effective: effective - none, permitted: permitted - none, inheritable }).unwrap();
}

/// Crowds of producers on each of some partitions, so that each takes its memory and its ring. Then everything is there.
fn be_busy(topic: &Topic) {
    let partitions = topic.partitions();
    let begun: Vec<u64> = partitions.iter().map(Partition::next_offset).collect();
    thread::scope(|scope| {
        for (number, partition) in partitions.iter().enumerate() {
            for producer in 0..3_u8 {
                scope.spawn(move || {
                    for round in 0..6 {
                        let tickets: Vec<_> = (0..4)
                            .map(|_| partition.append(Batch::of(Some(&[producer]), &vec![round; 40_000 + number]).unwrap()).unwrap())
                            .collect();
                        for ticket in tickets {
                            ticket.wait().unwrap();
                        }
                    }
                });
            }
        }
    });
    for (number, partition) in partitions.iter().enumerate() {
        let rows = read_all(partition);
        assert_in_order(&rows, 0);
        let rows = &rows[begun[number] as usize..];
        assert_eq!(rows.len(), 3 * 6 * 4);
        for producer in 0..3 {
            let own = rows.iter().filter(|row| row.key == [producer]);
            assert!(own.map(|row| row.value.clone()).eq((0..6).flat_map(|round| vec![vec![round; 40_000 + number]; 4])));
        }
    }
}

/// Hardly any memory may be locked: hundreds of partitions are made all the same, and those that are busy work.
pub fn little_locked_memory_role() {
    let warnings = Warnings::collect();
    give_up_locking();
    limit(Resource::Memlock, 64 << 10);
    let (files, threads_before) = (open_files(), threads());
    let broker = Broker::open(child::text("data"), broker_config(writers())).unwrap();
    let many = broker.create_topic("many", TopicConfig { partitions: 500, preallocate_bytes: 4096, ..TopicConfig::default() }).unwrap();
    let busy = broker.create_topic(TOPIC, TopicConfig { partitions: 3, ..small() }).unwrap();
    be_busy(&busy);
    for partition in many.partitions().iter().step_by(50) {
        append(partition, b"key", b"value");
    }
    let naming = |limit| warnings.all().into_iter().filter(|text| text.contains(limit)).collect::<Vec<_>>();
    // A writer asks for its ring when there is enough to do beside a write, which is up to the device, too.
    let more = broker.create_topic("more", TopicConfig { partitions: 1, ..small() }).unwrap();
    until(|| {
        be_busy(&more);
        !argument("registers").as_bool().unwrap() || !naming("RLIMIT_MEMLOCK").is_empty()
    });
    let told = naming("RLIMIT_MEMLOCK");
    drop((many, busy, more));
    broker.close().unwrap();
    assert_eq!((open_files(), threads()), (files, threads_before));
    assert_eq!(warnings.all(), told, "no other warning");
    say(&json!(told).to_string());
}

#[test]
fn b123_b125_with_little_locked_memory_buffers_stay_unregistered_after_one_warning() {
    each_backend(|backend| {
        for writers in [0, 2] {
            let data = scratch();
            // Threads that many share register nothing, plain calls neither.
            let registers = backend == Backend::Auto && writers == 0 && writers_use_rings(data.path());
            let arguments = json!({ "data": data.path(), "backend": backend_name(backend), "writers": writers, "registers": registers });
            let mut child = Child::start("little locked memory", &arguments);
            let told: Vec<String> = serde_json::from_str(&child.expect_line()).unwrap();
            assert!(child.finish().success());
            eprintln!("{backend:?}, {writers} shared writers: {told:?}");
            assert_eq!(told.len(), usize::from(registers), "{told:?}");
            assert!(told.iter().all(|text| text.contains("limit=65536 ") && text.contains("needed=4194304")), "{told:?}");
            let broker = open(data.path(), backend, &small());
            assert_eq!(broker.topic("many").unwrap().partitions().iter().map(Partition::next_offset).sum::<u64>(), 10);
            assert!(broker.topic(TOPIC).unwrap().partitions().iter().all(|partition| partition.next_offset() == 72));
        }
    });
}

/// Whether the kernel grants rings, and the file system direct I/O, without which they are of no use.
fn writers_use_rings(dir: &Path) -> bool {
    let file = dir.join("direct");
    let open = |disk: OsDisk| disk.open(&file, Open { direct: true, ..Open::NEW }).and_then(|_| disk.remove_file(&file));
    OsDisk::new(Backend::Uring).is_ok_and(|disk| open(disk).is_ok())
}

/// More partitions than there are descriptors for: one topic each, and one topic of all.
pub fn few_descriptors_role() {
    limit(Resource::Nofile, 256);
    let (files, threads_before) = (open_files(), threads());
    let data = child::text("data");
    let broker = Broker::open(&data, broker_config(writers())).unwrap();
    let topic = || TopicConfig { preallocate_bytes: 4096, ..TopicConfig::default() };
    let assert_too_many = |error: &Error| assert!(matches!(error, Error::TooManyOpenFiles { limit: Some(256), .. }), "{error}");
    let mut made = Vec::new();
    let error = loop {
        match broker.create_topic(&format!("one-{}", made.len()), topic()) {
            Ok(topic) => made.push(topic.partition(0).unwrap()),
            Err(error) => break error,
        }
        assert!(made.len() < 500, "no limit was met");
    };
    assert_too_many(&error);
    assert!(made.len() > 200, "{} partitions, then: {error}", made.len());
    assert_eq!(broker.topics().len(), made.len());
    // Nothing of the one that did not fit is left, under its own name or under a hidden one.
    let left = fs::read_dir(&data).map(|entries| entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>());
    for (number, partition) in made.iter().enumerate() {
        assert_eq!(append(partition, b"key", &number.to_be_bytes()), 0);
        // Whoever writes its index just now has the last one.
        until(|| match partition.read_one(0) {
            Ok(record) => record.value[..] == number.to_be_bytes(),
            Err(error) => error.is_too_many_open_files().then_some(false).unwrap(),
        });
    }
    assert_eq!(left.unwrap().len(), made.len() + 1);
    let count = made.len();
    drop(made);
    broker.close().unwrap();
    assert_eq!((open_files(), threads()), (files, threads_before));
    // A topic of more partitions than that is not made at all.
    let broker = Broker::open(format!("{data}-2"), broker_config(writers())).unwrap();
    let held = open_files();
    assert_too_many(&broker.create_topic(TOPIC, TopicConfig { partitions: 500, ..topic() }).unwrap_err());
    assert_eq!((broker.topics(), open_files()), (Vec::new(), held));
    assert_eq!(fs::read_dir(format!("{data}-2")).unwrap().count(), 1, "only the lock is left");
    let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 100, ..topic() }).unwrap();
    append(&topic.partition(99).unwrap(), b"key", b"value");
    drop(topic);
    broker.close().unwrap();
    assert_eq!((open_files(), threads()), (files, threads_before));
    say(&count.to_string());
}

#[test]
fn b125_the_partition_that_does_not_fit_gets_a_clear_error_and_the_others_go_on() {
    each_backend(|backend| {
        for writers in [0, 2] {
            let data = scratch();
            let at = data.path().join("data");
            let arguments = json!({ "data": at, "backend": backend_name(backend), "writers": writers });
            let mut child = Child::start("few descriptors", &arguments);
            let made: usize = child.expect_line().parse().unwrap();
            assert!(child.finish().success());
            let broker = open(&at, backend, &small());
            assert_eq!((broker.topics().len(), broker.report().removed.len()), (made, 0));
            for name in broker.topics() {
                assert_eq!(read_all(&broker.topic(&name).unwrap().partition(0).unwrap()).len(), 1);
            }
        }
    });
}

/// Topics come and go, and so do brokers.
pub fn coming_and_going_role() {
    let data = child::text("data");
    let mut seen = Vec::new();
    for round in 0..argument("rounds").as_u64().unwrap() {
        let broker = Broker::open(&data, broker_config(writers())).unwrap();
        let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 2, preallocate_bytes: 4096, ..TopicConfig::default() }).unwrap();
        let partition = topic.partition(0).unwrap();
        append(&partition, b"key", b"one");
        partition.append_and_wait(Batch::of(None, b"two").unwrap()).unwrap();
        drop((partition, topic));
        if round % 2 == 0 {
            broker.delete_topic(TOPIC).unwrap();
            broker.close().unwrap();
        } else {
            drop(broker);
            fs::remove_dir_all(Path::new(&data).join(TOPIC)).unwrap();
        }
        seen.push((open_files(), threads(), mappings()));
    }
    say(&json!(seen).to_string());
}

#[test]
fn b125_five_hundred_comings_and_goings_leave_nothing_behind() {
    for writers in [0, 2] {
        let data = scratch();
        let mut child =
            Child::start("coming and going", &json!({ "data": data.path(), "backend": "auto", "writers": writers, "rounds": 500 }));
        let seen: Vec<(usize, usize, usize)> = serde_json::from_str(&child.expect_line()).unwrap();
        assert!(child.finish().success());
        let (early, last) = (seen[99], seen[499]);
        assert_eq!((early.0, early.1), (last.0, last.1), "descriptors and threads");
        // The allocator has regions of its own for threads.
        assert!(last.2 <= early.2 + 40, "mappings grew from {} to {}", early.2, last.2);
    }
}

// ---------------------------------------------------------------- shared threads

/// Both numbers of threads, on real files by each backend.
fn each_crew(test: impl Fn(&Path, &BrokerConfig)) {
    each_backend(|backend| {
        for threads in [1, 2] {
            let data = scratch();
            test(data.path(), &BrokerConfig { writers: Writers::Shared(threads), ..config(backend, small()) });
        }
    });
}

/// One producer to each partition, by all the ways to append, with others in between; gives what is in the logs.
fn produce_to_all(topic: &Topic, seed: u64, rounds: u64) -> Vec<Vec<(Vec<u8>, Vec<u8>)>> {
    let partitions = topic.partitions();
    thread::scope(|scope| {
        let producers: Vec<_> = partitions
            .iter()
            .map(|partition| {
                scope.spawn(move || {
                    let mut rng = Rng::new(seed ^ u64::from(partition.number()));
                    let mut sent = Vec::new();
                    for _ in 0..rounds {
                        let mut tickets = Vec::new();
                        for _ in 0..=rng.below(3) {
                            let len = rng.one_of(&[10, 1000, 30_000]);
                            let record = (partition.number().to_be_bytes().to_vec(), rng.bytes(len));
                            let batch = Batch::of(Some(&record.0), &record.1).unwrap();
                            sent.push(record);
                            if rng.below(3) == 0 {
                                assert_eq!(partition.append_and_wait(batch).unwrap().end, sent.len() as u64);
                            } else {
                                tickets.push((partition.append(batch).unwrap(), sent.len() as u64));
                            }
                        }
                        for (ticket, end) in tickets {
                            assert_eq!(ticket.wait().unwrap().end, end);
                        }
                        assert_eq!(partition.next_offset(), sent.len() as u64);
                    }
                    sent
                })
            })
            .collect();
        producers.into_iter().map(|producer| producer.join().unwrap()).collect()
    })
}

#[test]
fn a_crowd_of_partitions_at_few_threads_keeps_every_record_in_order() {
    let seed = seed();
    each_crew(|data, config| {
        for (name, partitions, topic) in [
            ("durable", 24, small()),
            ("rolls", 6, TopicConfig { segment_bytes: 100_000, commit_bytes: 20_000, ..small() }),
            ("cached", 6, TopicConfig { durability: Durability::Interval { bytes: 50_000, time: Duration::from_millis(5) }, ..small() }),
        ] {
            let broker = Broker::open(data, config.clone()).unwrap();
            let topic = broker.create_topic(name, TopicConfig { partitions, ..topic }).unwrap();
            let sent = produce_to_all(&topic, seed, 12);
            for (partition, sent) in topic.partitions().iter().zip(&sent) {
                partition.sync().unwrap();
                assert!(contents(&read_all(partition)) == *sent);
            }
            drop(topic);
            broker.close().unwrap();
            let broker = Broker::open(data, config.clone()).unwrap();
            for (partition, sent) in broker.topic(name).unwrap().partitions().iter().zip(&sent) {
                assert!(contents(&read_all(partition)) == *sent, "after opening again");
                assert_eq!(append(partition, b"key", b"more"), sent.len() as u64);
            }
            broker.close().unwrap();
            for number in 0..partitions {
                assert_closed(&data.join(name).join(number.to_string()), 1);
            }
        }
    });
}

#[test]
fn without_any_memory_to_hold_busy_partitions_work_all_the_same() {
    each_backend(|backend| {
        for writers in [Writers::PerPartition, Writers::Shared(2)] {
            let data = scratch();
            let config = BrokerConfig { writers, buffer_bytes: 0, ..config(backend, small()) };
            let broker = Broker::open(data.path(), config).unwrap();
            be_busy(&broker.create_topic(TOPIC, TopicConfig { partitions: 4, ..small() }).unwrap());
            broker.close().unwrap();
        }
    });
}

#[test]
fn a_topic_is_closed_while_its_partitions_are_busy_and_answers_everything() {
    each_crew(|data, config| {
        let broker = Broker::open(data, config.clone()).unwrap();
        let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 8, ..small() }).unwrap();
        let partitions = topic.partitions();
        let answered: Vec<u64> = thread::scope(|scope| {
            let producers: Vec<_> = partitions
                .iter()
                .map(|partition| {
                    scope.spawn(move || {
                        for number in 0.. {
                            match partition.append(Batch::of(None, &[7; 5000]).unwrap()).and_then(|ticket| ticket.wait()) {
                                Ok(offsets) => assert_eq!(offsets.start, number),
                                Err(error) => {
                                    assert!(error.is_closed(), "{error}");
                                    return number;
                                }
                            }
                        }
                        unreachable!("it is closed some time")
                    })
                })
                .collect();
            until(|| topic.partitions().iter().all(|partition| partition.next_offset() > 20));
            broker.close().unwrap();
            producers.into_iter().map(|producer| producer.join().unwrap()).collect()
        });
        let broker = Broker::open(data, config.clone()).unwrap();
        for (partition, answered) in broker.topic(TOPIC).unwrap().partitions().iter().zip(answered) {
            assert_eq!(partition.next_offset(), answered);
        }
    });
}

/// A topic of six partitions at two shared threads, over a disk in memory whose rings take their time.
fn on_sim(clock: Arc<dyn Clock>) -> (SimDisk, Broker, Topic) {
    let sim = SimDisk::new(seed());
    sim.overlap_rings(true);
    let config = BrokerConfig { writers: Writers::Shared(2), ..config(Backend::Auto, small()) };
    let broker = Broker::open_on(Arc::new(sim.clone()), clock, DATA, config).unwrap();
    let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 6, ..small() }).unwrap();
    (sim, broker, topic)
}

#[test]
fn a_partition_that_stops_stops_no_other_at_its_thread() {
    for kind in [OpKind::Write, OpKind::Sync] {
        let (sim, broker, topic) = on_sim(Arc::new(SystemClock::new()));
        produce_to_all(&topic, 1, 3);
        sim.fail(Fault::next(kind, Effect::Error(EIO)).path("t/2/00000000000000000000.log"));
        let failed = topic.partition(2).unwrap();
        // Appends, or the checkpoint's sync in the end.
        let error = (0..1000).find_map(|_| failed.append(Batch::of(None, &[1; 100]).unwrap()).and_then(|ticket| ticket.wait()).err());
        let stopped = error.as_ref().is_some_and(Error::is_failed);
        assert!(stopped || kind == OpKind::Sync, "{error:?}");
        for partition in topic.partitions().iter().filter(|partition| partition.number() != 2) {
            let end = partition.next_offset();
            assert_eq!(append(partition, b"key", b"goes on"), end);
        }
        assert_eq!(broker.close().is_err(), stopped);
    }
}

/// A clock that panics once for whoever asks next, when it was told to.
#[derive(Debug)]
struct PanicsOnce(SystemClock, AtomicU64);

impl Clock for PanicsOnce {
    fn wall_ns(&self) -> u64 {
        let due = self.1.swap(0, Ordering::SeqCst);
        assert!(due == 0, "the test's clock panics, as it was told to");
        self.0.wall_ns()
    }

    fn monotonic(&self) -> Duration {
        self.0.monotonic()
    }
}

#[test]
fn a_writer_that_panics_stops_no_other_at_its_thread() {
    let clock = Arc::new(PanicsOnce(SystemClock::new(), AtomicU64::new(0)));
    let (_sim, broker, topic) = on_sim(Arc::clone(&clock) as Arc<dyn Clock>);
    produce_to_all(&topic, 2, 3);
    clock.1.store(1, Ordering::SeqCst);
    let error = topic.partition(4).unwrap().append(Batch::of(None, b"x").unwrap()).unwrap().wait().unwrap_err();
    assert!(matches!(&error, Error::Failed { cause, .. } if matches!(&**cause, Error::WriterPanicked { .. })), "{error}");
    for partition in topic.partitions().iter().filter(|partition| partition.number() != 4) {
        let end = partition.next_offset();
        assert_eq!(append(partition, b"key", b"goes on"), end);
    }
    assert!(broker.close().is_err());
}

/// A disk whose rings keep a write that they are told to, until they are told to go on.
#[derive(Debug)]
struct HoldingDisk(SimDisk, Arc<Holding>);

#[derive(Debug, Default)]
struct Holding {
    next: AtomicBool,
    held: Mutex<Option<(Token, Op)>>,
    goes_on: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

impl Holding {
    fn let_go(&self) {
        self.goes_on.store(true, Ordering::SeqCst);
        self.wakers.lock().unwrap().iter().for_each(Waker::wake);
    }
}

#[derive(Debug)]
struct HoldingRing(Box<dyn Ring>, Arc<Holding>);

impl Ring for HoldingRing {
    fn take_buffers(&mut self) -> Vec<Buffer> {
        self.0.take_buffers()
    }
    fn attach(&mut self, file: Arc<dyn File>) -> io::Result<Slot> {
        self.0.attach(file)
    }
    fn detach(&mut self, slot: Slot) {
        self.0.detach(slot);
    }
    fn submit(&mut self, token: Token, op: Op) -> Result<(), Rejected> {
        if self.1.next.swap(false, Ordering::SeqCst) {
            *self.1.held.lock().unwrap() = Some((token, op));
            return Ok(());
        }
        self.0.submit(token, op)
    }
    fn reap(&mut self) -> io::Result<Option<Completion>> {
        if self.1.goes_on.load(Ordering::SeqCst)
            && let Some((token, op)) = self.1.held.lock().unwrap().take()
        {
            self.0.submit(token, op).map_err(|rejected| rejected.error)?;
        }
        self.0.reap()
    }
    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.wait(timeout)
    }
    fn waker(&mut self) -> Waker {
        let waker = self.0.waker();
        self.1.wakers.lock().unwrap().push(waker.clone());
        waker
    }
}

impl Disk for HoldingDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.0.create_dir(path)
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.0.list(dir)
    }
    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn File>> {
        self.0.open(path, how)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.rename(from, to)
    }
    fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.replace(from, to)
    }
    fn link(&self, file: &Path, name: &Path) -> io::Result<()> {
        self.0.link(file, name)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.0.remove_file(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.0.remove_dir(path)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.0.sync_dir(dir)
    }
    fn open_dir(&self, dir: &Path) -> io::Result<Box<dyn Directory>> {
        self.0.open_dir(dir)
    }
    fn lock(&self, path: &Path) -> io::Result<Box<dyn Lock>> {
        self.0.lock(path)
    }
    fn ring(&self, config: &RingConfig) -> io::Result<Box<dyn Ring>> {
        Ok(Box::new(HoldingRing(Box::new(BlockingRing::new(config)?), Arc::clone(&self.1))))
    }
    fn rings_overlap(&self) -> bool {
        true
    }
    fn backend(&self) -> &'static str {
        "sim"
    }
}

#[test]
fn a_partition_whose_write_hangs_keeps_no_other_at_its_thread_waiting() {
    let holding = Arc::new(Holding::default());
    let disk = Arc::new(HoldingDisk(SimDisk::new(seed()), Arc::clone(&holding)));
    let config = BrokerConfig { writers: Writers::Shared(1), ..config(Backend::Auto, small()) };
    let broker = Broker::open_on(disk, Arc::new(SystemClock::new()), DATA, config).unwrap();
    let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 6, ..small() }).unwrap();
    produce_to_all(&topic, 3, 3);
    holding.next.store(true, Ordering::SeqCst);
    let mut tickets: Vec<Vec<Ticket>> = topic.partitions().iter().map(|_| Vec::new()).collect();
    // All of them at once, again and again, until one is in the ring, and hangs.
    until(|| {
        for (partition, tickets) in topic.partitions().iter().zip(&mut tickets) {
            tickets.push(partition.append(Batch::of(None, &[1; 20_000]).unwrap()).unwrap());
        }
        holding.held.lock().unwrap().is_some()
    });
    // The others' are all answered; more than one that are not would be waiting for it.
    let mut open: Vec<_> = topic.partitions().into_iter().zip(tickets).collect();
    until(|| {
        for (_, tickets) in &mut open {
            let left = std::mem::take(tickets).into_iter();
            *tickets = left.filter_map(|ticket| ticket.try_wait().map(Result::unwrap).err()).collect();
        }
        open.retain(|(_, tickets)| !tickets.is_empty());
        open.len() == 1
    });
    let (stuck, tickets) = open.pop().unwrap();
    for partition in topic.partitions().iter().filter(|partition| partition.number() != stuck.number()) {
        let end = partition.next_offset();
        assert_eq!(append(partition, b"key", b"goes on"), end);
    }
    assert_eq!(holding.held.lock().unwrap().iter().count(), 1, "it hangs still");
    holding.let_go();
    for ticket in tickets {
        ticket.wait().unwrap();
    }
    broker.close().unwrap();
}

/// What is in the ring is waited for before anybody may have the directory.
#[test]
fn a_partition_that_stops_is_over_only_once_its_write_is() {
    let holding = Arc::new(Holding::default());
    let disk = Arc::new(HoldingDisk(SimDisk::new(seed()), Arc::clone(&holding)));
    let config = BrokerConfig { writers: Writers::Shared(1), ..config(Backend::Auto, small()) };
    let clock = Arc::new(PanicsOnce(SystemClock::new(), AtomicU64::new(0)));
    let broker = Broker::open_on(disk, Arc::clone(&clock) as Arc<dyn Clock>, DATA, config).unwrap();
    let topic = broker.create_topic(TOPIC, TopicConfig { partitions: 2, ..small() }).unwrap();
    produce_to_all(&topic, 3, 3);
    let partitions = [topic.partition(0).unwrap(), topic.partition(1).unwrap()];
    holding.next.store(true, Ordering::SeqCst);
    let mut tickets = [Vec::new(), Vec::new()];
    until(|| {
        for (partition, tickets) in partitions.iter().zip(&mut tickets) {
            tickets.push(partition.append(Batch::of(None, &[1; 20_000]).unwrap()).unwrap());
        }
        holding.held.lock().unwrap().is_some()
    });
    let answered = |tickets: &mut Vec<Ticket>| {
        let left = std::mem::take(tickets).into_iter();
        *tickets = left.filter_map(|ticket| ticket.try_wait().map(Result::unwrap).err()).collect();
        tickets.is_empty()
    };
    until(|| tickets.iter_mut().map(answered).filter(|all| *all).count() == 1);
    let stuck = usize::from(tickets[0].is_empty());
    // Its next turn panics, with the write still there.
    clock.1.store(1, Ordering::SeqCst);
    let error = partitions[stuck].append(Batch::of(None, &[2; 100_000]).unwrap()).unwrap().wait().unwrap_err();
    assert!(error.is_failed(), "{error}");
    for ticket in tickets.iter_mut().flat_map(|tickets| tickets.drain(..)) {
        assert!(ticket.wait().unwrap_err().is_failed());
    }
    thread::scope(|scope| {
        let (closing, held) = (broker.clone(), &holding.held);
        let closing = scope.spawn(move || {
            assert!(closing.close().is_err());
            held.lock().unwrap().is_none()
        });
        until(|| broker.topics().is_empty());
        (0..200).for_each(|_| thread::yield_now());
        holding.let_go();
        assert!(closing.join().unwrap(), "closed under a write in flight");
    });
}

#[test]
fn numbers_of_shared_threads_have_limits() {
    let data = scratch();
    for threads in [0, 1025] {
        let config = BrokerConfig { writers: Writers::Shared(threads), ..BrokerConfig::default() };
        let error = Broker::open(data.path(), config).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { name: "writers.shared", .. }), "{error}");
    }
    assert_eq!(fs::read_dir(data.path()).unwrap().count(), 0);
    let broker = Broker::open(data.path(), BrokerConfig { writers: Writers::Shared(1), ..config(Backend::Auto, small()) }).unwrap();
    broker.create_topic(TOPIC, small()).unwrap();
    assert_eq!(append(&partition_of(&broker), b"key", b"value"), 0);
}
