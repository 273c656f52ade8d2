//! All that a partition's directory holds, found out by reading only. Verifying tells it, a repair is planned from it.
//!
//! A writer of another process may be at work. What cannot be wrong by its work is judged at first sight: the order of reading
//! sees to it (the checkpoint before the names, the names before the lengths of indexes, those before the log: each speaks of what
//! was there before it). What its work could explain for a moment is looked at again, until it is gone or patience is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::examine::{Examined, Examiner, Role, has_moved, pauses};
use super::finding::{Code, Find, Finding, Severity};
use super::listing::Listing;
use crate::error::Result;
use crate::io::{Disk, Open};
use crate::partition::{self, CHECKPOINT, Checkpoint, HeldCheckpoint};
use crate::segment::{Kind, Name};
use crate::topic::Topic;

/// What was found in a partition's directory.
pub(super) struct Survey {
    pub(super) dir: PathBuf,
    pub(super) listing: Listing,
    pub(super) segments: Vec<Examined>,
    /// The records up to there were durable, says the checkpoint.
    durable: Option<u64>,
    /// What is not of one segment alone.
    findings: Vec<Finding>,
}

/// What a writer at work may make look wrong for a moment: a name that is not there yet, a length that is not right yet.
const PASSING: [Code; 11] = [
    Code::ZeroTail,
    Code::MissingIndex,
    Code::OrphanIndex,
    Code::EmptyIndex,
    Code::PartialEntry,
    Code::SegmentGap,
    Code::SegmentOverlap,
    Code::EmptySealedSegment,
    Code::SumOfActive,
    Code::CheckpointUnfit,
    // The file is made before its first slot is written.
    Code::CheckpointUnsound,
];

impl Survey {
    /// Looks at everything.
    pub(super) fn of(disk: &dyn Disk, dir: &Path, patience: Duration) -> Result<Self> {
        if Topic::lacks(disk, dir) {
            let told = "the topic should have this partition, and its directory is not there; no broker opens the topic without it";
            let findings = vec![Find::error(Code::PartitionMissing, 0, told).of(dir)];
            return Ok(Self { dir: dir.to_owned(), listing: Listing::default(), segments: Vec::new(), durable: None, findings });
        }
        let mut settled = BTreeMap::new();
        let mut pauses = pauses(patience);
        let mut before: Option<Vec<Finding>> = None;
        loop {
            let signs = Signs::of(disk, dir)?;
            let mut looked = Self::look(disk, dir, patience, &mut settled);
            match &mut looked {
                Ok(survey) => {
                    let passing = survey.passing();
                    let stays = |finding: &Finding| before.as_ref().is_none_or(|before| before.contains(finding));
                    // What is seen for the first time where a writer was seen to change things is its doing, like what is gone already.
                    survey.excuse(stays);
                    if survey.passing().is_empty() {
                        return looked;
                    }
                    before = Some(passing);
                }
                Err(error) if has_moved(error) => {}
                Err(_) => return looked,
            }
            // All of it shows in names and lengths: while these stay, so does what was found.
            while Signs::of(disk, dir)? == signs {
                let Some(pause) = pauses.next() else { return looked };
                // A writer of another process tells nobody.
                thread::sleep(pause);
            }
        }
    }

