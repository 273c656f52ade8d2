//! How far ahead of the records space is written with zeros, and when that pays.
//!
//! Allocated space is not yet written space: on ext4 and xfs the first write into it changes the file's map, and a durable
//! write then waits for the file system's journal. Zeros that were written before take that out of the commit. They cost
//! their own bytes in bandwidth, and one journal commit per piece, which the next append pays for. Hence
//!
//! - only while commits are small: above [`PAYS_BELOW`] the bandwidth that zeros take from the commits is worth more than
//!   what they save (perf/README.md shows the crossover);
//! - in proportion to what was written, so that a thousand partitions of a few records each do not write gigabytes;
//! - in pieces that keep the device busy for less time than a slow append takes anyway.

use std::ops::Range;

use crate::io::BLOCK;

/// Commits of more bytes, in the mean, are not worth zeros ahead of them. See perf/README.md, "Zeros ahead".
pub(super) const PAYS_BELOW: u64 = 32 << 10;

/// Bytes that are kept ahead: as many as were written since the partition was opened, within these bounds.
const LEAST: u64 = 256 << 10;
const MOST: u64 = 2 << 20;

/// Bytes of one piece.
const PIECE: u64 = 256 << 10;

/// What decides it: how much was written, and how much at a time.
#[derive(Debug, Default)]
pub(super) struct ZeroAhead {
    /// Bytes per commit, smoothed.
    typical: u64,
    /// Bytes written since the partition was opened.
    written: u64,
    /// Zeros could not be written once, or are of no use on this file system.
    off: bool,
}

impl ZeroAhead {
    /// A commit of so many bytes was written.
    pub(super) fn commit(&mut self, bytes: u64) {
        self.typical = if self.written == 0 { bytes } else { (self.typical * 7 + bytes) / 8 };
        self.written = self.written.saturating_add(bytes);
    }

    /// No zeros from now on.
    pub(super) fn stop(&mut self) {
        self.off = true;
    }

    /// Whether anything was written since the partition was opened: one that is only read needs nothing ahead.
    pub(super) fn has_begun(&self) -> bool {
        self.written > 0
    }

    pub(super) fn pays(&self) -> bool {
        !self.off && self.has_begun() && self.typical <= PAYS_BELOW
    }

    /// Bytes to keep ahead.
    fn distance(&self) -> u64 {
        self.written.clamp(LEAST, MOST).next_multiple_of(BLOCK)
    }

    /// The piece to write next, whole blocks; none if there is enough, or no room. The log's records, those on their way
    /// included, end at `end`; up to `zeroed` everything was written before; there is room up to `allocated`.
    pub(super) fn next(&self, end: u64, zeroed: u64, allocated: u64) -> Option<Range<u64>> {
        let distance = self.distance();
        if !self.pays() || zeroed > end.saturating_add(distance / 2) {
            return None;
        }
        // What is behind is left to the commits: they are faster than the zeros just now.
        let start = zeroed.max(end).next_multiple_of(BLOCK);
        let range = start..(allocated - allocated % BLOCK).min(start.saturating_add(PIECE.min(distance / 2)));
        (!range.is_empty()).then_some(range)
    }

    /// How much of the segment that comes next is written ahead, with room for `allocated` bytes in it.
    pub(super) fn of_next_segment(&self, allocated: u64) -> u64 {
        if self.pays() { self.written.min(allocated) / BLOCK * BLOCK } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(commits: &[u64]) -> ZeroAhead {
        let mut zeros = ZeroAhead::default();
        commits.iter().for_each(|&bytes| zeros.commit(bytes));
        zeros
    }

    #[test]
    fn only_small_commits_are_worth_it() {
        assert!(!after(&[]).pays());
        assert!(after(&[100]).pays() && after(&[PAYS_BELOW]).pays());
        assert!(!after(&[PAYS_BELOW + 1]).pays() && !after(&[1 << 20]).pays());
        // A single large one among small ones changes nothing for long; a load that changed does.
        let mut zeros = after(&[1000; 50]);
        zeros.commit(200_000);
        zeros.commit(1000);
        assert!(zeros.pays());
        (0..20).for_each(|_| zeros.commit(200_000));
        assert!(!zeros.pays());
        (0..40).for_each(|_| zeros.commit(1000));
        assert!(zeros.pays());
        zeros.stop();
        assert!(!zeros.pays() && zeros.next(0, 0, 1 << 30).is_none());
    }

    #[test]
    fn as_much_as_was_written_and_never_beyond_the_room() {
        assert_eq!(after(&[1000]).next(1000, 4096, 1 << 30), Some(4096..4096 + LEAST / 2));
        assert_eq!(after(&[1000]).next(1000, 4096, 5000), None);
        assert_eq!(after(&[1000]).next(1000, 4096, 9000), Some(4096..8192));
        let busy = after(&[1000; 100_000]);
        assert_eq!(busy.next(10 << 20, 10 << 20, 1 << 30), Some(10 << 20..(10 << 20) + PIECE));
        assert_eq!(busy.next(10 << 20, (11 << 20) + 1, 1 << 30), None);
        // Overtaken: what lies between is written by the commits themselves.
        assert_eq!(busy.next((20 << 20) + 1, 15 << 20, 1 << 30), Some((20 << 20) + 4096..(20 << 20) + 4096 + PIECE));
        assert_eq!(busy.of_next_segment(64 << 20), 64 << 20);
        assert_eq!(after(&[5000, 4000]).of_next_segment(64 << 20), 8192);
        assert_eq!(after(&[1 << 20]).of_next_segment(64 << 20), 0);
    }
}
