//! One broker at a time per data directory, told before anything in it is touched. Case B148.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use sapwood::{Backend, Broker, Error};
use serde_json::json;

use crate::child::{Child, append_and_kill, backend_name};
use crate::damage;
use crate::support::{append, config, create, data_with, each_backend, open, partition_of, read_all, scratch, small, snapshot};

#[track_caller]
fn assert_locked(path: &Path, backend: Backend) {
    let before = snapshot(path);
    for _ in 0..2 {
        let error = Broker::open(path, config(backend, small())).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Locked { path: named } if named == path), "{error}");
    }
    assert!(snapshot(path) == before, "a refused open changed something");
}

#[test]
fn b148_two_opens_in_one_process() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        append(&partition, b"k", b"v");
        drop(partition);
        broker.close().unwrap();
        // The holder rests while it is watched: what changes, the refused ones changed.
        let broker = open(data.path(), backend, &small());
        let partition = partition_of(&broker);
        assert_locked(data.path(), backend);
        let link = scratch();
        std::os::unix::fs::symlink(data.path(), link.path().join("link")).unwrap();
        let through_link = Broker::open(link.path().join("link"), config(backend, small())).map(drop).unwrap_err();
        assert!(matches!(through_link, Error::Locked { .. }), "{through_link}");
        let dotted = data.path().join("t").join("..");
        let error = Broker::open(&dotted, config(backend, small())).map(drop).unwrap_err();
        assert!(matches!(error, Error::Locked { .. }), "{error}");

        // The first one never noticed, and frees the place by being closed, or dropped.
        assert_eq!(append(&partition, b"k", b"v"), 1);
        drop(partition);
        broker.close().unwrap();
        let broker = open(data.path(), backend, &small());
        assert_locked(data.path(), backend);
        drop(broker);
        let broker = open(&link.path().join("link"), backend, &small());
        assert_eq!(partition_of(&broker).next_offset(), 2);
        assert_locked(data.path(), backend);
    });
}

#[test]
fn b148_two_processes_and_a_kill() {
    each_backend(|backend| {
        let data = scratch();
        let (broker, partition) = create(data.path(), backend, &small());
        append(&partition, b"k", b"v");
        drop(partition);
        broker.close().unwrap();

        let mut holder = Child::start("hold", &json!({ "data": data.path(), "backend": backend_name(backend) }));
        assert_eq!(holder.expect_line(), "open");
        assert_locked(data.path(), backend);
        holder.kill();
        let broker = open(data.path(), backend, &small());
        assert_eq!(read_all(&partition_of(&broker)).len(), 1);
        drop(broker);

        // The other way round: a process that comes second is told so, and the first goes on.
        let broker = open(data.path(), backend, &small());
        let mut second = Child::start("hold", &json!({ "data": data.path(), "backend": backend_name(backend) }));
        assert_eq!(second.expect_line(), "locked");
        assert!(second.finish().success());
        assert_eq!(append(&partition_of(&broker), b"k", b"v"), 1);
        drop(broker);

        // One that ends in order frees the place too, and so does one that was killed while it appended.
        let mut holder = Child::start("hold", &json!({ "data": data.path(), "backend": backend_name(backend) }));
        assert_eq!(holder.expect_line(), "open");
        assert!(holder.finish().success());
        assert_eq!(append_and_kill(data.path(), backend, &small(), &[(vec![], vec![1])]), [2]);
        assert_eq!(partition_of(&open(data.path(), backend, &small())).next_offset(), 3);
    });
}

#[test]
fn b148_the_lock_comes_before_recovery() {
    each_backend(|backend| {
        // Whatever recovery would do here, it must not begin: a torn tail, a missing index, half-made topics.
        let (data, dir) = data_with("demo-36-segment-270");
        damage::apply(&dir, "truncate-mid-body");
        damage::apply_to(&dir, "missing-both-indexes", 0);
        fs::create_dir_all(data.path().join(".new-half/0")).unwrap();
        fs::create_dir_all(data.path().join(".del-old/0")).unwrap();
        let lock = fs::File::create(data.path().join(".lock")).unwrap();
        flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_locked(data.path(), backend);
        drop(lock);
        let broker = open(data.path(), backend, &small());
        assert_eq!(partition_of(&broker).next_offset(), 35);
        assert!(!data.path().join(".new-half").exists());
    });
}

/// A second descriptor of the lock's own open file, as a process has between fork and exec; none where the kernel refuses.
fn inherited_lock(data: &Path) -> Option<OwnedFd> {
    let lock = fs::canonicalize(data.join(".lock")).unwrap();
    let number = fs::read_dir("/proc/self/fd").unwrap().find_map(|entry| {
        let entry = entry.unwrap();
        let here = fs::read_link(entry.path()).is_ok_and(|target| target == lock);
        here.then(|| entry.file_name().to_str().unwrap().parse().unwrap())
    });
    let myself = pidfd_open(getpid(), PidfdFlags::empty()).ok()?;
    pidfd_getfd(myself, number.expect("the lock is held by a descriptor"), PidfdGetfdFlags::empty()).ok()
}

#[test]
fn a_closed_directory_is_free_although_a_process_is_being_started() {
    each_backend(|backend| {
        let data = scratch();
        for close in [true, false] {
            let broker = open(data.path(), backend, &small());
            let inherited = inherited_lock(data.path());
            if close {
                broker.close().unwrap()
            } else {
                drop(broker)
            }
            drop(open(data.path(), backend, &small()));
            drop(inherited);
        }
        // The same by chance, everywhere: processes start while the directory is opened and closed.
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    Command::new(std::env::current_exe().unwrap()).arg("--list").stdout(Stdio::null()).status().unwrap();
                }
            });
            for _ in 0..50 {
                drop(Broker::open(data.path(), config(backend, small())).inspect_err(|_| done.store(true, Ordering::Relaxed)).unwrap());
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn directories_side_by_side_do_not_lock_each_other() {
    let outer = scratch();
    let brokers: Vec<_> = ["a", "b", "a/inner"].map(|name| open(&outer.path().join(name), Backend::Auto, &small())).into();
    for (number, broker) in brokers.iter().enumerate() {
        broker.create_topic("t", small()).unwrap();
        assert_eq!(broker.produce("t", None, &[number as u8]).unwrap().offset, 0);
    }
}
