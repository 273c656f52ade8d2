//! What is no regular file under a name of the engine's: a directory, a link to nowhere, a pipe or a socket. It is told of, left alone,
//! and nobody waits for its other end.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use sapwood::inspect::{Code, RepairChoices};
use sapwood::{Backend, Broker, BrokerConfig};

use crate::repair::inspector;
use crate::support::{append, config, data_with, partition_of, small};
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
type Make = fn(&Path);

const KINDS: [(&str, Make); 4] = [
    ("directory", |path| fs::create_dir(path).unwrap()),
    ("link", |path| std::os::unix::fs::symlink("nowhere", path).unwrap()),
    ("pipe", |path| mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap()),
    ("socket", make_socket),
];

/// The path of a socket is shorter than those of the tests: it is made by way of the directory's descriptor.
fn make_socket(path: &Path) {
    let dir = fs::File::open(path.parent().unwrap()).unwrap();
    let short = format!("/proc/self/fd/{}/{}", dir.as_raw_fd(), path.file_name().unwrap().to_str().unwrap());
    drop(UnixListener::bind(short).unwrap());
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

#[test]
fn what_is_no_regular_file_is_told_of_and_left_alone_and_nobody_waits() {
    for (kind, make) in KINDS {
        for name in NAMES {
            let what = format!("a {kind} as {name}");
            eprintln!("{what}");
            let (data, dir) = data_with("demo-36-segment-270");
            let path = dir.join(name);
            let _ = fs::remove_file(&path);
            make(&path);
            unless_it_hangs(&what.clone(), move || {
                let report = look(&dir);
                let told = |code| report.findings.iter().any(|finding| finding.path == path && finding.code == code);
                assert!(told(Code::NotARegularFile), "{what}: {:#?}", report.findings);
                assert!(report.segments.len() >= 5, "{what}: the others are looked at");
                // It says what it would do, or that it cannot.
                let _ = inspector().plan_repair(&dir, RepairChoices { write_sums: true, ..RepairChoices::default() });

                let config = BrokerConfig { check_sealed: true, ..config(Backend::Auto, small()) };
                let broker = Broker::open(data.path(), config).unwrap_or_else(|error| panic!("{what}: {error}"));
                let partition = partition_of(&broker);
                let next = partition.next_offset();
                assert_eq!(append(&partition, b"", b"goes on"), next, "{what}");
                drop(partition);
                broker.close().unwrap();
                assert!(is_special(&path), "{what}");
            });
        }
    }
}