    /// Looks once. What no writer comes back to is kept in `settled`, and not looked at again.
    fn look(disk: &dyn Disk, dir: &Path, patience: Duration, settled: &mut BTreeMap<u64, Examined>) -> Result<Self> {
        let held = HeldCheckpoint::look(disk, &dir.join(CHECKPOINT));
        let checkpoint = match held {
            Ok(HeldCheckpoint::Ours(Some((_, checkpoint)))) => Some(checkpoint),
            _ => None,
        };
        let listing = Listing::of(disk, dir)?;
        let examiner = Examiner { disk, dir, checkpoint: checkpoint.as_ref(), irregular: &listing.irregular, patience };
        let bases = listing.bases();
        let mut segments = Vec::with_capacity(bases.len());
        for (left, &base) in (0..bases.len()).rev().zip(&bases) {
            let role = Role { is_last: left == 0, may_change: left < 2 };
            let examined = match settled.get(&base) {
                Some(examined) => examined.clone(),
                None => examiner.examine(base, role)?,
            };
            if !role.may_change {
                settled.insert(base, examined.clone());
            }
            segments.push(examined);
        }
        let mut findings = listing.findings(dir);
        findings.extend(Topic::unsound_settings(disk, dir).map(|path| {
            let told =
                "the topic's settings cannot be read or are out of range; a broker goes on with its fallback, and counts the directories";
            Find::warning(Code::SettingsUnsound, 0, told).of(path)
        }));
        findings.extend(partition::unsound_notes(disk, dir).into_iter().map(|path| {
            let told =
                "not what the engine writes: it says nothing of where the records begin, or that the partition moved; it is left alone";
            Find::warning(Code::NoteUnsound, 0, told).of(path)
        }));
        findings.extend(chain(dir, &segments));
        findings.extend(if listing.checkpoint { judge_checkpoint(dir, held, &segments) } else { Vec::new() });
        let durable = checkpoint.map(|checkpoint| checkpoint.next_offset);
        Ok(Self { dir: dir.to_owned(), listing, segments, durable, findings })
    }

    /// What may be gone by and by.
    fn passing(&mut self) -> Vec<Finding> {
        self.newest_findings().map(|finding| finding.clone()).collect()
    }

    /// Takes back what may be gone by and by, but for what `stays`.
    fn excuse(&mut self, stays: impl Fn(&Finding) -> bool) {
        for finding in self.newest_findings().filter(|finding| !stays(finding)) {
            finding.severity = Severity::Info;
        }
    }

    fn newest_findings(&mut self) -> impl Iterator<Item = &mut Finding> {
        let newest = self.segments.iter_mut().filter(|segment| segment.role.may_change).flat_map(|segment| &mut segment.findings);
        newest.chain(&mut self.findings).filter(|finding| finding.severity > Severity::Info && PASSING.contains(&finding.code))
    }

    /// Everything that was found: first what is of no segment, then by segment.
    pub(super) fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().chain(self.segments.iter().flat_map(|segment| &segment.findings))
    }

    /// Up to where records were durable, if not all of them are there.
    pub(super) fn lost(&self) -> Option<u64> {
        self.durable.filter(|_| self.findings.iter().any(|finding| finding.code == Code::DurableRecordsLost))
    }

    /// Whether the checkpoint is not what it should be.
    pub(super) fn checkpoint_is_wrong(&self) -> bool {
        use Code::{CheckpointUnfit, CheckpointUnsound, DurableRecordsLost};
        let wrong = [CheckpointUnfit, CheckpointUnsound, DurableRecordsLost];
        self.findings.iter().any(|finding| wrong.contains(&finding.code) && finding.severity > Severity::Info)
    }
}

/// What changes when a writer does something to names or lengths.
#[derive(PartialEq, Eq)]
struct Signs {
    listing: Listing,
    lens: Vec<Option<u64>>,
}

impl Signs {
    fn of(disk: &dyn Disk, dir: &Path) -> Result<Self> {
        let listing = Listing::of(disk, dir)?;
        let newest = listing.bases().into_iter().rev().take(2);
        let len = |name: Name| disk.open(&dir.join(name.to_string()), Open::READ).and_then(|file| file.len()).ok();
        let kinds = [Kind::Log, Kind::Index, Kind::TimeIndex, Kind::Sum];
        let lens = newest.flat_map(|base| kinds.map(|kind| len(Name { base, kind }))).collect();
        Ok(Self { listing, lens })
    }
}

