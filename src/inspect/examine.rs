//! Examines one segment: its log record by record, its index files beside it, its checksum.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::finding::{Code, Find, Finding, Severity};
use super::index::{IndexCheck, Locator};
use crate::error::{Error, Result};
use crate::io::{Disk, File, Open};
use crate::partition::Checkpoint;
use crate::record::Flaw;
use crate::segment::{ENTRY_BYTES, HeldSum, Kind, Name, Scanner, Step, Sum, Survivors};

/// Where a segment stands among the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Role {
    /// The last one, which takes the appends if the partition is open.
    pub(super) is_last: bool,
    /// A writer may be at it, or have been just now.
    pub(super) may_change: bool,
}

/// What one segment is.
#[derive(Debug, Clone)]
pub(super) struct Examined {
    pub(super) base: u64,
    pub(super) role: Role,
    /// Bytes of the log.
    pub(super) len: u64,
    /// Where the last whole record ends.
    pub(super) valid_end: u64,
    pub(super) next_offset: u64,
    /// Why the log is none from there on.
    pub(super) flaw: Option<Flaw>,
    /// The first record's timestamp, and the last one's.
    pub(super) timestamps: Option<(u64, u64)>,
    /// The latest timestamp of the records before the checkpoint, and whether the walk came past its place; if it is of this segment.
    pub(super) checkpoint: Option<(u64, bool)>,
    /// The latest timestamp.
    pub(super) latest: u64,
    /// Entries that the index files have room for.
    pub(super) entries: [Option<u64>; 2],
    /// Every how many records one is entered, as a sound index file tells that has at least two entries.
    pub(super) interval: Option<u32>,
    /// Which of the index files are not what they should be.
    wrong: [bool; 2],
    pub(super) findings: Vec<Finding>,
}

impl Examined {
    pub(super) fn records(&self) -> u64 {
        self.next_offset - self.base
    }

    /// Whether that index file is not what it should be.
    pub(super) fn is_wrong(&self, kind: Kind) -> bool {
        self.wrong[usize::from(kind == Kind::TimeIndex)]
    }

    /// Whether something of that kind was found.
    pub(super) fn has(&self, code: Code) -> bool {
        self.findings.iter().any(|finding| finding.code == code)
    }
}

/// What all segments are examined with.
#[derive(Clone, Copy)]
pub(super) struct Examiner<'a> {
    pub(super) disk: &'a dyn Disk,
    pub(super) dir: &'a Path,
    pub(super) checkpoint: Option<&'a Checkpoint>,
    /// Names under which no regular file stands: what a link leads to is none of the segment's.
    pub(super) irregular: &'a [String],
    /// How long to look again at what a writer at work could explain.
    pub(super) patience: Duration,
}

/// A log that is walked.
struct Walked<'a> {
    log: &'a (Arc<dyn File>, bool),
    path: &'a Path,
    base: u64,
    role: Role,
    len: u64,
    entries: [Option<u64>; 2],
}

/// Opens a log to be walked: past the page cache, where that is possible.
pub(super) fn open_log(disk: &dyn Disk, path: &Path) -> Result<(Arc<dyn File>, bool)> {
    match disk.open(path, Open { direct: true, ..Open::READ }) {
        Ok(log) => Ok((log, true)),
        Err(_) => Ok((disk.open(path, Open::READ).map_err(Error::io("open", path))?, false)),
    }
}

/// A scanner over a log that was opened in that way.
pub(super) fn scanner<'a>(log: &'a (Arc<dyn File>, bool), path: &'a Path, from: (u64, u64), len: u64) -> Scanner<'a> {
    let scanner = Scanner::new(&*log.0, path, from.1, from.0, len);
    if log.1 { scanner.in_blocks() } else { scanner }
}

/// Pauses that grow and come to `patience` in all.
pub(super) fn pauses(patience: Duration) -> impl Iterator<Item = Duration> {
    let mut left = patience;
    let mut next = Duration::from_millis(1);
    std::iter::from_fn(move || {
        let pause = next.min(left);
        left -= pause;
        next *= 2;
        (!pause.is_zero()).then_some(pause)
    })
}

