//! What a repair would do: decided from what was found, shown before anything is changed. Pure but for the looking.
//!
//! The steps are ordered so that a plan which is interrupted, and made and applied again, leads to the same files: what later
//! steps rest on is decided from what earlier ones do not change.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::examine::Examined;
use super::finding::{Code, Finding, Severity};
use super::survey::Survey;
use crate::partition::CHECKPOINT;
use crate::segment::{Kind, Name};

/// What to do about damage in sealed segments and gaps or overlaps between segments. None of it stops a partition's appends, but
/// for an overlap; so nothing is done unasked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum SealedDamage {
    /// It stays as it is, and the plan says so.
    #[default]
    Leave,
    /// The log ends with the last record before the first damage or gap. What is behind is set aside, and its offsets are given anew.
    KeepBefore,
    /// The log begins with the first segment behind the last damage or gap, as after retention. What is before is set aside.
    KeepBehind,
}

/// What the caller of a repair chooses. By default nothing is given up that a reader could read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct RepairChoices {
    /// Damage in sealed segments, gaps and overlaps.
    pub sealed: SealedDamage,
    /// Takes sealed logs as they are whose checksums do not fit though every record does: the checksum goes.
    pub accept_sums: bool,
    /// Writes the checksums that sealed segments lack, where all else of them is sound.
    pub write_sums: bool,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// What is going to be cut is copied, before anything else is changed: without its checkpoint, damage looks like a torn tail, which the
    /// next opening may cut without a copy.
    CopyAside { base: u64, position: u64, next_offset: u64 },
    /// The checkpoint goes: it would speak of files that are not the same any more. It says that the records up to there were
    /// durable, if not all of them are there.
    RemoveCheckpoint { durable: Option<u64> },
    /// A file that holds no record and nothing that cannot be had from a log.
    Remove { name: String, why: &'static str },
    /// A file gets a name that is no segment's.
    SetFileAside { name: String },
    /// A whole segment: its log is set aside, what was derived from it goes.
    SetSegmentAside { base: u64, next_offset: u64 },
    /// An empty segment that was abandoned while it was made.
    RemoveSegment { base: u64 },
    /// What begins at the position, and was copied aside, is cut.
    Cut { base: u64, position: u64, next_offset: u64 },
    /// Zeros behind the last record of a sealed log.
    CutZeros { base: u64, position: u64 },
    /// An index file is made anew from the log.
    Rebuild { base: u64, kind: Kind, interval: u32 },
    /// The checksum of a sealed log.
    WriteSum { base: u64 },
}

impl Step {
    /// Where it cuts a log with bytes that are no zeros; there is one such step at most, in the last segment that stays.
    fn cut(&self) -> Option<(u64, u64, u64)> {
        match *self {
            Self::Cut { base, position, next_offset } => Some((base, position, next_offset)),
            _ => None,
        }
    }

    /// The file that it is about, or the first of them.
    pub(super) fn name(&self) -> String {
        let of = |base, kind| Name { base, kind }.to_string();
        match *self {
            Self::RemoveCheckpoint { .. } => CHECKPOINT.to_owned(),
            Self::Remove { ref name, .. } | Self::SetFileAside { ref name } => name.clone(),
            Self::Rebuild { base, kind, .. } => of(base, kind),
            Self::WriteSum { base } => of(base, Kind::Sum),
            Self::CopyAside { base, .. }
            | Self::SetSegmentAside { base, .. }
            | Self::RemoveSegment { base }
            | Self::Cut { base, .. }
            | Self::CutZeros { base, .. } => of(base, Kind::Log),
        }
    }

