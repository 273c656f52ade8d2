//! Crashes during recovery itself, on the simulated disk. Case B007.

use std::collections::BTreeMap;
use std::path::Path;

use sapwood::io::Disk;
use sapwood::io::sim::{OpKind, SimDisk};

use crate::damage;
use crate::sim::{assert_closed, assert_sound, dir, open, tiny, try_open, with_partition};
use crate::support::{append, assert_in_order, fixture, partition_of, read_all, report_of, seed};

const DEMO: &str = "demo-36-segment-270";

/// What recovery has to mend, of every kind.
const HARMS: &[&str] = &[
    "truncate-mid-body",
    "truncate-mid-header",
    "garbage-tail",
    "torn-body-prealloc",
    "torn-header-prealloc",
    "hole-in-the-middle",
    "stale-record-tail",
    "zero-tail",
    "missing-both-indexes",
    "index-longer-than-log",
    "index-zero-fill",
    "empty-log-no-index",
    "prealloc-only",
];

/// The segments' files as a clean close leaves them, and the copies of what was cut.
fn files(sim: &SimDisk) -> (BTreeMap<String, Vec<u8>>, Vec<Vec<u8>>) {
    let (mut ours, mut torn) = (BTreeMap::new(), Vec::new());
    for entry in sim.clone().list(&dir()).unwrap() {
        let name = entry.name.into_string().unwrap();
        let bytes = sim.read_file(&dir().join(&name));
        let extension = Path::new(&name).extension().map(|extension| extension.to_str().unwrap().to_owned());
        match extension.as_deref() {
            Some("torn") => torn.push(bytes),
            Some("log" | "index" | "timeindex") => drop(ours.insert(name, bytes)),
            _ => {}
        }
    }
    (ours, torn)
}

#[test]
fn b007_a_crash_at_any_step_of_recovery_changes_nothing_in_the_end() {
    let seed = seed();
    for &harm in HARMS {
        let damaged = with_partition(seed, &fixture(DEMO), |dir| damage::apply(dir, harm));
        // Undisturbed.
        let straight = damaged.fork(seed);
        let before = straight.state_changes();
        let broker = open(&straight);
        let points = straight.state_changes() - before;
        assert!(points > 0, "{harm}: recovery changes nothing");
        let expected = read_all(&partition_of(&broker));
        let report = report_of(&broker);
        broker.close().unwrap();
        assert_closed(&straight, 1);
        let (expected_files, expected_torn) = files(&straight);

        for point in 1..=points {
            for crash in crate::sim::CRASHES {
                let what = format!("{harm}: {crash} crash at operation {point} of {points}");
                let sim = damaged.fork(seed ^ point);
                sim.crash_at_op(point);
                let disturbed = try_open(&sim, &tiny(270));
                assert!(sim.crashed(), "{what}: not reached");
                drop(disturbed);
                crate::sim::crash(&sim, crash);
                let broker = try_open(&sim, &tiny(270)).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(read_all(&partition_of(&broker)), expected, "{what}");
                assert_eq!(report_of(&broker).next_offset, report.next_offset, "{what}");
                assert_sound(&sim);
                broker.close().unwrap();
                let (files, torn) = files(&sim);
                assert!(files == expected_files, "{what}: the files differ");
                for copy in &expected_torn {
                    assert!(torn.contains(copy), "{what}: the records that were cut are nowhere");
                }
                // And it goes on as if nothing had been.
                let broker = open(&sim);
                assert_eq!(append(&partition_of(&broker), b"user-1", b"value-00000"), report.next_offset);
                assert_in_order(&read_all(&partition_of(&broker)), 0);
                broker.close().unwrap();
                assert_closed(&sim, 1);
            }
        }
    }
}

#[test]
fn b007_the_log_is_cut_and_synced_before_indexes_are_touched() {
    for harm in ["truncate-mid-body", "garbage-tail", "torn-body-prealloc", "hole-in-the-middle", "stale-record-tail"] {
        let sim = with_partition(seed(), &fixture(DEMO), |dir| damage::apply(dir, harm));
        let broker = open(&sim);
        let log = dir().join("00000000000000000030.log");
        let ops: Vec<_> = sim.ops().into_iter().filter(|op| op.kind.changes_state()).collect();
        let changes =
            |op: &sapwood::io::sim::OpRecord| matches!(op.kind, OpKind::Write | OpKind::SetLen | OpKind::Create | OpKind::Allocate);
        let last_cut = ops.iter().rposition(|op| op.path == log && changes(op)).expect("the tail was cut");
        let synced = last_cut + ops[last_cut..].iter().position(|op| op.path == log && op.kind == OpKind::Sync).expect("and synced");
        let index = |op: &&sapwood::io::sim::OpRecord| {
            op.path.extension().is_some_and(|extension| extension == "index" || extension == "timeindex")
        };
        let early = ops[..synced].iter().find(|op| index(op) && changes(op) && op.path.starts_with(dir()));
        assert!(early.is_none(), "{harm}: {early:?} before the log was cut and synced");
        // What held whole records is safe elsewhere before it is cut.
        if harm == "hole-in-the-middle" {
            let torn = |op: &sapwood::io::sim::OpRecord| op.path.to_str().unwrap().contains(".torn");
            let first_cut = ops.iter().position(|op| op.path == log && changes(op)).unwrap();
            assert!(ops[..first_cut].iter().any(|op| torn(op) && op.kind == OpKind::Sync), "the copy is not synced before the cut");
        }
        drop(broker);
    }
}

#[test]
fn recovery_that_fails_changes_nothing_that_a_second_one_needs() {
    // Not a crash: the disk answers with errors, opening fails or serves, and the next opening finds everything.
    let seed = seed();
    for &harm in HARMS {
        let damaged = with_partition(seed, &fixture(DEMO), |dir| damage::apply(dir, harm));
        let straight = damaged.fork(seed);
        let expected = read_all(&partition_of(&open(&straight)));
        for kind in [OpKind::Write, OpKind::SetLen, OpKind::Sync, OpKind::SyncDir, OpKind::Create, OpKind::Read, OpKind::Allocate] {
            for nth in 1..=4 {
                let sim = damaged.fork(seed);
                let fault = sapwood::io::sim::Fault::next(kind, sapwood::io::sim::Effect::Error(crate::sim::EIO)).nth(nth);
                sim.fail(fault);
                match try_open(&sim, &tiny(270)) {
                    Ok(broker) => drop(broker),
                    Err(error) => assert!(matches!(error, sapwood::Error::Io { .. }), "{harm}, {kind:?} {nth}: {error}"),
                }
                sim.clear_faults();
                let broker = open(&sim);
                assert_eq!(read_all(&partition_of(&broker)), expected, "{harm}, {kind:?} {nth}");
            }
        }
    }
}
