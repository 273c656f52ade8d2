//! fork(2) while a broker is open: the parent goes on as if nothing had been, the child gets errors and harms nothing. Case B142.
//!
//! A child of a process with threads may have got a lock that one of these held, so everything here runs in a process of its own, and the child in it
//! ends by an alarm if it waits for anything.
#![allow(unsafe_code, reason = "fork, alarm and _exit are calls of the C library")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use sapwood::{Batch, Broker, BrokerConfig, Durability, Error, Partition, ReadMode, ReaderConfig, TopicConfig, Writers};
use serde_json::json;

use crate::child::{self, Child, backend, backend_name, say};
use crate::oracle::assert_closed;
use crate::support::{
    TOPIC, append, assert_in_order, config, create, each_backend, open, partition_dir, partition_of, read_all, scratch, small,
};

/// Seconds after which a child is taken for stuck.
const STUCK: u32 = 60;

/// Runs `body` in a forked child, which must come to its end.
#[track_caller]
fn in_a_child(body: impl FnOnce()) {
    // SAFETY: fork has no precondition; the child runs `body` and ends without a look at what it shares with its parent's harness.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: neither has a precondition, and nothing of this process is needed after `_exit`.
        unsafe {
            libc::alarm(STUCK);
            let code = i32::from(catch_unwind(AssertUnwindSafe(body)).is_err());
            libc::_exit(code);
        }
    }
    let mut status = 0;
    loop {
        // SAFETY: `status` is there to be written to.
        let ended = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        if ended == pid {
            break;
        }
        assert_eq!(std::io::Error::last_os_error().kind(), std::io::ErrorKind::Interrupted);
    }
    assert_eq!(status, 0, "the child was stuck, or met what it should not");
}

#[track_caller]
fn assert_forked<T>(result: sapwood::Result<T>) {
    match result {
        Err(Error::Forked { .. }) => {}
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was done in a child"),
    }
}

fn one() -> Batch {
    Batch::of(Some(b"k"), b"by the child").unwrap()
}

/// Whatever a child may think of doing with what its parent had.
fn try_everything(broker: Broker, partition: Partition, elsewhere: &Path) {
    assert_forked(partition.append(one()));
    assert_forked(partition.append_and_wait(one()));
    assert_forked(partition.try_append(one()).map_err(|refused| refused.error.unwrap()));
    assert!(partition.batch().is_empty());
    assert_forked(partition.sync());
    assert_forked(partition.reader());
    assert_forked(partition.read_one(0));
    assert_forked(partition.tail(0));
    assert_forked(broker.produce(TOPIC, None, b"by the child"));
    assert_forked(broker.topic(TOPIC));
    assert_forked(broker.create_topic("of-the-child", small()));
    assert_forked(broker.delete_topic(TOPIC));
    assert!(broker.topics().is_empty());
    assert_forked(broker.clone().close());
    drop(partition);
    drop(broker);
    // What it opens itself is its own, by whatever backend; the parent's directory is still locked.
    let opened = Broker::open(child::text("data"), config(backend(), small()));
    assert!(matches!(opened, Err(Error::Locked { .. })), "the child took the parent's lock away");
    let (own, partition) = create(elsewhere, backend(), &small());
    assert_eq!(append(&partition, b"k", b"v"), 0);
    assert_eq!(read_all(&partition).len(), 1);
    drop(partition);
    own.close().unwrap();
}

