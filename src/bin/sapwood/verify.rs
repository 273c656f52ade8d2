//! `sapwood verify`: all findings of all partitions, and a summary of each.

use std::io::Write;
use std::time::Duration;

use sapwood::inspect::{Inspector, Severity, VerifyReport};
use serde_json::json;

use crate::args::VerifyArgs;
use crate::output::{Out, line, stdout_or_nobody};
use crate::{Answer, Stop, partitions};

/// Verifies every partition there is.
pub fn run(args: &VerifyArgs) -> Result<Answer, Stop> {
    let inspector = Inspector::new().patience(Duration::from_millis(args.patience));
    let mut out = stdout_or_nobody();
    let mut answer = Answer::Clean;
    for partition in partitions(&inspector, &args.dir)? {
        let report = inspector.verify(&partition)?;
        if args.json {
            tell_programs(&mut out, &report, args.quiet)?
        } else {
            tell_people(&mut out, &report, args.quiet)?
        }
        out.flush()?;
        answer = answer.and(Answer::clean_if(report.is_clean()));
    }
    Ok(answer)
}

fn tell_people(out: &mut Out, report: &VerifyReport, quiet: bool) -> Result<(), Stop> {
    for finding in report.findings.iter().filter(|finding| !quiet || finding.severity > Severity::Info) {
        writeln!(out, "{finding}")?;
    }
    if !quiet || !report.is_clean() {
        let VerifyReport { path, records, first_offset, next_offset, .. } = report;
        let verdict = if report.is_clean() { "clean" } else { "not clean" };
        let segments = report.segments.len();
        writeln!(
            out,
            "{}: {verdict}: {segments} segments, {records} records; {first_offset} up to, not including, {next_offset} can be read",
            path.display()
        )?;
    }
    Ok(())
}

fn tell_programs(out: &mut Out, report: &VerifyReport, quiet: bool) -> Result<(), Stop> {
    for finding in report.findings.iter().filter(|finding| !quiet || finding.severity > Severity::Info) {
        let told = json!({
            "kind": "finding",
            "severity": finding.severity.to_string(),
            "code": finding.code.as_str(),
            "path": finding.path.to_string_lossy(),
            "file": finding.path.file_name().unwrap_or_default().to_string_lossy(),
            "position": finding.position,
            "sentence": finding.sentence,
        });
        line(out, &told)?;
    }
    if !quiet || !report.is_clean() {
        let segments = report.segments.iter().map(|segment| {
            json!({
                "base": segment.base,
                "log_bytes": segment.log_bytes,
                "valid_end": segment.valid_end,
                "records": segment.records,
                "damaged": segment.damaged,
            })
        });
        let summary = json!({
            "kind": "summary",
            "path": report.path.to_string_lossy(),
            "clean": report.is_clean(),
            "records": report.records,
            "first_offset": report.first_offset,
            "next_offset": report.next_offset,
            "segments": segments.collect::<Vec<_>>(),
        });
        line(out, &summary)?;
    }
    Ok(())
}