impl Examiner<'_> {
    fn path(&self, base: u64, kind: Kind) -> PathBuf {
        self.dir.join(Name { base, kind }.to_string())
    }

    fn is_irregular(&self, base: u64, kind: Kind) -> bool {
        self.irregular.contains(&Name { base, kind }.to_string())
    }

    /// Reads all of a segment's files.
    pub(super) fn examine(&self, base: u64, role: Role) -> Result<Examined> {
        // Measured before the log is read: an entry is written after its record, so the log that is read has the record.
        let indexes = [Kind::Index, Kind::TimeIndex].map(|kind| match self.is_irregular(base, kind) {
            true => Ok(None),
            false => IndexCheck::open(self.disk, self.dir, base, kind, role.is_last),
        });
        let [by_position, by_time] = indexes;
        let mut indexes = [by_position?, by_time?];
        let path = self.path(base, Kind::Log);
        let log = open_log(self.disk, &path)?;
        let len = log.0.len().map_err(Error::io("measure", &path))?;
        let buffered = self.disk.open(&path, Open::READ).map_err(Error::io("open", &path))?;
        let mut passed = Locator::new(&*buffered, &path, len);
        let entries = [0, 1].map(|index: usize| indexes[index].as_ref().map(|check| check.len / ENTRY_BYTES));

        let mut examined = self.walk(Walked { log: &log, path: &path, base, role, len, entries }, &mut indexes, &mut passed)?;
        self.judge_end(&mut examined, &*buffered, &path)?;
        for (check, kind) in indexes.into_iter().zip([Kind::Index, Kind::TimeIndex]) {
            let wrong = &mut examined.wrong[usize::from(kind == Kind::TimeIndex)];
            *wrong = true;
            match check {
                Some(check) => {
                    let (findings, interval) = check.finish(examined.next_offset, &mut passed)?;
                    *wrong = findings.iter().any(|finding| finding.severity > Severity::Info);
                    examined.interval = examined.interval.or(interval.filter(|_| !*wrong));
                    examined.findings.extend(findings);
                }
                None => {
                    let find = Find::warning(Code::MissingIndex, 0, "the log is there, this index of it is not");
                    examined.findings.push(find.of(self.path(base, kind)));
                }
            }
        }
        let sum = self.check_sum(&examined, &*buffered)?;
        examined.findings.extend(sum.map(|find| find.of(self.path(base, Kind::Sum))));
        Ok(examined)
    }

    /// Walks the log from its first record to its end.
    fn walk(&self, of: Walked<'_>, indexes: &mut [Option<IndexCheck>; 2], passed: &mut Locator<'_>) -> Result<Examined> {
        let Walked { log, path, base, role, len, entries } = of;
        let mut scanner = scanner(log, path, (base, 0), len);
        let through = self.checkpoint.filter(|checkpoint| checkpoint.base == base);
        let (mut findings, mut timestamps, mut latest, mut checkpoint) = (Vec::new(), None, 0, through.map(|_| (0, false)));
        let flaw = loop {
            let place = (scanner.position(), scanner.offset());
            if through.is_some_and(|through| (through.position, through.next_offset) == place) {
                checkpoint = Some((latest, true));
            }
            match scanner.next()? {
                Step::Record(found) => {
                    let (earliest, before) = timestamps.unwrap_or((found.timestamp, 0));
                    if found.timestamp < before {
                        let sentence = format!("the record {} is stamped {}, the one before it {before}", found.offset, found.timestamp);
                        findings.push(Find::warning(Code::TimestampBackwards, found.position, sentence).of(path));
                    }
                    timestamps = Some((earliest, found.timestamp));
                    latest = found.timestamp.max(latest);
                    passed.note(&found);
                    for check in indexes.iter_mut().flatten() {
                        check.pass(&found, passed)?;
                    }
                }
                Step::End => break None,
                Step::Flawed(flaw) => break Some(flaw),
            }
        };
        let (valid_end, next_offset) = (scanner.position(), scanner.offset());
        Ok(Examined {
            base,
            role,
            len,
            valid_end,
            next_offset,
            flaw,
            timestamps,
            checkpoint,
            latest,
            entries,
            interval: None,
            wrong: [false; 2],
            findings,
        })
    }

    /// Says what lies behind the last whole record.
    fn judge_end(&self, examined: &mut Examined, log: &dyn File, path: &Path) -> Result<()> {
        let (at, len, is_last) = (examined.valid_end, examined.len, examined.role.is_last);
        let Some(flaw) = examined.flaw else {
            if at < len {
                let code = Code::ZeroTail;
                let bytes = len - at;
                examined.findings.push(if is_last {
                    Find::info(code, at, format!("{bytes} zeros, room for later records")).of(path)
                } else {
                    Find::warning(code, at, format!("{bytes} zeros, and a sealed log ends with its last record")).of(path)
                });
            }
            return Ok(());
        };
        if examined.role.may_change && heals(self.disk, path, (examined.next_offset, at), self.patience)? {
            examined.flaw = None;
            let told = "appends were under way; the log was checked up to here";
            examined.findings.push(Find::info(Code::UnderWay, at, told).of(path));
            return Ok(());
        }
        let sentence = format!("where the record {} is expected: {flaw}", examined.next_offset);
        examined.findings.push(Find::error(code_of(flaw), at, sentence).of(path));
        let found = Survivors::search(log, at..len, examined.next_offset).map_err(Error::io("read", path))?;
        let searched = found.searched_to - at;
        if let Some(first) = found.first {
            let sentence = format!("{} whole records lie behind the damage, as far as it was searched: {searched} bytes", found.newer);
            examined.findings.push(Find::error(Code::RecordsAfterDamage, first, sentence).of(path));
        }
        if found.older > 0 {
            let sentence = format!("{} whole records with earlier offsets lie behind the end", found.older);
            examined.findings.push(Find::warning(Code::StaleRecords, at, sentence).of(path));
        }
        let is_told = |of: &Checkpoint| if of.base == examined.base { at < of.position } else { examined.next_offset < of.next_offset };
        if is_last && !self.checkpoint.is_some_and(is_told) {
            let known = if self.checkpoint.is_some() { "the checkpoint" } else { "any checkpoint" };
            let told = format!("a torn tail: {known} does not say that it was ever acknowledged, and opening cuts it");
            examined.findings.push(Find::info(Code::TornTail, at, told).of(path));
        }
        Ok(())
    }

    fn check_sum(&self, examined: &Examined, log: &dyn File) -> Result<Option<Find>> {
        let path = self.path(examined.base, Kind::Sum);
        let held = match self.is_irregular(examined.base, Kind::Sum) {
            true => HeldSum::Nothing,
            false => Sum::look(self.disk, self.dir, examined.base).map_err(Error::io("read", &path))?,
        };
        let is_last = examined.role.is_last;
        let sum = match held {
            HeldSum::Nothing if is_last => return Ok(None),
            HeldSum::Nothing => return Ok(Some(Find::info(Code::SumMissing, 0, "no checksum of the whole sealed log stands beside it"))),
            _ if is_last => return Ok(Some(Find::warning(Code::SumOfActive, 0, "a checksum of a log that is not sealed"))),
            HeldSum::Unsound => return Ok(Some(Find::warning(Code::SumUnsound, 0, "no checksum of this log: it says nothing"))),
            HeldSum::Sound(sum) => sum,
        };
        // What a damaged record tells is not told again.
        if examined.flaw.is_some() {
            return Ok(None);
        }
        let (end, next) = (examined.valid_end, examined.next_offset);
        if (sum.bytes, sum.next_offset) != (end, next) {
            let Sum { bytes, next_offset, .. } = sum;
            let sentence = format!("sealed were {bytes} bytes with records up to {next_offset}; there are {end} bytes up to {next}");
            return Ok(Some(Find::error(Code::SumMismatch, 0, sentence)));
        }
        let computed = Sum::compute(log, examined.base, end, next).map_err(Error::io("read", &path))?;
        let sentence = || format!("the log has the checksum {:08x}, when it was sealed it was {:08x}", computed.crc, sum.crc);
        Ok((computed != sum).then(|| Find::error(Code::SumMismatch, 0, sentence())))
    }
}