    fn aside(segment: &Examined) -> Self {
        Self::SetSegmentAside { base: segment.base, next_offset: segment.next_offset }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let log = |base: u64| Name { base, kind: Kind::Log };
        match self {
            Self::CopyAside { base, position, .. } => {
                write!(f, "copy what is in {} from byte {position} on to {base:020}.{position}.torn", log(*base))
            }
            Self::RemoveCheckpoint { durable: None } => write!(f, "remove the checkpoint, which costs the next opening a scan"),
            Self::RemoveCheckpoint { durable: Some(end) } => {
                write!(
                    f,
                    "remove the checkpoint: it says that all records before {end} were durable, and not all of them are there any more"
                )
            }
            Self::Remove { name, why } => write!(f, "remove {name}: {why}"),
            Self::SetFileAside { name } => write!(f, "rename {name} to {name}.torn, which is never read"),
            Self::SetSegmentAside { base, next_offset } => {
                let what = format!("with the records {base} up to, not including, {next_offset}");
                write!(f, "rename {}, {what}, to {base:020}.0.torn, which is never read, and remove its indexes and checksum", log(*base))
            }
            Self::RemoveSegment { base } => write!(f, "remove {} and its indexes: it is empty, and the log went on without it", log(*base)),
            Self::Cut { base, position, .. } => {
                write!(f, "cut {} at byte {position}", log(*base))
            }
            Self::CutZeros { base, position } => write!(f, "cut the zeros in {} from byte {position} on", log(*base)),
            Self::Rebuild { base, kind, interval } => {
                let name = Name { base: *base, kind: *kind };
                match interval {
                    1 => write!(f, "make {name} anew from the log, with an entry for every record"),
                    _ => write!(f, "make {name} anew from the log, with an entry for every {interval} records"),
                }
            }
            Self::WriteSum { base } => write!(f, "write the checksum of {}", log(*base)),
        }
    }
}

/// A place where the records do not lead on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Break {
    /// Within the segment of that number.
    Within(usize),
    /// Before the segment of that number.
    Before(usize),
}

/// What is decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decided {
    pub(super) steps: Vec<Step>,
    /// What stays wrong.
    pub(super) left: Vec<Finding>,
    /// The records that can be read one after another once all is done.
    pub(super) keeps: Range<u64>,
}

/// Decides what to do. `interval` is that of indexes that are made anew, where no sound one tells.
pub(super) fn decide(survey: &Survey, choices: RepairChoices, interval: Option<u32>) -> Decided {
    let mut segments: Vec<&Examined> = survey.segments.iter().collect();
    let (mut early, mut steps) = (leftovers(survey), Vec::new());
    if let Some(base) = abandoned(&segments) {
        segments.pop();
        steps.push(Step::RemoveSegment { base });
    }
    let breaks = breaks(&segments);
    match (choices.sealed, breaks.first(), breaks.last()) {
        (SealedDamage::KeepBefore, Some(&first), _) => {
            let kept = match first {
                Break::Within(index) => index + 1,
                Break::Before(index) => index,
            };
            // The newest first: a chain that is cut short is a chain.
            let aside = segments.split_off(kept);
            steps.extend(aside.iter().rev().map(|segment| Step::aside(segment)));
        }
        (SealedDamage::KeepBehind, _, Some(&last)) => {
            let (Break::Within(index) | Break::Before(index)) = last;
            let kept = segments.split_off(if matches!(last, Break::Within(_)) { index + 1 } else { index });
            // The oldest first, as retention does.
            steps.extend(segments.iter().map(|segment| Step::aside(segment)));
            segments = kept;
        }
        _ => {}
    }
    let mut mended = Mended {
        choices,
        interval: interval.or_else(|| told_interval(&segments)).unwrap_or(1),
        early: Vec::new(),
        steps: Vec::new(),
        left: Vec::new(),
    };
    let last = segments.len().saturating_sub(1);
    for (index, segment) in segments.iter().enumerate() {
        mended.segment(segment, index == last);
    }
    early.append(&mut mended.early);
    steps.append(&mut mended.steps);
    let mut left = mended.left;
    let stays = |finding: &&Finding| is_past_repair(survey, finding) || is_backwards(&segments, finding);
    let more: Vec<_> = survey.findings().filter(stays).filter(|finding| !left.contains(finding)).cloned().collect();
    left.extend(more);
    if choices.sealed == SealedDamage::Leave && !breaks.is_empty() {
        let of_breaks = |finding: &&Finding| matches!(finding.code, Code::SegmentGap | Code::SegmentOverlap | Code::EmptySealedSegment);
        left.extend(survey.findings().filter(of_breaks).filter(|finding| steps.is_empty() || !is_removed(&steps, finding)).cloned());
    }
    // What another thing has the place of, and what was not finished, goes first: a copy that was not is made under the same name.
    let unfinished = survey.listing.irregular.len() + survey.listing.unfinished.len();
    let touches_records = |step: &Step| !matches!(step, Step::WriteSum { .. } | Step::CutZeros { .. } | Step::CopyAside { .. });
    if survey.checkpoint_is_wrong() || (survey.listing.checkpoint && steps.iter().any(touches_records)) {
        early.insert(unfinished, Step::RemoveCheckpoint { durable: survey.lost() });
    }
    if let Some((base, position, next_offset)) = steps.iter().find_map(Step::cut) {
        early.insert(unfinished, Step::CopyAside { base, position, next_offset });
    }
    early.append(&mut steps);
    Decided { steps: early, left, keeps: readable(&segments) }
}

