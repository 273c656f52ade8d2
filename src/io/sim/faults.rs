//! What goes wrong when: faults by script and by chance, and the record of what was done.

use std::path::{Path, PathBuf};

use super::rng::Rng;
use super::to_u64;
use super::tree::Ino;

/// What an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OpKind {
    /// Opening a file that must be there.
    Open,
    /// Opening a file that may be made, or emptied.
    Create,
    /// Making a directory.
    CreateDir,
    /// Listing a directory.
    List,
    /// Renaming a file or a directory.
    Rename,
    /// Giving a file one more name.
    Link,
    /// Removing a file.
    RemoveFile,
    /// Removing a directory.
    RemoveDir,
    /// Making a directory's entries durable.
    SyncDir,
    /// Taking a lock.
    Lock,
    /// Making a ring.
    Ring,
    /// Asking for a file's length.
    Len,
    /// Reading, through a ring or not.
    Read,
    /// Writing, through a ring or not.
    Write,
    /// Cutting or extending a file.
    SetLen,
    /// Allocating room for a file.
    Allocate,
    /// Making a file's bytes and length durable.
    Sync,
}

impl OpKind {
    /// Whether it changes what is on the disk, or what of it is durable. These are what
    /// [`SimDisk::crash_at_op`](super::SimDisk::crash_at_op) counts.
    pub fn changes_state(self) -> bool {
        !matches!(self, Self::Open | Self::List | Self::Lock | Self::Ring | Self::Len | Self::Read)
    }

    pub(super) fn moves_bytes(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }
}

/// What a fault does to its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing is done; it fails with this errno. A failed [`OpKind::Sync`] also leaves everything that was not durable
    /// as the kernel does: taken for clean, so that a later sync succeeds and does not make it durable either.
    Error(i32),
    /// A read or a write moves at most so many bytes.
    Short(usize),
    /// A read or a write moves some of its bytes, by the seed: one at least, and on a direct file whole sectors of 512.
    ShortBySeed,
    /// A write puts so many of its bytes where reads see them, none durably, and then fails with this errno.
    ErrorAfterPartial {
        /// So many, or all if there are fewer.
        bytes: usize,
        /// The error.
        errno: i32,
    },
    /// From this operation on everything fails, until [`SimDisk::crash_process`](super::SimDisk::crash_process) or a power loss.
    /// This one is not performed, but a write was on its way: what comes next may leave a part of it.
    Crash,
    /// Nothing is done; the calling thread panics.
    Panic,
}

/// A fault to come, once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Which operations count.
    pub on: OpKind,
    /// Only those whose path (the one that the file was opened by; for a rename or a link either) ends like this.
    pub path_suffix: Option<String>,
    /// The how manieth of those from now on, 1 = the next.
    pub nth: u64,
    /// What happens to it.
    pub effect: Effect,
}

impl Fault {
    /// On the next operation of this kind.
    pub fn next(on: OpKind, effect: Effect) -> Self {
        Self { on, path_suffix: None, nth: 1, effect }
    }

    /// Counts only operations on paths that end like this.
    #[must_use]
    pub fn path(self, suffix: &str) -> Self {
        Self { path_suffix: Some(suffix.to_owned()), ..self }
    }

    /// On the how manieth, 1 = the next.
    #[must_use]
    pub fn nth(self, nth: u64) -> Self {
        Self { nth, ..self }
    }
}

/// A fault by chance, as long as it is not cleared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RandomFault {
    /// Which operations.
    pub on: OpKind,
    /// Only those whose path ends like this.
    pub path_suffix: Option<String>,
    /// Chance in a million: 1,000,000 is always.
    pub per_million: u32,
    /// What happens to them.
    pub effect: Effect,
}

/// One operation that was performed, or failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpRecord {
    /// Counts all operations since the disk was made, from 1; the order in which they took effect.
    pub seq: u64,
    /// What it was.
    pub kind: OpKind,
    /// What it was done to; for a file, the path that it was opened by.
    pub path: PathBuf,
    /// The new name, for a rename or a link.
    pub to: Option<PathBuf>,
    /// Where in the file; the new length for [`OpKind::SetLen`].
    pub position: u64,
    /// Bytes asked for.
    pub len: u64,
    /// Whether a write asked to be durable.
    pub durable: bool,
    /// Whether it succeeded, if only in part.
    pub ok: bool,
}

