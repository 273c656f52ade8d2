//! How far ahead of the records space is written with zeros, and when that pays.
//!
//! Allocated space is not yet written space: on ext4 and xfs the first write into it changes the file's map, and a durable
//! write then waits for the file system's journal. Zeros that were written before take that out of the commit, and cost their
//! own bytes in bandwidth. Which is more depends on the size of the commits and on the device, by a factor of ten from one to
//! the next, so it is measured as it goes: how long commits take into space that was written and into space that was not, and how
//! long zeros take. Zeros pay while
//!
//! ```text
//! time into unwritten space - time into written space  >  DEARER * time to write a commit's length of zeros
//! ```
//!
//! (perf/README.md, "Zeros ahead", shows where that is on one machine.) What is not known yet is found out: commits of up to
//! [`WORTH_TRYING`] are given some written space, now and then again. As much is kept ahead as was written since the partition
//! was opened, within bounds, so that a thousand partitions of a few records each do not write gigabytes; and in pieces that
//! keep the device busy for no longer than a slow append takes anyway.

use std::ops::Range;
use std::time::Duration;

use crate::io::BLOCK;

/// A byte of zeros is counted so many times: it also costs journal commits of its own, and makes commits beside it wait.
const DEARER: f64 = 2.0;

/// Larger commits, in the mean, are never given zeros: their own write dwarfs what could be saved.
const WORTH_TRYING: u64 = 512 << 10;

/// Measured before anything is decided, and how much is written before it is measured anew.
const SAMPLES: u32 = 8;
const MEASURED_ANEW_AFTER: u64 = 256 << 20;

/// Bytes that are kept ahead, and bytes of one piece; of either more where commits are as large.
const LEAST: u64 = 256 << 10;
const MOST: u64 = 2 << 20;
const PIECE: u64 = 256 << 10;

/// What decides it.
#[derive(Debug, Default)]
pub(super) struct ZeroAhead {
    /// Bytes per commit, smoothed.
    typical: u64,
    /// Bytes written since the partition was opened.
    written: u64,
    /// Seconds per commit of about `timed_at` bytes, into unwritten and into written space.
    commits: [Mean; 2],
    timed_at: u64,
    timed_until: u64,
    /// Seconds per byte of zeros.
    zeros: Mean,
    /// Zeros could not be written once, or are of no use on this file system.
    off: bool,
}

/// A smoothed mean.
#[derive(Debug, Default, Clone, Copy)]
struct Mean {
    value: f64,
    samples: u32,
}

impl Mean {
    fn add(&mut self, sample: f64) {
        self.samples = self.samples.saturating_add(1);
        // The plain mean at first, then the last ones count.
        self.value += (sample - self.value) / f64::from(self.samples.min(4 * SAMPLES));
    }

    fn known(&self) -> Option<f64> {
        (self.samples >= SAMPLES).then_some(self.value)
    }
}

impl ZeroAhead {
    /// A commit of so many bytes was written in so long, all into space that was written before, or not.
    pub(super) fn commit(&mut self, bytes: u64, took: Duration, into_written: bool) {
        self.typical = if self.written == 0 { bytes } else { (self.typical * 7 + bytes) / 8 };
        self.written = self.written.saturating_add(bytes);
        if !is_like(self.typical, self.timed_at) || self.written > self.timed_until {
            (self.commits, self.zeros) = Default::default();
            self.timed_at = self.typical;
            self.timed_until = self.written.saturating_add(MEASURED_ANEW_AFTER);
        }
        if is_like(bytes, self.timed_at) {
            self.commits[usize::from(into_written)].add(took.as_secs_f64());
        }
    }

    /// So many bytes of zeros took so long.
    pub(super) fn zeros(&mut self, bytes: u64, took: Duration) {
        if bytes > 0 {
            self.zeros.add(took.as_secs_f64() / float(bytes));
        }
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
        if self.off || !self.has_begun() || self.typical > WORTH_TRYING {
            return false;
        }
        let [unwritten, written] = self.commits;
        // While zeros are ahead, nothing is written into unwritten space: that is measured first.
        let Some(unwritten) = unwritten.known() else { return false };
        match (written.known(), self.zeros.known()) {
            (Some(written), Some(zeros)) => unwritten - written > DEARER * zeros * float(self.timed_at),
            _ => true,
        }
    }

    /// Bytes to keep ahead.
    fn distance(&self) -> u64 {
        self.written.clamp(LEAST, MOST).max(4 * self.typical).next_multiple_of(BLOCK)
    }

    /// Bytes of one piece: a commit finds room in it.
    fn piece(&self) -> u64 {
        PIECE.max(2 * self.typical).min(self.distance() / 2).next_multiple_of(BLOCK)
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
        let range = start..(allocated - allocated % BLOCK).min(start.saturating_add(self.piece()));
        (!range.is_empty()).then_some(range)
    }

    /// How much of the segment that comes next is written ahead, with room for `allocated` bytes in it.
    pub(super) fn of_next_segment(&self, allocated: u64) -> u64 {
        if self.pays() { self.written.min(allocated) / BLOCK * BLOCK } else { 0 }
    }
}

