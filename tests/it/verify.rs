//! `verify`: the same findings as the oracle's on every damage, none on what is sound or written to, and nothing changed by looking.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sapwood::inspect::{Code, Inspector, Severity, VerifyReport, verify};
use sapwood::{Batch, TopicConfig};
use serde_json::json;

use crate::child::{self, Child, argument, backend_name, say};
use crate::damage::{self, Target};
use crate::format::{self, Layout, Slot, segment_path};
use crate::oracle::{self, check};
use crate::support::{
    BACKENDS, TOPIC, copy_dir, create, data_with, each_backend, fixture, partition_dir, report_of, scratch, segments_of, snapshot,
};

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

/// Does every damage to every segment of every fixture that can take it, and the middle record where it is about one.
pub fn each_damage(mut test: impl FnMut(&Path, &str)) {
    let mut done = 0;
    for name in FIXTURES {
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
    assert!(done > 500, "{done} damages could be done");
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
fn it_agrees_with_the_oracle_on_every_damage() {
    each_damage(assert_agreement);
}