/// Whether a finding is about a directory, link or special file under a name that is none of the engine's, about a whole partition
/// that is missing, about the topic, or about what only notes told.
fn is_past_repair(survey: &Survey, finding: &Finding) -> bool {
    if matches!(finding.code, Code::PartitionMissing | Code::SettingsUnsound | Code::NoteUnsound) {
        return true;
    }
    let is_ours = |name: &str| survey.listing.irregular.iter().any(|ours| ours == name);
    finding.code == Code::NotARegularFile && !finding.path.file_name().and_then(|name| name.to_str()).is_some_and(is_ours)
}

/// Whether a finding is about a record of these segments that is stamped earlier than the one before it, of these as well.
fn is_backwards(segments: &[&Examined], finding: &Finding) -> bool {
    let base = finding.path.file_name().and_then(Name::parse).map(|name| name.base);
    let stays = segments.iter().position(|segment| Some(segment.base) == base);
    finding.code == Code::TimestampBackwards && stays.is_some_and(|index| index > 0 || finding.position > 0)
}

/// Whether a finding is about a segment that the steps remove.
fn is_removed(steps: &[Step], finding: &Finding) -> bool {
    let base = finding.path.file_name().and_then(Name::parse).map(|name| name.base);
    steps.iter().any(|step| matches!(step, Step::RemoveSegment { base: removed } if Some(*removed) == base))
}

/// What is in the directory and of no segment.
fn leftovers(survey: &Survey) -> Vec<Step> {
    let listing = &survey.listing;
    let mut steps = Vec::new();
    for name in &listing.irregular {
        steps.push(Step::SetFileAside { name: name.clone() });
    }
    for name in &listing.unfinished {
        steps.push(Step::Remove { name: name.clone(), why: "it was not finished" });
    }
    for name in &listing.orphans {
        let text = name.to_string();
        steps.push(match name.kind {
            Kind::Sum => Step::Remove { name: text, why: "it is the checksum of a log that is not there" },
            _ => Step::SetFileAside { name: text },
        });
    }
    steps
}

/// A last segment that holds no byte and begins within the one before it: that one went on.
fn abandoned(segments: &[&Examined]) -> Option<u64> {
    match segments {
        [.., before, last] if last.len == 0 && before.next_offset > last.base => Some(last.base),
        _ => None,
    }
}

fn breaks(segments: &[&Examined]) -> Vec<Break> {
    let mut breaks = Vec::new();
    for (index, segment) in segments.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| segments[before]);
        // Behind a damage nothing leads on: that is one break, not two.
        if before.is_some_and(|before| before.flaw.is_none() && before.next_offset != segment.base) {
            breaks.push(Break::Before(index));
        }
        if segment.flaw.is_some() && index + 1 < segments.len() {
            breaks.push(Break::Within(index));
        }
    }
    breaks
}

/// The interval that the first segment tells whose index is sound and holds as many entries as tell one.
fn told_interval(segments: &[&Examined]) -> Option<u32> {
    segments.iter().find_map(|segment| segment.interval)
}

/// The records from the first one on that are whole and without a gap.
fn readable(segments: &[&Examined]) -> Range<u64> {
    let first = segments.first().map_or(0, |segment| segment.base);
    let mut next = first;
    for segment in segments {
        if segment.base != next {
            break;
        }
        next = segment.next_offset;
        if segment.flaw.is_some() {
            break;
        }
    }
    first..next
}

