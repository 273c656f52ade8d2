//! What verifying finds: where, which kind, how grave, and a sentence.

use std::fmt;
use std::path::PathBuf;

/// How grave a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Legal, and worth knowing.
    Info,
    /// Not as it should be, and no record suffers: opening mends it.
    Warning,
    /// Something that should be there or hold is not, or does not.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The file that it is about.
    pub path: PathBuf,
    /// Where in the file, in bytes.
    pub position: u64,
    /// Which kind.
    pub code: Code,
    /// How grave.
    pub severity: Severity,
    /// What it is, for people.
    pub sentence: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, position, code, severity, sentence } = self;
        write!(f, "{severity}: {code} at {position} of {}: {sentence}", path.display())
    }
}

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// The kinds of findings. Their texts do not change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $($(#[$doc])* #[doc = concat!("`", $text, "`.")] $variant,)*
        }

        impl Code {
            /// The text that programs know it by.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }
    };
}

codes! {
    /// A partition of a topic has no directory.
    PartitionMissing = "PARTITION_MISSING",
    /// A topic's settings say nothing.
    SettingsUnsound = "SETTINGS_UNSOUND",
    /// A log ends within a header.
    TornHeader = "TORN_HEADER",
    /// A record's offset is later than the one expected.
    OffsetGap = "OFFSET_GAP",
    /// A record's offset is earlier than the one expected.
    OffsetBackwards = "OFFSET_BACKWARDS",
    /// A record's key would be longer than key and value.
    KeylenGtSize = "KEYLEN_GT_SIZE",
    /// A record would end behind the end of its log.
    BodyPastEnd = "BODY_PAST_END",
    /// A record's timestamp, key or value is not what was written.
    CrcMismatch = "CRC_MISMATCH",
    /// Whole records with later offsets lie behind a damage.
    RecordsAfterDamage = "RECORDS_AFTER_DAMAGE",
    /// Whole records with earlier offsets lie behind a damage.
    StaleRecords = "STALE_RECORDS",
    /// What ends the active log was never shown to be acknowledged: opening cuts it.
    TornTail = "TORN_TAIL",
    /// Records that the checkpoint says were on the device are damaged or gone.
    DurableRecordsLost = "DURABLE_RECORDS_LOST",
    /// A log ends with zeros: room for later records, if it is the active one.
    ZeroTail = "ZERO_TAIL",
    /// A record is stamped earlier than the one before it.
    TimestampBackwards = "TIMESTAMP_BACKWARDS",
    /// Records are missing before this segment.
    SegmentGap = "SEGMENT_GAP",
    /// The segment before this one holds offsets of it.
    SegmentOverlap = "SEGMENT_OVERLAP",
    /// A segment that others follow holds no record.
    EmptySealedSegment = "EMPTY_SEALED_SEGMENT",
    /// A log without one of its index files.
    MissingIndex = "MISSING_INDEX",
    /// Files of a log that is not there.
    OrphanIndex = "ORPHAN_INDEX",
    /// An index without an entry beside a log with records.
    EmptyIndex = "EMPTY_INDEX",
    /// An index ends within an entry.
    PartialEntry = "PARTIAL_ENTRY",
    /// An entry of zeros: room for later entries, if nothing follows in the active segment.
    ZeroEntry = "ZERO_ENTRY",
    /// An entry of an offset before the segment's first.
    EntryBeforeBase = "ENTRY_BEFORE_BASE",
    /// An entry of a record that the log does not hold.
    EntryPastLog = "ENTRY_PAST_LOG",
    /// An entry leads to another place than its record's.
    WrongPosition = "WRONG_POSITION",
    /// An entry has another timestamp than its record.
    WrongTimestamp = "WRONG_TIMESTAMP",
    /// An entry's offset is not later than that of the entry before.
    OffsetNotIncreasing = "OFFSET_NOT_INCREASING",
    /// An entry's position is not behind that of the entry before.
    PositionNotIncreasing = "POSITION_NOT_INCREASING",
    /// An entry's timestamp is earlier than that of the entry before.
    TimestampNotMonotonic = "TIMESTAMP_NOT_MONOTONIC",
    /// There is more to find in this file, and it was not looked for.
    MoreFindings = "MORE_FINDINGS",
    /// A sealed log has no checksum beside it.
    SumMissing = "SUM_MISSING",
    /// The file with a log's checksum says nothing.
    SumUnsound = "SUM_UNSOUND",
    /// A sealed log is not the one whose checksum stands beside it.
    SumMismatch = "SUM_MISMATCH",
    /// A checksum of a log that is not sealed.
    SumOfActive = "SUM_OF_ACTIVE",
    /// No slot of the checkpoint is sound.
    CheckpointUnsound = "CHECKPOINT_UNSOUND",
    /// The checkpoint does not fit what is there.
    CheckpointUnfit = "CHECKPOINT_UNFIT",
    /// A note beside the segments says nothing.
    NoteUnsound = "NOTE_UNSOUND",
    /// A file that an interruption left unfinished.
    Unfinished = "UNFINISHED",
    /// Bytes that were set aside earlier.
    SetAside = "SET_ASIDE",
    /// A name that is none of a partition's.
    StrayFile = "STRAY_FILE",
    /// A directory, link or special file.
    NotARegularFile = "NOT_A_REGULAR_FILE",
    /// Appends were under way while the log was read.
    UnderWay = "UNDER_WAY",
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a thing that was found is, before it is known where.
pub(super) struct Find {
    pub(super) code: Code,
    pub(super) severity: Severity,
    pub(super) position: u64,
    pub(super) sentence: String,
}

impl Find {
    pub(super) fn error(code: Code, position: u64, sentence: impl Into<String>) -> Self {
        Self { code, severity: Severity::Error, position, sentence: sentence.into() }
    }

    pub(super) fn warning(code: Code, position: u64, sentence: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(code, position, sentence) }
    }

    pub(super) fn info(code: Code, position: u64, sentence: impl Into<String>) -> Self {
        Self { severity: Severity::Info, ..Self::error(code, position, sentence) }
    }

    pub(super) fn of(self, path: impl Into<PathBuf>) -> Finding {
        let Self { code, severity, position, sentence } = self;
        Finding { path: path.into(), position, code, severity, sentence }
    }
}
