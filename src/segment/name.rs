//! Names of a segment's files: 20 digits and what they hold. Pure.
//!
//! The log is the segment; every other file says something of it that the log can say anew.

use std::ffi::OsStr;
use std::fmt;

const UNFINISHED: &str = ".tmp";

/// Which of a segment's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Log,
    Index,
    TimeIndex,
    /// The checksum of the whole log, once that is sealed.
    Sum,
}

impl Kind {
    /// All that are made from the log.
    pub(crate) const DERIVED: [Self; 3] = [Self::Sum, Self::TimeIndex, Self::Index];

    fn extension(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Index => "index",
            Self::TimeIndex => "timeindex",
            Self::Sum => "sum",
        }
    }
}

/// A segment file's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) base: u64,
    pub(crate) kind: Kind,
}

impl Name {
    /// The name's parts; none for a name that is not exactly 20 digits within 64 bits and one of the four extensions.
    pub(crate) fn parse(name: &OsStr) -> Option<Self> {
        let (digits, extension) = name.to_str()?.split_once('.')?;
        let kind = [Kind::Log, Kind::Index, Kind::TimeIndex, Kind::Sum].into_iter().find(|kind| kind.extension() == extension)?;
        let twenty_digits = digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit());
        let base = twenty_digits.then(|| digits.parse().ok()).flatten()?;
        Some(Self { base, kind })
    }

    /// What a file that is derived from the log is called until it is whole.
    pub(crate) fn unfinished(self) -> String {
        format!("{self}{UNFINISHED}")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:020}.{}", self.base, self.kind.extension())
    }
}

/// Whether a file is called as one that is derived from a log and not whole yet. Logs are never made that way.
pub(super) fn is_unfinished(name: &OsStr) -> bool {
    let whole = name.to_str().and_then(|name| name.strip_suffix(UNFINISHED)).map(OsStr::new);
    whole.and_then(Name::parse).is_some_and(|name| name.kind != Kind::Log)
}

/// The name of a file of the next segment before its base is known.
pub(crate) fn prepared_name(kind: Kind) -> String {
    format!("prepared.{}", kind.extension())
}

/// Whether a file is called as one of those.
pub(crate) fn is_prepared(name: &OsStr) -> bool {
    [Kind::Log, Kind::Index, Kind::TimeIndex].into_iter().any(|kind| name == OsStr::new(&prepared_name(kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_names_are_segments() {
        for base in [0, 6, 1_000_000_000_000, u64::MAX] {
            for kind in [Kind::Log, Kind::Index, Kind::TimeIndex, Kind::Sum] {
                let name = Name { base, kind };
                assert_eq!(Name::parse(OsStr::new(&name.to_string())), Some(name));
                assert_eq!(Name::parse(OsStr::new(&name.unfinished())), None);
                assert_eq!(is_unfinished(OsStr::new(&name.unfinished())), kind != Kind::Log);
                assert!(!is_unfinished(OsStr::new(&name.to_string())));
            }
        }
        for wrong in [
            "",
            ".log",
            "0000000000000000000.log",
            "000000000000000000000.log",
            "99999999999999999999.log",
            "+0000000000000000000.log",
            "-0000000000000000001.log",
            " 0000000000000000000.log",
            "00000000000000000000.LOG",
            "00000000000000000000.log.tmp",
            "00000000000000000000.115.torn",
            "00000000000000000000.logs",
            "00000000000000000000",
            "0000000000000000000x.log",
            "prepared.log",
        ] {
            assert_eq!(Name::parse(OsStr::new(wrong)), None, "{wrong:?}");
        }
    }
}