/// What is done to the segments that stay.
struct Mended {
    choices: RepairChoices,
    interval: u32,
    /// Checksums that go, before anything else is changed.
    early: Vec<Step>,
    steps: Vec<Step>,
    left: Vec<Finding>,
}

impl Mended {
    fn segment(&mut self, segment: &Examined, is_last: bool) {
        let Examined { base, valid_end: position, next_offset, .. } = *segment;
        if segment.flaw.is_some() && !is_last {
            // The indexes stay as well: they may lead to records behind the damage.
            let all = segment.findings.iter().filter(|finding| finding.severity > Severity::Info);
            self.left.extend(all.cloned());
            return;
        }
        if segment.flaw.is_some() {
            self.steps.push(Step::Cut { base, position, next_offset });
        } else if !is_last && position < segment.len {
            self.steps.push(Step::CutZeros { base, position });
        }
        for kind in [Kind::Index, Kind::TimeIndex] {
            if segment.is_wrong(kind) {
                self.steps.push(Step::Rebuild { base, kind, interval: self.interval });
            }
        }
        self.sum(segment, is_last);
    }

    fn sum(&mut self, segment: &Examined, is_last: bool) {
        let base = segment.base;
        let name = Name { base, kind: Kind::Sum }.to_string();
        let is_mismatch = segment.has(Code::SumMismatch);
        let is_there = !segment.has(Code::SumMissing) && (!segment.role.is_last || segment.has(Code::SumOfActive));
        if is_mismatch && !is_last && !self.choices.accept_sums {
            self.left.extend(segment.findings.iter().filter(|finding| finding.code == Code::SumMismatch).cloned());
            return;
        }
        let why = match () {
            () if is_there && is_last => Some("it is the checksum of a log that is not sealed"),
            () if segment.has(Code::SumUnsound) => Some("it is no checksum of the log"),
            () if is_mismatch => Some("it is the checksum of other bytes, and these are accepted"),
            () => None,
        };
        if let Some(why) = why {
            self.early.push(Step::Remove { name, why });
        }
        if !is_last && self.choices.write_sums && (why.is_some() || segment.has(Code::SumMissing)) {
            self.steps.push(Step::WriteSum { base });
        }
    }
}

/// What a repair of one partition's directory would do, and what it would leave. Nothing was changed yet.
///
/// `{}` shows it, one line for each step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a plan changes nothing until it is applied"]
pub struct RepairPlan {
    pub(super) dir: PathBuf,
    pub(super) choices: RepairChoices,
    pub(super) decided: Decided,
}

impl RepairPlan {
    /// The partition's directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.decided.steps.is_empty()
    }

    /// Each change, as a sentence, in the order in which they are made.
    pub fn steps(&self) -> impl Iterator<Item = String> {
        self.decided.steps.iter().map(Step::to_string)
    }

    /// What stays wrong: what these choices leave alone, and what no repair mends.
    pub fn left(&self) -> &[Finding] {
        &self.decided.left
    }

    /// The offsets of records that the checkpoint says were durable, and that are not there any more; none if all of them are. What
    /// follows the kept ones is given anew.
    pub fn loses(&self) -> Range<u64> {
        let durable = self.decided.steps.iter().find_map(|step| match *step {
            Step::RemoveCheckpoint { durable } => durable,
            _ => None,
        });
        let end = self.decided.keeps.end;
        end..durable.unwrap_or(end).max(end)
    }

    /// The offsets of the records that can be read one after another once it is applied. Where nothing is left wrong, these are all.
    pub fn keeps(&self) -> Range<u64> {
        self.decided.keeps.clone()
    }
}

impl fmt::Display for RepairPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}:", self.dir.display())?;
        if self.is_empty() {
            writeln!(f, "  nothing to do")?;
        }
        for (number, step) in self.decided.steps.iter().enumerate() {
            writeln!(f, "  {}. {step}", number + 1)?;
        }
        for finding in &self.decided.left {
            writeln!(f, "  left as it is: {finding}")?;
        }
        let Range { start, end } = self.keeps();
        write!(f, "  then the records {start} up to, not including, {end} can be read")
    }
}
