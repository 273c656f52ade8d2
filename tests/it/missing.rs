//! Whole files that are gone: of the last segments, of which the checkpoint still tells. Their offsets are given to nothing else unasked.

use std::fs;
use std::path::{Path, PathBuf};

use sapwood::inspect::{Code, RepairChoices, Severity};
use sapwood::{Backend, Broker, Error};

use crate::checkpoint::{CUT, FULL, USUAL, asked, open_sim};
use crate::damage::bases;
use crate::format::{Slot, segment_path};
use crate::oracle::assert_closed;
use crate::repair::inspector;
use crate::sim::{self, CRASHES, tiny, with_partition};
use crate::special::KINDS;
use crate::support::{
    TOPIC, append, create, each_backend, fixture, open, partition_dir, partition_of, read_all, report_of, scratch, seed, segments_of,
    small, snapshot,
};
use crate::verify::look;

const RECORDS: u64 = 40;

/// How the files of the last segments go; gives where each was and is.
type Take = fn(&Path, &[u64]) -> Vec<(PathBuf, PathBuf)>;

const TAKES: [(&str, Take); 2] = [
    ("only the logs", |dir, bases| take(dir, bases, &["log"])),
    ("all of their files", |dir, bases| take(dir, bases, &["log", "index", "timeindex", "sum"])),
];

fn take(dir: &Path, bases: &[u64], extensions: &[&str]) -> Vec<(PathBuf, PathBuf)> {
    let away = dir.parent().unwrap().parent().unwrap().parent().unwrap().join("away");
    fs::create_dir_all(&away).unwrap();
    let files = bases.iter().flat_map(|&base| extensions.iter().map(move |extension| segment_path(dir, base, extension)));
    let there = files.filter(|path| path.exists());
    there
        .map(|path| {
            let put = away.join(path.file_name().unwrap());
            fs::rename(&path, &put).unwrap();
            (path, put)
        })
        .collect()
}

/// A partition of several segments, closed. Beside its data directory there is room for what is taken away.
fn closed(root: &Path, backend: Backend) -> (PathBuf, PathBuf) {
    let data = root.join("data");
    let (broker, partition) = create(&data, backend, &segments_of(270));
    for number in 0..RECORDS {
        assert_eq!(append(&partition, b"key", format!("value-{number:05}").as_bytes()), number);
    }
    drop(partition);
    broker.close().unwrap();
    let dir = partition_dir(&data);
    (data, dir)
}

/// It is refused with every byte as it was, told by verifying, and no harm once the files are back.
#[track_caller]
fn assert_refused(data: &Path, dir: &Path, from: u64, backend: Backend, what: &str) {
    for ask in [USUAL, FULL] {
        let before = snapshot(dir);
        let error = Broker::open(data, asked(ask, backend, &small())).expect_err(what);
        let is_told = matches!(error, Error::RecordsMissing { from: first, to: RECORDS, .. } if first == from);
        assert!(is_told && error.is_damage(), "{what}: {error}");
        assert!(snapshot(dir) == before, "{what}: refused, and changed");
    }
    let lost = look(dir).findings.into_iter().find(|finding| finding.code == Code::DurableRecordsLost);
    assert!(lost.is_some_and(|lost| lost.severity == Severity::Error), "{what}: verifying does not tell");
}

#[test]
fn logs_that_are_gone_are_missed_and_back_all_is_well() {
    each_backend(|backend| {
        for (how, take) in TAKES {
            let scratch = scratch();
            let (data, dir) = closed(scratch.path(), backend);
            let all = bases(&dir);
            assert!(all.len() > 5);
            for gone in [1, 2, all.len()] {
                let what = format!("{how} of {gone} segments");
                let (left, gone) = all.split_at(all.len() - gone);
                let taken = take(&dir, gone);
                assert_refused(&data, &dir, if left.is_empty() { 0 } else { gone[0] }, backend, &what);
                for (path, put) in taken {
                    fs::rename(put, path).unwrap();
                }
                let broker = open(&data, backend, &small());
                assert_eq!(read_all(&partition_of(&broker)).len() as u64, RECORDS, "{what}");
                broker.close().unwrap();
                assert_closed(&dir, 1);
            }
        }
    });
}

