//! Counters of one partition, since it was opened.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a partition did since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Commits written: each one write to the device or the kernel, for all batches that waited.
    pub commits: u64,
    /// Records in them.
    pub records: u64,
    /// Bytes of those records, headers counted.
    pub bytes: u64,
    /// Segments opened after the first.
    pub rolls: u64,
    /// Syncs of the log other than commits that are durable by themselves.
    pub syncs: u64,
}

/// The live counters: written by one thread, read by any. Each is right by itself; together they may be a moment apart.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    commits: AtomicU64,
    records: AtomicU64,
    bytes: AtomicU64,
    rolls: AtomicU64,
    syncs: AtomicU64,
}

impl Metrics {
    pub(crate) fn commit(&self, records: u64, bytes: u64) {
        self.commits.fetch_add(1, Ordering::Relaxed);
        self.records.fetch_add(records, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn roll(&self) {
        self.rolls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn sync(&self) {
        self.syncs.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Stats {
        Stats {
            commits: self.commits.load(Ordering::Relaxed),
            records: self.records.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            rolls: self.rolls.load(Ordering::Relaxed),
            syncs: self.syncs.load(Ordering::Relaxed),
        }
    }
}
