//! What is no regular file under a name of the engine's: a directory, a link, a pipe or a socket. It is told of, left alone,
//! and nobody waits for its other end. And files that are nearly all hole.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use sapwood::inspect::{Code, RepairChoices, SealedDamage};
use sapwood::{Backend, Broker, BrokerConfig};

use crate::repair::inspector;
use crate::support::{TOPIC, append, config, data_with, partition_of, read_all, report_of, scratch, small};
use crate::verify::look;

/// Every kind of file that a partition has, of a sealed segment and of the last one.
const NAMES: [&str; 14] = [
    "00000000000000000006.log",
    "00000000000000000006.index",
    "00000000000000000006.timeindex",
    "00000000000000000006.sum",
    "00000000000000000006.sum.tmp",
    "00000000000000000006.index.tmp",
    "00000000000000000030.log",
    "00000000000000000030.index",
    "00000000000000000030.timeindex",
    "00000000000000000030.sum",
    "prepared.log",
    "prepared.index",
    "prepared.timeindex",
    "checkpoint",
];

/// Makes one there.
pub type Make = fn(&Path);

pub const KINDS: [(&str, Make); 5] = [
    ("directory", |path| fs::create_dir(path).unwrap()),
    ("link", |path| std::os::unix::fs::symlink("nowhere", path).unwrap()),
    ("link to a file", |path| std::os::unix::fs::symlink("00000000000000000000.log", path).unwrap()),
    ("pipe", |path| mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap()),
    ("socket", make_socket),
];

/// The path of a socket is shorter than those of the tests: it is made by way of the directory's descriptor.
fn make_socket(path: &Path) {
    let dir = fs::File::open(path.parent().unwrap()).unwrap();
    let short = format!("/proc/self/fd/{}/{}", dir.as_raw_fd(), path.file_name().unwrap().to_str().unwrap());
    drop(UnixListener::bind(short).unwrap());
}

/// A file that is nobody's, and each kind that is no regular file.
fn each_foreign() -> impl Iterator<Item = (&'static str, Make)> {
    let file: Make = |path| fs::write(path, b"another's").unwrap();
    let names = ["README", "0/mine.txt", "0/00000000000000000000.log.bak", "0/sub"].map(|name| (name, file));
    let ours = ["topic.json", "0/start", "0/moved", "0/checkpoint", "0/00000000000000000006.sum", "0/prepared.log", "0/sub"];
    names.into_iter().chain(ours.into_iter().flat_map(|name| KINDS.map(|(_, make)| (name, make))))
}

#[test]
fn a_topic_that_holds_what_is_not_the_engines_is_not_deleted_and_goes_on() {
    for (name, make) in each_foreign() {
        unless_it_hangs(name, move || {
            let (data, partition) = data_with("demo-36-segment-270");
            let foreign = partition.parent().unwrap().join(name);
            let broker = Broker::open(data.path(), config(Backend::Posix, small())).unwrap();
            broker.close().unwrap();
            let _ = fs::remove_file(&foreign);
            make(&foreign);
            let broker = Broker::open(data.path(), config(Backend::Posix, small())).unwrap();
            let error = broker.delete_topic(TOPIC).unwrap_err().to_string();
            assert!(error.contains(foreign.to_str().unwrap()), "{error}");
            assert!(foreign.symlink_metadata().is_ok());
            assert_eq!(append(&partition_of(&broker), b"k", b"v"), 36);
            // Once it is out of the way, all goes.
            fs::rename(&foreign, data.path().join(".away")).unwrap();
            broker.delete_topic(TOPIC).unwrap();
            assert!(!partition.parent().unwrap().exists());
            broker.close().unwrap();
        });
    }
}

#[test]
fn a_left_over_of_a_topic_that_holds_what_is_not_the_engines_stays_and_no_opening_fails() {
    for (name, make) in each_foreign() {
        unless_it_hangs(name, move || {
            let (data, partition) = data_with("demo-36-segment-270");
            for left_over in [".del-t", ".new-t"] {
                let dir = data.path().join(left_over);
                crate::support::copy_dir(partition.parent().unwrap(), &dir);
                let _ = fs::remove_file(dir.join(name));
                make(&dir.join(name));
            }
            for _ in 0..2 {
                let broker = Broker::open(data.path(), config(Backend::Posix, small())).unwrap();
                let left_overs = [".del-t", ".new-t"].map(|left_over| data.path().join(left_over));
                assert_eq!(broker.report().ignored, left_overs, "{name}");
                assert!(left_overs.iter().all(|dir| dir.join(name).symlink_metadata().is_ok()));
                assert!(read_all(&partition_of(&broker)).len() == 36);
                broker.close().unwrap();
            }
        });
    }
}