/// A parent that forks while it is idle, while it appends, and while readers and tails are open.
pub fn fork_role() {
    let topic: TopicConfig = serde_json::from_value(child::argument("topic")).unwrap();
    let writers = match child::argument("writers").as_u64().unwrap() {
        0 => Writers::PerPartition,
        threads => Writers::Shared(threads as u32),
    };
    let broker = Broker::open(child::text("data"), BrokerConfig { writers, ..config(backend(), topic.clone()) }).unwrap();
    let partition = broker.create_topic(TOPIC, topic).unwrap().partition(0).unwrap();
    // Opened on one thread and used from another.
    std::thread::scope(|scope| {
        scope.spawn(|| (0..20).for_each(|number| assert_eq!(append(&partition, b"k", b"before"), number)));
    });
    partition.sync().unwrap();
    let mut readers = [ReadMode::Buffered, ReadMode::Direct].map(|mode| partition.reader_with(ReaderConfig::by(mode)).unwrap());
    for reader in &mut readers {
        assert_eq!(reader.read_one(3).unwrap().value, b"before");
    }
    let mut tail = partition.tail(5).unwrap();
    tail.event().unwrap();
    let round = |number: u32| {
        let elsewhere = scratch();
        let handles = (broker.clone(), partition.clone());
        let path = elsewhere.path().to_owned();
        in_a_child(move || try_everything(handles.0, handles.1, &path.join("own")));
        append(&partition, b"k", format!("after {number}").as_bytes());
    };
    round(0);
    // Readers, tails and tickets, used and dropped.
    let ticket = partition.append(Batch::of(Some(b"k"), b"queued").unwrap()).unwrap();
    let held = std::cell::RefCell::new(Some((readers, tail, ticket)));
    in_a_child(|| {
        let (readers, mut tail, ticket) = held.take().unwrap();
        assert_forked(ticket.wait());
        assert_forked(tail.next_record(None));
        assert_forked(tail.event());
        drop(tail);
        for mut reader in readers {
            assert_forked(reader.read(0, 1000));
            assert_forked(reader.skip_damaged(0));
            drop(reader);
        }
    });
    let (mut readers, mut tail, ticket) = held.take().unwrap();
    ticket.wait().unwrap();
    partition.sync().unwrap();
    for reader in &mut readers {
        assert_eq!(reader.read_one(3).unwrap().value, b"before");
        assert_eq!(reader.read(0, 1 << 20).unwrap().next_offset(), 22);
    }
    assert_eq!(tail.next_record(None).unwrap().unwrap().offset, 5);
    // While producers are at it, some with a write of theirs under way.
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    append(&partition, b"k", &[7; 3000]);
                }
            });
        }
        for number in 1..20 {
            round(number);
        }
        done.store(true, Ordering::Relaxed);
    });
    // A child that ends without a word, as most do, and one that drops every handle, the last ones among them.
    in_a_child(|| {});
    let all = std::cell::RefCell::new(Some((broker, readers, tail, partition)));
    in_a_child(|| drop(all.take()));
    let (broker, readers, tail, partition) = all.take().unwrap();
    append(&partition, b"k", b"after the last handle of a child");
    let again = Broker::open(child::text("data"), config(backend(), small()));
    assert!(matches!(again, Err(Error::Locked { .. })), "a child that dropped its handles gave the parent's lock back");
    partition.sync().unwrap();
    let rows = read_all(&partition);
    assert_in_order(&rows, 0);
    assert!(rows.iter().all(|row| row.value != b"by the child"));
    assert_eq!(broker.topics(), [TOPIC]);
    drop((readers, tail, partition));
    broker.close().unwrap();
    drop_threads_of_nobody(Path::new(&child::text("data")), writers);
    say(&rows.len().to_string());
}

/// A broker without partitions: the threads that wait for some are the only thing that a child could end.
fn drop_threads_of_nobody(data: &Path, writers: Writers) {
    let settings = BrokerConfig { writers, retention_every: None, ..config(backend(), small()) };
    let held = std::cell::RefCell::new(Some(Broker::open(data.with_extension("empty"), settings).unwrap()));
    in_a_child(|| drop(held.take()));
    let broker = held.take().unwrap();
    let partition = broker.create_topic(TOPIC, small()).unwrap().partition(0).unwrap();
    assert_eq!(append(&partition, b"k", b"of the parent"), 0);
    drop(partition);
    broker.close().unwrap();
}

#[test]
fn b142_a_forked_child_gets_errors_and_the_parent_does_not_notice() {
    each_backend(|backend| {
        for (durability, writers) in [(Durability::Durable, 0), (Durability::Os, 0), (Durability::Durable, 2), (Durability::Os, 1)] {
            let data = scratch();
            let topic = TopicConfig { durability, segment_bytes: 200_000, ..small() };
            let at = data.path().join("data");
            let arguments = json!({ "data": at, "backend": backend_name(backend), "topic": topic, "writers": writers });
            let mut child = Child::start("fork", &arguments);
            let records: usize = child.expect_line().parse().unwrap();
            assert!(child.finish().success());
            let broker = open(&at, backend, &topic);
            assert_eq!(read_all(&partition_of(&broker)).len(), records);
            broker.close().unwrap();
            assert_closed(&partition_dir(&at), 1);
        }
    });
}