#[test]
fn something_else_in_the_place_of_the_active_log_is_not_passed_over() {
    for (kind, make) in KINDS {
        let scratch = scratch();
        let (data, dir) = closed(scratch.path(), Backend::Posix);
        let last = *bases(&dir).last().unwrap();
        let [(log, put)] = &take(&dir, &[last], &["log"])[..] else { panic!("one log") };
        make(log);
        assert_refused(&data, &dir, last, Backend::Posix, kind);
        // The log that is made anew could not have that name.
        let before = snapshot(&dir);
        let error = Broker::open(&data, asked(CUT, Backend::Posix, &small())).expect_err(kind);
        assert!(matches!(&error, Error::Io { path, .. } if path == log), "{kind}: {error}");
        assert!(snapshot(&dir) == before, "{kind}: refused, and changed");
        // What stands there is out of the way once it is repaired, and comes back by hand.
        let plan = inspector().plan_repair(&dir, RepairChoices::default()).unwrap();
        inspector().apply(&plan).unwrap_or_else(|error| panic!("{kind}: {error}\n{plan}"));
        assert!(!log.exists() && fs::symlink_metadata(log).is_err(), "{kind}: {plan}");
        fs::rename(put, log).unwrap();
        let broker = open(&data, Backend::Posix, &small());
        assert_eq!(read_all(&partition_of(&broker)).len() as u64, RECORDS, "{kind}");
        broker.close().unwrap();
    }
}

/// Gives the records up in one way or the other, and goes on.
fn given_up(data: &Path, dir: &Path, by_repair: bool) -> Broker {
    if !by_repair {
        let broker = Broker::open(data, asked(CUT, Backend::Auto, &small())).unwrap();
        assert!(report_of(&broker).repaired.is_some_and(|error| error.is_damage()));
        return broker;
    }
    let plan = inspector().plan_repair(dir, RepairChoices::default()).unwrap();
    assert!(plan.to_string().contains("durable"), "what is given up is shown: {plan}");
    inspector().apply(&plan).unwrap();
    let broker = open(data, Backend::Auto, &small());
    assert!(report_of(&broker).repaired.is_none());
    assert_eq!(partition_of(&broker).next_offset(), plan.keeps().end);
    broker
}

#[test]
fn only_who_says_so_gives_the_records_up() {
    for by_repair in [false, true] {
        for (how, take) in TAKES {
            for gone in [1, 2, usize::MAX] {
                let scratch = scratch();
                let (data, dir) = closed(scratch.path(), Backend::Auto);
                let all = bases(&dir);
                let (left, gone) = all.split_at(all.len().saturating_sub(gone));
                let _ = take(&dir, gone);
                let next = if left.is_empty() { 0 } else { gone[0] };
                let what = format!("{how} of {} segments, by repair: {by_repair}", gone.len());
                let broker = given_up(&data, &dir, by_repair);
                assert_eq!(append(&partition_of(&broker), b"key", b"anew"), next, "{what}");
                // Of those that come in the same places, what is left of the old ones would say nothing but lies.
                assert!(gone.iter().all(|&base| !segment_path(&dir, base, "sum").exists()), "{what}");
                broker.close().unwrap();
                // The next opening is like any other.
                let broker = open(&data, Backend::Auto, &small());
                assert!(report_of(&broker).repaired.is_none(), "{what}");
                assert_eq!(partition_of(&broker).next_offset(), next + 1, "{what}");
                broker.close().unwrap();
                assert!(look(&dir).worst() < Some(Severity::Error), "{what}: {:#?}", look(&dir).findings);
            }
        }
    }
}

#[test]
fn a_crash_while_records_are_given_up_leaves_them_missed_or_given_up() {
    let seed = seed();
    let disk = with_partition(seed, &fixture("demo-36-segment-270"), |dir| {
        let slot = Slot { sequence: 0, base: 30, position: 270, next_offset: 36, last_timestamp: u64::MAX, entries: 6, clean: true };
        fs::write(dir.join("checkpoint"), slot.file(None)).unwrap();
        for extension in ["log", "index", "timeindex"] {
            fs::remove_file(segment_path(dir, 30, extension)).unwrap();
        }
    });
    let straight = disk.fork(seed);
    let before = straight.state_changes();
    drop(open_sim(&straight, CUT, &tiny(270)).unwrap());
    let points = straight.state_changes() - before;
    let (mut missed, mut gone) = (0, 0);
    for point in 1..=points {
        for crash in CRASHES {
            let what = format!("{crash} crash at operation {point} of {points}");
            let sim = disk.fork(seed ^ point);
            sim.crash_at_op(point);
            drop(open_sim(&sim, CUT, &tiny(270)));
            sim::crash(&sim, crash);
            match sim::try_open(&sim, &tiny(270)) {
                Ok(broker) => {
                    assert_eq!(broker.topic(TOPIC).unwrap().partition(0).unwrap().next_offset(), 30, "{what}");
                    gone += 1;
                }
                Err(error) => {
                    assert!(matches!(error, Error::RecordsMissing { from: 30, to: 36, .. }), "{what}: {error}");
                    missed += 1;
                }
            }
        }
    }
    assert!(missed > 0 && gone > 0, "{missed} crashes before it was durable, {gone} behind");
}