/// Fails after a minute instead of waiting for ever.
fn unless_it_hangs(what: &str, work: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let _ended = ended;
        work();
    });
    match end.recv_timeout(Duration::from_secs(60)) {
        Err(RecvTimeoutError::Timeout) => panic!("{what}: it hangs"),
        _ => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

fn is_special(path: &Path) -> bool {
    let kind = fs::symlink_metadata(path).unwrap().file_type();
    kind.is_dir() || kind.is_symlink() || kind.is_fifo() || kind.is_socket()
}

/// Each kind under each name of a partition of its own: what it is, the name, the data directory, and the partition's.
fn each_special(test: fn(&str, &str, &Path, &Path)) {
    for (kind, make) in KINDS {
        for name in NAMES {
            let what = format!("a {kind} as {name}");
            eprintln!("{what}");
            let (data, dir) = data_with("demo-36-segment-270");
            let path = dir.join(name);
            let _ = fs::remove_file(&path);
            make(&path);
            unless_it_hangs(&what.clone(), move || test(&what, name, data.path(), &dir));
        }
    }
}

#[test]
fn what_is_no_regular_file_is_told_of_and_left_alone_and_nobody_waits() {
    each_special(|what, name, data, dir| {
        let path = dir.join(name);
        let report = look(dir);
        let told = |code| report.findings.iter().any(|finding| finding.path == path && finding.code == code);
        assert!(told(Code::NotARegularFile), "{what}: {:#?}", report.findings);
        assert!(report.segments.len() >= 5, "{what}: the others are looked at");

        let config = BrokerConfig { check_sealed: true, ..config(Backend::Auto, small()) };
        let broker = Broker::open(data, config).unwrap_or_else(|error| panic!("{what}: {error}"));
        let partition = partition_of(&broker);
        let next = partition.next_offset();
        assert_eq!(append(&partition, b"", b"goes on"), next, "{what}");
        drop(partition);
        broker.close().unwrap();
        assert!(is_special(&path), "{what}");
    });
}

#[test]
fn a_repair_gives_what_is_no_regular_file_another_name_and_makes_the_rest_anew() {
    each_special(|what, name, data, dir| {
        let choices = RepairChoices { write_sums: true, sealed: SealedDamage::KeepBefore, ..RepairChoices::default() };
        let plan = inspector().plan_repair(dir, choices).unwrap();
        let repaired = inspector().apply(&plan).unwrap_or_else(|error| panic!("{what}: {error}\n{plan}"));
        let aside = dir.join(format!("{name}.torn"));
        assert!(is_special(&aside) && repaired.set_aside.contains(&aside), "{what}: {repaired:?}");
        let report = look(dir);
        assert!(report.is_clean(), "{what}: {:#?}", report.findings);
        // A sealed log in its place is a gap.
        let kept = match name {
            "00000000000000000006.log" => 6,
            "00000000000000000030.log" => 30,
            _ => 36,
        };
        assert_eq!(report.next_offset, kept, "{what}");
        let broker = Broker::open(data, config(Backend::Auto, small())).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(append(&partition_of(&broker), b"", b"goes on"), kept, "{what}");
        broker.close().unwrap();
        assert!(inspector().plan_repair(dir, choices).unwrap().is_empty(), "{what}");
    });
}

/// As `truncate -s` makes it: nothing but a hole behind what was there, and a byte at its end if `marked`.
fn stretch(path: &Path, len: u64, marked: bool) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(len).unwrap();
    if marked {
        file.write_all_at(&[1], len - 1).unwrap();
    }
}

/// Whether the file system tells where the holes are.
fn tells_holes(dir: &Path) -> bool {
    let file = tempfile::tempfile_in(dir).unwrap();
    file.set_len(1 << 20).unwrap();
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)).is_err()
}

#[test]
fn holes_of_a_terabyte_are_passed_over_and_stay_holes() {
    const STRETCHED: [&str; 4] =
        ["00000000000000000006.index", "00000000000000000030.timeindex", "00000000000000000030.index", "00000000000000000030.log"];
    if !tells_holes(scratch().path()) {
        return eprintln!("SKIPPED: the file system does not tell where its holes are");
    }
    for (name, marked) in STRETCHED.into_iter().flat_map(|name| [(name, false), (name, true)]) {
        for by_repair in [false, true] {
            let what = format!("{name}, marked: {marked}, by repair: {by_repair}");
            eprintln!("{what}");
            unless_it_hangs(&what.clone(), move || {
                let (data, dir) = data_with("demo-36-segment-270");
                stretch(&dir.join(name), 1 << 40, marked);
                let report = look(&dir);
                assert_eq!(report.records, 36, "{what}: {:#?}", report.findings);
                if by_repair {
                    inspector().apply(&inspector().plan_repair(&dir, RepairChoices::default()).unwrap()).unwrap();
                    assert!(look(&dir).is_clean(), "{what}");
                }
                let broker = Broker::open(data.path(), config(Backend::Auto, small())).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(report_of(&broker).torn_tail.is_some(), marked && !by_repair && name.ends_with("log"), "{what}");
                assert_eq!(read_all(&partition_of(&broker)).len(), 36, "{what}");
                broker.close().unwrap();
                let blocks: u64 = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().blocks()).sum();
                assert!(blocks * 512 < 64 << 20, "{what}: {blocks} blocks");
            });
        }
    }
}