/// Whether a place of a log that held no record, an offset and a position, holds one by and by, or nothing: a writer was at it.
pub(super) fn heals(disk: &dyn Disk, path: &Path, from: (u64, u64), patience: Duration) -> Result<bool> {
    for pause in pauses(patience) {
        // A writer of another process tells nobody.
        thread::sleep(pause);
        if !is_flawed(disk, path, from)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether what is at that place of a log now is neither a record nor nothing.
fn is_flawed(disk: &dyn Disk, path: &Path, from: (u64, u64)) -> Result<bool> {
    let log = open_log(disk, path)?;
    let len = log.0.len().map_err(Error::io("measure", path))?;
    if len < from.1 {
        return Ok(false);
    }
    match scanner(&log, path, from, len).next() {
        Ok(Step::Flawed(_)) => Ok(true),
        Ok(Step::Record(_) | Step::End) => Ok(false),
        // Cut between the two looks.
        Err(error) if has_moved(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a file is shorter than it was a moment ago, or gone.
pub(super) fn has_moved(error: &Error) -> bool {
    use std::io::ErrorKind::{NotFound, UnexpectedEof};
    matches!(error, Error::Io { source, .. } if matches!(source.kind(), NotFound | UnexpectedEof))
}

fn code_of(flaw: Flaw) -> Code {
    match flaw {
        Flaw::TornHeader { .. } => Code::TornHeader,
        Flaw::OffsetGap { found, expected } if found > expected => Code::OffsetGap,
        Flaw::OffsetGap { .. } => Code::OffsetBackwards,
        Flaw::BadLength { size, keylen, .. } if keylen > size => Code::KeylenGtSize,
        Flaw::BadLength { .. } => Code::BodyPastEnd,
        Flaw::BadChecksum { .. } => Code::CrcMismatch,
    }
}