/// Whether commits of these sizes take about as long.
fn is_like(bytes: u64, other: u64) -> bool {
    bytes <= other.saturating_mul(2) && other <= bytes.saturating_mul(2)
}

/// For ratios: what is lost beyond 2^53 does not matter.
#[allow(clippy::cast_precision_loss, reason = "bytes of a commit or of a piece of zeros are far below 2^53")]
fn float(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device: seconds of a commit of so many bytes into unwritten and written space, and of a byte of zeros.
    #[derive(Clone, Copy)]
    struct Device {
        journal: f64,
        commit: f64,
        byte: f64,
    }

    impl Device {
        /// Writes so many bytes in commits of one size; zeros go ahead whenever they are asked for.
        fn write(self, zeros: &mut ZeroAhead, commit: u64, total: u64) -> u64 {
            let (mut end, mut zeroed, mut written_ahead) = (0, 0, 0);
            while end < total {
                if let Some(range) = zeros.next(end, zeroed, u64::MAX) {
                    zeroed = range.end;
                    written_ahead += range.end - range.start;
                    zeros.zeros(range.end - range.start, Duration::from_secs_f64(self.byte * float(range.end - range.start)));
                }
                let into_written = end + commit <= zeroed;
                let journal = if into_written { 0.0 } else { self.journal };
                zeros.commit(commit, Duration::from_secs_f64(self.commit + self.byte * float(commit) + journal), into_written);
                end += commit;
                zeroed = zeroed.max(end.next_multiple_of(BLOCK));
            }
            written_ahead
        }
    }

    /// About what was measured on a slow and on a fast virtual disk: 1.4 ns and 0.35 ns per byte.
    const SLOW: Device = Device { journal: 80e-6, commit: 120e-6, byte: 1.4e-9 };
    const FAST: Device = Device { journal: 150e-6, commit: 95e-6, byte: 0.35e-9 };

    #[test]
    fn zeros_go_ahead_of_commits_for_which_they_pay() {
        let total = 64 << 20;
        for (device, commit, pays) in [
            (SLOW, 4 << 10, true),
            (SLOW, 16 << 10, true),
            (SLOW, 128 << 10, false),
            (SLOW, 1 << 20, false),
            (FAST, 4 << 10, true),
            (FAST, 128 << 10, true),
            (FAST, 400 << 10, false),
            (FAST, 1 << 20, false),
        ] {
            let mut zeros = ZeroAhead::default();
            let ahead = device.write(&mut zeros, commit, total);
            assert_eq!(zeros.pays(), pays, "commits of {commit}");
            // Finding out costs little where it does not pay; where it does, nearly everything is written ahead.
            let bounds = if pays { total / 2..2 * total } else { 0..total / 8 };
            assert!(bounds.contains(&ahead), "commits of {commit}: {ahead} bytes ahead");
        }
    }

    #[test]
    fn a_load_that_changes_is_judged_anew() {
        let mut zeros = ZeroAhead::default();
        SLOW.write(&mut zeros, 8 << 10, 8 << 20);
        assert!(zeros.pays());
        SLOW.write(&mut zeros, 200 << 10, 64 << 20);
        assert!(!zeros.pays());
        SLOW.write(&mut zeros, 8 << 10, 8 << 20);
        assert!(zeros.pays());
        // So is a device that changes.
        SLOW.write(&mut zeros, 128 << 10, 64 << 20);
        assert!(!zeros.pays());
        FAST.write(&mut zeros, 128 << 10, 2 * MEASURED_ANEW_AFTER);
        assert!(zeros.pays());
        zeros.stop();
        assert!(!zeros.pays() && zeros.next(0, 0, 1 << 30).is_none());
    }

    #[test]
    fn as_much_as_was_written_and_never_beyond_the_room() {
        let after = |count: u32, bytes: u64| {
            let mut zeros = ZeroAhead::default();
            (0..count).for_each(|_| zeros.commit(bytes, Duration::from_micros(100), false));
            zeros
        };
        assert!(!after(0, 0).pays() && !after(SAMPLES - 1, 1000).pays());
        let idle = after(SAMPLES, 1000);
        assert_eq!(idle.next(1000, 4096, 1 << 30), Some(4096..4096 + LEAST / 2));
        assert_eq!(idle.next(1000, 4096, 5000), None);
        assert_eq!(idle.next(1000, 4096, 9000), Some(4096..8192));
        let busy = after(100_000, 1000);
        assert_eq!(busy.next(10 << 20, 10 << 20, 1 << 30), Some(10 << 20..(10 << 20) + PIECE));
        assert_eq!(busy.next(10 << 20, (11 << 20) + 1, 1 << 30), None);
        // Overtaken: what lies between is written by the commits themselves.
        assert_eq!(busy.next((20 << 20) + 1, 15 << 20, 1 << 30), Some((20 << 20) + 4096..(20 << 20) + 4096 + PIECE));
        assert_eq!(busy.of_next_segment(64 << 20), 64 << 20);
        assert_eq!(idle.of_next_segment(64 << 20), 4096);
        assert_eq!(after(SAMPLES, 1 << 20).of_next_segment(64 << 20), 0);
    }
}
