//! `verify`: the same findings as the oracle's on every damage, none on what is sound or written to, and nothing changed by looking.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use sapwood::inspect::{Code, Inspector, Severity, VerifyReport, verify};
use sapwood::{Batch, Durability, TopicConfig};

use crate::damage::{self, Target};
use crate::format::{self, Layout, Slot, segment_path};
use crate::oracle::{self, Found as Located, check};
use crate::support::{Rng, Row, copy_dir, create, data_with, each_backend, fixture, partition_dir, scratch, seed, segments_of, snapshot};

const DEMO: &str = "demo-36-segment-270";

pub const FIXTURES: [&str; 9] = [
    DEMO,
    "edge-segment-270",
    "interval-1-prealloc",
    "interval-4096-prealloc",
    "interval-4096-segment-270",
    "interval-7-base-1e12",
    "interval-7-segment-270-base-1e12-prealloc",
    "segment-1",
    "worked",
];

/// What the oracle does not look for.
const OUR_OWN: [Code; 3] = [Code::SumMissing, Code::TornTail, Code::UnderWay];

/// Verifies where nobody writes.
#[track_caller]
pub fn look(dir: &Path) -> VerifyReport {
    Inspector::new().patience(Duration::ZERO).verify(dir).unwrap()
}

/// Code, file, position and severity, in order.
type Found = Vec<(String, String, u64, &'static str)>;

fn ours(report: &VerifyReport) -> Found {
    let severity = |severity| match severity {
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Error => "error",
    };
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let wanted = report.findings.iter().filter(|finding| !OUR_OWN.contains(&finding.code));
    let mut found: Found =
        wanted.map(|finding| (finding.code.to_string(), name(&finding.path), finding.position, severity(finding.severity))).collect();
    found.sort();
    found
}

fn theirs(report: &oracle::Report) -> Found {
    let severity = |severity| match severity {
        oracle::Severity::Info => "info",
        oracle::Severity::Warn => "warning",
        oracle::Severity::Error => "error",
    };
    let mut found: Found = report
        .findings
        .iter()
        .map(|finding| (finding.code.to_owned(), finding.file.clone(), finding.at, severity(finding.severity)))
        .collect();
    found.sort();
    found
}

#[track_caller]
fn assert_agreement(dir: &Path, what: &str) {
    let (report, judged) = (look(dir), check(dir));
    assert_eq!(ours(&report), theirs(&judged), "{what}");
    assert_eq!((report.first_offset, report.next_offset), (judged.first_offset, judged.next_offset), "{what}");
    assert_eq!(report.records, judged.records.len() as u64, "{what}");
    for (segment, judged) in report.segments.iter().zip(&judged.segments) {
        let told = (segment.base, segment.log_bytes, segment.valid_end, segment.records, segment.damaged);
        assert_eq!(told, (judged.base, judged.log_len, judged.valid_end, judged.records, judged.damaged), "{what}");
    }
    assert_eq!(report.is_clean(), judged.wrong().is_empty(), "{what}");
}

/// Does every damage to the first, a middle and the last segment of each fixture, where it can take it, and the middle record where it is about one.
pub fn each_damage(fixtures: &[&str], mut test: impl FnMut(&Path, &str)) {
    let mut done = 0;
    for name in fixtures {
        let segments = damage::bases(&fixture(name)).len();
        for (harm, _) in damage::ALL {
            for segment in BTreeSet::from([0, segments / 2, segments - 1]) {
                let data = scratch();
                copy_dir(&fixture(name), data.path());
                // What a damage needs, not every segment has: a key, later records, entries.
                let harmed = std::panic::catch_unwind(|| damage::apply_to(data.path(), harm, segment));
                if harmed.is_ok() {
                    test(data.path(), &format!("{harm} of segment {segment} of {name}"));
                    done += 1;
                }
            }
        }
    }
    assert!(done > fixtures.len() * 40, "{done} damages could be done");
}

#[test]
fn what_others_wrote_is_clean() {
    for name in FIXTURES.into_iter().chain(["no-records"]) {
        let report = verify(fixture(name)).unwrap();
        assert!(report.is_clean(), "{name}: {:#?}", report.findings);
        assert_agreement(&fixture(name), name);
    }
    let empty = scratch();
    let report = look(empty.path());
    assert!(report.findings.is_empty() && report.segments.is_empty() && report.next_offset == 0);
    let missing = verify(empty.path().join("nothing")).unwrap_err();
    assert!(matches!(missing, sapwood::Error::Io { .. }), "{missing}");
}

#[test]
fn it_agrees_with_the_oracle_on_every_damage_and_changes_nothing() {
    each_damage(&FIXTURES, |dir, what| {
        let before = snapshot(dir);
        assert_agreement(dir, what);
        let left = Inspector::new().patience(Duration::ZERO).read(dir, 0).unwrap().count();
        assert!(left > 0, "{what}: nothing could be read");
        assert!(snapshot(dir) == before, "{what}: looking changed something");
    });
}

#[test]
fn records_are_read_up_to_the_damage_and_the_error_names_it() {
    each_damage(&[DEMO, "edge-segment-270"], |dir, what| {
        let judged = check(dir);
        let mut records = Inspector::new().patience(Duration::ZERO).read(dir, 0).unwrap();
        let mut rows = Vec::new();
        let error = loop {
            match records.next() {
                Some(Ok(stored)) => rows.push(Row::from(stored.record)),
                Some(Err(error)) => break Some(error),
                None => break None,
            }
        };
        assert_eq!(rows, crate::support::rows(judged.readable_records()), "{what}");
        assert!(records.next().is_none(), "{what}: an error is the end");
        let breaks = judged.segments.iter().any(|segment| segment.damaged || !segment.in_readable_prefix);
        assert_eq!(error.as_ref().is_some_and(sapwood::Error::is_damage), breaks, "{what}: {error:?}");
        let place = records.place().unwrap();
        match error {
            Some(sapwood::Error::Damaged { position, offset, .. }) => assert_eq!(offset, judged.next_offset, "{what}: {position}"),
            Some(sapwood::Error::RecordsMissing { from, .. }) => assert_eq!(from, judged.next_offset, "{what}"),
            Some(other) => panic!("{what}: {other}"),
            None => assert_eq!((place.offset, place.position), (judged.next_offset, judged.next_position), "{what}"),
        }
    });
}

#[test]
fn reading_begins_where_it_is_asked_to() {
    let original = crate::support::rows(&check(&fixture(DEMO)).records);
    for from in [0, 1, 5, 6, 17, 35, 36, 100] {
        let records = Inspector::new().read(fixture(DEMO), from).unwrap();
        let rows: Vec<Row> = records.map(|stored| stored.unwrap().record.into()).collect();
        assert_eq!(rows, original[original.len().min(from as usize)..], "from {from}");
    }
    // Behind a damage, too, where the index leads there.
    let (_data, dir) = data_with(DEMO);
    damage::apply_to(&dir, "flip-value-byte", 1);
    let records = Inspector::new().read(&dir, 10).unwrap();
    let rows: Vec<Row> = records.map(|stored| stored.unwrap().record.into()).collect();
    assert_eq!(rows, original[10..]);
}

#[test]
fn b156_a_partition_that_is_open_and_damaged_is_told_of_and_left_as_it_is() {
    each_backend(|backend| {
        let (data, dir) = data_with(DEMO);
        let broker = crate::support::open(data.path(), backend, &segments_of(270));
        damage::apply_to(&dir, "truncate-mid-body", 2);
        let before = snapshot(data.path());
        let report = verify(&dir).unwrap();
        assert!(report.findings.iter().any(|finding| finding.code == Code::BodyPastEnd && finding.severity == Severity::Error));
        assert_eq!(report.next_offset, 17);
        assert!(snapshot(data.path()) == before);
        broker.close().unwrap();
    });
}

/// Appends a batch for each permit.
fn load(partition: &sapwood::Partition, permits: &Receiver<()>, seed: u64) {
    let mut rng = Rng::new(seed);
    for () in permits {
        let mut batch = Batch::new();
        for _ in 0..=rng.below(4) {
            let len = match rng.below(16) {
                0 => 3000 + rng.below(9000),
                _ => rng.below(300),
            };
            batch.push(Some(&rng.bytes(5)), &rng.bytes(len as usize)).unwrap();
        }
        partition.append(batch).unwrap().wait().unwrap();
    }
}

#[test]
fn a_partition_that_is_written_to_is_clean_at_every_look() {
    let seed = seed();
    let levels = [Durability::Durable, Durability::Os, Durability::Interval { bytes: 1 << 16, time: Duration::from_millis(5) }];
    each_backend(|backend| {
        for (durability, segment_bytes) in levels.into_iter().zip([64 << 10, 1 << 30, 16 << 10]) {
            let data = scratch();
            let topic = TopicConfig { durability, ..segments_of(segment_bytes) };
            let (broker, partition) = create(data.path(), backend, &topic);
            // So many a look and no more: what is appended while a look lasts makes the next one longer, and where appends are as quick
            // as looks (in memory), a log without bounds would grow by a factor with each of them.
            const BATCHES: usize = 200;
            let (permit, permits) = bounded(BATCHES);
            std::thread::scope(|scope| {
                for producer in 0..3 {
                    let (partition, permits) = (&partition, permits.clone());
                    scope.spawn(move || load(partition, &permits, seed ^ producer));
                }
                // Where a look fails, the producers end with it.
                let permit = permit;
                for _ in 0..25 {
                    for _ in permit.len()..BATCHES {
                        permit.send(()).unwrap();
                    }
                    let before = partition.next_offset();
                    let report = verify(partition.path()).unwrap();
                    assert!(report.is_clean(), "{durability:?}: {:#?}", report.findings);
                    assert!(report.next_offset >= before, "{durability:?}: {before} were acknowledged: {report:?}");
                }
            });
            let appended = partition.next_offset();
            broker.close().unwrap();
            let report = look(&partition_dir(data.path()));
            assert!(report.is_clean() && report.next_offset == appended, "{report:#?}");
        }
    });
}

/// A demo partition with that checkpoint.
fn with_checkpoint(slot: &Slot) -> (tempfile::TempDir, std::path::PathBuf) {
    let (data, dir) = data_with(DEMO);
    fs::write(dir.join("checkpoint"), slot.file(None)).unwrap();
    (data, dir)
}

/// What is true of the demo partition two records before its end.
fn true_slot() -> Slot {
    let records = check(&fixture(DEMO)).records;
    let (next, last) = (&records[34], &records[33]);
    let Located { base, position, offset, .. } = next.clone();
    Slot { sequence: 4, base, position, next_offset: offset, last_timestamp: last.timestamp, entries: 4, clean: false }
}

#[test]
fn what_the_checkpoint_says_is_checked() {
    let slot = true_slot();
    let (_data, dir) = with_checkpoint(&slot);
    assert_agreement_but_for_the_checkpoint(&dir);
    for (wrong, code) in [
        (Slot { base: 31, ..slot }, Code::CheckpointUnfit),
        (Slot { position: slot.position + 1, ..slot }, Code::CheckpointUnfit),
        (Slot { next_offset: slot.next_offset + 1, ..slot }, Code::CheckpointUnfit),
        (Slot { last_timestamp: slot.last_timestamp - 1, ..slot }, Code::CheckpointUnfit),
        (Slot { entries: 7, ..slot }, Code::CheckpointUnfit),
        (Slot { position: 1000, ..slot }, Code::DurableRecordsLost),
    ] {
        let (_data, dir) = with_checkpoint(&wrong);
        let report = look(&dir);
        let found: Vec<_> = report.findings.iter().filter(|finding| finding.severity > Severity::Info).collect();
        assert!(found.len() == 1 && found[0].code == code, "{wrong:?}: {found:#?}");
    }
    fs::write(dir.join("checkpoint"), [b's'; 100]).unwrap();
    assert!(look(&dir).is_clean(), "a file of another's");
    fs::write(dir.join("checkpoint"), b"sapwckpt and nothing that holds").unwrap();
    assert_eq!(worst(&look(&dir)), [Code::CheckpointUnsound]);
}

fn worst(report: &VerifyReport) -> Vec<Code> {
    report.findings.iter().filter(|finding| finding.severity > Severity::Info).map(|finding| finding.code).collect()
}

#[track_caller]
fn assert_agreement_but_for_the_checkpoint(dir: &Path) {
    let report = look(dir);
    assert!(report.is_clean(), "{:#?}", report.findings);
    assert_eq!(report.next_offset, 36);
}

#[test]
fn the_checkpoint_tells_a_torn_tail_from_damage() {
    for (record, is_damage) in [(3, true), (4, false)] {
        let (_data, dir) = with_checkpoint(&true_slot());
        let target = Target::newest(&dir);
        target.damage("flip-value-byte", &target.records[record]);
        let report = look(&dir);
        let has = |code| report.findings.iter().any(|finding| finding.code == code);
        assert_eq!((has(Code::DurableRecordsLost), has(Code::TornTail)), (is_damage, !is_damage), "{:#?}", report.findings);
    }
}

#[test]
fn memory_is_bounded_whatever_an_index_holds() {
    // Findings are told up to a number; an index of nothing but lies has no end of them.
    let (_data, dir) = data_with(DEMO);
    let index = segment_path(&dir, 30, "index");
    let lies: Vec<u8> = (0..100_000u64).flat_map(|number| format::entry(u64::MAX - number, number)).collect();
    fs::write(&index, lies).unwrap();
    let report = look(&dir);
    assert_eq!(report.findings.iter().filter(|finding| finding.path == index).count(), 1001);
    assert!(worst(&report).contains(&Code::MoreFindings));
    // Entries in the wrong order are looked up, each, and right ones are not called wrong.
    let data = scratch();
    let dir = data.path().join("0");
    format::write_partition(&dir, &format::demo(70_000), Layout::default());
    let index = segment_path(&dir, 0, "index");
    let mut entries: Vec<[u8; 16]> = fs::read(&index).unwrap().as_chunks().0.to_vec();
    entries[1..].rotate_left(40_000);
    fs::write(&index, entries.concat()).unwrap();
    assert_eq!(worst(&look(&dir)), [Code::OffsetNotIncreasing, Code::PositionNotIncreasing]);
}