/// An operation about to be performed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) kind: OpKind,
    pub(super) path: &'a Path,
    pub(super) to: Option<&'a Path>,
    /// The open file, where there is one.
    pub(super) file: Option<Ino>,
    pub(super) position: u64,
    pub(super) len: u64,
    /// What a write writes.
    pub(super) bytes: &'a [u8],
    pub(super) durable: bool,
    pub(super) direct: bool,
}

impl<'a> Call<'a> {
    pub(super) fn new(kind: OpKind, path: &'a Path) -> Self {
        Self { kind, path, to: None, file: None, position: 0, len: 0, bytes: &[], durable: false, direct: false }
    }

    pub(super) fn at(self, position: u64, len: u64) -> Self {
        Self { position, len, ..self }
    }

    pub(super) fn writes(self, bytes: &'a [u8], position: u64, durable: bool) -> Self {
        Self { bytes, durable, ..self.at(position, to_u64(bytes.len())) }
    }

    pub(super) fn is(&self, kind: OpKind, suffix: Option<&str>) -> bool {
        let ends = |path: &Path| suffix.is_none_or(|suffix| path.to_string_lossy().ends_with(suffix));
        self.kind == kind && (ends(self.path) || self.to.is_some_and(ends))
    }

    pub(super) fn record(&self, seq: u64, ok: bool) -> OpRecord {
        let Self { kind, position, len, durable, .. } = *self;
        OpRecord { seq, kind, path: self.path.to_owned(), to: self.to.map(Path::to_owned), position, len, durable, ok }
    }
}

/// All faults to come.
#[derive(Debug, Default)]
pub(super) struct Script {
    scripted: Vec<Fault>,
    random: Vec<RandomFault>,
    /// State-changing operations until the crash, this one included.
    crash_in: Option<u64>,
}

impl Script {
    pub(super) fn fail(&mut self, fault: Fault) {
        assert!(fault.nth > 0, "faults count from 1, the next operation");
        check(fault.on, fault.effect);
        self.scripted.push(fault);
    }

    pub(super) fn fail_by_chance(&mut self, fault: RandomFault) {
        assert!(fault.per_million <= 1_000_000, "a chance is at most certain");
        check(fault.on, fault.effect);
        self.random.push(fault);
    }

    pub(super) fn crash_in(&mut self, count: Option<u64>) {
        assert!(count != Some(0), "operations count from 1, the next");
        self.crash_in = count;
    }

    /// What is to happen to this operation, if anything. The first that applies wins; all count it.
    pub(super) fn decide(&mut self, call: &Call<'_>, rng: &mut Rng) -> Option<Effect> {
        let mut effect = None;
        if call.kind.changes_state()
            && let Some(left) = &mut self.crash_in
        {
            *left -= 1;
            if *left == 0 {
                self.crash_in = None;
                effect = Some(Effect::Crash);
            }
        }
        self.scripted.retain_mut(|fault| {
            if !call.is(fault.on, fault.path_suffix.as_deref()) {
                return true;
            }
            fault.nth -= 1;
            if fault.nth == 0 {
                effect = effect.or(Some(fault.effect));
            }
            fault.nth > 0
        });
        for fault in &self.random {
            if call.is(fault.on, fault.path_suffix.as_deref()) && rng.below(1_000_000) < u64::from(fault.per_million) {
                effect = effect.or(Some(fault.effect));
            }
        }
        effect
    }
}

fn check(on: OpKind, effect: Effect) {
    let fits = match effect {
        Effect::Short(_) | Effect::ShortBySeed => on.moves_bytes(),
        Effect::ErrorAfterPartial { .. } => on == OpKind::Write,
        Effect::Error(_) | Effect::Crash | Effect::Panic => true,
    };
    assert!(fits, "{effect:?} means nothing for {on:?}");
}
