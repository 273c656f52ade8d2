//! What verifying a partition's directory tells.

use std::path::PathBuf;

use super::finding::{Finding, Severity};
use super::survey::Survey;

/// What verifying found.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VerifyReport {
    /// The partition's directory.
    pub path: PathBuf,
    /// Its segments, in order.
    pub segments: Vec<SegmentReport>,
    /// Whole records in all segments.
    pub records: u64,
    /// The first record's offset.
    pub first_offset: u64,
    /// One past the last record that can be read from the first one on without meeting damage or a gap.
    pub next_offset: u64,
    /// Everything that was found.
    pub findings: Vec<Finding>,
}

/// One segment of a [`VerifyReport`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentReport {
    /// The offset of its first record.
    pub base: u64,
    /// Bytes of its log, room for later records included.
    pub log_bytes: u64,
    /// Where its last whole record ends.
    pub valid_end: u64,
    /// Whole records in it.
    pub records: u64,
    /// Whether something else than zeros follows these.
    pub damaged: bool,
}

impl VerifyReport {
    /// Whether nothing was found that should not be: no finding is more than [`Severity::Info`].
    pub fn is_clean(&self) -> bool {
        self.worst().is_none_or(|worst| worst == Severity::Info)
    }

    /// The gravest finding's severity.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }

    pub(super) fn of(survey: &Survey) -> Self {
        let segments = survey.segments.iter().map(|segment| SegmentReport {
            base: segment.base,
            log_bytes: segment.len,
            valid_end: segment.valid_end,
            records: segment.records(),
            damaged: segment.flaw.is_some(),
        });
        let segments: Vec<_> = segments.collect();
        let first_offset = segments.first().map_or(0, |first| first.base);
        let (mut next_offset, mut broken) = (first_offset, false);
        for segment in &segments {
            broken |= segment.base != next_offset;
            next_offset += if broken { 0 } else { segment.records };
            broken |= segment.damaged;
        }
        let records = segments.iter().map(|segment| segment.records).sum();
        let findings = survey.findings().cloned().collect();
        Self { path: survey.dir.clone(), segments, records, first_offset, next_offset, findings }
    }
}