/// Whether each segment begins where the one before it ends.
fn chain(dir: &Path, segments: &[Examined]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut last_timestamp = 0;
    for (index, segment) in segments.iter().enumerate() {
        let path = || dir.join(Name { base: segment.base, kind: Kind::Log }.to_string());
        if let Some(before) = index.checked_sub(1).map(|before| &segments[before])
            && before.next_offset != segment.base
        {
            let code = if segment.base > before.next_offset { Code::SegmentGap } else { Code::SegmentOverlap };
            let sentence =
                format!("it begins with the record {}, the segment before it ends with {} next", segment.base, before.next_offset);
            findings.push(Find::error(code, 0, sentence).of(path()));
        }
        if segment.records() == 0 && !segment.role.is_last {
            findings.push(Find::warning(Code::EmptySealedSegment, 0, "it holds no record, and others follow").of(path()));
        }
        if let Some((first, last)) = segment.timestamps {
            if first < last_timestamp {
                let sentence = format!("the first record is stamped {first}, the last one of the segment before {last_timestamp}");
                findings.push(Find::warning(Code::TimestampBackwards, 0, sentence).of(path()));
            }
            last_timestamp = last;
        }
    }
    findings
}

/// Whether what the checkpoint says holds.
fn judge_checkpoint(dir: &Path, held: std::io::Result<HeldCheckpoint>, segments: &[Examined]) -> Vec<Finding> {
    let path = dir.join(CHECKPOINT);
    let unfit = |sentence: String| Find::warning(Code::CheckpointUnfit, 0, sentence).of(&path);
    let Checkpoint { base, position, next_offset, last_timestamp, entries, .. } = match held {
        Ok(HeldCheckpoint::Ours(Some((_, checkpoint)))) => checkpoint,
        Ok(HeldCheckpoint::Ours(None)) => {
            let told = "it says nothing: the next opening scans the whole active log";
            return vec![Find::warning(Code::CheckpointUnsound, 0, told).of(&path)];
        }
        Ok(HeldCheckpoint::Foreign) => {
            return vec![Find::info(Code::StrayFile, 0, "not what an engine wrote; it is left alone").of(&path)];
        }
        Ok(HeldCheckpoint::Nothing) => return Vec::new(),
        Err(error) => return vec![unfit(format!("it cannot be read: {error}"))],
    };
    let Some(index) = segments.iter().position(|segment| segment.base == base) else {
        let end = segments.last().map_or(0, |last| last.next_offset);
        if segments.first().is_some_and(|first| base < first.base) && end >= next_offset {
            // It was removed from the front of the log.
            return Vec::new();
        }
        if end >= next_offset {
            return vec![unfit(format!("it is of the segment {base}, which is not there"))];
        }
        let sentence = format!(
            "the checkpoint says that the records up to {next_offset} were on the device, and that this log was the active one; \
             it is not there, and the logs that are hold records up to {end}"
        );
        let log = dir.join(Name { base, kind: Kind::Log }.to_string());
        return vec![Find::error(Code::DurableRecordsLost, 0, sentence).of(log)];
    };
    let segment = &segments[index];
    let mut findings = Vec::new();
    let (latest, passed) = segment.checkpoint.unwrap_or_default();
    if segment.valid_end < position {
        let sentence = format!(
            "the checkpoint says that every byte up to {position}, the records up to {next_offset}, was on the device; \
             the log holds records up to {}, to byte {}",
            segment.next_offset, segment.valid_end
        );
        let log = dir.join(Name { base, kind: Kind::Log }.to_string());
        findings.push(Find::error(Code::DurableRecordsLost, segment.valid_end, sentence).of(log));
    } else if !passed {
        findings.push(unfit(format!("no record {next_offset} begins at byte {position} of the segment {base}")));
    } else {
        let latest = segments[..index].iter().map(|segment| segment.latest).fold(latest, u64::max);
        if latest > last_timestamp {
            findings.push(unfit(format!("a record before it is stamped {latest}, and it says {last_timestamp} was the latest")));
        }
    }
    if segment.entries.iter().any(|held| held.unwrap_or(0) < entries) {
        findings.push(unfit(format!("it says that both indexes of the segment {base} hold {entries} entries, and they do not")));
    }
    findings
}
